//! What each segment of a core log is still good for.
//!
//! One entry a log and segment. The machine keeps it up to date as groups become durable; recovery builds
//! the same from the bytes.
//!
//! A segment is needed by a log while the log's base is below the end of what the segment holds of it. A
//! truncation lowers that end to the cut and no further: extents that were cut are not data, but the back
//! pointers of what was appended afterwards lead through them until the base passes the cut.

use std::collections::{BTreeMap, HashMap};

use crate::format::extent::EXTENT_HEADER_BYTES;
use crate::format::freed::FreedRun;
use crate::format::rewritten::{Rewritten, PIECE_HEADER_BYTES};
use crate::name::LogId;
use crate::rewrite::RewriteTotals;

/// What one segment holds of one log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogUse {
    /// The log.
    pub log: LogId,
    /// One past the last offset; needed while the log's base is below.
    pub end: u64,
    /// Bytes of its records; 0 once they are given up.
    pub bytes: u64,
    /// Its record extents, also after their bytes were given up.
    pub extents: u32,
    /// Bytes of its events and of restatements of its state; 0: none is here.
    pub event_bytes: u32,
}

impl LogUse {
    /// Whether events of the log (or a restatement of its state) are here.
    pub fn has_events(&self) -> bool {
        self.event_bytes > 0
    }

    /// Bytes that what is here takes in a rewritten file, about: all records or none, all events or none. Records
    /// that were cut and events that stay whatever happens are not counted, though they stay.
    pub fn kept_bytes(&self, keeps_records: bool, keeps_events: bool) -> u64 {
        let mut kept = 0;
        if keeps_records {
            let around = (EXTENT_HEADER_BYTES + PIECE_HEADER_BYTES) as u64;
            kept += self.bytes + u64::from(self.extents) * around;
        }
        if keeps_events {
            // An event is not shorter than its header.
            let events = u64::from(self.event_bytes);
            kept += events + events / EXTENT_HEADER_BYTES as u64 * PIECE_HEADER_BYTES as u64;
        }
        kept
    }
}

/// One group of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupUse {
    /// Its number.
    pub group: u64,
    /// Where the log ended before it.
    pub link: (u64, u64),
    /// Position one past it.
    pub end: u64,
    /// Wall-clock microseconds of an append in it.
    pub time_us: u64,
    /// Length of the segment's file.
    pub file_bytes: u64,
}

/// Where a log is in the list of the segment that is being written; 0 is no segment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UseSlot {
    segment: u64,
    at: usize,
}

/// One segment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SegmentUse {
    /// First group in it.
    pub first_group: u64,
    /// Last group in it.
    pub last_group: u64,
    /// Where the log ended before it.
    pub link: (u64, u64),
    /// Position one past the last group.
    pub end: u64,
    /// Wall-clock microseconds of its newest group.
    pub newest_time_us: u64,
    /// Length of its file.
    pub file_bytes: u64,
    /// Bytes that seemed to be needed when rewriting it turned out not to be worth it; 0: never tried.
    pub tried_at: u64,
    /// Something in it could not be read: it is kept for a human.
    pub is_damaged: bool,
    /// Logs in it; sorted once the next segment was begun.
    pub logs: Vec<LogUse>,
}

impl SegmentUse {
    /// What a file says about the segment that is rewritten while `durable_group` is the highest durable group.
    pub fn whole(&self, durable_group: u64) -> Rewritten {
        Rewritten {
            first_group: self.first_group,
            last_group: self.last_group,
            link: self.link,
            end: self.end,
            newest_time_us: self.newest_time_us,
            durable_group,
        }
    }

    /// The segment as a run of the record of freed segments.
    pub fn as_run(&self, seq: u64) -> FreedRun {
        FreedRun {
            first_seq: seq,
            last_seq: seq,
            link: self.link,
            first_group: self.first_group,
            last_group: self.last_group,
        }
    }
}

/// The segments of one core directory that hold groups.
#[derive(Debug, Default)]
pub struct SegmentTable {
    segments: BTreeMap<u64, SegmentUse>,
    /// Segment being written, and where each log is in its list.
    current: u64,
    slots: HashMap<LogId, usize>,
    /// Sum of the bytes of all entries.
    held_bytes: u64,
}

impl SegmentTable {
    /// A table of segments that are all finished.
    pub fn new(segments: BTreeMap<u64, SegmentUse>) -> Self {
        let mut table = Self {
            segments,
            ..Self::default()
        };
        for segment in table.segments.values_mut() {
            segment.logs.sort_unstable_by_key(|entry| entry.log);
            let bytes: u64 = segment.logs.iter().map(|entry| entry.bytes).sum();
            table.held_bytes += bytes;
        }
        table
    }

    /// Takes the segments out.
    pub fn into_segments(self) -> BTreeMap<u64, SegmentUse> {
        self.segments
    }

