//! Holding what is in the log against what the run was told.
//!
//! Every acknowledged record must be there exactly once, unchanged, and in the order its writer sent
//! it; a record whose outcome is not known may be there or not, but also once and in order; a record
//! that was refused must not be there.

use std::borrow::Borrow;
use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::ledger::{placement, Ledger};
use super::ranges::RangeSet;
use crate::record::parse_record;

/// Faults kept with their place, for the report.
const MAX_FINDINGS: usize = 8;

/// The outcome of a verification.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerifyCounts {
    /// Records of the run that were read back.
    pub checked: u64,
    /// Acknowledged and not found.
    pub missing: u64,
    /// Found again.
    pub duplicated: u64,
    /// Found behind a later record of the same writer.
    pub reordered: u64,
    /// Changed, or in the wrong shard.
    pub corrupt: u64,
    /// Refused and found all the same.
    #[serde(default)]
    pub refused_present: u64,
    /// Shards in which a batch does not lie at the offset its answer named.
    #[serde(default)]
    pub misplaced: u64,
    /// Of unknown outcome and found; no fault.
    #[serde(default)]
    pub unknown_present: u64,
    /// Of other runs; no fault.
    #[serde(default)]
    pub foreign: u64,
    /// The first faults, in words.
    #[serde(default)]
    pub findings: Vec<String>,
}

impl VerifyCounts {
    /// Whether nothing is wrong.
    pub fn is_clean(&self) -> bool {
        self.missing
            + self.duplicated
            + self.reordered
            + self.corrupt
            + self.refused_present
            + self.misplaced
            == 0
    }

    /// Adds the counts of another shard.
    pub fn absorb(&mut self, other: VerifyCounts) {
        self.checked += other.checked;
        self.missing += other.missing;
        self.duplicated += other.duplicated;
        self.reordered += other.reordered;
        self.corrupt += other.corrupt;
        self.refused_present += other.refused_present;
        self.misplaced += other.misplaced;
        self.unknown_present += other.unknown_present;
        self.foreign += other.foreign;
        self.findings.extend(other.findings);
        self.findings.truncate(MAX_FINDINGS);
    }

    fn find(&mut self, finding: String) {
        if self.findings.len() < MAX_FINDINGS {
            self.findings.push(finding);
        }
    }
}

#[derive(Default)]
struct Seen {
    sequences: RangeSet,
    /// One above the largest.
    next: u64,
}

/// Checks one shard, record by record in the order of its log.
pub struct ShardCheck<L> {
    ledger: L,
    shard: u32,
    /// Records of other runs are expected; damage cannot be told from them then, but shows as missing.
    shared: bool,
    counts: VerifyCounts,
    seen: HashMap<u32, Seen>,
    placement_sum: u64,
}

impl<L: Borrow<Ledger>> ShardCheck<L> {
    /// A check of a shard; `shared` when others write to the stream as well.
    pub fn new(ledger: L, shard: u32, shared: bool) -> Self {
        Self {
            ledger,
            shard,
            shared,
            counts: VerifyCounts::default(),
            seen: HashMap::new(),
            placement_sum: 0,
        }
    }

