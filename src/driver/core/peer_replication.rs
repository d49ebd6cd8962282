//! Requests of leaders to their followers: from the wire to the core that owns the shard, and the answer
//! back on the stream the request came on.
//!
//! Only names are looked at here; generation, membership and everything else are judged by the follower's
//! log ([`follower`](super::follower)), on its core, in the order of arrival.
//!
//! A broker that is stopping takes no more of them: a leader that ships without end would keep it forever.
//!
//! Bounds: batches of one connection read and not answered (`PEER_REPLICATION_BYTES`); one more is
//! refused as overload. Requests are counted with all others of the peer.

use std::sync::Arc;

use crate::ids::{CorrelationId, Namespace, Offset, ShardId, ShardKind, StreamName, TenantId};
use crate::proto::outcome::PeerCode;
use crate::proto::ownership::names_are_complete;
use crate::proto::replication::types::kind_of;
use crate::proto::replication::{ReplicaLogKey, ReplicateAnswer, ReplicateBody};
use crate::wire::internal::{
    refusal, replicate_ok_frame, Bootstrap, Kind, Rebuild, Records, ReplicaLog, ShardRef,
};

use super::message::{LaneMsg, LaneReplicate};
use super::Core;
use crate::driver::quic::{ConnId, StreamId};

/// Where the answer to a replicate request goes.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReplicateWaiter {
    conn: ConnId,
    stream: StreamId,
    correlation: CorrelationId,
    kind: Kind,
    bytes: usize,
}

/// A replicate request without its names.
struct Asked {
    log: ReplicaLog,
    kind: Kind,
    correlation: CorrelationId,
    body: ReplicateBody,
}

impl Core {
    pub(super) fn on_records(&mut self, conn: ConnId, stream: StreamId, records: Records) {
        let asked = Asked {
            log: records.log,
            kind: Kind::records(records.log),
            correlation: records.correlation,
            body: ReplicateBody::Records {
                first_offset: records.first_offset.0,
                checksum: records.checksum,
                payloads: records.payloads,
            },
        };
        self.on_replication(conn, stream, &records.shard, asked);
    }

    pub(super) fn on_bootstrap(&mut self, conn: ConnId, stream: StreamId, offer: &Bootstrap) {
        let asked = Asked {
            log: offer.log,
            kind: Kind::bootstrap(offer.log),
            correlation: offer.correlation,
            body: ReplicateBody::Bootstrap {
                base_offset: offer.base_offset.0,
            },
        };
        self.on_replication(conn, stream, &offer.shard, asked);
    }

    pub(super) fn on_rebuild(&mut self, conn: ConnId, stream: StreamId, rebuild: &Rebuild) {
        let asked = Asked {
            log: rebuild.log,
            kind: Kind::ReplicateRebuild,
            correlation: rebuild.correlation,
            body: ReplicateBody::Rebuild {
                base_offset: rebuild.base_offset.0,
            },
        };
        self.on_replication(conn, stream, &rebuild.shard, asked);
    }

    fn on_replication(&mut self, conn: ConnId, stream: StreamId, shard: &ShardRef, asked: Asked) {
        let bytes = match &asked.body {
            ReplicateBody::Records { payloads, .. } => payloads.as_wire().len(),
            ReplicateBody::Bootstrap { .. } | ReplicateBody::Rebuild { .. } => 0,
        };
        let waiter = ReplicateWaiter {
            conn,
            stream,
            correlation: asked.correlation,
            kind: asked.kind,
            bytes,
        };
        if self.is_draining {
            let answer = ReplicateAnswer::refused(PeerCode::Unavailable, "this broker is stopping");
            let waiter = ReplicateWaiter { bytes: 0, ..waiter };
            return self.answer_replicate(waiter, answer);
        }
        let Some(sender) = self.take_replication_bytes(conn, bytes) else {
            let detail = "too many batches of this connection wait";
            let answer = ReplicateAnswer::refused(PeerCode::Overload, detail);
            let waiter = ReplicateWaiter { bytes: 0, ..waiter };
            return self.answer_replicate(waiter, answer);
        };
        let (key, core) = match self.find_replica_log(shard, asked.log) {
            Ok(found) => found,
            Err((code, detail)) => {
                return self.answer_replicate(waiter, ReplicateAnswer::refused(code, detail));
            }
        };
        let request = LaneReplicate {
            ticket: self.replicate_waiters.insert(waiter),
            key,
            sender,
            connection: self.peer_serial(conn),
            generation: shard.generation,
            body: asked.body,
        };
        if core == self.index {
            return self.replicate_here(usize::from(self.index), request);
        }
        let ticket = request.ticket;
        let message = LaneMsg::Replicate(Box::new(request));
        if self.send_request(usize::from(core), message).is_err() {
            let answer = ReplicateAnswer::refused(PeerCode::Overload, "queue full");
            self.finish_replicate(ticket, answer);
        }
    }

