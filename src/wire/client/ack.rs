//! The binary answer to a binary publish.
//!
//! Invariant: an offset goes with a success only, a code and a detail with a failure only, and a
//! detail only with a code; the types leave no other choice.

use std::borrow::Cow;

use bytes::Bytes;

use super::body::{BodyError, Fields};
use super::features::ClientOffer;
use super::flags::{AckShape, Flags};
use super::frame::{EncodeError, FrameBuilder};
use super::refusal::{ErrorDetail, Refusal, RetryClass, WireCode};

const STATUS_OK: u8 = 0;
const STATUS_FAILED: u8 = 1;
/// The longest human-readable text put on an ack; the rest of a longer one is cut off.
const MAX_MESSAGE_BYTES: usize = 4096;

/// The one answer to one acked batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublishAck {
    pub request_id: u64,
    pub outcome: PublishOutcome,
    /// Where the client may send this shard's batches itself.
    pub owner: Option<ShardOwner>,
}

/// What became of a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PublishOutcome {
    /// Accepted; the offset of the first record once it is written there.
    Accepted { offset: Option<u64> },
    /// Not accepted, or not known to be.
    Failed(Refusal),
}

/// The broker that leads a shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardOwner {
    pub node_id: String,
    /// Where clients reach it, if that is published.
    pub addr: Option<String>,
    pub generation: u64,
}

impl PublishAck {
    /// A success.
    pub fn accepted(request_id: u64, offset: Option<u64>) -> PublishAck {
        PublishAck {
            request_id,
            outcome: PublishOutcome::Accepted { offset },
            owner: None,
        }
    }

    /// A failure.
    pub fn failed(request_id: u64, refusal: Refusal) -> PublishAck {
        PublishAck {
            request_id,
            outcome: PublishOutcome::Failed(refusal),
            owner: None,
        }
    }

    /// Without what a client that made `offer` could not read.
    pub fn for_client(mut self, offer: &ClientOffer) -> PublishAck {
        self.owner = self.owner.filter(|_| offer.may_send(Flags::ACK_OWNER));
        self.outcome = match self.outcome {
            PublishOutcome::Accepted { offset } => PublishOutcome::Accepted {
                offset: offset.filter(|_| offer.may_send(Flags::ACK_OFFSET)),
            },
            PublishOutcome::Failed(refusal) => PublishOutcome::Failed(refusal.for_ack(offer)),
        };
        self
    }

    /// Reads a body whose flags selected `shape`. Bytes behind the last field are ignored.
    pub fn decode(shape: AckShape, body: Bytes) -> Result<PublishAck, BodyError> {
        let mut fields = Fields::new(body);
        let status = fields.u8("the status")?;
        let request_id = fields.u64("the request id")?;
        let message = fields.short_text("the message")?;
        let accepted = match status {
            STATUS_OK => true,
            STATUS_FAILED => false,
            value => {
                let field = "the status";
                return Err(BodyError::Undefined { field, value });
            }
        };
        if accepted && shape.code {
            return Err(BodyError::WrongStatus { field: "a code" });
        }
        if !accepted && shape.offset {
            return Err(BodyError::WrongStatus { field: "an offset" });
        }
        let (code, retry) = decode_code(shape, &mut fields)?;
        let detail = decode_detail(shape, &mut fields)?;
        let owner = decode_owner(shape, &mut fields)?;
        let offset = match shape.offset {
            true => Some(fields.u64("the offset")?),
            false => None,
        };
        let outcome = match accepted {
            true => PublishOutcome::Accepted { offset },
            false => PublishOutcome::Failed(Refusal {
                message: Cow::Owned(message.as_str().to_owned()),
                code,
                retry,
                detail,
            }),
        };
        Ok(PublishAck {
            request_id,
            outcome,
            owner,
        })
    }

    /// The flags this ack is sent with. A code that has no number is left out, and its detail
    /// with it.
    pub fn shape(&self) -> AckShape {
        let (offset, code, detail) = match &self.outcome {
            PublishOutcome::Accepted { offset } => (offset.is_some(), false, false),
            PublishOutcome::Failed(refusal) => {
                let code = refusal.code.as_ref().and_then(WireCode::number).is_some();
                (false, code, code && refusal.detail.is_some())
            }
        };
        AckShape {
            code,
            detail,
            owner: self.owner.is_some(),
            offset,
        }
    }

    /// The frame.
    pub fn encode(&self) -> Result<Bytes, EncodeError> {
        let mut frame = FrameBuilder::with_body_capacity(64);
        match &self.outcome {
            PublishOutcome::Accepted { .. } => {
                frame.put_u8(STATUS_OK);
                frame.put_u64(self.request_id);
                frame.put_u16(0);
            }
            PublishOutcome::Failed(refusal) => {
                frame.put_u8(STATUS_FAILED);
                frame.put_u64(self.request_id);
                frame.put_short("the message", cut(&refusal.message).as_bytes())?;
                encode_refusal(refusal, &mut frame)?;
            }
        }
        if let Some(owner) = &self.owner {
            frame.put_short("the node id", owner.node_id.as_bytes())?;
            let addr = owner.addr.as_deref().unwrap_or_default();
            frame.put_short("the address", addr.as_bytes())?;
            frame.put_u64(owner.generation);
        }
        if let PublishOutcome::Accepted { offset: Some(at) } = self.outcome {
            frame.put_u64(at);
        }
        frame.finish(self.shape().flags())
    }
}

fn cut(text: &str) -> &str {
    let mut end = text.len().min(MAX_MESSAGE_BYTES);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

fn encode_refusal(refusal: &Refusal, frame: &mut FrameBuilder) -> Result<(), EncodeError> {
    let Some(number) = refusal.code.as_ref().and_then(WireCode::number) else {
        return Ok(());
    };
    frame.put_u16(number);
    frame.put_u8(refusal.class().unwrap_or(RetryClass::Fatal).number());
    if let Some(detail) = &refusal.detail {
        let reason = detail.reason.as_deref().unwrap_or_default();
        frame.put_short("the reason", reason.as_bytes())?;
        frame.put_u64(detail.retry_after_ms.unwrap_or(0));
    }
    Ok(())
}

fn decode_code(
    shape: AckShape,
    fields: &mut Fields,
) -> Result<(Option<WireCode>, Option<RetryClass>), BodyError> {
    if !shape.code {
        return Ok((None, None));
    }
    let code = WireCode::from_number(fields.u16("the code")?);
    let class = RetryClass::from_number(fields.u8("the class")?);
    Ok((Some(code), Some(class)))
}

fn decode_detail(shape: AckShape, fields: &mut Fields) -> Result<Option<ErrorDetail>, BodyError> {
    if !shape.detail {
        return Ok(None);
    }
    let reason = fields.short_text("the reason")?;
    let retry_after_ms = fields.u64("the delay")?;
    Ok(Some(ErrorDetail {
        reason: (!reason.is_empty()).then(|| Cow::Owned(reason.as_str().to_owned())),
        retry_after_ms: (retry_after_ms != 0).then_some(retry_after_ms),
    }))
}

fn decode_owner(shape: AckShape, fields: &mut Fields) -> Result<Option<ShardOwner>, BodyError> {
    if !shape.owner {
        return Ok(None);
    }
    let node_id = fields.short_text("the node id")?.as_str().to_owned();
    let addr = fields.short_text("the address")?;
    Ok(Some(ShardOwner {
        node_id,
        addr: (!addr.is_empty()).then(|| addr.as_str().to_owned()),
        generation: fields.u64("the generation")?,
    }))
}
