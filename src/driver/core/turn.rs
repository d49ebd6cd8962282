//! The event loop of a core.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use shard_executor::rt::{self, Alarm};

use crate::catalog::RouteTable;
use crate::proto::MonoTime;

use super::message::{Control, LaneMsg};
use super::reads::ReadWaiter;
use super::timers::Timer;
use super::{wall_us, Core, CoreEnd};

/// Lane messages taken in one turn.
const LANE_QUANTUM: usize = 1024;
/// How often a core publishes its snapshot and checks slow deadlines.
const REPORT_PERIOD: Duration = Duration::from_secs(1);

impl Core {
    /// Runs until the control threads stop it.
    pub async fn run(mut self) -> CoreEnd {
        self.open_kept_streams();
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
        is_busy |= self.run_bulk();
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

    pub(super) fn tell_time(&mut self) {
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
                self.retention_after_catalog();
                self.forwards_after_catalog();
                self.retire_links_after_catalog();
            }
            Control::Resolved { node, addr } => {
                self.resolved.insert(node, addr);
            }
            Control::EndLog(why) => self.storage.fail(why),
            Control::Drain => {
                self.is_draining = true;
                self.drain_clients();
                self.end_group_waits();
            }
            Control::Cut => self.must_cut = true,
        }
    }
}
