//! Local clusters of real broker processes: certificates, catalog, start, stop.
//!
//! Used by `cluster up`, by the tests and by the load tool, so that all of them start brokers
//! the same way. It runs on one machine over loopback; it is not a deployment tool.
//!
//! Invariants: a broker never outlives the process that started it; a started cluster is stopped
//! when its handle is dropped.

mod pki;
mod process;

pub use pki::{open_or_create_signing_key, Authority, NodeCertificates, PkiError};
pub use process::{describe_exit, tail, ChildProcess, ChildSpec};
