//! Reading caches back from their logs: whole states at first use, single values that left memory.
//!
//! A state is read a stretch at a time, one read in flight, applied before the next begins, so a
//! load takes [`LOAD_STRETCH_BYTES`] of memory beside the state itself. Requests for a state that
//! is not there yet wait for it, within bounds of number, bytes and time; past any of them they
//! are refused as not ready, which a client may send again at once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use storage_uring::{LogError, LogKind};

use crate::ids::{Generation, ShardId};
use crate::proto::cache::record::ValueRecord;
use crate::proto::cache::{CacheFailure, CacheLog, CacheReply, CacheRequest, LogIndex};

use super::append::log_name;
use super::cache::{CacheAt, CacheState, CacheWaiter};
use super::message::ReadResult;
use super::reads::ReadWaiter;
use super::Core;

/// Bytes of a log read at once while a state is rebuilt.
const LOAD_STRETCH_BYTES: usize = 1 << 20;
/// Requests that wait for one state, and the bytes they hold.
const MAX_WAITING: usize = 1024;
const MAX_WAITING_BYTES: usize = 16 << 20;
/// How long a request waits for a state; well under the time a peer waits for its answer.
const MAX_WAIT: Duration = Duration::from_secs(2);

/// A state on its way, and who waits for it.
pub(super) struct Loading {
    since: Instant,
    waiting: Vec<(Generation, CacheRequest, CacheWaiter)>,
    waiting_bytes: usize,
}

/// A read a cache waits for.
pub(super) enum CacheRead {
    /// The next stretch of a log.
    Stretch { at: CacheAt },
    /// One value.
    Value {
        at: CacheAt,
        key: Arc<str>,
        offset: u64,
        waiter: CacheWaiter,
    },
    /// The next stretch of a log being compacted.
    Compaction { at: CacheAt },
}

impl Core {
    /// Whether the state is there and up with its log; starts to read it when it is not.
    pub(super) fn ready_cache(&mut self, at: &CacheAt) -> Result<bool, CacheFailure> {
        if !self.shard_failures.is_empty() && self.shard_failures.contains_key(&at.0) {
            return Err(CacheFailure::LogFailed);
        }
        let Some(state) = self.caches.get_mut(at) else {
            self.open_cache(at)?;
            return self.ready_cache(at);
        };
        if state.loading.is_some() {
            return Ok(false);
        }
        // With writes on their way the log may be ahead by exactly those.
        match (state.index.staged(), state.is_stale) {
            (0, false) => {}
            (0, true) => {
                state.is_stale = false;
                state.index = LogIndex::new(at.1, self.storage.base(state.log));
            }
            (1.., false) => return Ok(true),
            (1.., true) => return Err(CacheFailure::NotReady),
        }
        let durable_tail = self.storage.durable_tail(state.log);
        let base = self.storage.base(state.log);
        let next = state.index.next_offset();
        if next < base || next > durable_tail {
            // The log was cut or placed anew under the state.
            state.index = LogIndex::new(at.1, base);
        }
        if state.index.next_offset() == durable_tail {
            return Ok(true);
        }
        state.loading = Some(Loading {
            since: self.now,
            waiting: Vec::new(),
            waiting_bytes: 0,
        });
        self.metrics.cache_loads.inc();
        self.read_stretch(at);
        Ok(false)
    }

    fn open_cache(&mut self, (shard, kind): &CacheAt) -> Result<(), CacheFailure> {
        let log_kind = match kind {
            CacheLog::Values => LogKind::Cache,
            CacheLog::Counters => LogKind::Counters,
            CacheLog::Cursors => LogKind::Cursors,
            CacheLog::DeadLetters => LogKind::DeadLetters,
        };
        match self.storage.open_log(&log_name(shard, log_kind)) {
            Ok(log) => {
                let state = CacheState::new(log, *kind, self.storage.base(log));
                self.caches.insert((Arc::clone(shard), *kind), state);
                Ok(())
            }
            Err(error) => {
                self.report_shard_failure(shard, &error);
                Err(CacheFailure::LogFailed)
            }
        }
    }

    /// Keeps a request until the state is there, if it may wait.
    pub(super) fn hold_for_load(
        &mut self,
        at: &CacheAt,
        generation: Generation,
        request: CacheRequest,
        waiter: CacheWaiter,
    ) {
        let now = self.now;
        let loading = self
            .caches
            .get_mut(at)
            .and_then(|state| state.loading.as_mut());
        let bytes = request.held_bytes();
        match loading {
            Some(loading)
                if loading.waiting.len() < MAX_WAITING
                    && loading.waiting_bytes + bytes <= MAX_WAITING_BYTES
                    && now.saturating_duration_since(loading.since) < MAX_WAIT =>
            {
                loading.waiting_bytes += bytes;
                loading.waiting.push((generation, request, waiter));
            }
            Some(_) | None => self.finish_cache(waiter, Err(CacheFailure::NotReady)),
        }
    }

    /// Requests that waited as long as they may.
    pub(super) fn refuse_late_loads(&mut self) {
        let now = self.now;
        let mut late = Vec::new();
        for state in self.caches.values_mut() {
            if let Some(loading) = state
                .loading
                .as_mut()
                .filter(|loading| now.saturating_duration_since(loading.since) >= MAX_WAIT)
            {
                loading.waiting_bytes = 0;
                late.append(&mut loading.waiting);
            }
        }
        for (_, _, waiter) in late {
            self.finish_cache(waiter, Err(CacheFailure::NotReady));
        }
    }

