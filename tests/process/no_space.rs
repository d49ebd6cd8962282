//! A write the device has no room for is undone, and whoever waited for it is told "refused": nothing was
//! written, so it may be sent again.

use felix_uring::cluster::ShardedSpec;
use felix_uring::wire::client::messages::StartAt;
use felix_uring::wire::client::RetryClass;

use crate::support::brokers::{Brokers, FIRST, SECOND};
use crate::support::cache_client::{CacheClient, CACHE};
use crate::support::client::{refusal, Client};

/// The second commit of every core, and the two after it, find no space.
const NO_SPACE: &str = "rules = [{ op = \"write\", nth = 2, count = 3, effect = { error = 28 } }]";

fn start() -> Brokers {
    Brokers::start_with(2, |spec| {
        spec.caches = vec![ShardedSpec::new(CACHE, 1).led_by(&[0])];
        spec.env
            .push(("FELIX_STORAGE_FAULTS".into(), NO_SPACE.into()));
    })
}

fn full() -> (String, RetryClass) {
    ("overloaded".to_string(), RetryClass::RetryAfter)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_publish_and_cache_writes_at_the_owner_are_refused() {
    let brokers = start();
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.stream(&token).await;
    assert_eq!(stream.must_publish(FIRST, b"first").await, 0);
    assert_eq!(refusal(stream.publish(FIRST, b"undone").await), full());

    let mut cache = CacheClient::connect(&brokers, 0).await;
    assert_eq!(cache.put_for("k", b"undone", None).await, Err(full()));
    assert_eq!(cache.try_add("c", 5).await, Err(full()));
    // Undone in memory, too, and what comes next is counted on from there.
    assert_eq!(cache.get("k").await, None);
    assert_eq!(cache.add("c", 2).await, 2);
    cache.put("k", b"kept").await;
    assert_eq!(cache.get("k").await.as_deref(), Some(&b"kept"[..]));
    assert_eq!(stream.must_publish(FIRST, b"second").await, 1);
    let mut events = client.subscribe(&token, FIRST, StartAt::Earliest).await;
    let read: Vec<_> = events.take(2).await;
    let read: Vec<_> = read.iter().map(|(at, record)| (*at, &record[..])).collect();
    assert_eq!(read, [(0, &b"first"[..]), (1, &b"second"[..])]);
    brokers.wait_metric(0, "felix_storage_refused_disk_full_total", 3.0);
    assert_eq!(brokers.metric(0, "felix_publishes_unknown_total"), 0.0);
    assert_eq!(brokers.metric(0, "felix_storage_failed_logs"), 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_forwarded_publish_is_tried_again_and_stored_once() {
    let brokers = start();
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.stream(&token).await;
    assert_eq!(stream.must_publish(SECOND, b"first").await, 0);
    // The owner refuses it three times; each answer proves that nothing was written.
    assert_eq!(stream.must_publish(SECOND, b"second").await, 1);
    assert_eq!(stream.must_publish(SECOND, b"third").await, 2);
    let owner = Client::connect(&brokers, 1).await;
    let mut events = owner.subscribe(&token, SECOND, StartAt::Earliest).await;
    let read: Vec<_> = events.take(3).await;
    let read: Vec<_> = read.iter().map(|(at, record)| (*at, &record[..])).collect();
    assert_eq!(
        read,
        [(0, &b"first"[..]), (1, &b"second"[..]), (2, &b"third"[..])]
    );
    brokers.wait_metric(1, "felix_storage_refused_disk_full_total", 3.0);
    assert_eq!(brokers.metric(0, "felix_publishes_unknown_total"), 0.0);

    // A forwarded cache write takes the same way.
    let mut cache = CacheClient::connect(&brokers, 1).await;
    cache.put("a", b"1").await;
    cache.put("b", b"2").await;
    assert_eq!(cache.get("b").await.as_deref(), Some(&b"2"[..]));
    brokers.wait_metric(0, "felix_storage_refused_disk_full_total", 3.0);
}
