//! Which reads of older data are made before they are asked for.
//!
//! A reader that follows a log through what has left memory asks, takes, and asks again where it stopped.
//! From its second read on, the next one is made while it works on the last: then the disk and the reader do
//! not wait for each other. A single read starts nothing.
//!
//! Invariants: at most `READS_AHEAD_MAX` at once; a result is handed out only for the very question it was
//! made for, and only while no event has changed the log since.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::task::Waker;

use crate::error::ReadError;
use crate::machine::{LogRef, ReadBatch};

/// Reads made ahead at once, those whose result was not fetched included.
const READS_AHEAD_MAX: usize = 8;
/// Ends of earlier reads that are remembered, to see who goes on.
const ENDS_MAX: usize = 64;
/// After this long a result nobody fetched makes way for another.
const STALE_AFTER_US: u64 = 500_000;

/// A question: records of `log` from `from` on, at most `max_bytes`, of the log as it is after `changes`
/// events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Wanted {
    pub log: LogRef,
    pub from: u64,
    pub max_bytes: usize,
    pub changes: u32,
}

/// Where the answer to a question appears.
#[derive(Default)]
pub(super) struct AheadSlot {
    pub result: Option<Result<ReadBatch, ReadError>>,
    pub waker: Option<Waker>,
}

struct Entry {
    wanted: Wanted,
    since_us: u64,
    slot: Rc<RefCell<AheadSlot>>,
}

/// The reads made ahead on one core.
#[derive(Default)]
pub(super) struct ReadsAhead {
    entries: Vec<Entry>,
    /// Log and offset where reads ended, oldest first.
    ends: VecDeque<(LogRef, u64)>,
    /// Of those begun, how many have no answer yet.
    running: usize,
}

impl ReadsAhead {
    /// The slot of a read made ahead for this question, if there is one; it is the caller's now.
    pub fn take(&mut self, wanted: &Wanted) -> Option<Rc<RefCell<AheadSlot>>> {
        let at = self.entries.iter().position(|it| it.wanted == *wanted)?;
        Some(self.entries.swap_remove(at).slot)
    }

    /// Whether a read of `log` from `from` on goes on where an earlier one ended.
    pub fn goes_on(&mut self, log: LogRef, from: u64) -> bool {
        let known = self.ends.iter().position(|end| *end == (log, from));
        if let Some(at) = known {
            self.ends.remove(at);
        }
        known.is_some()
    }

    /// Notes that a read of `log` ended at `next`.
    pub fn ended(&mut self, log: LogRef, next: u64) {
        if self.ends.len() == ENDS_MAX {
            self.ends.pop_front();
        }
        self.ends.push_back((log, next));
    }

    /// A place for the answer to a question that will probably be asked; none when it is being answered or
    /// as many are under way as may be.
    pub fn begin(&mut self, wanted: Wanted, now_us: u64) -> Option<Rc<RefCell<AheadSlot>>> {
        if self.entries.iter().any(|it| it.wanted == wanted) {
            return None;
        }
        if self.entries.len() == READS_AHEAD_MAX {
            let stale = self.entries.iter().position(|it| it.is_stale(now_us))?;
            self.entries.swap_remove(stale);
        }
        let slot = Rc::new(RefCell::new(AheadSlot::default()));
        self.entries.push(Entry {
            wanted,
            since_us: now_us,
            slot: Rc::clone(&slot),
        });
        self.running += 1;
        Some(slot)
    }

    /// A read that was begun has its answer.
    pub fn end(&mut self, slot: &Rc<RefCell<AheadSlot>>, result: Result<ReadBatch, ReadError>) {
        self.running -= 1;
        let mut slot = slot.borrow_mut();
        slot.result = Some(result);
        if let Some(waker) = slot.waker.take() {
            waker.wake();
        }
    }

    /// Whether every read that was begun has its answer.
    pub fn is_idle(&self) -> bool {
        self.running == 0
    }
}

impl Entry {
    fn is_stale(&self, now_us: u64) -> bool {
        self.slot.borrow().result.is_some() && now_us >= self.since_us + STALE_AFTER_US
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(log: u32, from: u64) -> Wanted {
        Wanted {
            log: LogRef(log),
            from,
            max_bytes: 100,
            changes: 0,
        }
    }

    fn answer(ahead: &mut ReadsAhead, slot: &Rc<RefCell<AheadSlot>>) {
        ahead.end(slot, Err(ReadError::LogDamaged));
    }

    #[test]
    fn only_who_goes_on_where_a_read_ended_is_followed() {
        let mut ahead = ReadsAhead::default();
        let (log, other) = (LogRef(1), LogRef(2));
        assert!(!ahead.goes_on(log, 0));
        ahead.ended(log, 10);
        assert!(!ahead.goes_on(other, 10), "another log");
        assert!(!ahead.goes_on(log, 11), "another offset");
        assert!(ahead.goes_on(log, 10));
        assert!(!ahead.goes_on(log, 10), "one reader went on there");
        ahead.ended(log, 20);
        for log in 3..3 + ENDS_MAX as u32 {
            ahead.ended(LogRef(log), 5);
        }
        assert!(!ahead.goes_on(log, 20), "forgotten for newer ones");
        assert!(ahead.ends.len() <= ENDS_MAX);
    }

    #[test]
    fn an_answer_is_only_for_its_question() {
        let mut ahead = ReadsAhead::default();
        let slot = ahead.begin(wanted(1, 10), 0).expect("there is room");
        answer(&mut ahead, &slot);
        assert!(ahead.begin(wanted(1, 10), 0).is_none(), "it is under way");
        let larger = Wanted {
            max_bytes: 101,
            ..wanted(1, 10)
        };
        let changed = Wanted {
            changes: 1,
            ..wanted(1, 10)
        };
        for other in [wanted(2, 10), wanted(1, 11), larger, changed] {
            assert!(ahead.take(&other).is_none(), "{other:?}");
        }
        assert!(ahead.is_idle());
        assert!(ahead.take(&wanted(1, 10)).is_some());
        assert!(ahead.take(&wanted(1, 10)).is_none(), "taken once");
    }

    #[test]
    fn they_are_bounded_and_what_nobody_fetches_makes_way() {
        let mut ahead = ReadsAhead::default();
        let slots: Vec<_> = (0..READS_AHEAD_MAX as u64)
            .map(|from| ahead.begin(wanted(1, from), 0).expect("there is room"))
            .collect();
        let late = STALE_AFTER_US;
        assert!(ahead.begin(wanted(2, 0), late).is_none(), "none has ended");
        answer(&mut ahead, &slots[3]);
        assert!(ahead.begin(wanted(2, 0), late - 1).is_none(), "too early");
        assert!(ahead.begin(wanted(2, 0), late).is_some());
        assert!(ahead.take(&wanted(1, 3)).is_none());
        assert!(ahead.take(&wanted(1, 4)).is_some());
    }
}
