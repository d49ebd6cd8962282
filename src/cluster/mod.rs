//! Local clusters of real broker processes: certificates, catalog, start, stop.
//!
//! Used by `cluster up`, by the tests and by the load tool, so that all of them start brokers
//! the same way. It runs on one machine over loopback; it is not a deployment tool.
//!
//! Invariants: a broker never outlives the process that started it; a started cluster is stopped
//! when its handle is dropped.

mod error;
mod launch;
mod node;
mod pki;
mod process;
mod spec;

pub use error::ClusterError;
pub use launch::Cluster;
pub use node::{BrokerNode, NodeExit};
pub use pki::{open_or_create_signing_key, Authority, NodeCertificates, PkiError};
pub use process::{describe_exit, tail, ChildProcess, ChildSpec};
pub use spec::{
    free_ports, BrokerProgram, ClusterPlan, ClusterSpec, NodePlan, NodeSite, ShardedSpec, CACHE,
    KEY_ID, NAMESPACE, STREAM, TENANT,
};
