//! What the pump tells its caller, and the names it uses for connections and endpoints.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use quinn_proto::{ConnectionError, EcnCodepoint, TransportErrorCode};
use rustls::pki_types::CertificateDer;

pub use quinn_proto::{Side, StreamId};

/// One connection of one pump. Generation-checked: an id that outlived its connection names nothing,
/// and every command on it is a harmless no-op.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnId {
    pub(super) index: u32,
    pub(super) generation: u32,
}

/// One UDP socket of one pump, in the order in which `add_endpoint` was called.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EndpointId(pub(super) u8);

impl EndpointId {
    /// Position in the pump's list of endpoints.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// A datagram that belongs to a connection of another core. Hand it to that core's
/// [`Pump::inject`](super::Pump::inject).
#[derive(Debug)]
pub struct StrayDatagram {
    pub(super) data: BytesMut,
    pub(super) remote: SocketAddr,
    pub(super) local_ip: Option<IpAddr>,
    pub(super) ecn: Option<EcnCodepoint>,
}

impl StrayDatagram {
    /// Bytes of UDP payload.
    pub fn len(&self) -> usize {
        self.data.len()
    }

    /// Whether the payload is empty.
    pub fn is_empty(&self) -> bool {
        self.data.is_empty()
    }

    /// Where the datagram came from.
    pub fn remote(&self) -> SocketAddr {
        self.remote
    }
}

/// Which side refused a TLS handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Refuser {
    /// The peer sent the alert: it does not accept what we presented.
    Peer,
    /// We sent the alert: the peer's hello or certificate is not acceptable to us.
    Us,
}

/// Why a connection ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CloseReason {
    /// The peer's application closed the connection.
    ApplicationClosed {
        /// Application close code.
        code: u64,
        /// Text the peer gave; not trusted.
        reason: Bytes,
    },
    /// [`Pump::close`](super::Pump::close) was called.
    LocallyClosed,
    /// A TLS alert. On a dialled connection it may follow `Connected`: in TLS 1.3 the client finishes
    /// before the server has judged the client's certificate.
    TlsRefused {
        /// TLS alert number (RFC 8446 section 6).
        alert: u8,
        /// Who refused whom.
        by: Refuser,
        /// What the TLS library says about it.
        detail: String,
    },
    /// Nothing was heard for the idle timeout, or the handshake took too long.
    TimedOut,
    /// The peer does not know the connection: it has restarted.
    Reset,
    /// The peer is at its limit of connections, or is not a server.
    Refused,
    /// The peer speaks no QUIC version of ours.
    VersionMismatch,
    /// A violation of the transport protocol.
    TransportError {
        /// Transport error code (RFC 9000 section 20.1).
        code: u64,
        /// Who noticed it.
        by: Refuser,
        /// Description.
        detail: String,
    },
}

impl CloseReason {
    /// A short constant name for counters and logs.
    pub fn name(&self) -> &'static str {
        match self {
            Self::ApplicationClosed { .. } => "application_closed",
            Self::LocallyClosed => "locally_closed",
            Self::TlsRefused { .. } => "tls_refused",
            Self::TimedOut => "timed_out",
            Self::Reset => "reset",
            Self::Refused => "refused",
            Self::VersionMismatch => "version_mismatch",
            Self::TransportError { .. } => "transport_error",
        }
    }
}

impl std::fmt::Display for CloseReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::ApplicationClosed { code, reason } => {
                write!(
                    f,
                    "closed by the peer with code {code}: {}",
                    reason.escape_ascii()
                )
            }
            Self::LocallyClosed => f.write_str("closed by this side"),
            Self::TlsRefused { alert, by, detail } => {
                let who = match by {
                    Refuser::Peer => "the peer refused us",
                    Refuser::Us => "we refused the peer",
                };
                write!(f, "{who} in the TLS handshake (alert {alert}): {detail}")
            }
            Self::TimedOut => f.write_str("nothing heard from the peer within the timeout"),
            Self::Reset => f.write_str("the peer has restarted and no longer knows the connection"),
            Self::Refused => f.write_str("the peer refused the connection attempt"),
            Self::VersionMismatch => f.write_str("no QUIC version in common"),
            Self::TransportError { code, by, detail } => {
                let who = match by {
                    Refuser::Peer => "peer",
                    Refuser::Us => "us",
                };
                write!(
                    f,
                    "transport error {code:#x} noticed by {who}: {}",
                    detail.escape_default()
                )
            }
        }
    }
}

