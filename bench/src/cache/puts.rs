//! `cache --beside-publishes`: forwarded puts and forwarded publishes of one size, in turn.
//!
//! Both are driven by one load loop with the same connections, the same number on their way and one
//! record in each request, so that what differs is what the brokers and the protocol make of them.
//! Every put is read back at the end.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use anyhow::{bail, ensure, Result};
use felix_uring::cluster::{Cluster, NAMESPACE, TENANT};
use serde::{Deserialize, Serialize};

use super::args::CacheArgs;
use super::session::{connect, CachePlan, Session};
use super::{start, CACHE, TOKEN_TTL};
use crate::client::{key_of_put, trust, FelixNames, LoadSpec, Protocol, Target, KEYS_OF_A_WRITER};
use crate::cpu::{process_cpu_seconds_of, CpuPlan, CpuShare};
use crate::forward::{drive, Edge};
use crate::meter::{Latency, LatencySummary, Spread};
use crate::place::random_u64;
use crate::quic::tokio_side::block_on;
use crate::record::parse_record;
use crate::report::{count, describe_host, micros, Host};
use crate::schedule::Pace;

const SCHEMA: &str = "felix-bench-cache-puts/1";

/// One kind of request over all rounds.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct OneKind {
    /// Acknowledged a second, by round.
    pub per_s: Spread,
    pub latency_us: LatencySummary,
    /// CPU of the broker that forwards, and of the owner, for each.
    pub ingress_cpu_us: Spread,
    pub owner_cpu_us: Spread,
    /// CPU of the load generator for each.
    pub client_cpu_us: Spread,
    pub acknowledged: u64,
}

/// Puts beside publishes.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct PutsReport {
    pub schema: String,
    pub value_bytes: u64,
    pub connections: u64,
    pub in_flight: u64,
    pub rounds: u64,
    pub duration_s: f64,
    pub puts: OneKind,
    pub publishes: OneKind,
    /// Puts by publishes, of neighbouring rounds.
    pub ratio: Spread,
    /// Puts read back: the newest of each key.
    pub read_back: u64,
    pub host: Host,
}

/// What one round of one kind came to.
struct Round {
    per_s: f64,
    cpu_us: [f64; 3],
    latency: Latency,
    acknowledged: u64,
}

pub(super) fn run(args: &CacheArgs, plan: &CpuPlan, dir: &Path) -> Result<PutsReport> {
    let mut cluster = start(args, plan, dir)?;
    let names = FelixNames {
        tenant: TENANT.into(),
        namespace: NAMESPACE.into(),
        stream: CACHE.into(),
        token: cluster.token(TOKEN_TTL)?,
    };
    let run = random_u64();
    let (mut puts, mut publishes) = (Vec::new(), Vec::new());
    let mut next_writer = 0;
    for round in 0..args.rounds {
        // In turn first, so that a drift of the machine favours neither.
        for nth in 0..2 {
            let is_puts = (round + nth) % 2 == 0;
            let protocol = match is_puts {
                true => Protocol::Puts(names.clone()),
                false => Protocol::Felix(names.clone()),
            };
            let spec = spec_of(args, plan, &cluster, protocol, (run, next_writer))?;
            let round = one_round(&cluster, spec, &mut next_writer)?;
            match is_puts {
                true => puts.push(round),
                false => publishes.push(round),
            }
        }
    }
    let put: u64 = puts.iter().map(|round| round.acknowledged).sum();
    let owner = CachePlan {
        addr: cluster.node(cluster.nodes().len() - 1).client_addr(),
        tls: trust(cluster.ca())?,
        names,
        cache: CACHE.into(),
    };
    let read_back = std::thread::spawn(move || block_on(read_back(owner, (run, next_writer), put)))
        .join()
        .map_err(|_| anyhow::anyhow!("the reader panicked"))??;
    for exit in cluster.stop()? {
        ensure!(exit.is_clean(), "a broker did not stop in order: {exit}");
    }
    let ratios = puts.iter().zip(&publishes).map(|(a, b)| a.per_s / b.per_s);
    Ok(PutsReport {
        schema: SCHEMA.into(),
        value_bytes: args.value_bytes,
        connections: args.connections as u64,
        in_flight: args.in_flight as u64,
        rounds: args.rounds as u64,
        duration_s: args.duration.as_secs_f64(),
        ratio: Spread::of(ratios),
        puts: kind_of(puts),
        publishes: kind_of(publishes),
        read_back,
        host: describe_host(dir, plan),
    })
}

fn spec_of(
    args: &CacheArgs,
    plan: &CpuPlan,
    cluster: &Cluster,
    protocol: Protocol,
    (run, first_writer): (u64, u32),
) -> Result<LoadSpec> {
    Ok(LoadSpec {
        run,
        protocol,
        targets: vec![Target {
            addr: cluster.node(0).client_addr(),
            shards: vec![0],
        }],
        server_name: "localhost".into(),
        tls: trust(cluster.ca())?,
        connections: args.connections,
        streams: 1,
        in_flight: (args.in_flight / args.connections).max(1),
        batch: 1,
        payload_bytes: args.value_bytes as usize,
        shard_count: 1,
        keys: vec![None],
        pace: Pace::Closed,
        warmup: args.warmup,
        duration: args.duration,
        request_timeout: std::time::Duration::from_secs(10),
        sockets: 1,
        cpu: Some(plan.client),
        share: CpuShare::Usual,
        first_writer,
    })
}

