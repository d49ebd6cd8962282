//! A link to a peer: every short sequence of events against the invariants, and the cases that
//! matter in the field one by one.

use std::collections::HashMap;
use std::time::Duration;

use felix_uring::ids::{CorrelationId, NodeId};
use felix_uring::proto::backoff::BackoffLimits;
use felix_uring::proto::correlation::Family;
use felix_uring::proto::handshake::{CloseCause, HandshakeFailure, HELLO_CORRELATION};
use felix_uring::proto::outcome::{
    ForwardKind, NotSentCause, PeerCode, PeerError, SendResult, UnknownCause,
};
use felix_uring::proto::peer::{
    Answer, ConnectionEpoch, LinkAction, LinkClose, LinkLimits, LinkPhase, LinkReport, PeerLink,
    Request, StreamSlot,
};
use felix_uring::proto::MonoTime;
use proptest::prelude::*;

type Reply = u32;

/// A link with a driver that remembers what it was told.
struct Pair {
    link: PeerLink<u32, Reply>,
    now: MonoTime,
    epoch: ConnectionEpoch,
    next_token: u32,
    /// Token to correlation of everything transmitted and not done.
    sent: Vec<(u32, CorrelationId)>,
    results: HashMap<u32, SendResult<Reply>>,
    closes: Vec<LinkClose>,
    reports: Vec<LinkReport>,
    dials: u32,
    transmits: Vec<(u32, StreamSlot, ForwardKind)>,
    hello_sent: bool,
    ever_transmitted: Vec<u32>,
}

fn small_limits() -> LinkLimits {
    LinkLimits {
        in_flight: 2,
        backoff: BackoffLimits {
            base: Duration::from_millis(50),
            ..BackoffLimits::default()
        },
        ..LinkLimits::default()
    }
}

impl Pair {
    fn new(limits: LinkLimits) -> Self {
        Self {
            link: PeerLink::new(NodeId::new("b").unwrap(), limits, 42),
            now: MonoTime::ZERO,
            epoch: ConnectionEpoch(0),
            next_token: 0,
            sent: Vec::new(),
            results: HashMap::new(),
            closes: Vec::new(),
            reports: Vec::new(),
            dials: 0,
            transmits: Vec::new(),
            hello_sent: false,
            ever_transmitted: Vec::new(),
        }
    }

    fn up(limits: LinkLimits) -> Self {
        let mut pair = Self::new(limits);
        pair.bring_up();
        pair
    }

    fn bring_up(&mut self) {
        self.link.connect(self.now);
        self.drain();
        self.connected();
        self.answer(HELLO_CORRELATION, hello_ok("b"));
        assert_eq!(self.link.phase(), LinkPhase::Up);
    }

    fn drain(&mut self) {
        while let Some(action) = self.link.poll_action() {
            match action {
                LinkAction::Dial { epoch } => {
                    self.dials += 1;
                    self.epoch = epoch;
                    self.hello_sent = false;
                    assert!(self.sent.is_empty(), "dialled with requests on the old one");
                }
                LinkAction::SendHello { correlation } => {
                    assert_eq!(correlation, HELLO_CORRELATION);
                    self.hello_sent = true;
                }
                LinkAction::Transmit {
                    token,
                    stream,
                    correlation,
                    kind,
                } => {
                    let up = self.reports.last();
                    assert_eq!(up, Some(&LinkReport::Up), "LINK-3");
                    self.sent.push((token, correlation));
                    self.ever_transmitted.push(token);
                    self.transmits.push((token, stream, kind));
                }
                LinkAction::Done { token, result, .. } => self.finish(token, result),
                LinkAction::Close { epoch, reason } => {
                    assert_eq!(epoch, self.epoch);
                    self.closes.push(reason);
                }
                LinkAction::Report(report) => self.reports.push(report),
            }
        }
        assert_eq!(self.link.in_flight(), self.sent.len());
    }

