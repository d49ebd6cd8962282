//! What a probe measures: time, CPU, bytes, latencies.

use std::time::{Duration, Instant};

use super::ConnStats;

/// Samples of latency kept; later ones replace the oldest.
const LATENCY_SAMPLES: usize = 1 << 20;

/// CPU seconds this process has used, user and system.
pub fn process_cpu_seconds() -> f64 {
    // SAFETY: an all-zero `rusage` is a valid value, and the call only writes into it.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage
    };
    let seconds = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

/// Time and CPU of a measured span in this process.
#[derive(Debug, Clone, Copy)]
pub struct Span {
    started: Instant,
    cpu_at_start_s: f64,
}

impl Span {
    /// Starts measuring.
    pub fn start() -> Self {
        Self {
            started: Instant::now(),
            cpu_at_start_s: process_cpu_seconds(),
        }
    }

    /// Seconds and CPU seconds since the start.
    pub fn stop(&self) -> (f64, f64) {
        (
            self.started.elapsed().as_secs_f64(),
            process_cpu_seconds() - self.cpu_at_start_s,
        )
    }
}

/// What one end of a probe has seen.
#[derive(Debug, Clone, Default)]
pub struct ProbeReport {
    /// Payload bytes moved.
    pub bytes: u64,
    /// Round trips or handshakes completed.
    pub operations: u64,
    /// Length of the measured span.
    pub seconds: f64,
    /// CPU seconds this process used in it.
    pub cpu_s: f64,
    /// Latencies of the operations, sorted, in nanoseconds.
    pub latencies_ns: Vec<u64>,
    /// The connection at its end.
    pub stats: ConnStats,
}

impl ProbeReport {
    /// Latency below which the fraction `q` of the operations lies.
    pub fn latency_ns(&self, q: f64) -> u64 {
        let last = self.latencies_ns.len().saturating_sub(1);
        let at = (last as f64 * q.clamp(0.0, 1.0)).round() as usize;
        self.latencies_ns.get(at).copied().unwrap_or(0)
    }

    /// CPU seconds this end spends on a gigabyte.
    pub fn cpu_s_per_gb(&self) -> f64 {
        self.cpu_s / (self.bytes as f64 / 1e9)
    }
}

/// Latencies kept in a bounded ring.
#[derive(Default)]
pub struct Latencies {
    samples_ns: Vec<u64>,
    next: usize,
}

impl Latencies {
    /// Adds one.
    pub fn record(&mut self, latency: Duration) {
        let ns = latency.as_nanos() as u64;
        if self.samples_ns.len() < LATENCY_SAMPLES {
            self.samples_ns.push(ns);
        } else {
            self.samples_ns[self.next] = ns;
            self.next = (self.next + 1) % LATENCY_SAMPLES;
        }
    }

    /// All kept, sorted.
    pub fn into_sorted(mut self) -> Vec<u64> {
        self.samples_ns.sort_unstable();
        self.samples_ns
    }
}
