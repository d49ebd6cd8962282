//! The device without a broker: aligned buffers, one pre-written file, durable writes through a private
//! ring.
//!
//! Used by the relay probe's owner and by the disk measurements, so that both write the way the broker's
//! storage does: O_DIRECT, O_DSYNC, multiples of 4096 bytes, over blocks that were written before.
//!
//! Invariant: a buffer handed to the kernel belongs to the ring until its completion is reaped; dropping
//! the ring waits for that.

use std::alloc::{alloc_zeroed, dealloc, handle_alloc_error, Layout};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use io_uring::{opcode, types, IoUring};

use crate::cpu::thread_cpu_seconds;
use crate::meter::Latency;

/// Offsets and lengths are multiples of this.
pub const ALIGN_BYTES: usize = 4096;
/// Bytes written at once while a file is made.
const FILL_BYTES: usize = 4 << 20;

/// Memory the device can read from directly.
pub struct AlignedBuffer {
    start: NonNull<u8>,
    len: usize,
}

impl AlignedBuffer {
    /// Zeroed memory of at least `len` bytes.
    pub fn new(len: usize) -> Self {
        let len = len.max(1).next_multiple_of(ALIGN_BYTES);
        let layout = Self::layout(len);
        // SAFETY: the layout has a non-zero size.
        let raw = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(raw) else {
            handle_alloc_error(layout)
        };
        Self { start, len }
    }

    fn layout(len: usize) -> Layout {
        match Layout::from_size_align(len, ALIGN_BYTES) {
            Ok(layout) => layout,
            Err(_) => panic!("a buffer of {len} bytes cannot be laid out"),
        }
    }

    /// Its length.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never; for the sake of form.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the allocation is of this length, zeroed, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for AlignedBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with the same layout.
        unsafe { dealloc(self.start.as_ptr(), Self::layout(self.len)) }
    }
}

/// Makes a file of `bytes`, every block of it written, and opens it for durable direct writes.
pub fn create_written_file(path: &Path, bytes: u64) -> io::Result<File> {
    let mut plain = OpenOptions::new()
        .create(true)
        .truncate(true)
        .write(true)
        .open(path)?;
    let zeros = vec![0u8; FILL_BYTES];
    let mut left = bytes;
    while left > 0 {
        let step = left.min(FILL_BYTES as u64);
        plain.write_all(&zeros[..step as usize])?;
        left -= step;
    }
    plain.sync_all()?;
    drop(plain);
    OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_DIRECT | libc::O_DSYNC)
        .open(path)
}

/// A write that finished.
pub struct WriteDone {
    /// What the caller named it.
    pub tag: u64,
    /// The buffer, to be filled again.
    pub buffer: AlignedBuffer,
    /// Whether every byte is durable.
    pub result: io::Result<()>,
}

struct InKernel {
    tag: u64,
    buffer: AlignedBuffer,
    len: usize,
}

/// Durable writes to one file.
pub struct WriteRing {
    // Dropped first, by `drop`, only once nothing is in the kernel.
    ring: IoUring,
    file: File,
    slots: Vec<Option<InKernel>>,
    in_kernel: usize,
}

impl WriteRing {
    /// At most `depth` writes at once.
    pub fn new(file: File, depth: usize) -> io::Result<Self> {
        let depth = depth.clamp(1, 1024);
        let ring = IoUring::new(depth.next_power_of_two() as u32)?;
        Ok(Self {
            ring,
            file,
            slots: std::iter::repeat_with(|| None).take(depth).collect(),
            in_kernel: 0,
        })
    }

    /// A descriptor that becomes readable when a write finished.
    pub fn eventfd(&self) -> io::Result<OwnedFd> {
        // SAFETY: plain system call without pointers.
        let raw = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
        if raw < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just made and is owned by nobody else.
        let eventfd = unsafe { OwnedFd::from_raw_fd(raw) };
        self.ring
            .submitter()
            .register_eventfd(eventfd.as_raw_fd())?;
        Ok(eventfd)
    }

    /// Whether another write may be started.
    pub fn has_room(&self) -> bool {
        self.in_kernel < self.slots.len()
    }

    /// Writes in the kernel.
    pub fn in_kernel(&self) -> usize {
        self.in_kernel
    }

    /// Hands the first `len` bytes of a buffer to the kernel. Call only with room.
    pub fn start(
        &mut self,
        tag: u64,
        buffer: AlignedBuffer,
        len: usize,
        at: u64,
    ) -> io::Result<()> {
        let free = self.slots.iter().position(Option::is_none);
        let Some(slot) = free.filter(|_| len <= buffer.len()) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let entry = opcode::Write::new(
            types::Fd(self.file.as_raw_fd()),
            buffer.start.as_ptr(),
            len as u32,
        )
        .offset(at)
        .build()
        .user_data(slot as u64);
        self.slots[slot] = Some(InKernel { tag, buffer, len });
        self.in_kernel += 1;
        // SAFETY: buffer and file live in `self` until the completion is reaped.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        if pushed.is_err() {
            self.slots[slot] = None;
            self.in_kernel -= 1;
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.submit(0)
    }

