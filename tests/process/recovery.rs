//! A broker that recovers says how far it is, serves nobody meanwhile, and then serves what it found.

use std::fs::OpenOptions;
use std::process::Command;
use std::time::{Duration, Instant};

use felix_uring::wire::client::messages::StartAt;

use crate::support::brokers::{Brokers, FIRST};
use crate::support::client::Client;

/// A recovery as slow as the test wants: a named pipe in place of the record of freed segments cannot be
/// read before somebody opens its other end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readiness_says_how_far_a_recovery_is() {
    let mut brokers = Brokers::start(1);
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.stream(&token).await;
    stream.must_publish(FIRST, b"kept").await;
    let stopped = brokers.cluster.node_mut(0).stop();
    stopped.unwrap_or_else(|e| panic!("{e}"));
    let core = brokers.cluster.node(0).data_dir().join("core-log/0");
    // Whoever reads the record of freed segments waits for a writer.
    let pipe = core.join("freed");
    let made = Command::new("mkfifo").arg(&pipe).status();
    assert!(made.expect("mkfifo runs").success());

    let node = brokers.cluster.node_mut(0);
    node.start().unwrap_or_else(|e| panic!("{e}"));
    let admin = node.admin_addr();
    let started = Instant::now();
    let answer = loop {
        let ready = felix_uring::admin::get(admin, "/ready", Duration::from_secs(2));
        match ready {
            // Before the directory has been listed it knows of no logs.
            Ok(answer) if answer.body.contains("0 of 1 core logs") => break answer,
            Ok(answer) => assert_ne!(answer.status, 200, "ready before it can be"),
            Err(_) => {}
        }
        let limit = Duration::from_secs(30);
        assert!(
            started.elapsed() < limit,
            "it does not say that it recovers"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert_eq!(answer.status, 503, "{}", answer.body);
    assert!(
        answer.body.contains("recovering the logs"),
        "{}",
        answer.body
    );
    assert!(answer.body.contains(" segments"), "{}", answer.body);
    brokers.assert_alive(0);

    let opened = tokio::task::spawn_blocking({
        let pipe = pipe.clone();
        move || OpenOptions::new().write(true).open(pipe)
    });
    let held = opened
        .await
        .expect("a thread")
        .expect("the broker has the other end");
    drop(held);
    let node = brokers.cluster.node_mut(0);
    node.wait_ready().unwrap_or_else(|e| panic!("{e}"));
    let client = Client::connect(&brokers, 0).await;
    let mut events = client.subscribe(&token, FIRST, StartAt::Earliest).await;
    assert_eq!(events.take(1).await[0].1.to_vec(), b"kept");
    let log = brokers.log(0);
    assert!(log.contains("logs recovered"), "{log}");
}
