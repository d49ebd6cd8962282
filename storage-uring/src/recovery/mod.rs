//! Recovery: from the segment files of a data directory to logs that can be opened.
//!
//! Runs once, on ordinary threads, before the cores start. Scans every core directory, whatever the number of
//! cores now, so that a log can be opened on any core. Carries out the cuts the scan decided on, so that a
//! second start finds nothing left to do.
//!
//! Invariants: bytes of a complete group are never removed; the verdict depends only on the bytes.

mod chain;
pub(crate) mod events;
mod repair;
pub(crate) mod scan;
mod source;
mod verdict;

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use serde::Serialize;

pub use chain::SegmentInput;
pub use scan::{Cut, Damage, ScanCounts, SURVIVORS_MAX};
pub(crate) use source::{open_for_reading, read_full, Window};
pub use source::{FileSource, ImageSource, SegmentSource};

use crate::datadir::{sync_dir, DataDir, Layout, Meta};
use crate::error::{LogError, StorageError};
use crate::format::DataUuid;
use crate::machine::LogSeed;
use crate::name::{LogId, LogName};
use scan::CoreScan;

/// What recovery did and found; for the start-up log and the status output.
#[derive(Debug, Clone, Default, Serialize)]
pub struct RecoveryReport {
    /// Epoch of this start; the epoch of the last one when only reading.
    pub boot_epoch: u64,
    /// Counts over all core directories.
    pub counts: ScanCounts,
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

struct RecoveredLog {
    name: Option<LogName>,
    seed: LogSeed,
    taken_by: Option<u16>,
}

/// Everything recovered from a data directory; shared by the cores, which take their logs from it.
pub struct RecoveredSet {
    /// The directory, locked.
    pub data_dir: Arc<DataDir>,
    report: RecoveryReport,
    ends: HashMap<u16, CoreEnd>,
    logs: Mutex<HashMap<LogId, RecoveredLog>>,
}

/// Locks `dir`, raises its boot epoch and recovers all logs in it, on up to `threads` threads.
pub fn recover(dir: &Path, threads: usize) -> Result<Arc<RecoveredSet>, StorageError> {
    let started = Instant::now();
    let data_dir = Arc::new(DataDir::open(dir)?);
    let layout = &data_dir.layout;
    let scans = scan_all(layout, &data_dir.meta.uuid, threads)?;
    let mut ends = HashMap::new();
    for scan in &scans {
        ends.insert(scan.core, core_end(layout, scan)?);
        settle(layout, scan, data_dir.meta.boot_epoch)?;
    }
    let (mut report, logs) = put_together(data_dir.meta.boot_epoch, scans);
    report.elapsed_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
    log_report(&report);
    let logs = logs
        .into_iter()
        .map(|(id, (name, seed))| {
            (
                id,
                RecoveredLog {
                    name,
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
    }))
}

/// Logs of a directory as they are, without locking it or changing anything.
pub(crate) struct ReadOnlyLogs {
    pub report: RecoveryReport,
    pub logs: HashMap<LogId, (Option<LogName>, LogSeed)>,
}

/// Scans a directory that may be in use.
pub(crate) fn scan_read_only(
    layout: &Layout,
    threads: usize,
) -> Result<ReadOnlyLogs, StorageError> {
    let started = Instant::now();
    let Some(meta) = Meta::read(layout)? else {
        return Ok(ReadOnlyLogs {
            report: RecoveryReport::default(),
            logs: HashMap::new(),
        });
    };
    let scans = scan_all(layout, &meta.uuid, threads)?;
    let (mut report, logs) = put_together(meta.boot_epoch, scans);
    report.elapsed_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
    Ok(ReadOnlyLogs { report, logs })
}

fn scan_all(
    layout: &Layout,
    uuid: &DataUuid,
    threads: usize,
) -> Result<Vec<CoreScan>, StorageError> {
    let cores = layout.cores()?;
    let queue = Mutex::new(cores.iter().copied());
    let results = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, cores.len().max(1)) {
            scope.spawn(|| loop {
                let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some(core) = next else { break };
                let scan =
                    inputs(layout, core).and_then(|inputs| scan::scan_core(uuid, core, inputs));
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

fn inputs(layout: &Layout, core: u16) -> Result<Vec<SegmentInput>, StorageError> {
    let mut inputs = Vec::new();
    for seq in layout.segments(core)? {
        let file = layout.segment(core, seq);
        match FileSource::open(&file) {
            Ok(source) => inputs.push(SegmentInput {
                seq,
                file,
                source: Box::new(source),
            }),
            // Recycled by a running broker since it was listed.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(StorageError::io("opening", file, error)),
        }
    }
    Ok(inputs)
}

fn core_end(layout: &Layout, scan: &CoreScan) -> Result<CoreEnd, StorageError> {
    let newest = layout.segments(scan.core)?.last().copied().unwrap_or(0);
    Ok(CoreEnd {
        log_end: scan.end,
        next_group: scan.next_group,
        next_segment: newest.max(scan.end.0) + 1,
    })
}

/// Carries out what the scan decided: cuts, and removal of segments that are no log.
fn settle(layout: &Layout, scan: &CoreScan, boot_epoch: u64) -> Result<(), StorageError> {
    for cut in &scan.cuts {
        shorten(&cut.file, cut.position)?;
    }
    if let Some((seq, position)) = scan.trim {
        // Nothing is lost with the zeros, and the space comes back.
        shorten(&layout.segment(scan.core, seq), position)?;
    }
    for (seq, _) in &scan.strays {
        let file = layout.segment(scan.core, *seq);
        let aside = file.with_extension(format!("stray-{boot_epoch}"));
        std::fs::rename(&file, &aside)
            .map_err(|error| StorageError::io("renaming", &file, error))?;
    }
    for seq in scan.dead.iter().chain(&scan.unused) {
        let file = layout.segment(scan.core, *seq);
        std::fs::remove_file(&file).map_err(|error| StorageError::io("removing", &file, error))?;
    }
    for spare in layout.spares(scan.core)? {
        std::fs::remove_file(&spare)
            .map_err(|error| StorageError::io("removing", &spare, error))?;
    }
    let dir = layout.core(scan.core);
    sync_dir(&dir).map_err(|error| StorageError::io("syncing", dir, error))
}

fn shorten(file: &Path, len: u64) -> Result<(), StorageError> {
    let shorten = || -> std::io::Result<()> {
        let file = std::fs::OpenOptions::new().write(true).open(file)?;
        if file.metadata()?.len() > len {
            file.set_len(len)?;
            file.sync_all()?;
        }
        Ok(())
    };
    shorten().map_err(|error| StorageError::io("shortening", file, error))
}

type Logs = HashMap<LogId, (Option<LogName>, LogSeed)>;

fn put_together(boot_epoch: u64, scans: Vec<CoreScan>) -> (RecoveryReport, Logs) {
    let mut report = RecoveryReport {
        boot_epoch,
        ..RecoveryReport::default()
    };
    let mut cores = Vec::new();
    let mut losses = Vec::new();
    let mut core_counts = HashMap::new();
    for scan in scans {
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
        cores.push((scan.core, scan.chapters));
    }
    let logs = events::assemble(cores, &losses, &core_counts);
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
    (report, logs)
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
        let of_log = |log: &RecoveredLog| Some((log.name.clone()?, log.seed.control.accepted));
        let found = logs.values().filter_map(of_log);
        found.filter(|(_, accepted)| *accepted > 0).collect()
    }

    /// Hands a log to `core`; an empty one when it was never written.
    pub fn take(&self, name: &LogName, core: u16) -> Result<LogSeed, LogError> {
        let mut logs = self.logs.lock().unwrap_or_else(PoisonError::into_inner);
        let log = logs.entry(name.id()).or_insert_with(|| RecoveredLog {
            name: Some(name.clone()),
            seed: LogSeed::default(),
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
        Ok(std::mem::take(&mut log.seed))
    }
}
