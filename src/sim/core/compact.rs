//! Compaction of the logs with a state, as their owner does it: the real pass over the simulated log.

use bytes::Bytes;

use super::owner::Waiter;
use super::{Core, CoreInput, Timer};
use crate::ids::Generation;
use crate::proto::cache::{Compaction, CompactionLimits, CompactionStep};
use crate::proto::replication::leader::FollowerIdx;
use crate::sim::disk::{Change, LogKey};
use crate::sim::env::{Env, Event};
use crate::sim::operator::Replacement;
use crate::wire::internal::ReplicaLog;

/// Bounds for logs of a few dozen records.
const LIMITS: CompactionLimits = CompactionLimits {
    ratio: 2,
    floor_bytes: 150,
    batch: 3,
    read_bytes: 256,
    bytes_per_s: 1 << 20,
    rounds: 3,
    failures: 40,
};

/// The pass that runs on a core.
#[derive(Debug)]
pub(super) struct Pass {
    key: LogKey,
    generation: Generation,
    machine: Compaction,
    /// The raise of the base on its way.
    raise: Option<u64>,
}

impl Pass {
    pub fn raises(&self, token: u64) -> bool {
        self.raise == Some(token)
    }
}

impl Core {
    /// Starts a pass over the log that is furthest over its bound.
    pub(super) fn begin_compaction(&mut self, env: &mut Env) {
        if self.caches.pass.is_some() || self.journal.has_failed() {
            return;
        }
        let states = self.caches.states.iter().filter(|(key, state)| {
            state.index.log_use().wants_compaction(&LIMITS)
                && self.may_write(env, key.shard, Generation(state.generation))
        });
        let worst = states.max_by_key(|(_, state)| {
            let log = state.index.log_use();
            log.log_bytes() / log.live_bytes().max(1)
        });
        let Some(key) = worst.map(|(key, _)| *key) else {
            return;
        };
        let base = self.journal.seen(key).base();
        let Some(state) = self.caches.states.get_mut(&key) else {
            return;
        };
        let cut = state.index.begin_compaction();
        env.note(|| format!("n{} compacts {key:?}: {base}..{cut}", self.at.node));
        self.caches.pass = Some(Pass {
            key,
            generation: Generation(state.generation),
            machine: Compaction::new(LIMITS, base, cut),
            raise: None,
        });
        self.run_compaction(env);
    }

    /// Does what the pass wants, until it waits for something.
    pub(super) fn run_compaction(&mut self, env: &mut Env) {
        loop {
            let Some(pass) = &self.caches.pass else {
                return;
            };
            let (key, generation) = (pass.key, pass.generation);
            let may_write = self.may_write(env, key.shard, generation);
            let now = self.now(env);
            let state = self.caches.states.get_mut(&key);
            let state = state.filter(|state| may_write && state.generation == generation.0);
            let (Some(state), Some(pass)) = (state, &mut self.caches.pass) else {
                return self.end_compaction(env, false);
            };
            let index = &mut state.index;
            let (below, applied) = (index.log_use().live_below_cut(), index.next_offset());
            let step = pass.machine.poll(now, below, applied, |offset, record| {
                index.stage_copy(offset, record)
            });
            match step.expect("records of our own") {
                CompactionStep::Busy => return,
                CompactionStep::Wait { until } => return self.push_timer(until, Timer::Compact),
                CompactionStep::Read { from, .. } => {
                    let most = env.random.upkeep.between(1, 4);
                    let after_us = env.random.upkeep.between(1, 5_000);
                    let input = CoreInput::CompactionRead {
                        key,
                        generation,
                        from,
                        most,
                    };
                    return env.to_core(after_us, self.at, input);
                }
                CompactionStep::Append(copies) => {
                    for copy in copies {
                        let waiter = Waiter::Copy { key, generation };
                        self.append_staged(env, key, generation, copy, waiter);
                    }
                }
                CompactionStep::Raise { base, held } => self.raise_base(env, key, base, held),
                CompactionStep::Done { raised } => return self.end_compaction(env, raised),
            }
        }
    }

    /// How far whoever may lead next is known to hold a log.
    fn held_by_heirs(&self, env: &Env, key: LogKey) -> u64 {
        if !env.catalog.is_replicated(key.shard) {
            return self.journal.durable_tail(key);
        }
        let led = self.leads.led.get(&key.shard);
        let log: ReplicaLog = key.log.wire();
        led.map_or(0, |led| led.machine.held_by_heirs(log))
    }

