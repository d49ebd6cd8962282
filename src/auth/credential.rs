//! A client's token, wrapped so that it cannot end up in a log.

use std::fmt;
use std::sync::Arc;

/// A bearer token as it came from a client. Cheap to clone; `Debug` shows its length only.
#[derive(Clone, PartialEq, Eq)]
pub struct Credential(Arc<str>);

impl Credential {
    /// Wraps a token.
    pub fn new(token: &str) -> Self {
        Self(Arc::from(token))
    }

    /// The token itself, for verifying and for sending along with a forward. Never log it.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Credential({} bytes hidden)", self.0.len())
    }
}
