//! The life of one forwarded request: which broker to ask, when to ask again, when to stop.
//!
//! The retry table of the internal protocol. It does not send, route or encode: it says what to
//! do next and is told what came of it. A target that is this very broker (a redirect may name
//! us) is reported like any other; the driver puts it through its own ownership check.
//!
//! Invariants:
//! * FWD-1: exactly one [`Step::Finish`] per request, and nothing after it.
//! * FWD-2: after an attempt that may have been applied, a publish, a put or an add is never sent
//!   again, and no later answer turns it into "not applied".
//! * FWD-3: at most [`ForwardLimits::max_attempts`] attempts, none begun after the span and what
//!   owners used of the hold allowance.
//! * FWD-4: a redirect to a (broker, generation) already sent to is never followed.

use std::time::Duration;

use super::outcome::{
    ForwardKind, IndeterminateCause, NotLeader, NotSentCause, Outcome, PeerCode, PeerError,
    Refused, SendResult, Target, UnknownCause,
};
use super::MonoTime;

/// What is being forwarded; decides whether it may be sent twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ForwardOp {
    Publish,
    CachePut,
    CacheGet,
    CacheDelete,
    CounterAdd,
    CounterGet,
}

impl ForwardOp {
    /// Every operation.
    pub const ALL: [ForwardOp; 6] = [
        Self::Publish,
        Self::CachePut,
        Self::CacheGet,
        Self::CacheDelete,
        Self::CounterAdd,
        Self::CounterGet,
    ];

    /// Whether sending it again after a lost answer lands on the same state.
    pub const fn is_resendable(self) -> bool {
        match self {
            Self::CacheGet | Self::CacheDelete | Self::CounterGet => true,
            Self::Publish | Self::CachePut | Self::CounterAdd => false,
        }
    }

    /// Whether it changes anything; a read is never "applied".
    pub const fn is_write(self) -> bool {
        match self {
            Self::Publish | Self::CachePut | Self::CacheDelete | Self::CounterAdd => true,
            Self::CacheGet | Self::CounterGet => false,
        }
    }
}

/// The bounds of one forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForwardLimits {
    /// Attempts in all: redirects, the legacy fallback and attempts that were shed count.
    pub max_attempts: u8,
    /// No attempt begins later than this after the first, not counting `hold_allowance`.
    pub span: Duration,
    /// An owner may hold a request while its shard moves, and then refuse it. The time owners
    /// took to answer is added to the span, up to this in all.
    pub hold_allowance: Duration,
    /// The first wait before asking the same owner again; doubles with each wait.
    pub first_wait: Duration,
}

impl Default for ForwardLimits {
    fn default() -> Self {
        Self {
            max_attempts: 5,
            span: Duration::from_millis(250),
            hold_allowance: Duration::from_secs(2),
            first_wait: Duration::from_millis(10),
        }
    }
}

/// What to do next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step<R> {
    /// Send the request, resolved for `target`, and report with [`Forward::on_result`].
    Send { target: Target, kind: ForwardKind },
    /// Call [`Forward::on_time`] at this time.
    WaitUntil(MonoTime),
    /// The one terminal outcome.
    Finish(Outcome<R>),
    /// The input has no meaning in this state (a repeated result, a late timer): nothing to do.
    Nothing,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Sending,
    Waiting { until: MonoTime },
    Finished,
}

/// One forwarded request.
#[derive(Debug, Clone)]
pub struct Forward {
    op: ForwardOp,
    limits: ForwardLimits,
    deadline: MonoTime,
    hold_left: Duration,
    sent_at: MonoTime,
    target: Target,
    kind: ForwardKind,
    phase: Phase,
    attempts: u8,
    waits: u8,
    legacy_tried: bool,
    /// Every (broker, generation) the request was written to.
    visited: Vec<Target>,
    /// Set once an attempt of a write may have been applied.
    doubt: Option<UnknownCause>,
    /// What the request comes to if the budget ends while waiting.
    last: Option<Refused>,
}

impl Forward {
    /// Begins a forward to the owner the route named; the first step is always a send.
    pub fn start<R>(
        op: ForwardOp,
        target: Target,
        now: MonoTime,
        limits: ForwardLimits,
    ) -> (Self, Step<R>) {
        let forward = Self {
            op,
            limits,
            deadline: now + limits.span,
            hold_left: limits.hold_allowance,
            sent_at: now,
            target: target.clone(),
            kind: ForwardKind::Authorized,
            phase: Phase::Sending,
            attempts: 1,
            waits: 0,
            legacy_tried: false,
            visited: Vec::new(),
            doubt: None,
            last: None,
        };
        let kind = forward.kind;
        (forward, Step::Send { target, kind })
    }

