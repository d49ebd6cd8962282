//! A link to a peer: every short sequence of events against the invariants, and the cases that
//! matter in the field one by one.

mod cases;
mod sequences;

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
