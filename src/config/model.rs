//! The configuration as typed values.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::ids::NodeId;
use crate::tls::PeerTlsPaths;

use super::cores::CoreSelection;
use super::gather::Values;

/// How a commit reaches stable storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SyncMethod {
    /// The file is open with O_DSYNC.
    Odsync,
    /// Each write is followed by fdatasync.
    Fdatasync,
}

/// Settings of the executors, one a data core.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExecutorSettings {
    /// Which cores.
    pub cores: CoreSelection,
    /// Submission entries of each ring.
    pub queue_depth: u32,
    /// Registered memory of each ring.
    pub io_memory_bytes: usize,
    /// Time slice.
    pub preempt: Duration,
    /// Looking for work before sleeping.
    pub spin: Duration,
    /// Messages waiting between two cores.
    pub lane_capacity: usize,
    /// A loop that has not turned for this long is stalled.
    pub stall: Duration,
}

/// Settings of each core's log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StorageSettings {
    /// Size of a segment.
    pub segment_bytes: u64,
    /// Bytes that close a commit group.
    pub commit_max_bytes: usize,
    /// How long a group may wait for more.
    pub commit_max_delay: Duration,
    /// Groups on their way at once.
    pub commits_in_flight: usize,
    /// How a commit reaches stable storage.
    pub sync_method: SyncMethod,
    /// Bytes not on disk yet.
    pub max_queued_bytes: usize,
    /// Segments zeroed in advance.
    pub prewritten_segments: usize,
    /// Recent records in memory.
    pub recent_bytes: usize,
    /// Free space kept.
    pub reserve_bytes: u64,
    /// Bytes every shard of a stream keeps at least; 0: no bound.
    pub retention_bytes: u64,
    /// How long every shard of a stream keeps its records at least; 0: for ever.
    pub retention_age: Duration,
}

/// Settings of the links between brokers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerSettings {
    /// The three files of peer authentication, or none.
    pub tls: Option<PeerTlsPaths>,
    /// Unanswered requests per peer and core.
    pub in_flight: usize,
    /// Their bytes.
    pub in_flight_bytes: u64,
    /// Streams of a link.
    pub streams: u8,
    /// Requests of all peers a core works on at once.
    pub inbound_in_flight: usize,
    /// Connections of other brokers a core accepts.
    pub connections: usize,
    /// Of these, connections under one certificate.
    pub connections_per_node: usize,
    /// How long an answer may take.
    pub request_timeout: Duration,
    /// How long connecting and greeting may take.
    pub connect_timeout: Duration,
    /// Ping interval.
    pub keep_alive: Duration,
    /// Silence that ends a link.
    pub idle_timeout: Duration,
    /// A link without requests is closed after this.
    pub unused_close: Duration,
    /// First wait before dialling again.
    pub backoff_min: Duration,
    /// Longest wait before dialling again.
    pub backoff_max: Duration,
    /// First wait after a refusal.
    pub refused_backoff: Duration,
    /// Receive window of a stream.
    pub stream_window_bytes: u32,
    /// Receive window of a connection.
    pub connection_window_bytes: u32,
    /// Bytes on their way on one link.
    pub send_window_bytes: u64,
    /// Followers given a new copy at once.
    pub rebuilds_at_once: usize,
}

/// Bounds of a forwarded request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForwardSettings {
    /// Sends at most.
    pub attempts: u8,
    /// No attempt begins later.
    pub budget: Duration,
}

/// Settings towards clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientSettings {
    /// Certificate and key files; made at start without.
    pub cert_and_key: Option<(PathBuf, PathBuf)>,
    /// Refuse clients that offer no protocol.
    pub require_alpn: bool,
    /// Connections of the broker.
    pub max_connections: usize,
    /// Streams of one connection open at once.
    pub streams: u32,
    /// Subscriptions of the broker.
    pub max_subscriptions: usize,
    /// Bytes queued for all clients past which no further events are read for them.
    pub queued_bytes: usize,
    /// Bytes of clients' frames that have not come whole.
    pub buffered_bytes: usize,
    /// Silence that ends a connection.
    pub idle_timeout: Duration,
    /// Time to show a token.
    pub auth_timeout: Duration,
    /// Largest frame.
    pub max_frame_bytes: u32,
    /// Receive window of a stream.
    pub stream_window_bytes: u32,
    /// Receive window of a connection.
    pub connection_window_bytes: u32,
    /// An acknowledged publish is answered within this.
    pub publish_answer_timeout: Duration,
    /// Wait for a majority.
    pub quorum_timeout: Duration,
    /// Tokens a core remembers.
    pub token_cache_entries: usize,
}

/// Everything the broker was told. Each value is in its range; [`super::load`] also checks
/// them against each other and against the files they name.
#[derive(Debug, Clone)]
pub struct Config {
    /// This broker's name.
    pub node_id: NodeId,
    /// Directory of the logs.
    pub data_dir: PathBuf,
    /// The catalog file.
    pub catalog: PathBuf,
    /// Longest orderly stop.
    pub shutdown_deadline: Duration,
    /// Where clients connect.
    pub client_listen: SocketAddr,
    /// Where brokers connect.
    pub internal_listen: SocketAddr,
    /// Where operators connect.
    pub admin_listen: SocketAddr,
    /// The executors.
    pub executor: ExecutorSettings,
    /// The logs.
    pub storage: StorageSettings,
    /// The links between brokers.
    pub peer: PeerSettings,
    /// Forwarded requests.
    pub forward: ForwardSettings,
    /// Clients.
    pub client: ClientSettings,
    pub(super) values: Values,
}
