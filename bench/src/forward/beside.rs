//! `beside`: small forwarded publishes alone, then beside batches of nearly 16 MiB that keep the same link
//! between the same two brokers busy.

use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, Parser};
use felix_uring::cli::{CommandError, Exit};
use serde::{Deserialize, Serialize};

use super::args::ForwardArgs;
use super::cluster::Destination;
use super::readback::read_back_shard;
use crate::client::{run_load, LoadReport, LoadSpec, Progress, Protocol};
use crate::cpu::{plan_cpus, usable_cpus, CpuPlan};
use crate::meter::{LatencySummary, Spread};
use crate::place::{random_u64, WorkDir};
use crate::report::{percentiles, write_json};
use crate::schedule::Pace;
use crate::units::parse_duration;
use crate::verify::Ledger;

/// Fifteen records of a MiB: as large as a client's frame may be.
const LARGE_RECORD_BYTES: usize = 1 << 20;
const LARGE_BATCH: u32 = 15;
/// The shard of the small publishes, and that of the large batches.
const SMALL_SHARD: u32 = 0;
const LARGE_SHARD: u32 = 1;
/// The large load begins this long before the small one is measured and ends as long after it.
const LEAD: Duration = Duration::from_millis(500);

/// Flags of `beside`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:\n  \
    # Three rounds: small publishes alone, then beside large batches\n  \
    felix-bench beside\n\n  \
    # More of both\n  \
    felix-bench beside --rounds 5 --small-in-flight 8 --large-in-flight 4 --json beside.json\n\n\
    Both go to one broker, which forwards them over one connection to the owner of both shards. The\n\
    ratio is the 99th percentile beside the large batches by that of the same round without them.")]
pub struct BesideArgs {
    /// Length of each measurement
    #[arg(long, default_value = "2s", value_parser = parse_duration)]
    pub duration: Duration,
    /// Rounds of both measurements
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,
    /// Bytes of a small record
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(28..=65_536))]
    pub small_bytes: u64,
    /// Small publishes unanswered at most
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub small_in_flight: u16,
    /// Large batches unanswered at most
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub large_in_flight: u16,
    /// Directory for the brokers' data, on a file system with direct I/O
    #[arg(long, value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// Write the report to a file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// More flags for every broker started, after "--"
    #[arg(last = true, value_name = "SERVE FLAGS")]
    pub serve_flags: Vec<String>,
}

/// One round.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct BesideRound {
    /// Small publishes with nothing beside them.
    pub alone_us: LatencySummary,
    /// The same beside large batches.
    pub beside_us: LatencySummary,
    /// What the large batches moved meanwhile.
    pub large_mb_per_s: f64,
}

/// The report.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct BesideReport {
    /// The form.
    pub schema: String,
    /// Every round.
    pub rounds: Vec<BesideRound>,
    /// The 99th percentile beside by that alone, over the rounds.
    pub p99_ratio: Spread,
    /// Records found in the logs, and whether they are what was acknowledged.
    pub checked: u64,
    /// See `checked`.
    pub clean: bool,
}

#[derive(Parser)]
struct Defaults {
    #[command(flatten)]
    args: ForwardArgs,
}

/// Runs the command.
pub fn run_beside(args: &BesideArgs, out: &mut dyn Write) -> Result<Exit, CommandError> {
    let report = measure(args).map_err(|error| CommandError::failed(format!("{error:#}")))?;
    print(&report, out).map_err(CommandError::failed)?;
    if let Some(path) = &args.json {
        write_json(path, &report).map_err(|e| CommandError::failed(format!("{e:#}")))?;
    }
    Ok(match report.clean {
        true => Exit::Done,
        false => Exit::Damaged,
    })
}

fn measure(args: &BesideArgs) -> anyhow::Result<BesideReport> {
    let mut cluster_args = Defaults::try_parse_from(["felix-bench"])?.args;
    cluster_args.shards = 2;
    cluster_args.serve_flags = args.serve_flags.clone();
    let plan = plan_cpus(&usable_cpus(), 2, 1);
    let dir = WorkDir::for_logs(args.data_dir.as_deref(), 1, 128)
        .map_err(|e| anyhow::anyhow!(e.message))?;
    let mut destination = Destination::start(&cluster_args, dir.path(), &plan)?;
    let mut run = Run {
        args,
        plan: &plan,
        run: random_u64(),
        next_writer: 0,
        small: None,
        large: None,
    };
    let mut rounds = Vec::new();
    for _ in 0..args.rounds {
        let alone = run.small(&destination)?;
        let (beside, large) = run.beside(&destination)?;
        rounds.push(BesideRound {
            alone_us: alone.meter.latency().summary(),
            beside_us: beside.meter.latency().summary(),
            large_mb_per_s: large.meter.bytes() as f64 / large.meter.seconds() / 1e6,
        });
        run.keep_small(alone);
        run.keep_small(beside);
        run.keep_large(large);
        destination.check_alive()?;
    }
    destination.stop()?;
    let (mut checked, mut clean) = (0, true);
    let ledgers = [(run.small, SMALL_SHARD), (run.large, LARGE_SHARD)];
    for (ledger, shard) in ledgers {
        let Some(ledger) = ledger else { continue };
        let counts = read_back_shard(&destination, &ledger, shard)?;
        checked += counts.checked;
        clean &= counts.is_clean();
    }
    let ratios = rounds
        .iter()
        .map(|round: &BesideRound| round.beside_us.p99 / round.alone_us.p99.max(1e-3));
    Ok(BesideReport {
        schema: "felix-bench-beside/1".into(),
        p99_ratio: Spread::of(ratios),
        rounds,
        checked,
        clean,
    })
}

