//! Retention and giving segments back: which base rises, which segment can go, what has to be restated first.
//!
//! A sweep looks at the finished segments from the oldest to the newest, a bounded number of entries a step,
//! and then begins anew. In each it raises bases whose retention allows it; when nothing in a segment is
//! needed any more, the state of logs whose newest copy is there is restated at the end of the log; once that
//! is durable, the segment goes.
//!
//! A segment of which little is needed is rewritten (`rewriting`).
//!
//! Invariants:
//! - INV-S5: a segment is given back only when every record in it is below its log's durable base, every
//!   event in it is covered by a durable restatement in a later segment, and the device has no write for it
//!   any more: its file is used again;
//! - INV-S6: one segment at a time is on its way to being given back; the record of freed segments names it
//!   before its file goes;
//! - INV-S7: what reclaiming queues never makes an append wait for room in the queue.

use super::append::state_name_bytes;
use super::control::{ControlEvent, Restated};
use super::logs::LogRef;
use super::rewriting::Rewriting;
use super::{Action, CommitMachine, Health};
use crate::format::body::CRC_BYTES;
use crate::format::extent::EXTENT_HEADER_BYTES;
use crate::format::freed::{FreedRuns, RUNS_MAX};
use crate::usage::{LogUse, SegmentTable, SegmentUse};

/// Entries (log and segment) looked at in one step.
pub(super) const STEP_ENTRIES: usize = 1024;
/// What a step costs beside its entries, in entries.
const STEP_COST: usize = 16;
/// Restatements queued in one step.
const STEP_RESTATEMENTS: usize = 256;

/// Where the sweep is.
#[derive(Debug, Default)]
pub(super) struct Reclaim {
    freed: FreedRuns,
    /// Segment on its way to being given back.
    pub(super) leaving: Option<u64>,
    pub(super) rewriting: Rewriting,
    cursor: Cursor,
    /// Number of the sweep under way.
    sweep: u64,
    /// Since the sweep under way began something was done, or happened that may give the next one something to
    /// do.
    has_news: bool,
    /// The last whole sweep found nothing to do, and nothing has happened since.
    is_fruitless: bool,
}

impl Reclaim {
    /// Something happened that may make a segment unneeded.
    pub fn note_news(&mut self) {
        self.has_news = true;
        self.is_fruitless = false;
    }

    /// The entries of a segment are others than they were: what the sweep under way knows of it is void.
    pub fn look_again_at(&mut self, segment: u64) {
        if self.cursor.segment == segment {
            self.cursor = Cursor {
                segment,
                ..Cursor::default()
            };
        }
    }

    fn begin_anew(&mut self) {
        self.cursor = Cursor::default();
        self.sweep += 1;
        self.is_fruitless = !self.has_news;
        self.rewriting.on_sweep_done();
    }
}

/// What one step of the sweep did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Looked at that many entries.
    Looked(usize),
    /// The sweep has begun anew.
    Anew,
    /// Not now: the queue is long, or the log is ending.
    Busy,
}

#[derive(Debug, Default)]
struct Cursor {
    segment: u64,
    entry: usize,
    /// Something in the segment is needed.
    is_needed: bool,
    /// Restatements the segment waits for.
    missing: usize,
    /// Something in it is not to be judged now: it is not rewritten either.
    is_unsure: bool,
    /// Bytes of a new file for what is needed of it, about.
    kept_bytes: u64,
}

/// What one entry means for its segment.
enum Need {
    /// A log nobody opened, or one whose base is about to rise.
    Unsure,
    /// Its records.
    Needed,
    /// Its log's state has to be restated first.
    Restate(LogRef),
    /// Nothing.
    Nothing,
}

impl CommitMachine {
    /// Takes over the segments and freed runs recovery found; before the first group.
    pub fn adopt_segments(&mut self, segments: SegmentTable, freed: FreedRuns) {
        self.segments = segments;
        self.reclaim.freed = freed;
    }

    /// Sets how long records of a log are kept.
    pub fn set_retention(&mut self, log: LogRef, retention: super::Retention) {
        let state = self.logs.get_mut(log);
        let has_bounds = retention.bytes > 0 || retention.age_us > 0;
        let is_news = has_bounds && state.retention != retention;
        state.retention = retention;
        if is_news {
            self.reclaim.note_news();
        }
    }

    /// How long records of a log are kept.
    pub fn retention(&self, log: LogRef) -> super::Retention {
        self.logs.get(log).retention
    }

    /// Bytes of records that were not given up, as far as the sweep knows.
    pub fn held_bytes(&self) -> u64 {
        self.segments.held_bytes()
    }

    /// Bytes of the files of segments that hold groups. Looks at each of them.
    pub fn segment_bytes(&self) -> u64 {
        self.segments.iter().map(|(_, it)| it.file_bytes).sum()
    }

