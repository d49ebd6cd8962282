//! Reading a data directory without a broker: inspect, verify, dump.
//!
//! Read-only: takes no lock, changes nothing, and works on the directory of a running broker (it then sees
//! what was written when it was opened). Uses the broker's own decoders. Memory is bounded by the sparse
//! index, one interval of one log, and one group.

mod groups;
mod segment_file;

use std::collections::{HashMap, HashSet};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use serde::Serialize;

use crate::datadir::{Layout, Meta};
use crate::error::{ReadError, StorageError};
use crate::format::segment::SegmentHeader;
use crate::format::{DataUuid, ALIGN};
use crate::machine::{HistoryEntry, LogSeed, ReadBatch};
use crate::name::{LogId, LogName};
use crate::recovery::{
    scan_read_only, FileSource, RecoveryProgress, RecoveryReport, RewrittenMaps, Window,
};
use crate::walk::{ReadWalk, WalkStep, WantedRead};
use segment_file::SegmentFile;

/// Bytes of payload read at once by the iterators.
const BATCH_BYTES: usize = 256 * 1024;
/// Records between two reports of a verification's progress.
const PROGRESS_RECORDS: u64 = 4096;
/// Segment files kept open between reads.
const OPEN_FILES_MAX: usize = 64;

/// One log, as found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct OfflineLog {
    /// Its name; none when every extent that carried it is lost.
    pub name: Option<LogName>,
    /// Its id.
    pub id: u64,
    /// First offset held.
    pub base: u64,
    /// One past the last record.
    pub tail: u64,
    /// Highest generation.
    pub generation: u64,
    /// Highest accepted generation.
    pub accepted: u64,
    /// Leaderships, ascending.
    pub history: Vec<HistoryEntry>,
    /// Why a broker would refuse it.
    pub damage: Option<String>,
}

/// What reading every record of every log showed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct VerifyReport {
    /// Logs read.
    pub logs: u64,
    /// Records whose checksum matched.
    pub records: u64,
    /// Their payload bytes.
    pub payload_bytes: u64,
    /// Logs with damage, and what it is.
    pub damaged: Vec<(String, String)>,
    /// Logs of a running broker that gave segments back before they were read.
    pub given_back: Vec<String>,
}

impl VerifyReport {
    /// Whether nothing is damaged.
    pub fn is_clean(&self) -> bool {
        self.damaged.is_empty()
    }
}

/// One segment file, for `inspect`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SegmentView {
    /// The file.
    pub file: PathBuf,
    /// Core directory.
    pub core: u16,
    /// Sequence, from the name.
    pub segment: u64,
    /// Length of the file.
    pub file_bytes: u64,
    /// Boot epoch of the header; none when the header is not readable.
    pub boot_epoch: Option<u64>,
    /// Groups that were in it before it was rewritten, first and last; none when it was not.
    pub rewritten_groups: Option<(u64, u64)>,
}

/// One group, for `inspect`; of a rewritten segment a frame, with the last group of the segment as its number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GroupView {
    /// Position in the segment.
    pub position: u64,
    /// Bytes on disk.
    pub total_len: u64,
    /// Bytes in use.
    pub used_len: u64,
    /// Group number.
    pub group: u64,
    /// Highest group known durable when it was built.
    pub durable_group: u64,
    /// Boot epoch.
    pub boot_epoch: u64,
    /// Extents.
    pub extents: u32,
    /// Records.
    pub records: u32,
    /// Whether it is the closing mark of an orderly stop.
    pub closing: bool,
    /// Whether the body matches its checksum.
    pub body_matches: bool,
}

/// A data directory opened for reading.
pub struct Reader {
    layout: Layout,
    uuid: DataUuid,
    report: RecoveryReport,
    logs: HashMap<LogId, (Option<LogName>, LogSeed)>,
    maps: RewrittenMaps,
    files: HashMap<(u16, u64), SegmentFile>,
    /// Segments that were there before the scan.
    listed: HashSet<(u16, u64)>,
}

impl Reader {
    /// Scans the directory on up to `threads` threads.
    pub fn open(dir: &Path, threads: usize) -> Result<Self, StorageError> {
        Self::open_with(dir, threads, &RecoveryProgress::default())
    }

