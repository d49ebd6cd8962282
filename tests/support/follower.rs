//! A scripted follower: a peer that knows the replication messages from the golden vectors alone.
//!
//! It takes requests apart byte by byte and answers with the vectors' own frames, correlation id
//! and offset put in; no codec of the broker is involved. What is answered, and when, the test
//! says.

use std::path::Path;
use std::sync::{Arc, Mutex};

use serde_json::Value;
use tokio::sync::mpsc;

use super::brokers::Brokers;
use super::transport::listen_as_peer;
use super::{within, SOON};

/// Kinds as they are numbered on the wire.
pub const HELLO: u16 = 5;
pub const RECORDS: u16 = 7;
pub const BOOTSTRAP: u16 = 10;
pub const CURSOR_RECORDS: u16 = 16;
pub const LETTER_RECORDS: u16 = 18;
pub const REBUILD: u16 = 24;

/// Codes as they are numbered on the wire.
pub const STALE_ROUTE: u16 = 1;
pub const MALFORMED: u16 = 6;
pub const LOG_GAP: u16 = 8;
pub const LOG_CONFLICT: u16 = 9;
pub const FENCED_EPOCH: u16 = 10;

/// The listener.
pub struct ScriptedFollower {
    requests: mpsc::UnboundedReceiver<Shipped>,
    connections: Arc<Mutex<Vec<quinn::Connection>>>,
    _endpoint: quinn::Endpoint,
}

/// A replication request, taken apart.
pub struct Shipped {
    pub kind: u16,
    pub stream: String,
    pub generation: u64,
    /// First offset of records, base of a bootstrap or rebuild.
    pub offset: u64,
    pub payloads: Vec<Vec<u8>>,
    /// Which of the connection's streams it came on.
    pub lane: u64,
    correlation: u64,
    send: Arc<tokio::sync::Mutex<quinn::SendStream>>,
}

impl ScriptedFollower {
    /// Listens where the catalog says node `index` is, with that node's certificate.
    pub fn start(brokers: &Brokers, index: usize) -> Self {
        let identity = brokers.peer_identity(index);
        let addr = brokers.cluster.node(index).internal_addr();
        let endpoint = listen_as_peer(addr, &identity, brokers.cluster.ca());
        let (sender, requests) = mpsc::unbounded_channel();
        let connections: Arc<Mutex<Vec<quinn::Connection>>> = Arc::default();
        let follower = Self {
            requests,
            connections: connections.clone(),
            _endpoint: endpoint.clone(),
        };
        let name = format!("node-{}", index + 1);
        tokio::spawn(async move {
            while let Some(incoming) = endpoint.accept().await {
                let (sender, name) = (sender.clone(), name.clone());
                let connections = connections.clone();
                tokio::spawn(async move {
                    let Ok(conn) = incoming.await else { return };
                    connections.lock().expect("no panic").push(conn.clone());
                    while let Ok((send, recv)) = conn.accept_bi().await {
                        tokio::spawn(serve(send, recv, sender.clone(), name.clone()));
                    }
                });
            }
        });
        follower
    }

    /// The next request for the stream of that name.
    pub async fn next(&mut self) -> Shipped {
        let next = within(SOON, "a replication request", self.requests.recv());
        next.await.expect("the listener lives")
    }

    /// The next request of that kind; probes of companion logs before it are answered as level.
    pub async fn next_of(&mut self, kind: u16) -> Shipped {
        loop {
            let shipped = self.next().await;
            if shipped.kind == kind {
                return shipped;
            }
            let is_companion = [CURSOR_RECORDS, LETTER_RECORDS].contains(&shipped.kind);
            assert!(
                is_companion && shipped.payloads.is_empty(),
                "kind {} at {} instead of {kind}",
                shipped.kind,
                shipped.offset
            );
            shipped.ok(shipped.offset).await;
        }
    }

    /// A request that may or may not have come.
    pub fn try_next(&mut self) -> Option<Shipped> {
        self.requests.try_recv().ok()
    }

    /// Closes every connection at once.
    pub fn close_connections(&self) {
        for conn in self.connections.lock().expect("no panic").drain(..) {
            conn.close(0u32.into(), b"scripted");
        }
    }
}

impl Shipped {
    /// Everything below `durable` is held.
    pub async fn ok(&self, durable: u64) {
        let mut frame = golden("k08-random");
        frame[20..28].copy_from_slice(&durable.to_be_bytes());
        self.answer(frame).await;
    }

