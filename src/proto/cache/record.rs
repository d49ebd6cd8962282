//! The records of a cache shard's two logs: bytes and back.
//!
//! All numbers little-endian. A record of the cache log:
//!
//! ```text
//! version u8 = 1 | op u8 (0 put, 1 delete) | expires_at_ms u64 (0 never) | key length u32 | key | value
//! ```
//!
//! The value is the rest; a delete has none and its expiry is 0. A record of the counter log:
//!
//! ```text
//! version u8 = 1 | op u8 (0 delta, 1 checkpoint) | amount i64 | key length u32 | key
//! ```
//!
//! A checkpoint restates the sum; deltas behind it add to it. Keys are UTF-8. Anything else is
//! refused: a record this version does not know is never guessed at.

use bytes::{BufMut, Bytes, BytesMut};

const VERSION: u8 = 1;
const OP_PUT: u8 = 0;
const OP_DELETE: u8 = 1;
const OP_DELTA: u8 = 0;
const OP_CHECKPOINT: u8 = 1;
/// Version, operation, one number, key length.
pub const HEAD_BYTES: usize = 1 + 1 + 8 + 4;

/// A record of the cache log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueRecord<'a> {
    Put {
        key: &'a str,
        /// Milliseconds since the epoch; 0 is never.
        expires_at_ms: u64,
        value: &'a [u8],
    },
    Delete {
        key: &'a str,
    },
}

/// A record of the counter log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CounterRecord<'a> {
    Delta { key: &'a str, delta: i64 },
    Checkpoint { key: &'a str, sum: i64 },
}

/// Why a stored record cannot be used. The log is refused: what comes after cannot be trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RecordFault {
    #[error("it is shorter than its fields")]
    Short,
    #[error("version {0} is not known")]
    Version(u8),
    #[error("operation {0} is not known")]
    Operation(u8),
    #[error("its key is not UTF-8")]
    KeyNotUtf8,
    #[error("it has bytes behind its last field")]
    Trailing,
    #[error("a delete carries an expiry")]
    ExpiryOfDelete,
    #[error("its delta takes the sum out of range")]
    SumOutOfRange,
}

/// Writes a record; the key must be shorter than 4 GiB, which the callers' bound makes it.
fn encode(op: u8, number: u64, key: &str, value: &[u8]) -> Bytes {
    let mut out = BytesMut::with_capacity(HEAD_BYTES + key.len() + value.len());
    out.put_u8(VERSION);
    out.put_u8(op);
    out.put_u64_le(number);
    out.put_u32_le(key.len() as u32);
    out.put_slice(key.as_bytes());
    out.put_slice(value);
    out.freeze()
}

struct Parts<'a> {
    op: u8,
    number: u64,
    key: &'a str,
    rest: &'a [u8],
}

fn decode(record: &[u8]) -> Result<Parts<'_>, RecordFault> {
    let (&version, _) = record.split_first().ok_or(RecordFault::Short)?;
    if version != VERSION {
        return Err(RecordFault::Version(version));
    }
    let (head, rest) = record
        .split_at_checked(HEAD_BYTES)
        .ok_or(RecordFault::Short)?;
    let mut number = [0; 8];
    number.copy_from_slice(&head[2..10]);
    let mut key_bytes = [0; 4];
    key_bytes.copy_from_slice(&head[10..14]);
    let key_bytes = u32::from_le_bytes(key_bytes) as usize;
    let (key, rest) = rest.split_at_checked(key_bytes).ok_or(RecordFault::Short)?;
    Ok(Parts {
        op: head[1],
        number: u64::from_le_bytes(number),
        key: std::str::from_utf8(key).map_err(|_| RecordFault::KeyNotUtf8)?,
        rest,
    })
}

impl<'a> ValueRecord<'a> {
    /// The record's bytes.
    pub fn encode(&self) -> Bytes {
        match *self {
            Self::Put {
                key,
                expires_at_ms,
                value,
            } => encode(OP_PUT, expires_at_ms, key, value),
            Self::Delete { key } => encode(OP_DELETE, 0, key, &[]),
        }
    }

