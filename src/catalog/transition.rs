//! What a running broker must not be told: changes from one catalog to the next that would
//! let two leaders write one shard, or send a key to another shard than before.

use std::collections::HashMap;

use super::fault::{CatalogError, CatalogErrors};
use super::model::{Assignment, Catalog, NodeIdx, ShardedSpec};

/// Refuses `next` as the successor of `running` when a generation goes down, a leader or the
/// replicas of a shard change without a higher generation, or a stream changes its number of
/// shards or its routing.
pub fn check_transition(running: &Catalog, next: &Catalog) -> Result<(), CatalogErrors> {
    let key = |spec: &ShardedSpec| {
        let names = (spec.tenant.clone(), spec.namespace.clone());
        (spec.kind, names, spec.name.clone())
    };
    let before: HashMap<_, &ShardedSpec> = running.sharded.iter().map(|s| (key(s), s)).collect();
    let mut errors = Vec::new();
    for spec in &next.sharded {
        let Some(old) = before.get(&key(spec)) else {
            continue;
        };
        let mut report = |cause: String, remedy: String| {
            errors.push(CatalogError {
                file: next.source.clone(),
                line: Some(spec.line),
                cause,
                remedy,
            });
        };
        if old.shards() != spec.shards() {
            report(
                format!(
                    "{} had {} shards and now has {}",
                    spec.title(),
                    old.shards(),
                    spec.shards()
                ),
                "keep the number: records would be looked for in other shards than they are in; \
                 declare a new name instead"
                    .to_string(),
            );
            continue;
        }
        if old.routing != spec.routing {
            let cause = format!("{} changes its routing", spec.title());
            let remedy = "keep it: keys would move to other shards; declare a new name instead";
            report(cause, remedy.to_string());
        }
        let pairs = old.assignments.iter().zip(spec.assignments.iter());
        for (shard, (was, is)) in pairs.enumerate() {
            if let Some((cause, remedy)) = shard_fault((running, was), (next, is)) {
                report(format!("shard {shard} of {} {cause}", spec.title()), remedy);
            }
        }
    }
    if errors.is_empty() {
        Ok(())
    } else {
        Err(CatalogErrors(errors))
    }
}

fn shard_fault(
    (running, was): (&Catalog, &Assignment),
    (next, is): (&Catalog, &Assignment),
) -> Option<(String, String)> {
    let (old, new) = (was.generation.0, is.generation.0);
    if new < old {
        return Some((
            format!("goes back from generation {old} to {new}"),
            format!("use {old} or more: brokers that saw {old} refuse an older one for good"),
        ));
    }
    if new > old {
        return None;
    }
    let name = |catalog: &Catalog, index: NodeIdx| catalog.node(index).node_id.clone();
    let remedy = format!(
        "raise its generation to {} (or the file's, which moves everything), or pin the shard \
         with [[assignment]]",
        old.saturating_add(1)
    );
    let (from, to) = (name(running, was.leader()), name(next, is.leader()));
    if from != to {
        let cause = format!("moves from {from} to {to} within generation {old}");
        return Some((cause, remedy));
    }
    let holders = |catalog: &Catalog, assignment: &Assignment| {
        let mut ids: Vec<_> = assignment
            .replicas
            .iter()
            .map(|i| name(catalog, *i))
            .collect();
        ids.sort();
        ids
    };
    if holders(running, was) != holders(next, is) {
        let cause = format!("changes its replicas within generation {old}");
        return Some((cause, remedy));
    }
    None
}
