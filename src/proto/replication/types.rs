//! What both sides of replication speak about: keys, views, positions, requests and answers.

use std::fmt;
use std::sync::Arc;

use crate::catalog::Consistency;
use crate::ids::{Generation, NodeId, ShardId, ShardKind};
use crate::proto::outcome::PeerCode;
use crate::wire::internal::Payloads;

use super::history::History;

pub use crate::wire::internal::ReplicaLog;

/// One log of one shard: the key of every map of replicated logs. The shard carries its kind, because a
/// stream and a cache may share all their names.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ReplicaLogKey {
    /// The shard.
    pub shard: Arc<ShardId>,
    /// Which of its logs; always one its kind has.
    pub log: ReplicaLog,
}

impl ReplicaLogKey {
    /// The key, or `None` when shards of that kind have no such log.
    pub fn new(shard: Arc<ShardId>, log: ReplicaLog) -> Option<Self> {
        (kind_of(log) == shard.kind).then_some(Self { shard, log })
    }
}

impl fmt::Display for ReplicaLogKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.shard, log_word(self.log))
    }
}

/// The kind of shard a log belongs to.
pub const fn kind_of(log: ReplicaLog) -> ShardKind {
    match log {
        ReplicaLog::Stream | ReplicaLog::GroupCursors | ReplicaLog::GroupDeadLetters => {
            ShardKind::Stream
        }
        ReplicaLog::Cache | ReplicaLog::Counters => ShardKind::Cache,
    }
}

/// The logs of a shard in the order in which they are shipped: the main log, which everybody waits for,
/// then dead letters before cursors, so that no position is ahead of the entries it passed.
pub const fn logs_of(kind: ShardKind) -> &'static [ReplicaLog] {
    match kind {
        ShardKind::Stream => &[
            ReplicaLog::Stream,
            ReplicaLog::GroupDeadLetters,
            ReplicaLog::GroupCursors,
        ],
        ShardKind::Cache => &[ReplicaLog::Cache, ReplicaLog::Counters],
    }
}

/// Whether this is the log that acknowledgements of the shard are about; the others never gate it.
pub const fn is_main(log: ReplicaLog) -> bool {
    matches!(log, ReplicaLog::Stream | ReplicaLog::Cache)
}

/// Whether the log says the same without its head once that was written anew: it is compacted by its leader
/// alone, its followers taking its base over. How long a stream's records are kept, each holder decides itself.
pub const fn is_a_state(log: ReplicaLog) -> bool {
    match log {
        ReplicaLog::Cache
        | ReplicaLog::Counters
        | ReplicaLog::GroupCursors
        | ReplicaLog::GroupDeadLetters => true,
        ReplicaLog::Stream => false,
    }
}

/// Short name for messages, metrics and `/status`.
pub const fn log_word(log: ReplicaLog) -> &'static str {
    match log {
        ReplicaLog::Stream => "stream",
        ReplicaLog::Cache => "cache",
        ReplicaLog::GroupCursors => "group_cursors",
        ReplicaLog::GroupDeadLetters => "group_dead_letters",
        ReplicaLog::Counters => "counters",
    }
}

/// A shard's assignment as a broker has read it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicaView {
    /// The generation of the assignment.
    pub generation: Generation,
    /// The node that leads at it.
    pub leader: NodeId,
    /// Every node that holds the shard, the leader included.
    pub replicas: Arc<[NodeId]>,
    /// When a write to the shard is acknowledged.
    pub consistency: Consistency,
}

impl ReplicaView {
    /// How many holders make a majority, the leader counted.
    pub fn majority(&self) -> usize {
        self.replicas.len() / 2 + 1
    }

    /// Whether `node` holds the shard without leading it.
    pub fn is_follower(&self, node: &NodeId) -> bool {
        *node != self.leader && self.replicas.contains(node)
    }
}

