//! What a load run is told, and what it hands back.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::speak::Protocol;
use crate::cpu::CpuShare;
use crate::meter::Meter;
use crate::schedule::{Pace, ScheduleReport};
use crate::verify::Ledger;

/// A broker to publish to.
#[derive(Debug, Clone)]
pub struct Target {
    /// Its client address.
    pub addr: SocketAddr,
    /// The shards published through it.
    pub shards: Vec<u32>,
}

/// One load run.
#[derive(Debug, Clone)]
pub struct LoadSpec {
    /// Marks the records of the run.
    pub run: u64,
    /// Broker or relay.
    pub protocol: Protocol,
    /// Connection `i` goes to target `i` modulo their number.
    pub targets: Vec<Target>,
    /// The name in the servers' certificates.
    pub server_name: String,
    /// Trust.
    pub tls: Arc<rustls::ClientConfig>,
    /// Connections in all.
    pub connections: usize,
    /// Publish streams of each connection.
    pub streams: usize,
    /// Batches each connection has unanswered at most.
    pub in_flight: usize,
    /// Records of a batch.
    pub batch: u32,
    /// Bytes of a record.
    pub payload_bytes: usize,
    /// Shards of the stream.
    pub shard_count: u32,
    /// By shard, a key that leads to it; none when the stream has one shard.
    pub keys: Vec<Option<Bytes>>,
    /// Closed or open loop.
    pub pace: Pace,
    /// Not measured, at the start.
    pub warmup: Duration,
    /// Measured.
    pub duration: Duration,
    /// A batch unanswered for this long is of unknown outcome.
    pub request_timeout: Duration,
    /// UDP sockets the connections share.
    pub sockets: usize,
    /// The CPU of the core; `None` leaves it to the scheduler.
    pub cpu: Option<usize>,
    /// How it shares that CPU.
    pub share: CpuShare,
    /// Number of the first writer; later parts of a run go on from the earlier ones' last.
    pub first_writer: u32,
}

impl LoadSpec {
    /// Payload bytes of a batch.
    pub fn batch_bytes(&self) -> u64 {
        self.payload_bytes as u64 * u64::from(self.batch)
    }
}

/// What became of the batches, warm-up included.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tally {
    /// Batches answered as written.
    pub acked: u64,
    /// Answers that promise nothing was written.
    pub refusals: u64,
    /// Attempts made after such an answer, each with fresh records.
    pub retried: u64,
    /// Batches given up: refused for good, or too often.
    pub failed: u64,
    /// Batches whose outcome nobody told: connection lost, no answer in time, or told so.
    pub unknown: u64,
    /// Answers that came after the batch was given up.
    pub late_answers: u64,
    /// Connections that ended during the run.
    pub connections_lost: u64,
    /// How often each refusal and each end of a connection was met.
    pub reasons: BTreeMap<String, u64>,
}

/// Different reasons kept apart.
const MAX_REASONS: usize = 32;

impl Tally {
    pub(super) fn note(&mut self, reason: &str) {
        if let Some(count) = self.reasons.get_mut(reason) {
            *count += 1;
        } else if self.reasons.len() < MAX_REASONS {
            self.reasons.insert(reason.to_string(), 1);
        }
    }

    /// Adds those of another part of the run.
    pub fn absorb(&mut self, other: &Tally) {
        self.acked += other.acked;
        self.refusals += other.refusals;
        self.retried += other.retried;
        self.failed += other.failed;
        self.unknown += other.unknown;
        self.late_answers += other.late_answers;
        self.connections_lost += other.connections_lost;
        for (reason, count) in &other.reasons {
            *self.reasons.entry(reason.clone()).or_default() += count;
        }
    }
}

/// What a load run came to.
#[derive(Debug)]
pub struct LoadReport {
    /// Latencies and rates.
    pub meter: Meter,
    /// The schedule of an open loop.
    pub schedule: ScheduleReport,
    /// What the run was told about each record.
    pub ledger: Ledger,
    /// Outcomes.
    pub tally: Tally,
    /// Records sent to each shard.
    pub per_shard: Vec<u64>,
    /// CPU seconds of the generator in the measured time.
    pub cpu_s: f64,
    /// Behind the last writer.
    pub next_writer: u32,
}

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Nothing to be done about it in this tool.
    #[error("{0}")]
    Setup(String),
    /// Nobody answered.
    #[error("{addr} cannot be reached: {reason}")]
    Unreachable {
        /// Who.
        addr: SocketAddr,
        /// What came instead.
        reason: String,
    },
    /// The broker says no.
    #[error("the broker refused: {0}")]
    Refused(String),
    /// The run was asked to end early.
    #[error("stopped")]
    Stopped,
}

/// What can be seen of a run while it runs.
#[derive(Debug, Default)]
pub struct Progress {
    started: OnceLock<Instant>,
    records: AtomicU64,
    unknown: AtomicU64,
    failed: AtomicU64,
    is_ending: AtomicBool,
}

impl Progress {
    /// When the first batch went out; every connection was up then.
    pub fn started(&self) -> Option<Instant> {
        self.started.get().copied()
    }

    /// Records answered as written.
    pub fn records(&self) -> u64 {
        self.records.load(Ordering::Relaxed)
    }

    /// Batches of unknown outcome.
    pub fn unknown(&self) -> u64 {
        self.unknown.load(Ordering::Relaxed)
    }

    /// Batches given up.
    pub fn failed(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }

    /// Has the run end now as it would at the end of its time: nothing more is sent, what is on its way is
    /// waited for, and there is a report.
    pub fn end_soon(&self) {
        self.is_ending.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Relaxed)
    }

    pub(super) fn start(&self, at: Instant) {
        // Set once a run; a second run has its own.
        let _ = self.started.set(at);
    }

    pub(super) fn publish(&self, records: u64, tally: &Tally) {
        self.records.store(records, Ordering::Relaxed);
        self.unknown.store(tally.unknown, Ordering::Relaxed);
        self.failed.store(tally.failed, Ordering::Relaxed);
    }
}
