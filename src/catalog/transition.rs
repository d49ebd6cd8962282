//! What a running broker must not be told: changes from one catalog to the next that would
//! let two leaders write one shard, or send a key to another shard than before.

use std::collections::{HashMap, HashSet};

use crate::ids::{Namespace, ShardKind, StreamName, TenantId};

use super::fault::{CatalogError, CatalogErrors};
use super::model::{Assignment, Catalog, NodeIdx, ShardedSpec};

/// Refuses `next` as the successor of `running` when a generation goes down, a leader or the
/// replicas of a shard change without a higher generation, a stream changes its number of
/// shards or its routing, or a stream or cache goes without a higher generation of the file.
pub fn check_transition(running: &Catalog, next: &Catalog) -> Result<(), CatalogErrors> {
    let named = running.sharded.iter().map(|spec| (full_name(spec), spec));
    let before: HashMap<_, &ShardedSpec> = named.collect();
    let mut errors = removal_faults(running, next);
    for spec in &next.sharded {
        let Some(old) = before.get(&full_name(spec)) else {
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

/// A file that is being written, or was cut between two sections, is a good file with fewer streams: only
/// its generation, which stands at its beginning, tells a removal that is meant.
fn removal_faults(running: &Catalog, next: &Catalog) -> Vec<CatalogError> {
    if next.generation > running.generation {
        return Vec::new();
    }
    let kept: HashSet<_> = next.sharded.iter().map(full_name).collect();
    let gone = running
        .sharded
        .iter()
        .filter(|spec| !kept.contains(&full_name(spec)));
    gone.map(|spec| CatalogError {
        file: next.source.clone(),
        line: None,
        cause: format!(
            "{} is gone within generation {} of the file",
            spec.title(),
            running.generation
        ),
        remedy: format!(
            "put it back (a file cut short looks like this: replace it by a rename), or raise the file's \
             generation to {} if it is to be removed",
            running.generation.0.saturating_add(1)
        ),
    })
    .collect()
}

fn full_name(spec: &ShardedSpec) -> (ShardKind, &TenantId, &Namespace, &StreamName) {
    (spec.kind, &spec.tenant, &spec.namespace, &spec.name)
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
