//! Starts over shards nobody writes to: how long they take, and the memory a shard costs afterwards.

use anyhow::Result;
use serde::{Deserialize, Serialize};
use storage_uring::bench::{bench_recovery, RecoveryBench, RecoveryRun};

use super::cell::Bench;
use crate::meter::Spread;

/// A start.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StartCell {
    /// Logs.
    pub shards: u32,
    /// Records in them.
    pub records: u64,
    /// Bytes of the segments.
    pub bytes: u64,
    /// Seconds of the recovery.
    pub recovery_s: Spread,
    /// The same, for a GiB of segments.
    pub recovery_s_per_gib: Spread,
    /// Seconds until all logs were open.
    pub start_s: Spread,
    /// What the process grew by until then; the median.
    pub grown_bytes: u64,
    /// That, less what one log costs, for each log beyond the first; none for one log.
    pub bytes_per_shard: Option<f64>,
}

pub(super) fn measure_start(
    bench: &Bench,
    shape: &RecoveryBench,
    base_bytes: Option<u64>,
) -> Result<StartCell> {
    let shape = RecoveryBench {
        cpu: bench.cpu,
        ..shape.clone()
    };
    let runs = (0..bench.rounds())
        .map(|_| bench_recovery(bench.dir(), &shape))
        .collect::<Result<Vec<_>, _>>()?;
    let spread = |of: fn(&RecoveryRun) -> f64| Spread::of(runs.iter().map(of));
    let grown = spread(|run| run.grown_bytes as f64).median;
    let others = f64::from(shape.shards.saturating_sub(1));
    let beyond = base_bytes.map(|base| (grown - base as f64).max(0.0) / others.max(1.0));
    let last = runs.last();
    Ok(StartCell {
        shards: shape.shards,
        records: last.map_or(0, |run| run.records),
        bytes: last.map_or(0, |run| run.bytes),
        recovery_s: spread(|run| run.recovery_s),
        recovery_s_per_gib: spread(RecoveryRun::s_per_gib),
        start_s: spread(|run| run.start_s),
        grown_bytes: grown as u64,
        bytes_per_shard: beyond.filter(|_| shape.shards > 1),
    })
}
