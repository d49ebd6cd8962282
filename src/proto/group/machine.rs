//! The state of a group, its inputs and its clock.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::admin::Deleting;
use super::polls::{ActivePoll, WaitingPoll};
use super::settle::{CursorWriter, EntryWrite};
use super::{
    DeadEntry, GroupAction, GroupLimits, GroupOp, GroupRefusal, GroupReply, Member, Restored,
};
use crate::proto::MonoTime;

/// A record that was handed out or is owed, and is not finished.
#[derive(Debug, Clone)]
pub(super) struct Delivery {
    /// Times handed out; 0 for one that is owed again after a redrive or a rebuild.
    pub attempts: u32,
    pub state: DeliveryState,
}

#[derive(Debug, Clone)]
pub(super) enum DeliveryState {
    /// Owed; in `ready`.
    Ready,
    /// Owed from a time on; in `due`.
    Delayed { until: MonoTime },
    /// Held by a member; in `due`.
    Claimed {
        until: MonoTime,
        member: Option<Member>,
    },
    /// Taken by the poll that is being read; its claim begins with the answer.
    Taken,
    /// An entry about it is being written.
    Writing,
}

impl Delivery {
    /// Times a member was told of it: the delivery being read is not one of them yet.
    pub fn told(&self) -> u32 {
        match self.state {
            DeliveryState::Taken => self.attempts.saturating_sub(1),
            DeliveryState::Ready
            | DeliveryState::Delayed { .. }
            | DeliveryState::Claimed { .. }
            | DeliveryState::Writing => self.attempts,
        }
    }
}

/// One group of one shard.
///
/// Call [`Group::poll_action`] until `None` after every input, and [`Group::on_time`] at
/// [`Group::next_deadline`].
#[derive(Debug)]
pub struct Group {
    pub(super) limits: GroupLimits,
    /// Bounds of the shard's log as last told; the tail is what may be shown to readers.
    pub(super) base: u64,
    pub(super) tail: u64,
    /// The position as last written or about to be written.
    pub(super) position: u64,
    /// The next offset that was never handed out.
    pub(super) next: u64,
    /// Trimmed offsets just below `next` that nobody was told of.
    pub(super) skipped: u64,
    /// Unsettled records at or past the position. What lies below `next` and is not here is finished.
    pub(super) open: BTreeMap<u64, Delivery>,
    /// Redriven records; they do not hold the position.
    pub(super) redriven: BTreeMap<u64, Delivery>,
    pub(super) ready: BTreeSet<u64>,
    pub(super) due: BTreeSet<(MonoTime, u64)>,
    pub(super) dead: BTreeSet<u64>,
    /// Finished records at or past `next`: redriven and acked, or discarded, since a rebuild.
    pub(super) ahead: BTreeSet<u64>,
    pub(super) entry_writes: BTreeMap<u64, EntryWrite>,
    pub(super) cursor: CursorWriter,
    pub(super) polls: VecDeque<WaitingPoll>,
    pub(super) active: Option<ActivePoll>,
    pub(super) deleting: Option<Deleting>,
    pub(super) actions: VecDeque<GroupAction>,
    last_asked: MonoTime,
}

impl Group {
    /// The group as its logs say it is; a group nobody has heard of begins at the log's base.
    pub fn new(
        limits: GroupLimits,
        now: MonoTime,
        restored: Restored,
        base: u64,
        tail: u64,
    ) -> Self {
        let position = restored.position.unwrap_or(base);
        let mut group = Self {
            limits,
            base: 0,
            tail,
            position,
            next: position,
            skipped: 0,
            open: BTreeMap::new(),
            redriven: BTreeMap::new(),
            ready: BTreeSet::new(),
            due: BTreeSet::new(),
            dead: BTreeSet::new(),
            ahead: BTreeSet::new(),
            entry_writes: BTreeMap::new(),
            cursor: CursorWriter::new(restored.position),
            polls: VecDeque::new(),
            active: None,
            deleting: None,
            actions: VecDeque::new(),
            last_asked: now,
        };
        for (offset, entry) in restored.entries {
            match entry {
                DeadEntry::Dead => drop(group.dead.insert(offset)),
                DeadEntry::Redriven => group.owe_redriven(offset),
            }
        }
        for offset in restored.stale {
            group.write_entry(offset, EntryWrite::Tidy);
        }
        group.on_bounds(now, base, tail);
        group
    }

