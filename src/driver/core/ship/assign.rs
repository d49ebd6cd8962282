//! Which shards this broker leads, and the change from one assignment to the next.

use std::sync::Arc;

use storage_uring::LogRef;

use super::super::append::log_name;
use super::super::follower::{log_kind, log_state};
use super::super::Core;
use super::{LedIdx, LedShard};
use crate::admin::ShardFailure;
use crate::catalog::{Consistency, RouteTable, ShardRoute};
use crate::ids::{Generation, NodeId, ShardId};
use crate::proto::replication::leader::{
    LogStart, MajorityAlone, QuorumWaits, ShardLeader, ShardSpec, ShownMark,
};
use crate::proto::replication::types::logs_of;
use crate::wire::internal::{ShardRef, Text};

/// What of an assignment the leader's machine is made from.
struct Assigned {
    generation: Generation,
    followers: Vec<NodeId>,
    is_quorum: bool,
}

impl Assigned {
    fn of(routes: &RouteTable, route: &ShardRoute, consistency: Consistency) -> Self {
        let others = route.replicas.iter().filter(|node| **node != route.leader);
        Self {
            generation: route.generation,
            followers: others
                .map(|node| routes.node(*node).node_id.clone())
                .collect(),
            is_quorum: consistency == Consistency::Quorum,
        }
    }
}

impl Core {
    /// Takes up every replicated shard the catalog gives this core.
    pub(in crate::driver::core) fn lead_assigned_shards(&mut self) {
        let routes = Arc::clone(&self.routes);
        self.note_quorum_shards();
        for (stream, route) in routes.sharded_routes() {
            let is_ours = route.is_local && route.core.0 == self.index && route.replicas.len() > 1;
            if is_ours && !self.shipping.by_shard.contains_key(&route.shard_id) {
                let assigned = Assigned::of(&routes, route, stream.consistency);
                self.lead(&route.shard_id, assigned);
            }
        }
    }

    /// The catalog changed: shards are lost, gained, or led on at another generation.
    pub(in crate::driver::core) fn ship_after_catalog(&mut self) {
        let routes = Arc::clone(&self.routes);
        self.note_quorum_shards();
        self.shipping.refused.clear();
        for at in self.shipping.indices() {
            let Some(led) = self.shipping.get(at) else {
                continue;
            };
            let shard = Arc::clone(&led.shard);
            let assigned = routes
                .shard(&shard)
                .filter(|route| route.is_local)
                .zip(routes.stream_of(&shard))
                .map(|(route, stream)| Assigned::of(&routes, route, stream.consistency));
            match assigned {
                None => self.lose_shard(at),
                Some(assigned) => self.lead_on(at, assigned),
            }
        }
        self.note_lost_logs(&routes);
        self.lead_assigned_shards();
    }

    /// Readers of any of these are held back by a mark, led or not.
    fn note_quorum_shards(&mut self) {
        let (routes, index) = (Arc::clone(&self.routes), self.index);
        let mut shards = routes.sharded_routes();
        self.shipping.holds_quorum_shards = shards.any(|(stream, route)| {
            let is_held = route.core.0 == index && (route.is_local || route.is_follower);
            is_held && route.replicas.len() > 1 && stream.consistency == Consistency::Quorum
        });
    }

    fn lead(&mut self, shard: &Arc<ShardId>, assigned: Assigned) {
        let mut logs = Vec::new();
        for log in logs_of(shard.kind) {
            let opened = match logs.is_empty() {
                true => self.open_log(shard),
                false => match self.storage.open_log(&log_name(shard, log_kind(*log))) {
                    Ok(opened) => Ok(opened),
                    Err(error) => return self.report_shard_failure(shard, &error),
                },
            };
            // The failure of the main log has been reported where it was opened.
            let Ok(opened) = opened else {
                return;
            };
            let damage = self.storage.damage(opened).filter(|_| logs.is_empty());
            if let Some(damage) = damage {
                // Not a record of it may be shown to anybody, and nobody may compare with it.
                return self.refuse_to_lead(shard, format!("its log is damaged: {damage}"));
            }
            logs.push((*log, opened));
        }
        let Some(shard_ref) = shard_ref(shard, assigned.generation) else {
            return self.refuse_to_lead(shard, "a name is too long to be replicated".to_owned());
        };
        let led = LedShard {
            shard: Arc::clone(shard),
            epoch: 0,
            generation: assigned.generation,
            is_quorum: assigned.is_quorum,
            followers: assigned.followers,
            shard_ref,
            logs: logs.clone(),
            machine: None,
            waits: QuorumWaits::default(),
            shown: ShownMark::default(),
            timer_at: None,
        };
        let at = self.shipping.insert(led);
        for (kind, log) in logs {
            self.shipping.logs.insert(log, (at, kind));
        }
        self.start_machine(at);
    }

    /// Leads on under a changed assignment. Waiting writes go over to the new mark.
    fn lead_on(&mut self, at: LedIdx, assigned: Assigned) {
        let Some(led) = self.shipping.get_mut(at) else {
            return;
        };
        let is_same = led.generation == assigned.generation
            && led.followers == assigned.followers
            && led.is_quorum == assigned.is_quorum;
        if is_same {
            if let Some(machine) = &mut led.machine {
                machine.on_view();
            }
            return self.run_led(at);
        }
        let led_main = led.logs.first().map(|(_, log)| *log);
        if assigned.followers.is_empty() {
            // Alone, what is durable here is on a majority.
            self.release_waits(at, u64::MAX);
            self.forget_led(at);
            return self.wake_unheld(led_main);
        }
        led.generation = assigned.generation;
        led.shard_ref.generation = assigned.generation;
        led.is_quorum = assigned.is_quorum;
        led.followers = assigned.followers;
        if let Some(machine) = led.machine.take() {
            machine.retire(&*self.settings.rebuilds);
        }
        if !assigned.is_quorum {
            self.release_waits(at, u64::MAX);
            self.wake_unheld(led_main);
        }
        self.start_machine(at);
    }

