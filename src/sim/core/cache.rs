//! Logs with a state in memory, at their owner: the real indexes over the simulated log.
//!
//! A state belongs to one leadership: it is rebuilt from the log when the shard is led at another
//! generation, never while writes of it are on their way.

use std::collections::BTreeMap;
use std::time::Duration;

use super::compact::Pass;
use super::owner::{ServeRefusal, ServeResult, Waiter};
use super::{Core, Timer};
use crate::ids::Generation;
use crate::proto::cache::{
    Applied, CacheFailure, CacheLog, CacheReply, CacheRequest, LogIndex, Lookup, OwnerClock,
    Served, Staged, Written,
};
use crate::proto::convert::PeerReply;
use crate::sim::catalog::Acknowledge;
use crate::sim::check::{CacheEffect, Origin};
use crate::sim::disk::{Change, Done, LogKey, SimLog};
use crate::sim::env::Env;

/// How long after a write the owner looks for expired entries and for logs to compact.
const TEND_AFTER: Duration = Duration::from_millis(200);
/// Deletes of expired entries written for one log in one go.
const EXPIRE_QUANTUM: usize = 2;

#[derive(Debug)]
pub(super) struct State {
    pub generation: u64,
    pub index: LogIndex,
}

/// A record on its way to a log with a state.
#[derive(Debug)]
struct Write {
    key: LogKey,
    staged: Staged,
    waiter: Waiter,
}

/// The states of one core, and the writes on their way.
#[derive(Debug, Default)]
pub struct Caches {
    pub(super) states: BTreeMap<LogKey, State>,
    writes: BTreeMap<u64, Write>,
    pub(super) pass: Option<Pass>,
    clock: OwnerClock,
    is_tended: bool,
}

impl Caches {
    pub fn is_waiting(&self, token: u64) -> bool {
        self.writes.contains_key(&token) || self.pass.as_ref().is_some_and(|p| p.raises(token))
    }

    /// Drops states of shards that are not led any more, once nothing of them is on its way.
    pub fn on_view(&mut self, env: &Env, node: usize, version: usize) {
        self.states.retain(|key, state| {
            let assignment = env.catalog.assignment(version, key.shard);
            let leads = assignment.leader == node && assignment.generation == state.generation;
            leads || state.index.staged() > 0
        });
    }
}

pub fn log_key(shard: usize, log: CacheLog) -> LogKey {
    let log = match log {
        CacheLog::Values => SimLog::Cache,
        CacheLog::Counters => SimLog::Counters,
        CacheLog::Cursors => SimLog::GroupCursors,
        CacheLog::DeadLetters => SimLog::GroupDeadLetters,
    };
    LogKey { shard, log }
}

/// The state a log is read into; a stream has none.
pub fn state_of(log: SimLog) -> Option<CacheLog> {
    match log {
        SimLog::Stream => None,
        SimLog::Cache => Some(CacheLog::Values),
        SimLog::Counters => Some(CacheLog::Counters),
        SimLog::GroupCursors => Some(CacheLog::Cursors),
        SimLog::GroupDeadLetters => Some(CacheLog::DeadLetters),
    }
}

impl Core {
    pub(super) fn serve_cache(
        &mut self,
        env: &mut Env,
        key: LogKey,
        generation: Generation,
        request: CacheRequest,
        waiter: Waiter,
    ) {
        if let Err(refusal) = self.ensure_state(key, generation.0) {
            return self.finish(env, waiter, Err(refusal));
        }
        let now_ms = self.caches.clock.at_wall_us(env.wall_us(self.at.node));
        let Some(state) = self.caches.states.get_mut(&key) else {
            return;
        };
        let end = state.index.next_offset();
        let (effect, reply) = match state.index.serve(&request, now_ms, false) {
            Ok(Served::Found(found)) => {
                let found = value_of(found);
                let reply = CacheReply::Value(found.clone());
                (Some(CacheEffect::Get { found, now_ms }), reply)
            }
            Ok(Served::Sum(sum)) => (Some(CacheEffect::Sum { sum }), CacheReply::Sum(sum)),
            Ok(Served::Absent) => (None, CacheReply::Value(None)),
            Ok(Served::Write(staged)) => {
                return self.append_staged(env, key, generation, staged, waiter);
            }
            Err(failure) => return self.finish(env, waiter, Err(ServeRefusal::Cache(failure))),
        };
        if let Some(effect) = effect {
            let (node, journal) = (self.at.node, &self.journal);
            env.judge
                .on_cache(node, key, &request.key, &effect, journal);
        }
        let reply = PeerReply::Cached(reply.to_wire());
        self.answer_read(env, key, end, waiter, reply);
    }

