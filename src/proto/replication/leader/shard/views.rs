//! How a shard stands: for drivers, listings and tests.

use super::{FollowerIdx, HaltedReplica, ReportGate, ShardLeader, ShippedLog};
use crate::ids::{Generation, NodeId};
use crate::proto::replication::leader::cursor::{Cursor, CursorPhase};
use crate::proto::replication::leader::opening::OpeningPhase;
use crate::wire::internal::ReplicaLog;

impl<G: ReportGate> ShardLeader<G> {
    pub fn generation(&self) -> Generation {
        self.spec.generation
    }

    pub fn followers(&self) -> &[NodeId] {
        &self.spec.followers
    }

    /// Whether writes wait for a majority.
    pub fn is_quorum(&self) -> bool {
        self.spec.is_quorum
    }

    pub fn opening(&self) -> OpeningPhase {
        self.opening.phase()
    }

    /// Whether writes may be taken.
    pub fn is_open(&self) -> bool {
        self.opening.is_open()
    }

    /// How far a majority holds the main log; `None` before the first mark of this generation.
    pub fn mark(&self) -> Option<u64> {
        self.mark.get()
    }

    /// How far whoever may lead next is known to hold a log, so that its head may be given up for
    /// what was written anew: the mark of the main log, by which the next leader is chosen; of a
    /// companion, which has no part in that choice, as far as every follower that is not halted has
    /// answered. One whose disk fails for a while goes on from where it is, and may lead.
    pub fn held_by_heirs(&self, log: ReplicaLog) -> u64 {
        let Some(at) = self.logs.iter().position(|shipped| shipped.log == log) else {
            return 0;
        };
        if at == 0 {
            return self.mark.get().unwrap_or(0);
        }
        let shipped = &self.logs[at];
        let shipped_to = shipped.cursors.iter().filter(|c| c.is_shipped_to());
        let answered = shipped_to.map(|cursor| cursor.position().unwrap_or(0));
        answered.fold(shipped.synced, u64::min)
    }

    /// Retention may give up records of that log below this offset; `u64::MAX` is no bound.
    ///
    /// Of the main log of a `Quorum` shard only what a majority holds: nothing before the first mark of
    /// a generation. Otherwise records that were never committed would be gone, and followers that lack
    /// them could not be given a copy without a hole.
    pub fn may_forget_below(&self, log: ReplicaLog) -> u64 {
        let is_main = self.logs.first().is_some_and(|main| main.log == log);
        match is_main && self.spec.is_quorum {
            true => self.committed.max(self.mark.get().unwrap_or(0)),
            false => u64::MAX,
        }
    }

    /// Where this generation begins in the main log.
    pub fn floor(&self) -> u64 {
        self.floor
    }

    /// A cursor, for listings and tests.
    pub fn cursor(&self, follower: FollowerIdx, log: ReplicaLog) -> Option<&Cursor> {
        let shipped = self.logs.iter().find(|shipped| shipped.log == log)?;
        shipped.cursors.get(usize::from(follower.0))
    }

    /// Records of one of the shard's logs, its companions among them, that the slowest follower lacks;
    /// halted ones are not counted.
    pub fn lag(&self) -> u64 {
        let of_log = |shipped: &ShippedLog| {
            let cursors = shipped.cursors.iter();
            let counted = cursors.filter(|cursor| cursor.halted().is_none());
            let held = counted.map(|cursor| cursor.position().unwrap_or(shipped.base));
            held.min()
                .map_or(0, |held| shipped.synced.saturating_sub(held))
        };
        self.logs.iter().map(of_log).max().unwrap_or(0)
    }

    /// Replicas nothing is shipped to.
    pub fn halted(&self) -> impl Iterator<Item = HaltedReplica> + '_ {
        self.logs.iter().flat_map(move |shipped| {
            let pairs = self.spec.followers.iter().zip(&shipped.cursors);
            pairs.filter_map(move |(follower, cursor)| {
                Some(HaltedReplica {
                    follower: follower.clone(),
                    log: shipped.log,
                    generation: self.spec.generation,
                    position: cursor.position(),
                    reason: cursor.halted()?,
                })
            })
        })
    }

    /// Copies being made anew.
    pub fn rebuilding(&self) -> usize {
        let cursors = self.logs.iter().flat_map(|shipped| &shipped.cursors);
        cursors
            .filter(|cursor| cursor.phase() == CursorPhase::Rebuilding)
            .count()
    }
}
