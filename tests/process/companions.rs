//! Quorum caches, counters, group positions and dead letters over the loss of their leader.

use felix_uring::wire::client::RetryClass;
use storage_uring::LogKind;

use crate::support::brokers::Brokers;
use crate::support::cache_client::CacheClient;
use crate::support::group_client::GroupClient;
use crate::support::replica_set::{
    assert_copies_equal, assign, client, equal_copies, replicated, status_of, wait_level,
    wait_open, wait_reach, Log, LATER,
};

const STREAM: &str = "kept";
const CACHE: &str = crate::support::cache_client::CACHE;
const RECORDS: Log = Log::of(LogKind::Stream, STREAM);
const CURSORS: Log = Log::of(LogKind::Cursors, STREAM);
const LETTERS: Log = Log::of(LogKind::DeadLetters, STREAM);
const VALUES: Log = Log::of(LogKind::Cache, CACHE);
const COUNTERS: Log = Log::of(LogKind::Counters, CACHE);

fn start(cores: usize) -> Brokers {
    Brokers::start_with(3, |spec| {
        spec.cores_per_node = cores;
        spec.extra_args.push("--quorum-timeout-ms=3000".into());
        spec.streams.push(replicated(STREAM, 3, "quorum"));
        spec.caches = vec![replicated(CACHE, 3, "quorum")];
    })
}

/// Waits until two copies of a log reach as far as the leader's own.
async fn shipped(brokers: &Brokers, log: Log, records: u64) {
    for follower in [1, 2] {
        wait_reach(brokers, follower, log, records).await;
    }
}

/// Kills the leader and gives the shard to node 1.
async fn fail_over(brokers: &mut Brokers, kind: &str, name: &str, log: Log) {
    if brokers.cluster.node(0).pid().is_some() {
        brokers.cluster.node_mut(0).kill().expect("killed");
    }
    assign(brokers, kind, name, 2, &[1, 0, 2]);
    wait_open(brokers, 1, log).await;
}

async fn values_and_counters_outlive_their_leader(cores: usize) {
    let mut brokers = start(cores);
    wait_open(&brokers, 0, VALUES).await;
    // Through a broker that does not lead: forwarded, and answered once a majority has it.
    let mut cache = CacheClient::connect(&brokers, 2).await;
    for nth in 0..20 {
        cache
            .put(&format!("k{nth}"), format!("v{nth}").as_bytes())
            .await;
    }
    cache.put("empty", b"").await;
    assert_eq!(cache.delete("k3").await.as_deref(), Some(&b"v3"[..]));
    assert_eq!(cache.add("sum", 40).await, 40);
    assert_eq!(cache.add("sum", 2).await, 42);
    assert_eq!(cache.get("k7").await.as_deref(), Some(&b"v7"[..]));
    shipped(&brokers, COUNTERS, 2).await;

    fail_over(&mut brokers, "cache", CACHE, VALUES).await;
    // A new leader shows what it inherited once one of its own writes is on a majority.
    let mut cache = CacheClient::connect(&brokers, 1).await;
    // Until then it is refused, and never anything else than what was committed.
    let early = cache.try_get("k7").await;
    let refused = ("shard_unavailable".to_owned(), RetryClass::Retry);
    let allowed = [Err(refused), Ok(Some(b"v7".to_vec()))];
    assert!(allowed.contains(&early), "{early:?}");
    cache.put("own", b"1").await;
    for nth in (0..20).filter(|nth| *nth != 3) {
        let value = cache.get(&format!("k{nth}")).await;
        assert_eq!(value, Some(format!("v{nth}").into_bytes()));
    }
    assert_eq!(cache.get("k3").await, None, "it was deleted");
    assert_eq!(cache.get("empty").await.as_deref(), Some(&b""[..]));
    assert_eq!(cache.add("sum", 8).await, 50, "the true sum");

    brokers.start_node(0);
    wait_level(&brokers, 1, VALUES, 23).await;
    shipped_to_all(&brokers, COUNTERS, 3).await;
    let copy = assert_copies_equal(&mut brokers, &[0, 1, 2], VALUES);
    assert!(copy.tail() >= 23);
    let sums = equal_copies(&brokers, &[0, 1, 2], COUNTERS);
    assert_eq!(sums.tail(), 3);
}

