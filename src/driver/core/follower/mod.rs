//! Copies of shards that other brokers lead: drives one [`FollowerLog`] a log on the core that owns the
//! shard.
//!
//! Decides nothing. Carries out what the machine wants over this core's storage, feeds back what came of
//! it, and answers. A copy is opened at the first request for it and let go when this broker ceases to
//! follow the shard: from then on others may write the log.
//!
//! Invariants:
//! * every request handed to a machine is answered once ([`Slots`] of requests), also after the shard moved;
//! * records are appended only at the offset the leader named: the tail is checked first.

mod report;

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use storage_uring::{AppendError, CommitError, ControlEvent, LogError, LogKind, LogRef};

use crate::ids::{Generation, NodeId, ShardId};
use crate::proto::replication::follower::{
    answer_of_outsider, DiskError, DiskWork, FollowerAction, FollowerLog, FollowerRequest,
    StoredReadError,
};
use crate::proto::replication::types::ReplicaLog;
use crate::proto::replication::{
    History, HistoryEntry, LogState, ReplicaLogKey, ReplicaView, ReplicateAnswer,
};

use super::append::{log_name, AppendWaiter};
use super::message::{LaneMsg, LaneReplicate, ReadResult};
use super::reads::ReadWaiter;
use super::retention::follower_bound;
use super::slots::Slots;
use super::Core;

/// The copies of one core.
#[derive(Default)]
pub(super) struct Followers {
    copies: Slots<Copy>,
    by_key: HashMap<ReplicaLogKey, u64>,
    requests: Slots<Asker>,
}

/// One copy.
struct Copy {
    key: ReplicaLogKey,
    /// `None` when recovery refused the log.
    log: Option<LogRef>,
    machine: FollowerLog,
    /// Set when this broker ceased to follow the shard; the copy stays until everything is answered.
    is_retired: bool,
    /// Where what retention must keep begins, as the storage was told last.
    bound: Option<u64>,
}

/// Who asked.
#[derive(Debug, Clone, Copy)]
struct Asker {
    core: usize,
    ticket: u64,
}

/// The kind of storage log behind a replicated log.
pub(super) const fn log_kind(log: ReplicaLog) -> LogKind {
    match log {
        ReplicaLog::Stream => LogKind::Stream,
        ReplicaLog::Cache => LogKind::Cache,
        ReplicaLog::GroupCursors => LogKind::Cursors,
        ReplicaLog::GroupDeadLetters => LogKind::DeadLetters,
        ReplicaLog::Counters => LogKind::Counters,
    }
}

impl Followers {
    /// How far the copy of a stream has been compared with its leader's log.
    pub fn matched(&self, shard: &ShardId) -> Option<u64> {
        let key = ReplicaLogKey {
            shard: Arc::new(shard.clone()),
            log: ReplicaLog::Stream,
        };
        let copy = self.copies.get(*self.by_key.get(&key)?)?;
        copy.machine.matched_with_leader()
    }

    /// The copies of streams, with their logs.
    pub fn main_logs(&self) -> impl Iterator<Item = (&Arc<ShardId>, LogRef)> {
        let copies = self.by_key.iter();
        copies
            .filter(|(key, _)| key.log == ReplicaLog::Stream)
            .filter_map(|(key, number)| Some((&key.shard, self.copies.get(*number)?.log?)))
    }
}

impl Core {
    /// A replicate request for a shard of this core, from a peer of core `from`.
    pub(super) fn replicate_here(&mut self, from: usize, request: LaneReplicate) {
        let asker = Asker {
            core: from,
            ticket: request.ticket,
        };
        let shard = &request.key.shard;
        if !self.routes.shard(shard).is_some_and(|r| r.is_follower) {
            let (view, accepted) = (self.replica_view(shard), self.state.accepted(shard));
            let sent = (&*request.sender, request.generation);
            let (view, body) = (view.as_ref(), &request.body);
            let answer = answer_of_outsider(&self.me, view, accepted, sent, body);
            return self.answer_at(asker, answer);
        }
        let copy = self.follower_copy(&request.key);
        let number = self.followers.requests.insert(asker);
        if let Some(copy) = self.followers.copies.get_mut(copy) {
            copy.machine.on_request(FollowerRequest {
                request: number,
                sender: request.sender,
                connection: request.connection,
                generation: request.generation,
                body: request.body,
            });
        }
        self.run_follower(copy);
    }

