//! Replicated streams and caches of real brokers: their copies byte by byte, their leaders' view of them,
//! and what an operator writes into the catalog.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use bytes::Bytes;
use felix_uring::cluster::{ShardedSpec, NAMESPACE, TENANT};
use felix_uring::wire::client::messages::StartAt;
use storage_uring::offline::{OfflineLog, Reader};
use storage_uring::{LogKind, LogName};

use super::brokers::Brokers;
use super::client::{Client, Stream};

/// Long enough for a restarted broker on a busy machine.
pub const LATER: Duration = Duration::from_secs(60);

/// One log of one shard.
#[derive(Debug, Clone, Copy)]
pub struct Log {
    pub kind: LogKind,
    pub name: &'static str,
    pub shard: u32,
}

impl Log {
    pub const fn of(kind: LogKind, name: &'static str) -> Self {
        Self {
            kind,
            name,
            shard: 0,
        }
    }

    fn full_name(self) -> LogName {
        LogName {
            kind: self.kind,
            tenant: TENANT.into(),
            namespace: NAMESPACE.into(),
            name: self.name.into(),
            shard: self.shard,
        }
    }
}

/// One copy of a log, as it is on the disk of a broker that does not run.
#[derive(Debug, PartialEq, Eq)]
pub struct Copy {
    pub base: u64,
    pub records: Vec<Bytes>,
    /// Generation and start of every leadership.
    pub history: Vec<(u64, u64, String)>,
    pub accepted: u64,
}

impl Copy {
    pub fn tail(&self) -> u64 {
        self.base + self.records.len() as u64
    }

    /// The record at an offset.
    pub fn at(&self, offset: u64) -> Option<&Bytes> {
        let place = usize::try_from(offset.checked_sub(self.base)?).ok()?;
        self.records.get(place)
    }
}

/// A stream or cache of one shard with a holder on each of the first `replicas` nodes.
pub fn replicated(name: &str, replicas: u16, consistency: &str) -> ShardedSpec {
    ShardedSpec {
        replicas,
        consistency: Some(consistency.to_string()),
        ..ShardedSpec::new(name, 1).led_by(&[0])
    }
}

pub async fn client(brokers: &Brokers, node: usize) -> (Client, Stream) {
    let client = Client::connect(brokers, node).await;
    let stream = client.stream(&brokers.token()).await;
    (client, stream)
}

/// One node's copy of a log; its broker must not be running. `None` when it has none.
pub fn copy_of(brokers: &Brokers, node: usize, log: Log) -> Option<Copy> {
    let dir = brokers.cluster.node(node).data_dir();
    let mut reader = Reader::open(dir, 2).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    let found = reader.log(&log.full_name())?;
    let (base, tail, id) = (found.base, found.tail, found.id);
    let history = found.history.iter();
    let history = history
        .map(|entry| (entry.generation, entry.start, entry.leader.to_string()))
        .collect();
    let accepted = found.accepted;
    let mut records = Vec::new();
    let mut next = base;
    while next < tail {
        let batch = reader.read(id, next, 1 << 20).expect("readable");
        assert_eq!(batch.first_offset, next);
        assert!(!batch.records.is_empty());
        let read = batch.records.iter();
        records.extend(read.map(|record| Bytes::copy_from_slice(record)));
        next = batch.next_offset;
    }
    Some(Copy {
        base,
        records,
        history,
        accepted,
    })
}

/// Stops all brokers and compares the copies of a log on `nodes` byte for byte; the first one's.
pub fn assert_copies_equal(brokers: &mut Brokers, nodes: &[usize], log: Log) -> Copy {
    brokers.cluster.stop().unwrap_or_else(|e| panic!("{e}"));
    equal_copies(brokers, nodes, log)
}

