//! Sending the datagrams of one socket, whatever the kernel says.
//!
//! Kernels accept segmentation offload on the socket and refuse it on the first real batch, or refuse the
//! ECN mark. A refused batch is sent again at once, one datagram each; batching then stays off for the
//! socket; if single datagrams are refused too, the ECN mark is dropped. Nothing waits for a QUIC timeout.
//!
//! Invariants: every error but `WouldBlock` is counted by reason; at most one warning a socket; datagrams
//! held back by `WouldBlock` go out before any newer one.

use std::io;
use std::net::{IpAddr, SocketAddr};

use super::socket::DatagramIo;

/// More segments a send save little and overflow receive buffers.
const MAX_GSO_SEGMENTS: usize = 10;
/// What one UDP datagram can carry, which bounds a whole batch as well.
const MAX_BATCH_BYTES: usize = 65_507;

/// What the socket did so far.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct SendCounters {
    /// Send calls that succeeded.
    pub calls: u64,
    /// Datagrams in them.
    pub datagrams: u64,
    /// Payload bytes in them.
    pub bytes: u64,
    /// Calls that met a full buffer; the datagrams were kept.
    pub would_block: u64,
    /// EIO.
    pub io_errors: u64,
    /// EINVAL.
    pub invalid: u64,
    /// EMSGSIZE; expected for probes of a larger packet size.
    pub too_large: u64,
    /// No route or a down interface.
    pub unreachable: u64,
    /// EPERM or EACCES: a firewall.
    pub forbidden: u64,
    /// ENOBUFS or ENOMEM.
    pub no_buffers: u64,
    /// ECONNREFUSED.
    pub refused: u64,
    /// Everything else.
    pub other: u64,
    /// Whether batching was switched off because the kernel refused a batch.
    pub batching_off: bool,
    /// Whether ECN was switched off because the kernel refused it.
    pub ecn_off: bool,
}

impl SendCounters {
    /// All errors together.
    pub fn errors(&self) -> u64 {
        self.io_errors
            + self.invalid
            + self.too_large
            + self.unreachable
            + self.forbidden
            + self.no_buffers
            + self.refused
            + self.other
    }

    fn count_error(&mut self, error: &io::Error) {
        *match error.raw_os_error() {
            Some(libc::EIO) => &mut self.io_errors,
            Some(libc::EINVAL) => &mut self.invalid,
            Some(libc::EMSGSIZE) => &mut self.too_large,
            Some(libc::ENETUNREACH | libc::EHOSTUNREACH | libc::ENETDOWN | libc::EADDRNOTAVAIL) => {
                &mut self.unreachable
            }
            Some(libc::EPERM | libc::EACCES) => &mut self.forbidden,
            Some(libc::ENOBUFS | libc::ENOMEM) => &mut self.no_buffers,
            Some(libc::ECONNREFUSED) => &mut self.refused,
            _ => &mut self.other,
        } += 1;
    }
}

struct HeldBack {
    contents: Vec<u8>,
    sent_bytes: usize,
    address: Address,
    segment_bytes: usize,
}

#[derive(Clone, Copy)]
struct Address {
    destination: SocketAddr,
    ecn: Option<quinn_udp::EcnCodepoint>,
    src_ip: Option<IpAddr>,
}

/// One socket and what it could not send yet.
pub(super) struct Outbox {
    pub(super) io: Box<dyn DatagramIo>,
    pub(super) counters: SendCounters,
    held_back: Option<HeldBack>,
    warned: bool,
}

impl Outbox {
    pub(super) fn new(io: Box<dyn DatagramIo>) -> Self {
        Self {
            io,
            counters: SendCounters::default(),
            held_back: None,
            warned: false,
        }
    }

    /// Packets the next batch may have at packet size `mtu`.
    pub(super) fn batch_packets(&self, mtu: u16) -> usize {
        if self.counters.batching_off {
            return 1;
        }
        let fit = MAX_BATCH_BYTES / usize::from(mtu.max(1));
        self.io
            .max_gso_segments()
            .min(MAX_GSO_SEGMENTS)
            .min(fit)
            .max(1)
    }

    pub(super) fn is_blocked(&self) -> bool {
        self.held_back.is_some()
    }

