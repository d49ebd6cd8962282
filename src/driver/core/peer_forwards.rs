//! Requests other brokers forward to us: is this broker the owner, may the client do it, and what
//! came of it.
//!
//! Ownership first, the credential last; the decision itself is
//! [`admit_forward`](crate::proto::ownership::admit_forward).

use std::sync::Arc;

use bytes::Bytes;

use super::append::AppendWaiter;
use super::cache::CacheWaiter;
use super::message::{AppendRefusal, AppendResult, CacheResult, UnknownWrite};
use super::Core;
use crate::auth::{Action, Resource};
use crate::driver::quic::{ConnId, StreamId};
use crate::ids::CorrelationId;
use crate::metrics;
use crate::proto::cache::CacheRequest;
use crate::proto::convert::forward_op_of;
use crate::proto::outcome::{PeerCode, Target};
use crate::proto::ownership::{
    admit_forward, names_are_complete, CredentialVerdict, ForwardAdmission, Load, Owner, ShardView,
};
use crate::wire::internal::{
    publish_ok_frame, CacheOk, CacheOp, ForwardPublish, Kind, Message, NotLeader, Text,
};

impl Core {
    pub(super) fn on_forwarded_publish(
        &mut self,
        conn: ConnId,
        stream: StreamId,
        publish: ForwardPublish,
    ) {
        let ForwardPublish {
            correlation,
            shard,
            payloads,
            credential,
            ..
        } = publish;
        let kind = match credential {
            Some(_) => Kind::AuthorizedForwardPublish,
            None => Kind::ForwardPublish,
        };
        let names = (
            shard.tenant.as_str(),
            shard.namespace.as_str(),
            shard.stream.as_str(),
        );
        if let Err(detail) = names_are_complete(names.0, names.1, names.2) {
            return self.refuse_peer(conn, stream, kind, correlation, PeerCode::Malformed, detail);
        }
        let routes = Arc::clone(&self.routes);
        let route = routes
            .stream(names.0, names.1, names.2)
            .and_then(|stream| stream.shards.get(shard.shard as usize));
        let resource = Resource::Stream {
            tenant: names.0,
            namespace: names.1,
            stream: names.2,
        };
        let token = credential.as_ref().map(|c| c.as_str());
        let admission = self.admit(route, shard.generation, || {
            (token, Action::StreamPublish, resource)
        });
        match (admission, route) {
            (ForwardAdmission::Serve, Some(route)) => {
                let waiter = AppendWaiter::Peer {
                    conn,
                    stream,
                    correlation,
                    read_at: self.now,
                };
                self.append(
                    &route.shard_id,
                    route.core.0,
                    shard.generation,
                    payloads,
                    waiter,
                );
            }
            (ForwardAdmission::NotLeader(owner), _) => {
                self.answer_not_leader(conn, stream, correlation, &owner);
            }
            (ForwardAdmission::Refuse { code, detail }, _) => {
                self.refuse_peer(conn, stream, kind, correlation, code, detail);
            }
            (ForwardAdmission::Serve, None) => self.metrics.internal_faults.inc(),
        }
    }

    pub(super) fn on_forwarded_cache_op(&mut self, conn: ConnId, stream: StreamId, op: CacheOp) {
        let kind = match op.credential {
            Some(_) => Kind::AuthorizedForwardCacheOp,
            None => Kind::ForwardCacheOp,
        };
        let shard = &op.shard;
        let names = (
            shard.tenant.as_str(),
            shard.namespace.as_str(),
            shard.stream.as_str(),
        );
        if let Err(detail) = names_are_complete(names.0, names.1, names.2) {
            return self.refuse_peer(
                conn,
                stream,
                kind,
                op.correlation,
                PeerCode::Malformed,
                detail,
            );
        }
        let routes = Arc::clone(&self.routes);
        let route = routes
            .cache(names.0, names.1, names.2)
            .and_then(|cache| cache.shards.get(shard.shard as usize));
        let resource = Resource::Cache {
            tenant: names.0,
            namespace: names.1,
            cache: names.2,
        };
        let action = match forward_op_of(op.op).is_write() {
            true => Action::CacheWrite,
            false => Action::CacheRead,
        };
        let token = op.credential.as_ref().map(|c| c.as_str());
        let admission = self.admit(route, shard.generation, || (token, action, resource));
        let correlation = op.correlation;
        match (admission, route) {
            (ForwardAdmission::Serve, Some(route)) => {
                let waiter = CacheWaiter::Peer {
                    conn,
                    stream,
                    correlation,
                };
                match CacheRequest::of_forward(&op) {
                    Ok(request) => {
                        let (shard, generation) = (&route.shard_id, op.shard.generation);
                        self.cache(shard, route.core.0, generation, request, waiter);
                    }
                    Err(failure) => self.finish_cache(waiter, Err(failure)),
                }
            }
            (ForwardAdmission::NotLeader(owner), _) => {
                self.answer_not_leader(conn, stream, correlation, &owner);
            }
            (ForwardAdmission::Refuse { code, detail }, _) => {
                self.refuse_peer(conn, stream, kind, correlation, code, detail);
            }
            (ForwardAdmission::Serve, None) => self.metrics.internal_faults.inc(),
        }
    }

