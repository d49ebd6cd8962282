//! One shard this broker leads, at one generation: its opening, its followers, its mark.

use std::collections::VecDeque;

use super::answers::{Answered, News, RebuildNews, Setting};
use super::cursor::{
    Ask, AskId, Asked, Cursor, CursorPhase, Fetched, HaltReason, LogView, PauseCause, Want,
};
use super::gate::{FollowerPosition, Report, ReportGate, ReportId, Submitted};
use super::limits::ShipLimits;
use super::mark::QuorumMark;
use super::opening::{LeadRefusal, LogStart, Opening, OpeningPhase};
use crate::ids::{Generation, NodeId};
use crate::proto::MonoTime;
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

struct ShippedLog {
    log: ReplicaLog,
    base: u64,
    synced: u64,
    /// In the order of the followers.
    cursors: Vec<Cursor>,
}

/// One shard this broker leads, at one generation. The first log is the shard's own; the others
/// accompany it and gate nothing.
pub struct ShardLeader<G> {
    spec: ShardSpec,
    logs: Vec<ShippedLog>,
    opening: Opening,
    mark: QuorumMark,
    /// Where this generation begins in the main log.
    floor: u64,
    committed: u64,
    gate: G,
    pending_report: Option<(ReportId, u64)>,
    /// Space for a report; one entry a follower.
    positions: Vec<FollowerPosition>,
    random: u64,
    events: VecDeque<ShardEvent>,
}

impl<G: ReportGate> ShardLeader<G> {
    /// Begins to lead. `logs` are the shard's logs as they are on disk, its own first, then its
    /// companions in the order in which they are to be shipped.
    pub fn begin(spec: ShardSpec, gate: G, logs: &[LogStart]) -> Result<Self, LeadRefusal> {
        let mut shipped = Vec::with_capacity(logs.len());
        let mut events = VecDeque::new();
        let mut floor = 0;
        let mut run_start = 0;
        for (at, start) in logs.iter().enumerate() {
            let own = start.may_lead(&spec.me, spec.generation)?;
            if at == 0 {
                (floor, run_start) = (own.generation_start, own.run_start);
            }
            // A companion is compared from its beginning: followers of other makes keep no history
            // for it.
            let from = match at {
                0 => own.generation_start.saturating_sub(1).max(start.state.base),
                _ => start.state.base,
            };
            if !own.is_recorded || start.state.accepted < spec.generation {
                events.push_back(ShardEvent::Record { log: start.log });
            }
            shipped.push(ShippedLog {
                log: start.log,
                base: start.state.base,
                synced: start.state.durable_tail,
                cursors: spec.followers.iter().map(|_| Cursor::new(from)).collect(),
            });
        }
        let followers = spec.followers.len();
        let mut leader = Self {
            opening: Opening::new(followers, events.len()),
            mark: QuorumMark::new(followers + 1, G::COMPARES_LOGS.then_some(run_start)),
            floor,
            // What lies below the base was committed when it was trimmed. Without that, followers that
            // have to compare from below it and a mark that waits for them would wait for each other.
            committed: logs
                .first()
                .map_or(0, |log| log.state.commit.max(log.state.base)),
            gate,
            pending_report: None,
            positions: Vec::with_capacity(followers),
            random: spec.seed,
            logs: shipped,
            events,
            spec,
        };
        leader.after_opening_step(OpeningPhase::Recording);
        Ok(leader)
    }

    pub fn generation(&self) -> Generation {
        self.spec.generation
    }

    pub fn followers(&self) -> &[NodeId] {
        &self.spec.followers
    }

    /// Whether writes wait for a majority.
    pub fn is_quorum(&self) -> bool {
        self.spec.is_quorum
    }

    pub fn opening(&self) -> OpeningPhase {
        self.opening.phase()
    }

    /// Whether writes may be taken.
    pub fn is_open(&self) -> bool {
        self.opening.is_open()
    }

    /// How far a majority holds the main log; `None` before the first mark of this generation.
    pub fn mark(&self) -> Option<u64> {
        self.mark.get()
    }

    /// Retention may give up records of that log below this offset; `u64::MAX` is no bound.
    ///
    /// Of the main log of a `Quorum` shard only what a majority holds: nothing before the first mark of
    /// a generation. Otherwise records that were never committed would be gone, and followers that lack
    /// them could not be given a copy without a hole.
    pub fn may_forget_below(&self, log: ReplicaLog) -> u64 {
        let is_main = self.logs.first().is_some_and(|main| main.log == log);
        match is_main && self.spec.is_quorum {
            true => self.committed.max(self.mark.get().unwrap_or(0)),
            false => u64::MAX,
        }
    }

