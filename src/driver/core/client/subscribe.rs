//! Subscriptions: a cursor each, reading the log at the subscriber's own pace.
//!
//! [`Subscription`] decides what to read and when to wait; a slow subscriber costs a bounded
//! buffer, holds up nobody, and loses nothing: it reads the log behind its own pace.

use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;

use crate::auth::{Action, Resource};
use crate::ids::{Offset, ShardId};
use crate::metrics::SubscriberEnd;
use crate::proto::client_code::{invalid, of_route_refusal};
use crate::proto::client_session::Requested;
use crate::proto::ownership::{RouteRefusal, Serving};
use crate::proto::subscription::{
    Delivery, EndReason, Ended, Readable, StartPosition, StartRefusal, Subscription,
    SubscriptionLimits, SubscriptionStep,
};
use crate::wire::client::messages::{
    encode_message, CursorErrorReason, ErrorAnswer, EventStreamHello, Message, ShardMoved, StartAt,
    Subscribe, SubscribeCursorError, Subscribed, SubscriptionLagged,
};
use crate::wire::client::{
    ClientOffer, ErrorCode, EventBatch, Features, Flags, Refusal, RetryClass,
};

use super::super::message::{LaneMsg, ReadAsk, ReadResult};
use super::super::reads::ReadWaiter;
use super::auth::Identity;
use super::Core;
use crate::driver::quic::{ConnId, StreamId};

/// Payload bytes asked for at once; with one record of the largest size on top the frame stays
/// under what clients take.
const READ_BYTES: usize = 1 << 20;
/// Payloads from this size on are shared with the frame, not copied into it.
const SHARE_FROM_BYTES: usize = 4096;

/// One subscription, on the core of its client.
pub(in crate::driver::core) struct EventStream {
    conn: ConnId,
    offer: ClientOffer,
    shard: Arc<ShardId>,
    core: u16,
    phase: Phase,
}

enum Phase {
    /// The answer waits for the log's bounds.
    Starting {
        request: StreamId,
        class: Requested,
        start: StartAt,
    },
    Running {
        id: u64,
        events: StreamId,
        cursor: Subscription,
        /// Bytes handed to the transport and not taken by the client when last looked at.
        unsent_bytes: usize,
        /// A read is on its way.
        is_reading: bool,
    },
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

    /// Hands the reads that were answered in this turn to their subscriptions.
    pub(in crate::driver::core) fn run_subscriptions(&mut self) {
        while let Some((token, result)) = self.read_results.pop_front() {
            match self
                .subscriptions
                .get_mut(token)
                .map(|subscription| &subscription.phase)
            {
                None => {}
                Some(Phase::Starting { .. }) => self.start_subscription(token, result),
                Some(Phase::Running { .. }) => self.on_read(token, result),
            }
        }
    }

