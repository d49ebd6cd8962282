//! Compaction of a log whose state is in memory: what is live is appended again at the tail, then
//! the head is given up. Nothing is ever renumbered.
//!
//! ```text
//! base ............ cut ............ tail
//!  | read in order,  | copies of what was
//!  | copy what is    | live, writes that
//!  | still live      | came meanwhile
//! ```
//!
//! The cut is where the next record would be applied when compaction begins. The records below it
//! are read in order; one that is still what its key holds is appended again. When no key stands
//! below the cut any more the base is raised to it, which is one durable event. A crash before
//! that leaves copies that say what was said before; after it, a log that starts at the cut.
//!
//! What is given up must stand elsewhere for whoever may lead next: the base is raised only once
//! everything that took the place of what lies below the cut is held by those who count, which is
//! more than what lies below the cut itself. A follower may be given a new copy that begins at the
//! cut; one that could lead with it and without the copies above would have lost every key.
//!
//! Cost: a pass begins when the log takes more than [`CompactionLimits::ratio`] times what is live
//! (and more than a floor), so in the long run one byte is copied for every three written: a write
//! amplification of 4/3. The log takes at most five times what is live, and what is written while
//! the pass runs; memory, one read ([`CompactionLimits::read_bytes`]) and a batch of copies.

use std::collections::VecDeque;
use std::time::Duration;

use bytes::Bytes;

use crate::proto::MonoTime;

/// What a record takes in the log besides its own bytes.
const STORED_OVERHEAD_BYTES: u64 = 32;
/// How long a pass waits for writes that are on their way, or for a log that takes nothing.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// What a look at a record below the cut came to.
#[derive(Debug)]
pub enum Copy<S> {
    /// Not what its key holds.
    Dead,
    /// A write to the key is on its way; maybe the record is dead once it is applied.
    Busy,
    /// The copy to append.
    Staged(S),
}

impl<S> Copy<S> {
    /// The same look at another kind of copy.
    pub fn map<T>(self, to: impl FnOnce(S) -> T) -> Copy<T> {
        match self {
            Self::Dead => Copy::Dead,
            Self::Busy => Copy::Busy,
            Self::Staged(copy) => Copy::Staged(to(copy)),
        }
    }
}

/// What a log takes, and how much of it is live.
#[derive(Debug, Clone, Default)]
pub struct LogUse {
    log_bytes: u64,
    live_bytes: u64,
    cut: Option<Cut>,
}

#[derive(Debug, Clone)]
struct Cut {
    at: u64,
    /// Keys that stand below it.
    below: usize,
    /// Bytes of the log at or past it.
    bytes: u64,
}

impl LogUse {
    /// Bytes of all records, with what they take around them.
    pub fn log_bytes(&self) -> u64 {
        self.log_bytes
    }

    /// Bytes of the records that stand for a key.
    pub fn live_bytes(&self) -> u64 {
        self.live_bytes
    }

    /// Keys that stand below the cut of the compaction that runs; `None` when none does, as after
    /// the state was made anew.
    pub fn live_below_cut(&self) -> Option<usize> {
        self.cut.as_ref().map(|cut| cut.below)
    }

    /// Whether a pass would be worth it.
    pub fn wants_compaction(&self, limits: &CompactionLimits) -> bool {
        self.cut.is_none()
            && self.log_bytes > limits.floor_bytes
            && self.log_bytes > limits.ratio * self.live_bytes
    }

    pub(super) fn is_below_cut(&self, offset: u64) -> bool {
        self.cut.as_ref().is_some_and(|cut| offset < cut.at)
    }

    pub(super) fn begin(&mut self, at: u64, below: usize) {
        self.cut = Some(Cut {
            at,
            below,
            bytes: 0,
        });
    }

    pub(super) fn end(&mut self, raised: bool) {
        if let Some(cut) = self.cut.take().filter(|_| raised) {
            self.log_bytes = cut.bytes;
        }
    }

    /// A record was applied.
    pub(super) fn appended(&mut self, offset: u64, bytes: usize) {
        let bytes = bytes as u64 + STORED_OVERHEAD_BYTES;
        self.log_bytes += bytes;
        if let Some(cut) = self.cut.as_mut().filter(|cut| offset >= cut.at) {
            cut.bytes += bytes;
        }
    }

