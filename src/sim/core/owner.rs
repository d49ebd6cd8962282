//! The owner's side of a write: last check of ownership, append, the answer once durable.

use std::sync::Arc;

use bytes::Bytes;

use super::cache::log_key;
use super::group::{GroupLife, GroupWrite};
use super::{Core, CoreInput};
use crate::ids::{CorrelationId, Generation, Offset};
use crate::proto::cache::{CacheFailure, CacheRequest};
use crate::proto::convert::PeerReply;
use crate::proto::outcome::{Appended, PeerCode};
use crate::sim::catalog::Acknowledge;
use crate::sim::check::Origin;
use crate::sim::disk::{Change, Done, GroupEnd, LogKey, Refusal, SimLog};
use crate::sim::env::{Env, Fault};
use crate::sim::faults::DiskCrash;
use crate::sim::network::ConnId;
use crate::sim::workload::Request;
use crate::wire::internal::{Kind, Payloads};

/// Operations of one commit group at most.
const GROUP_BOUND: usize = 8;

/// What an owner is asked to do.
#[derive(Debug, Clone)]
pub enum Work {
    Publish(Payloads),
    Cache(CacheRequest),
}

/// Why it was not done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServeRefusal {
    /// The write or its sync failed: nobody knows.
    StorageFailed,
    /// The log failed before; nothing was written.
    LogFailed,
    /// Ownership changed between admission and append.
    Moved,
    /// A state is being rebuilt, or the shard is not open for writes.
    Opening,
    /// Written, and nobody knows whether it will stay.
    Unknown,
    Overloaded,
    DiskFull,
    Cache(CacheFailure),
    Peer(PeerCode),
}

impl ServeRefusal {
    pub fn peer_code(self) -> PeerCode {
        match self {
            Self::StorageFailed | Self::LogFailed | Self::Unknown => PeerCode::StorageFailed,
            Self::Moved | Self::Opening => PeerCode::Unavailable,
            Self::Overloaded | Self::DiskFull => PeerCode::Overload,
            Self::Cache(failure) => failure.to_peer().0,
            Self::Peer(code) => code,
        }
    }

    /// Whether nothing was written for sure.
    pub fn is_certain(self) -> bool {
        !matches!(self, Self::StorageFailed | Self::Unknown)
    }
}

pub type ServeResult = Result<PeerReply, ServeRefusal>;

/// Who is told what a request came to.
#[derive(Debug, Clone)]
pub enum Waiter {
    Client(Arc<Request>),
    Peer {
        conn: ConnId,
        stream: u8,
        correlation: CorrelationId,
        kind: Kind,
    },
    /// A forward of this core that turned out to be ours.
    Forward {
        token: u64,
    },
    /// Another core.
    Lane {
        core: usize,
        ticket: u64,
    },
    /// The compaction of a log, for one copy.
    Copy {
        key: LogKey,
        generation: Generation,
    },
    /// A consumer group, for one of its records.
    Group {
        of: GroupLife,
        write: GroupWrite,
    },
    /// Nobody: the broker wrote of its own accord.
    Upkeep,
}

impl Core {
    /// Applies here or hands over to the core that owns the shard.
    pub(super) fn serve(
        &mut self,
        env: &mut Env,
        shard: usize,
        generation: Generation,
        work: Work,
        waiter: Waiter,
    ) {
        let owner = self.owner_core(shard);
        if owner != self.at.core {
            return self.serve_on_lane(env, owner, (shard, generation), work, waiter);
        }
        self.serve_here(env, shard, generation, work, waiter);
    }

    pub(super) fn serve_here(
        &mut self,
        env: &mut Env,
        shard: usize,
        generation: Generation,
        work: Work,
        waiter: Waiter,
    ) {
        if !self.leads(env, shard, generation) {
            return self.finish(env, waiter, Err(ServeRefusal::Moved));
        }
        let is_open = self.leads.is_open(shard, generation.0);
        if env.catalog.is_replicated(shard) && !is_open {
            return self.finish(env, waiter, Err(ServeRefusal::Opening));
        }
        match work {
            Work::Publish(payloads) if payloads.is_empty() => {
                let nothing = PeerReply::Appended(Appended::NOTHING);
                self.finish(env, waiter, Ok(nothing));
            }
            Work::Publish(payloads) => {
                let key = LogKey {
                    shard,
                    log: SimLog::Stream,
                };
                let records: Vec<Bytes> = payloads.iter().map(Bytes::copy_from_slice).collect();
                let token = self.token();
                let origin = (token, Origin::Request);
                match self.append(env, key, generation, records, origin) {
                    Ok(()) => drop(self.waiters.insert(token, waiter)),
                    Err(refusal) => self.finish(env, waiter, Err(refusal)),
                }
            }
            Work::Cache(request) => {
                let key = log_key(shard, request.log());
                self.serve_cache(env, key, generation, request, waiter);
            }
        }
    }

