//! Cache and counter requests of clients: checked, done here or at the owner, answered.
//!
//! Permission before existence, as for everything else. The answer repeats the request's id and
//! scope, and a miss is told apart from an empty value.

use std::num::NonZeroU64;
use std::rc::Rc;
use std::sync::Arc;

use crate::auth::{Action, Resource};
use crate::catalog::RouteTable;
use crate::limits::{MAX_CACHE_KEY_BYTES, MAX_RECORD_BYTES};
use crate::proto::cache::{CacheFailure, CacheReply, CacheRequest, Operation};
use crate::proto::client_code::{invalid, of_indeterminate, of_refused, of_route_refusal};
use crate::proto::client_session::Requested;
use crate::proto::forward::ForwardOp;
use crate::proto::outcome::{Outcome, PeerCode, Refused};
use crate::proto::ownership::{route_local, Load, LocalRoute, Owner, RouteRefusal, ShardView};
use crate::wire::client::messages::{CacheOk, CacheValue, CounterValue, PlainOk};
use crate::wire::client::{Answer, Blob, ErrorCode, Refusal, Request};
use crate::wire::routing::{shard_for_key, Routing};

use super::super::cache::CacheWaiter;
use super::super::forward_body::{ForwardBody, ForwardWork};
use super::super::message::CacheResult;
use super::auth::Identity;
use super::publish::order_key;
use super::Core;
use crate::driver::quic::{ConnId, StreamId};

const TTL_OF_ZERO: &str = "ttl_ms 0 would expire at once; leave it out for no expiry";

/// A cache or counter request taken from a client and not answered yet.
pub(in crate::driver::core) struct ClientCache {
    conn: ConnId,
    stream: StreamId,
    class: Requested,
    op: ForwardOp,
    tenant_id: String,
    namespace: String,
    cache: String,
    key: Arc<str>,
    request_id: Option<u64>,
    bytes: usize,
}

/// A request whichever message it came in.
struct Asked {
    tenant_id: String,
    namespace: String,
    cache: String,
    request_id: Option<u64>,
    request: CacheRequest,
}

impl Asked {
    fn of(request: Request) -> Result<Self, Refusal> {
        let (scope, key, request_id, operation) = match request {
            Request::CachePut(m) => {
                // The internal wire has no "expired at once": its zero is "never".
                let ttl_ms = match m.ttl_ms.map(NonZeroU64::new) {
                    Some(None) => return Err(invalid(TTL_OF_ZERO)),
                    Some(ttl_ms) => ttl_ms,
                    None => None,
                };
                let value = m.value.0;
                let operation = Operation::Put { value, ttl_ms };
                let scope = (m.tenant_id, m.namespace, m.cache);
                (scope, m.key, m.request_id, operation)
            }
            Request::CacheGet(m) => {
                let scope = (m.tenant_id, m.namespace, m.cache);
                (scope, m.key, m.request_id, Operation::Get)
            }
            Request::CacheDelete(m) => {
                let scope = (m.tenant_id, m.namespace, m.cache);
                (scope, m.key, m.request_id, Operation::Delete)
            }
            Request::CounterAdd(m) => {
                let scope = (m.tenant_id, m.namespace, m.cache);
                let operation = Operation::CounterAdd { delta: m.delta };
                (scope, m.key, Some(m.request_id), operation)
            }
            Request::CounterGet(m) => {
                let scope = (m.tenant_id, m.namespace, m.cache);
                (scope, m.key, Some(m.request_id), Operation::CounterGet)
            }
            _ => return Err(invalid("not a cache request")),
        };
        let (tenant_id, namespace, cache) = scope;
        Ok(Self {
            tenant_id,
            namespace,
            cache,
            request_id,
            request: CacheRequest {
                key: Arc::from(key),
                operation,
            },
        })
    }

    fn check_sizes(&self) -> Result<(), Refusal> {
        let (key, held) = (self.request.key.len(), self.request.held_bytes());
        if key > MAX_CACHE_KEY_BYTES {
            let why = format!("a key may have at most {MAX_CACHE_KEY_BYTES} bytes");
            return Err(Refusal::new(ErrorCode::LimitExceeded, why));
        }
        if held > MAX_RECORD_BYTES as usize {
            let why = format!("key and value may have at most {MAX_RECORD_BYTES} bytes");
            return Err(Refusal::new(ErrorCode::LimitExceeded, why));
        }
        Ok(())
    }
}

