//! Building one commit group in memory: extents and records, in the order they were appended.
//!
//! A group's segment ordinal and position are fixed when it is opened, so that the first extent of a log in
//! a segment can carry the log's name. Headers are filled in when the group is sealed, because only then are
//! the segment's sequence and the durable mark known.

use std::ops::Range;
use std::sync::Arc;

use super::control::{number_after, Change};
use super::logs::{prefetch, LogRef, LogTable};
use super::recent::PREFETCH_AHEAD;
use crate::error::CommitError;
use crate::format::body;
use crate::format::extent::{ExtentHeader, ExtentKind, EXTENT_HEADER_BYTES};
use crate::format::group::GROUP_HEADER_BYTES;
use crate::format::record;
use crate::format::{align_up, Place};
use crate::slab::{Draft, Region, SlabWriter};

/// Record bytes after which an extent is ended, so that a read never has to pass more than this to find an
/// offset inside an extent.
pub(crate) const EXTENT_SOFT_BYTES: u32 = 64 * 1024;

/// What the group remembers of one of its extents.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ExtentMeta {
    pub log: LogRef,
    pub kind: ExtentKind,
    /// Byte position of the header in the group.
    pub at: u32,
    pub first_offset: u64,
    pub record_count: u32,
    pub records_len: u32,
    pub name_len: u16,
    pub generation: u64,
    pub time_us: u64,
    /// Events of the log so far, this one included.
    pub changes: u32,
    /// The log's tail and generation before this extent, for undoing it.
    pub tail_before: u64,
    pub generation_before: u64,
    /// Filled in when sealed.
    pub place: Place,
    pub prev: Place,
}

impl ExtentMeta {
    /// Bytes of header, name and records or body.
    pub fn total_len(&self) -> usize {
        EXTENT_HEADER_BYTES + usize::from(self.name_len) + self.records_len as usize
    }
}

/// What a new extent is about.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ExtentStart {
    pub log: LogRef,
    pub kind: ExtentKind,
    pub first_offset: u64,
    pub generation: u64,
    pub time_us: u64,
}

/// An event on its way, and what undoing it needs.
#[derive(Debug)]
pub(crate) struct PendingChange {
    pub change: Change,
    pub accepted_before: u64,
    pub base_before: u64,
    pub changes_before: u32,
    /// What was wrong with the log that it makes begin anew.
    pub damage_before: Option<Arc<str>>,
}

/// Somebody waiting for an append to become durable.
#[derive(Debug, Clone)]
pub(crate) struct Waiter {
    pub token: u64,
    pub log: LogRef,
    pub range: Range<u64>,
    /// Ordinal and position of the group with its first record; none for what has no records.
    pub first_group: Option<(u64, u64)>,
    /// Set when it was undone while earlier appends are on their way: outcomes leave in order.
    pub refused: Option<CommitError>,
}

/// Lists of a group, reused from group to group.
#[derive(Debug, Default)]
pub(crate) struct GroupLists {
    pub extents: Vec<ExtentMeta>,
    /// Of the extents that are events, in their order.
    pub changes: Vec<PendingChange>,
    pub waiters: Vec<Waiter>,
}

/// The group appends go into.
pub(crate) struct OpenGroup {
    pub ordinal: u64,
    pub position: u64,
    /// Bytes that may be used; fixed by slab, segment and commit limits.
    pub capacity: usize,
    pub used: usize,
    pub records: u32,
    pub payload_bytes: u64,
    pub opened_us: u64,
    pub flags: u16,
    pub lists: GroupLists,
}

/// A group that takes no more appends and has no headers yet.
pub(crate) struct ClosedGroup {
    pub ordinal: u64,
    pub position: u64,
    pub used: usize,
    pub records: u32,
    pub payload_bytes: u64,
    pub flags: u16,
    pub draft: Draft,
    pub lists: GroupLists,
}

impl OpenGroup {
    pub fn new(
        ordinal: u64,
        position: u64,
        capacity: usize,
        opened_us: u64,
        lists: GroupLists,
    ) -> Self {
        Self {
            ordinal,
            position,
            capacity,
            used: GROUP_HEADER_BYTES,
            records: 0,
            payload_bytes: 0,
            opened_us,
            flags: 0,
            lists,
        }
    }

