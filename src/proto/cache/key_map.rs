//! A map from keys that grows in small steps.
//!
//! A hash map that is full moves everything it holds at once: with millions of keys that stops a core
//! for hundreds of milliseconds. So one that has become large is divided into parts, each with a share
//! of the keys, and only one part moves at a time.
//!
//! Cost: a slot holds the key itself when that is short ([`INLINE_KEY_BYTES`]), what is kept of it, and a
//! byte, and between 7/16 and 7/8 of the slots are in use: with 24 bytes of value 56 to 112 bytes a key,
//! 75 on average. A longer key is on the heap. Of ten million keys a part that moves is 40,000, a few
//! milliseconds.
//!
//! Which part a key belongs to is no secret: who crowds one part is back at a map that is not divided.
//! Inside a part keys are hashed with a secret, as everywhere.

use std::borrow::Borrow;
use std::collections::hash_map::Entry;
use std::collections::HashMap;
use std::hash::{Hash, Hasher};

/// Longest key without an allocation of its own.
const INLINE_KEY_BYTES: usize = 22;
/// What the allocator takes for a key besides its bytes.
const HEAP_KEY_BYTES: usize = 16;
/// Keys of a map that is not divided.
const UNDIVIDED_KEYS: usize = 1 << 15;
const PARTS: usize = 256;

/// A key as it is held for long.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Key {
    /// Its length, and as many bytes.
    Inline(u8, [u8; INLINE_KEY_BYTES]),
    Heap(Box<str>),
}

impl Key {
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Inline(len, bytes) => &bytes[..usize::from(*len)],
            Self::Heap(key) => key.as_bytes(),
        }
    }

    pub fn as_str(&self) -> &str {
        match self {
            // INV: made from a str.
            Self::Inline(..) => std::str::from_utf8(self.as_bytes()).unwrap_or_default(),
            Self::Heap(key) => key,
        }
    }

    /// What it takes besides its place.
    fn heap_bytes(&self) -> usize {
        match self {
            Self::Inline(..) => 0,
            Self::Heap(key) => key.len() + HEAP_KEY_BYTES,
        }
    }
}

impl From<&str> for Key {
    fn from(key: &str) -> Self {
        if key.len() > INLINE_KEY_BYTES {
            return Self::Heap(key.into());
        }
        let mut bytes = [0; INLINE_KEY_BYTES];
        bytes[..key.len()].copy_from_slice(key.as_bytes());
        Self::Inline(key.len() as u8, bytes)
    }
}

// The same for a key as for its bytes: maps are asked with those.
impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.as_bytes().hash(state);
    }
}

impl Borrow<[u8]> for Key {
    fn borrow(&self) -> &[u8] {
        self.as_bytes()
    }
}

/// A map from keys to what is kept of them.
#[derive(Debug)]
pub struct KeyMap<V> {
    /// None before the first key, then one, then [`PARTS`].
    parts: Vec<HashMap<Key, V>>,
    len: usize,
    /// Keys all parts have room for.
    room: usize,
    heap_bytes: usize,
}

impl<V> Default for KeyMap<V> {
    fn default() -> Self {
        Self {
            parts: Vec::new(),
            len: 0,
            room: 0,
            heap_bytes: 0,
        }
    }
}

impl<V> KeyMap<V> {
    /// Keys held.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Memory it takes, free slots included.
    pub fn bytes(&self) -> usize {
        // A slot and its byte; 7 of 8 may be in use.
        let slot = std::mem::size_of::<(Key, V)>() + 1;
        self.room * slot * 8 / 7 + self.heap_bytes
    }

    pub fn get(&self, key: &str) -> Option<&V> {
        let part = self.parts.get(self.place(key.as_bytes()))?;
        part.get(key.as_bytes())
    }

    pub fn get_mut(&mut self, key: &str) -> Option<&mut V> {
        let at = self.place(key.as_bytes());
        self.parts.get_mut(at)?.get_mut(key.as_bytes())
    }

    pub fn contains_key(&self, key: &str) -> bool {
        self.get(key).is_some()
    }

    /// What the key held before.
    pub fn insert(&mut self, key: &str, value: V) -> Option<V> {
        match self.parts.len() {
            0 => self.parts.push(HashMap::new()),
            1 if self.len >= UNDIVIDED_KEYS => self.divide(),
            _ => {}
        }
        let at = self.place(key.as_bytes());
        let part = &mut self.parts[at];
        let room = part.capacity();
        let old = match part.entry(Key::from(key)) {
            Entry::Occupied(mut held) => Some(held.insert(value)),
            Entry::Vacant(place) => {
                self.len += 1;
                self.heap_bytes += place.key().heap_bytes();
                place.insert(value);
                None
            }
        };
        self.room = self.room - room + part.capacity();
        old
    }

