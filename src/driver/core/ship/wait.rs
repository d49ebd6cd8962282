//! Writes and cache reads that wait for a majority, and what readers may see.

use std::sync::Arc;

use storage_uring::LogRef;

use super::super::append::AppendWaiter;
use super::super::cache::CacheWaiter;
use super::super::message::{AppendResult, CacheResult, UnknownWrite};
use super::super::Core;
use super::LedIdx;
use crate::catalog::Consistency;
use crate::proto::cache::{CacheFailure, CacheLog, Staged};
use crate::proto::outcome::Appended;
use crate::proto::replication::leader::{HeldBackBy, Readable, ShownMark};

/// Who is told once the mark has passed.
pub(super) enum QuorumWaiter {
    Append(AppendWaiter, Appended),
    Cache(QuorumCache),
}

/// A cache operation whose answer waits for the mark.
pub(in crate::driver::core) struct QuorumCache {
    pub waiter: CacheWaiter,
    pub result: CacheResult,
    pub is_write: bool,
}

impl Core {
    /// What readers of a log may see.
    pub(in crate::driver::core) fn readable(&self, log: LogRef) -> Readable {
        Readable::of(self.held_back_by(log), self.storage.durable_tail(log))
    }

    fn held_back_by(&self, log: LogRef) -> HeldBackBy {
        match self.quorum_of(log).and_then(|at| self.shipping.get(at)) {
            Some(led) => HeldBackBy::Mark(led.shown),
            // A copy this broker may not lead with, whatever the catalog says, has no mark.
            None if self.awaits_mark(log) => HeldBackBy::Mark(ShownMark::default()),
            None => HeldBackBy::Durability,
        }
    }

    /// Whether this is the main log of a replicated `Quorum` shard, by the catalog.
    fn awaits_mark(&self, log: LogRef) -> bool {
        if !self.shipping.holds_quorum_shards {
            return false;
        }
        let shard = self.log_shards.get(&log);
        let route = shard.and_then(|shard| self.routes.shard(shard));
        route.is_some_and(|route| {
            let consistency = self.routes.consistency(&route.shard_id);
            route.replicas.len() > 1 && consistency == Some(Consistency::Quorum)
        })
    }

    /// Whether other brokers hold copies of a log this broker leads.
    pub(in crate::driver::core) fn is_replicated(&self, log: LogRef) -> bool {
        !self.shipping.logs.is_empty() && self.shipping.logs.contains_key(&log)
    }

    /// How far whoever may lead next is known to hold a log this broker leads; of a log nobody else
    /// has a copy of, the durable tail.
    pub(in crate::driver::core) fn held_by_heirs(&self, log: LogRef) -> u64 {
        let Some((at, kind)) = self.shipping.logs.get(&log).copied() else {
            return self.storage.durable_tail(log);
        };
        let led = self.shipping.get(at);
        let machine = led.and_then(|led| led.machine.as_ref());
        machine.map_or(0, |machine| machine.held_by_heirs(kind))
    }

    /// The led `Quorum` shard whose main log this is.
    pub(in crate::driver::core) fn quorum_of(&self, log: LogRef) -> Option<LedIdx> {
        if self.shipping.logs.is_empty() {
            return None;
        }
        let (at, _) = self.shipping.logs.get(&log).copied()?;
        let led = self.shipping.get(at).filter(|led| led.is_quorum)?;
        (led.logs.first()?.1 == log).then_some(at)
    }

    /// A write has become durable here: answers it, or lets it wait for a majority.
    pub(in crate::driver::core) fn acknowledge(
        &mut self,
        log: LogRef,
        waiter: AppendWaiter,
        appended: Appended,
    ) {
        if self.shipping.logs.is_empty() || !waiter.is_acknowledged() {
            return self.finish_append(waiter, AppendResult::Stored(appended));
        }
        if self.is_superseded(log) {
            let unknown = AppendResult::Unknown(UnknownWrite::LeadershipLost);
            return self.finish_append(waiter, unknown);
        }
        let end = appended.last.0 + 1;
        match self.quorum_of(log) {
            Some(at) => self.wait_for_mark(at, end, QuorumWaiter::Append(waiter, appended)),
            None => self.finish_append(waiter, AppendResult::Stored(appended)),
        }
    }

    /// Gives the answer of a cache operation once the mark has reached `end`, which is how far the
    /// state it was taken from had come.
    pub(in crate::driver::core) fn answer_cache_at(
        &mut self,
        log: LogRef,
        end: u64,
        answer: QuorumCache,
    ) {
        if self.is_superseded(log) {
            // Somebody else may have written since; a value from here would be one of the past.
            let failure = match answer.is_write {
                true => CacheFailure::LeadershipLost,
                false => CacheFailure::NotReady,
            };
            return self.finish_cache(answer.waiter, Err(failure));
        }
        match self.quorum_of(log) {
            Some(at) => {
                if !answer.is_write {
                    self.write_first_record(at, log);
                }
                self.wait_for_mark(at, end, QuorumWaiter::Cache(answer));
            }
            None => self.finish_cache(answer.waiter, answer.result),
        }
    }

