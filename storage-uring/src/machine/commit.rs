//! Sealing groups, tracking their writes, and what happens when a write does not work.

use super::control::Change;
use super::group::{ClosedGroup, ExtentMeta, Flight, GroupLists, PendingChange, Waiter};
use super::recent::PREFETCH_AHEAD;
use super::{Action, CommitMachine, Completion, CurrentSegment, Health, IoId, ReadySegment};
use crate::error::CommitError;
use crate::format::extent::ExtentKind;
use crate::format::group::GroupHeader;
use crate::format::segment::SEGMENT_HEADER_BYTES;
use crate::format::ALIGN;
use crate::usage::GroupUse;

/// Part number of a flush.
const FLUSH_PART: u32 = u32::MAX;
/// Idle lists of groups kept for use again; a few are in use at once.
const SPARE_LISTS: usize = 8;
/// Writes of nothing at all before a group counts as out of space.
const ZERO_WRITES_MAX: u32 = 3;

impl CommitMachine {
    // -- inputs --

    /// A segment is ready.
    pub fn on_segment_ready(&mut self, segment: ReadySegment) {
        self.ready.push_back(segment);
        self.space_exhausted = false;
        self.only_events = false;
        self.gave_up_waiting = false;
        self.waiting_for_segment_since_us = None;
    }

    /// A segment is ready that took the place kept for giving space back: only events may use it.
    pub fn on_reserve_segment(&mut self, segment: ReadySegment) {
        self.ready.push_back(segment);
        self.space_exhausted = true;
        self.only_events = true;
        self.waiting_for_segment_since_us = None;
    }

    /// No further segment can be had now.
    pub fn on_no_space(&mut self) {
        self.space_exhausted = true;
    }

    /// A write finished.
    pub fn on_write_done(
        &mut self,
        id: IoId,
        asked: &Action,
        result: Result<usize, i32>,
        now_us: u64,
    ) {
        self.writes_out.end(asked);
        let Some(at) = self.flight_index(id) else {
            return;
        };
        let Action::Write {
            segment,
            position,
            data,
            ..
        } = asked
        else {
            return;
        };
        match result {
            Ok(stored) if stored >= data.len() => {
                self.flights[at].parts_left -= 1;
                if self.flights[at].parts_left == 0 {
                    self.on_parts_written(at, now_us);
                }
            }
            Ok(stored) => {
                self.stats.short_writes += 1;
                let flight = &mut self.flights[at];
                flight.zero_writes = if stored == 0 {
                    flight.zero_writes + 1
                } else {
                    0
                };
                if flight.zero_writes > ZERO_WRITES_MAX {
                    self.undo_from(at);
                    return;
                }
                // The remainder starts on a block; writing a part of a block again does no harm.
                let done = stored - stored % ALIGN;
                let rest = data.part(done, data.len() - done);
                let (segment, position) = (*segment, position + done as u64);
                self.outbox.push_back(Action::Write {
                    id,
                    segment,
                    position,
                    data: rest,
                });
            }
            Err(libc::EINTR | libc::EAGAIN) => {
                let (segment, position, data) = (*segment, *position, data.clone());
                self.outbox.push_back(Action::Write {
                    id,
                    segment,
                    position,
                    data,
                });
            }
            Err(libc::ENOSPC | libc::EDQUOT) => self.undo_from(at),
            Err(errno) => self.fail_sync("write", errno),
        }
    }

    /// A flush finished.
    pub fn on_flush_done(&mut self, id: IoId, result: Result<(), i32>, now_us: u64) {
        let Some(at) = self.flight_index(id) else {
            return;
        };
        match result {
            Ok(()) => self.on_flight_durable(at, now_us),
            Err(errno) => self.fail_sync("flush", errno),
        }
    }

    /// The next thing to do, if any.
    pub fn poll_action(&mut self, now_us: u64) -> Option<Action> {
        let action = self.next_action(now_us)?;
        self.writes_out.begin(&action);
        Some(action)
    }

