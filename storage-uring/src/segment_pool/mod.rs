//! The control thread that makes segments: creates, zeroes, syncs, names.
//!
//! Keeps everything that blocks or allocates on the file system off the shard cores. A file is zeroed (`fill`)
//! and synced as a spare, then gets its header, is synced again, is renamed to its segment name, and the
//! directory is synced, before the core hears of it. Watches the free space.
//!
//! Gives segments back, too: stores the record of freed segments, then makes the file a spare to be zeroed
//! again, or removes it when there are enough. Rewrites segments of which little is needed (`rewriting`).
//!
//! Invariant: a segment handed out has all its space, reads as zeros, is named and durable; a failed sync of
//! a spare throws that file away, a failed sync of the directory ends the core log.

mod files;
mod fill;
mod rewriting;

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{bounded, Receiver, RecvTimeoutError, Sender};

use crate::config::SegmentZeros;
use crate::datadir::{sync_dir, DataDir, SEQUENCE_MAX};
use crate::error::StorageError;
use crate::faults::{FaultOp, FaultPlan, FaultState};
use crate::format::segment::SegmentHeader;
use crate::format::ALIGN;
use crate::rewrite::{RewriteFault, RewritePlan, RewriteTotals, RewrittenMap};
use crate::slab::SlabWriter;

pub use files::free_bytes;
use files::rename_to_new;
use fill::Meter;

/// How often space is looked at, and a request that cannot be met is tried again.
const TICK: Duration = Duration::from_millis(200);
/// How long reads that began behind a rewriting may still hold the old file.
const CLOSE_AFTER: Duration = Duration::from_millis(300);
/// Requests and answers on their way; a core asks for one segment at a time.
const QUEUE: usize = 8;

/// What the thread has to know.
#[derive(Clone)]
pub struct SegmentPoolConfig {
    /// The data directory.
    pub data_dir: Arc<DataDir>,
    /// Core whose log it serves.
    pub core: u16,
    /// Cores of this start.
    pub core_count: u16,
    /// Size of a segment.
    pub segment_bytes: u64,
    /// Files kept ready.
    pub spares: usize,
    /// New ones are made once fewer than this are left; at least 1.
    pub refill_below: usize,
    /// Whether their zeros are written.
    pub zeros: SegmentZeros,
    /// Free space that is never used.
    pub reserve_bytes: u64,
    /// Free space below which a warning is given.
    pub low_space_bytes: u64,
    /// Open files with O_DIRECT.
    pub direct_io: bool,
    /// Open segments with O_DSYNC.
    pub o_dsync: bool,
    /// Sequence of the first segment to make.
    pub first_seq: u64,
    /// Faults on purpose.
    pub faults: Option<FaultPlan>,
}

/// What the thread tells the core.
#[derive(Debug)]
pub enum PoolEvent {
    /// A segment is ready.
    Segment {
        /// Its sequence.
        seq: u64,
        /// Open for writing.
        file: File,
        /// It took space that is never used otherwise: for events, which give space back.
        from_reserve: bool,
    },
    /// A segment was asked for and there is no space; sent again every tick until there is.
    NoSpace,
    /// A segment is recorded as freed and its file is gone.
    Freed {
        /// Its sequence.
        seq: u64,
    },
    /// The record of freed segments could not be stored; the segment is still there.
    NotFreed,
    /// A segment was rewritten: the new file has taken its place, durably.
    Rewritten(Box<RewrittenSegment>),
    /// A segment was not rewritten and is as it was.
    NotRewritten {
        /// Its sequence.
        seq: u64,
        /// What is wrong with the segment; none when it did not work this time: no space, an error of the
        /// device, or segments had to be made first.
        fault: Option<RewriteFault>,
    },
    /// A directory could not be made durable; the core log has to end.
    Failed(String),
}

/// A segment that was rewritten.
#[derive(Debug)]
pub struct RewrittenSegment {
    /// Its sequence.
    pub seq: u64,
    /// The new file, open for reading.
    pub file: File,
    /// How to read it.
    pub map: RewrittenMap,
    /// What it holds.
    pub totals: RewriteTotals,
}