    /// The copy of a log, opened at first use.
    fn follower_copy(&mut self, key: &ReplicaLogKey) -> u64 {
        if let Some(copy) = self.followers.by_key.get(key) {
            return *copy;
        }
        let view = self.replica_view(&key.shard);
        let log = self
            .storage
            .open_log(&log_name(&key.shard, log_kind(key.log)));
        match &log {
            Ok(log) if key.log == ReplicaLog::Stream => self.apply_retention(&key.shard, *log),
            Ok(_) => {}
            Err(error) => self.report_copy_failure(key, error),
        }
        let copy = self.followers.copies.insert(Copy {
            key: key.clone(),
            log: log.ok(),
            machine: FollowerLog::new(self.me.clone(), view).of_log(key.log),
            is_retired: false,
            bound: None,
        });
        self.followers.by_key.insert(key.clone(), copy);
        self.metrics
            .follower_logs
            .set(self.followers.by_key.len() as u64);
        self.report_log_state(copy);
        copy
    }

    fn report_copy_failure(&mut self, key: &ReplicaLogKey, error: &LogError) {
        tracing::error!(log = %key, %error, "the copy cannot be opened; its leader is told so");
        self.report_shard_failure(&key.shard, error);
    }

    /// The shard's assignment as this core reads it.
    pub(super) fn replica_view(&self, shard: &ShardId) -> Option<ReplicaView> {
        let route = self.routes.shard(shard)?;
        let replicas = route.replicas.iter();
        let replicas: Arc<[NodeId]> = replicas
            .map(|node| self.routes.node(*node).node_id.clone())
            .collect();
        let leader = self.routes.node(route.leader).node_id.clone();
        Some(ReplicaView {
            generation: route.generation,
            leader,
            replicas,
            consistency: self.routes.consistency(shard)?,
        })
    }

    /// Carries out what a copy's machine wants until it wants nothing now.
    fn run_follower(&mut self, number: u64) {
        loop {
            let Some(copy) = self.followers.copies.get_mut(number) else {
                return;
            };
            let log = copy.log;
            if let Some(log) = log {
                copy.machine.on_base_seen(self.storage.base(log));
            }
            let Some(action) = copy.machine.poll_action() else {
                break;
            };
            match action {
                FollowerAction::Answer { request, answer } => self.answer_asker(request, answer),
                FollowerAction::Disk { ticket, work } => {
                    let started = match log {
                        Some(log) => self.start_follower_work(number, log, ticket, &work),
                        None => Err(DiskError::Damaged),
                    };
                    if let Err(error) = started {
                        self.follower_work_done(number, ticket, Err(error));
                    }
                }
                FollowerAction::Read {
                    ticket,
                    from,
                    max_bytes,
                    ..
                } => self.start_follower_read(number, log, ticket, from, max_bytes),
                FollowerAction::ReportState => self.report_log_state(number),
                FollowerAction::Note(note) => self.note_follower(number, note),
            }
        }
        self.raise_retention_bound(number);
        self.let_go_if_done(number);
    }

    /// What is compared with the leader's log may be given up.
    fn raise_retention_bound(&mut self, number: u64) {
        let Some(copy) = self.followers.copies.get_mut(number) else {
            return;
        };
        let Some(log) = copy.log.filter(|_| copy.key.log == ReplicaLog::Stream) else {
            return;
        };
        if !copy.is_retired {
            let matched = copy.machine.matched_with_leader();
            // After every batch: one look at the route, nothing allocated.
            let replicas = self.routes.shard(&copy.key.shard);
            let replicas = replicas.map_or(usize::MAX, |route| route.replicas.len());
            let bound = follower_bound(replicas, matched);
            if copy.bound.replace(bound) != Some(bound) {
                self.storage.set_retention_bound(log, bound);
            }
        }
    }

