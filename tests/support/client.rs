//! A client: publishes with answers, subscribes, and sends any bytes it is told to.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use felix_uring::cluster::{NAMESPACE, TENANT};
use felix_uring::tls::CLIENT_ALPN;
use felix_uring::wire::client::messages::{Auth, StartAt, Subscribe};
use felix_uring::wire::client::{
    encode_message, AckGranularity, AckRequest, Answer, FrameReader, Payloads, PublishAck,
    PublishBatch, PublishOutcome, ReadEvent, ReadLimits, Refusal, RetryClass, ToClient,
};

use super::brokers::Brokers;
use super::transport::{dial, Dial};
use super::{within, SOON};

/// What the published client of this protocol offers.
const FLAGS: u16 = 0x1FFF;
const FEATURES: u32 = 0xFB77_FFFF;
const FEATURES_HI: u32 = 0xF;

/// A connection to one broker.
pub struct Client {
    pub conn: quinn::Connection,
    _endpoint: quinn::Endpoint,
}

impl Client {
    /// Connects to a node of a cluster, offering `felix/1`.
    pub async fn connect(brokers: &Brokers, node: usize) -> Self {
        let addr = brokers.cluster.node(node).client_addr();
        let connected = Self::dial(addr, brokers.cluster.ca(), Some(CLIENT_ALPN));
        let connected = within(SOON, "a client connection", connected).await;
        connected.unwrap_or_else(|e| panic!("{e}"))
    }

    /// Connects to an address.
    pub async fn dial(
        addr: SocketAddr,
        ca: &Path,
        alpn: Option<&[u8]>,
    ) -> Result<Self, quinn::ConnectionError> {
        let (endpoint, conn) = dial(Dial {
            addr,
            server_name: "localhost",
            ca,
            alpn,
            identity: None,
        })
        .await?;
        Ok(Self {
            conn,
            _endpoint: endpoint,
        })
    }

    /// A bidirectional stream without authentication.
    pub async fn open(&self) -> Stream {
        let (send, recv) = self.conn.open_bi().await.expect("a stream");
        Stream::of(send, recv)
    }

    /// A stream that has shown `token` for `tenant` and was answered `auth_ok`.
    pub async fn stream_of(&self, tenant: &str, token: &str) -> Result<Stream, Answer> {
        let mut stream = self.open().await;
        stream.send(auth(tenant, token)).await;
        match stream.answers.answer().await {
            Answer::AuthOk(_) => Ok(stream),
            other => Err(other),
        }
    }

    /// The same for the tenant of the cluster; a refusal fails the test.
    pub async fn stream(&self, token: &str) -> Stream {
        let opened = self.stream_of(TENANT, token).await;
        opened.unwrap_or_else(|answer| panic!("refused: {answer:?}"))
    }

    /// Subscribes to shard 0 of a stream.
    pub async fn subscribe(&self, token: &str, stream: &str, start: StartAt) -> Events {
        let mut request = self.stream(token).await;
        request.send(subscribe_frame(stream, start)).await;
        match request.answers.answer().await {
            Answer::Subscribed(_) => {}
            other => panic!("not subscribed: {other:?}"),
        }
        let accepted = within(SOON, "an event stream", self.conn.accept_uni()).await;
        let mut answers = Answers::new(accepted.expect("an event stream"));
        match answers.answer().await {
            Answer::EventStreamHello(_) => Events { answers },
            other => panic!("no hello: {other:?}"),
        }
    }
}

/// The first frame of a stream.
pub fn auth(tenant: &str, token: &str) -> Bytes {
    encode_message(&Auth {
        tenant_id: tenant.into(),
        token: token.into(),
        client_flags: Some(FLAGS),
        client_features: Some(FEATURES),
        client_features_hi: Some(FEATURES_HI),
    })
    .expect("a frame")
}

/// Asks for shard 0 of a stream of the cluster's tenant.
pub fn subscribe_frame(stream: &str, start: StartAt) -> Bytes {
    encode_message(&Subscribe {
        tenant_id: TENANT.into(),
        namespace: NAMESPACE.into(),
        stream: stream.into(),
        subscription_id: None,
        start: Some(start),
        shard: None,
        queue_capacity: None,
    })
    .expect("a frame")
}

/// A publish frame of the cluster's tenant.
pub fn publish_frame<P: AsRef<[u8]>>(request_id: u64, stream: &str, payloads: &[P]) -> Bytes {
    PublishBatch {
        ack: Some(AckRequest {
            request_id,
            granularity: AckGranularity::PerBatch,
        }),
        producer: None,
        key: None,
        tenant_id: TENANT.into(),
        namespace: NAMESPACE.into(),
        stream: stream.into(),
        payloads: Payloads::from_slices(payloads).expect("payloads"),
    }
    .encode()
    .expect("a frame")
}

/// A bidirectional stream of a client.
pub struct Stream {
    pub send: quinn::SendStream,
    pub answers: Answers,
    next_request: u64,
}

impl Stream {
    /// A stream of its two halves.
    pub fn of(send: quinn::SendStream, recv: quinn::RecvStream) -> Self {
        Self {
            send,
            answers: Answers::new(recv),
            next_request: 1,
        }
    }

