//! Ends of connections, restarts, slots, and datagrams on the wrong core.

use std::time::Duration;

use bytes::Bytes;
use felix_uring::driver::quic::{
    client_config, CloseReason, ConnId, PumpEvent, Read, ServerSetup, SharedKeys, StreamError,
    TransportSettings,
};

use crate::support::{connected, pump_config, Pair, Tls, World, CLIENT, SERVER};

fn closed(events: &[PumpEvent]) -> Vec<&CloseReason> {
    events
        .iter()
        .filter_map(|e| match e {
            PumpEvent::Closed { reason, .. } => Some(reason),
            _ => None,
        })
        .collect()
}

#[test]
fn a_close_carries_its_code_and_is_reported_once_on_each_side() {
    let mut pair = Pair::new(1);
    let (client, server) = pair.connect();
    let now = pair.world.now;
    pair.world.pumps[CLIENT].close(client, 7, b"enough", now);
    pair.world.pumps[CLIENT].close(client, 8, b"again", now);
    assert!(pair.world.run(Duration::from_secs(10), |w| {
        w.pumps.iter().all(|p| p.is_drained())
    }));
    assert_eq!(
        closed(&pair.world.events[CLIENT]),
        [&CloseReason::LocallyClosed]
    );
    assert_eq!(
        closed(&pair.world.events[SERVER]),
        [&CloseReason::ApplicationClosed {
            code: 7,
            reason: Bytes::from_static(b"enough")
        }]
    );
    for (pump, id) in [(CLIENT, client), (SERVER, server)] {
        let pump = &mut pair.world.pumps[pump];
        assert!(!pump.is_live(id));
        assert_eq!(pump.open_bi(id), Err(StreamError::ConnectionClosed));
        assert!(pump.conn_stats(id).is_none());
    }
}

/// Congestion control must not hold for a close: the acknowledgements that would open the window are not
/// counted any more.
#[test]
fn a_close_behind_a_full_congestion_window_arrives() {
    for side in [CLIENT, SERVER] {
        let mut pair = Pair::new(1);
        let (client, server) = pair.connect();
        let (own, other) = (side, CLIENT + SERVER - side);
        let id = [client, server][side];
        // Far away: nothing of what is sent now is acknowledged before the close.
        pair.world.net.0.borrow_mut().delay = Duration::from_millis(400);
        let stream = pair.world.pumps[own].open_bi(id).expect("a stream");
        let data = Bytes::from(vec![7; 1 << 20]);
        pair.world.pumps[own]
            .send(id, stream, data)
            .expect("queued");
        pair.world.pass(Duration::from_millis(100));
        let sent = pair.world.pumps[own].conn_stats(id).expect("statistics");
        assert!(
            sent.congestion_window_bytes < 1 << 20,
            "the window holds everything: {sent:?}"
        );
        let now = pair.world.now;
        pair.world.pumps[own].close(id, 7, b"enough", now);
        pair.world.pass(Duration::from_millis(900));
        assert_eq!(
            closed(&pair.world.events[other]),
            [&CloseReason::ApplicationClosed {
                code: 7,
                reason: Bytes::from_static(b"enough")
            }]
        );
        pair.world.pass(Duration::from_secs(20));
        assert!(pair.world.pumps[own].is_drained());
        assert_eq!(pair.world.pumps[own].counters().closes_unsent, 0);
    }
}

#[test]
fn a_close_that_never_leaves_is_counted() {
    let mut pair = Pair::new(1);
    let (client, _) = pair.connect();
    // The socket takes nothing any more, and something else waits for it already.
    pair.client_faults.borrow_mut().would_block = usize::MAX;
    let stream = pair.world.pumps[CLIENT].open_bi(client).expect("a stream");
    pair.world.pumps[CLIENT]
        .send(client, stream, Bytes::from_static(b"before it"))
        .expect("queued");
    pair.world.pass(Duration::from_millis(10));
    let now = pair.world.now;
    pair.world.pumps[CLIENT].close(client, 7, b"enough", now);
    pair.world.pass(Duration::from_secs(20));
    // It is let go all the same.
    assert!(pair.world.pumps[CLIENT].is_drained());
    assert_eq!(pair.world.pumps[CLIENT].counters().closes_unsent, 1);
    assert_eq!(closed(&pair.world.events[SERVER]), [&CloseReason::TimedOut]);
}

#[test]
fn a_silent_peer_is_noticed_within_the_idle_timeout() {
    let mut pair = Pair::new(1);
    pair.connect();
    pair.world.pass(Duration::from_secs(60));
    assert!(closed(&pair.world.events[CLIENT]).is_empty(), "kept alive");
    let cut = pair.world.now;
    pair.world.net.0.borrow_mut().loss = 1.0;
    assert!(pair.world.run(Duration::from_secs(20), |w| {
        w.events.iter().all(|e| !closed(e).is_empty())
    }));
    for side in [CLIENT, SERVER] {
        assert_eq!(closed(&pair.world.events[side]), [&CloseReason::TimedOut]);
    }
    let noticed = pair.world.now - cut;
    assert!(noticed < Duration::from_secs(6), "{noticed:?}");
}