    /// Queues records of the shard this process leads.
    pub(super) fn append(
        &mut self,
        env: &mut Env,
        key: LogKey,
        generation: Generation,
        records: Vec<Bytes>,
        (token, origin): (u64, Origin),
    ) -> Result<(), ServeRefusal> {
        let first = self.journal.seen(key).tail();
        let at = (key, generation.0, first);
        env.judge
            .on_append(&env.catalog, self.at.node, at, &records, origin);
        let change = Change::Append {
            generation: generation.0,
            first,
            records,
        };
        let is_full = env.disk_is_full[self.at.node];
        let submitted = self.journal.submit(key, change, token, is_full);
        submitted.map_err(|refusal| {
            env.judge.on_append_refused();
            match refusal {
                Refusal::Failed | Refusal::Damaged => ServeRefusal::LogFailed,
                Refusal::DiskFull => {
                    env.count_fault(Fault::FullDisk);
                    ServeRefusal::DiskFull
                }
            }
        })
    }

    pub(super) fn start_commit_group(&mut self, env: &mut Env) {
        let most = 1 + env.random.disk.index(GROUP_BOUND);
        if !self.journal.start_group(most) {
            return;
        }
        let base = env.plan.sync_us * env.disk_factor[self.at.node];
        let takes_us = base / 2 + env.random.disk.below(base);
        let end = match env.draw_disk_fault(self.at.node) {
            true => GroupEnd::Failed,
            false => GroupEnd::Synced,
        };
        env.to_core(takes_us, self.at, CoreInput::GroupEnds(end));
    }

    pub(super) fn on_group_end(&mut self, env: &mut Env, end: GroupEnd) {
        match env.take_disk_crash(self.at.node) {
            Some(DiskCrash::AtWrite) => return,
            Some(DiskCrash::AtSync) => {
                self.journal.finish_group(end, &mut env.random.disk);
                return;
            }
            None => {}
        }
        let done = self.journal.finish_group(end, &mut env.random.disk);
        for done in &done {
            if let Some(image) = self.journal.on_disk(done.key) {
                env.judge.on_disk(self.at.node, done.key, image);
            }
        }
        for done in done {
            self.on_done(env, done);
        }
        self.leads_on_logs();
        self.begin_leads(env);
    }

    fn on_done(&mut self, env: &mut Env, done: Done) {
        if self.caches.is_waiting(done.token) {
            return self.on_cache_done(env, done);
        }
        if self.replicas.is_waiting(done.token) {
            return self.on_replica_done(env, &done);
        }
        if self.leads.is_waiting(done.token) {
            return self.on_recorded(&done);
        }
        let Some(waiter) = self.waiters.remove(&done.token) else {
            return;
        };
        let result = self.append_result(env, &done);
        self.acknowledge(env, done.key, &done.change, waiter, result);
    }

    /// Answers a write that is durable here, at once or once a majority holds it.
    pub(super) fn acknowledge(
        &mut self,
        env: &mut Env,
        key: LogKey,
        change: &Change,
        waiter: Waiter,
        result: ServeResult,
    ) {
        let (
            Ok(reply),
            Change::Append {
                generation,
                first,
                records,
            },
        ) = (&result, change)
        else {
            return self.finish(env, waiter, result);
        };
        if !env.catalog.is_replicated(key.shard) {
            return self.finish(env, waiter, result);
        }
        if !self.leads.is_open(key.shard, *generation) && !self.leads_any(env, key.shard) {
            return self.finish(env, waiter, Err(ServeRefusal::Unknown));
        }
        let is_asked_for = !matches!(waiter, Waiter::Copy { .. } | Waiter::Upkeep);
        let waits =
            is_asked_for && env.catalog.shards[key.shard].acknowledge == Acknowledge::Quorum;
        if waits && key.log.is_main() {
            let end = first + records.len() as u64;
            return self.wait_for_quorum(env, key, end, waiter, reply.clone());
        }
        self.finish(env, waiter, result);
    }

    fn append_result(&mut self, env: &mut Env, done: &Done) -> ServeResult {
        let Change::Append { first, records, .. } = &done.change else {
            return Err(ServeRefusal::StorageFailed);
        };
        if !done.is_ok {
            return Err(ServeRefusal::StorageFailed);
        }
        let end = first + records.len() as u64;
        let at = Appended {
            first: Offset(*first),
            last: Offset(end - 1),
        };
        env.judge
            .on_durable(self.at.node, done.key, *first, records, &self.journal);
        Ok(PeerReply::Appended(at))
    }

    /// Tells whoever waits what a request came to.
    pub(super) fn finish(&mut self, env: &mut Env, waiter: Waiter, result: ServeResult) {
        match waiter {
            Waiter::Client(request) => self.answer_client(env, &request, result),
            Waiter::Peer {
                conn,
                stream,
                correlation,
                kind,
            } => self.answer_work(env, (conn, stream), (kind, correlation), result),
            Waiter::Forward { token } => self.forward_applied_here(env, token, result),
            Waiter::Lane { core, ticket } => self.answer_lane(env, core, ticket, result),
            Waiter::Copy { key, generation } => {
                self.on_copy_written(env, (key, generation), result.is_ok());
            }
            Waiter::Group { of, write } => {
                let result = result.map(|_| ()).map_err(|_| CacheFailure::StorageFailed);
                self.on_group_written(env, of, write, result);
            }
            Waiter::Upkeep => {}
        }
    }
}
