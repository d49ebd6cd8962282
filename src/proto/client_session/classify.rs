//! From typed frames to what a stream machine has to know of them.
//!
//! A closed table over all requests of the client protocol. A request this broker does not serve
//! is treated exactly like one it has never heard of.

use crate::wire::client::{ClientOffer, FrameError, Oversize, Request, ToBroker};

/// Where the answer of a publish goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PublishReply {
    /// Unacked: silence, whatever happens.
    Silent,
    /// A binary ack.
    Binary { request_id: u64 },
    /// `publish_ok` or `publish_error`.
    Json { request_id: u64 },
}

/// How a request's answer and refusal behave on its stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Requested {
    /// One of many on a long-lived stream: a refusal leaves the stream open.
    Repeated,
    /// The only one of its stream: a refusal ends it.
    OneShot,
    /// The only one of its stream, and bound to the shard's leader: a broker that does not lead
    /// answers `not_leader`.
    OneShotAtLeader,
}

/// A frame as the stream machine sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Incoming {
    /// With what the client says it can read.
    Auth(ClientOffer),
    Publish(PublishReply),
    Request(Requested),
    /// The width keyed publishes of the stream were routed by; not answered.
    Width,
    /// Well formed, of a type this broker does not serve.
    Unserved {
        request_type: String,
        extension: Option<String>,
        request_id: Option<u64>,
    },
    /// A publish that cannot be done as sent; the frame boundary is intact.
    BadPublish {
        reply: PublishReply,
        why: String,
    },
    /// A publish over the size limit, read to its end and thrown away.
    OversizePublish {
        request_id: u64,
    },
    /// Something unreadable, with the frame boundary intact.
    Unreadable {
        why: String,
    },
    /// The stream cannot be cut into frames any more.
    Unframeable,
}

/// Sorts a decoded frame.
pub fn classify(frame: &ToBroker) -> Incoming {
    match frame {
        ToBroker::Publish(batch) => match (&batch.producer, &batch.ack) {
            (None, None) => Incoming::Publish(PublishReply::Silent),
            (None, Some(ack)) => Incoming::Publish(PublishReply::Binary {
                request_id: ack.request_id,
            }),
            (Some(_), None) => Incoming::BadPublish {
                reply: PublishReply::Silent,
                why: "an idempotent publish must be acked".into(),
            },
            // Every idempotent publish is answered in JSON.
            (Some(_), Some(ack)) => Incoming::BadPublish {
                reply: PublishReply::Json {
                    request_id: ack.request_id,
                },
                why: "idempotent publishes are not served".into(),
            },
        },
        ToBroker::Request(request) => classify_request(request),
    }
}

fn classify_request(request: &Request) -> Incoming {
    match request {
        Request::Auth(auth) => Incoming::Auth(ClientOffer::from_auth(auth)),
        Request::Publish(publish) => json_publish(publish.acked_id()),
        Request::PublishJsonBatch(batch) => json_publish(batch.acked_id()),
        Request::CachePut(_)
        | Request::CacheGet(_)
        | Request::CacheDelete(_)
        | Request::CounterAdd(_)
        | Request::CounterGet(_)
        | Request::StreamShards(_) => Incoming::Request(Requested::Repeated),
        Request::Topology(_) | Request::CacheShards(_) | Request::ShardOwners(_) => {
            Incoming::Request(Requested::OneShot)
        }
        Request::Subscribe(_)
        | Request::GroupPoll(_)
        | Request::GroupAck(_)
        | Request::GroupNack(_)
        | Request::GroupExtend(_)
        | Request::GroupDeadLetter(_)
        | Request::GroupDeadLetters(_)
        | Request::GroupDiscard(_)
        | Request::GroupRedrive(_)
        | Request::GroupSeek(_)
        | Request::GroupDescribe(_)
        | Request::GroupDelete(_) => Incoming::Request(Requested::OneShotAtLeader),
        Request::PublishWidth(_) => Incoming::Width,
        Request::Extension(extension) => Incoming::Unserved {
            request_type: request.type_name().to_owned(),
            extension: Some(extension.name.clone()),
            request_id: extension.request_id,
        },
        Request::Unknown {
            type_name,
            request_id,
        } => unserved(type_name, *request_id),
        Request::PublishIdempotent(publish) => {
            unserved(request.type_name(), Some(publish.request_id))
        }
        Request::PublishIf(publish) => unserved(request.type_name(), Some(publish.request_id)),
        Request::ProducerInit(_)
        | Request::CachePutIf(_)
        | Request::CacheDeleteIf(_)
        | Request::CacheWatch(_)
        | Request::Commit(_)
        | Request::StateGet(_)
        | Request::StreamRead(_)
        | Request::OffsetForTime(_) => unserved(request.type_name(), None),
    }
}

fn json_publish<E: std::fmt::Display>(acked_id: Result<Option<u64>, E>) -> Incoming {
    match acked_id {
        Ok(None) => Incoming::Publish(PublishReply::Silent),
        Ok(Some(request_id)) => Incoming::Publish(PublishReply::Json { request_id }),
        Err(error) => Incoming::Unreadable {
            why: error.to_string(),
        },
    }
}

fn unserved(type_name: &str, request_id: Option<u64>) -> Incoming {
    Incoming::Unserved {
        request_type: type_name.to_owned(),
        extension: None,
        request_id,
    }
}

/// Sorts a whole frame that cannot be used.
pub fn classify_error(error: &FrameError) -> Incoming {
    let why = error.to_string();
    match error {
        FrameError::Publish(publish) => Incoming::BadPublish {
            reply: match publish.request_id {
                Some(request_id) => PublishReply::Binary { request_id },
                None => PublishReply::Silent,
            },
            why,
        },
        FrameError::Json(malformed) => match (malformed.type_name.as_deref(), malformed.request_id)
        {
            (Some("publish" | "publish_batch" | "publish_idempotent"), Some(request_id)) => {
                Incoming::BadPublish {
                    reply: PublishReply::Json { request_id },
                    why,
                }
            }
            (Some(_) | None, _) => Incoming::Unreadable { why },
        },
        FrameError::Flags(_) | FrameError::Direction(_) | FrameError::Body(_) => {
            Incoming::Unreadable { why }
        }
    }
}

/// Sorts a frame over the size limit that was read to its end and thrown away.
pub fn classify_oversize(oversize: &Oversize) -> Incoming {
    match oversize.request_id() {
        Some(request_id) => Incoming::OversizePublish { request_id },
        None => Incoming::Unreadable {
            why: format!("a frame of {} bytes is too large", oversize.declared_bytes),
        },
    }
}
