//! The mode without peer files: links are encrypted, and anybody who reaches the port is a
//! peer. Kept apart so that nothing here is used by accident.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{verify_tls12_signature, verify_tls13_signature, CryptoProvider};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::sign::CertifiedKey;
use rustls::{DigitallySignedStruct, Error, SignatureScheme};

use super::dev::{self_signed, SelfSigned};
use super::fault::TlsFault;
use super::files;

/// Accepts whatever certificate a server shows.
#[derive(Debug)]
pub(super) struct AcceptAnyServer {
    provider: Arc<CryptoProvider>,
}

impl AcceptAnyServer {
    pub(super) fn new(provider: Arc<CryptoProvider>) -> Arc<Self> {
        Arc::new(Self { provider })
    }
}

impl ServerCertVerifier for AcceptAnyServer {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, cert, dss, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, cert, dss, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider
            .signature_verification_algorithms
            .supported_schemes()
    }
}

/// A fresh self-signed certificate for `names`, ready to use.
pub(super) fn fresh_self_signed(
    names: &[String],
    provider: &CryptoProvider,
) -> Result<(CertifiedKey, SelfSigned), TlsFault> {
    let made = self_signed(names)?;
    let generated = std::path::Path::new("(generated)");
    let chain = files::certificates(generated, made.cert.cert_pem.as_bytes())?;
    let key = files::private_key(generated, made.cert.key_pem.as_bytes())?;
    let certified = CertifiedKey::from_der(chain, key, provider).map_err(|error| {
        TlsFault::new(
            super::TlsFaultKind::Refused,
            generated,
            format!("the generated certificate cannot be used: {error}"),
            "give certificate files instead",
        )
    })?;
    Ok((certified, made))
}
