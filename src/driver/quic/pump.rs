//! The turn of a pump: receive, timers, events; then, after the caller has acted on them, send.
//!
//! Invariants: one turn does a bounded amount of work per socket and per connection; only connections
//! with input, a due timer or something to send are looked at.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use quinn_proto::StreamId;

use super::buffers::ReceiveBuffers;
use super::conn::{Conn, ConnTable, Phase};
use super::event::{CloseReason, EndpointId, PumpEvent, StrayDatagram};
use super::outbox::{Outbox, SendCounters};
use super::settings::{EndpointSpec, PumpConfig, ServerSetup, SetupError, MAX_UDP_PAYLOAD_BYTES};
use super::wait::SpinHistory;

/// A full send buffer is tried again after this long; UDP buffers empty in microseconds.
const SEND_RETRY: Duration = Duration::from_micros(500);

/// What a pump did so far, all endpoints together.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct PumpCounters {
    /// Receive calls that returned datagrams.
    pub receive_calls: u64,
    /// Datagrams received.
    pub received_datagrams: u64,
    /// UDP payload bytes received.
    pub received_bytes: u64,
    /// Receive calls that failed.
    pub receive_errors: u64,
    /// Datagrams that belonged to another core.
    pub strays_out: u64,
    /// Datagrams other cores handed over.
    pub strays_in: u64,
    /// Connections refused because the endpoint was at a limit.
    pub refused_at_limit: u64,
    /// Handshakes completed.
    pub connected: u64,
    /// Handshakes that ended otherwise.
    pub handshakes_failed: u64,
    /// Connections that ended after their handshake.
    pub closed: u64,
    /// Connections closed here whose close never left.
    pub closes_unsent: u64,
    /// Times [`Pump::spin`] found a datagram.
    pub spin_hits: u64,
    /// Times it found none.
    pub spin_misses: u64,
    /// Bytes queued on streams that this side had reset before.
    pub dropped_after_reset_bytes: u64,
}

pub(super) struct Endpoint {
    role: u8,
    pub(super) proto: quinn_proto::Endpoint,
    pub(super) outbox: Outbox,
    pub(super) shared_port: bool,
    max_connections: usize,
    pub(super) max_handshakes: usize,
    pub(super) accepted_handshaking: usize,
    pub(super) open: usize,
    /// Slot of each quinn-proto handle.
    pub(super) by_handle: Vec<u32>,
    pub(super) retry_at: Option<Instant>,
    /// Connections with packets to send once the socket takes them.
    waiting: Vec<u32>,
    /// A receive call came back full: there is more.
    pub(super) more_to_receive: bool,
}

impl Endpoint {
    pub(super) fn is_full(&self) -> bool {
        self.open >= self.max_connections
    }
}

/// Everything QUIC of one core. Not `Send`: made and used inside the core's executor.
///
/// A turn: [`poll_io`](Self::poll_io), then [`next_event`](Self::next_event) until `None` with commands
/// in answer, then [`flush`](Self::flush), then look a little longer with [`spin`](Self::spin) and wait
/// with [`poll_wait`](Self::poll_wait). A pump with work left over is ready at once: the caller yields to
/// its executor between turns.
pub struct Pump {
    pub(super) config: PumpConfig,
    pub(super) endpoints: Vec<Endpoint>,
    pub(super) conns: ConnTable,
    pub(super) events: VecDeque<PumpEvent>,
    pub(super) counters: PumpCounters,
    pub(super) touched: Vec<u32>,
    pub(super) dirty: VecDeque<u32>,
    pub(super) buffers: ReceiveBuffers,
    pub(super) spin: SpinHistory,
    /// Bytes queued on all streams of all connections.
    pub(super) queued_bytes: usize,
    send_buffer: Vec<u8>,
    pub(super) response: Vec<u8>,
    pub(super) readable: Vec<StreamId>,
    pub(super) alarm: shard_executor::rt::Alarm,
}

