//! The keys and values of one cache shard.
//!
//! Each key maps to the offset of its put, its expiry, and its value as long as that is in memory.
//! Which values stay is the driver's bound: [`CacheIndex::evict`] lets the oldest go, and a get of
//! one that is gone names the offset to read it from.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::num::NonZeroU64;
use std::sync::Arc;

use bytes::Bytes;

use super::compact::{Copy, LogUse};
use super::record::{RecordFault, ValueRecord, HEAD_BYTES};
use super::write::{Applied, Change, Lookup, StagedWrite};
use super::INDEX_BYTES_PER_KEY;

/// Slack before a queue with outdated places is swept; keeps sweeps of small queues rare.
const SWEEP_SLACK: usize = 64;
/// What a value in memory costs besides its own bytes.
const RESIDENT_OVERHEAD_BYTES: usize = 64;

#[derive(Debug)]
struct Entry {
    offset: u64,
    /// 0 is never.
    expires_at_ms: u64,
    value_bytes: u32,
    value: Option<Bytes>,
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
    entries: HashMap<Arc<str>, Entry>,
    /// Writes staged for a key.
    staged: HashMap<Arc<str>, u32>,
    staged_writes: usize,
    key_bytes: usize,
    /// Values in memory, oldest first; a place whose offset is outdated means nothing.
    resident: VecDeque<(u64, Arc<str>)>,
    resident_bytes: usize,
    sweep_resident_at: usize,
    /// Expiries, next first; a place whose offset is outdated means nothing.
    expiries: BinaryHeap<Reverse<(u64, u64, Arc<str>)>>,
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
        self.entries.len() * INDEX_BYTES_PER_KEY + self.key_bytes
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
        let Some((key, entry)) = self.entries.get_key_value(key) else {
            return Ok(Copy::Dead);
        };
        if entry.offset != offset {
            return Ok(Copy::Dead);
        }
        let key = Arc::clone(key);
        if self.staged.contains_key(&key) {
            return Ok(Copy::Busy);
        }
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
            Some(entry) if !entry.is_expired(now_ms) => entry.lookup(),
            Some(_) | None => Lookup::Miss,
        }
    }

    /// The value of a key that is in memory, whether it has expired or not.
    pub fn resident(&self, key: &str) -> Option<&Bytes> {
        self.entries.get(key)?.value.as_ref()
    }

    /// Every key with its value, if that is in memory; expired ones included.
    pub fn iter(&self) -> impl Iterator<Item = (&str, Option<&Bytes>)> {
        let entries = self.entries.iter();
        entries.map(|(key, entry)| (key.as_ref(), entry.value.as_ref()))
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
        while self.entries.contains_key(&*key) || self.staged.contains_key(&*key) {
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
            let is_current = self
                .entries
                .get(&key)
                .is_some_and(|entry| entry.offset == offset);
            // A write on its way puts the place back if it comes to nothing.
            if !is_current || self.staged.contains_key(&key) {
                continue;
            }
            let record = ValueRecord::Delete { key: &key }.encode();
            staged.push(self.stage(&key, record, Change::Expire));
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
                self.insert(write.key, offset, expires_at_ms, value);
                Applied::Stored
            }
            Change::Delete => Applied::Removed(match self.remove(&write.key) {
                Some(entry) if !entry.is_expired(now_ms) => entry.lookup(),
                Some(_) | None => Lookup::Miss,
            }),
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
                let place = (entry.expires_at_ms, entry.offset, write.key);
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
                self.insert(Arc::from(key), offset, expires_at_ms, value);
            }
            ValueRecord::Delete { key } => drop(self.remove(key)),
        }
        self.next_offset = next;
        Ok(())
    }

    /// Lets the oldest values go from memory until `bytes` are free or none is left.
    pub fn evict(&mut self, bytes: usize) {
        let target = self.resident_bytes.saturating_sub(bytes);
        while self.resident_bytes > target {
            let Some((offset, key)) = self.resident.pop_front() else {
                return;
            };
            let Some(entry) = self.entries.get_mut(&key) else {
                continue;
            };
            if entry.offset == offset {
                if let Some(value) = entry.value.take() {
                    self.resident_bytes -= resident_cost(&value);
                }
            }
        }
    }

    /// Takes a value read from the log back into memory, if it is still the key's.
    pub fn readmit(&mut self, key: &str, offset: u64, value: &[u8]) {
        let Some((key, entry)) = self.entries.get_key_value(key) else {
            return;
        };
        if entry.offset != offset || entry.value.is_some() {
            return;
        }
        let key = Arc::clone(key);
        let value = Bytes::copy_from_slice(value);
        self.resident_bytes += resident_cost(&value);
        self.resident.push_back((offset, Arc::clone(&key)));
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.value = Some(value);
        }
        self.sweep_resident();
    }

    fn insert(&mut self, key: Arc<str>, offset: u64, expires_at_ms: u64, value: Bytes) {
        self.resident_bytes += resident_cost(&value);
        let entry = Entry {
            offset,
            expires_at_ms,
            value_bytes: value.len() as u32,
            value: Some(value),
        };
        self.log_use.added(record_bytes(&key, &entry));
        self.resident.push_back((offset, Arc::clone(&key)));
        if expires_at_ms != 0 {
            let place = (expires_at_ms, offset, Arc::clone(&key));
            self.expiries.push(Reverse(place));
        }
        self.key_bytes += key.len();
        let key_len = key.len();
        if let Some(old) = self.entries.insert(key, entry) {
            self.key_bytes -= key_len;
            self.forget(key_len, &old);
        }
        self.sweep_resident();
        self.sweep_expiries();
    }

    fn remove(&mut self, key: &str) -> Option<Entry> {
        let entry = self.entries.remove(key)?;
        self.key_bytes -= key.len();
        self.forget(key.len(), &entry);
        Some(entry)
    }

    /// An entry stands at `to` now. No write to its key came between its copy's making and here:
    /// one before the copy forbids it, one after it is applied after it.
    fn move_entry(&mut self, key: &Arc<str>, from: u64, to: u64) {
        let entry = self.entries.get_mut(key);
        let entry = entry.filter(|entry| entry.offset == from);
        assert!(entry.is_some(), "CACHE-5: a copied entry changed under way");
        let Some(entry) = entry else { return };
        entry.offset = to;
        let (is_resident, expires_at_ms) = (entry.value.is_some(), entry.expires_at_ms);
        self.log_use.moved(from);
        if is_resident {
            self.resident.push_back((to, Arc::clone(key)));
        }
        if expires_at_ms != 0 {
            let place = (expires_at_ms, to, Arc::clone(key));
            self.expiries.push(Reverse(place));
        }
        self.sweep_resident();
        self.sweep_expiries();
    }

    /// Takes an entry that is replaced or removed out of the totals.
    fn forget(&mut self, key_bytes: usize, entry: &Entry) {
        let bytes = HEAD_BYTES + key_bytes + entry.value_bytes as usize;
        self.log_use.removed(entry.offset, bytes);
        if let Some(value) = &entry.value {
            self.resident_bytes -= resident_cost(value);
        }
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
        let entries = &self.entries;
        self.resident.retain(|(offset, key)| {
            entries
                .get(key)
                .is_some_and(|entry| entry.offset == *offset && entry.value.is_some())
        });
        self.sweep_resident_at = 2 * self.resident.len() + SWEEP_SLACK;
    }

    fn sweep_expiries(&mut self) {
        if self.expiries.len() <= self.sweep_expiries_at {
            return;
        }
        let entries = &self.entries;
        self.expiries.retain(|Reverse((_, offset, key))| {
            entries
                .get(key)
                .is_some_and(|entry| entry.offset == *offset)
        });
        self.sweep_expiries_at = 2 * self.expiries.len() + SWEEP_SLACK;
    }
}

impl Entry {
    fn lookup(&self) -> Lookup {
        match &self.value {
            Some(value) => Lookup::Value(value.clone()),
            None => Lookup::InLog {
                offset: self.offset,
            },
        }
    }
}

fn record_bytes(key: &str, entry: &Entry) -> usize {
    HEAD_BYTES + key.len() + entry.value_bytes as usize
}

fn resident_cost(value: &Bytes) -> usize {
    value.len() + RESIDENT_OVERHEAD_BYTES
}
