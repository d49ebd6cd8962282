//! The rounds of a run: relay probe, brokers, relay probe, and so on, so that a drift of the machine meets
//! both alike.

use std::path::Path;

use anyhow::Result;

use super::accounts::{Account, Snapshot};
use super::args::{Ack, ForwardArgs};
use super::cluster::Destination;
use super::drive::{drive, Edge};
use super::path::{one_outstanding, PathProbe, PathSample};
use crate::client::{trust, LoadError, LoadReport, LoadSpec, Protocol, Tally, Target};
use crate::cpu::{CpuPlan, CpuShare};
use crate::meter::{Latency, SeriesPoint, Spread};
use crate::place::random_u64;
use crate::relay::{RelayPair, RelayPlan};
use crate::report::{Limits, Round, RunReport, RunResult};
use crate::schedule::Pace;
use crate::verify::Ledger;

/// Sockets the connections of the load generator share, when brokers have several cores: the kernel
/// spreads connections over a broker's cores by socket.
const SOCKETS: usize = 16;

struct RelayRound {
    mb_per_s: f64,
    batches_per_s: f64,
    latency: Latency,
    cpu_s_per_gb: [f64; 2],
}

struct BrokerRound {
    load: LoadReport,
}

/// All rounds of one run.
pub struct Rounds<'a> {
    args: &'a ForwardArgs,
    plan: &'a CpuPlan,
    run: u64,
    relay: Option<RelayPair>,
    path: Option<PathProbe>,
    path_samples: Vec<PathSample>,
    relay_rounds: Vec<RelayRound>,
    broker_rounds: Vec<BrokerRound>,
    accounts: Vec<Account>,
    ledger: Option<Ledger>,
    next_writer: u32,
}

impl<'a> Rounds<'a> {
    /// Prepares a run; with a directory, a relay probe in it unless it is not wanted.
    pub fn new(args: &'a ForwardArgs, plan: &'a CpuPlan, dir: Option<&Path>) -> Result<Self> {
        let owner = plan.brokers.last().and_then(|cpus| cpus.first());
        let relay_plan = RelayPlan {
            ingress: (!args.direct).then(|| plan.brokers[0][0]),
            owner: owner.copied().unwrap_or(0),
            spin_us: args.broker_spin_us(),
            replicas: plan
                .brokers
                .iter()
                .filter_map(|cpus| cpus.first().copied())
                .take(usize::from(args.replicas) - 1)
                .collect(),
            await_replica: args.ack == Ack::Quorum && args.replicas > 1,
        };
        let relay = match dir {
            Some(dir) if !args.no_probe => Some(RelayPair::start(&dir.join("relay"), relay_plan)?),
            _ => None,
        };
        Ok(Self {
            args,
            plan,
            run: random_u64(),
            relay,
            path: match dir {
                Some(dir) if !args.no_probe && args.is_one_outstanding() => {
                    Some(PathProbe::start(dir, plan, args.payload_bytes as usize)?)
                }
                _ => None,
            },
            path_samples: Vec::new(),
            relay_rounds: Vec::new(),
            broker_rounds: Vec::new(),
            accounts: Vec::new(),
            ledger: None,
            next_writer: 0,
        })
    }

    /// Runs them all.
    pub fn run(&mut self, destination: &mut Destination) -> Result<(), LoadError> {
        self.ledger = Some(Ledger::new(self.run, self.args.batch, destination.shards));
        self.accounts = vec![Account::default(); destination.admins.len()];
        self.relay_round()?;
        for _ in 0..self.args.rounds {
            self.broker_round(destination)?;
            self.path_round()?;
            self.relay_round()?;
        }
        // Their processes are not to disturb what follows.
        self.relay = None;
        self.path = None;
        Ok(())
    }

    fn spec(&self, protocol: Protocol, tls: std::sync::Arc<rustls::ClientConfig>) -> LoadSpec {
        let args = self.args;
        LoadSpec {
            run: self.run,
            protocol,
            targets: Vec::new(),
            server_name: "localhost".into(),
            tls,
            connections: usize::from(args.connections),
            streams: usize::from(args.streams),
            in_flight: args.in_flight as usize,
            batch: args.batch,
            payload_bytes: args.payload_bytes as usize,
            shard_count: 1,
            keys: vec![None],
            pace: match args.rate {
                None => Pace::Closed,
                Some(rate) => Pace::Open {
                    batches_per_s: rate / f64::from(args.batch),
                },
            },
            warmup: args.warmup,
            duration: args.duration,
            request_timeout: args.request_timeout,
            sockets: match args.cores_per_broker == 1 && args.addr.is_none() {
                true => 1,
                false => SOCKETS,
            },
            cpu: Some(self.plan.client),
            share: CpuShare::Usual,
            first_writer: 0,
        }
    }

