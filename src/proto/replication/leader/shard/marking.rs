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
        if is_stored {
            self.release(mark);
        }
        self.advance_mark();
    }

    pub(super) fn advance_mark(&mut self) {
        let is_leading = matches!(
            self.opening.phase(),
            OpeningPhase::Probing | OpeningPhase::Open
        );
        let Some(main) = self.logs.first().filter(|_| is_leading) else {
            return;
        };
        let answered = main.cursors.iter().filter_map(Cursor::counted);
        let Some(candidate) = self.mark.candidate(main.synced, answered) else {
            return;
        };
        if self.pending_report.is_some() {
            // The next one collects what arrives meanwhile.
            return;
        }
        self.positions.clear();
        self.positions
            .extend(main.cursors.iter().map(|cursor| FollowerPosition {
                answered: cursor.position(),
                halted: cursor.halted(),
            }));
        let report = Report {
            generation: self.spec.generation,
            leader_tail: main.synced,
            mark: Some(candidate),
            floor: self.floor,
            followers: &self.positions,
        };
        match self.gate.submit(&report) {
            Submitted::Stored => self.release(candidate),
            Submitted::Pending(id) => self.pending_report = Some((id, candidate)),
        }
    }

    fn release(&mut self, mark: u64) {
        if self.opening.phase() != OpeningPhase::Fenced {
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
