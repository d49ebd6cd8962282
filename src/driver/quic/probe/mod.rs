//! The bare transport under measurement: bulk, echo and handshakes over one pump, without a broker.
//!
//! The load tool runs a server and a client of this module in two processes and sets them against the
//! same four functions over another QUIC driver. Nothing here is used by the broker.

mod report;
mod tls;

use std::future::poll_fn;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use shard_executor::rt;

use super::{
    client_config, CloseReason, ConnId, ConnStats, EndpointId, EndpointSpec, Pump, PumpConfig,
    PumpEvent, ReadEnd, ServerSetup, ServerTls, SharedKeys, StreamError, StreamId,
    TransportSettings, UdpIo,
};

pub use report::{process_cpu_seconds, Latencies, ProbeReport, Span};
pub use tls::{client_tls, ProbeIdentity};

/// Bytes one bulk write carries.
pub const BULK_PART_BYTES: usize = 64 * 1024;
/// Bytes a bulk sender keeps queued.
const BULK_AHEAD_BYTES: usize = 512 * 1024;
/// How long a probe waits for its connection or its last answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Why a probe gave no figures.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// The socket or the settings.
    #[error(transparent)]
    Setup(#[from] super::SetupError),
    /// The address or server name.
    #[error("cannot dial: {0}")]
    Connect(#[from] quinn_proto::ConnectError),
    /// The connection ended.
    #[error("the connection ended: {0}")]
    Closed(CloseReason),
    /// No answer in time.
    #[error("no answer within {PATIENCE:?}")]
    Silent,
    /// The stream could not be used.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// Certificate or TLS configuration.
    #[error("TLS: {0}")]
    Tls(String),
}

/// A pump with one endpoint.
struct End {
    spin: Duration,
    pump: Pump,
    endpoint: EndpointId,
}

impl End {
    fn new(io: UdpIo, server: Option<ServerSetup>, spin: Duration) -> Result<Self, ProbeError> {
        let mut pump = Pump::new(PumpConfig::new(0, 1, SharedKeys::generate()))?;
        let endpoint = pump.add_endpoint(EndpointSpec {
            role: 0,
            io: Box::new(io),
            server,
            shared_port: false,
            max_connections: 10_000,
            max_handshakes: 1_000,
        })?;
        Ok(Self {
            pump,
            endpoint,
            spin,
        })
    }

    /// Waits for input or `until`, then gives every event to `on_event`, then sends.
    async fn turn(
        &mut self,
        alarm: &mut rt::Alarm,
        until: Instant,
        mut on_event: impl FnMut(&mut Pump, PumpEvent),
    ) {
        self.pump.spin(self.spin, || false);
        alarm.set(Some(until));
        poll_fn(|cx| {
            let ready = self.pump.poll_wait(cx, Instant::now());
            if alarm.poll_expired(cx).is_ready() {
                return std::task::Poll::Ready(());
            }
            ready
        })
        .await;
        let now = Instant::now();
        self.pump.poll_io(now);
        while let Some(event) = self.pump.next_event() {
            on_event(&mut self.pump, event);
        }
        self.pump.flush(now);
        rt::yield_if_needed().await;
    }
}

/// Serves until `stop`: swallows unidirectional streams, echoes bidirectional ones. `on_end` gets a
/// report of every connection when it ends; its CPU time is that of the whole process in its life. `spin`
/// is given to [`Pump::spin`] before every wait.
pub async fn serve(
    io: UdpIo,
    identity: &ProbeIdentity,
    settings: &TransportSettings,
    spin: Duration,
    stop: &AtomicBool,
    mut on_end: impl FnMut(ProbeReport),
) -> Result<(), ProbeError> {
    let setup = ServerSetup {
        tls: ServerTls::Strict(identity.server_tls()?),
        transport: settings.build()?,
    };
    let mut end = End::new(io, Some(setup), spin)?;
    let mut alarm = rt::Alarm::new();
    let mut live: Vec<(ConnId, Span, ProbeReport)> = Vec::new();
    let mut parts: Vec<Bytes> = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let until = Instant::now() + Duration::from_millis(100);
        end.turn(&mut alarm, until, |pump, event| match event {
            PumpEvent::Connected { conn, .. } => {
                live.push((conn, Span::start(), ProbeReport::default()));
            }
            PumpEvent::Readable { conn, stream } => {
                let Some((_, _, report)) = live.iter_mut().find(|(id, ..)| *id == conn) else {
                    return;
                };
                serve_stream(pump, conn, stream, &mut parts, report);
            }
            PumpEvent::Closed { conn, .. } => {
                if let Some(at) = live.iter().position(|(id, ..)| *id == conn) {
                    let (_, span, mut report) = live.swap_remove(at);
                    (report.seconds, report.cpu_s) = span.stop();
                    report.stats = pump.conn_stats(conn).unwrap_or_default();
                    on_end(report);
                }
            }
            _ => {}
        })
        .await;
    }
    Ok(())
}

