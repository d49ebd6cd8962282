//! The server half of a transport measurement, in a process of its own.

use std::ffi::OsString;
use std::io::{ErrorKind, Write};
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};
use clap::{Args, ValueEnum};
use felix_uring::cluster::{ChildProcess, ChildSpec};
use felix_uring::driver::quic::probe::{self, ProbeIdentity, ProbeReport};
use felix_uring::driver::quic::{bind_reuseport, TransportSettings, UdpIo};
use serde::{Deserialize, Serialize};
use shard_executor::rt;
use shard_executor::topology::pin_current_thread;

use crate::quic::tokio_side;

const START_PATIENCE: Duration = Duration::from_secs(10);

/// The driver under measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    /// The broker's own.
    Felix,
    /// tokio with quinn.
    Tokio,
}

impl Side {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Felix => "felix",
            Self::Tokio => "tokio",
        }
    }
}

/// Flags of the hidden command.
#[derive(Debug, Clone, Args)]
pub struct ServerArgs {
    /// Which driver
    #[arg(long)]
    pub side: Side,
    /// CPU to run on
    #[arg(long)]
    pub cpu: usize,
    /// Look for input this long before waiting, in us
    #[arg(long, default_value_t = 0)]
    pub spin_us: u64,
    /// Directory for the address and the certificate
    #[arg(long)]
    pub dir: PathBuf,
}

/// What the server tells of one connection.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct ServedConnection {
    /// Payload bytes taken in.
    pub bytes: u64,
    /// CPU seconds of the process in the connection's life.
    pub cpu_s: f64,
    /// Its length.
    pub seconds: f64,
    /// Packets declared lost.
    pub lost_packets: u64,
}

/// Serves until the process is ended. Prints one line a connection.
pub fn run_server(args: ServerArgs) -> Result<()> {
    static NEVER: AtomicBool = AtomicBool::new(false);
    let identity = ProbeIdentity::generate()?;
    let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let socket = bind_reuseport(addr, 1)?.pop().context("no socket")?;
    announce(&args.dir, &identity, &socket)?;
    let settings = TransportSettings::peer_link();
    match args.side {
        Side::Felix => {
            let mut core = rt::CoreSpec::new(0);
            core.cpu = Some(args.cpu);
            let spin = Duration::from_micros(args.spin_us);
            let served = rt::spawn_core(core, move || async move {
                let io = UdpIo::new(socket)?;
                probe::serve(io, &identity, &settings, spin, &NEVER, |r| tell(&r)).await?;
                anyhow::Ok(())
            })?;
            served.join()?
        }
        Side::Tokio => {
            pin_current_thread(&[args.cpu])?;
            let serve = tokio_side::serve(socket, &identity, &settings, &NEVER, |r| tell(&r));
            tokio_side::block_on(serve)
        }
    }
}

fn announce(dir: &Path, identity: &ProbeIdentity, socket: &UdpSocket) -> Result<()> {
    std::fs::write(dir.join("certificate"), identity.certificate())?;
    let staged = dir.join("ready.tmp");
    std::fs::write(&staged, socket.local_addr()?.to_string())?;
    std::fs::rename(&staged, dir.join("ready"))?;
    Ok(())
}

fn tell(report: &ProbeReport) {
    let served = ServedConnection {
        bytes: report.bytes,
        cpu_s: report.cpu_s,
        seconds: report.seconds,
        lost_packets: report.stats.lost_packets,
    };
    if let Ok(line) = serde_json::to_string(&served) {
        // Nobody is left to tell when the parent has gone.
        let _ = writeln!(std::io::stdout(), "{line}");
    }
}

/// A running server process; ends when dropped.
pub struct ServerProcess {
    child: ChildProcess,
    /// Where it listens.
    pub addr: SocketAddr,
    /// Its certificate.
    pub certificate: Vec<u8>,
    log: PathBuf,
    lines_seen: usize,
}

impl ServerProcess {
    /// Starts one, with its files under `dir`.
    pub fn start(dir: &Path, side: Side, cpu: usize, spin_us: u64) -> Result<Self> {
        let home = dir.join(format!("quic-{}", side.name()));
        std::fs::create_dir_all(&home)?;
        // A server that ran here before has left its address; nothing listens there any more.
        match std::fs::remove_file(home.join("ready")) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
        let log = home.join("log");
        let args: Vec<OsString> = vec![
            "quic-server".into(),
            "--side".into(),
            side.name().into(),
            "--cpu".into(),
            cpu.to_string().into(),
            "--spin-us".into(),
            spin_us.to_string().into(),
            "--dir".into(),
            home.clone().into(),
        ];
        let mut child = ChildProcess::start(&ChildSpec {
            program: std::env::current_exe()?,
            args,
            env: Vec::new(),
            log: log.clone(),
        })?;
        let give_up = Instant::now() + START_PATIENCE;
        let addr = loop {
            if let Ok(text) = std::fs::read_to_string(home.join("ready")) {
                break text.trim().parse()?;
            }
            if child.poll_exit()?.is_some() || Instant::now() > give_up {
                bail!(
                    "the {} server does not start: {}",
                    side.name(),
                    child.log_tail()
                );
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        Ok(Self {
            certificate: std::fs::read(home.join("certificate"))?,
            child,
            addr,
            log,
            lines_seen: 0,
        })
    }

    /// What it told of the connection that ended last; waits for it.
    pub fn last_connection(&mut self) -> Result<ServedConnection> {
        let give_up = Instant::now() + START_PATIENCE;
        loop {
            let text = std::fs::read_to_string(&self.log)?;
            let lines: Vec<&str> = text.lines().filter(|l| l.starts_with('{')).collect();
            if lines.len() > self.lines_seen && text.ends_with('\n') {
                self.lines_seen = lines.len();
                return Ok(serde_json::from_str(lines[lines.len() - 1])?);
            }
            if self.child.poll_exit()?.is_some() || Instant::now() > give_up {
                bail!(
                    "the server says nothing of its connection: {}",
                    self.child.log_tail()
                );
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Connections are told of that nobody asked about.
    pub fn skip_told(&mut self) -> Result<()> {
        let text = std::fs::read_to_string(&self.log)?;
        self.lines_seen = text.lines().filter(|l| l.starts_with('{')).count();
        Ok(())
    }
}
