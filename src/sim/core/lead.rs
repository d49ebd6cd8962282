//! The leader's half on one core: carries out what [`ShardLeader`] wants.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::time::Duration;

use super::owner::{ServeRefusal, Waiter};
use super::replica::logs_of_shard;
use super::ship::Ship;
use super::Core;
use crate::ids::{Generation, NodeId};
use crate::proto::convert::PeerReply;
use crate::proto::replication::leader::{
    FollowerIdx, HaltReason, LogStart, QuorumWaits, RebuildSlots, ReportId, ShardEvent,
    ShardLeader, ShardSpec, ShipLimits, ShownMark,
};
use crate::proto::MonoTime;
use crate::sim::catalog::Acknowledge;
use crate::sim::check::replication::Counted;
use crate::sim::disk::{Change, Done, LogKey, SimLog};
use crate::sim::env::Env;
use crate::sim::reports::SimGate;
use crate::wire::internal::ReplicaLog;

/// How long a `Quorum` write waits for its majority.
const QUORUM_WAIT: Duration = Duration::from_secs(5);

/// Copies one core may have made anew at once.
#[derive(Debug)]
pub(super) struct Slots(Cell<u32>);

impl RebuildSlots for Slots {
    fn try_take(&self) -> bool {
        let free = self.0.get();
        self.0.set(free.saturating_sub(1));
        free > 0
    }

    fn give_back(&self) {
        self.0.set(self.0.get() + 1);
    }
}

#[derive(Debug)]
pub(super) struct Led {
    pub machine: ShardLeader<SimGate>,
    gate: SimGate,
    pub generation: u64,
    pub followers: Vec<usize>,
    pub is_superseded: bool,
}

/// Who waits, for which answer, until the log is on a majority up to where.
type Wait = (Waiter, PeerReply, u64);

/// The shards one core leads with followers.
#[derive(Debug)]
pub struct Leads {
    pub(super) led: BTreeMap<usize, Led>,
    /// What readers of a shard were shown; outlives a generation under this leader.
    shown: BTreeMap<usize, ShownMark>,
    waits: BTreeMap<usize, QuorumWaits<Wait>>,
    pub(super) ships: BTreeMap<u64, Ship>,
    /// Own generations being made durable, by journal token.
    recording: BTreeMap<u64, (usize, u64)>,
    pub(super) slots: Slots,
}

impl Default for Leads {
    fn default() -> Self {
        Self {
            led: BTreeMap::new(),
            shown: BTreeMap::new(),
            waits: BTreeMap::new(),
            ships: BTreeMap::new(),
            recording: BTreeMap::new(),
            slots: Slots(Cell::new(1)),
        }
    }
}

impl Leads {
    pub fn is_waiting(&self, token: u64) -> bool {
        self.recording.contains_key(&token)
    }

    pub fn is_ship(&self, token: u64) -> bool {
        self.ships.contains_key(&token)
    }

    pub fn waiting_writes(&self) -> usize {
        self.waits.values().map(QuorumWaits::len).sum()
    }

    pub fn ships(&self) -> usize {
        self.ships.len()
    }

    pub fn is_open(&self, shard: usize, generation: u64) -> bool {
        self.led.get(&shard).is_some_and(|led| {
            led.generation == generation && led.machine.is_open() && !led.is_superseded
        })
    }

    pub fn mark(&self, shard: usize) -> Option<u64> {
        self.led.get(&shard)?.machine.mark()
    }

    pub(super) fn shown(&self, shard: usize) -> ShownMark {
        self.shown.get(&shard).copied().unwrap_or_default()
    }

    /// How many records the slowest follower lacks of any of the shard's logs; `None` while one of them is sent
    /// nothing.
    pub fn lag(&self, shard: usize) -> Option<u64> {
        let machine = &self.led.get(&shard)?.machine;
        let is_shipped = machine.halted().next().is_none();
        is_shipped.then(|| machine.lag())
    }

