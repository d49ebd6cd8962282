//! What a core's storage needs to be told, and what it makes of it.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::error::StorageError;
use crate::faults::FaultPlan;
use crate::format::segment::{MAX_SEGMENT_BYTES, MIN_SEGMENT_BYTES};
use crate::format::ALIGN;
use crate::recovery::SURVIVORS_MAX;

/// How a write is made durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SyncMethod {
    /// The segment is open with O_DSYNC: a completed write is durable. One operation per commit.
    ODsync,
    /// A write, then an fdatasync.
    Fdatasync,
}

/// Whether the zeros of a new segment are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SegmentZeros {
    /// Written beforehand, as far as the device has time for them: a commit is one write then. Not while commits
    /// are large, nor while one waits for the segment.
    WhileTheyPay,
    /// Segments are only allocated; a commit costs one of the file system's journal, too.
    Never,
}

/// Configuration of one core's storage.
#[derive(Debug, Clone)]
pub struct StorageConfig {
    /// Data directory of the broker.
    pub dir: PathBuf,
    /// This core.
    pub core_index: u16,
    /// Cores of this start. The core of a log must be a function of its name and this number.
    pub core_count: u16,
    /// Size of a segment file.
    pub segment_bytes: u64,
    /// Bytes after which a commit group takes no further record.
    pub commit_max_bytes: usize,
    /// Bytes gathered that are worth a commit of their own while the caller is still appending: large enough
    /// that the device's cost of a write does not show, small enough that the device need not stand idle.
    pub early_commit_bytes: usize,
    /// How long a group may wait for company; 0 commits whenever a slot is free.
    pub commit_max_delay_us: u32,
    /// Groups on their way to the device, 1 to 4.
    pub commits_in_flight: usize,
    /// How a commit becomes durable.
    pub sync: SyncMethod,
    /// Whether to bypass the page cache. Off only where the probe says it is impossible.
    pub direct_io: bool,
    /// Largest single transfer.
    pub max_transfer_bytes: usize,
    /// Bound of bytes appended and not yet durable.
    pub max_queued_bytes: usize,
    /// Files kept ready to become segments.
    pub prewritten_segments: usize,
    /// Whether their zeros are written.
    pub segment_zeros: SegmentZeros,
    /// Fewer ready files than this start the making of new ones, until all are ready again.
    pub refill_below_segments: usize,
    /// Bytes of durable groups kept in memory for readers.
    pub recent_bytes: usize,
    /// Reads of older data under way at once.
    pub max_reads: usize,
    /// Free space that is never used for segments, but for the first of a start, which then takes nothing but
    /// events: they give space back.
    pub reserve_bytes: u64,
    /// Free space below which the low-space warning is given.
    pub low_space_bytes: u64,
    /// Faults to inject; none in production.
    pub faults: Option<FaultPlan>,
}

impl StorageConfig {
    /// Defaults for one core.
    pub fn new(dir: impl Into<PathBuf>, core_index: u16, core_count: u16) -> Self {
        Self {
            dir: dir.into(),
            core_index,
            core_count,
            segment_bytes: 64 << 20,
            commit_max_bytes: 1 << 20,
            early_commit_bytes: 256 << 10,
            commit_max_delay_us: 0,
            commits_in_flight: 2,
            sync: SyncMethod::ODsync,
            direct_io: true,
            max_transfer_bytes: 1 << 20,
            max_queued_bytes: 64 << 20,
            prewritten_segments: 2,
            segment_zeros: SegmentZeros::WhileTheyPay,
            refill_below_segments: 2,
            recent_bytes: 16 << 20,
            max_reads: 256,
            reserve_bytes: 64 << 20,
            low_space_bytes: 1 << 30,
            faults: None,
        }
    }

    /// Checks every bound.
    pub fn check(&self) -> Result<(), StorageError> {
        let refuse = |text: String| Err(StorageError::Config(text));
        if !(MIN_SEGMENT_BYTES..=MAX_SEGMENT_BYTES).contains(&self.segment_bytes)
            || self.segment_bytes % ALIGN as u64 != 0
        {
            return refuse(format!(
                "segment bytes must be a multiple of 4096 from {MIN_SEGMENT_BYTES} to {MAX_SEGMENT_BYTES}, not {}",
                self.segment_bytes
            ));
        }
        if !(ALIGN..=64 << 20).contains(&self.commit_max_bytes) {
            return refuse(format!(
                "commit bytes must be 4 KiB to 64 MiB, not {}",
                self.commit_max_bytes
            ));
        }
        if !(1..=SURVIVORS_MAX + 1).contains(&self.commits_in_flight) {
            return refuse(format!(
                "commits in flight must be 1 to 4, not {}",
                self.commits_in_flight
            ));
        }
        if self.max_transfer_bytes < ALIGN || self.max_transfer_bytes % ALIGN != 0 {
            return refuse(format!(
                "transfer bytes must be a multiple of 4096, not {}",
                self.max_transfer_bytes
            ));
        }
        if self.core_index >= self.core_count {
            return refuse(format!("core {} of {}", self.core_index, self.core_count));
        }
        if self.max_queued_bytes < self.commit_max_bytes {
            return refuse("the queue must hold at least one commit".to_owned());
        }
        if self.prewritten_segments == 0 || self.max_reads == 0 {
            return refuse("prewritten segments and reads must be at least 1".to_owned());
        }
        Ok(())
    }
}
