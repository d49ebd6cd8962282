//! One consumer group of one stream shard: who has which record, and how far the group has come.
//!
//! The members of a group share the records of a shard. A poll claims records; an ack finishes
//! one; a nack, or a claim that lapses, owes it again; a record that was delivered too often is a
//! dead letter. The group's *position* is the lowest offset not finished. It and the dead letters
//! are in logs; claims, attempts and who holds what are in memory only and are rebuilt from the
//! position, which costs a delivery again and never a record.
//!
//! The machine is told the time, the bounds of the shard's log, requests, what reads brought and
//! what became of writes; it says what to answer, read and write. It does neither itself.
//!
//! Invariants:
//! * GRP-1: the position never passes a record that is not acked, dead-lettered or trimmed, and
//!   never falls except by a seek.
//! * GRP-2: a dead letter's entry is durable before the position passes it, and before anybody is
//!   told of it.
//! * GRP-3: an ack that moves the position, a redrive, a discard and the ack of a redriven record
//!   are answered only when their record is durable.
//! * GRP-4: every request is answered exactly once, or its poll was cancelled.
//! * GRP-5: memory is bounded by the limits: a finished record takes none, so a group costs what
//!   its unsettled records, dead letters and waiting polls cost.

mod admin;
pub mod entry;
mod machine;
mod polls;
mod refusal;
mod settle;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::proto::cache::CacheFailure;

pub use entry::{DeadEntry, EntryFault};
pub use machine::Group;

/// The bounds of one group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupLimits {
    /// How long a claim stands when the poll does not say.
    pub claim: Duration,
    /// The longest claim, delay or extension; longer ones are cut to it.
    pub longest_claim: Duration,
    /// Deliveries after which a record is a dead letter.
    pub attempts: u32,
    /// The longest a poll may wait for work.
    pub longest_wait: Duration,
    /// Most records of one poll.
    pub poll_records: usize,
    /// Payload bytes of one poll, the first record apart.
    pub poll_bytes: usize,
    /// Reads made for one poll.
    pub poll_reads: u32,
    /// Records handed out or owed and not finished; past it nothing new is handed out.
    pub unsettled: usize,
    /// Dead letters kept; past it records that ought to become one stay unsettled.
    pub dead_letters: usize,
    /// Polls that wait at once.
    pub waiting_polls: usize,
    /// How long a group that nobody asks for stays in memory.
    pub idle: Duration,
    /// How long after a failed write of its own accord the group tries again.
    pub write_retry: Duration,
}

impl Default for GroupLimits {
    fn default() -> Self {
        Self {
            claim: Duration::from_secs(30),
            longest_claim: Duration::from_secs(12 * 3600),
            attempts: 5,
            longest_wait: Duration::from_secs(30),
            poll_records: 1000,
            poll_bytes: 4 << 20,
            poll_reads: 64,
            unsettled: 10_000,
            dead_letters: 100_000,
            waiting_polls: 1024,
            idle: Duration::from_secs(600),
            write_retry: Duration::from_secs(1),
        }
    }
}

/// A member of a group, and where it speaks from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Principal and consumer name.
    pub name: Arc<str>,
    /// The connection; a claim of another one is an older one's.
    pub session: u64,
}

/// A poll.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Poll {
    pub max_records: usize,
    /// How long to wait for work; cut to the limit.
    pub wait: Duration,
    /// How long the claims stand; `None` or zero is the group's own.
    pub visibility: Option<Duration>,
    pub member: Option<Member>,
    /// Owes the member's claims from other connections again, first.
    pub reclaim: bool,
}

/// Where a seek goes, with the log's bounds already looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SeekTo {
    Earliest,
    Latest,
    Offset(u64),
}

/// What is asked of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GroupOp {
    Poll(Poll),
    Ack {
        offset: u64,
    },
    Nack {
        offset: u64,
        delay: Duration,
        /// The delivery meant; 0 is whichever stands.
        attempts: u32,
    },
    Extend {
        offset: u64,
        attempts: u32,
        by: Duration,
    },
    /// Gives up on a record that was handed out.
    DeadLetter {
        offset: u64,
    },
    ListDead,
    Redrive {
        offset: u64,
    },
    Discard {
        offset: u64,
    },
    Seek {
        to: SeekTo,
        if_new: bool,
    },
    Describe,
    Delete,
}

/// A record handed out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delivered {
    pub offset: u64,
    pub payload: Bytes,
    /// Deliveries, this one included.
    pub attempts: u32,
    /// Offsets just below this one that were trimmed before the group came to them.
    pub skipped_before: u64,
}

/// Where a group stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupInfo {
    /// The durable position; `None` for a group that never moved.
    pub committed: Option<u64>,
    pub tail: u64,
    pub in_flight: u64,
    /// Handed out before and waiting for another delivery.
    pub owed: u64,
    pub dead_letters: u64,
}

/// What a request came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GroupReply {
    Records(Vec<Delivered>),
    Settled,
    Extended { visible: Duration },
    DeadLetters(Vec<u64>),
    Position { offset: u64, moved: bool },
    Info(GroupInfo),
    Deleted { existed: bool },
}

/// Why a request was not done. Nothing was written, except as [`GroupRefusal::Log`] says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum GroupRefusal {
    #[error("no such record yet")]
    PastTail,
    #[error("the record was not handed out since the group was rebuilt")]
    NotHandedOut,
    #[error("the claim does not stand any more")]
    ClaimGone,
    #[error("not on the dead letter list")]
    NotListed,
    #[error("the record was trimmed")]
    Trimmed,
    #[error("the offset is outside the log")]
    OutOfRange,
    #[error("an earlier change is still being written")]
    Busy,
    #[error("too many records of the group are unsettled")]
    UnsettledFull,
    #[error("the dead letter list is full")]
    DeadLettersFull,
    #[error("too many polls of the group wait")]
    PollsFull,
    #[error("the log cannot be read")]
    ReadFailed,
    #[error("the group's own logs: {0:?}")]
    Log(CacheFailure),
}

/// What the driver must do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GroupAction {
    /// Answer the request with this ticket.
    Answer {
        ticket: u64,
        result: Result<GroupReply, GroupRefusal>,
    },
    /// Read records of the shard's log; at least one if there is any. One read at a time.
    Read { from: u64, max_bytes: usize },
    /// Write the position to the cursor log; `None` deletes it. One write at a time.
    WriteCursor { position: Option<u64> },
    /// Write an entry to the dead-letter log; `None` deletes it. One write an offset at a time.
    WriteEntry {
        offset: u64,
        entry: Option<DeadEntry>,
    },
}

/// What a group's logs say of it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Restored {
    pub position: Option<u64>,
    pub entries: Vec<(u64, DeadEntry)>,
    /// Entries past the position that may be about records which are gone: they do not count, and the
    /// group has them deleted, so that they never come to lie below it.
    pub stale: Vec<u64>,
}
