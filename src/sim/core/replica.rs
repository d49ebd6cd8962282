//! The follower's half on one core: carries out what [`FollowerLog`] decides.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;

use super::{Core, CoreInput};
use crate::catalog::Consistency;
use crate::ids::{Generation, NodeId};
use crate::proto::outcome::PeerCode;
use crate::proto::replication::follower::{
    DiskError, DiskWork, FollowerNote, FollowerRequest, StoredReadError,
};
use crate::proto::replication::{
    FollowerAction, FollowerLog, History, HistoryEntry, LogState, ReplicaView, ReplicateAnswer,
    ReplicateBody,
};
use crate::sim::catalog::Acknowledge;
use crate::sim::check::refusals::refused_for;
use crate::sim::disk::{Change, Done, LogKey, Refusal, SimLog};
use crate::sim::env::{Env, Fault};

/// Where the answer to a replicate message goes.
#[derive(Debug, Clone, Copy)]
pub struct ReplyTo {
    /// The core the message arrived on, and its name there.
    pub core: usize,
    pub ticket: u64,
}

/// A message on its way through a follower.
#[derive(Debug)]
struct Held {
    reply: ReplyTo,
    generation: u64,
    is_rebuild: bool,
    is_damaged: bool,
    /// It carries records.
    is_batch: bool,
}

/// The copies of one core.
#[derive(Debug, Default)]
pub struct Replicas {
    logs: BTreeMap<LogKey, FollowerLog>,
    held: BTreeMap<u64, (LogKey, Held)>,
    /// Disk work by its journal token.
    work: BTreeMap<u64, (LogKey, u64)>,
}

impl Replicas {
    pub fn is_waiting(&self, token: u64) -> bool {
        self.work.contains_key(&token)
    }

    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// How far a copy equals the log of the leader its broker knows of, as far as retention may rely on it.
    pub fn matched_with_leader(&self, key: LogKey) -> Option<u64> {
        self.logs.get(&key)?.matched_with_leader()
    }

    /// Whether nothing of the shard's copies is on its way.
    pub fn is_quiet(&self, shard: usize) -> bool {
        let of_shard = |key: &LogKey| key.shard == shard;
        !self.work.values().any(|(key, _)| of_shard(key))
            && !self.held.values().any(|(key, _)| of_shard(key))
    }
}

/// How often a batch is refused for no reason, which halts its log until the catalog is read again: one of a
/// stream's logs is then long behind the others, which is what consumer groups have to bear.
fn false_refusals_per_mille(log: SimLog) -> u64 {
    match log {
        SimLog::GroupDeadLetters => 25,
        SimLog::Stream => 8,
        SimLog::Cache | SimLog::Counters | SimLog::GroupCursors => 2,
    }
}

/// The logs a shard has.
pub fn logs_of_shard(env: &Env, shard: usize) -> Vec<LogKey> {
    let logs = crate::proto::replication::types::logs_of(env.catalog.shards[shard].id.kind);
    logs.iter()
        .map(|log| LogKey {
            shard,
            log: SimLog::of(*log),
        })
        .collect()
}

pub fn replica_view(env: &Env, version: usize, shard: usize) -> ReplicaView {
    let assignment = env.catalog.assignment(version, shard);
    let node = |at: &usize| env.catalog.nodes[*at].clone();
    ReplicaView {
        generation: Generation(assignment.generation),
        leader: node(&assignment.leader),
        replicas: assignment
            .replicas
            .iter()
            .map(node)
            .collect::<Arc<[NodeId]>>(),
        consistency: match env.catalog.shards[shard].acknowledge {
            Acknowledge::Leader => Consistency::Leader,
            Acknowledge::Quorum => Consistency::Quorum,
        },
    }
}

impl Core {
    /// What storage says about a log.
    pub(super) fn log_state(&self, env: &Env, key: LogKey) -> LogState {
        let seen = self.journal.seen(key);
        let entries = seen.history().iter().map(|entry| HistoryEntry {
            generation: Generation(entry.generation),
            start: entry.start,
            leader: env.catalog.nodes[entry.leader].clone(),
        });
        let history = History::from_entries(entries.collect());
        LogState {
            base: seen.base(),
            tail: seen.tail(),
            durable_tail: self.journal.durable_tail(key),
            accepted: Generation(seen.accepted()),
            commit: 0,
            history: history.expect("I12: a history on disk ascends"),
        }
    }

    /// Opens every copy this core may be asked about, before any catalog was read.
    pub(super) fn open_replicas(&mut self, env: &Env) {
        for shard in 0..env.catalog.shards.len() {
            if !env.catalog.is_replicated(shard) || self.owner_core(shard) != self.at.core {
                continue;
            }
            for key in logs_of_shard(env, shard) {
                let log = FollowerLog::new(self.me.clone(), None).of_log(key.log.wire());
                self.replicas.logs.insert(key, log);
                self.tell_state(env, key);
            }
        }
    }

