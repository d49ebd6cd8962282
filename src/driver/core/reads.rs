//! Reading a shard's log on the core that owns it.
//!
//! A read that finds nothing yet waits, for free, until the durable tail passes its place; a read
//! of recent records is answered from memory within the turn; anything older goes to the disk
//! without holding up the loop. Only durable records are ever read.
//!
//! Bounds: one read in flight for each subscription; disk reads of a core at once
//! ([`MAX_DISK_READS`]), the rest wait their turn.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use storage_uring::{LogRef, ReadBatch, ReadError};

use crate::ids::ShardId;
use crate::proto::replication::leader::Readable;

use super::event_run::EventRun;
use super::message::{EventRead, LaneMsg, LaneRead, ReadAsk, ReadResult};
use super::Core;

/// Disk reads of one core in flight at once.
const MAX_DISK_READS: usize = 32;

/// Who is told what a read came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum ReadWaiter {
    /// A subscription of this core.
    Subscription { token: u64 },
    /// Another core.
    Lane { core: usize, ticket: u64 },
    /// A cache of this core: one value, or the next stretch of a log being loaded.
    Cache { token: u64 },
    /// A copy of a shard another broker leads compares a batch with what it holds.
    Follower { copy: u64, ticket: u64 },
    /// Records for a follower.
    Ship { token: u64 },
    /// The poll of a consumer group of this core.
    Group { token: u64 },
}

impl ReadWaiter {
    /// Whether the records go to subscribers, who share them.
    fn is_subscriber(self) -> bool {
        matches!(self, Self::Subscription { .. } | Self::Lane { .. })
    }
}

struct DiskRead {
    shard: Arc<ShardId>,
    log: LogRef,
    from: u64,
    max_bytes: usize,
    waiter: ReadWaiter,
    /// What readers may see of the log, from when they asked: by the time the disk answers this broker may
    /// have lost the shard, and with it every mark.
    readable_end: Option<u64>,
}

/// A finished disk read.
struct DiskDone {
    read: DiskRead,
    result: Result<ReadBatch, ReadError>,
}

/// The disk reads of one core.
#[derive(Default)]
pub(super) struct DiskReads {
    running: usize,
    waiting: VecDeque<DiskRead>,
    done: Rc<RefCell<Vec<DiskDone>>>,
}

impl Core {
    /// Reads here or asks the core that owns the shard.
    pub(super) fn read_log(&mut self, shard: &Arc<ShardId>, core: u16, token: u64, read: ReadAsk) {
        if core == self.index {
            return self.read_here(shard, read, ReadWaiter::Subscription { token });
        }
        let message = LaneMsg::Read(Box::new(LaneRead {
            ticket: token,
            shard: Arc::clone(shard),
            read,
        }));
        // A read is owed to a subscription that exists already; like an answer it may not be lost.
        self.send_answer(usize::from(core), message);
    }

    pub(super) fn read_here(&mut self, shard: &Arc<ShardId>, read: ReadAsk, waiter: ReadWaiter) {
        let leads = self.routes.shard(shard).is_some_and(|route| route.is_local);
        if !leads {
            return self.finish_read(waiter, ReadResult::NotOwner);
        }
        let Ok(log) = self.open_log(shard) else {
            let why: Arc<str> = Arc::from("the log cannot be opened");
            return self.finish_read(waiter, ReadResult::Failed(why));
        };
        match read {
            ReadAsk::Bounds => {
                let result = match self.readable(log) {
                    Readable::Below(readable_end) => ReadResult::Bounds {
                        base: self.storage.base(log),
                        readable_end,
                        durable_tail: self.storage.durable_tail(log),
                    },
                    Readable::NoMark => ReadResult::NotReady,
                };
                self.finish_read(waiter, result);
            }
            ReadAsk::Records { from, max_bytes } => {
                self.read_records(shard, log, from, max_bytes, waiter);
            }
        }
    }

    pub(super) fn read_records(
        &mut self,
        shard: &Arc<ShardId>,
        log: LogRef,
        from: u64,
        max_bytes: usize,
        waiter: ReadWaiter,
    ) {
        let end = self.readable(log).end();
        if from >= end {
            if let Some(open) = self.logs.get_mut(shard) {
                open.waiting_reads.insert(waiter, (from, max_bytes));
            }
            return;
        }
        let base = self.storage.base(log);
        if from < base {
            return self.finish_read(waiter, ReadResult::Trimmed { base });
        }
        if waiter.is_subscriber() {
            return self.read_run(shard, log, from..end, max_bytes, waiter);
        }
        match self.storage.read_recent(log, from, max_bytes) {
            Some(batch) => self.finish_read(waiter, records(batch, end)),
            None => self.queue_disk_read(shard, log, (from, Some(end)), max_bytes, waiter),
        }
    }

