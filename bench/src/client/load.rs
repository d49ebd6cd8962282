//! The load loop: one core, many connections, every batch accounted for.
//!
//! A turn reads what came in, sends what is due, and flushes once, so that small publishes of a turn
//! share packets. Nothing here judges records: outcomes go to the ledger as they are told.
//!
//! Invariants: a connection never has more than its bound outstanding; a batch ends in exactly one of
//! acknowledged, refused or unknown; a retry carries fresh records, so a refused record must never be
//! found later.

use std::collections::{HashMap, VecDeque};
use std::future::poll_fn;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use felix_uring::driver::quic::{
    client_config, ConnId, EndpointId, EndpointSpec, Pump, PumpConfig, PumpEvent, SharedKeys,
    StreamId, TransportSettings, UdpIo,
};
use felix_uring::wire::client::{ErrorCode, Refusal, WireCode};
use shard_executor::rt;

use super::lanes::{Conn, Lane, Op, Pending, Phase, Slot};
use super::speak::{verdict, Heard, Verdict};
use super::spec::{LoadError, LoadReport, LoadSpec, Progress, Tally};
use crate::cpu::thread_cpu_seconds;
use crate::meter::Meter;
use crate::record::RecordMaker;
use crate::schedule::Schedule;
use crate::verify::Ledger;

/// Timeouts and reconnects are looked at this often.
const TICK: Duration = Duration::from_millis(10);
/// Every connection has to be up within this time at the start.
const START_PATIENCE: Duration = Duration::from_secs(10);
/// Attempts of one operation.
const MAX_ATTEMPTS: u32 = 8;

/// Runs a load on a core of its own and blocks until it is over.
pub fn run_load(
    spec: LoadSpec,
    progress: Arc<Progress>,
    stop: Arc<AtomicBool>,
) -> Result<LoadReport, LoadError> {
    let mut core = rt::CoreSpec::new(0);
    core.cpu = spec.cpu;
    core.name = "load".into();
    let setup = |error: &dyn std::fmt::Display| LoadError::Setup(error.to_string());
    let handle = rt::spawn_core(core, move || async move {
        match Load::new(spec, progress) {
            Ok(load) => load.run(&stop).await,
            Err(error) => Err(error),
        }
    })
    .map_err(|error| setup(&error))?;
    handle.join().map_err(|error| setup(&error))?
}

struct Retry {
    at_ns: u64,
    slot: Slot,
    op: Op,
}

struct Load {
    spec: LoadSpec,
    progress: Arc<Progress>,
    pump: Pump,
    dial: quinn_proto::ClientConfig,
    conns: Vec<Conn>,
    by_id: HashMap<ConnId, usize>,
    free: VecDeque<Slot>,
    retries: VecDeque<Retry>,
    maker: RecordMaker,
    schedule: Schedule,
    meter: Meter,
    ledger: Ledger,
    tally: Tally,
    per_shard: Vec<u64>,
    next_writer: u32,
    acked_records: u64,
    born: Instant,
    started: Option<Instant>,
    cpu_at: [Option<f64>; 2],
    measure_from_ns: u64,
    end_ns: u64,
    fatal: Option<LoadError>,
}

