//! Writes that are durable here and wait for a majority.

use std::collections::VecDeque;

use crate::proto::MonoTime;

/// The waiting writes of one shard, in the order of its log. `W` is who is told.
///
/// Invariant: what goes in comes out exactly once, released, expired or failed; a wait outlives a
/// change of generation under the same leader.
#[derive(Debug)]
pub struct QuorumWaits<W> {
    waiting: VecDeque<Wait<W>>,
}

#[derive(Debug)]
struct Wait<W> {
    /// One past the last record of the write.
    end: u64,
    deadline: MonoTime,
    who: W,
}

impl<W> Default for QuorumWaits<W> {
    fn default() -> Self {
        Self {
            waiting: VecDeque::new(),
        }
    }
}

impl<W> QuorumWaits<W> {
    /// A write whose records end before `end` waits until `deadline`. Writes come in the order in
    /// which they became durable, with deadlines that do not fall.
    pub fn push(&mut self, end: u64, deadline: MonoTime, who: W) {
        self.waiting.push_back(Wait { end, deadline, who });
    }

    /// The next write that the mark has passed.
    pub fn pop_released(&mut self, mark: u64) -> Option<W> {
        self.pop_if(|wait| wait.end <= mark)
    }

    /// The next write that has waited as long as it may.
    pub fn pop_expired(&mut self, now: MonoTime) -> Option<W> {
        self.pop_if(|wait| wait.deadline <= now)
    }

    /// The next write, whatever it waits for: the shard is lost, or the broker stops.
    pub fn pop_any(&mut self) -> Option<W> {
        self.pop_if(|_| true)
    }

    /// When [`Self::pop_expired`] has something.
    pub fn next_deadline(&self) -> Option<MonoTime> {
        self.waiting.front().map(|wait| wait.deadline)
    }

    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    fn pop_if(&mut self, is_over: impl FnOnce(&Wait<W>) -> bool) -> Option<W> {
        match self.waiting.front().is_some_and(is_over) {
            true => self.waiting.pop_front().map(|wait| wait.who),
            false => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_is_released_by_the_mark_that_reaches_its_end() {
        let at = MonoTime::from_micros;
        let mut waits = QuorumWaits::default();
        waits.push(10, at(5), 'a');
        waits.push(12, at(6), 'b');
        assert_eq!(waits.pop_released(9), None);
        assert_eq!(waits.pop_released(11), Some('a'));
        assert_eq!(waits.pop_released(11), None);
        assert_eq!(waits.next_deadline(), Some(at(6)));
        assert_eq!(waits.pop_expired(at(5)), None);
        assert_eq!(waits.pop_expired(at(6)), Some('b'));
        waits.push(13, at(9), 'c');
        assert_eq!((waits.len(), waits.pop_any()), (1, Some('c')));
        assert!(waits.is_empty());
    }
}
