//! What one subscriber was given, record by record.
//!
//! Every subscriber of a run has to get every record of the run once, in order and unchanged, and each
//! at the offset that follows the one before it.

use serde::{Deserialize, Serialize};

use crate::record::parse_record;

/// What became of the deliveries of a run; all but the first must be 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FanoutVerify {
    /// Deliveries looked at.
    pub checked: u64,
    /// Records a subscriber never got.
    pub missing: u64,
    /// Records a subscriber got again.
    pub duplicated: u64,
    /// Deliveries that are not what was published.
    pub corrupt: u64,
    /// Deliveries at another offset than the next.
    pub misplaced: u64,
}

impl FanoutVerify {
    /// Whether nothing was found.
    pub fn is_clean(&self) -> bool {
        self.missing + self.duplicated + self.corrupt + self.misplaced == 0
    }

    /// Adds those of another part of the run.
    pub fn absorb(&mut self, other: &Self) {
        self.checked += other.checked;
        self.missing += other.missing;
        self.duplicated += other.duplicated;
        self.corrupt += other.corrupt;
        self.misplaced += other.misplaced;
    }
}

/// The place of one subscriber in the run.
#[derive(Debug, Clone, Default)]
pub struct Follower {
    next_sequence: u64,
    next_offset: Option<u64>,
}

impl Follower {
    /// Records from the start on that it has or will never have.
    pub fn position(&self) -> u64 {
        self.next_sequence
    }

    /// Records that follow one another, the first of them at `offset` if that was told.
    pub fn on_records<'a>(
        &mut self,
        run: u64,
        offset: Option<u64>,
        payloads: impl Iterator<Item = &'a [u8]>,
        verify: &mut FanoutVerify,
    ) {
        let mut count = 0;
        for payload in payloads {
            count += 1;
            verify.checked += 1;
            match parse_record(payload) {
                Ok(id) if id.run == run => self.on_sequence(id.sequence, verify),
                Ok(_) | Err(_) => verify.corrupt += 1,
            }
        }
        if let Some(offset) = offset {
            if self.next_offset.is_some_and(|next| next != offset) {
                verify.misplaced += count;
            }
            self.next_offset = Some(offset + count);
        }
    }

    fn on_sequence(&mut self, sequence: u64, verify: &mut FanoutVerify) {
        if sequence < self.next_sequence {
            verify.duplicated += 1;
            return;
        }
        verify.missing += sequence - self.next_sequence;
        self.next_sequence = sequence + 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::RecordMaker;
    use bytes::BytesMut;

    fn record(run: u64, sequence: u64) -> Vec<u8> {
        let mut out = BytesMut::new();
        RecordMaker::new(run, 40).put(&mut out, 0, 0, sequence);
        out.to_vec()
    }

    fn verify_of(given: &[(Option<u64>, &[Vec<u8>])]) -> (FanoutVerify, u64) {
        let (mut follower, mut verify) = (Follower::default(), FanoutVerify::default());
        for (offset, payloads) in given {
            let payloads = payloads.iter().map(Vec::as_slice);
            follower.on_records(7, *offset, payloads, &mut verify);
        }
        (verify, follower.position())
    }

    #[test]
    fn a_clean_run_is_clean_and_every_fault_is_told_apart() {
        let r: Vec<Vec<u8>> = (0..4).map(|n| record(7, n)).collect();
        let clean = verify_of(&[(Some(9), &r[..2]), (Some(11), &r[2..])]);
        assert!(clean.0.is_clean());
        assert_eq!((clean.0.checked, clean.1), (4, 4));

        let lost = verify_of(&[(None, &r[..1]), (None, &r[2..])]).0;
        assert_eq!((lost.missing, lost.duplicated), (1, 0));
        let again = verify_of(&[(None, &r[..2]), (None, &r[1..2])]).0;
        assert_eq!((again.missing, again.duplicated), (0, 1));
        let moved = verify_of(&[(Some(9), &r[..2]), (Some(12), &r[2..])]).0;
        assert_eq!(moved.misplaced, 2);
        let mut damaged = r[0].clone();
        damaged[35] ^= 1;
        assert_eq!(verify_of(&[(None, &[damaged, record(8, 0)])]).0.corrupt, 2);
    }
}
