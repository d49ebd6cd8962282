//! Planned moves: a shard gets another leader while the old one lives and takes writes.
//!
//! The documented way: narrow the set to the old and the new leader, so that nothing is acknowledged that
//! the new one lacks; wait until all that the old one held by then is on both, in the companion logs as well,
//! of which no mark tells; name the new one; widen the set again. Whenever the set has changed, its former holders count in a replacement until a
//! majority of the new set holds what its leader did at the change.

use super::core::logs_of_shard;
use super::env::{Event, Fault};
use super::log::LogKey;
use super::world::World;

/// How often the operator looks before giving a step up.
const MOST_LOOKS: u32 = 40;

/// A change of a shard's holders under way.
#[derive(Debug, Clone)]
pub struct PlannedMove {
    step: Step,
    /// Who is to lead.
    to: usize,
    /// Who held the shard before and will again.
    all: Vec<usize>,
    /// Who held it before the step, while that matters.
    former: Vec<usize>,
    /// The generation looked at, and how far its leader reached when it was first seen open.
    generation: u64,
    held: Option<u64>,
    /// Whether nothing was lacking of any log at some look since.
    was_level: bool,
    looks: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Two holders, the old leader first.
    Narrowed,
    /// The same two, the new leader first.
    Switched,
    /// All of them.
    Widened,
}

impl PlannedMove {
    /// The sets whose majorities a replacement must meet, the one it gives the shard last.
    pub fn sets(&self, current: &[usize]) -> Vec<Vec<usize>> {
        let mut sets = vec![self.former.clone(), current.to_vec(), self.all.clone()];
        sets.retain(|set| !set.is_empty());
        if self.step == Step::Switched {
            // Nothing was acknowledged by others that is not on both.
            sets.pop();
        }
        sets
    }

    /// The leader was replaced, and all hold the shard again.
    pub fn after_replacement(&mut self, narrowed: &[usize]) {
        if self.step != Step::Widened {
            self.former = narrowed.to_vec();
        }
        (self.step, self.held) = (Step::Widened, None);
    }

    pub fn holders(&self) -> Vec<usize> {
        self.all.clone()
    }
}

impl World {
    /// Narrows the set.
    pub fn begin_move(&mut self, shard: usize) {
        let current = self.env.catalog.current(shard).clone();
        if self.moves.contains_key(&shard) || self.held[current.leader] || !self.mended(shard) {
            return;
        }
        let members = current.replicas.iter().copied();
        let others: Vec<usize> = members.filter(|node| *node != current.leader).collect();
        let to = *self.env.random.schedule.pick(&others);
        self.env.count_fault(Fault::MoveBegun);
        let planned = PlannedMove {
            step: Step::Narrowed,
            to,
            former: current.replicas.clone(),
            all: current.replicas,
            generation: 0,
            held: None,
            was_level: false,
            looks: 0,
        };
        self.write_step(shard, vec![current.leader, to], planned);
        self.look_later(shard);
    }

    fn write_step(&mut self, shard: usize, holders: Vec<usize>, planned: PlannedMove) {
        let version = self.env.catalog.assign(shard, holders[0], holders);
        self.env
            .note(|| format!("shard {shard}: {planned:?}, version {version}"));
        self.moves.insert(shard, planned);
        self.distribute(version);
    }

    fn look_later(&mut self, shard: usize) {
        let after_us = self.env.random.schedule.between(20_000, 300_000);
        let event = Event::MoveOn { shard };
        self.env.queue.push(self.env.now_us + after_us, event);
    }

    /// The operator looks at where the move is.
    pub fn move_on(&mut self, shard: usize) {
        let current = self.env.catalog.current(shard).clone();
        let Some(mut planned) = self.moves.get(&shard).cloned() else {
            return;
        };
        if !self.env.may_inject {
            // Whoever is being replaced still is; nothing else begins any more.
            return;
        }
        if planned.generation != current.generation {
            (planned.generation, planned.held, planned.looks) = (current.generation, None, 0);
            planned.was_level = false;
        }
        planned.looks += 1;
        let is_open = self.leads_openly(shard);
        let is_held = is_open && self.is_held_by_a_majority(shard, &mut planned);
        planned.was_level |= is_open && self.is_level(shard);
        let gives_up = planned.looks > MOST_LOOKS;
        self.moves.insert(shard, planned.clone());
        let leader = current.leader;
        match planned.step {
            Step::Narrowed if is_held && planned.was_level => {
                self.env.count_fault(Fault::MoveSwitched);
                self.judge_switch(shard, planned.to);
                let holders = vec![planned.to, leader];
                let (step, former) = (Step::Switched, Vec::new());
                let planned = PlannedMove {
                    step,
                    former,
                    ..planned
                };
                self.write_step(shard, holders, planned);
            }
            Step::Switched if is_open => self.widen(shard, leader, planned, &current.replicas),
            Step::Narrowed | Step::Switched if gives_up => {
                self.widen(shard, leader, planned, &current.replicas);
            }
            Step::Widened if is_held => return drop(self.moves.remove(&shard)),
            Step::Narrowed | Step::Switched | Step::Widened => {}
        }
        self.look_later(shard);
    }

    fn widen(&mut self, shard: usize, leader: usize, planned: PlannedMove, narrow: &[usize]) {
        let (step, former, holders) = (Step::Widened, narrow.to_vec(), planned.all.clone());
        let planned = PlannedMove {
            step,
            former,
            ..planned
        };
        let version = self.env.catalog.assign(shard, leader, holders);
        self.env
            .note(|| format!("shard {shard}: {planned:?}, version {version}"));
        self.moves.insert(shard, planned);
        self.distribute(version);
    }

    /// Whether the shard's leader takes writes at the newest generation.
    pub fn leads_openly(&self, shard: usize) -> bool {
        let current = self.env.catalog.current(shard);
        let owner = &self.nodes[current.leader][shard % self.env.plan.cores];
        self.is_up(current.leader) && owner.leads_openly(shard, current.generation)
    }

    /// Whether the mark has passed what the open leader held when it was first seen so.
    fn is_held_by_a_majority(&mut self, shard: usize, planned: &mut PlannedMove) -> bool {
        let leader = self.env.catalog.current(shard).leader;
        let owner = &self.nodes[leader][shard % self.env.plan.cores];
        let log = self.env.catalog.shards[shard].main_log();
        let tail = owner.journal.seen(LogKey { shard, log }).tail();
        if planned.held.is_none() && planned.step == Step::Narrowed {
            let keys = logs_of_shard(&self.env, shard);
            self.env.judge.on_narrowed(shard, &keys, &owner.journal);
        }
        let held = *planned.held.get_or_insert(tail);
        owner.mark(shard) >= Some(held)
    }

    /// Whether the other holders lack nothing of any log, companions among them. The mark says nothing of those.
    fn is_level(&self, shard: usize) -> bool {
        let leader = self.env.catalog.current(shard).leader;
        let owner = &self.nodes[leader][shard % self.env.plan.cores];
        owner.lag(shard) == Some(0)
    }

    /// The successor holds what the leader held, and all that is committed.
    fn judge_switch(&mut self, shard: usize, to: usize) {
        let generation = self.env.catalog.current(shard).generation + 1;
        let journal = &self.nodes[to][shard % self.env.plan.cores].journal;
        self.env.judge.on_switch(shard, (generation, to), journal);
        self.judge_promotion(shard, to);
    }
}
