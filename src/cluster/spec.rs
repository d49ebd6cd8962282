//! What a local cluster should look like, and the files that make it so.

use std::collections::HashSet;
use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::pki::{write_public, Authority, NodeCertificates};
use super::{open_or_create_signing_key, ClusterError};
use crate::auth::SigningKey;
use crate::catalog::{CatalogDraft, DraftAssignment, DraftNode, DraftSharded, DraftTenant};
use crate::ids::NodeId;

/// The tenant of a local cluster.
pub const TENANT: &str = "t1";
/// Its namespace.
pub const NAMESPACE: &str = "default";
/// A durable stream of one shard that every local cluster has.
pub const STREAM: &str = "events";
/// A cache that every local cluster has.
pub const CACHE: &str = "primary";
/// The id of the tenant's signing key.
pub const KEY_ID: &str = "k1";

/// A stream or a cache beside the standard ones.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ShardedSpec {
    pub name: String,
    pub shards: u32,
    pub replicas: u16,
    /// `leader` or `quorum`; `None` takes the catalog's default.
    pub consistency: Option<String>,
    /// Bytes a shard keeps at least; `None` takes the broker's setting.
    pub retention_bytes: Option<u64>,
    /// Index of the node that leads each shard, in shard order and repeated when shorter; empty
    /// lets placement choose.
    pub leaders: Vec<usize>,
}

impl ShardedSpec {
    /// Unreplicated, led by whoever placement chooses.
    pub fn new(name: &str, shards: u32) -> Self {
        Self {
            name: name.to_string(),
            shards,
            replicas: 1,
            ..Self::default()
        }
    }

    /// The same with its shards led by these nodes in turn.
    pub fn led_by(mut self, nodes: &[usize]) -> Self {
        self.leaders = nodes.to_vec();
        self
    }
}

/// How a broker process is started: a program and what comes before the broker's own flags.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BrokerProgram {
    pub path: PathBuf,
    pub args: Vec<OsString>,
}

impl BrokerProgram {
    /// This very program, with `serve`.
    pub fn current() -> std::io::Result<Self> {
        Ok(Self::serve_of(std::env::current_exe()?))
    }

    /// Another `felix-uring` binary.
    pub fn serve_of(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            args: vec!["serve".into()],
        }
    }
}

/// Where one broker of a cluster runs, when that is not simply this host and its loopback address: a network
/// namespace, say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeSite {
    /// The address the broker listens at and is reached at by clients, peers and this process.
    pub ip: IpAddr,
    /// A program and its arguments that enter the place and execute the broker, whose own command line
    /// follows. It must become the broker, not be its parent: signals go to its process id.
    pub launcher: Vec<OsString>,
}

/// A local cluster to be started.
#[derive(Debug, Clone)]
pub struct ClusterSpec {
    /// Everything the cluster writes is under here; keys, catalog and data found there are used.
    pub dir: PathBuf,
    pub nodes: usize,
    pub cores_per_node: usize,
    /// The cpus of each node's cores; empty leaves the placement to the broker.
    pub cpus: Vec<Vec<usize>>,
    pub queue_depth: Option<u32>,
    /// The standard stream and cache and, beside them, these.
    pub streams: Vec<ShardedSpec>,
    pub caches: Vec<ShardedSpec>,
    /// Replicas of the standard stream and cache.
    pub replicas: u16,
    pub program: BrokerProgram,
    /// Where each node runs; nodes without an entry run here, on loopback.
    pub sites: Vec<NodeSite>,
    /// More flags for every broker.
    pub extra_args: Vec<String>,
    /// More environment for every broker.
    pub env: Vec<(String, String)>,
    pub ready_timeout: Duration,
    /// How long a broker may take to stop in order before it is killed.
    pub stop_timeout: Duration,
}

impl ClusterSpec {
    /// One core a node, no replication, generous timeouts.
    pub fn new(dir: impl Into<PathBuf>, nodes: usize, program: BrokerProgram) -> Self {
        Self {
            dir: dir.into(),
            nodes,
            cores_per_node: 1,
            cpus: Vec::new(),
            queue_depth: None,
            streams: Vec::new(),
            caches: Vec::new(),
            replicas: 1,
            program,
            sites: Vec::new(),
            extra_args: Vec::new(),
            env: Vec::new(),
            ready_timeout: Duration::from_secs(60),
            stop_timeout: Duration::from_secs(30),
        }
    }
}

/// Where one broker listens and lives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodePlan {
    pub node_id: NodeId,
    pub client_addr: SocketAddr,
    pub internal_addr: SocketAddr,
    pub admin_addr: SocketAddr,
    pub data_dir: PathBuf,
    pub log: PathBuf,
    pub certificates: NodeCertificates,
}