fn serve_stream(
    pump: &mut Pump,
    conn: ConnId,
    stream: StreamId,
    parts: &mut Vec<Bytes>,
    report: &mut ProbeReport,
) {
    let echoes = stream.dir() == quinn_proto::Dir::Bi;
    let end = pump.read_each(conn, stream, usize::MAX, |chunk| {
        report.bytes += chunk.len() as u64;
        if echoes {
            parts.push(chunk);
        }
    });
    if echoes {
        // Fails only on a connection that has just ended, which has its own event.
        let _ = pump.send_parts(conn, stream, parts.drain(..));
        report.operations += 1;
        if end == ReadEnd::Finished {
            let _ = pump.finish(conn, stream);
        }
    }
}

/// One dialled connection.
pub struct Client {
    end: End,
    alarm: rt::Alarm,
    remote: SocketAddr,
    config: quinn_proto::ClientConfig,
    ended: Option<(ConnId, CloseReason)>,
}

impl Client {
    /// A client of the server at `remote`, whose certificate is `certificate`; `spin` is given to
    /// [`Pump::spin`] before every wait.
    pub fn new(
        remote: SocketAddr,
        certificate: &[u8],
        settings: &TransportSettings,
        spin: Duration,
    ) -> Result<Self, ProbeError> {
        let local = if remote.is_ipv4() {
            SocketAddr::from(([0, 0, 0, 0], 0))
        } else {
            SocketAddr::from(([0u16; 8], 0))
        };
        let io = UdpIo::bind(local).map_err(super::SetupError::Socket)?;
        Ok(Self {
            end: End::new(io, None, spin)?,
            alarm: rt::Alarm::new(),
            remote,
            config: client_config(client_tls(certificate)?, settings.build()?)?,
            ended: None,
        })
    }

    async fn turn(&mut self, until: Instant, mut on_event: impl FnMut(&mut Pump, &PumpEvent)) {
        let ended = &mut self.ended;
        self.end
            .turn(&mut self.alarm, until, |pump, event| {
                if let PumpEvent::Closed { conn, reason }
                | PumpEvent::HandshakeFailed {
                    conn: Some(conn),
                    reason,
                    ..
                } = &event
                {
                    *ended = Some((*conn, reason.clone()));
                }
                on_event(pump, &event);
            })
            .await;
    }

    fn check(&self, conn: ConnId) -> Result<(), ProbeError> {
        match &self.ended {
            Some((id, reason)) if *id == conn => Err(ProbeError::Closed(reason.clone())),
            _ => Ok(()),
        }
    }

    async fn connect(&mut self) -> Result<ConnId, ProbeError> {
        let now = Instant::now();
        let End { pump, endpoint, .. } = &mut self.end;
        let conn = pump.connect(
            *endpoint,
            self.remote,
            "localhost",
            self.config.clone(),
            now,
        )?;
        pump.flush(now);
        let give_up = now + PATIENCE;
        let mut connected = false;
        while !connected {
            self.turn(give_up, |_, event| {
                connected |= matches!(event, PumpEvent::Connected { conn: c, .. } if *c == conn);
            })
            .await;
            self.check(conn)?;
            if Instant::now() > give_up {
                return Err(ProbeError::Silent);
            }
        }
        Ok(conn)
    }

    fn close(&mut self, conn: ConnId) -> ConnStats {
        let stats = self.end.pump.conn_stats(conn).unwrap_or_default();
        let now = Instant::now();
        self.end.pump.close(conn, 0, b"done", now);
        self.end.pump.flush(now);
        stats
    }

