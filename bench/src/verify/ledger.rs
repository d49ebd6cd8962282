//! What a run was told about its records: written where, refused, or not known.
//!
//! Invariant: a sequence number is used for one record only, so a record that was refused must never
//! be found, and one that was acknowledged must be found once.

use std::collections::BTreeMap;

use super::ranges::RangeSet;

/// The outcomes of one writer's records in one shard.
#[derive(Debug, Clone, Default)]
pub struct WriterLedger {
    /// Sequences from 0 to here were sent.
    pub sent_to: u64,
    /// Answered as written.
    pub acked: RangeSet,
    /// Answered in a way that promises nothing was written.
    pub refused: RangeSet,
}

/// What is known of one shard.
#[derive(Debug, Clone, Default)]
pub struct ShardLedger {
    /// Smallest offset answered.
    pub first_offset: Option<u64>,
    /// Behind the largest offset answered.
    pub end_offset: u64,
    /// Records answered as written.
    pub acked_records: u64,
    /// Batches whose answer carried an offset.
    pub placed_batches: u64,
    /// Sum over those of [`placement`]: tells whether every batch lies where its answer said,
    /// without keeping every answer.
    pub placement_sum: u64,
}

/// All outcomes of a run. Memory grows with gaps, not with records.
#[derive(Debug, Clone)]
pub struct Ledger {
    run: u64,
    batch: u32,
    shards: Vec<ShardLedger>,
    writers: BTreeMap<(u32, u32), WriterLedger>,
}

impl Ledger {
    /// An empty ledger of a run with batches of `batch` records.
    pub fn new(run: u64, batch: u32, shards: u32) -> Self {
        Self {
            run,
            batch,
            shards: vec![ShardLedger::default(); shards as usize],
            writers: BTreeMap::new(),
        }
    }

    /// The run.
    pub fn run(&self) -> u64 {
        self.run
    }

    /// Records in a batch.
    pub fn batch(&self) -> u32 {
        self.batch
    }

    /// What is known of each shard.
    pub fn shards(&self) -> &[ShardLedger] {
        &self.shards
    }

    /// Writers with records in a shard, and their outcomes.
    pub fn writers_of(&self, shard: u32) -> impl Iterator<Item = (u32, &WriterLedger)> + '_ {
        self.writers
            .iter()
            .filter(move |((of, _), _)| *of == shard)
            .map(|((_, writer), ledger)| (*writer, ledger))
    }

    /// The outcomes of one writer in one shard.
    pub fn writer(&self, shard: u32, writer: u32) -> Option<&WriterLedger> {
        self.writers.get(&(shard, writer))
    }

    /// A batch goes out.
    pub fn on_sent(&mut self, writer: u32, shard: u32, first: u64) {
        let end = first + u64::from(self.batch);
        let entry = self.writers.entry((shard, writer)).or_default();
        entry.sent_to = entry.sent_to.max(end);
    }

    /// A batch is answered as written.
    pub fn on_acked(&mut self, writer: u32, shard: u32, first: u64, offset: Option<u64>) {
        let records = u64::from(self.batch);
        let entry = self.writers.entry((shard, writer)).or_default();
        entry.acked.insert(first, first + records);
        let Some(known) = self.shards.get_mut(shard as usize) else {
            return;
        };
        known.acked_records += records;
        if let Some(offset) = offset {
            known.first_offset = Some(known.first_offset.map_or(offset, |o| o.min(offset)));
            known.end_offset = known.end_offset.max(offset + records);
            known.placed_batches += 1;
            known.placement_sum = known
                .placement_sum
                .wrapping_add(placement(writer, first, offset));
        }
    }

    /// A batch is refused for sure.
    pub fn on_refused(&mut self, writer: u32, shard: u32, first: u64) {
        let entry = self.writers.entry((shard, writer)).or_default();
        entry.refused.insert(first, first + u64::from(self.batch));
    }

    /// Records whose outcome nobody told.
    pub fn unknown_records(&self) -> u64 {
        self.writers
            .values()
            .map(|w| w.sent_to - w.acked.len() - w.refused.len())
            .sum()
    }

    /// Records answered as written.
    pub fn acked_records(&self) -> u64 {
        self.shards.iter().map(|s| s.acked_records).sum()
    }

    /// Joins the outcomes of another part of the same run; writers must differ.
    pub fn absorb(&mut self, other: Ledger) {
        for (mine, theirs) in self.shards.iter_mut().zip(other.shards) {
            mine.first_offset = match (mine.first_offset, theirs.first_offset) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            };
            mine.end_offset = mine.end_offset.max(theirs.end_offset);
            mine.acked_records += theirs.acked_records;
            mine.placed_batches += theirs.placed_batches;
            mine.placement_sum = mine.placement_sum.wrapping_add(theirs.placement_sum);
        }
        self.writers.extend(other.writers);
    }
}

/// A number that stands for "this writer's batch lies at this offset".
pub fn placement(writer: u32, first_sequence: u64, offset: u64) -> u64 {
    let mut hash = u64::from(writer).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    for word in [first_sequence, offset] {
        hash = (hash ^ word).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        hash ^= hash >> 29;
    }
    hash
}
