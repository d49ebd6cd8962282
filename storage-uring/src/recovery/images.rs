//! The same recovery over segments held in memory, for tests and fuzzing: scan, settle, read.

use std::collections::BTreeMap;

use bytes::Bytes;

use super::scan::{scan_core, CoreScan, ScanOptions};
use super::settle::{self, SettleStep};
use super::Window;
use super::{maps_of, put_together, Logs, PutTogether, RewrittenMaps};
use super::{ImageSource, RecoveryProgress, RecoveryReport, SegmentInput};
use crate::error::{ReadError, StorageError};
use crate::format::freed::FreedRuns;
use crate::format::DataUuid;
use crate::machine::ReadBatch;
use crate::name::LogId;
use crate::rewrite::{read_back, RewriteFault, RewritePlan, RewriteTotals, Rewriter, RewrittenMap};
use crate::walk::{ReadWalk, WalkStep, WantedRead};

/// Segment files by core directory and sequence.
pub type Images = BTreeMap<(u16, u64), Vec<u8>>;

/// A log that was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageLog {
    /// Its id.
    pub id: u64,
    /// First offset held.
    pub base: u64,
    /// One past the last record.
    pub tail: u64,
    /// Why it is refused, if it is.
    pub damage: Option<String>,
}

/// What a recovery found.
pub struct ImageRecovery {
    /// As for files.
    pub report: RecoveryReport,
    logs: Logs,
    maps: RewrittenMaps,
}

/// Recovers `images` and changes them as a start changes its files.
///
/// # Errors
/// When a header of an unknown version is found.
pub fn recover_images(uuid: &DataUuid, images: &mut Images) -> Result<ImageRecovery, StorageError> {
    let progress = RecoveryProgress::default();
    let options = ScanOptions {
        in_use: false,
        progress: &progress,
    };
    let mut cores: Vec<u16> = images.keys().map(|(core, _)| *core).collect();
    cores.dedup();
    let mut scans = Vec::new();
    for core in cores {
        let inputs = images.range((core, 0)..=(core, u64::MAX));
        let inputs = inputs.map(|((_, seq), image)| SegmentInput {
            seq: *seq,
            file: format!("{core}/{seq}").into(),
            source: Box::new(ImageSource(image.clone())),
        });
        scans.push(scan_core(
            uuid,
            core,
            inputs.collect(),
            FreedRuns::default(),
            options,
        )?);
    }
    for scan in &scans {
        settle_images(images, scan);
    }
    let maps = maps_of(&scans);
    let PutTogether { report, logs, .. } = put_together(0, scans);
    Ok(ImageRecovery { report, logs, maps })
}

fn settle_images(images: &mut Images, scan: &CoreScan) {
    for step in settle::steps(scan) {
        match step {
            SettleStep::SetAside { segment } | SettleStep::Remove { segment } => {
                images.remove(&(scan.core, segment));
            }
            SettleStep::Shorten { segment, bytes } => {
                if let Some(image) = images.get_mut(&(scan.core, segment)) {
                    image.truncate(usize::try_from(bytes).unwrap_or(usize::MAX));
                }
            }
            SettleStep::SyncDirectory => {}
        }
    }
}

impl ImageRecovery {
    /// All logs, by id.
    pub fn logs(&self) -> Vec<ImageLog> {
        let view = |(id, (_, seed)): (&LogId, &(_, crate::machine::LogSeed))| ImageLog {
            id: id.0,
            base: seed.base,
            tail: seed.tail,
            damage: seed.damage.as_ref().map(|damage| damage.to_string()),
        };
        let mut logs: Vec<ImageLog> = self.logs.iter().map(view).collect();
        logs.sort_by_key(|log| log.id);
        logs
    }

    /// Records of a log from `from` on, as a reader of a broker would get them if the log were not refused.
    ///
    /// # Errors
    /// When what the index points at is not readable.
    pub fn read(
        &self,
        images: &Images,
        id: u64,
        from: u64,
        max_bytes: usize,
    ) -> Result<ReadBatch, ReadError> {
        let nothing = ReadBatch {
            first_offset: from,
            records: Vec::new(),
            next_offset: from,
        };
        let Some((_, seed)) = self.logs.get(&LogId(id)) else {
            return Ok(nothing);
        };
        if !(seed.base..seed.tail).contains(&from) {
            return Ok(nothing);
        }
        let Some(interval) = seed.index.interval(from, seed.tail) else {
            return Ok(nothing);
        };
        let mut walk = ReadWalk::new(LogId(id), from, max_bytes, interval);
        let mut input = None;
        loop {
            match walk.step(input.take())? {
                WalkStep::Done(batch) => return Ok(batch),
                WalkStep::Read(wanted) => {
                    let image = images.get(&(wanted.core, wanted.segment));
                    let image = image.map_or(&[][..], Vec::as_slice);
                    let map = self.maps.get(&(wanted.core, wanted.segment));
                    let bytes = read_image(image, map.map(AsRef::as_ref), wanted);
                    input = Some((wanted, bytes));
                }
            }
        }
    }
}

/// The file of a segment rewritten by a plan, from the one it has.
///
/// # Errors
/// When it is not what the plan says, or too much of it is kept.
pub fn rewrite_image(
    uuid: &DataUuid,
    core: u16,
    image: &[u8],
    plan: &RewritePlan,
) -> Result<(Vec<u8>, RewriteTotals), RewriteFault> {
    let window = |image: &[u8]| Window::new(Box::new(ImageSource(image.to_vec())));
    let mut source = window(image);
    let mut rewriter = Rewriter::new(*uuid, core, plan.clone(), &mut source)?;
    let mut file = rewriter.first_block();
    while rewriter.step(&mut source)? > 0 {
        for frame in rewriter.take_frames() {
            file.extend(frame);
        }
    }
    let totals = rewriter.into_totals();
    let found = read_back(*uuid, plan, &mut window(&file));
    match found.is_some_and(|(_, found)| found == totals) {
        true => Ok((file, totals)),
        false => Err(RewriteFault::Source("the new file does not read back")),
    }
}

/// What a read of a segment gives whose file is `image`.
pub(crate) fn read_image(image: &[u8], map: Option<&RewrittenMap>, wanted: WantedRead) -> Bytes {
    let clamp = |at: u64| usize::try_from(at).unwrap_or(usize::MAX).min(image.len());
    let Some(map) = map else {
        let start = clamp(wanted.position);
        let end = clamp(wanted.position.saturating_add(wanted.len));
        return Bytes::copy_from_slice(&image[start..end]);
    };
    let range = map.file_range(wanted.position, wanted.len);
    let bytes = &image[clamp(range.start)..clamp(range.end)];
    Bytes::from(map.gather(bytes, wanted.position, wanted.len))
}
