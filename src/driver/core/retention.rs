//! How long the streams of this core keep their records: tells the storage, decides nothing else.
//!
//! Invariant: of a stream that waits for majorities nothing is given up that a majority may not have. Its
//! leader gives up nothing above the mark it has shown, which is nothing at all before the first one; a
//! follower nothing above what it has compared with the leader of its generation, and nothing at all where
//! the two of them are no majority: a leader chosen from the others may write those offsets anew, and a copy
//! that begins above them could not tell.

use std::sync::Arc;

use storage_uring::{LogKind, LogRef, Retention};

use crate::catalog::Consistency;
use crate::ids::{ShardId, ShardKind};

use super::append::log_name;
use super::Core;

/// Most replicas of which a leader and one follower are a majority.
const REPLICAS_OF_TWO_MAX: usize = 3;

/// Where what a follower must keep begins.
pub(super) fn follower_bound(replicas: usize, matched: Option<u64>) -> u64 {
    match replicas <= REPLICAS_OF_TWO_MAX {
        true => matched.unwrap_or(0),
        false => 0,
    }
}

impl Core {
    /// Tells the storage how long a stream's log is kept. Caches and counters are states: theirs keep all.
    pub(super) fn apply_retention(&self, shard: &ShardId, log: LogRef) {
        if shard.kind != ShardKind::Stream {
            return;
        }
        let of_broker = self.settings.retention;
        let own = self.routes.stream_of(shard).map(|stream| stream.retention);
        let own = own.unwrap_or_default();
        let age_us = |age: std::time::Duration| u64::try_from(age.as_micros()).unwrap_or(u64::MAX);
        let retention = Retention {
            bytes: own.bytes.unwrap_or(of_broker.bytes),
            age_us: own.age.map_or(of_broker.age_us, age_us),
            below: self.retention_bound(shard),
        };
        self.storage.set_retention(log, retention);
    }

    /// Where what must be kept begins, whatever size and age say.
    fn retention_bound(&self, shard: &ShardId) -> u64 {
        let Some(route) = self.routes.shard(shard) else {
            // Not in the catalog: a matter for the operator.
            return 0;
        };
        let waits_for_majority = self.routes.consistency(shard) == Some(Consistency::Quorum);
        if route.is_local {
            match waits_for_majority && route.replicas.len() > 1 {
                true => self.shipping.shown_mark(shard).unwrap_or(0),
                false => u64::MAX,
            }
        } else if route.is_follower {
            follower_bound(route.replicas.len(), self.followers.matched(shard))
        } else {
            0
        }
    }

    /// Tells the storage of every open stream anew: the catalog changed, and with it roles or lengths.
    pub(super) fn retention_after_catalog(&mut self) {
        self.open_kept_streams();
        for (shard, open) in &self.logs {
            self.apply_retention(shard, open.log);
        }
        for (shard, log) in self.followers.main_logs() {
            self.apply_retention(shard, log);
        }
    }

    /// Opens the streams that have records here, so that retention looks at them before they are used.
    pub(super) fn open_kept_streams(&mut self) {
        let routes = Arc::clone(&self.routes);
        let index = self.index;
        let held = routes.shards().filter(|route| {
            let is_here = route.core.0 == index;
            is_here && (route.is_local || route.is_follower)
        });
        for route in held {
            let shard = &route.shard_id;
            let is_stream = shard.kind == ShardKind::Stream;
            if is_stream && self.storage.holds(&log_name(shard, LogKind::Stream)) {
                // A shard that cannot be opened is reported by this and refuses its requests.
                let _ = self.open_log(shard);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_follower_gives_up_only_what_it_and_its_leader_are_a_majority_for() {
        for replicas in [2, 3] {
            assert_eq!(follower_bound(replicas, Some(30)), 30);
            assert_eq!(follower_bound(replicas, None), 0);
        }
        for replicas in [4, 5, 7] {
            assert_eq!(follower_bound(replicas, Some(30)), 0);
        }
    }
}
