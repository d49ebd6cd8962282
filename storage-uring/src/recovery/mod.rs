//! Recovery: from the segment files of a data directory to logs that can be opened.
//!
//! Runs once, on ordinary threads, before the cores start. Scans every core directory, whatever the number of
//! cores now, so that a log can be opened on any core. Carries out the cuts the scan decided on, so that a
//! second start finds nothing left to do.
//!
//! Invariants: bytes of a complete group are never removed; the verdict depends only on the bytes.

mod chain;
pub(crate) mod events;
pub mod images;
mod moved;
mod progress;
mod repair;
mod rewritten;
pub(crate) mod scan;
pub(crate) mod settle;
mod source;
mod verdict;

use std::collections::HashMap;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use serde::Serialize;

pub use chain::SegmentInput;
pub use progress::{ProgressView, RecoveryProgress};
pub use scan::{Cut, Damage, ScanCounts, SURVIVORS_MAX};
pub use settle::{CoreVerdict, SettleStep};
#[cfg(feature = "runtime")]
pub(crate) use source::open_for_reading;
pub(crate) use source::Window;
pub use source::{FileSource, ImageSource, SegmentSource};

use crate::datadir::{DataDir, Layout, Meta, SEQUENCE_MAX};
use crate::error::{LogError, StorageError};
use crate::format::freed::FreedRuns;
use crate::format::{DataUuid, HeaderFault, FORMAT_VERSION};
use crate::machine::LogSeed;
use crate::name::{LogId, LogName};
use crate::rewrite::RewrittenMap;
use crate::usage::SegmentTable;
use moved::{Directory, Held, Moved};
use scan::{CoreScan, ScanOptions, Since};

/// What recovery did and found; for the start-up log and the status output.
#[derive(Debug, Clone, Default, Serialize)]
pub struct RecoveryReport {
    /// Epoch of this start; the epoch of the last one when only reading.
    pub boot_epoch: u64,
    /// Counts over all core directories.
    pub counts: ScanCounts,
    /// What becomes of each core directory: carried out by a start, only said by an offline reader.
    pub cores: Vec<CoreVerdict>,
    /// Logs found.
    pub logs: u64,
    /// Unfinished tails that were removed.
    pub cuts: Vec<Cut>,
    /// Damage; the logs in it are refused.
    pub damages: Vec<Damage>,
    /// Logs that are refused, with the reason.
    pub refused: Vec<(String, String)>,
    /// Files that look like segments and are none of this directory's.
    pub strays: Vec<String>,
    /// Time taken.
    pub elapsed_ms: u64,
}

/// Where one core's log goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CoreEnd {
    /// Segment and position one past the last group; segment 0 for a new log.
    pub log_end: (u64, u64),
    /// Number of the next group.
    pub next_group: u64,
    /// First sequence that was never used.
    pub next_segment: u64,
}

/// Scans of a directory in use before it counts as changing too fast to be read.
const SCANS_MAX: usize = 5;

struct RecoveredLog {
    name: Option<LogName>,
    seed: LogSeed,
    /// Accepted generation as found; stays when the seed is taken.
    accepted: u64,
    taken_by: Option<u16>,
}

/// Everything recovered from a data directory; shared by the cores, which take their logs from it.
pub struct RecoveredSet {
    /// The directory, locked.
    pub data_dir: Arc<DataDir>,
    report: RecoveryReport,
    ends: HashMap<u16, CoreEnd>,
    logs: Mutex<HashMap<LogId, RecoveredLog>>,
    segments: Mutex<HashMap<u16, CoreSegments>>,
    /// What logs that lie in several directories hold in each.
    held: Held,
    #[cfg_attr(not(feature = "runtime"), allow(dead_code))]
    maps: RewrittenMaps,
}

/// How to read the rewritten segments, by core directory and sequence.
pub(crate) type RewrittenMaps = HashMap<(u16, u64), Arc<RewrittenMap>>;

/// What recovery knows about the segments of one core directory.
#[derive(Default)]
pub(crate) struct CoreSegments {
    table: SegmentTable,
    #[cfg_attr(not(feature = "runtime"), allow(dead_code))]
    freed: FreedRuns,
    /// Segment of the newest restatement of each log.
    restated: HashMap<LogId, u64>,
}

