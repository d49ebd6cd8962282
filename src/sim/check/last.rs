//! What must be true when a run has healed and drained.

use std::collections::BTreeMap;

use super::{Ended, Judge};
use crate::proto::replication::types::logs_of;
use crate::sim::catalog::{Acknowledge, SimCatalog};
use crate::sim::core::Core;
use crate::sim::disk::{LogImage, LogKey, SimLog};

impl Judge {
    /// Looks at every broker's disks and at every request once more.
    pub fn at_the_end(&mut self, nodes: &[Vec<Core>], catalog: &SimCatalog) {
        for (node, cores) in nodes.iter().enumerate() {
            for core in cores {
                if let Some(left) = core.unsettled() {
                    self.fail(40, format!("n{node} core {} keeps {left}", core.at.core));
                }
                for (key, image) in core.journal.logs_on_disk() {
                    self.check_log(node, *key, image);
                    self.on_disk(node, *key, image);
                    self.check_labels(node, *key, image);
                }
            }
        }
        self.groups_at_the_end(|node, key| image_of(nodes, node, key).cloned());
        self.check_copies(nodes, catalog);
        self.check_requests(nodes, catalog);
    }

    /// No request twice in one log, nothing that was refused, every batch in one piece.
    fn check_log(&mut self, node: usize, key: LogKey, image: &LogImage) {
        let mut places: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
        for (index, record) in image.records.iter().enumerate() {
            let offset = image.base + index as u64;
            if self.readings.own.contains(&(key, offset, record.clone())) {
                continue;
            }
            if let Some(id) = self.request_of(key, record) {
                places.entry(id).or_default().push(offset);
            }
        }
        for (id, offsets) in places {
            let Some(watched) = self.requests.get(&id) else {
                self.fail(2, format!("n{node} {key:?} holds a record nobody sent"));
                continue;
            };
            let batch = match &watched.request.work {
                crate::sim::core::Work::Publish(payloads) => payloads.len(),
                crate::sim::core::Work::Cache(_) => 1,
            };
            let is_refused = watched.ended == Some(Ended::Refused);
            if is_refused {
                let seen = format!("n{node} {key:?} holds refused request {id} at {offsets:?}");
                self.fail(38, seen);
            }
            let first = offsets[0];
            let is_dense = offsets.iter().zip(first..).all(|(is, must)| *is == must);
            if offsets.len() > batch || !is_dense {
                let seen = format!("n{node} {key:?} holds request {id} at {offsets:?}");
                self.fail(18, seen);
            }
        }
    }

    fn check_requests(&mut self, nodes: &[Vec<Core>], catalog: &SimCatalog) {
        let mut failures = Vec::new();
        for (id, watched) in &self.requests {
            let shard = watched.request.shard;
            let key = LogKey {
                shard,
                log: SimLog::Stream,
            };
            match &watched.ended {
                None => failures.push((40, format!("request {id} never ends"))),
                Some(Ended::Stored { node, at }) if at.first_written().is_some() => {
                    let holders: Vec<usize> = match catalog.is_replicated(shard) {
                        false => node.iter().copied().collect(),
                        // What only its leader had acknowledged, a failover may lose.
                        true if catalog.shards[shard].acknowledge == Acknowledge::Leader => {
                            continue
                        }
                        true => catalog.current(shard).replicas.clone(),
                    };
                    let lacks = |holder: &usize| {
                        let image = image_of(nodes, *holder, key);
                        let base = image.map_or(0, |image| image.base);
                        !(at.first.0.max(base)..=at.last.0).all(|offset| {
                            image
                                .and_then(|image| image.record(offset))
                                .and_then(|record| self.request_of(key, record))
                                == Some(*id)
                        })
                    };
                    if let Some(holder) = holders.iter().find(|holder| lacks(holder)) {
                        let seen = format!("request {id}, stored at {at:?}, is not on n{holder}");
                        failures.push((26, seen));
                    }
                }
                Some(
                    Ended::Stored { .. }
                    | Ended::Cached(_)
                    | Ended::Refused
                    | Ended::Indeterminate
                    | Ended::Gone,
                ) => {}
            }
        }
        for (invariant, seen) in failures {
            self.fail(invariant, seen);
        }
    }

    /// Every copy of every log equals its leader's, and holds what was committed.
    fn check_copies(&mut self, nodes: &[Vec<Core>], catalog: &SimCatalog) {
        for shard in 0..catalog.shards.len() {
            if !catalog.is_replicated(shard) {
                continue;
            }
            let assignment = catalog.current(shard).clone();
            for log in logs_of(catalog.shards[shard].id.kind) {
                let key = LogKey {
                    shard,
                    log: SimLog::of(*log),
                };
                let leader = image_of(nodes, assignment.leader, key);
                for replica in &assignment.replicas {
                    let copy = image_of(nodes, *replica, key);
                    let base = leader.map_or(0, |i| i.base).max(copy.map_or(0, |i| i.base));
                    let tails = [leader, copy].map(|i| i.map_or(0, LogImage::tail));
                    if base > tails[0] {
                        // Retention took its copy further than the leader's log goes: there is
                        // nothing to compare before that has grown as far.
                        continue;
                    }
                    let record = |image: Option<&LogImage>, offset| {
                        image.and_then(|image| image.record(offset).cloned())
                    };
                    let differs = (base..tails[0].max(tails[1]))
                        .find(|offset| record(leader, *offset) != record(copy, *offset));
                    if let Some(offset) = differs {
                        let halted = nodes[assignment.leader]
                            .iter()
                            .flat_map(|core| core.halted_replicas(shard))
                            .collect::<Vec<_>>();
                        let seen = format!(
                            "{key:?} of n{replica} differs from n{} at {offset}, tails {tails:?}, {halted:?}",
                            assignment.leader
                        );
                        self.fail(2, seen);
                    }
                    if SimLog::is_main(key.log) {
                        self.holds_committed(2, *replica, key, copy);
                    }
                }
            }
        }
    }
}

fn image_of(nodes: &[Vec<Core>], node: usize, key: LogKey) -> Option<&LogImage> {
    let mut images = nodes[node]
        .iter()
        .filter_map(|core| core.journal.on_disk(key));
    images.next()
}