    /// What retention may give up of a led shard's main log; nothing of one that is not led.
    pub fn may_forget_below(&self, key: LogKey) -> u64 {
        let led = self.led.get(&key.shard);
        led.map_or(0, |led| led.machine.may_forget_below(key.log.wire()))
    }

    /// Replicas that are shipped nothing, for the last look.
    pub fn halted(&self, shard: usize) -> Vec<String> {
        self.led.get(&shard).map_or(vec![], |led| {
            led.machine.halted().map(|h| format!("{h:?}")).collect()
        })
    }

    pub fn next_deadline(&self, now: MonoTime) -> Option<MonoTime> {
        let machines = self.led.values().filter(|led| !led.is_superseded);
        // What is due already waits for something else than time.
        let machines = machines
            .filter_map(|led| led.machine.next_deadline())
            .filter(|deadline| *deadline > now);
        let waits = self.waits.values().filter_map(QuorumWaits::next_deadline);
        machines.chain(waits).min()
    }
}

impl Core {
    /// The catalog has been read: leads what it gives this broker, lets go of what it takes.
    pub(super) fn leads_on_view(&mut self, env: &mut Env, version: usize) {
        let shards: Vec<usize> = self.leads.led.keys().copied().collect();
        for shard in shards {
            let assignment = env.catalog.assignment(version, shard).clone();
            let Some(led) = self.leads.led.get_mut(&shard) else {
                continue;
            };
            let is_leader = assignment.leader == self.at.node;
            if is_leader && assignment.generation == led.generation {
                led.machine.on_view();
                continue;
            }
            if let Some(led) = self.leads.led.remove(&shard) {
                led.machine.retire(&self.leads.slots);
            }
            if !is_leader {
                self.leads.shown.remove(&shard);
                self.end_waits(env, shard);
                self.reopen_replicas(env, shard);
            }
        }
        self.begin_leads(env);
    }

    /// Begins to lead what the view names this broker for, once nothing else writes to its logs.
    pub(super) fn begin_leads(&mut self, env: &mut Env) {
        let Some(version) = self.view else {
            return;
        };
        for shard in 0..env.catalog.shards.len() {
            let assignment = env.catalog.assignment(version, shard).clone();
            let is_mine = assignment.leader == self.at.node
                && assignment.replicas.len() > 1
                && self.owner_core(shard) == self.at.core
                && !self.leads.led.contains_key(&shard);
            if !is_mine {
                continue;
            }
            let keys = logs_of_shard(env, shard);
            let is_quiet =
                self.replicas.is_quiet(shard) && !keys.iter().any(|key| self.journal.is_busy(*key));
            // With a damaged log nobody leads.
            let is_whole = !keys.iter().any(|key| self.journal.is_damaged(*key));
            if is_quiet && is_whole && !self.journal.has_failed() {
                self.begin_lead(env, shard, &keys);
            }
        }
    }

    fn begin_lead(&mut self, env: &mut Env, shard: usize, keys: &[LogKey]) {
        let Some(version) = self.view else {
            return;
        };
        let assignment = env.catalog.assignment(version, shard).clone();
        let followers: Vec<usize> = assignment
            .replicas
            .iter()
            .copied()
            .filter(|node| *node != self.at.node)
            .collect();
        let name = |node: &usize| -> NodeId { env.catalog.nodes[*node].clone() };
        let spec = ShardSpec {
            me: self.me.clone(),
            generation: Generation(assignment.generation),
            followers: followers.iter().map(name).collect(),
            is_quorum: env.catalog.shards[shard].acknowledge == Acknowledge::Quorum,
            limits: ShipLimits::default(),
            seed: env.random.schedule.number(),
        };
        let logs: Vec<LogStart> = keys
            .iter()
            .map(|key| LogStart {
                log: key.log.wire(),
                state: self.log_state(env, *key),
            })
            .collect();
        let gate = SimGate::new(env, (shard, assignment.generation), &followers);
        match ShardLeader::begin(spec, gate.clone(), &logs) {
            Ok(machine) => {
                self.close_replicas(shard);
                env.judge
                    .on_begin(self.at.node, keys, assignment.generation, &self.journal);
                let led = Led {
                    machine,
                    gate,
                    generation: assignment.generation,
                    followers,
                    is_superseded: false,
                };
                self.leads.led.insert(shard, led);
                self.run_leads(env);
            }
            Err(refusal) => {
                self.leads.shown.remove(&shard);
                env.note(|| format!("n{} may not lead {shard}: {refusal}", self.at.node));
            }
        }
    }