    /// Reads for a subscriber: what another one at the same place got in this turn is shared.
    fn read_run(
        &mut self,
        shard: &Arc<ShardId>,
        log: LogRef,
        readable: Range<u64>,
        max_bytes: usize,
        waiter: ReadWaiter,
    ) {
        let (from, readable_end) = (readable.start, readable.end);
        let run = match self.event_runs.find(log, from, max_bytes) {
            Some(run) => run,
            None => {
                let Some(batch) = self.storage.read_recent(log, from, max_bytes) else {
                    let readable = (from, Some(readable_end));
                    return self.queue_disk_read(shard, log, readable, max_bytes, waiter);
                };
                let run = Arc::new(EventRun::new(batch, readable_end));
                self.event_runs.keep(log, max_bytes, &run);
                run
            }
        };
        self.finish_event_read(waiter, EventRead::Run { run, readable_end });
    }

    /// Reads durable records that need not be in memory, whether readers may see them or not.
    pub(super) fn read_disk(
        &mut self,
        shard: &Arc<ShardId>,
        log: LogRef,
        from: u64,
        max_bytes: usize,
        waiter: ReadWaiter,
    ) {
        self.queue_disk_read(shard, log, (from, None), max_bytes, waiter);
    }

    /// The same; a reader, who may see no others, names the end of those it may.
    fn queue_disk_read(
        &mut self,
        shard: &Arc<ShardId>,
        log: LogRef,
        (from, readable_end): (u64, Option<u64>),
        max_bytes: usize,
        waiter: ReadWaiter,
    ) {
        self.disk_reads.waiting.push_back(DiskRead {
            shard: Arc::clone(shard),
            log,
            from,
            max_bytes,
            waiter,
            readable_end,
        });
        self.start_disk_reads();
    }

    fn start_disk_reads(&mut self) {
        while self.disk_reads.running < MAX_DISK_READS {
            let Some(read) = self.disk_reads.waiting.pop_front() else {
                return;
            };
            let log = read.log;
            self.disk_reads.running += 1;
            let storage = self.storage.clone();
            let done = Rc::clone(&self.disk_reads.done);
            let signal = self.signal.clone();
            shard_executor::rt::spawn_local(async move {
                let result = storage.read(log, read.from, read.max_bytes).await;
                done.borrow_mut().push(DiskDone { read, result });
                signal.set();
            })
            .detach();
        }
    }

    /// Answers the disk reads that finished since the last turn.
    pub(super) fn take_disk_reads(&mut self) {
        let finished = std::mem::take(&mut *self.disk_reads.done.borrow_mut());
        if finished.is_empty() {
            return;
        }
        self.disk_reads.running -= finished.len();
        for DiskDone { read, result } in finished {
            let is_subscriber = read.waiter.is_subscriber();
            let durable_tail = || self.storage.durable_tail(read.log);
            let end = read.readable_end.unwrap_or_else(durable_tail);
            let result = match result {
                Ok(batch) if is_subscriber => {
                    let run = Arc::new(EventRun::new(batch, end));
                    let read_run = EventRead::Run {
                        run,
                        readable_end: end,
                    };
                    self.finish_event_read(read.waiter, read_run);
                    continue;
                }
                Ok(batch) => records(batch, end),
                Err(ReadError::Trimmed { base, .. }) => ReadResult::Trimmed { base },
                Err(error) => {
                    tracing::error!(shard = %read.shard, from = read.from, %error, "a read failed");
                    ReadResult::Failed(Arc::from(error.to_string()))
                }
            };
            self.finish_read(read.waiter, result);
        }
        self.start_disk_reads();
    }

    /// Logs whose durable tail moved: their waiting reads are tried again.
    pub(super) fn wake_touched_readers(&mut self) {
        let mut touched = std::mem::take(&mut self.touched_logs);
        touched.sort_unstable();
        touched.dedup();
        for log in touched.drain(..) {
            self.ship_log_moved(log);
            let Some(shard) = self.log_shards.get(&log).cloned() else {
                continue;
            };
            self.tell_groups_of_records(&shard, log);
            let Some(open) = self.logs.get_mut(&shard) else {
                continue;
            };
            if open.waiting_reads.is_empty() {
                continue;
            }
            let waiting = std::mem::take(&mut open.waiting_reads);
            for (waiter, (from, max_bytes)) in waiting {
                self.read_records(&shard, log, from, max_bytes, waiter);
            }
        }
        self.touched_logs = touched;
    }

