//! Things a core does at a time: a heap, checked once a turn.
//!
//! A timer is never cancelled; what it names is generation-checked, so a timer that fires for
//! work that is over finds nothing.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use super::group::GroupAt;
use crate::driver::quic::{ConnId, StreamId};
use crate::ids::NodeId;
use crate::proto::MonoTime;

/// What to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Timer {
    /// Ask the forward's machine what to do next.
    Forward { token: u64 },
    /// Look at a peer link's deadlines.
    Link { node: NodeId },
    /// Close a connection whose refusal had time to leave.
    ClosePeer { conn: ConnId, reason: &'static str },
    /// Look at a client connection's deadline.
    ClientConn { conn: ConnId },
    /// Look at a client stream's deadline.
    ClientStream { conn: ConnId, stream: StreamId },
    /// Look at a led shard's deadlines.
    Ship { at: super::ship::LedIdx },
    /// Look at the link of a lane that has something to send.
    ShipLane { node: NodeId },
    /// Look at a consumer group's deadlines.
    Group { at: GroupAt },
    /// Go on with the compaction of a log.
    Compaction,
}

struct Due {
    at: MonoTime,
    sequence: u64,
    timer: Timer,
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Due {}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Due {
    /// Reversed: the earliest is the greatest, which is what a heap gives first.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.sequence).cmp(&(self.at, self.sequence))
    }
}

/// The timers of one core.
#[derive(Default)]
pub(super) struct Timers {
    heap: BinaryHeap<Due>,
    sequence: u64,
}

impl Timers {
    /// Timers not due yet, those of work that is over included.
    pub fn len(&self) -> usize {
        self.heap.len()
    }

    pub fn push(&mut self, at: MonoTime, timer: Timer) {
        self.sequence += 1;
        self.heap.push(Due {
            at,
            sequence: self.sequence,
            timer,
        });
    }

    /// The next timer that is due.
    pub fn pop_due(&mut self, now: MonoTime) -> Option<Timer> {
        if self.heap.peek()?.at > now {
            return None;
        }
        self.heap.pop().map(|due| due.timer)
    }

    pub fn next(&self) -> Option<MonoTime> {
        self.heap.peek().map(|due| due.at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn due_timers_come_in_order_and_no_others() {
        let mut timers = Timers::default();
        for (at, token) in [(30, 3), (10, 1), (20, 2), (10, 11)] {
            timers.push(MonoTime::from_micros(at), Timer::Forward { token });
        }
        let mut fired = Vec::new();
        while let Some(timer) = timers.pop_due(MonoTime::from_micros(20)) {
            fired.push(timer);
        }
        let expected = [1, 11, 2].map(|token| Timer::Forward { token });
        assert_eq!(fired, expected);
        assert_eq!(timers.next(), Some(MonoTime::from_micros(30)));
    }
}
