//! A scripted leader, built from the golden vectors, and the broker that follows it.
//!
//! The vectors name shard 3 of `acme/billing/orders` at generation 7, a stream or a cache by their kind;
//! the catalog of these tests has both. Node 1 is a broker; nodes 2 and 3 are played by the tests.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bytes::Bytes;
use felix_uring::ids::{CorrelationId, Generation, Offset};
use felix_uring::wire::internal::hex::from_hex;
use felix_uring::wire::internal::{
    decode_frame, Bootstrap, ErrorCode, Message, Payloads, Rebuild, Records, ReplicaLog, ShardRef,
    Text,
};

use crate::support::brokers::Brokers;
use crate::support::command::{felix, run};
use crate::support::dialler::{PeerClient, PeerStream};
use crate::support::SOON;

pub const GENERATION: u64 = 7;

/// The catalog's tables of the vectors' stream and cache.
pub fn vector_tables(generation: u64, leader: &str, replicas: &[&str]) -> String {
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
pub struct Site {
    pub brokers: Brokers,
    pub plain_catalog: String,
}

impl Site {
    pub fn start() -> Self {
        Self::start_with_cores(1)
    }

    pub fn start_with_cores(cores: usize) -> Self {
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

    /// Raises the generation of the file itself, in what is written from now on: without that nothing goes from it.
    pub fn raise_file_generation(&mut self) {
        let line = |line: &&str| line.starts_with("generation = ");
        let old = self.plain_catalog.lines().find(line);
        let old = old.expect("a generation").to_owned();
        let number = old
            .rsplit(' ')
            .next()
            .and_then(|text| text.parse::<u64>().ok());
        let new = format!("generation = {}", number.expect("a number") + 1);
        self.plain_catalog = self.plain_catalog.replacen(&old, &new, 1);
    }

    pub fn write_catalog(&self, generation: u64, leader: &str) {
        let tables = vector_tables(generation, leader, &["node-1", "node-2", "node-3"]);
        let path = self.brokers.cluster.catalog();
        let fresh = path.with_extension("new");
        std::fs::write(&fresh, format!("{}{tables}", self.plain_catalog)).expect("a file");
        std::fs::rename(&fresh, path).expect("a rename");
    }

    /// Changes the assignment of a running broker and waits until it is in force.
    pub fn assign(&self, generation: u64, leader: &str) {
        let reloads = "felix_catalog_reloads_total";
        let before = self.brokers.metric(0, reloads);
        self.write_catalog(generation, leader);
        let long = Duration::from_secs(30);
        self.brokers.wait_metric_for(0, reloads, before + 1.0, long);
    }

    pub async fn leader(&self, index: usize) -> (PeerClient, PeerStream) {
        let peer = PeerClient::connect(&self.brokers, index, 0).await;
        let stream = peer.greeted(&format!("node-{}", index + 1)).await;
        (peer, stream)
    }

    pub async fn kill_and_restart(&mut self) {
        self.brokers.cluster.node_mut(0).kill().expect("killed");
        self.brokers.start_node(0);
    }

    /// The copies of `/status`, which a core publishes about once a second.
    pub async fn listed_copies(&self, count: usize) -> Vec<serde_json::Value> {
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
    pub async fn verify_offline(&mut self) {
        let exit = self.brokers.cluster.node_mut(0).stop().expect("stopped");
        assert!(exit.is_clean(), "{exit:?}");
        let dir = self.brokers.cluster.node(0).data_dir().to_path_buf();
        let mut verify = felix(&["log", "verify", dir.to_str().expect("a path")]);
        let done = run(&mut verify, 3 * SOON);
        assert_eq!(done.code(), 0, "{}", done.text());
    }
}

/// The frame of a golden vector.
pub fn vector(name: &str) -> Bytes {
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
pub struct LogVectors {
    pub log: ReplicaLog,
    pub records: &'static str,
    pub wrong_checksum: &'static str,
    pub bootstrap: &'static str,
    pub rebuild: &'static str,
}

pub const LOGS: [LogVectors; 5] = [
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

pub fn orders(generation: u64) -> ShardRef {
    ShardRef {
        tenant: Text::shortened("acme"),
        namespace: Text::shortened("billing"),
        stream: Text::shortened("orders"),
        shard: 3,
        generation: Generation(generation),
    }
}

pub fn records(log: ReplicaLog, generation: u64, first: u64, batch: &[&str]) -> Message {
    let payloads = Payloads::from_slices(batch).expect("payloads");
    Message::Records(Records {
        correlation: CorrelationId(first.wrapping_add(1000)),
        log,
        shard: orders(generation),
        first_offset: Offset(first),
        checksum: payloads.batch_checksum(),
        payloads,
    })
}

pub fn bootstrap(log: ReplicaLog, generation: u64, base: u64) -> Message {
    Message::Bootstrap(Bootstrap {
        correlation: CorrelationId(base + 2000),
        log,
        shard: orders(generation),
        base_offset: Offset(base),
    })
}

pub fn rebuild(log: ReplicaLog, generation: u64, base: u64) -> Message {
    Message::Rebuild(Rebuild {
        correlation: CorrelationId(base + 3000),
        shard: orders(generation),
        log,
        base_offset: Offset(base),
    })
}

/// A positive answer's offset, or a refusal's code with the offset it names.
pub async fn ask(stream: &mut PeerStream, request: &Message) -> Result<u64, (ErrorCode, u64)> {
    outcome(&stream.ask(request).await)
}

pub fn outcome(answer: &Message) -> Result<u64, (ErrorCode, u64)> {
    match answer {
        Message::ReplicateOk { durable_offset, .. } => Ok(durable_offset.0),
        Message::ReplicateError(refusal) => Err((refusal.code, refusal.expected_offset.0)),
        other => panic!("{other:?}"),
    }
}

pub async fn send_vector(stream: &mut PeerStream, name: &str) -> Message {
    let frame = vector(name);
    let sent = decode_frame(frame.clone()).expect("a vector");
    stream.send(&frame).await;
    let answer = stream.message().await;
    assert_eq!(answer.correlation(), sent.correlation(), "{name}");
    answer
}
