//! Who gets a connection and who is told why not.

use std::sync::Arc;
use std::time::Duration;

use crate::support::{connected, Pair, Tls, World, CLIENT, SERVER};
use felix_uring::driver::quic::{
    CloseReason, PumpEvent, Refuser, ServerTls, Side, TransportSettings,
};

const LIMIT: Duration = Duration::from_secs(5);
const NO_APPLICATION_PROTOCOL: u8 = 120;

fn agreed_alpn(events: &[PumpEvent]) -> Option<Option<Vec<u8>>> {
    events.iter().find_map(|e| match e {
        PumpEvent::Connected { alpn, .. } => Some(alpn.as_ref().map(|a| a.to_vec())),
        _ => None,
    })
}

fn failure(events: &[PumpEvent]) -> Option<&CloseReason> {
    events.iter().find_map(|e| match e {
        PumpEvent::HandshakeFailed { reason, .. } | PumpEvent::Closed { reason, .. } => {
            Some(reason)
        }
        _ => None,
    })
}

#[test]
fn clients_with_and_without_a_protocol_are_served() {
    for (offered, agreed) in [
        (vec!["felix/1"], Some(b"felix/1".to_vec())),
        (vec!["other/9", "felix/1"], Some(b"felix/1".to_vec())),
        (vec![], None),
    ] {
        let mut pair = Pair::new(1);
        pair.dial(&offered);
        let both = |w: &mut World| w.events.iter().all(|e| connected(e).is_some());
        assert!(pair.world.run(LIMIT, both), "{offered:?}");
        assert_eq!(
            agreed_alpn(&pair.world.events[CLIENT]),
            Some(agreed.clone())
        );
        assert_eq!(agreed_alpn(&pair.world.events[SERVER]), Some(agreed));
    }
}

#[test]
fn a_hello_over_two_datagrams_is_understood_in_any_order() {
    // Many long protocol names make the hello larger than one datagram of 1200 bytes.
    let filler: Vec<String> = (0..12).map(|n| format!("{n:0>120}")).collect();
    let mut offered: Vec<&str> = filler.iter().map(String::as_str).collect();
    offered.push("felix/1");
    for (seed, reorder) in [(1, 0.0), (2, 0.9), (3, 0.5), (4, 0.5)] {
        let mut pair = Pair::new(seed);
        pair.world.net.0.borrow_mut().reorder = reorder;
        let client = pair.dial(&offered);
        pair.world.turn(&mut |_| false);
        let sent = pair.world.pumps[CLIENT].conn_stats(client).expect("stats");
        assert!(
            sent.sent_datagrams >= 2,
            "the hello must not fit one datagram"
        );
        let both = |w: &mut World| w.events.iter().all(|e| connected(e).is_some());
        assert!(pair.world.run(LIMIT, both), "seed {seed}");
        let alpn = agreed_alpn(&pair.world.events[SERVER]).flatten();
        assert_eq!(alpn, Some(b"felix/1".to_vec()));
    }
}

#[test]
fn a_client_with_other_protocols_only_is_refused_and_the_next_is_served() {
    let mut pair = Pair::new(1);
    pair.dial(&["other/1"]);
    assert!(pair
        .world
        .run(LIMIT, |w| failure(&w.events[CLIENT]).is_some()));
    assert!(matches!(
        failure(&pair.world.events[CLIENT]),
        Some(CloseReason::TlsRefused {
            alert: NO_APPLICATION_PROTOCOL,
            by: Refuser::Peer,
            ..
        })
    ));
    assert!(connected(&pair.world.events[SERVER]).is_none());
    assert!(matches!(
        failure(&pair.world.events[SERVER]),
        Some(CloseReason::TlsRefused {
            by: Refuser::Us,
            ..
        })
    ));
    pair.world.events.iter_mut().for_each(Vec::clear);
    pair.connect();
}

#[test]
fn a_strict_listener_refuses_clients_without_its_protocol() {
    for offered in [vec![], vec!["felix/1"]] {
        let mut pair = Pair::with(1, TransportSettings::peer_link(), |tls| {
            ServerTls::Strict(tls.server(&["felix-internal/1"]))
        });
        pair.dial(&offered);
        assert!(pair
            .world
            .run(LIMIT, |w| failure(&w.events[CLIENT]).is_some()));
        assert!(
            connected(&pair.world.events[SERVER]).is_none(),
            "{offered:?}"
        );
    }
}

