//! Subscriptions that run: a cursor each, reading the log at the subscriber's own pace.
//!
//! [`Subscription`](crate::proto::subscription::Subscription) decides what to read and when to wait;
//! a slow subscriber costs a bounded buffer, holds up nobody, and loses nothing: it reads the log
//! behind its own pace.
//!
//! Three bounds hold a subscriber back, each looked at before the next batch is read: the bytes
//! queued on its stream, on its connection ([`CONNECTION_QUEUED_BYTES`]), and for all clients of the
//! core ([`Settings::client_queued_bytes`](super::super::Settings)). Past the last two it still has one
//! small batch on its way, so that clients that do not read take nothing from those that do. Those that
//! have to wait are looked at again when something was taken by any client.

use std::sync::Arc;

use crate::ids::Offset;
use crate::proto::subscription::{Delivery, EndReason, SubscriptionStep};
use crate::wire::client::Flags;

use super::super::event_run::EventRun;
use super::super::message::{EventRead, ReadAsk};
use super::subscribe::Phase;
use super::Core;
use crate::driver::quic::{ConnId, StreamId};
use crate::proto::subscription::SubscriptionLimits;

/// Reads handed to subscriptions in one turn; a stream may have a hundred thousand subscribers, and the
/// rest of the broker's work is not to wait for all of them.
const READS_PER_TURN: usize = 1024;
/// Bytes queued on one connection past which no further events are read for it.
const CONNECTION_QUEUED_BYTES: usize = 16 << 20;

/// Subscriptions that have something to read and no room for it.
#[derive(Default)]
pub(in crate::driver::core) struct WaitingForRoom {
    tokens: Vec<u64>,
    /// Something was taken since they were last looked at.
    is_due: bool,
}

impl WaitingForRoom {
    /// How many there are; those that ended meanwhile are counted until they are looked at.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether some of them are to be looked at in the next turn.
    pub fn is_due(&self) -> bool {
        self.is_due && !self.tokens.is_empty()
    }

    /// Some client has taken what was queued for it.
    pub fn on_taken(&mut self) {
        self.is_due = true;
    }

    fn push(&mut self, token: u64) {
        self.tokens.push(token);
        // What was queued in this turn leaves at its end, without a word if nothing holds it back.
        self.is_due = true;
    }
}

impl Core {
    /// Hands the reads that were answered in this turn to their subscriptions.
    pub(in crate::driver::core) fn run_subscriptions(&mut self) {
        if self.waiting_for_room.is_due() {
            self.look_for_room();
        }
        for _ in 0..READS_PER_TURN {
            let Some((token, result)) = self.read_results.pop_front() else {
                break;
            };
            match self.subscriptions.get_mut(token).map(|s| &s.phase) {
                None => {}
                Some(Phase::Starting { .. }) => self.start_subscription(token, result),
                Some(Phase::Running(_)) => self.on_read(token, result),
            }
        }
        self.event_runs.forget();
    }

    /// Steps the subscriptions that waited for room; those that still have none wait on, without
    /// being looked at before somebody takes something.
    fn look_for_room(&mut self) {
        let waiting = std::mem::take(&mut self.waiting_for_room.tokens);
        for token in waiting {
            let subscription = self.subscriptions.get_mut(token);
            if let Some(running) = subscription.and_then(|s| s.running()) {
                running.waits_for_room = false;
                self.step_subscription(token);
            }
        }
        // Those put back just now were looked at.
        self.waiting_for_room.is_due = false;
    }

