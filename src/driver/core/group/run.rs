//! What a group's machine asks for: reads of the stream's log, records of the group's two logs,
//! answers, a timer.

use std::sync::Arc;

use bytes::Bytes;
use storage_uring::LogRef;

use super::super::cache::{CacheAt, CacheWaiter};
use super::super::message::{GroupResult, ReadResult};
use super::super::reads::ReadWaiter;
use super::super::timers::Timer;
use super::super::Core;
use super::{GroupAt, GroupWrite};
use crate::ids::{Generation, ShardId};
use crate::proto::cache::{CacheFailure, CacheLog, CacheRequest, Operation};
use crate::proto::group::entry::{dead_key, position_value, DeadEntry};
use crate::proto::group::{Group, GroupAction, GroupReply};

impl Core {
    /// Gives the machine an input and does what it asks for.
    pub(super) fn with_group(&mut self, at: &GroupAt, input: impl FnOnce(&mut Group)) {
        let Some(running) = self.groups.get_mut(at) else {
            return;
        };
        input(&mut running.machine);
        self.run_group(at);
    }

    fn run_group(&mut self, at: &GroupAt) {
        loop {
            let Some(running) = self.groups.get_mut(at) else {
                return;
            };
            let Some(action) = running.machine.poll_action() else {
                break;
            };
            let (generation, log) = (running.generation, running.log);
            match action {
                GroupAction::Answer { ticket, result } => self.answer_group(ticket, result),
                GroupAction::Read { from, max_bytes } => {
                    let token = self.groups.reads.insert(at.clone());
                    let waiter = ReadWaiter::Group { token };
                    self.read_records(&at.0, log, from, max_bytes, waiter);
                }
                GroupAction::WriteCursor { position } => {
                    let value = position.map(|position| position_value(position, generation));
                    let key = Arc::clone(&at.1);
                    let write = GroupWrite::Cursor;
                    self.write_group(at, generation, CacheLog::Cursors, key, value, write);
                }
                GroupAction::WriteEntry { offset, entry } => {
                    let value = entry.map(|entry| entry.value(generation));
                    let key = dead_key(&at.1, offset);
                    let is_burial = entry == Some(DeadEntry::Dead);
                    let write = GroupWrite::Entry { offset, is_burial };
                    self.write_group(at, generation, CacheLog::DeadLetters, key, value, write);
                }
            }
        }
        self.arm_group_timer(at);
    }

    /// A record of the group goes to one of its logs; what became of it comes back to the machine.
    fn write_group(
        &mut self,
        at: &GroupAt,
        generation: Generation,
        log: CacheLog,
        key: Arc<str>,
        value: Option<Bytes>,
        write: GroupWrite,
    ) {
        let waiter = CacheWaiter::Group {
            at: at.clone(),
            write,
        };
        let operation = match value {
            Some(value) => Operation::Put {
                value,
                ttl_ms: None,
            },
            None => Operation::Delete,
        };
        if self.check_leads(&at.0, generation).is_err() {
            return self.finish_cache(waiter, Err(CacheFailure::Moved));
        }
        let log: CacheAt = (Arc::clone(&at.0), log);
        match self.ready_cache(&log) {
            Ok(true) => {
                let request = CacheRequest { key, operation };
                self.serve_cache(&log, generation, request, waiter);
            }
            Ok(false) => self.finish_cache(waiter, Err(CacheFailure::NotReady)),
            Err(failure) => self.finish_cache(waiter, Err(failure)),
        }
    }

    pub(in crate::driver::core) fn on_group_written(
        &mut self,
        at: &GroupAt,
        write: GroupWrite,
        result: Result<(), CacheFailure>,
    ) {
        let mono = self.mono;
        match write {
            GroupWrite::Cursor => {
                self.with_group(at, |group| group.on_cursor_written(mono, result))
            }
            GroupWrite::Entry { offset, is_burial } => {
                if is_burial && result.is_ok() {
                    self.metrics.group_dead_letters.inc();
                }
                self.with_group(at, |group| group.on_entry_written(mono, offset, result));
            }
        }
    }

    /// Hands the reads that were answered in this turn to their groups.
    pub(in crate::driver::core) fn run_groups(&mut self) {
        let mono = self.mono;
        while let Some((token, result)) = self.group_reads_done.pop_front() {
            let Some(at) = self.groups.reads.remove(token) else {
                continue;
            };
            self.with_group(&at, |group| match result {
                ReadResult::Records {
                    first_offset,
                    records,
                    ..
                } => group.on_records(mono, first_offset, records),
                ReadResult::Trimmed { base } => group.on_trimmed(mono, base),
                ReadResult::Bounds { .. }
                | ReadResult::NotOwner
                | ReadResult::NotReady
                | ReadResult::Failed(_) => group.on_read_failed(mono),
            });
        }
    }

    /// Records of a shard became readable: polls that wait for them go on.
    pub(in crate::driver::core) fn tell_groups_of_records(
        &mut self,
        shard: &Arc<ShardId>,
        log: LogRef,
    ) {
        let Some(groups) = self.groups.shards.get(shard) else {
            return;
        };
        let awaited = groups
            .iter()
            .filter(|(_, running)| running.machine.is_awaited());
        let awaited: Vec<GroupAt> = awaited
            .map(|(group, _)| (Arc::clone(shard), Arc::clone(group)))
            .collect();
        let (base, tail) = (self.storage.base(log), self.readable_end(log));
        let mono = self.mono;
        for at in awaited {
            self.with_group(&at, |group| group.on_bounds(mono, base, tail));
        }
    }

    fn arm_group_timer(&mut self, at: &GroupAt) {
        let Some(running) = self.groups.get_mut(at) else {
            return;
        };
        let Some(deadline) = running.machine.next_deadline() else {
            return;
        };
        if running.timer_at.is_none_or(|armed| deadline < armed) {
            running.timer_at = Some(deadline);
            self.timers.push(deadline, Timer::Group { at: at.clone() });
        }
    }

    pub(in crate::driver::core) fn on_group_time(&mut self, at: &GroupAt) {
        let mono = self.mono;
        let Some(running) = self.groups.get_mut(at) else {
            return;
        };
        // One that was overtaken by an earlier one finds that a later one is set, or none.
        if running.timer_at.is_none_or(|armed| armed > mono) {
            return;
        }
        running.timer_at = None;
        self.with_group(at, |group| group.on_time(mono));
    }

    pub(super) fn answer_group(&mut self, ticket: u64, result: GroupResult) {
        if let Ok(GroupReply::Records(records)) = &result {
            self.metrics.group_delivered.add(records.len() as u64);
            let again = records.iter().filter(|record| record.attempts > 1).count();
            self.metrics.group_redelivered.add(again as u64);
        }
        if let Some(from) = self.groups.tickets.remove(ticket) {
            self.groups.polls.remove(&from);
            self.tell_asker(from, result);
        }
    }
}
