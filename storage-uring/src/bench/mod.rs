//! Measurements: the storage alone, and what it is compared with.
//!
//! `bench_append` drives a real `Storage` with closed-loop producers. `raw_append_probe` writes to one
//! pre-written file with nothing around it: the limit. `per_shard_probe` is the layout not chosen, one file a
//! shard, for the decision record. All block the calling thread and remove what they wrote.

mod probes;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::Serialize;
use shard_executor::rt::{spawn_core, yield_if_needed, CoreSpec};

pub use probes::{per_shard_probe, raw_append_probe, RawReport};

use crate::config::{StorageConfig, SyncMethod};
use crate::driver::Storage;
use crate::error::StorageError;
use crate::machine::LogRef;
use crate::name::{LogKind, LogName};
use crate::recovery::recover;

/// Latencies kept for the percentiles.
const SAMPLES_MAX: usize = 4_000_000;

/// What `bench_append` is to do.
#[derive(Debug, Clone)]
pub struct AppendBench {
    /// Logs written to, in turn.
    pub shards: u32,
    /// Bytes of a record.
    pub payload_bytes: usize,
    /// Producers with one record outstanding each.
    pub producers: u32,
    /// How long to measure.
    pub duration: Duration,
    /// How commits become durable.
    pub sync: SyncMethod,
    /// Groups in flight.
    pub commits_in_flight: usize,
    /// CPU to run on.
    pub cpu: Option<usize>,
}

/// What was measured.
#[derive(Debug, Clone, Serialize)]
pub struct AppendReport {
    /// Durable records.
    pub records: u64,
    /// Durable records a second.
    pub records_per_s: f64,
    /// Payload megabytes (10^6) a second.
    pub payload_mb_per_s: f64,
    /// Commits a second; each is one synced write.
    pub commits_per_s: f64,
    /// Mean records of a commit.
    pub records_per_commit: f64,
    /// Mean bytes of a commit on disk.
    pub bytes_per_commit: f64,
    /// Append to completion, microseconds.
    pub latency_us: Percentiles,
    /// CPU seconds of the core's thread for each second of the run.
    pub cpu_share: f64,
    /// Times a commit waited for a segment.
    pub segment_waits: u64,
}

/// Percentiles in microseconds.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Percentiles {
    /// Median.
    pub p50: u32,
    /// 99 in 100 are at most this.
    pub p99: u32,
    /// 999 in 1000 are at most this.
    pub p999: u32,
    /// Largest.
    pub max: u32,
}

impl Percentiles {
    pub(crate) fn of(samples: &mut [u32]) -> Self {
        samples.sort_unstable();
        let at = |share: f64| {
            let index = (samples.len() as f64 * share) as usize;
            samples
                .get(index.min(samples.len().saturating_sub(1)))
                .copied()
                .unwrap_or(0)
        };
        Self {
            p50: at(0.5),
            p99: at(0.99),
            p999: at(0.999),
            max: samples.last().copied().unwrap_or(0),
        }
    }
}

/// Runs closed-loop producers against a storage in a fresh directory below `dir`.
pub fn bench_append(dir: &Path, bench: &AppendBench) -> Result<AppendReport, StorageError> {
    let dir = dir.join(format!("bench-append-{}", std::process::id()));
    let recovered = recover(&dir, 1)?;
    let mut config = StorageConfig::new(&dir, 0, 1);
    config.sync = bench.sync;
    config.commits_in_flight = bench.commits_in_flight;
    config.prewritten_segments = 4;
    let spec = CoreSpec {
        cpu: bench.cpu,
        name: "bench-append".to_owned(),
        ..CoreSpec::new(0)
    };
    let bench = bench.clone();
    let core = spawn_core(spec, move || async move {
        let storage = Storage::open(config, Arc::clone(&recovered)).await?;
        let report = produce(&storage, &bench).await?;
        storage.close().await?;
        Ok(report)
    });
    let report = core
        .map_err(|error| StorageError::Failed(error.to_string()))
        .and_then(|core| {
            core.join()
                .map_err(|error| StorageError::Failed(error.to_string()))
        })
        .and_then(|report| report);
    std::fs::remove_dir_all(&dir).map_err(|error| StorageError::io("removing", &dir, error))?;
    report
}

async fn produce(storage: &Storage, bench: &AppendBench) -> Result<AppendReport, StorageError> {
    let refused = |error: &dyn std::fmt::Display| StorageError::Failed(error.to_string());
    let mut logs: Vec<LogRef> = Vec::new();
    for shard in 0..bench.shards {
        let name = LogName {
            kind: LogKind::Stream,
            tenant: "bench".to_owned(),
            namespace: "append".to_owned(),
            name: "stream".to_owned(),
            shard,
        };
        logs.push(storage.open_log(&name).map_err(|error| refused(&error))?);
    }
    let payload = vec![0x5au8; bench.payload_bytes];
    let time_us = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_micros() as u64);
    let append = |producer: u64| {
        let log = logs[producer as usize % logs.len()];
        storage
            .append(
                log,
                1,
                time_us,
                std::iter::once(payload.as_slice()),
                producer,
            )
            .map_err(|error| refused(&error))
    };
    let started = Instant::now();
    let cpu_before = thread_cpu();
    let mut sent = vec![started; bench.producers as usize];
    for producer in 0..u64::from(bench.producers) {
        append(producer)?;
    }
    storage.kick();
    let signal = storage.signal();
    let mut samples: Vec<u32> = Vec::with_capacity(1 << 16);
    let mut outcomes = Vec::new();
    let mut outstanding = bench.producers;
    while outstanding > 0 {
        storage.poll_completions(&mut outcomes);
        if outcomes.is_empty() {
            signal.wait_take().await;
            continue;
        }
        let now = Instant::now();
        let over = now.duration_since(started) >= bench.duration;
        for done in outcomes.drain(..) {
            done.result.map_err(|error| refused(&error))?;
            let producer = done.token as usize;
            if samples.len() < SAMPLES_MAX {
                samples.push(u32::try_from((now - sent[producer]).as_micros()).unwrap_or(u32::MAX));
            }
            if over {
                outstanding -= 1;
            } else {
                sent[producer] = now;
                append(done.token)?;
            }
        }
        storage.kick();
        yield_if_needed().await;
    }
    let seconds = started.elapsed().as_secs_f64();
    let stats = storage.stats();
    Ok(AppendReport {
        records: stats.machine.records,
        records_per_s: stats.machine.records as f64 / seconds,
        payload_mb_per_s: stats.machine.payload_bytes as f64 / seconds / 1e6,
        commits_per_s: stats.machine.commits as f64 / seconds,
        records_per_commit: stats.records_per_commit(),
        bytes_per_commit: stats.machine.committed_bytes as f64
            / stats.machine.commits.max(1) as f64,
        latency_us: Percentiles::of(&mut samples),
        cpu_share: (thread_cpu() - cpu_before).as_secs_f64() / seconds,
        segment_waits: stats.machine.segment_waits,
    })
}

/// CPU time of this thread.
pub(crate) fn thread_cpu() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the struct is ours.
    let answer = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    if answer != 0 {
        return Duration::ZERO;
    }
    Duration::new(
        u64::try_from(time.tv_sec).unwrap_or(0),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    )
}
