//! Certificates and keys: loading, checking, making, replacing.
//!
//! Duty: turn certificate files into rustls configurations for the links between brokers
//! ([`PeerTls`]) and for clients ([`ClientTls`]), name every certificate that can never work
//! before anything is opened, tell who a peer is ([`certificate_names_node`]), and swap renewed
//! files in for the next handshake ([`CertWatch`]).
//!
//! Not its duty: sockets, QUIC, deciding when to dial again after a refusal.
//!
//! Invariants:
//! * TLS 1.3 only, TLS13_AES_128_GCM_SHA256 first.
//! * No text of a private key file reaches a message: faults name the file and nothing in it.
//! * A broker's identity is a DNS name its certificate spells out; a wildcard is nobody.
//! * A certificate that fails a check never replaces one that works.
//! * The authority file is read once; new trust roots need a restart.

mod check;
mod client_listener;
mod dev;
mod fault;
mod files;
mod identity;
mod peer;
mod provider;
mod refusal;
mod rotate;
mod shared;
mod unauthenticated;

pub use client_listener::{ClientCertSource, ClientTls};
pub use dev::{DevCa, IssueRequest, IssuedCert};
pub use fault::{TlsFault, TlsFaultKind};
pub use identity::{certificate_names_node, peer_names};
pub use peer::{PeerTls, PeerTlsPaths};
pub use provider::crypto_provider;
pub use refusal::{RefusedBy, TlsRefusal};
pub use rotate::{CertEvent, CertWatch};

/// The application protocol between brokers.
pub const INTERNAL_ALPN: &[u8] = b"felix-internal/1";
/// The application protocol of clients that offer one.
pub const CLIENT_ALPN: &[u8] = b"felix/1";
