//! Compaction of the logs whose state is in memory: caches, counters, what consumer groups keep.
//!
//! What decides is [`Compaction`]; this file reads, appends, raises the base and keeps the time.
//! One pass runs at a time on a core, the worst log first, on no write's path: a read of a quarter
//! of a mebibyte, batches of 64 copies that share the commits of foreground writes, and a pause.

use storage_uring::{ControlEvent, LogRef};

use crate::ids::Generation;
use crate::proto::cache::{
    CacheFailure, CacheLog, Compaction, CompactionLimits, CompactionStep, LogUse,
};

use super::append::AppendWaiter;
use super::cache::{CacheAt, CacheWaiter};
use super::cache_load::CacheRead;
use super::message::{AppendResult, ReadResult};
use super::reads::ReadWaiter;
use super::timers::Timer;
use super::Core;

/// Records the other replicas may lack of a log that a pass begins on.
const MAX_LAG: u64 = 16 << 10;

/// The pass that runs on a core.
pub(super) struct RunningCompaction {
    at: CacheAt,
    generation: Generation,
    log: LogRef,
    pass: Compaction,
}

fn limits_of(log: CacheLog) -> CompactionLimits {
    match log {
        CacheLog::Values => CompactionLimits::VALUES,
        CacheLog::Counters | CacheLog::Cursors | CacheLog::DeadLetters => {
            CompactionLimits::COUNTERS
        }
    }
}

impl Core {
    /// About once a second: starts a pass over the log that is furthest over its bound.
    pub(super) fn tend_compaction(&mut self) {
        if self.compaction.is_some() || self.is_draining || self.storage.failure().is_some() {
            return;
        }
        let over = |log: &LogUse| log.log_bytes() / log.live_bytes().max(1);
        // A pass whose copies nobody else takes only makes the log longer.
        let is_shipped = |log| self.held_by_heirs(log) + MAX_LAG >= self.storage.tail(log);
        let wanting = self.caches.iter().filter(|(at, state)| {
            state.loading.is_none()
                && state.index.log_use().wants_compaction(&limits_of(at.1))
                && is_shipped(state.log)
        });
        let led = wanting.filter_map(|(at, state)| {
            let route = self.routes.shard(&at.0).filter(|route| route.is_local)?;
            Some((at, route.generation, over(state.index.log_use())))
        });
        let worst = led.max_by_key(|(_, _, over)| *over);
        let Some((at, generation)) = worst.map(|(at, generation, _)| (at.clone(), generation))
        else {
            return;
        };
        let Some(state) = self.caches.get_mut(&at) else {
            return;
        };
        let cut = state.index.begin_compaction();
        let log = state.log;
        let base = self.storage.base(log);
        tracing::debug!(shard = %at.0, log = ?at.1, base, cut, "compacting");
        self.compaction = Some(RunningCompaction {
            pass: Compaction::new(limits_of(at.1), base, cut),
            at,
            generation,
            log,
        });
        self.run_compaction();
    }

    /// Does what the pass wants, until it waits for something.
    pub(super) fn run_compaction(&mut self) {
        loop {
            let Some(running) = self.compaction.as_ref() else {
                return;
            };
            let at = running.at.clone();
            let (log, generation) = (running.log, running.generation);
            // Copies are appends: only under the generation the pass began at.
            let leads = self.check_leads(&at.0, generation).is_ok();
            let goes_on = leads && !self.is_draining;
            let Some(state) = self.caches.get_mut(&at).filter(|_| goes_on) else {
                return self.end_compaction(false);
            };
            let Some(running) = self.compaction.as_mut() else {
                return;
            };
            let index = &mut state.index;
            let (live_below, applied) = (index.log_use().live_below_cut(), index.next_offset());
            let step = running
                .pass
                .poll(self.mono, live_below, applied, |offset, record| {
                    index.stage_copy(offset, record)
                });
            match step {
                Ok(CompactionStep::Busy) => return,
                Ok(CompactionStep::Wait { until }) => {
                    return self.timers.push(until, Timer::Compaction);
                }
                Ok(CompactionStep::Read { from, max_bytes }) => {
                    let read = CacheRead::Compaction { at: at.clone() };
                    let token = self.cache_reads.insert(read);
                    let waiter = ReadWaiter::Cache { token };
                    return self.read_disk(&at.0, log, from, max_bytes, waiter);
                }
                Ok(CompactionStep::Append(copies)) => {
                    for copy in copies {
                        let waiter = CacheWaiter::Compaction { at: at.clone() };
                        self.append_cache_write(&at, (log, generation), copy, Some(waiter));
                    }
                }
                Ok(CompactionStep::Raise { base, held }) => {
                    self.raise_cache_base(&at, log, base, held);
                }
                Ok(CompactionStep::Done { raised }) => return self.end_compaction(raised),
                Err(fault) => {
                    tracing::error!(shard = %at.0, %fault, "a record met in compaction cannot be understood");
                    self.metrics.internal_faults.inc();
                    return self.end_compaction(false);
                }
            }
        }
    }

