//! From the internal codec's messages to the machines' inputs, and back.
//!
//! Tables only: no decision is made here, and no bytes are seen.

use std::sync::Arc;

use bytes::Bytes;

use super::correlation::Family;
use super::forward::ForwardOp;
use super::handshake::Incoming;
use super::outcome::{Appended, NotLeader, PeerError, Target};
use super::ownership::ForwardAdmission;
use super::peer::Answer;
use crate::ids::{CorrelationId, NodeId, Offset};
use crate::wire::internal::{
    self, CacheOpKind, DecodeError, EncodeError, Inbound, Kind, Message, Refusal, ReplicateRefusal,
    Text,
};

/// What a success carries, whatever was asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PeerReply {
    Appended(Appended),
    /// `None` is a miss, and the answer to every put.
    Cached(Option<Bytes>),
    /// One past the follower's last durable record.
    Durable(Offset),
}

/// An answer as the link takes it; `None` for a request, which no peer may send here.
pub fn answer_of(message: Message) -> Option<(CorrelationId, Answer<PeerReply>)> {
    let correlation = message.correlation();
    let answer = match message {
        Message::HelloOk(hello) => Answer::HelloOk {
            node_id: Box::from(hello.node_id.as_str()),
        },
        Message::ForwardPublishOk {
            first_offset,
            last_offset,
            ..
        } => Answer::PublishOk(PeerReply::Appended(Appended {
            first: first_offset,
            last: last_offset,
        })),
        Message::CacheOk(ok) => Answer::CacheOk(PeerReply::Cached(ok.value)),
        Message::ReplicateOk { durable_offset, .. } => {
            Answer::ReplicateOk(PeerReply::Durable(durable_offset))
        }
        Message::NotLeader(redirect) => redirect_of(&redirect),
        Message::ForwardPublishError(refusal) => Answer::PublishError(error_of(&refusal)),
        Message::CacheError(refusal) => Answer::CacheError(error_of(&refusal)),
        Message::ReplicateError(refusal) => Answer::ReplicateError(replicate_error_of(&refusal)),
        Message::ForwardPublish(_)
        | Message::Hello(_)
        | Message::Records(_)
        | Message::Bootstrap(_)
        | Message::Rebuild(_)
        | Message::CacheOp(_) => return None,
    };
    Some((correlation, answer))
}

fn redirect_of(redirect: &internal::NotLeader) -> Answer<PeerReply> {
    match NodeId::new(redirect.node_id.as_str()) {
        Ok(node) => Answer::NotLeader(NotLeader {
            owner: Target {
                node,
                generation: redirect.generation,
            },
            internal_addr: Arc::from(redirect.advertise_addr.as_str()),
        }),
        Err(_) => Answer::NotLeaderUnnamed,
    }
}

fn error_of(refusal: &Refusal) -> PeerError {
    PeerError {
        code: refusal.code,
        detail: Box::from(refusal.detail.as_str()),
        expected_offset: Offset(0),
    }
}

fn replicate_error_of(refusal: &ReplicateRefusal) -> PeerError {
    PeerError {
        code: refusal.code,
        detail: Box::from(refusal.detail.as_str()),
        expected_offset: refusal.expected_offset,
    }
}

/// What the greeting has to know of something that arrived; `None` when the connection closes
/// anyway.
pub fn greeting_of(inbound: &Inbound) -> Option<Incoming<'_>> {
    match inbound {
        Inbound::Request(Message::Hello(hello)) => Some(Incoming::Hello {
            correlation: hello.correlation,
            node_id: hello.node_id.as_str(),
        }),
        Inbound::Request(_) => Some(Incoming::Request),
        Inbound::Refuse { error, .. } => match error {
            DecodeError::UnknownKind { correlation, .. } => Some(Incoming::UnknownKind {
                correlation: *correlation,
            }),
            DecodeError::Body {
                kind: Kind::Hello,
                correlation,
                ..
            } => Some(Incoming::UndecodableHello {
                correlation: *correlation,
            }),
            DecodeError::Body { .. } => Some(Incoming::Request),
            DecodeError::Fatal(_)
            | DecodeError::Truncated { .. }
            | DecodeError::BytesAfterFrame { .. } => None,
        },
        Inbound::StrayAnswer { .. } => Some(Incoming::Answer),
        Inbound::Close(_) => None,
    }
}

/// The family of a request's kind; `None` for an answer.
pub fn family_of(kind: Kind) -> Option<Family> {
    match kind {
        Kind::Hello => Some(Family::Hello),
        Kind::ForwardPublish | Kind::AuthorizedForwardPublish => Some(Family::Publish),
        Kind::ForwardCacheOp | Kind::AuthorizedForwardCacheOp => Some(Family::Cache),
        Kind::ReplicateRecords
        | Kind::ReplicateCacheRecords
        | Kind::ReplicateGroupRecords
        | Kind::ReplicateDeadLetterRecords
        | Kind::ReplicateCounterRecords => Some(Family::ReplicateRecords),
        Kind::ReplicateBootstrap
        | Kind::ReplicateCacheBootstrap
        | Kind::ReplicateGroupBootstrap
        | Kind::ReplicateDeadLetterBootstrap
        | Kind::ReplicateCounterBootstrap
        | Kind::ReplicateRebuild => Some(Family::ReplicateControl),
        Kind::ForwardPublishOk
        | Kind::ForwardPublishError
        | Kind::NotLeader
        | Kind::HelloOk
        | Kind::ReplicateOk
        | Kind::ReplicateError
        | Kind::ForwardCacheOk
        | Kind::ForwardCacheError => None,
    }
}