    fn submit(&mut self, want: usize) -> io::Result<()> {
        loop {
            match self.ring.submit_and_wait(want) {
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Blocks until at least one write finished.
    pub fn wait(&mut self) -> io::Result<()> {
        self.submit(1)
    }

    /// Whether a write finished and was not reaped.
    pub fn has_finished(&self) -> bool {
        // SAFETY: looking at the length does not move the queue, and `&self` is on the ring's thread.
        !unsafe { self.ring.completion_shared() }.is_empty()
    }

    /// Everything that finished.
    pub fn reap(&mut self, mut each: impl FnMut(WriteDone)) {
        for entry in self.ring.completion() {
            let slot = usize::try_from(entry.user_data()).unwrap_or(usize::MAX);
            let Some(InKernel { tag, buffer, len }) =
                self.slots.get_mut(slot).and_then(Option::take)
            else {
                continue;
            };
            self.in_kernel -= 1;
            let result = match entry.result() {
                n if n < 0 => Err(io::Error::from_raw_os_error(-n)),
                n if n as usize == len => Ok(()),
                n => Err(io::Error::other(format!(
                    "only {n} of {len} bytes were written"
                ))),
            };
            each(WriteDone {
                tag,
                buffer,
                result,
            });
        }
    }
}

impl Drop for WriteRing {
    fn drop(&mut self) {
        while self.in_kernel > 0 {
            if self.wait().is_err() {
                // The kernel may still read the buffers: keep them for ever rather than free them.
                std::mem::forget(std::mem::take(&mut self.slots));
                return;
            }
            self.reap(drop);
        }
    }
}

/// What a disk measurement came to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DiskRate {
    /// Durable writes a second.
    pub writes_per_s: f64,
    /// Bytes a second, in MB.
    pub mb_per_s: f64,
    /// Mean time of one write, with `depth` at once.
    pub mean_us: f64,
    /// Median time of one write, with `depth` at once.
    pub median_us: f64,
    /// CPU seconds of the writing thread on a GB.
    pub cpu_s_per_gb: f64,
}

/// Writes `write_bytes` at a time, `depth` at once, over and over a file of `file_bytes` for `duration`.
pub fn measure_disk(
    path: &Path,
    file_bytes: u64,
    write_bytes: usize,
    depth: usize,
    duration: Duration,
) -> io::Result<DiskRate> {
    let write_bytes = write_bytes.max(1).next_multiple_of(ALIGN_BYTES);
    let places = (file_bytes / write_bytes as u64).max(1);
    let file = create_written_file(path, places * write_bytes as u64)?;
    let mut ring = WriteRing::new(file, depth)?;
    let mut spare: Vec<AlignedBuffer> = (0..depth)
        .map(|_| AlignedBuffer::new(write_bytes))
        .collect();
    let started = Instant::now();
    let cpu = thread_cpu_seconds();
    let (mut next, mut writes, mut busy) = (0u64, 0u64, Duration::ZERO);
    let mut latency = Latency::new();
    let mut failed = None;
    let mut sent_at = std::collections::HashMap::new();
    while failed.is_none() && (started.elapsed() < duration || ring.in_kernel() > 0) {
        while started.elapsed() < duration {
            let Some(mut buffer) = spare.pop() else { break };
            // Each write differs, as real ones do.
            buffer.bytes_mut()[..8].copy_from_slice(&next.to_le_bytes());
            sent_at.insert(next, Instant::now());
            ring.start(
                next,
                buffer,
                write_bytes,
                next % places * write_bytes as u64,
            )?;
            next += 1;
        }
        if ring.in_kernel() > 0 {
            ring.wait()?;
        }
        ring.reap(|done| {
            writes += 1;
            let took = sent_at
                .remove(&done.tag)
                .map_or(Duration::ZERO, |at| at.elapsed());
            busy += took;
            latency.record(took.as_nanos() as u64);
            failed = done.result.err();
            spare.push(done.buffer);
        });
    }
    if let Some(error) = failed {
        return Err(error);
    }
    let seconds = started.elapsed().as_secs_f64();
    let bytes = writes as f64 * write_bytes as f64;
    Ok(DiskRate {
        writes_per_s: writes as f64 / seconds,
        mb_per_s: bytes / seconds / 1e6,
        mean_us: busy.as_secs_f64() * 1e6 / writes.max(1) as f64,
        median_us: latency.at(0.5),
        cpu_s_per_gb: (thread_cpu_seconds() - cpu) / (bytes / 1e9),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_in_the_file() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = dir.path().join("raw");
        let file = create_written_file(&path, 64 << 10).unwrap();
        let mut ring = WriteRing::new(file, 2).unwrap();
        for n in 0..2u8 {
            let mut buffer = AlignedBuffer::new(8192);
            buffer.bytes_mut().fill(n + 1);
            ring.start(u64::from(n), buffer, 8192, u64::from(n) * 8192)
                .unwrap();
        }
        assert!(!ring.has_room());
        let mut tags = Vec::new();
        while tags.len() < 2 {
            ring.wait().unwrap();
            ring.reap(|done| {
                done.result.unwrap();
                tags.push(done.tag);
            });
        }
        let bytes = std::fs::read(&path).unwrap();
        assert!(bytes[..8192].iter().all(|b| *b == 1));
        assert!(bytes[8192..16384].iter().all(|b| *b == 2));
        assert!(bytes[16384..].iter().all(|b| *b == 0));
    }

    #[test]
    fn a_write_that_is_not_aligned_fails_with_its_error() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let file = create_written_file(&dir.path().join("raw"), 64 << 10).unwrap();
        let mut ring = WriteRing::new(file, 1).unwrap();
        ring.start(1, AlignedBuffer::new(4096), 4096, 100).unwrap();
        ring.wait().unwrap();
        let mut error = None;
        ring.reap(|done| error = done.result.err());
        assert_eq!(error.unwrap().raw_os_error(), Some(libc::EINVAL));
        let buffer = AlignedBuffer::new(4096);
        assert!(
            ring.start(2, buffer, 8192, 0).is_err(),
            "longer than the buffer"
        );
    }
}
