//! The cells a metric is made of. All of them expect a single writer.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use super::Label;

/// A number that only goes up.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds without a locked instruction: the owner core is the only writer.
    #[inline]
    pub fn add(&self, n: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(n), Relaxed);
    }

    #[inline]
    pub fn inc(&self) {
        self.add(1);
    }

    /// Adds from any thread; for control threads that share a counter.
    pub fn add_shared(&self, n: u64) {
        self.0.fetch_add(n, Relaxed);
    }

    /// Copies a total kept elsewhere (a storage or transport statistic) into the cell.
    #[inline]
    pub fn set_total(&self, total: u64) {
        self.0.store(total, Relaxed);
    }

    #[inline]
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// A number that goes up and down.
#[derive(Debug, Default)]
pub struct Gauge(AtomicU64);

impl Gauge {
    #[inline]
    pub fn set(&self, value: u64) {
        self.0.store(value, Relaxed);
    }

    #[inline]
    pub fn add(&self, n: u64) {
        self.set(self.get().saturating_add(n));
    }

    #[inline]
    pub fn sub(&self, n: u64) {
        self.set(self.get().saturating_sub(n));
    }

    #[inline]
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// One counter for every value of a label.
#[derive(Debug)]
pub struct Family<L: Label> {
    cells: Box<[Counter]>,
    label: PhantomData<fn(L)>,
}

impl<L: Label> Default for Family<L> {
    fn default() -> Self {
        Self {
            cells: L::VALUES.iter().map(|_| Counter::default()).collect(),
            label: PhantomData,
        }
    }
}

impl<L: Label> Family<L> {
    #[inline]
    pub fn add(&self, label: L, n: u64) {
        self.cells[label.index()].add(n);
    }

    #[inline]
    pub fn inc(&self, label: L) {
        self.add(label, 1);
    }

    pub fn get(&self, label: L) -> u64 {
        self.cells[label.index()].get()
    }

    pub(super) fn numbers(&self) -> Vec<u64> {
        self.cells.iter().map(Counter::get).collect()
    }
}

/// Upper bounds of the histogram buckets in microseconds; one more bucket catches the rest.
pub const BUCKET_BOUNDS_US: [u64; 20] = [
    50, 100, 200, 300, 500, 750, 1_000, 1_500, 2_000, 3_000, 5_000, 7_500, 10_000, 20_000, 50_000,
    100_000, 250_000, 500_000, 1_000_000, 5_000_000,
];

/// Latencies in fixed buckets.
#[derive(Debug, Default)]
pub struct Histogram {
    buckets: [Counter; BUCKET_BOUNDS_US.len() + 1],
    sum_us: Counter,
}

impl Histogram {
    #[inline]
    pub fn record_us(&self, us: u64) {
        self.record_many_us(us, 1);
    }

    /// `n` events of the same latency, for example the publishes one commit made durable.
    #[inline]
    pub fn record_many_us(&self, us: u64, n: u64) {
        let bucket = BUCKET_BOUNDS_US.partition_point(|bound| *bound < us);
        self.buckets[bucket].add(n);
        self.sum_us.add(us.saturating_mul(n));
    }

    #[inline]
    pub fn record(&self, latency: Duration) {
        self.record_us(u64::try_from(latency.as_micros()).unwrap_or(u64::MAX));
    }

    pub(super) fn counts(&self) -> [u64; BUCKET_BOUNDS_US.len() + 1] {
        std::array::from_fn(|i| self.buckets[i].get())
    }

    pub(super) fn sum_us(&self) -> u64 {
        self.sum_us.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_rise() {
        assert!(BUCKET_BOUNDS_US.windows(2).all(|w| w[0] < w[1]));
    }

    #[test]
    fn a_bound_belongs_to_its_own_bucket() {
        let h = Histogram::default();
        h.record_us(50);
        h.record_us(51);
        h.record_us(u64::MAX);
        let counts = h.counts();
        assert_eq!(counts[0], 1);
        assert_eq!(counts[1], 1);
        assert_eq!(counts[BUCKET_BOUNDS_US.len()], 1);
    }

    #[test]
    fn gauges_stop_at_zero() {
        let g = Gauge::default();
        g.add(2);
        g.sub(5);
        assert_eq!(g.get(), 0);
    }
}
