//! Bad bytes on the client port: a typed answer or the end of that stream, a counter, and a
//! broker that goes on serving.

use felix_uring::cluster::{NAMESPACE, TENANT};
use felix_uring::wire::client::{Answer, RetryClass, ToClient};

use crate::support::brokers::{Brokers, FIRST};
use crate::support::client::{auth, code_and_class, publish_frame, refusal, Client, End};
use crate::support::{within, SOON};

fn frame(magic: &[u8; 4], version: u16, flags: u16, length: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = magic.to_vec();
    bytes.extend(version.to_be_bytes());
    bytes.extend(flags.to_be_bytes());
    bytes.extend(length.to_be_bytes());
    bytes.extend(body);
    bytes
}

fn json(text: &str) -> Vec<u8> {
    frame(b"FLX1", 1, 0, text.len() as u32, text.as_bytes())
}

async fn assert_serves(brokers: &mut Brokers) {
    let token = brokers.token();
    let client = Client::connect(brokers, 0).await;
    client.stream(&token).await.must_publish(FIRST, b"ok").await;
    brokers.assert_alive(0);
    assert_eq!(brokers.metric(0, "felix_internal_faults_total"), 0.0);
}

fn error_code(frames: &[ToClient]) -> Option<String> {
    frames.iter().find_map(|frame| match frame {
        ToClient::Answer(Answer::ErrorAnswer(error)) => {
            Some(error.code.as_ref()?.name().to_string())
        }
        _ => None,
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_that_cannot_be_read_end_their_stream_only() {
    let mut brokers = Brokers::start(1);
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut bystander = client.stream(&token).await;
    let big = (64 << 20) + 1;
    let cases: [(&str, Vec<u8>, &str); 7] = [
        ("magic", frame(b"FLXI", 1, 0, 2, b"{}"), "client_magic"),
        (
            "garbage",
            b"\xff\xfe\xfd this is no frame".to_vec(),
            "client_magic",
        ),
        ("version", frame(b"FLX1", 9, 0, 2, b"{}"), "client_version"),
        ("flag", frame(b"FLX1", 1, 0x8000, 2, b"{}"), "client_flags"),
        (
            "modifier alone",
            frame(b"FLX1", 1, 0x0008, 9, &[0; 9]),
            "client_flags",
        ),
        (
            "length",
            frame(b"FLX1", 1, 1, big, b"x"),
            "client_too_large",
        ),
        ("JSON", json("{\"type\":"), "client_json"),
    ];
    for (what, bytes, reason) in cases {
        let name = format!("felix_frames_refused_total{{reason=\"{reason}\"}}");
        let before = brokers.metric(0, &name);
        let mut stream = client.stream(&token).await;
        stream.send(&bytes).await;
        let (frames, end) = stream.answers.read_to_end().await;
        assert_eq!(
            error_code(&frames).as_deref(),
            Some("invalid_request"),
            "{what}: {frames:?}"
        );
        assert_eq!(end, End::Finished, "{what}");
        brokers.wait_metric(0, &name, before + 1.0);
        bystander.must_publish(FIRST, b"still here").await;
    }
    // An end inside a frame.
    let mut stream = client.stream(&token).await;
    let whole = publish_frame(1, FIRST, &[b"cut"]);
    stream.send(&whole[..whole.len() - 2]).await;
    stream.send.finish().expect("an open stream");
    let (frames, _) = stream.answers.read_to_end().await;
    assert!(
        !frames.iter().any(|f| matches!(f, ToClient::Ack(_))),
        "{frames:?}"
    );
    brokers.wait_metric(
        0,
        "felix_frames_refused_total{reason=\"client_truncated\"}",
        1.0,
    );
    bystander.must_publish(FIRST, b"still here").await;
    assert_serves(&mut brokers).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_publish_that_cannot_be_taken_is_answered_by_its_id() {
    // Segments that hold the largest record.
    let mut brokers = Brokers::start_with(1, |spec| {
        spec.extra_args.push("--segment-bytes=33554432".into());
    });
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.stream(&token).await;

    // A body cut after its request id, an ack mode that is none, a count nothing holds.
    let whole = publish_frame(41, FIRST, &[b"payload"]);
    let mut bad_ack = whole.to_vec();
    bad_ack[12 + 8] = 9;
    let mut bad_count = whole.to_vec();
    let count_at = bad_count.len() - 4 - b"payload".len() - 4;
    bad_count[count_at..count_at + 4].copy_from_slice(&u32::MAX.to_be_bytes());
    let cut = frame(b"FLX1", 1, 0x0009, 12, &whole[12..24]);
    for bytes in [cut, bad_ack, bad_count] {
        stream.send(&bytes).await;
        let ack = stream.answers.ack().await;
        assert_eq!(ack.request_id, 41);
        let said = refusal(ack.outcome);
        assert_eq!(said, ("invalid_request".to_string(), RetryClass::Fatal));
    }

    // Over the frame limit: read to its end, answered, and the stream goes on.
    let over = (16u32 << 20) + 1;
    let mut oversize = frame(b"FLX1", 1, 0x0009, over, &77u64.to_be_bytes());
    oversize.resize(12 + over as usize, 0);
    stream.send(&oversize).await;
    let ack = stream.answers.ack().await;
    assert_eq!(ack.request_id, 77);
    assert_eq!(refusal(ack.outcome).0, "limit_exceeded");

    // One record over the record limit.
    let big = vec![7u8; (11 << 20) + 1];
    assert_eq!(
        refusal(stream.publish(FIRST, &big).await).0,
        "limit_exceeded"
    );
    // The largest that is allowed comes back whole.
    let largest = vec![8u8; 11 << 20];
    let offset = stream.must_publish(FIRST, &largest).await;
    let start = felix_uring::wire::client::messages::StartAt::Offset(offset);
    let mut token = brokers.token();
    let mut events = client.subscribe(&token, FIRST, start).await;
    let read = events.take(1).await;
    assert_eq!(read[0].0, offset);
    assert!(read[0].1 == largest, "the record has changed");

    // No such stream; a permission that is not held.
    assert_eq!(
        refusal(stream.publish("nowhere", b"x").await).0,
        "not_found"
    );
    token = brokers.token_of(|claims| {
        claims.perms = vec![format!("stream.publish:stream:{TENANT}/{NAMESPACE}/other")];
    });
    let mut narrow = client.stream(&token).await;
    assert_eq!(refusal(narrow.publish(FIRST, b"x").await).0, "forbidden");
    assert_serves(&mut brokers).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_are_told_so_and_nothing_more() {
    let mut brokers = Brokers::start(1);
    let good = brokers.token();
    let other_tenant = brokers.token_of(|claims| {
        claims.tenant = "t2".into();
        claims.perms = Vec::new();
    });
    let expired = brokers.token_of(|claims| {
        claims.iat -= 7200;
        claims.exp = claims.iat + 60;
    });
    let not_yet = brokers.token_of(|claims| claims.nbf = Some(claims.iat + 3600));
    let foreign_key = {
        let key = felix_uring::auth::SigningKey::generate().expect("a key");
        let request = felix_uring::auth::MintRequest {
            tenant: TENANT.into(),
            sub: "stranger".into(),
            iat: 0,
            exp: 4_000_000_000,
            nbf: None,
            kid: Some("k1".into()),
            perms: vec!["stream.publish:*".into()],
        };
        felix_uring::auth::mint(&request, &key).expect("a token")
    };
    let mut flipped = good.clone().into_bytes();
    let middle = flipped.len() / 2;
    flipped[middle] = if flipped[middle] == b'A' { b'B' } else { b'A' };
    let flipped = String::from_utf8(flipped).expect("ASCII");
    let client = Client::connect(&brokers, 0).await;
    // One good stream keeps the connection.
    let mut bystander = client.stream(&good).await;
    for (what, tenant, token) in [
        ("another tenant's token", TENANT, other_tenant.as_str()),
        ("a token for another tenant", "t2", good.as_str()),
        ("an unknown tenant", "t2", other_tenant.as_str()),
        ("expired", TENANT, expired.as_str()),
        ("not yet valid", TENANT, not_yet.as_str()),
        ("a foreign key", TENANT, foreign_key.as_str()),
        ("a flipped bit", TENANT, flipped.as_str()),
        ("nothing", TENANT, ""),
        ("no token at all", TENANT, "x.y.z"),
    ] {
        let mut stream = client.open().await;
        stream.send(auth(tenant, token)).await;
        let (frames, end) = stream.answers.read_to_end().await;
        let code = error_code(&frames);
        assert_eq!(
            code.as_deref(),
            Some("unauthenticated"),
            "{what}: {frames:?}"
        );
        assert_eq!(end, End::Finished, "{what}");
        bystander.must_publish(FIRST, b"still here").await;
    }
    brokers.wait_metric(0, "felix_auth_refused_total", 9.0);

    // A publish before `auth`, an oversized frame before `auth`.
    for bytes in [
        publish_frame(1, FIRST, &[b"x"]).to_vec(),
        frame(b"FLX1", 1, 0, (64 << 10) + 1, b"{"),
    ] {
        let mut stream = client.open().await;
        stream.send(&bytes).await;
        let (frames, _) = stream.answers.read_to_end().await;
        let accepted = frames
            .iter()
            .any(|f| matches!(f, ToClient::Ack(ack) if refused_ack(ack).is_none()));
        assert!(!accepted, "{frames:?}");
    }
    // A second `auth`.
    let mut stream = client.stream(&good).await;
    stream.send(auth(TENANT, &good)).await;
    match stream.answers.answer().await {
        Answer::ErrorAnswer(error) => {
            let code = error.code.map(|code| code.name().to_string());
            assert_eq!(code.as_deref(), Some("invalid_request"));
        }
        other => panic!("{other:?}"),
    }
    bystander.must_publish(FIRST, b"still here").await;
    assert_serves(&mut brokers).await;
}

fn refused_ack(ack: &felix_uring::wire::client::PublishAck) -> Option<(String, RetryClass)> {
    match &ack.outcome {
        felix_uring::wire::client::PublishOutcome::Failed(refusal) => Some(code_and_class(refusal)),
        felix_uring::wire::client::PublishOutcome::Accepted { .. } => None,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn handshakes_that_fail_harm_nobody() {
    let mut brokers = Brokers::start_with(1, |spec| {
        spec.extra_args.push("--auth-timeout-ms=1000".into());
    });
    let addr = brokers.cluster.node(0).client_addr();
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut bystander = client.stream(&token).await;
    let refused = Client::dial(addr, brokers.cluster.ca(), Some(b"h3")).await;
    assert!(refused.is_err(), "another protocol was accepted");
    brokers.wait_metric(
        0,
        "felix_handshakes_failed_total{reason=\"client_alpn\"}",
        1.0,
    );
    // Without any protocol a client is welcome.
    let plain = Client::dial(addr, brokers.cluster.ca(), None).await;
    let plain = plain.unwrap_or_else(|e| panic!("{e}"));
    plain
        .stream(&token)
        .await
        .must_publish(FIRST, b"plain")
        .await;
    // Datagrams that are no QUIC.
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").expect("a socket");
    for length in [0usize, 1, 20, 1200, 9000] {
        let sent = socket.send_to(&vec![0x5A; length], addr);
        sent.expect("loopback takes it");
    }
    // A connection that never authenticates is closed.
    let silent = Client::connect(&brokers, 0).await;
    let closed = within(SOON, "the authentication timeout", silent.conn.closed()).await;
    match closed {
        quinn::ConnectionError::ApplicationClosed(close) => {
            assert_eq!(close.error_code, 1u32.into());
            assert_eq!(&close.reason[..], b"authentication timeout");
        }
        other => panic!("{other}"),
    }
    bystander.must_publish(FIRST, b"still here").await;
    assert_serves(&mut brokers).await;
}

/// A publish frame that asks for no answer.
fn silent_publish(stream: &str, payload: &[u8]) -> Vec<u8> {
    let payloads = felix_uring::wire::client::Payloads::from_slices([payload]).expect("payloads");
    felix_uring::wire::client::PublishBatch {
        ack: None,
        producer: None,
        key: None,
        tenant_id: TENANT.into(),
        namespace: NAMESPACE.into(),
        stream: stream.into(),
        payloads,
    }
    .encode()
    .expect("a frame")
    .to_vec()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_dropped_on_a_stream_without_a_way_back_is_counted_by_reason() {
    let mut brokers = Brokers::start_with(1, |spec| {
        spec.extra_args.push("--segment-bytes=33554432".into());
    });
    let token = brokers.token();
    let dropped = |reason: &str| format!("felix_publishes_dropped_total{{reason=\"{reason}\"}}");
    let client = Client::connect(&brokers, 0).await;
    let mut bystander = client.stream(&token).await;

    // A count nothing holds, a stream that is not there, a record too large; then one that is taken.
    let mut malformed = silent_publish(FIRST, b"payload");
    let count_at = malformed.len() - 4 - b"payload".len() - 4;
    malformed[count_at..count_at + 4].copy_from_slice(&u32::MAX.to_be_bytes());
    let large = silent_publish(FIRST, &vec![7; (11 << 20) + 1]);
    let mut silent = client.conn.open_uni().await.expect("a stream");
    for bytes in [
        auth(TENANT, &token).to_vec(),
        malformed,
        silent_publish("nowhere", b"x"),
        large,
        silent_publish(FIRST, b"taken"),
    ] {
        silent.write_all(&bytes).await.expect("the stream lives");
    }
    brokers.wait_metric(0, "felix_storage_records_total", 1.0);
    for reason in ["malformed", "not_found", "too_large"] {
        brokers.wait_metric(0, &dropped(reason), 1.0);
    }
    assert_eq!(brokers.metric(0, "felix_publishes_dropped_total"), 3.0);
    assert_eq!(brokers.metric(0, "felix_publishes_unacked_total"), 4.0);

    // Anything but a publish ends it, counted as a request that was refused.
    let refused = "felix_client_requests_refused_total{code=\"invalid_request\"}";
    assert_eq!(brokers.metric(0, refused), 0.0);
    let request = json("{\"type\":\"topology\"}");
    silent.write_all(&request).await.expect("the stream lives");
    within(SOON, "the stop", silent.stopped())
        .await
        .expect("the connection lives");
    brokers.wait_metric(0, refused, 1.0);

    // Before anybody said who it is.
    let mut stranger = client.conn.open_uni().await.expect("a stream");
    let publish = silent_publish(FIRST, b"stranger");
    stranger
        .write_all(&publish)
        .await
        .expect("the stream lives");
    brokers.wait_metric(0, &dropped("forbidden"), 1.0);
    assert_eq!(brokers.metric(0, "felix_publishes_dropped_total"), 4.0);

    // A publish that is answered is refused where it can be seen, and counted as that.
    let refused = "felix_publishes_refused_total{code=\"invalid_request\"}";
    let mut bad = publish_frame(41, FIRST, &[b"payload"]).to_vec();
    bad[12 + 8] = 9;
    bystander.send(&bad).await;
    let said = refusal(bystander.answers.ack().await.outcome);
    assert_eq!(said.0, "invalid_request");
    brokers.wait_metric(0, refused, 1.0);
    assert_serves(&mut brokers).await;
}
