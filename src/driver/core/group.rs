//! The owner's side of consumer groups: from a checked request to its answer.
//!
//! What decides is in [`proto::group`](crate::proto::group), one machine a group; this file finds
//! the machine, or makes it from what the shard's cursor and dead-letter logs say, and does what it
//! asks for: reads of the stream's log, writes to the two logs (they are caches of their own, see
//! [`cache`](super::cache)), answers, a timer.
//!
//! Invariant INV-9: a group lives only on the core that owns its shard, only while this broker
//! leads the shard at the generation the group was made under; a change of either ends it and
//! tells everybody who waits.
//!
//! Bounds: groups of a core ([`MAX_GROUPS_PER_CORE`]), what they hold together
//! ([`MAX_GROUP_HELD_PER_CORE`]), requests that wait for the logs to be read ([`MAX_ASKS_WAITING`],
//! for at most [`MAX_ASK_WAIT`]). Past any of them requests are refused.

mod run;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use storage_uring::LogRef;

use crate::ids::{Generation, ShardId};
use crate::limits::{MAX_GROUPS_PER_CORE, MAX_GROUP_HELD_PER_CORE};
use crate::proto::cache::{CacheFailure, CacheLog};
use crate::proto::group::entry::{restore, EntryFault, KnownEnds};
use crate::proto::group::{Group, GroupAction, GroupLimits, GroupOp, GroupRefusal, Restored};
use crate::proto::replication::leader::Readable;
use crate::proto::MonoTime;

use super::cache::CacheAt;
use super::message::{GroupResult, LaneGroup, LaneMsg};
use super::slots::Slots;
use super::Core;

/// Requests of one core that wait for the logs of their groups.
const MAX_ASKS_WAITING: usize = 1024;
/// How long they wait.
const MAX_ASK_WAIT: Duration = Duration::from_secs(2);

/// One group of one shard.
pub(super) type GroupAt = (Arc<ShardId>, Arc<str>);

/// Who asked: the core of the client, and its name for the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct AskedBy {
    pub core: usize,
    pub ask: u64,
}

/// Which record of a group was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GroupWrite {
    Cursor,
    Entry { offset: u64, is_burial: bool },
}

struct Running {
    machine: Group,
    generation: Generation,
    /// The shard's own log.
    log: LogRef,
    timer_at: Option<MonoTime>,
}

struct WaitingAsk {
    at: GroupAt,
    generation: Generation,
    op: GroupOp,
    from: AskedBy,
    since: Instant,
}

/// The groups of one core.
#[derive(Default)]
pub(super) struct Groups {
    shards: HashMap<Arc<ShardId>, HashMap<Arc<str>, Running>>,
    running: usize,
    /// Who waits for the answer of a machine, by its ticket.
    tickets: Slots<AskedBy>,
    /// Where the ticket of a poll may be found, to cancel it.
    polls: HashMap<AskedBy, (GroupAt, u64)>,
    /// Polls whose records are being read.
    reads: Slots<GroupAt>,
    waiting: Vec<WaitingAsk>,
    /// What all groups hold, as last counted.
    held: usize,
}

impl Groups {
    fn get_mut(&mut self, at: &GroupAt) -> Option<&mut Running> {
        self.shards.get_mut(&at.0)?.get_mut(&at.1)
    }

    fn remove(&mut self, at: &GroupAt) -> Option<Running> {
        let groups = self.shards.get_mut(&at.0)?;
        let running = groups.remove(&at.1)?;
        if groups.is_empty() {
            self.shards.remove(&at.0);
        }
        self.running -= 1;
        Some(running)
    }

    fn all(&self) -> Vec<GroupAt> {
        let shards = self.shards.iter();
        shards
            .flat_map(|(shard, groups)| {
                groups
                    .keys()
                    .map(|group| (Arc::clone(shard), Arc::clone(group)))
            })
            .collect()
    }

    /// Requests not answered.
    pub fn asks(&self) -> usize {
        self.tickets.len() + self.waiting.len()
    }

    pub fn is_settled(&self) -> bool {
        self.asks() == 0
    }
}

impl Core {
    /// Asks the group here or on the core that owns the shard; the answer comes to `ask`.
    pub(super) fn ask_group(
        &mut self,
        shard: &Arc<ShardId>,
        core: u16,
        generation: Generation,
        group: &Arc<str>,
        op: GroupOp,
        ask: u64,
    ) {
        if core == self.index {
            let from = AskedBy {
                core: usize::from(self.index),
                ask,
            };
            return self.group_here(shard, group, generation, op, from);
        }
        let message = LaneMsg::Group(Box::new(LaneGroup {
            ask,
            shard: Arc::clone(shard),
            group: Arc::clone(group),
            generation,
            op,
        }));
        if self.send_request(usize::from(core), message).is_err() {
            let refusal = GroupRefusal::Log(CacheFailure::Overloaded);
            self.finish_group_ask(ask, Err(refusal));
        }
    }

