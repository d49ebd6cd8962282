//! Caches and counters of real brokers: at the owner, through another broker, over restarts.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use felix_uring::cluster::{BrokerProgram, Cluster, ClusterSpec, ShardedSpec, NAMESPACE, TENANT};
use felix_uring::tls::{crypto_provider, CLIENT_ALPN};
use felix_uring::wire::client::messages::{
    Auth, CacheDelete, CacheGet, CachePut, CounterAdd, CounterGet,
};
use felix_uring::wire::client::{
    encode_message, Answer, Blob, FrameReader, ReadEvent, ReadLimits, RetryClass, ToClient,
};
use quinn::crypto::rustls::QuicClientConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::CertificateDer;
use rustls::RootCertStore;
use tempfile::TempDir;

/// One shard, led by node 0: node 1 forwards everything.
const CACHE: &str = "first";
/// Eight shards over both nodes and both of their cores.
const WIDE: &str = "wide";
const SOON: Duration = Duration::from_secs(20);

struct Brokers {
    cluster: Cluster,
    _dir: TempDir,
}

impl Brokers {
    fn start(cores: usize) -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
        let program = BrokerProgram::serve_of(env!("CARGO_BIN_EXE_felix-uring"));
        let mut spec = ClusterSpec::new(dir.path(), 2, program);
        spec.cores_per_node = cores;
        spec.extra_args = ["--prewritten-segments=1", "--reserve-bytes=0"]
            .map(String::from)
            .to_vec();
        spec.env = vec![("FELIX_SEGMENT_BYTES".into(), "4194304".into())];
        spec.caches = vec![
            ShardedSpec::new(CACHE, 1).led_by(&[0]),
            ShardedSpec::new(WIDE, 8).led_by(&[0, 1, 0, 1, 0, 1, 0, 1]),
        ];
        let cluster = Cluster::start(&spec).unwrap_or_else(|e| panic!("{e}"));
        Self { cluster, _dir: dir }
    }

    /// A power cut of the process: nothing is flushed that was not flushed before.
    fn kill_and_restart(&mut self, node: usize) {
        let node = self.cluster.node_mut(node);
        node.kill().unwrap_or_else(|e| panic!("{e}"));
        node.start().unwrap_or_else(|e| panic!("{e}"));
        node.wait_ready().unwrap_or_else(|e| panic!("{e}"));
    }

    fn metric(&self, node: usize, name: &str) -> f64 {
        let text = self.cluster.node(node).metrics().expect("metrics");
        let values = text.lines().filter_map(|line| {
            let rest = line.strip_prefix(name)?;
            let is_whole = rest.starts_with(' ') || rest.starts_with('{');
            is_whole.then(|| rest.rsplit(' ').next()?.parse::<f64>().ok())?
        });
        values.sum()
    }

    fn token(&self) -> String {
        let token = self.cluster.token(Duration::from_secs(3600));
        token.unwrap_or_else(|e| panic!("{e}"))
    }

    fn token_with(&self, perms: &[&str]) -> String {
        let perms = perms.iter().map(|perm| perm.to_string()).collect();
        let token = self.cluster.token_with(perms, Duration::from_secs(3600));
        token.unwrap_or_else(|e| panic!("{e}"))
    }

    async fn client(&self, node: usize) -> Client {
        self.client_of(node, &self.token()).await
    }

    async fn client_of(&self, node: usize, token: &str) -> Client {
        let addr = self.cluster.node(node).client_addr();
        let ca: PathBuf = self.cluster.ca().to_owned();
        Client::connect(addr, ca, token).await
    }
}

/// One authenticated stream of one connection.
struct Client {
    _endpoint: quinn::Endpoint,
    _conn: quinn::Connection,
    send: quinn::SendStream,
    recv: quinn::RecvStream,
    reader: FrameReader,
    next_request: u64,
    cache: &'static str,
}

/// A refusal's code and class.
type Refused = (String, RetryClass);

