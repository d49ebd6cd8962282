//! Starting a broker.
//!
//! The main thread is the control thread: it starts the cores, hands them new catalogs and peer
//! addresses, and turns signals into an orderly stop. It never touches the data path.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::mpsc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use shard_executor::rt::{prepare_warm_up_file, spawn_core, CoreHandle, CoreSpec};
use shard_executor::topology::{
    allowed_cpus, pin_current_thread, place, CoreRequest, Placement, Topology,
};
use shard_executor::{inbox, InboxSender, Mesh, StallMonitor};
use storage_uring::{LogKind, LogName, RecoveredSet, Storage};

use super::core::{Control, Core, CoreEnd, CoreParts};
use super::data_dir::DataDirWatch;
use super::quic::{bind_reuseport, ServerTls};
use super::recover::recover;
use super::signals::Signals;
use super::{data_dir, secret, settings};
use crate::admin::{AdminServer, CatalogSnapshot, NodeInfo, SharedState};
use crate::catalog::{check_accepted, Catalog, CatalogWatch};
use crate::config::{Config, CoreSelection, Loaded};
use crate::ids::{Generation, Namespace, NodeId, ShardId, ShardKind, StreamName, TenantId};
use crate::metrics::{CoreMetrics, MetricsHub};
use crate::preflight::{self, PreflightInput};
use crate::tls::CertWatch;

/// Control messages a core may have unread.
const INBOX_CAPACITY: usize = 256;

/// Why a broker did not start or did not end in order.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The host lacks something; the text says what and how to mend it.
    #[error("{0}")]
    HostUnfit(String),
    /// The catalog contradicts what is on this broker's disk.
    #[error("{0}")]
    CatalogTooOld(String),
    /// A part could not be started.
    #[error("{0}")]
    Start(String),
    /// Data on disk is damaged in a way the broker must not work around.
    #[error("{0}")]
    Damaged(String),
    /// The stop did not finish what was accepted; the parts that were cut.
    #[error("stopped with unfinished work:\n  {}", .0.join("\n  "))]
    Unfinished(Vec<String>),
}

/// How an orderly run ended.
#[derive(Debug, Clone)]
pub struct ServeSummary {
    /// From the last core that came up to the first signal.
    pub served_for: Duration,
}

/// Runs a broker until a signal stops it. Blocks the calling thread, which becomes the control
/// thread.
///
/// # Errors
/// When the host is unfit, a part cannot start, or the stop had to cut unfinished work.
pub fn serve(loaded: Loaded) -> Result<ServeSummary, ServeError> {
    shard_executor::install_panic_exit();
    for warning in &loaded.warnings {
        tracing::warn!("{warning}");
    }
    let signals = Signals::install()?;
    check_host(&loaded.config)?;
    let broker = Broker::start(loaded)?;
    broker.watch_until_stopped(&signals)
}

pub(super) fn start_error(what: &str, error: &dyn std::fmt::Display) -> ServeError {
    ServeError::Start(format!("{what}: {error}"))
}

fn core_request(selection: &CoreSelection) -> CoreRequest {
    match selection {
        CoreSelection::Count(count) => CoreRequest::Count(*count),
        CoreSelection::List(cpus) => CoreRequest::List(cpus.clone()),
    }
}

fn check_host(config: &Config) -> Result<(), ServeError> {
    preflight::raise_soft_limits();
    data_dir::create(&config.data_dir).map_err(|error| {
        let what = format!(
            "cannot create the data directory {}",
            config.data_dir.display()
        );
        start_error(&what, &error)
    })?;
    if let Some(warning) = data_dir::open_to_others(&config.data_dir) {
        tracing::warn!("{warning}");
    }
    let mut input = PreflightInput::new(
        Some(config.data_dir.clone()),
        core_request(&config.executor.cores),
        config.executor.queue_depth as usize,
    );
    input.io_memory_bytes = config.executor.io_memory_bytes;
    let report = preflight::run(&input);
    for check in report.with_status(preflight::Status::Warn) {
        tracing::warn!(check = check.name, "{}", check.cause);
    }
    match report.failure_message() {
        Some(message) => Err(ServeError::HostUnfit(message)),
        None => Ok(()),
    }
}

type CoreResult = Result<CoreEnd, String>;

/// A broker whose cores run.
pub(super) struct Broker {
    pub(super) node_id: NodeId,
    pub(super) shutdown_deadline: Duration,
    pub(super) state: Arc<SharedState>,
    pub(super) admin: AdminServer,
    pub(super) cores: Vec<CoreHandle<CoreResult>>,
    pub(super) senders: Vec<InboxSender<Control>>,
    pub(super) ended: mpsc::Receiver<usize>,
    pub(super) cut: mpsc::Receiver<String>,
    pub(super) stalls: StallMonitor,
    pub(super) catalog: CatalogWatch,
    pub(super) certificates: Vec<CertWatch>,
    pub(super) data_dir: DataDirWatch,
    /// Why no log takes writes any more, once the data directory is gone.
    pub(super) data_dir_lost: Option<String>,
    pub(super) resolved: HashMap<NodeId, SocketAddr>,
    pub(super) resolve_at: Instant,
    pub(super) ready_since: Instant,
}

