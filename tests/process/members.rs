//! What an operator does to a shard's holders through the catalog file: adding, removing, moving under
//! load, and shards that had one holder before.

use std::time::{Duration, Instant};

use felix_uring::cluster::ShardedSpec;
use felix_uring::wire::client::messages::StartAt;
use felix_uring::wire::client::{Answer, RetryClass};
use storage_uring::LogKind;

use crate::support::acked::{keep_publishing, Acked};
use crate::support::brokers::Brokers;
use crate::support::client::{subscribe_frame, Stream};
use crate::support::replica_set::{
    assert_copies_equal, assign, client, copy_of, reach, read_all, replicated, wait_level,
    wait_mark_past_all, wait_open, wait_open_at, wait_reach, Log, LATER,
};

const NAME: &str = "moved";
const LOG: Log = Log::of(LogKind::Stream, NAME);

fn start(nodes: usize, sharded: ShardedSpec) -> Brokers {
    Brokers::start_with(nodes, |spec| {
        spec.extra_args.push("--quorum-timeout-ms=3000".into());
        spec.streams.push(sharded);
    })
}

async fn publish(stream: &mut Stream, prefix: &str, count: usize) {
    for nth in 0..count {
        stream.must_publish(NAME, format!("{prefix}-{nth}")).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_is_added_and_another_removed() {
    let mut brokers = start(4, replicated(NAME, 3, "quorum"));
    wait_open(&brokers, 0, LOG).await;
    let (_client, mut stream) = client(&brokers, 0).await;
    publish(&mut stream, "three", 40).await;

    // The fourth broker joins: it is given everything from the beginning, and counts.
    assign(&brokers, "stream", NAME, 2, &[0, 1, 2, 3]);
    wait_reach(&brokers, 3, LOG, 40).await;
    wait_level(&brokers, 0, LOG, 40).await;
    publish(&mut stream, "four", 20).await;
    // Three of four are a majority, two are not.
    brokers.cluster.node_mut(1).kill().expect("killed");
    publish(&mut stream, "three of four", 10).await;
    brokers.cluster.node_mut(2).kill().expect("killed");
    let outcome = stream.publish(NAME, b"two of four").await;
    let (code, _) = crate::support::client::refusal(outcome);
    assert_eq!(code, "quorum_timeout");
    brokers.start_node(2);
    stream.publish_until_taken(NAME, LATER).await;

    // The one that is down leaves the set: what is left is a set of three.
    assign(&brokers, "stream", NAME, 3, &[0, 2, 3]);
    stream.publish_until_taken(NAME, LATER).await;
    wait_level(&brokers, 0, LOG, 73).await;
    brokers.start_node(1);
    publish(&mut stream, "without it", 20).await;
    wait_level(&brokers, 0, LOG, 93).await;
    let copy = assert_copies_equal(&mut brokers, &[0, 2, 3], LOG);
    assert!(copy.tail() >= 93, "{}", copy.tail());
    assert_eq!(copy.accepted, 3);
    // Who left keeps what it has and is sent nothing more.
    let left = copy_of(&brokers, 1, LOG).expect("its copy");
    assert!(left.tail() <= 60, "{}", left.tail());
    assert_eq!(left.records[..], copy.records[..left.records.len()]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shard_moves_under_load_and_loses_nothing_acknowledged() {
    let mut brokers = start(4, replicated(NAME, 3, "quorum"));
    wait_open(&brokers, 0, LOG).await;
    let (stop, stopped) = tokio::sync::watch::channel(false);
    // Through the leader to be, the leader that was, and one that never holds the shard.
    let mut publishers = Vec::new();
    for (node, prefix) in [(0, "old"), (1, "new"), (3, "outside")] {
        let (kept, stream) = client(&brokers, node).await;
        let stopped = stopped.clone();
        publishers.push(tokio::spawn(async move {
            let _kept = kept;
            keep_publishing(stream, NAME, prefix, stopped).await
        }));
    }
    wait_reach(&brokers, 0, LOG, 100).await;
    let mut generation = 1;
    let mut leader = 0;
    for next in [1, 2, 0, 1] {
        let third = 3 - leader - next;
        // Old and new leader alone: from here on nothing is acknowledged that the new one lacks.
        generation += 1;
        assign(&brokers, "stream", NAME, generation, &[leader, next]);
        wait_mark_past_all(&brokers, leader, LOG, generation).await;
        generation += 1;
        assign(&brokers, "stream", NAME, generation, &[next, leader]);
        wait_open_at(&brokers, next, LOG, generation).await;
        generation += 1;
        assign(&brokers, "stream", NAME, generation, &[next, leader, third]);
        wait_open_at(&brokers, next, LOG, generation).await;
        let before = reach(&brokers, next, LOG);
        wait_reach(&brokers, next, LOG, before + 50).await;
        leader = next;
    }
    stop.send(true).expect("they run");
    let mut acked = Acked::new();
    for publisher in publishers {
        for (offset, record) in publisher.await.expect("no panic") {
            let twice = acked.insert(offset, record);
            assert_eq!(twice, None, "two records were acknowledged at {offset}");
        }
    }
    assert!(acked.len() >= 200, "{}", acked.len());
    wait_level(&brokers, 1, LOG, acked.len() as u64).await;
    let copy = assert_copies_equal(&mut brokers, &[0, 1, 2], LOG);
    for (offset, record) in &acked {
        let held = copy.at(*offset).map(|held| &held[..]);
        assert_eq!(held, Some(record.as_bytes()), "at {offset}");
    }
    assert_eq!(copy.accepted, generation);
    assert_eq!(copy_of(&brokers, 3, LOG), None, "it never held the shard");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn i14_a_shard_without_followers_records_its_generation_before_its_records() {
    let mut brokers = start(3, replicated(NAME, 1, "quorum"));
    let (_client, mut stream) = client(&brokers, 0).await;
    publish(&mut stream, "alone", 10).await;
    // The same leader, at a higher generation.
    assign(&brokers, "stream", NAME, 5, &[0]);
    brokers.wait_metric_for(0, "felix_catalog_reloads_total", 1.0, LATER);
    publish(&mut stream, "alone", 5).await;
    // And with followers, who are given what it wrote alone.
    assign(&brokers, "stream", NAME, 6, &[0, 1, 2]);
    wait_open(&brokers, 0, LOG).await;
    // Nothing was inherited from another leader: readers need not wait for a write of this generation.
    let seen = read_all(&brokers, 0, NAME, 15).await;
    assert_eq!(seen.len(), 15);
    publish(&mut stream, "three", 5).await;
    wait_level(&brokers, 0, LOG, 20).await;
    let copy = assert_copies_equal(&mut brokers, &[0, 1, 2], LOG);
    assert_eq!(copy.tail(), 20);
    let leader = |generation, start| (generation, start, "node-1".to_owned());
    let own = copy_of(&brokers, 0, LOG).expect("its copy").history;
    assert_eq!(own[1..], [leader(5, 10), leader(6, 15)]);
    assert_eq!((own[0].1, own.len()), (0, 3), "{own:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shard_without_followers_is_fenced_by_what_it_has_accepted() {
    let mut brokers = start(1, replicated(NAME, 1, "leader"));
    let (_client, mut stream) = client(&brokers, 0).await;
    publish(&mut stream, "one", 3).await;
    assign(&brokers, "stream", NAME, 7, &[0]);
    brokers.wait_metric_for(0, "felix_catalog_reloads_total", 1.0, LATER);
    publish(&mut stream, "seven", 3).await;
    let exit = brokers.cluster.node_mut(0).stop().expect("stopped");
    assert!(exit.is_clean(), "{exit:?}");
    // A catalog from before, as after restoring the wrong backup.
    assign(&brokers, "stream", NAME, 6, &[0]);
    let node = brokers.cluster.node_mut(0);
    node.start().unwrap_or_else(|e| panic!("{e}"));
    let ready = node.wait_ready();
    assert!(ready.is_err(), "a generation went back");
    assert!(brokers.log(0).contains("generation"), "{}", brokers.log(0));
}

/// A catalog that is wrong about who led a generation names a broker that may not lead with it: what that one holds
/// is only a copy, of which it does not know what a majority has, and nobody is shown any of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_may_not_lead_shows_nothing() {
    let mut brokers = start(3, replicated(NAME, 3, "quorum"));
    wait_open(&brokers, 0, LOG).await;
    {
        let (_client, mut stream) = client(&brokers, 0).await;
        publish(&mut stream, "kept", 10).await;
        wait_level(&brokers, 0, LOG, 10).await;
    }
    for node in 0..3 {
        brokers.cluster.node_mut(node).kill().expect("killed");
    }
    assign(&brokers, "stream", NAME, 1, &[1, 0, 2]);
    for node in 0..3 {
        brokers.start_node(node);
    }
    let deadline = Instant::now() + LATER;
    loop {
        let status = brokers.cluster.node(1).status();
        let failures = &status.unwrap_or_else(|e| panic!("{e}"))["failures"];
        if failures.to_string().contains("was led by node-1") {
            break;
        }
        assert!(Instant::now() < deadline, "it leads: {failures}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let (_client, mut request) = client(&brokers, 1).await;
    request.send(subscribe_frame(NAME, StartAt::Earliest)).await;
    let Answer::ErrorAnswer(error) = request.answers.answer().await else {
        panic!("a copy is shown");
    };
    let code = error.code.as_ref().map(|code| code.name());
    assert_eq!(
        (code, error.retry),
        (Some("shard_unavailable"), Some(RetryClass::Retry))
    );
}
