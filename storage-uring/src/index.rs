//! Sparse index of one log: an entry every `INDEX_EVERY_BYTES` of records.
//!
//! Extents between two entries are found by walking the back pointers in their headers, so memory stays
//! small however fragmented a log is among its neighbours. An idle log holds no entries.
//!
//! Invariants: entries ascend by offset; the first entry's offset is at or below the log's base.

use crate::format::Place;

/// Record bytes between two index entries of a log.
pub const INDEX_EVERY_BYTES: u64 = 32 * 1024;

/// One extent the index remembers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexEntry {
    /// First offset of the extent.
    pub offset: u64,
    /// Where the extent is.
    pub place: Place,
    /// The log's record extent before it.
    pub prev: Place,
}

/// Intervals that lie close together in one segment, for a reader that wants many records at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stretch {
    /// The intervals as one.
    pub interval: Interval,
    /// Its oldest extent.
    pub first: Place,
    /// Where a later extent of the log begins, if it is in the same segment and not far.
    pub next: Option<Place>,
}

impl Stretch {
    /// Bytes from the start of its oldest extent to the start of its newest.
    pub fn span_bytes(&self) -> u64 {
        u64::from(self.interval.newest.position - self.first.position)
    }
}

/// What a log knows about where its records are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LogIndex {
    entries: Vec<IndexEntry>,
    bytes_since_entry: u64,
    last: Option<Place>,
}

/// Where a read has to start walking back, and from which offset on it is not interested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interval {
    /// Newest extent of the interval.
    pub newest: Place,
    /// Offsets from here on belong to the next interval.
    pub end: u64,
}

impl LogIndex {
    /// Notes a record extent that became durable. Where its pointer leads to another extent than the newest one
    /// held, that one was cut off and may be unreadable by now: nobody walks through it.
    pub fn on_extent(&mut self, offset: u64, place: Place, prev: Place, record_bytes: u64) {
        let before = self.last.unwrap_or(prev);
        let is_full = self.bytes_since_entry >= INDEX_EVERY_BYTES;
        if self.entries.is_empty() || is_full || before != prev {
            self.entries.push(IndexEntry {
                offset,
                place,
                prev: before,
            });
            self.bytes_since_entry = 0;
        }
        self.bytes_since_entry += record_bytes;
        self.last = Some(place);
    }

    /// Adds the index of records that follow the ones held.
    pub fn append(&mut self, mut later: LogIndex) {
        if self.entries.is_empty() {
            *self = later;
            return;
        }
        if let (Some(first), Some(last)) = (later.entries.first_mut(), self.last) {
            // Its own pointer may lead to an extent that was cut off and can no longer be read.
            first.prev = last;
        }
        self.entries.extend(later.entries);
        self.bytes_since_entry = later.bytes_since_entry;
        self.last = later.last.or(self.last);
    }

    /// Forgets everything at or above `offset`; the log was cut back.
    pub fn on_truncate(&mut self, offset: u64) {
        let keep = self.entries.partition_point(|entry| entry.offset < offset);
        if let Some(first_cut) = self.entries.get(keep) {
            self.last = Some(first_cut.prev).filter(|prev| prev.is_some());
            self.entries.truncate(keep);
            self.bytes_since_entry = INDEX_EVERY_BYTES;
        }
        // Without such an entry `last` stays: its back pointers lead to what is kept, and readers skip what was cut.
    }

    /// Forgets everything; the log starts anew.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// Forgets entries that only serve offsets below `base`.
    pub fn on_base(&mut self, base: u64) {
        let first_needed = self
            .entries
            .partition_point(|entry| entry.offset <= base)
            .saturating_sub(1);
        self.entries.drain(..first_needed);
    }

    /// Newest durable record extent.
    pub fn last(&self) -> Place {
        self.last.unwrap_or(Place::NONE)
    }

    /// The interval that holds `offset`; `tail` is the log's durable tail.
    pub fn interval(&self, offset: u64, tail: u64) -> Option<Interval> {
        let after = self.entries.partition_point(|entry| entry.offset <= offset);
        match self.entries.get(after) {
            Some(next) => Some(Interval {
                newest: next.prev,
                end: next.offset.min(tail),
            }),
            None => self.last.map(|newest| Interval { newest, end: tail }),
        }
    }

    /// The interval that holds `offset` and those behind it that start within `reach` bytes of its first
    /// extent; none when its extents are spread further than that.
    pub fn stretch(&self, offset: u64, tail: u64, reach: u64) -> Option<Stretch> {
        let after = self.entries.partition_point(|entry| entry.offset <= offset);
        let first = self.entries.get(after.checked_sub(1)?)?.place;
        let is_near = |place: Place| {
            (place.core, place.segment) == (first.core, first.segment)
                && place.position >= first.position
                && u64::from(place.position - first.position) <= reach
        };
        let later = &self.entries[after..];
        let near = later.partition_point(|entry| is_near(entry.place));
        // The entry up to which is read: the last near one, or, when all are near, the end of the log.
        let (interval, next) = match later.get(near) {
            None => {
                let newest = self.last?;
                (Interval { newest, end: tail }, None)
            }
            Some(beyond) if is_near(beyond.prev) => {
                let (newest, end) = (beyond.prev, beyond.offset.min(tail));
                (Interval { newest, end }, None)
            }
            Some(_) => {
                let last = later.get(near.checked_sub(1)?)?;
                let (newest, end) = (last.prev, last.offset.min(tail));
                (Interval { newest, end }, Some(last.place))
            }
        };
        is_near(interval.newest).then_some(Stretch {
            interval,
            first,
            next,
        })
    }

