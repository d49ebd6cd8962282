//! When a peer that could not be reached may be dialled again.
//!
//! Two schedules: a short one for passing faults, and a long one for a peer that refuses this
//! broker's identity, where dialling again soon cannot help. Jitter comes from a seed, because
//! every broker notices the same restart at the same moment.
//!
//! Invariant: the failure count falls back to zero only after a link has stayed up for
//! [`BackoffLimits::stable_after`]; a peer that accepts and drops keeps its long waits.

use std::time::Duration;

use super::MonoTime;

/// The bounds of the schedules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackoffLimits {
    /// First ceiling of the short schedule; doubles with each failure.
    pub base: Duration,
    /// Highest ceiling of the short schedule.
    pub max: Duration,
    /// First ceiling of the long schedule.
    pub refused_base: Duration,
    /// Highest ceiling of the long schedule.
    pub refused_max: Duration,
    /// How long a link must stay up to count as a recovery.
    pub stable_after: Duration,
}

impl Default for BackoffLimits {
    fn default() -> Self {
        Self {
            base: Duration::from_millis(50),
            max: Duration::from_secs(5),
            refused_base: Duration::from_secs(15),
            refused_max: Duration::from_secs(300),
            stable_after: Duration::from_secs(5),
        }
    }
}

/// What kind of failure a dial ended in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Severity {
    /// A timeout, a refused port, a lost connection: try again soon.
    Passing,
    /// The peer refused our certificate or our name: only an operator can heal that.
    Refused,
}

/// The schedule of one link.
#[derive(Debug, Clone)]
pub struct Backoff {
    limits: BackoffLimits,
    failures: u32,
    refusals: u32,
    random: u64,
}

impl Backoff {
    /// A schedule with no failure yet. Equal seeds give equal schedules.
    pub fn new(limits: BackoffLimits, seed: u64) -> Self {
        Self {
            limits,
            failures: 0,
            refusals: 0,
            random: seed,
        }
    }

    /// Records a failure and says when the next dial is allowed.
    pub fn on_failure(&mut self, now: MonoTime, severity: Severity) -> MonoTime {
        match severity {
            Severity::Passing => {
                let ceiling = doubled(self.limits.base, self.limits.max, self.failures);
                self.failures = self.failures.saturating_add(1);
                self.refusals = 0;
                now + self.below(ceiling)
            }
            Severity::Refused => {
                let ceiling = doubled(
                    self.limits.refused_base,
                    self.limits.refused_max,
                    self.refusals,
                );
                self.refusals = self.refusals.saturating_add(1);
                // Half of it is certain: full jitter could redial at once.
                now + ceiling / 2 + self.below(ceiling / 2)
            }
        }
    }

    /// Records the end of a link that was up, and says when the next dial is allowed.
    pub fn on_link_lost(&mut self, now: MonoTime, up_since: MonoTime) -> MonoTime {
        self.on_link_closed(now, up_since);
        self.on_failure(now, Severity::Passing)
    }

    /// Records the orderly end of a link that was up; no wait follows from it.
    pub fn on_link_closed(&mut self, now: MonoTime, up_since: MonoTime) {
        if now.since(up_since) >= self.limits.stable_after {
            self.failures = 0;
            self.refusals = 0;
        }
    }

    /// Starts over: what failed so far concerned another address.
    pub fn forget(&mut self) {
        self.failures = 0;
        self.refusals = 0;
    }

    /// Failures in a row, for status reports.
    pub fn failures(&self) -> u32 {
        self.failures.saturating_add(self.refusals)
    }

    /// A duration in `0 ..= ceiling`, evenly spread.
    fn below(&mut self, ceiling: Duration) -> Duration {
        let micros = u64::try_from(ceiling.as_micros()).unwrap_or(u64::MAX);
        let random = split_mix(&mut self.random);
        let scaled = (u128::from(random) * (u128::from(micros) + 1)) >> 64;
        Duration::from_micros(scaled as u64)
    }
}

fn doubled(base: Duration, max: Duration, times: u32) -> Duration {
    let factor = 1u32.checked_shl(times).unwrap_or(u32::MAX);
    base.saturating_mul(factor).min(max)
}

/// SplitMix64: the next number of a sequence that its seed determines.
pub(super) fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delays(severity: Severity, seed: u64, n: usize) -> Vec<Duration> {
        let mut backoff = Backoff::new(BackoffLimits::default(), seed);
        (0..n)
            .map(|_| backoff.on_failure(MonoTime::ZERO, severity))
            .map(|at| at.since(MonoTime::ZERO))
            .collect()
    }

    #[test]
    fn short_schedule_stays_under_its_doubling_ceiling_and_reaches_it() {
        let mut highest = [Duration::ZERO; 40];
        for seed in 0..200 {
            for (i, delay) in delays(Severity::Passing, seed, 40).into_iter().enumerate() {
                let ceiling = Duration::from_millis(50 << i.min(10)).min(Duration::from_secs(5));
                assert!(delay <= ceiling, "failure {i}: {delay:?} over {ceiling:?}");
                highest[i] = highest[i].max(delay);
            }
        }
        assert!(highest[0] > Duration::from_millis(40), "jitter spreads");
        assert!(highest[39] > Duration::from_millis(4500), "cap is used");
    }

    #[test]
    fn refusals_wait_at_least_half_of_a_long_ceiling() {
        for seed in 0..100 {
            let waits = delays(Severity::Refused, seed, 8);
            assert!(waits[0] >= Duration::from_millis(7_500));
            assert!(waits[0] <= Duration::from_secs(15));
            assert!(waits[7] >= Duration::from_secs(150));
            assert!(waits[7] <= Duration::from_secs(300));
            let first_minute: Duration = waits[..3].iter().sum();
            assert!(first_minute > Duration::from_secs(50), "few dials a minute");
        }
    }

    #[test]
    fn only_a_link_that_lasted_resets_the_schedule() {
        let limits = BackoffLimits::default();
        let mut backoff = Backoff::new(limits, 1);
        for _ in 0..6 {
            backoff.on_failure(MonoTime::ZERO, Severity::Passing);
        }
        let up = MonoTime::from_micros(1);
        backoff.on_link_lost(up + (limits.stable_after - Duration::from_micros(1)), up);
        assert_eq!(backoff.failures(), 7, "a flapping link keeps its count");
        backoff.on_link_lost(up + limits.stable_after, up);
        assert_eq!(backoff.failures(), 1);
        backoff.on_link_closed(up + limits.stable_after, up);
        assert_eq!(backoff.failures(), 0);
    }

    #[test]
    fn equal_seeds_give_equal_schedules() {
        assert_eq!(
            delays(Severity::Passing, 7, 9),
            delays(Severity::Passing, 7, 9)
        );
        assert_ne!(
            delays(Severity::Passing, 7, 9),
            delays(Severity::Passing, 8, 9)
        );
    }
}
