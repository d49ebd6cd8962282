//! The event loop of a core.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use shard_executor::rt::{self, Alarm};

use crate::catalog::RouteTable;
use crate::metrics::{CloseReason as ClosedBy, HandshakeFault};
use crate::proto::MonoTime;

use super::message::{Control, LaneMsg};
use super::reads::ReadWaiter;
use super::timers::Timer;
use super::{wall_us, Core};
use crate::driver::quic::{CloseReason, ConnId, EndpointId, PumpEvent, Refuser, Side};

/// Lane messages taken in one turn.
const LANE_QUANTUM: usize = 1024;
/// How often a core publishes its snapshot and checks slow deadlines.
const REPORT_PERIOD: Duration = Duration::from_secs(1);
/// How long the last answers get to be acknowledged when the core stops.
const CLOSE_SETTLE: Duration = Duration::from_millis(20);
/// How long closes may take to leave when the core stops.
const CLOSE_LINGER: Duration = Duration::from_millis(200);

/// How a core ended.
#[derive(Debug, Clone, Default)]
pub struct CoreEnd {
    /// Why the storage could not be closed, if it could not.
    pub storage_error: Option<String>,
}

impl Core {
    /// Runs until the control threads stop it.
    pub async fn run(mut self) -> CoreEnd {
        let mut alarm = Alarm::new();
        self.tell_time();
        self.lead_assigned_shards();
        loop {
            let is_busy = self.turn();
            if self.must_cut || (self.is_draining && self.is_idle()) {
                break;
            }
            if is_busy {
                // Lets the storage's tasks submit and the reactor look for completions.
                rt::yield_now().await;
                continue;
            }
            if self.finds_work_soon() {
                rt::yield_if_needed().await;
                continue;
            }
            self.wait(&mut alarm).await;
        }
        self.stop().await
    }

    /// One turn. True when there is work left that waits for nothing.
    fn turn(&mut self) -> bool {
        self.tell_time();
        self.metrics.loop_turns.inc();
        let mut is_busy = self.pump.poll_io(self.now);
        while let Some(event) = self.pump.next_event() {
            self.on_pump_event(event);
        }
        for (conn, stream) in std::mem::take(&mut self.read_again) {
            self.on_readable(conn, stream);
        }
        is_busy |= self.take_lanes();
        while let Some(control) = self.inbox.try_recv() {
            self.on_control(control);
        }
        self.take_completions();
        self.take_disk_reads();
        while let Some(timer) = self.timers.pop_due(self.mono) {
            self.on_timer(timer);
        }
        self.retry_settling();
        self.run_subscriptions();
        self.run_lanes();
        self.run_groups();
        if std::mem::take(&mut self.compaction_due) {
            self.run_compaction();
        }
        self.run_links();
        self.release_forwards();
        self.storage.kick();
        is_busy |= self.drain_backlog();
        is_busy |= self.pump.flush(self.now);
        let waited = self.peer_bounds.resumed(&self.pump);
        self.read_again.extend(waited);
        self.port.flush_wakes();
        if self.now >= self.report_at {
            self.report_at = self.now + REPORT_PERIOD;
            self.greeting_timeouts();
            self.waiting_for_room.on_taken();
            self.tend_caches();
            self.forward_orders.sweep();
            self.tend_groups();
            self.tend_compaction();
            self.report();
        }
        let took = self.now.elapsed().as_micros() as u64;
        if took > self.metrics.longest_turn_us.get() {
            self.metrics.longest_turn_us.set(took);
        }
        is_busy
            || !self.read_again.is_empty()
            || !self.read_results.is_empty()
            || self.waiting_for_room.is_due()
            || !self.group_reads_done.is_empty()
            || !self.pending_links.is_empty()
            || self.has_dirty_lanes()
    }

    fn tell_time(&mut self) {
        self.now = Instant::now();
        let since = self.now.saturating_duration_since(self.started);
        self.mono = MonoTime::from_micros(since.as_micros() as u64);
        self.wall_us = wall_us();
    }

    /// Looks for work for as long as the operator allows before the core sleeps: being woken costs
    /// more than a short look, when there is something to come.
    fn finds_work_soon(&mut self) -> bool {
        let (storage, signal, port) = (&self.storage, &self.signal, &self.port);
        let found = self.pump.spin(self.settings.spin, || {
            storage.kick();
            signal.is_set() || port.is_readable()
        });
        if found {
            // The turn that follows looks at everything the signal may stand for.
            self.signal.take();
        }
        found
    }

