//! What consumer groups promise: no record lost, none passed before it is finished, no dead letter
//! passed before its entry is durable, bounded deliveries, one answer a request.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;

use super::Judge;
use crate::ids::Generation;
use crate::proto::cache::record::ValueRecord;
use crate::proto::group::entry::{of_dead_key, of_position_value, DeadEntry, KnownEnds};
use crate::proto::group::{Delivered, GroupOp, GroupRefusal, GroupReply, Restored};
use crate::sim::consumers::{group_name, GroupAt};
use crate::sim::core::{GroupLife, GROUP_LIMITS};
use crate::sim::disk::{Journal, LogImage, LogKey, SimLog};
use crate::sim::env::CoreAt;

/// What is known of one group.
#[derive(Debug, Default)]
struct GroupWatch {
    /// Records a member was given.
    given: BTreeSet<(u64, Bytes)>,
    /// Records that a member has said it is done with, or asked to have discarded. By what they
    /// hold: a failover may put another record at an offset.
    finished: BTreeSet<(u64, Bytes)>,
    /// What an entry was written about, by its offset and generation. Not by where generations
    /// begin in the history beside a copy: one that was caught up says of all it holds that it is
    /// of the leader it came from, however old the record and its entry are.
    buried: BTreeSet<(u64, Generation, Bytes)>,
    redriven: BTreeMap<u64, u32>,
    /// Deliveries in one life of the group.
    told: BTreeMap<(CoreAt, u64, u64), u32>,
    /// Where the stream began at an owner of the group: what lies below it was trimmed.
    trimmed: u64,
    /// The owner and the end of the stream when the group said after healing that nothing is left.
    drained: Option<(usize, u64)>,
}

/// What the judge knows of consumer groups.
#[derive(Debug, Default)]
pub struct GroupsWatch {
    groups: BTreeMap<GroupAt, GroupWatch>,
    asked: BTreeMap<u64, CoreAt>,
    /// Shards that were led from a companion that was being copied: nothing is promised of them.
    partial: BTreeSet<usize>,
}

impl GroupWatch {
    /// Whether a record is done with, or one of these letters is about it.
    fn is_settled(&self, offset: u64, record: &Bytes, letters: &Letters) -> bool {
        let entries = letters.range((offset, Generation(0))..=(offset, Generation(u64::MAX)));
        let mut about = entries.map(|(at, generation)| (*at, *generation, record.clone()));
        self.finished.contains(&(offset, record.clone()))
            || about.any(|entry| self.buried.contains(&entry))
    }
}

/// Offset and generation of the entries of a group.
type Letters = BTreeSet<(u64, Generation)>;

impl Judge {
    /// A member asks its group for something.
    pub fn on_group_ask(&mut self, owner: CoreAt, at: GroupAt, ticket: u64, op: &GroupOp) {
        self.groups.asked.insert(ticket, owner);
        let group = self.groups.groups.entry(at).or_default();
        match op {
            GroupOp::Ack { offset } | GroupOp::Discard { offset } => {
                let given = group.given.range((*offset, Bytes::new())..);
                let given = given.take_while(|(at, _)| at == offset);
                group.finished.extend(given.cloned());
            }
            GroupOp::Redrive { offset } => *group.redriven.entry(*offset).or_default() += 1,
            GroupOp::Poll(_)
            | GroupOp::Nack { .. }
            | GroupOp::Extend { .. }
            | GroupOp::DeadLetter { .. }
            | GroupOp::ListDead
            | GroupOp::Seek { .. }
            | GroupOp::Describe
            | GroupOp::Delete => {}
        }
    }

    /// A group is about to write an entry of a record.
    pub fn on_group_entry(
        &mut self,
        at: GroupAt,
        (offset, generation): (u64, Generation),
        journal: &Journal,
    ) {
        let stream = journal.on_disk(key_of(at.shard, SimLog::Stream));
        if let Some(record) = stream.and_then(|image| image.record(offset)) {
            let group = self.groups.groups.entry(at).or_default();
            group.buried.insert((offset, generation, record.clone()));
        }
    }

    /// An owner has read a group from its logs: what its position passed is finished, or listed.
    pub fn on_group_made(
        &mut self,
        node: usize,
        at: GroupAt,
        restored: &Restored,
        journal: &Journal,
    ) {
        let stream = journal.on_disk(key_of(at.shard, SimLog::Stream));
        let (Some(stream), Some(position)) = (stream, restored.position) else {
            return;
        };
        if self.groups.partial.contains(&at.shard) {
            return;
        }
        let listed: BTreeSet<u64> = restored.entries.iter().map(|(offset, _)| *offset).collect();
        let group = self.groups.groups.entry(at).or_default();
        let lost = (stream.base.max(group.trimmed)..position).find(|offset| {
            let record = stream.record(*offset).cloned();
            record.is_some_and(|record| {
                !group.finished.contains(&(*offset, record)) && !listed.contains(offset)
            })
        });
        if let Some(offset) = lost {
            let seen = format!("n{node} makes {at:?} at {position} and knows nothing of {offset}");
            self.fail(46, seen);
        }
    }

