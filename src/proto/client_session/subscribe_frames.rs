//! What a subscriber is told: that it began, that it could not, that it ended.
//!
//! Tables from the cursor's words to messages the client offered to read. An end that has no
//! message the client can read becomes an `error`, never a clean end of the stream: a clean end
//! looks like the end of the data.

use crate::proto::subscription::{EndReason, Ended, Opened, StartRefusal};
use crate::wire::client::answers::{
    CursorErrorReason, ErrorAnswer, ShardMoved, StreamDeleted, SubscribeCursorError, Subscribed,
    SubscriptionLagged,
};
use crate::wire::client::{
    Answer, ClientOffer, ErrorCode, Features, Flags, Refusal, RetryClass, ShardOwner,
};

/// How the event stream of a subscription ends.
#[derive(Debug, Clone, PartialEq)]
pub enum EventStreamEnd {
    /// Write this, then finish the stream.
    Message(Answer),
    /// Leave the stream as it is: the connection is about to close, and the client resumes
    /// elsewhere.
    WithConnection,
    /// Nobody reads it any more: reset it.
    Reset,
}

/// The answer to a subscribe that began. The two offsets go to clients that read offsets.
pub fn subscribed(subscription_id: u64, opened: Opened, offer: &ClientOffer) -> Answer {
    let reads_offsets = offer.may_send(Flags::EVENT_OFFSETS);
    Answer::Subscribed(Subscribed {
        subscription_id,
        start_offset: reads_offsets.then_some(opened.start.0),
        live_offset: reads_offsets.then_some(opened.live.0),
        queue_capacity: None,
    })
}

/// The answer to a subscribe whose position the log does not have, which ends the request's stream. `None` when
/// there is nothing wrong with the position and the client is to try again.
pub fn cursor_error(refusal: StartRefusal) -> Option<Answer> {
    let (reason, requested, available) = match refusal {
        StartRefusal::TooOld {
            requested,
            available,
        } => (CursorErrorReason::TooOld, requested, available),
        StartRefusal::InFuture {
            requested,
            available,
        } => (CursorErrorReason::InFuture, requested, available),
        StartRefusal::NotShownYet { .. } => return None,
    };
    Some(Answer::SubscribeCursorError(SubscribeCursorError {
        reason,
        requested: requested.0,
        available: available.0,
    }))
}

/// How a subscription's event stream ends. `owner` is the broker that leads the shard now, with
/// its client address, if the catalog knows; `generation` is the newest known.
pub fn event_stream_end(
    subscription_id: u64,
    ended: &Ended,
    owner: Option<ShardOwner>,
    generation: u64,
    offer: &ClientOffer,
) -> EventStreamEnd {
    let reads = |feature| offer.features().contains(feature);
    let message = match &ended.reason {
        EndReason::StoppedByClient => return EventStreamEnd::Reset,
        EndReason::Draining => return EventStreamEnd::WithConnection,
        EndReason::ShardMoved { .. } if reads(Features::SHARD_MOVED) => {
            let (node_id, addr) = match owner {
                Some(owner) => (Some(owner.node_id), owner.addr),
                None => (None, None),
            };
            Answer::ShardMoved(ShardMoved {
                subscription_id,
                resume_from: Some(ended.resume_from.0),
                node_id,
                addr,
                generation,
            })
        }
        EndReason::ShardMoved { .. } => error(ErrorCode::NotLeader, "the shard has moved", offer),
        EndReason::StreamDeleted if reads(Features::STREAM_DELETED) => {
            Answer::StreamDeleted(StreamDeleted { subscription_id })
        }
        EndReason::StreamDeleted => error(ErrorCode::NotFound, "the stream was deleted", offer),
        EndReason::Lagged if reads(Features::SUBSCRIPTION_LAGGED) => {
            Answer::SubscriptionLagged(SubscriptionLagged {
                subscription_id,
                resume_from: ended.resume_from.0,
            })
        }
        EndReason::Lagged => error(
            ErrorCode::LimitExceeded,
            "records were trimmed before they were read",
            offer,
        ),
        EndReason::Revoked => error(ErrorCode::Revoked, "the credential was revoked", offer),
        EndReason::StorageFailed => {
            let refusal = Refusal::new(ErrorCode::Storage, "the log cannot be read")
                .with_class(RetryClass::Retry);
            ErrorAnswer::from(refusal.for_json(offer)).into()
        }
    };
    EventStreamEnd::Message(message)
}

fn error(code: ErrorCode, message: &'static str, offer: &ClientOffer) -> Answer {
    ErrorAnswer::from(Refusal::new(code, message).for_json(offer)).into()
}