/// Locks `dir`, raises its boot epoch and recovers all logs in it, on up to `threads` threads.
pub fn recover(dir: &Path, threads: usize) -> Result<Arc<RecoveredSet>, StorageError> {
    recover_with(dir, threads, &RecoveryProgress::default())
}

/// As [`recover`], saying in `progress` how far it is.
pub fn recover_with(
    dir: &Path,
    threads: usize,
    progress: &RecoveryProgress,
) -> Result<Arc<RecoveredSet>, StorageError> {
    let started = Instant::now();
    let data_dir = Arc::new(DataDir::lock(dir)?);
    let layout = &data_dir.layout;
    let options = ScanOptions {
        in_use: false,
        since: Since::epoch(data_dir.meta.boot_epoch - 1),
        progress,
    };
    let scans = scan_all(layout, &data_dir.meta.uuid, threads, options)?;
    // Once the epoch is raised, the next start could not tell it from what this one shortens.
    for scan in &scans {
        layout.forget_restored(scan.core)?;
        for segment in &scan.shortened {
            layout.note_shortened(scan.core, *segment)?;
        }
    }
    data_dir.raise()?;
    let mut ends = HashMap::new();
    for scan in &scans {
        ends.insert(scan.core, core_end(layout, scan)?);
    }
    for scan in &scans {
        settle::carry_out(layout, scan, data_dir.meta.boot_epoch)?;
    }
    let maps = maps_of(&scans);
    let PutTogether {
        mut report,
        logs,
        segments,
        held,
    } = put_together(data_dir.meta.boot_epoch, scans);
    report.elapsed_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
    log_report(&report);
    let logs = logs
        .into_iter()
        .map(|(id, (name, seed))| {
            (
                id,
                RecoveredLog {
                    name,
                    accepted: seed.control.accepted,
                    seed,
                    taken_by: None,
                },
            )
        })
        .collect();
    Ok(Arc::new(RecoveredSet {
        data_dir,
        report,
        ends,
        logs: Mutex::new(logs),
        segments: Mutex::new(segments),
        held,
        maps,
    }))
}

/// Logs of a directory as they are, without locking it or changing anything.
pub(crate) struct ReadOnlyLogs {
    pub report: RecoveryReport,
    pub logs: HashMap<LogId, (Option<LogName>, LogSeed)>,
    pub maps: RewrittenMaps,
}

fn maps_of(scans: &[CoreScan]) -> RewrittenMaps {
    let of_core = |scan: &CoreScan| {
        let core = scan.core;
        let maps = scan.maps.iter();
        let maps = maps.map(move |(seq, map)| ((core, *seq), Arc::clone(map)));
        maps.collect::<Vec<_>>()
    };
    scans.iter().flat_map(of_core).collect()
}

/// Scans a directory that may be in use.
pub(crate) fn scan_read_only(
    layout: &Layout,
    threads: usize,
    progress: &RecoveryProgress,
) -> Result<ReadOnlyLogs, StorageError> {
    let started = Instant::now();
    let Some(mut meta) = Meta::read(layout)? else {
        return Ok(ReadOnlyLogs {
            report: RecoveryReport::default(),
            logs: HashMap::new(),
            maps: HashMap::new(),
        });
    };
    let mut attempt = 0;
    let scans = loop {
        let options = ScanOptions {
            in_use: true,
            since: Since::epoch(meta.boot_epoch),
            progress,
        };
        match scan_all(layout, &meta.uuid, threads, options) {
            // A running broker removed a segment since it was listed.
            Err(StorageError::Io { source, .. })
                if source.kind() == ErrorKind::NotFound && attempt < SCANS_MAX =>
            {
                attempt += 1;
            }
            other => {
                let scans = other?;
                // A start shortens what the one before it made.
                let now = Meta::read(layout)?.filter(|now| now.boot_epoch != meta.boot_epoch);
                match now {
                    Some(now) if attempt < SCANS_MAX => (meta, attempt) = (now, attempt + 1),
                    _ => break scans,
                }
            }
        }
    };
    let maps = maps_of(&scans);
    let PutTogether {
        mut report, logs, ..
    } = put_together(meta.boot_epoch, scans);
    report.elapsed_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
    Ok(ReadOnlyLogs { report, logs, maps })
}

