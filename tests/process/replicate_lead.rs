//! A real leader against scripted followers made of the golden vectors: what it ships, when it
//! acknowledges, what it makes of each answer.

use std::time::{Duration, Instant};

use felix_uring::cluster::ShardedSpec;
use felix_uring::wire::client::answers::CursorErrorReason;
use felix_uring::wire::client::messages::StartAt;
use felix_uring::wire::client::{Answer, PublishOutcome, RetryClass};

use crate::support::brokers::Brokers;
use crate::support::client::{refusal, subscribe_frame, Client, Stream};
use crate::support::follower::{
    ScriptedFollower, Shipped, BOOTSTRAP, FENCED_EPOCH, LOG_CONFLICT, LOG_GAP, MALFORMED, REBUILD,
    RECORDS, STALE_ROUTE,
};
use crate::support::replica_set::assign;

/// A stream of three replicas led by node 0.
const COPIED: &str = "copied";

/// Node 0 runs; nodes 1 and 2 are scripts.
struct Scripted {
    brokers: Brokers,
    b: ScriptedFollower,
    c: ScriptedFollower,
}

async fn scripted(consistency: &str, quorum_timeout_ms: u64) -> Scripted {
    let mut brokers = Brokers::prepare_with(3, |spec| {
        spec.extra_args
            .push(format!("--quorum-timeout-ms={quorum_timeout_ms}"));
        spec.streams.push(ShardedSpec {
            replicas: 3,
            consistency: Some(consistency.to_string()),
            ..ShardedSpec::new(COPIED, 1).led_by(&[0])
        });
    });
    let b = ScriptedFollower::start(&brokers, 1);
    let c = ScriptedFollower::start(&brokers, 2);
    brokers.start_node(0);
    Scripted { brokers, b, c }
}

impl Scripted {
    /// Both followers are empty and level; the shard is open.
    async fn opened(consistency: &str, quorum_timeout_ms: u64) -> Self {
        let mut this = scripted(consistency, quorum_timeout_ms).await;
        for follower in [&mut this.b, &mut this.c] {
            let probe = follower.next_of(RECORDS).await;
            assert_eq!((probe.offset, probe.payloads.len()), (0, 0), "a probe");
            assert_eq!((probe.stream.as_str(), probe.generation), (COPIED, 1));
            probe.ok(0).await;
        }
        this.brokers
            .wait_metric(0, "felix_replicated_shards_open", 1.0);
        this
    }

    async fn client(&self) -> (Client, Stream, String) {
        let token = self.brokers.token();
        let client = Client::connect(&self.brokers, 0).await;
        let stream = client.stream(&token).await;
        (client, stream, token)
    }
}

fn texts(shipped: &Shipped) -> Vec<&str> {
    let payloads = shipped.payloads.iter();
    payloads
        .map(|payload| std::str::from_utf8(payload).expect("text"))
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quorum_publish_is_answered_and_shown_once_a_follower_holds_it() {
    let mut s = Scripted::opened("quorum", 5000).await;
    let (client, mut stream, token) = s.client().await;
    let mut events = client.subscribe(&token, COPIED, StartAt::Earliest).await;
    stream.start_publish(COPIED, &["one", "two"]).await;
    let to_b = s.b.next_of(RECORDS).await;
    assert_eq!((to_b.offset, texts(&to_b)), (0, vec!["one", "two"]));
    let to_c = s.c.next_of(RECORDS).await;
    assert_eq!((to_c.offset, texts(&to_c)), (0, vec!["one", "two"]));
    // Durable on the leader alone: neither answered nor shown.
    s.brokers.wait_metric(0, "felix_quorum_waiting", 1.0);
    assert_eq!(s.brokers.metric(0, "felix_publishes_acked_total"), 0.0);
    assert_eq!(s.brokers.metric(0, "felix_delivered_records_total"), 0.0);

    to_c.ok(2).await;
    let ack = stream.answers.ack().await;
    assert!(matches!(
        ack.outcome,
        PublishOutcome::Accepted { offset: Some(0) }
    ));
    assert_eq!(events.take(2).await.len(), 2);
    // The slow one is shipped on to; nothing waits for it.
    stream
        .must_publish_with(COPIED, b"three", &mut s.c, 3)
        .await;
    to_b.ok(2).await;
    let next = s.b.next_of(RECORDS).await;
    assert_eq!((next.offset, texts(&next)), (2, vec!["three"]));
    assert_ne!(next.lane, 0, "a stream of its own");
    next.ok(3).await;
}

/// A subscriber goes on behind records that it was shown by a leader before; this one holds them and has not
/// heard of a majority that does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_subscriber_behind_the_mark_is_asked_to_wait_and_one_behind_the_log_is_told() {
    let mut s = Scripted::opened("quorum", 5000).await;
    let (client, mut stream, token) = s.client().await;
    stream.must_publish_with(COPIED, b"one", &mut s.b, 1).await;
    let waiting = stream.start_publish(COPIED, &["two", "three"]).await;
    s.brokers.wait_metric(0, "felix_quorum_waiting", 1.0);

    let answer = async |start| {
        let mut request = client.stream(&token).await;
        request.send(subscribe_frame(COPIED, start)).await;
        request.answers.answer().await
    };
    for held in [2, 3] {
        let Answer::ErrorAnswer(error) = answer(StartAt::Offset(held)).await else {
            panic!("{held} is held by a minority");
        };
        let code = error.code.as_ref().map(|code| code.name());
        assert_eq!(
            (code, error.retry),
            (Some("shard_unavailable"), Some(RetryClass::Retry))
        );
    }
    let Answer::SubscribeCursorError(told) = answer(StartAt::Offset(4)).await else {
        panic!("4 was never written");
    };
    assert_eq!(
        (told.reason, told.requested, told.available),
        (CursorErrorReason::InFuture, 4, 1)
    );
    let shipped = s.b.next_of(RECORDS).await;
    assert_eq!(texts(&shipped), ["two", "three"]);
    shipped.ok(3).await;
    assert_eq!(stream.answers.ack().await.request_id, waiting);
    let mut events = client.subscribe(&token, COPIED, StartAt::Offset(3)).await;
    stream.must_publish_with(COPIED, b"four", &mut s.b, 4).await;
    assert_eq!(events.take(1).await[0].0, 3);
}