    async fn wait(&mut self, alarm: &mut Alarm) {
        let timer = self
            .timers
            .next()
            .map(|at| self.started + Duration::from_micros(at.as_micros()));
        let deadline = [timer, Some(self.report_at)].into_iter().flatten().min();
        alarm.set(deadline);
        poll_fn(|cx| {
            let mut ready = self.pump.poll_wait(cx, Instant::now()).is_ready();
            ready |= self.port.poll_readable(cx).is_ready();
            ready |= self.inbox.poll_readable(cx).is_ready();
            ready |= self.signal.poll_wait(cx).is_ready();
            ready |= alarm.poll_expired(cx).is_ready();
            match ready {
                true => Poll::Ready(()),
                false => Poll::Pending,
            }
        })
        .await;
        self.signal.take();
    }

    fn take_lanes(&mut self) -> bool {
        let mut messages = Vec::new();
        let taken = self
            .port
            .drain(LANE_QUANTUM, |from, message| messages.push((from, message)));
        for (from, message) in messages {
            self.on_lane(from, message);
        }
        taken == LANE_QUANTUM
    }

    fn on_lane(&mut self, from: usize, message: LaneMsg) {
        match message {
            LaneMsg::Stray { endpoint, datagram } => {
                self.pump.inject(endpoint, datagram, self.now);
                while let Some(event) = self.pump.next_event() {
                    self.on_pump_event(event);
                }
            }
            LaneMsg::Append(append) => {
                let waiter = super::append::AppendWaiter::Lane {
                    core: from,
                    ticket: append.ticket,
                };
                self.append_here(&append.shard, append.generation, &append.payloads, waiter);
            }
            LaneMsg::AppendDone { ticket, result } => {
                if let Some(waiter) = self.lane_appends.remove(ticket) {
                    self.finish_append(waiter, result);
                }
            }
            LaneMsg::Cache(op) => {
                let waiter = super::cache::CacheWaiter::Lane {
                    core: from,
                    ticket: op.ticket,
                };
                self.cache_here(&op.shard, op.generation, op.request, waiter);
            }
            LaneMsg::CacheDone { ticket, result } => {
                if let Some(waiter) = self.lane_caches.remove(ticket) {
                    self.finish_cache(waiter, result);
                }
            }
            LaneMsg::Group(ask) => {
                let from = super::group::AskedBy {
                    core: from,
                    ask: ask.ask,
                };
                self.group_here(&ask.shard, &ask.group, ask.generation, ask.op, from);
            }
            LaneMsg::GroupDone { ask, result } => self.finish_group_ask(ask, result),
            LaneMsg::CancelPoll { ask } => {
                self.cancel_poll(super::group::AskedBy { core: from, ask });
            }
            LaneMsg::Read(read) => {
                let waiter = ReadWaiter::Lane {
                    core: from,
                    ticket: read.ticket,
                };
                self.read_here(&read.shard, read.read, waiter);
            }
            LaneMsg::ReadDone { ticket, result } => self.read_results.push_back((ticket, result)),
            LaneMsg::Replicate(request) => self.replicate_here(from, *request),
            LaneMsg::Replicated { ticket, answer } => self.finish_replicate(ticket, answer),
            LaneMsg::CancelRead { shard, ticket } => {
                self.cancel_read(&shard, ReadWaiter::Lane { core: from, ticket });
            }
        }
    }

    fn on_pump_event(&mut self, event: PumpEvent) {
        match event {
            PumpEvent::Connected {
                conn,
                endpoint,
                side,
                remote,
                peer_certificates,
                ..
            } => match (side, endpoint == self.endpoints.client) {
                (Side::Client, _) => self.on_link_connected(conn),
                (Side::Server, true) => self.on_client_connected(conn, remote),
                (Side::Server, false) => self.on_peer_accepted(conn, remote, &peer_certificates),
            },
            PumpEvent::HandshakeFailed {
                conn,
                endpoint,
                side,
                remote,
                reason,
            } => {
                self.on_handshake_failed(conn, endpoint, side, remote, &reason);
            }
            PumpEvent::StreamOpened { conn, stream, bi } => {
                if self.clients.contains_key(&conn) {
                    self.on_client_stream_opened(conn, stream, bi);
                } else {
                    self.on_peer_stream_opened(conn, stream, bi);
                }
            }
            PumpEvent::Readable { conn, stream } => self.on_readable(conn, stream),
            PumpEvent::Drained { conn, stream } => {
                self.on_events_drained(conn, stream);
                self.read_again.push((conn, stream));
            }
            PumpEvent::StreamStopped { conn, stream, .. } => {
                self.on_client_stream_stopped(conn, stream);
            }
            PumpEvent::StreamFinished { .. } | PumpEvent::StreamsAvailable { .. } => {}
            PumpEvent::Closed { conn, reason } => self.on_closed(conn, &reason),
            PumpEvent::Stray {
                core,
                endpoint,
                datagram,
            } => {
                let message = LaneMsg::Stray { endpoint, datagram };
                match self.port.try_send(usize::from(core), message) {
                    Ok(()) => self.metrics.strays_handed_over.inc(),
                    // The transport repairs a lost datagram; a queue here would only delay it.
                    Err(_) => self.metrics.strays_dropped.inc(),
                }
            }
        }
    }

