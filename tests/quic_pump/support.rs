//! Pumps on virtual time over a virtual network: delay, loss, reordering, narrow paths, send faults.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::{self, IoSliceMut};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use felix_uring::driver::quic::{
    client_config, ConnId, DatagramIo, EndpointId, EndpointSpec, Pump, PumpConfig, PumpEvent,
    ServerSetup, ServerTls, SharedKeys, TransportSettings,
};
use quinn_udp::{EcnCodepoint, RecvMeta, Transmit};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};

/// What a socket's sends meet.
#[derive(Default)]
pub struct SendFaults {
    /// Fail every send of several datagrams with this error number.
    pub batch: Option<i32>,
    /// Fail every send with an ECN mark with this error number.
    pub ecn: Option<i32>,
    /// Would block for this many sends.
    pub would_block: usize,
    /// Sends of several datagrams that were attempted.
    pub batches_tried: usize,
    /// Sends with an ECN mark that were attempted.
    pub marked_tried: usize,
}

struct Packet {
    from: SocketAddr,
    ecn: Option<EcnCodepoint>,
    data: Vec<u8>,
}

pub struct NetState {
    now: Instant,
    sequence: u64,
    in_flight: BTreeMap<(Instant, u64), (SocketAddr, Packet)>,
    inboxes: HashMap<SocketAddr, VecDeque<Packet>>,
    rng: StdRng,
    pub delay: Duration,
    pub loss: f64,
    pub reorder: f64,
    /// Datagrams above this vanish.
    pub path_bytes: usize,
    /// Datagrams to this address arrive at that socket instead, as after a wrong steering decision.
    pub misdeliver: HashMap<SocketAddr, SocketAddr>,
    pub delivered: usize,
}

#[derive(Clone)]
pub struct Net(pub Rc<RefCell<NetState>>);

pub struct VirtualIo {
    net: Net,
    addr: SocketAddr,
    faults: Rc<RefCell<SendFaults>>,
}

impl DatagramIo for VirtualIo {
    fn send(&mut self, transmit: &Transmit<'_>) -> io::Result<()> {
        let segment = transmit.segment_size.unwrap_or(transmit.contents.len());
        let batch = transmit.contents.len() > segment;
        let mut faults = self.faults.borrow_mut();
        faults.batches_tried += usize::from(batch);
        faults.marked_tried += usize::from(transmit.ecn.is_some());
        if faults.would_block > 0 {
            faults.would_block -= 1;
            return Err(io::ErrorKind::WouldBlock.into());
        }
        if let Some(errno) = faults.batch.filter(|_| batch) {
            return Err(io::Error::from_raw_os_error(errno));
        }
        if let Some(errno) = faults.ecn.filter(|_| transmit.ecn.is_some()) {
            return Err(io::Error::from_raw_os_error(errno));
        }
        assert!(
            transmit.contents.len() <= 65_507,
            "no UDP datagram is larger"
        );
        let mut net = self.net.0.borrow_mut();
        for data in transmit.contents.chunks(segment) {
            net.launch(self.addr, transmit.destination, transmit.ecn, data);
        }
        Ok(())
    }

    fn recv(&mut self, buffers: &mut [IoSliceMut<'_>], meta: &mut [RecvMeta]) -> io::Result<usize> {
        let mut net = self.net.0.borrow_mut();
        net.deliver();
        let inbox = net.inboxes.entry(self.addr).or_default();
        let mut n = 0;
        while n < buffers.len() {
            let Some(packet) = inbox.pop_front() else {
                break;
            };
            buffers[n][..packet.data.len()].copy_from_slice(&packet.data);
            meta[n] = RecvMeta {
                addr: packet.from,
                len: packet.data.len(),
                stride: packet.data.len(),
                ecn: packet.ecn,
                dst_ip: None,
            };
            n += 1;
        }
        if n == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(n)
    }

    fn poll_readable(&mut self, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Pending
    }

    fn max_gso_segments(&self) -> usize {
        64
    }

    fn may_fragment(&self) -> bool {
        false
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.addr)
    }
}

impl NetState {
    fn launch(&mut self, from: SocketAddr, to: SocketAddr, ecn: Option<EcnCodepoint>, data: &[u8]) {
        if data.len() > self.path_bytes || self.rng.random_bool(self.loss) {
            return;
        }
        let extra = if self.rng.random_bool(self.reorder) {
            self.delay / 2
        } else {
            Duration::ZERO
        };
        self.sequence += 1;
        let packet = Packet {
            from,
            ecn,
            data: data.to_vec(),
        };
        self.in_flight
            .insert((self.now + self.delay + extra, self.sequence), (to, packet));
    }

    fn deliver(&mut self) {
        while let Some(entry) = self.in_flight.first_entry() {
            if entry.key().0 > self.now {
                break;
            }
            let (to, packet) = entry.remove();
            let to = self.misdeliver.get(&to).copied().unwrap_or(to);
            self.delivered += 1;
            // A socket that was closed loses its datagrams.
            if let Some(inbox) = self.inboxes.get_mut(&to) {
                inbox.push_back(packet);
            }
        }
    }
}

