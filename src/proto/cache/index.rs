//! What one log comes to, whichever of the four it is: the state behind an owner's answers.
//!
//! A driver finds the state of a log, asks it to serve a request, appends what that staged, and
//! brings the record back once it is durable, or once it is known that it will not be.

use std::sync::Arc;

use bytes::Bytes;

use super::compact::{Copy, LogUse};
use super::{
    Applied, CacheFailure, CacheIndex, CacheLog, CacheRequest, CounterIndex, Lookup, Operation,
    RecordFault, StagedAdd, StagedWrite,
};

/// The state of one log.
#[derive(Debug)]
pub enum LogIndex {
    Values(CacheIndex),
    Counters(CounterIndex),
}

/// A record that is made and not known to be durable.
#[derive(Debug)]
pub enum Staged {
    Value(StagedWrite),
    Add(StagedAdd),
}

/// What serving a request came to.
#[derive(Debug)]
pub enum Served {
    /// What a get found.
    Found(Lookup),
    /// A counter's sum.
    Sum(Option<i64>),
    /// A delete of what is not there: nothing to write.
    Absent,
    /// A record to append.
    Write(Staged),
}

/// What a durable record came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Written {
    Value(Applied),
    /// The sum with the add.
    Sum(i64),
}

impl Staged {
    /// What to append.
    pub fn record(&self) -> &Bytes {
        match self {
            Self::Value(write) => write.record(),
            Self::Add(add) => add.record(),
        }
    }

    /// The key it is for.
    pub fn key(&self) -> Arc<str> {
        match self {
            Self::Value(write) => write.key(),
            Self::Add(add) => add.key(),
        }
    }
}

impl LogIndex {
    /// The state of a log that starts at `base`, before its first record is read.
    pub fn new(log: CacheLog, base: u64) -> Self {
        match log {
            CacheLog::Values | CacheLog::Cursors | CacheLog::DeadLetters => {
                Self::Values(CacheIndex::new(base))
            }
            CacheLog::Counters => Self::Counters(CounterIndex::new(base)),
        }
    }

    /// The offset of the next record to apply.
    pub fn next_offset(&self) -> u64 {
        match self {
            Self::Values(index) => index.next_offset(),
            Self::Counters(index) => index.next_offset(),
        }
    }

    /// Records staged and not settled.
    pub fn staged(&self) -> usize {
        match self {
            Self::Values(index) => index.staged(),
            Self::Counters(index) => index.staged(),
        }
    }

    /// Keys held.
    pub fn keys(&self) -> usize {
        match self {
            Self::Values(index) => index.keys(),
            Self::Counters(index) => index.keys(),
        }
    }

    /// Memory the keys take, values apart.
    pub fn index_bytes(&self) -> usize {
        match self {
            Self::Values(index) => index.index_bytes(),
            Self::Counters(index) => index.index_bytes(),
        }
    }

    /// Memory the values take.
    pub fn resident_bytes(&self) -> usize {
        match self {
            Self::Values(index) => index.resident_bytes(),
            Self::Counters(_) => 0,
        }
    }

    /// The values, for those logs that have them.
    pub fn values(&self) -> Option<&CacheIndex> {
        match self {
            Self::Values(index) => Some(index),
            Self::Counters(_) => None,
        }
    }

    /// The values, for those logs that have them.
    pub fn values_mut(&mut self) -> Option<&mut CacheIndex> {
        match self {
            Self::Values(index) => Some(index),
            Self::Counters(_) => None,
        }
    }

    /// Applies a record of the log.
    pub fn replay(&mut self, offset: u64, record: &[u8]) -> Result<(), RecordFault> {
        match self {
            Self::Values(index) => index.replay(offset, record),
            Self::Counters(index) => index.replay(offset, record),
        }
    }

    /// What is wrong with the log as a whole, once all of it was read.
    pub fn fault(&self) -> Option<RecordFault> {
        match self {
            Self::Values(_) => None,
            Self::Counters(index) => index.check().err(),
        }
    }