    /// Bytes a record of `record_len` (header included) of `log` would add.
    pub fn cost(&self, logs: &LogTable, log: LogRef, generation: u64, record_len: usize) -> usize {
        if self.continues(log, generation, record_len) {
            return record_len;
        }
        EXTENT_HEADER_BYTES + self.name_len(logs, log) + record_len
    }

    fn name_len(&self, logs: &LogTable, log: LogRef) -> usize {
        let state = logs.get(log);
        if state.named_in == self.ordinal {
            0
        } else {
            state.encoded_name.len()
        }
    }

    fn continues(&self, log: LogRef, generation: u64, record_len: usize) -> bool {
        self.lists.extents.last().is_some_and(|last| {
            last.log == log
                && last.kind == ExtentKind::Records
                && last.generation == generation
                && last.records_len as usize + record_len <= EXTENT_SOFT_BYTES as usize
        })
    }

    /// Starts an extent and copies the name if this segment does not have it yet.
    pub fn start_extent(&mut self, bytes: &mut [u8], logs: &mut LogTable, start: ExtentStart) {
        let ExtentStart {
            log,
            kind,
            first_offset,
            generation,
            time_us,
        } = start;
        let name_len = self.name_len(logs, log);
        let state = logs.get_mut(log);
        let at = self.used;
        let name_at = at + EXTENT_HEADER_BYTES;
        if name_len > 0 {
            bytes[name_at..name_at + name_len].copy_from_slice(&state.encoded_name);
            state.named_in = self.ordinal;
        }
        self.lists.extents.push(ExtentMeta {
            log,
            kind,
            at: at as u32,
            first_offset,
            record_count: 0,
            records_len: 0,
            name_len: name_len as u16,
            generation,
            time_us,
            changes: state.changes,
            tail_before: state.tail,
            generation_before: state.generation,
            place: Place::NONE,
            prev: Place::NONE,
        });
        state.generation = state.generation.max(generation);
        self.used = name_at + name_len;
    }

    /// Copies one event in. The caller made sure that it fits.
    pub fn push_change(
        &mut self,
        bytes: &mut [u8],
        logs: &mut LogTable,
        log: LogRef,
        time_us: u64,
        change: Change,
    ) {
        let state = logs.get_mut(log);
        let (accepted_before, base_before) = (state.accepted, state.queued_base);
        let changes_before = state.changes;
        state.accepted = change
            .accepts()
            .map_or(state.accepted, |g| g.max(state.accepted));
        state.queued_base = change.new_base().unwrap_or(state.queued_base);
        state.changes = number_after(state.changes);
        if let Some(offset) = change.cuts_from() {
            state.on_cut_queued(offset);
        }
        let start = ExtentStart {
            log,
            kind: change.kind(),
            first_offset: change.offset(state.tail),
            generation: change.accepts().unwrap_or(state.generation),
            time_us,
        };
        self.start_extent(bytes, logs, start);
        let state = logs.get_mut(log);
        state.tail = change.new_tail().unwrap_or(state.tail);
        let body_len = change.body_len();
        change.encode_body(&mut bytes[self.used..self.used + body_len], state.id);
        self.used += body_len;
        if let Some(extent) = self.lists.extents.last_mut() {
            extent.records_len = body_len as u32;
        }
        self.lists.changes.push(PendingChange {
            change,
            accepted_before,
            base_before,
            changes_before,
            damage_before: None,
        });
    }

    /// Restates a log's state. `content` is the body; the caller made sure that it fits.
    pub fn push_state(
        &mut self,
        bytes: &mut [u8],
        logs: &mut LogTable,
        log: LogRef,
        time_us: u64,
        content: &[u8],
    ) {
        let state = logs.get(log);
        let start = ExtentStart {
            log,
            kind: ExtentKind::State,
            first_offset: state.tail,
            generation: state.generation,
            time_us,
        };
        let (id, tail) = (state.id, state.tail);
        self.start_extent(bytes, logs, start);
        let body_len = content.len() + body::CRC_BYTES;
        let out = &mut bytes[self.used..self.used + body_len];
        out[..content.len()].copy_from_slice(content);
        body::seal(out, id, tail);
        self.used += body_len;
        if let Some(extent) = self.lists.extents.last_mut() {
            extent.records_len = body_len as u32;
        }
    }

