//! One core of the broker: its event loop and everything that lives on it.
//!
//! A turn: receive datagrams, handle what they brought, take messages of other cores and of the
//! control threads, take storage completions, run timers, start a commit, send. Answers written
//! in one turn leave together, so small ones share packets; appends of one turn share a commit.
//!
//! Nothing here blocks, and nothing here is shared: other cores are reached by lanes only.
//!
//! Invariants: see [`append`] (INV-1 to INV-3), [`forward`] (INV-4), [`cache`] (INV-5),
//! [`ship`] (INV-6 to INV-8) and [`group`] (INV-9).

mod append;
mod begin;
mod bulk;
mod cache;
mod cache_compact;
mod cache_load;
mod client;
mod event_run;
mod events;
mod follower;
mod forward;
mod forward_body;
mod forward_orders;
mod group;
mod link;
mod link_io;
mod link_report;
mod message;
mod peer_admission;
mod peer_bounds;
mod peer_forwards;
mod peer_replication;
mod peer_server;
mod reads;
mod report;
mod retention;
mod ship;
mod slots;
mod stop;
mod timers;
mod turn;

use std::collections::{HashMap, VecDeque};
use std::net::{SocketAddr, UdpSocket};
use std::sync::mpsc::Sender;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use shard_executor::{Inbox, MeshPort, Signal};
use storage_uring::{Completion, LogRef, Retention, Storage};

use crate::admin::{ShardFailure, SharedState};
use crate::auth::Verifier;
use crate::catalog::{Catalog, NameMap, RouteTable, ShardRoute};
use crate::ids::{NodeId, ShardId};
use crate::metrics::CoreMetrics;
use crate::proto::cache::OwnerClock;
use crate::proto::client_session::StreamLimits;
use crate::proto::forward::ForwardLimits;
use crate::proto::ownership::Serving;
use crate::proto::peer::{LinkLimits, StreamSlot};
use crate::proto::replication::leader::ShipLimits;
use crate::proto::MonoTime;
use crate::tls::PeerTls;
use crate::wire::client::ServerOffer;

use super::quic::{
    client_config, ConnId, EndpointId, EndpointSpec, Pump, PumpConfig, ServerSetup, ServerTls,
    SetupError, SharedKeys, StreamId, TransportSettings, UdpIo,
};
use slots::Slots;

pub(in crate::driver) use bulk::bulk_queued_bytes;
pub use message::{Control, LaneMsg};
pub use ship::RebuildBudget;
pub use stop::CoreEnd;

/// Answers written to a stream and not taken by the other side, past which the stream is not read.
const MAX_UNTAKEN_ANSWER_BYTES: usize = 1 << 20;

/// What a core is told once, the same for all cores.
#[derive(Debug, Clone)]
pub struct Settings {
    pub node_id: NodeId,
    pub cores: u16,
    pub client_transport: TransportSettings,
    pub peer_transport: TransportSettings,
    pub link_limits: LinkLimits,
    pub forward_limits: ForwardLimits,
    /// A client connection nothing of which authenticates for this long is closed.
    pub auth_timeout: Duration,
    /// A peer that does not greet for this long is closed.
    pub peer_greeting_timeout: Duration,
    /// Bytes on their way to the disk past which a large batch waits with its next piece.
    pub bulk_queued_bytes: usize,
    /// Requests of all peers a core works on at once.
    pub peer_inbound_in_flight: usize,
    /// Connections of other brokers one core accepts.
    pub max_peer_connections: usize,
    /// Of these, connections under one certificate.
    pub max_peer_connections_per_node: usize,
    /// Publish bytes of one client connection in work before its streams are not read.
    pub client_in_flight_bytes: usize,
    /// Subscriptions of one core.
    pub max_subscriptions: usize,
    /// Bytes of frames of all clients of one core that have not come whole.
    pub client_buffered_bytes: usize,
    /// Bytes queued for all clients of one core past which no further events are read for them.
    pub client_queued_bytes: usize,
    /// How long an idle core looks for work before it sleeps.
    pub spin: Duration,
    /// Client connections of one core.
    pub max_client_connections: usize,
    /// What one client stream may be owed, and for how long.
    pub stream_limits: StreamLimits,
    /// How long a client connection may take to collect its answers when the broker stops.
    pub drain_patience: Duration,
    /// Tokens a core remembers as verified.
    pub token_cache_entries: usize,
    /// How records are shipped to followers.
    pub ship_limits: ShipLimits,
    /// New copies of followers made at once, of all cores together.
    pub rebuilds: Arc<RebuildBudget>,
    /// How long a write waits for a majority.
    pub quorum_timeout: Duration,
    /// How long shards of streams keep their records.
    pub retention: Retention,
}

/// Everything one core starts from. Made on the main thread, moved into the executor.
pub struct CoreParts {
    pub index: u16,
    pub settings: Arc<Settings>,
    pub catalog: Arc<Catalog>,
    pub client_tls: ServerTls,
    pub peer_tls: Arc<PeerTls>,
    pub keys: SharedKeys,
    pub client_socket: UdpSocket,
    pub internal_socket: UdpSocket,
    /// Where peers are dialled from; the port is the system's choice.
    pub dial_from: SocketAddr,
    pub port: MeshPort<LaneMsg>,
    pub inbox: Inbox<Control>,
    pub metrics: Arc<CoreMetrics>,
    pub state: Arc<SharedState>,
    /// Takes what is cut off unfinished, a line a part.
    pub cut: Sender<String>,
}

