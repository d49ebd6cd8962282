//! The greeting of an internal connection: Hello, answered by HelloOk.
//!
//! [`ListenerHandshake`] is the accepting side, [`DiallerHandshake`] the dialling side. Neither
//! carries requests; both decide whether requests may flow at all.
//!
//! Invariant: a link is up, for the dialler, only after a HelloOk that names the broker it
//! dialled. A finished TLS handshake proves nothing yet: in TLS 1.3 the dialler finishes before
//! the listener has judged the dialler's certificate.

mod dialler;
mod listener;

pub use dialler::{CloseCause, DiallerHandshake, DiallerStep, HandshakeFailure, HELLO_CORRELATION};
pub use listener::{
    CloseReason, Incoming, ListenerAction, ListenerHandshake, PeerIdentity, StreamPlace,
};
