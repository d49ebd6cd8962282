//! Durable groups kept in memory for readers at the tail.

use std::collections::VecDeque;

use bytes::Bytes;

use super::group::GroupLists;
use super::logs::{LogState, LogTable, RecentExtent};
use super::ReadBatch;
use crate::format::extent::{ExtentKind, EXTENT_HEADER_BYTES};
use crate::format::record;
use crate::slab::Region;

struct RecentGroup {
    serial: u64,
    region: Region,
    lists: GroupLists,
}

/// The newest durable groups, bounded by bytes.
pub(crate) struct RecentRing {
    groups: VecDeque<RecentGroup>,
    held_bytes: usize,
    limit_bytes: usize,
}

impl RecentRing {
    pub fn new(limit_bytes: usize) -> Self {
        Self {
            groups: VecDeque::new(),
            held_bytes: 0,
            limit_bytes,
        }
    }

    /// Keeps a group; returns the lists of groups that had to go, for reuse.
    pub fn push(
        &mut self,
        serial: u64,
        region: Region,
        lists: GroupLists,
        logs: &mut LogTable,
        mut on_evicted: impl FnMut(GroupLists),
    ) {
        if region.len() > self.limit_bytes {
            on_evicted(lists);
            return;
        }
        while self.held_bytes + region.len() > self.limit_bytes {
            let Some(oldest) = self.groups.pop_front() else {
                break;
            };
            self.held_bytes -= oldest.region.len();
            for extent in &oldest.lists.extents {
                let recent = &mut logs.get_mut(extent.log).recent;
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
            on_evicted(oldest.lists);
        }
        for extent in &lists.extents {
            let state = logs.get_mut(extent.log);
            match extent.kind {
                ExtentKind::Records => state.recent.push_back(RecentExtent {
                    first_offset: extent.first_offset,
                    record_count: extent.record_count,
                    group: serial,
                    records_at: extent.at + EXTENT_HEADER_BYTES as u32 + u32::from(extent.name_len),
                    records_len: extent.records_len,
                }),
                // These undo what came before them in this very group, too.
                ExtentKind::Truncate => state.truncate_recent(extent.first_offset),
                ExtentKind::Place => state.recent.clear(),
                ExtentKind::Base | ExtentKind::Accept | ExtentKind::Begin => {}
            }
        }
        self.held_bytes += region.len();
        self.groups.push_back(RecentGroup {
            serial,
            region,
            lists,
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
        let mut bytes_left = max_bytes;
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
            if !take_records(group, extent, end, &mut bytes_left, &mut batch) {
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
    bytes_left: &mut usize,
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
            if len > *bytes_left && !batch.records.is_empty() {
                return false;
            }
            *bytes_left = bytes_left.saturating_sub(len);
            batch.records.push(group.slice(span.start..span.end));
            batch.next_offset = offset + 1;
        }
        at = span.end;
        offset += 1;
    }
    true
}
