//! TLS for clients.
//!
//! A client may offer the protocol `felix/1` or none at all, and the library refuses one of
//! the two with any single configuration. So there are two, and the listener picks by looking
//! at the client's first message.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use rustls::crypto::CryptoProvider;
use rustls::server::NoServerSessionStorage;
use rustls::version::TLS13;
use rustls::ServerConfig;

use super::check::{judge_pair, read_pair, Demands};
use super::fault::TlsFault;
use super::peer::unusable;
use super::provider::crypto_provider;
use super::rotate::{CertOrigin, CertWatch};
use super::shared::SharedCert;
use super::unauthenticated::fresh_self_signed;
use super::CLIENT_ALPN;

/// Where the client listener's certificate comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClientCertSource {
    /// Files.
    Files {
        /// The certificate and any intermediates behind it.
        cert: PathBuf,
        /// Its private key.
        key: PathBuf,
    },
    /// A certificate made at start, for `localhost` and these names.
    SelfSigned {
        /// Names and addresses besides `localhost`.
        names: Vec<String>,
    },
}

/// The client listener's TLS configurations.
pub struct ClientTls {
    with_alpn: Arc<ServerConfig>,
    without_alpn: Arc<ServerConfig>,
    shared: Arc<SharedCert>,
    origin: Option<CertOrigin>,
    self_signed_pem: Option<String>,
    warnings: Vec<TlsFault>,
}

impl fmt::Debug for ClientTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientTls")
            .field("not_after_s", &self.not_after_s())
            .finish_non_exhaustive()
    }
}

fn server_config(
    provider: &Arc<CryptoProvider>,
    shared: &Arc<SharedCert>,
    alpn: &[&[u8]],
) -> Result<Arc<ServerConfig>, TlsFault> {
    let mut config = ServerConfig::builder_with_provider(Arc::clone(provider))
        .with_protocol_versions(&[&TLS13])
        .map_err(|error| unusable(&error))?
        .with_no_client_auth()
        .with_cert_resolver(Arc::clone(shared) as _);
    config.alpn_protocols = alpn.iter().map(|protocol| protocol.to_vec()).collect();
    // A session store is one lock that every core would meet at.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

impl ClientTls {
    /// Loads and checks the files, or makes a certificate. `now_s` is in seconds since the
    /// epoch.
    pub fn load(source: &ClientCertSource, now_s: u64) -> Result<Self, Vec<TlsFault>> {
        let provider = crypto_provider();
        let (shared, origin, self_signed_pem, warnings) = match source {
            ClientCertSource::Files { cert, key } => {
                let demands = Demands {
                    name: None,
                    server: true,
                    client: false,
                    issuer: None,
                };
                let bytes = read_pair(cert, key)?;
                let accepted = judge_pair(cert, key, &bytes, &demands, &provider, now_s)?;
                let origin = CertOrigin {
                    cert: cert.clone(),
                    key: key.clone(),
                    demands,
                    provider: Arc::clone(&provider),
                    bytes,
                };
                let shared = SharedCert::new(accepted.key, accepted.not_after_s);
                (shared, Some(origin), None, accepted.warnings)
            }
            ClientCertSource::SelfSigned { names } => {
                let mut all = vec!["localhost".to_string()];
                all.extend(names.iter().filter(|name| *name != "localhost").cloned());
                let (key, made) = fresh_self_signed(&all, &provider).map_err(|f| vec![f])?;
                let shared = SharedCert::new(key, made.not_after_s);
                (shared, None, Some(made.cert.cert_pem), Vec::new())
            }
        };
        Ok(Self {
            with_alpn: server_config(&provider, &shared, &[CLIENT_ALPN]).map_err(|f| vec![f])?,
            without_alpn: server_config(&provider, &shared, &[]).map_err(|f| vec![f])?,
            shared,
            origin,
            self_signed_pem,
            warnings,
        })
    }

    /// For a client that offers protocols: selects `felix/1`, refuses every other.
    pub fn with_alpn(&self) -> &Arc<ServerConfig> {
        &self.with_alpn
    }

    /// For a client that offers none.
    pub fn without_alpn(&self) -> &Arc<ServerConfig> {
        &self.without_alpn
    }

    /// The certificate made at start, for clients' CA files.
    pub fn self_signed_pem(&self) -> Option<&str> {
        self.self_signed_pem.as_deref()
    }

    /// When the certificate in use expires, in seconds since the epoch.
    pub fn not_after_s(&self) -> i64 {
        self.shared.not_after_s()
    }

    /// What will soon be wrong.
    pub fn warnings(&self) -> &[TlsFault] {
        &self.warnings
    }

    /// Watches the files for renewals; nothing to watch when the certificate was made here.
    pub fn watch(&self, now: Instant) -> Option<CertWatch> {
        let origin = self.origin.as_ref()?;
        Some(origin.watch(&self.shared, now))
    }
}
