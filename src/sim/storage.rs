//! What lies below a record: for each seed a history of one core's storage, checked by `storage-uring`.
//!
//! Draws from the seed with a generator of its own, so that the cluster of a seed is what it was. It shares
//! no disk with that cluster: the simulated brokers keep to their journals.

use storage_uring::sim::{run_history, HistoryCounts};

/// Runs the storage history of a seed: what happened, or the broken invariant as a report tells it.
pub fn run(seed: u64) -> Result<HistoryCounts, String> {
    run_history(seed).map_err(|broken| broken.to_string())
}