impl Core {
    pub(super) fn on_cache_request(
        &mut self,
        conn: ConnId,
        stream: StreamId,
        identity: &Rc<Identity>,
        class: Requested,
        request: Request,
    ) {
        let routes = Arc::clone(&self.routes);
        let checked = Asked::of(request).and_then(|asked| {
            let shard = self.check_cache(&routes, identity, &asked)?;
            Ok((asked, shard))
        });
        let (asked, shard) = match checked {
            Ok(checked) => checked,
            Err(refusal) => return self.refuse(conn, stream, class, refusal),
        };
        let bytes = asked.request.held_bytes();
        if let Some(client) = self.clients.get_mut(&conn) {
            client.in_flight_bytes += bytes;
        }
        let taken = Box::new(ClientCache {
            conn,
            stream,
            class,
            op: asked.request.forward_op(),
            tenant_id: asked.tenant_id,
            namespace: asked.namespace,
            cache: asked.cache,
            key: Arc::clone(&asked.request.key),
            request_id: asked.request_id,
            bytes,
        });
        match shard {
            (shard, LocalRoute::Serve { generation }) => {
                let waiter = CacheWaiter::Client(taken);
                self.cache(
                    &shard.shard_id,
                    shard.core.0,
                    generation,
                    asked.request,
                    waiter,
                );
            }
            (shard, LocalRoute::Remote(target)) => {
                let body = ForwardBody {
                    shard_id: Arc::clone(&shard.shard_id),
                    credential: identity.credential.clone(),
                    order_key: order_key(conn, stream),
                    previous: None,
                    work: ForwardWork::Cache {
                        request: asked.request,
                        client: taken,
                    },
                };
                self.start_forward(target, body);
            }
            (_, LocalRoute::Refuse(refusal)) => {
                self.settle_cache(*taken, Err(of_route_refusal(refusal)));
            }
        }
    }

    /// Permission, existence, sizes, owner: in that order.
    fn check_cache<'r>(
        &self,
        routes: &'r RouteTable,
        identity: &Identity,
        asked: &Asked,
    ) -> Result<(&'r crate::catalog::ShardRoute, LocalRoute), Refusal> {
        let resource = Resource::Cache {
            tenant: &asked.tenant_id,
            namespace: &asked.namespace,
            cache: &asked.cache,
        };
        let action = match asked.request.forward_op().is_write() {
            true => Action::CacheWrite,
            false => Action::CacheRead,
        };
        if !identity.grant.allows(action, &resource) {
            return Err(of_route_refusal(RouteRefusal::Forbidden));
        }
        let route = routes
            .cache(&asked.tenant_id, &asked.namespace, &asked.cache)
            .ok_or_else(|| of_route_refusal(RouteRefusal::NotFound))?;
        asked.check_sizes()?;
        let key = asked.request.key.as_bytes();
        let shard = shard_for_key(Some(key), route.shards.len() as u32, Routing::Modulo);
        let shard = route
            .shards
            .get(shard as usize)
            .ok_or_else(|| of_route_refusal(RouteRefusal::NotAssigned))?;
        let view = ShardView {
            owner: match shard.is_local {
                true => Owner::Me,
                false => Owner::Other {
                    node: &routes.node(shard.leader).node_id,
                },
            },
            generation: shard.generation,
            serving: self.serving(shard),
        };
        Ok((shard, route_local(Some(view), Load::Normal, true)))
    }

    /// The answer to an operation done on this broker.
    pub(in crate::driver::core) fn answer_local_cache(
        &mut self,
        client: ClientCache,
        result: CacheResult,
    ) {
        let is_write = client.op.is_write();
        self.settle_cache(client, result.map_err(|why| why.to_client(is_write)));
    }

    /// The answer to a forwarded operation, from the owner's answer or the lack of one.
    pub(in crate::driver::core) fn answer_forwarded_cache(
        &mut self,
        client: ClientCache,
        outcome: Outcome<CacheReply>,
    ) {
        let result = match outcome {
            Outcome::Done { reply, .. } => Ok(reply),
            Outcome::Refused(Refused::Peer(error))
                if error.code == PeerCode::Malformed && client.op == ForwardOp::CounterAdd =>
            {
                // The delta was well formed: what is left is its sum.
                Err(CacheFailure::Overflow.to_client(true))
            }
            Outcome::Refused(refused) => Err(of_refused(&refused)),
            Outcome::Indeterminate(cause) => Err(of_indeterminate(client.op, cause)),
        };
        self.settle_cache(client, result);
    }

    fn settle_cache(&mut self, client: ClientCache, result: Result<CacheReply, Refusal>) {
        let (conn, stream, bytes) = (client.conn, client.stream, client.bytes);
        match result {
            Ok(reply) => {
                self.metrics.cache_requests.inc();
                self.answer(conn, stream, answer_of(client, reply));
            }
            Err(refusal) => self.refuse(conn, stream, client.class, refusal),
        }
        if let Some(client) = self.clients.get_mut(&conn) {
            client.in_flight_bytes = client.in_flight_bytes.saturating_sub(bytes);
        }
        self.resume_paused(conn);
    }
}

fn answer_of(client: ClientCache, reply: CacheReply) -> Answer {
    match (reply, client.request_id) {
        (CacheReply::Stored, Some(request_id)) => CacheOk { request_id }.into(),
        (CacheReply::Stored, None) => PlainOk {}.into(),
        (CacheReply::Value(value), request_id) => CacheValue {
            tenant_id: client.tenant_id,
            namespace: client.namespace,
            cache: client.cache,
            key: client.key.as_ref().to_owned(),
            value: value.map(Blob),
            request_id,
            version: None,
        }
        .into(),
        (CacheReply::Sum(value), request_id) => CounterValue {
            value,
            // Always there on a counter request.
            request_id: request_id.unwrap_or_default(),
        }
        .into(),
    }
}
