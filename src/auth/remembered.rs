//! The tokens that verified recently, so that the next stream of a connection costs no
//! signature check.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use super::grant::Grant;

/// Two generations of entries. New and used entries go into the young one; when it is full it
/// becomes the old one and the previous old one is dropped. So a token in use stays, one that
/// is not used is gone after two turns, and the bounds hold without any list to maintain.
#[derive(Debug)]
pub(super) struct Remembered {
    young: Half,
    old: Half,
    max_half_entries: usize,
    max_half_bytes: usize,
    hasher: RandomState,
}

#[derive(Debug, Default)]
struct Half {
    entries: HashMap<u64, Entry>,
    bytes: usize,
}

struct Entry {
    token: Box<str>,
    grant: Arc<Grant>,
}

impl std::fmt::Debug for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Entry({} bytes hidden)", self.token.len())
    }
}

/// How many bytes at a token's end are hashed: they are the signature, which differs between
/// any two tokens that verify.
const HASHED_TAIL_BYTES: usize = 32;

impl Remembered {
    pub(super) fn new(max_entries: usize, max_bytes: usize) -> Self {
        Self {
            young: Half::default(),
            old: Half::default(),
            max_half_entries: max_entries / 2,
            max_half_bytes: max_bytes / 2,
            hasher: RandomState::new(),
        }
    }

    fn key(&self, token: &str) -> u64 {
        let bytes = token.as_bytes();
        let tail = &bytes[bytes.len().saturating_sub(HASHED_TAIL_BYTES)..];
        self.hasher.hash_one(tail)
    }

    /// The grant of a token that verified before. Compares the whole token.
    pub(super) fn get(&mut self, token: &str) -> Option<Arc<Grant>> {
        let key = self.key(token);
        if let Some(entry) = self.young.entries.get(&key) {
            return (*entry.token == *token).then(|| Arc::clone(&entry.grant));
        }
        let is_same = |entry: &Entry| *entry.token == *token;
        if !self.old.entries.get(&key).is_some_and(is_same) {
            return None;
        }
        let entry = self.old.entries.remove(&key)?;
        self.old.bytes -= entry.token.len();
        let grant = Arc::clone(&entry.grant);
        self.put(key, entry);
        Some(grant)
    }

    /// Remembers a token that has just verified.
    pub(super) fn insert(&mut self, token: &str, grant: Arc<Grant>) {
        let key = self.key(token);
        let token = Box::from(token);
        self.put(key, Entry { token, grant });
    }

    fn put(&mut self, key: u64, entry: Entry) {
        let bytes = entry.token.len();
        if bytes > self.max_half_bytes || self.max_half_entries == 0 {
            return;
        }
        let full = self.young.entries.len() >= self.max_half_entries
            || self.young.bytes + bytes > self.max_half_bytes;
        if full {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.bytes += bytes;
        if let Some(replaced) = self.young.entries.insert(key, entry) {
            self.young.bytes -= replaced.token.len();
        }
    }

    /// Forgets one token, which has expired.
    pub(super) fn remove(&mut self, token: &str) {
        let key = self.key(token);
        for half in [&mut self.young, &mut self.old] {
            if let Some(entry) = half.entries.remove(&key) {
                half.bytes -= entry.token.len();
            }
        }
    }

    /// Forgets everything: keys may have been withdrawn.
    pub(super) fn clear(&mut self) {
        self.young = Half::default();
        self.old = Half::default();
    }

    /// Entries and bytes held.
    pub(super) fn size(&self) -> (usize, usize) {
        (
            self.young.entries.len() + self.old.entries.len(),
            self.young.bytes + self.old.bytes,
        )
    }
}
