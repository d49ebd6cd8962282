//! How the mark of a shard rises: a candidate, its report, its release.

use super::{ReportGate, ShardEvent, ShardLeader};
use crate::proto::replication::leader::cursor::Cursor;
use crate::proto::replication::leader::gate::{FollowerPosition, Report, ReportId, Submitted};
use crate::proto::replication::leader::opening::OpeningPhase;

impl<G: ReportGate> ShardLeader<G> {
    /// A report was stored, or refused.
    pub fn on_report(&mut self, id: ReportId, is_stored: bool) {
        let Some((_, mark)) = self.pending_report.take_if(|(pending, _)| *pending == id) else {
            return;
        };
        // Who was counted when the report was made may have halted since, or lost its copy.
        let now = self.candidate();
        if let Some(mark) = mark.filter(|mark| is_stored && now >= Some(*mark)) {
            self.release(mark);
        }
        self.advance_mark();
    }

    /// What could be the mark now, if that is news.
    fn candidate(&mut self) -> Option<u64> {
        let main = self.logs.first()?;
        let answered = main.cursors.iter().filter_map(Cursor::counted);
        self.mark.candidate(main.synced, answered)
    }

    pub(super) fn advance_mark(&mut self) {
        let is_leading = matches!(
            self.opening.phase(),
            OpeningPhase::Probing | OpeningPhase::Open
        );
        if !is_leading {
            return;
        }
        let Some(candidate) = self.candidate() else {
            return;
        };
        if self.pending_report.is_some() {
            // The next one collects what arrives meanwhile.
            return;
        }
        match self.submit(Some(candidate)) {
            Submitted::Stored => self.release(candidate),
            Submitted::Pending(id) => self.pending_report = Some((id, Some(candidate))),
        }
    }

    /// A copy has to be made anew that a stored report may name: wants one stored that does not. The mark stays.
    pub(super) fn unname_the_halted(&mut self) {
        if self.pending_report.is_none() {
            if let Submitted::Pending(id) = self.submit(self.mark.get()) {
                self.pending_report = Some((id, None));
            }
        }
    }

    /// Wants it stored how far the followers are. Whoever has to have any of its copies made anew is halted:
    /// it is not to be promoted without that log.
    fn submit(&mut self, mark: Option<u64>) -> Submitted {
        self.positions.clear();
        for place in 0..self.spec.followers.len() {
            let mut cursors = self.logs.iter().filter_map(|log| log.cursors.get(place));
            let main = self.logs.first().and_then(|main| main.cursors.get(place));
            let to_rebuild = cursors.find_map(Cursor::made_anew);
            self.positions.push(FollowerPosition {
                answered: main.and_then(Cursor::position),
                halted: main.and_then(Cursor::halted).or(to_rebuild),
            });
        }
        let report = Report {
            generation: self.spec.generation,
            leader_tail: self.logs.first().map_or(0, |main| main.synced),
            mark,
            floor: self.floor,
            followers: &self.positions,
        };
        self.gate.submit(&report)
    }

    fn release(&mut self, mark: u64) {
        if self.opening.phase() != OpeningPhase::Fenced && self.mark.get() < Some(mark) {
            self.mark.release(mark);
            self.events.push_back(ShardEvent::Marked { mark });
        }
    }

    pub(super) fn after_opening_step(&mut self, before: OpeningPhase) {
        if before != OpeningPhase::Open && self.opening.is_open() {
            self.events.push_back(ShardEvent::Opened);
            self.advance_mark();
        }
    }
}
