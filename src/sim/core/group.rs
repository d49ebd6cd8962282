//! Consumer groups at the owner of their shard: the real machines over the simulated logs.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;

use super::cache::log_key;
use super::owner::Waiter;
use super::readers::stream_of;
use super::{Core, CoreInput};
use crate::ids::Generation;
use crate::proto::cache::{CacheFailure, CacheLog, CacheRequest, Operation};
use crate::proto::group::entry::{dead_key, position_value, restore, KnownEnds};
use crate::proto::group::{
    Delivered, Group, GroupAction, GroupLimits, GroupOp, GroupRefusal, GroupReply, Restored,
};
use crate::proto::replication::leader::Readable;
use crate::proto::MonoTime;
use crate::sim::catalog::Acknowledge;
use crate::sim::consumers::{group_name, GroupAt};
use crate::sim::env::Env;

/// Bounds under which every rule of a group comes to matter within seconds.
pub const LIMITS: GroupLimits = GroupLimits {
    claim: Duration::from_millis(400),
    longest_claim: Duration::from_secs(5),
    attempts: 3,
    longest_wait: Duration::from_millis(500),
    poll_records: 4,
    poll_bytes: 64,
    poll_reads: 3,
    unsettled: 6,
    dead_letters: 5,
    waiting_polls: 4,
    idle: Duration::from_secs(2),
    write_retry: Duration::from_millis(100),
};

/// Which record of a group was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupWrite {
    Cursor,
    Entry { offset: u64 },
}

/// A group in memory, by where it is and which of its lives this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct GroupLife {
    pub at: GroupAt,
    pub life: u64,
}

#[derive(Debug)]
struct Running {
    machine: Group,
    generation: Generation,
    life: u64,
}

/// The groups of one core.
#[derive(Debug, Default)]
pub struct Groups {
    running: BTreeMap<GroupAt, Running>,
}

impl Groups {
    pub fn next_deadline(&self) -> Option<MonoTime> {
        let machines = self.running.values();
        machines.filter_map(|r| r.machine.next_deadline()).min()
    }

    fn get_mut(&mut self, of: GroupLife) -> Option<&mut Running> {
        let running = self.running.get_mut(&of.at);
        running.filter(|running| running.life == of.life)
    }
}

impl Core {
    /// A client of the owner asks a group for something.
    pub(super) fn on_group_ask(&mut self, env: &mut Env, at: GroupAt, ticket: u64, op: GroupOp) {
        let life = match self.ready_group(env, at) {
            Ok(life) => life,
            Err(refusal) => return self.answer_group(env, at, 0, ticket, Err(refusal)),
        };
        let (base, tail) = self.bounds_of(env, at.shard);
        let now = self.now(env);
        self.with_group(env, GroupLife { at, life }, |group| {
            group.on_bounds(now, base, tail);
            group.on_request(now, ticket, op);
        });
    }

    /// The life of the group in memory; read from its logs when there is none.
    fn ready_group(&mut self, env: &mut Env, at: GroupAt) -> Result<u64, GroupRefusal> {
        let refused = |failure| GroupRefusal::Log(failure);
        let view = self.view.ok_or(refused(CacheFailure::Moved))?;
        let generation = Generation(env.catalog.assignment(view, at.shard).generation);
        if !self.may_write(env, at.shard, generation) {
            return Err(refused(CacheFailure::Moved));
        }
        if self.is_without_mark(env, at.shard) {
            return Err(refused(CacheFailure::NotReady));
        }
        if let Some(running) = self.groups.running.get(&at) {
            if running.generation == generation {
                return Ok(running.life);
            }
            self.end_group(env, at);
        }
        for log in [CacheLog::Cursors, CacheLog::DeadLetters] {
            let ready = self.ensure_state(log_key(at.shard, log), generation.0);
            ready.map_err(|_| refused(CacheFailure::NotReady))?;
        }
        let restored = self.restored_group(env, at);
        env.judge
            .on_group_made(self.at.node, at, &restored, &self.journal);
        let (base, tail) = self.bounds_of(env, at.shard);
        let machine = Group::new(LIMITS, self.now(env), restored, base, tail);
        let life = self.token();
        env.judge.count("groups_made", 1);
        let running = Running {
            machine,
            generation,
            life,
        };
        self.groups.running.insert(at, running);
        Ok(life)
    }

