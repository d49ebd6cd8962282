//! `idle`: what brokers do when nobody asks for anything: their CPU and their bytes on the wire.

use std::io::Write;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};
use clap::Args;
use felix_uring::cli::{CommandError, Exit};
use felix_uring::cluster::{BrokerProgram, Cluster, ClusterSpec, ShardedSpec};
use serde::Serialize;

use crate::cpu::{plan_cpus, process_cpu_seconds_of, resident_bytes_of, usable_cpus};
use crate::place::WorkDir;
use crate::report::{describe_host, Host};
use crate::run_args::OutputArgs;
use crate::units::parse_duration;

/// How long all shards may take to open.
const PATIENCE: Duration = Duration::from_secs(120);
/// Left alone before measuring: openings, first probes and first reports are over by then.
const SETTLE: Duration = Duration::from_secs(5);

/// Leave replicated shards alone, and measure what they cost
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:\n  \
    # 1,000 shards on three brokers, each with three holders\n  \
    felix-bench idle\n\n  \
    # As many without followers\n  \
    felix-bench idle --replicas 1")]
pub struct IdleArgs {
    /// Shards of the one stream
    #[arg(long, default_value_t = 1000, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=20_000))]
    pub shards: u32,
    /// Brokers
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=5))]
    pub brokers: u8,
    /// Holders of each shard
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=5))]
    pub replicas: u16,
    /// How long they are left alone
    #[arg(long, default_value = "10s", value_parser = parse_duration)]
    pub duration: Duration,
    /// Where data and report go.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// What one broker did.
#[derive(Debug, Clone, Default, Serialize)]
pub struct BrokerIdle {
    /// Its name.
    pub node: String,
    /// CPU seconds of all its threads over the time it was left alone.
    pub cpu_s: f64,
    /// The same in hundredths of one CPU.
    pub cpu_percent: f64,
    /// Datagram bytes sent, and how many datagrams.
    pub sent_bytes: u64,
    /// Datagrams sent.
    pub sent_datagrams: u64,
    /// Shards it leads that other brokers hold as well.
    pub shards_led: u64,
    /// Resident bytes at the end.
    pub resident_bytes: u64,
}

/// What came of it.
#[derive(Debug, Clone, Default, Serialize)]
pub struct IdleReport {
    /// Form of the report.
    pub schema: String,
    /// Shards, and holders of each.
    pub shards: u32,
    /// Holders of each shard.
    pub replicas: u16,
    /// From the start of the cluster until every replicated shard took writes.
    pub open_s: f64,
    /// How long they were left alone.
    pub quiet_s: f64,
    /// By broker.
    pub brokers: Vec<BrokerIdle>,
    /// Where it was measured.
    pub host: Host,
}

/// Runs the command.
pub fn run_idle(args: &IdleArgs, out: &mut dyn Write) -> Result<Exit, CommandError> {
    if args.replicas > u16::from(args.brokers) {
        return Err(CommandError::usage(
            "--replicas cannot exceed --brokers".to_string(),
        ));
    }
    let dir = args.output.work_dir(1)?;
    let failed = |error: anyhow::Error| CommandError::failed(format!("{error:#}"));
    let report = measure(args, &dir).map_err(failed)?;
    let mut text = format!(
        "shards        {} with {} holders each, all open after {:.1} s, left alone for {:.1} s\n",
        report.shards, report.replicas, report.open_s, report.quiet_s
    );
    for broker in &report.brokers {
        text += &format!(
            "{:<13} {:.2} % of a CPU, {:.0} B/s and {:.1} datagrams/s sent, leads {}, {:.0} MiB resident\n",
            broker.node,
            broker.cpu_percent,
            broker.sent_bytes as f64 / report.quiet_s,
            broker.sent_datagrams as f64 / report.quiet_s,
            broker.shards_led,
            broker.resident_bytes as f64 / f64::from(1 << 20),
        );
    }
    write!(out, "{text}").map_err(CommandError::failed)?;
    args.output.save(&report).map_err(failed)?;
    Ok(Exit::Done)
}

