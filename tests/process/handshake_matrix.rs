//! Who is let in on the internal port: every certificate with every protocol, and behind a good handshake
//! every version with every first frame and name. The expected end of each combination is computed from
//! the rules, not listed.

use std::sync::Arc;

use felix_uring::ids::CorrelationId;
use felix_uring::tls::{DevCa, IssueRequest, CLIENT_ALPN, INTERNAL_ALPN};
use felix_uring::wire::internal::{ErrorCode, Kind, Message};
use time::{Duration as Span, OffsetDateTime};

use crate::support::brokers::{Brokers, FIRST};
use crate::support::dialler::{forward, frame, hello, raw_frame, shard, PeerClient, PeerStream};
use crate::support::transport::Identity;
use crate::support::{within, SOON};

const MAGIC: &[u8; 4] = b"FLXI";

/// What the dialler shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cert {
    Own,
    None,
    ForeignCa,
    Expired,
    NotYetValid,
    /// Valid, of another node.
    OtherNode,
    /// Valid, its only name a wildcard that would match.
    Wildcard,
}

impl Cert {
    const ALL: [Self; 7] = [
        Self::Own,
        Self::None,
        Self::ForeignCa,
        Self::Expired,
        Self::NotYetValid,
        Self::OtherNode,
        Self::Wildcard,
    ];

    fn is_let_in(self) -> bool {
        matches!(self, Self::Own | Self::OtherNode | Self::Wildcard)
    }
}

/// What the dialler sends first on its first stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum First {
    Hello,
    HelloUndecodable,
    Forward,
    CacheOp,
    Records,
    Unknown,
    UnknownTooShort,
    Answer,
    ForeignMagic,
    TooLong,
}

impl First {
    const ALL: [Self; 10] = [
        Self::Hello,
        Self::HelloUndecodable,
        Self::Forward,
        Self::CacheOp,
        Self::Records,
        Self::Unknown,
        Self::UnknownTooShort,
        Self::Answer,
        Self::ForeignMagic,
        Self::TooLong,
    ];

    fn bytes(self, version: u16, name: &str) -> Vec<u8> {
        let relabelled = |bytes: &[u8]| {
            let mut bytes = bytes.to_vec();
            bytes[4..6].copy_from_slice(&version.to_be_bytes());
            bytes
        };
        let raw = |kind, body: &[u8]| raw_frame(MAGIC, version, kind, body.len() as u32, body);
        match self {
            Self::Hello => relabelled(&hello(7, name)),
            Self::HelloUndecodable => raw(5, &[0, 0, 0, 0, 0, 0, 0, 7, 0, 200, 1]),
            Self::Forward => relabelled(&frame(&forward(7, shard(FIRST, 1), Some("x")))),
            Self::CacheOp => raw(23, &[7; 40]),
            Self::Records => raw(7, &[7; 40]),
            Self::Unknown => raw(27, &[0, 0, 0, 0, 0, 0, 0, 7, 1, 2, 3]),
            Self::UnknownTooShort => raw(27, &[1, 2, 3]),
            Self::Answer => raw(2, &[0; 24]),
            Self::ForeignMagic => {
                let mut bytes = relabelled(&hello(7, name));
                bytes[..4].copy_from_slice(b"FLX1");
                bytes
            }
            Self::TooLong => raw_frame(MAGIC, version, 5, (64 << 20) + 1, &[0; 16]),
        }
    }
}

/// How it ends.
#[derive(Debug, Clone, PartialEq, Eq)]
enum End {
    /// The TLS handshake fails.
    NotLetIn,
    /// Closed without a frame.
    Closed,
    /// Greeted.
    Greeted,
    /// Refused with a code; whether the connection goes on.
    Refused { code: ErrorCode, goes_on: bool },
    /// Nothing is answered and a greeting after it is.
    Ignored,
}

fn expected(cert: Cert, alpn: Option<&[u8]>, version: u16, first: First, name: &str) -> End {
    if !cert.is_let_in() || alpn != Some(INTERNAL_ALPN) {
        return End::NotLetIn;
    }
    let refused = |code, goes_on| End::Refused { code, goes_on };
    match first {
        First::ForeignMagic | First::TooLong => End::Closed,
        _ if version != 1 => End::Closed,
        First::UnknownTooShort => End::Closed,
        First::Forward | First::CacheOp | First::Records => End::Closed,
        First::Unknown => refused(ErrorCode::UnsupportedKind, true),
        First::HelloUndecodable => refused(ErrorCode::Malformed, true),
        First::Answer => End::Ignored,
        First::Hello if name.is_empty() => refused(ErrorCode::Malformed, true),
        First::Hello if cert == Cert::Own && name == "node-2" => End::Greeted,
        First::Hello if cert == Cert::OtherNode && name == "node-3" => End::Greeted,
        First::Hello => refused(ErrorCode::Unauthorized, false),
    }
}

struct Bundle {
    brokers: Brokers,
    identities: Vec<(Cert, Option<Identity>)>,
}

