//! The counters of one cache shard: exact signed sums.
//!
//! An add is checked against the sum of everything staged before it, so what is appended can
//! always be applied; an add that would leave the range of 64 bits is refused and nothing is
//! written. There are no retries here: an add that is applied twice was asked for twice.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;

use super::record::{CounterRecord, RecordFault};
use super::INDEX_BYTES_PER_KEY;

/// The sum would not fit 64 bits; nothing is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the sum would leave the range of a signed 64-bit number")]
pub struct Overflow;

/// An add whose record is made and not known to be durable.
#[derive(Debug)]
#[must_use = "a staged add is either applied or abandoned"]
pub struct StagedAdd {
    record: Bytes,
    key: Arc<str>,
    delta: i64,
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
}

/// The sums of one shard.
#[derive(Debug, Default)]
pub struct CounterIndex {
    next_offset: u64,
    sums: HashMap<Arc<str>, i64>,
    staged: HashMap<Arc<str>, StagedSum>,
    staged_adds: usize,
    key_bytes: usize,
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
        self.sums.len() * INDEX_BYTES_PER_KEY + self.key_bytes
    }

    /// The durable sum; `None` was never written.
    pub fn get(&self, key: &str) -> Option<i64> {
        self.sums.get(key).copied()
    }

    /// Makes the record of an add.
    pub fn stage_add(&mut self, key: &Arc<str>, delta: i64) -> Result<StagedAdd, Overflow> {
        let (before, adds) = match self.staged.get(key) {
            Some(staged) => (staged.sum, staged.adds),
            None => (self.get(key).unwrap_or(0), 0),
        };
        let sum = before.checked_add(delta).ok_or(Overflow)?;
        let staged = StagedSum {
            sum,
            adds: adds + 1,
        };
        self.staged.insert(Arc::clone(key), staged);
        self.staged_adds += 1;
        let record = CounterRecord::Delta { key, delta }.encode();
        Ok(StagedAdd {
            record,
            key: Arc::clone(key),
            delta,
        })
    }

    /// The add is durable at `offset`: the sum that includes it.
    pub fn applied(&mut self, add: StagedAdd, offset: u64) -> i64 {
        self.unstage(&add.key, 0);
        let next = self.take_offset(offset);
        let sum = self.add(&add.key, add.delta);
        self.next_offset = next;
        assert!(
            sum.is_some(),
            "CACHE-3: an add that was checked does not fit"
        );
        sum.unwrap_or_default()
    }

    /// The add was not written. The ones staged after it, if any, must be abandoned as well.
    pub fn abandoned(&mut self, add: StagedAdd) {
        self.unstage(&add.key, add.delta);
    }

    /// Applies a record of the log.
    pub fn replay(&mut self, offset: u64, record: &[u8]) -> Result<(), RecordFault> {
        let next = self.take_offset(offset);
        match CounterRecord::decode(record)? {
            CounterRecord::Delta { key, delta } => {
                self.add(key, delta).ok_or(RecordFault::SumOutOfRange)?;
            }
            CounterRecord::Checkpoint { key, sum } => self.set(key, sum),
        }
        self.next_offset = next;
        Ok(())
    }

    fn take_offset(&self, offset: u64) -> u64 {
        assert_eq!(offset, self.next_offset, "CACHE-1: a record out of order");
        offset + 1
    }

    fn add(&mut self, key: &str, delta: i64) -> Option<i64> {
        let sum = self.get(key).unwrap_or(0).checked_add(delta)?;
        self.set(key, sum);
        Some(sum)
    }

    fn set(&mut self, key: &str, sum: i64) {
        match self.sums.get_mut(key) {
            Some(held) => *held = sum,
            None => {
                self.key_bytes += key.len();
                self.sums.insert(Arc::from(key), sum);
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
        assert_eq!(index.replay(2, &delta(1)), Err(RecordFault::SumOutOfRange));
        assert_eq!(index.next_offset(), 2, "a refused record is not passed");
    }
}
