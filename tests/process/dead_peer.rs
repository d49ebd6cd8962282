//! A peer that dies without a goodbye.
//!
//! The documented bound: a peer not heard from for `peer-idle-timeout-ms` (4 s) is gone, and
//! everything in flight to it is answered then.

use std::time::{Duration, Instant};

use felix_uring::wire::client::{PublishOutcome, RetryClass};

use crate::support::brokers::{small, Brokers, FIRST, SECOND};
use crate::support::client::{Client, Stream};
use crate::support::command::{felix, run};

/// What else would answer the requests of a dead peer: an end that comes before this comes from the loss.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
const IN_FLIGHT: usize = 10;

/// Two brokers whose requests to each other time out long after a loss is noticed, on a busy machine as well.
fn brokers() -> Brokers {
    Brokers::start_with(2, |spec| {
        let timeout_ms = REQUEST_TIMEOUT.as_millis();
        spec.extra_args.extend([
            format!("--peer-request-timeout-ms={timeout_ms}"),
            format!("--publish-answer-timeout-ms={}", timeout_ms * 2),
        ]);
    })
}

/// Sends publishes that the owner will not answer, and gives the classes they came to.
async fn answers_of(stream: &mut Stream, sent: &[u64]) -> Vec<Option<RetryClass>> {
    let mut classes = vec![None; sent.len()];
    for _ in sent {
        let ack = stream.answers.ack().await;
        let at = sent.iter().position(|id| *id == ack.request_id);
        let at = at.unwrap_or_else(|| panic!("{ack:?} answers nothing"));
        if let PublishOutcome::Failed(refusal) = ack.outcome {
            classes[at] = refusal.class();
        }
    }
    classes
}

