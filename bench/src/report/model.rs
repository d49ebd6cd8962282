//! The report of a run, as it is written to a file.
//!
//! Fields are only ever added: scripts and `compare` read reports of earlier versions.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::meter::{LatencySummary, SeriesPoint, Spread};
use crate::verify::VerifyCounts;

/// The form of the report.
pub const SCHEMA: &str = "felix-bench/1";

/// A run of `forward`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RunReport {
    /// [`SCHEMA`].
    pub schema: String,
    /// What was asked for.
    pub workload: Workload,
    /// What came of it, all measured rounds together; rates are the median round's.
    pub result: RunResult,
    /// Each round, and the relay probe before and after it.
    pub rounds: Vec<Round>,
    /// What was found in the log.
    pub verify: VerifyCounts,
    /// How the copies compare, byte for byte; absent without copies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copies: Option<CopyCounts>,
    /// The brokers' own accounts of the measured time.
    pub brokers: Vec<BrokerAccount>,
    /// What the machine allows.
    pub limits: Limits,
    /// Where it was measured.
    pub host: Host,
    /// How the last round went over time.
    pub series: Vec<SeriesPoint>,
    /// Latency distribution: quantile and microseconds.
    pub latency_curve: Vec<(f64, f64)>,
}

/// The replicas' logs beside their leader's, after the run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct CopyCounts {
    /// Copies looked at; a shard of three replicas has two.
    pub copies: u64,
    /// Records compared.
    pub records: u64,
    /// Copies that begin or end elsewhere, or hold other bytes.
    pub unequal: u64,
    /// The first differences, in words.
    pub findings: Vec<String>,
}

impl CopyCounts {
    /// Whether every copy is the leader's log.
    pub fn is_equal(&self) -> bool {
        self.unequal == 0
    }
}

/// What a run was asked to do.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Workload {
    /// `forward` or `direct`.
    pub mode: String,
    /// Bytes of a record.
    pub payload_bytes: u64,
    /// Records of a batch.
    pub batch: u32,
    /// Client connections.
    pub connections: u64,
    /// Publish streams of each.
    pub streams: u64,
    /// Unanswered batches of each connection at most.
    pub in_flight: u64,
    /// Records a second of an open loop; null for a closed one.
    pub rate: Option<f64>,
    /// Broker processes; 0 when the cluster is not ours.
    pub brokers: u64,
    /// Data cores of each.
    pub cores_per_broker: u64,
    /// Copies of a record.
    pub replicas: u64,
    /// Shards of the stream.
    pub shards: u64,
    /// `fsync`.
    pub durability: String,
    /// `leader` or `quorum`.
    pub ack: String,
    /// Length of each measured round.
    pub duration_s: f64,
    /// Not measured, before each.
    pub warmup_s: f64,
    /// Measured rounds.
    pub rounds: u64,
    /// Flags handed to the brokers.
    pub broker_flags: Vec<String>,
}

/// What came of a run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RunResult {
    /// Records answered as written in the measured time, all rounds.
    pub records: u64,
    /// Their payload bytes.
    pub bytes: u64,
    /// Of the median round.
    pub records_per_s: f64,
    /// Of the median round, in 10^6 bytes.
    pub mb_per_s: f64,
    /// Over the rounds.
    pub records_per_s_spread: Spread,
    /// Records of batches given up, warm-up included.
    pub failed: u64,
    /// Records whose outcome nobody told, warm-up included.
    pub unknown: u64,
    /// Records that were refused and sent again as fresh ones.
    pub retried: u64,
    /// Records a second that fell due; null for a closed loop.
    pub offered_per_s: Option<f64>,
    /// Records due and never sent, because too many answers were outstanding.
    pub unsent: u64,
    /// Whether the tool itself kept the schedule.
    pub schedule_kept: bool,
    /// Batches the tool sent over a millisecond late although nothing held it back.
    pub self_late: u64,
    /// The longest such delay.
    pub self_late_max_us: f64,
    /// Latency of a batch: from the moment it was due.
    pub latency_us: LatencySummary,
    /// Records sent to each shard, warm-up included.
    pub per_shard: Vec<u64>,
    /// Connections that ended during the run.
    pub connections_lost: u64,
    /// How often each refusal and each end of a connection was met.
    pub reasons: BTreeMap<String, u64>,
    /// CPU seconds of the load generator in the measured time.
    pub client_cpu_s: f64,
}

