//! Three brokers on hosts of their own hold copies of one stream while everything happens to them: killed,
//! stopped, cut off in one direction or both, restarted, replaced, moved, under load and one after the other.
//!
//! No record acknowledged at `quorum` may be missing on whoever leads next, and in the end all copies
//! are equal to the byte. `FELIX_FAULT_RUN_SECONDS` (25) is how long faults go on, `FELIX_FAULT_RUN_SEED`
//! which ones; the run prints what it did.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use felix_uring::cluster::TENANT;
use felix_uring::tls::CLIENT_ALPN;
use felix_uring::wire::client::{Answer, PublishOutcome, ToClient};
use storage_uring::LogKind;

use crate::support::brokers::Brokers;
use crate::support::client::{auth, publish_frame, Client, Stream};
use crate::support::netns::Net;
use crate::support::replica_set::{
    assert_copies_equal, assign, replicated, status_of, wait_level, wait_open, wait_reach, History,
    Log, LATER,
};

const NAME: &str = "copied";
const LOG: Log = Log::of(LogKind::Stream, NAME);
const NODES: usize = 3;
/// Acknowledged records between two faults.
const BETWEEN: usize = 30;

/// Small and the same everywhere.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }

    fn span(&mut self, least_ms: u64, most_ms: u64) -> Duration {
        Duration::from_millis(least_ms + self.below(most_ms - least_ms))
    }
}

/// What clients were told, over all of them.
#[derive(Default)]
struct Told {
    acked: Mutex<BTreeMap<u64, String>>,
    failed: Mutex<BTreeMap<String, u64>>,
    is_over: AtomicBool,
}

impl Told {
    fn count(&self) -> usize {
        self.acked.lock().expect("no panic").len()
    }

    fn acked_at(&self, offset: u64, record: String) {
        let before = self
            .acked
            .lock()
            .expect("no panic")
            .insert(offset, record.clone());
        assert_eq!(before, None, "{record} is acknowledged at {offset} as well");
    }

    fn failed(&self, why: &str) {
        *self
            .failed
            .lock()
            .expect("no panic")
            .entry(why.to_owned())
            .or_default() += 1;
    }
}

/// Where a client finds its broker.
#[derive(Clone)]
struct Way {
    addr: SocketAddr,
    ca: PathBuf,
    token: String,
}

impl Way {
    /// An authenticated stream, if the broker can be reached at all.
    async fn stream(&self) -> Option<(Client, Stream)> {
        let dialled = Client::dial(self.addr, &self.ca, Some(CLIENT_ALPN));
        let client = dialled.await.ok()?;
        let (send, recv) = client.conn.open_bi().await.ok()?;
        let mut stream = Stream::of(send, recv);
        stream.send(auth(TENANT, &self.token)).await;
        match stream.answers.next().await {
            Ok(ToClient::Answer(Answer::AuthOk(_))) => Some((client, stream)),
            Ok(_) | Err(_) => None,
        }
    }
}

