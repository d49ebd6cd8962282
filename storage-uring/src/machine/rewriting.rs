//! Which segments are rewritten without what nobody needs, and what stays of them.
//!
//! A sweep notes finished segments of which little is needed; when it is done, they are rewritten one after
//! the other, first those of which the smallest share is needed. One that is not worth it after all is left
//! alone until less of it is needed.
//!
//! Invariants:
//! - INV-S8: what a rewriting drops is below its log's durable base, or belongs to a log that was placed
//!   anew since, or is an event that a durable restatement in a later segment covers;
//! - INV-S9: one segment at a time is being rewritten; it is not given back meanwhile, and one on its way to
//!   being given back is not rewritten;
//! - INV-S10: a rewriting gives back at least as many bytes as it writes.

use super::{Action, CommitMachine, Health};
use crate::format::rewritten::{FRAME_BYTES, FRAME_HEADER_BYTES, PIECE_HEADER_BYTES};
use crate::format::segment::SEGMENT_HEADER_BYTES;
use crate::format::ALIGN;
use crate::rewrite::{LogNeed, RewriteFault, RewritePlan, RewriteTotals};
use crate::usage::LogUse;

/// A segment is rewritten when what is needed of it takes at most one part in so many of its file. With 2,
/// disk use stays below twice what is needed, and no byte is copied for which another is not given back: a
/// smaller share would copy less and leave more lying.
const KEPT_SHARE: u64 = 2;
/// Segments noted in one sweep; what is noted beyond replaces the fullest.
const NOTED_MAX: usize = 64;
/// Sweeps that pass after an attempt that failed: what was in its way may take a while to go.
const PAUSED_SWEEPS: u32 = 8;

/// A segment worth rewriting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Noted {
    segment: u64,
    kept_bytes: u64,
    file_bytes: u64,
}

impl Noted {
    /// Needed share of the file, in parts of 2^32.
    fn share(&self) -> u64 {
        let scaled = u128::from(self.kept_bytes) << 32;
        u64::try_from(scaled / u128::from(self.file_bytes.max(1))).unwrap_or(u64::MAX)
    }
}

/// What is being rewritten, and what comes next.
#[derive(Debug, Default)]
pub(super) struct Rewriting {
    under_way: Option<Noted>,
    /// Of the last whole sweep, smallest share last.
    waiting: Vec<Noted>,
    /// Of the sweep under way.
    noted: Vec<Noted>,
    /// Sweeps until the next attempt, after one that failed.
    paused_sweeps: u32,
}

impl Rewriting {
    pub fn is_under_way(&self) -> bool {
        self.under_way.is_some() || !self.waiting.is_empty()
    }

    pub fn on_sweep_done(&mut self) {
        self.waiting = std::mem::take(&mut self.noted);
        self.paused_sweeps = self.paused_sweeps.saturating_sub(1);
        if self.paused_sweeps > 0 {
            self.waiting.clear();
        }
        self.waiting
            .sort_by_key(|noted| std::cmp::Reverse(noted.share()));
    }

    fn note(&mut self, new: Noted) {
        if self.noted.len() == NOTED_MAX {
            let fullest = self.noted.iter().enumerate();
            let fullest = fullest.max_by_key(|(_, noted)| noted.share());
            match fullest.map(|(at, noted)| (at, noted.share())) {
                Some((at, share)) if share > new.share() => drop(self.noted.swap_remove(at)),
                _ => return,
            }
        }
        self.noted.push(new);
    }
}

/// Length of a file that holds pieces of `bytes`, at most: its header, frames begun and not filled, padding.
fn file_bytes_for(bytes: u64) -> u64 {
    let per_frame = (FRAME_BYTES / 2) as u64;
    // A frame is ended when the next piece does not fit; two of them hold more than one full one.
    let frames = bytes / per_frame + 1;
    SEGMENT_HEADER_BYTES + bytes + frames * (FRAME_HEADER_BYTES + ALIGN) as u64
}

impl CommitMachine {
    /// The segment was rewritten, durably, and nobody reads the old file any more.
    pub fn on_segment_rewritten(&mut self, segment: u64, totals: &RewriteTotals) {
        let Some(noted) = self.end_rewriting(segment) else {
            return;
        };
        let logs = &mut self.logs;
        self.segments.on_rewritten(segment, totals, |id, bytes| {
            if let Some(log) = logs.by_id(id) {
                let state = logs.get_mut(log);
                state.held_bytes = state.held_bytes.saturating_sub(bytes);
            }
        });
        self.reclaim.look_again_at(segment);
        self.stats.segments_rewritten += 1;
        self.stats.rewrite_copied_bytes += totals.file_bytes;
        self.stats.rewrite_returned_bytes += noted.file_bytes.saturating_sub(totals.file_bytes);
        self.reclaim.note_news();
        self.rewrite_next();
    }