    fn relay_round(&mut self) -> Result<(), LoadError> {
        let setup = |error: anyhow::Error| LoadError::Setup(format!("{error:#}"));
        let Some(relay) = &self.relay else {
            return Ok(());
        };
        let mut spec = self.spec(Protocol::Relay, trust(&relay.ca()).map_err(setup)?);
        // The probe shows what the machine can carry, whatever is asked of the brokers.
        spec.pace = Pace::Closed;
        spec.targets = vec![Target {
            addr: relay.addr(),
            shards: vec![0],
        }];
        let mut cpu = [[0.0; 2]; 2];
        let Some(pair) = &mut self.relay else {
            return Ok(());
        };
        let pair = std::cell::RefCell::new(pair);
        let load = drive(
            "relay probe",
            spec,
            |edge| {
                cpu[usize::from(edge == Edge::End)] = pair.borrow().cpu_seconds();
                Ok(())
            },
            || pair.borrow_mut().check_alive(),
        )?;
        let gb = (load.meter.bytes() as f64 / 1e9).max(1e-12);
        let [from, to] = cpu;
        self.relay_rounds.push(RelayRound {
            mb_per_s: load.meter.bytes() as f64 / load.meter.seconds() / 1e6,
            batches_per_s: load.meter.records() as f64
                / f64::from(self.args.batch)
                / load.meter.seconds(),
            latency: load.meter.latency().clone(),
            cpu_s_per_gb: [(to[0] - from[0]) / gb, (to[1] - from[1]) / gb],
        });
        Ok(())
    }

    fn path_round(&mut self) -> Result<(), LoadError> {
        if let Some(path) = &self.path {
            let sample = path.sample();
            let sample = sample.map_err(|error| LoadError::Setup(format!("{error:#}")))?;
            self.path_samples.push(sample);
        }
        Ok(())
    }

    fn broker_round(&mut self, destination: &mut Destination) -> Result<(), LoadError> {
        let protocol = Protocol::Felix(destination.names.clone());
        let mut spec = self.spec(protocol, destination.tls.clone());
        spec.targets = destination.targets.clone();
        spec.server_name = destination.server_name.clone();
        spec.shard_count = destination.shards;
        spec.keys = destination.keys.clone();
        spec.first_writer = self.next_writer;
        let admins = destination.admins.clone();
        let mut snapshots: [Vec<Snapshot>; 2] = Default::default();
        let mut load = drive(
            self.args.mode(),
            spec,
            |edge| {
                let taken: Result<Vec<_>> = admins
                    .iter()
                    .map(|(_, addr)| Snapshot::take(*addr))
                    .collect();
                snapshots[usize::from(edge == Edge::End)] = taken?;
                Ok(())
            },
            || destination.check_alive(),
        )?;
        let [from, to] = &snapshots;
        for ((account, from), to) in self.accounts.iter_mut().zip(from).zip(to) {
            account.add(from, to);
        }
        self.next_writer = load.next_writer;
        let told = std::mem::replace(
            &mut load.ledger,
            Ledger::new(self.run, self.args.batch, destination.shards),
        );
        if let Some(ledger) = &mut self.ledger {
            ledger.absorb(told);
        }
        self.broker_rounds.push(BrokerRound { load });
        Ok(())
    }

    /// What the run was told of its records.
    pub fn take_ledger(&mut self) -> Ledger {
        self.ledger
            .take()
            .unwrap_or_else(|| Ledger::new(self.run, self.args.batch, 0))
    }

    /// Bytes of a commit group of the busiest owner.
    pub fn group_bytes(&self) -> Option<u64> {
        self.accounts.iter().filter_map(Account::group_bytes).max()
    }

    /// Everything but the verification, the limits that are measured by themselves, and the host.
    pub fn report(&self, destination: &Destination) -> RunReport {
        let rounds = self.round_reports();
        let result = self.result(&rounds, destination.shards);
        let brokers = destination.admins.iter().zip(&self.accounts).enumerate();
        let mut report = RunReport {
            brokers: brokers
                .map(|(index, ((node_id, _), account))| {
                    let role = destination.role_of(index, self.args.direct);
                    account.report(node_id, role, result.records, result.bytes)
                })
                .collect(),
            limits: self.relay_limits(&rounds),
            series: self.series(),
            latency_curve: self.latency().curve(),
            rounds,
            result,
            ..RunReport::default()
        };
        report.workload.shards = u64::from(destination.shards);
        report
    }

