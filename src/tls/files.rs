//! Reading PEM files. Errors name the file and never quote it: it may hold a key.

use std::path::Path;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::fault::{TlsFault, TlsFaultKind};

/// Longest certificate or key file.
const MAX_FILE_BYTES: u64 = 4 << 20;

/// The bytes of a file that must not be empty.
pub(super) fn read(path: &Path) -> Result<Vec<u8>, TlsFault> {
    let unreadable = |error: std::io::Error| {
        TlsFault::new(
            TlsFaultKind::Unreadable,
            path,
            format!("the file cannot be read: {error}"),
            "correct the path, or give the broker's user permission to read it",
        )
    };
    let metadata = std::fs::metadata(path).map_err(unreadable)?;
    if metadata.len() > MAX_FILE_BYTES {
        let why = std::io::Error::other(format!("{} bytes are too many", metadata.len()));
        return Err(unreadable(why));
    }
    let bytes = std::fs::read(path).map_err(unreadable)?;
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Err(TlsFault::new(
            TlsFaultKind::Empty,
            path,
            "the file is empty",
            "write the PEM text into it",
        ));
    }
    Ok(bytes)
}

fn not_pem(path: &Path, what: &str, block: &str) -> TlsFault {
    TlsFault::new(
        TlsFaultKind::NotPem,
        path,
        format!("the file holds no {what} in PEM form"),
        format!("convert it to PEM, with lines -----BEGIN {block}----- and -----END {block}-----"),
    )
}

/// All certificates of a PEM text, at least one.
pub(super) fn certificates(
    path: &Path,
    bytes: &[u8],
) -> Result<Vec<CertificateDer<'static>>, TlsFault> {
    let parsed: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(bytes).collect();
    match parsed {
        Ok(list) if !list.is_empty() => Ok(list),
        Ok(_) | Err(_) => Err(not_pem(path, "complete certificate", "CERTIFICATE")),
    }
}

/// The first private key of a PEM text.
pub(super) fn private_key(path: &Path, bytes: &[u8]) -> Result<PrivateKeyDer<'static>, TlsFault> {
    PrivateKeyDer::from_pem_slice(bytes)
        .map_err(|_| not_pem(path, "complete, unencrypted private key", "PRIVATE KEY"))
}
