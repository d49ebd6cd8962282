//! Bytes to messages.

use bytes::{Buf, Bytes};

use super::codes::{AckMode, CacheOpKind, ErrorCode, ReplicaLog};
use super::error::{BodyError, DecodeError, FatalReason};
use super::header::{correlation_of, Header, HEADER_BYTES};
use super::kind::Kind;
use super::message::{
    Bootstrap, CacheOk, CacheOp, ForwardPublish, Hello, Message, NotLeader, Rebuild, Records,
    Refusal, ReplicateRefusal, ShardRef,
};
use super::payloads::Payloads;
use super::text::{Credential, Text};
use crate::ids::{CorrelationId, Generation, Offset};
use crate::limits::MAX_INTERNAL_BODY_BYTES;

/// Decodes bytes that are exactly one frame. The message's payloads and text are slices of it.
pub fn decode_frame(mut frame: Bytes) -> Result<Message, DecodeError> {
    let Some(header) = frame.first_chunk::<HEADER_BYTES>() else {
        return Err(DecodeError::Truncated {
            have: frame.len(),
            need: HEADER_BYTES,
        });
    };
    let header = Header::parse(header, MAX_INTERNAL_BODY_BYTES)?;
    let need = HEADER_BYTES + header.length_bytes as usize;
    if frame.len() < need {
        return Err(DecodeError::Truncated {
            have: frame.len(),
            need,
        });
    }
    if frame.len() > need {
        return Err(DecodeError::BytesAfterFrame {
            extra: frame.len() - need,
        });
    }
    frame.advance(HEADER_BYTES);
    match Kind::from_code(header.kind) {
        Some(kind) => decode_body(kind, frame),
        None => Err(match correlation_of(&frame) {
            Some(correlation) => DecodeError::UnknownKind {
                kind: header.kind,
                correlation,
            },
            None => no_correlation(header.kind, frame.len()),
        }),
    }
}

/// Decodes a body whose kind is known from its header.
pub fn decode_body(kind: Kind, body: Bytes) -> Result<Message, DecodeError> {
    let Some(correlation) = correlation_of(&body) else {
        return Err(no_correlation(kind.code(), body.len()));
    };
    let mut fields = Fields {
        body,
        at: super::header::CORRELATION_BYTES,
    };
    fields
        .message(kind, correlation)
        .and_then(|message| fields.finish().map(|()| message))
        .map_err(|error| DecodeError::Body {
            kind,
            correlation,
            error,
        })
}

fn no_correlation(kind: u16, body_bytes: usize) -> DecodeError {
    DecodeError::Fatal(FatalReason::NoCorrelationId {
        kind,
        length_bytes: body_bytes as u32,
    })
}

/// A cursor over a body. `at` never passes the end.
struct Fields {
    body: Bytes,
    at: usize,
}

impl Fields {
    fn message(&mut self, kind: Kind, correlation: CorrelationId) -> Result<Message, BodyError> {
        match kind {
            Kind::ForwardPublish => self.forward_publish(correlation, false),
            Kind::AuthorizedForwardPublish => self.forward_publish(correlation, true),
            Kind::ForwardPublishOk => Ok(Message::ForwardPublishOk {
                correlation,
                first_offset: self.offset("first_offset")?,
                last_offset: self.offset("last_offset")?,
            }),
            Kind::ForwardPublishError => {
                self.refusal(correlation).map(Message::ForwardPublishError)
            }
            Kind::NotLeader => Ok(Message::NotLeader(NotLeader {
                correlation,
                node_id: self.text("node_id")?,
                advertise_addr: self.text("advertise_addr")?,
                generation: Generation(self.u64("generation")?),
            })),
            Kind::Hello => self.hello(correlation).map(Message::Hello),
            Kind::HelloOk => self.hello(correlation).map(Message::HelloOk),
            Kind::ReplicateRecords => self.records(correlation, ReplicaLog::Stream),
            Kind::ReplicateCacheRecords => self.records(correlation, ReplicaLog::Cache),
            Kind::ReplicateGroupRecords => self.records(correlation, ReplicaLog::GroupCursors),
            Kind::ReplicateDeadLetterRecords => {
                self.records(correlation, ReplicaLog::GroupDeadLetters)
            }
            Kind::ReplicateCounterRecords => self.records(correlation, ReplicaLog::Counters),
            Kind::ReplicateBootstrap => self.bootstrap(correlation, ReplicaLog::Stream),
            Kind::ReplicateCacheBootstrap => self.bootstrap(correlation, ReplicaLog::Cache),
            Kind::ReplicateGroupBootstrap => self.bootstrap(correlation, ReplicaLog::GroupCursors),
            Kind::ReplicateDeadLetterBootstrap => {
                self.bootstrap(correlation, ReplicaLog::GroupDeadLetters)
            }
            Kind::ReplicateCounterBootstrap => self.bootstrap(correlation, ReplicaLog::Counters),
            Kind::ReplicateRebuild => Ok(Message::Rebuild(Rebuild {
                correlation,
                shard: self.shard_ref()?,
                log: ReplicaLog::decode(self.u8("log")?)?,
                base_offset: self.offset("base_offset")?,
            })),
            Kind::ReplicateOk => Ok(Message::ReplicateOk {
                correlation,
                durable_offset: self.offset("durable_offset")?,
            }),
            Kind::ReplicateError => Ok(Message::ReplicateError(ReplicateRefusal {
                correlation,
                code: self.error_code()?,
                expected_offset: self.offset("expected_offset")?,
                detail: self.text("detail")?,
            })),
            Kind::ForwardCacheOp => self.cache_op(correlation, false),
            Kind::AuthorizedForwardCacheOp => self.cache_op(correlation, true),
            Kind::ForwardCacheOk => self.cache_ok(correlation),
            Kind::ForwardCacheError => self.refusal(correlation).map(Message::CacheError),
        }
    }