/// Where nobody else holds the shard any more, readers see what is durable, though nothing is written after that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_waited_for_a_majority_is_shown_once_there_is_one_holder() {
    let mut s = Scripted::opened("quorum", 9_000).await;
    let (client, mut stream, token) = s.client().await;
    stream.must_publish_with(COPIED, b"one", &mut s.b, 1).await;
    let mut events = client.subscribe(&token, COPIED, StartAt::Earliest).await;
    assert_eq!(events.take(1).await[0].1, "one");
    stream.start_publish(COPIED, &["two"]).await;
    s.brokers.wait_metric(0, "felix_quorum_waiting", 1.0);
    assign(&s.brokers, "stream", COPIED, 2, &[0]);
    assert_eq!(events.take(1).await[0].1, "two");
    let ack = stream.answers.ack().await;
    assert!(matches!(ack.outcome, PublishOutcome::Accepted { .. }));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_publish_without_a_majority_in_time_is_of_unknown_outcome() {
    let mut s = Scripted::opened("quorum", 300).await;
    let (_client, mut stream, _) = s.client().await;
    let started = Instant::now();
    let (code, class) = refusal(stream.publish(COPIED, b"lonely").await);
    assert_eq!(
        (code.as_str(), class),
        ("quorum_timeout", RetryClass::OutcomeUnknown)
    );
    assert!(started.elapsed() >= Duration::from_millis(300));
    // It commits all the same, and the next one with it.
    let shipped = s.b.next_of(RECORDS).await;
    assert_eq!(texts(&shipped), ["lonely"]);
    shipped.ok(1).await;
    stream.must_publish_with(COPIED, b"next", &mut s.b, 2).await;
    assert!(s.brokers.metric(0, "felix_quorum_timeouts_total") >= 1.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn at_leader_consistency_nothing_waits_for_a_follower() {
    let mut s = Scripted::opened("leader", 300).await;
    let (client, mut stream, token) = s.client().await;
    let mut events = client.subscribe(&token, COPIED, StartAt::Earliest).await;
    for record in ["one", "two", "three"] {
        stream.must_publish(COPIED, record).await;
    }
    assert_eq!(events.take(3).await.len(), 3);
    let first = s.b.next_of(RECORDS).await;
    assert_eq!(first.offset, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_answer_does_what_the_table_says() {
    let mut s = Scripted::opened("quorum", 9000).await;
    let (_client, mut stream, _) = s.client().await;
    stream.start_publish(COPIED, &["r0"]).await;
    // A damaged copy and a lagging view: the same records again.
    let mut seen = s.b.next_of(RECORDS).await;
    for code in [MALFORMED, STALE_ROUTE, MALFORMED] {
        seen.refuse(code, 0).await;
        let again = s.b.next_of(RECORDS).await;
        assert_eq!(
            (again.offset, texts(&again)),
            (0, vec!["r0"]),
            "after {code}"
        );
        seen = again;
    }
    // A lost connection: dialled anew, sent again.
    s.b.close_connections();
    let again = s.b.next_of(RECORDS).await;
    assert_eq!((again.offset, texts(&again)), (0, vec!["r0"]));
    again.ok(1).await;
    assert!(matches!(
        stream.answers.ack().await.outcome,
        PublishOutcome::Accepted { offset: Some(0) }
    ));
    // A gap: from where the follower says.
    stream.start_publish(COPIED, &["r1", "r2"]).await;
    let shipped = s.b.next_of(RECORDS).await;
    assert_eq!(shipped.offset, 1);
    shipped.refuse(LOG_GAP, 0).await;
    let shipped = s.b.next_of(RECORDS).await;
    assert_eq!(shipped.offset, 0);
    shipped.ok(3).await;
    stream.answers.ack().await;
    // A conflict: halted, listed, then rebuilt under the policy.
    let late = s.c.next_of(RECORDS).await;
    assert_eq!(late.offset, 0);
    late.refuse(LOG_CONFLICT, 0).await;
    // What had been sent behind it belongs to a window that is thrown away.
    let rebuild = loop {
        let shipped = s.c.next().await;
        match shipped.kind {
            REBUILD => break shipped,
            _ => shipped.refuse(LOG_GAP, 0).await,
        }
    };
    assert_eq!(rebuild.offset, 0);
    let halted = wait_for_halted(&s.brokers, 1);
    assert_eq!(halted[0]["reason"], "diverged");
    assert_eq!(halted[0]["node"], "node-3");
    assert_eq!(halted[0]["log"], "stream");
    assert!(halted[0]["remedy"]
        .as_str()
        .is_some_and(|text| !text.is_empty()));
    rebuild.ok(0).await;
    let mut copied: Vec<String> = Vec::new();
    while copied.len() < 3 {
        let copy = s.c.next_of(RECORDS).await;
        assert_eq!(copy.offset, copied.len() as u64);
        copied.extend(texts(&copy).into_iter().map(str::to_owned));
        copy.ok(copied.len() as u64).await;
    }
    assert_eq!(copied, ["r0", "r1", "r2"]);
    assert_eq!(wait_for_halted(&s.brokers, 0).len(), 0);
    assert_eq!(
        s.brokers
            .metric(0, "felix_replication_rebuilds_completed_total"),
        1.0
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_newer_generation_ends_acknowledgements_at_once() {
    let mut s = Scripted::opened("quorum", 9000).await;
    let (_client, mut stream, _) = s.client().await;
    stream.start_publish(COPIED, &["stale"]).await;
    let shipped = s.b.next_of(RECORDS).await;
    s.brokers.wait_metric(0, "felix_quorum_waiting", 1.0);
    shipped.refuse(FENCED_EPOCH, 0).await;
    let (code, class) = refusal(stream.answers.ack().await.outcome);
    assert_eq!(
        (code.as_str(), class),
        ("leadership_lost", RetryClass::OutcomeUnknown)
    );
    // Nothing more is taken, and nothing more is sent at this generation.
    let (code, class) = refusal(stream.publish(COPIED, b"more").await);
    assert_eq!(
        (code.as_str(), class),
        ("shard_unavailable", RetryClass::Retry)
    );
    let late = s.c.next_of(RECORDS).await;
    late.ok(1).await;
    let (code, _) = refusal(stream.publish(COPIED, b"more").await);
    assert_eq!(code, "shard_unavailable");
    while let Some(more) = s.c.try_next() {
        assert!(more.payloads.is_empty(), "sent after the fence");
    }
    assert_eq!(s.brokers.metric(0, "felix_publishes_acked_total"), 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shard_opens_only_once_a_majority_is_fenced() {
    let mut s = scripted("quorum", 1000).await;
    let probe = s.b.next_of(RECORDS).await;
    let other = s.c.next_of(RECORDS).await;
    let (_client, mut stream, _) = s.client().await;
    for probe in [probe, other] {
        let (code, class) = refusal(stream.publish(COPIED, b"early").await);
        assert_eq!(
            (code.as_str(), class),
            ("shard_unavailable", RetryClass::Retry)
        );
        probe.refuse(STALE_ROUTE, 0).await;
    }
    let again = s.c.next_of(RECORDS).await;
    assert!(again.payloads.is_empty());
    again.refuse(LOG_GAP, 0).await;
    // A gap fences as well, though it says nothing about a position.
    s.brokers
        .wait_metric(0, "felix_replicated_shards_open", 1.0);
    // It asked for what the leader has not got: it is told where the log begins.
    s.c.next_of(BOOTSTRAP).await.ok(0).await;
    stream
        .must_publish_with(COPIED, b"first", &mut s.c, 1)
        .await;
}

impl Stream {
    /// Publishes one record, has the follower hold it, and waits for the answer.
    async fn must_publish_with(
        &mut self,
        stream: &str,
        record: &[u8],
        follower: &mut ScriptedFollower,
        durable: u64,
    ) {
        self.start_publish(stream, &[record]).await;
        loop {
            let shipped = follower.next_of(RECORDS).await;
            let end = shipped.offset + shipped.payloads.len() as u64;
            shipped.ok(end).await;
            if end >= durable {
                break;
            }
        }
        let ack = self.answers.ack().await;
        assert!(
            matches!(ack.outcome, PublishOutcome::Accepted { .. }),
            "{ack:?}"
        );
    }
}

/// Waits until so many replicas are listed as halted.
fn wait_for_halted(brokers: &Brokers, count: usize) -> Vec<serde_json::Value> {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let node = brokers.cluster.node(0);
        let answer = felix_uring::admin::get(
            node.admin_addr(),
            "/replication/halted",
            Duration::from_secs(5),
        );
        let answer = answer.unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(answer.status, 200);
        let list: Vec<serde_json::Value> = serde_json::from_str(&answer.body).expect("a list");
        if list.len() == count {
            return list;
        }
        assert!(Instant::now() < deadline, "{list:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}
