//! One shard this broker leads, at one generation: its opening, its followers, its mark.

mod marking;
mod types;
mod views;
mod wants;

use std::collections::VecDeque;

use super::answers::{Answered, News, RebuildNews, Setting};
use super::cursor::{AskId, Asked, Cursor, Fetched, Want};
use super::gate::{FollowerPosition, ReportGate, ReportId};
use super::mark::QuorumMark;
use super::opening::{LeadRefusal, LogStart, Opening, OpeningPhase};
use crate::proto::replication::types::is_a_state;
use crate::proto::MonoTime;
use crate::wire::internal::ReplicaLog;

pub use types::{FollowerIdx, HaltedReplica, RebuildSlots, ShardEvent, ShardSpec};

struct ShippedLog {
    log: ReplicaLog,
    base: u64,
    synced: u64,
    /// Where the log ended when its base rose to where it is: what was given up for it is below.
    restated: u64,
    /// Where this generation begins in it.
    began: u64,
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
    /// The report being stored, and the mark it is to publish, if it is to publish one.
    pending_report: Option<(ReportId, Option<u64>)>,
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
                restated: start.state.durable_tail,
                began: own.generation_start,
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
        if base > shipped.base {
            shipped.restated = synced;
        }
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
        let may_be_filled = self.may_be_filled(at, follower);
        // I29: whoever might be promoted on a report may not lose its copy.
        let is_unnamed = want != Want::Rebuild || self.gate.is_unnamed(usize::from(follower.0));
        if !is_unnamed {
            self.unname_the_halted();
        }
        let view = self.view(at);
        let mut limits = self.spec.limits;
        let shipped = &mut self.logs[at];
        let log = shipped.log;
        if let (ReplicaLog::GroupCursors, Want::Fetch { from }) = (log, want) {
            // Only what was there when the dead letters were found level: until the records are
            // read, more may come of both.
            let known = shipped.synced.saturating_sub(from).max(1);
            limits.batch_records = limits
                .batch_records
                .min(known.try_into().unwrap_or(u32::MAX));
        }
        let cursor = &mut shipped.cursors[usize::from(follower.0)];
        cursor.on_time(now);
        if want == Want::Rebuild {
            if !is_unnamed || !may_be_filled || !slots.try_take() {
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
        let is_awaited = cursor.awaits(id);
        let is_wanted = cursor.on_fetched(id, fetched, &limits, now, &mut self.random);
        if is_awaited && fetched == Fetched::Trimmed && is_a_state(log) {
            cursor.ask_before_offer();
        }
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
            self.free_slot_of_waiting(log, place, slots);
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

    /// A new copy of cursors is filled only behind its dead letters. While those are halted it must not keep
    /// the slot that they may need for a new copy of their own.
    fn free_slot_of_waiting(&mut self, halted: ReplicaLog, place: usize, slots: &dyn RebuildSlots) {
        if halted != ReplicaLog::GroupDeadLetters {
            return;
        }
        let cursors = self
            .logs
            .iter_mut()
            .find(|shipped| shipped.log == ReplicaLog::GroupCursors);
        let waiting = cursors.and_then(|shipped| shipped.cursors.get_mut(place));
        if waiting.is_some_and(|cursor| std::mem::replace(&mut cursor.holds_slot, false)) {
            slots.give_back();
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
        // Who counts again may be the one that was missing.
        self.advance_mark();
    }

    /// The catalog was read again, and this shard's assignment is as before.
    pub fn on_view(&mut self) {
        for cursor in self.logs.iter_mut().flat_map(|log| &mut log.cursors) {
            cursor.on_view();
        }
        self.advance_mark();
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
