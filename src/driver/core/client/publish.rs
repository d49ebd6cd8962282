//! Publishes: from a batch on a client's stream to the shard's log, here or on another broker.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use crate::auth::{Action, Resource};
use crate::catalog::{RouteTable, ShardRoute};
use crate::ids::ShardId;
use crate::limits::MAX_RECORD_BYTES;
use crate::metrics::{AckOutcome, ClientCode, UnackedDrop};
use crate::proto::client_code::{
    invalid, of_append_failure, of_indeterminate, of_refused, of_route_refusal, AppendFailure,
};
use crate::proto::client_session::{DeclaredWidths, OwedId, RefusedFrame, Width, Written};
use crate::proto::forward::ForwardOp;
use crate::proto::outcome::{Appended, Outcome, Target};
use crate::proto::ownership::{
    route_local, Load, LocalRoute, Owner, RouteRefusal, Serving, ShardView,
};
use crate::wire::client::{
    Blob, ErrorCode, Refusal, Request, RetryClass, ShardOwner, ToBroker, WireCode,
};
use crate::wire::internal::{AckMode, Payloads};
use crate::wire::routing::shard_for_key;

use super::super::append::AppendWaiter;
use super::super::forward_body::{ForwardBody, ForwardWork};
use super::super::message::{AppendRefusal, AppendResult, UnknownWrite};
use super::auth::Identity;
use super::Core;
use crate::driver::quic::{ConnId, StreamId};

/// A batch taken from a client and not settled yet.
pub(in crate::driver::core) struct ClientPublish {
    pub(in crate::driver::core) conn: ConnId,
    pub(in crate::driver::core) stream: StreamId,
    owed: OwedId,
    identity: Rc<Identity>,
    /// The client wants an answer; without one a failure is counted only.
    is_acked: bool,
    records: u32,
    bytes: u32,
    taken_at: Instant,
}

/// A publish, whichever form it came in.
struct Publish<'a> {
    tenant: &'a str,
    namespace: &'a str,
    stream: &'a str,
    key: Option<&'a [u8]>,
    shard: Option<u32>,
    payloads: Payloads,
}

impl<'a> Publish<'a> {
    /// The JSON forms are copied once into the form the log and the wire use.
    fn of(message: &'a ToBroker) -> Result<Self, Refusal> {
        match message {
            ToBroker::Publish(m) => Ok(Self {
                tenant: &m.tenant_id,
                namespace: &m.namespace,
                stream: &m.stream,
                key: m.key.as_deref(),
                shard: None,
                payloads: m.payloads.clone(),
            }),
            ToBroker::Request(Request::Publish(m)) => Ok(Self {
                tenant: &m.tenant_id,
                namespace: &m.namespace,
                stream: &m.stream,
                key: m.key.as_ref().map(|key| key.0.as_ref()),
                shard: m.shard,
                payloads: section(std::slice::from_ref(&m.payload))?,
            }),
            ToBroker::Request(Request::PublishJsonBatch(m)) => Ok(Self {
                tenant: &m.tenant_id,
                namespace: &m.namespace,
                stream: &m.stream,
                key: m.key.as_ref().map(|key| key.0.as_ref()),
                shard: m.shard,
                payloads: section(&m.payloads)?,
            }),
            ToBroker::Request(_) => Err(invalid("not a publish")),
        }
    }
}

fn section(payloads: &[Blob]) -> Result<Payloads, Refusal> {
    Payloads::from_slices(payloads.iter().map(|blob| blob.0.as_ref()))
        .map_err(|error| Refusal::new(ErrorCode::LimitExceeded, error.to_string()))
}

