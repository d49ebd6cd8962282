//! Frames out of a stream's bytes, whatever pieces they arrive in.
//!
//! Sans-IO: bytes are pushed in, events are taken out. Bodies are not looked into.
//!
//! Invariants:
//! * Memory grows with the bytes that have arrived, never with a length that was only declared.
//! * A frame that lies whole inside one pushed piece is a slice of it; only a frame that spans
//!   pieces is copied, so a small tail never keeps a large datagram buffer alive.
//! * The events do not depend on how the bytes were cut.
//! * A header is judged by the limits in force when it is read, so a caller that stops taking
//!   events while it authenticates has the new limits applied to everything behind `auth`.

use std::collections::VecDeque;

use bytes::{Buf, Bytes, BytesMut};

use super::flags::{Flags, Layout};
use super::frame::{Frame, FrameHeader, HeaderError, HEADER_BYTES};
use crate::limits::{MAX_CLIENT_FRAME_BYTES, MAX_UNAUTHENTICATED_FRAME_BYTES};

/// The longest oversized frame that is read and thrown away; a longer one ends the stream.
pub const MAX_DISCARDED_FRAME_BYTES: u32 = 64 << 20;
/// How much of an oversized frame is kept, for the request id in it.
pub const OVERSIZE_PREFIX_BYTES: usize = 64;

const _: () = assert!(MAX_CLIENT_FRAME_BYTES <= MAX_DISCARDED_FRAME_BYTES);

/// What a reader accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadLimits {
    /// The longest body that is delivered.
    pub frame_bytes: u32,
    /// The longest body that is discarded and reported; anything longer is fatal.
    pub discard_bytes: u32,
}

impl ReadLimits {
    /// Before `auth` succeeded: nothing is discarded for a stranger.
    pub const UNAUTHENTICATED: ReadLimits = ReadLimits {
        frame_bytes: MAX_UNAUTHENTICATED_FRAME_BYTES,
        discard_bytes: 0,
    };
    /// After `auth`.
    pub const AUTHENTICATED: ReadLimits = ReadLimits {
        frame_bytes: MAX_CLIENT_FRAME_BYTES,
        discard_bytes: MAX_DISCARDED_FRAME_BYTES,
    };
}

/// What came out of the stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReadEvent {
    /// A whole frame.
    Frame(Frame),
    /// A frame over the limit, read to its end and thrown away. The peer has finished writing it,
    /// so an answer can be read by it; the stream goes on.
    Oversize(Oversize),
    /// The stream cannot be read further. Nothing follows.
    Fatal(FatalReason),
}

/// A frame over the limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Oversize {
    pub flags: Flags,
    pub declared_bytes: u32,
    /// The first bytes of the body, at most [`OVERSIZE_PREFIX_BYTES`].
    pub prefix: Bytes,
}

impl Oversize {
    /// The request an answer is owed to: that of an acked binary publish.
    pub fn request_id(&self) -> Option<u64> {
        match self.flags.layout() {
            Ok(Layout::Publish(shape)) if shape.acked => {
                self.prefix.first_chunk().copied().map(u64::from_be_bytes)
            }
            _ => None,
        }
    }
}

/// Why a stream cannot be read further.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FatalReason {
    #[error(transparent)]
    Header(#[from] HeaderError),
    #[error("the frame declares {declared_bytes} bytes; at most {limit_bytes} are read")]
    TooLarge {
        declared_bytes: u32,
        limit_bytes: u32,
    },
}

/// The stream ended where no frame ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum EndError {
    #[error("the stream ended inside a frame header")]
    InsideHeader,
    #[error("the stream ended inside a frame of {declared_bytes} bytes")]
    InsideFrame { declared_bytes: u32 },
    /// The reason was reported by [`FrameReader::next`] before.
    #[error("the stream was unreadable before it ended")]
    AfterFatal,
}

enum State {
    Header,
    Body(FrameHeader),
    Discarding {
        header: FrameHeader,
        left: u32,
        prefix: BytesMut,
    },
    Dead,
}

/// Cuts one stream into frames.
pub struct FrameReader {
    limits: ReadLimits,
    state: State,
    pieces: VecDeque<Bytes>,
    /// The start of a header or a body whose rest has not arrived.
    partial: Vec<u8>,
}

impl FrameReader {
    /// A reader at the start of a stream.
    pub fn new(limits: ReadLimits) -> FrameReader {
        FrameReader {
            limits,
            state: State::Header,
            pieces: VecDeque::new(),
            partial: Vec::new(),
        }
    }

    /// Applies to every header read from now on.
    pub fn set_limits(&mut self, limits: ReadLimits) {
        self.limits = limits;
    }

