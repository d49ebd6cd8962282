//! The state of one cache shard: what its two logs say, and what may be written to them.
//!
//! A cache shard has a log of puts and deletes ([`CacheIndex`]) and a log of counter deltas
//! ([`CounterIndex`]). Both are read the same way: the state is what replaying the log gives, so
//! it can be rebuilt at any time. A write is *staged* (its record is made), appended by the
//! driver, and *applied* once durable, in the order of the log; nothing reads what is only staged.
//! This module does not append, read or keep time: records, offsets and the time are passed in.
//!
//! Invariants:
//! * CACHE-1: records are applied in offset order without a gap, and only once durable. A get
//!   never returns a value that a power cut could take back.
//! * CACHE-2: the state after applying is the state a replay of the same records gives.
//! * CACHE-3: a write that is undone is undone with every write staged after it, so the sums that
//!   later adds were checked against stay true.
//! * CACHE-4: a time to live becomes one absolute time when the owner stages the put. An entry
//!   past it is a miss for get and delete, whether or not its delete has been written.
//! * CACHE-5: compaction changes no key: a copy is what the key holds at the copy's place in the
//!   log, and nothing below the cut is given up while a key still stands there ([`LogUse`] counts
//!   them).
//!
//! Cost: some 75 bytes for a short key and 90 and its own bytes for a longer one, value apart (`key_map`).
//! Values stay in memory up to a bound the driver keeps; beyond it the oldest are read from the log.

mod clock;
mod compact;
mod counters;
mod index;
mod key_map;
pub mod record;
mod refusal;
mod values;
mod write;

use std::num::NonZeroU64;
use std::sync::Arc;

use bytes::Bytes;

use super::forward::ForwardOp;
use crate::wire::internal::{CacheOp, CacheOpKind};

pub use clock::OwnerClock;
pub use compact::{Compaction, CompactionLimits, CompactionStep, Copy, LogUse};
pub use counters::{CounterIndex, Overflow, StagedAdd};
pub use index::{LogIndex, Served, Staged, Written};
pub use record::RecordFault;
pub use refusal::CacheFailure;
pub use values::CacheIndex;
pub use write::{Applied, Lookup, StagedWrite};

/// Which of the logs whose state is kept in memory. A cache shard has the first two, a stream
/// shard the others; those of consumer groups have the record shape of the cache log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CacheLog {
    Values,
    Counters,
    Cursors,
    DeadLetters,
}

/// One operation on one key, parsed and checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheRequest {
    pub key: Arc<str>,
    pub operation: Operation,
}

/// What is done to a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operation {
    Put {
        value: Bytes,
        /// `None` never expires.
        ttl_ms: Option<NonZeroU64>,
    },
    Get,
    Delete,
    CounterAdd {
        delta: i64,
    },
    CounterGet,
}

/// What an operation came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CacheReply {
    /// The put is durable.
    Stored,
    /// What a get found or a delete removed; an empty value is not a miss.
    Value(Option<Bytes>),
    /// A counter's sum; `None` was never written.
    Sum(Option<i64>),
}

impl CacheRequest {
    /// The request a peer forwarded. `Err` when its value does not fit its operation.
    pub fn of_forward(op: &CacheOp) -> Result<Self, CacheFailure> {
        let operation = match op.op {
            CacheOpKind::Put => Operation::Put {
                value: op.value.clone(),
                ttl_ms: NonZeroU64::new(op.ttl_ms),
            },
            CacheOpKind::Get => Operation::Get,
            CacheOpKind::Delete => Operation::Delete,
            CacheOpKind::CounterAdd => match <[u8; 8]>::try_from(op.value.as_ref()) {
                Ok(delta) => Operation::CounterAdd {
                    delta: i64::from_be_bytes(delta),
                },
                Err(_) => return Err(CacheFailure::BadDelta),
            },
            CacheOpKind::CounterGet => Operation::CounterGet,
        };
        Ok(Self {
            key: Arc::from(op.key.as_str()),
            operation,
        })
    }

    /// What may be done about a lost answer.
    pub fn forward_op(&self) -> ForwardOp {
        match self.operation {
            Operation::Put { .. } => ForwardOp::CachePut,
            Operation::Get => ForwardOp::CacheGet,
            Operation::Delete => ForwardOp::CacheDelete,
            Operation::CounterAdd { .. } => ForwardOp::CounterAdd,
            Operation::CounterGet => ForwardOp::CounterGet,
        }
    }

    /// The operation as it is forwarded: kind, time to live (0 is none), value.
    pub fn wire_parts(&self) -> (CacheOpKind, u64, Bytes) {
        match &self.operation {
            Operation::Put { value, ttl_ms } => {
                let ttl_ms = ttl_ms.map_or(0, NonZeroU64::get);
                (CacheOpKind::Put, ttl_ms, value.clone())
            }
            Operation::Get => (CacheOpKind::Get, 0, Bytes::new()),
            Operation::Delete => (CacheOpKind::Delete, 0, Bytes::new()),
            Operation::CounterAdd { delta } => {
                let delta = Bytes::copy_from_slice(&delta.to_be_bytes());
                (CacheOpKind::CounterAdd, 0, delta)
            }
            Operation::CounterGet => (CacheOpKind::CounterGet, 0, Bytes::new()),
        }
    }

    /// The log that holds the key.
    pub fn log(&self) -> CacheLog {
        match self.operation {
            Operation::Put { .. } | Operation::Get | Operation::Delete => CacheLog::Values,
            Operation::CounterAdd { .. } | Operation::CounterGet => CacheLog::Counters,
        }
    }

    /// Bytes the request holds on to while it waits.
    pub fn held_bytes(&self) -> usize {
        let value = match &self.operation {
            Operation::Put { value, .. } => value.len(),
            Operation::Get
            | Operation::Delete
            | Operation::CounterAdd { .. }
            | Operation::CounterGet => 0,
        };
        self.key.len() + value
    }
}

impl CacheReply {
    /// The value field of a `ForwardCacheOk`; `None` is not present.
    pub fn to_wire(&self) -> Option<Bytes> {
        match self {
            Self::Stored => None,
            Self::Value(value) => value.clone(),
            Self::Sum(sum) => sum.map(|sum| Bytes::copy_from_slice(&sum.to_be_bytes())),
        }
    }

    /// What an owner's answer to `op` says; `None` when it makes no sense for the operation.
    pub fn of_wire(op: ForwardOp, value: Option<Bytes>) -> Option<Self> {
        match (op, value) {
            (ForwardOp::CachePut, None) => Some(Self::Stored),
            (ForwardOp::CacheGet | ForwardOp::CacheDelete, value) => Some(Self::Value(value)),
            (ForwardOp::CounterGet, None) => Some(Self::Sum(None)),
            (ForwardOp::CounterGet | ForwardOp::CounterAdd, Some(sum)) => {
                let sum = <[u8; 8]>::try_from(sum.as_ref()).ok()?;
                Some(Self::Sum(Some(i64::from_be_bytes(sum))))
            }
            (ForwardOp::CounterAdd, None)
            | (ForwardOp::CachePut, Some(_))
            | (ForwardOp::Publish, _) => None,
        }
    }
}
