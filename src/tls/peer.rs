//! TLS between brokers: each proves its node id to the other.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, ServerConfig,
    SignatureScheme,
};

use crate::ids::NodeId;

use super::check::{judge_pair, read_pair, Demands, Issuer};
use super::fault::{TlsFault, TlsFaultKind};
use super::files;
use super::identity::{names_include, peer_names};
use super::provider::crypto_provider;
use super::rotate::{CertOrigin, CertWatch};
use super::shared::SharedCert;
use super::unauthenticated::{fresh_self_signed, AcceptAnyServer};
use super::INTERNAL_ALPN;

/// The three files of peer authentication.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerTlsPaths {
    /// The broker's certificate and any intermediates behind it.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The authorities that issue brokers' certificates.
    pub ca: PathBuf,
}

/// Both ends' TLS configurations of the links between brokers.
pub struct PeerTls {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    shared: Arc<SharedCert>,
    /// None without peer authentication.
    origin: Option<CertOrigin>,
    warnings: Vec<TlsFault>,
}

impl fmt::Debug for PeerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerTls")
            .field("is_authenticated", &self.is_authenticated())
            .field("not_after_s", &self.not_after_s())
            .finish_non_exhaustive()
    }
}

/// Verifies a listener's certificate against the authorities and, exactly, the node id dialled.
#[derive(Debug)]
struct ExactNameVerifier {
    authorities: Arc<WebPkiServerVerifier>,
}

impl ServerCertVerifier for ExactNameVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let verified = self.authorities.verify_server_cert(
            end_entity,
            intermediates,
            server_name,
            ocsp_response,
            now,
        )?;
        let names = peer_names(std::slice::from_ref(end_entity));
        if names_include(&names, &server_name.to_str()) {
            Ok(verified)
        } else {
            // A wildcard got it this far.
            Err(CertificateError::NotValidForName.into())
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.authorities.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.authorities.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.authorities.supported_verify_schemes()
    }
}

/// A name of numbers and dots is an address to a verifier, and never matches a DNS name.
fn check_node_id(node: &NodeId, paths: &PeerTlsPaths) -> Option<TlsFault> {
    match ServerName::try_from(node.as_str()) {
        Ok(ServerName::DnsName(_)) => None,
        _ => Some(TlsFault::new(
            TlsFaultKind::NodeIdNotDns,
            &paths.cert,
            format!(
                "no certificate can carry the node id {:?} as a DNS name",
                node.as_str()
            ),
            "choose a node id with a letter in its last label, for example broker-1",
        )),
    }
}

fn load_issuer(paths: &PeerTlsPaths, provider: &Arc<CryptoProvider>) -> Result<Issuer, TlsFault> {
    let bad = |cause: String| {
        TlsFault::new(
            TlsFaultKind::BadContent,
            &paths.ca,
            cause,
            "put the certificates of the issuing authorities into the file",
        )
    };
    let bytes = files::read(&paths.ca)?;
    let mut roots = RootCertStore::empty();
    for authority in files::certificates(&paths.ca, &bytes)? {
        roots
            .add(authority)
            .map_err(|error| bad(format!("an authority cannot be used: {error}")))?;
    }
    let roots = Arc::new(roots);
    let servers =
        WebPkiServerVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(provider))
            .build()
            .map_err(|error| bad(format!("the authorities cannot be used: {error}")))?;
    let clients = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(provider))
        .build()
        .map_err(|error| bad(format!("the authorities cannot be used: {error}")))?;
    Ok(Issuer {
        file: paths.ca.clone(),
        servers,
        clients,
    })
}

pub(super) fn unusable(error: &Error) -> TlsFault {
    TlsFault::new(
        TlsFaultKind::Refused,
        "(configuration)",
        format!("the TLS library refuses the configuration: {error}"),
        "report this as a defect",
    )
}

fn client_config(
    provider: &Arc<CryptoProvider>,
    verifier: Arc<dyn ServerCertVerifier>,
    shared: &Arc<SharedCert>,
) -> Result<Arc<ClientConfig>, TlsFault> {
    let mut config = ClientConfig::builder_with_provider(Arc::clone(provider))
        .with_protocol_versions(&[&TLS13])
        .map_err(|error| unusable(&error))?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_client_cert_resolver(Arc::clone(shared) as _);
    config.alpn_protocols = vec![INTERNAL_ALPN.to_vec()];
    // A resumed session would skip the check of a certificate that was replaced or expired.
    config.resumption = Resumption::disabled();
    Ok(Arc::new(config))
}

