//! What replication promises, from what is seen of disks, answers and marks.
//!
//! The judge keeps two pictures of its own: for each generation of each log what its leader's log
//! is, and for each `Quorum` shard what any leader has ever called committed.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;

use super::Judge;
use crate::proto::convert::PeerReply;
use crate::proto::outcome::PeerCode;
use crate::proto::replication::follower::FollowerNote;
use crate::proto::replication::leader::{Answered, HaltReason};
use crate::proto::replication::ReplicateBody;
use crate::sim::catalog::Acknowledge;
use crate::sim::disk::{Journal, LogImage, LogKey, SimLog};
use crate::sim::ReplicationCounts;

/// A log as its leader of one generation has it, from `base` on.
#[derive(Debug, Default)]
pub(super) struct LeaderLog {
    pub node: usize,
    pub base: u64,
    /// Its tail when it began to lead: what is behind it wrote itself.
    pub began: u64,
    records: Vec<Bytes>,
}

impl LeaderLog {
    pub fn get(&self, offset: u64) -> Option<&Bytes> {
        self.records.get(offset.checked_sub(self.base)? as usize)
    }

    pub fn tail(&self) -> u64 {
        self.base + self.records.len() as u64
    }
}

/// A follower as its leader's machine has it.
#[derive(Debug, Clone, Copy)]
pub struct Counted {
    pub node: usize,
    pub position: Option<u64>,
    /// For any reason but a failed disk, which takes nothing back that was said before.
    pub is_halted: bool,
}

/// Everything any leader of a shard has called committed.
#[derive(Debug, Default)]
pub struct Committed {
    pub base: u64,
    records: Vec<Bytes>,
}

impl Committed {
    pub fn tail(&self) -> u64 {
        self.base + self.records.len() as u64
    }

    pub fn get(&self, offset: u64) -> Option<&Bytes> {
        self.records.get(offset.checked_sub(self.base)? as usize)
    }

    pub fn extend(&mut self, records: Vec<Bytes>) {
        self.records.extend(records);
    }
}

/// What the judge knows of replicated logs.
#[derive(Debug, Default)]
pub struct ReplicationWatch {
    pub(super) leaders: BTreeMap<(LogKey, u64), LeaderLog>,
    pub committed: BTreeMap<LogKey, Committed>,
    pub(super) opened: BTreeMap<(usize, u64), usize>,
    /// The marks of each process; one that starts anew begins without.
    pub(super) marks: BTreeMap<(usize, LogKey, u64), u64>,
    /// Highest offset each follower has answered, by log and generation.
    pub(super) answered: BTreeMap<(LogKey, u64), BTreeMap<usize, u64>>,
    /// The highest place each follower has ever named, by log and generation, whatever became of its copy since.
    pub(super) said: BTreeMap<(LogKey, u64, usize), u64>,
    /// Highest generation each broker has answered at.
    pub(super) answered_at: BTreeMap<(usize, LogKey), u64>,
    /// Up to where a copy has been compared with a leader's log already.
    pub(super) verified: BTreeMap<(usize, LogKey), (u64, u64)>,
    pub(super) accepted: BTreeMap<(usize, LogKey), u64>,
    /// (leader, shard, generation) that have been told of a newer generation.
    pub(super) fenced: BTreeSet<(usize, usize, u64)>,
    pub(super) halts: BTreeMap<(usize, LogKey, u64), HaltReason>,
    pub counts: ReplicationCounts,
}

impl Judge {
    pub fn on_note(&mut self, note: FollowerNote) {
        let watch = &mut self.replication;
        match note {
            FollowerNote::Truncated { .. } => watch.counts.truncations += 1,
            FollowerNote::Conflict { .. } => watch.counts.conflicts += 1,
            FollowerNote::Bootstrapped { .. } => watch.counts.bootstraps += 1,
            FollowerNote::Rebuilt { .. } => watch.counts.rebuilds += 1,
            FollowerNote::Accepted { .. }
            | FollowerNote::Shortened { .. }
            | FollowerNote::Poisoned => {}
        }
    }

    /// A broker begins to lead: from here on its log is what followers must equal.
    pub fn on_begin(&mut self, node: usize, keys: &[LogKey], generation: u64, journal: &Journal) {
        for key in keys {
            let image = journal.on_disk(*key).cloned().unwrap_or_default();
            self.begin_whole(*key, generation, &image);
            let before = self.replication.leaders.get(&(*key, generation));
            let log = LeaderLog {
                node,
                base: image.base,
                began: before.map_or(image.tail(), |before| before.began.min(image.tail())),
                records: image.records,
            };
            let before = self.replication.leaders.insert((*key, generation), log);
            if before.is_some_and(|before| before.node != node) {
                self.fail(11, format!("{key:?} has two leaders at {generation}"));
            }
        }
    }

    /// A leader appends at its generation.
    pub(super) fn on_leader_append(&mut self, key: LogKey, generation: u64, records: &[Bytes]) {
        self.extend_whole(key, generation, records);
        if let Some(log) = self.replication.leaders.get_mut(&(key, generation)) {
            log.records.extend_from_slice(records);
        }
    }

