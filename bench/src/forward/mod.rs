//! `forward`: publish, measure beside the relay probe, read back, report.

mod accounts;
mod args;
mod beside;
mod cluster;
mod copies;
mod drive;
mod path;
mod readback;
mod rounds;
mod stages;

pub use accounts::metric;
pub use args::{broker_spin_us, Ack, Durability, ForwardArgs, Verify, BROKER_SPIN_US};
pub use beside::{run_beside, BesideArgs, BesideReport};
pub use cluster::{keys_for, spec_of_own, Destination};
pub use copies::compare_copies;
pub use drive::{drive, Edge};
pub use path::{one_outstanding, PathProbe, PathSample};
pub use readback::read_back_shard;

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use felix_uring::cli::{CommandError, Exit};

use crate::client::LoadError;
use crate::cpu::{plan_cpus, usable_cpus, CpuPlan};
use crate::limits;
use crate::place::WorkDir;
use crate::report::{self, describe_host, CopyCounts, RunReport, Workload, SCHEMA};
use readback::read_back;
use rounds::Rounds;

/// How long followers may take to become level after the load.
const LEVEL_PATIENCE: Duration = Duration::from_secs(60);
/// Length of each measurement of the limits.
const LIMITS_DURATION: Duration = Duration::from_secs(2);
/// A guess of the group size for the disk measurement when no broker tells its own.
const USUAL_GROUP_BYTES: u64 = 256 << 10;
/// Groups on their way to the disk at once.
const GROUPS_IN_FLIGHT: usize = 2;

/// Runs the command.
pub fn run_forward(args: &ForwardArgs, out: &mut dyn Write) -> Result<Exit, CommandError> {
    args.check()?;
    let mut plan = plan_cpus(
        &usable_cpus(),
        usize::from(args.brokers),
        usize::from(args.cores_per_broker),
    );
    plan.client = args.client_cpu.unwrap_or(plan.client);
    let report = match args.addr {
        None => on_own_cluster(args, &plan)?,
        Some(_) => on_running_cluster(args, &plan)?,
    };
    write!(out, "{}", report::render(&report)).map_err(CommandError::failed)?;
    for path in files(args) {
        report::write_json(&path, &report).map_err(|e| CommandError::failed(format!("{e:#}")))?;
    }
    Ok(verdict(args, &report))
}

fn files(args: &ForwardArgs) -> impl Iterator<Item = PathBuf> + '_ {
    let recorded = args
        .record
        .as_ref()
        .map(|name| report::record_dir().join(format!("{name}.json")));
    args.output.json.iter().cloned().chain(recorded)
}

/// A run that moved nothing, or cannot prove what it moved, has not succeeded.
fn verdict(args: &ForwardArgs, report: &RunReport) -> Exit {
    let is_equal = report.copies.as_ref().is_none_or(CopyCounts::is_equal);
    if !report.verify.is_clean() || !is_equal {
        return Exit::Damaged;
    }
    let unchecked =
        args.verify_mode() != Verify::None && report.verify.checked < report.result.records;
    match report.result.records == 0 || unchecked {
        true => Exit::Failed,
        false => Exit::Done,
    }
}

fn on_own_cluster(args: &ForwardArgs, plan: &CpuPlan) -> Result<RunReport, CommandError> {
    let mut dir = WorkDir::for_logs(
        args.output.data_dir.as_deref(),
        usize::from(args.cores_per_broker),
        args.queue_depth as usize,
    )?;
    if args.keep_data {
        dir.keep();
        eprintln!("felix-bench: the data stays in {}", dir.path().display());
    }
    let mut destination = Destination::start(args, dir.path(), plan).map_err(failed)?;
    let mut rounds = Rounds::new(args, plan, Some(dir.path())).map_err(failed)?;
    rounds.run(&mut destination).map_err(load_failed)?;
    if args.replicas > 1 {
        destination.wait_level(LEVEL_PATIENCE).map_err(failed)?;
    }
    let mode = args.verify_mode();
    let mut ledger = Some(rounds.take_ledger());
    let mut verify = None;
    if mode == Verify::Subscribe {
        if let Some(ledger) = ledger.take() {
            verify = Some(read_back(&destination, ledger, mode).map_err(failed)?);
        }
    }
    destination.stop().map_err(failed)?;
    if let Some(ledger) = ledger {
        verify = Some(read_back(&destination, ledger, mode).map_err(failed)?);
    }
    let mut report = rounds.report(&destination);
    report.verify = verify.unwrap_or_default();
    if args.replicas > 1 {
        report.copies = Some(compare_copies(&destination).map_err(failed)?);
    }
    if !args.no_probe {
        add_limits(args, plan, &dir, &rounds, &mut report).map_err(failed)?;
    }
    complete(args, plan, &mut report, dir.path().to_path_buf());
    Ok(report)
}

