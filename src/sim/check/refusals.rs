//! I15, I22: a request that is refused by generation, membership or checksum changes nothing.
//!
//! The judge reads the rules by itself and compares the machine with a copy of it from before the request,
//! so that it does not matter which of the checks a mistaken machine makes too late.

use super::Judge;
use crate::ids::{Generation, NodeId};
use crate::proto::replication::follower::{FollowerAction, FollowerLog, FollowerRequest};
use crate::proto::replication::{ReplicaView, ReplicateBody};
use crate::sim::disk::LogKey;

/// Why a request has to be refused before anything of it counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefusedFor {
    OldGeneration,
    OtherGeneration,
    NotTheLeader,
    NotAFollower,
    Checksum,
}

impl RefusedFor {
    /// The invariant that is broken when it counts all the same.
    const fn invariant(self) -> u8 {
        match self {
            Self::OldGeneration
            | Self::OtherGeneration
            | Self::NotTheLeader
            | Self::NotAFollower => 15,
            Self::Checksum => 22,
        }
    }
}

/// Why the request has to be refused; `None` when it has to be looked at. `accepted` is the highest generation the
/// log has accepted.
pub fn refused_for(
    me: &NodeId,
    view: Option<&ReplicaView>,
    accepted: Generation,
    request: &FollowerRequest,
) -> Option<RefusedFor> {
    if request.generation < accepted {
        return Some(RefusedFor::OldGeneration);
    }
    let Some(view) = view.filter(|view| view.generation == request.generation) else {
        return Some(RefusedFor::OtherGeneration);
    };
    if view.leader.as_str() != &*request.sender {
        return Some(RefusedFor::NotTheLeader);
    }
    if !view.is_follower(me) {
        return Some(RefusedFor::NotAFollower);
    }
    match &request.body {
        ReplicateBody::Records {
            checksum, payloads, ..
        } if payloads.batch_checksum() != *checksum => Some(RefusedFor::Checksum),
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
        why: RefusedFor,
        (before, after): (&FollowerLog, &FollowerLog),
        actions: &[FollowerAction],
    ) {
        self.replication.counts.refused_requests += 1;
        let (was, is) = (before.state(), after.state());
        if !matches!(actions, [FollowerAction::Answer { .. }]) {
            let seen =
                format!("n{node} {key:?}: a request to refuse ({why:?}) leads to {actions:?}");
            self.fail(why.invariant(), seen);
        } else if before != after {
            let seen =
                format!("n{node} {key:?}: a refused request ({why:?}) changes {was:?} to {is:?}");
            self.fail(why.invariant(), seen);
        }
    }
}
