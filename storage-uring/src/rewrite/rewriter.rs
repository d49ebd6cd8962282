//! From the bytes of a segment to those of the rewritten one.

use std::collections::{HashMap, HashSet};

use super::plan::RewritePlan;
use crate::format::extent::{ExtentHeader, ExtentKind, EXTENT_HEADER_BYTES};
use crate::format::group::{GroupHeader, GROUP_HEADER_BYTES};
use crate::format::rewritten::{
    piece_at, push_piece, FrameHeader, Piece, Rewritten, FRAME_BYTES, FRAME_HEADER_BYTES,
    PIECE_HEADER_BYTES,
};
use crate::format::segment::{SegmentHeader, SEGMENT_HEADER_BYTES};
use crate::format::{align_up, DataUuid, ALIGN};
use crate::name::LogId;
use crate::recovery::Window;

/// Why a segment stays as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RewriteFault {
    /// Its bytes are not what they should be: it stays for a human.
    Source(&'static str),
    /// Too much of it is needed, or its first block does not tell what it is.
    NotWorth,
    /// There is no room for the new file.
    NoRoom,
}

/// What was kept of one log.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Kept {
    /// Bytes of its records.
    pub bytes: u64,
    /// Record extents.
    pub extents: u32,
    /// Bytes of its events.
    pub event_bytes: u32,
}

/// What a rewritten file holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RewriteTotals {
    /// Length of the file.
    pub file_bytes: u64,
    /// Of each log that is left.
    pub kept: HashMap<LogId, Kept>,
}

impl RewriteTotals {
    pub(super) fn note(&mut self, extent: &ExtentHeader) {
        let kept = self.kept.entry(extent.log).or_default();
        if extent.kind == ExtentKind::Records {
            kept.bytes += u64::from(extent.records_len);
            kept.extents = kept.extents.saturating_add(1);
        } else {
            let bytes = u32::try_from(extent.total_len()).unwrap_or(u32::MAX);
            kept.event_bytes = kept.event_bytes.saturating_add(bytes);
        }
    }
}

/// Rewrites one segment, a group of it at a time. Memory: that group, what is kept of it, one frame, and the
/// names of logs whose first extent went.
pub(crate) struct Rewriter {
    uuid: DataUuid,
    plan: RewritePlan,
    header: SegmentHeader,
    /// Where the next group or frame of the source is; none when all were seen.
    position: Option<u64>,
    /// Number of the next group, or of the next frame.
    expected: u64,
    names: HashMap<LogId, Box<[u8]>>,
    named: HashSet<LogId>,
    frame: Vec<u8>,
    pieces: u32,
    records: u32,
    first_position: u32,
    frames: u32,
    ready: Vec<Vec<u8>>,
    totals: RewriteTotals,
}

impl Rewriter {
    /// Begins with the file's first block.
    ///
    /// # Errors
    /// When that is not the header of the planned segment.
    pub fn new(
        uuid: DataUuid,
        core: u16,
        plan: RewritePlan,
        source: &mut Window,
    ) -> Result<Self, RewriteFault> {
        let header = SegmentHeader::decode(source.get(0, ALIGN));
        // That alone is no damage: it may still be given back.
        let header = header.map_err(|_| RewriteFault::NotWorth)?;
        let is_planned = header.uuid == uuid && header.core == core && header.seq == plan.segment;
        let is_other = |found: Rewritten| !found.is_same_segment(&plan.whole);
        if !is_planned || header.rewritten.is_some_and(is_other) {
            return Err(RewriteFault::Source("the header is another segment's"));
        }
        let expected = match header.rewritten {
            Some(_) => 0,
            None => plan.whole.first_group,
        };
        Ok(Self {
            uuid,
            plan,
            header,
            position: Some(SEGMENT_HEADER_BYTES),
            expected,
            names: HashMap::new(),
            named: HashSet::new(),
            frame: empty_frame(),
            pieces: 0,
            records: 0,
            first_position: 0,
            frames: 0,
            ready: Vec::new(),
            totals: RewriteTotals {
                file_bytes: SEGMENT_HEADER_BYTES,
                ..RewriteTotals::default()
            },
        })
    }

    /// The first block of the new file.
    pub fn first_block(&self) -> Vec<u8> {
        let header = SegmentHeader {
            rewritten: Some(self.plan.whole),
            ..self.header
        };
        header.encode()
    }

    /// Reads on; gives back how many bytes of the source it went through, 0 at the end. Frames that became
    /// full are to be taken.
    ///
    /// # Errors
    /// When the source is not what it should be, or too much of it is kept.
    pub fn step(&mut self, source: &mut Window) -> Result<u64, RewriteFault> {
        let Some(position) = self.position else {
            return Ok(0);
        };
        let len = match self.header.rewritten {
            Some(_) => self.take_frame(position, source)?,
            None => self.take_group(position, source)?,
        };
        if self.position.is_none() {
            self.end_frame(true);
        }
        if self.totals.file_bytes > self.plan.max_bytes {
            return Err(RewriteFault::NotWorth);
        }
        Ok(len)
    }

    /// The frames that are full, in order.
    pub fn take_frames(&mut self) -> Vec<Vec<u8>> {
        std::mem::take(&mut self.ready)
    }

    /// What the new file holds; complete once `step` gave back 0.
    pub fn into_totals(self) -> RewriteTotals {
        self.totals
    }