    /// Answers from a state that has come to `end`: on a `Quorum` cache once the mark has, too.
    fn answer_read(
        &mut self,
        env: &mut Env,
        key: LogKey,
        end: u64,
        waiter: Waiter,
        reply: PeerReply,
    ) {
        let waits = env.catalog.is_replicated(key.shard)
            && env.catalog.shards[key.shard].acknowledge == Acknowledge::Quorum
            && key.log == SimLog::Cache;
        match (waits, self.leads.mark(key.shard)) {
            (false, _) => self.finish(env, waiter, Ok(reply)),
            (true, has_mark) => {
                if has_mark.is_none() {
                    self.write_first_record(env, key);
                }
                self.wait_for_quorum(env, key, end, waiter, reply);
            }
        }
    }

    /// A leader has no mark before a majority holds a record of its own generation; a reader need
    /// not wait until somebody writes.
    fn write_first_record(&mut self, env: &mut Env, key: LogKey) {
        let Some(led) = self.leads.led.get(&key.shard) else {
            return;
        };
        let generation = Generation(led.generation);
        let is_first = led.machine.floor() == self.journal.seen(key).tail();
        if !is_first || !self.may_write(env, key.shard, generation) {
            return;
        }
        let state = self.caches.states.get_mut(&key);
        if let Some(index) = state.and_then(|state| state.index.values_mut()) {
            env.judge.count("first_records", 1);
            let staged = Staged::Value(index.stage_nothing());
            self.append_staged(env, key, generation, staged, Waiter::Upkeep);
        }
    }

    pub(super) fn append_staged(
        &mut self,
        env: &mut Env,
        key: LogKey,
        generation: Generation,
        staged: Staged,
        waiter: Waiter,
    ) {
        let token = self.token();
        let records = vec![staged.record().clone()];
        let origin = match waiter {
            Waiter::Upkeep | Waiter::Copy { .. } => Origin::Upkeep,
            _ => Origin::Request,
        };
        match self.append(env, key, generation, records, (token, origin)) {
            Ok(()) => {
                let write = Write {
                    key,
                    staged,
                    waiter,
                };
                self.caches.writes.insert(token, write);
            }
            Err(refusal) => {
                self.abandon(key, staged);
                self.finish(env, waiter, Err(refusal));
            }
        }
    }

    /// The state of a log of a shard led at `generation`, rebuilt from the log when there is none.
    pub(super) fn ensure_state(
        &mut self,
        key: LogKey,
        generation: u64,
    ) -> Result<(), ServeRefusal> {
        let current = self.caches.states.get(&key);
        if current.is_some_and(|state| state.generation == generation) {
            return Ok(());
        }
        let is_staged = current.is_some_and(|state| state.index.staged() > 0);
        if is_staged || self.journal.is_busy(key) {
            return Err(ServeRefusal::Opening);
        }
        if self.journal.has_failed() {
            return Err(ServeRefusal::LogFailed);
        }
        let log = state_of(key.log).ok_or(ServeRefusal::LogFailed)?;
        let seen = self.journal.seen(key);
        let mut index = LogIndex::new(log, seen.base());
        for offset in seen.base()..seen.tail() {
            let record = seen.record(offset).ok_or(ServeRefusal::LogFailed)?;
            let replayed = index.replay(offset, record);
            replayed.map_err(|_| ServeRefusal::LogFailed)?;
        }
        if index.fault().is_some() {
            return Err(ServeRefusal::LogFailed);
        }
        let state = State { generation, index };
        self.caches.states.insert(key, state);
        Ok(())
    }

