//! The whole simulated cluster and the loop that moves virtual time.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::catalog::{shard_id, Acknowledge, Assignment, Shard, SimCatalog};
use super::check::Judge;
use super::consumers::Consumers;
use super::core::{Core, CoreInput};
use super::disk::{Journal, LogKey};
use super::env::{CoreAt, Env, Event, Fault, Plan};
use super::figure_eight::FigureEight;
use super::moves::PlannedMove;
use super::network::{Network, IDLE_TIMEOUT_US};
use super::queue::Queue;
use super::random::{Choices, Random};
use super::reports::Reports;
use super::subscribers::Subscribers;
use super::trace::Trace;
use super::workload::Request;
use crate::ids::ShardKind;

/// Events of one run at most; a run that needs more never settles.
const EVENT_BOUND: u64 = 400_000;
/// Virtual time after healing in which everything must have settled.
const SETTLE_BOUND_US: u64 = 900_000_000;
/// Number of the first request that is not in the plan.
const EXTRA_REQUESTS: u64 = 1_000;
/// When, after healing, the last writes are made, and how often.
const LAST_WORDS_US: u64 = 20_000_000;
const LAST_WORDS: u32 = 4;

/// One run.
#[derive(Debug)]
pub struct World {
    pub env: Env,
    /// Cores of each broker; of one that is down, what is left on its disks.
    pub nodes: Vec<Vec<Core>>,
    /// Inputs that arrived while a broker stood still.
    pub paused: Vec<Option<VecDeque<Event>>>,
    /// The catalog version that lies on each broker's disk.
    pub files: Vec<usize>,
    /// A leader that was stopped to be replaced never gets a file from before that.
    pub file_floor: Vec<usize>,
    /// Brokers the operator keeps stopped.
    pub held: Vec<bool>,
    /// The shard the operator last dealt with.
    pub last_moved: Option<usize>,
    /// Shards on their way to another leader.
    pub moves: BTreeMap<usize, PlannedMove>,
    pub figure_eight: Option<FigureEight>,
    pub(super) subscribers: Subscribers,
    /// The copy of each shard that was damaged: on which broker, which log, and how far it must reach to be what it
    /// was counted for.
    pub mending: BTreeMap<usize, (usize, LogKey, u64)>,
    /// The operator goes by the newest generation alone; a mistake the checkers must notice.
    pub unsafe_promotion: bool,
    last_words: u32,
    /// Brokers whose disk has failed and who wait for a restart.
    failed: Vec<bool>,
    requests_made: u64,
    /// Requests beside those of the plan, numbered apart from them.
    extra_requests_made: u64,
    group_requests_made: usize,
    strikes_made: usize,
    moves_made: usize,
    heal_at_us: Option<u64>,
}

impl World {
    pub fn new(seed: u64, is_shown: bool) -> Self {
        let mut shape = Choices::new(seed, 0);
        let mut random = Random::new(seed);
        let plan = Plan::draw(&mut shape, &mut random.upkeep);
        let nodes = plan.nodes;
        let latency_us = (0..nodes)
            .map(|_| (0..nodes).map(|_| shape.between(40, 2_000)).collect())
            .collect();
        let catalog = first_catalog(&mut shape, nodes);
        let env = Env {
            now_us: 0,
            queue: Queue::default(),
            random,
            network: Network::new(latency_us, plan.cores),
            catalog,
            judge: Judge::new(plan.legacy_nodes.clone()),
            trace: Trace::new(is_shown),
            consumers: Consumers::default(),
            reports: Reports::default(),
            faults: BTreeMap::new(),
            incarnation: vec![None; nodes],
            slow_factor: vec![1; nodes],
            disk_factor: vec![1; nodes],
            disk_is_full: vec![false; nodes],
            next_group_fails: vec![None; nodes],
            disk_crash: vec![None; nodes],
            wall_offset_us: vec![0; nodes],
            lane_load: BTreeMap::new(),
            lane_ready_us: BTreeMap::new(),
            may_inject: true,
            crash_wanted: None,
            lives: vec![0; nodes],
            plan,
        };
        let mut world = Self {
            env,
            nodes: (0..nodes).map(|_| Vec::new()).collect(),
            paused: (0..nodes).map(|_| None).collect(),
            files: vec![0; nodes],
            file_floor: vec![0; nodes],
            held: vec![false; nodes],
            last_moved: None,
            moves: BTreeMap::new(),
            figure_eight: None,
            subscribers: Subscribers::default(),
            mending: BTreeMap::new(),
            unsafe_promotion: false,
            last_words: 0,
            failed: vec![false; nodes],
            requests_made: 0,
            extra_requests_made: 0,
            group_requests_made: 0,
            strikes_made: 0,
            moves_made: 0,
            heal_at_us: None,
        };
        world.plan_reports();
        for node in 0..nodes {
            world.start(node, Vec::new());
        }
        world.env.queue.push(1_000, Event::Request);
        world.env.queue.push(2_000, Event::GroupRequest);
        world.env.queue.push(5_000, Event::Strike);
        world.env.queue.push(50_000, Event::Operator);
        world.plan_mistakes();
        world.add_subscribers();
        world
    }