    /// Sends, or keeps what the kernel cannot take now. Must not be called while blocked.
    pub(super) fn send(&mut self, transmit: &quinn_proto::Transmit, buffer: &[u8]) {
        debug_assert!(self.held_back.is_none());
        let contents = &buffer[..transmit.size];
        let address = Address {
            destination: transmit.destination,
            ecn: transmit.ecn.map(|e| match e {
                quinn_proto::EcnCodepoint::Ect0 => quinn_udp::EcnCodepoint::Ect0,
                quinn_proto::EcnCodepoint::Ect1 => quinn_udp::EcnCodepoint::Ect1,
                quinn_proto::EcnCodepoint::Ce => quinn_udp::EcnCodepoint::Ce,
            }),
            src_ip: transmit.src_ip,
        };
        let segment_bytes = transmit.segment_size.unwrap_or(transmit.size).max(1);
        if let Some(sent_bytes) = self.send_from(contents, 0, address, segment_bytes) {
            self.held_back = Some(HeldBack {
                contents: contents.to_vec(),
                sent_bytes,
                address,
                segment_bytes,
            });
        }
    }

    /// Sends an answer that belongs to no connection; a full buffer drops it, the peer will ask again.
    pub(super) fn send_or_drop(&mut self, transmit: &quinn_proto::Transmit, buffer: &[u8]) {
        if !self.is_blocked() {
            self.send(transmit, buffer);
        }
    }

    /// Tries again what was held back; true when nothing is any more.
    pub(super) fn retry(&mut self) -> bool {
        let Some(mut held) = self.held_back.take() else {
            return true;
        };
        match self.send_from(
            &held.contents,
            held.sent_bytes,
            held.address,
            held.segment_bytes,
        ) {
            None => true,
            Some(sent_bytes) => {
                held.sent_bytes = sent_bytes;
                self.held_back = Some(held);
                false
            }
        }
    }

    /// Sends `contents[from..]`; `Some(offset)` when the kernel took only up to there.
    fn send_from(
        &mut self,
        contents: &[u8],
        from: usize,
        address: Address,
        segment_bytes: usize,
    ) -> Option<usize> {
        let rest = &contents[from..];
        let is_batch = rest.len() > segment_bytes;
        if is_batch && !self.counters.batching_off {
            match self.try_send(rest, address, Some(segment_bytes)) {
                Ok(()) => return None,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Some(from),
                Err(e) if is_offload_fault(&e) => {
                    self.counters.batching_off = true;
                    self.warn_once(&e, "sending one datagram a call from now on");
                }
                // Not the batch's fault: sent singly it would fail the same way.
                Err(_) => return None,
            }
        }
        let mut offset = from;
        while offset < contents.len() {
            let end = (offset + segment_bytes).min(contents.len());
            if self.send_single(&contents[offset..end], address) == Single::Blocked {
                return Some(offset);
            }
            offset = end;
        }
        None
    }

    fn send_single(&mut self, datagram: &[u8], address: Address) -> Single {
        match self.try_send(datagram, address, None) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Single::Blocked,
            Err(e) if is_offload_fault(&e) && address.ecn.is_some() && !self.counters.ecn_off => {
                self.counters.ecn_off = true;
                self.warn_once(&e, "sending without ECN marks from now on");
                match self.try_send(datagram, address, None) {
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Single::Blocked,
                    _ => {}
                }
            }
            _ => {}
        }
        Single::Done
    }

    fn try_send(
        &mut self,
        contents: &[u8],
        address: Address,
        segment_size: Option<usize>,
    ) -> io::Result<()> {
        let result = self.io.send(&quinn_udp::Transmit {
            destination: address.destination,
            ecn: address.ecn.filter(|_| !self.counters.ecn_off),
            contents,
            segment_size,
            src_ip: address.src_ip,
        });
        match &result {
            Ok(()) => {
                self.counters.calls += 1;
                self.counters.bytes += contents.len() as u64;
                self.counters.datagrams +=
                    segment_size.map_or(1, |s| contents.len().div_ceil(s)) as u64;
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => self.counters.would_block += 1,
            Err(e) => {
                tracing::debug!(destination = %address.destination, error = %e, bytes = contents.len(), "cannot send a datagram");
                self.counters.count_error(e);
            }
        }
        result
    }

    fn warn_once(&mut self, error: &io::Error, remedy: &'static str) {
        let local = self.io.local_addr().ok();
        if std::mem::replace(&mut self.warned, true) {
            tracing::debug!(%error, ?local, "the kernel refused a datagram; {remedy}");
        } else {
            tracing::warn!(%error, ?local, "the kernel refused a datagram; {remedy}");
        }
    }
}

#[derive(PartialEq, Eq)]
enum Single {
    Done,
    Blocked,
}

/// Errors by which kernels and devices refuse an offload or a control message they had accepted.
fn is_offload_fault(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EIO | libc::EINVAL | libc::EOPNOTSUPP)
    )
}
