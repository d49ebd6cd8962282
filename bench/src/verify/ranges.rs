//! A set of sequence numbers, kept as ranges: memory grows with the gaps, not with the numbers.

use std::collections::BTreeMap;

/// Ranges that neither touch nor overlap.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RangeSet {
    /// Start to end, the end not included.
    ranges: BTreeMap<u64, u64>,
}

impl RangeSet {
    /// Adds `start..end`; what is there already stays.
    pub fn insert(&mut self, mut start: u64, mut end: u64) {
        if start >= end {
            return;
        }
        while let Some((&s, &e)) = self.ranges.range(..=end).next_back() {
            if e < start {
                break;
            }
            self.ranges.remove(&s);
            start = start.min(s);
            end = end.max(e);
        }
        self.ranges.insert(start, end);
    }

    /// Whether `n` is in the set.
    pub fn contains(&self, n: u64) -> bool {
        self.ranges
            .range(..=n)
            .next_back()
            .is_some_and(|(_, &end)| n < end)
    }

    /// How many numbers there are.
    pub fn len(&self) -> u64 {
        self.ranges.iter().map(|(s, e)| e - s).sum()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// The ranges, ascending.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.ranges.iter().map(|(s, e)| (*s, *e))
    }

    /// How many numbers of this set are not in `other`.
    pub fn missing_from(&self, other: &RangeSet) -> u64 {
        self.iter()
            .map(|(start, end)| end - start - other.count_within(start, end))
            .sum()
    }

    fn count_within(&self, start: u64, end: u64) -> u64 {
        let before = self.ranges.range(..start).next_back();
        before
            .into_iter()
            .chain(self.ranges.range(start..end))
            .map(|(&s, &e)| e.min(end).saturating_sub(s.max(start)))
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn agrees_with_a_plain_set() {
        let mut state = 7u64;
        let mut next = move |n: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) % n
        };
        for _ in 0..200 {
            let (mut a, mut b) = (RangeSet::default(), RangeSet::default());
            let (mut plain_a, mut plain_b) = (BTreeSet::new(), BTreeSet::new());
            for _ in 0..30 {
                let (start, len) = (next(100), next(8));
                if next(2) == 0 {
                    a.insert(start, start + len);
                    plain_a.extend(start..start + len);
                } else {
                    b.insert(start, start + len);
                    plain_b.extend(start..start + len);
                }
            }
            assert_eq!(a.len(), plain_a.len() as u64);
            assert!((0..110).all(|n| a.contains(n) == plain_a.contains(&n)));
            let missing = plain_a.difference(&plain_b).count() as u64;
            assert_eq!(a.missing_from(&b), missing);
            let ends: Vec<_> = a.iter().collect();
            assert!(ends.windows(2).all(|w| w[0].1 < w[1].0), "merged: {ends:?}");
        }
    }

    #[test]
    fn a_run_in_order_is_one_range() {
        let mut set = RangeSet::default();
        for n in 0..10_000 {
            set.insert(n, n + 1);
        }
        assert_eq!(set.iter().collect::<Vec<_>>(), [(0, 10_000)]);
    }
}
