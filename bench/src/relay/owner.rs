//! The relay's owner: reads batches, sums them, makes them durable, answers.
//!
//! With replicas it hands every durable batch on to them, which are owners of their own, and may wait for
//! the first of them before it answers: the hops of a replicated publish, and nothing of its rules.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};
use bytes::{BufMut, Bytes, BytesMut};
use clap::Args;
use felix_uring::driver::quic::{
    client_config, ConnId, Pump, PumpEvent, ReadEnd, ServerSetup, ServerTls, StreamId,
    TransportSettings,
};
use shard_executor::rt;

use super::frames::{ACK_BYTES, HEADER_BYTES, MAX_BODY_BYTES};
use super::journal::Journal;
use super::net::{self, TlsFiles, OWNER_ID};

/// As large as the broker's commit group.
const GROUP_BYTES: usize = 1 << 20;
/// As many on their way as the broker has.
const GROUPS_IN_FLIGHT: usize = 2;
/// The replicas have to be reachable within this time.
const CONNECT_PATIENCE: Duration = Duration::from_secs(10);
/// Written in advance and begun again when full.
const FILE_BYTES: u64 = 256 << 20;

/// Flags of the hidden command.
#[derive(Debug, Clone, Args)]
pub struct OwnerArgs {
    /// Where to listen
    #[arg(long)]
    pub listen: SocketAddr,
    /// CPU of the core
    #[arg(long)]
    pub cpu: Option<usize>,
    /// Directory of the journal
    #[arg(long)]
    pub dir: PathBuf,
    /// File to write the address to once it serves
    #[arg(long)]
    pub ready: PathBuf,
    /// Certificate towards clients; with it, clients connect here and there is no ingress
    #[arg(long, requires = "client_key")]
    pub client_cert: Option<PathBuf>,
    /// Its key
    #[arg(long)]
    pub client_key: Option<PathBuf>,
    /// Other owners that are handed every durable batch
    #[arg(long)]
    pub replica: Vec<SocketAddr>,
    /// Answer only once one of them has a batch durably
    #[arg(long)]
    pub await_replica: bool,
    /// Look for work this long before waiting, in us; as the brokers do
    #[arg(long, default_value_t = 0)]
    pub spin_us: u64,
    #[command(flatten)]
    pub tls: TlsFiles,
}

/// Runs until the process is ended.
pub fn run_owner(args: OwnerArgs) -> Result<()> {
    let warm_up_file = rt::prepare_warm_up_file(&args.dir)?;
    let mut core = rt::CoreSpec::new(0);
    core.cpu = args.cpu;
    core.warm_up_file = Some(warm_up_file);
    core.name = "relay-owner".into();
    let socket = net::bind(args.listen)?;
    let setup = match (&args.client_cert, &args.client_key) {
        (Some(cert), Some(key)) => net::client_listener(cert, key)?,
        _ => ServerSetup {
            tls: ServerTls::Strict(args.tls.peer(OWNER_ID)?.server_config().clone()),
            transport: TransportSettings::peer_link().build()?,
        },
    };
    rt::spawn_core(core, move || async move {
        let mut pump = net::pump()?;
        let endpoint = net::listen(&mut pump, socket, setup)?;
        let path = args.dir.join("relay.journal");
        let journal = Journal::open(&path, FILE_BYTES, GROUP_BYTES, GROUPS_IN_FLIGHT)
            .with_context(|| format!("cannot prepare {}", path.display()))?;
        let addr = pump.local_addr(endpoint)?;
        let replicas = dial_replicas(&mut pump, &args)?;
        Owner {
            pump,
            journal,
            streams: HashMap::new(),
            records: 0,
            spin: Duration::from_micros(args.spin_us),
            replicas,
            await_replica: args.await_replica,
            shipped: HashMap::new(),
            next_ship: 0,
        }
        .serve(|| net::announce(&args.ready, addr))
        .await
    })?
    .join()?
}