/// The operation a forwarded cache request asks for.
pub fn forward_op_of(op: CacheOpKind) -> ForwardOp {
    match op {
        CacheOpKind::Put => ForwardOp::CachePut,
        CacheOpKind::Get => ForwardOp::CacheGet,
        CacheOpKind::Delete => ForwardOp::CacheDelete,
        CacheOpKind::CounterAdd => ForwardOp::CounterAdd,
        CacheOpKind::CounterGet => ForwardOp::CounterGet,
    }
}

/// The answer to a forward that is not served, in the shape of its kind. `owner_addr` finds where
/// the named owner takes internal connections; `None` from the whole means: serve it.
pub fn refusal_of(
    request: Kind,
    correlation: CorrelationId,
    admission: &ForwardAdmission,
    owner_addr: impl FnOnce(&NodeId) -> String,
) -> Result<Option<Message>, EncodeError> {
    match admission {
        ForwardAdmission::Serve => Ok(None),
        ForwardAdmission::NotLeader(owner) => Ok(Some(Message::NotLeader(internal::NotLeader {
            correlation,
            node_id: Text::new(owner.node.as_str())?,
            advertise_addr: Text::new(&owner_addr(&owner.node))?,
            generation: owner.generation,
        }))),
        ForwardAdmission::Refuse { code, detail } => Ok(Some(internal::refusal(
            request,
            correlation,
            *code,
            Offset(0),
            detail,
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::super::outcome::PeerCode;
    use super::*;
    use crate::ids::Generation;

    fn not_leader(node: &str) -> Message {
        Message::NotLeader(internal::NotLeader {
            correlation: CorrelationId(4),
            node_id: Text::new(node).unwrap(),
            advertise_addr: Text::new("192.0.2.1:7000").unwrap(),
            generation: Generation(3),
        })
    }

    #[test]
    fn a_redirect_without_a_usable_name_leads_nowhere() {
        let (_, answer) = answer_of(not_leader("b")).unwrap();
        assert!(matches!(answer, Answer::NotLeader(r) if r.owner.node.as_str() == "b"));
        for name in ["", "not_dns"] {
            let (_, answer) = answer_of(not_leader(name)).unwrap();
            assert_eq!(answer, Answer::NotLeaderUnnamed);
        }
    }

    #[test]
    fn requests_are_not_answers() {
        let hello = Message::Hello(internal::Hello {
            correlation: CorrelationId(1),
            node_id: Text::new("a").unwrap(),
        });
        assert_eq!(answer_of(hello), None);
    }

    /// The link's table and the codec's agree on every pair of request and answer.
    #[test]
    fn both_answer_tables_agree() {
        let mut answers = vec![
            not_leader("b"),
            Message::ForwardPublishOk {
                correlation: CorrelationId(1),
                first_offset: Offset(1),
                last_offset: Offset(0),
            },
            Message::ReplicateOk {
                correlation: CorrelationId(1),
                durable_offset: Offset(0),
            },
            Message::HelloOk(internal::Hello {
                correlation: CorrelationId(1),
                node_id: Text::new("b").unwrap(),
            }),
            Message::CacheOk(internal::CacheOk {
                correlation: CorrelationId(1),
                value: None,
            }),
        ];
        for &code in PeerCode::ALL {
            for kind in [
                Kind::ForwardPublish,
                Kind::ForwardCacheOp,
                Kind::ReplicateRecords,
            ] {
                answers.push(internal::refusal(
                    kind,
                    CorrelationId(1),
                    code,
                    Offset(0),
                    "",
                ));
            }
        }
        let mut compared = 0;
        for &kind in Kind::ALL {
            let Some(family) = family_of(kind) else {
                continue;
            };
            for message in &answers {
                let (_, answer) = answer_of(message.clone()).unwrap();
                let allowed = family.allows(answer.shape());
                assert_eq!(allowed, message.may_answer(kind), "{kind:?} {message:?}");
                compared += 1;
            }
        }
        assert_eq!(compared, 16 * 38);
    }

    #[test]
    fn refusals_take_the_shape_of_their_request() {
        let admission = ForwardAdmission::Refuse {
            code: PeerCode::Overload,
            detail: "queue full",
        };
        let refusal = |kind| {
            refusal_of(kind, CorrelationId(9), &admission, |_| String::new())
                .unwrap()
                .unwrap()
                .kind()
        };
        assert_eq!(
            refusal(Kind::AuthorizedForwardPublish),
            Kind::ForwardPublishError
        );
        assert_eq!(
            refusal(Kind::AuthorizedForwardCacheOp),
            Kind::ForwardCacheError
        );
    }
}