    /// Copies one record in. The caller made sure that it fits.
    pub fn push_record(
        &mut self,
        bytes: &mut [u8],
        logs: &mut LogTable,
        log: LogRef,
        generation: u64,
        time_us: u64,
        payload: &[u8],
    ) {
        let record_len = record::RECORD_HEADER_BYTES + payload.len();
        let offset = logs.get(log).tail;
        if !self.continues(log, generation, record_len) {
            let kind = ExtentKind::Records;
            let start = ExtentStart {
                log,
                kind,
                first_offset: offset,
                generation,
                time_us,
            };
            self.start_extent(bytes, logs, start);
        }
        let state = logs.get_mut(log);
        let Some(extent) = self.lists.extents.last_mut() else {
            return;
        };
        let delta = u32::try_from(time_us.saturating_sub(extent.time_us)).unwrap_or(u32::MAX);
        self.used += record::encode(&mut bytes[self.used..], state.id, offset, delta, payload);
        extent.record_count += 1;
        extent.records_len += record_len as u32;
        self.records += 1;
        self.payload_bytes += payload.len() as u64;
        state.tail += 1;
    }

    /// Ends the group and splits its bytes off the slab.
    pub fn close(self, writer: &mut SlabWriter) -> ClosedGroup {
        let padded = align_up(self.used as u64) as usize;
        writer.tail()[self.used..padded].fill(0);
        ClosedGroup {
            ordinal: self.ordinal,
            position: self.position,
            used: self.used,
            records: self.records,
            payload_bytes: self.payload_bytes,
            flags: self.flags,
            draft: writer.split(padded),
            lists: self.lists,
        }
    }
}

impl ClosedGroup {
    /// Bytes the group takes on disk.
    pub fn total_len(&self) -> u64 {
        self.draft.len() as u64
    }

    /// Gives every extent its place and back pointer and writes the extent headers.
    pub fn place_extents(&mut self, logs: &mut LogTable, core: u16, segment: u64) {
        let position = self.position;
        let bytes = self.draft.bytes_mut();
        let extents = &mut self.lists.extents;
        for at in 0..extents.len() {
            if let Some(later) = extents.get(at + PREFETCH_AHEAD) {
                logs.prefetch_sealed(later.log);
                prefetch(&bytes[later.at as usize]);
                prefetch(&bytes[later.at as usize + EXTENT_HEADER_BYTES - 1]);
            }
            let extent = &mut extents[at];
            let state = logs.get_mut(extent.log);
            extent.prev = state.last_sealed;
            let place = Place {
                segment,
                position: (position + u64::from(extent.at)) as u32,
                core,
            };
            extent.place = place;
            match extent.kind {
                ExtentKind::Records => state.last_sealed = place,
                ExtentKind::Place => state.last_sealed = Place::NONE,
                ExtentKind::Truncate
                | ExtentKind::Base
                | ExtentKind::Accept
                | ExtentKind::Begin
                | ExtentKind::State => {}
            }
            let header = ExtentHeader {
                kind: extent.kind,
                log_kind: state.kind,
                log: state.id,
                first_offset: extent.first_offset,
                generation: extent.generation,
                time_us: extent.time_us,
                prev: extent.prev,
                record_count: extent.record_count,
                records_len: extent.records_len,
                changes: extent.changes,
                name_len: extent.name_len,
            };
            header.encode(&mut bytes[extent.at as usize..]);
        }
    }
}

/// A group handed to the device.
pub(crate) struct Flight {
    /// Unique in the life of the machine, unlike the group number.
    pub serial: u64,
    pub group: u64,
    pub segment: u64,
    /// Of the segment.
    pub ordinal: u64,
    pub position: u64,
    /// End of the log before this group.
    pub prev_end: (u64, u64),
    pub region: Region,
    pub records: u32,
    pub payload_bytes: u64,
    pub flags: u16,
    pub parts_left: u32,
    pub zero_writes: u32,
    pub started_us: u64,
    pub durable: bool,
    pub lists: GroupLists,
}
