//! Connections this core dials to other brokers: carries out what [`PeerLink`] decides.
//!
//! One link a peer and core, several streams a connection. Answers come back to the core that
//! asked, so nothing here crosses a lane.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};

use crate::catalog::NodeIdx;
use crate::ids::NodeId;
use crate::metrics::{CloseReason as ClosedBy, ConnectionRole, FrameFault, HandshakeFault};
use crate::proto::convert::{answer_of, PeerReply};
use crate::proto::handshake::{CloseCause, HandshakeFailure};
use crate::proto::outcome::{ForwardKind, NotSentCause, Target};
use crate::proto::peer::{
    ConnectionEpoch, LinkAction, LinkPhase, LinkReport, PeerLink, Request, StreamSlot, ALL_STREAMS,
};
use crate::wire::internal::{encode, on_answer_event, FrameReader, Hello, Message, Text};

use super::ship::ShipToken;
use super::timers::Timer;
use super::Core;
use crate::driver::quic::{CloseReason, ConnId, ConnStats, ReadEnd, Refuser, StreamId};

/// Stream bytes read in one go before other streams get their turn.
const READ_QUANTUM_BYTES: usize = 1 << 20;
/// The fixed part of a forward's frame, and more than its names usually take.
const FRAME_HEAD_BYTES: usize = 256;

/// Whose request it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LinkToken {
    Forward(u64),
    Ship(ShipToken),
}

/// The link to one broker and its connection.
pub(super) struct Link {
    machine: PeerLink<LinkToken, PeerReply>,
    conn: Option<Dialled>,
    /// When the timer heap looks at this link next.
    timer_at: Option<crate::proto::MonoTime>,
    last_error: Option<String>,
    addr: Option<SocketAddr>,
    /// When the transport declared the connection lost, until everything that waited on it has ended.
    lost_at: Option<Instant>,
}

struct Dialled {
    id: ConnId,
    epoch: ConnectionEpoch,
    streams: [Option<PeerStream>; ALL_STREAMS],
}

struct PeerStream {
    id: StreamId,
    reader: FrameReader,
}

/// A link's place in a status report.
pub(super) struct LinkStatus {
    pub node: NodeId,
    pub addr: String,
    pub phase: LinkPhase,
    pub in_flight: usize,
    pub failures: u64,
    pub retry_in: Option<Duration>,
    pub path: Option<ConnStats>,
    pub last_error: Option<String>,
}

impl Core {
    /// Hands a forward to the link of its owner. `Err` only when the request cannot be encoded
    /// for the wire; every other refusal comes back as the attempt's result.
    pub(super) fn send_on_link(
        &mut self,
        node: NodeIdx,
        token: u64,
        target: &Target,
        kind: ForwardKind,
    ) -> Result<(), (ForwardKind, NotSentCause)> {
        let Some(pending) = self.forwards.get_mut(token) else {
            return Ok(());
        };
        if !pending.body.fits_wire() {
            return Err((kind, NotSentCause::Unencodable));
        }
        let bytes = FRAME_HEAD_BYTES + pending.body.work.bytes();
        let family = pending.body.work.family();
        let previous = pending.body.previous;
        let order_key = pending.body.order_key;
        pending.target = target.clone();
        let in_chain = pending.chain;
        let in_chain = in_chain.and_then(|chain| self.forward_orders.pin(chain, token));
        let after = previous
            .and_then(|previous| self.forwards.get_mut(previous))
            .filter(|previous| previous.target.node == target.node)
            .and_then(|previous| previous.slot);
        let pin = in_chain.or(after);
        self.ensure_link(node);
        let Some(link) = self.links.get_mut(&target.node) else {
            return Ok(());
        };
        let pin = match link.machine.phase() {
            LinkPhase::Up => pin,
            // Its stream is chosen when the link comes up; the order key keeps what waits in order.
            _ => pin.or(Some(StreamSlot(
                (order_key % u64::from(self.settings.link_limits.streams)) as u8,
            ))),
        };
        link.machine.request(
            self.mono,
            Request {
                token: LinkToken::Forward(token),
                family,
                kind,
                bytes: u32::try_from(bytes).unwrap_or(u32::MAX),
                pin,
            },
        );
        // At once, not at the end of the turn: the next batch of the same client stream must see
        // which stream this one took.
        self.run_link(&target.node);
        Ok(())
    }