/// The same of brokers that are stopped already.
pub fn equal_copies(brokers: &Brokers, nodes: &[usize], log: Log) -> Copy {
    let copy = |node| {
        let copy = copy_of(brokers, node, log);
        copy.unwrap_or_else(|| panic!("node {node} has no copy of {log:?}"))
    };
    let first = copy(nodes[0]);
    for node in &nodes[1..] {
        let other = copy(*node);
        let tails = (first.tail(), other.tail());
        assert_eq!(tails.0, tails.1, "tail of {log:?} on node {node}");
        let base = first.base.max(other.base);
        let differs = (base..tails.0).find(|offset| first.at(*offset) != other.at(*offset));
        assert_eq!(differs, None, "{log:?} on node {node}");
    }
    first
}

/// How a node reports one log of a shard, as its leader or one of its followers.
pub fn status_of(brokers: &Brokers, node: usize, log: Log) -> serde_json::Value {
    let status = brokers.cluster.node(node).status();
    let status = status.unwrap_or_else(|e| panic!("{e}"));
    let (kind, word) = match log.kind {
        LogKind::Stream => ("stream", "stream"),
        LogKind::Cache => ("cache", "cache"),
        LogKind::Cursors => ("stream", "group_cursors"),
        LogKind::DeadLetters => ("stream", "group_dead_letters"),
        LogKind::Counters => ("cache", "counters"),
    };
    let leads = format!("{kind}:{TENANT}/{NAMESPACE}/{}#{}", log.name, log.shard);
    let follows = format!("{leads}/{word}");
    let cores = status["cores"].as_array().cloned().unwrap_or_default();
    let shards = cores
        .iter()
        .flat_map(|core| core["shards"].as_array().cloned().unwrap_or_default());
    let mut found = shards.filter(|shard| {
        let name = shard["shard"].as_str().unwrap_or_default();
        name == follows || (name == leads && shard["role"] == "leader")
    });
    found.next().unwrap_or_default()
}

/// One past the last record of a node's copy, as it reports it.
pub fn reach(brokers: &Brokers, node: usize, log: Log) -> u64 {
    let status = status_of(brokers, node, log);
    status["next_offset"].as_u64().unwrap_or(0)
}

