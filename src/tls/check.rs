//! The checks a certificate must pass before it is used, each with its own remedy.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustls::client::danger::ServerCertVerifier;
use rustls::client::WebPkiServerVerifier;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::sign::CertifiedKey;
use rustls::{CertificateError, Error, InconsistentKeys};
use x509_parser::certificate::X509Certificate;

use super::fault::{TlsFault, TlsFaultKind};
use super::files;
use super::identity::{dns_names, names_include};

/// A certificate that expires sooner than this draws a warning.
const EXPIRY_WARNING_S: i64 = 30 * 24 * 3600;

/// What a certificate is for, and so what it must be.
#[derive(Debug, Clone)]
pub(super) struct Demands {
    /// The DNS name it must carry.
    pub name: Option<String>,
    /// It must be usable to accept connections.
    pub server: bool,
    /// It must be usable to open connections.
    pub client: bool,
    /// It must have been issued by these authorities.
    pub issuer: Option<Issuer>,
}

/// The verifiers of the authority file, the same that judge the peers.
#[derive(Debug, Clone)]
pub(super) struct Issuer {
    pub file: PathBuf,
    pub servers: Arc<WebPkiServerVerifier>,
    pub clients: Arc<dyn ClientCertVerifier>,
}

/// A certificate that passed.
#[derive(Debug)]
pub(super) struct Accepted {
    pub key: CertifiedKey,
    pub not_after_s: i64,
    pub warnings: Vec<TlsFault>,
}

/// The bytes of a certificate file and a key file.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct PairBytes {
    pub cert: Vec<u8>,
    pub key: Vec<u8>,
}

/// Reads both files; both may be at fault.
pub(super) fn read_pair(cert: &Path, key: &Path) -> Result<PairBytes, Vec<TlsFault>> {
    match (files::read(cert), files::read(key)) {
        (Ok(cert), Ok(key)) => Ok(PairBytes { cert, key }),
        (cert, key) => Err([cert.err(), key.err()].into_iter().flatten().collect()),
    }
}

/// Judges a certificate file and a key file at `now_s` seconds since the epoch. Reports every
/// fault, not the first.
pub(super) fn judge_pair(
    cert_file: &Path,
    key_file: &Path,
    bytes: &PairBytes,
    demands: &Demands,
    provider: &CryptoProvider,
    now_s: u64,
) -> Result<Accepted, Vec<TlsFault>> {
    let chain = files::certificates(cert_file, &bytes.cert);
    let key = files::private_key(key_file, &bytes.key);
    let mut faults = Vec::new();
    let mut not_after_s = 0;
    if let Ok(chain) = &chain {
        match x509_parser::parse_x509_certificate(&chain[0]) {
            Ok((_, leaf)) => {
                not_after_s = leaf.validity().not_after.timestamp();
                check_leaf(cert_file, &leaf, demands, now_s, &mut faults);
            }
            Err(_) => faults.push(undecodable(cert_file)),
        }
        if faults.iter().all(TlsFault::is_warning) {
            faults.extend(check_issuer(cert_file, chain, demands, now_s));
        }
    }
    let (chain, key) = match (chain, key) {
        (Ok(chain), Ok(key)) => (chain, key),
        (chain, key) => {
            faults.extend([chain.err(), key.err()].into_iter().flatten());
            return Err(faults);
        }
    };
    let certified = match CertifiedKey::from_der(chain, key, provider) {
        Ok(certified) => Some(certified),
        Err(error) => {
            let fault = key_fault(key_file, cert_file, &error);
            if !faults.contains(&fault) {
                faults.push(fault);
            }
            None
        }
    };
    let (warnings, faults): (Vec<_>, Vec<_>) = faults.into_iter().partition(TlsFault::is_warning);
    match certified {
        Some(key) if faults.is_empty() => Ok(Accepted {
            key,
            not_after_s,
            warnings,
        }),
        _ => Err(faults),
    }
}

fn undecodable(file: &Path) -> TlsFault {
    TlsFault::new(
        TlsFaultKind::BadContent,
        file,
        "the first certificate cannot be decoded",
        "write the certificate again: the file is damaged or incomplete",
    )
}

fn key_fault(key_file: &Path, cert_file: &Path, error: &Error) -> TlsFault {
    match error {
        Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => TlsFault::new(
            TlsFaultKind::KeyMismatch,
            key_file,
            format!("the key does not match the certificate in {}", cert_file.display()),
            "use the key the certificate was made for; the broker's own certificate must come first in its file",
        ),
        Error::InvalidCertificate(_) => undecodable(cert_file),
        _ => TlsFault::new(
            TlsFaultKind::BadContent,
            key_file,
            "the private key cannot be used",
            "use an unencrypted ECDSA (P-256 or P-384), Ed25519 or RSA (2048 bits or more) key",
        ),
    }
}