    /// Sends on one unidirectional stream as fast as it goes. Bytes count once flow control has taken
    /// them; the span starts after `warm_up`.
    pub async fn bulk(
        &mut self,
        warm_up: Duration,
        duration: Duration,
    ) -> Result<ProbeReport, ProbeError> {
        let conn = self.connect().await?;
        let stream = self.end.pump.open_uni(conn)?;
        let part = Bytes::from(vec![0x5a; BULK_PART_BYTES]);
        let warm = Instant::now() + warm_up;
        let mut span: Option<Span> = None;
        let mut sent: u64 = 0;
        let mut sent_at_start: u64 = 0;
        let mut end = warm + duration;
        loop {
            let pump = &mut self.end.pump;
            while pump.queued_bytes(conn, stream) < BULK_AHEAD_BYTES {
                pump.send(conn, stream, part.clone())?;
                sent += part.len() as u64;
            }
            let now = Instant::now();
            pump.flush(now);
            self.turn(end, |_, _| {}).await;
            self.check(conn)?;
            let now = Instant::now();
            if span.is_none() && now >= warm {
                span = Some(Span::start());
                sent_at_start = sent;
                end = now + duration;
            }
            if now >= end {
                break;
            }
        }
        let (seconds, cpu_s) = span.map_or((0.0, 0.0), |s| s.stop());
        Ok(ProbeReport {
            bytes: sent - sent_at_start,
            seconds,
            cpu_s,
            stats: self.close(conn),
            ..ProbeReport::default()
        })
    }

    /// Sends messages of `payload_bytes` on one bidirectional stream, `outstanding` at a time, and
    /// waits for each to come back.
    pub async fn echo(
        &mut self,
        payload_bytes: usize,
        outstanding: usize,
        duration: Duration,
    ) -> Result<ProbeReport, ProbeError> {
        let conn = self.connect().await?;
        let stream = self.end.pump.open_bi(conn)?;
        let message = Bytes::from(vec![0x5a; payload_bytes.max(1)]);
        let span = Span::start();
        let end = Instant::now() + duration;
        let give_up = end + PATIENCE;
        let mut sent_at = std::collections::VecDeque::new();
        let mut latencies = Latencies::default();
        let (mut returned, mut completed) = (0usize, 0u64);
        loop {
            let now = Instant::now();
            while sent_at.len() < outstanding.max(1) && now < end {
                self.end.pump.send(conn, stream, message.clone())?;
                sent_at.push_back(now);
            }
            if sent_at.is_empty() {
                break;
            }
            self.end.pump.flush(now);
            self.turn(give_up, |pump, event| {
                if matches!(event, PumpEvent::Readable { .. }) {
                    pump.read_each(conn, stream, usize::MAX, |c| returned += c.len());
                }
            })
            .await;
            self.check(conn)?;
            let now = Instant::now();
            while returned >= message.len() {
                returned -= message.len();
                completed += 1;
                if let Some(at) = sent_at.pop_front() {
                    latencies.record(now - at);
                }
            }
            if now > give_up {
                return Err(ProbeError::Silent);
            }
        }
        let (seconds, cpu_s) = span.stop();
        Ok(ProbeReport {
            bytes: completed * message.len() as u64,
            operations: completed,
            seconds,
            cpu_s,
            latencies_ns: latencies.into_sorted(),
            stats: self.close(conn),
        })
    }

    /// Connects and closes, one after the other.
    pub async fn handshakes(&mut self, duration: Duration) -> Result<ProbeReport, ProbeError> {
        let span = Span::start();
        let end = Instant::now() + duration;
        let mut latencies = Latencies::default();
        let mut stats = ConnStats::default();
        let mut operations = 0;
        while Instant::now() < end {
            let start = Instant::now();
            let conn = self.connect().await?;
            latencies.record(start.elapsed());
            operations += 1;
            stats = self.close(conn);
        }
        let (seconds, cpu_s) = span.stop();
        Ok(ProbeReport {
            bytes: 0,
            operations,
            seconds,
            cpu_s,
            latencies_ns: latencies.into_sorted(),
            stats,
        })
    }

    /// Lets the last close leave.
    pub async fn shut_down(mut self) {
        let give_up = Instant::now() + Duration::from_secs(1);
        while !self.end.pump.is_quiet() && Instant::now() < give_up {
            self.turn(give_up, |_, _| {}).await;
        }
    }
}
