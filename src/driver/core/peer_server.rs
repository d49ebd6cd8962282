//! Connections other brokers opened to us: greeting, requests, answers.
//!
//! Reads frames, lets [`ListenerHandshake`] decide whether they may be looked at, and hands each
//! request to its handler. Every request read is answered exactly once, in the shape of its kind.
//!
//! Bounds: what a peer has unread here is bounded by its stream and connection windows; what is in
//! work and what is answered and not sent by [`PeerBounds`](super::peer_bounds::PeerBounds).

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use rustls::pki_types::CertificateDer;

use crate::ids::{CorrelationId, Offset};
use crate::limits::PEER_REPLICATION_BYTES;
use crate::metrics::{self, CloseReason as ClosedBy, ConnectionRole, FrameFault, InternalKind};
use crate::proto::convert::greeting_of;
use crate::proto::handshake::{ListenerAction, ListenerHandshake, PeerIdentity, StreamPlace};
use crate::proto::outcome::PeerCode;
use crate::wire::internal::{
    encode, on_request_event, refusal, FatalReason, FrameReader, Hello, Inbound, Kind, Message,
    Text,
};

use super::peer_admission::Holder;
use super::timers::Timer;
use super::{peer_code, Core};
use crate::driver::quic::{ConnId, ReadEnd, StreamId, StreamMap};

/// Close codes of the internal protocol's connections; for people reading a capture.
const CLOSE_PROTOCOL_FAULT: u32 = 1;
const CLOSE_REFUSED: u32 = 2;
/// How long a refused connection stays for its refusal to arrive.
const REFUSAL_LINGER: Duration = Duration::from_millis(100);
/// Stream bytes read in one go before other streams get their turn.
const READ_QUANTUM_BYTES: usize = 1 << 20;

/// One accepted peer connection.
pub(super) struct PeerConn {
    pub remote: SocketAddr,
    /// Who it counts for, when peers show certificates.
    holder: Option<Holder>,
    handshake: ListenerHandshake,
    streams: StreamMap<PeerStream>,
    first_stream: Option<StreamId>,
    /// Its number over all cores and the life of the process.
    serial: u64,
    /// Bytes of its batches of records not answered yet.
    replication_bytes: usize,
}

impl PeerConn {
    /// Streams the peer opened and neither side has finished.
    pub fn stream_count(&self) -> usize {
        self.streams.len()
    }
}

struct PeerStream {
    reader: FrameReader,
    /// A frame that waits for the greeting on another stream.
    held: Option<Inbound>,
    peer_finished: bool,
    /// Frames that arrived and were not looked at yet, or part of one.
    has_unread: bool,
    /// Requests of this stream not answered yet.
    owed: u32,
}

