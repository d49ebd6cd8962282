//! Cache operations at their owner: the real indexes over the simulated log.
//!
//! A state belongs to one leadership: it is rebuilt from the log when the shard is led at another
//! generation, never while writes of it are on their way.

use std::collections::BTreeMap;

use super::owner::{ServeRefusal, ServeResult, Waiter};
use super::Core;
use crate::ids::Generation;
use crate::proto::cache::{
    Applied, CacheFailure, CacheIndex, CacheLog, CacheReply, CacheRequest, CounterIndex, Lookup,
    Operation, OwnerClock, StagedAdd, StagedWrite,
};
use crate::proto::convert::PeerReply;
use crate::sim::check::CacheEffect;
use crate::sim::disk::{Change, Done, LogKey, SimLog};
use crate::sim::env::Env;

#[derive(Debug)]
struct CacheState {
    generation: u64,
    values: CacheIndex,
    counters: CounterIndex,
}

impl CacheState {
    fn staged(&self) -> usize {
        self.values.staged() + self.counters.staged()
    }
}

#[derive(Debug)]
enum Staged {
    Value(StagedWrite),
    Add(StagedAdd),
}

/// The cache states of one core, and the writes on their way.
#[derive(Debug, Default)]
pub struct Caches {
    states: BTreeMap<usize, CacheState>,
    writes: BTreeMap<u64, (usize, Staged, Waiter)>,
    clock: OwnerClock,
}

impl Caches {
    pub fn is_waiting(&self, token: u64) -> bool {
        self.writes.contains_key(&token)
    }

