//! Certificates that can never work are named with their file and a remedy, and renewed ones
//! are taken up without ever putting a half-written file into use.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use felix_uring::ids::NodeId;
use felix_uring::tls::{
    CertEvent, ClientCertSource, ClientTls, DevCa, IssueRequest, IssuedCert, PeerTls, PeerTlsPaths,
    TlsFault, TlsFaultKind,
};
use time::{Duration as Span, OffsetDateTime};

fn now_s() -> u64 {
    let elapsed = SystemTime::now().duration_since(UNIX_EPOCH);
    elapsed.expect("after 1970").as_secs()
}

struct Bundle {
    dir: tempfile::TempDir,
    ca: DevCa,
}

impl Bundle {
    fn new() -> Self {
        let ca = DevCa::generate("test authority").expect("made");
        let bundle = Self {
            dir: tempfile::tempdir().expect("a directory"),
            ca,
        };
        std::fs::write(bundle.paths().ca, bundle.ca.cert_pem()).expect("written");
        bundle.write(&bundle.issue(|_| {}));
        bundle
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn paths(&self) -> PeerTlsPaths {
        PeerTlsPaths {
            cert: self.file("cert.pem"),
            key: self.file("key.pem"),
            ca: self.file("ca.pem"),
        }
    }

    fn issue(&self, change: impl FnOnce(&mut IssueRequest)) -> IssuedCert {
        let mut request = IssueRequest::for_broker(&["broker-1".to_string()], 365);
        change(&mut request);
        self.ca.issue(&request).expect("issued")
    }

    fn write(&self, issued: &IssuedCert) {
        let paths = self.paths();
        std::fs::write(paths.cert, &issued.cert_pem).expect("written");
        std::fs::write(paths.key, &issued.key_pem).expect("written");
    }

    fn load(&self) -> Result<PeerTls, Vec<TlsFault>> {
        let node = NodeId::new("broker-1").expect("a name");
        PeerTls::load(&self.paths(), &node, now_s())
    }

    /// Kind and file name of every fault.
    fn faults(&self) -> Vec<(TlsFaultKind, String)> {
        let faults = self.load().expect_err("refused");
        let key = std::fs::read_to_string(self.paths().key).unwrap_or_default();
        let secret = key.lines().nth(1).filter(|line| line.len() > 20);
        let list = faults.iter();
        list.map(|fault| {
            let text = fault.to_string();
            assert!(!fault.remedy.is_empty() && !fault.cause.is_empty());
            assert!(secret.is_none_or(|secret| !text.contains(secret)), "{text}");
            (fault.kind, file_name(&fault.file))
        })
        .collect()
    }
}

fn file_name(path: &Path) -> String {
    path.file_name()
        .map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}

fn one(kind: TlsFaultKind, file: &str) -> Vec<(TlsFaultKind, String)> {
    vec![(kind, file.to_string())]
}

#[test]
fn a_good_bundle_loads_without_a_word() {
    let bundle = Bundle::new();
    let tls = bundle.load().expect("good");
    assert!(tls.is_authenticated());
    assert!(tls.warnings().is_empty());
    let days = (tls.not_after_s() - now_s() as i64) / 86_400;
    assert!((364..=365).contains(&days), "{days}");
}

#[test]
fn every_certificate_fault_is_named_alone() {
    let now = OffsetDateTime::now_utc();
    type Change = Box<dyn FnOnce(&mut IssueRequest)>;
    let cases: Vec<(TlsFaultKind, Change)> = vec![
        (
            TlsFaultKind::NameMissing,
            Box::new(|r| r.names = vec!["broker-2".into()]),
        ),
        // The common name stays broker-1 and does not help; neither does a wildcard.
        (
            TlsFaultKind::NameMissing,
            Box::new(|r| r.names = Vec::new()),
        ),
        (
            TlsFaultKind::NameMissing,
            Box::new(|r| r.names = vec!["*.felix".into()]),
        ),
        (TlsFaultKind::CaAsOwn, Box::new(|r| r.is_ca = true)),
        (TlsFaultKind::NoServerUsage, Box::new(|r| r.server = false)),
        (TlsFaultKind::NoClientUsage, Box::new(|r| r.client = false)),
        (
            TlsFaultKind::Expired,
            Box::new(move |r| r.not_after = now - Span::seconds(10)),
        ),
        (
            TlsFaultKind::NotYetValid,
            Box::new(move |r| r.not_before = now + Span::hours(1)),
        ),
    ];
    for (kind, change) in cases {
        let bundle = Bundle::new();
        bundle.write(&bundle.issue(change));
        assert_eq!(bundle.faults(), one(kind, "cert.pem"));
    }
}

#[test]
fn the_authority_itself_as_own_certificate_is_named() {
    let bundle = Bundle::new();
    let cert_pem = bundle.ca.cert_pem().to_string();
    let key_pem = bundle.ca.key_pem();
    bundle.write(&IssuedCert { cert_pem, key_pem });
    assert!(bundle
        .faults()
        .contains(&(TlsFaultKind::CaAsOwn, "cert.pem".to_string())));
}

#[test]
fn every_file_fault_is_named_alone() {
    type Damage = fn(&Bundle);
    let write = |bundle: &Bundle, name: &str, text: &str| {
        std::fs::write(bundle.file(name), text).expect("written");
    };
    let cases: Vec<(TlsFaultKind, &str, Damage)> = vec![
        (TlsFaultKind::Unreadable, "cert.pem", |b| {
            std::fs::remove_file(b.file("cert.pem")).expect("removed")
        }),
        (TlsFaultKind::Unreadable, "key.pem", |b| {
            std::fs::remove_file(b.file("key.pem")).expect("removed")
        }),
        (TlsFaultKind::Unreadable, "ca.pem", |b| {
            std::fs::remove_file(b.file("ca.pem")).expect("removed")
        }),
        (TlsFaultKind::KeyMismatch, "key.pem", |b| {
            let other = b.issue(|_| {});
            std::fs::write(b.file("key.pem"), other.key_pem).expect("written");
        }),
        (TlsFaultKind::UnknownIssuer, "cert.pem", |b| {
            let other = DevCa::generate("another authority").expect("made");
            std::fs::write(b.file("ca.pem"), other.cert_pem()).expect("written");
        }),
        (TlsFaultKind::UnknownIssuer, "cert.pem", |b| {
            let twin = DevCa::generate("test authority").expect("made");
            std::fs::write(b.file("ca.pem"), twin.cert_pem()).expect("written");
        }),
        (TlsFaultKind::NotPem, "key.pem", |b| {
            let cert = b.issue(|_| {}).cert_pem;
            std::fs::write(b.file("key.pem"), cert).expect("written");
        }),
        (TlsFaultKind::BadContent, "cert.pem", |b| {
            let text = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
            std::fs::write(b.file("cert.pem"), text).expect("written");
        }),
        (TlsFaultKind::BadContent, "key.pem", |b| {
            let text = "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n";
            std::fs::write(b.file("key.pem"), text).expect("written");
        }),
    ];
    for (kind, file, damage) in cases {
        let bundle = Bundle::new();
        damage(&bundle);
        assert_eq!(bundle.faults(), one(kind, file), "{kind:?} {file}");
    }
    for name in ["cert.pem", "key.pem", "ca.pem"] {
        let bundle = Bundle::new();
        write(&bundle, name, " \n");
        assert_eq!(bundle.faults(), one(TlsFaultKind::Empty, name));
        write(&bundle, name, "hello\n");
        assert_eq!(bundle.faults(), one(TlsFaultKind::NotPem, name));
    }
}

#[test]
fn several_faults_are_reported_together() {
    let bundle = Bundle::new();
    let mut expired = bundle.issue(|r| {
        r.not_after = OffsetDateTime::now_utc() - Span::days(1);
        r.client = false;
        r.names = vec!["else".into()];
    });
    expired.key_pem = String::new();
    bundle.write(&expired);
    std::fs::write(bundle.file("ca.pem"), "x").expect("written");
    let faults = bundle.faults();
    let named: Vec<String> = faults.iter().map(|(_, file)| file.clone()).collect();
    assert!(named.contains(&"key.pem".to_string()) && named.contains(&"ca.pem".to_string()));
    std::fs::write(bundle.file("key.pem"), bundle.issue(|_| {}).key_pem).expect("written");
    let kinds: Vec<TlsFaultKind> = bundle.faults().into_iter().map(|(kind, _)| kind).collect();
    use TlsFaultKind::*;
    for kind in [NameMissing, NoClientUsage, Expired, KeyMismatch, NotPem] {
        assert!(kinds.contains(&kind), "{kind:?} in {kinds:?}");
    }
}

#[test]
fn expiring_within_thirty_days_is_a_warning() {
    let bundle = Bundle::new();
    let soon = OffsetDateTime::now_utc() + Span::days(29) + Span::hours(1);
    bundle.write(&bundle.issue(|r| r.not_after = soon));
    let tls = bundle.load().expect("works");
    assert_eq!(tls.warnings().len(), 1);
    assert_eq!(tls.warnings()[0].kind, TlsFaultKind::ExpiresSoon);
    assert!(
        tls.warnings()[0].cause.contains("29 days"),
        "{}",
        tls.warnings()[0]
    );
}

#[test]
fn a_node_id_that_reads_as_an_address_is_refused() {
    let bundle = Bundle::new();
    bundle.write(&bundle.issue(|r| r.names = vec!["10.0.0.1".into()]));
    let node = NodeId::new("10.0.0.1").expect("labels of digits");
    let faults = PeerTls::load(&bundle.paths(), &node, now_s()).expect_err("refused");
    assert!(
        faults.iter().any(|f| f.kind == TlsFaultKind::NodeIdNotDns),
        "{faults:?}"
    );
}

#[test]
fn an_authority_can_be_taken_up_again() {
    let bundle = Bundle::new();
    let again = DevCa::from_pem(bundle.ca.cert_pem(), &bundle.ca.key_pem()).expect("reads");
    let request = IssueRequest::for_broker(&["broker-1".to_string()], 90);
    bundle.write(&again.issue(&request).expect("issued"));
    bundle.load().expect("issued by the same authority");
    assert!(DevCa::from_pem("x", "y").is_err());
    assert!(!format!("{again:?}").contains("BEGIN"));
}

#[test]
fn renewed_files_are_swapped_in_and_half_written_ones_are_not() {
    let bundle = Bundle::new();
    let tls = bundle.load().expect("good");
    let first_expiry = tls.not_after_s();
    let mut now = Instant::now();
    let mut watch = tls.watch(now).expect("files to watch");
    let mut look = |expect_early: bool| {
        if expect_early {
            assert_eq!(watch.poll(now, now_s()), None);
        }
        now += Duration::from_secs(30);
        watch.poll(now, now_s())
    };
    assert_eq!(look(true), None, "nothing changed");

    let renewed = bundle.issue(|r| r.not_after += Span::days(100));
    let half = &renewed.cert_pem[..renewed.cert_pem.len() / 2];
    std::fs::write(bundle.file("cert.pem"), half).expect("written");
    let Some(CertEvent::Kept(faults)) = look(true) else {
        panic!("a half-written certificate must be reported");
    };
    assert_eq!(faults[0].kind, TlsFaultKind::NotPem);
    assert_eq!(look(false), None, "reported once");
    assert_eq!(tls.not_after_s(), first_expiry);

    std::fs::write(bundle.file("cert.pem"), &renewed.cert_pem).expect("written");
    let Some(CertEvent::Kept(faults)) = look(false) else {
        panic!("a certificate before its key must be reported");
    };
    assert_eq!(faults[0].kind, TlsFaultKind::KeyMismatch);
    assert_eq!(tls.not_after_s(), first_expiry);

    std::fs::write(bundle.file("key.pem"), &renewed.key_pem).expect("written");
    let Some(CertEvent::Replaced {
        not_after_s,
        warnings,
    }) = look(false)
    else {
        panic!("a complete pair must be taken up");
    };
    assert!(warnings.is_empty());
    assert_eq!(not_after_s, tls.not_after_s());
    assert!(not_after_s >= first_expiry + 99 * 86_400);
    assert_eq!(look(false), None);

    // Somebody else's certificate is not taken up, nor is a vanished file fatal.
    bundle.write(&bundle.issue(|r| r.names = vec!["broker-2".into()]));
    assert!(matches!(look(false), Some(CertEvent::Kept(_))));
    std::fs::remove_file(bundle.file("key.pem")).expect("removed");
    assert!(matches!(look(false), Some(CertEvent::Kept(_))));
    assert_eq!(tls.not_after_s(), not_after_s);
}

#[test]
fn client_listener_certificates_are_checked_or_made() {
    let bundle = Bundle::new();
    let (cert, key) = (bundle.file("cert.pem"), bundle.file("key.pem"));
    let files = ClientCertSource::Files { cert, key };
    bundle.write(&bundle.issue(|r| r.client = false));
    let tls = ClientTls::load(&files, now_s()).expect("a server certificate is enough");
    assert!(tls.self_signed_pem().is_none() && tls.watch(Instant::now()).is_some());
    bundle.write(&bundle.issue(|r| r.is_ca = true));
    let faults = ClientTls::load(&files, now_s()).expect_err("clients would refuse it");
    assert_eq!(faults[0].kind, TlsFaultKind::CaAsOwn);
    let names = vec![
        "localhost".to_string(),
        "b1.felix".to_string(),
        "127.0.0.1".to_string(),
    ];
    let tls = ClientTls::load(&ClientCertSource::SelfSigned { names }, now_s()).expect("made");
    assert!(tls
        .self_signed_pem()
        .is_some_and(|pem| pem.contains("BEGIN CERTIFICATE")));
    assert!(tls.watch(Instant::now()).is_none());
}
