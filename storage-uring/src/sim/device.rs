//! The model device under the real commit machine.
//!
//! Synchronous and in memory. A write that was started and not finished survives a power cut in any subset of
//! its 512-byte sectors; without O_DSYNC that also holds for finished writes no flush covers.
//!
//! It knows no directory and no file names, and makes segments as fast as they are asked for.

use std::collections::{BTreeMap, VecDeque};

use super::recovered::{Images, Recovered, FREED};
use super::violation::holds;
use super::{name, SEGMENT_BYTES, UUID};
use crate::format::segment::SegmentHeader;
use crate::format::SECTOR;
use crate::machine::{
    Action, CommitMachine, Completion, IoId, LogRef, LogSeed, MachineConfig, ReadySegment,
};
use crate::recovery::images::rewrite_image;
use crate::rewrite::{RewriteFault, RewritePlan};

/// A write or flush the device has.
#[derive(Debug)]
pub struct Pending {
    /// What it was asked to do.
    pub action: Action,
    /// Stored, but no flush has covered it yet.
    pub written: bool,
}

/// What is known of one log.
#[derive(Debug, Clone, Default)]
pub struct Shadow {
    /// Payloads by offset, as appended.
    pub submitted: Vec<Vec<u8>>,
    /// One past the last record that was acknowledged.
    pub acknowledged: u64,
}

/// The machine over the model device.
pub struct Sim {
    /// The machine of the core.
    pub machine: CommitMachine,
    /// What the device holds for good.
    pub durable: Images,
    /// What it was asked to do and has not done, oldest first.
    pub pending: Vec<Pending>,
    /// What is known of each log.
    pub shadows: BTreeMap<u32, Shadow>,
    /// Logs that are open, by shard.
    pub logs: BTreeMap<u32, LogRef>,
    /// Outcomes nobody has looked at.
    pub completions: Vec<Completion>,
    /// Whether the machine gets segments when it has too few.
    pub give_segments: bool,
    /// Whether outcomes go into the shadows here; otherwise the caller takes them from `completions`.
    pub keeps_shadows: bool,
    /// Sequence of the next segment.
    pub next_segment: u64,
    /// Segments on their way out, each with the record that names it.
    pub leaving: VecDeque<(u64, Vec<u8>)>,
    /// Segments to be rewritten.
    pub rewriting: VecDeque<Box<RewritePlan>>,
    epoch: u64,
    flush: bool,
    /// Time; it goes on by a little with each operation that finishes.
    pub now_us: u64,
}

/// How the machine writes.
#[derive(Debug, Clone, Copy)]
pub struct SimOptions {
    /// Whether a write needs a flush to be durable.
    pub flush: bool,
    /// Groups on their way at once.
    pub commits_in_flight: usize,
    /// Largest single write.
    pub max_transfer_bytes: usize,
}

impl Default for SimOptions {
    fn default() -> Self {
        Self {
            flush: false,
            commits_in_flight: 2,
            max_transfer_bytes: 8192,
        }
    }
}

impl Sim {
    /// Starts over an empty directory.
    pub fn new(options: SimOptions) -> Self {
        Self::start(options, Recovered::empty(), 1)
    }

    /// Starts over what a recovery left.
    pub fn start(options: SimOptions, recovered: Recovered, epoch: u64) -> Self {
        let machine = CommitMachine::new(MachineConfig {
            uuid: UUID,
            core: 0,
            boot_epoch: epoch,
            segment_bytes: SEGMENT_BYTES,
            commit_max_bytes: 16 * 1024,
            early_commit_bytes: usize::MAX,
            commit_max_delay_us: 0,
            commits_in_flight: options.commits_in_flight,
            max_transfer_bytes: options.max_transfer_bytes,
            max_queued_bytes: 1 << 20,
            recent_bytes: 64 * 1024,
            flush_after_write: options.flush,
            next_group: recovered.next_group,
            log_end: recovered.end,
        });
        let mut sim = Self {
            machine,
            durable: recovered.images,
            pending: Vec::new(),
            shadows: BTreeMap::new(),
            logs: BTreeMap::new(),
            completions: Vec::new(),
            give_segments: true,
            keeps_shadows: true,
            next_segment: recovered.next_segment,
            leaving: VecDeque::new(),
            rewriting: VecDeque::new(),
            epoch,
            flush: options.flush,
            now_us: 0,
        };
        // Few, so that what happens between two steps is met.
        sim.machine.step_entries = 2;
        sim.machine
            .adopt_segments(recovered.segments, recovered.freed);
        for (shard, (seed, records)) in recovered.logs {
            let shadow = Shadow {
                acknowledged: seed.tail,
                submitted: records,
            };
            sim.shadows.insert(shard, shadow);
            let log = sim.machine.add_log(&name(shard), seed).expect("a new log");
            sim.logs.insert(shard, log);
        }
        sim
    }

