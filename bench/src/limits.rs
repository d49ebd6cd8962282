//! What the machine allows: the disk's durable writes, and the CPU cost of a bare QUIC hop.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use felix_uring::cli::CommandError;
use serde::{Deserialize, Serialize};

use crate::cpu::{plan_cpus, CpuPlan};
use crate::disk::{measure_disk, DiskRate};
use crate::place::WorkDir;
use crate::report::{micros, write_json};
use crate::transport::{measure, ServerProcess, Shape, Side};
use crate::units::{parse_bytes, parse_duration};

/// As many durable writes at once as the broker has groups on their way.
const DEPTH: usize = 2;
/// Size of the file written over and over.
const FILE_BYTES: u64 = 256 << 20;

/// Flags of `limits`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:\n  \
    # The disk at one commit group of 256 KiB, and one QUIC hop\n  \
    felix-bench limits\n\n  \
    # The disk the brokers will use, at the group size a run reported\n  \
    felix-bench limits --data-dir /var/lib/felix --write-bytes 64K --json limits.json\n\n\
    The bound of a forwarded publish is the smaller of the disk's rate and\n\
    CPUs / (CPU seconds a byte costs at all QUIC ends on its path).")]
pub struct LimitsArgs {
    /// Directory on the file system to measure
    #[arg(long, value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// Size of a durable write
    #[arg(long, default_value = "256K", value_name = "BYTES", value_parser = parse_bytes)]
    pub write_bytes: u64,
    /// Length of each measurement
    #[arg(long, default_value = "3s", value_parser = parse_duration)]
    pub duration: Duration,
    /// Write the figures to a file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// The report of `limits`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct LimitsReport {
    /// The form.
    pub schema: String,
    /// Size of a durable write.
    pub disk_write_bytes: u64,
    /// Durable writes of that size, two at once, in 10^6 bytes a second.
    pub disk_append_mb_per_s: f64,
    /// The same, writes a second.
    pub disk_writes_per_s: f64,
    /// Mean time of one, two being under way.
    pub disk_write_mean_us: f64,
    /// One small durable write at a time: its mean time.
    pub disk_single_4k_us: f64,
    /// CPU seconds of both ends of one hop on 10^9 bytes.
    pub quic_cpu_s_per_gb: f64,
    /// Rate of that hop.
    pub quic_mb_per_s: f64,
    /// CPUs taken into account.
    pub cpus: u64,
    /// Bound of a publish sent to its owner.
    pub direct_bound_mb_per_s: f64,
    /// Bound of a forwarded one.
    pub forward_bound_mb_per_s: f64,
}

/// CPU of one bare hop.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HopCost {
    /// CPU seconds of both ends on 10^9 bytes.
    pub cpu_s_per_gb: f64,
    /// 10^6 bytes a second.
    pub mb_per_s: f64,
}

/// Measures the disk under a directory.
pub fn disk(dir: &Path, write_bytes: u64, depth: usize, duration: Duration) -> Result<DiskRate> {
    let path = dir.join("disk-probe");
    let rate = measure_disk(&path, FILE_BYTES, write_bytes as usize, depth, duration);
    // It goes with the directory if it cannot be removed now.
    let _ = std::fs::remove_file(&path);
    Ok(rate?)
}

/// Measures one bare hop between two CPUs.
pub fn hop(
    dir: &Path,
    sender_cpu: usize,
    receiver_cpu: usize,
    duration: Duration,
) -> Result<HopCost> {
    let mut server = ServerProcess::start(dir, Side::Felix, receiver_cpu, 0)?;
    let sent = measure(Side::Felix, &server, sender_cpu, 0, Shape::Bulk, duration)?;
    let served = server.last_connection()?;
    let receiver = served.cpu_s / (served.bytes.max(1) as f64 / 1e9);
    Ok(HopCost {
        cpu_s_per_gb: sent.cpu_s_per_gb() + receiver,
        mb_per_s: sent.bytes as f64 / sent.seconds.max(1e-9) / 1e6,
    })
}

/// The smaller of the disk's rate and what `cpus` allow `hops` hops.
pub fn bound_mb_per_s(disk_mb_per_s: f64, hop_cpu_s_per_gb: f64, hops: u32, cpus: usize) -> f64 {
    let per_gb = hop_cpu_s_per_gb * f64::from(hops);
    disk_mb_per_s.min(cpus as f64 / per_gb.max(1e-12) * 1e3)
}

/// `limits`.
pub fn run_limits(args: &LimitsArgs, out: &mut dyn Write) -> Result<(), CommandError> {
    let dir = WorkDir::for_logs(args.data_dir.as_deref(), 1, 128)?;
    let plan = plan_cpus(&crate::cpu::usable_cpus(), 2, 1);
    let report =
        measure_limits(&dir, &plan, args).map_err(|e| CommandError::failed(format!("{e:#}")))?;
    print(&report, out).map_err(CommandError::failed)?;
    if let Some(path) = &args.json {
        write_json(path, &report).map_err(|e| CommandError::failed(format!("{e:#}")))?;
    }
    Ok(())
}

fn measure_limits(dir: &WorkDir, plan: &CpuPlan, args: &LimitsArgs) -> Result<LimitsReport> {
    let rate = disk(dir.path(), args.write_bytes, DEPTH, args.duration)?;
    let single = disk(dir.path(), 4096, 1, args.duration)?;
    let ingress = plan.brokers[0][0];
    let hop = hop(dir.path(), plan.client, ingress, args.duration)?;
    let bound = |hops| bound_mb_per_s(rate.mb_per_s, hop.cpu_s_per_gb, hops, plan.distinct);
    Ok(LimitsReport {
        schema: "felix-bench-limits/1".into(),
        disk_write_bytes: args.write_bytes.next_multiple_of(4096),
        disk_append_mb_per_s: rate.mb_per_s,
        disk_writes_per_s: rate.writes_per_s,
        disk_write_mean_us: rate.mean_us,
        disk_single_4k_us: single.mean_us,
        quic_cpu_s_per_gb: hop.cpu_s_per_gb,
        quic_mb_per_s: hop.mb_per_s,
        cpus: plan.distinct as u64,
        direct_bound_mb_per_s: bound(1),
        forward_bound_mb_per_s: bound(2),
    })
}

fn print(r: &LimitsReport, out: &mut dyn Write) -> std::io::Result<()> {
    writeln!(
        out,
        "disk     {:.0} MB/s in durable writes of {} KiB, {DEPTH} at once ({:.0}/s, {} each)",
        r.disk_append_mb_per_s,
        r.disk_write_bytes / 1024,
        r.disk_writes_per_s,
        micros(r.disk_write_mean_us)
    )?;
    writeln!(
        out,
        "         {} for one of 4 KiB alone",
        micros(r.disk_single_4k_us)
    )?;
    writeln!(
        out,
        "QUIC     {:.2} CPU s/GB for both ends of one hop, at {:.0} MB/s",
        r.quic_cpu_s_per_gb, r.quic_mb_per_s
    )?;
    writeln!(
        out,
        "bound    {:.0} MB/s direct, {:.0} MB/s forwarded, on {} CPUs",
        r.direct_bound_mb_per_s, r.forward_bound_mb_per_s, r.cpus
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smaller_one_bounds() {
        // Two CPUs, 3 s/GB a hop, two hops: a third of a GB a second.
        let cpu = bound_mb_per_s(1_500.0, 3.0, 2, 2);
        assert!((cpu - 333.3).abs() < 0.1, "{cpu}");
        assert_eq!(bound_mb_per_s(100.0, 3.0, 2, 2), 100.0);
    }
}
