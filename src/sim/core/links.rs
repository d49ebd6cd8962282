//! Connections this core dials: carries out what [`PeerLink`] decides.

use std::collections::BTreeMap;

use bytes::Bytes;

use super::{Core, Timer};
use crate::ids::CorrelationId;
use crate::proto::convert::{answer_of, PeerReply};
use crate::proto::peer::{
    ConnectionEpoch, LinkAction, LinkLimits, LinkReport, PeerLink, StreamSlot,
};
use crate::sim::env::{Env, Fault};
use crate::sim::network::{Arrival, ConnId, Side};
use crate::wire::internal::{encode, on_answer_event, FrameReader, Hello, Message, Text};

/// The link to one broker and its connection.
#[derive(Debug)]
pub struct Link {
    pub machine: PeerLink<u64, PeerReply>,
    conn: Option<(ConnId, ConnectionEpoch)>,
    readers: BTreeMap<u8, FrameReader>,
}

impl Core {
    pub(super) fn ensure_link(&mut self, env: &mut Env, node: usize) -> &mut Link {
        let limits = LinkLimits {
            in_flight: 24,
            ..LinkLimits::default()
        };
        let seed = env.random.network.number();
        let peer = env.catalog.nodes[node].clone();
        self.links.entry(node).or_insert_with(|| Link {
            machine: PeerLink::new(peer, limits, seed),
            conn: None,
            readers: BTreeMap::new(),
        })
    }

    /// Carries out everything the links have decided.
    pub(super) fn run_links(&mut self, env: &mut Env) {
        while let Some((node, action)) = self
            .links
            .iter_mut()
            .find_map(|(node, link)| Some((*node, link.machine.poll_action()?)))
        {
            self.run_link_action(env, node, action);
        }
    }

    fn run_link_action(&mut self, env: &mut Env, node: usize, action: LinkAction<u64, PeerReply>) {
        match action {
            LinkAction::Dial { epoch } => {
                let conn = env.dial(self.at, node);
                self.dialled.insert(conn, node);
                if let Some(link) = self.links.get_mut(&node) {
                    link.conn = Some((conn, epoch));
                    link.readers.clear();
                }
            }
            LinkAction::SendHello { correlation } => {
                let hello = Message::Hello(Hello {
                    correlation,
                    node_id: Text::from(&self.me),
                });
                if let Ok(frame) = encode(&hello) {
                    self.write_to_link(env, node, StreamSlot(0), frame);
                }
            }
            LinkAction::Transmit {
                token,
                stream,
                correlation,
                kind,
            } => {
                if self.leads.is_ship(token) {
                    return self.transmit_replicate(env, node, (token, stream), correlation);
                }
                if let Some(frame) = self.transmit_forward(env, token, stream, correlation, kind) {
                    self.write_to_link(env, node, stream, frame);
                }
                self.maybe_send_unknown_kind(env, node, stream);
            }
            LinkAction::Done {
                token,
                sent_as,
                result,
            } => match self.leads.is_ship(token) {
                true => self.on_ship_result(env, token, result),
                false => self.on_forward_result(env, token, sent_as, result),
            },
            LinkAction::Close { epoch, .. } => {
                let Some(link) = self.links.get_mut(&node) else {
                    return;
                };
                if let Some((conn, _)) = link.conn.take_if(|(_, e)| *e == epoch) {
                    self.dialled.remove(&conn);
                    env.close(conn, Side::Dialler);
                }
            }
            LinkAction::Report(LinkReport::Up) => self.leads_on_peer_up(node),
            LinkAction::Report(LinkReport::NeverUp(_) | LinkReport::Lost { .. }) => {}
        }
    }

    fn transmit_replicate(
        &mut self,
        env: &mut Env,
        node: usize,
        (token, stream): (u64, StreamSlot),
        correlation: CorrelationId,
    ) {
        let contradiction = self.contradiction(env, token);
        let Some(frame) = self.transmit_ship(env, token, correlation, node) else {
            // Its generation is over: it does not leave any more.
            let now = self.now(env);
            if let Some(link) = self.links.get_mut(&node) {
                if let Some((_, epoch)) = link.conn {
                    link.machine.on_unwritten(epoch, now, correlation);
                }
            }
            return;
        };
        self.write_to_link(env, node, stream, frame.clone());
        if env.may_inject && env.random.faults.chance(10) {
            // The same message once more, as after an answer that was lost.
            env.count_fault(Fault::LateDuplicate);
            let mut again = frame.to_vec();
            again[12..20].copy_from_slice(&(u64::MAX - 1).to_be_bytes());
            self.write_to_link(env, node, stream, Bytes::from(again));
        }
        if let Some(frame) = contradiction {
            env.count_fault(Fault::Contradiction);
            self.write_to_link(env, node, stream, frame);
        }
    }

    fn write_to_link(&mut self, env: &mut Env, node: usize, stream: StreamSlot, frame: Bytes) {
        if let Some((conn, _)) = self.links.get(&node).and_then(|link| link.conn) {
            env.send(conn, Side::Dialler, stream.0, frame);
        }
    }

    /// A frame of a kind nobody knows, between requests that must not notice it.
    fn maybe_send_unknown_kind(&mut self, env: &mut Env, node: usize, stream: StreamSlot) {
        if !env.may_inject || !env.random.faults.chance(5) {
            return;
        }
        env.count_fault(Fault::UnknownKind);
        let hello = Message::Hello(Hello {
            correlation: CorrelationId(u64::MAX),
            node_id: Text::from(&self.me),
        });
        let Ok(frame) = encode(&hello) else {
            return;
        };
        let mut frame = frame.to_vec();
        frame[6..8].copy_from_slice(&999u16.to_be_bytes());
        self.write_to_link(env, node, stream, Bytes::from(frame));
    }

    pub(super) fn on_link_arrival(&mut self, env: &mut Env, conn: ConnId, arrival: Arrival) {
        let now = self.now(env);
        let Some(node) = self.dialled.get(&conn).copied() else {
            return;
        };
        let Some(link) = self.links.get_mut(&node) else {
            return;
        };
        let Some((_, epoch)) = link.conn.filter(|(id, _)| *id == conn) else {
            return;
        };
        match arrival {
            Arrival::Connected => link.machine.on_connected(epoch, now),
            Arrival::Bytes { stream, bytes } => {
                if !link.on_bytes(epoch, now, stream, bytes) {
                    let seen = format!("n{} cannot read what n{node} answers", self.at.node);
                    env.judge.fail(41, seen);
                }
            }
            Arrival::Closed(cause) => {
                link.conn = None;
                self.dialled.remove(&conn);
                link.machine.on_closed(epoch, now, cause);
            }
            Arrival::Accepted => {}
        }
    }

    pub(super) fn push_timer(&mut self, at: crate::proto::MonoTime, timer: Timer) {
        self.timers.insert((at, timer));
    }
}

impl Link {
    /// False when something in it cannot be read.
    fn on_bytes(
        &mut self,
        epoch: ConnectionEpoch,
        now: crate::proto::MonoTime,
        stream: u8,
        bytes: Bytes,
    ) -> bool {
        let reader = self.readers.entry(stream).or_default();
        reader.push(bytes);
        for event in reader.by_ref() {
            match on_answer_event(event).ok().and_then(answer_of) {
                Some((correlation, answer)) => {
                    self.machine.on_answer(epoch, now, correlation, answer);
                }
                None => {
                    self.machine.on_unreadable(epoch, now);
                    return false;
                }
            }
        }
        true
    }
}
