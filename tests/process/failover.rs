//! What a promoted leader makes of its copies: caches, counters and consumer groups go on where
//! they had come to. That the copies are equal byte for byte is looked at elsewhere.

use std::time::Duration;

use felix_uring::cluster::ShardedSpec;

use crate::support::brokers::Brokers;
use crate::support::cache_client::CacheClient;
use crate::support::client::Client;
use crate::support::failover::{CopiedShard, LATER};
use crate::support::group_client::GroupClient;

const CACHE: CopiedShard = CopiedShard {
    kind: "cache",
    name: "copied",
};
const STREAM: CopiedShard = CopiedShard {
    kind: "stream",
    name: "copied",
};

fn copied(consistency: &str) -> ShardedSpec {
    ShardedSpec {
        replicas: 3,
        consistency: Some(consistency.to_string()),
        ..ShardedSpec::new("copied", 1).led_by(&[0])
    }
}

async fn cache_of(brokers: &Brokers, node: usize) -> CacheClient {
    let mut client = CacheClient::connect(brokers, node).await;
    client.cache = CACHE.name;
    client
}

/// Kills the leader, node 0, and returns who leads instead.
async fn fail_over(brokers: &mut Brokers, shard: CopiedShard) -> usize {
    let killed = brokers.cluster.node_mut(0).kill();
    killed.unwrap_or_else(|e| panic!("{e}"));
    shard.replace(brokers, 0, 2).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_promoted_leader_has_every_value_and_every_sum() {
    let mut brokers = Brokers::start_with(3, |spec| spec.caches = vec![copied("quorum")]);
    brokers.wait_metric_for(0, "felix_replicated_shards_open", 1.0, LATER);
    // Through another broker: puts and adds are forwarded to the owner.
    let mut client = cache_of(&brokers, 1).await;
    for nth in 0..20u64 {
        client.put(&format!("k{nth}"), &nth.to_be_bytes()).await;
    }
    client.put("k3", b"").await;
    assert_eq!(client.delete("k4").await, Some(4u64.to_be_bytes().to_vec()));
    client
        .put_for("brief", b"gone", Some(1))
        .await
        .expect("a put");
    for nth in 1..=10 {
        client.add("sum", nth).await;
        client.add("other", -nth).await;
    }
    // Counters are acknowledged by the leader alone: what the others have not got, a failover loses.
    for follower in [1, 2] {
        CACHE.wait_reach(&brokers, follower, "counters", 20).await;
    }
    let leader = fail_over(&mut brokers, CACHE).await;

    let mut client = cache_of(&brokers, leader).await;
    for nth in 5..20u64 {
        let value = client.get(&format!("k{nth}")).await;
        assert_eq!(value, Some(nth.to_be_bytes().to_vec()), "k{nth}");
    }
    assert_eq!(client.get("k3").await, Some(vec![]), "empty is not a miss");
    assert_eq!(client.get("k4").await, None, "deleted");
    assert_eq!(client.get("brief").await, None, "expired");
    assert_eq!(client.sum("sum").await, Some(55));
    assert_eq!(client.sum("other").await, Some(-55));
    assert_eq!(client.sum("never").await, None);
    // It goes on from there, and the old leader comes back to the same.
    assert_eq!(client.add("sum", 5).await, 60);
    client.put("k4", b"again").await;
    tokio::task::block_in_place(|| brokers.start_node(0));
    CACHE.wait_level(&brokers, leader).await;
    let mut through = cache_of(&brokers, 0).await;
    assert_eq!(through.sum("sum").await, Some(60));
    assert_eq!(through.get("k4").await, Some(b"again".to_vec()));
}

/// A cache whose log was compacted, its head given up: the copies say the same without it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_promoted_leader_of_a_compacted_cache_has_every_value() {
    let mut brokers = Brokers::start_with(3, |spec| spec.caches = vec![copied("quorum")]);
    brokers.wait_metric_for(0, "felix_replicated_shards_open", 1.0, LATER);
    let mut client = cache_of(&brokers, 0).await;
    // One follower misses all of it and is given what is left of the log when it returns.
    brokers.cluster.node_mut(2).kill().expect("killed");
    client.put("still", b"here").await;
    let value = vec![7u8; 32 << 10];
    for nth in 0..60 {
        client.put(&format!("busy{}", nth % 4), &value).await;
    }
    brokers.wait_metric_for(0, "felix_cache_compactions_total", 1.0, LATER);
    brokers.start_node(2);
    CACHE.wait_level(&brokers, 0).await;
    let leader = fail_over(&mut brokers, CACHE).await;
    let mut client = cache_of(&brokers, leader).await;
    assert_eq!(client.get("still").await, Some(b"here".to_vec()));
    for nth in 0..4 {
        assert_eq!(
            client.get(&format!("busy{nth}")).await.as_ref(),
            Some(&value)
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_promoted_leader_resumes_each_group_where_it_had_come_to() {
    let mut brokers = Brokers::start_with(3, |spec| spec.streams = vec![copied("quorum")]);
    brokers.wait_metric_for(0, "felix_replicated_shards_open", 1.0, LATER);
    let client = Client::connect(&brokers, 0).await;
    let mut publisher = client.stream(&brokers.token()).await;
    for offset in 0..8 {
        let at = publisher
            .must_publish(STREAM.name, format!("r{offset}"))
            .await;
        assert_eq!(at, offset);
    }
    let mut member = GroupClient::connect(&brokers, 0, STREAM.name).await;
    assert_eq!(member.poll(6, 10_000).await.len(), 6);
    // One record of the cursor log for each: 1, 2, and 4 once 2 is a dead letter and 3 is acked.
    assert_eq!(member.ack(0).await, Ok(()));
    assert_eq!(member.ack(1).await, Ok(()));
    assert_eq!(member.ack(3).await, Ok(()));
    assert_eq!(member.dead_letter(2).await, Ok(()));
    // Finished in memory only, past the position.
    assert_eq!(member.ack(5).await, Ok(()));
    for follower in [1, 2] {
        STREAM
            .wait_reach(&brokers, follower, "group_dead_letters", 1)
            .await;
        STREAM
            .wait_reach(&brokers, follower, "group_cursors", 3)
            .await;
    }
    let leader = fail_over(&mut brokers, STREAM).await;
    // Before the first record of its own generation a leader shows nothing of a quorum stream.
    let client = Client::connect(&brokers, leader).await;
    let mut publisher = client.stream(&brokers.token()).await;
    publisher
        .publish_until_taken(STREAM.name, Duration::from_secs(60))
        .await;

    let mut member = GroupClient::connect(&brokers, leader, STREAM.name).await;
    let info = member.describe().await;
    assert_eq!((info.committed, info.dead_letters), (Some(4), 1));
    assert_eq!(member.dead_letters().await, [2]);
    let again = member.poll(4, 10_000).await;
    assert_eq!(
        again,
        [(4, 1), (5, 1), (6, 1), (7, 1)],
        "none below the position"
    );
    assert_eq!(member.redrive(2).await, Ok(()));
    assert_eq!(member.poll(1, 10_000).await, [(2, 1)]);
    assert_eq!(member.ack(2).await, Ok(()));
    for (offset, _) in again {
        assert_eq!(member.ack(offset).await, Ok(()));
    }
    let info = member.describe().await;
    assert_eq!((info.committed, info.dead_letters), (Some(8), 0));
}
