//! What must always be true, checked against what is seen from outside the machines.
//!
//! Numbers are those of the invariants of `docs/simulation.md`. A [`Judge`] hears of sends,
//! appends, completions and answers as they happen; [`last`] looks at the disks when a run is over.

mod copies;
mod forwards;
mod given_up;
pub mod groups;
mod handover;
pub mod last;
pub mod readings;
pub mod refusals;
pub mod replication;
pub mod subscribers;
mod views;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Bytes;

use super::catalog::SimCatalog;
use super::disk::{Journal, LogKey, SimLog};
use super::env::CoreAt;
use super::workload::{RecordMark, Request};
use crate::proto::cache::record::{CounterRecord, ValueRecord};
use crate::proto::cache::CacheReply;
use crate::proto::outcome::{Appended, Target};
use given_up::GivenUp;
use groups::GroupsWatch;
use handover::Handovers;
use readings::ReadingWatch;
use replication::ReplicationWatch;
use subscribers::SubscribersWatch;

/// A broken invariant: its number, and what was seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    pub invariant: u8,
    pub seen: String,
}

/// How a request ended, as its client is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    /// Stored on that broker at those offsets.
    Stored {
        node: Option<usize>,
        at: Appended,
    },
    Cached(CacheReply),
    /// Surely not applied.
    Refused,
    /// It may have been applied.
    Indeterminate,
    /// The client's broker died before it answered.
    Gone,
}

/// What a cache operation came to at its owner.
#[derive(Debug)]
pub enum CacheEffect {
    Get { found: Option<Bytes>, now_ms: u64 },
    Sum { sum: Option<i64> },
}

/// Why a leader appends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// Somebody asked for it.
    Request,
    /// Of its own accord: copies of what is live, deletes of what has expired.
    Upkeep,
}

#[derive(Debug)]
struct Watched {
    request: Arc<Request>,
    at: CoreAt,
    started_us: u64,
    sends: u32,
    written_to: BTreeSet<(usize, u64)>,
    /// Appends of this request by an owner, in the whole cluster.
    appends: u32,
    /// Where an owner has called its records durable.
    durable: Vec<(usize, Appended)>,
    ended: Option<Ended>,
}

/// Hears everything that can be held against the machines.
#[derive(Debug, Default)]
pub struct Judge {
    pub violations: Vec<Violation>,
    requests: BTreeMap<u64, Watched>,
    /// Requests of the append being submitted.
    appending: BTreeSet<u64>,
    appending_to: Option<(LogKey, u64, usize)>,
    /// How long each broker stood still altogether.
    pub paused_us: BTreeMap<usize, u64>,
    pub acked_records: u64,
    pub acked_cache_writes: u64,
    pub acked_quorum: u64,
    /// Brokers from before credentials: they check none.
    pub legacy_nodes: Vec<bool>,
    pub refused: u64,
    pub indeterminate: u64,
    pub gone: u64,
    pub replication: ReplicationWatch,
    pub readings: ReadingWatch,
    given_up: GivenUp,
    pub groups: GroupsWatch,
    pub subscribers: SubscribersWatch,
    handovers: Handovers,
}

impl Judge {
    /// A judge who has seen nothing yet.
    pub fn new(legacy_nodes: Vec<bool>) -> Self {
        Self {
            legacy_nodes,
            ..Self::default()
        }
    }

    /// Reports a broken invariant.
    pub fn fail(&mut self, invariant: u8, seen: String) {
        self.violations.push(Violation { invariant, seen });
    }

    pub fn requests(&self) -> usize {
        self.requests.len()
    }

    /// The broker a client is connected to has died: nobody answers it any more.
    pub fn on_node_gone(&mut self, node: usize) {
        self.forget_process(node);
        self.forget_group_asks(node);
        for watched in self.requests.values_mut() {
            if watched.at.node == node && watched.ended.is_none() {
                watched.ended = Some(Ended::Gone);
                self.gone += 1;
            }
        }
    }

    /// An owner is about to append records as the leader of a generation.
    pub fn on_append(
        &mut self,
        catalog: &SimCatalog,
        node: usize,
        (key, generation, first): (LogKey, u64, u64),
        records: &[Bytes],
        origin: Origin,
    ) {
        if catalog.leader_of(key.shard, generation) != Some(node) {
            let seen = format!("n{node} appends to {key:?} at {generation}, which it never led");
            self.fail(37, seen);
        }
        // A copy carries the mark of the request that wrote the value.
        self.appending = match origin {
            Origin::Request => self.requests_of(key, records),
            Origin::Upkeep => BTreeSet::new(),
        };
        if origin == Origin::Upkeep {
            let own = (first..).zip(records);
            let own = own.map(|(offset, record)| (key, offset, record.clone()));
            self.readings.own.extend(own);
        }
        for id in self.appending.clone() {
            self.check_append(id, key, node);
        }
        self.appending_to = Some((key, generation, records.len()));
        self.on_leader_append(key, generation, records);
    }

    fn check_append(&mut self, id: u64, key: LogKey, node: usize) {
        let Some(watched) = self.requests.get_mut(&id) else {
            return self.fail(37, format!("{key:?} gets a record nobody sent"));
        };
        watched.appends += 1;
        let (appends, shard) = (watched.appends, watched.request.shard);
        let has_good_credential = watched.request.has_good_credential;
        let is_refused = watched.ended == Some(Ended::Refused);
        let is_resendable = watched.request.forward_op().is_resendable();
        if !has_good_credential && !self.legacy_nodes[node] {
            self.fail(
                37,
                format!("n{node} appends request {id}, which may not be done"),
            );
        }
        if appends > 1 && !is_resendable {
            self.fail(38, format!("request {id} is appended {appends} times"));
        }
        if is_refused {
            self.fail(38, format!("request {id} was refused and is appended"));
        }
        if shard != key.shard {
            let seen = format!("request {id} for shard {shard} is appended to {key:?} on n{node}");
            self.fail(37, seen);
        }
    }

