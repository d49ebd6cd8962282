//! The same recovery over segments held in memory, for tests and fuzzing: scan, settle, read.

use std::collections::BTreeMap;

use bytes::Bytes;

use super::scan::{scan_core, CoreScan, ScanOptions, Since};
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
        // Nothing says which start was the last.
        since: Since::epoch(u64::MAX),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::group::GROUP_MAGIC;
    use crate::format::segment::SegmentHeader;
    use crate::machine::{Action, CommitMachine, LogSeed, MachineConfig, ReadySegment};
    use crate::{LogKind, LogName};

    const UUID: DataUuid = [7; 16];
    const SEGMENT_BYTES: u64 = 16 * 1024;
    const CORES: u16 = 2;

    /// Fills segments of a core with groups of one record of 5000 bytes, one to a turn.
    fn write(images: &mut Images, core: u16, epoch: u64, log: &LogName, groups: u8) {
        let mut machine = CommitMachine::new(MachineConfig {
            uuid: UUID,
            core,
            boot_epoch: epoch,
            segment_bytes: SEGMENT_BYTES,
            commit_max_bytes: 8 * 1024,
            early_commit_bytes: usize::MAX,
            commit_max_delay_us: 0,
            commits_in_flight: 1,
            max_transfer_bytes: 1 << 20,
            max_queued_bytes: 1 << 20,
            recent_bytes: 0,
            flush_after_write: false,
            next_group: 1,
            log_end: (0, 0),
        });
        let log = machine.add_log(log, LogSeed::default()).expect("a new log");
        let mut next_segment = 1;
        for group in 1..=groups {
            let payload = [group; 5000];
            let payloads = [&payload[..]].into_iter();
            let appended = machine.append(log, 1, 1, 0, payloads, 0);
            assert!(appended.is_ok());
            if machine.ready_segments() == 0 {
                images.insert((core, next_segment), blank(core, epoch, next_segment));
                machine.on_segment_ready(ReadySegment { seq: next_segment });
                next_segment += 1;
            }
            while let Some(action) = machine.poll_action(0) {
                if let Action::Write {
                    id,
                    segment,
                    position,
                    data,
                } = &action
                {
                    let image = images.get_mut(&(core, *segment)).expect("it was made");
                    let at = *position as usize;
                    image[at..at + data.len()].copy_from_slice(data.as_ref());
                    machine.on_write_done(*id, &action, Ok(data.len()), 0);
                }
            }
            while machine.poll_completion().is_some() {}
        }
    }

    fn blank(core: u16, boot_epoch: u64, seq: u64) -> Vec<u8> {
        let header = SegmentHeader {
            uuid: UUID,
            core,
            core_count: CORES,
            seq,
            boot_epoch,
            segment_bytes: SEGMENT_BYTES,
            rewritten: None,
        };
        let mut image = header.encode();
        image.resize(SEGMENT_BYTES as usize, 0);
        image
    }

    fn log_of(core: u16) -> LogName {
        LogName {
            kind: LogKind::Stream,
            tenant: "t".into(),
            namespace: "n".into(),
            name: "s".into(),
            shard: u32::from(core),
        }
    }

    /// Only a segment that goes with a cut knows how many cores there were when a log last wrote.
    #[test]
    fn a_segment_that_is_removed_tells_nothing_that_the_next_start_would_not_know() {
        let mut images = Images::new();
        write(&mut images, 0, 1, &log_of(0), 2);
        write(&mut images, 1, 2, &log_of(1), 1);
        let of_log = |images: &mut Images| {
            let found = recover_images(&UUID, images).expect("a known version");
            let id = log_of(0).id().0;
            let log = found.logs().into_iter().find(|log| log.id == id);
            (found.report, log.expect("it has a record"))
        };
        assert_eq!(of_log(&mut images.clone()).1.damage, None);

        // The header of its first segment is lost, and the group in its second one is unfinished.
        images.get_mut(&(0, 1)).expect("made")[..4096].fill(0);
        images.get_mut(&(0, 2)).expect("made")[8192..].fill(0);
        // On the other core something is lost later, of which nothing says whose it was.
        let other = images.get_mut(&(1, 1)).expect("made");
        other[12288..].fill(1);
        other[12288..12296].copy_from_slice(&GROUP_MAGIC.to_le_bytes());

        let (report, first) = of_log(&mut images);
        assert_eq!((report.damages.len(), report.cuts.len()), (1, 1));
        assert!(!images.contains_key(&(0, 2)));
        let (again, second) = of_log(&mut images);
        assert_eq!(first, second, "{report:?}, then {again:?}");
        assert!(first.damage.is_some());
        assert_eq!(report.counts.segments, again.counts.segments);
    }
}