impl Core {
    pub(super) fn on_publish(
        &mut self,
        conn: ConnId,
        stream: StreamId,
        identity: &Rc<Identity>,
        owed: OwedId,
        message: ToBroker,
    ) {
        let mut taken = Box::new(ClientPublish {
            conn,
            stream,
            owed,
            identity: Rc::clone(identity),
            is_acked: is_acked(&message),
            records: 0,
            bytes: 0,
            taken_at: self.now,
        });
        self.metrics.publishes_in_flight.add(1);
        if !taken.is_acked {
            self.metrics.publishes_unacked.inc();
        }
        let routes = Arc::clone(&self.routes);
        let client = self.clients.get(&conn);
        let widths = client.and_then(|client| client.widths_of(stream));
        let checked = Publish::of(&message).and_then(|publish| {
            let shard = check_publish(&routes, identity, widths, &publish)?;
            Ok((publish, shard))
        });
        let (publish, shard) = match checked {
            Ok(checked) => checked,
            Err(refusal) => return self.settle_publish(*taken, Err(refusal)),
        };
        taken.records = publish.payloads.len() as u32;
        taken.bytes = publish.payloads.as_wire().len() as u32;
        self.metrics
            .publish_in_flight_bytes
            .add(u64::from(taken.bytes));
        if let Some(client) = self.clients.get_mut(&conn) {
            client.in_flight_bytes += taken.bytes as usize;
        }
        self.route_publish(&routes, shard, publish.payloads, taken);
    }

    fn route_publish(
        &mut self,
        routes: &RouteTable,
        shard: &ShardRoute,
        payloads: Payloads,
        taken: Box<ClientPublish>,
    ) {
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
        match route_local(Some(view), Load::Normal, true) {
            LocalRoute::Serve { generation } => {
                let waiter = AppendWaiter::Client(taken);
                self.append(&shard.shard_id, shard.core.0, generation, payloads, waiter);
            }
            // An empty batch is never forwarded: there is nothing to write anywhere.
            LocalRoute::Remote(_) if payloads.is_empty() => {
                self.settle_publish(*taken, Ok(Written::default()));
            }
            LocalRoute::Remote(target) => {
                self.forward_publish(target, &shard.shard_id, payloads, taken);
            }
            LocalRoute::Refuse(refusal) => {
                self.settle_publish(*taken, Err(of_route_refusal(refusal)));
            }
        }
    }

    fn forward_publish(
        &mut self,
        target: Target,
        shard: &Arc<ShardId>,
        payloads: Payloads,
        taken: Box<ClientPublish>,
    ) {
        let (conn, stream) = (taken.conn, taken.stream);
        let owner = target.node.clone();
        let previous = self.last_forward(conn, stream, &owner);
        let body = ForwardBody {
            shard_id: Arc::clone(shard),
            credential: taken.identity.credential.clone(),
            order_key: order_key(conn, stream),
            previous,
            work: ForwardWork::Publish {
                ack: AckMode::OnCommit,
                payloads,
                client: taken,
            },
        };
        let token = self.start_forward(target, body);
        self.remember_forward(conn, stream, owner, token);
    }

    /// The answer to a publish this broker's own log took or refused.
    pub(in crate::driver::core) fn answer_local_publish(
        &mut self,
        publish: ClientPublish,
        result: AppendResult,
    ) {
        let result = match result {
            AppendResult::Stored(at) => {
                self.metrics.publishes_acked.inc(AckOutcome::Local);
                Ok(Written {
                    first_offset: at.first_written(),
                    owner: None,
                })
            }
            AppendResult::Refused(refusal) => Err(of_append_refusal(refusal)),
            AppendResult::StorageFailed => Err(of_append_failure(AppendFailure::FlushFailed)),
            AppendResult::Unknown(why) => Err(of_unknown_write(why)),
        };
        self.settle_publish(publish, result);
    }

    /// The answer to a forwarded publish, from the owner's answer or the lack of one.
    pub(in crate::driver::core) fn answer_forwarded_publish(
        &mut self,
        publish: ClientPublish,
        outcome: Outcome<Appended>,
    ) {
        let result = match outcome {
            Outcome::Done { reply, owner } => {
                self.metrics.publishes_acked.inc(AckOutcome::Forwarded);
                let owner = Some(self.shard_owner(&owner));
                Ok(Written {
                    first_offset: reply.first_written(),
                    owner,
                })
            }
            Outcome::Refused(refused) => Err(of_refused(&refused)),
            Outcome::Indeterminate(cause) => Err(of_indeterminate(ForwardOp::Publish, cause)),
        };
        self.settle_publish(publish, result);
    }