    fn finish(&mut self, token: u32, result: SendResult<Reply>) {
        let was_sent = self.sent.iter().any(|(t, _)| *t == token);
        self.sent.retain(|(t, _)| *t != token);
        if matches!(result, SendResult::Unknown(_)) {
            assert!(was_sent, "unknown, but never transmitted");
        }
        let old = self.results.insert(token, result);
        assert_eq!(old, None, "LINK-1: token {token} is done twice");
    }

    fn request_of(&mut self, bytes: u32, family: Family) -> u32 {
        let token = self.next_token;
        self.next_token += 1;
        let request = Request {
            token,
            family,
            kind: ForwardKind::Authorized,
            bytes,
            pin: None,
        };
        self.link.request(self.now, request);
        self.drain();
        token
    }

    fn request(&mut self) -> u32 {
        self.request_of(100, Family::Publish)
    }

    fn connected(&mut self) {
        self.link.on_connected(self.epoch, self.now);
        self.drain();
    }

    fn answer(&mut self, correlation: CorrelationId, answer: Answer<Reply>) {
        self.link
            .on_answer(self.epoch, self.now, correlation, answer);
        self.drain();
    }

    fn closed(&mut self, cause: CloseCause) {
        self.link.on_closed(self.epoch, self.now, cause);
        self.drain();
    }

    fn wait(&mut self, span: Duration) {
        self.now = self.now + span;
        self.link.on_time(self.now);
        self.drain();
    }

    fn oldest(&self) -> Option<CorrelationId> {
        self.sent.first().map(|(_, id)| *id)
    }

    fn result(&self, token: u32) -> Option<&SendResult<Reply>> {
        self.results.get(&token)
    }
}

fn hello_ok(node_id: &str) -> Answer<Reply> {
    Answer::HelloOk {
        node_id: node_id.into(),
    }
}

fn refused(code: PeerCode) -> Answer<Reply> {
    Answer::PublishError(PeerError::bare(code))
}

const NOT_SENT_UNREACHABLE: SendResult<Reply> = SendResult::NotSent(NotSentCause::Unreachable);

#[derive(Debug, Clone, Copy)]
enum Input {
    Request,
    Connected,
    HelloOk,
    WrongHelloOk,
    HelloRefused,
    AnswerOldest,
    AnswerForeignFamily,
    AnswerMalformed,
    LateAnswer,
    Unreadable,
    Unwritten,
    Lost,
    CertificateRefused,
    Tick,
    LongWait,
    ShutDown,
}

const ALPHABET: [Input; 16] = [
    Input::Request,
    Input::Connected,
    Input::HelloOk,
    Input::WrongHelloOk,
    Input::HelloRefused,
    Input::AnswerOldest,
    Input::AnswerForeignFamily,
    Input::AnswerMalformed,
    Input::LateAnswer,
    Input::Unreadable,
    Input::Unwritten,
    Input::Lost,
    Input::CertificateRefused,
    Input::Tick,
    Input::LongWait,
    Input::ShutDown,
];

fn apply(pair: &mut Pair, input: Input) {
    match input {
        Input::Request => {
            pair.request();
        }
        Input::Connected => pair.connected(),
        Input::HelloOk => pair.answer(HELLO_CORRELATION, hello_ok("b")),
        Input::WrongHelloOk => pair.answer(HELLO_CORRELATION, hello_ok("c")),
        Input::HelloRefused => pair.answer(HELLO_CORRELATION, refused(PeerCode::Unauthorized)),
        Input::AnswerOldest => {
            if let Some(id) = pair.oldest() {
                pair.answer(id, Answer::PublishOk(1));
            }
        }
        Input::AnswerForeignFamily => {
            if let Some(id) = pair.oldest() {
                pair.answer(id, Answer::CacheOk(1));
            }
        }
        Input::AnswerMalformed => {
            if let Some(id) = pair.oldest() {
                pair.answer(id, refused(PeerCode::Malformed));
            }
        }
        Input::LateAnswer => pair.answer(CorrelationId(u64::MAX), Answer::PublishOk(1)),
        Input::Unreadable => {
            pair.link.on_unreadable(pair.epoch, pair.now);
            pair.drain();
        }
        Input::Unwritten => {
            if let Some(id) = pair.oldest() {
                pair.link.on_unwritten(pair.epoch, pair.now, id);
                pair.drain();
            }
        }
        Input::Lost => pair.closed(CloseCause::ClosedByPeer),
        Input::CertificateRefused => pair.closed(CloseCause::CertificateRefused),
        Input::Tick => pair.wait(Duration::from_millis(30)),
        Input::LongWait => pair.wait(Duration::from_secs(61)),
        Input::ShutDown => {
            pair.link.shut_down(pair.now);
            pair.drain();
        }
    }
}

