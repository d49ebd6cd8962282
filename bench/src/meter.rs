//! What is measured of a run: latencies, rates, and how both went over time.
//!
//! Invariants: what was due in the warm-up is in no latency, what was answered in it in no rate; the
//! same numbers feed the text, the JSON and the plot.

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// Longest latency told apart, an hour; longer ones count as this.
const LONGEST_NS: u64 = 3_600_000_000_000;
/// Width of a point of the time series.
const POINT_NS: u64 = 250_000_000;
/// Points kept; a longer run keeps its first ones.
const MAX_POINTS: usize = 20_000;

/// Latencies of a run.
#[derive(Debug, Clone)]
pub struct Latency(Histogram<u64>);

impl Default for Latency {
    fn default() -> Self {
        Self::new()
    }
}

impl Latency {
    /// None so far.
    pub fn new() -> Self {
        // Three digits over an hour of nanoseconds are within what the histogram can be.
        let histogram = Histogram::new_with_bounds(1, LONGEST_NS, 3)
            .unwrap_or_else(|_| unreachable!("constant bounds that the histogram takes"));
        Self(histogram)
    }

    /// Adds one.
    pub fn record(&mut self, latency_ns: u64) {
        self.0.saturating_record(latency_ns.max(1));
    }

    /// Adds all of another.
    pub fn absorb(&mut self, other: &Latency) {
        // Both have the same bounds.
        let _ = self.0.add(&other.0);
    }

    /// The latency below which the fraction `quantile` lies, in microseconds; 0 when there is none.
    pub fn at(&self, quantile: f64) -> f64 {
        if self.0.is_empty() {
            return 0.0;
        }
        let ns = if quantile >= 1.0 {
            self.0.max()
        } else {
            self.0.value_at_quantile(quantile)
        };
        ns as f64 / 1e3
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.0.len()
    }

    /// The summary that goes into the report.
    pub fn summary(&self) -> LatencySummary {
        LatencySummary {
            p50: self.at(0.5),
            p90: self.at(0.9),
            p99: self.at(0.99),
            p999: self.at(0.999),
            p9999: self.at(0.9999),
            max: self.at(1.0),
            count: self.count(),
        }
    }

    /// Points of the distribution, for the plot: quantile and microseconds.
    pub fn curve(&self) -> Vec<(f64, f64)> {
        let mut points: Vec<(f64, f64)> = (0..100)
            .map(|p| f64::from(p) / 100.0)
            .map(|q| (q, self.at(q)))
            .collect();
        let mut tail = 0.01 / 1.5;
        while tail * self.count() as f64 >= 1.0 && points.len() < 200 {
            points.push((1.0 - tail, self.at(1.0 - tail)));
            tail /= 1.5;
        }
        points.push((1.0, self.at(1.0)));
        points
    }
}

/// Percentiles in microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct LatencySummary {
    /// Half are below.
    pub p50: f64,
    /// 90 % are below.
    pub p90: f64,
    /// 99 % are below.
    pub p99: f64,
    /// 99.9 % are below.
    pub p999: f64,
    /// 99.99 % are below.
    pub p9999: f64,
    /// The longest.
    pub max: f64,
    /// How many were measured.
    pub count: u64,
}

/// A quarter of a second of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct SeriesPoint {
    /// Its start, in seconds from the start of the measured time.
    pub t_s: f64,
    /// Records answered as written.
    pub records: u64,
    /// Latency of the batches answered in it.
    pub p50_us: f64,
    /// The same.
    pub p99_us: f64,
    /// The same.
    pub max_us: f64,
}

/// Measures one run.
#[derive(Debug, Clone)]
pub struct Meter {
    measure_from_ns: u64,
    end_ns: u64,
    latency: Latency,
    records: u64,
    bytes: u64,
    series: Vec<SeriesPoint>,
    point: Latency,
    point_records: u64,
    point_index: u64,
}

impl Meter {
    /// A run measured from one moment to another.
    pub fn new(measure_from_ns: u64, end_ns: u64) -> Self {
        Self {
            measure_from_ns,
            end_ns,
            latency: Latency::new(),
            records: 0,
            bytes: 0,
            series: Vec::new(),
            point: Latency::new(),
            point_records: 0,
            point_index: 0,
        }
    }

