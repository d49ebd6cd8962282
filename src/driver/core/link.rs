//! Connections this core dials to other brokers: carries out what [`PeerLink`] decides.
//!
//! One link a peer and core, several streams a connection. Answers come back to the core that
//! asked, so nothing here crosses a lane.

use std::net::SocketAddr;
use std::time::Instant;

use crate::catalog::NodeIdx;
use crate::ids::NodeId;
use crate::metrics::ConnectionRole;
use crate::proto::convert::PeerReply;
use crate::proto::handshake::CloseCause;
use crate::proto::outcome::{ForwardKind, NotSentCause, Target};
use crate::proto::peer::{
    ConnectionEpoch, LinkAction, LinkPhase, PeerLink, Request, StreamSlot, ALL_STREAMS,
};
use crate::wire::internal::{encode, FrameReader, Hello, Message, Text};

use super::events::peer_end;
use super::link_report::{close_cause, closed_by_us};
use super::ship::ShipToken;
use super::timers::Timer;
use super::Core;
use crate::driver::quic::{CloseReason, ConnId, StreamId};

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
    pub machine: PeerLink<LinkToken, PeerReply>,
    pub conn: Option<Dialled>,
    /// When the timer heap looks at this link next.
    timer_at: Option<crate::proto::MonoTime>,
    pub last_error: Option<String>,
    pub addr: Option<SocketAddr>,
    /// When the transport declared a link that was up lost, until everything that waited on it has ended.
    pub lost_at: Option<Instant>,
}

/// A connection of a link, and an attempt at one.
pub(super) struct Dialled {
    pub id: ConnId,
    pub epoch: ConnectionEpoch,
    /// Its handshake is done; it is counted as opened.
    is_open: bool,
    pub streams: [Option<PeerStream>; ALL_STREAMS],
}

pub(super) struct PeerStream {
    pub id: StreamId,
    pub reader: FrameReader,
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
        let in_order = pending.chain;
        let in_chain = in_order.and_then(|chain| self.forward_orders.pin(chain, token));
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
        // What comes before the connection does must wait for the same stream, and what comes behind the
        // connection follow there.
        if let (Some(chain), Some(slot)) = (in_order, pin) {
            self.forward_orders.note_slot(chain, slot);
        }
        if let Some(pending) = self.forwards.get_mut(token) {
            pending.slot = pin;
        }
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
        let is_retired = |link: &Link| link.machine.phase() == LinkPhase::Retired;
        if self.links.get(node).is_some_and(is_retired) {
            // Should the catalog name it again, it begins anew.
            self.links.remove(node);
            return;
        }
        self.arm_link_timer(node);
    }

    /// Brokers the catalog does not name any more are not talked to: what is in flight to them is
    /// waited for, then the connection closes.
    pub(super) fn retire_links_after_catalog(&mut self) {
        for (node, link) in &mut self.links {
            if self.routes.node_by_id(node.as_str()).is_none() {
                link.machine.shut_down(self.mono);
                self.pending_links.push(node.clone());
            }
        }
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
                    if dialled.is_open {
                        self.metrics.connections_closed.inc(closed_by_us(reason));
                    }
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
                    is_open: false,
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
        if let Some(dialled) = link.conn.as_mut().filter(|dialled| dialled.id == conn) {
            dialled.is_open = true;
            link.machine.on_connected(dialled.epoch, self.mono);
            self.pending_links.push(node);
        }
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
        let was_up = matches!(link.machine.phase(), LinkPhase::Up | LinkPhase::Draining);
        link.lost_at = was_up.then(Instant::now);
        let Some(dialled) = link.conn.take_if(|dialled| dialled.id == conn) else {
            return;
        };
        for stream in dialled.streams.iter().flatten() {
            self.link_streams.remove(&(conn, stream.id));
        }
        let cause = close_cause(reason);
        if dialled.is_open {
            self.metrics.connections_closed.inc(peer_end(reason));
        }
        link.machine.on_closed(dialled.epoch, self.mono, cause);
        self.pending_links.push(node);
    }
}
