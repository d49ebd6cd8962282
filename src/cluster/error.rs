//! What can go wrong with a local cluster, said so that a person can act on it.

use std::path::{Path, PathBuf};

use super::pki::PkiError;
use crate::admin;
use crate::auth::MintError;

/// Why a cluster, or one of its brokers, is not what was asked for.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    #[error("{path}: {source}")]
    File {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error(transparent)]
    Pki(#[from] PkiError),
    #[error("no ports: {0}")]
    Ports(std::io::Error),
    #[error("the catalog could not be written: {0}")]
    Catalog(String),
    #[error("no token: {0}")]
    Mint(#[from] MintError),
    #[error("{node} could not be started: {source}")]
    Spawn {
        node: String,
        source: std::io::Error,
    },
    #[error("{node} could not be signalled: {source}")]
    Signal {
        node: String,
        source: std::io::Error,
    },
    #[error("{node} ended with {exit}; its last words were:\n{log}")]
    Died {
        node: String,
        exit: String,
        log: String,
    },
    #[error("{node} was not ready after {waited_s} s: {reasons}; its last words were:\n{log}")]
    NotReady {
        node: String,
        waited_s: u64,
        reasons: String,
        log: String,
    },
    #[error("{node}: {source}")]
    Admin {
        node: String,
        source: admin::HttpError,
    },
    #[error("{node} is not running")]
    NotRunning { node: String },
}

impl ClusterError {
    pub(super) fn file(path: &Path, source: std::io::Error) -> Self {
        Self::File {
            path: path.to_path_buf(),
            source,
        }
    }
}
