//! Recovering the logs at start, off the control thread, which meanwhile says how far that is: `/ready` at any
//! time, the log every few seconds.

use std::sync::{mpsc, Arc};
use std::time::{Duration, Instant};

use storage_uring::{RecoveredSet, RecoveryProgress, StorageError};

use super::serve::ServeError;
use crate::admin::SharedState;
use crate::config::Config;

/// How often readiness is told how far it is.
const LOOK_PERIOD: Duration = Duration::from_millis(50);
/// How often a long recovery says so in the log.
const LOG_PERIOD: Duration = Duration::from_secs(5);
/// The hold on readiness.
const HOLD: &str = "recovery";

/// Recovers the logs on threads of their own, while readiness and the log say how far that is.
pub(super) fn recover(
    config: &Config,
    core_count: usize,
    state: &SharedState,
) -> Result<Arc<RecoveredSet>, ServeError> {
    let started = Instant::now();
    let progress = RecoveryProgress::default();
    let (ended_tx, ended) = mpsc::channel();
    let recovered = std::thread::scope(|scope| {
        let (dir, shown) = (&config.data_dir, &progress);
        scope.spawn(move || {
            let recovered = storage_uring::recover_with(dir, core_count, shown);
            // The receiver waits below for exactly this.
            let _ = ended_tx.send(recovered);
        });
        let mut log_at = started + LOG_PERIOD;
        loop {
            let view = progress.view();
            state.hold(HOLD, &format!("recovering the logs: {view}"));
            if Instant::now() >= log_at {
                log_at = Instant::now() + LOG_PERIOD;
                tracing::info!("recovering the logs: {view}");
            }
            match ended.recv_timeout(LOOK_PERIOD) {
                Ok(recovered) => break Some(recovered),
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => break None,
            }
        }
    });
    let recovered = recovered
        .ok_or_else(|| ServeError::Start("the recovery of the logs ended early".to_owned()))?
        .map_err(storage_error)?;
    state.release(HOLD);
    let report = recovered.report();
    let seconds = started.elapsed().as_secs_f64();
    tracing::info!(
        took_ms = started.elapsed().as_millis() as u64,
        logs = report.logs,
        records = report.counts.records,
        mib_per_s = (report.counts.bytes as f64 / f64::from(1 << 20) / seconds) as u64,
        "logs recovered"
    );
    Ok(recovered)
}

fn storage_error(error: StorageError) -> ServeError {
    match error {
        StorageError::MetaDamaged { .. }
        | StorageError::MetaMissing { .. }
        | StorageError::CoreMissing { .. }
        | StorageError::SequencesUsedUp { .. } => ServeError::Damaged(error.to_string()),
        StorageError::Locked { .. }
        | StorageError::UnknownVersion { .. }
        | StorageError::NotAFile { .. }
        | StorageError::Io { .. }
        | StorageError::Config(_)
        | StorageError::Ring(_)
        | StorageError::Failed(_)
        | StorageError::SegmentThread(_) => ServeError::Start(error.to_string()),
    }
}