    /// All segments, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &SegmentUse)> {
        self.segments.iter().map(|(seq, segment)| (*seq, segment))
    }

    /// The oldest segment from `seq` on.
    pub fn next_from(&self, seq: u64) -> Option<u64> {
        self.segments.range(seq..).next().map(|(seq, _)| *seq)
    }

    /// One segment.
    pub fn get_mut(&mut self, seq: u64) -> Option<&mut SegmentUse> {
        self.segments.get_mut(&seq)
    }

    /// Forgets a segment.
    pub fn remove(&mut self, seq: u64) {
        if let Some(gone) = self.segments.remove(&seq) {
            let bytes: u64 = gone.logs.iter().map(|entry| entry.bytes).sum();
            self.held_bytes -= bytes;
        }
    }

    /// Number of segments.
    pub fn len(&self) -> usize {
        self.segments.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// Bytes of records that were not given up.
    pub fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    /// Sets what one entry counts with.
    pub fn set_bytes(&mut self, seq: u64, at: usize, bytes: u64) {
        let segment = self.segments.get_mut(&seq);
        if let Some(entry) = segment.and_then(|segment| segment.logs.get_mut(at)) {
            self.held_bytes = self.held_bytes - entry.bytes + bytes;
            entry.bytes = bytes;
        }
    }

    /// Sets the length of a segment's file.
    pub fn set_file_bytes(&mut self, seq: u64, bytes: u64) {
        if let Some(segment) = self.segments.get_mut(&seq) {
            segment.file_bytes = bytes;
        }
    }

    /// A segment was rewritten. `on_dropped` hears of every log with bytes that went.
    pub fn on_rewritten(
        &mut self,
        seq: u64,
        totals: &RewriteTotals,
        mut on_dropped: impl FnMut(LogId, u64),
    ) {
        let Some(segment) = self.segments.get_mut(&seq) else {
            return;
        };
        segment.file_bytes = totals.file_bytes;
        segment.tried_at = 0;
        let mut dropped = 0;
        segment.logs.retain_mut(|entry| {
            let kept = totals.kept.get(&entry.log).copied();
            let left = kept.unwrap_or_default();
            // What was given up since the plan was made counts with nothing already.
            let gone = entry.bytes.saturating_sub(left.bytes);
            if gone > 0 {
                on_dropped(entry.log, gone);
                dropped += gone;
            }
            entry.bytes -= gone;
            entry.extents = left.extents;
            entry.event_bytes = left.event_bytes;
            kept.is_some()
        });
        segment.logs.shrink_to_fit();
        self.held_bytes -= dropped;
    }

    /// Something in a segment could not be read: it is never given back.
    pub fn mark_damaged(&mut self, seq: u64) {
        self.segments.entry(seq).or_default().is_damaged = true;
    }

    /// A group is log.
    pub fn on_group(&mut self, seq: u64, group: &GroupUse) {
        if self.current != seq {
            if let Some(done) = self.segments.get_mut(&self.current) {
                done.logs.sort_unstable_by_key(|entry| entry.log);
                done.logs.shrink_to_fit();
            }
            self.current = seq;
            self.slots.clear();
        }
        let segment = self.segments.entry(seq).or_insert_with(|| SegmentUse {
            first_group: group.group,
            link: group.link,
            file_bytes: group.file_bytes,
            ..SegmentUse::default()
        });
        segment.file_bytes = segment.file_bytes.max(group.file_bytes);
        segment.last_group = group.group;
        segment.end = group.end;
        segment.newest_time_us = segment.newest_time_us.max(group.time_us);
    }

    /// Records up to `end` of a log are in the current segment. `slot` remembers where the log is there: the
    /// caller keeps it for the log.
    pub fn on_records(&mut self, log: LogId, slot: &mut UseSlot, end: u64, bytes: u64) {
        self.held_bytes += bytes;
        let entry = self.entry(log, slot);
        entry.end = end;
        entry.bytes += bytes;
        entry.extents = entry.extents.saturating_add(1);
    }

    /// An event of a log, an extent of `bytes`, is in the current segment.
    pub fn on_event(&mut self, log: LogId, slot: &mut UseSlot, bytes: usize) {
        let entry = self.entry(log, slot);
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        entry.event_bytes = entry.event_bytes.saturating_add(bytes);
    }

    fn entry(&mut self, log: LogId, known: &mut UseSlot) -> &mut LogUse {
        let current = self.current;
        let segment = self.segments.entry(current).or_default();
        if known.segment != current {
            let at = *self.slots.entry(log).or_insert_with(|| {
                segment.logs.push(LogUse {
                    log,
                    end: 0,
                    bytes: 0,
                    extents: 0,
                    event_bytes: 0,
                });
                segment.logs.len() - 1
            });
            *known = UseSlot {
                segment: current,
                at,
            };
        }
        &mut segment.logs[known.at]
    }

    /// The log was cut back to `tail`. Returns the bytes that no longer count: all of what reached past it,
    /// because what was cut must not make anything older go, and how much of it stays is not known.
    pub fn on_truncate(&mut self, log: LogId, tail: u64) -> u64 {
        let mut given_up = 0;
        self.each_of(log, |entry| {
            let reaches_below = entry.end <= tail && entry.end > 0;
            if entry.end > tail {
                given_up += std::mem::take(&mut entry.bytes);
                entry.end = tail;
            }
            // Older segments end lower still.
            !reaches_below
        });
        self.held_bytes -= given_up;
        given_up
    }

    /// The log of one entry was cut back to `end` in another core's directory. As for `on_truncate`, its bytes
    /// count no more.
    pub fn cut_entry(&mut self, seq: u64, at: usize, end: u64) {
        self.set_bytes(seq, at, 0);
        let segment = self.segments.get_mut(&seq);
        if let Some(entry) = segment.and_then(|segment| segment.logs.get_mut(at)) {
            entry.end = entry.end.min(end);
        }
    }

    /// The log was emptied: nothing of it is needed.
    pub fn on_place(&mut self, log: LogId) {
        let mut given_up = 0;
        self.each_of(log, |entry| {
            given_up += std::mem::take(&mut entry.bytes);
            entry.end = 0;
            true
        });
        self.held_bytes -= given_up;
    }

    /// Calls for the log's entries, newest segment first, until told to stop.
    fn each_of(&mut self, log: LogId, mut on_entry: impl FnMut(&mut LogUse) -> bool) {
        for (seq, segment) in self.segments.iter_mut().rev() {
            let slot = if *seq == self.current {
                self.slots.get(&log).copied()
            } else {
                segment
                    .logs
                    .binary_search_by_key(&log, |entry| entry.log)
                    .ok()
            };
            if let Some(slot) = slot {
                if !on_entry(&mut segment.logs[slot]) {
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends(table: &SegmentTable, log: LogId) -> Vec<u64> {
        let of = |segment: &SegmentUse| {
            let entry = segment.logs.iter().find(|entry| entry.log == log);
            entry.map(|entry| entry.end)
        };
        table
            .iter()
            .filter_map(|(_, segment)| of(segment))
            .collect()
    }

    fn group(seq: u64) -> GroupUse {
        GroupUse {
            group: seq,
            link: (seq - 1, 4096),
            end: 8192,
            time_us: seq,
            file_bytes: 65_536,
        }
    }

    #[test]
    fn what_a_rewriting_dropped_no_longer_counts() {
        let (a, b, c) = (LogId(1), LogId(2), LogId(3));
        let mut table = SegmentTable::default();
        table.on_group(1, &group(1));
        for log in [a, b, c] {
            table.on_records(log, &mut UseSlot::default(), 10, 100);
            table.on_records(log, &mut UseSlot::default(), 20, 100);
            table.on_event(log, &mut UseSlot::default(), 72);
        }
        table.on_group(2, &group(2));
        let mut totals = RewriteTotals {
            file_bytes: 8192,
            ..RewriteTotals::default()
        };
        for (log, bytes) in [(a, 100), (b, 200)] {
            let kept = totals.kept.entry(log).or_default();
            (kept.bytes, kept.extents) = (bytes, 1);
        }
        // Given up while the new file was being written: it does not count twice.
        table.set_bytes(1, 1, 0);
        let mut dropped = Vec::new();
        table.on_rewritten(1, &totals, |log, bytes| dropped.push((log, bytes)));
        assert_eq!(dropped, [(a, 100), (c, 200)]);
        assert_eq!(table.held_bytes(), 100);
        let left = table.get_mut(1).expect("held");
        assert_eq!(left.file_bytes, 8192);
        let entries: Vec<_> = left
            .logs
            .iter()
            .map(|it| (it.log, it.bytes, it.end))
            .collect();
        assert_eq!(entries, [(a, 100, 20), (b, 0, 20)]);
        assert!(left.logs.iter().all(|entry| !entry.has_events()));
    }

    #[test]
    fn cuts_lower_ends_and_a_new_start_needs_nothing_old() {
        let (a, b) = (LogId(9), LogId(2));
        let mut table = SegmentTable::default();
        for seq in 1..=3 {
            table.on_group(seq, &group(seq));
            table.on_records(a, &mut UseSlot::default(), seq * 10, 100);
            table.on_records(b, &mut UseSlot::default(), seq, 10);
        }
        assert_eq!(table.held_bytes(), 330);
        // What was cut does not count as held: two segments reached past the cut.
        assert_eq!(table.on_truncate(a, 15), 200);
        assert_eq!(table.held_bytes(), 130);
        assert_eq!(table.on_truncate(a, 15), 0);
        assert_eq!(ends(&table, a), [10, 15, 15]);
        table.on_records(a, &mut UseSlot::default(), 17, 20);
        assert_eq!(ends(&table, a), [10, 15, 17]);
        assert_eq!(ends(&table, b), [1, 2, 3]);
        table.on_place(a);
        assert_eq!(ends(&table, a), [0, 0, 0]);
        assert_eq!(ends(&table, b), [1, 2, 3]);
    }
}