    fn restored_group(&self, env: &Env, at: GroupAt) -> Restored {
        let name = group_name(at.group);
        let index = |log| {
            let state = self.caches.states.get(&log_key(at.shard, log))?;
            state.index.values()
        };
        let ends = match env.catalog.shards[at.shard].acknowledge {
            Acknowledge::Quorum => KnownEnds::default(),
            Acknowledge::Leader => {
                let starts = self.journal.seen(stream_of(at.shard)).history().iter();
                KnownEnds::of(starts.map(|entry| (Generation(entry.generation), entry.start)))
            }
        };
        let cursor = index(CacheLog::Cursors).and_then(|cursors| cursors.resident(name));
        let letters = index(CacheLog::DeadLetters).into_iter();
        restore(
            name,
            &ends,
            cursor.map(|value| value.as_ref()),
            letters.flat_map(|letters| letters.iter()),
        )
        .expect("entries of our own")
    }

    fn is_without_mark(&self, env: &Env, shard: usize) -> bool {
        self.readable(env, shard) == Readable::NoMark
    }

    /// Where the stream begins, and up to where its readers may see it.
    fn bounds_of(&self, env: &Env, shard: usize) -> (u64, u64) {
        let base = self.journal.seen(stream_of(shard)).base();
        (base, self.readable(env, shard).end())
    }

    /// Gives the machine an input and does what it asks for.
    fn with_group(&mut self, env: &mut Env, of: GroupLife, input: impl FnOnce(&mut Group)) {
        if let Some(running) = self.groups.get_mut(of) {
            input(&mut running.machine);
            self.run_group(env, of);
        }
    }

    fn run_group(&mut self, env: &mut Env, of: GroupLife) {
        while let Some(running) = self.groups.get_mut(of) {
            let Some(action) = running.machine.poll_action() else {
                return;
            };
            let generation = running.generation;
            match action {
                GroupAction::Answer { ticket, result } => {
                    self.answer_group(env, of.at, of.life, ticket, result);
                }
                GroupAction::Read { from, max_bytes } => {
                    let most = match max_bytes {
                        1 => 1,
                        _ => env.random.upkeep.between(1, 4),
                    };
                    let after_us = env.random.upkeep.between(1, 3_000);
                    let input = CoreInput::GroupRead { of, from, most };
                    env.to_core(after_us, self.at, input);
                }
                GroupAction::WriteCursor { position } => {
                    let key = (CacheLog::Cursors, group_name(of.at.group).into());
                    let value = position.map(|position| position_value(position, generation));
                    self.write_group(env, (of, generation), key, value, GroupWrite::Cursor);
                }
                GroupAction::WriteEntry { offset, entry } => {
                    let key = dead_key(group_name(of.at.group), offset);
                    let key = (CacheLog::DeadLetters, key);
                    if entry.is_some() {
                        let about = (offset, generation);
                        env.judge.on_group_entry(of.at, about, &self.journal);
                    }
                    let value = entry.map(|entry| entry.value(generation));
                    let write = GroupWrite::Entry { offset };
                    self.write_group(env, (of, generation), key, value, write);
                }
            }
        }
    }

    fn write_group(
        &mut self,
        env: &mut Env,
        (of, generation): (GroupLife, Generation),
        (log, key): (CacheLog, std::sync::Arc<str>),
        value: Option<Bytes>,
        write: GroupWrite,
    ) {
        let waiter = Waiter::Group { of, write };
        if !self.may_write(env, of.at.shard, generation) {
            return self.on_group_written(env, of, write, Err(CacheFailure::Moved));
        }
        let operation = match value {
            Some(value) => Operation::Put {
                value,
                ttl_ms: None,
            },
            None => Operation::Delete,
        };
        let request = CacheRequest { key, operation };
        let log = log_key(of.at.shard, log);
        self.serve_cache(env, log, generation, request, waiter);
    }

