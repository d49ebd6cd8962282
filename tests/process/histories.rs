//! Histories of caches and counters recorded from clients of every broker, while the owner is killed
//! and started again, and while the shard moves from broker to broker: every key's history must be
//! linearizable. Over a failover that is promised of the values of a `quorum` cache; a counter is
//! acknowledged by its leader alone.
//!
//! `FELIX_HISTORY_KILLS` is the number of kills, or of moves (2 unless set).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use felix_uring::cluster::{ShardedSpec, NAMESPACE, TENANT};
use felix_uring::tls::CLIENT_ALPN;
use felix_uring::wire::client::messages::{
    CacheDelete, CacheGet, CachePut, CounterAdd, CounterGet,
};
use felix_uring::wire::client::{encode_message, Answer, Blob, RetryClass, ToClient};
use tokio::task::JoinHandle;

use crate::support::brokers::Brokers;
use crate::support::cache_client::CACHE;
use crate::support::client::{Client, Stream};
use crate::support::failover::{CopiedShard, LATER};
use crate::support::linear::{is_linearizable, Call, Operation, Seen};

/// Clients of each broker.
const CLIENTS: usize = 3;
const KEYS: u64 = 3;
/// How long clients ask between two kills; kept short so that the search stays small.
const BETWEEN: Duration = Duration::from_millis(400);
/// An answer comes within the request timeout of a forward and some margin.
const ANSWER_LIMIT: Duration = Duration::from_secs(9);
/// Steps of the search for one key.
const MOST_STEPS: usize = 3_000_000;

/// What the clients share.
struct Run {
    started: Instant,
    is_over: AtomicBool,
    has_counters: bool,
    next_value: AtomicU64,
    /// By key.
    histories: Mutex<BTreeMap<String, Vec<Operation>>>,
}

impl Run {
    fn new(has_counters: bool) -> Arc<Self> {
        Arc::new(Self {
            started: Instant::now(),
            is_over: AtomicBool::new(false),
            has_counters,
            next_value: AtomicU64::new(1),
            histories: Mutex::new(BTreeMap::new()),
        })
    }

    /// Clients that ask at random, some at each broker.
    fn start_clients(self: &Arc<Self>, brokers: &Brokers) -> Vec<JoinHandle<()>> {
        let nodes = brokers.cluster.nodes().len();
        let clients = 0..CLIENTS * nodes;
        let tasks = clients.map(|client| {
            let node = brokers.cluster.node(client % nodes);
            let broker = (node.client_addr(), brokers.cluster.ca().to_owned());
            let seed = 0x9E37_79B9 + client as u64 * 7919;
            let task = ask_at_random(Arc::clone(self), broker, brokers.token(), seed);
            tokio::spawn(task)
        });
        tasks.collect()
    }

    /// Ends the clients and judges what they saw.
    async fn judge(&self, clients: Vec<JoinHandle<()>>) {
        self.is_over.store(true, Ordering::Relaxed);
        for client in clients {
            client.await.expect("no client panicked");
        }
        let histories = self.histories.lock().expect("no client panicked");
        let kinds = 1 + u64::from(self.has_counters);
        assert_eq!(histories.len() as u64, kinds * KEYS);
        let mut operations = 0;
        for (key, history) in histories.iter() {
            operations += history.len();
            match is_linearizable(history, MOST_STEPS) {
                Some(true) => {}
                Some(false) => panic!("{key} is not linearizable: {history:#?}"),
                None => panic!(
                    "{key}: the search over {} operations is too large",
                    history.len()
                ),
            }
        }
        assert!(operations > 200, "{operations} operations");
        println!("{operations} operations of {} keys", histories.len());
    }

