//! What a forward sends and what its answer means: the same for every owner it is tried at.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};

use crate::ids::{CorrelationId, ShardId};
use crate::limits::MAX_STR_BYTES;
use crate::proto::cache::{CacheReply, CacheRequest};
use crate::proto::convert::PeerReply;
use crate::proto::correlation::Family;
use crate::proto::forward::ForwardOp;
use crate::proto::outcome::{
    Appended, ForwardKind, IndeterminateCause, Outcome, Target, UnknownCause,
};
use crate::wire::internal::{
    encode_into, forward_publish_parts_in, AckMode, CacheOp, Credential, EncodeError, Message,
    Payloads, ShardRef, Text,
};

use super::client::{ClientCache, ClientPublish};
use super::forward_orders::OrderKey;

/// What is sent, whoever the owner turns out to be.
pub(super) struct ForwardBody {
    pub shard_id: Arc<ShardId>,
    pub credential: Credential,
    /// Equal for the requests of one client stream, which must stay in order.
    pub order_key: u64,
    /// The forward before it on that client stream; while it is unanswered both use one peer stream.
    pub previous: Option<u64>,
    pub work: ForwardWork,
}

/// What the owner is asked to do, and the client that waits for it.
pub(super) enum ForwardWork {
    Publish {
        ack: AckMode,
        payloads: Payloads,
        client: Box<ClientPublish>,
    },
    Cache {
        request: CacheRequest,
        client: Box<ClientCache>,
    },
}

impl ForwardWork {
    pub fn op(&self) -> ForwardOp {
        match self {
            Self::Publish { .. } => ForwardOp::Publish,
            Self::Cache { request, .. } => request.forward_op(),
        }
    }

    pub fn family(&self) -> Family {
        match self {
            Self::Publish { .. } => Family::Publish,
            Self::Cache { .. } => Family::Cache,
        }
    }

    /// Bytes of the frame besides names and credential.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Publish { payloads, .. } => payloads.as_wire().len(),
            Self::Cache { request, .. } => request.held_bytes(),
        }
    }
}

impl ForwardBody {
    /// The client stream and shard whose order it belongs to; cache operations have none.
    pub fn order(&self) -> Option<OrderKey> {
        match &self.work {
            ForwardWork::Publish { client, .. } => {
                Some((client.conn, client.stream, Arc::clone(&self.shard_id)))
            }
            ForwardWork::Cache { .. } => None,
        }
    }

    /// Whether the internal wire can say it: names and keys are bounded there.
    pub fn fits_wire(&self) -> bool {
        let id = &self.shard_id;
        let key = match &self.work {
            ForwardWork::Publish { .. } => 0,
            ForwardWork::Cache { request, .. } => request.key.len(),
        };
        let names = [id.tenant.as_str(), id.namespace.as_str(), id.name.as_str()];
        key <= MAX_STR_BYTES && names.iter().all(|name| name.len() <= MAX_STR_BYTES)
    }

    fn shard_ref(&self, target: &Target) -> Result<ShardRef, EncodeError> {
        Ok(ShardRef {
            tenant: Text::new(self.shard_id.tenant.as_str())?,
            namespace: Text::new(self.shard_id.namespace.as_str())?,
            stream: Text::new(self.shard_id.name.as_str())?,
            shard: self.shard_id.shard,
            generation: target.generation,
        })
    }

    /// The frame for `target`, in pieces that are sent one behind the other.
    pub fn frame(
        &self,
        scratch: &mut BytesMut,
        correlation: CorrelationId,
        target: &Target,
        kind: ForwardKind,
    ) -> Result<[Bytes; 3], EncodeError> {
        let shard = self.shard_ref(target)?;
        let credential = match kind {
            ForwardKind::Authorized => Some(&self.credential),
            ForwardKind::Legacy => None,
        };
        match &self.work {
            ForwardWork::Publish { ack, payloads, .. } => {
                forward_publish_parts_in(scratch, correlation, &shard, *ack, payloads, credential)
            }
            ForwardWork::Cache { request, .. } => {
                let (op, ttl_ms, value) = request.wire_parts();
                let message = Message::CacheOp(CacheOp {
                    correlation,
                    shard,
                    op,
                    key: Text::new(&request.key)?,
                    ttl_ms,
                    value,
                    credential: credential.cloned(),
                });
                encode_into(&message, scratch)?;
                Ok([scratch.split().freeze(), Bytes::new(), Bytes::new()])
            }
        }
    }
}

/// A publish is answered with offsets; the link has refused any other family of answer.
pub(super) fn appended(outcome: Outcome<PeerReply>) -> Outcome<Appended> {
    narrow(outcome, |reply| match reply {
        PeerReply::Appended(at) => Some(at),
        PeerReply::Cached(_) | PeerReply::Durable(_) => None,
    })
}

pub(super) fn cached(op: ForwardOp, outcome: Outcome<PeerReply>) -> Outcome<CacheReply> {
    narrow(outcome, |reply| match reply {
        PeerReply::Cached(value) => CacheReply::of_wire(op, value),
        PeerReply::Appended(_) | PeerReply::Durable(_) => None,
    })
}

/// An answer that makes no sense for its request proves nothing about it.
fn narrow<R>(outcome: Outcome<PeerReply>, read: impl FnOnce(PeerReply) -> Option<R>) -> Outcome<R> {
    match outcome {
        Outcome::Done { reply, owner } => match read(reply) {
            Some(reply) => Outcome::Done { reply, owner },
            None => {
                Outcome::Indeterminate(IndeterminateCause::Unknown(UnknownCause::ProtocolViolation))
            }
        },
        Outcome::Refused(refused) => Outcome::Refused(refused),
        Outcome::Indeterminate(cause) => Outcome::Indeterminate(cause),
    }
}
