//! The order of one client stream's forwarded publishes to one shard, kept across retries.
//!
//! The client protocol promises that the publishes of a stream are applied, per shard, in the order the
//! stream carried them. Requests that travel on one peer stream are; a request that was refused and is
//! sent again would be applied behind those that were sent after it. So a retry waits for what was sent
//! after it, and is given up when any of that may have been applied; the client hears of the refusal and
//! decides. What follows a retry waits for it.
//!
//! It does not send and does not count attempts: that is [`super::forward::Forward`].
//!
//! Invariants:
//! * ORD-1: nothing is sent while an earlier request of the chain waits to be sent again.
//! * ORD-2: nothing is sent again once a later request of the chain may have been applied, nor while one
//!   is on its way.
//! * ORD-3: what is on its way at once goes one way: to one broker, on one stream.
//! * ORD-4: whatever is held is released or given up as soon as what it waits for has ended.

use std::collections::VecDeque;

/// What may become of a request that is to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Turn {
    /// Send it now.
    Send,
    /// Keep it; [`OrderChain::next_release`] says when.
    Hold,
    /// A later one may have been applied: end it with the refusal it has.
    GiveUp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Sent and not answered.
    Sent,
    /// Refused; its next attempt has not come yet.
    Waiting,
    /// Its next attempt (or its first) has come and must wait for others.
    Held,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    token: u64,
    /// Where it goes, or went last.
    way: u64,
    state: State,
    /// A later request of the chain may have been applied.
    is_overtaken: bool,
}

/// Unfinished requests of one client stream and shard, oldest first.
#[derive(Debug, Default)]
pub struct OrderChain {
    entries: VecDeque<Entry>,
    /// Entries that are not `Sent`.
    unsent: usize,
}

impl OrderChain {
    /// Whether nothing is unfinished.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether a request waits to be sent, for the first time or again.
    pub fn has_unsent(&self) -> bool {
        self.unsent > 0
    }

    /// Whether another request of the chain is on its way, so that `token` has to follow it.
    pub fn follows_another(&self, token: u64) -> bool {
        let mut others = self.entries.iter().filter(|entry| entry.token != token);
        others.any(|entry| entry.state == State::Sent)
    }

    /// A new request at the end of the chain: [`Turn::Send`] or [`Turn::Hold`]. `way` names the broker it
    /// would go to.
    pub fn begin(&mut self, token: u64, way: u64) -> Turn {
        // All that are on their way go the same one.
        let goes_along = self.entries.back().is_none_or(|last| last.way == way);
        let (state, turn) = match self.unsent == 0 && goes_along {
            true => (State::Sent, Turn::Send),
            false => (State::Held, Turn::Hold),
        };
        self.unsent += usize::from(state != State::Sent);
        self.entries.push_back(Entry {
            token,
            way,
            state,
            is_overtaken: false,
        });
        turn
    }

    /// An attempt ended without having been applied.
    pub fn on_refused(&mut self, token: u64) {
        if let Some(at) = self.position(token) {
            self.set(at, State::Waiting);
        }
    }

    /// The next attempt of a refused request has come, to the broker `way` names.
    pub fn on_retry(&mut self, token: u64, way: u64) -> Turn {
        let Some(at) = self.position(token) else {
            return Turn::Send;
        };
        self.entries[at].way = way;
        let turn = self.turn_of(at);
        self.set(
            at,
            match turn {
                Turn::Send => State::Sent,
                Turn::Hold | Turn::GiveUp => State::Held,
            },
        );
        turn
    }

    /// A request is over. `may_be_applied` unless it surely was not.
    pub fn on_finished(&mut self, token: u64, may_be_applied: bool) {
        let Some(at) = self.position(token) else {
            return;
        };
        if may_be_applied {
            for earlier in self.entries.range_mut(..at) {
                earlier.is_overtaken = true;
            }
        }
        let removed = self.entries.remove(at);
        self.unsent -= usize::from(removed.is_some_and(|entry| entry.state != State::Sent));
    }

    /// The first held request that need not wait any longer, with [`Turn::Send`] (it counts as sent then)
    /// or [`Turn::GiveUp`]. Call until `None` after every change.
    pub fn next_release(&mut self) -> Option<(u64, Turn)> {
        if self.unsent == 0 {
            return None;
        }
        for at in 0..self.entries.len() {
            if self.entries[at].state != State::Held {
                continue;
            }
            match self.turn_of(at) {
                Turn::Hold => {}
                turn @ Turn::Send => {
                    self.set(at, State::Sent);
                    return Some((self.entries[at].token, turn));
                }
                turn @ Turn::GiveUp => return Some((self.entries[at].token, turn)),
            }
        }
        None
    }

    fn turn_of(&self, at: usize) -> Turn {
        if self.entries[at].is_overtaken {
            return Turn::GiveUp;
        }
        let way = self.entries[at].way;
        let mut earlier = self.entries.range(..at);
        let earlier_unsent = earlier.any(|e| e.state != State::Sent || e.way != way);
        let later_sent = self.entries.range(at + 1..).any(|e| e.state == State::Sent);
        match earlier_unsent || later_sent {
            true => Turn::Hold,
            false => Turn::Send,
        }
    }

    fn set(&mut self, at: usize, state: State) {
        let entry = &mut self.entries[at];
        self.unsent -= usize::from(entry.state != State::Sent);
        self.unsent += usize::from(state != State::Sent);
        entry.state = state;
    }

