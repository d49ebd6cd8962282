//! The commit machine of one core: appends in, device actions out.
//!
//! Sans-IO: no file, no clock, no waiting. A driver feeds it segments, time and results, and carries out the
//! actions it returns. The same machine runs over io_uring and over the model device of the tests.
//!
//! Invariants:
//! - INV-S1: completions leave in the order of the appends, and a positive one only after every byte of its
//!   group and of all earlier groups is durable.
//! - INV-S2: after the first failed sync nothing is ever acknowledged again.
//! - INV-S3: positions in a segment are used at most once; undoing groups abandons the rest of the segment.
//! - INV-S4: bytes queued and in flight never exceed `max_queued_bytes` by more than one batch.

mod anew;
mod append;
mod commit;
pub(crate) mod control;
pub(crate) mod group;
pub(crate) mod logs;
mod recent;
mod reclaim;
mod rewriting;
mod writes;

use std::collections::VecDeque;
use std::ops::Range;

use bytes::Bytes;

pub use control::{Control, ControlEvent, HistoryEntry, LogView, HISTORY_MAX};
pub use logs::{LogRef, LogSeed, Retention};

use crate::error::{CommitError, LogError};
use crate::format::segment::SEGMENT_HEADER_BYTES;
use crate::format::DataUuid;
use crate::name::LogName;
use crate::rewrite::RewritePlan;
use crate::slab::{Region, SlabPool, SlabWriter};
use crate::usage::SegmentTable;
use group::{ClosedGroup, Flight, GroupLists, OpenGroup};
use logs::LogTable;
use recent::RecentRing;

/// What a machine has to know about its surroundings.
#[derive(Debug, Clone)]
pub struct MachineConfig {
    /// Seeds header checksums.
    pub uuid: DataUuid,
    /// Core directory written to.
    pub core: u16,
    /// This start's epoch.
    pub boot_epoch: u64,
    /// Size of every segment.
    pub segment_bytes: u64,
    /// Bytes after which a group takes no further record.
    pub commit_max_bytes: usize,
    /// Bytes queued that are worth a commit of their own while their caller is still appending.
    pub early_commit_bytes: usize,
    /// How long a group may wait for more appends.
    pub commit_max_delay_us: u32,
    /// Groups on their way to the device.
    pub commits_in_flight: usize,
    /// Largest single write.
    pub max_transfer_bytes: usize,
    /// Bound of bytes not yet durable.
    pub max_queued_bytes: usize,
    /// Bytes of durable groups kept for readers.
    pub recent_bytes: usize,
    /// Whether a write needs a separate flush.
    pub flush_after_write: bool,
    /// Number of the next group.
    pub next_group: u64,
    /// Segment and position where the log ended before.
    pub log_end: (u64, u64),
}

/// A segment file that is written, synced and named, ready for groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadySegment {
    /// Its sequence.
    pub seq: u64,
}

/// Names one write or flush of one group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct IoId {
    serial: u64,
    part: u32,
}

/// What the driver has to do.
#[derive(Debug)]
pub enum Action {
    /// Write `data` at `position` of `segment`; synced unless `flush_after_write` is set.
    Write {
        /// To be given back with the result.
        id: IoId,
        /// Sequence of the segment.
        segment: u64,
        /// Position, a multiple of 4096.
        position: u64,
        /// The bytes, a multiple of 4096.
        data: Region,
    },
    /// Flush `segment`.
    Flush {
        /// To be given back with the result.
        id: IoId,
        /// Sequence of the segment.
        segment: u64,
    },
    /// No further write goes to `segment`.
    SegmentDone {
        /// Sequence of the segment.
        segment: u64,
    },
    /// Nothing in `segment` is needed: store the record of freed segments, then give the file back.
    Free {
        /// Sequence of the segment.
        segment: u64,
        /// The record with this segment in it, as a file's content.
        record: Vec<u8>,
    },
    /// Little of a segment is needed: write what is into a new file, which takes the place of the old one.
    Rewrite {
        /// Which one, and what stays.
        plan: Box<RewritePlan>,
    },
}

/// The outcome of one append.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Completion {
    /// The caller's token.
    pub token: u64,
    /// The log.
    pub log: LogRef,
    /// Offsets the append was given.
    pub range: Range<u64>,
    /// Whether they are durable.
    pub result: Result<(), CommitError>,
}

/// Records read from one log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReadBatch {
    /// Offset of the first record.
    pub first_offset: u64,
    /// Payloads in offset order.
    pub records: Vec<Bytes>,
    /// Where to read on.
    pub next_offset: u64,
}

