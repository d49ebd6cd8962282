//! What a client is told about a refused group request.

use super::GroupRefusal;
use crate::proto::client_code::invalid;
use crate::wire::client::{ErrorCode, Refusal, RetryClass};

/// How long a client is asked to wait for room.
const ROOM_WAIT_MS: u64 = 500;
/// How long a client is asked to wait for a write that is on its way.
const BUSY_WAIT_MS: u64 = 50;

impl GroupRefusal {
    /// The refusal in the client's words; the class says what happened.
    pub fn to_client(self) -> Refusal {
        match self {
            Self::PastTail => invalid("there is no such record yet"),
            Self::NotHandedOut => stale(
                "the record was not handed out since the group was read from its log",
                RetryClass::Retry,
            ),
            Self::ClaimGone => stale("the claim does not stand any more", RetryClass::Fatal),
            Self::NotListed => invalid("the offset is not on the group's dead letter list"),
            Self::Trimmed => invalid("the record was trimmed and cannot be handed out again"),
            Self::OutOfRange => invalid("the offset is outside the log"),
            Self::Busy => full("an earlier change is still being written", BUSY_WAIT_MS),
            Self::UnsettledFull => {
                full("too many records of the group are unsettled", ROOM_WAIT_MS)
            }
            Self::DeadLettersFull => full("the group's dead letter list is full", ROOM_WAIT_MS),
            Self::PollsFull => full("too many polls of the group wait", ROOM_WAIT_MS),
            Self::ReadFailed => Refusal::new(ErrorCode::Storage, "the log cannot be read")
                .with_class(RetryClass::Retry),
            Self::Log(failure) => failure.to_client(true),
        }
    }
}

fn stale(message: &'static str, class: RetryClass) -> Refusal {
    Refusal::new(ErrorCode::StaleClaim, message).with_class(class)
}

fn full(message: &'static str, wait_ms: u64) -> Refusal {
    Refusal::new(ErrorCode::Overloaded, message).with_retry_after_ms(wait_ms)
}
