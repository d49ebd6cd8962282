//! Readiness of a UDP socket that other code reads.
//!
//! Duty: tell a core's loop that datagrams wait on a socket. It does not read them: quinn-udp does,
//! many at a time with one system call.
//!
//! glommio has no public readiness, so this peeks one byte through the ring. Invariants:
//! * the pending peek is kept across turns of the loop; dropping it would queue a cancellation each
//!   turn;
//! * the pending peek is polled only when it was woken. glommio keeps one more copy of the waker for
//!   every poll of a pending operation, and a task's waker counts to 32,767 only: a loop that wakes
//!   for other sockets while this one is quiet would end the process.

use std::future::Future;
use std::io;
use std::os::fd::{AsFd, FromRawFd, IntoRawFd};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use atomic_waker::AtomicWaker;
use glommio::net::UdpSocket;

type Peek = Pin<Box<dyn Future<Output = io::Result<()>>>>;

/// Stands between the peek and the task: remembers that the peek was woken, and wakes whoever
/// polled last.
#[derive(Default)]
struct Relay {
    is_woken: AtomicBool,
    task: AtomicWaker,
}

impl Wake for Relay {
    fn wake(self: Arc<Self>) {
        self.is_woken.store(true, Ordering::Release);
        self.task.wake();
    }
}

/// Watches one UDP socket. Must be made and used on the core that uses the socket.
pub struct ReadReady {
    socket: Rc<UdpSocket>,
    pending: Option<Peek>,
    relay: Arc<Relay>,
    ready: u64,
    socket_errors: u64,
}

impl ReadReady {
    /// Watches the socket behind `fd` through a duplicate of the descriptor.
    ///
    /// `fd` must be a UDP socket (it is checked): a stream socket would lose nothing, but a peek
    /// on it reports a closed peer as ready for ever.
    ///
    /// # Errors
    /// When the descriptor is not a datagram socket or cannot be duplicated.
    pub fn new(fd: impl AsFd) -> io::Result<Self> {
        let owned = fd.as_fd().try_clone_to_owned()?;
        require_datagram_socket(&owned)?;
        // SAFETY: the descriptor was just duplicated and is owned here alone; it passes to the
        // socket, which closes it.
        let socket = unsafe { UdpSocket::from_raw_fd(owned.into_raw_fd()) };
        Ok(Self {
            socket: Rc::new(socket),
            pending: None,
            relay: Arc::default(),
            ready: 0,
            socket_errors: 0,
        })
    }

    /// Ready when at least one datagram, or an error of the socket, waits to be read. Read until
    /// the socket would block before polling again: readiness is not remembered.
    ///
    /// # Errors
    /// When the ring cannot watch the socket at all. Errors that a datagram socket reports and
    /// clears (an unreachable peer, say) are readiness, counted, not errors here.
    pub fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.relay.task.register(cx.waker());
        let is_started = self.pending.is_some();
        let is_woken = self.relay.is_woken.swap(false, Ordering::AcqRel);
        if is_started && !is_woken {
            return Poll::Pending;
        }
        let pending = self
            .pending
            .get_or_insert_with(|| start_peek(self.socket.clone()));
        let waker = Waker::from(self.relay.clone());
        let result = match pending.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(result) => result,
        };
        self.pending = None;
        match result {
            Ok(()) => self.ready += 1,
            Err(error) if is_passing(&error) => self.socket_errors += 1,
            Err(error) => return Poll::Ready(Err(error)),
        }
        Poll::Ready(Ok(()))
    }

    /// Times the socket was found ready.
    pub fn ready_count(&self) -> u64 {
        self.ready
    }

    /// Times the socket reported a passing error instead of a datagram.
    pub fn socket_error_count(&self) -> u64 {
        self.socket_errors
    }
}

fn start_peek(socket: Rc<UdpSocket>) -> Peek {
    Box::pin(async move {
        let mut byte = [0_u8; 1];
        socket
            .peek_from(&mut byte)
            .await
            .map(|_| ())
            .map_err(io::Error::from)
    })
}

fn require_datagram_socket(fd: &impl AsFd) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    let mut kind: libc::c_int = 0;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: `kind` and `len` are live locals of the sizes the option wants.
    let result = unsafe {
        libc::getsockopt(
            fd.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_TYPE,
            (&raw mut kind).cast(),
            &raw mut len,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    if kind != libc::SOCK_DGRAM {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "not a datagram socket",
        ));
    }
    Ok(())
}

/// Errors a UDP socket reports once and recovers from; whoever reads the socket goes on.
fn is_passing(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(
            libc::ECONNREFUSED
                | libc::ECONNRESET
                | libc::EHOSTUNREACH
                | libc::ENETUNREACH
                | libc::EHOSTDOWN
                | libc::ENETDOWN
                | libc::EMSGSIZE
                | libc::EAGAIN
                | libc::EINTR
        )
    )
}
