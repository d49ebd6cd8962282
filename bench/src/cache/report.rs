//! The report of a cache run: as JSON and as text.

use std::fmt::Write;

use serde::{Deserialize, Serialize};

use super::args::{CacheArgs, Mix};
use super::check::CacheVerify;
use super::passes::CompactionEffect;
use super::Driven;
use crate::meter::LatencySummary;
use crate::report::{count, micros, Host};

/// The form of the report.
const SCHEMA: &str = "felix-bench-cache/1";

/// A run of `cache`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct CacheReport {
    pub schema: String,
    pub workload: CacheWorkload,
    pub result: CacheResult,
    pub verify: CacheVerify,
    pub probe: Option<CacheProbe>,
    pub memory: CacheMemory,
    pub recovery: Option<CacheRecovery>,
    /// With `--compaction`.
    pub compaction: Option<CompactionEffect>,
    pub host: Host,
}

/// What a run was asked to do.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct CacheWorkload {
    /// `forward` or `direct`.
    pub mode: String,
    pub mix: Mix,
    pub keys: u64,
    pub value_bytes: u64,
    pub theta: f64,
    pub in_flight: u64,
    pub connections: u64,
    pub brokers: u64,
    pub cores_per_broker: u64,
    pub shards: u64,
    pub duration_s: f64,
    pub warmup_s: f64,
    pub broker_flags: Vec<String>,
}

/// What came of it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct CacheResult {
    pub operations: u64,
    pub operations_per_s: f64,
    pub refused: u64,
    pub first_refusal: Option<String>,
    pub get_us: LatencySummary,
    pub put_us: LatencySummary,
    pub delete_us: LatencySummary,
    pub add_us: LatencySummary,
    /// CPU seconds of the load generator, filling included.
    pub client_cpu_s: f64,
}

/// A lone get beside bare echoes of its size over the same hops.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct CacheProbe {
    pub lone_get_us: LatencySummary,
    /// Median of the rounds' medians: client to broker.
    pub echo_client_us: f64,
    /// The same between brokers; null when nothing is forwarded.
    pub echo_peer_us: Option<f64>,
    /// The lone get's median by the sum of the echoes'.
    pub ratio: f64,
}

/// What the keys cost the owner of shard 0.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct CacheMemory {
    /// Resident bytes before the first key.
    pub rss_before_bytes: u64,
    /// Resident bytes after the run.
    pub rss_after_bytes: u64,
    /// The broker's own account of the keys' memory, values apart.
    pub index_bytes: u64,
    /// Its own account of the values in memory.
    pub value_bytes: u64,
    /// Passes of compaction in the run, and the records they copied.
    pub compactions: u64,
    pub copied_records: u64,
}

/// The owner's way back after a kill.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct CacheRecovery {
    /// From its start to its being ready.
    pub ready_s: f64,
    /// From there to the first get's answer, which waits for the whole index.
    pub first_answer_s: f64,
    /// Resident bytes then.
    pub rss_bytes: u64,
}

pub(super) fn make(args: &CacheArgs, driven: Driven, host: Host) -> CacheReport {
    let measured = &driven.measured;
    let probe = (driven.lone_get.count() > 0).then(|| {
        let client = driven.echo_client.at(0.5);
        let peer = (driven.echo_peer.count() > 0).then(|| driven.echo_peer.at(0.5));
        let lone_get_us = driven.lone_get.summary();
        CacheProbe {
            lone_get_us,
            echo_client_us: client,
            echo_peer_us: peer,
            ratio: lone_get_us.p50 / (client + peer.unwrap_or(0.0)).max(1e-9),
        }
    });
    CacheReport {
        schema: SCHEMA.into(),
        workload: CacheWorkload {
            mode: if args.direct { "direct" } else { "forward" }.into(),
            mix: args.mix,
            keys: args.keys as u64,
            value_bytes: args.value_bytes,
            theta: args.theta,
            in_flight: args.in_flight as u64,
            connections: args.connections as u64,
            brokers: u64::from(args.brokers),
            cores_per_broker: u64::from(args.cores_per_broker),
            shards: u64::from(args.shards),
            duration_s: args.duration.as_secs_f64(),
            warmup_s: args.warmup.as_secs_f64(),
            broker_flags: args.serve.serve_flags.clone(),
        },
        result: CacheResult {
            operations: measured.operations,
            operations_per_s: measured.operations as f64 / args.duration.as_secs_f64(),
            refused: measured.refused,
            first_refusal: driven.first_refusal.clone(),
            get_us: measured.get.summary(),
            put_us: measured.put.summary(),
            delete_us: measured.delete.summary(),
            add_us: measured.add.summary(),
            client_cpu_s: driven.client_cpu_s,
        },
        verify: driven.verify,
        probe,
        memory: driven.memory.clone(),
        recovery: driven.recovery.clone(),
        compaction: driven.compaction,
        host,
    }
}

