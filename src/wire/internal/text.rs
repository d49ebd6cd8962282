//! Bounded text of the wire, as slices of the frame it arrived in.
//!
//! Invariants: a [`Text`] is valid UTF-8 of at most [`MAX_STR_BYTES`] bytes; a [`Credential`] is
//! valid UTF-8 of 1 to [`MAX_CREDENTIAL_BYTES`] bytes behind its own length prefix. Both hold
//! from construction on, so encoding one cannot fail.

use std::fmt;

use bytes::{BufMut, Bytes, BytesMut};

use super::error::{BodyError, EncodeError};
use crate::ids::{Namespace, NodeId, StreamName, TenantId};
use crate::limits::{MAX_CREDENTIAL_BYTES, MAX_NAME_BYTES, MAX_STR_BYTES};

const _: () = assert!(MAX_NAME_BYTES <= MAX_STR_BYTES);

/// The protocol's `str`: at most 512 bytes of UTF-8, possibly empty. Cloning is cheap.
#[derive(Clone, PartialEq, Eq, Hash, Default)]
pub struct Text(Bytes);

impl Text {
    /// Copies `text`; refuses more than [`MAX_STR_BYTES`].
    pub fn new(text: &str) -> Result<Self, EncodeError> {
        if text.len() > MAX_STR_BYTES {
            return Err(EncodeError::TextTooLong { bytes: text.len() });
        }
        Ok(Self(Bytes::copy_from_slice(text.as_bytes())))
    }

    /// Copies as much of `text` as fits, cut on a character boundary. For a refusal's detail,
    /// which must never keep the refusal from being sent.
    pub fn shortened(text: &str) -> Self {
        let mut end = text.len().min(MAX_STR_BYTES);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        Self(Bytes::copy_from_slice(&text.as_bytes()[..end]))
    }

    /// Takes a slice of a frame.
    pub(super) fn from_wire(bytes: Bytes, field: &'static str) -> Result<Self, BodyError> {
        if bytes.len() > MAX_STR_BYTES {
            return Err(BodyError::TextTooLong {
                field,
                bytes: bytes.len(),
            });
        }
        match std::str::from_utf8(&bytes) {
            Ok(_) => Ok(Self(bytes)),
            Err(_) => Err(BodyError::NotUtf8 { field }),
        }
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        // SAFETY: every constructor stores bytes of a `str` or bytes that `from_utf8` accepted,
        // and `Bytes` is immutable.
        unsafe { std::str::from_utf8_unchecked(&self.0) }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is no text.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A copy that does not keep the frame alive.
    pub fn detached(&self) -> Self {
        Self(Bytes::copy_from_slice(&self.0))
    }
}

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

impl PartialEq<str> for Text {
    fn eq(&self, other: &str) -> bool {
        self.as_str() == other
    }
}

impl PartialEq<&str> for Text {
    fn eq(&self, other: &&str) -> bool {
        self.as_str() == *other
    }
}

impl AsRef<str> for Text {
    fn as_ref(&self) -> &str {
        self.as_str()
    }
}

macro_rules! text_from_name {
    ($($name:ty),+) => {
        $(impl From<&$name> for Text {
            fn from(name: &$name) -> Self {
                Self(Bytes::copy_from_slice(name.as_str().as_bytes()))
            }
        })+
    };
}
// Each of these is bounded by MAX_NAME_BYTES or less at its construction.
text_from_name!(TenantId, Namespace, StreamName, NodeId);

/// A client's bearer token as it rides a forward, kept with its length prefix so that sending it
/// again is a reference count, not a copy.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Credential {
    prefixed: Bytes,
}

const PREFIX_BYTES: usize = 4;

impl Credential {
    /// Copies `token` behind its prefix; refuses an empty one and more than
    /// [`MAX_CREDENTIAL_BYTES`].
    pub fn new(token: &str) -> Result<Self, EncodeError> {
        if token.is_empty() {
            return Err(EncodeError::CredentialEmpty);
        }
        if token.len() > MAX_CREDENTIAL_BYTES {
            return Err(EncodeError::CredentialTooLong { bytes: token.len() });
        }
        let mut prefixed = BytesMut::with_capacity(PREFIX_BYTES + token.len());
        prefixed.put_u32(token.len() as u32);
        prefixed.put_slice(token.as_bytes());
        Ok(Self {
            prefixed: prefixed.freeze(),
        })
    }

    /// Takes a slice of a frame that starts at the prefix and ends with the token.
    pub(super) fn from_wire(prefixed: Bytes) -> Result<Self, BodyError> {
        let token = prefixed.get(PREFIX_BYTES..).unwrap_or_default();
        if token.is_empty() {
            return Err(BodyError::CredentialEmpty);
        }
        if token.len() > MAX_CREDENTIAL_BYTES {
            return Err(BodyError::CredentialTooLong { bytes: token.len() });
        }
        match std::str::from_utf8(token) {
            Ok(_) => Ok(Self { prefixed }),
            Err(_) => Err(BodyError::NotUtf8 {
                field: "credential",
            }),
        }
    }

    /// The token.
    pub fn as_str(&self) -> &str {
        // SAFETY: `new` stores a `str` behind 4 bytes, `from_wire` bytes that `from_utf8`
        // accepted behind 4 bytes, and `Bytes` is immutable.
        unsafe { std::str::from_utf8_unchecked(&self.prefixed[PREFIX_BYTES..]) }
    }

    /// Prefix and token as they travel.
    pub fn as_wire(&self) -> &Bytes {
        &self.prefixed
    }
}

/// A credential is a secret: only its length shows.
impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Credential({} bytes)", self.as_str().len())
    }
}