    /// Bytes held for frames that are not complete.
    pub fn buffered_bytes(&self) -> usize {
        self.partial.len() + self.pieces.iter().map(Bytes::len).sum::<usize>()
    }

    /// Hands over the next bytes of the stream. Bytes behind a fatal error are dropped.
    pub fn push(&mut self, piece: Bytes) {
        if !piece.is_empty() && !matches!(self.state, State::Dead) {
            self.pieces.push_back(piece);
        }
    }

    /// The next event, or `None` until more bytes are pushed.
    #[allow(clippy::should_implement_trait)] // `None` is not the end here
    pub fn next(&mut self) -> Option<ReadEvent> {
        loop {
            match &self.state {
                State::Header => {
                    let header = self.take_header()?;
                    if let Err(reason) = self.start_body(header) {
                        return Some(self.die(reason));
                    }
                }
                State::Body(header) => {
                    let FrameHeader { flags, body_bytes } = *header;
                    let body = self.take(body_bytes as usize)?;
                    self.state = State::Header;
                    return Some(ReadEvent::Frame(Frame { flags, body }));
                }
                State::Discarding { .. } => return self.discard(),
                State::Dead => return None,
            }
        }
    }

    /// Call when the stream has ended and [`FrameReader::next`] has nothing more.
    pub fn finish(&self) -> Result<(), EndError> {
        match &self.state {
            State::Header if self.buffered_bytes() == 0 => Ok(()),
            State::Header => Err(EndError::InsideHeader),
            State::Body(header) | State::Discarding { header, .. } => Err(EndError::InsideFrame {
                declared_bytes: header.body_bytes,
            }),
            State::Dead => Err(EndError::AfterFatal),
        }
    }

    fn die(&mut self, reason: FatalReason) -> ReadEvent {
        self.state = State::Dead;
        self.pieces.clear();
        self.partial = Vec::new();
        ReadEvent::Fatal(reason)
    }

    fn take_header(&mut self) -> Option<Result<FrameHeader, HeaderError>> {
        let bytes = self.take(HEADER_BYTES)?;
        bytes.first_chunk().map(FrameHeader::decode)
    }

    fn start_body(&mut self, header: Result<FrameHeader, HeaderError>) -> Result<(), FatalReason> {
        let header = header?;
        let declared_bytes = header.body_bytes;
        self.state = if declared_bytes <= self.limits.frame_bytes {
            State::Body(header)
        } else if declared_bytes <= self.limits.discard_bytes {
            State::Discarding {
                header,
                left: declared_bytes,
                prefix: BytesMut::new(),
            }
        } else {
            return Err(FatalReason::TooLarge {
                declared_bytes,
                limit_bytes: self.limits.frame_bytes.max(self.limits.discard_bytes),
            });
        };
        Ok(())
    }

    /// Exactly `want` bytes once they are all here; until then they gather in `partial`.
    fn take(&mut self, want: usize) -> Option<Bytes> {
        if want == 0 {
            return Some(Bytes::new());
        }
        if self.partial.is_empty() {
            let first = self.pieces.front_mut()?;
            if first.len() >= want {
                let taken = first.split_to(want);
                self.drop_spent_piece();
                return Some(taken);
            }
        }
        while self.partial.len() < want {
            let first = self.pieces.front_mut()?;
            let missing = want - self.partial.len();
            let step = missing.min(first.len());
            if self.partial.capacity() - self.partial.len() < step {
                // Doubling keeps the copying linear; never more than the frame needs.
                let doubled = self.partial.len().max(step).min(missing);
                self.partial.reserve_exact(doubled);
            }
            self.partial.extend_from_slice(&first[..step]);
            first.advance(step);
            self.drop_spent_piece();
        }
        Some(Bytes::from(std::mem::take(&mut self.partial)))
    }

    fn drop_spent_piece(&mut self) {
        if self.pieces.front().is_some_and(Bytes::is_empty) {
            self.pieces.pop_front();
        }
    }

    fn discard(&mut self) -> Option<ReadEvent> {
        let State::Discarding {
            header,
            left,
            prefix,
        } = &mut self.state
        else {
            return None;
        };
        while *left > 0 {
            let first = self.pieces.front_mut()?;
            let step = first.len().min(*left as usize);
            let kept = step.min(OVERSIZE_PREFIX_BYTES - prefix.len());
            prefix.extend_from_slice(&first[..kept]);
            first.advance(step);
            *left -= step as u32;
            if first.is_empty() {
                self.pieces.pop_front();
            }
        }
        let oversize = Oversize {
            flags: header.flags,
            declared_bytes: header.body_bytes,
            prefix: std::mem::take(prefix).freeze(),
        };
        self.state = State::Header;
        Some(ReadEvent::Oversize(oversize))
    }
}

#[cfg(test)]
#[path = "reader_tests.rs"]
mod tests;
