//! The binary publish batch.
//!
//! Prefixes by flag (request id and ack mode, producer and sequence, key), then the stream's
//! name, then the payload section, which stays one slice of the frame: a forward ships it as it
//! is. Whether the names mean anything is checked above the codec.
//!
//! Invariant: of an acked batch the request id is known even when nothing else can be read, since
//! an answer is owed to it.

use bytes::Bytes;

use super::body::{BodyError, Fields, Text};
use super::flags::PublishShape;
use super::frame::{EncodeError, FrameBuilder};
use crate::wire::internal::{self, Payloads};

/// One batch: one shard, one run of offsets, one answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublishBatch {
    /// The answer wanted; `None` wants none.
    pub ack: Option<AckRequest>,
    /// Makes the batch idempotent; needs `ack`.
    pub producer: Option<ProducerSequence>,
    /// Chooses the shard; an empty key is a key.
    pub key: Option<Bytes>,
    pub tenant_id: Text,
    pub namespace: Text,
    pub stream: Text,
    pub payloads: Payloads,
}

/// The answer a publish wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AckRequest {
    pub request_id: u64,
    pub granularity: AckGranularity,
}

/// Both mean one answer for the frame; the value is kept for the round trip.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AckGranularity {
    PerMessage,
    PerBatch,
}

/// Where an idempotent batch stands in its producer's sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProducerSequence {
    pub producer_id: u64,
    pub sequence: u64,
}

/// A batch that cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("publish batch: {reason}")]
pub struct PublishError {
    /// The request to answer `invalid_request`; without one the batch is dropped.
    pub request_id: Option<u64>,
    pub reason: BodyError,
}

impl PublishBatch {
    /// Reads a body whose flags selected `shape`. Bytes behind the last payload are ignored.
    pub fn decode(shape: PublishShape, body: Bytes) -> Result<PublishBatch, PublishError> {
        let mut fields = Fields::new(body);
        let mut request_id = None;
        if shape.acked {
            let read = fields
                .u64("the request id")
                .map_err(|reason| PublishError {
                    request_id: None,
                    reason,
                })?;
            request_id = Some(read);
        }
        Self::decode_rest(shape, request_id, fields)
            .map_err(|reason| PublishError { request_id, reason })
    }

    fn decode_rest(
        shape: PublishShape,
        request_id: Option<u64>,
        mut fields: Fields,
    ) -> Result<PublishBatch, BodyError> {
        let ack = match request_id {
            None => None,
            Some(request_id) => Some(AckRequest {
                request_id,
                granularity: match fields.u8("the ack mode")? {
                    1 => AckGranularity::PerMessage,
                    2 => AckGranularity::PerBatch,
                    value => {
                        let field = "the ack mode";
                        return Err(BodyError::Undefined { field, value });
                    }
                },
            }),
        };
        let producer = match shape.idempotent {
            false => None,
            true => Some(ProducerSequence {
                producer_id: fields.u64("the producer id")?,
                sequence: fields.u64("the sequence")?,
            }),
        };
        let key = match shape.keyed {
            false => None,
            true => Some(fields.short_bytes("the key")?),
        };
        Ok(PublishBatch {
            ack,
            producer,
            key,
            tenant_id: fields.short_text("the tenant")?,
            namespace: fields.short_text("the namespace")?,
            stream: fields.short_text("the stream")?,
            payloads: take_payloads(&fields.into_rest())?,
        })
    }

    /// The flags this batch is sent with.
    pub fn shape(&self) -> PublishShape {
        PublishShape {
            acked: self.ack.is_some(),
            idempotent: self.producer.is_some(),
            keyed: self.key.is_some(),
        }
    }

    /// The frame in one piece.
    pub fn encode(&self) -> Result<Bytes, EncodeError> {
        let section = self.payloads.as_wire();
        let mut frame = self.encode_front(section.len())?;
        frame.put_slice(section);
        frame.finish(self.shape().flags())
    }

    /// The frame in two pieces: everything before the payloads, and the payload section itself,
    /// which is not copied.
    pub fn encode_parts(&self) -> Result<[Bytes; 2], EncodeError> {
        let section = self.payloads.as_wire();
        let front = self.encode_front(0)?;
        let front = front.finish_with_tail(self.shape().flags(), section.len())?;
        Ok([front, section.clone()])
    }

    fn encode_front(&self, spare: usize) -> Result<FrameBuilder, EncodeError> {
        if self.producer.is_some() && self.ack.is_none() {
            let why = "an idempotent publish must be acked";
            return Err(EncodeError::Contradiction(why));
        }
        let names = self.tenant_id.len() + self.namespace.len() + self.stream.len();
        let key = self.key.as_ref().map_or(0, Bytes::len);
        let mut frame = FrameBuilder::with_body_capacity(33 + names + key + spare);
        if let Some(ack) = self.ack {
            frame.put_u64(ack.request_id);
            frame.put_u8(match ack.granularity {
                AckGranularity::PerMessage => 1,
                AckGranularity::PerBatch => 2,
            });
        }
        if let Some(producer) = self.producer {
            frame.put_u64(producer.producer_id);
            frame.put_u64(producer.sequence);
        }
        if let Some(key) = &self.key {
            frame.put_short("the key", key)?;
        }
        frame.put_short("the tenant", self.tenant_id.as_bytes())?;
        frame.put_short("the namespace", self.namespace.as_bytes())?;
        frame.put_short("the stream", self.stream.as_bytes())?;
        Ok(frame)
    }
}

/// The section at the front of `rest`. It is cut off exactly, because it travels on as it is.
fn take_payloads(rest: &Bytes) -> Result<Payloads, BodyError> {
    match Payloads::parse_at(rest, 0) {
        Ok((payloads, _)) => Ok(payloads),
        Err(internal::BodyError::TooManyPayloads { count }) => {
            Err(BodyError::TooManyPayloads { count })
        }
        Err(_) => Err(BodyError::Truncated {
            field: "the payloads",
        }),
    }
}
