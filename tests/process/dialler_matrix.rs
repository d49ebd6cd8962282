//! Whom a broker takes for the peer it dials: every certificate with every protocol, and behind a good handshake
//! every version and every first answer. The expected end of each combination is computed from the rules,
//! not listed. Each has a node of its own in the catalog, played by the test, so that all run at once
//! against one broker; and whatever it answers, nothing but the greeting is sent before it is right.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Instant;

use felix_uring::cluster::ShardedSpec;
use felix_uring::ids::{CorrelationId, Generation, Offset};
use felix_uring::tls::{DevCa, IssueRequest, CLIENT_ALPN, INTERNAL_ALPN};
use felix_uring::wire::client::{PublishOutcome, RetryClass};
use felix_uring::wire::internal::{
    decode_body, ErrorCode, FrameReader, Hello, Message, NotLeader, ReadEvent, Refusal, Text,
};
use time::{Duration as Span, OffsetDateTime};

use crate::support::brokers::Brokers;
use crate::support::client::Client;
use crate::support::dialler::{frame, hello, raw_frame};
use crate::support::transport::{listen, Identity};
use crate::support::SOON;

const MAGIC: &[u8; 4] = b"FLXI";
/// The correlation id a greeting has.
const GREETING: CorrelationId = CorrelationId(0);

/// What the listener shows, and whom it trusts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cert {
    Own,
    /// Its own name beside another.
    TwoNames,
    ForeignCa,
    Expired,
    NotYetValid,
    OtherNode,
    /// Its own, and it trusts another authority than the broker's.
    TrustsOthers,
}

impl Cert {
    const ALL: [Self; 7] = [
        Self::Own,
        Self::TwoNames,
        Self::ForeignCa,
        Self::Expired,
        Self::NotYetValid,
        Self::OtherNode,
        Self::TrustsOthers,
    ];
}

/// What the listener does when it is greeted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reply {
    Ok,
    /// The same, a byte at a time.
    OkInPieces,
    /// An answer to something else first, as a late one would be.
    OkBehindStray,
    OtherName,
    NoName,
    OtherCorrelation,
    RefusedAsPublish,
    RefusedAsCacheOp,
    RefusedAsRecords,
    PublishOk,
    Redirect,
    UnknownKind,
    UnknownCode,
    Request,
    ForeignMagic,
    TooLong,
    Torn,
    Nothing,
    Finish,
    Reset,
    Stop,
    Close,
}

impl Reply {
    const ALL: [Self; 22] = [
        Self::Ok,
        Self::OkInPieces,
        Self::OkBehindStray,
        Self::OtherName,
        Self::NoName,
        Self::OtherCorrelation,
        Self::RefusedAsPublish,
        Self::RefusedAsCacheOp,
        Self::RefusedAsRecords,
        Self::PublishOk,
        Self::Redirect,
        Self::UnknownKind,
        Self::UnknownCode,
        Self::Request,
        Self::ForeignMagic,
        Self::TooLong,
        Self::Torn,
        Self::Nothing,
        Self::Finish,
        Self::Reset,
        Self::Stop,
        Self::Close,
    ];

    fn is_right(self) -> bool {
        matches!(self, Self::Ok | Self::OkInPieces | Self::OkBehindStray)
    }