impl Load {
    fn new(spec: LoadSpec, progress: Arc<Progress>) -> Result<Self, LoadError> {
        let setup = |error: &dyn std::fmt::Display| LoadError::Setup(error.to_string());
        let transport = transport_settings().build().map_err(|e| setup(&e))?;
        let dial = client_config(spec.tls.clone(), transport).map_err(|e| setup(&e))?;
        let mut pump =
            Pump::new(PumpConfig::new(0, 1, SharedKeys::generate())).map_err(|e| setup(&e))?;
        let mut endpoints = Vec::new();
        for index in 0..spec.sockets.clamp(1, spec.connections.max(1)) {
            let is_v4 = spec.targets[index % spec.targets.len()].addr.is_ipv4();
            endpoints.push(add_socket(&mut pump, is_v4)?);
        }
        let conns = (0..spec.connections)
            .map(|i| Conn::new(i % spec.targets.len(), endpoints[i % endpoints.len()]))
            .collect();
        let measure_from_ns = spec.warmup.as_nanos() as u64;
        let end_ns = measure_from_ns + spec.duration.as_nanos() as u64;
        Ok(Self {
            pump,
            dial,
            conns,
            by_id: HashMap::new(),
            free: VecDeque::new(),
            retries: VecDeque::new(),
            maker: RecordMaker::new(spec.run, spec.payload_bytes),
            schedule: Schedule::new(spec.pace, measure_from_ns, end_ns),
            meter: Meter::new(measure_from_ns, end_ns),
            ledger: Ledger::new(spec.run, spec.batch, spec.shard_count),
            tally: Tally::default(),
            per_shard: vec![0; spec.shard_count as usize],
            next_writer: spec.first_writer,
            acked_records: 0,
            born: Instant::now(),
            started: None,
            cpu_at: [None; 2],
            measure_from_ns,
            end_ns,
            fatal: None,
            spec,
            progress,
        })
    }

    async fn run(mut self, stop: &AtomicBool) -> Result<LoadReport, LoadError> {
        let mut alarm = rt::Alarm::new();
        let mut next_tick = Instant::now();
        loop {
            let now = Instant::now();
            self.pump.poll_io(now);
            while let Some(event) = self.pump.next_event() {
                self.on_event(event, now);
            }
            if now >= next_tick {
                next_tick = now + TICK;
                self.on_tick(now)?;
            }
            if self.started.is_some() {
                self.issue(now);
                self.sample_cpu(now);
            }
            self.pump.flush(Instant::now());
            if let Some(fatal) = self.fatal.take() {
                return Err(fatal);
            }
            if stop.load(Ordering::Relaxed) {
                return Err(LoadError::Stopped);
            }
            if self.is_done(now) {
                break;
            }
            let wake_at = self.wake_at(next_tick);
            wait(&mut self.pump, &mut alarm, wake_at).await;
            rt::yield_if_needed().await;
        }
        self.give_up_outstanding();
        self.leave(&mut alarm).await;
        Ok(self.into_report())
    }

    /// Nanoseconds since the start; before the start, of no meaning to anyone but the dialling.
    fn at_ns(&self, now: Instant) -> u64 {
        let zero = self.started.unwrap_or(self.born);
        now.saturating_duration_since(zero).as_nanos() as u64
    }

    fn is_done(&self, now: Instant) -> bool {
        let now_ns = self.at_ns(now);
        if self.started.is_none() || !self.schedule.is_over(now_ns) {
            return false;
        }
        let none_left = self.conns.iter().all(|c| c.outstanding() == 0);
        let patience_ns = self.spec.request_timeout.as_nanos() as u64;
        none_left || now_ns >= self.end_ns + patience_ns
    }

    fn wake_at(&self, tick: Instant) -> Instant {
        let Some(started) = self.started else {
            return tick;
        };
        // Without room for a batch the schedule has to wait for an answer anyhow.
        let due = (!self.free.is_empty())
            .then(|| self.schedule.next_due_ns())
            .flatten();
        let retry = self.retries.front().map(|retry| retry.at_ns);
        due.into_iter()
            .chain(retry)
            .map(|ns| started + Duration::from_nanos(ns))
            .fold(tick, Instant::min)
    }

    fn on_tick(&mut self, now: Instant) -> Result<(), LoadError> {
        let now_ns = self.at_ns(now);
        self.dial_what_is_due(now, now_ns)?;
        self.time_out(now_ns);
        self.progress.publish(self.acked_records, &self.tally);
        if self.started.is_some() {
            return Ok(());
        }
        let late = self.conns.iter().find(|c| c.phase != Phase::Ready);
        match late {
            None => {
                self.started = Some(now);
                self.progress.start(now);
            }
            Some(conn) if now > self.born + START_PATIENCE => {
                let reason = conn.last_end.clone();
                return Err(LoadError::Unreachable {
                    addr: self.spec.targets[conn.target].addr,
                    reason: reason.unwrap_or_else(|| "no answer".into()),
                });
            }
            Some(_) => {}
        }
        Ok(())
    }

