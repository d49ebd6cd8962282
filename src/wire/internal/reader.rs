//! Frames out of a byte stream, in whatever pieces it arrives.
//!
//! Duty: cut frames, step over unknown kinds, notice what is fatal. It does not decode bodies.
//!
//! Invariants:
//! * The events depend on the bytes alone, never on how they were cut into chunks.
//! * Memory grows with the bytes that arrived: beyond a first [`FIRST_RESERVE_BYTES`], never more
//!   than twice what is there. An unknown kind's body is never kept.
//! * A frame that arrived within one chunk is a slice of it; any other is copied once (moved
//!   again at most when the buffer doubles).
//! * After a fatal event there are no more events and nothing is kept.

use std::collections::VecDeque;

use bytes::{Buf, Bytes};

use super::error::FatalReason;
use super::header::{Header, CORRELATION_BYTES, HEADER_BYTES};
use super::kind::Kind;
use crate::ids::CorrelationId;
use crate::limits::MAX_INTERNAL_BODY_BYTES;

/// What a frame in pieces may reserve before its bytes are there.
const FIRST_RESERVE_BYTES: usize = 16 << 10;

/// What the reader saw, in stream order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReadEvent {
    /// A whole body of a known kind, at least 8 bytes long.
    Frame { kind: Kind, body: Bytes },
    /// A frame of an unknown kind was stepped over.
    Unknown {
        kind: u16,
        correlation: CorrelationId,
    },
    /// Nothing behind this point means anything: close the connection.
    Fatal(FatalReason),
}

/// The stream ended inside a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the stream ended inside a frame")]
pub struct BrokenStream;

#[derive(Debug)]
enum State {
    Header {
        bytes: [u8; HEADER_BYTES],
        have: usize,
    },
    Body {
        kind: Kind,
        length: usize,
        partial: Vec<u8>,
    },
    Skip {
        kind: u16,
        left: usize,
        correlation: [u8; CORRELATION_BYTES],
        have: usize,
    },
    Closed,
}

const BETWEEN_FRAMES: State = State::Header {
    bytes: [0; HEADER_BYTES],
    have: 0,
};

/// Incremental reader of one stream. Push what arrived, then take events until there are none.
#[derive(Debug)]
pub struct FrameReader {
    state: State,
    pending: VecDeque<Bytes>,
    pending_bytes: usize,
    body_limit_bytes: u32,
}

impl Default for FrameReader {
    fn default() -> Self {
        Self::new()
    }
}

impl FrameReader {
    /// Takes bodies up to the protocol's own limit.
    pub fn new() -> Self {
        Self::with_body_limit(MAX_INTERNAL_BODY_BYTES)
    }

    /// Takes bodies up to `limit_bytes`; a longer one is fatal. More than the protocol's limit
    /// is taken as that limit.
    pub fn with_body_limit(limit_bytes: u32) -> Self {
        Self {
            state: BETWEEN_FRAMES,
            pending: VecDeque::new(),
            pending_bytes: 0,
            body_limit_bytes: limit_bytes.min(MAX_INTERNAL_BODY_BYTES),
        }
    }

    /// Bytes held: chunks not looked at yet and the frame under way.
    pub fn buffered_bytes(&self) -> usize {
        self.pending_bytes
            + match &self.state {
                State::Header { have, .. } | State::Skip { have, .. } => *have,
                State::Body { partial, .. } => partial.len(),
                State::Closed => 0,
            }
    }

    /// Whether a fatal event was reported.
    pub fn is_closed(&self) -> bool {
        matches!(self.state, State::Closed)
    }

    /// What the end of the stream means now. Call it when there are no more events.
    pub fn finish(&self) -> Result<(), BrokenStream> {
        match self.state {
            State::Header { have: 0, .. } if self.pending_bytes == 0 => Ok(()),
            State::Closed => Ok(()),
            State::Header { .. } | State::Body { .. } | State::Skip { .. } => Err(BrokenStream),
        }
    }

    /// The next bytes of the stream.
    pub fn push(&mut self, chunk: Bytes) {
        if chunk.is_empty() || self.is_closed() {
            return;
        }
        self.pending_bytes += chunk.len();
        self.pending.push_back(chunk);
    }

    // The three steps return `None` for "more bytes needed", `Some(None)` for "state changed".

