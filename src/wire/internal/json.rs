//! Frames as JSON, for operators' captures and for test vectors.
//!
//! One line in, one line out. Byte strings are lower-case hex, 64-bit numbers decimal strings
//! (many JSON readers lose precision past 2^53), smaller numbers and enumerations JSON numbers by
//! their wire value, an absent value `null`. Not on any data path.

use bytes::Bytes;
use serde_json::{json, Map, Value};

use super::codes::{AckMode, CacheOpKind, ErrorCode, ReplicaLog};
use super::decode::decode_frame;
use super::encode::encode;
use super::error::EncodeError;
use super::hex::{from_hex, to_hex, HexError};
use super::kind::Kind;
use super::message::{
    Bootstrap, CacheOk, CacheOp, ForwardPublish, Hello, Message, NotLeader, Rebuild, Records,
    Refusal, ReplicateRefusal, ShardRef,
};
use super::payloads::Payloads;
use super::text::{Credential, Text};
use crate::ids::{CorrelationId, Generation, Offset};

/// One frame in hex to one JSON object: `{"ok":true,"kind":..,"message":{..}}`, with
/// `checksum_ok` on records frames, or `{"ok":false,"error":..,"handling":..,"detail":..}`. A
/// line that is not hex has no `handling`.
pub fn decode_line(line: &str) -> Value {
    let frame = match from_hex(line.trim()) {
        Ok(frame) => Bytes::from(frame),
        Err(error) => return LineError::from(error).to_json(),
    };
    match decode_frame(frame) {
        Ok(message) => {
            let mut object = json!({
                "ok": true,
                "kind": message.kind().code(),
                "message": message_to_json(&message),
            });
            if let Message::Records(records) = &message {
                object["checksum_ok"] =
                    json!(records.checksum == records.payloads.batch_checksum());
            }
            object
        }
        Err(error) => json!({
            "ok": false,
            "error": error.name(),
            "handling": error.handling().name(),
            "correlation_id": error.correlation().map(|id| id.to_string()),
            "detail": error.to_string(),
        }),
    }
}

/// One `{"kind":N,"message":{..}}` line to one frame in hex.
pub fn encode_line(line: &str) -> Result<String, LineError> {
    let value: Value =
        serde_json::from_str(line).map_err(|error| LineError::NotJson(error.to_string()))?;
    let line = Object::of(&value, "line")?;
    let kind = line.number::<u16>("kind")?;
    let kind = Kind::from_code(kind).ok_or(LineError::UnknownKind(kind))?;
    let message = message_from_json(kind, &line.object("message")?)?;
    Ok(to_hex(&encode(&message)?))
}

