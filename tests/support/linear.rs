//! Is a recorded history of one key linearizable?
//!
//! The search of Wing and Gong with the memory of Lowe: take any operation that nothing unfinished
//! must precede, see whether its answer fits the state, go on; never look at the same set of
//! operations in the same state twice. An operation whose outcome nobody told may have taken effect
//! at any time after it was sent, or never. Own code because it is small, checks itself below, and
//! a crate of this kind would have to be taught the same sequential rules.
//!
//! What is acknowledged by a leader alone may be lost with it, but only so: the next leader goes on
//! from what the lost one's log said at some earlier moment. [`Call::Lose`] is such a change of
//! leaders, as an operation of its own: it takes the key back to a state it had before, and no
//! further than the last [`Call::Keep`], when every copy was level. So an add that was counted twice,
//! one that is missing while a later one is there, and one that was on every copy, are found as
//! they are without it.

use std::collections::HashSet;

/// What is asked of one key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    Get,
    Put(u64),
    Delete,
    Add(i64),
    Sum,
    /// Every copy holds what was done so far.
    Keep,
    /// Another leader, that may lack the end of what was done since the last `Keep`.
    Lose,
}

/// What was answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen {
    /// A value, what a delete removed, or nothing.
    Value(Option<u64>),
    Stored,
    Sum(Option<i64>),
    /// A mark of the test itself: `Keep` and `Lose`.
    Done,
    /// Nobody told.
    Unknown,
}

/// One operation, with the times it was sent and answered.
#[derive(Debug, Clone, Copy)]
pub struct Operation {
    pub call: Call,
    pub seen: Seen,
    pub sent_ns: u64,
    /// The end of time when nobody told.
    pub answered_ns: u64,
}

/// One key: a value, or a sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
struct Held {
    value: Option<u64>,
    sum: Option<i64>,
}

impl Held {
    /// What is held after the operation; `None` when the answer does not fit.
    fn after(self, operation: &Operation) -> Option<Self> {
        let fits = |seen: Seen| operation.seen == Seen::Unknown || operation.seen == seen;
        match operation.call {
            Call::Get => fits(Seen::Value(self.value)).then_some(self),
            Call::Sum => fits(Seen::Sum(self.sum)).then_some(self),
            Call::Put(value) => fits(Seen::Stored).then_some(Self {
                value: Some(value),
                ..self
            }),
            Call::Delete => fits(Seen::Value(self.value)).then_some(Self {
                value: None,
                ..self
            }),
            Call::Add(delta) => {
                let sum = Some(self.sum.unwrap_or(0) + delta);
                fits(Seen::Sum(sum)).then_some(Self { sum, ..self })
            }
            Call::Keep | Call::Lose => Some(self),
        }
    }
}

/// What a key holds, and what it held since the last `Keep`, oldest first.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
struct State {
    now: Held,
    earlier: Vec<Held>,
}

impl State {
    /// The states the operation may lead to; none when its answer does not fit. With `may_lose` earlier
    /// states are remembered, for a `Lose` that is still to come.
    fn after(&self, operation: &Operation, may_lose: bool) -> Vec<Self> {
        if operation.call == Call::Lose {
            let back = (0..self.earlier.len()).map(|at| Self {
                now: self.earlier[at],
                earlier: self.earlier[..at].to_vec(),
            });
            return back.chain([self.clone()]).collect();
        }
        let Some(now) = self.now.after(operation) else {
            return Vec::new();
        };
        let mut earlier = match may_lose && operation.call != Call::Keep {
            true => self.earlier.clone(),
            false => Vec::new(),
        };
        if now != self.now && may_lose {
            earlier.push(self.now);
        }
        vec![Self { now, earlier }]
    }
}

