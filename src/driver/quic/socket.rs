//! The UDP seam, its real form over quinn-udp, and the binding of one port by many cores.
//!
//! What happens to a datagram that could not be sent is decided in `outbox`, not here.

use std::io::{self, IoSliceMut};
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use quinn_udp::{RecvMeta, Transmit, UdpSockRef, UdpSocketState};
use shard_executor::rt::ReadReady;
use socket2::{Domain, Protocol, Socket, Type};

/// Kernel buffers asked for; the kernel may grant less.
const SOCKET_BUFFER_BYTES: usize = 4 << 20;
/// A port stays bound for a moment after a process that used io_uring has exited.
const ADDRESS_IN_USE_PATIENCE: Duration = Duration::from_secs(5);

/// One UDP socket as the pump sees it.
pub trait DatagramIo {
    /// Sends one datagram, or several of `segment_size`. Every error is reported, `WouldBlock` included.
    fn send(&mut self, transmit: &Transmit<'_>) -> io::Result<()>;

    /// Receives without waiting into `buffers`; each may get several datagrams of `stride` bytes.
    fn recv(&mut self, buffers: &mut [IoSliceMut<'_>], meta: &mut [RecvMeta]) -> io::Result<usize>;

    /// Ready when `recv` would return something. May be polled from turn to turn.
    fn poll_readable(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>>;

    /// Datagrams one send may carry.
    fn max_gso_segments(&self) -> usize;

    /// Whether the network layer may split our datagrams, which forbids probing for larger ones.
    fn may_fragment(&self) -> bool;

    /// The bound address.
    fn local_addr(&self) -> io::Result<SocketAddr>;
}

/// A kernel socket with segmentation offload both ways and ECN.
pub struct UdpIo {
    socket: UdpSocket,
    state: UdpSocketState,
    // Made at the first poll: it belongs to the executor of the core that polls.
    ready: Option<ReadReady>,
}

impl UdpIo {
    /// Takes a bound socket; may be called on any thread before the first poll.
    pub fn new(socket: UdpSocket) -> io::Result<Self> {
        let state = UdpSocketState::new(UdpSockRef::from(&socket))?;
        Ok(Self {
            socket,
            state,
            ready: None,
        })
    }

    /// Binds a socket of its own, for dialling.
    pub fn bind(addr: SocketAddr) -> io::Result<Self> {
        Self::new(bind_udp(addr)?)
    }
}

impl DatagramIo for UdpIo {
    fn send(&mut self, transmit: &Transmit<'_>) -> io::Result<()> {
        self.state
            .try_send(UdpSockRef::from(&self.socket), transmit)
    }

    fn recv(&mut self, buffers: &mut [IoSliceMut<'_>], meta: &mut [RecvMeta]) -> io::Result<usize> {
        self.state
            .recv(UdpSockRef::from(&self.socket), buffers, meta)
    }

    fn poll_readable(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let ready = match &mut self.ready {
            Some(ready) => ready,
            none => none.insert(ReadReady::new(&self.socket)?),
        };
        ready.poll_ready(cx)
    }

    fn max_gso_segments(&self) -> usize {
        self.state.max_gso_segments()
    }

    fn may_fragment(&self) -> bool {
        self.state.may_fragment()
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }
}

/// Binds one socket with large kernel buffers.
pub fn bind_udp(addr: SocketAddr) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::for_address(addr), Type::DGRAM, Some(Protocol::UDP))?;
    size_buffers(&socket);
    socket.bind(&addr.into())?;
    Ok(socket.into())
}

/// Binds `cores` sockets to one address, in core order, and steers datagrams to the core their
/// connection id names. With port 0 the kernel chooses one port for all.
///
/// The address must not be in use: a socket of a dying or second process in the same group would take a
/// share of the datagrams in silence. An address in use is retried for a few seconds.
pub fn bind_reuseport(addr: SocketAddr, cores: u16) -> io::Result<Vec<UdpSocket>> {
    if addr.port() != 0 {
        drop(bind_patiently(addr, false, ADDRESS_IN_USE_PATIENCE)?);
    }
    let mut addr = addr;
    let mut sockets = Vec::with_capacity(usize::from(cores));
    for _ in 0..cores.max(1) {
        let socket = bind_patiently(addr, true, ADDRESS_IN_USE_PATIENCE)?;
        size_buffers(&socket);
        let socket = UdpSocket::from(socket);
        addr = socket.local_addr()?;
        sockets.push(socket);
    }
    if cores > 1 {
        if let Err(error) = attach_steering(&sockets[0]) {
            tracing::warn!(%error, "cannot steer datagrams to their core; they are handed over in user space");
        }
    }
    Ok(sockets)
}

fn bind_patiently(addr: SocketAddr, share: bool, patience: Duration) -> io::Result<Socket> {
    let give_up = Instant::now() + patience;
    loop {
        let socket = Socket::new(Domain::for_address(addr), Type::DGRAM, Some(Protocol::UDP))?;
        if share {
            socket.set_reuse_port(true)?;
        }
        match socket.bind(&addr.into()) {
            Ok(()) => return Ok(socket),
            Err(e) if e.kind() == io::ErrorKind::AddrInUse && Instant::now() < give_up => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(e) => {
                return Err(io::Error::new(
                    e.kind(),
                    format!("cannot bind UDP {addr}: {e}"),
                ))
            }
        }
    }
}

fn size_buffers(socket: &Socket) {
    // Less than asked for costs throughput, not correctness; `check` reports the limits of the host.
    if let Err(error) = socket
        .set_recv_buffer_size(SOCKET_BUFFER_BYTES)
        .and_then(|()| socket.set_send_buffer_size(SOCKET_BUFFER_BYTES))
    {
        tracing::debug!(%error, "cannot size the UDP buffers");
    }
}

/// Attaches a filter to the group that picks the socket by the core byte of the connection id.
///
/// Short header: byte 1. Handshake: byte 6. Everything else, Initial above all, carries an id the client
/// chose: an index no socket has makes the kernel fall back to its hash of the addresses.
fn attach_steering(socket: &UdpSocket) -> io::Result<()> {
    const LOAD_BYTE: u16 = 0x30; // BPF_LD | BPF_B | BPF_ABS
    const AND: u16 = 0x54; // BPF_ALU | BPF_AND | BPF_K
    const JUMP_IF_ANY: u16 = 0x45; // BPF_JMP | BPF_JSET | BPF_K
    const JUMP_IF_EQUAL: u16 = 0x15; // BPF_JMP | BPF_JEQ | BPF_K
    const RETURN_A: u16 = 0x16;
    const RETURN_K: u16 = 0x06;
    let op = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let mut program = [
        op(LOAD_BYTE, 0, 0, 0),
        op(JUMP_IF_ANY, 2, 0, 0x80),
        op(LOAD_BYTE, 0, 0, 1),
        op(RETURN_A, 0, 0, 0),
        op(AND, 0, 0, 0x30),
        op(JUMP_IF_EQUAL, 0, 2, 0x20),
        op(LOAD_BYTE, 0, 0, 6),
        op(RETURN_A, 0, 0, 0),
        op(RETURN_K, 0, 0, u32::MAX),
    ];
    let filter = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_mut_ptr(),
    };
    // SAFETY: `filter` and the program it points to outlive the call; the kernel copies both.
    let rc = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_REUSEPORT_CBPF,
            std::ptr::from_ref(&filter).cast(),
            std::mem::size_of::<libc::sock_fprog>() as libc::socklen_t,
        )
    };
    if rc == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOPBACK: SocketAddr =
        SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

