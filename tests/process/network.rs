//! Forwarding over networks that misbehave: every request is answered once, nothing is stored twice, and
//! the link comes back when the network does.
//!
//! `FELIX_NETWORK_BATCHES` (24) sets how many batches go over each path.

use std::time::{Duration, Instant};

use felix_uring::wire::client::{PublishOutcome, RetryClass};

use crate::support::brokers::{Brokers, SECOND};
use crate::support::client::{Client, Stream};
use crate::support::udp_relay::{Path, UdpRelay};
use crate::support::SOON;

const RECORD_BYTES: usize = 8 << 10;
const RECORDS: usize = 4;
/// Lossy paths are slow, not stuck.
const PATIENCE: Duration = Duration::from_secs(30);

fn batches() -> usize {
    let set = std::env::var("FELIX_NETWORK_BATCHES").ok();
    set.map_or(24, |n| n.parse().expect("a number"))
}

/// Two brokers; what the first sends to the second goes through a relay.
fn with_relay(seed: u64, flags: &[&str]) -> (Brokers, UdpRelay) {
    let mut brokers = Brokers::prepare_with(2, |spec| {
        spec.extra_args
            .extend(flags.iter().map(|flag| flag.to_string()));
    });
    let relay = UdpRelay::start(brokers.cluster.node(1).internal_addr(), seed);
    brokers.set_internal_addr("node-2", relay.addr());
    brokers.start_node(1);
    brokers.start_node(0);
    (brokers, relay)
}

