//! The owner's side of caches and counters: from a checked request to its answer.
//!
//! A get is answered from the state of this core. A write is staged, appended, and applied to the
//! state when its completion says that it is durable; its answer comes then. What decides is in
//! [`proto::cache`](crate::proto::cache); rebuilding a state is in [`cache_load`](super::cache_load).
//!
//! Invariant INV-5: a state is touched only by replaying its log and by completions of its own
//! appends, both in offset order; a state with writes on their way is never dropped.
//!
//! Bounds: memory of keys and of values for the whole core ([`CacheMemory`]). At the first, puts
//! and adds of new keys are refused as overload; at the second, old values leave memory and are
//! read from the log.

use std::sync::Arc;

use storage_uring::LogRef;

use crate::ids::{CorrelationId, Generation, ShardId};
use crate::limits::{CACHE_INDEX_BYTES_PER_CORE, CACHE_VALUE_BYTES_PER_CORE};
use crate::proto::cache::{
    Applied, CacheFailure, CacheLog, CacheReply, CacheRequest, LogIndex, Lookup, Served, Staged,
    Written,
};

use super::append::AppendWaiter;
use super::cache_load::Loading;
use super::client::ClientCache;
use super::group::{GroupAt, GroupWrite};
use super::message::{AppendRefusal, AppendResult, CacheResult, LaneCache, LaneMsg};
use super::ship::QuorumCache;
use super::Core;
use crate::driver::quic::{ConnId, StreamId};

/// Deletes of expired entries written for one log in one go.
const EXPIRE_QUANTUM: usize = 1024;

/// One log of one cache shard.
pub(super) type CacheAt = (Arc<ShardId>, CacheLog);

/// Who is told what an operation came to.
pub(super) enum CacheWaiter {
    /// A client of this core.
    Client(Box<ClientCache>),
    /// A peer's request that arrived on this core.
    Peer {
        conn: ConnId,
        stream: StreamId,
        correlation: CorrelationId,
    },
    /// A forward of this core that turned out to be ours.
    Forward { token: u64 },
    /// Another core.
    Lane { core: usize, ticket: u64 },
    /// Whoever it is, told once a majority holds the log up to `end`.
    Committed {
        log: LogRef,
        end: u64,
        is_write: bool,
        waiter: Box<CacheWaiter>,
    },
    /// A consumer group of this core, for one of its records.
    Group { at: GroupAt, write: GroupWrite },
    /// The compaction of the log, for one copy.
    Compaction { at: CacheAt },
}

/// A write on its way to the log.
pub(super) struct CacheWrite {
    at: CacheAt,
    staged: Staged,
    /// Nobody waits for the delete of an expired entry.
    waiter: Option<CacheWaiter>,
}

/// The state of one log, and its way there.
pub(super) struct CacheState {
    pub log: LogRef,
    pub index: LogIndex,
    /// Set while the state is behind its log.
    pub loading: Option<Loading>,
    /// The shard was led elsewhere meanwhile: the log may have been cut and written anew under it.
    pub is_stale: bool,
    /// What [`CacheMemory`] holds for it.
    counted: Counted,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Counted {
    keys: usize,
    index_bytes: usize,
    value_bytes: usize,
}

/// Memory of all caches and counters of a core.
#[derive(Debug, Default)]
pub(super) struct CacheMemory {
    total: Counted,
}

impl CacheMemory {
    fn replace(&mut self, old: Counted, new: Counted) {
        self.total.keys = self.total.keys - old.keys + new.keys;
        self.total.index_bytes = self.total.index_bytes - old.index_bytes + new.index_bytes;
        self.total.value_bytes = self.total.value_bytes - old.value_bytes + new.value_bytes;
    }