struct Run<'a> {
    args: &'a BesideArgs,
    plan: &'a CpuPlan,
    run: u64,
    next_writer: u32,
    small: Option<Ledger>,
    large: Option<Ledger>,
}

impl Run<'_> {
    fn spec(&mut self, destination: &Destination, is_large: bool) -> LoadSpec {
        let shard = match is_large {
            true => LARGE_SHARD,
            false => SMALL_SHARD,
        };
        let mut target = destination.targets[0].clone();
        target.shards = vec![shard];
        // Writers of one run are told apart by their number, whichever load they belong to.
        let first_writer = self.next_writer;
        self.next_writer += 16;
        LoadSpec {
            run: self.run,
            protocol: Protocol::Felix(destination.names.clone()),
            targets: vec![target],
            server_name: destination.server_name.clone(),
            tls: destination.tls.clone(),
            connections: 1,
            streams: 1,
            in_flight: usize::from(match is_large {
                true => self.args.large_in_flight,
                false => self.args.small_in_flight,
            }),
            batch: if is_large { LARGE_BATCH } else { 1 },
            payload_bytes: match is_large {
                true => LARGE_RECORD_BYTES,
                false => self.args.small_bytes as usize,
            },
            shard_count: destination.shards,
            keys: destination.keys.clone(),
            pace: Pace::Closed,
            warmup: LEAD,
            duration: self.args.duration + if is_large { 2 * LEAD } else { Duration::ZERO },
            request_timeout: Duration::from_secs(30),
            sockets: 1,
            cpu: Some(self.plan.client),
            first_writer,
        }
    }

    fn small(&mut self, destination: &Destination) -> anyhow::Result<LoadReport> {
        let spec = self.spec(destination, false);
        let progress = Arc::new(Progress::default());
        Ok(run_load(spec, progress, Arc::default())?)
    }

    fn beside(&mut self, destination: &Destination) -> anyhow::Result<(LoadReport, LoadReport)> {
        let large = self.spec(destination, true);
        let (progress, stop) = (
            Arc::new(Progress::default()),
            Arc::new(AtomicBool::new(false)),
        );
        let load = {
            let (progress, stop) = (progress.clone(), stop.clone());
            std::thread::spawn(move || run_load(large, progress, stop))
        };
        while progress.records() == 0 && !load.is_finished() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let small = self.small(destination);
        if small.is_err() {
            stop.store(true, Ordering::Relaxed);
        }
        let large = load
            .join()
            .map_err(|_| anyhow::anyhow!("the load generator panicked"))?;
        Ok((small?, large?))
    }

    fn keep_small(&mut self, report: LoadReport) {
        keep(&mut self.small, report);
    }

    fn keep_large(&mut self, report: LoadReport) {
        keep(&mut self.large, report);
    }
}

fn keep(kept: &mut Option<Ledger>, report: LoadReport) {
    match kept {
        Some(ledger) => ledger.absorb(report.ledger),
        none => *none = Some(report.ledger),
    }
}

fn print(report: &BesideReport, out: &mut dyn Write) -> std::io::Result<()> {
    for round in &report.rounds {
        writeln!(out, "alone     {}", percentiles(&round.alone_us))?;
        writeln!(
            out,
            "beside    {}   ({:.0} MB/s of large batches)",
            percentiles(&round.beside_us),
            round.large_mb_per_s
        )?;
    }
    writeln!(
        out,
        "p99       {:.2} ({:.2} to {:.2}) of that alone; {} records checked, {}",
        report.p99_ratio.median,
        report.p99_ratio.min,
        report.p99_ratio.max,
        report.checked,
        match report.clean {
            true => "all as acknowledged",
            false => "NOT as acknowledged",
        }
    )
}
