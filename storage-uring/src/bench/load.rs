//! Closed-loop appends to a real storage.

use std::collections::VecDeque;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::Serialize;
use shard_executor::rt::{
    prepare_warm_up_file, sleep, spawn_core, yield_if_needed, yield_now, CoreSpec,
};
use shard_executor::Signal;

use super::{open_logs, thread_cpu, Percentiles};
use crate::config::{StorageConfig, SyncMethod};
use crate::driver::Storage;
use crate::error::StorageError;
use crate::machine::{Completion, LogRef};
use crate::recovery::recover;

/// Sizes of groups kept for a raw probe to repeat.
const SIZES_MAX: usize = 1 << 16;
/// Most a tail reader takes at once.
const TAIL_READ_BYTES: usize = 1 << 20;

/// What `bench_append` is to do.
#[derive(Debug, Clone)]
pub struct AppendBench {
    /// Logs written to, in turn.
    pub shards: u32,
    /// Bytes of a record.
    pub payload_bytes: usize,
    /// Records of one append.
    pub batch: u32,
    /// Appends not durable yet at most.
    pub outstanding: u32,
    /// Not measured, before the rest.
    pub warm_up: Duration,
    /// How long to measure.
    pub duration: Duration,
    /// How commits become durable.
    pub sync: SyncMethod,
    /// Groups in flight.
    pub commits_in_flight: usize,
    /// Bytes after which a group takes no further record.
    pub commit_max_bytes: usize,
    /// Bytes that are worth a commit while more are being appended.
    pub early_commit_bytes: usize,
    /// Zeroed segments that are there before the load starts; none are made meanwhile unless these run out.
    /// 0: as the storage is by default, with segments zeroed while it is written to.
    pub spares: usize,
    /// Whether every log is read at its tail while it is written.
    pub tail_reads: bool,
    /// How long the core looks for outcomes before it sleeps, as a broker's core does.
    pub spin: Duration,
    /// CPU to run on.
    pub cpu: Option<usize>,
}

impl AppendBench {
    /// One-record appends to `shards` logs, 4,096 outstanding, for a second, without spinning.
    pub fn new(shards: u32, payload_bytes: usize) -> Self {
        Self {
            shards,
            payload_bytes,
            batch: 1,
            outstanding: 4096,
            warm_up: Duration::from_millis(300),
            duration: Duration::from_secs(1),
            sync: SyncMethod::ODsync,
            commits_in_flight: 2,
            commit_max_bytes: 1 << 20,
            early_commit_bytes: 256 << 10,
            spares: 0,
            tail_reads: false,
            spin: Duration::ZERO,
            cpu: None,
        }
    }
}

/// What was measured.
#[derive(Debug, Clone, Serialize)]
pub struct AppendReport {
    /// Durable records.
    pub records: u64,
    /// Length of the measured time.
    pub seconds: f64,
    /// Commits; each is one synced write.
    pub commits: u64,
    /// Bytes of the commits on disk.
    pub committed_bytes: u64,
    /// Append to completion, microseconds.
    pub latency_us: Percentiles,
    /// CPU seconds of the core's thread, the load included.
    pub cpu_s: f64,
    /// Times a commit waited for a segment.
    pub segment_waits: u64,
    /// Segments that were zeroed meanwhile.
    pub segments_zeroed: u64,
    /// Records read at the tails.
    pub tail_records: u64,
    /// Sizes of the commits, in order, for a probe to repeat.
    #[serde(skip)]
    pub sizes: Vec<u32>,
}

impl AppendReport {
    /// Durable records a second.
    pub fn records_per_s(&self) -> f64 {
        self.records as f64 / self.seconds
    }

    /// Bytes to the disk a second, in units of 10^6.
    pub fn disk_mb_per_s(&self) -> f64 {
        self.committed_bytes as f64 / self.seconds / 1e6
    }

    /// Mean bytes of a commit.
    pub fn bytes_per_commit(&self) -> f64 {
        self.committed_bytes as f64 / self.commits.max(1) as f64
    }

    /// Mean records of a commit.
    pub fn records_per_commit(&self) -> f64 {
        self.records as f64 / self.commits.max(1) as f64
    }
}