    /// Tells a copy what storage says about its log.
    fn tell_state(&mut self, env: &Env, key: LogKey) {
        let is_damaged = self.journal.is_damaged(key);
        let state = self.log_state(env, key);
        let Some(log) = self.replicas.logs.get_mut(&key) else {
            return;
        };
        match is_damaged {
            true => log.on_broken(state.accepted),
            false => log.on_state(state),
        }
    }

    pub(super) fn replicas_on_view(&mut self, env: &mut Env, version: usize) {
        for (key, log) in &mut self.replicas.logs {
            log.on_view(Some(replica_view(env, version, key.shard)));
        }
        self.run_replicas(env);
    }

    /// This broker is about to lead the shard: its copies take nothing from others.
    pub(super) fn close_replicas(&mut self, shard: usize) {
        let logs = self.replicas.logs.iter_mut();
        for (_, log) in logs.filter(|(key, _)| key.shard == shard) {
            log.on_closing();
        }
    }

    /// This broker does not lead the shard any more: what it wrote is what its copies are now.
    pub(super) fn reopen_replicas(&mut self, env: &Env, shard: usize) {
        for key in logs_of_shard(env, shard) {
            let state = self.log_state(env, key);
            if let Some(log) = self.replicas.logs.get_mut(&key) {
                log.on_state(state);
            }
        }
    }

    pub(super) fn replica_base_raised(&mut self, key: LogKey, base: u64) {
        if let Some(log) = self.replicas.logs.get_mut(&key) {
            log.on_base_raised(base);
        }
    }

    /// A message for a copy of this core.
    pub(super) fn on_replicate(
        &mut self,
        env: &mut Env,
        key: LogKey,
        request: FollowerRequest,
        reply: ReplyTo,
    ) {
        let is_damaged = match &request.body {
            ReplicateBody::Records {
                checksum, payloads, ..
            } => payloads.batch_checksum() != *checksum,
            ReplicateBody::Bootstrap { .. } | ReplicateBody::Rebuild { .. } => false,
        };
        let held = Held {
            reply,
            generation: request.generation.0,
            is_rebuild: matches!(request.body, ReplicateBody::Rebuild { .. }),
            is_batch: matches!(&request.body, ReplicateBody::Records { payloads, .. } if !payloads.is_empty()),
            is_damaged,
        };
        let token = self.token();
        let request = FollowerRequest {
            request: token,
            ..request
        };
        self.replicas.held.insert(token, (key, held));
        self.take_request(env, key, request);
        self.run_replicas(env);
    }

    /// Gives a copy its request. One that has to be refused is watched by the judge.
    fn take_request(&mut self, env: &mut Env, key: LogKey, request: FollowerRequest) {
        let view = self
            .view
            .map(|version| replica_view(env, version, key.shard));
        let accepted = Generation(self.journal.seen(key).accepted());
        let why = refused_for(&self.me, view.as_ref(), accepted, &request);
        let Some(log) = self.replicas.logs.get_mut(&key) else {
            return;
        };
        let Some(why) = why.filter(|_| log.is_at_rest()) else {
            return log.on_request(request);
        };
        let before = log.clone();
        log.on_request(request);
        let actions: Vec<FollowerAction> = std::iter::from_fn(|| log.poll_action()).collect();
        let at = (self.at.node, key);
        env.judge
            .on_refused_request(at, why, (&before, log), &actions);
        for action in actions {
            self.run_follower_action(env, key, action);
        }
    }

    /// Carries out everything the copies have decided.
    pub(super) fn run_replicas(&mut self, env: &mut Env) {
        while let Some((key, action)) = self
            .replicas
            .logs
            .iter_mut()
            .find_map(|(key, log)| Some((*key, log.poll_action()?)))
        {
            self.run_follower_action(env, key, action);
        }
    }

    fn run_follower_action(&mut self, env: &mut Env, key: LogKey, action: FollowerAction) {
        match action {
            FollowerAction::Answer { request, answer } => {
                self.answer_replicate(env, key, request, answer);
            }
            FollowerAction::Disk { ticket, work } => self.do_disk_work(env, key, ticket, work),
            FollowerAction::Read {
                ticket, from, to, ..
            } => {
                let most = env.random.disk.between(1, 4);
                let to = to.min(from + most);
                let after_us = match env.random.disk.chance(300) {
                    true => env.random.disk.below(5_000),
                    false => 1,
                };
                let input = CoreInput::ReplicaRead {
                    key,
                    ticket,
                    from,
                    to,
                };
                env.to_core(after_us, self.at, input);
            }
            FollowerAction::ReportState => self.tell_state(env, key),
            FollowerAction::Note(note) => {
                env.note(|| format!("n{} {key:?}: {note:?}", self.at.node));
                if let FollowerNote::Shortened { base, .. } = note {
                    env.judge
                        .on_shortened(self.at.node, key, base, &self.journal);
                }
                env.judge.on_note(note);
            }
        }
    }