/// Numbers shared with the core.
#[derive(Debug, Default)]
pub struct PoolGauges {
    /// Free bytes of the file system.
    pub free_bytes: AtomicU64,
    /// Zeroed files ready.
    pub spares: AtomicU64,
    /// Whether the last attempt to make a file found no space.
    pub no_space: AtomicBool,
    /// Whether free space is below the low-space mark.
    pub low_space: AtomicBool,
    /// Syncs of new files that failed; those files were thrown away.
    pub sync_failures: AtomicU64,
    /// Segments made.
    pub segments_made: AtomicU64,
    /// Commits so far, as the core tells: while they go on, zeroing leaves the device to them.
    pub commits: AtomicU64,
    /// Bytes they wrote.
    pub committed_bytes: AtomicU64,
    /// Whether a commit waits for a segment.
    pub is_waited_for: AtomicBool,
    /// Files whose zeros were not all written.
    pub segments_allocated: AtomicU64,
    /// Freed segments whose file became a spare again.
    pub segments_recycled: AtomicU64,
    /// Attempts to give a segment back that failed.
    pub free_failures: AtomicU64,
    /// Attempts to rewrite a segment that failed.
    pub rewrite_failures: AtomicU64,
}

enum Request {
    Next,
    Free(FreeRequest),
    Rewrite(Box<RewritePlan>),
    /// Nobody reads the file any more that was replaced last.
    Replaced,
    Stop,
}

/// A segment to give back.
struct FreeRequest {
    seq: u64,
    record: Vec<u8>,
}

/// Handle on the thread.
pub struct SegmentPool {
    requests: Sender<Request>,
    events: Receiver<PoolEvent>,
    /// Numbers for the stats.
    pub gauges: Arc<PoolGauges>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl SegmentPool {
    /// Starts the thread; `wake` is called after each event.
    pub fn start(
        config: SegmentPoolConfig,
        wake: impl Fn() + Send + 'static,
    ) -> Result<Self, StorageError> {
        let dir = config.data_dir.layout.core(config.core);
        std::fs::create_dir_all(&dir).map_err(|error| StorageError::io("creating", &dir, error))?;
        let above = config.data_dir.layout.core_logs();
        sync_dir(&above).map_err(|error| StorageError::io("syncing", &above, error))?;
        config.data_dir.note_core(config.core);
        let (worker, requests, events) = Worker::new(config, Box::new(wake));
        let gauges = Arc::clone(&worker.gauges);
        let thread = std::thread::Builder::new()
            .name("felix-segments".to_owned())
            .spawn(move || worker.run())
            .map_err(|error| StorageError::SegmentThread(error.to_string()))?;
        Ok(Self {
            requests,
            events,
            gauges,
            thread: Some(thread),
        })
    }

    /// Asks for the next segment; false when too many requests are waiting already.
    pub fn request_next(&self) -> bool {
        self.requests.try_send(Request::Next).is_ok()
    }

    /// Asks to give a segment back: `record` is the record of freed segments that names it. False when too
    /// many requests are waiting already.
    pub fn request_free(&self, seq: u64, record: Vec<u8>) -> bool {
        let request = Request::Free(FreeRequest { seq, record });
        self.requests.try_send(request).is_ok()
    }

    /// Asks to rewrite a segment; one at a time. False when too many requests are waiting already.
    pub fn request_rewrite(&self, plan: Box<RewritePlan>) -> bool {
        self.requests.try_send(Request::Rewrite(plan)).is_ok()
    }

    /// Says that nobody needs the file any more that was replaced last.
    pub fn close_replaced(&self) {
        // Else the next rewriting, or the end of the thread, closes it.
        drop(self.requests.try_send(Request::Replaced));
    }

    /// The next event, if any.
    pub fn poll_event(&self) -> Option<PoolEvent> {
        self.events.try_recv().ok()
    }
}

impl Drop for SegmentPool {
    fn drop(&mut self) {
        // A full queue is drained by the thread; a stopped thread has nothing to stop.
        drop(self.requests.send(Request::Stop));
        // Unblocks a thread that is waiting to hand over an event.
        while self.events.try_recv().is_ok() {}
        if let Some(thread) = self.thread.take() {
            if thread.join().is_err() {
                tracing::error!("the segment thread panicked");
            }
        }
    }
}

struct Worker {
    config: SegmentPoolConfig,
    next_seq: u64,
    next_spare: u64,
    spares: Vec<PathBuf>,
    /// Files of freed segments, to be zeroed again.
    used: Vec<PathBuf>,
    /// The spare at hand took space of the reserve.
    is_from_reserve: bool,
    leaving: VecDeque<FreeRequest>,
    /// The segment to be rewritten.
    rewrite: Option<Box<RewritePlan>>,
    /// The file that was replaced last, and when it may be closed.
    replaced: (Option<File>, Option<Instant>),
    /// A spare was made since the last rewriting.
    has_made_spare: bool,
    pending: usize,
    refill: Refill,
    meter: Meter,
    /// The file system gives zeros for what is allocated.
    can_allocate: bool,
    inbox: Receiver<Request>,
    outbox: Sender<PoolEvent>,
    wake: Box<dyn Fn() + Send>,
    gauges: Arc<PoolGauges>,
    faults: Option<FaultState>,
    /// Set once the thread has to end.
    stopped: bool,
}

impl Worker {
    fn new(
        config: SegmentPoolConfig,
        wake: Box<dyn Fn() + Send>,
    ) -> (Self, Sender<Request>, Receiver<PoolEvent>) {
        let (requests, inbox) = bounded(QUEUE);
        let (outbox, events) = bounded(QUEUE);
        let worker = Self {
            next_seq: config.first_seq,
            next_spare: 0,
            spares: Vec::new(),
            used: Vec::new(),
            is_from_reserve: false,
            leaving: VecDeque::new(),
            rewrite: None,
            replaced: (None, None),
            has_made_spare: false,
            pending: 0,
            refill: Refill::new(config.refill_below, config.spares),
            meter: Meter::new(Instant::now()),
            can_allocate: true,
            gauges: Arc::default(),
            faults: config.faults.clone().map(FaultState::new),
            config,
            inbox,
            outbox,
            wake,
            stopped: false,
        };
        (worker, requests, events)
    }

