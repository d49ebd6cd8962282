//! A catalog engine that stores reports: what gates a leader's mark in some runs, and tells who may lead next.
//!
//! The rules are those of a catalog with transactions: a report is stored only while the assignment is the one
//! its sender leads by and its sender's process lives, and a leader may be replaced, without stopping it, by whoever the report names that is
//! stored at that moment. Messages to the engine take their time, fail, and their answers get lost.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use super::catalog::Acknowledge;
use super::core::CoreInput;
use super::env::{CoreAt, Env, Event, Fault};
use super::world::World;
use crate::proto::replication::leader::{Report, ReportGate, ReportId, Submitted};

/// The runs with an engine, in 1000.
const RUNS_PER_MILLE: u64 = 300;
/// Members from which on a shard goes on without one of them: with fewer, a copy that a stored report names
/// can neither be made anew nor be left out of the next report.
const LEAST_MEMBERS: usize = 3;

/// A report as its leader sends it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Draft {
    pub id: ReportId,
    pub generation: u64,
    pub mark: u64,
    /// Brokers that may be promoted on it.
    pub named: Vec<usize>,
}

/// What a leader has told the engine and does not know to be replaced.
#[derive(Debug, Default)]
pub struct Desk {
    last_id: u64,
    unsent: Vec<Draft>,
    /// Reports that may be the stored one.
    perhaps_stored: BTreeMap<ReportId, Vec<usize>>,
}

/// The gate of one led shard; a clone is the same gate.
#[derive(Debug, Clone)]
pub enum SimGate {
    /// The catalog is a file: nothing is stored.
    MajorityAlone,
    Engine {
        followers: Rc<[usize]>,
        desk: Rc<RefCell<Desk>>,
    },
}

impl SimGate {
    /// The gate of a leader that begins: it reads what an earlier life of it has stored at its generation.
    pub fn new(env: &Env, (shard, generation): (usize, u64), followers: &[usize]) -> Self {
        if !env.reports.is_on {
            return Self::MajorityAlone;
        }
        let mut desk = Desk::default();
        if let Some(stored) = env.reports.of(shard, generation) {
            desk.perhaps_stored
                .insert(ReportId(0), stored.named.clone());
        }
        Self::Engine {
            followers: followers.into(),
            desk: Rc::new(RefCell::new(desk)),
        }
    }

    /// Reports to be sent now.
    pub fn take_unsent(&self) -> Vec<Draft> {
        match self {
            Self::MajorityAlone => Vec::new(),
            Self::Engine { desk, .. } => std::mem::take(&mut desk.borrow_mut().unsent),
        }
    }

    /// What became of a report. One that is not known to be stored may be.
    pub fn on_answer(&self, id: ReportId, is_stored: bool) {
        if let Self::Engine { desk, .. } = self {
            if is_stored {
                let desk = &mut *desk.borrow_mut();
                desk.perhaps_stored = desk.perhaps_stored.split_off(&id);
            }
        }
    }
}

impl ReportGate for SimGate {
    const COMPARES_LOGS: bool = true;

    fn submit(&mut self, report: &Report<'_>) -> Submitted {
        let Self::Engine { followers, desk } = self else {
            return Submitted::Stored;
        };
        let desk = &mut *desk.borrow_mut();
        desk.last_id += 1;
        let id = ReportId(desk.last_id);
        let named: Vec<usize> = report.caught_up().map(|place| followers[place]).collect();
        desk.perhaps_stored.insert(id, named.clone());
        desk.unsent.push(Draft {
            id,
            generation: report.generation.0,
            mark: report.mark.unwrap_or(0),
            named,
        });
        Submitted::Pending(id)
    }

    fn is_unnamed(&self, follower: usize) -> bool {
        match self {
            Self::MajorityAlone => true,
            Self::Engine { followers, desk } => {
                let desk = desk.borrow();
                let mut named = desk.perhaps_stored.values().flatten();
                !named.any(|node| *node == followers[follower])
            }
        }
    }
}

