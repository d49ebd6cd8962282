//! The load: one publisher, many subscribers, one core, every delivery checked.
//!
//! A turn reads what came in, publishes what may be published, and flushes once. The publisher has at
//! most so many batches on their way that some subscriber does not have: what is delivered sets the
//! pace, of a broker and of the bare fan-out alike.
//!
//! Invariants: nothing is published before every subscriber is there; a batch's latency is counted once
//! for each subscriber, from its being sent to its last record's coming in.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use felix_uring::driver::quic::{ConnId, EndpointId, Pump, PumpEvent, StreamId};
use felix_uring::wire::client::messages::{StartAt, Subscribe};
use felix_uring::wire::client::{encode_message, Features, FrameReader, ReadLimits};
use quinn_proto::ClientConfig;
use shard_executor::rt;

use super::check::Follower;
use super::listen::Listener;
use super::probe::{PUBLISHER, SUBSCRIBER};
use super::spec::{FanReport, FanSpec};
use crate::client::{auth_message, load_pump, wait, FelixNames, LoadError, Protocol, Speaker};
use crate::cpu::{process_cpu_seconds_of, resident_bytes_of, thread_cpu_seconds};
use crate::record::RecordMaker;

/// Looked at this often when nothing comes in.
const TICK: Duration = Duration::from_millis(10);
/// Nothing at all happening for this long ends a run.
const PATIENCE: Duration = Duration::from_secs(30);
/// Connections on their way at once, until all their streams have shown the token: a broker gives them
/// a limited time for it.
const MAX_DIALLING: usize = 32;
/// Subscribe requests on their way at once.
const MAX_ASKED: usize = 512;
/// UDP sockets the connections share; clients of their own would have one each.
const MAX_SOCKETS: usize = 64;

/// Runs it on a core of its own and blocks until it is over.
pub fn run_fan(spec: FanSpec) -> Result<FanReport, LoadError> {
    let mut core = rt::CoreSpec::new(0);
    core.cpu = Some(spec.cpu);
    core.name = "fan".into();
    let setup = |error: &dyn std::fmt::Display| LoadError::Setup(error.to_string());
    let handle = rt::spawn_core(core, move || async move { Fan::new(spec)?.run().await })
        .map_err(|error| setup(&error))?;
    handle.join().map_err(|error| setup(&error))?
}

pub(super) type End = (ConnId, StreamId);

/// How far a run is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    Connecting,
    Subscribing,
    Quiet {
        until: Instant,
    },
    Running {
        since: Instant,
    },
    /// Nothing more is published; what is on its way comes in.
    Ending,
    Over,
}

/// A connection; the first one is the publisher's.
pub(super) struct Conn {
    pub(super) id: Option<ConnId>,
    pub(super) endpoint: EndpointId,
    /// Its first stream, which publishes or only shows the token.
    pub(super) first: Option<(StreamId, Speaker)>,
    /// Further streams whose token was not answered yet.
    pub(super) greeting: usize,
    pub(super) is_ready: bool,
    /// Subscriptions to be asked for.
    pub(super) to_ask: usize,
}

/// A batch some subscriber lacks.
pub(super) struct OnItsWay {
    pub(super) sent: Instant,
    pub(super) lacking: usize,
}

pub(super) struct Fan {
    pub(super) spec: FanSpec,
    pub(super) pump: Pump,
    pub(super) dial: ClientConfig,
    pub(super) conns: Vec<Conn>,
    pub(super) by_id: HashMap<ConnId, usize>,
    pub(super) next_dial: usize,
    pub(super) dialling: usize,
    pub(super) ready: usize,
    /// Further streams on which the token was shown.
    pub(super) greeting: HashMap<End, FrameReader>,
    /// Subscribe requests on their way.
    pub(super) asked: HashMap<End, FrameReader>,
    pub(super) next_ask: usize,
    pub(super) listeners: HashMap<End, (Listener, Follower)>,
    /// Answered requests and begun event streams.
    pub(super) answered: usize,
    pub(super) begun: usize,
    pub(super) maker: RecordMaker,
    pub(super) next_batch: u64,
    pub(super) first_lacking: u64,
    pub(super) on_their_way: VecDeque<OnItsWay>,
    pub(super) stage: Stage,
    pub(super) stage_since: Instant,
    pub(super) last_heard: Instant,
    pub(super) cpu_at: [Option<(f64, f64)>; 2],
    pub(super) report: FanReport,
}