    /// The next thing to do.
    pub fn poll_action(&mut self) -> Option<GroupAction> {
        self.actions.pop_front()
    }

    /// The shard's log starts at `base` and may be shown to readers below `tail`.
    pub fn on_bounds(&mut self, now: MonoTime, base: u64, tail: u64) {
        self.tail = tail;
        self.trim(base);
        self.run_polls(now);
    }

    /// Something is asked of the group; the answer carries `ticket`.
    pub fn on_request(&mut self, now: MonoTime, ticket: u64, op: GroupOp) {
        self.last_asked = now;
        if self.deleting.is_some() {
            return self.answer(ticket, Err(GroupRefusal::Busy));
        }
        self.lapse(now);
        match op {
            GroupOp::Poll(poll) => self.on_poll(now, ticket, poll),
            GroupOp::Ack { offset } => self.on_ack(ticket, offset),
            GroupOp::Nack {
                offset,
                delay,
                attempts,
            } => self.on_nack(now, ticket, offset, delay, attempts),
            GroupOp::Extend {
                offset,
                attempts,
                by,
            } => self.on_extend(now, ticket, offset, attempts, by),
            GroupOp::DeadLetter { offset } => self.on_dead_letter(now, ticket, offset),
            GroupOp::ListDead => {
                let offsets = self.dead.iter().copied().collect();
                self.answer(ticket, Ok(GroupReply::DeadLetters(offsets)));
            }
            GroupOp::Redrive { offset } => self.on_redrive(ticket, offset),
            GroupOp::Discard { offset } => self.on_discard(ticket, offset),
            GroupOp::Seek { to, if_new } => self.on_seek(ticket, to, if_new),
            GroupOp::Describe => {
                let info = self.describe();
                self.answer(ticket, Ok(GroupReply::Info(info)));
            }
            GroupOp::Delete => self.on_delete(ticket),
        }
        self.run_polls(now);
    }

    /// Time has passed.
    pub fn on_time(&mut self, now: MonoTime) {
        self.lapse(now);
        self.retry_cursor(now);
        self.run_polls(now);
    }

    /// When [`Self::on_time`] has something to do.
    pub fn next_deadline(&self) -> Option<MonoTime> {
        let claims = self.due.first().map(|(at, _)| *at);
        // While a poll is read the others wait for its end, whatever the time.
        let is_reading = self.active.is_some() || self.deleting.is_some();
        let polls = self.polls.iter().filter(|_| !is_reading);
        let polls = polls.map(|poll| poll.until).min();
        [claims, polls, self.cursor.retry_at]
            .into_iter()
            .flatten()
            .min()
    }

    /// Whether the group may be forgotten: nobody asked for a while, and nothing is on its way.
    pub fn is_idle(&self, now: MonoTime) -> bool {
        now.since(self.last_asked) >= self.limits.idle && self.is_still()
    }

    /// Whether nothing of the group is on its way: no write, no read, no poll.
    pub fn is_still(&self) -> bool {
        self.polls.is_empty()
            && self.active.is_none()
            && self.cursor.writing.is_none()
            && self.entry_writes.is_empty()
            && self.deleting.is_none()
    }

    /// Records the group keeps in memory, and polls: what its memory is made of.
    pub fn held(&self) -> usize {
        self.unsettled() + self.dead.len() + self.ahead.len() + self.polls.len()
    }

    /// Whether a poll waits for work.
    pub fn is_awaited(&self) -> bool {
        !self.polls.is_empty()
    }

    /// The group goes away under everybody who waits: they are all told why. Nothing else may be
    /// done with it afterwards.
    pub fn end(&mut self, why: GroupRefusal) {
        let mut tickets = self.poll_tickets();
        let writing = self.cursor.writing.take();
        let cursors = writing.into_iter().flat_map(|write| write.waiters);
        let cursors = cursors.chain(std::mem::take(&mut self.cursor.waiting));
        tickets.extend(cursors.map(|(ticket, _)| ticket));
        let entries = std::mem::take(&mut self.entry_writes);
        tickets.extend(entries.into_values().filter_map(EntryWrite::waiter));
        // One whose position is on its way already is among the waiters of the cursor.
        let deleting = self.deleting.take().filter(|deleting| !deleting.is_last);
        tickets.extend(deleting.map(|deleting| deleting.ticket));
        for ticket in tickets {
            self.answer(ticket, Err(why));
        }
    }

