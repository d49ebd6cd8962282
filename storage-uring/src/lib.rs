//! O_DIRECT log storage with group commit across the shards of a core.
//!
//! Every core writes one *core log*: a sequence of pre-written segment files into which all shards of the
//! core append. A commit is one aligned, synced write, however many shards take part in it. The layouts are
//! in [`format`] (and byte by byte in `docs/storage-format.md`), the decisions in [`machine`] (sans-IO),
//! start-up in [`recovery`], the device in `driver` (feature `runtime`).
//!
//! What this crate does not do: replicate, route, authorise. It stores records per log, in order, and says
//! when they are durable.

#[cfg(feature = "runtime")]
pub mod bench;
pub mod config;
pub mod datadir;
pub mod dir_probe;
#[cfg(feature = "runtime")]
mod driver;
pub mod error;
pub mod faults;
pub mod format;
pub mod index;
pub mod machine;
#[cfg(test)]
mod model;
pub mod name;
pub mod offline;
pub mod recovery;
pub mod rewrite;
pub mod segment_pool;
pub mod sim;
pub mod slab;
pub mod stats;
pub mod usage;
pub mod walk;

pub use config::{SegmentZeros, StorageConfig, SyncMethod};
pub use dir_probe::{probe, DirProbe, ProbeError};
#[cfg(feature = "runtime")]
pub use driver::Storage;
pub use error::{AppendError, CommitError, LogError, ReadError, StorageError};
pub use faults::{FaultEffect, FaultOp, FaultPlan, FaultRule};
pub use machine::{
    Completion, ControlEvent, HistoryEntry, LogRef, LogView, MachineStats, ReadBatch, Retention,
};
pub use name::{LogId, LogKind, LogName};
pub use recovery::{
    recover, recover_with, ProgressView, RecoveredSet, RecoveryProgress, RecoveryReport,
};
#[cfg(feature = "runtime")]
pub use shard_executor::Signal;
pub use stats::StorageStats;
