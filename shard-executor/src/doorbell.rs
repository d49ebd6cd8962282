//! How one thread wakes the task of another, at most once a batch.
//!
//! Duty: remember whether the receiver sleeps and hold its waker. It does not hold items.
//!
//! Invariant (no lost wake): the receiver writes `parked`, then fences, then looks at its queues;
//! the sender writes the queue, then fences, then reads `parked`. In every interleaving either the
//! receiver sees the item or the sender sees `parked`.

use std::sync::atomic::{fence, AtomicBool, AtomicU64, Ordering};
use std::task::Context;

use atomic_waker::AtomicWaker;

/// Padded so that two receivers' bells never share a cache line (128: adjacent-line prefetch).
#[repr(align(128))]
#[derive(Default)]
pub(crate) struct Doorbell {
    parked: AtomicBool,
    waker: AtomicWaker,
    wakes: AtomicU64,
    wakes_saved: AtomicU64,
}

impl Doorbell {
    /// Sender side, after its items are in the queue: wakes the receiver if it sleeps.
    /// Returns whether a wake was sent.
    pub(crate) fn ring(&self) -> bool {
        fence(Ordering::SeqCst);
        // The plain load keeps the common case (receiver awake) free of a locked instruction.
        if self.parked.load(Ordering::Relaxed) && self.parked.swap(false, Ordering::AcqRel) {
            self.wakes.fetch_add(1, Ordering::Relaxed);
            self.waker.wake();
            true
        } else {
            self.wakes_saved.fetch_add(1, Ordering::Relaxed);
            false
        }
    }

    /// Receiver side: announces sleep. The caller must look at its queues once more afterwards and
    /// call [`Doorbell::unpark`] if it found something.
    pub(crate) fn park(&self, cx: &mut Context<'_>) {
        self.waker.register(cx.waker());
        self.parked.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Receiver side: stays awake after all.
    pub(crate) fn unpark(&self) {
        self.parked.store(false, Ordering::Relaxed);
    }

    /// Wakes sent.
    pub(crate) fn wakes(&self) -> u64 {
        self.wakes.load(Ordering::Relaxed)
    }

    /// Rings that found the receiver awake.
    pub(crate) fn wakes_saved(&self) -> u64 {
        self.wakes_saved.load(Ordering::Relaxed)
    }
}