    /// The one answer it gets.
    pub fn on_group_answer(
        &mut self,
        (owner, of): (CoreAt, GroupLife),
        ticket: u64,
        result: &Result<GroupReply, GroupRefusal>,
        tail: u64,
        journal: &Journal,
    ) {
        if self.groups.asked.remove(&ticket) != Some(owner) {
            let seen = format!("{owner:?} {:?} answers {ticket} again: {result:?}", of.at);
            return self.fail(40, seen);
        }
        match result {
            Ok(GroupReply::Records(records)) => {
                for record in records {
                    self.on_delivery(owner, of, record, tail, journal);
                }
            }
            Ok(GroupReply::Settled) => self.count("group_requests_settled", 1),
            Ok(_) => {}
            Err(_) => self.count("group_requests_refused", 1),
        }
    }

    fn on_delivery(
        &mut self,
        owner: CoreAt,
        of: GroupLife,
        record: &Delivered,
        tail: u64,
        journal: &Journal,
    ) {
        self.count("group_deliveries", 1);
        self.count("group_redeliveries", u64::from(record.attempts > 1));
        let (at, offset) = (of.at, record.offset);
        let stream = key_of(at.shard, SimLog::Stream);
        let image = journal.on_disk(stream);
        let stored = image.and_then(|i| i.record(offset));
        // Read before it was trimmed.
        let is_trimmed = image.is_some_and(|image| offset < image.base);
        if offset >= tail || (stored != Some(&record.payload) && !is_trimmed) {
            let seen = format!("{owner:?} {at:?} hands out {offset} of {tail}; disk: {stored:?}");
            self.fail(48, seen);
        }
        let cursors = journal.on_disk(key_of(at.shard, SimLog::GroupCursors));
        let position = cursors.and_then(|image| position_in(image, image.tail(), at.group));
        let ends = ends_of(journal.on_disk(stream));
        let position = position.map(|position| position.about(&ends));
        let group = self.groups.groups.entry(at).or_default();
        group.given.insert((offset, record.payload.clone()));
        let told = group.told.entry((owner, of.life, offset)).or_default();
        *told += 1;
        let told = *told;
        let redriven = group.redriven.get(&offset).copied().unwrap_or(0);
        let most = GROUP_LIMITS.attempts * (1 + redriven);
        if told > most || record.attempts > GROUP_LIMITS.attempts {
            let seen = format!(
                "{owner:?} {at:?} hands out {offset} {told} times, attempts {}",
                record.attempts
            );
            self.fail(45, seen);
        }
        if redriven == 0 && position.is_some_and(|position| offset < position) {
            let seen = format!("{owner:?} {at:?} hands out {offset} below {position:?}");
            self.fail(45, seen);
        }
    }

    /// A position is durable in its owner's log.
    pub(super) fn on_cursor_durable(
        &mut self,
        node: usize,
        key: LogKey,
        offset: u64,
        record: &[u8],
        journal: &Journal,
    ) {
        let Some((group, written)) = position_of(record) else {
            return;
        };
        let position = written.offset;
        let Some(image) = journal.on_disk(key) else {
            return;
        };
        let is_own = self
            .readings
            .own
            .contains(&(key, offset, Bytes::copy_from_slice(record)));
        let before = position_in(image, offset, group);
        if !is_own {
            self.count("group_positions", 1);
            // After a failover it may have to go back to what is still there.
            let is_back = before.is_some_and(|before| before.offset >= position);
            if is_back && before.is_some_and(|before| before.generation >= written.generation) {
                let seen = format!("n{node} {key:?} g{group}: {before:?}, then {position}");
                self.fail(45, seen);
            }
        }
        let at = GroupAt {
            shard: key.shard,
            group,
        };
        let ends = ends_of(journal.on_disk(key_of(key.shard, SimLog::Stream)));
        let from = before.map_or(0, |before| before.about(&ends));
        let stream = journal.on_disk(key_of(key.shard, SimLog::Stream));
        let base = stream.map_or(0, |image| image.base);
        let watch = self.groups.groups.entry(at).or_default();
        watch.trimmed = watch.trimmed.max(base);
        // A copy may be of a position that was written about records which are gone.
        self.passed_only_finished(node, at, from..written.about(&ends), journal);
    }

    /// A broker opens a stream: each group's position must be one it may have with these letters.
    pub(super) fn on_opened_groups(&mut self, node: usize, key: LogKey, journal: &Journal) {
        let letters = key_of(key.shard, SimLog::GroupDeadLetters);
        let letters_image = journal.on_disk(letters);
        if self.is_being_copied(node, letters, letters_image) {
            self.groups.partial.insert(key.shard);
            return self.count("openings_of_partial_companions", 1);
        }
        let Some(image) = journal.on_disk(key) else {
            return;
        };
        for group in 0..2 {
            let Some(position) = position_in(image, image.tail(), group) else {
                continue;
            };
            self.count("groups_taken_over", 1);
            let at = GroupAt {
                shard: key.shard,
                group,
            };
            let ends = ends_of(journal.on_disk(key_of(key.shard, SimLog::Stream)));
            let passed = 0..position.about(&ends);
            self.passed_only_finished(node, at, passed, journal);
        }
    }

