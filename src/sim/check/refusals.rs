//! I15: a request that is refused by generation, membership or checksum changes nothing.
//!
//! The judge reads the rules by itself and compares the machine with a copy of it from before the request,
//! so that it does not matter which of the checks a mistaken machine makes too late.

use super::Judge;
use crate::ids::{Generation, NodeId};
use crate::proto::replication::follower::{FollowerAction, FollowerLog, FollowerRequest};
use crate::proto::replication::{ReplicaView, ReplicateBody};
use crate::sim::disk::LogKey;

/// Why the request has to be refused before anything of it counts; `None` when it has to be looked at.
/// `accepted` is the highest generation the log has accepted.
pub fn refused_for(
    me: &NodeId,
    view: Option<&ReplicaView>,
    accepted: Generation,
    request: &FollowerRequest,
) -> Option<&'static str> {
    if request.generation < accepted {
        return Some("a generation before the accepted one");
    }
    let Some(view) = view.filter(|view| view.generation == request.generation) else {
        return Some("another generation than the catalog's");
    };
    if view.leader.as_str() != &*request.sender {
        return Some("a sender who does not lead");
    }
    if !view.is_follower(me) {
        return Some("a broker that does not follow");
    }
    match &request.body {
        ReplicateBody::Records {
            checksum, payloads, ..
        } if payloads.batch_checksum() != *checksum => Some("its checksum"),
        ReplicateBody::Records { .. }
        | ReplicateBody::Bootstrap { .. }
        | ReplicateBody::Rebuild { .. } => None,
    }
}

impl Judge {
    /// What a copy at rest made of a request that has to be refused: all it did, and what became of it.
    pub fn on_refused_request(
        &mut self,
        (node, key): (usize, LogKey),
        why: &'static str,
        (before, after): (&FollowerLog, &FollowerLog),
        actions: &[FollowerAction],
    ) {
        self.replication.counts.refused_requests += 1;
        if !matches!(actions, [FollowerAction::Answer { .. }]) {
            let seen = format!("n{node} {key:?} refuses a request for {why}, and does {actions:?}");
            self.fail(15, seen);
        } else if before != after {
            let (before, after) = (before.state(), after.state());
            let seen =
                format!("n{node} {key:?} refuses a request for {why}: {before:?}, {after:?}");
            self.fail(15, seen);
        }
    }
}
