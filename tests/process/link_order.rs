//! Forwards that wait together for a connection.

use std::collections::{HashMap, HashSet};

use crate::support::brokers::{Brokers, SECOND};
use crate::support::client::Client;
use crate::support::owner::ScriptedOwner;

/// The streams of a connection are not ordered among each other, so what one client stream sent has to travel on
/// one of them, also when all of it waited for the connection and the one before used others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_stream_keeps_to_one_stream_over_a_reconnect() {
    const STREAMS: usize = 8;
    const WAITING: usize = 3;
    let mut brokers = Brokers::prepare_with(2, |spec| {
        // Everything is still waiting when the link may be dialled again.
        let flags = [
            "--peer-backoff-min-ms=600",
            "--forward-budget-ms=4000",
            "--forward-attempts=20",
        ];
        spec.extra_args.extend(flags.map(String::from));
    });
    brokers.start_node(0);
    let mut owner = ScriptedOwner::start(&brokers, 1);
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut streams = Vec::new();
    for nth in 0..STREAMS {
        let mut stream = client.stream(&token).await;
        stream.start_publish(SECOND, &[format!("{nth} warm")]).await;
        owner.next().await.stored_at(0).await;
        stream.answers.ack().await;
        streams.push(stream);
    }
    for round in 0..3 {
        owner.close_connections();
        brokers.wait_metric(
            0,
            "felix_connections_closed_total{reason=\"peer_closed\"}",
            f64::from(round + 1),
        );
        for (nth, stream) in streams.iter_mut().enumerate() {
            for waiting in 0..WAITING {
                let record = format!("{nth} {waiting}");
                stream.start_publish(SECOND, &[record]).await;
            }
        }
        let mut travelled: HashMap<String, HashSet<quinn::StreamId>> = HashMap::new();
        let mut came: HashMap<String, Vec<String>> = HashMap::new();
        // Answered when all have come: one that has nothing of its stream before it may travel on any.
        let mut unanswered = Vec::new();
        for _ in 0..STREAMS * WAITING {
            let request = owner.next().await;
            let record = request.publish.payloads.iter().next().expect("a record");
            let record = String::from_utf8(record.to_vec()).expect("text");
            let (whose, nth) = record.split_once(' ').expect("two words");
            travelled
                .entry(whose.to_string())
                .or_default()
                .insert(request.stream);
            came.entry(whose.to_string())
                .or_default()
                .push(nth.to_string());
            unanswered.push(request);
        }
        for (at, request) in unanswered.iter().enumerate() {
            request.stored_at(at as u64).await;
        }
        for (whose, on) in &travelled {
            assert_eq!(on.len(), 1, "round {round}: stream {whose} used {on:?}");
            assert!(came[whose].is_sorted(), "round {round}: {whose}: {came:?}");
        }
        for stream in &mut streams {
            for _ in 0..WAITING {
                stream.answers.ack().await;
            }
        }
    }
}
