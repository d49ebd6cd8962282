//! What a pump and its endpoints are told at start, checked once.
//!
//! Invariant: a keep-alive is shorter than half of the idle timeout, so that one lost ping does not end a
//! healthy connection.

use std::sync::Arc;
use std::time::Duration;

use quinn_proto::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn_proto::{MtuDiscoveryConfig, TransportConfig};

use super::close_gate::Gated;
use super::hello::AlpnChoice;
use super::keys::SharedKeys;
use super::socket::DatagramIo;

/// Largest UDP payload we offer to receive; what QUIC allows at most.
pub const MAX_UDP_PAYLOAD_BYTES: u16 = 65_527;

/// Payload of a 1500-byte Ethernet frame after IPv6 and UDP headers.
pub const ETHERNET_UDP_PAYLOAD_BYTES: u16 = 1_452;

/// Largest payload probed for unless told otherwise. Loopback and jumbo frames carry it and a byte costs
/// 40 % less CPU than at 1452; larger ones gained nothing more.
pub const LARGEST_PROBED_UDP_PAYLOAD_BYTES: u16 = 4_096;

/// A setting that cannot work.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// Lower the keep-alive or raise the idle timeout.
    #[error(
        "keep-alive of {keep_alive:?} must be shorter than half of the idle timeout of {idle:?}"
    )]
    KeepAliveTooLong {
        /// The interval asked for.
        keep_alive: Duration,
        /// The timeout asked for.
        idle: Duration,
    },
    /// The number does not fit QUIC's 62 bits or the field's range.
    #[error("{0} is out of range")]
    OutOfRange(&'static str),
    /// The TLS configuration lacks TLS13_AES_128_GCM_SHA256, which QUIC needs for its first packets.
    #[error("the TLS configuration lacks the cipher suite QUIC starts with: {0}")]
    NoInitialCipher(#[from] quinn_proto::crypto::rustls::NoInitialCipherSuite),
    /// The socket cannot be used.
    #[error("cannot prepare the UDP socket: {0}")]
    Socket(#[from] std::io::Error),
    /// A connection id has one byte for the core.
    #[error("at most 256 cores and 255 endpoints a core")]
    TooMany,
}

/// Timers, windows and sizes of the connections of one endpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct TransportSettings {
    /// A connection ends after this long without hearing from the peer.
    pub idle_timeout: Duration,
    /// Ping after this long without sending; `None` leaves it to the peer.
    pub keep_alive: Option<Duration>,
    /// Bytes a peer may send ahead of our reading, per stream.
    pub stream_receive_window_bytes: u32,
    /// Bytes a peer may send ahead of our reading, per connection.
    pub connection_receive_window_bytes: u32,
    /// Bytes accepted from our send queues before the peer acknowledges them, per connection.
    pub send_window_bytes: u64,
    /// Streams with answers the peer may have open.
    pub max_bidi_streams: u32,
    /// Streams without answers the peer may have open.
    pub max_uni_streams: u32,
    /// UDP payload assumed to work before anything was probed.
    pub initial_mtu_bytes: u16,
    /// Largest UDP payload probed for.
    pub mtu_upper_bound_bytes: u16,
}

impl TransportSettings {
    /// For connections of clients: a frame of 16 MiB never stalls on its window.
    pub fn client_facing() -> Self {
        Self {
            idle_timeout: Duration::from_secs(30),
            keep_alive: None,
            stream_receive_window_bytes: 16 << 20,
            connection_receive_window_bytes: 32 << 20,
            // About what a UDP receive buffer of 4 MiB holds: more in flight overflows it.
            send_window_bytes: 4 << 20,
            max_bidi_streams: 1024,
            max_uni_streams: 1024,
            initial_mtu_bytes: 1200,
            mtu_upper_bound_bytes: LARGEST_PROBED_UDP_PAYLOAD_BYTES,
        }
    }

    /// For links between brokers: a dead peer is noticed within 4 s.
    pub fn peer_link() -> Self {
        Self {
            idle_timeout: Duration::from_secs(4),
            keep_alive: Some(Duration::from_secs(1)),
            stream_receive_window_bytes: 16 << 20,
            connection_receive_window_bytes: 32 << 20,
            // About what a UDP receive buffer of 4 MiB holds: more in flight overflows it.
            send_window_bytes: 4 << 20,
            max_bidi_streams: 1024,
            max_uni_streams: 1024,
            initial_mtu_bytes: 1200,
            mtu_upper_bound_bytes: LARGEST_PROBED_UDP_PAYLOAD_BYTES,
        }
    }

    /// Checks the settings and makes the form the QUIC state machine takes.
    pub fn build(&self) -> Result<Arc<TransportConfig>, SetupError> {
        if let Some(keep_alive) = self.keep_alive {
            if keep_alive * 2 >= self.idle_timeout {
                return Err(SetupError::KeepAliveTooLong {
                    keep_alive,
                    idle: self.idle_timeout,
                });
            }
        }
        let idle = self
            .idle_timeout
            .try_into()
            .map_err(|_| SetupError::OutOfRange("idle timeout"))?;
        if self.initial_mtu_bytes < 1200 || self.mtu_upper_bound_bytes < self.initial_mtu_bytes {
            return Err(SetupError::OutOfRange("packet size"));
        }
        let mut discovery = MtuDiscoveryConfig::default();
        discovery.upper_bound(self.mtu_upper_bound_bytes);
        let mut config = TransportConfig::default();
        config
            .max_idle_timeout(Some(idle))
            .keep_alive_interval(self.keep_alive)
            .stream_receive_window(self.stream_receive_window_bytes.into())
            .receive_window(self.connection_receive_window_bytes.into())
            .send_window(self.send_window_bytes)
            .max_concurrent_bidi_streams(self.max_bidi_streams.into())
            .max_concurrent_uni_streams(self.max_uni_streams.into())
            .initial_mtu(self.initial_mtu_bytes)
            .mtu_discovery_config(Some(discovery))
            .congestion_controller_factory(Arc::new(Gated::default()))
            .crypto_buffer_size(super::hello::MAX_HELLO_BYTES)
            // Acknowledgements stay at the default frequency: they already share a packet per received
            // batch, and asking for fewer gained nothing. Neither protocol uses QUIC datagrams.
            .datagram_receive_buffer_size(None);
        Ok(Arc::new(config))
    }
}

/// TLS of an endpoint that accepts connections.
#[derive(Clone)]
pub enum ServerTls {
    /// One configuration: with protocols in it, a client that offers none of them is refused.
    Strict(Arc<rustls::ServerConfig>),
    /// Clients that offer protocols get the first configuration, clients that offer none the second.
    AlpnOptional {
        /// Has the protocols in it.
        with_alpn: Arc<rustls::ServerConfig>,
        /// Has none.
        without_alpn: Arc<rustls::ServerConfig>,
    },
}

/// What an endpoint needs to accept connections.
#[derive(Clone)]
pub struct ServerSetup {
    /// Certificates, client verification, protocols.
    pub tls: ServerTls,
    /// From [`TransportSettings::build`].
    pub transport: Arc<TransportConfig>,
}

impl ServerSetup {
    pub(super) fn build(
        &self,
        keys: &SharedKeys,
    ) -> Result<Arc<quinn_proto::ServerConfig>, SetupError> {
        let quic = |tls: &Arc<rustls::ServerConfig>| QuicServerConfig::try_from(tls.clone());
        let crypto: Arc<dyn quinn_proto::crypto::ServerConfig> = match &self.tls {
            ServerTls::Strict(tls) => Arc::new(quic(tls)?),
            ServerTls::AlpnOptional {
                with_alpn,
                without_alpn,
            } => Arc::new(AlpnChoice {
                with_alpn: Arc::new(quic(with_alpn)?),
                without_alpn: Arc::new(quic(without_alpn)?),
            }),
        };
        let mut config = quinn_proto::ServerConfig::new(crypto, keys.token_key());
        config.transport_config(self.transport.clone());
        Ok(Arc::new(config))
    }
}

/// Makes what [`Pump::connect`](super::Pump::connect) takes from a TLS configuration.
pub fn client_config(
    tls: Arc<rustls::ClientConfig>,
    transport: Arc<TransportConfig>,
) -> Result<quinn_proto::ClientConfig, SetupError> {
    let mut config = quinn_proto::ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls)?));
    config.transport_config(transport);
    Ok(config)
}