    /// The append was not taken after all.
    pub fn on_append_refused(&mut self) {
        if let Some((key, generation, count)) = self.appending_to.take() {
            self.take_back_leader_append(key, generation, count);
        }
        for id in std::mem::take(&mut self.appending) {
            if let Some(watched) = self.requests.get_mut(&id) {
                watched.appends -= 1;
            }
        }
    }

    /// An owner has been told that its records are durable.
    pub fn on_durable(
        &mut self,
        node: usize,
        key: LogKey,
        first: u64,
        records: &[Bytes],
        journal: &Journal,
    ) {
        if journal.has_failed_log(key) {
            self.fail(
                47,
                format!("n{node} {key:?} acknowledges after a failed sync"),
            );
        }
        let image = journal.on_disk(key);
        for (place, record) in records.iter().enumerate() {
            let offset = first + place as u64;
            let stored = image.and_then(|image| image.record(offset));
            if stored != Some(record) {
                let seen = format!("n{node} calls {offset} of {key:?} durable; disk: {stored:?}");
                self.fail(26, seen);
            }
            if key.log == SimLog::GroupCursors {
                self.on_cursor_durable(node, key, offset, record, journal);
            }
        }
        let at = Appended {
            first: crate::ids::Offset(first),
            last: crate::ids::Offset(first + records.len() as u64 - 1),
        };
        for id in self.requests_of(key, records) {
            if let Some(watched) = self.requests.get_mut(&id) {
                watched.durable.push((node, at));
            }
        }
    }

    fn requests_of(&self, key: LogKey, records: &[Bytes]) -> BTreeSet<u64> {
        let ids = records.iter();
        ids.filter_map(|record| self.request_of(key, record))
            .collect()
    }

    /// Whose record this is, if it says.
    fn request_of(&self, key: LogKey, record: &[u8]) -> Option<u64> {
        match key.log {
            SimLog::Stream => RecordMark::read(record).map(|mark| mark.request),
            SimLog::Cache => match ValueRecord::decode(record).ok()? {
                ValueRecord::Put { value, .. } => RecordMark::read(value).map(|mark| mark.request),
                ValueRecord::Delete { .. } => None,
            },
            SimLog::Counters => match CounterRecord::decode(record).ok()? {
                CounterRecord::Delta { delta, .. } => u64::try_from(delta - 1).ok(),
                CounterRecord::Checkpoint { .. } => None,
            },
            SimLog::GroupCursors | SimLog::GroupDeadLetters => None,
        }
    }

    /// A read of a cache must be what its durable log says, folded record by record.
    pub fn on_cache(
        &mut self,
        node: usize,
        at: LogKey,
        key: &str,
        effect: &CacheEffect,
        journal: &Journal,
    ) {
        // After a failed sync the disk may hold more than anybody was told.
        let records = journal.on_disk(at).map_or(&[][..], |image| {
            let known = journal.durable_tail(at).saturating_sub(image.base) as usize;
            &image.records[..known.min(image.records.len())]
        });
        match effect {
            CacheEffect::Get { found, now_ms } => {
                let folded = fold_value(records, key, *now_ms);
                if folded != *found {
                    let seen = format!("n{node} {at:?} {key}: {found:?}, its log says {folded:?}");
                    self.fail(42, seen);
                }
            }
            CacheEffect::Sum { sum } => {
                let folded = fold_sum(records, key);
                if folded != *sum {
                    let seen = format!("n{node} {at:?} {key}: sum {sum:?}, its log: {folded:?}");
                    self.fail(44, seen);
                }
            }
        }
    }

    /// A forward follows a redirect.
    pub fn on_redirect(&mut self, id: u64, catalog: &SimCatalog, target: &Target) {
        let Some(node) = catalog.node_by_name(target.node.as_str()) else {
            return;
        };
        let pair = (node, target.generation.0);
        let watched = self.requests.get(&id);
        if watched.is_some_and(|watched| watched.written_to.contains(&pair)) {
            self.fail(
                39,
                format!("request {id} follows a redirect back to {pair:?}"),
            );
        }
    }
}

fn fold_value(records: &[Bytes], wanted: &str, now_ms: u64) -> Option<Bytes> {
    let mut held: Option<(Bytes, u64)> = None;
    for record in records {
        match ValueRecord::decode(record) {
            Ok(ValueRecord::Put {
                key,
                expires_at_ms,
                value,
            }) if key == wanted => held = Some((Bytes::copy_from_slice(value), expires_at_ms)),
            Ok(ValueRecord::Delete { key }) if key == wanted => held = None,
            Ok(_) | Err(_) => {}
        }
    }
    let (value, expires_at_ms) = held?;
    (expires_at_ms == 0 || expires_at_ms > now_ms).then_some(value)
}

fn fold_sum(records: &[Bytes], wanted: &str) -> Option<i64> {
    let mut sum = None;
    for record in records {
        match CounterRecord::decode(record) {
            Ok(CounterRecord::Delta { key, delta }) if key == wanted => {
                sum = Some(sum.unwrap_or(0) + delta);
            }
            Ok(CounterRecord::Checkpoint { key, sum: is }) if key == wanted => sum = Some(is),
            Ok(_) | Err(_) => {}
        }
    }
    sum
}
