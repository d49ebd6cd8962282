//! Requests of leaders to their followers, which this broker is not: it keeps no replicas.
//!
//! They are checked as if it did, so that a peer learns what is wrong with its own view first:
//! generation, then membership, then the bytes. What passes all of that is refused as not served,
//! which halts the one log and leaves the link alone.

use crate::catalog::ShardRoute;
use crate::ids::{CorrelationId, NodeId};
use crate::proto::outcome::PeerCode;
use crate::proto::ownership::{
    check_replication, names_are_complete, ReplicaSetView, REPLICATION_NOT_SERVED,
};
use crate::wire::internal::{Kind, Records, ReplicaLog, ShardRef};

use super::Core;
use crate::driver::quic::{ConnId, StreamId};

impl Core {
    pub(super) fn on_records(&mut self, conn: ConnId, stream: StreamId, records: &Records) {
        let count = records.payloads.len() as u64;
        let is_sound = records.checksum == records.payloads.batch_checksum()
            && records.first_offset.0.checked_add(count).is_some();
        let asked = (records.log, &records.shard, Kind::records(records.log));
        self.on_replication(conn, stream, records.correlation, asked, is_sound);
    }

    /// A request of a leader to its follower. `is_sound` says whether its bytes pass their own
    /// checks, which come after those of the view.
    pub(super) fn on_replication(
        &mut self,
        conn: ConnId,
        stream: StreamId,
        correlation: CorrelationId,
        (log, shard, kind): (ReplicaLog, &ShardRef, Kind),
        is_sound: bool,
    ) {
        let (code, detail) = match self.check_leader(conn, log, shard) {
            Err((code, detail)) => (code, detail),
            Ok(()) if !is_sound => (PeerCode::Malformed, "the batch fails its own checks"),
            Ok(()) => REPLICATION_NOT_SERVED,
        };
        self.refuse_peer(conn, stream, kind, correlation, code, detail);
    }

    fn check_leader(
        &self,
        conn: ConnId,
        log: ReplicaLog,
        shard: &ShardRef,
    ) -> Result<(), (PeerCode, &'static str)> {
        let names = (
            shard.tenant.as_str(),
            shard.namespace.as_str(),
            shard.stream.as_str(),
        );
        names_are_complete(names.0, names.1, names.2)
            .map_err(|detail| (PeerCode::Malformed, detail))?;
        let sharded = match log {
            ReplicaLog::Stream | ReplicaLog::GroupCursors | ReplicaLog::GroupDeadLetters => {
                self.routes.stream(names.0, names.1, names.2)
            }
            ReplicaLog::Cache | ReplicaLog::Counters => {
                self.routes.cache(names.0, names.1, names.2)
            }
        };
        let route = sharded.and_then(|sharded| sharded.shards.get(shard.shard as usize));
        let replicas: Vec<NodeId> = route.map_or_else(Vec::new, |route| self.replicas_of(route));
        let view = route.map(|route| ReplicaSetView {
            generation: route.generation,
            leader: replicas.first(),
            replicas: &replicas,
        });
        let sender = self.peer_name(conn);
        check_replication(&self.me, sender, view, None, shard.generation).map_err(|code| {
            let detail = match code {
                PeerCode::FencedEpoch => "a newer generation is known here",
                PeerCode::StaleRoute => "that generation or shard is not known here",
                _ => "not this shard's leader speaking to its follower",
            };
            (code, detail)
        })
    }

    /// Every node that holds a shard, leader first.
    fn replicas_of(&self, route: &ShardRoute) -> Vec<NodeId> {
        let nodes = route.replicas.iter();
        nodes
            .map(|node| self.routes.node(*node).node_id.clone())
            .collect()
    }
}
