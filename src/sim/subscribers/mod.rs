//! Subscribers of the streams, each with the real cursor over what its broker shows.
//!
//! They only look: a broker does nothing else, and nothing at another time, because somebody reads. Their
//! choices come from a stream of their own for the same reason. A subscriber attaches to a broker that leads its
//! shard, or believes it does; reads from memory at the moment something may be read, or from the disk and later;
//! some are slow. One that was ended goes on elsewhere, where it was or anew. Once a run has healed all of
//! them read to the end.

mod subscription;

use super::catalog::Acknowledge;
use super::check::subscribers::Subscribed;
use super::core::stream_of;
use super::env::Event;
use super::random::Choices;
use super::world::World;
use crate::ids::Offset;
use crate::proto::subscription::{EndReason, Readable, StartPosition, Subscription};
use subscription::{Attached, Running, LIMITS};

/// How often one that is left out in the end asks again.
const MOST_LAST_TRIES: u32 = 400;

/// Something that happens to a subscriber.
#[derive(Debug, Clone, Copy)]
pub enum SubscriberEvent {
    /// It attaches, or leaves.
    Turn { number: usize },
    /// The disk has what a subscription asked it for.
    Read { number: usize, life: u64 },
    /// The client has taken so much of what it was sent.
    Taken {
        number: usize,
        life: u64,
        bytes: usize,
    },
}

#[derive(Debug)]
struct Subscriber {
    shard: usize,
    is_slow: bool,
    /// Subscriptions so far.
    life: u64,
    attached: Option<Attached>,
    resume_from: Option<Offset>,
    is_turn_due: bool,
    last_tries: u32,
}

/// All subscribers of a run.
#[derive(Debug, Default)]
pub struct Subscribers {
    all: Vec<Subscriber>,
}

impl World {
    /// A few for every run.
    pub(super) fn add_subscribers(&mut self) {
        let shards = 0..self.env.catalog.shards.len();
        let streams: Vec<usize> = shards
            .filter(|shard| !self.env.catalog.shards[*shard].is_cache())
            .collect();
        let choices = &mut self.env.random.subscribers;
        let count = choices.between(2, 5);
        self.subscribers.all = (0..count)
            .map(|_| Subscriber {
                shard: *choices.pick(&streams),
                is_slow: choices.chance(300),
                life: 0,
                attached: None,
                resume_from: None,
                is_turn_due: false,
                last_tries: 0,
            })
            .collect();
        for number in 0..self.subscribers.all.len() {
            self.turn_later(number);
        }
    }

    fn turn_later(&mut self, number: usize) {
        let subscriber = &mut self.subscribers.all[number];
        if std::mem::replace(&mut subscriber.is_turn_due, true) {
            return;
        }
        let after_us = self.env.random.subscribers.between(10_000, 600_000);
        let event = Event::Subscriber(SubscriberEvent::Turn { number });
        self.env.queue.push(self.env.now_us + after_us, event);
    }

    pub(super) fn on_subscriber(&mut self, event: SubscriberEvent) {
        match event {
            SubscriberEvent::Turn { number } => self.take_turn(number),
            SubscriberEvent::Read { number, life } => {
                if let Some(attached) = self.attached_in(number, life) {
                    attached.disk_has_read();
                    self.step_subscriber(number);
                }
            }
            SubscriberEvent::Taken {
                number,
                life,
                bytes,
            } => {
                if let Some(attached) = self.attached_in(number, life) {
                    attached.cursor.on_taken(bytes);
                    self.step_subscriber(number);
                }
            }
        }
    }

    fn attached_in(&mut self, number: usize, life: u64) -> Option<&mut Attached> {
        let subscriber = &mut self.subscribers.all[number];
        let is_same = subscriber.life == life;
        subscriber.attached.as_mut().filter(|_| is_same)
    }

    fn take_turn(&mut self, number: usize) {
        self.subscribers.all[number].is_turn_due = false;
        let is_attached = self.subscribers.all[number].attached.is_some();
        let may_leave = self.env.may_inject;
        if !is_attached {
            self.attach(number);
        } else if may_leave && self.env.random.subscribers.chance(150) {
            self.leave(number);
        }
        let subscriber = &mut self.subscribers.all[number];
        let is_away = subscriber.attached.is_none();
        subscriber.last_tries += u32::from(is_away && !may_leave);
        if may_leave || (is_away && subscriber.last_tries < MOST_LAST_TRIES) {
            self.turn_later(number);
        }
    }

    /// The client wants no more. A broker that stands still does not hear of it.
    fn leave(&mut self, number: usize) {
        let attached = self.subscribers.all[number].attached.as_mut();
        let Some(attached) = attached.filter(|a| self.paused[a.at.node].is_none()) else {
            return;
        };
        attached.cursor.end(EndReason::StoppedByClient);
        self.step_subscriber(number);
    }

