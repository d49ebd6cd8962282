//! The messages of kinds 1 to 24.
//!
//! Fields stand in wire order. Where several kinds share a layout, one struct carries it and the
//! field that tells the kinds apart: `credential` chooses 1 or 22 and 11 or 23, `log` chooses
//! among the records and bootstrap kinds.

use bytes::Bytes;

use super::codes::{AckMode, CacheOpKind, ErrorCode, ReplicaLog};
use super::kind::Kind;
use super::payloads::Payloads;
use super::text::{Credential, Text};
use crate::ids::{CorrelationId, Generation, Offset};

/// The shard a request is about. Empty names decode; the layers above refuse them.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ShardRef {
    pub tenant: Text,
    pub namespace: Text,
    /// The stream's name, or the cache's on a cache message.
    pub stream: Text,
    pub shard: u32,
    /// The assignment generation the sender resolved, or leads at.
    pub generation: Generation,
}

impl ShardRef {
    /// A copy that does not keep the frame alive.
    pub fn detached(&self) -> Self {
        Self {
            tenant: self.tenant.detached(),
            namespace: self.namespace.detached(),
            stream: self.stream.detached(),
            shard: self.shard,
            generation: self.generation,
        }
    }
}

/// Kinds 1 and 22: records for a shard another broker owns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForwardPublish {
    pub correlation: CorrelationId,
    pub shard: ShardRef,
    pub ack: AckMode,
    pub payloads: Payloads,
    /// With one it is kind 22, without one kind 1.
    pub credential: Option<Credential>,
}

/// Kinds 3 and 13: a publish or a cache operation was not done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    pub correlation: CorrelationId,
    pub code: ErrorCode,
    /// For people; never parsed.
    pub detail: Text,
}

/// Kind 4: another broker owns the shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotLeader {
    pub correlation: CorrelationId,
    pub node_id: Text,
    /// Where the owner takes internal connections, passed on unparsed.
    pub advertise_addr: Text,
    /// The generation the responder holds current.
    pub generation: Generation,
}

/// Kinds 5 and 6: the sender's name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    pub correlation: CorrelationId,
    pub node_id: Text,
}

/// Kinds 7, 14, 16, 18 and 20: a leader's committed records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Records {
    pub correlation: CorrelationId,
    /// Chooses the kind; not a field on the wire.
    pub log: ReplicaLog,
    pub shard: ShardRef,
    /// Each further payload is one higher; the sum may overflow and is the follower's to check.
    pub first_offset: Offset,
    /// As it travelled; compare with [`Payloads::batch_checksum`].
    pub checksum: u64,
    pub payloads: Payloads,
}

/// Kinds 10, 15, 17, 19 and 21: where the leader's log starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bootstrap {
    pub correlation: CorrelationId,
    /// Chooses the kind; not a field on the wire.
    pub log: ReplicaLog,
    pub shard: ShardRef,
    pub base_offset: Offset,
}

/// Kind 24: discard a log and start a new copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rebuild {
    pub correlation: CorrelationId,
    pub shard: ShardRef,
    pub log: ReplicaLog,
    pub base_offset: Offset,
}

/// Kind 9: a follower did not take a replication request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicateRefusal {
    pub correlation: CorrelationId,
    pub code: ErrorCode,
    /// Binding for `LogGap`, otherwise a hint.
    pub expected_offset: Offset,
    pub detail: Text,
}

/// Kinds 11 and 23: a cache operation for a shard another broker owns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheOp {
    pub correlation: CorrelationId,
    pub shard: ShardRef,
    pub op: CacheOpKind,
    pub key: Text,
    /// Read for put only; 0 is no expiry.
    pub ttl_ms: u64,
    /// Put: the value. Counter add: the delta, 8 bytes. Otherwise empty.
    pub value: Bytes,
    /// With one it is kind 23, without one kind 11.
    pub credential: Option<Credential>,
}

/// Kind 12: a cache operation was done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheOk {
    pub correlation: CorrelationId,
    /// `None` is a miss, and the answer to every put; an empty value is a stored empty value.
    pub value: Option<Bytes>,
}

/// Any message of kinds 1 to 24.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    ForwardPublish(ForwardPublish),
    ForwardPublishOk {
        correlation: CorrelationId,
        first_offset: Offset,
        /// Inclusive. First 1 and last 0 mean that nothing has an offset here.
        last_offset: Offset,
    },
    ForwardPublishError(Refusal),
    NotLeader(NotLeader),
    Hello(Hello),
    HelloOk(Hello),
    Records(Records),
    Bootstrap(Bootstrap),
    Rebuild(Rebuild),
    ReplicateOk {
        correlation: CorrelationId,
        /// One past the follower's last durable record: the next offset to send.
        durable_offset: Offset,
    },
    ReplicateError(ReplicateRefusal),
    CacheOp(CacheOp),
    CacheOk(CacheOk),
    CacheError(Refusal),
}

impl Message {
    /// The kind it travels as.
    pub fn kind(&self) -> Kind {
        match self {
            Self::ForwardPublish(m) if m.credential.is_some() => Kind::AuthorizedForwardPublish,
            Self::ForwardPublish(_) => Kind::ForwardPublish,
            Self::ForwardPublishOk { .. } => Kind::ForwardPublishOk,
            Self::ForwardPublishError(_) => Kind::ForwardPublishError,
            Self::NotLeader(_) => Kind::NotLeader,
            Self::Hello(_) => Kind::Hello,
            Self::HelloOk(_) => Kind::HelloOk,
            Self::Records(m) => Kind::records(m.log),
            Self::Bootstrap(m) => Kind::bootstrap(m.log),
            Self::Rebuild(_) => Kind::ReplicateRebuild,
            Self::ReplicateOk { .. } => Kind::ReplicateOk,
            Self::ReplicateError(_) => Kind::ReplicateError,
            Self::CacheOp(m) if m.credential.is_some() => Kind::AuthorizedForwardCacheOp,
            Self::CacheOp(_) => Kind::ForwardCacheOp,
            Self::CacheOk(_) => Kind::ForwardCacheOk,
            Self::CacheError(_) => Kind::ForwardCacheError,
        }
    }

    /// What matches an answer to its request.
    pub fn correlation(&self) -> CorrelationId {
        match self {
            Self::ForwardPublish(m) => m.correlation,
            Self::ForwardPublishOk { correlation, .. } | Self::ReplicateOk { correlation, .. } => {
                *correlation
            }
            Self::ForwardPublishError(m) | Self::CacheError(m) => m.correlation,
            Self::NotLeader(m) => m.correlation,
            Self::Hello(m) | Self::HelloOk(m) => m.correlation,
            Self::Records(m) => m.correlation,
            Self::Bootstrap(m) => m.correlation,
            Self::Rebuild(m) => m.correlation,
            Self::ReplicateError(m) => m.correlation,
            Self::CacheOp(m) => m.correlation,
            Self::CacheOk(m) => m.correlation,
        }
    }

    /// The code of a refusal of any shape.
    pub fn error_code(&self) -> Option<ErrorCode> {
        match self {
            Self::ForwardPublishError(m) | Self::CacheError(m) => Some(m.code),
            Self::ReplicateError(m) => Some(m.code),
            Self::ForwardPublish(_)
            | Self::ForwardPublishOk { .. }
            | Self::NotLeader(_)
            | Self::Hello(_)
            | Self::HelloOk(_)
            | Self::Records(_)
            | Self::Bootstrap(_)
            | Self::Rebuild(_)
            | Self::ReplicateOk { .. }
            | Self::CacheOp(_)
            | Self::CacheOk(_) => None,
        }
    }
}
