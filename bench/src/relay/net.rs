//! What both relay processes need of the network: certificates, a pump, a wait.

use std::future::poll_fn;
use std::net::{SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::task::{Context, Poll};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::{anyhow, Context as _, Result};
use felix_uring::driver::quic::{
    bind_reuseport, EndpointId, EndpointSpec, Pump, PumpConfig, ServerSetup, ServerTls, SharedKeys,
    TransportSettings, UdpIo,
};
use felix_uring::ids::NodeId;
use felix_uring::tls::{ClientCertSource, ClientTls, PeerTls, PeerTlsPaths};
use shard_executor::rt;

/// The node id of the relay's owner, which its certificate carries.
pub const OWNER_ID: &str = "relay-owner";
/// The node id of the relay's ingress.
pub const INGRESS_ID: &str = "relay-ingress";

/// Certificate files of one relay process, as brokers have them.
#[derive(Debug, Clone, clap::Args)]
pub struct TlsFiles {
    /// Authority of all certificates
    #[arg(long)]
    pub ca: PathBuf,
    /// Certificate towards the other relay process
    #[arg(long)]
    pub peer_cert: PathBuf,
    /// Its key
    #[arg(long)]
    pub peer_key: PathBuf,
}

/// Flags of a process that takes clients, as a broker does.
#[derive(Debug, Clone, clap::Args)]
pub struct Facing {
    /// Where to listen
    #[arg(long)]
    pub listen: SocketAddr,
    /// CPU of the core
    #[arg(long)]
    pub cpu: Option<usize>,
    /// File to write the address to once it serves
    #[arg(long)]
    pub ready: PathBuf,
    /// Certificate towards clients
    #[arg(long)]
    pub client_cert: PathBuf,
    /// Its key
    #[arg(long)]
    pub client_key: PathBuf,
    /// Look for work this long before waiting, in us; as the brokers do
    #[arg(long, default_value_t = 0)]
    pub spin_us: u64,
    #[command(flatten)]
    pub tls: TlsFiles,
}

impl Facing {
    /// What is listened with.
    pub fn listener(&self) -> Result<ServerSetup> {
        client_listener(&self.client_cert, &self.client_key)
    }

    /// The core it runs on.
    pub fn core(&self, name: &str) -> rt::CoreSpec {
        let mut core = rt::CoreSpec::new(0);
        core.cpu = self.cpu;
        core.name = name.into();
        core
    }
}

impl TlsFiles {
    /// TLS between the two, both sides authenticated.
    pub fn peer(&self, node: &str) -> Result<PeerTls> {
        let paths = PeerTlsPaths {
            cert: self.peer_cert.clone(),
            key: self.peer_key.clone(),
            ca: self.ca.clone(),
        };
        let node = NodeId::new(node).map_err(|error| anyhow!("{error}"))?;
        PeerTls::load(&paths, &node, now_s()).map_err(|faults| anyhow!("certificates: {faults:?}"))
    }
}

/// A listener for clients, as a broker has it.
pub fn client_listener(cert: &Path, key: &Path) -> Result<ServerSetup> {
    let source = ClientCertSource::Files {
        cert: cert.to_path_buf(),
        key: key.to_path_buf(),
    };
    let tls =
        ClientTls::load(&source, now_s()).map_err(|faults| anyhow!("certificates: {faults:?}"))?;
    Ok(ServerSetup {
        tls: ServerTls::AlpnOptional {
            with_alpn: tls.with_alpn().clone(),
            without_alpn: tls.without_alpn().clone(),
        },
        transport: TransportSettings::client_facing().build()?,
    })
}

/// Seconds since the epoch.
pub fn now_s() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

/// A pump for the one core of a relay process.
pub fn pump() -> Result<Pump> {
    Ok(Pump::new(PumpConfig::new(0, 1, SharedKeys::generate()))?)
}

/// Binds the way a broker's core does.
pub fn bind(addr: SocketAddr) -> Result<UdpSocket> {
    bind_reuseport(addr, 1)
        .with_context(|| format!("cannot bind {addr}"))?
        .pop()
        .context("no socket was bound")
}

/// Adds a listening socket.
pub fn listen(pump: &mut Pump, socket: UdpSocket, server: ServerSetup) -> Result<EndpointId> {
    endpoint(pump, UdpIo::new(socket)?, Some(server))
}

/// Adds a socket to dial from.
pub fn dialler(pump: &mut Pump, local: SocketAddr) -> Result<EndpointId> {
    endpoint(pump, UdpIo::bind(local)?, None)
}

fn endpoint(pump: &mut Pump, io: UdpIo, server: Option<ServerSetup>) -> Result<EndpointId> {
    Ok(pump.add_endpoint(EndpointSpec {
        role: 0,
        io: Box::new(io),
        server,
        shared_port: false,
        max_connections: 4096,
        max_handshakes: 1024,
    })?)
}

/// Waits for the pump, for `more`, or for the moment.
pub async fn wait(
    pump: &mut Pump,
    alarm: &mut rt::Alarm,
    until: Instant,
    mut more: impl FnMut(&mut Context<'_>) -> Poll<()>,
) {
    alarm.set(Some(until));
    poll_fn(|cx| {
        let ready = pump.poll_wait(cx, Instant::now()).is_ready();
        let more = more(cx).is_ready();
        match ready || more || alarm.poll_expired(cx).is_ready() {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    })
    .await;
}

/// Tells the parent that the process serves, and where.
pub fn announce(path: &Path, addr: SocketAddr) -> Result<()> {
    let staged = path.with_extension("tmp");
    std::fs::write(&staged, addr.to_string())?;
    std::fs::rename(&staged, path).with_context(|| format!("{}", path.display()))
}
