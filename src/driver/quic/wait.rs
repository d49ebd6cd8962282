//! Waiting for a pump's next input: datagrams, a timer, or room in a send buffer.
//!
//! Invariants: readiness and timer futures live from turn to turn, so that a turn does not cost a
//! cancellation in the ring; a timer that fires early causes an idle turn, never a late one.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;

use super::pump::Pump;

type Timer = Pin<Box<dyn Future<Output = ()>>>;

/// The one timer of a pump, kept while it is early enough.
#[derive(Default)]
pub(super) struct WaitTimer {
    armed: Option<(Instant, Timer)>,
}

impl WaitTimer {
    fn poll_until(&mut self, at: Instant, cx: &mut Context<'_>) -> Poll<()> {
        let early_enough = matches!(&self.armed, Some((armed, _)) if *armed <= at);
        if !early_enough {
            self.armed = Some((at, Box::pin(shard_executor::rt::sleep_until(at))));
        }
        if let Some((_, timer)) = &mut self.armed {
            if timer.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
        }
        self.armed = None;
        Poll::Ready(())
    }
}

impl Pump {
    /// When [`poll_io`](Self::poll_io) or [`flush`](Self::flush) has to be called next even if nothing
    /// arrives.
    pub fn next_timeout(&self) -> Option<Instant> {
        let retry = self.endpoints.iter().filter_map(|e| e.retry_at).min();
        match (self.conns.next_deadline(), retry) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// Whether a turn would do something at once: events, input or output left over by a bound.
    pub fn has_work(&self) -> bool {
        !self.events.is_empty()
            || !self.dirty.is_empty()
            || !self.touched.is_empty()
            || self.endpoints.iter().any(|e| e.more_to_receive)
    }

    /// Ready when the next turn has something to do.
    pub fn poll_wait(&mut self, cx: &mut Context<'_>, now: Instant) -> Poll<()> {
        if self.has_work() {
            return Poll::Ready(());
        }
        let mut ready = false;
        for endpoint in &mut self.endpoints {
            match endpoint.outbox.io.poll_readable(cx) {
                Poll::Pending => {}
                Poll::Ready(Ok(())) => ready = true,
                Poll::Ready(Err(error)) => {
                    self.counters.receive_errors += 1;
                    tracing::debug!(%error, "cannot wait for datagrams");
                    ready = true;
                }
            }
        }
        if let Some(at) = self.next_timeout() {
            if at <= now || self.timer.poll_until(at, cx).is_ready() {
                ready = true;
            }
        }
        if ready {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    }
}
