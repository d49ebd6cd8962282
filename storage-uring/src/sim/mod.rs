//! Deterministic histories of one core's storage: the real machines over a model device.
//!
//! A seed draws what happens to a few logs of one core: appends, events, reads, writes that finish in any
//! order, torn sectors, full disks, failed syncs, power cuts, restarts, segments rewritten and given back. The
//! commit machine, its index and reads, rewriting and recovery are those of the crate; [`run_history`] checks
//! the contract of the logs at each step, and names the invariant that is broken.
//!
//! * [`device`]: the machine over a device in memory.
//! * [`recovered`]: recovery over images of segments, whole or interrupted.
//! * [`plain`]: what the contract says a log holds.
//! * [`rig`], [`checks`], [`synced`]: the three together, and what must hold.
//! * [`history`]: what happens. [`violation`]: what a broken check says.
//!
//! What it does not do: open files, run the driver or its threads, damage what was synced and go on from there
//! (the crate's own tests do), or serve anybody: nothing of a running broker uses it.

mod checks;
pub mod device;
pub mod history;
pub mod plain;
pub mod recovered;
pub mod rig;
mod synced;
pub mod violation;

pub use history::{run_history, HistoryCounts};
pub use violation::Violation;

use crate::format::DataUuid;
use crate::name::{LogKind, LogName};

/// Data directory of all these logs.
pub const UUID: DataUuid = [0x17; 16];
/// Length of a segment, as it is made.
pub const SEGMENT_BYTES: u64 = 64 * 1024;

/// A small deterministic generator (splitmix64).
pub struct Rng(pub u64);

impl Rng {
    /// The next number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`; 0 when there is none.
    pub fn below(&mut self, n: u64) -> u64 {
        self.next_u64() % n.max(1)
    }
}

/// Name of the log of a shard.
pub fn name(shard: u32) -> LogName {
    LogName {
        kind: LogKind::Stream,
        tenant: "t".into(),
        namespace: "n".into(),
        name: "s".into(),
        shard,
    }
}

/// A payload nothing else produces.
pub fn payload(rng: &mut Rng, len: usize) -> Vec<u8> {
    let mut bytes = vec![0u8; len];
    for chunk in bytes.chunks_mut(8) {
        let random = rng.next_u64().to_le_bytes();
        chunk.copy_from_slice(&random[..chunk.len()]);
    }
    bytes
}
