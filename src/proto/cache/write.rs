//! A write to a cache's log between its making and its end, and what reads and writes come to.

use std::sync::Arc;

use bytes::Bytes;

/// What a key holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Lookup {
    Miss,
    Value(Bytes),
    /// A live value that is not in memory: it is in the put at this offset.
    InLog {
        offset: u64,
    },
}

/// What applying a write did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Applied {
    Stored,
    /// What a delete removed.
    Removed(Lookup),
    /// An expired entry is gone for good.
    Expired,
    /// An entry stands further up in the log, unchanged.
    Copied,
}

/// A write whose record is made and not known to be durable.
#[derive(Debug)]
#[must_use = "a staged write is either applied or abandoned"]
pub struct StagedWrite {
    pub(super) record: Bytes,
    pub(super) key: Arc<str>,
    pub(super) change: Change,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    Put {
        expires_at_ms: u64,
    },
    Delete,
    /// The delete of an entry that is past its time.
    Expire,
    /// The put at this offset again, so that its first place can be given up.
    Copy {
        from: u64,
    },
}

impl StagedWrite {
    /// What to append.
    pub fn record(&self) -> &Bytes {
        &self.record
    }

    /// The key it is for.
    pub fn key(&self) -> Arc<str> {
        Arc::clone(&self.key)
    }
}