/// Publishes one record after the other until the run is over, through whatever happens to its broker.
async fn publish_through(way: Way, prefix: usize, told: Arc<Told>) {
    let mut nth = 0u64;
    while !told.is_over.load(Ordering::Relaxed) {
        let reached = tokio::time::timeout(Duration::from_secs(3), way.stream()).await;
        let Ok(Some((_client, mut stream))) = reached else {
            told.failed("not connected");
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        while !told.is_over.load(Ordering::Relaxed) {
            nth += 1;
            let record = format!("{prefix}-{nth}");
            let exchange = async {
                stream.send(publish_frame(nth, NAME, &[&record])).await;
                stream.answers.next().await
            };
            match tokio::time::timeout(Duration::from_secs(10), exchange).await {
                Ok(Ok(ToClient::Ack(ack))) if ack.request_id == nth => match ack.outcome {
                    PublishOutcome::Accepted { offset } => {
                        told.acked_at(offset.expect("an offset"), record);
                    }
                    PublishOutcome::Failed(refusal) => {
                        told.failed(refusal.code.as_ref().map_or("none", |code| code.name()));
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                },
                Ok(Ok(other)) => panic!("not an answer to {nth}: {other:?}"),
                Ok(Err(_)) => {
                    told.failed("connection ended");
                    break;
                }
                Err(_) => {
                    told.failed("no answer");
                    break;
                }
            }
        }
    }
}

/// What is done to the brokers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    KillFollower,
    KillLeader,
    StopFollower,
    StopLeader,
    CutLeaderToFollower,
    CutFollowerToLeader,
    IsolateFollower,
    IsolateLeader,
    RestartFollower,
    RestartLeader,
    ReplaceKilledLeader,
    ReplaceStoppedLeader,
    MoveUnderLoad,
}

impl Fault {
    const ALL: [Self; 13] = [
        Self::KillFollower,
        Self::ReplaceKilledLeader,
        Self::CutLeaderToFollower,
        Self::StopLeader,
        Self::MoveUnderLoad,
        Self::KillLeader,
        Self::IsolateLeader,
        Self::ReplaceStoppedLeader,
        Self::StopFollower,
        Self::CutFollowerToLeader,
        Self::RestartLeader,
        Self::IsolateFollower,
        Self::RestartFollower,
    ];
}

/// The run.
struct Run<'a> {
    net: &'a Net,
    brokers: Brokers,
    random: Random,
    told: Arc<Told>,
    started: Instant,
    leader: usize,
    generation: u64,
    /// Below it everything acknowledged has been found on a leader.
    checked_below: u64,
    done: BTreeMap<Fault, u64>,
}

