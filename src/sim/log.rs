//! One log's records and state, and the changes that can be made to it.

use bytes::Bytes;

use crate::wire::internal::ReplicaLog;

/// Entries a history may have; the oldest go first.
pub const HISTORY_BOUND: usize = 1024;

/// One log of one shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LogKey {
    /// The shard's place in the simulated catalog.
    pub shard: usize,
    pub log: SimLog,
}

/// [`ReplicaLog`] with an order, for maps whose order is the same in every run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SimLog {
    Stream,
    Cache,
    GroupCursors,
    GroupDeadLetters,
    Counters,
}

impl SimLog {
    pub fn of(log: ReplicaLog) -> Self {
        match log {
            ReplicaLog::Stream => Self::Stream,
            ReplicaLog::Cache => Self::Cache,
            ReplicaLog::GroupCursors => Self::GroupCursors,
            ReplicaLog::GroupDeadLetters => Self::GroupDeadLetters,
            ReplicaLog::Counters => Self::Counters,
        }
    }

    /// Whether acknowledgements of the shard are about this log.
    pub fn is_main(self) -> bool {
        matches!(self, Self::Stream | Self::Cache)
    }

    pub fn wire(self) -> ReplicaLog {
        match self {
            Self::Stream => ReplicaLog::Stream,
            Self::Cache => ReplicaLog::Cache,
            Self::GroupCursors => ReplicaLog::GroupCursors,
            Self::GroupDeadLetters => ReplicaLog::GroupDeadLetters,
            Self::Counters => ReplicaLog::Counters,
        }
    }
}

/// One leadership in a log's history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Began {
    pub generation: u64,
    pub start: u64,
    /// The leader's place in the simulated catalog.
    pub leader: usize,
}

/// A log's records and state.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LogImage {
    /// Whether anything ever made it exist.
    pub exists: bool,
    pub base: u64,
    pub records: Vec<Bytes>,
    /// The generation each record was appended under, as its process said.
    pub generations: Vec<u64>,
    /// A: never falls.
    pub accepted: u64,
    pub history: Vec<Began>,
}

impl LogImage {
    pub fn tail(&self) -> u64 {
        self.base + self.records.len() as u64
    }

    pub fn record(&self, offset: u64) -> Option<&Bytes> {
        self.records.get(offset.checked_sub(self.base)? as usize)
    }

    /// Greatest history generation and tail: what an operator compares.
    pub fn rank(&self) -> (u64, u64) {
        let generation = self.history.last().map_or(0, |entry| entry.generation);
        (generation, self.tail())
    }

    /// Makes the change.
    pub fn apply(&mut self, change: &Change) {
        self.exists = true;
        match change {
            Change::Append {
                generation,
                records,
                ..
            } => {
                for record in records {
                    self.records.push(record.clone());
                    self.generations.push(*generation);
                }
            }
            Change::Truncate { to } => {
                let keep = to.saturating_sub(self.base) as usize;
                self.records.truncate(keep);
                self.generations.truncate(keep);
                self.history.retain(|entry| entry.start < *to);
            }
            Change::Accept { generation } => self.accepted = self.accepted.max(*generation),
            Change::Begin { generation, leader } => {
                let tail = self.tail();
                self.accepted = self.accepted.max(*generation);
                self.history.retain(|entry| entry.start < tail);
                let last = self.history.last().map(|entry| entry.generation);
                if last.is_some_and(|last| last >= *generation) {
                    return;
                }
                self.history.push(Began {
                    generation: *generation,
                    start: tail,
                    leader: *leader,
                });
                let over = self.history.len().saturating_sub(HISTORY_BOUND);
                self.history.drain(..over);
            }
            Change::Place { base } => {
                self.base = *base;
                self.records.clear();
                self.generations.clear();
                self.history.clear();
            }
            Change::RaiseBase { base } => {
                let drop = (base.saturating_sub(self.base) as usize).min(self.records.len());
                self.records.drain(..drop);
                self.generations.drain(..drop);
                self.base += drop as u64;
                let base = self.base;
                while self.history.len() > 1 && self.history[1].start <= base {
                    self.history.remove(0);
                }
            }
        }
    }
}

/// A change of one log.
#[derive(Debug, Clone)]
pub enum Change {
    Append {
        generation: u64,
        first: u64,
        records: Vec<Bytes>,
    },
    Truncate {
        to: u64,
    },
    Accept {
        generation: u64,
    },
    Begin {
        generation: u64,
        leader: usize,
    },
    Place {
        base: u64,
    },
    RaiseBase {
        base: u64,
    },
}
