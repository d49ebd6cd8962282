//! A subscriber's place in a log: where it starts, what it may be sent next, why it ends.
//!
//! The machine does not hold records. It is told of records that became durable and of room at
//! the client, and says what to fetch: records just written are taken from memory while the
//! subscriber keeps up, and read from the log once it does not. A slow subscriber therefore costs
//! one cursor, never a queue, and never holds up a publisher.
//!
//! Invariants:
//! * SUB-1: offsets are delivered in order, each once, without a gap the client is not told of.
//! * SUB-2: a batch is asked for only when a whole one fits under the bound of the bytes handed to
//!   the transport and not yet taken by the client; so what is on its way passes the bound by what a
//!   single record is larger than a batch, never by more.
//! * SUB-3: nothing at or past the readable end is ever asked for.
//! * SUB-4: exactly one end, and nothing after it.

use std::ops::Range;

use super::outcome::Target;
use crate::ids::Offset;

/// Where a subscription starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StartPosition {
    /// Only what is appended after registration.
    Latest,
    /// The oldest record kept.
    Earliest,
    /// Exactly this offset.
    At(Offset),
}

/// A start position the log does not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum StartRefusal {
    #[error("offset {requested} is gone; the oldest kept is {available}")]
    TooOld {
        requested: Offset,
        available: Offset,
    },
    #[error("offset {requested} is in the future; the end is {available}")]
    InFuture {
        requested: Offset,
        available: Offset,
    },
    /// Held, and not known to be on a majority since this broker leads; in a moment it may be.
    #[error("offset {requested} cannot be shown yet")]
    NotShownYet { requested: Offset },
}

/// The part of a log that readers may see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Readable {
    pub oldest: Offset,
    /// One past the newest.
    pub end: Offset,
    /// One past the newest that is held, shown or not; at least `end`.
    pub held_end: Offset,
}

/// What the client is told when the subscription begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Opened {
    /// The first offset that will be delivered.
    pub start: Offset,
    /// The readable end at registration.
    pub live: Offset,
}

/// Why a subscription ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EndReason {
    /// The shard is led elsewhere now, or by nobody known.
    ShardMoved { owner: Option<Target> },
    /// The stream no longer exists.
    StreamDeleted,
    /// The client stopped reading; nobody is left to tell.
    StoppedByClient,
    /// Records the subscriber had not read were trimmed.
    Lagged,
    /// The credential no longer allows it.
    Revoked,
    /// The log cannot be read.
    StorageFailed,
    /// The broker is stopping: the connection closes, and the client resumes elsewhere.
    Draining,
}

/// An end, with the offset from which the client may resume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    pub reason: EndReason,
    pub resume_from: Offset,
}

/// What to do next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SubscriptionStep {
    /// Fetch records from memory or from the log, at most so many bytes but at least one record,
    /// all below `before`; report with [`Subscription::on_records`] or `on_trimmed`.
    Fetch {
        from: Offset,
        before: Offset,
        max_bytes: usize,
    },
    /// Everything readable is delivered: wait for [`Subscription::on_readable`].
    AwaitRecords,
    /// The client has not taken what it was sent: wait for [`Subscription::on_taken`].
    AwaitRoom,
    /// A fetch is under way.
    AwaitFetch,
    /// The end, reported once; write its frame, if it has one, and finish the event stream.
    Ended(Ended),
    /// The end was reported.
    Done,
}

/// What to do with fetched records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delivery {
    /// Send them, saying that so many offsets just below them hold no event.
    Send { skipped_before: u64 },
    /// They are not what was asked for, or the subscription ended meanwhile.
    Discard,
}

/// How much may be on its way to one subscriber.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SubscriptionLimits {
    /// Bytes handed to the transport and not yet taken by the client.
    pub in_flight_bytes: usize,
    /// Bytes of one event batch.
    pub batch_bytes: usize,
    /// Bytes of one event batch while others hold more than all may; then only one is on its way.
    pub held_back_batch_bytes: usize,
}

impl Default for SubscriptionLimits {
    fn default() -> Self {
        Self {
            in_flight_bytes: 4 << 20,
            batch_bytes: 1 << 20,
            held_back_batch_bytes: 64 << 10,
        }
    }
}

/// The cursor of one subscriber.
#[derive(Debug, Clone)]
pub struct Subscription {
    limits: SubscriptionLimits,
    next: Offset,
    readable_end: Offset,
    in_flight_bytes: usize,
    /// Others hold more than all of them may have on their way.
    held_back: bool,
    fetching: bool,
    /// Whether the last records came from behind the newest ones.
    behind: bool,
    times_fallen_behind: u64,
    end: Option<EndReason>,
    end_reported: bool,
}

