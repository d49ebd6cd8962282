//! A client connection from its first packet to its last: when it is closed, and what it may hold.

use std::collections::HashMap;
use std::net::SocketAddr;

use crate::metrics::{ClientCode, CloseReason as ClosedBy, ConnectionRole, SubscriberEnd};
use crate::proto::client_session::{ConnectionClose, ConnectionSession};
use crate::wire::client::messages::GroupRecords;
use crate::wire::client::{ErrorCode, Refusal};

use super::super::timers::Timer;
use super::{ClientConn, Core};
use crate::driver::quic::{ConnId, StreamId, StreamMap};

/// Of unfinished frames a connection may hold so much whatever others hold: one of 64 KiB and a bit.
const ALWAYS_HELD_BYTES: usize = 128 << 10;
/// Of unfinished frames a connection may hold so much before anything on it has authenticated.
const STRANGER_HELD_BYTES: usize = 1 << 20;

impl Core {
    pub(in crate::driver::core) fn on_client_connected(
        &mut self,
        conn: ConnId,
        remote: SocketAddr,
    ) {
        self.metrics.connections_opened.inc(ConnectionRole::Client);
        let mut session = ConnectionSession::new(self.mono, self.settings.auth_timeout);
        if self.is_draining {
            session.begin_drain(self.mono, self.settings.drain_patience);
        }
        if let Some(at) = session.deadline() {
            self.timers.push(at, Timer::ClientConn { conn });
        }
        let client = ClientConn {
            remote,
            session,
            streams: StreamMap::default(),
            last_identity: None,
            in_flight_bytes: 0,
            buffered_bytes: 0,
            paused: Vec::new(),
            subscriptions: HashMap::new(),
            next_subscription_id: 1,
            session_number: u64::from(self.index) << 48 | self.client_sessions,
            polls: HashMap::new(),
        };
        self.client_sessions += 1;
        self.clients.insert(conn, client);
    }

    pub(in crate::driver::core) fn on_client_conn_time(&mut self, conn: ConnId) {
        let Some(client) = self.clients.get_mut(&conn) else {
            return;
        };
        let owed = client
            .streams
            .values()
            .map(|stream| stream.session.owed())
            .sum();
        let Some(close) = client.session.poll_close(self.mono, owed) else {
            return;
        };
        tracing::debug!(remote = %client.remote, why = close.reason(), "closing a client connection");
        self.metrics.connections_closed.inc(match close {
            ConnectionClose::AuthenticationTimeout => ClosedBy::ClientAuthTimeout,
            ConnectionClose::ShuttingDown => ClosedBy::ClientDraining,
        });
        self.forget_client(conn);
        self.pump
            .close(conn, close.code(), close.reason().as_bytes(), self.now);
    }

    /// Counts what a stream holds of a frame that has not come whole. One that makes its connection or
    /// the core hold more than it may is told so and ended: to wait for room would not make any, as the
    /// others may be waiting for theirs.
    pub(super) fn bound_unfinished(&mut self, conn: ConnId, stream: StreamId) {
        let of_client = self.settings.client_in_flight_bytes;
        let of_core = self.settings.client_buffered_bytes;
        let Some(client) = self.clients.get_mut(&conn) else {
            return;
        };
        let Some(state) = client.streams.get_mut(&stream) else {
            return;
        };
        let held = state.reader.buffered_bytes();
        let held_before = std::mem::replace(&mut state.buffered_bytes, held);
        client.buffered_bytes = client.buffered_bytes - held_before + held;
        self.client_buffered_bytes = self.client_buffered_bytes - held_before + held;
        let of_connection = match client.session.is_stranger() {
            true => STRANGER_HELD_BYTES,
            false => of_client,
        };
        let is_over = client.buffered_bytes > of_connection
            || self.client_buffered_bytes > of_core && client.buffered_bytes > ALWAYS_HELD_BYTES;
        if is_over && held > held_before {
            self.metrics.requests_refused.inc(ClientCode::Overloaded);
            let why = "too many bytes of unfinished frames are held already";
            state
                .session
                .give_up(Refusal::new(ErrorCode::Overloaded, why));
        }
    }

    /// The client takes no more of what we write on a stream.
    pub(in crate::driver::core) fn on_client_stream_stopped(
        &mut self,
        conn: ConnId,
        stream: StreamId,
    ) {
        let Some(client) = self.clients.get_mut(&conn) else {
            return;
        };
        if let Some(token) = client.subscriptions.remove(&stream) {
            return self.end_subscription(token, SubscriberEnd::StoppedByClient);
        }
        if let Some(state) = client.streams.get_mut(&stream) {
            state.session.on_client_deaf();
        }
        if let Some(ask) = client.polls.remove(&stream) {
            self.give_up_poll(ask);
            // Goes nowhere; the stream is owed nothing any more.
            let answer = GroupRecords {
                records: Vec::new(),
                request_id: 0,
            };
            self.answer(conn, stream, answer);
        }
    }

    /// The connection is over: nothing on it can be answered any more.
    pub(in crate::driver::core) fn forget_client(&mut self, conn: ConnId) {
        let Some(client) = self.clients.remove(&conn) else {
            return;
        };
        self.client_buffered_bytes -= client.buffered_bytes;
        for token in client.subscriptions.into_values() {
            self.end_subscription(token, SubscriberEnd::ConnectionLost);
        }
        for ask in client.polls.into_values() {
            self.give_up_poll(ask);
        }
    }

    /// From now on no new work is taken; what is owed is answered.
    pub(in crate::driver::core) fn drain_clients(&mut self) {
        let patience = self.settings.drain_patience;
        for client in self.clients.values_mut() {
            client.session.begin_drain(self.mono, patience);
            for stream in client.streams.values_mut() {
                stream.session.begin_drain();
            }
        }
    }

    /// Something was answered: streams held back by a bound are read on.
    pub(super) fn resume_paused(&mut self, conn: ConnId) {
        let limit = self.settings.client_in_flight_bytes;
        let Some(client) = self.clients.get_mut(&conn) else {
            return;
        };
        if client.in_flight_bytes < limit && !client.paused.is_empty() {
            let paused = std::mem::take(&mut client.paused);
            self.read_again
                .extend(paused.into_iter().map(|stream| (conn, stream)));
        }
    }
}