/// Replaces the server pump as a restart of its process would.
fn restart_server(pair: &mut Pair, keys: SharedKeys) {
    let mut config = pump_config(0, 1);
    config.keys = keys;
    let fresh = pair.world.add_pump(config);
    let setup = ServerSetup {
        tls: pair.tls.both(),
        transport: pair.settings.build().expect("settings"),
    };
    let (spec, _) = pair.world.spec(pair.server_addr, Some(setup));
    pair.world.pumps[fresh]
        .add_endpoint(spec)
        .expect("endpoint");
    pair.world.pumps.swap_remove(SERVER);
    pair.world.events.swap_remove(SERVER);
}

#[test]
fn a_restarted_server_is_noticed_at_once_if_it_kept_its_keys() {
    for (kept, reason, bound) in [
        (true, CloseReason::Reset, Duration::from_millis(100)),
        (false, CloseReason::TimedOut, Duration::from_secs(6)),
    ] {
        let mut pair = Pair::new(1);
        let (client, _) = pair.connect();
        let keys = if kept {
            pump_config(0, 1).keys
        } else {
            SharedKeys::generate()
        };
        restart_server(&mut pair, keys);
        let stream = pair.world.pumps[CLIENT].open_uni(client).expect("stream");
        pair.world.pumps[CLIENT]
            .send(client, stream, Bytes::from(vec![1; 500]))
            .expect("send");
        let sent = pair.world.now;
        assert!(pair
            .world
            .run(Duration::from_secs(20), |w| !closed(&w.events[CLIENT])
                .is_empty()));
        assert_eq!(closed(&pair.world.events[CLIENT]), [&reason]);
        let noticed = pair.world.now - sent;
        assert!(noticed < bound, "kept {kept}: {noticed:?}");
        // And the new process serves at once.
        pair.world.events.iter_mut().for_each(Vec::clear);
        pair.connect();
    }
}

#[test]
fn a_thousand_reconnects_leak_no_slot() {
    let mut pair = Pair::new(1);
    pair.world.net.0.borrow_mut().delay = Duration::from_micros(50);
    let mut seen: Vec<ConnId> = Vec::new();
    for round in 0..1000 {
        let (client, server) = pair.connect();
        seen.push(client);
        let stream = pair.world.pumps[CLIENT].open_bi(client).expect("stream");
        pair.world.pumps[CLIENT]
            .send(client, stream, Bytes::from_static(b"hello"))
            .expect("send");
        assert!(pair.world.run(Duration::from_secs(1), |w| {
            w.pumps[SERVER].read(server, stream, 9) != Read::Blocked
        }));
        let now = pair.world.now;
        // Either side closes.
        let (side, id) = [(CLIENT, client), (SERVER, server)][round % 2];
        pair.world.pumps[side].close(id, 0, b"", now);
        assert!(
            pair.world.run(Duration::from_secs(10), |w| {
                w.pumps.iter().all(|p| p.is_drained())
            }),
            "round {round}"
        );
        pair.world.events.iter_mut().for_each(Vec::clear);
    }
    for pump in &pair.world.pumps {
        assert_eq!(pump.open_connections(), 0);
        assert_eq!(pump.counters().connected, 1000);
        assert_eq!(pump.counters().closed, 1000);
        assert_eq!(pump.next_timeout(), None, "no deadline is left behind");
    }
    seen.sort();
    seen.dedup();
    assert_eq!(seen.len(), 1000, "ids never repeat");
    assert!(!pair.world.pumps[CLIENT].is_live(seen[0]));
}

#[test]
fn closing_all_empties_the_pump() {
    let mut pair = Pair::new(1);
    for _ in 0..5 {
        pair.connect();
    }
    let now = pair.world.now;
    pair.world.pumps[SERVER].close_all(0, b"shutting down", now);
    assert!(
        !pair.world.pumps[SERVER].is_quiet(),
        "the closes must leave"
    );
    assert!(pair
        .world
        .run(Duration::from_secs(1), |w| closed(&w.events[CLIENT]).len()
            == 5));
    assert!(pair.world.pumps[SERVER].is_quiet());
    assert!(pair
        .world
        .run(Duration::from_secs(10), |w| w.pumps[SERVER].is_drained()));
}

