//! What cores, and the control threads, say to each other.
//!
//! A request crosses a lane at most once each way. A request that finds its lane full is refused
//! as overload; an answer never is: it waits in a backlog that cannot grow beyond the requests
//! the other core has outstanding here.

use std::sync::Arc;

use bytes::Bytes;

use crate::catalog::Catalog;
use crate::ids::{Generation, NodeId, ShardId};
use crate::proto::cache::{CacheFailure, CacheReply, CacheRequest};
use crate::proto::group::{GroupOp, GroupRefusal, GroupReply};
use crate::proto::outcome::Appended;
use crate::proto::replication::{ReplicaLogKey, ReplicateAnswer, ReplicateBody};
use crate::wire::internal::Payloads;

use super::super::quic::{EndpointId, StrayDatagram};
use super::event_run::EventRun;

/// Core to core.
pub enum LaneMsg {
    /// A datagram whose connection lives on the receiving core.
    Stray {
        endpoint: EndpointId,
        datagram: StrayDatagram,
    },
    /// Append for a shard of the receiving core.
    Append(Box<LaneAppend>),
    /// The answer to [`LaneMsg::Append`].
    AppendDone { ticket: u64, result: AppendResult },
    /// An operation on a cache or counter of the receiving core.
    Cache(Box<LaneCache>),
    /// The answer to [`LaneMsg::Cache`].
    CacheDone { ticket: u64, result: CacheResult },
    /// A request to a consumer group of the receiving core.
    Group(Box<LaneGroup>),
    /// The answer to [`LaneMsg::Group`].
    GroupDone { ask: u64, result: GroupResult },
    /// Nobody waits for this poll any more.
    CancelPoll { ask: u64 },
    /// Read from a log of the receiving core; see [`super::reads`].
    Read(Box<LaneRead>),
    /// The answer to [`LaneMsg::Read`].
    ReadDone { ticket: u64, result: EventRead },
    /// A leader's request for a copy on the receiving core.
    Replicate(Box<LaneReplicate>),
    /// The answer to [`LaneMsg::Replicate`].
    Replicated {
        ticket: u64,
        answer: ReplicateAnswer,
    },
    /// Nobody waits for this read any more.
    CancelRead { shard: Arc<ShardId>, ticket: u64 },
}

pub struct LaneAppend {
    pub ticket: u64,
    pub shard: Arc<ShardId>,
    pub generation: Generation,
    pub payloads: Payloads,
}

pub struct LaneCache {
    pub ticket: u64,
    pub shard: Arc<ShardId>,
    pub generation: Generation,
    pub request: CacheRequest,
}

/// What a leader asks of a follower's copy of one log.
pub struct LaneReplicate {
    pub ticket: u64,
    pub key: ReplicaLogKey,
    /// The name the sender greeted with.
    pub sender: Arc<str>,
    /// The connection it came on, numbered over all cores and the life of the process.
    pub connection: u64,
    pub generation: Generation,
    pub body: ReplicateBody,
}

pub struct LaneGroup {
    pub ask: u64,
    pub shard: Arc<ShardId>,
    pub group: Arc<str>,
    pub generation: Generation,
    pub op: GroupOp,
}

/// What a group request came to on the core that owns the shard.
pub type GroupResult = Result<GroupReply, GroupRefusal>;

/// What a cache or counter operation came to on the core that owns the shard.
pub type CacheResult = Result<CacheReply, CacheFailure>;

pub struct LaneRead {
    pub ticket: u64,
    pub shard: Arc<ShardId>,
    pub read: ReadAsk,
}

/// What a subscription wants to know of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadAsk {
    /// Base and durable tail, at once.
    Bounds,
    /// Records from `from`, as soon as there is at least one.
    Records { from: u64, max_bytes: usize },
}

/// The answer to a [`ReadAsk`].
#[derive(Debug, Clone)]
pub enum ReadResult {
    Bounds {
        base: u64,
        /// One past the last record readers may see.
        readable_end: u64,
        durable_tail: u64,
    },
    Records {
        first_offset: u64,
        records: Vec<Bytes>,
        /// One past the last record; the place to read on from.
        next_offset: u64,
        durable_tail: u64,
    },
    /// `from` lies below what is kept.
    Trimmed { base: u64 },
    /// It is not known yet how far a majority holds the shard.
    NotReady,
    /// This broker does not lead the shard any more.
    NotOwner,
    /// The log cannot be read; the text is for the operator's log.
    Failed(Arc<str>),
}

/// What a subscription's [`ReadAsk`] came to.
#[derive(Debug, Clone)]
pub enum EventRead {
    Bounds {
        base: u64,
        readable_end: u64,
        durable_tail: u64,
    },
    /// Records, shared with whoever else reads at the same place, and where the readable ones end.
    Run {
        run: Arc<EventRun>,
        readable_end: u64,
    },
    /// The place lies below what is kept.
    Trimmed { base: u64 },
    /// It is not known yet how far a majority holds the shard.
    NotReady,
    /// This broker does not lead the shard any more.
    NotOwner,
    /// The log cannot be read; the text is for the operator's log.
    Failed(Arc<str>),
}

/// What an append came to on the core that owns the shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AppendResult {
    /// Durable.
    Stored(Appended),
    /// Surely nothing was written.
    Refused(AppendRefusal),
    /// The write or its flush failed: it may be on disk, and nobody may count on it.
    StorageFailed,
    /// Durable here, and not known to be on a majority; it may yet be.
    Unknown(UnknownWrite),
}

/// Why nobody can say whether a write that is durable here is committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum UnknownWrite {
    /// No majority held it in time.
    QuorumTimeout,
    /// This broker ceased to lead the shard meanwhile.
    LeadershipLost,
}

/// Why nothing was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AppendRefusal {
    /// Ownership or generation changed on the way.
    Moved,
    /// The shard is not open at its generation yet.
    Opening,
    /// A bounded queue on the way is full.
    Overloaded,
    /// No space; heals when space returns.
    DiskFull,
    /// The batch does not fit a commit group.
    TooLarge,
    /// The log failed earlier and is closed until the next start.
    LogFailed,
}

/// Control thread to core.
pub enum Control {
    /// A new catalog was taken over.
    Catalog(Arc<Catalog>),
    /// A peer's name was resolved.
    Resolved {
        node: NodeId,
        addr: std::net::SocketAddr,
    },
    /// The log takes no writes any more, for this reason.
    EndLog(String),
    /// Take no new work, finish what was taken, then stop.
    Drain,
    /// Stop now; what is unfinished is cut and counted.
    Cut,
}