/// In these sequences every request has 100 bytes: none may be leaked or freed twice.
fn check_bytes(pair: &Pair) {
    let held = pair.link.in_flight() + pair.link.waiting();
    assert_eq!(pair.link.held_bytes(), 100 * held as u64);
}

/// Ends the world and checks that every request came out once, with a truthful result.
fn conclude(mut pair: Pair, sequence: &[Input]) {
    pair.closed(CloseCause::Transport);
    assert!(pair.sent.is_empty(), "LINK-4: {sequence:?}");
    check_bytes(&pair);
    pair.wait(Duration::from_secs(61));
    for token in 0..pair.next_token {
        let Some(result) = pair.result(token) else {
            panic!("LINK-1: {token} has no result after {sequence:?}");
        };
        let transmitted = pair.ever_transmitted.contains(&token);
        let unwritten = sequence.iter().any(|i| matches!(i, Input::Unwritten));
        match result {
            SendResult::NotSent(_) => {
                assert!(!transmitted || unwritten, "LINK-2: {sequence:?}")
            }
            SendResult::Unknown(_)
            | SendResult::Ok(_)
            | SendResult::Error(_)
            | SendResult::NotLeader(_) => assert!(transmitted, "{sequence:?}"),
        }
    }
}

fn run_all(prefix: &[Input], length: u32) {
    for code in 0..ALPHABET.len().pow(length) {
        let mut pair = Pair::new(small_limits());
        let mut sequence = prefix.to_vec();
        let mut rest = code;
        for _ in 0..length {
            sequence.push(ALPHABET[rest % ALPHABET.len()]);
            rest /= ALPHABET.len();
        }
        for &input in &sequence {
            apply(&mut pair, input);
            check_bytes(&pair);
        }
        conclude(pair, &sequence);
    }
}

#[test]
fn every_sequence_of_four_inputs_from_the_start() {
    run_all(&[], 4);
}

#[test]
fn every_sequence_of_four_inputs_from_an_up_link_with_a_request() {
    run_all(
        &[
            Input::Request,
            Input::Connected,
            Input::HelloOk,
            Input::Request,
        ],
        4,
    );
}

#[test]
fn every_sequence_of_four_inputs_after_a_loss() {
    run_all(
        &[
            Input::Request,
            Input::Connected,
            Input::HelloOk,
            Input::Lost,
            Input::LongWait,
        ],
        4,
    );
}

proptest! {
    #[test]
    fn long_random_sequences(indices in prop::collection::vec(0usize..15, 1..120)) {
        let mut pair = Pair::new(small_limits());
        let sequence: Vec<_> = indices.iter().map(|&i| ALPHABET[i]).collect();
        for &input in &sequence {
            apply(&mut pair, input);
            check_bytes(&pair);
        }
        conclude(pair, &sequence);
    }
}

