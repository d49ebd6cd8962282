//! Finishing records: acks, nacks, lapsed claims, dead letters, and the position's way to its log.

use std::time::Duration;

use super::admin::AfterWrite;
use super::machine::{DeliveryState, Group};
use super::{DeadEntry, GroupAction, GroupRefusal, GroupReply};
use crate::proto::cache::CacheFailure;
use crate::proto::MonoTime;

/// An entry on its way to the dead-letter log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EntryWrite {
    /// The record becomes a dead letter; `waiter` asked for it.
    Bury {
        waiter: Option<u64>,
    },
    /// A redriven record was acked: its entry goes.
    Finish {
        waiter: u64,
    },
    Redrive {
        waiter: u64,
    },
    Discard {
        waiter: u64,
    },
    /// The entry of a record that was trimmed, or was another one, goes.
    Tidy,
    /// The entry of a group that is deleted goes.
    Delete,
}

impl EntryWrite {
    fn entry(self) -> Option<DeadEntry> {
        match self {
            Self::Bury { .. } => Some(DeadEntry::Dead),
            Self::Redrive { .. } => Some(DeadEntry::Redriven),
            Self::Finish { .. } | Self::Discard { .. } | Self::Tidy | Self::Delete => None,
        }
    }
}

impl EntryWrite {
    /// Who waits for it.
    pub fn waiter(self) -> Option<u64> {
        match self {
            Self::Bury { waiter } => waiter,
            Self::Finish { waiter } | Self::Redrive { waiter } | Self::Discard { waiter } => {
                Some(waiter)
            }
            Self::Tidy | Self::Delete => None,
        }
    }
}

/// A position on its way to the cursor log, and who waits for it.
#[derive(Debug)]
pub(super) struct CursorWrite {
    /// `None` forgets the group.
    position: Option<u64>,
    pub waiters: Vec<(u64, AfterWrite)>,
}

/// The position's way to the cursor log: one write at a time, what comes meanwhile goes with the next.
#[derive(Debug)]
pub(super) struct CursorWriter {
    /// The durable position.
    pub committed: Option<u64>,
    pub writing: Option<CursorWrite>,
    /// The position moved, or the group was deleted, since the last write began.
    pub is_dirty: bool,
    /// Who waits for the next write.
    pub waiting: Vec<(u64, AfterWrite)>,
    /// When to try again after a failure.
    pub retry_at: Option<MonoTime>,
}

impl CursorWriter {
    pub fn new(committed: Option<u64>) -> Self {
        Self {
            committed,
            writing: None,
            is_dirty: false,
            waiting: Vec::new(),
            retry_at: None,
        }
    }
}

impl Group {
    pub(super) fn on_ack(&mut self, ticket: u64, offset: u64) {
        if offset >= self.tail {
            return self.answer(ticket, Err(GroupRefusal::PastTail));
        }
        let Some(delivery) = self.delivery(offset) else {
            return self.on_repeated_ack(ticket, offset);
        };
        if delivery.told() == 0 {
            return self.answer(ticket, Err(GroupRefusal::NotHandedOut));
        }
        if matches!(delivery.state, DeliveryState::Writing) {
            return self.answer(ticket, Err(GroupRefusal::Busy));
        }
        if self.redriven.contains_key(&offset) {
            self.set_state(offset, DeliveryState::Writing);
            return self.write_entry(offset, EntryWrite::Finish { waiter: ticket });
        }
        self.drop_delivery(offset);
        if self.lowest_open() > self.position {
            self.cursor.waiting.push((ticket, AfterWrite::Settled));
            self.advance();
        } else {
            self.answer(ticket, Ok(GroupReply::Settled));
        }
    }

    /// An ack of a record that is not unsettled.
    fn on_repeated_ack(&mut self, ticket: u64, offset: u64) {
        if offset >= self.next {
            return self.answer(ticket, Err(GroupRefusal::NotHandedOut));
        }
        let is_durable = self.cursor.committed.is_some_and(|at| offset < at);
        if is_durable || offset >= self.position || offset < self.base {
            // Finished for good, or out of order: then the position will cover it later.
            return self.answer(ticket, Ok(GroupReply::Settled));
        }
        // Its position is on its way, or its write failed.
        self.cursor.waiting.push((ticket, AfterWrite::Settled));
        self.cursor.is_dirty = true;
        self.write_cursor();
    }

    pub(super) fn on_nack(
        &mut self,
        now: MonoTime,
        ticket: u64,
        offset: u64,
        delay: Duration,
        attempts: u32,
    ) {
        if let Err(refusal) = self.check_claim(offset, attempts) {
            return self.answer(ticket, Err(refusal));
        }
        let is_claimed = self
            .delivery(offset)
            .is_some_and(|delivery| matches!(delivery.state, DeliveryState::Claimed { .. }));
        if is_claimed {
            self.owe_again(now, offset, delay);
        }
        self.answer(ticket, Ok(GroupReply::Settled));
    }