impl Bundle {
    fn new() -> Self {
        let mut brokers = Brokers::prepare_with(3, |_| {});
        brokers.start_node(0);
        let read = |path: std::path::PathBuf| std::fs::read_to_string(path).expect("a file");
        let ca = DevCa::from_pem(
            &read(brokers.cluster.ca().to_path_buf()),
            &read(brokers.cluster.dir().join("ca-key.pem")),
        )
        .expect("the authority");
        let foreign = DevCa::generate("another authority").expect("an authority");
        let now = OffsetDateTime::now_utc();
        let request = |name: &str| IssueRequest::for_broker(&[name.to_string()], 30);
        let issue = |ca: &DevCa, request: &IssueRequest| {
            let issued = ca.issue(request).expect("a certificate");
            Identity {
                cert_pem: issued.cert_pem,
                key_pem: issued.key_pem,
            }
        };
        let between = |from: Span, to: Span| IssueRequest {
            not_before: now + from,
            not_after: now + to,
            ..request("node-2")
        };
        let days = Span::days;
        let identities = Cert::ALL
            .map(|cert| {
                let identity = match cert {
                    Cert::Own => Some(brokers.peer_identity(1)),
                    Cert::None => None,
                    Cert::ForeignCa => Some(issue(&foreign, &request("node-2"))),
                    Cert::Expired => Some(issue(&ca, &between(days(-30), days(-1)))),
                    Cert::NotYetValid => Some(issue(&ca, &between(days(1), days(30)))),
                    Cert::OtherNode => Some(brokers.peer_identity(2)),
                    Cert::Wildcard => Some(issue(&ca, &request("*.felix"))),
                };
                (cert, identity)
            })
            .into();
        Self {
            brokers,
            identities,
        }
    }

    async fn dial(&self, cert: Cert, alpn: Option<&[u8]>) -> Option<PeerClient> {
        let (_, identity) = self
            .identities
            .iter()
            .find(|(of, _)| *of == cert)
            .expect("every certificate was made");
        PeerClient::dial(&self.brokers, 0, identity.as_ref(), alpn)
            .await
            .ok()
    }

    async fn end_of(
        &self,
        cert: Cert,
        alpn: Option<&[u8]>,
        version: u16,
        first: First,
        name: &str,
    ) -> End {
        let Some(peer) = self.dial(cert, alpn).await else {
            return End::NotLetIn;
        };
        // A refused certificate of a dialler shows only now: its own side of TLS is done before.
        let Ok((send, recv)) = peer.conn.open_bi().await else {
            return End::NotLetIn;
        };
        let mut stream = PeerStream::of(send, recv);
        stream.send(first.bytes(version, name)).await;
        // A frame after it, so that one that is stepped over shows.
        let own = match cert {
            Cert::OtherNode => "node-3",
            _ => "node-2",
        };
        stream.send(hello(8, own)).await;
        match stream.next().await {
            Err(_) => {
                let closed = within(SOON, "the close", peer.conn.closed()).await;
                match closed {
                    quinn::ConnectionError::ConnectionClosed(_) => End::NotLetIn,
                    _ => End::Closed,
                }
            }
            Ok(Message::HelloOk(ok)) if ok.correlation == CorrelationId(7) => End::Greeted,
            Ok(Message::HelloOk(_)) => End::Ignored,
            // Nothing was said to the first frame; the name a wildcard cannot carry is refused.
            Ok(answer) if answer.correlation() == CorrelationId(8) => End::Ignored,
            Ok(answer) => {
                assert_eq!(answer.correlation(), CorrelationId(7));
                assert_eq!(answer.kind(), Kind::ForwardPublishError);
                let code = answer.error_code().expect("a refusal");
                // Behind a refusal that goes on, the plain greeting is served; a wildcard names nobody.
                let goes_on = match stream.next().await {
                    Ok(Message::HelloOk(ok)) => ok.correlation == CorrelationId(8),
                    Ok(other) => cert == Cert::Wildcard && other.error_code().is_some(),
                    Err(_) => false,
                };
                End::Refused { code, goes_on }
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_combination_ends_as_the_rules_say() {
    let bundle = Arc::new(Bundle::new());
    let mut combinations = Vec::new();
    for cert in Cert::ALL {
        for alpn in [Some(INTERNAL_ALPN), Some(CLIENT_ALPN), Some(b"h3"), None] {
            let let_in = cert.is_let_in() && alpn == Some(INTERNAL_ALPN);
            for version in [1u16, 0, 2, u16::MAX] {
                for first in First::ALL {
                    for name in ["node-2", "node-3", ""] {
                        // Without a handshake nothing behind it is seen: one stands for all.
                        let stands = (version, first, name) == (1, First::Hello, "node-2");
                        // Only Hello carries the name.
                        let named = name == "node-2" || first == First::Hello;
                        if stands || (let_in && named) {
                            combinations.push((cert, alpn, version, first, name));
                        }
                    }
                }
            }
        }
    }
    assert!(combinations.len() > 150, "{}", combinations.len());
    let mut running = tokio::task::JoinSet::new();
    for (cert, alpn, version, first, name) in combinations {
        if running.len() >= 8 {
            running
                .join_next()
                .await
                .expect("some run")
                .expect("one ends well");
        }
        let bundle = bundle.clone();
        running.spawn(async move {
            let end = bundle.end_of(cert, alpn, version, first, name).await;
            let expected = expected(cert, alpn, version, first, name);
            assert_eq!(
                end, expected,
                "{cert:?}, {alpn:?}, version {version}, {first:?} as {name:?}"
            );
        });
    }
    while let Some(ended) = running.join_next().await {
        ended.expect("one ends well");
    }
    let reason = |name: &str| format!("felix_handshakes_failed_total{{reason=\"{name}\"}}");
    bundle.brokers.wait_metric(0, &reason("peer_tls"), 20.0);
    let names = reason("hello_name_not_in_certificate");
    bundle.brokers.wait_metric(0, &names, 3.0);
}