#[test]
fn a_request_waits_for_the_greeting_and_not_only_for_the_connection() {
    let mut pair = Pair::new(small_limits());
    let token = pair.request();
    assert_eq!((pair.dials, pair.link.waiting()), (1, 1));
    pair.connected();
    assert!(pair.hello_sent);
    assert_eq!(pair.link.phase(), LinkPhase::Greeting);
    assert!(pair.transmits.is_empty(), "connected is not up");
    pair.answer(HELLO_CORRELATION, hello_ok("b"));
    assert_eq!(pair.transmits.len(), 1);
    let id = pair.oldest().unwrap();
    pair.answer(id, Answer::PublishOk(9));
    assert_eq!(pair.result(token), Some(&SendResult::Ok(9)));
}

#[test]
fn a_certificate_refused_after_the_handshake_is_not_sent_and_waits_long() {
    let mut pair = Pair::new(small_limits());
    let token = pair.request();
    pair.connected();
    pair.closed(CloseCause::CertificateRefused);
    assert_eq!(pair.result(token), Some(&NOT_SENT_UNREACHABLE));
    assert_eq!(
        pair.reports,
        [LinkReport::NeverUp(HandshakeFailure::Closed(
            CloseCause::CertificateRefused
        ))]
    );
    assert_eq!(pair.link.counters().identity_refused, 1);
    for _ in 0..70 {
        pair.wait(Duration::from_millis(100));
        let token = pair.request();
        assert!(
            matches!(
                pair.result(token),
                Some(SendResult::NotSent(NotSentCause::Backoff { .. }))
            ),
            "no dial inside the window"
        );
    }
    assert_eq!(pair.dials, 1);
}

#[test]
fn few_dials_a_minute_to_a_peer_that_refuses_our_certificate() {
    let mut pair = Pair::new(small_limits());
    for _ in 0..600 {
        pair.request();
        if pair.link.phase() == LinkPhase::Connecting {
            pair.connected();
            pair.closed(CloseCause::CertificateRefused);
        }
        pair.wait(Duration::from_millis(100));
    }
    assert!((2..=5).contains(&pair.dials), "{} dials", pair.dials);
}

#[test]
fn the_wrong_broker_at_an_address_is_closed_and_reported() {
    let mut pair = Pair::new(small_limits());
    let token = pair.request();
    pair.connected();
    pair.answer(HELLO_CORRELATION, hello_ok("c"));
    assert_eq!(pair.result(token), Some(&NOT_SENT_UNREACHABLE));
    assert_eq!(pair.closes, [LinkClose::GreetingFailed]);
    assert!(matches!(
        pair.reports[..],
        [LinkReport::NeverUp(HandshakeFailure::WrongNode { .. })]
    ));
    // That address is not dialled again soon; another one is, at once.
    for _ in 0..70 {
        pair.request();
        pair.wait(Duration::from_millis(100));
    }
    assert_eq!(pair.dials, 1);
    pair.link.on_address_changed();
    pair.request();
    assert_eq!(pair.dials, 2);
}

#[test]
fn connecting_and_greeting_share_one_deadline() {
    for ms_before_connect in [500, 1999] {
        let mut pair = Pair::new(small_limits());
        let token = pair.request();
        pair.wait(Duration::from_millis(ms_before_connect));
        pair.connected();
        pair.wait(Duration::from_millis(1999 - ms_before_connect));
        assert_eq!(pair.result(token), None);
        pair.wait(Duration::from_millis(1));
        assert_eq!(pair.result(token), Some(&NOT_SENT_UNREACHABLE));
        assert_eq!(pair.closes, [LinkClose::GreetingFailed]);
    }
}

#[test]
fn a_lost_connection_ends_everything_on_it_at_once() {
    let mut pair = Pair::up(LinkLimits::default());
    let tokens: Vec<_> = (0..10).map(|_| pair.request()).collect();
    pair.closed(CloseCause::TimedOut);
    for token in tokens {
        assert_eq!(
            pair.result(token),
            Some(&SendResult::Unknown(UnknownCause::Disconnect))
        );
    }
    assert_eq!(
        pair.reports.last(),
        Some(&LinkReport::Lost {
            cause: CloseCause::TimedOut,
            unknown_requests: 10
        })
    );
}

