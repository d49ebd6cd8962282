//! Receive buffers that are passed on instead of copied.
//!
//! A large batch leaves with its buffer, and the buffer comes back once every slice of it is dropped. A
//! small batch is copied, so that a stray acknowledgement does not hold 64 KiB.
//!
//! Invariant: at most [`SLOTS`] + [`LENT_AT_MOST`] buffers exist a pump. When all are lent to slow readers,
//! batches are copied: memory stays bounded by what flow control lets in.

use std::collections::VecDeque;
use std::io::IoSliceMut;

use bytes::BytesMut;

/// Batches one receive call takes.
pub(super) const SLOTS: usize = 16;
/// A batch is one coalesced datagram to the kernel, so 64 KiB hold any.
pub(super) const BATCH_BYTES: usize = 64 * 1024;
/// Batches below this are copied.
const COPY_BELOW_BYTES: usize = 8 * 1024;
/// Buffers that may be in the hands of readers.
const LENT_AT_MOST: usize = 64;

pub(super) struct ReceiveBuffers {
    /// Every slot has exactly `BATCH_BYTES` initialised bytes.
    slots: Vec<BytesMut>,
    /// Empty ends of buffers that were passed on, oldest first.
    lent: VecDeque<BytesMut>,
}

impl ReceiveBuffers {
    pub(super) fn new() -> Self {
        Self {
            slots: (0..SLOTS).map(|_| BytesMut::zeroed(BATCH_BYTES)).collect(),
            lent: VecDeque::new(),
        }
    }

    pub(super) fn io_slices(&mut self) -> [IoSliceMut<'_>; SLOTS] {
        let mut slots = self.slots.iter_mut();
        std::array::from_fn(|_| IoSliceMut::new(slots.next().map_or(&mut [], |s| &mut s[..])))
    }

    /// The first `length` bytes of a slot, with or without a copy.
    pub(super) fn take(&mut self, slot: usize, length: usize) -> BytesMut {
        let length = length.min(BATCH_BYTES);
        if length >= COPY_BELOW_BYTES {
            if let Some(fresh) = self.fresh() {
                let mut filled = std::mem::replace(&mut self.slots[slot], fresh);
                let batch = filled.split_to(length);
                filled.clear();
                self.lent.push_back(filled);
                return batch;
            }
        }
        BytesMut::from(&self.slots[slot][..length])
    }

    fn fresh(&mut self) -> Option<BytesMut> {
        // Readers mostly finish in order; one look at the oldest two keeps this cheap.
        for _ in 0..self.lent.len().min(2) {
            let mut buffer = self.lent.pop_front()?;
            if buffer.try_reclaim(BATCH_BYTES) && buffer.capacity() == BATCH_BYTES {
                // SAFETY: the buffer is unique again and spans its whole allocation, all of whose
                // `BATCH_BYTES` bytes were initialised by `zeroed` and have only been overwritten since.
                unsafe { buffer.set_len(BATCH_BYTES) };
                return Some(buffer);
            }
            self.lent.push_back(buffer);
        }
        (self.lent.len() < LENT_AT_MOST).then(|| BytesMut::zeroed(BATCH_BYTES))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(buffers: &mut ReceiveBuffers, slot: usize, byte: u8, length: usize) {
        buffers.io_slices()[slot][..length].fill(byte);
    }

    #[test]
    fn a_buffer_comes_back_when_its_last_slice_is_dropped() {
        let mut buffers = ReceiveBuffers::new();
        fill(&mut buffers, 3, 7, 20_000);
        let mut batch = buffers.take(3, 20_000);
        let address = batch.as_ptr();
        let slice = batch.split_to(100).freeze();
        drop(batch);
        assert!(slice.iter().all(|&b| b == 7));
        // While a slice lives, its buffer is not used again.
        for round in 0..5 {
            fill(&mut buffers, 0, round, BATCH_BYTES);
            let other = buffers.take(0, BATCH_BYTES);
            assert_ne!(other.as_ptr(), address);
            assert!(slice.iter().all(|&b| b == 7), "round {round}");
        }
        drop(slice);
        let mut seen = false;
        for _ in 0..8 {
            fill(&mut buffers, 0, 1, BATCH_BYTES);
            seen |= buffers.take(0, BATCH_BYTES).as_ptr() == address;
        }
        assert!(seen, "the buffer is used again");
        assert!(buffers.lent.len() <= 4, "{}", buffers.lent.len());
        assert!(buffers.slots.iter().all(|s| s.len() == BATCH_BYTES));
    }

    #[test]
    fn slow_readers_bound_the_buffers() {
        let mut buffers = ReceiveBuffers::new();
        let mut held = Vec::new();
        for n in 0..200u8 {
            fill(&mut buffers, 5, n, 10_000);
            held.push(buffers.take(5, 10_000));
        }
        assert_eq!(buffers.lent.len(), LENT_AT_MOST);
        for (n, batch) in held.iter().enumerate() {
            assert!(batch.iter().all(|&b| usize::from(b) == n), "batch {n}");
        }
    }

    #[test]
    fn small_batches_are_copied() {
        let mut buffers = ReceiveBuffers::new();
        fill(&mut buffers, 0, 9, 100);
        assert_eq!(&buffers.take(0, 100)[..], &[9; 100]);
        assert!(buffers.lent.is_empty());
    }
}