    /// Reads a stored record.
    pub fn decode(record: &'a [u8]) -> Result<Self, RecordFault> {
        let parts = decode(record)?;
        match parts.op {
            OP_PUT => Ok(Self::Put {
                key: parts.key,
                expires_at_ms: parts.number,
                value: parts.rest,
            }),
            OP_DELETE if !parts.rest.is_empty() => Err(RecordFault::Trailing),
            OP_DELETE if parts.number != 0 => Err(RecordFault::ExpiryOfDelete),
            OP_DELETE => Ok(Self::Delete { key: parts.key }),
            op => Err(RecordFault::Operation(op)),
        }
    }
}

impl<'a> CounterRecord<'a> {
    /// The record's bytes.
    pub fn encode(&self) -> Bytes {
        match *self {
            Self::Delta { key, delta } => encode(OP_DELTA, delta as u64, key, &[]),
            Self::Checkpoint { key, sum } => encode(OP_CHECKPOINT, sum as u64, key, &[]),
        }
    }

    /// Reads a stored record.
    pub fn decode(record: &'a [u8]) -> Result<Self, RecordFault> {
        let Parts {
            op,
            number,
            key,
            rest,
        } = decode(record)?;
        if !rest.is_empty() {
            return Err(RecordFault::Trailing);
        }
        let amount = number as i64;
        match op {
            OP_DELTA => Ok(Self::Delta { key, delta: amount }),
            OP_CHECKPOINT => Ok(Self::Checkpoint { key, sum: amount }),
            op => Err(RecordFault::Operation(op)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes are a promise to every later version and to every follower.
    #[test]
    fn layouts_are_as_written() {
        let put = ValueRecord::Put {
            key: "k1",
            expires_at_ms: 0x0102,
            value: b"v",
        };
        let bytes = [1, 0, 2, 1, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, b'k', b'1', b'v'];
        assert_eq!(put.encode().as_ref(), bytes);
        let delete = ValueRecord::Delete { key: "" };
        let bytes = [1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(delete.encode().as_ref(), bytes);
        let delta = CounterRecord::Delta {
            key: "c",
            delta: -2,
        };
        let bytes = [
            1, 0, 254, 255, 255, 255, 255, 255, 255, 255, 1, 0, 0, 0, b'c',
        ];
        assert_eq!(delta.encode().as_ref(), bytes);
    }

    #[test]
    fn every_damage_is_named_and_none_is_guessed_at() {
        let put = ValueRecord::Put {
            key: "key",
            expires_at_ms: 7,
            value: b"",
        };
        let good = put.encode().to_vec();
        assert_eq!(ValueRecord::decode(&good), Ok(put));
        for cut in 0..good.len() {
            assert_eq!(
                ValueRecord::decode(&good[..cut]),
                Err(RecordFault::Short),
                "cut at {cut}"
            );
        }
        let with = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            bytes
        };
        let fault = |bytes: &[u8]| ValueRecord::decode(bytes).unwrap_err();
        assert_eq!(fault(&with(0, 2)), RecordFault::Version(2));
        assert_eq!(fault(&with(1, 2)), RecordFault::Operation(2));
        assert_eq!(fault(&with(14, 0xff)), RecordFault::KeyNotUtf8);
        assert_eq!(fault(&with(1, 1)), RecordFault::ExpiryOfDelete);
        let mut delete = ValueRecord::Delete { key: "a" }.encode().to_vec();
        delete.push(0);
        assert_eq!(fault(&delete), RecordFault::Trailing);

        let mut delta = CounterRecord::Checkpoint { key: "a", sum: 3 }
            .encode()
            .to_vec();
        assert!(CounterRecord::decode(&delta).is_ok());
        delta.push(0);
        assert_eq!(CounterRecord::decode(&delta), Err(RecordFault::Trailing));
        delta.pop();
        delta[1] = 9;
        assert_eq!(
            CounterRecord::decode(&delta),
            Err(RecordFault::Operation(9))
        );
    }
}
