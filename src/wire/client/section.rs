//! The payload section of a publish batch: `u32 count`, then `count` times `u32 len` and payload.

use bytes::{BufMut, Bytes, BytesMut};

use super::body::{BodyError, Fields};

/// The payloads of a batch as they stand on the wire.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Payloads {
    section: Bytes,
    count: usize,
}

impl Payloads {
    /// Takes the section off the front of `bytes`; whatever is behind it is left out.
    pub(super) fn split_off(bytes: Bytes) -> Result<Payloads, BodyError> {
        let mut fields = Fields::new(bytes.clone());
        let count = fields.count(4)?;
        for _ in 0..count {
            let len = fields.u32("a payload length")?;
            fields.bytes("a payload", len as usize)?;
        }
        let used = bytes.len() - fields.left();
        Ok(Payloads {
            section: bytes.slice(..used),
            count,
        })
    }

    /// The section of these payloads.
    pub fn from_slices<P: AsRef<[u8]>>(payloads: &[P]) -> Payloads {
        let mut section = BytesMut::new();
        section.put_u32(payloads.len() as u32);
        for payload in payloads {
            section.put_u32(payload.as_ref().len() as u32);
            section.put_slice(payload.as_ref());
        }
        Payloads {
            section: section.freeze(),
            count: payloads.len(),
        }
    }

    pub fn as_wire(&self) -> &Bytes {
        &self.section
    }

    pub fn len(&self) -> usize {
        self.count
    }

    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        let mut rest = self.section.get(4..).unwrap_or_default();
        std::iter::from_fn(move || {
            let (len, after) = rest.split_first_chunk::<4>()?;
            let (payload, after) = after.split_at_checked(u32::from_be_bytes(*len) as usize)?;
            rest = after;
            Some(payload)
        })
    }
}
