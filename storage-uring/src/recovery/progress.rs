//! How far a recovery or an offline scan is; written by its threads, read by whoever shows it.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of one scan. The bytes of unused segment ends count as done when their segment is.
#[derive(Debug, Default)]
pub struct RecoveryProgress {
    total_bytes: AtomicU64,
    done_bytes: AtomicU64,
    total_segments: AtomicU64,
    done_segments: AtomicU64,
    total_cores: AtomicU64,
    done_cores: AtomicU64,
}

/// A reading of the counters. Exact only at the end; a total of 0 means that nothing is known yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ProgressView {
    /// Bytes of all segment files.
    pub total_bytes: u64,
    /// Bytes of the segments read so far.
    pub done_bytes: u64,
    /// Segment files.
    pub total_segments: u64,
    /// Segments read so far.
    pub done_segments: u64,
    /// Core directories.
    pub total_cores: u64,
    /// Core directories read in full.
    pub done_cores: u64,
}

impl RecoveryProgress {
    /// A reading.
    pub fn view(&self) -> ProgressView {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ProgressView {
            total_bytes: read(&self.total_bytes),
            done_bytes: read(&self.done_bytes),
            total_segments: read(&self.total_segments),
            done_segments: read(&self.done_segments),
            total_cores: read(&self.total_cores),
            done_cores: read(&self.done_cores),
        }
    }

    pub(crate) fn add_total(&self, segments: u64, bytes: u64) {
        self.total_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.total_segments.fetch_add(segments, Ordering::Relaxed);
    }

    pub(crate) fn on_cores(&self, cores: u64) {
        self.total_cores.store(cores, Ordering::Relaxed);
    }

    pub(crate) fn on_segment(&self, bytes: u64) {
        self.done_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.done_segments.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn on_core(&self) {
        self.done_cores.fetch_add(1, Ordering::Relaxed);
    }
}

impl fmt::Display for ProgressView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        let done = self.done_bytes.min(self.total_bytes);
        let percent = (done * 100).checked_div(self.total_bytes).unwrap_or(0);
        write!(
            f,
            "{:.2} of {:.2} GiB ({percent} %), {} of {} segments, {} of {} core logs",
            gib(done),
            gib(self.total_bytes),
            self.done_segments,
            self.total_segments,
            self.done_cores,
            self.total_cores,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_says_how_far_it_is() {
        let progress = RecoveryProgress::default();
        let at_first = "0.00 of 0.00 GiB (0 %), 0 of 0 segments, 0 of 0 core logs";
        assert_eq!(progress.view().to_string(), at_first);
        progress.on_cores(2);
        progress.add_total(4, 4 << 30);
        progress.on_segment(1 << 30);
        progress.on_core();
        let later = "1.00 of 4.00 GiB (25 %), 1 of 4 segments, 1 of 2 core logs";
        assert_eq!(progress.view().to_string(), later);
    }
}
