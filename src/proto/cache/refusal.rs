//! Why an operation was not done, and what the one who asked is told.

use crate::proto::client_code::{invalid, of_append_failure, of_route_refusal, AppendFailure};
use crate::proto::outcome::PeerCode;
use crate::proto::ownership::{RouteRefusal, Serving};
use crate::wire::client::{ErrorCode, Refusal, RetryClass};

/// Why an operation was not done here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CacheFailure {
    /// Ownership or generation changed on the way.
    Moved,
    /// The state is being read from the log, and as much as may wait for it waits.
    NotReady,
    /// A bounded queue on the way is full.
    Overloaded,
    /// No space; heals when space returns.
    DiskFull,
    /// The keys of this core take as much memory as they may.
    IndexFull,
    /// The record does not fit a commit group.
    TooLarge,
    /// A counter's sum would leave its range.
    Overflow,
    /// A forwarded add whose delta is not eight bytes.
    BadDelta,
    /// The log failed earlier and is closed until the next start.
    LogFailed,
    /// The write or its flush failed: it may be on disk, and nobody may count on it.
    StorageFailed,
    /// Durable on the leader, and no majority held it in time.
    QuorumTimeout,
    /// Durable on the leader, which ceased to lead.
    LeadershipLost,
    /// The value cannot be read back. Nothing was changed, unless it was being deleted.
    ReadFailed,
}

const OVERFLOW: &str = "the counter's sum would leave the range of a signed 64-bit number";
const INDEX_FULL: &str = "this broker holds as many cache keys as it may";
const QUORUM_TIMEOUT: &str = "no majority of the replicas held it in time";
const LEADERSHIP_LOST: &str = "the leader of the shard changed meanwhile";
const READ_FAILED: &str = "the value cannot be read";

impl CacheFailure {
    /// What a client is told. `is_write` says whether the operation changes anything.
    pub fn to_client(self, is_write: bool) -> Refusal {
        match self {
            Self::Moved => of_route_refusal(RouteRefusal::NotServing(Serving::Fenced)),
            Self::NotReady => of_route_refusal(RouteRefusal::NotServing(Serving::Opening)),
            Self::Overloaded => of_append_failure(AppendFailure::QueueFull),
            Self::DiskFull => of_append_failure(AppendFailure::DiskFull),
            Self::IndexFull => {
                Refusal::new(ErrorCode::Overloaded, INDEX_FULL).with_retry_after_ms(1000)
            }
            Self::TooLarge => of_append_failure(AppendFailure::TooLarge),
            Self::Overflow => invalid(OVERFLOW),
            Self::BadDelta => invalid("the delta is not eight bytes"),
            Self::LogFailed => of_append_failure(AppendFailure::LogFailed),
            Self::StorageFailed => of_append_failure(AppendFailure::FlushFailed),
            Self::QuorumTimeout => Refusal::new(ErrorCode::QuorumTimeout, QUORUM_TIMEOUT),
            Self::LeadershipLost => Refusal::new(ErrorCode::LeadershipLost, LEADERSHIP_LOST),
            Self::ReadFailed => {
                let class = match is_write {
                    true => RetryClass::OutcomeUnknown,
                    false => RetryClass::Retry,
                };
                Refusal::new(ErrorCode::Storage, READ_FAILED).with_class(class)
            }
        }
    }

    /// What a peer is told.
    pub fn to_peer(self) -> (PeerCode, &'static str) {
        match self {
            Self::Moved => (PeerCode::Unavailable, "ownership changed meanwhile"),
            Self::NotReady => (PeerCode::Unavailable, "the cache is being read"),
            Self::Overloaded => (PeerCode::Overload, "the storage queue is full"),
            Self::DiskFull => (PeerCode::Overload, "the disk is full"),
            Self::IndexFull => (PeerCode::Overload, INDEX_FULL),
            Self::TooLarge => (PeerCode::Malformed, "the record is larger than a commit"),
            Self::Overflow => (PeerCode::Malformed, OVERFLOW),
            Self::BadDelta => (PeerCode::Malformed, "the delta is not eight bytes"),
            Self::LogFailed => (PeerCode::StorageFailed, "the log is closed after a failure"),
            Self::StorageFailed => (PeerCode::StorageFailed, "the write or its flush failed"),
            // The one code that is neither retried nor read as "nothing was written".
            Self::QuorumTimeout => (PeerCode::StorageFailed, QUORUM_TIMEOUT),
            Self::LeadershipLost => (PeerCode::StorageFailed, LEADERSHIP_LOST),
            Self::ReadFailed => (PeerCode::StorageFailed, READ_FAILED),
        }
    }
}
