//! The connections of a pump: slots with generations, deadlines, and the state each connection adds to
//! that of quinn-proto.
//!
//! Invariants: a slot is freed only when quinn-proto reports the connection drained, and its generation
//! then changes, so no stale id ever reaches a later connection; a connection has at most one entry in
//! the deadline set.

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::time::Instant;

use bytes::Bytes;
use quinn_proto::{Connection, ConnectionHandle, StreamId};

use super::event::{ConnId, EndpointId, StreamError};
use super::send_queue::{self, Progress, SendQueue, QUANTUM_BYTES};

/// Stream ids are small consecutive numbers bounded by the credit we grant, so one multiplication
/// spreads them and no peer can make them collide.
#[derive(Default, Clone, Copy)]
pub struct StreamHasher(u64);

impl Hasher for StreamHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &b in bytes {
            self.write_u64(u64::from(b));
        }
    }

    fn write_u64(&mut self, n: u64) {
        self.0 = (self.0.rotate_left(5) ^ n).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
}

/// A map by streams of one connection.
pub type StreamMap<T> = HashMap<StreamId, T, BuildHasherDefault<StreamHasher>>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Handshaking,
    Connected,
    /// `Closed` or `HandshakeFailed` was reported; waits for quinn-proto to drain.
    Closed,
}

pub(super) struct Conn {
    pub(super) id: ConnId,
    pub(super) endpoint: EndpointId,
    pub(super) handle: ConnectionHandle,
    pub(super) proto: Connection,
    pub(super) phase: Phase,
    /// We closed it and the frame that says so has not left: the socket takes nothing, or quinn-proto holds it
    /// back for a moment.
    pub(super) close_unsent: bool,
    pub(super) handshake_deadline: Option<Instant>,
    /// The entry in the deadline set.
    armed: Option<Instant>,
    /// Waits for its events to be collected.
    pub(super) touched: bool,
    /// Waits for its packets to be sent.
    pub(super) dirty: bool,
    queues: StreamMap<SendQueue>,
    /// Streams whose queue may get something through.
    to_push: Vec<StreamId>,
    queued_bytes: usize,
    /// `open` failed for lack of credit, by direction.
    pub(super) wants_streams: [bool; 2],
}

impl Conn {
    pub(super) fn queued_bytes(&self) -> usize {
        self.queued_bytes
    }

    pub(super) fn stream_queued_bytes(&self, stream: StreamId) -> usize {
        self.queues.get(&stream).map_or(0, SendQueue::queued_bytes)
    }

    /// Whether this side may write on the stream at all; quinn-proto panics on the contrary.
    pub(super) fn may_write(&self, stream: StreamId) -> bool {
        stream.dir() == quinn_proto::Dir::Bi || stream.initiator() == self.proto.side()
    }

    /// Whether this side may read from the stream at all.
    pub(super) fn may_read(&self, stream: StreamId) -> bool {
        stream.dir() == quinn_proto::Dir::Bi || stream.initiator() != self.proto.side()
    }

    pub(super) fn enqueue(
        &mut self,
        stream: StreamId,
        parts: impl IntoIterator<Item = Bytes>,
    ) -> Result<(), StreamError> {
        let queue = match self.queues.get_mut(&stream) {
            Some(queue) if queue.finish_requested => return Err(StreamError::StreamClosed),
            Some(queue) => queue,
            None => {
                // Also tells a stream that was finished, reset or stopped from a fresh one.
                match self.proto.send_stream(stream).stopped() {
                    Ok(None) => {}
                    Ok(Some(_)) | Err(_) => return Err(StreamError::StreamClosed),
                }
                self.queues.entry(stream).or_default()
            }
        };
        let before = queue.queued_bytes();
        for part in parts {
            queue.push(part);
        }
        self.queued_bytes += queue.queued_bytes() - before;
        if !queue.listed && !queue.held_back {
            queue.listed = true;
            self.to_push.push(stream);
        }
        Ok(())
    }

    pub(super) fn request_finish(&mut self, stream: StreamId) -> Result<(), StreamError> {
        self.enqueue(stream, [])?;
        if let Some(queue) = self.queues.get_mut(&stream) {
            queue.finish_requested = true;
        }
        Ok(())
    }

    /// Forgets what is queued on a stream; how many bytes that was.
    #[must_use]
    pub(super) fn drop_queue(&mut self, stream: StreamId) -> usize {
        let queue = self.queues.remove(&stream);
        let dropped = queue.map_or(0, |queue| queue.queued_bytes());
        self.queued_bytes -= dropped;
        dropped
    }

    /// Forgets what is queued on all streams; how many bytes that was.
    #[must_use]
    pub(super) fn drop_all_queues(&mut self) -> usize {
        self.queues = StreamMap::default();
        self.to_push = Vec::new();
        std::mem::take(&mut self.queued_bytes)
    }

    pub(super) fn on_writable(&mut self, stream: StreamId) {
        if let Some(queue) = self.queues.get_mut(&stream) {
            if !queue.listed {
                queue.listed = true;
                self.to_push.push(stream);
            }
        }
    }