    /// Runs to the end, or to the first broken invariant.
    pub fn run(&mut self) {
        while let Some((at_us, event)) = self.env.queue.pop() {
            self.env.now_us = self.env.now_us.max(at_us);
            self.dispatch(event);
            if !self.env.judge.violations.is_empty() {
                return;
            }
            let healed_for = self.heal_at_us.map(|at| self.env.now_us.saturating_sub(at));
            if self.env.trace.events() > EVENT_BOUND
                || healed_for.is_some_and(|us| us > SETTLE_BOUND_US)
            {
                let seen = format!("still busy at {} ms", self.env.now_us / 1000);
                return self.env.judge.fail(40, seen);
            }
        }
        self.subscribers_at_the_end();
        let Self { env, nodes, .. } = self;
        env.judge.at_the_end(nodes, &env.catalog);
    }

    pub fn is_up(&self, node: usize) -> bool {
        self.env.incarnation[node].is_some()
    }

    /// A core of a broker that is up.
    pub fn core_at(&self, node: usize, core: usize) -> Option<CoreAt> {
        let incarnation = self.env.incarnation[node]?;
        Some(CoreAt {
            node,
            core,
            incarnation,
        })
    }

    fn dispatch(&mut self, event: Event) {
        match event {
            Event::Network(event) => {
                if let Some((at, conn, side, arrival)) = self.env.on_network(event) {
                    let input = CoreInput::Arrival {
                        conn,
                        side,
                        arrival,
                    };
                    self.core_input(at, input);
                }
            }
            Event::Core { at, input } => self.core_input(at, input),
            Event::FileArrives { node, version } => {
                self.files[node] = self.files[node].max(version);
                if let Some(incarnation) = self.env.incarnation[node] {
                    self.read_file_soon(node, incarnation);
                }
            }
            Event::ReadFile { node, incarnation } => {
                if self.env.incarnation[node] == Some(incarnation) {
                    let version = self.files[node];
                    for core in 0..self.env.plan.cores {
                        let at = CoreAt {
                            node,
                            core,
                            incarnation,
                        };
                        let after_us = self.env.random.schedule.below(500);
                        self.env.to_core(after_us, at, CoreInput::View(version));
                    }
                }
            }
            Event::Request => self.make_request(),
            Event::GroupRequest => self.make_group_request(),
            Event::Subscriber(event) => self.on_subscriber(event),
            Event::Strike => self.make_strike(),
            Event::Operator => self.operate(),
            Event::MoveOn { shard } => self.move_on(shard),
            Event::StopLeader(replacement) => self.stop_leader(replacement),
            Event::Report { at, shard, draft } => self.env.store_report(at, shard, draft),
            Event::WrongFile { node } => self.put_wrong_file(node),
            Event::FigureEight => self.on_figure_eight(),
            Event::Promote(replacement) => self.promote(replacement, None),
            Event::RestartFailed { node, incarnation } => {
                if self.env.incarnation[node] == Some(incarnation) {
                    self.crash(node);
                }
            }
            Event::LastWords => self.last_words(),
            Event::Restart { node } => {
                if !self.is_up(node) && !self.held[node] {
                    let mut journals = self.take_journals(node);
                    self.maybe_rot(node, &mut journals);
                    self.maybe_put_old_file(node);
                    self.start(node, journals);
                }
            }
            Event::Resume { node } => self.resume(node),
            Event::Mend { node } => self.mend(node),
            Event::Heal => self.heal(),
        }
    }

