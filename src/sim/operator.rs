//! The operator of a cluster whose catalog is a file: replaces leaders by the documented rule.
//!
//! Stop the old leader, look at the logs of as many other members as every majority must meet,
//! promote one whose log can lack nothing that was acknowledged, write the new generation to every
//! broker, the stopped one first. When no log qualifies, nothing is promoted.

use super::core::CoreInput;
use super::disk::{LogImage, LogKey, SimLog};
use super::env::{CoreAt, Event, Fault};
use super::world::World;
use crate::ids::ShardKind;

/// What the operator read from one member's disk: the newest generation in its history, and its
/// tail.
type Seen = (usize, (u64, u64));

/// A leader being replaced.
#[derive(Debug, Clone, Copy)]
pub struct Replacement {
    pub shard: usize,
    pub old: usize,
}

impl World {
    /// One act: a replicated shard gets a new generation, an unreplicated one another broker.
    pub fn operate_once(&mut self) {
        let shard = self
            .env
            .random
            .schedule
            .index(self.env.catalog.shards.len());
        if !self.env.catalog.is_replicated(shard) {
            return self.move_a_shard(shard);
        }
        let current = self.env.catalog.current(shard).clone();
        if self.env.random.schedule.chance(200) {
            self.env.count_fault(Fault::GenerationRaised);
            let version = self
                .env
                .catalog
                .assign(shard, current.leader, current.replicas);
            self.env
                .note(|| format!("shard {shard}: same leader, version {version}"));
            return self.distribute(version);
        }
        let old = current.leader;
        match self.env.random.schedule.chance(400) {
            true => self.isolate(shard, old, &current.replicas),
            false => self.stop_leader(Replacement { shard, old }),
        }
    }

    /// A leader about to be replaced is cut off first, alone or with some of its followers, and goes on
    /// taking writes: a suffix no majority will hold.
    fn isolate(&mut self, shard: usize, old: usize, replicas: &[usize]) {
        self.env.count_fault(Fault::LeaderIsolated);
        let for_us = self.env.random.faults.between(20_000, 800_000);
        let mut group = vec![old];
        for replica in replicas.iter().filter(|replica| **replica != old) {
            if self.env.random.faults.chance(250) {
                group.push(*replica);
            }
        }
        for inside in &group {
            for outside in (0..self.env.plan.nodes).filter(|node| !group.contains(node)) {
                self.env.cut(*inside, outside, for_us);
                self.env.cut(outside, *inside, for_us);
            }
        }
        if let Some(incarnation) = self.env.incarnation[old] {
            let at = CoreAt {
                node: old,
                core: 0,
                incarnation,
            };
            for _ in 0..self.env.random.workload.between(1, 4) {
                let after_us = self.env.random.workload.below(for_us);
                for request in self.extra_requests(shard) {
                    self.env.to_core(after_us, at, CoreInput::Request(request));
                }
            }
        }
        let event = Event::StopLeader(Replacement { shard, old });
        self.env.queue.push(self.env.now_us + for_us, event);
    }

    /// Takes the leader down; what comes next is decided when its disk and others can be looked at.
    pub fn stop_leader(&mut self, replacement: Replacement) {
        let Replacement { shard, old } = replacement;
        if self.held[old] || !self.env.may_inject {
            return;
        }
        self.held[old] = true;
        if self.is_up(old) {
            self.crash(old);
        }
        let after_us = self.env.random.schedule.between(1_000, 1_000_000);
        let event = Event::Promote(Replacement { shard, old });
        self.env.queue.push(self.env.now_us + after_us, event);
    }

    /// The old leader stands still and cannot come back by itself: somebody else leads, or nobody.
    pub fn promote(&mut self, replacement: Replacement) {
        let Replacement { shard, old } = replacement;
        let current = self.env.catalog.current(shard).clone();
        let seen = self.inspect(shard, old);
        let promoted = match current.leader == old {
            true => choose(&seen, current.replicas.len(), self.unsafe_promotion),
            false => None,
        };
        if let Some(leader) = promoted {
            self.env.count_fault(Fault::LeaderReplaced);
            let version = self.env.catalog.assign(shard, leader, current.replicas);
            self.env
                .note(|| format!("shard {shard} to n{leader}, version {version}; saw {seen:?}"));
            // The stopped broker must never start with the assignment it was stopped for.
            self.files[old] = self.files[old].max(version);
            self.distribute(version);
        } else {
            self.env
                .note(|| format!("shard {shard}: nobody qualifies; saw {seen:?}"));
        }
        self.held[old] = false;
        let at_us = self.env.now_us + self.env.random.schedule.below(2_000_000);
        self.env.queue.push(at_us, Event::Restart { node: old });
    }

    /// What the disks say that can be reached.
    fn inspect(&mut self, shard: usize, old: usize) -> Vec<Seen> {
        let log = match self.env.catalog.shards[shard].id.kind {
            ShardKind::Stream => SimLog::Stream,
            ShardKind::Cache => SimLog::Cache,
        };
        let key = LogKey { shard, log };
        let replicas = self.env.catalog.current(shard).replicas.clone();
        let mut seen = Vec::new();
        for node in replicas {
            let reached_per_mille = if node == old { 150 } else { 850 };
            if !self.env.random.schedule.chance(reached_per_mille) {
                continue;
            }
            let images = self.nodes[node]
                .iter()
                .filter_map(|core| core.journal.on_disk(key));
            let rank = images.map(LogImage::rank).next().unwrap_or((0, 0));
            seen.push((node, rank));
        }
        seen
    }
}

/// Who may lead next, if anybody.
///
/// Enough logs must have been seen that every majority meets one of them. The newest generation in
/// a history alone does not decide: a follower that was still catching up labels what it inherited
/// with its leader's generation and may be shorter than a log of an older one. So the log must be
/// the longest seen as well.
fn choose(seen: &[Seen], members: usize, by_generation_alone: bool) -> Option<usize> {
    let majority = members / 2 + 1;
    if seen.len() < members - majority + 1 {
        return None;
    }
    let longest = seen.iter().map(|(_, rank)| rank.1).max()?;
    let (best, rank) = seen.iter().max_by_key(|(_, rank)| *rank)?;
    (by_generation_alone || rank.1 >= longest).then_some(*best)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_is_promoted_only_when_it_can_lack_nothing() {
        let choose = |seen: &[Seen]| choose(seen, 3, false);
        assert_eq!(
            choose(&[(1, (2, 10))]),
            None,
            "a majority may have met elsewhere"
        );
        assert_eq!(choose(&[(1, (1, 10)), (2, (1, 12))]), Some(2));
        assert_eq!(choose(&[(1, (2, 12)), (2, (1, 12))]), Some(1));
        assert_eq!(
            choose(&[(1, (2, 11)), (2, (1, 15))]),
            None,
            "a newer label on a shorter log proves nothing"
        );
    }
}
