//! The generation history of a log: which leader's generation its records were appended under.
//!
//! Pure values and the upkeep rules; storage keeps the same list on disk and applies the same rules to
//! the same events. A lost or shortened history costs automatic repair, never correctness.
//!
//! Invariant HIST-1: entries ascend strictly in generation and weakly in start; no start exceeds the tail
//! of the log they belong to.

use crate::ids::{Generation, NodeId};

/// Entries kept; the oldest go first.
pub const MAX_HISTORY_ENTRIES: usize = 1024;

/// Records from `start` up to the next entry's start were appended under `generation`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct HistoryEntry {
    /// The generation they were appended under.
    pub generation: Generation,
    /// The first offset appended under it.
    pub start: u64,
    /// Who led at that generation.
    pub leader: NodeId,
}

/// What a follower needs to know about the newest generation that left records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Newest {
    /// The newest generation with records.
    pub generation: Generation,
    /// Where its records start.
    pub start: u64,
    /// Where the run of one leader that it belongs to starts: nobody compared anything at the boundaries
    /// inside a run. Never above `start`.
    pub run_start: u64,
}

/// A generation history, oldest entry first.
#[derive(Debug, Clone, PartialEq, Eq, Default, Hash)]
pub struct History {
    entries: Vec<HistoryEntry>,
}

impl History {
    /// No entries.
    pub const fn new() -> Self {
        Self {
            entries: Vec::new(),
        }
    }

    /// The history of these entries; `None` when they break HIST-1.
    pub fn from_entries(entries: Vec<HistoryEntry>) -> Option<Self> {
        let ascends = entries
            .windows(2)
            .all(|pair| pair[0].generation < pair[1].generation && pair[0].start <= pair[1].start);
        let mut history = Self { entries };
        history.forget_oldest();
        ascends.then_some(history)
    }

    /// The entries, oldest first.
    pub fn entries(&self) -> &[HistoryEntry] {
        &self.entries
    }

    /// Whether nothing is known.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The newest entry, with or without records.
    pub fn last(&self) -> Option<&HistoryEntry> {
        self.entries.last()
    }

    /// `generation` begins at the log's tail: what began at or past it left no records and goes.
    ///
    /// A generation that does not exceed the newest entry's is not recorded twice.
    pub fn begin(&mut self, generation: Generation, tail: u64, leader: NodeId) {
        self.truncate(tail);
        if self
            .last()
            .is_some_and(|last| last.generation >= generation)
        {
            return;
        }
        self.entries.push(HistoryEntry {
            generation,
            start: tail,
            leader,
        });
        self.forget_oldest();
    }

    /// The log was cut back to `tail`.
    pub fn truncate(&mut self, tail: u64) {
        let kept = self.entries.partition_point(|entry| entry.start < tail);
        self.entries.truncate(kept);
    }

    /// The log was placed or discarded.
    pub fn clear(&mut self) {
        self.entries.clear();
    }

    /// The log's base rose to `base`: an entry none of whose records are left goes.
    pub fn raise_base(&mut self, base: u64) {
        let gone = self
            .entries
            .windows(2)
            .take_while(|pair| pair[1].start <= base)
            .count();
        self.entries.drain(..gone);
    }

    /// The newest entry that has records below `tail`; `None` when no entry has.
    pub fn newest(&self, tail: u64) -> Option<Newest> {
        let with_records = self.entries.partition_point(|entry| entry.start < tail);
        let newest = self.entries[..with_records].last()?;
        let run_start = self.entries[..with_records]
            .iter()
            .rev()
            .take_while(|entry| entry.leader == newest.leader)
            .last()
            .map_or(newest.start, |entry| entry.start);
        Some(Newest {
            generation: newest.generation,
            start: newest.start,
            run_start,
        })
    }

    /// The generation the record at `offset` was appended under, as far as is known.
    pub fn generation_of(&self, offset: u64) -> Option<Generation> {
        let covered = self.entries.partition_point(|entry| entry.start <= offset);
        self.entries[..covered].last().map(|entry| entry.generation)
    }

