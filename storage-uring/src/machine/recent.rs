//! Durable groups kept in memory for readers at the tail.

use std::collections::VecDeque;

use bytes::Bytes;

use super::group::ExtentMeta;
use super::logs::{LogRef, LogState, LogTable, RecentExtent};
use super::ReadBatch;
use crate::format::extent::EXTENT_HEADER_BYTES;
use crate::format::record;
use crate::slab::Region;

/// Idle lists kept for use again.
const SPARE_LISTS: usize = 64;

struct RecentGroup {
    serial: u64,
    region: Region,
    /// Logs with records in it, as often as they have extents.
    logs: Vec<LogRef>,
}

/// The newest durable groups, bounded by bytes.
pub(crate) struct RecentRing {
    groups: VecDeque<RecentGroup>,
    held_bytes: usize,
    limit_bytes: usize,
    /// Lists of groups that had to go, used again.
    spare: Vec<Vec<LogRef>>,
}

impl RecentRing {
    pub fn new(limit_bytes: usize) -> Self {
        Self {
            groups: VecDeque::new(),
            held_bytes: 0,
            limit_bytes,
            spare: Vec::new(),
        }
    }

    /// Whether a group of `len` bytes is kept at all.
    pub fn keeps(&self, len: usize) -> bool {
        len <= self.limit_bytes
    }

    /// Lets go of as many groups as have to make room for `len` bytes.
    pub fn make_room(&mut self, len: usize, logs: &mut LogTable) {
        while self.held_bytes + len > self.limit_bytes {
            let Some(mut oldest) = self.groups.pop_front() else {
                break;
            };
            self.held_bytes -= oldest.region.len();
            for log in oldest.logs.drain(..) {
                let recent = &mut logs.get_mut(log).recent;
                while recent
                    .front()
                    .is_some_and(|front| front.group <= oldest.serial)
                {
                    recent.pop_front();
                }
                if recent.is_empty() && recent.capacity() > 16 {
                    recent.shrink_to_fit();
                }
            }
            if self.spare.len() < SPARE_LISTS {
                self.spare.push(oldest.logs);
            }
        }
    }

    /// Begins a group there is room for; `add` each of its record extents before the next one begins.
    pub fn begin(&mut self, serial: u64, region: Region) {
        self.held_bytes += region.len();
        self.groups.push_back(RecentGroup {
            serial,
            region,
            logs: self.spare.pop().unwrap_or_default(),
        });
    }

    /// Adds an extent of the newest group.
    pub fn add(&mut self, extent: &ExtentMeta, state: &mut LogState) {
        let Some(group) = self.groups.back_mut() else {
            return;
        };
        group.logs.push(extent.log);
        state.recent.push_back(RecentExtent {
            first_offset: extent.first_offset,
            record_count: extent.record_count,
            group: group.serial,
            records_at: extent.at + EXTENT_HEADER_BYTES as u32 + u32::from(extent.name_len),
            records_len: extent.records_len,
        });
    }

    /// A handle on the bytes of a group; made here, so that groups nobody reads cost no allocation.
    fn group(&self, serial: u64) -> Option<Bytes> {
        let at = self.groups.partition_point(|group| group.serial < serial);
        self.groups
            .get(at)
            .filter(|group| group.serial == serial)
            .map(|group| Bytes::from_owner(group.region.clone()))
    }

    /// Records `[from, tail)` as far as they are here and fit `max_bytes` (at least one record).
    pub fn read(
        &self,
        log: &LogState,
        from: u64,
        tail: u64,
        max_bytes: usize,
    ) -> Option<ReadBatch> {
        let first = log
            .recent
            .partition_point(|extent| extent.first_offset <= from)
            .checked_sub(1)?;
        let mut batch = ReadBatch {
            first_offset: from,
            records: Vec::new(),
            next_offset: from,
        };
        let mut taken_bytes = 0;
        let mut held: Option<(u64, Bytes)> = None;
        for extent in log.recent.range(first..) {
            let end = (extent.first_offset + u64::from(extent.record_count)).min(tail);
            if extent.first_offset > batch.next_offset || end <= batch.next_offset {
                break;
            }
            if held
                .as_ref()
                .is_none_or(|(group, _)| *group != extent.group)
            {
                held = self.group(extent.group).map(|bytes| (extent.group, bytes));
            }
            let Some((_, group)) = &held else { break };
            if !take_records(
                group,
                extent,
                end,
                (max_bytes, &mut taken_bytes),
                &mut batch,
            ) {
                break;
            }
        }
        (!batch.records.is_empty()).then_some(batch)
    }
}

/// Copies out handles to the records of one extent; false when the byte limit was reached.
fn take_records(
    group: &Bytes,
    extent: &RecentExtent,
    end: u64,
    (max_bytes, taken_bytes): (usize, &mut usize),
    batch: &mut ReadBatch,
) -> bool {
    let records_end = (extent.records_at + extent.records_len) as usize;
    let mut at = extent.records_at as usize;
    let mut offset = extent.first_offset;
    while offset < end {
        let Ok(span) = record::skip(&group[..records_end], at) else {
            return false;
        };
        if offset >= batch.next_offset {
            let len = span.end - span.start;
            if *taken_bytes + len > max_bytes && !batch.records.is_empty() {
                return false;
            }
            *taken_bytes += len;
            batch.records.push(group.slice(span.start..span.end));
            batch.next_offset = offset + 1;
        }
        at = span.end;
        offset += 1;
    }
    true
}
