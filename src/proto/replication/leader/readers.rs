//! What readers of a log may see: subscribers and consumer groups, at the broker that leads its shard.
//!
//! Invariant I48: no reader of a `Quorum` shard sees what lies at or past the mark.

/// The highest mark that readers of a shard were shown by a broker, over all the generations at which it leads
/// without anybody else in between. A new generation begins without a mark of its own; what was on a majority
/// stays there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ShownMark(Option<u64>);

impl ShownMark {
    /// The shard's leader has published a mark. The first ones of a new generation may lie below what was shown,
    /// and take nothing back. Gives what is shown from now on.
    pub fn raise(&mut self, mark: u64) -> u64 {
        let shown = self.0.map_or(mark, |shown| shown.max(mark));
        self.0 = Some(shown);
        shown
    }

    /// `None` while nothing was shown.
    pub fn get(self) -> Option<u64> {
        self.0
    }
}

/// What a log's readers are held back by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeldBackBy {
    /// What is not durable here.
    Durability,
    /// What is not known to be on a majority, either.
    Mark(ShownMark),
}

/// Where a log's records may be shown up to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Readable {
    /// Up to here.
    Below(u64),
    /// Nothing is known to be on a majority since this broker took the shard.
    NoMark,
}

impl Readable {
    /// Of a log with that durable tail.
    pub fn of(held_back: HeldBackBy, durable_tail: u64) -> Self {
        match held_back {
            HeldBackBy::Durability => Self::Below(durable_tail),
            HeldBackBy::Mark(shown) => match shown.get() {
                Some(mark) => Self::Below(mark.min(durable_tail)),
                None => Self::NoMark,
            },
        }
    }

    /// One past the last record that may be shown; 0 while that is not known.
    pub fn end(self) -> u64 {
        match self {
            Self::Below(end) => end,
            Self::NoMark => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn marked(marks: &[u64]) -> HeldBackBy {
        let mut shown = ShownMark::default();
        for mark in marks {
            shown.raise(*mark);
        }
        HeldBackBy::Mark(shown)
    }

    #[test]
    fn readers_of_a_log_that_waits_for_nobody_see_what_is_durable() {
        assert_eq!(Readable::of(HeldBackBy::Durability, 7), Readable::Below(7));
    }

    #[test]
    fn readers_see_nothing_at_or_past_the_mark() {
        assert_eq!(Readable::of(marked(&[5]), 7), Readable::Below(5));
        assert_eq!(Readable::of(marked(&[9]), 7), Readable::Below(7));
        assert_eq!(Readable::of(marked(&[]), 7), Readable::NoMark);
        assert_eq!(Readable::of(marked(&[]), 7).end(), 0);
    }

    #[test]
    fn a_mark_of_a_new_generation_takes_nothing_back() {
        assert_eq!(Readable::of(marked(&[5, 3]), 7), Readable::Below(5));
        assert_eq!(Readable::of(marked(&[5, 6]), 7), Readable::Below(6));
    }
}