/// Pumps, their network and what they reported.
pub struct World {
    pub net: Net,
    pub pumps: Vec<Pump>,
    pub events: Vec<Vec<PumpEvent>>,
    pub now: Instant,
    next_port: u16,
}

impl World {
    pub fn new(seed: u64) -> Self {
        let now = Instant::now();
        Self {
            net: Net(Rc::new(RefCell::new(NetState {
                now,
                sequence: 0,
                in_flight: BTreeMap::new(),
                inboxes: HashMap::new(),
                rng: StdRng::seed_from_u64(seed),
                delay: Duration::from_millis(1),
                loss: 0.0,
                reorder: 0.0,
                path_bytes: 1_500,
                misdeliver: HashMap::new(),
                delivered: 0,
            }))),
            pumps: Vec::new(),
            events: Vec::new(),
            now,
            next_port: 1,
        }
    }

    pub fn fresh_addr(&mut self) -> SocketAddr {
        self.next_port += 1;
        SocketAddr::from(([10, 0, 0, 1], self.next_port))
    }

    pub fn add_pump(&mut self, config: PumpConfig) -> usize {
        self.pumps.push(Pump::new(config).expect("pump"));
        self.events.push(Vec::new());
        self.pumps.len() - 1
    }

    pub fn spec(
        &mut self,
        addr: SocketAddr,
        server: Option<ServerSetup>,
    ) -> (EndpointSpec, Rc<RefCell<SendFaults>>) {
        let faults = Rc::new(RefCell::new(SendFaults::default()));
        self.net
            .0
            .borrow_mut()
            .inboxes
            .insert(addr, VecDeque::new());
        let io = Box::new(VirtualIo {
            net: self.net.clone(),
            addr,
            faults: faults.clone(),
        });
        let spec = EndpointSpec {
            role: 1,
            io,
            shared_port: server.is_some(),
            server,
            max_connections: 100,
            max_handshakes: 20,
        };
        (spec, faults)
    }

    /// One turn of every pump; `act` sees the events before anything is sent.
    pub fn turn(&mut self, act: &mut dyn FnMut(&mut World) -> bool) -> bool {
        self.net.0.borrow_mut().now = self.now;
        for (pump, events) in self.pumps.iter_mut().zip(&mut self.events) {
            pump.poll_io(self.now);
            while let Some(event) = pump.next_event() {
                events.push(event);
            }
        }
        let done = act(self);
        for (pump, events) in self.pumps.iter_mut().zip(&mut self.events) {
            pump.flush(self.now);
            while let Some(event) = pump.next_event() {
                events.push(event);
            }
        }
        done
    }

    /// Turns until `act` says true; false when virtual `limit` passed first.
    pub fn run(&mut self, limit: Duration, mut act: impl FnMut(&mut World) -> bool) -> bool {
        let end = self.now + limit;
        loop {
            if self.turn(&mut act) {
                return true;
            }
            let arrival = self
                .net
                .0
                .borrow()
                .in_flight
                .first_key_value()
                .map(|(&(at, _), _)| at);
            let timeout = self.pumps.iter().filter_map(Pump::next_timeout).min();
            let busy = self.pumps.iter().any(Pump::has_work)
                || self.net.0.borrow().inboxes.values().any(|i| !i.is_empty());
            let step = Duration::from_micros(20);
            self.now = match [arrival, timeout].into_iter().flatten().min() {
                _ if busy => self.now + step,
                Some(at) => at.max(self.now + step),
                None => return false,
            };
            if self.now > end {
                return false;
            }
        }
    }

    /// Lets `time` pass.
    pub fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        self.run(time, |_| false);
        self.now = end;
        self.turn(&mut |_| false);
    }
}

pub fn pump_config(core: u16, cores: u16) -> PumpConfig {
    PumpConfig::new(core, cores, SharedKeys::from_bytes([7; SharedKeys::BYTES]))
}

/// A certificate for `localhost` and the configurations that use it.
pub struct Tls {
    pub certificate: CertificateDer<'static>,
    key: Vec<u8>,
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

impl Tls {
    pub fn new() -> Self {
        let made = rcgen::generate_simple_self_signed(vec!["localhost".into()]).expect("cert");
        Self {
            certificate: made.cert.der().clone(),
            key: made.key_pair.serialize_der(),
        }
    }