    fn round_reports(&self) -> Vec<Round> {
        let mut rounds = Vec::new();
        for (index, round) in self.broker_rounds.iter().enumerate() {
            let meter = &round.load.meter;
            let mb_per_s = meter.bytes() as f64 / meter.seconds() / 1e6;
            let around: Vec<f64> = self
                .relay_rounds
                .iter()
                .skip(index)
                .take(2)
                .map(|r| r.mb_per_s)
                .collect();
            let mean = around.iter().sum::<f64>() / around.len().max(1) as f64;
            rounds.push(Round {
                records_per_s: meter.records() as f64 / meter.seconds(),
                mb_per_s,
                latency_us: meter.latency().summary(),
                ratio: (mean > 0.0).then(|| mb_per_s / mean),
                relay_mb_per_s: around,
            });
        }
        rounds
    }

    fn latency(&self) -> Latency {
        let mut all = Latency::new();
        for round in &self.broker_rounds {
            all.absorb(round.load.meter.latency());
        }
        all
    }

    fn series(&self) -> Vec<SeriesPoint> {
        self.broker_rounds
            .last()
            .map(|round| round.load.meter.series())
            .unwrap_or_default()
    }

    fn result(&self, rounds: &[Round], shards: u32) -> RunResult {
        let batch = u64::from(self.args.batch);
        let mut tally = Tally::default();
        let mut per_shard = vec![0; shards as usize];
        let mut result = RunResult {
            schedule_kept: true,
            ..RunResult::default()
        };
        let mut offered = 0u64;
        for BrokerRound { load } in &self.broker_rounds {
            tally.absorb(&load.tally);
            result.records += load.meter.records();
            result.bytes += load.meter.bytes();
            result.client_cpu_s += load.cpu_s;
            result.unsent += load.schedule.unsent * batch;
            result.self_late += load.schedule.self_late;
            let late_us = load.schedule.self_late_max_ns as f64 / 1e3;
            result.self_late_max_us = result.self_late_max_us.max(late_us);
            offered += load.schedule.offered;
            for (sum, more) in per_shard.iter_mut().zip(&load.per_shard) {
                *sum += more;
            }
        }
        let seconds = self.args.duration.as_secs_f64() * rounds.len() as f64;
        let rates = Spread::of(rounds.iter().map(|r| r.records_per_s));
        // A few late batches are the machine's; one in a thousand is the tool's.
        result.schedule_kept = result.self_late * 1000 <= tally.acked;
        result.offered_per_s = self
            .args
            .rate
            .map(|_| (offered * batch) as f64 / seconds.max(1e-9));
        RunResult {
            records_per_s: rates.median,
            records_per_s_spread: rates,
            mb_per_s: Spread::of(rounds.iter().map(|r| r.mb_per_s)).median,
            failed: tally.failed * batch,
            unknown: tally.unknown * batch,
            retried: tally.retried * batch,
            latency_us: self.latency().summary(),
            per_shard,
            connections_lost: tally.connections_lost,
            reasons: tally.reasons,
            ..result
        }
    }

    fn relay_limits(&self, rounds: &[Round]) -> Limits {
        if self.relay_rounds.is_empty() {
            return Limits::default();
        }
        let p50s: Vec<f64> = rounds.iter().map(|r| r.latency_us.p50).collect();
        let mut latency = Latency::new();
        self.relay_rounds
            .iter()
            .for_each(|r| latency.absorb(&r.latency));
        let median =
            |of: fn(&RelayRound) -> f64| Spread::of(self.relay_rounds.iter().map(of)).median;
        let ratios = Spread::of(rounds.iter().filter_map(|r| r.ratio));
        Limits {
            ratio: Some(ratios.median),
            ratio_spread: Some(ratios),
            relay_mb_per_s: Some(Spread::of(self.relay_rounds.iter().map(|r| r.mb_per_s))),
            relay_batches_per_s: Some(median(|r| r.batches_per_s)),
            relay_latency_us: Some(latency.summary()),
            relay_cpu_s_per_gb: Some([
                median(|r| r.cpu_s_per_gb[0]),
                median(|r| r.cpu_s_per_gb[1]),
            ]),
            one_outstanding: one_outstanding(self.args.hops(), &p50s, &self.path_samples),
            ..Limits::default()
        }
    }
}
