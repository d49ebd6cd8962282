//! The state machine of one link.
//!
//! ```text
//! Idle --request--> Connecting --connected--> Greeting --HelloOk--> Up --idle--> Idle
//!                       |                        |                   |--layout dispute--> Draining --> Backoff
//!                       +------ failure ---------+                   +--lost--> Backoff
//!                                  v
//!                               Backoff --request after the window--> Connecting
//! any --shut_down--> Draining --> Retired
//! ```
//!
//! Invariants:
//! * LINK-1: every request handed in comes out as exactly one `Done`.
//! * LINK-2: `NotSent` only for a request no `Transmit` was given for, or that the driver said it
//!   never wrote.
//! * LINK-3: nothing is transmitted unless the link is up.
//! * LINK-4: when a connection ends, everything sent on it is done at once.

use std::collections::VecDeque;

use super::{
    Answer, ConnectionEpoch, LinkAction, LinkClose, LinkCounters, LinkLimits, LinkPhase,
    LinkReport, Request, StreamSlot, Streams,
};
use crate::ids::{CorrelationId, NodeId};
use crate::proto::backoff::{Backoff, Severity};
use crate::proto::correlation::{Completion, Family, Slots};
use crate::proto::handshake::{
    CloseCause, DiallerHandshake, DiallerStep, HandshakeFailure, HELLO_CORRELATION,
};
use crate::proto::outcome::{ForwardKind, NotSentCause, PeerCode, SendResult, UnknownCause};
use crate::proto::MonoTime;

#[derive(Debug)]
enum State {
    Idle,
    Connecting {
        deadline: MonoTime,
    },
    Greeting {
        handshake: DiallerHandshake,
    },
    Up {
        since: MonoTime,
        used: MonoTime,
    },
    Draining {
        deadline: MonoTime,
        up_since: MonoTime,
        reason: LinkClose,
    },
    Backoff {
        until: MonoTime,
    },
    Retired,
}

#[derive(Debug, Clone, Copy)]
struct InFlight<T> {
    token: T,
    family: Family,
    kind: ForwardKind,
    bytes: u32,
    stream: StreamSlot,
}

/// One core's link to one peer. `T` names a request, `R` is what a success carries.
#[derive(Debug)]
pub struct PeerLink<T, R> {
    peer: NodeId,
    limits: LinkLimits,
    state: State,
    epoch: ConnectionEpoch,
    backoff: Backoff,
    waiting: VecDeque<Request<T>>,
    waiting_bytes: u64,
    in_flight: Slots<InFlight<T>>,
    streams: Streams,
    /// The peer of this connection does not know the authorized kinds.
    legacy_only: bool,
    actions: VecDeque<LinkAction<T, R>>,
    counters: LinkCounters,
}

impl<T: Copy, R> PeerLink<T, R> {
    /// A link that has not dialled yet. `seed` spreads the redials of different brokers.
    pub fn new(peer: NodeId, limits: LinkLimits, seed: u64) -> Self {
        Self {
            peer,
            limits,
            state: State::Idle,
            epoch: ConnectionEpoch(0),
            backoff: Backoff::new(limits.backoff, seed),
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            in_flight: Slots::new(limits.in_flight),
            streams: Streams::new(limits.streams, limits.large_request_bytes),
            legacy_only: false,
            actions: VecDeque::new(),
            counters: LinkCounters::default(),
        }
    }

    /// The broker at the other end.
    pub fn peer(&self) -> &NodeId {
        &self.peer
    }

    /// Where the link stands.
    pub fn phase(&self) -> LinkPhase {
        match self.state {
            State::Idle => LinkPhase::Idle,
            State::Connecting { .. } => LinkPhase::Connecting,
            State::Greeting { .. } => LinkPhase::Greeting,
            State::Up { .. } => LinkPhase::Up,
            State::Draining { .. } => LinkPhase::Draining,
            State::Backoff { .. } => LinkPhase::Backoff,
            State::Retired => LinkPhase::Retired,
        }
    }

    /// Requests sent and not answered.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Requests waiting for the connection.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Answers that came after their request was done.
    pub fn late_answers(&self) -> u64 {
        self.in_flight.late_answers()
    }

    /// What the link has seen.
    pub fn counters(&self) -> LinkCounters {
        self.counters
    }

    /// The stream a request in flight travels on, for pinning what depends on it.
    pub fn stream_of(&self, correlation: CorrelationId) -> Option<StreamSlot> {
        self.in_flight.get(correlation).map(|sent| sent.stream)
    }

