//! Starting and joining the executor of one core.

use std::future::Future;
use std::path::PathBuf;
use std::sync::mpsc::{sync_channel, Receiver, RecvTimeoutError, SyncSender};
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use glommio::{ExecutorJoinHandle, LocalExecutorBuilder, Placement};

use super::error::{CoreError, StartError};
use super::nudge::nudge;
use super::task::{sleep, spawn_local};
use super::wake_guard::{guard, start_thread};
use super::warm_up::warm_up;
use crate::memlock::{self, DEFAULT_IO_MEMORY_BYTES, EXECUTOR_MINIMUM_BYTES};
use crate::panic_exit::mark_core;
use crate::stall::Heartbeat;

/// How often the heartbeat timer of every core fires. It bounds a known fault: an executor that is
/// preempted before it ran anything goes to sleep with work queued, until any event arrives.
pub const HEARTBEAT_PERIOD: Duration = Duration::from_millis(5);

/// The first sleep of an executor registers the process with the kernel's barrier call, which
/// takes 10 to 40 ms. A short sleep before anything is served makes the start pay for it.
const FIRST_PARK: Duration = Duration::from_millis(1);

const START_TIMEOUT: Duration = Duration::from_secs(10);

/// A start takes 10 to 50 ms; a core silent for this long is nudged, again and again.
const START_PATIENCE: Duration = Duration::from_millis(500);

/// The kernel's bound on submission queue entries.
const LARGEST_RING_DEPTH: usize = 32_768;

/// How one core's executor is to run.
#[derive(Clone, Debug)]
pub struct CoreSpec {
    /// Which core of this process it is; names it in messages.
    pub core_index: usize,
    /// The CPU to pin it to; `None` leaves it to the scheduler.
    pub cpu: Option<usize>,
    /// Memory registered for file I/O; see [`crate::memlock`].
    pub io_memory_bytes: usize,
    /// Submission entries of each of its rings (`--queue-depth`).
    pub ring_depth: usize,
    /// Length of a time slice in ms. Messages and I/O of a busy core wait this long.
    pub preempt_ms: u64,
    /// How long to look for work before sleeping, in us. Only for CPUs the process owns.
    pub spin_us: u64,
    /// A fully written file on the file system of the logs, read before anything else; see
    /// [`super::prepare_warm_up_file`]. `None` only for executors that do no file I/O.
    pub warm_up_file: Option<PathBuf>,
    /// Name of the thread (the kernel shows 15 bytes of it).
    pub name: String,
}

impl CoreSpec {
    /// Core `core_index` unpinned, with the defaults: 1 MiB, depth 128, 1 ms slices, no spin.
    pub fn new(core_index: usize) -> Self {
        Self {
            core_index,
            cpu: None,
            io_memory_bytes: DEFAULT_IO_MEMORY_BYTES,
            ring_depth: 128,
            preempt_ms: 1,
            spin_us: 0,
            warm_up_file: None,
            name: format!("core{core_index}"),
        }
    }

    fn validate(&self) -> Result<(), StartError> {
        let cause = if self.ring_depth == 0 || self.ring_depth > LARGEST_RING_DEPTH {
            format!(
                "a queue depth of {} is outside 1..={LARGEST_RING_DEPTH}",
                self.ring_depth
            )
        } else if self.preempt_ms == 0 {
            "a time slice of 0 ms never lets a task run".to_owned()
        } else {
            return Ok(());
        };
        Err(StartError::Invalid {
            core: self.core_index,
            cause,
        })
    }
}

/// A running core.
pub struct CoreHandle<R: Send + 'static> {
    core: usize,
    heartbeat: Arc<Heartbeat>,
    /// `None` only from a core that never reported to be ready.
    join: ExecutorJoinHandle<Option<R>>,
}

impl<R: Send + 'static> CoreHandle<R> {
    /// Which core this is.
    pub fn core_index(&self) -> usize {
        self.core
    }

    /// Its pulse, for a [`crate::StallMonitor`].
    pub fn heartbeat(&self) -> Arc<Heartbeat> {
        self.heartbeat.clone()
    }

    /// Waits for the core to end; blocks the calling thread.
    ///
    /// # Errors
    /// When something on the core panicked or the executor failed.
    pub fn join(self) -> Result<R, CoreError> {
        match self.join.join() {
            Ok(Some(result)) => Ok(result),
            Ok(None) => Err(CoreError::Executor {
                core: self.core,
                cause: "it ended before it was ready".to_owned(),
            }),
            Err(error) => Err(CoreError::from_glommio(self.core, error)),
        }
    }
}