impl Fan {
    fn new(spec: FanSpec) -> Result<Self, LoadError> {
        let sockets = (spec.connections + 1).clamp(1, MAX_SOCKETS);
        let (pump, dial, endpoints) =
            load_pump(&spec.tls, (0..sockets).map(|_| spec.addr.is_ipv4()))?;
        let conns = (0..=spec.connections)
            .map(|index| Conn {
                id: None,
                endpoint: endpoints[index % endpoints.len()],
                first: None,
                greeting: 0,
                is_ready: false,
                // The first is the publisher's.
                to_ask: match index.checked_sub(1) {
                    None => 0,
                    Some(n) => {
                        let left_over = spec.subscribers % spec.connections;
                        spec.subscribers / spec.connections + usize::from(n < left_over)
                    }
                },
            })
            .collect();
        let now = Instant::now();
        let mut report = FanReport::default();
        report.idle.rss_start_bytes = resident(&spec);
        Ok(Self {
            pump,
            dial,
            conns,
            by_id: HashMap::new(),
            next_dial: 0,
            dialling: 0,
            ready: 0,
            greeting: HashMap::new(),
            asked: HashMap::new(),
            next_ask: 0,
            listeners: HashMap::new(),
            answered: 0,
            begun: 0,
            maker: RecordMaker::new(spec.run, spec.payload_bytes),
            next_batch: 0,
            first_lacking: 0,
            on_their_way: VecDeque::new(),
            stage: Stage::Connecting,
            stage_since: now,
            last_heard: now,
            cpu_at: [None; 2],
            report,
            spec,
        })
    }

    async fn run(mut self) -> Result<FanReport, LoadError> {
        let mut alarm = rt::Alarm::new();
        while self.stage != Stage::Over {
            let now = Instant::now();
            self.pump.poll_io(now);
            while let Some(event) = self.pump.next_event() {
                self.on_event(event, now)?;
            }
            self.advance(now)?;
            let is_busy = self.pump.flush(Instant::now());
            if now > self.last_heard + PATIENCE + self.spec.quiet {
                return Err(self.gone(format!("nothing came in for {PATIENCE:?}")));
            }
            if !is_busy {
                wait(&mut self.pump, &mut alarm, now + TICK).await;
            }
            rt::yield_if_needed().await;
        }
        self.pump.close_all(0, b"done", Instant::now());
        let give_up = Instant::now() + Duration::from_secs(2);
        while !self.pump.is_quiet() && Instant::now() < give_up {
            self.pump.flush(Instant::now());
            wait(&mut self.pump, &mut alarm, Instant::now() + TICK).await;
            self.pump.poll_io(Instant::now());
            while self.pump.next_event().is_some() {}
        }
        Ok(self.report)
    }

    pub(super) fn gone(&self, reason: String) -> LoadError {
        LoadError::Unreachable {
            addr: self.spec.addr,
            reason: format!("{reason} (stage {:?})", self.stage),
        }
    }

    /// Does what the stage asks for, and goes on to the next when it is done.
    fn advance(&mut self, now: Instant) -> Result<(), LoadError> {
        match self.stage {
            Stage::Connecting => {
                self.dial(now)?;
                if self.ready == self.conns.len() {
                    self.report.idle.rss_connected_bytes = resident(&self.spec);
                    self.report.idle.connect_s = self.enter(Stage::Subscribing, now);
                }
            }
            Stage::Subscribing => {
                self.ask()?;
                if self.answered.min(self.begun) == self.spec.subscribers {
                    self.report.idle.rss_subscribed_bytes = resident(&self.spec);
                    let until = now + self.spec.quiet;
                    self.report.idle.subscribe_s = self.enter(Stage::Quiet { until }, now);
                    self.cpu_at[0] = Some(self.cpu());
                }
            }
            Stage::Quiet { until } => {
                if now >= until {
                    let quiet = self.cpu().0 - self.cpu_at[0].take().map_or(0.0, |at| at.0);
                    self.report.idle.quiet_cpu_s = quiet;
                    self.report.idle.rss_quiet_bytes = resident(&self.spec);
                    self.enter(Stage::Running { since: now }, now);
                    self.last_heard = now;
                    self.publish(now)?;
                }
            }
            Stage::Running { since } => {
                let (from, end) = self.window(since);
                for (index, at) in [from, end].into_iter().enumerate() {
                    if now >= at && self.cpu_at[index].is_none() {
                        self.cpu_at[index] = Some(self.cpu());
                    }
                }
                match now >= end {
                    true => drop(self.enter(Stage::Ending, now)),
                    false => self.publish(now)?,
                }
            }
            Stage::Ending => {
                if self.on_their_way.is_empty() {
                    self.end(now);
                } else if now > self.stage_since + PATIENCE {
                    let sent = self.next_batch * u64::from(self.spec.batch);
                    let got = self.listeners.values().map(|(_, f)| f.position());
                    self.report.verify.missing += got.map(|at| sent - at.min(sent)).sum::<u64>();
                    self.end(now);
                }
            }
            Stage::Over => {}
        }
        Ok(())
    }

