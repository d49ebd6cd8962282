//! What each segment of a core log is still good for.
//!
//! One entry a log and segment. The machine keeps it up to date as groups become durable; recovery builds
//! the same from the bytes.
//!
//! A segment is needed by a log while the log's base is below the end of what the segment holds of it. A
//! truncation lowers that end to the cut and no further: extents that were cut are not data, but the back
//! pointers of what was appended afterwards lead through them until the base passes the cut.

use std::collections::{BTreeMap, HashMap};

use crate::format::freed::FreedRun;
use crate::name::LogId;

/// What one segment holds of one log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogUse {
    /// The log.
    pub log: LogId,
    /// One past the last offset; needed while the log's base is below.
    pub end: u64,
    /// Bytes of its records; 0 once they are given up.
    pub bytes: u64,
    /// Whether events of the log (or a restatement of its state) are here.
    pub has_events: bool,
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
    /// Wall-clock microseconds of its newest group.
    pub newest_time_us: u64,
    /// Something in it could not be read: it is kept for a human.
    pub is_damaged: bool,
    /// Logs in it; sorted once the next segment was begun.
    pub logs: Vec<LogUse>,
}

impl SegmentUse {
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

    /// Something in a segment could not be read: it is never given back.
    pub fn mark_damaged(&mut self, seq: u64) {
        self.segments.entry(seq).or_default().is_damaged = true;
    }

    /// A group is log.
    pub fn on_group(&mut self, seq: u64, group: u64, link: (u64, u64), time_us: u64) {
        if self.current != seq {
            if let Some(done) = self.segments.get_mut(&self.current) {
                done.logs.sort_unstable_by_key(|entry| entry.log);
                done.logs.shrink_to_fit();
            }
            self.current = seq;
            self.slots.clear();
        }
        let segment = self.segments.entry(seq).or_insert_with(|| SegmentUse {
            first_group: group,
            link,
            ..SegmentUse::default()
        });
        segment.last_group = group;
        segment.newest_time_us = segment.newest_time_us.max(time_us);
    }

    /// Records up to `end` of a log are in the current segment. `slot` remembers where the log is there: the
    /// caller keeps it for the log.
    pub fn on_records(&mut self, log: LogId, slot: &mut UseSlot, end: u64, bytes: u64) {
        self.held_bytes += bytes;
        let entry = self.entry(log, slot);
        entry.end = end;
        entry.bytes += bytes;
    }

    /// An event of a log is in the current segment.
    pub fn on_event(&mut self, log: LogId, slot: &mut UseSlot) {
        self.entry(log, slot).has_events = true;
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
                    has_events: false,
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

    #[test]
    fn cuts_lower_ends_and_a_new_start_needs_nothing_old() {
        let (a, b) = (LogId(9), LogId(2));
        let mut table = SegmentTable::default();
        for seq in 1..=3 {
            table.on_group(seq, seq, (seq - 1, 4096), seq);
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
