//! One subscription at its broker: the cursor, and the one read it may have under way.

use super::SubscriberEvent;
use crate::ids::Offset;
use crate::proto::subscription::{
    Delivery, EndReason, Ended, Subscription, SubscriptionLimits, SubscriptionStep,
};
use crate::sim::check::subscribers::{Handed, Subscribed};
use crate::sim::core::{Core, ReaderAnswer};
use crate::sim::env::{CoreAt, Env, Event};

/// Bounds that a few short records reach.
pub(super) const LIMITS: SubscriptionLimits = SubscriptionLimits {
    in_flight_bytes: 120,
    batch_bytes: 60,
    held_back_batch_bytes: 15,
};
/// A subscription that runs.
#[derive(Debug)]
pub(super) struct Attached {
    pub at: CoreAt,
    pub cursor: Subscription,
    read: Option<Read>,
}

/// The one read of a subscription that may be under way.
#[derive(Debug, Clone, Copy)]
struct Read {
    from: u64,
    max_bytes: usize,
    state: ReadState,
}

impl Read {
    fn is_done(&self) -> bool {
        matches!(self.state, ReadState::Done { .. })
    }

    /// What could be shown when it was asked for: nothing else is shown, whatever has become of the shard since.
    fn end(&self) -> u64 {
        match self.state {
            ReadState::Waits => 0,
            ReadState::AtDisk { end } | ReadState::Done { end } => end,
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum ReadState {
    /// Until there is something to show.
    Waits,
    /// At the disk, with what could be shown when it was asked.
    AtDisk { end: u64 },
    /// The disk has it.
    Done { end: u64 },
}

impl Attached {
    pub fn new(at: CoreAt, cursor: Subscription) -> Self {
        let read = None;
        Self { at, cursor, read }
    }

    /// The disk has what was asked for.
    pub fn disk_has_read(&mut self) {
        if let Some(read) = &mut self.read {
            if let ReadState::AtDisk { end } = read.state {
                read.state = ReadState::Done { end };
            }
        }
    }
}

/// A subscription while its broker deals with it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Running {
    pub who: Subscribed,
    pub life: u64,
    pub is_slow: bool,
}

impl Running {
    /// Acts until it waits for something. Gives the end, when it has come.
    pub fn run(&self, env: &mut Env, owner: &Core, attached: &mut Attached) -> Option<Ended> {
        while env.judge.violations.is_empty() {
            if let Some(read) = attached.read.take_if(|read| read.is_done()) {
                self.finish(env, owner, attached, read);
                continue;
            }
            let max_bytes = match attached.cursor.poll_step() {
                SubscriptionStep::Fetch { max_bytes, .. } => max_bytes,
                // The read waits at the log until there is something to bring.
                SubscriptionStep::AwaitRecords | SubscriptionStep::AwaitFetch => LIMITS.batch_bytes,
                SubscriptionStep::Ended(ended) => return Some(ended),
                SubscriptionStep::AwaitRoom | SubscriptionStep::Done => return None,
            };
            let read = *attached.read.get_or_insert(Read {
                from: attached.cursor.next_offset().0,
                max_bytes,
                state: ReadState::Waits,
            });
            let is_asked = matches!(read.state, ReadState::Waits);
            if !is_asked || !self.ask(env, owner, attached, read) {
                return None;
            }
        }
        None
    }

    /// Asks the log. False when there is nothing to do before something happens.
    fn ask(&self, env: &mut Env, owner: &Core, attached: &mut Attached, read: Read) -> bool {
        let cursor = &mut attached.cursor;
        match owner.answer_reader(env, self.who.shard, read.from) {
            ReaderAnswer::Waits => return false,
            ReaderAnswer::NotOwner => cursor.end(EndReason::ShardMoved { owner: None }),
            ReaderAnswer::Failed => cursor.end(EndReason::StorageFailed),
            ReaderAnswer::Trimmed { base } => cursor.on_trimmed(Offset(base)),
            ReaderAnswer::Reads { end } => return self.begin_read(env, attached, read, end),
        }
        attached.read = None;
        true
    }

    /// From memory, or from the disk. False when it takes its time.
    fn begin_read(&self, env: &mut Env, attached: &mut Attached, read: Read, end: u64) -> bool {
        let is_in_memory = env.random.subscribers.chance(750);
        let state = match is_in_memory {
            true => ReadState::Done { end },
            false => ReadState::AtDisk { end },
        };
        attached.read = Some(Read { state, ..read });
        if !is_in_memory {
            self.read_from_disk(env);
        }
        is_in_memory
    }

    fn read_from_disk(&self, env: &mut Env) {
        let most_us = *env.random.subscribers.pick(&[500, 20_000, 2_000_000]);
        let after_us = env.random.subscribers.between(1, most_us);
        let event = SubscriberEvent::Read {
            number: self.who.number,
            life: self.life,
        };
        env.queue
            .push(env.now_us + after_us, Event::Subscriber(event));
    }

    /// A read has come to its end.
    fn finish(&self, env: &mut Env, owner: &Core, attached: &mut Attached, read: Read) {
        let cursor = &mut attached.cursor;
        let end = read.end();
        let records = match owner.read_stream(self.who.shard, (read.from, end), read.max_bytes) {
            Ok(records) => records,
            Err(base) => return cursor.on_trimmed(Offset(base)),
        };
        cursor.on_readable(Offset(end));
        // A read that had waited was not a fetch yet.
        let _ = cursor.poll_step();
        let bytes = records.iter().map(bytes::Bytes::len).sum();
        let next = read.from + records.len() as u64;
        match cursor.on_records(Offset(read.from)..Offset(next), bytes) {
            Delivery::Send { skipped_before } => {
                let handed = Handed {
                    first: read.from,
                    skipped: skipped_before,
                    records: &records,
                };
                env.judge.on_handed(self.who, &handed, &owner.journal);
                self.take(env, cursor, bytes);
            }
            Delivery::Discard => env.judge.count("subscriber_reads_discarded", 1),
        }
    }

    /// The client takes what it was sent, at once or later.
    fn take(&self, env: &mut Env, cursor: &mut Subscription, bytes: usize) {
        if !self.is_slow {
            return cursor.on_taken(bytes);
        }
        let after_us = env.random.subscribers.between(1_000, 1_500_000);
        let event = SubscriberEvent::Taken {
            number: self.who.number,
            life: self.life,
            bytes,
        };
        env.queue
            .push(env.now_us + after_us, Event::Subscriber(event));
    }
}
