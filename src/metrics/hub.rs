//! Adds the cores up and renders Prometheus text. Runs on control threads only.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;

use super::cells::BUCKET_BOUNDS_US;
use super::{ControlMetrics, CoreMetrics, Kind, Sample, SampleValue};

/// Reads the metrics of all cores of the process.
#[derive(Debug, Clone)]
pub struct MetricsHub {
    cores: Vec<Arc<CoreMetrics>>,
    control: Arc<ControlMetrics>,
}

/// One histogram, summed over the cores.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HistogramTotals {
    /// Events a bucket (not cumulative); the last one is above every bound.
    pub counts: Vec<u64>,
    pub sum_us: u64,
}

impl HistogramTotals {
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Upper bound of the bucket that holds the quantile; `None` while empty or above all bounds.
    pub fn quantile_bound_us(&self, quantile: f64) -> Option<u64> {
        let count = self.count();
        if count == 0 {
            return None;
        }
        let wanted = ((count as f64) * quantile.clamp(0.0, 1.0)).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (index, n) in self.counts.iter().enumerate() {
            seen += n;
            if seen >= wanted {
                return BUCKET_BOUNDS_US.get(index).copied();
            }
        }
        None
    }
}

/// The samples of all cores that belong to one declared metric.
struct Column<'a> {
    key: &'static str,
    name: &'static str,
    help: &'static str,
    cores: Vec<SampleValue<'a>>,
}

impl MetricsHub {
    /// `cores` in core order; the control threads' cells are made here.
    pub fn new(cores: Vec<Arc<CoreMetrics>>) -> Self {
        Self {
            cores,
            control: Arc::default(),
        }
    }

    /// A hub over `cores` fresh sets of cells.
    pub fn with_cores(cores: usize) -> Self {
        Self::new((0..cores).map(|_| Arc::default()).collect())
    }

    /// The cells of core `index`; `None` when there is no such core.
    pub fn core(&self, index: usize) -> Option<&Arc<CoreMetrics>> {
        self.cores.get(index)
    }

    pub fn cores(&self) -> &[Arc<CoreMetrics>] {
        &self.cores
    }

    pub fn control(&self) -> &Arc<ControlMetrics> {
        &self.control
    }

    /// Every plain number by its field name, families flattened to `field.label`. Per-core
    /// values are added.
    pub fn totals(&self) -> BTreeMap<String, u64> {
        let mut out = BTreeMap::new();
        for column in self.columns() {
            match column.cores.first() {
                Some(SampleValue::Number(kind, _)) => {
                    out.insert(column.key.to_string(), column.combined(*kind));
                }
                Some(SampleValue::Family { values, .. }) => {
                    for (label, n) in values.iter().zip(column.family_sums()) {
                        out.insert(format!("{}.{label}", column.key), n);
                    }
                }
                Some(SampleValue::Histogram(_)) | None => {}
            }
        }
        out
    }

    /// Every histogram by its field name.
    pub fn histograms(&self) -> BTreeMap<&'static str, HistogramTotals> {
        self.columns()
            .into_iter()
            .filter_map(|c| c.histogram().map(|h| (c.key, h)))
            .collect()
    }

    /// The text exposition format, version 0.0.4.
    pub fn render(&self) -> String {
        let mut out = String::with_capacity(32 << 10);
        for column in self.columns() {
            column.render(&mut out);
        }
        out
    }

    fn columns(&self) -> Vec<Column<'_>> {
        let mut columns = transpose(self.cores.iter().map(|c| c.samples()).collect());
        columns.extend(transpose(vec![self.control.samples()]));
        columns
    }
}

/// Every metric as a Markdown table, for the manual.
pub fn reference() -> String {
    let hub = MetricsHub::with_cores(1);
    let mut text = String::from("| Metric | Type | Labels | Meaning |\n|---|---|---|---|\n");
    for column in hub.columns() {
        let labels = match column.cores.first() {
            Some(SampleValue::Number(Kind::CounterPerCore | Kind::GaugePerCore, _)) => {
                "`core`".to_string()
            }
            Some(SampleValue::Family { label, values, .. }) => {
                format!("`{label}`: {}", values.join(", "))
            }
            Some(SampleValue::Number(..) | SampleValue::Histogram(_)) | None => String::new(),
        };
        let _ = writeln!(
            text,
            "| `{}` | {} | {labels} | {} |",
            column.name,
            column.prometheus_type(),
            column.help
        );
    }
    text
}

