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

/// What a log knows about where its records are.
#[derive(Debug, Clone, Default)]
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
    /// Notes a record extent that became durable.
    pub fn on_extent(&mut self, offset: u64, place: Place, prev: Place, record_bytes: u64) {
        if self.entries.is_empty() || self.bytes_since_entry >= INDEX_EVERY_BYTES {
            self.entries.push(IndexEntry {
                offset,
                place,
                prev,
            });
            self.bytes_since_entry = 0;
        }
        self.bytes_since_entry += record_bytes;
        self.last = Some(place);
    }

    /// Adds the index of records that follow the ones held.
    pub fn append(&mut self, later: LogIndex) {
        if self.entries.is_empty() {
            *self = later;
            return;
        }
        self.entries.extend(later.entries);
        self.bytes_since_entry = later.bytes_since_entry;
        self.last = later.last.or(self.last);
    }

    /// Forgets everything at or above `offset`; the log was cut back.
    pub fn on_truncate(&mut self, offset: u64) {
        let keep = self.entries.partition_point(|entry| entry.offset < offset);
        if keep < self.entries.len() {
            self.entries.truncate(keep);
            // `last` stays: its back pointers lead to what is kept, and readers skip what was cut.
            self.bytes_since_entry = INDEX_EVERY_BYTES;
        }
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
                newest: place(4796),
                end: 35
            })
        );
        assert_eq!(index.len(), 2);
        index.on_base(25);
        assert_eq!(index.len(), 1);
    }
}
