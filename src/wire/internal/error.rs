//! What can be wrong with a frame, and what is done about it.

use super::codes::{AckMode, CacheOpKind, ErrorCode, ReplicaLog};
use super::kind::Kind;
use crate::ids::CorrelationId;

/// What a reader of a request stream does about a frame it cannot use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Handling {
    /// Close the connection without an answer.
    Close,
    /// So far a proper prefix of a frame: read on.
    NeedMoreBytes,
    /// Answer `UnsupportedKind` and go on with the next frame.
    AnswerUnsupportedKind,
    /// Answer `Malformed` if the kind is a request, and go on with the next frame.
    AnswerMalformed,
    /// A frame and the start of the next: only a decoder of single frames refuses it.
    NotOneFrame,
}

impl Handling {
    /// The name the command line prints.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Close => "close",
            Self::NeedMoreBytes => "need-more-bytes",
            Self::AnswerUnsupportedKind => "answer-unsupported-kind",
            Self::AnswerMalformed => "answer-malformed",
            Self::NotOneFrame => "not-one-frame",
        }
    }
}

/// Why the bytes of a connection mean nothing any more. It is closed without an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FatalReason {
    #[error("wrong magic {found:#010x}: not a broker-internal frame")]
    WrongMagic { found: u32 },
    #[error("protocol version {found}; only version 1 is spoken")]
    WrongVersion { found: u16 },
    #[error("kind {kind} declares a body of {length_bytes} bytes; at most {limit_bytes} are read")]
    LengthOverLimit {
        kind: u16,
        length_bytes: u32,
        limit_bytes: u32,
    },
    #[error("kind {kind} with a body of {length_bytes} bytes has no correlation id to answer to")]
    NoCorrelationId { kind: u16, length_bytes: u32 },
}

impl FatalReason {
    /// A stable name for reports and counters.
    pub const fn name(self) -> &'static str {
        match self {
            Self::WrongMagic { .. } => "wrong-magic",
            Self::WrongVersion { .. } => "wrong-version",
            Self::LengthOverLimit { .. } => "length-over-limit",
            Self::NoCorrelationId { .. } => "no-correlation-id",
        }
    }
}

/// Why a body is not a message of its kind. The frame boundary is intact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BodyError {
    #[error("{field} needs {need} bytes, {left} are left in the body")]
    PastEnd {
        field: &'static str,
        need: usize,
        left: usize,
    },
    #[error("{field} has {bytes} bytes, over the limit of a string")]
    TextTooLong { field: &'static str, bytes: usize },
    #[error("{field} is not valid UTF-8")]
    NotUtf8 { field: &'static str },
    #[error("the credential is empty")]
    CredentialEmpty,
    #[error("the credential has {bytes} bytes, over its limit")]
    CredentialTooLong { bytes: usize },
    #[error("{count} payloads are declared, over the limit of a frame")]
    TooManyPayloads { count: u32 },
    #[error("unknown ack mode {code}")]
    UnknownAckMode { code: u8 },
    #[error("unknown cache operation {code}")]
    UnknownCacheOp { code: u8 },
    #[error("unknown replica log {code}")]
    UnknownReplicaLog { code: u8 },
    #[error("unknown error code {code}")]
    UnknownErrorCode { code: u16 },
    #[error("presence byte {value} is neither 0 nor 1")]
    BadPresence { value: u8 },
    #[error("{extra} bytes follow the last field")]
    TrailingBytes { extra: usize },
}

impl BodyError {
    /// A stable name for reports and counters.
    pub const fn name(self) -> &'static str {
        match self {
            Self::PastEnd { .. } => "field-past-end",
            Self::TextTooLong { .. } => "string-over-limit",
            Self::NotUtf8 { .. } => "bad-utf8",
            Self::CredentialEmpty => "credential-empty",
            Self::CredentialTooLong { .. } => "credential-over-limit",
            Self::TooManyPayloads { .. } => "count-over-limit",
            Self::UnknownAckMode { .. } => "unknown-ack-mode",
            Self::UnknownCacheOp { .. } => "unknown-cache-op",
            Self::UnknownReplicaLog { .. } => "unknown-replica-log",
            Self::UnknownErrorCode { .. } => "unknown-error-code",
            Self::BadPresence { .. } => "bad-presence-byte",
            Self::TrailingBytes { .. } => "trailing-bytes",
        }
    }
}

/// Why some bytes are not exactly one frame of a known kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    #[error("a frame of {need} bytes or more, of which {have} are here")]
    Truncated { have: usize, need: usize },
    #[error("{extra} bytes follow the frame")]
    BytesAfterFrame { extra: usize },
    #[error(transparent)]
    Fatal(#[from] FatalReason),
    #[error("unknown kind {kind} in request {correlation}")]
    UnknownKind {
        kind: u16,
        correlation: CorrelationId,
    },
    #[error("{kind:?} {correlation} does not decode: {error}")]
    Body {
        kind: Kind,
        correlation: CorrelationId,
        error: BodyError,
    },
}

impl DecodeError {
    /// What a reader of a request stream does about it.
    pub const fn handling(self) -> Handling {
        match self {
            Self::Truncated { .. } => Handling::NeedMoreBytes,
            Self::BytesAfterFrame { .. } => Handling::NotOneFrame,
            Self::Fatal(_) => Handling::Close,
            Self::UnknownKind { .. } => Handling::AnswerUnsupportedKind,
            Self::Body { .. } => Handling::AnswerMalformed,
        }
    }

    /// A stable name for reports and counters.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Truncated { .. } => "truncated",
            Self::BytesAfterFrame { .. } => "bytes-after-frame",
            Self::Fatal(reason) => reason.name(),
            Self::UnknownKind { .. } => "unknown-kind",
            Self::Body { error, .. } => error.name(),
        }
    }

    /// The correlation id an answer would go to.
    pub const fn correlation(self) -> Option<CorrelationId> {
        match self {
            Self::UnknownKind { correlation, .. } | Self::Body { correlation, .. } => {
                Some(correlation)
            }
            Self::Truncated { .. } | Self::BytesAfterFrame { .. } | Self::Fatal(_) => None,
        }
    }
}

/// Why something cannot be put into a frame. The request fails; the connection is fine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    #[error("text of {bytes} bytes is over the limit of 512")]
    TextTooLong { bytes: usize },
    #[error("the credential is empty; send the kind without one instead")]
    CredentialEmpty,
    #[error("a credential of {bytes} bytes is over the limit of 16384")]
    CredentialTooLong { bytes: usize },
    #[error("{count} payloads are over the limit of 65536")]
    TooManyPayloads { count: usize },
    #[error("a body of {bytes} bytes is over the limit of 67108864")]
    BodyTooLarge { bytes: usize },
}

impl AckMode {
    pub(super) fn decode(code: u8) -> Result<Self, BodyError> {
        Self::from_code(code).ok_or(BodyError::UnknownAckMode { code })
    }
}

impl CacheOpKind {
    pub(super) fn decode(code: u8) -> Result<Self, BodyError> {
        Self::from_code(code).ok_or(BodyError::UnknownCacheOp { code })
    }
}

impl ReplicaLog {
    pub(super) fn decode(code: u8) -> Result<Self, BodyError> {
        Self::from_code(code).ok_or(BodyError::UnknownReplicaLog { code })
    }
}

impl ErrorCode {
    pub(super) fn decode(code: u16) -> Result<Self, BodyError> {
        Self::from_code(code).ok_or(BodyError::UnknownErrorCode { code })
    }
}
