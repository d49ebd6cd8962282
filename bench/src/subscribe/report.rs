//! The report of a fan-out: as JSON and as text.

use std::fmt::Write;

use serde::{Deserialize, Serialize};

use super::args::SubscribeArgs;
use super::check::FanoutVerify;
use super::spec::FanReport;
use super::Rounds;
use crate::forward::one_outstanding;
use crate::meter::{Latency, LatencySummary, Spread};
use crate::report::{count, micros, Host, OneOutstanding};

/// The form of the report.
const SCHEMA: &str = "felix-bench-subscribe/1";
/// A record comes in over one hop and goes out over another.
const HOPS: u32 = 2;

/// A run of `subscribe`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct SubscribeReport {
    pub schema: String,
    pub workload: FanoutWorkload,
    pub result: FanoutResult,
    pub limits: FanoutLimits,
    pub verify: FanoutVerify,
    pub rounds: Vec<FanoutRound>,
    pub host: Host,
}

/// What a run was asked to do.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct FanoutWorkload {
    pub subscribers: u64,
    pub payload_bytes: u64,
    pub batch: u64,
    pub in_flight: u64,
    pub cores_per_broker: u64,
    pub duration_s: f64,
    pub warmup_s: f64,
    pub broker_flags: Vec<String>,
}

/// What came of it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct FanoutResult {
    /// Records that came in, at all subscribers together; the median of the rounds.
    pub deliveries_per_s: f64,
    pub deliveries_per_s_spread: Spread,
    pub mb_per_s: f64,
    /// Of a batch to each subscriber, from its being sent.
    pub latency_us: LatencySummary,
    /// CPU of the broker on one delivered record.
    pub broker_cpu_us_per_delivery: f64,
    /// CPU seconds of the load generator.
    pub client_cpu_s: f64,
    /// One record at a time to one subscriber, from its being sent.
    pub lone_us: LatencySummary,
}

/// What the machine does without a broker, in the same run. Null with `--no-probe`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct FanoutLimits {
    /// Deliveries by those of the bare fan-out: the median over the rounds.
    pub ratio: Option<f64>,
    pub ratio_spread: Option<Spread>,
    /// CPU on a delivery by that of the bare fan-out.
    pub cpu_ratio: Option<f64>,
    pub bare_deliveries_per_s: Option<Spread>,
    pub bare_latency_us: Option<LatencySummary>,
    pub bare_cpu_us_per_delivery: Option<f64>,
    /// One record at a time by one durable write and two echoes.
    pub one_outstanding: Option<OneOutstanding>,
}

/// One round.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct FanoutRound {
    pub deliveries_per_s: f64,
    pub latency_us: LatencySummary,
    /// Of the bare fan-out before and after it.
    pub bare_deliveries_per_s: Vec<f64>,
    pub ratio: Option<f64>,
}

fn rate(report: &FanReport) -> f64 {
    report.deliveries as f64 / report.seconds.max(1e-9)
}

fn cpu_us_per_delivery(reports: &[FanReport]) -> f64 {
    let cpu: f64 = reports.iter().map(|r| r.server_cpu_s).sum();
    let deliveries: u64 = reports.iter().map(|r| r.deliveries).sum();
    cpu * 1e6 / deliveries.max(1) as f64
}

fn latency(reports: &[FanReport]) -> LatencySummary {
    let mut all = Latency::new();
    reports.iter().for_each(|r| all.absorb(&r.latency));
    all.summary()
}

pub(super) fn make(args: &SubscribeArgs, all: &Rounds, host: Host) -> SubscribeReport {
    let rounds: Vec<FanoutRound> = all
        .broker
        .iter()
        .enumerate()
        .map(|(index, round)| {
            let around: Vec<f64> = all.bare.iter().skip(index).take(2).map(rate).collect();
            let mean = around.iter().sum::<f64>() / around.len().max(1) as f64;
            FanoutRound {
                deliveries_per_s: rate(round),
                latency_us: round.latency.summary(),
                ratio: (mean > 0.0).then(|| rate(round) / mean),
                bare_deliveries_per_s: around,
            }
        })
        .collect();
    let mut verify = FanoutVerify::default();
    for round in all.broker.iter().chain(&all.lone) {
        verify.absorb(&round.verify);
    }
    let rates = Spread::of(rounds.iter().map(|r| r.deliveries_per_s));
    SubscribeReport {
        schema: SCHEMA.into(),
        workload: FanoutWorkload {
            subscribers: u64::from(args.subscribers),
            payload_bytes: args.payload_bytes,
            batch: u64::from(args.batch),
            in_flight: u64::from(args.in_flight),
            cores_per_broker: u64::from(args.cores_per_broker),
            duration_s: args.duration.as_secs_f64(),
            warmup_s: args.warmup.as_secs_f64(),
            broker_flags: args.serve.serve_flags.clone(),
        },
        result: FanoutResult {
            deliveries_per_s: rates.median,
            deliveries_per_s_spread: rates,
            mb_per_s: rates.median * args.payload_bytes as f64 / 1e6,
            latency_us: latency(&all.broker),
            broker_cpu_us_per_delivery: cpu_us_per_delivery(&all.broker),
            client_cpu_s: all.broker.iter().map(|r| r.client_cpu_s).sum(),
            lone_us: latency(&all.lone),
        },
        limits: limits(all, &rounds),
        verify,
        rounds,
        host,
    }
}