    fn settle_publish(&mut self, publish: ClientPublish, result: Result<Written, Refusal>) {
        match &result {
            Ok(_) => {
                self.metrics
                    .published_records
                    .add(u64::from(publish.records));
                self.metrics.published_bytes.add(u64::from(publish.bytes));
            }
            Err(refusal) if !publish.is_acked => {
                self.metrics.publishes_dropped.inc(drop_reason(refusal));
            }
            Err(refusal) if refusal.class() == Some(RetryClass::OutcomeUnknown) => {
                self.metrics.publishes_unknown.inc();
            }
            Err(refusal) => {
                if let Some(code) = client_code(refusal) {
                    self.metrics.publishes_refused.inc(code);
                }
            }
        }
        self.metrics.publishes_in_flight.sub(1);
        self.metrics
            .publish_in_flight_bytes
            .sub(u64::from(publish.bytes));
        self.metrics
            .publish_ack_us
            .record_us(self.elapsed_us(publish.taken_at));
        let (conn, stream) = (publish.conn, publish.stream);
        if let Some(state) = self.client_stream(conn, stream) {
            state.session.settle(publish.owed, result);
        }
        self.run_stream(conn, stream);
        if let Some(client) = self.clients.get_mut(&conn) {
            client.in_flight_bytes = client
                .in_flight_bytes
                .saturating_sub(publish.bytes as usize);
        }
        self.resume_paused(conn);
    }

    /// Counts what a stream's machine refused by itself.
    pub(super) fn count_refused_frame(&self, what: RefusedFrame, code: ErrorCode) {
        let code = ClientCode::from_number(code.number());
        match (what, code) {
            (RefusedFrame::SilentPublish, code) => {
                self.metrics.publishes_unacked.inc();
                self.metrics.publishes_dropped.inc(drop_reason_of(code));
            }
            (RefusedFrame::Publish, Some(code)) => self.metrics.publishes_refused.inc(code),
            (RefusedFrame::Request, Some(code)) => self.metrics.requests_refused.inc(code),
            (RefusedFrame::Publish | RefusedFrame::Request, None) => {
                self.metrics.internal_faults.inc();
            }
        }
    }

    pub(super) fn shard_owner(&self, owner: &Target) -> ShardOwner {
        let addr = self
            .routes
            .node_by_id(owner.node.as_str())
            .map(|index| self.routes.node(index).client_addr.to_string());
        ShardOwner {
            node_id: owner.node.to_string(),
            addr,
            generation: owner.generation.0,
        }
    }
}

/// Permission, existence, shard, sizes: in that order, so that nothing is told to a token that may
/// not know it.
fn check_publish<'r>(
    routes: &'r RouteTable,
    identity: &Identity,
    widths: Option<&DeclaredWidths>,
    publish: &Publish<'_>,
) -> Result<&'r ShardRoute, Refusal> {
    let resource = Resource::Stream {
        tenant: publish.tenant,
        namespace: publish.namespace,
        stream: publish.stream,
    };
    if !identity.grant.allows(Action::StreamPublish, &resource) {
        return Err(of_route_refusal(RouteRefusal::Forbidden));
    }
    let route = routes
        .stream(publish.tenant, publish.namespace, publish.stream)
        .ok_or_else(|| of_route_refusal(RouteRefusal::NotFound))?;
    let width = Width {
        shards: route.shards.len() as u32,
        routing: route.routing,
    };
    let is_routed_by_key = publish.key.is_some() && publish.shard.is_none();
    let agrees = widths.is_none_or(|w| w.agrees(publish.namespace, publish.stream, width));
    if is_routed_by_key && !agrees {
        let why = "the stream does not have the width the key was routed by";
        return Err(Refusal::new(ErrorCode::StaleWidth, why));
    }
    let shard = match publish.shard {
        Some(shard) => shard,
        None => shard_for_key(publish.key, route.shards.len() as u32, route.routing),
    };
    let shard = route
        .shards
        .get(shard as usize)
        .ok_or_else(|| invalid("the shard is out of range"))?;
    let largest = MAX_RECORD_BYTES as usize;
    let may_be_large = publish.payloads.as_wire().len() > largest;
    if may_be_large
        && publish
            .payloads
            .iter()
            .any(|payload| payload.len() > largest)
    {
        let why = format!("a record may have at most {MAX_RECORD_BYTES} bytes");
        return Err(Refusal::new(ErrorCode::LimitExceeded, why));
    }
    Ok(shard)
}

