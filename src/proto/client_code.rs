//! What a client is told about a failure: code, class, reason.
//!
//! Pure tables from what happened to a [`Refusal`]. The class is what the client acts on, so it
//! says what happened and not what the code usually means: a class that claims "nothing applied"
//! is given only where that is proven.

use super::forward::ForwardOp;
use super::outcome::{IndeterminateCause, NotSentCause, PeerCode, Refused, UnknownCause};
use super::ownership::{RouteRefusal, Serving};
use crate::wire::client::{ErrorCode, Refusal, RetryClass};

/// How long a client is asked to wait when a bounded queue was full.
const OVERLOAD_WAIT_MS: u64 = 50;
/// How long a client is asked to wait for something that only an operator or a rollout brings.
const ABSENT_WAIT_MS: u64 = 500;

/// Why a local append did not happen, or is not known to have happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AppendFailure {
    /// The append queue is full; nothing was taken.
    QueueFull,
    /// The disk is full; nothing was written. Heals when space is freed.
    DiskFull,
    /// The log failed earlier and takes nothing until a restart.
    LogFailed,
    /// A payload is larger than a log takes.
    TooLarge,
    /// The batch was being written when the flush failed.
    FlushFailed,
}

/// What a client is told about a failed local append.
pub fn of_append_failure(failure: AppendFailure) -> Refusal {
    match failure {
        AppendFailure::QueueFull => overloaded("the append queue is full"),
        AppendFailure::DiskFull => overloaded("the disk is full"),
        AppendFailure::LogFailed => {
            Refusal::new(ErrorCode::Storage, "the shard's log failed earlier")
                .with_class(RetryClass::Fatal)
        }
        AppendFailure::TooLarge => Refusal::new(ErrorCode::LimitExceeded, "payload too large"),
        AppendFailure::FlushFailed => Refusal::new(
            ErrorCode::Storage,
            "the flush failed; the outcome is unknown",
        ),
    }
}

/// What a client is told when its request goes nowhere.
pub fn of_route_refusal(refusal: RouteRefusal) -> Refusal {
    match refusal {
        RouteRefusal::NotFound => Refusal::new(ErrorCode::NotFound, "no such stream or cache")
            .with_retry_after_ms(ABSENT_WAIT_MS),
        RouteRefusal::Forbidden => Refusal::new(ErrorCode::Forbidden, "not allowed"),
        RouteRefusal::Shedding => overloaded("the shard's queue is full"),
        RouteRefusal::NotAssigned => unavailable("no broker is assigned", "not_assigned"),
        RouteRefusal::NotServing(serving) => match serving {
            Serving::Ready | Serving::Opening => unavailable("the shard is opening", "not_ready"),
            Serving::Fenced => unavailable("the shard is moving", "moving"),
            Serving::LeaseLapsed => unavailable("the lease has lapsed", "fenced"),
            Serving::StorageFailed => of_append_failure(AppendFailure::LogFailed),
        },
    }
}

/// What a client is told about a forward that surely was not applied.
pub fn of_refused(refused: &Refused) -> Refusal {
    match refused {
        Refused::Peer(error) => match error.code {
            PeerCode::StaleRoute => unavailable("the owner's view is behind", "stale"),
            PeerCode::Unavailable => unavailable("the owner cannot serve yet", "not_ready"),
            PeerCode::Overload => overloaded("the owner is shedding load"),
            PeerCode::Unauthorized => {
                Refusal::new(ErrorCode::Forbidden, "the owner refused the credential")
            }
            PeerCode::Malformed => Refusal::new(
                ErrorCode::InvalidRequest,
                "the owner could not read the request",
            ),
            PeerCode::ProtocolVersion | PeerCode::UnsupportedKind => {
                Refusal::new(ErrorCode::Internal, "the owner speaks an older protocol")
                    .with_class(RetryClass::Fatal)
            }
            // Not reported as a refusal by the forward machine; claims nothing.
            PeerCode::StorageFailed
            | PeerCode::LogGap
            | PeerCode::LogConflict
            | PeerCode::FencedEpoch => {
                Refusal::new(ErrorCode::Internal, "the owner's answer makes no sense")
            }
        },
        Refused::NotSent(cause) => match cause {
            NotSentCause::InFlightFull => overloaded("too much is unanswered at the owner"),
            NotSentCause::Backoff { .. } | NotSentCause::Unreachable | NotSentCause::Draining => {
                unavailable("the owner cannot be reached", "owner_unavailable")
            }
            NotSentCause::UnknownPeer => {
                unavailable("the owner's address is not known", "owner_unavailable")
            }
            NotSentCause::Unencodable => Refusal::new(
                ErrorCode::LimitExceeded,
                "a name or key is too long to be forwarded",
            ),
        },
        Refused::RedirectLoop(_) | Refused::RedirectsExhausted(_) => {
            unavailable("brokers disagree about the owner", "stale")
        }
    }
}

