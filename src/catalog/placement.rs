//! Which nodes hold a shard, and which core of a node owns it.
//!
//! Placement is rendezvous hashing: every node gets a score for the shard, the highest leads,
//! the next ones follow. A node that joins or leaves moves only the shards it wins or loses.
//! The hash is part of the cluster's agreement: changing it moves every shard.

use crate::ids::{CoreId, NodeId, ShardId, ShardKind};

use super::model::NodeIdx;

const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const FNV_PRIME: u64 = 0x0000_0100_0000_01b3;

fn fnv1a(mut hash: u64, bytes: &[u8]) -> u64 {
    for byte in bytes {
        hash = (hash ^ u64::from(*byte)).wrapping_mul(FNV_PRIME);
    }
    hash
}

/// Spreads every input bit over the whole word (the finaliser of splitmix64).
fn mix(mut hash: u64) -> u64 {
    hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^ (hash >> 31)
}

/// The hash of a shard's full name. Names are separated by a byte no UTF-8 text contains.
pub(super) fn shard_hash(kind: ShardKind, names: [&str; 3], shard: u32) -> u64 {
    let kind_byte = match kind {
        ShardKind::Stream => 1u8,
        ShardKind::Cache => 2u8,
    };
    let mut hash = fnv1a(FNV_OFFSET, &[kind_byte]);
    for name in names {
        hash = fnv1a(hash, name.as_bytes());
        hash = fnv1a(hash, &[0xff]);
    }
    mix(fnv1a(hash, &shard.to_be_bytes()))
}

/// The hash of a node id, computed once a node.
pub(super) fn node_hash(node: &NodeId) -> u64 {
    mix(fnv1a(FNV_OFFSET, node.as_str().as_bytes()))
}

/// The `count` best nodes for a shard, best first. Equal scores go to the smaller node id, so
/// the order of the nodes in the file does not matter.
pub(super) fn rank(hash: u64, nodes: &[(u64, &NodeId)], count: usize) -> Vec<NodeIdx> {
    let mut scored: Vec<(u64, &NodeId, NodeIdx)> = nodes
        .iter()
        .enumerate()
        .map(|(at, (node, id))| (mix(hash ^ *node), *id, NodeIdx(at as u16)))
        .collect();
    scored.sort_unstable_by(|a, b| b.0.cmp(&a.0).then_with(|| a.1.cmp(b.1)));
    scored.truncate(count);
    scored.into_iter().map(|(_, _, index)| index).collect()
}

/// The nodes that hold `shard` by default, leader first, `count` of them.
pub fn rank_nodes(shard: &ShardId, nodes: &[NodeId], count: usize) -> Vec<NodeIdx> {
    let names = [
        shard.tenant.as_str(),
        shard.namespace.as_str(),
        shard.name.as_str(),
    ];
    let hash = shard_hash(shard.kind, names, shard.shard);
    let hashed: Vec<(u64, &NodeId)> = nodes.iter().map(|id| (node_hash(id), id)).collect();
    rank(hash, &hashed, count)
}

/// The core of a broker with `cores` cores that owns `shard`. It stays the same for as long as
/// the number of cores does.
pub fn core_of(shard: &ShardId, cores: u16) -> CoreId {
    let names = [
        shard.tenant.as_str(),
        shard.namespace.as_str(),
        shard.name.as_str(),
    ];
    // Mixed once more: taken as it is, the node choice and the core choice would be correlated.
    let hash = mix(shard_hash(shard.kind, names, shard.shard).rotate_left(32));
    CoreId((hash % u64::from(cores.max(1))) as u16)
}
