//! Which of a connection's streams a request travels on.
//!
//! A stream is ordered, so whatever is written behind a large batch waits for it. Half of the
//! streams take only small requests; within its half a request goes where the fewest unanswered
//! bytes are. It does not know what a request is, and keeps no order between streams: requests
//! that depend on each other are pinned to one stream by the caller.

/// Streams a connection can have at most.
pub const MAX_STREAMS: usize = 8;

/// Streams of a connection with the one kept for replication.
pub const ALL_STREAMS: usize = MAX_STREAMS + 1;
/// The stream kept for what is shipped to followers: nothing else is placed on it, so that neither
/// waits behind the other.
pub const REPLICATION_SLOT: StreamSlot = StreamSlot(MAX_STREAMS as u8);

/// One of a connection's streams; 0 is the one that greets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamSlot(pub u8);

/// Unanswered bytes on each stream.
#[derive(Debug, Clone)]
pub struct Streams {
    unanswered_bytes: [u64; ALL_STREAMS],
    count: usize,
    large_request_bytes: u32,
}

impl Streams {
    /// `count` is clamped to 1 ..= [`MAX_STREAMS`].
    pub fn new(count: u8, large_request_bytes: u32) -> Self {
        Self {
            unanswered_bytes: [0; ALL_STREAMS],
            count: usize::from(count).clamp(1, MAX_STREAMS),
            large_request_bytes,
        }
    }

    /// Chooses a stream and adds the request to it.
    pub fn place(&mut self, bytes: u32, pin: Option<StreamSlot>) -> StreamSlot {
        let slot = match pin {
            Some(pin) if usize::from(pin.0) < self.count || pin == REPLICATION_SLOT => pin,
            Some(_) | None => self.least_loaded(bytes),
        };
        self.unanswered_bytes[usize::from(slot.0)] += u64::from(bytes);
        slot
    }

    /// Takes an answered or failed request off its stream.
    pub fn remove(&mut self, slot: StreamSlot, bytes: u32) {
        let unanswered = &mut self.unanswered_bytes[usize::from(slot.0)];
        *unanswered = unanswered.saturating_sub(u64::from(bytes));
    }

    /// Unanswered bytes on all streams.
    pub fn total_bytes(&self) -> u64 {
        self.unanswered_bytes.iter().sum()
    }

    fn least_loaded(&self, bytes: u32) -> StreamSlot {
        let small_streams = self.count.div_ceil(2);
        let range = match (bytes > self.large_request_bytes, self.count) {
            (_, 1) => 0..1,
            (false, _) => 0..small_streams,
            (true, _) => small_streams..self.count,
        };
        let best = range.min_by_key(|&i| self.unanswered_bytes[i]).unwrap_or(0);
        StreamSlot(best as u8)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_requests_never_queue_behind_large_ones() {
        for count in 2..=8 {
            let mut streams = Streams::new(count, 1000);
            let large: Vec<_> = (0..20).map(|_| streams.place(1001, None)).collect();
            let small: Vec<_> = (0..20).map(|_| streams.place(1000, None)).collect();
            assert!(large.iter().all(|l| !small.contains(l)), "{count} streams");
        }
    }

    #[test]
    fn the_least_loaded_stream_of_the_class_is_taken() {
        let mut streams = Streams::new(4, 1000);
        assert_eq!(streams.place(10, None), StreamSlot(0));
        assert_eq!(streams.place(5, None), StreamSlot(1));
        assert_eq!(streams.place(5, None), StreamSlot(1));
        assert_eq!(streams.place(5, None), StreamSlot(0));
        streams.remove(StreamSlot(1), 5);
        assert_eq!(streams.place(5, None), StreamSlot(1));
        assert_eq!(streams.total_bytes(), 25);
    }

    #[test]
    fn the_stream_of_replication_takes_only_what_is_pinned_to_it() {
        for count in 1..=MAX_STREAMS as u8 {
            let mut streams = Streams::new(count, 1000);
            for _ in 0..50 {
                assert_ne!(streams.place(10, None), REPLICATION_SLOT);
                assert_ne!(streams.place(5000, None), REPLICATION_SLOT);
            }
            assert_eq!(streams.place(10, Some(REPLICATION_SLOT)), REPLICATION_SLOT);
        }
    }

    #[test]
    fn a_pin_wins_over_the_size_class_and_a_foreign_pin_is_ignored() {
        let mut streams = Streams::new(4, 1000);
        assert_eq!(streams.place(5000, Some(StreamSlot(1))), StreamSlot(1));
        assert_eq!(streams.place(5, Some(StreamSlot(7))), StreamSlot(0));
        let mut single = Streams::new(0, 1000);
        assert_eq!(single.place(5000, None), StreamSlot(0));
    }
}
