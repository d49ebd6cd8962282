//! What subscribers are promised (I48): on a `Quorum` shard nothing at or past the mark, and at one offset the same
//! bytes to every reader for ever; on any shard each offset once, in order, and durable where it comes from.

use std::collections::BTreeMap;

use bytes::Bytes;

use super::Judge;
use crate::proto::subscription::{EndReason, Ended, StartRefusal};
use crate::sim::core::stream_of;
use crate::sim::disk::{Journal, LogKey};

/// One subscription as the judge names it.
#[derive(Debug, Clone, Copy)]
pub struct Subscribed {
    pub number: usize,
    pub node: usize,
    pub shard: usize,
    /// The shard waits for a majority.
    pub is_marked: bool,
}

/// Records on their way to a subscriber.
#[derive(Debug)]
pub struct Handed<'a> {
    pub first: u64,
    /// Offsets below the first that it is told to have no event.
    pub skipped: u64,
    pub records: &'a [Bytes],
}

/// What the judge knows of subscribers.
#[derive(Debug, Default)]
pub struct SubscribersWatch {
    /// What any reader of a `Quorum` shard was handed, by log and offset.
    handed: BTreeMap<(LogKey, u64), Bytes>,
    /// What each subscriber gets next.
    next: BTreeMap<usize, u64>,
    /// Of all that was handed to subscribers, in order.
    pub hash: u64,
}

impl SubscribersWatch {
    fn mix(&mut self, who: Subscribed, handed: &Handed) {
        let numbers = [who.number as u64, who.node as u64, handed.first];
        let bytes = handed.records.iter().flat_map(|record| record.iter());
        for number in numbers.into_iter().chain(bytes.map(|b| u64::from(*b))) {
            self.hash = (self.hash ^ number).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            self.hash ^= self.hash >> 29;
        }
    }
}

impl Judge {
    pub fn on_subscribed(&mut self, who: Subscribed, start: u64) {
        self.count("subscriptions", 1);
        self.subscribers.next.insert(who.number, start);
    }

    /// A subscriber may not begin where it asked to.
    pub fn on_start_refused(&mut self) {
        self.count("subscriptions_refused", 1);
    }

    /// One that was handed records may not go on behind them at a leader that is open. The mark of a `Quorum` shard
    /// may have a way to go yet, but the records are never gone again.
    pub fn on_resume_refused(&mut self, who: Subscribed, refusal: StartRefusal) {
        match refusal {
            StartRefusal::NotShownYet { .. } => {
                self.count("subscriptions_refused_before_the_mark", 1);
            }
            StartRefusal::InFuture { .. } if who.is_marked => {
                self.fail(48, format!("{who:?} cannot go on: {refusal}"));
            }
            StartRefusal::InFuture { .. } | StartRefusal::TooOld { .. } => {}
        }
    }

    /// Records are handed to a subscriber.
    pub fn on_handed(&mut self, who: Subscribed, handed: &Handed, journal: &Journal) {
        self.count("subscriber_deliveries", handed.records.len() as u64);
        self.subscribers.mix(who, handed);
        let next = self.subscribers.next.get(&who.number).copied();
        // A simulated log has no place without a record.
        if next != Some(handed.first) || handed.skipped != 0 {
            let (first, skipped) = (handed.first, handed.skipped);
            let seen = format!("{who:?} gets {first} after {skipped} skipped, not {next:?}");
            self.fail(48, seen);
        }
        let end = handed.first + handed.records.len() as u64;
        self.subscribers.next.insert(who.number, end);
        let key = stream_of(who.shard);
        for (offset, record) in (handed.first..).zip(handed.records) {
            let image = journal.on_disk(key);
            let is_durable = offset < journal.durable_tail(key)
                && image.and_then(|image| image.record(offset)) == Some(record);
            if !is_durable {
                self.fail(48, format!("{who:?} gets {offset}, which is not on disk"));
            }
            if who.is_marked {
                self.on_shown(who.node, (key, offset), record);
            }
        }
    }

    /// A reader of a `Quorum` shard, of whatever kind, is handed a record.
    pub fn on_shown(&mut self, node: usize, (key, offset): (LogKey, u64), record: &Bytes) {
        let committed = self.replication.committed.get(&key);
        let is_known = committed.is_some_and(|committed| offset >= committed.base);
        let is_same = committed.and_then(|c| c.get(offset)) == Some(record);
        let tail = self.committed_tail(key);
        if offset >= tail || (is_known && !is_same) {
            let seen = format!("n{node} shows {offset} of {key:?}, of which {tail} are committed");
            self.fail(48, seen);
        }
        let place = self.subscribers.handed.entry((key, offset));
        let first = place.or_insert_with(|| record.clone());
        if first != record {
            let seen = format!("n{node} shows another record at {offset} of {key:?} than before");
            self.fail(48, seen);
        }
    }

    /// A subscription is over, and its client told where to go on.
    pub fn on_subscription_ended(&mut self, who: Subscribed, ended: &Ended) {
        let next = self.subscribers.next.remove(&who.number);
        let resume = ended.resume_from.0;
        let is_right = match ended.reason {
            EndReason::Lagged => Some(resume) > next,
            _ => Some(resume) == next,
        };
        self.count(ended_as(&ended.reason), 1);
        if !is_right {
            let seen = format!("{who:?} ends with {ended:?} and had {next:?} to come");
            self.fail(48, seen);
        }
    }

    /// After healing a subscriber has come to the end of what may be read, or has not.
    pub fn on_last_place(&mut self, who: Subscribed, place: Option<u64>, durable: u64) {
        let end = match who.is_marked {
            true => self.committed_tail(stream_of(who.shard)),
            false => durable,
        };
        if place != Some(end) {
            let seen = format!("{who:?} is at {place:?} when all is quiet; the end is {end}");
            self.fail(40, seen);
        }
    }
}

fn ended_as(reason: &EndReason) -> &'static str {
    match reason {
        EndReason::ShardMoved { .. } => "subscriptions_ended_moved",
        EndReason::Lagged => "subscriptions_ended_lagged",
        EndReason::StoppedByClient => "subscriptions_ended_by_client",
        EndReason::StorageFailed => "subscriptions_ended_storage",
        EndReason::StreamDeleted | EndReason::Revoked | EndReason::Draining => {
            "subscriptions_ended_otherwise"
        }
    }
}