impl Client {
    async fn connect(addr: std::net::SocketAddr, ca: PathBuf, token: &str) -> Self {
        let mut roots = RootCertStore::empty();
        for cert in CertificateDer::pem_file_iter(ca).expect("the CA file") {
            roots.add(cert.expect("a certificate")).expect("a root");
        }
        let mut tls = rustls::ClientConfig::builder_with_provider(crypto_provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("TLS 1.3")
            .with_root_certificates(roots)
            .with_no_client_auth();
        tls.alpn_protocols = vec![CLIENT_ALPN.to_vec()];
        let quic = QuicClientConfig::try_from(tls).expect("a QUIC configuration");
        let mut endpoint =
            quinn::Endpoint::client((Ipv4Addr::LOCALHOST, 0).into()).expect("a socket");
        endpoint.set_default_client_config(quinn::ClientConfig::new(Arc::new(quic)));
        let connecting = endpoint.connect(addr, "localhost").expect("a name");
        let conn = within("a connection", connecting).await.expect("connected");
        let (send, recv) = conn.open_bi().await.expect("a stream");
        let mut client = Self {
            _endpoint: endpoint,
            _conn: conn,
            send,
            recv,
            reader: FrameReader::new(ReadLimits::AUTHENTICATED),
            next_request: 1,
            cache: CACHE,
        };
        let auth = Auth {
            tenant_id: TENANT.into(),
            token: token.into(),
            client_flags: Some(0x1fff),
            client_features: Some(u32::MAX),
            client_features_hi: Some(0xf),
        };
        client.write(encode_message(&auth).expect("a frame")).await;
        match client.answer().await {
            Answer::AuthOk(_) => client,
            other => panic!("not authenticated: {other:?}"),
        }
    }

    async fn write(&mut self, frame: Bytes) {
        self.send.write_all(&frame).await.expect("written");
    }

    async fn answer(&mut self) -> Answer {
        loop {
            if let Some(event) = self.reader.next() {
                let ReadEvent::Frame(frame) = event else {
                    panic!("the broker sent {event:?}");
                };
                match ToClient::decode(frame).expect("a frame of the protocol") {
                    ToClient::Answer(answer) => return answer,
                    other => panic!("not an answer: {other:?}"),
                }
            }
            let chunk = within("an answer", self.recv.read_chunk(1 << 20, true)).await;
            let chunk = chunk.expect("the connection holds").expect("not the end");
            self.reader.push(chunk.bytes);
        }
    }

    fn id(&mut self) -> u64 {
        self.next_request += 1;
        self.next_request
    }

    async fn start_put(&mut self, key: &str, value: &[u8], ttl_ms: Option<u64>) -> u64 {
        let request_id = self.id();
        let put = CachePut {
            tenant_id: TENANT.into(),
            namespace: NAMESPACE.into(),
            cache: self.cache.into(),
            key: key.into(),
            value: Blob(Bytes::copy_from_slice(value)),
            request_id: Some(request_id),
            ttl_ms,
        };
        self.write(encode_message(&put).expect("a frame")).await;
        request_id
    }

    async fn put_for(&mut self, key: &str, value: &[u8], ttl: Option<u64>) -> Result<(), Refused> {
        let id = self.start_put(key, value, ttl).await;
        match self.answer().await {
            Answer::CacheOk(ok) => {
                assert_eq!(ok.request_id, id);
                Ok(())
            }
            other => Err(refusal(other)),
        }
    }

    async fn put(&mut self, key: &str, value: &[u8]) {
        self.put_for(key, value, None).await.expect("a put");
    }

    /// The value of an answer that must repeat what was asked.
    fn value(&self, answer: Answer, key: &str, id: u64) -> Result<Option<Vec<u8>>, Refused> {
        match answer {
            Answer::CacheValue(value) => {
                assert_eq!(value.request_id, Some(id));
                let scope = (&*value.tenant_id, &*value.namespace, &*value.cache);
                assert_eq!(scope, (TENANT, NAMESPACE, self.cache));
                assert_eq!(value.key, key);
                Ok(value.value.map(|blob| blob.0.to_vec()))
            }
            other => Err(refusal(other)),
        }
    }

    async fn try_get(&mut self, key: &str) -> Result<Option<Vec<u8>>, Refused> {
        let id = self.id();
        let get = CacheGet {
            tenant_id: TENANT.into(),
            namespace: NAMESPACE.into(),
            cache: self.cache.into(),
            key: key.into(),
            request_id: Some(id),
        };
        self.write(encode_message(&get).expect("a frame")).await;
        let answer = self.answer().await;
        self.value(answer, key, id)
    }

    async fn get(&mut self, key: &str) -> Option<Vec<u8>> {
        self.try_get(key).await.expect("a get")
    }

    async fn try_delete(&mut self, key: &str) -> Result<Option<Vec<u8>>, Refused> {
        let id = self.id();
        let delete = CacheDelete {
            tenant_id: TENANT.into(),
            namespace: NAMESPACE.into(),
            cache: self.cache.into(),
            key: key.into(),
            request_id: Some(id),
        };
        self.write(encode_message(&delete).expect("a frame")).await;
        let answer = self.answer().await;
        self.value(answer, key, id)
    }

    async fn delete(&mut self, key: &str) -> Option<Vec<u8>> {
        self.try_delete(key).await.expect("a delete")
    }

    async fn try_add(&mut self, key: &str, delta: i64) -> Result<i64, Refused> {
        let request_id = self.id();
        let add = CounterAdd {
            tenant_id: TENANT.into(),
            namespace: NAMESPACE.into(),
            cache: self.cache.into(),
            key: key.into(),
            delta,
            request_id,
        };
        self.write(encode_message(&add).expect("a frame")).await;
        match self.answer().await {
            Answer::CounterValue(sum) => {
                assert_eq!(sum.request_id, request_id);
                Ok(sum.value.expect("the sum of an add"))
            }
            other => Err(refusal(other)),
        }
    }

    async fn add(&mut self, key: &str, delta: i64) -> i64 {
        self.try_add(key, delta).await.expect("an add")
    }

    async fn sum(&mut self, key: &str) -> Option<i64> {
        let request_id = self.id();
        let get = CounterGet {
            tenant_id: TENANT.into(),
            namespace: NAMESPACE.into(),
            cache: self.cache.into(),
            key: key.into(),
            request_id,
        };
        self.write(encode_message(&get).expect("a frame")).await;
        match self.answer().await {
            Answer::CounterValue(sum) => {
                assert_eq!(sum.request_id, request_id);
                sum.value
            }
            other => panic!("not a sum: {other:?}"),
        }
    }
}

fn refusal(answer: Answer) -> Refused {
    match answer {
        Answer::ErrorAnswer(error) => {
            let code = error.code.expect("a refusal has a code");
            (code.name().to_string(), error.retry.expect("and a class"))
        }
        other => panic!("neither an answer nor a refusal: {other:?}"),
    }
}

fn refused(code: &str, class: RetryClass) -> Refused {
    (code.to_string(), class)
}

async fn within<T>(what: &str, future: impl std::future::Future<Output = T>) -> T {
    match tokio::time::timeout(SOON, future).await {
        Ok(value) => value,
        Err(_) => panic!("{what} did not come within {SOON:?}"),
    }
}

#[tokio::test]
async fn the_owner_and_every_other_broker_answer_alike() {
    let brokers = Brokers::start(1);
    for node in [0, 1] {
        let mut client = brokers.client(node).await;
        assert_eq!(client.get("k").await, None);
        assert_eq!(client.delete("k").await, None);
        client.put("k", b"one").await;
        assert_eq!(client.get("k").await.as_deref(), Some(&b"one"[..]));
        // What one broker stored the other one finds.
        let mut other = brokers.client(1 - node).await;
        assert_eq!(other.get("k").await.as_deref(), Some(&b"one"[..]));
        other.put("k", b"").await;
        assert_eq!(
            client.get("k").await.as_deref(),
            Some(&b""[..]),
            "not a miss"
        );
        assert_eq!(client.delete("k").await.as_deref(), Some(&b""[..]));
        assert_eq!(other.get("k").await, None);
        // The empty key, and one that no broker can forward.
        client.put("", b"empty key").await;
        assert_eq!(other.delete("").await.as_deref(), Some(&b"empty key"[..]));

        let counter = format!("c{node}");
        assert_eq!(client.sum(&counter).await, None);
        assert_eq!(client.add(&counter, 5).await, 5);
        assert_eq!(other.add(&counter, -5).await, 0);
        assert_eq!(client.sum(&counter).await, Some(0), "zero is not never");
        assert_eq!(client.get(&counter).await, None, "a counter is no value");
    }
    let (forwarded, served) = (
        brokers.metric(1, "felix_forwards_acked_total"),
        brokers.metric(0, "felix_peer_requests_total"),
    );
    assert!(
        forwarded >= 10.0 && served >= forwarded,
        "{forwarded} {served}"
    );
}

#[tokio::test]
async fn refusals_say_what_happened_and_cost_nothing_else() {
    let brokers = Brokers::start(1);
    let long = "x".repeat(1024);
    let mut owner = brokers.client(0).await;
    owner.put(&long, b"long").await;
    assert_eq!(owner.get(&long).await.as_deref(), Some(&b"long"[..]));
    let mut other = brokers.client(1).await;
    let too_long = refused("limit_exceeded", RetryClass::Fatal);
    assert_eq!(
        other.put_for(&long, b"v", None).await,
        Err(too_long.clone())
    );
    assert_eq!(other.try_get(&long).await, Err(too_long), "never a miss");
    for client in [&mut owner, &mut other] {
        let invalid = Err(refused("invalid_request", RetryClass::Fatal));
        assert_eq!(client.put_for("zero", b"v", Some(0)).await, invalid);
        assert_eq!(client.get("zero").await, None);
    }
    // An overflow writes nothing and leaves the link between the brokers as it was.
    assert_eq!(owner.add("full", i64::MAX).await, i64::MAX);
    let closed = brokers.metric(1, "felix_connections_closed_total");
    for client in [&mut owner, &mut other] {
        let invalid = Err(refused("invalid_request", RetryClass::Fatal));
        assert_eq!(client.try_add("full", 1).await, invalid);
        assert_eq!(client.sum("full").await, Some(i64::MAX));
        assert_eq!(client.add("full", 0).await, i64::MAX);
    }
    assert_eq!(brokers.metric(1, "felix_connections_closed_total"), closed);

    let forbidden = || Err(refused("forbidden", RetryClass::Fatal));
    for node in [0, 1] {
        let token = brokers.token_with(&["cache.read:cache:t1/*"]);
        let mut reader = brokers.client_of(node, &token).await;
        assert_eq!(reader.put_for("k", b"v", None).await, forbidden());
        assert_eq!(
            reader.try_add("k", 1).await.map(Some),
            forbidden().map(|()| None)
        );
        assert_eq!(reader.try_delete("k").await, forbidden().map(|()| None));
        assert_eq!(reader.get("k").await, None);
        let token = brokers.token_with(&["cache.write:cache:t1/*"]);
        let mut writer = brokers.client_of(node, &token).await;
        assert_eq!(writer.try_get("k").await, forbidden().map(|()| None));
        writer.cache = "no-such-cache";
        let missing = Err(refused("not_found", RetryClass::RetryAfter));
        assert_eq!(writer.put_for("k", b"v", None).await, missing);
    }
}

#[tokio::test]
async fn a_time_to_live_holds_from_every_broker_and_over_a_restart() {
    let mut brokers = Brokers::start(1);
    let mut other = brokers.client(1).await;
    other
        .put_for("short", b"v", Some(1_500))
        .await
        .expect("a put");
    other
        .put_for("max", b"m", Some(u64::MAX))
        .await
        .expect("a put");
    other
        .put_for("cleared", b"1", Some(500))
        .await
        .expect("a put");
    other.put("cleared", b"2").await;
    assert!(other.get("short").await.is_some());
    tokio::time::sleep(Duration::from_millis(1_600)).await;
    let mut owner = brokers.client(0).await;
    for client in [&mut owner, &mut other] {
        assert_eq!(client.get("short").await, None);
        assert_eq!(client.delete("short").await, None, "expired is not there");
        assert_eq!(client.get("max").await.as_deref(), Some(&b"m"[..]));
        assert_eq!(client.get("cleared").await.as_deref(), Some(&b"2"[..]));
    }
    brokers.kill_and_restart(0);
    let mut owner = brokers.client(0).await;
    assert_eq!(owner.get("short").await, None);
    assert_eq!(owner.get("max").await.as_deref(), Some(&b"m"[..]));
    // Its delete is written within seconds, and its memory is free.
    let deadline = std::time::Instant::now() + SOON;
    while brokers.metric(0, "felix_cache_keys") > 2.0 {
        assert!(std::time::Instant::now() < deadline, "an expired key stays");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test]
async fn every_answered_write_survives_a_kill_of_the_owner() {
    let mut brokers = Brokers::start(2);
    let mut clients = [brokers.client(0).await, brokers.client(1).await];
    let key = |n: usize| format!("key-{n}");
    for (at, client) in clients.iter_mut().enumerate() {
        client.cache = WIDE;
        // Many at once: answers come back as the owners have them, errors would show.
        let mut waiting = std::collections::BTreeSet::new();
        for n in (at * 100)..(at * 100 + 60) {
            waiting.insert(client.start_put(&key(n), key(n).as_bytes(), None).await);
        }
        while !waiting.is_empty() {
            match client.answer().await {
                Answer::CacheOk(ok) => assert!(waiting.remove(&ok.request_id)),
                other => panic!("not stored: {other:?}"),
            }
        }
        for n in (at * 100)..(at * 100 + 20) {
            assert_eq!(client.add(&key(n), n as i64 - 50).await, n as i64 - 50);
            assert_eq!(client.delete(&key(n)).await, Some(key(n).into_bytes()));
        }
    }
    drop(clients);
    for node in [0, 1] {
        brokers.kill_and_restart(node);
    }
    for node in [1, 0] {
        let mut client = brokers.client(node).await;
        client.cache = WIDE;
        for n in (0..60).chain(100..160) {
            let is_deleted = n % 100 < 20;
            let expected = (!is_deleted).then(|| key(n).into_bytes());
            // The link to the restarted broker may still be in its backoff.
            let got = loop {
                match client.try_get(&key(n)).await {
                    Ok(got) => break got,
                    Err((code, RetryClass::Retry)) if code == "shard_unavailable" => {
                        tokio::time::sleep(Duration::from_millis(100)).await;
                    }
                    Err(refused) => panic!("{refused:?}"),
                }
            };
            assert_eq!(got, expected, "{n} through node {node}");
            let sum = is_deleted.then_some(n as i64 - 50);
            assert_eq!(client.sum(&key(n)).await, sum, "{n} through node {node}");
        }
    }
    let mut client = brokers.client(0).await;
    client.cache = WIDE;
    assert_eq!(client.add(&key(0), 1).await, -49, "a sum goes on");
    assert!(brokers.metric(0, "felix_lane_messages_sent_total") > 0.0);
    assert!(brokers.metric(0, "felix_cache_loads_total") >= 1.0);
}

/// More than memory keeps: old values come from the log, for gets and for deletes.
#[tokio::test]
async fn values_that_left_memory_are_read_from_the_log() {
    let brokers = Brokers::start(1);
    let mut client = brokers.client(0).await;
    let value = |n: u8| vec![n; 1 << 20];
    for n in 0..72 {
        client.put(&format!("big-{n}"), &value(n)).await;
    }
    let held = brokers.metric(0, "felix_cache_value_bytes");
    assert!(
        held <= (64 << 20) as f64,
        "{held} bytes of values in memory"
    );
    assert_eq!(brokers.metric(0, "felix_cache_value_reads_total"), 0.0);
    let mut other = brokers.client(1).await;
    assert_eq!(client.get("big-0").await, Some(value(0)));
    assert_eq!(other.get("big-1").await, Some(value(1)));
    assert_eq!(client.delete("big-2").await, Some(value(2)));
    assert_eq!(client.get("big-2").await, None);
    assert_eq!(client.get("big-71").await, Some(value(71)));
    assert!(brokers.metric(0, "felix_cache_value_reads_total") >= 3.0);
    assert_eq!(client.get("big-0").await, Some(value(0)), "back in memory");
}
