//! One follower's copy of one log.
//!
//! A request is taken through a fixed order of checks: its own numbers, generation, membership, checksum,
//! health of the log, the accepted generation persisted, then what its kind says. Requests of a log are
//! decided one after the other, in the order of their arrival; their disk work is pipelined and each is
//! answered once everything it rests on is durable, in order.
//!
//! What it does not do: read frames, know peers, or touch a disk. The bytes to compare with are asked for
//! in bounded reads ([`FollowerAction::Read`]).
//!
//! Invariants (by the numbers of the protocol's list):
//! * I8, I9: the accepted generation only grows, and is on disk before any positive answer or gap at it.
//! * I10: after an answer at a generation nothing is stored, placed or discarded for an older one.
//! * I15: a request refused by generation, membership or checksum changes nothing.
//! * I16: a positive answer never exceeds the match mark nor the durable tail.
//! * I17: records are stored at the offset the leader named, or not at all.
//! * I19, I20: only records of an older generation are dropped, from its start on at most, and never one
//!   that this generation's leader agreed with.
//! * I21: only a rebuild gives a log up, and what it holds from the leader's base on stays until the leader's own
//!   bytes replace it: of a stream, a leader that is lost meanwhile has cost no copy of anything. A log that is a
//!   state has lost its head before what stands for that is there; a damaged one is given up whole.

mod action;
mod checks;
mod disk;
pub mod position;
mod records;
mod whole;

use std::collections::VecDeque;

use bytes::Bytes;

use crate::ids::{Generation, NodeId};
use crate::limits::{FOLLOWER_OWED_ANSWERS, FOLLOWER_WAITING_BYTES, FOLLOWER_WAITING_REQUESTS};
use crate::proto::outcome::PeerCode;

use super::types::{is_a_state, is_main, LogState, ReplicaLog, ReplicaView, ReplicateAnswer};
use position::Positions;

pub use action::{
    DiskError, DiskWork, FollowerAction, FollowerNote, FollowerRequest, StoredReadError,
};
pub use checks::answer_of_outsider;

/// Whether the log can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LogHealth {
    /// It is being opened or closed.
    Opening,
    /// It can.
    Open,
    /// A sync on it failed since the process started.
    Poisoned,
    /// Recovery found damage in it: nothing it says counts, and it can only be made anew.
    Broken,
    /// It cannot be opened at all on this broker.
    Unusable,
}

/// How a follower's log stands; for `/status`, metrics and tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FollowerState {
    /// Whether it can be used.
    pub health: LogHealth,
    /// First offset held.
    pub base: u64,
    /// One past the last record, durable or not.
    pub tail: u64,
    /// One past the last durable record.
    pub durable_tail: u64,
    /// The highest generation accepted.
    pub accepted: Generation,
    /// Below it the log equals the current leader's, as far as this process knows.
    pub match_mark: Option<u64>,
    /// Requests not decided yet.
    pub waiting: usize,
    /// Requests decided whose disk work is not durable yet.
    pub owed: usize,
}

/// What is known of equality with the leader of one generation.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Matched {
    generation: Generation,
    mark: Option<u64>,
    /// The one connection everything of this generation came on; `None` when there were several.
    connection: Option<u64>,
}

/// The request being decided, and what it waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Current {
    request: FollowerRequest,
    stage: Stage,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// From the top.
    Decide,
    /// Records up to `until` must be durable before they can be read.
    AwaitDurable { from: u64, until: u64 },
    /// A read is on its way.
    Reading { ticket: u64, next: u64, until: u64 },
    /// Everything started must be durable before the log is changed in another way than at its end.
    AwaitQuiet(Change),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    /// Drop from here on and store the rest of the batch.
    Truncate { at: u64 },
    /// Place an empty log.
    Bootstrap { base: u64 },
    /// Discard and place.
    Rebuild { base: u64 },
    /// Compare everything from here on anew, and let go of what differs.
    GiveUp { base: u64 },
}

/// Disk work started and not reported yet.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Pending {
    ticket: u64,
    /// The durable tail once it is durable.
    tail_after: u64,
    /// Until then the log on disk is another.
    is_placing: bool,
    is_done: bool,
}

/// An answer that waits for disk work.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Owed {
    request: u64,
    generation: Generation,
    /// The newest ticket it rests on; 0 is none.
    after: u64,
    answer: OwedAnswer,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OwedAnswer {
    /// As far as the log is matched and durable when it is sent.
    Matched,
    Fixed(ReplicateAnswer),
}

/// The log is not as thought: started work drains, then storage is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Resync {
    Draining,
    Asked,
}

/// One follower's copy of one log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FollowerLog {
    me: NodeId,
    /// It gives up what its leader says it has given up.
    takes_base: bool,
    /// Whoever leads next may have less of it than this leader had.
    is_companion: bool,
    view: Option<ReplicaView>,
    /// The first generation from which on the views named today's leader without a gap.
    leader_since: Generation,
    health: LogHealth,
    /// The log with all started work applied; `durable_tail` alone lags behind it.
    at: LogState,
    matched: Option<Matched>,
    /// The generation whose leader had the copy given up.
    given_up: Option<Generation>,
    /// The generation whose leader disagreed with a record a majority holds.
    below_commit: Option<Generation>,
    waiting: VecDeque<FollowerRequest>,
    waiting_bytes: usize,
    current: Option<Current>,
    pending: VecDeque<Pending>,
    owed: VecDeque<Owed>,
    resync: Option<Resync>,
    last_ticket: u64,
    outbox: VecDeque<FollowerAction>,
}