/// A cluster whose files are written and whose brokers are not started.
#[derive(Debug, Clone)]
pub struct ClusterPlan {
    pub dir: PathBuf,
    pub ca: PathBuf,
    pub catalog: PathBuf,
    pub signing_key_path: PathBuf,
    pub signing_key: SigningKey,
    pub nodes: Vec<NodePlan>,
}

impl ClusterPlan {
    /// Writes certificates, keys and the catalog, and picks free ports.
    pub fn write(spec: &ClusterSpec) -> Result<Self, ClusterError> {
        std::fs::create_dir_all(&spec.dir)
            .map_err(|source| ClusterError::file(&spec.dir, source))?;
        let dir = std::fs::canonicalize(&spec.dir)
            .map_err(|source| ClusterError::file(&spec.dir, source))?;
        let authority = Authority::open_or_create(&dir, 365)?;
        let signing_key_path = dir.join(format!("{KEY_ID}.pem"));
        let signing_key = open_or_create_signing_key(&signing_key_path)?;
        write_public(
            &dir.join(format!("{KEY_ID}.jwks.json")),
            &signing_key.to_jwks(KEY_ID),
        )?;
        let ports = free_ports(3 * spec.nodes).map_err(ClusterError::Ports)?;
        let nodes = ports
            .chunks_exact(3)
            .enumerate()
            .map(|(index, ports)| {
                let site = spec.sites.get(index).map(|site| site.ip);
                plan_node(&dir, &authority, index, site, ports)
            })
            .collect::<Result<Vec<_>, _>>()?;
        let catalog = dir.join("catalog.toml");
        let text = draft(spec, &nodes)
            .to_toml()
            .map_err(|error| ClusterError::Catalog(error.to_string()))?;
        write_public(&catalog, &text)?;
        Ok(Self {
            ca: authority.ca_path(),
            catalog,
            signing_key_path,
            signing_key,
            nodes,
            dir,
        })
    }
}

fn plan_node(
    dir: &Path,
    authority: &Authority,
    index: usize,
    site: Option<IpAddr>,
    ports: &[u16],
) -> Result<NodePlan, ClusterError> {
    let name = format!("node-{}", index + 1);
    let node_id = NodeId::new(&name).map_err(|error| ClusterError::Catalog(error.to_string()))?;
    let node_dir = dir.join(&name);
    let data_dir = node_dir.join("data");
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&data_dir)
        .map_err(|source| ClusterError::file(&data_dir, source))?;
    let ip = site.unwrap_or(Ipv4Addr::LOCALHOST.into());
    let at = |port: u16| SocketAddr::from((ip, port));
    let names: Vec<String> = site.iter().map(IpAddr::to_string).collect();
    Ok(NodePlan {
        certificates: authority.issue_node(&node_dir, &node_id, &names)?,
        client_addr: at(ports[0]),
        internal_addr: at(ports[1]),
        admin_addr: at(ports[2]),
        log: node_dir.join("broker.log"),
        data_dir,
        node_id,
    })
}

fn draft(spec: &ClusterSpec, nodes: &[NodePlan]) -> CatalogDraft {
    let standard = |name: &str| ShardedSpec {
        replicas: spec.replicas,
        ..ShardedSpec::new(name, 1)
    };
    let streams: Vec<ShardedSpec> = with_standard(standard(STREAM), &spec.streams);
    let caches: Vec<ShardedSpec> = with_standard(standard(CACHE), &spec.caches);
    let mut assignments = Vec::new();
    for (kind, list) in [("stream", &streams), ("cache", &caches)] {
        for sharded in list {
            assignments.extend(assign(kind, sharded, nodes));
        }
    }
    CatalogDraft {
        generation: 1,
        nodes: nodes
            .iter()
            .map(|node| DraftNode {
                id: node.node_id.as_str().to_string(),
                client: node.client_addr.to_string(),
                internal: node.internal_addr.to_string(),
            })
            .collect(),
        tenants: vec![DraftTenant {
            id: TENANT.to_string(),
            jwks_file: Some(format!("{KEY_ID}.jwks.json")),
            keys: Vec::new(),
        }],
        streams: streams.iter().map(sharded_draft).collect(),
        caches: caches.iter().map(sharded_draft).collect(),
        assignments,
    }
}

/// A caller may describe the standard stream or cache differently.
fn with_standard(standard: ShardedSpec, more: &[ShardedSpec]) -> Vec<ShardedSpec> {
    let replaced = more.iter().any(|s| s.name == standard.name);
    (!replaced)
        .then_some(standard)
        .into_iter()
        .chain(more.iter().cloned())
        .collect()
}