    /// Drops states of shards that are not led any more, once nothing of them is on its way.
    pub fn on_view(&mut self, env: &Env, node: usize, version: usize) {
        self.states.retain(|shard, state| {
            let assignment = env.catalog.assignment(version, *shard);
            let leads = assignment.leader == node && assignment.generation == state.generation;
            leads || state.staged() > 0
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

impl Core {
    pub(super) fn serve_cache(
        &mut self,
        env: &mut Env,
        shard: usize,
        generation: Generation,
        request: CacheRequest,
        waiter: Waiter,
    ) {
        if let Err(refusal) = self.ensure_cache(shard, generation.0) {
            return self.finish(env, waiter, Err(refusal));
        }
        let now_ms = self.caches.clock.at_wall_us(env.wall_us(self.at.node));
        let Some(state) = self.caches.states.get_mut(&shard) else {
            return;
        };
        let key = &request.key;
        let (staged, record) = match &request.operation {
            Operation::Get => {
                let found = value_of(state.values.get(key, now_ms));
                let effect = CacheEffect::Get {
                    found: &found,
                    now_ms,
                };
                env.judge
                    .on_cache(self.at.node, shard, key, effect, &self.journal);
                let reply = CacheReply::Value(found).to_wire();
                return self.finish(env, waiter, Ok(PeerReply::Cached(reply)));
            }
            Operation::CounterGet => {
                let sum = state.counters.get(key);
                let effect = CacheEffect::Sum { sum };
                env.judge
                    .on_cache(self.at.node, shard, key, effect, &self.journal);
                let reply = CacheReply::Sum(sum).to_wire();
                return self.finish(env, waiter, Ok(PeerReply::Cached(reply)));
            }
            Operation::Put { value, ttl_ms } => {
                let write = state.values.stage_put(key, value, *ttl_ms, now_ms);
                let record = write.record().clone();
                (Staged::Value(write), record)
            }
            Operation::Delete => match state.values.stage_delete(key, now_ms) {
                Some(write) => {
                    let record = write.record().clone();
                    (Staged::Value(write), record)
                }
                None => return self.finish(env, waiter, Ok(PeerReply::Cached(None))),
            },
            Operation::CounterAdd { delta } => match state.counters.stage_add(key, *delta) {
                Ok(add) => {
                    let record = add.record().clone();
                    (Staged::Add(add), record)
                }
                Err(_) => {
                    let refusal = ServeRefusal::Cache(CacheFailure::Overflow);
                    return self.finish(env, waiter, Err(refusal));
                }
            },
        };
        let at = log_key(shard, request.log());
        let token = self.token();
        match self.append(env, at, generation, vec![record], token) {
            Ok(()) => drop(self.caches.writes.insert(token, (shard, staged, waiter))),
            Err(refusal) => {
                self.abandon(shard, staged);
                self.finish(env, waiter, Err(refusal));
            }
        }
    }

    /// The state of a shard led at `generation`, rebuilt from the log when there is none.
    fn ensure_cache(&mut self, shard: usize, generation: u64) -> Result<(), ServeRefusal> {
        let current = self.caches.states.get(&shard);
        if current.is_some_and(|state| state.generation == generation) {
            return Ok(());
        }
        let keys = [CacheLog::Values, CacheLog::Counters].map(|log| log_key(shard, log));
        let is_busy = current.is_some_and(|state| state.staged() > 0)
            || keys.iter().any(|key| self.journal.is_busy(*key));
        if is_busy {
            return Err(ServeRefusal::Opening);
        }
        if self.journal.has_failed() {
            return Err(ServeRefusal::LogFailed);
        }
        let [values, counters] = keys.map(|key| self.journal.seen(key));
        let mut state = CacheState {
            generation,
            values: CacheIndex::new(values.base()),
            counters: CounterIndex::new(counters.base()),
        };
        for offset in values.base()..values.tail() {
            let record = values.record(offset).ok_or(ServeRefusal::LogFailed)?;
            let replayed = state.values.replay(offset, record);
            replayed.map_err(|_| ServeRefusal::LogFailed)?;
        }
        for offset in counters.base()..counters.tail() {
            let record = counters.record(offset).ok_or(ServeRefusal::LogFailed)?;
            let replayed = state.counters.replay(offset, record);
            replayed.map_err(|_| ServeRefusal::LogFailed)?;
        }
        self.caches.states.insert(shard, state);
        Ok(())
    }

    /// A write of a cache is durable, or never will be.
    pub(super) fn on_cache_done(&mut self, env: &mut Env, done: Done) {
        let Some((shard, staged, waiter)) = self.caches.writes.remove(&done.token) else {
            return;
        };
        let Change::Append { first, records, .. } = &done.change else {
            return;
        };
        if !done.is_ok {
            self.abandon(shard, staged);
            return self.finish(env, waiter, Err(ServeRefusal::StorageFailed));
        }
        env.judge
            .on_durable(self.at.node, done.key, *first, records, &self.journal);
        let now_ms = self.caches.clock.at_wall_us(env.wall_us(self.at.node));
        let result = self.apply(shard, staged, *first, now_ms);
        self.acknowledge(env, done.key, &done.change, waiter, result);
    }

    fn apply(&mut self, shard: usize, staged: Staged, offset: u64, now_ms: u64) -> ServeResult {
        let Some(state) = self.caches.states.get_mut(&shard) else {
            return Err(ServeRefusal::StorageFailed);
        };
        let reply = match staged {
            Staged::Add(add) => CacheReply::Sum(Some(state.counters.applied(add, offset))),
            Staged::Value(write) => match state.values.applied(write, offset, now_ms) {
                Applied::Stored => CacheReply::Stored,
                Applied::Removed(found) => CacheReply::Value(value_of(found)),
                Applied::Expired | Applied::Copied => CacheReply::Value(None),
            },
        };
        Ok(PeerReply::Cached(reply.to_wire()))
    }

    fn abandon(&mut self, shard: usize, staged: Staged) {
        let Some(state) = self.caches.states.get_mut(&shard) else {
            return;
        };
        match staged {
            Staged::Value(write) => state.values.abandoned(write),
            Staged::Add(add) => state.counters.abandoned(add),
        }
    }
}

fn value_of(found: Lookup) -> Option<bytes::Bytes> {
    match found {
        Lookup::Value(value) => Some(value),
        Lookup::Miss => None,
        Lookup::InLog { .. } => unreachable!("nothing is evicted here"),
    }
}