    fn forget_oldest(&mut self) {
        let over = self.entries.len().saturating_sub(MAX_HISTORY_ENTRIES);
        self.entries.drain(..over);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn history(entries: &[(u64, u64, &str)]) -> History {
        let entry = |&(generation, start, leader): &(u64, u64, &str)| HistoryEntry {
            generation: Generation(generation),
            start,
            leader: NodeId::new(leader).unwrap(),
        };
        History::from_entries(entries.iter().map(entry).collect()).unwrap()
    }

    fn newest(h: &History, tail: u64) -> Option<(u64, u64, u64)> {
        h.newest(tail)
            .map(|n| (n.generation.0, n.start, n.run_start))
    }

    fn begin(h: &mut History, generation: u64, tail: u64, leader: &str) {
        h.begin(Generation(generation), tail, NodeId::new(leader).unwrap());
    }

    #[test]
    fn upkeep_follows_the_table_of_events() {
        let mut h = History::new();
        begin(&mut h, 1, 0, "a");
        begin(&mut h, 2, 10, "b");
        assert_eq!(h, history(&[(1, 0, "a"), (2, 10, "b")]));
        // First record under 4 at 10: what began at or past it goes.
        begin(&mut h, 4, 10, "c");
        assert_eq!(h, history(&[(1, 0, "a"), (4, 10, "c")]));
        begin(&mut h, 4, 12, "c");
        assert_eq!(h.entries().len(), 2, "a generation begins once");
        h.truncate(10);
        assert_eq!(h, history(&[(1, 0, "a")]));
        h.truncate(0);
        assert!(h.is_empty());
    }

    #[test]
    fn a_raised_base_drops_entries_without_records() {
        let mut h = history(&[(1, 0, "a"), (2, 10, "b"), (3, 20, "a")]);
        h.raise_base(9);
        assert_eq!(h.entries().len(), 3);
        h.raise_base(10);
        assert_eq!(h, history(&[(2, 10, "b"), (3, 20, "a")]));
        h.raise_base(100);
        assert_eq!(h, history(&[(3, 20, "a")]), "the last entry stays");
    }

    #[test]
    fn an_idle_generation_is_not_the_newest_with_records() {
        // Worked example 9: node a led 2 and 3, and wrote nothing in 3.
        let h = history(&[(1, 0, "x"), (2, 10, "a"), (3, 15, "a")]);
        assert_eq!(newest(&h, 15), Some((2, 10, 10)));
        assert_eq!(newest(&h, 16), Some((3, 15, 10)), "one run of one leader");
        assert_eq!(newest(&h, 10), Some((1, 0, 0)));
        assert_eq!(newest(&h, 0), None);
        assert_eq!(newest(&History::new(), 5), None);
    }

    #[test]
    fn another_leader_ends_a_run() {
        let h = history(&[(1, 0, "a"), (2, 10, "b"), (3, 20, "a"), (5, 30, "a")]);
        assert_eq!(newest(&h, 40), Some((5, 30, 20)));
        assert_eq!(newest(&h, 20), Some((2, 10, 10)));
    }

    #[test]
    fn records_are_labelled_by_the_entry_below_them() {
        let h = history(&[(1, 5, "a"), (2, 10, "b")]);
        let label = |offset| h.generation_of(offset).map(|g| g.0);
        assert_eq!((label(4), label(5), label(9)), (None, Some(1), Some(1)));
        assert_eq!((label(10), label(99)), (Some(2), Some(2)));
    }

    #[test]
    fn disordered_entries_are_no_history_and_long_ones_lose_their_oldest() {
        let entry = |generation, start| HistoryEntry {
            generation: Generation(generation),
            start,
            leader: NodeId::new("a").unwrap(),
        };
        assert!(History::from_entries(vec![entry(2, 0), entry(2, 1)]).is_none());
        assert!(History::from_entries(vec![entry(1, 5), entry(2, 4)]).is_none());
        let mut h = History::new();
        for generation in 0..MAX_HISTORY_ENTRIES as u64 + 3 {
            begin(&mut h, generation + 1, generation, "a");
        }
        assert_eq!(h.entries().len(), MAX_HISTORY_ENTRIES);
        assert_eq!(h.entries()[0].generation, Generation(4));
    }
}
