//! The connections and streams of the load generator, and what is outstanding on each.

use std::collections::BTreeMap;
use std::time::Duration;

use felix_uring::driver::quic::{ConnId, EndpointId, StreamId};

use super::speak::Speaker;

/// First wait before dialling again.
const BACKOFF_MIN: Duration = Duration::from_millis(20);
/// Longest wait before dialling again.
const BACKOFF_MAX: Duration = Duration::from_millis(500);

/// One operation: a batch and its later attempts.
#[derive(Debug, Clone, Copy)]
pub(super) struct Op {
    /// Its latency counts from here.
    pub due_ns: u64,
    /// Attempts made.
    pub attempts: u32,
}

/// A batch that is not answered.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pending {
    pub op: Op,
    pub shard: u32,
    pub first_sequence: u64,
    pub sent_ns: u64,
}

/// One publish stream: one writer.
pub(super) struct Lane {
    pub stream: StreamId,
    pub speaker: Speaker,
    pub is_ready: bool,
    pub writer: u32,
    pub next_request: u64,
    /// By position in the target's list of shards.
    pub next_sequence: Vec<u64>,
    pub next_shard: usize,
    pub pending: BTreeMap<u64, Pending>,
}

/// How a connection stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// To be dialled at this moment of the run.
    Down { dial_at_ns: u64 },
    /// Dialled; some stream is not ready.
    Starting,
    /// In use.
    Ready,
}

/// One connection, through its reconnects.
pub(super) struct Conn {
    pub target: usize,
    pub endpoint: EndpointId,
    pub id: Option<ConnId>,
    pub phase: Phase,
    /// Raised at each end, so that what belonged to the former connection is known as such.
    pub life: u32,
    pub lanes: Vec<Lane>,
    pub next_lane: usize,
    /// Why it ended last.
    pub last_end: Option<String>,
    backoff: Duration,
}

/// Room for one more batch on a connection.
#[derive(Debug, Clone, Copy)]
pub(super) struct Slot {
    pub conn: usize,
    pub life: u32,
}

impl Conn {
    pub fn new(target: usize, endpoint: EndpointId) -> Self {
        Self {
            target,
            endpoint,
            id: None,
            phase: Phase::Down { dial_at_ns: 0 },
            life: 0,
            lanes: Vec::new(),
            next_lane: 0,
            last_end: None,
            backoff: BACKOFF_MIN,
        }
    }

    pub fn on_ready(&mut self) {
        self.phase = Phase::Ready;
        self.backoff = BACKOFF_MIN;
    }

    /// Forgets the connection; gives back what was outstanding.
    pub fn on_end(&mut self, now_ns: u64, why: String) -> Vec<(u32, Pending)> {
        self.id = None;
        self.life += 1;
        self.last_end = Some(why);
        self.phase = Phase::Down {
            dial_at_ns: now_ns + self.backoff.as_nanos() as u64,
        };
        self.backoff = (self.backoff * 2).min(BACKOFF_MAX);
        self.next_lane = 0;
        self.lanes
            .drain(..)
            .flat_map(|lane| {
                let writer = lane.writer;
                lane.pending.into_values().map(move |p| (writer, p))
            })
            .collect()
    }

    pub fn lane_of(&self, stream: StreamId) -> Option<usize> {
        self.lanes.iter().position(|lane| lane.stream == stream)
    }

    pub fn outstanding(&self) -> usize {
        self.lanes.iter().map(|lane| lane.pending.len()).sum()
    }
}