    /// As [`Reader::open`], saying in `progress` how far it is.
    pub fn open_with(
        dir: &Path,
        threads: usize,
        progress: &RecoveryProgress,
    ) -> Result<Self, StorageError> {
        let layout = Layout::new(dir);
        let mut listed = HashSet::new();
        for core in layout.cores()? {
            listed.extend(layout.segments(core)?.into_iter().map(|seq| (core, seq)));
        }
        let found = scan_read_only(&layout, threads, progress)?;
        let meta = Meta::read(&layout)?;
        Ok(Self {
            layout,
            uuid: meta.map_or([0; 16], |meta| meta.uuid),
            report: found.report,
            logs: found.logs,
            maps: found.maps,
            files: HashMap::new(),
            listed,
        })
    }

    /// What a broker's recovery would report.
    pub fn report(&self) -> &RecoveryReport {
        &self.report
    }

    /// All logs, by name.
    pub fn logs(&self) -> Vec<OfflineLog> {
        let mut logs: Vec<OfflineLog> = self.logs.iter().map(|(id, log)| view(*id, log)).collect();
        logs.sort_by(|a, b| (&a.name, a.id).cmp(&(&b.name, b.id)));
        logs
    }

    /// One log.
    pub fn log(&self, name: &LogName) -> Option<OfflineLog> {
        let id = name.id();
        self.logs.get(&id).map(|log| view(id, log))
    }

    /// Records of a log from `from` on; empty at the tail. Reads damaged logs as far as they are whole.
    pub fn read(&mut self, id: u64, from: u64, max_bytes: usize) -> Result<ReadBatch, ReadError> {
        let empty = ReadBatch {
            first_offset: from,
            records: Vec::new(),
            next_offset: from,
        };
        let Some((_, seed)) = self.logs.get(&LogId(id)) else {
            return Ok(empty);
        };
        if from < seed.base {
            return Err(ReadError::Trimmed {
                offset: from,
                base: seed.base,
            });
        }
        if from >= seed.tail {
            return Ok(empty);
        }
        let Some(interval) = seed.index.interval(from, seed.tail) else {
            return Ok(empty);
        };
        let mut walk = ReadWalk::new(LogId(id), from, max_bytes, interval);
        let mut input = None;
        let given_back = ReadError::Trimmed {
            offset: from,
            base: from.saturating_add(1),
        };
        loop {
            let step = match walk.step(input.take()) {
                // A running broker has rewritten the segment without it since the directory was scanned.
                Err(ReadError::Damaged { core, segment, .. }) if self.is_newer(core, segment) => {
                    return Err(given_back);
                }
                other => other?,
            };
            match step {
                WalkStep::Done(batch) => return Ok(batch),
                WalkStep::Read(wanted) => match self.fetch(wanted) {
                    Ok(bytes) => input = Some((wanted, bytes)),
                    Err(error) if error.kind() == ErrorKind::NotFound => {
                        return Err(self.why_gone(wanted).unwrap_or(given_back));
                    }
                    Err(error) => return Err(ReadError::Io(error.to_string())),
                },
            }
        }
    }

    /// What a missing segment says; nothing when a running broker gave it back, because it was there before.
    fn why_gone(&self, wanted: WantedRead) -> Option<ReadError> {
        let was_there = self.listed.contains(&(wanted.core, wanted.segment));
        (!was_there).then_some(ReadError::Damaged {
            core: wanted.core,
            segment: wanted.segment,
            position: wanted.position,
            detail: "the segment is missing",
        })
    }

    fn is_newer(&self, core: u16, segment: u64) -> bool {
        let file = self.files.get(&(core, segment));
        file.is_some_and(SegmentFile::is_newer_than_the_scan)
    }