    fn next_action(&mut self, now_us: u64) -> Option<Action> {
        if let Some(action) = self.outbox.pop_front() {
            return Some(action);
        }
        if matches!(self.health, Health::Failed(_))
            || self.flights.len() >= self.config.commits_in_flight
        {
            return None;
        }
        if self.close_requested && self.is_idle() && !self.closed {
            self.open_close_group(now_us);
        }
        if self.queue.is_empty() && self.open_is_due(now_us) {
            self.close_open();
        }
        let wanted = self.queue.front()?.ordinal;
        if !self.enter_segment(wanted, now_us) {
            return None;
        }
        let closed = self.queue.pop_front()?;
        self.seal(closed, now_us);
        self.outbox.pop_front()
    }

    /// Gives up what waits for a segment: there is no space, and none came in time. Nothing waits again until
    /// one comes: what gives space back would have to wait behind it.
    pub fn give_up_waiting_for_space(&mut self) {
        if self.waiting_for_segment_since_us.take().is_some() {
            self.gave_up_waiting = true;
            self.undo_from(self.flights.len());
        }
    }

    /// Since when a group has been waiting for a segment.
    pub fn waiting_for_segment_since_us(&self) -> Option<u64> {
        self.waiting_for_segment_since_us
    }

    /// Ends the core log: nothing queued is acknowledged, nothing more is taken.
    pub fn fail(&mut self, reason: String) {
        if matches!(self.health, Health::Failed(_)) {
            return;
        }
        tracing::error!(
            core = self.config.core,
            reason,
            "core log failed; writes are refused until a restart"
        );
        self.health = Health::Failed(reason);
        self.outbox.clear();
        let undone = self.take_groups_from(0);
        self.answer_all(undone, CommitError::StorageFailed);
        self.queued_bytes = 0;
        self.closed = self.close_requested;
    }

    // -- transitions --

    fn open_is_due(&self, now_us: u64) -> bool {
        let Some(open) = &self.open else { return false };
        self.config.commit_max_delay_us == 0
            || self.close_requested
            || open.used >= self.config.commit_max_bytes
            || now_us >= open.opened_us + u64::from(self.config.commit_max_delay_us)
    }

    /// Moves on to the segment with this ordinal; false when it is not there yet.
    fn enter_segment(&mut self, ordinal: u64, now_us: u64) -> bool {
        while self
            .current
            .as_ref()
            .is_none_or(|current| current.ordinal < ordinal)
        {
            let Some(next) = self.ready.pop_front() else {
                if self.waiting_for_segment_since_us.is_none() {
                    self.waiting_for_segment_since_us = Some(now_us);
                    self.stats.segment_waits += 1;
                }
                return false;
            };
            let next_ordinal = self
                .current
                .as_ref()
                .map_or(1, |current| current.ordinal + 1);
            if let Some(done) = self.current.replace(CurrentSegment {
                seq: next.seq,
                ordinal: next_ordinal,
            }) {
                self.outbox
                    .push_back(Action::SegmentDone { segment: done.seq });
            }
        }
        true
    }

    fn seal(&mut self, mut closed: ClosedGroup, now_us: u64) {
        let Some(CurrentSegment {
            seq: segment,
            ordinal,
        }) = self.current
        else {
            return;
        };
        assert_eq!(
            ordinal, closed.ordinal,
            "INV-S3: a group goes where it was planned"
        );
        closed.place_extents(&mut self.logs, self.config.core, segment);
        let total_len = closed.total_len();
        let header = GroupHeader {
            total_len,
            used_len: closed.used as u64,
            segment,
            boot_epoch: self.config.boot_epoch,
            group: self.next_group,
            durable_group: self.durable_group,
            prev_segment: self.sealed_end.0,
            prev_end: self.sealed_end.1,
            extents: closed.lists.extents.len() as u32,
            records: closed.records,
            time_us: closed
                .lists
                .extents
                .first()
                .map_or(0, |extent| extent.time_us),
            core: self.config.core,
            flags: closed.flags,
            ..GroupHeader::default()
        };
        header.seal(&self.config.uuid, closed.draft.bytes_mut());
        let flight = Flight {
            serial: self.next_serial,
            group: self.next_group,
            segment,
            ordinal,
            position: closed.position,
            prev_end: self.sealed_end,
            region: closed.draft.freeze(),
            records: closed.records,
            payload_bytes: closed.payload_bytes,
            flags: closed.flags,
            parts_left: 0,
            zero_writes: 0,
            started_us: now_us,
            durable: false,
            lists: closed.lists,
        };
        self.sealed_end = (segment, flight.position + total_len);
        self.sealed_plan = (ordinal, flight.position + total_len);
        self.next_group += 1;
        self.next_serial += 1;
        self.start_writes(flight);
    }

