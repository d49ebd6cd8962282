//! Certificates and TLS of one probe run; both QUIC drivers under comparison use them.

use std::sync::Arc;

use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};

use super::ProbeError;

/// A certificate for `localhost` made for one run.
#[derive(Clone)]
pub struct ProbeIdentity {
    certificate: Vec<u8>,
    key: Vec<u8>,
}

impl ProbeIdentity {
    /// Makes a certificate and key.
    pub fn generate() -> Result<Self, ProbeError> {
        let made = rcgen::generate_simple_self_signed(vec!["localhost".into()])
            .map_err(|e| ProbeError::Tls(e.to_string()))?;
        Ok(Self {
            certificate: made.cert.der().to_vec(),
            key: made.key_pair.serialize_der(),
        })
    }

    /// The certificate in DER, for the client's process.
    pub fn certificate(&self) -> &[u8] {
        &self.certificate
    }

    /// TLS of the server.
    pub fn server_tls(&self) -> Result<Arc<rustls::ServerConfig>, ProbeError> {
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(self.key.clone()));
        let config = rustls::ServerConfig::builder_with_provider(provider().into())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .and_then(|b| {
                b.with_no_client_auth()
                    .with_single_cert(vec![CertificateDer::from(self.certificate.clone())], key)
            })
            .map_err(|e| ProbeError::Tls(e.to_string()))?;
        Ok(Arc::new(config))
    }
}

/// TLS of a client that trusts `certificate`.
pub fn client_tls(certificate: &[u8]) -> Result<Arc<rustls::ClientConfig>, ProbeError> {
    let mut roots = rustls::RootCertStore::empty();
    roots
        .add(CertificateDer::from(certificate.to_vec()))
        .map_err(|e| ProbeError::Tls(e.to_string()))?;
    let mut config = rustls::ClientConfig::builder_with_provider(provider().into())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|e| ProbeError::Tls(e.to_string()))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    // Every handshake of the handshake probe is to be a full one.
    config.resumption = rustls::client::Resumption::disabled();
    Ok(Arc::new(config))
}

/// ring with AES-128-GCM first, as the broker has it.
fn provider() -> rustls::crypto::CryptoProvider {
    let mut provider = rustls::crypto::ring::default_provider();
    provider
        .cipher_suites
        .sort_by_key(|s| usize::from(s.suite() != rustls::CipherSuite::TLS13_AES_128_GCM_SHA256));
    provider
}
