//! What goes wrong, when, and how it is mended again.

use super::catalog::Acknowledge;
use super::core::logs_of_shard;
use super::core::CoreInput;
use super::disk::{Journal, LogImage, LogKey, SimLog};
use super::env::{Env, Event, Fault, Plan};
use super::random::Choices;
use super::world::World;

/// Longest span a fault lasts; longer than every timeout of a link.
const LONGEST_US: u64 = 6_000_000;

/// How a broker's process is to die at its disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskCrash {
    /// With the commit group under way.
    AtWrite,
    /// With the group synced and nobody told.
    AtSync,
}

impl Plan {
    /// A run's shape, drawn from its seed.
    pub fn draw(choices: &mut Choices, upkeep: &mut Choices) -> Self {
        let nodes = choices.between(3, 5) as usize;
        let is_calm = choices.chance(100);
        let rate = |choices: &mut Choices, most: u64| match is_calm {
            true => 0,
            false => choices.below(most + 1),
        };
        Self {
            nodes,
            cores: choices.between(1, 2) as usize,
            requests: choices.between(40, 100) as usize,
            request_gap_us: *choices.pick(&[2_000, 20_000, 80_000]),
            strikes: rate(choices, 14) as usize,
            strike_gap_us: *choices.pick(&[100_000, 400_000]),
            moves: choices.below(9) as usize,
            group_requests: upkeep.between(40, 160) as usize,
            prefers_cache: upkeep.chance(400),
            stall_per_mille: rate(choices, 8),
            dial_fails_per_mille: rate(choices, 200),
            shed_per_mille: rate(choices, 100),
            bad_credential_per_mille: rate(choices, 40),
            stale_view_per_mille: rate(choices, 300),
            lane_capacity: choices.between(1, 4) as usize,
            legacy_nodes: (0..nodes).map(|_| choices.chance(80)).collect(),
            sync_us: *choices.pick(&[100, 1_000, 10_000]),
        }
    }
}

impl Env {
    /// Whether the commit group that starts now fails.
    pub fn draw_disk_fault(&mut self, node: usize) -> bool {
        let Some(fault) = self.next_group_fails[node]
            .take()
            .filter(|_| self.may_inject)
        else {
            return false;
        };
        self.count_fault(fault);
        true
    }

    /// Whether the process dies as its commit group ends.
    pub fn take_disk_crash(&mut self, node: usize) -> Option<DiskCrash> {
        let (groups, crash) = self.disk_crash[node]?;
        if !self.may_inject {
            self.disk_crash[node] = None;
            return None;
        }
        if groups > 0 {
            self.disk_crash[node] = Some((groups - 1, crash));
            return None;
        }
        self.disk_crash[node] = None;
        self.count_fault(match crash {
            DiskCrash::AtWrite => Fault::CrashAtWrite,
            DiskCrash::AtSync => Fault::CrashAtSync,
        });
        self.crash_wanted = Some(node);
        Some(crash)
    }
}

impl World {
    /// One fault, drawn.
    pub fn strike(&mut self) {
        let nodes = self.env.plan.nodes;
        let node = self.env.random.faults.index(nodes);
        let for_us = self.env.random.faults.between(20_000, LONGEST_US);
        match self.env.random.faults.below(17) {
            0 | 1 => self.drop_connection(),
            2 => {
                let conns = self.env.network.open_conns();
                if !conns.is_empty() {
                    let conn = *self.env.random.faults.pick(&conns);
                    self.env.reset_inside_frame(conn);
                }
            }
            3 | 4 => {
                let other = self.another_node(node);
                self.env.count_fault(Fault::OneWayCut);
                self.env.cut(node, other, for_us);
            }
            5 => {
                let other = self.another_node(node);
                self.env.count_fault(Fault::TwoWayCut);
                self.env.cut(node, other, for_us);
                self.env.cut(other, node, for_us);
            }
            6 | 7 => {
                if self.is_up(node) {
                    self.env.count_fault(Fault::Crash);
                    self.crash(node);
                }
            }
            8 => {
                let groups = self.env.random.faults.below(6);
                let crash = match self.env.random.faults.chance(500) {
                    true => DiskCrash::AtWrite,
                    false => DiskCrash::AtSync,
                };
                self.env.disk_crash[node] = Some((groups, crash));
            }
            9 => {
                let fault = match self.env.random.faults.chance(500) {
                    true => Fault::FailedSync,
                    false => Fault::ShortWrite,
                };
                self.env.next_group_fails[node] = Some(fault);
            }
            10 => {
                self.env.count_fault(Fault::SlowDisk);
                self.env.disk_factor[node] = self.env.random.faults.between(10, 300);
                self.mend_later(node, for_us);
            }
            11 => {
                self.env.disk_is_full[node] = true;
                self.mend_later(node, for_us);
            }
            12 => self.pause(node, for_us),
            13 => {
                self.env.count_fault(Fault::SlowPeer);
                self.env.slow_factor[node] = self.env.random.faults.between(5, 100);
                self.mend_later(node, for_us);
            }
            14 | 15 => self.trim_a_log(),
            _ => {
                self.env.count_fault(Fault::ClockStep);
                let step_us = self.env.random.faults.below(7_200_000_000) as i64;
                self.env.wall_offset_us[node] += step_us - 3_600_000_000;
            }
        }
    }

