//! What each side of a connection makes of a [`ReadEvent`].
//!
//! Only the accepting side answers and only the dialling side requests; an answer is never
//! answered, so that two brokers that do not understand each other fall silent.

use super::codes::ErrorCode;
use super::decode::decode_body;
use super::error::{DecodeError, FatalReason};
use super::kind::{Family, Kind, Role};
use super::message::{Message, Refusal, ReplicateRefusal};
use super::reader::ReadEvent;
use super::text::Text;
use crate::ids::{CorrelationId, Offset};

/// What the accepting side does with an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Inbound {
    /// A readable request.
    Request(Message),
    /// Send this refusal, count the error, go on with the next frame.
    Refuse { answer: Message, error: DecodeError },
    /// An answer where requests belong: drop and count it.
    StrayAnswer { kind: Kind },
    /// Close the connection without an answer.
    Close(FatalReason),
}

/// The accepting side.
pub fn on_request_event(event: ReadEvent) -> Inbound {
    match event {
        ReadEvent::Fatal(reason) => Inbound::Close(reason),
        ReadEvent::Unknown { kind, correlation } => Inbound::Refuse {
            answer: unsupported_kind_refusal(correlation, kind),
            error: DecodeError::UnknownKind { kind, correlation },
        },
        ReadEvent::Frame { kind, body } => match kind.role() {
            Role::Answer => Inbound::StrayAnswer { kind },
            Role::Request => match decode_body(kind, body) {
                Ok(message) => Inbound::Request(message),
                Err(DecodeError::Fatal(reason)) => Inbound::Close(reason),
                Err(error) => Inbound::Refuse {
                    answer: malformed_refusal(kind, error),
                    error,
                },
            },
        },
    }
}

/// Why the dialling side fails every request in flight as indeterminate and closes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AnswerFault {
    #[error("an answer cannot be read: {0}")]
    Unreadable(#[from] DecodeError),
    #[error("the peer sent a request, {kind:?}, where only answers belong")]
    Request { kind: Kind },
}

/// The dialling side.
pub fn on_answer_event(event: ReadEvent) -> Result<Message, AnswerFault> {
    match event {
        ReadEvent::Fatal(reason) => Err(DecodeError::Fatal(reason).into()),
        ReadEvent::Unknown { kind, correlation } => {
            Err(DecodeError::UnknownKind { kind, correlation }.into())
        }
        ReadEvent::Frame { kind, body } => match kind.role() {
            Role::Request => Err(AnswerFault::Request { kind }),
            Role::Answer => Ok(decode_body(kind, body)?),
        },
    }
}

impl Message {
    /// Whether this may be the terminal answer to a request of `request`'s kind.
    ///
    /// Families are strict with two exceptions: a peer that does not know a kind cannot know its
    /// family, so `UnsupportedKind` may come in any shape; and a Hello, which has no refusal of
    /// its own, may be refused in any shape with any code.
    pub fn may_answer(&self, request: Kind) -> bool {
        let Some(family) = request.request_family() else {
            return false;
        };
        if self.error_code() == Some(ErrorCode::UnsupportedKind) {
            return true;
        }
        match self.kind() {
            Kind::ForwardPublishOk => family == Family::Publish,
            Kind::ForwardPublishError => matches!(family, Family::Publish | Family::Handshake),
            Kind::NotLeader => matches!(family, Family::Publish | Family::Cache),
            Kind::HelloOk => family == Family::Handshake,
            Kind::ReplicateOk => family == Family::Replication,
            Kind::ReplicateError => matches!(family, Family::Replication | Family::Handshake),
            Kind::ForwardCacheOk => family == Family::Cache,
            Kind::ForwardCacheError => matches!(family, Family::Cache | Family::Handshake),
            Kind::ForwardPublish
            | Kind::Hello
            | Kind::ReplicateRecords
            | Kind::ReplicateBootstrap
            | Kind::ForwardCacheOp
            | Kind::ReplicateCacheRecords
            | Kind::ReplicateCacheBootstrap
            | Kind::ReplicateGroupRecords
            | Kind::ReplicateGroupBootstrap
            | Kind::ReplicateDeadLetterRecords
            | Kind::ReplicateDeadLetterBootstrap
            | Kind::ReplicateCounterRecords
            | Kind::ReplicateCounterBootstrap
            | Kind::AuthorizedForwardPublish
            | Kind::AuthorizedForwardCacheOp
            | Kind::ReplicateRebuild => false,
        }
    }
}

/// A refusal in the shape its request calls for. `detail` is shortened to what a frame holds;
/// `expected_offset` is carried by the replication shape only.
pub fn refusal(
    request: Kind,
    correlation: CorrelationId,
    code: ErrorCode,
    expected_offset: Offset,
    detail: &str,
) -> Message {
    let detail = Text::shortened(detail);
    match request.request_family() {
        Some(Family::Replication) => Message::ReplicateError(ReplicateRefusal {
            correlation,
            code,
            expected_offset,
            detail,
        }),
        Some(Family::Cache) => Message::CacheError(Refusal {
            correlation,
            code,
            detail,
        }),
        Some(Family::Publish | Family::Handshake) | None => Message::ForwardPublishError(Refusal {
            correlation,
            code,
            detail,
        }),
    }
}

/// The answer to a kind this broker does not know, in the one shape every version reads.
pub fn unsupported_kind_refusal(correlation: CorrelationId, kind: u16) -> Message {
    Message::ForwardPublishError(Refusal {
        correlation,
        code: ErrorCode::UnsupportedKind,
        detail: Text::shortened(&format!("kind {kind} is not known here")),
    })
}

fn malformed_refusal(request: Kind, error: DecodeError) -> Message {
    // Every error but a fatal one carries the id; a fatal one closes before it gets here.
    let correlation = error.correlation().unwrap_or_default();
    refusal(
        request,
        correlation,
        ErrorCode::Malformed,
        Offset(0),
        &error.to_string(),
    )
}