    fn answer_asker(&mut self, request: u64, answer: ReplicateAnswer) {
        if let Some(asker) = self.followers.requests.remove(request) {
            self.answer_at(asker, answer);
        }
    }

    fn answer_at(&mut self, Asker { core, ticket }: Asker, answer: ReplicateAnswer) {
        if core == usize::from(self.index) {
            return self.finish_replicate(ticket, answer);
        }
        self.send_answer(core, LaneMsg::Replicated { ticket, answer });
    }

    fn start_follower_work(
        &mut self,
        copy: u64,
        log: LogRef,
        ticket: u64,
        work: &DiskWork,
    ) -> Result<(), DiskError> {
        let event = match work {
            DiskWork::Append {
                generation,
                first_offset,
                payloads,
                skip,
            } => {
                if self.storage.tail(log) != *first_offset {
                    return Err(DiskError::Moved);
                }
                let token = self.appends.insert(AppendWaiter::Follower { copy, ticket });
                let records = payloads.iter().skip(*skip);
                let count = records.len() as u64;
                let appended = self
                    .storage
                    .append(log, generation.0, self.wall_us, records, token);
                return match appended {
                    Ok(_) => {
                        self.metrics.follower_records.add(count);
                        Ok(())
                    }
                    Err(error) => self.work_refused(token, error),
                };
            }
            DiskWork::Accept { generation } => ControlEvent::Accept(generation.0),
            DiskWork::Begin { generation, leader } => ControlEvent::Begin {
                generation: generation.0,
                leader: leader.as_str(),
            },
            DiskWork::Truncate { tail, .. } => ControlEvent::Truncate(*tail),
            DiskWork::RaiseBase { base, .. } => ControlEvent::Base(*base),
            DiskWork::Place { base, .. } => ControlEvent::Place(*base),
        };
        let token = self.appends.insert(AppendWaiter::Follower { copy, ticket });
        match self.storage.control(log, event, self.wall_us, token) {
            Ok(()) => Ok(()),
            Err(error) => self.work_refused(token, error),
        }
    }

    fn work_refused(&mut self, token: u64, error: AppendError) -> Result<(), DiskError> {
        self.appends.remove(token);
        Err(match error {
            AppendError::Overloaded => DiskError::Overloaded,
            AppendError::DiskFull => DiskError::Full,
            AppendError::Failed => DiskError::Failed,
            AppendError::TooLarge { .. } => DiskError::TooLarge,
            AppendError::Damaged => DiskError::Damaged,
            AppendError::OutOfRange | AppendError::StaleGeneration { .. } => DiskError::Moved,
        })
    }

    /// Storage finished a piece of a copy's work.
    pub(super) fn on_follower_work(
        &mut self,
        copy: u64,
        ticket: u64,
        result: Result<(), CommitError>,
    ) {
        let result = match result {
            Ok(()) => Ok(()),
            Err(CommitError::StorageFailed) if self.storage.failure().is_some() => {
                Err(DiskError::Failed)
            }
            // The storage goes on, so the space ran out behind a first part of the batch that stays: the
            // log is asked how far it reaches now.
            Err(CommitError::StorageFailed | CommitError::DiskFull) => Err(DiskError::Full),
        };
        self.follower_work_done(copy, ticket, result);
        self.run_follower(copy);
    }

    fn follower_work_done(&mut self, copy: u64, ticket: u64, result: Result<(), DiskError>) {
        if let Some(copy) = self.followers.copies.get_mut(copy) {
            copy.machine.on_disk_done(ticket, result);
        }
    }

    fn start_follower_read(
        &mut self,
        number: u64,
        log: Option<LogRef>,
        ticket: u64,
        from: u64,
        max_bytes: usize,
    ) {
        let Some(log) = log else {
            return self.follower_read_done(number, ticket, Err(StoredReadError::Failed));
        };
        if let Some(batch) = self.storage.read_recent(log, from, max_bytes) {
            let stored = Ok((batch.first_offset, &batch.records[..]));
            return self.follower_read_done(number, ticket, stored);
        }
        let Some(copy) = self.followers.copies.get_mut(number) else {
            return;
        };
        let shard = Arc::clone(&copy.key.shard);
        let waiter = ReadWaiter::Follower {
            copy: number,
            ticket,
        };
        self.read_disk(&shard, log, from, max_bytes, waiter);
    }