    /// A key stands in the log that did not, or stands for another value.
    pub(super) fn added(&mut self, bytes: usize) {
        self.live_bytes += bytes as u64 + STORED_OVERHEAD_BYTES;
    }

    /// A key does not stand at `offset` any more.
    pub(super) fn removed(&mut self, offset: u64, bytes: usize) {
        self.live_bytes -= bytes as u64 + STORED_OVERHEAD_BYTES;
        self.moved(offset);
    }

    /// A key that stood at `offset` stands further up.
    pub(super) fn moved(&mut self, offset: u64) {
        if let Some(cut) = self.cut.as_mut().filter(|cut| offset < cut.at) {
            cut.below -= 1;
        }
    }
}

/// When a log is compacted, and how fast.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompactionLimits {
    /// How many times what is live the log may take.
    pub ratio: u64,
    /// A log of less is left alone.
    pub floor_bytes: u64,
    /// Copies on their way at once.
    pub batch: usize,
    /// Bytes of one read.
    pub read_bytes: usize,
    /// Bytes read in a second.
    pub bytes_per_s: u64,
    /// Times the records of keys that were being written are looked at again.
    pub rounds: u32,
    /// Batches, and raises, that may fail before the pass is given up.
    pub failures: u32,
}

impl CompactionLimits {
    /// For the values of a cache.
    pub const VALUES: Self = Self {
        ratio: 4,
        floor_bytes: 1 << 20,
        batch: 64,
        read_bytes: 256 << 10,
        bytes_per_s: 64 << 20,
        rounds: 3,
        failures: 100,
    };

    /// For counters, and for what consumer groups keep.
    pub const COUNTERS: Self = Self {
        floor_bytes: 64 << 10,
        ..Self::VALUES
    };
}

/// What the pass wants done next.
#[derive(Debug)]
pub enum CompactionStep<S> {
    /// Read records from here on.
    Read { from: u64, max_bytes: usize },
    /// Append these, each reported to [`Compaction::on_written`].
    Append(Vec<S>),
    /// Ask again at this time, or when something came in.
    Wait { until: MonoTime },
    /// Something is on its way.
    Busy,
    /// Raise the base of the log to `base`, once those who may lead next hold it up to `held`.
    Raise { base: u64, held: u64 },
    /// The pass is over; with `raised` the log starts at the cut.
    Done { raised: bool },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Copying,
    Reading,
    Raising,
    Over { raised: bool },
}

/// One pass over one log.
#[derive(Debug)]
pub struct Compaction {
    limits: CompactionLimits,
    cut: u64,
    phase: Phase,
    /// The next record to read.
    scan: u64,
    /// Records read and not looked at.
    pending: VecDeque<(u64, Bytes)>,
    in_flight: usize,
    /// The first record of the batch that is on its way.
    batch_from: u64,
    has_failed: bool,
    failures: u32,
    rounds: u32,
    lowest_busy: Option<u64>,
    /// Where the log ended when no key stood below the cut any more.
    held: Option<u64>,
    resume_at: MonoTime,
}

impl Compaction {
    /// A pass over `base..cut`.
    pub fn new(limits: CompactionLimits, base: u64, cut: u64) -> Self {
        Self {
            limits,
            cut,
            phase: Phase::Copying,
            scan: base,
            pending: VecDeque::new(),
            in_flight: 0,
            batch_from: base,
            has_failed: false,
            failures: 0,
            rounds: 0,
            lowest_busy: None,
            held: None,
            resume_at: MonoTime::ZERO,
        }
    }

    /// Where the log will start.
    pub fn cut(&self) -> u64 {
        self.cut
    }

