//! When the owner compacts: its own counter, watched while the load runs.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use felix_uring::admin;
use serde::{Deserialize, Serialize};

use super::metric_of;
use crate::meter::{Latency, LatencySummary};

/// How often the owner is asked.
const STEP: Duration = Duration::from_millis(25);
const TIMEOUT: Duration = Duration::from_secs(2);

/// Operations while a pass copied, and while none did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct CompactionEffect {
    pub during_us: LatencySummary,
    pub otherwise_us: LatencySummary,
    /// The 99th percentiles, during by otherwise; 0 without one of them.
    pub p99_ratio: f64,
    /// Seconds in which a pass copied.
    pub copying_s: f64,
}

/// Watches the owner until it is told to stop.
pub struct PassWatch {
    is_over: Arc<AtomicBool>,
    watching: JoinHandle<Vec<(Instant, u64)>>,
}

impl PassWatch {
    pub fn start(admin: SocketAddr) -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let stop = Arc::clone(&is_over);
        let watching = std::thread::spawn(move || {
            let mut seen = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                if let Ok(answer) = admin::get(admin, "/metrics", TIMEOUT) {
                    let copied = metric_of(&answer.body, "felix_cache_copied_records_total");
                    seen.push((Instant::now(), copied));
                }
                std::thread::sleep(STEP);
            }
            seen
        });
        Self { is_over, watching }
    }

    /// The spans of time in which records were copied.
    pub fn finish(self) -> anyhow::Result<Vec<(Instant, Instant)>> {
        self.is_over.store(true, Ordering::Relaxed);
        let seen = self
            .watching
            .join()
            .map_err(|_| anyhow::anyhow!("the watch of the owner panicked"))?;
        Ok(spans_of(&seen))
    }
}

/// Joined spans between two looks that saw the count grow.
fn spans_of(seen: &[(Instant, u64)]) -> Vec<(Instant, Instant)> {
    let mut spans: Vec<(Instant, Instant)> = Vec::new();
    for pair in seen.windows(2) {
        let ((from, before), (to, after)) = (pair[0], pair[1]);
        match spans.last_mut() {
            _ if after <= before => {}
            Some(last) if last.1 == from => last.1 = to,
            _ => spans.push((from, to)),
        }
    }
    spans
}

/// Sorts operations, by their end, into those during a span and the others.
pub fn effect_of(timed: &[(Instant, u64)], spans: &[(Instant, Instant)]) -> CompactionEffect {
    let (mut during, mut otherwise) = (Latency::new(), Latency::new());
    for (ended, took_ns) in timed {
        let behind = spans.partition_point(|(_, to)| to < ended);
        let is_during = spans.get(behind).is_some_and(|(from, _)| from <= ended);
        match is_during {
            true => during.record(*took_ns),
            false => otherwise.record(*took_ns),
        }
    }
    let (during_us, otherwise_us) = (during.summary(), otherwise.summary());
    let p99_ratio = match during_us.count > 0 && otherwise_us.count > 0 {
        true => during_us.p99 / otherwise_us.p99.max(1e-9),
        false => 0.0,
    };
    let copying = spans.iter().map(|(from, to)| (*to - *from).as_secs_f64());
    CompactionEffect {
        during_us,
        otherwise_us,
        p99_ratio,
        copying_s: copying.sum(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_sorted_by_when_records_were_copied() {
        let zero = Instant::now();
        let at = |ms: u64| zero + Duration::from_millis(ms);
        let seen = [(0, 5), (25, 5), (50, 9), (75, 12), (100, 12), (125, 13)];
        let seen = seen.map(|(ms, copied)| (at(ms), copied));
        let spans = spans_of(&seen);
        assert_eq!(spans, [(at(25), at(75)), (at(100), at(125))]);
        let timed = [
            (10, 1),
            (25, 2),
            (60, 2),
            (75, 2),
            (80, 1),
            (110, 2),
            (200, 1),
        ];
        let timed = timed.map(|(ms, took_ms)| (at(ms), took_ms * 1_000_000));
        let effect = effect_of(&timed, &spans);
        assert_eq!((effect.during_us.count, effect.otherwise_us.count), (4, 3));
        assert!((1.9..2.1).contains(&effect.p99_ratio), "{effect:?}");
        assert!((effect.copying_s - 0.075).abs() < 1e-9);
        let none = effect_of(&timed, &[]);
        assert_eq!((none.during_us.count, none.p99_ratio), (0, 0.0));
    }
}