    fn answer_replicate(
        &mut self,
        env: &mut Env,
        key: LogKey,
        request: u64,
        answer: ReplicateAnswer,
    ) {
        let Some((_, held)) = self.replicas.held.remove(&request) else {
            return env
                .judge
                .fail(40, format!("n{} answers {request} twice", self.at.node));
        };
        env.note(|| {
            let (node, generation) = (self.at.node, held.generation);
            format!("n{node} {key:?} at {generation}: {answer:?}")
        });
        env.judge.on_follower_answer(
            &env.catalog,
            self.at.node,
            key,
            (held.generation, held.is_damaged, held.is_rebuild),
            answer,
            &self.journal,
        );
        let answer = match answer {
            ReplicateAnswer::Ok { .. }
                if held.is_batch && env.may_inject && env.random.faults.chance(3) =>
            {
                // A follower that is not sound: its leader has to go on without it.
                env.count_fault(Fault::FalseConflict);
                ReplicateAnswer::refused(PeerCode::LogConflict, "for no reason")
            }
            ReplicateAnswer::Ok { .. }
                if held.is_batch
                    && env.may_inject
                    && env.random.faults.chance(false_refusals_per_mille(key.log)) =>
            {
                env.count_fault(Fault::FalseRefusal);
                ReplicateAnswer::refused(PeerCode::Unauthorized, "for no reason")
            }
            answer => answer,
        };
        self.answer_replicate_to(env, held.reply, answer);
    }

    pub(super) fn on_replica_read(
        &mut self,
        env: &mut Env,
        key: LogKey,
        ticket: u64,
        (from, to): (u64, u64),
    ) {
        let seen = self.journal.seen(key);
        let records: Vec<Bytes> = (from..to)
            .map_while(|offset| seen.record(offset).cloned())
            .collect();
        let is_trimmed = from < seen.base();
        let Some(log) = self.replicas.logs.get_mut(&key) else {
            return;
        };
        let result = match is_trimmed {
            true => Err(StoredReadError::Trimmed),
            false => Ok((from, &records[..])),
        };
        log.on_read(ticket, result);
        self.run_replicas(env);
    }

    fn do_disk_work(&mut self, env: &mut Env, key: LogKey, ticket: u64, work: DiskWork) {
        let gives_up = matches!(
            work,
            DiskWork::Truncate {
                is_rebuild: true,
                ..
            }
        );
        let (generation, change) = match self.change_of(env, key, work) {
            Ok(change) => change,
            Err(error) => return self.end_disk_work(key, ticket, Err(error)),
        };
        let is_rebuild = gives_up
            || self
                .replicas
                .held
                .values()
                .any(|(of, held)| *of == key && held.is_rebuild);
        if let Change::RaiseBase { base } = &change {
            env.judge
                .on_base_raised(self.at.node, key, *base, &self.journal);
        }
        env.judge.on_follower_change(
            &env.catalog,
            self.at.node,
            key,
            (generation, is_rebuild),
            &change,
            &self.journal,
        );
        let token = self.token();
        let is_full = env.disk_is_full[self.at.node];
        match self.journal.submit(key, change, token, is_full) {
            Ok(()) => drop(self.replicas.work.insert(token, (key, ticket))),
            Err(refusal) => {
                let error = match refusal {
                    Refusal::Failed => DiskError::Failed,
                    Refusal::Damaged => DiskError::Damaged,
                    Refusal::DiskFull => {
                        env.count_fault(Fault::FullDisk);
                        DiskError::Full
                    }
                };
                self.end_disk_work(key, ticket, Err(error));
            }
        }
    }

    fn change_of(
        &self,
        env: &Env,
        key: LogKey,
        work: DiskWork,
    ) -> Result<(u64, Change), DiskError> {
        let change = match work {
            DiskWork::Accept { generation } => {
                let generation = generation.0;
                (generation, Change::Accept { generation })
            }
            DiskWork::Begin { generation, leader } => {
                let leader = env.catalog.node_by_name(leader.as_str()).unwrap_or(0);
                let generation = generation.0;
                (generation, Change::Begin { generation, leader })
            }
            DiskWork::Append {
                generation,
                first_offset,
                payloads,
                skip,
            } => {
                if first_offset != self.journal.seen(key).tail() {
                    return Err(DiskError::Moved);
                }
                let records = payloads.iter().skip(skip).map(Bytes::copy_from_slice);
                let change = Change::Append {
                    generation: generation.0,
                    first: first_offset,
                    records: records.collect(),
                };
                (generation.0, change)
            }
            DiskWork::Truncate {
                generation, tail, ..
            } => (generation.0, Change::Truncate { to: tail }),
            DiskWork::RaiseBase { generation, base } => (generation.0, Change::RaiseBase { base }),
            DiskWork::Place { generation, base } => (generation.0, Change::Place { base }),
        };
        Ok(change)
    }

    fn end_disk_work(&mut self, key: LogKey, ticket: u64, result: Result<(), DiskError>) {
        if let Some(log) = self.replicas.logs.get_mut(&key) {
            log.on_disk_done(ticket, result);
        }
    }

    pub(super) fn on_replica_done(&mut self, env: &mut Env, done: &Done) {
        let Some((key, ticket)) = self.replicas.work.remove(&done.token) else {
            return;
        };
        let result = match done.is_ok {
            true => Ok(()),
            false => Err(DiskError::Failed),
        };
        self.end_disk_work(key, ticket, result);
        self.run_replicas(env);
    }
}
