//! A scripted peer that listens: plays the owner of a shard for a real ingress broker.
//!
//! It greets like a broker and hands every other request to the test, which decides what is
//! answered and when.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use felix_uring::ids::{CorrelationId, Generation, Offset};
use felix_uring::wire::internal::{
    decode_body, encode, CacheOk, CacheOp, CacheOpKind, ErrorCode, ForwardPublish, FrameReader,
    Hello, Message, NotLeader, ReadEvent, Refusal, ShardRef, Text,
};
use tokio::sync::mpsc;

use super::brokers::Brokers;
use super::transport::{listen_as_peer, Identity};
use super::{within, SOON};

/// The listener.
pub struct ScriptedOwner {
    requests: mpsc::UnboundedReceiver<Request>,
    cache_requests: mpsc::UnboundedReceiver<CacheRequest>,
    connections: Arc<Mutex<Vec<quinn::Connection>>>,
    /// Handshakes that got as far as a connection attempt.
    pub attempts: Arc<AtomicU64>,
    _endpoint: quinn::Endpoint,
}

/// A forwarded publish that waits for its answer.
pub struct Request {
    pub publish: ForwardPublish,
    /// The stream of the connection it came on.
    pub stream: quinn::StreamId,
    send: Arc<tokio::sync::Mutex<quinn::SendStream>>,
}

/// A forwarded cache operation that waits for its answer.
pub struct CacheRequest {
    pub op: CacheOp,
    send: Arc<tokio::sync::Mutex<quinn::SendStream>>,
}

/// Where requests go.
#[derive(Clone)]
struct Senders {
    publishes: mpsc::UnboundedSender<Request>,
    cache: mpsc::UnboundedSender<CacheRequest>,
}

impl ScriptedOwner {
    /// Listens where the catalog says node `index` is, with that node's certificate.
    pub fn start(brokers: &Brokers, index: usize) -> Self {
        let identity = brokers.peer_identity(index);
        Self::start_as(brokers, index, &identity, &format!("node-{}", index + 1))
    }

    /// The same with another certificate or another name in the greeting.
    pub fn start_as(brokers: &Brokers, index: usize, identity: &Identity, greets: &str) -> Self {
        let addr: SocketAddr = brokers.cluster.node(index).internal_addr();
        Self::listen(brokers, addr, identity, greets).0
    }

    /// Listens on a port of its own, which is given as well.
    pub fn start_anywhere(
        brokers: &Brokers,
        identity: &Identity,
        greets: &str,
    ) -> (Self, SocketAddr) {
        let anywhere = (std::net::Ipv4Addr::LOCALHOST, 0).into();
        Self::listen(brokers, anywhere, identity, greets)
    }

    fn listen(
        brokers: &Brokers,
        addr: SocketAddr,
        identity: &Identity,
        greets: &str,
    ) -> (Self, SocketAddr) {
        let endpoint = listen_as_peer(addr, identity, brokers.cluster.ca());
        let addr = endpoint.local_addr().expect("a bound socket");
        let (publishes, requests) = mpsc::unbounded_channel();
        let (cache, cache_requests) = mpsc::unbounded_channel();
        let sender = Senders { publishes, cache };
        let owner = Self {
            requests,
            cache_requests,
            connections: Arc::default(),
            attempts: Arc::default(),
            _endpoint: endpoint.clone(),
        };
        let (connections, attempts) = (owner.connections.clone(), owner.attempts.clone());
        let greets = greets.to_string();
        tokio::spawn(async move {
            while let Some(incoming) = endpoint.accept().await {
                attempts.fetch_add(1, Ordering::Relaxed);
                let (sender, greets) = (sender.clone(), greets.clone());
                let connections = connections.clone();
                tokio::spawn(async move {
                    let Ok(conn) = incoming.await else { return };
                    connections.lock().expect("no panic").push(conn.clone());
                    while let Ok((send, recv)) = conn.accept_bi().await {
                        let task = serve(send, recv, sender.clone(), greets.clone());
                        tokio::spawn(task);
                    }
                });
            }
        });
        (owner, addr)
    }

    /// The next forwarded publish.
    pub async fn next(&mut self) -> Request {
        let next = within(SOON, "a forwarded publish", self.requests.recv());
        next.await.expect("the listener lives")
    }

    /// A forwarded publish that may or may not have come.
    pub fn try_next(&mut self) -> Option<Request> {
        self.requests.try_recv().ok()
    }

    /// The next forwarded cache operation.
    pub async fn next_cache(&mut self) -> CacheRequest {
        let next = within(SOON, "a cache operation", self.cache_requests.recv());
        next.await.expect("the listener lives")
    }

    /// A cache operation that may or may not have come.
    pub fn try_next_cache(&mut self) -> Option<CacheRequest> {
        self.cache_requests.try_recv().ok()
    }

    /// The next forwarded request of either kind, however long it takes; none when the listener is gone.
    pub async fn next_or_end(&mut self) -> Option<Asked> {
        tokio::select! {
            request = self.requests.recv() => request.map(Asked::Publish),
            request = self.cache_requests.recv() => request.map(Asked::Cache),
        }
    }

    /// Closes every connection at once.
    pub fn close_connections(&self) {
        for conn in self.connections.lock().expect("no panic").drain(..) {
            conn.close(0u32.into(), b"scripted");
        }
    }
}

