//! One record of a run: who wrote it, where it stands in its writer's sequence, and a checksum.
//!
//! Every record of every run differs from every other, so a reader can tell a lost record from a
//! repeated, moved or damaged one. Invariant: the checksum covers every other byte of the payload,
//! its length included by way of them all.

use bytes::{BufMut, BytesMut};

/// Bytes before the filler: run, writer, shard, sequence, checksum. The smallest payload.
pub const RECORD_HEADER_BYTES: usize = 28;
const CRC_AT: usize = 24;

/// What makes a record the only one of its kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RecordId {
    /// Random, one a run.
    pub run: u64,
    /// One stream of one connection; a new connection is a new writer.
    pub writer: u32,
    /// The shard the writer meant.
    pub shard: u32,
    /// Counts from 0 for each writer and shard.
    pub sequence: u64,
}

/// A payload that is not a record, or not any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RecordFault {
    /// Shorter than the smallest record.
    #[error("{0} bytes are too few for a record")]
    TooShort(usize),
    /// The bytes are not those that were written.
    #[error("the checksum does not match")]
    Checksum,
}

/// Writes records of one size.
#[derive(Debug, Clone)]
pub struct RecordMaker {
    run: u64,
    filler: Vec<u8>,
}

impl RecordMaker {
    /// Records of `payload_bytes`, at least [`RECORD_HEADER_BYTES`].
    pub fn new(run: u64, payload_bytes: usize) -> Self {
        let filler_bytes = payload_bytes.saturating_sub(RECORD_HEADER_BYTES);
        let mut state = run | 1;
        let filler = (0..filler_bytes)
            .map(|_| {
                // Filler that no layer below could compress.
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                (state >> 56) as u8
            })
            .collect();
        Self { run, filler }
    }

    /// Length of each record.
    pub fn payload_bytes(&self) -> usize {
        RECORD_HEADER_BYTES + self.filler.len()
    }

    /// Appends one record.
    pub fn put(&self, out: &mut BytesMut, writer: u32, shard: u32, sequence: u64) {
        let start = out.len();
        out.put_u64(self.run);
        out.put_u32(writer);
        out.put_u32(shard);
        out.put_u64(sequence);
        let crc = crc32c::crc32c_append(crc32c::crc32c(&out[start..]), &self.filler);
        out.put_u32(crc);
        out.put_slice(&self.filler);
    }

    /// Appends a payload section (`u32 count`, then `u32 length` and bytes each) of records that
    /// follow one another from `first_sequence` on.
    pub fn section(&self, writer: u32, shard: u32, first_sequence: u64, count: u32) -> BytesMut {
        let each = 4 + self.payload_bytes();
        let mut out = BytesMut::with_capacity(4 + each * count as usize);
        out.put_u32(count);
        for i in 0..u64::from(count) {
            out.put_u32(self.payload_bytes() as u32);
            self.put(&mut out, writer, shard, first_sequence + i);
        }
        out
    }
}

/// Reads a record back.
pub fn parse_record(payload: &[u8]) -> Result<RecordId, RecordFault> {
    let Some((header, filler)) = payload.split_first_chunk::<RECORD_HEADER_BYTES>() else {
        return Err(RecordFault::TooShort(payload.len()));
    };
    let crc = crc32c::crc32c_append(crc32c::crc32c(&header[..CRC_AT]), filler);
    if crc.to_be_bytes() != header[CRC_AT..] {
        return Err(RecordFault::Checksum);
    }
    let word = |at: usize| {
        let mut bytes = [0; 4];
        bytes.copy_from_slice(&header[at..at + 4]);
        u32::from_be_bytes(bytes)
    };
    let long = |at: usize| u64::from(word(at)) << 32 | u64::from(word(at + 4));
    Ok(RecordId {
        run: long(0),
        writer: word(8),
        shard: word(12),
        sequence: long(16),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_reads_back_and_any_change_is_seen() {
        for bytes in [RECORD_HEADER_BYTES, 29, 100, 1024] {
            let maker = RecordMaker::new(0x1122_3344_5566_7788, bytes);
            let mut out = BytesMut::new();
            maker.put(&mut out, 7, 3, 1 << 40);
            assert_eq!(out.len(), bytes);
            let id = parse_record(&out).unwrap();
            assert_eq!(
                (id.run, id.writer, id.shard, id.sequence),
                (0x1122_3344_5566_7788, 7, 3, 1 << 40)
            );
            for at in 0..bytes {
                let mut damaged = out.to_vec();
                damaged[at] ^= 0x10;
                assert!(parse_record(&damaged).is_err(), "byte {at} of {bytes}");
            }
            assert!(parse_record(&out[..bytes - 1]).is_err());
        }
    }

    #[test]
    fn a_section_is_one_the_protocol_takes() {
        let maker = RecordMaker::new(9, 100);
        let section = maker.section(1, 0, 10, 3).freeze();
        let payloads = felix_uring::wire::client::Payloads::from_wire_section(section).unwrap();
        let sequences: Vec<u64> = payloads
            .iter()
            .map(|p| parse_record(p).unwrap().sequence)
            .collect();
        assert_eq!(sequences, [10, 11, 12]);
    }
}
