//! A scripted leader of golden vectors drives a real broker as its follower, in all five logs.

use std::time::Duration;

use felix_uring::ids::CorrelationId;
use felix_uring::wire::internal::{encode, ErrorCode, ReplicaLog};

use crate::leader_site::{
    ask, bootstrap, outcome, rebuild, records, send_vector, vector, Site, LOGS,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_of_golden_vectors_is_followed_in_all_five_logs() {
    let mut site = Site::start();
    let (_peer, mut stream) = site.leader(1).await;
    for of in &LOGS {
        let log = of.log;
        // Nothing is held: the typical batch starts at 100.
        let answer = send_vector(&mut stream, of.records).await;
        assert_eq!(outcome(&answer), Err((ErrorCode::LogGap, 0)), "{log:?}");
        let answer = send_vector(&mut stream, of.wrong_checksum).await;
        assert_eq!(outcome(&answer).map_err(|e| e.0), Err(ErrorCode::Malformed));
        if log != ReplicaLog::GroupCursors {
            for _ in 0..2 {
                let answer = send_vector(&mut stream, of.bootstrap).await;
                assert_eq!(outcome(&answer), Ok(5000), "{log:?}: idempotent");
            }
        }
        let answer = send_vector(&mut stream, of.rebuild).await;
        assert_eq!(outcome(&answer), Ok(5000), "{log:?}");
        assert_eq!(ask(&mut stream, &rebuild(log, 7, 100)).await, Ok(100));
        // The typical batch in its place: the answer is the typical answer, byte for byte.
        for _ in 0..2 {
            let answer = send_vector(&mut stream, of.records).await;
            let frame = encode(&answer).expect("a frame");
            assert_eq!(frame, vector("k08-typical"), "{log:?}");
        }
        // A gap, a resend with more, a difference, a bootstrap over records.
        let gap = ask(&mut stream, &records(log, 7, 103, &["late"])).await;
        assert_eq!(gap, Err((ErrorCode::LogGap, 102)), "{log:?}");
        let more = records(log, 7, 101, &["beta", "gamma", "delta"]);
        assert_eq!(ask(&mut stream, &more).await, Ok(104), "{log:?}");
        let differs = records(log, 7, 102, &["gamma", "other"]);
        let conflict = ask(&mut stream, &differs).await;
        assert_eq!(conflict, Err((ErrorCode::LogConflict, 103)), "{log:?}");
        assert_eq!(ask(&mut stream, &bootstrap(log, 7, 100)).await, Ok(104));
        let over = ask(&mut stream, &bootstrap(log, 7, 5000)).await;
        assert_eq!(over.map_err(|e| e.0), Err(ErrorCode::LogConflict));
        assert_eq!(ask(&mut stream, &records(log, 7, 104, &[])).await, Ok(104));
        // Older and newer generations.
        for request in [
            records(log, 6, 104, &["x"]),
            bootstrap(log, 6, 100),
            rebuild(log, 6, 0),
        ] {
            let code = stream.refused(&request).await;
            assert_eq!(code, ErrorCode::FencedEpoch, "{request:?}");
        }
        for request in [
            records(log, 8, 104, &["x"]),
            bootstrap(log, 8, 100),
            rebuild(log, 8, 0),
        ] {
            let code = stream.refused(&request).await;
            assert_eq!(code, ErrorCode::StaleRoute, "{request:?}");
        }
    }
    // Somebody else of the set, in a log that exists.
    let (_third, mut third) = site.leader(2).await;
    for request in [
        records(ReplicaLog::Stream, 7, 104, &["x"]),
        rebuild(ReplicaLog::Stream, 7, 0),
    ] {
        assert_eq!(third.refused(&request).await, ErrorCode::Unauthorized);
    }
    assert_eq!(site.brokers.metric(0, "felix_follower_logs"), 5.0);
    assert_eq!(
        site.brokers.metric(0, "felix_follower_conflicts_total"),
        5.0
    );
    assert_eq!(site.brokers.metric(0, "felix_follower_records_total"), 20.0);

    // What was acknowledged is there after a crash, and equal to what was sent.
    site.kill_and_restart().await;
    let (_peer, mut stream) = site.leader(1).await;
    for of in &LOGS {
        let log = of.log;
        let gap = ask(&mut stream, &records(log, 7, 105, &["x"])).await;
        assert_eq!(gap, Err((ErrorCode::LogGap, 104)), "{log:?}");
        let answer = send_vector(&mut stream, of.records).await;
        assert_eq!(outcome(&answer), Ok(104), "{log:?}");
        let all = ["alpha", "beta", "gamma", "delta", "epsilon"];
        assert_eq!(ask(&mut stream, &records(log, 7, 100, &all)).await, Ok(105));
    }
    site.verify_offline().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_of_a_stream_are_answered_in_order_without_waiting_for_each_other() {
    let site = Site::start_with_cores(2);
    let (_peer, mut stream) = site.leader(1).await;
    let log = ReplicaLog::Stream;
    let count = 200;
    for first in 0..count {
        let request = records(log, 7, first, &["one"]);
        stream.send(encode(&request).expect("a frame")).await;
    }
    let mut durable = 0;
    for first in 0..count {
        let answer = stream.message().await;
        assert_eq!(
            answer.correlation(),
            CorrelationId(first + 1000),
            "in order"
        );
        let now = outcome(&answer).expect("stored");
        assert!(now > first && now >= durable && now <= count, "cumulative");
        durable = now;
    }
    assert_eq!(durable, count);
    let commits = site.brokers.metric(0, "felix_storage_commits_total");
    assert!(
        commits < count as f64,
        "{commits} commits for {count} batches: they do not share commits"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_leader_s_suffix_is_dropped_for_the_next_one() {
    let mut site = Site::start();
    let (_old, mut old) = site.leader(1).await;
    let log = ReplicaLog::Stream;
    let common = ["r0", "r1", "r2"];
    assert_eq!(ask(&mut old, &records(log, 7, 0, &common)).await, Ok(3));
    site.assign(8, "node-3");
    let (_next, mut next) = site.leader(2).await;
    // Generation 8 has the three, and its own behind them.
    let batch = ["r0", "r1", "r2", "s3", "s4"];
    assert_eq!(ask(&mut next, &records(log, 8, 0, &batch)).await, Ok(5));
    // The deposed one learns that it is over, for every request.
    for request in [
        records(log, 7, 3, &["late"]),
        bootstrap(log, 7, 0),
        rebuild(log, 7, 0),
    ] {
        assert_eq!(old.refused(&request).await, ErrorCode::FencedEpoch);
    }
    // 9 never saw s3 and s4: they go, and the log equals its own.
    site.assign(9, "node-2");
    let (_third, mut third) = site.leader(1).await;
    let gap = ask(&mut third, &records(log, 9, 5, &["t5"])).await;
    assert_eq!(gap, Err((ErrorCode::LogGap, 2)), "uncompared records of 8");
    let batch = ["r2", "t3"];
    assert_eq!(ask(&mut third, &records(log, 9, 2, &batch)).await, Ok(4));
    let dropped = "felix_follower_dropped_records_total";
    assert_eq!(site.brokers.metric(0, dropped), 2.0);
    // After a crash as before it.
    site.kill_and_restart().await;
    let (_third, mut third) = site.leader(1).await;
    let all = ["r0", "r1", "r2", "t3", "t4"];
    assert_eq!(ask(&mut third, &records(log, 9, 0, &all)).await, Ok(5));
    let copies = site.listed_copies(1).await;
    assert_eq!(copies[0]["generation"], 9);
    assert_eq!(copies[0]["durable_offset"], 5);
    assert_eq!(copies[0]["matched_offset"], 5);
    site.verify_offline().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_difference_too_deep_is_kept_until_a_rebuild_asks() {
    let site = Site::start();
    let (_old, mut old) = site.leader(1).await;
    let log = ReplicaLog::Counters;
    assert_eq!(ask(&mut old, &records(log, 7, 0, &["a", "b"])).await, Ok(2));
    site.assign(8, "node-3");
    let (_next, mut next) = site.leader(2).await;
    let own = ["a", "b", "c"];
    assert_eq!(ask(&mut next, &records(log, 8, 0, &own)).await, Ok(3));
    site.assign(9, "node-2");
    let (_third, mut third) = site.leader(1).await;
    // Differs at 1, before generation 8 began at 2.
    let conflict = ask(&mut third, &records(log, 9, 0, &["a", "q"])).await;
    assert_eq!(conflict, Err((ErrorCode::LogConflict, 1)));
    let again = ask(&mut third, &records(log, 9, 0, &["a"])).await;
    assert_eq!(again, Ok(1), "nothing was dropped");
    assert_eq!(ask(&mut third, &rebuild(log, 9, 0)).await, Ok(0));
    let all = ["a", "q", "r"];
    assert_eq!(ask(&mut third, &records(log, 9, 0, &all)).await, Ok(3));
    assert_eq!(site.brokers.metric(0, "felix_follower_rebuilds_total"), 1.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_catalog_older_than_an_accepted_generation_is_refused() {
    let mut site = Site::start();
    let (_peer, mut stream) = site.leader(1).await;
    let log = ReplicaLog::Stream;
    assert_eq!(ask(&mut stream, &records(log, 7, 0, &["a"])).await, Ok(1));
    // Without the shard the file is fine; with the shard at an older generation it is not.
    site.raise_file_generation();
    let path = site.brokers.cluster.catalog().to_path_buf();
    std::fs::write(path.with_extension("new"), &site.plain_catalog).expect("a file");
    std::fs::rename(path.with_extension("new"), &path).expect("a rename");
    let long = Duration::from_secs(30);
    site.brokers
        .wait_metric_for(0, "felix_catalog_reloads_total", 1.0, long);
    for (generation, code) in [(6, ErrorCode::FencedEpoch), (7, ErrorCode::StaleRoute)] {
        let request = records(log, generation, 1, &["b"]);
        assert_eq!(stream.refused(&request).await, code, "at {generation}");
    }
    site.write_catalog(6, "node-2");
    let refused = "felix_catalog_reload_errors_total";
    site.brokers.wait_metric_for(0, refused, 1.0, long);
    let status = site.brokers.cluster.node(0).status().expect("a status");
    let error = status["catalog"]["error"].as_str().unwrap_or_default();
    assert!(error.contains("has accepted 7"), "{status}");
    // Nor does a broker start with it.
    let node = site.brokers.cluster.node_mut(0);
    node.stop().expect("stopped");
    node.start().expect("a process");
    let failed = node.wait_ready().expect_err("the file is too old");
    assert!(failed.to_string().contains("has accepted 7"), "{failed}");
    site.write_catalog(7, "node-2");
    site.brokers.start_node(0);
    let (_peer, mut stream) = site.leader(1).await;
    assert_eq!(ask(&mut stream, &records(log, 7, 1, &["b"])).await, Ok(2));
}

/// Leaving the set and the shard while batches are under way: each is answered, none is lost silently.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_that_comes_to_lead_refuses_its_former_leader() {
    let site = Site::start();
    let (_peer, mut stream) = site.leader(1).await;
    let log = ReplicaLog::Cache;
    assert_eq!(ask(&mut stream, &records(log, 7, 0, &["a"])).await, Ok(1));
    site.assign(8, "node-1");
    for request in [records(log, 7, 1, &["b"]), rebuild(log, 7, 0)] {
        assert_eq!(stream.refused(&request).await, ErrorCode::FencedEpoch);
    }
    let request = records(log, 8, 1, &["b"]);
    assert_eq!(stream.refused(&request).await, ErrorCode::Unauthorized);
    // And follows again, where it was.
    site.assign(9, "node-2");
    let (_peer, mut stream) = site.leader(1).await;
    let batch = ["a", "b"];
    assert_eq!(ask(&mut stream, &records(log, 9, 0, &batch)).await, Ok(2));
}
