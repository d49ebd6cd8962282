//! `beside`: small forwarded publishes alone, then beside batches of nearly 16 MiB that keep the same link
//! between the same two brokers busy.

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use felix_uring::cli::{CommandError, Exit};
use serde::{Deserialize, Serialize};

use super::args::ForwardArgs;
use super::cluster::Destination;
use super::readback::read_back_shard;
use super::stages::{stages, Moment, Stages};
use crate::client::{run_load, LoadReport, LoadSpec, Progress};
use crate::cpu::{plan_cpus, usable_cpus, CpuPlan, CpuShare};
use crate::meter::{LatencySummary, Spread};
use crate::place::random_u64;
use crate::report::percentiles;
use crate::run_args::{OutputArgs, ServeArgs};
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
    /// Where data and report go.
    #[command(flatten)]
    pub output: OutputArgs,
    /// What the brokers are told beside.
    #[command(flatten)]
    pub serve: ServeArgs,
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
    /// Records of large batches acknowledged, from before the small ones to after them.
    pub large_records: u64,
    /// Where the small ones spent their time, alone.
    pub alone_stages: Stages,
    /// The same beside large batches.
    pub beside_stages: Stages,
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

/// Runs the command.
pub fn run_beside(args: &BesideArgs, out: &mut dyn Write) -> Result<Exit, CommandError> {
    let report = measure(args).map_err(|error| CommandError::failed(format!("{error:#}")))?;
    print(&report, out).map_err(CommandError::failed)?;
    let saved = args.output.save(&report);
    saved.map_err(|e| CommandError::failed(format!("{e:#}")))?;
    Ok(match report.clean {
        true => Exit::Done,
        false => Exit::Damaged,
    })
}

fn measure(args: &BesideArgs) -> anyhow::Result<BesideReport> {
    let mut cluster_args = ForwardArgs::of(&["--shards=2"])?;
    cluster_args.serve = args.serve.clone();
    let plan = plan_cpus(&usable_cpus(), 2, 1);
    let dir = args.output.work_dir(1);
    let dir = dir.map_err(|e| anyhow::anyhow!(e.message))?;
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
        let cluster = destination.own.as_ref().context("no cluster of our own")?;
        let before = Moment::take(cluster)?;
        let alone = run.small(&destination)?;
        let between = Moment::take(cluster)?;
        let (beside, large) = run.beside(&destination)?;
        let after = Moment::take(cluster)?;
        let alone_us = alone.meter.latency().summary();
        let beside_us = beside.meter.latency().summary();
        rounds.push(BesideRound {
            alone_stages: stages(&before, &between, alone_us.p50),
            beside_stages: stages(&between, &after, beside_us.p50),
            alone_us,
            beside_us,
            large_records: large.tally.acked * u64::from(LARGE_BATCH),
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
            targets: vec![target],
            connections: 1,
            in_flight: usize::from(match is_large {
                true => self.args.large_in_flight,
                false => self.args.small_in_flight,
            }),
            batch: if is_large { LARGE_BATCH } else { 1 },
            payload_bytes: match is_large {
                true => LARGE_RECORD_BYTES,
                false => self.args.small_bytes as usize,
            },
            warmup: LEAD,
            duration: self.args.duration + if is_large { 2 * LEAD } else { Duration::ZERO },
            first_writer,
            share: match is_large {
                true => CpuShare::GivesWay,
                false => CpuShare::ComesSoon,
            },
            ..destination.load_spec(self.run, self.plan)
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

fn told(stages: &Stages) -> String {
    format!(
        "medians: client {:.0} us, ingress {:.0} us, link {:.0} us, owner {:.0} us",
        stages.client_us, stages.ingress_us, stages.link_us, stages.owner_us
    )
}

fn print(report: &BesideReport, out: &mut dyn Write) -> std::io::Result<()> {
    for round in &report.rounds {
        writeln!(out, "alone     {}", percentiles(&round.alone_us))?;
        writeln!(out, "          {}", told(&round.alone_stages))?;
        writeln!(
            out,
            "beside    {}   ({:.0} MB/s of large batches)",
            percentiles(&round.beside_us),
            round.large_mb_per_s
        )?;
        writeln!(out, "          {}", told(&round.beside_stages))?;
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
