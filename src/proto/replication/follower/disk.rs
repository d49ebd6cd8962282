//! Disk work in the order it was started, and the answers that rest on it.

use super::{
    DiskError, DiskWork, FollowerAction, FollowerLog, FollowerNote, LogHealth, Owed, OwedAnswer,
    Pending, Resync, Stage,
};
use crate::proto::outcome::PeerCode;
use crate::proto::replication::types::ReplicateAnswer;

impl FollowerLog {
    /// Starts disk work and applies it to what is known of the log.
    pub(super) fn start(&mut self, work: DiskWork) {
        let at = &mut self.at;
        match &work {
            DiskWork::Accept { generation } => at.accepted = at.accepted.max(*generation),
            DiskWork::Begin { generation, leader } => {
                at.accepted = at.accepted.max(*generation);
                at.history.begin(*generation, at.tail, leader.clone());
            }
            DiskWork::Append { payloads, skip, .. } => {
                at.tail += (payloads.len() - skip) as u64;
            }
            DiskWork::Truncate { tail, .. } => {
                at.history.truncate(*tail);
                at.tail = *tail;
                at.durable_tail = at.durable_tail.min(*tail);
            }
            DiskWork::RaiseBase { base, .. } => {
                at.history.raise_base(*base);
                at.base = *base;
            }
            DiskWork::Place { base, .. } => {
                at.history.clear();
                (at.base, at.tail, at.durable_tail) = (*base, *base, *base);
            }
        }
        self.last_ticket += 1;
        let ticket = self.last_ticket;
        self.pending.push_back(Pending {
            ticket,
            tail_after: self.at.tail,
            is_placing: matches!(work, DiskWork::Place { .. }),
            is_done: false,
        });
        self.outbox.push_back(FollowerAction::Disk { ticket, work });
    }

    pub(super) fn work_is_durable(&mut self, ticket: u64) {
        if let Some(done) = self.pending.iter_mut().find(|p| p.ticket == ticket) {
            done.is_done = true;
        }
        while let Some(first) = self.pending.front().filter(|first| first.is_done) {
            self.at.durable_tail = first.tail_after;
            self.pending.pop_front();
        }
        self.release();
    }

    /// Everything from `ticket` on did not happen.
    pub(super) fn work_failed(&mut self, ticket: u64, error: DiskError) {
        if error == DiskError::Failed && self.health != LogHealth::Poisoned {
            self.health = LogHealth::Poisoned;
            self.note(FollowerNote::Poisoned);
        }
        let is_poisoned = self.health == LogHealth::Poisoned;
        // Work that rests on it and was not handed out is not handed out any more.
        let pending = &mut self.pending;
        self.outbox.retain(|action| match action {
            FollowerAction::Disk { ticket: later, .. } if *later > ticket => {
                pending.retain(|p| p.ticket != *later);
                false
            }
            _ => true,
        });
        self.pending.retain(|p| p.ticket != ticket);
        let answer = failure_answer(error);
        for owed in &mut self.owed {
            // A log whose sync failed acknowledges nothing more, not even what came before.
            if is_poisoned || owed.after >= ticket {
                owed.answer = OwedAnswer::Fixed(answer);
                owed.after = 0;
            }
        }
        if let Some(current) = &mut self.current {
            current.stage = Stage::Decide;
        }
        if is_poisoned {
            self.resync = None;
        } else {
            self.resync = Some(Resync::Draining);
        }
        self.release();
    }

    /// Sends the answers whose work is durable, in order.
    pub(super) fn release(&mut self) {
        let oldest = self.pending.front().map_or(u64::MAX, |p| p.ticket);
        while let Some(owed) = self.owed.front().filter(|owed| owed.after < oldest) {
            let (request, answer) = (owed.request, self.answer_now(owed));
            self.owed.pop_front();
            self.outbox
                .push_back(FollowerAction::Answer { request, answer });
        }
    }

    fn answer_now(&self, owed: &Owed) -> ReplicateAnswer {
        let is_positive = match owed.answer {
            OwedAnswer::Matched => true,
            OwedAnswer::Fixed(answer) => answer.code().is_none(),
        };
        if is_positive && self.at.accepted > owed.generation {
            // A newer leader was accepted while the disk worked: the older one counts nothing more here.
            let detail = "a newer generation is known here";
            return ReplicateAnswer::refused(PeerCode::FencedEpoch, detail);
        }
        match owed.answer {
            OwedAnswer::Fixed(answer) => answer,
            OwedAnswer::Matched => {
                let mark = self.matched.as_ref().and_then(|matched| matched.mark);
                let known = mark.unwrap_or(self.at.base);
                ReplicateAnswer::Ok {
                    durable_offset: known.min(self.at.durable_tail),
                }
            }
        }
    }
}

fn failure_answer(error: DiskError) -> ReplicateAnswer {
    let (code, detail) = match error {
        DiskError::Overloaded => (PeerCode::Overload, "the storage queue is full"),
        DiskError::Full => (PeerCode::StorageFailed, "the disk is full"),
        DiskError::TooLarge => (
            PeerCode::StorageFailed,
            "a record is larger than this broker can store",
        ),
        DiskError::Moved => (PeerCode::Unavailable, "the log changed meanwhile"),
        DiskError::Damaged => (PeerCode::StorageFailed, "the log is damaged"),
        DiskError::Failed => (PeerCode::StorageFailed, "a write or its sync failed"),
    };
    ReplicateAnswer::refused(code, detail)
}
