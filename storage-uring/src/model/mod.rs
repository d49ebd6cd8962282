//! A model device under the real commit machine, and the tests that cut its power or damage its bytes.
//!
//! The device is synchronous and in memory. A write that was started and not finished survives a power cut
//! in any subset of its 512-byte sectors; without O_DSYNC that also holds for finished writes no flush
//! covers. What is left is given to the real recovery.

mod against_plain;
mod anew;
mod damage;
mod damaged_copies;
mod faults;
mod forged;
mod histories;
mod log_state;
mod lost_ends;
mod plain;
mod power_cut;
mod reclaim;
mod rewriting;
mod rewritten_damage;
mod rig;
mod scattered;
mod torn_tail;
mod unreadable;
mod version1;

use std::collections::{BTreeMap, HashMap, VecDeque};

use crate::error::ReadError;
use crate::format::freed::FreedRuns;
use crate::format::rewritten::FrameHeader;
use crate::format::segment::SegmentHeader;
use crate::format::{DataUuid, ALIGN, SECTOR};
use crate::index::Interval;
use crate::machine::{
    Action, CommitMachine, Completion, IoId, LogRef, LogSeed, MachineConfig, ReadBatch,
    ReadySegment,
};
use crate::name::{LogKind, LogName};
use crate::recovery::count_held;
use crate::recovery::events::assemble;
use crate::recovery::images::{read_image, rewrite_image};
use crate::recovery::scan::{scan_core, CoreScan, ScanOptions, Since};
use crate::recovery::settle::{self, SettleStep};
use crate::recovery::{ImageSource, RecoveryProgress, SegmentInput};
use crate::rewrite::{FrameTable, RewriteFault, RewritePlan, RewrittenMap};
use crate::usage::SegmentTable;
use crate::walk::{ReadWalk, WalkStep};

pub const UUID: DataUuid = [0x17; 16];
pub const SEGMENT_BYTES: u64 = 64 * 1024;

/// A small deterministic generator (splitmix64).
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }
}

pub fn name(shard: u32) -> LogName {
    LogName {
        kind: LogKind::Stream,
        tenant: "t".into(),
        namespace: "n".into(),
        name: "s".into(),
        shard,
    }
}

/// Segment images by sequence.
pub type Images = BTreeMap<u64, Vec<u8>>;

/// A write or flush the device has.
#[derive(Debug)]
pub struct Pending {
    pub action: Action,
    /// Stored, but no flush has covered it yet.
    pub written: bool,
}

/// What is known of one log.
#[derive(Debug, Clone, Default)]
pub struct Shadow {
    /// Payloads by offset, as appended.
    pub submitted: Vec<Vec<u8>>,
    pub acknowledged: u64,
}

/// The machine over the model device.
pub struct Sim {
    pub machine: CommitMachine,
    pub durable: Images,
    pub pending: Vec<Pending>,
    pub shadows: BTreeMap<u32, Shadow>,
    pub logs: BTreeMap<u32, LogRef>,
    pub completions: Vec<Completion>,
    pub give_segments: bool,
    /// Whether outcomes go into the shadows here; otherwise the caller takes them from `completions`.
    pub keeps_shadows: bool,
    pub next_segment: u64,
    /// Segments on their way out, each with the record that names it.
    pub leaving: VecDeque<(u64, Vec<u8>)>,
    /// Segments to be rewritten.
    pub rewriting: VecDeque<Box<RewritePlan>>,
    epoch: u64,
    flush: bool,
    pub now_us: u64,
}

#[derive(Debug, Clone, Copy)]
pub struct SimOptions {
    pub flush: bool,
    pub commits_in_flight: usize,
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
        assert_eq!(
            range.start,
            shadow.submitted.len() as u64,
            "offsets are dense"
        );
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