    /// Refuses.
    pub async fn refuse(&self, code: u16, expected: u64) {
        let mut frame = golden("k09-typical");
        frame[20..22].copy_from_slice(&code.to_be_bytes());
        frame[22..30].copy_from_slice(&expected.to_be_bytes());
        self.answer(frame).await;
    }

    async fn answer(&self, mut frame: Vec<u8>) {
        frame[12..20].copy_from_slice(&self.correlation.to_be_bytes());
        // The leader may have given up on the connection; that is for the test to see.
        let _ = self.send.lock().await.write_all(&frame).await;
    }
}

/// The bytes of a vector.
fn golden(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/internal-valid.jsonl");
    let text = std::fs::read_to_string(path).expect("the vectors");
    let found = text
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).expect("a vector is JSON"))
        .find(|vector| vector["name"] == name)
        .unwrap_or_else(|| panic!("no vector {name}"));
    let hex = found["frame_hex"].as_str().expect("a frame");
    (0..hex.len() / 2)
        .map(|at| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).expect("hex"))
        .collect()
}

async fn serve(
    send: quinn::SendStream,
    mut recv: quinn::RecvStream,
    sender: mpsc::UnboundedSender<Shipped>,
    name: String,
) {
    let lane = recv.id().index();
    let send = Arc::new(tokio::sync::Mutex::new(send));
    loop {
        let mut header = [0; 12];
        if recv.read_exact(&mut header).await.is_err() {
            return;
        }
        assert_eq!(&header[..6], b"FLXI\x00\x01", "magic and version");
        let kind = u16::from_be_bytes([header[6], header[7]]);
        let length = u32::from_be_bytes([header[8], header[9], header[10], header[11]]);
        let mut body = vec![0; length as usize];
        if recv.read_exact(&mut body).await.is_err() {
            return;
        }
        let mut rest = Cursor(&body);
        let correlation = rest.u64();
        if kind == HELLO {
            let mut ok = b"FLXI\x00\x01\x00\x06".to_vec();
            ok.extend((12 + name.len() as u32).to_be_bytes());
            ok.extend(correlation.to_be_bytes());
            ok.extend((name.len() as u32).to_be_bytes());
            ok.extend(name.as_bytes());
            let _ = send.lock().await.write_all(&ok).await;
            continue;
        }
        let shipped = take_apart(kind, correlation, lane, rest, send.clone());
        if sender.send(shipped).is_err() {
            return;
        }
    }
}

fn take_apart(
    kind: u16,
    correlation: u64,
    lane: u64,
    mut rest: Cursor<'_>,
    send: Arc<tokio::sync::Mutex<quinn::SendStream>>,
) -> Shipped {
    let (_tenant, _namespace, stream) = (rest.text(), rest.text(), rest.text());
    let _shard = rest.u32();
    let generation = rest.u64();
    let mut payloads = Vec::new();
    let offset = match kind {
        RECORDS | 14 | CURSOR_RECORDS | LETTER_RECORDS | 20 => {
            let first = rest.u64();
            let checksum = rest.u64();
            let mut crc = crc32fast::Hasher::new();
            for _ in 0..rest.u32() {
                let length = rest.u32();
                let payload = rest.take(length as usize).to_vec();
                crc.update(&length.to_be_bytes());
                crc.update(&payload);
                payloads.push(payload);
            }
            assert_eq!(checksum, u64::from(crc.finalize()), "the batch checksum");
            first
        }
        REBUILD => {
            assert!((1..=5).contains(&rest.take(1)[0]), "a log");
            rest.u64()
        }
        BOOTSTRAP | 15 | 17 | 19 | 21 => rest.u64(),
        other => panic!("not a replication request: kind {other}"),
    };
    assert!(rest.0.is_empty(), "bytes behind the last field");
    Shipped {
        kind,
        stream,
        generation,
        offset,
        payloads,
        lane,
        correlation,
        send,
    }
}

struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    fn take(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count);
        self.0 = rest;
        taken
    }

    fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.take(4).try_into().expect("four bytes"))
    }

    fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.take(8).try_into().expect("eight bytes"))
    }

    fn text(&mut self) -> String {
        let length = self.u32() as usize;
        String::from_utf8(self.take(length).to_vec()).expect("UTF-8")
    }
}
