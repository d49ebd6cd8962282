//! What one publish alone can take: the hops of its path and its durable write, each measured by itself
//! between the rounds of the same run.
//!
//! A hop is one echo of the record through the broker's own transport with both ends asleep in between;
//! the write is one O_DIRECT, O_DSYNC write of the blocks the record fills. What a broker takes on top is
//! its own.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;

use crate::cpu::CpuPlan;
use crate::disk::measure_disk;
use crate::meter::Spread;
use crate::report::OneOutstanding;
use crate::transport::{measure, ServerProcess, Shape, Side};

/// Length of each of the two measurements; they are made once a round.
const PROBE_DURATION: Duration = Duration::from_millis(500);
/// Size of the file written over and over.
const FILE_BYTES: u64 = 32 << 20;
/// A commit group is written in blocks of this size, its header included.
const BLOCK_BYTES: usize = 4096;
/// More than the header of a group and of a record.
const GROUP_OVERHEAD_BYTES: usize = 256;

/// One round of both measurements.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PathSample {
    /// Median of an echo.
    pub echo_us: f64,
    /// Median of a durable write.
    pub write_us: f64,
}

impl PathSample {
    fn floor_us(&self, hops: u32) -> f64 {
        f64::from(hops) * self.echo_us + self.write_us
    }
}

/// The ends of the measurements; its process ends when it is dropped.
pub struct PathProbe {
    server: ServerProcess,
    file: PathBuf,
    client_cpu: usize,
    payload_bytes: usize,
}

impl PathProbe {
    /// Starts the far end on the CPU of the first broker.
    pub fn start(dir: &Path, plan: &CpuPlan, payload_bytes: usize) -> Result<Self> {
        let home = dir.join("path-probe");
        std::fs::create_dir_all(&home)?;
        Ok(Self {
            server: ServerProcess::start(&home, Side::Felix, plan.brokers[0][0], 0)?,
            file: home.join("writes"),
            client_cpu: plan.client,
            payload_bytes,
        })
    }

    /// Measures both.
    pub fn sample(&self) -> Result<PathSample> {
        let shape = Shape::Echo {
            bytes: self.payload_bytes,
            outstanding: 1,
        };
        let echo = measure(
            Side::Felix,
            &self.server,
            self.client_cpu,
            0,
            shape,
            PROBE_DURATION,
        )?;
        let blocks = (self.payload_bytes + GROUP_OVERHEAD_BYTES).div_ceil(BLOCK_BYTES);
        let write = measure_disk(
            &self.file,
            FILE_BYTES,
            blocks * BLOCK_BYTES,
            1,
            PROBE_DURATION,
        )?;
        Ok(PathSample {
            echo_us: echo.latency_ns(0.5) as f64 / 1e3,
            write_us: write.median_us,
        })
    }
}

/// Sets each round's median latency against what its path alone took in the same round.
pub fn one_outstanding(
    hops: u32,
    p50_us: &[f64],
    samples: &[PathSample],
) -> Option<OneOutstanding> {
    if samples.is_empty() || samples.len() != p50_us.len() {
        return None;
    }
    let ratios = Spread::of(
        p50_us
            .iter()
            .zip(samples)
            .map(|(p50, sample)| p50 / sample.floor_us(hops).max(1e-3)),
    );
    Some(OneOutstanding {
        p50_us: Spread::of(p50_us.iter().copied()),
        hops: u64::from(hops),
        echo_p50_us: Spread::of(samples.iter().map(|s| s.echo_us)),
        write_p50_us: Spread::of(samples.iter().map(|s| s.write_us)),
        ratio: ratios,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_are_compared_with_their_own_samples() {
        let sample = |echo_us, write_us| PathSample { echo_us, write_us };
        let of = one_outstanding(
            2,
            &[400.0, 900.0, 300.0],
            &[
                sample(100.0, 200.0),
                sample(200.0, 200.0),
                sample(50.0, 100.0),
            ],
        )
        .unwrap();
        assert_eq!(
            (of.ratio.median, of.ratio.min, of.ratio.max),
            (1.5, 1.0, 1.5)
        );
        assert_eq!(of.echo_p50_us.median, 100.0);
        assert_eq!(of.p50_us.median, 400.0);
        assert_eq!(one_outstanding(2, &[1.0], &[]), None);
    }
}