fn server_config(
    provider: &Arc<CryptoProvider>,
    clients: Option<&Arc<dyn ClientCertVerifier>>,
    shared: &Arc<SharedCert>,
) -> Result<Arc<ServerConfig>, TlsFault> {
    let builder = ServerConfig::builder_with_provider(Arc::clone(provider))
        .with_protocol_versions(&[&TLS13])
        .map_err(|error| unusable(&error))?;
    let builder = match clients {
        Some(verifier) => builder.with_client_cert_verifier(Arc::clone(verifier)),
        None => builder.with_no_client_auth(),
    };
    let mut config = builder.with_cert_resolver(Arc::clone(shared) as _);
    config.alpn_protocols = vec![INTERNAL_ALPN.to_vec()];
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

impl PeerTls {
    /// Loads and checks the three files for `node` at `now_s` seconds since the epoch. Names
    /// every fault of every file.
    pub fn load(paths: &PeerTlsPaths, node: &NodeId, now_s: u64) -> Result<Self, Vec<TlsFault>> {
        let provider = crypto_provider();
        let mut faults: Vec<TlsFault> = check_node_id(node, paths).into_iter().collect();
        let issuer = match load_issuer(paths, &provider) {
            Ok(issuer) => Some(issuer),
            Err(fault) => {
                faults.push(fault);
                None
            }
        };
        let demands = Demands {
            name: Some(node.as_str().to_string()),
            server: true,
            client: true,
            issuer: issuer.clone(),
        };
        let pair = read_pair(&paths.cert, &paths.key).and_then(|bytes| {
            judge_pair(&paths.cert, &paths.key, &bytes, &demands, &provider, now_s)
                .map(|accepted| (bytes, accepted))
        });
        let (bytes, accepted, issuer) = match (pair, issuer) {
            (Ok((bytes, accepted)), Some(issuer)) if faults.is_empty() => (bytes, accepted, issuer),
            (pair, _) => {
                faults.extend(pair.err().into_iter().flatten());
                return Err(faults);
            }
        };
        let shared = SharedCert::new(accepted.key, accepted.not_after_s);
        let verifier = Arc::new(ExactNameVerifier {
            authorities: issuer.servers,
        });
        Ok(Self {
            client: client_config(&provider, verifier, &shared).map_err(|f| vec![f])?,
            server: server_config(&provider, Some(&issuer.clients), &shared)
                .map_err(|f| vec![f])?,
            shared,
            origin: Some(CertOrigin {
                cert: paths.cert.clone(),
                key: paths.key.clone(),
                demands,
                provider,
                bytes,
            }),
            warnings: accepted.warnings,
        })
    }

    /// Links that are encrypted and nothing more: a self-signed certificate, and whatever the
    /// other side shows is accepted. For networks only brokers can reach.
    pub fn unauthenticated(node: &NodeId) -> Result<Self, Vec<TlsFault>> {
        let provider = crypto_provider();
        let names = [node.as_str().to_string()];
        let (key, made) = fresh_self_signed(&names, &provider).map_err(|fault| vec![fault])?;
        let shared = SharedCert::new(key, made.not_after_s);
        let verifier = AcceptAnyServer::new(Arc::clone(&provider));
        Ok(Self {
            client: client_config(&provider, verifier, &shared).map_err(|f| vec![f])?,
            server: server_config(&provider, None, &shared).map_err(|f| vec![f])?,
            shared,
            origin: None,
            warnings: Vec::new(),
        })
    }

    /// The configuration to dial with; the server name is the node id.
    pub fn client_config(&self) -> &Arc<ClientConfig> {
        &self.client
    }

    /// The configuration to accept with.
    pub fn server_config(&self) -> &Arc<ServerConfig> {
        &self.server
    }

    /// Whether peers prove who they are. If not, their certificates say nothing.
    pub fn is_authenticated(&self) -> bool {
        self.origin.is_some()
    }

    /// When the certificate in use expires, in seconds since the epoch.
    pub fn not_after_s(&self) -> i64 {
        self.shared.not_after_s()
    }

    /// What will soon be wrong.
    pub fn warnings(&self) -> &[TlsFault] {
        &self.warnings
    }

    /// Watches the files for renewals; nothing to watch without peer authentication.
    pub fn watch(&self, now: Instant) -> Option<CertWatch> {
        let origin = self.origin.as_ref()?;
        Some(origin.watch(&self.shared, now))
    }
}
