//! A scripted leader, built from the golden vectors, drives a real broker as its follower.
//!
//! The vectors name shard 3 of `acme/billing/orders` at generation 7, a stream or a cache by their kind;
//! the catalog of these tests has both. Node 1 is a broker; nodes 2 and 3 are played by the tests.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bytes::Bytes;
use felix_uring::ids::{CorrelationId, Generation, Offset};
use felix_uring::wire::internal::hex::from_hex;
use felix_uring::wire::internal::{
    decode_frame, encode, Bootstrap, ErrorCode, Message, Payloads, Rebuild, Records, ReplicaLog,
    ShardRef, Text,
};

use crate::support::brokers::Brokers;
use crate::support::command::{felix, run};
use crate::support::dialler::{PeerClient, PeerStream};
use crate::support::SOON;

const GENERATION: u64 = 7;

/// The catalog's tables of the vectors' stream and cache.
fn vector_tables(generation: u64, leader: &str, replicas: &[&str]) -> String {
    let replicas: Vec<String> = replicas.iter().map(|node| format!("{node:?}")).collect();
    let (count, replicas) = (replicas.len(), replicas.join(", "));
    let names = "tenant = \"acme\"\nnamespace = \"billing\"\nname = \"orders\"\n";
    let mut text = String::new();
    for kind in ["stream", "cache"] {
        text += &format!("\n[[{kind}]]\n{names}shards = 4\nreplicas = {count}\n");
        text += &format!(
            "\n[[assignment]]\nkind = {kind:?}\n{names}shard = 3\ngeneration = {generation}\n\
             leader = {leader:?}\nreplicas = [{replicas}]\n"
        );
    }
    text
}

/// One broker that follows, with the files of two more.
struct Site {
    brokers: Brokers,
    plain_catalog: String,
}

impl Site {
    fn start() -> Self {
        Self::start_with_cores(1)
    }

    fn start_with_cores(cores: usize) -> Self {
        let brokers = Brokers::prepare_with(3, |spec| spec.cores_per_node = cores);
        let text = std::fs::read_to_string(brokers.cluster.catalog()).expect("the catalog");
        let tenant = "[[tenant]]\nid = \"acme\"\njwks_file = \"k1.jwks.json\"\n\n";
        let plain_catalog = text.replacen("[[tenant]]", &format!("{tenant}[[tenant]]"), 1);
        let mut site = Self {
            brokers,
            plain_catalog,
        };
        site.write_catalog(GENERATION, "node-2");
        site.brokers.start_node(0);
        site
    }

    fn write_catalog(&self, generation: u64, leader: &str) {
        let tables = vector_tables(generation, leader, &["node-1", "node-2", "node-3"]);
        let path = self.brokers.cluster.catalog();
        let fresh = path.with_extension("new");
        std::fs::write(&fresh, format!("{}{tables}", self.plain_catalog)).expect("a file");
        std::fs::rename(&fresh, path).expect("a rename");
    }

    /// Changes the assignment of a running broker and waits until it is in force.
    fn assign(&self, generation: u64, leader: &str) {
        let reloads = "felix_catalog_reloads_total";
        let before = self.brokers.metric(0, reloads);
        self.write_catalog(generation, leader);
        let long = Duration::from_secs(30);
        self.brokers.wait_metric_for(0, reloads, before + 1.0, long);
    }

    async fn leader(&self, index: usize) -> (PeerClient, PeerStream) {
        let peer = PeerClient::connect(&self.brokers, index, 0).await;
        let stream = peer.greeted(&format!("node-{}", index + 1)).await;
        (peer, stream)
    }

    async fn kill_and_restart(&mut self) {
        self.brokers.cluster.node_mut(0).kill().expect("killed");
        self.brokers.start_node(0);
    }