    pub(super) fn group_here(
        &mut self,
        shard: &Arc<ShardId>,
        group: &Arc<str>,
        generation: Generation,
        op: GroupOp,
        from: AskedBy,
    ) {
        self.metrics.group_requests.inc();
        let at = (Arc::clone(shard), Arc::clone(group));
        match self.ready_group(&at, generation) {
            Ok(true) => self.serve_group(&at, op, from),
            Ok(false) if self.groups.waiting.len() < MAX_ASKS_WAITING => {
                let since = self.now;
                self.groups.waiting.push(WaitingAsk {
                    at,
                    generation,
                    op,
                    from,
                    since,
                });
            }
            Ok(false) => {
                let refusal = GroupRefusal::Log(CacheFailure::NotReady);
                self.tell_asker(from, Err(refusal));
            }
            Err(refusal) => self.tell_asker(from, Err(refusal)),
        }
    }

    /// Whether the group is in memory; reads it from its logs when it is not.
    fn ready_group(&mut self, at: &GroupAt, generation: Generation) -> Result<bool, GroupRefusal> {
        if self.check_leads(&at.0, generation).is_err() {
            return Err(GroupRefusal::Log(CacheFailure::Moved));
        }
        let log = self
            .open_log(&at.0)
            .map_err(|refusal| GroupRefusal::Log(super::cache::of_refusal(refusal)))?;
        if self.readable(log) == Readable::NoMark {
            // Nobody can say yet which records of the shard will stay.
            return Err(GroupRefusal::Log(CacheFailure::NotReady));
        }
        match self.groups.get_mut(at).map(|running| running.generation) {
            Some(of) if of == generation => return Ok(true),
            Some(_) => self.end_group(at, GroupRefusal::Log(CacheFailure::Moved)),
            None => {}
        }
        let mut is_ready = true;
        for log in [CacheLog::Cursors, CacheLog::DeadLetters] {
            let ready = self.ready_cache(&(Arc::clone(&at.0), log));
            is_ready &= ready.map_err(GroupRefusal::Log)?;
        }
        if is_ready {
            self.start_group(at, generation, log)?;
        }
        Ok(is_ready)
    }

    fn start_group(
        &mut self,
        at: &GroupAt,
        generation: Generation,
        log: LogRef,
    ) -> Result<(), GroupRefusal> {
        if self.groups.running >= MAX_GROUPS_PER_CORE {
            return Err(GroupRefusal::Log(CacheFailure::Overloaded));
        }
        let restored = match self.restored_group(at, log) {
            Ok(restored) => restored,
            Err(fault) => {
                tracing::error!(shard = %at.0, group = %at.1, %fault, "a consumer group cannot be read from its logs");
                return Err(GroupRefusal::Log(CacheFailure::LogFailed));
            }
        };
        if !restored.stale.is_empty() {
            let entries = restored.stale.len();
            tracing::warn!(shard = %at.0, group = %at.1, entries, "dead letters past the group's position may be about records that a failover lost: deleted");
        }
        let (base, tail) = (self.storage.base(log), self.readable_end(log));
        let limits = GroupLimits::default();
        let machine = Group::new(limits, self.mono, restored, base, tail);
        let running = Running {
            machine,
            generation,
            log,
            timer_at: None,
        };
        let groups = self.groups.shards.entry(Arc::clone(&at.0)).or_default();
        groups.insert(Arc::clone(&at.1), running);
        self.groups.running += 1;
        self.metrics.groups.set(self.groups.running as u64);
        Ok(())
    }

    fn restored_group(
        &self,
        (shard, group): &GroupAt,
        log: LogRef,
    ) -> Result<Restored, EntryFault> {
        let index = |log| {
            let state = self.caches.get(&(Arc::clone(shard), log))?;
            state.index.values()
        };
        // What a `quorum` stream has handed out is never gone.
        let ends = match self.quorum_of(log) {
            Some(_) => KnownEnds::default(),
            None => {
                let stream = self.storage.state(log);
                let starts = stream.history.iter();
                KnownEnds::of(starts.map(|entry| (Generation(entry.generation), entry.start)))
            }
        };
        let cursor = index(CacheLog::Cursors).and_then(|cursors| cursors.resident(group));
        let letters = index(CacheLog::DeadLetters).into_iter();
        restore(
            group,
            &ends,
            cursor.map(|value| value.as_ref()),
            letters.flat_map(|letters| letters.iter()),
        )
    }

    /// One past the last record of a log that readers may see; 0 while that is not known.
    pub(super) fn readable_end(&self, log: LogRef) -> u64 {
        self.readable(log).end()
    }