    fn forward_publish(
        &mut self,
        correlation: CorrelationId,
        authorized: bool,
    ) -> Result<Message, BodyError> {
        Ok(Message::ForwardPublish(ForwardPublish {
            correlation,
            shard: self.shard_ref()?,
            ack: AckMode::decode(self.u8("ack")?)?,
            payloads: self.payloads()?,
            credential: authorized.then(|| self.credential()).transpose()?,
        }))
    }

    fn records(
        &mut self,
        correlation: CorrelationId,
        log: ReplicaLog,
    ) -> Result<Message, BodyError> {
        Ok(Message::Records(Records {
            correlation,
            log,
            shard: self.shard_ref()?,
            first_offset: self.offset("first_offset")?,
            checksum: self.u64("checksum")?,
            payloads: self.payloads()?,
        }))
    }

    fn bootstrap(
        &mut self,
        correlation: CorrelationId,
        log: ReplicaLog,
    ) -> Result<Message, BodyError> {
        Ok(Message::Bootstrap(Bootstrap {
            correlation,
            log,
            shard: self.shard_ref()?,
            base_offset: self.offset("base_offset")?,
        }))
    }

    fn cache_op(
        &mut self,
        correlation: CorrelationId,
        authorized: bool,
    ) -> Result<Message, BodyError> {
        Ok(Message::CacheOp(CacheOp {
            correlation,
            shard: self.shard_ref()?,
            op: CacheOpKind::decode(self.u8("op")?)?,
            key: self.text("key")?,
            ttl_ms: self.u64("ttl_ms")?,
            value: self.prefixed("value")?,
            credential: authorized.then(|| self.credential()).transpose()?,
        }))
    }

    fn cache_ok(&mut self, correlation: CorrelationId) -> Result<Message, BodyError> {
        let value = match self.u8("present")? {
            0 => None,
            1 => Some(self.prefixed("value")?),
            value => return Err(BodyError::BadPresence { value }),
        };
        Ok(Message::CacheOk(CacheOk { correlation, value }))
    }

    fn hello(&mut self, correlation: CorrelationId) -> Result<Hello, BodyError> {
        Ok(Hello {
            correlation,
            node_id: self.text("node_id")?,
        })
    }

    fn refusal(&mut self, correlation: CorrelationId) -> Result<Refusal, BodyError> {
        Ok(Refusal {
            correlation,
            code: self.error_code()?,
            detail: self.text("detail")?,
        })
    }

    fn shard_ref(&mut self) -> Result<ShardRef, BodyError> {
        Ok(ShardRef {
            tenant: self.text("tenant_id")?,
            namespace: self.text("namespace")?,
            stream: self.text("stream")?,
            shard: self.u32("shard")?,
            generation: Generation(self.u64("generation")?),
        })
    }

    fn payloads(&mut self) -> Result<Payloads, BodyError> {
        let (payloads, end) = Payloads::parse_at(&self.body, self.at)?;
        self.at = end;
        Ok(payloads)
    }

    fn credential(&mut self) -> Result<Credential, BodyError> {
        let start = self.at;
        self.prefixed("credential")?;
        Credential::from_wire(self.body.slice(start..self.at))
    }

    fn text(&mut self, field: &'static str) -> Result<Text, BodyError> {
        Text::from_wire(self.prefixed(field)?, field)
    }

    fn prefixed(&mut self, field: &'static str) -> Result<Bytes, BodyError> {
        let need = self.u32(field)? as usize;
        let left = self.body.len() - self.at;
        if need > left {
            return Err(BodyError::PastEnd { field, need, left });
        }
        let bytes = self.body.slice(self.at..self.at + need);
        self.at += need;
        Ok(bytes)
    }

    fn error_code(&mut self) -> Result<ErrorCode, BodyError> {
        ErrorCode::decode(u16::from_be_bytes(self.array("code")?))
    }

    fn offset(&mut self, field: &'static str) -> Result<Offset, BodyError> {
        self.u64(field).map(Offset)
    }

    fn u64(&mut self, field: &'static str) -> Result<u64, BodyError> {
        self.array(field).map(u64::from_be_bytes)
    }

    fn u32(&mut self, field: &'static str) -> Result<u32, BodyError> {
        self.array(field).map(u32::from_be_bytes)
    }

    fn u8(&mut self, field: &'static str) -> Result<u8, BodyError> {
        self.array(field).map(u8::from_be_bytes)
    }

    fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], BodyError> {
        let rest = self.body.get(self.at..).unwrap_or_default();
        match rest.first_chunk::<N>() {
            Some(bytes) => {
                self.at += N;
                Ok(*bytes)
            }
            None => Err(BodyError::PastEnd {
                field,
                need: N,
                left: rest.len(),
            }),
        }
    }

    fn finish(&self) -> Result<(), BodyError> {
        match self.body.len() - self.at {
            0 => Ok(()),
            extra => Err(BodyError::TrailingBytes { extra }),
        }
    }
}