fn scan_all(
    layout: &Layout,
    uuid: &DataUuid,
    threads: usize,
    options: ScanOptions<'_>,
) -> Result<Vec<CoreScan>, StorageError> {
    let cores = layout.cores()?;
    options.progress.on_cores(cores.len() as u64);
    let mut all_inputs = Vec::new();
    for core in &cores {
        layout.check_files(*core)?;
        let inputs = inputs(layout, *core)?;
        let bytes = inputs.iter().map(|input| input.source.len()).sum();
        options.progress.add_total(inputs.len() as u64, bytes);
        all_inputs.push((*core, inputs));
    }
    let queue = Mutex::new(all_inputs.into_iter());
    let results = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, cores.len().max(1)) {
            scope.spawn(|| loop {
                let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some((core, inputs)) = next else { break };
                let scan = scan_one(layout, uuid, core, inputs, options);
                options.progress.on_core();
                results
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(scan);
            });
        }
    });
    let results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    let mut scans = results.into_iter().collect::<Result<Vec<_>, _>>()?;
    scans.sort_by_key(|scan| scan.core);
    Ok(scans)
}

fn scan_one(
    layout: &Layout,
    uuid: &DataUuid,
    core: u16,
    mut segments: Vec<SegmentInput>,
    options: ScanOptions<'_>,
) -> Result<CoreScan, StorageError> {
    let mut scans = 0;
    let mut lost_end = None;
    loop {
        // After the list of segments: a running broker stores the record before it takes a segment away.
        let (freed, damage) = read_freed(layout, uuid, core)?;
        let shortened = layout.shortened(core)?;
        let since = Since {
            shortened: Some(&shortened),
            ..options.since
        };
        let options = ScanOptions { since, ..options };
        let mut scan = scan::scan_core(uuid, core, segments, freed, options)?;
        scan.damages.extend(damage);
        scans += 1;
        let is_clean = scan.damages.is_empty() && scan.cuts.is_empty();
        if scan.lost_end && options.in_use && scans == SCANS_MAX {
            let error = std::io::Error::other("the broker writes faster than it can be read");
            return Err(StorageError::io("reading", layout.core(core), error));
        }
        if is_clean || !options.in_use || scans == SCANS_MAX {
            return Ok(scan);
        }
        if scan.lost_end {
            // What is missing may have been written since the segments were listed; twice the same is lost.
            let end = (scan.next_group, scan.end);
            if lost_end.replace(end) == Some(end) {
                return Ok(scan);
            }
        } else if read_freed(layout, uuid, core)?.0 == scan.freed {
            return Ok(scan);
        }
        segments = inputs(layout, core)?;
    }
}

/// The record of freed segments. A damaged one counts as none: then stretches that were freed look like lost
/// ones, and logs that cannot be proven whole are refused.
fn read_freed(
    layout: &Layout,
    uuid: &DataUuid,
    core: u16,
) -> Result<(FreedRuns, Option<Damage>), StorageError> {
    let file = layout.freed(core);
    let bytes = match std::fs::read(&file) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Ok((FreedRuns::default(), None));
        }
        Err(error) => return Err(StorageError::io("reading", file, error)),
    };
    match FreedRuns::decode(uuid, core, &bytes) {
        Ok(freed) => Ok((freed, None)),
        Err(HeaderFault::Version(found)) => Err(StorageError::UnknownVersion {
            file,
            found,
            known: FORMAT_VERSION,
        }),
        Err(fault) => {
            let damage = Damage {
                core,
                file,
                position: 0,
                logs: Vec::new(),
                reason: format!("the record of freed segments is not readable ({fault:?})"),
            };
            Ok((FreedRuns::default(), Some(damage)))
        }
    }
}

fn inputs(layout: &Layout, core: u16) -> Result<Vec<SegmentInput>, StorageError> {
    let mut inputs = Vec::new();
    for seq in layout.segments(core)? {
        let file = layout.segment(core, seq);
        match FileSource::new(&file) {
            Ok(source) => inputs.push(SegmentInput {
                seq,
                file,
                source: Box::new(source),
            }),
            // Recycled by a running broker since it was listed.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(StorageError::io("opening", file, error)),
        }
    }
    Ok(inputs)
}

