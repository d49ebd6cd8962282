//! One core's link to one peer: when to dial, what may be sent now, what became of the rest.
//!
//! [`PeerLink`] decides; the driver owns the QUIC connection, encodes, and reports back. A link
//! has at most one connection, and each core keeps its own link, so an answer comes back to the
//! core that asked.
//!
//! [`Streams`] places requests on the connection's streams, so that a large batch does not hold
//! up the small requests behind it.

mod link;
mod streams;
mod transitions;

use std::time::Duration;

use super::backoff::BackoffLimits;
use super::correlation::{AnswerShape, Family};
use super::handshake::{CloseCause, HandshakeFailure};
use super::outcome::{ForwardKind, NotLeader, PeerError, SendResult};
use crate::ids::CorrelationId;

pub use link::PeerLink;
pub use streams::{StreamSlot, Streams, ALL_STREAMS, MAX_STREAMS, REPLICATION_SLOT};

/// The bounds of one link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkLimits {
    /// Requests accepted and not yet answered, those waiting for the connection included.
    pub in_flight: usize,
    /// Their bytes. One request may exceed it when it is alone.
    pub in_flight_bytes: u64,
    /// How long an answer may take.
    pub request_timeout: Duration,
    /// How long connecting and greeting may take together.
    pub connect_timeout: Duration,
    /// How long a link may be unused before it is closed.
    pub idle_close: Duration,
    /// How long an orderly close waits for answers.
    pub drain_timeout: Duration,
    /// Streams of a connection, 1 to [`MAX_STREAMS`].
    pub streams: u8,
    /// Requests above this travel on the streams for large ones.
    pub large_request_bytes: u32,
    pub backoff: BackoffLimits,
}

impl Default for LinkLimits {
    fn default() -> Self {
        Self {
            in_flight: 1024,
            in_flight_bytes: 64 << 20,
            request_timeout: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(2),
            idle_close: Duration::from_secs(60),
            drain_timeout: Duration::from_secs(5),
            streams: 4,
            large_request_bytes: 64 << 10,
            backoff: BackoffLimits::default(),
        }
    }
}

/// Names one connection of a link; events of an earlier one are ignored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct ConnectionEpoch(pub u32);

/// A request for the peer. `T` is the caller's name for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Request<T> {
    pub token: T,
    pub family: Family,
    /// The layout wanted; a link that knows its peer to be old uses the legacy one.
    pub kind: ForwardKind,
    /// Size of the encoded frame.
    pub bytes: u32,
    /// Keeps the order of requests that depend on each other: the stream the previous one of
    /// them went to, as long as that one is unanswered.
    pub pin: Option<StreamSlot>,
}

/// An answer from the peer, decoded. `R` is what a success carries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer<R> {
    HelloOk {
        node_id: Box<str>,
    },
    PublishOk(R),
    CacheOk(R),
    ReplicateOk(R),
    NotLeader(NotLeader),
    /// `NotLeader` that names no broker a catalog could hold: nothing was applied, and there is
    /// nowhere to go.
    NotLeaderUnnamed,
    PublishError(PeerError),
    CacheError(PeerError),
    ReplicateError(PeerError),
}

impl<R> Answer<R> {
    /// The shape to hold against the request's family.
    pub fn shape(&self) -> AnswerShape {
        match self {
            Self::HelloOk { .. } => AnswerShape::HelloOk,
            Self::PublishOk(_) => AnswerShape::ForwardPublishOk,
            Self::CacheOk(_) => AnswerShape::ForwardCacheOk,
            Self::ReplicateOk(_) => AnswerShape::ReplicateOk,
            Self::NotLeader(_) | Self::NotLeaderUnnamed => AnswerShape::NotLeader,
            Self::PublishError(error) => AnswerShape::ForwardPublishError(error.code),
            Self::CacheError(error) => AnswerShape::ForwardCacheError(error.code),
            Self::ReplicateError(error) => AnswerShape::ReplicateError(error.code),
        }
    }
}

/// What the driver must do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LinkAction<T, R> {
    /// Open a connection; report `on_connected` or `on_closed` with this epoch.
    Dial { epoch: ConnectionEpoch },
    /// Send Hello on stream 0.
    SendHello { correlation: CorrelationId },
    /// Write the request on that stream under that id.
    Transmit {
        token: T,
        stream: StreamSlot,
        correlation: CorrelationId,
        kind: ForwardKind,
    },
    /// The one result of that request's attempt.
    Done {
        token: T,
        sent_as: ForwardKind,
        result: SendResult<R>,
    },
    /// Close the connection.
    Close {
        epoch: ConnectionEpoch,
        reason: LinkClose,
    },
    /// Something to log and count.
    Report(LinkReport),
}

/// Why this side closes a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LinkClose {
    Idle,
    GreetingFailed,
    /// The peer could not read a request: the two sides disagree about a layout.
    LayoutDispute,
    ProtocolViolation,
    ShuttingDown,
}

impl LinkClose {
    /// The reason's name as written in logs, metrics and the close frame.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::GreetingFailed => "greeting failed",
            Self::LayoutDispute => "peer could not read a request",
            Self::ProtocolViolation => "protocol violation",
            Self::ShuttingDown => "shutting down",
        }
    }
}

/// A change worth a log line and a counter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LinkReport {
    /// The greeting is done.
    Up,
    /// A dial or a greeting failed; [`HandshakeFailure::doubts_address`] says whether the catalog
    /// should be read again.
    NeverUp(HandshakeFailure),
    /// A link that was up is gone; so many requests became unknown.
    Lost {
        cause: CloseCause,
        unknown_requests: usize,
    },
}

/// Where a link stands, for status reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LinkPhase {
    Idle,
    Connecting,
    Greeting,
    Up,
    Draining,
    Backoff,
    /// Shut down for good.
    Retired,
}

impl LinkPhase {
    /// The phase's name as written in status reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Connecting => "connecting",
            Self::Greeting => "greeting",
            Self::Up => "up",
            Self::Draining => "draining",
            Self::Backoff => "backoff",
            Self::Retired => "retired",
        }
    }
}

/// What a link has seen, for metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LinkCounters {
    pub dials: u64,
    pub came_up: u64,
    pub never_up: u64,
    /// Of `never_up`: our certificate or name was refused, or the peer's was.
    pub identity_refused: u64,
    pub lost: u64,
    /// Requests refused because of the in-flight bounds.
    pub shed: u64,
    /// Requests refused inside the backoff window.
    pub refused_in_backoff: u64,
    pub timeouts: u64,
}