    fn dial_what_is_due(&mut self, now: Instant, now_ns: u64) -> Result<(), LoadError> {
        if self.started.is_some() && self.schedule.is_over(now_ns) {
            return Ok(());
        }
        for index in 0..self.conns.len() {
            let conn = &mut self.conns[index];
            match conn.phase {
                Phase::Down { dial_at_ns } if dial_at_ns <= now_ns => {}
                Phase::Down { .. } | Phase::Starting | Phase::Ready => continue,
            }
            let addr = self.spec.targets[conn.target].addr;
            let id = self
                .pump
                .connect(
                    conn.endpoint,
                    addr,
                    &self.spec.server_name,
                    self.dial.clone(),
                    now,
                )
                .map_err(|error| LoadError::Setup(format!("cannot dial {addr}: {error}")))?;
            conn.id = Some(id);
            conn.phase = Phase::Starting;
            self.by_id.insert(id, index);
        }
        Ok(())
    }

    fn time_out(&mut self, now_ns: u64) {
        let patience_ns = self.spec.request_timeout.as_nanos() as u64;
        for index in 0..self.conns.len() {
            let conn = &mut self.conns[index];
            let slot = Slot {
                conn: index,
                life: conn.life,
            };
            for lane in &mut conn.lanes {
                while let Some(oldest) = lane.pending.first_entry() {
                    if oldest.get().sent_ns + patience_ns > now_ns {
                        break;
                    }
                    oldest.remove();
                    self.tally.unknown += 1;
                    self.tally.note("no answer in time");
                    self.free.push_back(slot);
                }
            }
        }
    }

    fn on_event(&mut self, event: PumpEvent, now: Instant) {
        match event {
            PumpEvent::Connected { conn, .. } => self.on_connected(conn, now),
            PumpEvent::Readable { conn, stream } => self.on_readable(conn, stream, now),
            PumpEvent::Closed { conn, reason } => self.on_ended(conn, &reason.to_string(), now),
            PumpEvent::HandshakeFailed {
                conn: Some(conn),
                reason,
                ..
            } => self.on_ended(conn, &reason.to_string(), now),
            PumpEvent::StreamStopped { conn, code, .. } => {
                self.break_off(
                    conn,
                    &format!("the broker stopped a stream with code {code}"),
                    now,
                );
            }
            PumpEvent::HandshakeFailed { conn: None, .. }
            | PumpEvent::StreamOpened { .. }
            | PumpEvent::Drained { .. }
            | PumpEvent::StreamFinished { .. }
            | PumpEvent::StreamsAvailable { .. }
            | PumpEvent::Stray { .. } => {}
        }
    }

    fn on_connected(&mut self, id: ConnId, now: Instant) {
        let Some(&index) = self.by_id.get(&id) else {
            return;
        };
        for _ in 0..self.spec.streams {
            if let Err(why) = self.open_lane(index, id) {
                return self.break_off(id, &why, now);
            }
        }
        self.check_ready(index);
    }

    fn open_lane(&mut self, index: usize, id: ConnId) -> Result<(), String> {
        let stream = self.pump.open_bi(id).map_err(|e| e.to_string())?;
        let (speaker, hello) = self.spec.protocol.open()?;
        if let Some(hello) = hello {
            self.pump
                .send(id, stream, hello)
                .map_err(|e| e.to_string())?;
        }
        let conn = &mut self.conns[index];
        conn.lanes.push(Lane {
            stream,
            is_ready: speaker.is_ready_at_once(),
            speaker,
            writer: self.next_writer,
            next_request: 1,
            next_sequence: vec![0; self.spec.targets[conn.target].shards.len()],
            // Writers start at different shards, so that few batches spread as well as many.
            next_shard: self.next_writer as usize,
            pending: Default::default(),
        });
        self.next_writer += 1;
        Ok(())
    }

