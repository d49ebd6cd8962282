//! Who waits for the way to one broker, and how much is on it.
//!
//! Bounds: each shard and follower stands in line once; requests and bytes on their way
//! ([`SHIP_LANE_REQUESTS`], [`SHIP_LANE_BYTES`]); reads from the disk ([`SHIP_LANE_DISK_READS`]), none of
//! which begins while there is no room for what it brings.

use std::collections::{HashSet, VecDeque};
use std::hash::Hash;

use crate::limits::{SHIP_LANE_BYTES, SHIP_LANE_DISK_READS, SHIP_LANE_REQUESTS};

/// The way to one broker; `P` names a shard and one of its followers.
#[derive(Debug)]
pub(super) struct Line<P> {
    ready: VecDeque<P>,
    standing: HashSet<P>,
    requests: usize,
    bytes: u64,
    disk_reads: usize,
    waiting_reads: VecDeque<u64>,
}

impl<P> Default for Line<P> {
    fn default() -> Self {
        Self {
            ready: VecDeque::new(),
            standing: HashSet::new(),
            requests: 0,
            bytes: 0,
            disk_reads: 0,
            waiting_reads: VecDeque::new(),
        }
    }
}

impl<P: Copy + Eq + Hash> Line<P> {
    /// Whether anything waits for room.
    pub fn has_work(&self) -> bool {
        !self.ready.is_empty() || !self.waiting_reads.is_empty()
    }

    /// Whether that one stands in line.
    pub fn stands(&self, place: P) -> bool {
        self.standing.contains(&place)
    }

    /// Puts one at the end of the line; one that stands in it already keeps its place.
    pub fn stand(&mut self, place: P) {
        if self.standing.insert(place) {
            self.ready.push_back(place);
        }
    }

    /// Takes the first out of the line, if there is room for a request.
    pub fn next(&mut self) -> Option<P> {
        let place = self.has_room().then(|| self.ready.pop_front())??;
        self.standing.remove(&place);
        Some(place)
    }

    /// A fetch has to go to the disk.
    pub fn wait_to_read(&mut self, token: u64) {
        self.waiting_reads.push_back(token);
    }

    /// The next fetch that may begin; it counts as a read until [`Self::read_ended`].
    pub fn next_read(&mut self) -> Option<u64> {
        let may_read = self.has_room() && self.disk_reads < SHIP_LANE_DISK_READS;
        let token = may_read.then(|| self.waiting_reads.pop_front())??;
        self.disk_reads += 1;
        Some(token)
    }

    pub fn read_ended(&mut self) {
        self.disk_reads = self.disk_reads.saturating_sub(1);
    }

    /// A request is on its way.
    pub fn sent(&mut self, bytes: u64) {
        self.requests += 1;
        self.bytes += bytes;
    }

    /// It has come to something.
    pub fn ended(&mut self, bytes: u64) {
        self.requests = self.requests.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(bytes);
    }

    fn has_room(&self) -> bool {
        self.requests < SHIP_LANE_REQUESTS && self.bytes < SHIP_LANE_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_stands_in_line_once_however_often_it_is_put_there() {
        let mut line = Line::default();
        for _ in 0..1000 {
            line.stand('a');
            line.stand('b');
        }
        assert!(line.stands('a') && !line.stands('c'));
        assert_eq!(
            (line.next(), line.next(), line.next()),
            (Some('a'), Some('b'), None)
        );
        assert!(!line.stands('a') && !line.has_work());
        line.stand('a');
        assert_eq!(line.next(), Some('a'), "and may stand again");
    }

    #[test]
    fn without_room_nobody_is_asked_and_nothing_is_read() {
        let mut line = Line::default();
        line.stand('a');
        for token in 0..10 {
            line.wait_to_read(token);
        }
        line.sent(SHIP_LANE_BYTES);
        assert_eq!((line.next(), line.next_read()), (None, None));
        assert!(line.has_work());
        line.ended(SHIP_LANE_BYTES);
        let reads: Vec<u64> = std::iter::from_fn(|| line.next_read()).collect();
        assert_eq!(reads, (0..SHIP_LANE_DISK_READS as u64).collect::<Vec<_>>());
        line.read_ended();
        assert_eq!(line.next_read(), Some(SHIP_LANE_DISK_READS as u64));
        for _ in 0..SHIP_LANE_REQUESTS {
            line.sent(1);
        }
        assert_eq!(line.next(), None);
        line.ended(1);
        assert_eq!(line.next(), Some('a'));
    }
}
