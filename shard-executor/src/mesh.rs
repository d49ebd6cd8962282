//! The lanes between cores: one bounded queue for every ordered pair.
//!
//! Duty: move owned items from one core to another without locks or waiting. It does not decide
//! what to do with a full lane: the sender gets the item back and must answer for it.
//!
//! Invariants:
//! * Items from one core to another arrive in the order sent, each once.
//! * A lane never holds more than its capacity.
//! * Wakes are batched: [`MeshPort::try_send`] wakes nobody, [`MeshPort::flush_wakes`] sends at
//!   most one wake to each core that got items and sleeps. Call it once at the end of every turn
//!   that sent something.
//!
//! A core also has a lane to itself, so that code which fans out needs no special case; calling a
//! function is cheaper.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::task::{Context, Poll};

use crossbeam_channel::{bounded, Receiver, Sender, TryRecvError, TrySendError};

use crate::doorbell::Doorbell;

/// How many items one lane may deliver before the next lane gets its turn in a drain.
const LANE_QUANTUM: usize = 32;

/// The item could not be placed; it is handed back.
#[derive(Debug, thiserror::Error)]
#[error("the lane to core {to} is {}", if *.closed { "closed" } else { "full" })]
pub struct LaneFull<T> {
    /// The item that was not sent.
    pub value: T,
    /// The core it was meant for.
    pub to: usize,
    /// The receiving core is gone; a retry is pointless.
    pub closed: bool,
}

/// Live counters of one port; written by its core, readable from any thread.
#[derive(Debug, Default)]
pub struct MeshCounters {
    sent: AtomicU64,
    full: AtomicU64,
    received: AtomicU64,
    deepest: AtomicU64,
}

impl MeshCounters {
    /// Items this core placed on lanes.
    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Items handed back to this core because a lane was full or closed.
    pub fn full(&self) -> u64 {
        self.full.load(Ordering::Relaxed)
    }

    /// Items this core took from its lanes.
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// The largest number of items this core ever saw waiting at the start of a drain.
    pub fn deepest(&self) -> u64 {
        self.deepest.load(Ordering::Relaxed)
    }
}

/// Each counter has one writer, its core, so it needs no locked instruction.
fn add(counter: &AtomicU64, count: u64) {
    let value = counter.load(Ordering::Relaxed).wrapping_add(count);
    counter.store(value, Ordering::Relaxed);
}

/// Makes the ports of all cores.
pub struct Mesh<T>(std::marker::PhantomData<T>);

impl<T: Send> Mesh<T> {
    /// Lanes between `cores` cores, each holding at most `lane_capacity` items (at least one);
    /// port `i` of the result belongs to core `i` and is moved into its executor.
    #[allow(clippy::new_ret_no_self)]
    pub fn new(cores: usize, lane_capacity: usize) -> Vec<MeshPort<T>> {
        let bells: Arc<[Doorbell]> = (0..cores).map(|_| Doorbell::default()).collect();
        let mut senders: Vec<Vec<Sender<T>>> = (0..cores).map(|_| Vec::new()).collect();
        let mut receivers: Vec<Vec<Receiver<T>>> = (0..cores).map(|_| Vec::new()).collect();
        for from in senders.iter_mut() {
            for to in receivers.iter_mut() {
                let (tx, rx) = bounded(lane_capacity.max(1));
                from.push(tx);
                to.push(rx);
            }
        }
        senders
            .into_iter()
            .zip(receivers)
            .enumerate()
            .map(|(core, (to, from))| MeshPort {
                core,
                to,
                from,
                bells: bells.clone(),
                unrung: vec![false; cores],
                any_unrung: false,
                next_lane: 0,
                counters: Arc::new(MeshCounters::default()),
            })
            .collect()
    }
}

/// One core's end of every lane. Movable to its core once, then used there only.
pub struct MeshPort<T> {
    core: usize,
    to: Vec<Sender<T>>,
    from: Vec<Receiver<T>>,
    bells: Arc<[Doorbell]>,
    /// Cores that got items since the last `flush_wakes`.
    unrung: Vec<bool>,
    any_unrung: bool,
    next_lane: usize,
    counters: Arc<MeshCounters>,
}