    fn private_key(&self) -> PrivateKeyDer<'static> {
        PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(self.key.clone()))
    }

    pub fn roots(&self) -> Arc<rustls::RootCertStore> {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(self.certificate.clone()).expect("root");
        Arc::new(roots)
    }

    pub fn server(&self, alpn: &[&str]) -> Arc<rustls::ServerConfig> {
        let mut config = rustls::ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("versions")
            .with_no_client_auth()
            .with_single_cert(vec![self.certificate.clone()], self.private_key())
            .expect("cert");
        config.alpn_protocols = alpn.iter().map(|a| a.as_bytes().to_vec()).collect();
        Arc::new(config)
    }

    pub fn server_asking_for_certificates(&self, alpn: &[&str]) -> Arc<rustls::ServerConfig> {
        let verifier =
            rustls::server::WebPkiClientVerifier::builder_with_provider(self.roots(), provider())
                .build()
                .expect("verifier");
        let mut config = rustls::ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("versions")
            .with_client_cert_verifier(verifier)
            .with_single_cert(vec![self.certificate.clone()], self.private_key())
            .expect("cert");
        config.alpn_protocols = alpn.iter().map(|a| a.as_bytes().to_vec()).collect();
        Arc::new(config)
    }

    pub fn client(&self, alpn: &[&str]) -> rustls::ClientConfig {
        let mut config = rustls::ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("versions")
            .with_root_certificates(self.roots())
            .with_no_client_auth();
        config.alpn_protocols = alpn.iter().map(|a| a.as_bytes().to_vec()).collect();
        config
    }

    pub fn client_with_certificate(&self, alpn: &[&str]) -> rustls::ClientConfig {
        let mut config = rustls::ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("versions")
            .with_root_certificates(self.roots())
            .with_client_auth_cert(vec![self.certificate.clone()], self.private_key())
            .expect("cert");
        config.alpn_protocols = alpn.iter().map(|a| a.as_bytes().to_vec()).collect();
        config
    }

    /// Accepts clients with `felix/1` and clients without any protocol.
    pub fn both(&self) -> ServerTls {
        ServerTls::AlpnOptional {
            with_alpn: self.server(&["felix/1"]),
            without_alpn: self.server(&[]),
        }
    }
}

pub const CLIENT: usize = 0;
pub const SERVER: usize = 1;

/// A client pump, a server pump, and what is needed to connect them.
pub struct Pair {
    pub world: World,
    pub tls: Tls,
    pub settings: TransportSettings,
    pub server_addr: SocketAddr,
    pub client_endpoint: EndpointId,
    pub server_endpoint: EndpointId,
    pub client_faults: Rc<RefCell<SendFaults>>,
    pub server_faults: Rc<RefCell<SendFaults>>,
}

impl Pair {
    pub fn new(seed: u64) -> Self {
        Self::with(seed, TransportSettings::peer_link(), |tls| tls.both())
    }

    pub fn with(
        seed: u64,
        settings: TransportSettings,
        server_tls: impl FnOnce(&Tls) -> ServerTls,
    ) -> Self {
        let tls = Tls::new();
        let mut world = World::new(seed);
        for _ in [CLIENT, SERVER] {
            world.add_pump(pump_config(0, 1));
        }
        let client_addr = world.fresh_addr();
        let server_addr = world.fresh_addr();
        let (spec, client_faults) = world.spec(client_addr, None);
        let client_endpoint = world.pumps[CLIENT].add_endpoint(spec).expect("endpoint");
        let setup = ServerSetup {
            tls: server_tls(&tls),
            transport: settings.build().expect("settings"),
        };
        let (spec, server_faults) = world.spec(server_addr, Some(setup));
        let server_endpoint = world.pumps[SERVER].add_endpoint(spec).expect("endpoint");
        Self {
            world,
            tls,
            settings,
            server_addr,
            client_endpoint,
            server_endpoint,
            client_faults,
            server_faults,
        }
    }

    pub fn dial(&mut self, alpn: &[&str]) -> ConnId {
        let tls = self.tls.client(alpn);
        self.dial_with(tls)
    }

    pub fn dial_with(&mut self, tls: rustls::ClientConfig) -> ConnId {
        let transport = self.settings.build().expect("settings");
        let config = client_config(Arc::new(tls), transport).expect("client config");
        let now = self.world.now;
        self.world.pumps[CLIENT]
            .connect(
                self.client_endpoint,
                self.server_addr,
                "localhost",
                config,
                now,
            )
            .expect("connect")
    }

    /// Dials and waits for both sides; gives both ids and clears the events.
    pub fn connect(&mut self) -> (ConnId, ConnId) {
        let client = self.dial(&["felix/1"]);
        let limit = Duration::from_secs(5);
        assert!(
            self.world
                .run(limit, |w| w.events.iter().all(|e| connected(e).is_some())),
            "no connection: {:?}",
            self.world.events
        );
        let server = connected(&self.world.events[SERVER]).expect("server side");
        self.world.events.iter_mut().for_each(Vec::clear);
        (client, server)
    }
}

pub fn connected(events: &[PumpEvent]) -> Option<ConnId> {
    events.iter().find_map(|e| match e {
        PumpEvent::Connected { conn, .. } => Some(*conn),
        _ => None,
    })
}
