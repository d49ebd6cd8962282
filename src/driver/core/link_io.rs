//! Bytes of a link: frames to its streams, answers from them.

use bytes::{Bytes, BytesMut};

use crate::ids::{CorrelationId, NodeId};
use crate::metrics::FrameFault;
use crate::proto::convert::answer_of;
use crate::proto::outcome::ForwardKind;
use crate::proto::peer::StreamSlot;
use crate::wire::internal::{on_answer_event, FrameReader};

use super::link::PeerStream;
use super::Core;
use crate::driver::quic::{ConnId, ReadEnd, StreamId};

/// Stream bytes read in one go before other streams get their turn.
const READ_QUANTUM_BYTES: usize = 1 << 20;

impl Core {
    pub(super) fn transmit_forward(
        &mut self,
        node: &NodeId,
        token: u64,
        slot: StreamSlot,
        correlation: CorrelationId,
        kind: ForwardKind,
    ) {
        let Some(pending) = self.forwards.get_mut(token) else {
            return;
        };
        pending.slot = Some(slot);
        if let Some(chain) = pending.chain {
            self.forward_orders.note_slot(chain, slot);
        }
        let parts = pending
            .body
            .frame(&mut self.scratch, correlation, &pending.target, kind);
        match parts {
            Ok(parts) => {
                self.metrics.forwards_sent.inc();
                self.write_to_link(node, slot, parts);
            }
            Err(error) => {
                tracing::warn!(peer = %node, %error, "a forward does not fit a frame");
                self.unwritten(node, correlation);
            }
        }
    }

    /// Not a byte of that request was written.
    pub(super) fn unwritten(&mut self, node: &NodeId, correlation: CorrelationId) {
        let Some(link) = self.links.get_mut(node) else {
            return;
        };
        if let Some(dialled) = &link.conn {
            link.machine
                .on_unwritten(dialled.epoch, self.mono, correlation);
        }
    }

    pub(super) fn write_to_link(
        &mut self,
        node: &NodeId,
        slot: StreamSlot,
        parts: impl IntoIterator<Item = Bytes>,
    ) {
        let Some(dialled) = self.links.get_mut(node).and_then(|link| link.conn.as_mut()) else {
            return;
        };
        let at = usize::from(slot.0);
        let stream = match &dialled.streams[at] {
            Some(stream) => stream.id,
            None => match self.pump.open_bi(dialled.id) {
                Ok(id) => {
                    dialled.streams[at] = Some(PeerStream {
                        id,
                        reader: FrameReader::new(),
                    });
                    self.link_streams.insert((dialled.id, id), slot);
                    id
                }
                Err(error) => {
                    // The link times its requests out; the peer grants far more streams than we use.
                    tracing::warn!(peer = %node, %error, "cannot open a stream to a peer");
                    return;
                }
            },
        };
        let mut bytes = 0;
        let parts = parts.into_iter().inspect(|part| bytes += part.len() as u64);
        let _ = self.pump.send_parts(dialled.id, stream, parts);
        self.metrics.peer_bytes_out.add(bytes);
    }

    pub(super) fn on_link_readable(&mut self, conn: ConnId, stream: StreamId) {
        let Some(node) = self.link_conns.get(&conn).cloned() else {
            return;
        };
        let Some(slot) = self.link_streams.get(&(conn, stream)).copied() else {
            return;
        };
        let Some(link) = self.links.get_mut(&node) else {
            return;
        };
        let Some(dialled) = link.conn.as_mut().filter(|dialled| dialled.id == conn) else {
            return;
        };
        let Some(state) = dialled.streams[usize::from(slot.0)].as_mut() else {
            return;
        };
        let mut read_bytes = 0;
        let end = self
            .pump
            .read_each(conn, stream, READ_QUANTUM_BYTES, |chunk| {
                read_bytes += chunk.len() as u64;
                state.reader.push(chunk);
            });
        self.metrics.peer_bytes_in.add(read_bytes);
        let epoch = dialled.epoch;
        let late_before = link.machine.late_answers();
        // A peer never ends a request stream while the link is in use; what it answered before that counts.
        let is_over = match end {
            ReadEnd::Limit => {
                self.read_again.push((conn, stream));
                false
            }
            ReadEnd::Blocked => false,
            ReadEnd::Finished | ReadEnd::Reset(_) | ReadEnd::Closed => true,
        };
        let mut broken = false;
        for event in state.reader.by_ref() {
            match on_answer_event(event) {
                Ok(message) => match answer_of(message) {
                    Some((correlation, answer)) => {
                        link.machine
                            .on_answer(epoch, self.mono, correlation, answer);
                    }
                    None => broken = true,
                },
                Err(fault) => {
                    tracing::warn!(peer = %node, %fault, "unreadable answer");
                    self.metrics.frames_refused.inc(FrameFault::PeerBody);
                    broken = true;
                }
            }
            if broken {
                break;
            }
        }
        let late = link.machine.late_answers() - late_before;
        if late > 0 {
            self.metrics
                .frames_refused
                .add(FrameFault::PeerLateAnswer, late);
        }
        if broken || is_over {
            link.machine.on_unreadable(epoch, self.mono);
        }
        self.pending_links.push(node);
    }

    /// The peer does not want to read a stream it takes requests on.
    pub(super) fn on_link_stream_stopped(&mut self, conn: ConnId) {
        let Some(node) = self.link_conns.get(&conn).cloned() else {
            return;
        };
        let Some(link) = self.links.get_mut(&node) else {
            return;
        };
        if let Some(dialled) = link.conn.as_ref().filter(|dialled| dialled.id == conn) {
            link.machine.on_unreadable(dialled.epoch, self.mono);
            self.pending_links.push(node);
        }
    }
}

/// A scratch buffer for frame heads: one allocation serves many forwards.
pub(super) fn new_scratch() -> BytesMut {
    BytesMut::with_capacity(64 << 10)
}
