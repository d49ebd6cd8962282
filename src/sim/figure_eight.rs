//! Three leaders in a row, of which the middle one leaves a record that nobody else has (scenario N1).
//!
//! Chance alone hardly ever comes to it: it takes five members, a first leader whose record one other holds,
//! a second leader who lacks it and writes another in its place, a third who inherited the first record,
//! brings it to a majority and writes nothing, and a fourth look at the logs that meets the second's and, of
//! that majority, only the member that had held the first record already and so labelled nothing anew.
//! The operator keeps its rule all the time; only which logs can be reached is arranged.

use super::core::CoreInput;
use super::env::{Event, Fault};
use super::operator::Replacement;
use super::world::World;

/// Members it takes: two for the first record, two beside whom the second is written, one to spare.
pub const MEMBERS: usize = 5;
/// How long cuts last: longer than the step they are for.
const CUT_US: u64 = 900_000;
/// How often a step is looked at before the scenario is given up.
const MOST_LOOKS: u32 = 60;

/// The scenario under way.
#[derive(Debug, Clone)]
pub struct FigureEight {
    shard: usize,
    step: Step,
    looks: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// The first leader and one other are cut off and take a write.
    Apart { first: usize, with: usize },
    /// The second leader, none of the two, is to open.
    Second { apart: [usize; 2], second: usize },
    /// It is alone and takes writes.
    Alone { apart: [usize; 2], second: usize },
    /// The third leader, one of the two, is to open; of it these never hear.
    Third {
        third: usize,
        other: usize,
        unaware: [usize; 2],
    },
}

impl World {
    /// Begins it, if the cluster is whole and nothing else is under way with the shard.
    pub fn begin_figure_eight(&mut self, shard: usize) -> bool {
        let current = self.env.catalog.current(shard).clone();
        let is_whole = current
            .replicas
            .iter()
            .all(|node| self.is_up(*node) && !self.held[*node]);
        let is_busy = self.moves.contains_key(&shard) || !self.mended(shard);
        let may = current.replicas.len() == MEMBERS && !is_busy;
        if self.figure_eight.is_some() || !is_whole || !may || !self.leads_openly(shard) {
            return false;
        }
        let first = current.leader;
        let others: Vec<usize> = self.others(shard, &[first]);
        let with = *self.env.random.schedule.pick(&others);
        self.env.count_fault(Fault::FigureEight);
        self.part(shard, &[first, with]);
        self.write_at(shard, first);
        self.go_on(shard, Step::Apart { first, with }, 250_000);
        true
    }

    /// The next step.
    pub fn on_figure_eight(&mut self) {
        let Some(FigureEight { shard, step, looks }) = self.figure_eight.take() else {
            return;
        };
        if !self.env.may_inject || looks > MOST_LOOKS {
            return;
        }
        let leader = self.env.catalog.current(shard).leader;
        match step {
            Step::Apart { first, with } if leader == first => {
                let seen = self.others(shard, &[first, with]);
                if let Some(second) = self.replace_seeing(shard, first, &seen) {
                    let apart = [first, with];
                    self.go_on(shard, Step::Second { apart, second }, 20_000);
                }
            }
            Step::Second { apart, second } if leader == second => {
                if !self.leads_openly(shard) {
                    return self.look_again(shard, step, looks);
                }
                self.part(shard, &[second]);
                // More than the first leader wrote, mostly: a shorter log is not promoted.
                self.write_at(shard, second);
                self.write_at(shard, second);
                self.go_on(shard, Step::Alone { apart, second }, 150_000);
            }
            Step::Alone { apart, second } if leader == second => {
                if !apart.iter().all(|node| self.is_up(*node)) {
                    return self.look_again(shard, step, looks);
                }
                self.third_leader(shard, apart, second);
            }
            Step::Third {
                third,
                other,
                unaware: [second, late],
            } if leader == third => {
                let has_shipped = looks > 2 && self.leads_openly(shard);
                if !has_shipped {
                    return self.look_again(shard, step, looks);
                }
                self.env.count_fault(Fault::FigureEightEnded);
                self.replace_seeing(shard, third, &[second, late, other]);
            }
            // Somebody else has replaced the leader meanwhile.
            Step::Apart { .. } | Step::Second { .. } | Step::Alone { .. } | Step::Third { .. } => {}
        }
    }

    /// One of the two that hold the first record leads third, and meets all but the second leader and one more.
    fn third_leader(&mut self, shard: usize, apart: [usize; 2], second: usize) {
        let seen = self.others(shard, &[second]);
        let Some(third) = self.replace_seeing(shard, second, &seen) else {
            return;
        };
        let Some(other) = apart.into_iter().find(|node| *node != third) else {
            return;
        };
        let rest = self.others(shard, &[apart[0], apart[1], second]);
        if !apart.contains(&third) || rest.is_empty() {
            return;
        }
        let late = *self.env.random.schedule.pick(&rest);
        let unaware = [second, late];
        self.part(shard, &unaware);
        let step = Step::Third {
            third,
            other,
            unaware,
        };
        self.go_on(shard, step, 20_000);
    }

    fn go_on(&mut self, shard: usize, step: Step, after_us: u64) {
        let looks = 0;
        self.figure_eight = Some(FigureEight { shard, step, looks });
        let at_us = self.env.now_us + after_us;
        self.env.queue.push(at_us, Event::FigureEight);
    }

    fn look_again(&mut self, shard: usize, step: Step, looks: u32) {
        self.go_on(shard, step, 20_000);
        if let Some(running) = &mut self.figure_eight {
            running.looks = looks + 1;
        }
    }

    /// Holders of the shard but these.
    fn others(&self, shard: usize, but: &[usize]) -> Vec<usize> {
        let holders = self.env.catalog.current(shard).replicas.iter().copied();
        holders.filter(|node| !but.contains(node)).collect()
    }

    /// These and all others do not hear of each other for a while.
    fn part(&mut self, shard: usize, group: &[usize]) {
        for outside in self.others(shard, group) {
            for inside in group {
                self.env.cut(*inside, outside, CUT_US);
                self.env.cut(outside, *inside, CUT_US);
            }
        }
    }

    /// Somebody writes to the shard at its leader.
    fn write_at(&mut self, shard: usize, node: usize) {
        let Some(at) = self.core_at(node, 0) else {
            return;
        };
        for request in self.extra_requests(shard) {
            let after_us = 5_000 + self.env.random.workload.below(60_000);
            self.env.to_core(after_us, at, CoreInput::Request(request));
        }
    }

    /// Takes the leader down and replaces it by what these logs say; the new one, if there is one.
    fn replace_seeing(&mut self, shard: usize, old: usize, seen: &[usize]) -> Option<usize> {
        if self.held[old] {
            return None;
        }
        self.held[old] = true;
        if self.is_up(old) {
            self.crash(old);
        }
        self.promote(Replacement { shard, old }, Some(seen));
        let leader = self.env.catalog.current(shard).leader;
        (leader != old).then_some(leader)
    }
}
