//! Waiting for a pump's next input: datagrams, a timer, or room in a send buffer.
//!
//! Invariant: readiness and timer futures live from turn to turn, so that a turn does not cost a
//! cancellation in the ring.

use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::pump::Pump;

/// A good budget for [`Pump::spin`]: what a wait in the ring and the wake cost both sides of a round trip.
pub const SPIN_BUDGET: Duration = Duration::from_micros(50);

/// Whether spinning has paid lately.
#[derive(Default)]
pub(super) struct SpinHistory {
    /// Hits less misses, within `0..=MOST`.
    score: u8,
    waits_since_trial: u8,
}

impl SpinHistory {
    const MOST: u8 = 8;
    /// With a score of zero, every so many waits one spin is tried.
    const TRIAL_EVERY: u8 = 32;

    fn should_spin(&mut self) -> bool {
        if self.score > 0 {
            return true;
        }
        self.waits_since_trial += 1;
        if self.waits_since_trial < Self::TRIAL_EVERY {
            return false;
        }
        self.waits_since_trial = 0;
        true
    }

    fn record(&mut self, hit: bool) {
        self.score = if hit {
            (self.score + 2).min(Self::MOST)
        } else {
            self.score.saturating_sub(1)
        };
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

    /// Looks for datagrams for at most `budget` before the caller waits; true when the next turn has
    /// something to do. Ends early when `other_work` says so.
    ///
    /// Waiting in the ring and being woken costs 30 to 40 us of CPU on both sides of a round trip, so
    /// looking for about as long ([`SPIN_BUDGET`]) is never much worse and often much better: small echoes
    /// took a quarter of the CPU and a sixth of the time. It looks only while that has paid lately.
    pub fn spin(&mut self, budget: Duration, mut other_work: impl FnMut() -> bool) -> bool {
        if self.has_work() {
            return true;
        }
        if budget.is_zero() || self.conns.len() == 0 || !self.spin.should_spin() {
            return false;
        }
        let start = Instant::now();
        let mut end = start + budget;
        if let Some(at) = self.next_timeout() {
            end = end.min(at);
        }
        let before = self.counters.received_datagrams;
        let mut now = start;
        while now < end && !other_work() {
            for index in 0..self.endpoints.len() {
                self.receive(index, now);
            }
            if self.counters.received_datagrams != before {
                self.counters.spin_hits += 1;
                self.spin.record(true);
                return true;
            }
            std::hint::spin_loop();
            now = Instant::now();
        }
        if now >= end {
            self.counters.spin_misses += 1;
            self.spin.record(false);
        }
        false
    }

    /// Ready when the next turn has something to do. Needs an executor of `shard_executor::rt`.
    pub fn poll_wait(&mut self, cx: &mut Context<'_>, now: Instant) -> Poll<()> {
        if self.has_work() {
            return Poll::Ready(());
        }
        let deadline = self.next_timeout();
        if deadline.is_some_and(|at| at <= now) {
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
        self.alarm.set(deadline);
        if ready || self.alarm.poll_expired(cx).is_ready() {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spins_of(history: &mut SpinHistory, waits: usize, hit: bool) -> usize {
        (0..waits)
            .filter(|_| {
                let spins = history.should_spin();
                if spins {
                    history.record(hit);
                }
                spins
            })
            .count()
    }

    #[test]
    fn spinning_stops_when_it_does_not_pay_and_comes_back_when_it_does() {
        let mut history = SpinHistory::default();
        assert_eq!(
            spins_of(&mut history, 320, false),
            10,
            "a trial in 32 waits"
        );
        assert!(
            spins_of(&mut history, 200, true) > 150,
            "found out within 32 waits"
        );
        let wasted = spins_of(&mut history, 320, false);
        assert!(wasted <= 8 + 10, "{wasted}");
    }

    #[test]
    fn a_mix_with_more_hits_than_misses_goes_on() {
        let mut history = SpinHistory::default();
        history.record(true);
        for n in 0..1000 {
            assert!(history.should_spin(), "wait {n}");
            history.record(n % 2 == 0);
        }
    }
}
