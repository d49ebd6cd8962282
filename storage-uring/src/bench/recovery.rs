//! What a start costs: recovery of logs that nobody writes to, and the memory they take afterwards.

use std::path::Path;
use std::time::Instant;

use serde::Serialize;

use super::reads::{failed, on_core, segments, write};
use super::ReadBench;
use crate::error::StorageError;
use crate::recovery::recover;

/// What `bench_recovery` is to do.
#[derive(Debug, Clone)]
pub struct RecoveryBench {
    /// Logs.
    pub shards: u32,
    /// Payload written in all; at least one record a log.
    pub total_bytes: u64,
    /// Bytes of a record.
    pub payload_bytes: usize,
    /// CPU to run on.
    pub cpu: Option<usize>,
}

/// What was measured.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct RecoveryRun {
    /// Logs found.
    pub shards: u32,
    /// Records found.
    pub records: u64,
    /// Bytes of the segments.
    pub bytes: u64,
    /// Seconds of the recovery: locking, scanning, settling.
    pub recovery_s: f64,
    /// Seconds of a whole start: recovery, threads, all logs opened.
    pub start_s: f64,
    /// What the process grew by in memory until all logs were open.
    pub grown_bytes: u64,
}

impl RecoveryRun {
    /// Seconds a GiB.
    pub fn s_per_gib(&self) -> f64 {
        self.recovery_s / (self.bytes.max(1) as f64 / f64::from(1u32 << 30))
    }
}

/// Writes logs to a fresh directory below `dir`, stops in order, and starts again over them; blocks the caller.
pub fn bench_recovery(dir: &Path, bench: &RecoveryBench) -> Result<RecoveryRun, StorageError> {
    let dir = dir.join(format!("bench-recovery-{}", std::process::id()));
    let run = run(&dir, bench);
    std::fs::remove_dir_all(&dir).map_err(|error| StorageError::io("removing", &dir, error))?;
    run
}

fn run(dir: &Path, bench: &RecoveryBench) -> Result<RecoveryRun, StorageError> {
    let least = u64::from(bench.shards) * bench.payload_bytes as u64;
    let load = ReadBench {
        shards: bench.shards,
        payload_bytes: bench.payload_bytes,
        batch: 1,
        total_bytes: bench.total_bytes.max(least),
        read_bytes: 0,
        cpu: bench.cpu,
    };
    on_core(dir, &load, write)?;
    let lengths = segments(dir)?
        .iter()
        .filter_map(|file| file.metadata().ok())
        .map(|meta| meta.len())
        .sum();
    let started = Instant::now();
    let recovered = recover(dir, 1)?;
    let recovery_s = started.elapsed().as_secs_f64();
    let records = recovered.report().counts.records;
    let found = recovered.report().logs;
    drop(recovered);
    if found != u64::from(bench.shards) {
        return Err(failed(format!("{found} logs were recovered")));
    }
    give_back_free_memory();
    let before = resident_bytes();
    let started = Instant::now();
    let after = on_core(dir, &load, async |_, _, _| {
        Ok((Instant::now(), resident_bytes()))
    })?;
    Ok(RecoveryRun {
        shards: bench.shards,
        records,
        bytes: lengths,
        recovery_s,
        start_s: (after.0 - started).as_secs_f64(),
        grown_bytes: after.1.saturating_sub(before),
    })
}

/// Memory of the process that is in RAM.
fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = text.split_whitespace().nth(1);
    let pages: u64 = pages.and_then(|pages| pages.parse().ok()).unwrap_or(0);
    // SAFETY: asks for a constant of the system.
    let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    pages * u64::try_from(page_bytes).unwrap_or(4096)
}

/// What was used before and is free again would hide what is taken now.
fn give_back_free_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: takes no pointer; frees nothing that is in use.
    unsafe {
        libc::malloc_trim(0);
    }
}
