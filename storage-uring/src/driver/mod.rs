//! The driver: one core's storage over a private io_uring, on the core's executor.
//!
//! Duty: carry out the commit machine's actions, feed results back, and answer reads. Decides nothing about
//! groups. glommio appears only as the executor that watches the ring's eventfd.
//!
//! Invariants: single-threaded; no call blocks on the device; results are taken in at the next `turn`, which
//! every public call that could need them makes.

mod ahead;
mod core;
mod read;
mod reading;
mod rewriting;
mod ring;

use std::cell::RefCell;
use std::ops::Range;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use glommio::io::BufferedFile;
use shard_executor::rt::{spawn_local, yield_now, Task};
use shard_executor::Signal;

use crate::config::StorageConfig;
use crate::error::{AppendError, LogError, ReadError, StorageError};
use crate::machine::{Completion, ControlEvent, LogRef, LogView, ReadBatch, Retention};
use crate::name::LogName;
use crate::recovery::{RecoveredSet, RecoveryReport};
use crate::stats::StorageStats;
use core::Core;

/// How often retention is looked at.
const RECLAIM_TICK: Duration = Duration::from_millis(200);

struct Shared {
    core: RefCell<Core>,
    /// Set when outcomes are waiting.
    completions: Signal,
    /// Set when the bell or a timer turned the storage; for its own waiting.
    progress: Signal,
    watcher: RefCell<Option<Task<()>>>,
}

/// One core's storage. Clones are the same storage; stays on its core.
#[derive(Clone)]
pub struct Storage {
    shared: Rc<Shared>,
}

impl Storage {
    /// Opens the core log of `config.core_index` over what was recovered, and waits for the first segment
    /// (or for the news that there is no space: a full disk does not keep a broker from serving reads).
    pub async fn open(
        config: StorageConfig,
        recovered: Arc<RecoveredSet>,
    ) -> Result<Self, StorageError> {
        config.check()?;
        let mut core = Core::open(config, recovered)?;
        core.adopt_logs();
        let eventfd = core.clone_eventfd().map_err(StorageError::Ring)?;
        let shared = Rc::new(Shared {
            core: RefCell::new(core),
            completions: Signal::new(),
            progress: Signal::new(),
            watcher: RefCell::new(None),
        });
        let watcher = spawn_local(watch(eventfd, Rc::downgrade(&shared)));
        *shared.watcher.borrow_mut() = Some(watcher);
        spawn_local(reclaim(Rc::downgrade(&shared))).detach();
        let storage = Self { shared };
        loop {
            storage.turn();
            if storage.shared.core.borrow().has_heard_of_segments() {
                break;
            }
            storage.shared.progress.wait_take().await;
        }
        Ok(storage)
    }

    /// What recovery found, over all cores.
    pub fn recovery_report(&self) -> RecoveryReport {
        self.shared.core.borrow().recovered().report().clone()
    }

    /// Opens a log; an empty one when it was never written. No I/O.
    pub fn open_log(&self, name: &LogName) -> Result<LogRef, LogError> {
        self.shared.core.borrow_mut().open_log(name)
    }

