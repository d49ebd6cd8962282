//! Caches and counters of real brokers: at the owner, through another broker, over restarts.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use bytes::Bytes;
use felix_uring::cluster::ShardedSpec;
use felix_uring::ids::CorrelationId;
use felix_uring::wire::client::{Answer, RetryClass};
use felix_uring::wire::internal::{CacheOp, CacheOpKind, Credential, ErrorCode, Message, Text};

use crate::support::brokers::Brokers;
use crate::support::cache_client::{CacheClient, Refused, CACHE};
use crate::support::dialler::{shard, PeerClient, PeerStream};
use crate::support::owner::ScriptedOwner;
use crate::support::SOON;

/// Eight shards over both nodes and both of their cores.
const WIDE: &str = "wide";

fn start(cores: usize) -> Brokers {
    Brokers::start_with(2, |spec| {
        spec.cores_per_node = cores;
        spec.caches = caches();
    })
}

fn caches() -> Vec<ShardedSpec> {
    vec![
        // One shard, led by node 0: node 1 forwards everything.
        ShardedSpec::new(CACHE, 1).led_by(&[0]),
        ShardedSpec::new(WIDE, 8).led_by(&[0, 1, 0, 1, 0, 1, 0, 1]),
    ]
}

/// A power cut of the process: nothing is flushed that was not flushed before.
fn kill_and_restart(brokers: &mut Brokers, node: usize) {
    let killed = brokers.cluster.node_mut(node).kill();
    killed.unwrap_or_else(|e| panic!("{e}"));
    brokers.start_node(node);
}

fn token_with(brokers: &Brokers, perms: &[&str]) -> String {
    brokers.token_of(|claims| claims.perms = perms.iter().map(|perm| perm.to_string()).collect())
}

