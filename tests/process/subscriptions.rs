//! Subscribers of every pace, what holds them back, and how many there may be; what a client may make
//! the broker hold; and the widths it declares.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use felix_uring::cluster::{ShardedSpec, NAMESPACE, TENANT};
use felix_uring::wire::client::messages::{ErrorAnswer, PublishWidth, StartAt};
use felix_uring::wire::client::{
    encode_message, AckGranularity, AckRequest, Answer, Payloads, PublishBatch, PublishOutcome,
    RetryClass, ToClient,
};

use crate::support::brokers::{Brokers, FIRST};
use crate::support::client::{publish_frame, refusal, subscribe_frame, Client, End, Stream};
use crate::support::{within, SOON};

const MIB: usize = 1 << 20;

/// A record of `bytes` that no other is equal to.
fn record(number: u64, bytes: usize) -> Vec<u8> {
    let mut record = vec![number as u8; bytes];
    record[..8].copy_from_slice(&number.to_be_bytes());
    record
}

/// Whether these are records 0 to `count`, each at its own offset.
fn assert_all(records: &[(u64, Bytes)], count: u64, bytes: usize) {
    assert_eq!(records.len() as u64, count);
    for (expected, (offset, payload)) in (0..).zip(records) {
        assert_eq!(*offset, expected);
        assert!(payload[..] == record(expected, bytes)[..], "{expected}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn everybody_gets_every_record_whatever_their_pace() {
    let brokers = Brokers::start_with(1, |spec| spec.cores_per_node = 2);
    let token = brokers.token();
    let publisher = Client::connect(&brokers, 0).await;
    let mut stream = publisher.stream(&token).await;
    let slow_client = Client::connect(&brokers, 0).await;
    let mut slow = slow_client.subscribe(&token, FIRST, StartAt::Latest).await;
    // Connections land on either core; several share one.
    let mut clients = Vec::new();
    for _ in 0..3 {
        clients.push(Client::connect(&brokers, 0).await);
    }
    let mut quick = Vec::new();
    for n in 0..9 {
        let client = &clients[n % clients.len()];
        quick.push(client.subscribe(&token, FIRST, StartAt::Latest).await);
    }
    // More than the slow one's window, its transport and its queue hold together.
    let count = 30u64;
    let publishing = async {
        for number in 0..count {
            let offset = stream.must_publish(FIRST, record(number, MIB)).await;
            assert_eq!(offset, number);
        }
    };
    let reading = async {
        let mut got = Vec::new();
        for events in &mut quick {
            got.push(events.take(count as usize).await);
        }
        got
    };
    let ((), got) = tokio::join!(publishing, reading);
    got.iter()
        .for_each(|records| assert_all(records, count, MIB));
    // The slow one waits for room, and nobody waited for it.
    brokers.wait_metric(0, "felix_subscriptions_waiting", 1.0);
    assert_all(&slow.take(count as usize).await, count, MIB);
    let last = stream.must_publish(FIRST, record(count, 8)).await;
    assert_eq!(slow.take(1).await[0].0, last);
    brokers.wait_metric(0, "felix_delivered_records_total", 10.0 * count as f64);
    assert_eq!(brokers.metric(0, "felix_internal_faults_total"), 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_budget_holds_for_all_slow_clients_and_none_of_them_loses_a_record() {
    let brokers = Brokers::start_with(1, |spec| {
        spec.extra_args.push("--client-queued-bytes=1048576".into());
    });
    let token = brokers.token();
    let mut subscribers = Vec::new();
    for _ in 0..4 {
        let client = Client::connect(&brokers, 0).await;
        let events = client.subscribe(&token, FIRST, StartAt::Latest).await;
        subscribers.push((client, events));
    }
    let publisher = Client::connect(&brokers, 0).await;
    let mut stream = publisher.stream(&token).await;
    let count = 24u64;
    for number in 0..count {
        stream.must_publish(FIRST, record(number, MIB)).await;
    }
    brokers.wait_metric(0, "felix_subscriptions_waiting", 4.0);
    // Without the budget each of them would have 3 to 4 MiB; with it, one record in any case.
    let queued = brokers.metric(0, "felix_client_queued_bytes");
    assert!(queued < 6.0 * MIB as f64, "{queued}");
    // One after the other: who does not read keeps nothing from who does.
    for (_, events) in &mut subscribers {
        assert_all(&events.take(count as usize).await, count, MIB);
    }
    assert_eq!(brokers.metric(0, "felix_internal_faults_total"), 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn subscriptions_and_connections_have_limits_that_are_told() {
    let brokers = Brokers::start_with(1, |spec| {
        spec.extra_args.push("--max-subscriptions=2".into());
        spec.extra_args.push("--max-connections=2".into());
    });
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let first = client.subscribe(&token, FIRST, StartAt::Latest).await;
    let mut second = client.subscribe(&token, FIRST, StartAt::Latest).await;
    let mut third = client.stream(&token).await;
    third.send(subscribe_frame(FIRST, StartAt::Latest)).await;
    match third.answers.answer().await {
        Answer::ErrorAnswer(error) => {
            assert_eq!(code_of(&error), "limit_exceeded");
            assert_eq!(error.retry, Some(RetryClass::Fatal));
        }
        other => panic!("{other:?}"),
    }
    // A stop makes room as soon as it is heard of: with the next event, as clients send it.
    drop(first);
    let mut stream = client.stream(&token).await;
    stream.must_publish(FIRST, b"an event").await;
    brokers.wait_metric(
        0,
        "felix_subscriptions_ended_total{reason=\"stopped_by_client\"}",
        1.0,
    );
    let mut fourth = client.subscribe(&token, FIRST, StartAt::Earliest).await;
    assert_eq!(fourth.take(1).await[0].1, "an event");
    assert_eq!(second.take(1).await[0].1, "an event");

    let other = Client::connect(&brokers, 0).await;
    let addr = brokers.cluster.node(0).client_addr();
    let refused = Client::dial(addr, brokers.cluster.ca(), None).await;
    assert!(refused.is_err(), "a third connection came up");
    brokers.wait_metric(
        0,
        "felix_handshakes_failed_total{reason=\"client_limit\"}",
        1.0,
    );
    other.conn.close(0u32.into(), b"done");
    brokers.wait_metric(
        0,
        "felix_connections_closed_total{reason=\"client_closed\"}",
        1.0,
    );
    let deadline = std::time::Instant::now() + SOON;
    // The place is free once the closed connection's last packets cannot come any more.
    while Client::dial(addr, brokers.cluster.ca(), None)
        .await
        .is_err()
    {
        assert!(
            std::time::Instant::now() < deadline,
            "there is no room again"
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// The header and the first bytes of a publish of one record.
fn unfinished(record_bytes: usize, sent_bytes: usize) -> (Bytes, Bytes) {
    let mut frame = publish_frame(7, FIRST, &[record(1, record_bytes)]);
    let start = frame.split_to(sent_bytes);
    (start, frame)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_held_of_unfinished_frames_is_bounded_by_connection_and_by_broker() {
    let mut brokers = Brokers::start_with(1, |spec| {
        spec.extra_args
            .push("--client-buffered-bytes=41943040".into());
    });
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let (start, rest) = unfinished(10 * MIB, 9 * MIB);
    let mut held = Vec::new();
    for _ in 0..3 {
        let mut stream = client.stream(&token).await;
        stream.send(&start).await;
        held.push(stream);
    }
    brokers.wait_metric(0, "felix_client_buffered_bytes", 26.9 * MIB as f64);
    // 32 MiB are what a connection may hold.
    let mut fourth = client.stream(&token).await;
    fourth.send(&start).await;
    assert_eq!(overloaded(&mut fourth).await, "overloaded");
    // Another connection finds the broker's 40 MiB used up.
    let other = Client::connect(&brokers, 0).await;
    let mut fifth = other.stream(&token).await;
    fifth.send(&start).await;
    brokers.wait_metric(0, "felix_client_buffered_bytes", 35.9 * MIB as f64);
    let mut sixth = other.stream(&token).await;
    sixth.send(&start).await;
    assert_eq!(overloaded(&mut sixth).await, "overloaded");
    // What was begun is finished, and gives its room back; small frames were never in question.
    other
        .stream(&token)
        .await
        .must_publish(FIRST, b"small")
        .await;
    held.push(fifth);
    for stream in &mut held {
        stream.send(&rest).await;
        let ack = stream.answers.ack().await;
        assert!(
            matches!(ack.outcome, PublishOutcome::Accepted { .. }),
            "{ack:?}"
        );
    }
    let mut seventh = other.stream(&token).await;
    seventh.send(&start).await;
    seventh.send(&rest).await;
    seventh.answers.ack().await;
    brokers.assert_alive(0);
    assert_eq!(brokers.metric(0, "felix_internal_faults_total"), 0.0);
}

fn code_of(error: &ErrorAnswer) -> String {
    error
        .code
        .as_ref()
        .map_or("none", |code| code.name())
        .to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stranger_is_held_to_a_mebibyte_on_all_its_streams() {
    let mut brokers = Brokers::start(1);
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    // Sixty thousand bytes of the first message of a stream each; the last bytes never come.
    let mut start = b"FLX1\x00\x01\x00\x00".to_vec();
    start.extend(60_000u32.to_be_bytes());
    start.resize(60_000, b' ');
    let mut streams = Vec::new();
    for _ in 0..20 {
        let mut stream = client.open().await;
        stream.send(&start).await;
        streams.push(stream);
    }
    brokers.wait_metric(
        0,
        "felix_client_requests_refused_total{code=\"overloaded\"}",
        3.0,
    );
    let held = brokers.metric(0, "felix_client_buffered_bytes");
    assert!(held <= MIB as f64, "{held}");
    // Once it has shown a token, it is held to what clients are.
    let mut known = client.stream(&token).await;
    known.must_publish(FIRST, b"known").await;
    let mut more = client.open().await;
    more.send(&start).await;
    let mut stream = client.stream(&token).await;
    stream.must_publish(FIRST, b"goes on").await;
    brokers.wait_metric(0, "felix_client_buffered_bytes", held + 50_000.0);
    brokers.assert_alive(0);
}

/// The code a stream was given up with.
async fn overloaded(stream: &mut Stream) -> String {
    let (frames, end) = stream.answers.read_to_end().await;
    assert_eq!(end, End::Finished);
    match frames.as_slice() {
        [ToClient::Answer(Answer::ErrorAnswer(error))] => code_of(error),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deleted_stream_is_told_to_its_subscribers() {
    let brokers = Brokers::start(1);
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut events = client.subscribe(&token, FIRST, StartAt::Latest).await;
    brokers.edit_catalog(|catalog| {
        let generation = catalog.get("generation").and_then(toml::Value::as_integer);
        let next = generation.unwrap_or(0) + 1;
        catalog.insert("generation".into(), next.into());
        for table in ["stream", "assignment"] {
            let entries = catalog.get_mut(table).and_then(toml::Value::as_array_mut);
            let entries = entries.unwrap_or_else(|| panic!("no {table}"));
            entries.retain(|entry| entry.get("name").and_then(toml::Value::as_str) != Some(FIRST));
        }
    });
    match within(Duration::from_secs(30), "the end", events.last_words()).await {
        Ok(Answer::StreamDeleted(_)) => {}
        other => panic!("{other:?}"),
    }
    assert_eq!(events.last_words().await.unwrap_err(), End::Finished);
    let ended = "felix_subscriptions_ended_total{reason=\"stream_deleted\"}";
    brokers.wait_metric(0, ended, 1.0);
}

const WIDE: &str = "wide";

/// A publish by key; acked when it has a request id.
fn keyed(request_id: Option<u64>, payload: &[u8]) -> Bytes {
    PublishBatch {
        ack: request_id.map(|request_id| AckRequest {
            request_id,
            granularity: AckGranularity::PerBatch,
        }),
        producer: None,
        key: Some(Bytes::from_static(b"key")),
        tenant_id: TENANT.into(),
        namespace: NAMESPACE.into(),
        stream: WIDE.into(),
        payloads: Payloads::from_slices([payload]).expect("payloads"),
    }
    .encode()
    .expect("a frame")
}

fn width(shards: u32) -> Bytes {
    encode_message(&PublishWidth {
        tenant_id: TENANT.into(),
        namespace: NAMESPACE.into(),
        stream: WIDE.into(),
        shards,
        routing: None,
    })
    .expect("a frame")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keyed_publishes_under_a_wrong_width_are_refused_until_it_is_declared_anew() {
    let brokers = Brokers::start_with(2, |spec| {
        // Node 1 forwards half of it: what is declared is judged where the client is.
        spec.streams.push(ShardedSpec::new(WIDE, 4).led_by(&[0, 1]));
    });
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.stream(&token).await;
    let mut frames = BytesMut::new();
    for frame in [
        keyed(Some(1), b"undeclared"),
        width(3),
        keyed(Some(2), b"stale"),
        keyed(None, b"stale and silent"),
        publish_frame(3, WIDE, &[b"no key"]),
        width(4),
        keyed(Some(4), b"declared"),
    ] {
        frames.extend_from_slice(&frame);
    }
    stream.send(&frames).await;
    let mut outcomes = Vec::new();
    for _ in 0..4 {
        let ack = stream.answers.ack().await;
        outcomes.push((ack.request_id, ack.outcome));
    }
    outcomes.sort_by_key(|(request_id, _)| *request_id);
    for (request_id, outcome) in outcomes {
        match request_id {
            2 => {
                let said = refusal(outcome);
                assert_eq!(said, ("stale_width".to_string(), RetryClass::Retry));
            }
            _ => assert!(
                matches!(outcome, PublishOutcome::Accepted { .. }),
                "{outcome:?}"
            ),
        }
    }
    // Another stream of the same client has declared nothing.
    let mut other = client.stream(&token).await;
    other.send(keyed(Some(9), b"undeclared")).await;
    assert!(matches!(
        other.answers.ack().await.outcome,
        PublishOutcome::Accepted { .. }
    ));
    brokers.wait_metric(0, "felix_publishes_dropped_total", 1.0);
}