/// Counters of one core log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MachineStats {
    /// Groups that became durable.
    pub commits: u64,
    /// Bytes of those groups, padding included.
    pub committed_bytes: u64,
    /// Payload bytes of durable records.
    pub payload_bytes: u64,
    /// Durable records.
    pub records: u64,
    /// Sum over groups of microseconds between write and durability.
    pub commit_us_sum: u64,
    /// Largest of those.
    pub commit_us_max: u64,
    /// Writes or flushes that failed on the sync path.
    pub flush_failures: u64,
    /// Writes that stored less than asked.
    pub short_writes: u64,
    /// Appends refused because the queue was full.
    pub refused_overloaded: u64,
    /// Appends refused or undone because the disk was full.
    pub refused_disk_full: u64,
    /// Times a group had to wait for a segment.
    pub segment_waits: u64,
    /// Segments given back.
    pub segments_freed: u64,
    /// Times the state of a log was restated so that a segment could go.
    pub restatements: u64,
    /// Times a base was raised by retention.
    pub retention_raises: u64,
    /// Segments rewritten without what nobody needs.
    pub segments_rewritten: u64,
    /// Bytes written for that.
    pub rewrite_copied_bytes: u64,
    /// Bytes by which files became shorter.
    pub rewrite_returned_bytes: u64,
}

enum Health {
    Working,
    Failed(String),
}

#[derive(Clone, Copy)]
struct CurrentSegment {
    seq: u64,
    ordinal: u64,
}

/// See the module documentation.
pub struct CommitMachine {
    config: MachineConfig,
    health: Health,
    logs: LogTable,
    pool: SlabPool,
    writer: SlabWriter,
    open: Option<OpenGroup>,
    queue: VecDeque<ClosedGroup>,
    flights: VecDeque<Flight>,
    ready: VecDeque<ReadySegment>,
    current: Option<CurrentSegment>,
    /// Ordinal and position where the next group will be opened.
    plan: (u64, u64),
    /// Ordinal and position one past the newest sealed group or given-up position.
    sealed_plan: (u64, u64),
    /// Segment and position one past the newest sealed group that is not undone.
    sealed_end: (u64, u64),
    next_group: u64,
    next_serial: u64,
    durable_group: u64,
    /// Segment of that group; 0 when there is none.
    durable_segment: u64,
    queued_bytes: usize,
    /// Bytes of the open group that `queued_bytes` already counts.
    open_counted: usize,
    space_exhausted: bool,
    /// The newest segment at hand is for events alone.
    only_events: bool,
    /// What waited for a segment was given up, and none has come since.
    gave_up_waiting: bool,
    waiting_for_segment_since_us: Option<u64>,
    close_requested: bool,
    closed: bool,
    outbox: VecDeque<Action>,
    writes_out: writes::WritesOut,
    completions: VecDeque<Completion>,
    /// Logs whose base rose since somebody asked; each once.
    raised: VecDeque<LogRef>,
    spare_lists: Vec<GroupLists>,
    recent: RecentRing,
    segments: SegmentTable,
    reclaim: reclaim::Reclaim,
    /// Entries (log and segment) the sweep looks at in one step.
    pub(crate) step_entries: usize,
    stats: MachineStats,
}

impl CommitMachine {
    /// A machine that has no segment yet.
    pub fn new(config: MachineConfig) -> Self {
        let slab_bytes = (config.commit_max_bytes * 2).clamp(256 * 1024, 8 << 20);
        let keep = (config.max_queued_bytes + config.recent_bytes) / slab_bytes + 2;
        let mut pool = SlabPool::new(slab_bytes, keep);
        let writer = pool.take();
        Self {
            health: Health::Working,
            logs: LogTable::default(),
            pool,
            writer,
            open: None,
            queue: VecDeque::new(),
            flights: VecDeque::with_capacity(config.commits_in_flight),
            ready: VecDeque::new(),
            current: None,
            plan: (1, SEGMENT_HEADER_BYTES),
            sealed_plan: (1, SEGMENT_HEADER_BYTES),
            sealed_end: config.log_end,
            next_group: config.next_group,
            next_serial: 1,
            durable_group: config.next_group - 1,
            durable_segment: config.log_end.0,
            queued_bytes: 0,
            open_counted: 0,
            space_exhausted: false,
            only_events: false,
            gave_up_waiting: false,
            waiting_for_segment_since_us: None,
            close_requested: false,
            closed: false,
            outbox: VecDeque::new(),
            writes_out: writes::WritesOut::default(),
            completions: VecDeque::new(),
            raised: VecDeque::new(),
            spare_lists: Vec::new(),
            recent: RecentRing::new(config.recent_bytes),
            segments: SegmentTable::default(),
            reclaim: reclaim::Reclaim::default(),
            step_entries: reclaim::STEP_ENTRIES,
            stats: MachineStats::default(),
            config,
        }
    }

    // -- getters --

    /// The log with this name, if it is open here.
    pub fn find_log(&self, name: &LogName) -> Result<Option<LogRef>, LogError> {
        self.logs.find(name)
    }

    /// The name of a log.
    pub fn log_name(&self, log: LogRef) -> &LogName {
        &self.logs.get(log).name
    }

    /// What recovery found wrong with a log; `None` for one that can be used.
    pub fn damage(&self, log: LogRef) -> Option<&str> {
        self.logs.get(log).damage.as_deref()
    }