fn sharded_draft(sharded: &ShardedSpec) -> DraftSharded {
    DraftSharded {
        tenant: TENANT.to_string(),
        namespace: NAMESPACE.to_string(),
        name: sharded.name.clone(),
        shards: sharded.shards,
        replicas: sharded.replicas,
        routing: None,
        consistency: sharded.consistency.clone(),
        retention_bytes: sharded.retention_bytes,
        retention_age: None,
    }
}

fn assign<'a>(
    kind: &'a str,
    sharded: &'a ShardedSpec,
    nodes: &'a [NodePlan],
) -> impl Iterator<Item = DraftAssignment> + 'a {
    let leaders = sharded.leaders.iter().filter_map(|index| nodes.get(*index));
    leaders
        .cycle()
        .zip(0..sharded.shards)
        .map(move |(leader, shard)| DraftAssignment {
            kind: kind.to_string(),
            tenant: TENANT.to_string(),
            namespace: NAMESPACE.to_string(),
            name: sharded.name.clone(),
            shard,
            leader: leader.node_id.as_str().to_string(),
            replicas: Vec::new(),
            generation: None,
        })
}

/// Loopback ports that were free for UDP and TCP a moment ago, and were not handed out before by
/// this process. Another process may still take one first; the broker then says so.
///
/// They lie below the ports the system gives to sockets that ask for none: a client must not get
/// the port of a broker that is about to be started again.
pub fn free_ports(count: usize) -> std::io::Result<Vec<u16>> {
    static HANDED_OUT: Mutex<Option<HashSet<u16>>> = Mutex::new(None);
    let mut guard = HANDED_OUT.lock().unwrap_or_else(PoisonError::into_inner);
    let handed_out = guard.get_or_insert_with(HashSet::new);
    let candidates = LOWEST_PORT..first_ephemeral_port().max(LOWEST_PORT + 1);
    let mut ports = Vec::with_capacity(count);
    for _ in 0..50 * (count + 1) {
        if ports.len() == count {
            break;
        }
        let port = rand::random_range(candidates.clone());
        let is_free = UdpSocket::bind((Ipv4Addr::LOCALHOST, port)).is_ok()
            && TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok();
        if is_free && handed_out.insert(port) {
            ports.push(port);
        }
    }
    match ports.len() == count {
        true => Ok(ports),
        false => Err(std::io::Error::other("too few free loopback ports")),
    }
}

/// Services with fixed ports mostly lie below.
const LOWEST_PORT: u16 = 10_000;

/// Where the system's choice of ports begins.
fn first_ephemeral_port() -> u16 {
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range");
    let first = range
        .ok()
        .and_then(|range| range.split_whitespace().next()?.parse().ok());
    // The kernel's own default.
    first.unwrap_or(32_768)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::CatalogFile;

    fn spec(dir: &Path, nodes: usize) -> ClusterSpec {
        ClusterSpec::new(dir, nodes, BrokerProgram::serve_of("/bin/false"))
    }

    #[test]
    fn ports_are_distinct() {
        let ports = free_ports(40).unwrap();
        assert_eq!(ports.iter().collect::<HashSet<_>>().len(), 40);
        let more = free_ports(40).unwrap();
        assert!(more.iter().all(|p| !ports.contains(p)));
    }

    #[test]
    fn the_catalog_written_is_one_a_broker_accepts() {
        let dir = tempfile::tempdir().unwrap();
        let mut spec = spec(dir.path(), 3);
        spec.streams = vec![ShardedSpec::new("wide", 5).led_by(&[2, 0])];
        let plan = ClusterPlan::write(&spec).unwrap();
        let catalog = CatalogFile::load(&plan.catalog).unwrap();
        let catalog = catalog.catalog;
        assert_eq!(catalog.nodes().len(), 3);
        let wide = catalog
            .streams()
            .find(|s| s.name.as_str() == "wide")
            .unwrap();
        let leaders: Vec<&str> = wide
            .assignments
            .iter()
            .map(|a| catalog.node(a.leader()).node_id.as_str())
            .collect();
        assert_eq!(leaders, ["node-3", "node-1", "node-3", "node-1", "node-3"]);
        assert!(catalog
            .streams()
            .any(|s| s.name.as_str() == STREAM && s.shards() == 1));
        assert!(catalog.caches().any(|s| s.name.as_str() == CACHE));
        assert_eq!(catalog.tenant(TENANT).unwrap().keys[0].kid, KEY_ID);
    }

    #[test]
    fn a_second_start_keeps_the_authority_and_the_key() {
        let dir = tempfile::tempdir().unwrap();
        let first = ClusterPlan::write(&spec(dir.path(), 1)).unwrap();
        let ca = std::fs::read(&first.ca).unwrap();
        let second = ClusterPlan::write(&spec(dir.path(), 1)).unwrap();
        assert_eq!(std::fs::read(&second.ca).unwrap(), ca);
        assert_eq!(second.signing_key.x(), first.signing_key.x());
    }
}
