//! Where a batch may start, what of it is compared, and what a difference allows: pure arithmetic over
//! the positions of one follower's log.

use std::ops::Range;

use crate::ids::Generation;
use crate::proto::replication::history::Newest;

/// The positions a decision about records rests on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Positions {
    /// First offset held.
    pub base: u64,
    /// One past the last record.
    pub tail: u64,
    /// Below it the log is known to equal the log of this generation's leader; `None` when nothing is
    /// known.
    pub match_mark: Option<u64>,
    /// The newest generation that left records.
    pub newest: Option<Newest>,
    /// One past the last record known to be held by a majority; 0 when unknown.
    pub commit: u64,
    /// This generation's leader had the copy given up.
    pub is_given_up: bool,
}

/// What is known at the first contact with the leader of `generation`, from the log alone.
///
/// When the newest records came under that very generation, everything was compared before they were
/// written. A log that begins at 0 and holds nothing has nothing to compare. One that begins later and is
/// empty has: records below its base that this leader wrote were never here, and may not be vouched for.
pub fn mark_at_first_contact(
    base: u64,
    tail: u64,
    newest: Option<Newest>,
    generation: Generation,
) -> Option<u64> {
    if base == tail && base == 0 {
        return Some(0);
    }
    (newest?.generation == generation).then_some(tail)
}

/// The highest start of a batch this follower takes. A batch above it is answered with a gap, even when it
/// starts at or below the tail: the records between came under an older generation and nobody compared
/// them.
pub fn highest_start(at: &Positions) -> u64 {
    if let Some(mark) = at.match_mark {
        return mark.max(at.base);
    }
    let run_start = at.newest.map_or(0, |newest| newest.run_start);
    let known = run_start.max(at.commit).min(at.tail);
    at.base.max(known.saturating_sub(1))
}

/// The part of the batch `[first, end)` that is held and must be compared; empty when there is none.
pub fn overlap(at: &Positions, first: u64, end: u64) -> Range<u64> {
    let from = first.max(at.base);
    from..end.min(at.tail).max(from)
}

/// Whether a batch `[first, end)` reaches below what this copy begins with and nothing has shown yet that its
/// leader ever had what was given up there: the leader's log may have ended before, and what it wrote at those
/// offsets since was never here. Such a batch proves nothing unless part of it can be compared.
pub fn is_below_the_unknown(at: &Positions, first: u64, end: u64) -> bool {
    first < at.base && at.match_mark < Some(at.base) && overlap(at, first, end).is_empty()
}

/// Why records from `at` on may not be dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Undroppable {
    /// They came under the same generation, or nobody knows under which.
    NotOlder,
    /// The difference reaches further back than the newest older generation.
    BeforeItsStart,
    /// This leader has agreed with that record, or written it.
    Agreed,
    /// A majority holds that record.
    BelowCommit,
    /// It is the first record held of a log whose head was given up: not one record shows that this leader
    /// had the head.
    NothingAgreed,
}

/// Whether a difference at `difference` under `generation` may be repaired by dropping everything from
/// there on. Of a copy that was given up everything may go that this leader has not agreed with since.
pub fn droppable(
    at: &Positions,
    generation: Generation,
    difference: u64,
) -> Result<(), Undroppable> {
    if !at.is_given_up {
        let Some(newest) = at.newest.filter(|newest| newest.generation < generation) else {
            return Err(Undroppable::NotOlder);
        };
        if difference < newest.start {
            return Err(Undroppable::BeforeItsStart);
        }
    }
    if at.match_mark.is_some_and(|mark| difference < mark) {
        return Err(Undroppable::Agreed);
    }
    if difference < at.commit {
        return Err(Undroppable::BelowCommit);
    }
    if difference == at.base && at.base > 0 && at.match_mark < Some(at.base) {
        return Err(Undroppable::NothingAgreed);
    }
    Ok(())
}

