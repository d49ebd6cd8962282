//! The owner's side of a write: last check of ownership, append, and the answer once durable.
//!
//! Invariants:
//! * INV-1: a waiter is answered `Stored` only from a storage completion, which exists only after
//!   the flush that covers the records.
//! * INV-2: each waiter is answered exactly once; a token that was used names nothing.
//! * INV-3: nothing is appended unless this broker leads the shard at exactly the generation the
//!   request was admitted at, checked on the core that owns the shard.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use storage_uring::{AppendError, CommitError, Completion, LogKind, LogName, LogRef};

use crate::ids::{CorrelationId, Generation, Offset, ShardId, ShardKind};
use crate::proto::outcome::Appended;
use crate::wire::internal::Payloads;

use super::begin::NotBegun;
use super::cache::CacheWrite;
use super::client::ClientPublish;
use super::message::{AppendRefusal, AppendResult, LaneAppend, LaneMsg, UnknownWrite};
use super::ship::LedIdx;
use super::Core;
use crate::driver::quic::{ConnId, StreamId};

/// Who is told what an append came to.
pub(super) enum AppendWaiter {
    /// A client of this core.
    Client(Box<ClientPublish>),
    /// A peer's request that arrived on this core.
    Peer {
        conn: ConnId,
        stream: StreamId,
        correlation: CorrelationId,
        read_at: Instant,
    },
    /// A forward of this core that turned out to be ours.
    Forward { token: u64 },
    /// Another core.
    Lane { core: usize, ticket: u64 },
    /// A write to a cache's or a counter's log of this core.
    Cache(Box<CacheWrite>),
    /// A copy of a shard another broker leads.
    Follower { copy: u64, ticket: u64 },
    /// The record of a led shard's generation.
    Recorded { at: LedIdx, epoch: u64 },
    /// A large batch of which only a part is appended so far.
    Piece { shard: Arc<ShardId>, batch: u64 },
    /// The last piece of a large batch, whose first record lies at `first`.
    Rest {
        first: Offset,
        waiter: Box<AppendWaiter>,
    },
    /// The record of the generation of a log without followers.
    Begun { log: LogRef, generation: Generation },
    /// The compaction of a log, for its raised base.
    CacheBase(Box<super::cache::CacheAt>),
}

impl AppendWaiter {
    /// Whether somebody outside of this core's own book-keeping is told.
    pub fn is_answered(&self) -> bool {
        match self {
            Self::Client(_)
            | Self::Peer { .. }
            | Self::Forward { .. }
            | Self::Lane { .. }
            | Self::Cache(_) => true,
            Self::Rest { waiter, .. } => waiter.is_answered(),
            Self::Recorded { .. }
            | Self::Begun { .. }
            | Self::Follower { .. }
            | Self::Piece { .. }
            | Self::CacheBase(_) => false,
        }
    }

    /// Whether somebody is told "stored" who may count on the shard's consistency.
    pub fn is_acknowledged(&self) -> bool {
        match self {
            Self::Client(_) | Self::Peer { .. } | Self::Forward { .. } | Self::Lane { .. } => true,
            Self::Rest { waiter, .. } => waiter.is_acknowledged(),
            // A cache applies its write first; its answer waits on its own.
            Self::Cache(_)
            | Self::Recorded { .. }
            | Self::Begun { .. }
            | Self::Follower { .. }
            | Self::Piece { .. }
            | Self::CacheBase(_) => false,
        }
    }
}

/// A log this core has opened.
pub(super) struct OpenLog {
    pub log: LogRef,
    /// Reads that wait for the next record.
    pub waiting_reads: HashMap<super::reads::ReadWaiter, (u64, usize)>,
}

pub(super) fn log_name(shard: &ShardId, kind: LogKind) -> LogName {
    LogName {
        kind,
        tenant: shard.tenant.as_str().to_owned(),
        namespace: shard.namespace.as_str().to_owned(),
        name: shard.name.as_str().to_owned(),
        shard: shard.shard,
    }
}

impl Core {
    /// Appends here or hands the batch to the core that owns the shard.
    pub(super) fn append(
        &mut self,
        shard: &Arc<ShardId>,
        core: u16,
        generation: Generation,
        payloads: Payloads,
        waiter: AppendWaiter,
    ) {
        if core == self.index {
            return self.append_here(shard, generation, &payloads, waiter);
        }
        let ticket = self.lane_appends.insert(waiter);
        let message = LaneMsg::Append(Box::new(LaneAppend {
            ticket,
            shard: Arc::clone(shard),
            generation,
            payloads,
        }));
        if self.send_request(usize::from(core), message).is_err() {
            if let Some(waiter) = self.lane_appends.remove(ticket) {
                let refused = AppendResult::Refused(AppendRefusal::Overloaded);
                self.finish_append(waiter, refused);
            }
        }
    }

