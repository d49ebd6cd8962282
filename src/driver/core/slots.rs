//! Generation-checked slots for work that waits on something asynchronous.
//!
//! A token names one piece of waiting work for ever: a slot that is reused gets a new generation,
//! so a completion that arrives late (after a timeout or a lost connection) finds nothing instead
//! of somebody else's work.

/// Waiting work of one kind. Not thread safe; lives on one core.
pub struct Slots<T> {
    entries: Vec<Entry<T>>,
    free: Vec<u32>,
    live: usize,
}

struct Entry<T> {
    generation: u32,
    value: Option<T>,
}

impl<T> Default for Slots<T> {
    fn default() -> Self {
        Self {
            entries: Vec::new(),
            free: Vec::new(),
            live: 0,
        }
    }
}

impl<T> Slots<T> {
    /// Stores `value` and returns the token that takes it out again.
    pub fn insert(&mut self, value: T) -> u64 {
        self.live += 1;
        let index = match self.free.pop() {
            Some(index) => index,
            None => {
                self.entries.push(Entry {
                    generation: 0,
                    value: None,
                });
                (self.entries.len() - 1) as u32
            }
        };
        let entry = &mut self.entries[index as usize];
        entry.value = Some(value);
        (u64::from(entry.generation) << 32) | u64::from(index)
    }

    /// Takes the work out; `None` when the token was used before.
    pub fn remove(&mut self, token: u64) -> Option<T> {
        let index = token as u32;
        let entry = self.entries.get_mut(index as usize)?;
        if u64::from(entry.generation) != token >> 32 {
            return None;
        }
        let value = entry.value.take()?;
        entry.generation = entry.generation.wrapping_add(1);
        self.free.push(index);
        self.live -= 1;
        Some(value)
    }

    pub fn get(&self, token: u64) -> Option<&T> {
        let entry = self.entries.get(token as u32 as usize)?;
        if u64::from(entry.generation) != token >> 32 {
            return None;
        }
        entry.value.as_ref()
    }

    pub fn get_mut(&mut self, token: u64) -> Option<&mut T> {
        let entry = self.entries.get_mut(token as u32 as usize)?;
        if u64::from(entry.generation) != token >> 32 {
            return None;
        }
        entry.value.as_mut()
    }

    pub fn len(&self) -> usize {
        self.live
    }

    pub fn is_empty(&self) -> bool {
        self.live == 0
    }

    /// Tokens of everything that waits, for sweeps on rare events (a lost peer, a drain).
    pub fn tokens(&self) -> Vec<u64> {
        self.entries
            .iter()
            .enumerate()
            .filter(|(_, entry)| entry.value.is_some())
            .map(|(index, entry)| (u64::from(entry.generation) << 32) | index as u64)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_token_finds_nothing() {
        let mut slots = Slots::default();
        let first = slots.insert("a");
        assert_eq!(slots.remove(first), Some("a"));
        assert_eq!(slots.remove(first), None);
        let second = slots.insert("b");
        assert_ne!(first, second, "a reused slot has a new generation");
        assert_eq!(slots.get_mut(first), None);
        assert_eq!(slots.remove(second), Some("b"));
        assert!(slots.is_empty());
    }

    #[test]
    fn tokens_lists_what_waits() {
        let mut slots = Slots::default();
        let a = slots.insert(1);
        let b = slots.insert(2);
        slots.remove(a);
        assert_eq!(slots.tokens(), vec![b]);
        assert_eq!(slots.len(), 1);
    }
}
