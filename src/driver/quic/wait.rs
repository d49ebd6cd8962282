//! Waiting for a pump's next input: datagrams, a timer, or room in a send buffer.
//!
//! Invariant: readiness and timer futures live from turn to turn, so that a turn does not cost a
//! cancellation in the ring.

use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::pump::Pump;

/// A good budget for [`Pump::spin`]: what a wait in the ring and the wake cost both sides of a round trip.
pub const SPIN_BUDGET: Duration = Duration::from_micros(50);

/// Whether spinning has paid lately, and for how long to look next.
///
/// Two ends that both sleep answer each other later than the budget, so each for itself would find that
/// looking does not pay. Therefore a wait now and then looks for longer: when that finds something, the
/// next ones do so too, and the other end, which now gets its next request at once, finds out with its own
/// short trials. Trials that lead to nothing become rarer.
pub(super) struct SpinHistory {
    /// Twice the hits within the budget less the misses, within `0..=MOST`.
    score: u8,
    waits: u32,
    /// Waits until a long look is tried, and between two.
    long_in: u32,
    long_every: u32,
    /// Long looks left of a trial under way.
    trial_left: u8,
    /// The last look came to nothing in time. One end that is late makes the other one late too; a longer
    /// look ends that.
    is_recovering: bool,
}

impl Default for SpinHistory {
    fn default() -> Self {
        Self {
            score: 0,
            waits: 0,
            long_in: Self::LONG_EVERY,
            long_every: Self::LONG_EVERY,
            trial_left: 0,
            is_recovering: false,
        }
    }
}

impl SpinHistory {
    const MOST: u8 = 8;
    /// With a score of zero, one wait in so many looks for the budget.
    const SHORT_EVERY: u32 = 8;
    /// And one in so many, at first and at last, for longer.
    const LONG_EVERY: u32 = 64;
    const LONG_EVERY_MOST: u32 = 4096;
    const LONG_FACTOR: u32 = 4;
    /// Waits in a row that look for longer, so that the other end's short trials fall among them.
    const TRIAL: u8 = 2 * Self::SHORT_EVERY as u8;

    /// How long to look before this wait.
    fn look_for(&mut self, budget: Duration) -> Duration {
        if self.score > 0 {
            return match self.is_recovering {
                true => budget * Self::LONG_FACTOR,
                false => budget,
            };
        }
        self.waits = self.waits.wrapping_add(1);
        if self.trial_left == 0 {
            self.long_in -= 1;
            if self.long_in == 0 {
                self.trial_left = Self::TRIAL;
            }
        }
        if self.trial_left > 0 {
            budget * Self::LONG_FACTOR
        } else if self.waits % Self::SHORT_EVERY == 0 {
            budget
        } else {
            Duration::ZERO
        }
    }

    /// What the look came to: something after a time, or nothing.
    fn record(&mut self, found_after: Option<Duration>, budget: Duration) {
        match found_after {
            Some(after) if after <= budget => {
                self.score = (self.score + 2).min(Self::MOST);
                self.is_recovering = false;
                if self.trial_left > 0 {
                    self.long_every = Self::LONG_EVERY;
                    self.end_trial();
                }
            }
            late if self.score > 0 => {
                self.score -= 1;
                // A longer look that found nothing either is not repeated.
                self.is_recovering = self.score > 0 && (late.is_some() || !self.is_recovering);
            }
            Some(_) => {
                self.trial_left = self.trial_left.saturating_sub(1);
                if self.trial_left == 0 {
                    self.give_up_trial();
                }
            }
            None if self.trial_left > 0 => self.give_up_trial(),
            None => {}
        }
    }

    fn give_up_trial(&mut self) {
        self.long_every = (self.long_every * 2).min(Self::LONG_EVERY_MOST);
        self.end_trial();
    }

