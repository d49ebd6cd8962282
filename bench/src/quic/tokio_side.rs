//! The transport probe over tokio and quinn, for comparison with `felix_uring::driver::quic::probe`.
//!
//! Same certificate, cipher order, transport settings, message shapes and reports; one current-thread
//! runtime, as the other side has one core.

use std::collections::VecDeque;
use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use bytes::Bytes;
use felix_uring::driver::quic::probe::{
    client_tls, Latencies, ProbeIdentity, ProbeReport, Span, BULK_PART_BYTES,
};
use felix_uring::driver::quic::{ConnStats, TransportSettings};
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};

/// Runs a future on a runtime of this thread.
pub fn block_on<T>(future: impl std::future::Future<Output = Result<T>>) -> Result<T> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?
        .block_on(future)
}

/// quinn offers to receive 1472 bytes unless told otherwise, which would keep it from larger packets.
fn endpoint_config(settings: &TransportSettings) -> Result<quinn::EndpointConfig> {
    let mut config = quinn::EndpointConfig::default();
    config
        .max_udp_payload_size(settings.mtu_upper_bound_bytes.max(1472))
        .context("packet size out of range")?;
    Ok(config)
}

/// Serves until `stop`: swallows unidirectional streams, echoes bidirectional ones.
pub async fn serve(
    socket: UdpSocket,
    identity: &ProbeIdentity,
    settings: &TransportSettings,
    stop: &AtomicBool,
    mut on_end: impl FnMut(ProbeReport),
) -> Result<()> {
    let crypto = QuicServerConfig::try_from(identity.server_tls()?)?;
    let mut config = quinn::ServerConfig::with_crypto(Arc::new(crypto));
    config.transport_config(settings.build()?);
    let endpoint = quinn::Endpoint::new(
        endpoint_config(settings)?,
        Some(config),
        socket,
        Arc::new(quinn::TokioRuntime),
    )?;
    let (ended, mut reports) = tokio::sync::mpsc::unbounded_channel();
    let mut tick = tokio::time::interval(Duration::from_millis(100));
    while !stop.load(Ordering::Relaxed) {
        tokio::select! {
            Some(incoming) = endpoint.accept() => {
                let ended = ended.clone();
                tokio::spawn(async move {
                    // A handshake that fails has no report.
                    if let Ok(connection) = incoming.await {
                        let _ = ended.send(serve_connection(connection).await);
                    }
                });
            }
            Some(report) = reports.recv() => on_end(report),
            _ = tick.tick() => {}
        }
    }
    Ok(())
}

async fn serve_connection(connection: quinn::Connection) -> ProbeReport {
    let span = Span::start();
    let bytes = Arc::new(std::sync::atomic::AtomicU64::new(0));
    let operations = Arc::new(std::sync::atomic::AtomicU64::new(0));
    loop {
        tokio::select! {
            uni = connection.accept_uni() => match uni {
                Ok(mut recv) => {
                    let bytes = bytes.clone();
                    tokio::spawn(async move {
                        while let Ok(Some(chunk)) = recv.read_chunk(usize::MAX, true).await {
                            bytes.fetch_add(chunk.bytes.len() as u64, Ordering::Relaxed);
                        }
                    });
                }
                Err(_) => break,
            },
            bi = connection.accept_bi() => match bi {
                Ok((mut send, mut recv)) => {
                    let (bytes, operations) = (bytes.clone(), operations.clone());
                    tokio::spawn(async move {
                        while let Ok(Some(chunk)) = recv.read_chunk(usize::MAX, true).await {
                            bytes.fetch_add(chunk.bytes.len() as u64, Ordering::Relaxed);
                            operations.fetch_add(1, Ordering::Relaxed);
                            if send.write_chunk(chunk.bytes).await.is_err() {
                                break;
                            }
                        }
                        let _ = send.finish();
                    });
                }
                Err(_) => break,
            },
        }
    }
    let (seconds, cpu_s) = span.stop();
    ProbeReport {
        bytes: bytes.load(Ordering::Relaxed),
        operations: operations.load(Ordering::Relaxed),
        seconds,
        cpu_s,
        stats: ConnStats::from(connection.stats()),
        ..ProbeReport::default()
    }
}

/// A client of one server.
pub struct Client {
    endpoint: quinn::Endpoint,
    config: quinn::ClientConfig,
    remote: SocketAddr,
}

