//! The QUIC pump over real sockets: two server cores on one port, clients on a third executor.

use std::future::poll_fn;
use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use felix_uring::driver::quic::probe::{client_tls, ProbeIdentity};
use felix_uring::driver::quic::{
    bind_reuseport, client_config, ConnId, EndpointSpec, Pump, PumpConfig, PumpCounters, PumpEvent,
    SendCounters, ServerSetup, ServerTls, SharedKeys, StreamId, TransportSettings, UdpIo,
    SPIN_BUDGET,
};
use shard_executor::rt::{self, spawn_core, CoreSpec};

const CLIENTS: usize = 12;
const MESSAGE_BYTES: usize = 300_000;
const LIMIT: Duration = Duration::from_secs(30);

async fn turn(pump: &mut Pump, mut on_event: impl FnMut(&mut Pump, PumpEvent)) {
    if !pump.spin(SPIN_BUDGET, || false) {
        poll_fn(|cx| pump.poll_wait(cx, Instant::now())).await;
    }
    let now = Instant::now();
    pump.poll_io(now);
    while let Some(event) = pump.next_event() {
        on_event(pump, event);
    }
    pump.flush(now);
    rt::yield_if_needed().await;
}

fn spec(io: UdpIo, server: Option<ServerSetup>) -> EndpointSpec {
    EndpointSpec {
        role: 0,
        io: Box::new(io),
        shared_port: server.is_some(),
        server,
        max_connections: 100,
        max_handshakes: 100,
    }
}

async fn echo_server(
    core: u16,
    socket: UdpSocket,
    keys: SharedKeys,
    identity: ProbeIdentity,
    stop: Arc<AtomicBool>,
) -> (PumpCounters, SendCounters) {
    let mut pump = Pump::new(PumpConfig::new(core, 2, keys)).expect("pump");
    let setup = ServerSetup {
        tls: ServerTls::Strict(identity.server_tls().expect("tls")),
        transport: TransportSettings::client_facing()
            .build()
            .expect("settings"),
    };
    let io = UdpIo::new(socket).expect("io");
    let endpoint = pump.add_endpoint(spec(io, Some(setup))).expect("endpoint");
    // Wakes the server when the clients are done, even without datagrams.
    let mut alarm = rt::Alarm::new();
    while !stop.load(Ordering::Relaxed) {
        alarm.set(Some(Instant::now() + Duration::from_millis(20)));
        poll_fn(|cx| {
            let ready = pump.poll_wait(cx, Instant::now());
            if alarm.poll_expired(cx).is_ready() {
                return std::task::Poll::Ready(());
            }
            ready
        })
        .await;
        turn_events(&mut pump);
        rt::yield_if_needed().await;
    }
    (*pump.counters(), pump.send_counters(endpoint))
}

fn turn_events(pump: &mut Pump) {
    let now = Instant::now();
    pump.poll_io(now);
    while let Some(event) = pump.next_event() {
        match event {
            PumpEvent::Readable { conn, stream } => {
                let mut parts = Vec::new();
                pump.read_each(conn, stream, usize::MAX, |c| parts.push(c));
                pump.send_parts(conn, stream, parts).expect("echo");
            }
            PumpEvent::Stray { core, .. } => panic!("not steered to core {core}"),
            _ => {}
        }
    }
    pump.flush(now);
}

/// Every client has a socket of its own, so that the kernel spreads them over the cores.
async fn echo_clients(addr: SocketAddr, certificate: Vec<u8>) -> SendCounters {
    let keys = SharedKeys::generate();
    let mut pump = Pump::new(PumpConfig::new(0, 1, keys)).expect("pump");
    let transport = TransportSettings::client_facing()
        .build()
        .expect("settings");
    let config = client_config(client_tls(&certificate).expect("tls"), transport).expect("config");
    let message: Bytes = (0..MESSAGE_BYTES).map(|i| (i / 7) as u8).collect();
    let mut sessions: Vec<(ConnId, Option<StreamId>, Vec<u8>)> = Vec::new();
    let mut first = None;
    for _ in 0..CLIENTS {
        let io = UdpIo::bind(SocketAddr::from(([127, 0, 0, 1], 0))).expect("bind");
        let endpoint = pump.add_endpoint(spec(io, None)).expect("endpoint");
        first.get_or_insert(endpoint);
        let conn = pump
            .connect(endpoint, addr, "localhost", config.clone(), Instant::now())
            .expect("connect");
        sessions.push((conn, None, Vec::new()));
    }
    pump.flush(Instant::now());
    let give_up = Instant::now() + LIMIT;
    while sessions.iter().any(|(_, _, got)| got.len() < MESSAGE_BYTES) {
        assert!(Instant::now() < give_up, "no echo in time");
        turn(&mut pump, |pump, event| match event {
            PumpEvent::Connected { conn, .. } => {
                let stream = pump.open_bi(conn).expect("stream");
                pump.send(conn, stream, message.clone()).expect("send");
                for session in sessions.iter_mut().filter(|s| s.0 == conn) {
                    session.1 = Some(stream);
                }
            }
            PumpEvent::Readable { conn, stream } => {
                for session in sessions.iter_mut().filter(|s| s.0 == conn) {
                    assert_eq!(session.1, Some(stream));
                    pump.read_each(conn, stream, usize::MAX, |c| {
                        session.2.extend_from_slice(&c)
                    });
                }
            }
            PumpEvent::Closed { reason, .. } | PumpEvent::HandshakeFailed { reason, .. } => {
                panic!("{reason}")
            }
            _ => {}
        })
        .await;
    }
    assert!(sessions.iter().all(|(_, _, got)| got[..] == message[..]));
    pump.close_all(0, b"done", Instant::now());
    while !pump.is_quiet() {
        turn(&mut pump, |_, _| {}).await;
    }
    first.map(|e| pump.send_counters(e)).unwrap_or_default()
}

#[test]
fn echo_over_two_cores_that_share_a_port() {
    let identity = ProbeIdentity::generate().expect("identity");
    let certificate = identity.certificate().to_vec();
    let keys = SharedKeys::generate();
    let stop = Arc::new(AtomicBool::new(false));
    let sockets = bind_reuseport(SocketAddr::from(([127, 0, 0, 1], 0)), 2).expect("bind");
    let addr = sockets[0].local_addr().expect("addr");
    let mut servers = Vec::new();
    for (core, socket) in sockets.into_iter().enumerate() {
        let (keys, identity, stop) = (keys.clone(), identity.clone(), stop.clone());
        let server = spawn_core(CoreSpec::new(core), move || {
            echo_server(core as u16, socket, keys, identity, stop)
        });
        servers.push(server.expect("server core"));
    }
    let clients = spawn_core(CoreSpec::new(2), move || echo_clients(addr, certificate));
    let client = clients.expect("client core").join().expect("clients");
    stop.store(true, Ordering::Relaxed);
    let servers: Vec<_> = servers
        .into_iter()
        .map(|s| s.join().expect("server"))
        .collect();

    let connected: u64 = servers.iter().map(|(c, _)| c.connected).sum();
    assert_eq!(connected, CLIENTS as u64);
    assert!(
        servers.iter().all(|(c, _)| c.connected > 0),
        "the kernel spreads clients: {servers:?}"
    );
    assert!(!client.batching_off && !client.ecn_off, "{client:?}");
    assert!(
        client.datagrams > client.calls,
        "several datagrams a call: {client:?}"
    );
}