    /// Where this generation begins in the main log.
    pub fn floor(&self) -> u64 {
        self.floor
    }

    /// A cursor, for listings and tests.
    pub fn cursor(&self, follower: FollowerIdx, log: ReplicaLog) -> Option<&Cursor> {
        let shipped = self.logs.iter().find(|shipped| shipped.log == log)?;
        shipped.cursors.get(usize::from(follower.0))
    }

    /// Records of the main log that the slowest follower lacks; halted ones are not counted.
    pub fn lag(&self) -> u64 {
        let Some(main) = self.logs.first() else {
            return 0;
        };
        let counted = main
            .cursors
            .iter()
            .filter(|cursor| cursor.halted().is_none());
        counted
            .map(|cursor| {
                main.synced
                    .saturating_sub(cursor.position().unwrap_or(main.base))
            })
            .max()
            .unwrap_or(0)
    }

    /// Replicas nothing is shipped to.
    pub fn halted(&self) -> impl Iterator<Item = HaltedReplica> + '_ {
        self.logs.iter().flat_map(move |shipped| {
            let pairs = self.spec.followers.iter().zip(&shipped.cursors);
            pairs.filter_map(move |(follower, cursor)| {
                Some(HaltedReplica {
                    follower: follower.clone(),
                    log: shipped.log,
                    generation: self.spec.generation,
                    position: cursor.position(),
                    reason: cursor.halted()?,
                })
            })
        })
    }

    /// Copies being made anew.
    pub fn rebuilding(&self) -> usize {
        let cursors = self.logs.iter().flat_map(|shipped| &shipped.cursors);
        cursors
            .filter(|cursor| cursor.phase() == CursorPhase::Rebuilding)
            .count()
    }

    /// The next thing that happened. Call until `None` after every input.
    pub fn poll_event(&mut self) -> Option<ShardEvent> {
        self.events.pop_front()
    }

    /// One log's own generation is durable, or will never be.
    pub fn on_recorded(&mut self, is_durable: bool) {
        let before = self.opening.phase();
        self.opening.on_recorded(is_durable);
        self.after_opening_step(before);
    }

    /// The synced tail or the base of a log moved.
    pub fn on_log(&mut self, log: ReplicaLog, base: u64, synced: u64) {
        let Some(at) = self.logs.iter().position(|shipped| shipped.log == log) else {
            return;
        };
        let shipped = &mut self.logs[at];
        (shipped.base, shipped.synced) = (base, synced);
        if at == 0 {
            self.advance_mark();
        }
    }

    /// Whether [`Self::next_ask`] has something for that follower.
    pub fn wants(&self, follower: FollowerIdx, now: MonoTime) -> bool {
        self.find_want(follower, now).is_some()
    }

    /// What to send that follower next. What is asked must be carried out and answered with
    /// [`Self::on_fetched`] and [`Self::on_answer`]; all requests to one follower travel on one
    /// ordered stream, in the order in which they are asked and fetched.
    pub fn next_ask(
        &mut self,
        follower: FollowerIdx,
        now: MonoTime,
        slots: &dyn RebuildSlots,
    ) -> Option<(ReplicaLog, Asked)> {
        let (at, want) = self.find_want(follower, now)?;
        let view = self.view(at);
        let limits = self.spec.limits;
        let shipped = &mut self.logs[at];
        let log = shipped.log;
        let cursor = &mut shipped.cursors[usize::from(follower.0)];
        cursor.on_time(now);
        if want == Want::Rebuild {
            // I29: whoever might be promoted on a report may not lose its copy.
            let is_unnamed = self.gate.is_unnamed(usize::from(follower.0));
            if !is_unnamed || !slots.try_take() {
                if let Some(halt) = &mut cursor.halt {
                    halt.rebuild_at = now + limits.slot_poll;
                }
                return None;
            }
            cursor.holds_slot = true;
        }
        let asked = cursor.ask(want, &view, &limits)?;
        Some((log, asked))
    }

    /// What a fetch came to. True: send the records now, under that id.
    pub fn on_fetched(
        &mut self,
        follower: FollowerIdx,
        log: ReplicaLog,
        id: AskId,
        fetched: Fetched,
        now: MonoTime,
    ) -> bool {
        let limits = self.spec.limits;
        let is_superseded = self.opening.phase() == OpeningPhase::Fenced;
        let Some(shipped) = self.logs.iter_mut().find(|shipped| shipped.log == log) else {
            return false;
        };
        let Some(cursor) = shipped.cursors.get_mut(usize::from(follower.0)) else {
            return false;
        };
        let is_wanted = cursor.on_fetched(id, fetched, &limits, now, &mut self.random);
        is_wanted && !is_superseded
    }

    /// What a request to a follower came to.
    pub fn on_answer(
        &mut self,
        follower: FollowerIdx,
        log: ReplicaLog,
        id: AskId,
        answer: Answered,
        now: MonoTime,
        slots: &dyn RebuildSlots,
    ) {
        let Some(at) = self.logs.iter().position(|shipped| shipped.log == log) else {
            return;
        };
        let view = self.view(at);
        let limits = self.spec.limits;
        let place = usize::from(follower.0);
        let Some(cursor) = self.logs[at].cursors.get_mut(place) else {
            return;
        };
        let mut setting = Setting {
            log: &view,
            limits: &limits,
            now,
            random: &mut self.random,
        };
        let news = cursor.on_answer(id, answer, &mut setting);
        self.take_news(at, follower, news, slots);
    }

    fn take_news(
        &mut self,
        at: usize,
        follower: FollowerIdx,
        news: News,
        slots: &dyn RebuildSlots,
    ) {
        let place = usize::from(follower.0);
        let log = self.logs[at].log;
        if let Some(reason) = news.halted {
            self.events.push_back(ShardEvent::Halted {
                follower,
                log,
                reason,
            });
        }
        if let Some(cause) = news.paused {
            self.events.push_back(ShardEvent::Paused {
                follower,
                log,
                cause,
            });
        }
        if let Some(rebuild) = news.rebuild {
            self.take_rebuild_news(at, follower, rebuild, slots);
        }
        if news.superseded {
            return self.on_superseded(slots);
        }
        if at == 0 {
            if news.is_fencing {
                let before = self.opening.phase();
                self.opening.on_fenced_follower(place);
                self.after_opening_step(before);
            }
            if news.moved {
                self.advance_mark();
            }
        }
    }

    fn take_rebuild_news(
        &mut self,
        at: usize,
        follower: FollowerIdx,
        rebuild: RebuildNews,
        slots: &dyn RebuildSlots,
    ) {
        let shipped = &mut self.logs[at];
        let log = shipped.log;
        let cursor = &mut shipped.cursors[usize::from(follower.0)];
        let is_over = match rebuild {
            RebuildNews::Started => {
                self.events
                    .push_back(ShardEvent::RebuildStarted { follower, log });
                // An empty log is level at once.
                cursor.position.is_some_and(|at| at >= shipped.synced)
            }
            RebuildNews::Refused => {
                self.events
                    .push_back(ShardEvent::RebuildRefused { follower, log });
                true
            }
            RebuildNews::Completed | RebuildNews::Interrupted => true,
        };
        if is_over && std::mem::replace(&mut cursor.holds_slot, false) {
            slots.give_back();
            if matches!(rebuild, RebuildNews::Completed | RebuildNews::Started) {
                self.events
                    .push_back(ShardEvent::RebuildCompleted { follower, log });
            }
        }
    }

    /// A newer generation exists: nothing more is sent, marked or acknowledged at this one (I28).
    pub fn on_superseded(&mut self, slots: &dyn RebuildSlots) {
        if self.opening.phase() == OpeningPhase::Fenced {
            return;
        }
        self.opening.on_superseded();
        self.give_slots_back(slots);
        self.events.push_back(ShardEvent::Superseded);
    }

    /// The shard is not led at this generation any more; rebuild slots go back.
    pub fn retire(mut self, slots: &dyn RebuildSlots) {
        self.give_slots_back(slots);
    }

    fn give_slots_back(&mut self, slots: &dyn RebuildSlots) {
        for cursor in self.logs.iter_mut().flat_map(|log| &mut log.cursors) {
            if std::mem::replace(&mut cursor.holds_slot, false) {
                slots.give_back();
            }
        }
    }

    /// The connection to that broker has come up anew.
    pub fn on_peer_up(&mut self, follower: FollowerIdx) {
        self.each_cursor(follower, Cursor::on_peer_up);
    }

    /// The catalog was read again, and this shard's assignment is as before.
    pub fn on_view(&mut self) {
        for cursor in self.logs.iter_mut().flat_map(|log| &mut log.cursors) {
            cursor.on_view();
        }
    }

    fn each_cursor(&mut self, follower: FollowerIdx, step: impl Fn(&mut Cursor)) {
        for shipped in &mut self.logs {
            if let Some(cursor) = shipped.cursors.get_mut(usize::from(follower.0)) {
                step(cursor);
            }
        }
    }

    /// When [`Self::on_time`] has something to do; `None` for a shard that has nothing to wait
    /// for, which is what an idle one is.
    pub fn next_deadline(&self) -> Option<MonoTime> {
        if !self.may_ship() {
            return None;
        }
        let cursors = self.logs.iter().flat_map(|log| &log.cursors);
        cursors.filter_map(Cursor::next_deadline).min()
    }

    /// Time passed: waits that are over end.
    pub fn on_time(&mut self, now: MonoTime) {
        for cursor in self.logs.iter_mut().flat_map(|log| &mut log.cursors) {
            cursor.on_time(now);
        }
    }

    /// A report was stored, or refused.
    pub fn on_report(&mut self, id: ReportId, is_stored: bool) {
        let Some((_, mark)) = self.pending_report.take_if(|(pending, _)| *pending == id) else {
            return;
        };
        if is_stored {
            self.release(mark);
        }
        self.advance_mark();
    }

    fn advance_mark(&mut self) {
        let is_leading = matches!(
            self.opening.phase(),
            OpeningPhase::Probing | OpeningPhase::Open
        );
        let Some(main) = self.logs.first().filter(|_| is_leading) else {
            return;
        };
        let answered = main.cursors.iter().filter_map(Cursor::counted);
        let Some(candidate) = self.mark.candidate(main.synced, answered) else {
            return;
        };
        if self.pending_report.is_some() {
            // The next one collects what arrives meanwhile.
            return;
        }
        self.positions.clear();
        self.positions
            .extend(main.cursors.iter().map(|cursor| FollowerPosition {
                answered: cursor.position(),
                halted: cursor.halted(),
            }));
        let report = Report {
            generation: self.spec.generation,
            leader_tail: main.synced,
            mark: Some(candidate),
            floor: self.floor,
            followers: &self.positions,
        };
        match self.gate.submit(&report) {
            Submitted::Stored => self.release(candidate),
            Submitted::Pending(id) => self.pending_report = Some((id, candidate)),
        }
    }

    fn release(&mut self, mark: u64) {
        if self.opening.phase() != OpeningPhase::Fenced {
            self.mark.release(mark);
            self.events.push_back(ShardEvent::Marked { mark });
        }
    }

    fn after_opening_step(&mut self, before: OpeningPhase) {
        if before != OpeningPhase::Open && self.opening.is_open() {
            self.events.push_back(ShardEvent::Opened);
            self.advance_mark();
        }
    }

    fn may_ship(&self) -> bool {
        matches!(
            self.opening.phase(),
            OpeningPhase::Probing | OpeningPhase::Open
        )
    }

    fn view(&self, at: usize) -> LogView {
        let shipped = &self.logs[at];
        let is_bounded = at == 0 && self.spec.is_quorum;
        LogView {
            base: shipped.base,
            synced: shipped.synced,
            committed: is_bounded.then(|| self.committed.max(self.mark.get().unwrap_or(0))),
            is_probing: !self.opening.is_open(),
        }
    }

    /// The first log of the shard that has something for the follower.
    fn find_want(&self, follower: FollowerIdx, now: MonoTime) -> Option<(usize, Want)> {
        if !self.may_ship() {
            return None;
        }
        // Until a majority is fenced nothing but the probes of the main log leaves.
        let logs = if self.opening.is_open() {
            self.logs.len()
        } else {
            1
        };
        for at in 0..logs {
            let cursor = self.logs[at].cursors.get(usize::from(follower.0))?;
            let want = cursor.want(&self.view(at), &self.spec.limits, now);
            let may = match want {
                Want::Nothing => false,
                Want::Probe { .. } => true,
                Want::Fetch { .. } => {
                    (self.opening.is_open() || cursor.probe_refused)
                        && self.is_in_turn(at, follower)
                }
                Want::Bootstrap | Want::Rebuild => self.opening.is_open(),
            };
            if may {
                return Some((at, want));
            }
        }
        None
    }

    /// A follower that holds a group's position and not the dead letter before it would lose that
    /// record for good, so cursors follow dead letters: what a cursor record depends on is synced
    /// here before it, and a level follower has all of that.
    fn is_in_turn(&self, at: usize, follower: FollowerIdx) -> bool {
        if self.logs[at].log != ReplicaLog::GroupCursors {
            return true;
        }
        let letters = self
            .logs
            .iter()
            .find(|shipped| shipped.log == ReplicaLog::GroupDeadLetters);
        let Some(letters) = letters else {
            return true;
        };
        letters
            .cursors
            .get(usize::from(follower.0))
            .is_none_or(|cursor| {
                cursor.halted().is_some()
                    || cursor
                        .position()
                        .is_some_and(|position| position >= letters.synced)
            })
    }
}

impl<G> std::fmt::Debug for ShardLeader<G> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ShardLeader")
            .field("generation", &self.spec.generation)
            .field("opening", &self.opening.phase())
            .field("mark", &self.mark.get())
            .finish_non_exhaustive()
    }
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