    fn serve_group(&mut self, at: &GroupAt, op: GroupOp, from: AskedBy) {
        let is_poll = matches!(op, GroupOp::Poll(_));
        if is_poll && self.groups.held >= MAX_GROUP_HELD_PER_CORE {
            return self.tell_asker(from, Err(GroupRefusal::UnsettledFull));
        }
        let Some(log) = self.groups.get_mut(at).map(|running| running.log) else {
            return self.tell_asker(from, Err(GroupRefusal::Log(CacheFailure::NotReady)));
        };
        let ticket = self.groups.tickets.insert(from);
        if is_poll {
            self.groups.polls.insert(from, (at.clone(), ticket));
        }
        let bounds = (self.storage.base(log), self.readable_end(log));
        let (mono, is_draining) = (self.mono, self.is_draining);
        self.with_group(at, |group| {
            group.on_bounds(mono, bounds.0, bounds.1);
            group.on_request(mono, ticket, op);
            if is_draining {
                group.end_waits();
            }
        });
    }

    fn tell_asker(&mut self, from: AskedBy, result: GroupResult) {
        match from.core == usize::from(self.index) {
            true => self.finish_group_ask(from.ask, result),
            false => {
                let ask = from.ask;
                self.send_answer(from.core, LaneMsg::GroupDone { ask, result });
            }
        }
    }

    /// Nobody waits for a poll any more: what it would claim is left to the others.
    pub(super) fn cancel_poll(&mut self, from: AskedBy) {
        self.groups.waiting.retain(|ask| ask.from != from);
        if let Some((at, ticket)) = self.groups.polls.remove(&from) {
            self.groups.tickets.remove(ticket);
            self.with_group(&at, |group| group.cancel(ticket));
        }
    }

    /// A log was read: requests that waited for it are tried again.
    pub(super) fn retry_group_asks(&mut self) {
        for ask in std::mem::take(&mut self.groups.waiting) {
            match self.ready_group(&ask.at, ask.generation) {
                Ok(true) => self.serve_group(&ask.at, ask.op, ask.from),
                Ok(false) => self.groups.waiting.push(ask),
                Err(refusal) => self.tell_asker(ask.from, Err(refusal)),
            }
        }
    }

    /// A log cannot be read: requests that waited for it are told.
    pub(super) fn fail_group_asks(&mut self, at: &CacheAt, failure: CacheFailure) {
        let waiting = std::mem::take(&mut self.groups.waiting);
        let (failed, waiting) = waiting.into_iter().partition(|ask| ask.at.0 == at.0);
        self.groups.waiting = waiting;
        let failed: Vec<WaitingAsk> = failed;
        for ask in failed {
            self.tell_asker(ask.from, Err(GroupRefusal::Log(failure)));
        }
    }

    /// About once a second: nobody waits too long for a log, idle groups leave memory.
    pub(super) fn tend_groups(&mut self) {
        let now = self.now;
        let waiting = std::mem::take(&mut self.groups.waiting);
        for ask in waiting {
            match now.saturating_duration_since(ask.since) >= MAX_ASK_WAIT {
                true => {
                    let refusal = GroupRefusal::Log(CacheFailure::NotReady);
                    self.tell_asker(ask.from, Err(refusal));
                }
                false => self.groups.waiting.push(ask),
            }
        }
        let mut held = 0;
        for at in self.groups.all() {
            let mono = self.mono;
            match self.groups.get_mut(&at) {
                Some(running) if running.machine.is_idle(mono) => {
                    self.groups.remove(&at);
                }
                Some(running) => held += running.machine.held(),
                None => {}
            }
        }
        self.groups.held = held;
        self.metrics.groups.set(self.groups.running as u64);
        self.metrics.group_held.set(held as u64);
    }

    /// The broker stops: nobody waits for work any more.
    pub(super) fn end_group_waits(&mut self) {
        for at in self.groups.all() {
            self.with_group(&at, Group::end_waits);
        }
    }

    /// Groups of shards that are led elsewhere, or anew, end.
    pub(super) fn drop_moved_groups(&mut self) {
        for at in self.groups.all() {
            let Some(generation) = self.groups.get_mut(&at).map(|running| running.generation)
            else {
                continue;
            };
            if self.check_leads(&at.0, generation).is_err() {
                self.end_group(&at, GroupRefusal::Log(CacheFailure::Moved));
            }
        }
        self.retry_group_asks();
    }

    fn end_group(&mut self, at: &GroupAt, why: GroupRefusal) {
        let Some(mut running) = self.groups.remove(at) else {
            return;
        };
        running.machine.end(why);
        while let Some(action) = running.machine.poll_action() {
            if let GroupAction::Answer { ticket, result } = action {
                self.answer_group(ticket, result);
            }
        }
    }
}