/// Files that nothing in them makes a segment of this directory do not move the sequence: they are gone, or have
/// another name, before the next one is made.
fn core_end(layout: &Layout, scan: &CoreScan) -> Result<CoreEnd, StorageError> {
    let of_ours = [&scan.live, &scan.dead, &scan.skipped, &scan.unused];
    let of_ours = of_ours.into_iter().flatten().copied();
    let newest = of_ours.filter(|seq| !scan.unknown.contains(seq)).max();
    let newest = newest.unwrap_or(0);
    let newest = newest.max(scan.end.0).max(scan.freed.newest());
    let next_segment = newest.saturating_add(1);
    if next_segment > SEQUENCE_MAX {
        return Err(StorageError::SequencesUsedUp {
            dir: layout.core(scan.core),
        });
    }
    Ok(CoreEnd {
        log_end: scan.end,
        next_group: scan.next_group,
        next_segment,
    })
}

pub(crate) type Logs = HashMap<LogId, (Option<LogName>, LogSeed)>;

/// The scans of all core directories as one.
struct PutTogether {
    report: RecoveryReport,
    logs: Logs,
    segments: HashMap<u16, CoreSegments>,
    held: Held,
}

fn put_together(boot_epoch: u64, scans: Vec<CoreScan>) -> PutTogether {
    let mut report = RecoveryReport {
        boot_epoch,
        ..RecoveryReport::default()
    };
    let mut cores = Vec::new();
    let mut losses = Vec::new();
    let mut core_counts = HashMap::new();
    let mut segments = HashMap::new();
    let mut epochs = HashMap::new();
    for scan in scans {
        report.cores.push(settle::verdict(&scan));
        let of_core = CoreSegments {
            table: SegmentTable::new(scan.uses.into_segments()),
            freed: scan.freed,
            restated: scan.restated,
        };
        segments.insert(scan.core, of_core);
        report.counts.segments += scan.counts.segments;
        report.counts.groups += scan.counts.groups;
        report.counts.records += scan.counts.records;
        report.counts.bytes += scan.counts.bytes;
        report.cuts.extend(scan.cuts);
        report.damages.extend(scan.damages);
        report.strays.extend(
            scan.strays
                .iter()
                .map(|(seq, why)| format!("core {} segment {seq}: {why}", scan.core)),
        );
        losses.extend(scan.losses);
        core_counts.extend(scan.core_counts);
        epochs.insert(scan.core, scan.epochs);
        cores.push((scan.core, scan.chapters));
    }
    let moved = Moved::find(&cores);
    let mut logs = events::assemble(cores, &losses, &core_counts);
    let mut held = Held::default();
    for (core, of_core) in &mut segments {
        let mut directory = Directory {
            core: *core,
            table: &mut of_core.table,
            epochs: &epochs[core],
        };
        moved.cut(&mut directory);
        moved.count(&directory, &logs, &mut held);
        count_held(&mut of_core.table, &mut logs);
    }
    report.logs = logs.len() as u64;
    for (id, (name, seed)) in &logs {
        if let Some(detail) = &seed.damage {
            let text = name
                .as_ref()
                .map_or_else(|| format!("log {:016x}", id.0), LogName::to_string);
            report.refused.push((text, detail.to_string()));
        }
    }
    report.refused.sort();
    PutTogether {
        report,
        logs,
        segments,
        held,
    }
}

/// Counts what each log holds in the segments of one core directory.
pub(crate) fn count_held(table: &mut SegmentTable, logs: &mut Logs) {
    let mut given_up = Vec::new();
    for (seq, segment) in table.iter() {
        for (at, entry) in segment.logs.iter().enumerate() {
            match logs.get_mut(&entry.log) {
                Some((_, seed)) if entry.end > seed.base => seed.held_bytes += entry.bytes,
                Some(_) if entry.bytes > 0 => given_up.push((seq, at)),
                _ => {}
            }
        }
    }
    // What is given up does not count, here or when a sweep comes to it.
    for (seq, at) in given_up {
        table.set_bytes(seq, at, 0);
    }
}

fn log_report(report: &RecoveryReport) {
    for cut in &report.cuts {
        tracing::warn!(
            core = cut.core, file = %cut.file.display(), position = cut.position, dropped_bytes = cut.dropped_bytes,
            logs = ?cut.logs, reason = cut.reason, "an unfinished tail was cut"
        );
    }
    for damage in &report.damages {
        tracing::error!(
            core = damage.core, file = %damage.file.display(), position = damage.position, logs = ?damage.logs,
            reason = damage.reason, "damage found"
        );
    }
    for (log, detail) in &report.refused {
        tracing::error!(log, detail, "log refused");
    }
    for stray in &report.strays {
        tracing::warn!(stray, "file set aside");
    }
}

