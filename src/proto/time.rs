//! The time as the machines see it: a number somebody else read from a clock.

use std::ops::Add;
use std::time::Duration;

/// A point on the broker's monotonic clock, in microseconds since an arbitrary start.
///
/// All machines of one broker must be given times of one clock. Virtual time works as well.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct MonoTime(u64);

impl MonoTime {
    /// The clock's start.
    pub const ZERO: MonoTime = MonoTime(0);

    /// The point `micros` microseconds after the clock's start.
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros)
    }

    /// Microseconds since the clock's start.
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// How long ago `earlier` was; zero when it is not in the past.
    pub fn since(self, earlier: MonoTime) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for MonoTime {
    type Output = MonoTime;

    /// Saturates: a time that cannot be written is never reached.
    fn add(self, span: Duration) -> MonoTime {
        let micros = u64::try_from(span.as_micros()).unwrap_or(u64::MAX);
        MonoTime(self.0.saturating_add(micros))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic_saturates_at_both_ends() {
        let end = MonoTime::from_micros(u64::MAX);
        assert_eq!(end + Duration::from_secs(1), end);
        assert_eq!(MonoTime::ZERO + Duration::MAX, end);
        assert_eq!(MonoTime::ZERO.since(end), Duration::ZERO);
        assert_eq!(
            (MonoTime::from_micros(5) + Duration::from_millis(2)).since(MonoTime::from_micros(5)),
            Duration::from_millis(2)
        );
    }
}
