//! Records on their way to subscribers: read once, encoded once, whoever gets them.
//!
//! Subscribers that keep up are at the same place of a log in the same turn. The first of them that
//! reads makes a run of the records; the others of that turn share it, and its frame with it, on
//! other cores as well. A run lives as long as somebody's transport holds its bytes.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use storage_uring::ReadBatch;

use crate::wire::client::{EncodeError, EventBatch};

/// Payloads from this size on are shared with the log's memory, not copied into the frame.
const SHARE_FROM_BYTES: usize = 4096;
/// Records of one run; empty ones take four bytes of a frame each, and a frame has a bound.
const MAX_RUN_RECORDS: usize = 65_536;
/// Runs of one turn remembered; the oldest is forgotten for a further one.
const MAX_RUNS: usize = 64;

/// The parts of a frame, in order.
type Frame = Result<Arc<[Bytes]>, EncodeError>;

/// Records of one log that follow one another.
#[derive(Debug)]
pub struct EventRun {
    batch: EventBatch,
    first_offset: u64,
    next_offset: u64,
    payload_bytes: usize,
    /// Its frame with offsets, and without: made at first use.
    frames: [OnceLock<Frame>; 2],
}

impl EventRun {
    /// The records of `read` that lie below `readable_end`, as many as a frame may hold.
    pub fn new(mut read: ReadBatch, readable_end: u64) -> Self {
        let readable = readable_end.saturating_sub(read.first_offset);
        let most = usize::try_from(readable).unwrap_or(usize::MAX);
        let most = most.min(MAX_RUN_RECORDS);
        if read.records.len() > most {
            read.records.truncate(most);
            read.next_offset = read.first_offset + read.records.len() as u64;
        }
        let payload_bytes = read.records.iter().map(Bytes::len).sum();
        Self {
            first_offset: read.first_offset,
            next_offset: read.next_offset,
            batch: EventBatch {
                base_offset: Some(read.first_offset),
                payloads: read.records,
                ..EventBatch::default()
            },
            payload_bytes,
            frames: Default::default(),
        }
    }

    /// The offset of the first record.
    pub fn first_offset(&self) -> u64 {
        self.first_offset
    }

    /// Where to read on: one past the offset of the last record.
    pub fn next_offset(&self) -> u64 {
        self.next_offset
    }

    /// How many there are.
    pub fn records(&self) -> u64 {
        self.batch.payloads.len() as u64
    }

    /// Bytes of all payloads.
    pub fn payload_bytes(&self) -> usize {
        self.payload_bytes
    }

    /// The frame for a client that reads offsets, or for one that does not.
    pub fn frame(&self, with_offsets: bool) -> Frame {
        let frame = &self.frames[usize::from(with_offsets)];
        let made = frame.get_or_init(|| match with_offsets {
            true => encode(&self.batch),
            false => encode(&EventBatch {
                base_offset: None,
                ..self.batch.clone()
            }),
        });
        made.clone()
    }

    /// The frame for a client that is told of offsets without an event; not shared.
    pub fn frame_after_gap(&self, skipped_before: u64) -> Frame {
        encode(&EventBatch {
            skipped_before,
            ..self.batch.clone()
        })
    }
}

fn encode(batch: &EventBatch) -> Frame {
    let mut parts = Vec::new();
    batch.encode_into(SHARE_FROM_BYTES, &mut parts)?;
    Ok(parts.into())
}

/// The runs made in this turn. `L` names a log.
pub(super) struct EventRuns<L> {
    made: Vec<(L, usize, Arc<EventRun>)>,
    oldest: usize,
}

impl<L> Default for EventRuns<L> {
    fn default() -> Self {
        Self {
            made: Vec::new(),
            oldest: 0,
        }
    }
}

