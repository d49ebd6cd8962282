//! Clients that ask at random and write down what they saw, and the judgement of it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use felix_uring::cluster::{NAMESPACE, TENANT};
use felix_uring::tls::CLIENT_ALPN;
use felix_uring::wire::client::messages::{
    CacheDelete, CacheGet, CachePut, CounterAdd, CounterGet,
};
use felix_uring::wire::client::{encode_message, Answer, Blob, RetryClass, ToClient};
use tokio::task::JoinHandle;

use crate::support::brokers::Brokers;
use crate::support::cache_client::CACHE;
use crate::support::client::{Client, Stream};
use crate::support::linear::{is_linearizable, Call, Operation, Seen};

/// Clients of each broker.
const CLIENTS: usize = 3;
const KEYS: u64 = 3;
const VALUE: &str = "value-";
const SUM: &str = "sum-";
/// An answer comes within the request timeout of a forward and some margin.
const ANSWER_LIMIT: Duration = Duration::from_secs(9);
/// Steps of the search for one key.
const MOST_STEPS: usize = 3_000_000;

/// What the clients share.
pub struct Run {
    started: Instant,
    is_over: AtomicBool,
    /// Nobody asks while it is set.
    is_paused: AtomicBool,
    /// Operations that were sent and not answered.
    asking: AtomicUsize,
    next_value: AtomicU64,
    /// By key.
    histories: Mutex<BTreeMap<String, Vec<Operation>>>,
}

impl Run {
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            started: Instant::now(),
            is_over: AtomicBool::new(false),
            is_paused: AtomicBool::new(false),
            asking: AtomicUsize::new(0),
            next_value: AtomicU64::new(1),
            histories: Mutex::new(BTreeMap::new()),
        })
    }

    /// Clients that ask at random, some at each broker.
    pub fn start_clients(self: &Arc<Self>, brokers: &Brokers) -> Vec<JoinHandle<()>> {
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

    /// Nobody asks any more when this returns; what was asked is answered, or has failed.
    pub async fn pause(&self) {
        self.is_paused.store(true, Ordering::SeqCst);
        while self.asking.load(Ordering::SeqCst) > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    pub fn resume(&self) {
        self.is_paused.store(false, Ordering::SeqCst);
    }

    /// Every copy of what was done until now is level, at a moment since `since_ns`.
    pub fn kept(&self, since_ns: u64) {
        for key in keys() {
            self.mark(&key, Call::Keep, since_ns);
        }
    }

    /// Another leader took over, between `since_ns` and now. With `of_values` what it lacks may be
    /// missing of the values as well.
    pub fn may_have_lost(&self, since_ns: u64, of_values: bool) {
        for key in keys() {
            if of_values || key.starts_with(SUM) {
                self.mark(&key, Call::Lose, since_ns);
            }
        }
    }

    fn mark(&self, key: &str, call: Call, sent_ns: u64) {
        let seen = Seen::Done;
        let answered_ns = self.now_ns();
        let operation = Operation {
            call,
            seen,
            sent_ns,
            answered_ns,
        };
        self.record(key, operation);
    }

    /// Ends the clients and judges what they saw.
    pub async fn judge(&self, clients: Vec<JoinHandle<()>>) {
        self.is_over.store(true, Ordering::Relaxed);
        self.resume();
        for client in clients {
            client.await.expect("no client panicked");
        }
        let histories = self.histories.lock().expect("no client panicked");
        assert!(histories.keys().eq(keys().iter()), "every key was used");
        let (mut operations, mut unknown) = (0, 0);
        for (key, history) in histories.iter() {
            operations += history.len();
            unknown += history
                .iter()
                .filter(|operation| operation.seen == Seen::Unknown)
                .count();
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
        println!(
            "{operations} operations of {} keys, {unknown} of unknown outcome",
            histories.len()
        );
    }

    pub fn now_ns(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    fn record(&self, key: &str, operation: Operation) {
        let mut histories = self.histories.lock().expect("no client panicked");
        histories.entry(key.to_owned()).or_default().push(operation);
    }
}

/// All keys, in order.
fn keys() -> Vec<String> {
    let of = |kind| (0..KEYS).map(move |nth| format!("{kind}{nth}"));
    of(SUM).chain(of(VALUE)).collect()
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
        Call::Keep | Call::Lose => unreachable!("nobody is asked to"),
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
        let kind = roll(2);
        let key = match kind {
            0 => format!("{VALUE}{}", roll(KEYS)),
            _ => format!("{SUM}{}", roll(KEYS)),
        };
        let call = match (kind, roll(10)) {
            (0, 0..=4) => Call::Get,
            (0, 5..=8) => Call::Put(run.next_value.fetch_add(1, Ordering::Relaxed)),
            (0, _) => Call::Delete,
            (_, 0..=4) => Call::Sum,
            (_, _) => Call::Add(roll(100) as i64 - 50),
        };
        run.asking.fetch_add(1, Ordering::SeqCst);
        if run.is_paused.load(Ordering::SeqCst) {
            run.asking.fetch_sub(1, Ordering::SeqCst);
            session = Some((client, stream));
            tokio::time::sleep(Duration::from_millis(1)).await;
            continue;
        }
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
        run.asking.fetch_sub(1, Ordering::SeqCst);
        // Room between operations keeps the number that overlap, and with it the search, small.
        tokio::time::sleep(Duration::from_millis(2 + roll(6))).await;
    }
}