/// Runs closed-loop appends against a storage in a fresh directory below `dir`; blocks the caller.
pub fn bench_append(dir: &Path, bench: &AppendBench) -> Result<AppendReport, StorageError> {
    let dir = dir.join(format!("bench-append-{}", std::process::id()));
    let report = run(&dir, bench);
    std::fs::remove_dir_all(&dir).map_err(|error| StorageError::io("removing", &dir, error))?;
    report
}

fn run(dir: &Path, bench: &AppendBench) -> Result<AppendReport, StorageError> {
    let recovered = recover(dir, 1)?;
    let mut config = StorageConfig::new(dir, 0, 1);
    config.sync = bench.sync;
    config.commits_in_flight = bench.commits_in_flight;
    config.commit_max_bytes = bench.commit_max_bytes;
    config.early_commit_bytes = bench.early_commit_bytes;
    config.max_queued_bytes = config.max_queued_bytes.max(bench.commit_max_bytes * 8);
    if bench.spares > 0 {
        config.prewritten_segments = bench.spares;
        config.refill_below_segments = 1;
    }
    let warm_up = prepare_warm_up_file(dir);
    let spec = CoreSpec {
        cpu: bench.cpu,
        name: "bench-append".to_owned(),
        warm_up_file: Some(warm_up.map_err(|error| StorageError::io("writing", dir, error))?),
        ..CoreSpec::new(0)
    };
    let bench = bench.clone();
    let core = spawn_core(spec, move || async move {
        let storage = Storage::open(config, recovered).await?;
        let report = Load::open(&storage, &bench)?.run().await?;
        storage.close().await?;
        Ok(report)
    });
    let failed = |error: &dyn std::fmt::Display| StorageError::Failed(error.to_string());
    core.map_err(|error| failed(&error))?
        .join()
        .map_err(|error| failed(&error))?
}

/// Appends made at the same time.
struct Sent {
    at: Instant,
    appends: u32,
}

struct Load<'a> {
    storage: &'a Storage,
    bench: &'a AppendBench,
    logs: Vec<LogRef>,
    next_log: usize,
    next_token: u64,
    sent: VecDeque<Sent>,
    outstanding: u32,
    /// Latencies in microseconds, and of how many appends.
    latencies: Vec<(u32, u32)>,
    sizes: Vec<u32>,
    committed: (u64, u64),
    /// How far each log was read.
    read_to: Vec<u64>,
    tail_records: u64,
    records: u64,
}

impl<'a> Load<'a> {
    fn open(storage: &'a Storage, bench: &'a AppendBench) -> Result<Self, StorageError> {
        let logs = open_logs(storage, bench.shards)?;
        Ok(Self {
            storage,
            bench,
            read_to: vec![0; logs.len()],
            logs,
            next_log: 0,
            next_token: 0,
            sent: VecDeque::new(),
            outstanding: 0,
            latencies: Vec::new(),
            sizes: Vec::with_capacity(SIZES_MAX),
            committed: (0, 0),
            tail_records: 0,
            records: 0,
        })
    }