impl Client {
    /// A client that trusts `certificate`; takes a bound socket.
    pub fn new(
        socket: UdpSocket,
        remote: SocketAddr,
        certificate: &[u8],
        settings: &TransportSettings,
    ) -> Result<Self> {
        let crypto = QuicClientConfig::try_from(client_tls(certificate)?)?;
        let mut config = quinn::ClientConfig::new(Arc::new(crypto));
        config.transport_config(settings.build()?);
        let endpoint = quinn::Endpoint::new(
            endpoint_config(settings)?,
            None,
            socket,
            Arc::new(quinn::TokioRuntime),
        )?;
        Ok(Self {
            endpoint,
            config,
            remote,
        })
    }

    async fn connect(&self) -> Result<quinn::Connection> {
        let connecting =
            self.endpoint
                .connect_with(self.config.clone(), self.remote, "localhost")?;
        Ok(connecting.await?)
    }

    /// Sends on one unidirectional stream as fast as it goes.
    pub async fn bulk(&self, warm_up: Duration, duration: Duration) -> Result<ProbeReport> {
        let connection = self.connect().await?;
        let mut stream = connection.open_uni().await?;
        let part = Bytes::from(vec![0x5a; BULK_PART_BYTES]);
        let warm = Instant::now() + warm_up;
        while Instant::now() < warm {
            stream.write_chunk(part.clone()).await?;
        }
        let span = Span::start();
        let end = Instant::now() + duration;
        let mut bytes = 0;
        while Instant::now() < end {
            stream.write_chunk(part.clone()).await?;
            bytes += part.len() as u64;
        }
        let (seconds, cpu_s) = span.stop();
        let stats = ConnStats::from(connection.stats());
        connection.close(0u32.into(), b"done");
        Ok(ProbeReport {
            bytes,
            seconds,
            cpu_s,
            stats,
            ..ProbeReport::default()
        })
    }

    /// Sends messages on one bidirectional stream, `outstanding` at a time.
    pub async fn echo(
        &self,
        payload_bytes: usize,
        outstanding: usize,
        duration: Duration,
    ) -> Result<ProbeReport> {
        let connection = self.connect().await?;
        let (mut send, mut recv) = connection.open_bi().await?;
        let message = Bytes::from(vec![0x5a; payload_bytes.max(1)]);
        let span = Span::start();
        let end = Instant::now() + duration;
        let mut sent_at = VecDeque::new();
        let mut latencies = Latencies::default();
        let (mut returned, mut completed) = (0, 0);
        loop {
            let now = Instant::now();
            while sent_at.len() < outstanding.max(1) && now < end {
                send.write_chunk(message.clone()).await?;
                sent_at.push_back(now);
            }
            if sent_at.is_empty() {
                break;
            }
            let chunk = recv.read_chunk(usize::MAX, true).await?;
            returned += chunk.context("the server ended the stream")?.bytes.len();
            let now = Instant::now();
            while returned >= message.len() {
                returned -= message.len();
                completed += 1;
                if let Some(at) = sent_at.pop_front() {
                    latencies.record(now - at);
                }
            }
        }
        let (seconds, cpu_s) = span.stop();
        let stats = ConnStats::from(connection.stats());
        connection.close(0u32.into(), b"done");
        Ok(ProbeReport {
            bytes: completed * message.len() as u64,
            operations: completed,
            seconds,
            cpu_s,
            latencies_ns: latencies.into_sorted(),
            stats,
        })
    }

    /// Connects and closes, one after the other.
    pub async fn handshakes(&self, duration: Duration) -> Result<ProbeReport> {
        let span = Span::start();
        let end = Instant::now() + duration;
        let mut latencies = Latencies::default();
        let mut operations = 0;
        while Instant::now() < end {
            let start = Instant::now();
            let connection = self.connect().await?;
            latencies.record(start.elapsed());
            operations += 1;
            connection.close(0u32.into(), b"done");
        }
        let (seconds, cpu_s) = span.stop();
        Ok(ProbeReport {
            operations,
            seconds,
            cpu_s,
            latencies_ns: latencies.into_sorted(),
            ..ProbeReport::default()
        })
    }

    /// Lets the last close leave.
    pub async fn shut_down(self) {
        let _ = tokio::time::timeout(Duration::from_secs(1), self.endpoint.wait_idle()).await;
    }
}
