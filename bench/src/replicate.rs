//! `replicate`: how fast a follower that was away becomes level again, and what a publisher notices of it.
//!
//! Three brokers hold copies of one stream. One follower is stopped, records are published, the follower is
//! started again, and its log is watched until it is level; meanwhile the same load may go on. At the end
//! the copies are compared byte for byte.

use std::io::Write;
use std::time::{Duration, Instant};

use anyhow::{bail, Result};
use clap::Args;
use felix_uring::cli::{CommandError, Exit};
use serde::Serialize;

use crate::client::{LoadError, LoadReport, LoadSpec};
use crate::cpu::{plan_cpus, usable_cpus, CpuPlan};
use crate::forward::{compare_copies, drive, Destination, ForwardArgs};
use crate::meter::LatencySummary;
use crate::place::{random_u64, WorkDir};
use crate::report::{describe_host, CopyCounts, Host};
use crate::run_args::OutputArgs;
use crate::schedule::Pace;
use crate::units::{parse_bytes, parse_duration, parse_rate};

/// The follower that is stopped; the shard is led by node 1.
const AWAY: usize = 2;
/// How long it may take to become level.
const PATIENCE: Duration = Duration::from_secs(600);
const POLL: Duration = Duration::from_millis(10);

/// Let a follower fall behind, and measure how it catches up
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:\n  \
    # 256 MiB behind, nobody publishes meanwhile\n  \
    felix-bench replicate\n\n  \
    # 1 GiB behind, 20,000 records a second go on\n  \
    felix-bench replicate --behind 1GiB --rate 20k")]
pub struct ReplicateArgs {
    /// Payload bytes the follower lacks when it comes back
    #[arg(long, default_value = "256MiB", value_name = "BYTES", value_parser = parse_bytes)]
    pub behind: u64,
    /// Records a second published while it catches up; without it none are
    #[arg(long, value_name = "R/s", value_parser = parse_rate)]
    pub rate: Option<f64>,
    /// Length of the load measured beside the catch-up, and of the one without
    #[arg(long, default_value = "5s", value_parser = parse_duration)]
    pub duration: Duration,
    /// Size of a record
    #[arg(long, default_value = "1024", value_name = "BYTES", value_parser = parse_bytes)]
    pub payload_bytes: u64,
    /// Records of a batch
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub batch: u32,
    /// Where data and report go.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// What came of it.
#[derive(Debug, Clone, Default, Serialize)]
pub struct ReplicateReport {
    /// Form of the report.
    pub schema: String,
    /// Payload bytes the follower lacked when it was started.
    pub behind_bytes: u64,
    /// From the follower's readiness until it was level, up to a second too long.
    pub catch_up_s: f64,
    /// 10^6 payload bytes a second between the first and the last account the follower gave meanwhile;
    /// null when it was level before it gave two.
    pub mb_per_s: Option<f64>,
    /// Latency of a batch without a catch-up, and beside it; null without `--rate`.
    pub latency_us: Option<[LatencySummary; 2]>,
    /// The copies at the end.
    pub copies: CopyCounts,
    /// Where it was measured.
    pub host: Host,
}

/// Runs the command.
pub fn run_replicate(args: &ReplicateArgs, out: &mut dyn Write) -> Result<Exit, CommandError> {
    let failed = |error: anyhow::Error| CommandError::failed(format!("{error:#}"));
    let plan = plan_cpus(&usable_cpus(), 3, 1);
    let dir = args.output.work_dir(1)?;
    let report = measure(args, &plan, &dir).map_err(failed)?;
    let rate = report
        .mb_per_s
        .map_or_else(|| "-".to_string(), |rate| format!("{rate:.0}"));
    let mut text = format!(
        "catch-up      {:.0} MB behind, level after {:.1} s, {rate} MB/s in between\n\
         copies        {} compared with their leader's log, {} records: {} unequal\n",
        report.behind_bytes as f64 / 1e6,
        report.catch_up_s,
        report.copies.copies,
        report.copies.records,
        report.copies.unequal
    );
    if let Some([before, beside]) = &report.latency_us {
        text += &format!(
            "publishes     p99 {:.0} us without, {:.0} us beside the catch-up\n",
            before.p99, beside.p99
        );
    }
    write!(out, "{text}").map_err(CommandError::failed)?;
    args.output.save(&report).map_err(failed)?;
    Ok(
        match report.copies.is_equal() && report.copies.copies == 2 {
            true => Exit::Done,
            false => Exit::Damaged,
        },
    )
}

fn measure(args: &ReplicateArgs, plan: &CpuPlan, dir: &WorkDir) -> Result<ReplicateReport> {
    let mut destination = Destination::start(&cluster_args(args)?, dir.path(), plan)?;
    let mut next_writer = 0;
    let run = random_u64();
    let mut load = |destination: &mut Destination, pace: Pace, duration: Duration| {
        let mut spec = spec(args, plan, destination, run);
        (spec.pace, spec.duration) = (pace, duration);
        spec.first_writer = next_writer;
        let report = publish(destination, spec)?;
        next_writer = report.next_writer;
        anyhow::Ok(report)
    };
    let open = args.rate.map(|rate| Pace::Open {
        batches_per_s: rate / f64::from(args.batch),
    });
    let before = match open {
        Some(pace) => Some(load(&mut destination, pace, args.duration)?),
        None => None,
    };
    stop_follower(&mut destination)?;
    let mut behind_bytes = 0;
    while behind_bytes < args.behind {
        let report = load(&mut destination, Pace::Closed, Duration::from_secs(1))?;
        let batches = report.tally.acked;
        behind_bytes += batches * u64::from(args.batch) * args.payload_bytes;
        if batches == 0 {
            bail!("nothing is acknowledged: {:?}", report.tally.reasons);
        }
    }
    let ready = start_follower(&mut destination)?;
    let watch = Watch::start(&destination, ready)?;
    let beside = match open {
        Some(pace) => Some(load(&mut destination, pace, args.duration)?),
        None => None,
    };
    let (catch_up, mb_per_s) = watch.finish()?;
    destination.wait_level(PATIENCE)?;
    destination.stop()?;
    Ok(ReplicateReport {
        schema: "felix-bench/replicate-1".to_string(),
        behind_bytes,
        catch_up_s: catch_up.as_secs_f64(),
        mb_per_s,
        latency_us: before
            .zip(beside)
            .map(|(a, b)| [a, b].map(|report| report.meter.latency().summary())),
        copies: compare_copies(&destination)?,
        host: describe_host(dir.path(), plan),
    })
}

/// The cluster of `forward --brokers 3 --replicas 3 --direct`.
fn cluster_args(args: &ReplicateArgs) -> Result<ForwardArgs> {
    let payload = format!("--payload-bytes={}", args.payload_bytes);
    let batch = format!("--batch={}", args.batch);
    let flags = ["--brokers=3", "--replicas=3", "--direct", &payload, &batch];
    Ok(ForwardArgs::of(&flags)?)
}

fn spec(args: &ReplicateArgs, plan: &CpuPlan, destination: &Destination, run: u64) -> LoadSpec {
    LoadSpec {
        connections: 4,
        in_flight: 16,
        batch: args.batch,
        payload_bytes: args.payload_bytes as usize,
        warmup: Duration::from_millis(200),
        duration: args.duration,
        ..destination.load_spec(run, plan)
    }
}

fn publish(destination: &mut Destination, spec: LoadSpec) -> Result<LoadReport> {
    let done = drive("publish", spec, |_| Ok(()), || destination.check_leader());
    done.map_err(|error: LoadError| anyhow::anyhow!("{error}"))
}

fn stop_follower(destination: &mut Destination) -> Result<()> {
    let own = destination.own.as_mut();
    if let Some(own) = own {
        own.node_mut(AWAY).stop()?;
    }
    Ok(())
}

fn start_follower(destination: &mut Destination) -> Result<Instant> {
    if let Some(own) = destination.own.as_mut() {
        own.node_mut(AWAY).start()?;
        own.node_mut(AWAY).wait_ready()?;
    }
    Ok(Instant::now())
}

/// Follows the follower's own account of what it has made durable, and the leader's of what it lacks.
struct Watch {
    thread: std::thread::JoinHandle<Result<(Duration, Option<f64>)>>,
}

impl Watch {
    fn start(destination: &Destination, ready: Instant) -> Result<Self> {
        let admin = |node: usize| destination.admins[node].1;
        let (leader, away) = (admin(1), admin(AWAY));
        let thread = std::thread::Builder::new()
            .name("catch-up".into())
            .spawn(move || watch(leader, away, ready))?;
        Ok(Self { thread })
    }

