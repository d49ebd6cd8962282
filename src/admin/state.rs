//! What the admin listener knows: holds on readiness, snapshots, metrics.
//!
//! Small mutexes, taken by control threads and by a core about once a second; a poisoned one is
//! read anyway, because the data behind it is only ever replaced whole.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{json, Value};

use super::{CatalogSnapshot, CoreSnapshot, ProcessUsage};
use crate::ids::{Generation, ShardId};
use crate::metrics::MetricsHub;

/// A core that has published and then stays silent this long makes `/live` answer 503.
pub const LIVE_SILENCE: Duration = Duration::from_secs(30);

/// The hold every process starts with; released by whoever knows that the broker serves.
const START: &str = "start";

/// What does not change while the process runs.
#[derive(Debug, Clone, Default)]
pub struct NodeInfo {
    pub node_id: String,
    pub version: String,
    pub cores: usize,
    pub client_addr: String,
    pub internal_addr: String,
    pub data_dir: String,
    /// The effective configuration, secrets removed.
    pub config: Value,
}

/// Whether the broker takes work, and if not why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Readiness {
    Ready,
    /// Reasons in the order of their names; never empty.
    NotReady(Vec<String>),
    Draining,
}

#[derive(Debug)]
struct Published {
    at: Instant,
    snapshot: CoreSnapshot,
}