async fn serve(
    send: quinn::SendStream,
    mut recv: quinn::RecvStream,
    sender: Senders,
    greets: String,
) {
    let stream = send.id();
    let send = Arc::new(tokio::sync::Mutex::new(send));
    let mut reader = FrameReader::new();
    while let Ok(Some(chunk)) = recv.read_chunk(1 << 20, true).await {
        reader.push(chunk.bytes);
        for event in reader.by_ref() {
            let ReadEvent::Frame { kind, body } = event else {
                panic!("the broker sent {event:?}");
            };
            match decode_body(kind, body).expect("a readable request") {
                Message::Hello(hello) => {
                    let ok = Message::HelloOk(Hello {
                        correlation: hello.correlation,
                        node_id: Text::shortened(&greets),
                    });
                    let _ = send.lock().await.write_all(&bytes_of(&ok)).await;
                }
                Message::ForwardPublish(publish) => {
                    let request = Request {
                        publish,
                        stream,
                        send: send.clone(),
                    };
                    if sender.publishes.send(request).is_err() {
                        return;
                    }
                }
                Message::CacheOp(op) => {
                    let send = send.clone();
                    if sender.cache.send(CacheRequest { op, send }).is_err() {
                        return;
                    }
                }
                other => panic!("unexpected request {other:?}"),
            }
        }
    }
}

fn bytes_of(message: &Message) -> bytes::Bytes {
    encode(message).expect("a frame")
}

/// A forwarded request of either kind.
pub enum Asked {
    Publish(Request),
    Cache(CacheRequest),
}

impl Asked {
    /// The shard it names.
    pub fn shard(&self) -> &ShardRef {
        match self {
            Self::Publish(request) => &request.publish.shard,
            Self::Cache(request) => &request.op.shard,
        }
    }

    /// Whether the client's credential came along.
    pub fn has_credential(&self) -> bool {
        match self {
            Self::Publish(request) => request.publish.credential.is_some(),
            Self::Cache(request) => request.op.credential.is_some(),
        }
    }

    fn correlation(&self) -> CorrelationId {
        match self {
            Self::Publish(request) => request.correlation(),
            Self::Cache(request) => request.op.correlation,
        }
    }

    /// Writes any bytes on the stream it came on.
    pub async fn write(&self, bytes: impl AsRef<[u8]>) {
        let send = match self {
            Self::Publish(request) => &request.send,
            Self::Cache(request) => &request.send,
        };
        // The ingress broker may have given up on the connection; that is for the test to see.
        let _ = send.lock().await.write_all(bytes.as_ref()).await;
    }

    /// Answers as an owner that has done it: with offset 0, a value, or a sum of one.
    pub async fn done(&self) {
        match self {
            Self::Publish(request) => request.stored_at(0).await,
            Self::Cache(request) => {
                let value: Option<&'static [u8]> = match request.op.op {
                    CacheOpKind::Put => None,
                    CacheOpKind::Get | CacheOpKind::Delete => Some(b"value"),
                    CacheOpKind::CounterAdd | CacheOpKind::CounterGet => {
                        Some(&[0, 0, 0, 0, 0, 0, 0, 1])
                    }
                };
                request.done(value).await;
            }
        }
    }

    /// Refuses in the shape of the request.
    pub async fn refuse(&self, code: ErrorCode) {
        let refusal = Refusal {
            correlation: self.correlation(),
            code,
            detail: Text::shortened("scripted"),
        };
        let answer = match self {
            Self::Publish(_) => Message::ForwardPublishError(refusal),
            Self::Cache(_) => Message::CacheError(refusal),
        };
        self.write(bytes_of(&answer)).await;
    }

    /// Names another owner.
    pub async fn redirect(&self, node: &str, addr: SocketAddr, generation: u64) {
        self.write(redirect_of(self.correlation(), node, addr, generation))
            .await;
    }
}

fn redirect_of(
    correlation: CorrelationId,
    node: &str,
    addr: SocketAddr,
    generation: u64,
) -> bytes::Bytes {
    bytes_of(&Message::NotLeader(NotLeader {
        correlation,
        node_id: Text::shortened(node),
        advertise_addr: Text::shortened(&addr.to_string()),
        generation: Generation(generation),
    }))
}

impl CacheRequest {
    /// Answers with a value, or without one.
    pub async fn done(&self, value: Option<&'static [u8]>) {
        let answer = Message::CacheOk(CacheOk {
            correlation: self.op.correlation,
            value: value.map(bytes::Bytes::from_static),
        });
        // The ingress broker may have given up on the connection; that is for the test to see.
        let _ = self.send.lock().await.write_all(&bytes_of(&answer)).await;
    }
}

impl Request {
    /// The request's correlation id.
    pub fn correlation(&self) -> CorrelationId {
        self.publish.correlation
    }

    /// Writes any bytes on the stream the request came on.
    pub async fn write(&self, bytes: impl AsRef<[u8]>) {
        // The ingress broker may have given up on the connection; that is for the test to see.
        let _ = self.send.lock().await.write_all(bytes.as_ref()).await;
    }

    /// Answers that the batch was written from `first` on.
    pub async fn stored_at(&self, first: u64) {
        let count = self.publish.payloads.len() as u64;
        let answer = Message::ForwardPublishOk {
            correlation: self.correlation(),
            first_offset: Offset(first),
            last_offset: Offset(first + count - 1),
        };
        self.write(bytes_of(&answer)).await;
    }

    /// Refuses.
    pub async fn refuse(&self, code: ErrorCode) {
        let answer = Message::ForwardPublishError(Refusal {
            correlation: self.correlation(),
            code,
            detail: Text::shortened("scripted"),
        });
        self.write(bytes_of(&answer)).await;
    }

    /// Names another owner.
    pub async fn redirect(&self, node: &str, addr: SocketAddr, generation: u64) {
        self.write(redirect_of(self.correlation(), node, addr, generation))
            .await;
    }
}