    /// Asks the cursor what to do and does it, until it waits for something.
    pub(super) fn step_subscription(&mut self, token: u64) {
        let Some(subscription) = self.subscriptions.get_mut(token) else {
            return;
        };
        let (conn, core) = (subscription.conn, subscription.core);
        let shard = Arc::clone(&subscription.shard);
        let Some(running) = subscription.running() else {
            return;
        };
        let pump = &self.pump;
        let is_full = pump.conn_queued_bytes(conn) >= CONNECTION_QUEUED_BYTES
            || pump.all_queued_bytes() >= self.settings.client_queued_bytes;
        running.cursor.set_held_back(is_full);
        let untaken = pump.queued_bytes(conn, running.events);
        running.cursor.on_untaken(untaken);
        let limits = SubscriptionLimits::default();
        let (from, max_bytes) = match running.cursor.poll_step() {
            SubscriptionStep::Fetch {
                from, max_bytes, ..
            } => (from, max_bytes),
            // The read waits at the log until there is something to bring.
            SubscriptionStep::AwaitRecords if is_full => {
                (running.cursor.next_offset(), limits.held_back_batch_bytes)
            }
            SubscriptionStep::AwaitRecords => (running.cursor.next_offset(), limits.batch_bytes),
            SubscriptionStep::AwaitRoom => {
                if !std::mem::replace(&mut running.waits_for_room, true) {
                    self.waiting_for_room.push(token);
                }
                return;
            }
            SubscriptionStep::AwaitFetch | SubscriptionStep::Done => return,
            SubscriptionStep::Ended(ended) => return self.finish_events(token, &ended),
        };
        if !std::mem::replace(&mut running.is_reading, true) {
            let from = from.0;
            let ask = ReadAsk::Records { from, max_bytes };
            self.read_log(&shard, core, token, ask);
        }
    }

    fn on_read(&mut self, token: u64, result: EventRead) {
        let Some(subscription) = self.subscriptions.get_mut(token) else {
            return;
        };
        let shard = Arc::clone(&subscription.shard);
        let Some(running) = subscription.running() else {
            return;
        };
        running.is_reading = false;
        match result {
            EventRead::Run { run, readable_end } => {
                running.cursor.on_readable(Offset(readable_end));
                // A read that had waited was not a fetch yet.
                let _ = running.cursor.poll_step();
                let range = Offset(run.first_offset())..Offset(run.next_offset());
                match running.cursor.on_records(range, run.payload_bytes()) {
                    Delivery::Send { skipped_before } => self.deliver(token, &run, skipped_before),
                    Delivery::Discard => self.metrics.internal_faults.inc(),
                }
            }
            EventRead::Trimmed { base } => running.cursor.on_trimmed(Offset(base)),
            EventRead::NotOwner => {
                let reason = match self.routes.shard(&shard) {
                    Some(_) => EndReason::ShardMoved { owner: None },
                    None => EndReason::StreamDeleted,
                };
                running.cursor.end(reason);
            }
            EventRead::Failed(why) => {
                tracing::warn!(%shard, %why, "a subscription ends: its log cannot be read");
                running.cursor.end(EndReason::StorageFailed);
            }
            EventRead::Bounds { .. } | EventRead::NotReady => {
                running.cursor.end(EndReason::StorageFailed);
            }
        }
        self.step_subscription(token);
    }

    fn deliver(&mut self, token: u64, run: &EventRun, skipped_before: u64) {
        let Some(subscription) = self.subscriptions.get_mut(token) else {
            return;
        };
        let (conn, offer) = (subscription.conn, subscription.offer);
        let Some(running) = subscription.running() else {
            return;
        };
        self.metrics.delivered_records.add(run.records());
        self.metrics.delivered_bytes.add(run.payload_bytes() as u64);
        let tells_gap = skipped_before != 0
            && offer.may_send(Flags::EVENT_SKIPPED)
            && offer.may_send(Flags::EVENT_OFFSETS);
        let frame = match tells_gap {
            true => run.frame_after_gap(skipped_before),
            false => run.frame(offer.may_send(Flags::EVENT_OFFSETS)),
        };
        let parts = match frame {
            Ok(parts) => parts,
            Err(error) => {
                self.metrics.internal_faults.inc();
                tracing::error!(%error, "an event batch cannot be encoded");
                return running.cursor.end(EndReason::StorageFailed);
            }
        };
        let frame_bytes: usize = parts.iter().map(bytes::Bytes::len).sum();
        self.metrics.client_frames_out.inc();
        self.metrics.client_bytes_out.add(frame_bytes as u64);
        // Fails when the stream or the connection has ended, which follows as an event of its own.
        let events = running.events;
        let _ = self.pump.send_parts(conn, events, parts.iter().cloned());
    }

    /// The events written so far have left: the cursor may read on.
    pub(in crate::driver::core) fn on_events_drained(&mut self, conn: ConnId, stream: StreamId) {
        self.waiting_for_room.on_taken();
        let client = self.clients.get(&conn);
        let token = client.and_then(|client| client.subscriptions.get(&stream));
        if let Some(token) = token.copied() {
            self.step_subscription(token);
        }
    }
}
