//! Copies whose bytes rotted on a follower's disk: they count for nothing, disturb nobody, and are made anew
//! from their leader.

use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use storage_uring::LogKind;

use crate::support::brokers::Brokers;
use crate::support::cache_client::{CacheClient, CACHE};
use crate::support::replica_set::{
    assert_copies_equal, client, equal_copies, replicated, status_of, wait_level, wait_open,
    wait_reach, Log, LATER,
};

const ROTTEN: &str = "rotten";
const SOUND: &str = "sound";
const RECORDS: Log = Log::of(LogKind::Stream, ROTTEN);
const BESIDE: Log = Log::of(LogKind::Stream, SOUND);
const VALUES: Log = Log::of(LogKind::Cache, CACHE);
const COUNTERS: Log = Log::of(LogKind::Counters, CACHE);
const DAMAGED: usize = 2;

fn start() -> Brokers {
    Brokers::start_with(3, |spec| {
        spec.extra_args.push("--quorum-timeout-ms=3000".into());
        spec.streams.push(replicated(ROTTEN, 3, "quorum"));
        spec.streams.push(replicated(SOUND, 3, "quorum"));
        spec.caches = vec![replicated(CACHE, 3, "quorum")];
    })
}

/// The segment of a stopped broker that holds these bytes, and where.
fn find(brokers: &Brokers, node: usize, bytes: &[u8]) -> (PathBuf, u64) {
    let core = brokers.cluster.node(node).data_dir().join("core-log/0");
    for entry in std::fs::read_dir(core).expect("a core log") {
        let file = entry.expect("an entry").path();
        let content = std::fs::read(&file).expect("readable");
        let mut windows = content.windows(bytes.len());
        if let Some(at) = windows.position(|window| window == bytes) {
            return (file, at as u64);
        }
    }
    panic!("nobody wrote {:?}", String::from_utf8_lossy(bytes));
}

/// Flips one bit of these bytes; the segment they are in.
fn rot(brokers: &Brokers, node: usize, bytes: &[u8]) -> PathBuf {
    let (file, at) = find(brokers, node, bytes);
    let open = std::fs::OpenOptions::new().write(true).open(&file);
    let flipped = [bytes[0] ^ 1];
    open.expect("writable")
        .write_all_at(&flipped, at)
        .expect("written");
    file
}

fn stop(brokers: &mut Brokers, node: usize) {
    let stopped = brokers.cluster.node_mut(node).stop();
    stopped.unwrap_or_else(|e| panic!("{e}"));
}

/// Waits until the leader lists the follower's copy of a log as one that differs.
async fn wait_halted(brokers: &Brokers, leader: usize, log: &str) {
    let deadline = Instant::now() + LATER;
    loop {
        let status = brokers.cluster.node(leader).status();
        let status = status.unwrap_or_else(|e| panic!("{e}")).to_string();
        if status.contains("\"diverged\"") && status.contains(log) {
            return;
        }
        assert!(Instant::now() < deadline, "{log} is not halted: {status}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_copy_counts_for_nothing_and_is_made_anew_from_its_leader() {
    let mut brokers = start();
    wait_open(&brokers, 0, VALUES).await;
    let (_client, mut stream) = client(&brokers, 0).await;
    for nth in 0..40 {
        stream.must_publish(ROTTEN, format!("rot-{nth:03}.")).await;
        stream.must_publish(SOUND, format!("whole-{nth:03}.")).await;
    }
    let mut cache = CacheClient::connect(&brokers, 0).await;
    for nth in 0..10 {
        cache.put(&format!("k{nth}"), b"v").await;
        cache.add(&format!("sum-{nth}."), 7).await;
    }
    for (log, records) in [(RECORDS, 40), (BESIDE, 40), (VALUES, 10), (COUNTERS, 10)] {
        for follower in [1, 2] {
            wait_reach(&brokers, follower, log, records).await;
        }
    }
    for node in 0..3 {
        stop(&mut brokers, node);
    }
    let evidence = rot(&brokers, DAMAGED, b"rot-017.");
    rot(&brokers, DAMAGED, b"sum-4.");

    // The leader and the damaged copy are two of three, and no majority of the rotten stream.
    for node in [DAMAGED, 0] {
        brokers.start_node(node);
    }
    wait_halted(&brokers, 0, ROTTEN).await;
    wait_open(&brokers, 0, BESIDE).await;
    wait_open(&brokers, 0, VALUES).await;
    let shard = status_of(&brokers, 0, RECORDS);
    assert_eq!(shard["opening"], "probing", "it is fenced by nobody else");
    let (_client, mut stream) = client(&brokers, 0).await;
    for nth in 40..60 {
        stream.must_publish(SOUND, format!("whole-{nth:03}.")).await;
    }
    assert!(brokers.log(DAMAGED).contains("the copy is damaged"));

    brokers.start_node(1);
    wait_open(&brokers, 0, RECORDS).await;
    stream.publish_until_taken(ROTTEN, LATER).await;
    wait_level(&brokers, 0, RECORDS, 41).await;
    wait_reach(&brokers, DAMAGED, COUNTERS, 10).await;
    assert_eq!(
        brokers.metric(DAMAGED, "felix_follower_rebuilds_total"),
        2.0
    );
    let mut cache = CacheClient::connect(&brokers, 0).await;
    assert_eq!(cache.add("sum-4.", 1).await, 8);
    wait_reach(&brokers, DAMAGED, COUNTERS, 11).await;

    // The next start finds whole logs, and the damage still there for whoever wants to look at it.
    stop(&mut brokers, DAMAGED);
    brokers.start_node(DAMAGED);
    stream.must_publish(ROTTEN, b"after").await;
    wait_level(&brokers, 0, RECORDS, 42).await;
    assert_eq!(
        brokers.metric(DAMAGED, "felix_follower_rebuilds_total"),
        0.0
    );
    let records = assert_copies_equal(&mut brokers, &[0, 1, DAMAGED], RECORDS);
    assert_eq!(records.records[17], "rot-017.");
    assert_eq!(equal_copies(&brokers, &[0, 1, DAMAGED], BESIDE).tail(), 60);
    equal_copies(&brokers, &[0, 1, DAMAGED], VALUES);
    assert_eq!(
        equal_copies(&brokers, &[0, 1, DAMAGED], COUNTERS).tail(),
        11
    );
    assert!(evidence.exists(), "the damaged segment is kept");
}