    /// What to do next. `live_below` is what the index says of keys below the cut, `applied` where
    /// its log ends, `stage` its look at one record. An index that knows of no cut is not the one
    /// the pass began with: the pass is over, and nothing is given up.
    pub fn poll<S, E>(
        &mut self,
        now: MonoTime,
        live_below: Option<usize>,
        applied: u64,
        mut stage: impl FnMut(u64, &Bytes) -> Result<Copy<S>, E>,
    ) -> Result<CompactionStep<S>, E> {
        match self.phase {
            Phase::Over { raised } => return Ok(CompactionStep::Done { raised }),
            Phase::Reading | Phase::Raising => return Ok(CompactionStep::Busy),
            Phase::Copying if self.in_flight > 0 => return Ok(CompactionStep::Busy),
            Phase::Copying => {}
        }
        let Some(live_below) = live_below else {
            return Ok(self.give_up());
        };
        if now < self.resume_at {
            let until = self.resume_at;
            return Ok(CompactionStep::Wait { until });
        }
        let mut copies = Vec::new();
        while let Some((offset, record)) = self.pending.pop_front() {
            match stage(offset, &record)? {
                Copy::Dead => continue,
                Copy::Busy => {
                    self.lowest_busy = Some(self.lowest_busy.map_or(offset, |at| at.min(offset)));
                }
                Copy::Staged(copy) => {
                    if copies.is_empty() {
                        self.batch_from = offset;
                    }
                    copies.push(copy);
                }
            }
            if copies.len() >= self.limits.batch {
                break;
            }
        }
        if !copies.is_empty() {
            self.in_flight = copies.len();
            return Ok(CompactionStep::Append(copies));
        }
        Ok(self.next_stretch(now, live_below, applied))
    }

    fn next_stretch<S>(
        &mut self,
        now: MonoTime,
        live_below: usize,
        applied: u64,
    ) -> CompactionStep<S> {
        if live_below == 0 {
            self.phase = Phase::Raising;
            let held = *self.held.get_or_insert(applied);
            return CompactionStep::Raise {
                base: self.cut,
                held,
            };
        }
        if self.scan < self.cut {
            self.phase = Phase::Reading;
            let (from, max_bytes) = (self.scan, self.limits.read_bytes);
            return CompactionStep::Read { from, max_bytes };
        }
        // The end of the log as it was: what is left stood in the way of a write.
        match self.lowest_busy.take() {
            Some(offset) if self.rounds < self.limits.rounds => {
                self.rounds += 1;
                self.scan = offset;
                self.resume_at = now + LOOK_AGAIN;
                let until = self.resume_at;
                CompactionStep::Wait { until }
            }
            Some(_) | None => self.give_up(),
        }
    }

    fn give_up<S>(&mut self) -> CompactionStep<S> {
        self.phase = Phase::Over { raised: false };
        CompactionStep::Done { raised: false }
    }

    /// What a read brought.
    pub fn on_records(&mut self, now: MonoTime, first_offset: u64, records: Vec<Bytes>) {
        if self.phase != Phase::Reading {
            return;
        }
        if records.is_empty() || first_offset != self.scan {
            return self.phase = Phase::Over { raised: false };
        }
        self.phase = Phase::Copying;
        self.scan += records.len() as u64;
        let bytes: u64 = records.iter().map(|record| record.len() as u64).sum();
        let pause_us = (bytes + STORED_OVERHEAD_BYTES * records.len() as u64) * 1_000_000
            / self.limits.bytes_per_s.max(1);
        self.resume_at = now + Duration::from_micros(pause_us);
        let below = (first_offset..self.cut).zip(records);
        self.pending.extend(below);
    }

    /// The log cannot be read: the pass is over.
    pub fn on_read_failed(&mut self) {
        self.phase = Phase::Over { raised: false };
    }

    /// What became of one copy.
    pub fn on_written(&mut self, now: MonoTime, ok: bool) {
        self.in_flight = self.in_flight.saturating_sub(1);
        self.has_failed |= !ok;
        if self.in_flight > 0 || !std::mem::take(&mut self.has_failed) {
            return;
        }
        // Nothing is lost; the stretch is gone through again, later.
        self.pending.clear();
        self.scan = self.batch_from;
        self.resume_at = now + LOOK_AGAIN;
        self.count_failure();
    }

    /// The base may not be raised yet, or was not. After as many refusals as batches may fail the
    /// pass is over: it must not keep other logs from theirs.
    pub fn on_raise_refused(&mut self, now: MonoTime) {
        self.phase = Phase::Copying;
        self.resume_at = now + LOOK_AGAIN;
        self.count_failure();
    }

    fn count_failure(&mut self) {
        self.failures += 1;
        if self.failures > self.limits.failures {
            self.phase = Phase::Over { raised: false };
        }
    }

    /// The log starts at the cut, durably.
    pub fn on_raised(&mut self) {
        self.phase = Phase::Over { raised: true };
    }
}