    /// The bytes of the answer, for a listener called `name`.
    fn bytes(self, version: u16, name: &str) -> Vec<u8> {
        let ok = |correlation, name: &str| {
            frame(&Message::HelloOk(Hello {
                correlation,
                node_id: Text::shortened(name),
            }))
            .to_vec()
        };
        let refusal = || Refusal {
            correlation: GREETING,
            code: ErrorCode::Unauthorized,
            detail: Text::shortened("scripted"),
        };
        let raw = |kind, body: &[u8]| raw_frame(MAGIC, 1, kind, body.len() as u32, body);
        let mut bytes = match self {
            Self::Ok | Self::OkInPieces => ok(GREETING, name),
            Self::OkBehindStray => [ok(CorrelationId(9), "node-1"), ok(GREETING, name)].concat(),
            Self::OtherName => ok(GREETING, "node-1"),
            Self::NoName => ok(GREETING, ""),
            Self::OtherCorrelation => ok(CorrelationId(1), name),
            Self::RefusedAsPublish => frame(&Message::ForwardPublishError(refusal())).to_vec(),
            Self::RefusedAsCacheOp => frame(&Message::CacheError(refusal())).to_vec(),
            Self::RefusedAsRecords => raw(9, &refused_records()),
            Self::PublishOk => frame(&stored(GREETING, 1)).to_vec(),
            Self::Redirect => frame(&Message::NotLeader(NotLeader {
                correlation: GREETING,
                node_id: Text::shortened("node-1"),
                advertise_addr: Text::shortened("127.0.0.1:1"),
                generation: Generation(1),
            }))
            .to_vec(),
            Self::UnknownKind => raw(60, &[0; 8]),
            Self::UnknownCode => raw(3, &[0, 0, 0, 0, 0, 0, 0, 0, 0, 77, 0, 0, 0, 0]),
            Self::Request => hello(0, name).to_vec(),
            Self::ForeignMagic => {
                let mut bytes = ok(GREETING, name);
                bytes[..4].copy_from_slice(b"FLX1");
                bytes
            }
            Self::TooLong => raw_frame(MAGIC, 1, 6, (64 << 20) + 1, &[0; 16]),
            Self::Torn => ok(GREETING, name)[..15].to_vec(),
            Self::Nothing | Self::Finish | Self::Reset | Self::Stop | Self::Close => Vec::new(),
        };
        if bytes.len() > 6 {
            bytes[4..6].copy_from_slice(&version.to_be_bytes());
        }
        bytes
    }
}

/// `Unauthorized` in the shape of a refused batch of records.
fn refused_records() -> Vec<u8> {
    let shaped = felix_uring::wire::internal::refusal(
        felix_uring::wire::internal::Kind::ReplicateRecords,
        GREETING,
        felix_uring::proto::outcome::PeerCode::Unauthorized,
        Offset(0),
        "scripted",
    );
    frame(&shaped)[12..].to_vec()
}

fn stored(correlation: CorrelationId, count: u64) -> Message {
    Message::ForwardPublishOk {
        correlation,
        first_offset: Offset(0),
        last_offset: Offset(count - 1),
    }
}

/// One listener.
#[derive(Debug, Clone, Copy)]
struct Combination {
    cert: Cert,
    alpn: Option<&'static [u8]>,
    version: u16,
    reply: Reply,
}

impl Combination {
    fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for cert in Cert::ALL {
            for alpn in [Some(INTERNAL_ALPN), Some(CLIENT_ALPN), Some(b"h3"), None] {
                for version in [1u16, 0, 2, u16::MAX] {
                    for reply in Reply::ALL {
                        // Without a handshake nothing behind it is seen, and a frame of another version
                        // is not looked into: one stands for all.
                        let stands = (version, reply) == (1, Reply::Ok);
                        let let_in = cert == Cert::Own && alpn == Some(INTERNAL_ALPN);
                        let seen = version == 1 || reply == Reply::Ok || reply == Reply::Request;
                        if stands || (let_in && seen) {
                            all.push(Self {
                                cert,
                                alpn,
                                version,
                                reply,
                            });
                        }
                    }
                }
            }
        }
        all
    }

    /// How `/status` begins to say why the link is not up; `None` when it is.
    fn expected(self) -> Option<&'static str> {
        if self.alpn != Some(INTERNAL_ALPN) {
            return Some("no_common_protocol: ");
        }
        match self.cert {
            Cert::Own | Cert::TwoNames => {}
            Cert::TrustsOthers => return Some("certificate_refused: "),
            Cert::ForeignCa | Cert::Expired | Cert::NotYetValid | Cert::OtherNode => {
                return Some("peer_certificate_invalid: ")
            }
        }
        match self.reply {
            Reply::Torn | Reply::Nothing => Some("timed_out: "),
            Reply::Close => Some("closed: "),
            Reply::Finish | Reply::Reset | Reply::Stop => Some("protocol_violation: "),
            _ if self.version != 1 => Some("protocol_violation: "),
            reply if reply.is_right() => None,
            Reply::OtherName | Reply::NoName => Some("wrong_node: "),
            Reply::OtherCorrelation => Some("timed_out: "),
            Reply::RefusedAsPublish | Reply::RefusedAsCacheOp | Reply::RefusedAsRecords => {
                Some("hello_refused: ")
            }
            _ => Some("protocol_violation: "),
        }
    }
}

