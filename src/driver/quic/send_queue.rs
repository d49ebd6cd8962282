//! Bytes a caller has queued on one stream and flow control has not yet let through.
//!
//! Small parts are copied together: the state machine keeps a list of unacknowledged pieces and walks it
//! for every packet, so thousands of tiny pieces would cost more than copying them. Large parts are
//! passed on by reference, in slices: the state machine counts a piece against the send window until all of it
//! is acknowledged, so one as large as the window would close it to every stream until its last byte has
//! arrived.
//!
//! The streams of a connection share one send window. [`order`] and [`share`] are the rule: whoever has least queued
//! goes first, and everybody gets a bounded quantum in turn, so that a small request never waits for a large one to have
//! been let through.
//!
//! Invariant: `queued_bytes` is the sum of what `chunks` and `tail` hold, in order of queueing.

use std::collections::VecDeque;

use bytes::{Buf, Bytes, BytesMut};
use quinn_proto::{SendStream, StreamId, WriteError};

/// Parts up to this size are copied.
const COPY_UP_TO_BYTES: usize = 4 * 1024;
/// A run of copied parts is cut at this size.
const RUN_BYTES: usize = 32 * 1024;

/// A large part is handed over in slices of this size.
const SLICE_BYTES: usize = 128 * 1024;
/// What a stream may hand over before the others of its connection have their turn.
pub(super) const QUANTUM_BYTES: usize = 256 * 1024;

/// What a push into the state machine achieved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    /// Everything went in.
    Empty,
    /// The quantum is used up and more is queued.
    More,
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

    /// Hands over what flow control lets through, at most `max_bytes` and what is left of a slice.
    pub(super) fn push_into(&mut self, sink: &mut impl Sink, max_bytes: usize) -> Progress {
        self.cut_tail();
        let mut pushed_bytes = 0;
        while let Some(front) = self.chunks.front_mut() {
            if pushed_bytes >= max_bytes {
                return Progress::More;
            }
            let slice = front.slice(..front.len().min(SLICE_BYTES));
            match sink.write(slice) {
                Ok(written) => {
                    front.advance(written);
                    self.queued_bytes -= written;
                    pushed_bytes += written;
                    if front.is_empty() {
                        self.chunks.pop_front();
                    }
                }
                Err(WriteError::Blocked) => return Progress::Blocked,
                Err(WriteError::Stopped(_) | WriteError::ClosedStream) => return Progress::Gone,
            }
        }
        if self.chunks.capacity() > 64 {
            self.chunks = VecDeque::new();
        }
        Progress::Empty
    }
}

/// Where a queue goes: a stream of the state machine.
pub(super) trait Sink {
    /// Takes a part of `slice` from its start on, at least a byte; how many.
    fn write(&mut self, slice: Bytes) -> Result<usize, WriteError>;
}

impl Sink for SendStream<'_> {
    fn write(&mut self, slice: Bytes) -> Result<usize, WriteError> {
        Ok(self.write_chunks(&mut [slice])?.bytes)
    }
}

/// Who has least queued begins.
pub(super) fn order(streams: &mut [StreamId], queued_bytes: impl Fn(StreamId) -> usize) {
    if streams.len() > 1 {
        streams.sort_by_cached_key(|&stream| queued_bytes(stream));
    }
}

/// Lets streams hand over what they have queued, a quantum each in turn, until none gets anything more
/// through. `push` hands over a quantum of one stream.
pub(super) fn share(streams: &mut Vec<StreamId>, mut push: impl FnMut(StreamId) -> Progress) {
    while !streams.is_empty() {
        streams.retain(|&stream| push(stream) == Progress::More);
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

    /// A send window that all streams share, as the state machine keeps it.
    struct Window {
        room_bytes: usize,
        /// The stream and the size of each piece that went in.
        taken: Vec<(u64, usize)>,
    }

    struct Stream<'a>(u64, &'a mut Window);

    impl Sink for Stream<'_> {
        fn write(&mut self, slice: Bytes) -> Result<usize, WriteError> {
            let Self(id, window) = self;
            if window.room_bytes == 0 {
                return Err(WriteError::Blocked);
            }
            let taken = slice.len().min(window.room_bytes);
            window.room_bytes -= taken;
            window.taken.push((*id, taken));
            Ok(taken)
        }
    }

    fn stream(id: u64) -> StreamId {
        StreamId::new(quinn_proto::Side::Client, quinn_proto::Dir::Bi, id)
    }

    /// One turn of a connection: every stream with something queued shares the window.
    fn turn(queues: &mut [SendQueue], window: &mut Window) {
        let queued: Vec<usize> = queues.iter().map(SendQueue::queued_bytes).collect();
        let mut streams: Vec<StreamId> = (0..queues.len() as u64)
            .filter(|&id| queued[id as usize] > 0)
            .map(stream)
            .collect();
        order(&mut streams, |stream| queued[stream.index() as usize]);
        share(&mut streams, |stream| {
            let id = stream.index();
            queues[id as usize].push_into(&mut Stream(id, window), QUANTUM_BYTES)
        });
    }

    fn queue_of(bytes: usize) -> SendQueue {
        let mut queue = SendQueue::default();
        queue.push(Bytes::from(vec![1; bytes]));
        queue
    }

    #[test]
    fn a_large_part_goes_in_slices_so_that_its_acknowledgements_free_the_window() {
        let mut queues = [queue_of(15 << 20)];
        let mut window = Window {
            room_bytes: 4 << 20,
            taken: Vec::new(),
        };
        turn(&mut queues, &mut window);
        assert_eq!(window.room_bytes, 0);
        assert_eq!(queues[0].queued_bytes(), 11 << 20);
        assert!(window.taken.iter().all(|&(_, bytes)| bytes <= SLICE_BYTES));
    }

    #[test]
    fn a_small_request_goes_before_large_ones_that_came_first() {
        let mut queues = [queue_of(15 << 20), queue_of(15 << 20), queue_of(300)];
        // Whatever little an acknowledgement has let through.
        let mut window = Window {
            room_bytes: 301,
            taken: Vec::new(),
        };
        turn(&mut queues, &mut window);
        assert_eq!(window.taken, [(2, 300), (0, 1)]);
    }

    #[test]
    fn large_ones_share_what_there_is_and_small_ones_cannot_keep_them_from_it() {
        let mut queues = [
            queue_of(15 << 20),
            queue_of(6 << 20),
            queue_of(2 * QUANTUM_BYTES + 1),
        ];
        let mut window = Window {
            room_bytes: 6 * QUANTUM_BYTES + 1,
            taken: Vec::new(),
        };
        turn(&mut queues, &mut window);
        let of = |id| {
            window
                .taken
                .iter()
                .filter(|(s, _)| *s == id)
                .map(|(_, n)| n)
                .sum::<usize>()
        };
        assert_eq!(of(2), 2 * QUANTUM_BYTES + 1);
        assert_eq!(of(1), 2 * QUANTUM_BYTES);
        assert_eq!(of(0), 2 * QUANTUM_BYTES);
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
