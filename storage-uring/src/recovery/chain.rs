//! Which segments of a core directory hold the log, and where each of them ends.
//!
//! The first group of a segment says where the log ended before it. Following these links from the newest
//! segment back makes every cut of an earlier recovery permanent: what lies between is not log any more.

use std::collections::HashMap;

use super::scan::Since;
use super::source::{SegmentSource, Window};
use crate::error::StorageError;
use crate::format::freed::FreedRuns;
use crate::format::group::{GroupHeader, GROUP_HEADER_BYTES};
use crate::format::rewritten::{FrameHeader, Rewritten, FRAME_HEADER_BYTES};
use crate::format::segment::{SegmentHeader, SEGMENT_HEADER_BYTES};
use crate::format::{DataUuid, HeaderFault, ALIGN, FORMAT_VERSION};

/// A segment to scan.
pub struct SegmentInput {
    /// Sequence, from the file name.
    pub seq: u64,
    /// For messages.
    pub file: std::path::PathBuf,
    /// The bytes.
    pub source: Box<dyn SegmentSource>,
}

pub(crate) struct Segment {
    pub seq: u64,
    pub file: std::path::PathBuf,
    pub window: Window,
    /// Epoch and number of cores of the start that created it, and so wrote every group in it.
    pub born: Option<(u64, u16)>,
    /// Link of the first group, if that is readable.
    first: Option<GroupHeader>,
    /// Set when it was rewritten without what nobody needs.
    pub rewritten: Option<Rewritten>,
    /// Groups may start before this position.
    pub len: u64,
    /// Where a later segment says the log ended in this one.
    pub limit: Option<u64>,
    /// What the record of freed segments says was between the segment before and this one: first and last
    /// group.
    pub freed_before: Option<(u64, u64)>,
    /// Group numbers may jump at the start of this segment: what was before it is missing.
    pub after_gap: bool,
    /// Segments between the one before and this one are gone and not recorded as freed.
    pub missing_before: bool,
    /// Why the file cannot be as it was left: whatever is missing in it was not cut by anybody.
    pub fault: Option<&'static str>,
    /// The start that made it made others before it that are neither here nor freed.
    hole_before: bool,
}

/// What nothing but damage makes of a file.
const SHORTENED: &str = "the file is shorter than it was made";
const MISNAMED: &str = "the file is another segment of this data directory";

impl Segment {
    /// Where the log ended before this segment, if that is readable.
    pub fn link(&self) -> Option<(u64, u64)> {
        let rewritten = self.rewritten.map(|whole| whole.link);
        rewritten.or_else(|| self.first.as_ref().map(GroupHeader::link))
    }

    /// Number of its first group, if that is readable.
    pub fn first_group(&self) -> Option<u64> {
        let rewritten = self.rewritten.map(|whole| whole.first_group);
        rewritten.or_else(|| self.first.as_ref().map(|first| first.group))
    }

    /// Epoch of the start that made it, where anything tells.
    fn epoch(&self) -> Option<u64> {
        let born = self.born.map(|(epoch, _)| epoch);
        born.or(self.first.as_ref().map(|first| first.boot_epoch))
    }

    /// Segments before it are lost, and no link in it says so.
    pub fn is_behind_hole(&self) -> bool {
        self.hole_before && self.link().is_none()
    }

    /// Why the log in it did not end at `position`, if its file does.
    pub fn lost_end(&self, position: u64) -> Option<&'static str> {
        match self.limit {
            Some(limit) if position < limit => Some("the file ends before the log in it did"),
            Some(_) => None,
            None => self.fault,
        }
    }

    /// Looks at a file again that a running broker may have rewritten since.
    pub fn look_again(&mut self, uuid: &DataUuid, core: u16) {
        self.window.refresh();
        self.len = self.window.len();
        self.rewritten = rewritten_of(uuid, core, self.seq, &mut self.window).map(|found| found.1);
    }
}

/// What a rewritten segment says about itself and when it was born, in its first block or, when that is not
/// readable, in any of its frames.
fn rewritten_of(
    uuid: &DataUuid,
    core: u16,
    seq: u64,
    window: &mut Window,
) -> Option<((u64, u16), Rewritten)> {
    if let Ok(header) = SegmentHeader::decode(window.get(0, ALIGN)) {
        let born = (header.boot_epoch, header.core_count);
        return header.rewritten.map(|whole| (born, whole));
    }
    let group = window.get(SEGMENT_HEADER_BYTES, GROUP_HEADER_BYTES);
    if GroupHeader::decode(uuid, group).is_ok() {
        return None;
    }
    // Any frame tells; an ordinary segment has none.
    let mut position = SEGMENT_HEADER_BYTES;
    while position < window.len() {
        let frame = FrameHeader::decode(uuid, window.get(position, FRAME_HEADER_BYTES));
        if let Some(frame) = frame.ok().filter(|it| it.seq == seq && it.core == core) {
            return Some(((frame.boot_epoch, frame.core_count), frame.whole));
        }
        position += ALIGN as u64;
    }
    None
}

