//! The frames two brokers exchange: kinds 1 to 24 of the internal protocol, version 1.
//!
//! Duty: bytes to typed messages and back, the incremental reader over a byte stream, and the
//! classification of what cannot be read (close, refuse, wait).
//!
//! What it does not do: decide anything about a readable message. Generations, ownership,
//! credentials, the batch checksum's truth and empty names are judged by the layers above.
//!
//! Invariants:
//! * No input makes it panic, and nothing is allocated in proportion to a number that was read
//!   before the bytes behind that number have arrived.
//! * One encoding per message: what decodes encodes back to the same bytes.
//! * Payloads, text and values are slices of the frame they arrived in, never copies. Whoever
//!   keeps one for longer than the request should copy it, or it keeps the whole frame alive.

mod codes;
mod decode;
mod encode;
mod error;
mod header;
pub mod hex;
pub mod json;
mod kind;
mod message;
mod payloads;
mod reader;
mod sides;
mod text;

pub use codes::{AckMode, CacheOpKind, ErrorCode, ReplicaLog, Retry};
pub use decode::{decode_body, decode_frame};
pub use encode::{
    encode, encode_into, forward_publish_parts, forward_publish_parts_in, publish_ok_frame,
    records_parts, replicate_ok_frame,
};
pub use error::{BodyError, DecodeError, EncodeError, FatalReason, Handling};
pub use header::{correlation_of, Header, CORRELATION_BYTES, HEADER_BYTES, MAGIC, VERSION};
pub use kind::{Family, Kind, Role};
pub use message::{
    Bootstrap, CacheOk, CacheOp, ForwardPublish, Hello, Message, NotLeader, Rebuild, Records,
    Refusal, ReplicateRefusal, ShardRef,
};
pub use payloads::{batch_checksum, Payloads, PayloadsIter};
pub use reader::{BrokenStream, FrameReader, ReadEvent};
pub use sides::{
    on_answer_event, on_request_event, refusal, unsupported_kind_refusal, AnswerFault, Inbound,
};
pub use text::{Credential, Text};