    /// A rewriting came to nothing; the segment is as it was. Without a fault of the segment it is tried again
    /// some sweeps later.
    pub fn on_rewrite_failed(&mut self, segment: u64, fault: Option<RewriteFault>) {
        let Some(noted) = self.end_rewriting(segment) else {
            return;
        };
        match fault {
            Some(RewriteFault::Source(_)) => self.segments.mark_damaged(segment),
            Some(RewriteFault::NotWorth) => {
                if let Some(found) = self.segments.get_mut(segment) {
                    found.tried_at = noted.kept_bytes;
                }
            }
            // Another may need less.
            Some(RewriteFault::NoRoom) => {}
            None => {
                self.reclaim.rewriting.waiting.clear();
                self.reclaim.rewriting.paused_sweeps = PAUSED_SWEEPS;
            }
        }
        self.rewrite_next();
    }

    #[cfg(test)]
    pub(crate) fn segments_for_tests(&mut self) -> &mut crate::usage::SegmentTable {
        &mut self.segments
    }

    fn end_rewriting(&mut self, segment: u64) -> Option<Noted> {
        let under_way = &mut self.reclaim.rewriting.under_way;
        under_way.take_if(|noted| noted.segment == segment)
    }

    pub(super) fn is_being_rewritten(&self, segment: u64) -> bool {
        let under_way = &self.reclaim.rewriting.under_way;
        under_way.is_some_and(|noted| noted.segment == segment)
    }

    /// Bytes of a new file that one log of a segment takes, about.
    pub(super) fn kept_bytes(&self, segment: u64, entry: LogUse) -> u64 {
        let Some(log) = self.logs.by_id(entry.log) else {
            return 0;
        };
        let state = self.logs.get(log);
        let keeps_events = state.restated_in <= segment && entry.has_events();
        let kept = entry.kept_bytes(entry.end > state.base, keeps_events);
        match kept {
            0 => 0,
            kept => kept + (state.encoded_name.len() + PIECE_HEADER_BYTES) as u64,
        }
    }

    /// Notes a segment a sweep went through, when rewriting it is worth it.
    pub(super) fn consider_rewriting(&mut self, segment: u64, kept_bytes: u64) {
        if self.is_being_rewritten(segment) {
            return;
        }
        let Some(found) = self.segments.get_mut(segment) else {
            return;
        };
        let file_bytes = found.file_bytes;
        let is_small = file_bytes_for(kept_bytes) <= file_bytes / KEPT_SHARE;
        let is_new = found.tried_at == 0 || kept_bytes / 3 < found.tried_at / 4;
        if is_small && is_new {
            self.reclaim.rewriting.note(Noted {
                segment,
                kept_bytes,
                file_bytes,
            });
        }
    }

    /// Begins with the next segment that was noted, if none is being rewritten.
    pub(super) fn rewrite_next(&mut self) {
        let is_ending = matches!(self.health, Health::Failed(_)) || self.close_requested;
        while self.reclaim.rewriting.under_way.is_none() && !is_ending {
            let Some(noted) = self.reclaim.rewriting.waiting.pop() else {
                return;
            };
            // It may have left since it was noted.
            let is_leaving = self.reclaim.leaving == Some(noted.segment);
            if let Some(plan) = self.plan_rewriting(noted).filter(|_| !is_leaving) {
                self.reclaim.rewriting.under_way = Some(noted);
                let plan = Box::new(plan);
                self.outbox.push_back(Action::Rewrite { plan });
            }
        }
    }

    /// What stays of a segment; none when it is not known well enough. A look at a log for each of its logs.
    fn plan_rewriting(&mut self, noted: Noted) -> Option<RewritePlan> {
        let segment = noted.segment;
        let found = self.segments.get_mut(segment)?;
        // It may have been noted by two sweeps, and rewritten after the first.
        let is_as_noted = found.file_bytes == noted.file_bytes;
        let is_written = segment >= self.durable_segment || self.writes_out.reach(segment);
        if found.is_damaged || is_written || !is_as_noted {
            return None;
        }
        let mut logs = Vec::with_capacity(found.logs.len());
        for entry in &found.logs {
            let state = self.logs.get(self.logs.by_id(entry.log)?);
            if state.damage.is_some() {
                return None;
            }
            let records_above = match entry.end > state.base {
                true => state.base,
                false => u64::MAX,
            };
            logs.push(LogNeed {
                log: entry.log,
                records_above,
                drops_events: state.restated_in > segment,
            });
        }
        Some(RewritePlan {
            segment,
            whole: found.whole(self.durable_group),
            logs,
            file_bytes: found.file_bytes,
            expected_bytes: file_bytes_for(noted.kept_bytes),
            max_bytes: found.file_bytes / KEPT_SHARE,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_emptiest_come_first_and_the_fullest_are_left_out() {
        let mut rewriting = Rewriting::default();
        for segment in 1..=NOTED_MAX as u64 + 10 {
            rewriting.note(Noted {
                segment,
                kept_bytes: 1000 - segment,
                file_bytes: 4096,
            });
        }
        rewriting.note(Noted {
            segment: 500,
            kept_bytes: 999,
            file_bytes: 4096,
        });
        assert!(!rewriting.is_under_way());
        rewriting.on_sweep_done();
        let order: Vec<u64> = std::iter::from_fn(|| rewriting.waiting.pop())
            .map(|noted| noted.segment)
            .collect();
        let emptiest: Vec<u64> = (11..=NOTED_MAX as u64 + 10).rev().collect();
        assert_eq!(order, emptiest);
    }
}
