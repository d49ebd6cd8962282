//! The keys and values of one cache shard.
//!
//! Each key maps to the offset of its put and its expiry; its value is kept beside, by that offset, as
//! long as it is in memory. Which values stay is the driver's bound: [`CacheIndex::evict`] lets the
//! oldest go, and a get of one that is gone names the offset to read it from.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::num::NonZeroU64;
use std::sync::Arc;

use bytes::Bytes;

use super::compact::{Copy, LogUse};
use super::key_map::{Key, KeyMap};
use super::record::{RecordFault, ValueRecord, HEAD_BYTES};
use super::write::{Applied, Change, Lookup, StagedWrite};

/// Slack before a queue with outdated places is swept; keeps sweeps of small queues rare.
const SWEEP_SLACK: usize = 64;
/// What a value in memory costs besides its own bytes: a slot of the map, its place in the queue, and the
/// record it is a part of.
const RESIDENT_OVERHEAD_BYTES: usize = 160;

#[derive(Debug)]
struct Entry {
    offset: u64,
    /// 0 is never.
    expires_at_ms: u64,
    value_bytes: u32,
}

/// Offsets are numbers nobody can choose, one after the other.
#[derive(Debug, Default)]
struct OffsetHasher(u64);

impl Hasher for OffsetHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        // Spreads neighbours over the upper bits as well, which the map looks at.
        self.0 = (self.0 ^ number)
            .wrapping_mul(0x9E37_79B9_7F4A_7C15)
            .rotate_left(32);
    }
}

impl Entry {
    fn is_expired(&self, now_ms: u64) -> bool {
        self.expires_at_ms != 0 && self.expires_at_ms <= now_ms
    }
}

/// The index of one shard.
#[derive(Debug, Default)]
pub struct CacheIndex {
    next_offset: u64,
    log_use: LogUse,
    entries: KeyMap<Entry>,
    /// Values in memory, by the offset of their put.
    values: HashMap<u64, Bytes, BuildHasherDefault<OffsetHasher>>,
    /// Writes staged for a key.
    staged: HashMap<Arc<str>, u32>,
    staged_writes: usize,
    /// Offsets of values in memory, oldest first; one whose value is gone means nothing.
    resident: VecDeque<u64>,
    resident_bytes: usize,
    sweep_resident_at: usize,
    /// Expiries, next first; a place whose offset is outdated means nothing.
    expiries: BinaryHeap<Reverse<(u64, u64, Key)>>,
    sweep_expiries_at: usize,
}

impl CacheIndex {
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

    /// Writes staged and not settled.
    pub fn staged(&self) -> usize {
        self.staged_writes
    }

    /// Keys held, expired ones included until their delete is written.
    pub fn keys(&self) -> usize {
        self.entries.len()
    }

    /// Memory the keys take, values apart.
    pub fn index_bytes(&self) -> usize {
        self.entries.bytes()
    }

    /// What the log takes, and what of it is live.
    pub fn log_use(&self) -> &LogUse {
        &self.log_use
    }

    /// Begins to copy what is live below the cut, which is returned: the place of the next record
    /// to be applied.
    pub fn begin_compaction(&mut self) -> u64 {
        self.log_use.begin(self.next_offset, self.entries.len());
        self.next_offset
    }

    /// Compaction is over; with `raised` the log starts at its cut.
    pub fn end_compaction(&mut self, raised: bool) {
        self.log_use.end(raised);
    }

    /// Looks at a record below the cut: makes its copy if it is what its key holds and no write to
    /// the key is on its way.
    pub fn stage_copy(
        &mut self,
        offset: u64,
        record: &Bytes,
    ) -> Result<Copy<StagedWrite>, RecordFault> {
        let ValueRecord::Put { key, .. } = ValueRecord::decode(record)? else {
            return Ok(Copy::Dead);
        };
        let entry = self.entries.get(key);
        if entry.is_none_or(|entry| entry.offset != offset) {
            return Ok(Copy::Dead);
        }
        if self.staged.contains_key(key) {
            return Ok(Copy::Busy);
        }
        let key: Arc<str> = Arc::from(key);
        let write = self.stage(&key, record.clone(), Change::Copy { from: offset });
        Ok(Copy::Staged(write))
    }

    /// Memory the values take.
    pub fn resident_bytes(&self) -> usize {
        self.resident_bytes
    }

    /// Places in the queues of values and expiries, outdated ones included: at most about three
    /// for each that counts.
    pub fn queue_places(&self) -> usize {
        self.resident.len() + self.expiries.len()
    }

    /// Whether the key has a durable entry, expired or not.
    pub fn contains(&self, key: &str) -> bool {
        self.entries.contains_key(key)
    }

    /// What a get finds: durable, and not expired.
    pub fn get(&self, key: &str, now_ms: u64) -> Lookup {
        match self.entries.get(key) {
            Some(entry) if !entry.is_expired(now_ms) => match self.values.get(&entry.offset) {
                Some(value) => Lookup::Value(value.clone()),
                None => Lookup::InLog {
                    offset: entry.offset,
                },
            },
            Some(_) | None => Lookup::Miss,
        }
    }

