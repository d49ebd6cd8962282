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
    Answer, ConnectionEpoch, LinkAction, LinkClose, LinkCounters, LinkLimits, LinkPhase, Request,
    StreamSlot, Streams,
};
use crate::ids::{CorrelationId, NodeId};
use crate::proto::backoff::Backoff;
use crate::proto::correlation::{Family, Slots};
use crate::proto::handshake::{
    CloseCause, DiallerHandshake, DiallerStep, HandshakeFailure, HELLO_CORRELATION,
};
use crate::proto::outcome::{ForwardKind, NotSentCause, UnknownCause};
use crate::proto::MonoTime;

#[derive(Debug)]
pub(super) enum State {
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
pub(super) struct InFlight<T> {
    pub(super) token: T,
    pub(super) family: Family,
    pub(super) kind: ForwardKind,
    pub(super) bytes: u32,
    pub(super) stream: StreamSlot,
}

/// One core's link to one peer. `T` names a request, `R` is what a success carries.
#[derive(Debug)]
pub struct PeerLink<T, R> {
    pub(super) peer: NodeId,
    pub(super) limits: LinkLimits,
    pub(super) state: State,
    pub(super) epoch: ConnectionEpoch,
    pub(super) backoff: Backoff,
    pub(super) waiting: VecDeque<Request<T>>,
    pub(super) waiting_bytes: u64,
    pub(super) in_flight: Slots<InFlight<T>>,
    pub(super) streams: Streams,
    /// The peer of this connection does not know the authorized kinds.
    pub(super) legacy_only: bool,
    pub(super) actions: VecDeque<LinkAction<T, R>>,
    pub(super) counters: LinkCounters,
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

    /// Inside the backoff window: when the peer may be dialled again.
    pub fn retry_at(&self) -> Option<MonoTime> {
        match self.state {
            State::Backoff { until } => Some(until),
            State::Idle
            | State::Connecting { .. }
            | State::Greeting { .. }
            | State::Up { .. }
            | State::Draining { .. }
            | State::Retired => None,
        }
    }

    /// Failures since the link last was up for long enough.
    pub fn failures(&self) -> u32 {
        self.backoff.failures()
    }

    /// Requests sent and not answered.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Requests waiting for the connection.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Bytes of all requests accepted and not done.
    pub fn held_bytes(&self) -> u64 {
        self.waiting_bytes + self.streams.total_bytes()
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

    /// Whether [`Self::poll_action`] has something.
    pub fn has_actions(&self) -> bool {
        !self.actions.is_empty()
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

    /// The catalog names another address for the peer: what failed at the old one says nothing about
    /// it, so the next request dials at once. A connection that is up stays.
    pub fn on_address_changed(&mut self) {
        match self.state {
            State::Backoff { .. } => {
                self.backoff.forget();
                self.state = State::Idle;
            }
            State::Idle => self.backoff.forget(),
            State::Connecting { .. }
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
        | Answer::NotLeader(_)
        | Answer::NotLeaderUnnamed => handshake.on_answer(correlation, answer.shape(), ""),
    }
}
