//! What brokers are told of the catalog, and what a leader's reports say.

use super::Judge;
use crate::sim::catalog::SimCatalog;
use crate::sim::disk::LogKey;
use crate::sim::reports::Draft;

impl Judge {
    /// A process follows a catalog file, after the one it has followed so far. It answers for the files that it must
    /// not follow; those the operator meant are the operator's.
    pub fn on_view(
        &mut self,
        catalog: &SimCatalog,
        node: usize,
        before: Option<usize>,
        version: usize,
    ) {
        if !catalog.is_wrong(version) {
            return;
        }
        for (shard, is) in catalog.file(version).iter().enumerate() {
            if catalog.leader_of(shard, is.generation) != Some(is.leader) {
                let seen = format!("n{node} is told that {is:?} leads {shard}: a second leader");
                self.fail(33, seen);
            }
            let Some(was) = before.map(|before| catalog.assignment(before, shard)) else {
                continue;
            };
            if is.generation < was.generation {
                let seen = format!("n{node} goes back from {was:?} to {is:?} of {shard}");
                self.fail(34, seen);
            } else if is.generation == was.generation && is.replicas != was.replicas {
                let seen = format!("n{node} goes from {was:?} to {is:?} of {shard} within one");
                self.fail(34, seen);
            }
        }
    }

    /// A leader wants a report stored: whom it names has answered all that it vouches for, and all that
    /// this leader began with.
    pub fn on_report(&mut self, node: usize, key: LogKey, draft: &Draft) {
        let of_leader = (key, draft.generation);
        let began = self
            .replication
            .leaders
            .get(&of_leader)
            .map(|log| log.began);
        let least = draft.mark.max(began.unwrap_or(0));
        let answered = self.replication.answered.get(&of_leader);
        let has_answered =
            |named: &usize| answered.and_then(|answered| answered.get(named)) >= Some(&least);
        if !draft.named.iter().all(has_answered) {
            let seen =
                format!("n{node} {key:?}: {draft:?}, answered {answered:?}, began {began:?}");
            self.fail(25, seen);
        }
    }

    /// A copy is to be made anew while that is the stored report of its leader's generation.
    pub fn check_unnamed(
        &mut self,
        (node, to): (usize, usize),
        key: LogKey,
        report: Option<&Draft>,
    ) {
        if report.is_some_and(|draft| draft.named.contains(&to)) {
            let seen =
                format!("n{node} rebuilds {key:?} of n{to}, which may be promoted: {report:?}");
            self.fail(29, seen);
        }
    }

    /// A mark is published while the engine holds a report of that generation up to `stored`.
    pub fn check_reported(
        &mut self,
        (node, key): (usize, LogKey),
        (generation, mark): (u64, u64),
        stored: Option<u64>,
    ) {
        if stored < Some(mark) {
            let seen =
                format!("n{node} marks {mark} of {key:?} at {generation}, reported {stored:?}");
            self.fail(25, seen);
        }
    }
}