fn on_running_cluster(args: &ForwardArgs, plan: &CpuPlan) -> Result<RunReport, CommandError> {
    felix_uring::preflight::raise_soft_limits();
    let mut destination = Destination::find(args).map_err(load_failed)?;
    let mut rounds = Rounds::new(args, plan, None).map_err(failed)?;
    rounds.run(&mut destination).map_err(load_failed)?;
    let mut report = rounds.report(&destination);
    report.verify =
        read_back(&destination, rounds.take_ledger(), args.verify_mode()).map_err(failed)?;
    report.workload.brokers = 0;
    complete(args, plan, &mut report, PathBuf::new());
    Ok(report)
}

fn add_limits(
    args: &ForwardArgs,
    plan: &CpuPlan,
    dir: &WorkDir,
    rounds: &Rounds,
    report: &mut RunReport,
) -> anyhow::Result<()> {
    let group = rounds
        .group_bytes()
        .unwrap_or(USUAL_GROUP_BYTES)
        .next_multiple_of(4096);
    let disk = limits::disk(dir.path(), group, GROUPS_IN_FLIGHT, LIMITS_DURATION)?;
    let hop = limits::hop(dir.path(), plan.client, plan.brokers[0][0], LIMITS_DURATION)?;
    let bound = limits::bound_mb_per_s(disk.mb_per_s, hop.cpu_s_per_gb, args.hops(), plan.distinct);
    let l = &mut report.limits;
    l.disk_append_mb_per_s = Some(disk.mb_per_s);
    l.disk_write_bytes = Some(group);
    l.quic_cpu_s_per_gb = Some(hop.cpu_s_per_gb);
    l.bound_mb_per_s = Some(bound);
    l.bound_ratio = Some(report.result.mb_per_s / bound);
    Ok(())
}

fn complete(args: &ForwardArgs, plan: &CpuPlan, report: &mut RunReport, data_dir: PathBuf) {
    report.schema = SCHEMA.to_string();
    report.host = describe_host(&data_dir, plan);
    let shards = report.workload.shards;
    let brokers = match args.addr {
        Some(_) => 0,
        None => u64::from(args.brokers),
    };
    report.workload = Workload {
        mode: args.mode().to_string(),
        payload_bytes: args.payload_bytes,
        batch: args.batch,
        connections: u64::from(args.connections),
        streams: u64::from(args.streams),
        in_flight: u64::from(args.in_flight),
        rate: args.rate,
        brokers,
        cores_per_broker: u64::from(args.cores_per_broker),
        replicas: u64::from(args.replicas),
        shards,
        durability: match args.durability {
            Durability::Fsync => "fsync".to_string(),
        },
        ack: match args.ack {
            Ack::Leader => "leader".to_string(),
            Ack::Quorum => "quorum".to_string(),
        },
        duration_s: args.duration.as_secs_f64(),
        warmup_s: args.warmup.as_secs_f64(),
        rounds: u64::from(args.rounds),
        broker_flags: args.serve.serve_flags.clone(),
    };
}

fn failed(error: anyhow::Error) -> CommandError {
    CommandError::failed(format!("{error:#}"))
}

fn load_failed(error: LoadError) -> CommandError {
    let exit = match &error {
        LoadError::Unreachable { .. } => Exit::Unreachable,
        LoadError::Refused(_) => Exit::Refused,
        LoadError::Setup(_) | LoadError::Stopped => Exit::Failed,
    };
    CommandError::new(exit, error)
}
