//! QUIC ends of the tests.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use felix_uring::tls::crypto_provider;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::RootCertStore;

/// A certificate and its key in PEM.
#[derive(Debug, Clone)]
pub struct Identity {
    pub cert_pem: String,
    pub key_pem: String,
}

impl Identity {
    /// Reads the two files.
    pub fn read(cert: &Path, key: &Path) -> Self {
        let read = |path: &Path| {
            std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
        };
        Self {
            cert_pem: read(cert),
            key_pem: read(key),
        }
    }

    fn chain(&self) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
        let certs = CertificateDer::pem_slice_iter(self.cert_pem.as_bytes())
            .collect::<Result<Vec<_>, _>>()
            .expect("a certificate");
        let key = PrivateKeyDer::from_pem_slice(self.key_pem.as_bytes()).expect("a key");
        (certs, key)
    }
}

/// How an end dials.
pub struct Dial<'a> {
    pub addr: SocketAddr,
    pub server_name: &'a str,
    pub ca: &'a Path,
    pub alpn: Option<&'a [u8]>,
    pub identity: Option<&'a Identity>,
}

fn roots(ca: &Path) -> RootCertStore {
    let mut roots = RootCertStore::empty();
    for cert in CertificateDer::pem_file_iter(ca).expect("the CA file") {
        roots.add(cert.expect("a CA certificate")).expect("a root");
    }
    roots
}

fn transport() -> Arc<quinn::TransportConfig> {
    let mut transport = quinn::TransportConfig::default();
    transport.max_idle_timeout(Some(Duration::from_secs(30).try_into().expect("in range")));
    transport.keep_alive_interval(Some(Duration::from_secs(1)));
    transport.stream_receive_window((16u32 << 20).into());
    Arc::new(transport)
}

/// Dials from a socket of its own; the endpoint must live as long as the connection.
pub async fn dial(
    dial: Dial<'_>,
) -> Result<(quinn::Endpoint, quinn::Connection), quinn::ConnectionError> {
    let builder = rustls::ClientConfig::builder_with_provider(crypto_provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("TLS 1.3")
        .with_root_certificates(roots(dial.ca));
    let mut tls = match dial.identity {
        None => builder.with_no_client_auth(),
        Some(identity) => {
            let (chain, key) = identity.chain();
            builder
                .with_client_auth_cert(chain, key)
                .expect("a key that matches")
        }
    };
    tls.alpn_protocols = dial.alpn.map(<[u8]>::to_vec).into_iter().collect();
    let quic = QuicClientConfig::try_from(tls).expect("a QUIC configuration");
    let mut config = quinn::ClientConfig::new(Arc::new(quic));
    config.transport_config(transport());
    let own: IpAddr = match dial.addr.ip().is_loopback() {
        true => Ipv4Addr::LOCALHOST.into(),
        false => Ipv4Addr::UNSPECIFIED.into(),
    };
    let endpoint = quinn::Endpoint::client((own, 0).into()).expect("a socket");
    let connecting = endpoint
        .connect_with(config, dial.addr, dial.server_name)
        .expect("a name that can be dialled");
    Ok((endpoint.clone(), connecting.await?))
}

/// Listens as a broker's internal listener does, asking for a certificate of `ca`.
pub fn listen_as_peer(addr: SocketAddr, identity: &Identity, ca: &Path) -> quinn::Endpoint {
    listen(addr, identity, ca, Some(felix_uring::tls::INTERNAL_ALPN))
}

/// The same with another protocol, or without any.
pub fn listen(
    addr: SocketAddr,
    identity: &Identity,
    ca: &Path,
    alpn: Option<&[u8]>,
) -> quinn::Endpoint {
    let verifier = rustls::server::WebPkiClientVerifier::builder_with_provider(
        Arc::new(roots(ca)),
        crypto_provider(),
    )
    .build()
    .expect("a verifier");
    let (chain, key) = identity.chain();
    let mut tls = rustls::ServerConfig::builder_with_provider(crypto_provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("TLS 1.3")
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key)
        .expect("a key that matches");
    tls.alpn_protocols = alpn.map(<[u8]>::to_vec).into_iter().collect();
    let quic = QuicServerConfig::try_from(tls).expect("a QUIC configuration");
    let mut config = quinn::ServerConfig::with_crypto(Arc::new(quic));
    config.transport_config(transport());
    quinn::Endpoint::server(config, addr).expect("the port is free")
}