/// Whether some order of the operations, each at one moment between its sending and its answer,
/// gives every answer. `None` when the search was given up after `most` steps.
pub fn is_linearizable(history: &[Operation], most: usize) -> Option<bool> {
    let mut operations = history.to_vec();
    // A read nobody was told of changes nothing and proves nothing.
    operations.retain(|operation| {
        let is_read = matches!(operation.call, Call::Get | Call::Sum);
        !(is_read && operation.seen == Seen::Unknown)
    });
    operations.sort_by_key(|operation| operation.sent_ns);
    let is_lose = |at: &usize| operations[*at].call == Call::Lose;
    let losses: Vec<usize> = (0..operations.len()).filter(is_lose).collect();
    let words = operations.len().div_ceil(64);
    let mut visited = HashSet::new();
    let mut stack = vec![(vec![0u64; words], State::default())];
    let mut steps = 0;
    while let Some((done, state)) = stack.pop() {
        steps += 1;
        if steps > most {
            return None;
        }
        let is_done = |at: usize| done[at / 64] >> (at % 64) & 1 == 1;
        let may_lose = losses.iter().any(|at| !is_done(*at));
        let left = (0..operations.len()).filter(|at| !is_done(*at));
        let told = left
            .clone()
            .filter(|at| operations[*at].seen != Seen::Unknown);
        let Some(first_answer) = told.map(|at| operations[at].answered_ns).min() else {
            return Some(true);
        };
        for at in left {
            let operation = &operations[at];
            if operation.sent_ns > first_answer {
                break;
            }
            for state in state.after(operation, may_lose) {
                let mut done = done.clone();
                done[at / 64] |= 1 << (at % 64);
                if visited.insert((done.clone(), state.clone())) {
                    stack.push((done, state));
                }
            }
        }
    }
    Some(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn op(call: Call, seen: Seen, sent_ns: u64, answered_ns: u64) -> Operation {
        Operation {
            call,
            seen,
            sent_ns,
            answered_ns,
        }
    }

    const NONE: Seen = Seen::Value(None);
    const ONE: Seen = Seen::Value(Some(1));
    const NEVER: u64 = u64::MAX;

    #[test]
    fn what_may_be_is_told_from_what_may_not() {
        let put = |value, sent, answered| op(Call::Put(value), Seen::Stored, sent, answered);
        for (what, history, expected) in [
            (
                "in order",
                vec![put(1, 0, 1), op(Call::Get, ONE, 2, 3)],
                true,
            ),
            (
                "a lost put",
                vec![put(1, 0, 1), op(Call::Get, NONE, 2, 3)],
                false,
            ),
            (
                "overlapping",
                vec![put(1, 0, 5), op(Call::Get, NONE, 2, 3)],
                true,
            ),
            (
                "back in time",
                vec![
                    put(1, 0, 9),
                    op(Call::Get, ONE, 1, 2),
                    op(Call::Get, NONE, 3, 4),
                ],
                false,
            ),
            (
                "a delete that two saw",
                vec![
                    put(1, 0, 1),
                    op(Call::Delete, ONE, 2, 3),
                    op(Call::Delete, ONE, 4, 5),
                ],
                false,
            ),
            (
                "an unknown put that took effect late",
                vec![
                    op(Call::Put(1), Seen::Unknown, 0, NEVER),
                    op(Call::Get, NONE, 2, 3),
                    op(Call::Get, ONE, 4, 5),
                ],
                true,
            ),
            (
                "an unknown put that came and went",
                vec![
                    op(Call::Put(1), Seen::Unknown, 0, NEVER),
                    op(Call::Get, ONE, 2, 3),
                    op(Call::Get, NONE, 4, 5),
                ],
                false,
            ),
            (
                "an add counted twice",
                vec![
                    op(Call::Add(2), Seen::Sum(Some(2)), 0, 1),
                    op(Call::Sum, Seen::Sum(Some(4)), 2, 3),
                ],
                false,
            ),
            (
                "an unknown add, counted once",
                vec![
                    op(Call::Add(2), Seen::Unknown, 0, NEVER),
                    op(Call::Add(3), Seen::Sum(Some(5)), 2, 3),
                    op(Call::Sum, Seen::Sum(Some(5)), 4, 5),
                ],
                true,
            ),
        ] {
            assert_eq!(is_linearizable(&history, 10_000), Some(expected), "{what}");
        }
    }

    #[test]
    fn a_lost_leader_takes_the_end_of_its_log_with_it_and_nothing_else() {
        let add = |delta, sum, sent| op(Call::Add(delta), Seen::Sum(Some(sum)), sent, sent + 1);
        let sum = |sum, sent| op(Call::Sum, Seen::Sum(Some(sum)), sent, sent + 1);
        let keep = |sent| op(Call::Keep, Seen::Done, sent, sent + 1);
        let lose = |sent| op(Call::Lose, Seen::Done, sent, sent + 5);
        let before = [add(1, 1, 0), add(2, 3, 2), add(4, 7, 4)];
        for (what, after, expected) in [
            ("nothing is lost", vec![lose(6), sum(7, 20)], true),
            ("the last is lost", vec![lose(6), sum(3, 20)], true),
            ("all but the first", vec![lose(6), sum(1, 20)], true),
            ("one of the middle", vec![lose(6), sum(5, 20)], false),
            ("one is doubled", vec![lose(6), sum(11, 20)], false),
            (
                "what every copy had",
                vec![keep(6), lose(8), sum(3, 20)],
                false,
            ),
            (
                "what came since",
                vec![keep(6), add(8, 15, 8), lose(10), sum(7, 20)],
                true,
            ),
            (
                "what was lost comes back",
                vec![lose(6), sum(3, 20), lose(30), sum(7, 40)],
                false,
            ),
            (
                "and more with the next",
                vec![lose(6), sum(3, 20), lose(30), sum(1, 40)],
                true,
            ),
            (
                "an add of unknown outcome that came after all",
                vec![
                    op(Call::Add(8), Seen::Unknown, 5, NEVER),
                    lose(6),
                    sum(3, 20),
                    sum(11, 22),
                ],
                true,
            ),
            (
                "the same, twice",
                vec![
                    op(Call::Add(8), Seen::Unknown, 5, NEVER),
                    lose(6),
                    sum(3, 20),
                    sum(19, 22),
                ],
                false,
            ),
            ("lost without a change of leaders", vec![sum(3, 20)], false),
        ] {
            let history: Vec<_> = before.into_iter().chain(after).collect();
            assert_eq!(is_linearizable(&history, 100_000), Some(expected), "{what}");
        }
    }
}
