//! Polls: who gets which record, one poll at a time, in the order the polls came.

use std::time::Duration;

use bytes::Bytes;

use super::machine::{Delivery, DeliveryState, Group};
use super::{Delivered, GroupAction, GroupRefusal, GroupReply, Member, Poll};
use crate::proto::MonoTime;

/// Bytes of one read of a poll.
const READ_BYTES: usize = 1 << 20;

/// A poll that waits for work, or for its turn.
#[derive(Debug)]
pub(super) struct WaitingPoll {
    ticket: u64,
    max_records: usize,
    pub until: MonoTime,
    visibility: Duration,
    member: Option<Member>,
}

/// The poll whose records are being read.
#[derive(Debug)]
pub(super) struct ActivePoll {
    poll: WaitingPoll,
    taken: Vec<Delivered>,
    bytes: usize,
    reads: u32,
    /// Where the read on its way begins.
    from: u64,
    /// Nobody waits for it any more: what it claims is given back.
    is_cancelled: bool,
}

impl Group {
    pub(super) fn on_poll(&mut self, now: MonoTime, ticket: u64, poll: Poll) {
        if poll.reclaim {
            if let Some(member) = &poll.member {
                self.reclaim(now, member);
            }
        }
        if poll.max_records == 0 {
            return self.answer(ticket, Ok(GroupReply::Records(Vec::new())));
        }
        if self.polls.len() >= self.limits.waiting_polls {
            return self.answer(ticket, Err(GroupRefusal::PollsFull));
        }
        let visibility = poll.visibility.filter(|span| !span.is_zero());
        self.polls.push_back(WaitingPoll {
            ticket,
            max_records: poll.max_records.min(self.limits.poll_records),
            until: now + poll.wait.min(self.limits.longest_wait),
            visibility: visibility
                .unwrap_or(self.limits.claim)
                .min(self.limits.longest_claim),
            member: poll.member,
        });
    }

    /// Nobody waits for this poll any more. Not answered.
    pub fn cancel(&mut self, ticket: u64) {
        self.polls.retain(|poll| poll.ticket != ticket);
        if let Some(active) = &mut self.active {
            active.is_cancelled |= active.poll.ticket == ticket;
        }
    }

    /// Answers every poll that waits with what there is: nothing.
    pub fn end_waits(&mut self) {
        for poll in std::mem::take(&mut self.polls) {
            self.answer(poll.ticket, Ok(GroupReply::Records(Vec::new())));
        }
    }

    /// Takes out everybody who waits for records.
    pub(super) fn poll_tickets(&mut self) -> Vec<u64> {
        let waiting = std::mem::take(&mut self.polls);
        let active = self.active.take().filter(|active| !active.is_cancelled);
        let active = active.map(|active| active.poll.ticket);
        let waiting = waiting.into_iter().map(|poll| poll.ticket);
        waiting.chain(active).collect()
    }

    /// The member's claims from other connections are owed again.
    fn reclaim(&mut self, now: MonoTime, by: &Member) {
        let claims = self.open.iter().chain(&self.redriven);
        let theirs: Vec<u64> = claims
            .filter(|(_, delivery)| match &delivery.state {
                DeliveryState::Claimed {
                    member: Some(member),
                    ..
                } => member.name == by.name && member.session != by.session,
                DeliveryState::Claimed { member: None, .. }
                | DeliveryState::Ready
                | DeliveryState::Delayed { .. }
                | DeliveryState::Taken
                | DeliveryState::Writing => false,
            })
            .map(|(offset, _)| *offset)
            .collect();
        for offset in theirs {
            self.owe_again(now, offset, Duration::ZERO);
        }
    }

    /// Starts the next poll there is work for, and answers those whose time is up.
    pub(super) fn run_polls(&mut self, now: MonoTime) {
        if self.active.is_some() || self.deleting.is_some() {
            return;
        }
        match (self.next_work(), self.polls.is_empty()) {
            (Some(from), false) => self.start_poll(from),
            (Some(_) | None, _) => self.expire_polls(now),
        }
    }

    fn start_poll(&mut self, from: u64) {
        let Some(poll) = self.polls.pop_front() else {
            return;
        };
        self.active = Some(ActivePoll {
            poll,
            taken: Vec::new(),
            bytes: 0,
            reads: 0,
            from,
            is_cancelled: false,
        });
        self.read_on(from);
    }

    fn expire_polls(&mut self, now: MonoTime) {
        let polls = std::mem::take(&mut self.polls);
        for poll in polls {
            match poll.until <= now {
                true => self.answer(poll.ticket, Ok(GroupReply::Records(Vec::new()))),
                false => self.polls.push_back(poll),
            }
        }
    }

    /// The next offset that may be handed out: what is owed before what is new.
    fn next_work(&mut self) -> Option<u64> {
        if let Some(offset) = self.ready.first() {
            return Some(*offset);
        }
        self.pass_finished();
        (self.next < self.tail && self.unsettled() < self.limits.unsettled).then_some(self.next)
    }

    /// New records that were dealt with before the group was rebuilt are passed over.
    fn pass_finished(&mut self) {
        let before = self.next;
        while self.next < self.tail
            && (self.dead.contains(&self.next)
                || self.redriven.contains_key(&self.next)
                || self.ahead.remove(&self.next))
        {
            self.next += 1;
        }
        if self.next > before {
            self.advance();
        }
    }

