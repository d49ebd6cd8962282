//! The QUIC pump on virtual time.

mod faults;
mod handshake;
mod lifecycle;
mod support;
mod transfer;
