//! Virtual time: events in the order of their time, equal times in the order of their making.

use std::collections::BTreeMap;

/// Events to come.
#[derive(Debug)]
pub struct Queue<E> {
    events: BTreeMap<(u64, u64), E>,
    made: u64,
}

impl<E> Default for Queue<E> {
    fn default() -> Self {
        Self {
            events: BTreeMap::new(),
            made: 0,
        }
    }
}

impl<E> Queue<E> {
    /// Adds an event at an absolute virtual time in microseconds.
    pub fn push(&mut self, at_us: u64, event: E) {
        self.made += 1;
        self.events.insert((at_us, self.made), event);
    }

    /// The next event and its time.
    pub fn pop(&mut self) -> Option<(u64, E)> {
        self.events.pop_first().map(|((at, _), event)| (at, event))
    }

    pub fn len(&self) -> usize {
        self.events.len()
    }

    pub fn is_empty(&self) -> bool {
        self.events.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_times_keep_their_order() {
        let mut queue = Queue::default();
        for (at, name) in [(5, "c"), (1, "a"), (5, "d"), (1, "b")] {
            queue.push(at, name);
        }
        let order: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(order, [(1, "a"), (1, "b"), (5, "c"), (5, "d")]);
        assert!(queue.is_empty());
    }
}