    pub(super) fn append_here(
        &mut self,
        shard: &Arc<ShardId>,
        generation: Generation,
        payloads: &Payloads,
        waiter: AppendWaiter,
    ) {
        if let Err(refusal) = self.check_leads(shard, generation) {
            return self.finish_append(waiter, AppendResult::Refused(refusal));
        }
        if payloads.is_empty() {
            return self.finish_append(waiter, AppendResult::Stored(Appended::NOTHING));
        }
        let log = match self.open_log(shard) {
            Ok(log) => log,
            Err(refusal) => return self.finish_append(waiter, AppendResult::Refused(refusal)),
        };
        if self.bulk.must_wait(shard, payloads) {
            let payloads = payloads.clone();
            return self.bulk.push(shard, generation, payloads, waiter);
        }
        self.append_records(log, generation, payloads.iter(), waiter);
    }

    /// Queues records; the waiter is told once they are durable, or at once when refused.
    pub(super) fn append_records<'a>(
        &mut self,
        log: LogRef,
        generation: Generation,
        records: impl ExactSizeIterator<Item = &'a [u8]> + Clone,
        waiter: AppendWaiter,
    ) {
        if let Err(refusal) = self.begin_or_refuse(log, generation) {
            return self.finish_append(waiter, AppendResult::Refused(refusal));
        }
        let token = self.appends.insert(waiter);
        let appended = self
            .storage
            .append(log, generation.0, self.wall_us, records, token);
        if let Err(error) = appended {
            let refusal = self.refusal_of(&error);
            if let Some(waiter) = self.appends.remove(token) {
                self.finish_append(waiter, AppendResult::Refused(refusal));
            }
        }
    }

    /// What is appended next to the log lies behind the record of its generation, or is refused.
    pub(super) fn begin_or_refuse(
        &mut self,
        log: LogRef,
        generation: Generation,
    ) -> Result<(), AppendRefusal> {
        self.begin_generation(log, generation)
            .map_err(|error| match error {
                NotBegun::Storage(error) => self.refusal_of(&error),
                NotBegun::Fenced(why) => {
                    if let Some(shard) = self.log_shards.get(&log).cloned() {
                        self.refuse_to_lead(&shard, why);
                    }
                    AppendRefusal::Opening
                }
            })
    }

    pub(super) fn refusal_of(&self, error: &AppendError) -> AppendRefusal {
        match error {
            AppendError::Overloaded => AppendRefusal::Overloaded,
            AppendError::DiskFull => AppendRefusal::DiskFull,
            AppendError::Failed | AppendError::Damaged => AppendRefusal::LogFailed,
            AppendError::TooLarge { .. } => AppendRefusal::TooLarge,
            AppendError::OutOfRange | AppendError::StaleGeneration { .. } => {
                self.metrics.internal_faults.inc();
                AppendRefusal::LogFailed
            }
        }
    }

    pub(super) fn check_leads(
        &self,
        shard: &ShardId,
        generation: Generation,
    ) -> Result<(), AppendRefusal> {
        match self.routes.shard(shard) {
            Some(route) if route.is_local && route.generation == generation => {
                // INV-6; a shard nobody else holds is open by its assignment.
                let is_open = route.replicas.len() == 1 || self.shipping.is_open(shard, generation);
                is_open.then_some(()).ok_or(AppendRefusal::Opening)
            }
            Some(_) | None => Err(AppendRefusal::Moved),
        }
    }

    /// The log of a shard of this core, opened on first use.
    pub(super) fn open_log(&mut self, shard: &Arc<ShardId>) -> Result<LogRef, AppendRefusal> {
        if let Some(open) = self.logs.get(shard) {
            return Ok(open.log);
        }
        let kind = match shard.kind {
            ShardKind::Stream => LogKind::Stream,
            ShardKind::Cache => LogKind::Cache,
        };
        match self.storage.open_log(&log_name(shard, kind)) {
            Ok(log) => {
                self.apply_retention(shard, log);
                self.log_shards.insert(log, Arc::clone(shard));
                let open = OpenLog {
                    log,
                    waiting_reads: HashMap::new(),
                };
                self.logs.insert(Arc::clone(shard), open);
                Ok(log)
            }
            Err(error) => {
                self.report_shard_failure(shard, &error);
                Err(AppendRefusal::LogFailed)
            }
        }
    }

    /// Takes the storage's completions of this turn and answers their waiters.
    pub(super) fn take_completions(&mut self) {
        let mut completions = std::mem::take(&mut self.completions);
        self.storage.poll_completions(&mut completions);
        for Completion {
            token,
            log,
            range,
            result,
        } in completions.drain(..)
        {
            self.touched_logs.push(log);
            let Some(waiter) = self.appends.remove(token) else {
                continue;
            };
            if let AppendWaiter::Follower { copy, ticket } = waiter {
                self.on_follower_work(copy, ticket, result);
                continue;
            }
            let (waiter, first) = match waiter {
                AppendWaiter::Piece { shard, batch } => {
                    if result.is_err() {
                        self.bulk.note_failed(&shard, batch);
                    }
                    continue;
                }
                AppendWaiter::Rest { first, waiter } => (*waiter, Some(first)),
                whole => (whole, None),
            };
            let appended = Appended {
                first: first.unwrap_or(Offset(range.start)),
                last: Offset(range.end.saturating_sub(1)),
            };
            match result {
                Ok(()) if waiter.is_answered() && self.was_lost(log) => {
                    let unknown = AppendResult::Unknown(UnknownWrite::LeadershipLost);
                    self.finish_append(waiter, unknown);
                }
                Ok(()) => self.acknowledge(log, waiter, appended),
                // Undone by the storage: the next start finds the log without these records.
                Err(CommitError::DiskFull) if first.is_none() => {
                    let refused = AppendResult::Refused(AppendRefusal::DiskFull);
                    self.finish_append(waiter, refused);
                }
                // Of a large batch, earlier pieces may have stayed.
                Err(CommitError::StorageFailed | CommitError::DiskFull) => {
                    self.finish_append(waiter, AppendResult::StorageFailed);
                }
            }
        }
        self.completions = completions;
        self.forget_settled_losses();
        self.storage.poll_raised(&mut self.touched_logs);
        self.wake_touched_readers();
    }

    pub(super) fn finish_append(&mut self, waiter: AppendWaiter, result: AppendResult) {
        match waiter {
            AppendWaiter::Client(publish) => self.answer_local_publish(*publish, result),
            AppendWaiter::Peer {
                conn,
                stream,
                correlation,
                read_at,
            } => {
                let took_us = self.elapsed_us(read_at);
                self.metrics.peer_publish_us.record_us(took_us);
                self.answer_peer_append(conn, stream, correlation, result);
            }
            AppendWaiter::Forward { token } => self.forward_applied_here(token, result),
            AppendWaiter::Lane { core, ticket } => {
                self.send_answer(core, LaneMsg::AppendDone { ticket, result });
            }
            AppendWaiter::Cache(write) => self.settle_cache_write(*write, result),
            // The last piece was not taken, and others lie in the log.
            AppendWaiter::Rest { waiter, .. } => {
                self.finish_append(*waiter, AppendResult::StorageFailed);
            }
            // Told by `take_completions`, which knows more than the result.
            AppendWaiter::Follower { .. } | AppendWaiter::Piece { .. } => {
                self.metrics.internal_faults.inc();
            }
            AppendWaiter::Recorded { at, epoch } => {
                self.ship_recorded(at, epoch, matches!(result, AppendResult::Stored(_)));
            }
            AppendWaiter::Begun { log, generation } => {
                self.on_begun(log, generation, matches!(result, AppendResult::Stored(_)));
            }
            AppendWaiter::CacheBase(at) => self.settle_cache_base(&at, result),
        }
    }

    /// A request to another core; `Err` when its lane is full.
    pub(super) fn send_request(&mut self, core: usize, message: LaneMsg) -> Result<(), ()> {
        // Behind waiting answers a request would overtake them; both use one lane.
        if !self.lane_backlog[core].is_empty() {
            self.metrics.lane_full.inc();
            return Err(());
        }
        match self.port.try_send(core, message) {
            Ok(()) => {
                self.metrics.lane_sent.inc();
                Ok(())
            }
            Err(_) => {
                self.metrics.lane_full.inc();
                Err(())
            }
        }
    }

    /// An answer to another core: waits in the backlog while the lane is full.
    pub(super) fn send_answer(&mut self, core: usize, message: LaneMsg) {
        if self.lane_backlog[core].is_empty() {
            match self.port.try_send(core, message) {
                Ok(()) => self.metrics.lane_sent.inc(),
                Err(full) => self.lane_backlog[core].push_back(full.value),
            }
        } else {
            self.lane_backlog[core].push_back(message);
        }
    }

    /// Sends what waits for room; true when something still waits.
    pub(super) fn drain_backlog(&mut self) -> bool {
        let mut waits = false;
        for core in 0..self.lane_backlog.len() {
            while let Some(message) = self.lane_backlog[core].pop_front() {
                if let Err(full) = self.port.try_send(core, message) {
                    self.lane_backlog[core].push_front(full.value);
                    waits = true;
                    break;
                }
                self.metrics.lane_sent.inc();
            }
        }
        waits
    }

    /// Microseconds from `since` to now, for histograms.
    pub(super) fn elapsed_us(&self, since: Instant) -> u64 {
        self.now.saturating_duration_since(since).as_micros() as u64
    }
}