/// Why a line gives no frame.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LineError {
    #[error(transparent)]
    NotHex(#[from] HexError),
    #[error("not JSON: {0}")]
    NotJson(String),
    #[error("kind {0} is not known here")]
    UnknownKind(u16),
    #[error("field {0} is missing")]
    Missing(&'static str),
    #[error("field {field} is not {expected}")]
    WrongType {
        field: &'static str,
        expected: &'static str,
    },
    #[error("field {field} has no value {code}")]
    UnknownCode { field: &'static str, code: u16 },
    #[error("kind {0:?} carries no credential")]
    UnexpectedCredential(Kind),
    #[error(transparent)]
    Encode(#[from] EncodeError),
}

impl LineError {
    /// A stable name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::NotHex(_) => "not-hex",
            Self::NotJson(_) => "not-json",
            Self::UnknownKind(_) => "unknown-kind",
            Self::Missing(_) => "missing-field",
            Self::WrongType { .. } => "wrong-type",
            Self::UnknownCode { .. } => "unknown-code",
            Self::UnexpectedCredential(_) => "unexpected-credential",
            Self::Encode(_) => "cannot-encode",
        }
    }

    /// The line printed in place of a result.
    pub fn to_json(&self) -> Value {
        json!({"ok": false, "error": self.name(), "detail": self.to_string()})
    }
}

fn message_to_json(message: &Message) -> Value {
    let correlation_id = message.correlation().to_string();
    match message {
        Message::ForwardPublish(m) => with_credential(
            json!({
                "correlation_id": correlation_id,
                "shard": shard_to_json(&m.shard),
                "ack": m.ack.code(),
                "payloads": payloads_to_json(&m.payloads),
            }),
            m.credential.as_ref(),
        ),
        Message::ForwardPublishOk {
            first_offset,
            last_offset,
            ..
        } => json!({
            "correlation_id": correlation_id,
            "first_offset": first_offset.to_string(),
            "last_offset": last_offset.to_string(),
        }),
        Message::ForwardPublishError(m) | Message::CacheError(m) => json!({
            "correlation_id": correlation_id,
            "code": m.code.code(),
            "detail": m.detail.as_str(),
        }),
        Message::NotLeader(m) => json!({
            "correlation_id": correlation_id,
            "node_id": m.node_id.as_str(),
            "advertise_addr": m.advertise_addr.as_str(),
            "generation": m.generation.to_string(),
        }),
        Message::Hello(m) | Message::HelloOk(m) => json!({
            "correlation_id": correlation_id,
            "node_id": m.node_id.as_str(),
        }),
        Message::Records(m) => json!({
            "correlation_id": correlation_id,
            "shard": shard_to_json(&m.shard),
            "first_offset": m.first_offset.to_string(),
            "checksum": m.checksum.to_string(),
            "payloads": payloads_to_json(&m.payloads),
        }),
        Message::Bootstrap(m) => json!({
            "correlation_id": correlation_id,
            "shard": shard_to_json(&m.shard),
            "base_offset": m.base_offset.to_string(),
        }),
        Message::Rebuild(m) => json!({
            "correlation_id": correlation_id,
            "shard": shard_to_json(&m.shard),
            "log": m.log.code(),
            "base_offset": m.base_offset.to_string(),
        }),
        Message::ReplicateOk { durable_offset, .. } => json!({
            "correlation_id": correlation_id,
            "durable_offset": durable_offset.to_string(),
        }),
        Message::ReplicateError(m) => json!({
            "correlation_id": correlation_id,
            "code": m.code.code(),
            "expected_offset": m.expected_offset.to_string(),
            "detail": m.detail.as_str(),
        }),
        Message::CacheOp(m) => with_credential(
            json!({
                "correlation_id": correlation_id,
                "shard": shard_to_json(&m.shard),
                "op": m.op.code(),
                "key": m.key.as_str(),
                "ttl_ms": m.ttl_ms.to_string(),
                "value": to_hex(&m.value),
            }),
            m.credential.as_ref(),
        ),
        Message::CacheOk(m) => json!({
            "correlation_id": correlation_id,
            "value": m.value.as_ref().map(|value| to_hex(value)),
        }),
    }
}

fn with_credential(mut message: Value, credential: Option<&Credential>) -> Value {
    if let Some(credential) = credential {
        message["credential"] = json!(credential.as_str());
    }
    message
}

fn shard_to_json(shard: &ShardRef) -> Value {
    json!({
        "tenant_id": shard.tenant.as_str(),
        "namespace": shard.namespace.as_str(),
        "stream": shard.stream.as_str(),
        "shard": shard.shard,
        "generation": shard.generation.to_string(),
    })
}

fn payloads_to_json(payloads: &Payloads) -> Value {
    payloads.iter().map(to_hex).collect()
}

fn message_from_json(kind: Kind, m: &Object<'_>) -> Result<Message, LineError> {
    let correlation = CorrelationId(m.number("correlation_id")?);
    let records = |log| {
        Ok(Message::Records(Records {
            correlation,
            log,
            shard: m.shard()?,
            first_offset: m.offset("first_offset")?,
            checksum: m.number("checksum")?,
            payloads: m.payloads()?,
        }))
    };
    let bootstrap = |log| {
        Ok(Message::Bootstrap(Bootstrap {
            correlation,
            log,
            shard: m.shard()?,
            base_offset: m.offset("base_offset")?,
        }))
    };
    let refusal = || {
        Ok::<_, LineError>(Refusal {
            correlation,
            code: m.code("code", ErrorCode::from_code)?,
            detail: m.text("detail")?,
        })
    };
    let hello = || {
        Ok::<_, LineError>(Hello {
            correlation,
            node_id: m.text("node_id")?,
        })
    };
    match kind {
        Kind::ForwardPublish | Kind::AuthorizedForwardPublish => {
            Ok(Message::ForwardPublish(ForwardPublish {
                correlation,
                shard: m.shard()?,
                ack: m.code("ack", AckMode::from_code)?,
                payloads: m.payloads()?,
                credential: m.credential(kind)?,
            }))
        }
        Kind::ForwardPublishOk => Ok(Message::ForwardPublishOk {
            correlation,
            first_offset: m.offset("first_offset")?,
            last_offset: m.offset("last_offset")?,
        }),
        Kind::ForwardPublishError => refusal().map(Message::ForwardPublishError),
        Kind::NotLeader => Ok(Message::NotLeader(NotLeader {
            correlation,
            node_id: m.text("node_id")?,
            advertise_addr: m.text("advertise_addr")?,
            generation: Generation(m.number("generation")?),
        })),
        Kind::Hello => hello().map(Message::Hello),
        Kind::HelloOk => hello().map(Message::HelloOk),
        Kind::ReplicateRecords => records(ReplicaLog::Stream),
        Kind::ReplicateCacheRecords => records(ReplicaLog::Cache),
        Kind::ReplicateGroupRecords => records(ReplicaLog::GroupCursors),
        Kind::ReplicateDeadLetterRecords => records(ReplicaLog::GroupDeadLetters),
        Kind::ReplicateCounterRecords => records(ReplicaLog::Counters),
        Kind::ReplicateBootstrap => bootstrap(ReplicaLog::Stream),
        Kind::ReplicateCacheBootstrap => bootstrap(ReplicaLog::Cache),
        Kind::ReplicateGroupBootstrap => bootstrap(ReplicaLog::GroupCursors),
        Kind::ReplicateDeadLetterBootstrap => bootstrap(ReplicaLog::GroupDeadLetters),
        Kind::ReplicateCounterBootstrap => bootstrap(ReplicaLog::Counters),
        Kind::ReplicateRebuild => Ok(Message::Rebuild(Rebuild {
            correlation,
            shard: m.shard()?,
            log: m.code("log", ReplicaLog::from_code)?,
            base_offset: m.offset("base_offset")?,
        })),
        Kind::ReplicateOk => Ok(Message::ReplicateOk {
            correlation,
            durable_offset: m.offset("durable_offset")?,
        }),
        Kind::ReplicateError => Ok(Message::ReplicateError(ReplicateRefusal {
            correlation,
            code: m.code("code", ErrorCode::from_code)?,
            expected_offset: m.offset("expected_offset")?,
            detail: m.text("detail")?,
        })),
        Kind::ForwardCacheOp | Kind::AuthorizedForwardCacheOp => Ok(Message::CacheOp(CacheOp {
            correlation,
            shard: m.shard()?,
            op: m.code("op", CacheOpKind::from_code)?,
            key: m.text("key")?,
            ttl_ms: m.number("ttl_ms")?,
            value: m.bytes("value")?,
            credential: m.credential(kind)?,
        })),
        Kind::ForwardCacheOk => Ok(Message::CacheOk(CacheOk {
            correlation,
            value: match m.field("value")? {
                Value::Null => None,
                _ => Some(m.bytes("value")?),
            },
        })),
        Kind::ForwardCacheError => refusal().map(Message::CacheError),
    }
}

/// A JSON object whose fields are read by name and type.
struct Object<'a>(&'a Map<String, Value>);