async fn shipped_to_all(brokers: &Brokers, log: Log, records: u64) {
    for node in [0, 2] {
        wait_reach(brokers, node, log, records).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn quorum_values_and_counters_outlive_their_leader() {
    values_and_counters_outlive_their_leader(1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn quorum_values_and_counters_outlive_their_leader_on_two_cores() {
    values_and_counters_outlive_their_leader(2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_majority_a_quorum_cache_answers_no_write_and_no_new_value() {
    let mut brokers = start(1);
    wait_open(&brokers, 0, VALUES).await;
    let mut cache = CacheClient::connect(&brokers, 0).await;
    cache.put("k", b"old").await;
    for follower in [1, 2] {
        brokers.cluster.node_mut(follower).kill().expect("killed");
    }
    let outcome = cache.put_for("k", b"new", None).await;
    let (code, _) = outcome.expect_err("no majority");
    assert_eq!(code, "quorum_timeout");
    // The value may yet commit or be lost: neither it nor the one before is shown as settled.
    let shown = cache.try_get("k").await;
    assert_ne!(shown, Ok(Some(b"new".to_vec())), "nobody else holds it");
    brokers.start_node(1);
    cache.put("k2", b"x").await;
    assert_eq!(cache.get("k").await.as_deref(), Some(&b"new"[..]));
}

/// N32: what was settled out of order was known to memory alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn n32_groups_and_dead_letters_outlive_their_leader() {
    let mut brokers = start(1);
    wait_open(&brokers, 0, RECORDS).await;
    let (_client, mut stream) = client(&brokers, 0).await;
    for offset in 0..8 {
        let at = stream.must_publish(STREAM, format!("r{offset}")).await;
        assert_eq!(at, offset);
    }
    let mut member = GroupClient::connect(&brokers, 0, STREAM).await;
    assert_eq!(member.poll(3, 10_000).await, [(0, 1), (1, 1), (2, 1)]);
    for offset in 0..3 {
        assert_eq!(member.ack(offset).await, Ok(()));
    }
    assert_eq!(member.poll(3, 0).await, [(3, 1), (4, 1), (5, 1)]);
    assert_eq!(member.ack(4).await, Ok(()), "out of order");
    assert_eq!(member.dead_letter(5).await, Ok(()));
    assert_eq!(member.dead_letters().await, [5]);
    let cursors = status_of(&brokers, 0, RECORDS);
    assert_eq!(cursors["role"], "leader");
    shipped(&brokers, LETTERS, 1).await;
    shipped(&brokers, CURSORS, 1).await;
    // The last move of the position travels like everything else; nobody waits for it.
    wait_companions_level(&brokers).await;

    fail_over(&mut brokers, "stream", STREAM, RECORDS).await;
    let (_client, mut stream) = client(&brokers, 1).await;
    assert_eq!(stream.must_publish(STREAM, b"r8").await, 8);
    let mut member = GroupClient::connect(&brokers, 1, STREAM).await;
    assert_eq!(member.describe().await.committed, Some(3));
    assert_eq!(member.dead_letters().await, [5], "the whole group moved");
    // 3 was never finished; 4 was, in the memory of a broker that is gone; 5 is buried.
    let again = member.poll(10, 10_000).await;
    assert_eq!(again, [(3, 1), (4, 1), (6, 1), (7, 1), (8, 1)]);
    for (offset, _) in again {
        assert_eq!(member.ack(offset).await, Ok(()));
    }
    assert_eq!(member.describe().await.committed, Some(9));

    brokers.start_node(0);
    wait_level(&brokers, 1, RECORDS, 9).await;
    wait_equal(&mut brokers).await;
    for log in [CURSORS, LETTERS] {
        let copy = equal_copies(&brokers, &[0, 1, 2], log);
        assert!(copy.tail() > 0, "{log:?}");
    }
}

/// Waits until the followers' copies of positions and dead letters stand still at one length.
async fn wait_companions_level(brokers: &Brokers) {
    let deadline = std::time::Instant::now() + LATER;
    loop {
        let reach = |node, log| crate::support::replica_set::reach(brokers, node, log);
        let is_level = reach(1, CURSORS) == 3 && reach(2, CURSORS) == 3;
        if is_level {
            return;
        }
        let seen = (reach(1, CURSORS), reach(2, CURSORS));
        assert!(std::time::Instant::now() < deadline, "{seen:?}");
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
}

/// Waits until the companions of all three are shipped, and stops the brokers.
async fn wait_equal(brokers: &mut Brokers) {
    let deadline = std::time::Instant::now() + LATER;
    loop {
        let halves = [CURSORS, LETTERS]
            .map(|log| [0, 2].map(|node| crate::support::replica_set::reach(brokers, node, log)));
        if halves.iter().all(|[a, b]| a == b && *a > 0) && halves[0][0] >= 4 {
            break;
        }
        assert!(std::time::Instant::now() < deadline, "{halves:?}");
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    let log = RECORDS;
    assert_copies_equal(brokers, &[0, 1, 2], log);
}

/// Where a node's copy of a log begins, as it reports it.
fn base(brokers: &Brokers, node: usize, log: Log) -> u64 {
    let status = status_of(brokers, node, log);
    status["base_offset"].as_u64().unwrap_or(0)
}

/// What a leader compacts its followers give up as well: a copy takes what the leader's log takes, and
/// says the same when it leads.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copies_of_compacted_logs_give_up_what_their_leader_gave_up() {
    let mut brokers = start(1);
    wait_open(&brokers, 0, VALUES).await;
    let mut cache = CacheClient::connect(&brokers, 0).await;
    cache.put("still", b"here").await;
    cache.add("still", 7).await;
    let value = vec![7u8; 64 << 10];
    let sum = "sum".repeat(100);
    let deadline = std::time::Instant::now() + LATER;
    while base(&brokers, 0, VALUES) == 0 || base(&brokers, 1, COUNTERS) == 0 {
        assert!(std::time::Instant::now() < deadline, "no pass of both logs");
        for nth in 0..8 {
            cache.put(&format!("busy{}", nth % 4), &value).await;
        }
        for _ in 0..50 {
            cache.add(&sum, 1).await;
        }
    }
    // One follower hears of it when it is back.
    brokers.cluster.node_mut(2).kill().expect("killed");
    brokers.start_node(2);
    cache.put("last", b"1").await;
    let adds = cache.add(&sum, 1).await;
    wait_level(&brokers, 0, VALUES, 1).await;
    let leads = base(&brokers, 0, VALUES);
    let deadline = std::time::Instant::now() + LATER;
    for follower in [1, 2] {
        while base(&brokers, follower, VALUES) < leads || base(&brokers, follower, COUNTERS) == 0 {
            let seen = status_of(&brokers, follower, VALUES);
            assert!(std::time::Instant::now() < deadline, "{leads}: {seen}");
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    }
    assert!(brokers.metric(1, "felix_follower_shortened_total") >= 2.0);
    assert_copies_equal(&mut brokers, &[0, 1, 2], VALUES);
    equal_copies(&brokers, &[0, 1, 2], COUNTERS);
    for node in [1, 2] {
        brokers.start_node(node);
    }
    fail_over(&mut brokers, "cache", CACHE, VALUES).await;
    let mut cache = CacheClient::connect(&brokers, 1).await;
    cache.put("own", b"1").await;
    assert_eq!(cache.get("still").await.as_deref(), Some(&b"here"[..]));
    assert_eq!(cache.get("busy3").await.as_ref(), Some(&value));
    assert_eq!(cache.sum("still").await, Some(7));
    assert_eq!(cache.sum(&sum).await, Some(adds));
}