    pub(super) fn unsettled(&self) -> usize {
        self.open.len() + self.redriven.len()
    }

    pub(super) fn answer(&mut self, ticket: u64, result: Result<GroupReply, GroupRefusal>) {
        self.actions
            .push_back(GroupAction::Answer { ticket, result });
    }

    /// The lowest offset not finished.
    pub(super) fn lowest_open(&self) -> u64 {
        self.open
            .first_key_value()
            .map_or(self.next, |(offset, _)| *offset)
    }

    pub(super) fn delivery(&self, offset: u64) -> Option<&Delivery> {
        self.open
            .get(&offset)
            .or_else(|| self.redriven.get(&offset))
    }

    pub(super) fn delivery_mut(&mut self, offset: u64) -> Option<&mut Delivery> {
        match self.open.get_mut(&offset) {
            Some(delivery) => Some(delivery),
            None => self.redriven.get_mut(&offset),
        }
    }

    /// Takes a record out of the queues and puts it into the one of its new state.
    pub(super) fn set_state(&mut self, offset: u64, state: DeliveryState) {
        let Some(delivery) = self.delivery_mut(offset) else {
            return;
        };
        if matches!(
            (&delivery.state, &state),
            (DeliveryState::Taken, DeliveryState::Writing)
        ) {
            // Its poll will not tell of it: that delivery does not count.
            delivery.attempts = delivery.attempts.saturating_sub(1);
        }
        let old = std::mem::replace(&mut delivery.state, state.clone());
        self.unqueue(offset, &old);
        match state {
            DeliveryState::Ready => drop(self.ready.insert(offset)),
            DeliveryState::Delayed { until } | DeliveryState::Claimed { until, .. } => {
                self.due.insert((until, offset));
            }
            DeliveryState::Taken | DeliveryState::Writing => {}
        }
    }

    /// Forgets an unsettled record.
    pub(super) fn drop_delivery(&mut self, offset: u64) {
        let delivery = self
            .open
            .remove(&offset)
            .or_else(|| self.redriven.remove(&offset));
        if let Some(delivery) = delivery {
            self.unqueue(offset, &delivery.state);
        }
    }

    fn unqueue(&mut self, offset: u64, state: &DeliveryState) {
        match state {
            DeliveryState::Ready => drop(self.ready.remove(&offset)),
            DeliveryState::Delayed { until } | DeliveryState::Claimed { until, .. } => {
                self.due.remove(&(*until, offset));
            }
            DeliveryState::Taken | DeliveryState::Writing => {}
        }
    }

    /// The record is finished; it must not come again as a new one.
    pub(super) fn note_finished(&mut self, offset: u64) {
        if offset >= self.next {
            self.ahead.insert(offset);
        }
    }

    pub(super) fn owe_redriven(&mut self, offset: u64) {
        let delivery = Delivery {
            attempts: 0,
            state: DeliveryState::Ready,
        };
        self.redriven.insert(offset, delivery);
        self.ready.insert(offset);
    }

    /// Retention outranks the group: what it trimmed is skipped and the position moves past.
    fn trim(&mut self, base: u64) {
        // A group that is being forgotten has nothing to move.
        if base <= self.base || self.deleting.is_some() {
            return;
        }
        self.base = base;
        while let Some((&offset, _)) = self.open.range(..base).next() {
            self.drop_delivery(offset);
        }
        let redriven: Vec<u64> = self.redriven.range(..base).map(|(at, _)| *at).collect();
        for offset in redriven {
            self.drop_delivery(offset);
            // What remains of it is its entry; nobody waits for that to go.
            self.write_entry(offset, EntryWrite::Tidy);
        }
        self.ahead = self.ahead.split_off(&base);
        if self.next < base {
            self.skipped += base - self.next;
            self.next = base;
        }
        self.advance();
    }
}