fn refused(code: &str, class: RetryClass) -> Refused {
    (code.to_string(), class)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_owner_and_every_other_broker_answer_alike() {
    let brokers = start(1);
    for node in [0, 1] {
        let mut client = CacheClient::connect(&brokers, node).await;
        assert_eq!(client.get("k").await, None);
        assert_eq!(client.delete("k").await, None);
        client.put("k", b"one").await;
        assert_eq!(client.get("k").await.as_deref(), Some(&b"one"[..]));
        // What one broker stored the other one finds.
        let mut other = CacheClient::connect(&brokers, 1 - node).await;
        assert_eq!(other.get("k").await.as_deref(), Some(&b"one"[..]));
        other.put("k", b"").await;
        assert_eq!(
            client.get("k").await.as_deref(),
            Some(&b""[..]),
            "not a miss"
        );
        assert_eq!(client.delete("k").await.as_deref(), Some(&b""[..]));
        assert_eq!(other.get("k").await, None);
        // The empty key, and one that no broker can forward.
        client.put("", b"empty key").await;
        assert_eq!(other.delete("").await.as_deref(), Some(&b"empty key"[..]));

        let counter = format!("c{node}");
        assert_eq!(client.sum(&counter).await, None);
        assert_eq!(client.add(&counter, 5).await, 5);
        assert_eq!(other.add(&counter, -5).await, 0);
        assert_eq!(client.sum(&counter).await, Some(0), "zero is not never");
        assert_eq!(client.get(&counter).await, None, "a counter is no value");
    }
    let (forwarded, served) = (
        brokers.metric(1, "felix_forwards_acked_total"),
        brokers.metric(0, "felix_peer_requests_total"),
    );
    assert!(
        forwarded >= 10.0 && served >= forwarded,
        "{forwarded} {served}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals_say_what_happened_and_cost_nothing_else() {
    let brokers = start(1);
    let long = "x".repeat(1024);
    let mut owner = CacheClient::connect(&brokers, 0).await;
    owner.put(&long, b"long").await;
    assert_eq!(owner.get(&long).await.as_deref(), Some(&b"long"[..]));
    let mut other = CacheClient::connect(&brokers, 1).await;
    let too_long = refused("limit_exceeded", RetryClass::Fatal);
    assert_eq!(
        other.put_for(&long, b"v", None).await,
        Err(too_long.clone())
    );
    assert_eq!(other.try_get(&long).await, Err(too_long), "never a miss");
    for client in [&mut owner, &mut other] {
        let invalid = Err(refused("invalid_request", RetryClass::Fatal));
        assert_eq!(client.put_for("zero", b"v", Some(0)).await, invalid);
        assert_eq!(client.get("zero").await, None);
    }
    // An overflow writes nothing and leaves the link between the brokers as it was.
    assert_eq!(owner.add("full", i64::MAX).await, i64::MAX);
    let closed = brokers.metric(1, "felix_connections_closed_total");
    for client in [&mut owner, &mut other] {
        let invalid = Err(refused("invalid_request", RetryClass::Fatal));
        assert_eq!(client.try_add("full", 1).await, invalid);
        assert_eq!(client.sum("full").await, Some(i64::MAX));
        assert_eq!(client.add("full", 0).await, i64::MAX);
    }
    assert_eq!(brokers.metric(1, "felix_connections_closed_total"), closed);

    let forbidden = || Err(refused("forbidden", RetryClass::Fatal));
    for node in [0, 1] {
        let token = token_with(&brokers, &["cache.read:cache:t1/*"]);
        let mut reader = CacheClient::connect_with(&brokers, node, &token).await;
        assert_eq!(reader.put_for("k", b"v", None).await, forbidden());
        assert_eq!(
            reader.try_add("k", 1).await.map(Some),
            forbidden().map(|()| None)
        );
        assert_eq!(reader.try_delete("k").await, forbidden().map(|()| None));
        assert_eq!(reader.get("k").await, None);
        let token = token_with(&brokers, &["cache.write:cache:t1/*"]);
        let mut writer = CacheClient::connect_with(&brokers, node, &token).await;
        assert_eq!(writer.try_get("k").await, forbidden().map(|()| None));
        writer.cache = "no-such-cache";
        let missing = Err(refused("not_found", RetryClass::RetryAfter));
        assert_eq!(writer.put_for("k", b"v", None).await, missing);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_time_to_live_holds_from_every_broker_and_over_a_restart() {
    let mut brokers = start(1);
    let mut other = CacheClient::connect(&brokers, 1).await;
    other
        .put_for("short", b"v", Some(1_500))
        .await
        .expect("a put");
    other
        .put_for("max", b"m", Some(u64::MAX))
        .await
        .expect("a put");
    other
        .put_for("cleared", b"1", Some(500))
        .await
        .expect("a put");
    other.put("cleared", b"2").await;
    assert!(other.get("short").await.is_some());
    tokio::time::sleep(Duration::from_millis(1_600)).await;
    let mut owner = CacheClient::connect(&brokers, 0).await;
    for client in [&mut owner, &mut other] {
        assert_eq!(client.get("short").await, None);
        assert_eq!(client.delete("short").await, None, "expired is not there");
        assert_eq!(client.get("max").await.as_deref(), Some(&b"m"[..]));
        assert_eq!(client.get("cleared").await.as_deref(), Some(&b"2"[..]));
    }
    kill_and_restart(&mut brokers, 0);
    let mut owner = CacheClient::connect(&brokers, 0).await;
    assert_eq!(owner.get("short").await, None);
    assert_eq!(owner.get("max").await.as_deref(), Some(&b"m"[..]));
    // Its delete is written within seconds, and its memory is free.
    let deadline = Instant::now() + SOON;
    while brokers.metric(0, "felix_cache_keys") > 2.0 {
        assert!(Instant::now() < deadline, "an expired key stays");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_answered_write_survives_a_kill_of_the_owner() {
    let mut brokers = start(2);
    let mut clients = [
        CacheClient::connect(&brokers, 0).await,
        CacheClient::connect(&brokers, 1).await,
    ];
    let key = |n: usize| format!("key-{n}");
    for (at, client) in clients.iter_mut().enumerate() {
        client.cache = WIDE;
        // Many at once: answers come back as the owners have them, errors would show.
        let mut waiting = BTreeSet::new();
        for n in (at * 100)..(at * 100 + 60) {
            waiting.insert(client.start_put(&key(n), key(n).as_bytes(), None).await);
        }
        while !waiting.is_empty() {
            match client.answer().await {
                Answer::CacheOk(ok) => assert!(waiting.remove(&ok.request_id)),
                other => panic!("not stored: {other:?}"),
            }
        }
        for n in (at * 100)..(at * 100 + 20) {
            assert_eq!(client.add(&key(n), n as i64 - 50).await, n as i64 - 50);
            assert_eq!(client.delete(&key(n)).await, Some(key(n).into_bytes()));
        }
    }
    drop(clients);
    for node in [0, 1] {
        kill_and_restart(&mut brokers, node);
    }
    for node in [1, 0] {
        let mut client = CacheClient::connect(&brokers, node).await;
        client.cache = WIDE;
        for n in (0..60).chain(100..160) {
            let is_deleted = n % 100 < 20;
            let expected = (!is_deleted).then(|| key(n).into_bytes());
            // The link to the restarted broker may still be in its backoff.
            let got = loop {
                match client.try_get(&key(n)).await {
                    Ok(got) => break got,
                    Err((code, RetryClass::Retry)) if code == "shard_unavailable" => {
                        tokio::time::sleep(Duration::from_millis(100)).await;
                    }
                    Err(refused) => panic!("{refused:?}"),
                }
            };
            assert_eq!(got, expected, "{n} through node {node}");
            let sum = is_deleted.then_some(n as i64 - 50);
            assert_eq!(client.sum(&key(n)).await, sum, "{n} through node {node}");
        }
    }
    let mut client = CacheClient::connect(&brokers, 0).await;
    client.cache = WIDE;
    assert_eq!(client.add(&key(0), 1).await, -49, "a sum goes on");
    assert!(brokers.metric(0, "felix_lane_messages_sent_total") > 0.0);
    assert!(brokers.metric(0, "felix_cache_loads_total") >= 1.0);
}

/// More than memory keeps: old values come from the log, for gets and for deletes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn values_that_left_memory_are_read_from_the_log() {
    let brokers = start(1);
    let mut client = CacheClient::connect(&brokers, 0).await;
    let value = |n: u8| vec![n; 1 << 20];
    for n in 0..72 {
        client.put(&format!("big-{n}"), &value(n)).await;
    }
    let held = brokers.metric(0, "felix_cache_value_bytes");
    assert!(
        held <= (64 << 20) as f64,
        "{held} bytes of values in memory"
    );
    assert_eq!(brokers.metric(0, "felix_cache_value_reads_total"), 0.0);
    let mut other = CacheClient::connect(&brokers, 1).await;
    assert_eq!(client.get("big-0").await, Some(value(0)));
    assert_eq!(other.get("big-1").await, Some(value(1)));
    assert_eq!(client.delete("big-2").await, Some(value(2)));
    assert_eq!(client.get("big-2").await, None);
    assert_eq!(client.get("big-71").await, Some(value(71)));
    assert!(brokers.metric(0, "felix_cache_value_reads_total") >= 3.0);
    assert_eq!(client.get("big-0").await, Some(value(0)), "back in memory");
}

fn cache_op(op: CacheOpKind, key: &str, value: &[u8], token: Option<&str>) -> Message {
    Message::CacheOp(CacheOp {
        correlation: CorrelationId(7),
        shard: shard(CACHE, 1),
        op,
        key: Text::shortened(key),
        ttl_ms: 0,
        value: Bytes::copy_from_slice(value),
        credential: token.map(|token| Credential::new(token).expect("a credential")),
    })
}

/// The value field of a success; a refusal fails the test.
async fn value_of(peer: &mut PeerStream, request: &Message) -> Option<Bytes> {
    match peer.ask(request).await {
        Message::CacheOk(ok) => ok.value,
        other => panic!("{request:?}: {other:?}"),
    }
}

/// What a broker of another make sees of an owner.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_answers_forwarded_operations_as_the_protocol_says() {
    let mut brokers = start(1);
    let reader = token_with(&brokers, &["cache.read:cache:t1/*"]);
    let writer = token_with(&brokers, &["cache.write:cache:t1/*"]);
    let conn = PeerClient::connect(&brokers, 1, 0).await;
    let mut peer = conn.greeted("node-2").await;
    let (w, r) = (Some(writer.as_str()), Some(reader.as_str()));
    let delta = 5i64.to_be_bytes();
    for (request, code) in [
        (
            cache_op(CacheOpKind::Put, "k", b"v", r),
            ErrorCode::Unauthorized,
        ),
        (
            cache_op(CacheOpKind::Delete, "k", b"", r),
            ErrorCode::Unauthorized,
        ),
        (
            cache_op(CacheOpKind::CounterAdd, "k", &delta, r),
            ErrorCode::Unauthorized,
        ),
        (
            cache_op(CacheOpKind::Get, "k", b"", w),
            ErrorCode::Unauthorized,
        ),
        (
            cache_op(CacheOpKind::CounterGet, "k", b"", w),
            ErrorCode::Unauthorized,
        ),
        (
            cache_op(CacheOpKind::Get, "k", b"", None),
            ErrorCode::Unauthorized,
        ),
        (
            cache_op(CacheOpKind::CounterAdd, "k", &delta[1..], w),
            ErrorCode::Malformed,
        ),
    ] {
        let answer = peer.ask(&request).await;
        assert_eq!(answer.error_code(), Some(code), "{request:?}");
        assert!(matches!(answer, Message::CacheError(_)), "in its own shape");
    }
    assert_eq!(brokers.metric(0, "felix_storage_records_total"), 0.0);

    let get = cache_op(CacheOpKind::Get, "k", b"", r);
    assert_eq!(value_of(&mut peer, &get).await, None);
    let put = cache_op(CacheOpKind::Put, "k", b"v", w);
    assert_eq!(
        value_of(&mut peer, &put).await,
        None,
        "a put carries no value"
    );
    assert_eq!(value_of(&mut peer, &get).await.as_deref(), Some(&b"v"[..]));
    let put = cache_op(CacheOpKind::Put, "k", b"", w);
    assert_eq!(value_of(&mut peer, &put).await, None);
    assert_eq!(value_of(&mut peer, &get).await.as_deref(), Some(&b""[..]));
    let delete = cache_op(CacheOpKind::Delete, "k", b"", w);
    assert_eq!(
        value_of(&mut peer, &delete).await.as_deref(),
        Some(&b""[..])
    );
    assert_eq!(value_of(&mut peer, &delete).await, None);

    let sum = cache_op(CacheOpKind::CounterGet, "k", b"", r);
    assert_eq!(value_of(&mut peer, &sum).await, None, "never written");
    let add = cache_op(CacheOpKind::CounterAdd, "k", &(-2i64).to_be_bytes(), w);
    let expected = (-2i64).to_be_bytes();
    assert_eq!(
        value_of(&mut peer, &add).await.as_deref(),
        Some(&expected[..])
    );
    assert_eq!(
        value_of(&mut peer, &sum).await.as_deref(),
        Some(&expected[..])
    );
    let down = cache_op(CacheOpKind::CounterAdd, "k", &i64::MIN.to_be_bytes(), w);
    assert_eq!(peer.refused(&down).await, ErrorCode::Malformed);
    assert_eq!(
        value_of(&mut peer, &sum).await.as_deref(),
        Some(&expected[..])
    );
    brokers.assert_alive(0);
}

/// After a lost answer a read or a delete is asked again; a put or an add never is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_may_be_sent_again_is_and_nothing_else() {
    let mut brokers = Brokers::prepare_with(2, |spec| spec.caches = caches());
    brokers.start_node(1);
    let mut owner = ScriptedOwner::start(&brokers, 0);
    let mut client = CacheClient::connect(&brokers, 1).await;
    let unknown = || refused("unacknowledged", RetryClass::OutcomeUnknown);

    let asked = tokio::spawn(async move {
        let got = client.try_get("k").await;
        (client, got)
    });
    let first = owner.next_cache().await;
    assert_eq!(
        (first.op.op, first.op.key.as_str()),
        (CacheOpKind::Get, "k")
    );
    owner.close_connections();
    let again = owner.next_cache().await;
    assert_eq!(again.op.op, CacheOpKind::Get);
    again.done(Some(b"v")).await;
    let (mut client, got) = asked.await.expect("no panic");
    assert_eq!(got, Ok(Some(b"v".to_vec())));

    let asked = tokio::spawn(async move {
        let put = client.put_for("k", b"v", Some(250)).await;
        let added = client.try_add("k", 3).await;
        (client, put, added)
    });
    let put = owner.next_cache().await;
    assert_eq!((put.op.op, put.op.ttl_ms), (CacheOpKind::Put, 250));
    assert_eq!(put.op.value.as_ref(), b"v");
    owner.close_connections();
    let add = owner.next_cache().await;
    assert_eq!(add.op.op, CacheOpKind::CounterAdd, "the put came again");
    assert_eq!(add.op.value.as_ref(), 3i64.to_be_bytes());
    owner.close_connections();
    let (mut client, put, added) = asked.await.expect("no panic");
    assert_eq!(put, Err(unknown()));
    assert_eq!(added, Err(unknown()));

    // An answer that makes no sense for the operation proves nothing about it.
    let asked = tokio::spawn(async move { client.try_add("k", 3).await });
    owner.next_cache().await.done(Some(b"short")).await;
    let senseless = refused("internal", RetryClass::OutcomeUnknown);
    assert_eq!(asked.await.expect("no panic"), Err(senseless));
    assert!(owner.try_next_cache().is_none());
}

/// Most of what the logs hold is dead: their heads are given up, and nothing changes for clients,
/// nor for a broker that starts on what is left.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn compaction_gives_up_the_heads_of_logs_and_changes_nothing() {
    let mut brokers = start(1);
    let mut client = CacheClient::connect(&brokers, 0).await;
    // Twenty keys, 2 MiB of log: four times what is live many times over.
    let value_of = |key: u64, turn: u64| vec![(key ^ turn) as u8; 1024];
    client.put("gone", b"soon").await;
    client.put("kept", b"never written again").await;
    for turn in 0..100 {
        for key in 0..20 {
            client
                .start_put(&format!("key-{key}"), &value_of(key, turn), None)
                .await;
        }
        for _ in 0..20 {
            assert!(matches!(client.answer().await, Answer::CacheOk(_)));
        }
    }
    client.delete("gone").await;
    // The floor of counters is reached by long names.
    let (hot, cold) = ("h".repeat(500), "c".repeat(500));
    client.add(&cold, -7).await;
    for turn in 1..=150 {
        assert_eq!(client.add(&hot, 2).await, 2 * turn);
    }
    // Every pass has at least the one record to copy that is never written again; how many others
    // depends on what is written while it runs.
    let counted = |name| brokers.metric(0, name);
    let waited = Instant::now();
    while counted("felix_cache_compactions_total") < 2.0
        || counted("felix_cache_copied_records_total") < 2.0
    {
        assert!(waited.elapsed() < SOON, "no compaction");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    for restarts in 0..2 {
        let mut client = CacheClient::connect(&brokers, 0).await;
        for key in 0..20 {
            let value = client.get(&format!("key-{key}")).await;
            assert_eq!(value, Some(value_of(key, 99)), "key {key}");
        }
        assert_eq!(client.get("gone").await, None);
        let kept = client.get("kept").await;
        assert_eq!(kept.as_deref(), Some(&b"never written again"[..]));
        assert_eq!(client.sum(&cold).await, Some(-7));
        assert_eq!(client.add(&hot, 1).await, 301 + restarts);
        kill_and_restart(&mut brokers, 0);
    }
}