#[test]
fn a_peer_that_comes_back_is_reached_after_a_short_window() {
    let mut pair = Pair::up(LinkLimits::default());
    pair.wait(Duration::from_secs(10));
    pair.closed(CloseCause::ClosedByPeer);
    pair.wait(Duration::from_millis(50));
    let token = pair.request();
    assert_eq!(pair.dials, 2);
    let old = ConnectionEpoch(pair.epoch.0 - 1);
    pair.link.on_closed(old, pair.now, CloseCause::TimedOut);
    pair.drain();
    assert_eq!(
        pair.link.phase(),
        LinkPhase::Connecting,
        "the old connection has no say"
    );
    pair.connected();
    pair.answer(HELLO_CORRELATION, hello_ok("b"));
    let id = pair.oldest().unwrap();
    pair.answer(id, Answer::PublishOk(1));
    assert_eq!(pair.result(token), Some(&SendResult::Ok(1)));
}

#[test]
fn a_timeout_is_unknown_and_its_late_answer_is_dropped() {
    let mut pair = Pair::up(LinkLimits::default());
    let token = pair.request();
    let id = pair.oldest().unwrap();
    pair.wait(Duration::from_secs(5));
    assert_eq!(
        pair.result(token),
        Some(&SendResult::Unknown(UnknownCause::Timeout))
    );
    pair.answer(id, Answer::PublishOk(1));
    assert_eq!(pair.link.late_answers(), 1);
    assert_eq!(pair.link.phase(), LinkPhase::Up);
}

#[test]
fn the_bounds_shed_at_once() {
    let mut pair = Pair::up(small_limits());
    pair.request();
    pair.request();
    let third = pair.request();
    let full = SendResult::NotSent(NotSentCause::InFlightFull);
    assert_eq!(pair.result(third), Some(&full));
    assert_eq!(pair.link.counters().shed, 1);

    let mut pair = Pair::up(LinkLimits {
        in_flight_bytes: 1000,
        ..LinkLimits::default()
    });
    let large = pair.request_of(5000, Family::Publish);
    assert_eq!(pair.result(large), None, "alone it may exceed the bound");
    let small = pair.request_of(1, Family::Publish);
    assert_eq!(pair.result(small), Some(&full));
    let id = pair.oldest().unwrap();
    pair.answer(id, Answer::PublishOk(1));
    let next = pair.request_of(1000, Family::Publish);
    assert_eq!(pair.result(next), None);
}

#[test]
fn waiting_requests_count_against_the_bound() {
    let mut pair = Pair::new(small_limits());
    pair.request();
    pair.request();
    let third = pair.request();
    assert_eq!(
        pair.result(third),
        Some(&SendResult::NotSent(NotSentCause::InFlightFull))
    );
}

#[test]
fn large_requests_do_not_share_a_stream_with_small_ones() {
    let mut pair = Pair::up(LinkLimits::default());
    pair.request_of(1 << 20, Family::Publish);
    pair.request_of(100, Family::Publish);
    let streams: Vec<_> = pair.transmits.iter().map(|(_, s, _)| *s).collect();
    assert_eq!(streams, [StreamSlot(2), StreamSlot(0)]);
}

#[test]
fn an_old_peer_is_remembered_for_the_connection_only() {
    let mut pair = Pair::up(LinkLimits::default());
    pair.request();
    let id = pair.oldest().unwrap();
    pair.answer(id, refused(PeerCode::UnsupportedKind));
    pair.request();
    assert_eq!(
        pair.transmits.last().map(|t| t.2),
        Some(ForwardKind::Legacy)
    );
    pair.closed(CloseCause::ClosedByPeer);
    pair.wait(Duration::from_secs(6));
    pair.bring_up();
    pair.request();
    assert_eq!(
        pair.transmits.last().map(|t| t.2),
        Some(ForwardKind::Authorized)
    );
}

