//! Certificates of brokers: refused ones are named on both sides and not dialled in a loop, and
//! those that can never work are named before anything is started.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use felix_uring::tls::{DevCa, IssueRequest, IssuedCert};
use felix_uring::wire::client::RetryClass;
use time::OffsetDateTime;

use crate::support::brokers::{scratch, small, Brokers, FIRST, SECOND};
use crate::support::client::{refusal, Client};
use crate::support::command::{felix, run, Ran};
use crate::support::owner::ScriptedOwner;
use crate::support::transport::Identity;
use crate::support::SOON;

fn read_ca(brokers: &Brokers) -> DevCa {
    let read = |path: PathBuf| std::fs::read_to_string(path).expect("a file of the authority");
    let cert = read(brokers.cluster.ca().to_path_buf());
    let key = read(brokers.cluster.dir().join("ca-key.pem"));
    DevCa::from_pem(&cert, &key).expect("the authority")
}

fn request(name: &str) -> IssueRequest {
    // Longer than the time before its end in which a certificate is warned of.
    IssueRequest::for_broker(&[name.to_string()], 90)
}

fn expired(name: &str) -> IssueRequest {
    let now = OffsetDateTime::now_utc();
    IssueRequest {
        not_before: now - time::Duration::days(30),
        not_after: now - time::Duration::days(1),
        ..request(name)
    }
}

fn issue(ca: &DevCa, request: &IssueRequest) -> IssuedCert {
    ca.issue(request).expect("a certificate")
}

fn identity(issued: &IssuedCert) -> Identity {
    Identity {
        cert_pem: issued.cert_pem.clone(),
        key_pem: issued.key_pem.clone(),
    }
}

