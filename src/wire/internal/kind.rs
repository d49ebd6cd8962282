//! The frame kinds, who sends them and what may answer them.

use super::codes::{wire_codes, ReplicaLog};

wire_codes! {
    /// A frame kind this broker reads and writes.
    Kind: u16 {
        ForwardPublish = 1,
        ForwardPublishOk = 2,
        ForwardPublishError = 3,
        NotLeader = 4,
        Hello = 5,
        HelloOk = 6,
        ReplicateRecords = 7,
        ReplicateOk = 8,
        ReplicateError = 9,
        ReplicateBootstrap = 10,
        ForwardCacheOp = 11,
        ForwardCacheOk = 12,
        ForwardCacheError = 13,
        ReplicateCacheRecords = 14,
        ReplicateCacheBootstrap = 15,
        ReplicateGroupRecords = 16,
        ReplicateGroupBootstrap = 17,
        ReplicateDeadLetterRecords = 18,
        ReplicateDeadLetterBootstrap = 19,
        ReplicateCounterRecords = 20,
        ReplicateCounterBootstrap = 21,
        AuthorizedForwardPublish = 22,
        AuthorizedForwardCacheOp = 23,
        ReplicateRebuild = 24,
    }
}

/// Which side of a connection sends a kind. The dialling side requests, the accepting side
/// answers; an answer is never answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    Request,
    Answer,
}

/// A request and the answers that belong to it share a family; so does a refusal's shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    Handshake,
    Publish,
    Cache,
    Replication,
}

impl Kind {
    /// Whether this kind asks or answers.
    pub const fn role(self) -> Role {
        match self {
            Self::ForwardPublishOk
            | Self::ForwardPublishError
            | Self::NotLeader
            | Self::HelloOk
            | Self::ReplicateOk
            | Self::ReplicateError
            | Self::ForwardCacheOk
            | Self::ForwardCacheError => Role::Answer,
            Self::ForwardPublish
            | Self::Hello
            | Self::ReplicateRecords
            | Self::ReplicateBootstrap
            | Self::ForwardCacheOp
            | Self::ReplicateCacheRecords
            | Self::ReplicateCacheBootstrap
            | Self::ReplicateGroupRecords
            | Self::ReplicateGroupBootstrap
            | Self::ReplicateDeadLetterRecords
            | Self::ReplicateDeadLetterBootstrap
            | Self::ReplicateCounterRecords
            | Self::ReplicateCounterBootstrap
            | Self::AuthorizedForwardPublish
            | Self::AuthorizedForwardCacheOp
            | Self::ReplicateRebuild => Role::Request,
        }
    }

    /// The family of a request; `None` for an answer, which may serve several.
    pub const fn request_family(self) -> Option<Family> {
        match self {
            Self::Hello => Some(Family::Handshake),
            Self::ForwardPublish | Self::AuthorizedForwardPublish => Some(Family::Publish),
            Self::ForwardCacheOp | Self::AuthorizedForwardCacheOp => Some(Family::Cache),
            Self::ReplicateRecords
            | Self::ReplicateBootstrap
            | Self::ReplicateCacheRecords
            | Self::ReplicateCacheBootstrap
            | Self::ReplicateGroupRecords
            | Self::ReplicateGroupBootstrap
            | Self::ReplicateDeadLetterRecords
            | Self::ReplicateDeadLetterBootstrap
            | Self::ReplicateCounterRecords
            | Self::ReplicateCounterBootstrap
            | Self::ReplicateRebuild => Some(Family::Replication),
            Self::ForwardPublishOk
            | Self::ForwardPublishError
            | Self::NotLeader
            | Self::HelloOk
            | Self::ReplicateOk
            | Self::ReplicateError
            | Self::ForwardCacheOk
            | Self::ForwardCacheError => None,
        }
    }

    /// The kind that carries records of a log.
    pub const fn records(log: ReplicaLog) -> Self {
        match log {
            ReplicaLog::Stream => Self::ReplicateRecords,
            ReplicaLog::Cache => Self::ReplicateCacheRecords,
            ReplicaLog::GroupCursors => Self::ReplicateGroupRecords,
            ReplicaLog::GroupDeadLetters => Self::ReplicateDeadLetterRecords,
            ReplicaLog::Counters => Self::ReplicateCounterRecords,
        }
    }

    /// The kind that offers to start a log's copy.
    pub const fn bootstrap(log: ReplicaLog) -> Self {
        match log {
            ReplicaLog::Stream => Self::ReplicateBootstrap,
            ReplicaLog::Cache => Self::ReplicateCacheBootstrap,
            ReplicaLog::GroupCursors => Self::ReplicateGroupBootstrap,
            ReplicaLog::GroupDeadLetters => Self::ReplicateDeadLetterBootstrap,
            ReplicaLog::Counters => Self::ReplicateCounterBootstrap,
        }
    }
}