    async fn run(mut self) -> Result<AppendReport, StorageError> {
        while self.storage.stats().spare_segments < self.bench.spares as u64 {
            sleep(Duration::from_millis(5)).await;
        }
        let payload = vec![0x5au8; self.bench.payload_bytes];
        let batch = vec![payload.as_slice(); self.bench.batch.max(1) as usize];
        let signal = self.storage.signal();
        let measure_from = Instant::now() + self.bench.warm_up;
        let end = measure_from + self.bench.duration;
        let mut before = None;
        let mut done = Vec::new();
        loop {
            let now = Instant::now();
            if before.is_none() && now >= measure_from {
                self.latencies.clear();
                self.sizes.clear();
                self.records = 0;
                self.tail_records = 0;
                before = Some((now, thread_cpu(), self.storage.stats()));
            }
            if now >= end {
                break;
            }
            self.append(&batch, now)?;
            self.storage.kick();
            self.look(&signal);
            signal.wait_take().await;
            self.storage.poll_completions(&mut done);
            self.take(&done)?;
            if self.bench.tail_reads {
                self.read_tails(&done);
            }
            done.clear();
            yield_if_needed().await;
        }
        let Some((started, cpu, before)) = before else {
            return Err(StorageError::Failed("the run was too short".to_owned()));
        };
        let after = self.storage.stats();
        let report = AppendReport {
            records: self.records,
            seconds: started.elapsed().as_secs_f64(),
            commits: after.machine.commits - before.machine.commits,
            committed_bytes: after.machine.committed_bytes - before.machine.committed_bytes,
            latency_us: Percentiles::of_runs(&mut self.latencies),
            cpu_s: (thread_cpu() - cpu).as_secs_f64(),
            segment_waits: after.machine.segment_waits - before.machine.segment_waits,
            segments_zeroed: (after.segments_made + after.spare_segments)
                .saturating_sub(before.segments_made + before.spare_segments),
            tail_records: self.tail_records,
            sizes: self.sizes,
        };
        // What is under way is waited for, so that nothing else uses the disk after the report.
        while self.outstanding > 0 {
            self.storage.poll_completions(&mut done);
            self.outstanding -= done.len() as u32;
            done.clear();
            yield_now().await;
        }
        Ok(report)
    }

    /// Looks for outcomes for a while: to be woken costs more than a short look.
    fn look(&self, signal: &Signal) {
        if self.bench.spin.is_zero() {
            return;
        }
        let until = Instant::now() + self.bench.spin;
        while !signal.is_set() && Instant::now() < until {
            std::hint::spin_loop();
            self.storage.kick();
        }
    }

    fn append(&mut self, batch: &[&[u8]], now: Instant) -> Result<(), StorageError> {
        let missing = self.bench.outstanding.max(1) - self.outstanding;
        let time_us = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_micros() as u64);
        for _ in 0..missing {
            let log = self.logs[self.next_log];
            self.next_log += 1;
            if self.next_log == self.logs.len() {
                self.next_log = 0;
            }
            self.storage
                .append(log, 1, time_us, batch.iter().copied(), self.next_token)
                .map_err(|error| StorageError::Failed(error.to_string()))?;
            self.next_token += 1;
        }
        if missing > 0 {
            self.sent.push_back(Sent {
                at: now,
                appends: missing,
            });
            self.outstanding += missing;
        }
        Ok(())
    }

    fn take(&mut self, done: &[Completion]) -> Result<(), StorageError> {
        let now = Instant::now();
        if let Some(failed) = done.iter().find_map(|done| done.result.err()) {
            return Err(StorageError::Failed(failed.to_string()));
        }
        let mut left = done.len() as u32;
        self.outstanding -= left;
        self.records += u64::from(left) * u64::from(self.bench.batch.max(1));
        while left > 0 {
            // Outcomes come in the order of the appends.
            let Some(first) = self.sent.front_mut() else {
                break;
            };
            let taken = left.min(first.appends);
            let us = u32::try_from((now - first.at).as_micros()).unwrap_or(u32::MAX);
            self.latencies.push((us, taken));
            first.appends -= taken;
            left -= taken;
            if first.appends == 0 {
                self.sent.pop_front();
            }
        }
        let (commits, bytes) = self.storage.committed();
        let new = commits - self.committed.0;
        let mean = (bytes - self.committed.1).checked_div(new).unwrap_or(0);
        for _ in 0..new {
            if self.sizes.len() < SIZES_MAX {
                self.sizes.push(mean as u32);
            }
        }
        self.committed = (commits, bytes);
        Ok(())
    }

    /// Reads what became durable, as subscribers at the tail do.
    fn read_tails(&mut self, done: &[Completion]) {
        let mut last = None;
        for log in done.iter().map(|done| done.log) {
            // One log often has many outcomes in a row.
            if last.replace(log) == Some(log) {
                continue;
            }
            let from = &mut self.read_to[log.0 as usize];
            while let Some(batch) = self.storage.read_recent(log, *from, TAIL_READ_BYTES) {
                self.tail_records += batch.records.len() as u64;
                *from = batch.next_offset;
            }
        }
    }
}