    /// The log of a shard, opened if it is not yet.
    pub fn log(&mut self, shard: u32) -> LogRef {
        if let Some(log) = self.logs.get(&shard) {
            return *log;
        }
        let log = self
            .machine
            .add_log(&name(shard), LogSeed::default())
            .expect("a new log");
        self.logs.insert(shard, log);
        log
    }

    /// Appends one batch and remembers it.
    pub fn append(&mut self, shard: u32, payloads: &[Vec<u8>]) {
        let log = self.log(shard);
        let token = u64::from(shard);
        let range = self
            .machine
            .append(
                log,
                1,
                7,
                self.now_us,
                payloads.iter().map(Vec::as_slice),
                token,
            )
            .expect("is taken");
        let shadow = self.shadows.entry(shard).or_default();
        let tail = shadow.submitted.len() as u64;
        holds!(1, range.start == tail, "{range:?} is given after {tail}");
        shadow.submitted.extend_from_slice(payloads);
    }

    /// Starts what can be started.
    pub fn pump(&mut self) {
        loop {
            while self.give_segments && self.machine.ready_segments() < 2 {
                let seq = self.next_segment;
                self.next_segment += 1;
                self.durable.insert(seq, blank_segment(seq, self.epoch));
                self.machine.on_segment_ready(ReadySegment { seq });
            }
            match self.machine.poll_action(self.now_us) {
                Some(Action::SegmentDone { .. }) => {}
                Some(Action::Free { segment, record }) => self.leaving.push_back((segment, record)),
                Some(Action::Rewrite { plan }) => self.rewriting.push_back(plan),
                Some(action) => self.pending.push(Pending {
                    action,
                    written: false,
                }),
                None => break,
            }
        }
    }

    /// Finishes one pending operation.
    pub fn finish(&mut self, at: usize) {
        self.now_us += 10;
        if let Action::Write { .. } = &self.pending[at].action {
            if self.flush {
                self.pending[at].written = true;
                let Action::Write { id, data, .. } = &self.pending[at].action else {
                    return;
                };
                let (id, len) = (*id, data.len());
                self.machine
                    .on_write_done(id, &self.pending[at].action, Ok(len), self.now_us);
            } else {
                let Pending { action, .. } = self.pending.remove(at);
                self.store(&action);
                let Action::Write { id, data, .. } = &action else {
                    return;
                };
                self.machine
                    .on_write_done(*id, &action, Ok(data.len()), self.now_us);
            }
        } else {
            let Pending { action, .. } = self.pending.remove(at);
            let Action::Flush { id, segment } = action else {
                return;
            };
            let (covered, rest) = std::mem::take(&mut self.pending)
                .into_iter()
                .partition::<Vec<_>, _>(|pending| {
                    pending.written && segment_of(&pending.action) == segment
                });
            self.pending = rest;
            for pending in covered {
                self.store(&pending.action);
            }
            self.machine.on_flush_done(id, Ok(()), self.now_us);
        }
        self.collect();
    }

    /// Carries out the rewriting that waits, and those that follow without another sweep.
    pub fn rewrite_waiting(&mut self) -> u64 {
        let mut done = 0;
        while let Some(is_done) = self.rewrite_next() {
            done += u64::from(is_done);
        }
        done
    }

    /// Carries out the rewriting that waits longest, if any; whether the new file was worth it. The old one has
    /// been replaced, durably, before the machine hears of it.
    pub fn rewrite_next(&mut self) -> Option<bool> {
        let plan = self.rewriting.pop_front()?;
        let rewritten = rewrite_image(&UUID, 0, &self.durable[&plan.segment], &plan);
        let is_done = rewritten.is_ok();
        match rewritten {
            Ok((file, totals)) => {
                self.leave_behind(plan.segment);
                self.durable.insert(plan.segment, file);
                self.machine.on_segment_rewritten(plan.segment, &totals);
            }
            Err(fault) => {
                let is_whole = fault == RewriteFault::NotWorth;
                holds!(4, is_whole, "segment {}: {fault:?}", plan.segment);
                self.machine.on_rewrite_failed(plan.segment, Some(fault));
            }
        }
        self.pump();
        Some(is_done)
    }

