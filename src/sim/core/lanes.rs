//! Work that crosses from one core of a broker to another, over bounded lanes.

use std::collections::{BTreeMap, VecDeque};

use super::owner::{ServeRefusal, ServeResult, Waiter, Work};
use super::replica::ReplyTo;
use super::{Core, CoreInput};
use crate::ids::Generation;
use crate::proto::replication::follower::FollowerRequest;
use crate::proto::replication::ReplicateAnswer;
use crate::sim::disk::LogKey;
use crate::sim::env::{CoreAt, Env, Fault};

/// How long a message takes from core to core, microseconds.
const LANE_US: u64 = 3;
/// Messages a lane takes once nothing goes wrong any more.
const HEALED_LANE_CAPACITY: usize = 256;
/// How soon an answer that found its lane full tries again.
const BACKLOG_RETRY_US: u64 = 50;

#[derive(Debug)]
pub enum LaneMsg {
    Serve {
        ticket: u64,
        shard: usize,
        generation: Generation,
        work: Work,
    },
    Done {
        ticket: u64,
        result: ServeResult,
    },
    /// A replicate message for a copy of the receiving core.
    Replicate {
        ticket: u64,
        key: LogKey,
        request: FollowerRequest,
    },
    Replicated {
        ticket: u64,
        answer: ReplicateAnswer,
    },
}

/// Who waits for other cores, and what waits for room.
#[derive(Debug)]
pub struct Lanes {
    waiters: BTreeMap<u64, Waiter>,
    backlog: Vec<VecDeque<LaneMsg>>,
}

impl Lanes {
    pub fn new(cores: usize) -> Self {
        Self {
            waiters: BTreeMap::new(),
            backlog: (0..cores).map(|_| VecDeque::new()).collect(),
        }
    }

    pub fn backlog(&self) -> usize {
        let waiting: usize = self.backlog.iter().map(VecDeque::len).sum();
        waiting + self.waiters.len()
    }
}

impl Core {
    pub(super) fn serve_on_lane(
        &mut self,
        env: &mut Env,
        core: usize,
        (shard, generation): (usize, Generation),
        work: Work,
        waiter: Waiter,
    ) {
        let ticket = self.token();
        let message = LaneMsg::Serve {
            ticket,
            shard,
            generation,
            work,
        };
        // Behind waiting answers a request would overtake them; both use one lane.
        if !self.lanes.backlog[core].is_empty() || !self.has_lane_room(env, core) {
            env.count_fault(Fault::FullLane);
            return self.finish(env, waiter, Err(ServeRefusal::Overloaded));
        }
        self.lanes.waiters.insert(ticket, waiter);
        self.send_on_lane(env, core, message);
    }

    pub(super) fn answer_lane(
        &mut self,
        env: &mut Env,
        core: usize,
        ticket: u64,
        result: ServeResult,
    ) {
        let message = LaneMsg::Done { ticket, result };
        self.lanes.backlog[core].push_back(message);
        self.drain_backlog(env);
    }

    /// Hands a replicate message to the core that owns its log. False when the lane is full.
    pub(super) fn replicate_on_lane(
        &mut self,
        env: &mut Env,
        core: usize,
        ticket: u64,
        key: LogKey,
        request: FollowerRequest,
    ) -> bool {
        if !self.lanes.backlog[core].is_empty() || !self.has_lane_room(env, core) {
            env.count_fault(Fault::FullLane);
            return false;
        }
        let message = LaneMsg::Replicate {
            ticket,
            key,
            request,
        };
        self.send_on_lane(env, core, message);
        true
    }

    pub(super) fn answer_replicate_to(
        &mut self,
        env: &mut Env,
        reply: ReplyTo,
        answer: ReplicateAnswer,
    ) {
        let ticket = reply.ticket;
        if reply.core == self.at.core {
            return self.answer_peer_replicate(env, ticket, answer);
        }
        let message = LaneMsg::Replicated { ticket, answer };
        self.lanes.backlog[reply.core].push_back(message);
        self.drain_backlog(env);
    }

    pub(super) fn drain_backlog(&mut self, env: &mut Env) {
        for core in 0..self.lanes.backlog.len() {
            while !self.lanes.backlog[core].is_empty() {
                if !self.has_lane_room(env, core) {
                    env.count_fault(Fault::FullLane);
                    env.to_core(BACKLOG_RETRY_US, self.at, CoreInput::Wake);
                    break;
                }
                if let Some(message) = self.lanes.backlog[core].pop_front() {
                    self.send_on_lane(env, core, message);
                }
            }
        }
    }

    fn has_lane_room(&self, env: &Env, to: usize) -> bool {
        let lane = (self.at.node, self.at.core, to);
        // A lane that takes next to nothing is one of the things that go wrong.
        let capacity = match env.may_inject {
            true => env.plan.lane_capacity,
            false => HEALED_LANE_CAPACITY,
        };
        env.lane_load.get(&lane).copied().unwrap_or(0) < capacity
    }

    fn send_on_lane(&mut self, env: &mut Env, to: usize, message: LaneMsg) {
        let lane = (self.at.node, self.at.core, to);
        *env.lane_load.entry(lane).or_default() += 1;
        let at = CoreAt {
            core: to,
            ..self.at
        };
        let from = self.at.core;
        // A busy core takes a while before it looks at its lanes.
        let wait_us = match env.may_inject && env.random.schedule.chance(100) {
            true => env.random.schedule.below(2_000),
            false => 0,
        };
        let ready_us = env.lane_ready_us.entry(lane).or_default();
        *ready_us = (*ready_us).max(env.now_us + LANE_US + wait_us);
        let after_us = *ready_us - env.now_us;
        env.to_core(after_us, at, CoreInput::Lane { from, message });
    }

    pub(super) fn on_lane(&mut self, env: &mut Env, from: usize, message: LaneMsg) {
        let lane = (self.at.node, from, self.at.core);
        if let Some(load) = env.lane_load.get_mut(&lane) {
            *load -= 1;
        }
        match message {
            LaneMsg::Serve {
                ticket,
                shard,
                generation,
                work,
            } => {
                let waiter = Waiter::Lane { core: from, ticket };
                self.serve_here(env, shard, generation, work, waiter);
            }
            LaneMsg::Replicate {
                ticket,
                key,
                request,
            } => {
                let reply = ReplyTo { core: from, ticket };
                self.on_replicate(env, key, request, reply);
            }
            LaneMsg::Replicated { ticket, answer } => {
                self.answer_peer_replicate(env, ticket, answer)
            }
            LaneMsg::Done { ticket, result } => {
                if let Some(waiter) = self.lanes.waiters.remove(&ticket) {
                    self.finish(env, waiter, result);
                }
            }
        }
    }
}
