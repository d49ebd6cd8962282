//! `lose`: the owner of a shard is killed while forwards are on their way to it: how long until the broker that
//! forwards declares the connection lost, and how long from then until everything that waited is answered.

use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};
use clap::Args;
use felix_uring::cli::{CommandError, Exit};
use felix_uring::cluster::Cluster;
use serde::{Deserialize, Serialize};

use crate::client::{run_load, LoadReport, LoadSpec, Progress};
use crate::cpu::{plan_cpus, usable_cpus, CpuPlan};
use crate::forward::{metric, read_back_shard, Destination, ForwardArgs};
use crate::meter::Spread;
use crate::place::random_u64;
use crate::run_args::{OutputArgs, ServeArgs};
use crate::units::{parse_bytes, parse_duration};
use crate::verify::Ledger;

/// The broker that forwards, and the one that is killed.
const INGRESS: usize = 0;
const OWNER: usize = 1;
/// The load runs this long before the kill.
const LEAD: Duration = Duration::from_secs(1);
/// How often the broker is asked whether it has noticed.
const STEP: Duration = Duration::from_millis(2);
/// Longer than any idle timeout worth measuring.
const PATIENCE: Duration = Duration::from_secs(60);
/// Connections to the owner declared lost, and the seconds until their last waiter was answered.
const LOSSES: &str = "felix_link_loss_release_seconds_count";
const RELEASE: &str = "felix_link_loss_release_seconds_sum";
const RELEASED: &str = "felix_forwards_unknown_total{cause=\"connection_lost\"}";

/// Flags of `lose`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:\n  \
    # Five kills with 256 forwards on their way\n  \
    felix-bench lose\n\n  \
    # A dead peer is noticed sooner\n  \
    felix-bench lose --connections 16 --in-flight 64 -- --peer-idle-timeout-ms 1000 --peer-keep-alive-ms 250\n\n\
    Detection is the silence the brokers are told to tolerate (peer-idle-timeout-ms); release is what\n\
    the broker itself takes from there until the last waiting request is answered.")]
pub struct LoseArgs {
    /// Kills
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,
    /// Client connections
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub connections: u16,
    /// Unanswered batches of each connection
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub in_flight: u16,
    /// Records of a batch
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub batch: u32,
    /// Size of a record
    #[arg(long, default_value = "100", value_parser = parse_bytes)]
    pub payload_bytes: u64,
    /// The load goes on for this long after the owner is back
    #[arg(long, default_value = "2s", value_parser = parse_duration)]
    pub after: Duration,
    /// Where data and report go.
    #[command(flatten)]
    pub output: OutputArgs,
    /// What the brokers are told beside.
    #[command(flatten)]
    pub serve: ServeArgs,
}

/// One kill.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Loss {
    /// From the kill until the broker had declared the connection lost; right to a few milliseconds.
    pub detected_ms: f64,
    /// From then until the last request that waited was answered, as the broker measured it.
    pub release_ms: f64,
    /// Requests that waited.
    pub released: u64,
    /// From the owner being ready again until records were acknowledged again.
    pub back_ms: f64,
}

/// The report.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct LoseReport {
    /// The form.
    pub schema: String,
    /// Every kill.
    pub losses: Vec<Loss>,
    /// Over the kills.
    pub release_ms: Spread,
    /// Over the kills.
    pub detected_ms: Spread,
    /// Batches of unknown outcome, as the clients were told.
    pub unknown: u64,
    /// Records found in the log, and whether they are what was acknowledged.
    pub checked: u64,
    /// See `checked`.
    pub clean: bool,
    /// The first faults, in words.
    pub findings: Vec<String>,
}

/// Runs the command.
pub fn run_lose(args: &LoseArgs, out: &mut dyn Write) -> Result<Exit, CommandError> {
    let failed = |error: anyhow::Error| CommandError::failed(format!("{error:#}"));
    let report = measure(args).map_err(failed)?;
    print(&report, out).map_err(CommandError::failed)?;
    args.output.save(&report).map_err(failed)?;
    Ok(match report.clean {
        true => Exit::Done,
        false => Exit::Damaged,
    })
}