impl Pump {
    /// A pump without endpoints.
    pub fn new(config: PumpConfig) -> Result<Self, SetupError> {
        if config.cores > 256 || config.core >= config.cores.max(1) {
            return Err(SetupError::TooMany);
        }
        Ok(Self {
            config,
            endpoints: Vec::new(),
            conns: ConnTable::default(),
            events: VecDeque::new(),
            counters: PumpCounters::default(),
            touched: Vec::new(),
            dirty: VecDeque::new(),
            buffers: ReceiveBuffers::new(),
            spin: SpinHistory::default(),
            queued_bytes: 0,
            send_buffer: Vec::new(),
            response: Vec::new(),
            readable: Vec::new(),
            alarm: shard_executor::rt::Alarm::new(),
        })
    }

    /// Adds a socket. Shared ports must be added in the same order on every core.
    pub fn add_endpoint(&mut self, spec: EndpointSpec) -> Result<EndpointId, SetupError> {
        let id = u8::try_from(self.endpoints.len())
            .ok()
            .filter(|&n| n < u8::MAX)
            .ok_or(SetupError::TooMany)?;
        let mut config = self.config.keys.endpoint_config(self.config.core as u8);
        config
            .max_udp_payload_size(MAX_UDP_PAYLOAD_BYTES)
            .map_err(|_| SetupError::OutOfRange("UDP payload size"))?;
        // A restarted broker has as many resets to send as it had connections, and soon.
        config.min_reset_interval(Duration::from_millis(1));
        let server = match &spec.server {
            Some(setup) => Some(setup.build(&self.config.keys)?),
            None => None,
        };
        let allow_mtu_discovery = !spec.io.may_fragment();
        self.endpoints.push(Endpoint {
            role: spec.role,
            proto: quinn_proto::Endpoint::new(config.into(), server, allow_mtu_discovery, None),
            outbox: Outbox::new(spec.io),
            shared_port: spec.shared_port,
            max_connections: spec.max_connections,
            max_handshakes: spec.max_handshakes,
            accepted_handshaking: 0,
            open: 0,
            by_handle: Vec::new(),
            retry_at: None,
            waiting: Vec::new(),
            more_to_receive: false,
        });
        Ok(EndpointId(id))
    }

    /// Replaces certificates and settings for connections accepted from now on.
    pub fn set_server(
        &mut self,
        endpoint: EndpointId,
        setup: &ServerSetup,
    ) -> Result<(), SetupError> {
        let server = setup.build(&self.config.keys)?;
        if let Some(ep) = self.endpoints.get_mut(endpoint.index()) {
            ep.proto.set_server_config(Some(server));
        }
        Ok(())
    }

    /// The role given in the endpoint's spec.
    pub fn role(&self, endpoint: EndpointId) -> Option<u8> {
        self.endpoints.get(endpoint.index()).map(|e| e.role)
    }