/// Shared by the cores (rarely), the control threads and the admin listener.
#[derive(Debug)]
pub struct SharedState {
    info: NodeInfo,
    metrics: MetricsHub,
    started: Instant,
    holds: Mutex<BTreeMap<String, String>>,
    draining: AtomicBool,
    catalog_wanted: AtomicBool,
    cores: Vec<Mutex<Option<Published>>>,
    catalog: Mutex<Option<CatalogSnapshot>>,
    accepted: Mutex<HashMap<ShardId, Generation>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SharedState {
    /// Not ready until [`SharedState::release_start`].
    pub fn new(info: NodeInfo, metrics: MetricsHub) -> Arc<Self> {
        let cores = (0..info.cores).map(|_| Mutex::new(None)).collect();
        let holds = BTreeMap::from([(START.to_string(), "the broker is starting".to_string())]);
        Arc::new(Self {
            info,
            metrics,
            started: Instant::now(),
            holds: Mutex::new(holds),
            draining: AtomicBool::new(false),
            catalog_wanted: AtomicBool::new(false),
            cores,
            catalog: Mutex::new(None),
            accepted: Mutex::new(HashMap::new()),
        })
    }

    pub fn info(&self) -> &NodeInfo {
        &self.info
    }

    pub fn metrics(&self) -> &MetricsHub {
        &self.metrics
    }

    /// Keeps `/ready` at 503 with `why` until [`SharedState::release`] of the same name.
    pub fn hold(&self, name: &str, why: &str) {
        lock(&self.holds).insert(name.to_string(), why.to_string());
    }

    pub fn release(&self, name: &str) {
        lock(&self.holds).remove(name);
    }

    /// Ends the hold every process starts with.
    pub fn release_start(&self) {
        self.release(START);
    }

    /// From here on `/ready` answers 503; there is no way back.
    pub fn start_draining(&self) {
        self.draining.store(true, Ordering::Release);
    }

    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// A core found another broker than the catalog says at some address: the catalog is to be read
    /// again, without waiting for the next look at it.
    pub fn ask_for_catalog(&self) {
        self.catalog_wanted.store(true, Ordering::Release);
    }

    /// Whether [`SharedState::ask_for_catalog`] was called since the last time.
    pub fn take_catalog_request(&self) -> bool {
        self.catalog_wanted.swap(false, Ordering::AcqRel)
    }

    /// Replaces what is known of core `index`; a core that does not exist is a bug of the caller
    /// and is ignored here, where nothing could be done about it.
    pub fn publish_core(&self, index: usize, snapshot: CoreSnapshot) {
        if let Some(slot) = self.cores.get(index) {
            *lock(slot) = Some(Published {
                at: Instant::now(),
                snapshot,
            });
        }
    }

    pub fn publish_catalog(&self, snapshot: CatalogSnapshot) {
        self.metrics.control().catalog_version.set(snapshot.version);
        *lock(&self.catalog) = Some(snapshot);
    }

    /// A log of `shard` has accepted `generation`: no catalog may go below it any more.
    pub fn note_accepted(&self, shard: &ShardId, generation: Generation) {
        let mut accepted = lock(&self.accepted);
        match accepted.get_mut(shard) {
            Some(known) => *known = generation.max(*known),
            None => drop(accepted.insert(shard.clone(), generation)),
        }
    }

    /// The highest generation any log of `shard` has accepted, as far as this process knows.
    pub fn accepted(&self, shard: &ShardId) -> Option<Generation> {
        lock(&self.accepted).get(shard).copied()
    }

    pub fn readiness(&self) -> Readiness {
        if self.is_draining() {
            return Readiness::Draining;
        }
        let mut reasons: Vec<String> = lock(&self.holds).values().cloned().collect();
        let failures = self.log_failures();
        // While one core's log takes writes, so do its shards.
        if !failures.is_empty() && failures.len() == self.cores.len() {
            reasons.extend(failures);
        }
        match reasons.is_empty() {
            true => Readiness::Ready,
            false => Readiness::NotReady(reasons),
        }
    }

    /// A line for every core whose log has failed.
    pub fn log_failures(&self) -> Vec<String> {
        let failure = |(index, slot): (usize, &Mutex<Option<Published>>)| {
            let slot = lock(slot);
            let why = slot.as_ref()?.snapshot.storage.failure.as_ref()?;
            Some(format!(
                "the log of core {index} has failed and takes no writes until a restart: {why}"
            ))
        };
        self.cores.iter().enumerate().filter_map(failure).collect()
    }

    fn is_starting(&self) -> bool {
        lock(&self.holds).contains_key(START)
    }

    /// Cores that have published once and then fell silent for [`LIVE_SILENCE`].
    pub fn silent_cores(&self, now: Instant) -> Vec<(usize, Duration)> {
        self.cores
            .iter()
            .enumerate()
            .filter_map(|(index, slot)| {
                let silence = now.saturating_duration_since(lock(slot).as_ref()?.at);
                (silence >= LIVE_SILENCE).then_some((index, silence))
            })
            .collect()
    }

    /// The list `/replication/halted` answers with: every copy nothing is shipped to.
    pub fn halted_replicas(&self) -> Value {
        let mut halted = Vec::new();
        for (index, slot) in self.cores.iter().enumerate() {
            if let Some(published) = lock(slot).as_ref() {
                let replicas = &published.snapshot.replication.halted;
                halted.extend(replicas.iter().map(|one| with_core(index, one, None)));
            }
        }
        Value::Array(halted)
    }

    /// The object `/status` answers with.
    pub fn status(&self) -> Value {
        let (state, reasons) = match self.readiness() {
            Readiness::Ready => ("ready", Vec::new()),
            Readiness::NotReady(reasons) if self.is_starting() => ("starting", reasons),
            Readiness::NotReady(reasons) => ("not_ready", reasons),
            Readiness::Draining => ("draining", Vec::new()),
        };
        let now = Instant::now();
        let (mut cores, mut peers, mut failures) = (Vec::new(), Vec::new(), Vec::new());
        for (index, slot) in self.cores.iter().enumerate() {
            let slot = lock(slot);
            let Some(published) = slot.as_ref() else {
                cores.push(json!({ "core": index, "phase": "starting" }));
                continue;
            };
            let age_ms = now.saturating_duration_since(published.at).as_millis() as u64;
            cores.push(with_core(
                index,
                &published.snapshot,
                Some(("age_ms", age_ms)),
            ));
            for peer in &published.snapshot.peers {
                peers.push(with_core(index, peer, None));
            }
            for failure in &published.snapshot.failures {
                failures.push(with_core(index, failure, None));
            }
        }
        let totals = self.metrics.totals();
        json!({
            "node_id": self.info.node_id,
            "version": self.info.version,
            "pid": std::process::id(),
            "uptime_s": self.started.elapsed().as_secs_f64(),
            "state": state,
            "reasons": reasons,
            "log_failures": self.log_failures(),
            "client_addr": self.info.client_addr,
            "internal_addr": self.info.internal_addr,
            "data_dir": self.info.data_dir,
            "process": ProcessUsage::read(),
            "storage": storage_summary(&totals),
            "catalog": *lock(&self.catalog),
            "failures": failures,
            "peers": peers,
            "cores": cores,
            "latency": self.latency_summary(),
            "metrics": totals,
            "config": self.info.config,
        })
    }

    fn latency_summary(&self) -> Value {
        let of = |(key, h): (&'static str, crate::metrics::HistogramTotals)| {
            let value = json!({
                "count": h.count(),
                "sum_us": h.sum_us,
                "p50_below_us": h.quantile_bound_us(0.5),
                "p99_below_us": h.quantile_bound_us(0.99),
                "p999_below_us": h.quantile_bound_us(0.999),
            });
            (key.to_string(), value)
        };
        Value::Object(self.metrics.histograms().into_iter().map(of).collect())
    }
}

/// The fields of `value` behind the number of the core that published it.
fn with_core<T: serde::Serialize>(core: usize, value: &T, extra: Option<(&str, u64)>) -> Value {
    let mut object = serde_json::Map::new();
    object.insert("core".into(), json!(core));
    if let Some((key, number)) = extra {
        object.insert(key.into(), json!(number));
    }
    if let Ok(Value::Object(fields)) = serde_json::to_value(value) {
        object.extend(fields);
    }
    Value::Object(object)
}

/// The durable side in the words of the load tool's report.
fn storage_summary(totals: &BTreeMap<String, u64>) -> Value {
    let of = |key: &str| totals.get(key).copied().unwrap_or(0);
    let commits = of("storage_commits");
    let mean = if commits == 0 {
        0.0
    } else {
        of("storage_group_records_sum") as f64 / commits as f64
    };
    json!({
        "fsyncs": commits,
        "records": of("storage_records"),
        "appended_bytes": of("storage_appended_bytes"),
        "payload_bytes": of("storage_payload_bytes"),
        "commit_group_records_mean": mean,
        "flush_failures": of("storage_flush_failures"),
        "failed_logs": of("storage_failed_logs"),
        "queued_bytes": of("storage_queued_bytes"),
        "free_bytes": of("storage_free_bytes"),
    })
}

#[cfg(test)]
mod tests {
    use super::super::{PeerSnapshot, ShardFailure};
    use super::*;

