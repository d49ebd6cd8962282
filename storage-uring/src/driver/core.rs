//! The state of one core's storage and its turn: results in, actions out.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::ahead::ReadsAhead;
use super::reading::{OpenSegment, Reading};
use super::rewriting::Rewriting;
use super::ring::{ring_bell, Done, Op, ReadOp, Ring};
use crate::config::{StorageConfig, SyncMethod};
use crate::error::{LogError, StorageError};
use crate::faults::{FaultEffect, FaultOp, FaultState};
use crate::machine::{Action, CommitMachine, LogRef, MachineConfig, ReadySegment};
use crate::name::LogName;
use crate::recovery::RecoveredSet;
use crate::segment_pool::{PoolEvent, SegmentPool, SegmentPoolConfig};
use crate::slab::Draft;
use crate::stats::StorageStats;

/// Segments asked for ahead of need.
const SEGMENTS_AHEAD: usize = 2;
/// How long appends may wait for a segment once there is no space (an answer within a second).
const SPACE_WAIT_US: u64 = 400_000;
/// Entries (log and segment) the reclaiming sweep looks at in one go, and when space is short: tens of
/// nanoseconds each.
const RECLAIM_ENTRIES: usize = 4096;
const RECLAIM_ENTRIES_URGENT: usize = 32_768;

/// A segment to be given back once reads that may be in it have ended.
struct Leaving {
    segment: u64,
    record: Vec<u8>,
    /// Reads that began before this one may be in it.
    reads_before: u64,
}

pub(super) struct Core {
    pub machine: CommitMachine,
    pub(super) config: StorageConfig,
    ring: Ring,
    pub(super) pool: SegmentPool,
    recovered: Arc<RecoveredSet>,
    faults: Option<FaultState>,
    /// Segments that may still be written to.
    pub(super) files: HashMap<u64, Rc<File>>,
    pub(super) reading: Reading,
    pub ahead: ReadsAhead,
    requested: usize,
    heard_of_segments: bool,
    done: Vec<Done>,
    /// Results held back by a fault.
    delayed: Vec<(Instant, Done)>,
    delays: HashMap<usize, Duration>,
    origin: Instant,
    timer_armed: bool,
    stopped: bool,
    leaving: Option<Leaving>,
    pub(super) rewriting: Rewriting,
    /// Serials of the reads under way.
    pub(super) reads_under_way: BTreeSet<u64>,
    pub(super) next_read: u64,
    pub reads: u64,
    pub reads_ahead: u64,
    read_failures: u64,
    pub read_bytes: u64,
}

impl Core {
    pub fn open(config: StorageConfig, recovered: Arc<RecoveredSet>) -> Result<Self, StorageError> {
        let ring = Ring::new().map_err(StorageError::Ring)?;
        let bell = ring.clone_eventfd().map_err(StorageError::Ring)?;
        let end = recovered.core_end(config.core_index);
        let o_dsync = config.sync == SyncMethod::ODsync;
        let pool = SegmentPool::start(
            SegmentPoolConfig {
                data_dir: Arc::clone(&recovered.data_dir),
                core: config.core_index,
                core_count: config.core_count,
                segment_bytes: config.segment_bytes,
                spares: config.prewritten_segments,
                refill_below: config.refill_below_segments,
                zeros: config.segment_zeros,
                reserve_bytes: config.reserve_bytes,
                low_space_bytes: config.low_space_bytes,
                direct_io: config.direct_io,
                o_dsync,
                first_seq: end.next_segment,
                faults: config.faults.clone(),
            },
            move || ring_bell(&bell),
        )?;
        let mut machine = CommitMachine::new(MachineConfig {
            uuid: recovered.data_dir.meta.uuid,
            core: config.core_index,
            boot_epoch: recovered.data_dir.meta.boot_epoch,
            segment_bytes: config.segment_bytes,
            commit_max_bytes: config.commit_max_bytes,
            early_commit_bytes: config.early_commit_bytes,
            commit_max_delay_us: config.commit_max_delay_us,
            commits_in_flight: config.commits_in_flight,
            max_transfer_bytes: config.max_transfer_bytes,
            max_queued_bytes: config.max_queued_bytes,
            recent_bytes: config.recent_bytes,
            flush_after_write: !o_dsync,
            next_group: end.next_group,
            log_end: end.log_end,
        });
        let (segments, freed) = recovered.take_segments(config.core_index);
        machine.adopt_segments(segments, freed);
        Ok(Self {
            machine,
            ring,
            pool,
            recovered,
            faults: config.faults.clone().map(FaultState::new),
            files: HashMap::new(),
            reading: Reading::new(),
            ahead: ReadsAhead::default(),
            requested: 0,
            heard_of_segments: false,
            done: Vec::new(),
            delayed: Vec::new(),
            delays: HashMap::new(),
            origin: Instant::now(),
            timer_armed: false,
            stopped: false,
            leaving: None,
            rewriting: Rewriting::default(),
            reads_under_way: BTreeSet::new(),
            next_read: 0,
            reads: 0,
            reads_ahead: 0,
            read_failures: 0,
            read_bytes: 0,
            config,
        })
    }

