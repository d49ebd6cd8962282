//! The certificate in use, behind one pointer that a rotation swaps.

use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use rustls::client::ResolvesClientCert;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::SignatureScheme;

/// A certificate and its key. Read once a handshake, so a lock costs nothing that matters;
/// connections that are up keep what they were made with.
pub(super) struct SharedCert {
    current: RwLock<Current>,
}

struct Current {
    key: Arc<CertifiedKey>,
    not_after_s: i64,
}

impl SharedCert {
    pub(super) fn new(key: CertifiedKey, not_after_s: i64) -> Arc<Self> {
        let key = Arc::new(key);
        let current = RwLock::new(Current { key, not_after_s });
        Arc::new(Self { current })
    }

    pub(super) fn replace(&self, key: CertifiedKey, not_after_s: i64) {
        let key = Arc::new(key);
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        *current = Current { key, not_after_s };
    }

    pub(super) fn not_after_s(&self) -> i64 {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        current.not_after_s
    }

    fn key(&self) -> Arc<CertifiedKey> {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(&current.key)
    }
}

impl fmt::Debug for SharedCert {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedCert {{ not_after_s: {} }}", self.not_after_s())
    }
}

impl ResolvesServerCert for SharedCert {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.key())
    }
}

impl ResolvesClientCert for SharedCert {
    fn resolve(
        &self,
        _root_hint_subjects: &[&[u8]],
        _sigschemes: &[SignatureScheme],
    ) -> Option<Arc<CertifiedKey>> {
        Some(self.key())
    }

    fn has_certs(&self) -> bool {
        true
    }
}