    /// Queues records and says which offsets they got. Never blocks; copies each payload once, and starts a
    /// commit when much is queued and the device could take it. `now_us` is
    /// the append time stored with the records (microseconds since 1970). The outcome comes as a completion
    /// with `token`; call `kick` after a batch of appends.
    pub fn append<'a, I>(
        &self,
        log: LogRef,
        generation: u64,
        now_us: u64,
        payloads: I,
        token: u64,
    ) -> Result<Range<u64>, AppendError>
    where
        I: ExactSizeIterator<Item = &'a [u8]> + Clone,
    {
        let mut core = self.shared.core.borrow_mut();
        let now = core.append_time_us();
        let range = core
            .machine
            .append(log, generation, now_us, now, payloads, token)?;
        if core.has_early_commit() {
            drop(core);
            self.turn();
        }
        Ok(range)
    }

    /// Queues a change to a log that is not an append: truncate, place, base, accept, begin. It takes its
    /// place among the appends of that log; durable when the completion with `token` (and an empty range)
    /// says so. `now_us` is stored with it.
    pub fn control(
        &self,
        log: LogRef,
        event: ControlEvent<'_>,
        now_us: u64,
        token: u64,
    ) -> Result<(), AppendError> {
        let mut core = self.shared.core.borrow_mut();
        let now = core.now_us();
        core.machine.push_control(log, event, now_us, now, token)
    }

    /// Starts commits if slots are free and the policy says so.
    pub fn kick(&self) {
        self.turn();
    }

    /// Takes the outcomes that are there, in append order.
    pub fn poll_completions(&self, out: &mut Vec<Completion>) {
        self.turn();
        self.shared.core.borrow_mut().machine.take_completions(out);
    }

    /// Set when outcomes are waiting.
    pub fn signal(&self) -> Signal {
        self.shared.completions.clone()
    }

    /// What recovery found wrong with a log; `None` for one that can be used. A log with damage takes nothing
    /// but [`ControlEvent::Place`], which gives up all it held and begins it anew: for an owner that has its
    /// records elsewhere.
    pub fn damage(&self, log: LogRef) -> Option<String> {
        let core = self.shared.core.borrow();
        core.machine.damage(log).map(str::to_owned)
    }

    /// One past the last appended record, durable or not.
    pub fn tail(&self, log: LogRef) -> u64 {
        self.shared.core.borrow().machine.tail(log)
    }

    /// First offset held.
    pub fn base(&self, log: LogRef) -> u64 {
        self.shared.core.borrow().machine.base(log)
    }

    /// One past the last durable record. While a truncation or a new start of the log is on its way, not above
    /// where it cuts, whatever was appended behind it.
    pub fn durable_tail(&self, log: LogRef) -> u64 {
        self.shared.core.borrow().machine.durable_tail(log)
    }

    /// Whether nothing of a log is on its way, neither records nor events: `state` says what is on the disk.
    pub fn is_settled(&self, log: LogRef) -> bool {
        self.shared.core.borrow().machine.is_settled(log)
    }

    /// Highest generation on any record or event of the log.
    pub fn generation(&self, log: LogRef) -> u64 {
        self.shared.core.borrow().machine.generation(log)
    }

    /// Highest generation accepted by this log, durably.
    pub fn accepted(&self, log: LogRef) -> u64 {
        self.shared.core.borrow().machine.accepted(log)
    }

    /// Base, tails, accepted generation and history of a log. Copies the history.
    pub fn state(&self, log: LogRef) -> LogView {
        self.shared.core.borrow().machine.view(log)
    }

    /// Whether this core has a log of this name that was written before or opened.
    pub fn holds(&self, name: &LogName) -> bool {
        let core = self.shared.core.borrow();
        matches!(core.machine.find_log(name), Ok(Some(_)))
    }

    /// Sets how long records of a log are kept; for ever until then.
    pub fn set_retention(&self, log: LogRef, retention: Retention) {
        let mut core = self.shared.core.borrow_mut();
        core.machine.set_retention(log, retention);
    }

    /// Moves the bound at and above which nothing of a log is given up; what else was set stays.
    pub fn set_retention_bound(&self, log: LogRef, below: u64) {
        let mut core = self.shared.core.borrow_mut();
        let retention = core.machine.retention(log);
        core.machine
            .set_retention(log, Retention { below, ..retention });
    }

    /// Takes the logs whose base rose durably since the last call, by retention or by an event; each once.
    pub fn poll_raised(&self, out: &mut Vec<LogRef>) {
        let mut core = self.shared.core.borrow_mut();
        while let Some(log) = core.machine.poll_raised() {
            out.push(log);
        }
    }

    /// Durable records from memory; `None` when they are not there.
    pub fn read_recent(&self, log: LogRef, from: u64, max_bytes: usize) -> Option<ReadBatch> {
        self.shared
            .core
            .borrow()
            .machine
            .read_recent(log, from, max_bytes)
    }

    /// Durable records from `from` on, at least one unless `from` is the durable tail. May return fewer
    /// than asked; read on at `next_offset`.
    pub async fn read(
        &self,
        log: LogRef,
        from: u64,
        max_bytes: usize,
    ) -> Result<ReadBatch, ReadError> {
        read::read(&self.shared, log, from, max_bytes).await
    }

    /// Counters and gauges.
    pub fn stats(&self) -> StorageStats {
        self.shared.core.borrow().stats()
    }

    /// Bytes queued and on their way to the disk.
    pub fn queued_bytes(&self) -> usize {
        self.shared.core.borrow().machine.queued_bytes()
    }

    /// Groups committed and their bytes; cheaper than all the counters.
    pub(crate) fn committed(&self) -> (u64, u64) {
        let core = self.shared.core.borrow();
        let stats = core.machine.stats();
        (stats.commits, stats.committed_bytes)
    }

    /// Why the core log failed, if it did.
    pub fn failure(&self) -> Option<String> {
        self.shared
            .core
            .borrow()
            .machine
            .failure()
            .map(str::to_owned)
    }

    /// Ends the core log for a reason the storage does not see: what is not durable is answered as failed, and
    /// nothing more is taken until the next start.
    pub fn fail(&self, reason: String) {
        self.shared.core.borrow_mut().machine.fail(reason);
        self.turn();
    }

    /// Commits everything queued and writes the closing mark. Outcomes can still be taken afterwards.
    pub async fn close(&self) -> Result<(), StorageError> {
        self.shared.core.borrow_mut().machine.request_close();
        loop {
            self.turn();
            if self.shared.core.borrow().machine.is_closed() {
                break;
            }
            self.shared.progress.wait_take().await;
        }
        // Reads made ahead would keep the storage, and its directory's lock, alive.
        while !self.shared.core.borrow().ahead.is_idle() {
            self.turn();
            yield_now().await;
        }
        let watcher = self.shared.watcher.borrow_mut().take();
        if let Some(watcher) = watcher {
            self.shared.core.borrow_mut().stop();
            watcher.await;
        }
        match self.failure() {
            Some(reason) => Err(StorageError::Failed(reason)),
            None => Ok(()),
        }
    }

    fn turn(&self) {
        turn(&self.shared);
    }
}

