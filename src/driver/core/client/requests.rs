//! Requests other than publishes: questions about the cluster, and what goes to the other files.

use std::rc::Rc;
use std::sync::Arc;

use crate::catalog::{ShardRoute, StreamRoute};
use crate::proto::client_code::of_route_refusal;
use crate::proto::client_session::{Requested, Width};
use crate::proto::outcome::Target;
use crate::proto::ownership::RouteRefusal;
use crate::wire::client::messages::{
    BrokerAddress, CacheShardsView, OwnedKind, RoutingMode, ShardOwnerView, ShardOwners,
    ShardOwnersView, StreamShardsView, TopologyView,
};
use crate::wire::client::{ErrorCode, Refusal, Request};
use crate::wire::routing::Routing;

use super::auth::Identity;
use super::Core;
use crate::driver::quic::{ConnId, StreamId};

impl Core {
    pub(super) fn on_request(
        &mut self,
        conn: ConnId,
        stream: StreamId,
        identity: &Rc<Identity>,
        class: Requested,
        request: Request,
    ) {
        let is_own_tenant = request
            .scope_tenant()
            .is_none_or(|tenant| tenant == identity.grant.tenant.as_str());
        if !is_own_tenant {
            let refusal = of_route_refusal(RouteRefusal::Forbidden);
            return self.refuse(conn, stream, class, refusal);
        }
        match request {
            Request::Topology(_) => self.on_topology(conn, stream),
            Request::StreamShards(m) => {
                let route = self.routes.stream(&m.tenant_id, &m.namespace, &m.stream);
                let answer = StreamShardsView {
                    shards: route.map_or(0, |route| route.shards.len() as u32),
                    request_id: m.request_id,
                    routing: route.and_then(route_mode),
                };
                self.answer(conn, stream, answer);
            }
            Request::CacheShards(m) => {
                let route = self.routes.cache(&m.tenant_id, &m.namespace, &m.cache);
                let shards = route.map_or(0, |route| route.shards.len() as u32);
                let answer = CacheShardsView {
                    shards,
                    request_id: m.request_id,
                };
                self.answer(conn, stream, answer);
            }
            Request::ShardOwners(m) => self.on_shard_owners(conn, stream, &m),
            Request::Subscribe(m) => self.on_subscribe(conn, stream, identity, class, &m),
            request if class == Requested::OneShotAtLeader => {
                self.on_group_request(conn, stream, identity, class, request);
            }
            request => self.on_cache_request(conn, stream, identity, class, request),
        }
    }

    /// Takes note of the width a client routes keyed publishes by. There is no answer; what is wrong
    /// with it shows when something is published.
    pub(super) fn declare_width(
        &mut self,
        conn: ConnId,
        stream: StreamId,
        identity: &Identity,
        request: Request,
    ) {
        let Request::PublishWidth(m) = request else {
            return self.metrics.internal_faults.inc();
        };
        if m.tenant_id != identity.grant.tenant.as_str() {
            return;
        }
        let Some(state) = self.client_stream(conn, stream) else {
            return;
        };
        let width = Width {
            shards: m.shards,
            routing: m.routing.map_or(Routing::Modulo, Routing::from),
        };
        let widths = state.widths.get_or_insert_with(Box::default);
        if let Err(error) = widths.declare(&m.namespace, &m.stream, width) {
            let refusal = Refusal::new(ErrorCode::LimitExceeded, error.to_string());
            state.session.give_up(refusal);
        }
    }

    fn on_topology(&mut self, conn: ConnId, stream: StreamId) {
        let nodes = self.routes.catalog().nodes().iter();
        let brokers = nodes
            .map(|node| BrokerAddress {
                node_id: node.node_id.to_string(),
                addr: node.client_addr.to_string(),
            })
            .collect();
        self.answer(conn, stream, TopologyView { brokers });
    }

    fn on_shard_owners(&mut self, conn: ConnId, stream: StreamId, m: &ShardOwners) {
        let routes = Arc::clone(&self.routes);
        let route = match m.kind {
            OwnedKind::Stream => routes.stream(&m.tenant_id, &m.namespace, &m.name),
            OwnedKind::Cache => routes.cache(&m.tenant_id, &m.namespace, &m.name),
        };
        let shards = route.map_or(&[][..], |route| &route.shards);
        let owners = shards.iter().map(|shard| self.owner_view(shard)).collect();
        self.answer(
            conn,
            stream,
            ShardOwnersView {
                owners,
                request_id: m.request_id,
            },
        );
    }

    fn owner_view(&self, shard: &ShardRoute) -> ShardOwnerView {
        let node = self.routes.node(shard.leader);
        ShardOwnerView {
            shard: shard.shard_id.shard,
            node_id: Some(node.node_id.to_string()),
            addr: Some(node.client_addr.to_string()),
            generation: shard.generation.0,
            unavailable: None,
        }
    }

    /// Names the owner to a client that is at the wrong broker for something never forwarded.
    pub(super) fn redirect(
        &mut self,
        conn: ConnId,
        stream: StreamId,
        class: Requested,
        shard: &ShardRoute,
    ) {
        let node = self.routes.node(shard.leader).node_id.clone();
        let owner = self.shard_owner(&Target {
            node,
            generation: shard.generation,
        });
        if let Some(state) = self.client_stream(conn, stream) {
            state.session.redirect(class, owner);
        }
        self.run_stream(conn, stream);
    }
}

fn route_mode(route: &StreamRoute) -> Option<RoutingMode> {
    match route.routing {
        Routing::Modulo => None,
        Routing::JumpHash => Some(RoutingMode::JumpHash),
    }
}