    fn core_input(&mut self, at: CoreAt, input: CoreInput) {
        if self.env.incarnation[at.node] != Some(at.incarnation) {
            return;
        }
        if let Some(backlog) = &mut self.paused[at.node] {
            backlog.push_back(Event::Core { at, input });
            return;
        }
        let numbers = [self.env.now_us, at.node as u64, at.core as u64];
        self.env.trace.mix(&numbers);
        self.env
            .note(|| format!("n{}.{} {input:?}", at.node, at.core));
        self.nodes[at.node][at.core].on_input(&mut self.env, input);
        if let Some(node) = self.env.crash_wanted.take() {
            return self.crash(node);
        }
        self.step_subscribers(at.node, at.core);
        if self.nodes[at.node][at.core].journal.has_failed() && !self.failed[at.node] {
            self.failed[at.node] = true;
            let after_us = self.env.random.schedule.below(4_000_000);
            let event = Event::RestartFailed {
                node: at.node,
                incarnation: at.incarnation,
            };
            self.env.queue.push(self.env.now_us + after_us, event);
        }
    }

    fn start(&mut self, node: usize, mut journals: Vec<Journal>) {
        let cores = self.env.plan.cores;
        journals.resize_with(cores, Journal::default);
        self.env.lives[node] += 1;
        let incarnation = self.env.lives[node];
        self.env.incarnation[node] = Some(incarnation);
        self.nodes[node] = journals
            .into_iter()
            .enumerate()
            .map(|(core, journal)| {
                let at = CoreAt {
                    node,
                    core,
                    incarnation,
                };
                Core::start(&mut self.env, at, cores, journal)
            })
            .collect();
        self.read_file_soon(node, incarnation);
    }

    /// A broker comes back with the catalog of some time ago, and gets the newest one later.
    fn maybe_put_old_file(&mut self, node: usize) {
        if !self.env.may_inject || !self.env.random.faults.chance(60) {
            return;
        }
        self.env.count_fault(Fault::OldFile);
        let (newest, oldest) = (self.files[node], self.file_floor[node]);
        self.files[node] = oldest + self.env.random.faults.index(newest - oldest + 1);
        let after_us = self.env.random.faults.below(3_000_000);
        let event = Event::FileArrives {
            node,
            version: newest,
        };
        self.env.queue.push(self.env.now_us + after_us, event);
    }

    fn read_file_soon(&mut self, node: usize, incarnation: u32) {
        let after_us = self.env.random.schedule.below(250_000);
        let event = Event::ReadFile { node, incarnation };
        self.env.queue.push(self.env.now_us + after_us, event);
    }

    fn take_journals(&mut self, node: usize) -> Vec<Journal> {
        let cores = self.nodes[node].iter_mut();
        cores
            .map(|core| std::mem::take(&mut core.journal))
            .collect()
    }