    /// Segments that hold groups.
    pub fn segment_count(&self) -> usize {
        self.segments.len()
    }

    /// Goes on with the sweep until it begins anew or has looked at `entries` entries; true when it is done
    /// for now.
    pub fn reclaim(&mut self, wall_us: u64, now_us: u64, entries: usize) -> bool {
        let mut left = entries;
        loop {
            let Step::Looked(looked) = self.reclaim_step(wall_us, now_us) else {
                return true;
            };
            left = left.saturating_sub(looked + STEP_COST);
            if left == 0 {
                return false;
            }
        }
    }

    fn reclaim_step(&mut self, wall_us: u64, now_us: u64) -> Step {
        let busy = self.queued_bytes > self.config.max_queued_bytes / 2;
        if matches!(self.health, Health::Failed(_)) || self.close_requested || busy {
            return Step::Busy;
        }
        // The segment with the newest durable group holds the end of the log; those behind it are in use.
        let finished_below = self.durable_segment;
        let Some(segment) = self.next_segment().filter(|seq| *seq < finished_below) else {
            self.reclaim.begin_anew();
            self.rewrite_next();
            return Step::Anew;
        };
        if self.reclaim.cursor.segment == 0 {
            // What happened before is seen by the sweep that begins.
            self.reclaim.has_news = false;
        }
        if self.reclaim.cursor.segment != segment {
            self.reclaim.cursor = Cursor {
                segment,
                ..Cursor::default()
            };
        }
        Step::Looked(self.look_at_entries(segment, wall_us, now_us))
    }

    /// The record of freed segments is durable and the file is gone.
    pub fn on_segment_freed(&mut self, segment: u64) {
        self.reclaim.leaving = None;
        self.segments.remove(segment);
        self.stats.segments_freed += 1;
        self.reclaim.note_news();
    }

    /// The record could not be stored: the segment stays for now.
    pub fn on_free_failed(&mut self) {
        self.reclaim.leaving = None;
        self.reclaim.note_news();
    }

    /// Whether a segment is on its way to being given back, or the sweep may yet find one that can go.
    pub fn may_give_back(&self) -> bool {
        let is_rewriting = self.reclaim.rewriting.is_under_way();
        self.reclaim.leaving.is_some() || is_rewriting || !self.reclaim.is_fruitless
    }

    fn next_segment(&self) -> Option<u64> {
        let from = self.reclaim.cursor.segment;
        let next = self.segments.next_from(from)?;
        if self.reclaim.leaving == Some(next) {
            return self.segments.next_from(next + 1);
        }
        Some(next)
    }

    /// Gives back how many entries it looked at.
    fn look_at_entries(&mut self, segment: u64, wall_us: u64, now_us: u64) -> usize {
        let Some(found) = self.segments.get_mut(segment) else {
            return 0;
        };
        let (newest_us, from) = (found.newest_time_us, self.reclaim.cursor.entry);
        self.reclaim.cursor.is_needed |= found.is_damaged;
        self.reclaim.cursor.is_unsure |= found.is_damaged;
        let until = found.logs.len().min(from + self.step_entries);
        let mut restated = 0;
        for at in from..until {
            let Some(entry) = self.entry(segment, at) else {
                break;
            };
            let (bytes, need) = self.look_at(segment, entry, newest_us, wall_us, now_us);
            self.segments.set_bytes(segment, at, bytes);
            self.reclaim.cursor.kept_bytes += self.kept_bytes(segment, entry);
            match need {
                Need::Needed => self.reclaim.cursor.is_needed = true,
                Need::Unsure => {
                    self.reclaim.cursor.is_needed = true;
                    self.reclaim.cursor.is_unsure = true;
                }
                // Not for a segment that stays anyway.
                Need::Restate(_) if self.reclaim.cursor.is_needed => {}
                Need::Restate(log) => {
                    self.reclaim.cursor.missing += 1;
                    // One that has to wait gives the next sweep something to do.
                    self.reclaim.note_news();
                    if restated < STEP_RESTATEMENTS && self.restate(log, wall_us, now_us) {
                        restated += 1;
                    }
                }
                Need::Nothing => {}
            }
        }
        self.reclaim.cursor.entry = until;
        if self.entry(segment, until).is_none() {
            self.finish_segment(segment);
        }
        until.saturating_sub(from)
    }

    fn entry(&mut self, segment: u64, at: usize) -> Option<LogUse> {
        let found = self.segments.get_mut(segment)?;
        found.logs.get(at).copied()
    }