    fn finish(self) -> Result<(Duration, Option<f64>)> {
        match self.thread.join() {
            Ok(result) => result,
            Err(_) => bail!("the watch of the catch-up panicked"),
        }
    }
}

fn watch(
    leader: std::net::SocketAddr,
    away: std::net::SocketAddr,
    ready: Instant,
) -> Result<(Duration, Option<f64>)> {
    let status = |addr| -> Result<serde_json::Value> {
        let answer = felix_uring::admin::get(addr, "/status", Duration::from_secs(5))?;
        Ok(serde_json::from_str(&answer.body)?)
    };
    // A core gives an account about once a second; the moment it changes is the moment it is from.
    let mut accounts: Vec<(Instant, u64)> = Vec::new();
    let mut level_since = None;
    loop {
        let stored = status(away)?["metrics"]["storage_payload_bytes"].as_u64();
        if let Some(stored) = stored {
            if accounts.last().is_none_or(|(_, last)| *last != stored) {
                accounts.push((Instant::now(), stored));
            }
        }
        let led = status(leader)?;
        let is_level = led["cores"].as_array().is_some_and(|cores| {
            let mut cores = cores.iter();
            cores.all(|core| core["replication"]["lag_records"] == 0)
        });
        match (is_level, level_since) {
            (false, _) => level_since = None,
            (true, None) => level_since = Some(Instant::now()),
            // Longer than an account may be old.
            (true, Some(since)) if since.elapsed() > Duration::from_millis(1500) => {
                let moving: Vec<_> = accounts.iter().filter(|(at, _)| *at <= since).collect();
                let rate = match moving.as_slice() {
                    [first, .., last] if last.0 > first.0 => {
                        Some((last.1 - first.1) as f64 / (last.0 - first.0).as_secs_f64() / 1e6)
                    }
                    _ => None,
                };
                return Ok((since.saturating_duration_since(ready), rate));
            }
            (true, Some(_)) => {}
        }
        if ready.elapsed() > PATIENCE {
            bail!("the follower is not level after {PATIENCE:?}");
        }
        std::thread::sleep(POLL);
    }
}
