//! A peer that stops or resets a stream of requests, as dialler and as listener, at every stage: it gives up
//! what was on that stream and nothing else. What was asked is answered once, what was taken is done, and no
//! stream, request or connection is left behind.

use felix_uring::ids::{CorrelationId, Offset};
use felix_uring::wire::client::{PublishOutcome, RetryClass};
use felix_uring::wire::internal::{decode_body, FrameReader, Hello, Message, ReadEvent, Text};

use crate::support::brokers::{Brokers, FIRST, SECOND};
use crate::support::client::{code_and_class, Client};
use crate::support::dialler::{forward, frame, hello, shard, PeerClient, PeerStream};
use crate::support::transport::listen_as_peer;
use crate::support::{within, SOON};

const FAULTS: &str = "felix_internal_faults_total";
const CLOSED: &str = "felix_connections_closed_total";
const STORED: &str = "felix_storage_records_total";

/// One broker runs; the other is played by the test.
fn one_of_two() -> Brokers {
    let mut brokers = Brokers::prepare_with(2, |_| {});
    brokers.start_node(0);
    brokers
}

/// How a dialler gives a stream up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GivesUp {
    /// RESET_STREAM on its requests.
    Requests,
    /// STOP_SENDING on the answers.
    Answers,
    Both,
}

impl GivesUp {
    const ALL: [Self; 3] = [Self::Requests, Self::Answers, Self::Both];

    fn carry_out(self, stream: &mut PeerStream) {
        if self != Self::Answers {
            stream.send.reset(5u32.into()).expect("an open stream");
        }
        if self != Self::Requests {
            stream.stop(5);
        }
    }
}

/// Where a dialler's stream is when it is given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Opened,
    InHeader,
    InBody,
    /// A request was sent, and may or may not be read before the stream goes.
    Asked,
    Answered,
    /// A whole request, and a part of another.
    AskedAndInBody,
}

impl Stage {
    const ALL: [Self; 6] = [
        Self::Opened,
        Self::InHeader,
        Self::InBody,
        Self::Asked,
        Self::Answered,
        Self::AskedAndInBody,
    ];

    async fn reach(self, stream: &mut PeerStream, token: &str) {
        let request = forward(7, shard(FIRST, 1), Some(token));
        let bytes = frame(&request);
        match self {
            Self::Opened => {}
            Self::InHeader => stream.send(&bytes[..5]).await,
            Self::InBody => stream.send(&bytes[..bytes.len() - 3]).await,
            Self::Asked => stream.send(&bytes).await,
            Self::Answered => {
                let answer = stream.ask(&request).await;
                assert!(
                    matches!(answer, Message::ForwardPublishOk { .. }),
                    "{answer:?}"
                );
            }
            Self::AskedAndInBody => {
                stream.send(&bytes).await;
                stream.send(&bytes[..20]).await;
            }
        }
    }
}

