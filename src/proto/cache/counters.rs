//! The counters of one cache shard: exact signed sums.
//!
//! An add is checked against the sum of everything staged before it, so what is appended can
//! always be applied; an add that would leave the range of 64 bits is refused and nothing is
//! written. There are no retries here: an add that is applied twice was asked for twice.
//!
//! A log whose head was given up begins in the midst of its counters' lives: what is summed of one
//! before its checkpoint comes is a part, wraps without harm, and is replaced by the checkpoint.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use bytes::Bytes;

use super::compact::{Copy, LogUse};
use super::key_map::KeyMap;
use super::record::{CounterRecord, RecordFault, HEAD_BYTES};

/// The sum would not fit 64 bits; nothing is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the sum would leave the range of a signed 64-bit number")]
pub struct Overflow;

/// An add, or a checkpoint, whose record is made and not known to be durable.
#[derive(Debug)]
#[must_use = "a staged add is either applied or abandoned"]
pub struct StagedAdd {
    record: Bytes,
    key: Arc<str>,
    /// What it adds; nothing for a checkpoint.
    delta: i64,
    is_checkpoint: bool,
}

impl StagedAdd {
    /// What to append.
    pub fn record(&self) -> &Bytes {
        &self.record
    }

    /// The key it is for.
    pub fn key(&self) -> Arc<str> {
        Arc::clone(&self.key)
    }
}

#[derive(Debug, Clone, Copy)]
struct StagedSum {
    /// The sum once everything staged is applied.
    sum: i64,
    adds: u32,
    has_checkpoint: bool,
}

#[derive(Debug, Clone, Copy)]
struct Counter {
    sum: i64,
    /// The counter is what the records from here on come to.
    anchor: u64,
}

/// The sums of one shard.
#[derive(Debug, Default)]
pub struct CounterIndex {
    next_offset: u64,
    log_use: LogUse,
    sums: KeyMap<Counter>,
    /// Counters whose sum left its range while the log was read; one that stays here is damage.
    out_of_range: HashSet<Arc<str>>,
    staged: HashMap<Arc<str>, StagedSum>,
    staged_adds: usize,
}

impl CounterIndex {
    /// The state of a log that starts at `base`.
    pub fn new(base: u64) -> Self {
        Self {
            next_offset: base,
            ..Self::default()
        }
    }

    /// The offset of the next record to apply.
    pub fn next_offset(&self) -> u64 {
        self.next_offset
    }

    /// Adds staged and not settled.
    pub fn staged(&self) -> usize {
        self.staged_adds
    }

    /// Counters held.
    pub fn keys(&self) -> usize {
        self.sums.len()
    }

    /// Memory the counters take, keys included.
    pub fn index_bytes(&self) -> usize {
        self.sums.bytes()
    }

    /// The durable sum; `None` was never written.
    pub fn get(&self, key: &str) -> Option<i64> {
        self.sums.get(key).map(|counter| counter.sum)
    }

    /// Makes the record of an add.
    pub fn stage_add(&mut self, key: &Arc<str>, delta: i64) -> Result<StagedAdd, Overflow> {
        let mut staged = self.staged_sum(key);
        staged.sum = staged.sum.checked_add(delta).ok_or(Overflow)?;
        let record = CounterRecord::Delta { key, delta }.encode();
        Ok(self.stage(key, staged, record, delta, false))
    }

    fn staged_sum(&self, key: &str) -> StagedSum {
        self.staged.get(key).copied().unwrap_or(StagedSum {
            sum: self.get(key).unwrap_or(0),
            adds: 0,
            has_checkpoint: false,
        })
    }

    fn stage(
        &mut self,
        key: &Arc<str>,
        mut staged: StagedSum,
        record: Bytes,
        delta: i64,
        is_checkpoint: bool,
    ) -> StagedAdd {
        staged.adds += 1;
        staged.has_checkpoint |= is_checkpoint;
        self.staged.insert(Arc::clone(key), staged);
        self.staged_adds += 1;
        StagedAdd {
            record,
            key: Arc::clone(key),
            delta,
            is_checkpoint,
        }
    }

    /// What the log takes, and what of it is live: one checkpoint a counter.
    pub fn log_use(&self) -> &LogUse {
        &self.log_use
    }

    /// Begins to restate the sums above the cut, which is returned: the place of the next record
    /// to be applied.
    pub fn begin_compaction(&mut self) -> u64 {
        self.log_use.begin(self.next_offset, self.sums.len());
        self.next_offset
    }

    /// Compaction is over; with `raised` the log starts at its cut.
    pub fn end_compaction(&mut self, raised: bool) {
        self.log_use.end(raised);
    }

    /// Looks at a record below the cut: makes a checkpoint of its counter, as the sum is at the
    /// checkpoint's place in the log, unless there is one above the cut or on its way.
    pub fn stage_checkpoint(&mut self, record: &[u8]) -> Result<Copy<StagedAdd>, RecordFault> {
        let (CounterRecord::Delta { key, .. } | CounterRecord::Checkpoint { key, .. }) =
            CounterRecord::decode(record)?;
        let counter = self.sums.get(key);
        if counter.is_none_or(|counter| !self.log_use.is_below_cut(counter.anchor)) {
            return Ok(Copy::Dead);
        }
        let key: Arc<str> = Arc::from(key);
        let staged = self.staged_sum(&key);
        if staged.has_checkpoint {
            return Ok(Copy::Busy);
        }
        let sum = staged.sum;
        let record = CounterRecord::Checkpoint { key: &key, sum }.encode();
        Ok(Copy::Staged(self.stage(&key, staged, record, 0, true)))
    }