/// What storage says about a log: its positions and what must survive a restart.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LogState {
    /// First offset held.
    pub base: u64,
    /// One past the last record.
    pub tail: u64,
    /// One past the last record on stable storage.
    pub durable_tail: u64,
    /// The highest generation at which this broker accepted a leader, or led itself; never falls.
    pub accepted: Generation,
    /// One past the last record known to be held by a majority; 0 when unknown.
    pub commit: u64,
    /// Which leader wrote what.
    pub history: History,
}

/// What a leader asks of a follower's copy of one log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicateRequest {
    /// Which log.
    pub key: ReplicaLogKey,
    /// The generation the sender leads at.
    pub generation: Generation,
    /// What it asks.
    pub body: ReplicateBody,
}

/// The three kinds of request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReplicateBody {
    /// Store these records, the first at `first_offset`. None at all is a probe.
    Records {
        /// Where the batch starts in the leader's log.
        first_offset: u64,
        /// As it travelled.
        checksum: u64,
        /// The records in order.
        payloads: Payloads,
    },
    /// Start an empty copy where the leader's log starts; removes nothing.
    Bootstrap {
        /// First offset the leader holds.
        base_offset: u64,
    },
    /// Discard the copy and start another.
    Rebuild {
        /// Where the new copy starts.
        base_offset: u64,
    },
}

impl ReplicateBody {
    /// Records with the checksum that belongs to them.
    pub fn records(first_offset: u64, payloads: Payloads) -> Self {
        Self::Records {
            first_offset,
            checksum: payloads.batch_checksum(),
            payloads,
        }
    }
}

/// What a follower answers; exactly one for each request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplicateAnswer {
    /// Everything below is on the follower's stable storage and equal to the leader's log.
    Ok {
        /// One past the last such record: the next offset to send.
        durable_offset: u64,
    },
    /// Not done.
    Refused {
        /// Why, as the leader acts on it.
        code: PeerCode,
        /// With [`PeerCode::LogGap`] the offset to send from; otherwise a hint.
        expected_offset: u64,
        /// For people.
        detail: &'static str,
    },
}

impl ReplicateAnswer {
    /// A refusal that names no offset.
    pub const fn refused(code: PeerCode, detail: &'static str) -> Self {
        Self::Refused {
            code,
            expected_offset: 0,
            detail,
        }
    }

    /// The code of a refusal.
    pub const fn code(&self) -> Option<PeerCode> {
        match self {
            Self::Ok { .. } => None,
            Self::Refused { code, .. } => Some(*code),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{Namespace, StreamName, TenantId};

    fn shard(kind: ShardKind) -> Arc<ShardId> {
        Arc::new(ShardId {
            kind,
            tenant: TenantId::new("t").unwrap(),
            namespace: Namespace::new("n").unwrap(),
            name: StreamName::new("same").unwrap(),
            shard: 3,
        })
    }

    #[test]
    fn a_shard_has_the_logs_of_its_kind_and_no_other() {
        for kind in [ShardKind::Stream, ShardKind::Cache] {
            for log in ReplicaLog::ALL {
                let key = ReplicaLogKey::new(shard(kind), *log);
                assert_eq!(
                    key.is_some(),
                    logs_of(kind).contains(log),
                    "{kind:?} {log:?}"
                );
            }
            assert!(is_main(logs_of(kind)[0]));
            assert!(logs_of(kind)[1..].iter().all(|log| !is_main(*log)));
        }
    }

    #[test]
    fn a_majority_counts_the_leader() {
        let node = |n: usize| NodeId::new(&format!("n{n}")).unwrap();
        for (replicas, majority) in [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3)] {
            let view = ReplicaView {
                generation: Generation(1),
                leader: node(0),
                replicas: (0..replicas).map(node).collect(),
                consistency: Consistency::Quorum,
            };
            assert_eq!(view.majority(), majority, "of {replicas}");
            assert!(!view.is_follower(&node(0)));
            assert_eq!(view.is_follower(&node(1)), replicas > 1);
            assert!(!view.is_follower(&node(9)));
        }
    }
}