impl<L: PartialEq> EventRuns<L> {
    /// A run that a read of at most `max_bytes` from `from` has brought.
    pub fn find(&self, log: L, from: u64, max_bytes: usize) -> Option<Arc<EventRun>> {
        let found = self.made.iter().find(|(of, bytes, run)| {
            *of == log && *bytes == max_bytes && run.first_offset() == from
        });
        found.map(|(_, _, run)| Arc::clone(run))
    }

    /// Remembers a run until the turn ends.
    pub fn keep(&mut self, log: L, max_bytes: usize, run: &Arc<EventRun>) {
        let entry = (log, max_bytes, Arc::clone(run));
        if self.made.len() < MAX_RUNS {
            self.made.push(entry);
        } else {
            self.made[self.oldest] = entry;
            self.oldest = (self.oldest + 1) % MAX_RUNS;
        }
    }

    /// The turn has ended: later readers may find more.
    pub fn forget(&mut self) {
        self.made.clear();
        self.oldest = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::client::{FrameReader, ReadEvent, ReadLimits, ToClient};

    fn run(first_offset: u64, sizes: &[usize], readable_end: u64) -> EventRun {
        let records: Vec<Bytes> = sizes.iter().map(|&n| Bytes::from(vec![7; n])).collect();
        let next_offset = first_offset + records.len() as u64;
        let read = ReadBatch {
            first_offset,
            records,
            next_offset,
        };
        EventRun::new(read, readable_end)
    }

    fn decode(frame: &[Bytes]) -> EventBatch {
        let mut reader = FrameReader::new(ReadLimits::AUTHENTICATED);
        frame.iter().for_each(|part| reader.push(part.clone()));
        let Some(ReadEvent::Frame(frame)) = reader.next() else {
            panic!("no frame");
        };
        match ToClient::decode(frame) {
            Ok(ToClient::Events(batch)) => batch,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn everybody_gets_the_same_bytes() {
        let run = run(5, &[10, 5000, 0], 100);
        let [one, two] = [run.frame(true).unwrap(), run.frame(true).unwrap()];
        assert!(Arc::ptr_eq(&one, &two), "encoded once");
        let batch = decode(&one);
        assert_eq!((batch.base_offset, batch.payloads.len()), (Some(5), 3));
        assert_eq!(batch.payloads[1].len(), 5000);
        let plain = decode(&run.frame(false).unwrap());
        assert_eq!((plain.base_offset, plain.payloads.len()), (None, 3));
        let gap = decode(&run.frame_after_gap(2).unwrap());
        assert_eq!((gap.base_offset, gap.skipped_before), (Some(5), 2));
    }

    #[test]
    fn nothing_past_the_readable_end_is_in_a_run() {
        for (end, expected) in [(9, 3), (8, 3), (7, 2), (6, 1), (5, 0), (4, 0)] {
            let run = run(5, &[1, 1, 1], end);
            assert_eq!((run.records(), run.next_offset()), (expected, 5 + expected));
        }
    }

    #[test]
    fn any_number_of_empty_records_fits_a_frame() {
        let run = run(0, &vec![0; MAX_RUN_RECORDS * 100], u64::MAX);
        assert_eq!(run.next_offset(), MAX_RUN_RECORDS as u64);
        assert_eq!(
            decode(&run.frame(true).unwrap()).payloads.len(),
            MAX_RUN_RECORDS
        );
    }

    #[test]
    fn what_is_remembered_is_bounded_and_goes_with_the_turn() {
        let mut runs = EventRuns::default();
        for from in 0..200u64 {
            let made = Arc::new(run(from, &[1], 1000));
            runs.keep('a', 10, &made);
            let found = runs.find('a', from, 10).unwrap();
            assert!(Arc::ptr_eq(&found, &made));
            assert!(runs.find('a', from, 11).is_none());
            assert!(runs.find('b', from, 10).is_none());
        }
        assert_eq!(runs.made.len(), MAX_RUNS);
        runs.forget();
        assert!(runs.find('a', 199, 10).is_none());
    }
}
