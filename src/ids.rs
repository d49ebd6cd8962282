//! The names of things, as types that cannot be wrong.
//!
//! Text that arrives from a peer, a client or a file becomes one of these exactly once; code
//! behind that point never checks it again.

use std::fmt;
use std::sync::Arc;

use crate::limits::MAX_NAME_BYTES;

/// Why a piece of text is not the name it should be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    #[error("{what} is empty; give it a name")]
    Empty { what: &'static str },
    #[error("{what} has {len} bytes; at most {max} are allowed")]
    TooLong {
        what: &'static str,
        len: usize,
        max: usize,
    },
    #[error("node id {value:?} is not a DNS name: use letters, digits, '-' and '.', labels of 1 to 63 characters that neither start nor end with '-'")]
    NotDns { value: String },
}

macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(Arc<str>);

        impl $name {
            /// 1 to [`MAX_NAME_BYTES`] bytes of UTF-8.
            pub fn new(text: &str) -> Result<Self, NameError> {
                if text.is_empty() {
                    return Err(NameError::Empty { what: $what });
                }
                if text.len() > MAX_NAME_BYTES {
                    return Err(NameError::TooLong { what: $what, len: text.len(), max: MAX_NAME_BYTES });
                }
                Ok(Self(Arc::from(text)))
            }

            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:?})"), &self.0)
            }
        }

        impl std::borrow::Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }
    };
}

text_id!(/// A tenant.
    TenantId, "tenant id");
text_id!(/// A namespace inside a tenant.
    Namespace, "namespace");
text_id!(/// A stream's or a cache's name inside a namespace.
    StreamName, "stream or cache name");

/// A broker. Always a valid DNS name, because its certificate must carry it.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(Arc<str>);

impl NodeId {
    pub fn new(text: &str) -> Result<Self, NameError> {
        if text.is_empty() {
            return Err(NameError::Empty { what: "node id" });
        }
        let label_ok = |label: &str| {
            (1..=63).contains(&label.len())
                && label
                    .bytes()
                    .all(|b| b.is_ascii_alphanumeric() || b == b'-')
                && !label.starts_with('-')
                && !label.ends_with('-')
        };
        if text.len() > 253 || !text.split('.').all(label_ok) {
            return Err(NameError::NotDns {
                value: text.chars().take(80).collect(),
            });
        }
        Ok(Self(Arc::from(text)))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NodeId({:?})", &self.0)
    }
}

impl std::borrow::Borrow<str> for NodeId {
    fn borrow(&self) -> &str {
        &self.0
    }
}

/// A stream and a cache may share a name, so every map keyed by a shard carries this.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ShardKind {
    Stream,
    Cache,
}

/// One shard of one stream or cache.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ShardId {
    pub kind: ShardKind,
    pub tenant: TenantId,
    pub namespace: Namespace,
    pub name: StreamName,
    pub shard: u32,
}

impl fmt::Display for ShardId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            ShardKind::Stream => "stream",
            ShardKind::Cache => "cache",
        };
        write!(
            f,
            "{kind}:{}/{}/{}#{}",
            self.tenant, self.namespace, self.name, self.shard
        )
    }
}

macro_rules! number_id {
    ($(#[$doc:meta])* $name:ident, $repr:ty) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
        pub struct $name(pub $repr);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }
    };
}

number_id!(/// The assignment generation of a shard; the same number as a leader's epoch.
    Generation, u64);
number_id!(/// A record's place in its shard's log.
    Offset, u64);
number_id!(/// Index of a data core, counted from 0 in the order of `--cores`.
    CoreId, u16);
number_id!(/// Matches an answer to its request within one connection.
    CorrelationId, u64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_ids_are_dns_names() {
        for good in ["a", "node-1", "node-1.felix.example", "9"] {
            assert!(NodeId::new(good).is_ok(), "{good}");
        }
        for bad in [
            "",
            "-a",
            "a-",
            "a..b",
            "a_b",
            "ä",
            "a b",
            &"x".repeat(64),
            &"a.".repeat(130),
        ] {
            assert!(NodeId::new(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn names_are_bounded_and_not_empty() {
        assert!(TenantId::new("").is_err());
        assert!(TenantId::new(&"x".repeat(MAX_NAME_BYTES)).is_ok());
        assert!(TenantId::new(&"x".repeat(MAX_NAME_BYTES + 1)).is_err());
    }
}