    /// One past the last appended record, durable or not.
    pub fn tail(&self, log: LogRef) -> u64 {
        self.logs.get(log).tail
    }

    /// First offset held.
    pub fn base(&self, log: LogRef) -> u64 {
        self.logs.get(log).base
    }

    /// One past the last durable record that no cut on its way is about to drop.
    pub fn durable_tail(&self, log: LogRef) -> u64 {
        self.logs.get(log).settled_tail()
    }

    /// Whether nothing of a log is on its way, neither records nor events: its state is the durable one.
    pub fn is_settled(&self, log: LogRef) -> bool {
        let state = self.logs.get(log);
        state.settled_tail() == state.tail && !state.is_in_flux()
    }

    /// Highest generation any extent of the log carries.
    pub fn generation(&self, log: LogRef) -> u64 {
        self.logs.get(log).generation
    }

    /// Highest accepted generation that is durable.
    pub fn accepted(&self, log: LogRef) -> u64 {
        self.logs.get(log).control.accepted
    }

    /// Everything about a log but its records.
    pub fn view(&self, log: LogRef) -> LogView {
        let state = self.logs.get(log);
        LogView {
            base: state.base,
            tail: state.tail,
            durable_tail: self.durable_tail(log),
            accepted: state.control.accepted,
            commit: state.control.commit,
            history: state.control.history.clone(),
        }
    }

    pub(crate) fn log_state(&self, log: LogRef) -> &logs::LogState {
        self.logs.get(log)
    }

    #[cfg(feature = "runtime")]
    pub(crate) fn each_log(&self) -> impl Iterator<Item = &logs::LogState> {
        self.logs.iter()
    }

    /// Number of open logs.
    pub fn log_count(&self) -> usize {
        self.logs.len()
    }

    /// Counters.
    pub fn stats(&self) -> &MachineStats {
        &self.stats
    }

    /// Bytes queued and in flight.
    pub fn queued_bytes(&self) -> usize {
        self.queued_bytes
    }

    /// Segments ready and not started.
    pub fn ready_segments(&self) -> usize {
        self.ready.len()
    }

    /// Highest group that is durable.
    pub fn durable_group(&self) -> u64 {
        self.durable_group
    }

    /// Why the core log failed, if it did.
    pub fn failure(&self) -> Option<&str> {
        match &self.health {
            Health::Working => None,
            Health::Failed(reason) => Some(reason),
        }
    }

    /// Whether nothing waits for the device.
    pub fn is_idle(&self) -> bool {
        self.open.is_none() && self.queue.is_empty() && self.flights.is_empty()
    }

    /// Whether the closing mark is durable, or never will be.
    pub fn is_closed(&self) -> bool {
        self.closed
    }

    /// Whether enough is queued that a commit should start as soon as the device can take one.
    pub fn has_early_commit(&self) -> bool {
        self.config.commit_max_delay_us == 0
            && self.waiting_for_segment_since_us.is_none()
            && (!self.queue.is_empty()
                || self
                    .open
                    .as_ref()
                    .is_some_and(|open| open.used >= self.config.early_commit_bytes))
    }

    /// Whether another group may be handed to the device.
    pub fn has_free_slot(&self) -> bool {
        self.flights.len() < self.config.commits_in_flight
    }

    /// When `poll_action` should be called again for a group that is waiting for company.
    pub fn next_deadline_us(&self) -> Option<u64> {
        let open = self.open.as_ref()?;
        Some(open.opened_us + u64::from(self.config.commit_max_delay_us))
    }

    // -- commands --

    /// Adds a log with what recovery knows about it.
    pub fn add_log(&mut self, name: &LogName, seed: LogSeed) -> Result<LogRef, LogError> {
        self.logs.add(name, seed)
    }

    /// The next outcome, if any.
    pub fn poll_completion(&mut self) -> Option<Completion> {
        self.completions.pop_front()
    }

    /// All outcomes there are, behind what `out` holds.
    #[cfg(feature = "runtime")]
    pub fn take_completions(&mut self, out: &mut Vec<Completion>) {
        out.extend(self.completions.drain(..));
    }

    /// The next log whose base rose since it was last given out here, if any.
    pub fn poll_raised(&mut self) -> Option<LogRef> {
        let log = self.raised.pop_front()?;
        self.logs.get_mut(log).base_is_news = false;
        Some(log)
    }

    /// Whether outcomes are waiting.
    pub fn has_completions(&self) -> bool {
        !self.completions.is_empty()
    }

    /// Durable records from memory; `None` when the offset is not there any more (or not durable yet).
    pub fn read_recent(&self, log: LogRef, from: u64, max_bytes: usize) -> Option<ReadBatch> {
        let state = self.logs.get(log);
        if state.damage.is_some() || from < state.base || from >= self.durable_tail(log) {
            return None;
        }
        self.recent
            .read(state, from, self.durable_tail(log), max_bytes)
    }
}