    pub(super) fn on_extend(
        &mut self,
        now: MonoTime,
        ticket: u64,
        offset: u64,
        attempts: u32,
        by: Duration,
    ) {
        // A delivery that is meant by its number only; 0 is none.
        if let Err(refusal) = self.check_claim(offset, attempts.max(1)) {
            return self.answer(ticket, Err(refusal));
        }
        let visible = by.min(self.limits.longest_claim);
        let member = match self.delivery(offset).map(|delivery| &delivery.state) {
            Some(DeliveryState::Claimed { member, .. }) => member.clone(),
            Some(_) | None => return self.answer(ticket, Err(GroupRefusal::ClaimGone)),
        };
        let until = now + visible;
        self.set_state(offset, DeliveryState::Claimed { until, member });
        self.answer(ticket, Ok(GroupReply::Extended { visible }));
    }

    pub(super) fn on_dead_letter(&mut self, now: MonoTime, ticket: u64, offset: u64) {
        if let Err(refusal) = self.check_claim(offset, 0) {
            return self.answer(ticket, Err(refusal));
        }
        self.bury(now, offset, Some(ticket));
    }

    /// Whether the record was handed out and is not finished, in the delivery meant.
    fn check_claim(&self, offset: u64, attempts: u32) -> Result<(), GroupRefusal> {
        if offset >= self.tail {
            return Err(GroupRefusal::PastTail);
        }
        let Some(delivery) = self.delivery(offset) else {
            return Err(match offset >= self.next {
                true => GroupRefusal::NotHandedOut,
                false => GroupRefusal::ClaimGone,
            });
        };
        match (&delivery.state, attempts) {
            (DeliveryState::Writing, _) => Err(GroupRefusal::Busy),
            (_, 0) if delivery.told() == 0 => Err(GroupRefusal::NotHandedOut),
            (_, 0) => Ok(()),
            (DeliveryState::Claimed { .. }, meant) if delivery.attempts == meant => Ok(()),
            (
                DeliveryState::Claimed { .. }
                | DeliveryState::Ready
                | DeliveryState::Taken
                | DeliveryState::Delayed { .. },
                _,
            ) => Err(GroupRefusal::ClaimGone),
        }
    }

    /// Claims whose time is up are owed again, delays that are over end.
    pub(super) fn lapse(&mut self, now: MonoTime) {
        while let Some(&(at, offset)) = self.due.first() {
            if at > now {
                return;
            }
            self.owe_again(now, offset, Duration::ZERO);
        }
    }

    /// The delivery came to nothing: another one, or none any more.
    pub(super) fn owe_again(&mut self, now: MonoTime, offset: u64, delay: Duration) {
        let is_spent = self
            .delivery(offset)
            .is_some_and(|delivery| delivery.attempts >= self.limits.attempts);
        if is_spent {
            return self.bury(now, offset, None);
        }
        let state = match delay.is_zero() {
            true => DeliveryState::Ready,
            false => DeliveryState::Delayed {
                until: now + delay.min(self.limits.longest_claim),
            },
        };
        self.set_state(offset, state);
    }

    /// Starts to make a dead letter of a record.
    fn bury(&mut self, now: MonoTime, offset: u64, waiter: Option<u64>) {
        let buried = self.entry_writes.values();
        let on_its_way = buried
            .filter(|write| matches!(write, EntryWrite::Bury { .. }))
            .count();
        let is_full = self.dead.len() + on_its_way >= self.limits.dead_letters;
        if is_full || self.entry_writes.contains_key(&offset) {
            let refusal = match is_full {
                true => GroupRefusal::DeadLettersFull,
                false => GroupRefusal::Busy,
            };
            match waiter {
                // The claim stands.
                Some(ticket) => self.answer(ticket, Err(refusal)),
                // Stays unsettled and is tried again: no record is given up without its entry.
                None => self.put_off(now, offset),
            }
            return;
        }
        self.set_state(offset, DeliveryState::Writing);
        self.write_entry(offset, EntryWrite::Bury { waiter });
    }

    fn put_off(&mut self, now: MonoTime, offset: u64) {
        let until = now + self.limits.write_retry;
        self.set_state(offset, DeliveryState::Delayed { until });
    }

    pub(super) fn write_entry(&mut self, offset: u64, write: EntryWrite) {
        if self.entry_writes.contains_key(&offset) {
            return;
        }
        self.entry_writes.insert(offset, write);
        let entry = write.entry();
        self.actions
            .push_back(GroupAction::WriteEntry { offset, entry });
    }

