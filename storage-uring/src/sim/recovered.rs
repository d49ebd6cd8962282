//! The real recovery over images, and reads through what it found.

use std::collections::{BTreeMap, HashMap};

use super::violation::holds;
use super::{name, Rng, SEGMENT_BYTES, UUID};
use crate::error::ReadError;
use crate::format::freed::FreedRuns;
use crate::format::rewritten::FrameHeader;
use crate::format::segment::SegmentHeader;
use crate::format::ALIGN;
use crate::index::Interval;
use crate::machine::{LogSeed, ReadBatch};
use crate::name::LogName;
use crate::recovery::count_held;
use crate::recovery::events::assemble;
use crate::recovery::images::read_image;
use crate::recovery::scan::{scan_core, CoreScan, ScanOptions, Since};
use crate::recovery::settle::{self, SettleStep};
use crate::recovery::{ImageSource, RecoveryProgress, SegmentInput};
use crate::rewrite::{FrameTable, RewrittenMap};
use crate::usage::SegmentTable;
use crate::walk::{ReadWalk, WalkStep};

/// Segment images by sequence.
pub type Images = BTreeMap<u64, Vec<u8>>;

/// Recovered logs with all their records read back.
pub struct Recovered {
    /// The images as recovery left them.
    pub images: Images,
    /// By shard: what is known of the log, and its records from the base on.
    pub logs: BTreeMap<u32, (LogSeed, Vec<Vec<u8>>)>,
    /// Segment and position where the core log ends.
    pub end: (u64, u64),
    /// Number of the next group.
    pub next_group: u64,
    /// Sequence of the next segment.
    pub next_segment: u64,
    /// How many times something was cut off as not written.
    pub cuts: usize,
    /// What recovery had to say.
    pub notes: String,
    /// How many places were damaged.
    pub damages: usize,
    /// What recovery did to the files.
    pub steps: Vec<SettleStep>,
    /// What the segments are good for.
    pub segments: SegmentTable,
    /// Segments given back.
    pub freed: FreedRuns,
    /// What a start notes beside the segments.
    pub shortened: Vec<u64>,
}

impl Recovered {
    /// Nothing: an empty directory.
    pub fn empty() -> Self {
        Self {
            images: Images::new(),
            logs: BTreeMap::new(),
            end: (0, 0),
            next_group: 1,
            next_segment: 1,
            cuts: 0,
            notes: String::new(),
            damages: 0,
            steps: Vec::new(),
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
pub(crate) fn scan_since(images: &Images, since: Since<'_>) -> CoreScan {
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

pub(crate) fn settle_step(images: &mut Images, step: SettleStep) {
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

/// What a recovery leaves of these images whose power is cut after some of its steps: removals since the last
/// sync of the directory survive or not, each for itself.
pub(crate) fn interrupted(mut images: Images, steps: &[SettleStep], rng: &mut Rng) -> Images {
    let done = rng.below(steps.len() as u64 + 1) as usize;
    let synced = steps[..done]
        .iter()
        .rposition(|step| *step == SettleStep::SyncDirectory)
        .map_or(0, |at| at + 1);
    for (at, step) in steps[..done].iter().enumerate() {
        let is_durable = at < synced || matches!(step, SettleStep::Shorten { .. });
        if is_durable || rng.below(2) == 0 {
            settle_step(&mut images, *step);
        }
    }
    images
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
    for step in &steps {
        settle_step(&mut images, *step);
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
        steps,
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
                let is_damaged = seed.damage.is_some();
                holds!(
                    5,
                    is_damaged,
                    "{log} is whole and not read at {from}: {error}"
                );
                return all;
            }
        };
        let first = batch.first_offset;
        holds!(1, first == from, "{log} reads {first} at {from}");
        if batch.records.is_empty() {
            let is_damaged = seed.damage.is_some();
            holds!(
                1,
                is_damaged,
                "{log} has nothing at {from} of {}",
                seed.tail
            );
            return all;
        }
        all.extend(batch.records.iter().map(|record| record.to_vec()));
        from = batch.next_offset;
    }
    all
}