    /// The value of a key that is in memory, whether it has expired or not.
    pub fn resident(&self, key: &str) -> Option<&Bytes> {
        self.values.get(&self.entries.get(key)?.offset)
    }

    /// Every key with its value, if that is in memory; expired ones included.
    pub fn iter(&self) -> impl Iterator<Item = (&str, Option<&Bytes>)> {
        let entries = self.entries.iter();
        entries.map(|(key, entry)| (key, self.values.get(&entry.offset)))
    }

    /// Makes the record of a put. The time to live becomes absolute here, once.
    pub fn stage_put(
        &mut self,
        key: &Arc<str>,
        value: &[u8],
        ttl_ms: Option<NonZeroU64>,
        now_ms: u64,
    ) -> StagedWrite {
        // Saturates: the end of time is practically for ever.
        let expires_at_ms = ttl_ms.map_or(0, |ttl| now_ms.saturating_add(ttl.get()));
        let record = ValueRecord::Put {
            key,
            expires_at_ms,
            value,
        };
        self.stage(key, record.encode(), Change::Put { expires_at_ms })
    }

    /// Makes the record of a delete; `None` when there is nothing to remove and nothing on its
    /// way, so that nothing need be written.
    pub fn stage_delete(&mut self, key: &Arc<str>, now_ms: u64) -> Option<StagedWrite> {
        let is_live = self
            .entries
            .get(key)
            .is_some_and(|entry| !entry.is_expired(now_ms));
        if !is_live && !self.staged.contains_key(key) {
            return None;
        }
        let record = ValueRecord::Delete { key }.encode();
        Some(self.stage(key, record, Change::Delete))
    }

    /// Makes a record that changes nothing, the delete of a key nobody has: for an owner that needs a
    /// record of its own in the log.
    pub fn stage_nothing(&mut self) -> StagedWrite {
        let mut key = String::new();
        while self.entries.contains_key(&key) || self.staged.contains_key(&*key) {
            key.push('\0');
        }
        let record = ValueRecord::Delete { key: &key }.encode();
        self.stage(&Arc::from(key), record, Change::Delete)
    }

    /// Makes the deletes of up to `most` entries that are past their time. An entry with a write
    /// on its way is left to that write.
    pub fn stage_expired(&mut self, now_ms: u64, most: usize) -> Vec<StagedWrite> {
        let mut staged = Vec::new();
        while staged.len() < most {
            let is_due = self
                .expiries
                .peek()
                .is_some_and(|Reverse((at, _, _))| *at <= now_ms);
            let Some(Reverse((_, offset, key))) = is_due.then(|| self.expiries.pop()).flatten()
            else {
                break;
            };
            let key = key.as_str();
            let entry = self.entries.get(key);
            let is_current = entry.is_some_and(|entry| entry.offset == offset);
            // A write on its way puts the place back if it comes to nothing.
            if !is_current || self.staged.contains_key(key) {
                continue;
            }
            let record = ValueRecord::Delete { key }.encode();
            staged.push(self.stage(&Arc::from(key), record, Change::Expire));
        }
        staged
    }

    fn stage(&mut self, key: &Arc<str>, record: Bytes, change: Change) -> StagedWrite {
        *self.staged.entry(Arc::clone(key)).or_default() += 1;
        self.staged_writes += 1;
        StagedWrite {
            record,
            key: Arc::clone(key),
            change,
        }
    }

    /// The write is durable at `offset`.
    pub fn applied(&mut self, write: StagedWrite, offset: u64, now_ms: u64) -> Applied {
        self.unstage(&write.key);
        let next = self.take_offset(offset);
        self.log_use.appended(offset, write.record.len());
        let applied = match write.change {
            Change::Put { expires_at_ms } => {
                let value = write.record.slice(HEAD_BYTES + write.key.len()..);
                self.insert(&write.key, offset, expires_at_ms, value);
                Applied::Stored
            }
            Change::Delete => {
                let removed = self.get(&write.key, now_ms);
                self.remove(&write.key);
                Applied::Removed(removed)
            }
            Change::Expire => {
                self.remove(&write.key);
                Applied::Expired
            }
            Change::Copy { from } => {
                self.move_entry(&write.key, from, offset);
                Applied::Copied
            }
        };
        self.next_offset = next;
        applied
    }

    /// The write was not written. The ones staged after it, if any, must be abandoned as well.
    pub fn abandoned(&mut self, write: StagedWrite) {
        self.unstage(&write.key);
        // Its expiry may have come due, and been passed over, while the write was on its way.
        if let Some(entry) = self.entries.get(&write.key) {
            if entry.expires_at_ms != 0 {
                let place = (entry.expires_at_ms, entry.offset, Key::from(&*write.key));
                self.expiries.push(Reverse(place));
            }
        }
    }

