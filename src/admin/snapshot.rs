//! What cores and control threads publish for `/status`: plain data, made of text and numbers so
//! that no type of the data path has to be shared with another thread.

use serde::Serialize;

/// One core, as it saw itself when it published.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct CoreSnapshot {
    /// The cpu the core is pinned to; absent when it is not pinned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<u32>,
    /// `starting`, `recovering`, `serving`, `draining`, `stopped`.
    pub phase: String,
    pub client_connections: u64,
    pub peer_connections: u64,
    pub accepted_peers: AcceptedPeersSnapshot,
    pub subscriptions: u64,
    pub publishes_in_flight: u64,
    pub forwards_in_flight: u64,
    pub shards: Vec<ShardSnapshot>,
    pub storage: StorageSnapshot,
    pub held: HeldSnapshot,
    pub replication: ReplicationSnapshot,
    #[serde(skip)]
    pub peers: Vec<PeerSnapshot>,
    #[serde(skip)]
    pub failures: Vec<ShardFailure>,
}

/// One shard a core serves.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct ShardSnapshot {
    pub shard: String,
    /// `leader` or `follower`.
    pub role: String,
    pub generation: u64,
    pub base_offset: u64,
    /// The next offset a publish will get.
    pub next_offset: u64,
    /// One past the last durable record.
    pub durable_offset: u64,
    /// Of a copy: below it the copy is known to equal the log of its present leader.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub matched_offset: Option<u64>,
    /// One past the last record a majority is known to hold; absent for a shard nobody else holds,
    /// and before the first mark of a generation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mark: Option<u64>,
    /// How far a replicated shard is on its way to taking writes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub opening: Option<String>,
}

/// The replicated shards one core leads.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct ReplicationSnapshot {
    pub shards_led: u64,
    pub shards_open: u64,
    /// Records the slowest replica that is not halted lacks.
    pub lag_records: u64,
    pub rebuilding: u64,
    /// Writes and cache reads that wait for a majority.
    pub waiting_writes: u64,
    /// Empty when all is well.
    pub halted: Vec<HaltedSnapshot>,
}

/// A copy of a log nothing is shipped to, why, and what to do about it.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct HaltedSnapshot {
    pub shard: String,
    pub log: String,
    pub node: String,
    pub generation: u64,
    /// What the replica had answered at this generation.
    pub position: Option<u64>,
    pub reason: String,
    pub remedy: String,
}

/// The storage of one core.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct StorageSnapshot {
    pub commits: u64,
    pub records: u64,
    pub appended_bytes: u64,
    pub group_records_sum: u64,
    pub flush_failures: u64,
    pub queued_bytes: u64,
    pub free_bytes: u64,
    pub segments: u64,
    /// Bytes at risk in a mode weaker than flush-before-answer; 0 in the durable mode.
    pub unflushed_bytes: u64,
    /// Why the core's log failed: it takes no writes until the next start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// A connection, or the lack of one, to another broker.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct PeerSnapshot {
    pub node_id: String,
    pub address: String,
    /// `idle`, `connecting`, `up`, `backoff`, `refused`.
    pub state: String,
    pub in_flight: u64,
    pub failures_in_a_row: u64,
    /// While a failure keeps it from being dialled: for how much longer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_in_ms: Option<u64>,
    /// Of the connection, while there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<PathSnapshot>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
}

/// The network path of a connection.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct PathSnapshot {
    /// Smoothed round-trip time.
    pub rtt_us: u64,
    /// Largest UDP payload the path is known to carry.
    pub mtu_bytes: u64,
    /// Times the path was judged to have become narrower.
    pub black_holes: u64,
    pub sent_packets: u64,
    pub lost_packets: u64,
}

/// The connections other brokers have made to a core.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct AcceptedPeersSnapshot {
    pub connections: u64,
    /// More are refused.
    pub limit: u64,
    /// More under one certificate are refused.
    pub limit_per_certificate: u64,
    /// Those that have most of them; empty when peers show no certificates.
    pub by_certificate: Vec<CertificateConnections>,
}

/// The connections made under one certificate.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct CertificateConnections {
    /// Its names, separated by commas.
    pub names: String,
    pub connections: u64,
}

/// What a core holds for connections and requests; all of it falls back when they end.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct HeldSnapshot {
    /// QUIC connections, closing ones included.
    pub connections: u64,
    /// Streams to and from other brokers.
    pub peer_streams: u64,
    /// Requests of other brokers not answered yet.
    pub peer_requests: u64,
    pub timers: u64,
    pub forwards: u64,
    pub appends: u64,
}

/// A shard that does not serve, why, and what to do about it.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct ShardFailure {
    pub shard: String,
    pub error: String,
    pub remedy: String,
}

/// The catalog in use.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct CatalogSnapshot {
    pub path: String,
    pub version: u64,
    pub max_generation: u64,
    pub nodes: u64,
    pub streams: u64,
    pub caches: u64,
    pub shards_led: u64,
    /// Why the newest file was not taken; absent while the file in use is the newest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}
