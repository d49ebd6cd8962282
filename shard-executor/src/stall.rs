//! Noticing a core whose loop has stopped turning.
//!
//! Duty: every core beats a counter from a timer on its own loop; a control thread looks at the
//! counters and reports cores that fell silent and cores that came back. It neither interrupts nor
//! restarts anything: a core inside a long computation and one stuck in the kernel look the same.
//!
//! Invariants: [`StallWatch`] has no clock (time is an argument); each stall gives exactly one
//! `Stalled` and, if it ends, one `Recovered` event.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{sync_channel, RecvTimeoutError, SyncSender};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The pulse of one core.
#[repr(align(128))]
#[derive(Debug, Default)]
pub struct Heartbeat {
    beats: AtomicU64,
    finished: AtomicBool,
}

impl Heartbeat {
    /// The loop turned once more.
    pub fn beat(&self) {
        self.beats.fetch_add(1, Ordering::Relaxed);
    }

    /// The core ended in an orderly way; its silence is not a stall.
    pub fn finish(&self) {
        self.finished.store(true, Ordering::Relaxed);
    }

    /// Turns so far.
    pub fn beats(&self) -> u64 {
        self.beats.load(Ordering::Relaxed)
    }

    fn is_finished(&self) -> bool {
        self.finished.load(Ordering::Relaxed)
    }
}

/// What the watch saw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StallEvent {
    /// The core has not turned for longer than the threshold.
    Stalled {
        /// The silent core.
        core: usize,
        /// How long it has been silent, as far as seen.
        silent_for: Duration,
    },
    /// A stalled core turns again.
    Recovered {
        /// The core.
        core: usize,
        /// How long it was silent, as far as seen.
        silent_for: Duration,
    },
}

struct Watched {
    core: usize,
    heartbeat: Arc<Heartbeat>,
    last_beats: u64,
    last_change: Instant,
    stalled: bool,
}

/// The decision part of stall detection.
pub struct StallWatch {
    threshold: Duration,
    watched: Vec<Watched>,
}

impl StallWatch {
    /// Watches the given cores; they are taken to be alive at `now`.
    pub fn new(
        threshold: Duration,
        now: Instant,
        cores: impl IntoIterator<Item = (usize, Arc<Heartbeat>)>,
    ) -> Self {
        let watched = cores
            .into_iter()
            .map(|(core, heartbeat)| Watched {
                core,
                last_beats: heartbeat.beats(),
                heartbeat,
                last_change: now,
                stalled: false,
            })
            .collect();
        Self { threshold, watched }
    }

    /// Looks at every core once and reports what changed.
    pub fn on_tick(&mut self, now: Instant, mut on_event: impl FnMut(StallEvent)) {
        for watched in &mut self.watched {
            if let Some(event) = watched.on_tick(now, self.threshold) {
                on_event(event);
            }
        }
    }

    /// Cores stalled at the last look.
    pub fn stalled(&self) -> impl Iterator<Item = usize> + '_ {
        self.watched.iter().filter(|w| w.stalled).map(|w| w.core)
    }
}

impl Watched {
    fn on_tick(&mut self, now: Instant, threshold: Duration) -> Option<StallEvent> {
        let silent_for = now.saturating_duration_since(self.last_change);
        let beats = self.heartbeat.beats();
        if beats != self.last_beats || self.heartbeat.is_finished() {
            self.last_beats = beats;
            self.last_change = now;
            return std::mem::take(&mut self.stalled).then_some(StallEvent::Recovered {
                core: self.core,
                silent_for,
            });
        }
        if silent_for > threshold && !self.stalled {
            self.stalled = true;
            return Some(StallEvent::Stalled {
                core: self.core,
                silent_for,
            });
        }
        None
    }
}

/// A control thread that runs a [`StallWatch`].
pub struct StallMonitor {
    stop: SyncSender<()>,
    thread: Option<JoinHandle<()>>,
    stalls: Arc<AtomicU64>,
}

