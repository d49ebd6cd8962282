//! Which reads of older data are made before they are asked for.
//!
//! A reader that follows a log through what has left memory asks, takes, and asks again where it stopped.
//! From its second read on, the stretches that come next are read while it works on the last: several at once
//! where they are short, so that the disk and the reader do not wait for each other. What one of them holds
//! beyond what was asked for is kept for the next question. A single read starts nothing.
//!
//! Invariants: bounded by `READS_AHEAD_MAX` stretches and `BYTES_AHEAD_MAX` in all; what was read is handed
//! out only from the offset it begins at, and only while no event has changed the log since.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::task::Waker;

use crate::error::ReadError;
use crate::machine::{LogRef, ReadBatch};

/// Stretches read ahead at once, those that were not fetched included.
const READS_AHEAD_MAX: usize = 32;
/// Bytes of them.
const BYTES_AHEAD_MAX: u64 = 8 << 20;
/// Ends of earlier reads that are remembered, to see who goes on.
const ENDS_MAX: usize = 64;
/// After this long a result nobody fetched makes way for another.
const STALE_AFTER_US: u64 = 500_000;

/// A log as it is after `changes` events and `cuts` cuts queued (an event that was undone leaves its number to
/// the next one).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Version {
    pub log: LogRef,
    pub changes: u32,
    pub cuts: u32,
}

/// A stretch of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ahead {
    pub version: Version,
    pub from: u64,
    /// Where it ends, unless a record in it is very long.
    pub end: u64,
    /// About what it takes in memory.
    pub bytes: u64,
}

/// Where the records of a stretch appear.
#[derive(Default)]
pub(super) struct AheadSlot {
    pub result: Option<Result<ReadBatch, ReadError>>,
    pub waker: Option<Waker>,
}

struct Entry {
    ahead: Ahead,
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
    /// The stretch that was read ahead from this offset on, if there is one; it is the caller's now.
    pub fn take(&mut self, version: Version, from: u64) -> Option<(Ahead, Rc<RefCell<AheadSlot>>)> {
        let at = self.position(version, from)?;
        let Entry { ahead, slot, .. } = self.entries.swap_remove(at);
        Some((ahead, slot))
    }

    /// The stretch that is being read from this offset on, if there is one.
    pub fn find(&self, version: Version, from: u64) -> Option<Ahead> {
        let at = self.position(version, from)?;
        Some(self.entries[at].ahead)
    }