    /// The add is durable at `offset`: the sum that includes it.
    pub fn applied(&mut self, add: StagedAdd, offset: u64) -> i64 {
        self.unstage(&add.key, 0);
        let next = self.take_offset(offset);
        self.log_use.appended(offset, add.record.len());
        let before = self.get(&add.key).unwrap_or(0);
        let sum = before.checked_add(add.delta);
        self.next_offset = next;
        assert!(
            sum.is_some(),
            "CACHE-3: an add that was checked does not fit"
        );
        let sum = sum.unwrap_or_default();
        self.set(&add.key, sum, offset, add.is_checkpoint);
        sum
    }

    /// The add was not written. The ones staged after it, if any, must be abandoned as well.
    pub fn abandoned(&mut self, add: StagedAdd) {
        self.unstage(&add.key, add.delta);
    }

    /// Applies a record of the log.
    pub fn replay(&mut self, offset: u64, record: &[u8]) -> Result<(), RecordFault> {
        let next = self.take_offset(offset);
        self.log_use.appended(offset, record.len());
        match CounterRecord::decode(record)? {
            CounterRecord::Delta { key, delta } => {
                let (sum, is_over) = self.get(key).unwrap_or(0).overflowing_add(delta);
                self.set(key, sum, offset, false);
                if is_over {
                    self.out_of_range.insert(Arc::from(key));
                }
            }
            CounterRecord::Checkpoint { key, sum } => {
                self.set(key, sum, offset, true);
                self.out_of_range.remove(key);
            }
        }
        self.next_offset = next;
        Ok(())
    }

    /// Whether the log as far as it was read makes sense: asked when all of it was.
    pub fn check(&self) -> Result<(), RecordFault> {
        match self.out_of_range.is_empty() {
            true => Ok(()),
            false => Err(RecordFault::SumOutOfRange),
        }
    }

    fn take_offset(&self, offset: u64) -> u64 {
        assert_eq!(offset, self.next_offset, "CACHE-1: a record out of order");
        offset + 1
    }

    /// The sum as of the record at `offset`, which restates all of it or adds to what was before.
    fn set(&mut self, key: &str, sum: i64, offset: u64, is_whole: bool) {
        match self.sums.get_mut(key) {
            Some(counter) => {
                counter.sum = sum;
                if is_whole {
                    self.log_use.moved(counter.anchor);
                    counter.anchor = offset;
                }
            }
            None => {
                self.log_use.added(HEAD_BYTES + key.len());
                let counter = Counter {
                    sum,
                    anchor: offset,
                };
                self.sums.insert(key, counter);
            }
        }
    }

    fn unstage(&mut self, key: &Arc<str>, undone: i64) {
        self.staged_adds -= 1;
        if let Some(staged) = self.staged.get_mut(key) {
            // CACHE-3: wraps only while the adds behind this one wait to be undone too.
            staged.sum = staged.sum.wrapping_sub(undone);
            staged.adds -= 1;
            if staged.adds == 0 {
                self.staged.remove(key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overflow_is_judged_against_what_is_staged_and_writes_nothing() {
        let key: Arc<str> = Arc::from("k");
        let mut index = CounterIndex::new(5);
        let first = index.stage_add(&key, i64::MAX).unwrap();
        assert_eq!(index.stage_add(&key, 1).unwrap_err(), Overflow);
        assert_eq!(index.get("k"), None, "nothing staged is visible");
        let second = index.stage_add(&key, i64::MIN).unwrap();
        assert_eq!(index.applied(first, 5), i64::MAX);
        assert_eq!(index.applied(second, 6), -1);
        assert_eq!(index.get("k"), Some(-1));
        assert_eq!(index.staged(), 0);
        let down = index.stage_add(&key, i64::MIN).unwrap_err();
        assert_eq!(down, Overflow);
    }

    #[test]
    fn what_is_undone_leaves_no_trace() {
        let key: Arc<str> = Arc::from("k");
        let mut index = CounterIndex::new(0);
        let first = index.stage_add(&key, -10).unwrap();
        let second = index.stage_add(&key, i64::MAX).unwrap();
        let third = index.stage_add(&key, 10).unwrap();
        for add in [first, second, third] {
            index.abandoned(add);
        }
        assert_eq!((index.get("k"), index.staged()), (None, 0));
        let add = index.stage_add(&key, i64::MIN).unwrap();
        assert_eq!(index.applied(add, 0), i64::MIN);
    }

    #[test]
    fn a_checkpoint_restates_the_sum_and_a_log_out_of_range_is_refused() {
        let mut index = CounterIndex::new(0);
        let delta = |delta| CounterRecord::Delta { key: "a", delta }.encode();
        index.replay(0, &delta(4)).unwrap();
        let checkpoint = CounterRecord::Checkpoint {
            key: "a",
            sum: i64::MAX,
        };
        index.replay(1, &checkpoint.encode()).unwrap();
        assert_eq!(index.get("a"), Some(i64::MAX));
        assert_eq!(index.check(), Ok(()));
        index.replay(2, &delta(1)).unwrap();
        assert_eq!(index.check(), Err(RecordFault::SumOutOfRange));
        // A part of a life, before the checkpoint that makes it whole, may leave the range.
        index.replay(3, &checkpoint.encode()).unwrap();
        assert_eq!((index.get("a"), index.check()), (Some(i64::MAX), Ok(())));
    }
}
