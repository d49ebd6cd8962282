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
    client_config, ConnId, EndpointId, EndpointSpec, Pump, PumpConfig, SharedKeys,
    TransportSettings, UdpIo,
};
use shard_executor::rt;

use super::lanes::{Conn, Op, Phase, Slot};
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
        let shared = spec.share.apply();
        shared.map_err(|error| LoadError::Setup(error.to_string()))?;
        match Load::new(spec, progress) {
            Ok(load) => load.run(&stop).await,
            Err(error) => Err(error),
        }
    })
    .map_err(|error| setup(&error))?;
    handle.join().map_err(|error| setup(&error))?
}

/// An operation that was refused and is tried again.
pub(super) struct Retry {
    pub at_ns: u64,
    pub slot: Slot,
    pub op: Op,
}

pub(super) struct Load {
    pub(super) spec: LoadSpec,
    pub(super) progress: Arc<Progress>,
    pub(super) pump: Pump,
    pub(super) dial: quinn_proto::ClientConfig,
    pub(super) conns: Vec<Conn>,
    pub(super) by_id: HashMap<ConnId, usize>,
    pub(super) free: VecDeque<Slot>,
    pub(super) retries: VecDeque<Retry>,
    pub(super) maker: RecordMaker,
    pub(super) schedule: Schedule,
    pub(super) meter: Meter,
    pub(super) ledger: Ledger,
    pub(super) tally: Tally,
    pub(super) per_shard: Vec<u64>,
    pub(super) next_writer: u32,
    pub(super) acked_records: u64,
    pub(super) born: Instant,
    pub(super) started: Option<Instant>,
    pub(super) cpu_at: [Option<f64>; 2],
    pub(super) measure_from_ns: u64,
    pub(super) end_ns: u64,
    pub(super) fatal: Option<LoadError>,
}

impl Load {
    fn new(spec: LoadSpec, progress: Arc<Progress>) -> Result<Self, LoadError> {
        let sockets = spec.sockets.clamp(1, spec.connections.max(1));
        let is_v4 = |socket: usize| spec.targets[socket % spec.targets.len()].addr.is_ipv4();
        let (pump, dial, endpoints) = load_pump(&spec.tls, (0..sockets).map(is_v4))?;
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
    pub(super) fn at_ns(&self, now: Instant) -> u64 {
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
            if self.progress.is_ending() && now_ns < self.end_ns {
                self.end_ns = now_ns;
                self.schedule.end_at(now_ns);
            }
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

/// A pump for connections to brokers, what to dial with, and a socket for each of `is_v4`.
pub fn load_pump(
    tls: &Arc<rustls::ClientConfig>,
    is_v4: impl Iterator<Item = bool>,
) -> Result<(Pump, quinn_proto::ClientConfig, Vec<EndpointId>), LoadError> {
    let setup = |error: &dyn std::fmt::Display| LoadError::Setup(error.to_string());
    let transport = transport_settings().build().map_err(|e| setup(&e))?;
    let dial = client_config(Arc::clone(tls), transport).map_err(|e| setup(&e))?;
    let mut pump =
        Pump::new(PumpConfig::new(0, 1, SharedKeys::generate())).map_err(|e| setup(&e))?;
    let endpoints = is_v4
        .map(|is_v4| add_socket(&mut pump, is_v4))
        .collect::<Result<_, _>>()?;
    Ok((pump, dial, endpoints))
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

/// Waits for input or the moment.
pub async fn wait(pump: &mut Pump, alarm: &mut rt::Alarm, until: Instant) {
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
