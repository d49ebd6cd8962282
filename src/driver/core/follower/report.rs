//! What operators are told of copies: counted, logged, and listed in `/status`.

use crate::ids::Generation;
use crate::metrics::CoreMetrics;
use crate::proto::replication::follower::FollowerNote;

use super::super::Core;

/// A copy for `/status`.
pub(in crate::driver::core) struct CopyStatus {
    pub name: String,
    pub generation: Generation,
    pub base: u64,
    pub tail: u64,
    pub durable_tail: u64,
    pub match_mark: Option<u64>,
}

impl Core {
    pub(super) fn note_follower(&mut self, number: u64, note: FollowerNote) {
        let Some(copy) = self.followers.copies.get_mut(number) else {
            return;
        };
        let key = copy.key.clone();
        count_note(&self.metrics, note);
        match note {
            FollowerNote::Accepted { generation } => {
                // One line a log at every change of a leader: too many for anything but a search.
                tracing::debug!(log = %key, %generation, "a leader is accepted");
                self.state.note_accepted(&key.shard, generation);
            }
            FollowerNote::Truncated {
                generation,
                tail,
                records,
            } => {
                tracing::warn!(log = %key, %generation, tail, records, "records that a former leader wrote and no later one has are dropped");
            }
            FollowerNote::Conflict {
                generation,
                at,
                why,
            } => {
                tracing::error!(log = %key, %generation, at, ?why, "the leader's records differ from the stored ones; the copy is left as it is until it is rebuilt");
            }
            FollowerNote::Bootstrapped { base } => {
                tracing::info!(log = %key, base, "an empty copy starts where its leader's log starts");
            }
            FollowerNote::Rebuilt { base, records: 0 } => {
                tracing::info!(log = %key, base, "the copy is compared with its leader's log anew; what differs is replaced");
            }
            FollowerNote::Rebuilt { base, records } => {
                tracing::warn!(log = %key, base, records, "the leader no longer has what this copy begins with; the rest is compared anew");
            }
            FollowerNote::Shortened { base, records } => {
                tracing::debug!(log = %key, base, records, "the head that its leader has compacted is given up");
            }
            FollowerNote::Poisoned => {
                tracing::error!(log = %key, "a write or sync failed; the copy takes nothing more until the next start");
            }
        }
    }

    /// The first `most` copies, for `/status`.
    pub(in crate::driver::core) fn follower_status(&self, most: usize) -> Vec<CopyStatus> {
        let copies = self.followers.by_key.iter().take(most);
        copies
            .filter_map(|(key, number)| {
                let state = self.followers.copies.get(*number)?.machine.state();
                Some(CopyStatus {
                    name: key.to_string(),
                    generation: state.accepted,
                    base: state.base,
                    tail: state.tail,
                    durable_tail: state.durable_tail,
                    match_mark: state.match_mark,
                })
            })
            .collect()
    }
}

fn count_note(metrics: &CoreMetrics, note: FollowerNote) {
    match note {
        FollowerNote::Accepted { .. } => metrics.follower_accepted.inc(),
        FollowerNote::Truncated { records, .. } => {
            metrics.follower_truncations.inc();
            metrics.follower_dropped_records.add(records);
        }
        FollowerNote::Conflict { .. } => metrics.follower_conflicts.inc(),
        FollowerNote::Bootstrapped { .. } => metrics.follower_bootstraps.inc(),
        FollowerNote::Rebuilt { records, .. } => {
            metrics.follower_rebuilds.inc();
            metrics.follower_dropped_records.add(records);
        }
        FollowerNote::Shortened { .. } => metrics.follower_shortened.inc(),
        FollowerNote::Poisoned => metrics.follower_poisoned.inc(),
    }
}
