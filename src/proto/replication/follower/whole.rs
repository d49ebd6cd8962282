//! Requests about a whole copy: placing an empty one, discarding one.

use super::{
    Change, DiskWork, FollowerLog, FollowerNote, FollowerRequest, LogHealth, Matched, OwedAnswer,
    Stage,
};
use crate::proto::outcome::PeerCode;
use crate::proto::replication::types::ReplicateAnswer;

impl FollowerLog {
    pub(super) fn decide_bootstrap(&mut self, request: FollowerRequest, base: u64) {
        let is_there = self.at.base == base;
        if self.at.base == self.at.tail {
            // An empty log has nothing to keep.
            if is_there && self.at.history.is_empty() {
                // The leader has nothing below, either.
                self.match_from(&request, base);
                return self.owe_ok(&request, base);
            }
            return self.wait(request, Stage::AwaitQuiet(Change::Bootstrap { base }));
        }
        if is_there {
            let mark = self.matched.as_ref().and_then(|matched| matched.mark);
            let known = mark.map_or(base, |mark| mark.min(self.at.durable_tail));
            return self.owe_ok(&request, known.max(base));
        }
        let detail = "this copy holds records that start elsewhere";
        self.refuse(&request, PeerCode::LogConflict, detail);
        self.take_base(&request, base);
    }

    /// The leader has nothing below `base` any more. The offer itself moves nothing; what this copy may do
    /// without is a matter of its own: what is known to equal the leader's, and is not on its way to the disk.
    /// That all which stands for it is here as well is the leader's word, who tells nobody before.
    fn take_base(&mut self, request: &FollowerRequest, base: u64) {
        let mark = self.matched.as_ref().and_then(|matched| matched.mark);
        let is_held = self.at.base < base && mark >= Some(base);
        if self.takes_base && is_held && base <= self.at.durable_tail {
            let generation = request.generation;
            let records = base - self.at.base;
            self.note(FollowerNote::Shortened { base, records });
            self.start(DiskWork::RaiseBase { generation, base });
        }
    }

    /// A rebuild gives the copy up. Its records stay where they may be the leader's: they are compared from
    /// `base` on, and only what differs is replaced. Throwing them away first would leave fewer copies of what
    /// a majority holds, just when nobody knows whether the leader lives until the new one is level.
    ///
    /// Of a stream nothing more is promised, or needed. A log that is a state says less without its head until it
    /// has all that was written for that, and it gives the head up at once: a leader that is lost meanwhile leaves
    /// a copy of its companions that nobody should lead with.
    pub(super) fn decide_rebuild(&mut self, request: FollowerRequest, base: u64) {
        let at = &self.at;
        let has_committed = at.base <= base && base < at.commit && base <= at.tail;
        if has_committed && self.below_commit == Some(request.generation) {
            let detail = "a record that a majority holds disagrees with this leader";
            return self.refuse(&request, PeerCode::LogConflict, detail);
        }
        // A copy that begins above the leader's tail would pass for holding what it never held. Of a companion its
        // leader has the head, and need not have what stands for it here: it has to come whole.
        let mark = self.matched.as_ref().and_then(|matched| matched.mark);
        let is_vouched = at.base <= base || (!self.is_companion && mark >= Some(at.base));
        let holds = at.base < at.tail && base <= at.tail;
        let is_kept = self.health == LogHealth::Open && holds && is_vouched;
        let change = match is_kept {
            true => Change::GiveUp { base },
            // Nothing is held or can be read, or there would be a hole.
            false => Change::Rebuild { base },
        };
        self.wait(request, Stage::AwaitQuiet(change));
    }

    /// Nothing started is left: changes the log, if the sender may still ask for it.
    pub(super) fn make_change(&mut self, request: FollowerRequest, change: Change) {
        if let Err((code, detail)) = self.still_allowed(&request) {
            return self.refuse(&request, code, detail);
        }
        match change {
            Change::Truncate { at } => self.drop_suffix(&request, at),
            Change::Bootstrap { base } => {
                self.place(&request, base);
                self.note(FollowerNote::Bootstrapped { base });
            }
            Change::Rebuild { base } => {
                let records = self.at.tail - self.at.base;
                self.place(&request, base);
                self.note(FollowerNote::Rebuilt { base, records });
            }
            Change::GiveUp { base } => self.give_up(&request, base),
        }
    }

    fn place(&mut self, request: &FollowerRequest, base: u64) {
        let generation = request.generation;
        self.start(DiskWork::Place { generation, base });
        if self.health == LogHealth::Broken {
            // What recovery refused takes no event before it is placed anew.
            self.health = LogHealth::Open;
            self.accept(request);
        }
        self.match_from(request, base);
        self.given_up = None;
        self.owe_ok(request, base);
    }

    fn give_up(&mut self, request: &FollowerRequest, base: u64) {
        let generation = request.generation;
        // The leader can vouch for nothing below its base, unless a majority is known to hold it.
        let kept_from = match self.at.commit >= base {
            true => self.at.base,
            false => self.at.base.max(base),
        };
        let records = kept_from - self.at.base;
        if records > 0 {
            let base = kept_from;
            self.start(DiskWork::RaiseBase { generation, base });
        }
        self.note(FollowerNote::Rebuilt { base, records });
        // With what a copy begins that is kept although it begins higher, this leader has agreed.
        self.match_from(request, base.max(kept_from));
        self.given_up = Some(generation);
        self.owe_ok(request, base);
    }

    fn match_from(&mut self, request: &FollowerRequest, mark: u64) {
        self.matched = Some(Matched {
            generation: request.generation,
            mark: Some(mark),
            connection: Some(request.connection),
        });
    }

    fn owe_ok(&mut self, request: &FollowerRequest, durable_offset: u64) {
        let answer = ReplicateAnswer::Ok { durable_offset };
        self.owe(request, OwedAnswer::Fixed(answer));
    }
}
