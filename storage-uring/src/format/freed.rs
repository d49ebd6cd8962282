//! The record of freed segments: which stretches of a core's log were given back.
//!
//! One small file a core directory, replaced as a whole. It lets the chain of segments be followed over
//! stretches that are gone on purpose, and tells them from segments that were lost.
//!
//! Invariants: runs ascend and never touch in the chain (touching ones are one run).

use super::{
    get_u16, get_u32, get_u64, put_u16, put_u32, put_u64, DataUuid, HeaderFault, FORMAT_VERSION,
};

const MAGIC: u64 = u64::from_le_bytes(*b"FXLFREED");
const HEADER_BYTES: usize = 40;
const RUN_BYTES: usize = 48;
const CRC_BYTES: usize = 4;
/// Runs a record may hold; with more of them nothing is freed until neighbours join.
pub const RUNS_MAX: usize = 65_536;

/// Segments that follow each other in the chain and are gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FreedRun {
    /// Sequence of the oldest.
    pub first_seq: u64,
    /// Sequence of the newest.
    pub last_seq: u64,
    /// Where the log ended before the oldest: segment (0: nowhere) and position.
    pub link: (u64, u64),
    /// First group of the oldest.
    pub first_group: u64,
    /// Last group of the newest.
    pub last_group: u64,
}

/// All freed runs of a core directory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FreedRuns {
    runs: Vec<FreedRun>,
}

impl FreedRuns {
    /// The run a sequence is in.
    pub fn run_of(&self, seq: u64) -> Option<&FreedRun> {
        let at = self.runs.partition_point(|run| run.last_seq < seq);
        self.runs.get(at).filter(|run| run.first_seq <= seq)
    }

    /// Newest sequence that was freed; 0 when none was.
    pub fn newest(&self) -> u64 {
        self.runs.last().map_or(0, |run| run.last_seq)
    }

    /// Whether something newer than `seq` was freed.
    #[cfg(test)]
    pub(crate) fn reaches_over(&self, seq: u64) -> bool {
        self.runs.last().is_some_and(|run| run.first_seq > seq)
    }

    /// Number of runs.
    pub fn len(&self) -> usize {
        self.runs.len()
    }

    /// Whether nothing was freed.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Adds a segment (as a run of its own), joining it with its neighbours in the chain.
    pub fn add(&mut self, new: FreedRun) {
        if self.run_of(new.last_seq).is_some() {
            return;
        }
        let mut joined = new;
        let mut at = self
            .runs
            .partition_point(|run| run.last_seq < new.first_seq);
        if self
            .runs
            .get(at)
            .is_some_and(|after| after.link.0 == new.last_seq)
        {
            let after = self.runs.remove(at);
            joined.last_seq = after.last_seq;
            joined.last_group = after.last_group;
        }
        let before = at.checked_sub(1).map(|before| self.runs[before]);
        if let Some(before) = before.filter(|before| before.last_seq == new.link.0) {
            at -= 1;
            self.runs.remove(at);
            joined.first_seq = before.first_seq;
            joined.first_group = before.first_group;
            joined.link = before.link;
        }
        self.runs.insert(at, joined);
    }

    /// The file's bytes.
    pub fn encode(&self, uuid: &DataUuid, core: u16) -> Vec<u8> {
        let mut out = vec![0u8; HEADER_BYTES + self.runs.len() * RUN_BYTES + CRC_BYTES];
        put_u64(&mut out, 0, MAGIC);
        put_u32(&mut out, 8, FORMAT_VERSION);
        put_u16(&mut out, 12, core);
        out[16..32].copy_from_slice(uuid);
        put_u32(&mut out, 32, self.runs.len() as u32);
        for (run, at) in self.runs.iter().zip((HEADER_BYTES..).step_by(RUN_BYTES)) {
            let fields = [
                run.first_seq,
                run.last_seq,
                run.link.0,
                run.link.1,
                run.first_group,
                run.last_group,
            ];
            for (i, field) in fields.into_iter().enumerate() {
                put_u64(&mut out, at + i * 8, field);
            }
        }
        let end = out.len() - CRC_BYTES;
        let crc = crc32c::crc32c(&out[..end]);
        put_u32(&mut out, end, crc);
        out
    }