    /// The next record of the log.
    pub fn on_record(&mut self, offset: u64, payload: &[u8]) {
        let shard = self.shard;
        let ledger: &Ledger = self.ledger.borrow();
        let id = match parse_record(payload) {
            Ok(id) if id.run == ledger.run() => id,
            Ok(_) => {
                self.counts.foreign += 1;
                return;
            }
            Err(_) if self.shared => {
                self.counts.foreign += 1;
                return;
            }
            Err(fault) => {
                self.counts.checked += 1;
                self.counts.corrupt += 1;
                self.counts
                    .find(format!("shard {shard} offset {offset}: {fault}"));
                return;
            }
        };
        self.counts.checked += 1;
        let writer = ledger.writer(shard, id.writer);
        let Some(told) = writer.filter(|w| id.shard == shard && id.sequence < w.sent_to) else {
            self.counts.corrupt += 1;
            self.counts.find(format!(
                "shard {shard} offset {offset}: writer {} sent sequence {} to shard {}, not here",
                id.writer, id.sequence, id.shard
            ));
            return;
        };
        if told.refused.contains(id.sequence) {
            self.counts.refused_present += 1;
            self.counts.find(format!(
                "shard {shard} offset {offset}: writer {} sequence {} was refused and is here",
                id.writer, id.sequence
            ));
        } else if !told.acked.contains(id.sequence) {
            self.counts.unknown_present += 1;
        } else if id.sequence % u64::from(ledger.batch()) == 0 {
            self.placement_sum =
                self.placement_sum
                    .wrapping_add(placement(id.writer, id.sequence, offset));
        }
        self.note_order(offset, id.writer, id.sequence);
    }

    fn note_order(&mut self, offset: u64, writer: u32, sequence: u64) {
        let seen = self.seen.entry(writer).or_default();
        let place = |what: &str| {
            format!(
                "shard {} offset {offset}: writer {writer} sequence {sequence} {what}",
                self.shard
            )
        };
        if seen.next > sequence {
            if seen.sequences.contains(sequence) {
                self.counts.duplicated += 1;
                self.counts.find(place("is here a second time"));
                return;
            }
            self.counts.reordered += 1;
            self.counts
                .find(place(&format!("stands behind sequence {}", seen.next - 1)));
        }
        seen.sequences.insert(sequence, sequence + 1);
        seen.next = seen.next.max(sequence + 1);
    }