    /// The process dies: memory gone, connections silent, disks as a crash leaves them.
    pub fn crash(&mut self, node: usize) {
        self.env.note(|| format!("n{node} crashes"));
        self.env.incarnation[node] = None;
        self.env.drop_ends_of(node);
        self.env.judge.on_node_gone(node);
        self.drop_subscribers_of(node);
        self.env.lane_load.retain(|(at, _, _), _| *at != node);
        self.failed[node] = false;
        self.env.disk_crash[node] = None;
        self.env.next_group_fails[node] = None;
        self.paused[node] = None;
        let journals = self.take_journals(node);
        let crashed = journals.into_iter().map(|mut journal| {
            journal.crash(&mut self.env.random.disk);
            journal
        });
        let crashed: Vec<Journal> = crashed.collect();
        // Cores of a broker that is down hold nothing but their disks.
        let cores = self.env.plan.cores;
        self.nodes[node] = crashed
            .into_iter()
            .enumerate()
            .map(|(core, journal)| {
                let at = CoreAt {
                    node,
                    core,
                    incarnation: 0,
                };
                Core::start(&mut self.env, at, cores, journal)
            })
            .collect();
        let after_us = self.env.random.schedule.between(50_000, 4_000_000);
        let event = Event::Restart { node };
        self.env.queue.push(self.env.now_us + after_us, event);
    }

    /// The process stands still, as after SIGSTOP; its kernel still takes what arrives.
    pub fn pause(&mut self, node: usize, for_us: u64) {
        if !self.is_up(node) || self.paused[node].is_some() {
            return;
        }
        self.env.count_fault(Fault::Pause);
        self.paused[node] = Some(VecDeque::new());
        *self.env.judge.paused_us.entry(node).or_default() += for_us;
        if for_us > IDLE_TIMEOUT_US {
            self.env.silence_node_later(node);
        }
        let at_us = self.env.now_us + for_us;
        self.env.queue.push(at_us, Event::Resume { node });
    }

    fn resume(&mut self, node: usize) {
        let Some(backlog) = self.paused[node].take() else {
            return;
        };
        for event in backlog {
            if let Event::Core { at, input } = event {
                self.core_input(at, input);
            }
        }
        for core in 0..self.env.plan.cores {
            self.step_subscribers(node, core);
        }
    }

    fn make_request(&mut self) {
        if self.requests_made == self.env.plan.requests as u64 {
            return self.heal_when_done();
        }
        let id = self.requests_made;
        self.requests_made += 1;
        let request = self.env.next_request(id);
        let node = self.env.random.workload.index(self.env.plan.nodes);
        let core = self.env.random.workload.index(self.env.plan.cores);
        if let Some(at) = self.core_at(node, core) {
            self.env.to_core(1, at, CoreInput::Request(request));
        }
        let gap_us = self
            .env
            .random
            .workload
            .below(2 * self.env.plan.request_gap_us);
        let at_us = self.env.now_us + gap_us;
        self.env.queue.push(at_us, Event::Request);
    }

    fn make_group_request(&mut self) {
        if self.group_requests_made == self.env.plan.group_requests || !self.env.may_inject {
            return;
        }
        self.group_requests_made += 1;
        self.ask_a_group();
        let gap_us = self.env.plan.request_gap_us;
        let at_us = self.env.now_us + self.env.random.upkeep.below(2 * gap_us);
        self.env.queue.push(at_us, Event::GroupRequest);
    }

    fn make_strike(&mut self) {
        if self.strikes_made == self.env.plan.strikes {
            return self.heal_when_done();
        }
        self.strikes_made += 1;
        if self.env.may_inject {
            self.strike();
        }
        let gap_us = self
            .env
            .random
            .faults
            .below(2 * self.env.plan.strike_gap_us);
        let at_us = self.env.now_us + gap_us;
        self.env.queue.push(at_us, Event::Strike);
    }

    fn heal_when_done(&mut self) {
        let all_done = self.requests_made == self.env.plan.requests as u64
            && self.strikes_made == self.env.plan.strikes
            && self.moves_made == self.env.plan.moves;
        if all_done && self.heal_at_us.is_none() {
            let at_us = self.env.now_us + self.env.random.schedule.below(2_000_000);
            self.heal_at_us = Some(at_us);
            self.env.queue.push(at_us, Event::Heal);
        }
    }

