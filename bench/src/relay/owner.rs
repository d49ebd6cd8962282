//! The relay's owner: reads batches, sums them, makes them durable, answers.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};
use bytes::{BufMut, Bytes, BytesMut};
use clap::Args;
use felix_uring::driver::quic::{
    ConnId, Pump, PumpEvent, ReadEnd, ServerSetup, ServerTls, StreamId, TransportSettings,
};
use shard_executor::rt;

use super::frames::{ACK_BYTES, HEADER_BYTES, MAX_BODY_BYTES};
use super::journal::Journal;
use super::net::{self, TlsFiles, OWNER_ID};

/// As large as the broker's commit group.
const GROUP_BYTES: usize = 1 << 20;
/// As many on their way as the broker has.
const GROUPS_IN_FLIGHT: usize = 2;
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
        net::announce(&args.ready, pump.local_addr(endpoint)?)?;
        Owner {
            pump,
            journal,
            streams: HashMap::new(),
            records: 0,
            spin: Duration::from_micros(args.spin_us),
        }
        .serve()
        .await
    })?
    .join()?
}

/// Where an answer goes.
struct Answer {
    conn: ConnId,
    stream: StreamId,
    id: u64,
    position: u64,
}

/// A batch that is coming in.
#[derive(Default)]
struct Incoming {
    header: [u8; HEADER_BYTES],
    header_filled: usize,
    body_left: usize,
    crc: u32,
}

struct Owner {
    pump: Pump,
    journal: Journal<Answer>,
    streams: HashMap<(ConnId, StreamId), Incoming>,
    records: u64,
    spin: Duration,
}

impl Owner {
    async fn serve(mut self) -> Result<()> {
        let mut alarm = rt::Alarm::new();
        loop {
            self.pump.poll_io(Instant::now());
            while let Some(event) = self.pump.next_event() {
                self.on_event(event)?;
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
            PumpEvent::Readable { conn, stream } => self.on_readable(conn, stream),
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
            self.take(conn, stream, &chunk)?;
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

    fn take(&mut self, conn: ConnId, stream: StreamId, mut bytes: &[u8]) -> Result<()> {
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
                });
                self.records += 1;
            }
        }
        Ok(())
    }

    fn answer(&mut self) -> Result<()> {
        let pump = &mut self.pump;
        self.journal
            .take_durable(|answer| {
                let mut frame = BytesMut::with_capacity(ACK_BYTES);
                frame.put_u64(answer.id);
                frame.put_u64(answer.position);
                // A connection that has ended wants no answer.
                let _ = pump.send(answer.conn, answer.stream, Bytes::from(frame));
            })
            .context("the journal cannot be written")
    }
}