    fn run(mut self) {
        self.look_at_space();
        while !self.stopped {
            if !self.has_to_make_spares() || self.gauges.no_space.load(Ordering::Relaxed) {
                match self.inbox.recv_timeout(TICK) {
                    Ok(request) => self.take(request),
                    Err(RecvTimeoutError::Timeout) => self.look_at_space(),
                    Err(RecvTimeoutError::Disconnected) => self.stopped = true,
                }
            }
            self.serve();
            self.close_replaced();
            if let Some(plan) = self.next_rewrite() {
                self.rewrite(&plan);
            }
            if !self.stopped && self.has_to_make_spares() {
                self.add_spare();
            }
        }
        for spare in self.spares.iter().chain(&self.used) {
            // Recovery removes spares, too; this only saves the space earlier.
            drop(std::fs::remove_file(spare));
        }
    }

    fn has_to_make_spares(&mut self) -> bool {
        self.refill.wants(self.spares.len()) || self.pending > 0
    }

    fn take(&mut self, request: Request) {
        match request {
            Request::Next => self.pending += 1,
            Request::Free(request) => self.leaving.push_back(request),
            Request::Rewrite(plan) => self.rewrite = Some(plan),
            Request::Replaced => self.replaced.1 = Some(Instant::now() + CLOSE_AFTER),
            Request::Stop => self.stopped = true,
        }
    }

    /// Takes in requests and meets those for which a spare is ready.
    fn serve(&mut self) {
        while let Ok(request) = self.inbox.try_recv() {
            self.take(request);
        }
        while let Some(request) = self.leaving.pop_front().filter(|_| !self.stopped) {
            self.give_back(&request);
        }
        while self.pending > 0 && !self.spares.is_empty() && !self.stopped {
            self.hand_over();
        }
    }

