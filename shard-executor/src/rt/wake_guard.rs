//! Waking executors that went to sleep with work queued.
//!
//! glommio 0.9 arms its time-slice timer before it runs tasks, and when the timer has fired by the time
//! it looks (the thread lost its CPU for a slice in between), it runs none and goes to sleep as if there
//! were none. If every timer of the core has fired too, because the tasks they belong to are among those
//! not run, nothing wakes it: the heartbeat timer does not help against losing the heartbeat itself. On a
//! contended CPU this happens within minutes.
//!
//! Duty: one thread a process looks at the heartbeat of every core and wakes a core whose heartbeat has
//! not moved since the last look. A wake from another thread goes through the executor's eventfd, so it
//! ends the sleep; to a core that is merely busy it costs one task poll.
//!
//! Invariant: a waker is dropped on its own core's thread, never here.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::Waker;
use std::time::Duration;

use super::core::HEARTBEAT_PERIOD;
use crate::stall::Heartbeat;

/// A heartbeat that did not move for this long is pushed; several beats, so that an idle core never is.
const LOOK_PERIOD: Duration = Duration::from_millis(4 * HEARTBEAT_PERIOD.as_millis() as u64);

struct Guarded {
    heartbeat: Arc<Heartbeat>,
    /// Taken out by the core before it ends.
    waker: Mutex<Option<Waker>>,
    last_beats: AtomicU64,
}

/// Keeps a core guarded; dropped on the core's thread when it ends.
pub(super) struct WakeGuard(Arc<Guarded>);

static GUARDED: Mutex<Vec<Arc<Guarded>>> = Mutex::new(Vec::new());
static WOKEN: AtomicU64 = AtomicU64::new(0);

/// How often a core of this process had to be woken because its heartbeat stood still. Busy cores count
/// as well.
pub fn guard_wakes() -> u64 {
    WOKEN.load(Ordering::Relaxed)
}

/// Guards the calling core; `waker` is that of a task of it which may be polled at any time.
pub(super) fn guard(heartbeat: Arc<Heartbeat>, waker: Waker) -> WakeGuard {
    let guarded = Arc::new(Guarded {
        heartbeat,
        waker: Mutex::new(Some(waker)),
        last_beats: AtomicU64::new(0),
    });
    lock(&GUARDED).push(Arc::clone(&guarded));
    WakeGuard(guarded)
}

impl Drop for WakeGuard {
    fn drop(&mut self) {
        lock(&GUARDED).retain(|guarded| !Arc::ptr_eq(guarded, &self.0));
        let waker = lock(&self.0.waker).take();
        drop(waker);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts the thread, once a process. Called from a control thread: it inherits the CPUs it may use.
pub(super) fn start_thread() {
    static THREAD: OnceLock<bool> = OnceLock::new();
    THREAD.get_or_init(|| {
        let started = std::thread::Builder::new()
            .name("wake-guard".into())
            .spawn(|| loop {
                std::thread::sleep(LOOK_PERIOD);
                look();
            });
        if let Err(error) = &started {
            tracing::error!(%error, "no thread to guard executors: a lost wake may last");
        }
        started.is_ok()
    });
}

fn look() {
    let guarded = lock(&GUARDED).clone();
    for core in guarded {
        let beats = core.heartbeat.beats();
        if core.last_beats.swap(beats, Ordering::Relaxed) == beats {
            if let Some(waker) = lock(&core.waker).as_ref() {
                WOKEN.fetch_add(1, Ordering::Relaxed);
                waker.wake_by_ref();
            }
        }
    }
}