    fn check_ready(&mut self, index: usize) {
        let conn = &mut self.conns[index];
        let all = conn.lanes.len() == self.spec.streams && conn.lanes.iter().all(|l| l.is_ready);
        if conn.phase == Phase::Starting && all {
            conn.on_ready();
            let slot = Slot {
                conn: index,
                life: conn.life,
            };
            self.free
                .extend(std::iter::repeat_n(slot, self.spec.in_flight));
        }
    }

    fn on_readable(&mut self, id: ConnId, stream: StreamId, now: Instant) {
        let Some(&index) = self.by_id.get(&id) else {
            return;
        };
        let Some(lane) = self.conns[index].lane_of(stream) else {
            return;
        };
        let speaker = &mut self.conns[index].lanes[lane].speaker;
        let end = self
            .pump
            .read_each(id, stream, usize::MAX, |chunk| speaker.push(chunk));
        while let Some(heard) = self.next_heard(index, lane) {
            self.on_heard(index, lane, heard, now);
        }
        use felix_uring::driver::quic::ReadEnd;
        match end {
            ReadEnd::Blocked | ReadEnd::Limit => {}
            ReadEnd::Finished | ReadEnd::Reset(_) | ReadEnd::Closed => {
                self.break_off(id, "the broker ended a publish stream", now);
            }
        }
    }

    /// Handling what was heard may end the connection and its lanes.
    fn next_heard(&mut self, index: usize, lane: usize) -> Option<Heard> {
        self.conns[index].lanes.get_mut(lane)?.speaker.next()
    }

    fn on_heard(&mut self, index: usize, lane: usize, heard: Heard, now: Instant) {
        match heard {
            Heard::Ready => {
                self.conns[index].lanes[lane].is_ready = true;
                self.check_ready(index);
            }
            Heard::Accepted { request_id, offset } => {
                if let Some((writer, pending)) = self.take_pending(index, lane, request_id) {
                    self.on_acked(writer, &pending, offset, now);
                    self.free_slot(index);
                }
            }
            Heard::Refused {
                request_id,
                refusal,
            } => {
                if let Some((writer, pending)) = self.take_pending(index, lane, request_id) {
                    self.on_refused(index, writer, &pending, &refusal, now);
                }
            }
            Heard::Broken(why) => {
                if self.started.is_none() {
                    self.fatal = Some(LoadError::Refused(why.clone()));
                }
                if let Some(id) = self.conns[index].id {
                    self.break_off(id, &why, now);
                }
            }
        }
    }

    fn take_pending(&mut self, index: usize, lane: usize, request: u64) -> Option<(u32, Pending)> {
        let lane = &mut self.conns[index].lanes[lane];
        let pending = lane.pending.remove(&request);
        if pending.is_none() {
            self.tally.late_answers += 1;
        }
        Some((lane.writer, pending?))
    }

    fn on_acked(&mut self, writer: u32, pending: &Pending, offset: Option<u64>, now: Instant) {
        let records = u64::from(self.spec.batch);
        let now_ns = self.at_ns(now);
        self.ledger
            .on_acked(writer, pending.shard, pending.first_sequence, offset);
        self.meter
            .on_acked(now_ns, pending.op.due_ns, records, self.spec.batch_bytes());
        self.tally.acked += 1;
        self.acked_records += records;
    }

