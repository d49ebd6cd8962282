//! A private io_uring for the storage of one core.
//!
//! Submits writes, flushes and reads, and hands back what finished. Completions announce themselves on an
//! eventfd, which the core's executor watches; a busy core may also look without being told. Knows nothing
//! of groups and logs.
//!
//! Invariants: memory given to the kernel is owned by this module until the kernel gave the operation back,
//! also when the one who asked has gone; dropping the ring waits for that.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::rc::Rc;
use std::task::Waker;

use io_uring::{cqueue, opcode, types, IoUring};

use crate::machine::{Action, IoId};
use crate::slab::Draft;

/// Room for results of operations submitted and not reaped.
const ENTRIES: u32 = 256;

/// Where a read leaves its result.
#[derive(Default)]
pub struct ReadSlot {
    /// The buffer and how many bytes of the asked ones are in it.
    pub result: Option<(Draft, io::Result<usize>)>,
    /// Woken when the result is there.
    pub waker: Option<Waker>,
}

/// A read into a part of a buffer.
pub struct ReadOp {
    /// The file.
    pub file: Rc<File>,
    /// Position in the file.
    pub position: u64,
    /// The buffer; comes back with the result.
    pub draft: Draft,
    /// Where in the buffer to read to.
    pub at: usize,
    /// How much to read.
    pub len: usize,
    /// Where the result goes.
    pub slot: Rc<RefCell<ReadSlot>>,
}

/// An operation of the kernel.
pub enum Op {
    /// A write of a group, or of a part of one. `len` may be less than the data's when a fault asks so.
    Write {
        /// The machine's action.
        action: Action,
        /// The file.
        file: Rc<File>,
        /// Bytes to store.
        len: usize,
    },
    /// An fdatasync.
    Flush {
        /// The machine's id.
        id: IoId,
        /// The file.
        file: Rc<File>,
    },
    /// A read.
    Read(ReadOp),
}

/// What the kernel answered.
pub struct Done {
    /// The operation.
    pub op: Op,
    /// Bytes, or a negative error number.
    pub result: i32,
}

/// See the module documentation.
pub struct Ring {
    ring: IoUring,
    eventfd: OwnedFd,
    ops: Vec<Option<Op>>,
    free: Vec<usize>,
    backlog: VecDeque<Op>,
    in_kernel: usize,
    unsubmitted: bool,
    /// Reused from call to call.
    entries: Vec<cqueue::Entry>,
}

impl Ring {
    /// A ring with its eventfd.
    pub fn new() -> io::Result<Self> {
        let ring = IoUring::builder().setup_clamp().build(ENTRIES)?;
        // SAFETY: plain system call without pointers.
        let raw = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
        if raw < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just made and is owned by nobody else.
        let eventfd = unsafe { OwnedFd::from_raw_fd(raw) };
        ring.submitter().register_eventfd(eventfd.as_raw_fd())?;
        Ok(Self {
            ring,
            eventfd,
            ops: Vec::with_capacity(ENTRIES as usize),
            free: Vec::with_capacity(ENTRIES as usize),
            backlog: VecDeque::new(),
            in_kernel: 0,
            unsubmitted: false,
            entries: Vec::new(),
        })
    }

    /// A second descriptor of the eventfd.
    pub fn clone_eventfd(&self) -> io::Result<OwnedFd> {
        self.eventfd.try_clone()
    }

    /// Queues an operation; `submit` hands it to the kernel.
    pub fn push(&mut self, op: Op) {
        if self.in_kernel >= ENTRIES as usize {
            self.backlog.push_back(op);
            return;
        }
        let slot = self.free.pop().unwrap_or_else(|| {
            self.ops.push(None);
            self.ops.len() - 1
        });
        self.ops[slot] = Some(op);
        let Some(op) = self.ops[slot].as_mut() else {
            return;
        };
        let entry = match op {
            Op::Write { action, file, len } => {
                let Action::Write { position, data, .. } = action else {
                    unreachable!("INV: only writes become write operations")
                };
                opcode::Write::new(types::Fd(file.as_raw_fd()), data.as_ptr(), *len as u32)
                    .offset(*position)
                    .build()
            }
            Op::Flush { file, .. } => opcode::Fsync::new(types::Fd(file.as_raw_fd()))
                .flags(types::FsyncFlags::DATASYNC)
                .build(),
            Op::Read(read) => {
                let buffer = read.draft.bytes_mut()[read.at..read.at + read.len].as_mut_ptr();
                opcode::Read::new(types::Fd(read.file.as_raw_fd()), buffer, read.len as u32)
                    .offset(read.position)
                    .build()
            }
        };
        // SAFETY: file and buffer live in `ops` until the completion is reaped.
        let pushed = unsafe { self.ring.submission().push(&entry.user_data(slot as u64)) };
        assert!(
            pushed.is_ok(),
            "INV: the submission queue holds as many entries as operations are let in"
        );
        self.in_kernel += 1;
        self.unsubmitted = true;
    }

    /// Hands queued operations to the kernel.
    pub fn submit(&mut self) -> io::Result<()> {
        if !self.unsubmitted {
            return Ok(());
        }
        loop {
            match self.ring.submit() {
                Ok(_) => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The completion queue is full; reaping makes room and the next call submits the rest.
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        self.unsubmitted = !self.ring.submission().is_empty();
        Ok(())
    }

    /// Everything that finished.
    pub fn reap(&mut self, out: &mut Vec<Done>) {
        let mut entries = std::mem::take(&mut self.entries);
        entries.extend(self.ring.completion());
        for entry in entries.drain(..) {
            let slot = usize::try_from(entry.user_data()).unwrap_or(usize::MAX);
            if let Some(op) = self.ops.get_mut(slot).and_then(Option::take) {
                self.free.push(slot);
                self.in_kernel -= 1;
                out.push(Done {
                    op,
                    result: entry.result(),
                });
            }
        }
        self.entries = entries;
        while self.in_kernel < ENTRIES as usize {
            let Some(op) = self.backlog.pop_front() else {
                break;
            };
            self.push(op);
        }
    }

    /// Whether completions are waiting, without a system call.
    pub fn has_completions(&mut self) -> bool {
        !self.ring.completion().is_empty()
    }

    /// Makes the eventfd readable.
    pub fn ring_bell(&self) {
        ring_bell(&self.eventfd);
    }
}

/// Makes an eventfd readable.
pub fn ring_bell(eventfd: &OwnedFd) {
    let one = 1u64.to_ne_bytes();
    // SAFETY: eight bytes of ours; a full counter is readable already, so the result does not matter.
    let _written = unsafe { libc::write(eventfd.as_raw_fd(), one.as_ptr().cast(), one.len()) };
}

impl Drop for Ring {
    fn drop(&mut self) {
        let mut done = Vec::new();
        self.backlog.clear();
        while self.in_kernel > 0 {
            if let Err(error) = self.ring.submit_and_wait(1) {
                if error.kind() != io::ErrorKind::Interrupted {
                    // The kernel may still write to the buffers: keep them for ever rather than free them.
                    tracing::error!(%error, "operations could not be waited for; their buffers are kept");
                    std::mem::forget(std::mem::take(&mut self.ops));
                    return;
                }
            }
            self.reap(&mut done);
            done.clear();
        }
    }
}