/// The TLS alert inside a QUIC error code, if it is one (RFC 9001 section 4.8).
fn tls_alert(code: TransportErrorCode) -> Option<u8> {
    let code = u64::from(code);
    (0x100..0x200)
        .contains(&code)
        .then_some((code & 0xff) as u8)
}

impl From<ConnectionError> for CloseReason {
    fn from(error: ConnectionError) -> Self {
        let coded = |code: TransportErrorCode, by: Refuser, detail: String| match tls_alert(code) {
            Some(alert) => Self::TlsRefused { alert, by, detail },
            None if by == Refuser::Peer && code == TransportErrorCode::CONNECTION_REFUSED => {
                Self::Refused
            }
            None => Self::TransportError {
                code: code.into(),
                by,
                detail,
            },
        };
        match error {
            ConnectionError::VersionMismatch => Self::VersionMismatch,
            ConnectionError::TransportError(e) => coded(e.code, Refuser::Us, e.reason),
            ConnectionError::ConnectionClosed(close) => coded(
                close.error_code,
                Refuser::Peer,
                String::from_utf8_lossy(&close.reason).into_owned(),
            ),
            ConnectionError::ApplicationClosed(close) => Self::ApplicationClosed {
                code: close.error_code.into_inner(),
                reason: close.reason,
            },
            ConnectionError::Reset => Self::Reset,
            ConnectionError::TimedOut => Self::TimedOut,
            ConnectionError::LocallyClosed => Self::LocallyClosed,
            ConnectionError::CidsExhausted => Self::TransportError {
                code: 0,
                by: Refuser::Us,
                detail: "connection ids exhausted".into(),
            },
        }
    }
}

/// One thing that happened. Events of one connection come in order; `Closed` is its last.
#[derive(Debug)]
pub enum PumpEvent {
    /// The handshake is complete on this side.
    Connected {
        /// The connection.
        conn: ConnId,
        /// The socket it lives on.
        endpoint: EndpointId,
        /// Whether we dialled it (`Client`) or accepted it (`Server`).
        side: Side,
        /// The application protocol that was agreed, if any was offered.
        alpn: Option<Bytes>,
        /// The peer's certificates, leaf first; empty when it presented none.
        peer_certificates: Vec<CertificateDer<'static>>,
        /// The peer's address.
        remote: SocketAddr,
    },
    /// The connection ended before `Connected`.
    HandshakeFailed {
        /// The connection; `None` when the very first packet was refused.
        conn: Option<ConnId>,
        /// The socket.
        endpoint: EndpointId,
        /// Whether we dialled.
        side: Side,
        /// The peer's address.
        remote: SocketAddr,
        /// Why.
        reason: CloseReason,
    },
    /// The peer opened a stream. A `Readable` for it follows.
    StreamOpened {
        /// The connection.
        conn: ConnId,
        /// The stream.
        stream: StreamId,
        /// Whether we may answer on it.
        bi: bool,
    },
    /// Bytes, an end or a reset may be read. Edge-triggered: read until the answer is not a chunk.
    Readable {
        /// The connection.
        conn: ConnId,
        /// The stream.
        stream: StreamId,
    },
    /// A send queue that flow control had held back is empty again.
    Drained {
        /// The connection.
        conn: ConnId,
        /// The stream.
        stream: StreamId,
    },
    /// The peer has acknowledged the whole of a stream we finished.
    StreamFinished {
        /// The connection.
        conn: ConnId,
        /// The stream.
        stream: StreamId,
    },
    /// The peer does not want more of this stream; what was queued on it is gone.
    StreamStopped {
        /// The connection.
        conn: ConnId,
        /// The stream.
        stream: StreamId,
        /// Application code.
        code: u64,
    },
    /// The peer granted more streams after [`Pump::open_bi`](super::Pump::open_bi) or `open_uni` had failed.
    StreamsAvailable {
        /// The connection.
        conn: ConnId,
        /// Bidirectional or unidirectional.
        bi: bool,
    },
    /// The connection is over; its id names nothing any more, except for reading what is left.
    Closed {
        /// The connection.
        conn: ConnId,
        /// Why.
        reason: CloseReason,
    },
    /// A datagram for another core; never given to the QUIC state machine of this one, which would
    /// answer it with a reset.
    Stray {
        /// The core its connection lives on.
        core: u16,
        /// The socket it came in on; endpoints have the same order on every core.
        endpoint: EndpointId,
        /// The datagram.
        datagram: StrayDatagram,
    },
}

