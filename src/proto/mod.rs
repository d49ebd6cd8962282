//! Decisions without I/O, clocks or randomness.
//!
//! Every machine here takes typed inputs and the time, and returns what must be done; a driver
//! does it and reports back. Nothing in this module reads a clock ([`MonoTime`] is passed in),
//! draws a random number (seeds are passed in), touches a socket or a file, or reads a byte of
//! either wire format. That makes each rule of the protocol a table that a test can walk.
//!
//! * [`outcome`]: how a request can end, and what each end proves.
//! * [`correlation`]: requests in flight on one connection.
//! * [`handshake`]: the greeting, both sides.
//! * [`backoff`], [`peer`]: the life of one link to one peer.
//! * [`forward`]: the retry table of one forwarded request; [`forward_order`]: the order of a stream's.
//! * [`ownership`]: what an owner answers before it touches a log.
//! * [`replication`]: copies of a shard's logs on other brokers.
//! * [`client_code`], [`client_session`]: what a client is told, and one client's streams.
//! * [`subscription`]: a subscriber's place in a log.
//! * [`cache`]: what the logs of a cache shard come to.
//! * [`group`]: one consumer group of one stream shard.
//! * [`convert`]: from the internal codec's messages to these machines' inputs.

pub mod backoff;
pub mod cache;
pub mod client_code;
pub mod client_session;
pub mod convert;
pub mod correlation;
pub mod forward;
pub mod forward_order;
pub mod group;
pub mod handshake;
pub mod outcome;
pub mod ownership;
pub mod peer;
pub mod replication;
pub mod subscription;
mod time;

pub use time::MonoTime;
