//! The verdict on a place where the expected group is not: end of the log, unfinished write, or damage.

use super::chain;
use super::scan::{Scanner, SURVIVORS_MAX};
use crate::error::StorageError;
use crate::format::group::{resembles_header, GroupHeader};
use crate::format::rewritten::Rewritten;
use crate::format::segment::SEGMENT_HEADER_BYTES;
use crate::format::{zero_sectors, ALIGN, SECTOR};

/// A group header with a place, found while looking ahead.
#[derive(Clone, Copy)]
pub(super) struct Later {
    pub segment_at: usize,
    pub position: u64,
    pub header: GroupHeader,
}

pub(super) enum Verdict {
    /// The log goes on in the next segment.
    SegmentEnd,
    /// The log ends here; nothing to report.
    End,
    /// The log ends here; what follows is dropped.
    Cut(&'static str),
    /// Something that was log is not readable.
    Damaged(&'static str),
}

/// The number of a bad group when nothing says which it was, by the next one that is found: the lowest possible
/// errs on the side of damage.
fn lowest_before(found: u64, next_group: u64) -> u64 {
    let lowest = found.saturating_sub(SURVIVORS_MAX as u64);
    lowest.max(next_group)
}

/// A header that stands for all groups of a rewritten segment.
fn vouching(whole: &Rewritten, born: Option<(u64, u16)>) -> GroupHeader {
    GroupHeader {
        boot_epoch: born.map_or(0, |(epoch, _)| epoch),
        group: whole.first_group,
        durable_group: whole.last_group,
        ..GroupHeader::default()
    }
}

impl Scanner<'_> {
    /// What to make of a position where the expected group is not.
    pub(super) fn judge(
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
        let may_end = blank && !is_last && !limited && header.is_none();
        if may_end && self.rest_is_zero(at, position) {
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
            (None, None, Some(next)) => lowest_before(next.header.group, self.out.next_group),
            (None, None, None) => self.out.next_group,
        };
        let by_rewritten = self.vouched >= bad_group;
        if later.is_empty() && !limited {
            return Ok(match header {
                None if blank && self.rest_is_zero(at, position) => Verdict::End,
                _ if by_rewritten => {
                    Verdict::Damaged("the last group is not readable and was durable")
                }
                Some(_) if unfinished => Verdict::Cut("the last group was not completely written"),
                Some(_) => {
                    Verdict::Damaged("the last group is complete and does not match its checksum")
                }
                None if unfinished => Verdict::Cut("the last group was not completely written"),
                None if resembles => Verdict::Damaged("the header of the last group is damaged"),
                None => Verdict::Cut("the bytes behind the last group are no group"),
            });
        }
        let by_group = |later: &Later| later.header.durable_group >= bad_group;
        let vouched = by_rewritten || later.iter().any(by_group);
        // Undone groups leave their numbers to the next ones, so more of them than numbers may lie behind.
        let last_survivor = bad_group.saturating_add(SURVIVORS_MAX as u64);
        let all_survive = later
            .iter()
            .all(|later| later.header.group <= last_survivor);
        if !vouched && unfinished && all_survive {
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

    /// The live groups behind a bad one (0 when nothing says which it is), in this and later segments, as far as
    /// its verdict may depend on them: `SURVIVORS_MAX + 1` of them, and on to one that vouches for it or was not
    /// written together with it.
    pub(super) fn look_ahead(
        &mut self,
        at: usize,
        position: u64,
        bad_group: u64,
    ) -> Result<Vec<Later>, StorageError> {
        let core = self.out.core;
        let mut found: Vec<Later> = Vec::new();
        let mut is_decided = false;
        let mut from = position + ALIGN as u64;
        for segment_at in at..self.segments.len() {
            let segment = &mut self.segments[segment_at];
            if let Some(whole) = segment.rewritten {
                // Only what was durable is rewritten: it vouches for itself and all before it.
                if segment_at > at && whole.last_group > bad_group {
                    found.push(Later {
                        segment_at,
                        position: SEGMENT_HEADER_BYTES,
                        header: vouching(&whole, segment.born),
                    });
                    is_decided = true;
                }
                continue;
            }
            while let Some((position, header)) = chain::find_group(&self.uuid, core, segment, from)?
            {
                from = position + header.total_len.max(ALIGN as u64);
                if header.group > bad_group && header.boot_epoch >= self.epoch {
                    found.push(Later {
                        segment_at,
                        position,
                        header,
                    });
                    let bad = match bad_group {
                        0 => lowest_before(found[0].header.group, self.out.next_group),
                        known => known,
                    };
                    is_decided |= header.durable_group >= bad
                        || header.group > bad.saturating_add(SURVIVORS_MAX as u64);
                    if found.len() > SURVIVORS_MAX && is_decided {
                        return Ok(found);
                    }
                }
            }
            if segment_at > at {
                segment.window.release();
            }
            from = SEGMENT_HEADER_BYTES;
        }
        Ok(found)
    }

    pub(super) fn rest_is_zero(&mut self, at: usize, position: u64) -> bool {
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
}
