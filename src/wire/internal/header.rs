//! The frozen 12-byte header, and the 8 bytes every body starts with.

use super::error::FatalReason;
use crate::ids::CorrelationId;
use crate::limits::MAX_INTERNAL_BODY_BYTES;

/// "FLXI", the first four bytes of every frame.
pub const MAGIC: u32 = 0x464C_5849;
/// The protocol version spoken.
pub const VERSION: u16 = 1;
/// Magic, version, kind and length.
pub const HEADER_BYTES: usize = 12;
/// Every body, of every kind past and future, starts with its correlation id.
pub const CORRELATION_BYTES: usize = 8;

/// A header that passed every check but the kind's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// The kind as it stands on the wire, known or not.
    pub kind: u16,
    /// Bytes of body that follow: [`CORRELATION_BYTES`] to the limit.
    pub length_bytes: u32,
}

impl Header {
    /// Checks in the order the protocol fixes: magic, version, length. A body too short for a
    /// correlation id is fatal for every kind, because nothing could be answered to it.
    pub fn parse(bytes: &[u8; HEADER_BYTES], limit_bytes: u32) -> Result<Self, FatalReason> {
        let [m0, m1, m2, m3, v0, v1, k0, k1, l0, l1, l2, l3] = *bytes;
        let found = u32::from_be_bytes([m0, m1, m2, m3]);
        if found != MAGIC {
            return Err(FatalReason::WrongMagic { found });
        }
        let found = u16::from_be_bytes([v0, v1]);
        if found != VERSION {
            return Err(FatalReason::WrongVersion { found });
        }
        let kind = u16::from_be_bytes([k0, k1]);
        let length_bytes = u32::from_be_bytes([l0, l1, l2, l3]);
        let limit_bytes = limit_bytes.min(MAX_INTERNAL_BODY_BYTES);
        if length_bytes > limit_bytes {
            return Err(FatalReason::LengthOverLimit {
                kind,
                length_bytes,
                limit_bytes,
            });
        }
        if (length_bytes as usize) < CORRELATION_BYTES {
            return Err(FatalReason::NoCorrelationId { kind, length_bytes });
        }
        Ok(Self { kind, length_bytes })
    }

    /// The header's bytes.
    pub fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let [m0, m1, m2, m3] = MAGIC.to_be_bytes();
        let [v0, v1] = VERSION.to_be_bytes();
        let [k0, k1] = self.kind.to_be_bytes();
        let [l0, l1, l2, l3] = self.length_bytes.to_be_bytes();
        [m0, m1, m2, m3, v0, v1, k0, k1, l0, l1, l2, l3]
    }
}

/// The correlation id at the start of a body; `None` under 8 bytes.
pub fn correlation_of(body: &[u8]) -> Option<CorrelationId> {
    let first = body.first_chunk::<CORRELATION_BYTES>()?;
    Some(CorrelationId(u64::from_be_bytes(*first)))
}
