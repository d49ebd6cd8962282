//! Measurements: the storage alone, and what it is compared with.
//!
//! `bench_append` drives a real `Storage` with closed-loop appends. `RawFiles` writes to pre-written files
//! with nothing around it: the limit. `bench_read` reads a log from the disk, beside raw reads of the same
//! files. `per_shard_probe` is the layout not chosen, one file a shard, for the decision record. All block
//! the calling thread and remove what they wrote.

mod load;
mod probes;
mod reads;
mod recovery;

use std::time::Duration;

use serde::Serialize;

use crate::driver::Storage;
use crate::error::StorageError;
use crate::machine::LogRef;
use crate::name::{LogKind, LogName};

pub use load::{bench_append, AppendBench, AppendReport};
pub use probes::{per_shard_probe, RawFiles, RawReport};
pub use reads::{bench_read, ReadBench, ReadReport};
pub use recovery::{bench_recovery, RecoveryBench, RecoveryRun};

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
    /// Of single values.
    pub(crate) fn of(samples: &[u32]) -> Self {
        let mut runs: Vec<(u32, u32)> = samples.iter().map(|us| (*us, 1)).collect();
        Self::of_runs(&mut runs)
    }

    /// Of values and how often each occurred.
    pub(crate) fn of_runs(runs: &mut [(u32, u32)]) -> Self {
        runs.sort_unstable();
        let total: u64 = runs.iter().map(|(_, count)| u64::from(*count)).sum();
        let at = |share: f64| {
            let wanted = (total as f64 * share) as u64;
            let mut passed = 0;
            for (us, count) in runs.iter() {
                passed += u64::from(*count);
                if passed > wanted {
                    return *us;
                }
            }
            runs.last().map_or(0, |(us, _)| *us)
        };
        Self {
            p50: at(0.5),
            p99: at(0.99),
            p999: at(0.999),
            max: at(1.0),
        }
    }
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

/// The name of the log of a shard that is measured with.
pub(crate) fn log_name(shard: u32) -> LogName {
    LogName {
        kind: LogKind::Stream,
        tenant: "t1".to_owned(),
        namespace: "default".to_owned(),
        name: "bench".to_owned(),
        shard,
    }
}

/// Opens the logs of `shards` shards, at least one.
pub(crate) fn open_logs(storage: &Storage, shards: u32) -> Result<Vec<LogRef>, StorageError> {
    let opened = (0..shards.max(1)).map(|shard| storage.open_log(&log_name(shard)));
    let failed = |error: crate::error::LogError| StorageError::Failed(error.to_string());
    opened.map(|log| log.map_err(failed)).collect()
}
