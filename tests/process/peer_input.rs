//! Bad bytes on the internal port: a typed answer or a clean close, a counter, and a broker that
//! goes on serving everybody else.

use felix_uring::tls::{CLIENT_ALPN, INTERNAL_ALPN};
use felix_uring::wire::internal::{ErrorCode, Kind, Message};

use crate::support::brokers::{Brokers, FIRST};
use crate::support::client::Client;
use crate::support::dialler::{forward, frame, hello, raw_frame, shard, PeerClient, PeerStream};
use crate::support::{within, SOON};

const MAGIC: &[u8; 4] = b"FLXI";

/// The stream must end without an answer.
async fn assert_cut(stream: &mut PeerStream) {
    let answer = stream.next().await;
    assert!(answer.is_err(), "answered: {answer:?}");
}

async fn assert_serves(brokers: &mut Brokers) {
    let token = brokers.token();
    let client = Client::connect(brokers, 0).await;
    client.stream(&token).await.must_publish(FIRST, b"ok").await;
    let peer = PeerClient::connect(brokers, 1, 0).await;
    let mut stream = peer.greeted("node-2").await;
    let answer = stream.ask(&forward(9, shard(FIRST, 1), Some(&token))).await;
    assert!(
        matches!(answer, Message::ForwardPublishOk { .. }),
        "{answer:?}"
    );
    brokers.assert_alive(0);
    assert_eq!(brokers.metric(0, "felix_internal_faults_total"), 0.0);
}

