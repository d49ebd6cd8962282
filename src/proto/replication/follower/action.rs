//! What a follower's log is asked, and what it wants done.

use std::sync::Arc;

use super::position::Undroppable;
use crate::ids::{Generation, NodeId};
use crate::proto::replication::types::{ReplicateAnswer, ReplicateBody};
use crate::wire::internal::Payloads;

/// A request as it arrived, with who sent it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FollowerRequest {
    /// Names the request in its answer.
    pub request: u64,
    /// The name the sender greeted with, and proved if peers are authenticated.
    pub sender: Arc<str>,
    /// Names the connection it came on; another connection may be another process.
    pub connection: u64,
    /// The generation the sender leads at.
    pub generation: Generation,
    /// What it asks.
    pub body: ReplicateBody,
}

impl FollowerRequest {
    /// Bytes it keeps in memory while it waits.
    pub(super) fn held_bytes(&self) -> usize {
        match &self.body {
            ReplicateBody::Records { payloads, .. } => payloads.as_wire().len(),
            ReplicateBody::Bootstrap { .. } | ReplicateBody::Rebuild { .. } => 0,
        }
    }
}

/// What the driver does for a follower's log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FollowerAction {
    /// Send the one answer to a request.
    Answer {
        /// The request.
        request: u64,
        /// Its answer.
        answer: ReplicateAnswer,
    },
    /// Start disk work; it ends with `on_disk_done`, at once when it is refused. Work of one log becomes
    /// durable in the order in which it was started, and is not waited for in between.
    Disk {
        /// Names the work; ascending.
        ticket: u64,
        /// The work.
        work: DiskWork,
    },
    /// Read stored records; ends with `on_read`. Only durable records are asked for.
    Read {
        /// Names the read.
        ticket: u64,
        /// First offset wanted.
        from: u64,
        /// One past the last offset wanted; fewer may be returned.
        to: u64,
        /// Bytes to stop at, after at least one record.
        max_bytes: usize,
    },
    /// Call `on_state` with what storage says about the log.
    ReportState,
    /// Something an operator may want to know; nothing is done about it.
    Note(FollowerNote),
}

/// A change to the log on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiskWork {
    /// Persist the accepted generation. One that does not exceed the stored one only waits for what was
    /// started before.
    Accept {
        /// The generation.
        generation: Generation,
    },
    /// Enter `generation` into the history at the log's tail.
    Begin {
        /// The generation.
        generation: Generation,
        /// Who leads at it.
        leader: NodeId,
    },
    /// Append `payloads` behind the first `skip` at `first_offset`, which is the log's tail or the work
    /// fails.
    Append {
        /// The generation they came under.
        generation: Generation,
        /// Where they go.
        first_offset: u64,
        /// The batch.
        payloads: Payloads,
        /// How many of it are held already.
        skip: usize,
    },
    /// Cut the log back to `tail`.
    Truncate {
        /// The generation whose leader disagrees.
        generation: Generation,
        /// The new tail.
        tail: u64,
        /// That leader had the copy given up, so that anything may go.
        is_rebuild: bool,
    },
    /// Give up the records below `base`, which is at most the tail.
    RaiseBase {
        /// The generation whose leader asks.
        generation: Generation,
        /// The new base.
        base: u64,
    },
    /// Drop every record and the history, and start at `base`. The accepted generation stays.
    Place {
        /// The generation whose leader asks.
        generation: Generation,
        /// The new base and tail.
        base: u64,
    },
}

/// Why disk work was not done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DiskError {
    /// A bounded queue is full; nothing was written.
    Overloaded,
    /// There is no space; nothing is left of it.
    Full,
    /// A record is larger than this broker's storage can hold.
    TooLarge,
    /// The log is not where the work expected it; nothing was written.
    Moved,
    /// Recovery refused the log.
    Damaged,
    /// A write or a sync failed: the log is finished until the process restarts.
    Failed,
}

/// Why stored records were not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StoredReadError {
    /// They lie below the base by now.
    Trimmed,
    /// Too many reads wait.
    Overloaded,
    /// The device or the bytes are bad.
    Failed,
}

/// What a follower did, for operators and traces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FollowerNote {
    /// A generation was accepted.
    Accepted {
        /// The generation.
        generation: Generation,
    },
    /// A dead leader's suffix was dropped.
    Truncated {
        /// The generation whose leader disagreed.
        generation: Generation,
        /// The new tail.
        tail: u64,
        /// How many records went.
        records: u64,
    },
    /// The stored bytes differ and may not be dropped.
    Conflict {
        /// The generation whose leader disagrees.
        generation: Generation,
        /// The first offset that differs.
        at: u64,
        /// Why the difference is not repaired.
        why: Undroppable,
    },
    /// A copy was placed where the leader's log starts.
    Bootstrapped {
        /// Its base.
        base: u64,
    },
    /// The copy was given up: what is kept of it is compared with the leader's log from `base` on.
    Rebuilt {
        /// Where the comparison begins.
        base: u64,
        /// How many records went at once.
        records: u64,
    },
    /// The copy is about to begin where its leader's log begins by now.
    Shortened {
        /// Its base.
        base: u64,
        /// How many records went.
        records: u64,
    },
    /// A sync failed: nothing more is stored until the process restarts.
    Poisoned,
}
