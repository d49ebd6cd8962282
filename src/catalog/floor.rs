//! What a broker must not be told by a file: an assignment older than one it has accepted a leader at.
//!
//! A generation that a log has accepted is on this broker's disk. A file below it is an old file, put back
//! by mistake, or a shard declared anew under an old name: following it would let a leader write that the
//! copies of this cluster refuse for good.

use crate::ids::{Generation, ShardId};

use super::fault::{CatalogError, CatalogErrors};
use super::model::Catalog;

/// Refuses a catalog that assigns a shard at a generation below the one `accepted` names for it.
pub fn check_accepted(
    next: &Catalog,
    accepted: &dyn Fn(&ShardId) -> Option<Generation>,
) -> Result<(), CatalogErrors> {
    let mut errors = Vec::new();
    for spec in &next.sharded {
        for (number, assignment) in spec.assignments.iter().enumerate() {
            let shard = ShardId {
                kind: spec.kind,
                tenant: spec.tenant.clone(),
                namespace: spec.namespace.clone(),
                name: spec.name.clone(),
                shard: number as u32,
            };
            let Some(known) = accepted(&shard).filter(|known| assignment.generation < *known)
            else {
                continue;
            };
            errors.push(CatalogError {
                file: next.source.clone(),
                line: Some(spec.line),
                cause: format!(
                    "shard {number} of {} is at generation {}, but this broker has accepted {known}",
                    spec.title(),
                    assignment.generation
                ),
                remedy: format!(
                    "put the newest file in place, or assign the shard at generation {} or more",
                    known.0.saturating_add(1)
                ),
            });
        }
    }
    match errors.is_empty() {
        true => Ok(()),
        false => Err(CatalogErrors(errors)),
    }
}