    fn end_compaction(&mut self, raised: bool) {
        let Some(RunningCompaction { at, .. }) = self.compaction.take() else {
            return;
        };
        if let Some(state) = self.caches.get_mut(&at) {
            state.index.end_compaction(raised);
        }
        if raised {
            self.metrics.cache_compactions.inc();
            tracing::debug!(shard = %at.0, log = ?at.1, "compacted");
        }
    }

    /// Gives up the log below `base`, if nobody is owed it any more.
    fn raise_cache_base(&mut self, at: &CacheAt, log: LogRef, base: u64, held: u64) {
        let generation = self.compaction.as_ref().map(|running| running.generation);
        let leads = generation.is_some_and(|of| self.check_leads(&at.0, of).is_ok());
        // What took the place of what is given up must be held by those who may have to serve it.
        if !leads || held > self.held_by_heirs(log) {
            return self.on_base_raised(at, false);
        }
        let token = self
            .appends
            .insert(AppendWaiter::CacheBase(Box::new(at.clone())));
        let event = ControlEvent::Base(base);
        let raised = self.storage.control(log, event, self.wall_us, token);
        if let Err(error) = raised {
            tracing::warn!(shard = %at.0, %error, "the head of a compacted log is not given up yet");
            self.appends.remove(token);
            self.on_base_raised(at, false);
        }
    }

    pub(super) fn on_base_raised(&mut self, at: &CacheAt, raised: bool) {
        let mono = self.mono;
        let is_failed = self.storage.failure().is_some();
        let Some(running) = self.compaction.as_mut().filter(|running| running.at == *at) else {
            return;
        };
        match raised {
            true => running.pass.on_raised(),
            false if is_failed => running.pass.on_read_failed(),
            false => running.pass.on_raise_refused(mono),
        }
    }

    /// The base is raised, or is not; called from the completions.
    pub(super) fn settle_cache_base(&mut self, at: &CacheAt, result: AppendResult) {
        self.on_base_raised(at, matches!(result, AppendResult::Stored(_)));
        self.run_compaction();
    }

    pub(super) fn on_copy_written(&mut self, at: &CacheAt, result: Result<(), CacheFailure>) {
        let mono = self.mono;
        let Some(running) = self.compaction.as_mut().filter(|running| running.at == *at) else {
            return;
        };
        if result.is_ok() {
            self.metrics.cache_copied.inc();
        }
        running.pass.on_written(mono, result.is_ok());
        self.compaction_due = true;
    }

    pub(super) fn on_compaction_read(&mut self, at: &CacheAt, result: ReadResult) {
        let mono = self.mono;
        let Some(running) = self.compaction.as_mut().filter(|running| running.at == *at) else {
            return;
        };
        match result {
            ReadResult::Records {
                first_offset,
                records,
                ..
            } => running.pass.on_records(mono, first_offset, records),
            ReadResult::Bounds { .. }
            | ReadResult::Trimmed { .. }
            | ReadResult::NotOwner
            | ReadResult::NotReady
            | ReadResult::Failed(_) => {
                running.pass.on_read_failed();
            }
        }
        self.compaction_due = true;
    }
}
