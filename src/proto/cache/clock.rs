//! The owner's clock for times to live.

/// Wall time in milliseconds that never runs backwards within a process.
///
/// A wall clock that steps back is held where it was until it catches up, so an entry that has
/// expired never comes back. A step forward expires entries early, which the contract allows.
#[derive(Debug, Clone, Copy, Default)]
pub struct OwnerClock {
    latest_ms: u64,
}

impl OwnerClock {
    /// The time to use, given what the wall clock says.
    pub fn at_wall_us(&mut self, wall_us: u64) -> u64 {
        self.latest_ms = self.latest_ms.max(wall_us / 1000);
        self.latest_ms
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_holds_still_while_the_wall_clock_is_behind() {
        let mut clock = OwnerClock::default();
        assert_eq!(clock.at_wall_us(5_000_999), 5_000);
        assert_eq!(clock.at_wall_us(1_000_000), 5_000);
        assert_eq!(clock.at_wall_us(u64::MAX), u64::MAX / 1000);
        assert_eq!(clock.at_wall_us(0), u64::MAX / 1000);
    }
}