    fn on_refused(
        &mut self,
        index: usize,
        writer: u32,
        pending: &Pending,
        refusal: &Refusal,
        now: Instant,
    ) {
        let code = refusal.code.as_ref().map_or("no code", WireCode::name);
        self.tally.note(&format!("{code}: {}", refusal.message));
        let verdict = verdict(refusal);
        if verdict == Verdict::Unknown {
            self.tally.unknown += 1;
            return self.free_slot(index);
        }
        self.tally.refusals += 1;
        self.ledger
            .on_refused(writer, pending.shard, pending.first_sequence);
        let now_ns = self.at_ns(now);
        let op = pending.op;
        match verdict {
            Verdict::Retry { after_ms }
                if op.attempts < MAX_ATTEMPTS && !self.schedule.is_over(now_ns) =>
            {
                let at_ns = now_ns + after_ms.max(1) * 1_000_000;
                let slot = Slot {
                    conn: index,
                    life: self.conns[index].life,
                };
                let behind = self.retries.partition_point(|r| r.at_ns <= at_ns);
                self.retries.insert(behind, Retry { at_ns, slot, op });
            }
            Verdict::Retry { .. } | Verdict::Failed | Verdict::Unknown => {
                self.tally.failed += 1;
                self.free_slot(index);
            }
        }
        if self.tally.acked == 0 && is_hopeless(refusal) {
            self.fatal = Some(LoadError::Refused(format!("{code}: {}", refusal.message)));
        }
    }

    fn free_slot(&mut self, index: usize) {
        let life = self.conns[index].life;
        self.free.push_back(Slot { conn: index, life });
    }

    fn issue(&mut self, now: Instant) {
        let now_ns = self.at_ns(now);
        while self.retries.front().is_some_and(|r| r.at_ns <= now_ns) {
            let Some(Retry { slot, op, .. }) = self.retries.pop_front() else {
                break;
            };
            if self.is_current(slot) && !self.schedule.is_over(now_ns) {
                self.tally.retried += 1;
                self.publish(slot, op, now_ns);
            } else {
                self.tally.failed += 1;
            }
        }
        loop {
            let Some(slot) = self.next_free() else {
                self.schedule.on_full();
                break;
            };
            let Some(due_ns) = self.schedule.take(now_ns) else {
                self.free.push_front(slot);
                break;
            };
            self.publish(
                slot,
                Op {
                    due_ns,
                    attempts: 0,
                },
                now_ns,
            );
        }
    }

    fn is_current(&self, slot: Slot) -> bool {
        let conn = &self.conns[slot.conn];
        conn.life == slot.life && conn.phase == Phase::Ready
    }

    fn next_free(&mut self) -> Option<Slot> {
        while let Some(slot) = self.free.pop_front() {
            if self.is_current(slot) {
                return Some(slot);
            }
        }
        None
    }

    fn publish(&mut self, slot: Slot, op: Op, now_ns: u64) {
        let conn = &mut self.conns[slot.conn];
        let Some(id) = conn.id else { return };
        let lane_index = conn.next_lane % conn.lanes.len().max(1);
        conn.next_lane = lane_index + 1;
        let shards = &self.spec.targets[conn.target].shards;
        let Some(lane) = conn.lanes.get_mut(lane_index) else {
            return;
        };
        let place = lane.next_shard % shards.len();
        lane.next_shard = place + 1;
        let (shard, first_sequence) = (shards[place], lane.next_sequence[place]);
        let section = self
            .maker
            .section(lane.writer, shard, first_sequence, self.spec.batch);
        let key = self.spec.keys.get(shard as usize).cloned().flatten();
        let request = lane.next_request;
        let parts = match self.spec.protocol.publish(request, key, section.freeze()) {
            Ok(parts) => parts,
            Err(why) => {
                self.fatal = Some(LoadError::Setup(why));
                return;
            }
        };
        if self.pump.send_parts(id, lane.stream, parts).is_err() {
            // The end of the connection is on its way as an event; nothing was sent.
            self.tally.failed += 1;
            return;
        }
        lane.next_request += 1;
        lane.next_sequence[place] += u64::from(self.spec.batch);
        let op = Op {
            attempts: op.attempts + 1,
            ..op
        };
        lane.pending.insert(
            request,
            Pending {
                op,
                shard,
                first_sequence,
                sent_ns: now_ns,
            },
        );
        self.ledger.on_sent(lane.writer, shard, first_sequence);
        self.per_shard[shard as usize] += u64::from(self.spec.batch);
    }

