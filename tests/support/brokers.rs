//! Clusters of real broker processes with two streams whose owners are known.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use felix_uring::auth::{mint, MintRequest};
use felix_uring::cluster::{
    open_or_create_signing_key, BrokerProgram, Cluster, ClusterSpec, ShardedSpec, KEY_ID, TENANT,
};
use tempfile::TempDir;

use super::netns::Net;
use super::transport::Identity;

/// A stream of one shard led by node 0.
pub const FIRST: &str = "first";
/// A stream of one shard led by node 1, so that node 0 forwards to it.
pub const SECOND: &str = "second";

/// The program under test.
pub const BROKER: &str = env!("CARGO_BIN_EXE_felix-uring");

/// A directory on the disk the build is on: the system's own may be in memory, where direct
/// writes do not work everywhere.
pub fn scratch() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory")
}

/// Flags that keep a broker small: it starts in a fraction of a second.
pub fn small() -> Vec<String> {
    ["--prewritten-segments=1", "--reserve-bytes=67108864"]
        .map(String::from)
        .to_vec()
}

/// Brokers and the directory they live in.
pub struct Brokers {
    pub cluster: Cluster,
    dir: TempDir,
}

impl Brokers {
    /// What every test starts from.
    pub fn spec(dir: &TempDir, nodes: usize) -> ClusterSpec {
        let mut spec = ClusterSpec::new(dir.path(), nodes, BrokerProgram::serve_of(BROKER));
        spec.extra_args = small();
        spec.env = vec![("FELIX_SEGMENT_BYTES".into(), "12582912".into())];
        spec.streams = vec![
            ShardedSpec::new(FIRST, 1).led_by(&[0]),
            ShardedSpec::new(SECOND, 1).led_by(&[nodes.min(2) - 1]),
        ];
        spec
    }

    /// Starts `nodes` brokers.
    pub fn start(nodes: usize) -> Self {
        Self::start_with(nodes, |_| {})
    }

    /// Starts brokers of an adapted specification.
    pub fn start_with(nodes: usize, adapt: impl FnOnce(&mut ClusterSpec)) -> Self {
        let dir = scratch();
        let mut spec = Self::spec(&dir, nodes);
        adapt(&mut spec);
        let cluster = Cluster::start(&spec).unwrap_or_else(|e| panic!("{e}"));
        Self { cluster, dir }
    }

    /// Starts a broker on each of the first `nodes` hosts of a network. Called, as all that follows with
    /// these brokers, in the hub of it.
    pub fn start_in(net: &Net, nodes: usize, adapt: impl FnOnce(&mut ClusterSpec)) -> Self {
        Self::start_with(nodes, |spec| {
            spec.sites = net.sites();
            adapt(spec);
        })
    }

    /// Writes files and starts nothing.
    pub fn prepare_with(nodes: usize, adapt: impl FnOnce(&mut ClusterSpec)) -> Self {
        let dir = scratch();
        let mut spec = Self::spec(&dir, nodes);
        adapt(&mut spec);
        let cluster = Cluster::prepare(&spec).unwrap_or_else(|e| panic!("{e}"));
        Self { cluster, dir }
    }

    /// Starts one node and waits until it is ready.
    pub fn start_node(&mut self, index: usize) {
        let node = self.cluster.node_mut(index);
        node.start().unwrap_or_else(|e| panic!("{e}"));
        node.wait_ready().unwrap_or_else(|e| panic!("{e}"));
    }

    /// Whether the process is there.
    pub fn assert_alive(&mut self, index: usize) {
        let alive = self.cluster.node_mut(index).check_alive();
        alive.unwrap_or_else(|e| panic!("{e}"));
    }

    /// A file of one node's directory.
    pub fn file(&self, index: usize, name: &str) -> PathBuf {
        let node = format!("node-{}", index + 1);
        self.dir.path().join(node).join(name)
    }

    /// The certificate a node shows to its peers.
    pub fn peer_identity(&self, index: usize) -> Identity {
        Identity::read(
            &self.file(index, "peer-cert.pem"),
            &self.file(index, "peer-key.pem"),
        )
    }