#[test]
fn a_missing_client_certificate_is_reported_on_both_sides() {
    let strict =
        |tls: &Tls| ServerTls::Strict(tls.server_asking_for_certificates(&["felix-internal/1"]));
    let mut pair = Pair::with(1, TransportSettings::peer_link(), strict);
    pair.dial(&["felix-internal/1"]);
    assert!(pair.world.run(LIMIT, |w| {
        failure(&w.events[CLIENT]).is_some() && failure(&w.events[SERVER]).is_some()
    }));
    for (side, by) in [(CLIENT, Refuser::Peer), (SERVER, Refuser::Us)] {
        match failure(&pair.world.events[side]) {
            Some(CloseReason::TlsRefused {
                by: who, detail, ..
            }) => {
                assert_eq!(*who, by);
                assert!(!detail.is_empty());
            }
            other => panic!("side {side}: {other:?}"),
        }
    }
    assert!(connected(&pair.world.events[SERVER]).is_none());

    let mut pair = Pair::with(1, TransportSettings::peer_link(), strict);
    let tls = pair.tls.client_with_certificate(&["felix-internal/1"]);
    pair.dial_with(tls);
    assert!(pair
        .world
        .run(LIMIT, |w| connected(&w.events[SERVER]).is_some()));
    let shown = pair.world.events[SERVER].iter().find_map(|e| match e {
        PumpEvent::Connected {
            peer_certificates,
            side,
            ..
        } => Some((peer_certificates.clone(), *side)),
        _ => None,
    });
    assert_eq!(
        shown,
        Some((vec![pair.tls.certificate.clone()], Side::Server))
    );
}

#[test]
fn a_dead_address_is_given_up() {
    let mut pair = Pair::new(1);
    pair.world.net.0.borrow_mut().loss = 1.0;
    pair.dial(&[]);
    assert!(pair
        .world
        .run(Duration::from_secs(11), |w| failure(&w.events[CLIENT])
            .is_some()));
    assert_eq!(
        failure(&pair.world.events[CLIENT]),
        Some(&CloseReason::TimedOut)
    );
    assert!(pair
        .world
        .run(Duration::from_secs(20), |w| w.pumps[CLIENT].is_drained()));
}

#[test]
fn a_wrong_server_name_is_refused_by_us() {
    let mut pair = Pair::new(1);
    let other = Tls::new();
    pair.dial_with(other.client(&[]));
    assert!(pair
        .world
        .run(LIMIT, |w| failure(&w.events[CLIENT]).is_some()));
    assert!(matches!(
        failure(&pair.world.events[CLIENT]),
        Some(CloseReason::TlsRefused {
            by: Refuser::Us,
            ..
        })
    ));
}

#[test]
fn newcomers_beyond_the_limit_are_refused_and_counted() {
    let mut pair = Pair::new(1);
    let tls = pair.tls.client(&[]);
    let transport = pair.settings.build().expect("settings");
    let config =
        felix_uring::driver::quic::client_config(Arc::new(tls), transport).expect("config");
    let now = pair.world.now;
    // The endpoint admits 20 handshakes at a time.
    for _ in 0..30 {
        pair.world.pumps[CLIENT]
            .connect(
                pair.client_endpoint,
                pair.server_addr,
                "localhost",
                config.clone(),
                now,
            )
            .expect("connect");
    }
    pair.world.run(LIMIT, |w| w.events[CLIENT].len() >= 30);
    let refusals = |side: usize| {
        let events = pair.world.events[side].iter();
        let refused = |e: &&PumpEvent| {
            matches!(
                e,
                PumpEvent::HandshakeFailed {
                    reason: CloseReason::Refused,
                    ..
                }
            )
        };
        events.filter(refused).count()
    };
    let refused = refusals(CLIENT);
    let served = pair.world.events[CLIENT]
        .iter()
        .filter(|e| matches!(e, PumpEvent::Connected { .. }))
        .count();
    assert_eq!((served, refused), (20, 10));
    assert_eq!(pair.world.pumps[SERVER].counters().refused_at_limit, 10);
    // The side that refuses hears of it as well, and can count and say it.
    assert_eq!(refusals(SERVER), 10);
}
