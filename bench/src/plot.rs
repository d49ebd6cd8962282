//! `plot`: a report as one SVG: latency by percentile, and the run over time.

use std::fmt::Write as _;
use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use felix_uring::cli::CommandError;

use crate::meter::SeriesPoint;
use crate::report::{count, micros, RunReport};

const WIDTH: f64 = 900.0;
const PANEL: f64 = 260.0;
const LEFT: f64 = 80.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = 34.0;

/// Flags of `plot`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:\n  \
    # Beside the report, as run.svg\n  \
    felix-bench plot run.json\n\n  \
    # Elsewhere\n  \
    felix-bench plot run.json --out figures/run.svg")]
pub struct PlotArgs {
    /// The report of a `forward` run
    pub run: PathBuf,
    /// The drawing [default: the report's name with .svg]
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}

/// `plot`.
pub fn run_plot(args: &PlotArgs, out: &mut dyn Write) -> Result<(), CommandError> {
    let text = std::fs::read_to_string(&args.run)
        .map_err(|e| CommandError::usage(format!("{}: {e}", args.run.display())))?;
    let report: RunReport = serde_json::from_str(&text).map_err(|e| {
        CommandError::usage(format!(
            "{} is not a report of forward: {e}",
            args.run.display()
        ))
    })?;
    if report.latency_curve.is_empty() {
        return Err(CommandError::usage(format!(
            "{} holds no latencies to draw",
            args.run.display()
        )));
    }
    let path = args
        .out
        .clone()
        .unwrap_or_else(|| args.run.with_extension("svg"));
    std::fs::write(&path, draw(&report))
        .map_err(|e| CommandError::failed(format!("{}: {e}", path.display())))?;
    writeln!(out, "{}", path.display()).map_err(CommandError::failed)
}

/// The drawing.
pub fn draw(report: &RunReport) -> String {
    let mut svg = String::new();
    let height = 3.0 * PANEL;
    let w = &report.workload;
    let title = format!(
        "{}: {} B x batch {}, {} x {} outstanding: {} records/s, p50 {}, p99 {}",
        w.mode,
        w.payload_bytes,
        w.batch,
        w.connections,
        w.in_flight,
        count(report.result.records_per_s),
        micros(report.result.latency_us.p50),
        micros(report.result.latency_us.p99),
    );
    // Writing to a string does not fail.
    let _ = write!(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"white\"/>\n\
         <text x=\"{LEFT}\" y=\"16\" font-size=\"13\">{}</text>\n",
        escape(&title)
    );
    latency_panel(&mut svg, &report.latency_curve);
    let points = &report.series;
    let rate: Vec<(f64, f64)> = rates(points);
    time_panel(&mut svg, 1, "records/s", &[("", "#1f77b4", rate)], |v| {
        count(v)
    });
    let of = |pick: fn(&SeriesPoint) -> f64| points.iter().map(|p| (p.t_s, pick(p))).collect();
    let lines = [
        ("p50", "#1f77b4", of(|p| p.p50_us)),
        ("p99", "#ff7f0e", of(|p| p.p99_us)),
        ("max", "#d62728", of(|p| p.max_us)),
    ];
    time_panel(&mut svg, 2, "latency", &lines, micros);
    svg.push_str("</svg>\n");
    svg
}

/// Records a second, from the distance of neighbouring points.
fn rates(points: &[SeriesPoint]) -> Vec<(f64, f64)> {
    let width = points
        .windows(2)
        .map(|w| w[1].t_s - w[0].t_s)
        .fold(f64::INFINITY, f64::min);
    let width = if width.is_finite() && width > 0.0 {
        width
    } else {
        0.25
    };
    points
        .iter()
        .map(|p| (p.t_s, p.records as f64 / width))
        .collect()
}

/// Percentiles on a scale that spreads the tail: each step to the right is ten times rarer.
fn latency_panel(svg: &mut String, curve: &[(f64, f64)]) {
    let rarity = |q: f64| -(1.0 - q).max(1e-9).log10();
    let farthest = curve
        .iter()
        .map(|(q, _)| *q)
        .filter(|q| *q < 1.0)
        .map(rarity)
        .fold(1.0, f64::max);
    let points: Vec<(f64, f64)> = curve
        .iter()
        .map(|(q, us)| (rarity(*q).min(farthest), *us))
        .collect();
    let frame = Frame::new(0, farthest, &points);
    frame.axes(svg, "latency by percentile", micros);
    for (label, q) in [
        ("50", 0.5),
        ("90", 0.9),
        ("99", 0.99),
        ("99.9", 0.999),
        ("99.99", 0.9999),
        ("99.999", 0.99999),
    ] {
        if rarity(q) <= farthest {
            frame.mark_x(svg, rarity(q), label);
        }
    }
    frame.line(svg, &points, "#1f77b4");
}

/// A line of a panel: name, colour, points.
type Drawn<'a> = (&'a str, &'a str, Vec<(f64, f64)>);