impl Broker {
    fn start(loaded: Loaded) -> Result<Self, ServeError> {
        let Loaded {
            config,
            catalog,
            peer_tls,
            client_tls,
            ..
        } = loaded;
        let core_count = config.executor.cores.count();
        let now = Instant::now();
        let metrics: Vec<Arc<CoreMetrics>> = (0..core_count).map(|_| Arc::default()).collect();
        let state = SharedState::new(
            node_info(&config, core_count),
            MetricsHub::new(metrics.clone()),
        );
        state.publish_catalog(catalog_snapshot(&catalog.catalog, &config.node_id, 1));
        let admin =
            AdminServer::start(config.admin_listen, Arc::clone(&state)).map_err(|error| {
                start_error(
                    &format!("cannot listen on admin-listen {}", config.admin_listen),
                    &error,
                )
            })?;
        let placement = placement(&config)?;
        let mut sockets = bind(&config)?;
        let keys = secret::load_or_create(&config.data_dir).map_err(|error| {
            start_error(
                "cannot read or write the QUIC secret in the data directory",
                &error,
            )
        })?;
        let recovered = recover(&config, core_count, &state)?;
        let data_dir = DataDirWatch::new(&config.data_dir, now)
            .map_err(|error| start_error("cannot look at the data directory", &error))?;
        for (shard, generation) in accepted_generations(&recovered) {
            state.note_accepted(&shard, generation);
        }
        check_accepted(&catalog.catalog, &|shard| state.accepted(shard))
            .map_err(|errors| ServeError::CatalogTooOld(errors.to_string()))?;
        let warm_up = prepare_warm_up_file(&config.data_dir)
            .map_err(|error| start_error("cannot write to the data directory", &error))?;
        let settings = Arc::new(settings::core_settings(&config));
        let peer_tls = Arc::new(peer_tls);
        let server_tls = match config.client.require_alpn {
            true => ServerTls::Strict(Arc::clone(client_tls.with_alpn())),
            false => ServerTls::AlpnOptional {
                with_alpn: Arc::clone(client_tls.with_alpn()),
                without_alpn: Arc::clone(client_tls.without_alpn()),
            },
        };
        let (ended_tx, ended) = mpsc::channel();
        let (cut_tx, cut) = mpsc::channel();
        let (ready_tx, ready) = mpsc::channel();
        let mut cores = Vec::with_capacity(core_count);
        let mut senders = Vec::with_capacity(core_count);
        let dial_from = SocketAddr::new(config.internal_listen.ip(), 0);
        for (index, port) in Mesh::new(core_count, config.executor.lane_capacity)
            .into_iter()
            .enumerate()
        {
            let (sender, inbox) = inbox(INBOX_CAPACITY);
            senders.push(sender);
            let (client_socket, internal_socket) = sockets.remove(0);
            let parts = CoreParts {
                index: index as u16,
                settings: Arc::clone(&settings),
                catalog: Arc::clone(&catalog.catalog),
                client_tls: server_tls.clone(),
                peer_tls: Arc::clone(&peer_tls),
                keys: keys.clone(),
                client_socket,
                internal_socket,
                dial_from,
                port,
                inbox,
                metrics: Arc::clone(&metrics[index]),
                state: Arc::clone(&state),
                cut: cut_tx.clone(),
            };
            let spec = CoreSpec {
                cpu: placement.data.get(index).copied(),
                io_memory_bytes: config.executor.io_memory_bytes,
                ring_depth: config.executor.queue_depth as usize,
                preempt_ms: config.executor.preempt.as_millis() as u64,
                warm_up_file: Some(warm_up.clone()),
                ..CoreSpec::new(index)
            };
            let storage_config = settings::storage_config(&config, index as u16);
            let recovered = Arc::clone(&recovered);
            let (ready_tx, ended_tx) = (ready_tx.clone(), ended_tx.clone());
            let core = spawn_core(spec, move || async move {
                let result = run_core(parts, storage_config, recovered, &ready_tx).await;
                let _ = ended_tx.send(index);
                result
            })
            .map_err(|error| ServeError::Start(error.to_string()))?;
            cores.push(core);
        }
        for _ in 0..core_count {
            match ready.recv() {
                Ok(Ok(())) => {}
                Ok(Err(why)) => return Err(ServeError::Start(why)),
                Err(_) => {
                    return Err(ServeError::Start(
                        "a core ended before it was ready".to_owned(),
                    ))
                }
            }
        }
        let watched = cores
            .iter()
            .map(|core| (core.core_index(), core.heartbeat()))
            .collect();
        let counted = metrics.clone();
        let stalls = StallMonitor::start(config.executor.stall, watched, move |event| {
            if let shard_executor::stall::StallEvent::Stalled { core, .. } = event {
                counted[core].stalls.add_shared(1);
            }
        })
        .map_err(|error| start_error("cannot start the stall monitor", &error))?;
        if !placement.control.is_empty() {
            if let Err(error) = pin_current_thread(&placement.control) {
                tracing::warn!(%error, "control threads stay unpinned");
            }
        }
        let certificates = [peer_tls.watch(now), client_tls.watch(now)]
            .into_iter()
            .flatten()
            .collect();
        state.release_start();
        tracing::info!(node = %config.node_id, cores = core_count, client = %config.client_listen, internal = %config.internal_listen, admin = %config.admin_listen, "ready");
        Ok(Self {
            node_id: config.node_id.clone(),
            shutdown_deadline: config.shutdown_deadline,
            state,
            admin,
            cores,
            senders,
            ended,
            cut,
            stalls,
            catalog: catalog.watch(now),
            certificates,
            data_dir,
            data_dir_lost: None,
            resolved: HashMap::new(),
            resolve_at: now,
            ready_since: Instant::now(),
        })
    }
}

