//! Durable groups kept in memory for readers at the tail.

use std::collections::VecDeque;

use bytes::Bytes;

use super::group::ExtentMeta;
use super::logs::{prefetch, LogRef, LogState, LogTable};
use super::ReadBatch;
use crate::format::extent::EXTENT_HEADER_BYTES;
use crate::format::record;
use crate::slab::Region;

/// Idle lists kept for use again.
const SPARE_LISTS: usize = 64;
/// How many extents ahead the state of a log is fetched.
pub(super) const PREFETCH_AHEAD: usize = 12;

/// Extent of a group that is still in memory.
#[derive(Debug, Clone, Copy)]
struct RecentExtent {
    first_offset: u64,
    /// Number of the group in the ring.
    group: u32,
    record_count: u32,
    /// First record's position in the group.
    records_at: u32,
    records_len: u32,
}

/// The extents of one log that are in memory, ascending by offset.
///
/// One for each time the ring's groups list the log, so that letting go of a group takes the oldest ones off
/// without looking at them. Extents that were cut off stay, empty, at the offset where the log goes on.
#[derive(Debug, Default)]
pub(crate) struct RecentExtents(VecDeque<RecentExtent>);

impl RecentExtents {
    /// Cuts the log at `offset`.
    pub fn truncate(&mut self, offset: u64) {
        let kept = self.0.partition_point(|it| it.first_offset < offset);
        self.empty_from(kept, offset);
        if let Some(last) = kept.checked_sub(1).and_then(|at| self.0.get_mut(at)) {
            let count = u32::try_from(offset - last.first_offset).unwrap_or(u32::MAX);
            last.record_count = last.record_count.min(count);
        }
    }

    /// The log is empty and goes on at `offset`.
    pub fn restart(&mut self, offset: u64) {
        self.empty_from(0, offset);
    }

    /// The first offset held, if any. For who has a disk to read the rest from.
    #[cfg(any(test, feature = "runtime"))]
    pub fn oldest_offset(&self) -> Option<u64> {
        self.0.front().map(|oldest| oldest.first_offset)
    }

    fn empty_from(&mut self, from: usize, offset: u64) {
        for extent in self.0.range_mut(from..) {
            extent.first_offset = offset;
            extent.record_count = 0;
        }
    }

    fn forget_oldest(&mut self) {
        self.0.pop_front();
        if self.0.is_empty() && self.0.capacity() > 16 {
            self.0.shrink_to_fit();
        }
    }

    /// Asks the CPU for the place of the next extent.
    #[inline]
    pub fn prefetch_end(&self) {
        let (first, second) = self.0.as_slices();
        let end = if second.is_empty() { first } else { second }
            .as_ptr_range()
            .end;
        prefetch(end);
    }
}

struct RecentGroup {
    region: Region,
    /// Logs with records in it, as often as they have extents.
    logs: Vec<LogRef>,
}

/// The newest durable groups, bounded by bytes.
pub(crate) struct RecentRing {
    groups: VecDeque<RecentGroup>,
    /// Number of the oldest group; they are counted through, and round.
    first: u32,
    held_bytes: usize,
    limit_bytes: usize,
    /// Lists of groups that had to go, used again.
    spare: Vec<Vec<LogRef>>,
}

impl RecentRing {
    pub fn new(limit_bytes: usize) -> Self {
        Self {
            groups: VecDeque::new(),
            first: 0,
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
            self.first = self.first.wrapping_add(1);
            for (at, log) in oldest.logs.iter().enumerate() {
                if let Some(later) = oldest.logs.get(at + PREFETCH_AHEAD) {
                    logs.prefetch(*later);
                }
                logs.get_mut(*log).recent.forget_oldest();
            }
            oldest.logs.clear();
            if self.spare.len() < SPARE_LISTS {
                self.spare.push(oldest.logs);
            }
        }
    }

    /// Begins a group there is room for; `add` each of its record extents before the next one begins.
    pub fn begin(&mut self, region: Region) {
        self.held_bytes += region.len();
        self.groups.push_back(RecentGroup {
            region,
            logs: self.spare.pop().unwrap_or_default(),
        });
    }

    /// Adds an extent of the newest group.
    pub fn add(&mut self, extent: &ExtentMeta, state: &mut LogState) {
        let Some(newest) = self.groups.len().checked_sub(1) else {
            return;
        };
        self.groups[newest].logs.push(extent.log);
        state.recent.0.push_back(RecentExtent {
            first_offset: extent.first_offset,
            record_count: extent.record_count,
            group: self.first.wrapping_add(newest as u32),
            records_at: extent.at + EXTENT_HEADER_BYTES as u32 + u32::from(extent.name_len),
            records_len: extent.records_len,
        });
    }

    /// A handle on the bytes of a group; made here, so that groups nobody reads cost no allocation.
    fn group(&self, number: u32) -> Option<Bytes> {
        let at = number.wrapping_sub(self.first) as usize;
        let group = self.groups.get(at)?;
        Some(Bytes::from_owner(group.region.clone()))
    }

