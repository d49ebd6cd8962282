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

use std::collections::{BTreeSet, VecDeque};

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
    /// Its place in the order of the stream; entries ascend.
    sequence: u64,
    /// Where it goes, or went last.
    way: u64,
    state: State,
}

/// Unfinished requests of one client stream and shard, oldest first.
///
/// Nothing here grows faster than the logarithm of their number for requests that are answered, refused or
/// retried in their order; out of order, finding one may pass over all of them.
#[derive(Debug, Default)]
pub struct OrderChain {
    entries: VecDeque<Entry>,
    next_sequence: u64,
    /// Sequences of entries that are not `Sent`.
    unsent: BTreeSet<u64>,
    /// The first so many entries have been overtaken: a later request of the chain may have been applied.
    overtaken: usize,
    /// `Held` entries among the overtaken ones.
    overtaken_held: usize,
    /// Where an entry was found last: the next one looked for mostly is its neighbour.
    last_found: usize,
}

impl OrderChain {
    /// Whether nothing is unfinished.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether a request waits to be sent, for the first time or again.
    pub fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Whether another request of the chain is on its way, so that `token` has to follow it.
    pub fn follows_another(&mut self, token: u64) -> bool {
        let own = self.position(token);
        let is_sent = own.is_some_and(|at| self.entries[at].state == State::Sent);
        self.sent() > usize::from(is_sent)
    }

