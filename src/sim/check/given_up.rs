//! What copies held once and gave up, so that none of them vouches for what it never had.

use std::collections::BTreeMap;

use bytes::Bytes;

use super::Judge;
use crate::sim::disk::{Journal, LogImage, LogKey};

/// Records that were given up, by broker, log and offset.
#[derive(Debug, Default)]
pub struct GivenUp {
    records: BTreeMap<(usize, LogKey), BTreeMap<u64, Bytes>>,
    /// Below what each broker has given up of its log.
    bases: BTreeMap<(usize, LogKey), u64>,
}

impl Judge {
    /// A broker is about to give up the head of a log.
    pub fn on_base_raised(&mut self, node: usize, key: LogKey, base: u64, journal: &Journal) {
        let seen = journal.seen(key);
        let records = self.given_up.records.entry((node, key)).or_default();
        let offsets = seen.base()..base.min(seen.tail());
        records.extend(offsets.filter_map(|at| Some((at, seen.record(at)?.clone()))));
        let known = self.given_up.bases.entry((node, key)).or_default();
        *known = base.max(*known);
    }

    /// A copy begins anew somewhere: what it gave up before is nothing it can speak for.
    pub(super) fn forget_given_up(&mut self, node: usize, key: LogKey) {
        self.given_up.records.remove(&(node, key));
        self.given_up.bases.remove(&(node, key));
    }

    /// A copy of a companion changes from `at` on as its leader says. One that gave its head up says the same
    /// only with the records that were written for it: a leader that still has the head, and was not chosen by
    /// this log, may never have had them.
    pub(super) fn keeps_what_stands_for_its_head(
        &mut self,
        node: usize,
        key: LogKey,
        (generation, at): (u64, u64),
        journal: &Journal,
    ) {
        let base = journal.seen(key).base();
        let held = self.readings.stands_for_the_head(key, base);
        let Some(held) = held.filter(|_| !key.log.is_main()) else {
            return;
        };
        let Some(leader) = self.replication.leaders.get(&(key, generation)) else {
            return;
        };
        let by_leader = self.given_up.bases.get(&(leader.node, key)).copied();
        let begins = leader.base.max(by_leader.unwrap_or(0));
        if at < held && begins < base {
            let seen = format!(
                "n{node} {key:?} begins at {base}, is n{}'s from {at} on, which begins at {begins}, and needs all below {held}",
                leader.node
            );
            self.fail(44, seen);
        }
    }

    /// A majority of a small set holds this, and one of them a record that its leader wrote behind it: nothing
    /// else may ever be at those offsets, although no leader has said so.
    pub fn on_chosen(&mut self, key: LogKey, generation: u64, upto: u64) {
        let Some(leader) = self.replication.leaders.get(&(key, generation)) else {
            return;
        };
        let committed = self.replication.committed.entry(key).or_default();
        if committed.tail() < leader.base {
            return;
        }
        let news = committed.tail()..upto.min(leader.tail());
        let records: Vec<Bytes> = news.filter_map(|at| leader.get(at).cloned()).collect();
        committed.extend(records);
    }

    /// A copy that begins higher than its leader's log speaks for the records between, too: it must have held
    /// them. Of what the leader inherited it may never have been given any.
    pub(super) fn held_what_it_gave_up(
        &mut self,
        node: usize,
        key: LogKey,
        (generation, upto): (u64, u64),
        image: &LogImage,
    ) {
        let Some(leader) = self.replication.leaders.get(&(key, generation)) else {
            return;
        };
        let by_leader = self.given_up.bases.get(&(leader.node, key));
        let from = leader.base.max(by_leader.copied().unwrap_or(0));
        let held = self.given_up.records.get(&(node, key));
        let lacks = (from..image.base.min(upto)).find(|offset| {
            match held.and_then(|held| held.get(offset)) {
                Some(record) => leader.get(*offset) != Some(record),
                None => *offset >= leader.began,
            }
        });
        if let Some(offset) = lacks {
            let seen = format!(
                "n{node} {key:?} begins at {}, answers {upto} at {generation} and never held {offset} of its leader",
                image.base
            );
            self.fail(16, seen);
        }
    }
}