impl FollowerLog {
    /// A stream's log that is being opened: everything is refused as unavailable until `on_state`.
    pub fn new(me: NodeId, view: Option<ReplicaView>) -> Self {
        let leader_since = view.as_ref().map_or(Generation(0), |view| view.generation);
        Self {
            me,
            takes_base: false,
            is_companion: false,
            view,
            leader_since,
            health: LogHealth::Opening,
            at: LogState::default(),
            matched: None,
            given_up: None,
            below_commit: None,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            current: None,
            pending: VecDeque::new(),
            owed: VecDeque::new(),
            resync: None,
            last_ticket: 0,
            outbox: VecDeque::new(),
        }
    }

    /// A copy of that log of a shard. One that says the same without its head is given up below the leader's
    /// base once it is known to equal the leader's: nobody but the leader can tell what stands for the head,
    /// and whether those who may lead next have it.
    #[must_use]
    pub fn of_log(self, log: ReplicaLog) -> Self {
        Self {
            takes_base: is_a_state(log),
            is_companion: !is_main(log),
            ..self
        }
    }

    // -- getters --

    /// How the log stands.
    pub fn state(&self) -> FollowerState {
        FollowerState {
            health: self.health,
            base: self.at.base,
            tail: self.at.tail,
            durable_tail: self.at.durable_tail,
            accepted: self.at.accepted,
            match_mark: self.matched.as_ref().and_then(|matched| matched.mark),
            waiting: self.waiting.len() + usize::from(self.current.is_some()),
            owed: self.owed.len(),
        }
    }

    /// How far the log is known to equal that of the leader this broker reads in its catalog now, if it holds
    /// a record that this leader wrote in its unbroken run; `None` when it was compared with a former one only.
    ///
    /// Without such a record whoever leads next may lack what the two of them agree in: a dead leader's suffix
    /// carries a higher generation than records that were only inherited.
    pub fn matched_with_leader(&self) -> Option<u64> {
        let generation = self.view.as_ref()?.generation;
        let matched = self.matched.as_ref()?;
        let newest = self
            .at
            .history
            .generation_of(self.at.tail.checked_sub(1)?)?;
        let is_of_its_run = newest >= self.leader_since;
        matched
            .mark
            .filter(|_| matched.generation == generation && is_of_its_run)
    }

