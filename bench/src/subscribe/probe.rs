//! The bare fan-out: what the same machine does with the same bytes and no broker.
//!
//! One process with the broker's QUIC driver. A stream says with its first byte whether it publishes
//! or subscribes; every whole frame of a publisher goes, as one piece of shared memory, to every
//! subscriber, and is answered. Nothing is written, named, routed or looked at.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{bail, Result};
use bytes::{Buf, BufMut, Bytes, BytesMut};
use felix_uring::cluster::{Authority, ChildProcess};
use felix_uring::driver::quic::{ConnId, Pump, PumpEvent, ReadEnd, StreamId};
use shard_executor::rt;

use crate::relay::frames::{ACK_BYTES, HEADER_BYTES, MAX_BODY_BYTES};
use crate::relay::net::{self, Facing};
use crate::relay::Starter;

/// First byte of a publisher's stream.
pub const PUBLISHER: u8 = b'P';
/// First byte of a subscriber's stream.
pub const SUBSCRIBER: u8 = b'S';
/// What its certificate says.
const PROBE_ID: &str = "fanout-probe";

/// Runs until the process is ended.
pub fn run_fanout(args: Facing) -> Result<()> {
    let setup = args.listener()?;
    let socket = net::bind(args.listen)?;
    rt::spawn_core(args.core(PROBE_ID), move || async move {
        let mut pump = net::pump()?;
        let listener = net::listen(&mut pump, socket, setup)?;
        net::announce(&args.ready, pump.local_addr(listener)?)?;
        let fanout = Fanout {
            pump,
            publishers: HashMap::new(),
            subscribers: Vec::new(),
        };
        fanout.serve(Duration::from_micros(args.spin_us)).await
    })?
    .join()?
}

type End = (ConnId, StreamId);

struct Fanout {
    pump: Pump,
    /// Bytes of publishers' frames that have not come whole.
    publishers: HashMap<End, BytesMut>,
    subscribers: Vec<End>,
}

impl Fanout {
    async fn serve(mut self, spin: Duration) -> Result<()> {
        let mut alarm = rt::Alarm::new();
        loop {
            self.pump.poll_io(Instant::now());
            while let Some(event) = self.pump.next_event() {
                match event {
                    PumpEvent::Readable { conn, stream } => self.on_readable((conn, stream))?,
                    PumpEvent::Closed { conn, .. } => {
                        self.publishers.retain(|(of, _), _| *of != conn);
                        self.subscribers.retain(|(of, _)| *of != conn);
                    }
                    _ => {}
                }
            }
            if self.pump.flush(Instant::now()) || self.pump.spin(spin, || false) {
                rt::yield_if_needed().await;
                continue;
            }
            let until = Instant::now() + Duration::from_millis(100);
            net::wait(&mut self.pump, &mut alarm, until, |_| {
                std::task::Poll::Pending
            })
            .await;
            rt::yield_if_needed().await;
        }
    }

    fn on_readable(&mut self, end: End) -> Result<()> {
        let mut came = self.publishers.remove(&end).unwrap_or_default();
        let is_known = self.subscribers.contains(&end);
        let is_new = came.capacity() == 0 && !is_known;
        let read = self.pump.read_each(end.0, end.1, usize::MAX, |chunk| {
            came.extend_from_slice(&chunk)
        });
        if is_new && !came.is_empty() && came.get_u8() == SUBSCRIBER {
            self.subscribers.push(end);
            // An empty frame: from now on it gets everything.
            self.send(end, Bytes::from_static(&[0; HEADER_BYTES]));
            return Ok(());
        }
        if is_known {
            return Ok(());
        }
        while let Some(body) = came.first_chunk::<4>().map(|len| u32::from_be_bytes(*len)) {
            if body > MAX_BODY_BYTES {
                bail!("a batch of {body} bytes cannot be");
            }
            let frame_bytes = HEADER_BYTES + body as usize;
            if came.len() < frame_bytes {
                break;
            }
            let frame = came.split_to(frame_bytes).freeze();
            for at in 0..self.subscribers.len() {
                self.send(self.subscribers[at], frame.clone());
            }
            let mut answer = BytesMut::with_capacity(ACK_BYTES);
            answer.extend_from_slice(&frame[4..HEADER_BYTES]);
            answer.put_u64(0);
            self.send(end, answer.freeze());
        }
        if !matches!(
            read,
            ReadEnd::Finished | ReadEnd::Reset(_) | ReadEnd::Closed
        ) {
            // Room for the next frame also marks the stream as known.
            came.reserve(HEADER_BYTES);
            self.publishers.insert(end, came);
        }
        Ok(())
    }

    fn send(&mut self, end: End, bytes: Bytes) {
        // Fails only on a stream that has just ended, which its `Closed` tells.
        let _ = self.pump.send(end.0, end.1, bytes);
    }
}

/// The running process; ends when it is dropped.
pub struct FanoutProcess {
    child: ChildProcess,
    ca: PathBuf,
    addr: SocketAddr,
}

impl FanoutProcess {
    /// Starts it with its files in `dir`.
    pub fn start(dir: &Path, cpu: usize, spin_us: u64) -> Result<Self> {
        std::fs::create_dir_all(dir)?;
        let authority = Authority::open_or_create(dir, 30)?;
        let starter = Starter {
            authority: &authority,
            home: dir.join(PROBE_ID),
            id: PROBE_ID,
            cpu,
            spin_us,
            takes_clients: true,
        };
        let (child, addr) = starter.start(PROBE_ID, &[])?;
        Ok(Self {
            child,
            ca: authority.ca_path(),
            addr,
        })
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The authority of its certificate.
    pub fn ca(&self) -> &Path {
        &self.ca
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.pid()
    }
}
