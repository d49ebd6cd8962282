//! How a subscription begins and ends. What it is sent in between is in [`super::events`].

use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;

use crate::auth::{Action, Resource};
use crate::ids::{Offset, ShardId};
use crate::metrics::SubscriberEnd;
use crate::proto::client_code::{invalid, of_route_refusal};
use crate::proto::client_session::{
    cursor_error, event_stream_end, subscribed, EventStreamEnd, Requested,
};
use crate::proto::outcome::Target;
use crate::proto::ownership::{RouteRefusal, Serving};
use crate::proto::subscription::{
    EndReason, Ended, Readable, StartPosition, Subscription, SubscriptionLimits,
};
use crate::wire::client::messages::{EventStreamHello, StartAt, Subscribe};
use crate::wire::client::{
    encode_message, ClientOffer, EncodeError, ErrorCode, Refusal, RetryClass,
};

use super::super::message::{EventRead, LaneMsg, ReadAsk};
use super::super::reads::ReadWaiter;
use super::auth::Identity;
use super::Core;
use crate::driver::quic::{ConnId, StreamId};

/// An answer of a broken log that promises nothing was lost.
fn unreadable() -> Refusal {
    Refusal::new(ErrorCode::Storage, "the log cannot be read").with_class(RetryClass::Retry)
}

/// One subscription, on the core of its client.
pub(in crate::driver::core) struct EventStream {
    pub(super) conn: ConnId,
    pub(super) offer: ClientOffer,
    pub(super) shard: Arc<ShardId>,
    pub(super) core: u16,
    pub(super) phase: Phase,
}

pub(super) enum Phase {
    /// The answer waits for the log's bounds.
    Starting {
        request: StreamId,
        class: Requested,
        start: StartAt,
    },
    Running(Running),
}

/// A subscription with its event stream.
pub(super) struct Running {
    pub id: u64,
    pub events: StreamId,
    pub cursor: Subscription,
    /// A read is on its way.
    pub is_reading: bool,
    /// Is in the list of those that wait for room.
    pub waits_for_room: bool,
}

impl EventStream {
    pub(super) fn running(&mut self) -> Option<&mut Running> {
        match &mut self.phase {
            Phase::Starting { .. } => None,
            Phase::Running(running) => Some(running),
        }
    }
}

impl Core {
    pub(super) fn on_subscribe(
        &mut self,
        conn: ConnId,
        stream: StreamId,
        identity: &Rc<Identity>,
        class: Requested,
        m: &Subscribe,
    ) {
        let resource = Resource::Stream {
            tenant: &m.tenant_id,
            namespace: &m.namespace,
            stream: &m.stream,
        };
        if !identity.grant.allows(Action::StreamSubscribe, &resource) {
            return self.refuse(
                conn,
                stream,
                class,
                of_route_refusal(RouteRefusal::Forbidden),
            );
        }
        let routes = Arc::clone(&self.routes);
        let Some(route) = routes.stream(&m.tenant_id, &m.namespace, &m.stream) else {
            return self.refuse(
                conn,
                stream,
                class,
                of_route_refusal(RouteRefusal::NotFound),
            );
        };
        let Some(shard) = route.shards.get(m.shard.unwrap_or(0) as usize) else {
            return self.refuse(conn, stream, class, invalid("the shard is out of range"));
        };
        if !shard.is_local {
            return self.redirect(conn, stream, class, shard);
        }
        if self.subscriptions.len() >= self.settings.max_subscriptions {
            let refusal = Refusal::new(
                ErrorCode::LimitExceeded,
                "too many subscriptions on this core",
            );
            return self.refuse(conn, stream, class, refusal);
        }
        let Some(state) = self.client_stream(conn, stream) else {
            return;
        };
        let subscription = EventStream {
            conn,
            offer: *state.session.offer(),
            shard: Arc::clone(&shard.shard_id),
            core: shard.core.0,
            phase: Phase::Starting {
                request: stream,
                class,
                start: m.start.unwrap_or(StartAt::Latest),
            },
        };
        let token = self.subscriptions.insert(subscription);
        self.metrics
            .subscriptions
            .set(self.subscriptions.len() as u64);
        self.read_log(&shard.shard_id, shard.core.0, token, ReadAsk::Bounds);
    }

