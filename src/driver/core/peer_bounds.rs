//! How much the peers of a core may have in work here.
//!
//! Past a bound a stream is not read on: its frames wait in the transport, whose windows hold the
//! peer back, and its requests are answered later rather than refused.
//!
//! Invariant: a stream that waits is read on in the turn in which there is room again.

use std::collections::HashSet;

use super::MAX_UNTAKEN_ANSWER_BYTES;
use crate::driver::quic::{ConnId, Pump, StreamId};

/// What is in work, and the streams that wait.
pub(super) struct PeerBounds {
    /// Requests read and not answered.
    pub requests: usize,
    most_requests: usize,
    waiting: HashSet<(ConnId, StreamId)>,
}

impl PeerBounds {
    /// `most_requests` of all peers together.
    pub fn new(most_requests: usize) -> Self {
        Self {
            requests: 0,
            most_requests,
            waiting: HashSet::new(),
        }
    }

    fn has_room(&self, pump: &Pump, conn: ConnId, stream: StreamId) -> bool {
        self.requests < self.most_requests
            && pump.queued_bytes(conn, stream) < MAX_UNTAKEN_ANSWER_BYTES
    }

    /// Whether a stream must not be read on now; it is remembered.
    pub fn must_wait(&mut self, pump: &Pump, conn: ConnId, stream: StreamId) -> bool {
        let must_wait = !self.has_room(pump, conn, stream);
        if must_wait {
            self.waiting.insert((conn, stream));
        }
        must_wait
    }

    /// Streams that need not wait any longer.
    pub fn resumed(&mut self, pump: &Pump) -> Vec<(ConnId, StreamId)> {
        if self.waiting.is_empty() || self.requests >= self.most_requests {
            return Vec::new();
        }
        let has_room = |&(conn, stream): &(ConnId, StreamId)| {
            pump.queued_bytes(conn, stream) < MAX_UNTAKEN_ANSWER_BYTES
        };
        let resumed: Vec<_> = self.waiting.iter().copied().filter(has_room).collect();
        for stream in &resumed {
            self.waiting.remove(stream);
        }
        resumed
    }
}