    fn start_writes(&mut self, mut flight: Flight) {
        let len = flight.region.len();
        let step = self.config.max_transfer_bytes;
        let mut at = 0;
        while at < len {
            let part = flight.region.part(at, step.min(len - at));
            self.outbox.push_back(Action::Write {
                id: IoId {
                    serial: flight.serial,
                    part: flight.parts_left,
                },
                segment: flight.segment,
                position: flight.position + at as u64,
                data: part,
            });
            flight.parts_left += 1;
            at += step;
        }
        self.flights.push_back(flight);
    }

    fn flight_index(&self, id: IoId) -> Option<usize> {
        self.flights
            .iter()
            .position(|flight| flight.serial == id.serial)
    }

    fn on_parts_written(&mut self, at: usize, now_us: u64) {
        if self.config.flush_after_write {
            let flight = &self.flights[at];
            let id = IoId {
                serial: flight.serial,
                part: FLUSH_PART,
            };
            self.outbox.push_back(Action::Flush {
                id,
                segment: flight.segment,
            });
        } else {
            self.on_flight_durable(at, now_us);
        }
    }

    fn on_flight_durable(&mut self, at: usize, now_us: u64) {
        self.flights[at].durable = true;
        while self.flights.front().is_some_and(|flight| flight.durable) {
            if let Some(flight) = self.flights.pop_front() {
                self.acknowledge(flight, now_us);
            }
        }
    }

    fn acknowledge(&mut self, flight: Flight, now_us: u64) {
        assert_eq!(
            flight.group,
            self.durable_group + 1,
            "INV-S1: groups become durable in order"
        );
        self.durable_group = flight.group;
        if self.durable_segment != flight.segment {
            self.durable_segment = flight.segment;
            // One more segment is finished.
            self.reclaim.note_news();
        }
        self.queued_bytes = self.queued_bytes.saturating_sub(flight.region.len());
        self.closed |= flight.flags & crate::format::group::GROUP_FLAG_CLOSE != 0;
        self.count(&flight, now_us);
        let time_us = flight.lists.extents.last().map_or(0, |last| last.time_us);
        let group = GroupUse {
            group: flight.group,
            link: flight.prev_end,
            end: flight.position + flight.region.len() as u64,
            time_us,
            file_bytes: self.config.segment_bytes,
        };
        self.segments.on_group(flight.segment, &group);
        let GroupLists {
            mut extents,
            mut waiters,
            mut changes,
        } = flight.lists;
        let keeps = self.recent.keeps(flight.region.len());
        if keeps {
            self.recent.make_room(flight.region.len(), &mut self.logs);
            self.recent.begin(flight.region);
        }
        let mut pending = changes.drain(..);
        for (at, extent) in extents.iter().enumerate() {
            if let Some(later) = extents.get(at + 2 * PREFETCH_AHEAD) {
                self.logs.prefetch(later.log);
            }
            if let Some(later) = extents.get(at + PREFETCH_AHEAD).filter(|_| keeps) {
                self.logs.prefetch_recent(later.log);
            }
            if extent.kind == ExtentKind::Records {
                let state = self.logs.get_mut(extent.log);
                state.on_records(extent);
                let (tail, bytes) = (state.durable_tail, u64::from(extent.records_len));
                self.segments
                    .on_records(state.id, &mut state.use_slot, tail, bytes);
                if keeps {
                    self.recent.add(extent, state);
                }
            } else if extent.kind == ExtentKind::State {
                self.apply_restated(extent);
            } else if let Some(pending) = pending.next() {
                self.apply_change(extent, &pending.change);
            }
        }
        drop(pending);
        extents.clear();
        for waiter in waiters.drain(..) {
            self.completions.push_back(Completion {
                token: waiter.token,
                log: waiter.log,
                range: waiter.range,
                result: waiter.refused.map_or(Ok(()), Err),
            });
        }
        // At once, so that the next group finds them in the cache of the CPU.
        if self.spare_lists.len() < SPARE_LISTS {
            self.spare_lists.push(GroupLists {
                extents,
                waiters,
                changes,
            });
        }
    }