/// One measured round.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Round {
    /// Records a second.
    pub records_per_s: f64,
    /// 10^6 payload bytes a second.
    pub mb_per_s: f64,
    /// Latency of a batch.
    pub latency_us: LatencySummary,
    /// The relay probe's payload rate before and after; empty without a probe.
    pub relay_mb_per_s: Vec<f64>,
    /// This round's rate by the mean of the two.
    pub ratio: Option<f64>,
}

/// One broker's own account of the measured time.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct BrokerAccount {
    /// Its name.
    pub node_id: String,
    /// `ingress`, `owner` or `both`.
    pub role: String,
    /// CPU seconds.
    pub cpu_s: f64,
    /// Largest resident size since its start.
    pub max_rss_bytes: u64,
    /// Group commits made durable.
    pub fsyncs: u64,
    /// Bytes written to the log, padding included.
    pub appended_bytes: u64,
    /// Records of a group commit.
    pub commit_group_records_mean: f64,
    /// CPU seconds on a million of the run's records.
    pub cpu_s_per_million_records: f64,
    /// CPU seconds on 10^9 payload bytes.
    pub cpu_s_per_gb: f64,
}

/// What the machine allows, measured in the same run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// Durable direct writes of the size the owner's groups had.
    pub disk_append_mb_per_s: Option<f64>,
    /// That size.
    pub disk_write_bytes: Option<u64>,
    /// CPU seconds of both ends of one bare QUIC hop on 10^9 bytes.
    pub quic_cpu_s_per_gb: Option<f64>,
    /// The smaller of the disk's rate and what the CPUs allow the QUIC ends on the path.
    pub bound_mb_per_s: Option<f64>,
    /// The run's rate by the relay probe's: the median over the rounds.
    pub ratio: Option<f64>,
    /// Over the rounds.
    pub ratio_spread: Option<Spread>,
    /// The run's rate by the bound.
    pub bound_ratio: Option<f64>,
    /// The relay probe: median payload rate and its spread.
    pub relay_mb_per_s: Option<Spread>,
    /// The relay probe: batches a second.
    pub relay_batches_per_s: Option<f64>,
    /// The relay probe: latency of a batch.
    pub relay_latency_us: Option<LatencySummary>,
    /// The relay probe: CPU seconds of ingress and owner on 10^9 payload bytes.
    pub relay_cpu_s_per_gb: Option<[f64; 2]>,
    /// One record at a time: what its path alone takes; null for other workloads.
    #[serde(default)]
    pub one_outstanding: Option<OneOutstanding>,
}

/// One record at a time, beside the parts of its path measured in the same rounds. Microseconds.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct OneOutstanding {
    /// Median latency of a publish, over the rounds.
    pub p50_us: Spread,
    /// Network hops of its path.
    pub hops: u64,
    /// Median of an echo of the record's size, both ends asleep in between.
    pub echo_p50_us: Spread,
    /// Median of one durable write of the record's blocks.
    pub write_p50_us: Spread,
    /// Latency by (hops x echo + write), round by round.
    pub ratio: Spread,
}

/// Where a run was measured.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Host {
    /// Name of the machine.
    pub name: String,
    /// Processor.
    pub cpu: String,
    /// CPUs this process may use.
    pub cpus: u64,
    /// Kernel.
    pub kernel: String,
    /// Memory.
    pub memory_bytes: u64,
    /// File system of the data directories.
    pub file_system: String,
    /// Where the data directories were.
    pub data_dir: String,
    /// State of the source.
    pub commit: String,
    /// Start of the run, UTC.
    pub started_at: String,
    /// CPUs of the brokers, and of the load generator last.
    pub placement: Vec<Vec<usize>>,
    /// Whether this is an optimised build.
    pub optimised: bool,
}
