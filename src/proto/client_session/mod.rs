//! A client connection and its streams, as decisions.
//!
//! [`ConnectionSession`] knows when a connection must close: nothing authenticated in time, or
//! the broker is stopping and all answers are out. [`StreamSession`] knows what a stream owes:
//! who the client is, which answers are outstanding, where a refusal goes, when to finish.
//! [`classify`] turns typed frames into what the stream machine has to know of them. Tokens are
//! verified, shards looked up and bytes written elsewhere.

mod classify;
mod connection;
mod stream;
mod subscribe_frames;
mod widths;

pub use classify::{
    classify, classify_error, classify_oversize, Incoming, PublishReply, Requested,
};
pub use connection::{ConnectionClose, ConnectionSession};
pub use stream::{
    OwedId, RefusedFrame, Reply, StreamAction, StreamDirection, StreamLimits, StreamSession,
    Verdict, Written,
};
pub use subscribe_frames::{cursor_error, event_stream_end, subscribed, EventStreamEnd};
pub use widths::{DeclaredWidths, TooManyWidths, Width, MAX_DECLARED_WIDTHS};