    /// Whether this record may be handed out now.
    fn may_take(&mut self, offset: u64) -> bool {
        if self.ready.contains(&offset) {
            return true;
        }
        self.pass_finished();
        offset == self.next && offset < self.tail && self.unsettled() < self.limits.unsettled
    }

    fn read_on(&mut self, from: u64) {
        let is_run = self.ready.contains(&(from + 1)) || from >= self.next;
        let Some(active) = &mut self.active else {
            return;
        };
        active.reads += 1;
        active.from = from;
        // One byte asks for one record.
        let max_bytes = match is_run && active.poll.max_records - active.taken.len() > 1 {
            true => READ_BYTES,
            false => 1,
        };
        self.actions
            .push_back(GroupAction::Read { from, max_bytes });
    }

    /// What a read brought: records from `first_offset` on.
    pub fn on_records(&mut self, now: MonoTime, first_offset: u64, records: Vec<Bytes>) {
        let Some(mut active) = self.active.take() else {
            return;
        };
        let before = active.taken.len();
        let mut is_full = false;
        for (offset, payload) in (first_offset..).zip(records) {
            if !self.may_take(offset) {
                continue;
            }
            let has_room =
                active.taken.is_empty() || active.bytes + payload.len() <= self.limits.poll_bytes;
            if active.taken.len() >= active.poll.max_records || !has_room {
                is_full = true;
                break;
            }
            active.bytes += payload.len();
            let delivered = self.take(offset, payload);
            active.taken.push(delivered);
        }
        is_full |= active.taken.len() >= active.poll.max_records
            || active.bytes >= self.limits.poll_bytes
            || active.reads >= self.limits.poll_reads;
        let did_take = active.taken.len() > before;
        match self.next_work() {
            // A place that was read and brought nothing is not read again.
            Some(from) if !is_full && !active.is_cancelled && (did_take || from != active.from) => {
                self.active = Some(active);
                self.read_on(from);
            }
            Some(_) | None => self.finish_poll(now, active),
        }
    }

    /// The log is trimmed up to `base`.
    pub fn on_trimmed(&mut self, now: MonoTime, base: u64) {
        let Some(active) = self.active.take() else {
            return self.on_bounds(now, base, self.tail);
        };
        let tail = self.tail.max(base);
        // Put back first: the trimming must not start another poll.
        self.active = Some(active);
        self.on_bounds(now, base, tail);
        let Some(active) = self.active.take() else {
            return;
        };
        match self.next_work() {
            Some(from) if active.reads < self.limits.poll_reads => {
                self.active = Some(active);
                self.read_on(from);
            }
            Some(_) | None => self.finish_poll(now, active),
        }
    }

    /// The read failed.
    pub fn on_read_failed(&mut self, now: MonoTime) {
        let Some(active) = self.active.take() else {
            return;
        };
        match active.taken.is_empty() && !active.is_cancelled {
            true => {
                self.answer(active.poll.ticket, Err(GroupRefusal::ReadFailed));
                self.run_polls(now);
            }
            false => self.finish_poll(now, active),
        }
    }

    fn finish_poll(&mut self, now: MonoTime, active: ActivePoll) {
        let ActivePoll {
            poll,
            taken: mut records,
            is_cancelled,
            ..
        } = active;
        // What was acked, trimmed or sought past meanwhile is not handed out after all.
        records.retain(|record| self.is_taken(record.offset));
        if is_cancelled {
            for record in records {
                self.give_back(record.offset);
            }
        } else if records.is_empty() && poll.until > now {
            // Nothing to take: it waits on, still the first.
            if self.next_work().is_none() {
                return self.polls.push_front(poll);
            }
            // The log says there is a record and does not bring it.
            self.answer(poll.ticket, Err(GroupRefusal::ReadFailed));
        } else {
            for record in &records {
                let state = DeliveryState::Claimed {
                    until: now + poll.visibility,
                    member: poll.member.clone(),
                };
                self.set_state(record.offset, state);
            }
            // A redriven record may lie past new ones.
            records.sort_by_key(|record| record.offset);
            self.answer(poll.ticket, Ok(GroupReply::Records(records)));
        }
        self.run_polls(now);
    }

    fn take(&mut self, offset: u64, payload: Bytes) -> Delivered {
        let mut skipped_before = 0;
        if offset == self.next && !self.ready.contains(&offset) {
            let delivery = Delivery {
                attempts: 0,
                state: DeliveryState::Taken,
            };
            self.open.insert(offset, delivery);
            self.next += 1;
            skipped_before = std::mem::take(&mut self.skipped);
        }
        self.set_state(offset, DeliveryState::Taken);
        let mut attempts = 0;
        if let Some(delivery) = self.delivery_mut(offset) {
            delivery.attempts = delivery.attempts.saturating_add(1);
            attempts = delivery.attempts;
        }
        Delivered {
            offset,
            payload,
            attempts,
            skipped_before,
        }
    }

    fn is_taken(&self, offset: u64) -> bool {
        self.delivery(offset)
            .is_some_and(|delivery| matches!(delivery.state, DeliveryState::Taken))
    }

    /// Takes a delivery back that nobody was told of.
    fn give_back(&mut self, offset: u64) {
        if let Some(delivery) = self.delivery_mut(offset) {
            delivery.attempts -= 1;
        }
        self.set_state(offset, DeliveryState::Ready);
    }
}
