//! What happened, as a hash that two runs of one seed must share, and as text when asked for.

/// The trace of one run.
#[derive(Debug)]
pub struct Trace {
    hash: u64,
    events: u64,
    is_shown: bool,
}

impl Trace {
    /// With `is_shown` every noted line is printed to standard error.
    pub fn new(is_shown: bool) -> Self {
        Self {
            hash: 0xcbf2_9ce4_8422_2325,
            events: 0,
            is_shown,
        }
    }

    /// Mixes numbers that describe an event into the hash.
    pub fn mix(&mut self, numbers: &[u64]) {
        self.events += 1;
        for number in numbers {
            self.hash = (self.hash ^ number).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            self.hash ^= self.hash >> 29;
        }
    }

    /// Prints a line when the trace is shown; `line` is not made otherwise.
    pub fn note(&self, now_us: u64, line: impl FnOnce() -> String) {
        if self.is_shown {
            eprintln!("{:>10.3} ms  {}", now_us as f64 / 1000.0, line());
        }
    }

    /// The hash of everything so far.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// How many events went into the hash.
    pub fn events(&self) -> u64 {
        self.events
    }
}
