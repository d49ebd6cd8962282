//! Where the time of forwarded publishes goes: the brokers' own histograms, read at both ends of a load.
//!
//! A broker's buckets are coarse, so a quantile is placed within its bucket by straight lines, and medians do
//! not add up as means do; what stands in the table is the difference of the medians of one stage and the one
//! inside it. Large batches of the same time are among them: few, so a median moves little.

use std::time::Duration;

use anyhow::{Context, Result};
use felix_uring::cluster::Cluster;
use serde::{Deserialize, Serialize};

/// A broker brings what it tells up to date once a second.
const SETTLE: Duration = Duration::from_millis(1100);
/// From a publish read to its answer written; from a forward written to its answer read; from a forward
/// read to its answer written.
const INGRESS: &str = "felix_publish_ack_seconds";
const LINK: &str = "felix_forward_round_trip_seconds";
const OWNER: &str = "felix_peer_publish_seconds";

/// Medians in microseconds of what a publish spends where.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Stages {
    /// In the client, and between it and the broker it talks to, both ways.
    pub client_us: f64,
    /// In the broker that forwards.
    pub ingress_us: f64,
    /// Between the brokers, both ways, until the owner has read it and this broker the answer.
    pub link_us: f64,
    /// At the owner, until it is durable and answered.
    pub owner_us: f64,
}

/// The histograms of both brokers at one moment.
pub struct Moment([Buckets; 3]);

impl Moment {
    /// Asks the broker that forwards and the owner once they have told all of what is over.
    pub fn take(cluster: &Cluster) -> Result<Self> {
        std::thread::sleep(SETTLE);
        let ingress = cluster.node(0).metrics()?;
        let owner = cluster.node(1).metrics()?;
        Ok(Self([
            Buckets::read(&ingress, INGRESS)?,
            Buckets::read(&ingress, LINK)?,
            Buckets::read(&owner, OWNER)?,
        ]))
    }
}

/// What happened between two moments; `client_us` is the median the client saw.
pub fn stages(from: &Moment, to: &Moment, client_us: f64) -> Stages {
    let [ingress, link, owner] =
        std::array::from_fn(|i| to.0[i].since(&from.0[i]).quantile(0.5) * 1e6);
    Stages {
        client_us: client_us - ingress,
        ingress_us: ingress - link,
        link_us: link - owner,
        owner_us: owner,
    }
}

/// Upper bounds in seconds and the events up to each, as they are told.
#[derive(Debug, Clone, PartialEq)]
struct Buckets(Vec<(f64, f64)>);

impl Buckets {
    fn read(text: &str, name: &str) -> Result<Self> {
        let head = format!("{name}_bucket{{le=\"");
        let buckets: Vec<(f64, f64)> = text
            .lines()
            .filter_map(|line| line.strip_prefix(&head)?.split_once("\"} "))
            .filter_map(|(bound, count)| Some((bound.parse().ok()?, count.parse().ok()?)))
            .collect();
        let is_there = !buckets.is_empty();
        is_there.then_some(Self(buckets)).context(name.to_string())
    }

    fn since(&self, before: &Self) -> Self {
        let both = self.0.iter().zip(&before.0);
        Self(
            both.map(|((bound, now), (_, then))| (*bound, now - then))
                .collect(),
        )
    }

    fn quantile(&self, share: f64) -> f64 {
        let wanted = share * self.0.last().map_or(0.0, |(_, all)| *all);
        let (mut below, mut counted) = (0.0, 0.0);
        for &(bound, count) in &self.0 {
            if count >= wanted && count > counted && bound.is_finite() {
                return below + (bound - below) * (wanted - counted) / (count - counted);
            }
            (below, counted) = (bound, count);
        }
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "felix_a_seconds_bucket{le=\"0.0001\"} 0\n\
        felix_a_seconds_bucket{le=\"0.0002\"} 10\n\
        felix_a_seconds_bucket{le=\"0.0004\"} 20\n\
        felix_a_seconds_bucket{le=\"+Inf\"} 20\n\
        felix_ab_seconds_bucket{le=\"0.0001\"} 7\n";

    #[test]
    fn a_quantile_lies_within_its_bucket() {
        let all = Buckets::read(TEXT, "felix_a_seconds").unwrap();
        assert_eq!(all.0.len(), 4);
        assert!((all.quantile(0.25) - 150e-6).abs() < 1e-9);
        assert!((all.quantile(0.5) - 200e-6).abs() < 1e-9);
        assert!((all.quantile(0.75) - 300e-6).abs() < 1e-9);
        assert!(Buckets::read(TEXT, "felix_b_seconds").is_err());
    }

    #[test]
    fn only_what_came_between_two_moments_counts() {
        let before = Buckets::read(TEXT, "felix_a_seconds").unwrap();
        let mut after = before.clone();
        assert_eq!(after.since(&before).quantile(0.5), 0.0);
        for (bound, count) in &mut after.0 {
            *count += if *bound >= 0.0004 { 4.0 } else { 0.0 };
        }
        assert!((after.since(&before).quantile(0.5) - 300e-6).abs() < 1e-9);
    }

    #[test]
    fn stages_add_up_to_what_the_client_saw() {
        let at = |bound: f64| Buckets(vec![(bound, 2.0), (f64::INFINITY, 2.0)]);
        let none = |bound: f64| Buckets(vec![(bound, 0.0), (f64::INFINITY, 0.0)]);
        let from = Moment([none(8e-4), none(6e-4), none(2e-4)]);
        let to = Moment([at(8e-4), at(6e-4), at(2e-4)]);
        let stages = stages(&from, &to, 1000.0);
        let parts = [
            stages.client_us,
            stages.ingress_us,
            stages.link_us,
            stages.owner_us,
        ];
        let expected = [600.0, 100.0, 200.0, 100.0];
        assert!(
            parts
                .iter()
                .zip(expected)
                .all(|(a, b)| (a - b).abs() < 1e-6),
            "{parts:?}"
        );
    }
}
