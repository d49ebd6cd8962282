//! The event loop of a core: QUIC, storage, lanes and timers on glommio.

pub mod quic;