    /// Entries held.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether no entry is held.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(position: u32) -> Place {
        Place {
            segment: 1,
            position,
            core: 0,
        }
    }

    #[test]
    fn a_stretch_takes_what_is_near_and_nothing_else() {
        let mut index = LogIndex::default();
        let mut prev = Place::NONE;
        for i in 0..8u64 {
            // Two hundred bytes apart, the last three far behind the others.
            let far = if i < 5 { 0 } else { 100_000 };
            let here = place(4096 + i as u32 * 200 + far);
            index.on_extent(i * 10, here, prev, INDEX_EVERY_BYTES);
            prev = here;
        }
        let stretch = |offset, reach| index.stretch(offset, 80, reach);
        let of = |newest: u32, end, first: u32, next: Option<u32>| {
            Some(Stretch {
                interval: Interval {
                    newest: place(newest),
                    end,
                },
                first: place(first),
                next: next.map(place),
            })
        };
        assert_eq!(stretch(0, 0), of(4096, 10, 4096, None));
        assert_eq!(stretch(5, 399), of(4296, 20, 4096, None));
        assert_eq!(stretch(15, 450), of(4696, 40, 4296, None));
        assert_eq!(stretch(0, 10_000), of(4896, 50, 4096, None));
        assert_eq!(stretch(55, 10_000), of(105_496, 80, 105_096, None));
        assert_eq!(stretch(0, 200_000), of(105_496, 80, 4096, None));
        assert_eq!(LogIndex::default().stretch(0, 0, 100), None);

        // The second interval leads far away behind its first extent: the stretch ends before it.
        let mut index = LogIndex::default();
        index.on_extent(0, place(4096), Place::NONE, INDEX_EVERY_BYTES);
        index.on_extent(10, place(5000), place(4096), INDEX_EVERY_BYTES / 2);
        index.on_extent(20, place(90_000), place(5000), INDEX_EVERY_BYTES / 2);
        index.on_extent(30, place(91_000), place(90_000), INDEX_EVERY_BYTES);
        let ends_before = index.stretch(0, 40, 2000);
        assert_eq!(ends_before, of(4096, 10, 4096, Some(5000)));
        assert_eq!(index.stretch(10, 40, 2000), None);
    }

    /// What was cut may since be damaged: only what is held is walked.
    #[test]
    fn records_behind_a_cut_do_not_lead_back_through_what_was_cut() {
        let mut index = LogIndex::default();
        index.on_extent(0, place(4096), Place::NONE, 100);
        // An extent of offsets 10..20 at 5000 was cut and is not here.
        let mut later = LogIndex::default();
        later.on_extent(10, place(6000), place(5000), 100);
        index.append(later);
        let newest = |offset| index.interval(offset, 20).map(|it| it.newest);
        assert_eq!(newest(5), Some(place(4096)));
        assert_eq!(newest(15), Some(place(6000)));
    }

    /// The same where the cut shows in no event between, as a group that was undone does not.
    #[test]
    fn an_extent_whose_pointer_leads_past_the_newest_held_is_a_beginning() {
        let mut index = LogIndex::default();
        index.on_extent(0, place(4096), Place::NONE, 100);
        index.on_extent(10, place(6000), place(5000), 100);
        let newest = |index: &LogIndex, offset| index.interval(offset, 30).map(|it| it.newest);
        assert_eq!(newest(&index, 5), Some(place(4096)));
        assert_eq!(newest(&index, 15), Some(place(6000)));
        // What was cut behind such a beginning does not lead back through what it skips, either.
        index.on_truncate(4);
        assert_eq!(index.last(), place(4096));
        index.on_extent(4, place(8000), place(6000), 100);
        assert_eq!(newest(&index, 3), Some(place(4096)));
        assert_eq!(newest(&index, 4), Some(place(8000)));
    }

    #[test]
    fn intervals_lead_to_the_extent_before_the_next_entry() {
        let mut index = LogIndex::default();
        let mut prev = Place::NONE;
        for i in 0..8u64 {
            let here = place(4096 + i as u32 * 100);
            index.on_extent(i * 10, here, prev, INDEX_EVERY_BYTES / 2);
            prev = here;
        }
        assert_eq!(index.len(), 4);
        assert_eq!(
            index.interval(5, 80),
            Some(Interval {
                newest: place(4196),
                end: 20
            })
        );
        assert_eq!(
            index.interval(75, 80),
            Some(Interval {
                newest: place(4796),
                end: 80
            })
        );
        index.on_truncate(35);
        assert_eq!(
            index.interval(34, 35),
            Some(Interval {
                newest: place(4396),
                end: 35
            })
        );
        assert_eq!(index.len(), 2);
        index.on_base(25);
        assert_eq!(index.len(), 1);
    }
}
