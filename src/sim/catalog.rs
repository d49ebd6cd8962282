//! The catalog of a simulated cluster: shards, assignments, and the files brokers read them from.
//!
//! File semantics: each version is one whole file; the operator writes a version to every broker,
//! which gets it and reads it at its own time, in order or not at all. A generation of a shard has
//! one leader for all time.

use std::collections::BTreeMap;

use super::log::SimLog;
use crate::ids::{Namespace, NodeId, ShardId, ShardKind, StreamName, TenantId};
use crate::wire::internal::{ShardRef, Text};

/// Number of the first file that no operator meant.
const WRONG: usize = 1 << 32;

/// Who leads and who follows, at one generation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assignment {
    pub generation: u64,
    pub leader: usize,
    /// Leader included.
    pub replicas: Vec<usize>,
}

/// What a `Quorum` or `Leader` publish waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Acknowledge {
    Leader,
    Quorum,
}

/// One shard of the simulated catalog.
#[derive(Debug, Clone)]
pub struct Shard {
    pub id: ShardId,
    pub acknowledge: Acknowledge,
}

impl Shard {
    pub fn is_cache(&self) -> bool {
        self.id.kind == ShardKind::Cache
    }

    /// The log that acknowledgements are about.
    pub fn main_log(&self) -> SimLog {
        match self.id.kind {
            ShardKind::Stream => SimLog::Stream,
            ShardKind::Cache => SimLog::Cache,
        }
    }
}

/// All versions of the catalog so far.
#[derive(Debug)]
pub struct SimCatalog {
    pub nodes: Vec<NodeId>,
    pub shards: Vec<Shard>,
    versions: Vec<Vec<Assignment>>,
    /// Files an operator never meant; numbered from [`WRONG`] on.
    wrong: Vec<Vec<Assignment>>,
    leaders: Vec<BTreeMap<u64, usize>>,
}

impl SimCatalog {
    /// Version 0: every shard at generation 0.
    pub fn new(nodes: usize, shards: Vec<Shard>, first: Vec<Assignment>) -> Self {
        let name = |i: usize| NodeId::new(&format!("n{i}"));
        let leaders = first
            .iter()
            .map(|a| BTreeMap::from([(a.generation, a.leader)]))
            .collect();
        Self {
            nodes: (0..nodes).filter_map(|i| name(i).ok()).collect(),
            shards,
            versions: vec![first],
            wrong: Vec::new(),
            leaders,
        }
    }

    /// The newest version's number.
    pub fn newest(&self) -> usize {
        self.versions.len() - 1
    }

    pub fn assignment(&self, version: usize, shard: usize) -> &Assignment {
        &self.file(version)[shard]
    }

    /// What a file says of all shards.
    pub fn file(&self, version: usize) -> &[Assignment] {
        match version.checked_sub(WRONG) {
            None => &self.versions[version],
            Some(at) => &self.wrong[at],
        }
    }

    /// Whether no operator meant that file.
    pub fn is_wrong(&self, version: usize) -> bool {
        version >= WRONG
    }

    /// Adds a file that is none of the operator's versions.
    pub fn add_wrong(&mut self, file: Vec<Assignment>) -> usize {
        self.wrong.push(file);
        WRONG + self.wrong.len() - 1
    }

    pub fn current(&self, shard: usize) -> &Assignment {
        self.assignment(self.newest(), shard)
    }

    /// Whether the shard has followers; no assignment of a run changes that.
    pub fn is_replicated(&self, shard: usize) -> bool {
        self.current(shard).replicas.len() > 1
    }

    /// The one leader a generation ever has.
    pub fn leader_of(&self, shard: usize, generation: u64) -> Option<usize> {
        self.leaders[shard].get(&generation).copied()
    }

    /// Writes a new version in which one shard has moved on by one generation.
    pub fn assign(&mut self, shard: usize, leader: usize, replicas: Vec<usize>) -> usize {
        let mut next = self.versions[self.newest()].clone();
        let generation = next[shard].generation + 1;
        next[shard] = Assignment {
            generation,
            leader,
            replicas,
        };
        self.leaders[shard].insert(generation, leader);
        self.versions.push(next);
        self.newest()
    }

    pub fn node_by_name(&self, name: &str) -> Option<usize> {
        self.nodes.iter().position(|node| node.as_str() == name)
    }

    /// The shard a message names.
    pub fn shard_by_ref(&self, kind: ShardKind, shard: &ShardRef) -> Option<usize> {
        self.shards.iter().position(|s| {
            s.id.kind == kind
                && s.id.shard == shard.shard
                && shard.tenant == s.id.tenant.as_str()
                && shard.namespace == s.id.namespace.as_str()
                && shard.stream == s.id.name.as_str()
        })
    }

    pub fn shard_ref(&self, shard: usize, generation: u64) -> ShardRef {
        let id = &self.shards[shard].id;
        ShardRef {
            tenant: Text::from(&id.tenant),
            namespace: Text::from(&id.namespace),
            stream: Text::from(&id.name),
            shard: id.shard,
            generation: crate::ids::Generation(generation),
        }
    }
}

/// The `index`-th shard of a stream and a cache that share their name.
pub fn shard_id(kind: ShardKind, index: u32) -> ShardId {
    // The literals are names by construction.
    let ok = "a literal that is a name";
    ShardId {
        kind,
        tenant: TenantId::new("t").expect(ok),
        namespace: Namespace::new("ns").expect(ok),
        name: StreamName::new("same").expect(ok),
        shard: index,
    }
}