    pub(super) fn take_back_leader_append(&mut self, key: LogKey, generation: u64, count: usize) {
        self.take_back_whole(key, generation, count);
        if let Some(log) = self.replication.leaders.get_mut(&(key, generation)) {
            let keep = log.records.len() - count;
            log.records.truncate(keep);
        }
    }

    /// A broker opens a shard for writes.
    pub fn on_opened(&mut self, node: usize, keys: &[LogKey], generation: u64, journal: &Journal) {
        self.replication.counts.openings += 1;
        let shard = keys[0].shard;
        let before = self.replication.opened.insert((shard, generation), node);
        if before.is_some_and(|before| before != node) {
            let seen = format!("{shard} at {generation} is opened by n{node} and {before:?}");
            self.fail(11, seen);
        }
        for key in keys {
            let image = journal.on_disk(*key);
            let is_recorded = image.is_some_and(|image| {
                let last = image.history.last();
                image.accepted == generation
                    && last.is_some_and(|l| l.generation == generation && l.leader == node)
            });
            if !is_recorded {
                let seen = format!("n{node} opens {key:?} at {generation} with {image:?} on disk");
                self.fail(14, seen);
            }
            self.on_opened_reading(node, *key, generation, journal);
            if key.log == SimLog::GroupCursors {
                self.on_opened_groups(node, *key, journal);
            }
        }
        let invariant = match self.is_handed_over(shard, generation, node) {
            true => 36,
            false => 32,
        };
        self.holds_committed(invariant, node, keys[0], journal.on_disk(keys[0]));
    }

    /// Every committed record at or above the base must be there.
    pub fn holds_committed(
        &mut self,
        invariant: u8,
        node: usize,
        key: LogKey,
        image: Option<&LogImage>,
    ) {
        let Some(committed) = self.replication.committed.get(&key) else {
            return;
        };
        let base = image.map_or(0, |image| image.base).max(committed.base);
        let lost = (base..committed.tail())
            .find(|offset| image.and_then(|image| image.record(*offset)) != committed.get(*offset));
        if let Some(offset) = lost {
            let rank = image.map(LogImage::rank);
            let seen = format!("n{node} lacks committed record {offset} of {key:?}; has {rank:?}");
            self.fail(invariant, seen);
        }
    }

    /// A leader publishes a mark.
    pub fn on_mark(
        &mut self,
        node: usize,
        key: LogKey,
        (generation, mark): (u64, u64),
        replicas: &[usize],
        counted: &[Counted],
        journal: &Journal,
    ) {
        self.replication.counts.marks += 1;
        let durable = journal.durable_tail(key);
        if mark > durable {
            self.fail(
                23,
                format!("n{node} marks {mark} of {key:?}, synced {durable}"),
            );
        }
        let before = self.replication.marks.insert((node, key, generation), mark);
        if before.is_some_and(|before| before > mark) {
            self.fail(
                23,
                format!("n{node} {key:?}: mark {before:?} falls to {mark}"),
            );
        }
        if self
            .replication
            .fenced
            .contains(&(node, key.shard, generation))
        {
            self.fail(
                28,
                format!("n{node} marks {mark} of {key:?} after it was fenced"),
            );
        }
        self.check_majority(node, key, (generation, mark), replicas, counted);
        self.commit(node, key, mark, journal);
    }

    /// A majority has answered at least the mark, and nobody is counted with what it has not answered.
    fn check_majority(
        &mut self,
        node: usize,
        key: LogKey,
        (generation, mark): (u64, u64),
        replicas: &[usize],
        counted: &[Counted],
    ) {
        let empty = BTreeMap::new();
        let answered = self.replication.answered.get(&(key, generation));
        let answered = answered.unwrap_or(&empty);
        let is_there = |at: &&usize| **at != node && answered.get(*at) >= Some(&mark);
        let holders: Vec<usize> = replicas.iter().filter(is_there).copied().collect();
        let is_halted = |at: &usize| counted.iter().any(|c| c.node == *at && c.is_halted);
        let sound = holders.iter().filter(|at| !is_halted(at)).count();
        let is_majority = |followers: usize| (1 + followers) * 2 > replicas.len();
        let said = &self.replication.said;
        let is_guess = |c: &&Counted| {
            let ever = said.get(&(key, generation, c.node)).copied();
            !c.is_halted && c.position > ever
        };
        let invariant = if counted.iter().any(|c| is_guess(&c)) {
            31
        } else if is_majority(sound) {
            return;
        } else if is_majority(holders.len()) {
            27
        } else {
            24
        };
        let seen =
            format!("n{node} marks {mark} of {key:?} at {generation}: {answered:?}, {counted:?}");
        self.fail(invariant, seen);
    }

