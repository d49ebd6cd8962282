//! TLS of the load generator towards brokers.

use std::path::Path;
use std::sync::Arc;

use anyhow::{bail, Context, Result};
use felix_uring::tls::{crypto_provider, CLIENT_ALPN};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::CertificateDer;

/// Trusts the authorities of a PEM file, with the cipher order of the brokers.
pub fn trust(ca: &Path) -> Result<Arc<rustls::ClientConfig>> {
    let mut roots = rustls::RootCertStore::empty();
    let certificates = CertificateDer::pem_file_iter(ca).with_context(|| {
        format!(
            "{} cannot be read; give the CA file of the cluster",
            ca.display()
        )
    })?;
    for certificate in certificates {
        roots.add(certificate.with_context(|| format!("{}", ca.display()))?)?;
    }
    if roots.is_empty() {
        bail!("{} holds no certificate in PEM form", ca.display());
    }
    let mut config = rustls::ClientConfig::builder_with_provider(crypto_provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![CLIENT_ALPN.to_vec()];
    Ok(Arc::new(config))
}