    fn is_full(&self) -> bool {
        self.total.index_bytes >= CACHE_INDEX_BYTES_PER_CORE
    }
}

impl Counted {
    fn of(index: &LogIndex) -> Self {
        Self {
            keys: index.keys(),
            index_bytes: index.index_bytes(),
            value_bytes: index.resident_bytes(),
        }
    }
}

impl CacheState {
    pub fn new(log: LogRef, kind: CacheLog, base: u64) -> Self {
        Self {
            log,
            index: LogIndex::new(kind, base),
            loading: None,
            is_stale: false,
            counted: Counted::default(),
        }
    }

    fn recount(&mut self, memory: &mut CacheMemory) {
        let now = Counted::of(&self.index);
        memory.replace(std::mem::replace(&mut self.counted, now), now);
    }

    /// Brings the totals up to date, and values in memory under their bound.
    fn keep_within(&mut self, kind: CacheLog, memory: &mut CacheMemory) {
        self.recount(memory);
        let held = memory.total.value_bytes;
        let excess = held.saturating_sub(CACHE_VALUE_BYTES_PER_CORE);
        // The few bytes of a group's records stay: the groups are read from memory.
        if let (1.., CacheLog::Values, LogIndex::Values(index)) = (excess, kind, &mut self.index) {
            index.evict(excess);
            self.recount(memory);
        }
    }
}

impl Core {
    /// Does the operation here or hands it to the core that owns the shard.
    pub(super) fn cache(
        &mut self,
        shard: &Arc<ShardId>,
        core: u16,
        generation: Generation,
        request: CacheRequest,
        waiter: CacheWaiter,
    ) {
        if core == self.index {
            return self.cache_here(shard, generation, request, waiter);
        }
        let ticket = self.lane_caches.insert(waiter);
        let message = LaneMsg::Cache(Box::new(LaneCache {
            ticket,
            shard: Arc::clone(shard),
            generation,
            request,
        }));
        if self.send_request(usize::from(core), message).is_err() {
            if let Some(waiter) = self.lane_caches.remove(ticket) {
                self.finish_cache(waiter, Err(CacheFailure::Overloaded));
            }
        }
    }

    pub(super) fn cache_here(
        &mut self,
        shard: &Arc<ShardId>,
        generation: Generation,
        request: CacheRequest,
        waiter: CacheWaiter,
    ) {
        if let Err(refusal) = self.check_leads(shard, generation) {
            return self.finish_cache(waiter, Err(of_refusal(refusal)));
        }
        let at = (Arc::clone(shard), request.log());
        match self.ready_cache(&at) {
            Ok(true) => self.serve_cache(&at, generation, request, waiter),
            Ok(false) => self.hold_for_load(&at, generation, request, waiter),
            Err(failure) => self.finish_cache(waiter, Err(failure)),
        }
    }

    pub(super) fn serve_cache(
        &mut self,
        at: &CacheAt,
        generation: Generation,
        request: CacheRequest,
        waiter: CacheWaiter,
    ) {
        let now_ms = self.cache_clock.at_wall_us(self.wall_us);
        let is_full = self.cache_memory.is_full();
        let Some(state) = self.caches.get_mut(at) else {
            self.metrics.internal_faults.inc();
            return self.finish_cache(waiter, Err(CacheFailure::NotReady));
        };
        let (log, end) = (state.log, state.index.next_offset());
        match state.index.serve(&request, now_ms, is_full) {
            Ok(Served::Found(found)) => {
                let waiter = self.committed(log, end, waiter, false);
                self.finish_lookup(at, &request.key, found, waiter);
            }
            Ok(Served::Sum(sum)) => self.finish_cache(waiter, Ok(CacheReply::Sum(sum))),
            Ok(Served::Absent) => {
                let waiter = self.committed(log, end, waiter, false);
                self.finish_cache(waiter, Ok(CacheReply::Value(None)));
            }
            Ok(Served::Write(staged)) => {
                self.append_cache_write(at, (log, generation), staged, Some(waiter));
            }
            Err(failure) => self.finish_cache(waiter, Err(failure)),
        }
    }