    fn commit(&mut self, node: usize, key: LogKey, mark: u64, journal: &Journal) {
        let Some(image) = journal.on_disk(key) else {
            return;
        };
        let committed = self.replication.committed.entry(key).or_insert(Committed {
            base: image.base,
            records: Vec::new(),
        });
        if image.base > committed.tail() {
            // A `Leader` shard may trim what its mark has not passed.
            *committed = Committed {
                base: image.base,
                records: Vec::new(),
            };
        }
        let base = image.base.max(committed.base);
        let changed = (base..mark.min(committed.tail()))
            .find(|offset| image.record(*offset) != committed.get(*offset));
        for offset in committed.tail()..mark {
            committed.records.extend(image.record(offset).cloned());
        }
        if let Some(offset) = changed {
            let seen = format!("n{node} commits another record at {offset} of {key:?}");
            self.fail(2, seen);
        }
    }

    /// A message to a follower leaves.
    pub fn on_ship(
        &mut self,
        (node, to): (usize, usize),
        key: LogKey,
        generation: u64,
        body: &ReplicateBody,
        mark: Option<u64>,
        acknowledge: Acknowledge,
    ) {
        if self
            .replication
            .fenced
            .contains(&(node, key.shard, generation))
        {
            let seen =
                format!("n{node} ships {key:?} to n{to} at {generation} after it was fenced");
            self.fail(28, seen);
        }
        let base = match body {
            ReplicateBody::Records { .. } => return,
            ReplicateBody::Bootstrap { base_offset } => *base_offset,
            ReplicateBody::Rebuild { base_offset } => {
                let halt = self.replication.halts.get(&(to, key, generation)).copied();
                let may = matches!(
                    halt,
                    Some(HaltReason::Diverged | HaltReason::NeedsBootstrap)
                );
                if !may {
                    let seen = format!("n{node} rebuilds {key:?} of n{to}, halted for {halt:?}");
                    self.fail(29, seen);
                }
                *base_offset
            }
        };
        let is_main = matches!(key.log, SimLog::Stream | SimLog::Cache);
        let bound = mark.unwrap_or(0).max(self.committed_tail(key));
        if acknowledge == Acknowledge::Quorum && is_main && base > bound {
            let seen = format!("n{node} places {key:?} of n{to} at {base}, mark {bound}");
            self.fail(30, seen);
        }
    }

    pub fn on_ship_answer(&mut self, node: usize, shard: usize, generation: u64, answer: Answered) {
        if let Answered::Refused {
            code: PeerCode::FencedEpoch,
            ..
        } = answer
        {
            self.replication.fenced.insert((node, shard, generation));
        }
    }

    pub fn on_halt(&mut self, node: usize, key: LogKey, generation: u64, reason: HaltReason) {
        self.replication
            .halts
            .insert((node, key, generation), reason);
    }

    /// How far any leader has ever called a log committed.
    pub fn committed_tail(&self, key: LogKey) -> u64 {
        let committed = self.replication.committed.get(&key);
        committed.map_or(0, Committed::tail)
    }

    /// An answer is given because the mark has passed `end`: the end of what was written, or how
    /// far the state had come that was read.
    pub fn on_quorum_release(&mut self, key: LogKey, end: u64, reply: &PeerReply) {
        if let PeerReply::Appended(at) = reply {
            self.acked_quorum += at.last.0 - at.first.0 + 1;
        }
        let committed = self.committed_tail(key);
        if end > committed {
            let seen = format!("{key:?} answers {reply:?} at {end}, committed {committed}");
            self.fail(26, seen);
        }
    }

    /// A log on a disk after a commit group, a crash, or at the end.
    pub fn on_disk(&mut self, node: usize, key: LogKey, image: &LogImage) {
        let before = self.replication.accepted.entry((node, key)).or_default();
        let (was, is) = (*before, image.accepted);
        *before = is;
        if is < was {
            self.fail(
                8,
                format!("n{node} {key:?}: accepted falls from {was} to {is}"),
            );
        }
        let pairs = image.history.windows(2);
        let mut pairs = pairs.map(|pair| (pair[0], pair[1]));
        let ascends = pairs.all(|(a, b)| a.generation < b.generation && a.start <= b.start);
        let within = image
            .history
            .iter()
            .all(|entry| entry.start <= image.tail());
        if !ascends || !within {
            let seen = format!(
                "n{node} {key:?}: history {:?}, tail {}",
                image.history,
                image.tail()
            );
            self.fail(12, seen);
        }
    }

    /// Records lie at or behind the start of their generation.
    pub(super) fn check_labels(&mut self, node: usize, key: LogKey, image: &LogImage) {
        let early = image.generations.iter().enumerate().find(|(index, label)| {
            let offset = image.base + *index as u64;
            let entry = image
                .history
                .iter()
                .find(|entry| entry.generation == **label);
            entry.is_some_and(|entry| offset < entry.start)
        });
        if let Some((index, label)) = early {
            let offset = image.base + index as u64;
            let seen = format!("n{node} {key:?}: {offset} of {label}, {:?}", image.history);
            self.fail(13, seen);
        }
    }
}
