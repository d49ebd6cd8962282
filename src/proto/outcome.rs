//! How a request to a peer can end, and what each end proves.
//!
//! The one question behind every type here: *could the peer already have applied it?*
//! [`SendResult`] is what one attempt came to, [`Outcome`] what the whole request came to.
//! Nothing here decides; [`super::forward`] does.
//!
//! Invariant: `NotSent`, `NotLeader` and `Error` (but for `StorageFailed`) prove that nothing was
//! applied; `Unknown` proves nothing.

use std::sync::Arc;

use super::MonoTime;
use crate::ids::{Generation, NodeId, Offset};

/// The typed refusals of the internal protocol.
pub use crate::wire::internal::ErrorCode as PeerCode;

/// A broker at an assignment generation: where a request goes, and what a redirect loop is made of.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Target {
    pub node: NodeId,
    pub generation: Generation,
}

/// A routing answer: who owns the shard, as its sender sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotLeader {
    pub owner: Target,
    /// Where the owner takes internal connections, as the answer says; not parsed.
    pub internal_addr: Arc<str>,
}

/// A typed refusal as it arrived.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerError {
    pub code: PeerCode,
    /// The peer's words, for logs only.
    pub detail: Box<str>,
    /// Meaningful with [`PeerCode::LogGap`] and with `Malformed` to a records batch.
    pub expected_offset: Offset,
}

impl PeerError {
    /// A refusal with nothing but its code.
    pub fn bare(code: PeerCode) -> Self {
        Self {
            code,
            detail: Box::from(""),
            expected_offset: Offset(0),
        }
    }
}

/// Why not one byte of a request left this broker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NotSentCause {
    /// The peer refused connections a moment ago; nobody dials before `until`.
    Backoff { until: MonoTime },
    /// The connection could not be set up, or went away before the request was written.
    Unreachable,
    /// The peer already holds as many unanswered requests, or bytes, as it may.
    InFlightFull,
    /// The link is being closed in order.
    Draining,
    /// The catalog knows no address for that broker.
    UnknownPeer,
    /// The request does not fit the internal wire (a name or key of more than 512 bytes).
    Unencodable,
}

impl NotSentCause {
    /// The cause's name as written in logs and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Backoff { .. } => "backoff",
            Self::Unreachable => "unreachable",
            Self::InFlightFull => "in_flight_full",
            Self::Draining => "draining",
            Self::UnknownPeer => "unknown_peer",
            Self::Unencodable => "unencodable",
        }
    }
}

/// Why no answer is coming to something that was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum UnknownCause {
    Disconnect,
    Timeout,
    /// The answer was of a family the request does not allow, or could not be read.
    ProtocolViolation,
}

impl UnknownCause {
    /// The cause's name as written in logs and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Disconnect => "disconnect",
            Self::Timeout => "timeout",
            Self::ProtocolViolation => "protocol_violation",
        }
    }
}

/// What one attempt to send a request came to. `R` is what a success carries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SendResult<R> {
    Ok(R),
    NotLeader(NotLeader),
    Error(PeerError),
    NotSent(NotSentCause),
    Unknown(UnknownCause),
}

/// The two layouts of a forward: with the client's credential, or the one from before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ForwardKind {
    Authorized,
    Legacy,
}

/// The offsets of an applied publish.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Appended {
    pub first: Offset,
    pub last: Offset,
}

impl Appended {
    /// What an empty batch, or a stream without a log, is answered with: first 1, last 0.
    pub const NOTHING: Appended = Appended {
        first: Offset(1),
        last: Offset(0),
    };

    /// The first offset written, or `None` when nothing was.
    pub fn first_written(self) -> Option<Offset> {
        (self.first <= self.last).then_some(self.first)
    }
}

/// What the one who asked may do about a failure: the client protocol's classes.
pub use crate::wire::client::RetryClass;

/// Why a forwarded request surely was not applied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refused {
    /// The last owner asked said so.
    Peer(PeerError),
    /// It never left.
    NotSent(NotSentCause),
    /// The owner named a broker that was already asked at that generation.
    RedirectLoop(Target),
    /// Redirects used up the attempts.
    RedirectsExhausted(Target),
}

impl Refused {
    /// What the one who asked may do about it.
    pub fn retry_class(&self) -> RetryClass {
        match self {
            Self::Peer(error) => match error.code {
                PeerCode::StaleRoute | PeerCode::Unavailable => RetryClass::Retry,
                PeerCode::Overload => RetryClass::RetryAfter,
                PeerCode::Unauthorized
                | PeerCode::ProtocolVersion
                | PeerCode::Malformed
                | PeerCode::UnsupportedKind => RetryClass::Fatal,
                // These never become a `Refused`; the class that claims nothing is the safe one.
                PeerCode::StorageFailed
                | PeerCode::LogGap
                | PeerCode::LogConflict
                | PeerCode::FencedEpoch => RetryClass::OutcomeUnknown,
            },
            Self::NotSent(cause) => match cause {
                NotSentCause::InFlightFull => RetryClass::RetryAfter,
                NotSentCause::Backoff { .. }
                | NotSentCause::Unreachable
                | NotSentCause::Draining
                | NotSentCause::UnknownPeer => RetryClass::Retry,
                NotSentCause::Unencodable => RetryClass::Fatal,
            },
            Self::RedirectLoop(_) | Self::RedirectsExhausted(_) => RetryClass::Retry,
        }
    }
}

/// Why nobody can say whether a forwarded request was applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IndeterminateCause {
    Unknown(UnknownCause),
    /// The owner tried and its disk failed.
    StorageFailed,
    /// The owner answered a code that has no meaning for a forward.
    UnexpectedCode(PeerCode),
}

/// How a forwarded request ended. Each request has exactly one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome<R> {
    /// The owner applied it and it is durable there.
    Done { reply: R, owner: Target },
    /// Surely not applied.
    Refused(Refused),
    /// It may have been applied.
    Indeterminate(IndeterminateCause),
}