impl CacheReport {
    /// The report for people.
    pub fn render(&self) -> String {
        let mut out = String::new();
        let (w, r, v) = (&self.workload, &self.result, &self.verify);
        // Writing to a string does not fail.
        let _ = writeln!(
            out,
            "cache    {} of {} keys of {} bytes, theta {}, {} on their way: {} operations/s",
            w.mode,
            w.keys,
            w.value_bytes,
            w.theta,
            w.in_flight,
            count(r.operations_per_s)
        );
        for (name, latency) in [
            ("get", &r.get_us),
            ("put", &r.put_us),
            ("delete", &r.delete_us),
            ("add", &r.add_us),
        ] {
            if latency.count > 0 {
                let _ = writeln!(
                    out,
                    "{name:8} p50 {}  p99 {}  max {}  ({})",
                    micros(latency.p50),
                    micros(latency.p99),
                    micros(latency.max),
                    latency.count
                );
            }
        }
        if let Some(probe) = &self.probe {
            let peer = probe
                .echo_peer_us
                .map_or(String::new(), |us| format!(" + {}", micros(us)));
            let _ = writeln!(
                out,
                "lone get p50 {}  p99 {}, echo {}{peer}: ratio {:.2}",
                micros(probe.lone_get_us.p50),
                micros(probe.lone_get_us.p99),
                micros(probe.echo_client_us),
                probe.ratio
            );
        }
        self.render_keeping(&mut out);
        let _ =
            writeln!(
            out,
            "checked  {} answers: {} wrong, {} missing, {} corrupt; {} not judged, {} refused{}",
            v.checked,
            v.wrong,
            v.missing,
            v.corrupt,
            v.unjudged,
            r.refused,
            r.first_refusal.as_ref().map_or(String::new(), |why| format!(" ({why})"))
        );
        out
    }

    /// What the keys cost, how they came back, what compaction did.
    fn render_keeping(&self, out: &mut String) {
        let (m, keys) = (&self.memory, self.workload.keys.max(1));
        let grown = m.rss_after_bytes.saturating_sub(m.rss_before_bytes);
        let _ = writeln!(
            out,
            "memory   {} bytes a key by the broker's account, {} of its process; values {} MiB",
            m.index_bytes / keys,
            grown.saturating_sub(m.value_bytes) / keys,
            m.value_bytes >> 20,
        );
        if let Some(recovery) = &self.recovery {
            let _ = writeln!(
                out,
                "reopened ready in {:.2} s, every shard read after {:.2} s more, {} MiB resident",
                recovery.ready_s,
                recovery.first_answer_s,
                recovery.rss_bytes >> 20
            );
        }
        if let Some(effect) = &self.compaction {
            let _ = writeln!(
                out,
                "compaction {} passes, {} records copied in {:.1} s: p99 {} during ({}), {} otherwise ({}), ratio {:.2}",
                m.compactions,
                m.copied_records,
                effect.copying_s,
                micros(effect.during_us.p99),
                effect.during_us.count,
                micros(effect.otherwise_us.p99),
                effect.otherwise_us.count,
                effect.p99_ratio
            );
        }
    }
}
