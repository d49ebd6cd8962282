//! A level-triggered event inside one core.
//!
//! Duty: let one part of a core tell the core's task that there is something to do. It crosses no
//! thread (see [`crate::inbox`] for that) and carries no value.
//!
//! Invariants: `set` is remembered until [`Signal::take`], however often it is called and whether
//! or not anyone waits; one task waits at a time, the last one to poll is the one that is woken.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

#[derive(Default)]
struct State {
    set: Cell<bool>,
    waker: RefCell<Option<Waker>>,
    sets: Cell<u64>,
}

/// A cloneable handle on one event of one core. All clones are the same event.
#[derive(Clone, Default)]
pub struct Signal(Rc<State>);

impl Signal {
    /// A signal that is not set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the event and wakes the waiting task. Setting a set signal again costs no wake.
    pub fn set(&self) {
        self.0.sets.set(self.0.sets.get() + 1);
        if self.0.set.replace(true) {
            return;
        }
        // Taken out first: waking may run code that polls this signal again.
        let waker = self.0.waker.borrow_mut().take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Whether the event is set; does not clear it.
    pub fn is_set(&self) -> bool {
        self.0.set.get()
    }

    /// Clears the event and returns whether it was set.
    pub fn take(&self) -> bool {
        self.0.set.replace(false)
    }

    /// Ready while the event is set (it is not cleared); otherwise registers the task.
    pub fn poll_wait(&self, cx: &mut Context<'_>) -> Poll<()> {
        if self.0.set.get() {
            return Poll::Ready(());
        }
        let mut slot = self.0.waker.borrow_mut();
        match slot.as_mut() {
            Some(waker) => waker.clone_from(cx.waker()),
            None => *slot = Some(cx.waker().clone()),
        }
        Poll::Pending
    }

    /// Waits until the event is set, then clears it.
    pub async fn wait_take(&self) {
        poll_fn(|cx| self.poll_wait(cx)).await;
        self.take();
    }

    /// How often [`Signal::set`] was called.
    pub fn sets(&self) -> u64 {
        self.0.sets.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::Arc;
    use std::task::Wake;

    #[derive(Default)]
    struct CountWakes(AtomicUsize);

    impl Wake for CountWakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn set_before_wait_is_not_lost() {
        let signal = Signal::new();
        signal.set();
        let waker = Waker::from(Arc::new(CountWakes::default()));
        let mut cx = Context::from_waker(&waker);
        assert!(signal.poll_wait(&mut cx).is_ready());
        assert!(signal.poll_wait(&mut cx).is_ready(), "level-triggered");
        assert!(signal.take());
        assert!(!signal.take());
        assert!(signal.poll_wait(&mut cx).is_pending());
    }

    #[test]
    fn one_wake_for_many_sets_and_only_the_last_waiter() {
        let signal = Signal::new();
        let (first, second) = (
            Arc::new(CountWakes::default()),
            Arc::new(CountWakes::default()),
        );
        for count in [&first, &second] {
            let waker = Waker::from(count.clone());
            assert!(signal
                .poll_wait(&mut Context::from_waker(&waker))
                .is_pending());
        }
        let twin = signal.clone();
        twin.set();
        twin.set();
        assert_eq!(first.0.load(Ordering::Relaxed), 0);
        assert_eq!(second.0.load(Ordering::Relaxed), 1);
        assert_eq!(signal.sets(), 2);
        assert!(signal.is_set());
    }
}