    /// The end of the log.
    pub fn finish(mut self) -> VerifyCounts {
        let none = RangeSet::default();
        let ledger: &Ledger = self.ledger.borrow();
        for (writer, told) in ledger.writers_of(self.shard) {
            let seen = self.seen.get(&writer).map_or(&none, |s| &s.sequences);
            let missing = told.acked.missing_from(seen);
            if missing > 0 {
                self.counts.missing += missing;
                self.counts.find(format!(
                    "shard {}: {missing} acknowledged records of writer {writer} are not there",
                    self.shard
                ));
            }
        }
        let known = ledger.shards().get(self.shard as usize);
        let moved = known.is_some_and(|k| {
            k.placed_batches * u64::from(ledger.batch()) == k.acked_records
                && k.placement_sum != self.placement_sum
        });
        // With records missing or doubled the sum cannot match and says nothing more.
        if moved && self.counts.is_clean() {
            self.counts.misplaced += 1;
            self.counts.find(format!(
                "shard {}: a batch does not lie at the offset its answer named",
                self.shard
            ));
        }
        self.counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::RecordMaker;
    use bytes::BytesMut;

    const BATCH: u64 = 4;

    /// Two writers, ten acknowledged batches each; the log as it should be.
    fn run() -> (Ledger, Vec<Vec<u8>>) {
        let mut ledger = Ledger::new(77, BATCH as u32, 1);
        let maker = RecordMaker::new(77, 64);
        let mut log = Vec::new();
        for batch in 0..10 {
            for writer in [0, 1] {
                ledger.on_sent(writer, 0, batch * BATCH);
                ledger.on_acked(writer, 0, batch * BATCH, Some(log.len() as u64));
                for i in 0..BATCH {
                    let mut record = BytesMut::new();
                    maker.put(&mut record, writer, 0, batch * BATCH + i);
                    log.push(record.to_vec());
                }
            }
        }
        (ledger, log)
    }

    fn check(ledger: &Ledger, log: &[Vec<u8>]) -> VerifyCounts {
        let mut check = ShardCheck::new(ledger, 0, false);
        for (offset, payload) in log.iter().enumerate() {
            check.on_record(offset as u64, payload);
        }
        check.finish()
    }

    #[test]
    fn a_whole_log_is_clean() {
        let (ledger, log) = run();
        let counts = check(&ledger, &log);
        assert!(counts.is_clean(), "{counts:?}");
        assert_eq!(counts.checked, 80);
        assert_eq!(ledger.unknown_records(), 0);
    }

    #[test]
    fn a_lost_record_is_missing() {
        let (ledger, mut log) = run();
        log.remove(41);
        let counts = check(&ledger, &log);
        assert_eq!((counts.missing, counts.duplicated), (1, 0));
        assert_eq!((counts.reordered, counts.corrupt), (0, 0));
        assert_eq!(check(&ledger, &[]).missing, 80);
    }

    #[test]
    fn a_record_twice_is_duplicated() {
        let (ledger, mut log) = run();
        let again = log[8].clone();
        log.push(again.clone());
        log.insert(9, again);
        let counts = check(&ledger, &log);
        assert_eq!((counts.duplicated, counts.missing), (2, 0));
        assert_eq!(counts.reordered, 0);
    }

    #[test]
    fn a_swap_of_one_writer_is_reordered_and_of_two_is_misplaced() {
        let (ledger, mut log) = run();
        log.swap(8, 9);
        let counts = check(&ledger, &log);
        assert_eq!((counts.reordered, counts.missing), (1, 0));
        // Whole batches of different writers changed places: each writer's order is intact.
        let (ledger, mut log) = run();
        for i in 0..BATCH as usize {
            log.swap(8 + i, 12 + i);
        }
        let counts = check(&ledger, &log);
        assert_eq!((counts.reordered, counts.misplaced), (0, 1));
        assert!(!counts.is_clean());
    }

    #[test]
    fn a_changed_record_is_corrupt() {
        let (ledger, mut log) = run();
        log[5][40] ^= 1;
        let counts = check(&ledger, &log);
        assert_eq!((counts.corrupt, counts.missing), (1, 1));
        // A good record of another shard is no better.
        let (ledger, mut log) = run();
        let mut stranger = BytesMut::new();
        RecordMaker::new(77, 64).put(&mut stranger, 0, 1, 0);
        log.push(stranger.to_vec());
        assert_eq!(check(&ledger, &log).corrupt, 1);
        assert_eq!(check(&ledger, &log).findings.len(), 1);
    }

    #[test]
    fn unknown_may_be_there_or_not_and_refused_may_not() {
        let (mut ledger, mut log) = run();
        ledger.on_sent(0, 0, 10 * BATCH);
        assert_eq!(ledger.unknown_records(), BATCH);
        assert!(check(&ledger, &log).is_clean());
        let maker = RecordMaker::new(77, 64);
        for i in 0..2 {
            let mut record = BytesMut::new();
            maker.put(&mut record, 0, 0, 10 * BATCH + i);
            log.push(record.to_vec());
        }
        let counts = check(&ledger, &log);
        assert!(counts.is_clean(), "{counts:?}");
        assert_eq!(counts.unknown_present, 2);
        ledger.on_refused(0, 0, 10 * BATCH);
        let counts = check(&ledger, &log);
        assert_eq!((counts.refused_present, counts.is_clean()), (2, false));
        assert_eq!(ledger.unknown_records(), 0);
    }

    #[test]
    fn records_of_others_are_not_ours_to_judge() {
        let (ledger, mut log) = run();
        let mut other = BytesMut::new();
        RecordMaker::new(78, 64).put(&mut other, 0, 0, 0);
        log.insert(0, other.to_vec());
        log.insert(0, b"hello".to_vec());
        let mut check = ShardCheck::new(&ledger, 0, true);
        for (offset, payload) in log.iter().enumerate() {
            // Offsets moved by the two, so the answers named others.
            check.on_record((offset as u64).wrapping_sub(2), payload);
        }
        let counts = check.finish();
        assert!(counts.is_clean(), "{counts:?}");
        assert_eq!(counts.foreign, 2);
    }
}
