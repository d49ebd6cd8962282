//! Looking up where a record goes, on the data path: names to shard, leader and core.
//!
//! Lookups do not allocate and hash each name once. One table serves a whole broker, but a
//! core that clones its `Arc`s often should have a table of its own.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::sync::Arc;

use crate::ids::{CoreId, Generation, NodeId, ShardId, ShardKind};
use crate::wire::routing::Routing;

use super::model::{Catalog, Consistency, NodeIdx, NodeInfo, StreamRetention};
use super::placement::core_of;

/// One shard as this broker sees it.
#[derive(Debug, Clone)]
pub struct ShardRoute {
    /// The shard's full name.
    pub shard_id: Arc<ShardId>,
    /// The node that takes writes.
    pub leader: NodeIdx,
    /// Whether that is this node.
    pub is_local: bool,
    /// Whether this node holds the shard without leading it.
    pub is_follower: bool,
    /// The generation of the assignment.
    pub generation: Generation,
    /// The core of this broker that owns the shard if this broker holds it.
    pub core: CoreId,
    /// Every node that holds the shard, leader first.
    pub replicas: Arc<[NodeIdx]>,
}

/// One stream or cache.
#[derive(Debug)]
pub struct StreamRoute {
    /// How a key finds its shard.
    pub routing: Routing,
    /// When a write is acknowledged.
    pub consistency: Consistency,
    /// How long records are kept.
    pub retention: StreamRetention,
    /// The shards, in order; never empty.
    pub shards: Box<[ShardRoute]>,
}

/// The three names a stream or cache is found by.
trait FullName {
    fn parts(&self) -> (ShardKind, [&str; 3]);
}

#[derive(Debug)]
struct StoredName {
    /// Shard 0 of the stream: its names are the key, so no text is stored twice.
    first: Arc<ShardId>,
}

struct LookupName<'a> {
    kind: ShardKind,
    names: [&'a str; 3],
}

impl FullName for StoredName {
    fn parts(&self) -> (ShardKind, [&str; 3]) {
        let id = &self.first;
        let names = [id.tenant.as_str(), id.namespace.as_str(), id.name.as_str()];
        (id.kind, names)
    }
}

impl FullName for LookupName<'_> {
    fn parts(&self) -> (ShardKind, [&str; 3]) {
        (self.kind, self.names)
    }
}

impl Hash for dyn FullName + '_ {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let (kind, names) = self.parts();
        state.write_u8(kind as u8);
        for name in names {
            // The length keeps ("ab", "c") and ("a", "bc") apart.
            state.write_usize(name.len());
            state.write(name.as_bytes());
        }
    }
}

impl PartialEq for dyn FullName + '_ {
    fn eq(&self, other: &Self) -> bool {
        self.parts() == other.parts()
    }
}

impl Eq for dyn FullName + '_ {}

impl Hash for StoredName {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self as &dyn FullName).hash(state);
    }
}

impl PartialEq for StoredName {
    fn eq(&self, other: &Self) -> bool {
        self.parts() == other.parts()
    }
}

impl Eq for StoredName {}

impl<'a> Borrow<dyn FullName + 'a> for StoredName {
    fn borrow(&self) -> &(dyn FullName + 'a) {
        self
    }
}

/// A multiply-rotate hash over words, for maps whose keys come from the operator's file: nobody
/// outside can choose names that collide.
#[derive(Debug, Default)]
pub struct NameHasher(u64);

/// A map by what the operator's file names.
pub type NameMap<K, V> = HashMap<K, V, BuildHasherDefault<NameHasher>>;

impl NameHasher {
    fn word(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(23) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

impl Hasher for NameHasher {
    fn write(&mut self, bytes: &[u8]) {
        let mut words = bytes.chunks_exact(8);
        for chunk in &mut words {
            let mut word = [0; 8];
            word.copy_from_slice(chunk);
            self.word(u64::from_le_bytes(word));
        }
        let mut word = [0; 8];
        let rest = words.remainder();
        word[..rest.len()].copy_from_slice(rest);
        self.word(u64::from_le_bytes(word));
    }

    fn write_u8(&mut self, value: u8) {
        self.word(u64::from(value));
    }

    fn write_usize(&mut self, value: usize) {
        self.word(value as u64);
    }

    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 32)
    }
}

/// A [`Catalog`] as one broker looks things up in it.
#[derive(Debug)]
pub struct RouteTable {
    catalog: Arc<Catalog>,
    me: Option<NodeIdx>,
    cores: u16,
    routes: NameMap<StoredName, StreamRoute>,
}

