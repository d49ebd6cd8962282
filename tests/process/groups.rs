//! Consumer groups of real brokers: delivery, settling, dead letters, over kills and cores.

use std::time::Duration;

use felix_uring::cluster::ShardedSpec;
use felix_uring::wire::client::messages::StartAt;
use felix_uring::wire::client::RetryClass;

use crate::support::brokers::{Brokers, FIRST, SECOND};
use crate::support::client::Client;
use crate::support::group_client::{GroupClient, Refused};
use crate::support::within;

/// Four shards over two cores of one node.
const WIDE: &str = "wide";
/// A claim short enough to wait for its end.
const BRIEF_MS: u64 = 50;

fn refused(code: &str, class: RetryClass) -> Result<(), Refused> {
    Err((code.to_string(), class))
}

async fn publish(brokers: &Brokers, node: usize, stream: &str, offsets: std::ops::Range<u64>) {
    let client = Client::connect(brokers, node).await;
    let mut publisher = client.stream(&brokers.token()).await;
    for offset in offsets {
        let at = publisher.must_publish(stream, format!("r{offset}")).await;
        assert_eq!(at, offset);
    }
}

fn kill_and_restart(brokers: &mut Brokers, node: usize) {
    let killed = brokers.cluster.node_mut(node).kill();
    killed.unwrap_or_else(|e| panic!("{e}"));
    brokers.start_node(node);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settled_records_stay_settled_and_the_others_come_again() {
    let mut brokers = Brokers::start(1);
    publish(&brokers, 0, FIRST, 0..6).await;
    let mut member = GroupClient::connect(&brokers, 0, FIRST).await;
    assert_eq!(member.poll(2, 0).await, [(0, 1), (1, 1)]);
    assert_eq!(member.poll(10, 0).await, [(2, 1), (3, 1), (4, 1), (5, 1)]);
    assert_eq!(member.poll(10, 0).await, [], "everything is claimed");
    // Out of order: 1 is finished in memory, the position stays before 0.
    assert_eq!(member.ack(1).await, Ok(()));
    assert_eq!(member.describe().await.committed, None);
    assert_eq!(member.ack(0).await, Ok(()));
    assert_eq!(member.describe().await.committed, Some(2));
    assert_eq!(member.ack(0).await, Ok(()), "a repeated ack is harmless");
    assert_eq!(member.ack(4).await, Ok(()));
    assert_eq!(
        member.ack(6).await,
        refused("invalid_request", RetryClass::Fatal)
    );
    // A nack owes the record at once; a delivery that is over cannot be spoken for.
    assert_eq!(member.nack(3, 1).await, Ok(()));
    assert_eq!(
        member.nack(3, 1).await,
        refused("stale_claim", RetryClass::Fatal)
    );
    assert_eq!(member.poll(10, 0).await, [(3, 2)]);
    assert_eq!(member.extend(3, 2, 60_000).await, Ok(60_000));
    assert_eq!(
        member.extend(3, 1, 60_000).await.map(|_| ()),
        refused("stale_claim", RetryClass::Fatal)
    );
    // Another group of the same stream is a stranger to all this.
    member.group = "others";
    assert_eq!(member.poll(1, 0).await, [(0, 1)]);

    kill_and_restart(&mut brokers, 0);
    let mut member = GroupClient::connect(&brokers, 0, FIRST).await;
    // Known from the log: 0 and 1. That 4 was finished was known to memory only.
    assert_eq!(
        member.ack(3).await,
        refused("stale_claim", RetryClass::Retry)
    );
    assert_eq!(member.poll(10, 0).await, [(2, 1), (3, 1), (4, 1), (5, 1)]);
    let info = member.describe().await;
    assert_eq!((info.committed, info.tail, info.in_flight), (Some(2), 6, 4));
    for offset in 2..6 {
        assert_eq!(member.ack(offset).await, Ok(()));
    }
    kill_and_restart(&mut brokers, 0);
    let mut member = GroupClient::connect(&brokers, 0, FIRST).await;
    assert_eq!(member.poll(10, 0).await, []);
    assert_eq!(member.ack(5).await, Ok(()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_fails_too_often_is_a_dead_letter_until_somebody_decides() {
    let mut brokers = Brokers::start(1);
    publish(&brokers, 0, FIRST, 0..4).await;
    let mut member = GroupClient::connect(&brokers, 0, FIRST).await;
    for attempt in 1..=5 {
        assert_eq!(member.poll(1, 0).await, [(0, attempt)]);
        assert_eq!(member.nack(0, attempt).await, Ok(()));
    }
    // The fifth failure is the last: the list has it, and the group goes on behind it.
    assert_eq!(member.poll(2, 0).await, [(1, 1), (2, 1)]);
    while member.dead_letters().await != [0] {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(member.dead_letter(2).await, Ok(()));
    assert_eq!(member.ack(1).await, Ok(()));
    // A claim nobody speaks for ends by itself.
    for attempt in 1..=5 {
        assert_eq!(member.poll_for(1, BRIEF_MS).await, [(3, attempt)]);
    }
    while member.dead_letters().await != [0, 2, 3] {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(
        member.redrive(1).await,
        refused("invalid_request", RetryClass::Fatal)
    );
    assert_eq!(member.redrive(2).await, Ok(()));
    assert_eq!(member.discard(3).await, Ok(()));
    assert_eq!(member.dead_letters().await, [0]);

    kill_and_restart(&mut brokers, 0);
    let mut member = GroupClient::connect(&brokers, 0, FIRST).await;
    // The redriven one is owed from its entry, though the position is past it.
    assert_eq!(member.describe().await.committed, Some(4));
    assert_eq!(member.dead_letters().await, [0]);
    assert_eq!(member.poll(9, 0).await, [(2, 1)]);
    assert_eq!(member.ack(2).await, Ok(()));
    kill_and_restart(&mut brokers, 0);
    let mut member = GroupClient::connect(&brokers, 0, FIRST).await;
    assert_eq!(member.poll(9, 0).await, []);

    assert_eq!(member.seek(StartAt::Latest, true).await, Ok((4, false)));
    assert_eq!(member.seek(StartAt::Offset(3), false).await, Ok((3, true)));
    assert_eq!(member.poll(9, 0).await, [(3, 1)]);
    assert_eq!(
        member.seek(StartAt::Offset(5), false).await.map(|_| ()),
        refused("invalid_request", RetryClass::Fatal)
    );
    assert_eq!(member.delete().await, Ok(true));
    assert_eq!(member.delete().await, Ok(false));
    assert!(member.dead_letters().await.is_empty());
    assert_eq!(member.seek(StartAt::Latest, true).await, Ok((4, true)));
    assert_eq!(member.poll(9, 0).await, []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_owner_serves_and_only_those_who_may() {
    let brokers = Brokers::start(2);
    publish(&brokers, 0, SECOND, 0..2).await;
    let mut wrong = GroupClient::connect(&brokers, 0, SECOND).await;
    let owner = refused("not_leader node-2", RetryClass::Redirect);
    assert_eq!(wrong.try_poll(1, 0).await.map(|_| ()), owner);
    assert_eq!(wrong.ack(0).await, owner);
    let perms = |perms: &[&str]| {
        let perms: Vec<String> = perms.iter().map(|perm| perm.to_string()).collect();
        brokers.token_of(|claims| claims.perms = perms)
    };
    let forbidden = refused("forbidden", RetryClass::Fatal);
    // Reading a stream includes its groups, changing a group does not come with it.
    let reader = perms(&["stream.subscribe:stream:*"]);
    let mut reader = GroupClient::connect_with(&brokers, 1, SECOND, reader).await;
    assert_eq!(reader.poll(1, 0).await, [(0, 1)]);
    assert_eq!(reader.dead_letter(0).await, Ok(()));
    assert_eq!(reader.redrive(0).await, forbidden);
    assert_eq!(reader.delete().await.map(|_| ()), forbidden);
    let publisher = perms(&["stream.publish:*"]);
    let mut publisher = GroupClient::connect_with(&brokers, 1, SECOND, publisher).await;
    assert_eq!(publisher.ack(0).await, forbidden);
    // A grant for one group narrows what the stream's grant gives.
    let narrowed = perms(&["stream.subscribe:stream:*", "group.consume:group:*/mine"]);
    let mut narrowed = GroupClient::connect_with(&brokers, 1, SECOND, narrowed).await;
    assert_eq!(narrowed.try_poll(1, 0).await.map(|_| ()), forbidden);
    narrowed.group = "mine";
    assert_eq!(narrowed.poll(1, 0).await, [(0, 1)]);
    narrowed.stream = "absent";
    let absent = refused("not_found", RetryClass::RetryAfter);
    assert_eq!(narrowed.try_poll(1, 0).await.map(|_| ()), absent);
    narrowed.stream = SECOND;
    narrowed.shard = 1;
    let invalid = refused("invalid_request", RetryClass::Fatal);
    assert_eq!(narrowed.try_poll(1, 0).await.map(|_| ()), invalid);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn polls_wait_on_any_core_and_are_not_missed_by_those_who_left() {
    let mut brokers = Brokers::start_with(1, |spec| {
        spec.cores_per_node = 2;
        spec.streams.push(ShardedSpec::new(WIDE, 4).led_by(&[0; 4]));
    });
    let mut shards = Vec::new();
    for shard in 0..4 {
        let mut member = GroupClient::connect(&brokers, 0, WIDE).await;
        member.shard = shard;
        let waiting = member.start_poll(10, 30_000).await;
        shards.push((member, waiting));
    }
    // Publishes without a key go to shard 0; a member that left does not get them.
    let mut gone = GroupClient::connect(&brokers, 0, FIRST).await;
    let left = gone.start_poll(10, 30_000).await;
    let asked = || brokers.metric(0, "felix_group_requests_total") >= 5.0;
    while !asked() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    gone.client.conn.close(0u32.into(), b"gone");
    drop(left);
    while brokers.metric(0, "felix_client_connections") > 4.0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    publish(&brokers, 0, FIRST, 0..1).await;
    let mut stays = GroupClient::connect(&brokers, 0, FIRST).await;
    assert_eq!(stays.poll_as("one", 1).await, [(0, 1)]);
    // The same member on a new connection takes its claim back.
    let mut again = GroupClient::connect(&brokers, 0, FIRST).await;
    assert_eq!(again.poll_as("two", 1).await, []);
    assert_eq!(again.poll_as("one", 1).await, [(0, 2)]);

    publish(&brokers, 0, WIDE, 0..1).await;
    let (_, first) = &mut shards[0];
    let answer = within(Duration::from_secs(20), "the poll", first.answers.answer()).await;
    let records = GroupClient::records(answer).expect("records");
    assert_eq!(records[0].offset, 0);
    // The others still wait; a broker that stops does not wait with them.
    let stopped = brokers.cluster.node_mut(0).stop();
    stopped.unwrap_or_else(|e| panic!("{e}"));
    for (_, waiting) in &mut shards[1..] {
        let answer = within(Duration::from_secs(20), "an end", waiting.answers.answer()).await;
        assert_eq!(GroupClient::records(answer).expect("no records").len(), 0);
    }
}