impl Subscription {
    /// Fixes the subscriber's place. Register it for [`Self::on_readable`] in the same turn, so
    /// that stored records and new ones join without a gap.
    pub fn open(
        start: StartPosition,
        log: Readable,
        limits: SubscriptionLimits,
    ) -> Result<(Self, Opened), StartRefusal> {
        let next = match start {
            StartPosition::Latest => log.end,
            StartPosition::Earliest => log.oldest,
            StartPosition::At(requested) if requested < log.oldest => {
                return Err(StartRefusal::TooOld {
                    requested,
                    available: log.oldest,
                })
            }
            StartPosition::At(requested) if requested > log.end && requested <= log.held_end => {
                return Err(StartRefusal::NotShownYet { requested })
            }
            StartPosition::At(requested) if requested > log.end => {
                return Err(StartRefusal::InFuture {
                    requested,
                    available: log.end,
                })
            }
            StartPosition::At(requested) => requested,
        };
        let subscription = Self {
            limits,
            next,
            readable_end: log.end,
            in_flight_bytes: 0,
            held_back: false,
            fetching: false,
            behind: next < log.end,
            times_fallen_behind: 0,
            end: None,
            end_reported: false,
        };
        let opened = Opened {
            start: next,
            live: log.end,
        };
        Ok((subscription, opened))
    }

    /// The next offset to deliver.
    pub fn next_offset(&self) -> Offset {
        self.next
    }

    /// Whether stored records are being caught up with.
    pub fn is_behind(&self) -> bool {
        self.behind
    }

    /// How often the subscriber stopped keeping up.
    pub fn times_fallen_behind(&self) -> u64 {
        self.times_fallen_behind
    }

    /// What to do next. Asking again changes nothing, but for an end, which is reported once, and
    /// a fetch, which is then under way.
    pub fn poll_step(&mut self) -> SubscriptionStep {
        if let Some(reason) = &self.end {
            if self.end_reported {
                return SubscriptionStep::Done;
            }
            self.end_reported = true;
            return SubscriptionStep::Ended(Ended {
                reason: reason.clone(),
                resume_from: self.next,
            });
        }
        if self.fetching {
            return SubscriptionStep::AwaitFetch;
        }
        let is_at_end = self.next >= self.readable_end;
        if !self.has_room() {
            if !is_at_end && !self.behind {
                self.behind = true;
                self.times_fallen_behind += 1;
            }
            return SubscriptionStep::AwaitRoom;
        }
        if is_at_end {
            self.behind = false;
            return SubscriptionStep::AwaitRecords;
        }
        self.fetching = true;
        // Always a whole batch, so that subscribers at one place read the same one.
        SubscriptionStep::Fetch {
            from: self.next,
            before: self.readable_end,
            max_bytes: match self.held_back {
                true => self.limits.held_back_batch_bytes,
                false => self.limits.batch_bytes,
            },
        }
    }

    /// Whether another batch may be on its way. One may be in any case: a client that takes what it
    /// is sent must not wait for others that do not.
    fn has_room(&self) -> bool {
        let fits = self.in_flight_bytes + self.limits.batch_bytes <= self.limits.in_flight_bytes;
        self.in_flight_bytes == 0 || fits && !self.held_back
    }

    /// Whether others hold more than all may: then this one has one small batch on its way at most.
    pub fn set_held_back(&mut self, held_back: bool) {
        self.held_back = held_back;
    }

    /// Records below `end` may be read now. An end that moves back changes nothing.
    pub fn on_readable(&mut self, end: Offset) {
        self.readable_end = self.readable_end.max(end);
    }

    /// A fetch brought the records `offsets`, `bytes` long when encoded. An empty range says that
    /// nothing was there after all.
    pub fn on_records(&mut self, offsets: Range<Offset>, bytes: usize) -> Delivery {
        let expected = std::mem::replace(&mut self.fetching, false);
        let is_wanted = expected
            && self.end.is_none()
            && offsets.start >= self.next
            && offsets.start < offsets.end
            && offsets.end <= self.readable_end;
        if !is_wanted {
            return Delivery::Discard;
        }
        let skipped_before = offsets.start.0 - self.next.0;
        self.next = offsets.end;
        self.in_flight_bytes = self.in_flight_bytes.saturating_add(bytes);
        Delivery::Send { skipped_before }
    }

    /// The client's transport has taken so many of the bytes handed over.
    pub fn on_taken(&mut self, bytes: usize) {
        self.in_flight_bytes = self.in_flight_bytes.saturating_sub(bytes);
    }

    /// The client's transport has taken all but so many of the bytes handed over.
    pub fn on_untaken(&mut self, bytes: usize) {
        self.in_flight_bytes = self.in_flight_bytes.min(bytes);
    }

    /// The log now starts at `oldest`. A subscriber that had not read that far has lost records
    /// and is told so, with the place to resume from.
    pub fn on_trimmed(&mut self, oldest: Offset) {
        self.fetching = false;
        if self.next < oldest && self.end.is_none() {
            self.end(EndReason::Lagged);
            self.next = oldest;
        }
    }

    /// Ends the subscription; the first reason stands.
    pub fn end(&mut self, reason: EndReason) {
        if self.end.is_none() {
            self.end = Some(reason);
            self.fetching = false;
        }
    }
}