    /// A leader has no mark before a majority holds a record of its own generation. A reader of a
    /// cache need not wait until somebody writes: a record that changes nothing will do.
    fn write_first_record(&mut self, at: LedIdx, log: LogRef) {
        let Some(led) = self.shipping.get(at) else {
            return;
        };
        let floor = led.machine.as_ref().map(|machine| machine.floor());
        if floor != Some(self.storage.tail(log)) {
            return;
        }
        let (shard, generation) = (Arc::clone(&led.shard), led.generation);
        if self.check_leads(&shard, generation).is_err() {
            return;
        }
        let cache = (shard, CacheLog::Values);
        let state = self.caches.get_mut(&cache);
        let Some(index) = state.and_then(|state| state.index.values_mut()) else {
            return;
        };
        let staged = Staged::Value(index.stage_nothing());
        self.append_cache_write(&cache, (log, generation), staged, None);
    }

    fn wait_for_mark(&mut self, at: LedIdx, end: u64, waiter: QuorumWaiter) {
        let deadline = self.mono + self.settings.quorum_timeout;
        let Some(led) = self.shipping.get_mut(at) else {
            return self.answer_waiter(waiter);
        };
        // The mark of this generation, not what an earlier one has shown.
        let mark = led.machine.as_ref().and_then(|machine| machine.mark());
        if mark.is_some_and(|mark| mark >= end) {
            return self.answer_waiter(waiter);
        }
        led.waits.push(end, deadline, waiter);
        self.shipping.waiting_writes += 1;
        self.arm_ship_timer(at);
    }

    fn is_superseded(&self, log: LogRef) -> bool {
        let Some((at, _)) = self.shipping.logs.get(&log).copied() else {
            return false;
        };
        self.shipping.get(at).is_some_and(|led| led.is_superseded())
    }

    /// The mark has risen.
    pub(super) fn release_waits(&mut self, at: LedIdx, mark: u64) {
        while let Some(waiter) = self
            .shipping
            .get_mut(at)
            .and_then(|led| led.waits.pop_released(mark))
        {
            self.shipping.waiting_writes -= 1;
            self.answer_waiter(waiter);
        }
    }

    /// Waits that have lasted as long as they may: their outcome is unknown.
    pub(super) fn expire_waits(&mut self, at: LedIdx) {
        let now = self.mono;
        while let Some(waiter) = self
            .shipping
            .get_mut(at)
            .and_then(|led| led.waits.pop_expired(now))
        {
            self.shipping.waiting_writes -= 1;
            self.metrics.quorum_timeouts.inc();
            self.fail_waiter(waiter, UnknownWrite::QuorumTimeout);
        }
    }

    /// Leadership is lost: what waits may yet commit, and nobody here will know.
    pub(super) fn fail_waits(&mut self, at: LedIdx) {
        while let Some(waiter) = self
            .shipping
            .get_mut(at)
            .and_then(|led| led.waits.pop_any())
        {
            self.shipping.waiting_writes -= 1;
            self.metrics.quorum_leadership_lost.inc();
            self.fail_waiter(waiter, UnknownWrite::LeadershipLost);
        }
    }

    fn answer_waiter(&mut self, waiter: QuorumWaiter) {
        match waiter {
            QuorumWaiter::Append(waiter, at) => {
                self.finish_append(waiter, AppendResult::Stored(at));
            }
            QuorumWaiter::Cache(answer) => self.finish_cache(answer.waiter, answer.result),
        }
    }

    fn fail_waiter(&mut self, waiter: QuorumWaiter, why: UnknownWrite) {
        match waiter {
            QuorumWaiter::Append(waiter, _) => {
                self.finish_append(waiter, AppendResult::Unknown(why));
            }
            QuorumWaiter::Cache(answer) => {
                let failure = match (answer.is_write, why) {
                    (true, UnknownWrite::QuorumTimeout) => CacheFailure::QuorumTimeout,
                    (true, UnknownWrite::LeadershipLost) => CacheFailure::LeadershipLost,
                    (false, UnknownWrite::QuorumTimeout) => CacheFailure::NotReady,
                    (false, UnknownWrite::LeadershipLost) => CacheFailure::Moved,
                };
                self.finish_cache(answer.waiter, Err(failure));
            }
        }
    }
}
