//! Binary frames as JSON objects with a `kind`.

use std::borrow::Cow;

use bytes::Bytes;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::wire::client::ack::{PublishAck, PublishOutcome, ShardOwner};
use crate::wire::client::flags::{Flags, Layout};
use crate::wire::client::frame::EncodeError;
use crate::wire::client::publish::{AckGranularity, AckRequest, ProducerSequence, PublishBatch};
use crate::wire::client::refusal::{ErrorDetail, Refusal, RetryClass, WireCode};
use crate::wire::client::{EventBatch, Payloads};
use crate::wire::internal::hex::{from_hex, to_hex};

#[derive(Serialize, Deserialize)]
#[serde(tag = "kind")]
pub enum BinaryForm {
    #[serde(rename = "binary_publish_batch")]
    PublishBatch(PublishForm),
    #[serde(rename = "binary_publish_ack")]
    PublishAck(AckForm),
    #[serde(rename = "binary_event_batch")]
    EventBatch(EventForm),
    #[serde(rename = "binary_event_batch_shared")]
    EventBatchShared(EventForm),
}

#[derive(Serialize, Deserialize)]
pub struct PublishForm {
    flags: Option<u16>,
    request_id: Option<u64>,
    ack: Option<AckWord>,
    producer_id: Option<u64>,
    sequence: Option<u64>,
    key_hex: Option<Hex>,
    tenant_id: String,
    namespace: String,
    stream: String,
    payloads_hex: Vec<Hex>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum AckWord {
    PerMessage,
    PerBatch,
}

#[derive(Serialize, Deserialize)]
pub struct AckForm {
    flags: Option<u16>,
    request_id: u64,
    status: StatusWord,
    message: Option<String>,
    code: Option<WireCode>,
    retry: Option<RetryClass>,
    detail: Option<DetailForm>,
    owner: Option<OwnerForm>,
    offset: Option<u64>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum StatusWord {
    Ok,
    Error,
}

#[derive(Serialize, Deserialize)]
struct DetailForm {
    reason: Option<String>,
    retry_after_ms: Option<u64>,
}

#[derive(Serialize, Deserialize)]
struct OwnerForm {
    node_id: String,
    addr: Option<String>,
    generation: u64,
}

#[derive(Serialize, Deserialize)]
pub struct EventForm {
    flags: Option<u16>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    subscription_id: Option<u64>,
    base_offset: Option<u64>,
    #[serde(default)]
    skipped_before: u64,
    publisher_hex: Option<Hex>,
    timestamps: Option<Vec<u64>>,
    payloads_hex: Vec<Hex>,
}

/// Bytes that stand in JSON as hex.
struct Hex(Bytes);

impl Serialize for Hex {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&to_hex(&self.0))
    }
}

impl<'de> Deserialize<'de> for Hex {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let bytes = from_hex(&text).map_err(serde::de::Error::custom)?;
        Ok(Hex(Bytes::from(bytes)))
    }
}

impl BinaryForm {
    pub fn of_publish(flags: Flags, batch: &PublishBatch) -> BinaryForm {
        BinaryForm::PublishBatch(PublishForm {
            flags: Some(flags.bits()),
            request_id: batch.ack.map(|ack| ack.request_id),
            ack: batch.ack.map(|ack| match ack.granularity {
                AckGranularity::PerMessage => AckWord::PerMessage,
                AckGranularity::PerBatch => AckWord::PerBatch,
            }),
            producer_id: batch.producer.map(|producer| producer.producer_id),
            sequence: batch.producer.map(|producer| producer.sequence),
            key_hex: batch.key.clone().map(Hex),
            tenant_id: batch.tenant_id.as_str().to_owned(),
            namespace: batch.namespace.as_str().to_owned(),
            stream: batch.stream.as_str().to_owned(),
            payloads_hex: batch
                .payloads
                .iter()
                .map(|payload| Hex(Bytes::copy_from_slice(payload)))
                .collect(),
        })
    }

    pub fn of_ack(flags: Flags, ack: &PublishAck) -> BinaryForm {
        let (offset, refusal) = match &ack.outcome {
            PublishOutcome::Accepted { offset } => (*offset, None),
            PublishOutcome::Failed(refusal) => (None, Some(refusal)),
        };
        BinaryForm::PublishAck(AckForm {
            flags: Some(flags.bits()),
            request_id: ack.request_id,
            status: match refusal {
                None => StatusWord::Ok,
                Some(_) => StatusWord::Error,
            },
            message: refusal.map(|refusal| refusal.message.clone().into_owned()),
            code: refusal.and_then(|refusal| refusal.code.clone()),
            retry: refusal.and_then(|refusal| refusal.retry),
            detail: refusal
                .and_then(|refusal| refusal.detail.as_ref())
                .map(|detail| DetailForm {
                    reason: detail.reason.clone().map(Cow::into_owned),
                    retry_after_ms: detail.retry_after_ms,
                }),
            owner: ack.owner.as_ref().map(|owner| OwnerForm {
                node_id: owner.node_id.clone(),
                addr: owner.addr.clone(),
                generation: owner.generation,
            }),
            offset,
        })
    }