    /// The log a request names, and the core that owns its shard.
    fn find_replica_log(
        &self,
        shard: &ShardRef,
        log: ReplicaLog,
    ) -> Result<(ReplicaLogKey, u16), (PeerCode, &'static str)> {
        let names = (
            shard.tenant.as_str(),
            shard.namespace.as_str(),
            shard.stream.as_str(),
        );
        names_are_complete(names.0, names.1, names.2)
            .map_err(|detail| (PeerCode::Malformed, detail))?;
        let sharded = match kind_of(log) {
            ShardKind::Stream => self.routes.stream(names.0, names.1, names.2),
            ShardKind::Cache => self.routes.cache(names.0, names.1, names.2),
        };
        let route = sharded.and_then(|sharded| sharded.shards.get(shard.shard as usize));
        let Some(route) = route else {
            return Err(self.refusal_of_unknown(shard, kind_of(log)));
        };
        let unknown = (PeerCode::StaleRoute, "that log is not known here");
        let key = ReplicaLogKey::new(Arc::clone(&route.shard_id), log).ok_or(unknown)?;
        Ok((key, route.core.0))
    }

    /// A shard the catalog does not name may have been here once: its former leader is told to stop.
    fn refusal_of_unknown(&self, shard: &ShardRef, kind: ShardKind) -> (PeerCode, &'static str) {
        let named = || {
            Some(ShardId {
                kind,
                tenant: TenantId::new(shard.tenant.as_str()).ok()?,
                namespace: Namespace::new(shard.namespace.as_str()).ok()?,
                name: StreamName::new(shard.stream.as_str()).ok()?,
                shard: shard.shard,
            })
        };
        match named().and_then(|shard| self.state.accepted(&shard)) {
            Some(accepted) if shard.generation < accepted => {
                (PeerCode::FencedEpoch, "a newer generation is known here")
            }
            Some(_) | None => (PeerCode::StaleRoute, "that shard is not known here"),
        }
    }

    /// The answer to a request of this core's peers.
    pub(super) fn finish_replicate(&mut self, ticket: u64, answer: ReplicateAnswer) {
        if let Some(waiter) = self.replicate_waiters.remove(ticket) {
            self.answer_replicate(waiter, answer);
        }
    }

    fn answer_replicate(&mut self, waiter: ReplicateWaiter, answer: ReplicateAnswer) {
        let ReplicateWaiter {
            conn,
            stream,
            correlation,
            kind,
            bytes,
        } = waiter;
        self.give_back_replication_bytes(conn, bytes);
        match answer {
            ReplicateAnswer::Ok { durable_offset } => {
                let frame = replicate_ok_frame(correlation, Offset(durable_offset));
                self.send_to_peer(conn, stream, bytes::Bytes::copy_from_slice(&frame));
            }
            ReplicateAnswer::Refused {
                code,
                expected_offset,
                detail,
            } => {
                self.count_peer_refusal(code);
                let offset = Offset(expected_offset);
                let answer = refusal(kind, correlation, code, offset, detail);
                self.answer_peer(conn, stream, &answer);
            }
        }
    }
}
