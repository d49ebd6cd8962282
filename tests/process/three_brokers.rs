//! Three real brokers that hold copies of one stream: followers and leaders die, the operator
//! replaces a leader, and nothing a majority was answered for is missing.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use bytes::Bytes;
use felix_uring::cluster::{ShardedSpec, NAMESPACE, TENANT};
use felix_uring::wire::client::messages::StartAt;
use felix_uring::wire::client::PublishOutcome;
use storage_uring::offline::Reader;
use storage_uring::{LogKind, LogName};

use crate::support::brokers::Brokers;
use crate::support::client::{Client, Stream};

/// A stream of one shard with three replicas, led by node 0 at first.
const COPIED: &str = "copied";
/// Long enough for a restarted broker on a busy machine.
const LATER: Duration = Duration::from_secs(60);

fn start(consistency: &str) -> Brokers {
    let brokers = Brokers::start_with(3, |spec| {
        spec.extra_args.push("--quorum-timeout-ms=3000".into());
        spec.streams.push(ShardedSpec {
            replicas: 3,
            consistency: Some(consistency.to_string()),
            ..ShardedSpec::new(COPIED, 1).led_by(&[0])
        });
    });
    brokers.wait_metric_for(0, "felix_replicated_shards_open", 1.0, LATER);
    brokers
}

async fn client(brokers: &Brokers, node: usize) -> (Client, Stream) {
    let client = Client::connect(brokers, node).await;
    let stream = client.stream(&brokers.token()).await;
    (client, stream)
}

/// The records of one node's copy, by offset; its broker must not be running.
fn copy_of(brokers: &Brokers, node: usize) -> (u64, Vec<Bytes>) {
    let dir = brokers.cluster.node(node).data_dir();
    let mut reader = Reader::open(dir, 2).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    let name = LogName {
        kind: LogKind::Stream,
        tenant: TENANT.into(),
        namespace: NAMESPACE.into(),
        name: COPIED.into(),
        shard: 0,
    };
    let log = reader.log(&name).expect("a copy");
    let (base, tail, id) = (log.base, log.tail, log.id);
    let mut records = Vec::new();
    let mut next = base;
    while next < tail {
        let batch = reader.read(id, next, 1 << 20).expect("readable");
        assert_eq!(batch.first_offset, next);
        assert!(!batch.records.is_empty());
        records.extend(
            batch
                .records
                .iter()
                .map(|record| Bytes::copy_from_slice(record)),
        );
        next = batch.next_offset;
    }
    (base, records)
}

/// Stops all brokers and compares the copies byte for byte.
fn assert_copies_equal(brokers: &mut Brokers) -> Vec<Bytes> {
    brokers.cluster.stop().unwrap_or_else(|e| panic!("{e}"));
    let first = copy_of(brokers, 0);
    for node in [1, 2] {
        let copy = copy_of(brokers, node);
        assert_eq!(copy.0, first.0, "base of node {node}");
        assert_eq!(copy.1.len(), first.1.len(), "records of node {node}");
        assert!(copy.1 == first.1, "node {node} holds other bytes");
    }
    first.1
}

/// The copied shard as a node reports it.
fn shard_of(brokers: &Brokers, node: usize) -> serde_json::Value {
    let status = brokers.cluster.node(node).status();
    let status = status.unwrap_or_else(|e| panic!("{e}"));
    let shards = status["cores"][0]["shards"].as_array().cloned();
    let leads = format!("stream:{TENANT}/{NAMESPACE}/{COPIED}#0");
    let follows = format!("{leads}/stream");
    let found = shards.unwrap_or_default().into_iter();
    let mut found = found.filter(|shard| {
        let name = shard["shard"].as_str().unwrap_or_default();
        name == follows || (name == leads && shard["role"] == "leader")
    });
    found.next().unwrap_or_default()
}