/// One broker runs; the other is played by the test.
fn one_of_two() -> Brokers {
    let mut brokers = Brokers::prepare_with(2, |_| {});
    brokers.start_node(0);
    brokers
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_that_are_not_ours_close_the_connection() {
    let mut brokers = one_of_two();
    let body = [0; 8];
    let over = (64 << 20) + 1;
    let cases: [(&str, Vec<u8>, &str); 6] = [
        (
            "client magic",
            raw_frame(b"FLX1", 1, 22, 8, &body),
            "peer_magic",
        ),
        ("garbage", b"GET / HTTP/1.1\r\n\r\n".to_vec(), "peer_magic"),
        ("version", raw_frame(MAGIC, 2, 22, 8, &body), "peer_version"),
        (
            "oversized",
            raw_frame(MAGIC, 1, 22, over, &body),
            "peer_too_large",
        ),
        (
            "oversized unknown",
            raw_frame(MAGIC, 1, 40, over, &body),
            "peer_too_large",
        ),
        (
            "no correlation id",
            raw_frame(MAGIC, 1, 40, 7, &body[..7]),
            "peer_no_correlation",
        ),
    ];
    for (what, bytes, reason) in cases {
        let name = format!("felix_frames_refused_total{{reason=\"{reason}\"}}");
        let before = brokers.metric(0, &name);
        for is_greeted in [true, false] {
            let peer = PeerClient::connect(&brokers, 1, 0).await;
            let mut stream = match is_greeted {
                true => peer.greeted("node-2").await,
                false => peer.open().await,
            };
            stream.send(&bytes).await;
            assert_cut(&mut stream).await;
            let closed = within(SOON, what, peer.conn.closed()).await;
            assert!(
                matches!(closed, quinn::ConnectionError::ApplicationClosed(_)),
                "{what}: {closed}"
            );
        }
        brokers.wait_metric(0, &name, before + 2.0);
    }
    assert_serves(&mut brokers).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_that_cannot_be_read_are_answered_and_the_stream_goes_on() {
    let mut brokers = one_of_two();
    let token = brokers.token();
    let peer = PeerClient::connect(&brokers, 1, 0).await;
    let mut stream = peer.greeted("node-2").await;

    let authorized = frame(&forward(100, shard(FIRST, 1), Some(&token)));
    let legacy = frame(&forward(101, shard(FIRST, 1), None));
    let relabelled = |bytes: &[u8], kind: u16| {
        let mut bytes = bytes.to_vec();
        bytes[6..8].copy_from_slice(&kind.to_be_bytes());
        bytes
    };
    // The declared length fits the bytes, the fields in it do not.
    let cut = |bytes: &[u8]| {
        let mut bytes = bytes[..bytes.len() - 1].to_vec();
        let length = (bytes.len() - 12) as u32;
        bytes[8..12].copy_from_slice(&length.to_be_bytes());
        bytes
    };
    let mut huge_count = legacy.to_vec();
    let count_at = huge_count.len() - 4 - b"forwarded".len() - 4;
    huge_count[count_at..count_at + 4].copy_from_slice(&u32::MAX.to_be_bytes());
    let cases = [
        ("22 relabelled as 1", relabelled(&authorized, 1), 100),
        ("1 relabelled as 22", relabelled(&legacy, 22), 101),
        ("a byte short", cut(&authorized), 100),
        ("a count nothing can hold", huge_count, 101),
        (
            "replication garbage",
            raw_frame(MAGIC, 1, 7, 12, &[0; 12]),
            0,
        ),
        ("cache garbage", raw_frame(MAGIC, 1, 23, 12, &[0; 12]), 0),
    ];
    let offset_before = tail(&brokers);
    for (what, bytes, correlation) in cases {
        stream.send(&bytes).await;
        let answer = stream.message().await;
        assert_eq!(answer.correlation().0, correlation, "{what}");
        assert_eq!(answer.error_code(), Some(ErrorCode::Malformed), "{what}");
    }
    brokers.wait_metric(0, "felix_frames_refused_total{reason=\"peer_body\"}", 6.0);
    assert_eq!(tail(&brokers), offset_before, "something was written");
    // The same stream still serves.
    let answer = stream.ask(&forward(7, shard(FIRST, 1), Some(&token))).await;
    assert!(
        matches!(answer, Message::ForwardPublishOk { .. }),
        "{answer:?}"
    );
    assert_serves(&mut brokers).await;
}

/// Records made durable so far.
fn tail(brokers: &Brokers) -> u64 {
    brokers.metric(0, "felix_storage_records_total") as u64
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unknown_kinds_are_answered_and_answers_are_dropped() {
    let mut brokers = one_of_two();
    let token = brokers.token();
    let peer = PeerClient::connect(&brokers, 1, 0).await;
    let mut stream = peer.open().await;
    // Before the greeting, as a newer broker does it: its own Hello first, then the plain one.
    stream
        .send(raw_frame(
            MAGIC,
            1,
            27,
            24,
            &[
                0, 0, 0, 0, 0, 0, 0, 77, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 5, 6,
            ],
        ))
        .await;
    let answer = stream.message().await;
    assert_eq!(answer.correlation().0, 77);
    assert_eq!(answer.kind(), Kind::ForwardPublishError);
    assert_eq!(answer.error_code(), Some(ErrorCode::UnsupportedKind));
    stream.send(hello(1, "node-2")).await;
    assert!(matches!(stream.message().await, Message::HelloOk(_)));

    for kind in (25..=44).chain([0, 45, 1000, u16::MAX]) {
        let mut body = u64::from(kind).to_be_bytes().to_vec();
        body.extend(vec![0xAB; usize::from(kind) * 3]);
        stream
            .send(raw_frame(MAGIC, 1, kind, body.len() as u32, &body))
            .await;
        let answer = stream.message().await;
        assert_eq!(answer.correlation().0, u64::from(kind));
        assert_eq!(answer.kind(), Kind::ForwardPublishError, "kind {kind}");
        let code = answer.error_code();
        assert_eq!(code, Some(ErrorCode::UnsupportedKind), "kind {kind}");
    }
    // Answers have no place here; the request behind them is the next thing answered.
    for kind in [2u16, 3, 4, 6, 8, 9, 12, 13] {
        stream.send(raw_frame(MAGIC, 1, kind, 24, &[0; 24])).await;
    }
    let answer = stream.ask(&forward(5, shard(FIRST, 1), Some(&token))).await;
    assert!(
        matches!(answer, Message::ForwardPublishOk { .. }),
        "{answer:?}"
    );
    let dropped = "felix_frames_refused_total{reason=\"peer_unexpected_answer\"}";
    brokers.wait_metric(0, dropped, 8.0);
    // Kind 27 before the greeting and the 24 behind it.
    let unknown = "felix_frames_refused_total{reason=\"peer_unknown_kind\"}";
    brokers.wait_metric(0, unknown, 25.0);
    assert_serves(&mut brokers).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_greeting_is_held_to_its_rules() {
    let mut brokers = one_of_two();
    let token = brokers.token();

    // A request before Hello.
    let peer = PeerClient::connect(&brokers, 1, 0).await;
    let mut stream = peer.open().await;
    stream
        .send(frame(&forward(1, shard(FIRST, 1), Some(&token))))
        .await;
    assert_cut(&mut stream).await;
    brokers.wait_metric(
        0,
        "felix_frames_refused_total{reason=\"peer_before_hello\"}",
        1.0,
    );

    // A second Hello is answered like the first; under another name it is refused.
    let peer = PeerClient::connect(&brokers, 1, 0).await;
    let mut stream = peer.greeted("node-2").await;
    stream.send(hello(2, "node-2")).await;
    let again = stream.message().await;
    assert!(
        matches!(&again, Message::HelloOk(ok) if ok.node_id == "node-1"),
        "{again:?}"
    );

    // A name the certificate does not carry.
    let peer = PeerClient::connect(&brokers, 1, 0).await;
    let mut stream = peer.open().await;
    stream.send(hello(3, "node-1")).await;
    let answer = stream.message().await;
    assert_eq!(answer.error_code(), Some(ErrorCode::Unauthorized));
    assert_eq!(answer.correlation().0, 3);
    within(SOON, "the close", peer.conn.closed()).await;
    let names = "felix_handshakes_failed_total{reason=\"hello_name_not_in_certificate\"}";
    brokers.wait_metric(0, names, 1.0);

    // Nothing at all: the connection is not kept for ever.
    let peer = PeerClient::connect(&brokers, 1, 0).await;
    let stream = peer.open().await;
    within(SOON, "the greeting timeout", peer.conn.closed()).await;
    drop(stream);
    brokers.wait_metric(
        0,
        "felix_handshakes_failed_total{reason=\"hello_timeout\"}",
        1.0,
    );

    // A stream that came before the greeting waits for it.
    let peer = PeerClient::connect(&brokers, 1, 0).await;
    let mut first = peer.open().await;
    let mut later = peer.open().await;
    first.send(&hello(4, "node-2")[..5]).await;
    later
        .send(frame(&forward(8, shard(FIRST, 1), Some(&token))))
        .await;
    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    first.send(&hello(4, "node-2")[5..]).await;
    assert!(matches!(first.message().await, Message::HelloOk(_)));
    let answer = later.message().await;
    assert!(
        matches!(answer, Message::ForwardPublishOk { .. }),
        "{answer:?}"
    );
    assert_serves(&mut brokers).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_ends_inside_a_frame_is_counted() {
    let mut brokers = one_of_two();
    let token = brokers.token();
    let peer = PeerClient::connect(&brokers, 1, 0).await;
    let mut stream = peer.greeted("node-2").await;
    let bytes = frame(&forward(1, shard(FIRST, 1), Some(&token)));
    stream.send(&bytes[..bytes.len() / 2]).await;
    stream.send.finish().expect("an open stream");
    assert_cut(&mut stream).await;
    brokers.wait_metric(
        0,
        "felix_frames_refused_total{reason=\"peer_truncated\"}",
        1.0,
    );
    // A stream torn off is nothing to hold against the connection's others.
    let mut torn = peer.open().await;
    torn.send(&bytes[..20]).await;
    torn.send.reset(1u32.into()).expect("an open stream");
    let mut other = peer.open().await;
    let answer = other.ask(&forward(2, shard(FIRST, 1), Some(&token))).await;
    assert!(
        matches!(answer, Message::ForwardPublishOk { .. }),
        "{answer:?}"
    );
    assert_serves(&mut brokers).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_internal_protocol_is_spoken_on_the_internal_port() {
    let mut brokers = one_of_two();
    let identity = brokers.peer_identity(1);
    let failed = "felix_handshakes_failed_total{reason=\"peer_tls\"}";
    for alpn in [None, Some(CLIENT_ALPN), Some(b"h3".as_slice())] {
        let before = brokers.metric(0, failed);
        let dialled = PeerClient::dial(&brokers, 0, Some(&identity), alpn).await;
        assert!(dialled.is_err(), "{alpn:?} was accepted");
        brokers.wait_metric(0, failed, before + 1.0);
    }
    // A client without a certificate is refused after its own side of the handshake is done.
    let before = brokers.metric(0, failed);
    if let Ok(peer) = PeerClient::dial(&brokers, 0, None, Some(INTERNAL_ALPN)).await {
        let closed = within(SOON, "the refusal", peer.conn.closed()).await;
        assert!(
            matches!(closed, quinn::ConnectionError::ConnectionClosed(_)),
            "{closed}"
        );
    }
    brokers.wait_metric(0, failed, before + 1.0);
    assert_serves(&mut brokers).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_bytes_do_no_harm() {
    let mut brokers = one_of_two();
    // A fixed generator: what fails once fails again.
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for round in 0..60 {
        let peer = PeerClient::connect(&brokers, 1, 0).await;
        let mut stream = peer.greeted("node-2").await;
        let mut bytes = Vec::new();
        for _ in 0..20 {
            let kind = (random() % 50) as u16;
            let length = (random() % 200) as usize;
            let body: Vec<u8> = (0..length).map(|_| random() as u8).collect();
            let declared = match round % 3 {
                0 => length as u32,
                1 => (random() % 300) as u32,
                _ => random() as u32,
            };
            bytes.extend(raw_frame(MAGIC, 1, kind, declared, &body));
        }
        stream.send(&bytes).await;
        // Finishing may fail on a connection that is closed already.
        let _ = stream.send.finish();
        while stream.next().await.is_ok() {}
    }
    assert_serves(&mut brokers).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_before_the_end_of_a_stream_are_all_answered() {
    let mut brokers = one_of_two();
    let token = brokers.token();
    let peer = PeerClient::connect(&brokers, 1, 0).await;
    drop(peer.greeted("node-2").await);
    let mut stream = peer.open().await;
    // Refused at once, written, refused at once, all in one piece with the end.
    let mut bytes = Vec::new();
    for i in 0..30u64 {
        match i % 3 {
            0 => bytes.extend(raw_frame(MAGIC, 1, 33, 8, &i.to_be_bytes())),
            1 => bytes.extend(frame(&forward(i, shard(FIRST, 1), Some(&token)))),
            _ => bytes.extend(frame(&forward(i, shard(FIRST, 9), Some(&token)))),
        }
    }
    stream.send(&bytes).await;
    stream.send.finish().expect("an open stream");
    let mut answered = Vec::new();
    while let Ok(answer) = stream.next().await {
        answered.push(answer.correlation().0);
    }
    answered.sort_unstable();
    assert_eq!(answered, (0..30).collect::<Vec<u64>>());
    assert_serves(&mut brokers).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_reads_no_answers_cannot_fill_the_broker() {
    let mut brokers = one_of_two();
    let peer = PeerClient::connect(&brokers, 1, 0).await;
    let mut stream = peer.greeted("node-2").await;
    let rss = |brokers: &Brokers| {
        let status = brokers
            .cluster
            .node(0)
            .status()
            .unwrap_or_else(|e| panic!("{e}"));
        status["process"]["max_rss_bytes"]
            .as_u64()
            .expect("a number")
    };
    let before = rss(&brokers);
    // Each 20 bytes ask for an answer of about 60; the answers are never read.
    let mut piece = Vec::new();
    for i in 0..50_000u64 {
        piece.extend(raw_frame(MAGIC, 1, 33, 8, &i.to_be_bytes()));
    }
    let flood = async {
        for _ in 0..200 {
            stream.send(&piece).await;
        }
    };
    let held_back = tokio::time::timeout(std::time::Duration::from_secs(4), flood).await;
    assert!(
        held_back.is_err(),
        "200 MB of requests were taken without one answer read"
    );
    let grown = rss(&brokers).saturating_sub(before);
    // Windows of 68 MiB a stream and their answers' bound.
    assert!(grown < 160 << 20, "grown by {} MiB", grown >> 20);
    assert_serves(&mut brokers).await;
    // Read after all, they are all there in order.
    for i in 0..1000u64 {
        assert_eq!(stream.message().await.correlation().0, i);
    }
}