    pub(super) fn on_group_written(
        &mut self,
        env: &mut Env,
        of: GroupLife,
        write: GroupWrite,
        result: Result<(), CacheFailure>,
    ) {
        let now = self.now(env);
        self.with_group(env, of, |group| match write {
            GroupWrite::Cursor => group.on_cursor_written(now, result),
            GroupWrite::Entry { offset } => group.on_entry_written(now, offset, result),
        });
    }

    pub(super) fn on_group_read(&mut self, env: &mut Env, of: GroupLife, from: u64, most: u64) {
        let (base, tail) = self.bounds_of(env, of.at.shard);
        let seen = self.journal.seen(stream_of(of.at.shard));
        let to = tail.min(from + most);
        let records: Vec<Bytes> = (from..to)
            .map_while(|offset| seen.record(offset).cloned())
            .collect();
        let now = self.now(env);
        let has_failed = self.journal.has_failed();
        self.with_group(env, of, |group| match (from < base, has_failed) {
            (true, _) => group.on_trimmed(now, base),
            (false, true) => group.on_read_failed(now),
            (false, false) => group.on_records(now, from, records),
        });
    }

    /// Time has passed, or records have become readable; groups nobody asks for leave memory.
    pub(super) fn run_groups(&mut self, env: &mut Env) {
        let now = self.now(env);
        let running = &mut self.groups.running;
        running.retain(|_, running| !running.machine.is_idle(now));
        let lives = self.groups.running.iter();
        let lives: Vec<GroupLife> = lives
            .map(|(at, running)| GroupLife {
                at: *at,
                life: running.life,
            })
            .collect();
        for of in lives {
            let (base, tail) = self.bounds_of(env, of.at.shard);
            self.with_group(env, of, |group| {
                if group.is_awaited() {
                    group.on_bounds(now, base, tail);
                }
                if group.next_deadline().is_some_and(|at| at <= now) {
                    group.on_time(now);
                }
            });
        }
    }

    /// Groups of shards led elsewhere, or anew, end.
    pub(super) fn drop_moved_groups(&mut self, env: &mut Env) {
        let running = self.groups.running.iter();
        let moved: Vec<GroupAt> = running
            .filter(|(at, running)| !self.leads(env, at.shard, running.generation))
            .map(|(at, _)| *at)
            .collect();
        for at in moved {
            self.end_group(env, at);
        }
    }

    fn end_group(&mut self, env: &mut Env, at: GroupAt) {
        let Some(mut running) = self.groups.running.remove(&at) else {
            return;
        };
        running.machine.end(GroupRefusal::Log(CacheFailure::Moved));
        while let Some(action) = running.machine.poll_action() {
            if let GroupAction::Answer { ticket, result } = action {
                self.answer_group(env, at, running.life, ticket, result);
            }
        }
    }

    fn answer_group(
        &mut self,
        env: &mut Env,
        at: GroupAt,
        life: u64,
        ticket: u64,
        result: Result<GroupReply, GroupRefusal>,
    ) {
        let (_, tail) = self.bounds_of(env, at.shard);
        let of = (self.at, GroupLife { at, life });
        if let Ok(GroupReply::Records(records)) = &result {
            self.judge_shown(env, at.shard, records);
        }
        env.judge
            .on_group_answer(of, ticket, &result, tail, &self.journal);
        env.hear_group(self.at, at, ticket, result);
    }
    /// Members of a group are readers like others.
    fn judge_shown(&self, env: &mut Env, shard: usize, records: &[Delivered]) {
        if !self.awaits_mark(env, shard) {
            return;
        }
        for record in records {
            let place = (stream_of(shard), record.offset);
            env.judge.on_shown(self.at.node, place, &record.payload);
        }
    }
}
