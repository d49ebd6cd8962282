//! Requests in flight on one connection.
//!
//! Hands out correlation ids, matches answers to them, and expires what was never answered. It
//! does not send anything and knows nothing of what a request means beyond the answers it allows.
//!
//! Invariants:
//! * An id is slot and generation. The generation grows each time a slot is freed, so a late or
//!   repeated answer never reaches another request (48 bits: no wrap in the life of a connection).
//! * Each reserved context comes out exactly once: by `complete`, `take`, `expire` or `fail_all`.
//! * All operations are O(1) apiece: the live slots form a list in the order of their deadlines.
//! * Id 0 is never handed out; the greeting uses it.

use super::outcome::PeerCode;
use super::MonoTime;
use crate::ids::CorrelationId;

/// Slots a table can have at most; the slot's number takes this many values of an id.
pub const MAX_SLOTS: usize = 1 << SLOT_BITS;
const SLOT_BITS: u32 = 16;
const NIL: u32 = u32::MAX;

/// What kinds of answer a request allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Family {
    /// Kinds 1 and 22.
    Publish,
    /// Kinds 11 and 23.
    Cache,
    /// Records of a log: kinds 7, 14, 16, 18 and 20.
    ReplicateRecords,
    /// Bootstraps and the rebuild: kinds 10, 15, 17, 19, 21 and 24.
    ReplicateControl,
    /// Kind 5.
    Hello,
}

/// The shape of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AnswerShape {
    ForwardPublishOk,
    ForwardPublishError(PeerCode),
    NotLeader,
    HelloOk,
    ReplicateOk,
    ReplicateError(PeerCode),
    ForwardCacheOk,
    ForwardCacheError(PeerCode),
}

impl Family {
    /// Whether a request of this family may be answered by `shape`.
    ///
    /// A peer that does not know a kind cannot know its family, so `UnsupportedKind` is taken in
    /// any of the three error shapes. Every other code must come in the request's own shape. A
    /// refused Hello has no shape of its own and takes any error.
    pub const fn allows(self, shape: AnswerShape) -> bool {
        use AnswerShape::*;
        match shape {
            ForwardPublishError(PeerCode::UnsupportedKind)
            | ReplicateError(PeerCode::UnsupportedKind)
            | ForwardCacheError(PeerCode::UnsupportedKind) => true,
            ForwardPublishError(_) => matches!(self, Self::Publish | Self::Hello),
            ForwardCacheError(_) => matches!(self, Self::Cache | Self::Hello),
            ReplicateError(_) => matches!(
                self,
                Self::ReplicateRecords | Self::ReplicateControl | Self::Hello
            ),
            ForwardPublishOk => matches!(self, Self::Publish),
            ForwardCacheOk => matches!(self, Self::Cache),
            NotLeader => matches!(self, Self::Publish | Self::Cache),
            HelloOk => matches!(self, Self::Hello),
            ReplicateOk => matches!(self, Self::ReplicateRecords | Self::ReplicateControl),
        }
    }
}

/// Every slot is taken: the request is not sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("all {capacity} in-flight slots are taken")]
pub struct InFlightFull {
    pub capacity: usize,
}

/// What an answer turned out to be.
#[derive(Debug, PartialEq, Eq)]
pub enum Completion<C> {
    /// The answer of this request.
    Matched(C),
    /// Nothing in flight has that id: a late or repeated answer. Drop it.
    Late,
    /// The answer is of a family the request does not allow. The request is indeterminate and the
    /// connection must close.
    Violation(C),
}

#[derive(Debug)]
struct Slot<C> {
    generation: u64,
    /// Links of the deadline list while taken; `next` alone links the free list otherwise.
    prev: u32,
    next: u32,
    live: Option<Live<C>>,
}

#[derive(Debug)]
struct Live<C> {
    context: C,
    family: Family,
    deadline: MonoTime,
}

/// The table of one connection. Memory grows with use, up to `capacity` slots.
#[derive(Debug)]
pub struct Slots<C> {
    slots: Vec<Slot<C>>,
    capacity: usize,
    free_head: u32,
    oldest: u32,
    newest: u32,
    live_count: usize,
    late_answers: u64,
    expired: u64,
    violations: u64,
}

impl<C> Slots<C> {
    /// An empty table for at most `capacity` requests (clamped to 1 ..= [`MAX_SLOTS`]).
    pub fn new(capacity: usize) -> Self {
        Self {
            slots: Vec::new(),
            capacity: capacity.clamp(1, MAX_SLOTS),
            free_head: NIL,
            oldest: NIL,
            newest: NIL,
            live_count: 0,
            late_answers: 0,
            expired: 0,
            violations: 0,
        }
    }

    /// Requests in flight.
    pub fn len(&self) -> usize {
        self.live_count
    }

    /// Whether nothing is in flight.
    pub fn is_empty(&self) -> bool {
        self.live_count == 0
    }

