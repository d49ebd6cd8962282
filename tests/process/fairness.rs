//! Peers and requests that would take everything slow down themselves only, and leave nothing behind.
//!
//! `FELIX_RECONNECTS` (120) sets how many connections the leak test makes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use felix_uring::wire::client::PublishOutcome;
use felix_uring::wire::internal::Message;

use crate::support::brokers::{Brokers, FIRST, SECOND};
use crate::support::client::Client;
use crate::support::dialler::{forward, frame, shard, PeerClient};
use crate::support::owner::ScriptedOwner;
use crate::support::SOON;

const MIB: usize = 1 << 20;

fn one_of_two() -> Brokers {
    let mut brokers = Brokers::prepare_with(2, |_| {});
    brokers.start_node(0);
    brokers
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn small_forwards_pass_large_ones_on_the_same_link() {
    const LARGE: usize = 4;
    let brokers = Brokers::start_with(2, |spec| {
        spec.env = vec![("FELIX_SEGMENT_BYTES".into(), "67108864".into())];
    });
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut small = client.stream(&token).await;
    small.must_publish(SECOND, b"warm").await;
    let other = Client::connect(&brokers, 0).await;
    let mut large = other.stream(&token).await;
    let payloads = vec![vec![7u8; MIB]; 12];
    for _ in 0..LARGE {
        large.start_publish(SECOND, &payloads).await;
    }
    let is_over = Arc::new(AtomicBool::new(false));
    let over = is_over.clone();
    let passing = tokio::spawn(async move {
        let mut passed = 0;
        while !over.load(Ordering::Acquire) {
            small.must_publish(SECOND, b"small").await;
            passed += 1;
        }
        passed
    });
    for _ in 0..LARGE {
        let ack = large.answers.ack().await;
        assert!(
            matches!(ack.outcome, PublishOutcome::Accepted { .. }),
            "{ack:?}"
        );
    }
    is_over.store(true, Ordering::Release);
    let passed = passing.await.expect("the small ones end well");
    // Behind them on one stream, none would have been answered before the last of them.
    assert!(passed >= 3, "{passed} small ones were answered meanwhile");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_peer_slows_only_what_goes_to_it() {
    let mut brokers = Brokers::start_with(3, |spec| {
        let third = felix_uring::cluster::ShardedSpec::new("third", 1).led_by(&[2]);
        spec.streams.push(third);
    });
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut to_frozen = client.stream(&token).await;
    let mut others = client.stream(&token).await;
    to_frozen.must_publish(SECOND, b"warm").await;
    others.must_publish("third", b"warm").await;
    let frozen = brokers.cluster.node_mut(1).sigstop();
    frozen.unwrap_or_else(|e| panic!("{e}"));
    for _ in 0..200 {
        to_frozen.start_publish(SECOND, &[[1u8; 4096]]).await;
    }
    // Well before the frozen one is given up (4 s), everybody else is served at their usual pace.
    let started = Instant::now();
    for _ in 0..20 {
        others.must_publish("third", b"served").await;
        others.must_publish(FIRST, b"served").await;
    }
    assert!(
        started.elapsed() < Duration::from_secs(3),
        "{:?}",
        started.elapsed()
    );
    for _ in 0..200 {
        to_frozen.answers.ack().await;
    }
    let thawed = brokers.cluster.node_mut(1).sigcont();
    thawed.unwrap_or_else(|e| panic!("{e}"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_opens_every_stream_it_can_starves_nobody() {
    let mut brokers = one_of_two();
    let token = brokers.token();
    let flood = PeerClient::connect(&brokers, 1, 0).await;
    drop(flood.greeted("node-2").await);
    let half = frame(&forward(1, shard(FIRST, 1), Some(&token)));
    let half = &half[..half.len() / 2];
    let mut streams = Vec::new();
    // Until the broker grants no more.
    while let Ok(opened) =
        tokio::time::timeout(Duration::from_millis(500), flood.conn.open_bi()).await
    {
        let (mut send, recv) = opened.expect("the connection lives");
        send.write_all(half).await.expect("the stream lives");
        streams.push((send, recv));
        assert!(
            streams.len() < 2000,
            "the broker grants streams without end"
        );
    }
    assert!(!streams.is_empty());
    let served = PeerClient::connect(&brokers, 1, 0).await;
    let mut stream = served.greeted("node-2").await;
    let client = Client::connect(&brokers, 0).await;
    let mut publisher = client.stream(&token).await;
    for nth in 0..20 {
        let answer = stream
            .ask(&forward(nth, shard(FIRST, 1), Some(&token)))
            .await;
        assert!(
            matches!(answer, Message::ForwardPublishOk { .. }),
            "{answer:?}"
        );
        publisher.must_publish(FIRST, b"served").await;
    }
    // The flooded streams go with their connection.
    flood.conn.close(0u32.into(), b"done");
    drop(streams);
    held_falls_to(&brokers, "peer_streams", 2).await;
    brokers.assert_alive(0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_sends_a_byte_at_a_time_is_served_and_disturbs_nobody() {
    let brokers = one_of_two();
    let token = brokers.token();
    let slow = PeerClient::connect(&brokers, 1, 0).await;
    let mut trickle = slow.greeted("node-2").await;
    let other = PeerClient::connect(&brokers, 1, 0).await;
    let mut stream = other.greeted("node-2").await;
    let bytes = frame(&forward(1, shard(FIRST, 1), Some(&token)));
    for (nth, byte) in bytes.iter().enumerate() {
        trickle.send([*byte]).await;
        // Lets the byte leave by itself.
        tokio::time::sleep(Duration::from_millis(1)).await;
        if nth % 64 == 0 {
            let request = forward(nth as u64, shard(FIRST, 1), Some(&token));
            let answer = stream.ask(&request).await;
            assert!(
                matches!(answer, Message::ForwardPublishOk { .. }),
                "{answer:?}"
            );
        }
    }
    let answer = trickle.message().await;
    assert!(
        matches!(answer, Message::ForwardPublishOk { .. }),
        "{answer:?}"
    );
}

fn held(brokers: &Brokers, what: &str) -> u64 {
    let status = brokers.cluster.node(0).status();
    let status = status.unwrap_or_else(|e| panic!("{e}"));
    let cores = status["cores"].as_array().expect("cores").iter();
    cores
        .map(|core| core["held"][what].as_u64().expect("a number"))
        .sum()
}

/// Reports are a second old at most; what is held must come down to `most`.
async fn held_falls_to(brokers: &Brokers, what: &str, most: u64) {
    let deadline = Instant::now() + SOON;
    loop {
        let now = held(brokers, what);
        if now <= most {
            return;
        }
        assert!(Instant::now() < deadline, "{now} {what} are still held");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

fn descriptors(brokers: &Brokers) -> usize {
    let pid = brokers.cluster.node(0).pid().expect("it runs");
    let listed = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("a process of ours");
    listed.count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reconnects_leave_nothing_behind() {
    let set = std::env::var("FELIX_RECONNECTS").ok();
    let reconnects: usize = set.map_or(120, |n| n.parse().expect("a number"));
    let brokers = one_of_two();
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.stream(&token).await;
    let mut owner = ScriptedOwner::start(&brokers, 1);
    let answering = async { owner.next().await.stored_at(0).await };
    let (_, ()) = tokio::join!(stream.publish_until_taken(SECOND, SOON), answering);
    // The file of the log is open from its first record on.
    stream.must_publish(FIRST, b"warm").await;
    held_falls_to(&brokers, "connections", 2).await;
    let before = descriptors(&brokers);
    // Accepted ones.
    for nth in 0..reconnects {
        let peer = PeerClient::connect(&brokers, 1, 0).await;
        let mut peer_stream = peer.greeted("node-2").await;
        let request = forward(nth as u64, shard(FIRST, 1), Some(&token));
        match nth % 3 {
            // Answered, cut with a request on its way, cut inside a frame.
            0 => drop(peer_stream.ask(&request).await),
            1 => peer_stream.send(frame(&request)).await,
            _ => peer_stream.send(&frame(&request)[..20]).await,
        }
        peer.conn.close(0u32.into(), b"again");
    }
    // Dialled ones: fewer, because each waits for its backoff.
    for nth in 0..(reconnects / 20).clamp(3, 20) {
        owner.close_connections();
        let answering = async { owner.next().await.stored_at(nth as u64).await };
        let (_, ()) = tokio::join!(stream.publish_until_taken(SECOND, SOON), answering);
    }
    held_falls_to(&brokers, "connections", 2).await;
    held_falls_to(&brokers, "peer_streams", 1).await;
    held_falls_to(&brokers, "peer_requests", 0).await;
    held_falls_to(&brokers, "forwards", 0).await;
    held_falls_to(&brokers, "appends", 0).await;
    // A timer is not taken back when its work ends; it falls due within the longest patience.
    held_falls_to(&brokers, "timers", 40).await;
    // Connections of the admin port come and go meanwhile.
    let deadline = Instant::now() + SOON;
    while descriptors(&brokers) > before {
        assert!(Instant::now() < deadline, "descriptors are left open");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Large batches are appended in pieces, so that others pass them; to their own shard nobody does: the records of
/// a batch are consecutive, and what came behind it lies behind it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_of_a_large_batch_are_consecutive_whatever_else_is_published() {
    const LARGE: usize = 6;
    const RECORDS: usize = 9;
    let brokers = Brokers::start_with(2, |spec| {
        spec.env = vec![("FELIX_SEGMENT_BYTES".into(), "67108864".into())];
    });
    let token = brokers.token();
    let owner = Client::connect(&brokers, 1).await;
    let ingress = Client::connect(&brokers, 0).await;
    let mut publishing = tokio::task::JoinSet::new();
    // Large and small ones to one shard, from its own clients and from those of the broker that forwards.
    for (who, client) in [("owner", &owner), ("ingress", &ingress)] {
        let mut large = client.stream(&token).await;
        publishing.spawn(async move {
            let mut acked = Vec::new();
            for nth in 0..LARGE {
                let name = format!("{who} {nth}");
                let records: Vec<_> = (0..RECORDS)
                    .map(|record| large_record(&name, record))
                    .collect();
                let id = large.start_publish(SECOND, &records).await;
                acked.push((id, name, RECORDS));
            }
            offsets_of(&mut large, acked).await
        });
        let mut small = client.stream(&token).await;
        publishing.spawn(async move {
            let mut acked = Vec::new();
            for nth in 0..60 {
                let name = format!("small {who} {nth}");
                let id = small.start_publish(SECOND, &[large_record(&name, 0)]).await;
                acked.push((id, name, 1));
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            offsets_of(&mut small, acked).await
        });
    }
    let mut expected = std::collections::BTreeMap::new();
    while let Some(acked) = publishing.join_next().await {
        let mut before = None;
        for (offset, name, records) in acked.expect("one ends well") {
            // In the order of its stream.
            assert!(
                before < Some(offset),
                "{name} at {offset}, behind {before:?}"
            );
            before = Some(offset);
            for record in 0..records {
                let taken = expected.insert(offset + record as u64, (name.clone(), record));
                assert_eq!(taken, None, "two records at one offset");
            }
        }
    }
    let start = felix_uring::wire::client::messages::StartAt::Earliest;
    let mut events = owner.subscribe(&token, SECOND, start).await;
    for (offset, record) in events.take(expected.len()).await {
        let (name, nth) = &expected[&offset];
        let head = large_record(name, *nth);
        assert_eq!(record.len(), head.len(), "{name} {nth} at {offset}");
        assert!(
            record == head[..],
            "{name} {nth} at {offset} holds something else"
        );
    }
}

/// A record that says which it is; those of large batches are half a MiB.
fn large_record(name: &str, nth: usize) -> Vec<u8> {
    let mut record = format!("{name}/{nth}/").into_bytes();
    if !name.starts_with("small") {
        record.resize(MIB / 2, nth as u8);
    }
    record
}

/// The offsets of batches that must all be taken, in the order they were sent.
async fn offsets_of(
    stream: &mut crate::support::client::Stream,
    sent: Vec<(u64, String, usize)>,
) -> Vec<(u64, String, usize)> {
    let mut offsets = std::collections::HashMap::new();
    for _ in 0..sent.len() {
        let ack = stream.answers.ack().await;
        match ack.outcome {
            PublishOutcome::Accepted { offset } => {
                offsets.insert(ack.request_id, offset.expect("an offset"));
            }
            PublishOutcome::Failed(refusal) => panic!("{refusal:?}"),
        }
    }
    let at = |id| offsets.get(&id).copied().expect("an answer");
    sent.into_iter()
        .map(|(id, name, records)| (at(id), name, records))
        .collect()
}
