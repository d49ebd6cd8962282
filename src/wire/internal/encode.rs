//! Messages to bytes.
//!
//! Text, credentials and payload sections are bounded where they are made, so the one thing left
//! to refuse here is a body over the limit; that is checked before a byte is written.

use bytes::{BufMut, Bytes, BytesMut};

use super::error::EncodeError;
use super::header::{Header, CORRELATION_BYTES, HEADER_BYTES};
use super::kind::Kind;
use super::message::{CacheOp, Message, Records, Refusal, ShardRef};
use super::payloads::Payloads;
use super::text::{Credential, Text};
use super::AckMode;
use crate::ids::{CorrelationId, Offset};
use crate::limits::MAX_INTERNAL_BODY_BYTES;

const PREFIX_BYTES: usize = 4;
/// A [`ShardRef`] without its three names.
const SHARD_REF_FIXED_BYTES: usize = 3 * PREFIX_BYTES + 4 + 8;

/// The whole frame in one buffer of its own.
pub fn encode(message: &Message) -> Result<Bytes, EncodeError> {
    let mut out = BytesMut::new();
    encode_into(message, &mut out)?;
    Ok(out.freeze())
}

/// Appends the whole frame to `out`; on an error `out` is as it was. For answers that leave
/// together.
pub fn encode_into(message: &Message, out: &mut BytesMut) -> Result<(), EncodeError> {
    let body_bytes = body_bytes(message);
    let header = header(message.kind(), body_bytes)?;
    out.reserve(HEADER_BYTES + body_bytes);
    let frame_end = out.len() + HEADER_BYTES + body_bytes;
    out.put_slice(&header);
    out.put_u64(message.correlation().0);
    put_fields(message, out);
    debug_assert_eq!(out.len(), frame_end, "body_bytes and put_fields disagree");
    Ok(())
}

/// A forwarded publish in three pieces that are sent one behind the other: the header and fixed
/// fields, the payload section as it is, the credential as it is (empty without one, which makes
/// it kind 1). Neither payloads nor credential are copied.
pub fn forward_publish_parts(
    correlation: CorrelationId,
    shard: &ShardRef,
    ack: AckMode,
    payloads: &Payloads,
    credential: Option<&Credential>,
) -> Result<[Bytes; 3], EncodeError> {
    let mut scratch = BytesMut::new();
    forward_publish_parts_in(&mut scratch, correlation, shard, ack, payloads, credential)
}

/// [`forward_publish_parts`] with the first piece split off `scratch`, so that many forwards
/// share one allocation.
pub fn forward_publish_parts_in(
    scratch: &mut BytesMut,
    correlation: CorrelationId,
    shard: &ShardRef,
    ack: AckMode,
    payloads: &Payloads,
    credential: Option<&Credential>,
) -> Result<[Bytes; 3], EncodeError> {
    let (kind, credential) = match credential {
        Some(credential) => (Kind::AuthorizedForwardPublish, credential.as_wire().clone()),
        None => (Kind::ForwardPublish, Bytes::new()),
    };
    let head_bytes = CORRELATION_BYTES + shard_ref_bytes(shard) + 1;
    let header = header(
        kind,
        head_bytes + payloads.as_wire().len() + credential.len(),
    )?;
    scratch.reserve(HEADER_BYTES + head_bytes);
    scratch.put_slice(&header);
    scratch.put_u64(correlation.0);
    put_shard_ref(shard, scratch);
    scratch.put_u8(ack.code());
    Ok([
        scratch.split().freeze(),
        payloads.as_wire().clone(),
        credential,
    ])
}

/// A records batch in two pieces: everything up to the checksum, and the payload section as it
/// is. The checksum sent is `records.checksum`.
pub fn records_parts(records: &Records) -> Result<[Bytes; 2], EncodeError> {
    let head_bytes = CORRELATION_BYTES + shard_ref_bytes(&records.shard) + 8 + 8;
    let section = records.payloads.as_wire();
    let header = header(Kind::records(records.log), head_bytes + section.len())?;
    let mut head = BytesMut::with_capacity(HEADER_BYTES + head_bytes);
    head.put_slice(&header);
    head.put_u64(records.correlation.0);
    put_records_head(records, &mut head);
    Ok([head.freeze(), section.clone()])
}

/// A `ForwardPublishOk` frame, without allocating.
pub fn publish_ok_frame(
    correlation: CorrelationId,
    first_offset: Offset,
    last_offset: Offset,
) -> [u8; 36] {
    fixed_frame(
        Kind::ForwardPublishOk,
        [correlation.0, first_offset.0, last_offset.0],
    )
}

/// A `ReplicateOk` frame, without allocating.
pub fn replicate_ok_frame(correlation: CorrelationId, durable_offset: Offset) -> [u8; 28] {
    fixed_frame(Kind::ReplicateOk, [correlation.0, durable_offset.0])
}

/// A frame whose body is `WORDS` numbers; `FRAME` is 12 + 8 * `WORDS`.
fn fixed_frame<const WORDS: usize, const FRAME: usize>(
    kind: Kind,
    words: [u64; WORDS],
) -> [u8; FRAME] {
    const { assert!(FRAME == HEADER_BYTES + 8 * WORDS) };
    let mut frame = [0; FRAME];
    let header = Header {
        kind: kind.code(),
        length_bytes: 8 * WORDS as u32,
    };
    frame[..HEADER_BYTES].copy_from_slice(&header.to_bytes());
    for (place, word) in frame[HEADER_BYTES..].chunks_exact_mut(8).zip(words) {
        place.copy_from_slice(&word.to_be_bytes());
    }
    frame
}