impl Core {
    pub(super) fn on_peer_accepted(
        &mut self,
        conn: ConnId,
        remote: SocketAddr,
        certificates: &[CertificateDer<'static>],
    ) {
        let (identity, holder) = if self.peer_tls.is_authenticated() {
            let names = crate::tls::peer_names(certificates);
            let Some(holder) = self.peer_admission.admit(&names) else {
                return self.turn_peer_away(conn, remote, &names);
            };
            (PeerIdentity::Certified(names), Some(holder))
        } else {
            (PeerIdentity::Unauthenticated, None)
        };
        let handshake = ListenerHandshake::new(
            self.me.clone(),
            identity,
            self.mono,
            self.settings.peer_greeting_timeout,
        );
        self.metrics
            .connections_opened
            .inc(ConnectionRole::PeerListener);
        self.peers_accepted += 1;
        let serial = self.peers_accepted << 16 | u64::from(self.index);
        self.accepted_peers.insert(
            conn,
            PeerConn {
                remote,
                holder,
                handshake,
                streams: StreamMap::default(),
                first_stream: None,
                serial,
                replication_bytes: 0,
            },
        );
    }

    /// Closes a connection whose holder has too many, before it was counted as one of ours.
    fn turn_peer_away(&mut self, conn: ConnId, remote: SocketAddr, names: &[String]) {
        tracing::warn!(%remote, ?names, "refused a peer's connection: peer-connections-per-node are open");
        self.metrics
            .handshakes_failed
            .inc(metrics::HandshakeFault::PeerLimit);
        let reason = b"too many connections of this node";
        self.pump.close(conn, CLOSE_REFUSED, reason, self.now);
    }

    /// The number of a peer's connection; no two have the same.
    pub(super) fn peer_serial(&self, conn: ConnId) -> u64 {
        self.accepted_peers.get(&conn).map_or(0, |peer| peer.serial)
    }

    /// Counts a batch of a leader in, and names its sender; `None` when too much of it waits already.
    pub(super) fn take_replication_bytes(
        &mut self,
        conn: ConnId,
        bytes: usize,
    ) -> Option<Arc<str>> {
        let peer = self.accepted_peers.get_mut(&conn)?;
        let after = peer.replication_bytes + bytes;
        // One batch is taken whatever its size.
        if peer.replication_bytes > 0 && after > PEER_REPLICATION_BYTES {
            return None;
        }
        peer.replication_bytes = after;
        Some(Arc::from(peer.handshake.peer().unwrap_or("")))
    }

    pub(super) fn give_back_replication_bytes(&mut self, conn: ConnId, bytes: usize) {
        if let Some(peer) = self.accepted_peers.get_mut(&conn) {
            peer.replication_bytes -= bytes;
        }
    }

    pub(super) fn on_peer_stream_opened(&mut self, conn: ConnId, stream: StreamId, bi: bool) {
        let Some(peer) = self.accepted_peers.get_mut(&conn) else {
            return;
        };
        if !bi {
            // Nothing in this protocol travels on a stream that cannot be answered.
            let _ = self.pump.stop_sending(conn, stream, CLOSE_PROTOCOL_FAULT);
            return;
        }
        peer.first_stream.get_or_insert(stream);
        peer.streams.insert(
            stream,
            PeerStream {
                reader: FrameReader::new(),
                held: None,
                peer_finished: false,
                has_unread: false,
                owed: 0,
            },
        );
    }

    pub(super) fn on_peer_readable(&mut self, conn: ConnId, stream: StreamId) {
        // What was read before comes first: reading on beside it would take in more than is worked on.
        if self.has_unread_frames(conn, stream) {
            self.take_peer_frames(conn, stream);
            if self.has_unread_frames(conn, stream) {
                return;
            }
        }
        let Some(peer) = self.accepted_peers.get_mut(&conn) else {
            return;
        };
        let Some(state) = peer.streams.get_mut(&stream) else {
            return;
        };
        if state.held.is_some() {
            return;
        }
        if self.peer_bounds.must_wait(&self.pump, conn, stream) {
            return;
        }
        state.has_unread = true;
        let mut read_bytes = 0;
        let end = self
            .pump
            .read_each(conn, stream, READ_QUANTUM_BYTES, |chunk: Bytes| {
                read_bytes += chunk.len() as u64;
                state.reader.push(chunk);
            });
        self.metrics.peer_bytes_in.add(read_bytes);
        match end {
            ReadEnd::Limit => self.read_again.push((conn, stream)),
            ReadEnd::Blocked => {}
            ReadEnd::Finished => state.peer_finished = true,
            ReadEnd::Reset(_) | ReadEnd::Closed => {
                state.peer_finished = true;
                state.reader = FrameReader::new();
            }
        }
        self.take_peer_frames(conn, stream);
    }

    /// Whether frames that arrived on a stream were not all looked at.
    fn has_unread_frames(&self, conn: ConnId, stream: StreamId) -> bool {
        let peer = self.accepted_peers.get(&conn);
        let state = peer.and_then(|peer| peer.streams.get(&stream));
        state.is_some_and(|state| state.has_unread && state.held.is_none())
    }

    fn take_peer_frames(&mut self, conn: ConnId, stream: StreamId) {
        loop {
            let Some(peer) = self.accepted_peers.get_mut(&conn) else {
                return;
            };
            let Some(state) = peer.streams.get_mut(&stream) else {
                return;
            };
            if self.peer_bounds.must_wait(&self.pump, conn, stream) {
                return;
            }
            let inbound = match state.held.take() {
                Some(held) => held,
                None => match state.reader.next() {
                    Some(event) => on_request_event(event),
                    None => {
                        state.has_unread = false;
                        break;
                    }
                },
            };
            if !self.on_peer_frame(conn, stream, inbound) {
                return;
            }
        }
        self.settle_peer_stream(conn, stream);
    }

    /// False when the stream must not be read on now.
    fn on_peer_frame(&mut self, conn: ConnId, stream: StreamId, inbound: Inbound) -> bool {
        let Some(incoming) = greeting_of(&inbound) else {
            if let Inbound::Close(reason) = inbound {
                self.metrics.frames_refused.inc(fatal_fault(reason));
                self.close_peer(conn, CLOSE_PROTOCOL_FAULT, reason.name());
            }
            return false;
        };
        let Some(peer) = self.accepted_peers.get_mut(&conn) else {
            return false;
        };
        let place = match peer.first_stream == Some(stream) {
            true => StreamPlace::First,
            false => StreamPlace::Later,
        };
        let action = peer.handshake.on_frame(place, incoming);
        let is_answered = match action {
            ListenerAction::Greet { .. }
            | ListenerAction::Refuse { .. }
            | ListenerAction::RefuseAndClose { .. }
            | ListenerAction::Deliver => true,
            ListenerAction::Hold
            | ListenerAction::Drop
            | ListenerAction::Close { .. }
            | ListenerAction::Ignore => false,
        };
        if let Some(state) = peer.streams.get_mut(&stream).filter(|_| is_answered) {
            state.owed += 1;
            self.peer_bounds.requests += 1;
        }
        match action {
            ListenerAction::Greet {
                correlation,
                node_id,
            } => {
                self.metrics.peer_requests.inc(InternalKind::Hello);
                let node_id = Text::shortened(node_id.as_str());
                self.answer_peer(
                    conn,
                    stream,
                    &Message::HelloOk(Hello {
                        correlation,
                        node_id,
                    }),
                );
                self.resume_held_streams(conn);
            }
            ListenerAction::Refuse {
                correlation,
                code,
                detail,
            } => {
                self.count_peer_refusal(code);
                self.metrics.frames_refused.inc(match code {
                    PeerCode::UnsupportedKind => FrameFault::PeerUnknownKind,
                    _ => FrameFault::PeerBody,
                });
                let answer = refusal(Kind::Hello, correlation, code, Offset(0), detail);
                self.answer_peer(conn, stream, &answer);
            }
            ListenerAction::RefuseAndClose {
                correlation,
                code,
                reason,
            } => {
                self.metrics
                    .handshakes_failed
                    .inc(metrics::HandshakeFault::HelloNameNotInCertificate);
                let answer = refusal(Kind::Hello, correlation, code, Offset(0), reason.name());
                self.answer_peer(conn, stream, &answer);
                self.close_peer_soon(conn, reason.name());
                return false;
            }
            ListenerAction::Deliver => match inbound {
                Inbound::Request(message) => self.on_peer_request(conn, stream, message),
                Inbound::Refuse { answer, .. } => {
                    self.metrics.frames_refused.inc(FrameFault::PeerBody);
                    self.count_peer_refusal(PeerCode::Malformed);
                    self.answer_peer(conn, stream, &answer);
                }
                Inbound::StrayAnswer { .. } | Inbound::Close(_) => {}
            },
            ListenerAction::Hold => {
                if let Some(state) = peer.streams.get_mut(&stream) {
                    state.held = Some(inbound);
                }
                return false;
            }
            ListenerAction::Drop => {
                self.metrics
                    .frames_refused
                    .inc(FrameFault::PeerUnexpectedAnswer);
            }
            ListenerAction::Close { reason } => {
                self.metrics.frames_refused.inc(FrameFault::PeerBeforeHello);
                self.close_peer(conn, CLOSE_PROTOCOL_FAULT, reason.name());
                return false;
            }
            ListenerAction::Ignore => return false,
        }
        true
    }

    fn resume_held_streams(&mut self, conn: ConnId) {
        let Some(peer) = self.accepted_peers.get(&conn) else {
            return;
        };
        let held: Vec<StreamId> = peer
            .streams
            .iter()
            .filter(|(_, state)| state.held.is_some())
            .map(|(stream, _)| *stream)
            .collect();
        for stream in held {
            self.take_peer_frames(conn, stream);
            self.read_again.push((conn, stream));
        }
    }

    fn on_peer_request(&mut self, conn: ConnId, stream: StreamId, message: Message) {
        self.metrics
            .peer_requests
            .inc(InternalKind::from_number(message.kind() as u16));
        match message {
            Message::ForwardPublish(publish) => self.on_forwarded_publish(conn, stream, publish),
            Message::CacheOp(op) => self.on_forwarded_cache_op(conn, stream, op),
            Message::Records(m) => self.on_records(conn, stream, m),
            Message::Bootstrap(m) => self.on_bootstrap(conn, stream, &m),
            Message::Rebuild(m) => self.on_rebuild(conn, stream, &m),
            // The greeting was handled before; answers never arrive here.
            Message::Hello(_)
            | Message::HelloOk(_)
            | Message::ForwardPublishOk { .. }
            | Message::ForwardPublishError(_)
            | Message::NotLeader(_)
            | Message::ReplicateOk { .. }
            | Message::ReplicateError(_)
            | Message::CacheOk(_)
            | Message::CacheError(_) => self.metrics.internal_faults.inc(),
        }
    }

    pub(super) fn refuse_peer(
        &mut self,
        conn: ConnId,
        stream: StreamId,
        kind: Kind,
        correlation: CorrelationId,
        code: PeerCode,
        detail: &str,
    ) {
        self.count_peer_refusal(code);
        let answer = refusal(kind, correlation, code, Offset(0), detail);
        self.answer_peer(conn, stream, &answer);
    }

    pub(super) fn count_peer_refusal(&self, code: PeerCode) {
        self.metrics.peer_requests_refused.inc(peer_code(code));
    }

    pub(super) fn answer_peer(&mut self, conn: ConnId, stream: StreamId, answer: &Message) {
        match encode(answer) {
            Ok(frame) => self.send_to_peer(conn, stream, frame),
            Err(error) => {
                self.metrics.internal_faults.inc();
                tracing::error!(%error, "an answer to a peer cannot be encoded");
                self.close_peer(conn, CLOSE_PROTOCOL_FAULT, "answer cannot be encoded");
            }
        }
    }

    pub(super) fn send_to_peer(&mut self, conn: ConnId, stream: StreamId, frame: Bytes) {
        self.metrics.peer_bytes_out.add(frame.len() as u64);
        // A connection that is gone has failed its requests on the other side already; a stream whose answers
        // the peer wants no more takes none.
        if self.pump.send(conn, stream, frame).is_err() {
            self.metrics.peer_answers_dropped.inc();
        }
        if let Some(peer) = self.accepted_peers.get_mut(&conn) {
            if let Some(state) = peer.streams.get_mut(&stream).filter(|s| s.owed > 0) {
                state.owed -= 1;
                self.peer_bounds.requests -= 1;
            }
        }
        self.settle_peer_stream(conn, stream);
    }

    /// Finishes our side of a stream whose peer has finished, once all answers are out.
    fn settle_peer_stream(&mut self, conn: ConnId, stream: StreamId) {
        let Some(peer) = self.accepted_peers.get_mut(&conn) else {
            return;
        };
        let Some(state) = peer.streams.get(&stream) else {
            return;
        };
        if !state.peer_finished || state.owed > 0 || state.held.is_some() || state.has_unread {
            return;
        }
        if state.reader.finish().is_err() {
            self.metrics.frames_refused.inc(FrameFault::PeerTruncated);
        }
        peer.streams.remove(&stream);
        let _ = self.pump.finish(conn, stream);
    }

    /// Forgets a connection and what was owed on it.
    pub(super) fn forget_peer(&mut self, conn: ConnId) -> Option<PeerConn> {
        let peer = self.accepted_peers.remove(&conn)?;
        if let Some(holder) = &peer.holder {
            self.peer_admission.leave(holder);
        }
        let owed: u32 = peer.streams.values().map(|state| state.owed).sum();
        self.peer_bounds.requests -= owed as usize;
        Some(peer)
    }

    pub(super) fn close_peer(&mut self, conn: ConnId, code: u32, reason: &str) {
        if let Some(peer) = self.forget_peer(conn) {
            tracing::warn!(remote = %peer.remote, node = peer.handshake.peer().unwrap_or("?"), reason, "closing a peer connection");
            self.metrics
                .connections_closed
                .inc(ClosedBy::PeerProtocolFault);
            self.pump.close(conn, code, reason.as_bytes(), self.now);
        }
    }

    /// Closes a connection once the refusal queued on it had time to leave.
    fn close_peer_soon(&mut self, conn: ConnId, reason: &'static str) {
        let at = self.mono + REFUSAL_LINGER;
        self.timers.push(at, Timer::ClosePeer { conn, reason });
    }

    pub(super) fn close_refused_peer(&mut self, conn: ConnId, reason: &'static str) {
        self.close_peer(conn, CLOSE_REFUSED, reason);
    }

    pub(super) fn greeting_timeouts(&mut self) {
        let mono = self.mono;
        let late: Vec<(ConnId, &'static str)> = self
            .accepted_peers
            .iter_mut()
            .filter_map(|(conn, peer)| match peer.handshake.on_time(mono) {
                Some(ListenerAction::Close { reason }) => Some((*conn, reason.name())),
                Some(_) | None => None,
            })
            .collect();
        for (conn, reason) in late {
            self.metrics
                .handshakes_failed
                .inc(metrics::HandshakeFault::HelloTimeout);
            self.close_peer(conn, CLOSE_PROTOCOL_FAULT, reason);
        }
    }
}

fn fatal_fault(reason: FatalReason) -> FrameFault {
    match reason {
        FatalReason::WrongMagic { .. } => FrameFault::PeerMagic,
        FatalReason::WrongVersion { .. } => FrameFault::PeerVersion,
        FatalReason::LengthOverLimit { .. } => FrameFault::PeerTooLarge,
        FatalReason::NoCorrelationId { .. } => FrameFault::PeerNoCorrelation,
    }
}