fn dial_replicas(pump: &mut Pump, args: &OwnerArgs) -> Result<Vec<Replica>> {
    if args.replica.is_empty() {
        return Ok(Vec::new());
    }
    let dial = client_config(
        args.tls.peer(OWNER_ID)?.client_config().clone(),
        TransportSettings::peer_link().build()?,
    )?;
    let dialler = net::dialler(pump, SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?;
    let mut replicas = Vec::new();
    for addr in &args.replica {
        let conn = pump.connect(dialler, *addr, OWNER_ID, dial.clone(), Instant::now())?;
        replicas.push(Replica {
            conn,
            stream: None,
            answers: Vec::new(),
        });
    }
    Ok(replicas)
}

/// Another owner that is handed every durable batch.
struct Replica {
    conn: ConnId,
    /// Set once it is connected.
    stream: Option<StreamId>,
    /// Part of an answer.
    answers: Vec<u8>,
}

/// Where an answer goes.
struct Answer {
    conn: ConnId,
    stream: StreamId,
    id: u64,
    position: u64,
    /// For the replicas; empty without.
    body: Vec<Bytes>,
}

/// A batch that is coming in.
#[derive(Default)]
struct Incoming {
    header: [u8; HEADER_BYTES],
    header_filled: usize,
    body_left: usize,
    crc: u32,
    /// What arrived of the body, for the replicas.
    kept: Vec<Bytes>,
}

struct Owner {
    pump: Pump,
    journal: Journal<Answer>,
    streams: HashMap<(ConnId, StreamId), Incoming>,
    records: u64,
    spin: Duration,
    replicas: Vec<Replica>,
    await_replica: bool,
    /// Batches no replica has answered yet, by the id they were shipped under.
    shipped: HashMap<u64, Answer>,
    next_ship: u64,
}

impl Owner {
    async fn serve(mut self, announce: impl FnOnce() -> Result<()>) -> Result<()> {
        let mut alarm = rt::Alarm::new();
        let give_up = Instant::now() + CONNECT_PATIENCE;
        let mut announce = Some(announce);
        loop {
            self.pump.poll_io(Instant::now());
            while let Some(event) = self.pump.next_event() {
                self.on_event(event)?;
            }
            if self.replicas.iter().all(|replica| replica.stream.is_some()) {
                if let Some(announce) = announce.take() {
                    announce()?;
                }
            } else if Instant::now() > give_up {
                bail!("a replica of the relay does not answer");
            }
            self.answer()?;
            self.journal.kick()?;
            self.pump.flush(Instant::now());
            let journal = &self.journal;
            if self.pump.spin(self.spin, || journal.has_finished()) {
                rt::yield_if_needed().await;
                continue;
            }
            let until = Instant::now() + Duration::from_millis(100);
            net::wait(&mut self.pump, &mut alarm, until, |cx| {
                journal.poll_ready(cx)
            })
            .await;
            rt::yield_if_needed().await;
        }
    }

    fn on_event(&mut self, event: PumpEvent) -> Result<()> {
        match event {
            PumpEvent::Connected { conn, .. } => {
                if let Some(replica) = self.replicas.iter_mut().find(|r| r.conn == conn) {
                    replica.stream = Some(self.pump.open_bi(conn)?);
                }
                Ok(())
            }
            PumpEvent::Readable { conn, stream } => {
                match self.replicas.iter().position(|r| r.conn == conn) {
                    Some(at) => self.on_replica_answers(at, stream),
                    None => self.on_readable(conn, stream),
                }
            }
            PumpEvent::Closed { conn, reason } if self.replicas.iter().any(|r| r.conn == conn) => {
                bail!("a replica of the relay is gone: {reason}")
            }
            PumpEvent::Closed { conn, .. } => {
                self.streams.retain(|(of, _), _| *of != conn);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn on_readable(&mut self, conn: ConnId, stream: StreamId) -> Result<()> {
        let mut chunks = Vec::new();
        let end = self
            .pump
            .read_each(conn, stream, usize::MAX, |chunk| chunks.push(chunk));
        for chunk in chunks {
            self.take(conn, stream, chunk)?;
        }
        match end {
            ReadEnd::Blocked | ReadEnd::Limit => {}
            ReadEnd::Finished | ReadEnd::Reset(_) | ReadEnd::Closed => {
                self.streams.remove(&(conn, stream));
                // Fails only on a connection that has just ended.
                let _ = self.pump.finish(conn, stream);
            }
        }
        Ok(())
    }

    fn take(&mut self, conn: ConnId, stream: StreamId, chunk: Bytes) -> Result<()> {
        let is_replicated = !self.replicas.is_empty();
        let mut bytes = &chunk[..];
        let incoming = self.streams.entry((conn, stream)).or_default();
        while !bytes.is_empty() {
            if incoming.header_filled < HEADER_BYTES {
                let step = (HEADER_BYTES - incoming.header_filled).min(bytes.len());
                let (now, later) = bytes.split_at(step);
                incoming.header[incoming.header_filled..][..step].copy_from_slice(now);
                incoming.header_filled += step;
                bytes = later;
                if incoming.header_filled == HEADER_BYTES {
                    let [a, b, c, d, ..] = incoming.header;
                    let body = u32::from_be_bytes([a, b, c, d]);
                    if body == 0 || body > MAX_BODY_BYTES {
                        bail!("a batch of {body} bytes cannot be");
                    }
                    incoming.body_left = body as usize;
                    incoming.crc = 0;
                    self.journal.append(&incoming.header);
                }
                continue;
            }
            let (now, later) = bytes.split_at(incoming.body_left.min(bytes.len()));
            incoming.crc = crc32c::crc32c_append(incoming.crc, now);
            incoming.body_left -= now.len();
            self.journal.append(now);
            if is_replicated {
                incoming.kept.push(chunk.slice_ref(now));
            }
            bytes = later;
            if incoming.body_left == 0 {
                self.journal.append(&incoming.crc.to_le_bytes());
                incoming.header_filled = 0;
                let [_, _, _, _, id @ ..] = incoming.header;
                self.journal.owe(Answer {
                    conn,
                    stream,
                    id: u64::from_be_bytes(id),
                    position: self.records,
                    body: std::mem::take(&mut incoming.kept),
                });
                self.records += 1;
            }
        }
        Ok(())
    }

    fn answer(&mut self) -> Result<()> {
        let mut durable = Vec::new();
        self.journal
            .take_durable(|answer| durable.push(answer))
            .context("the journal cannot be written")?;
        for mut answer in durable {
            if self.replicas.is_empty() {
                self.acknowledge(&answer);
                continue;
            }
            let id = self.next_ship;
            self.next_ship += 1;
            self.ship(id, std::mem::take(&mut answer.body));
            match self.await_replica {
                true => drop(self.shipped.insert(id, answer)),
                false => self.acknowledge(&answer),
            }
        }
        Ok(())
    }

    fn acknowledge(&mut self, answer: &Answer) {
        let mut frame = BytesMut::with_capacity(ACK_BYTES);
        frame.put_u64(answer.id);
        frame.put_u64(answer.position);
        // A connection that has ended wants no answer.
        let _ = self
            .pump
            .send(answer.conn, answer.stream, Bytes::from(frame));
    }

    fn ship(&mut self, id: u64, body: Vec<Bytes>) {
        let bytes: usize = body.iter().map(Bytes::len).sum();
        let mut header = BytesMut::with_capacity(HEADER_BYTES);
        header.put_u32(bytes as u32);
        header.put_u64(id);
        let header = header.freeze();
        for replica in &self.replicas {
            if let Some(stream) = replica.stream {
                let parts = std::iter::once(header.clone()).chain(body.iter().cloned());
                // Fails only when the replica has just ended, which ends the run.
                let _ = self.pump.send_parts(replica.conn, stream, parts);
            }
        }
    }

    /// The first replica that has a batch lets its client be answered.
    fn on_replica_answers(&mut self, at: usize, stream: StreamId) -> Result<()> {
        let replica = &mut self.replicas[at];
        let answers = &mut replica.answers;
        let end = self
            .pump
            .read_each(replica.conn, stream, usize::MAX, |chunk| {
                answers.extend_from_slice(&chunk);
            });
        if !matches!(end, ReadEnd::Blocked | ReadEnd::Limit) {
            bail!("a replica of the relay has ended its stream");
        }
        let whole = answers.len() / ACK_BYTES * ACK_BYTES;
        let ids: Vec<u64> = answers[..whole]
            .chunks_exact(ACK_BYTES)
            .filter_map(|answer| answer.first_chunk::<8>())
            .map(|id| u64::from_be_bytes(*id))
            .collect();
        answers.drain(..whole);
        for id in ids {
            if let Some(answer) = self.shipped.remove(&id) {
                self.acknowledge(&answer);
            }
        }
        Ok(())
    }
}
