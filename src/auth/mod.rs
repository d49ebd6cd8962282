//! Client tokens: checking, what they permit, and making them.
//!
//! Duty: decide whether a token is genuine and current ([`Verifier`]) and what its holder may
//! do ([`Grant`]).
//!
//! Not its duty: fetching keys (the catalog has them), remembering who is connected, telling
//! whether a stream exists.
//!
//! Invariants:
//! * The algorithm is Ed25519 by construction; nothing in a token selects it.
//! * A token is never logged: it travels as a [`Credential`], whose `Debug` hides it, and no
//!   error carries a part of it.
//! * A remembered token is compared in full and its times are checked at every use.
//! * Memory for remembered tokens is bounded whatever clients send.

mod credential;
mod error;
mod grant;
mod mint;
mod pattern;
mod permission;
mod remembered;
mod verify;

pub use credential::Credential;
pub use error::AuthError;
pub use grant::{Grant, Resource};
pub use mint::{mint, MintError, MintRequest, SigningKey};
pub use pattern::Pattern;
pub use permission::{Action, Permission, PermissionError};
pub use verify::{Verifier, VerifierStats};

/// The issuer every token names.
pub const ISSUER: &str = "felix-auth";
/// The audience every token names.
pub const AUDIENCE: &str = "felix-broker";
/// How far clocks may disagree, in seconds.
pub const LEEWAY_S: u64 = 60;
