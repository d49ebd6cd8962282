//! Handshakes in memory: who is let in, who is refused, and what the refusal is called.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use felix_uring::ids::NodeId;
use felix_uring::tls::{
    certificate_names_node, crypto_provider, peer_names, ClientCertSource, ClientTls, DevCa,
    IssueRequest, PeerTls, PeerTlsPaths, RefusedBy, TlsRefusal,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{
    AlertDescription, CipherSuite, ClientConfig, ClientConnection, Error, RootCertStore,
    ServerConfig, ServerConnection,
};
use time::{Duration as Span, OffsetDateTime};

fn now_s() -> u64 {
    let elapsed = SystemTime::now().duration_since(UNIX_EPOCH);
    elapsed.expect("after 1970").as_secs()
}

fn peer(
    dir: &std::path::Path,
    ca: &DevCa,
    name: &str,
    names: &[&str],
    now_s: u64,
    end: Span,
) -> PeerTls {
    let names: Vec<String> = names.iter().map(|n| (*n).to_string()).collect();
    let mut request = IssueRequest::for_broker(&names, 365);
    request.not_after = OffsetDateTime::now_utc() + end;
    request.not_before = OffsetDateTime::now_utc() - Span::days(100);
    let issued = ca.issue(&request).expect("issued");
    let paths = PeerTlsPaths {
        cert: dir.join("cert.pem"),
        key: dir.join("key.pem"),
        ca: dir.join("ca.pem"),
    };
    std::fs::write(&paths.cert, issued.cert_pem).expect("written");
    std::fs::write(&paths.key, issued.key_pem).expect("written");
    std::fs::write(&paths.ca, ca.cert_pem()).expect("written");
    let node = NodeId::new(name).expect("a name");
    PeerTls::load(&paths, &node, now_s).expect("loads")
}

struct Outcome {
    client: Result<(), Error>,
    server: Result<(), Error>,
    server_saw: Vec<CertificateDer<'static>>,
    suite: Option<CipherSuite>,
    alpn: Option<Vec<u8>>,
}

/// Carries bytes both ways until nothing moves.
fn shake(client: &Arc<ClientConfig>, server: &Arc<ServerConfig>, dialled: &str) -> Outcome {
    let name = ServerName::try_from(dialled.to_string()).expect("a name");
    let mut client = ClientConnection::new(Arc::clone(client), name).expect("client");
    let mut server = ServerConnection::new(Arc::clone(server)).expect("server");
    let mut outcome = Outcome {
        client: Ok(()),
        server: Ok(()),
        server_saw: Vec::new(),
        suite: None,
        alpn: None,
    };
    for _ in 0..10 {
        let mut wire = Vec::new();
        while client.wants_write() {
            client.write_tls(&mut wire).expect("memory");
        }
        if !wire.is_empty() {
            server.read_tls(&mut &wire[..]).expect("memory");
            if outcome.server.is_ok() {
                outcome.server = server.process_new_packets().map(drop);
            }
        }
        let mut wire = Vec::new();
        while server.wants_write() {
            server.write_tls(&mut wire).expect("memory");
        }
        if !wire.is_empty() {
            client.read_tls(&mut &wire[..]).expect("memory");
            if outcome.client.is_ok() {
                outcome.client = client.process_new_packets().map(drop);
            }
        }
    }
    let saw = server.peer_certificates().unwrap_or_default().iter();
    outcome.server_saw = saw.map(|cert| cert.clone().into_owned()).collect();
    outcome.suite = client.negotiated_cipher_suite().map(|suite| suite.suite());
    outcome.alpn = client.alpn_protocol().map(<[u8]>::to_vec);
    outcome
}

#[test]
fn two_brokers_prove_their_names_to_each_other() {
    let dirs = [
        tempfile::tempdir().expect("dir"),
        tempfile::tempdir().expect("dir"),
    ];
    let ca = DevCa::generate("ca").expect("made");
    let year = Span::days(365);
    let a = peer(
        dirs[0].path(),
        &ca,
        "broker-a",
        &["broker-a", "localhost"],
        now_s(),
        year,
    );
    let b = peer(
        dirs[1].path(),
        &ca,
        "broker-b",
        &["Broker-B"],
        now_s(),
        year,
    );
    let outcome = shake(a.client_config(), b.server_config(), "broker-b");
    assert_eq!((outcome.client, outcome.server), (Ok(()), Ok(())));
    assert_eq!(outcome.suite, Some(CipherSuite::TLS13_AES_128_GCM_SHA256));
    assert_eq!(outcome.alpn.as_deref(), Some(&b"felix-internal/1"[..]));
    assert_eq!(peer_names(&outcome.server_saw), ["broker-a", "localhost"]);
    let node = |name| NodeId::new(name).expect("a name");
    assert!(certificate_names_node(
        &outcome.server_saw,
        &node("broker-a")
    ));
    assert!(certificate_names_node(
        &outcome.server_saw,
        &node("BROKER-A")
    ));
    assert!(!certificate_names_node(
        &outcome.server_saw,
        &node("broker-b")
    ));
    assert!(!certificate_names_node(&[], &node("broker-a")));
    assert!(!certificate_names_node(
        &[CertificateDer::from(vec![1, 2])],
        &node("broker-a")
    ));
    // The catalog pointed at the wrong broker: the dialler refuses.
    let outcome = shake(a.client_config(), b.server_config(), "broker-c");
    assert!(matches!(outcome.client, Err(Error::InvalidCertificate(_))));
    assert_eq!(
        outcome.server,
        Err(Error::AlertReceived(AlertDescription::BadCertificate))
    );
}

#[test]
fn a_wildcard_is_nobody() {
    let dirs = [
        tempfile::tempdir().expect("dir"),
        tempfile::tempdir().expect("dir"),
    ];
    let ca = DevCa::generate("ca").expect("made");
    let year = Span::days(365);
    let a = peer(dirs[0].path(), &ca, "a.felix", &["a.felix"], now_s(), year);
    let b = peer(
        dirs[1].path(),
        &ca,
        "b.felix",
        &["*.felix", "b.felix"],
        now_s(),
        year,
    );
    assert_eq!(
        shake(a.client_config(), b.server_config(), "b.felix").client,
        Ok(())
    );
    let outcome = shake(a.client_config(), b.server_config(), "c.felix");
    assert!(matches!(outcome.client, Err(Error::InvalidCertificate(_))));
}

#[test]
fn refusals_have_reasons_on_both_sides() {
    let dirs = [
        tempfile::tempdir().expect("dir"),
        tempfile::tempdir().expect("dir"),
    ];
    let ca = DevCa::generate("ca").expect("made");
    let year = Span::days(365);
    let b = peer(
        dirs[1].path(),
        &ca,
        "broker-b",
        &["broker-b"],
        now_s(),
        year,
    );
    let other_ca = DevCa::generate("other").expect("made");
    // Loaded while it was valid, long expired when the handshake happens.
    let then = now_s() - 50 * 86_400;
    let expired = peer(
        dirs[0].path(),
        &ca,
        "broker-a",
        &["broker-a"],
        then,
        Span::days(-10),
    );
    let foreign = peer(
        dirs[0].path(),
        &other_ca,
        "broker-a",
        &["broker-a"],
        now_s(),
        year,
    );
    let nameless = PeerTls::unauthenticated(&NodeId::new("broker-a").expect("name")).expect("made");
    let cases = [
        (&expired, TlsRefusal::OutsideValidity),
        (&nameless, TlsRefusal::UnknownIssuer),
    ];
    for (dialler, want) in cases {
        let outcome = shake(dialler.client_config(), b.server_config(), "broker-b");
        assert!(outcome.server.is_err());
        let Err(Error::AlertReceived(alert)) = outcome.client else {
            panic!("{want:?}: {:?}", outcome.client);
        };
        assert_eq!(TlsRefusal::from_alert(u8::from(alert)), want);
    }
    // One from another authority refuses the listener before it is judged itself.
    let outcome = shake(foreign.client_config(), b.server_config(), "broker-b");
    assert!(matches!(outcome.client, Err(Error::InvalidCertificate(_))));
    let Err(Error::AlertReceived(alert)) = outcome.server else {
        panic!("{:?}", outcome.server);
    };
    assert_eq!(
        TlsRefusal::from_alert(u8::from(alert)),
        TlsRefusal::UnknownIssuer
    );
    // No certificate at all.
    let mut roots = RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_slice(ca.cert_pem().as_bytes()).expect("pem"))
        .expect("root");
    let mut bare = ClientConfig::builder_with_provider(crypto_provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    bare.alpn_protocols = vec![b"felix-internal/1".to_vec()];
    let outcome = shake(&Arc::new(bare.clone()), b.server_config(), "broker-b");
    let Err(Error::AlertReceived(alert)) = outcome.client else {
        panic!("{:?}", outcome.client);
    };
    assert_eq!(
        TlsRefusal::from_alert(u8::from(alert)),
        TlsRefusal::NoCertificate
    );
    // A client that strays to the internal port.
    bare.alpn_protocols = vec![b"felix/1".to_vec()];
    let outcome = shake(&Arc::new(bare), b.server_config(), "broker-b");
    let Err(Error::AlertReceived(alert)) = outcome.client else {
        panic!("{:?}", outcome.client);
    };
    assert_eq!(
        TlsRefusal::from_alert(u8::from(alert)),
        TlsRefusal::WrongProtocol
    );
}

#[test]
fn refusal_codes_and_texts() {
    assert_eq!(
        TlsRefusal::from_quic_code(0x100 + 45),
        Some(TlsRefusal::OutsideValidity)
    );
    for code in [0, 1, 0xff, 0x200, u64::MAX] {
        assert_eq!(TlsRefusal::from_quic_code(code), None);
    }
    for refusal in TlsRefusal::ALL {
        let (theirs, ours) = (refusal.text(RefusedBy::Peer), refusal.text(RefusedBy::Us));
        assert!(theirs.starts_with("the peer refused") && ours.starts_with("refused"));
        assert!(!refusal.reason().is_empty());
    }
}

#[test]
fn a_renewed_certificate_is_shown_in_the_next_handshake() {
    let dirs = [
        tempfile::tempdir().expect("dir"),
        tempfile::tempdir().expect("dir"),
    ];
    let ca = DevCa::generate("ca").expect("made");
    let year = Span::days(365);
    let a = peer(
        dirs[0].path(),
        &ca,
        "broker-a",
        &["broker-a"],
        now_s(),
        year,
    );
    let b = peer(
        dirs[1].path(),
        &ca,
        "broker-b",
        &["broker-b"],
        now_s(),
        year,
    );
    let start = Instant::now();
    let mut watch = a.watch(start).expect("files");
    let before = shake(a.client_config(), b.server_config(), "broker-b").server_saw;
    // The same paths, a new certificate.
    peer(
        dirs[0].path(),
        &ca,
        "broker-a",
        &["broker-a", "new.felix"],
        now_s(),
        year,
    );
    watch
        .poll(start + Duration::from_secs(30), now_s())
        .expect("an event");
    let after = shake(a.client_config(), b.server_config(), "broker-b");
    assert_eq!(after.server, Ok(()));
    assert_eq!(peer_names(&before), ["broker-a"]);
    assert_eq!(peer_names(&after.server_saw), ["broker-a", "new.felix"]);
}

#[test]
fn unauthenticated_peers_accept_each_other() {
    let node = |name| NodeId::new(name).expect("a name");
    let a = PeerTls::unauthenticated(&node("a")).expect("made");
    let b = PeerTls::unauthenticated(&node("b")).expect("made");
    assert!(!a.is_authenticated() && a.watch(Instant::now()).is_none());
    let outcome = shake(a.client_config(), b.server_config(), "b");
    assert_eq!((outcome.client, outcome.server), (Ok(()), Ok(())));
    assert!(outcome.server_saw.is_empty());
}

#[test]
fn clients_with_and_without_a_protocol_are_served() {
    let names = vec!["broker-1".to_string()];
    let tls = ClientTls::load(&ClientCertSource::SelfSigned { names }, now_s()).expect("made");
    let pem = tls.self_signed_pem().expect("made here");
    let client = |protocols: &[&[u8]]| {
        let mut roots = RootCertStore::empty();
        roots
            .add(CertificateDer::from_pem_slice(pem.as_bytes()).expect("pem"))
            .expect("root");
        let mut config = ClientConfig::builder_with_provider(crypto_provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("versions")
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = protocols.iter().map(|p| p.to_vec()).collect();
        Arc::new(config)
    };
    let outcome = shake(&client(&[]), tls.without_alpn(), "localhost");
    assert_eq!(
        (outcome.client, outcome.server, outcome.alpn),
        (Ok(()), Ok(()), None)
    );
    let outcome = shake(&client(&[b"felix/1"]), tls.with_alpn(), "broker-1");
    assert_eq!((outcome.client, outcome.server), (Ok(()), Ok(())));
    assert_eq!(outcome.alpn.as_deref(), Some(&b"felix/1"[..]));
    let outcome = shake(&client(&[b"h3"]), tls.with_alpn(), "localhost");
    let alert = Error::AlertReceived(AlertDescription::NoApplicationProtocol);
    assert_eq!(outcome.client, Err(alert));
}