/// The engine: the newest report of each shard.
#[derive(Debug, Default)]
pub struct Reports {
    pub is_on: bool,
    stored: BTreeMap<usize, Draft>,
}

impl Reports {
    /// The report stored at that generation; a new generation begins without one.
    pub fn of(&self, shard: usize, generation: u64) -> Option<&Draft> {
        let stored = self.stored.get(&shard);
        stored.filter(|draft| draft.generation == generation)
    }
}

impl Env {
    /// A leader's report goes to the engine.
    pub fn send_report(&mut self, at: CoreAt, shard: usize, draft: Draft) {
        let chance = &mut self.random.reports;
        let after_us = match chance.chance(50) {
            true => chance.between(100_000, 3_000_000),
            false => chance.between(200, 10_000),
        };
        let event = Event::Report { at, shard, draft };
        self.queue.push(self.now_us + after_us, event);
    }

    /// The engine has a report before it.
    pub fn store_report(&mut self, at: CoreAt, shard: usize, draft: Draft) {
        let (id, generation) = (draft.id, draft.generation);
        let current = self.catalog.current(shard);
        let is_same_life = self.incarnation[at.node] == Some(at.incarnation);
        let is_current = current.generation == generation && current.leader == at.node;
        let fails = self.may_inject && self.random.reports.chance(60);
        let is_stored = is_current && is_same_life && !fails;
        self.note(|| {
            format!(
                "report of n{} for {shard}: {draft:?}, stored: {is_stored}",
                at.node
            )
        });
        if is_stored {
            self.reports.stored.insert(shard, draft);
        } else if fails {
            self.count_fault(Fault::ReportFailed);
        }
        let is_lost = self.may_inject && is_stored && self.random.reports.chance(60);
        if is_lost {
            self.count_fault(Fault::ReportAnswerLost);
        }
        let input = CoreInput::ReportAnswered {
            shard,
            generation,
            id,
            is_stored: is_stored && !is_lost,
        };
        // Whoever is refused waits a little.
        let after_us = match is_stored {
            true => self.random.reports.between(100, 5_000),
            false => 50_000,
        };
        self.to_core(after_us, at, input);
    }
}

impl World {
    /// Draws whether this run has an engine.
    pub fn plan_reports(&mut self) {
        let shards = 0..self.env.catalog.shards.len();
        let is_large = |shard| self.env.catalog.current(shard).replicas.len() >= LEAST_MEMBERS;
        let all_are_large = shards.into_iter().all(is_large);
        self.env.reports.is_on = self.env.random.reports.chance(RUNS_PER_MILLE) && all_are_large;
    }

    /// Replaces a leader by whom its report names, and leaves it running. False when no report names anybody
    /// who is up.
    pub fn promote_by_report(&mut self, shard: usize) -> bool {
        let current = self.env.catalog.current(shard).clone();
        let is_quorum = self.env.catalog.shards[shard].acknowledge == Acknowledge::Quorum;
        if !self.env.reports.is_on || !is_quorum || !self.env.random.reports.chance(600) {
            return false;
        }
        // A copy that is being made anew is none that a report could name.
        let is_whole = self.mended(shard);
        let stored = self.env.reports.of(shard, current.generation);
        let named = stored.map_or(&[][..], |draft| &draft.named[..]);
        let up: Vec<usize> = named.iter().copied().filter(|n| self.is_up(*n)).collect();
        if up.is_empty() || !is_whole {
            return false;
        }
        let leader = *self.env.random.reports.pick(&up);
        let holders = self.holders_after_replacement(shard, &current.replicas);
        self.env.count_fault(Fault::PromotedByReport);
        self.judge_promotion(shard, leader);
        let version = self.env.catalog.assign(shard, leader, holders);
        self.env
            .note(|| format!("shard {shard} to n{leader} by its report, version {version}"));
        self.distribute(version);
        true
    }
}
