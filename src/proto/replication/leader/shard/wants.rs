//! Which log of a shard has something for a follower.

use super::{FollowerIdx, ReportGate, ShardLeader};
use crate::proto::replication::leader::cursor::{Cursor, LogView, Want};
use crate::proto::replication::leader::opening::OpeningPhase;
use crate::proto::replication::types::is_a_state;
use crate::proto::MonoTime;
use crate::wire::internal::ReplicaLog;

impl<G: ReportGate> ShardLeader<G> {
    pub(super) fn may_ship(&self) -> bool {
        matches!(
            self.opening.phase(),
            OpeningPhase::Probing | OpeningPhase::Open
        )
    }

    pub(super) fn view(&self, at: usize) -> LogView {
        let shipped = &self.logs[at];
        let is_bounded = at == 0 && self.spec.is_quorum;
        LogView {
            base: shipped.base,
            synced: shipped.synced,
            committed: is_bounded.then(|| self.committed.max(self.mark.get().unwrap_or(0))),
            // A main log has, below where this generation begins, everything that a head was ever given up for:
            // by it the leader was chosen. A companion had no part in that.
            heads_end: if at == 0 { shipped.began } else { shipped.base },
            is_probing: !self.opening.is_open(),
            restated: is_a_state(shipped.log).then_some(shipped.restated),
        }
    }

    /// The first log of the shard that has something for the follower.
    pub(super) fn find_want(&self, follower: FollowerIdx, now: MonoTime) -> Option<(usize, Want)> {
        if !self.may_ship() {
            return None;
        }
        // Until a majority is fenced nothing but the probes of the main log leaves.
        let logs = if self.opening.is_open() {
            self.logs.len()
        } else {
            1
        };
        for at in 0..logs {
            let cursor = self.logs[at].cursors.get(usize::from(follower.0))?;
            let want = cursor.want(&self.view(at), &self.spec.limits, now);
            let may = match want {
                Want::Nothing => false,
                Want::Probe { .. } => true,
                Want::Fetch { .. } => {
                    (self.opening.is_open() || cursor.probe_refused)
                        && self.is_in_turn(at, follower)
                }
                Want::Bootstrap | Want::Base | Want::Rebuild => self.opening.is_open(),
            };
            if may {
                return Some((at, want));
            }
        }
        None
    }

    /// A follower that holds a group's position and not the dead letter before it would lose that
    /// record for good, so cursors follow dead letters: what a cursor record depends on is synced
    /// here before it, and a level follower has all of that. One that takes no dead letters gets no
    /// cursors either: an old position costs deliveries, a new one records.
    pub(super) fn is_in_turn(&self, at: usize, follower: FollowerIdx) -> bool {
        if self.logs[at].log != ReplicaLog::GroupCursors {
            return true;
        }
        let Some((synced, letters)) = self.letters_of(follower) else {
            return true;
        };
        letters
            .position()
            .map_or(synced == 0, |held| held >= synced)
    }

    /// Whether a new copy would be filled at once: one that may not be must not keep its slot from the one it
    /// waits for. Level dead letters that are halted will need a new copy themselves with the next of them.
    pub(super) fn may_be_filled(&self, at: usize, follower: FollowerIdx) -> bool {
        if self.logs[at].log != ReplicaLog::GroupCursors {
            return true;
        }
        let letters = self.letters_of(follower);
        let is_halted = letters.is_some_and(|(_, letters)| letters.halted().is_some());
        self.is_in_turn(at, follower) && !is_halted
    }

    /// How far the shard's dead letters are synced here, and the follower's place in them.
    fn letters_of(&self, follower: FollowerIdx) -> Option<(u64, &Cursor)> {
        let mut logs = self.logs.iter();
        let letters = logs.find(|shipped| shipped.log == ReplicaLog::GroupDeadLetters)?;
        let cursor = letters.cursors.get(usize::from(follower.0))?;
        Some((letters.synced, cursor))
    }
}