    /// Applies a record of the log.
    pub fn replay(&mut self, offset: u64, record: &[u8]) -> Result<(), RecordFault> {
        let next = self.take_offset(offset);
        self.log_use.appended(offset, record.len());
        match ValueRecord::decode(record)? {
            ValueRecord::Put {
                key,
                expires_at_ms,
                value,
            } => {
                let value = Bytes::copy_from_slice(value);
                self.insert(key, offset, expires_at_ms, value);
            }
            ValueRecord::Delete { key } => self.remove(key),
        }
        self.next_offset = next;
        Ok(())
    }

    /// Lets the oldest values go from memory until `bytes` are free or none is left.
    pub fn evict(&mut self, bytes: usize) {
        let target = self.resident_bytes.saturating_sub(bytes);
        while self.resident_bytes > target {
            let Some(offset) = self.resident.pop_front() else {
                return;
            };
            self.let_go(offset);
        }
    }

    /// Takes a value read from the log back into memory, if it is still the key's.
    pub fn readmit(&mut self, key: &str, offset: u64, value: &[u8]) {
        let stands = self
            .entries
            .get(key)
            .is_some_and(|entry| entry.offset == offset);
        if stands && !self.values.contains_key(&offset) {
            self.keep(offset, Bytes::copy_from_slice(value));
        }
    }

    fn keep(&mut self, offset: u64, value: Bytes) {
        self.resident_bytes += resident_cost(&value);
        self.values.insert(offset, value);
        self.resident.push_back(offset);
        self.sweep_resident();
    }

    /// A value leaves memory, if it is there.
    fn let_go(&mut self, offset: u64) -> Option<Bytes> {
        let value = self.values.remove(&offset)?;
        self.resident_bytes -= resident_cost(&value);
        Some(value)
    }

    fn insert(&mut self, key: &str, offset: u64, expires_at_ms: u64, value: Bytes) {
        let entry = Entry {
            offset,
            expires_at_ms,
            value_bytes: value.len() as u32,
        };
        self.log_use.added(record_bytes(key, &entry));
        if expires_at_ms != 0 {
            let place = (expires_at_ms, offset, Key::from(key));
            self.expiries.push(Reverse(place));
        }
        if let Some(old) = self.entries.insert(key, entry) {
            self.forget(key.len(), &old);
        }
        self.keep(offset, value);
        self.sweep_expiries();
    }

    fn remove(&mut self, key: &str) {
        if let Some(entry) = self.entries.remove(key) {
            self.forget(key.len(), &entry);
        }
    }

    /// An entry stands at `to` now. No write to its key came between its copy's making and here:
    /// one before the copy forbids it, one after it is applied after it.
    fn move_entry(&mut self, key: &Arc<str>, from: u64, to: u64) {
        let entry = self.entries.get_mut(key);
        let entry = entry.filter(|entry| entry.offset == from);
        assert!(entry.is_some(), "CACHE-5: a copied entry changed under way");
        let Some(entry) = entry else { return };
        entry.offset = to;
        let expires_at_ms = entry.expires_at_ms;
        self.log_use.moved(from);
        if let Some(value) = self.let_go(from) {
            self.keep(to, value);
        }
        if expires_at_ms != 0 {
            let place = (expires_at_ms, to, Key::from(&**key));
            self.expiries.push(Reverse(place));
        }
        self.sweep_expiries();
    }

    /// Takes an entry that is replaced or removed out of the totals.
    fn forget(&mut self, key_bytes: usize, entry: &Entry) {
        let bytes = HEAD_BYTES + key_bytes + entry.value_bytes as usize;
        self.log_use.removed(entry.offset, bytes);
        self.let_go(entry.offset);
    }

    fn unstage(&mut self, key: &Arc<str>) {
        self.staged_writes -= 1;
        if let Some(count) = self.staged.get_mut(key) {
            *count -= 1;
            if *count == 0 {
                self.staged.remove(key);
            }
        }
    }

    fn take_offset(&self, offset: u64) -> u64 {
        assert_eq!(offset, self.next_offset, "CACHE-1: a record out of order");
        offset + 1
    }

    /// Drops outdated places once the queue has doubled: constant work a write, spread out.
    fn sweep_resident(&mut self) {
        if self.resident.len() <= self.sweep_resident_at {
            return;
        }
        let values = &self.values;
        self.resident.retain(|offset| values.contains_key(offset));
        self.sweep_resident_at = 2 * self.resident.len() + SWEEP_SLACK;
    }

    fn sweep_expiries(&mut self) {
        if self.expiries.len() <= self.sweep_expiries_at {
            return;
        }
        let entries = &self.entries;
        self.expiries.retain(|Reverse((_, offset, key))| {
            entries
                .get(key.as_str())
                .is_some_and(|entry| entry.offset == *offset)
        });
        self.sweep_expiries_at = 2 * self.expiries.len() + SWEEP_SLACK;
    }
}

fn record_bytes(key: &str, entry: &Entry) -> usize {
    HEAD_BYTES + key.len() + entry.value_bytes as usize
}

fn resident_cost(value: &Bytes) -> usize {
    value.len() + RESIDENT_OVERHEAD_BYTES
}