    /// The operation being forwarded.
    pub fn op(&self) -> ForwardOp {
        self.op
    }

    /// The broker asked last.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// Attempts begun so far.
    pub fn attempts(&self) -> u8 {
        self.attempts
    }

    /// Whether the terminal outcome has been given.
    pub fn is_finished(&self) -> bool {
        self.phase == Phase::Finished
    }

    /// What the attempt came to. `sent_as` is the layout that was really used: a link that
    /// remembers an old peer sends the legacy one at once.
    pub fn on_result<R>(
        &mut self,
        now: MonoTime,
        sent_as: ForwardKind,
        result: SendResult<R>,
    ) -> Step<R> {
        match self.phase {
            Phase::Finished | Phase::Waiting { .. } => return Step::Nothing,
            Phase::Sending => {}
        }
        match &result {
            SendResult::NotSent(_) | SendResult::Ok(_) => {}
            SendResult::NotLeader(_) | SendResult::Error(_) | SendResult::Unknown(_) => {
                self.remember_visit();
                self.allow_hold(now);
            }
        }
        match result {
            SendResult::Ok(reply) => self.finish(Outcome::Done {
                reply,
                owner: self.target.clone(),
            }),
            SendResult::NotSent(cause) => self.after_not_sent(now, cause),
            SendResult::NotLeader(answer) => self.after_not_leader(now, answer),
            SendResult::Error(error) => self.after_error(now, sent_as, error),
            SendResult::Unknown(cause) => self.after_unknown(now, cause),
        }
    }

    /// The wait is over. `current` is where the route points now, if the caller knows: a newer
    /// generation replaces the target, an equal or older one changes nothing.
    pub fn on_time<R>(&mut self, now: MonoTime, current: Option<&Target>) -> Step<R> {
        match self.phase {
            Phase::Finished | Phase::Sending => Step::Nothing,
            Phase::Waiting { until } if now < until => Step::WaitUntil(until),
            Phase::Waiting { .. } => {
                if now > self.deadline {
                    return self.give_up();
                }
                if let Some(newer) = current {
                    if newer.generation > self.target.generation && !self.visited.contains(newer) {
                        self.target = newer.clone();
                        self.kind = ForwardKind::Authorized;
                    }
                }
                self.send(now)
            }
        }
    }

    /// The catalog moved the shard while the request waits: asks the new owner at once.
    pub fn on_route_changed<R>(&mut self, now: MonoTime, current: &Target) -> Step<R> {
        match self.phase {
            Phase::Waiting { .. } if current.generation > self.target.generation => {
                self.phase = Phase::Waiting { until: now };
                self.on_time(now, Some(current))
            }
            Phase::Waiting { .. } | Phase::Sending | Phase::Finished => Step::Nothing,
        }
    }

    /// The attempt just asked for was not made, because a later request of the same client stream may have
    /// been applied meanwhile: the refusal before it is the outcome.
    pub fn on_overtaken<R>(&mut self) -> Step<R> {
        match self.phase {
            Phase::Sending => {
                let redirect = Refused::RedirectsExhausted(self.target.clone());
                self.last.get_or_insert(redirect);
                self.give_up()
            }
            Phase::Waiting { .. } | Phase::Finished => Step::Nothing,
        }
    }

    fn after_not_sent<R>(&mut self, now: MonoTime, cause: NotSentCause) -> Step<R> {
        self.last = Some(Refused::NotSent(cause));
        match cause {
            NotSentCause::Backoff { until } => self.wait(now, until),
            NotSentCause::Unreachable
            | NotSentCause::InFlightFull
            | NotSentCause::Draining
            | NotSentCause::UnknownPeer => self.wait(now, now),
            NotSentCause::Unencodable => self.give_up(),
        }
    }

    fn after_not_leader<R>(&mut self, now: MonoTime, answer: NotLeader) -> Step<R> {
        if answer.owner.generation < self.target.generation {
            // The owner of an older generation cannot correct a newer route: the peer lags.
            return self.retry_same(now, PeerError::bare(PeerCode::StaleRoute));
        }
        if self.visited.contains(&answer.owner) {
            self.last = Some(Refused::RedirectLoop(answer.owner));
            return self.give_up();
        }
        if self.attempts >= self.limits.max_attempts || now > self.deadline {
            self.last = Some(Refused::RedirectsExhausted(answer.owner));
            return self.give_up();
        }
        self.target = answer.owner;
        self.kind = ForwardKind::Authorized;
        self.send(now)
    }