    pub(super) fn append_cache_write(
        &mut self,
        at: &CacheAt,
        (log, generation): (LogRef, Generation),
        staged: Staged,
        waiter: Option<CacheWaiter>,
    ) {
        let record = staged.record().clone();
        let write = CacheWrite {
            at: at.clone(),
            staged,
            waiter,
        };
        let waiter = AppendWaiter::Cache(Box::new(write));
        self.append_records(log, generation, std::iter::once(record.as_ref()), waiter);
    }

    /// A write is durable, or it is known that it will not be.
    pub(super) fn settle_cache_write(&mut self, write: CacheWrite, result: AppendResult) {
        let CacheWrite { at, staged, waiter } = write;
        let now_ms = self.cache_clock.at_wall_us(self.wall_us);
        let key = staged.key();
        let Some(state) = self.caches.get_mut(&at) else {
            unreachable_state(&self.metrics);
            return self.finish_write(waiter, Err(CacheFailure::StorageFailed));
        };
        let done = match result {
            AppendResult::Stored(place) => state
                .index
                .applied(staged, place.first.0, now_ms)
                .ok_or(CacheFailure::StorageFailed),
            AppendResult::Refused(refusal) => {
                state.index.abandoned(staged);
                Err(of_refusal(refusal))
            }
            AppendResult::StorageFailed => {
                state.index.abandoned(staged);
                Err(CacheFailure::StorageFailed)
            }
            // The shard is lost; whoever leads it next reads the log.
            AppendResult::Unknown(_) => {
                state.index.abandoned(staged);
                Err(CacheFailure::LeadershipLost)
            }
        };
        let log = state.log;
        state.keep_within(at.1, &mut self.cache_memory);
        let waiter = match result {
            AppendResult::Stored(place) => {
                waiter.map(|waiter| self.committed(log, place.last.0 + 1, waiter, true))
            }
            AppendResult::Refused(_) | AppendResult::StorageFailed | AppendResult::Unknown(_) => {
                waiter
            }
        };
        match done {
            Err(failure) => self.finish_write(waiter, Err(failure)),
            Ok(Written::Sum(sum)) => self.finish_write(waiter, Ok(CacheReply::Sum(Some(sum)))),
            Ok(Written::Value(Applied::Stored)) => {
                self.finish_write(waiter, Ok(CacheReply::Stored));
            }
            Ok(Written::Value(Applied::Expired)) => self.metrics.cache_expired.inc(),
            Ok(Written::Value(Applied::Copied)) => {
                self.finish_write(waiter, Ok(CacheReply::Stored));
            }
            Ok(Written::Value(Applied::Removed(found))) => {
                if let Some(waiter) = waiter {
                    self.finish_lookup(&at, &key, found, waiter);
                }
            }
        }
    }

    fn finish_write(&mut self, waiter: Option<CacheWaiter>, result: CacheResult) {
        if let Some(waiter) = waiter {
            self.finish_cache(waiter, result);
        }
    }

    fn finish_lookup(&mut self, at: &CacheAt, key: &Arc<str>, found: Lookup, waiter: CacheWaiter) {
        match found {
            Lookup::Miss => self.finish_cache(waiter, Ok(CacheReply::Value(None))),
            Lookup::Value(value) => self.finish_cache(waiter, Ok(CacheReply::Value(Some(value)))),
            Lookup::InLog { offset } => self.read_cache_value(at, key, offset, waiter),
        }
    }

    pub(super) fn finish_cache(&mut self, waiter: CacheWaiter, result: CacheResult) {
        match waiter {
            CacheWaiter::Client(client) => self.answer_local_cache(*client, result),
            CacheWaiter::Peer {
                conn,
                stream,
                correlation,
            } => self.answer_peer_cache(conn, stream, correlation, result),
            CacheWaiter::Forward { token } => self.forward_cache_applied_here(token, result),
            CacheWaiter::Lane { core, ticket } => {
                self.send_answer(core, LaneMsg::CacheDone { ticket, result });
            }
            CacheWaiter::Committed {
                log,
                end,
                is_write,
                waiter,
            } => match result {
                Ok(_) => {
                    let answer = QuorumCache {
                        waiter: *waiter,
                        result,
                        is_write,
                    };
                    self.answer_cache_at(log, end, answer);
                }
                Err(_) => self.finish_cache(*waiter, result),
            },
            CacheWaiter::Group { at, write } => {
                self.on_group_written(&at, write, result.map(|_| ()));
            }
            CacheWaiter::Compaction { at } => self.on_copy_written(&at, result.map(|_| ())),
        }
    }