    /// What became of the write of an entry.
    pub fn on_entry_written(
        &mut self,
        now: MonoTime,
        offset: u64,
        result: Result<(), CacheFailure>,
    ) {
        let Some(write) = self.entry_writes.remove(&offset) else {
            return;
        };
        match (write, result) {
            (EntryWrite::Bury { waiter }, Ok(())) => {
                self.drop_delivery(offset);
                self.dead.insert(offset);
                self.advance();
                if let Some(ticket) = waiter {
                    self.answer(ticket, Ok(GroupReply::Settled));
                }
            }
            (EntryWrite::Bury { waiter }, Err(failure)) => {
                self.put_off(now, offset);
                if let Some(ticket) = waiter {
                    self.answer(ticket, Err(GroupRefusal::Log(failure)));
                }
            }
            (EntryWrite::Finish { waiter }, Ok(())) => {
                self.drop_delivery(offset);
                self.note_finished(offset);
                self.answer(waiter, Ok(GroupReply::Settled));
            }
            (EntryWrite::Finish { waiter }, Err(failure)) => {
                // Handed out once more, unless that was the last time.
                self.owe_again(now, offset, Duration::ZERO);
                self.answer(waiter, Err(GroupRefusal::Log(failure)));
            }
            (EntryWrite::Redrive { waiter }, Ok(())) if offset < self.base => {
                // Trimmed while its entry was written: there is nothing to hand out again.
                self.dead.remove(&offset);
                self.write_entry(offset, EntryWrite::Tidy);
                self.answer(waiter, Err(GroupRefusal::Trimmed));
            }
            (EntryWrite::Redrive { waiter }, Ok(())) => {
                self.dead.remove(&offset);
                self.owe_redriven(offset);
                self.answer(waiter, Ok(GroupReply::Settled));
            }
            (EntryWrite::Discard { waiter }, Ok(())) => {
                self.dead.remove(&offset);
                self.note_finished(offset);
                self.answer(waiter, Ok(GroupReply::Settled));
            }
            (EntryWrite::Redrive { waiter } | EntryWrite::Discard { waiter }, Err(failure)) => {
                self.answer(waiter, Err(GroupRefusal::Log(failure)));
            }
            (EntryWrite::Tidy, Ok(()) | Err(_)) => {}
            (EntryWrite::Delete, result) => self.on_deleted_entry(offset, result),
        }
        self.run_polls(now);
    }

    /// Moves the position to the lowest record that is not finished, and on its way to the log.
    pub(super) fn advance(&mut self) {
        let lowest = self.lowest_open();
        if lowest > self.position {
            self.position = lowest;
            self.cursor.is_dirty = true;
        }
        self.write_cursor();
    }

    /// Writes the position if it moved and no write is on its way. What is durable already is not
    /// written again.
    pub(super) fn write_cursor(&mut self) {
        if self.cursor.writing.is_some() || !self.cursor.is_dirty {
            return;
        }
        let position = match &self.deleting {
            None => Some(self.position),
            Some(deleting) if deleting.is_last => None,
            Some(_) => return,
        };
        let waiters = std::mem::take(&mut self.cursor.waiting);
        if position.is_some() && position == self.cursor.committed {
            self.cursor.is_dirty = false;
            self.cursor.retry_at = None;
            for (ticket, after) in waiters {
                self.answer(ticket, Ok(after.reply()));
            }
            return;
        }
        self.cursor.writing = Some(CursorWrite { position, waiters });
        self.cursor.is_dirty = false;
        self.cursor.retry_at = None;
        self.actions
            .push_back(GroupAction::WriteCursor { position });
    }

    /// What became of the write of the position.
    pub fn on_cursor_written(&mut self, now: MonoTime, result: Result<(), CacheFailure>) {
        let Some(CursorWrite { position, waiters }) = self.cursor.writing.take() else {
            return;
        };
        match result {
            Ok(()) => self.cursor.committed = position,
            Err(_) => {
                self.cursor.is_dirty = true;
                self.cursor.retry_at = Some(now + self.limits.write_retry);
            }
        }
        for (ticket, after) in waiters {
            let result = match result {
                Ok(()) => Ok(after.reply()),
                Err(failure) => Err(GroupRefusal::Log(failure)),
            };
            self.answer(ticket, result);
        }
        if self.deleting.is_some() {
            self.on_deleted_cursor(result);
        }
        // Whoever asked meanwhile waits for a write of their own; a failed one rests first.
        if result.is_ok() || !self.cursor.waiting.is_empty() {
            self.write_cursor();
        }
        self.run_polls(now);
    }

    pub(super) fn retry_cursor(&mut self, now: MonoTime) {
        if self.cursor.retry_at.is_some_and(|at| at <= now) {
            self.cursor.retry_at = None;
            self.write_cursor();
        }
    }
}
