//! From control threads to a core: many senders, one receiving task.
//!
//! Duty: carry commands (stop, new catalog, new keys, status questions) from ordinary threads into
//! an executor. Not for the data path between cores: that is [`crate::mesh`].
//!
//! Invariants: bounded; a full or closed inbox hands the item back; every accepted item wakes the
//! receiver if it sleeps.

use std::future::poll_fn;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::task::{Context, Poll};

use crossbeam_channel::{bounded, Receiver, Sender, TryRecvError, TrySendError};

use crate::doorbell::Doorbell;

#[derive(Default)]
struct Shared {
    bell: Doorbell,
    sent: AtomicU64,
    full: AtomicU64,
}

/// The item could not be placed; it is handed back.
#[derive(Debug, thiserror::Error)]
#[error("the core's inbox is {}", if *.closed { "closed" } else { "full" })]
pub struct InboxFull<T> {
    /// The item that was not sent.
    pub value: T,
    /// The receiving core is gone; a retry is pointless.
    pub closed: bool,
}

/// Figures of one inbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InboxCounters {
    /// Items accepted.
    pub sent: u64,
    /// Items handed back because the inbox was full or closed.
    pub full: u64,
    /// Wakes sent to a sleeping receiver.
    pub wakes: u64,
}

/// Rings when dropped: the receiver may be waiting for an item that can no longer come.
struct RingOnDrop(Arc<Shared>);

impl Drop for RingOnDrop {
    fn drop(&mut self) {
        self.0.bell.ring();
    }
}

/// Sending half: cloneable, usable from any thread.
pub struct InboxSender<T> {
    queue: Sender<T>,
    // Declared after the queue, so dropped after it: rung earlier, the receiver could look while
    // the queue is still open and sleep again for good.
    shared: RingOnDrop,
}

impl<T> Clone for InboxSender<T> {
    fn clone(&self) -> Self {
        Self {
            queue: self.queue.clone(),
            shared: RingOnDrop(self.shared.0.clone()),
        }
    }
}

/// Receiving half: moved into the core that owns it.
pub struct Inbox<T> {
    queue: Receiver<T>,
    shared: Arc<Shared>,
}

/// A new inbox that holds at most `capacity` items (at least one).
pub fn inbox<T: Send>(capacity: usize) -> (InboxSender<T>, Inbox<T>) {
    let (tx, rx) = bounded(capacity.max(1));
    let shared = Arc::new(Shared::default());
    (
        InboxSender {
            queue: tx,
            shared: RingOnDrop(shared.clone()),
        },
        Inbox { queue: rx, shared },
    )
}

impl<T> InboxSender<T> {
    /// Places one item and wakes the core if it sleeps; never blocks.
    pub fn try_send(&self, value: T) -> Result<(), InboxFull<T>> {
        match self.queue.try_send(value) {
            Ok(()) => {
                self.shared.0.sent.fetch_add(1, Ordering::Relaxed);
                self.shared.0.bell.ring();
                Ok(())
            }
            Err(error) => {
                self.shared.0.full.fetch_add(1, Ordering::Relaxed);
                let (value, closed) = match error {
                    TrySendError::Full(value) => (value, false),
                    TrySendError::Disconnected(value) => (value, true),
                };
                Err(InboxFull { value, closed })
            }
        }
    }

    /// Figures so far.
    pub fn counters(&self) -> InboxCounters {
        InboxCounters {
            sent: self.shared.0.sent.load(Ordering::Relaxed),
            full: self.shared.0.full.load(Ordering::Relaxed),
            wakes: self.shared.0.bell.wakes(),
        }
    }
}

impl<T> Inbox<T> {
    /// The next item, if one is there.
    pub fn try_recv(&mut self) -> Option<T> {
        self.queue.try_recv().ok()
    }

    /// Ready while an item is there; otherwise registers the task to be woken.
    ///
    /// A closed inbox (no sender left) never becomes ready: a core with nobody to command it goes
    /// on serving.
    pub fn poll_readable(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if !self.queue.is_empty() {
            return Poll::Ready(());
        }
        self.shared.bell.park(cx);
        if self.queue.is_empty() {
            return Poll::Pending;
        }
        self.shared.bell.unpark();
        Poll::Ready(())
    }

    /// Waits for the next item; `None` when every sender is gone and the inbox is empty.
    pub async fn recv(&mut self) -> Option<T> {
        poll_fn(|cx| self.poll_recv(cx)).await
    }

    fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Option<T>> {
        for look in 0..2 {
            match self.queue.try_recv() {
                Ok(value) => {
                    self.shared.bell.unpark();
                    return Poll::Ready(Some(value));
                }
                Err(TryRecvError::Disconnected) => return Poll::Ready(None),
                Err(TryRecvError::Empty) if look == 0 => self.shared.bell.park(cx),
                Err(TryRecvError::Empty) => {}
            }
        }
        Poll::Pending
    }

    /// Items waiting now.
    pub fn depth(&self) -> usize {
        self.queue.len()
    }
}