    fn passed_only_finished(
        &mut self,
        node: usize,
        at: GroupAt,
        passed: std::ops::Range<u64>,
        journal: &Journal,
    ) {
        let stream = journal.on_disk(key_of(at.shard, SimLog::Stream));
        let base = stream.map_or(0, |image| image.base);
        let letters = journal.on_disk(key_of(at.shard, SimLog::GroupDeadLetters));
        let letters = letters.map_or_else(Letters::new, |image| letters_in(image, at.group));
        let group = self.groups.groups.entry(at).or_default();
        let base = base.max(group.trimmed);
        let lost = (passed.start.max(base)..passed.end).find(|offset| {
            let record = stream.and_then(|image| image.record(*offset)).cloned();
            record.is_some_and(|record| !group.is_settled(*offset, &record, &letters))
        });
        if let Some(offset) = lost {
            let seen = format!("n{node} {at:?} passes {offset}, in {passed:?}, which nobody acked");
            self.fail(46, seen);
        }
    }

    /// After healing the group has come to the end of the stream.
    pub fn on_group_drained(&mut self, node: usize, at: GroupAt, tail: u64) {
        self.count("groups_drained", 1);
        let group = self.groups.groups.entry(at).or_default();
        group.drained = Some((node, tail));
    }

    pub(super) fn forget_group_asks(&mut self, node: usize) {
        self.groups.asked.retain(|_, owner| owner.node != node);
    }

    /// Every record of a drained group was given to a member, or is a dead letter.
    pub(super) fn groups_at_the_end(&mut self, disks: impl Fn(usize, LogKey) -> Option<LogImage>) {
        if let Some((ticket, owner)) = self.groups.asked.first_key_value() {
            let seen = format!("{owner:?} never answers the group request {ticket}");
            self.fail(40, seen);
        }
        let mut failures = Vec::new();
        for (at, group) in &self.groups.groups {
            let Some((node, tail)) = group.drained else {
                continue;
            };
            let Some(stream) = disks(node, key_of(at.shard, SimLog::Stream)) else {
                continue;
            };
            let letters = disks(node, key_of(at.shard, SimLog::GroupDeadLetters));
            let letters = letters.map_or_else(Letters::new, |i| letters_in(&i, at.group));
            let lost = (stream.base.max(group.trimmed)..tail).find(|offset| {
                let record = stream.record(*offset).cloned().unwrap_or_default();
                !group.given.contains(&(*offset, record.clone()))
                    && !group.is_settled(*offset, &record, &letters)
            });
            if let Some(offset) = lost {
                let seen = format!("{at:?} was never given {offset}; drained to {tail} on n{node}");
                failures.push(seen);
            }
        }
        for seen in failures {
            self.fail(45, seen);
        }
    }
}

fn key_of(shard: usize, log: SimLog) -> LogKey {
    LogKey { shard, log }
}

/// A position, and the generation it was written at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Written {
    offset: u64,
    generation: Generation,
}

impl Written {
    /// What it says of the records that are there now.
    fn about(self, ends: &KnownEnds) -> u64 {
        self.offset.min(ends.end_of(self.generation))
    }
}

fn ends_of(stream: Option<&LogImage>) -> KnownEnds {
    let history = stream.into_iter().flat_map(|image| &image.history);
    KnownEnds::of(history.map(|entry| (Generation(entry.generation), entry.start)))
}

/// The group and the position of a record of a cursor log.
fn position_of(record: &[u8]) -> Option<(usize, Written)> {
    let ValueRecord::Put { key, value, .. } = ValueRecord::decode(record).ok()? else {
        return None;
    };
    let group = (0..2).find(|group| group_name(*group) == key)?;
    let (offset, generation) = of_position_value(value).ok()?;
    Some((group, Written { offset, generation }))
}

/// A group's last position below `end` of a cursor log.
fn position_in(image: &LogImage, end: u64, group: usize) -> Option<Written> {
    let below = end.saturating_sub(image.base) as usize;
    let records = image.records.iter().take(below).rev();
    let mut positions = records.filter_map(|record| position_of(record));
    positions.find(|(of, _)| *of == group).map(|(_, at)| at)
}

/// What a dead-letter log knows or knew of a group. Deletes say nothing: who discards a record, or
/// acks it after a redrive, has said so.
fn letters_in(image: &LogImage, group: usize) -> Letters {
    let keys = image.records.iter().filter_map(|record| {
        let ValueRecord::Put { key, value, .. } = ValueRecord::decode(record).ok()? else {
            return None;
        };
        let (offset, of) = of_dead_key(key).ok()?;
        let (_, generation) = DeadEntry::of_value(value).ok()?;
        (of == group_name(group)).then_some((offset, generation))
    });
    keys.collect()
}
