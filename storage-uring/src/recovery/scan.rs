//! Walking the groups of one core directory, and the verdict on what does not fit.
//!
//! The rules (also in `docs/storage-format.md`):
//! - A bad group with nothing behind it and signs of an unfinished write is cut; so is anything that never
//!   was a group. A complete group that does not match its checksum, with nothing behind it, may have been
//!   acknowledged and is damage.
//! - A bad group with up to `SURVIVORS_MAX` groups behind it, none of which vouches for it, and with signs
//!   of an unfinished write is cut together with them.
//! - Everything else is damage: the logs in it are refused, the scan goes on behind it.
//!
//! Pure apart from reading: cuts are reported, not carried out, and depend only on the bytes, so every start
//! comes to the same verdict.

use std::path::PathBuf;
use std::sync::Arc;

use serde::Serialize;

use super::chain::{self, Chain, Segment, SegmentInput};
use super::events::{Chapters, UnknownLoss};
use crate::error::StorageError;
use crate::format::extent::{ExtentHeader, ExtentKind};
use crate::format::group::{resembles_header, GroupHeader, GROUP_HEADER_BYTES};
use crate::format::segment::SEGMENT_HEADER_BYTES;
use crate::format::{record, zero_sectors, DataUuid, Place, ALIGN, SECTOR};
use crate::name::{LogId, LogName};

/// Groups that can lie behind an unfinished one: the largest number of commits in flight, less one.
pub const SURVIVORS_MAX: usize = 3;

/// An unfinished tail that is not part of the log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Cut {
    /// Core directory.
    pub core: u16,
    /// The file.
    pub file: PathBuf,
    /// Its sequence.
    pub segment: u64,
    /// Where the log ends.
    pub position: u64,
    /// Bytes behind that position that were given up.
    pub dropped_bytes: u64,
    /// Logs with extents in what was dropped, as far as readable.
    pub logs: Vec<String>,
    /// Why.
    pub reason: &'static str,
}

/// Damage an unfinished write does not explain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Damage {
    /// Core directory.
    pub core: u16,
    /// The file.
    pub file: PathBuf,
    /// Position of the damaged group.
    pub position: u64,
    /// Logs known to be affected; empty when unknown.
    pub logs: Vec<String>,
    /// What is wrong.
    pub reason: String,
}

/// Counts of one core directory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct ScanCounts {
    /// Live segments.
    pub segments: u64,
    /// Groups read.
    pub groups: u64,
    /// Records in them.
    pub records: u64,
    /// Bytes of those groups.
    pub bytes: u64,
}

