//! Datagrams in: from the sockets, from other cores, to the connections they belong to.
//!
//! Invariants: a datagram of another core is reported, not handled; a newcomer beyond a limit is refused
//! and counted.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use bytes::BytesMut;
use quinn_proto::{ConnectionHandle, DatagramEvent, EcnCodepoint};
use quinn_udp::RecvMeta;

use super::buffers::SLOTS;
use super::event::{CloseReason, ConnId, EndpointId, PumpEvent, Side, StrayDatagram};
use super::keys::foreign_core;
use super::pump::{touch, Pump};

impl Pump {
    pub(super) fn receive(&mut self, index: usize, now: Instant) -> bool {
        let mut meta = [RecvMeta::default(); SLOTS];
        let mut full = false;
        for _ in 0..self.config.receive_calls_per_turn.max(1) {
            let mut slices = self.buffers.io_slices();
            let received = self.endpoints[index].outbox.io.recv(&mut slices, &mut meta);
            let batches = match received {
                Ok(n) => n,
                Err(e) => {
                    if e.kind() != io::ErrorKind::WouldBlock {
                        self.counters.receive_errors += 1;
                        tracing::debug!(error = %e, "cannot receive");
                    }
                    full = false;
                    break;
                }
            };
            self.counters.receive_calls += 1;
            for (slot, meta) in meta.iter().enumerate().take(batches) {
                let bytes = self.buffers.take(slot, meta.len);
                self.split_batch(EndpointId(index as u8), now, meta, bytes);
            }
            full = batches == SLOTS;
            if !full {
                break;
            }
        }
        self.endpoints[index].more_to_receive = full;
        full
    }

    fn split_batch(
        &mut self,
        endpoint: EndpointId,
        now: Instant,
        meta: &RecvMeta,
        mut bytes: BytesMut,
    ) {
        let ecn = meta.ecn.map(|e| match e {
            quinn_udp::EcnCodepoint::Ect0 => EcnCodepoint::Ect0,
            quinn_udp::EcnCodepoint::Ect1 => EcnCodepoint::Ect1,
            quinn_udp::EcnCodepoint::Ce => EcnCodepoint::Ce,
        });
        self.counters.received_bytes += bytes.len() as u64;
        while !bytes.is_empty() {
            let datagram = bytes.split_to(meta.stride.clamp(1, bytes.len()));
            self.counters.received_datagrams += 1;
            let stray_of = self.endpoints[endpoint.index()]
                .shared_port
                .then(|| foreign_core(&datagram, self.config.core, self.config.cores))
                .flatten();
            match stray_of {
                None => self.feed(endpoint, now, meta.addr, meta.dst_ip, ecn, datagram),
                Some(core) => {
                    self.counters.strays_out += 1;
                    self.events.push_back(PumpEvent::Stray {
                        core,
                        endpoint,
                        datagram: StrayDatagram {
                            data: datagram,
                            remote: meta.addr,
                            local_ip: meta.dst_ip,
                            ecn,
                        },
                    });
                }
            }
        }
    }

    pub(super) fn feed(
        &mut self,
        endpoint: EndpointId,
        now: Instant,
        remote: SocketAddr,
        local_ip: Option<IpAddr>,
        ecn: Option<EcnCodepoint>,
        datagram: BytesMut,
    ) {
        let ep = &mut self.endpoints[endpoint.index()];
        self.response.clear();
        match ep
            .proto
            .handle(now, remote, local_ip, ecn, datagram, &mut self.response)
        {
            Some(DatagramEvent::ConnectionEvent(handle, event)) => {
                let index = ep.by_handle[handle.0];
                if let Some(conn) = self.conns.at(index) {
                    conn.proto.handle_event(event);
                    touch(conn, &mut self.touched);
                }
            }
            Some(DatagramEvent::NewConnection(incoming)) => self.accept(endpoint, incoming, now),
            Some(DatagramEvent::Response(transmit)) => {
                ep.outbox.send_or_drop(&transmit, &self.response);
            }
            None => {}
        }
    }

    fn accept(&mut self, endpoint: EndpointId, incoming: quinn_proto::Incoming, now: Instant) {
        let remote = incoming.remote_address();
        let ep = &mut self.endpoints[endpoint.index()];
        if ep.is_full() || ep.accepted_handshaking >= ep.max_handshakes {
            self.counters.refused_at_limit += 1;
            let remote = incoming.remote_address();
            let transmit = ep.proto.refuse(incoming, &mut self.response);
            ep.outbox.send_or_drop(&transmit, &self.response);
            self.events.push_back(PumpEvent::HandshakeFailed {
                conn: None,
                endpoint,
                side: Side::Server,
                remote,
                reason: CloseReason::Refused,
            });
            return;
        }
        match ep.proto.accept(incoming, now, &mut self.response, None) {
            Ok((handle, proto)) => {
                ep.accepted_handshaking += 1;
                self.adopt(endpoint, handle, proto, now);
            }
            Err(error) => {
                if let Some(transmit) = &error.response {
                    ep.outbox.send_or_drop(transmit, &self.response);
                }
                self.counters.handshakes_failed += 1;
                self.events.push_back(PumpEvent::HandshakeFailed {
                    conn: None,
                    endpoint,
                    side: Side::Server,
                    remote,
                    reason: error.cause.into(),
                });
            }
        }
    }

    pub(super) fn adopt(
        &mut self,
        endpoint: EndpointId,
        handle: ConnectionHandle,
        proto: quinn_proto::Connection,
        now: Instant,
    ) -> ConnId {
        let deadline = now + self.config.handshake_timeout;
        let id = self.conns.insert(endpoint, handle, proto, deadline);
        let ep = &mut self.endpoints[endpoint.index()];
        ep.open += 1;
        if ep.by_handle.len() <= handle.0 {
            ep.by_handle.resize(handle.0 + 1, u32::MAX);
        }
        ep.by_handle[handle.0] = id.index;
        if let Some(conn) = self.conns.get_mut(id) {
            touch(conn, &mut self.touched);
        }
        id
    }
}