    fn end(&mut self, now: Instant) {
        let [from, to] = self.cpu_at.map(Option::unwrap_or_default);
        self.report.server_cpu_s = (to.0 - from.0).max(0.0);
        self.report.client_cpu_s = (to.1 - from.1).max(0.0);
        self.report.seconds = self.spec.duration.as_secs_f64();
        self.report.idle.last_delivery_s = now.duration_since(self.stage_since).as_secs_f64();
        self.stage = Stage::Over;
    }

    /// Seconds spent in the stage before.
    fn enter(&mut self, stage: Stage, now: Instant) -> f64 {
        let since = std::mem::replace(&mut self.stage_since, now);
        self.stage = stage;
        now.duration_since(since).as_secs_f64()
    }

    pub(super) fn window(&self, since: Instant) -> (Instant, Instant) {
        let from = since + self.spec.warmup;
        (from, from + self.spec.duration)
    }

    /// CPU seconds of the other side and of this one.
    fn cpu(&self) -> (f64, f64) {
        let theirs = self.spec.pid.and_then(process_cpu_seconds_of);
        (theirs.unwrap_or(0.0), thread_cpu_seconds())
    }

    fn dial(&mut self, now: Instant) -> Result<(), LoadError> {
        while self.dialling < MAX_DIALLING && self.next_dial < self.conns.len() {
            let index = self.next_dial;
            let endpoint = self.conns[index].endpoint;
            let (addr, dial) = (self.spec.addr, self.dial.clone());
            let id = self
                .pump
                .connect(endpoint, addr, "localhost", dial, now)
                .map_err(|error| LoadError::Setup(format!("cannot dial {addr}: {error}")))?;
            self.conns[index].id = Some(id);
            self.by_id.insert(id, index);
            self.next_dial += 1;
            self.dialling += 1;
        }
        Ok(())
    }

    fn on_event(&mut self, event: PumpEvent, now: Instant) -> Result<(), LoadError> {
        match event {
            PumpEvent::Connected { conn, .. } => {
                self.last_heard = now;
                self.on_connected(conn)
            }
            PumpEvent::StreamOpened { conn, stream, .. } => {
                let follower = Follower::default();
                self.listeners
                    .insert((conn, stream), (Listener::felix(), follower));
                Ok(())
            }
            PumpEvent::Readable { conn, stream } => {
                self.last_heard = now;
                self.on_readable((conn, stream), now)
            }
            PumpEvent::Closed { reason, .. } | PumpEvent::HandshakeFailed { reason, .. } => {
                Err(self.gone(reason.to_string()))
            }
            _ => Ok(()),
        }
    }

    fn on_connected(&mut self, conn: ConnId) -> Result<(), LoadError> {
        let Some(index) = self.by_id.get(&conn).copied() else {
            return Ok(());
        };
        let is_publisher = index == 0;
        let (mut speaker, hello) = self.spec.protocol.open().map_err(LoadError::Setup)?;
        let is_bare = speaker.is_ready_at_once();
        if is_bare && !is_publisher {
            self.on_conn_ready(index);
            return Ok(());
        }
        let stream = self.open(conn)?;
        let first = match is_bare {
            true => Bytes::from_static(&[PUBLISHER]),
            false => hello.unwrap_or_default(),
        };
        self.send((conn, stream), first)?;
        if is_bare {
            self.on_conn_ready(index);
        }
        // Nothing came in yet; this only makes the stream known.
        speaker.push(Bytes::new());
        self.conns[index].first = Some((stream, speaker));
        Ok(())
    }