    pub(super) fn link_machine(
        &mut self,
        node: &NodeId,
    ) -> Option<&mut PeerLink<LinkToken, PeerReply>> {
        self.links.get_mut(node).map(|link| &mut link.machine)
    }

    pub(super) fn pending_link(&mut self, node: &NodeId) {
        self.pending_links.push(node.clone());
    }

    pub(super) fn ensure_link(&mut self, node: NodeIdx) {
        let info = self.routes.node(node);
        let id = &info.node_id;
        let addr = info
            .internal_addr
            .as_socket_addr()
            .or_else(|| self.resolved.get(id).copied());
        if let Some(link) = self.links.get_mut(id) {
            if link.addr != addr {
                link.addr = addr;
                link.machine.on_address_changed();
            }
            return;
        }
        let seed = self.random_u64();
        let info = self.routes.node(node);
        let machine = PeerLink::new(info.node_id.clone(), self.settings.link_limits, seed);
        let link = Link {
            machine,
            conn: None,
            timer_at: None,
            last_error: None,
            addr,
            lost_at: None,
        };
        self.links.insert(info.node_id.clone(), link);
    }

    /// Carries out everything the links decided since the last call.
    pub(super) fn run_links(&mut self) {
        while let Some(node) = self.pending_links.pop() {
            self.run_link(&node);
        }
    }

    pub(super) fn run_link(&mut self, node: &NodeId) {
        while let Some(action) = self
            .links
            .get_mut(node)
            .and_then(|link| link.machine.poll_action())
        {
            self.run_link_action(node, action);
        }
        self.arm_link_timer(node);
    }

    fn arm_link_timer(&mut self, node: &NodeId) {
        let Some(link) = self.links.get_mut(node) else {
            return;
        };
        let Some(at) = link.machine.next_deadline() else {
            return;
        };
        if link.timer_at.is_some_and(|armed| armed <= at) {
            return;
        }
        link.timer_at = Some(at);
        self.timers.push(at, Timer::Link { node: node.clone() });
    }

    pub(super) fn on_link_time(&mut self, node: NodeId) {
        if let Some(link) = self.links.get_mut(&node) {
            link.timer_at = None;
            link.machine.on_time(self.mono);
            self.pending_links.push(node);
        }
    }

    fn run_link_action(&mut self, node: &NodeId, action: LinkAction<LinkToken, PeerReply>) {
        match action {
            LinkAction::Dial { epoch } => self.dial(node, epoch),
            LinkAction::SendHello { correlation } => {
                let hello = Hello {
                    correlation,
                    node_id: Text::shortened(self.me.as_str()),
                };
                match encode(&Message::Hello(hello)) {
                    Ok(frame) => self.write_to_link(node, StreamSlot(0), [frame]),
                    Err(_) => self.metrics.internal_faults.inc(),
                }
            }
            LinkAction::Transmit {
                token,
                stream,
                correlation,
                kind,
            } => match token {
                LinkToken::Forward(token) => {
                    self.transmit_forward(node, token, stream, correlation, kind);
                }
                LinkToken::Ship(token) => self.transmit_ship(node, token, stream, correlation),
            },
            LinkAction::Done {
                token,
                sent_as,
                result,
            } => match token {
                LinkToken::Forward(token) => self.on_forward_result(token, sent_as, result),
                LinkToken::Ship(token) => self.on_ship_result(token, result),
            },
            LinkAction::Close { epoch, reason } => {
                let Some(link) = self.links.get_mut(node) else {
                    return;
                };
                if let Some(dialled) = link.conn.take_if(|dialled| dialled.epoch == epoch) {
                    self.link_conns.remove(&dialled.id);
                    for stream in dialled.streams.iter().flatten() {
                        self.link_streams.remove(&(dialled.id, stream.id));
                    }
                    self.pump
                        .close(dialled.id, 0, reason.name().as_bytes(), self.now);
                    self.metrics.connections_closed.inc(ClosedBy::PeerIdle);
                }
            }
            LinkAction::Report(report) => self.report_link(node, report),
        }
    }