    /// Answers from the durable state, or stages a record. A request that is not for this log is
    /// refused as not ready. With `is_full` nothing new is taken in.
    pub fn serve(
        &mut self,
        request: &CacheRequest,
        now_ms: u64,
        is_full: bool,
    ) -> Result<Served, CacheFailure> {
        let key = &request.key;
        match (self, &request.operation) {
            (Self::Values(index), Operation::Get) => Ok(Served::Found(index.get(key, now_ms))),
            (Self::Counters(index), Operation::CounterGet) => Ok(Served::Sum(index.get(key))),
            (Self::Values(index), Operation::Delete) => Ok(index
                .stage_delete(key, now_ms)
                .map_or(Served::Absent, |write| Served::Write(Staged::Value(write)))),
            (Self::Values(index), Operation::Put { .. }) if is_full && !index.contains(key) => {
                Err(CacheFailure::IndexFull)
            }
            (Self::Values(index), Operation::Put { value, ttl_ms }) => {
                let write = index.stage_put(key, value, *ttl_ms, now_ms);
                Ok(Served::Write(Staged::Value(write)))
            }
            (Self::Counters(index), Operation::CounterAdd { .. })
                if is_full && index.get(key).is_none() =>
            {
                Err(CacheFailure::IndexFull)
            }
            (Self::Counters(index), Operation::CounterAdd { delta }) => index
                .stage_add(key, *delta)
                .map(|add| Served::Write(Staged::Add(add)))
                .map_err(|_| CacheFailure::Overflow),
            (Self::Values(_), Operation::CounterAdd { .. } | Operation::CounterGet)
            | (Self::Counters(_), Operation::Put { .. } | Operation::Get | Operation::Delete) => {
                Err(CacheFailure::NotReady)
            }
        }
    }

    /// A record is durable at `offset`. `None`: it was not staged by this state.
    pub fn applied(&mut self, staged: Staged, offset: u64, now_ms: u64) -> Option<Written> {
        match (self, staged) {
            (Self::Values(index), Staged::Value(write)) => {
                Some(Written::Value(index.applied(write, offset, now_ms)))
            }
            (Self::Counters(index), Staged::Add(add)) => {
                Some(Written::Sum(index.applied(add, offset)))
            }
            (Self::Values(_), Staged::Add(_)) | (Self::Counters(_), Staged::Value(_)) => None,
        }
    }

    /// A record was not written. The ones staged after it must be abandoned as well.
    pub fn abandoned(&mut self, staged: Staged) {
        match (self, staged) {
            (Self::Values(index), Staged::Value(write)) => index.abandoned(write),
            (Self::Counters(index), Staged::Add(add)) => index.abandoned(add),
            // A record is staged by the state of its own log.
            (Self::Values(_), Staged::Add(_)) | (Self::Counters(_), Staged::Value(_)) => {}
        }
    }

    /// What the log takes, and what of it is live.
    pub fn log_use(&self) -> &LogUse {
        match self {
            Self::Values(index) => index.log_use(),
            Self::Counters(index) => index.log_use(),
        }
    }

    /// Begins to copy what is live below the cut, which is returned.
    pub fn begin_compaction(&mut self) -> u64 {
        match self {
            Self::Values(index) => index.begin_compaction(),
            Self::Counters(index) => index.begin_compaction(),
        }
    }

    /// Compaction is over; with `raised` the log starts at its cut.
    pub fn end_compaction(&mut self, raised: bool) {
        match self {
            Self::Values(index) => index.end_compaction(raised),
            Self::Counters(index) => index.end_compaction(raised),
        }
    }

    /// Looks at a record below the cut: stages its copy if it still stands for its key.
    pub fn stage_copy(&mut self, offset: u64, record: &Bytes) -> Result<Copy<Staged>, RecordFault> {
        match self {
            Self::Values(index) => Ok(index.stage_copy(offset, record)?.map(Staged::Value)),
            Self::Counters(index) => Ok(index.stage_checkpoint(record)?.map(Staged::Add)),
        }
    }
}
