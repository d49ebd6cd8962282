//! What is wrong with a certificate, key or authority file.

use std::fmt;
use std::path::PathBuf;

/// The faults told apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TlsFaultKind {
    /// The file cannot be read.
    Unreadable,
    /// The file has no bytes.
    Empty,
    /// The file has bytes, but no certificate or key in PEM form.
    NotPem,
    /// A PEM block of the right name holds something that cannot be decoded.
    BadContent,
    /// The private key belongs to another certificate.
    KeyMismatch,
    /// No DNS name for the node id.
    NameMissing,
    /// The node id is not a DNS name, so no certificate can carry it.
    NodeIdNotDns,
    /// An authority's certificate is used as the broker's own.
    CaAsOwn,
    /// The extended key usage lacks server authentication.
    NoServerUsage,
    /// The extended key usage lacks client authentication.
    NoClientUsage,
    /// The certificate has expired.
    Expired,
    /// The certificate is not valid yet.
    NotYetValid,
    /// The certificate expires within 30 days. A warning.
    ExpiresSoon,
    /// The authority in the file did not issue the certificate.
    UnknownIssuer,
    /// The TLS library refuses the material for a reason of its own.
    Refused,
}

/// One fault of one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFault {
    /// Which fault.
    pub kind: TlsFaultKind,
    /// The file.
    pub file: PathBuf,
    /// What is wrong.
    pub cause: String,
    /// What to do.
    pub remedy: String,
}

impl TlsFault {
    pub(super) fn new(
        kind: TlsFaultKind,
        file: impl Into<PathBuf>,
        cause: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self {
            kind,
            file: file.into(),
            cause: cause.into(),
            remedy: remedy.into(),
        }
    }

    /// True for what works today and will not for long.
    pub fn is_warning(&self) -> bool {
        self.kind == TlsFaultKind::ExpiresSoon
    }
}

impl fmt::Display for TlsFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: {}; {}",
            self.file.display(),
            self.cause,
            self.remedy
        )
    }
}

impl std::error::Error for TlsFault {}
