//! Readers: at the tail while it is written, and of what has left memory.

use anyhow::Result;
use serde::{Deserialize, Serialize};
use storage_uring::bench::{bench_read, ReadBench, ReadReport};

use super::cell::{Bench, FileState};
use super::AppendBench;
use crate::meter::Spread;

/// Appends with and without readers at the tail.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TailCell {
    /// Shards written to in turn, and read.
    pub shards: u32,
    /// Bytes of a record.
    pub payload_bytes: u64,
    /// Records of one append.
    pub batch: u32,
    /// Records a second without readers.
    pub alone_per_s: Spread,
    /// Records a second with them.
    pub with_readers_per_s: Spread,
    /// The second by the first, of each round.
    pub ratio: Spread,
    /// Records read by those written; what is not read yet is the rest.
    pub read_share: f64,
}

/// Reads of what is not in memory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReadCell {
    /// Logs, written in turn and read one after the other.
    pub shards: u32,
    /// Records of one append.
    pub batch: u32,
    /// Payload asked for in one read.
    pub read_bytes: u64,
    /// 10^6 payload bytes a second.
    pub payload_mb_per_s: Spread,
    /// Mean bytes of a device read.
    pub device_read_bytes: f64,
    /// Bytes from the device by those of payload.
    pub amplification: f64,
    /// Bytes from the device a second, by those of raw reads of that size, both one at a time.
    pub ratio_to_raw: Spread,
    /// CPU seconds of the core for each second.
    pub cpu_share: f64,
    /// Recovery of all that was written, in seconds.
    pub recovery_s: Spread,
    /// The same, for a GiB of segments.
    pub recovery_s_per_gib: Spread,
}

pub(super) fn measure_tail(bench: &mut Bench, shape: &AppendBench) -> Result<TailCell> {
    let (mut alone, mut read, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    let (mut written, mut taken) = (0u64, 0u64);
    for _ in 0..bench.rounds() {
        let without = bench.run(shape, FileState::Ready)?;
        let readers = AppendBench {
            tail_reads: true,
            ..shape.clone()
        };
        let with = bench.run(&readers, FileState::Ready)?;
        ratios.push(with.records_per_s() / without.records_per_s());
        alone.push(without.records_per_s());
        read.push(with.records_per_s());
        written += with.records;
        taken += with.tail_records;
    }
    Ok(TailCell {
        shards: shape.shards,
        payload_bytes: shape.payload_bytes as u64,
        batch: shape.batch,
        alone_per_s: Spread::of(alone),
        with_readers_per_s: Spread::of(read),
        ratio: Spread::of(ratios),
        read_share: taken as f64 / written.max(1) as f64,
    })
}

pub(super) fn measure_cold(bench: &Bench, shape: &ReadBench) -> Result<ReadCell> {
    let shape = ReadBench {
        cpu: bench.cpu,
        ..shape.clone()
    };
    let runs = (0..bench.rounds())
        .map(|_| bench_read(bench.dir(), &shape))
        .collect::<Result<Vec<_>, _>>()?;
    let spread = |of: fn(&ReadReport) -> f64| Spread::of(runs.iter().map(of));
    Ok(ReadCell {
        shards: shape.shards,
        batch: shape.batch,
        read_bytes: shape.read_bytes as u64,
        payload_mb_per_s: spread(|run| run.payload_mb_per_s),
        device_read_bytes: spread(|run| run.device_read_bytes).median,
        amplification: spread(|run| run.device_mb_per_s / run.payload_mb_per_s.max(1e-9)).median,
        ratio_to_raw: spread(ReadReport::ratio),
        cpu_share: spread(|run| run.cpu_share).median,
        recovery_s: spread(|run| run.recovery_s),
        recovery_s_per_gib: spread(ReadReport::recovery_s_per_gib),
    })
}
