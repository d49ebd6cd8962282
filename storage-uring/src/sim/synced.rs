//! What lies on the device at or below the synced mark, and that a recovery removes none of it.
//!
//! It reads the groups' headers where they lie and asks the machine only up to which number they are durable.
//! Of a group that was undone for want of space the number is used again, always further on: of two groups
//! with one number the later one counts.

use std::collections::{BTreeMap, BTreeSet};

use super::recovered::{Images, FREED};
use super::violation::holds;
use super::{SEGMENT_BYTES, UUID};
use crate::format::freed::FreedRuns;
use crate::format::group::GroupHeader;
use crate::format::segment::{SegmentHeader, SEGMENT_HEADER_BYTES};
use crate::recovery::SettleStep;

/// A group that is durable.
#[derive(Debug, Clone, Copy)]
pub(super) struct SyncedGroup {
    pub segment: u64,
    pub position: u64,
    pub header: GroupHeader,
}

/// What was synced of a core log.
#[derive(Debug, Default)]
pub(super) struct Synced {
    /// By number.
    pub groups: BTreeMap<u64, SyncedGroup>,
    /// Segments of which only what was needed and durable is left.
    rewritten: BTreeSet<u64>,
}

impl Synced {
    /// Looks at what the device holds, with groups up to this one durable.
    pub fn of(images: &Images, durable_group: u64) -> Self {
        let mut synced = Self::default();
        // First groups of segments that are not as they were written.
        let mut begun = Vec::new();
        let freed = freed_of(images);
        for segment in 1..=freed.newest() {
            if let Some(run) = freed.run_of(segment) {
                begun.push((run.first_seq, run.first_group));
            }
        }
        for (segment, image) in images.iter().filter(|(seq, _)| **seq != FREED) {
            let header = SegmentHeader::decode(image).ok();
            if let Some(whole) = header.and_then(|header| header.rewritten) {
                synced.rewritten.insert(*segment);
                begun.push((*segment, whole.first_group));
                continue;
            }
            let mut position = SEGMENT_HEADER_BYTES;
            while let Some(header) = group_at(image, position) {
                if header.segment != *segment {
                    break;
                }
                if header.group <= durable_group {
                    let group = SyncedGroup {
                        segment: *segment,
                        position,
                        header,
                    };
                    synced.groups.insert(header.group, group);
                }
                position += header.total_len;
            }
        }
        let is_used_again = |number: u64, segment: u64| {
            (begun.iter()).any(|(later, first)| *later > segment && *first <= number)
        };
        (synced.groups).retain(|number, group| !is_used_again(*number, group.segment));
        synced
    }

    /// I6: the steps of a recovery of these images remove nothing that was synced, and nothing before something
    /// that was; of a segment in which groups were `undone` a later group may have left out what was not.
    pub fn check_steps(&self, images: &Images, steps: &[SettleStep], undone: &BTreeSet<u64>) {
        let freed = freed_of(images);
        for step in steps {
            let (segment, from) = match *step {
                SettleStep::Shorten { segment, bytes } => (segment, bytes),
                SettleStep::Remove { segment } => (segment, 0),
                SettleStep::SetAside { segment } => {
                    holds!(6, false, "segment {segment} is taken for another log's");
                    continue;
                }
                SettleStep::SyncDirectory => continue,
            };
            if freed.run_of(segment).is_some() {
                continue;
            }
            self.check_removal(images, segment, from, undone);
        }
    }

    fn check_removal(&self, images: &Images, segment: u64, from: u64, undone: &BTreeSet<u64>) {
        let is_rewritten = self.rewritten.contains(&segment);
        holds!(6, !is_rewritten, "rewritten segment {segment} is cut");
        let is_hit = |group: &&SyncedGroup| {
            group.segment == segment && group.position + group.header.total_len > from
        };
        if let Some(hit) = self.groups.values().find(is_hit) {
            let number = hit.header.group;
            holds!(
                6,
                false,
                "group {number} was synced and segment {segment} is cut at {from}"
            );
        }
        let start = from.max(SEGMENT_HEADER_BYTES) as usize;
        let rest = images.get(&segment).and_then(|image| image.get(start..));
        let is_blank = rest.is_none_or(|rest| rest.iter().all(|byte| *byte == 0));
        let behind = self.groups.values().find(|group| group.segment > segment);
        if let Some(behind) = behind.filter(|_| !is_blank && !undone.contains(&segment)) {
            let number = behind.header.group;
            holds!(
                6,
                false,
                "segment {segment} is cut at {from}, before group {number} in a later one"
            );
        }
    }
}

fn freed_of(images: &Images) -> FreedRuns {
    let record = images.get(&FREED);
    let record = record.and_then(|bytes| FreedRuns::decode(&UUID, 0, bytes).ok());
    record.unwrap_or_default()
}

fn group_at(image: &[u8], position: u64) -> Option<GroupHeader> {
    let end = SEGMENT_BYTES.min(image.len() as u64);
    let bytes = image.get(position as usize..end as usize)?;
    let header = GroupHeader::decode(&UUID, bytes).ok()?;
    (header.total_len > 0).then_some(header)
}