    fn on_readable(&mut self, conn: ConnId, stream: crate::driver::quic::StreamId) {
        if self.clients.contains_key(&conn) {
            self.on_client_readable(conn, stream);
        } else if self.accepted_peers.contains_key(&conn) {
            self.on_peer_readable(conn, stream);
        } else {
            self.on_link_readable(conn, stream);
        }
    }

    fn on_closed(&mut self, conn: ConnId, reason: &CloseReason) {
        if self.clients.contains_key(&conn) {
            tracing::debug!(%reason, "client connection closed");
            self.metrics.connections_closed.inc(client_end(reason));
            self.forget_client(conn);
        } else if let Some(peer) = self.forget_peer(conn) {
            tracing::info!(remote = %peer.remote, %reason, "peer connection closed");
            self.metrics.connections_closed.inc(peer_end(reason));
        } else {
            self.on_link_closed(conn, reason);
        }
    }

    fn on_handshake_failed(
        &mut self,
        conn: Option<ConnId>,
        endpoint: EndpointId,
        side: Side,
        remote: std::net::SocketAddr,
        reason: &CloseReason,
    ) {
        if side == Side::Client {
            if let Some(conn) = conn {
                self.on_link_closed(conn, reason);
            }
            return;
        }
        let is_client = endpoint == self.endpoints.client;
        let fault = match (is_client, reason) {
            (true, CloseReason::TlsRefused { alert: 120, .. }) => HandshakeFault::ClientAlpn,
            (true, CloseReason::TlsRefused { .. }) => HandshakeFault::ClientTls,
            (true, CloseReason::Refused) => HandshakeFault::ClientLimit,
            (true, _) => HandshakeFault::ClientTimeout,
            (false, CloseReason::TlsRefused { .. }) => HandshakeFault::PeerTls,
            (false, CloseReason::Refused) => HandshakeFault::PeerLimit,
            (false, _) => HandshakeFault::PeerTimeout,
        };
        self.metrics.handshakes_failed.inc(fault);
        match (is_client, reason) {
            (
                false,
                CloseReason::TlsRefused {
                    by: Refuser::Us, ..
                },
            ) => {
                tracing::warn!(%remote, %reason, "refused a peer's certificate");
            }
            // Whoever comes while a limit is reached; the counter tells of them.
            (false, CloseReason::Refused) => {
                tracing::debug!(%remote, "a peer's connection is one too many");
            }
            (false, _) => tracing::warn!(%remote, %reason, "a peer's handshake failed"),
            (true, _) => tracing::debug!(%remote, %reason, "a client's handshake failed"),
        }
    }

    fn on_timer(&mut self, timer: Timer) {
        match timer {
            Timer::Forward { token } => self.on_forward_time(token),
            Timer::Link { node } => self.on_link_time(node),
            Timer::ClosePeer { conn, reason } => self.close_refused_peer(conn, reason),
            Timer::ClientConn { conn } => self.on_client_conn_time(conn),
            Timer::ClientStream { conn, stream } => self.on_client_stream_time(conn, stream),
            Timer::Ship { at } => self.on_ship_time(at),
            Timer::ShipLane { node } => self.on_lane_time(&node),
            Timer::Group { at } => self.on_group_time(&at),
            Timer::Compaction => self.run_compaction(),
        }
    }

    fn on_control(&mut self, control: Control) {
        match control {
            Control::Catalog(catalog) => {
                let table = RouteTable::build(&catalog, &self.me, self.settings.cores);
                self.routes = Arc::new(table);
                self.verifier.replace_keys(&catalog);
                self.ship_after_catalog();
                self.drop_readers_of_moved_shards();
                self.drop_moved_groups();
                self.drop_moved_caches();
                self.followers_after_catalog();
                self.forwards_after_catalog();
            }
            Control::Resolved { node, addr } => {
                self.resolved.insert(node, addr);
            }
            Control::Drain => {
                self.is_draining = true;
                self.drain_clients();
                self.end_group_waits();
            }
            Control::Cut => self.must_cut = true,
        }
    }