    fn take_group(&mut self, position: u64, source: &mut Window) -> Result<u64, RewriteFault> {
        let unreadable = RewriteFault::Source("a group is not readable");
        let bytes = source.get(position, GROUP_HEADER_BYTES);
        let header = GroupHeader::decode(&self.uuid, bytes).map_err(|_| unreadable)?;
        let whole = self.plan.whole;
        let is_here = (header.segment, header.core) == (self.header.seq, self.header.core)
            && header.boot_epoch == self.header.boot_epoch
            && header.group == self.expected
            && (header.group != whole.first_group || header.link() == whole.link);
        let group = source.get(position, header.used_len as usize).to_vec();
        if !is_here || !header.body_matches(&group) {
            return Err(unreadable);
        }
        let mut at = GROUP_HEADER_BYTES;
        for _ in 0..header.extents {
            let bytes = group.get(at..).unwrap_or(&[]);
            let extent = ExtentHeader::decode(bytes).map_err(|_| unreadable)?;
            let extent_bytes = bytes.get(..extent.total_len()).ok_or(unreadable)?;
            self.take_extent((position + at as u64) as u32, &extent, extent_bytes)?;
            at += extent.total_len();
        }
        let end = position + header.total_len;
        self.expected += 1;
        self.position = (header.group < whole.last_group).then_some(end);
        if self.position.is_none() && end != whole.end {
            return Err(RewriteFault::Source("the log ended elsewhere"));
        }
        Ok(header.total_len)
    }

    fn take_frame(&mut self, position: u64, source: &mut Window) -> Result<u64, RewriteFault> {
        let unreadable = RewriteFault::Source("a frame is not readable");
        let bytes = source.get(position, FRAME_HEADER_BYTES);
        let header = FrameHeader::decode(&self.uuid, bytes).map_err(|_| unreadable)?;
        let is_here = (header.seq, header.core) == (self.header.seq, self.header.core)
            && header.boot_epoch == self.header.boot_epoch
            && Some(header.whole) == self.header.rewritten
            && u64::from(header.index) == self.expected;
        let frame = source.get(position, header.used_len as usize).to_vec();
        if !is_here || !header.body_matches(&frame) {
            return Err(unreadable);
        }
        let mut at = FRAME_HEADER_BYTES;
        for _ in 0..header.pieces {
            let (piece, next) =
                piece_at(&self.uuid, self.header.seq, &frame, at).ok_or(unreadable)?;
            at = next;
            if piece.position == 0 {
                self.names
                    .insert(LogId::of_encoded(piece.bytes), piece.bytes.into());
                continue;
            }
            let extent = ExtentHeader::decode(piece.bytes).map_err(|_| unreadable)?;
            if extent.total_len() != piece.bytes.len() {
                return Err(unreadable);
            }
            self.take_extent(piece.position, &extent, piece.bytes)?;
        }
        self.expected += 1;
        self.position = (!header.is_last).then_some(position + header.total_len());
        Ok(header.total_len())
    }

    fn take_extent(
        &mut self,
        position: u32,
        extent: &ExtentHeader,
        bytes: &[u8],
    ) -> Result<(), RewriteFault> {
        let keeps = self.plan.keeps(extent);
        let keeps = keeps.ok_or(RewriteFault::Source("it holds a log it should not"))?;
        let is_named = extent.name_len > 0;
        if !keeps {
            if is_named && !self.named.contains(&extent.log) {
                let name = &bytes[EXTENT_HEADER_BYTES..extent.records_at()];
                self.names.insert(extent.log, name.into());
            }
            return Ok(());
        }
        // The first extent of a log carries its name: a segment can be read alone.
        let first = self.named.insert(extent.log);
        let name = self
            .names
            .remove(&extent.log)
            .filter(|_| first && !is_named);
        let len = bytes.len()
            + name
                .as_ref()
                .map_or(0, |name| name.len() + PIECE_HEADER_BYTES);
        if self.pieces > 0 && self.frame.len() + PIECE_HEADER_BYTES + len > FRAME_BYTES {
            self.end_frame(false);
        }
        if let Some(bytes) = name.as_deref() {
            self.push(Piece { position: 0, bytes });
        }
        self.push(Piece { position, bytes });
        if self.first_position == 0 {
            self.first_position = position;
        }
        self.records = self.records.saturating_add(extent.record_count);
        self.totals.note(extent);
        Ok(())
    }

    fn push(&mut self, piece: Piece<'_>) {
        push_piece(&self.uuid, self.header.seq, &mut self.frame, piece);
        self.pieces += 1;
    }

    fn end_frame(&mut self, is_last: bool) {
        let mut frame = std::mem::replace(&mut self.frame, empty_frame());
        let header = FrameHeader {
            core: self.header.core,
            core_count: self.header.core_count,
            seq: self.header.seq,
            boot_epoch: self.header.boot_epoch,
            whole: self.plan.whole,
            index: self.frames,
            is_last,
            used_len: 0,
            pieces: std::mem::take(&mut self.pieces),
            records: std::mem::take(&mut self.records),
            first_position: std::mem::take(&mut self.first_position),
            body_crc: 0,
        };
        header.seal(&self.uuid, &mut frame);
        self.frames += 1;
        self.totals.file_bytes += align_up(frame.len() as u64);
        self.ready.push(frame);
    }
}

fn empty_frame() -> Vec<u8> {
    vec![0; FRAME_HEADER_BYTES]
}
