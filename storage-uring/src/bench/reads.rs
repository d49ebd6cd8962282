//! Reading a log back from the disk, beside raw reads of the same files; and what recovery costs.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;
use shard_executor::rt::{spawn_core, yield_if_needed, CoreSpec};

use super::probes::raw_read;
use super::{open_logs, thread_cpu, RawReport};
use crate::config::StorageConfig;
use crate::datadir::Layout;
use crate::driver::Storage;
use crate::error::StorageError;
use crate::machine::LogRef;
use crate::recovery::recover;

/// What `bench_read` is to do.
#[derive(Debug, Clone)]
pub struct ReadBench {
    /// Logs written in turn, then read one after the other.
    pub shards: u32,
    /// Bytes of a record.
    pub payload_bytes: usize,
    /// Records of one append.
    pub batch: u32,
    /// Payload written in all.
    pub total_bytes: u64,
    /// Payload asked for in one read; 0 recovers and reads nothing.
    pub read_bytes: usize,
    /// CPU to run on.
    pub cpu: Option<usize>,
}

/// What was measured.
#[derive(Debug, Clone, Default, Serialize)]
pub struct ReadReport {
    /// Records read.
    pub records: u64,
    /// Payload bytes a second, in units of 10^6.
    pub payload_mb_per_s: f64,
    /// Bytes from the device a second, in units of 10^6.
    pub device_mb_per_s: f64,
    /// Mean bytes of a device read.
    pub device_read_bytes: f64,
    /// CPU seconds of the core's thread for each second.
    pub cpu_share: f64,
    /// Raw reads of the same files, of the mean size, one at a time.
    pub raw: RawReport,
    /// Seconds of the recovery before it.
    pub recovery_s: f64,
    /// Bytes it looked at.
    pub recovery_bytes: u64,
}

impl ReadReport {
    /// Bytes from the device by those of the raw reads.
    pub fn ratio(&self) -> f64 {
        self.device_mb_per_s / self.raw.mb_per_s.max(1e-9)
    }

    /// Seconds a GiB of recovery.
    pub fn recovery_s_per_gib(&self) -> f64 {
        self.recovery_s / (self.recovery_bytes.max(1) as f64 / f64::from(1u32 << 30))
    }
}

/// Writes logs to a fresh directory below `dir`, starts again over them, and reads them; blocks the caller.
pub fn bench_read(dir: &Path, bench: &ReadBench) -> Result<ReadReport, StorageError> {
    let dir = dir.join(format!("bench-read-{}", std::process::id()));
    let report = run(&dir, bench);
    std::fs::remove_dir_all(&dir).map_err(|error| StorageError::io("removing", &dir, error))?;
    report
}

pub(super) fn failed(error: impl std::fmt::Display) -> StorageError {
    StorageError::Failed(error.to_string())
}

fn run(dir: &Path, bench: &ReadBench) -> Result<ReadReport, StorageError> {
    on_core(dir, bench, write)?;
    let files = segments(dir)?;
    let recovery_bytes = files
        .iter()
        .filter_map(|file| file.metadata().ok())
        .map(|meta| meta.len())
        .sum();
    let started = Instant::now();
    drop(recover(dir, 1)?);
    let recovery_s = started.elapsed().as_secs_f64();
    let mut report = ReadReport::default();
    if bench.read_bytes > 0 {
        // What lies below a virtual disk may keep what was read once: neither of the two is to be the first.
        raw_read(&files, bench.read_bytes, 1, bench.cpu)?;
        report = on_core(dir, bench, read)?;
        report.raw = raw_read(&files, report.device_read_bytes as usize, 1, bench.cpu)?;
    }
    report.recovery_s = recovery_s;
    report.recovery_bytes = recovery_bytes;
    Ok(report)
}

