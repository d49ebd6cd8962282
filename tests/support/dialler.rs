//! A scripted peer that dials: sends any bytes to a broker's internal port.

use std::net::SocketAddr;

use bytes::Bytes;
use felix_uring::cluster::{NAMESPACE, TENANT};
use felix_uring::ids::{CorrelationId, Generation};
use felix_uring::tls::INTERNAL_ALPN;
use felix_uring::wire::internal::{
    decode_body, encode, AckMode, Credential, ErrorCode, ForwardPublish, FrameReader, Hello,
    Message, Payloads, ReadEvent, ShardRef, Text,
};

use super::brokers::Brokers;
use super::transport::{dial, Dial, Identity};
use super::{within, SOON};

/// A connection to an internal port.
pub struct PeerClient {
    pub conn: quinn::Connection,
    _endpoint: quinn::Endpoint,
}

impl PeerClient {
    /// Dials `to` with the certificate of `from`, as a broker does.
    pub async fn connect(brokers: &Brokers, from: usize, to: usize) -> Self {
        let identity = brokers.peer_identity(from);
        let dialled = Self::dial(brokers, to, Some(&identity), Some(INTERNAL_ALPN));
        dialled.await.unwrap_or_else(|e| panic!("{e}"))
    }

    /// Dials with any certificate and protocol.
    pub async fn dial(
        brokers: &Brokers,
        to: usize,
        identity: Option<&Identity>,
        alpn: Option<&[u8]>,
    ) -> Result<Self, quinn::ConnectionError> {
        let addr = brokers.cluster.node(to).internal_addr();
        Self::dial_at(brokers, to, addr, identity, alpn).await
    }

    /// Dials `to` at another address than its own, with the certificate of `from`.
    pub async fn connect_at(brokers: &Brokers, from: usize, to: usize, addr: SocketAddr) -> Self {
        let identity = brokers.peer_identity(from);
        let alpn = Some(INTERNAL_ALPN);
        let dialled = Self::dial_at(brokers, to, addr, Some(&identity), alpn);
        dialled.await.unwrap_or_else(|e| panic!("{e}"))
    }

    async fn dial_at(
        brokers: &Brokers,
        to: usize,
        addr: SocketAddr,
        identity: Option<&Identity>,
        alpn: Option<&[u8]>,
    ) -> Result<Self, quinn::ConnectionError> {
        let dialled = dial(Dial {
            addr,
            server_name: brokers.cluster.node(to).node_id(),
            ca: brokers.cluster.ca(),
            alpn,
            identity,
        });
        let (endpoint, conn) = within(SOON, "a peer connection", dialled).await?;
        Ok(Self {
            conn,
            _endpoint: endpoint,
        })
    }

    /// A stream on which nothing was sent.
    pub async fn open(&self) -> PeerStream {
        let (send, recv) = self.conn.open_bi().await.expect("a stream");
        PeerStream::of(send, recv)
    }

    /// A greeted stream.
    pub async fn greeted(&self, as_node: &str) -> PeerStream {
        let mut stream = self.open().await;
        stream.send(hello(1, as_node)).await;
        match stream.message().await {
            Message::HelloOk(_) => stream,
            other => panic!("not greeted: {other:?}"),
        }
    }
}

/// A stream of requests.
pub struct PeerStream {
    pub send: quinn::SendStream,
    recv: quinn::RecvStream,
    reader: FrameReader,
}

impl PeerStream {
    /// A stream that was opened otherwise.
    pub fn of(send: quinn::SendStream, recv: quinn::RecvStream) -> Self {
        Self {
            send,
            recv,
            reader: FrameReader::new(),
        }
    }

    /// Sends bytes as they are.
    pub async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        // A broker that has closed says so in what is read next.
        let _ = self.send.write_all(bytes.as_ref()).await;
    }

    /// The next message, or why there is none.
    pub async fn next(&mut self) -> Result<Message, String> {
        loop {
            match self.reader.next() {
                Some(ReadEvent::Frame { kind, body }) => {
                    return Ok(decode_body(kind, body).expect("a readable answer"));
                }
                Some(other) => panic!("the broker sent {other:?}"),
                None => {}
            }
            match within(SOON, "an answer", self.recv.read_chunk(1 << 20, true)).await {
                Ok(Some(chunk)) => self.reader.push(chunk.bytes),
                Ok(None) => return Err("finished".into()),
                Err(error) => return Err(error.to_string()),
            }
        }
    }

    /// The next message, which must come.
    pub async fn message(&mut self) -> Message {
        self.next().await.unwrap_or_else(|why| panic!("{why}"))
    }

    /// Wants no more answers.
    pub fn stop(&mut self, code: u32) {
        self.recv.stop(code.into()).expect("an open stream");
    }

    /// Sends a request and gives its answer.
    pub async fn ask(&mut self, request: &Message) -> Message {
        self.send(frame(request)).await;
        let answer = self.message().await;
        assert_eq!(answer.correlation(), request.correlation());
        answer
    }

    /// Sends a request that must be refused; the code.
    pub async fn refused(&mut self, request: &Message) -> ErrorCode {
        let answer = self.ask(request).await;
        let code = answer.error_code();
        code.unwrap_or_else(|| panic!("not refused: {answer:?}"))
    }
}

/// The bytes of a message.
pub fn frame(message: &Message) -> Bytes {
    encode(message).expect("a frame")
}

/// A greeting.
pub fn hello(correlation: u64, node: &str) -> Bytes {
    frame(&Message::Hello(Hello {
        correlation: CorrelationId(correlation),
        node_id: Text::shortened(node),
    }))
}

/// A shard of the cluster's tenant.
pub fn shard(stream: &str, generation: u64) -> ShardRef {
    ShardRef {
        tenant: Text::shortened(TENANT),
        namespace: Text::shortened(NAMESPACE),
        stream: Text::shortened(stream),
        shard: 0,
        generation: Generation(generation),
    }
}

/// A forwarded publish of one record.
pub fn forward(correlation: u64, shard: ShardRef, token: Option<&str>) -> Message {
    Message::ForwardPublish(ForwardPublish {
        correlation: CorrelationId(correlation),
        shard,
        ack: AckMode::OnCommit,
        payloads: Payloads::from_slices([b"forwarded"]).expect("payloads"),
        credential: token.map(|token| Credential::new(token).expect("a credential")),
    })
}

/// A header and a body that need not fit.
pub fn raw_frame(magic: &[u8; 4], version: u16, kind: u16, length: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = magic.to_vec();
    bytes.extend(version.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend(length.to_be_bytes());
    bytes.extend(body);
    bytes
}