    fn add_spare(&mut self) {
        match self.make_spare() {
            Ok(path) => {
                self.spares.push(path);
                self.has_made_spare = true;
                self.set_no_space(self.is_from_reserve);
            }
            Err(_) if self.stopped => {}
            Err(error) => {
                let no_space = matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT));
                if !no_space {
                    self.gauges.sync_failures.fetch_add(1, Ordering::Relaxed);
                    tracing::error!(core = self.config.core, %error, "a new segment file was thrown away");
                }
                self.set_no_space(true);
                if self.pending > 0 {
                    self.tell(PoolEvent::NoSpace);
                }
            }
        }
        self.show_spares();
    }

    fn show_spares(&self) {
        self.gauges
            .spares
            .store(self.spares.len() as u64, Ordering::Relaxed);
    }

    fn hand_over(&mut self) {
        let Some(spare) = self.spares.pop() else {
            return;
        };
        self.show_spares();
        let seq = self.next_seq;
        match self.name_segment(&spare, seq) {
            Ok(file) => {
                self.next_seq += 1;
                self.pending -= 1;
                self.gauges.segments_made.fetch_add(1, Ordering::Relaxed);
                let from_reserve = std::mem::take(&mut self.is_from_reserve);
                self.tell(PoolEvent::Segment {
                    seq,
                    file,
                    from_reserve,
                });
            }
            Err(NameFault::File(error)) => {
                self.gauges.sync_failures.fetch_add(1, Ordering::Relaxed);
                tracing::error!(core = self.config.core, %error, "a new segment file was thrown away");
                drop(std::fs::remove_file(&spare));
                std::thread::sleep(TICK);
            }
            Err(NameFault::Taken(error)) => {
                drop(std::fs::remove_file(&spare));
                self.tell(PoolEvent::Failed(format!(
                    "segment {seq:016x} cannot get its name: {error}; nobody but the broker may make files in the \
                     directory of its core log: move what has that name elsewhere and restart"
                )));
                self.stopped = true;
            }
            Err(NameFault::Directory(error)) => {
                self.tell(PoolEvent::Failed(format!(
                    "the segment directory cannot be synced: {error}"
                )));
                self.stopped = true;
            }
        }
    }

    fn give_back(&mut self, request: &FreeRequest) {
        if let Err(fault) = self.store_record(&request.record) {
            self.gauges.free_failures.fetch_add(1, Ordering::Relaxed);
            return match fault {
                NameFault::File(error) | NameFault::Taken(error) => {
                    tracing::warn!(core = self.config.core, segment = request.seq, %error, "a segment cannot be given back yet");
                    self.tell(PoolEvent::NotFreed);
                }
                NameFault::Directory(error) => {
                    self.tell(PoolEvent::Failed(format!(
                        "the segment directory cannot be synced: {error}"
                    )));
                    self.stopped = true;
                }
            };
        }
        if let Err(error) = self.reuse_or_remove(request.seq) {
            // The next start removes it: it is recorded as freed.
            self.gauges.free_failures.fetch_add(1, Ordering::Relaxed);
            tracing::error!(core = self.config.core, segment = request.seq, %error, "the file of a freed segment stays until the next start");
        }
        self.tell(PoolEvent::Freed { seq: request.seq });
    }

    fn store_record(&mut self, record: &[u8]) -> Result<(), NameFault> {
        let path = self.config.data_dir.layout.freed(self.config.core);
        let next = path.with_extension("next");
        let stored = || -> io::Result<()> {
            let mut file = File::create(&next)?;
            file.write_all(record)?;
            file.sync_all()?;
            std::fs::rename(&next, &path)
        };
        stored().map_err(NameFault::File)?;
        self.sync_directory()
    }

    fn sync_directory(&mut self) -> Result<(), NameFault> {
        let dir = self.config.data_dir.layout.core(self.config.core);
        let synced = self.check_fault(FaultOp::SyncDirectory);
        synced
            .and_then(|()| sync_dir(&dir))
            .map_err(NameFault::Directory)
    }

    fn check_fault(&mut self, op: FaultOp) -> io::Result<()> {
        let faults = self.faults.as_mut();
        faults.map_or(Ok(()), |faults| faults.error_of_next(op))
    }

    /// Neither needs to be durable: a segment that is recorded as freed is removed by recovery.
    fn reuse_or_remove(&mut self, seq: u64) -> io::Result<()> {
        let path = self.config.data_dir.layout.segment(self.config.core, seq);
        let is_wanted = self.spares.len() + self.used.len() < self.config.spares.max(1);
        let is_whole = std::fs::metadata(&path)?.len() == self.config.segment_bytes;
        if !(is_wanted && is_whole) {
            return std::fs::remove_file(&path);
        }
        let spare = self.next_spare_path();
        std::fs::rename(&path, &spare)?;
        self.used.push(spare);
        Ok(())
    }

    fn next_spare_path(&mut self) -> PathBuf {
        let dir = self.config.data_dir.layout.core(self.config.core);
        let path = dir.join(format!("spare-{:08x}.fxs", self.next_spare));
        self.next_spare += 1;
        path
    }

    fn tell(&self, event: PoolEvent) {
        // Bounded: the core drains it, and dropping the handle ends the thread.
        if self.outbox.send(event).is_ok() {
            (self.wake)();
        }
    }

    fn open(&self, path: &Path, create: bool, dsync: bool) -> io::Result<File> {
        let mut flags = 0;
        if self.config.direct_io {
            flags |= libc::O_DIRECT;
        }
        if dsync {
            flags |= libc::O_DSYNC;
        }
        OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(create)
            .custom_flags(flags)
            .open(path)
    }

    fn make_spare(&mut self) -> io::Result<PathBuf> {
        let used = self.used.pop();
        let is_used = used.is_some();
        let path = match used {
            Some(path) => {
                self.is_from_reserve = false;
                path
            }
            None => {
                let free = free_bytes(self.config.data_dir.layout.dir())?;
                let wanted = self.config.segment_bytes;
                let is_tight = free < wanted.saturating_add(self.config.reserve_bytes);
                // A start on a full disk needs room for the events that give space back.
                let is_first = self.gauges.segments_made.load(Ordering::Relaxed) == 0;
                if is_tight && !(is_first && self.spares.is_empty() && free >= wanted) {
                    return Err(io::Error::from_raw_os_error(libc::ENOSPC));
                }
                self.is_from_reserve = is_tight;
                self.next_spare_path()
            }
        };
        let made = self
            .open(&path, !is_used, false)
            .and_then(|file| self.fill(&file));
        if made.is_err() {
            drop(std::fs::remove_file(&path));
        } else if is_used {
            self.gauges
                .segments_recycled
                .fetch_add(1, Ordering::Relaxed);
        }
        made.map(|()| path)
    }

    fn name_segment(&mut self, spare: &Path, seq: u64) -> Result<File, NameFault> {
        let header = SegmentHeader {
            uuid: self.config.data_dir.meta.uuid,
            core: self.config.core,
            core_count: self.config.core_count,
            seq,
            boot_epoch: self.config.data_dir.meta.boot_epoch,
            segment_bytes: self.config.segment_bytes,
            rewritten: None,
        };
        let path = self.config.data_dir.layout.segment(self.config.core, seq);
        let named = || -> io::Result<()> {
            let file = self.open(spare, false, false)?;
            let mut block = SlabWriter::new(ALIGN);
            block.tail()[..ALIGN].copy_from_slice(&header.encode());
            file.write_all_at(&block.tail()[..ALIGN], 0)?;
            file.sync_data()?;
            if seq > SEQUENCE_MAX {
                let reason = "no number is left for another segment";
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, reason));
            }
            rename_to_new(spare, &path)
        };
        named().map_err(|error| match error.kind() {
            // Somebody else makes files here; another attempt would meet the same one.
            io::ErrorKind::AlreadyExists => NameFault::Taken(error),
            _ => NameFault::File(error),
        })?;
        self.sync_directory()?;
        self.open(&path, false, self.config.o_dsync)
            .map_err(NameFault::Directory)
    }

    fn look_at_space(&self) {
        let Ok(free) = free_bytes(self.config.data_dir.layout.dir()) else {
            return;
        };
        self.gauges.free_bytes.store(free, Ordering::Relaxed);
        let low = free < self.config.low_space_bytes;
        if low && !self.gauges.low_space.swap(low, Ordering::Relaxed) {
            tracing::warn!(
                free,
                limit = self.config.low_space_bytes,
                "free space is low"
            );
        }
        self.gauges.low_space.store(low, Ordering::Relaxed);
    }

    fn set_no_space(&self, no_space: bool) {
        let before = self.gauges.no_space.swap(no_space, Ordering::Relaxed);
        if no_space && !before {
            tracing::warn!(core = self.config.core, "no space for another segment");
        } else if before && !no_space {
            tracing::info!(core = self.config.core, "space for segments again");
        }
    }
}

/// When spares are made: from when too few are left until all are there. Zeroing takes the device from the
/// commits, and a burst that the spares at hand cover is not disturbed by it.
struct Refill {
    below: usize,
    full: usize,
    is_on: bool,
}

impl Refill {
    fn new(below: usize, full: usize) -> Self {
        Self {
            below: below.max(1),
            full,
            is_on: true,
        }
    }

    fn wants(&mut self, have: usize) -> bool {
        if have >= self.full {
            self.is_on = false;
        } else if have < self.below {
            self.is_on = true;
        }
        self.is_on
    }
}

enum NameFault {
    /// The file is of no use.
    File(io::Error),
    /// Something has the name it was to get.
    Taken(io::Error),
    /// It is not known whether the name survives a power cut.
    Directory(io::Error),
}

#[cfg(test)]
mod tests;
