//! What follows from a verdict: noting cuts, saving what a damaged group still holds, naming what is lost.
//!
//! Changes no file; `settle` carries cuts out.

use std::sync::Arc;

use super::events::UnknownLoss;
use super::scan::{group_use, note_log, note_name, note_use, Cut, Damage, Scanner};
use crate::error::StorageError;
use crate::format::extent::{ExtentHeader, ExtentKind};
use crate::format::group::{GroupHeader, GROUP_HEADER_BYTES};
use crate::format::segment::SEGMENT_HEADER_BYTES;
use crate::format::{record, Place, ALIGN};
use crate::machine::control::{Change, Restated};

impl Scanner<'_> {
    pub(super) fn cut(
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
    pub(super) fn end_before(&mut self, at: usize) {
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
        if self.segments[last].rewritten.is_some() {
            // Its bytes lie elsewhere, and none of them is behind the log's end.
            return;
        }
        let used_end = self.used_end(last, end);
        if used_end <= end {
            self.trim(last, end);
        } else {
            if self.segments[last].limit == Some(end) {
                self.out.linked_cut = Some(end_seq);
            }
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
    pub(super) fn used_end(&mut self, at: usize, position: u64) -> u64 {
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
    pub(super) fn damaged(
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
    pub(super) fn salvage(
        &mut self,
        at: usize,
        position: u64,
        header: &GroupHeader,
        reason: &'static str,
    ) {
        let segment = &mut self.segments[at];
        let seq = segment.seq;
        let group = segment
            .window
            .get(position, header.used_len as usize)
            .to_vec();
        let core = self.out.core;
        let used = group_use(position, header, segment.len);
        self.out.uses.on_group(seq, &used);
        let detail: Arc<str> =
            format!("{reason} ({} at {position})", segment.file.display()).into();
        let mut logs = Vec::new();
        let mut seen = 0;
        for (extent_at, extent, good) in readable_extents(&group, header.extents) {
            seen += 1;
            note_name(&mut self.out.chapters, &extent, &group[extent_at..]);
            let is_taken = good && {
                note_use(&mut self.out.uses, &mut self.out.restated, &extent, seq);
                let place = Place {
                    segment: seq,
                    position: (position + extent_at as u64) as u32,
                    core,
                };
                let bytes = &group[extent_at..];
                let chapters = &mut self.out.chapters;
                chapters.on_extent(header.boot_epoch, &extent, place, bytes)
            };
            if !is_taken {
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

    pub(super) fn report_damage(
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

    pub(super) fn note_loss(&mut self, at: usize, position: u64, reason: &'static str, epoch: u64) {
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

    pub(super) fn report_known_damage(
        &mut self,
        at: usize,
        position: u64,
        logs: Vec<String>,
        reason: &'static str,
    ) {
        // A human may want to look at it.
        self.out.uses.mark_damaged(self.segments[at].seq);
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

pub(super) fn records_are_good(bytes: &[u8], extent: &ExtentHeader) -> bool {
    let Some(body) = bytes.get(..extent.total_len()) else {
        return false;
    };
    if extent.kind != ExtentKind::Records {
        return match extent.kind {
            ExtentKind::State => Restated::decode(extent, body).is_some(),
            ExtentKind::Records
            | ExtentKind::Truncate
            | ExtentKind::Place
            | ExtentKind::Base
            | ExtentKind::Accept
            | ExtentKind::Begin => Change::decode(extent, body).is_some(),
        };
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