/// Whether this copy once held records, has given up all of them, and nothing shows that this leader ever had
/// them. There is nothing left to compare: only a new copy can be vouched for.
pub fn has_nothing_to_show(at: &Positions) -> bool {
    let is_empty = at.base == at.tail && at.base > 0;
    is_empty && at.newest.is_some() && at.match_mark < Some(at.base)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn newest(generation: u64, start: u64, run_start: u64) -> Option<Newest> {
        Some(Newest {
            generation: Generation(generation),
            start,
            run_start,
        })
    }

    fn at(base: u64, tail: u64, match_mark: Option<u64>, newest: Option<Newest>) -> Positions {
        Positions {
            base,
            tail,
            match_mark,
            newest,
            commit: 0,
            is_given_up: false,
        }
    }

    #[test]
    fn highest_start_is_one_below_the_run_or_the_mark() {
        let cases = [
            (at(0, 0, Some(0), None), 0),
            (at(7, 7, Some(7), None), 7),
            (at(7, 7, None, None), 7),
            (at(7, 7, None, newest(2, 5, 3)), 7),
            (at(0, 13, None, newest(2, 10, 10)), 9),
            (at(0, 13, Some(11), newest(2, 10, 10)), 11),
            (at(0, 13, None, newest(1, 0, 0)), 0),
            (at(5, 13, None, newest(1, 2, 2)), 5),
            (at(5, 13, None, None), 5),
            (at(0, 15, None, newest(3, 12, 10)), 9),
        ];
        for (positions, start) in cases {
            assert_eq!(highest_start(&positions), start, "{positions:?}");
        }
    }

    #[test]
    fn a_known_commit_raises_the_start() {
        let with_commit = |commit, newest| Positions {
            commit,
            ..at(0, 20, None, newest)
        };
        assert_eq!(highest_start(&with_commit(15, newest(2, 10, 10))), 14);
        assert_eq!(highest_start(&with_commit(5, newest(2, 10, 10))), 9);
        assert_eq!(highest_start(&with_commit(15, None)), 14);
        assert_eq!(
            highest_start(&with_commit(50, None)),
            19,
            "something is always compared"
        );
    }

    #[test]
    fn only_what_is_held_is_compared() {
        let positions = at(10, 20, Some(20), None);
        assert_eq!(overlap(&positions, 5, 15), 10..15);
        assert_eq!(overlap(&positions, 15, 25), 15..20);
        assert!(overlap(&positions, 20, 25).is_empty());
        assert!(overlap(&positions, 2, 8).is_empty());
    }

    #[test]
    fn a_difference_is_droppable_only_inside_the_newest_older_generation() {
        let positions = at(0, 30, Some(20), newest(2, 10, 8));
        let drop = |p: &Positions, g, d| droppable(p, Generation(g), d);
        assert_eq!(drop(&positions, 3, 22), Ok(()));
        assert_eq!(drop(&positions, 3, 19), Err(Undroppable::Agreed));
        assert_eq!(drop(&positions, 2, 22), Err(Undroppable::NotOlder));
        assert_eq!(drop(&positions, 1, 22), Err(Undroppable::NotOlder));
        let unset = at(0, 30, None, newest(2, 10, 8));
        assert_eq!(drop(&unset, 3, 10), Ok(()));
        assert_eq!(
            drop(&unset, 3, 9),
            Err(Undroppable::BeforeItsStart),
            "inside the run, before the generation"
        );
        let committed = Positions {
            commit: 12,
            ..unset
        };
        assert_eq!(drop(&committed, 3, 11), Err(Undroppable::BelowCommit));
        assert_eq!(drop(&committed, 3, 12), Ok(()));
        assert_eq!(
            drop(&at(0, 30, None, None), 3, 10),
            Err(Undroppable::NotOlder),
            "no history"
        );
    }

    #[test]
    fn what_a_copy_begins_with_is_nothing_it_can_repair() {
        let inside = at(10, 20, None, newest(2, 5, 5));
        let drop = |p: &Positions, d| droppable(p, Generation(3), d);
        assert_eq!(drop(&inside, 10), Err(Undroppable::NothingAgreed));
        assert_eq!(drop(&inside, 11), Ok(()), "one record was equal");
        let vouched = at(10, 20, Some(10), newest(2, 5, 5));
        assert_eq!(
            drop(&vouched, 10),
            Ok(()),
            "the leader said that it begins here"
        );
        let whole = at(0, 20, None, newest(2, 0, 0));
        assert_eq!(drop(&whole, 0), Ok(()), "nothing was given up");
        let given_up = |mark| Positions {
            is_given_up: true,
            ..at(10, 20, Some(mark), newest(3, 5, 5))
        };
        assert_eq!(drop(&given_up(10), 10), Ok(()));
        assert_eq!(drop(&given_up(4), 10), Err(Undroppable::NothingAgreed));
    }

    #[test]
    fn a_batch_below_a_copy_is_no_evidence_about_it() {
        let unknown = at(10, 20, None, newest(2, 5, 5));
        for (first, end, is_below) in [(5, 8, true), (5, 10, true), (9, 11, false), (10, 12, false)]
        {
            assert_eq!(
                is_below_the_unknown(&unknown, first, end),
                is_below,
                "{first}..{end}"
            );
        }
        let empty = at(10, 10, None, None);
        assert!(is_below_the_unknown(&empty, 9, 12));
        assert!(!is_below_the_unknown(&empty, 10, 12));
        let vouched = at(10, 20, Some(10), newest(2, 5, 5));
        assert!(!is_below_the_unknown(&vouched, 5, 8));
        assert!(!is_below_the_unknown(&at(0, 0, Some(0), None), 0, 0));
        assert!(has_nothing_to_show(&at(10, 10, None, newest(2, 5, 5))));
        assert!(!has_nothing_to_show(&empty), "placed, and never held any");
        assert!(!has_nothing_to_show(&unknown));
        assert!(!has_nothing_to_show(&at(10, 10, Some(10), newest(2, 5, 5))));
    }

    #[test]
    fn first_contact_knows_its_own_generation_and_an_empty_log() {
        let mark = mark_at_first_contact;
        assert_eq!(mark(0, 0, None, Generation(3)), Some(0));
        assert_eq!(mark(4, 4, newest(3, 2, 2), Generation(3)), Some(4));
        assert_eq!(mark(4, 4, newest(2, 2, 2), Generation(3)), None);
        assert_eq!(
            mark(4, 4, None, Generation(3)),
            None,
            "its head was never here"
        );
        assert_eq!(mark(0, 9, newest(3, 5, 5), Generation(3)), Some(9));
        assert_eq!(mark(0, 9, newest(2, 5, 5), Generation(3)), None);
        assert_eq!(mark(0, 9, None, Generation(3)), None);
    }
}