    fn dial(&mut self, node: &NodeId, epoch: ConnectionEpoch) {
        let Some(link) = self.links.get_mut(node) else {
            return;
        };
        let dialled = match link.addr {
            Some(addr) => {
                let config = self.peer_client_config.clone();
                self.pump
                    .connect(self.endpoints.dial, addr, node.as_str(), config, self.now)
                    .map_err(|error| error.to_string())
            }
            None => Err("its address has not been resolved yet".to_owned()),
        };
        match dialled {
            Ok(id) => {
                self.link_conns.insert(id, node.clone());
                link.conn = Some(Dialled {
                    id,
                    epoch,
                    streams: Default::default(),
                });
            }
            Err(error) => {
                tracing::warn!(peer = %node, error, "cannot dial");
                link.last_error = Some(error);
                link.machine
                    .on_closed(epoch, self.mono, CloseCause::Transport);
            }
        }
    }

    pub(super) fn on_link_connected(&mut self, conn: ConnId) {
        let Some(node) = self.link_conns.get(&conn).cloned() else {
            return;
        };
        self.metrics
            .connections_opened
            .inc(ConnectionRole::PeerDialler);
        let Some(link) = self.links.get_mut(&node) else {
            return;
        };
        if let Some(dialled) = link.conn.as_ref().filter(|dialled| dialled.id == conn) {
            link.machine.on_connected(dialled.epoch, self.mono);
            self.pending_links.push(node);
        }
    }