/// Certificates for any node.
struct Authorities {
    ca: DevCa,
    foreign: DevCa,
    ca_path: PathBuf,
    foreign_path: PathBuf,
}

impl Authorities {
    fn of(brokers: &Brokers) -> Self {
        let read = |path: &Path| std::fs::read_to_string(path).expect("a file");
        let (ca_path, key) = (
            brokers.cluster.ca(),
            brokers.cluster.dir().join("ca-key.pem"),
        );
        let ca = DevCa::from_pem(&read(ca_path), &read(&key)).expect("the authority");
        let foreign = DevCa::generate("another authority").expect("an authority");
        let foreign_path = brokers.cluster.dir().join("another-ca.pem");
        std::fs::write(&foreign_path, foreign.cert_pem()).expect("a file");
        Self {
            ca,
            foreign,
            ca_path: ca_path.to_path_buf(),
            foreign_path,
        }
    }

    fn issue(&self, cert: Cert, node: &str) -> (Identity, &Path) {
        let now = OffsetDateTime::now_utc();
        let names: &[&str] = match cert {
            Cert::OtherNode => &["node-1"],
            Cert::TwoNames => &["node-1", node],
            _ => &[node],
        };
        let names: Vec<String> = names.iter().map(|name| name.to_string()).collect();
        let request = IssueRequest::for_broker(&names, 30);
        let (not_before, not_after) = match cert {
            Cert::Expired => (now - Span::days(30), now - Span::days(1)),
            Cert::NotYetValid => (now + Span::days(1), now + Span::days(30)),
            _ => (request.not_before, request.not_after),
        };
        let request = IssueRequest {
            not_before,
            not_after,
            ..request
        };
        let ca = match cert {
            Cert::ForeignCa => &self.foreign,
            _ => &self.ca,
        };
        let issued = ca.issue(&request).expect("a certificate");
        let trusts = match cert {
            Cert::TrustsOthers => &self.foreign_path,
            _ => &self.ca_path,
        };
        let identity = Identity {
            cert_pem: issued.cert_pem,
            key_pem: issued.key_pem,
        };
        (identity, trusts)
    }
}

/// Plays one node for ever; counts frames that should not have been sent.
async fn play(endpoint: quinn::Endpoint, plays: Combination, name: String, early: Arc<AtomicU64>) {
    while let Some(incoming) = endpoint.accept().await {
        let (name, early) = (name.clone(), early.clone());
        tokio::spawn(async move {
            let Ok(conn) = incoming.await else { return };
            while let Ok((send, recv)) = conn.accept_bi().await {
                let (conn, name, early) = (conn.clone(), name.clone(), early.clone());
                tokio::spawn(async move { serve(conn, send, recv, plays, &name, &early).await });
            }
        });
    }
}

async fn serve(
    conn: quinn::Connection,
    mut send: quinn::SendStream,
    mut recv: quinn::RecvStream,
    plays: Combination,
    name: &str,
    early: &AtomicU64,
) {
    let mut reader = FrameReader::new();
    while let Ok(Some(chunk)) = recv.read_chunk(1 << 20, true).await {
        reader.push(chunk.bytes);
        let frames: Vec<ReadEvent> = reader.by_ref().collect();
        for event in frames {
            let ReadEvent::Frame { kind, body } = event else {
                panic!("the broker sent {event:?}");
            };
            // Whatever becomes of the connection is for the test to see.
            match decode_body(kind, body).expect("a readable request") {
                Message::Hello(greeting) => {
                    assert_eq!(greeting.correlation, GREETING);
                    assert_eq!(greeting.node_id.as_str(), "node-1");
                    let bytes = plays.reply.bytes(plays.version, name);
                    let piece = match plays.reply {
                        Reply::OkInPieces => 1,
                        _ => bytes.len().max(1),
                    };
                    for piece in bytes.chunks(piece) {
                        let _ = send.write_all(piece).await;
                        tokio::task::yield_now().await;
                    }
                    match plays.reply {
                        Reply::Finish => drop(send.finish()),
                        Reply::Reset => drop(send.reset(5u32.into())),
                        Reply::Stop => drop(recv.stop(5u32.into())),
                        Reply::Close => conn.close(5u32.into(), b"scripted"),
                        _ => {}
                    }
                }
                Message::ForwardPublish(publish) => {
                    if plays.expected().is_some() {
                        early.fetch_add(1, Ordering::Relaxed);
                    }
                    let answer = stored(publish.correlation, publish.payloads.len() as u64);
                    let _ = send.write_all(&frame(&answer)).await;
                }
                other => panic!("unexpected request {other:?}"),
            }
        }
    }
}

