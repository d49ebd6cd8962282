//! What a core shows to readers of its shards; nothing here changes it.

use bytes::Bytes;

use super::Core;
use crate::ids::Offset;
use crate::proto::replication::leader::{HeldBackBy, Readable};
use crate::proto::subscription::Readable as Bounds;
use crate::sim::catalog::Acknowledge;
use crate::sim::disk::{LogKey, SimLog};
use crate::sim::env::Env;

/// What becomes of a subscriber's read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReaderAnswer {
    NotOwner,
    /// The log takes nothing any more, or is not whole.
    Failed,
    /// There is nothing to show yet.
    Waits,
    Trimmed {
        base: u64,
    },
    /// Records may be read, all below `end`.
    Reads {
        end: u64,
    },
}

impl Core {
    /// The part of a shard's stream that readers may see.
    pub fn readable(&self, env: &Env, shard: usize) -> Readable {
        let held_back = match self.awaits_mark(env, shard) {
            true => HeldBackBy::Mark(self.leads.shown(shard)),
            false => HeldBackBy::Durability,
        };
        Readable::of(held_back, self.journal.durable_tail(stream_of(shard)))
    }

    /// Whether acknowledgements of the shard, and its readers, wait for a majority.
    pub(super) fn awaits_mark(&self, env: &Env, shard: usize) -> bool {
        let is_quorum = env.catalog.shards[shard].acknowledge == Acknowledge::Quorum;
        is_quorum && env.catalog.is_replicated(shard)
    }

    /// Where a shard's stream begins, and up to where a new subscriber may see it. `None` when it is refused.
    pub fn bounds_for_readers(&self, env: &Env, shard: usize) -> Option<Bounds> {
        let key = stream_of(shard);
        let is_served = self.leads_any(env, shard)
            && !self.journal.has_failed()
            && !self.journal.is_damaged(key);
        match self.readable(env, shard) {
            Readable::Below(end) if is_served => Some(Bounds {
                oldest: Offset(self.journal.seen(key).base()),
                end: Offset(end),
                held_end: Offset(self.journal.durable_tail(key)),
            }),
            Readable::Below(_) | Readable::NoMark => None,
        }
    }

    /// What a read from there on comes to now.
    pub fn answer_reader(&self, env: &Env, shard: usize, from: u64) -> ReaderAnswer {
        let key = stream_of(shard);
        let end = self.readable(env, shard).end();
        let base = self.journal.seen(key).base();
        if !self.leads_any(env, shard) {
            ReaderAnswer::NotOwner
        } else if self.journal.has_failed() || self.journal.is_damaged(key) {
            ReaderAnswer::Failed
        } else if from >= end {
            ReaderAnswer::Waits
        } else if from < base {
            ReaderAnswer::Trimmed { base }
        } else {
            ReaderAnswer::Reads { end }
        }
    }

    /// The durable records from there on, all below `end` and at most so many bytes but at least one. `Err` with
    /// the base when they are gone.
    pub fn read_stream(
        &self,
        shard: usize,
        (from, end): (u64, u64),
        max_bytes: usize,
    ) -> Result<Vec<Bytes>, u64> {
        let seen = self.journal.seen(stream_of(shard));
        if from < seen.base() {
            return Err(seen.base());
        }
        let end = end.min(self.journal.durable_tail(stream_of(shard)));
        let mut bytes = 0;
        let mut records: Vec<Bytes> = Vec::new();
        for record in (from..end).map_while(|offset| seen.record(offset)) {
            bytes += record.len();
            if bytes > max_bytes && !records.is_empty() {
                break;
            }
            records.push(record.clone());
        }
        Ok(records)
    }
}

pub fn stream_of(shard: usize) -> LogKey {
    LogKey {
        shard,
        log: SimLog::Stream,
    }
}