    fn position(&self, version: Version, from: u64) -> Option<usize> {
        let is_it = |ahead: &Ahead| ahead.version == version && ahead.from == from;
        self.entries.iter().position(|entry| is_it(&entry.ahead))
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

    /// A place for a stretch that will probably be asked for; none when as much is under way as may be.
    pub fn begin(&mut self, ahead: Ahead, now_us: u64) -> Option<Rc<RefCell<AheadSlot>>> {
        while !self.has_room(ahead.bytes) {
            let stale = self.entries.iter().position(|it| it.is_stale(now_us))?;
            self.entries.swap_remove(stale);
        }
        let slot = Rc::new(RefCell::new(AheadSlot::default()));
        self.entries.push(Entry {
            ahead,
            since_us: now_us,
            slot: Rc::clone(&slot),
        });
        self.running += 1;
        Some(slot)
    }

    /// Keeps what is left of a stretch that was taken: as long as there was room for all of it, there is for this.
    pub fn keep(&mut self, ahead: Ahead, rest: ReadBatch, now_us: u64) {
        if !self.has_room(ahead.bytes) {
            return;
        }
        let slot = AheadSlot {
            result: Some(Ok(rest)),
            waker: None,
        };
        self.entries.push(Entry {
            ahead,
            since_us: now_us,
            slot: Rc::new(RefCell::new(slot)),
        });
    }

    /// Whether a stretch that is being read may take so many bytes more; one that was taken may.
    pub fn grow(&mut self, slot: &Rc<RefCell<AheadSlot>>, more: u64) -> bool {
        let is_it = |entry: &Entry| Rc::ptr_eq(&entry.slot, slot);
        let Some(at) = self.entries.iter().position(is_it) else {
            return true;
        };
        let may = self.held_bytes() + more <= BYTES_AHEAD_MAX;
        if may {
            self.entries[at].ahead.bytes += more;
        }
        may
    }

    fn held_bytes(&self) -> u64 {
        self.entries.iter().map(|entry| entry.ahead.bytes).sum()
    }

    fn has_room(&self, bytes: u64) -> bool {
        self.entries.len() < READS_AHEAD_MAX && self.held_bytes() + bytes <= BYTES_AHEAD_MAX
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

/// Takes what exceeds `max_bytes` of payload off a batch; at least one record stays.
pub(super) fn split_off(batch: &mut ReadBatch, max_bytes: usize) -> Option<ReadBatch> {
    let mut bytes = 0;
    let mut fits = |record: &bytes::Bytes| {
        bytes += record.len();
        bytes <= max_bytes
    };
    let kept = batch
        .records
        .iter()
        .take_while(|it| fits(it))
        .count()
        .max(1);
    if kept >= batch.records.len() {
        return None;
    }
    let records = batch.records.split_off(kept);
    let rest = ReadBatch {
        first_offset: batch.first_offset + kept as u64,
        records,
        next_offset: batch.next_offset,
    };
    batch.next_offset = rest.first_offset;
    Some(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ahead(log: u32, from: u64) -> Ahead {
        Ahead {
            version: Version {
                log: LogRef(log),
                changes: 0,
                cuts: 0,
            },
            from,
            end: from + 10,
            bytes: 1000,
        }
    }

    fn answer(aheads: &mut ReadsAhead, slot: &Rc<RefCell<AheadSlot>>) {
        aheads.end(slot, Err(ReadError::LogDamaged));
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
    fn a_stretch_is_only_for_the_log_as_it_was() {
        let mut aheads = ReadsAhead::default();
        let here = ahead(1, 10);
        let slot = aheads.begin(here, 0).expect("there is room");
        answer(&mut aheads, &slot);
        assert_eq!(aheads.find(here.version, 10), Some(here));
        let of = |change: fn(&mut Version)| {
            let mut version = here.version;
            change(&mut version);
            version
        };
        let others = [
            of(|it| it.log = LogRef(2)),
            of(|it| it.changes = 1),
            of(|it| it.cuts = 1),
        ];
        for other in others {
            assert!(aheads.take(other, 10).is_none(), "{other:?}");
        }
        assert!(aheads.take(here.version, 11).is_none(), "another offset");
        assert!(aheads.is_idle());
        assert!(aheads.take(here.version, 10).is_some());
        assert!(aheads.take(here.version, 10).is_none(), "taken once");
    }

    #[test]
    fn they_are_bounded_and_what_nobody_fetches_makes_way() {
        let mut aheads = ReadsAhead::default();
        let slots: Vec<_> = (0..READS_AHEAD_MAX as u64)
            .map(|from| aheads.begin(ahead(1, from), 0).expect("there is room"))
            .collect();
        let (late, another) = (STALE_AFTER_US, ahead(2, 0));
        assert!(aheads.begin(another, late).is_none(), "none has ended");
        answer(&mut aheads, &slots[3]);
        assert!(aheads.begin(another, late - 1).is_none(), "too early");
        assert!(aheads.begin(another, late).is_some());
        let version = ahead(1, 0).version;
        assert!(aheads.take(version, 3).is_none());
        assert!(aheads.take(version, 4).is_some());
        // Few long ones fill the room as well.
        let mut aheads = ReadsAhead::default();
        let long = |from| Ahead {
            bytes: BYTES_AHEAD_MAX / 2,
            ..ahead(1, from)
        };
        assert!(aheads.begin(long(0), 0).is_some());
        assert!(aheads.begin(long(1), 0).is_some());
        assert!(aheads.begin(ahead(1, 2), 0).is_none());
        // One that turns out to be longer takes its room, or is given up; one that was taken is its reader's.
        let mut aheads = ReadsAhead::default();
        let slot = aheads.begin(ahead(1, 0), 0).expect("there is room");
        assert!(aheads.grow(&slot, BYTES_AHEAD_MAX / 2));
        assert!(!aheads.grow(&slot, BYTES_AHEAD_MAX / 2));
        assert!(aheads.begin(long(1), 0).is_none());
        assert!(aheads.take(ahead(1, 0).version, 0).is_some());
        assert!(aheads.grow(&slot, BYTES_AHEAD_MAX));
    }

    #[test]
    fn what_was_not_asked_for_is_kept() {
        let batch = || ReadBatch {
            first_offset: 7,
            records: [10, 20, 30, 40].map(|len| vec![0u8; len].into()).into(),
            next_offset: 11,
        };
        let split = |max_bytes| {
            let mut first = batch();
            let rest = split_off(&mut first, max_bytes);
            let rest = rest.map(|rest| {
                assert_eq!(rest.first_offset, first.next_offset);
                assert_eq!(rest.next_offset, 11);
                rest.records.len()
            });
            assert_eq!(first.next_offset, 7 + first.records.len() as u64);
            (first.records.len(), rest)
        };
        assert_eq!(split(5), (1, Some(3)), "one at least");
        assert_eq!(split(30), (2, Some(2)));
        assert_eq!(split(99), (3, Some(1)));
        assert_eq!(split(100), (4, None));
        let mut aheads = ReadsAhead::default();
        let mut first = batch();
        let rest = split_off(&mut first, 30).expect("is left");
        aheads.keep(ahead(1, 9), rest, 0);
        let (_, slot) = aheads.take(ahead(1, 9).version, 9).expect("is kept");
        let kept = slot.borrow_mut().result.take();
        assert_eq!(kept.expect("is there").map(|it| it.records.len()), Ok(2));
        assert!(aheads.is_idle());
    }
}
