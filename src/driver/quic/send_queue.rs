//! Bytes a caller has queued on one stream and flow control has not yet let through.
//!
//! Small parts are copied together: the state machine keeps a list of unacknowledged pieces and walks it
//! for every packet, so thousands of tiny pieces would cost more than copying them. Large parts are
//! passed on by reference.
//!
//! Invariant: `queued_bytes` is the sum of what `chunks` and `tail` hold, in order of queueing.

use std::collections::VecDeque;

use bytes::{Bytes, BytesMut};
use quinn_proto::{SendStream, WriteError};

/// Parts up to this size are copied.
const COPY_UP_TO_BYTES: usize = 4 * 1024;
/// A run of copied parts is cut at this size.
const RUN_BYTES: usize = 32 * 1024;

/// What a push into the state machine achieved.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// Everything went in.
    Empty,
    /// Flow control holds the rest back; a `Writable` will follow.
    Blocked,
    /// The stream takes nothing any more.
    Gone,
}

#[derive(Default)]
pub(super) struct SendQueue {
    chunks: VecDeque<Bytes>,
    tail: BytesMut,
    queued_bytes: usize,
    /// `finish` was asked for; it is carried out after the last byte.
    pub(super) finish_requested: bool,
    /// Is in its connection's list of streams to be pushed.
    pub(super) listed: bool,
    /// Was blocked since it was last empty, so that emptying it is news.
    pub(super) held_back: bool,
}

impl SendQueue {
    pub(super) fn queued_bytes(&self) -> usize {
        self.queued_bytes
    }

    pub(super) fn push(&mut self, part: Bytes) {
        if part.is_empty() {
            return;
        }
        self.queued_bytes += part.len();
        let first = self.chunks.is_empty() && self.tail.is_empty();
        if part.len() > COPY_UP_TO_BYTES || first {
            self.cut_tail();
            self.chunks.push_back(part);
        } else {
            self.tail.extend_from_slice(&part);
            if self.tail.len() >= RUN_BYTES {
                self.cut_tail();
            }
        }
    }

    fn cut_tail(&mut self) {
        if !self.tail.is_empty() {
            self.chunks
                .push_back(std::mem::take(&mut self.tail).freeze());
        }
    }

    pub(super) fn push_into(&mut self, stream: &mut SendStream<'_>) -> Progress {
        self.cut_tail();
        while !self.chunks.is_empty() {
            match stream.write_chunks(self.chunks.make_contiguous()) {
                Ok(written) => {
                    self.queued_bytes -= written.bytes;
                    self.chunks.drain(..written.chunks);
                    if self.chunks.capacity() > 64 && self.chunks.is_empty() {
                        self.chunks = VecDeque::new();
                    }
                }
                Err(WriteError::Blocked) => return Progress::Blocked,
                Err(WriteError::Stopped(_) | WriteError::ClosedStream) => return Progress::Gone,
            }
        }
        Progress::Empty
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contents(queue: &mut SendQueue) -> Vec<u8> {
        queue.cut_tail();
        queue.chunks.iter().flatten().copied().collect()
    }

    #[test]
    fn small_parts_share_a_chunk_and_large_ones_are_not_copied() {
        let mut queue = SendQueue::default();
        let large = Bytes::from(vec![9; COPY_UP_TO_BYTES + 1]);
        for n in 0..100u8 {
            queue.push(Bytes::copy_from_slice(&[n; 10]));
        }
        queue.push(large.clone());
        queue.push(Bytes::from_static(b"end"));
        queue.push(Bytes::new());
        let mut expected: Vec<u8> = (0..100u8).flat_map(|n| [n; 10]).collect();
        expected.extend_from_slice(&large);
        expected.extend_from_slice(b"end");
        assert_eq!(queue.queued_bytes(), expected.len());
        assert_eq!(contents(&mut queue), expected);
        assert_eq!(queue.chunks.len(), 4, "first part, run, large, run");
        assert_eq!(queue.chunks[2].as_ptr(), large.as_ptr());
    }

    #[test]
    fn a_run_is_cut_at_its_bound() {
        let mut queue = SendQueue::default();
        for _ in 0..40 {
            queue.push(Bytes::from(vec![1; 4096]));
        }
        queue.cut_tail();
        assert!(queue
            .chunks
            .iter()
            .all(|c| c.len() <= RUN_BYTES + COPY_UP_TO_BYTES));
        assert_eq!(queue.queued_bytes(), 40 * 4096);
    }
}