    /// The token was taken on a connection's first stream: the others follow.
    pub(super) fn on_first_ready(&mut self, index: usize) -> Result<(), LoadError> {
        let more = match index {
            0 => 0,
            _ => self.spec.streams.saturating_sub(1),
        };
        let Some(conn) = self.conns[index].id else {
            return Ok(());
        };
        for _ in 0..more {
            let (_, hello) = self.spec.protocol.open().map_err(LoadError::Setup)?;
            let stream = self.open(conn)?;
            self.send((conn, stream), hello.unwrap_or_default())?;
            let answers = FrameReader::new(ReadLimits::AUTHENTICATED);
            self.greeting.insert((conn, stream), answers);
        }
        self.conns[index].greeting = more;
        if more == 0 {
            self.on_conn_ready(index);
        }
        Ok(())
    }

    pub(super) fn on_conn_ready(&mut self, index: usize) {
        if !std::mem::replace(&mut self.conns[index].is_ready, true) {
            self.ready += 1;
            self.dialling -= 1;
        }
    }

    fn open(&mut self, conn: ConnId) -> Result<StreamId, LoadError> {
        let opened = self.pump.open_bi(conn);
        opened.map_err(|error| self.gone(error.to_string()))
    }

    fn send(&mut self, end: End, bytes: Bytes) -> Result<(), LoadError> {
        let sent = self.pump.send(end.0, end.1, bytes);
        sent.map_err(|error| self.gone(error.to_string()))
    }

    /// Asks for further subscriptions.
    fn ask(&mut self) -> Result<(), LoadError> {
        while self.asked.len() < MAX_ASKED && self.next_ask < self.conns.len() {
            let conn = &mut self.conns[self.next_ask];
            let (Some(id), true) = (conn.id, conn.to_ask > 0) else {
                self.next_ask += 1;
                continue;
            };
            conn.to_ask -= 1;
            let stream = self.open(id)?;
            match self.spec.protocol.clone() {
                Protocol::Felix(names) | Protocol::Puts(names) => {
                    let request = subscribe_request(&names)
                        .map_err(|error| LoadError::Setup(error.to_string()))?;
                    self.send((id, stream), request)?;
                    let finished = self.pump.finish(id, stream);
                    finished.map_err(|error| self.gone(error.to_string()))?;
                    let answers = FrameReader::new(ReadLimits::AUTHENTICATED);
                    self.asked.insert((id, stream), answers);
                }
                Protocol::Relay => {
                    self.send((id, stream), Bytes::from_static(&[SUBSCRIBER]))?;
                    self.answered += 1;
                    let listener = Listener::Bare(BytesMut::new());
                    self.listeners
                        .insert((id, stream), (listener, Follower::default()));
                }
            }
        }
        Ok(())
    }

    fn publish(&mut self, now: Instant) -> Result<(), LoadError> {
        let is_single = self.spec.duration.is_zero();
        while self.on_their_way.len() < self.spec.in_flight && !(is_single && self.next_batch > 0) {
            let batch = self.spec.batch;
            let first = self.next_batch * u64::from(batch);
            let section = self.maker.section(0, 0, first, batch).freeze();
            let parts = self.spec.protocol.publish(self.next_batch, None, section);
            let parts = parts.map_err(LoadError::Setup)?;
            let publisher = &self.conns[0];
            let (Some(id), Some((stream, _))) = (publisher.id, &publisher.first) else {
                return Err(LoadError::Setup("there is no publisher".into()));
            };
            let sent = self.pump.send_parts(id, *stream, parts);
            sent.map_err(|error| self.gone(error.to_string()))?;
            self.next_batch += 1;
            self.on_their_way.push_back(OnItsWay {
                sent: now,
                lacking: self.spec.subscribers,
            });
        }
        Ok(())
    }
}

fn resident(spec: &FanSpec) -> u64 {
    spec.pid.and_then(resident_bytes_of).unwrap_or(0)
}

/// The token and the request, in one piece: nothing has to be waited for in between.
fn subscribe_request(names: &FelixNames) -> Result<Bytes, felix_uring::wire::client::EncodeError> {
    let features = Features::ERROR_CODES | Features::SHARD_MOVED | Features::SUBSCRIPTION_LAGGED;
    let mut request = BytesMut::from(&encode_message(&auth_message(names, features))?[..]);
    request.extend_from_slice(&encode_message(&Subscribe {
        tenant_id: names.tenant.clone(),
        namespace: names.namespace.clone(),
        stream: names.stream.clone(),
        subscription_id: None,
        start: Some(StartAt::Latest),
        shard: None,
        queue_capacity: None,
    })?);
    Ok(request.freeze())
}