    /// Nothing goes wrong from here on: the cluster has to come to rest.
    fn heal(&mut self) {
        self.env.note(|| "healing".to_string());
        self.env.may_inject = false;
        self.env.heal_cuts();
        for node in 0..self.env.plan.nodes {
            self.mend(node);
            self.resume(node);
        }
        let at_us = self.env.now_us + LAST_WORDS_US;
        self.env.queue.push(at_us, Event::LastWords);
    }

    fn last_words(&mut self) {
        if self.last_words == LAST_WORDS {
            return;
        }
        self.last_words += 1;
        // The operator has every broker read its file again, which ends halts of no reason.
        for node in 0..self.env.plan.nodes {
            if let Some(incarnation) = self.env.incarnation[node] {
                self.read_file_soon(node, incarnation);
            }
        }
        self.drain_groups();
        for shard in 0..self.env.catalog.shards.len() {
            let leader = self.env.catalog.current(shard).leader;
            let Some(at) = self.core_at(leader, 0) else {
                continue;
            };
            for request in self.extra_requests(shard) {
                // Apart, so that a small lane takes them all.
                let after_us = 100_000 * request.id % 7_000_000;
                self.env.to_core(after_us, at, CoreInput::Request(request));
            }
        }
        let at_us = self.env.now_us + LAST_WORDS_US;
        self.env.queue.push(at_us, Event::LastWords);
    }

    /// A write to each log of a shard, beside those of the plan.
    pub fn extra_requests(&mut self, shard: usize) -> Vec<Arc<Request>> {
        let id = EXTRA_REQUESTS + self.extra_requests_made;
        let requests = self.env.last_requests(id, shard);
        self.extra_requests_made += requests.len() as u64;
        requests
    }

    fn operate(&mut self) {
        if self.moves_made == self.env.plan.moves {
            return self.heal_when_done();
        }
        self.moves_made += 1;
        if self.env.may_inject {
            self.operate_once();
        }
        let at_us = self.env.now_us + self.env.random.schedule.below(1_500_000);
        self.env.queue.push(at_us, Event::Operator);
    }

    /// An unreplicated shard gets another leader; its new log is another one.
    pub fn move_a_shard(&mut self, shard: usize) {
        let leader = self.env.random.schedule.index(self.env.plan.nodes);
        self.env.count_fault(Fault::ShardMoved);
        let version = self.env.catalog.assign(shard, leader, vec![leader]);
        self.env
            .note(|| format!("shard {shard} moves to n{leader}, version {version}"));
        self.distribute(version);
    }

    /// A version reaches every broker, sooner or later.
    pub fn distribute(&mut self, version: usize) {
        for node in 0..self.env.plan.nodes {
            let most_us = *self.env.random.schedule.pick(&[50_000, 300_000, 3_000_000]);
            let at_us = self.env.now_us + self.env.random.schedule.below(most_us);
            self.env
                .queue
                .push(at_us, Event::FileArrives { node, version });
        }
    }
}

/// Some stream shards and a cache shard that shares their name; in most runs with followers.
fn first_catalog(shape: &mut Choices, nodes: usize) -> SimCatalog {
    let streams = shape.between(1, 3) as u32;
    let is_replicated = shape.chance(750);
    let acknowledge = |shape: &mut Choices| match shape.chance(650) {
        true => Acknowledge::Quorum,
        false => Acknowledge::Leader,
    };
    let mut shards: Vec<Shard> = (0..streams)
        .map(|index| Shard {
            id: shard_id(ShardKind::Stream, index),
            acknowledge: acknowledge(shape),
        })
        .collect();
    shards.push(Shard {
        id: shard_id(ShardKind::Cache, 0),
        acknowledge: acknowledge(shape),
    });
    let members = match (is_replicated, shape.below(10)) {
        (false, _) => 1,
        (true, 0) => 2,
        (true, 1..=4) => nodes,
        (true, _) => 3,
    };
    let first = shards
        .iter()
        .map(|_| {
            let leader = shape.index(nodes);
            Assignment {
                generation: 0,
                leader,
                replicas: (0..members).map(|i| (leader + i) % nodes).collect(),
            }
        })
        .collect();
    SimCatalog::new(nodes, shards, first)
}