    /// Records `[from, tail)` as far as they are here and fit `max_bytes` (at least one record).
    pub fn read(
        &self,
        log: &LogState,
        from: u64,
        tail: u64,
        max_bytes: usize,
    ) -> Option<ReadBatch> {
        let extents = &log.recent.0;
        let first = extents
            .partition_point(|extent| extent.first_offset <= from)
            .checked_sub(1)?;
        let mut batch = ReadBatch {
            first_offset: from,
            records: Vec::new(),
            next_offset: from,
        };
        let mut taken_bytes = 0;
        let mut held: Option<(u32, Bytes)> = None;
        for extent in extents.range(first..) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::extent::ExtentKind;
    use crate::format::Place;
    use crate::machine::logs::LogSeed;
    use crate::name::{LogKind, LogName};
    use crate::slab::SlabWriter;

    const GROUP_BYTES: usize = 4096;

    struct Rig {
        ring: RecentRing,
        logs: LogTable,
        tails: Vec<u64>,
    }

    impl Rig {
        fn new(logs: u32, groups: usize) -> Self {
            let mut table = LogTable::default();
            for shard in 0..logs {
                let name = LogName {
                    kind: LogKind::Stream,
                    tenant: "t".into(),
                    namespace: "n".into(),
                    name: "s".into(),
                    shard,
                };
                table.add(&name, LogSeed::default()).expect("fits");
            }
            Self {
                ring: RecentRing::new(groups * GROUP_BYTES),
                logs: table,
                tails: vec![0; logs as usize],
            }
        }

        /// A durable group with one extent of `count` records for each of `logs`; a record holds its offset.
        fn group(&mut self, logs: &[u32], count: u32) {
            let mut writer = SlabWriter::new(GROUP_BYTES);
            let mut used = 0;
            let mut extents = Vec::new();
            for &log in logs {
                let (at, first_offset) = (used as u32, self.tails[log as usize]);
                used += EXTENT_HEADER_BYTES;
                let records_from = used;
                for offset in first_offset..first_offset + u64::from(count) {
                    let id = self.logs.get(LogRef(log)).id;
                    let payload = offset.to_le_bytes();
                    used += record::encode(&mut writer.tail()[used..], id, offset, 0, &payload);
                }
                self.tails[log as usize] += u64::from(count);
                extents.push(ExtentMeta {
                    log: LogRef(log),
                    kind: ExtentKind::Records,
                    at,
                    first_offset,
                    record_count: count,
                    records_len: (used - records_from) as u32,
                    name_len: 0,
                    generation: 1,
                    time_us: 0,
                    changes: 0,
                    tail_before: first_offset,
                    generation_before: 1,
                    place: Place::NONE,
                    prev: Place::NONE,
                });
            }
            let region = writer.split(GROUP_BYTES).freeze();
            self.ring.make_room(region.len(), &mut self.logs);
            self.ring.begin(region);
            for extent in &extents {
                self.ring.add(extent, self.logs.get_mut(extent.log));
            }
        }

        fn truncate(&mut self, log: u32, offset: u64) {
            self.tails[log as usize] = offset;
            self.logs.get_mut(LogRef(log)).recent.truncate(offset);
        }

        fn restart(&mut self, log: u32, offset: u64) {
            self.tails[log as usize] = offset;
            self.logs.get_mut(LogRef(log)).recent.restart(offset);
        }

        /// The offsets that reading from `from` to the tail gives.
        fn read(&self, log: u32, from: u64) -> Vec<u64> {
            let (mut at, mut offsets) = (from, Vec::new());
            let state = self.logs.get(LogRef(log));
            let tail = self.tails[log as usize];
            while let Some(batch) = self.ring.read(state, at, tail, 64) {
                assert_eq!(batch.first_offset, at);
                for (expected, record) in (at..).zip(&batch.records) {
                    assert_eq!(record[..], expected.to_le_bytes(), "log {log}");
                }
                offsets.extend(at..batch.next_offset);
                at = batch.next_offset;
            }
            offsets
        }

        fn assert_reads(&self, log: u32, range: std::ops::Range<u64>) {
            for from in range.clone() {
                let expected: Vec<u64> = (from..range.end).collect();
                assert_eq!(self.read(log, from), expected, "log {log} from {from}");
            }
            assert!(self.read(log, range.end).is_empty());
        }
    }

    #[test]
    fn what_was_cut_is_not_read_and_what_follows_is() {
        let mut rig = Rig::new(2, 4);
        rig.group(&[0, 1], 3);
        rig.group(&[0, 1], 3);
        rig.truncate(0, 2);
        rig.assert_reads(0, 0..2);
        rig.group(&[0], 4);
        rig.assert_reads(0, 0..6);
        rig.assert_reads(1, 0..6);
        rig.restart(0, 100);
        assert!(rig.read(0, 100).is_empty());
        rig.group(&[0, 1], 2);
        rig.assert_reads(0, 100..102);
        rig.assert_reads(1, 0..8);
    }

    #[test]
    fn letting_go_of_groups_takes_their_extents_and_no_others() {
        let mut rig = Rig::new(2, 3);
        rig.group(&[0, 1, 0], 2);
        rig.truncate(0, 1);
        rig.group(&[0], 2);
        rig.group(&[1, 0], 1);
        rig.assert_reads(0, 0..4);
        // Three groups fit: the first goes, and with it three extents, one of them cut and one empty.
        rig.group(&[1], 1);
        assert_eq!(rig.logs.get(LogRef(0)).recent.oldest_offset(), Some(1));
        rig.assert_reads(0, 1..4);
        rig.assert_reads(1, 2..4);
        for _ in 0..3 {
            rig.group(&[1], 1);
        }
        assert_eq!(rig.logs.get(LogRef(0)).recent.oldest_offset(), None);
        rig.assert_reads(1, 4..7);
    }

    #[test]
    fn the_number_of_a_group_goes_round() {
        let mut rig = Rig::new(1, 2);
        rig.ring.first = u32::MAX - 1;
        for _ in 0..5 {
            rig.group(&[0], 2);
        }
        rig.assert_reads(0, 6..10);
    }
}
