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
        self.check_usable(log)?;
        self.check_event(log, event)?;
        self.check_fits(log, std::iter::once(&[][..]))?;
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
        self.open_group(now_us, GROUP_HEADER_BYTES);
        if let Some(open) = self.open.as_mut() {
            open.flags = GROUP_FLAG_CLOSE;
        }
    }

    fn check_usable(&mut self, log: LogRef) -> Result<(), AppendError> {
        if matches!(self.health, Health::Failed(_)) || self.close_requested {
            return Err(AppendError::Failed);
        }
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
        if self.queued_bytes > 0 && self.queued_bytes + total > self.config.max_queued_bytes {
            self.stats.refused_overloaded += 1;
            return Err(AppendError::Overloaded);
        }
        if self.space_exhausted {
            let groups = total / self.config.commit_max_bytes + 2;
            let needed = total as u64 + (groups * 2 * ALIGN) as u64;
            if needed > self.room_in_segments() {
                self.stats.refused_disk_full += 1;
                return Err(AppendError::DiskFull);
            }
        }
        Ok(())
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
        let last =
            self.current.as_ref().map_or(0, |current| current.ordinal) + self.ready.len() as u64;
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
            let cost = open.cost(&self.logs, log, generation, record_len);
            if open.used + cost <= open.capacity {
                return;
            }
            self.close_open();
        }
        let least =
            GROUP_HEADER_BYTES + EXTENT_HEADER_BYTES + state_name_bytes(self, log) + record_len;
        self.open_group(now_us, least);
    }

    /// Makes sure the open group can take an event of `len` bytes, header and name included.
    fn ensure_room_for_event(&mut self, now_us: u64, len: usize) {
        if let Some(open) = &self.open {
            if open.used + len <= open.capacity {
                return;
            }
            self.close_open();
        }
        self.open_group(now_us, GROUP_HEADER_BYTES + len);
    }

    /// Opens a group of at least `least` bytes at the next planned position.
    fn open_group(&mut self, now_us: u64, least: usize) {
        let padded = align_up(least as u64);
        let (mut ordinal, mut position) = self.plan;
        if position + padded > self.config.segment_bytes {
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

    /// Attaches a waiter to the newest group that is not durable; with none, the wait is over already.
    #[inline(always)] // For every append: the waiter is made where it is kept.
    fn wait_for_newest(&mut self, waiter: Waiter) {
        let newest = if let Some(open) = self.open.as_mut() {
            self.queued_bytes = self.queued_bytes - self.open_counted + open.used;
            self.open_counted = open.used;
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

fn state_name_bytes(machine: &CommitMachine, log: LogRef) -> usize {
    machine.logs.get(log).encoded_name.len()
}