    fn position(&self, token: u64) -> Option<usize> {
        self.entries.iter().position(|entry| entry.token == token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::backoff::split_mix;

    #[test]
    fn requests_flow_freely_while_none_is_refused() {
        let mut chain = OrderChain::default();
        for token in 0..5 {
            assert_eq!(chain.begin(token, 0), Turn::Send);
        }
        for token in 0..5 {
            assert_eq!(chain.next_release(), None);
            chain.on_finished(token, true);
        }
        assert!(chain.is_empty());
    }

    #[test]
    fn a_redirected_run_is_sent_again_in_order() {
        let mut chain = OrderChain::default();
        for token in 0..3 {
            chain.begin(token, 0);
        }
        for token in 0..2 {
            chain.on_refused(token);
            assert_eq!(chain.on_retry(token, 0), Turn::Hold);
            assert_eq!(chain.next_release(), None, "2 is on its way");
        }
        assert_eq!(chain.begin(3, 0), Turn::Hold);
        chain.on_refused(2);
        assert_eq!(chain.on_retry(2, 0), Turn::Hold);
        for token in 0..4 {
            assert_eq!(chain.next_release(), Some((token, Turn::Send)));
        }
        assert_eq!(chain.next_release(), None);
    }

    #[test]
    fn a_retry_that_was_overtaken_is_given_up_and_frees_what_follows() {
        for may_be_applied in [true, false] {
            let mut chain = OrderChain::default();
            chain.begin(0, 0);
            chain.begin(1, 0);
            chain.on_refused(0);
            assert_eq!(chain.begin(2, 0), Turn::Hold);
            chain.on_finished(1, may_be_applied);
            assert_eq!(chain.next_release(), None, "0 waits for its time");
            match may_be_applied {
                true => {
                    assert_eq!(chain.on_retry(0, 0), Turn::GiveUp);
                    chain.on_finished(0, false);
                }
                false => assert_eq!(chain.on_retry(0, 0), Turn::Send),
            }
            assert_eq!(chain.next_release(), Some((2, Turn::Send)));
        }
    }

    #[test]
    fn nothing_goes_another_way_while_something_is_on_its_way() {
        let mut chain = OrderChain::default();
        assert_eq!(chain.begin(0, 7), Turn::Send);
        assert!(!chain.follows_another(0));
        assert_eq!(chain.begin(1, 8), Turn::Hold);
        assert_eq!(chain.begin(2, 7), Turn::Hold);
        assert_eq!(chain.next_release(), None);
        chain.on_finished(0, true);
        assert_eq!(chain.next_release(), Some((1, Turn::Send)));
        assert_eq!(chain.next_release(), None, "2 goes another way than 1");
        assert!(chain.follows_another(2));
    }

    /// Random schedules over two ways, each in order, to owners that apply or refuse: what is applied is
    /// applied in order, and everything ends.
    #[test]
    fn whatever_is_refused_the_applied_ones_are_in_order() {
        for seed in 0..5_000u64 {
            let mut state = seed;
            let mut below = |n: u64| split_mix(&mut state) % n;
            let mut chain = OrderChain::default();
            let mut wires: [VecDeque<u64>; 2] = Default::default();
            let mut ways = [0usize; 12];
            let mut waiting: Vec<u64> = Vec::new();
            let mut applied: Vec<u64> = Vec::new();
            let (mut next, mut ended, total) = (0, 0, 12);
            while ended < total {
                // Requests mostly go where the one before them went.
                let way = usize::from(below(5) == 0);
                match below(3) {
                    0 if next < total => {
                        ways[next as usize] = way;
                        if chain.begin(next, way as u64) == Turn::Send {
                            wires[way].push_back(next);
                        }
                        next += 1;
                    }
                    1 if !waiting.is_empty() => {
                        let token = waiting.swap_remove(below(waiting.len() as u64) as usize);
                        ways[token as usize] = way;
                        match chain.on_retry(token, way as u64) {
                            Turn::Send => wires[way].push_back(token),
                            Turn::Hold => {}
                            Turn::GiveUp => {
                                chain.on_finished(token, false);
                                ended += 1;
                            }
                        }
                    }
                    _ => {
                        let Some(token) = wires[below(2) as usize].pop_front() else {
                            continue;
                        };
                        match below(4) {
                            // Applied, and the answer may be lost: over either way.
                            0 | 1 => {
                                applied.push(token);
                                chain.on_finished(token, true);
                                ended += 1;
                            }
                            2 => {
                                chain.on_refused(token);
                                waiting.push(token);
                            }
                            _ => {
                                chain.on_finished(token, false);
                                ended += 1;
                            }
                        }
                    }
                }
                while let Some((token, turn)) = chain.next_release() {
                    match turn {
                        Turn::Send => wires[ways[token as usize]].push_back(token),
                        Turn::GiveUp => {
                            chain.on_finished(token, false);
                            ended += 1;
                        }
                        Turn::Hold => panic!("seed {seed}: a release that holds"),
                    }
                }
            }
            assert!(applied.is_sorted(), "seed {seed}: {applied:?}");
            assert!(chain.is_empty(), "seed {seed}");
            assert!(wires.iter().all(VecDeque::is_empty), "seed {seed}");
        }
    }
}