    fn after_error<R>(&mut self, now: MonoTime, sent_as: ForwardKind, error: PeerError) -> Step<R> {
        match error.code {
            PeerCode::StaleRoute | PeerCode::Unavailable | PeerCode::Overload => {
                self.retry_same(now, error)
            }
            PeerCode::Unauthorized | PeerCode::ProtocolVersion | PeerCode::Malformed => {
                self.last = Some(Refused::Peer(error));
                self.give_up()
            }
            PeerCode::UnsupportedKind => self.after_unsupported(now, sent_as, error),
            PeerCode::StorageFailed => {
                self.finish(Outcome::Indeterminate(IndeterminateCause::StorageFailed))
            }
            // Codes of replication: such an owner proves nothing about this request.
            code @ (PeerCode::LogGap | PeerCode::LogConflict | PeerCode::FencedEpoch) => self
                .finish(Outcome::Indeterminate(IndeterminateCause::UnexpectedCode(
                    code,
                ))),
        }
    }

    fn after_unsupported<R>(
        &mut self,
        now: MonoTime,
        sent_as: ForwardKind,
        error: PeerError,
    ) -> Step<R> {
        let may_fall_back = sent_as == ForwardKind::Authorized
            && !self.legacy_tried
            && self.attempts < self.limits.max_attempts
            && now <= self.deadline;
        self.last = Some(Refused::Peer(error));
        if !may_fall_back {
            return self.give_up();
        }
        self.legacy_tried = true;
        self.kind = ForwardKind::Legacy;
        self.send(now)
    }

    fn after_unknown<R>(&mut self, now: MonoTime, cause: UnknownCause) -> Step<R> {
        self.doubt = Some(cause);
        self.last = None;
        if self.op.is_resendable() {
            self.wait(now, now)
        } else {
            self.give_up()
        }
    }

    fn retry_same<R>(&mut self, now: MonoTime, error: PeerError) -> Step<R> {
        self.last = Some(Refused::Peer(error));
        self.wait(now, now)
    }

    /// Waits for the next place in the schedule, and not before `not_before`; gives up at once
    /// when the next attempt would be over a bound, because waiting could not change that.
    fn wait<R>(&mut self, now: MonoTime, not_before: MonoTime) -> Step<R> {
        let factor = 1u32.checked_shl(u32::from(self.waits)).unwrap_or(u32::MAX);
        let until = (now + self.limits.first_wait.saturating_mul(factor)).max(not_before);
        if self.attempts >= self.limits.max_attempts || until > self.deadline {
            return self.give_up();
        }
        self.waits = self.waits.saturating_add(1);
        self.phase = Phase::Waiting { until };
        Step::WaitUntil(until)
    }

    fn send<R>(&mut self, now: MonoTime) -> Step<R> {
        assert!(
            self.attempts < self.limits.max_attempts,
            "FWD-3: attempt budget"
        );
        assert!(
            self.doubt.is_none() || self.op.is_resendable(),
            "FWD-2: second send after one that may have been applied"
        );
        self.attempts += 1;
        self.sent_at = now;
        self.phase = Phase::Sending;
        Step::Send {
            target: self.target.clone(),
            kind: self.kind,
        }
    }

    /// Ends without success: refused when every attempt is known to have changed nothing.
    fn give_up<R>(&mut self) -> Step<R> {
        let doubt = match self.doubt {
            Some(cause) if self.op.is_write() => Some(cause),
            // A read changed nothing: what the last answer said counts, a lost one otherwise.
            Some(cause) if self.last.is_none() => Some(cause),
            Some(_) | None => None,
        };
        match (doubt, self.last.take()) {
            (None, Some(refused)) => self.finish(Outcome::Refused(refused)),
            (Some(cause), _) => {
                self.finish(Outcome::Indeterminate(IndeterminateCause::Unknown(cause)))
            }
            // Unreachable by construction; claims nothing rather than "not applied".
            (None, None) => self.finish(Outcome::Indeterminate(IndeterminateCause::Unknown(
                UnknownCause::Timeout,
            ))),
        }
    }

    fn finish<R>(&mut self, outcome: Outcome<R>) -> Step<R> {
        self.phase = Phase::Finished;
        Step::Finish(outcome)
    }

    fn allow_hold(&mut self, now: MonoTime) {
        let held = now.since(self.sent_at).min(self.hold_left);
        self.hold_left -= held;
        self.deadline = self.deadline + held;
    }

    fn remember_visit(&mut self) {
        if !self.visited.contains(&self.target) {
            self.visited.push(self.target.clone());
        }
    }
}
