//! Reading a new file back before it takes the place of the old one.

use super::map::{FrameTable, RewrittenMap};
use super::plan::RewritePlan;
use super::rewriter::RewriteTotals;
use crate::format::extent::ExtentHeader;
use crate::format::rewritten::{piece_at, FrameHeader, FRAME_HEADER_BYTES};
use crate::format::segment::{SegmentHeader, SEGMENT_HEADER_BYTES};
use crate::format::{DataUuid, ALIGN};
use crate::recovery::Window;

/// Reads a rewritten file whole, with the checks of a recovery; gives back its map and what it holds. None
/// when anything in it is not what it should be.
pub(crate) fn read_back(
    uuid: DataUuid,
    plan: &RewritePlan,
    file: &mut Window,
) -> Option<(RewrittenMap, RewriteTotals)> {
    let header = SegmentHeader::decode(file.get(0, ALIGN)).ok()?;
    let is_planned = header.seq == plan.segment && header.rewritten == Some(plan.whole);
    let mut position = SEGMENT_HEADER_BYTES;
    let mut table = FrameTable::default();
    let mut totals = RewriteTotals::default();
    let mut index = 0;
    loop {
        let bytes = file.get(position, FRAME_HEADER_BYTES);
        let frame = FrameHeader::decode(&uuid, bytes).ok()?;
        let is_next = frame.index == index
            && frame.whole == plan.whole
            && (frame.seq, frame.core) == (header.seq, header.core)
            && frame.boot_epoch == header.boot_epoch;
        let bytes = file.get(position, frame.used_len as usize);
        if !is_planned || !is_next || !frame.body_matches(bytes) {
            return None;
        }
        let mut at = FRAME_HEADER_BYTES;
        for _ in 0..frame.pieces {
            let (piece, next) = piece_at(&uuid, header.seq, bytes, at)?;
            at = next;
            if piece.position > 0 {
                let extent = ExtentHeader::decode(piece.bytes).ok()?;
                if extent.total_len() != piece.bytes.len() || plan.keeps(&extent) != Some(true) {
                    return None;
                }
                totals.note(&extent);
            }
        }
        table.add(&frame, position);
        position += frame.total_len();
        index += 1;
        if frame.is_last {
            break;
        }
    }
    totals.file_bytes = position;
    (position == file.len()).then(|| {
        let map = RewrittenMap::new(uuid, header.seq, plan.whole.end, table, position);
        (map, totals)
    })
}
