//! `quic`: both drivers, measurement by measurement, in turns.

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use felix_uring::driver::quic::probe::ProbeReport;
use serde::{Deserialize, Serialize};

use super::measure::{measure, Shape};
use super::server::{ServerProcess, Side};
use crate::cpu::usable_cpus;
use crate::meter::Spread;
use crate::place::WorkDir;
use crate::report::write_json;

/// Flags of `quic`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:\n  \
    # Our driver and tokio+quinn, in turns, three rounds\n  \
    felix-bench quic\n\n  \
    # With the figures in a file\n  \
    felix-bench quic --rounds 5 --duration 3s --json quic.json\n\n\
    A ratio compares our driver with the other in the same round; the median over the rounds is\n\
    given with its smallest and largest. CPU is that of both ends.")]
pub struct QuicArgs {
    /// Length of each measurement
    #[arg(long, default_value = "2s", value_parser = crate::units::parse_duration)]
    pub duration: Duration,
    /// How often each measurement is made on each side
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,
    /// How long our driver looks for input before it waits, in us
    #[arg(long, default_value_t = crate::forward::BROKER_SPIN_US)]
    pub spin_us: u64,
    /// Write the figures to a file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// One figure of both sides.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    /// What it is, with its unit.
    pub name: String,
    /// Whether more is better.
    pub more_is_better: bool,
    /// Ours.
    pub felix: Spread,
    /// tokio and quinn.
    pub tokio: Spread,
    /// Ours by theirs, round by round.
    pub ratio: Spread,
}

/// The report of `quic`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct QuicReport {
    /// The form.
    pub schema: String,
    /// Every figure.
    pub figures: Vec<Figure>,
    /// Rounds.
    pub rounds: u32,
}

const SHAPES: &[(&str, Shape)] = &[
    ("bulk", Shape::Bulk),
    (
        "echo 64 B x 1",
        Shape::Echo {
            bytes: 64,
            outstanding: 1,
        },
    ),
    (
        "echo 16 KiB x 1",
        Shape::Echo {
            bytes: 16 * 1024,
            outstanding: 1,
        },
    ),
    ("handshake", Shape::Handshakes),
];

/// Runs the measurements and prints them.
pub fn run_quic(args: &QuicArgs, out: &mut dyn Write) -> Result<()> {
    let dir = WorkDir::anywhere()?;
    let cpus = usable_cpus();
    let client_cpu = cpus.first().copied().unwrap_or(0);
    let server_cpu = cpus.last().copied().unwrap_or(0);
    let sides = [Side::Felix, Side::Tokio];
    let mut servers = Vec::new();
    for side in sides {
        servers.push(ServerProcess::start(
            dir.path(),
            side,
            server_cpu,
            args.spin_us,
        )?);
    }
    let mut samples: Vec<Sample> = Vec::new();
    for round in 0..args.rounds {
        for (name, shape) in SHAPES {
            for turn in 0..2 {
                // Each goes first as often as the other.
                let which = (turn + round as usize) % 2;
                let (side, server) = (sides[which], &mut servers[which]);
                server.skip_told()?;
                let report = measure(
                    side,
                    server,
                    client_cpu,
                    args.spin_us,
                    *shape,
                    args.duration,
                )?;
                let server_cpu_per_gb = match shape {
                    Shape::Bulk => {
                        let served = server.last_connection()?;
                        served.cpu_s / (served.bytes.max(1) as f64 / 1e9)
                    }
                    Shape::Echo { .. } | Shape::Handshakes => 0.0,
                };
                collect(
                    &mut samples,
                    which,
                    name,
                    *shape,
                    &report,
                    server_cpu_per_gb,
                );
            }
        }
    }
    let report = QuicReport {
        schema: "felix-bench-quic/1".into(),
        figures: samples.iter().map(Sample::figure).collect(),
        rounds: args.rounds,
    };
    print(&report, out)?;
    if let Some(path) = &args.json {
        write_json(path, &report)?;
    }
    Ok(())
}

struct Sample {
    name: String,
    more_is_better: bool,
    by_side: [Vec<f64>; 2],
}

impl Sample {
    fn figure(&self) -> Figure {
        let [felix, tokio] = &self.by_side;
        let ratios = felix.iter().zip(tokio).filter(|(_, t)| **t > 0.0);
        Figure {
            name: self.name.clone(),
            more_is_better: self.more_is_better,
            felix: Spread::of(felix.iter().copied()),
            tokio: Spread::of(tokio.iter().copied()),
            ratio: Spread::of(ratios.map(|(f, t)| f / t)),
        }
    }
}

fn collect(
    samples: &mut Vec<Sample>,
    side: usize,
    name: &str,
    shape: Shape,
    report: &ProbeReport,
    server_cpu_per_gb: f64,
) {
    let mut add = |what: &str, more_is_better: bool, value: f64| {
        let name = format!("{name}: {what}");
        let at = samples
            .iter()
            .position(|s| s.name == name)
            .unwrap_or_else(|| {
                samples.push(Sample {
                    name,
                    more_is_better,
                    by_side: [Vec::new(), Vec::new()],
                });
                samples.len() - 1
            });
        samples[at].by_side[side].push(value);
    };
    let per_s = report.operations as f64 / report.seconds.max(1e-9);
    match shape {
        Shape::Bulk => {
            add(
                "MB/s",
                true,
                report.bytes as f64 / report.seconds.max(1e-9) / 1e6,
            );
            let sender = report.cpu_s_per_gb();
            add("CPU s/GB, both ends", false, sender + server_cpu_per_gb);
            add("CPU s/GB, sender", false, sender);
            add("CPU s/GB, receiver", false, server_cpu_per_gb);
        }
        Shape::Echo { .. } => {
            add("round trips/s", true, per_s);
            add("p50 us", false, report.latency_ns(0.5) as f64 / 1e3);
            add("p99 us", false, report.latency_ns(0.99) as f64 / 1e3);
        }
        Shape::Handshakes => {
            add("per s", true, per_s);
            add("p50 us", false, report.latency_ns(0.5) as f64 / 1e3);
        }
    }
}

fn print(report: &QuicReport, out: &mut dyn Write) -> Result<()> {
    writeln!(
        out,
        "{:<36} {:>22} {:>22} {:>20}",
        "median (smallest to largest)", "felix", "tokio+quinn", "ratio"
    )?;
    for f in &report.figures {
        let spread = |s: &Spread, digits: usize| {
            format!(
                "{:.digits$} ({:.digits$}-{:.digits$})",
                s.median, s.min, s.max
            )
        };
        let digits = if f.felix.median < 20.0 { 2 } else { 0 };
        writeln!(
            out,
            "{:<36} {:>22} {:>22} {:>20}{}",
            f.name,
            spread(&f.felix, digits),
            spread(&f.tokio, digits),
            spread(&f.ratio, 2),
            if f.more_is_better {
                "  more is better"
            } else {
                "  less is better"
            },
        )?;
    }
    Ok(())
}