    /// Nothing accepted is unanswered.
    fn is_idle(&self) -> bool {
        self.appends.is_empty()
            && self.lane_appends.is_empty()
            && self.lane_caches.is_empty()
            && self.cache_reads.is_empty()
            && self.groups.is_settled()
            && self.group_asks.is_empty()
            && self.forwards.is_empty()
            && self.replicate_waiters.is_empty()
            && self.follower_requests() == 0
            && self.shipping.waiting() == 0
            && self
                .lane_backlog
                .iter()
                .all(std::collections::VecDeque::is_empty)
    }

    /// Told at once and not at the end: a disk that does not answer may keep a core from ending.
    fn say_cut(&self, what: String) {
        // Nobody listens only when the control thread has given up already.
        let _ = self.cut.send(format!("core {}: {what}", self.index));
    }

    /// The shards whose log holds records that are not on disk yet, with the first and the last.
    fn undurable_records(&self) -> Vec<(String, u64, u64)> {
        let logs = self.logs.iter().map(|(shard, open)| {
            let (durable, tail) = (
                self.storage.durable_tail(open.log),
                self.storage.tail(open.log),
            );
            (shard.to_string(), durable, tail)
        });
        logs.filter(|(_, durable, tail)| durable < tail)
            .map(|(shard, durable, tail)| (shard, durable, tail - 1))
            .collect()
    }

    async fn stop(mut self) -> CoreEnd {
        let mut end = CoreEnd::default();
        for (count, what) in [
            (self.appends.len(), "appends not durable yet"),
            (self.lane_appends.len(), "appends handed to other cores"),
            (
                self.lane_caches.len(),
                "cache operations handed to other cores",
            ),
            (self.cache_reads.len(), "cache reads not finished"),
            (self.groups.asks(), "group requests without an answer"),
            (self.forwards.len(), "forwarded requests without an answer"),
            (
                self.replicate_waiters.len(),
                "batches of leaders without an answer",
            ),
            (self.shipping.waiting(), "writes without a majority"),
        ] {
            if count > 0 {
                self.say_cut(format!("{count} {what}"));
            }
        }
        for (shard, from, to) in self.undurable_records() {
            self.say_cut(format!("{shard}: records {from} to {to} not durable"));
        }
        self.tell_time();
        self.pump.flush(self.now);
        // Answers already queued get out before the close that would drop them, and the congestion
        // window empties, which would hold back the close itself.
        let settled = Instant::now() + CLOSE_SETTLE;
        let linger = Instant::now() + CLOSE_LINGER;
        while !self.must_cut
            && Instant::now() < linger
            && (self.pump.has_work() || Instant::now() < settled)
        {
            self.tell_time();
            self.pump.poll_io(self.now);
            while self.pump.next_event().is_some() {}
            self.pump.flush(self.now);
            rt::sleep(Duration::from_millis(1)).await;
        }
        self.pump.close_all(0, b"shutting down", Instant::now());
        let linger = Instant::now() + CLOSE_LINGER;
        while !self.pump.is_quiet() && Instant::now() < linger {
            self.tell_time();
            self.pump.poll_io(self.now);
            while self.pump.next_event().is_some() {}
            self.pump.flush(self.now);
            rt::sleep(Duration::from_millis(1)).await;
        }
        if let Err(error) = self.storage.close().await {
            end.storage_error = Some(format!("core {}: {error}", self.index));
        }
        self.report();
        end
    }
}

fn client_end(reason: &CloseReason) -> ClosedBy {
    match reason {
        CloseReason::ApplicationClosed { .. } => ClosedBy::ClientClosed,
        CloseReason::TimedOut => ClosedBy::ClientIdle,
        CloseReason::Reset => ClosedBy::ClientReset,
        CloseReason::LocallyClosed => ClosedBy::ClientDraining,
        CloseReason::TlsRefused { .. }
        | CloseReason::Refused
        | CloseReason::VersionMismatch
        | CloseReason::TransportError { .. } => ClosedBy::ClientTransportError,
    }
}

fn peer_end(reason: &CloseReason) -> ClosedBy {
    match reason {
        CloseReason::ApplicationClosed { .. } => ClosedBy::PeerClosed,
        CloseReason::TimedOut => ClosedBy::PeerIdle,
        CloseReason::Reset => ClosedBy::PeerReset,
        CloseReason::LocallyClosed => ClosedBy::PeerDraining,
        CloseReason::TlsRefused { .. }
        | CloseReason::Refused
        | CloseReason::VersionMismatch
        | CloseReason::TransportError { .. } => ClosedBy::PeerTransportError,
    }
}