    /// A batch that was due at `due_ns` is answered as written.
    pub fn on_acked(&mut self, now_ns: u64, due_ns: u64, records: u64, bytes: u64) {
        let latency_ns = now_ns.saturating_sub(due_ns);
        if due_ns >= self.measure_from_ns && due_ns < self.end_ns {
            self.latency.record(latency_ns);
        }
        if now_ns < self.measure_from_ns {
            return;
        }
        let in_time = now_ns < self.end_ns;
        if in_time {
            self.records += records;
            self.bytes += bytes;
        }
        let index = (now_ns - self.measure_from_ns) / POINT_NS;
        if index != self.point_index {
            self.close_point();
            self.point_index = index;
        }
        self.point.record(latency_ns);
        self.point_records += if in_time { records } else { 0 };
    }

    fn close_point(&mut self) {
        if self.point.count() > 0 && self.series.len() < MAX_POINTS {
            self.series.push(self.open_point());
        }
        self.point.0.reset();
        self.point_records = 0;
    }

    fn open_point(&self) -> SeriesPoint {
        SeriesPoint {
            t_s: (self.point_index * POINT_NS) as f64 / 1e9,
            records: self.point_records,
            p50_us: self.point.at(0.5),
            p99_us: self.point.at(0.99),
            max_us: self.point.at(1.0),
        }
    }

    /// Latencies of the batches due in the measured time.
    pub fn latency(&self) -> &Latency {
        &self.latency
    }

    /// Records answered as written in the measured time.
    pub fn records(&self) -> u64 {
        self.records
    }

    /// Payload bytes of those.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Length of the measured time.
    pub fn seconds(&self) -> f64 {
        (self.end_ns - self.measure_from_ns) as f64 / 1e9
    }

    /// How the run went over time; a stretch without answers has no points.
    pub fn series(&self) -> Vec<SeriesPoint> {
        let mut series = self.series.clone();
        if self.point.count() > 0 {
            series.push(self.open_point());
        }
        series
    }
}

/// The middle of some numbers, and their smallest and largest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// The middle one; between the two middle ones of an even number.
    pub median: f64,
    /// The smallest.
    pub min: f64,
    /// The largest.
    pub max: f64,
}

impl Spread {
    /// Of these numbers; all zero without any.
    pub fn of(numbers: impl IntoIterator<Item = f64>) -> Self {
        let mut sorted: Vec<f64> = numbers.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        let Some((&min, &max)) = sorted.first().zip(sorted.last()) else {
            return Self::default();
        };
        let middle = sorted.len() / 2;
        let median = if sorted.len() % 2 == 1 {
            sorted[middle]
        } else {
            (sorted[middle - 1] + sorted[middle]) / 2.0
        };
        Self { median, min, max }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warm_up_and_the_time_after_the_end_do_not_count() {
        let mut meter = Meter::new(1_000, 2_000);
        meter.on_acked(900, 800, 1, 10);
        meter.on_acked(1_100, 900, 1, 10);
        meter.on_acked(1_500, 1_200, 1, 10);
        meter.on_acked(2_500, 1_900, 1, 10);
        assert_eq!((meter.records(), meter.bytes()), (2, 20));
        // Due in the measured time: the third and the fourth, which came late.
        assert_eq!(meter.latency().count(), 2);
        assert_eq!(meter.latency().at(1.0), 0.6);
    }

    #[test]
    fn the_middle_and_its_bounds() {
        assert_eq!(Spread::of([3.0, 1.0, 2.0]).median, 2.0);
        let even = Spread::of([4.0, 1.0, 2.0, 3.0]);
        assert_eq!((even.median, even.min, even.max), (2.5, 1.0, 4.0));
        assert_eq!(Spread::of([]), Spread::default());
    }

    #[test]
    fn the_curve_ends_at_the_longest() {
        let mut latency = Latency::new();
        for n in 1..=10_000 {
            latency.record(n * 1_000);
        }
        let curve = latency.curve();
        assert!(curve
            .windows(2)
            .all(|w| w[0].0 < w[1].0 && w[0].1 <= w[1].1));
        let &(q, us) = curve.last().unwrap();
        assert_eq!(q, 1.0);
        assert!((9_990.0..10_020.0).contains(&us));
    }
}
