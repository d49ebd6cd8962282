//! What the members of consumer groups do: poll, ack, nack, give up, redrive, discard.
//!
//! Members are clients of whichever broker owns their shard, as the protocol has it. Once a run
//! has healed they ack what they are given and poll on until nothing is left.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::core::CoreInput;
use super::env::{CoreAt, Env};
use super::random::Choices;
use super::world::World;
use crate::proto::group::{GroupOp, GroupRefusal, GroupReply, Poll};

/// Groups of each stream shard.
const GROUPS: [&str; 2] = ["g0", "g1"];

/// One group of one stream shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct GroupAt {
    pub shard: usize,
    pub group: usize,
}

pub fn group_name(group: usize) -> &'static str {
    GROUPS[group]
}

/// What the members of one group know.
#[derive(Debug, Default)]
struct Members {
    held: BTreeSet<u64>,
    dead: BTreeSet<u64>,
}

/// The members of all groups.
#[derive(Debug, Default)]
pub struct Consumers {
    members: BTreeMap<GroupAt, Members>,
    asked: BTreeMap<u64, GroupOp>,
    last_ticket: u64,
}

impl Consumers {
    fn next_op(&mut self, at: GroupAt, choices: &mut Choices) -> GroupOp {
        let members = self.members.entry(at).or_default();
        let one = |of: &BTreeSet<u64>, choices: &mut Choices| {
            let index = choices.index(of.len().max(1));
            of.iter().nth(index).copied()
        };
        let held = one(&members.held, choices);
        let dead = one(&members.dead, choices);
        match (choices.below(100), held, dead) {
            (0..=39, Some(offset), _) => GroupOp::Ack { offset },
            (40..=51, Some(offset), _) => GroupOp::Nack {
                offset,
                delay: Duration::from_millis(choices.below(3) * 50),
                attempts: 0,
            },
            (52..=56, Some(offset), _) => GroupOp::DeadLetter { offset },
            (57..=59, Some(offset), _) => GroupOp::Extend {
                offset,
                attempts: 1,
                by: Duration::from_millis(300),
            },
            (60..=69, _, Some(offset)) => GroupOp::Redrive { offset },
            (70..=74, _, Some(offset)) => GroupOp::Discard { offset },
            (75..=80, ..) => GroupOp::ListDead,
            (81, ..) => GroupOp::Describe,
            _ => poll(choices.between(1, 5) as usize, choices.below(4) * 200),
        }
    }
}

fn poll(max_records: usize, wait_ms: u64) -> GroupOp {
    GroupOp::Poll(Poll {
        max_records,
        wait: Duration::from_millis(wait_ms),
        ..Poll::default()
    })
}

impl World {
    /// The next request of some member of some group.
    pub(super) fn ask_a_group(&mut self) {
        let streams = self.env.streams_with_groups();
        if streams.is_empty() {
            return;
        }
        let shard = *self.env.random.upkeep.pick(&streams);
        let group = self.env.random.upkeep.index(GROUPS.len());
        let at = GroupAt { shard, group };
        let Env {
            random, consumers, ..
        } = &mut self.env;
        let op = consumers.next_op(at, &mut random.upkeep);
        self.ask_group_of_owner(at, op);
    }

    /// Every group is polled until nothing is left.
    pub(super) fn drain_groups(&mut self) {
        for shard in self.env.streams_with_groups() {
            for group in 0..GROUPS.len() {
                let at = GroupAt { shard, group };
                self.ask_group_of_owner(at, GroupOp::Describe);
                self.ask_group_of_owner(at, GroupOp::ListDead);
                self.ask_group_of_owner(at, poll(4, 0));
            }
        }
    }

    fn ask_group_of_owner(&mut self, at: GroupAt, op: GroupOp) {
        let node = self.env.catalog.current(at.shard).leader;
        if let Some(incarnation) = self.env.incarnation[node] {
            let core = at.shard % self.env.plan.cores;
            let owner = CoreAt {
                node,
                core,
                incarnation,
            };
            self.env.ask_group(owner, at, op);
        }
    }
}

impl Env {
    fn streams_with_groups(&self) -> Vec<usize> {
        let shards = 0..self.catalog.shards.len();
        shards
            .filter(|shard| !self.catalog.shards[*shard].is_cache())
            .collect()
    }

    fn ask_group(&mut self, owner: CoreAt, at: GroupAt, op: GroupOp) {
        self.consumers.last_ticket += 1;
        let ticket = self.consumers.last_ticket;
        self.judge.on_group_ask(owner, at, ticket, &op);
        self.consumers.asked.insert(ticket, op.clone());
        self.to_core(1, owner, CoreInput::Group { at, ticket, op });
    }

    /// A member is answered.
    pub fn hear_group(
        &mut self,
        owner: CoreAt,
        at: GroupAt,
        ticket: u64,
        result: Result<GroupReply, GroupRefusal>,
    ) {
        let Some(op) = self.consumers.asked.remove(&ticket) else {
            return;
        };
        self.note(|| format!("{at:?} {op:?}: {result:?}"));
        let members = self.consumers.members.entry(at).or_default();
        match (&op, &result) {
            (GroupOp::Poll(_), Ok(GroupReply::Records(records))) => {
                let offsets = records.iter().map(|record| record.offset);
                members.held.extend(offsets.clone());
                if !self.may_inject {
                    self.drain_on(owner, at, offsets.collect());
                }
            }
            (GroupOp::DeadLetter { offset }, told) if !self.may_inject => {
                let offset = *offset;
                let next = match told {
                    Ok(_) => GroupOp::Discard { offset },
                    Err(_) => GroupOp::Ack { offset },
                };
                self.ask_group(owner, at, next);
            }
            (GroupOp::Describe, Ok(GroupReply::Info(info))) if !self.may_inject => {
                let is_drained = info.in_flight == 0
                    && info.owed == 0
                    && info.committed.unwrap_or(0) >= info.tail;
                if is_drained {
                    self.judge.on_group_drained(owner.node, at, info.tail);
                }
            }
            (GroupOp::ListDead, Ok(GroupReply::DeadLetters(offsets))) => {
                members.dead = offsets.iter().copied().collect();
                if !self.may_inject {
                    for offset in offsets.clone() {
                        self.ask_group(owner, at, GroupOp::Discard { offset });
                    }
                }
            }
            (GroupOp::Ack { offset } | GroupOp::DeadLetter { offset }, Ok(_)) => {
                members.held.remove(offset);
            }
            (GroupOp::Redrive { offset } | GroupOp::Discard { offset }, _) => {
                members.dead.remove(offset);
            }
            _ => {}
        }
    }

    /// The run has healed: what was given is acked, and more is asked for.
    fn drain_on(&mut self, owner: CoreAt, at: GroupAt, offsets: Vec<u64>) {
        if offsets.is_empty() {
            return;
        }
        // One of them goes the long way, so that all three logs of the shard get last words.
        for (nth, offset) in offsets.into_iter().enumerate() {
            let op = match nth {
                0 => GroupOp::DeadLetter { offset },
                _ => GroupOp::Ack { offset },
            };
            self.ask_group(owner, at, op);
        }
        self.ask_group(owner, at, poll(4, 0));
    }
}