/// An owner, played by the test, whose certificate the ingress broker must not accept.
async fn assert_owner_is_refused(
    brokers: &Brokers,
    owner: ScriptedOwner,
    reason: &str,
    words: &str,
    most: u64,
) {
    let token = brokers.token();
    let client = Client::connect(brokers, 0).await;
    let mut stream = client.stream(&token).await;
    let started = Instant::now();
    let mut asked = 0;
    while started.elapsed() < Duration::from_secs(3) {
        // Surely not sent, so it may be tried again.
        let said = refusal(stream.publish(SECOND, b"x").await);
        assert_eq!(said, ("shard_unavailable".to_string(), RetryClass::Retry));
        stream.must_publish(FIRST, b"local").await;
        asked += 1;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let attempts = owner.attempts.load(std::sync::atomic::Ordering::Relaxed);
    assert!(
        attempts <= most,
        "{attempts} handshakes for {asked} publishes in 3 s"
    );
    let failed = format!("felix_handshakes_failed_total{{reason=\"{reason}\"}}");
    brokers.wait_metric(0, &failed, 1.0);
    let log = brokers.log(0);
    assert!(log.contains(words), "{log}");
}

fn ingress() -> Brokers {
    let mut brokers = Brokers::prepare_with(2, |_| {});
    brokers.start_node(0);
    brokers
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_with_an_expired_certificate_is_refused() {
    let brokers = ingress();
    let identity = identity(&issue(&read_ca(&brokers), &expired("node-2")));
    let owner = ScriptedOwner::start_as(&brokers, 1, &identity, "node-2");
    assert_owner_is_refused(&brokers, owner, "peer_tls", "peer link refused", 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_of_another_authority_is_refused() {
    let brokers = ingress();
    let foreign = DevCa::generate("another authority").expect("an authority");
    let identity = identity(&issue(&foreign, &request("node-2")));
    let owner = ScriptedOwner::start_as(&brokers, 1, &identity, "node-2");
    assert_owner_is_refused(&brokers, owner, "peer_tls", "peer link refused", 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_with_another_node_s_certificate_is_refused() {
    let brokers = ingress();
    let identity = identity(&issue(&read_ca(&brokers), &request("node-3")));
    let owner = ScriptedOwner::start_as(&brokers, 1, &identity, "node-2");
    assert_owner_is_refused(&brokers, owner, "peer_tls", "peer link refused", 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_that_greets_as_another_node_is_refused() {
    let brokers = ingress();
    let identity = brokers.peer_identity(1);
    let owner = ScriptedOwner::start_as(&brokers, 1, &identity, "node-3");
    let words = "peer link refused";
    assert_owner_is_refused(&brokers, owner, "hello_wrong_node", words, 2).await;
    // The address stays unusable until the catalog names another one, which is then used at once.
    let (mut right, addr) = ScriptedOwner::start_anywhere(&brokers, &identity, "node-2");
    brokers.set_internal_addr("node-2", addr);
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.stream(&token).await;
    let answering = async { right.next().await.stored_at(9).await };
    let (taken, ()) = tokio::join!(stream.publish_until_taken(SECOND, SOON), answering);
    assert!(taken.0 < SOON);
}

/// Runs node 0 with a peer certificate that node 1 refuses; a start does not check dates of an
/// authority it does not know, so the certificate is swapped in after the configuration check of
/// a cluster that trusts two authorities.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_whose_own_certificate_is_refused_says_so() {
    let foreign = DevCa::generate("another authority").expect("an authority");
    let mut brokers = Brokers::prepare_with(3, |_| {});
    // Node 1 is of another authority, and trusts both; nobody trusts it.
    let both = brokers.cluster.dir().join("both.pem");
    let ours = std::fs::read_to_string(brokers.cluster.ca()).expect("the CA");
    std::fs::write(&both, format!("{}{ours}", foreign.cert_pem())).expect("a file");
    let issued = issue(&foreign, &request("node-1"));
    std::fs::write(brokers.file(0, "peer-cert.pem"), &issued.cert_pem).expect("a file");
    std::fs::write(brokers.file(0, "peer-key.pem"), &issued.key_pem).expect("a file");
    let mut first = StandIn::start(&brokers, 0, &both);
    brokers.start_node(1);
    brokers.start_node(2);
    first.wait_ready(&brokers);

    // Another broker's link to the refusing one is up before, and stays.
    let token = brokers.token();
    let third = Client::connect(&brokers, 2).await;
    let mut healthy = third.stream(&token).await;
    healthy.must_publish(SECOND, b"healthy").await;

    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.stream(&token).await;
    let started = Instant::now();
    while started.elapsed() < Duration::from_secs(4) {
        let said = refusal(stream.publish(SECOND, b"x").await);
        assert_eq!(said, ("shard_unavailable".to_string(), RetryClass::Retry));
        healthy.must_publish(SECOND, b"healthy").await;
        let status = brokers
            .cluster
            .node(0)
            .status()
            .unwrap_or_else(|e| panic!("{e}"));
        let peers = status["peers"].as_array().expect("peers").clone();
        assert!(peers.iter().all(|peer| peer["state"] != "up"), "{status}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let reason = "felix_handshakes_failed_total{reason=\"peer_tls\"}";
    for node in [0, 1] {
        let failed = brokers.metric(node, reason);
        assert!(
            (1.0..=3.0).contains(&failed),
            "{failed} attempts at node {node}"
        );
    }
    let opened = "felix_connections_opened_total{role=\"peer_listener\"}";
    assert_eq!(
        brokers.metric(1, opened),
        1.0,
        "the healthy link was made again"
    );
    let ours = first.log();
    assert!(
        ours.contains("peer link refused") && ours.contains("node-2"),
        "{ours}"
    );
    let theirs = brokers.log(1);
    assert!(theirs.contains("refused a peer's certificate"), "{theirs}");
    assert!(theirs.contains("127.0.0.1:"), "{theirs}");
    first.stop();
}

/// A broker started beside the launcher, with a CA file of its own.
struct StandIn {
    child: std::process::Child,
    log: PathBuf,
}

impl StandIn {
    fn start(brokers: &Brokers, index: usize, ca: &Path) -> Self {
        let node = brokers.cluster.node(index);
        let log = brokers.file(index, "stand-in.log");
        let out = std::fs::File::create(&log).expect("a log");
        let mut args = small();
        args.insert(0, "serve".into());
        args.extend([
            format!("--node-id={}", node.node_id()),
            format!("--data-dir={}", node.data_dir().display()),
            format!("--catalog={}", brokers.cluster.catalog().display()),
            format!("--client-listen={}", node.client_addr()),
            format!("--internal-listen={}", node.internal_addr()),
            format!("--admin-listen={}", node.admin_addr()),
            format!(
                "--client-cert={}",
                brokers.file(index, "client-cert.pem").display()
            ),
            format!(
                "--client-key={}",
                brokers.file(index, "client-key.pem").display()
            ),
            format!(
                "--internal-tls-cert={}",
                brokers.file(index, "peer-cert.pem").display()
            ),
            format!(
                "--internal-tls-key={}",
                brokers.file(index, "peer-key.pem").display()
            ),
            format!("--internal-tls-ca={}", ca.display()),
            "--segment-bytes=12582912".into(),
        ]);
        let child = felix(&args)
            .stdout(out.try_clone().expect("a log"))
            .stderr(out)
            .spawn()
            .expect("the program starts");
        Self { child, log }
    }

    fn wait_ready(&mut self, brokers: &Brokers) {
        let addr = brokers.cluster.node(0).admin_addr();
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let answer = felix_uring::admin::get(addr, "/ready", Duration::from_secs(5));
            if answer.is_ok_and(|answer| answer.status == 200) {
                return;
            }
            assert!(Instant::now() < deadline, "not ready: {}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    fn stop(&mut self) {
        self.child.kill().expect("a child of ours");
        self.child.wait().expect("a child of ours");
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        // Already reaped after `stop`.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What a configuration check, and a start, say about three files.
struct Bundle {
    dir: tempfile::TempDir,
    brokers: Brokers,
}

impl Bundle {
    fn new(cert: &str, key: &str, ca: &str) -> Self {
        let dir = scratch();
        for (name, text) in [("cert.pem", cert), ("key.pem", key), ("ca.pem", ca)] {
            std::fs::write(dir.path().join(name), text).expect("a file");
        }
        let brokers = Brokers::prepare_with(1, |_| {});
        Self { dir, brokers }
    }

    fn serve(&self, more: &[&str]) -> Ran {
        let node = self.brokers.cluster.node(0);
        let file = |name: &str| self.dir.path().join(name).display().to_string();
        let mut args: Vec<String> = vec!["serve".into()];
        args.extend([
            "--node-id=node-1".to_string(),
            format!("--data-dir={}", self.dir.path().join("data").display()),
            format!("--catalog={}", self.brokers.cluster.catalog().display()),
            format!("--client-listen={}", node.client_addr()),
            format!("--internal-listen={}", node.internal_addr()),
            format!("--admin-listen={}", node.admin_addr()),
            format!("--internal-tls-cert={}", file("cert.pem")),
            format!("--internal-tls-key={}", file("key.pem")),
            format!("--internal-tls-ca={}", file("ca.pem")),
        ]);
        args.extend(more.iter().map(|more| more.to_string()));
        run(&mut felix(&args), Duration::from_secs(10))
    }

    /// Both the check and the start must name the file and the remedy, and touch nothing.
    fn assert_named(&self, what: &str, file: &str, words: &[&str]) {
        for more in [&["--check-config"][..], &[]] {
            let ran = self.serve(more);
            assert_eq!(ran.code(), 2, "{what}: {ran:?}");
            let text = ran.text();
            assert!(text.contains(file), "{what}: no {file} in {text}");
            let lower = text.to_lowercase();
            for word in words {
                assert!(lower.contains(word), "{what}: no {word:?} in {text}");
            }
            assert!(!text.contains("PRIVATE KEY"), "{what}: {text}");
            let secret = std::fs::read_to_string(self.dir.path().join("key.pem"));
            for line in secret.unwrap_or_default().lines().filter(|l| l.len() > 20) {
                assert!(!text.contains(line), "{what}: the key is shown");
            }
            assert!(
                !self.dir.path().join("data").exists(),
                "{what}: data was touched"
            );
        }
    }
}

#[test]
fn bundles_that_can_never_work_are_named() {
    let ca = DevCa::generate("test authority").expect("an authority");
    let good = issue(&ca, &request("node-1"));
    let other = issue(&ca, &request("node-1"));
    let soon = IssueRequest {
        not_after: OffsetDateTime::now_utc() + time::Duration::days(3),
        ..request("node-1")
    };
    let future = IssueRequest {
        not_before: OffsetDateTime::now_utc() + time::Duration::days(3),
        ..request("node-1")
    };
    let nameless = IssueRequest {
        names: vec![],
        common_name: "node-1".into(),
        ..request("node-1")
    };
    let authority = IssueRequest {
        is_ca: true,
        ..request("node-1")
    };
    let no_client = IssueRequest {
        client: false,
        ..request("node-1")
    };
    let no_server = IssueRequest {
        server: false,
        ..request("node-1")
    };
    let foreign = DevCa::generate("another authority").expect("an authority");
    let foreign = issue(&foreign, &request("node-1"));

    let fine = Bundle::new(&good.cert_pem, &good.key_pem, ca.cert_pem()).serve(&["--check-config"]);
    assert_eq!(fine.code(), 0, "{fine:?}");
    assert!(!fine.text().contains("warning"), "{fine:?}");
    let soon = issue(&ca, &soon);
    let ran = Bundle::new(&soon.cert_pem, &soon.key_pem, ca.cert_pem()).serve(&["--check-config"]);
    assert_eq!(ran.code(), 0, "{ran:?}");
    assert!(
        ran.text().contains("warning") && ran.text().contains("cert.pem"),
        "{ran:?}"
    );

    let of = |request: &IssueRequest| {
        let issued = issue(&ca, request);
        Bundle::new(&issued.cert_pem, &issued.key_pem, ca.cert_pem())
    };
    Bundle::new(&good.cert_pem, &other.key_pem, ca.cert_pem()).assert_named(
        "another certificate's key",
        "key.pem",
        &["match"],
    );
    of(&nameless).assert_named("no DNS name", "cert.pem", &["node-1"]);
    of(&request("node-2")).assert_named("another name", "cert.pem", &["node-1"]);
    of(&authority).assert_named("an authority's", "cert.pem", &["authority"]);
    of(&no_client).assert_named("no client usage", "cert.pem", &["client"]);
    of(&no_server).assert_named("no server usage", "cert.pem", &["server"]);
    of(&expired("node-1")).assert_named("expired", "cert.pem", &["expired"]);
    of(&future).assert_named("not yet valid", "cert.pem", &["valid"]);
    Bundle::new(&foreign.cert_pem, &foreign.key_pem, ca.cert_pem()).assert_named(
        "a foreign authority's",
        "cert.pem",
        &["ca.pem"],
    );
    Bundle::new("", &good.key_pem, ca.cert_pem()).assert_named("empty", "cert.pem", &["cert"]);
    let missing = Bundle::new(&good.cert_pem, &good.key_pem, ca.cert_pem());
    std::fs::remove_file(missing.dir.path().join("key.pem")).expect("a file");
    missing.assert_named("missing", "key.pem", &["key"]);
}