    /// Judges one entry; gives back the bytes it counts with from now on.
    fn look_at(
        &mut self,
        segment: u64,
        entry: LogUse,
        newest_us: u64,
        wall_us: u64,
        now_us: u64,
    ) -> (u64, Need) {
        let Some(log) = self.logs.by_id(entry.log) else {
            return (entry.bytes, Need::Unsure);
        };
        let state = self.logs.get(log);
        if state.damage.is_some() {
            return (entry.bytes, Need::Unsure);
        }
        if entry.end > state.base {
            let given_up = self.expire(log, entry, newest_us, wall_us, now_us);
            // Until the raised base is durable its bytes do not count, and are needed all the same.
            let is_raising = entry.bytes == 0 && self.logs.get(log).is_in_flux();
            return match (given_up, is_raising) {
                (true, _) => (0, Need::Unsure),
                (false, true) => (entry.bytes, Need::Unsure),
                (false, false) => (entry.bytes, Need::Needed),
            };
        }
        let need = if entry.has_events() && state.restated_in <= segment {
            Need::Restate(log)
        } else {
            Need::Nothing
        };
        let state = self.logs.get_mut(log);
        state.held_bytes = state.held_bytes.saturating_sub(entry.bytes);
        (0, need)
    }

    /// Raises the base over what a finished segment holds of a log, if its retention says so.
    fn expire(
        &mut self,
        log: LogRef,
        entry: LogUse,
        newest_us: u64,
        wall_us: u64,
        now_us: u64,
    ) -> bool {
        let state = self.logs.get(log);
        let keep = state.retention;
        let too_old = keep.age_us > 0 && newest_us.saturating_add(keep.age_us) <= wall_us;
        let left = state.held_bytes.saturating_sub(entry.bytes);
        let too_much = keep.bytes > 0 && left >= keep.bytes;
        let base = entry.end.min(keep.below).min(state.durable_tail);
        // The log may have grown since this sweep kept something older: what is kept ends a log's turn, so that
        // the base never passes bytes that still count.
        let may_go = (too_old || too_much) && state.kept_in_sweep != self.reclaim.sweep;
        // Behind an event that is not durable yet the log may be another one than what the segment's end tells.
        let is_raised = may_go && !state.is_in_flux() && base > state.queued_base && {
            // A full queue or disk leaves it to the next sweep.
            let event = ControlEvent::Base(base);
            self.queue_control(log, event, wall_us, now_us).is_ok()
        };
        let sweep = self.reclaim.sweep;
        let state = self.logs.get_mut(log);
        if !is_raised || base < entry.end {
            if entry.bytes > 0 {
                state.kept_in_sweep = sweep;
            }
            return false;
        }
        state.held_bytes = state.held_bytes.saturating_sub(entry.bytes);
        self.stats.retention_raises += 1;
        self.reclaim.note_news();
        true
    }

    /// Queues a restatement of a log's state; false when it has to wait.
    fn restate(&mut self, log: LogRef, wall_us: u64, now_us: u64) -> bool {
        let state = self.logs.get(log);
        // Events on their way are not in the durable state yet.
        if state.restating || state.is_in_flux() || state.damage.is_some() {
            return false;
        }
        let restated = Restated {
            base: state.base,
            tail: state.tail,
            generation: state.generation,
            control: state.control.clone(),
        };
        let content = restated.encode();
        let len = EXTENT_HEADER_BYTES + state_name_bytes(self, log) + content.len() + CRC_BYTES;
        if !self.has_room_for_event(len) {
            return false;
        }
        self.ensure_room_for_event(now_us, len);
        if let Some(open) = self.open.as_mut() {
            open.push_state(self.writer.tail(), &mut self.logs, log, wall_us, &content);
        }
        self.count_open();
        self.logs.get_mut(log).restating = true;
        self.reclaim.note_news();
        true
    }

    fn finish_segment(&mut self, segment: u64) {
        let Cursor {
            is_needed,
            missing,
            is_unsure,
            kept_bytes,
            ..
        } = self.reclaim.cursor;
        let can_go = !is_needed && missing == 0;
        if can_go && self.reclaim.leaving.is_none() && !self.is_being_rewritten(segment) {
            if self.writes_out.reach(segment) {
                // One of a group that was undone: the next sweep looks again.
                self.reclaim.note_news();
            } else {
                self.free(segment);
            }
        }
        if is_needed && !is_unsure {
            self.consider_rewriting(segment, kept_bytes);
        }
        self.go_to(segment + 1);
    }

    fn go_to(&mut self, segment: u64) {
        self.reclaim.cursor = Cursor {
            segment,
            ..Cursor::default()
        };
    }

    fn free(&mut self, segment: u64) {
        let Some(found) = self.segments.get_mut(segment) else {
            return;
        };
        let run = SegmentUse::as_run(found, segment);
        let mut freed = self.reclaim.freed.clone();
        freed.add(run);
        if freed.len() > RUNS_MAX {
            return;
        }
        let record = freed.encode(&self.config.uuid, self.config.core);
        // Should storing it fail, its naming a segment that is still there does no harm: nothing needs it.
        self.reclaim.freed = freed;
        self.reclaim.leaving = Some(segment);
        self.reclaim.note_news();
        self.outbox.push_back(Action::Free { segment, record });
    }
}