/// What one core directory holds.
pub(crate) struct CoreScan {
    pub core: u16,
    pub chapters: Chapters,
    pub losses: Vec<UnknownLoss>,
    pub cuts: Vec<Cut>,
    pub damages: Vec<Damage>,
    pub counts: ScanCounts,
    /// Where the log ends: segment and position.
    pub end: (u64, u64),
    pub next_group: u64,
    pub live: Vec<u64>,
    pub dead: Vec<u64>,
    pub unused: Vec<u64>,
    pub strays: Vec<(u64, &'static str)>,
    /// Number of cores in each epoch that created a segment here.
    pub core_counts: Vec<(u64, u16)>,
}

/// A group header with a place, found while looking ahead.
#[derive(Clone, Copy)]
struct Later {
    segment_at: usize,
    position: u64,
    header: GroupHeader,
}

enum Verdict {
    /// The log goes on in the next segment.
    SegmentEnd,
    /// The log ends here; nothing to report.
    End,
    /// The log ends here; what follows is dropped.
    Cut(&'static str),
    /// Something that was log is not readable.
    Damaged(&'static str),
}

pub(crate) struct Scanner {
    uuid: DataUuid,
    segments: Vec<Segment>,
    out: CoreScan,
    /// Number the next group must have; none when anything goes.
    expected: Option<u64>,
    epoch: u64,
}

/// Scans one core directory.
pub(crate) fn scan_core(
    uuid: &DataUuid,
    core: u16,
    inputs: Vec<SegmentInput>,
) -> Result<CoreScan, StorageError> {
    let Chain {
        live,
        dead,
        unused,
        strays,
    } = chain::link(uuid, core, inputs)?;
    let out = CoreScan {
        core,
        chapters: Chapters::default(),
        losses: Vec::new(),
        cuts: Vec::new(),
        damages: Vec::new(),
        counts: ScanCounts {
            segments: live.len() as u64,
            ..ScanCounts::default()
        },
        end: (0, 0),
        next_group: 1,
        live: live.iter().map(|segment| segment.seq).collect(),
        dead,
        unused,
        strays,
        core_counts: live.iter().filter_map(|segment| segment.born).collect(),
    };
    let mut scanner = Scanner {
        uuid: *uuid,
        segments: live,
        out,
        expected: None,
        epoch: 0,
    };
    let mut at = 0;
    while at < scanner.segments.len() {
        if !scanner.scan_segment(at)? {
            let behind: Vec<u64> = scanner.segments[at + 1..]
                .iter()
                .map(|segment| segment.seq)
                .collect();
            scanner.out.live.retain(|seq| !behind.contains(seq));
            scanner.out.dead.extend(behind);
            break;
        }
        at += 1;
    }
    Ok(scanner.out)
}

impl Scanner {
    /// Walks one segment; false when the log ends in it for good.
    fn scan_segment(&mut self, at: usize) -> Result<bool, StorageError> {
        if self.segments[at].after_gap {
            self.expected = None;
        }
        let mut position = SEGMENT_HEADER_BYTES;
        loop {
            let segment = &mut self.segments[at];
            if segment.limit.is_some_and(|limit| position >= limit) || position >= segment.len {
                self.out.end = (segment.seq, position.min(segment.limit.unwrap_or(position)));
                return Ok(true);
            }
            let header = self.header_at(at, position)?;
            if let Some(header) = header {
                let group = self.segments[at]
                    .window
                    .get(position, header.total_len as usize);
                if header.body_matches(group) {
                    // Padding that is missing at the end of a file is no loss.
                    self.take_group(at, position, &header);
                    position += header.total_len;
                    continue;
                }
            }
            match self.judge(at, position, header.as_ref())? {
                Verdict::SegmentEnd => return Ok(true),
                Verdict::End => return Ok(false),
                Verdict::Cut(reason) => {
                    self.cut(at, position, header.as_ref(), reason);
                    return Ok(false);
                }
                Verdict::Damaged(reason) => {
                    position = self.damaged(at, position, header.as_ref(), reason)?;
                }
            }
        }
    }

    /// The header at this position, if it is the group that belongs here.
    fn header_at(&mut self, at: usize, position: u64) -> Result<Option<GroupHeader>, StorageError> {
        let core = self.out.core;
        let segment = &mut self.segments[at];
        let (seq, file) = (segment.seq, segment.file.clone());
        let bytes = segment.window.get(position, GROUP_HEADER_BYTES);
        let header = chain::live_header(&self.uuid, core, seq, &file, bytes)?;
        Ok(header.filter(|header| {
            self.expected
                .is_none_or(|expected| header.group == expected)
                && header.boot_epoch >= self.epoch
        }))
    }

    fn take_group(&mut self, at: usize, position: u64, header: &GroupHeader) {
        let core = self.out.core;
        let segment = &mut self.segments[at];
        let seq = segment.seq;
        let group = segment.window.get(position, header.used_len as usize);
        let mut extent_at = GROUP_HEADER_BYTES;
        let mut unreadable = false;
        for _ in 0..header.extents {
            let Ok(extent) = ExtentHeader::decode(&group[extent_at.min(group.len())..]) else {
                unreadable = true;
                break;
            };
            let place = Place {
                segment: seq,
                position: (position + extent_at as u64) as u32,
                core,
            };
            note_name(&mut self.out.chapters, &extent, &group[extent_at..]);
            self.out
                .chapters
                .on_extent(header.boot_epoch, &extent, place);
            extent_at += extent.total_len();
        }
        self.note_group(seq, position, header);
        if unreadable {
            let reason = "a group with a matching checksum holds an extent that cannot be read";
            self.report_damage(at, position, Vec::new(), reason, header.boot_epoch);
        }
    }

    fn note_group(&mut self, seq: u64, position: u64, header: &GroupHeader) {
        self.epoch = header.boot_epoch;
        self.expected = Some(header.group + 1);
        self.out.next_group = header.group + 1;
        self.out.end = (seq, position + header.total_len);
        self.out.counts.groups += 1;
        self.out.counts.records += u64::from(header.records);
        self.out.counts.bytes += header.total_len;
    }

    /// What to make of a position where the expected group is not.
    fn judge(
        &mut self,
        at: usize,
        position: u64,
        header: Option<&GroupHeader>,
    ) -> Result<Verdict, StorageError> {
        let is_last = at + 1 == self.segments.len();
        let limited = self.segments[at].limit.is_some();
        let seq = self.segments[at].seq;
        let block = self.segments[at].window.get(position, ALIGN);
        let blank = block.iter().all(|byte| *byte == 0);
        let block_evidence = block.len() < ALIGN || zero_sectors(&block[..SECTOR]) > 0;
        let expected = self.expected.unwrap_or(0);
        let resembles = resembles_header(block, seq, expected);
        if blank && !is_last && !limited && header.is_none() {
            // Without a link the zeros behind the last group are the segment's end; what is missing shows
            // at the start of the next segment.
            return Ok(Verdict::SegmentEnd);
        }
        let unfinished = match header {
            Some(header) => {
                let group = self.segments[at]
                    .window
                    .get(position, header.total_len as usize);
                header.shows_unwritten_sectors(group)
            }
            None => block_evidence,
        };
        let later =
            self.look_ahead(at, position, header.map_or(expected, |header| header.group))?;
        let bad_group = match (header, self.expected, later.first()) {
            (Some(header), _, _) => header.group,
            (None, Some(expected), _) => expected,
            // Nothing says which group this was. The lowest possible number errs on the side of damage.
            (None, None, Some(next)) => {
                let lowest = next.header.group.saturating_sub(SURVIVORS_MAX as u64);
                lowest.max(self.out.next_group)
            }
            (None, None, None) => self.out.next_group,
        };
        if later.is_empty() && !limited {
            return Ok(match header {
                Some(_) if unfinished => Verdict::Cut("the last group was not completely written"),
                Some(_) => {
                    Verdict::Damaged("the last group is complete and does not match its checksum")
                }
                None if blank && self.rest_is_zero(at, position) => Verdict::End,
                None if unfinished => Verdict::Cut("the last group was not completely written"),
                None if resembles => Verdict::Damaged("the header of the last group is damaged"),
                None => Verdict::Cut("the bytes behind the last group are no group"),
            });
        }
        let vouched = later
            .iter()
            .any(|later| later.header.durable_group >= bad_group);
        if !vouched && unfinished && later.len() <= SURVIVORS_MAX {
            return Ok(Verdict::Cut(
                "a group was not completely written, nor acknowledged",
            ));
        }
        Ok(Verdict::Damaged(match (header.is_some(), vouched) {
            (true, true) => "a durable group does not match its checksum",
            (false, true) => "the header of a durable group is damaged",
            (_, false) => "a group is damaged and groups behind it are not",
        }))
    }

    /// Up to `SURVIVORS_MAX + 1` live groups behind a bad one, in this and later segments.
    fn look_ahead(
        &mut self,
        at: usize,
        position: u64,
        bad_group: u64,
    ) -> Result<Vec<Later>, StorageError> {
        let core = self.out.core;
        let mut found: Vec<Later> = Vec::new();
        let mut from = position + ALIGN as u64;
        for segment_at in at..self.segments.len() {
            let segment = &mut self.segments[segment_at];
            while let Some((position, header)) = chain::find_group(&self.uuid, core, segment, from)?
            {
                from = position + header.total_len.max(ALIGN as u64);
                if header.group > bad_group && header.boot_epoch >= self.epoch {
                    found.push(Later {
                        segment_at,
                        position,
                        header,
                    });
                    if found.len() > SURVIVORS_MAX {
                        return Ok(found);
                    }
                }
            }
            from = SEGMENT_HEADER_BYTES;
        }
        Ok(found)
    }

    fn rest_is_zero(&mut self, at: usize, position: u64) -> bool {
        let segment = &mut self.segments[at];
        let mut from = position;
        while from < segment.len {
            let bytes = segment.window.get(from, 1 << 20);
            if bytes.is_empty() {
                break;
            }
            if bytes.iter().any(|byte| *byte != 0) {
                return false;
            }
            from += bytes.len() as u64;
        }
        true
    }

    fn cut(
        &mut self,
        at: usize,
        position: u64,
        header: Option<&GroupHeader>,
        reason: &'static str,
    ) {
        let mut logs = Vec::new();
        if let Some(header) = header {
            let group = self.segments[at]
                .window
                .get(position, header.total_len as usize)
                .to_vec();
            for (_, extent, _) in readable_extents(&group, header.extents) {
                note_log(
                    &self.out.chapters,
                    extent.log,
                    extent.name(&group),
                    &mut logs,
                );
            }
        }
        let end = self.used_end(at, position);
        if self.out.end.0 == self.segments[at].seq || position > SEGMENT_HEADER_BYTES {
            self.out.end = (self.segments[at].seq, position);
        } else {
            self.end_before(at);
        }
        self.out.cuts.push(Cut {
            core: self.out.core,
            file: self.segments[at].file.clone(),
            segment: self.segments[at].seq,
            position,
            dropped_bytes: end - position,
            logs,
            reason,
        });
    }

    /// Ends the log before a segment none of whose groups is left: it goes, with every one behind the last
    /// group. What was started and not finished behind that group goes, too.
    fn end_before(&mut self, at: usize) {
        let (end_seq, end) = self.out.end;
        let gone: Vec<u64> = self.segments[..=at]
            .iter()
            .map(|segment| segment.seq)
            .collect();
        let gone = gone
            .into_iter()
            .filter(|seq| *seq > end_seq)
            .collect::<Vec<_>>();
        self.out.live.retain(|seq| !gone.contains(seq));
        self.out.dead.extend(gone);
        let Some(last) = self
            .segments
            .iter()
            .position(|segment| segment.seq == end_seq)
        else {
            return;
        };
        let used_end = self.used_end(last, end);
        if used_end > end {
            self.out.cuts.push(Cut {
                core: self.out.core,
                file: self.segments[last].file.clone(),
                segment: end_seq,
                position: end,
                dropped_bytes: used_end - end,
                logs: Vec::new(),
                reason: "a group was not completely written, nor acknowledged",
            });
        }
    }

    /// One past the last non-zero byte of a segment.
    fn used_end(&mut self, at: usize, position: u64) -> u64 {
        let segment = &mut self.segments[at];
        let mut end = position;
        let mut from = position;
        while from < segment.len {
            let bytes = segment.window.get(from, 1 << 20);
            if bytes.is_empty() {
                break;
            }
            if let Some(last) = bytes.iter().rposition(|byte| *byte != 0) {
                end = from + last as u64 + 1;
            }
            from += bytes.len() as u64;
        }
        end
    }

    /// Reports damage, saves what can be saved, and says where to go on.
    fn damaged(
        &mut self,
        at: usize,
        position: u64,
        header: Option<&GroupHeader>,
        reason: &'static str,
    ) -> Result<u64, StorageError> {
        if let Some(header) = header {
            self.salvage(at, position, header, reason);
            return Ok(position + header.total_len);
        }
        let bad_group = self.expected.unwrap_or(0);
        let next = self.look_ahead(at, position, bad_group)?.first().copied();
        let here = next
            .filter(|later| later.segment_at == at)
            .map(|later| later.header.boot_epoch);
        let epoch = self.segments[at]
            .born
            .map(|(epoch, _)| epoch)
            .or(here)
            .unwrap_or(self.epoch);
        self.report_damage(at, position, Vec::new(), reason, epoch);
        match next.filter(|later| later.segment_at == at) {
            Some(later) => {
                self.expected = Some(later.header.group);
                Ok(later.position)
            }
            None => {
                // The rest of this segment is lost; a later one goes on with any number.
                let segment = &self.segments[at];
                let end = segment
                    .limit
                    .unwrap_or(segment.len)
                    .max(position + ALIGN as u64);
                self.out.end = (segment.seq, end);
                self.expected = next.map(|later| later.header.group);
                if next.is_none() {
                    self.out.next_group = bad_group.max(self.out.next_group) + 1;
                }
                Ok(end)
            }
        }
    }

    /// Takes the good extents of a group whose body does not match, and refuses the logs of the others.
    fn salvage(&mut self, at: usize, position: u64, header: &GroupHeader, reason: &'static str) {
        let segment = &mut self.segments[at];
        let seq = segment.seq;
        let group = segment
            .window
            .get(position, header.used_len as usize)
            .to_vec();
        let core = self.out.core;
        let detail: Arc<str> =
            format!("{reason} ({} at {position})", segment.file.display()).into();
        let mut logs = Vec::new();
        let mut seen = 0;
        for (extent_at, extent, good) in readable_extents(&group, header.extents) {
            seen += 1;
            note_name(&mut self.out.chapters, &extent, &group[extent_at..]);
            if good {
                let place = Place {
                    segment: seq,
                    position: (position + extent_at as u64) as u32,
                    core,
                };
                self.out
                    .chapters
                    .on_extent(header.boot_epoch, &extent, place);
            } else {
                self.out
                    .chapters
                    .on_damaged(extent.log, header.boot_epoch, &detail);
                note_log(&self.out.chapters, extent.log, None, &mut logs);
            }
        }
        self.note_group(seq, position, header);
        if seen < header.extents {
            self.report_damage(at, position, Vec::new(), reason, header.boot_epoch);
        } else if !logs.is_empty() {
            self.report_known_damage(at, position, logs, reason);
        } else {
            // Only padding or unused header bytes differ; every record matches its own checksum.
            tracing::warn!(file = %self.segments[at].file.display(), position, "a group differs outside its records");
        }
    }

    fn report_damage(
        &mut self,
        at: usize,
        position: u64,
        logs: Vec<String>,
        reason: &'static str,
        epoch: u64,
    ) {
        self.note_loss(at, position, reason, epoch);
        self.report_known_damage(at, position, logs, reason);
    }

    fn note_loss(&mut self, at: usize, position: u64, reason: &'static str, epoch: u64) {
        let detail: Arc<str> = format!(
            "{reason} ({} at {position})",
            self.segments[at].file.display()
        )
        .into();
        self.out.chapters.on_unknown_loss(epoch, &detail);
        self.out.losses.push(UnknownLoss {
            core: self.out.core,
            epoch,
            detail,
        });
    }

    fn report_known_damage(
        &mut self,
        at: usize,
        position: u64,
        logs: Vec<String>,
        reason: &'static str,
    ) {
        self.out.damages.push(Damage {
            core: self.out.core,
            file: self.segments[at].file.clone(),
            position,
            logs,
            reason: reason.to_owned(),
        });
    }
}

/// Extents from the start of a group as far as their headers are readable, each with whether its records are.
fn readable_extents(group: &[u8], count: u32) -> Vec<(usize, ExtentHeader, bool)> {
    let mut found = Vec::new();
    let mut at = GROUP_HEADER_BYTES;
    for _ in 0..count {
        let Some(bytes) = group.get(at..) else { break };
        let Ok(extent) = ExtentHeader::decode(bytes) else {
            break;
        };
        found.push((at, extent, records_are_good(bytes, &extent)));
        at += extent.total_len();
    }
    found
}

fn records_are_good(bytes: &[u8], extent: &ExtentHeader) -> bool {
    let Some(body) = bytes.get(..extent.total_len()) else {
        return false;
    };
    if extent.kind != ExtentKind::Records {
        return true;
    }
    let mut at = extent.records_at();
    for offset in extent.first_offset..extent.end_offset() {
        match record::decode(body, at, extent.log, offset) {
            Ok(span) => at = span.end,
            Err(_) => return false,
        }
    }
    at == body.len()
}

fn note_name(chapters: &mut Chapters, extent: &ExtentHeader, bytes: &[u8]) {
    if extent.name_len > 0 && !chapters.names.contains_key(&extent.log) {
        if let Some(name) = extent.name(bytes) {
            chapters.names.insert(extent.log, name);
        }
    }
}

fn note_log(chapters: &Chapters, log: LogId, name: Option<LogName>, logs: &mut Vec<String>) {
    let known = name.or_else(|| chapters.names.get(&log).cloned());
    let text = known.map_or_else(|| format!("log {:016x}", log.0), |name| name.to_string());
    if !logs.contains(&text) {
        logs.push(text);
    }
}