    fn break_off(&mut self, id: ConnId, why: &str, now: Instant) {
        self.pump.close(id, 0, b"", now);
        self.on_ended(id, why, now);
    }

    fn on_ended(&mut self, id: ConnId, why: &str, now: Instant) {
        let Some(index) = self.by_id.remove(&id) else {
            return;
        };
        let now_ns = self.at_ns(now);
        let lost = self.conns[index].on_end(now_ns, why.to_string());
        self.tally.unknown += lost.len() as u64;
        if self.started.is_some() {
            self.tally.connections_lost += 1;
            self.tally.note(why);
        }
    }

    fn sample_cpu(&mut self, now: Instant) {
        let now_ns = self.at_ns(now);
        for (sample, at_ns) in self
            .cpu_at
            .iter_mut()
            .zip([self.measure_from_ns, self.end_ns])
        {
            if sample.is_none() && now_ns >= at_ns {
                *sample = Some(thread_cpu_seconds());
            }
        }
    }

    /// What is still outstanding at the very end is of unknown outcome.
    fn give_up_outstanding(&mut self) {
        let left: usize = self.conns.iter().map(Conn::outstanding).sum();
        self.tally.unknown += left as u64;
        for _ in 0..left {
            self.tally.note("no answer by the end of the run");
        }
        self.tally.failed += self.retries.len() as u64;
        self.progress.publish(self.acked_records, &self.tally);
    }

    async fn leave(&mut self, alarm: &mut rt::Alarm) {
        let give_up = Instant::now() + Duration::from_secs(1);
        self.pump.close_all(0, b"done", Instant::now());
        self.pump.flush(Instant::now());
        while !self.pump.is_quiet() && Instant::now() < give_up {
            wait(&mut self.pump, alarm, Instant::now() + TICK).await;
            self.pump.poll_io(Instant::now());
            while self.pump.next_event().is_some() {}
            self.pump.flush(Instant::now());
        }
    }

    fn into_report(self) -> LoadReport {
        let [from, to] = self.cpu_at.map(|at| at.unwrap_or_default());
        LoadReport {
            schedule: self.schedule.report(),
            meter: self.meter,
            ledger: self.ledger,
            tally: self.tally,
            per_shard: self.per_shard,
            cpu_s: (to - from).max(0.0),
            next_writer: self.next_writer,
        }
    }
}

/// As the published client has it, with a window for large batches.
pub fn transport_settings() -> TransportSettings {
    TransportSettings {
        idle_timeout: Duration::from_secs(6),
        keep_alive: Some(Duration::from_secs(2)),
        ..TransportSettings::client_facing()
    }
}

fn add_socket(pump: &mut Pump, is_v4: bool) -> Result<EndpointId, LoadError> {
    let local = match is_v4 {
        true => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
        false => SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
    };
    let io = UdpIo::bind(local).map_err(|e| LoadError::Setup(format!("UDP socket: {e}")))?;
    pump.add_endpoint(EndpointSpec {
        role: 0,
        io: Box::new(io),
        server: None,
        shared_port: false,
        max_connections: 65_536,
        max_handshakes: 1,
    })
    .map_err(|error| LoadError::Setup(error.to_string()))
}

/// Refusals that no later batch would escape.
fn is_hopeless(refusal: &Refusal) -> bool {
    matches!(
        refusal.code,
        Some(WireCode::Known(
            ErrorCode::Unauthenticated
                | ErrorCode::Forbidden
                | ErrorCode::NotFound
                | ErrorCode::InvalidRequest
                | ErrorCode::LimitExceeded
                | ErrorCode::Revoked
        ))
    )
}

/// Waits for input or the moment.
pub(super) async fn wait(pump: &mut Pump, alarm: &mut rt::Alarm, until: Instant) {
    alarm.set(Some(until));
    poll_fn(|cx| {
        let ready = pump.poll_wait(cx, Instant::now());
        match alarm.poll_expired(cx) {
            Poll::Ready(()) => Poll::Ready(()),
            Poll::Pending => ready,
        }
    })
    .await;
}
