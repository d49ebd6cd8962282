//! Is a recorded history of one key linearizable?
//!
//! The search of Wing and Gong with the memory of Lowe: take any operation that nothing unfinished
//! must precede, see whether its answer fits the state, go on; never look at the same set of
//! operations in the same state twice. An operation whose outcome nobody told may have taken effect
//! at any time after it was sent, or never. Own code because it is small, checks itself below, and
//! a crate of this kind would have to be taught the same sequential rules.

use std::collections::HashSet;

/// What is asked of one key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    Get,
    Put(u64),
    Delete,
    Add(i64),
    Sum,
}

/// What was answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen {
    /// A value, what a delete removed, or nothing.
    Value(Option<u64>),
    Stored,
    Sum(Option<i64>),
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
struct State {
    value: Option<u64>,
    sum: Option<i64>,
}

impl State {
    /// The state after the operation; `None` when the answer does not fit.
    fn after(self, operation: &Operation) -> Option<State> {
        let fits = |seen: Seen| operation.seen == Seen::Unknown || operation.seen == seen;
        match operation.call {
            Call::Get => fits(Seen::Value(self.value)).then_some(self),
            Call::Sum => fits(Seen::Sum(self.sum)).then_some(self),
            Call::Put(value) => fits(Seen::Stored).then_some(State {
                value: Some(value),
                ..self
            }),
            Call::Delete => fits(Seen::Value(self.value)).then_some(State {
                value: None,
                ..self
            }),
            Call::Add(delta) => {
                let sum = Some(self.sum.unwrap_or(0) + delta);
                fits(Seen::Sum(sum)).then_some(State { sum, ..self })
            }
        }
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
            if let Some(state) = state.after(operation) {
                let mut done = done.clone();
                done[at / 64] |= 1 << (at % 64);
                if visited.insert((done.clone(), state)) {
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
}
