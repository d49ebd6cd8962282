//! Numbers of one core's storage, for metrics and status.

use crate::machine::MachineStats;

/// Counters and gauges of one core's storage.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StorageStats {
    /// The core.
    pub core: u16,
    /// Commit counters.
    pub machine: MachineStats,
    /// Bytes appended and not durable.
    pub queued_bytes: u64,
    /// Segments ready and not started.
    pub ready_segments: u64,
    /// Zeroed files ready to become segments.
    pub spare_segments: u64,
    /// Segments made since the start.
    pub segments_made: u64,
    /// Files made for segments whose zeros were not all written.
    pub segments_allocated: u64,
    /// Freed segments whose file was used again.
    pub segments_recycled: u64,
    /// Attempts to give a segment back that failed.
    pub free_failures: u64,
    /// Attempts to rewrite a segment that failed.
    pub rewrite_failures: u64,
    /// Segments that hold groups.
    pub segments: u64,
    /// Bytes of their files.
    pub segment_bytes: u64,
    /// Bytes of records that are not given up, as far as the sweep knows.
    pub held_bytes: u64,
    /// New files thrown away because a sync failed.
    pub segment_sync_failures: u64,
    /// Free bytes of the file system.
    pub free_bytes: u64,
    /// Whether that is below the low-space mark.
    pub low_space: bool,
    /// Whether the last attempt to make a segment found no space.
    pub no_space: bool,
    /// Whether a commit is waiting for a segment.
    pub waiting_for_segment: bool,
    /// Reads of older data handed to the device.
    pub reads: u64,
    /// Bytes of those reads.
    pub read_bytes: u64,
    /// Reads answered by one that was made before it was asked for.
    pub reads_ahead: u64,
    /// Reads the device refused, also where the answer was found without them.
    pub read_failures: u64,
    /// Such reads under way.
    pub active_reads: u64,
    /// Logs open on this core.
    pub logs: u64,
    /// Entries of all their indexes.
    pub index_entries: u64,
    /// Why the core log failed, if it did.
    pub failure: Option<String>,
    /// Logs that take no writes: all of them after a failure, else the damaged ones.
    pub failed_logs: Vec<String>,
}

impl StorageStats {
    /// Groups that became durable; each is one synced write.
    pub fn commits(&self) -> u64 {
        self.machine.commits
    }

    /// Mean records of a durable group.
    pub fn records_per_commit(&self) -> f64 {
        if self.machine.commits == 0 {
            0.0
        } else {
            self.machine.records as f64 / self.machine.commits as f64
        }
    }
}