impl RecoveredSet {
    /// What recovery did and found.
    pub fn report(&self) -> &RecoveryReport {
        &self.report
    }

    /// Where the log of `core` goes on.
    pub fn core_end(&self, core: u16) -> CoreEnd {
        let fresh = CoreEnd {
            log_end: (0, 0),
            next_group: 1,
            next_segment: 1,
        };
        self.ends.get(&core).copied().unwrap_or(fresh)
    }

    /// Names of the logs found; logs whose name was lost are left out.
    pub fn log_names(&self) -> Vec<LogName> {
        let logs = self.logs.lock().unwrap_or_else(PoisonError::into_inner);
        let mut names: Vec<LogName> = logs.values().filter_map(|log| log.name.clone()).collect();
        names.sort();
        names
    }

    /// The logs found that have accepted a generation, with the highest; logs whose name was lost are left
    /// out.
    pub fn accepted(&self) -> Vec<(LogName, u64)> {
        let logs = self.logs.lock().unwrap_or_else(PoisonError::into_inner);
        let of_log = |log: &RecoveredLog| Some((log.name.clone()?, log.accepted));
        let found = logs.values().filter_map(of_log);
        found.filter(|(_, accepted)| *accepted > 0).collect()
    }

    /// Logs that last wrote on this core while there were this many of them. Where a log lives depends on
    /// nothing else, so they still live there.
    pub fn logs_at_home(&self, core: u16, core_count: u16) -> Vec<LogName> {
        let logs = self.logs.lock().unwrap_or_else(PoisonError::into_inner);
        let at_home = logs
            .values()
            .filter(|log| log.taken_by.is_none() && log.seed.home == Some((core, core_count)));
        let mut names: Vec<LogName> = at_home.filter_map(|log| log.name.clone()).collect();
        names.sort();
        names
    }

    /// Hands a log to `core`; an empty one when it was never written.
    pub fn take(&self, name: &LogName, core: u16) -> Result<LogSeed, LogError> {
        let mut logs = self.logs.lock().unwrap_or_else(PoisonError::into_inner);
        let log = logs.entry(name.id()).or_insert_with(|| RecoveredLog {
            name: Some(name.clone()),
            seed: LogSeed::default(),
            accepted: 0,
            taken_by: None,
        });
        match &log.name {
            Some(held) if held != name => {
                return Err(LogError::IdCollision {
                    log: name.to_string(),
                    other: held.to_string(),
                });
            }
            Some(_) | None => {}
        }
        if log.taken_by.is_some() {
            return Err(LogError::OpenElsewhere(name.to_string()));
        }
        log.taken_by = Some(core);
        let mut seed = std::mem::take(&mut log.seed);
        // Retention on a core looks at its own directory: what lies in others must not make anything go there.
        seed.held_bytes = match self.held.get(&name.id()) {
            Some(by_core) => by_core.get(&core).copied().unwrap_or(0),
            None if seed.home.is_some_and(|(home, _)| home == core) => seed.held_bytes,
            None => 0,
        };
        let segments = self.segments.lock().unwrap_or_else(PoisonError::into_inner);
        let restated = segments
            .get(&core)
            .and_then(|of_core| of_core.restated.get(&name.id()));
        seed.restated_in = restated.copied().unwrap_or(0);
        Ok(seed)
    }

    /// How to read a segment that was rewritten before this start.
    #[cfg(feature = "runtime")]
    pub(crate) fn rewritten_map(&self, core: u16, segment: u64) -> Option<Arc<RewrittenMap>> {
        self.maps.get(&(core, segment)).cloned()
    }

    /// Hands the segments of a core directory to that core.
    #[cfg(feature = "runtime")]
    pub(crate) fn take_segments(&self, core: u16) -> (SegmentTable, FreedRuns) {
        let mut segments = self.segments.lock().unwrap_or_else(PoisonError::into_inner);
        let of_core = segments.entry(core).or_default();
        (
            std::mem::take(&mut of_core.table),
            std::mem::take(&mut of_core.freed),
        )
    }
}