    /// A new request at the end of the chain: [`Turn::Send`] or [`Turn::Hold`]. `way` names the broker it
    /// would go to.
    pub fn begin(&mut self, token: u64, way: u64) -> Turn {
        // All that are on their way go the same one.
        let goes_along = self.entries.back().is_none_or(|last| last.way == way);
        let (state, turn) = match self.unsent.is_empty() && goes_along {
            true => (State::Sent, Turn::Send),
            false => (State::Held, Turn::Hold),
        };
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        if state != State::Sent {
            self.unsent.insert(sequence);
        }
        self.entries.push_back(Entry {
            token,
            sequence,
            way,
            state,
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
        if may_be_applied && at > self.overtaken {
            let newly = self.entries.range(self.overtaken..at);
            self.overtaken_held += newly.filter(|e| e.state == State::Held).count();
            self.overtaken = at;
        }
        let Some(removed) = self.entries.remove(at) else {
            return;
        };
        self.unsent.remove(&removed.sequence);
        if at < self.overtaken {
            self.overtaken -= 1;
            self.overtaken_held -= usize::from(removed.state == State::Held);
        }
        if self.entries.is_empty() {
            self.last_found = 0;
        }
    }

    /// The first held request that need not wait any longer, with [`Turn::Send`] (it counts as sent then)
    /// or [`Turn::GiveUp`]. Call until `None` after every change.
    pub fn next_release(&mut self) -> Option<(u64, Turn)> {
        if self.overtaken_held > 0 {
            let mut overtaken = self.entries.range(..self.overtaken);
            let held = overtaken.find(|entry| entry.state == State::Held)?;
            return Some((held.token, Turn::GiveUp));
        }
        // Only the first that is not sent may be: the others wait for it.
        let at = self.index_of(*self.unsent.first()?)?;
        let may_go = self.entries[at].state == State::Held && self.turn_of(at) == Turn::Send;
        may_go.then(|| {
            self.set(at, State::Sent);
            (self.entries[at].token, Turn::Send)
        })
    }

    /// What may become of an entry that is not sent.
    fn turn_of(&self, at: usize) -> Turn {
        if at < self.overtaken {
            return Turn::GiveUp;
        }
        let entry = &self.entries[at];
        let is_first_unsent = self.unsent.first() == Some(&entry.sequence);
        // All earlier ones are sent then, one way, and whatever else is sent comes later.
        let later_sent = self.sent() > at;
        let goes_along = at == 0 || self.entries[0].way == entry.way;
        match is_first_unsent && goes_along && !later_sent {
            true => Turn::Send,
            false => Turn::Hold,
        }
    }

    /// Requests on their way.
    fn sent(&self) -> usize {
        self.entries.len() - self.unsent.len()
    }

    fn set(&mut self, at: usize, state: State) {
        let entry = &mut self.entries[at];
        let before = std::mem::replace(&mut entry.state, state);
        match state {
            State::Sent => self.unsent.remove(&entry.sequence),
            State::Waiting | State::Held => self.unsent.insert(entry.sequence),
        };
        if at < self.overtaken {
            self.overtaken_held += usize::from(state == State::Held);
            self.overtaken_held -= usize::from(before == State::Held);
        }
    }

    fn index_of(&self, sequence: u64) -> Option<usize> {
        let found = self.entries.binary_search_by_key(&sequence, |e| e.sequence);
        found.ok()
    }

    fn position(&mut self, token: u64) -> Option<usize> {
        let is_at = |at: &usize| self.entries.get(*at).is_some_and(|e| e.token == token);
        let likely = [
            0,
            self.last_found,
            self.last_found + 1,
            self.entries.len().wrapping_sub(1),
        ];
        let found = likely.into_iter().find(is_at);
        let at = found.or_else(|| self.entries.iter().position(|entry| entry.token == token))?;
        self.last_found = at;
        Some(at)
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

    /// The rules as they are told, without any index.
    #[derive(Default)]
    struct Plain {
        entries: Vec<(u64, u64, State, bool)>,
    }

    impl Plain {
        fn turn_of(&self, at: usize) -> Turn {
            let (_, way, _, is_overtaken) = self.entries[at];
            let (earlier, later) = (&self.entries[..at], &self.entries[at + 1..]);
            let waits = earlier.iter().any(|e| e.2 != State::Sent || e.1 != way)
                || later.iter().any(|e| e.2 == State::Sent);
            match (is_overtaken, waits) {
                (true, _) => Turn::GiveUp,
                (false, true) => Turn::Hold,
                (false, false) => Turn::Send,
            }
        }

        fn begin(&mut self, token: u64, way: u64) -> Turn {
            let may_go = self.entries.iter().all(|e| e.2 == State::Sent)
                && self.entries.last().is_none_or(|e| e.1 == way);
            let (state, turn) = match may_go {
                true => (State::Sent, Turn::Send),
                false => (State::Held, Turn::Hold),
            };
            self.entries.push((token, way, state, false));
            turn
        }

        fn on_retry(&mut self, at: usize, way: u64) -> Turn {
            self.entries[at].1 = way;
            let turn = self.turn_of(at);
            self.entries[at].2 = match turn {
                Turn::Send => State::Sent,
                Turn::Hold | Turn::GiveUp => State::Held,
            };
            turn
        }

        fn on_finished(&mut self, at: usize, may_be_applied: bool) {
            for earlier in &mut self.entries[..at] {
                earlier.3 |= may_be_applied;
            }
            self.entries.remove(at);
        }

        /// Everything that could be released now.
        fn releasable(&self) -> Vec<(u64, Turn)> {
            let held = (0..self.entries.len()).filter(|at| self.entries[*at].2 == State::Held);
            held.map(|at| (self.entries[at].0, self.turn_of(at)))
                .filter(|(_, turn)| *turn != Turn::Hold)
                .collect()
        }
    }

    /// Any sequence of calls gives what the plain rules give.
    #[test]
    fn the_indexes_agree_with_the_plain_rules() {
        for seed in 0..3_000u64 {
            let mut state = seed;
            let mut below = |n: usize| (split_mix(&mut state) % n as u64) as usize;
            let (mut chain, mut plain) = (OrderChain::default(), Plain::default());
            for token in 0..60u64 {
                let way = u64::from(below(6) == 0);
                assert_eq!(
                    chain.begin(token, way),
                    plain.begin(token, way),
                    "seed {seed}"
                );
                for _ in 0..below(4) {
                    if plain.entries.is_empty() {
                        break;
                    }
                    let at = below(plain.entries.len());
                    let (of, _, now, _) = plain.entries[at];
                    match (now, below(3)) {
                        (State::Sent, 0) => {
                            chain.on_refused(of);
                            plain.entries[at].2 = State::Waiting;
                        }
                        (State::Waiting, 0 | 1) => {
                            assert_eq!(chain.on_retry(of, way), plain.on_retry(at, way));
                        }
                        (_, choice) => {
                            let may_be_applied = now == State::Sent && choice == 1;
                            chain.on_finished(of, may_be_applied);
                            plain.on_finished(at, may_be_applied);
                        }
                    }
                    loop {
                        let may = plain.releasable();
                        let Some((token, turn)) = chain.next_release() else {
                            assert_eq!(may, [], "seed {seed}: kept back");
                            break;
                        };
                        assert!(
                            may.contains(&(token, turn)),
                            "seed {seed}: {token} {turn:?}"
                        );
                        let at = plain.entries.iter().position(|e| e.0 == token);
                        let at = at.expect("it is there");
                        match turn {
                            Turn::Send => plain.entries[at].2 = State::Sent,
                            Turn::GiveUp | Turn::Hold => {
                                chain.on_finished(token, false);
                                plain.on_finished(at, false);
                            }
                        }
                    }
                    let others = plain.entries.iter().filter(|e| e.0 != token);
                    let follows = others.filter(|e| e.2 == State::Sent).count() > 0;
                    assert_eq!(chain.follows_another(token), follows, "seed {seed}");
                    let unsent = plain.entries.iter().any(|e| e.2 != State::Sent);
                    assert_eq!(chain.has_unsent(), unsent, "seed {seed}");
                }
            }
        }
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
