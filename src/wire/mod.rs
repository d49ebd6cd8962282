//! Pure bytes: both protocols and the shard routing hash. No I/O, no clock, no panic on any input.

pub mod client;
pub mod internal;
pub mod routing;