impl<T> MeshPort<T> {
    /// The core this port belongs to.
    pub fn core(&self) -> usize {
        self.core
    }

    /// How many cores the mesh has.
    pub fn cores(&self) -> usize {
        self.to.len()
    }

    /// Places one item on the lane to core `to`; never blocks and wakes nobody yet.
    ///
    /// # Panics
    /// When there is no core `to`: that number never comes from outside the process.
    pub fn try_send(&mut self, to: usize, value: T) -> Result<(), LaneFull<T>> {
        match self.to[to].try_send(value) {
            Ok(()) => {
                add(&self.counters.sent, 1);
                self.unrung[to] = true;
                self.any_unrung = true;
                Ok(())
            }
            Err(error) => {
                add(&self.counters.full, 1);
                let (value, closed) = match error {
                    TrySendError::Full(value) => (value, false),
                    TrySendError::Disconnected(value) => (value, true),
                };
                Err(LaneFull { value, to, closed })
            }
        }
    }

    /// Wakes the sleeping cores that got items since the last call; returns how many were woken.
    pub fn flush_wakes(&mut self) -> usize {
        if !self.any_unrung {
            return 0;
        }
        self.any_unrung = false;
        let mut woken = 0;
        for (unrung, bell) in self.unrung.iter_mut().zip(self.bells.iter()) {
            if std::mem::take(unrung) && bell.ring() {
                woken += 1;
            }
        }
        woken
    }

    /// Takes at most `max` items, handing each to `on_item` with the core it came from.
    ///
    /// Lanes take turns, [`LANE_QUANTUM`] items each, and the first lane changes with every call,
    /// so a busy sender cannot starve a quiet one.
    pub fn drain(&mut self, max: usize, mut on_item: impl FnMut(usize, T)) -> usize {
        self.note_depth();
        let lanes = self.from.len();
        let first = self.next_lane;
        self.next_lane = (first + 1) % lanes;
        let mut taken = 0;
        loop {
            let before = taken;
            for step in 0..lanes {
                let lane = (first + step) % lanes;
                let quota = LANE_QUANTUM.min(max - taken);
                taken += Self::drain_lane(&self.from[lane], lane, quota, &mut on_item);
            }
            if taken == before || taken == max {
                break;
            }
        }
        add(&self.counters.received, taken as u64);
        taken
    }

    fn note_depth(&self) {
        let depth = self.depth() as u64;
        if depth > self.counters.deepest() {
            self.counters.deepest.store(depth, Ordering::Relaxed);
        }
    }

    fn drain_lane(
        lane: &Receiver<T>,
        from: usize,
        quota: usize,
        on_item: &mut impl FnMut(usize, T),
    ) -> usize {
        for taken in 0..quota {
            match lane.try_recv() {
                Ok(value) => on_item(from, value),
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => return taken,
            }
        }
        quota
    }

    /// Ready while an item waits; otherwise registers the task for the next wake. The polling task
    /// should live as long as the core, and be the only one that polls this port.
    pub fn poll_readable(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.is_readable() {
            return Poll::Ready(());
        }
        let bell = &self.bells[self.core];
        bell.park(cx);
        if self.is_readable() {
            bell.unpark();
            return Poll::Ready(());
        }
        Poll::Pending
    }

    /// Whether an item waits for this core.
    pub fn is_readable(&self) -> bool {
        self.from.iter().any(|lane| !lane.is_empty())
    }

    /// Items waiting for this core now.
    pub fn depth(&self) -> usize {
        self.from.iter().map(Receiver::len).sum()
    }

    /// Items waiting on the lane from this core to `to`.
    pub fn depth_to(&self, to: usize) -> usize {
        self.to[to].len()
    }

    /// The live counters of this port.
    pub fn counters(&self) -> Arc<MeshCounters> {
        self.counters.clone()
    }

    /// Wakes this core received, and rings it was spared because it was awake.
    pub fn wakes_received(&self) -> (u64, u64) {
        let bell = &self.bells[self.core];
        (bell.wakes(), bell.wakes_saved())
    }
}

impl<T> Drop for MeshPort<T> {
    fn drop(&mut self) {
        // Items already placed must be seen even when the sender ends without a last flush.
        self.flush_wakes();
    }
}