    /// Rewrites the catalog; every broker that runs takes it up.
    pub fn edit_catalog(&self, edit: impl FnOnce(&mut toml::Table)) {
        let path = self.cluster.catalog();
        let text = std::fs::read_to_string(path).expect("the catalog");
        let mut catalog: toml::Table = text.parse().expect("TOML");
        edit(&mut catalog);
        let fresh = path.with_extension("new");
        std::fs::write(&fresh, catalog.to_string()).expect("a file");
        std::fs::rename(&fresh, path).expect("a rename");
    }

    /// Has the other brokers dial `node` somewhere else than it listens.
    pub fn set_internal_addr(&self, node: &str, addr: std::net::SocketAddr) {
        self.edit_catalog(|catalog| {
            let nodes = catalog
                .get_mut("node")
                .and_then(toml::Value::as_array_mut)
                .expect("nodes");
            let found = nodes
                .iter_mut()
                .filter_map(toml::Value::as_table_mut)
                .find(|table| table.get("id").and_then(toml::Value::as_str) == Some(node))
                .expect("the node");
            found.insert("internal".into(), addr.to_string().into());
        });
    }

    /// A token that allows everything.
    pub fn token(&self) -> String {
        let token = self.cluster.token(Duration::from_secs(3600));
        token.unwrap_or_else(|e| panic!("{e}"))
    }

    /// A token of the tenant's own key with the claims of `adapt`.
    pub fn token_of(&self, adapt: impl FnOnce(&mut MintRequest)) -> String {
        let now_s = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |since| since.as_secs());
        let mut request = MintRequest {
            tenant: TENANT.to_string(),
            sub: "process-tests".to_string(),
            iat: now_s,
            exp: now_s + 3600,
            nbf: None,
            kid: Some(KEY_ID.to_string()),
            perms: vec![format!("stream.publish:stream:{TENANT}/*")],
        };
        adapt(&mut request);
        let key = open_or_create_signing_key(self.cluster.signing_key()).expect("the key");
        mint(&request, &key).expect("a token")
    }

    /// The sum of a metric over its cores. `name` is as Prometheus prints it, labels included.
    pub fn metric(&self, index: usize, name: &str) -> f64 {
        let node = self.cluster.node(index);
        let text = node.metrics().unwrap_or_else(|e| panic!("{e}"));
        sum_of(&text, name)
    }

    /// Waits until a metric is at least `least`.
    pub fn wait_metric(&self, index: usize, name: &str, least: f64) {
        self.wait_metric_for(index, name, least, super::SOON);
    }

    /// The same for something that takes its time.
    pub fn wait_metric_for(&self, index: usize, name: &str, least: f64, limit: Duration) {
        let deadline = Instant::now() + limit;
        loop {
            let value = self.metric(index, name);
            if value >= least {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "{name} is {value}, not {least}, on node {index}"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// What a node has logged.
    pub fn log(&self, index: usize) -> String {
        std::fs::read_to_string(self.cluster.node(index).log_path()).unwrap_or_default()
    }
}

impl Drop for Brokers {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for node in self.cluster.nodes() {
                eprintln!("--- log of {}:\n{}", node.node_id(), node.log_tail());
            }
        }
    }
}

/// Adds up the lines of `name`; with labels given only the lines that carry them all.
pub fn sum_of(text: &str, name: &str) -> f64 {
    let (family, labels) = match name.split_once('{') {
        None => (name, Vec::new()),
        Some((family, rest)) => (family, rest.trim_end_matches('}').split(',').collect()),
    };
    let mut found = false;
    let sum = text
        .lines()
        .filter(|line| {
            let rest = line.strip_prefix(family);
            rest.is_some_and(|rest| rest.starts_with(' ') || rest.starts_with('{'))
                && labels.iter().all(|label| line.contains(label))
        })
        .filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok())
        .inspect(|_| found = true)
        .sum();
    assert!(found, "no metric {name}");
    sum
}
