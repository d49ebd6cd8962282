//! The client half of a transport measurement.

use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

use anyhow::{Context, Result};
use felix_uring::driver::quic::probe::{self, ProbeReport};
use felix_uring::driver::quic::TransportSettings;
use shard_executor::rt;
use shard_executor::topology::pin_current_thread;

use super::server::{ServerProcess, Side};
use crate::quic::tokio_side;

/// Kernel buffers of the other side's socket; the broker's own asks for the same.
const SOCKET_BUFFER_BYTES: usize = 4 << 20;
/// Not measured at the start of a bulk transfer.
const BULK_WARM_UP: Duration = Duration::from_millis(500);

/// One measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// One stream, as fast as it goes.
    Bulk,
    /// Messages of this size come back, so many outstanding.
    Echo {
        /// Bytes of a message.
        bytes: usize,
        /// Outstanding at most.
        outstanding: usize,
    },
    /// Connect and close.
    Handshakes,
}

/// Drives one measurement from a CPU of this process.
pub fn measure(
    side: Side,
    server: &ServerProcess,
    cpu: usize,
    spin_us: u64,
    shape: Shape,
    duration: Duration,
) -> Result<ProbeReport> {
    let (addr, certificate) = (server.addr, server.certificate.clone());
    let settings = TransportSettings::peer_link();
    match side {
        Side::Felix => {
            let mut core = rt::CoreSpec::new(0);
            core.cpu = Some(cpu);
            let spin = Duration::from_micros(spin_us);
            let measured = rt::spawn_core(core, move || async move {
                let mut client = probe::Client::new(addr, &certificate, &settings, spin)?;
                let report = match shape {
                    Shape::Bulk => client.bulk(BULK_WARM_UP, duration).await,
                    Shape::Echo { bytes, outstanding } => {
                        client.echo(bytes, outstanding, duration).await
                    }
                    Shape::Handshakes => client.handshakes(duration).await,
                };
                client.shut_down().await;
                anyhow::Ok(report?)
            })?;
            measured.join()?
        }
        // A thread of its own: the pinning ends with it.
        Side::Tokio => std::thread::spawn(move || {
            pin_current_thread(&[cpu])?;
            tokio_side::block_on(tokio_client(addr, certificate, settings, shape, duration))
        })
        .join()
        .map_err(|_| anyhow::anyhow!("the measurement panicked"))?,
    }
}

async fn tokio_client(
    addr: SocketAddr,
    certificate: Vec<u8>,
    settings: TransportSettings,
    shape: Shape,
    duration: Duration,
) -> Result<ProbeReport> {
    let client = tokio_side::Client::new(dialling_socket(addr)?, addr, &certificate, &settings)?;
    let report = match shape {
        Shape::Bulk => client.bulk(BULK_WARM_UP, duration).await,
        Shape::Echo { bytes, outstanding } => client.echo(bytes, outstanding, duration).await,
        Shape::Handshakes => client.handshakes(duration).await,
    };
    client.shut_down().await;
    report
}

fn dialling_socket(remote: SocketAddr) -> Result<UdpSocket> {
    use std::os::fd::AsRawFd;
    let local = match remote.is_ipv4() {
        true => "0.0.0.0:0",
        false => "[::]:0",
    };
    let socket = UdpSocket::bind(local).context("cannot bind a UDP socket")?;
    let bytes = SOCKET_BUFFER_BYTES as libc::c_int;
    for option in [libc::SO_RCVBUF, libc::SO_SNDBUF] {
        // SAFETY: the value is a live integer of the size given. The kernel may grant less, which is
        // no error.
        unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                option,
                (&raw const bytes).cast(),
                size_of_val(&bytes) as libc::socklen_t,
            );
        }
    }
    Ok(socket)
}