    pub fn clone_eventfd(&self) -> std::io::Result<OwnedFd> {
        self.ring.clone_eventfd()
    }

    pub fn recovered(&self) -> &RecoveredSet {
        &self.recovered
    }

    pub fn has_heard_of_segments(&self) -> bool {
        self.heard_of_segments
    }

    /// The clock as far as an append needs it: only a commit delay asks when a group was opened.
    pub fn append_time_us(&self) -> u64 {
        if self.config.commit_max_delay_us == 0 {
            return 0;
        }
        self.now_us()
    }

    /// Whether a commit should start before the caller is done appending: the device has nothing to do, or
    /// soon will not have, and there is enough to be worth a write.
    pub fn has_early_commit(&mut self) -> bool {
        self.machine.has_early_commit()
            && (self.machine.has_free_slot() || self.ring.has_completions())
    }

    pub fn now_us(&self) -> u64 {
        u64::try_from(self.origin.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    pub fn stop(&mut self) {
        self.stopped = true;
        self.ring.ring_bell();
    }

    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    pub fn max_transfer_bytes(&self) -> usize {
        self.config.max_transfer_bytes
    }

    pub fn open_log(&mut self, name: &LogName) -> Result<LogRef, LogError> {
        if let Some(log) = self.machine.find_log(name)? {
            return Ok(log);
        }
        if !name.fits() {
            return Err(LogError::too_long(name));
        }
        let seed = self.recovered.take(name, self.config.core_index)?;
        self.machine.add_log(name, seed)
    }

    /// Opens the logs that lived on this core and still do: segments can only be given back when every log
    /// in them is open here.
    pub fn adopt_logs(&mut self) {
        let (core, count) = (self.config.core_index, self.config.core_count);
        for name in self.recovered.logs_at_home(core, count) {
            if let Err(error) = self.open_log(&name) {
                tracing::warn!(%name, %error, "a log cannot be opened; its segments stay");
            }
        }
    }

    /// One round: results, segments, actions.
    pub fn turn(&mut self) {
        self.take_results();
        self.take_pool_events();
        self.start_actions();
        self.give_back();
        self.end_rewriting();
        self.ask_for_segments();
        self.tell_pool_of_commits();
        if let Err(error) = self.ring.submit() {
            self.machine
                .fail(format!("io_uring does not take submissions: {error}"));
        }
    }

    fn tell_pool_of_commits(&self) {
        let (stats, gauges) = (self.machine.stats(), &self.pool.gauges);
        let is_waiting = self.machine.waiting_for_segment_since_us().is_some();
        gauges.commits.store(stats.commits, Ordering::Relaxed);
        let bytes = stats.committed_bytes;
        gauges.committed_bytes.store(bytes, Ordering::Relaxed);
        gauges.is_waited_for.store(is_waiting, Ordering::Relaxed);
    }

    /// A stretch of retention and of giving segments back; a longer one when space is short. True when there is
    /// nothing more to look at for now.
    pub fn reclaim(&mut self) -> bool {
        let gauges = &self.pool.gauges;
        let is_urgent =
            gauges.no_space.load(Ordering::Relaxed) || gauges.low_space.load(Ordering::Relaxed);
        let entries = if is_urgent {
            RECLAIM_ENTRIES_URGENT
        } else {
            RECLAIM_ENTRIES
        };
        let wall = SystemTime::now().duration_since(UNIX_EPOCH);
        let wall_us = wall.map_or(0, |wall| {
            u64::try_from(wall.as_micros()).unwrap_or(u64::MAX)
        });
        let now_us = self.now_us();
        self.machine.reclaim(wall_us, now_us, entries)
    }

    /// Hands a segment that leaves to the segment thread, once no read can be in it any more.
    fn give_back(&mut self) {
        let Some(leaving) = &self.leaving else { return };
        let oldest_read = self.reads_under_way.first();
        if oldest_read.is_some_and(|serial| *serial < leaving.reads_before) {
            return;
        }
        let Some(Leaving {
            segment, record, ..
        }) = self.leaving.take()
        else {
            return;
        };
        let core = self.config.core_index;
        self.reading.forget(core, segment);
        self.files.remove(&segment);
        if !self.pool.request_free(segment, record) {
            self.machine.on_free_failed();
        }
    }

    /// Counts a read until `end_read`; none when there are too many.
    pub fn begin_read(&mut self) -> Option<u64> {
        if self.reads_under_way.len() >= self.config.max_reads {
            return None;
        }
        self.next_read += 1;
        self.reads_under_way.insert(self.next_read);
        Some(self.next_read)
    }

    pub fn end_read(&mut self, serial: u64) {
        self.reads_under_way.remove(&serial);
    }

    /// How long until a timer is needed that is not armed yet.
    pub fn wanted_timer(&mut self) -> Option<Duration> {
        if self.timer_armed {
            return None;
        }
        let by_delay = self
            .delayed
            .iter()
            .map(|(due, _)| due.saturating_duration_since(Instant::now()))
            .min();
        let by_policy = if self.config.commit_max_delay_us > 0 {
            let now = self.now_us();
            self.machine
                .next_deadline_us()
                .map(|due| Duration::from_micros(due.saturating_sub(now)))
        } else {
            None
        };
        let wanted = [by_delay, by_policy].into_iter().flatten().min();
        self.timer_armed = wanted.is_some();
        wanted
    }

    pub fn on_timer(&mut self) {
        self.timer_armed = false;
    }

    fn take_results(&mut self) {
        if !self.delayed.is_empty() {
            let now = Instant::now();
            let (due, later) = std::mem::take(&mut self.delayed)
                .into_iter()
                .partition(|(due, _)| *due <= now);
            self.delayed = later;
            let due: Vec<(Instant, Done)> = due;
            for (_, done) in due {
                self.take_result(done);
            }
        }
        if !self.ring.has_completions() {
            return;
        }
        let mut done = std::mem::take(&mut self.done);
        self.ring.reap(&mut done);
        for done in done.drain(..) {
            match self.delay_of(&done.op) {
                Some(delay) => self.delayed.push((Instant::now() + delay, done)),
                None => self.take_result(done),
            }
        }
        self.done = done;
    }

    fn delay_of(&mut self, op: &Op) -> Option<Duration> {
        if self.delays.is_empty() {
            return None;
        }
        self.delays.remove(&op_key(op))
    }

    fn take_result(&mut self, done: Done) {
        let now = self.now_us();
        match done.op {
            Op::Write { action, .. } => {
                let Action::Write { id, .. } = action else {
                    return;
                };
                let result = usize::try_from(done.result).map_err(|_| -done.result);
                self.machine.on_write_done(id, &action, result, now);
            }
            Op::Flush { id, .. } => {
                let result = if done.result < 0 {
                    Err(-done.result)
                } else {
                    Ok(())
                };
                self.machine.on_flush_done(id, result, now);
            }
            Op::Read(ReadOp { draft, slot, .. }) => {
                let result = usize::try_from(done.result)
                    .map_err(|_| std::io::Error::from_raw_os_error(-done.result));
                self.read_failures += u64::from(result.is_err());
                let mut slot = slot.borrow_mut();
                slot.result = Some((draft, result));
                if let Some(waker) = slot.waker.take() {
                    waker.wake();
                }
            }
        }
    }

    fn take_pool_events(&mut self) {
        while let Some(event) = self.pool.poll_event() {
            self.heard_of_segments = true;
            match event {
                PoolEvent::Segment {
                    seq,
                    file,
                    from_reserve,
                } => {
                    self.requested = self.requested.saturating_sub(1);
                    self.files.insert(seq, Rc::new(file));
                    let ready = ReadySegment { seq };
                    if from_reserve {
                        self.machine.on_reserve_segment(ready);
                    } else {
                        self.machine.on_segment_ready(ready);
                    }
                }
                PoolEvent::NoSpace => self.on_no_space(),
                PoolEvent::Freed { seq } => {
                    self.machine.on_segment_freed(seq);
                    // One at a time is on its way: the next need not wait for the tick.
                    self.reclaim();
                }
                PoolEvent::NotFreed => self.machine.on_free_failed(),
                PoolEvent::Rewritten(rewritten) => self.rewriting.done = Some(rewritten),
                PoolEvent::NotRewritten { seq, fault } => self.on_not_rewritten(seq, fault),
                PoolEvent::Failed(reason) => self.machine.fail(reason),
            }
        }
    }

    /// Sent again every tick while a segment is wanted and cannot be made.
    fn on_no_space(&mut self) {
        self.machine.on_no_space();
        // The sweep under way may have passed what has become unneeded since.
        for _ in 0..2 {
            if !self.machine.may_give_back() || !self.reclaim() {
                break;
            }
        }
        let now = self.now_us();
        let since = self.machine.waiting_for_segment_since_us();
        if since.is_some_and(|since| now.saturating_sub(since) >= SPACE_WAIT_US) {
            self.machine.give_up_waiting_for_space();
        }
    }

    fn start_actions(&mut self) {
        let now = self.now_us();
        while let Some(action) = self.machine.poll_action(now) {
            match action {
                Action::Write { segment, .. } => self.start_write(action, segment),
                Action::Flush { id, segment } => {
                    let Some(file) = self.file_for_write(segment) else {
                        self.machine.fail(format!(
                            "segment {segment} cannot be opened again for a flush"
                        ));
                        continue;
                    };
                    let fault = self
                        .faults
                        .as_mut()
                        .and_then(|faults| faults.next(FaultOp::Flush, false));
                    self.start(Op::Flush { id, file }, fault);
                }
                Action::Free { segment, record } => {
                    self.leaving = Some(Leaving {
                        segment,
                        record,
                        reads_before: self.next_read + 1,
                    });
                }
                Action::Rewrite { plan } => self.start_rewriting(plan),
                Action::SegmentDone { segment } => {
                    // Operations under way hold their own handle.
                    if self.config.sync == SyncMethod::ODsync {
                        self.files.remove(&segment);
                    } else {
                        self.files.retain(|seq, _| *seq + 4 > segment);
                    }
                }
            }
        }
    }

    fn start_write(&mut self, action: Action, segment: u64) {
        let Action::Write { data, .. } = &action else {
            return;
        };
        let mut len = data.len();
        // A repeated write after its segment was done would find no file; writes of a segment all start
        // before the next one is entered, and retries are rare: look it up by name then.
        let Some(file) = self.file_for_write(segment) else {
            self.machine.fail(format!(
                "segment {segment} cannot be opened again for a repeated write"
            ));
            return;
        };
        let syncs = self.config.sync == SyncMethod::ODsync;
        let fault = self
            .faults
            .as_mut()
            .and_then(|faults| faults.next(FaultOp::Write, syncs));
        if let Some(FaultEffect::Short(bytes)) = fault {
            len = bytes.min(len);
        }
        self.start(Op::Write { action, file, len }, fault);
    }

    fn file_for_write(&mut self, segment: u64) -> Option<Rc<File>> {
        if let Some(file) = self.files.get(&segment) {
            return Some(Rc::clone(file));
        }
        use std::os::unix::fs::OpenOptionsExt;
        let mut flags = if self.config.direct_io {
            libc::O_DIRECT
        } else {
            0
        };
        if self.config.sync == SyncMethod::ODsync {
            flags |= libc::O_DSYNC;
        }
        let path = self
            .recovered
            .data_dir
            .layout
            .segment(self.config.core_index, segment);
        let opened = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(flags)
            .open(path);
        let file = Rc::new(opened.ok()?);
        self.files.insert(segment, Rc::clone(&file));
        Some(file)
    }

    /// Hands an operation to the kernel, or answers it at once when a fault says so.
    pub fn start(&mut self, op: Op, fault: Option<FaultEffect>) {
        match fault {
            Some(FaultEffect::Error(errno)) => self.answer_later(op, -errno),
            Some(FaultEffect::Short(0)) => self.answer_later(op, 0),
            Some(FaultEffect::DelayMs(ms)) => {
                self.delays.insert(op_key(&op), Duration::from_millis(ms));
                self.ring.push(op);
            }
            Some(FaultEffect::Short(_)) | None => self.ring.push(op),
        }
    }

    fn answer_later(&mut self, op: Op, result: i32) {
        self.delayed.push((Instant::now(), Done { op, result }));
        self.ring.ring_bell();
    }

    /// Starts a read of older data.
    pub fn start_read(&mut self, read: ReadOp) {
        let fault = self
            .faults
            .as_mut()
            .and_then(|faults| faults.next(FaultOp::Read, false));
        self.reads += 1;
        self.read_bytes += read.len as u64;
        self.start(Op::Read(read), fault);
        if let Err(error) = self.ring.submit() {
            self.machine
                .fail(format!("io_uring does not take submissions: {error}"));
        }
    }

    /// A segment of any core, open for reading.
    pub fn read_segment(&mut self, core: u16, segment: u64) -> std::io::Result<Rc<OpenSegment>> {
        self.reading.segment(&self.recovered, core, segment)
    }

    /// Memory for a read.
    pub fn read_buffer(&mut self, len: usize) -> Draft {
        self.reading.buffer(len)
    }

    fn ask_for_segments(&mut self) {
        while self.machine.ready_segments() + self.requested < SEGMENTS_AHEAD
            && self.pool.request_next()
        {
            self.requested += 1;
        }
    }

    pub fn stats(&self) -> StorageStats {
        let gauges = &self.pool.gauges;
        StorageStats {
            core: self.config.core_index,
            machine: self.machine.stats().clone(),
            queued_bytes: self.machine.queued_bytes() as u64,
            ready_segments: self.machine.ready_segments() as u64,
            spare_segments: gauges.spares.load(Ordering::Relaxed),
            segments_made: gauges.segments_made.load(Ordering::Relaxed),
            segments_allocated: gauges.segments_allocated.load(Ordering::Relaxed),
            segment_sync_failures: gauges.sync_failures.load(Ordering::Relaxed),
            segments_recycled: gauges.segments_recycled.load(Ordering::Relaxed),
            free_failures: gauges.free_failures.load(Ordering::Relaxed),
            rewrite_failures: gauges.rewrite_failures.load(Ordering::Relaxed),
            segments: self.machine.segment_count() as u64,
            segment_bytes: self.machine.segment_bytes(),
            held_bytes: self.machine.held_bytes(),
            free_bytes: gauges.free_bytes.load(Ordering::Relaxed),
            low_space: gauges.low_space.load(Ordering::Relaxed),
            no_space: gauges.no_space.load(Ordering::Relaxed),
            waiting_for_segment: self.machine.waiting_for_segment_since_us().is_some(),
            reads: self.reads,
            reads_ahead: self.reads_ahead,
            read_failures: self.read_failures,
            read_bytes: self.read_bytes,
            active_reads: self.reads_under_way.len() as u64,
            logs: self.machine.log_count() as u64,
            index_entries: self
                .machine
                .each_log()
                .map(|log| log.index.len() as u64)
                .sum(),
            failure: self.machine.failure().map(str::to_owned),
            failed_logs: self.failed_logs(),
        }
    }

    fn failed_logs(&self) -> Vec<String> {
        let all = self.machine.failure().is_some();
        let failed = self
            .machine
            .each_log()
            .filter(|log| all || log.damage.is_some());
        failed.map(|log| log.name.to_string()).collect()
    }
}

/// Identifies an operation while it is in the kernel, by the memory or file it works on.
fn op_key(op: &Op) -> usize {
    match op {
        Op::Write {
            action: Action::Write { data, .. },
            ..
        } => data.as_ptr() as usize,
        Op::Write { .. } => 0,
        Op::Flush { file, .. } => Rc::as_ptr(file) as usize,
        Op::Read(read) => Rc::as_ptr(&read.slot) as usize,
    }
}
