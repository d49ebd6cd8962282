//! What a broker answers before it touches a log.
//!
//! Three questions, each with a fixed order of checks: may this forward be applied here
//! ([`admit_forward`]); where does a client's request go ([`route_local`]); may this replicate
//! message be looked at ([`check_replication`]). Nothing here parses, verifies a token or writes.
//!
//! Invariants:
//! * OWN-1: `Serve` only at equal generation, as owner, ready, with an allowing credential.
//! * OWN-2: the credential is looked at last, and only if everything before it passed: who owns a
//!   shard is told to any greeted peer, and a verification is not spent on a misrouted request.
//! * OWN-3: a broker never forwards for a peer.

use crate::ids::{Generation, NodeId};

use super::outcome::{PeerCode, RetryClass, Target};

/// Who leads a shard, as this broker's view has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner<'a> {
    Me,
    Other {
        node: &'a NodeId,
    },
    /// Nobody is assigned.
    Nobody,
}

/// Whether a shard this broker leads can be served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Serving {
    Ready,
    /// The log is being opened or recovered.
    Opening,
    /// The shard is being handed over: its write fence is closed.
    Fenced,
    /// This broker may no longer lead as far as it can prove.
    LeaseLapsed,
    /// A flush failed earlier; final until a restart.
    StorageFailed,
}

/// A shard in this broker's view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShardView<'a> {
    pub owner: Owner<'a>,
    pub generation: Generation,
    /// Looked at only when the owner is this broker.
    pub serving: Serving,
}

/// How busy the shard's core is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Load {
    Normal,
    /// A bounded queue on the way to the log is full.
    Shedding,
}

/// What came of checking the client's credential.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CredentialVerdict {
    Allowed,
    /// A legacy kind, which carries none.
    Missing,
    /// It does not verify: wrong key, expired, wrong tenant.
    Invalid,
    /// It verifies but does not allow this action here.
    NotAllowed,
}

/// What an owner does with a forward.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ForwardAdmission {
    /// Apply it.
    Serve,
    /// Name the owner; the requester decides whether to go there.
    NotLeader(Target),
    /// Refuse with a typed error.
    Refuse {
        code: PeerCode,
        detail: &'static str,
    },
}

/// Decides about a forwarded publish or cache operation.
///
/// `view` is `None` for a shard this broker has never heard of. `me` is this broker.
/// `check_credential` runs only when the answer depends on it.
pub fn admit_forward(
    me: &NodeId,
    view: Option<ShardView<'_>>,
    requested: Generation,
    load: Load,
    check_credential: impl FnOnce() -> CredentialVerdict,
) -> ForwardAdmission {
    let Some(view) = view else {
        return refuse(PeerCode::StaleRoute, "shard not in this broker's view");
    };
    if requested > view.generation {
        return refuse(
            PeerCode::StaleRoute,
            "request names a generation this broker has not reached",
        );
    }
    let owner = match view.owner {
        Owner::Nobody => return refuse(PeerCode::Unavailable, "no owner is assigned"),
        Owner::Me => me,
        Owner::Other { node } => node,
    };
    let is_mine = view.owner == Owner::Me;
    if requested < view.generation || !is_mine {
        return ForwardAdmission::NotLeader(Target {
            node: owner.clone(),
            generation: view.generation,
        });
    }
    if let Some((code, detail)) = serving_refusal(view.serving) {
        return refuse(code, detail);
    }
    match load {
        Load::Normal => {}
        Load::Shedding => return refuse(PeerCode::Overload, "queue full"),
    }
    match check_credential() {
        CredentialVerdict::Allowed => ForwardAdmission::Serve,
        CredentialVerdict::Missing => refuse(PeerCode::Unauthorized, "credential missing"),
        CredentialVerdict::Invalid => refuse(PeerCode::Unauthorized, "credential does not verify"),
        CredentialVerdict::NotAllowed => {
            refuse(PeerCode::Unauthorized, "credential does not allow this")
        }
    }
}

fn refuse(code: PeerCode, detail: &'static str) -> ForwardAdmission {
    ForwardAdmission::Refuse { code, detail }
}

fn serving_refusal(serving: Serving) -> Option<(PeerCode, &'static str)> {
    match serving {
        Serving::Ready => None,
        Serving::Opening => Some((PeerCode::Unavailable, "shard is opening")),
        Serving::Fenced => Some((PeerCode::Unavailable, "shard is moving")),
        Serving::LeaseLapsed => Some((PeerCode::Unavailable, "lease lapsed")),
        Serving::StorageFailed => Some((PeerCode::StorageFailed, "log failed earlier")),
    }
}

