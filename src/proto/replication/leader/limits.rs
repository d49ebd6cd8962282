//! The bounds and intervals of shipping.

use std::time::Duration;

use crate::limits;

/// The bounds of one shard's shipping; the same for every shard of a broker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShipLimits {
    /// Payload bytes of one batch, give or take one record.
    pub batch_bytes: u32,
    /// Records of one batch.
    pub batch_records: u32,
    /// Batches of one cursor on their way.
    pub window_batches: usize,
    /// Payload bytes of one cursor on their way; one batch may exceed it when it is alone.
    pub window_bytes: u64,
    /// First wait after `StaleRoute`; doubles.
    pub stale_base: Duration,
    pub stale_max: Duration,
    /// Ceiling of the first wait after a passing fault; doubles, with full jitter below it.
    pub passing_base: Duration,
    pub passing_max: Duration,
    /// First wait after `StorageFailed` and after a refused rebuild; doubles.
    pub failed_base: Duration,
    pub failed_max: Duration,
    /// First wait between two probes of a shard that is not open yet; doubles.
    pub probe_base: Duration,
    pub probe_max: Duration,
    /// How often a halted follower looks for a free rebuild slot.
    pub slot_poll: Duration,
    /// `LogGap` answers without progress, and damaged batches, before a wait.
    pub patience: u32,
}

impl Default for ShipLimits {
    fn default() -> Self {
        Self {
            batch_bytes: limits::SHIP_BATCH_BYTES,
            batch_records: limits::SHIP_BATCH_RECORDS,
            window_batches: limits::SHIP_WINDOW_BATCHES,
            window_bytes: limits::SHIP_WINDOW_BYTES,
            stale_base: Duration::from_millis(10),
            stale_max: Duration::from_secs(1),
            passing_base: Duration::from_millis(50),
            passing_max: Duration::from_secs(5),
            failed_base: Duration::from_secs(5),
            failed_max: Duration::from_secs(300),
            probe_base: Duration::from_millis(200),
            probe_max: Duration::from_secs(2),
            slot_poll: Duration::from_secs(1),
            patience: 3,
        }
    }
}