fn measure(args: &IdleArgs, dir: &WorkDir) -> Result<IdleReport> {
    let plan = plan_cpus(&usable_cpus(), usize::from(args.brokers), 1);
    let program = BrokerProgram {
        path: std::env::current_exe()?,
        args: vec!["broker".into()],
    };
    let brokers = usize::from(args.brokers);
    let mut spec = ClusterSpec::new(dir.path().join("cluster"), brokers, program);
    spec.cpus.clone_from(&plan.brokers);
    let leaders: Vec<usize> = (0..brokers).collect();
    let mut stream = ShardedSpec::new("idle", args.shards).led_by(&leaders);
    stream.replicas = args.replicas;
    stream.consistency = Some("quorum".to_string());
    spec.streams = vec![stream];
    let started = Instant::now();
    let mut cluster = Cluster::start(&spec)?;
    let is_replicated = args.replicas > 1;
    wait_open(&cluster, u64::from(args.shards) * u64::from(is_replicated))?;
    let open_s = started.elapsed().as_secs_f64();
    std::thread::sleep(SETTLE);
    let before = cluster
        .nodes()
        .iter()
        .map(account)
        .collect::<Result<Vec<_>>>()?;
    let quiet = Instant::now();
    std::thread::sleep(args.duration);
    let quiet_s = quiet.elapsed().as_secs_f64();
    let after = cluster
        .nodes()
        .iter()
        .map(account)
        .collect::<Result<Vec<_>>>()?;
    cluster.stop()?;
    let spent = before.into_iter().zip(after).map(|(before, after)| {
        let cpu_s = after.cpu_s - before.cpu_s;
        BrokerIdle {
            cpu_s,
            cpu_percent: cpu_s / quiet_s * 100.0,
            sent_bytes: after.sent_bytes.saturating_sub(before.sent_bytes),
            sent_datagrams: after.sent_datagrams.saturating_sub(before.sent_datagrams),
            ..after
        }
    });
    Ok(IdleReport {
        schema: "felix-bench/idle-1".to_string(),
        shards: args.shards,
        replicas: args.replicas,
        open_s,
        quiet_s,
        brokers: spent.collect(),
        host: describe_host(dir.path(), &plan),
    })
}

fn account(node: &felix_uring::cluster::BrokerNode) -> Result<BrokerIdle> {
    let pid = node.pid().context("a broker has ended")?;
    let sum = |name| metric(node.admin_addr(), name);
    Ok(BrokerIdle {
        node: node.node_id().to_string(),
        cpu_s: process_cpu_seconds_of(pid).context("a broker has ended")?,
        cpu_percent: 0.0,
        sent_bytes: sum("felix_udp_sent_bytes_total")?,
        sent_datagrams: sum("felix_udp_datagrams_sent_total")?,
        shards_led: sum("felix_replicated_shards_led")?,
        resident_bytes: resident_bytes_of(pid).unwrap_or(0),
    })
}

fn wait_open(cluster: &Cluster, shards: u64) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let mut open = 0;
        for node in cluster.nodes() {
            open += metric(node.admin_addr(), "felix_replicated_shards_open")?;
        }
        if open >= shards {
            return Ok(());
        }
        if Instant::now() > deadline {
            bail!("{open} of {shards} shards are open after {PATIENCE:?}");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A metric, summed over cores.
fn metric(admin: SocketAddr, name: &str) -> Result<u64> {
    let answer = felix_uring::admin::get(admin, "/metrics", Duration::from_secs(5))?;
    let values = answer.body.lines().filter_map(|line| {
        let rest = line.strip_prefix(name)?;
        let is_it = rest.starts_with('{') || rest.starts_with(' ');
        is_it.then(|| rest.rsplit(' ').next()?.parse::<f64>().ok())?
    });
    Ok(values.sum::<f64>() as u64)
}