    /// Whether the next `reserve` would be refused.
    pub fn is_full(&self) -> bool {
        self.live_count == self.capacity
    }

    /// Answers dropped because their request was no longer in flight.
    pub fn late_answers(&self) -> u64 {
        self.late_answers
    }

    /// Requests that ran past their deadline.
    pub fn expired(&self) -> u64 {
        self.expired
    }

    /// Answers of a family their request does not allow.
    pub fn violations(&self) -> u64 {
        self.violations
    }

    /// When the oldest request expires.
    pub fn next_deadline(&self) -> Option<MonoTime> {
        self.live(self.oldest).map(|live| live.deadline)
    }

    /// Takes a slot for a request.
    ///
    /// Timeouts are uniform, so deadlines arrive in order. One that is earlier than the newest in
    /// flight counts as equal to it: a request may expire late by that much, never early.
    pub fn reserve(
        &mut self,
        context: C,
        family: Family,
        deadline: MonoTime,
    ) -> Result<CorrelationId, InFlightFull> {
        if self.is_full() {
            return Err(InFlightFull {
                capacity: self.capacity,
            });
        }
        let deadline = match self.live(self.newest) {
            Some(newest) => deadline.max(newest.deadline),
            None => deadline,
        };
        let index = self.take_free();
        let newest = self.newest;
        let slot = &mut self.slots[index as usize];
        slot.live = Some(Live {
            context,
            family,
            deadline,
        });
        slot.prev = newest;
        slot.next = NIL;
        let id = CorrelationId(slot.generation << SLOT_BITS | u64::from(index));
        match newest {
            NIL => self.oldest = index,
            _ => self.slots[newest as usize].next = index,
        }
        self.newest = index;
        self.live_count += 1;
        Ok(id)
    }

    /// Matches an answer to its request and frees the slot.
    pub fn complete(&mut self, id: CorrelationId, shape: AnswerShape) -> Completion<C> {
        let Some(index) = self.find(id) else {
            self.late_answers += 1;
            return Completion::Late;
        };
        let Some(live) = self.release(index) else {
            return Completion::Late;
        };
        if live.family.allows(shape) {
            Completion::Matched(live.context)
        } else {
            self.violations += 1;
            Completion::Violation(live.context)
        }
    }

    /// Takes a request back without an answer, for instance because it was never written.
    pub fn take(&mut self, id: CorrelationId) -> Option<C> {
        let index = self.find(id)?;
        self.release(index).map(|live| live.context)
    }

    /// The context of a request in flight.
    pub fn get(&self, id: CorrelationId) -> Option<&C> {
        let index = self.find(id)?;
        self.live(index).map(|live| &live.context)
    }

    /// Takes out, oldest first, every request whose deadline is not after `now`. What the
    /// iterator was not asked for stays in flight.
    pub fn expire(&mut self, now: MonoTime) -> impl Iterator<Item = (CorrelationId, C)> + '_ {
        std::iter::from_fn(move || {
            if self.next_deadline()? > now {
                return None;
            }
            self.expired += 1;
            self.release_oldest()
        })
    }

    /// Takes out every request, oldest first: the connection is gone.
    pub fn fail_all(&mut self) -> impl Iterator<Item = (CorrelationId, C)> + '_ {
        std::iter::from_fn(move || self.release_oldest())
    }

    fn release_oldest(&mut self) -> Option<(CorrelationId, C)> {
        let index = self.oldest;
        let generation = self.slots.get(index as usize)?.generation;
        let live = self.release(index)?;
        let id = CorrelationId(generation << SLOT_BITS | u64::from(index));
        Some((id, live.context))
    }

    fn live(&self, index: u32) -> Option<&Live<C>> {
        self.slots.get(index as usize)?.live.as_ref()
    }

    fn find(&self, id: CorrelationId) -> Option<u32> {
        let index = (id.0 & (MAX_SLOTS as u64 - 1)) as u32;
        let slot = self.slots.get(index as usize)?;
        (slot.live.is_some() && slot.generation == id.0 >> SLOT_BITS).then_some(index)
    }

    fn take_free(&mut self) -> u32 {
        match self.free_head {
            NIL => {
                self.slots.push(Slot {
                    generation: 1,
                    prev: NIL,
                    next: NIL,
                    live: None,
                });
                (self.slots.len() - 1) as u32
            }
            index => {
                self.free_head = self.slots[index as usize].next;
                index
            }
        }
    }

    fn release(&mut self, index: u32) -> Option<Live<C>> {
        let slot = self.slots.get_mut(index as usize)?;
        let live = slot.live.take()?;
        slot.generation += 1;
        let (prev, next) = (slot.prev, slot.next);
        slot.next = self.free_head;
        self.free_head = index;
        match prev {
            NIL => self.oldest = next,
            _ => self.slots[prev as usize].next = next,
        }
        match next {
            NIL => self.newest = prev,
            _ => self.slots[next as usize].prev = prev,
        }
        self.live_count -= 1;
        Some(live)
    }
}