    pub fn remove(&mut self, key: &str) -> Option<V> {
        let at = self.place(key.as_bytes());
        let part = self.parts.get_mut(at)?;
        let room = part.capacity();
        let (key, value) = part.remove_entry(key.as_bytes())?;
        // A slot of which something was deleted is not counted as room.
        self.room = self.room - room + part.capacity();
        self.heap_bytes -= key.heap_bytes();
        self.len -= 1;
        Some(value)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, &V)> {
        let held = self.parts.iter().flatten();
        held.map(|(key, value)| (key.as_str(), value))
    }

    fn place(&self, key: &[u8]) -> usize {
        match self.parts.len() {
            0 | 1 => 0,
            _ => part_of(key),
        }
    }

    fn divide(&mut self) {
        let whole = std::mem::take(&mut self.parts);
        self.parts.resize_with(PARTS, HashMap::new);
        for (key, value) in whole.into_iter().flatten() {
            let at = part_of(key.as_bytes());
            self.parts[at].insert(key, value);
        }
        self.room = self.parts.iter().map(HashMap::capacity).sum();
    }
}

/// One of [`PARTS`], evenly for keys that differ anywhere.
fn part_of(key: &[u8]) -> usize {
    // The odd number nearest to 2^64 by the golden ratio: every bit of a word reaches the upper ones.
    const SPREAD: u64 = 0x9E37_79B9_7F4A_7C15;
    let words = key.chunks(8).map(|bytes| {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(word)
    });
    let mixed = words.fold(key.len() as u64, |mixed, word| {
        let mixed = (mixed ^ word).wrapping_mul(SPREAD);
        mixed ^ (mixed >> 32)
    });
    (mixed.wrapping_mul(SPREAD) >> 56) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Short ones, and every third a long one.
    fn key(nth: usize) -> String {
        let tail = if nth % 3 == 0 {
            "/of a length beyond that of a slot"
        } else {
            ""
        };
        format!("user:{nth:08}{tail}")
    }

    #[test]
    fn it_holds_the_same_before_and_after_it_is_divided() {
        let mut map = KeyMap::default();
        assert!(map.get("user:00000000").is_none() && map.iter().next().is_none());
        assert_eq!(map.bytes(), 0);
        assert_eq!(map.remove("user:00000000"), None);
        let keys = UNDIVIDED_KEYS + 1000;
        for nth in 0..keys {
            assert_eq!(map.insert(&key(nth), nth), None);
        }
        assert_eq!((map.len(), map.parts.len()), (keys, PARTS));
        for nth in 0..keys {
            let name = key(nth);
            assert_eq!(map.get(&name), Some(&nth));
            assert!(map.contains_key(&name));
        }
        assert!(!map.contains_key("user:99999999"));
        assert!(map.iter().all(|(name, nth)| *name == key(*nth)));
        let mut seen: Vec<usize> = map.iter().map(|(_, nth)| *nth).collect();
        seen.sort_unstable();
        assert!(seen.into_iter().eq(0..keys));
        for nth in 0..keys {
            *map.get_mut(&key(nth)).unwrap() += 1;
            assert_eq!(map.insert(&key(nth), nth), Some(nth + 1));
            assert_eq!(map.remove(&key(nth)), Some(nth));
            assert_eq!(map.remove(&key(nth)), None);
        }
        assert_eq!((map.len(), map.heap_bytes), (0, 0));
        let room: usize = map.parts.iter().map(HashMap::capacity).sum();
        assert_eq!(map.room, room);
    }

    #[test]
    fn short_keys_are_held_in_their_slot_and_memory_is_what_is_told() {
        assert_eq!(std::mem::size_of::<Key>(), 24);
        for key in [
            "",
            "k",
            "exactly two and twenty",
            "\u{1F980} of more bytes than chars",
        ] {
            let held = Key::from(key);
            assert_eq!((held.as_str(), held.as_bytes()), (key, key.as_bytes()));
            assert_eq!(
                matches!(held, Key::Inline(..)),
                key.len() <= INLINE_KEY_BYTES
            );
        }
        let mut map = KeyMap::default();
        for nth in 0..1_000_000u64 {
            map.insert(&format!("user:{nth:08}"), [nth; 3]);
        }
        let a_key = map.bytes() / map.len();
        assert!((56..=112).contains(&a_key), "{a_key} bytes");
    }

    /// What makes dividing worth it: no part holds much more than its share, whatever keys look like.
    #[test]
    fn keys_are_spread_evenly() {
        let shapes: [fn(usize) -> String; 5] = [
            |nth| nth.to_string(),
            |nth| format!("{nth:032x}"),
            |nth| format!("tenant-7/session/{:08}", nth * 64),
            |nth| format!("{nth:09}/profile/settings/theme"),
            |nth| "k".repeat(nth % 500) + &nth.to_string(),
        ];
        for (nth, shape) in shapes.into_iter().enumerate() {
            let mut held = [0usize; PARTS];
            for key in 0..PARTS * 400 {
                held[part_of(shape(key).as_bytes())] += 1;
            }
            let (least, most) = (held.iter().min(), held.iter().max());
            assert!(
                least > Some(&250) && most < Some(&600),
                "shape {nth}: {least:?} to {most:?}"
            );
        }
    }
}
