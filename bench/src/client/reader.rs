//! Reading a shard back from a running cluster, as any subscriber would.
//!
//! Follows `not_leader` to the owner, subscribes from the first offset the run was answered, and stops
//! at the live offset the broker named: everything acknowledged lies before it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use felix_uring::driver::quic::{
    client_config, ConnId, EndpointSpec, Pump, PumpConfig, PumpEvent, ReadEnd, SharedKeys,
    StreamId, UdpIo,
};
use felix_uring::wire::client::messages::{
    Answer, OwnedKind, ShardOwners, StartAt, StreamShards, Subscribe,
};
use felix_uring::wire::client::{
    encode_message, Features, FrameReader, ReadEvent, ReadLimits, ToClient,
};
use felix_uring::wire::routing::Routing;
use shard_executor::rt;

use super::load::{transport_settings, wait};
use super::speak::{auth_message, FelixNames};
use super::spec::LoadError;

/// A broker that says nothing for this long is given up.
const PATIENCE: Duration = Duration::from_secs(15);
/// Redirects followed.
const MAX_REDIRECTS: usize = 4;

/// Where to read and as whom.
#[derive(Debug, Clone)]
pub struct ReadPlan {
    /// Any broker of the cluster.
    pub addr: SocketAddr,
    /// The name in its certificate.
    pub server_name: String,
    /// Trust.
    pub tls: Arc<rustls::ClientConfig>,
    /// Tenant, stream and token.
    pub names: FelixNames,
}

/// How wide a stream is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamWidth {
    /// Its shards.
    pub shards: u32,
    /// How keys choose one.
    pub routing: Routing,
}

/// Asks a broker how many shards the stream has.
pub fn ask_width(plan: &ReadPlan) -> Result<StreamWidth, LoadError> {
    let plan = plan.clone();
    on_core(move || async move {
        let names = plan.names.clone();
        let mut session = Session::connect(&plan, plan.addr).await?;
        let question = encode_message(&StreamShards {
            tenant_id: names.tenant,
            namespace: names.namespace,
            stream: names.stream.clone(),
            request_id: 1,
        });
        match session.ask(question).await? {
            Answer::StreamShardsView(view) if view.shards > 0 => Ok(StreamWidth {
                shards: view.shards,
                routing: view.routing.map_or(Routing::Modulo, Routing::from),
            }),
            Answer::StreamShardsView(_) => Err(LoadError::Refused(format!(
                "there is no stream {:?}; name one with --stream",
                names.stream
            ))),
            other => Err(unexpected(&other)),
        }
    })
}

/// Asks a broker at which address each shard's owner takes clients.
pub fn ask_owners(plan: &ReadPlan) -> Result<Vec<Option<SocketAddr>>, LoadError> {
    let plan = plan.clone();
    on_core(move || async move {
        let names = plan.names.clone();
        let mut session = Session::connect(&plan, plan.addr).await?;
        let question = encode_message(&ShardOwners {
            tenant_id: names.tenant,
            namespace: names.namespace,
            name: names.stream,
            kind: OwnedKind::Stream,
            request_id: 1,
        });
        match session.ask(question).await? {
            Answer::ShardOwnersView(view) => Ok(view
                .owners
                .into_iter()
                .map(|owner| owner.addr.and_then(|addr| addr.parse().ok()))
                .collect()),
            other => Err(unexpected(&other)),
        }
    })
}

/// Reads a shard from `from` to its live end, gives `each` every record, and gives `state` back.
pub fn read_shard<S: Send + 'static>(
    plan: &ReadPlan,
    shard: u32,
    from: u64,
    mut state: S,
    each: fn(&mut S, u64, &[u8]),
) -> Result<S, LoadError> {
    let plan = plan.clone();
    on_core(move || async move {
        read_on_core(plan, shard, from, |offset, payload| {
            each(&mut state, offset, payload);
        })
        .await?;
        Ok(state)
    })
}