    /// Nothing holds the readers of a shard's log back any more but what is durable.
    fn wake_unheld(&mut self, main: Option<LogRef>) {
        if let Some(log) = main {
            self.wake_readers(log);
        }
    }

    /// Another broker leads the shard now, or nobody.
    fn lose_shard(&mut self, at: LedIdx) {
        let Some(led) = self.shipping.get(at) else {
            return;
        };
        tracing::info!(shard = %led.shard, generation = %led.generation, "this broker does not lead the shard any more");
        self.fail_waits(at);
        self.forget_led(at);
    }

    fn forget_led(&mut self, at: LedIdx) {
        let machine = self.shipping.remove(at).and_then(|led| led.machine);
        if let Some(machine) = machine {
            machine.retire(&*self.settings.rebuilds);
        }
    }

    /// Writes that were on their way when their shard was lost may not be acknowledged, companion logs'
    /// included.
    fn note_lost_logs(&mut self, routes: &RouteTable) {
        let main = self.logs.iter().map(|(shard, open)| (shard, open.log));
        let companions = self.caches.iter();
        let companions = companions.map(|((shard, _), state)| (shard, state.log));
        let is_led = |shard: &ShardId| routes.shard(shard).is_some_and(|route| route.is_local);
        let logs = main.chain(companions);
        let logs = logs.map(|(shard, log)| (log, is_led(shard)));
        self.shipping.lost.after_catalog(logs);
    }

    /// Whether an append that has become durable belongs to a shard that was lost meanwhile.
    pub(in crate::driver::core) fn was_lost(&self, log: LogRef) -> bool {
        self.shipping.lost.contains(log)
    }

    /// Every completion that was there has been looked at.
    pub(in crate::driver::core) fn forget_settled_losses(&mut self) {
        let storage = &self.storage;
        // Not merely without records on their way: a new leader's cut may have dropped them from the tail already.
        let is_settled = |log| storage.is_settled(log);
        self.shipping.lost.on_completions_looked_at(is_settled);
    }

    /// Makes the machine of the shard's generation, once its logs are quiet: what an earlier role
    /// still has on its way would be counted wrongly.
    fn start_machine(&mut self, at: LedIdx) {
        let Some(led) = self.shipping.get(at) else {
            return;
        };
        let is_quiet = led
            .logs
            .iter()
            .all(|(_, log)| self.storage.is_settled(*log));
        if !is_quiet {
            if !self.shipping.settling.contains(&at) {
                self.shipping.settling.push(at);
            }
            return;
        }
        self.shipping.settling.retain(|settling| *settling != at);
        self.forget_batches(at);
        let Some(led) = self.shipping.get(at) else {
            return;
        };
        let starts: Vec<LogStart> = led
            .logs
            .iter()
            .map(|(kind, log)| LogStart {
                log: *kind,
                state: log_state(&self.storage.state(*log)),
            })
            .collect();
        let spec = ShardSpec {
            me: self.me.clone(),
            generation: led.generation,
            followers: led.followers.clone(),
            is_quorum: led.is_quorum,
            limits: self.settings.ship_limits,
            seed: self.random_u64(),
        };
        match ShardLeader::begin(spec, MajorityAlone, &starts) {
            Ok(machine) => {
                self.shipping.last_epoch += 1;
                let epoch = self.shipping.last_epoch;
                if let Some(led) = self.shipping.get_mut(at) {
                    led.machine = Some(machine);
                    led.epoch = epoch;
                }
                self.run_led(at);
            }
            Err(refusal) => {
                let shard = Arc::clone(&led.shard);
                self.fail_waits(at);
                self.forget_led(at);
                self.refuse_to_lead(&shard, refusal.to_string());
            }
        }
    }

    /// In an earlier role the logs may have been cut or placed anew: offsets may name others now.
    fn forget_batches(&mut self, at: LedIdx) {
        let logs: Vec<LogRef> = self
            .shipping
            .get(at)
            .map(|led| led.logs.iter().map(|(_, log)| *log).collect())
            .unwrap_or_default();
        for log in logs {
            self.shipping.batches.forget(log);
            self.shipping.lost.remove(log);
        }
    }

    pub(in crate::driver::core) fn refuse_to_lead(&mut self, shard: &Arc<ShardId>, error: String) {
        tracing::error!(%shard, error, "this broker may not lead the shard");
        let failure = ShardFailure {
            shard: shard.to_string(),
            error,
            remedy: "give every broker a catalog with a higher generation for the shard, led by the replica whose log is newest".to_owned(),
        };
        self.shipping.refused.insert(Arc::clone(shard), failure);
    }

    /// Shards that waited for their logs to be quiet.
    pub(in crate::driver::core) fn retry_settling(&mut self) {
        if self.shipping.settling.is_empty() {
            return;
        }
        for at in std::mem::take(&mut self.shipping.settling) {
            self.start_machine(at);
        }
    }
}

/// The shard as requests name it; `None` when a name does not fit the wire.
fn shard_ref(shard: &ShardId, generation: Generation) -> Option<ShardRef> {
    Some(ShardRef {
        tenant: Text::new(shard.tenant.as_str()).ok()?,
        namespace: Text::new(shard.namespace.as_str()).ok()?,
        stream: Text::new(shard.name.as_str()).ok()?,
        shard: shard.shard,
        generation,
    })
}