    fn count(&mut self, flight: &Flight, now_us: u64) {
        let spent_us = now_us.saturating_sub(flight.started_us);
        self.stats.commits += 1;
        self.stats.committed_bytes += flight.region.len() as u64;
        self.stats.records += u64::from(flight.records);
        self.stats.payload_bytes += flight.payload_bytes;
        self.stats.commit_us_sum += spent_us;
        self.stats.commit_us_max = self.stats.commit_us_max.max(spent_us);
    }

    fn apply_restated(&mut self, extent: &ExtentMeta) {
        let state = self.logs.get_mut(extent.log);
        state.restated_in = extent.place.segment;
        state.restating = false;
        self.segments
            .on_event(state.id, &mut state.use_slot, extent.total_len());
        self.stats.restatements += 1;
        self.reclaim.note_news();
    }

    fn apply_change(&mut self, extent: &ExtentMeta, change: &Change) {
        let log = extent.log;
        let state = self.logs.get_mut(log);
        state.control.changes = extent.changes;
        state.control.apply(change);
        if change.cuts_from().is_some() {
            state.on_cut_over();
        }
        self.segments
            .on_event(state.id, &mut state.use_slot, extent.total_len());
        if matches!(
            change,
            Change::Truncate(_) | Change::Place(_) | Change::Base(_)
        ) {
            self.reclaim.note_news();
        }
        match change {
            Change::Truncate(offset) => {
                let cut = self.segments.on_truncate(state.id, *offset);
                state.held_bytes = state.held_bytes.saturating_sub(cut);
                state.durable_tail = *offset;
                state.index.on_truncate(*offset);
                state.recent.truncate(*offset);
            }
            Change::Place(offset) => {
                state.base = *offset;
                state.durable_tail = *offset;
                state.index.clear();
                state.recent.restart(*offset);
                state.held_bytes = 0;
                self.segments.on_place(state.id);
            }
            Change::Base(offset) => {
                state.base = state.base.max(*offset);
                state.index.on_base(state.base);
                if !std::mem::replace(&mut state.base_is_news, true) {
                    self.raised.push_back(log);
                }
            }
            Change::Accept(_) | Change::Begin(_) => {}
        }
    }

    // -- failures --

    fn fail_sync(&mut self, what: &str, errno: i32) {
        self.stats.flush_failures += 1;
        let error = std::io::Error::from_raw_os_error(errno);
        self.fail(format!("{what} of the core log failed: {error}"));
    }