/// The names of a forward are checked above the codec: empty ones are malformed.
pub fn names_are_complete(tenant: &str, namespace: &str, name: &str) -> Result<(), &'static str> {
    match (tenant.is_empty(), namespace.is_empty(), name.is_empty()) {
        (true, _, _) => Err("tenant is empty"),
        (false, true, _) => Err("namespace is empty"),
        (false, false, true) => Err("stream or cache name is empty"),
        (false, false, false) => Ok(()),
    }
}

/// Why a client's request goes nowhere; surely nothing was applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RouteRefusal {
    /// Unknown tenant, namespace, stream or cache.
    NotFound,
    /// The shard has no owner.
    NotAssigned,
    /// This broker owns it and cannot serve it now.
    NotServing(Serving),
    /// A bounded queue is full.
    Shedding,
    /// The token does not allow it.
    Forbidden,
}

impl RouteRefusal {
    /// What the client may do about it.
    pub const fn retry_class(self) -> RetryClass {
        match self {
            Self::NotFound | Self::Shedding => RetryClass::RetryAfter,
            Self::NotAssigned => RetryClass::Retry,
            Self::NotServing(Serving::StorageFailed) | Self::Forbidden => RetryClass::Fatal,
            Self::NotServing(
                Serving::Ready | Serving::Opening | Serving::Fenced | Serving::LeaseLapsed,
            ) => RetryClass::Retry,
        }
    }
}

/// Where a client's request goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LocalRoute {
    /// This broker applies it.
    Serve {
        generation: Generation,
    },
    /// Another broker owns the shard: forward, or redirect the client.
    Remote(Target),
    Refuse(RouteRefusal),
}

/// Decides about a client's own request. The permission comes first here, so that a client
/// without it learns nothing about what exists.
pub fn route_local(view: Option<ShardView<'_>>, load: Load, is_allowed: bool) -> LocalRoute {
    if !is_allowed {
        return LocalRoute::Refuse(RouteRefusal::Forbidden);
    }
    let Some(view) = view else {
        return LocalRoute::Refuse(RouteRefusal::NotFound);
    };
    match view.owner {
        Owner::Nobody => LocalRoute::Refuse(RouteRefusal::NotAssigned),
        Owner::Other { node } => LocalRoute::Remote(Target {
            node: node.clone(),
            generation: view.generation,
        }),
        Owner::Me => match (view.serving, load) {
            (Serving::Ready, Load::Normal) => LocalRoute::Serve {
                generation: view.generation,
            },
            (Serving::Ready, Load::Shedding) => LocalRoute::Refuse(RouteRefusal::Shedding),
            (
                serving @ (Serving::Opening
                | Serving::Fenced
                | Serving::LeaseLapsed
                | Serving::StorageFailed),
                _,
            ) => LocalRoute::Refuse(RouteRefusal::NotServing(serving)),
        },
    }
}

/// A shard's replica set in this broker's view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplicaSetView<'a> {
    pub generation: Generation,
    pub leader: Option<&'a NodeId>,
    /// Leader included.
    pub replicas: &'a [NodeId],
}

/// Checks of a replicate message that come after decoding and before its checksum: generation,
/// then membership. They change nothing on disk or in memory.
///
/// `accepted` is the newest generation this broker has ever accepted for the log, from disk.
/// Generation comes before membership so that a new member whose view lags says "retry shortly"
/// rather than "never", and an out-of-date leader is told to stop even by a broker that left.
pub fn check_replication(
    me: &NodeId,
    sender: &str,
    view: Option<ReplicaSetView<'_>>,
    accepted: Option<Generation>,
    requested: Generation,
) -> Result<(), PeerCode> {
    let known = view.map(|v| v.generation).max(accepted);
    if known.is_some_and(|known| requested < known) {
        return Err(PeerCode::FencedEpoch);
    }
    let Some(view) = view else {
        return Err(PeerCode::StaleRoute);
    };
    if requested > view.generation {
        return Err(PeerCode::StaleRoute);
    }
    let i_follow = view.replicas.contains(me) && view.leader != Some(me);
    let sender_leads = view.leader.is_some_and(|leader| leader.as_str() == sender);
    if i_follow && sender_leads {
        Ok(())
    } else {
        Err(PeerCode::Unauthorized)
    }
}

#[cfg(test)]
mod tests;
