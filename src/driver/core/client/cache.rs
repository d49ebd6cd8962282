//! Cache and counter requests.
//!
//! Names and permissions are checked as for everything else. Nothing is kept: a read is a miss
//! and a write is refused with nothing applied.

use std::rc::Rc;

use crate::auth::{Action, Resource};
use crate::proto::client_code::of_route_refusal;
use crate::proto::client_session::Requested;
use crate::proto::ownership::RouteRefusal;
use crate::wire::client::messages::{CacheValue, CounterValue};
use crate::wire::client::{ErrorCode, Refusal, Request, RetryClass};

use super::auth::Identity;
use super::Core;
use crate::driver::quic::{ConnId, StreamId};

impl Core {
    pub(super) fn on_cache_request(
        &mut self,
        conn: ConnId,
        stream: StreamId,
        identity: &Rc<Identity>,
        class: Requested,
        request: Request,
    ) {
        let (names, action) = match &request {
            Request::CacheGet(m) => ((&m.tenant_id, &m.namespace, &m.cache), Action::CacheRead),
            Request::CounterGet(m) => ((&m.tenant_id, &m.namespace, &m.cache), Action::CacheRead),
            Request::CachePut(m) => ((&m.tenant_id, &m.namespace, &m.cache), Action::CacheWrite),
            Request::CacheDelete(m) => ((&m.tenant_id, &m.namespace, &m.cache), Action::CacheWrite),
            Request::CounterAdd(m) => ((&m.tenant_id, &m.namespace, &m.cache), Action::CacheWrite),
            _ => return self.metrics.internal_faults.inc(),
        };
        let (tenant, namespace, cache) = names;
        let resource = Resource::Cache {
            tenant,
            namespace,
            cache,
        };
        if !identity.grant.allows(action, &resource) {
            return self.refuse(
                conn,
                stream,
                class,
                of_route_refusal(RouteRefusal::Forbidden),
            );
        }
        if self.routes.cache(tenant, namespace, cache).is_none() {
            return self.refuse(
                conn,
                stream,
                class,
                of_route_refusal(RouteRefusal::NotFound),
            );
        }
        self.metrics.cache_requests.inc();
        match request {
            Request::CacheGet(m) => {
                let answer = CacheValue {
                    tenant_id: m.tenant_id,
                    namespace: m.namespace,
                    cache: m.cache,
                    key: m.key,
                    value: None,
                    request_id: m.request_id,
                    version: None,
                };
                self.answer(conn, stream, answer);
            }
            Request::CounterGet(m) => {
                let answer = CounterValue {
                    value: None,
                    request_id: m.request_id,
                };
                self.answer(conn, stream, answer);
            }
            _ => {
                let refusal =
                    Refusal::new(ErrorCode::ShardUnavailable, "cache writes are not served")
                        .with_class(RetryClass::Fatal);
                self.refuse(conn, stream, class, refusal);
            }
        }
    }
}
