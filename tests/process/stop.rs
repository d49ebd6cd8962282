//! An orderly stop loses nothing, and one that cannot be orderly says what it cut.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use felix_uring::wire::client::messages::StartAt;
use felix_uring::wire::client::{PublishOutcome, RetryClass, ToClient};

use crate::support::brokers::{Brokers, FIRST, SECOND};
use crate::support::client::{publish_frame, Client, Events, Stream};
use crate::support::owner::ScriptedOwner;
use crate::support::{within, SOON};

const ROUNDS: u64 = 6;
const WINDOW: usize = 32;

/// A client that publishes until its stream ends.
struct Load {
    stream: Stream,
    client: u64,
    to: &'static str,
}

/// What it was told, by batch.
#[derive(Default)]
struct Told {
    sent: u64,
    acked: HashMap<u64, u64>,
    refused: Vec<u64>,
    unknown: u64,
    /// Sent and without an answer when the connection ended, which was told.
    cut: u64,
}

impl Load {
    async fn run(mut self) -> Told {
        let mut told = Told::default();
        let mut unanswered = 0;
        loop {
            while unanswered < WINDOW {
                let payload = payload(self.client, told.sent);
                let frame = publish_frame(told.sent, self.to, &[payload]);
                told.sent += 1;
                unanswered += 1;
                self.stream.send(frame).await;
            }
            let next = within(SOON, "an answer or the end", self.stream.answers.next()).await;
            let Ok(frame) = next else { break };
            let ToClient::Ack(ack) = frame else {
                panic!("{frame:?}");
            };
            unanswered -= 1;
            match ack.outcome {
                PublishOutcome::Accepted { offset } => {
                    let doubled = told
                        .acked
                        .insert(ack.request_id, offset.expect("an offset"));
                    assert_eq!(doubled, None, "answered twice");
                }
                PublishOutcome::Failed(refusal) => match refusal.class() {
                    Some(RetryClass::Retry | RetryClass::RetryAfter) => {
                        told.refused.push(ack.request_id);
                    }
                    Some(RetryClass::OutcomeUnknown) => told.unknown += 1,
                    other => panic!("{other:?}: {refusal:?}"),
                },
            }
        }
        told.cut = told.sent - told.acked.len() as u64 - told.refused.len() as u64 - told.unknown;
        told
    }
}

fn payload(client: u64, batch: u64) -> Vec<u8> {
    format!(
        "client {client} batch {batch} {}",
        "x".repeat((batch % 300) as usize)
    )
    .into_bytes()
}