    /// Undoes flight `at` and everything after it: the space ran out before it was whole on disk.
    ///
    /// The positions of undone flights are given up (INV-S3): the next group goes to the next segment, and
    /// its header says where the log really ended.
    fn undo_from(&mut self, at: usize) {
        let current_ordinal = self.current.as_ref().map_or(0, |current| current.ordinal);
        if let Some(flight) = self.flights.get(at) {
            self.sealed_end = flight.prev_end;
            self.next_group = flight.group;
            self.sealed_plan = (current_ordinal + 1, SEGMENT_HEADER_BYTES);
            // Writes that were never started would only fail again.
            let first_undone = flight.serial;
            self.outbox.retain(|action| match action {
                Action::Write { id, .. } | Action::Flush { id, .. } => id.serial < first_undone,
                Action::SegmentDone { .. } | Action::Free { .. } | Action::Rewrite { .. } => true,
            });
        }
        self.plan = self
            .sealed_plan
            .max((current_ordinal, SEGMENT_HEADER_BYTES));
        let first_undone = self.place_of_group(at);
        let undone = self.take_groups_from(at);
        self.stats.refused_disk_full += undone
            .iter()
            .map(|lists| lists.waiters.len() as u64)
            .sum::<u64>();
        self.refuse_all(undone, first_undone);
        self.queued_bytes = self.flights.iter().map(|flight| flight.region.len()).sum();
        self.waiting_for_segment_since_us = None;
    }

    /// Ordinal and position of flight `at`; behind the flights, of the oldest group that is not sealed.
    fn place_of_group(&self, at: usize) -> Option<(u64, u64)> {
        let flight = self.flights.get(at);
        let closed = || self.queue.front().map(|it| (it.ordinal, it.position));
        let open = || self.open.as_ref().map(|it| (it.ordinal, it.position));
        let flight = flight.map(|it| (it.ordinal, it.position));
        flight.or_else(closed).or_else(open)
    }

    /// Removes flights from `at` on, the queue and the open group, and puts tails back, newest first.
    fn take_groups_from(&mut self, at: usize) -> Vec<GroupLists> {
        let mut undone: Vec<GroupLists> = self
            .flights
            .drain(at..)
            .map(|flight| flight.lists)
            .collect();
        undone.extend(self.queue.drain(..).map(|closed| closed.lists));
        undone.extend(self.open.take().map(|open| open.lists));
        self.open_counted = 0;
        let mut changes: Vec<PendingChange> = undone
            .iter_mut()
            .flat_map(|lists| lists.changes.drain(..))
            .collect();
        for extent in undone
            .iter()
            .rev()
            .flat_map(|lists| lists.extents.iter().rev())
        {
            let state = self.logs.get_mut(extent.log);
            if extent.kind == ExtentKind::State {
                state.restating = false;
            }
            if extent.kind.is_change() {
                if let Some(pending) = changes.pop() {
                    state.accepted = pending.accepted_before;
                    state.queued_base = pending.base_before;
                    state.changes = pending.changes_before;
                    if pending.change.cuts_from().is_some() {
                        state.on_cut_over();
                    }
                    state.damage = pending.damage_before.or(state.damage.take());
                }
            }
            state.tail = extent.tail_before;
            state.generation = extent.generation_before;
            state.named_in = 0;
            if extent.place.is_some() {
                state.last_sealed = extent.prev;
            }
        }
        undone
    }

    /// Answers what was undone for want of space, behind what is still on its way.
    fn refuse_all(&mut self, undone: Vec<GroupLists>, first_undone: Option<(u64, u64)>) {
        for mut waiter in undone.into_iter().flat_map(|lists| lists.waiters) {
            // The first part of a batch may lie in an earlier group, which stays: then it is not true that
            // nothing of it is stored.
            let is_partial = waiter.first_group.is_some() && waiter.first_group < first_undone;
            let error = match is_partial {
                true => CommitError::StorageFailed,
                false => CommitError::DiskFull,
            };
            waiter.refused = waiter.refused.or(Some(error));
            if let Some(flight) = self.flights.back_mut() {
                flight.lists.waiters.push(waiter);
            } else {
                self.answer(waiter, error);
            }
        }
    }

    fn answer_all(&mut self, undone: Vec<GroupLists>, error: CommitError) {
        for waiter in undone.into_iter().flat_map(|lists| lists.waiters) {
            self.answer(waiter, error);
        }
    }

    fn answer(&mut self, waiter: Waiter, error: CommitError) {
        self.completions.push_back(Completion {
            token: waiter.token,
            log: waiter.log,
            range: waiter.range,
            result: Err(waiter.refused.unwrap_or(error)),
        });
    }
}
