//! Logs whose shard this broker led and leads no more, for as long as somebody may still wait for a write.
//!
//! Invariant: from the moment a new catalog takes a shard away, no write to its logs is acknowledged for being
//! durable here. How far a log is durable at that moment says nothing: the disk may be done with writes
//! whose completions nobody has looked at.

use std::collections::HashSet;
use std::hash::Hash;

/// The lost logs of one core.
#[derive(Debug)]
pub(super) struct Losses<L> {
    lost: HashSet<L>,
}

impl<L> Default for Losses<L> {
    fn default() -> Self {
        Self {
            lost: HashSet::new(),
        }
    }
}

impl<L: Copy + Eq + Hash> Losses<L> {
    /// A new catalog is in force; each open log with whether this broker leads its shard by it.
    pub fn after_catalog(&mut self, logs: impl Iterator<Item = (L, bool)>) {
        let lost = logs.filter(|(_, is_led)| !is_led);
        self.lost.extend(lost.map(|(log, _)| log));
    }

    /// Whether a write to the log that has become durable may not be acknowledged for it.
    pub fn contains(&self, log: L) -> bool {
        !self.lost.is_empty() && self.lost.contains(&log)
    }

    /// The shard is led anew, on from what the log holds.
    pub fn remove(&mut self, log: L) {
        self.lost.remove(&log);
    }

    /// Every completion that was there has been looked at: a log without anything on its way is done with.
    /// Not sooner, because several writes become durable together.
    pub fn on_completions_looked_at(&mut self, is_settled: impl Fn(L) -> bool) {
        self.lost.retain(|log| !is_settled(*log));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A log of a disk whose completions are looked at later than they are there.
    #[derive(Default)]
    struct Written {
        tail: u64,
        durable: u64,
        unread: Vec<u64>,
    }

    impl Written {
        fn write(&mut self) {
            self.tail += 1;
        }

        /// The disk is done with everything; nobody has looked.
        fn sync(&mut self) {
            self.unread.extend(self.durable..self.tail);
            self.durable = self.tail;
        }
    }

    /// What a core does with its completions: which offsets are acknowledged, which are of unknown outcome.
    fn look(losses: &mut Losses<u8>, log: &mut Written) -> (Vec<u64>, Vec<u64>) {
        let (mut acked, mut unknown) = (Vec::new(), Vec::new());
        for offset in log.unread.drain(..) {
            match losses.contains(7) {
                true => unknown.push(offset),
                false => acked.push(offset),
            }
        }
        let is_whole = log.durable == log.tail;
        losses.on_completions_looked_at(|_| is_whole);
        (acked, unknown)
    }

    #[test]
    fn a_write_the_disk_was_done_with_before_the_loss_is_not_acknowledged_after_it() {
        let (mut losses, mut log) = (Losses::default(), Written::default());
        log.write();
        log.write();
        log.sync();
        // The log is durable to its end, and the catalog comes before anybody has looked.
        losses.after_catalog([(7, false)].into_iter());
        assert_eq!(look(&mut losses, &mut log), (vec![], vec![0, 1]));
        assert!(!losses.contains(7), "nothing is on its way any more");
    }

    #[test]
    fn writes_that_become_durable_in_parts_after_the_loss_are_not_acknowledged_either() {
        let (mut losses, mut log) = (Losses::default(), Written::default());
        log.write();
        log.sync();
        log.write();
        losses.after_catalog([(7, false), (8, true)].into_iter());
        assert!(!losses.contains(8), "that one is led on");
        assert_eq!(look(&mut losses, &mut log), (vec![], vec![0]));
        log.sync();
        assert_eq!(look(&mut losses, &mut log), (vec![], vec![1]));
        assert_eq!(look(&mut losses, &mut log), (vec![], vec![]));
        log.write();
        log.sync();
        assert_eq!(look(&mut losses, &mut log), (vec![2], vec![]), "a copy's");
    }

    #[test]
    fn what_is_led_again_before_anybody_looked_waits_for_the_new_majority() {
        let (mut losses, mut log) = (Losses::default(), Written::default());
        log.write();
        log.sync();
        losses.after_catalog([(7, false)].into_iter());
        losses.remove(7);
        assert_eq!(look(&mut losses, &mut log), (vec![0], vec![]));
    }
}
