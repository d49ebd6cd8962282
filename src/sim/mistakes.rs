//! Catalog files that must not be followed: an operator's mistakes, and what a running broker makes of them.
//!
//! The decision is the real one: both files are written as a broker reads them, parsed, and compared by
//! [`check_transition`] and [`check_accepted`]. A broker that follows one tells its cores, and the judge sees
//! what they are told.

use std::path::Path;

use super::catalog::{Assignment, SimCatalog};
use super::core::{logs_of_shard, CoreInput};
use super::env::{Event, Fault};
use super::world::World;
use crate::catalog::{
    check_accepted, check_transition, parse_catalog, Catalog, CatalogDraft, DraftAssignment,
    DraftKey, DraftNode, DraftSharded, DraftTenant,
};
use crate::ids::{Generation, ShardId, ShardKind};

/// The runs with such files, in 1000, and how many each has at most.
const RUNS_PER_MILLE: u64 = 250;
const MOST: u64 = 3;
/// When the last of them may come.
const LATEST_US: u64 = 6_000_000;

/// What is wrong with a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mistake {
    /// A shard has another leader, at the same generation.
    AnotherLeader,
    /// A shard has other holders, at the same generation.
    OtherHolders,
    /// A file of some time ago is put back.
    Older,
}

impl World {
    /// Draws when wrong files come in this run.
    pub fn plan_mistakes(&mut self) {
        let mistakes = &mut self.env.random.mistakes;
        if !mistakes.chance(RUNS_PER_MILLE) {
            return;
        }
        for _ in 0..mistakes.between(1, MOST) {
            let at_us = mistakes.between(300_000, LATEST_US);
            let node = mistakes.index(self.env.plan.nodes);
            self.env.queue.push(at_us, Event::WrongFile { node });
        }
    }

    /// A wrong file is put where a running broker reads it. Its right one comes back before it looks again.
    pub fn put_wrong_file(&mut self, node: usize) {
        let view = self.nodes[node].first().and_then(|core| core.view);
        let Some(running) = view.filter(|_| self.is_up(node) && self.env.may_inject) else {
            return;
        };
        let Some(wrong) = self.draw_wrong_file(running) else {
            return;
        };
        self.env.count_fault(Fault::WrongFile);
        let version = self.env.catalog.add_wrong(wrong);
        let is_followed = self.would_follow(node, running, version);
        self.env
            .note(|| format!("n{node} gets the wrong file {version}, followed: {is_followed}"));
        if !is_followed {
            return;
        }
        for core in 0..self.env.plan.cores {
            if let Some(at) = self.core_at(node, core) {
                self.env.to_core(1, at, CoreInput::View(version));
            }
        }
    }

    fn draw_wrong_file(&mut self, running: usize) -> Option<Vec<Assignment>> {
        let kinds = [
            Mistake::AnotherLeader,
            Mistake::OtherHolders,
            Mistake::Older,
        ];
        let catalog = &self.env.catalog;
        let mistakes = &mut self.env.random.mistakes;
        let kind = *mistakes.pick(&kinds);
        let mut shards = catalog.file(running).to_vec();
        let at = mistakes.index(shards.len());
        let nodes = self.env.plan.nodes;
        let Assignment {
            leader, replicas, ..
        } = &mut shards[at];
        match kind {
            Mistake::Older => {
                let older = running.checked_sub(1)?;
                return Some(catalog.file(mistakes.index(older + 1)).to_vec());
            }
            Mistake::AnotherLeader => {
                let other = (*leader + 1 + mistakes.index(nodes - 1)) % nodes;
                if !replicas.contains(&other) {
                    let place = replicas.iter().position(|node| node == leader)?;
                    replicas[place] = other;
                }
                *leader = other;
            }
            Mistake::OtherHolders => {
                let outside = (0..nodes).find(|node| !replicas.contains(node));
                match outside {
                    Some(node) => replicas.push(node),
                    None => replicas.retain(|node| node == leader),
                }
            }
        }
        Some(shards)
    }