    /// Reads the file's bytes.
    pub fn decode(uuid: &DataUuid, core: u16, bytes: &[u8]) -> Result<Self, HeaderFault> {
        if bytes.len() < HEADER_BYTES + CRC_BYTES {
            return Err(HeaderFault::Short);
        }
        if get_u64(bytes, 0) != MAGIC {
            return Err(HeaderFault::Magic);
        }
        let end = bytes.len() - CRC_BYTES;
        if crc32c::crc32c(&bytes[..end]) != get_u32(bytes, end) {
            return Err(HeaderFault::Checksum);
        }
        let version = get_u32(bytes, 8);
        if version != FORMAT_VERSION {
            return Err(HeaderFault::Version(version));
        }
        let count = get_u32(bytes, 32) as usize;
        let is_ours = bytes[16..32] == uuid[..] && get_u16(bytes, 12) == core;
        if !is_ours || count > RUNS_MAX || end != HEADER_BYTES + count * RUN_BYTES {
            return Err(HeaderFault::Field);
        }
        let run = |at: usize| FreedRun {
            first_seq: get_u64(bytes, at),
            last_seq: get_u64(bytes, at + 8),
            link: (get_u64(bytes, at + 16), get_u64(bytes, at + 24)),
            first_group: get_u64(bytes, at + 32),
            last_group: get_u64(bytes, at + 40),
        };
        let runs: Vec<FreedRun> = (HEADER_BYTES..end).step_by(RUN_BYTES).map(run).collect();
        let ordered = runs
            .windows(2)
            .all(|pair| pair[0].last_seq < pair[1].first_seq);
        let sane = runs.iter().all(|run| {
            run.link.0 < run.first_seq
                && run.first_seq <= run.last_seq
                && run.first_group <= run.last_group
        });
        if ordered && sane {
            Ok(Self { runs })
        } else {
            Err(HeaderFault::Field)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UUID: DataUuid = [3; 16];

    fn segment(seq: u64, before: u64) -> FreedRun {
        FreedRun {
            first_seq: seq,
            last_seq: seq,
            link: (before, before * 4096),
            first_group: seq * 10,
            last_group: seq * 10 + 9,
        }
    }

    #[test]
    fn neighbours_in_the_chain_join_whatever_the_order() {
        // 4 was given up unused: 5 follows 3.
        let before = |seq: u64| if seq == 5 { 3 } else { seq - 1 };
        for order in [[2, 3, 5, 6], [6, 5, 3, 2], [2, 6, 5, 3], [5, 3, 6, 2]] {
            let mut runs = FreedRuns::default();
            for seq in order {
                runs.add(segment(seq, before(seq)));
                runs.add(segment(seq, before(seq)));
            }
            assert_eq!(runs.len(), 1, "{runs:?}");
            let run = runs.run_of(4).copied().expect("inside");
            assert_eq!((run.first_seq, run.last_seq), (2, 6));
            assert_eq!((run.first_group, run.last_group), (20, 69));
            assert_eq!(run.link, (1, 4096));
        }
    }

    #[test]
    fn round_trip_and_every_flipped_bit() {
        let mut runs = FreedRuns::default();
        runs.add(segment(2, 1));
        runs.add(segment(9, 8));
        let bytes = runs.encode(&UUID, 3);
        assert_eq!(FreedRuns::decode(&UUID, 3, &bytes), Ok(runs));
        assert!(FreedRuns::decode(&UUID, 4, &bytes).is_err());
        assert!(FreedRuns::decode(&[4; 16], 3, &bytes).is_err());
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(FreedRuns::decode(&UUID, 3, &bad).is_err(), "bit {bit}");
        }
        for cut in 0..bytes.len() {
            assert!(FreedRuns::decode(&UUID, 3, &bytes[..cut]).is_err());
        }
    }
}
