//! From positions in a segment as it was written to bytes of the rewritten file.
//!
//! Sparse: one entry a frame, 8 bytes for some 64 KiB of the file. What lies between is found by scanning the
//! pieces of the frames that were read.

use std::ops::Range;

use crate::format::rewritten::{piece_at, FrameHeader, FRAME_HEADER_BYTES, PIECE_HEADER_BYTES};
use crate::format::segment::SEGMENT_HEADER_BYTES;
use crate::format::{DataUuid, ALIGN};

/// Where the frames of a rewritten segment are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct FrameTable {
    /// Position of a frame's first extent, and the block of the file the frame begins at; ascending.
    frames: Vec<(u32, u32)>,
}

impl FrameTable {
    /// Notes a frame; frames come in the order of the file. One that does not ascend is left out: what it
    /// holds cannot be read by position.
    pub fn add(&mut self, header: &FrameHeader, file_position: u64) {
        let first = header.first_position;
        let ascends = self.frames.last().is_none_or(|(last, _)| *last < first);
        if let Ok(block) = u32::try_from(file_position / ALIGN as u64) {
            if first > 0 && ascends {
                self.frames.push((first, block));
            }
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }
}

/// Leads readers through one rewritten segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RewrittenMap {
    uuid: DataUuid,
    seq: u64,
    /// Position one past the last group the segment had.
    end: u64,
    table: FrameTable,
    file_bytes: u64,
}

impl RewrittenMap {
    /// The map of segment `seq` that had groups up to `end`, now a file of `file_bytes`.
    pub(crate) fn new(
        uuid: DataUuid,
        seq: u64,
        end: u64,
        mut table: FrameTable,
        file_bytes: u64,
    ) -> Self {
        table.frames.shrink_to_fit();
        Self {
            uuid,
            seq,
            end,
            table,
            file_bytes,
        }
    }

    /// Length of the file.
    pub fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// Bytes of the file that hold what was at `position` and the `len` bytes from there; 4096-aligned. Longer
    /// than `len` by two frames at most, beside the headers of frames and pieces.
    pub fn file_range(&self, position: u64, len: u64) -> Range<u64> {
        let frames = &self.table.frames;
        let end = position.saturating_add(len);
        let first = frames.partition_point(|(first, _)| u64::from(*first) <= position);
        let behind = frames.partition_point(|(first, _)| u64::from(*first) < end);
        let at = |frame: usize| frames.get(frame).map(|(_, block)| u64::from(*block));
        let aligned = |at: u64| at * ALIGN as u64;
        let start = at(first.saturating_sub(1)).map_or(SEGMENT_HEADER_BYTES, aligned);
        let end = at(behind).map_or(self.file_bytes, aligned);
        start.min(end)..end
    }

    /// What was at `position` and the `len` bytes from there, as far as the segment went: `bytes` are those of
    /// `file_range`. What was not kept reads as zeros.
    pub fn gather(&self, bytes: &[u8], position: u64, len: u64) -> Vec<u8> {
        let len = len.min(self.end.saturating_sub(position));
        let mut out = vec![0; usize::try_from(len).unwrap_or(0)];
        let mut at = 0;
        while at < bytes.len() {
            let Ok(header) = FrameHeader::decode(&self.uuid, &bytes[at..]) else {
                at += ALIGN;
                continue;
            };
            let used = (at + header.used_len as usize).min(bytes.len());
            if header.seq == self.seq {
                self.gather_frame(&bytes[at..used], header.pieces, position, &mut out);
            }
            at += header.total_len() as usize;
        }
        out
    }

    fn gather_frame(&self, used: &[u8], pieces: u32, position: u64, out: &mut [u8]) {
        let mut at = FRAME_HEADER_BYTES;
        let end = position.saturating_add(out.len() as u64);
        for _ in 0..pieces {
            let Some((piece, next)) = piece_at(&self.uuid, self.seq, used, at) else {
                return;
            };
            debug_assert!(next >= at + PIECE_HEADER_BYTES);
            at = next;
            let start = u64::from(piece.position);
            let stop = start + piece.bytes.len() as u64;
            if piece.position == 0 || stop <= position || start >= end {
                continue;
            }
            let (from, to) = (start.max(position), stop.min(end));
            let source = &piece.bytes[(from - start) as usize..(to - start) as usize];
            out[(from - position) as usize..(to - position) as usize].copy_from_slice(source);
        }
    }
}