fn check_leaf(
    file: &Path,
    leaf: &X509Certificate<'_>,
    demands: &Demands,
    now_s: u64,
    faults: &mut Vec<TlsFault>,
) {
    let mut report = |kind, cause: String, remedy: &str| {
        faults.push(TlsFault::new(kind, file, cause, remedy));
    };
    if leaf.is_ca() {
        report(
            TlsFaultKind::CaAsOwn,
            "an authority's certificate (CA:TRUE) is used as the broker's own".to_string(),
            "issue a certificate for the broker with CA:FALSE and use that; the authority's belongs into the CA file",
        );
    }
    let names = dns_names(leaf);
    if let Some(wanted) = &demands.name {
        if !names_include(&names, wanted) {
            report(
                TlsFaultKind::NameMissing,
                format!("the certificate has no DNS name {wanted:?}; it has {names:?}"),
                "issue it with the node id as a subject alternative name of type DNS; the common name does not count, nor does a wildcard",
            );
        }
    }
    if let Ok(Some(usage)) = leaf.extended_key_usage() {
        let usage = usage.value;
        if demands.server && !(usage.server_auth || usage.any) {
            report(
                TlsFaultKind::NoServerUsage,
                "the certificate may not be used as a server".to_string(),
                "issue it with extended key usage serverAuth",
            );
        }
        if demands.client && !(usage.client_auth || usage.any) {
            report(
                TlsFaultKind::NoClientUsage,
                "the certificate may not be used as a client".to_string(),
                "issue it with extended key usage clientAuth besides serverAuth: a broker dials its peers too",
            );
        }
    }
    check_validity(leaf, now_s as i64, &mut report);
}

fn check_validity(
    leaf: &X509Certificate<'_>,
    now_s: i64,
    report: &mut impl FnMut(TlsFaultKind, String, &str),
) {
    let validity = leaf.validity();
    let from_s = validity.not_before.timestamp();
    let until_s = validity.not_after.timestamp();
    let (from, until) = (validity.not_before, validity.not_after);
    if until_s < now_s {
        let cause = format!("the certificate expired at {until}");
        report(
            TlsFaultKind::Expired,
            cause,
            "renew it, and check this host's clock",
        );
    } else if from_s > now_s {
        let cause = format!("the certificate is not valid before {from}");
        report(
            TlsFaultKind::NotYetValid,
            cause,
            "wait, reissue it, or correct this host's clock",
        );
    } else if until_s - now_s < EXPIRY_WARNING_S {
        let days = (until_s - now_s) / 86_400;
        let cause = format!("the certificate expires in {days} days, at {until}");
        report(
            TlsFaultKind::ExpiresSoon,
            cause,
            "renew it: the files are read again every 30 seconds",
        );
    }
}

/// Asks the verifiers that the peers use as well.
fn check_issuer(
    file: &Path,
    chain: &[CertificateDer<'static>],
    demands: &Demands,
    now_s: u64,
) -> Option<TlsFault> {
    let issuer = demands.issuer.as_ref()?;
    let now = UnixTime::since_unix_epoch(Duration::from_secs(now_s));
    let (leaf, intermediates) = chain.split_first()?;
    let as_client = issuer.clients.verify_client_cert(leaf, intermediates, now);
    let as_server = demands.name.as_ref().map_or(Ok(()), |name| {
        let name = ServerName::try_from(name.as_str())
            .map_err(|_| Error::InvalidCertificate(CertificateError::NotValidForName))?;
        let verdict = issuer
            .servers
            .verify_server_cert(leaf, intermediates, &name, &[], now);
        verdict.map(drop)
    });
    let error = as_client.map(drop).and(as_server).err()?;
    let ca = issuer.file.display();
    Some(match error {
        Error::InvalidCertificate(CertificateError::UnknownIssuer) => TlsFault::new(
            TlsFaultKind::UnknownIssuer,
            file,
            format!("no authority in {ca} issued the certificate"),
            "put the issuing authority's certificate into the CA file, and any intermediate behind the broker's own certificate",
        ),
        Error::InvalidCertificate(CertificateError::BadSignature) => TlsFault::new(
            TlsFaultKind::UnknownIssuer,
            file,
            format!("an authority in {ca} has the right name but another key"),
            "reissue the certificate with the authority that is in the CA file",
        ),
        other => TlsFault::new(
            TlsFaultKind::Refused,
            file,
            format!("peers would refuse the certificate: {other}"),
            "reissue it as an end-entity certificate for server and client",
        ),
    })
}