    /// Sends bytes as they are.
    pub async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        // A broker that has ended the stream says so in what is read next.
        let _ = self.send.write_all(bytes.as_ref()).await;
    }

    /// Sends a publish and does not wait; the request id tells its answer.
    pub async fn start_publish<P: AsRef<[u8]>>(&mut self, stream: &str, payloads: &[P]) -> u64 {
        let id = self.next_request;
        self.next_request += 1;
        self.send(publish_frame(id, stream, payloads)).await;
        id
    }

    /// Publishes one record and waits for the answer.
    pub async fn publish(&mut self, stream: &str, payload: impl AsRef<[u8]>) -> PublishOutcome {
        let id = self.start_publish(stream, &[payload]).await;
        let ack = self.answers.ack().await;
        assert_eq!(ack.request_id, id);
        ack.outcome
    }

    /// Publishes one record that must be taken; its offset.
    pub async fn must_publish(&mut self, stream: &str, payload: impl AsRef<[u8]>) -> u64 {
        match self.publish(stream, payload).await {
            PublishOutcome::Accepted { offset } => offset.expect("an offset"),
            PublishOutcome::Failed(refusal) => panic!("{refusal:?}"),
        }
    }

    /// Publishes until it is taken, for at most `limit`; how long it took and how often it was refused.
    pub async fn publish_until_taken(&mut self, stream: &str, limit: Duration) -> (Duration, u32) {
        let started = std::time::Instant::now();
        let mut refusals = 0;
        loop {
            match self.publish(stream, b"again").await {
                PublishOutcome::Accepted { .. } => return (started.elapsed(), refusals),
                PublishOutcome::Failed(refusal) => {
                    assert!(
                        started.elapsed() < limit,
                        "still refused after {limit:?}: {refusal:?}"
                    );
                    refusals += 1;
                }
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

/// What a failed publish says.
pub fn refusal(outcome: PublishOutcome) -> (String, RetryClass) {
    match outcome {
        PublishOutcome::Accepted { offset } => panic!("accepted at {offset:?}"),
        PublishOutcome::Failed(refusal) => code_and_class(&refusal),
    }
}

/// Code and class of a refusal.
pub fn code_and_class(refusal: &Refusal) -> (String, RetryClass) {
    let code = refusal.code.as_ref().expect("a code");
    (
        code.name().to_string(),
        refusal.class().expect("a class of retry"),
    )
}

/// Frames of a broker.
pub struct Answers {
    recv: quinn::RecvStream,
    reader: FrameReader,
}

/// How a stream of answers ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// The broker finished it between frames.
    Finished,
    /// It, or its connection, was cut off.
    Broken(String),
}

impl Answers {
    pub fn new(recv: quinn::RecvStream) -> Self {
        Self {
            recv,
            reader: FrameReader::new(ReadLimits::AUTHENTICATED),
        }
    }

    /// The next frame.
    pub async fn next(&mut self) -> Result<ToClient, End> {
        loop {
            if let Some(event) = self.reader.next() {
                let ReadEvent::Frame(frame) = event else {
                    panic!("the broker sent {event:?}");
                };
                return Ok(ToClient::decode(frame).expect("a frame of the protocol"));
            }
            match self.recv.read_chunk(1 << 20, true).await {
                Ok(Some(chunk)) => self.reader.push(chunk.bytes),
                Ok(None) => {
                    assert_eq!(self.reader.finish(), Ok(()), "a torn frame");
                    return Err(End::Finished);
                }
                Err(error) => return Err(End::Broken(error.to_string())),
            }
        }
    }

    /// The next frame, which must be a JSON message.
    pub async fn answer(&mut self) -> Answer {
        match within(SOON, "an answer", self.next()).await {
            Ok(ToClient::Answer(answer)) => answer,
            other => panic!("not an answer: {other:?}"),
        }
    }

    /// The next frame, which must be the answer to a publish.
    pub async fn ack(&mut self) -> PublishAck {
        match within(SOON, "an ack", self.next()).await {
            Ok(ToClient::Ack(ack)) => ack,
            other => panic!("not an ack: {other:?}"),
        }
    }

    /// The end of the stream; frames before it are given back.
    pub async fn read_to_end(&mut self) -> (Vec<ToClient>, End) {
        let mut frames = Vec::new();
        loop {
            match within(SOON, "the end of a stream", self.next()).await {
                Ok(frame) => frames.push(frame),
                Err(end) => return (frames, end),
            }
        }
    }
}

/// A subscription's events.
pub struct Events {
    answers: Answers,
}

impl Events {
    /// The next `count` records with their offsets.
    pub async fn take(&mut self, count: usize) -> Vec<(u64, Bytes)> {
        let mut records = Vec::with_capacity(count);
        while records.len() < count {
            match within(SOON, "an event", self.answers.next()).await {
                Ok(ToClient::Events(batch)) => {
                    let base = batch.base_offset.expect("offsets were offered");
                    records.extend((base..).zip(batch.payloads));
                }
                other => panic!("not events: {other:?}"),
            }
        }
        records
    }

    /// The next frame that carries no records.
    pub async fn last_words(&mut self) -> Result<Answer, End> {
        loop {
            match within(SOON, "the end of a subscription", self.answers.next()).await {
                Ok(ToClient::Events(_)) => {}
                Ok(ToClient::Answer(answer)) => return Ok(answer),
                Ok(ToClient::Ack(ack)) => panic!("an ack on an event stream: {ack:?}"),
                Err(end) => return Err(end),
            }
        }
    }
}
