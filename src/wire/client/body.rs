//! Reading the fields of a binary body, always within its bounds.

use std::fmt;
use std::ops::Deref;

use bytes::{Buf, Bytes};

use crate::limits::MAX_PAYLOADS;

/// Why a binary body cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BodyError {
    #[error("the body ends inside {field}")]
    Truncated { field: &'static str },
    #[error("{field} is not UTF-8")]
    NotUtf8 { field: &'static str },
    #[error("{field} has the undefined value {value}")]
    Undefined { field: &'static str, value: u8 },
    #[error("{count} payloads do not fit in the {left} bytes left")]
    CountTooLarge { count: u32, left: usize },
    /// Well formed as far as it was looked at, but over a limit.
    #[error("a batch of {count} payloads is over the limit of {MAX_PAYLOADS}")]
    TooManyPayloads { count: u32 },
    #[error("{field} has no place in an answer of this status")]
    WrongStatus { field: &'static str },
}

/// A cheap clone of text inside a frame.
#[derive(Clone, PartialEq, Eq, Hash, Default)]
pub struct Text(Bytes);

impl Text {
    pub(super) fn from_bytes(field: &'static str, bytes: Bytes) -> Result<Text, BodyError> {
        match std::str::from_utf8(&bytes) {
            Ok(_) => Ok(Text(bytes)),
            Err(_) => Err(BodyError::NotUtf8 { field }),
        }
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        // The bytes were checked when the value was made and cannot change since.
        std::str::from_utf8(&self.0).unwrap_or_default()
    }
}

impl From<&str> for Text {
    fn from(text: &str) -> Text {
        Text(Bytes::copy_from_slice(text.as_bytes()))
    }
}

impl From<String> for Text {
    fn from(text: String) -> Text {
        Text(Bytes::from(text))
    }
}

impl Deref for Text {
    type Target = str;

    fn deref(&self) -> &str {
        self.as_str()
    }
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

/// Takes fields off the front of a body.
pub(super) struct Fields {
    rest: Bytes,
}

impl Fields {
    pub fn new(body: Bytes) -> Fields {
        Fields { rest: body }
    }

    pub fn left(&self) -> usize {
        self.rest.len()
    }

    pub fn into_rest(self) -> Bytes {
        self.rest
    }

    fn need(&self, field: &'static str, len: usize) -> Result<(), BodyError> {
        if self.rest.len() < len {
            return Err(BodyError::Truncated { field });
        }
        Ok(())
    }

    pub fn u8(&mut self, field: &'static str) -> Result<u8, BodyError> {
        self.need(field, 1)?;
        Ok(self.rest.get_u8())
    }

    pub fn u16(&mut self, field: &'static str) -> Result<u16, BodyError> {
        self.need(field, 2)?;
        Ok(self.rest.get_u16())
    }

    pub fn u32(&mut self, field: &'static str) -> Result<u32, BodyError> {
        self.need(field, 4)?;
        Ok(self.rest.get_u32())
    }

    pub fn u64(&mut self, field: &'static str) -> Result<u64, BodyError> {
        self.need(field, 8)?;
        Ok(self.rest.get_u64())
    }

    pub fn bytes(&mut self, field: &'static str, len: usize) -> Result<Bytes, BodyError> {
        self.need(field, len)?;
        Ok(self.rest.split_to(len))
    }

    /// Bytes behind a two-byte length.
    pub fn short_bytes(&mut self, field: &'static str) -> Result<Bytes, BodyError> {
        let len = self.u16(field)?;
        self.bytes(field, usize::from(len))
    }

    /// Text behind a two-byte length.
    pub fn short_text(&mut self, field: &'static str) -> Result<Text, BodyError> {
        Text::from_bytes(field, self.short_bytes(field)?)
    }

    /// A payload count, refused when that many entries of at least `entry_bytes` cannot follow.
    pub fn count(&mut self, entry_bytes: usize) -> Result<usize, BodyError> {
        let count = self.u32("the payload count")?;
        let left = self.left();
        match usize::try_from(count) {
            Ok(fits) if fits <= left / entry_bytes => Ok(fits),
            _ => Err(BodyError::CountTooLarge { count, left }),
        }
    }
}