async fn send(stream: &mut Stream) -> Vec<u64> {
    let mut sent = Vec::new();
    for i in 0..IN_FLIGHT {
        sent.push(
            stream
                .start_publish(SECOND, &[format!("in flight {i}")])
                .await,
        );
    }
    sent
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_owner_is_noticed_and_its_requests_are_unknown() {
    let mut brokers = brokers();
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.stream(&token).await;
    let mut local = client.stream(&token).await;
    stream.must_publish(SECOND, b"warm").await;
    brokers
        .cluster
        .node_mut(1)
        .sigstop()
        .unwrap_or_else(|e| panic!("{e}"));
    let started = Instant::now();
    let sent = send(&mut stream).await;
    // Everybody else is served meanwhile.
    local.must_publish(FIRST, b"local").await;
    let classes = answers_of(&mut stream, &sent).await;
    assert!(
        started.elapsed() < REQUEST_TIMEOUT,
        "{:?}",
        started.elapsed()
    );
    assert_eq!(classes, vec![Some(RetryClass::OutcomeUnknown); IN_FLIGHT]);
    // What comes now was surely not sent, and is answered long before the idle timeout.
    let started = Instant::now();
    let mut refused = 0;
    while started.elapsed() < Duration::from_secs(3) {
        if let PublishOutcome::Failed(refusal) = stream.publish(SECOND, b"later").await {
            assert_eq!(refusal.class(), Some(RetryClass::Retry), "{refusal:?}");
            refused += 1;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(refused >= 1, "a frozen owner took a publish");
    // Thawed, it is used again; what was unknown may be there once, never twice.
    brokers
        .cluster
        .node_mut(1)
        .sigcont()
        .unwrap_or_else(|e| panic!("{e}"));
    stream
        .publish_until_taken(SECOND, Duration::from_secs(10))
        .await;
    let owner = Client::connect(&brokers, 1).await;
    let start = felix_uring::wire::client::messages::StartAt::Earliest;
    let mut events = owner.subscribe(&token, SECOND, start).await;
    let last = owner
        .stream(&token)
        .await
        .must_publish(SECOND, b"last")
        .await;
    let records = events.take(last as usize + 1).await;
    for i in 0..IN_FLIGHT {
        let text = format!("in flight {i}");
        let times = records.iter().filter(|(_, r)| r == text.as_bytes()).count();
        assert!(times <= 1, "{text} is there {times} times");
    }
    assert!(
        !records.iter().any(|(_, r)| &r[..] == b"later"),
        "a refused publish was written"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_owner_is_noticed() {
    let mut brokers = brokers();
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.stream(&token).await;
    stream.must_publish(SECOND, b"warm").await;
    // Frozen first: nothing of what is in flight can be answered before the kill.
    brokers
        .cluster
        .node_mut(1)
        .sigstop()
        .unwrap_or_else(|e| panic!("{e}"));
    let sent = send(&mut stream).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    let started = Instant::now();
    brokers
        .cluster
        .node_mut(1)
        .kill()
        .unwrap_or_else(|e| panic!("{e}"));
    let classes = answers_of(&mut stream, &sent).await;
    assert!(
        started.elapsed() < REQUEST_TIMEOUT,
        "{:?}",
        started.elapsed()
    );
    assert_eq!(classes, vec![Some(RetryClass::OutcomeUnknown); IN_FLIGHT]);
    let lost = "felix_forwards_unknown_total{cause=\"connection_lost\"}";
    brokers.wait_metric(0, lost, IN_FLIGHT as f64);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_that_comes_back_at_once_is_used_at_once() {
    let mut brokers = Brokers::start(2);
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.stream(&token).await;
    stream.must_publish(SECOND, b"warm").await;
    brokers
        .cluster
        .node_mut(1)
        .sigstop()
        .unwrap_or_else(|e| panic!("{e}"));
    let sent = send(&mut stream).await;
    brokers
        .cluster
        .node_mut(1)
        .kill()
        .unwrap_or_else(|e| panic!("{e}"));
    brokers.start_node(1);
    let ready = Instant::now();
    let classes = answers_of(&mut stream, &sent).await;
    assert!(
        classes
            .iter()
            .all(|class| matches!(class, None | Some(RetryClass::OutcomeUnknown))),
        "{classes:?}"
    );
    let (_, refusals) = stream
        .publish_until_taken(SECOND, Duration::from_secs(5))
        .await;
    let took = ready.elapsed();
    assert!(
        took < Duration::from_secs(3),
        "{took:?}, {refusals} refusals"
    );
}

/// The catalog names it no more: what is in flight ends, then the link is closed and forgotten.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_is_taken_out_of_the_catalog_is_let_go() {
    let brokers = Brokers::start(2);
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.stream(&token).await;
    stream.must_publish(SECOND, b"forwarded").await;
    let peers = || {
        let status = brokers.cluster.node(0).status();
        let status = status.unwrap_or_else(|e| panic!("{e}"));
        status["peers"].as_array().cloned().unwrap_or_default()
    };
    let removed = "felix_connections_closed_total{reason=\"peer_removed\"}";
    assert_eq!(brokers.metric(0, removed), 0.0);
    brokers.edit_catalog(|catalog| {
        let tables = |value: &mut toml::Value| -> Vec<toml::Table> {
            let list = value.as_array().cloned().unwrap_or_default();
            list.into_iter()
                .filter_map(|one| one.as_table().cloned())
                .collect()
        };
        // Everything the other one led moves.
        catalog.insert("generation".into(), 2.into());
        let nodes = catalog.get_mut("node").expect("nodes");
        let mut left = tables(nodes);
        left.retain(|node| node["id"].as_str() == Some("node-1"));
        *nodes = left.into();
        let assignments = catalog.get_mut("assignment").expect("assignments");
        let moved = tables(assignments).into_iter().map(|mut one| {
            let generation = one.get("generation").and_then(toml::Value::as_integer);
            one.insert("leader".into(), "node-1".into());
            one.insert("generation".into(), (generation.unwrap_or(1) + 1).into());
            one
        });
        *assignments = moved.collect::<Vec<_>>().into();
    });
    brokers.wait_metric(0, removed, 1.0);
    let deadline = Instant::now() + Duration::from_secs(10);
    while !peers().is_empty() {
        assert!(Instant::now() < deadline, "{:?}", peers());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    // What it led is ours now.
    stream
        .publish_until_taken(SECOND, Duration::from_secs(10))
        .await;
}

#[test]
fn a_keep_alive_that_cannot_keep_anything_alive_is_refused() {
    let brokers = Brokers::prepare_with(1, |_| {});
    let node = brokers.cluster.node(0);
    let mut args: Vec<String> = ["serve", "--node-id", "node-1"].map(String::from).to_vec();
    args.extend(small());
    args.push(format!("--data-dir={}", node.data_dir().display()));
    args.push(format!("--catalog={}", brokers.cluster.catalog().display()));
    args.extend(["--peer-keep-alive-ms=10000", "--peer-idle-timeout-ms=15000"].map(String::from));
    let ran = run(&mut felix(&args), Duration::from_secs(10));
    assert_eq!(ran.code(), 2, "{ran:?}");
    assert!(ran.stderr.contains("peer-keep-alive-ms"), "{ran:?}");
    assert!(ran.stderr.contains("peer-idle-timeout-ms"), "{ran:?}");
}