/// Starts a core and waits until its executor runs and is warmed up. `make` runs on the new thread
/// and makes the core's future there, so neither it nor its parts need to be `Send`; the core ends
/// when the future does. Blocks the calling thread for the start (10 to 50 ms).
///
/// # Errors
/// When the core cannot run; the thread has ended then (except after `TimedOut`).
pub fn spawn_core<R, Fut, F>(spec: CoreSpec, make: F) -> Result<CoreHandle<R>, StartError>
where
    R: Send + 'static,
    Fut: Future<Output = R> + 'static,
    F: FnOnce() -> Fut + Send + 'static,
{
    spec.validate()?;
    let core = spec.core_index;
    require_locked_memory(core)?;
    start_thread();
    let heartbeat = Arc::new(Heartbeat::default());
    let pulse = heartbeat.clone();
    let (ready, readied) = sync_channel::<Result<(), StartError>>(1);
    let thread_name = spec.name.clone();
    let join = builder(&spec)
        .spawn(move || run_core(spec, pulse, ready, make))
        .map_err(|error| StartError::from_glommio(core, error))?;
    match wait_until_ready(&readied, &thread_name) {
        Ok(Ok(())) => {}
        Ok(Err(error)) => {
            // The executor ends by itself right after this message.
            drop(join.join());
            return Err(error);
        }
        Err(RecvTimeoutError::Timeout) => {
            return Err(StartError::TimedOut {
                core,
                seconds: START_TIMEOUT.as_secs(),
            });
        }
        // `spawn` succeeds even when the executor cannot be made; only joining tells why.
        Err(RecvTimeoutError::Disconnected) => {
            return Err(match join.join() {
                Err(error) => StartError::from_glommio(core, error),
                Ok(_) => StartError::Executor {
                    core,
                    cause: "it ended at once".to_owned(),
                },
            });
        }
    }
    Ok(CoreHandle {
        core,
        heartbeat,
        join,
    })
}

/// What the core says of its start. One that stays silent may sleep over it, see [`super::nudge`].
fn wait_until_ready(
    readied: &Receiver<Result<(), StartError>>,
    thread_name: &str,
) -> Result<Result<(), StartError>, RecvTimeoutError> {
    let deadline = Instant::now() + START_TIMEOUT;
    loop {
        match readied.recv_timeout(START_PATIENCE) {
            Err(RecvTimeoutError::Timeout) if Instant::now() < deadline => {
                nudge(thread_name);
            }
            said => return said,
        }
    }
}

/// glommio refuses by itself, but in a shape that cannot be told from other failures.
fn require_locked_memory(core: usize) -> Result<(), StartError> {
    match memlock::limit_bytes() {
        Some(current_bytes) if current_bytes < EXECUTOR_MINIMUM_BYTES => {
            Err(StartError::LockedMemory {
                core,
                current_bytes,
                needed_bytes: EXECUTOR_MINIMUM_BYTES,
            })
        }
        _ => Ok(()),
    }
}

fn builder(spec: &CoreSpec) -> LocalExecutorBuilder {
    let placement = spec.cpu.map_or(Placement::Unbound, Placement::Fixed);
    let builder = LocalExecutorBuilder::new(placement)
        .name(&spec.name)
        .io_memory(spec.io_memory_bytes)
        .ring_depth(spec.ring_depth)
        .preempt_timer(Duration::from_millis(spec.preempt_ms));
    if spec.spin_us == 0 {
        builder
    } else {
        builder.spin_before_park(Duration::from_micros(spec.spin_us))
    }
}

async fn run_core<R, Fut, F>(
    spec: CoreSpec,
    pulse: Arc<Heartbeat>,
    ready: SyncSender<Result<(), StartError>>,
    make: F,
) -> Option<R>
where
    Fut: Future<Output = R> + 'static,
    F: FnOnce() -> Fut,
{
    let core = spec.core_index;
    mark_core(core);
    // Before anything that waits: the start itself can be slept over.
    let beating = pulse.clone();
    let heartbeat = spawn_local(async move {
        let waker = std::future::poll_fn(|cx| Poll::Ready(cx.waker().clone())).await;
        let _guard = guard(beating.clone(), waker);
        loop {
            beating.beat();
            sleep(HEARTBEAT_PERIOD).await;
        }
    });
    sleep(FIRST_PARK).await;
    if let Some(path) = spec.warm_up_file {
        if let Err(source) = warm_up(&path).await {
            // Fails only when the starter gave up waiting.
            let _ = ready.send(Err(StartError::WarmUp { core, path, source }));
            return None;
        }
    }
    if ready.send(Ok(())).is_err() {
        return None;
    }
    let result = make().await;
    let _: Option<()> = heartbeat.cancel().await;
    pulse.finish();
    Some(result)
}