impl StallMonitor {
    /// Starts the thread; it looks four times a threshold and hands every event to `on_event`
    /// after logging it.
    pub fn start(
        threshold: Duration,
        cores: Vec<(usize, Arc<Heartbeat>)>,
        mut on_event: impl FnMut(StallEvent) + Send + 'static,
    ) -> std::io::Result<Self> {
        let (stop, stopped) = sync_channel::<()>(1);
        let stalls = Arc::new(AtomicU64::new(0));
        let counted = stalls.clone();
        let period = (threshold / 4).max(Duration::from_millis(1));
        let thread = std::thread::Builder::new()
            .name("stall-monitor".into())
            .spawn(move || {
                let mut watch = StallWatch::new(threshold, Instant::now(), cores);
                while stopped.recv_timeout(period) == Err(RecvTimeoutError::Timeout) {
                    watch.on_tick(Instant::now(), |event| {
                        log(event, &counted);
                        on_event(event);
                    });
                }
            })?;
        Ok(Self {
            stop,
            thread: Some(thread),
            stalls,
        })
    }

    /// Stalls seen so far.
    pub fn stalls(&self) -> u64 {
        self.stalls.load(Ordering::Relaxed)
    }
}

fn log(event: StallEvent, stalls: &AtomicU64) {
    match event {
        StallEvent::Stalled { core, silent_for } => {
            stalls.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(
                core,
                silent_ms = silent_for.as_millis() as u64,
                "core stalled"
            );
        }
        StallEvent::Recovered { core, silent_for } => {
            tracing::info!(
                core,
                silent_ms = silent_for.as_millis() as u64,
                "core turns again"
            );
        }
    }
}

impl Drop for StallMonitor {
    fn drop(&mut self) {
        // Fails only when the thread has ended already.
        let _ = self.stop.try_send(());
        if let Some(thread) = self.thread.take() {
            if thread.join().is_err() {
                tracing::error!("the stall monitor panicked");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const THRESHOLD: Duration = Duration::from_millis(100);

    fn tick(watch: &mut StallWatch, now: Instant) -> Vec<StallEvent> {
        let mut events = Vec::new();
        watch.on_tick(now, |event| events.push(event));
        events
    }

    #[test]
    fn one_event_a_stall_and_one_a_recovery() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let (a, b) = (
            Arc::new(Heartbeat::default()),
            Arc::new(Heartbeat::default()),
        );
        let mut watch = StallWatch::new(THRESHOLD, start, [(0, a.clone()), (7, b.clone())]);
        a.beat();
        assert_eq!(tick(&mut watch, at(90)), []);
        let silent_for = Duration::from_millis(110);
        assert_eq!(
            tick(&mut watch, at(110)),
            [StallEvent::Stalled {
                core: 7,
                silent_for
            }]
        );
        a.beat();
        assert_eq!(tick(&mut watch, at(180)), [], "reported once");
        assert_eq!(watch.stalled().collect::<Vec<_>>(), [7]);
        b.beat();
        a.beat();
        let silent_for = Duration::from_millis(250);
        assert_eq!(
            tick(&mut watch, at(250)),
            [StallEvent::Recovered {
                core: 7,
                silent_for
            }]
        );
        assert_eq!(watch.stalled().count(), 0);
    }

    #[test]
    fn a_finished_core_is_not_stalled() {
        let start = Instant::now();
        let heart = Arc::new(Heartbeat::default());
        let mut watch = StallWatch::new(THRESHOLD, start, [(0, heart.clone())]);
        heart.finish();
        assert_eq!(tick(&mut watch, start + Duration::from_secs(10)), []);
    }

    #[test]
    fn the_monitor_thread_sees_a_silent_core() {
        let heart = Arc::new(Heartbeat::default());
        let (tx, rx) = sync_channel(8);
        let monitor = StallMonitor::start(Duration::from_millis(20), vec![(3, heart)], move |e| {
            let _ = tx.try_send(e);
        })
        .expect("thread starts");
        let event = rx.recv_timeout(Duration::from_secs(5)).expect("an event");
        assert!(matches!(event, StallEvent::Stalled { core: 3, .. }));
        assert_eq!(monitor.stalls(), 1);
    }
}
