//! What operators ask of a group: redrive, discard, seek, describe, delete.

use super::machine::{DeliveryState, Group};
use super::settle::EntryWrite;
use super::{GroupInfo, GroupRefusal, GroupReply, SeekTo};
use crate::proto::cache::CacheFailure;

/// Entries of a deleted group on their way at once.
const DELETE_QUANTUM: usize = 64;

/// What a durable cursor answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AfterWrite {
    Settled,
    Sought { offset: u64 },
    Deleted { existed: bool },
}

impl AfterWrite {
    pub fn reply(self) -> GroupReply {
        match self {
            Self::Settled => GroupReply::Settled,
            Self::Sought { offset } => GroupReply::Position {
                offset,
                moved: true,
            },
            Self::Deleted { existed } => GroupReply::Deleted { existed },
        }
    }
}

/// A group that is being forgotten: its entries first, its position last.
#[derive(Debug)]
pub(super) struct Deleting {
    pub ticket: u64,
    existed: bool,
    failure: Option<CacheFailure>,
    /// The entries are gone; the position goes.
    pub is_last: bool,
}

impl Group {
    pub(super) fn on_redrive(&mut self, ticket: u64, offset: u64) {
        if let Err(refusal) = self.check_listed(offset) {
            return self.answer(ticket, Err(refusal));
        }
        if offset < self.base {
            return self.answer(ticket, Err(GroupRefusal::Trimmed));
        }
        if self.unsettled() >= self.limits.unsettled {
            return self.answer(ticket, Err(GroupRefusal::UnsettledFull));
        }
        self.write_entry(offset, EntryWrite::Redrive { waiter: ticket });
    }

    pub(super) fn on_discard(&mut self, ticket: u64, offset: u64) {
        if let Err(refusal) = self.check_listed(offset) {
            return self.answer(ticket, Err(refusal));
        }
        self.write_entry(offset, EntryWrite::Discard { waiter: ticket });
    }

    fn check_listed(&self, offset: u64) -> Result<(), GroupRefusal> {
        if self.entry_writes.contains_key(&offset) {
            return Err(GroupRefusal::Busy);
        }
        match self.dead.contains(&offset) {
            true => Ok(()),
            false => Err(GroupRefusal::NotListed),
        }
    }

    pub(super) fn on_seek(&mut self, ticket: u64, to: SeekTo, if_new: bool) {
        let is_new = self.cursor.committed.is_none() && self.cursor.writing.is_none();
        if if_new && !is_new {
            let offset = self.position;
            let moved = false;
            return self.answer(ticket, Ok(GroupReply::Position { offset, moved }));
        }
        let offset = match to {
            SeekTo::Earliest => self.base,
            SeekTo::Latest => self.tail,
            SeekTo::Offset(offset) if (self.base..=self.tail).contains(&offset) => offset,
            SeekTo::Offset(_) => return self.answer(ticket, Err(GroupRefusal::OutOfRange)),
        };
        // Claims end with it; what is being buried is buried, what was redriven stays owed.
        while let Some((&open, _)) = self.open.first_key_value() {
            self.drop_delivery(open);
        }
        self.ahead.clear();
        self.position = offset;
        self.next = offset;
        self.skipped = 0;
        self.cursor.is_dirty = true;
        self.cursor
            .waiting
            .push((ticket, AfterWrite::Sought { offset }));
        self.write_cursor();
    }

    pub(super) fn describe(&self) -> GroupInfo {
        let deliveries = self.open.values().chain(self.redriven.values());
        let claimed = deliveries
            .filter(|delivery| matches!(delivery.state, DeliveryState::Claimed { .. }))
            .count();
        GroupInfo {
            committed: self.cursor.committed,
            tail: self.tail,
            in_flight: claimed as u64,
            owed: (self.unsettled() - claimed) as u64,
            dead_letters: self.dead.len() as u64,
        }
    }

    pub(super) fn on_delete(&mut self, ticket: u64) {
        let is_writing = self.cursor.writing.is_some() || !self.entry_writes.is_empty();
        if is_writing || self.active.is_some() {
            return self.answer(ticket, Err(GroupRefusal::Busy));
        }
        self.end_waits();
        let existed =
            self.cursor.committed.is_some() || !self.dead.is_empty() || !self.redriven.is_empty();
        while let Some((&open, _)) = self.open.first_key_value() {
            self.drop_delivery(open);
        }
        self.deleting = Some(Deleting {
            ticket,
            existed,
            failure: None,
            is_last: false,
        });
        self.delete_entries();
    }

    /// The next entries of a group that is being deleted; after the last, its position.
    fn delete_entries(&mut self) {
        let left = self.dead.iter().chain(self.redriven.keys());
        let room = DELETE_QUANTUM.saturating_sub(self.entry_writes.len());
        let next: Vec<u64> = left
            .filter(|offset| !self.entry_writes.contains_key(offset))
            .take(room)
            .copied()
            .collect();
        for offset in next {
            self.write_entry(offset, EntryWrite::Delete);
        }
        let Some(deleting) = &mut self.deleting else {
            return;
        };
        if self.entry_writes.is_empty() {
            deleting.is_last = true;
            let after = AfterWrite::Deleted {
                existed: deleting.existed,
            };
            self.cursor.waiting.push((deleting.ticket, after));
            self.cursor.is_dirty = true;
            self.write_cursor();
        }
    }

    pub(super) fn on_deleted_entry(&mut self, offset: u64, result: Result<(), CacheFailure>) {
        if result.is_ok() {
            self.dead.remove(&offset);
            self.drop_delivery(offset);
        }
        let Some(deleting) = &mut self.deleting else {
            return;
        };
        if let Err(failure) = result {
            deleting.failure = Some(failure);
        }
        match (deleting.failure, deleting.ticket) {
            (None, _) => self.delete_entries(),
            // What is left stays; the group goes on where it was.
            (Some(failure), ticket) if self.entry_writes.is_empty() => {
                self.deleting = None;
                self.next = self.position;
                self.answer(ticket, Err(GroupRefusal::Log(failure)));
            }
            (Some(_), _) => {}
        }
    }

    /// The group is forgotten, or only its position is left of it.
    pub(super) fn on_deleted_cursor(&mut self, result: Result<(), CacheFailure>) {
        self.deleting = None;
        self.ahead.clear();
        self.cursor.is_dirty = false;
        self.cursor.retry_at = None;
        self.skipped = 0;
        if result.is_ok() {
            self.position = self.base;
        }
        self.next = self.position.max(self.base);
    }
}