impl Run<'_> {
    fn follower(&mut self) -> usize {
        let followers: Vec<usize> = (0..NODES).filter(|node| *node != self.leader).collect();
        self.random.pick(&followers)
    }

    /// A line of the run's own log, which a failure shows.
    fn say(&self, what: &str) {
        println!(
            "{:>7.3} s: leader {} at generation {}, {} acknowledged: {what}",
            self.started.elapsed().as_secs_f64(),
            self.leader,
            self.generation,
            self.told.count()
        );
    }

    fn signal(&self, node: usize, signal: i32) {
        let pid = self.brokers.cluster.node(node).pid().expect("a process");
        // SAFETY: sends a signal to a child of this test.
        let sent = unsafe { libc::kill(pid as i32, signal) };
        assert_eq!(sent, 0, "a signal to node {node}");
    }

    async fn sleep(&mut self, least_ms: u64, most_ms: u64) {
        let span = self.random.span(least_ms, most_ms);
        tokio::time::sleep(span).await;
    }

    async fn strike(&mut self, fault: Fault) {
        *self.done.entry(fault).or_default() += 1;
        let (leader, follower) = (self.leader, self.follower());
        self.say(&format!("{fault:?}, follower {follower}"));
        match fault {
            Fault::KillFollower => self.kill_for_a_while(follower).await,
            Fault::KillLeader => self.kill_for_a_while(leader).await,
            Fault::StopFollower => self.stop_for_a_while(follower).await,
            Fault::StopLeader => self.stop_for_a_while(leader).await,
            Fault::CutLeaderToFollower => {
                self.net.cut(leader, follower);
                self.sleep(300, 4_000).await;
            }
            Fault::CutFollowerToLeader => {
                self.net.cut(follower, leader);
                self.sleep(300, 4_000).await;
            }
            Fault::IsolateFollower => self.isolate(follower).await,
            Fault::IsolateLeader => self.isolate(leader).await,
            Fault::RestartFollower => self.restart(follower).await,
            Fault::RestartLeader => self.restart(leader).await,
            Fault::ReplaceKilledLeader => {
                self.kill(leader);
                self.replace(leader).await;
                self.brokers.start_node(leader);
            }
            Fault::ReplaceStoppedLeader => {
                // It sleeps through its replacement, wakes as a leader, and must not acknowledge. Cut off,
                // because what it had sent could still reach a follower that has been looked at.
                self.signal(leader, libc::SIGSTOP);
                self.cut_off(leader);
                self.sleep(100, 1_000).await;
                self.replace(leader).await;
                self.signal(leader, libc::SIGCONT);
            }
            Fault::MoveUnderLoad => self.move_under_load(follower).await,
        }
        self.net.heal_all();
    }

    fn kill(&mut self, node: usize) {
        self.brokers.cluster.node_mut(node).kill().expect("killed");
    }

    async fn kill_for_a_while(&mut self, node: usize) {
        self.kill(node);
        self.sleep(50, 2_000).await;
        self.brokers.start_node(node);
    }

    async fn stop_for_a_while(&mut self, node: usize) {
        self.signal(node, libc::SIGSTOP);
        self.sleep(200, 8_000).await;
        self.signal(node, libc::SIGCONT);
    }

    async fn restart(&mut self, node: usize) {
        let stopped = self.brokers.cluster.node_mut(node).stop();
        stopped.unwrap_or_else(|e| panic!("{e}"));
        self.brokers.start_node(node);
    }

    fn cut_off(&self, node: usize) {
        for other in (0..NODES).filter(|other| *other != node) {
            self.net.cut_both(node, other);
        }
    }

    async fn isolate(&mut self, node: usize) {
        self.cut_off(node);
        self.sleep(300, 4_000).await;
    }

    /// The operator's rule: with the old leader dead or asleep, the longest of the other logs, if its
    /// history is as new as any.
    async fn replace(&mut self, old: usize) {
        let others: Vec<usize> = (0..NODES).filter(|node| *node != old).collect();
        let deadline = Instant::now() + LATER;
        let next = loop {
            let seen: Vec<(usize, History, u64)> = others
                .iter()
                .map(|node| {
                    let (history, tail) = History::of(&self.brokers, *node, LOG);
                    (*node, history, tail)
                })
                .collect();
            let newest = seen
                .iter()
                .max_by_key(|(_, history, tail)| (history.newest(), *tail));
            let (node, _, tail) = newest.expect("two logs");
            if seen.iter().all(|(_, _, other)| other <= tail) {
                self.say(&format!("node {node} is chosen of {seen:?}"));
                break *node;
            }
            // Nobody qualifies yet: what is on its way may still arrive.
            assert!(Instant::now() < deadline, "nobody qualifies: {seen:?}");
            tokio::time::sleep(Duration::from_millis(200)).await;
        };
        self.generation += 1;
        let third = NODES - old - next;
        assign(
            &self.brokers,
            "stream",
            NAME,
            self.generation,
            &[next, third, old],
        );
        self.leader = next;
        wait_open(&self.brokers, next, LOG).await;
        self.nothing_is_missing();
    }

    /// Everything acknowledged since the last look is in the log of whoever leads now.
    fn nothing_is_missing(&mut self) {
        let acked = self.told.acked.lock().expect("no panic");
        let Some(last) = acked.keys().next_back() else {
            return;
        };
        let held = History::records(&self.brokers, self.leader, LOG, self.checked_below);
        for (offset, record) in acked.range(self.checked_below..) {
            assert_eq!(
                held.get(offset).map(|held| &held[..]),
                Some(record.as_bytes()),
                "acknowledged at {offset}, on node {} at generation {}",
                self.leader,
                self.generation
            );
        }
        let last = *last;
        drop(acked);
        self.checked_below = last + 1;
    }

    /// The way of docs/operations.md: old and new leader alone, then the new one, then all.
    async fn move_under_load(&mut self, next: usize) {
        let (old, third) = (self.leader, NODES - self.leader - next);
        self.assign(&[old, next]);
        let held = self.open_at(old).await["next_offset"].as_u64();
        let deadline = Instant::now() + LATER;
        while status_of(&self.brokers, old, LOG)["mark"].as_u64() < held {
            assert!(Instant::now() < deadline, "no mark at {held:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        self.assign(&[next, old]);
        self.leader = next;
        self.open_at(next).await;
        self.nothing_is_missing();
        self.assign(&[next, old, third]);
        self.open_at(next).await;
    }

    fn assign(&mut self, nodes: &[usize]) {
        self.generation += 1;
        assign(&self.brokers, "stream", NAME, self.generation, nodes);
    }

    async fn open_at(&self, node: usize) -> serde_json::Value {
        let deadline = Instant::now() + LATER;
        loop {
            let shard = status_of(&self.brokers, node, LOG);
            if shard["opening"] == "open" && shard["generation"] == self.generation {
                return shard;
            }
            assert!(
                Instant::now() < deadline,
                "node {node} does not open: {shard}"
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Healed, the shard takes writes again.
    async fn recover(&self, fault: Fault) {
        let (before, deadline) = (self.told.count(), Instant::now() + LATER);
        while self.told.count() < before + BETWEEN {
            let shard = status_of(&self.brokers, self.leader, LOG);
            let so_far = self.told.count() - before;
            assert!(
                Instant::now() < deadline,
                "{so_far} records since {fault:?}: {shard}"
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
}

#[test]
fn whatever_happens_to_three_brokers_nothing_acknowledged_is_missing() {
    let Some(net) = Net::or_skip(NODES, "whatever_happens_to_three_brokers") else {
        return;
    };
    let seconds = number("FELIX_FAULT_RUN_SECONDS", 25);
    let seed = number("FELIX_FAULT_RUN_SEED", 1);
    net.block_on(run(&net, Duration::from_secs(seconds), seed));
}

async fn run(net: &Net, span: Duration, seed: u64) {
    let brokers = Brokers::start_in(net, NODES, |spec| {
        spec.extra_args.push("--quorum-timeout-ms=2000".into());
        spec.streams.push(replicated(NAME, NODES as u16, "quorum"));
    });
    wait_open(&brokers, 0, LOG).await;
    let told = Arc::new(Told::default());
    let mut publishers = Vec::new();
    for prefix in 0..2 * NODES {
        let way = Way {
            addr: brokers.cluster.node(prefix % NODES).client_addr(),
            ca: brokers.cluster.ca().to_path_buf(),
            token: brokers.token(),
        };
        publishers.push(tokio::spawn(publish_through(way, prefix, told.clone())));
    }
    let mut run = Run {
        net,
        brokers,
        random: Random(seed),
        told: told.clone(),
        started: Instant::now(),
        leader: 0,
        generation: 1,
        checked_below: 0,
        done: BTreeMap::new(),
    };
    let started = run.started;
    let mut rounds = Fault::ALL.into_iter().cycle();
    while started.elapsed() < span {
        // First each in turn, later at random.
        let fault = match run.done.len() < Fault::ALL.len() {
            true => rounds.next().expect("without end"),
            false => run.random.pick(&Fault::ALL),
        };
        run.strike(fault).await;
        run.recover(fault).await;
    }
    told.is_over.store(true, Ordering::Relaxed);
    for publisher in publishers {
        publisher.await.expect("no publisher panics");
    }
    let Run {
        mut brokers,
        leader,
        done,
        generation,
        ..
    } = run;
    let acked = told.acked.lock().expect("no panic").clone();
    let last = acked.keys().next_back().copied().unwrap_or(0);
    for node in 0..NODES {
        wait_reach(&brokers, node, LOG, last + 1).await;
    }
    // One more record under the last generation: what dead leaders left behind the end is dropped.
    wait_level(&brokers, leader, LOG, last + 1).await;
    let (_client, mut stream) = crate::support::replica_set::client(&brokers, leader).await;
    stream.publish_until_taken(NAME, LATER).await;
    wait_level(&brokers, leader, LOG, last + 2).await;
    let copy = assert_copies_equal(&mut brokers, &[0, 1, 2], LOG);
    for (offset, record) in &acked {
        let held = copy.at(*offset).map(|held| &held[..]);
        assert_eq!(held, Some(record.as_bytes()), "at {offset}");
    }
    let failed = told.failed.lock().expect("no panic");
    println!(
        "seed {seed}: {} s, {} acknowledged, {} records in each of 3 equal copies, generation {generation}, faults {done:?}, not acknowledged {failed:?}",
        started.elapsed().as_secs(),
        acked.len(),
        copy.tail(),
    );
}