    pub fn of_events(flags: Flags, batch: &EventBatch) -> BinaryForm {
        let form = EventForm {
            flags: Some(flags.bits()),
            subscription_id: batch.subscription_id,
            base_offset: batch.base_offset,
            skipped_before: batch.skipped_before,
            publisher_hex: batch.publisher.clone().map(Hex),
            timestamps: batch.times_us.clone(),
            payloads_hex: batch.payloads.iter().cloned().map(Hex).collect(),
        };
        match batch.subscription_id {
            Some(_) => BinaryForm::EventBatch(form),
            None => BinaryForm::EventBatchShared(form),
        }
    }

    pub fn encode(self) -> Result<Bytes, EncodeError> {
        match self {
            BinaryForm::PublishBatch(form) => form.encode(),
            BinaryForm::PublishAck(form) => form.encode(),
            BinaryForm::EventBatch(form) => form.encode(true),
            BinaryForm::EventBatchShared(form) => form.encode(false),
        }
    }
}

/// The flags follow from the fields; if they are given as well they have to agree.
fn same_flags(given: Option<u16>, layout: Layout) -> Result<(), EncodeError> {
    match given {
        Some(bits) if bits != layout.flags().bits() => {
            let why = "the flags and the fields do not agree";
            Err(EncodeError::Contradiction(why))
        }
        _ => Ok(()),
    }
}

impl PublishForm {
    fn encode(self) -> Result<Bytes, EncodeError> {
        let ack = match (self.request_id, self.ack) {
            (None, None) => None,
            (Some(request_id), Some(word)) => Some(AckRequest {
                request_id,
                granularity: match word {
                    AckWord::PerMessage => AckGranularity::PerMessage,
                    AckWord::PerBatch => AckGranularity::PerBatch,
                },
            }),
            _ => {
                let why = "request_id and ack go together";
                return Err(EncodeError::Contradiction(why));
            }
        };
        let producer = match (self.producer_id, self.sequence) {
            (None, None) => None,
            (Some(producer_id), Some(sequence)) => Some(ProducerSequence {
                producer_id,
                sequence,
            }),
            _ => {
                let why = "producer_id and sequence go together";
                return Err(EncodeError::Contradiction(why));
            }
        };
        let payloads: Vec<Bytes> = self.payloads_hex.into_iter().map(|hex| hex.0).collect();
        let batch = PublishBatch {
            ack,
            producer,
            key: self.key_hex.map(|hex| hex.0),
            tenant_id: self.tenant_id.into(),
            namespace: self.namespace.into(),
            stream: self.stream.into(),
            payloads: Payloads::from_slices(&payloads)?,
        };
        same_flags(self.flags, Layout::Publish(batch.shape()))?;
        batch.encode()
    }
}

impl AckForm {
    fn encode(self) -> Result<Bytes, EncodeError> {
        let contradiction = |why| Err(EncodeError::Contradiction(why));
        let outcome = match self.status {
            StatusWord::Ok if self.code.is_some() || self.detail.is_some() => {
                return contradiction("a success has no code");
            }
            StatusWord::Ok => PublishOutcome::Accepted {
                offset: self.offset,
            },
            StatusWord::Error if self.offset.is_some() => {
                return contradiction("a failure has no offset");
            }
            StatusWord::Error => PublishOutcome::Failed(Refusal {
                message: self.message.unwrap_or_default().into(),
                code: self.code,
                retry: self.retry,
                detail: self.detail.map(|detail| ErrorDetail {
                    reason: detail.reason.map(Cow::Owned),
                    retry_after_ms: detail.retry_after_ms,
                }),
            }),
        };
        let ack = PublishAck {
            request_id: self.request_id,
            outcome,
            owner: self.owner.map(|owner| ShardOwner {
                node_id: owner.node_id,
                addr: owner.addr,
                generation: owner.generation,
            }),
        };
        same_flags(self.flags, Layout::Ack(ack.shape()))?;
        ack.encode()
    }
}

impl EventForm {
    fn encode(self, names_subscription: bool) -> Result<Bytes, EncodeError> {
        if self.subscription_id.is_some() != names_subscription {
            let why = "subscription_id belongs to binary_event_batch and only to it";
            return Err(EncodeError::Contradiction(why));
        }
        let batch = EventBatch {
            subscription_id: self.subscription_id,
            base_offset: self.base_offset,
            skipped_before: self.skipped_before,
            publisher: self.publisher_hex.map(|hex| hex.0),
            times_us: self.timestamps,
            payloads: self.payloads_hex.into_iter().map(|hex| hex.0).collect(),
        };
        same_flags(self.flags, Layout::Event(batch.shape()))?;
        batch.encode()
    }
}
