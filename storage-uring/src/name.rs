//! Names and identities of logs.
//!
//! A log is known on disk by a 64-bit id derived from its full name, so that an extent header has a fixed
//! size. The full name is written the first time a log appears in a segment; two names with one id are
//! refused when the second is opened, never merged.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Longest encoded name, in bytes. Bounds the extent header on disk and in recovery.
pub const MAX_NAME_BYTES: usize = 2048;

/// Which of a shard's logs this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum LogKind {
    /// Published records of a stream shard.
    Stream = 1,
    /// Puts and deletes of a cache shard.
    Cache = 2,
    /// Positions of consumer groups of a stream shard.
    Cursors = 3,
    /// Offsets given up on by consumer groups.
    DeadLetters = 4,
    /// Deltas and checkpoints of a cache shard's counters.
    Counters = 5,
}

impl LogKind {
    /// The kind with this number on disk, if there is one.
    pub fn from_u8(value: u8) -> Option<Self> {
        Some(match value {
            1 => Self::Stream,
            2 => Self::Cache,
            3 => Self::Cursors,
            4 => Self::DeadLetters,
            5 => Self::Counters,
            _ => return None,
        })
    }

    /// Short lower-case word, used in canonical names and messages.
    pub fn word(self) -> &'static str {
        match self {
            Self::Stream => "stream",
            Self::Cache => "cache",
            Self::Cursors => "cursors",
            Self::DeadLetters => "dead-letters",
            Self::Counters => "counters",
        }
    }
}

/// The full name of one log of one shard.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct LogName {
    /// Which of the shard's logs.
    pub kind: LogKind,
    /// Tenant that owns the stream or cache.
    pub tenant: String,
    /// Namespace within the tenant.
    pub namespace: String,
    /// Stream or cache name.
    pub name: String,
    /// Shard number.
    pub shard: u32,
}

impl std::fmt::Display for LogName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{}/{}/{}/{}/{}",
            self.kind.word(),
            self.tenant,
            self.namespace,
            self.name,
            self.shard
        )
    }
}

/// First eight bytes of the SHA-256 of a log's canonical encoding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LogId(pub u64);

impl LogName {
    /// The canonical encoding: kind, shard, then three length-prefixed strings. Also the form on disk.
    pub fn encode(&self) -> Vec<u8> {
        let mut out =
            Vec::with_capacity(11 + self.tenant.len() + self.namespace.len() + self.name.len());
        out.push(self.kind as u8);
        out.extend_from_slice(&self.shard.to_le_bytes());
        for part in [&self.tenant, &self.namespace, &self.name] {
            // INV: `check` bounds the whole encoding by MAX_NAME_BYTES before a name reaches the disk.
            out.extend_from_slice(&(part.len().min(usize::from(u16::MAX)) as u16).to_le_bytes());
            out.extend_from_slice(part.as_bytes());
        }
        out
    }

    /// Reads a canonical encoding back. `None` when the bytes are not exactly one encoding.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let kind = LogKind::from_u8(*bytes.first()?)?;
        let shard = u32::from_le_bytes(bytes.get(1..5)?.try_into().ok()?);
        let mut rest = bytes.get(5..)?;
        let mut parts = [const { String::new() }; 3];
        for part in &mut parts {
            let len = usize::from(u16::from_le_bytes(rest.get(..2)?.try_into().ok()?));
            let text = rest.get(2..2 + len)?;
            *part = std::str::from_utf8(text).ok()?.to_owned();
            rest = &rest[2 + len..];
        }
        if !rest.is_empty() {
            return None;
        }
        let [tenant, namespace, name] = parts;
        Some(Self {
            kind,
            tenant,
            namespace,
            name,
            shard,
        })
    }

    /// The log's id.
    pub fn id(&self) -> LogId {
        LogId::of_encoded(&self.encode())
    }

    /// Whether the name fits the format.
    pub fn fits(&self) -> bool {
        11 + self.tenant.len() + self.namespace.len() + self.name.len() <= MAX_NAME_BYTES
    }
}

impl LogId {
    /// The id of a canonical encoding.
    pub fn of_encoded(encoded: &[u8]) -> Self {
        let digest = Sha256::digest(encoded);
        let mut first = [0u8; 8];
        first.copy_from_slice(&digest[..8]);
        Self(u64::from_be_bytes(first))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> LogName {
        LogName {
            kind: LogKind::Stream,
            tenant: "acme".into(),
            namespace: "prod".into(),
            name: "orders".into(),
            shard: 7,
        }
    }

    #[test]
    fn encoding_round_trips_and_rejects_every_truncation() {
        let encoded = sample().encode();
        assert_eq!(LogName::decode(&encoded), Some(sample()));
        for cut in 0..encoded.len() {
            assert_eq!(LogName::decode(&encoded[..cut]), None, "cut at {cut}");
        }
        let mut longer = encoded;
        longer.push(0);
        assert_eq!(LogName::decode(&longer), None);
    }

    #[test]
    fn ids_differ_by_every_component() {
        let base = sample().id();
        let mut other = sample();
        other.kind = LogKind::Cache;
        assert_ne!(base, other.id());
        let mut other = sample();
        other.shard = 8;
        assert_ne!(base, other.id());
        // Moving a character between components must change the id.
        let mut other = sample();
        other.tenant = "acmep".into();
        other.namespace = "rod".into();
        assert_ne!(base, other.id());
    }
}
