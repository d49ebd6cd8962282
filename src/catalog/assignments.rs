//! `[[assignment]]`, and the placement of every shard nobody placed by hand.

use std::collections::HashMap;
use std::sync::Arc;

use crate::ids::{Generation, Namespace, NodeId, ShardKind, StreamName, TenantId};

use super::declared::{choice, title, Declared, FullName, MAX_GENERATION, MAX_SHARDS};
use super::fault::Faults;
use super::model::{Assignment, NodeIdx, NodeInfo, ShardedSpec};
use super::names::named;
use super::placement::{node_hash, rank, shard_hash};
use super::section::{Located, Section};

/// What an [[assignment]] fixes: the leader first, then followers if they were named.
pub(super) struct ByHand {
    pub nodes: Vec<NodeIdx>,
    pub generation: Option<u64>,
    pub line: u32,
}

/// Assignments by place in the list of declared streams and caches, and shard.
pub(super) type ByHandMap = HashMap<(usize, u32), ByHand>;

pub(super) fn read_assignments(
    root: &mut Section,
    faults: &mut Faults,
    declared: &[Declared],
    names: &HashMap<FullName, usize>,
    nodes: &HashMap<NodeId, NodeIdx>,
) -> ByHandMap {
    let mut by_hand = ByHandMap::new();
    for mut section in root.tables(faults, "assignment", "[[assignment]]") {
        let line = section.line;
        let text = section.required_text(faults, "kind", "\"stream\"");
        let kinds = [("stream", ShardKind::Stream), ("cache", ShardKind::Cache)];
        let kind = choice(faults, "kind", text, &kinds);
        let text = section.required_text(faults, "tenant", "\"t1\"");
        let tenant = named(faults, text, TenantId::new);
        let text = section.required_text(faults, "namespace", "\"default\"");
        let namespace = named(faults, text, Namespace::new);
        let text = section.required_text(faults, "name", "\"events\"");
        let name = named(faults, text, StreamName::new);
        let shard = section.number(faults, "shard", 0..=MAX_SHARDS - 1);
        let generation = section.number(faults, "generation", 0..=MAX_GENERATION);
        let leader = section.required_text(faults, "leader", "\"broker-1\"");
        let replicas = section.text_list(faults, "replicas");
        section.finish(faults);
        let holders = read_holders(faults, leader, replicas.as_deref(), nodes);
        let (Some(kind), Some(tenant), Some(namespace), Some(name)) =
            (kind, tenant, namespace, name)
        else {
            continue;
        };
        let full_name = (kind, tenant, namespace, name);
        let Some(&at) = names.get(&full_name) else {
            let cause = format!("[[assignment]] names {}", title(&full_name));
            faults.at(line, cause, "declare it, or correct the names");
            continue;
        };
        let spec = &declared[at];
        let shard = shard.map_or(0, |found| found.value as u32);
        check_assignment(
            faults,
            line,
            spec,
            shard,
            holders.as_deref(),
            replicas.is_some(),
        );
        let Some(nodes) = holders else { continue };
        let entry = ByHand {
            nodes,
            generation: generation.map(|found| found.value),
            line,
        };
        if let Some(first) = by_hand.insert((at, shard), entry) {
            let cause = format!("shard {shard} of {} is assigned again", spec.title());
            let remedy = format!("remove it or the one on line {}", first.line);
            faults.at(line, cause, remedy);
        }
    }
    by_hand
}

fn check_assignment(
    faults: &mut Faults,
    line: u32,
    spec: &Declared,
    shard: u32,
    holders: Option<&[NodeIdx]>,
    replicas_named: bool,
) {
    if shard >= spec.shards {
        let cause = format!("{} has no shard {shard}", spec.title());
        let remedy = format!("use a shard from 0 to {}", spec.shards - 1);
        faults.at(line, cause, remedy);
    }
    let count = holders.map_or(0, <[NodeIdx]>::len);
    if replicas_named && holders.is_some() && count != usize::from(spec.replicas) {
        let want = spec.replicas;
        let cause = format!("{count} nodes hold shard {shard} of {}", spec.title());
        let remedy = format!("name {want} with the leader, or change its replicas = {want}");
        faults.at(line, cause, remedy);
    }
}

/// The nodes of an assignment, leader first. The leader may be listed among the replicas.
fn read_holders(
    faults: &mut Faults,
    leader: Option<Located<&str>>,
    replicas: Option<&[Located<&str>]>,
    nodes: &HashMap<NodeId, NodeIdx>,
) -> Option<Vec<NodeIdx>> {
    let mut find = |found: &Located<&str>| {
        let index = nodes.get(found.value).copied();
        if index.is_none() {
            let cause = format!("node {:?} is not declared", found.value);
            faults.at(
                found.line,
                cause,
                "add a [[node]] with that id, or correct it",
            );
        }
        index
    };
    let leader = find(&leader?)?;
    let mut holders = vec![leader];
    let mut twice = Vec::new();
    for found in replicas.unwrap_or_default() {
        let Some(index) = find(found) else { continue };
        if !holders.contains(&index) {
            holders.push(index);
        } else if index != leader {
            twice.push(found);
        }
    }
    for found in twice {
        let cause = format!("node {:?} is named twice", found.value);
        faults.at(found.line, cause, "name every replica once");
    }
    Some(holders)
}

/// Gives every shard its nodes: those named by hand, then the best ranked.
pub(super) fn place(
    declared: Vec<Declared>,
    nodes: &[NodeInfo],
    mut by_hand: ByHandMap,
    default_generation: u64,
) -> Vec<ShardedSpec> {
    let hashed: Vec<(u64, &NodeId)> = nodes
        .iter()
        .map(|node| (node_hash(&node.node_id), &node.node_id))
        .collect();
    let specs = declared.into_iter().enumerate();
    specs
        .map(|(at, spec)| {
            let names = [
                spec.tenant.as_str(),
                spec.namespace.as_str(),
                spec.name.as_str(),
            ];
            let count = usize::from(spec.replicas);
            let spec_generation = spec.generation.unwrap_or(default_generation);
            let assignments = (0..spec.shards)
                .map(|shard| {
                    let ranked = rank(shard_hash(spec.kind, names, shard), &hashed, nodes.len());
                    let fixed = by_hand.remove(&(at, shard));
                    let generation = fixed.as_ref().and_then(|hand| hand.generation);
                    let mut holders = fixed.map_or_else(Vec::new, |hand| hand.nodes);
                    for candidate in ranked {
                        if holders.len() >= count {
                            break;
                        }
                        if !holders.contains(&candidate) {
                            holders.push(candidate);
                        }
                    }
                    Assignment {
                        replicas: Arc::from(holders),
                        generation: Generation(generation.unwrap_or(spec_generation)),
                    }
                })
                .collect();
            ShardedSpec {
                kind: spec.kind,
                tenant: spec.tenant,
                namespace: spec.namespace,
                name: spec.name,
                routing: spec.routing,
                replicas: spec.replicas,
                consistency: spec.consistency,
                retention: spec.retention,
                assignments,
                line: spec.line,
            }
        })
        .collect()
}
