//! How many connections other brokers may have: of all together and under one certificate. What is over a
//! limit is refused so that the other side sees it, and counted; a place that is free again is given again.

use std::time::{Duration, Instant};

use felix_uring::tls::INTERNAL_ALPN;

use crate::support::brokers::Brokers;
use crate::support::dialler::PeerClient;
use crate::support::{within, SOON};

const LIMITED: &str = "felix_handshakes_failed_total{reason=\"peer_limit\"}";

async fn greeted(brokers: &Brokers, from: usize) -> PeerClient {
    let peer = PeerClient::connect(brokers, from, 0).await;
    peer.greeted(&format!("node-{}", from + 1)).await;
    peer
}

/// Why the connection ended.
async fn end_of(peer: &PeerClient) -> quinn::ConnectionError {
    within(SOON, "the close", peer.conn.closed()).await
}

/// What the broker says of the connections it has accepted, once it says what is expected.
async fn accepted(brokers: &Brokers, expected: &[(&str, u64)]) -> serde_json::Value {
    let deadline = Instant::now() + SOON;
    loop {
        let status = brokers.cluster.node(0).status();
        let status = status.unwrap_or_else(|e| panic!("{e}"));
        let accepted = status["cores"][0]["accepted_peers"].clone();
        let listed: Vec<_> = accepted["by_certificate"]
            .as_array()
            .expect("a list")
            .iter()
            .map(|one| (one["names"].as_str(), one["connections"].as_u64()))
            .collect();
        let wanted: Vec<_> = expected.iter().map(|(n, c)| (Some(*n), Some(*c))).collect();
        if listed == wanted {
            return accepted;
        }
        assert!(Instant::now() < deadline, "{accepted}, not {expected:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_over_a_limit_are_refused_and_places_come_back() {
    let mut brokers = Brokers::prepare_with(3, |spec| {
        spec.extra_args
            .extend(["--peer-connections=3", "--peer-connections-per-node=2"].map(String::from));
    });
    brokers.start_node(0);
    let first = greeted(&brokers, 1).await;
    let _second = greeted(&brokers, 1).await;

    // A third of the same certificate: let through the handshake, then told.
    let third = PeerClient::connect(&brokers, 1, 0).await;
    match end_of(&third).await {
        quinn::ConnectionError::ApplicationClosed(close) => {
            assert_eq!(&close.reason[..], b"too many connections of this node");
        }
        other => panic!("{other:?}"),
    }
    brokers.wait_metric(0, LIMITED, 1.0);

    // Another node's is none of its business, and is the last place of all.
    let other = until_admitted(&brokers, 2).await;
    other.greeted("node-3").await;
    let report = accepted(&brokers, &[("node-2", 2), ("node-3", 1)]).await;
    assert_eq!(report["connections"], 3);
    assert_eq!(report["limit"], 3);
    assert_eq!(report["limit_per_certificate"], 2);
    let identity = brokers.peer_identity(2);
    let fourth = PeerClient::dial(&brokers, 0, Some(&identity), Some(INTERNAL_ALPN)).await;
    match fourth.err() {
        Some(quinn::ConnectionError::ConnectionClosed(close)) => {
            assert_eq!(
                close.error_code,
                quinn::TransportErrorCode::CONNECTION_REFUSED
            );
        }
        ended => panic!("{ended:?}"),
    }
    brokers.wait_metric(0, LIMITED, 2.0);
    assert_eq!(brokers.metric(0, "felix_peer_connections_accepted"), 3.0);

    // Those that were let in are not touched, and a place that is given up is given again.
    assert_eq!(first.conn.close_reason(), None);
    assert_eq!(other.conn.close_reason(), None);
    first.conn.close(0u32.into(), b"done");
    accepted(&brokers, &[("node-2", 1), ("node-3", 1)]).await;
    let again = until_admitted(&brokers, 1).await;
    accepted(&brokers, &[("node-2", 2), ("node-3", 1)]).await;
    again.greeted("node-2").await;
}

/// A closed connection keeps its place in the transport until it has drained.
async fn until_admitted(brokers: &Brokers, from: usize) -> PeerClient {
    let identity = brokers.peer_identity(from);
    let deadline = Instant::now() + SOON;
    loop {
        match PeerClient::dial(brokers, 0, Some(&identity), Some(INTERNAL_ALPN)).await {
            Ok(peer) => return peer,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
