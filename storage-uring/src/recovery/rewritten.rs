//! Taking in a rewritten segment.
//!
//! Its frames were durable before the file got its name, so nothing in it can be an unfinished write: what
//! does not fit is damage. What a damaged frame held is saved piece by piece; where pieces cannot be told,
//! every log that may have written in the segment is suspected, as with groups. The others prove themselves:
//! what was dropped on purpose lies below their bases.

use std::sync::Arc;

use super::repair::records_are_good;
use super::scan::{note_log, note_name, note_use, Scanner};
use crate::format::extent::ExtentHeader;
use crate::format::rewritten::{piece_at, FrameHeader, Piece, Rewritten, FRAME_HEADER_BYTES};
use crate::format::segment::SEGMENT_HEADER_BYTES;
use crate::format::{Place, ALIGN};
use crate::name::{LogId, LogName};
use crate::rewrite::{FrameTable, RewrittenMap};
use crate::usage::GroupUse;

/// A rewritten segment while it is taken in.
struct Pass {
    at: usize,
    seq: u64,
    epoch: u64,
    end: u64,
    /// Position of the extent taken last.
    last_position: u32,
}

/// What is wrong with a frame.
#[derive(Default)]
struct Faults {
    /// Of some pieces it cannot be said whose they were.
    has_unknown: bool,
    /// Logs that lost something.
    logs: Vec<String>,
}