    /// On a replicated cache, the waiter that lets a success wait for the mark.
    fn committed(&self, log: LogRef, end: u64, waiter: CacheWaiter, is_write: bool) -> CacheWaiter {
        match self.is_replicated(log) {
            true => CacheWaiter::Committed {
                log,
                end,
                is_write,
                waiter: Box::new(waiter),
            },
            false => waiter,
        }
    }

    /// Brings the totals up to date with one state, and memory under its bound.
    pub(super) fn count_cache(&mut self, at: &CacheAt) {
        if let Some(state) = self.caches.get_mut(at) {
            state.keep_within(at.1, &mut self.cache_memory);
        }
    }

    /// Tells what caches and counters take.
    pub(super) fn tell_cache_memory(&self) {
        let total = self.cache_memory.total;
        self.metrics.cache_keys.set(total.keys as u64);
        self.metrics.cache_index_bytes.set(total.index_bytes as u64);
        self.metrics.cache_value_bytes.set(total.value_bytes as u64);
    }

    /// About once a second: writes the deletes of expired entries, and lets nobody wait too long
    /// for a state that is still being read.
    pub(super) fn tend_caches(&mut self) {
        self.refuse_late_loads();
        self.tell_cache_memory();
        if self.is_draining {
            return;
        }
        let now_ms = self.cache_clock.at_wall_us(self.wall_us);
        let mut expired = Vec::new();
        for (at, state) in &mut self.caches {
            let route = self.routes.shard(&at.0).filter(|route| route.is_local);
            if let (Some(route), LogIndex::Values(index), None) =
                (route, &mut state.index, &state.loading)
            {
                let writes = index.stage_expired(now_ms, EXPIRE_QUANTUM);
                expired.extend(
                    writes
                        .into_iter()
                        .map(|write| (at.clone(), (state.log, route.generation), write)),
                );
            }
        }
        for (at, place, write) in expired {
            self.append_cache_write(&at, place, Staged::Value(write), None);
        }
    }

    /// The states of shards led elsewhere go, once nothing of them is on its way.
    pub(super) fn drop_moved_caches(&mut self) {
        self.run_compaction();
        let mut moved = Vec::new();
        for (at, state) in &mut self.caches {
            if self.routes.shard(&at.0).is_some_and(|route| route.is_local) {
                continue;
            }
            state.is_stale = true;
            if state.loading.is_none() && state.index.staged() == 0 {
                moved.push(at.clone());
            }
        }
        for at in moved {
            self.forget_cache(&at);
        }
    }

    /// The next request rebuilds the state from its log.
    pub(super) fn forget_cache(&mut self, at: &CacheAt) -> Option<CacheState> {
        let state = self.caches.remove(at)?;
        self.cache_memory.replace(state.counted, Counted::default());
        Some(state)
    }
}

/// INV-5 is broken: counted and told, the write is answered as unknown.
fn unreachable_state(metrics: &crate::metrics::CoreMetrics) {
    metrics.internal_faults.inc();
    tracing::error!("a cache write came back to a state that is not there");
}

pub(super) fn of_refusal(refusal: AppendRefusal) -> CacheFailure {
    match refusal {
        AppendRefusal::Moved => CacheFailure::Moved,
        AppendRefusal::Opening => CacheFailure::NotReady,
        AppendRefusal::Overloaded => CacheFailure::Overloaded,
        AppendRefusal::DiskFull => CacheFailure::DiskFull,
        AppendRefusal::TooLarge => CacheFailure::TooLarge,
        AppendRefusal::LogFailed => CacheFailure::LogFailed,
    }
}
