//! What connections have to say, as events for the caller.
//!
//! Invariants: a connection's end is reported exactly once, as its last event; a readable stream is
//! reported once a turn; a slot is freed only after its end was reported.

use bytes::Bytes;
use quinn_proto::crypto::rustls::HandshakeData;
use quinn_proto::{Dir, Event, StreamEvent};
use rustls::pki_types::CertificateDer;

use super::conn::{Conn, Phase};
use super::event::{CloseReason, PumpEvent};
use super::pump::{mark_dirty, Pump};

impl Pump {
    pub(super) fn collect_events(&mut self) {
        let mut touched = std::mem::take(&mut self.touched);
        for index in touched.drain(..) {
            let drained = self.exchange_endpoint_events(index);
            self.collect_connection_events(index);
            if drained {
                self.release(index);
            } else if let Some(conn) = self.conns.at(index) {
                conn.touched = false;
                mark_dirty(conn, &mut self.dirty);
            }
        }
        // Reporting an end may touch again, but only connections that are already in the dirty list.
        self.touched = touched;
    }

    /// True when the connection is drained.
    fn exchange_endpoint_events(&mut self, index: u32) -> bool {
        let Some(conn) = self.conns.at(index) else {
            return false;
        };
        let endpoint = &mut self.endpoints[conn.endpoint.index()].proto;
        let mut drained = false;
        while let Some(event) = conn.proto.poll_endpoint_events() {
            drained |= event.is_drained();
            if let Some(answer) = endpoint.handle_event(conn.handle, event) {
                conn.proto.handle_event(answer);
            }
        }
        drained
    }

    fn collect_connection_events(&mut self, index: u32) {
        let Some(conn) = self.conns.at(index) else {
            return;
        };
        let id = conn.id;
        let mut readable = std::mem::take(&mut self.readable);
        let mut end = None;
        while let Some(event) = conn.proto.poll() {
            match event {
                Event::Connected => {
                    let accepted = conn.proto.side().is_server();
                    conn.phase = Phase::Connected;
                    conn.handshake_deadline = None;
                    self.counters.connected += 1;
                    self.events.push_back(connected_event(conn));
                    if accepted {
                        self.endpoints[conn.endpoint.index()].accepted_handshaking -= 1;
                    }
                }
                Event::ConnectionLost { reason } => end = Some(CloseReason::from(reason)),
                Event::Stream(StreamEvent::Opened { dir }) => {
                    while let Some(stream) = conn.proto.streams().accept(dir) {
                        readable.push(stream);
                        self.events.push_back(PumpEvent::StreamOpened {
                            conn: id,
                            stream,
                            bi: dir == Dir::Bi,
                        });
                    }
                }
                Event::Stream(StreamEvent::Readable { id: stream }) => {
                    if readable.last() != Some(&stream) {
                        readable.push(stream);
                    }
                }
                Event::Stream(StreamEvent::Writable { id: stream }) => conn.on_writable(stream),
                Event::Stream(StreamEvent::Finished { id: stream }) => {
                    self.queued_bytes -= conn.drop_queue(stream);
                    self.events
                        .push_back(PumpEvent::StreamFinished { conn: id, stream });
                }
                Event::Stream(StreamEvent::Stopped {
                    id: stream,
                    error_code,
                }) => {
                    self.queued_bytes -= conn.drop_queue(stream);
                    // The answer the peer waits for before it gives the stream's credit back.
                    let _ = conn.proto.send_stream(stream).reset(error_code);
                    self.events.push_back(PumpEvent::StreamStopped {
                        conn: id,
                        stream,
                        code: error_code.into_inner(),
                    });
                }
                Event::Stream(StreamEvent::Available { dir }) => {
                    if std::mem::take(&mut conn.wants_streams[dir as usize]) {
                        self.events.push_back(PumpEvent::StreamsAvailable {
                            conn: id,
                            bi: dir == Dir::Bi,
                        });
                    }
                }
                Event::HandshakeDataReady | Event::DatagramReceived | Event::DatagramsUnblocked => {
                }
            }
        }
        readable.sort_unstable();
        readable.dedup();
        for stream in readable.drain(..) {
            self.events
                .push_back(PumpEvent::Readable { conn: id, stream });
        }
        self.readable = readable;
        if let Some(reason) = end {
            self.report_end(index, reason);
        }
    }

    /// Reports the end of a connection once.
    pub(super) fn report_end(&mut self, index: u32, reason: CloseReason) {
        let Some(conn) = self.conns.at(index) else {
            return;
        };
        let (id, endpoint, side) = (conn.id, conn.endpoint, conn.proto.side());
        let was = std::mem::replace(&mut conn.phase, Phase::Closed);
        conn.handshake_deadline = None;
        self.queued_bytes -= conn.drop_all_queues();
        mark_dirty(conn, &mut self.dirty);
        match was {
            Phase::Closed => {}
            Phase::Handshaking => {
                self.counters.handshakes_failed += 1;
                if side.is_server() {
                    self.endpoints[endpoint.index()].accepted_handshaking -= 1;
                }
                self.events.push_back(PumpEvent::HandshakeFailed {
                    conn: Some(id),
                    endpoint,
                    side,
                    remote: conn.proto.remote_address(),
                    reason,
                });
            }
            Phase::Connected => {
                self.counters.closed += 1;
                self.events
                    .push_back(PumpEvent::Closed { conn: id, reason });
            }
        }
    }

    fn release(&mut self, index: u32) {
        // quinn-proto reports the loss before it drains, except for a connection closed here.
        self.report_end(index, CloseReason::LocallyClosed);
        if let Some(conn) = self.conns.remove(index) {
            self.endpoints[conn.endpoint.index()].open -= 1;
            self.counters.closes_unsent += u64::from(conn.close_unsent);
        }
    }
}

fn connected_event(conn: &Conn) -> PumpEvent {
    let session = conn.proto.crypto_session();
    let alpn = session
        .handshake_data()
        .and_then(|data| data.downcast::<HandshakeData>().ok())
        .and_then(|data| data.protocol)
        .map(Bytes::from);
    let peer_certificates = session
        .peer_identity()
        .and_then(|certs| certs.downcast::<Vec<CertificateDer<'static>>>().ok())
        .map(|certs| *certs)
        .unwrap_or_default();
    PumpEvent::Connected {
        conn: conn.id,
        endpoint: conn.endpoint,
        side: conn.proto.side(),
        alpn,
        peer_certificates,
        remote: conn.proto.remote_address(),
    }
}
