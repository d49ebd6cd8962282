//! The relay's ingress: copies bytes from stream to stream, both ways, and looks at none of them.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::task::Poll;
use std::time::{Duration, Instant};

use anyhow::{bail, Result};
use clap::Args;
use felix_uring::driver::quic::{
    client_config, ConnId, Pump, PumpEvent, ReadEnd, Side, StreamId, TransportSettings,
};
use shard_executor::rt;

use super::net::{self, Facing, INGRESS_ID, OWNER_ID};

/// A stream is not read while this much of it waits to go out.
const AHEAD_BYTES: usize = 8 << 20;
/// The owner has to be reachable within this time.
const CONNECT_PATIENCE: Duration = Duration::from_secs(10);

/// Flags of the hidden command.
#[derive(Debug, Clone, Args)]
pub struct IngressArgs {
    /// The relay's owner
    #[arg(long)]
    pub owner: SocketAddr,
    #[command(flatten)]
    pub facing: Facing,
}

/// Runs until the process is ended.
pub fn run_ingress(args: IngressArgs) -> Result<()> {
    let setup = args.facing.listener()?;
    let peer = args.facing.tls.peer(INGRESS_ID)?;
    let dial = client_config(
        peer.client_config().clone(),
        TransportSettings::peer_link().build()?,
    )?;
    let socket = net::bind(args.facing.listen)?;
    rt::spawn_core(args.facing.core(INGRESS_ID), move || async move {
        let mut pump = net::pump()?;
        let listener = net::listen(&mut pump, socket, setup)?;
        let dialler = net::dialler(&mut pump, SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?;
        let owner = pump.connect(dialler, args.owner, OWNER_ID, dial, Instant::now())?;
        let relay = Relay {
            pump,
            owner,
            is_owner_up: false,
            twin: HashMap::new(),
            paused: HashMap::new(),
            spin: Duration::from_micros(args.facing.spin_us),
        };
        let addr = relay.pump.local_addr(listener)?;
        relay
            .serve(|| net::announce(&args.facing.ready, addr))
            .await
    })?
    .join()?
}

type End = (ConnId, StreamId);

struct Relay {
    pump: Pump,
    owner: ConnId,
    is_owner_up: bool,
    /// The other side of each stream, in both directions.
    twin: HashMap<End, End>,
    /// By the end that is full, the end that is not read meanwhile.
    paused: HashMap<End, End>,
    spin: Duration,
}

impl Relay {
    async fn serve(mut self, announce: impl FnOnce() -> Result<()>) -> Result<()> {
        let mut alarm = rt::Alarm::new();
        let give_up = Instant::now() + CONNECT_PATIENCE;
        let mut announce = Some(announce);
        loop {
            self.pump.poll_io(Instant::now());
            while let Some(event) = self.pump.next_event() {
                self.on_event(event)?;
            }
            if self.is_owner_up {
                if let Some(announce) = announce.take() {
                    announce()?;
                }
            } else if Instant::now() > give_up {
                bail!("the relay's owner does not answer");
            }
            self.pump.flush(Instant::now());
            if self.pump.spin(self.spin, || false) {
                rt::yield_if_needed().await;
                continue;
            }
            let until = Instant::now() + Duration::from_millis(100);
            net::wait(&mut self.pump, &mut alarm, until, |_| Poll::Pending).await;
            rt::yield_if_needed().await;
        }
    }

    fn on_event(&mut self, event: PumpEvent) -> Result<()> {
        match event {
            PumpEvent::Connected { side, .. } => self.is_owner_up |= side == Side::Client,
            PumpEvent::StreamOpened {
                conn,
                stream,
                bi: true,
            } if conn != self.owner => {
                let onward = (self.owner, self.pump.open_bi(self.owner)?);
                self.twin.insert((conn, stream), onward);
                self.twin.insert(onward, (conn, stream));
            }
            PumpEvent::Readable { conn, stream } => self.copy((conn, stream)),
            PumpEvent::Drained { conn, stream } => {
                if let Some(source) = self.paused.remove(&(conn, stream)) {
                    self.copy(source);
                }
            }
            PumpEvent::Closed { conn, reason } => {
                if conn == self.owner {
                    bail!("the relay's owner is gone: {reason}");
                }
                let ends: Vec<End> = self
                    .twin
                    .keys()
                    .filter(|(c, _)| *c == conn)
                    .copied()
                    .collect();
                for end in ends {
                    self.part(end);
                }
            }
            PumpEvent::HandshakeFailed {
                side: Side::Client,
                reason,
                ..
            } => {
                bail!("the relay's owner cannot be reached: {reason}")
            }
            _ => {}
        }
        Ok(())
    }

    fn copy(&mut self, from: End) {
        let Some(&to) = self.twin.get(&from) else {
            return;
        };
        if self.pump.queued_bytes(to.0, to.1) > AHEAD_BYTES {
            self.paused.insert(to, from);
            return;
        }
        let mut chunks = Vec::new();
        let end = self
            .pump
            .read_each(from.0, from.1, usize::MAX, |chunk| chunks.push(chunk));
        if !chunks.is_empty() {
            // Fails only when the other side has just ended, which has its own event.
            let _ = self.pump.send_parts(to.0, to.1, chunks);
        }
        match end {
            ReadEnd::Blocked | ReadEnd::Limit => {}
            ReadEnd::Finished | ReadEnd::Reset(_) | ReadEnd::Closed => self.part(from),
        }
    }

    /// Ends both sides of a stream.
    fn part(&mut self, end: End) {
        let Some(twin) = self.twin.remove(&end) else {
            return;
        };
        self.twin.remove(&twin);
        self.paused.remove(&end);
        self.paused.remove(&twin);
        for (conn, stream) in [end, twin] {
            // What has ended already needs no end.
            let _ = self.pump.finish(conn, stream);
        }
    }
}