    /// Gives back the segment on its way out, if there is one: its record is durable before its file goes.
    pub fn free_next(&mut self) -> Option<u64> {
        let (segment, record) = self.leaving.pop_front()?;
        self.leave_behind(segment);
        self.durable.insert(FREED, record);
        self.durable.remove(&segment);
        self.machine.on_segment_freed(segment);
        self.pump();
        Some(segment)
    }

    /// The file of a segment goes, and with it what no flush will cover any more: writes of groups undone.
    fn leave_behind(&mut self, segment: u64) {
        let is_of = |pending: &Pending| segment_of(&pending.action) == segment;
        let in_use = (self.pending.iter()).any(|pending| is_of(pending) && !pending.written);
        holds!(4, !in_use, "segment {segment} goes while it is written to");
        self.pending.retain(|pending| !is_of(pending));
    }

    /// What is left when the power goes while a segment is given back: it is named in the record, its bytes are
    /// gone, or its file is, by `steps` of that.
    pub fn freeing(&self, segment: u64, record: &[u8], steps: u64) -> Images {
        let mut images = self.durable.clone();
        images.insert(FREED, record.to_vec());
        match steps {
            0 => {}
            1 => {
                if let Some(image) = images.get_mut(&segment) {
                    image.fill(0);
                }
            }
            _ => {
                images.remove(&segment);
            }
        }
        images
    }

    /// Operations that can finish.
    pub fn finishable(&self) -> Vec<usize> {
        (0..self.pending.len())
            .filter(|at| !self.pending[*at].written)
            .collect()
    }

    /// Runs until nothing is pending.
    pub fn settle(&mut self) {
        loop {
            self.pump();
            match self.finishable().first() {
                Some(at) => self.finish(*at),
                None => break,
            }
        }
    }

    /// Takes the outcomes there are.
    pub fn collect(&mut self) {
        while let Some(done) = self.machine.poll_completion() {
            let shard = done.token as u32;
            if self.keeps_shadows && done.result.is_ok() && !done.range.is_empty() {
                if let Some(shadow) = self.shadows.get_mut(&shard) {
                    let acked = shadow.acknowledged;
                    holds!(26, done.range.start == acked, "{done:?} after {acked}");
                    shadow.acknowledged = done.range.end;
                }
            }
            self.completions.push(done);
        }
    }

    /// The bytes of a write are on the medium.
    pub fn store(&mut self, action: &Action) {
        let Action::Write {
            segment,
            position,
            data,
            ..
        } = action
        else {
            return;
        };
        store_bytes(&mut self.durable, *segment, *position, data.as_ref());
    }

    /// What a power cut leaves when `survives` decides for every sector of every unfinished write.
    pub fn cut_power(&self, mut survives: impl FnMut(usize, usize) -> bool) -> Images {
        let mut images = self.durable.clone();
        for (at, pending) in self.pending.iter().enumerate() {
            let Action::Write {
                segment,
                position,
                data,
                ..
            } = &pending.action
            else {
                continue;
            };
            for (i, sector) in data.as_ref().chunks(SECTOR).enumerate() {
                if survives(at, i) {
                    store_bytes(
                        &mut images,
                        *segment,
                        position + (i * SECTOR) as u64,
                        sector,
                    );
                }
            }
        }
        images
    }
}

pub(crate) fn segment_of(action: &Action) -> u64 {
    match action {
        Action::Write { segment, .. }
        | Action::Flush { segment, .. }
        | Action::SegmentDone { segment }
        | Action::Free { segment, .. } => *segment,
        Action::Rewrite { plan } => plan.segment,
    }
}

pub(crate) fn store_bytes(images: &mut Images, segment: u64, position: u64, bytes: &[u8]) {
    let image = images.get_mut(&segment).expect("the segment exists");
    let at = position as usize;
    image[at..at + bytes.len()].copy_from_slice(bytes);
}

pub(crate) fn blank_segment(seq: u64, epoch: u64) -> Vec<u8> {
    let header = SegmentHeader {
        uuid: UUID,
        core: 0,
        core_count: 1,
        seq,
        boot_epoch: epoch,
        segment_bytes: SEGMENT_BYTES,
        rewritten: None,
    };
    let mut image = header.encode();
    image.resize(SEGMENT_BYTES as usize, 0);
    image
}

/// The id of a write, for feeding results by hand.
pub fn write_id(action: &Action) -> IoId {
    match action {
        Action::Write { id, .. } | Action::Flush { id, .. } => *id,
        Action::SegmentDone { .. } | Action::Free { .. } | Action::Rewrite { .. } => {
            panic!("no id")
        }
    }
}
