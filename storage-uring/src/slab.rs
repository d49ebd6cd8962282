//! Aligned memory for group buffers and reads.
//!
//! A slab is one 4096-aligned allocation. Its single writer fills it front to back and freezes what it has
//! filled into regions (through a draft, which is still writable); a region is immutable and shared, so the same bytes are written to disk, served to
//! readers and reused, with one copy of the payload in all. A slab goes back to its pool when the last
//! region is gone.
//!
//! Invariants: bytes below the writer's position are never written again while any region of the slab
//! exists; there is at most one writer of a slab.

use std::alloc::{alloc_zeroed, dealloc, handle_alloc_error, Layout};
use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use crate::format::ALIGN;

/// Slabs of whole huge pages lie on huge pages where the system gives them: handing a group of 1 MiB to the
/// kernel then pins one page instead of 256.
const HUGE_PAGE: usize = 2 << 20;

/// Slabs of huge pages made by this process so far.
static MADE: AtomicU64 = AtomicU64::new(0);

/// How many slabs of huge pages, which no allocator sees, this process has made. A storage at work uses the
/// ones it has again.
pub fn huge_slabs_made() -> u64 {
    MADE.load(Ordering::Relaxed)
}

struct Slab {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the memory is owned by the slab, and the writer/region split keeps mutable and shared parts apart.
unsafe impl Send for Slab {}
// SAFETY: as above; regions only hand out shared slices of frozen bytes.
unsafe impl Sync for Slab {}

impl Slab {
    fn is_huge(len: usize) -> bool {
        len % HUGE_PAGE == 0
    }

    fn layout(len: usize) -> Layout {
        match Layout::from_size_align(len, ALIGN) {
            Ok(layout) => layout,
            Err(_) => panic!("a slab of {len} bytes cannot be laid out"),
        }
    }

    fn new(len: usize) -> Self {
        let len = len.max(ALIGN).next_multiple_of(ALIGN);
        let layout = Self::layout(len);
        let raw = if Self::is_huge(len) {
            MADE.fetch_add(1, Ordering::Relaxed);
            Self::on_huge_pages(len)
        } else {
            // SAFETY: the layout has a non-zero size.
            unsafe { alloc_zeroed(layout) }
        };
        let Some(start) = NonNull::new(raw) else {
            handle_alloc_error(layout)
        };
        Self { start, len }
    }

    /// Zeroed memory that lies on huge pages where the system has some. Null when there is no memory.
    fn on_huge_pages(len: usize) -> *mut u8 {
        let (access, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        let mapped = len + HUGE_PAGE;
        // SAFETY: a new anonymous mapping touches nothing that exists.
        let raw = unsafe { libc::mmap(std::ptr::null_mut(), mapped, access, flags, -1, 0) };
        if raw == libc::MAP_FAILED {
            return std::ptr::null_mut();
        }
        let raw = raw.cast::<u8>();
        let before = raw.align_offset(HUGE_PAGE);
        // SAFETY: the offset is below HUGE_PAGE and the mapping is longer by that than what is kept.
        let start = unsafe { raw.add(before) };
        // SAFETY: the ends given back are whole pages of the mapping that nobody has a pointer into; the
        // advice changes no contents, and a system without huge pages gives small ones, which work as well.
        unsafe {
            if before > 0 {
                libc::munmap(raw.cast(), before);
            }
            if before < HUGE_PAGE {
                libc::munmap(start.add(len).cast(), HUGE_PAGE - before);
            }
            libc::madvise(start.cast(), len, libc::MADV_HUGEPAGE);
        }
        start
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        if Self::is_huge(self.len) {
            // SAFETY: mapped in `new` with this length, and the last one who could use it is gone.
            unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
            return;
        }
        // SAFETY: allocated in `new` with the same layout.
        unsafe { dealloc(self.start.as_ptr(), Self::layout(self.len)) }
    }
}

/// Frozen, shared bytes of a slab.
#[derive(Clone)]
pub struct Region {
    slab: Arc<Slab>,
    start: usize,
    len: usize,
}

impl Region {
    /// Bytes in the region.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the region holds no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A part of this region.
    pub fn part(&self, at: usize, len: usize) -> Region {
        assert!(at + len <= self.len, "INV: a part lies within its region");
        Region {
            slab: Arc::clone(&self.slab),
            start: self.start + at,
            len,
        }
    }

    /// Address of the first byte; stays valid while the region (or a clone) lives.
    pub fn as_ptr(&self) -> *const u8 {
        self.as_ref().as_ptr()
    }
}

impl AsRef<[u8]> for Region {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: [start, start+len) was frozen by the writer and is never written while this Arc lives.
        unsafe { std::slice::from_raw_parts(self.slab.start.as_ptr().add(self.start), self.len) }
    }
}

impl std::fmt::Debug for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Region({} bytes)", self.len)
    }
}

