//! The steps a [`PeerLink`] takes; `link` decides which.
//!
//! Each leaves the link in a state in which LINK-1 to LINK-4 hold.

use super::link::{InFlight, PeerLink, State};
use super::{Answer, ConnectionEpoch, LinkAction, LinkClose, LinkReport, Request};
use crate::ids::CorrelationId;
use crate::proto::backoff::Severity;
use crate::proto::correlation::{Completion, Family};
use crate::proto::handshake::{CloseCause, DiallerStep, HandshakeFailure};
use crate::proto::outcome::{
    ForwardKind, NotSentCause, PeerCode, PeerError, SendResult, UnknownCause,
};
use crate::proto::MonoTime;

impl<T: Copy, R> PeerLink<T, R> {
    pub(super) fn has_room(&self, bytes: u32) -> bool {
        let held = self.waiting.len() + self.in_flight.len();
        held < self.limits.in_flight
            && (held == 0 || self.held_bytes() + u64::from(bytes) <= self.limits.in_flight_bytes)
    }

    pub(super) fn enqueue(&mut self, request: Request<T>) {
        self.waiting_bytes += u64::from(request.bytes);
        self.waiting.push_back(request);
    }

    pub(super) fn dial(&mut self, now: MonoTime) {
        self.epoch = ConnectionEpoch(self.epoch.0.wrapping_add(1));
        self.legacy_only = false;
        self.counters.dials += 1;
        self.state = State::Connecting {
            deadline: now + self.limits.connect_timeout,
        };
        self.actions
            .push_back(LinkAction::Dial { epoch: self.epoch });
    }

    pub(super) fn transmit(&mut self, now: MonoTime, request: Request<T>) {
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

    pub(super) fn after_greeting_step(&mut self, now: MonoTime, step: DiallerStep) {
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

    pub(super) fn settle(&mut self, now: MonoTime, correlation: CorrelationId, answer: Answer<R>) {
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

    pub(super) fn deliver(&mut self, now: MonoTime, sent: InFlight<T>, answer: Answer<R>) {
        let result = match answer {
            Answer::PublishOk(reply) | Answer::CacheOk(reply) | Answer::ReplicateOk(reply) => {
                SendResult::Ok(reply)
            }
            Answer::NotLeader(redirect) => SendResult::NotLeader(redirect),
            Answer::NotLeaderUnnamed => SendResult::Error(PeerError::bare(PeerCode::Unavailable)),
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

    pub(super) fn note_refusal(&mut self, now: MonoTime, sent: &InFlight<T>, code: PeerCode) {
        let is_forward = matches!(sent.family, Family::Publish | Family::Cache);
        match code {
            PeerCode::UnsupportedKind => {
                self.legacy_only |= is_forward && sent.kind == ForwardKind::Authorized;
            }
            // A records batch may be damaged on its way and is sent again on this connection; a
            // cache operation is answered so for its value (a sum out of range), which a client
            // chooses and must not cost the link. Anything else unreadable means that the two
            // sides disagree about a layout.
            PeerCode::Malformed
                if matches!(sent.family, Family::ReplicateRecords | Family::Cache) => {}
            PeerCode::Malformed => {
                if let State::Up { since, .. } = self.state {
                    self.drain(now, since, LinkClose::LayoutDispute);
                }
            }
            PeerCode::StaleRoute
            | PeerCode::Unavailable
            | PeerCode::Unauthorized
            | PeerCode::Overload
            | PeerCode::ProtocolVersion
            | PeerCode::StorageFailed
            | PeerCode::LogGap
            | PeerCode::LogConflict
            | PeerCode::FencedEpoch => {}
        }
    }

    /// The peer does not follow the protocol: nothing more it says on this connection counts.
    pub(super) fn break_off(&mut self, now: MonoTime) {
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

    pub(super) fn lose(
        &mut self,
        now: MonoTime,
        since: MonoTime,
        cause: CloseCause,
        unknown: UnknownCause,
    ) {
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

    pub(super) fn never_up(&mut self, now: MonoTime, failure: HandshakeFailure, must_close: bool) {
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

    pub(super) fn drain(&mut self, now: MonoTime, since: MonoTime, reason: LinkClose) {
        self.state = State::Draining {
            deadline: now + self.limits.drain_timeout,
            up_since: since,
            reason,
        };
    }

    pub(super) fn finish_drain_when_empty(&mut self, now: MonoTime) {
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

    pub(super) fn after_drain(&mut self, now: MonoTime, up_since: MonoTime, reason: LinkClose) {
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

    pub(super) fn expire(&mut self, now: MonoTime) {
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

    pub(super) fn fail_in_flight(&mut self, cause: UnknownCause) {
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

    pub(super) fn fail_waiting(&mut self, cause: NotSentCause) {
        self.waiting_bytes = 0;
        for request in std::mem::take(&mut self.waiting) {
            self.not_sent(request.token, request.kind, cause);
        }
    }

    pub(super) fn close(&mut self, reason: LinkClose) {
        self.actions.push_back(LinkAction::Close {
            epoch: self.epoch,
            reason,
        });
    }

    pub(super) fn not_sent(&mut self, token: T, sent_as: ForwardKind, cause: NotSentCause) {
        self.done(token, sent_as, SendResult::NotSent(cause));
    }

    pub(super) fn done(&mut self, token: T, sent_as: ForwardKind, result: SendResult<R>) {
        self.actions.push_back(LinkAction::Done {
            token,
            sent_as,
            result,
        });
    }
}
