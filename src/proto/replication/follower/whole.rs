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
    }

    pub(super) fn decide_rebuild(&mut self, request: FollowerRequest, base: u64) {
        let at = &self.at;
        let keeps_committed =
            at.base <= base && base < at.commit && base <= at.tail && at.base < at.tail;
        if !keeps_committed {
            return self.wait(request, Stage::AwaitQuiet(Change::Rebuild { base }));
        }
        if self.below_commit == Some(request.generation) {
            let detail = "a record that a majority holds disagrees with this leader";
            return self.refuse(&request, PeerCode::LogConflict, detail);
        }
        self.wait(request, Stage::AwaitQuiet(Change::KeepCommitted { base }));
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
            Change::KeepCommitted { base } => self.keep_committed(&request, base),
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
        self.match_from(request, Some(base));
        self.owe_ok(request, base);
    }

    fn keep_committed(&mut self, request: &FollowerRequest, base: u64) {
        let (generation, tail) = (request.generation, self.at.commit);
        let records = self.at.tail.saturating_sub(tail);
        if records > 0 {
            self.start(DiskWork::Truncate { generation, tail });
        }
        self.note(FollowerNote::Rebuilt { base, records });
        self.match_from(request, None);
        self.owe_ok(request, base);
    }

    fn match_from(&mut self, request: &FollowerRequest, mark: Option<u64>) {
        self.matched = Some(Matched {
            generation: request.generation,
            mark,
            connection: Some(request.connection),
        });
    }

    fn owe_ok(&mut self, request: &FollowerRequest, durable_offset: u64) {
        let answer = ReplicateAnswer::Ok { durable_offset };
        self.owe(request, OwedAnswer::Fixed(answer));
    }
}