    fn follower_read_done(
        &mut self,
        copy: u64,
        ticket: u64,
        result: Result<(u64, &[Bytes]), StoredReadError>,
    ) {
        if let Some(copy) = self.followers.copies.get_mut(copy) {
            copy.machine.on_read(ticket, result);
        }
    }

    /// The disk answered a copy's read.
    pub(super) fn on_follower_read(&mut self, copy: u64, ticket: u64, result: &ReadResult) {
        let stored = match result {
            ReadResult::Records {
                first_offset,
                records,
                ..
            } => Ok((*first_offset, &records[..])),
            ReadResult::Trimmed { base } => {
                if let Some(copy) = self.followers.copies.get_mut(copy) {
                    copy.machine.on_base_raised(*base);
                }
                Err(StoredReadError::Trimmed)
            }
            ReadResult::Bounds { .. }
            | ReadResult::NotReady
            | ReadResult::NotOwner
            | ReadResult::Failed(_) => Err(StoredReadError::Failed),
        };
        self.follower_read_done(copy, ticket, stored);
        self.run_follower(copy);
    }

    fn report_log_state(&mut self, number: u64) {
        let Some(copy) = self.followers.copies.get_mut(number) else {
            return;
        };
        let Some(log) = copy.log else {
            return copy.machine.on_unusable();
        };
        let found = log_state(&self.storage.state(log));
        let Some(damage) = self.storage.damage(log) else {
            return copy.machine.on_state(found);
        };
        // The event that accepted the newest generation may be what was lost; the shard's other logs accepted
        // it as well.
        let of_shard = self.state.accepted(&copy.key.shard);
        copy.machine
            .on_broken(found.accepted.max(of_shard.unwrap_or(Generation(0))));
        tracing::error!(log = %copy.key, damage, "the copy is damaged; it waits until its leader has it made anew");
    }

    /// A new catalog is in force: every copy learns its new assignment.
    pub(super) fn followers_after_catalog(&mut self) {
        for number in self.followers.copies.tokens() {
            let Some(copy) = self.followers.copies.get_mut(number) else {
                continue;
            };
            let key = copy.key.clone();
            let follows = self.routes.shard(&key.shard).is_some_and(|r| r.is_follower);
            let view = self.replica_view(&key.shard);
            let Some(copy) = self.followers.copies.get_mut(number) else {
                continue;
            };
            copy.machine.on_view(view);
            copy.bound = None;
            if !follows && !copy.is_retired {
                copy.is_retired = true;
                self.followers.by_key.remove(&key);
            }
            self.run_follower(number);
        }
        self.metrics
            .follower_logs
            .set(self.followers.by_key.len() as u64);
    }

    fn let_go_if_done(&mut self, number: u64) {
        let copy = self.followers.copies.get_mut(number);
        if copy.is_some_and(|copy| copy.is_retired && copy.machine.is_idle()) {
            self.followers.copies.remove(number);
        }
    }

    /// Requests of leaders not answered yet.
    pub(super) fn follower_requests(&self) -> usize {
        self.followers.requests.len()
    }
}

/// What storage knows of a log, in the words of the machines. A history that is out of order, or names a
/// leader that no node can be called, was never written by this program and is no history: that costs
/// repair, never safety.
pub(super) fn log_state(view: &storage_uring::LogView) -> LogState {
    let entries = view.history.iter().map(|entry| {
        Some(HistoryEntry {
            generation: Generation(entry.generation),
            start: entry.start,
            leader: NodeId::new(&entry.leader).ok()?,
        })
    });
    let history = entries.collect::<Option<Vec<_>>>();
    LogState {
        base: view.base,
        tail: view.tail,
        durable_tail: view.durable_tail,
        accepted: Generation(view.accepted),
        commit: view.commit,
        history: history.and_then(History::from_entries).unwrap_or_default(),
    }
}