/// What a client is told when nobody can say whether its request was applied. A read changes
/// nothing, so it may always be sent again.
pub fn of_indeterminate(op: ForwardOp, cause: IndeterminateCause) -> Refusal {
    let refusal = match cause {
        IndeterminateCause::Unknown(UnknownCause::Timeout) => Refusal::new(
            ErrorCode::Unacknowledged,
            "the owner did not answer in time",
        ),
        IndeterminateCause::Unknown(UnknownCause::Disconnect) => Refusal::new(
            ErrorCode::Unacknowledged,
            "the connection to the owner was lost",
        ),
        IndeterminateCause::Unknown(UnknownCause::ProtocolViolation) => {
            Refusal::new(ErrorCode::Internal, "the owner's answer cannot be read")
        }
        IndeterminateCause::StorageFailed => {
            Refusal::new(ErrorCode::Storage, "the owner's storage failed")
        }
        IndeterminateCause::UnexpectedCode(_) => {
            Refusal::new(ErrorCode::Internal, "the owner's answer makes no sense")
        }
    };
    let class = match op.is_write() {
        true => RetryClass::OutcomeUnknown,
        false => RetryClass::Retry,
    };
    refusal.with_class(class)
}

/// What a client is told when the broker stopped waiting.
pub fn unacknowledged() -> Refusal {
    Refusal::new(ErrorCode::Unacknowledged, "no outcome in time")
}

/// What a client is told by a broker that is stopping.
pub fn draining() -> Refusal {
    Refusal::new(ErrorCode::Draining, "the broker is shutting down")
}

/// What a client is told about something that cannot be done as sent.
pub fn invalid(message: impl Into<std::borrow::Cow<'static, str>>) -> Refusal {
    Refusal::new(ErrorCode::InvalidRequest, message)
}

fn unavailable(message: &'static str, reason: &'static str) -> Refusal {
    Refusal::new(ErrorCode::ShardUnavailable, message).with_reason(reason)
}

