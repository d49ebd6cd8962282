//! The operator of a cluster whose catalog is a file: replaces leaders by the documented rule.
//!
//! Stop the old leader, look at the logs of as many other members as every majority must meet,
//! promote one whose log can lack nothing that was acknowledged, write the new generation to every
//! broker, the stopped one first. When no log qualifies, nothing is promoted.

use std::collections::BTreeSet;

use super::core::CoreInput;
use super::disk::{LogImage, LogKey};
use super::env::{Event, Fault};
use super::figure_eight::MEMBERS;
use super::world::World;

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
        let shards = self.env.catalog.shards.len();
        let drawn = self.env.random.schedule.index(shards);
        let drawn = self.env.preferred_shard(drawn);
        // Often one shard again and again: what one leader leaves behind meets the next but one.
        let is_same = self.env.random.schedule.chance(500);
        let shard = self.last_moved.filter(|_| is_same).unwrap_or(drawn);
        self.last_moved = Some(shard);
        if !self.env.catalog.is_replicated(shard) {
            return self.move_a_shard(shard);
        }
        let current = self.env.catalog.current(shard).clone();
        let is_large = current.replicas.len() == MEMBERS;
        if is_large && self.env.random.schedule.chance(400) && self.begin_figure_eight(shard) {
            return;
        }
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
        if self.env.random.schedule.chance(250) {
            return self.begin_move(shard);
        }
        let old = current.leader;
        if self.promote_by_report(shard) {
            return;
        }
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
        if let Some(at) = self.core_at(old, 0) {
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
    /// `reached` are the logs that can be looked at; otherwise chance decides.
    pub fn promote(&mut self, replacement: Replacement, reached: Option<&[usize]>) {
        let Replacement { shard, old } = replacement;
        let current = self.env.catalog.current(shard).clone();
        // While the holders change, those before count, too.
        let moving = self.moves.get(&shard);
        let sets = moving.map(|planned| planned.sets(&current.replicas));
        let sets = sets.unwrap_or_else(|| vec![current.replicas.clone()]);
        let seen = self.inspect(shard, old, &sets, reached);
        let promoted = match current.leader == old {
            true => choose(&seen, &sets, self.unsafe_promotion),
            false => None,
        };
        if let Some(leader) = promoted {
            let holders = self.holders_after_replacement(shard, &current.replicas);
            self.env.count_fault(Fault::LeaderReplaced);
            self.judge_promotion(shard, leader);
            let version = self.env.catalog.assign(shard, leader, holders);
            self.env
                .note(|| format!("shard {shard} to n{leader}, version {version}; saw {seen:?}"));
            // The stopped broker must never start with the assignment it was stopped for.
            self.files[old] = self.files[old].max(version);
            self.file_floor[old] = self.files[old];
            self.distribute(version);
        } else {
            self.env
                .note(|| format!("shard {shard}: nobody qualifies; saw {seen:?}"));
        }
        self.held[old] = false;
        let at_us = self.env.now_us + self.env.random.schedule.below(2_000_000);
        self.env.queue.push(at_us, Event::Restart { node: old });
    }

    /// Who holds the shard under the leader that replaces its own, `narrowed` being who held it last.
    pub fn holders_after_replacement(&mut self, shard: usize, narrowed: &[usize]) -> Vec<usize> {
        let Some(planned) = self.moves.get_mut(&shard) else {
            return narrowed.to_vec();
        };
        planned.after_replacement(narrowed);
        planned.holders()
    }

    /// Nobody is promoted who lacks something committed.
    pub fn judge_promotion(&mut self, shard: usize, leader: usize) {
        let log = self.env.catalog.shards[shard].main_log();
        let key = LogKey { shard, log };
        let journal = &self.nodes[leader][shard % self.env.plan.cores].journal;
        self.env
            .judge
            .holds_committed(35, leader, key, journal.on_disk(key));
    }

    /// What the disks say that can be reached.
    fn inspect(
        &mut self,
        shard: usize,
        old: usize,
        sets: &[Vec<usize>],
        reached: Option<&[usize]>,
    ) -> Vec<Seen> {
        let log = self.env.catalog.shards[shard].main_log();
        let key = LogKey { shard, log };
        let holders: BTreeSet<usize> = sets.iter().flatten().copied().collect();
        let mut seen = Vec::new();
        for node in holders {
            let reached_per_mille = if node == old { 150 } else { 850 };
            let is_reached = match reached {
                Some(reached) => reached.contains(&node),
                None => self.env.random.schedule.chance(reached_per_mille),
            };
            // A copy that is being made anew is no log to go by.
            let is_mending = !self.mended(shard) && self.mending[&shard].0 == node;
            if !is_reached || is_mending {
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
/// Enough logs must have been seen that every majority of each set meets one of them. The newest generation in
/// a history alone does not decide: a follower that was still catching up labels what it inherited
/// with its leader's generation and may be shorter than a log of an older one. So the log must be
/// the longest seen as well.
fn choose(seen: &[Seen], sets: &[Vec<usize>], by_generation_alone: bool) -> Option<usize> {
    let is_met = |set: &Vec<usize>| {
        let majority = set.len() / 2 + 1;
        let met = seen.iter().filter(|(node, _)| set.contains(node)).count();
        met + majority > set.len()
    };
    if !sets.iter().all(is_met) {
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
        let choose = |seen: &[Seen]| choose(seen, &[vec![0, 1, 2]], false);
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

    #[test]
    fn a_narrowed_set_is_met_and_its_former_holders_as_well() {
        let sets = [vec![0, 1], vec![0, 1, 2]];
        let choose = |seen: &[Seen]| choose(seen, &sets, false);
        assert_eq!(choose(&[(1, (2, 10))]), None, "0 and 2 may have met");
        assert_eq!(choose(&[(2, (1, 12)), (1, (2, 12))]), Some(1));
        assert_eq!(choose(&[(2, (1, 13)), (1, (1, 12))]), Some(2));
    }
}