pub(super) fn on_core<T, F>(dir: &Path, bench: &ReadBench, work: F) -> Result<T, StorageError>
where
    T: Send + 'static,
    F: AsyncFnOnce(&Storage, &[LogRef], &ReadBench) -> Result<T, StorageError> + Send + 'static,
{
    let recovered = recover(dir, 1)?;
    let config = StorageConfig {
        recent_bytes: 0,
        ..StorageConfig::new(dir, 0, 1)
    };
    let spec = CoreSpec {
        cpu: bench.cpu,
        name: "bench-read".to_owned(),
        ..CoreSpec::new(0)
    };
    let bench = bench.clone();
    let core = spawn_core(spec, move || async move {
        let storage = Storage::open(config, recovered).await?;
        let logs = open_logs(&storage, bench.shards)?;
        let done = work(&storage, &logs, &bench).await?;
        storage.close().await?;
        Ok(done)
    });
    core.map_err(failed)?.join().map_err(failed)?
}

pub(super) async fn write(
    storage: &Storage,
    logs: &[LogRef],
    bench: &ReadBench,
) -> Result<(), StorageError> {
    let payload = vec![0x5au8; bench.payload_bytes];
    let batch = vec![payload.as_slice(); bench.batch.max(1) as usize];
    let appends = bench.total_bytes / (bench.payload_bytes * batch.len()).max(1) as u64;
    let signal = storage.signal();
    let mut done = Vec::new();
    let (mut next, mut outstanding) = (0u64, 0usize);
    while next < appends || outstanding > 0 {
        let room = (4 << 20) / (bench.payload_bytes * batch.len()).max(1);
        while next < appends && outstanding <= room {
            let log = logs[(next % logs.len() as u64) as usize];
            let append = storage.append(log, 1, 1, batch.iter().copied(), next);
            append.map_err(failed)?;
            next += 1;
            outstanding += 1;
        }
        storage.kick();
        signal.wait_take().await;
        storage.poll_completions(&mut done);
        if let Some(error) = done.iter().find_map(|done| done.result.err()) {
            return Err(failed(error));
        }
        outstanding -= done.len();
        done.clear();
    }
    Ok(())
}

async fn read(
    storage: &Storage,
    logs: &[LogRef],
    bench: &ReadBench,
) -> Result<ReadReport, StorageError> {
    let (started, cpu) = (Instant::now(), thread_cpu());
    let before = storage.stats();
    let (mut records, mut bytes) = (0u64, 0u64);
    for log in logs {
        let tail = storage.durable_tail(*log);
        let mut from = storage.base(*log);
        while from < tail {
            let batch = storage.read(*log, from, bench.read_bytes).await;
            let batch = batch.map_err(failed)?;
            if batch.next_offset <= from {
                return Err(failed("a read that does not move on"));
            }
            records += batch.records.len() as u64;
            bytes += batch.records.iter().map(|r| r.len() as u64).sum::<u64>();
            from = batch.next_offset;
            yield_if_needed().await;
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    let after = storage.stats();
    let (reads, read_bytes) = (
        after.reads - before.reads,
        after.read_bytes - before.read_bytes,
    );
    Ok(ReadReport {
        records,
        payload_mb_per_s: bytes as f64 / seconds / 1e6,
        device_mb_per_s: read_bytes as f64 / seconds / 1e6,
        device_read_bytes: read_bytes as f64 / reads.max(1) as f64,
        cpu_share: (thread_cpu() - cpu).as_secs_f64() / seconds,
        ..ReadReport::default()
    })
}

/// The segments with records in them, open for direct reads.
pub(super) fn segments(dir: &Path) -> Result<Vec<Arc<std::fs::File>>, StorageError> {
    let core = Layout::new(dir).core(0);
    let io = |error| StorageError::io("reading", &core, error);
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(&core).map_err(io)? {
        let path = entry.map_err(io)?.path();
        if path.extension().is_some_and(|ext| ext == "fxl") {
            paths.push(path);
        }
    }
    paths.sort();
    let open = |path| {
        OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_DIRECT)
            .open(path)
            .map(Arc::new)
    };
    paths
        .into_iter()
        .map(open)
        .collect::<Result<_, _>>()
        .map_err(io)
}