async fn run_core(
    parts: CoreParts,
    config: storage_uring::StorageConfig,
    recovered: Arc<RecoveredSet>,
    ready: &mpsc::Sender<Result<(), String>>,
) -> CoreResult {
    let index = parts.index;
    let opened = match Storage::open(config, recovered).await {
        Ok(storage) => Core::new(parts, storage).map_err(|error| format!("core {index}: {error}")),
        Err(error) => Err(format!("core {index}: {error}")),
    };
    match opened {
        Ok(core) => {
            let _ = ready.send(Ok(()));
            Ok(core.run().await)
        }
        Err(why) => {
            let _ = ready.send(Err(why.clone()));
            Err(why)
        }
    }
}

/// The generations the logs on disk have accepted. A name that is none of ours is nobody's shard.
fn accepted_generations(recovered: &RecoveredSet) -> Vec<(ShardId, Generation)> {
    let of_log = |(log, accepted): (LogName, u64)| {
        let kind = match log.kind {
            LogKind::Stream | LogKind::Cursors | LogKind::DeadLetters => ShardKind::Stream,
            LogKind::Cache | LogKind::Counters => ShardKind::Cache,
        };
        let shard = ShardId {
            kind,
            tenant: TenantId::new(&log.tenant).ok()?,
            namespace: Namespace::new(&log.namespace).ok()?,
            name: StreamName::new(&log.name).ok()?,
            shard: log.shard,
        };
        Some((shard, Generation(accepted)))
    };
    recovered
        .accepted()
        .into_iter()
        .filter_map(of_log)
        .collect()
}

fn placement(config: &Config) -> Result<Placement, ServeError> {
    let topology = Topology::read_host()
        .map_err(|error| start_error("cannot read the CPU topology", &error))?;
    let allowed = allowed_cpus().map_err(|error| start_error("cannot read the CPU set", &error))?;
    place(&core_request(&config.executor.cores), &topology, &allowed)
        .map_err(|error| ServeError::HostUnfit(error.to_string()))
}

type CoreSockets = (std::net::UdpSocket, std::net::UdpSocket);

fn bind(config: &Config) -> Result<Vec<CoreSockets>, ServeError> {
    let cores = config.executor.cores.count() as u16;
    let bind = |what: &str, addr: SocketAddr| {
        bind_reuseport(addr, cores)
            .map_err(|error| start_error(&format!("cannot listen on {what} {addr}"), &error))
    };
    let clients = bind("client-listen", config.client_listen)?;
    let internal = bind("internal-listen", config.internal_listen)?;
    Ok(clients.into_iter().zip(internal).collect())
}

fn node_info(config: &Config, cores: usize) -> NodeInfo {
    NodeInfo {
        node_id: config.node_id.to_string(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        cores,
        client_addr: config.client_listen.to_string(),
        internal_addr: config.internal_listen.to_string(),
        data_dir: config.data_dir.display().to_string(),
        config: serde_json::Value::String(config.print()),
    }
}

pub(super) fn catalog_snapshot(catalog: &Catalog, me: &NodeId, version: u64) -> CatalogSnapshot {
    let me = catalog.node_by_id(me.as_str());
    let assignments = || {
        catalog
            .sharded()
            .iter()
            .flat_map(|spec| spec.assignments.iter())
    };
    CatalogSnapshot {
        path: catalog.source().display().to_string(),
        version,
        max_generation: assignments().map(|a| a.generation.0).max().unwrap_or(0),
        nodes: catalog.nodes().len() as u64,
        streams: catalog.streams().count() as u64,
        caches: catalog.caches().count() as u64,
        shards_led: assignments().filter(|a| Some(a.leader()) == me).count() as u64,
        error: None,
    }
}