/// One socket to be driven.
pub struct EndpointSpec {
    /// What the caller uses it for; handed back by [`Pump::role`](super::Pump::role).
    pub role: u8,
    /// The UDP seam; [`UdpIo`](super::UdpIo) over a real socket.
    pub io: Box<dyn DatagramIo>,
    /// Present if connections are accepted.
    pub server: Option<ServerSetup>,
    /// Whether the port is shared by all cores, so that datagrams of other cores may arrive here.
    pub shared_port: bool,
    /// Connections alive or closing; beyond it, newcomers are refused and counted.
    pub max_connections: usize,
    /// Accepted connections whose handshake is not complete; beyond it, newcomers are refused.
    pub max_handshakes: usize,
}

/// Settings of one pump.
#[derive(Debug, Clone)]
pub struct PumpConfig {
    /// This core, the first byte of its connection ids.
    pub core: u16,
    /// Cores that share the listening ports.
    pub cores: u16,
    /// Shared by all cores, kept over restarts.
    pub keys: SharedKeys,
    /// A handshake that takes longer is given up.
    pub handshake_timeout: Duration,
    /// Receive calls per socket and turn; each takes up to 16 batches of up to 64 KiB.
    pub receive_calls_per_turn: usize,
    /// Send calls per connection and turn; each carries up to 10 packets.
    pub send_calls_per_turn: usize,
}

impl PumpConfig {
    /// Defaults for core `core` of `cores`.
    pub fn new(core: u16, cores: u16, keys: SharedKeys) -> Self {
        Self {
            core,
            cores,
            keys,
            handshake_timeout: Duration::from_secs(10),
            receive_calls_per_turn: 2,
            send_calls_per_turn: 4,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_keep_alive_of_half_the_idle_timeout_is_refused() {
        let mut settings = TransportSettings::peer_link();
        assert!(settings.build().is_ok());
        settings.keep_alive = Some(settings.idle_timeout / 2);
        assert!(matches!(
            settings.build(),
            Err(SetupError::KeepAliveTooLong { .. })
        ));
        settings.keep_alive = Some(Duration::from_secs(10));
        settings.idle_timeout = Duration::from_secs(15);
        assert!(settings.build().is_err());
        assert!(TransportSettings::client_facing().build().is_ok());
    }

    #[test]
    fn sizes_out_of_order_are_refused() {
        let mut settings = TransportSettings::client_facing();
        settings.initial_mtu_bytes = 1199;
        assert!(settings.build().is_err());
        settings.initial_mtu_bytes = 1500;
        settings.mtu_upper_bound_bytes = 1499;
        assert!(settings.build().is_err());
        settings.mtu_upper_bound_bytes = 1500;
        assert!(settings.build().is_ok());
    }
}