fn overloaded(message: &'static str) -> Refusal {
    Refusal::new(ErrorCode::Overloaded, message).with_retry_after_ms(OVERLOAD_WAIT_MS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{Generation, NodeId};
    use crate::proto::outcome::{PeerError, Target};
    use crate::proto::MonoTime;

    fn summary(refusal: &Refusal) -> (String, RetryClass, Option<String>) {
        let code = refusal.code.as_ref().map(|c| c.name().to_string());
        let reason = refusal.detail.as_ref().and_then(|d| d.reason.clone());
        (
            code.expect("a refusal always has a code"),
            refusal.class().expect("and a class"),
            reason.map(|r| r.to_string()),
        )
    }

    #[test]
    fn refusals_of_a_forward_claim_nothing_was_applied_and_say_what_to_do() {
        let target = Target {
            node: NodeId::new("b").unwrap(),
            generation: Generation(1),
        };
        let peer = |code| Refused::Peer(PeerError::bare(code));
        let not_sent = Refused::NotSent;
        let until = MonoTime::ZERO;
        for (refused, code, class, reason) in [
            (
                peer(PeerCode::StaleRoute),
                "shard_unavailable",
                RetryClass::Retry,
                Some("stale"),
            ),
            (
                peer(PeerCode::Unavailable),
                "shard_unavailable",
                RetryClass::Retry,
                Some("not_ready"),
            ),
            (
                peer(PeerCode::Overload),
                "overloaded",
                RetryClass::RetryAfter,
                None,
            ),
            (
                peer(PeerCode::Unauthorized),
                "forbidden",
                RetryClass::Fatal,
                None,
            ),
            (
                peer(PeerCode::Malformed),
                "invalid_request",
                RetryClass::Fatal,
                None,
            ),
            (
                peer(PeerCode::UnsupportedKind),
                "internal",
                RetryClass::Fatal,
                None,
            ),
            (
                peer(PeerCode::ProtocolVersion),
                "internal",
                RetryClass::Fatal,
                None,
            ),
            (
                not_sent(NotSentCause::InFlightFull),
                "overloaded",
                RetryClass::RetryAfter,
                None,
            ),
            (
                not_sent(NotSentCause::Backoff { until }),
                "shard_unavailable",
                RetryClass::Retry,
                Some("owner_unavailable"),
            ),
            (
                not_sent(NotSentCause::Unreachable),
                "shard_unavailable",
                RetryClass::Retry,
                Some("owner_unavailable"),
            ),
            (
                not_sent(NotSentCause::Draining),
                "shard_unavailable",
                RetryClass::Retry,
                Some("owner_unavailable"),
            ),
            (
                not_sent(NotSentCause::UnknownPeer),
                "shard_unavailable",
                RetryClass::Retry,
                Some("owner_unavailable"),
            ),
            (
                not_sent(NotSentCause::Unencodable),
                "limit_exceeded",
                RetryClass::Fatal,
                None,
            ),
            (
                Refused::RedirectLoop(target.clone()),
                "shard_unavailable",
                RetryClass::Retry,
                Some("stale"),
            ),
            (
                Refused::RedirectsExhausted(target),
                "shard_unavailable",
                RetryClass::Retry,
                Some("stale"),
            ),
        ] {
            let refusal = of_refused(&refused);
            let expected = (code.to_string(), class, reason.map(str::to_string));
            assert_eq!(summary(&refusal), expected, "{refused:?}");
            assert_eq!(refused.retry_class(), class, "{refused:?}");
            let waits = refusal.detail.and_then(|d| d.retry_after_ms).is_some();
            assert_eq!(waits, class == RetryClass::RetryAfter, "{refused:?}");
        }
    }

    #[test]
    fn an_unknown_outcome_is_unknown_for_writes_and_a_retry_for_reads() {
        for op in ForwardOp::ALL {
            for cause in [
                IndeterminateCause::Unknown(UnknownCause::Timeout),
                IndeterminateCause::Unknown(UnknownCause::Disconnect),
                IndeterminateCause::Unknown(UnknownCause::ProtocolViolation),
                IndeterminateCause::StorageFailed,
                IndeterminateCause::UnexpectedCode(PeerCode::LogGap),
            ] {
                let class = of_indeterminate(op, cause).class();
                let reads = matches!(op, ForwardOp::CacheGet | ForwardOp::CounterGet);
                let expected = match reads {
                    true => RetryClass::Retry,
                    false => RetryClass::OutcomeUnknown,
                };
                assert_eq!(class, Some(expected), "{op:?} {cause:?}");
            }
        }
    }

    #[test]
    fn local_failures() {
        for (failure, code, class) in [
            (
                AppendFailure::QueueFull,
                "overloaded",
                RetryClass::RetryAfter,
            ),
            (
                AppendFailure::DiskFull,
                "overloaded",
                RetryClass::RetryAfter,
            ),
            (AppendFailure::LogFailed, "storage", RetryClass::Fatal),
            (AppendFailure::TooLarge, "limit_exceeded", RetryClass::Fatal),
            (
                AppendFailure::FlushFailed,
                "storage",
                RetryClass::OutcomeUnknown,
            ),
        ] {
            let got = summary(&of_append_failure(failure));
            assert_eq!((got.0.as_str(), got.1), (code, class), "{failure:?}");
        }
        for (refusal, code, reason) in [
            (RouteRefusal::NotFound, "not_found", None),
            (RouteRefusal::Forbidden, "forbidden", None),
            (RouteRefusal::Shedding, "overloaded", None),
            (
                RouteRefusal::NotAssigned,
                "shard_unavailable",
                Some("not_assigned"),
            ),
            (
                RouteRefusal::NotServing(Serving::Opening),
                "shard_unavailable",
                Some("not_ready"),
            ),
            (
                RouteRefusal::NotServing(Serving::Fenced),
                "shard_unavailable",
                Some("moving"),
            ),
            (
                RouteRefusal::NotServing(Serving::LeaseLapsed),
                "shard_unavailable",
                Some("fenced"),
            ),
            (
                RouteRefusal::NotServing(Serving::StorageFailed),
                "storage",
                None,
            ),
        ] {
            let got = summary(&of_route_refusal(refusal));
            assert_eq!((got.0.as_str(), got.2.as_deref()), (code, reason));
            assert_eq!(got.1, refusal.retry_class(), "{refusal:?}");
        }
    }
}