    pub(super) fn start_subscription(&mut self, token: u64, result: EventRead) {
        let Some(subscription) = self.subscriptions.get_mut(token) else {
            return;
        };
        let Phase::Starting {
            request,
            class,
            start,
        } = subscription.phase
        else {
            return;
        };
        let (conn, offer) = (subscription.conn, subscription.offer);
        let log = match result {
            EventRead::Bounds {
                base,
                readable_end,
                durable_tail,
            } => Readable {
                oldest: Offset(base),
                end: Offset(readable_end),
                held_end: Offset(durable_tail),
            },
            EventRead::NotOwner => {
                let refusal = Refusal::new(ErrorCode::ShardUnavailable, "the shard is moving")
                    .with_reason("moving");
                return self.refuse_start(token, request, class, refusal);
            }
            EventRead::NotReady => {
                let refusal = of_route_refusal(RouteRefusal::NotServing(Serving::Opening));
                return self.refuse_start(token, request, class, refusal);
            }
            EventRead::Run { .. } | EventRead::Trimmed { .. } | EventRead::Failed(_) => {
                return self.refuse_start(token, request, class, unreadable());
            }
        };
        let start = match start {
            StartAt::Latest => StartPosition::Latest,
            StartAt::Earliest => StartPosition::Earliest,
            StartAt::Offset(at) => StartPosition::At(Offset(at)),
        };
        let opened = Subscription::open(start, log, SubscriptionLimits::default());
        let (cursor, opened) = match opened {
            Ok(opened) => opened,
            Err(refusal) => {
                let Some(answer) = cursor_error(refusal) else {
                    let refusal = of_route_refusal(RouteRefusal::NotServing(Serving::Opening));
                    return self.refuse_start(token, request, class, refusal);
                };
                self.forget_start(token);
                return self.answer(conn, request, answer);
            }
        };
        let Ok(events) = self.pump.open_uni(conn) else {
            let why = "the client grants no more event streams";
            let refusal = Refusal::new(ErrorCode::LimitExceeded, why);
            return self.refuse_start(token, request, class, refusal);
        };
        let Some(client) = self.clients.get_mut(&conn) else {
            return;
        };
        let id = client.next_subscription_id;
        client.next_subscription_id += 1;
        client.subscriptions.insert(events, token);
        // The hello goes first: a client that has read the answer waits for it without a limit.
        let hello = encode_message(&EventStreamHello {
            subscription_id: id,
        });
        self.send_event(conn, events, hello);
        self.answer(conn, request, subscribed(id, opened, &offer));
        self.metrics.subscriptions_opened.inc();
        if let Some(subscription) = self.subscriptions.get_mut(token) {
            subscription.phase = Phase::Running(Running {
                id,
                events,
                cursor,
                is_reading: false,
                waits_for_room: false,
            });
        }
        self.step_subscription(token);
    }

    fn refuse_start(&mut self, token: u64, request: StreamId, class: Requested, refusal: Refusal) {
        let Some(subscription) = self.forget_start(token) else {
            return;
        };
        self.refuse(subscription.conn, request, class, refusal);
    }

    fn forget_start(&mut self, token: u64) -> Option<EventStream> {
        let subscription = self.subscriptions.remove(token);
        self.metrics
            .subscriptions
            .set(self.subscriptions.len() as u64);
        subscription
    }

    /// Writes the last words of a subscription and finishes its stream.
    pub(super) fn finish_events(&mut self, token: u64, ended: &Ended) {
        let Some(subscription) = self.subscriptions.get_mut(token) else {
            return;
        };
        let (conn, offer) = (subscription.conn, subscription.offer);
        let shard = Arc::clone(&subscription.shard);
        let Some((id, events)) = subscription.running().map(|r| (r.id, r.events)) else {
            return;
        };
        let route = self.routes.shard(&shard);
        let generation = route.map_or(0, |route| route.generation.0);
        let owner = route.map(|route| {
            self.shard_owner(&Target {
                node: self.routes.node(route.leader).node_id.clone(),
                generation: route.generation,
            })
        });
        match event_stream_end(id, ended, owner, generation, &offer) {
            EventStreamEnd::Message(message) => {
                self.send_event(conn, events, message.encode());
                // An error means that the stream or its connection is gone, which ends it as well.
                let _ = self.pump.finish(conn, events);
            }
            EventStreamEnd::Reset => drop(self.pump.reset(conn, events, 0)),
            EventStreamEnd::WithConnection => {}
        }
        if let Some(client) = self.clients.get_mut(&conn) {
            client.subscriptions.remove(&events);
        }
        self.end_subscription(token, counted_as(&ended.reason));
    }

    fn send_event(&mut self, conn: ConnId, events: StreamId, frame: Result<Bytes, EncodeError>) {
        match frame {
            Ok(frame) => self.send_to_client(conn, events, frame),
            Err(error) => {
                self.metrics.internal_faults.inc();
                tracing::error!(%error, "an event cannot be encoded");
            }
        }
    }

    /// Forgets a subscription whose stream needs nothing more.
    pub(in crate::driver::core) fn end_subscription(&mut self, token: u64, why: SubscriberEnd) {
        let Some(subscription) = self.subscriptions.remove(token) else {
            return;
        };
        self.metrics
            .subscriptions
            .set(self.subscriptions.len() as u64);
        self.metrics.subscriptions_ended.inc(why);
        if subscription.core == self.index {
            self.cancel_read(&subscription.shard, ReadWaiter::Subscription { token });
        } else {
            let cancel = LaneMsg::CancelRead {
                shard: subscription.shard,
                ticket: token,
            };
            self.send_answer(usize::from(subscription.core), cancel);
        }
    }
}

fn counted_as(reason: &EndReason) -> SubscriberEnd {
    match reason {
        EndReason::ShardMoved { .. } => SubscriberEnd::ShardMoved,
        EndReason::StreamDeleted => SubscriberEnd::StreamDeleted,
        EndReason::Lagged => SubscriberEnd::TooSlow,
        EndReason::Draining => SubscriberEnd::Draining,
        EndReason::StoppedByClient => SubscriberEnd::StoppedByClient,
        EndReason::Revoked | EndReason::StorageFailed => SubscriberEnd::Storage,
    }
}