    /// Asks a broker for a subscription: the one that leads, by the newest file, or another.
    fn attach(&mut self, number: usize) {
        let shard = self.subscribers.all[number].shard;
        let choices = &mut self.env.random.subscribers;
        let node = match choices.chance(150) {
            true => choices.index(self.env.plan.nodes),
            false => self.env.catalog.current(shard).leader,
        };
        let core = shard % self.env.plan.cores;
        let Some(at) = self.core_at(node, core) else {
            return;
        };
        if self.paused[node].is_some() {
            return;
        }
        let owner = &self.nodes[node][core];
        let Some(log) = owner.bounds_for_readers(&self.env, shard) else {
            return self.env.judge.on_start_refused();
        };
        let resume_from = self.subscribers.all[number].resume_from.take();
        let choices = &mut self.env.random.subscribers;
        let resume_from = resume_from.filter(|_| choices.chance(700));
        let start = match resume_from {
            Some(from) => StartPosition::At(from),
            None => draw_start(choices, log),
        };
        let who = self.subscribed(number, node);
        match Subscription::open(start, log, LIMITS) {
            Ok((mut cursor, opened)) => {
                cursor.set_held_back(self.env.random.subscribers.chance(200));
                self.env.judge.on_subscribed(who, opened.start.0);
                let subscriber = &mut self.subscribers.all[number];
                subscriber.life += 1;
                subscriber.attached = Some(Attached::new(at, cursor));
                self.step_subscriber(number);
            }
            Err(refusal) => {
                self.env.judge.on_start_refused();
                let is_leader = self.env.catalog.current(shard).leader == node;
                if resume_from.is_some() && is_leader && self.leads_openly(shard) {
                    self.env.judge.on_resume_refused(who, refusal);
                }
            }
        }
    }

    /// The durable end of a stream at the broker that leads it by the newest file.
    fn stream_end(&self, shard: usize) -> u64 {
        let leader = self.env.catalog.current(shard).leader;
        let owner = &self.nodes[leader][shard % self.env.plan.cores];
        owner.journal.durable_tail(stream_of(shard))
    }

    fn subscribed(&self, number: usize, node: usize) -> Subscribed {
        let shard = self.subscribers.all[number].shard;
        let is_quorum = self.env.catalog.shards[shard].acknowledge == Acknowledge::Quorum;
        Subscribed {
            number,
            node,
            shard,
            is_marked: is_quorum && self.env.catalog.is_replicated(shard),
        }
    }

    /// Something has happened on a core: whoever waits there for records may have some now.
    pub(super) fn step_subscribers(&mut self, node: usize, core: usize) {
        for number in 0..self.subscribers.all.len() {
            let attached = self.subscribers.all[number].attached.as_ref();
            if attached.is_some_and(|a| (a.at.node, a.at.core) == (node, core)) {
                self.step_subscriber(number);
            }
        }
    }

    /// Lets a subscription act until it waits for something.
    fn step_subscriber(&mut self, number: usize) {
        let Some(mut attached) = self.subscribers.all[number].attached.take() else {
            return;
        };
        let node = attached.at.node;
        if self.paused[node].is_some() {
            self.subscribers.all[number].attached = Some(attached);
            return;
        }
        let subscriber = &self.subscribers.all[number];
        let running = Running {
            who: self.subscribed(number, node),
            life: subscriber.life,
            is_slow: subscriber.is_slow,
        };
        let owner = &self.nodes[node][attached.at.core];
        match running.run(&mut self.env, owner, &mut attached) {
            None => self.subscribers.all[number].attached = Some(attached),
            Some(ended) => {
                self.env.judge.on_subscription_ended(running.who, &ended);
                self.subscribers.all[number].resume_from = Some(ended.resume_from);
                self.turn_later(number);
            }
        }
    }

    /// A process has died, and its connections with it.
    pub(super) fn drop_subscribers_of(&mut self, node: usize) {
        for number in 0..self.subscribers.all.len() {
            let subscriber = &mut self.subscribers.all[number];
            let Some(attached) = subscriber.attached.take_if(|a| a.at.node == node) else {
                continue;
            };
            subscriber.resume_from = Some(attached.cursor.next_offset());
            self.turn_later(number);
        }
    }

    /// All is quiet: every subscriber has everything.
    pub(super) fn subscribers_at_the_end(&mut self) {
        for number in 0..self.subscribers.all.len() {
            let subscriber = &self.subscribers.all[number];
            let shard = subscriber.shard;
            let leader = self.env.catalog.current(shard).leader;
            let durable = self.stream_end(shard);
            let attached = subscriber.attached.as_ref();
            let place = attached.filter(|attached| attached.at.node == leader);
            let place = place.map(|attached| attached.cursor.next_offset().0);
            let who = self.subscribed(number, leader);
            self.env.judge.on_last_place(who, place, durable);
        }
    }
}

fn draw_start(choices: &mut Choices, log: Readable) -> StartPosition {
    match choices.below(3) {
        0 => StartPosition::Earliest,
        1 => StartPosition::Latest,
        _ => StartPosition::At(Offset(choices.below(log.end.0 + 2))),
    }
}