    fn raise_base(&mut self, env: &mut Env, key: LogKey, base: u64, held: u64) {
        let now = self.now(env);
        let may = held <= self.held_by_heirs(env, key);
        let token = self.token();
        let change = Change::RaiseBase { base };
        if may {
            self.maybe_lose_the_leader(env, key, held);
        }
        let is_taken = may && {
            let (node, journal) = (self.at.node, &self.journal);
            env.judge.on_give_up(node, key, (base, held), journal);
            env.judge.on_base_raised(node, key, base, journal);
            self.journal.submit(key, change, token, false).is_ok()
        };
        let Some(pass) = &mut self.caches.pass else {
            return;
        };
        match is_taken {
            true => pass.raise = Some(token),
            false => pass.machine.on_raise_refused(now),
        }
    }

    /// While a companion is written anew the disk of one of its followers is full for a moment: it then holds a
    /// part of what is to stand for the head, and gates nothing.
    fn maybe_fill_the_disk_of_an_heir(&self, env: &mut Env, key: LogKey) {
        let is_companion = !key.log.is_main() && env.catalog.is_replicated(key.shard);
        if !is_companion || !env.may_inject || !env.random.heirs.chance(30) {
            return;
        }
        let heirs = env.catalog.current(key.shard).replicas.iter().copied();
        let heirs: Vec<usize> = heirs.filter(|node| *node != self.at.node).collect();
        if heirs.is_empty() {
            return;
        }
        let node = *env.random.heirs.pick(&heirs);
        let for_us = env.random.heirs.between(1_000, 200_000);
        env.disk_is_full[node] = true;
        env.queue.push(env.now_us + for_us, Event::Mend { node });
    }

    /// The head of a companion is given up although a follower has not answered that it holds what stands for it:
    /// the leader is lost before that follower has it, and any of those whose main logs are equal leads next.
    fn maybe_lose_the_leader(&self, env: &mut Env, key: LogKey, held: u64) {
        let Some(led) = self.leads.led.get(&key.shard) else {
            return;
        };
        let places = 0..led.followers.len();
        let lacks = |place: &usize| {
            let cursor = led
                .machine
                .cursor(FollowerIdx(*place as u16), key.log.wire());
            cursor.is_some_and(|cursor| cursor.position() < Some(held))
        };
        let is_lacking = !key.log.is_main() && places.filter(lacks).count() > 0;
        if !is_lacking || !env.may_inject || !env.random.heirs.chance(500) {
            return;
        }
        env.judge
            .count("leaders_lost_before_their_heirs_had_it_all", 1);
        let (shard, old) = (key.shard, self.at.node);
        let after_us = env.random.heirs.between(1_000, 300_000);
        let event = Event::StopLeader(Replacement { shard, old });
        env.queue.push(env.now_us + after_us, event);
    }

    /// The base is raised, or the journal has failed.
    pub(super) fn on_raised(&mut self, env: &mut Env, is_ok: bool) {
        let now = self.now(env);
        let Some(pass) = &mut self.caches.pass else {
            return;
        };
        pass.raise = None;
        match is_ok {
            true => pass.machine.on_raised(),
            false => pass.machine.on_raise_refused(now),
        }
        self.run_compaction(env);
    }

    fn end_compaction(&mut self, env: &mut Env, raised: bool) {
        let Some(pass) = self.caches.pass.take() else {
            return;
        };
        env.note(|| format!("n{} {:?} compacted: {raised}", self.at.node, pass.key));
        if let Some(state) = self.caches.states.get_mut(&pass.key) {
            state.index.end_compaction(raised);
        }
    }

    /// What became of one copy.
    pub(super) fn on_copy_written(
        &mut self,
        env: &mut Env,
        (key, generation): (LogKey, Generation),
        is_ok: bool,
    ) {
        let now = self.now(env);
        let pass = self.caches.pass.as_mut();
        let pass = pass.filter(|pass| pass.key == key && pass.generation == generation);
        if let Some(pass) = pass {
            env.judge.count("copies", u64::from(is_ok));
            pass.machine.on_written(now, is_ok);
            // Not from here: the copies of one batch may all be refused while they are handed over.
            self.push_timer(now, Timer::Compact);
            self.maybe_fill_the_disk_of_an_heir(env, key);
        }
    }

    pub(super) fn on_compaction_read(
        &mut self,
        env: &mut Env,
        (key, generation): (LogKey, Generation),
        (from, most): (u64, u64),
    ) {
        let now = self.now(env);
        let pass = self.caches.pass.as_mut();
        let Some(pass) = pass.filter(|pass| pass.key == key && pass.generation == generation)
        else {
            return;
        };
        let seen = self.journal.seen(key);
        let to = self.journal.durable_tail(key).min(from + most);
        let records: Vec<Bytes> = (from..to)
            .map_while(|offset| seen.record(offset).cloned())
            .collect();
        pass.machine.on_records(now, from, records);
        self.run_compaction(env);
    }
}