/// What the status of node 0 says about streams of peers, once it is `expected`.
async fn streams_fall_to(brokers: &Brokers, expected: u64) {
    let deadline = std::time::Instant::now() + SOON;
    loop {
        let status = brokers.cluster.node(0).status();
        let status = status.unwrap_or_else(|e| panic!("{e}"));
        let held = &status["cores"][0]["held"];
        let streams = held["peer_streams"].as_u64().expect("a number");
        let requests = held["peer_requests"].as_u64().expect("a number");
        if (streams, requests) == (expected, 0) {
            return;
        }
        assert!(
            std::time::Instant::now() < deadline,
            "{streams} streams and {requests} requests are held, not {expected} and none"
        );
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dialler_gives_a_stream_up_at_every_stage() {
    let mut brokers = one_of_two();
    let token = brokers.token();
    let peer = PeerClient::connect(&brokers, 1, 0).await;
    let mut first = peer.greeted("node-2").await;
    for stage in Stage::ALL {
        for gives_up in GivesUp::ALL {
            let mut stream = peer.open().await;
            stage.reach(&mut stream, &token).await;
            gives_up.carry_out(&mut stream);
            // The others of the connection go on, before and after the broker has seen it.
            let request = forward(8, shard(FIRST, 1), Some(&token));
            let answer = first.ask(&request).await;
            assert!(
                matches!(answer, Message::ForwardPublishOk { .. }),
                "{stage:?}, {gives_up:?}: {answer:?}"
            );
            if gives_up == GivesUp::Answers {
                // It may still ask; who wants no answers gets none, and the stream ends with its requests.
                stream.send.finish().expect("an open stream");
            }
            streams_fall_to(&brokers, 1).await;
        }
    }
    assert_eq!(peer.conn.close_reason(), None);
    assert_eq!(brokers.metric(0, CLOSED), 0.0);
    assert_eq!(brokers.metric(0, FAULTS), 0.0);
    brokers.assert_alive(0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_asked_on_a_stream_without_answers_is_done_and_its_answers_are_counted() {
    const ASKED: u64 = 50;
    let mut brokers = one_of_two();
    let token = brokers.token();
    let peer = PeerClient::connect(&brokers, 1, 0).await;
    let _first = peer.greeted("node-2").await;
    let mut deaf = peer.open().await;
    let answer = deaf.ask(&forward(1, shard(FIRST, 1), Some(&token))).await;
    assert!(
        matches!(answer, Message::ForwardPublishOk { .. }),
        "{answer:?}"
    );
    deaf.stop(5);
    // Seen before anything else is asked: the broker gives the stream up in answer.
    let ended = within(SOON, "the broker's reset", deaf.next()).await;
    assert!(ended.is_err(), "{ended:?}");
    for nth in 0..ASKED {
        deaf.send(frame(&forward(10 + nth, shard(FIRST, 1), Some(&token))))
            .await;
    }
    deaf.send.finish().expect("an open stream");
    brokers.wait_metric(0, STORED, 1.0 + ASKED as f64);
    brokers.wait_metric(0, "felix_peer_answers_dropped_total", ASKED as f64);
    streams_fall_to(&brokers, 1).await;
    assert_eq!(brokers.metric(0, FAULTS), 0.0);
    brokers.assert_alive(0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_first_stream_that_is_given_up_ends_by_the_greetings_own_time() {
    let mut brokers = one_of_two();
    let token = brokers.token();
    for gives_up in GivesUp::ALL {
        for is_torn in [false, true] {
            let peer = PeerClient::connect(&brokers, 1, 0).await;
            let mut stream = peer.open().await;
            let hello = hello(1, "node-2");
            stream.send(&hello[..if is_torn { 15 } else { 1 }]).await;
            gives_up.carry_out(&mut stream);
            // What came on another stream waits for a greeting that cannot come any more.
            let mut held = peer.open().await;
            held.send(frame(&forward(3, shard(FIRST, 1), Some(&token))))
                .await;
            let closed = within(SOON, "the greeting's time", peer.conn.closed()).await;
            assert!(
                matches!(closed, quinn::ConnectionError::ApplicationClosed(_)),
                "{gives_up:?}: {closed}"
            );
        }
    }
    assert_eq!(brokers.metric(0, STORED), 0.0);
    let late = "felix_handshakes_failed_total{reason=\"hello_timeout\"}";
    assert_eq!(brokers.metric(0, late), 6.0);
    assert_eq!(brokers.metric(0, CLOSED), 6.0);
    streams_fall_to(&brokers, 0).await;
    assert_eq!(brokers.metric(0, FAULTS), 0.0);
    brokers.assert_alive(0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_given_up_while_it_waits_for_the_greeting_is_forgotten_after_it() {
    let mut brokers = one_of_two();
    let token = brokers.token();
    for gives_up in GivesUp::ALL {
        let peer = PeerClient::connect(&brokers, 1, 0).await;
        let mut first = peer.open().await;
        first.send(&hello(4, "node-2")[..5]).await;
        let mut held = peer.open().await;
        held.send(frame(&forward(8, shard(FIRST, 1), Some(&token))))
            .await;
        gives_up.carry_out(&mut held);
        if gives_up == GivesUp::Answers {
            held.send.finish().expect("an open stream");
        }
        first.send(&hello(4, "node-2")[5..]).await;
        assert!(matches!(first.message().await, Message::HelloOk(_)));
        let answer = first.ask(&forward(9, shard(FIRST, 1), Some(&token))).await;
        assert!(
            matches!(answer, Message::ForwardPublishOk { .. }),
            "{answer:?}"
        );
        streams_fall_to(&brokers, 1).await;
        peer.conn.close(0u32.into(), b"done");
        streams_fall_to(&brokers, 0).await;
    }
    assert_eq!(brokers.metric(0, FAULTS), 0.0);
    brokers.assert_alive(0);
}

/// What the owner does to the stream a forward came on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Breaks {
    /// FIN behind its answers.
    Finish,
    /// RESET_STREAM of its answers.
    Reset,
    /// STOP_SENDING on the requests.
    Stop,
}

impl Breaks {
    const ALL: [Self; 3] = [Self::Finish, Self::Reset, Self::Stop];
}

/// When it does so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum When {
    /// With three publishes read and none answered.
    BeforeAnswers,
    /// In the middle of an answer.
    InAnswer,
    /// With three answers on their way, in one piece with the end.
    BehindAnswers,
    /// When nothing is owed.
    Idle,
}

impl When {
    const ALL: [Self; 4] = [
        Self::BeforeAnswers,
        Self::InAnswer,
        Self::BehindAnswers,
        Self::Idle,
    ];
}

const BATCHES: usize = 3;

fn bytes_of(message: &Message) -> bytes::Bytes {
    frame(message)
}

fn stored(correlation: CorrelationId) -> bytes::Bytes {
    bytes_of(&Message::ForwardPublishOk {
        correlation,
        first_offset: Offset(0),
        last_offset: Offset(0),
    })
}

/// The next `count` forwards of a connection, which come on one stream; greets meanwhile.
struct Owner {
    send: quinn::SendStream,
    recv: quinn::RecvStream,
    reader: FrameReader,
}

impl Owner {
    async fn accept(conn: &quinn::Connection) -> Self {
        let accepted = within(SOON, "a stream", conn.accept_bi()).await;
        let (send, recv) = accepted.expect("the connection lives");
        Self {
            send,
            recv,
            reader: FrameReader::new(),
        }
    }

    /// The next request on this stream; greetings are answered.
    async fn next(&mut self) -> CorrelationId {
        loop {
            let Some(event) = self.reader.next() else {
                let read = self.recv.read_chunk(1 << 20, true);
                let chunk = within(SOON, "a request", read).await;
                let chunk = chunk.expect("the stream lives").expect("no end");
                self.reader.push(chunk.bytes);
                continue;
            };
            let ReadEvent::Frame { kind, body } = event else {
                panic!("the broker sent {event:?}");
            };
            match decode_body(kind, body).expect("a readable request") {
                Message::Hello(hello) => {
                    let ok = Message::HelloOk(Hello {
                        correlation: hello.correlation,
                        node_id: Text::shortened("node-2"),
                    });
                    self.write(bytes_of(&ok)).await;
                }
                Message::ForwardPublish(publish) => return publish.correlation,
                other => panic!("unexpected request {other:?}"),
            }
        }
    }

    async fn write(&mut self, bytes: impl AsRef<[u8]>) {
        self.send.write_all(bytes.as_ref()).await.expect("written");
    }

    fn break_off(&mut self, how: Breaks) {
        match how {
            Breaks::Finish => self.send.finish().expect("an open stream"),
            Breaks::Reset => drop(self.send.reset(5u32.into())),
            Breaks::Stop => drop(self.recv.stop(5u32.into())),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_breaks_a_stream_off_at_every_stage() {
    // A link that was broken a moment ago is dialled again before the publishes that want it are given up.
    let mut brokers = Brokers::prepare_with(2, |spec| {
        let patient = ["--peer-backoff-max-ms=50", "--forward-budget-ms=4000"];
        spec.extra_args.extend(patient.map(String::from));
    });
    brokers.start_node(0);
    let identity = brokers.peer_identity(1);
    let addr = brokers.cluster.node(1).internal_addr();
    let endpoint = listen_as_peer(addr, &identity, brokers.cluster.ca());
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut publisher = client.stream(&token).await;
    let faults = "felix_connections_closed_total{reason=\"peer_protocol_fault\"}";
    let mut broken = 0.0;
    for when in When::ALL {
        for breaks in Breaks::ALL {
            let what = format!("{breaks:?}, {when:?}");
            for _ in 0..BATCHES {
                publisher.start_publish(SECOND, &[b"one"]).await;
            }
            let incoming = within(SOON, "a link", endpoint.accept()).await;
            let conn = incoming.expect("an attempt").await.expect("a link");
            // The first stream greets; the batches of one client stream share one, which may be that.
            let mut owner = Owner::accept(&conn).await;
            let mut asked = Vec::new();
            for _ in 0..BATCHES {
                asked.push(owner.next().await);
            }
            let answers: Vec<u8> = asked.iter().flat_map(|&id| stored(id)).collect();
            match when {
                When::BeforeAnswers => owner.break_off(breaks),
                When::InAnswer => {
                    owner.write(&answers[..answers.len() / BATCHES / 2]).await;
                    owner.break_off(breaks);
                }
                When::BehindAnswers => {
                    owner.write(&answers).await;
                    owner.break_off(breaks);
                }
                When::Idle => {
                    owner.write(&answers).await;
                    for _ in 0..BATCHES {
                        assert_stored(&publisher.answers.ack().await.outcome, &what);
                    }
                    owner.break_off(breaks);
                }
            }
            if when != When::Idle {
                // A reset takes what is on its way with it, and so does a link that is closed.
                let is_sure = when == When::BehindAnswers && breaks == Breaks::Finish;
                for _ in 0..BATCHES {
                    let ack = publisher.answers.ack().await;
                    match &ack.outcome {
                        PublishOutcome::Accepted { .. } if when == When::BehindAnswers => {}
                        PublishOutcome::Failed(refusal) if !is_sure => {
                            let (_, class) = code_and_class(refusal);
                            assert_eq!(class, RetryClass::OutcomeUnknown, "{what}");
                        }
                        outcome => panic!("{what}: {outcome:?}"),
                    }
                }
            }
            // The link is closed and counted once, and dialled again by the next publish.
            within(SOON, "the close", conn.closed()).await;
            broken += 1.0;
            brokers.wait_metric(0, faults, broken);
        }
    }
    assert_eq!(brokers.metric(0, faults), broken);
    assert_eq!(brokers.metric(0, CLOSED), broken);
    assert_eq!(brokers.metric(0, FAULTS), 0.0);
    assert_eq!(brokers.metric(0, "felix_forwards_in_flight"), 0.0);
    brokers.assert_alive(0);
}

fn assert_stored(outcome: &PublishOutcome, what: &str) {
    assert!(
        matches!(outcome, PublishOutcome::Accepted { .. }),
        "{what}: {outcome:?}"
    );
}
