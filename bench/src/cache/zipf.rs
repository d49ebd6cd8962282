//! Which key is next: a few are asked for often, most seldom.

use crate::place::random_u64;

/// A small generator: fast, and good enough to choose keys.
#[derive(Debug, Clone)]
pub struct Dice(u64);

impl Dice {
    /// One that differs from every other.
    pub fn new() -> Self {
        Self(random_u64())
    }

    /// The next number.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }

    fn fraction(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

impl Default for Dice {
    fn default() -> Self {
        Self::new()
    }
}

/// Ranks with probability proportional to `1 / rank^theta`; all alike with 0.
#[derive(Debug, Clone)]
pub struct Zipf {
    /// By rank, the probability of it or an earlier one.
    cumulative: Vec<f64>,
}

impl Zipf {
    /// Over `count` ranks.
    pub fn new(count: usize, theta: f64) -> Self {
        let mut sum = 0.0;
        let mut cumulative: Vec<f64> = (1..=count.max(1))
            .map(|rank| {
                sum += (rank as f64).powf(-theta);
                sum
            })
            .collect();
        cumulative.iter_mut().for_each(|part| *part /= sum);
        Self { cumulative }
    }

    /// A rank, from 0.
    pub fn pick(&self, dice: &mut Dice) -> usize {
        let at = dice.fraction();
        let rank = self.cumulative.partition_point(|part| *part <= at);
        rank.min(self.cumulative.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_ranks_are_asked_for_as_often_as_they_should_be() {
        let mut dice = Dice(7);
        let zipf = Zipf::new(1000, 1.0);
        let mut counts = vec![0u32; 1000];
        for _ in 0..100_000 {
            counts[zipf.pick(&mut dice)] += 1;
        }
        // The harmonic number of 1000 is 7.485: the first gets 13.4 %, the second half of it.
        assert!((12_500..14_200).contains(&counts[0]), "{}", counts[0]);
        assert!((6_100..7_300).contains(&counts[1]), "{}", counts[1]);
        let even = Zipf::new(4, 0.0);
        let mut counts = [0u32; 4];
        for _ in 0..40_000 {
            counts[even.pick(&mut dice)] += 1;
        }
        assert!(counts.iter().all(|count| (9_500..10_500).contains(count)));
    }
}