/// The exclusive right to fill a slab.
pub struct SlabWriter {
    slab: Arc<Slab>,
    used: usize,
}

impl SlabWriter {
    /// A writer over a fresh slab of at least `len` bytes.
    pub fn new(len: usize) -> Self {
        Self {
            slab: Arc::new(Slab::new(len)),
            used: 0,
        }
    }

    /// Bytes not frozen yet.
    pub fn room(&self) -> usize {
        self.slab.len - self.used
    }

    /// The bytes not frozen yet. They may hold anything a former use left there.
    pub fn tail(&mut self) -> &mut [u8] {
        // SAFETY: no region covers [used, len), and `&mut self` makes this the only slice of it.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.slab.start.as_ptr().add(self.used),
                self.slab.len - self.used,
            )
        }
    }

    /// Splits the first `len` bytes off the tail, still writable.
    pub fn split(&mut self, len: usize) -> Draft {
        assert!(
            len <= self.room(),
            "INV: only bytes of the slab are split off"
        );
        let draft = Draft {
            slab: Arc::clone(&self.slab),
            start: self.used,
            len,
        };
        self.used += len;
        draft
    }
}

/// The exclusive right to a part of a slab, until it is frozen.
pub struct Draft {
    slab: Arc<Slab>,
    start: usize,
    len: usize,
}

impl Draft {
    /// The bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: a draft's range is split off its writer once and not shared before `freeze` consumes it.
        unsafe {
            std::slice::from_raw_parts_mut(self.slab.start.as_ptr().add(self.start), self.len)
        }
    }

    /// Address for a kernel that will fill the bytes.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.bytes_mut().as_mut_ptr()
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Gives up writing.
    pub fn freeze(self) -> Region {
        Region {
            slab: self.slab,
            start: self.start,
            len: self.len,
        }
    }
}

/// Slabs of one size, reused once nobody reads them any more.
pub struct SlabPool {
    slab_bytes: usize,
    keep: usize,
    retired: VecDeque<Arc<Slab>>,
}

impl SlabPool {
    /// A pool of slabs of `slab_bytes`, remembering at most `keep` of them.
    pub fn new(slab_bytes: usize, keep: usize) -> Self {
        Self {
            slab_bytes: slab_bytes.next_multiple_of(ALIGN),
            keep: keep.max(1),
            retired: VecDeque::new(),
        }
    }

    /// Size of the slabs in the pool.
    pub fn slab_bytes(&self) -> usize {
        self.slab_bytes
    }

    /// An idle slab, or a new one.
    pub fn take(&mut self) -> SlabWriter {
        // Oldest first; a slab pinned by a slow reader moves to the back and is looked at again later.
        for _ in 0..self.retired.len().min(8) {
            let Some(mut slab) = self.retired.pop_front() else {
                break;
            };
            if Arc::get_mut(&mut slab).is_some() {
                return SlabWriter { slab, used: 0 };
            }
            self.retired.push_back(slab);
        }
        SlabWriter::new(self.slab_bytes)
    }

    /// Gives a filled slab back; it is reused when its regions are gone.
    pub fn retire(&mut self, writer: SlabWriter) {
        if writer.slab.len != self.slab_bytes {
            return;
        }
        if self.retired.len() == self.keep {
            self.retired.pop_front();
        }
        self.retired.push_back(writer.slab);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slabs_of_huge_pages_are_zeroed_aligned_and_writable_to_their_end() {
        for pages in [1, 3] {
            let len = pages * HUGE_PAGE;
            let mut writers: Vec<SlabWriter> = (0..3).map(|_| SlabWriter::new(len)).collect();
            for writer in &mut writers {
                let bytes = writer.tail();
                assert_eq!(bytes.as_ptr() as usize % HUGE_PAGE, 0);
                assert!(bytes.len() == len && bytes.iter().all(|byte| *byte == 0));
                bytes.fill(1);
            }
            let regions: Vec<Region> = writers.iter_mut().map(|w| w.split(len).freeze()).collect();
            drop(writers);
            assert!(regions.iter().all(|r| r.as_ref().iter().all(|b| *b == 1)));
        }
    }

    #[test]
    fn slabs_come_back_only_when_their_regions_are_gone() {
        let mut pool = SlabPool::new(8192, 4);
        let mut writer = pool.take();
        writer.tail()[..3].copy_from_slice(b"abc");
        let region = writer.split(4096).freeze();
        let address = region.as_ptr();
        assert_eq!(address as usize % ALIGN, 0);
        pool.retire(writer);
        let mut other = pool.take();
        assert_ne!(
            other.split(1).freeze().as_ptr(),
            address,
            "a slab in use is not handed out"
        );
        assert_eq!(&region.as_ref()[..3], b"abc");
        drop(region);
        let mut again = pool.take();
        assert_eq!(again.split(1).freeze().as_ptr(), address);
    }
}