    /// The address an endpoint is bound to.
    pub fn local_addr(&self, endpoint: EndpointId) -> io::Result<SocketAddr> {
        match self.endpoints.get(endpoint.index()) {
            Some(e) => e.outbox.io.local_addr(),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }

    /// What this pump did so far.
    pub fn counters(&self) -> &PumpCounters {
        &self.counters
    }

    /// What an endpoint's socket did so far.
    pub fn send_counters(&self, endpoint: EndpointId) -> SendCounters {
        self.endpoints
            .get(endpoint.index())
            .map(|e| e.outbox.counters)
            .unwrap_or_default()
    }

    /// Connections alive or closing.
    pub fn open_connections(&self) -> usize {
        self.conns.len()
    }

    /// Receives, runs due timers and collects events. True when a bound was hit and input is left.
    pub fn poll_io(&mut self, now: Instant) -> bool {
        let mut more = false;
        for index in 0..self.endpoints.len() {
            more |= self.receive(index, now);
        }
        self.run_timers(now);
        self.collect_events();
        more
    }

    /// The next event of this turn.
    pub fn next_event(&mut self) -> Option<PumpEvent> {
        self.events.pop_front()
    }

    /// Sends what the turn produced. True when a bound was hit and output is left.
    pub fn flush(&mut self, now: Instant) -> bool {
        for endpoint in &mut self.endpoints {
            if endpoint.outbox.is_blocked() && endpoint.outbox.retry() {
                endpoint.retry_at = None;
                self.dirty.extend(endpoint.waiting.drain(..));
            } else if endpoint.outbox.is_blocked() {
                endpoint.retry_at = Some(now + SEND_RETRY);
            }
        }
        for _ in 0..self.dirty.len() {
            let Some(index) = self.dirty.pop_front() else {
                break;
            };
            self.flush_connection(index, now);
        }
        !self.dirty.is_empty()
    }

    /// Takes in a datagram another core received.
    pub fn inject(&mut self, endpoint: EndpointId, datagram: StrayDatagram, now: Instant) {
        self.counters.strays_in += 1;
        if endpoint.index() < self.endpoints.len() {
            self.feed(
                endpoint,
                now,
                datagram.remote,
                datagram.local_ip,
                datagram.ecn,
                datagram.data,
            );
        }
    }

    fn run_timers(&mut self, now: Instant) {
        while let Some(index) = self.conns.pop_due(now) {
            let Some(conn) = self.conns.at(index) else {
                continue;
            };
            conn.proto.handle_timeout(now);
            touch(conn, &mut self.touched);
            if conn.handshake_deadline.is_some_and(|at| at <= now) {
                conn.handshake_deadline = None;
                if conn.phase == Phase::Handshaking {
                    conn.proto.close(now, 0u32.into(), Bytes::new());
                    self.report_end(index, CloseReason::TimedOut);
                }
            }
            // Not left to the flush: one that waits for the socket is not flushed, and has timers all the same.
            self.conns.arm(index);
        }
    }

    fn flush_connection(&mut self, index: u32, now: Instant) {
        let Some(conn) = self.conns.at(index) else {
            return;
        };
        conn.dirty = false;
        let (id, events) = (conn.id, &mut self.events);
        let queued = conn.queued_bytes();
        self.counters.dropped_after_reset_bytes +=
            conn.push_queues(|stream| events.push_back(PumpEvent::Drained { conn: id, stream }));
        self.queued_bytes -= queued - conn.queued_bytes();
        let endpoint = &mut self.endpoints[conn.endpoint.index()];
        let mut calls_left = self.config.send_calls_per_turn.max(1);
        loop {
            if endpoint.outbox.is_blocked() {
                endpoint.retry_at.get_or_insert(now + SEND_RETRY);
                conn.dirty = true;
                endpoint.waiting.push(index);
                break;
            }
            if calls_left == 0 {
                mark_dirty(conn, &mut self.dirty);
                break;
            }
            calls_left -= 1;
            let packets = endpoint.outbox.batch_packets(conn.proto.current_mtu());
            self.send_buffer.clear();
            match conn
                .proto
                .poll_transmit(now, packets, &mut self.send_buffer)
            {
                Some(transmit) => {
                    // A closed connection sends nothing but its close.
                    conn.close_unsent = false;
                    endpoint.outbox.send(&transmit, &self.send_buffer);
                }
                None => break,
            }
        }
        if conn.proto.is_drained() {
            touch(conn, &mut self.touched);
        }
        self.conns.arm(index);
    }
}

pub(super) fn touch(conn: &mut Conn, touched: &mut Vec<u32>) {
    if !std::mem::replace(&mut conn.touched, true) {
        touched.push(conn.id.index);
    }
}

pub(super) fn mark_dirty(conn: &mut Conn, dirty: &mut VecDeque<u32>) {
    if !std::mem::replace(&mut conn.dirty, true) {
        dirty.push_back(conn.id.index);
    }
}