struct Endpoints {
    client: EndpointId,
    internal: EndpointId,
    dial: EndpointId,
}

impl Endpoints {
    fn all(&self) -> [EndpointId; 3] {
        [self.client, self.internal, self.dial]
    }
}

/// One core.
pub struct Core {
    index: u16,
    me: NodeId,
    settings: Arc<Settings>,
    started: Instant,
    /// The time of this turn, in the three forms it is needed in.
    now: Instant,
    mono: MonoTime,
    wall_us: u64,
    pump: Pump,
    endpoints: Endpoints,
    storage: Storage,
    signal: Signal,
    routes: Arc<RouteTable>,
    verifier: Verifier,
    metrics: Arc<CoreMetrics>,
    state: Arc<SharedState>,
    cut: Sender<String>,
    port: MeshPort<LaneMsg>,
    lane_backlog: Vec<VecDeque<LaneMsg>>,
    inbox: Inbox<Control>,
    timers: timers::Timers,
    is_draining: bool,
    must_cut: bool,

    logs: NameMap<Arc<ShardId>, append::OpenLog>,
    log_shards: NameMap<LogRef, Arc<ShardId>>,
    begun: begin::Begun,
    touched_logs: Vec<LogRef>,
    completions: Vec<Completion>,
    appends: Slots<append::AppendWaiter>,
    lane_appends: Slots<append::AppendWaiter>,
    caches: NameMap<cache::CacheAt, cache::CacheState>,
    cache_clock: OwnerClock,
    cache_memory: cache::CacheMemory,
    cache_reads: Slots<cache_load::CacheRead>,
    lane_caches: Slots<cache::CacheWaiter>,
    followers: follower::Followers,
    /// Requests of leaders that arrived on this core, whichever core they are for.
    replicate_waiters: Slots<peer_replication::ReplicateWaiter>,
    bulk: bulk::BulkQueue<append::AppendWaiter>,
    /// The one pass of compaction that runs, and whether something came in for it this turn.
    compaction: Option<cache_compact::RunningCompaction>,
    compaction_due: bool,
    groups: group::Groups,
    group_reads_done: VecDeque<(u64, message::ReadResult)>,
    disk_reads: reads::DiskReads,
    read_results: VecDeque<(u64, message::EventRead)>,
    event_runs: event_run::EventRuns<LogRef>,
    shard_failures: HashMap<Arc<ShardId>, ShardFailure>,

    clients: HashMap<ConnId, client::ClientConn>,
    server_offer: ServerOffer,
    subscriptions: Slots<client::EventStream>,
    waiting_for_room: client::WaitingForRoom,
    group_asks: Slots<client::ClientGroup>,
    /// Bytes of clients' frames that have not come whole.
    client_buffered_bytes: usize,
    /// Connections of clients taken so far; numbers the sessions of group members.
    client_sessions: u64,

    peer_tls: Arc<PeerTls>,
    peer_client_config: quinn_proto::ClientConfig,
    accepted_peers: HashMap<ConnId, peer_server::PeerConn>,
    /// Peer connections accepted so far.
    peers_accepted: u64,
    peer_admission: peer_admission::PeerAdmission,
    peer_bounds: peer_bounds::PeerBounds,
    links: HashMap<NodeId, link::Link>,
    link_conns: HashMap<ConnId, NodeId>,
    link_streams: HashMap<(ConnId, StreamId), StreamSlot>,
    pending_links: Vec<NodeId>,
    resolved: HashMap<NodeId, SocketAddr>,
    forwards: Slots<forward::PendingForward>,
    forward_orders: forward_orders::ForwardOrders,
    shipping: ship::Shipping,
    scratch: BytesMut,

    /// Streams with bytes left unread by a quantum or a bound.
    read_again: Vec<(ConnId, StreamId)>,
    report_at: Instant,
    /// When it was last said that connections are refused for their number.
    limit_told_at: Option<Instant>,
}