    /// Every record of one log with its offset, oldest first; ends at the first error.
    pub fn records(&mut self, id: u64) -> Records<'_> {
        let from = self.logs.get(&LogId(id)).map_or(0, |(_, seed)| seed.base);
        Records {
            reader: self,
            id,
            from,
            batch: Vec::new().into_iter(),
            offset: from,
            ended: false,
        }
    }

    /// Reads every record of every log and checks it.
    pub fn verify(&mut self) -> VerifyReport {
        self.verify_with(|_| {})
    }

    /// As [`Reader::verify`]; `on_progress` sees the counts again and again.
    pub fn verify_with(&mut self, mut on_progress: impl FnMut(&VerifyReport)) -> VerifyReport {
        let mut report = VerifyReport::default();
        for log in self.logs() {
            let text = log
                .name
                .as_ref()
                .map_or_else(|| format!("log {:016x}", log.id), LogName::to_string);
            report.logs += 1;
            if let Some(damage) = &log.damage {
                report.damaged.push((text.clone(), damage.clone()));
            }
            for record in self.records(log.id) {
                match record {
                    Ok((_, payload)) => {
                        report.records += 1;
                        report.payload_bytes += payload.len() as u64;
                        if report.records % PROGRESS_RECORDS == 0 {
                            on_progress(&report);
                        }
                    }
                    Err(ReadError::Trimmed { .. }) => {
                        report.given_back.push(text.clone());
                        break;
                    }
                    Err(error) => {
                        report.damaged.push((text.clone(), error.to_string()));
                        break;
                    }
                }
            }
        }
        report
    }

    /// Calls `on_segment` for every segment file and `on_group` for every group in it that has a readable
    /// header, in order of position.
    pub fn inspect(
        &self,
        mut on_segment: impl FnMut(&SegmentView),
        mut on_group: impl FnMut(&SegmentView, &GroupView),
    ) -> Result<(), StorageError> {
        let Some(meta) = Meta::read(&self.layout)? else {
            return Ok(());
        };
        for core in self.layout.cores()? {
            for segment in self.layout.segments(core)? {
                let file = self.layout.segment(core, segment);
                let source = match FileSource::new(&file) {
                    Ok(source) => source,
                    // Given back by a running broker since it was listed.
                    Err(error) if error.kind() == ErrorKind::NotFound => continue,
                    Err(error) => return Err(StorageError::io("opening", &file, error)),
                };
                let mut window = Window::new(Box::new(source));
                let header = SegmentHeader::decode(window.get(0, ALIGN));
                let view = SegmentView {
                    file,
                    core,
                    segment,
                    file_bytes: window.len(),
                    boot_epoch: header.ok().map(|header| header.boot_epoch),
                    rewritten_groups: header
                        .ok()
                        .and_then(|header| header.rewritten)
                        .map(|whole| (whole.first_group, whole.last_group)),
                };
                on_segment(&view);
                groups::each(&meta, &view, &mut window, &mut on_group)?;
                window.check(&view.file)?;
            }
        }
        Ok(())
    }

    fn fetch(&mut self, wanted: WantedRead) -> std::io::Result<Bytes> {
        let key = (wanted.core, wanted.segment);
        if !self.files.contains_key(&key) {
            if self.files.len() >= OPEN_FILES_MAX {
                self.files.clear();
            }
            let path = self.layout.segment(wanted.core, wanted.segment);
            let file = SegmentFile::open(&path, &self.uuid, wanted.segment, self.maps.get(&key))?;
            self.files.insert(key, file);
        }
        self.files[&key].read(wanted)
    }
}

fn view(id: LogId, (name, seed): &(Option<LogName>, LogSeed)) -> OfflineLog {
    OfflineLog {
        name: name.clone(),
        id: id.0,
        base: seed.base,
        tail: seed.tail,
        generation: seed.generation,
        accepted: seed.control.accepted,
        history: seed.control.history.clone(),
        damage: seed.damage.as_ref().map(|damage| damage.to_string()),
    }
}

/// Iterator over the records of one log.
pub struct Records<'a> {
    reader: &'a mut Reader,
    id: u64,
    from: u64,
    offset: u64,
    batch: std::vec::IntoIter<Bytes>,
    ended: bool,
}

impl Iterator for Records<'_> {
    type Item = Result<(u64, Bytes), ReadError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        if let Some(payload) = self.batch.next() {
            self.offset += 1;
            return Some(Ok((self.offset - 1, payload)));
        }
        match self.reader.read(self.id, self.from, BATCH_BYTES) {
            Ok(batch) if batch.records.is_empty() => {
                self.ended = true;
                None
            }
            Ok(batch) => {
                self.offset = batch.first_offset;
                self.from = batch.next_offset;
                self.batch = batch.records.into_iter();
                self.next()
            }
            Err(error) => {
                self.ended = true;
                Some(Err(error))
            }
        }
    }
}
