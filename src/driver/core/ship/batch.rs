//! Records in the form in which they travel, kept for the next follower of the same log.

use std::collections::VecDeque;

use bytes::Bytes;
use storage_uring::LogRef;

use crate::wire::internal::{EncodeError, Payloads};

/// Batches kept for the next follower of the same log.
const RECENT_BATCHES: usize = 4;

/// Records in the form in which they travel.
#[derive(Clone)]
pub(super) struct Batch {
    pub payloads: Payloads,
    pub checksum: u64,
}

impl Batch {
    pub fn of(records: &[Bytes]) -> Result<Self, EncodeError> {
        let payloads = Payloads::from_slices(records)?;
        let checksum = payloads.batch_checksum();
        Ok(Self { payloads, checksum })
    }

    /// A batch without records: a probe.
    pub fn empty() -> Self {
        Self {
            payloads: Payloads::empty(),
            checksum: 0,
        }
    }
}

/// The newest batches of a core: the followers of a log take the same records one after the
/// other, which are then copied and checksummed once.
#[derive(Default)]
pub(super) struct RecentBatches {
    kept: VecDeque<(LogRef, u64, Batch)>,
}

impl RecentBatches {
    pub fn get(&self, log: LogRef, first: u64) -> Option<Batch> {
        let found = self
            .kept
            .iter()
            .find(|(of, at, _)| (*of, *at) == (log, first));
        found.map(|(_, _, batch)| batch.clone())
    }

    pub fn keep(&mut self, log: LogRef, first: u64, batch: &Batch) {
        if self.kept.len() >= RECENT_BATCHES {
            self.kept.pop_front();
        }
        self.kept.push_back((log, first, batch.clone()));
    }

    /// A log was cut or placed anew: what its offsets named may have changed.
    pub fn forget(&mut self, log: LogRef) {
        self.kept.retain(|(of, _, _)| *of != log);
    }
}