impl Core {
    /// Builds a core on its executor, sockets and storage included.
    pub fn new(parts: CoreParts, storage: Storage) -> Result<Self, SetupError> {
        let now = Instant::now();
        let settings = parts.settings;
        let mut pump = Pump::new(PumpConfig::new(parts.index, settings.cores, parts.keys))?;
        let client_transport = settings.client_transport.build()?;
        let peer_transport = settings.peer_transport.build()?;
        let client = pump.add_endpoint(EndpointSpec {
            role: 0,
            io: Box::new(UdpIo::new(parts.client_socket)?),
            server: Some(ServerSetup {
                tls: parts.client_tls,
                transport: client_transport,
            }),
            shared_port: settings.cores > 1,
            max_connections: settings.max_client_connections,
            max_handshakes: 1024,
        })?;
        let tls = ServerTls::Strict(Arc::clone(parts.peer_tls.server_config()));
        let internal = pump.add_endpoint(EndpointSpec {
            role: 1,
            io: Box::new(UdpIo::new(parts.internal_socket)?),
            server: Some(ServerSetup {
                tls,
                transport: Arc::clone(&peer_transport),
            }),
            shared_port: settings.cores > 1,
            max_connections: settings.max_peer_connections,
            max_handshakes: 256,
        })?;
        let dial = pump.add_endpoint(EndpointSpec {
            role: 2,
            io: Box::new(UdpIo::bind(parts.dial_from)?),
            server: None,
            shared_port: false,
            max_connections: 1024,
            max_handshakes: 256,
        })?;
        let client_tls = Arc::clone(parts.peer_tls.client_config());
        let peer_client_config = client_config(client_tls, peer_transport)?;
        let routes = RouteTable::build(&parts.catalog, &settings.node_id, settings.cores);
        let signal = storage.signal();
        Ok(Self {
            index: parts.index,
            me: settings.node_id.clone(),
            started: now,
            now,
            mono: MonoTime::ZERO,
            wall_us: wall_us(),
            pump,
            endpoints: Endpoints {
                client,
                internal,
                dial,
            },
            storage,
            signal,
            routes: Arc::new(routes),
            verifier: Verifier::new(&parts.catalog, settings.token_cache_entries),
            metrics: parts.metrics,
            state: parts.state,
            cut: parts.cut,
            lane_backlog: (0..settings.cores).map(|_| VecDeque::new()).collect(),
            port: parts.port,
            inbox: parts.inbox,
            timers: timers::Timers::default(),
            is_draining: false,
            must_cut: false,
            logs: NameMap::default(),
            log_shards: NameMap::default(),
            begun: begin::Begun::default(),
            touched_logs: Vec::new(),
            completions: Vec::new(),
            appends: Slots::default(),
            lane_appends: Slots::default(),
            caches: NameMap::default(),
            cache_clock: OwnerClock::default(),
            cache_memory: cache::CacheMemory::default(),
            cache_reads: Slots::default(),
            lane_caches: Slots::default(),
            followers: follower::Followers::default(),
            replicate_waiters: Slots::default(),
            bulk: bulk::BulkQueue::default(),
            compaction: None,
            compaction_due: false,
            groups: group::Groups::default(),
            group_reads_done: VecDeque::new(),
            disk_reads: reads::DiskReads::default(),
            read_results: VecDeque::new(),
            event_runs: event_run::EventRuns::default(),
            shard_failures: HashMap::new(),
            clients: HashMap::new(),
            server_offer: client::server_offer(),
            subscriptions: Slots::default(),
            waiting_for_room: client::WaitingForRoom::default(),
            group_asks: Slots::default(),
            client_buffered_bytes: 0,
            client_sessions: 0,
            peer_tls: parts.peer_tls,
            peer_client_config,
            accepted_peers: HashMap::new(),
            peers_accepted: 0,
            peer_admission: peer_admission::PeerAdmission::new(
                settings.max_peer_connections_per_node,
            ),
            peer_bounds: peer_bounds::PeerBounds::new(settings.peer_inbound_in_flight),
            links: HashMap::new(),
            link_conns: HashMap::new(),
            link_streams: HashMap::new(),
            pending_links: Vec::new(),
            resolved: HashMap::new(),
            forwards: Slots::default(),
            forward_orders: forward_orders::ForwardOrders::default(),
            shipping: ship::Shipping::default(),
            scratch: link_io::new_scratch(),
            read_again: Vec::new(),
            report_at: now,
            limit_told_at: None,
            settings,
        })
    }

    /// Whether a shard this broker leads can be served.
    fn serving(&self, route: &ShardRoute) -> Serving {
        if !self.shard_failures.is_empty() && self.shard_failures.contains_key(&route.shard_id) {
            return Serving::StorageFailed;
        }
        // Another core's shard is judged there, where it is appended.
        let is_judged_here =
            route.replicas.len() > 1 && route.is_local && route.core.0 == self.index;
        match is_judged_here && !self.shipping.is_open(&route.shard_id, route.generation) {
            true => Serving::Opening,
            false => Serving::Ready,
        }
    }

    fn random_u64(&self) -> u64 {
        rand::random()
    }

    fn report_shard_failure(&mut self, shard: &Arc<ShardId>, error: &storage_uring::LogError) {
        tracing::error!(%shard, %error, "a shard cannot be served; the others go on");
        let failure = ShardFailure {
            shard: shard.to_string(),
            error: error.to_string(),
            remedy: "run `felix-uring log verify` on the data directory, then restore the shard or remove its damaged segment".to_owned(),
        };
        self.shard_failures.insert(Arc::clone(shard), failure);
    }
}

/// Microseconds since the epoch.
pub(super) fn wall_us() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| since.as_micros() as u64)
}

/// The label a refusal of the internal protocol is counted under.
fn peer_code(code: crate::proto::outcome::PeerCode) -> crate::metrics::PeerCode {
    crate::metrics::PeerCode::from_number(code.code())
        .unwrap_or(crate::metrics::PeerCode::Unavailable)
}