/// Waits until the leader knows that every copy is level with its own, at least `least` records.
async fn wait_level(brokers: &Brokers, leader: usize, least: u64) {
    let deadline = Instant::now() + LATER;
    loop {
        let status = brokers.cluster.node(leader).status();
        let status = status.unwrap_or_else(|e| panic!("{e}"));
        let replication = &status["cores"][0]["replication"];
        let shard = shard_of(brokers, leader);
        let is_level = replication["lag_records"] == 0
            && replication["halted"] == serde_json::json!([])
            && shard["durable_offset"].as_u64() >= Some(least)
            && shard["opening"] == "open";
        if is_level {
            return;
        }
        assert!(
            Instant::now() < deadline,
            "not level: {replication} {shard}"
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Gives the copied shard another leader at a higher generation.
fn replace_leader(brokers: &Brokers, to: &str, generation: u64) {
    let path = brokers.cluster.catalog();
    let text = std::fs::read_to_string(path).expect("the catalog");
    let mut catalog: toml::Table = text.parse().expect("TOML");
    let assignments = catalog["assignment"].as_array_mut().expect("assignments");
    let found = assignments
        .iter_mut()
        .filter_map(toml::Value::as_table_mut)
        .find(|table| table["name"].as_str() == Some(COPIED))
        .expect("the stream's shard");
    found.insert("leader".into(), to.into());
    found.insert("generation".into(), (generation as i64).into());
    let fresh = path.with_extension("new");
    std::fs::write(&fresh, catalog.to_string()).expect("a file");
    std::fs::rename(&fresh, path).expect("a rename");
}

/// Publishes `count` records that must be taken.
async fn publish(stream: &mut Stream, prefix: &str, count: usize) {
    for nth in 0..count {
        stream.must_publish(COPIED, format!("{prefix}-{nth}")).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_follower_costs_nothing_and_comes_back_level() {
    let mut brokers = start("quorum");
    let (_client, mut stream) = client(&brokers, 0).await;
    publish(&mut stream, "all", 30).await;
    brokers.cluster.node_mut(2).kill().expect("killed");
    publish(&mut stream, "without", 60).await;
    brokers.start_node(2);
    publish(&mut stream, "again", 30).await;
    wait_level(&brokers, 0, 120).await;
    let records = assert_copies_equal(&mut brokers);
    assert_eq!(records.len(), 120);
    assert_eq!(records[30], "without-0");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_majority_nothing_is_acknowledged_and_it_heals() {
    let mut brokers = start("quorum");
    let (_client, mut stream) = client(&brokers, 0).await;
    publish(&mut stream, "all", 5).await;
    for follower in [1, 2] {
        brokers.cluster.node_mut(follower).kill().expect("killed");
    }
    let outcome = stream.publish(COPIED, b"alone").await;
    let (code, _) = crate::support::client::refusal(outcome);
    assert_eq!(code, "quorum_timeout");
    brokers.start_node(1);
    // The record of unknown outcome commits with what comes after it.
    stream.publish_until_taken(COPIED, LATER).await;
    brokers.start_node(2);
    wait_level(&brokers, 0, 7).await;
    let records = assert_copies_equal(&mut brokers);
    assert_eq!(records[5], "alone");
}

/// What was acknowledged, by offset.
type Acked = BTreeMap<u64, String>;

/// Publishes through a node until it is told to stop or the connection ends; what was acknowledged.
async fn publish_until(
    mut stream: Stream,
    prefix: &'static str,
    mut stop: tokio::sync::watch::Receiver<bool>,
) -> Acked {
    let mut acked = Acked::new();
    for nth in 0.. {
        let record = format!("{prefix}-{nth}");
        let outcome = tokio::select! {
            outcome = stream.publish(COPIED, &record) => outcome,
            _ = stop.changed() => break,
        };
        match outcome {
            PublishOutcome::Accepted { offset } => {
                acked.insert(offset.expect("an offset"), record);
            }
            PublishOutcome::Failed(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
    acked
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_leader_is_replaced_and_no_acknowledged_record_is_missing() {
    let mut brokers = start("quorum");
    // Forwarded publishes: node 1 does not own the shard.
    let (_client, stream) = client(&brokers, 1).await;
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let publisher = tokio::spawn(publish_until(stream, "before", stopped));
    brokers.wait_metric_for(1, "felix_publishes_acked_total", 100.0, LATER);
    brokers.cluster.node_mut(0).kill().expect("killed");
    tokio::time::sleep(Duration::from_millis(300)).await;
    stop.send(true).expect("it runs");
    let acked = publisher.await.expect("no panic");
    assert!(acked.len() >= 100, "{}", acked.len());

    // The operator's choice: the copy that reaches furthest.
    let reach = |node: usize| shard_of(&brokers, node)["next_offset"].as_u64();
    let deadline = Instant::now() + LATER;
    let furthest = loop {
        let (b, c) = (reach(1), reach(2));
        if b.max(c) > acked.keys().next_back().copied() {
            break if c > b { 2 } else { 1 };
        }
        assert!(Instant::now() < deadline, "{b:?} {c:?} {}", acked.len());
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    replace_leader(&brokers, &format!("node-{}", furthest + 1), 2);
    brokers.wait_metric_for(furthest, "felix_replicated_shards_open", 1.0, LATER);

    let (reader, mut stream) = client(&brokers, furthest).await;
    publish(&mut stream, "after", 20).await;
    let token = brokers.token();
    let mut events = reader.subscribe(&token, COPIED, StartAt::Earliest).await;
    let needed = acked.len() + 20;
    let mut seen: BTreeMap<u64, Bytes> = BTreeMap::new();
    while seen.len() < needed || !acked.keys().all(|offset| seen.contains_key(offset)) {
        seen.extend(events.take(1).await);
    }
    for (offset, record) in &acked {
        assert_eq!(
            seen.get(offset).map(|b| &b[..]),
            Some(record.as_bytes()),
            "at {offset}"
        );
    }

    // The old leader returns as a follower; what only it had is gone, and the copies are equal.
    brokers.start_node(0);
    wait_level(&brokers, furthest, needed as u64).await;
    let records = assert_copies_equal(&mut brokers);
    for (offset, record) in &acked {
        assert_eq!(records[*offset as usize], record.as_str());
    }
    assert_eq!(
        records
            .iter()
            .filter(|record| record.starts_with(b"after"))
            .count(),
        20
    );
}
