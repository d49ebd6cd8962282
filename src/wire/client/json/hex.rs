//! Bytes as hex digits: lower case out, either case in.

use bytes::Bytes;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

pub fn encode(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digit = |nibble: u8| char::from(DIGITS[usize::from(nibble & 15)]);
    let mut text = String::with_capacity(bytes.len() * 2);
    for &byte in bytes {
        text.push(digit(byte >> 4));
        text.push(digit(byte));
    }
    text
}

pub fn decode(text: &str) -> Option<Vec<u8>> {
    let digit = |c: u8| char::from(c).to_digit(16).map(|value| value as u8);
    let pairs = text.as_bytes().chunks(2);
    pairs
        .map(|pair| match *pair {
            [high, low] => Some(digit(high)? << 4 | digit(low)?),
            _ => None,
        })
        .collect()
}

/// Bytes that stand in JSON as hex.
pub struct Hex(pub Bytes);

impl Serialize for Hex {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for Hex {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let bytes = decode(&text).ok_or_else(|| serde::de::Error::custom("not hex"))?;
        Ok(Hex(Bytes::from(bytes)))
    }
}