    fn now_ns(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    fn record(&self, key: &str, operation: Operation) {
        let mut histories = self.histories.lock().expect("no client panicked");
        histories.entry(key.to_owned()).or_default().push(operation);
    }
}

fn frame_of(call: Call, key: &str) -> Bytes {
    let (tenant_id, namespace) = (TENANT.to_owned(), NAMESPACE.to_owned());
    let (cache, key) = (CACHE.to_owned(), key.to_owned());
    let frame = match call {
        Call::Get => encode_message(&CacheGet {
            tenant_id,
            namespace,
            cache,
            key,
            request_id: Some(1),
        }),
        Call::Put(value) => encode_message(&CachePut {
            tenant_id,
            namespace,
            cache,
            key,
            value: Blob(Bytes::copy_from_slice(&value.to_be_bytes())),
            request_id: Some(1),
            ttl_ms: None,
        }),
        Call::Delete => encode_message(&CacheDelete {
            tenant_id,
            namespace,
            cache,
            key,
            request_id: Some(1),
        }),
        Call::Add(delta) => encode_message(&CounterAdd {
            tenant_id,
            namespace,
            cache,
            key,
            delta,
            request_id: 1,
        }),
        Call::Sum => encode_message(&CounterGet {
            tenant_id,
            namespace,
            cache,
            key,
            request_id: 1,
        }),
    };
    frame.expect("a frame")
}

/// What an answer says; `None` when it proves that nothing was done.
fn seen_in(answer: Answer) -> Option<Seen> {
    match answer {
        Answer::CacheOk(_) => Some(Seen::Stored),
        Answer::CacheValue(value) => {
            Some(Seen::Value(value.value.map(|blob| {
                u64::from_be_bytes(blob.0.as_ref().try_into().expect("a value of ours"))
            })))
        }
        Answer::CounterValue(sum) => Some(Seen::Sum(sum.value)),
        Answer::ErrorAnswer(error) => match error.retry.expect("a class") {
            RetryClass::Retry | RetryClass::RetryAfter | RetryClass::Redirect => None,
            RetryClass::OutcomeUnknown => Some(Seen::Unknown),
            RetryClass::Fatal => panic!("{error:?}"),
        },
        other => panic!("{other:?}"),
    }
}

/// A stream to a broker that may be down; `None` when it is.
async fn open(
    brokers: &(std::net::SocketAddr, std::path::PathBuf),
    token: &str,
) -> Option<(Client, Stream)> {
    let (addr, ca) = brokers;
    let dial = Client::dial(*addr, ca, Some(CLIENT_ALPN));
    let client = tokio::time::timeout(Duration::from_secs(2), dial)
        .await
        .ok()?
        .ok()?;
    let (send, recv) = client.conn.open_bi().await.ok()?;
    let mut stream = Stream::of(send, recv);
    stream
        .send(crate::support::client::auth(TENANT, token))
        .await;
    let answer = tokio::time::timeout(Duration::from_secs(2), stream.answers.next()).await;
    match answer {
        Ok(Ok(ToClient::Answer(Answer::AuthOk(_)))) => Some((client, stream)),
        _ => None,
    }
}

/// Asks at random until the run is over, on a new stream whenever the old one is gone.
async fn ask_at_random(
    run: Arc<Run>,
    broker: (std::net::SocketAddr, std::path::PathBuf),
    token: String,
    seed: u64,
) {
    let mut dice = seed;
    let mut roll = move |bound: u64| {
        dice = dice
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (dice >> 33) % bound
    };
    let mut session = None;
    while !run.is_over.load(Ordering::Relaxed) {
        let Some((client, mut stream)) = session.take() else {
            session = open(&broker, &token).await;
            if session.is_none() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            continue;
        };
        let (kind, key) = match roll(1 + u64::from(run.has_counters)) {
            0 => (0, format!("value-{}", roll(KEYS))),
            _ => (1, format!("sum-{}", roll(KEYS))),
        };
        let call = match (kind, roll(10)) {
            (0, 0..=4) => Call::Get,
            (0, 5..=8) => Call::Put(run.next_value.fetch_add(1, Ordering::Relaxed)),
            (0, _) => Call::Delete,
            (_, 0..=4) => Call::Sum,
            (_, _) => Call::Add(roll(100) as i64 - 50),
        };
        let sent_ns = run.now_ns();
        stream.send(frame_of(call, &key)).await;
        let answer = tokio::time::timeout(ANSWER_LIMIT, stream.answers.next()).await;
        let seen = match answer.expect("an answer, or an end, in time") {
            Ok(ToClient::Answer(answer)) => {
                session = Some((client, stream));
                seen_in(answer)
            }
            Ok(other) => panic!("{other:?}"),
            Err(_) => Some(Seen::Unknown),
        };
        if let Some(seen) = seen {
            let answered_ns = match seen {
                Seen::Unknown => u64::MAX,
                _ => run.now_ns(),
            };
            run.record(
                &key,
                Operation {
                    call,
                    seen,
                    sent_ns,
                    answered_ns,
                },
            );
        }
        // Room between operations keeps the number that overlap, and with it the search, small.
        tokio::time::sleep(Duration::from_millis(2 + roll(6))).await;
    }
}

fn rounds() -> usize {
    std::env::var("FELIX_HISTORY_KILLS").map_or(2, |n| n.parse().expect("a number"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_clients_saw_over_kills_of_the_owner_is_linearizable() {
    let mut brokers = Brokers::start_with(2, |spec| {
        spec.caches = vec![ShardedSpec::new(CACHE, 1).led_by(&[0])];
    });
    let run = Run::new(true);
    let clients = run.start_clients(&brokers);
    for _ in 0..rounds() {
        tokio::time::sleep(BETWEEN).await;
        let killed = brokers.cluster.node_mut(0).kill();
        killed.unwrap_or_else(|e| panic!("{e}"));
        tokio::task::block_in_place(|| brokers.start_node(0));
    }
    tokio::time::sleep(BETWEEN).await;
    run.judge(clients).await;
}

/// The shard goes from broker to broker, its leader killed or told to stop, and comes back to it as
/// a copy: no value that a majority was answered for is missing, and none comes back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_clients_saw_over_moves_of_a_quorum_cache_is_linearizable() {
    let mut brokers = Brokers::start_with(3, |spec| {
        spec.caches = vec![ShardedSpec {
            replicas: 3,
            consistency: Some("quorum".to_string()),
            ..ShardedSpec::new(CACHE, 1).led_by(&[0])
        }];
    });
    let shard = CopiedShard {
        kind: "cache",
        name: CACHE,
    };
    brokers.wait_metric_for(0, "felix_replicated_shards_open", 1.0, LATER);
    let run = Run::new(false);
    let clients = run.start_clients(&brokers);
    let mut leader = 0;
    for round in 0..rounds() {
        tokio::time::sleep(BETWEEN).await;
        let gone = leader;
        let node = brokers.cluster.node_mut(gone);
        let ended = match round % 2 {
            0 => node.kill(),
            _ => tokio::task::block_in_place(|| node.stop()).map(|_| ()),
        };
        ended.unwrap_or_else(|e| panic!("{e}"));
        leader = shard.replace(&brokers, gone, 2 + round as u64).await;
        tokio::time::sleep(BETWEEN).await;
        tokio::task::block_in_place(|| brokers.start_node(gone));
        // A copy that is not repaired yet may be longer than one that is whole.
        shard.wait_level(&brokers, leader).await;
    }
    run.judge(clients).await;
}
