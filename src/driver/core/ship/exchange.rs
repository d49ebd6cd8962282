//! One request to a follower and its answer.

use std::sync::Arc;

use bytes::Bytes;

use super::super::link::LinkToken;
use super::super::Core;
use super::batch::Batch;
use super::lane::Place;
use crate::ids::{CorrelationId, NodeId, Offset};
use crate::metrics::ShipOutcome;
use crate::proto::convert::PeerReply;
use crate::proto::correlation::Family;
use crate::proto::outcome::{ForwardKind, NotSentCause, PeerCode, SendResult};
use crate::proto::peer::{Request, StreamSlot, REPLICATION_SLOT};
use crate::proto::replication::leader::Answered;
use crate::wire::internal::{
    encode, records_parts, Bootstrap, EncodeError, Message, Rebuild, Records,
};

/// The fixed part of a request, and more than its names usually take.
const FRAME_HEAD_BYTES: usize = 256;

/// Names a request to a follower among those of its link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::driver::core) struct ShipToken(pub u64);

/// A request handed to a link.
pub(super) struct ShipAsk {
    place: Place,
    bytes: u64,
    body: ShipBody,
}

pub(super) enum ShipBody {
    Records { first: u64, batch: Batch },
    Bootstrap { base: Offset },
    Rebuild { base: Offset },
}

impl Core {
    pub(super) fn send_ask(&mut self, place: Place, body: ShipBody) {
        let payload_bytes = match &body {
            ShipBody::Records { batch, .. } => batch.payloads.as_wire().len(),
            ShipBody::Bootstrap { .. } | ShipBody::Rebuild { .. } => 0,
        };
        let family = match &body {
            ShipBody::Records { .. } => Family::ReplicateRecords,
            ShipBody::Bootstrap { .. } | ShipBody::Rebuild { .. } => Family::ReplicateControl,
        };
        let bytes = FRAME_HEAD_BYTES + payload_bytes;
        let node = place.node.clone();
        let token = self.shipping.asks.insert(ShipAsk {
            place,
            bytes: bytes as u64,
            body,
        });
        if let Some(lane) = self.shipping.lanes.get_mut(&node) {
            lane.line.sent(bytes as u64);
        }
        let now = self.mono;
        let Some(machine) = self.link_machine(&node) else {
            // The broker left the catalog while a read was under way.
            let never = SendResult::NotSent(NotSentCause::UnknownPeer);
            return self.on_ship_result(ShipToken(token), never);
        };
        let request = Request {
            token: LinkToken::Ship(ShipToken(token)),
            family,
            kind: ForwardKind::Authorized,
            bytes: u32::try_from(bytes).unwrap_or(u32::MAX),
            pin: Some(REPLICATION_SLOT),
        };
        machine.request(now, request);
        // At once: what is asked next must be written behind it.
        self.run_link(&node);
    }

    /// Writes a request; one of a machine that is gone is not sent any more (INV-8).
    pub(in crate::driver::core) fn transmit_ship(
        &mut self,
        node: &NodeId,
        token: ShipToken,
        slot: StreamSlot,
        correlation: CorrelationId,
    ) {
        let Some(ask) = self.shipping.asks.get_mut(token.0) else {
            return self.unwritten(node, correlation);
        };
        let (at, epoch) = (ask.place.at, ask.place.epoch);
        let Some(led) = self
            .shipping
            .led
            .get(at.0 as usize)
            .and_then(Option::as_ref)
            .filter(|led| led.epoch == epoch && !led.is_superseded())
        else {
            return self.unwritten(node, correlation);
        };
        let shard = led.shard_ref.clone();
        let log = ask.place.log;
        let parts: Result<[Bytes; 2], EncodeError> = match &ask.body {
            ShipBody::Records { first, batch } => records_parts(&Records {
                correlation,
                log,
                shard,
                first_offset: Offset(*first),
                checksum: batch.checksum,
                payloads: batch.payloads.clone(),
            }),
            ShipBody::Bootstrap { base } => {
                let message = Message::Bootstrap(Bootstrap {
                    correlation,
                    log,
                    shard,
                    base_offset: *base,
                });
                encode(&message).map(|frame| [frame, Bytes::new()])
            }
            ShipBody::Rebuild { base } => {
                let message = Message::Rebuild(Rebuild {
                    correlation,
                    shard,
                    log,
                    base_offset: *base,
                });
                encode(&message).map(|frame| [frame, Bytes::new()])
            }
        };
        match parts {
            Ok(parts) => self.write_to_link(node, slot, parts),
            Err(error) => {
                self.metrics.internal_faults.inc();
                tracing::error!(%error, "a request to a follower does not fit a frame");
                self.unwritten(node, correlation);
            }
        }
    }

    /// What a request to a follower came to.
    pub(in crate::driver::core) fn on_ship_result(
        &mut self,
        token: ShipToken,
        result: SendResult<PeerReply>,
    ) {
        let Some(ShipAsk { place, bytes, .. }) = self.shipping.asks.remove(token.0) else {
            return;
        };
        if let Some(lane) = self.shipping.lanes.get_mut(&place.node) {
            lane.line.ended(bytes);
        }
        self.dirty_lane(&place.node);
        self.metrics.ship_batches.inc(outcome_label(&result));
        let answer = match result {
            SendResult::Ok(PeerReply::Durable(durable)) => Answered::Ok { durable: durable.0 },
            SendResult::Error(error) => Answered::Refused {
                code: error.code,
                expected: error.expected_offset.0,
            },
            SendResult::NotSent(_) => Answered::NotSent,
            // No other answer is of this request's family; the link has seen to that.
            SendResult::Ok(PeerReply::Appended(_) | PeerReply::Cached(_))
            | SendResult::NotLeader(_)
            | SendResult::Unknown(_) => Answered::Unknown,
        };
        let now = self.mono;
        let rebuilds = Arc::clone(&self.settings.rebuilds);
        if let Some(machine) = self.shipping.machine(place.at, place.epoch) {
            machine.on_answer(place.follower, place.log, place.id, answer, now, &*rebuilds);
            self.run_led(place.at);
        }
    }
}

fn outcome_label(result: &SendResult<PeerReply>) -> ShipOutcome {
    match result {
        SendResult::Ok(_) => ShipOutcome::Ok,
        SendResult::NotLeader(_) | SendResult::Unknown(_) => ShipOutcome::Unknown,
        SendResult::NotSent(_) => ShipOutcome::NotSent,
        SendResult::Error(error) => match error.code {
            PeerCode::StaleRoute => ShipOutcome::StaleRoute,
            PeerCode::Unavailable => ShipOutcome::Unavailable,
            PeerCode::Unauthorized => ShipOutcome::Unauthorized,
            PeerCode::Overload => ShipOutcome::Overload,
            PeerCode::Malformed => ShipOutcome::Malformed,
            PeerCode::StorageFailed => ShipOutcome::StorageFailed,
            PeerCode::LogGap => ShipOutcome::LogGap,
            PeerCode::LogConflict => ShipOutcome::LogConflict,
            PeerCode::FencedEpoch => ShipOutcome::FencedEpoch,
            PeerCode::UnsupportedKind | PeerCode::ProtocolVersion => ShipOutcome::UnsupportedKind,
        },
    }
}
