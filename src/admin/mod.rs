//! Control-thread HTTP: `/live`, `/ready`, `/status`, `/replication/halted` and `/metrics`.
//!
//! The admin listener runs on threads of its own and never touches a data core: cores publish a
//! [`CoreSnapshot`] about once a second into [`SharedState`], control threads publish the
//! catalog, and a request only reads what is there.
//!
//! It does not authenticate: bind it to loopback or to an operator network. It does not change
//! anything either: every endpoint is a read.
//!
//! Invariants: not ready before every hold is released; never ready again once draining; a slow
//! or hostile client costs at most one worker for [`REQUEST_DEADLINE`] and [`MAX_HEAD_BYTES`].

mod client;
mod process;
mod server;
mod snapshot;
mod state;

pub use client::{get, HttpError, HttpResponse};
pub use process::ProcessUsage;
pub use server::{AdminServer, MAX_HEAD_BYTES, REQUEST_DEADLINE};
pub use snapshot::{
    AcceptedPeersSnapshot, CatalogSnapshot, CertificateConnections, CoreSnapshot, HaltedSnapshot,
    HeldSnapshot, PathSnapshot, PeerSnapshot, ReplicationSnapshot, ShardFailure, ShardSnapshot,
    StorageSnapshot,
};
pub use state::{NodeInfo, Readiness, SharedState, LIVE_SILENCE};
