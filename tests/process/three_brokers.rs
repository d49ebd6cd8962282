//! Three real brokers that hold copies of one stream: followers and leaders die, the operator
//! replaces a leader, and nothing a majority was answered for is missing.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use bytes::Bytes;
use felix_uring::wire::client::messages::StartAt;
use storage_uring::LogKind;

use crate::support::acked::keep_publishing;
use crate::support::brokers::Brokers;
use crate::support::client::Stream;
use crate::support::replica_set::{
    assert_copies_equal, assign, client, reach, replicated, wait_level, Log, LATER,
};

/// A stream of one shard with three replicas, led by node 0 at first.
const COPIED: &str = "copied";

const LOG: Log = Log::of(LogKind::Stream, COPIED);

fn start(consistency: &str) -> Brokers {
    let brokers = Brokers::start_with(3, |spec| {
        spec.extra_args.push("--quorum-timeout-ms=3000".into());
        spec.streams.push(replicated(COPIED, 3, consistency));
    });
    brokers.wait_metric_for(0, "felix_replicated_shards_open", 1.0, LATER);
    brokers
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
    wait_level(&brokers, 0, LOG, 120).await;
    let records = assert_copies_equal(&mut brokers, &[0, 1, 2], LOG).records;
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
    wait_level(&brokers, 0, LOG, 7).await;
    let records = assert_copies_equal(&mut brokers, &[0, 1, 2], LOG).records;
    assert_eq!(records[5], "alone");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_leader_is_replaced_and_no_acknowledged_record_is_missing() {
    let mut brokers = start("quorum");
    // Forwarded publishes: node 1 does not own the shard.
    let (_client, stream) = client(&brokers, 1).await;
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let publisher = tokio::spawn(keep_publishing(stream, COPIED, "before", stopped));
    brokers.wait_metric_for(1, "felix_publishes_acked_total", 100.0, LATER);
    brokers.cluster.node_mut(0).kill().expect("killed");
    tokio::time::sleep(Duration::from_millis(300)).await;
    stop.send(true).expect("it runs");
    let acked = publisher.await.expect("no panic");
    assert!(acked.len() >= 100, "{}", acked.len());

    // The operator's choice: the copy that reaches furthest.
    let deadline = Instant::now() + LATER;
    let furthest = loop {
        let (b, c) = (reach(&brokers, 1, LOG), reach(&brokers, 2, LOG));
        if Some(b.max(c)) > acked.keys().next_back().copied() {
            break if c > b { 2 } else { 1 };
        }
        assert!(Instant::now() < deadline, "{b} {c} {}", acked.len());
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    let others = [0, 1, 2].into_iter().filter(|node| *node != furthest);
    let nodes: Vec<usize> = std::iter::once(furthest).chain(others).collect();
    assign(&brokers, "stream", COPIED, 2, &nodes);
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
    wait_level(&brokers, furthest, LOG, needed as u64).await;
    let records = assert_copies_equal(&mut brokers, &[0, 1, 2], LOG).records;
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