fn limits(all: &Rounds, rounds: &[FanoutRound]) -> FanoutLimits {
    if all.bare.is_empty() {
        return FanoutLimits::default();
    }
    let ratios = Spread::of(rounds.iter().filter_map(|r| r.ratio));
    let bare_cpu = cpu_us_per_delivery(&all.bare);
    let lone_p50s: Vec<f64> = all.lone.iter().map(|r| r.latency.at(0.5)).collect();
    FanoutLimits {
        ratio: Some(ratios.median),
        ratio_spread: Some(ratios),
        cpu_ratio: Some(cpu_us_per_delivery(&all.broker) / bare_cpu.max(1e-9)),
        bare_deliveries_per_s: Some(Spread::of(all.bare.iter().map(rate))),
        bare_latency_us: Some(latency(&all.bare)),
        bare_cpu_us_per_delivery: Some(bare_cpu),
        one_outstanding: one_outstanding(HOPS, &lone_p50s, &all.path),
    }
}

impl SubscribeReport {
    /// The report for people.
    pub fn render(&self) -> String {
        let mut out = String::new();
        let (w, r, l, v) = (&self.workload, &self.result, &self.limits, &self.verify);
        // Writing to a string does not fail.
        let _ = writeln!(
            out,
            "fan-out  {} subscribers, {} x {} bytes, {} on their way: {} deliveries/s, {:.1} MB/s ({} to {})",
            w.subscribers,
            w.batch,
            w.payload_bytes,
            w.in_flight,
            count(r.deliveries_per_s),
            r.mb_per_s,
            count(r.deliveries_per_s_spread.min),
            count(r.deliveries_per_s_spread.max),
        );
        let _ = writeln!(
            out,
            "latency  p50 {}  p99 {}  max {}",
            micros(r.latency_us.p50),
            micros(r.latency_us.p99),
            micros(r.latency_us.max)
        );
        let _ = writeln!(
            out,
            "cpu      broker {:.3} us a delivery",
            r.broker_cpu_us_per_delivery
        );
        let _ = writeln!(
            out,
            "lone     one record at a time: p50 {}  p99 {}",
            micros(r.lone_us.p50),
            micros(r.lone_us.p99)
        );
        self.render_limits(&mut out, l);
        let _ = writeln!(
            out,
            "checked  {} deliveries: {} missing, {} duplicated, {} corrupt, {} misplaced",
            v.checked, v.missing, v.duplicated, v.corrupt, v.misplaced
        );
        out
    }

    fn render_limits(&self, out: &mut String, l: &FanoutLimits) {
        if let (Some(ratio), Some(bare)) = (&l.ratio_spread, &l.bare_deliveries_per_s) {
            let p99 = l
                .bare_latency_us
                .as_ref()
                .map_or(0.0, |latency| latency.p99);
            let _ = writeln!(
                out,
                "bare     {} deliveries/s, p99 {}, {:.3} us of CPU each: ratio {:.2} ({:.2} to {:.2}), CPU {:.2}",
                count(bare.median),
                micros(p99),
                l.bare_cpu_us_per_delivery.unwrap_or(0.0),
                ratio.median,
                ratio.min,
                ratio.max,
                l.cpu_ratio.unwrap_or(0.0),
            );
        }
        if let Some(one) = &l.one_outstanding {
            let _ = writeln!(
                out,
                "         lone p50 {} by {} echoes of {} and a write of {}: {:.2} ({:.2} to {:.2})",
                micros(one.p50_us.median),
                one.hops,
                micros(one.echo_p50_us.median),
                micros(one.write_p50_us.median),
                one.ratio.median,
                one.ratio.min,
                one.ratio.max,
            );
        }
    }
}
