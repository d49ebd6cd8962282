//! Renewed certificates: the files are read again every 30 seconds.
//!
//! A new pair is put into use for the next handshake when it passes every check the first one
//! passed. A file that is half written, or a certificate whose key has not arrived yet, is
//! reported once and tried again.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::crypto::CryptoProvider;

use super::check::{judge_pair, read_pair, Demands, PairBytes};
use super::fault::TlsFault;
use super::shared::SharedCert;

/// How often the files are looked at.
const POLL_INTERVAL: Duration = Duration::from_secs(30);

/// What a look at the files found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CertEvent {
    /// A renewed certificate is in use from the next handshake on.
    Replaced {
        /// When it expires, in seconds since the epoch.
        not_after_s: i64,
        /// What will soon be wrong with it.
        warnings: Vec<TlsFault>,
    },
    /// The files changed into something that cannot be used; the old certificate stays.
    Kept(Vec<TlsFault>),
}

/// Notices renewed certificate files. Runs on a control thread.
pub struct CertWatch {
    cert: PathBuf,
    key: PathBuf,
    demands: Demands,
    provider: Arc<CryptoProvider>,
    shared: Arc<SharedCert>,
    in_use: PairBytes,
    reported: Option<Vec<TlsFault>>,
    due: Instant,
}

impl std::fmt::Debug for CertWatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CertWatch")
            .field("cert", &self.cert)
            .field("key", &self.key)
            .finish_non_exhaustive()
    }
}

/// Where a certificate comes from and what it must be; enough to load it again.
#[derive(Clone)]
pub(super) struct CertOrigin {
    pub cert: PathBuf,
    pub key: PathBuf,
    pub demands: Demands,
    pub provider: Arc<CryptoProvider>,
    pub bytes: PairBytes,
}

impl CertOrigin {
    pub(super) fn watch(&self, shared: &Arc<SharedCert>, now: Instant) -> CertWatch {
        CertWatch {
            cert: self.cert.clone(),
            key: self.key.clone(),
            demands: self.demands.clone(),
            provider: Arc::clone(&self.provider),
            shared: Arc::clone(shared),
            in_use: self.bytes.clone(),
            reported: None,
            due: now + POLL_INTERVAL,
        }
    }
}

impl CertWatch {
    /// When [`CertWatch::poll`] will next look at the files.
    pub fn due(&self) -> Instant {
        self.due
    }

    /// When the certificate in use expires, in seconds since the epoch.
    pub fn not_after_s(&self) -> i64 {
        self.shared.not_after_s()
    }

    /// Looks at the files when 30 seconds have passed. `now_s` is the wall clock in seconds
    /// since the epoch.
    pub fn poll(&mut self, now: Instant, now_s: u64) -> Option<CertEvent> {
        if now < self.due {
            return None;
        }
        self.due = now + POLL_INTERVAL;
        let bytes = match read_pair(&self.cert, &self.key) {
            Ok(bytes) => bytes,
            Err(faults) => return self.keep(faults),
        };
        if bytes == self.in_use {
            self.reported = None;
            return None;
        }
        let (cert, key) = (&self.cert, &self.key);
        match judge_pair(cert, key, &bytes, &self.demands, &self.provider, now_s) {
            Ok(accepted) => {
                self.shared.replace(accepted.key, accepted.not_after_s);
                self.in_use = bytes;
                self.reported = None;
                Some(CertEvent::Replaced {
                    not_after_s: accepted.not_after_s,
                    warnings: accepted.warnings,
                })
            }
            Err(faults) => self.keep(faults),
        }
    }

    /// The same faults are reported once, until something changes.
    fn keep(&mut self, faults: Vec<TlsFault>) -> Option<CertEvent> {
        if self.reported.as_ref() == Some(&faults) {
            return None;
        }
        self.reported = Some(faults.clone());
        Some(CertEvent::Kept(faults))
    }
}