    /// More of a log may be read: its waiting reads are tried again.
    pub(super) fn wake_readers(&mut self, log: LogRef) {
        let Some(shard) = self.log_shards.get(&log).cloned() else {
            return;
        };
        self.tell_groups_of_records(&shard, log);
        let Some(open) = self.logs.get_mut(&shard) else {
            return;
        };
        let waiting = std::mem::take(&mut open.waiting_reads);
        for (waiter, (from, max_bytes)) in waiting {
            self.read_records(&shard, log, from, max_bytes, waiter);
        }
    }

    /// Shards this broker does not lead any more: whoever waits for their records is told.
    pub(super) fn drop_readers_of_moved_shards(&mut self) {
        let routes = Arc::clone(&self.routes);
        let moved: Vec<Arc<ShardId>> = self
            .logs
            .iter()
            .filter(|(_, open)| !open.waiting_reads.is_empty())
            .filter(|(shard, _)| !routes.shard(shard).is_some_and(|route| route.is_local))
            .map(|(shard, _)| Arc::clone(shard))
            .collect();
        for shard in moved {
            let Some(open) = self.logs.get_mut(&shard) else {
                continue;
            };
            for waiter in std::mem::take(&mut open.waiting_reads).into_keys() {
                self.finish_read(waiter, ReadResult::NotOwner);
            }
        }
    }

    pub(super) fn cancel_read(&mut self, shard: &Arc<ShardId>, waiter: ReadWaiter) {
        if let Some(open) = self.logs.get_mut(shard) {
            open.waiting_reads.remove(&waiter);
        }
    }

    fn finish_read(&mut self, waiter: ReadWaiter, result: ReadResult) {
        match waiter {
            ReadWaiter::Subscription { .. } | ReadWaiter::Lane { .. } => {
                self.finish_event_read(waiter, event_read(result));
            }
            ReadWaiter::Cache { token } => self.on_cache_read(token, result),
            ReadWaiter::Follower { copy, ticket } => {
                self.on_follower_read(copy, ticket, &result);
            }
            ReadWaiter::Ship { token } => self.on_ship_read(token, result),
            // Answered from the queue of the turn, as a subscription is.
            ReadWaiter::Group { token } => self.group_reads_done.push_back((token, result)),
        }
    }

    /// Hands on what a subscriber's read came to; of other waiters there is none.
    fn finish_event_read(&mut self, waiter: ReadWaiter, result: EventRead) {
        match waiter {
            // Answered from the queue of the turn: a subscription that reads on at once would
            // otherwise recurse.
            ReadWaiter::Subscription { token } => self.read_results.push_back((token, result)),
            ReadWaiter::Lane { core, ticket } => {
                self.send_answer(core, LaneMsg::ReadDone { ticket, result });
            }
            ReadWaiter::Cache { .. }
            | ReadWaiter::Follower { .. }
            | ReadWaiter::Ship { .. }
            | ReadWaiter::Group { .. } => self.metrics.internal_faults.inc(),
        }
    }
}

/// The same answer as a subscription takes it.
fn event_read(result: ReadResult) -> EventRead {
    match result {
        ReadResult::Bounds {
            base,
            readable_end,
            durable_tail,
        } => EventRead::Bounds {
            base,
            readable_end,
            durable_tail,
        },
        ReadResult::Records {
            first_offset,
            records,
            next_offset,
            durable_tail,
        } => {
            let batch = ReadBatch {
                first_offset,
                records,
                next_offset,
            };
            EventRead::Run {
                run: Arc::new(EventRun::new(batch, durable_tail)),
                readable_end: durable_tail,
            }
        }
        ReadResult::Trimmed { base } => EventRead::Trimmed { base },
        ReadResult::NotReady => EventRead::NotReady,
        ReadResult::NotOwner => EventRead::NotOwner,
        ReadResult::Failed(why) => EventRead::Failed(why),
    }
}

/// The records of a batch that lie below `durable_tail`, which is what may be read.
fn records(mut batch: ReadBatch, durable_tail: u64) -> ReadResult {
    if batch.next_offset > durable_tail {
        let kept = durable_tail.saturating_sub(batch.first_offset);
        batch.records.truncate(kept as usize);
        batch.next_offset = batch.first_offset + batch.records.len() as u64;
    }
    ReadResult::Records {
        first_offset: batch.first_offset,
        records: batch.records,
        next_offset: batch.next_offset,
        durable_tail,
    }
}