    /// A write to a log with a state is durable, or never will be.
    pub(super) fn on_cache_done(&mut self, env: &mut Env, done: Done) {
        let Some(write) = self.caches.writes.remove(&done.token) else {
            return self.on_raised(env, done.is_ok);
        };
        let Write {
            key,
            staged,
            waiter,
        } = write;
        let Change::Append { first, records, .. } = &done.change else {
            return;
        };
        if !done.is_ok {
            self.abandon(key, staged);
            return self.finish(env, waiter, Err(ServeRefusal::StorageFailed));
        }
        env.judge
            .on_durable(self.at.node, done.key, *first, records, &self.journal);
        let now_ms = self.caches.clock.at_wall_us(env.wall_us(self.at.node));
        let state = self.caches.states.get_mut(&key);
        let written = state.and_then(|state| state.index.applied(staged, *first, now_ms));
        let result = result_of(written);
        self.arm_tend(env);
        self.acknowledge(env, done.key, &done.change, waiter, result);
    }

    fn abandon(&mut self, key: LogKey, staged: Staged) {
        if let Some(state) = self.caches.states.get_mut(&key) {
            state.index.abandoned(staged);
        }
    }

    fn arm_tend(&mut self, env: &Env) {
        if !std::mem::replace(&mut self.caches.is_tended, true) {
            let at = self.now(env) + TEND_AFTER;
            self.push_timer(at, Timer::Tend);
        }
    }

    /// A while after a write: expired entries are deleted, and a log that is too long is compacted.
    pub(super) fn tend_states(&mut self, env: &mut Env) {
        self.caches.is_tended = false;
        let now_ms = self.caches.clock.at_wall_us(env.wall_us(self.at.node));
        let mut expired = Vec::new();
        for (key, state) in &mut self.caches.states {
            let Some(index) = state.index.values_mut() else {
                continue;
            };
            let writes = index.stage_expired(now_ms, EXPIRE_QUANTUM);
            let generation = Generation(state.generation);
            expired.extend(writes.into_iter().map(|write| (*key, generation, write)));
        }
        for (key, generation, write) in expired {
            let staged = Staged::Value(write);
            match self.may_write(env, key.shard, generation) {
                true => {
                    let (node, journal) = (self.at.node, &self.journal);
                    env.judge
                        .on_expire(node, key, staged.record(), now_ms, journal);
                    self.append_staged(env, key, generation, staged, Waiter::Upkeep);
                }
                false => self.abandon(key, staged),
            }
        }
        self.begin_compaction(env);
    }

    /// Whether this broker may append of its own accord.
    pub(super) fn may_write(&self, env: &Env, shard: usize, generation: Generation) -> bool {
        let is_open = !env.catalog.is_replicated(shard) || self.leads.is_open(shard, generation.0);
        self.leads(env, shard, generation) && is_open && !self.journal.has_failed()
    }
}

fn result_of(written: Option<Written>) -> ServeResult {
    let reply = match written {
        None => return Err(ServeRefusal::Cache(CacheFailure::StorageFailed)),
        Some(Written::Sum(sum)) => CacheReply::Sum(Some(sum)),
        Some(Written::Value(Applied::Stored)) => CacheReply::Stored,
        Some(Written::Value(Applied::Removed(found))) => CacheReply::Value(value_of(found)),
        Some(Written::Value(Applied::Expired | Applied::Copied)) => CacheReply::Value(None),
    };
    Ok(PeerReply::Cached(reply.to_wire()))
}

fn value_of(found: Lookup) -> Option<bytes::Bytes> {
    match found {
        Lookup::Value(value) => Some(value),
        Lookup::Miss => None,
        Lookup::InLog { .. } => unreachable!("nothing is evicted here"),
    }
}