fn header(kind: Kind, body_bytes: usize) -> Result<[u8; HEADER_BYTES], EncodeError> {
    if body_bytes > MAX_INTERNAL_BODY_BYTES as usize {
        return Err(EncodeError::BodyTooLarge { bytes: body_bytes });
    }
    Ok(Header {
        kind: kind.code(),
        length_bytes: body_bytes as u32,
    }
    .to_bytes())
}

/// Cannot overflow: text, credentials and payload sections are bounded far below `usize`, and a
/// cache value is at most `isize::MAX` like every buffer.
fn body_bytes(message: &Message) -> usize {
    CORRELATION_BYTES
        + match message {
            Message::ForwardPublish(m) => {
                shard_ref_bytes(&m.shard)
                    + 1
                    + m.payloads.as_wire().len()
                    + credential_bytes(m.credential.as_ref())
            }
            Message::ForwardPublishOk { .. } => 8 + 8,
            Message::ForwardPublishError(m) | Message::CacheError(m) => 2 + text_bytes(&m.detail),
            Message::NotLeader(m) => text_bytes(&m.node_id) + text_bytes(&m.advertise_addr) + 8,
            Message::Hello(m) | Message::HelloOk(m) => text_bytes(&m.node_id),
            Message::Records(m) => shard_ref_bytes(&m.shard) + 8 + 8 + m.payloads.as_wire().len(),
            Message::Bootstrap(m) => shard_ref_bytes(&m.shard) + 8,
            Message::Rebuild(m) => shard_ref_bytes(&m.shard) + 1 + 8,
            Message::ReplicateOk { .. } => 8,
            Message::ReplicateError(m) => 2 + 8 + text_bytes(&m.detail),
            Message::CacheOp(m) => {
                shard_ref_bytes(&m.shard)
                    + 1
                    + text_bytes(&m.key)
                    + 8
                    + PREFIX_BYTES
                    + m.value.len()
                    + credential_bytes(m.credential.as_ref())
            }
            Message::CacheOk(m) => 1 + m.value.as_ref().map_or(0, |v| PREFIX_BYTES + v.len()),
        }
}

/// Everything behind the correlation id.
fn put_fields(message: &Message, out: &mut BytesMut) {
    match message {
        Message::ForwardPublish(m) => {
            put_shard_ref(&m.shard, out);
            out.put_u8(m.ack.code());
            out.put_slice(m.payloads.as_wire());
            put_credential(m.credential.as_ref(), out);
        }
        Message::ForwardPublishOk {
            first_offset,
            last_offset,
            ..
        } => {
            out.put_u64(first_offset.0);
            out.put_u64(last_offset.0);
        }
        Message::ForwardPublishError(m) | Message::CacheError(m) => put_refusal(m, out),
        Message::NotLeader(m) => {
            put_text(&m.node_id, out);
            put_text(&m.advertise_addr, out);
            out.put_u64(m.generation.0);
        }
        Message::Hello(m) | Message::HelloOk(m) => put_text(&m.node_id, out),
        Message::Records(m) => {
            put_records_head(m, out);
            out.put_slice(m.payloads.as_wire());
        }
        Message::Bootstrap(m) => {
            put_shard_ref(&m.shard, out);
            out.put_u64(m.base_offset.0);
        }
        Message::Rebuild(m) => {
            put_shard_ref(&m.shard, out);
            out.put_u8(m.log.code());
            out.put_u64(m.base_offset.0);
        }
        Message::ReplicateOk { durable_offset, .. } => out.put_u64(durable_offset.0),
        Message::ReplicateError(m) => {
            out.put_u16(m.code.code());
            out.put_u64(m.expected_offset.0);
            put_text(&m.detail, out);
        }
        Message::CacheOp(m) => put_cache_op(m, out),
        Message::CacheOk(m) => match &m.value {
            None => out.put_u8(0),
            Some(value) => {
                out.put_u8(1);
                put_prefixed(value, out);
            }
        },
    }
}

fn put_cache_op(m: &CacheOp, out: &mut BytesMut) {
    put_shard_ref(&m.shard, out);
    out.put_u8(m.op.code());
    put_text(&m.key, out);
    out.put_u64(m.ttl_ms);
    put_prefixed(&m.value, out);
    put_credential(m.credential.as_ref(), out);
}

fn put_records_head(m: &Records, out: &mut BytesMut) {
    put_shard_ref(&m.shard, out);
    out.put_u64(m.first_offset.0);
    out.put_u64(m.checksum);
}

fn put_refusal(m: &Refusal, out: &mut BytesMut) {
    out.put_u16(m.code.code());
    put_text(&m.detail, out);
}

fn put_shard_ref(shard: &ShardRef, out: &mut BytesMut) {
    put_text(&shard.tenant, out);
    put_text(&shard.namespace, out);
    put_text(&shard.stream, out);
    out.put_u32(shard.shard);
    out.put_u64(shard.generation.0);
}

fn shard_ref_bytes(shard: &ShardRef) -> usize {
    SHARD_REF_FIXED_BYTES + shard.tenant.len() + shard.namespace.len() + shard.stream.len()
}

fn put_text(text: &Text, out: &mut BytesMut) {
    put_prefixed(text.as_str().as_bytes(), out);
}

fn text_bytes(text: &Text) -> usize {
    PREFIX_BYTES + text.len()
}

fn put_credential(credential: Option<&Credential>, out: &mut BytesMut) {
    if let Some(credential) = credential {
        out.put_slice(credential.as_wire());
    }
}

fn credential_bytes(credential: Option<&Credential>) -> usize {
    credential.map_or(0, |credential| credential.as_wire().len())
}

/// The body bound, checked before, keeps every length within its prefix.
fn put_prefixed(bytes: &[u8], out: &mut BytesMut) {
    out.put_u32(bytes.len() as u32);
    out.put_slice(bytes);
}
