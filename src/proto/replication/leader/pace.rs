//! How long a cursor waits before it asks again.

use std::time::Duration;

use crate::proto::backoff::split_mix;

/// A doubling wait with a ceiling.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Doubling {
    times: u32,
}

impl Doubling {
    /// The next wait of a schedule without jitter.
    pub fn next(&mut self, base: Duration, max: Duration) -> Duration {
        let factor = 1u32.checked_shl(self.times).unwrap_or(u32::MAX);
        self.times = self.times.saturating_add(1);
        base.saturating_mul(factor).min(max)
    }

    /// The next wait, evenly spread below a doubling ceiling, so that the followers of one peer
    /// that comes back do not all ask at one moment. At least a sixteenth of the ceiling.
    pub fn next_jittered(&mut self, base: Duration, max: Duration, random: &mut u64) -> Duration {
        let ceiling = self.next(base, max);
        let micros = ceiling.as_micros() as u64;
        let spread = (u128::from(split_mix(random)) * u128::from(micros)) >> 64;
        Duration::from_micros(spread as u64).max(ceiling / 16)
    }

    pub fn reset(&mut self) {
        self.times = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_their_ceiling_and_start_over() {
        let (base, max) = (Duration::from_millis(10), Duration::from_secs(1));
        let mut pace = Doubling::default();
        let waits: Vec<u64> = (0..40)
            .map(|_| pace.next(base, max).as_millis() as u64)
            .collect();
        assert_eq!(waits[..8], [10, 20, 40, 80, 160, 320, 640, 1000]);
        assert!(waits[8..].iter().all(|wait| *wait == 1000));
        pace.reset();
        assert_eq!(pace.next(base, max), base);
    }

    #[test]
    fn jitter_stays_below_its_ceiling_and_spreads() {
        let (base, max) = (Duration::from_millis(50), Duration::from_secs(5));
        let mut seen = Vec::new();
        for seed in 0..200u64 {
            let mut random = seed;
            let mut pace = Doubling::default();
            let first = pace.next_jittered(base, max, &mut random);
            assert!(first <= base && first >= base / 16);
            seen.push(first);
            for _ in 0..20 {
                assert!(pace.next_jittered(base, max, &mut random) <= max);
            }
        }
        seen.sort();
        seen.dedup();
        assert!(seen.len() > 100, "{} different waits", seen.len());
    }
}