fn measure(args: &LoseArgs) -> Result<LoseReport> {
    let mut cluster_args = ForwardArgs::of(&[])?;
    cluster_args.serve = args.serve.clone();
    let plan = plan_cpus(&usable_cpus(), 2, 1);
    let dir = args.output.work_dir(1);
    let dir = dir.map_err(|e| anyhow::anyhow!(e.message))?;
    let mut destination = Destination::start(&cluster_args, dir.path(), &plan)?;
    let run = random_u64();
    let mut ledger: Option<Ledger> = None;
    let (mut losses, mut unknown, mut next_writer) = (Vec::new(), 0, 0);
    for _ in 0..args.rounds {
        let spec = spec_of(args, &destination, &plan, run, next_writer);
        let (loss, load) = lose_once(spec, args.after, &mut destination)?;
        losses.push(loss);
        unknown += load.tally.unknown;
        next_writer = load.next_writer;
        match &mut ledger {
            Some(ledger) => ledger.absorb(load.ledger),
            none => *none = Some(load.ledger),
        }
    }
    destination.stop()?;
    let ledger = ledger.context("no round")?;
    let counts = read_back_shard(&destination, &ledger, 0)?;
    Ok(LoseReport {
        schema: "felix-bench-lose/1".into(),
        release_ms: Spread::of(losses.iter().map(|loss| loss.release_ms)),
        detected_ms: Spread::of(losses.iter().map(|loss| loss.detected_ms)),
        losses,
        unknown,
        checked: counts.checked,
        clean: counts.is_clean(),
        findings: counts.findings,
    })
}

fn spec_of(
    args: &LoseArgs,
    destination: &Destination,
    plan: &CpuPlan,
    run: u64,
    first_writer: u32,
) -> LoadSpec {
    LoadSpec {
        connections: usize::from(args.connections),
        in_flight: usize::from(args.in_flight),
        batch: args.batch,
        payload_bytes: args.payload_bytes as usize,
        // Ended when the round is over.
        duration: 4 * PATIENCE,
        first_writer,
        ..destination.load_spec(run, plan)
    }
}

/// Loads, kills the owner, starts it again, and says how the broker that forwards took it.
fn lose_once(
    spec: LoadSpec,
    after: Duration,
    destination: &mut Destination,
) -> Result<(Loss, LoadReport)> {
    let cluster = destination.own.as_mut().context("no cluster of our own")?;
    let progress = Arc::new(Progress::default());
    let load = {
        let progress = Arc::clone(&progress);
        std::thread::spawn(move || run_load(spec, progress, Arc::default()))
    };
    let result = watch(cluster, &progress, after, || load.is_finished());
    progress.end_soon();
    let load = load
        .join()
        .map_err(|_| anyhow::anyhow!("the load generator panicked"))??;
    Ok((result?, load))
}

fn watch(
    cluster: &mut Cluster,
    progress: &Progress,
    after: Duration,
    has_ended: impl Fn() -> bool,
) -> Result<Loss> {
    let acked = |least: u64, what: &str| {
        wait_until(what, || {
            if has_ended() {
                bail!("the load ended early");
            }
            Ok(progress.records() > least)
        })
    };
    acked(0, "a first answer")?;
    std::thread::sleep(LEAD);
    let text = cluster.node(INGRESS).metrics()?;
    let before = [LOSSES, RELEASE, RELEASED].map(|name| metric(&text, name));
    let killed = Instant::now();
    cluster.node_mut(OWNER).kill()?;
    wait_until("the loss of the connection", || {
        let text = cluster.node(INGRESS).metrics()?;
        Ok(metric(&text, LOSSES) > before[0])
    })?;
    let detected = killed.elapsed();
    cluster.node_mut(OWNER).start()?;
    cluster.node_mut(OWNER).wait_ready()?;
    let ready = Instant::now();
    acked(progress.records(), "records taken again")?;
    let back = ready.elapsed();
    // The counts of one loss need not have been in the text that first told of it.
    let text = cluster.node(INGRESS).metrics()?;
    let now = [LOSSES, RELEASE, RELEASED].map(|name| metric(&text, name));
    std::thread::sleep(after);
    Ok(Loss {
        detected_ms: detected.as_secs_f64() * 1e3,
        release_ms: (now[1] - before[1]) / (now[0] - before[0]) * 1e3,
        released: (now[2] - before[2]) as u64,
        back_ms: back.as_secs_f64() * 1e3,
    })
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !is_so()? {
        if Instant::now() >= deadline {
            bail!("{what} did not come within {PATIENCE:?}");
        }
        std::thread::sleep(STEP);
    }
    Ok(())
}

fn print(report: &LoseReport, out: &mut dyn Write) -> std::io::Result<()> {
    for loss in &report.losses {
        writeln!(
            out,
            "lost      after {:.0} ms   {} requests released in {:.3} ms   taken again {:.0} ms after the owner was ready",
            loss.detected_ms, loss.released, loss.release_ms, loss.back_ms
        )?;
    }
    let (release, detected) = (&report.release_ms, &report.detected_ms);
    writeln!(
        out,
        "release   {:.3} ms ({:.3} to {:.3})   detection {:.0} ms ({:.0} to {:.0})",
        release.median, release.min, release.max, detected.median, detected.min, detected.max
    )?;
    writeln!(
        out,
        "outcomes  {} batches unknown; {} records checked, {}",
        report.unknown,
        report.checked,
        match report.clean {
            true => "all as acknowledged",
            false => "NOT as acknowledged",
        }
    )?;
    for finding in &report.findings {
        writeln!(out, "          {finding}")?;
    }
    Ok(())
}