/// Waits until a copy reaches at least `least`.
pub async fn wait_reach(brokers: &Brokers, node: usize, log: Log, least: u64) {
    let deadline = Instant::now() + LATER;
    while reach(brokers, node, log) < least {
        let status = status_of(brokers, node, log);
        assert!(Instant::now() < deadline, "{log:?} on {node}: {status}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Waits until the leader knows that every copy is level with its own, at least `least` records.
pub async fn wait_level(brokers: &Brokers, leader: usize, log: Log, least: u64) {
    let deadline = Instant::now() + LATER;
    loop {
        let status = brokers.cluster.node(leader).status();
        let status = status.unwrap_or_else(|e| panic!("{e}"));
        let cores = status["cores"].as_array().cloned().unwrap_or_default();
        let lags = |core: &serde_json::Value| {
            let replication = &core["replication"];
            replication["lag_records"] != 0 || replication["halted"] != serde_json::json!([])
        };
        let shard = status_of(brokers, leader, log);
        let is_level = !cores.iter().any(lags)
            && shard["durable_offset"].as_u64() >= Some(least)
            && shard["opening"] == "open";
        if is_level {
            return;
        }
        assert!(Instant::now() < deadline, "not level: {shard} {status}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Waits until a node leads the shard and takes writes.
pub async fn wait_open(brokers: &Brokers, leader: usize, log: Log) {
    let deadline = Instant::now() + LATER;
    loop {
        let shard = status_of(brokers, leader, log);
        if shard["opening"] == "open" {
            return;
        }
        assert!(
            Instant::now() < deadline,
            "node {leader} does not open: {shard}"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Waits until a node leads the shard at a generation and takes writes.
pub async fn wait_open_at(
    brokers: &Brokers,
    leader: usize,
    log: Log,
    generation: u64,
) -> serde_json::Value {
    let deadline = Instant::now() + LATER;
    loop {
        let shard = status_of(brokers, leader, log);
        if shard["opening"] == "open" && shard["generation"] == generation {
            return shard;
        }
        assert!(
            Instant::now() < deadline,
            "not open at {generation}: {shard}"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Waits until all that a leader held when it opened at a generation is on a majority of its holders.
pub async fn wait_mark_past_all(brokers: &Brokers, leader: usize, log: Log, generation: u64) {
    let held = wait_open_at(brokers, leader, log, generation).await;
    let held = held["next_offset"].as_u64().expect("an offset");
    let deadline = Instant::now() + LATER;
    loop {
        let shard = status_of(brokers, leader, log);
        if shard["mark"].as_u64() >= Some(held) {
            return;
        }
        assert!(Instant::now() < deadline, "no mark at {held}: {shard}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Gives shard 0 of a stream or cache (`kind` says which) a leader and holders at a generation.
pub fn assign(brokers: &Brokers, kind: &str, name: &str, generation: u64, nodes: &[usize]) {
    let id = |node: &usize| format!("node-{}", node + 1);
    brokers.edit_catalog(|catalog| {
        let find = |catalog: &mut toml::Table, table: &str| -> usize {
            let tables = catalog[table].as_array().expect("tables");
            let is_it = |entry: &toml::Value| {
                let is_kind = table != "assignment"
                    || entry
                        .get("kind")
                        .and_then(toml::Value::as_str)
                        .unwrap_or("stream")
                        == kind;
                is_kind && entry.get("name").and_then(toml::Value::as_str) == Some(name)
            };
            tables.iter().position(is_it).expect("an entry")
        };
        let at = find(catalog, "assignment");
        let assignment = catalog["assignment"][at].as_table_mut().expect("a table");
        assignment.insert("leader".into(), id(&nodes[0]).into());
        assignment.insert("generation".into(), (generation as i64).into());
        let holders: Vec<toml::Value> = nodes.iter().map(|node| id(node).into()).collect();
        assignment.insert("replicas".into(), holders.into());
        let at = find(catalog, kind);
        let sharded = catalog[kind][at].as_table_mut().expect("a table");
        sharded.insert("replicas".into(), (nodes.len() as i64).into());
    });
}

/// Every record a reader of the node's shard is shown, until there are `count`.
pub async fn read_all(
    brokers: &Brokers,
    node: usize,
    name: &str,
    count: usize,
) -> Vec<(u64, Bytes)> {
    let (reader, _stream) = client(brokers, node).await;
    let mut events = reader
        .subscribe(&brokers.token(), name, StartAt::Earliest)
        .await;
    let mut seen = Vec::new();
    while seen.len() < count {
        seen.extend(events.take(1).await);
    }
    seen
}

/// The leaderships in a log's history, oldest first, as they are on the disk of a broker that may run.
#[derive(Debug)]
pub struct History(Vec<u64>);

impl History {
    /// History and tail of a node's copy.
    pub fn of(brokers: &Brokers, node: usize, log: Log) -> (Self, u64) {
        let (_, found) = open_copy(brokers, node, log);
        let generations = found.history.iter().map(|entry| entry.generation);
        (Self(generations.collect()), found.tail)
    }

    /// The newest generation.
    pub fn newest(&self) -> Option<u64> {
        self.0.last().copied()
    }

    /// A node's records from an offset on; its broker may run.
    pub fn records(brokers: &Brokers, node: usize, log: Log, from: u64) -> BTreeMap<u64, Bytes> {
        let (mut reader, found) = open_copy(brokers, node, log);
        let mut next = from.max(found.base);
        let mut records = BTreeMap::new();
        while next < found.tail {
            let batch = reader.read(found.id, next, 1 << 20).expect("readable");
            for (offset, record) in (batch.first_offset..).zip(&batch.records) {
                records.insert(offset, Bytes::copy_from_slice(record));
            }
            next = batch.next_offset;
        }
        records
    }
}

/// A copy that must be there.
fn open_copy(brokers: &Brokers, node: usize, log: Log) -> (Reader, OfflineLog) {
    let dir = brokers.cluster.node(node).data_dir();
    let reader = Reader::open(dir, 2).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    let found = reader.log(&log.full_name());
    let found = found.unwrap_or_else(|| panic!("node {node} has no copy of {log:?}"));
    (reader, found)
}