    /// Carries out the rewriting that waits, and those that follow without another sweep. The old file has been
    /// replaced, durably, before the machine hears of it.
    pub fn rewrite_waiting(&mut self) -> u64 {
        let mut done = 0;
        while let Some(plan) = self.rewriting.pop_front() {
            let rewritten = rewrite_image(&UUID, 0, &self.durable[&plan.segment], &plan);
            match rewritten {
                Ok((file, totals)) => {
                    self.durable.insert(plan.segment, file);
                    self.machine.on_segment_rewritten(plan.segment, &totals);
                    done += 1;
                }
                Err(fault) => {
                    assert_eq!(fault, RewriteFault::NotWorth);
                    self.machine.on_rewrite_failed(plan.segment, Some(fault));
                }
            }
            self.pump();
        }
        done
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

    pub fn collect(&mut self) {
        while let Some(done) = self.machine.poll_completion() {
            let shard = done.token as u32;
            if self.keeps_shadows && done.result.is_ok() && !done.range.is_empty() {
                if let Some(shadow) = self.shadows.get_mut(&shard) {
                    assert_eq!(done.range.start, shadow.acknowledged, "outcomes in order");
                    shadow.acknowledged = done.range.end;
                }
            }
            self.completions.push(done);
        }
    }

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

fn segment_of(action: &Action) -> u64 {
    match action {
        Action::Write { segment, .. }
        | Action::Flush { segment, .. }
        | Action::SegmentDone { segment }
        | Action::Free { segment, .. } => *segment,
        Action::Rewrite { plan } => plan.segment,
    }
}

fn store_bytes(images: &mut Images, segment: u64, position: u64, bytes: &[u8]) {
    let image = images.get_mut(&segment).expect("the segment exists");
    let at = position as usize;
    image[at..at + bytes.len()].copy_from_slice(bytes);
}

fn blank_segment(seq: u64, epoch: u64) -> Vec<u8> {
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

/// Recovered logs with all their records read back.
pub struct Recovered {
    pub images: Images,
    pub logs: BTreeMap<u32, (LogSeed, Vec<Vec<u8>>)>,
    pub end: (u64, u64),
    pub next_group: u64,
    pub next_segment: u64,
    pub cuts: usize,
    pub notes: String,
    pub damages: usize,
    pub segments: SegmentTable,
    pub freed: FreedRuns,
    /// What a start notes beside the segments.
    pub shortened: Vec<u64>,
}

impl Recovered {
    fn empty() -> Self {
        Self {
            images: Images::new(),
            logs: BTreeMap::new(),
            end: (0, 0),
            next_group: 1,
            next_segment: 1,
            cuts: 0,
            notes: String::new(),
            damages: 0,
            segments: SegmentTable::default(),
            freed: FreedRuns::default(),
            shortened: Vec::new(),
        }
    }
}

/// Key of the record of freed segments among the images.
pub const FREED: u64 = 0;

/// No start is known to have been the last: any segment may have been shortened by one that died.
pub const UNKNOWN_EPOCH: u64 = u64::MAX;

/// Runs the real scan over images that nobody has touched since the start `last_epoch` or after it.
fn scan_since(images: &Images, since: Since<'_>) -> CoreScan {
    let freed = images.get(&FREED).map_or_else(FreedRuns::default, |bytes| {
        // A damaged record counts as none.
        FreedRuns::decode(&UUID, 0, bytes).unwrap_or_default()
    });
    let segments = images.iter().filter(|(seq, _)| **seq != FREED);
    let inputs = segments.map(|(seq, image)| SegmentInput {
        seq: *seq,
        file: format!("seg-{seq}").into(),
        source: Box::new(ImageSource(image.clone())),
    });
    let options = ScanOptions {
        in_use: false,
        since,
        progress: &RecoveryProgress::default(),
    };
    scan_core(&UUID, 0, inputs.collect(), freed, options).expect("scans")
}

fn scan(images: &Images) -> CoreScan {
    scan_since(images, Since::epoch(UNKNOWN_EPOCH))
}

fn settle_step(images: &mut Images, step: SettleStep) {
    match step {
        SettleStep::SetAside { segment } | SettleStep::Remove { segment } => {
            images.remove(&segment).expect("exists");
        }
        SettleStep::Shorten { segment, bytes } => {
            let image = images.get_mut(&segment).expect("exists");
            image.truncate(bytes as usize);
        }
        SettleStep::SyncDirectory => {}
    }
}

/// What a recovery leaves whose power is cut after some of its steps: removals since the last sync of the
/// directory survive or not, each for itself.
pub fn interrupted_recovery(images: &Images, last_epoch: u64, rng: &mut Rng) -> Images {
    let steps = settle::steps(&scan_since(images, Since::epoch(last_epoch)));
    let done = rng.below(steps.len() as u64 + 1) as usize;
    let synced = steps[..done]
        .iter()
        .rposition(|step| *step == SettleStep::SyncDirectory)
        .map_or(0, |at| at + 1);
    let mut left = images.clone();
    for (at, step) in steps[..done].iter().enumerate() {
        let is_durable = at < synced || matches!(step, SettleStep::Shorten { .. });
        if is_durable || rng.below(2) == 0 {
            settle_step(&mut left, *step);
        }
    }
    left
}

/// Runs the real scan over images, and carries out on them what it decided.
pub fn recover(images: Images) -> Recovered {
    recover_since(images, Since::epoch(UNKNOWN_EPOCH))
}

/// As [`recover`], of images of which it is known who shortened them.
pub(crate) fn recover_since(mut images: Images, since: Since<'_>) -> Recovered {
    let scan = scan_since(&images, since);
    let steps = settle::steps(&scan);
    let CoreScan {
        chapters,
        shortened,
        losses,
        cuts,
        damages,
        end,
        next_group,
        core_counts,
        uses,
        restated,
        freed,
        ..
    } = scan;
    let notes = format!("{cuts:?} {damages:?} {steps:?} end {end:?} next {next_group}");
    let notes = if std::env::var_os("FELIX_MODEL_EVENTS").is_some() {
        format!("{notes} {freed:?} {chapters:#?}")
    } else {
        notes
    };
    let newest = images.keys().last().copied().unwrap_or(0);
    for step in steps {
        settle_step(&mut images, step);
    }
    let core_counts: HashMap<u64, u16> = core_counts.into_iter().collect();
    let mut logs = BTreeMap::new();
    let mut segments = SegmentTable::new(uses.into_segments());
    let mut assembled = assemble(vec![(0, chapters)], &losses, &core_counts);
    count_held(&mut segments, &mut assembled);
    for (id, (found, mut seed)) in assembled {
        seed.restated_in = restated.get(&id).copied().unwrap_or(0);
        // Damage may take every extent that carried the name; it is opened by its id then.
        let by_id = || (0..100).map(name).find(|name| name.id() == id);
        let found = found.or_else(by_id).expect("a log of these tests");
        let records = read_all(&images, &found, &seed);
        logs.insert(found.shard, (seed, records));
    }
    Recovered {
        images,
        logs,
        end,
        next_group,
        next_segment: newest.max(end.0).max(freed.newest()) + 1,
        cuts: cuts.len(),
        notes,
        damages: damages.len(),
        segments,
        freed,
        shortened,
    }
}

/// How to read an image, if it is that of a rewritten segment (its first block may be damaged).
fn map_of_image(seq: u64, image: &[u8]) -> Option<RewrittenMap> {
    let mut table = FrameTable::default();
    let mut at = ALIGN;
    while at < image.len() {
        let frame = FrameHeader::decode(&UUID, &image[at..]);
        match frame.ok().filter(|frame| frame.seq == seq) {
            Some(frame) => {
                table.add(&frame, at as u64);
                at += frame.total_len() as usize;
            }
            None => at += ALIGN,
        }
    }
    let is_rewritten = SegmentHeader::decode(image).is_ok_and(|header| header.rewritten.is_some());
    (is_rewritten || !table.is_empty())
        .then(|| RewrittenMap::new(UUID, seq, SEGMENT_BYTES, table, image.len() as u64))
}

/// One read of a log through an index, from images.
pub fn read_images(
    images: &Images,
    log: &LogName,
    interval: Interval,
    from: u64,
    max_bytes: usize,
) -> Result<ReadBatch, ReadError> {
    let mut walk = ReadWalk::new(log.id(), from, max_bytes, interval);
    let mut input = None;
    loop {
        match walk.step(input.take())? {
            WalkStep::Done(batch) => return Ok(batch),
            WalkStep::Read(wanted) => {
                let image = images.get(&wanted.segment).map_or(&[][..], Vec::as_slice);
                assert_eq!(wanted.position as usize % ALIGN, 0);
                let map = map_of_image(wanted.segment, image);
                input = Some((wanted, read_image(image, map.as_ref(), wanted)));
            }
        }
    }
}

/// Reads a log through its index; stops at damage.
pub fn read_all(images: &Images, log: &LogName, seed: &LogSeed) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    let mut from = seed.base;
    while from < seed.tail {
        let Some(interval) = seed.index.interval(from, seed.tail) else {
            break;
        };
        let batch = match read_images(images, log, interval, from, 10_000) {
            Ok(batch) => batch,
            Err(error) => {
                assert!(seed.damage.is_some(), "an undamaged log reads: {error}");
                return all;
            }
        };
        assert_eq!(batch.first_offset, from);
        if batch.records.is_empty() {
            assert!(seed.damage.is_some(), "a read of an undamaged log moves on");
            return all;
        }
        all.extend(batch.records.iter().map(|record| record.to_vec()));
        from = batch.next_offset;
    }
    all
}

/// A count from the environment, for runs by hand that are larger than the suite's.
pub fn count(variable: &str, of_the_suite: u64) -> u64 {
    let set = std::env::var(variable).ok();
    set.map_or(of_the_suite, |text| {
        text.parse()
            .unwrap_or_else(|_| panic!("{variable} is a number"))
    })
}

/// A payload nothing else produces.
pub fn payload(rng: &mut Rng, len: usize) -> Vec<u8> {
    let mut bytes = vec![0u8; len];
    for chunk in bytes.chunks_mut(8) {
        let random = rng.next().to_le_bytes();
        chunk.copy_from_slice(&random[..chunk.len()]);
    }
    bytes
}