#[test]
fn a_peer_that_cannot_read_a_request_is_left_after_its_answers() {
    let mut pair = Pair::up(LinkLimits::default());
    let unreadable = pair.request();
    let other = pair.request();
    let (first, second) = (pair.sent[0].1, pair.sent[1].1);
    pair.answer(first, refused(PeerCode::Malformed));
    assert!(matches!(
        pair.result(unreadable),
        Some(SendResult::Error(_))
    ));
    assert_eq!(pair.link.phase(), LinkPhase::Draining);
    let refused_now = pair.request();
    assert_eq!(
        pair.result(refused_now),
        Some(&SendResult::NotSent(NotSentCause::Draining))
    );
    pair.answer(second, Answer::PublishOk(4));
    assert_eq!(pair.result(other), Some(&SendResult::Ok(4)));
    assert_eq!(pair.closes, [LinkClose::LayoutDispute]);
    assert_eq!(pair.link.phase(), LinkPhase::Backoff);
}

#[test]
fn a_damaged_records_batch_does_not_cost_the_connection() {
    let mut pair = Pair::up(LinkLimits::default());
    pair.request_of(100, Family::ReplicateRecords);
    let id = pair.oldest().unwrap();
    let malformed = PeerError::bare(PeerCode::Malformed);
    pair.answer(id, Answer::ReplicateError(malformed.clone()));
    assert_eq!(pair.link.phase(), LinkPhase::Up);
    pair.request_of(100, Family::ReplicateControl);
    let id = pair.oldest().unwrap();
    pair.answer(id, Answer::ReplicateError(malformed));
    assert_eq!(pair.closes, [LinkClose::LayoutDispute]);
}

#[test]
fn an_answer_of_a_foreign_family_breaks_the_connection_off() {
    let mut pair = Pair::up(LinkLimits::default());
    let tokens = [pair.request(), pair.request()];
    let id = pair.oldest().unwrap();
    pair.answer(id, Answer::ReplicateOk(1));
    for token in tokens {
        assert_eq!(
            pair.result(token),
            Some(&SendResult::Unknown(UnknownCause::ProtocolViolation))
        );
    }
    assert_eq!(pair.closes, [LinkClose::ProtocolViolation]);
}

#[test]
fn an_idle_link_closes_and_a_used_one_does_not() {
    let mut pair = Pair::up(LinkLimits::default());
    pair.wait(Duration::from_secs(59));
    pair.request();
    let id = pair.oldest().unwrap();
    pair.answer(id, Answer::PublishOk(1));
    pair.wait(Duration::from_secs(59));
    assert_eq!(pair.link.phase(), LinkPhase::Up);
    pair.wait(Duration::from_secs(1));
    assert_eq!(pair.closes, [LinkClose::Idle]);
    assert_eq!(pair.link.phase(), LinkPhase::Idle);
    pair.request();
    assert_eq!(pair.dials, 2, "an idle close leaves no window behind");
}

#[test]
fn shutting_down_waits_for_answers_but_not_for_ever() {
    let mut pair = Pair::up(LinkLimits {
        request_timeout: Duration::from_secs(100),
        ..LinkLimits::default()
    });
    let token = pair.request();
    pair.link.shut_down(pair.now);
    pair.drain();
    assert_eq!(pair.link.phase(), LinkPhase::Draining);
    pair.wait(Duration::from_secs(5));
    assert_eq!(
        pair.result(token),
        Some(&SendResult::Unknown(UnknownCause::Timeout))
    );
    assert_eq!(pair.closes, [LinkClose::ShuttingDown]);
    assert_eq!(pair.link.phase(), LinkPhase::Retired);
    let refused = pair.request();
    assert_eq!(
        pair.result(refused),
        Some(&SendResult::NotSent(NotSentCause::Draining))
    );
}