    /// When [`Self::on_time`] has something to do.
    pub fn next_deadline(&self) -> Option<MonoTime> {
        let of_state = match &self.state {
            State::Idle | State::Backoff { .. } | State::Retired => None,
            State::Connecting { deadline } | State::Draining { deadline, .. } => Some(*deadline),
            State::Greeting { handshake } => handshake.deadline(),
            State::Up { used, .. } if self.in_flight.is_empty() => {
                Some(*used + self.limits.idle_close)
            }
            State::Up { .. } => None,
        };
        match (of_state, self.in_flight.next_deadline()) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// The next thing to do. Call until `None` after every input.
    pub fn poll_action(&mut self) -> Option<LinkAction<T, R>> {
        self.actions.pop_front()
    }

    /// Dials without a request, unless a connection exists, is being made, or may not be made yet.
    pub fn connect(&mut self, now: MonoTime) {
        match self.state {
            State::Idle => self.dial(now),
            State::Backoff { until } if now >= until => self.dial(now),
            State::Backoff { .. }
            | State::Connecting { .. }
            | State::Greeting { .. }
            | State::Up { .. }
            | State::Draining { .. }
            | State::Retired => {}
        }
    }

    /// Takes a request: sends it, keeps it for the connection being made, or refuses it.
    pub fn request(&mut self, now: MonoTime, request: Request<T>) {
        match self.state {
            State::Backoff { until } if now < until => {
                self.counters.refused_in_backoff += 1;
                self.not_sent(request.token, request.kind, NotSentCause::Backoff { until });
                return;
            }
            State::Draining { .. } | State::Retired => {
                self.not_sent(request.token, request.kind, NotSentCause::Draining);
                return;
            }
            State::Idle
            | State::Connecting { .. }
            | State::Greeting { .. }
            | State::Up { .. }
            | State::Backoff { .. } => {}
        }
        if !self.has_room(request.bytes) {
            self.counters.shed += 1;
            self.not_sent(request.token, request.kind, NotSentCause::InFlightFull);
            return;
        }
        match &mut self.state {
            State::Up { used, .. } => {
                *used = now;
                self.transmit(now, request);
            }
            State::Connecting { .. } | State::Greeting { .. } => self.enqueue(request),
            State::Idle | State::Backoff { .. } => {
                self.enqueue(request);
                self.dial(now);
            }
            State::Draining { .. } | State::Retired => {}
        }
    }

    /// The transport has connected, TLS included, and stream 0 is open. The link is not up yet.
    pub fn on_connected(&mut self, epoch: ConnectionEpoch, now: MonoTime) {
        match self.state {
            State::Connecting { deadline } if epoch == self.epoch => {
                let handshake = DiallerHandshake::new(self.peer.clone(), now, deadline.since(now));
                self.state = State::Greeting { handshake };
                self.actions.push_back(LinkAction::SendHello {
                    correlation: HELLO_CORRELATION,
                });
            }
            State::Connecting { .. }
            | State::Idle
            | State::Greeting { .. }
            | State::Up { .. }
            | State::Draining { .. }
            | State::Backoff { .. }
            | State::Retired => {}
        }
    }

    /// An answer arrived on any stream.
    pub fn on_answer(
        &mut self,
        epoch: ConnectionEpoch,
        now: MonoTime,
        correlation: CorrelationId,
        answer: Answer<R>,
    ) {
        if epoch != self.epoch {
            return;
        }
        match &mut self.state {
            State::Greeting { handshake } => {
                let step = greeting_answer(handshake, correlation, &answer);
                self.after_greeting_step(now, step);
            }
            State::Up { used, .. } => {
                *used = now;
                self.settle(now, correlation, answer);
            }
            State::Draining { .. } => self.settle(now, correlation, answer),
            State::Idle | State::Connecting { .. } | State::Backoff { .. } | State::Retired => {}
        }
    }

    /// The peer sent something that cannot be read as an answer.
    pub fn on_unreadable(&mut self, epoch: ConnectionEpoch, now: MonoTime) {
        if epoch != self.epoch {
            return;
        }
        match &mut self.state {
            State::Greeting { handshake } => {
                let step = handshake.on_unreadable();
                self.after_greeting_step(now, step);
            }
            State::Up { .. } | State::Draining { .. } => self.break_off(now),
            State::Idle | State::Connecting { .. } | State::Backoff { .. } | State::Retired => {}
        }
    }

    /// The driver gave up on a request before one byte of it was written.
    pub fn on_unwritten(
        &mut self,
        epoch: ConnectionEpoch,
        now: MonoTime,
        correlation: CorrelationId,
    ) {
        if epoch != self.epoch {
            return;
        }
        if let Some(sent) = self.in_flight.take(correlation) {
            self.streams.remove(sent.stream, sent.bytes);
            self.not_sent(sent.token, sent.kind, NotSentCause::Unreachable);
            self.finish_drain_when_empty(now);
        }
    }

    /// The connection is gone. Call [`Self::on_unwritten`] first for what was never written.
    pub fn on_closed(&mut self, epoch: ConnectionEpoch, now: MonoTime, cause: CloseCause) {
        if epoch != self.epoch {
            return;
        }
        match &mut self.state {
            State::Connecting { .. } => self.never_up(now, HandshakeFailure::Closed(cause), false),
            State::Greeting { handshake } => {
                let step = handshake.on_closed(cause);
                self.after_greeting_step(now, step);
            }
            State::Up { since, .. } => {
                let since = *since;
                self.lose(now, since, cause, UnknownCause::Disconnect);
            }
            State::Draining {
                up_since, reason, ..
            } => {
                let (since, reason) = (*up_since, *reason);
                self.fail_in_flight(UnknownCause::Disconnect);
                self.after_drain(now, since, reason);
            }
            State::Idle | State::Backoff { .. } | State::Retired => {}
        }
    }

    /// Time passed.
    pub fn on_time(&mut self, now: MonoTime) {
        self.expire(now);
        match &mut self.state {
            State::Connecting { deadline } if now >= *deadline => {
                self.never_up(now, HandshakeFailure::TimedOut, true);
            }
            State::Greeting { handshake } => {
                let step = handshake.on_time(now);
                self.after_greeting_step(now, step);
            }
            State::Up { since, used }
                if self.in_flight.is_empty() && now.since(*used) >= self.limits.idle_close =>
            {
                let since = *since;
                self.close(LinkClose::Idle);
                self.backoff.on_link_closed(now, since);
                self.state = State::Idle;
            }
            State::Draining {
                deadline,
                up_since,
                reason,
            } if now >= *deadline => {
                let (since, reason) = (*up_since, *reason);
                self.fail_in_flight(UnknownCause::Timeout);
                self.close(reason);
                self.after_drain(now, since, reason);
            }
            State::Connecting { .. }
            | State::Up { .. }
            | State::Draining { .. }
            | State::Idle
            | State::Backoff { .. }
            | State::Retired => {}
        }
        self.finish_drain_when_empty(now);
    }

    /// Takes no more requests, waits for answers, then closes for good.
    pub fn shut_down(&mut self, now: MonoTime) {
        match self.state {
            State::Connecting { .. } | State::Greeting { .. } => {
                self.close(LinkClose::ShuttingDown);
                self.fail_waiting(NotSentCause::Draining);
                self.state = State::Retired;
            }
            State::Up { since, .. } => self.drain(now, since, LinkClose::ShuttingDown),
            State::Draining {
                deadline, up_since, ..
            } => {
                self.state = State::Draining {
                    deadline,
                    up_since,
                    reason: LinkClose::ShuttingDown,
                };
            }
            State::Idle | State::Backoff { .. } | State::Retired => self.state = State::Retired,
        }
        self.finish_drain_when_empty(now);
    }

    fn has_room(&self, bytes: u32) -> bool {
        let held = self.waiting.len() + self.in_flight.len();
        let held_bytes = self.waiting_bytes + self.streams.total_bytes();
        held < self.limits.in_flight
            && (held == 0 || held_bytes + u64::from(bytes) <= self.limits.in_flight_bytes)
    }

    fn enqueue(&mut self, request: Request<T>) {
        self.waiting_bytes += u64::from(request.bytes);
        self.waiting.push_back(request);
    }

    fn dial(&mut self, now: MonoTime) {
        self.epoch = ConnectionEpoch(self.epoch.0.wrapping_add(1));
        self.legacy_only = false;
        self.counters.dials += 1;
        self.state = State::Connecting {
            deadline: now + self.limits.connect_timeout,
        };
        self.actions
            .push_back(LinkAction::Dial { epoch: self.epoch });
    }

    fn transmit(&mut self, now: MonoTime, request: Request<T>) {
        let kind = match self.legacy_only {
            true => ForwardKind::Legacy,
            false => request.kind,
        };
        let stream = self.streams.place(request.bytes, request.pin);
        let sent = InFlight {
            token: request.token,
            family: request.family,
            kind,
            bytes: request.bytes,
            stream,
        };
        let deadline = now + self.limits.request_timeout;
        match self.in_flight.reserve(sent, request.family, deadline) {
            Ok(correlation) => self.actions.push_back(LinkAction::Transmit {
                token: request.token,
                stream,
                correlation,
                kind,
            }),
            Err(_) => {
                self.streams.remove(stream, request.bytes);
                self.counters.shed += 1;
                self.not_sent(request.token, kind, NotSentCause::InFlightFull);
            }
        }
    }

    fn after_greeting_step(&mut self, now: MonoTime, step: DiallerStep) {
        match step {
            DiallerStep::Wait => {}
            DiallerStep::Up => {
                self.counters.came_up += 1;
                self.state = State::Up {
                    since: now,
                    used: now,
                };
                self.actions.push_back(LinkAction::Report(LinkReport::Up));
                self.waiting_bytes = 0;
                for request in std::mem::take(&mut self.waiting) {
                    self.transmit(now, request);
                }
            }
            DiallerStep::Failed(failure) => {
                let must_close = !matches!(failure, HandshakeFailure::Closed(_));
                self.never_up(now, failure, must_close);
            }
        }
    }

    fn settle(&mut self, now: MonoTime, correlation: CorrelationId, answer: Answer<R>) {
        match self.in_flight.complete(correlation, answer.shape()) {
            Completion::Late => {}
            Completion::Violation(sent) => {
                self.streams.remove(sent.stream, sent.bytes);
                self.done(
                    sent.token,
                    sent.kind,
                    SendResult::Unknown(UnknownCause::ProtocolViolation),
                );
                self.break_off(now);
            }
            Completion::Matched(sent) => {
                self.streams.remove(sent.stream, sent.bytes);
                self.deliver(now, sent, answer);
                self.finish_drain_when_empty(now);
            }
        }
    }

    fn deliver(&mut self, now: MonoTime, sent: InFlight<T>, answer: Answer<R>) {
        let result = match answer {
            Answer::PublishOk(reply) | Answer::CacheOk(reply) | Answer::ReplicateOk(reply) => {
                SendResult::Ok(reply)
            }
            Answer::NotLeader(redirect) => SendResult::NotLeader(redirect),
            Answer::PublishError(error)
            | Answer::CacheError(error)
            | Answer::ReplicateError(error) => {
                self.note_refusal(now, &sent, error.code);
                SendResult::Error(error)
            }
            // No family a request can have allows it; the table has said so already.
            Answer::HelloOk { .. } => SendResult::Unknown(UnknownCause::ProtocolViolation),
        };
        self.done(sent.token, sent.kind, result);
    }

    fn note_refusal(&mut self, now: MonoTime, sent: &InFlight<T>, code: PeerCode) {
        match (code, sent.family) {
            (PeerCode::UnsupportedKind, Family::Publish | Family::Cache) => {
                self.legacy_only |= sent.kind == ForwardKind::Authorized;
            }
            // A records batch may be damaged on its way and is sent again on this connection;
            // anything else unreadable means the two sides disagree about a layout.
            (PeerCode::Malformed, Family::ReplicateRecords) => {}
            (PeerCode::Malformed, _) => match self.state {
                State::Up { since, .. } => self.drain(now, since, LinkClose::LayoutDispute),
                State::Idle
                | State::Connecting { .. }
                | State::Greeting { .. }
                | State::Draining { .. }
                | State::Backoff { .. }
                | State::Retired => {}
            },
            (_, _) => {}
        }
    }

    /// The peer does not follow the protocol: nothing more it says on this connection counts.
    fn break_off(&mut self, now: MonoTime) {
        self.close(LinkClose::ProtocolViolation);
        match self.state {
            State::Up { since, .. } => self.lose(
                now,
                since,
                CloseCause::ClosedLocally,
                UnknownCause::ProtocolViolation,
            ),
            State::Draining {
                up_since, reason, ..
            } => {
                self.fail_in_flight(UnknownCause::ProtocolViolation);
                self.after_drain(now, up_since, reason);
            }
            State::Idle
            | State::Connecting { .. }
            | State::Greeting { .. }
            | State::Backoff { .. }
            | State::Retired => {}
        }
    }

    fn lose(&mut self, now: MonoTime, since: MonoTime, cause: CloseCause, unknown: UnknownCause) {
        self.counters.lost += 1;
        let unknown_requests = self.in_flight.len();
        self.fail_in_flight(unknown);
        let until = match cause.severity() {
            Severity::Passing => self.backoff.on_link_lost(now, since),
            Severity::Refused => self.backoff.on_failure(now, Severity::Refused),
        };
        self.state = State::Backoff { until };
        self.actions.push_back(LinkAction::Report(LinkReport::Lost {
            cause,
            unknown_requests,
        }));
    }

    fn never_up(&mut self, now: MonoTime, failure: HandshakeFailure, must_close: bool) {
        if must_close {
            self.close(LinkClose::GreetingFailed);
        }
        let severity = failure.severity();
        self.counters.never_up += 1;
        self.counters.identity_refused += u64::from(severity == Severity::Refused);
        let until = self.backoff.on_failure(now, severity);
        self.state = State::Backoff { until };
        self.actions
            .push_back(LinkAction::Report(LinkReport::NeverUp(failure)));
        self.fail_waiting(NotSentCause::Unreachable);
    }

    fn drain(&mut self, now: MonoTime, since: MonoTime, reason: LinkClose) {
        self.state = State::Draining {
            deadline: now + self.limits.drain_timeout,
            up_since: since,
            reason,
        };
    }

    fn finish_drain_when_empty(&mut self, now: MonoTime) {
        match self.state {
            State::Draining {
                up_since, reason, ..
            } if self.in_flight.is_empty() => {
                self.close(reason);
                self.after_drain(now, up_since, reason);
            }
            State::Draining { .. }
            | State::Idle
            | State::Connecting { .. }
            | State::Greeting { .. }
            | State::Up { .. }
            | State::Backoff { .. }
            | State::Retired => {}
        }
    }

    fn after_drain(&mut self, now: MonoTime, up_since: MonoTime, reason: LinkClose) {
        self.state = match reason {
            LinkClose::ShuttingDown => State::Retired,
            LinkClose::Idle => {
                self.backoff.on_link_closed(now, up_since);
                State::Idle
            }
            // Dialling again at once would meet the same dispute.
            LinkClose::GreetingFailed | LinkClose::LayoutDispute | LinkClose::ProtocolViolation => {
                State::Backoff {
                    until: self.backoff.on_link_lost(now, up_since),
                }
            }
        };
    }

    fn expire(&mut self, now: MonoTime) {
        let streams = &mut self.streams;
        let actions = &mut self.actions;
        for (_, sent) in self.in_flight.expire(now) {
            self.counters.timeouts += 1;
            streams.remove(sent.stream, sent.bytes);
            actions.push_back(LinkAction::Done {
                token: sent.token,
                sent_as: sent.kind,
                result: SendResult::Unknown(UnknownCause::Timeout),
            });
        }
    }

    fn fail_in_flight(&mut self, cause: UnknownCause) {
        let streams = &mut self.streams;
        let actions = &mut self.actions;
        for (_, sent) in self.in_flight.fail_all() {
            streams.remove(sent.stream, sent.bytes);
            actions.push_back(LinkAction::Done {
                token: sent.token,
                sent_as: sent.kind,
                result: SendResult::Unknown(cause),
            });
        }
    }

    fn fail_waiting(&mut self, cause: NotSentCause) {
        self.waiting_bytes = 0;
        for request in std::mem::take(&mut self.waiting) {
            self.not_sent(request.token, request.kind, cause);
        }
    }

    fn close(&mut self, reason: LinkClose) {
        self.actions.push_back(LinkAction::Close {
            epoch: self.epoch,
            reason,
        });
    }

    fn not_sent(&mut self, token: T, sent_as: ForwardKind, cause: NotSentCause) {
        self.done(token, sent_as, SendResult::NotSent(cause));
    }

    fn done(&mut self, token: T, sent_as: ForwardKind, result: SendResult<R>) {
        self.actions.push_back(LinkAction::Done {
            token,
            sent_as,
            result,
        });
    }
}

fn greeting_answer<R>(
    handshake: &mut DiallerHandshake,
    correlation: CorrelationId,
    answer: &Answer<R>,
) -> DiallerStep {
    match answer {
        Answer::HelloOk { node_id } => handshake.on_hello_ok(correlation, node_id),
        Answer::PublishError(error) | Answer::CacheError(error) | Answer::ReplicateError(error) => {
            handshake.on_answer(correlation, answer.shape(), &error.detail)
        }
        Answer::PublishOk(_)
        | Answer::CacheOk(_)
        | Answer::ReplicateOk(_)
        | Answer::NotLeader(_) => handshake.on_answer(correlation, answer.shape(), ""),
    }
}