    fn transmit_forward(
        &mut self,
        node: &NodeId,
        token: u64,
        slot: StreamSlot,
        correlation: crate::ids::CorrelationId,
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
    pub(super) fn unwritten(&mut self, node: &NodeId, correlation: crate::ids::CorrelationId) {
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
        let mut broken = match end {
            ReadEnd::Limit => {
                self.read_again.push((conn, stream));
                false
            }
            ReadEnd::Blocked => false,
            // A peer never ends a request stream while the link is in use.
            ReadEnd::Finished | ReadEnd::Reset(_) | ReadEnd::Closed => true,
        };
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
        if broken {
            link.machine.on_unreadable(epoch, self.mono);
        }
        self.pending_links.push(node);
    }

    /// The connection of a link, or an attempt at one, is over.
    pub(super) fn on_link_closed(&mut self, conn: ConnId, reason: &CloseReason) {
        let Some(node) = self.link_conns.remove(&conn) else {
            return;
        };
        let Some(link) = self.links.get_mut(&node) else {
            return;
        };
        link.last_error = Some(reason.to_string());
        link.lost_at = Some(Instant::now());
        let Some(dialled) = link.conn.take_if(|dialled| dialled.id == conn) else {
            return;
        };
        for stream in dialled.streams.iter().flatten() {
            self.link_streams.remove(&(conn, stream.id));
        }
        link.machine
            .on_closed(dialled.epoch, self.mono, close_cause(reason));
        self.pending_links.push(node);
    }

    fn report_link(&mut self, node: &NodeId, report: LinkReport) {
        let last_error = self
            .links
            .get(node)
            .and_then(|link| link.last_error.clone());
        match report {
            LinkReport::Up => {
                tracing::info!(peer = %node, core = self.index, "peer link up");
                if let Some(link) = self.links.get_mut(node) {
                    link.last_error = None;
                }
                self.ship_peer_up(node);
            }
            LinkReport::NeverUp(failure) => {
                self.dirty_lane(node);
                self.metrics
                    .handshakes_failed
                    .inc(handshake_fault(&failure));
                let error = last_error.unwrap_or_default();
                if failure.doubts_address() {
                    self.state.ask_for_catalog();
                }
                if failure.severity() == crate::proto::backoff::Severity::Refused {
                    tracing::error!(peer = %node, why = failure.name(), error, "peer link refused; check certificates, node ids and the peer's address in the catalog; dialled again when the catalog names another address, or after a long wait");
                } else {
                    tracing::warn!(peer = %node, why = failure.name(), error, "peer link did not come up");
                }
                if let Some(link) = self.links.get_mut(node) {
                    link.last_error = Some(format!("{}: {error}", failure.name()));
                }
            }
            LinkReport::Lost {
                cause,
                unknown_requests,
            } => {
                self.dirty_lane(node);
                self.metrics.connections_closed.inc(closed_label(cause));
                // The machine reports the loss behind the last result of what waited.
                if let Some(at) = self.links.get_mut(node).and_then(|l| l.lost_at.take()) {
                    self.metrics.link_loss_release_us.record(at.elapsed());
                }
                tracing::warn!(peer = %node, cause = cause.name(), unknown_requests, "peer link lost");
            }
        }
    }

    pub(super) fn link_status(&self) -> Vec<LinkStatus> {
        self.links
            .iter()
            .map(|(node, link)| LinkStatus {
                node: node.clone(),
                addr: link.addr.map(|addr| addr.to_string()).unwrap_or_default(),
                phase: link.machine.phase(),
                in_flight: link.machine.in_flight(),
                failures: u64::from(link.machine.failures()),
                retry_in: link.machine.retry_at().map(|at| at.since(self.mono)),
                path: link.conn.as_ref().and_then(|c| self.pump.conn_stats(c.id)),
                last_error: link.last_error.clone(),
            })
            .collect()
    }
}

fn close_cause(reason: &CloseReason) -> CloseCause {
    match reason {
        CloseReason::TlsRefused {
            by: Refuser::Peer, ..
        } => CloseCause::CertificateRefused,
        CloseReason::TlsRefused {
            by: Refuser::Us, ..
        } => CloseCause::PeerCertificateInvalid,
        CloseReason::TimedOut => CloseCause::TimedOut,
        CloseReason::ApplicationClosed { .. } | CloseReason::Reset | CloseReason::Refused => {
            CloseCause::ClosedByPeer
        }
        CloseReason::LocallyClosed => CloseCause::ClosedLocally,
        CloseReason::VersionMismatch | CloseReason::TransportError { .. } => CloseCause::Transport,
    }
}

fn closed_label(cause: CloseCause) -> ClosedBy {
    match cause {
        CloseCause::TimedOut => ClosedBy::PeerIdle,
        CloseCause::ClosedByPeer => ClosedBy::PeerClosed,
        CloseCause::CertificateRefused
        | CloseCause::PeerCertificateInvalid
        | CloseCause::Transport => ClosedBy::PeerTransportError,
        CloseCause::ClosedLocally => ClosedBy::PeerProtocolFault,
    }
}

fn handshake_fault(failure: &HandshakeFailure) -> HandshakeFault {
    match failure {
        HandshakeFailure::WrongNode { .. } => HandshakeFault::HelloWrongNode,
        HandshakeFailure::Refused { .. } | HandshakeFailure::ProtocolViolation => {
            HandshakeFault::HelloRefused
        }
        HandshakeFailure::TimedOut => HandshakeFault::PeerTimeout,
        HandshakeFailure::Closed(
            CloseCause::CertificateRefused | CloseCause::PeerCertificateInvalid,
        ) => HandshakeFault::PeerTls,
        HandshakeFailure::Closed(_) => HandshakeFault::PeerUnreachable,
    }
}

/// A scratch buffer for frame heads: one allocation serves many forwards.
pub(super) fn new_scratch() -> BytesMut {
    BytesMut::with_capacity(64 << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tls_alert_tells_who_refused_whom() {
        let refused = |by| CloseReason::TlsRefused {
            alert: 45,
            by,
            detail: String::new(),
        };
        assert_eq!(
            close_cause(&refused(Refuser::Peer)),
            CloseCause::CertificateRefused
        );
        assert_eq!(
            close_cause(&refused(Refuser::Us)),
            CloseCause::PeerCertificateInvalid
        );
        let fault = handshake_fault(&HandshakeFailure::Closed(CloseCause::CertificateRefused));
        assert_eq!(fault, HandshakeFault::PeerTls);
    }
}