impl RouteTable {
    /// Builds the table of the broker `me` with `cores` data cores. A broker the catalog does
    /// not name gets a table in which nothing is local.
    pub fn build(catalog: &Arc<Catalog>, me: &NodeId, cores: u16) -> Self {
        let me = catalog.node_by_id(me.as_str());
        let mut routes = HashMap::default();
        routes.reserve(catalog.sharded().len());
        for spec in catalog.sharded() {
            let shards: Box<[ShardRoute]> = spec
                .assignments
                .iter()
                .enumerate()
                .map(|(shard, assignment)| {
                    let shard_id = Arc::new(ShardId {
                        kind: spec.kind,
                        tenant: spec.tenant.clone(),
                        namespace: spec.namespace.clone(),
                        name: spec.name.clone(),
                        shard: shard as u32,
                    });
                    let is_local = Some(assignment.leader()) == me;
                    let holds = me.is_some_and(|me| assignment.replicas.contains(&me));
                    ShardRoute {
                        core: core_of(&shard_id, cores),
                        shard_id,
                        leader: assignment.leader(),
                        is_local,
                        is_follower: holds && !is_local,
                        generation: assignment.generation,
                        replicas: Arc::clone(&assignment.replicas),
                    }
                })
                .collect();
            let Some(first) = shards.first() else {
                continue;
            };
            let first = Arc::clone(&first.shard_id);
            let route = StreamRoute {
                routing: spec.routing,
                consistency: spec.consistency,
                retention: spec.retention,
                shards,
            };
            routes.insert(StoredName { first }, route);
        }
        Self {
            catalog: Arc::clone(catalog),
            me,
            cores,
            routes,
        }
    }

    fn find(&self, kind: ShardKind, names: [&str; 3]) -> Option<&StreamRoute> {
        let name = LookupName { kind, names };
        self.routes.get(&name as &dyn FullName)
    }

    /// The stream of that name.
    pub fn stream(&self, tenant: &str, namespace: &str, name: &str) -> Option<&StreamRoute> {
        self.find(ShardKind::Stream, [tenant, namespace, name])
    }

    /// The cache of that name.
    pub fn cache(&self, tenant: &str, namespace: &str, name: &str) -> Option<&StreamRoute> {
        self.find(ShardKind::Cache, [tenant, namespace, name])
    }

    /// One shard by its full name.
    pub fn shard(&self, id: &ShardId) -> Option<&ShardRoute> {
        let names = [id.tenant.as_str(), id.namespace.as_str(), id.name.as_str()];
        let route = self.find(id.kind, names)?;
        route.shards.get(usize::try_from(id.shard).ok()?)
    }

    /// When a write to a shard is acknowledged.
    pub fn consistency(&self, id: &ShardId) -> Option<Consistency> {
        let names = [id.tenant.as_str(), id.namespace.as_str(), id.name.as_str()];
        Some(self.find(id.kind, names)?.consistency)
    }

    /// Every shard with the stream or cache it belongs to, in no particular order.
    pub fn sharded_routes(&self) -> impl Iterator<Item = (&StreamRoute, &ShardRoute)> {
        let routes = self.routes.values();
        routes.flat_map(|stream| stream.shards.iter().map(move |shard| (stream, shard)))
    }

    /// The stream or cache a shard belongs to.
    pub fn stream_of(&self, id: &ShardId) -> Option<&StreamRoute> {
        let names = [id.tenant.as_str(), id.namespace.as_str(), id.name.as_str()];
        self.find(id.kind, names)
    }

    /// Every shard of every stream and cache, in no particular order.
    pub fn shards(&self) -> impl Iterator<Item = &ShardRoute> {
        self.routes.values().flat_map(|route| route.shards.iter())
    }

    /// One node. `index` must come from this table.
    pub fn node(&self, index: NodeIdx) -> &NodeInfo {
        self.catalog.node(index)
    }

    /// The index of a node id.
    pub fn node_by_id(&self, id: &str) -> Option<NodeIdx> {
        self.catalog.node_by_id(id)
    }

    /// Whether there is such a tenant.
    pub fn tenant_exists(&self, id: &str) -> bool {
        self.catalog.tenant(id).is_some()
    }

    /// This broker, when the catalog names it.
    pub fn me(&self) -> Option<NodeIdx> {
        self.me
    }

    /// The number of data cores the table was built for.
    pub fn cores(&self) -> u16 {
        self.cores
    }

    /// The catalog behind the table.
    pub fn catalog(&self) -> &Arc<Catalog> {
        &self.catalog
    }
}
