//! Seeded choices, one independent stream for each thing that is left to chance.
//!
//! Separate streams keep a seed comparable while the code changes: one more draw by the disk does
//! not shift what the network does.

use rand_chacha::rand_core::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// One sequence of choices, fixed by its seed and its number.
#[derive(Debug, Clone)]
pub struct Choices(ChaCha8Rng);

impl Choices {
    /// Stream `number` of `seed`.
    pub fn new(seed: u64, number: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(number);
        Self(rng)
    }

    /// Any number.
    pub fn number(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// A number below `bound`; 0 when `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.0.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// A number in `low ..= high`.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high.saturating_sub(low) + 1)
    }

    /// An index below `len`, which is not 0.
    pub fn index(&mut self, len: usize) -> usize {
        self.below(len as u64) as usize
    }

    /// True in `per_mille` of 1000 cases.
    pub fn chance(&mut self, per_mille: u64) -> bool {
        self.below(1000) < per_mille
    }

    /// One of several.
    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.index(from.len())]
    }
}

/// The streams of one run.
#[derive(Debug)]
pub struct Random {
    pub network: Choices,
    pub disk: Choices,
    pub schedule: Choices,
    pub workload: Choices,
    pub faults: Choices,
    /// What brokers do of their own accord, and consumer groups.
    pub upkeep: Choices,
    /// What becomes of those who may lead next while a companion is written anew.
    pub heirs: Choices,
    /// The engine that stores reports.
    pub reports: Choices,
    /// Catalog files that must not be followed.
    pub mistakes: Choices,
    /// What subscribers do, who change nothing for anybody else.
    pub subscribers: Choices,
}

impl Random {
    pub fn new(seed: u64) -> Self {
        Self {
            network: Choices::new(seed, 1),
            disk: Choices::new(seed, 2),
            schedule: Choices::new(seed, 3),
            workload: Choices::new(seed, 4),
            faults: Choices::new(seed, 5),
            upkeep: Choices::new(seed, 6),
            heirs: Choices::new(seed, 7),
            // Numbers with which the kept seeds stay the runs they were.
            reports: Choices::new(seed, 16),
            mistakes: Choices::new(seed, 25),
            subscribers: Choices::new(seed, 9),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_of_one_seed_differ_and_repeat() {
        let draw = |seed, number| -> Vec<u64> {
            let mut choices = Choices::new(seed, number);
            (0..8).map(|_| choices.number()).collect()
        };
        assert_eq!(draw(1, 1), draw(1, 1));
        assert_ne!(draw(1, 1), draw(1, 2));
        assert_ne!(draw(1, 1), draw(2, 1));
    }

    /// The algorithm is part of every recorded seed: another one would make them mean nothing.
    #[test]
    fn the_sequence_is_the_recorded_one() {
        let mut choices = Choices::new(7, 3);
        let drawn: Vec<u64> = (0..4).map(|_| choices.below(1000)).collect();
        assert_eq!(drawn, RECORDED);
    }

    const RECORDED: [u64; 4] = [181, 92, 979, 334];

    #[test]
    fn bounds_hold_and_are_reached() {
        let mut choices = Choices::new(3, 3);
        let drawn: Vec<u64> = (0..2000).map(|_| choices.between(5, 8)).collect();
        assert_eq!(drawn.iter().min(), Some(&5));
        assert_eq!(drawn.iter().max(), Some(&8));
        assert_eq!(choices.below(0), 0);
    }
}