async fn records_of(events: &mut Events, upto: u64) -> HashMap<u64, Vec<u8>> {
    let records = events.take(upto as usize + 1).await;
    records.into_iter().map(|(o, r)| (o, r.to_vec())).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_under_load_loses_nothing() {
    let mut brokers = Brokers::start(2);
    let token = brokers.token();
    let mut acked: HashMap<&str, HashMap<u64, Vec<u8>>> = HashMap::new();
    let mut refused: Vec<Vec<u8>> = Vec::new();
    for round in 0..ROUNDS {
        // Two clients of the broker that stops: one writes there, one through it to its peer.
        let client = Client::connect(&brokers, 0).await;
        let events = client.subscribe(&token, FIRST, StartAt::Latest).await;
        let loads = [(FIRST, 2 * round), (SECOND, 2 * round + 1)];
        let mut tasks = Vec::new();
        for (to, number) in loads {
            let stream = client.stream(&token).await;
            let load = Load {
                stream,
                client: number,
                to,
            };
            tasks.push((to, number, tokio::spawn(load.run())));
        }
        tokio::time::sleep(Duration::from_millis(40 + 53 * round % 300)).await;
        let started = Instant::now();
        let exit = brokers.cluster.node_mut(0).stop();
        let exit = exit.unwrap_or_else(|e| panic!("{e}"));
        assert!(exit.is_clean(), "{exit}: {}", brokers.log(0));
        // The deadline is 10 s; nothing here takes long.
        assert!(
            started.elapsed() < Duration::from_secs(9),
            "{:?}",
            started.elapsed()
        );
        for (to, number, task) in tasks {
            let told = task.await.expect("the load ran");
            assert!(
                !told.acked.is_empty(),
                "round {round}: nothing was acknowledged"
            );
            assert_eq!(
                told.unknown, 0,
                "round {round}: an orderly stop left outcomes unknown"
            );
            for (batch, offset) in told.acked {
                let doubled = acked
                    .entry(to)
                    .or_default()
                    .insert(offset, payload(number, batch));
                assert_eq!(doubled, None, "offset {offset} of {to} was given twice");
            }
            refused.extend(told.refused.iter().map(|batch| payload(number, *batch)));
        }
        drop(events);
        let log = brokers.log(0);
        assert!(log.contains("stopped in order"), "{log}");
        brokers.start_node(0);
    }
    for (node, stream) in [(0, FIRST), (1, SECOND)] {
        let client = Client::connect(&brokers, node).await;
        let last = client
            .stream(&token)
            .await
            .must_publish(stream, b"last")
            .await;
        let mut events = client.subscribe(&token, stream, StartAt::Earliest).await;
        let records = records_of(&mut events, last).await;
        for (offset, payload) in &acked[stream] {
            assert_eq!(records.get(offset), Some(payload), "{stream} at {offset}");
        }
        for payload in &refused {
            assert!(
                !records.values().any(|r| r == payload),
                "a refused record was written"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readiness_turns_first_and_a_stop_waits_for_what_was_accepted() {
    let mut brokers = Brokers::prepare_with(2, |_| {});
    brokers.start_node(0);
    let mut owner = ScriptedOwner::start(&brokers, 1);
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.stream(&token).await;
    stream.start_publish(SECOND, &[b"held"]).await;
    let held = owner.next().await;
    brokers
        .cluster
        .node_mut(0)
        .signal(libc::SIGTERM)
        .unwrap_or_else(|e| panic!("{e}"));
    let admin = brokers.cluster.node(0).admin_addr();
    let deadline = Instant::now() + Duration::from_secs(3);
    loop {
        let answer = felix_uring::admin::get(admin, "/ready", Duration::from_secs(2));
        let answer = answer.unwrap_or_else(|e| panic!("{e}"));
        if answer.status == 503 {
            assert!(answer.body.contains("drain"), "{}", answer.body);
            break;
        }
        assert!(Instant::now() < deadline, "still ready");
        std::thread::sleep(Duration::from_millis(5));
    }
    // No new work on this stream. Readiness turns before the cores hear of the stop, so that load
    // balancers stop sending first: what arrives in between is still taken, and then it is kept.
    let mut taken = 0;
    let said = loop {
        let id = stream.start_publish(FIRST, &[b"too late"]).await;
        let ack = stream.answers.ack().await;
        assert_eq!(ack.request_id, id);
        match ack.outcome {
            PublishOutcome::Accepted { offset } => {
                assert_eq!(
                    offset,
                    Some(taken),
                    "taken before the stop reached the core"
                );
                taken += 1;
            }
            refused => break crate::support::client::refusal(refused),
        }
        assert!(Instant::now() < deadline, "work is still taken");
    };
    assert_eq!(said, ("draining".to_string(), RetryClass::Retry));
    // What was accepted is finished, and then the broker goes.
    held.stored_at(7).await;
    let ack = stream.answers.ack().await;
    assert_eq!(ack.outcome, PublishOutcome::Accepted { offset: Some(7) });
    let closed = within(SOON, "the close", client.conn.closed()).await;
    match closed {
        quinn::ConnectionError::ApplicationClosed(close) => {
            assert_eq!(close.error_code, 0u32.into());
        }
        other => panic!("{other}"),
    }
    let exit = brokers
        .cluster
        .node_mut(0)
        .stop()
        .unwrap_or_else(|e| panic!("{e}"));
    assert!(exit.is_clean(), "{exit}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_signal_cuts_and_says_what() {
    let mut brokers = Brokers::prepare_with(2, |spec| {
        spec.extra_args
            .push("--peer-request-timeout-ms=8000".into());
    });
    brokers.start_node(0);
    let mut owner = ScriptedOwner::start(&brokers, 1);
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.stream(&token).await;
    stream.start_publish(SECOND, &[b"hung"]).await;
    let hung = owner.next().await;
    let node = brokers.cluster.node_mut(0);
    node.signal(libc::SIGTERM).unwrap_or_else(|e| panic!("{e}"));
    tokio::time::sleep(Duration::from_secs(1)).await;
    node.check_alive()
        .unwrap_or_else(|e| panic!("it did not wait: {e}"));
    let started = Instant::now();
    // `stop` sends the second signal.
    let exit = node.stop().unwrap_or_else(|e| panic!("{e}"));
    assert!(
        started.elapsed() < Duration::from_secs(4),
        "{:?}",
        started.elapsed()
    );
    let status = exit.status.expect("it ran");
    assert_eq!(status.code(), Some(1), "{exit}");
    let log = brokers.log(0);
    assert!(
        log.contains("1 forwarded requests without an answer"),
        "{log}"
    );
    assert!(!log.contains("panicked"), "{log}");
    // The client was told: by an answer, or by the end of its connection.
    match within(SOON, "an answer or the end", stream.answers.next()).await {
        Ok(ToClient::Ack(ack)) => {
            let (_, class) = crate::support::client::refusal(ack.outcome);
            assert_eq!(class, RetryClass::OutcomeUnknown);
        }
        Ok(other) => panic!("{other:?}"),
        Err(_) => {}
    }
    drop(hung);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_deadline_cuts_as_a_second_signal_does() {
    let mut brokers = Brokers::prepare_with(2, |spec| {
        spec.extra_args.extend(
            [
                "--shutdown-deadline-ms=700",
                "--peer-request-timeout-ms=8000",
            ]
            .map(String::from),
        );
    });
    brokers.start_node(0);
    let mut owner = ScriptedOwner::start(&brokers, 1);
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.stream(&token).await;
    for _ in 0..3 {
        stream.start_publish(SECOND, &[b"hung"]).await;
        owner.next().await;
    }
    let started = Instant::now();
    let exit = brokers
        .cluster
        .node_mut(0)
        .stop()
        .unwrap_or_else(|e| panic!("{e}"));
    let took = started.elapsed();
    assert!(
        took >= Duration::from_millis(700) && took < Duration::from_secs(5),
        "{took:?}"
    );
    assert_eq!(exit.status.expect("it ran").code(), Some(1), "{exit}");
    let log = brokers.log(0);
    assert!(
        log.contains("3 forwarded requests without an answer"),
        "{log}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn signals_that_mean_nothing_here_end_nothing() {
    let mut brokers = Brokers::start(1);
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.stream(&token).await;
    for signal in [libc::SIGUSR1, libc::SIGUSR2, libc::SIGALRM, libc::SIGHUP] {
        let sent = brokers.cluster.node_mut(0).signal(signal);
        sent.unwrap_or_else(|e| panic!("{e}"));
    }
    let deadline = Instant::now() + SOON;
    while !brokers.log(0).contains("SIGHUP is ignored") && Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let log = brokers.log(0);
    assert!(log.contains("read again by themselves"), "{log}");
    brokers.assert_alive(0);
    assert_eq!(stream.must_publish(FIRST, b"goes on").await, 0);
    let exit = brokers.cluster.node_mut(0).stop();
    let exit = exit.unwrap_or_else(|e| panic!("{e}"));
    assert!(exit.is_clean(), "{exit}: {}", brokers.log(0));
}