/// Sends batches all at once; their offsets in the order in which they were sent.
async fn publish_all(stream: &mut Stream, what: &str) -> Vec<u64> {
    let payloads = vec![vec![0x5au8; RECORD_BYTES]; RECORDS];
    let mut sent = Vec::new();
    for _ in 0..batches() {
        sent.push(stream.start_publish(SECOND, &payloads).await);
    }
    let mut offsets = vec![None; sent.len()];
    let started = Instant::now();
    for _ in 0..sent.len() {
        let ack = tokio::time::timeout(PATIENCE, stream.answers.ack()).await;
        let ack = ack.unwrap_or_else(|_| panic!("{what}: no answer after {:?}", started.elapsed()));
        let at = sent.iter().position(|id| *id == ack.request_id);
        let at = at.unwrap_or_else(|| panic!("{what}: {ack:?} answers nothing"));
        match ack.outcome {
            PublishOutcome::Accepted { offset } => offsets[at] = offset,
            PublishOutcome::Failed(refusal) => panic!("{what}: {refusal:?}"),
        }
    }
    offsets.into_iter().map(|o| o.expect("an offset")).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forwards_survive_loss_delay_reordering_and_doubles() {
    let (brokers, relay) = with_relay(7, &[]);
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.stream(&token).await;
    let millis = Duration::from_millis;
    let paths = [
        ("as it is", Path::default()),
        (
            "0.1 % lost",
            Path {
                loss_per_mille: 1,
                ..Path::default()
            },
        ),
        (
            "1 % lost",
            Path {
                loss_per_mille: 10,
                delay: millis(2),
                ..Path::default()
            },
        ),
        (
            "5 % lost",
            Path {
                loss_per_mille: 50,
                delay: millis(1),
                ..Path::default()
            },
        ),
        (
            "20 ms away",
            Path {
                delay: millis(10),
                ..Path::default()
            },
        ),
        (
            "a third late and doubled",
            Path {
                late_per_mille: 333,
                doubled_per_mille: 333,
                ..Path::default()
            },
        ),
        (
            "everything at once",
            Path {
                loss_per_mille: 20,
                late_per_mille: 100,
                doubled_per_mille: 100,
                delay: millis(2),
                ..Path::default()
            },
        ),
    ];
    let mut next = 0;
    for (what, path) in paths {
        relay.set(path);
        let offsets = publish_all(&mut stream, what).await;
        // In the order sent, each once, nothing in between.
        let expected: Vec<u64> = (0..offsets.len())
            .map(|nth| next + (nth * RECORDS) as u64)
            .collect();
        assert_eq!(offsets, expected, "{what}");
        next += (offsets.len() * RECORDS) as u64;
    }
    let (_, dropped) = relay.counts();
    assert!(dropped > 0, "the relay lost nothing");
    // Ordinary loss is not a smaller path, and none of it ended the link.
    let path = path_of(&brokers, 0);
    assert!(
        path["mtu_bytes"].as_u64().expect("a size") > 1400,
        "packets shrank: {path}"
    );
    assert_eq!(
        brokers.metric(1, "felix_connections_opened_total{role=\"peer_listener\"}"),
        1.0
    );
}

/// The path of the one link of a broker, from a report that is up to date.
fn path_of(brokers: &Brokers, node: usize) -> serde_json::Value {
    let deadline = Instant::now() + SOON;
    loop {
        let status = brokers.cluster.node(node).status();
        let status = status.unwrap_or_else(|e| panic!("{e}"));
        let path = &status["peers"][0]["path"];
        if path.is_object() {
            return path.clone();
        }
        assert!(Instant::now() < deadline, "no path in {status}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_path_that_shrinks_carries_on_with_smaller_packets() {
    let (brokers, relay) = with_relay(8, &[]);
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.stream(&token).await;
    // Until the larger size has been found.
    let deadline = Instant::now() + SOON;
    while relay.take_largest() <= 1400 {
        publish_all(&mut stream, "wide").await;
        assert!(Instant::now() < deadline, "no packet over 1400 bytes");
    }
    relay.set(Path {
        max_bytes: Some(1280),
        ..Path::default()
    });
    let started = Instant::now();
    publish_all(&mut stream, "narrow").await;
    assert!(
        started.elapsed() < Duration::from_secs(20),
        "{:?}",
        started.elapsed()
    );
    relay.take_largest();
    publish_all(&mut stream, "still narrow").await;
    let largest = relay.take_largest();
    assert!((1..=1280).contains(&largest), "{largest}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_changed_source_port_keeps_the_link() {
    let (brokers, relay) = with_relay(9, &[]);
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.stream(&token).await;
    for round in 0..5 {
        publish_all(&mut stream, &format!("round {round}")).await;
        relay.change_ports();
    }
    publish_all(&mut stream, "after the last change").await;
    let opened = "felix_connections_opened_total{role=\"peer_listener\"}";
    assert_eq!(brokers.metric(1, opened), 1.0, "the link was made again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cut_in_either_direction_ends_in_unknown_and_heals() {
    // Short, so that the test is; the default is four seconds.
    let flags = [
        "--peer-idle-timeout-ms=1200",
        "--peer-keep-alive-ms=300",
        "--peer-request-timeout-ms=8000",
    ];
    let (brokers, relay) = with_relay(10, &flags);
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.stream(&token).await;
    for (what, forth, back) in [("forth", true, false), ("back", false, true)] {
        stream.publish_until_taken(SECOND, SOON).await;
        relay.set(Path {
            cut_forth: forth,
            cut_back: back,
            ..Path::default()
        });
        let started = Instant::now();
        let mut sent = Vec::new();
        for _ in 0..5 {
            sent.push(stream.start_publish(SECOND, &[what]).await);
        }
        for _ in 0..5 {
            let ack = stream.answers.ack().await;
            assert!(sent.contains(&ack.request_id), "{ack:?}");
            sent.retain(|id| *id != ack.request_id);
            match ack.outcome {
                PublishOutcome::Failed(refusal) => {
                    assert_eq!(refusal.class(), Some(RetryClass::OutcomeUnknown), "{what}");
                }
                PublishOutcome::Accepted { .. } => panic!("{what}: answered through a cut"),
            }
        }
        let took = started.elapsed();
        // Not before the peer was silent for the timeout, and well before the request timeout.
        assert!(took > Duration::from_millis(600), "{what}: {took:?}");
        assert!(took < Duration::from_secs(8), "{what}: {took:?}");
        relay.set(Path::default());
        let (took, _) = stream.publish_until_taken(SECOND, SOON).await;
        assert!(
            took < Duration::from_secs(6),
            "{what}: healed after {took:?}"
        );
    }
    let lost = "felix_forwards_unknown_total{cause=\"connection_lost\"}";
    brokers.wait_metric(0, lost, 10.0);
    // Everything that waited was released as the connection was declared lost.
    brokers.wait_metric(0, "felix_link_loss_release_seconds_count", 2.0);
    let seconds = brokers.metric(0, "felix_link_loss_release_seconds_sum");
    assert!(seconds < 0.5, "released after {seconds} s");
}
