//! The log contract, plainly: what a log holds after a sequence of operations.

use std::collections::VecDeque;
use std::rc::Rc;

use crate::machine::LogSeed;

/// One operation on a log. A batch is as many operations as it has records: a power cut may keep a part.
#[derive(Debug, Clone)]
pub enum Op {
    /// A record at the tail.
    Record(Rc<[u8]>),
    /// The log is cut back to this tail.
    Truncate(u64),
    /// It begins anew, empty, at this offset.
    Place(u64),
    /// Everything below this offset is given up.
    Base(u64),
    /// A generation is accepted.
    Accept(u64),
    /// Records from the tail on are of this generation and leader.
    Begin(u64, &'static str),
}

impl Op {
    /// Whether this is that very operation; only records are told apart.
    fn is_same(&self, other: &Self) -> bool {
        matches!((self, other), (Self::Record(a), Self::Record(b)) if Rc::ptr_eq(a, b))
    }
}

/// A log in memory.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PlainLog {
    /// First offset held.
    pub base: u64,
    /// From `base` on.
    pub records: VecDeque<Rc<[u8]>>,
    /// Highest generation accepted.
    pub accepted: u64,
    /// Generation, start and leader of every leadership that still has a say.
    pub history: Vec<(u64, u64, &'static str)>,
}

impl PlainLog {
    /// One past the last record.
    pub fn tail(&self) -> u64 {
        self.base + self.records.len() as u64
    }

    /// Does it.
    pub fn apply(&mut self, op: &Op) {
        match op {
            Op::Record(payload) => self.records.push_back(Rc::clone(payload)),
            Op::Truncate(to) => {
                self.records.truncate((to - self.base) as usize);
                self.history.retain(|(_, start, _)| start < to);
            }
            Op::Place(at) => {
                self.records.clear();
                self.history.clear();
                self.base = *at;
            }
            Op::Base(to) => {
                self.records.drain(..(to - self.base) as usize);
                self.base = *to;
                while self.history.len() > 1 && self.history[1].1 <= *to {
                    self.history.remove(0);
                }
            }
            Op::Accept(generation) => self.accepted = self.accepted.max(*generation),
            Op::Begin(generation, leader) => {
                let tail = self.tail();
                self.accepted = self.accepted.max(*generation);
                self.history.retain(|(_, start, _)| *start < tail);
                if self
                    .history
                    .last()
                    .is_none_or(|(last, _, _)| last < generation)
                {
                    self.history.push((*generation, tail, leader));
                }
            }
        }
    }

    /// The record at an offset, if it is held.
    pub fn record(&self, offset: u64) -> Option<&[u8]> {
        let at = offset.checked_sub(self.base)?;
        self.records.get(at as usize).map(|record| &record[..])
    }

    /// Whether a recovered log is this one.
    pub fn is(&self, seed: &LogSeed, records: &[Vec<u8>]) -> bool {
        let found = seed.control.history.iter();
        let history = self.history.iter();
        (seed.base, seed.tail, seed.control.accepted) == (self.base, self.tail(), self.accepted)
            && found.len() == history.len()
            && found
                .zip(history)
                .all(|(a, b)| (a.generation, a.start, &*a.leader) == *b)
            && records.len() == self.records.len()
            && records
                .iter()
                .zip(&self.records)
                .all(|(a, b)| a[..] == b[..])
    }
}

/// What is known of one log: what was acknowledged, and what was asked for beyond that.
#[derive(Debug, Clone, Default)]
pub struct Tracked {
    /// The log as acknowledged.
    pub acked: PlainLog,
    /// What was asked for since, oldest first.
    pub pending: VecDeque<Op>,
    /// `acked` with all of `pending` applied.
    pub submitted: PlainLog,
    /// What came after `acked` when it was answered with a failure, once for each time that happened. One of
    /// them may be there after a power cut as long as no later group is durable.
    pub refused: Vec<Vec<Op>>,
    /// Oldest pending operations nobody waits for: the stored first part of a batch that failed.
    pub unclaimed: usize,
}

impl Tracked {
    /// Something was asked for.
    pub fn submit(&mut self, op: Op) {
        self.submitted.apply(&op);
        self.pending.push_back(op);
    }

    /// The oldest `ops` of what was asked for are done.
    pub fn acknowledge(&mut self, ops: usize) {
        for _ in 0..ops + std::mem::take(&mut self.unclaimed) {
            let op = self.pending.pop_front().expect("was submitted");
            self.acked.apply(&op);
            // What was refused together with it comes after it; what was refused before it cannot be there.
            self.refused.retain_mut(|refused| {
                let is_next = refused.first().is_some_and(|first| first.is_same(&op));
                if is_next {
                    refused.remove(0);
                }
                is_next
            });
        }
    }

    /// Failures will be answered, all for one reason.
    pub fn begin_refusal(&mut self) {
        self.refused.push(Vec::new());
    }

    /// The next `ops` pending operations were answered with a failure; the first `stored` of them stay. What is
    /// still pending may build on them and be refused in turn: `end_refusal` once all of it is answered.
    pub fn refuse(&mut self, ops: usize, stored: usize) {
        let kept = self.unclaimed + stored;
        let end = self.unclaimed + ops;
        if self.refused.is_empty() {
            // It began before an earlier group was acknowledged.
            self.begin_refusal();
        }
        let refused = self.refused.last_mut().expect("it has begun");
        if refused.is_empty() {
            refused.extend(self.pending.range(..self.unclaimed).cloned());
        }
        refused.extend(self.pending.range(self.unclaimed..end).cloned());
        self.pending.drain(kept..end);
        self.unclaimed = kept;
    }

    /// All that was refused for one reason is answered: what is left follows on what was acknowledged.
    pub fn end_refusal(&mut self) {
        self.submitted = self.acked.clone();
        for op in &self.pending {
            self.submitted.apply(op);
        }
    }

    /// Whether nobody waits for anything.
    pub fn is_answered(&self) -> bool {
        self.pending.len() == self.unclaimed
    }

    /// Whether a recovered log is what was acknowledged and any first part of what was asked for.
    pub fn allows(&self, seed: &LogSeed, records: &[Vec<u8>]) -> bool {
        self.any_state(|state| state.is(seed, records))
    }

    /// Which invariant a recovered log breaks that is not allowed; `cuts`: bytes were removed for it.
    pub fn broken_by(&self, seed: &LogSeed, records: &[Vec<u8>], cuts: bool) -> u8 {
        let held = |state: &PlainLog| {
            (state.base, state.tail()) == (seed.base, seed.tail)
                && records
                    .iter()
                    .zip(&state.records)
                    .all(|(a, b)| a[..] == b[..])
        };
        if seed.base + records.len() as u64 != seed.tail {
            1
        } else if seed.control.accepted < self.acked.accepted {
            8
        } else if self.any_state(held) {
            // The records are right, so it is the leaders.
            12
        } else if cuts && !self.any_state(|state| state.tail() <= seed.tail) {
            6
        } else {
            4
        }
    }

    /// Whether this is so of what was acknowledged, or of it and a first part of what was asked for.
    fn any_state(&self, is_so: impl Fn(&PlainLog) -> bool) -> bool {
        let is_so_after = |mut ops: &mut dyn Iterator<Item = &Op>| {
            let mut state = self.acked.clone();
            Iterator::any(&mut ops, |op| {
                state.apply(op);
                is_so(&state)
            })
        };
        is_so(&self.acked)
            || is_so_after(&mut self.pending.iter())
            || (self.refused.iter()).any(|ops| is_so_after(&mut ops.iter()))
    }
}
