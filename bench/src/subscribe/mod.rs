//! `subscribe`: one publisher and many subscribers, every delivery checked, beside a bare fan-out; and
//! what connections and subscriptions cost that do nothing.

mod args;
mod check;
mod fan;
mod idle;
mod incoming;
mod listen;
mod probe;
mod report;
mod spec;

pub use args::SubscribeArgs;
pub use check::FanoutVerify;
pub use idle::IdleReport;
pub use probe::run_fanout;
pub use report::SubscribeReport;

use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{bail, Result};
use felix_uring::cli::{CommandError, Exit};
use felix_uring::cluster::{BrokerProgram, Cluster, ClusterSpec, ShardedSpec, NAMESPACE, TENANT};

use crate::client::{trust, FelixNames, Protocol};
use crate::cpu::{plan_cpus, usable_cpus, CpuPlan};
use crate::forward::{broker_spin_us, PathProbe, PathSample};
use crate::place::random_u64;
use crate::report::describe_host;
use fan::run_fan;
use probe::FanoutProcess;
use spec::{FanReport, FanSpec};

/// The stream of a broker of our own.
const STREAM: &str = "bench";
/// Longer than any run.
const TOKEN_TTL: Duration = Duration::from_secs(24 * 3600);

/// Runs the command.
pub fn run_subscribe(args: &SubscribeArgs, out: &mut dyn Write) -> Result<Exit, CommandError> {
    args.check()?;
    let failed = |error: anyhow::Error| CommandError::failed(format!("{error:#}"));
    let cores = usize::from(args.cores_per_broker);
    let plan = plan_cpus(&usable_cpus(), 1, cores);
    let dir = args.output.work_dir(cores)?;
    let (text, is_clean) = match (args.idle_connections, args.subscriptions) {
        (Some(connections), Some(subscriptions)) => {
            let report = idle::measure(args, connections, subscriptions, &plan, dir.path());
            let report = report.map_err(failed)?;
            args.output.save(&report).map_err(failed)?;
            (report.render(), report.verify.is_clean())
        }
        _ => {
            let report = measure(args, &plan, dir.path()).map_err(failed)?;
            args.output.save(&report).map_err(failed)?;
            (report.render(), report.verify.is_clean())
        }
    };
    write!(out, "{text}").map_err(CommandError::failed)?;
    Ok(match is_clean {
        true => Exit::Done,
        false => Exit::Damaged,
    })
}

/// A broker of our own and how to reach it.
struct Broker {
    cluster: Cluster,
    spec: FanSpec,
}

impl Broker {
    fn start(args: &SubscribeArgs, plan: &CpuPlan, dir: &Path, flags: &[&str]) -> Result<Self> {
        let program = BrokerProgram {
            path: std::env::current_exe()?,
            args: vec!["broker".into()],
        };
        let mut spec = ClusterSpec::new(dir.join("cluster"), 1, program);
        spec.cores_per_node = usize::from(args.cores_per_broker);
        spec.cpus = plan.brokers.clone();
        spec.extra_args = flags.iter().map(ToString::to_string).collect();
        spec.extra_args
            .extend(args.serve.serve_flags.iter().cloned());
        spec.streams = vec![ShardedSpec::new(STREAM, 1).led_by(&[0])];
        let cluster = Cluster::start(&spec)?;
        let names = FelixNames {
            tenant: TENANT.into(),
            namespace: NAMESPACE.into(),
            stream: STREAM.into(),
            token: cluster.token(TOKEN_TTL)?,
        };
        let node = cluster.node(0);
        let spec = FanSpec {
            protocol: Protocol::Felix(names),
            pid: node.pid(),
            ..spec_of(args, plan, node.client_addr(), cluster.ca())?
        };
        Ok(Self { cluster, spec })
    }

    fn stop(mut self) -> Result<()> {
        for exit in self.cluster.stop()? {
            if !exit.is_clean() {
                bail!("the broker did not stop in order: {exit}");
            }
        }
        Ok(())
    }
}

/// A run of the flags, against a bare fan-out.
fn spec_of(args: &SubscribeArgs, plan: &CpuPlan, addr: SocketAddr, ca: &Path) -> Result<FanSpec> {
    Ok(FanSpec {
        protocol: Protocol::Relay,
        addr,
        tls: trust(ca)?,
        pid: None,
        connections: args.subscribers as usize,
        streams: 1,
        subscribers: args.subscribers as usize,
        payload_bytes: args.payload_bytes as usize,
        batch: args.batch,
        in_flight: args.in_flight as usize,
        quiet: Duration::ZERO,
        warmup: args.warmup,
        duration: args.duration,
        cpu: plan.client,
        run: 0,
    })
}

/// One record at a time to one subscriber.
fn lone(spec: &FanSpec, args: &SubscribeArgs) -> FanSpec {
    FanSpec {
        connections: 1,
        subscribers: 1,
        batch: 1,
        in_flight: 1,
        warmup: args.lone_duration / 4,
        duration: args.lone_duration,
        ..spec.clone()
    }
}

/// A run with records of its own.
fn round(spec: &FanSpec) -> Result<FanReport> {
    let spec = FanSpec {
        run: random_u64(),
        ..spec.clone()
    };
    Ok(run_fan(spec)?)
}

/// What the rounds of a run came to.
#[derive(Default)]
struct Rounds {
    broker: Vec<FanReport>,
    /// Before, between and after them.
    bare: Vec<FanReport>,
    lone: Vec<FanReport>,
    path: Vec<PathSample>,
}

fn measure(args: &SubscribeArgs, plan: &CpuPlan, dir: &Path) -> Result<SubscribeReport> {
    let broker = Broker::start(args, plan, dir, &[])?;
    let spin_us = broker_spin_us(&args.serve.serve_flags);
    let probes = match args.no_probe {
        true => None,
        false => {
            let bare = FanoutProcess::start(&dir.join("fanout"), plan.brokers[0][0], spin_us)?;
            let spec = FanSpec {
                pid: Some(bare.pid()),
                ..spec_of(args, plan, bare.addr(), bare.ca())?
            };
            let path = PathProbe::start(dir, plan, args.payload_bytes as usize)?;
            Some((bare, spec, path))
        }
    };
    let mut rounds = Rounds::default();
    if let Some((_, bare, _)) = &probes {
        rounds.bare.push(round(bare)?);
    }
    for _ in 0..args.rounds {
        rounds.broker.push(round(&broker.spec)?);
        rounds.lone.push(round(&lone(&broker.spec, args))?);
        if let Some((_, bare, path)) = &probes {
            rounds.path.push(path.sample()?);
            rounds.bare.push(round(bare)?);
        }
    }
    drop(probes);
    broker.stop()?;
    Ok(report::make(args, &rounds, describe_host(dir, plan)))
}