    /// Retention on one member of a replicated stream: never past what a majority is known to hold
    /// where that is what acknowledgements mean.
    fn trim_a_log(&mut self) {
        let shards = 0..self.env.catalog.shards.len();
        let streams: Vec<usize> = shards
            .filter(|s| !self.env.catalog.shards[*s].is_cache())
            .filter(|s| self.env.catalog.is_replicated(*s))
            .collect();
        if streams.is_empty() {
            return;
        }
        let shard = *self.env.random.faults.pick(&streams);
        let assignment = self.env.catalog.current(shard).clone();
        let node = *self.env.random.faults.pick(&assignment.replicas);
        let core = shard % self.env.plan.cores;
        let Some(at) = self.core_at(node, core) else {
            return;
        };
        let key = LogKey {
            shard,
            log: SimLog::Stream,
        };
        let as_a_broker_does = self.env.random.faults.chance(700);
        let owner = &self.nodes[node][core];
        let durable = owner.journal.durable_tail(key);
        let leads = owner.leads_any(&self.env, shard);
        let matched = owner.follower_may_forget_below(&self.env, key);
        let matched = matched.filter(|_| !leads && as_a_broker_does);
        let most = match (self.env.catalog.shards[shard].acknowledge, matched) {
            (Acknowledge::Leader, _) => durable,
            (Acknowledge::Quorum, _) if leads => owner.may_forget_below(key),
            (Acknowledge::Quorum, Some((_, matched))) => matched,
            // No broker can know that much; safe all the same, and further than brokers go in large sets.
            (Acknowledge::Quorum, None) => self.env.judge.committed_tail(key),
        };
        let base = self.env.random.faults.below(most.min(durable) + 1);
        let is_quorum = self.env.catalog.shards[shard].acknowledge == Acknowledge::Quorum;
        if let Some((generation, _)) = matched.filter(|_| is_quorum) {
            self.env.judge.on_chosen(key, generation, base);
        }
        self.env.to_core(1, at, CoreInput::Trim { key, base });
    }

    /// A broker that starts finds one copy of a shard damaged. Of each shard one at a time, and never its leader's:
    /// more is the loss of a majority's disks.
    pub fn maybe_rot(&mut self, node: usize, journals: &mut [Journal]) {
        if !self.env.may_inject || !self.env.random.faults.chance(80) {
            return;
        }
        let shard = self.env.random.faults.index(self.env.catalog.shards.len());
        let logs = logs_of_shard(&self.env, shard);
        let key = *self.env.random.faults.pick(&logs);
        let current = self.env.catalog.current(shard).clone();
        let is_follower = current.replicas.contains(&node) && current.leader != node;
        let is_free = !self.moves.contains_key(&shard) && self.mended(shard);
        if current.replicas.len() < 3 || !is_follower || !is_free {
            return;
        }
        self.env.count_fault(Fault::DamagedCopy);
        let journal = &mut journals[shard % self.env.plan.cores];
        journal.damage(key);
        let held = journal.on_disk(key).map_or(0, LogImage::tail);
        let counted_for = if key.log.is_main() { held } else { 0 };
        self.mending.insert(shard, (node, key, counted_for));
    }

    /// Whether no copy of the shard is less than what it was counted for.
    pub fn mended(&mut self, shard: usize) -> bool {
        let Some((node, key, counted_for)) = self.mending.get(&shard).copied() else {
            return true;
        };
        let journal = &self.nodes[node][shard % self.env.plan.cores].journal;
        let tail = journal.on_disk(key).map_or(0, LogImage::tail);
        let is_mended = !journal.is_damaged(key) && tail >= counted_for;
        if is_mended {
            self.mending.remove(&shard);
        }
        is_mended
    }

    fn another_node(&mut self, node: usize) -> usize {
        let nodes = self.env.plan.nodes;
        (node + 1 + self.env.random.faults.index(nodes - 1)) % nodes
    }

    fn mend_later(&mut self, node: usize, after_us: u64) {
        let at_us = self.env.now_us + after_us;
        self.env.queue.push(at_us, Event::Mend { node });
    }

    /// Speed and space come back.
    pub fn mend(&mut self, node: usize) {
        self.env.disk_factor[node] = 1;
        self.env.slow_factor[node] = 1;
        self.env.disk_is_full[node] = false;
    }

    fn drop_connection(&mut self) {
        let conns = self.env.network.open_conns();
        if conns.is_empty() {
            return;
        }
        self.env.count_fault(Fault::DropConnection);
        let conn = *self.env.random.faults.pick(&conns);
        self.env.drop_connection(conn);
    }
}
