//! The brokers' own accounts, taken at both ends of the measured time.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{bail, Context, Result};
use felix_uring::admin;
use serde_json::Value;

use crate::report::BrokerAccount;

const TIMEOUT: Duration = Duration::from_secs(5);

/// What a broker says of itself at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Snapshot {
    /// CPU seconds since its start.
    pub cpu_s: f64,
    /// Largest resident size.
    pub max_rss_bytes: u64,
    /// Group commits.
    pub fsyncs: u64,
    /// Bytes written to the log.
    pub appended_bytes: u64,
    /// Records in all group commits.
    pub group_records: u64,
}

impl Snapshot {
    /// Asks a broker.
    pub fn take(addr: SocketAddr) -> Result<Self> {
        let answer = admin::get(addr, "/status", TIMEOUT)?;
        if answer.status != 200 {
            bail!("{addr} answered /status with {}", answer.status);
        }
        let status: Value = serde_json::from_str(&answer.body).context("/status is not JSON")?;
        Ok(Self::read(&status))
    }

    fn read(status: &Value) -> Self {
        let number = |object: &Value, key: &str| object[key].as_u64().unwrap_or(0);
        let (process, storage) = (&status["process"], &status["storage"]);
        Self {
            cpu_s: process["cpu_s"].as_f64().unwrap_or(0.0),
            max_rss_bytes: number(process, "max_rss_bytes"),
            fsyncs: number(storage, "fsyncs"),
            appended_bytes: number(storage, "appended_bytes"),
            group_records: number(&status["metrics"], "storage_group_records_sum"),
        }
    }
}

/// The sum of a metric over a broker's cores. `name` is as `/metrics` prints it; labels given must all be there.
pub fn metric(text: &str, name: &str) -> f64 {
    let (family, labels) = match name.split_once('{') {
        None => (name, ""),
        Some((family, labels)) => (family, labels.trim_end_matches('}')),
    };
    let lines = text.lines().filter(|line| {
        let rest = line.strip_prefix(family);
        rest.is_some_and(|rest| rest.starts_with(['{', ' '])) && line.contains(labels)
    });
    lines
        .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
        .sum()
}

/// What a broker did over all measured rounds.
#[derive(Debug, Clone, Default)]
pub struct Account {
    cpu_s: f64,
    max_rss_bytes: u64,
    fsyncs: u64,
    appended_bytes: u64,
    group_records: u64,
}

impl Account {
    /// Adds one round.
    pub fn add(&mut self, from: &Snapshot, to: &Snapshot) {
        self.cpu_s += (to.cpu_s - from.cpu_s).max(0.0);
        self.max_rss_bytes = self.max_rss_bytes.max(to.max_rss_bytes);
        self.fsyncs += to.fsyncs.saturating_sub(from.fsyncs);
        self.appended_bytes += to.appended_bytes.saturating_sub(from.appended_bytes);
        self.group_records += to.group_records.saturating_sub(from.group_records);
    }

    /// Bytes of one group commit, if there was one.
    pub fn group_bytes(&self) -> Option<u64> {
        self.appended_bytes.checked_div(self.fsyncs)
    }

    /// For the report; `records` and `bytes` are the run's.
    pub fn report(&self, node_id: &str, role: &str, records: u64, bytes: u64) -> BrokerAccount {
        let per = |amount: f64| {
            if amount > 0.0 {
                self.cpu_s / amount
            } else {
                0.0
            }
        };
        BrokerAccount {
            node_id: node_id.to_string(),
            role: role.to_string(),
            cpu_s: self.cpu_s,
            max_rss_bytes: self.max_rss_bytes,
            fsyncs: self.fsyncs,
            appended_bytes: self.appended_bytes,
            commit_group_records_mean: match self.fsyncs {
                0 => 0.0,
                commits => self.group_records as f64 / commits as f64,
            },
            cpu_s_per_million_records: per(records as f64 / 1e6),
            cpu_s_per_gb: per(bytes as f64 / 1e9),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use felix_uring::admin::{NodeInfo, SharedState};
    use felix_uring::metrics::MetricsHub;

    #[test]
    fn metrics_are_summed_over_cores_and_told_apart_by_label() {
        let text =
            "# HELP a_total x\na_total{core=\"0\",why=\"x\"} 2\na_total{core=\"1\",why=\"x\"} 3\n\
                    a_total{core=\"0\",why=\"y\"} 5\na_total_more 7\nb 1.5\n";
        assert_eq!(metric(text, "a_total"), 10.0);
        assert_eq!(metric(text, "a_total{why=\"x\"}"), 5.0);
        assert_eq!(metric(text, "b"), 1.5);
        assert_eq!(metric(text, "c"), 0.0);
    }

    #[test]
    fn the_status_of_a_broker_is_read() {
        let state = SharedState::new(NodeInfo::default(), MetricsHub::with_cores(1));
        let core = state.metrics().core(0).unwrap();
        let before = Snapshot::read(&state.status());
        core.storage_commits.add(4);
        core.storage_appended_bytes.add(64 << 10);
        core.storage_group_records_sum.add(400);
        let after = Snapshot::read(&state.status());
        assert!(after.max_rss_bytes > 0 && after.cpu_s > 0.0);
        let mut account = Account::default();
        account.add(&before, &after);
        account.add(&before, &after);
        let report = account.report("n1", "owner", 2_000_000, 1_000_000_000);
        assert_eq!((report.fsyncs, report.appended_bytes), (8, 128 << 10));
        assert_eq!(report.commit_group_records_mean, 100.0);
        assert_eq!(account.group_bytes(), Some(16 << 10));
        assert_eq!(report.cpu_s_per_million_records * 2.0, report.cpu_s);
    }
}
