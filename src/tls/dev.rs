//! Certificates for development, local clusters and tests.

use std::fmt;

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose,
};
use time::{Duration, OffsetDateTime};

use super::fault::{TlsFault, TlsFaultKind};

/// How long development certificates last.
const DEV_DAYS: i64 = 365;
/// How far back they start, for hosts whose clocks disagree.
const BACKDATE: Duration = Duration::hours(1);

/// A certificate and its private key in PEM form. `Debug` hides the key.
#[derive(Clone)]
pub struct IssuedCert {
    /// The certificate.
    pub cert_pem: String,
    /// The private key. Secret.
    pub key_pem: String,
}

impl fmt::Debug for IssuedCert {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IssuedCert {{ key hidden }}")
    }
}

/// What a certificate should be. Start from [`IssueRequest::for_broker`].
#[derive(Debug, Clone)]
pub struct IssueRequest {
    /// DNS names and IP addresses it carries.
    pub names: Vec<String>,
    /// The common name, which nobody checks.
    pub common_name: String,
    /// Usable as a server.
    pub server: bool,
    /// Usable as a client. With neither, the certificate names no usage.
    pub client: bool,
    /// An authority's certificate; for tests of what must be refused.
    pub is_ca: bool,
    /// Start of its validity.
    pub not_before: OffsetDateTime,
    /// End of its validity.
    pub not_after: OffsetDateTime,
}

impl IssueRequest {
    /// A server and client certificate for `names`, valid from an hour ago for `days` days.
    pub fn for_broker(names: &[String], days: i64) -> Self {
        let now = OffsetDateTime::now_utc();
        Self {
            names: names.to_vec(),
            common_name: names.first().cloned().unwrap_or_default(),
            server: true,
            client: true,
            is_ca: false,
            not_before: now - BACKDATE,
            not_after: now + Duration::days(days),
        }
    }

    fn params(&self) -> Result<CertificateParams, rcgen::Error> {
        let mut params = CertificateParams::new(self.names.clone())?;
        params.distinguished_name = DistinguishedName::new();
        let name = self.common_name.as_str();
        params.distinguished_name.push(DnType::CommonName, name);
        params.not_before = self.not_before;
        params.not_after = self.not_after;
        params.is_ca = if self.is_ca {
            IsCa::Ca(BasicConstraints::Unconstrained)
        } else {
            IsCa::ExplicitNoCa
        };
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        if self.server {
            let usage = ExtendedKeyUsagePurpose::ServerAuth;
            params.extended_key_usages.push(usage);
        }
        if self.client {
            let usage = ExtendedKeyUsagePurpose::ClientAuth;
            params.extended_key_usages.push(usage);
        }
        params.use_authority_key_identifier_extension = true;
        Ok(params)
    }
}

fn generation_failed(error: impl fmt::Display) -> TlsFault {
    TlsFault::new(
        TlsFaultKind::Refused,
        "(generated)",
        format!("a certificate cannot be made: {error}"),
        "check the names asked for",
    )
}

/// A development authority.
pub struct DevCa {
    certificate: rcgen::Certificate,
    key: KeyPair,
    cert_pem: String,
}

impl fmt::Debug for DevCa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DevCa {{ key hidden }}")
    }
}

impl DevCa {
    /// Makes a new authority.
    pub fn generate(common_name: &str) -> Result<Self, TlsFault> {
        let key = KeyPair::generate().map_err(generation_failed)?;
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params
            .distinguished_name
            .push(DnType::CommonName, common_name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let now = OffsetDateTime::now_utc();
        params.not_before = now - BACKDATE;
        params.not_after = now + Duration::days(DEV_DAYS * 10);
        let certificate = params.self_signed(&key).map_err(generation_failed)?;
        let cert_pem = certificate.pem();
        Ok(Self {
            certificate,
            key,
            cert_pem,
        })
    }

    /// Takes up an authority made earlier.
    pub fn from_pem(cert_pem: &str, key_pem: &str) -> Result<Self, TlsFault> {
        // The library's own text could quote the file, so it is not passed on.
        let unreadable = |_| generation_failed("the authority's files cannot be read");
        let key = KeyPair::from_pem(key_pem).map_err(unreadable)?;
        let params = CertificateParams::from_ca_cert_pem(cert_pem).map_err(unreadable)?;
        // Signing needs the authority's name and key only; the file's own text stays in use.
        let certificate = params.self_signed(&key).map_err(generation_failed)?;
        Ok(Self {
            certificate,
            key,
            cert_pem: cert_pem.to_string(),
        })
    }

    /// The authority's certificate, for CA files.
    pub fn cert_pem(&self) -> &str {
        &self.cert_pem
    }

    /// The authority's private key. Secret.
    pub fn key_pem(&self) -> String {
        self.key.serialize_pem()
    }

    /// Issues a certificate with a fresh key.
    pub fn issue(&self, request: &IssueRequest) -> Result<IssuedCert, TlsFault> {
        let key = KeyPair::generate().map_err(generation_failed)?;
        let params = request.params().map_err(generation_failed)?;
        let signed = params.signed_by(&key, &self.certificate, &self.key);
        Ok(IssuedCert {
            cert_pem: signed.map_err(generation_failed)?.pem(),
            key_pem: key.serialize_pem(),
        })
    }
}

/// A self-signed certificate and when it expires.
#[derive(Debug)]
pub(super) struct SelfSigned {
    pub cert: IssuedCert,
    pub not_after_s: i64,
}

/// A self-signed certificate that is not an authority's: it works as a server's certificate
/// and also in the CA file of those who should trust it.
pub(super) fn self_signed(names: &[String]) -> Result<SelfSigned, TlsFault> {
    let request = IssueRequest::for_broker(names, DEV_DAYS);
    let key = KeyPair::generate().map_err(generation_failed)?;
    let params = request.params().map_err(generation_failed)?;
    let signed = params.self_signed(&key).map_err(generation_failed)?;
    Ok(SelfSigned {
        cert: IssuedCert {
            cert_pem: signed.pem(),
            key_pem: key.serialize_pem(),
        },
        not_after_s: request.not_after.unix_timestamp(),
    })
}