/// What `/status` says of a peer: its state and its last error.
fn peer_of(brokers: &Brokers, node: &str) -> (String, String) {
    let status = brokers.cluster.node(0).status();
    let status = status.unwrap_or_else(|e| panic!("{e}"));
    let peers = status["peers"].as_array().cloned().unwrap_or_default();
    let found = peers.into_iter().find(|peer| peer["node_id"] == node);
    let found = found.unwrap_or_default();
    let text = |key: &str| found[key].as_str().unwrap_or_default().to_string();
    (text("state"), text("last_error"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_listener_is_taken_or_refused_as_the_rules_say() {
    let combinations = Combination::all();
    assert!(combinations.len() > 50, "{}", combinations.len());
    let streams = |nth: usize| format!("of-{nth}");
    let mut brokers = Brokers::prepare_with(combinations.len() + 1, |spec| {
        // Those that never answer are given up soon.
        spec.extra_args
            .push("--peer-connect-timeout-ms=1500".into());
        spec.streams = (0..combinations.len())
            .map(|nth| ShardedSpec::new(&streams(nth), 1).led_by(&[nth + 1]))
            .collect();
    });
    let authorities = Authorities::of(&brokers);
    let early = Arc::new(AtomicU64::new(0));
    for (nth, plays) in combinations.iter().enumerate() {
        let node = brokers.cluster.node(nth + 1);
        let (identity, trusts) = authorities.issue(plays.cert, node.node_id());
        let endpoint = listen(node.internal_addr(), &identity, trusts, plays.alpn);
        let name = node.node_id().to_string();
        tokio::spawn(play(endpoint, *plays, name, early.clone()));
    }
    brokers.start_node(0);
    let token = brokers.token();
    let client = Arc::new(Client::connect(&brokers, 0).await);

    // All at once; each combination has its own link.
    let mut asked = tokio::task::JoinSet::new();
    for (nth, plays) in combinations.iter().copied().enumerate() {
        let (client, token, stream) = (client.clone(), token.clone(), streams(nth));
        asked.spawn(async move {
            let outcome = client.stream(&token).await.publish(&stream, b"x").await;
            match (plays.expected(), outcome) {
                (None, PublishOutcome::Accepted { .. }) => {}
                // Surely nothing was sent, whatever went wrong.
                (Some(_), PublishOutcome::Failed(refusal)) => {
                    assert_eq!(
                        refusal.class(),
                        Some(RetryClass::Retry),
                        "{plays:?}: {refusal:?}"
                    );
                }
                (expected, outcome) => panic!("{plays:?}: {outcome:?}, not {expected:?}"),
            }
        });
    }
    while let Some(ended) = asked.join_next().await {
        ended.expect("one ends well");
    }
    let deadline = Instant::now() + SOON;
    for (nth, plays) in combinations.iter().enumerate() {
        let node = format!("node-{}", nth + 2);
        loop {
            let (state, error) = peer_of(&brokers, &node);
            let is_expected = match plays.expected() {
                None => state == "up" && error.is_empty(),
                Some(why) => state != "up" && error.starts_with(why),
            };
            if is_expected {
                break;
            }
            assert!(
                Instant::now() < deadline,
                "{plays:?}: {state}, {error:?}, not {:?}",
                plays.expected()
            );
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
    }
    assert_eq!(early.load(Ordering::Relaxed), 0, "sent before the greeting");
    brokers.assert_alive(0);
    // Nothing but the right ones is up, and each kind of failure was counted.
    let up = combinations.iter().filter(|c| c.expected().is_none());
    assert_eq!(up.count(), 4);
    for reason in [
        "peer_tls",
        "hello_wrong_node",
        "hello_refused",
        "peer_timeout",
    ] {
        let name = format!("felix_handshakes_failed_total{{reason=\"{reason}\"}}");
        brokers.wait_metric(0, &name, 1.0);
    }
}