    fn end_trial(&mut self) {
        self.trial_left = 0;
        self.long_in = self.long_every;
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

    /// Looks for datagrams and for `other_work` for at most `budget` before the caller waits; true when
    /// the next turn has something to do.
    ///
    /// Waiting in the ring and being woken costs 30 to 40 us of CPU on both sides of a round trip, so
    /// looking for about as long ([`SPIN_BUDGET`]) is never much worse and often much better: small echoes
    /// took a quarter of the CPU and a sixth of the time. It looks only while that has paid lately, and
    /// never without a connection: an idle broker sleeps.
    pub fn spin(&mut self, budget: Duration, mut other_work: impl FnMut() -> bool) -> bool {
        if self.has_work() || other_work() {
            return true;
        }
        if budget.is_zero() || self.conns.len() == 0 {
            return false;
        }
        let look_for = self.spin.look_for(budget);
        if look_for.is_zero() {
            return false;
        }
        let start = Instant::now();
        let mut end = start + look_for;
        let timeout = self.next_timeout().filter(|at| *at < end);
        end = timeout.unwrap_or(end);
        let before = self.counters.received_datagrams;
        let mut now = start;
        while now < end {
            for index in 0..self.endpoints.len() {
                self.receive(index, now);
            }
            if self.counters.received_datagrams != before || other_work() {
                self.counters.spin_hits += 1;
                self.spin.record(Some(now - start), budget);
                return true;
            }
            std::hint::spin_loop();
            now = Instant::now();
        }
        // Cut short by a timer, it has shown nothing.
        if timeout.is_none() {
            self.counters.spin_misses += 1;
            self.spin.record(None, budget);
        }
        timeout.is_some()
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

    const BUDGET: Duration = SPIN_BUDGET;
    /// From a datagram sent to its being there.
    const WIRE: Duration = Duration::from_micros(10);
    /// What being woken takes on top.
    const WAKE: Duration = Duration::from_micros(80);

    /// One end of an exchange of single messages.
    enum End {
        Adaptive(SpinHistory),
        Sleeper,
    }

    impl End {
        fn look_for(&mut self) -> Duration {
            match self {
                Self::Adaptive(history) => history.look_for(BUDGET),
                Self::Sleeper => Duration::ZERO,
            }
        }

        fn record(&mut self, look: Duration, waited: Duration) {
            if let (Self::Adaptive(history), false) = (self, look.is_zero()) {
                history.record((waited <= look).then_some(waited), BUDGET);
            }
        }
    }

    /// Two ends send each other `turns` messages, the second thinking in between; the time it takes, and
    /// what the first spent on looks that found nothing.
    fn ping_pong(ends: &mut [End; 2], turns: usize, think: Duration) -> (Duration, Duration) {
        let (mut now, mut wasted) = (Duration::ZERO, Duration::ZERO);
        let mut waits_since = [Duration::ZERO; 2];
        let mut looks = [Duration::ZERO; 2];
        for turn in 0..turns {
            let (from, to) = (turn % 2, (turn + 1) % 2);
            waits_since[from] = now;
            looks[from] = ends[from].look_for();
            let there = now + WIRE;
            let waited = there - waits_since[to];
            let is_found = waited <= looks[to];
            ends[to].record(looks[to], waited);
            if to == 0 && !is_found {
                wasted += looks[0];
            }
            now = there + if is_found { Duration::ZERO } else { WAKE };
            now += if to == 1 { think } else { Duration::ZERO };
        }
        (now, wasted)
    }

    fn adaptive() -> End {
        End::Adaptive(SpinHistory::default())
    }

    #[test]
    fn two_ends_find_each_other_and_stay() {
        let mut ends = [adaptive(), adaptive()];
        let (first, _) = ping_pong(&mut ends, 2_000, Duration::ZERO);
        let (later, _) = ping_pong(&mut ends, 2_000, Duration::ZERO);
        assert!(first < (WIRE + WAKE) * 1_000, "found out late: {first:?}");
        // The first message of a run meets an end that has not begun to look; that is soon made up for.
        assert!(later <= WIRE * 2_000 + WAKE * 4, "{later:?}");
    }

    #[test]
    fn looking_that_never_pays_costs_little() {
        for think in [0, 200, 1_000].map(Duration::from_micros) {
            let mut ends = [adaptive(), End::Sleeper];
            let (took, wasted) = ping_pong(&mut ends, 100_000, think);
            assert!(
                wasted * 20 < took,
                "{wasted:?} of {took:?} at {think:?} between"
            );
        }
    }

    #[test]
    fn a_mix_with_more_hits_than_misses_goes_on() {
        let mut history = SpinHistory::default();
        history.record(Some(WIRE), BUDGET);
        for n in 0..1000 {
            assert!(history.look_for(BUDGET) >= BUDGET, "wait {n}");
            history.record((n % 2 == 0).then_some(WIRE), BUDGET);
        }
    }

    #[test]
    fn without_traffic_worth_it_most_waits_sleep_at_once() {
        let mut history = SpinHistory::default();
        let mut looked = Duration::ZERO;
        for _ in 0..10_000 {
            let look = history.look_for(BUDGET);
            looked += look;
            if !look.is_zero() {
                history.record(None, BUDGET);
            }
        }
        assert!(looked < BUDGET * 10_000 / 7, "{looked:?}");
    }
}
