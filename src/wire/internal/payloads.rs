//! A batch of payloads as the one contiguous section it travels as.
//!
//! The section is `u32 count`, then per payload `u32 length` and its bytes. The client
//! protocol's publish batch uses the identical section, so a forward ships the client's bytes
//! as they are. Invariant: the section was walked once from end to end at construction, so
//! [`Payloads::iter`] yields exactly [`Payloads::len`] slices.

use std::fmt;

use bytes::{BufMut, Bytes, BytesMut};

use super::error::{BodyError, EncodeError};
use crate::limits::{MAX_INTERNAL_BODY_BYTES, MAX_PAYLOADS};

const COUNT_BYTES: usize = 4;
const PREFIX_BYTES: usize = 4;
const FIELD: &str = "payloads";

/// A validated payload section. Cloning is a reference count.
#[derive(Clone, PartialEq, Eq)]
pub struct Payloads {
    section: Bytes,
    count: u32,
}

impl Payloads {
    /// No payloads.
    pub const fn empty() -> Self {
        Self {
            section: Bytes::from_static(&[0; COUNT_BYTES]),
            count: 0,
        }
    }

    /// Copies `payloads` into a new section.
    pub fn from_slices<I>(payloads: I) -> Result<Self, EncodeError>
    where
        I: IntoIterator,
        I::Item: AsRef<[u8]>,
    {
        let mut section = BytesMut::with_capacity(64);
        section.put_u32(0);
        let mut count = 0usize;
        for payload in payloads {
            let payload = payload.as_ref();
            count += 1;
            if count > MAX_PAYLOADS as usize {
                return Err(EncodeError::TooManyPayloads { count });
            }
            let bytes = section.len() + PREFIX_BYTES + payload.len();
            if bytes > MAX_INTERNAL_BODY_BYTES as usize {
                return Err(EncodeError::BodyTooLarge { bytes });
            }
            section.put_u32(payload.len() as u32);
            section.put_slice(payload);
        }
        section[..COUNT_BYTES].copy_from_slice(&(count as u32).to_be_bytes());
        Ok(Self {
            section: section.freeze(),
            count: count as u32,
        })
    }

    /// Validates bytes that are one section and nothing else. No copy.
    pub fn from_wire_section(section: Bytes) -> Result<Self, BodyError> {
        let (payloads, end) = Self::parse_at(&section, 0)?;
        match section.len() - end {
            0 => Ok(payloads),
            extra => Err(BodyError::TrailingBytes { extra }),
        }
    }

    /// Validates the section that starts at `start` of `body` and returns it with the index of
    /// the byte behind it. No copy.
    pub fn parse_at(body: &Bytes, start: usize) -> Result<(Self, usize), BodyError> {
        let past_end = |need: usize, left: usize| BodyError::PastEnd {
            field: FIELD,
            need,
            left,
        };
        let rest = body.get(start..).unwrap_or_default();
        let Some((count, mut rest)) = rest.split_first_chunk::<COUNT_BYTES>() else {
            return Err(past_end(COUNT_BYTES, rest.len()));
        };
        let count = u32::from_be_bytes(*count);
        if count > MAX_PAYLOADS {
            return Err(BodyError::TooManyPayloads { count });
        }
        // Each payload costs at least its prefix. Checked before walking, so that a false count
        // costs nothing.
        if count as usize > rest.len() / PREFIX_BYTES {
            return Err(past_end(count as usize * PREFIX_BYTES, rest.len()));
        }
        for _ in 0..count {
            let Some((prefix, behind)) = rest.split_first_chunk::<PREFIX_BYTES>() else {
                return Err(past_end(PREFIX_BYTES, rest.len()));
            };
            let length = u32::from_be_bytes(*prefix) as usize;
            rest = behind
                .get(length..)
                .ok_or_else(|| past_end(length, behind.len()))?;
        }
        let end = body.len() - rest.len();
        let section = body.slice(start..end);
        Ok((Self { section, count }, end))
    }

    /// How many payloads there are.
    pub fn len(&self) -> usize {
        self.count as usize
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The payloads' own bytes, prefixes not counted.
    pub fn total_payload_bytes(&self) -> usize {
        self.section.len() - COUNT_BYTES - PREFIX_BYTES * self.count as usize
    }

    /// The section as it travels.
    pub fn as_wire(&self) -> &Bytes {
        &self.section
    }

    /// The payloads in order.
    pub fn iter(&self) -> PayloadsIter<'_> {
        PayloadsIter {
            rest: &self.section[COUNT_BYTES..],
            left: self.count as usize,
        }
    }

    /// The payloads in order, as slices that keep the section alive.
    pub fn iter_bytes(&self) -> impl ExactSizeIterator<Item = Bytes> + '_ {
        self.iter().map(|payload| self.section.slice_ref(payload))
    }

    /// The batch checksum. The protocol hashes every payload behind its length prefix, which is
    /// the section without its count: one pass over contiguous bytes.
    pub fn batch_checksum(&self) -> u64 {
        u64::from(crc32fast::hash(&self.section[COUNT_BYTES..]))
    }

    /// A copy that does not keep the frame alive.
    pub fn detached(&self) -> Self {
        Self {
            section: Bytes::copy_from_slice(&self.section),
            count: self.count,
        }
    }
}

impl fmt::Debug for Payloads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Payloads({} of {} bytes)",
            self.count,
            self.total_payload_bytes()
        )
    }
}

impl<'a> IntoIterator for &'a Payloads {
    type Item = &'a [u8];
    type IntoIter = PayloadsIter<'a>;

    fn into_iter(self) -> PayloadsIter<'a> {
        self.iter()
    }
}

/// The payloads of a section, in order.
#[derive(Clone, Debug)]
pub struct PayloadsIter<'a> {
    rest: &'a [u8],
    left: usize,
}

impl<'a> Iterator for PayloadsIter<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        self.left = self.left.checked_sub(1)?;
        let (prefix, behind) = self.rest.split_first_chunk::<PREFIX_BYTES>()?;
        let (payload, rest) = behind.split_at_checked(u32::from_be_bytes(*prefix) as usize)?;
        self.rest = rest;
        Some(payload)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for PayloadsIter<'_> {}

/// The batch checksum over payloads that are not in one section: CRC-32/ISO-HDLC over each
/// payload behind its big-endian length. Not the CRC-32C of the log on disk.
pub fn batch_checksum<I>(payloads: I) -> u64
where
    I: IntoIterator,
    I::Item: AsRef<[u8]>,
{
    let mut hasher = crc32fast::Hasher::new();
    for payload in payloads {
        let payload = payload.as_ref();
        hasher.update(&(payload.len() as u32).to_be_bytes());
        hasher.update(payload);
    }
    u64::from(hasher.finalize())
}
