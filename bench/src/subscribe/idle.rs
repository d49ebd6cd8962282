//! Connections and subscriptions that do nothing: what they cost, and that they are still there.

use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::args::SubscribeArgs;
use super::check::FanoutVerify;
use super::spec::FanSpec;
use super::{round, Broker};
use crate::cpu::CpuPlan;
use crate::report::{describe_host, Host};

/// The form of the report.
const SCHEMA: &str = "felix-bench-idle/1";

/// A run with `--idle-connections`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct IdleReport {
    pub schema: String,
    pub connections: u64,
    /// Authenticated streams of each connection.
    pub streams: u64,
    pub subscriptions: u64,
    /// Resident bytes of the broker before the first connection.
    pub rss_start_bytes: u64,
    /// With every connection and its streams.
    pub rss_connected_bytes: u64,
    /// With every subscription.
    pub rss_subscribed_bytes: u64,
    /// After the quiet time.
    pub rss_quiet_bytes: u64,
    pub bytes_per_connection: f64,
    pub bytes_per_subscription: f64,
    pub connections_per_s: f64,
    pub subscriptions_per_s: f64,
    pub quiet_s: f64,
    /// Share of one core the broker took in the quiet time; clients ping every 2 s.
    pub quiet_cpu_share: f64,
    /// From publishing one batch at the end to the last subscriber's having it.
    pub last_delivery_s: f64,
    pub verify: FanoutVerify,
    pub host: Host,
}

/// Measures it on a broker of its own.
pub(super) fn measure(
    args: &SubscribeArgs,
    connections: u32,
    subscriptions: u32,
    plan: &CpuPlan,
    dir: &Path,
) -> Result<IdleReport> {
    // One more for the publisher.
    let most_connections = format!("--max-connections={}", connections.saturating_add(1));
    let most_subscriptions = format!("--max-subscriptions={subscriptions}");
    let flags = [most_connections.as_str(), most_subscriptions.as_str()];
    let broker = Broker::start(args, plan, dir, &flags)?;
    let spec = FanSpec {
        connections: connections as usize,
        streams: args.idle_streams as usize,
        subscribers: subscriptions as usize,
        batch: 1,
        in_flight: 1,
        quiet: args.quiet,
        warmup: Duration::ZERO,
        duration: Duration::ZERO,
        ..broker.spec.clone()
    };
    let measured = round(&spec)?;
    broker.stop()?;
    let idle = measured.idle;
    let each = |from: u64, to: u64, count: u32| to.saturating_sub(from) as f64 / f64::from(count);
    let rate = |count: u32, seconds: f64| f64::from(count) / seconds.max(1e-9);
    Ok(IdleReport {
        schema: SCHEMA.into(),
        connections: u64::from(connections),
        streams: u64::from(args.idle_streams),
        subscriptions: u64::from(subscriptions),
        rss_start_bytes: idle.rss_start_bytes,
        rss_connected_bytes: idle.rss_connected_bytes,
        rss_subscribed_bytes: idle.rss_subscribed_bytes,
        rss_quiet_bytes: idle.rss_quiet_bytes,
        bytes_per_connection: each(idle.rss_start_bytes, idle.rss_connected_bytes, connections),
        bytes_per_subscription: each(
            idle.rss_connected_bytes,
            idle.rss_subscribed_bytes,
            subscriptions,
        ),
        connections_per_s: rate(connections, idle.connect_s),
        subscriptions_per_s: rate(subscriptions, idle.subscribe_s),
        quiet_s: args.quiet.as_secs_f64(),
        quiet_cpu_share: idle.quiet_cpu_s / args.quiet.as_secs_f64().max(1e-9),
        last_delivery_s: idle.last_delivery_s,
        verify: measured.verify,
        host: describe_host(dir, plan),
    })
}

impl IdleReport {
    /// The report for people.
    pub fn render(&self) -> String {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let mut out = String::new();
        // Writing to a string does not fail.
        let _ = writeln!(
            out,
            "idle     {} connections of {} streams: {:.1} KiB each ({:.0} MiB from {:.0}), {:.0} made a second",
            self.connections,
            self.streams,
            self.bytes_per_connection / 1024.0,
            mib(self.rss_connected_bytes),
            mib(self.rss_start_bytes),
            self.connections_per_s,
        );
        let _ = writeln!(
            out,
            "         {} subscriptions: {:.2} KiB each ({:.0} MiB), {:.0} made a second",
            self.subscriptions,
            self.bytes_per_subscription / 1024.0,
            mib(self.rss_subscribed_bytes),
            self.subscriptions_per_s,
        );
        let _ = writeln!(
            out,
            "quiet    {:.1} s: {:.1} % of a core, {:.0} MiB at its end",
            self.quiet_s,
            self.quiet_cpu_share * 100.0,
            mib(self.rss_quiet_bytes),
        );
        let v = &self.verify;
        let _ = writeln!(
            out,
            "checked  one record to every subscription: {} deliveries in {:.2} s: {} missing, {} duplicated, {} corrupt, {} misplaced",
            v.checked, self.last_delivery_s, v.missing, v.duplicated, v.corrupt, v.misplaced
        );
        out
    }
}