    fn read_header(&mut self) -> Option<Option<ReadEvent>> {
        let State::Header { bytes, have } = &mut self.state else {
            return Some(None);
        };
        while *have < HEADER_BYTES {
            let chunk = self.pending.front_mut()?;
            let taken = chunk.len().min(HEADER_BYTES - *have);
            bytes[*have..*have + taken].copy_from_slice(&chunk[..taken]);
            *have += taken;
            consume(&mut self.pending, &mut self.pending_bytes, taken);
        }
        let header = match Header::parse(bytes, self.body_limit_bytes) {
            Ok(header) => header,
            Err(reason) => {
                self.close();
                return Some(Some(ReadEvent::Fatal(reason)));
            }
        };
        let length = header.length_bytes as usize;
        self.state = match Kind::from_code(header.kind) {
            Some(kind) => State::Body {
                kind,
                length,
                partial: Vec::new(),
            },
            None => State::Skip {
                kind: header.kind,
                left: length,
                correlation: [0; CORRELATION_BYTES],
                have: 0,
            },
        };
        Some(None)
    }

    fn read_body(&mut self) -> Option<Option<ReadEvent>> {
        let State::Body {
            kind,
            length,
            partial,
        } = &mut self.state
        else {
            return Some(None);
        };
        let (kind, length) = (*kind, *length);
        if partial.is_empty() && self.pending.front()?.len() >= length {
            let body = self.pending.front()?.slice(..length);
            consume(&mut self.pending, &mut self.pending_bytes, length);
            self.state = BETWEEN_FRAMES;
            return Some(Some(ReadEvent::Frame { kind, body }));
        }
        while partial.len() < length {
            let chunk = self.pending.front()?;
            let taken = chunk.len().min(length - partial.len());
            reserve(partial, taken, self.pending_bytes, length);
            partial.extend_from_slice(&chunk[..taken]);
            consume(&mut self.pending, &mut self.pending_bytes, taken);
        }
        let body = Bytes::from(std::mem::take(partial));
        self.state = BETWEEN_FRAMES;
        Some(Some(ReadEvent::Frame { kind, body }))
    }

    fn skip_body(&mut self) -> Option<Option<ReadEvent>> {
        let State::Skip {
            kind,
            left,
            correlation,
            have,
        } = &mut self.state
        else {
            return Some(None);
        };
        while *left > 0 {
            let chunk = self.pending.front()?;
            let taken = chunk.len().min(*left);
            let kept = taken.min(CORRELATION_BYTES - *have);
            correlation[*have..*have + kept].copy_from_slice(&chunk[..kept]);
            *have += kept;
            *left -= taken;
            consume(&mut self.pending, &mut self.pending_bytes, taken);
        }
        let event = ReadEvent::Unknown {
            kind: *kind,
            correlation: CorrelationId(u64::from_be_bytes(*correlation)),
        };
        self.state = BETWEEN_FRAMES;
        Some(Some(event))
    }

    fn close(&mut self) {
        self.state = State::Closed;
        self.pending = VecDeque::new();
        self.pending_bytes = 0;
    }
}

/// The next event, or `None` until more bytes are pushed; not fused.
impl Iterator for FrameReader {
    type Item = ReadEvent;

    fn next(&mut self) -> Option<ReadEvent> {
        loop {
            let event = match self.state {
                State::Header { .. } => self.read_header()?,
                State::Body { .. } => self.read_body()?,
                State::Skip { .. } => self.skip_body()?,
                State::Closed => return None,
            };
            if event.is_some() {
                return event;
            }
        }
    }
}

/// Drops `bytes` from the front chunk, which holds at least that many.
fn consume(pending: &mut VecDeque<Bytes>, pending_bytes: &mut usize, bytes: usize) {
    *pending_bytes -= bytes;
    if let Some(chunk) = pending.front_mut() {
        chunk.advance(bytes);
        if chunk.is_empty() {
            pending.pop_front();
        }
    }
}

/// Makes room for `taken` more bytes: all of the frame when it is small or mostly here, else
/// twice what has arrived.
fn reserve(partial: &mut Vec<u8>, taken: usize, pending_bytes: usize, length: usize) {
    if partial.capacity() - partial.len() >= taken {
        return;
    }
    let arrived = partial.len() + pending_bytes;
    let target = length.min(FIRST_RESERVE_BYTES.max(2 * arrived));
    partial.reserve_exact(target.max(partial.len() + taken) - partial.len());
}
