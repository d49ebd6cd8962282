//! Byte strings in JSON: standard base64 with padding, read strictly.

use std::fmt;

use base64::engine::general_purpose::STANDARD;
use base64::Engine;
use bytes::Bytes;
use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Bytes that stand in JSON as base64.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Blob(pub Bytes);

impl AsRef<[u8]> for Blob {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl From<Bytes> for Blob {
    fn from(bytes: Bytes) -> Blob {
        Blob(bytes)
    }
}

impl Serialize for Blob {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&STANDARD.encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for Blob {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(BlobVisitor)
    }
}

struct BlobVisitor;

impl Visitor<'_> for BlobVisitor {
    type Value = Blob;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("base64 text")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Blob, E> {
        match STANDARD.decode(text) {
            Ok(bytes) => Ok(Blob(Bytes::from(bytes))),
            Err(error) => Err(E::custom(format_args!("not base64: {error}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Option<Blob> {
        serde_json::from_str(&format!("{text:?}")).ok()
    }

    #[test]
    fn only_the_one_spelling_is_read() {
        assert_eq!(read("aGk="), Some(Blob(Bytes::from_static(b"hi"))));
        assert_eq!(read(""), Some(Blob::default()));
        for bad in [
            "aGk", "aGk==", "aGl=", "a", "aG k", "aGk= ", "_-__", "aGk=aGk=", "=",
        ] {
            assert_eq!(read(bad), None, "{bad:?}");
        }
    }
}