    /// Whether no request waits for an answer.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.current.is_none() && self.owed.is_empty()
    }

    /// Whether nothing at all is on its way: no request, no disk work, no action not taken yet.
    pub fn is_at_rest(&self) -> bool {
        self.is_idle() && self.pending.is_empty() && self.resync.is_none() && self.outbox.is_empty()
    }

    // -- inputs --

    /// The shard's assignment as this broker now reads it; `None` when it reads none.
    pub fn on_view(&mut self, view: Option<ReplicaView>) {
        let continues = match (&self.view, &view) {
            (Some(old), Some(new)) => {
                old.leader == new.leader
                    && (old.generation == new.generation
                        || old.generation.0.checked_add(1) == Some(new.generation.0))
            }
            (Some(_), None) | (None, Some(_)) | (None, None) => false,
        };
        if let Some(new) = view.as_ref().filter(|_| !continues) {
            self.leader_since = new.generation;
        }
        self.view = view;
    }

    /// What storage holds: at opening, and in answer to [`FollowerAction::ReportState`].
    pub fn on_state(&mut self, state: LogState) {
        self.at = state;
        (self.matched, self.given_up) = (None, None);
        self.resync = None;
        if self.health == LogHealth::Opening {
            self.health = LogHealth::Open;
        }
        if self.at.durable_tail < self.at.tail {
            // Somebody else's appends are on their way; nothing is read before they are durable.
            let generation = self.at.accepted;
            self.start(DiskWork::Accept { generation });
        }
    }

    /// Recovery found damage in the log; `accepted` is what is still known of its accepted generation. Its
    /// leader is told that the copy is no copy of its log, and may have it made anew.
    pub fn on_broken(&mut self, accepted: Generation) {
        self.cannot_be_read(accepted);
        self.health = LogHealth::Broken;
    }

    /// The log cannot be opened on this broker, whatever its leader asks.
    pub fn on_unusable(&mut self) {
        self.cannot_be_read(Generation(0));
        self.health = LogHealth::Unusable;
    }

    fn cannot_be_read(&mut self, accepted: Generation) {
        self.at = LogState {
            accepted,
            ..LogState::default()
        };
        (self.matched, self.given_up) = (None, None);
        self.resync = None;
    }

    /// The log is being closed: everything is refused as unavailable from here on.
    pub fn on_closing(&mut self) {
        self.health = LogHealth::Opening;
    }

    /// Where storage says that the log begins, whatever is on its way to it: until a copy placed anew is
    /// durable that is where the old one began.
    pub fn on_base_seen(&mut self, base: u64) {
        if !self.pending.iter().any(|pending| pending.is_placing) {
            self.on_base_raised(base);
        }
    }

    /// Records below `base` were given up by retention or compaction.
    pub fn on_base_raised(&mut self, base: u64) {
        if base > self.at.base && base <= self.at.tail {
            self.at.base = base;
            self.at.history.raise_base(base);
        }
    }

    /// A request arrived. One that finds the queue full is refused at once.
    pub fn on_request(&mut self, request: FollowerRequest) {
        let bytes = request.held_bytes();
        let is_full = self.waiting.len() >= FOLLOWER_WAITING_REQUESTS
            || (!self.waiting.is_empty() && self.waiting_bytes + bytes > FOLLOWER_WAITING_BYTES);
        if is_full {
            let answer = ReplicateAnswer::refused(PeerCode::Overload, "too many batches wait");
            let request = request.request;
            self.outbox
                .push_back(FollowerAction::Answer { request, answer });
            return;
        }
        self.waiting_bytes += bytes;
        self.waiting.push_back(request);
    }

    /// Stored records arrived, or cannot be read. `first_offset` is the offset of the first of them.
    pub fn on_read(&mut self, ticket: u64, result: Result<(u64, &[Bytes]), StoredReadError>) {
        let Some(mut current) = self.current.take() else {
            return;
        };
        match current.stage {
            Stage::Reading {
                ticket: asked,
                next,
                until,
            } if asked == ticket => self.take_read(current, next..until, result),
            stage => {
                // The answer to a question that is not asked any more.
                current.stage = stage;
                self.current = Some(current);
            }
        }
    }

    /// Disk work ended. Work may be refused at once, before the next action is taken.
    pub fn on_disk_done(&mut self, ticket: u64, result: Result<(), DiskError>) {
        match result {
            Ok(()) => self.work_is_durable(ticket),
            Err(error) => self.work_failed(ticket, error),
        }
    }

    // -- actions --

    /// The next thing to do. Actions are carried out in the order in which they are given.
    pub fn poll_action(&mut self) -> Option<FollowerAction> {
        loop {
            if let Some(action) = self.outbox.pop_front() {
                return Some(action);
            }
            if !self.advance() {
                return None;
            }
        }
    }

    /// One step of work; false when nothing can be done now.
    fn advance(&mut self) -> bool {
        if let Some(resync) = self.resync {
            let is_drained = self.pending.is_empty();
            if resync == Resync::Draining && is_drained {
                self.resync = Some(Resync::Asked);
                self.outbox.push_back(FollowerAction::ReportState);
                return true;
            }
            return false;
        }
        if let Some(current) = self.current.take() {
            return self.go_on(current);
        }
        if self.owed.len() >= FOLLOWER_OWED_ANSWERS {
            return false;
        }
        let Some(request) = self.waiting.pop_front() else {
            return false;
        };
        self.waiting_bytes -= request.held_bytes();
        self.decide(request);
        true
    }

    /// Whether the request being decided could move.
    fn go_on(&mut self, current: Current) -> bool {
        let is_ready = match current.stage {
            Stage::Decide => true,
            Stage::AwaitDurable { until, .. } => self.at.durable_tail >= until,
            Stage::AwaitQuiet(_) => self.pending.is_empty(),
            Stage::Reading { .. } => false,
        };
        if !is_ready {
            self.current = Some(current);
            return false;
        }
        let Current { request, stage } = current;
        match stage {
            Stage::Decide => self.decide(request),
            Stage::AwaitDurable { from, until } => self.ask_stored(request, from..until),
            Stage::AwaitQuiet(change) => self.make_change(request, change),
            // INV: never ready, see above.
            Stage::Reading { .. } => {}
        }
        true
    }

    // -- shared by the deciding parts --

    fn positions(&self) -> Positions {
        Positions {
            base: self.at.base,
            tail: self.at.tail,
            match_mark: self.matched.as_ref().and_then(|matched| matched.mark),
            newest: self.at.history.newest(self.at.tail),
            commit: self.at.commit,
            is_given_up: self.given_up.is_some(),
        }
    }

    fn wait(&mut self, request: FollowerRequest, stage: Stage) {
        self.current = Some(Current { request, stage });
    }

    fn owe(&mut self, request: &FollowerRequest, answer: OwedAnswer) {
        let after = self.pending.back().map_or(0, |pending| pending.ticket);
        self.owed.push_back(Owed {
            request: request.request,
            generation: request.generation,
            after,
            answer,
        });
        self.release();
    }

    fn refuse(&mut self, request: &FollowerRequest, code: PeerCode, detail: &'static str) {
        let answer = ReplicateAnswer::refused(code, detail);
        self.owe(request, OwedAnswer::Fixed(answer));
    }

    fn note(&mut self, note: FollowerNote) {
        self.outbox.push_back(FollowerAction::Note(note));
    }
}

#[cfg(test)]
mod tests;