    fn state() -> Arc<SharedState> {
        let info = NodeInfo {
            node_id: "n1".into(),
            cores: 2,
            ..NodeInfo::default()
        };
        SharedState::new(info, MetricsHub::with_cores(2))
    }

    #[test]
    fn ready_only_when_every_hold_is_released_and_never_after_draining() {
        let state = state();
        state.hold("catalog", "the catalog has not been read");
        state.release_start();
        assert_eq!(
            state.readiness(),
            Readiness::NotReady(vec!["the catalog has not been read".into()])
        );
        state.release("catalog");
        assert_eq!(state.readiness(), Readiness::Ready);
        state.start_draining();
        state.release("anything");
        assert_eq!(state.readiness(), Readiness::Draining);
    }

    #[test]
    fn a_broker_is_ready_while_one_cores_log_takes_writes() {
        let state = state();
        state.release_start();
        let fail = |index: usize| {
            let mut snapshot = CoreSnapshot::default();
            snapshot.storage.failure = Some("a flush failed".into());
            state.publish_core(index, snapshot);
        };
        fail(1);
        assert_eq!(state.readiness(), Readiness::Ready);
        let line =
            "the log of core 1 has failed and takes no writes until a restart: a flush failed";
        assert_eq!(state.log_failures(), [line]);
        assert_eq!(state.status()["log_failures"][0], line);
        fail(0);
        let Readiness::NotReady(reasons) = state.readiness() else {
            panic!("no core takes writes");
        };
        assert_eq!(reasons.len(), 2);
        assert!(
            reasons[0].contains("core 0") && reasons[1] == line,
            "{reasons:?}"
        );
        assert_eq!(state.status()["state"], "not_ready");
    }

    #[test]
    fn a_silent_core_is_named_but_one_that_never_spoke_is_not() {
        let state = state();
        state.publish_core(1, CoreSnapshot::default());
        let now = Instant::now();
        assert!(state.silent_cores(now).is_empty());
        let later = now + LIVE_SILENCE + Duration::from_secs(1);
        let silent: Vec<usize> = state.silent_cores(later).iter().map(|(i, _)| *i).collect();
        assert_eq!(silent, [1]);
    }

    #[test]
    fn status_gathers_peers_and_failures_of_all_cores() {
        let state = state();
        let snapshot = CoreSnapshot {
            phase: "serving".into(),
            peers: vec![PeerSnapshot {
                node_id: "n2".into(),
                ..PeerSnapshot::default()
            }],
            failures: vec![ShardFailure {
                shard: "stream:t/n/s#0".into(),
                ..ShardFailure::default()
            }],
            ..CoreSnapshot::default()
        };
        state.publish_core(1, snapshot);
        let core = state.metrics().core(0).unwrap();
        core.storage_commits.add(4);
        core.storage_group_records_sum.add(10);
        let status = state.status();
        assert_eq!(status["cores"][0]["phase"], "starting");
        assert_eq!(status["cores"][1]["phase"], "serving");
        assert_eq!(status["peers"][0]["node_id"], "n2");
        assert_eq!(status["peers"][0]["core"], 1);
        assert_eq!(status["failures"][0]["shard"], "stream:t/n/s#0");
        assert_eq!(status["storage"]["commit_group_records_mean"], 2.5);
        assert_eq!(status["state"], "starting");
        assert!(status["process"]["max_rss_bytes"].as_u64().unwrap() > 0);
    }
}
