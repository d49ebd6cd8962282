//! The client protocol: frames, binary batches, JSON messages, negotiation.
//!
//! Pure bytes to and from typed messages; both directions, because the load generator and the
//! tests are clients. Nothing here knows of connections, permissions or catalogs.
//!
//! Invariants: no input panics; nothing is allocated for a length that was only declared;
//! whatever is decoded was checked as far as the layout says.

pub mod ack;
pub mod answers;
pub mod blob;
pub mod body;
pub mod event;
pub mod features;
pub mod flags;
pub mod frame;
pub mod json;
pub mod messages;
pub mod publish;
pub mod reader;
pub mod refusal;
pub mod requests;

#[cfg(test)]
mod binary_tests;

pub use super::internal::Payloads;
pub use ack::{PublishAck, PublishOutcome, ShardOwner};
pub use blob::Blob;
pub use body::{BodyError, Text};
pub use event::EventBatch;
pub use features::{ClientOffer, Features, ServerOffer};
pub use flags::{Flags, FlagsError, Layout};
pub use frame::{EncodeError, Frame, FrameHeader, HeaderError, HEADER_BYTES};
pub use messages::{encode_message, Answer, Malformed, Message, Request};
pub use publish::{AckGranularity, AckRequest, ProducerSequence, PublishBatch, PublishError};
pub use reader::{EndError, FatalReason, FrameReader, Oversize, ReadEvent, ReadLimits};
pub use refusal::{ErrorCode, ErrorDetail, Refusal, RetryClass, WireCode};

/// What a broker reads.
#[derive(Debug, Clone, PartialEq)]
pub enum ToBroker {
    Publish(PublishBatch),
    Request(Request),
}

/// What a client reads.
#[derive(Debug, Clone, PartialEq)]
pub enum ToClient {
    Ack(PublishAck),
    Events(EventBatch),
    Answer(Answer),
}

/// Why a whole frame cannot be used. Its boundary is known, so it can be answered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    #[error(transparent)]
    Flags(#[from] FlagsError),
    /// A layout that only the other direction carries.
    #[error("flags {:#06x} belong to the other direction", .0.bits())]
    Direction(Flags),
    #[error(transparent)]
    Publish(#[from] PublishError),
    #[error("the body cannot be read: {0}")]
    Body(#[from] BodyError),
    #[error(transparent)]
    Json(#[from] Malformed),
}

impl ToBroker {
    /// Reads a frame of a client.
    pub fn decode(frame: Frame) -> Result<ToBroker, FrameError> {
        match frame.flags.layout()? {
            Layout::Json => Ok(ToBroker::Request(Request::decode(&frame.body)?)),
            Layout::Publish(shape) => {
                let batch = PublishBatch::decode(shape, frame.body)?;
                Ok(ToBroker::Publish(batch))
            }
            Layout::Ack(_) | Layout::Event(_) => Err(FrameError::Direction(frame.flags)),
        }
    }
}

impl ToClient {
    /// Reads a frame of a broker.
    pub fn decode(frame: Frame) -> Result<ToClient, FrameError> {
        match frame.flags.layout()? {
            Layout::Json => Ok(ToClient::Answer(Answer::decode(&frame.body)?)),
            Layout::Ack(shape) => Ok(ToClient::Ack(PublishAck::decode(shape, frame.body)?)),
            Layout::Event(shape) => {
                let batch = EventBatch::decode(shape, frame.body)?;
                Ok(ToClient::Events(batch))
            }
            Layout::Publish(_) => Err(FrameError::Direction(frame.flags)),
        }
    }
}