impl<'a> Object<'a> {
    fn of(value: &'a Value, field: &'static str) -> Result<Self, LineError> {
        value.as_object().map(Self).ok_or(LineError::WrongType {
            field,
            expected: "an object",
        })
    }

    fn field(&self, field: &'static str) -> Result<&'a Value, LineError> {
        self.0.get(field).ok_or(LineError::Missing(field))
    }

    fn object(&self, field: &'static str) -> Result<Object<'a>, LineError> {
        Object::of(self.field(field)?, field)
    }

    fn str(&self, field: &'static str) -> Result<&'a str, LineError> {
        self.field(field)?.as_str().ok_or(LineError::WrongType {
            field,
            expected: "a string",
        })
    }

    fn text(&self, field: &'static str) -> Result<Text, LineError> {
        Ok(Text::new(self.str(field)?)?)
    }

    /// A number, as itself or as a decimal string.
    fn number<N: TryFrom<u64>>(&self, field: &'static str) -> Result<N, LineError> {
        let number = match self.field(field)? {
            Value::String(digits) => digits.parse().ok(),
            value => value.as_u64(),
        };
        number
            .and_then(|number| N::try_from(number).ok())
            .ok_or(LineError::WrongType {
                field,
                expected: "an unsigned number of its width",
            })
    }

    fn offset(&self, field: &'static str) -> Result<Offset, LineError> {
        self.number(field).map(Offset)
    }

    fn code<C: TryFrom<u64> + Copy + Into<u16>, T>(
        &self,
        field: &'static str,
        from_code: impl Fn(C) -> Option<T>,
    ) -> Result<T, LineError> {
        let code = self.number::<C>(field)?;
        from_code(code).ok_or(LineError::UnknownCode {
            field,
            code: code.into(),
        })
    }

    fn bytes(&self, field: &'static str) -> Result<Bytes, LineError> {
        Ok(Bytes::from(from_hex(self.str(field)?)?))
    }

    fn payloads(&self) -> Result<Payloads, LineError> {
        let wrong = LineError::WrongType {
            field: "payloads",
            expected: "a list of hex strings",
        };
        let list = self.field("payloads")?.as_array().ok_or(wrong.clone())?;
        let mut payloads = Vec::with_capacity(list.len());
        for payload in list {
            payloads.push(from_hex(payload.as_str().ok_or(wrong.clone())?)?);
        }
        Ok(Payloads::from_slices(payloads)?)
    }

    fn shard(&self) -> Result<ShardRef, LineError> {
        let shard = self.object("shard")?;
        Ok(ShardRef {
            tenant: shard.text("tenant_id")?,
            namespace: shard.text("namespace")?,
            stream: shard.text("stream")?,
            shard: shard.number("shard")?,
            generation: Generation(shard.number("generation")?),
        })
    }

    /// The kind says whether there must be one; dropping one silently would send a weaker kind.
    fn credential(&self, kind: Kind) -> Result<Option<Credential>, LineError> {
        match kind {
            Kind::AuthorizedForwardPublish | Kind::AuthorizedForwardCacheOp => {
                Ok(Some(Credential::new(self.str("credential")?)?))
            }
            _ if self.0.contains_key("credential") => Err(LineError::UnexpectedCredential(kind)),
            _ => Ok(None),
        }
    }
}