fn on_core<T, Fut>(make: impl FnOnce() -> Fut + Send + 'static) -> Result<T, LoadError>
where
    T: Send + 'static,
    Fut: std::future::Future<Output = Result<T, LoadError>> + 'static,
{
    let mut core = rt::CoreSpec::new(0);
    core.name = "reader".into();
    let handle = rt::spawn_core(core, make).map_err(|e| LoadError::Setup(e.to_string()))?;
    handle.join().map_err(|e| LoadError::Setup(e.to_string()))?
}

async fn read_on_core(
    plan: ReadPlan,
    shard: u32,
    from: u64,
    mut each: impl FnMut(u64, &[u8]),
) -> Result<(), LoadError> {
    let mut addr = plan.addr;
    for _ in 0..MAX_REDIRECTS {
        let mut session = Session::connect(&plan, addr).await?;
        let question = encode_message(&Subscribe {
            tenant_id: plan.names.tenant.clone(),
            namespace: plan.names.namespace.clone(),
            stream: plan.names.stream.clone(),
            subscription_id: None,
            start: Some(StartAt::Offset(from)),
            shard: Some(shard),
            queue_capacity: None,
        });
        match session.ask(question).await? {
            Answer::Subscribed(answer) => {
                let end = answer.live_offset.ok_or_else(|| {
                    LoadError::Setup("the broker does not tell where the live end is".into())
                })?;
                return session.read_events(from, end, &mut each).await;
            }
            Answer::NotLeader(owner) => {
                let next = owner.addr.and_then(|addr| addr.parse().ok());
                addr = next.ok_or_else(|| LoadError::Unreachable {
                    addr,
                    reason: format!("{} leads the shard, at no address", owner.node_id),
                })?;
            }
            other => return Err(unexpected(&other)),
        }
    }
    Err(LoadError::Unreachable {
        addr,
        reason: "the brokers send readers of the shard to each other".into(),
    })
}

fn unexpected(answer: &Answer) -> LoadError {
    match answer {
        Answer::ErrorAnswer(error) => {
            let code = error.code.as_ref().map_or("no code", |code| code.name());
            LoadError::Refused(format!("{code}: {}", error.message))
        }
        Answer::SubscribeCursorError(error) => LoadError::Refused(format!(
            "offset {} is not held any more; the log begins at {}",
            error.requested, error.available
        )),
        other => LoadError::Setup(format!("an unexpected {}", other.type_name())),
    }
}

/// One connection with one authenticated request stream.
struct Session {
    pump: Pump,
    alarm: rt::Alarm,
    addr: SocketAddr,
    conn: ConnId,
    request: StreamId,
    answers: FrameReader,
    events: FrameReader,
    last_heard: Instant,
}

impl Session {
    async fn connect(plan: &ReadPlan, addr: SocketAddr) -> Result<Self, LoadError> {
        let setup = |e: &dyn std::fmt::Display| LoadError::Setup(e.to_string());
        let local = match addr.is_ipv4() {
            true => "0.0.0.0:0",
            false => "[::]:0",
        };
        let local: SocketAddr = local.parse().map_err(|e| setup(&e))?;
        let io = UdpIo::bind(local).map_err(|e| setup(&e))?;
        let mut pump =
            Pump::new(PumpConfig::new(0, 1, SharedKeys::generate())).map_err(|e| setup(&e))?;
        let endpoint = pump
            .add_endpoint(EndpointSpec {
                role: 0,
                io: Box::new(io),
                server: None,
                shared_port: false,
                max_connections: 1,
                max_handshakes: 1,
            })
            .map_err(|e| setup(&e))?;
        let transport = transport_settings().build().map_err(|e| setup(&e))?;
        let dial = client_config(plan.tls.clone(), transport).map_err(|e| setup(&e))?;
        let now = Instant::now();
        let conn = pump
            .connect(endpoint, addr, &plan.server_name, dial, now)
            .map_err(|e| setup(&e))?;
        pump.flush(now);
        let mut session = Self {
            pump,
            alarm: rt::Alarm::new(),
            addr,
            conn,
            // Replaced at once when the connection is up.
            request: StreamId::new(quinn_proto::Side::Client, quinn_proto::Dir::Bi, 0),
            answers: FrameReader::new(ReadLimits::AUTHENTICATED),
            events: FrameReader::new(ReadLimits::AUTHENTICATED),
            last_heard: now,
        };
        while !session.turn().await? {}
        session.request = session.pump.open_bi(conn).map_err(|e| setup(&e))?;
        let features = Features::ERROR_CODES | Features::REDIRECT;
        let hello = encode_message(&auth_message(&plan.names, features));
        match session.ask(hello).await? {
            Answer::AuthOk(_) | Answer::PlainOk(_) => Ok(session),
            other => Err(unexpected(&other)),
        }
    }

    /// One turn of the pump; true when the connection came up in it.
    async fn turn(&mut self) -> Result<bool, LoadError> {
        let mut is_up = false;
        let until = Instant::now() + Duration::from_millis(100);
        wait(&mut self.pump, &mut self.alarm, until).await;
        let now = Instant::now();
        self.pump.poll_io(now);
        while let Some(event) = self.pump.next_event() {
            match event {
                PumpEvent::Connected { .. } => is_up = true,
                PumpEvent::Readable { conn, stream } => {
                    self.last_heard = now;
                    let reader = match stream == self.request {
                        true => &mut self.answers,
                        false => &mut self.events,
                    };
                    let end = self
                        .pump
                        .read_each(conn, stream, usize::MAX, |c| reader.push(c));
                    if let ReadEnd::Reset(code) = end {
                        return Err(self.gone(format!("a stream was reset with code {code}")));
                    }
                }
                PumpEvent::Closed { reason, .. } | PumpEvent::HandshakeFailed { reason, .. } => {
                    return Err(self.gone(reason.to_string()));
                }
                _ => {}
            }
        }
        self.pump.flush(Instant::now());
        if now > self.last_heard + PATIENCE {
            return Err(self.gone("no answer".into()));
        }
        rt::yield_if_needed().await;
        Ok(is_up)
    }

    fn gone(&self, reason: String) -> LoadError {
        LoadError::Unreachable {
            addr: self.addr,
            reason,
        }
    }

    async fn ask(
        &mut self,
        question: Result<Bytes, felix_uring::wire::client::EncodeError>,
    ) -> Result<Answer, LoadError> {
        let question = question.map_err(|e| LoadError::Setup(e.to_string()))?;
        self.pump
            .send(self.conn, self.request, question)
            .map_err(|e| self.gone(e.to_string()))?;
        self.pump.flush(Instant::now());
        self.last_heard = Instant::now();
        loop {
            if let Some(frame) = next_frame(&mut self.answers)? {
                match frame {
                    ToClient::Answer(answer) => return Ok(answer),
                    _ => return Err(LoadError::Setup("an unexpected binary answer".into())),
                }
            }
            self.turn().await?;
        }
    }

    async fn read_events(
        &mut self,
        from: u64,
        end: u64,
        each: &mut impl FnMut(u64, &[u8]),
    ) -> Result<(), LoadError> {
        let mut next = from;
        while next < end {
            while let Some(frame) = next_frame(&mut self.events)? {
                match frame {
                    ToClient::Events(batch) => {
                        let base = batch.base_offset.unwrap_or(next);
                        for (offset, payload) in (base..).zip(&batch.payloads) {
                            if offset < end {
                                each(offset, payload);
                            }
                        }
                        next = base + batch.payloads.len() as u64;
                    }
                    ToClient::Answer(Answer::EventStreamHello(_)) => {}
                    ToClient::Answer(other) => return Err(unexpected(&other)),
                    ToClient::Ack(_) => {
                        return Err(LoadError::Setup("an answer nobody waits for".into()))
                    }
                }
            }
            if next < end {
                self.turn().await?;
            }
        }
        self.pump.close(self.conn, 0, b"done", Instant::now());
        self.pump.flush(Instant::now());
        Ok(())
    }
}

fn next_frame(reader: &mut FrameReader) -> Result<Option<ToClient>, LoadError> {
    match reader.next() {
        None => Ok(None),
        Some(ReadEvent::Frame(frame)) => ToClient::decode(frame)
            .map(Some)
            .map_err(|e| LoadError::Setup(format!("an answer cannot be read: {e}"))),
        Some(ReadEvent::Oversize(_)) => Err(LoadError::Setup("an oversized frame".into())),
        Some(ReadEvent::Fatal(reason)) => Err(LoadError::Setup(reason.to_string())),
    }
}