fn one_round(cluster: &Cluster, spec: LoadSpec, next_writer: &mut u32) -> Result<Round> {
    let pids = [0, cluster.nodes().len() - 1].map(|node| cluster.node(node).pid());
    let cpu = || pids.map(|pid| pid.and_then(process_cpu_seconds_of).unwrap_or(0.0));
    let (mut from, mut to) = ([0.0; 2], [0.0; 2]);
    let at_edge = |edge| {
        match edge {
            Edge::Start => from = cpu(),
            Edge::End => to = cpu(),
        }
        Ok(())
    };
    let report = drive("puts", spec, at_edge, || Ok(()))?;
    *next_writer = report.next_writer;
    let tally = &report.tally;
    if tally.failed + tally.unknown + tally.refusals > 0 {
        bail!("requests were refused or lost: {:?}", tally.reasons);
    }
    let measured = report.meter.records().max(1) as f64;
    let each = |seconds: f64| seconds * 1e6 / measured;
    Ok(Round {
        per_s: measured / report.meter.seconds(),
        cpu_us: [
            each(to[0] - from[0]),
            each(to[1] - from[1]),
            each(report.cpu_s),
        ],
        latency: report.meter.latency().clone(),
        acknowledged: tally.acked,
    })
}

fn kind_of(rounds: Vec<Round>) -> OneKind {
    let cpu = |at: usize| Spread::of(rounds.iter().map(|round| round.cpu_us[at]));
    let mut latency = Latency::new();
    for round in &rounds {
        latency.absorb(&round.latency);
    }
    OneKind {
        per_s: Spread::of(rounds.iter().map(|round| round.per_s)),
        latency_us: latency.summary(),
        ingress_cpu_us: cpu(0),
        owner_cpu_us: cpu(1),
        client_cpu_us: cpu(2),
        acknowledged: rounds.iter().map(|round| round.acknowledged).sum(),
    }
}

/// Every key holds the newest of its puts, and together they account for all that were acknowledged.
async fn read_back(plan: CachePlan, (run, writers): (u64, u32), puts: u64) -> Result<u64> {
    let (_endpoint, connection) = connect(&plan).await?;
    let mut session = Session::open(&plan, &connection).await?;
    let (mut read, mut accounted) = (0, 0);
    for writer in 0..writers {
        let mut newest = BTreeMap::new();
        for slot in 0..KEYS_OF_A_WRITER {
            let key = key_of_put(writer, slot);
            let Some(value) = session.value_of(&key).await? else {
                continue;
            };
            let record = parse_record(&value)?;
            let is_own = record.run == run && key_of_put(record.writer, record.sequence) == key;
            ensure!(is_own, "{key} holds another record: {record:?}");
            newest.insert(slot, record.sequence);
        }
        read += newest.len() as u64;
        let Some(last) = newest.values().max().copied() else {
            continue;
        };
        for (slot, sequence) in &newest {
            ensure!(
                sequence + KEYS_OF_A_WRITER > last,
                "w{writer}-{slot} holds {sequence}, and {last} was put after it"
            );
        }
        let expected = (last + 1).min(KEYS_OF_A_WRITER);
        ensure!(
            newest.len() as u64 == expected,
            "keys of w{writer} are missing"
        );
        accounted += last + 1;
    }
    ensure!(
        accounted == puts,
        "{puts} puts were acknowledged, {accounted} are there"
    );
    Ok(read)
}

impl PutsReport {
    /// The report for people.
    pub fn render(&self) -> String {
        let mut out = String::new();
        // Writing to a string does not fail.
        let _ = writeln!(
            out,
            "puts beside publishes, forwarded: {} bytes, {} connections, {} on their way, {} rounds of {} s",
            self.value_bytes, self.connections, self.in_flight, self.rounds, self.duration_s
        );
        for (name, kind) in [("puts", &self.puts), ("publishes", &self.publishes)] {
            let _ = writeln!(
                out,
                "{name:10} {}/s ({} to {})  p50 {}  p99 {}  CPU each: ingress {:.1} us, owner {:.1} us, client {:.1} us",
                count(kind.per_s.median),
                count(kind.per_s.min),
                count(kind.per_s.max),
                micros(kind.latency_us.p50),
                micros(kind.latency_us.p99),
                kind.ingress_cpu_us.median,
                kind.owner_cpu_us.median,
                kind.client_cpu_us.median,
            );
        }
        let _ = writeln!(
            out,
            "ratio      {:.2} ({:.2} to {:.2}); {} keys read back, every acknowledged put accounted for",
            self.ratio.median, self.ratio.min, self.ratio.max, self.read_back
        );
        out
    }
}
