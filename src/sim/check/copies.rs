//! What a follower may do to its copy, and what it may say about it.

use bytes::Bytes;

use super::Judge;
use crate::proto::outcome::PeerCode;
use crate::proto::replication::ReplicateAnswer;
use crate::sim::catalog::SimCatalog;
use crate::sim::disk::{Change, Journal, LogImage, LogKey};

impl Judge {
    /// A follower's copy is about to change.
    pub fn on_follower_change(
        &mut self,
        catalog: &SimCatalog,
        node: usize,
        key: LogKey,
        (generation, is_rebuild): (u64, bool),
        change: &Change,
        journal: &Journal,
    ) {
        if matches!(change, Change::Accept { generation } if *generation <= journal.seen(key).accepted())
        {
            // Known already: asked for to learn when everything before it is durable.
            return;
        }
        let answered_at = self.replication.answered_at.get(&(node, key)).copied();
        if answered_at.is_some_and(|at| at > generation) {
            let seen =
                format!("n{node} {key:?} takes {generation} after answering {answered_at:?}");
            self.fail(10, seen);
        }
        if catalog.leader_of(key.shard, generation) == Some(node) {
            self.fail(
                10,
                format!("n{node} {key:?} follows itself at {generation}"),
            );
        }
        let image = journal.seen(key);
        match change {
            Change::Truncate { to } => {
                let by = (generation, is_rebuild);
                self.check_truncation(node, key, by, *to, journal);
                self.keeps_what_stands_for_its_head(node, key, (generation, *to), journal);
            }
            Change::Place { base } => {
                if image.tail() > image.base() && !is_rebuild {
                    self.fail(
                        21,
                        format!("n{node} {key:?}: a bootstrap at {base} removes records"),
                    );
                }
                if (image.base(), image.tail()) != (*base, *base) {
                    self.forget_copy(node, key);
                }
                self.forget_given_up(node, key);
                self.on_placed(node, key, generation);
            }
            Change::Append { first, records, .. } => {
                self.check_placed(node, key, (generation, *first), records);
                self.keeps_what_stands_for_its_head(node, key, (generation, *first), journal);
            }
            Change::Accept { .. } | Change::Begin { .. } | Change::RaiseBase { .. } => {}
        }
    }

    /// What a follower stores is what its leader has at that very offset.
    fn check_placed(
        &mut self,
        node: usize,
        key: LogKey,
        (generation, first): (u64, u64),
        records: &[Bytes],
    ) {
        let Some(leader) = self.replication.leaders.get(&(key, generation)) else {
            return;
        };
        let stray = (first..)
            .zip(records)
            .find(|(offset, record)| leader.get(*offset).is_some_and(|is| is != *record));
        let Some((offset, record)) = stray else {
            return;
        };
        // Stored before, and now a second time?
        let is_again = (leader.base..offset).any(|at| leader.get(at) == Some(record));
        let seen = format!("n{node} {key:?} at {generation} stores another record at {offset}");
        self.fail(if is_again { 18 } else { 17 }, seen);
    }

    fn check_truncation(
        &mut self,
        node: usize,
        key: LogKey,
        (generation, is_rebuild): (u64, bool),
        to: u64,
        journal: &Journal,
    ) {
        let image = journal.seen(key).image();
        if let Some(image) = image.filter(|_| !is_rebuild) {
            let keep = to.saturating_sub(image.base) as usize;
            let newer = image.generations[keep..].iter().find(|g| **g >= generation);
            if let Some(newer) = newer {
                let seen = format!("n{node} {key:?} at {generation} drops a record of {newer}");
                self.fail(if *newer == generation { 20 } else { 19 }, seen);
            }
            let with_records = image.history.iter().rev().find(|e| e.start < image.tail());
            if with_records.is_none_or(|entry| to < entry.start) {
                let seen =
                    format!("n{node} {key:?} at {generation} cuts to {to}: {with_records:?}");
                self.fail(19, seen);
            }
        }
        let image = journal.seen(key);
        // Behind a difference nothing is what was committed, whatever its bytes: a delete of the same key
        // may have come to lie at the same offset of a suffix that nobody else has.
        let dropped = self.replication.committed.get(&key).and_then(|committed| {
            let first = to.max(image.base()).max(committed.base);
            let record = image.record(first);
            (record.is_some() && record == committed.get(first)).then_some(first)
        });
        if let Some(offset) = dropped {
            let seen = format!("n{node} cuts {key:?} to {to}: {offset} is committed");
            self.fail(3, seen);
        }
        let verified = self.replication.verified.entry((node, key)).or_default();
        verified.1 = verified.1.min(to);
    }