    /// Lets the led shards act until nothing more follows.
    pub(super) fn run_leads(&mut self, env: &mut Env) {
        let shards: Vec<usize> = self.leads.led.keys().copied().collect();
        for shard in shards {
            self.take_lead_events(env, shard);
            self.ship(env, shard);
            self.take_lead_events(env, shard);
        }
    }

    pub(super) fn take_lead_events(&mut self, env: &mut Env, shard: usize) {
        while let Some(event) = self
            .leads
            .led
            .get_mut(&shard)
            .and_then(|led| led.machine.poll_event())
        {
            self.on_lead_event(env, shard, event);
        }
        self.send_reports(env, shard);
    }

    /// What the shard's leader wants stored goes to the engine.
    fn send_reports(&self, env: &mut Env, shard: usize) {
        let Some(led) = self.leads.led.get(&shard) else {
            return;
        };
        let key = logs_of_shard(env, shard)[0];
        for draft in led.gate.take_unsent() {
            env.judge.on_report(self.at.node, key, &draft);
            env.send_report(self.at, shard, draft);
        }
    }

    pub(super) fn on_report_answered(
        &mut self,
        shard: usize,
        generation: u64,
        id: ReportId,
        is_stored: bool,
    ) {
        let Some(led) = self.leads.led.get_mut(&shard) else {
            return;
        };
        if led.generation == generation {
            led.gate.on_answer(id, is_stored);
            led.machine.on_report(id, is_stored);
        }
    }

    fn on_lead_event(&mut self, env: &mut Env, shard: usize, event: ShardEvent) {
        let Some(led) = self.leads.led.get_mut(&shard) else {
            return;
        };
        let (node, generation) = (self.at.node, led.generation);
        env.note(|| format!("n{node} leads {shard} at {generation}: {event:?}"));
        match event {
            ShardEvent::Record { log } => {
                let log = SimLog::of(log);
                let change = Change::Begin {
                    generation,
                    leader: node,
                };
                let token = self.token();
                let submitted = self
                    .journal
                    .submit(LogKey { shard, log }, change, token, false);
                match submitted {
                    Ok(()) => drop(self.leads.recording.insert(token, (shard, generation))),
                    Err(_) => {
                        if let Some(led) = self.leads.led.get_mut(&shard) {
                            led.machine.on_recorded(false);
                        }
                    }
                }
            }
            ShardEvent::Opened => {
                let keys = logs_of_shard(env, shard);
                env.judge.on_opened(node, &keys, generation, &self.journal);
            }
            ShardEvent::Marked { mark } => {
                let key = logs_of_shard(env, shard)[0];
                let assignment = env
                    .catalog
                    .assignment(self.view.unwrap_or(0), shard)
                    .clone();
                let counted: Vec<Counted> = (0..)
                    .zip(&led.followers)
                    .filter_map(|(place, node)| {
                        let cursor = led.machine.cursor(FollowerIdx(place), key.log.wire())?;
                        let halted = cursor.halted();
                        Some(Counted {
                            node: *node,
                            position: cursor.position(),
                            is_halted: halted.is_some_and(|why| why != HaltReason::Storage),
                        })
                    })
                    .collect();
                if env.reports.is_on {
                    let stored = env.reports.of(shard, generation).map(|draft| draft.mark);
                    env.judge
                        .check_reported((node, key), (generation, mark), stored);
                }
                if assignment.generation == generation {
                    env.judge.on_mark(
                        node,
                        key,
                        (generation, mark),
                        &assignment.replicas,
                        &counted,
                        &self.journal,
                    );
                }
                self.leads.shown.entry(shard).or_default().raise(mark);
                self.release_waits(env, shard, mark);
            }
            ShardEvent::Superseded => {
                led.is_superseded = true;
                self.end_waits(env, shard);
            }
            ShardEvent::Halted {
                follower,
                log,
                reason,
            } => {
                let follower = led.followers[usize::from(follower.0)];
                let key = LogKey {
                    shard,
                    log: SimLog::of(log),
                };
                env.judge.on_halt(follower, key, generation, reason);
            }
            ShardEvent::Paused { .. }
            | ShardEvent::RebuildStarted { .. }
            | ShardEvent::RebuildRefused { .. }
            | ShardEvent::RebuildCompleted { .. } => {}
        }
    }