    fn read_stretch(&mut self, at: &CacheAt) {
        let Some(state) = self.caches.get(at) else {
            return;
        };
        let (log, from) = (state.log, state.index.next_offset());
        let token = self
            .cache_reads
            .insert(CacheRead::Stretch { at: at.clone() });
        let waiter = ReadWaiter::Cache { token };
        self.read_disk(&at.0, log, from, LOAD_STRETCH_BYTES, waiter);
    }

    /// Answers with a live value that is not in memory.
    pub(super) fn read_cache_value(
        &mut self,
        at: &CacheAt,
        key: &Arc<str>,
        offset: u64,
        waiter: CacheWaiter,
    ) {
        let Some(log) = self.caches.get(at).map(|state| state.log) else {
            return self.finish_cache(waiter, Err(CacheFailure::NotReady));
        };
        self.metrics.cache_value_reads.inc();
        let token = self.cache_reads.insert(CacheRead::Value {
            at: at.clone(),
            key: Arc::clone(key),
            offset,
            waiter,
        });
        // One byte asks for one record.
        self.read_disk(&at.0, log, offset, 1, ReadWaiter::Cache { token });
    }

    pub(super) fn on_cache_read(&mut self, token: u64, result: ReadResult) {
        match self.cache_reads.remove(token) {
            Some(CacheRead::Stretch { at }) => self.on_stretch(&at, result),
            Some(CacheRead::Compaction { at }) => self.on_compaction_read(&at, result),
            Some(CacheRead::Value {
                at,
                key,
                offset,
                waiter,
            }) => self.on_value_read(&at, &key, offset, waiter, result),
            None => {}
        }
    }

    fn on_value_read(
        &mut self,
        at: &CacheAt,
        key: &Arc<str>,
        offset: u64,
        waiter: CacheWaiter,
        result: ReadResult,
    ) {
        let record = match &result {
            ReadResult::Records {
                first_offset,
                records,
                ..
            } if *first_offset == offset => records.first(),
            _ => None,
        };
        let value = record.and_then(|record| match ValueRecord::decode(record) {
            Ok(ValueRecord::Put { key: of, value, .. }) if of == &**key => {
                Some(record.slice_ref(value))
            }
            Ok(_) | Err(_) => None,
        });
        let Some(value) = value else {
            tracing::error!(shard = %at.0, offset, ?result, "a cached value cannot be read back");
            return self.finish_cache(waiter, Err(CacheFailure::ReadFailed));
        };
        let state = self.caches.get_mut(at);
        if let Some(index) = state.and_then(|state| state.index.values_mut()) {
            index.readmit(key, offset, &value);
        }
        self.count_cache(at);
        self.finish_cache(waiter, Ok(CacheReply::Value(Some(value))));
    }

    fn on_stretch(&mut self, at: &CacheAt, result: ReadResult) {
        let Some(state) = self.caches.get_mut(at) else {
            return;
        };
        match result {
            ReadResult::Records {
                first_offset,
                records,
                ..
            } if !records.is_empty() && first_offset == state.index.next_offset() => {
                for (offset, record) in (first_offset..).zip(&records) {
                    if let Err(fault) = state.index.replay(offset, record) {
                        return self.refuse_log(at, offset, &fault.to_string());
                    }
                }
            }
            ReadResult::Trimmed { base } => state.index = LogIndex::new(at.1, base),
            result => {
                tracing::error!(shard = %at.0, ?result, "a cache cannot be read from its log; the next request tries again");
                return self.end_load(at, CacheFailure::NotReady);
            }
        }
        let (log, next) = (state.log, state.index.next_offset());
        self.count_cache(at);
        if next < self.storage.durable_tail(log) {
            return self.read_stretch(at);
        }
        let fault = self.caches.get(at).and_then(|state| state.index.fault());
        if let Some(fault) = fault {
            return self.refuse_log(at, next.saturating_sub(1), &fault.to_string());
        }
        let loading = self
            .caches
            .get_mut(at)
            .and_then(|state| state.loading.take());
        let Some(loading) = loading else {
            return;
        };
        tracing::info!(shard = %at.0, log = ?at.1, records = next, took = ?self.now.saturating_duration_since(loading.since), "cache read from its log");
        for (generation, request, waiter) in loading.waiting {
            self.cache_here(&at.0, generation, request, waiter);
        }
        self.retry_group_asks();
    }

    /// A record that cannot be understood: the shard is refused, the others go on.
    fn refuse_log(&mut self, at: &CacheAt, offset: u64, why: &str) {
        let (shard, kind): (&Arc<ShardId>, CacheLog) = (&at.0, at.1);
        let error = LogError::Damaged {
            log: format!("{shard} ({kind:?})"),
            detail: format!("record {offset}: {why}"),
        };
        self.report_shard_failure(shard, &error);
        self.end_load(at, CacheFailure::LogFailed);
    }

    fn end_load(&mut self, at: &CacheAt, failure: CacheFailure) {
        let waiting = self
            .forget_cache(at)
            .and_then(|state| state.loading)
            .map(|loading| loading.waiting);
        for (_, _, waiter) in waiting.into_iter().flatten() {
            self.finish_cache(waiter, Err(failure));
        }
        self.fail_group_asks(at, failure);
    }
}