fn of_append_refusal(refusal: AppendRefusal) -> Refusal {
    match refusal {
        AppendRefusal::Moved => {
            Refusal::new(ErrorCode::ShardUnavailable, "the shard is moving").with_reason("moving")
        }
        AppendRefusal::Opening => of_route_refusal(RouteRefusal::NotServing(Serving::Opening)),
        AppendRefusal::Overloaded => of_append_failure(AppendFailure::QueueFull),
        AppendRefusal::DiskFull => of_append_failure(AppendFailure::DiskFull),
        AppendRefusal::TooLarge => of_append_failure(AppendFailure::TooLarge),
        AppendRefusal::LogFailed => of_append_failure(AppendFailure::LogFailed),
    }
}

/// A write that is durable on its leader and perhaps nowhere else: it may yet be committed.
fn of_unknown_write(why: UnknownWrite) -> Refusal {
    match why {
        UnknownWrite::QuorumTimeout => Refusal::new(
            ErrorCode::QuorumTimeout,
            "no majority of the replicas held it in time",
        ),
        UnknownWrite::LeadershipLost => Refusal::new(
            ErrorCode::LeadershipLost,
            "this broker ceased to lead the shard meanwhile",
        ),
    }
}

fn is_acked(message: &ToBroker) -> bool {
    let acked_id = match message {
        ToBroker::Publish(m) => return m.ack.is_some(),
        ToBroker::Request(Request::Publish(m)) => m.acked_id(),
        ToBroker::Request(Request::PublishJsonBatch(m)) => m.acked_id(),
        ToBroker::Request(_) => return true,
    };
    acked_id.is_ok_and(|id| id.is_some())
}

/// Why a publish that wanted no answer came to nothing.
fn drop_reason(refusal: &Refusal) -> UnackedDrop {
    if refusal.class() == Some(RetryClass::OutcomeUnknown) {
        return UnackedDrop::OutcomeUnknown;
    }
    drop_reason_of(client_code(refusal))
}

fn drop_reason_of(code: Option<ClientCode>) -> UnackedDrop {
    match code {
        Some(ClientCode::NotFound) => UnackedDrop::NotFound,
        Some(ClientCode::Forbidden | ClientCode::Unauthenticated) => UnackedDrop::Forbidden,
        Some(ClientCode::InvalidRequest) => UnackedDrop::Malformed,
        Some(ClientCode::LimitExceeded) => UnackedDrop::TooLarge,
        Some(ClientCode::Overloaded) => UnackedDrop::Overloaded,
        Some(ClientCode::Draining) => UnackedDrop::Draining,
        Some(ClientCode::Storage) => UnackedDrop::Storage,
        Some(_) | None => UnackedDrop::ShardUnavailable,
    }
}

/// The label a refusal is counted under.
pub(super) fn client_code(refusal: &Refusal) -> Option<ClientCode> {
    match refusal.code.as_ref()? {
        WireCode::Known(code) => ClientCode::from_number(code.number()),
        WireCode::Other(_) => None,
    }
}

/// Spreads client streams over the streams of a peer link.
pub(super) fn order_key(conn: ConnId, stream: StreamId) -> u64 {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    conn.hash(&mut hasher);
    stream.hash(&mut hasher);
    hasher.finish()
}
