//! `cache`: gets, puts, deletes and adds, every answer checked, and a lone get beside bare echoes; or
//! puts beside publishes.

mod args;
mod check;
mod load;
mod passes;
mod puts;
mod report;
mod session;
mod zipf;

pub use args::{CacheArgs, Mix};
pub use check::CacheVerify;
pub use puts::PutsReport;
pub use report::CacheReport;

use std::cell::RefCell;
use std::io::Write;
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::Result;
use felix_uring::cli::{CommandError, Exit};
use felix_uring::cluster::{Cluster, ShardedSpec, NAMESPACE, TENANT};
use shard_executor::topology::pin_current_thread;

use crate::client::{trust, FelixNames};
use crate::cpu::{plan_cpus, resident_bytes_of, thread_cpu_seconds, usable_cpus, CpuPlan};
use crate::forward::spec_of_own;
use crate::meter::Latency;
use crate::quic::tokio_side::block_on;
use crate::report::describe_host;
use crate::transport::{measure, ServerProcess, Shape, Side};
use load::{Measured, Shared};
use passes::{effect_of, CompactionEffect, PassWatch};
use report::{CacheMemory, CacheRecovery};
use session::{connect, CachePlan};

/// The cache of a cluster of our own.
const CACHE: &str = "bench";
/// Longer than any run.
const TOKEN_TTL: Duration = Duration::from_secs(24 * 3600);
/// Echoes and lone gets, in turn, so that a drift of the machine meets both.
const PROBE_ROUNDS: usize = 3;
/// What a request and its answer carry beside the value.
const MESSAGE_BYTES: usize = 200;

/// Runs the command.
pub fn run_cache(args: &CacheArgs, out: &mut dyn Write) -> Result<Exit, CommandError> {
    args.check()?;
    let failed = |error: anyhow::Error| CommandError::failed(format!("{error:#}"));
    let plan = plan_cpus(
        &usable_cpus(),
        usize::from(args.brokers),
        usize::from(args.cores_per_broker),
    );
    let dir = args.output.work_dir(usize::from(args.cores_per_broker))?;
    if args.beside_publishes {
        let report = puts::run(args, &plan, dir.path()).map_err(failed)?;
        write!(out, "{}", report.render()).map_err(CommandError::failed)?;
        args.output.save(&report).map_err(failed)?;
        return Ok(Exit::Done);
    }
    let report = on_own_cluster(args, &plan, dir.path()).map_err(failed)?;
    write!(out, "{}", report.render()).map_err(CommandError::failed)?;
    args.output.save(&report).map_err(failed)?;
    Ok(match (report.verify.is_clean(), report.result.operations) {
        (false, _) => Exit::Damaged,
        (true, 0) => Exit::Failed,
        (true, _) => Exit::Done,
    })
}

fn on_own_cluster(args: &CacheArgs, plan: &CpuPlan, dir: &Path) -> Result<CacheReport> {
    let mut cluster = start(args, plan, dir)?;
    let owner = cluster.nodes().len() - 1;
    let names = FelixNames {
        tenant: TENANT.into(),
        namespace: NAMESPACE.into(),
        stream: String::new(),
        token: cluster.token(TOKEN_TTL)?,
    };
    let asked = match args.direct {
        true => owner,
        false => 0,
    };
    let tls = trust(cluster.ca())?;
    let plan_of = |cluster: &Cluster, node: usize| CachePlan {
        addr: cluster.node(node).client_addr(),
        tls: tls.clone(),
        names: names.clone(),
        cache: CACHE.into(),
    };
    let (asked, other) = (plan_of(&cluster, asked), plan_of(&cluster, owner));
    let (args_of, cpu) = (args.clone(), plan.client);
    let rss_before_bytes = resident_bytes(cluster.node(owner).pid());
    let (ask_first, ask_owner) = (asked.clone(), other.clone());
    let watch = args
        .compaction
        .then(|| PassWatch::start(cluster.node(owner).admin_addr()));
    // A thread of its own: the pinning ends with it.
    let measured = std::thread::spawn(move || {
        pin_current_thread(&[cpu])?;
        block_on(drive(args_of, ask_first, ask_owner))
    });
    let mut driven = measured
        .join()
        .map_err(|_| anyhow::anyhow!("the load generator panicked"))??;
    if let Some(watch) = watch {
        let spans = watch.finish()?;
        driven.compaction = Some(effect_of(&driven.measured.timed, &spans));
    }
    driven.memory = memory_of(&cluster, owner, rss_before_bytes)?;
    if !args.no_probe {
        probe(args, plan, dir, &asked, &mut driven)?;
    }
    if args.reopen {
        driven.recovery = Some(reopen(&mut cluster, owner, other, args.shards)?);
    }
    for exit in cluster.stop()? {
        if !exit.is_clean() {
            anyhow::bail!("a broker did not stop in order: {exit}");
        }
    }
    Ok(report::make(args, driven, describe_host(dir, plan)))
}

/// Resident bytes of a process; 0 when it cannot be told.
fn resident_bytes(pid: Option<u32>) -> u64 {
    pid.and_then(resident_bytes_of).unwrap_or(0)
}

/// The sum of a metric over its cores; 0 when there is none.
fn metric_of(metrics: &str, name: &str) -> u64 {
    let values = metrics.lines().filter(|line| {
        line.strip_prefix(name)
            .is_some_and(|rest| rest.starts_with(['{', ' ']))
    });
    let values = values.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
    values.sum::<f64>() as u64
}

