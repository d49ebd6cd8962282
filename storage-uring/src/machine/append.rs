//! Taking appends: bounds first, then one copy of each payload into the open group.

use std::ops::Range;

use super::control::{Change, ControlEvent};
use super::group::{GroupLists, OpenGroup, Waiter};
use super::logs::LogRef;
use super::{CommitMachine, Completion, Health};
use crate::error::AppendError;
use crate::format::body::MAX_LEADER_BYTES;
use crate::format::extent::EXTENT_HEADER_BYTES;
use crate::format::group::{GROUP_FLAG_CLOSE, GROUP_HEADER_BYTES};
use crate::format::record::RECORD_HEADER_BYTES;
use crate::format::segment::SEGMENT_HEADER_BYTES;
use crate::format::{align_up, ALIGN};
use crate::slab::SlabWriter;

impl CommitMachine {
    /// Queues records for `log` and says which offsets they got. `time_us` is stored; `now_us` is the
    /// monotonic clock of the commit delay. The outcome comes as a completion with `token`.
    pub fn append<'a, I>(
        &mut self,
        log: LogRef,
        generation: u64,
        time_us: u64,
        now_us: u64,
        payloads: I,
        token: u64,
    ) -> Result<Range<u64>, AppendError>
    where
        I: ExactSizeIterator<Item = &'a [u8]> + Clone,
    {
        self.check_usable(log)?;
        self.check_fits(log, payloads.clone())?;
        let first = self.logs.get(log).tail;
        let mut first_group = None;
        for payload in payloads {
            self.ensure_room(log, generation, now_us, RECORD_HEADER_BYTES + payload.len());
            if let Some(open) = self.open.as_mut() {
                first_group = first_group.or(Some((open.ordinal, open.position)));
                let bytes = self.writer.tail();
                open.push_record(bytes, &mut self.logs, log, generation, time_us, payload);
            }
        }
        let range = first..self.logs.get(log).tail;
        self.wait_for_newest(Waiter {
            token,
            log,
            range: range.clone(),
            first_group,
            refused: None,
        });
        Ok(range)
    }

    /// Queues a control event; its outcome comes as a completion with `token` and an empty range.
    pub fn push_control(
        &mut self,
        log: LogRef,
        event: ControlEvent<'_>,
        time_us: u64,
        now_us: u64,
        token: u64,
    ) -> Result<(), AppendError> {
        self.queue_control(log, event, time_us, now_us)?;
        let tail = self.logs.get(log).tail;
        self.wait_for_newest(Waiter {
            token,
            log,
            range: tail..tail,
            first_group: None,
            refused: None,
        });
        Ok(())
    }

    /// Queues a control event nobody waits for.
    pub(super) fn queue_control(
        &mut self,
        log: LogRef,
        event: ControlEvent<'_>,
        time_us: u64,
        now_us: u64,
    ) -> Result<(), AppendError> {
        self.check_working()?;
        if let (ControlEvent::Place(base), true) = (event, self.damage(log).is_some()) {
            return self.begin_anew(log, base, time_us, now_us);
        }
        self.check_usable(log)?;
        self.check_event(log, event)?;
        self.check_queue(RECORD_HEADER_BYTES)?;
        self.check_space_for_event(RECORD_HEADER_BYTES)?;
        let state = self.logs.get(log);
        let tail = state.tail;
        let is_known =
            matches!(event, ControlEvent::Accept(generation) if generation == state.accepted);
        if !is_known {
            let change = Change::of(event, tail);
            let len = EXTENT_HEADER_BYTES + state_name_bytes(self, log) + change.body_len();
            self.ensure_room_for_event(now_us, len);
            if let Some(open) = self.open.as_mut() {
                open.push_change(self.writer.tail(), &mut self.logs, log, time_us, change);
            }
        }
        self.count_open();
        Ok(())
    }

    fn check_event(&self, log: LogRef, event: ControlEvent<'_>) -> Result<(), AppendError> {
        let state = self.logs.get(log);
        let accepts = |generation| {
            if generation < state.accepted {
                Err(AppendError::StaleGeneration {
                    accepted: state.accepted,
                })
            } else {
                Ok(())
            }
        };
        match event {
            ControlEvent::Truncate(offset) if offset < state.control.commit => {
                Err(AppendError::OutOfRange)
            }
            ControlEvent::Truncate(offset) | ControlEvent::Base(offset) => {
                if (state.queued_base..=state.tail).contains(&offset) {
                    Ok(())
                } else {
                    Err(AppendError::OutOfRange)
                }
            }
            ControlEvent::Place(_) => Ok(()),
            ControlEvent::Accept(generation) => accepts(generation),
            ControlEvent::Begin { leader, .. } if leader.len() > MAX_LEADER_BYTES => {
                Err(AppendError::OutOfRange)
            }
            ControlEvent::Begin { generation, .. } => accepts(generation),
        }
    }

    /// Asks for the closing mark: written once everything before it is durable.
    pub fn request_close(&mut self) {
        self.close_requested = true;
        let nothing_written = self.stats.commits == 0 && self.is_idle();
        if nothing_written || matches!(self.health, Health::Failed(_)) {
            // Nothing to vouch for, or nobody to vouch.
            self.closed = true;
        }
    }

    pub(super) fn open_close_group(&mut self, now_us: u64) {
        self.open_group(now_us, GROUP_HEADER_BYTES, self.config.segment_bytes);
        if let Some(open) = self.open.as_mut() {
            open.flags = GROUP_FLAG_CLOSE;
        }
    }

    fn check_working(&self) -> Result<(), AppendError> {
        match matches!(self.health, Health::Failed(_)) || self.close_requested {
            true => Err(AppendError::Failed),
            false => Ok(()),
        }
    }

    fn check_usable(&self, log: LogRef) -> Result<(), AppendError> {
        self.check_working()?;
        if self.logs.get(log).damage.is_some() {
            return Err(AppendError::Damaged);
        }
        Ok(())
    }

    fn check_fits<'a, I>(&mut self, log: LogRef, payloads: I) -> Result<(), AppendError>
    where
        I: ExactSizeIterator<Item = &'a [u8]>,
    {
        let limit = self.largest_payload(log);
        let mut total = 0usize;
        for payload in payloads {
            if payload.len() > limit {
                return Err(AppendError::TooLarge {
                    bytes: payload.len() as u64,
                    limit: limit as u64,
                });
            }
            total += payload.len() + RECORD_HEADER_BYTES;
        }
        self.check_queue(total)?;
        // While space may come back appends wait for it, but not again and again.
        let may_wait = self.may_give_back() && !self.gave_up_waiting;
        // The last of the room is for events: they are what makes room.
        match self.check_space(total, self.room_for_events()) {
            Err(AppendError::DiskFull) if may_wait => Ok(()),
            checked => {
                self.stats.refused_disk_full += u64::from(checked.is_err());
                checked
            }
        }
    }

    pub(super) fn check_queue(&mut self, total: usize) -> Result<(), AppendError> {
        if self.queued_bytes > 0 && self.queued_bytes + total > self.config.max_queued_bytes {
            self.stats.refused_overloaded += 1;
            return Err(AppendError::Overloaded);
        }
        Ok(())
    }

    /// Whether `total` bytes fit the segments at hand when no more can be had, `kept` bytes left free.
    fn check_space(&self, total: usize, kept: u64) -> Result<(), AppendError> {
        if !self.space_exhausted {
            return Ok(());
        }
        let groups = total / self.config.commit_max_bytes + 2;
        let needed = total as u64 + (groups * 2 * ALIGN) as u64;
        if needed.saturating_add(kept) > self.room_in_segments() {
            return Err(AppendError::DiskFull);
        }
        Ok(())
    }

    /// Whether the segments at hand have room for an event of `len` bytes; counts a refusal.
    pub(super) fn check_space_for_event(&mut self, len: usize) -> Result<(), AppendError> {
        let room = self.check_space(len, 0);
        self.stats.refused_disk_full += u64::from(room.is_err());
        room
    }

    /// Whether an event of `len` bytes can be queued now.
    pub(super) fn has_room_for_event(&mut self, len: usize) -> bool {
        self.check_queue(len).is_ok() && self.check_space(len, 0).is_ok()
    }

    /// Room in the last segment at hand that only events may use once no more can be had: a sixteenth of a
    /// segment, at most 1 MiB; all of it when the last segment came out of the reserve.
    fn room_for_events(&self) -> u64 {
        if self.only_events {
            return self.config.segment_bytes;
        }
        (self.config.segment_bytes / 16).min(1 << 20)
    }

    /// Where records have to end in the segment with this ordinal.
    fn end_for_records(&self, ordinal: u64) -> u64 {
        let is_last = self.space_exhausted && ordinal == self.last_ordinal();
        let kept = if is_last { self.room_for_events() } else { 0 };
        self.config.segment_bytes.saturating_sub(kept)
    }

    fn last_ordinal(&self) -> u64 {
        self.current.as_ref().map_or(0, |current| current.ordinal) + self.ready.len() as u64
    }

    fn largest_payload(&self, log: LogRef) -> usize {
        let overhead = GROUP_HEADER_BYTES
            + EXTENT_HEADER_BYTES
            + state_name_bytes(self, log)
            + RECORD_HEADER_BYTES;
        (self.config.segment_bytes - SEGMENT_HEADER_BYTES) as usize - overhead - ALIGN
    }

    /// Bytes that fit the segments at hand behind what is planned already.
    fn room_in_segments(&self) -> u64 {
        let last = self.last_ordinal();
        let (ordinal, position) = match &self.open {
            Some(open) => (open.ordinal, open.position + open.used as u64),
            None => self.plan,
        };
        if ordinal > last {
            return 0;
        }
        let whole = (last - ordinal) * (self.config.segment_bytes - SEGMENT_HEADER_BYTES);
        self.config.segment_bytes.saturating_sub(position) + whole
    }

    /// Makes sure the open group can take a record of `record_len` bytes of `log`.
    fn ensure_room(&mut self, log: LogRef, generation: u64, now_us: u64, record_len: usize) {
        if let Some(open) = &self.open {
            let used = open.used + open.cost(&self.logs, log, generation, record_len);
            let is_kept_free = open.position + used as u64 > self.end_for_records(open.ordinal);
            if used <= open.capacity && !is_kept_free {
                return;
            }
            self.close_open();
        }
        let least =
            GROUP_HEADER_BYTES + EXTENT_HEADER_BYTES + state_name_bytes(self, log) + record_len;
        let end = self.end_for_records(self.plan.0);
        self.open_group(now_us, least, end);
    }

    /// Makes sure the open group can take an event of `len` bytes, header and name included.
    pub(super) fn ensure_room_for_event(&mut self, now_us: u64, len: usize) {
        if let Some(open) = &self.open {
            if open.used + len <= open.capacity {
                return;
            }
            self.close_open();
        }
        self.open_group(now_us, GROUP_HEADER_BYTES + len, self.config.segment_bytes);
    }

    /// Opens a group of at least `least` bytes at the next planned position, or in the next segment when it
    /// would reach over `end`.
    fn open_group(&mut self, now_us: u64, least: usize, end: u64) {
        let padded = align_up(least as u64);
        let (mut ordinal, mut position) = self.plan;
        if position + padded > end {
            ordinal += 1;
            position = SEGMENT_HEADER_BYTES;
        }
        // A sliver of slab would only make small commits; an eighth of a commit is worth having.
        let wanted = (padded as usize).max(self.config.commit_max_bytes / 8);
        if self.writer.room() < wanted {
            let fresh = if wanted > self.pool.slab_bytes() {
                SlabWriter::new(wanted)
            } else {
                self.pool.take()
            };
            let full = std::mem::replace(&mut self.writer, fresh);
            self.pool.retire(full);
        }
        let in_segment =
            usize::try_from(self.config.segment_bytes - position).unwrap_or(usize::MAX);
        let limit = self.config.commit_max_bytes.max(padded as usize);
        let capacity = self.writer.room().min(in_segment).min(limit);
        let lists = self.spare_lists.pop().unwrap_or_default();
        self.plan = (ordinal, position);
        self.open = Some(OpenGroup::new(ordinal, position, capacity, now_us, lists));
        self.queued_bytes += padded as usize;
        self.open_counted = padded as usize;
    }

    /// Ends the open group and queues it.
    pub(super) fn close_open(&mut self) {
        let Some(open) = self.open.take() else { return };
        let closed = open.close(&mut self.writer);
        self.plan = (closed.ordinal, closed.position + closed.total_len());
        self.queued_bytes = self.queued_bytes - self.open_counted + closed.total_len() as usize;
        self.open_counted = 0;
        self.queue.push_back(closed);
    }

    /// Counts what was put into the open group.
    pub(super) fn count_open(&mut self) {
        if let Some(open) = &self.open {
            self.queued_bytes = self.queued_bytes - self.open_counted + open.used;
            self.open_counted = open.used;
        }
    }

    /// Attaches a waiter to the newest group that is not durable; with none, the wait is over already.
    #[inline(always)] // For every append: the waiter is made where it is kept.
    fn wait_for_newest(&mut self, waiter: Waiter) {
        self.count_open();
        let newest = if let Some(open) = self.open.as_mut() {
            Some(&mut open.lists)
        } else if let Some(closed) = self.queue.back_mut() {
            Some(&mut closed.lists)
        } else {
            self.flights.back_mut().map(|flight| &mut flight.lists)
        };
        match newest {
            Some(GroupLists { waiters, .. }) => waiters.push(waiter),
            None => self.completions.push_back(Completion {
                token: waiter.token,
                log: waiter.log,
                range: waiter.range,
                result: Ok(()),
            }),
        }
    }
}

pub(super) fn state_name_bytes(machine: &CommitMachine, log: LogRef) -> usize {
    machine.logs.get(log).encoded_name.len()
}