/// Takes in results, starts what can be started, and wakes who waits.
fn turn(shared: &Rc<Shared>) {
    let (timer, has_completions) = {
        let mut core = shared.core.borrow_mut();
        core.turn();
        (core.wanted_timer(), core.machine.has_completions())
    };
    if let Some(after) = timer {
        let shared = Rc::downgrade(shared);
        spawn_local(async move {
            shard_executor::rt::sleep(after).await;
            if let Some(shared) = shared.upgrade() {
                shared.core.borrow_mut().on_timer();
                turn(&shared);
                shared.progress.set();
            }
        })
        .detach();
    }
    if has_completions {
        shared.completions.set();
    }
}

/// Retention and giving segments back, a little at a time, for as long as the storage is open.
async fn reclaim(shared: Weak<Shared>) {
    loop {
        let Some(shared) = shared.upgrade() else {
            break;
        };
        if shared.core.borrow().is_stopped() {
            break;
        }
        shared.core.borrow_mut().reclaim();
        turn(&shared);
        drop(shared);
        shard_executor::rt::sleep(RECLAIM_TICK).await;
    }
}

/// Turns the storage whenever the ring or the segment thread rings the bell.
async fn watch(eventfd: OwnedFd, shared: Weak<Shared>) {
    // SAFETY: the descriptor is owned and passes to the file.
    let bell = unsafe { BufferedFile::from_raw_fd(eventfd.into_raw_fd()) };
    loop {
        if let Err(error) = bell.read_at(0, 8).await {
            tracing::error!(%error, "the storage's bell cannot be read");
            break;
        }
        let Some(shared) = shared.upgrade() else {
            break;
        };
        if shared.core.borrow().is_stopped() {
            break;
        }
        turn(&shared);
        shared.progress.set();
    }
    if let Err(error) = bell.close().await {
        tracing::warn!(%error, "the storage's bell cannot be closed");
    }
}
