//! What operators are told of replication: log lines, metrics, the halted list.

use super::super::Core;
use super::LedIdx;
use crate::admin::{HaltedSnapshot, ReplicationSnapshot, ShardFailure};
use crate::metrics::HaltLabel;
use crate::proto::replication::leader::{FollowerIdx, HaltReason, ShardEvent};
use crate::proto::replication::types::log_word;

/// Replicas listed as halted by one core; the rest is in the metrics.
const MAX_LISTED_HALTS: usize = 1024;

impl Core {
    pub(super) fn tell_opened(&self, at: LedIdx) {
        if let Some(led) = self.shipping.get(at) {
            tracing::info!(shard = %led.shard, generation = %led.generation, replicas = led.followers.len() + 1, "shard open for writes");
        }
    }

    pub(super) fn tell_follower_event(&self, at: LedIdx, event: ShardEvent) {
        let Some(led) = self.shipping.get(at) else {
            return;
        };
        let shard = &led.shard;
        let node = |follower: FollowerIdx| {
            let node = led.followers.get(usize::from(follower.0));
            node.map_or("?", |node| node.as_str())
        };
        match event {
            ShardEvent::Halted {
                follower,
                log,
                reason,
            } => {
                self.metrics.ship_halts.inc(halt_label(reason));
                tracing::error!(%shard, log = log_word(log), follower = node(follower), reason = reason.name(), remedy = reason.remedy(), "a replica is halted");
            }
            ShardEvent::Paused {
                follower,
                log,
                cause,
            } => {
                tracing::debug!(%shard, log = log_word(log), follower = node(follower), ?cause, "shipping waits");
            }
            ShardEvent::RebuildStarted { follower, log } => {
                self.metrics.rebuilds_started.inc();
                tracing::warn!(%shard, log = log_word(log), follower = node(follower), "a replica has discarded its copy and is made anew");
            }
            ShardEvent::RebuildRefused { follower, log } => {
                self.metrics.rebuilds_refused.inc();
                tracing::warn!(%shard, log = log_word(log), follower = node(follower), "a rebuild was not done; it is asked for again later");
            }
            ShardEvent::RebuildCompleted { follower, log } => {
                self.metrics.rebuilds_completed.inc();
                tracing::info!(%shard, log = log_word(log), follower = node(follower), "a rebuilt replica is level");
            }
            ShardEvent::Record { .. }
            | ShardEvent::Opened
            | ShardEvent::Marked { .. }
            | ShardEvent::Superseded => {}
        }
    }

    /// Sets the gauges and gives the listing.
    pub(in crate::driver::core) fn replication_snapshot(&self) -> ReplicationSnapshot {
        let (mut led, mut open, mut lag, mut rebuilding) = (0, 0, 0, 0);
        let mut halted = Vec::new();
        let mut halted_count = 0;
        for shard in self.shipping.led.iter().flatten() {
            led += 1;
            let Some(machine) = &shard.machine else {
                continue;
            };
            open += u64::from(machine.is_open());
            lag = lag.max(machine.lag());
            rebuilding += machine.rebuilding() as u64;
            for replica in machine.halted() {
                halted_count += 1;
                if halted.len() < MAX_LISTED_HALTS {
                    halted.push(HaltedSnapshot {
                        shard: shard.shard.to_string(),
                        log: log_word(replica.log).to_owned(),
                        node: replica.follower.to_string(),
                        generation: replica.generation.0,
                        position: replica.position,
                        reason: replica.reason.name().to_owned(),
                        remedy: replica.reason.remedy().to_owned(),
                    });
                }
            }
        }
        let m = &self.metrics;
        m.replicated_shards_led.set(led);
        m.replicated_shards_open.set(open);
        m.replication_lag_records.set(lag);
        m.replicas_halted.set(halted_count);
        m.replicas_rebuilding.set(rebuilding);
        m.quorum_waiting.set(self.shipping.waiting_writes as u64);
        ReplicationSnapshot {
            shards_led: led,
            shards_open: open,
            lag_records: lag,
            rebuilding,
            waiting_writes: self.shipping.waiting_writes as u64,
            halted,
        }
    }

    pub(in crate::driver::core) fn refused_leads(&self) -> impl Iterator<Item = ShardFailure> + '_ {
        self.shipping.refused.values().cloned()
    }

    /// The mark and the state of a led shard, for its line in the status.
    pub(in crate::driver::core) fn led_status(
        &self,
        shard: &crate::ids::ShardId,
    ) -> Option<(Option<u64>, &'static str)> {
        let led = self.shipping.get(*self.shipping.by_shard.get(shard)?)?;
        Some(match &led.machine {
            Some(machine) => (machine.mark(), machine.opening().name()),
            None => (None, "settling"),
        })
    }
}

fn halt_label(reason: HaltReason) -> HaltLabel {
    match reason {
        HaltReason::Diverged => HaltLabel::Diverged,
        HaltReason::NeedsBootstrap => HaltLabel::NeedsBootstrap,
        HaltReason::Fenced => HaltLabel::Fenced,
        HaltReason::Unsupported => HaltLabel::Unsupported,
        HaltReason::Unauthorized => HaltLabel::Unauthorized,
        HaltReason::Storage => HaltLabel::Storage,
    }
}
