//! The twelve bytes in front of every body, and finished frames.
//!
//! Does not read from a connection (see [`super::reader`]) and does not look into bodies.

use bytes::{BufMut, Bytes, BytesMut};

use super::flags::{Flags, FlagsError};
use crate::limits::MAX_CLIENT_FRAME_BYTES;

/// `FLX1`, the first bytes of every frame.
pub const MAGIC: [u8; 4] = *b"FLX1";
/// The only version of the framing.
pub const VERSION: u16 = 1;
/// Bytes before the body.
pub const HEADER_BYTES: usize = 12;

/// The checked header of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHeader {
    pub flags: Flags,
    pub body_bytes: u32,
}

impl FrameHeader {
    /// Checks magic, version and flag bits. The length is not judged: that is the reader's limit.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<FrameHeader, HeaderError> {
        let [m0, m1, m2, m3, v0, v1, f0, f1, l0, l1, l2, l3] = *bytes;
        if [m0, m1, m2, m3] != MAGIC {
            return Err(HeaderError::Magic([m0, m1, m2, m3]));
        }
        let version = u16::from_be_bytes([v0, v1]);
        if version != VERSION {
            return Err(HeaderError::Version(version));
        }
        Ok(FrameHeader {
            flags: Flags::from_bits(u16::from_be_bytes([f0, f1]))?,
            body_bytes: u32::from_be_bytes([l0, l1, l2, l3]),
        })
    }

    /// The header's bytes.
    pub fn encode(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&VERSION.to_be_bytes());
        bytes[6..8].copy_from_slice(&self.flags.bits().to_be_bytes());
        bytes[8..].copy_from_slice(&self.body_bytes.to_be_bytes());
        bytes
    }
}

/// Why bytes are not the start of a frame. No frame boundary is known after it: the stream ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    #[error("the frame does not start with FLX1 but with {0:02x?}")]
    Magic([u8; 4]),
    #[error("the frame has version {0}, not 1")]
    Version(u16),
    #[error(transparent)]
    Flags(#[from] FlagsError),
}

/// One whole frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    pub flags: Flags,
    pub body: Bytes,
}

/// Why a message has no frame. Nothing was written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    #[error("{field} has {len} bytes; the frame has room for {max}")]
    FieldTooLong {
        field: &'static str,
        len: usize,
        max: usize,
    },
    #[error("the body would have {len} bytes; a frame has at most {MAX_CLIENT_FRAME_BYTES}")]
    BodyTooLarge { len: usize },
    #[error("{0}")]
    Contradiction(&'static str),
    #[error(transparent)]
    Payloads(#[from] crate::wire::internal::EncodeError),
    #[error("the message has no JSON form: {0}")]
    Json(String),
}

/// A frame under construction: the header is filled in last, when the length is known.
pub(super) struct FrameBuilder {
    bytes: BytesMut,
}

impl FrameBuilder {
    pub fn with_body_capacity(body_bytes: usize) -> FrameBuilder {
        let mut bytes = BytesMut::with_capacity(HEADER_BYTES + body_bytes);
        bytes.put_bytes(0, HEADER_BYTES);
        FrameBuilder { bytes }
    }

    pub fn put_u8(&mut self, value: u8) {
        self.bytes.put_u8(value);
    }

    pub fn put_u16(&mut self, value: u16) {
        self.bytes.put_u16(value);
    }

    pub fn put_u64(&mut self, value: u64) {
        self.bytes.put_u64(value);
    }

    pub fn put_slice(&mut self, value: &[u8]) {
        self.bytes.put_slice(value);
    }

    /// A field with a two-byte length.
    pub fn put_short(&mut self, field: &'static str, value: &[u8]) -> Result<(), EncodeError> {
        let max = usize::from(u16::MAX);
        let len = u16::try_from(value.len()).map_err(|_| EncodeError::FieldTooLong {
            field,
            len: value.len(),
            max,
        })?;
        self.put_u16(len);
        self.put_slice(value);
        Ok(())
    }

    /// The first part of a frame whose body goes on for `tail_bytes` more.
    pub fn finish_with_tail(
        mut self,
        flags: Flags,
        tail_bytes: usize,
    ) -> Result<Bytes, EncodeError> {
        let body = self.bytes.len() - HEADER_BYTES;
        let header = FrameHeader {
            flags,
            body_bytes: body_length(body.saturating_add(tail_bytes))?,
        };
        self.bytes[..HEADER_BYTES].copy_from_slice(&header.encode());
        Ok(self.bytes.freeze())
    }

    pub fn finish(self, flags: Flags) -> Result<Bytes, EncodeError> {
        self.finish_with_tail(flags, 0)
    }
}

/// The length field of a body, unless no reader would take it.
pub(super) fn body_length(len: usize) -> Result<u32, EncodeError> {
    match u32::try_from(len) {
        Ok(length) if length <= MAX_CLIENT_FRAME_BYTES => Ok(length),
        _ => Err(EncodeError::BodyTooLarge { len }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_survives_the_round_trip() {
        let header = FrameHeader {
            flags: Flags::PUBLISH_BATCH | Flags::PUBLISH_ACKED,
            body_bytes: 0x0102_0304,
        };
        let bytes = header.encode();
        assert_eq!(&bytes, b"FLX1\x00\x01\x00\x09\x01\x02\x03\x04");
        assert_eq!(FrameHeader::decode(&bytes), Ok(header));
    }

    #[test]
    fn a_body_over_the_limit_is_not_written() {
        let max = MAX_CLIENT_FRAME_BYTES as usize;
        let at = |len| FrameBuilder::with_body_capacity(0).finish_with_tail(Flags::JSON, len);
        assert!(at(max).is_ok());
        assert_eq!(at(max + 1), Err(EncodeError::BodyTooLarge { len: max + 1 }));
    }
}