    /// What the real rules say.
    fn would_follow(&self, node: usize, running: usize, version: usize) -> bool {
        let (running, next) = (
            written(&self.env.catalog, running),
            written(&self.env.catalog, version),
        );
        let accepted = |id: &ShardId| -> Option<Generation> {
            let at = (0..self.env.catalog.shards.len())
                .find(|at| shard_in_file(&self.env.catalog, *at) == *id)?;
            let owner = &self.nodes[node][at % self.env.plan.cores];
            let logs = logs_of_shard(&self.env, at).into_iter();
            logs.map(|key| Generation(owner.journal.seen(key).accepted()))
                .max()
        };
        check_transition(&running, &next).is_ok() && check_accepted(&next, &accepted).is_ok()
    }
}

/// Each shard is a stream or a cache of its own in the file, so that each has as many holders as it likes.
fn shard_in_file(catalog: &SimCatalog, shard: usize) -> ShardId {
    let mut id = catalog.shards[shard].id.clone();
    let name = format!("{}-{}", id.name, id.shard);
    id.name = crate::ids::StreamName::new(&name).expect("a name with a number is a name");
    id.shard = 0;
    id
}

/// A version as the broker reads it.
fn written(catalog: &SimCatalog, version: usize) -> Catalog {
    let text = draft(catalog, version).to_toml().expect("a draft is TOML");
    let parsed = parse_catalog(Path::new("catalog.toml"), &text, &mut |_| {
        Err(std::io::ErrorKind::NotFound.into())
    });
    parsed.unwrap_or_else(|errors| panic!("a file of the simulator is not one: {errors}"))
}

fn draft(catalog: &SimCatalog, version: usize) -> CatalogDraft {
    let nodes = catalog.nodes.iter().zip(1..);
    let mut draft = CatalogDraft {
        nodes: nodes
            .map(|(id, number): (_, u16)| DraftNode {
                id: id.to_string(),
                client: format!("127.0.0.1:{}", 5000 + number),
                internal: format!("127.0.0.1:{}", 6000 + number),
            })
            .collect(),
        tenants: vec![DraftTenant {
            id: catalog.shards[0].id.tenant.to_string(),
            jwks_file: None,
            keys: vec![DraftKey {
                kid: "k".to_string(),
                x: "A".repeat(43),
            }],
        }],
        ..CatalogDraft::default()
    };
    for shard in 0..catalog.shards.len() {
        let id = shard_in_file(catalog, shard);
        let assignment = catalog.assignment(version, shard);
        let sharded = DraftSharded {
            tenant: id.tenant.to_string(),
            namespace: id.namespace.to_string(),
            name: id.name.to_string(),
            shards: 1,
            replicas: assignment.replicas.len() as u16,
            ..DraftSharded::default()
        };
        let name = |node: &usize| catalog.nodes[*node].to_string();
        draft.assignments.push(DraftAssignment {
            kind: match id.kind {
                ShardKind::Stream => "stream".to_string(),
                ShardKind::Cache => "cache".to_string(),
            },
            tenant: sharded.tenant.clone(),
            namespace: sharded.namespace.clone(),
            name: sharded.name.clone(),
            shard: 0,
            leader: name(&assignment.leader),
            replicas: assignment.replicas.iter().map(name).collect(),
            generation: Some(assignment.generation),
        });
        match id.kind {
            ShardKind::Stream => draft.streams.push(sharded),
            ShardKind::Cache => draft.caches.push(sharded),
        }
    }
    draft
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::catalog::{shard_id, Acknowledge, Shard};

    #[test]
    fn a_version_is_a_file_that_its_successor_may_follow() {
        let shards = vec![
            Shard {
                id: shard_id(ShardKind::Stream, 0),
                acknowledge: Acknowledge::Quorum,
            },
            Shard {
                id: shard_id(ShardKind::Cache, 0),
                acknowledge: Acknowledge::Leader,
            },
        ];
        let held_by = |replicas: &[usize]| Assignment {
            generation: 0,
            leader: replicas[0],
            replicas: replicas.to_vec(),
        };
        let first = vec![held_by(&[0, 1, 2]), held_by(&[1, 2, 0])];
        let mut catalog = SimCatalog::new(4, shards, first);
        let next = catalog.assign(0, 2, vec![2, 0]);
        let (first, next) = (written(&catalog, 0), written(&catalog, next));
        check_transition(&first, &next).expect("the leader may change with the generation");
        check_transition(&next, &first).expect_err("a generation may not go back");
    }
}