    /// A process has died: what it had been told is forgotten.
    pub(super) fn forget_process(&mut self, node: usize) {
        self.replication.fenced.retain(|(of, _, _)| *of != node);
        self.replication.marks.retain(|(of, _, _), _| *of != node);
    }

    /// What was known of a copy is gone with it.
    pub fn forget_copy(&mut self, node: usize, key: LogKey) {
        self.replication.verified.remove(&(node, key));
        for ((of, _), answered) in &mut self.replication.answered {
            if *of == key {
                answered.remove(&node);
            }
        }
    }

    /// A follower answers.
    pub fn on_follower_answer(
        &mut self,
        catalog: &SimCatalog,
        node: usize,
        key: LogKey,
        (generation, is_damaged, is_rebuild): (u64, bool, bool),
        answer: ReplicateAnswer,
        journal: &Journal,
    ) {
        let on_disk = journal.on_disk(key);
        let accepted = on_disk.map_or(0, |image| image.accepted);
        let is_fencing =
            matches!(answer, ReplicateAnswer::Ok { .. }) || answer.code() == Some(PeerCode::LogGap);
        if is_fencing {
            if accepted < generation {
                let seen =
                    format!("n{node} {key:?} answers {answer:?} at {generation}, A {accepted}");
                self.fail(9, seen);
            }
            let at = self.replication.answered_at.entry((node, key)).or_default();
            *at = (*at).max(generation);
        }
        if is_fencing {
            let named = match answer {
                ReplicateAnswer::Ok { durable_offset } => durable_offset,
                ReplicateAnswer::Refused {
                    expected_offset, ..
                } => expected_offset,
            };
            let said = &mut self.replication.said;
            let said = said.entry((key, generation, node)).or_default();
            *said = named.max(*said);
        }
        let ReplicateAnswer::Ok { durable_offset } = answer else {
            return;
        };
        if is_damaged {
            self.fail(22, format!("n{node} {key:?} takes a damaged batch"));
        }
        if journal.has_failed_log(key) {
            self.fail(
                47,
                format!("n{node} {key:?} acknowledges after a failed sync"),
            );
        }
        if accepted > generation {
            let seen = format!("n{node} {key:?} is Ok at {generation} and has accepted {accepted}");
            self.fail(10, seen);
        }
        let synced = journal.durable_tail(key);
        if durable_offset > synced {
            let seen = format!("n{node} {key:?} answers {durable_offset}, synced {synced}");
            self.fail(16, seen);
        }
        let base = on_disk.map_or(0, |image| image.base);
        if durable_offset < base && !is_rebuild {
            let seen = format!("n{node} {key:?} answers {durable_offset} and begins at {base}");
            self.fail(16, seen);
        }
        self.equals_leader(node, key, (generation, durable_offset), on_disk);
        if let Some(image) = on_disk.filter(|_| !is_rebuild) {
            self.held_what_it_gave_up(node, key, (generation, durable_offset), image);
        }
        if catalog.leader_of(key.shard, generation) != Some(node) {
            let of_generation = self
                .replication
                .answered
                .entry((key, generation))
                .or_default();
            let answered = of_generation.entry(node).or_default();
            // A copy that was given up counts anew.
            *answered = match is_rebuild {
                true => durable_offset,
                false => (*answered).max(durable_offset),
            };
        }
    }

    fn equals_leader(
        &mut self,
        node: usize,
        key: LogKey,
        (generation, upto): (u64, u64),
        image: Option<&LogImage>,
    ) {
        let Some(leader) = self.replication.leaders.get(&(key, generation)) else {
            return self.fail(
                16,
                format!("n{node} {key:?} answers {generation}, led by nobody"),
            );
        };
        let verified = self.replication.verified.entry((node, key)).or_default();
        if verified.0 != generation {
            *verified = (generation, 0);
        }
        let base = image.map_or(0, |image| image.base).max(leader.base);
        let differs = (base.max(verified.1)..upto).find(|offset| {
            let held = image.and_then(|image| image.record(*offset));
            held.is_none() || held != leader.get(*offset)
        });
        verified.1 = verified.1.max(upto);
        if let Some(offset) = differs {
            let tail = leader.tail();
            let seen = format!(
                "n{node} {key:?} answers {upto} at {generation} and differs from its leader (tail {tail}) at {offset}"
            );
            self.fail(16, seen);
        }
    }
}