/// Two cores of one server; the second one's socket is only reached by misdelivery.
fn two_cores(seed: u64) -> (Pair, usize, std::net::SocketAddr) {
    let tls = Tls::new();
    let settings = TransportSettings::peer_link();
    let mut world = World::new(seed);
    world.add_pump(pump_config(0, 1));
    world.add_pump(pump_config(0, 2));
    let other = world.add_pump(pump_config(1, 2));
    let client_addr = world.fresh_addr();
    let server_addr = world.fresh_addr();
    let other_addr = world.fresh_addr();
    let (spec, client_faults) = world.spec(client_addr, None);
    let client_endpoint = world.pumps[CLIENT].add_endpoint(spec).expect("endpoint");
    let setup = ServerSetup {
        tls: tls.both(),
        transport: settings.build().expect("settings"),
    };
    let (spec, server_faults) = world.spec(server_addr, Some(setup.clone()));
    let server_endpoint = world.pumps[SERVER].add_endpoint(spec).expect("endpoint");
    let (spec, _) = world.spec(other_addr, Some(setup));
    world.pumps[other].add_endpoint(spec).expect("endpoint");
    let pair = Pair {
        world,
        tls,
        settings,
        server_addr,
        client_endpoint,
        server_endpoint,
        client_faults,
        server_faults,
    };
    (pair, other, other_addr)
}

#[test]
fn a_datagram_on_the_wrong_core_is_handed_over() {
    let (mut pair, other, other_addr) = two_cores(1);
    let client = pair.dial(&[]);
    assert!(pair.world.run(Duration::from_secs(5), |w| {
        connected(&w.events[SERVER]).is_some() && connected(&w.events[CLIENT]).is_some()
    }));
    let server = connected(&pair.world.events[SERVER]).expect("server");
    pair.world.events.iter_mut().for_each(Vec::clear);
    let server_addr = pair.server_addr;
    pair.world
        .net
        .0
        .borrow_mut()
        .misdeliver
        .insert(server_addr, other_addr);
    let stream = pair.world.pumps[CLIENT].open_uni(client).expect("stream");
    pair.world.pumps[CLIENT]
        .send(client, stream, Bytes::from(vec![5; 100_000]))
        .expect("send");
    let endpoint = pair.server_endpoint;
    let (mut received, mut handed_over) = (0, 0);
    assert!(pair.world.run(Duration::from_secs(5), |w| {
        let now = w.now;
        for event in w.events[other].split_off(0) {
            match event {
                PumpEvent::Stray {
                    core,
                    endpoint: from,
                    datagram,
                } => {
                    assert_eq!((core, from), (0, endpoint));
                    assert!(!datagram.is_empty());
                    handed_over += 1;
                    w.pumps[SERVER].inject(endpoint, datagram, now);
                }
                other => panic!("{other:?}"),
            }
        }
        w.pumps[SERVER].read_each(server, stream, usize::MAX, |c| received += c.len());
        received == 100_000
    }));
    assert!(handed_over > 50);
    assert_eq!(pair.world.pumps[other].counters().strays_out, handed_over);
    assert_eq!(pair.world.pumps[SERVER].counters().strays_in, handed_over);
    assert_eq!(pair.world.pumps[other].open_connections(), 0);
    assert!(
        pair.world.pumps[CLIENT].is_live(client),
        "no reset was drawn"
    );
}

#[test]
fn rotated_certificates_serve_newcomers_and_leave_the_others() {
    let mut pair = Pair::new(1);
    let (old, _) = pair.connect();
    let renewed = Tls::new();
    let setup = ServerSetup {
        tls: renewed.both(),
        transport: pair.settings.build().expect("settings"),
    };
    let endpoint = pair.server_endpoint;
    pair.world.pumps[SERVER]
        .set_server(endpoint, &setup)
        .expect("rotation");
    let transport = pair.settings.build().expect("settings");
    let config = client_config(renewed.client(&[]).into(), transport).expect("config");
    let now = pair.world.now;
    pair.world.pumps[CLIENT]
        .connect(
            pair.client_endpoint,
            pair.server_addr,
            "localhost",
            config,
            now,
        )
        .expect("connect");
    assert!(pair.world.run(Duration::from_secs(5), |w| {
        connected(&w.events[CLIENT]).is_some()
    }));
    assert!(pair.world.pumps[CLIENT].is_live(old));
}

#[test]
fn closing_during_the_handshake_is_reported_once() {
    let mut pair = Pair::new(1);
    let client = pair.dial(&[]);
    let now = pair.world.now;
    pair.world.pumps[CLIENT].close(client, 0, b"", now);
    assert!(pair.world.run(Duration::from_secs(10), |w| w
        .pumps
        .iter()
        .all(|p| p.is_drained())));
    let ends: Vec<_> = pair.world.events[CLIENT]
        .iter()
        .map(|e| match e {
            PumpEvent::HandshakeFailed { conn, reason, .. } => (*conn, reason.clone()),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(ends, [(Some(client), CloseReason::LocallyClosed)]);
}