    /// The copies of `/status`, which a core publishes about once a second.
    async fn listed_copies(&self, count: usize) -> Vec<serde_json::Value> {
        let deadline = Instant::now() + 3 * SOON;
        loop {
            let status = self.brokers.cluster.node(0).status().expect("a status");
            let shards = status["cores"][0]["shards"].as_array();
            let copies = shards.into_iter().flatten();
            let copies = copies.filter(|shard| shard["role"] == "follower");
            let copies: Vec<serde_json::Value> = copies.cloned().collect();
            if copies.len() == count {
                return copies;
            }
            assert!(Instant::now() < deadline, "not {count} copies: {status}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Stops the broker and has its directory read by the offline tool.
    async fn verify_offline(&mut self) {
        let exit = self.brokers.cluster.node_mut(0).stop().expect("stopped");
        assert!(exit.is_clean(), "{exit:?}");
        let dir = self.brokers.cluster.node(0).data_dir().to_path_buf();
        let mut verify = felix(&["log", "verify", dir.to_str().expect("a path")]);
        let done = run(&mut verify, 3 * SOON);
        assert_eq!(done.code(), 0, "{}", done.text());
    }
}

/// The frame of a golden vector.
fn vector(name: &str) -> Bytes {
    let path: PathBuf =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/internal-valid.jsonl");
    let text = std::fs::read_to_string(path).expect("the vectors");
    let found = text
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).expect("JSON"))
        .find(|vector| vector["name"] == name)
        .unwrap_or_else(|| panic!("no vector {name}"));
    Bytes::from(from_hex(found["frame_hex"].as_str().expect("hex")).expect("hex"))
}

/// The vectors of one log: records, bootstrap, rebuild.
struct LogVectors {
    log: ReplicaLog,
    records: &'static str,
    wrong_checksum: &'static str,
    bootstrap: &'static str,
    rebuild: &'static str,
}

const LOGS: [LogVectors; 5] = [
    LogVectors {
        log: ReplicaLog::Stream,
        records: "k07-typical",
        wrong_checksum: "k07-wrong-checksum",
        bootstrap: "k10-typical",
        rebuild: "k24-log-1",
    },
    LogVectors {
        log: ReplicaLog::Cache,
        records: "k14-typical",
        wrong_checksum: "k14-wrong-checksum",
        bootstrap: "k15-typical",
        rebuild: "k24-log-2",
    },
    LogVectors {
        log: ReplicaLog::GroupCursors,
        records: "k16-typical",
        wrong_checksum: "k16-checksum-high-bits",
        bootstrap: "k17-random",
        rebuild: "k24-log-3",
    },
    LogVectors {
        log: ReplicaLog::GroupDeadLetters,
        records: "k18-typical",
        wrong_checksum: "k18-checksum-max",
        bootstrap: "k19-typical",
        rebuild: "k24-log-4",
    },
    LogVectors {
        log: ReplicaLog::Counters,
        records: "k20-typical",
        wrong_checksum: "k20-wrong-checksum",
        bootstrap: "k21-typical",
        rebuild: "k24-log-5",
    },
];

fn orders(generation: u64) -> ShardRef {
    ShardRef {
        tenant: Text::shortened("acme"),
        namespace: Text::shortened("billing"),
        stream: Text::shortened("orders"),
        shard: 3,
        generation: Generation(generation),
    }
}

fn records(log: ReplicaLog, generation: u64, first: u64, batch: &[&str]) -> Message {
    let payloads = Payloads::from_slices(batch).expect("payloads");
    Message::Records(Records {
        correlation: CorrelationId(first + 1000),
        log,
        shard: orders(generation),
        first_offset: Offset(first),
        checksum: payloads.batch_checksum(),
        payloads,
    })
}

fn bootstrap(log: ReplicaLog, generation: u64, base: u64) -> Message {
    Message::Bootstrap(Bootstrap {
        correlation: CorrelationId(base + 2000),
        log,
        shard: orders(generation),
        base_offset: Offset(base),
    })
}

fn rebuild(log: ReplicaLog, generation: u64, base: u64) -> Message {
    Message::Rebuild(Rebuild {
        correlation: CorrelationId(base + 3000),
        shard: orders(generation),
        log,
        base_offset: Offset(base),
    })
}

/// A positive answer's offset, or a refusal's code with the offset it names.
async fn ask(stream: &mut PeerStream, request: &Message) -> Result<u64, (ErrorCode, u64)> {
    outcome(&stream.ask(request).await)
}

fn outcome(answer: &Message) -> Result<u64, (ErrorCode, u64)> {
    match answer {
        Message::ReplicateOk { durable_offset, .. } => Ok(durable_offset.0),
        Message::ReplicateError(refusal) => Err((refusal.code, refusal.expected_offset.0)),
        other => panic!("{other:?}"),
    }
}

async fn send_vector(stream: &mut PeerStream, name: &str) -> Message {
    let frame = vector(name);
    let sent = decode_frame(frame.clone()).expect("a vector");
    stream.send(&frame).await;
    let answer = stream.message().await;
    assert_eq!(answer.correlation(), sent.correlation(), "{name}");
    answer
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_of_golden_vectors_is_followed_in_all_five_logs() {
    let mut site = Site::start();
    let (_peer, mut stream) = site.leader(1).await;
    for of in &LOGS {
        let log = of.log;
        // Nothing is held: the typical batch starts at 100.
        let answer = send_vector(&mut stream, of.records).await;
        assert_eq!(outcome(&answer), Err((ErrorCode::LogGap, 0)), "{log:?}");
        let answer = send_vector(&mut stream, of.wrong_checksum).await;
        assert_eq!(outcome(&answer).map_err(|e| e.0), Err(ErrorCode::Malformed));
        if log != ReplicaLog::GroupCursors {
            for _ in 0..2 {
                let answer = send_vector(&mut stream, of.bootstrap).await;
                assert_eq!(outcome(&answer), Ok(5000), "{log:?}: idempotent");
            }
        }
        let answer = send_vector(&mut stream, of.rebuild).await;
        assert_eq!(outcome(&answer), Ok(5000), "{log:?}");
        assert_eq!(ask(&mut stream, &rebuild(log, 7, 100)).await, Ok(100));
        // The typical batch in its place: the answer is the typical answer, byte for byte.
        for _ in 0..2 {
            let answer = send_vector(&mut stream, of.records).await;
            let frame = encode(&answer).expect("a frame");
            assert_eq!(frame, vector("k08-typical"), "{log:?}");
        }
        // A gap, a resend with more, a difference, a bootstrap over records.
        let gap = ask(&mut stream, &records(log, 7, 103, &["late"])).await;
        assert_eq!(gap, Err((ErrorCode::LogGap, 102)), "{log:?}");
        let more = records(log, 7, 101, &["beta", "gamma", "delta"]);
        assert_eq!(ask(&mut stream, &more).await, Ok(104), "{log:?}");
        let differs = records(log, 7, 102, &["gamma", "other"]);
        let conflict = ask(&mut stream, &differs).await;
        assert_eq!(conflict, Err((ErrorCode::LogConflict, 103)), "{log:?}");
        assert_eq!(ask(&mut stream, &bootstrap(log, 7, 100)).await, Ok(104));
        let over = ask(&mut stream, &bootstrap(log, 7, 5000)).await;
        assert_eq!(over.map_err(|e| e.0), Err(ErrorCode::LogConflict));
        assert_eq!(ask(&mut stream, &records(log, 7, 104, &[])).await, Ok(104));
        // Older and newer generations.
        for request in [
            records(log, 6, 104, &["x"]),
            bootstrap(log, 6, 100),
            rebuild(log, 6, 0),
        ] {
            let code = stream.refused(&request).await;
            assert_eq!(code, ErrorCode::FencedEpoch, "{request:?}");
        }
        for request in [
            records(log, 8, 104, &["x"]),
            bootstrap(log, 8, 100),
            rebuild(log, 8, 0),
        ] {
            let code = stream.refused(&request).await;
            assert_eq!(code, ErrorCode::StaleRoute, "{request:?}");
        }
    }
    // Somebody else of the set, in a log that exists.
    let (_third, mut third) = site.leader(2).await;
    for request in [
        records(ReplicaLog::Stream, 7, 104, &["x"]),
        rebuild(ReplicaLog::Stream, 7, 0),
    ] {
        assert_eq!(third.refused(&request).await, ErrorCode::Unauthorized);
    }
    assert_eq!(site.brokers.metric(0, "felix_follower_logs"), 5.0);
    assert_eq!(
        site.brokers.metric(0, "felix_follower_conflicts_total"),
        5.0
    );
    assert_eq!(site.brokers.metric(0, "felix_follower_records_total"), 20.0);

    // What was acknowledged is there after a crash, and equal to what was sent.
    site.kill_and_restart().await;
    let (_peer, mut stream) = site.leader(1).await;
    for of in &LOGS {
        let log = of.log;
        let gap = ask(&mut stream, &records(log, 7, 105, &["x"])).await;
        assert_eq!(gap, Err((ErrorCode::LogGap, 104)), "{log:?}");
        let answer = send_vector(&mut stream, of.records).await;
        assert_eq!(outcome(&answer), Ok(104), "{log:?}");
        let all = ["alpha", "beta", "gamma", "delta", "epsilon"];
        assert_eq!(ask(&mut stream, &records(log, 7, 100, &all)).await, Ok(105));
    }
    site.verify_offline().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_of_a_stream_are_answered_in_order_without_waiting_for_each_other() {
    let site = Site::start_with_cores(2);
    let (_peer, mut stream) = site.leader(1).await;
    let log = ReplicaLog::Stream;
    let count = 200;
    for first in 0..count {
        let request = records(log, 7, first, &["one"]);
        stream.send(encode(&request).expect("a frame")).await;
    }
    let mut durable = 0;
    for first in 0..count {
        let answer = stream.message().await;
        assert_eq!(
            answer.correlation(),
            CorrelationId(first + 1000),
            "in order"
        );
        let now = outcome(&answer).expect("stored");
        assert!(now > first && now >= durable && now <= count, "cumulative");
        durable = now;
    }
    assert_eq!(durable, count);
    let commits = site.brokers.metric(0, "felix_storage_commits_total");
    assert!(
        commits < count as f64,
        "{commits} commits for {count} batches: they do not share commits"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_leader_s_suffix_is_dropped_for_the_next_one() {
    let mut site = Site::start();
    let (_old, mut old) = site.leader(1).await;
    let log = ReplicaLog::Stream;
    let common = ["r0", "r1", "r2"];
    assert_eq!(ask(&mut old, &records(log, 7, 0, &common)).await, Ok(3));
    site.assign(8, "node-3");
    let (_next, mut next) = site.leader(2).await;
    // Generation 8 has the three, and its own behind them.
    let batch = ["r0", "r1", "r2", "s3", "s4"];
    assert_eq!(ask(&mut next, &records(log, 8, 0, &batch)).await, Ok(5));
    // The deposed one learns that it is over, for every request.
    for request in [
        records(log, 7, 3, &["late"]),
        bootstrap(log, 7, 0),
        rebuild(log, 7, 0),
    ] {
        assert_eq!(old.refused(&request).await, ErrorCode::FencedEpoch);
    }
    // 9 never saw s3 and s4: they go, and the log equals its own.
    site.assign(9, "node-2");
    let (_third, mut third) = site.leader(1).await;
    let gap = ask(&mut third, &records(log, 9, 5, &["t5"])).await;
    assert_eq!(gap, Err((ErrorCode::LogGap, 2)), "uncompared records of 8");
    let batch = ["r2", "t3"];
    assert_eq!(ask(&mut third, &records(log, 9, 2, &batch)).await, Ok(4));
    let dropped = "felix_follower_dropped_records_total";
    assert_eq!(site.brokers.metric(0, dropped), 2.0);
    // After a crash as before it.
    site.kill_and_restart().await;
    let (_third, mut third) = site.leader(1).await;
    let all = ["r0", "r1", "r2", "t3", "t4"];
    assert_eq!(ask(&mut third, &records(log, 9, 0, &all)).await, Ok(5));
    let copies = site.listed_copies(1).await;
    assert_eq!(copies[0]["generation"], 9);
    assert_eq!(copies[0]["durable_offset"], 5);
    assert_eq!(copies[0]["matched_offset"], 5);
    site.verify_offline().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_difference_too_deep_is_kept_until_a_rebuild_asks() {
    let site = Site::start();
    let (_old, mut old) = site.leader(1).await;
    let log = ReplicaLog::Counters;
    assert_eq!(ask(&mut old, &records(log, 7, 0, &["a", "b"])).await, Ok(2));
    site.assign(8, "node-3");
    let (_next, mut next) = site.leader(2).await;
    let own = ["a", "b", "c"];
    assert_eq!(ask(&mut next, &records(log, 8, 0, &own)).await, Ok(3));
    site.assign(9, "node-2");
    let (_third, mut third) = site.leader(1).await;
    // Differs at 1, before generation 8 began at 2.
    let conflict = ask(&mut third, &records(log, 9, 0, &["a", "q"])).await;
    assert_eq!(conflict, Err((ErrorCode::LogConflict, 1)));
    let again = ask(&mut third, &records(log, 9, 0, &["a"])).await;
    assert_eq!(again, Ok(1), "nothing was dropped");
    assert_eq!(ask(&mut third, &rebuild(log, 9, 0)).await, Ok(0));
    let all = ["a", "q", "r"];
    assert_eq!(ask(&mut third, &records(log, 9, 0, &all)).await, Ok(3));
    assert_eq!(site.brokers.metric(0, "felix_follower_rebuilds_total"), 1.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_catalog_older_than_an_accepted_generation_is_refused() {
    let mut site = Site::start();
    let (_peer, mut stream) = site.leader(1).await;
    let log = ReplicaLog::Stream;
    assert_eq!(ask(&mut stream, &records(log, 7, 0, &["a"])).await, Ok(1));
    // Without the shard the file is fine; with the shard at an older generation it is not.
    let path = site.brokers.cluster.catalog().to_path_buf();
    std::fs::write(path.with_extension("new"), &site.plain_catalog).expect("a file");
    std::fs::rename(path.with_extension("new"), &path).expect("a rename");
    let long = Duration::from_secs(30);
    site.brokers
        .wait_metric_for(0, "felix_catalog_reloads_total", 1.0, long);
    for (generation, code) in [(6, ErrorCode::FencedEpoch), (7, ErrorCode::StaleRoute)] {
        let request = records(log, generation, 1, &["b"]);
        assert_eq!(stream.refused(&request).await, code, "at {generation}");
    }
    site.write_catalog(6, "node-2");
    let refused = "felix_catalog_reload_errors_total";
    site.brokers.wait_metric_for(0, refused, 1.0, long);
    let status = site.brokers.cluster.node(0).status().expect("a status");
    let error = status["catalog"]["error"].as_str().unwrap_or_default();
    assert!(error.contains("has accepted 7"), "{status}");
    // Nor does a broker start with it.
    let node = site.brokers.cluster.node_mut(0);
    node.stop().expect("stopped");
    node.start().expect("a process");
    let failed = node.wait_ready().expect_err("the file is too old");
    assert!(failed.to_string().contains("has accepted 7"), "{failed}");
    site.write_catalog(7, "node-2");
    site.brokers.start_node(0);
    let (_peer, mut stream) = site.leader(1).await;
    assert_eq!(ask(&mut stream, &records(log, 7, 1, &["b"])).await, Ok(2));
}

/// Leaving the set and the shard while batches are under way: each is answered, none is lost silently.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_that_comes_to_lead_refuses_its_former_leader() {
    let site = Site::start();
    let (_peer, mut stream) = site.leader(1).await;
    let log = ReplicaLog::Cache;
    assert_eq!(ask(&mut stream, &records(log, 7, 0, &["a"])).await, Ok(1));
    site.assign(8, "node-1");
    for request in [records(log, 7, 1, &["b"]), rebuild(log, 7, 0)] {
        assert_eq!(stream.refused(&request).await, ErrorCode::FencedEpoch);
    }
    let request = records(log, 8, 1, &["b"]);
    assert_eq!(stream.refused(&request).await, ErrorCode::Unauthorized);
    // And follows again, where it was.
    site.assign(9, "node-2");
    let (_peer, mut stream) = site.leader(1).await;
    let batch = ["a", "b"];
    assert_eq!(ask(&mut stream, &records(log, 9, 0, &batch)).await, Ok(2));
}