    /// A link has come up anew.
    pub(super) fn leads_on_peer_up(&mut self, node: usize) {
        for led in self.leads.led.values_mut() {
            if let Some(place) = led.followers.iter().position(|at| *at == node) {
                led.machine.on_peer_up(FollowerIdx(place as u16));
            }
        }
    }

    pub(super) fn on_recorded(&mut self, done: &Done) {
        let Some((shard, generation)) = self.leads.recording.remove(&done.token) else {
            return;
        };
        if let Some(led) = self.leads.led.get_mut(&shard) {
            if led.generation == generation {
                led.machine.on_recorded(done.is_ok);
            }
        }
    }

    /// The durable tails of the led shards' logs have moved.
    pub(super) fn leads_on_logs(&mut self) {
        for (shard, led) in &mut self.leads.led {
            for log in ReplicaLog::ALL {
                let key = LogKey {
                    shard: *shard,
                    log: SimLog::of(*log),
                };
                let base = self.journal.seen(key).base();
                let synced = self.journal.durable_tail(key);
                led.machine.on_log(*log, base, synced);
            }
        }
    }

    /// A write is durable here and waits for a majority.
    pub(super) fn wait_for_quorum(
        &mut self,
        env: &mut Env,
        key: LogKey,
        end: u64,
        waiter: Waiter,
        reply: PeerReply,
    ) {
        let deadline = self.now(env) + QUORUM_WAIT;
        let waits = self.leads.waits.entry(key.shard).or_default();
        waits.push(end, deadline, (waiter, reply, end));
        if let Some(mark) = self.leads.mark(key.shard) {
            self.release_waits(env, key.shard, mark);
        }
    }

    fn release_waits(&mut self, env: &mut Env, shard: usize, mark: u64) {
        let key = logs_of_shard(env, shard)[0];
        while let Some((waiter, reply, end)) = self
            .leads
            .waits
            .get_mut(&shard)
            .and_then(|waits| waits.pop_released(mark))
        {
            env.judge.on_quorum_release(key, end, &reply);
            self.finish(env, waiter, Ok(reply));
        }
    }

    fn end_waits(&mut self, env: &mut Env, shard: usize) {
        while let Some((waiter, ..)) = self
            .leads
            .waits
            .get_mut(&shard)
            .and_then(QuorumWaits::pop_any)
        {
            self.finish(env, waiter, Err(ServeRefusal::Unknown));
        }
    }

    pub(super) fn leads_on_time(&mut self, env: &mut Env) {
        let now = self.now(env);
        for led in self.leads.led.values_mut() {
            led.machine.on_time(now);
        }
        let shards: Vec<usize> = self.leads.waits.keys().copied().collect();
        for shard in shards {
            while let Some((waiter, ..)) = self
                .leads
                .waits
                .get_mut(&shard)
                .and_then(|waits| waits.pop_expired(now))
            {
                self.finish(env, waiter, Err(ServeRefusal::Unknown));
            }
        }
    }
}