fn transpose(cores: Vec<Vec<Sample<'_>>>) -> Vec<Column<'_>> {
    let mut columns: Vec<Column<'_>> = Vec::new();
    for samples in cores {
        let first = columns.is_empty();
        for (index, sample) in samples.into_iter().enumerate() {
            if first {
                columns.push(Column {
                    key: sample.key,
                    name: sample.name,
                    help: sample.help,
                    cores: vec![sample.value],
                });
            } else {
                columns[index].cores.push(sample.value);
            }
        }
    }
    columns
}

impl Column<'_> {
    fn numbers(&self) -> impl Iterator<Item = u64> + '_ {
        self.cores.iter().filter_map(|value| match value {
            SampleValue::Number(_, n) => Some(*n),
            SampleValue::Family { .. } | SampleValue::Histogram(_) => None,
        })
    }

    fn combined(&self, kind: Kind) -> u64 {
        match kind {
            Kind::GaugeMax => self.numbers().max().unwrap_or(0),
            Kind::GaugeMin => self.numbers().min().unwrap_or(0),
            Kind::Counter | Kind::Gauge | Kind::GaugePerCore | Kind::CounterPerCore => {
                self.numbers().fold(0, u64::wrapping_add)
            }
        }
    }

    fn family_sums(&self) -> Vec<u64> {
        let mut sums: Vec<u64> = Vec::new();
        for value in &self.cores {
            if let SampleValue::Family { numbers, .. } = value {
                sums.resize(numbers.len(), 0);
                for (sum, n) in sums.iter_mut().zip(numbers) {
                    *sum = sum.wrapping_add(*n);
                }
            }
        }
        sums
    }

    fn histogram(&self) -> Option<HistogramTotals> {
        let mut totals: Option<HistogramTotals> = None;
        for value in &self.cores {
            let SampleValue::Histogram(h) = value else {
                return None;
            };
            let into = totals.get_or_insert_with(|| HistogramTotals {
                counts: vec![0; BUCKET_BOUNDS_US.len() + 1],
                sum_us: 0,
            });
            for (sum, n) in into.counts.iter_mut().zip(h.counts()) {
                *sum = sum.wrapping_add(n);
            }
            into.sum_us = into.sum_us.wrapping_add(h.sum_us());
        }
        totals
    }

    fn prometheus_type(&self) -> &'static str {
        match self.cores.first() {
            Some(SampleValue::Number(Kind::Counter | Kind::CounterPerCore, _))
            | Some(SampleValue::Family { .. }) => "counter",
            Some(SampleValue::Number(
                Kind::Gauge | Kind::GaugeMax | Kind::GaugeMin | Kind::GaugePerCore,
                _,
            )) => "gauge",
            Some(SampleValue::Histogram(_)) => "histogram",
            None => "untyped",
        }
    }

    fn render(&self, out: &mut String) {
        if self.cores.is_empty() {
            return;
        }
        let name = self.name;
        // Writing to a String cannot fail.
        let _ = writeln!(out, "# HELP {name} {}", self.help);
        let _ = writeln!(out, "# TYPE {name} {}", self.prometheus_type());
        match &self.cores[0] {
            SampleValue::Number(Kind::CounterPerCore | Kind::GaugePerCore, _) => {
                for (core, n) in self.numbers().enumerate() {
                    let _ = writeln!(out, "{name}{{core=\"{core}\"}} {n}");
                }
            }
            SampleValue::Number(kind, _) => {
                let _ = writeln!(out, "{name} {}", self.combined(*kind));
            }
            SampleValue::Family { label, values, .. } => {
                for (value, n) in values.iter().zip(self.family_sums()) {
                    let _ = writeln!(out, "{name}{{{label}=\"{value}\"}} {n}");
                }
            }
            SampleValue::Histogram(_) => self.render_histogram(out),
        }
    }

    fn render_histogram(&self, out: &mut String) {
        let Some(totals) = self.histogram() else {
            return;
        };
        let name = self.name;
        let mut below = 0u64;
        for (bound, n) in BUCKET_BOUNDS_US.iter().zip(&totals.counts) {
            below += n;
            let _ = writeln!(
                out,
                "{name}_bucket{{le=\"{}\"}} {below}",
                *bound as f64 / 1e6
            );
        }
        let count = totals.count();
        let _ = writeln!(out, "{name}_bucket{{le=\"+Inf\"}} {count}");
        let _ = writeln!(out, "{name}_sum {}", totals.sum_us as f64 / 1e6);
        let _ = writeln!(out, "{name}_count {count}");
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ClientCode, PeerCode};
    use super::*;

    fn hub() -> MetricsHub {
        let hub = MetricsHub::with_cores(2);
        let [a, b] = hub.cores() else { unreachable!() };
        a.client_frames_in.add(3);
        b.client_frames_in.add(4);
        a.publishes_refused.inc(ClientCode::Overloaded);
        b.publishes_refused.add(ClientCode::Overloaded, 2);
        b.forwards_refused.inc(PeerCode::NotLeader);
        a.storage_free_bytes.set(100);
        b.storage_free_bytes.set(90);
        a.longest_turn_us.set(7);
        b.longest_turn_us.set(9);
        a.storage_queued_bytes.set(11);
        b.storage_queued_bytes.set(13);
        a.publish_ack_us.record_us(60);
        b.publish_ack_us.record_many_us(900, 3);
        hub.control().catalog_reloads.add_shared(5);
        hub
    }

    #[test]
    fn cores_are_combined_by_kind() {
        let totals = hub().totals();
        assert_eq!(totals["client_frames_in"], 7);
        assert_eq!(totals["publishes_refused.overloaded"], 3);
        assert_eq!(totals["forwards_refused.not_leader"], 1);
        assert_eq!(totals["storage_free_bytes"], 90);
        assert_eq!(totals["longest_turn_us"], 9);
        assert_eq!(totals["storage_queued_bytes"], 24);
        assert_eq!(totals["catalog_reloads"], 5);
    }

    #[test]
    fn rendered_text_has_each_line() {
        let text = hub().render();
        for line in [
            "# TYPE felix_client_frames_received_total counter",
            "felix_client_frames_received_total 7",
            "felix_publishes_refused_total{code=\"overloaded\"} 3",
            "felix_publishes_refused_total{code=\"forbidden\"} 0",
            "# TYPE felix_storage_free_bytes gauge",
            "felix_storage_free_bytes 90",
            "felix_storage_queued_bytes{core=\"0\"} 11",
            "felix_storage_queued_bytes{core=\"1\"} 13",
            "# TYPE felix_publish_ack_seconds histogram",
            "felix_publish_ack_seconds_bucket{le=\"0.00005\"} 0",
            "felix_publish_ack_seconds_bucket{le=\"0.0001\"} 1",
            "felix_publish_ack_seconds_bucket{le=\"0.001\"} 4",
            "felix_publish_ack_seconds_bucket{le=\"+Inf\"} 4",
            "felix_publish_ack_seconds_sum 0.00276",
            "felix_publish_ack_seconds_count 4",
            "felix_catalog_reloads_total 5",
        ] {
            assert!(
                text.lines().any(|l| l == line),
                "missing {line:?} in\n{text}"
            );
        }
    }

    #[test]
    fn names_are_unique_and_follow_the_conventions() {
        let core = CoreMetrics::default();
        let control = ControlMetrics::default();
        let mut seen = std::collections::BTreeSet::new();
        for sample in core.samples().into_iter().chain(control.samples()) {
            assert!(seen.insert(sample.name), "{} twice", sample.name);
            assert!(sample.help.ends_with('.'), "{}", sample.name);
            let counts = matches!(
                sample.value,
                SampleValue::Family { .. }
                    | SampleValue::Number(Kind::Counter | Kind::CounterPerCore, _)
            );
            assert_eq!(counts, sample.name.ends_with("_total"), "{}", sample.name);
        }
    }

    #[test]
    fn quantiles_name_a_bucket() {
        let h = &hub().histograms()["publish_ack_us"];
        assert_eq!(h.quantile_bound_us(0.25), Some(100));
        assert_eq!(h.quantile_bound_us(0.5), Some(1_000));
        let empty = HistogramTotals {
            counts: vec![0; BUCKET_BOUNDS_US.len() + 1],
            sum_us: 0,
        };
        assert_eq!(empty.quantile_bound_us(0.5), None);
    }
}
