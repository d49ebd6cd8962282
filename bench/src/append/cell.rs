//! One cell: the storage and the raw probe in turns.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{AppendArgs, AppendBench, RawFiles, FILES_MAX, FILE_BYTES, WARM_UP};
use crate::meter::Spread;
use anyhow::Result;
use serde::{Deserialize, Serialize};
use storage_uring::bench::{bench_append, AppendReport};

/// When the segments written to are zeroed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FileState {
    /// Before the load starts, as the files of the raw probe.
    Ready,
    /// While it writes: the disk carries each byte twice.
    Zeroing,
}

/// One line of a table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AppendCell {
    /// Shards written to in turn.
    pub shards: u32,
    /// Bytes of a record.
    pub payload_bytes: u64,
    /// Records of one append.
    pub batch: u32,
    /// Appends outstanding.
    pub outstanding: u32,
    /// Bytes after which a commit takes no further record.
    pub commit_max_bytes: u64,
    /// When the segments were zeroed.
    pub files: FileState,
    /// Records a second.
    pub records_per_s: Spread,
    /// 10^6 payload bytes a second.
    pub mb_per_s: f64,
    /// Bytes to the disk a second, by those of the raw writes.
    pub ratio_to_raw: Spread,
    /// 10^6 bytes a second of the raw writes.
    pub raw_mb_per_s: f64,
    /// Records of a commit.
    pub group_records: f64,
    /// Bytes of a commit.
    pub group_bytes: f64,
    /// From the append to its completion, median and 99 %, of the middle round.
    pub p50_us: f64,
    /// The same.
    pub p99_us: f64,
    /// CPU seconds of the core on a million records, the load included.
    pub cpu_s_per_million_records: f64,
    /// Segments zeroed during the measured times of all rounds.
    pub segments_zeroed: u64,
}

/// What all cells of a run share.
pub(super) struct Bench {
    dir: PathBuf,
    raw: RawFiles,
    rounds: u32,
    duration: Duration,
    pub cpu: Option<usize>,
}

impl Bench {
    pub fn prepare(dir: &Path, args: &AppendArgs) -> Result<Self> {
        let cpu = args.cpu.or_else(|| super::usable_cpus().first().copied());
        let mut raw = RawFiles::prepare(dir, 2, FILE_BYTES, cpu)?;
        // As many as the largest commits could fill; the probe goes over them again and again.
        let fastest = raw.write(&[1 << 20], 2, Duration::from_millis(200))?;
        let count = files_for(fastest.mb_per_s, args.duration / 2).min(FILES_MAX);
        drop(raw);
        Ok(Self {
            raw: RawFiles::prepare(dir, count, FILE_BYTES, cpu)?,
            dir: dir.to_path_buf(),
            rounds: args.rounds,
            duration: args.duration,
            cpu,
        })
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn rounds(&self) -> u32 {
        self.rounds
    }

    /// One run of the storage.
    pub fn run(&mut self, shape: &AppendBench, files: FileState) -> Result<AppendReport> {
        let spares = match files {
            FileState::Ready => {
                let size = shape.commit_max_bytes.min(1 << 20) as u32;
                let limit = self.raw.write(&[size], 2, Duration::from_millis(100))?;
                files_for(limit.mb_per_s, self.duration + WARM_UP).min(FILES_MAX)
            }
            FileState::Zeroing => 0,
        };
        let shape = AppendBench {
            spares,
            cpu: self.cpu,
            ..shape.clone()
        };
        Ok(bench_append(&self.dir, &shape)?)
    }

    pub fn measure(&mut self, shape: &AppendBench, files: FileState) -> Result<AppendCell> {
        let (mut rates, mut ratios, mut raws) = (Vec::new(), Vec::new(), Vec::new());
        let mut runs = Vec::new();
        for _ in 0..self.rounds {
            let run = self.run(shape, files)?;
            let depth = shape.commits_in_flight;
            let raw = self.raw.write(&run.sizes, depth, self.duration / 2)?;
            rates.push(run.records_per_s());
            ratios.push(run.disk_mb_per_s() / raw.mb_per_s);
            raws.push(raw.mb_per_s);
            runs.push(run);
        }
        let rates = Spread::of(rates);
        let sum = |of: fn(&AppendReport) -> u64| runs.iter().map(of).sum::<u64>();
        let (records, commits) = (sum(|run| run.records), sum(|run| run.commits).max(1));
        let cpu_s: f64 = runs.iter().map(|run| run.cpu_s).sum();
        let percentile = |of: fn(&AppendReport) -> u32| {
            Spread::of(runs.iter().map(|run| f64::from(of(run)))).median
        };
        Ok(AppendCell {
            shards: shape.shards,
            payload_bytes: shape.payload_bytes as u64,
            batch: shape.batch,
            outstanding: shape.outstanding,
            commit_max_bytes: shape.commit_max_bytes as u64,
            files,
            records_per_s: rates,
            mb_per_s: rates.median * shape.payload_bytes as f64 / 1e6,
            ratio_to_raw: Spread::of(ratios),
            raw_mb_per_s: Spread::of(raws).median,
            group_records: records as f64 / commits as f64,
            group_bytes: sum(|run| run.committed_bytes) as f64 / commits as f64,
            p50_us: percentile(|run| run.latency_us.p50),
            p99_us: percentile(|run| run.latency_us.p99),
            cpu_s_per_million_records: cpu_s / (records.max(1) as f64 / 1e6),
            segments_zeroed: sum(|run| run.segments_zeroed),
        })
    }
}

/// Files that a disk of this rate fills in a time, with some to spare.
fn files_for(mb_per_s: f64, time: Duration) -> usize {
    (mb_per_s * 1e6 * 1.2 * time.as_secs_f64() / FILE_BYTES as f64) as usize + 3
}
