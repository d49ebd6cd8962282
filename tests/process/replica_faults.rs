//! A follower that is killed, stopped or sent more than it takes while a leader ships to it.

use std::time::Duration;

use felix_uring::wire::internal::{encode, ErrorCode, Message, ReplicaLog};

use crate::leader_site::{ask, outcome, records, Site};
use crate::support::dialler::PeerStream;

const LOG: ReplicaLog = ReplicaLog::Stream;

/// Records whose bytes tell their offset.
fn batch(first: u64, count: u64) -> Message {
    let names: Vec<String> = (first..first + count)
        .map(|n| format!("record {n}"))
        .collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    records(LOG, 7, first, &names)
}

/// Ships one batch after the other without waiting until no answer comes any more; how far the follower
/// said it holds them.
async fn ship_until_cut(stream: &mut PeerStream, from: u64, in_flight: u64) -> u64 {
    let (mut next, mut acknowledged) = (from, from);
    loop {
        while next < acknowledged + 3 * in_flight {
            stream.send(encode(&batch(next, 3)).expect("a frame")).await;
            next += 3;
        }
        match stream.next().await {
            Ok(answer) => match outcome(&answer) {
                Ok(durable) => acknowledged = durable,
                Err((ErrorCode::Unavailable, _)) => return acknowledged,
                Err(refused) => panic!("{refused:?} behind {acknowledged}"),
            },
            Err(_) => return acknowledged,
        }
    }
}

/// `FELIX_FOLLOWER_KILLS` (3) is the number of kills.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acknowledged_records_survive_kills_of_the_follower() {
    let kills: u64 =
        std::env::var("FELIX_FOLLOWER_KILLS").map_or(3, |text| text.parse().expect("a number"));
    let mut site = Site::start();
    let mut acknowledged = 0;
    for round in 0..kills {
        let (peer, mut stream) = site.leader(1).await;
        let pid = site.brokers.cluster.node(0).pid().expect("a process");
        let killer = tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(60 + 37 * (round % 7))).await;
            // SAFETY: sends a signal to a child of this test.
            unsafe { libc::kill(pid as i32, libc::SIGKILL) };
            tokio::time::sleep(Duration::from_millis(20)).await;
            peer.conn.close(0u32.into(), b"the broker is gone");
        });
        let reached = ship_until_cut(&mut stream, acknowledged, 32).await;
        killer.await.expect("killed");
        assert!(reached >= acknowledged);
        site.kill_and_restart().await;
        let (_peer, mut stream) = site.leader(1).await;
        // A probe past everything says where the copy ends.
        match ask(&mut stream, &records(LOG, 7, u64::MAX - 1, &[])).await {
            Err((ErrorCode::LogGap, tail)) => {
                assert!(tail >= reached, "{tail} after {reached} was acknowledged");
                acknowledged = tail;
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(acknowledged > 0, "nothing was ever acknowledged");
    // Every byte is compared: the whole log is sent again.
    let (_peer, mut stream) = site.leader(1).await;
    let mut first = 0;
    while first < acknowledged {
        let count = (acknowledged - first).min(500);
        let answer = ask(&mut stream, &batch(first, count)).await;
        assert_eq!(answer, Ok(acknowledged), "from {first}");
        first += count;
    }
    site.verify_offline().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_stops_in_order_while_a_leader_ships() {
    let mut site = Site::start();
    let (_peer, mut stream) = site.leader(1).await;
    assert_eq!(ask(&mut stream, &batch(0, 3)).await, Ok(3));
    let shipping = tokio::spawn(async move { ship_until_cut(&mut stream, 3, 16).await });
    site.brokers
        .wait_metric(0, "felix_follower_records_total", 300.0);
    let exit = tokio::task::block_in_place(|| site.brokers.cluster.node_mut(0).stop());
    let exit = exit.expect("stopped");
    assert!(exit.is_clean(), "{exit:?}");
    let acknowledged = shipping.await.expect("shipped");
    site.brokers.start_node(0);
    let (_peer, mut stream) = site.leader(1).await;
    let answer = ask(&mut stream, &batch(0, acknowledged)).await;
    assert!(
        answer.is_ok_and(|durable| durable >= acknowledged),
        "{answer:?}"
    );
}

/// A connection's core need not be the shard's: both ways lead to the same copy.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_find_the_core_that_owns_the_shard() {
    let site = Site::start_with_cores(2);
    let mut next = 0;
    // Half of the connections land on the other core.
    while site.brokers.metric(0, "felix_lane_messages_sent_total") < 1.0 {
        assert!(next < 64, "no connection of 64 landed on the other core");
        let (_peer, mut stream) = site.leader(1).await;
        assert_eq!(ask(&mut stream, &batch(next, 1)).await, Ok(next + 1));
        next += 1;
    }
    let (_peer, mut stream) = site.leader(1).await;
    assert_eq!(
        ask(&mut stream, &batch(0, next)).await,
        Ok(next),
        "one copy"
    );
    assert_eq!(site.brokers.metric(0, "felix_follower_logs"), 1.0);
}