fn memory_of(cluster: &Cluster, owner: usize, rss_before_bytes: u64) -> Result<CacheMemory> {
    // The gauges are told once a second.
    std::thread::sleep(Duration::from_millis(1500));
    let node = cluster.node(owner);
    let metrics = node.metrics()?;
    let metric = |name: &str| metric_of(&metrics, name);
    Ok(CacheMemory {
        rss_before_bytes,
        rss_after_bytes: resident_bytes(node.pid()),
        index_bytes: metric("felix_cache_index_bytes"),
        value_bytes: metric("felix_cache_value_bytes"),
        compactions: metric("felix_cache_compactions_total"),
        copied_records: metric("felix_cache_copied_records_total"),
    })
}

/// Kills the owner, starts it again, and asks until it answers.
fn reopen(
    cluster: &mut Cluster,
    owner: usize,
    plan: CachePlan,
    shards: u32,
) -> Result<CacheRecovery> {
    let node = cluster.node_mut(owner);
    node.kill()?;
    let started = Instant::now();
    node.start()?;
    node.wait_ready()?;
    let ready = Instant::now();
    let answered = std::thread::spawn(move || block_on(load::first_answers(plan, shards)));
    answered
        .join()
        .map_err(|_| anyhow::anyhow!("the load generator panicked"))??;
    Ok(CacheRecovery {
        ready_s: (ready - started).as_secs_f64(),
        first_answer_s: ready.elapsed().as_secs_f64(),
        rss_bytes: resident_bytes(cluster.node(owner).pid()),
    })
}

fn start(args: &CacheArgs, plan: &CpuPlan, dir: &Path) -> Result<Cluster> {
    let (mut spec, owners) = spec_of_own(dir, plan, usize::from(args.brokers))?;
    spec.cores_per_node = usize::from(args.cores_per_broker);
    spec.extra_args = args.serve.serve_flags.clone();
    spec.caches = vec![ShardedSpec::new(CACHE, args.shards).led_by(&owners)];
    if args.beside_publishes {
        spec.streams = vec![ShardedSpec::new(CACHE, 1).led_by(&owners)];
    }
    Ok(Cluster::start(&spec)?)
}

/// What came of a run.
pub(crate) struct Driven {
    pub measured: Measured,
    pub verify: CacheVerify,
    pub first_refusal: Option<String>,
    pub client_cpu_s: f64,
    pub memory: CacheMemory,
    pub recovery: Option<CacheRecovery>,
    pub compaction: Option<CompactionEffect>,
    pub lone_get: Latency,
    /// One hop from the client, and one between brokers' own driver.
    pub echo_client: Latency,
    pub echo_peer: Latency,
}

async fn drive(args: CacheArgs, asked: CachePlan, other: CachePlan) -> Result<Driven> {
    let shared = Rc::new(RefCell::new(Shared {
        keys: vec![Default::default(); args.keys],
        verify: CacheVerify::default(),
        measured: Measured::default(),
        first_refusal: None,
    }));
    let cpu_before = thread_cpu_seconds();
    load::run(&args, &asked, &shared).await?;
    let client_cpu_s = thread_cpu_seconds() - cpu_before;
    // At the owner, whoever was asked before: every broker must say the same.
    let (_endpoint, connection) = connect(&other).await?;
    load::read_back(&other, &connection, &shared, args.read_back).await?;
    let shared = &mut *shared.borrow_mut();
    Ok(Driven {
        measured: std::mem::take(&mut shared.measured),
        verify: shared.verify,
        first_refusal: shared.first_refusal.take(),
        client_cpu_s,
        memory: CacheMemory::default(),
        recovery: None,
        compaction: None,
        lone_get: Latency::new(),
        echo_client: Latency::new(),
        echo_peer: Latency::new(),
    })
}

/// Lone gets between echoes: client to a broker's CPU, and from there to the owner's.
fn probe(
    args: &CacheArgs,
    plan: &CpuPlan,
    dir: &Path,
    asked: &CachePlan,
    driven: &mut Driven,
) -> Result<()> {
    let bytes = MESSAGE_BYTES + args.value_bytes as usize;
    let shape = Shape::Echo {
        bytes,
        outstanding: 1,
    };
    let owner = plan.brokers.last().and_then(|cpus| cpus.first());
    let (first, owner) = (plan.brokers[0][0], owner.copied().unwrap_or(0));
    let met = if args.direct { owner } else { first };
    let duration = args.probe_duration;
    for _ in 0..PROBE_ROUNDS {
        let server = ServerProcess::start(dir, Side::Felix, met, 0)?;
        let echo = measure(Side::Tokio, &server, plan.client, 0, shape, duration)?;
        driven.echo_client.record(echo.latency_ns(0.5));
        drop(server);
        if !args.direct {
            let server = ServerProcess::start(dir, Side::Felix, owner, 0)?;
            let echo = measure(Side::Felix, &server, first, 0, shape, duration)?;
            driven.echo_peer.record(echo.latency_ns(0.5));
        }
        let (args, asked, cpu) = (args.clone(), asked.clone(), plan.client);
        let lone = std::thread::spawn(move || {
            pin_current_thread(&[cpu])?;
            block_on(async move {
                let mut latency = Latency::new();
                load::lone_gets(&args, &asked, &mut latency).await?;
                Ok(latency)
            })
        });
        let lone = lone
            .join()
            .map_err(|_| anyhow::anyhow!("the load generator panicked"))??;
        driven.lone_get.absorb(&lone);
    }
    Ok(())
}
