//! felix-uring: a thread-per-core io_uring broker that speaks Felix's broker-to-broker protocol.
//!
//! The crate is layered; each layer uses only those above it in this list:
//!
//! * [`ids`], [`limits`]: names and bounds shared by everything.
//! * [`wire`]: pure bytes to and from typed messages.
//! * [`proto`]: decisions without I/O, clocks or randomness.
//! * [`sim`]: the machines of `proto` on virtual time, under faults, with checkers.
//! * [`catalog`], [`auth`], [`config`], [`tls`]: what the broker is told, checked once.
//! * `driver`: the event loop of a core (glommio, QUIC, storage).
//! * `admin`, `cluster`, `cli`: control thread, local clusters, commands.
//!
//! Everything from `driver` down needs the default feature `runtime`.

pub mod auth;
pub mod catalog;
pub mod config;
pub mod ids;
pub mod limits;
pub mod metrics;
pub mod proto;
pub mod sim;
pub mod tls;
pub mod wire;

#[cfg(feature = "runtime")]
pub mod admin;
#[cfg(feature = "runtime")]
pub mod cli;
#[cfg(feature = "runtime")]
pub mod cluster;
#[cfg(feature = "runtime")]
pub mod driver;
#[cfg(feature = "runtime")]
pub mod preflight;
