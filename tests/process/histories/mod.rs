//! Histories of caches and counters recorded from clients of every broker, while the owner is killed
//! and started again, and while the shard moves from broker to broker: every key's history must be
//! linearizable.
//!
//! A change of leaders may cost what was acknowledged by the old one alone and had not been copied: of
//! counters always, of values at `leader` consistency. The histories say when that may have been
//! ([`Run::may_have_lost`]) and when every copy was level ([`Run::kept`]); all else is held against
//! them. Of the values of a `quorum` cache nothing may be missing, and nothing of either where the
//! clients paused while the shard was moved.
//!
//! `FELIX_HISTORY_KILLS` is the number of kills (2 unless set), or of moves (4 unless set).

mod clients;

use std::time::Duration;

use felix_uring::cluster::ShardedSpec;
use storage_uring::LogKind;

use crate::support::brokers::Brokers;
use crate::support::cache_client::CACHE;
use crate::support::failover::{CopiedShard, LATER};
use crate::support::replica_set::{assign, wait_level, wait_mark_past_all, wait_open_at, Log};
use clients::Run;

/// How long clients ask between two kills; kept short so that the search stays small.
const BETWEEN: Duration = Duration::from_millis(400);
/// How long they write what may be lost.
const AT_RISK: Duration = Duration::from_millis(150);

const SHARD: CopiedShard = CopiedShard {
    kind: "cache",
    name: CACHE,
};
const LOG: Log = Log::of(LogKind::Cache, CACHE);

fn rounds(unless_set: usize) -> usize {
    std::env::var("FELIX_HISTORY_KILLS").map_or(unless_set, |n| n.parse().expect("a number"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_clients_saw_over_kills_of_the_owner_is_linearizable() {
    let mut brokers = Brokers::start_with(2, |spec| {
        spec.caches = vec![ShardedSpec::new(CACHE, 1).led_by(&[0])];
    });
    let run = Run::new();
    let clients = run.start_clients(&brokers);
    for _ in 0..rounds(2) {
        tokio::time::sleep(BETWEEN).await;
        let killed = brokers.cluster.node_mut(0).kill();
        killed.unwrap_or_else(|e| panic!("{e}"));
        tokio::task::block_in_place(|| brokers.start_node(0));
    }
    tokio::time::sleep(BETWEEN).await;
    run.judge(clients).await;
}

/// How the shard comes to its next leader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Move {
    /// The leader is killed.
    Killed,
    /// It moves while everybody lives and writes.
    Planned,
    /// The leader is told to stop.
    Stopped,
    /// It moves while everybody lives and nobody writes.
    Paused,
}

const MOVES: [Move; 4] = [Move::Killed, Move::Planned, Move::Stopped, Move::Paused];

/// A cache of three copies, its leader, and its generation.
struct Moving {
    brokers: Brokers,
    leader: usize,
    generation: u64,
    of_values: bool,
}

impl Moving {
    fn start(consistency: &str) -> Self {
        let brokers = Brokers::start_with(3, |spec| {
            spec.caches = vec![ShardedSpec {
                replicas: 3,
                consistency: Some(consistency.to_string()),
                ..ShardedSpec::new(CACHE, 1).led_by(&[0])
            }];
        });
        brokers.wait_metric_for(0, "felix_replicated_shards_open", 1.0, LATER);
        Self {
            brokers,
            leader: 0,
            generation: 1,
            of_values: consistency == "leader",
        }
    }

    /// The leader goes, and another takes its place; then it is back as a copy.
    async fn fail_over(&mut self, run: &Run, how: Move) {
        let gone = self.leader;
        let since_ns = run.now_ns();
        let node = self.brokers.cluster.node_mut(gone);
        let ended = match how {
            Move::Killed => node.kill(),
            _ => tokio::task::block_in_place(|| node.stop()).map(|_| ()),
        };
        ended.unwrap_or_else(|e| panic!("{e}"));
        self.generation += 1;
        self.leader = SHARD.replace(&self.brokers, gone, self.generation).await;
        run.may_have_lost(since_ns, self.of_values);
        tokio::time::sleep(BETWEEN).await;
        tokio::task::block_in_place(|| self.brokers.start_node(gone));
    }

    /// The steps an operator takes: narrow the set, name the new leader, widen it again.
    async fn hand_over(&mut self, run: &Run, how: Move) {
        let (old, new) = (self.leader, (self.leader + 1) % 3);
        self.assign(&[old, new]).await;
        wait_mark_past_all(&self.brokers, old, LOG, self.generation).await;
        if how == Move::Paused {
            run.pause().await;
            wait_level(&self.brokers, old, LOG, 0).await;
        }
        let since_ns = run.now_ns();
        self.assign(&[new, old]).await;
        if how == Move::Planned {
            run.may_have_lost(since_ns, self.of_values);
        }
        run.resume();
        self.assign(&[new, old, 3 - old - new]).await;
    }

    /// Writes the next generation, and waits until its leader takes writes.
    async fn assign(&mut self, holders: &[usize]) {
        self.generation += 1;
        assign(&self.brokers, SHARD.kind, CACHE, self.generation, holders);
        self.leader = holders[0];
        wait_open_at(&self.brokers, self.leader, LOG, self.generation).await;
    }
}

async fn judge_moves(consistency: &str) {
    let mut shard = Moving::start(consistency);
    let run = Run::new();
    let clients = run.start_clients(&shard.brokers);
    for round in 0..rounds(MOVES.len()) {
        let how = MOVES[round % MOVES.len()];
        tokio::time::sleep(BETWEEN).await;
        // A copy that is not repaired yet may be longer than one that is whole.
        run.pause().await;
        let since_ns = run.now_ns();
        wait_level(&shard.brokers, shard.leader, LOG, 0).await;
        run.kept(since_ns);
        run.resume();
        tokio::time::sleep(AT_RISK).await;
        match how {
            Move::Killed | Move::Stopped => shard.fail_over(&run, how).await,
            Move::Planned | Move::Paused => shard.hand_over(&run, how).await,
        }
    }
    tokio::time::sleep(BETWEEN).await;
    run.judge(clients).await;
}

/// Of values nothing that a majority was answered for is missing, and nothing comes back; of sums
/// nothing but the end of what their leader alone had.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_clients_saw_over_moves_of_a_quorum_cache_is_linearizable() {
    judge_moves("quorum").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_clients_saw_over_moves_of_a_leader_cache_is_linearizable() {
    judge_moves("leader").await;
}
