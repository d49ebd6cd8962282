//! Errors, each saying what the caller has to do.

use std::path::PathBuf;

use crate::name::LogName;

/// Opening the data directory or a core log failed; the broker does not start.
#[derive(Debug, thiserror::Error)]
pub enum StorageError {
    /// Another process holds the data directory.
    #[error("data directory {} is in use by another broker{}; stop that one or choose another --data-dir", dir.display(), holder.as_deref().map(|pid| format!(" (process {pid})")).unwrap_or_default())]
    Locked {
        /// The directory.
        dir: PathBuf,
        /// Process id written by the holder, if readable.
        holder: Option<String>,
    },
    /// The data was written by a version this build does not know.
    #[error("{} has format version {found}, this build reads version {known}; use the build that wrote it", file.display())]
    UnknownVersion {
        /// The file.
        file: PathBuf,
        /// Version found.
        found: u32,
        /// Version of this build.
        known: u32,
    },
    /// The file with the directory's identity is damaged.
    #[error("{} is damaged ({reason}); restore it from a copy: without it no segment can be checked", file.display())]
    MetaDamaged {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Segments exist but the file with the directory's identity does not.
    #[error("{} is missing although core logs exist in {}; restore it from a copy", file.display(), dir.display())]
    MetaMissing {
        /// The missing file.
        file: PathBuf,
        /// The directory.
        dir: PathBuf,
    },
    /// A directory with a core's log is gone.
    #[error("{} is missing although there were core logs in it; restore it from a copy: without it offsets that were acknowledged would be given out again (an empty directory in its place gives up what was in it)", dir.display())]
    CoreMissing {
        /// The missing directory.
        dir: PathBuf,
    },
    /// Something else has the name of a file.
    #[error("{} is not a regular file; move it out of the data directory", path.display())]
    NotAFile {
        /// What has the name.
        path: PathBuf,
    },
    /// Nothing can be numbered behind the newest segment.
    #[error("{} holds a segment with the highest number there is; no broker came that far: look for a file that does not belong there", dir.display())]
    SequencesUsedUp {
        /// The core's directory.
        dir: PathBuf,
    },
    /// An operating-system call failed.
    #[error("{what} {}: {source}", path.display())]
    Io {
        /// What was attempted.
        what: &'static str,
        /// On which path.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A configuration value is out of range.
    #[error("storage configuration: {0}")]
    Config(String),
    /// The private io_uring could not be set up.
    #[error(
        "io_uring cannot be set up: {0}; check kernel.io_uring_disabled and the memlock limit"
    )]
    Ring(std::io::Error),
    /// The core log failed while it was in use.
    #[error("the core log has failed: {0}")]
    Failed(String),
    /// A control thread could not be started or did not answer.
    #[error("segment thread: {0}")]
    SegmentThread(String),
}

impl StorageError {
    pub(crate) fn io(what: &'static str, path: impl Into<PathBuf>, source: std::io::Error) -> Self {
        Self::Io {
            what,
            path: path.into(),
            source,
        }
    }
}

/// A log cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LogError {
    /// Recovery found damage that an unfinished write does not explain. Refuse the shard, alert.
    #[error("log {log} is damaged: {detail}")]
    Damaged {
        /// The log.
        log: String,
        /// Where and what.
        detail: String,
    },
    /// Two names have the same 64-bit id. Rename one of them.
    #[error("log {log} has the same id as {other}")]
    IdCollision {
        /// The refused log.
        log: String,
        /// The one that has the id.
        other: String,
    },
    /// Another core of this process already has the log.
    #[error("log {0} is open on another core")]
    OpenElsewhere(String),
    /// The name is too long.
    #[error("the name of log {0} is too long")]
    NameTooLong(String),
}

impl LogError {
    pub(crate) fn too_long(name: &LogName) -> Self {
        Self::NameTooLong(name.to_string())
    }
}

/// An append was not taken. Nothing was queued.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AppendError {
    /// The queue of bytes not yet durable is full. Retry later.
    #[error("the storage queue is full")]
    Overloaded,
    /// No space is left for another segment. Refuse the write; it heals when space returns.
    #[error("the disk is full")]
    DiskFull,
    /// The core log failed. Do not retry on this broker before a restart.
    #[error("the core log has failed")]
    Failed,
    /// The batch or a record can never fit.
    #[error("a record of {bytes} bytes exceeds the limit of {limit}")]
    TooLarge {
        /// Size asked for.
        bytes: u64,
        /// Largest size possible.
        limit: u64,
    },
    /// The log is refused because of damage found by recovery.
    #[error("the log is damaged")]
    Damaged,
    /// A control event names an offset outside the log, or a leader whose name is too long.
    #[error("the offset is outside the log")]
    OutOfRange,
    /// The log accepted a later generation before. Never retry: the one who asked was deposed.
    #[error("the log accepted generation {accepted} before")]
    StaleGeneration {
        /// The accepted generation.
        accepted: u64,
    },
}

/// A queued append did not become durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CommitError {
    /// A write or flush failed, and the core log is finished until a restart; or the space ran out when a
    /// first part of the records was stored already, and stays. What of it survives is unknown to the caller.
    #[error("storage failed")]
    StorageFailed,
    /// The space ran out before the bytes were whole on disk; the append is undone as a whole.
    #[error("the disk is full")]
    DiskFull,
}

/// A read could not be answered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// The offset is below the log's base.
    #[error("offset {offset} was trimmed, the oldest is {base}")]
    Trimmed {
        /// Offset asked for.
        offset: u64,
        /// First offset held.
        base: u64,
    },
    /// The stored bytes are not the ones that were written. Refuse the read; never serve them.
    #[error("damaged bytes at segment {segment} of core {core}, position {position}: {detail}")]
    Damaged {
        /// Core directory.
        core: u16,
        /// Segment sequence.
        segment: u64,
        /// Byte position.
        position: u64,
        /// What is wrong.
        detail: &'static str,
    },
    /// The device refused the read.
    #[error("read failed: {0}")]
    Io(String),
    /// Too many reads are waiting. Retry later.
    #[error("too many reads are waiting")]
    Overloaded,
    /// The log is refused because of damage found by recovery.
    #[error("the log is damaged")]
    LogDamaged,
}