    pub(super) fn answer_peer_cache(
        &mut self,
        conn: ConnId,
        stream: StreamId,
        correlation: CorrelationId,
        result: CacheResult,
    ) {
        match result {
            Ok(reply) => {
                let value = reply.to_wire();
                let answer = Message::CacheOk(CacheOk { correlation, value });
                self.answer_peer(conn, stream, &answer);
            }
            Err(failure) => {
                let kind = Kind::AuthorizedForwardCacheOp;
                let (code, detail) = failure.to_peer();
                self.refuse_peer(conn, stream, kind, correlation, code, detail);
            }
        }
    }

    /// Ownership first, then the credential.
    pub(super) fn admit<'a>(
        &mut self,
        route: Option<&crate::catalog::ShardRoute>,
        requested: crate::ids::Generation,
        ask: impl FnOnce() -> (Option<&'a str>, Action, Resource<'a>),
    ) -> ForwardAdmission {
        let routes = Arc::clone(&self.routes);
        let view = route.map(|route| ShardView {
            owner: match route.is_local {
                true => Owner::Me,
                false => Owner::Other {
                    node: &routes.node(route.leader).node_id,
                },
            },
            generation: route.generation,
            serving: self.serving(route),
        });
        let me = self.me.clone();
        let load = self.load();
        let now_s = self.wall_us / 1_000_000;
        let verifier = &mut self.verifier;
        admit_forward(&me, view, requested, load, || {
            let (token, action, resource) = ask();
            let Some(token) = token else {
                return CredentialVerdict::Missing;
            };
            let tenant = match resource {
                Resource::Stream { tenant, .. }
                | Resource::Group { tenant, .. }
                | Resource::Cache { tenant, .. } => tenant,
                Resource::Cluster => return CredentialVerdict::NotAllowed,
            };
            match verifier.verify(token, tenant, now_s) {
                Err(_) => CredentialVerdict::Invalid,
                Ok(grant) if grant.allows(action, &resource) => CredentialVerdict::Allowed,
                Ok(_) => CredentialVerdict::NotAllowed,
            }
        })
    }

    fn load(&self) -> Load {
        match self.is_draining {
            true => Load::Shedding,
            false => Load::Normal,
        }
    }

    pub(super) fn answer_peer_append(
        &mut self,
        conn: ConnId,
        stream: StreamId,
        correlation: CorrelationId,
        result: AppendResult,
    ) {
        let kind = Kind::AuthorizedForwardPublish;
        let (code, detail) = match result {
            AppendResult::Stored(at) => {
                let frame = publish_ok_frame(correlation, at.first, at.last);
                return self.send_to_peer(conn, stream, Bytes::copy_from_slice(&frame));
            }
            AppendResult::StorageFailed => {
                (PeerCode::StorageFailed, "the write or its flush failed")
            }
            // The one code that is neither retried nor read as "nothing was written".
            AppendResult::Unknown(UnknownWrite::QuorumTimeout) => (
                PeerCode::StorageFailed,
                "stored here, and on no majority in time: the outcome is unknown",
            ),
            AppendResult::Unknown(UnknownWrite::LeadershipLost) => (
                PeerCode::StorageFailed,
                "stored here, and leadership was lost: the outcome is unknown",
            ),
            AppendResult::Refused(AppendRefusal::LogFailed) => {
                (PeerCode::StorageFailed, "the log is closed after a failure")
            }
            AppendResult::Refused(AppendRefusal::Opening) => {
                (PeerCode::Unavailable, "shard is opening")
            }
            AppendResult::Refused(AppendRefusal::Moved) => {
                (PeerCode::Unavailable, "ownership changed meanwhile")
            }
            AppendResult::Refused(AppendRefusal::Overloaded) => {
                (PeerCode::Overload, "the storage queue is full")
            }
            AppendResult::Refused(AppendRefusal::DiskFull) => {
                (PeerCode::Overload, "the disk is full")
            }
            AppendResult::Refused(AppendRefusal::TooLarge) => (
                PeerCode::Malformed,
                "the batch is larger than a commit can be",
            ),
        };
        self.refuse_peer(conn, stream, kind, correlation, code, detail);
    }

    pub(super) fn answer_not_leader(
        &mut self,
        conn: ConnId,
        stream: StreamId,
        correlation: CorrelationId,
        owner: &Target,
    ) {
        let addr = match self.routes.node_by_id(owner.node.as_str()) {
            Some(index) => self.routes.node(index).internal_addr.to_string(),
            None => String::new(),
        };
        self.metrics
            .peer_requests_refused
            .inc(metrics::PeerCode::NotLeader);
        let answer = Message::NotLeader(NotLeader {
            correlation,
            node_id: Text::shortened(owner.node.as_str()),
            advertise_addr: Text::shortened(&addr),
            generation: owner.generation,
        });
        self.answer_peer(conn, stream, &answer);
    }
}
