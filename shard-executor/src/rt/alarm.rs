//! One re-settable deadline.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;

use glommio::timer::Timer;

/// A deadline that a loop re-sets on every turn, made cheap for that: moving it later costs
/// nothing (the armed timer fires early once and is armed again), only moving it earlier touches
/// the executor's timers.
#[derive(Default)]
pub struct Alarm {
    deadline: Option<Instant>,
    armed: Option<(Instant, Timer)>,
}

impl Alarm {
    /// An alarm that is not set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets, moves or (with `None`) removes the deadline.
    pub fn set(&mut self, deadline: Option<Instant>) {
        self.deadline = deadline;
    }

    /// The deadline, if set.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Ready, and unset, when the deadline has passed; otherwise registers the task.
    /// Pending for ever while no deadline is set.
    pub fn poll_expired(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(deadline) = self.deadline else {
            return Poll::Pending;
        };
        loop {
            let now = Instant::now();
            if deadline <= now {
                self.deadline = None;
                return Poll::Ready(());
            }
            if !matches!(&self.armed, Some((when, _)) if *when <= deadline) {
                self.armed = Some((deadline, Timer::new(deadline - now)));
            }
            let Some((_, timer)) = &mut self.armed else {
                unreachable!("armed just above");
            };
            match Pin::new(timer).poll(cx) {
                Poll::Pending => return Poll::Pending,
                // It fired for an earlier deadline: arm again for the present one.
                Poll::Ready(_) => self.armed = None,
            }
        }
    }
}