/// Answer of [`Pump::read`](super::Pump::read).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Read {
    /// The next bytes, in order, not copied.
    Chunk(Bytes),
    /// Nothing now; a `Readable` will follow.
    Blocked,
    /// The peer finished the stream and everything was read.
    Finished,
    /// The peer abandoned the stream with this code.
    Reset(u64),
    /// The connection or the stream is gone.
    Closed,
}

/// Why [`Pump::read_each`](super::Pump::read_each) stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadEnd {
    /// Nothing more now; a `Readable` will follow.
    Blocked,
    /// The end of the stream.
    Finished,
    /// The peer abandoned the stream with this code.
    Reset(u64),
    /// The byte limit was reached: there may be more, and no event will say so.
    Limit,
    /// The connection or the stream is gone.
    Closed,
}

/// Why a command on a stream could not be carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    /// The connection is closed; drop the request.
    #[error("the connection is closed")]
    ConnectionClosed,
    /// The stream was finished, reset or stopped; drop the request.
    #[error("the stream is closed")]
    StreamClosed,
    /// The peer has not granted another stream yet; wait for `StreamsAvailable`.
    #[error("the peer's stream credit is used up")]
    NoCredit,
}

/// What one connection has seen so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ConnStats {
    /// Smoothed round-trip time.
    pub rtt: Duration,
    /// Smallest round-trip time seen.
    pub min_rtt: Duration,
    /// Largest UDP payload the path is known to carry.
    pub mtu_bytes: u16,
    /// Times the path was judged to have become narrower.
    pub black_holes: u64,
    /// Congestion window.
    pub congestion_window_bytes: u64,
    /// Times the congestion controller cut its window.
    pub congestion_events: u64,
    /// QUIC packets sent.
    pub sent_packets: u64,
    /// QUIC packets declared lost, probes for a larger size not counted.
    pub lost_packets: u64,
    /// Bytes in lost packets.
    pub lost_bytes: u64,
    /// UDP payload bytes sent.
    pub sent_bytes: u64,
    /// UDP payload bytes received.
    pub received_bytes: u64,
    /// UDP datagrams sent.
    pub sent_datagrams: u64,
    /// UDP datagrams received.
    pub received_datagrams: u64,
    /// ACK frames sent.
    pub acks_sent: u64,
}

impl From<quinn_proto::ConnectionStats> for ConnStats {
    fn from(s: quinn_proto::ConnectionStats) -> Self {
        Self {
            rtt: s.path.rtt,
            min_rtt: s.path.min_rtt,
            mtu_bytes: s.path.current_mtu,
            black_holes: s.path.black_holes_detected,
            congestion_window_bytes: s.path.cwnd,
            congestion_events: s.path.congestion_events,
            sent_packets: s.path.sent_packets,
            lost_packets: s.path.lost_packets,
            lost_bytes: s.path.lost_bytes,
            sent_bytes: s.udp_tx.bytes,
            received_bytes: s.udp_rx.bytes,
            sent_datagrams: s.udp_tx.datagrams,
            received_datagrams: s.udp_rx.datagrams,
            acks_sent: s.frame_tx.acks,
        }
    }
}