impl Scanner<'_> {
    /// Takes in one segment; the log always goes on behind it.
    pub(super) fn scan_rewritten(&mut self, at: usize, whole: &Rewritten) -> bool {
        self.enter(at);
        let segment = &self.segments[at];
        let (seq, len, limit) = (segment.seq, segment.len, segment.limit);
        let epoch = segment.born.map_or(self.epoch, |(epoch, _)| epoch);
        self.note_groups(seq, whole, len);
        let follows = self.expected.is_none_or(|it| it == whole.first_group);
        if !follows || epoch < self.epoch || limit.is_some_and(|limit| limit != whole.end) {
            let reason = "a rewritten segment does not fit the segments around it";
            self.rewritten_damage(at, SEGMENT_HEADER_BYTES, reason, epoch);
        }
        self.epoch = self.epoch.max(epoch);
        self.expected = Some(whole.last_group + 1);
        self.out.next_group = whole.last_group + 1;
        self.out.orderly_stop = false;
        self.out.end = (seq, whole.end);
        let mut pass = Pass {
            at,
            seq,
            epoch,
            end: whole.end,
            last_position: 0,
        };
        let mut table = FrameTable::default();
        let (mut position, mut index) = (SEGMENT_HEADER_BYTES, 0);
        loop {
            let header = match self.frame_at(&pass, whole, position) {
                Some(header) if header.index == index => header,
                _ => {
                    let reason = "a frame of a rewritten segment is not readable";
                    self.rewritten_damage(at, position, reason, epoch);
                    let next = self.next_frame(&pass, whole, position, index);
                    let Some((next, header)) = next else { break };
                    position = next;
                    header
                }
            };
            table.add(&header, position);
            self.take_frame(&mut pass, &header, position);
            position += header.total_len();
            index = header.index.saturating_add(1);
            if header.is_last {
                break;
            }
        }
        let map = RewrittenMap::new(self.uuid, seq, whole.end, table, len);
        self.out.maps.insert(seq, Arc::new(map));
        true
    }

    fn note_groups(&mut self, seq: u64, whole: &Rewritten, file_bytes: u64) {
        for group in [whole.first_group, whole.last_group] {
            let group = GroupUse {
                group,
                link: whole.link,
                end: whole.end,
                time_us: whole.newest_time_us,
                file_bytes,
            };
            self.out.uses.on_group(seq, &group);
        }
    }

    fn rewritten_damage(&mut self, at: usize, position: u64, reason: &'static str, epoch: u64) {
        self.out.keeps_tail = true;
        self.report_damage(at, position, Vec::new(), reason, epoch);
    }

    /// The frame at this position, if it is one of this segment.
    fn frame_at(&mut self, pass: &Pass, whole: &Rewritten, position: u64) -> Option<FrameHeader> {
        let core = self.out.core;
        let window = &mut self.segments[pass.at].window;
        let bytes = window.get(position, FRAME_HEADER_BYTES);
        let header = FrameHeader::decode(&self.uuid, bytes).ok()?;
        let is_here = (header.seq, header.core) == (pass.seq, core)
            && header.boot_epoch == pass.epoch
            && header.whole == *whole;
        is_here.then_some(header)
    }

    /// The next frame from `position` on that comes after number `index`.
    fn next_frame(
        &mut self,
        pass: &Pass,
        whole: &Rewritten,
        position: u64,
        index: u32,
    ) -> Option<(u64, FrameHeader)> {
        let mut position = position;
        while position < self.segments[pass.at].len {
            let found = self.frame_at(pass, whole, position);
            if let Some(header) = found.filter(|header| header.index >= index) {
                return Some((position, header));
            }
            position += ALIGN as u64;
        }
        None
    }

    fn take_frame(&mut self, pass: &mut Pass, header: &FrameHeader, position: u64) {
        let window = &mut self.segments[pass.at].window;
        let frame = window.get(position, header.used_len as usize).to_vec();
        let is_whole = header.body_matches(&frame);
        let mut faults = Faults::default();
        let mut at = FRAME_HEADER_BYTES;
        for _ in 0..header.pieces {
            let Some((piece, next)) = piece_at(&self.uuid, pass.seq, &frame, at) else {
                faults.has_unknown = true;
                break;
            };
            at = next;
            self.take_piece(pass, &piece, is_whole, &mut faults);
        }
        self.out.counts.groups += 1;
        self.out.counts.records += u64::from(header.records);
        self.out.counts.bytes += header.total_len();
        let reason = match is_whole {
            true => "a frame with a matching checksum holds what cannot be read",
            false => "a frame of a rewritten segment does not match its checksum",
        };
        if faults.has_unknown {
            self.rewritten_damage(pass.at, position, reason, pass.epoch);
        }
        // A name may be the one that lost something: nobody's records, and yet not what was written.
        if !faults.logs.is_empty() || (!is_whole && !faults.has_unknown) {
            self.out.keeps_tail = true;
            self.report_known_damage(pass.at, position, faults.logs, reason);
        }
    }

    fn take_piece(
        &mut self,
        pass: &mut Pass,
        piece: &Piece<'_>,
        is_whole: bool,
        faults: &mut Faults,
    ) {
        if piece.position == 0 {
            // A damaged name has another id, and nobody asks for it.
            if let Some(name) = LogName::decode(piece.bytes) {
                let id = LogId::of_encoded(piece.bytes);
                self.out.chapters.names.entry(id).or_insert(name);
            }
            return;
        }
        let Ok(extent) = ExtentHeader::decode(piece.bytes) else {
            faults.has_unknown = true;
            return;
        };
        let follows = piece.position > pass.last_position && u64::from(piece.position) < pass.end;
        let is_good = follows
            && extent.total_len() == piece.bytes.len()
            && (is_whole || records_are_good(piece.bytes, &extent));
        pass.last_position = pass.last_position.max(piece.position);
        note_name(&mut self.out.chapters, &extent, piece.bytes);
        let is_taken = is_good && {
            note_use(
                &mut self.out.uses,
                &mut self.out.restated,
                &extent,
                pass.seq,
            );
            let place = Place {
                segment: pass.seq,
                position: piece.position,
                core: self.out.core,
            };
            let chapters = &mut self.out.chapters;
            chapters.on_extent(pass.epoch, &extent, place, piece.bytes)
        };
        if !is_taken {
            let file = self.segments[pass.at].file.display();
            let detail: Arc<str> = format!("an extent of {file} is not readable").into();
            let chapters = &mut self.out.chapters;
            chapters.on_damaged(extent.log, pass.epoch, &detail);
            note_log(chapters, extent.log, None, &mut faults.logs);
        }
    }
}