fn time_panel(
    svg: &mut String,
    row: usize,
    title: &str,
    lines: &[Drawn<'_>],
    label: impl Fn(f64) -> String,
) {
    let all: Vec<(f64, f64)> = lines
        .iter()
        .flat_map(|(_, _, points)| points.clone())
        .collect();
    let longest = all.iter().map(|p| p.0).fold(1.0, f64::max);
    let frame = Frame::new(row, longest, &all);
    frame.axes(svg, &format!("{title} over time, last round"), label);
    for tick in 0..=5 {
        let t = longest * f64::from(tick) / 5.0;
        frame.mark_x(svg, t, &format!("{t:.1} s"));
    }
    for (index, (name, color, points)) in lines.iter().enumerate() {
        frame.line(svg, points, color);
        if !name.is_empty() {
            let x = WIDTH - RIGHT - 150.0 + 50.0 * index as f64;
            let y = frame.top + 14.0;
            let _ = writeln!(
                svg,
                "<text x=\"{x}\" y=\"{y}\" fill=\"{color}\">{name}</text>"
            );
        }
    }
}

/// One panel and its scales.
struct Frame {
    top: f64,
    bottom: f64,
    x_max: f64,
    y_max: f64,
}

impl Frame {
    fn new(row: usize, x_max: f64, points: &[(f64, f64)]) -> Self {
        let top = row as f64 * PANEL + TOP;
        let largest = points.iter().map(|p| p.1).fold(0.0, f64::max);
        Self {
            top,
            bottom: top + PANEL - TOP - BOTTOM,
            x_max: x_max.max(1e-9),
            y_max: round_up(largest),
        }
    }

    fn x(&self, value: f64) -> f64 {
        LEFT + (value / self.x_max) * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, value: f64) -> f64 {
        self.bottom - (value / self.y_max) * (self.bottom - self.top)
    }

    fn axes(&self, svg: &mut String, title: &str, label: impl Fn(f64) -> String) {
        let (top, bottom) = (self.top, self.bottom);
        let right = WIDTH - RIGHT;
        for step in 0..=4 {
            let value = self.y_max * f64::from(step) / 4.0;
            let y = self.y(value);
            let _ = write!(
                svg,
                "<line x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\" stroke=\"#ddd\"/>\n\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\n",
                LEFT - 6.0,
                y + 4.0,
                escape(&label(value))
            );
        }
        let _ = write!(
            svg,
            "<line x1=\"{LEFT}\" y1=\"{top}\" x2=\"{LEFT}\" y2=\"{bottom}\" stroke=\"black\"/>\n\
             <text x=\"{:.1}\" y=\"{:.1}\" fill=\"#555\">{}</text>\n",
            LEFT + 8.0,
            top + 14.0,
            escape(title)
        );
    }

    fn mark_x(&self, svg: &mut String, value: f64, label: &str) {
        let x = self.x(value);
        let _ = write!(
            svg,
            "<line x1=\"{x:.1}\" y1=\"{:.1}\" x2=\"{x:.1}\" y2=\"{:.1}\" stroke=\"black\"/>\n\
             <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\n",
            self.bottom,
            self.bottom + 4.0,
            self.bottom + 18.0,
            escape(label)
        );
    }

    fn line(&self, svg: &mut String, points: &[(f64, f64)], color: &str) {
        let mut path = String::new();
        for (x, y) in points {
            let _ = write!(path, "{:.1},{:.1} ", self.x(*x), self.y(*y));
        }
        let _ = writeln!(
            svg,
            "<polyline fill=\"none\" stroke=\"{color}\" stroke-width=\"1.5\" points=\"{}\"/>",
            path.trim_end()
        );
    }
}

/// The next number with one digit that counts, for the end of a scale.
fn round_up(value: f64) -> f64 {
    if value <= 0.0 {
        return 1.0;
    }
    let unit = 10f64.powf(value.log10().floor());
    let steps = [1.0, 2.0, 4.0, 5.0, 8.0, 10.0];
    let step = steps
        .into_iter()
        .find(|s| s * unit >= value)
        .unwrap_or(10.0);
    step * unit
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> RunReport {
        let mut report = RunReport {
            latency_curve: vec![
                (0.0, 100.0),
                (0.5, 200.0),
                (0.99, 900.0),
                (0.999, 1_800.0),
                (1.0, 2_000.0),
            ],
            ..RunReport::default()
        };
        report.workload.mode = "a<b".into();
        report.series = (0..8)
            .map(|i| SeriesPoint {
                t_s: f64::from(i) * 0.25,
                records: 1_000,
                p50_us: 200.0,
                p99_us: 900.0,
                max_us: 2_000.0,
            })
            .collect();
        report
    }

    /// Every y of a drawn line.
    fn ys(svg: &str, line: usize) -> Vec<f64> {
        let points = svg.split("points=\"").nth(line + 1).unwrap();
        let points = points.split('"').next().unwrap();
        points
            .split(' ')
            .map(|p| p.split_once(',').unwrap().1.parse().unwrap())
            .collect()
    }

    #[test]
    fn lines_lie_where_the_figures_say() {
        let svg = draw(&report());
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
        assert!(svg.contains("a&lt;b"), "text is escaped");
        let latency = ys(&svg, 0);
        // The scale ends at 2 ms: the longest lies at the top, the shortest a twentieth above the bottom.
        assert_eq!(*latency.last().unwrap(), TOP);
        let bottom = PANEL - BOTTOM;
        assert!((latency[0] - (bottom - (bottom - TOP) / 20.0)).abs() < 0.1);
        assert!(latency.windows(2).all(|w| w[0] >= w[1]), "longer is higher");
        // 1000 records in a quarter of a second are 4000/s, the end of that scale.
        assert!(ys(&svg, 1).iter().all(|y| *y == PANEL + TOP));
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }

    #[test]
    fn scales_end_at_round_numbers() {
        assert_eq!(round_up(17.0), 20.0);
        assert_eq!(round_up(4_100.0), 5_000.0);
        assert_eq!(round_up(0.0), 1.0);
    }

    #[test]
    fn a_run_without_answers_still_draws() {
        let mut empty = report();
        empty.series.clear();
        assert!(!draw(&empty).contains("NaN"));
    }
}