    #[test]
    fn all_cores_share_one_port_and_nobody_else_gets_it() {
        let sockets = bind_reuseport(LOOPBACK, 3).expect("bind");
        let addr = sockets[0].local_addr().expect("addr");
        assert_eq!(sockets.len(), 3);
        assert!(sockets
            .iter()
            .all(|s| s.local_addr().expect("addr") == addr));
        let second = bind_patiently(addr, false, Duration::ZERO);
        assert_eq!(
            second.map(|_| ()).map_err(|e| e.kind()),
            Err(io::ErrorKind::AddrInUse)
        );
        drop(sockets);
        bind_patiently(addr, false, ADDRESS_IN_USE_PATIENCE).expect("free again");
    }

    #[test]
    fn datagrams_reach_the_core_they_name_whoever_sends_them() {
        let sockets = bind_reuseport(LOOPBACK, 4).expect("bind");
        if attach_steering(&sockets[0]).is_err() {
            eprintln!("SKIPPED: this kernel does not let us attach a filter");
            return;
        }
        let addr = sockets[0].local_addr().expect("addr");
        for socket in &sockets {
            socket
                .set_read_timeout(Some(Duration::from_secs(5)))
                .expect("timeout");
        }
        for core in 0..4u8 {
            for _ in 0..16 {
                let sender = UdpSocket::bind(LOOPBACK).expect("sender");
                let short = [0x40, core, 1, 2, 3, 4, 5, 6, 7];
                let handshake = [0xe0, 0, 0, 0, 1, 8, core, 2, 3, 4, 5, 6, 7, 8];
                sender.send_to(&short, addr).expect("send");
                sender.send_to(&handshake, addr).expect("send");
                let mut buffer = [0; 64];
                for sent in [&short[..], &handshake[..]] {
                    let n = sockets[usize::from(core)].recv(&mut buffer).expect("recv");
                    assert_eq!(&buffer[..n], sent);
                }
            }
        }
    }
}