/// The segments of a core directory, sorted out.
#[derive(Default)]
pub(crate) struct Chain {
    /// Oldest first.
    pub live: Vec<Segment>,
    /// No longer part of the log: the link of a later segment leaves them out.
    pub skipped: Vec<u64>,
    /// Recorded as freed.
    pub given_back: Vec<u64>,
    /// Never held a group.
    pub unused: Vec<u64>,
    /// Those among them of which nothing says that a start of this directory made them.
    pub unknown: Vec<u64>,
    /// Not of this data directory, or not a segment.
    pub strays: Vec<(u64, &'static str)>,
}

/// A group header that is live in `seq` at `position`, if there is one.
pub(crate) fn live_header(
    uuid: &DataUuid,
    core: u16,
    seq: u64,
    file: &std::path::Path,
    bytes: &[u8],
) -> Result<Option<GroupHeader>, StorageError> {
    match GroupHeader::decode(uuid, bytes) {
        Ok(header) if header.segment == seq && header.core == core => Ok(Some(header)),
        Err(HeaderFault::Version(found)) => Err(StorageError::UnknownVersion {
            file: file.to_owned(),
            found,
            known: FORMAT_VERSION,
        }),
        Ok(_)
        | Err(
            HeaderFault::Short | HeaderFault::Magic | HeaderFault::Checksum | HeaderFault::Field,
        ) => Ok(None),
    }
}

/// The next live group header at or behind `from`.
pub(crate) fn find_group(
    uuid: &DataUuid,
    core: u16,
    segment: &mut Segment,
    from: u64,
) -> Result<Option<(u64, GroupHeader)>, StorageError> {
    let end = segment.limit.unwrap_or(segment.len).min(segment.len);
    let mut position = from;
    while position + GROUP_HEADER_BYTES as u64 <= end {
        let bytes = segment.window.get(position, GROUP_HEADER_BYTES);
        if let Some(header) = live_header(uuid, core, segment.seq, &segment.file, bytes)? {
            return Ok(Some((position, header)));
        }
        position += ALIGN as u64;
    }
    Ok(None)
}

/// Marks the segments before which others of the same start are lost.
///
/// A start numbers its segments without a gap, and each has its name durably before the next one gets one. What
/// is removed at an end of the log goes newest first, durably, so nothing but a loss leaves a hole; except that a
/// later link leaves segments out, which is the link's to say.
fn mark_holes(segments: &mut [Segment], freed: &FreedRuns) {
    // The very first start begins with the first segment.
    let mut before = Some((0, 1));
    for segment in segments {
        let epoch = segment.epoch();
        segment.hole_before = before
            .zip(epoch)
            .is_some_and(|((seq, of), epoch)| of == epoch && is_hole(seq, segment.seq, freed));
        before = epoch.map(|epoch| (segment.seq, epoch));
    }
}

/// Whether there are sequences between two that were not given back.
fn is_hole(before: u64, seq: u64, freed: &FreedRuns) -> bool {
    let mut at = seq - 1;
    while at > before {
        match freed.run_of(at) {
            Some(run) => at = run.link.0,
            None => return true,
        }
    }
    false
}

/// Those that are shorter than they were made.
pub(crate) fn shortened(segments: &[Segment]) -> Vec<u64> {
    let short = segments.iter().filter(|it| it.fault == Some(SHORTENED));
    short.map(|segment| segment.seq).collect()
}

/// Sorts segments (ascending by sequence) into live ones and the others.
pub(crate) fn link(
    uuid: &DataUuid,
    core: u16,
    inputs: Vec<SegmentInput>,
    freed: &FreedRuns,
    since: Since<'_>,
) -> Result<Chain, StorageError> {
    let mut chain = Chain::default();
    let mut segments = Vec::new();
    for input in inputs {
        if freed.run_of(input.seq).is_some() {
            // Freed, and the power went before the file did.
            chain.given_back.push(input.seq);
            continue;
        }
        if let Some(segment) = open_segment(uuid, core, input, since, &mut chain)? {
            segments.push(segment);
        }
    }
    mark_holes(&mut segments, freed);
    let mut ends: HashMap<u64, u64> = HashMap::new();
    let mut wanted: Option<u64> = None;
    for mut segment in segments.into_iter().rev() {
        if wanted.is_some_and(|seq| segment.seq > seq) {
            chain.skipped.push(segment.seq);
            continue;
        }
        if wanted.is_some_and(|seq| segment.seq < seq) {
            if let Some(newer) = chain.live.last_mut() {
                newer.after_gap = true;
                newer.missing_before = true;
            }
        }
        if chain.live.is_empty() {
            let holds_anything = holds_anything(uuid, core, &mut segment)?;
            segment.window.release();
            segment.window.check(&segment.file)?;
            let tells_of_loss = segment.fault.is_some() || segment.hole_before;
            if !holds_anything && !tells_of_loss {
                chain.unused.push(segment.seq);
                if segment.born.is_none() {
                    chain.unknown.push(segment.seq);
                }
                continue;
            }
        }
        segment.limit = ends.get(&segment.seq).copied();
        wanted = segment.link().map(|mut link| {
            while let Some(run) = freed.run_of(link.0) {
                let last = segment
                    .freed_before
                    .map_or(run.last_group, |(_, last)| last);
                segment.freed_before = Some((run.first_group, last));
                link = run.link;
            }
            ends.insert(link.0, link.1);
            link.0
        });
        if segment.is_behind_hole() {
            segment.after_gap = true;
            segment.missing_before = true;
        }
        chain.live.push(segment);
    }
    if let Some(oldest) = chain.live.last_mut() {
        oldest.after_gap = true;
        oldest.missing_before |= wanted.is_some_and(|seq| seq != 0);
    }
    chain.live.reverse();
    Ok(chain)
}

fn open_segment(
    uuid: &DataUuid,
    core: u16,
    input: SegmentInput,
    since: Since<'_>,
    chain: &mut Chain,
) -> Result<Option<Segment>, StorageError> {
    let SegmentInput { seq, file, source } = input;
    let mut window = Window::new(source);
    let len = window.len();
    // No start leaves less than the header of a file, and each file is whole before it is named.
    let mut fault = (len < SEGMENT_HEADER_BYTES).then_some(SHORTENED);
    let born = match SegmentHeader::decode(window.get(0, ALIGN)) {
        Err(HeaderFault::Version(found)) => {
            return Err(StorageError::UnknownVersion {
                file,
                found,
                known: FORMAT_VERSION,
            });
        }
        Ok(header) if header.uuid != *uuid => {
            chain
                .strays
                .push((seq, "a segment of another data directory"));
            return Ok(None);
        }
        Ok(header)
            if (header.seq != seq || header.core != core)
                && holds_group_of(uuid, &header, &mut window) =>
        {
            // Not foreign: it is missing elsewhere, and stands where another is missing.
            fault = Some(MISNAMED);
            Some((header.boot_epoch, header.core_count))
        }
        Ok(header) if header.seq != seq || header.core != core => {
            chain.strays.push((seq, "a segment under a wrong name"));
            return Ok(None);
        }
        // A damaged header does no harm: every group names its segment itself.
        Ok(header) => {
            let is_rewritten = header.rewritten.is_some();
            if since.is_untouched(seq, header.boot_epoch)
                && len < header.segment_bytes
                && !is_rewritten
            {
                fault = Some(SHORTENED);
            }
            Some((header.boot_epoch, header.core_count))
        }
        Err(
            HeaderFault::Short | HeaderFault::Magic | HeaderFault::Checksum | HeaderFault::Field,
        ) => None,
    };
    let rewritten = match fault {
        // What it says of itself is of no use here.
        Some(MISNAMED) => None,
        _ => rewritten_of(uuid, core, seq, &mut window),
    };
    let born = born.or(rewritten.map(|(born, _)| born));
    let bytes = window.get(SEGMENT_HEADER_BYTES, GROUP_HEADER_BYTES);
    let first = live_header(uuid, core, seq, &file, bytes)?;
    window.release();
    window.check(&file)?;
    Ok(Some(Segment {
        seq,
        file,
        window,
        born,
        first,
        rewritten: rewritten.map(|(_, whole)| whole),
        len,
        limit: None,
        freed_before: None,
        after_gap: false,
        missing_before: false,
        fault,
        hole_before: false,
    }))
}

/// Whether a file with this header holds a group or a frame that belongs where the header says.
fn holds_group_of(uuid: &DataUuid, header: &SegmentHeader, window: &mut Window) -> bool {
    let mut position = SEGMENT_HEADER_BYTES;
    while position < window.len() {
        let bytes = window.get(position, GROUP_HEADER_BYTES.max(FRAME_HEADER_BYTES));
        let group = GroupHeader::decode(uuid, bytes).ok();
        let group = group.map(|found| (found.segment, found.core));
        let frame = FrameHeader::decode(uuid, bytes).ok();
        let frame = frame.map(|found| (found.seq, found.core));
        if group.or(frame) == Some((header.seq, header.core)) {
            return true;
        }
        position += ALIGN as u64;
    }
    false
}

/// Whether a segment without newer live ones has anything to say: a group, or bytes that were one.
fn holds_anything(uuid: &DataUuid, core: u16, segment: &mut Segment) -> Result<bool, StorageError> {
    if segment.first.is_some() || segment.rewritten.is_some() {
        return Ok(true);
    }
    if find_group(uuid, core, segment, SEGMENT_HEADER_BYTES)?.is_some() {
        return Ok(true);
    }
    let block = segment.window.get(SEGMENT_HEADER_BYTES, ALIGN);
    Ok(block.iter().any(|byte| *byte != 0))
}
