//! The disk of a leader has no room, or fails, while followers play along: what is shipped, and what is
//! acknowledged afterwards.

use felix_uring::wire::client::messages::StartAt;
use felix_uring::wire::client::{PublishOutcome, RetryClass};
use storage_uring::LogKind;

use crate::support::brokers::Brokers;
use crate::support::client::{refusal, Client, Stream};
use crate::support::follower::{ScriptedFollower, RECORDS};
use crate::support::replica_set::{assign, replicated, wait_reach, Log};

const COPIED: &str = "copied";

/// Node 0 runs, with this fault of its disk; nodes 1 and 2 are scripts, empty and level.
async fn opened(fault: &str) -> (Brokers, ScriptedFollower, ScriptedFollower) {
    let mut brokers = Brokers::prepare_with(3, |spec| {
        spec.extra_args.push("--quorum-timeout-ms=5000".into());
        spec.streams.push(replicated(COPIED, 3, "quorum"));
        let rules = format!("rules = [{fault}]");
        spec.env.push(("FELIX_STORAGE_FAULTS".into(), rules));
    });
    let mut b = ScriptedFollower::start(&brokers, 1);
    let mut c = ScriptedFollower::start(&brokers, 2);
    brokers.start_node(0);
    for follower in [&mut b, &mut c] {
        let probe = follower.next_of(RECORDS).await;
        assert_eq!((probe.offset, probe.payloads.len()), (0, 0), "a probe");
        probe.ok(0).await;
    }
    brokers.wait_metric(0, "felix_replicated_shards_open", 1.0);
    (brokers, b, c)
}

async fn client(brokers: &Brokers) -> (Client, Stream) {
    let client = Client::connect(brokers, 0).await;
    let stream = client.stream(&brokers.token()).await;
    (client, stream)
}

/// Publishes one record that a follower confirms.
async fn confirmed(stream: &mut Stream, follower: &mut ScriptedFollower, at: u64, record: &str) {
    stream.start_publish(COPIED, &[record]).await;
    let shipped = follower.next_of(RECORDS).await;
    assert_eq!(shipped.offset, at);
    assert_eq!(shipped.payloads, [record.as_bytes()]);
    shipped.ok(at + 1).await;
    match stream.answers.ack().await.outcome {
        PublishOutcome::Accepted { offset } => assert_eq!(offset, Some(at)),
        PublishOutcome::Failed(refusal) => panic!("{refusal:?}"),
    }
}

/// Nothing of what the disk had no room for reaches anybody, and its offset is used again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn n14_a_full_disk_of_a_leader_ships_and_shows_nothing() {
    // The first write makes the generation durable, the second holds the first record.
    let full = "{ op = \"write\", nth = 3, count = 1, effect = { error = 28 } }";
    let (brokers, mut b, _c) = opened(full).await;
    let (reader, mut stream) = client(&brokers).await;
    confirmed(&mut stream, &mut b, 0, "kept").await;
    let (code, class) = refusal(stream.publish(COPIED, b"undone").await);
    assert_eq!(
        (code.as_str(), class),
        ("overloaded", RetryClass::RetryAfter),
        "undone by the storage, so it may be sent again"
    );
    // What is shipped next, at the same offset, is the next record.
    confirmed(&mut stream, &mut b, 1, "next").await;
    let mut events = reader
        .subscribe(&brokers.token(), COPIED, StartAt::Earliest)
        .await;
    let seen = events.take(2).await;
    assert_eq!(seen[0].1, "kept");
    assert_eq!(seen[1], (1, "next".into()));
}

/// A failed flush is final: no acknowledgement follows, whatever the followers hold, and a later flush that
/// would succeed is not trusted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn n15_a_failed_flush_of_a_leader_ends_its_acknowledgements() {
    let failed = "{ op = \"flush\", nth = 3, count = 1, effect = { error = 5 } }";
    let (mut brokers, mut b, mut c) = opened(failed).await;
    let (_client, mut stream) = client(&brokers).await;
    confirmed(&mut stream, &mut b, 0, "kept").await;
    let shipped = c.next_of(RECORDS).await;
    assert_eq!(shipped.payloads, [b"kept"]);
    shipped.ok(1).await;
    for record in ["failed", "later"] {
        let (code, _) = refusal(stream.publish(COPIED, record).await);
        assert_ne!(code, "quorum_timeout", "it does not even wait: {code}");
    }
    // Followers that claim to hold it change nothing, and are sent nothing.
    for follower in [&mut b, &mut c] {
        while let Some(shipped) = follower.try_next() {
            assert!(shipped.payloads.is_empty(), "{:?}", shipped.payloads);
        }
    }
    assert_eq!(brokers.metric(0, "felix_publishes_acked_total"), 1.0);

    // The next start leads on with what is on the disk, and says where.
    let _ = brokers.cluster.node_mut(0).kill();
    brokers.start_node(0);
    let probe = b.next_of(RECORDS).await;
    assert!(probe.payloads.is_empty());
    probe.ok(1).await;
    brokers.wait_metric(0, "felix_replicated_shards_open", 1.0);
}

/// Writes that were on their way to the disk when their shard was lost become durable here and nowhere else:
/// none of them may be acknowledged, however many become durable at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn inv7_what_becomes_durable_after_leadership_was_lost_is_acknowledged_to_nobody() {
    let slow = "{ op = \"write\", nth = 3, count = 1, effect = { delay_ms = 6000 } }";
    let (brokers, mut b, _c) = opened(slow).await;
    let (_client, mut stream) = client(&brokers).await;
    confirmed(&mut stream, &mut b, 0, "kept").await;
    // One in the commit that hangs, the others together in the one behind it.
    let count = 5;
    for nth in 0..count {
        let record = format!("late-{nth}");
        stream.start_publish(COPIED, &[record]).await;
    }
    wait_reach(&brokers, 0, Log::of(LogKind::Stream, COPIED), 1 + count).await;
    let reloads = brokers.metric(0, "felix_catalog_reloads_total");
    assign(&brokers, "stream", COPIED, 2, &[1, 0, 2]);
    brokers.wait_metric(0, "felix_catalog_reloads_total", reloads + 1.0);
    for _ in 0..count {
        let (code, class) = refusal(stream.answers.ack().await.outcome);
        assert_eq!(class, RetryClass::OutcomeUnknown, "{code}");
    }
    assert_eq!(brokers.metric(0, "felix_publishes_acked_total"), 1.0);
}
