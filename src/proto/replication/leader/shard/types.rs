//! What a shard's leader is made from, and what it tells.

use crate::ids::{Generation, NodeId};
use crate::proto::replication::leader::cursor::{Ask, PauseCause};
use crate::proto::replication::leader::halt::HaltReason;
use crate::proto::replication::leader::limits::ShipLimits;
use crate::wire::internal::ReplicaLog;

/// A follower's place in the replica set, its leader not counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FollowerIdx(pub u16);

/// How many followers of the whole broker may be given a new copy at once.
pub trait RebuildSlots {
    /// Takes a slot if one is free.
    fn try_take(&self) -> bool;
    fn give_back(&self);
}

/// What a shard is led with.
#[derive(Debug, Clone)]
pub struct ShardSpec {
    pub me: NodeId,
    pub generation: Generation,
    /// The replica set without `me`.
    pub followers: Vec<NodeId>,
    /// Whether writes wait for a majority.
    pub is_quorum: bool,
    pub limits: ShipLimits,
    /// Spreads waits; equal seeds give equal schedules.
    pub seed: u64,
}

/// Something that happened to the shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShardEvent {
    /// Make the generation durable in this log, with where it begins; report `on_recorded`.
    Record { log: ReplicaLog },
    /// Writes may be taken.
    Opened,
    /// The mark rose: writes that end at or below it are on a majority.
    Marked { mark: u64 },
    /// A newer generation exists: take no write, acknowledge none, read the catalog again.
    Superseded,
    Halted {
        follower: FollowerIdx,
        log: ReplicaLog,
        reason: HaltReason,
    },
    Paused {
        follower: FollowerIdx,
        log: ReplicaLog,
        cause: PauseCause,
    },
    RebuildStarted {
        follower: FollowerIdx,
        log: ReplicaLog,
    },
    RebuildRefused {
        follower: FollowerIdx,
        log: ReplicaLog,
    },
    RebuildCompleted {
        follower: FollowerIdx,
        log: ReplicaLog,
    },
}

/// A replica nothing is shipped to, for the operator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HaltedReplica {
    pub follower: NodeId,
    pub log: ReplicaLog,
    pub generation: Generation,
    /// What it had answered at this generation.
    pub position: Option<u64>,
    pub reason: HaltReason,
}

impl Ask {
    /// Whether it is a bootstrap or a rebuild: another family of requests on the wire.
    pub const fn is_control(self) -> bool {
        match self {
            Self::Bootstrap { .. } | Self::Rebuild { .. } => true,
            Self::Probe { .. } | Self::Fetch { .. } => false,
        }
    }
}