    fn start_subscription(&mut self, token: u64, result: ReadResult) {
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
            ReadResult::Bounds { base, durable_tail } => Readable {
                oldest: Offset(base),
                end: Offset(durable_tail),
            },
            ReadResult::NotOwner => {
                let refusal = Refusal::new(ErrorCode::ShardUnavailable, "the shard is moving")
                    .with_reason("moving");
                return self.refuse_start(token, request, class, refusal);
            }
            ReadResult::NotReady => {
                let refusal = of_route_refusal(RouteRefusal::NotServing(Serving::Opening));
                return self.refuse_start(token, request, class, refusal);
            }
            ReadResult::Records { .. } | ReadResult::Trimmed { .. } | ReadResult::Failed(_) => {
                return self.refuse_start(token, request, class, unreadable());
            }
        };
        let start = match start {
            StartAt::Latest => StartPosition::Latest,
            StartAt::Earliest => StartPosition::Earliest,
            StartAt::Offset(at) => StartPosition::At(Offset(at)),
        };
        let limits = SubscriptionLimits {
            batch_bytes: READ_BYTES,
            ..SubscriptionLimits::default()
        };
        let (cursor, opened) = match Subscription::open(start, log, limits) {
            Ok(opened) => opened,
            Err(refusal) => {
                self.forget_start(token);
                return self.answer(conn, request, cursor_error(refusal));
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
        self.send_event(
            conn,
            events,
            &EventStreamHello {
                subscription_id: id,
            },
        );
        let offsets = offer.may_send(Flags::EVENT_OFFSETS);
        let answer = Subscribed {
            subscription_id: id,
            start_offset: offsets.then_some(opened.start.0),
            live_offset: offsets.then_some(opened.live.0),
            queue_capacity: None,
        };
        self.answer(conn, request, answer);
        self.metrics.subscriptions_opened.inc();
        if let Some(subscription) = self.subscriptions.get_mut(token) {
            subscription.phase = Phase::Running {
                id,
                events,
                cursor,
                unsent_bytes: 0,
                is_reading: false,
            };
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

    /// Asks the cursor what to do and does it, until it waits for something.
    fn step_subscription(&mut self, token: u64) {
        let Some(subscription) = self.subscriptions.get_mut(token) else {
            return;
        };
        let Phase::Running {
            cursor, is_reading, ..
        } = &mut subscription.phase
        else {
            return;
        };
        let (from, max_bytes) = match cursor.poll_step() {
            SubscriptionStep::Fetch {
                from, max_bytes, ..
            } => (from, max_bytes),
            // The read waits at the log until there is something to bring.
            SubscriptionStep::AwaitRecords => (cursor.next_offset(), READ_BYTES),
            SubscriptionStep::AwaitRoom | SubscriptionStep::AwaitFetch | SubscriptionStep::Done => {
                return;
            }
            SubscriptionStep::Ended(ended) => return self.finish_events(token, &ended),
        };
        if !std::mem::replace(is_reading, true) {
            let (shard, core) = (Arc::clone(&subscription.shard), subscription.core);
            self.read_log(
                &shard,
                core,
                token,
                ReadAsk::Records {
                    from: from.0,
                    max_bytes,
                },
            );
        }
    }

    fn on_read(&mut self, token: u64, result: ReadResult) {
        let Some(subscription) = self.subscriptions.get_mut(token) else {
            return;
        };
        let Phase::Running {
            cursor, is_reading, ..
        } = &mut subscription.phase
        else {
            return;
        };
        *is_reading = false;
        match result {
            ReadResult::Records {
                first_offset,
                records,
                next_offset,
                durable_tail,
            } => {
                cursor.on_readable(Offset(durable_tail));
                // A read that had waited was not a fetch yet.
                let _ = cursor.poll_step();
                let bytes = records.iter().map(Bytes::len).sum();
                match cursor.on_records(Offset(first_offset)..Offset(next_offset), bytes) {
                    Delivery::Send { skipped_before } => {
                        self.deliver(token, first_offset, skipped_before, records);
                    }
                    Delivery::Discard => self.metrics.internal_faults.inc(),
                }
            }
            ReadResult::Trimmed { base } => cursor.on_trimmed(Offset(base)),
            ReadResult::NotOwner => cursor.end(EndReason::ShardMoved { owner: None }),
            ReadResult::Failed(_) | ReadResult::Bounds { .. } | ReadResult::NotReady => {
                cursor.end(EndReason::StorageFailed)
            }
        }
        self.step_subscription(token);
    }

    fn deliver(&mut self, token: u64, first_offset: u64, skipped_before: u64, records: Vec<Bytes>) {
        let Some(subscription) = self.subscriptions.get_mut(token) else {
            return;
        };
        let Phase::Running {
            events,
            cursor,
            unsent_bytes,
            ..
        } = &mut subscription.phase
        else {
            return;
        };
        let (conn, events) = (subscription.conn, *events);
        let payload_bytes: usize = records.iter().map(Bytes::len).sum();
        self.metrics.delivered_records.add(records.len() as u64);
        self.metrics.delivered_bytes.add(payload_bytes as u64);
        let reads = |flag| subscription.offer.may_send(flag);
        let batch = EventBatch {
            base_offset: reads(Flags::EVENT_OFFSETS).then_some(first_offset),
            skipped_before: match reads(Flags::EVENT_SKIPPED) {
                true => skipped_before,
                false => 0,
            },
            payloads: records,
            ..EventBatch::default()
        };
        let mut pieces = Vec::new();
        if let Err(error) = batch.encode_into(SHARE_FROM_BYTES, &mut pieces) {
            self.metrics.internal_faults.inc();
            tracing::error!(%error, "an event batch cannot be encoded");
            return cursor.end(EndReason::StorageFailed);
        }
        self.metrics.client_frames_out.inc();
        self.metrics
            .client_bytes_out
            .add(pieces.iter().map(|piece| piece.len() as u64).sum());
        if self.pump.send_parts(conn, events, pieces).is_err() {
            // A stop or the connection's end follows as an event of its own.
            return;
        }
        let unsent = self.pump.queued_bytes(conn, events);
        cursor.on_taken((*unsent_bytes + payload_bytes).saturating_sub(unsent));
        *unsent_bytes = unsent;
    }

    /// The events written so far have left: the cursor may read on.
    pub(in crate::driver::core) fn on_events_drained(&mut self, conn: ConnId, stream: StreamId) {
        let Some(client) = self.clients.get(&conn) else {
            return;
        };
        let Some(token) = client.subscriptions.get(&stream).copied() else {
            return;
        };
        let Some(subscription) = self.subscriptions.get_mut(token) else {
            return;
        };
        if let Phase::Running {
            cursor,
            unsent_bytes,
            ..
        } = &mut subscription.phase
        {
            let unsent = self.pump.queued_bytes(conn, stream);
            cursor.on_taken(unsent_bytes.saturating_sub(unsent));
            *unsent_bytes = unsent;
        }
        self.step_subscription(token);
    }

    /// Writes the last words of a subscription and finishes its stream.
    fn finish_events(&mut self, token: u64, ended: &Ended) {
        let Some(subscription) = self.subscriptions.get_mut(token) else {
            return;
        };
        let Phase::Running { id, events, .. } = subscription.phase else {
            return;
        };
        let (conn, offer) = (subscription.conn, subscription.offer);
        let shard = Arc::clone(&subscription.shard);
        let resume_from = ended.resume_from.0;
        let why = match &ended.reason {
            EndReason::ShardMoved { .. } if offer.features().contains(Features::SHARD_MOVED) => {
                let message = self.moved(id, resume_from, &shard);
                self.send_event(conn, events, &message);
                SubscriberEnd::ShardMoved
            }
            EndReason::ShardMoved { .. } => {
                let refusal = Refusal::new(ErrorCode::NotLeader, "the shard has moved");
                self.send_event(conn, events, &ErrorAnswer::from(refusal.for_json(&offer)));
                SubscriberEnd::ShardMoved
            }
            EndReason::Lagged if offer.features().contains(Features::SUBSCRIPTION_LAGGED) => {
                let message = SubscriptionLagged {
                    subscription_id: id,
                    resume_from,
                };
                self.send_event(conn, events, &message);
                SubscriberEnd::TooSlow
            }
            EndReason::Lagged => {
                let refusal = invalid("records not read yet are not kept any more");
                self.send_event(conn, events, &ErrorAnswer::from(refusal.for_json(&offer)));
                SubscriberEnd::TooSlow
            }
            EndReason::Draining => SubscriberEnd::Draining,
            EndReason::StoppedByClient => SubscriberEnd::StoppedByClient,
            EndReason::StreamDeleted | EndReason::Revoked | EndReason::StorageFailed => {
                let refusal = unreadable().for_json(&offer);
                self.send_event(conn, events, &ErrorAnswer::from(refusal));
                SubscriberEnd::Storage
            }
        };
        let _ = self.pump.finish(conn, events);
        if let Some(client) = self.clients.get_mut(&conn) {
            client.subscriptions.remove(&events);
        }
        self.end_subscription(token, why);
    }

    fn moved(&self, subscription_id: u64, resume_from: u64, shard: &ShardId) -> ShardMoved {
        let route = self.routes.shard(shard);
        let node = route.map(|route| self.routes.node(route.leader));
        ShardMoved {
            subscription_id,
            resume_from: Some(resume_from),
            node_id: node.map(|node| node.node_id.to_string()),
            addr: node.map(|node| node.client_addr.to_string()),
            generation: route.map_or(0, |route| route.generation.0),
        }
    }

    fn send_event<M: Message>(&mut self, conn: ConnId, events: StreamId, message: &M) {
        match encode_message(message) {
            Ok(frame) => self.send_to_client(conn, events, frame),
            Err(error) => {
                self.metrics.internal_faults.inc();
                tracing::error!(%error, kind = M::TYPE, "an event cannot be encoded");
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

fn cursor_error(refusal: StartRefusal) -> SubscribeCursorError {
    let (reason, requested, available) = match refusal {
        StartRefusal::TooOld {
            requested,
            available,
        } => (CursorErrorReason::TooOld, requested, available),
        StartRefusal::InFuture {
            requested,
            available,
        } => (CursorErrorReason::InFuture, requested, available),
    };
    SubscribeCursorError {
        reason,
        requested: requested.0,
        available: available.0,
    }
}

fn unreadable() -> Refusal {
    Refusal::new(ErrorCode::Storage, "the log cannot be read").with_class(RetryClass::Retry)
}