    /// Moves queued bytes into quinn-proto as far as flow control allows, and tells `drained` which
    /// queues that had been held back became empty. Returns the bytes dropped because their stream had
    /// been reset before they were queued.
    pub(super) fn push_queues(&mut self, mut drained: impl FnMut(StreamId)) -> u64 {
        let mut dropped = 0;
        let mut to_push = std::mem::take(&mut self.to_push);
        let queues = &self.queues;
        send_queue::order(&mut to_push, |stream| {
            queues.get(&stream).map_or(0, SendQueue::queued_bytes)
        });
        send_queue::share(&mut to_push, |stream| {
            let (progress, gone_bytes) = self.push_queue(stream, &mut drained);
            dropped += gone_bytes;
            progress
        });
        self.to_push = to_push;
        dropped
    }

    /// Moves a quantum of one queue; what became of it, and the bytes dropped because nobody takes them.
    fn push_queue(
        &mut self,
        stream: StreamId,
        drained: &mut impl FnMut(StreamId),
    ) -> (Progress, u64) {
        let Some(queue) = self.queues.get_mut(&stream) else {
            return (Progress::Gone, 0);
        };
        let before = queue.queued_bytes();
        let mut send = self.proto.send_stream(stream);
        let progress = queue.push_into(&mut send, QUANTUM_BYTES);
        self.queued_bytes -= before - queue.queued_bytes();
        queue.listed = progress == Progress::More;
        match progress {
            Progress::More => {}
            Progress::Blocked => queue.held_back = true,
            Progress::Empty => {
                if std::mem::take(&mut queue.held_back) {
                    drained(stream);
                }
                if queue.finish_requested {
                    // Fails only if the peer has just stopped the stream, which has its own event.
                    // The entry stays until all is acknowledged: it refuses later sends.
                    let _ = send.finish();
                }
            }
            Progress::Gone => return (progress, self.drop_queue(stream) as u64),
        }
        (progress, 0)
    }

    pub(super) fn deadline(&mut self) -> Option<Instant> {
        match (self.proto.poll_timeout(), self.handshake_deadline) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }
}

struct Slot {
    generation: u32,
    conn: Option<Box<Conn>>,
}

/// All connections of a pump, and when each wants its timers looked at.
#[derive(Default)]
pub(super) struct ConnTable {
    slots: Vec<Slot>,
    free: Vec<u32>,
    deadlines: BTreeSet<(Instant, u32)>,
}

impl ConnTable {
    pub(super) fn insert(
        &mut self,
        endpoint: EndpointId,
        handle: ConnectionHandle,
        proto: Connection,
        handshake_deadline: Instant,
    ) -> ConnId {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot {
                generation: 0,
                conn: None,
            });
            (self.slots.len() - 1) as u32
        });
        let slot = &mut self.slots[index as usize];
        let id = ConnId {
            index,
            generation: slot.generation,
        };
        slot.conn = Some(Box::new(Conn {
            id,
            endpoint,
            handle,
            proto,
            phase: Phase::Handshaking,
            close_unsent: false,
            handshake_deadline: Some(handshake_deadline),
            armed: None,
            touched: false,
            dirty: false,
            queues: StreamMap::default(),
            to_push: Vec::new(),
            queued_bytes: 0,
            wants_streams: [false; 2],
        }));
        id
    }

    pub(super) fn remove(&mut self, index: u32) -> Option<Box<Conn>> {
        let slot = self.slots.get_mut(index as usize)?;
        let conn = slot.conn.take()?;
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(index);
        if let Some(armed) = conn.armed {
            self.deadlines.remove(&(armed, index));
        }
        Some(conn)
    }

    pub(super) fn get(&self, id: ConnId) -> Option<&Conn> {
        let slot = self.slots.get(id.index as usize)?;
        slot.conn
            .as_deref()
            .filter(|_| slot.generation == id.generation)
    }

    pub(super) fn get_mut(&mut self, id: ConnId) -> Option<&mut Conn> {
        let slot = self.slots.get_mut(id.index as usize)?;
        slot.conn
            .as_deref_mut()
            .filter(|_| slot.generation == id.generation)
    }

    pub(super) fn at(&mut self, index: u32) -> Option<&mut Conn> {
        self.slots.get_mut(index as usize)?.conn.as_deref_mut()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Conn> {
        self.slots.iter().filter_map(|s| s.conn.as_deref())
    }

    /// Connections alive or closing.
    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Makes sure the connection is looked at no later than it wants. An entry that is too early is
    /// left: looking early costs less than moving the entry on every acknowledgement.
    pub(super) fn arm(&mut self, index: u32) {
        let Some(conn) = self
            .slots
            .get_mut(index as usize)
            .and_then(|s| s.conn.as_deref_mut())
        else {
            return;
        };
        let Some(wanted) = conn.deadline() else {
            return;
        };
        match conn.armed {
            Some(armed) if armed <= wanted => return,
            Some(armed) => {
                self.deadlines.remove(&(armed, index));
            }
            None => {}
        }
        conn.armed = Some(wanted);
        self.deadlines.insert((wanted, index));
    }

    /// Takes one connection that is due.
    pub(super) fn pop_due(&mut self, now: Instant) -> Option<u32> {
        let &(at, index) = self.deadlines.first()?;
        if at > now {
            return None;
        }
        self.deadlines.pop_first();
        if let Some(conn) = self.at(index) {
            conn.armed = None;
        }
        Some(index)
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|&(at, _)| at)
    }
}
