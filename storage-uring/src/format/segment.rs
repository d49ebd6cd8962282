//! The 4096-byte header at the start of every segment file.

use super::extent::EXTENT_HEADER_BYTES;
use super::group::GROUP_HEADER_BYTES;
use super::record::RECORD_HEADER_BYTES;
use super::rewritten::{Rewritten, REWRITTEN_VERSION};
use super::{
    align_up, get_u16, get_u32, get_u64, is_known_version, put_u16, put_u32, put_u64, DataUuid,
    HeaderFault, ALIGN, FORMAT_VERSION,
};
use crate::name::MAX_NAME_BYTES;

const MAGIC: u64 = u64::from_le_bytes(*b"FXLSEG01");
const CRC_AT: usize = ALIGN - 4;
/// Where a rewritten segment says what it was.
const REWRITTEN_AT: usize = 56;

/// Bytes before the first group of a segment.
pub const SEGMENT_HEADER_BYTES: u64 = ALIGN as u64;
/// Smallest segment a configuration may ask for.
pub const MIN_SEGMENT_BYTES: u64 = 256 * 1024;
/// Largest segment; positions in it fit 32 bits with room to spare.
pub const MAX_SEGMENT_BYTES: u64 = 2 << 30;

/// Bytes of the smallest segment that takes a record of `record_bytes`, whatever its log's name.
pub const fn smallest_segment_for(record_bytes: u64) -> u64 {
    let headers = GROUP_HEADER_BYTES + EXTENT_HEADER_BYTES + MAX_NAME_BYTES + RECORD_HEADER_BYTES;
    // The group is padded to whole blocks behind the segment's own header.
    SEGMENT_HEADER_BYTES + align_up(record_bytes + headers as u64 + ALIGN as u64)
}

/// Decoded segment header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentHeader {
    /// The data directory this segment belongs to.
    pub uuid: DataUuid,
    /// Core directory.
    pub core: u16,
    /// Number of cores of that start; logs keep their core as long as it stays the same.
    pub core_count: u16,
    /// Sequence within the core directory, from 1, never reused.
    pub seq: u64,
    /// Boot epoch that created it.
    pub boot_epoch: u64,
    /// Full length of the file as created.
    pub segment_bytes: u64,
    /// Set when the file was rewritten without what nobody needs: frames follow instead of groups.
    pub rewritten: Option<Rewritten>,
}

impl SegmentHeader {
    /// The header as one block.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![0u8; ALIGN];
        put_u64(&mut out, 0, MAGIC);
        let version = self.rewritten.map_or(FORMAT_VERSION, |_| REWRITTEN_VERSION);
        put_u32(&mut out, 8, version);
        put_u16(&mut out, 12, self.core);
        put_u16(&mut out, 14, self.core_count);
        out[16..32].copy_from_slice(&self.uuid);
        put_u64(&mut out, 32, self.seq);
        put_u64(&mut out, 40, self.boot_epoch);
        put_u64(&mut out, 48, self.segment_bytes);
        if let Some(rewritten) = &self.rewritten {
            rewritten.encode(&mut out[REWRITTEN_AT..]);
        }
        let crc = crc32c::crc32c(&out[..CRC_AT]);
        put_u32(&mut out, CRC_AT, crc);
        out
    }

    /// Decodes the first block of a segment file.
    pub fn decode(block: &[u8]) -> Result<Self, HeaderFault> {
        if block.len() < ALIGN {
            return Err(HeaderFault::Short);
        }
        if get_u64(block, 0) != MAGIC {
            return Err(HeaderFault::Magic);
        }
        if crc32c::crc32c(&block[..CRC_AT]) != get_u32(block, CRC_AT) {
            return Err(HeaderFault::Checksum);
        }
        let version = get_u32(block, 8);
        let is_rewritten = version == REWRITTEN_VERSION;
        if !is_known_version(version) && !is_rewritten {
            return Err(HeaderFault::Version(version));
        }
        let mut uuid = [0u8; 16];
        uuid.copy_from_slice(&block[16..32]);
        let seq = get_u64(block, 32);
        let rewritten = match is_rewritten {
            true => Some(Rewritten::decode(&block[REWRITTEN_AT..], seq).ok_or(HeaderFault::Field)?),
            false => None,
        };
        let header = Self {
            uuid,
            core: get_u16(block, 12),
            core_count: get_u16(block, 14),
            seq,
            boot_epoch: get_u64(block, 40),
            segment_bytes: get_u64(block, 48),
            rewritten,
        };
        if header.seq == 0 || header.segment_bytes > MAX_SEGMENT_BYTES {
            return Err(HeaderFault::Field);
        }
        Ok(header)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> SegmentHeader {
        SegmentHeader {
            uuid: [7; 16],
            core: 3,
            core_count: 4,
            seq: 9,
            boot_epoch: 2,
            segment_bytes: 64 << 20,
            rewritten: None,
        }
    }

    #[test]
    fn round_trip_and_every_flipped_bit_is_noticed() {
        let block = sample().encode();
        assert_eq!(SegmentHeader::decode(&block), Ok(sample()));
        for bit in 0..64 * 8 {
            let mut bad = block.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(SegmentHeader::decode(&bad).is_err(), "bit {bit}");
        }
        assert_eq!(
            SegmentHeader::decode(&block[..100]),
            Err(HeaderFault::Short)
        );
    }

    #[test]
    fn a_rewritten_one_has_a_version_of_its_own() {
        let header = SegmentHeader {
            rewritten: Some(Rewritten {
                first_group: 5,
                last_group: 5,
                link: (8, 4096),
                end: 8192,
                newest_time_us: 1,
                durable_group: 9,
            }),
            ..sample()
        };
        let block = header.encode();
        assert_eq!(SegmentHeader::decode(&block), Ok(header));
        assert_eq!(get_u32(&block, 8), 3);
        for bit in 0..(REWRITTEN_AT + Rewritten::BYTES) * 8 {
            let mut bad = block.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(SegmentHeader::decode(&bad).is_err(), "bit {bit}");
        }
        // A link that does not lead back would never end.
        let mut forward = header;
        forward.rewritten.as_mut().expect("set").link.0 = header.seq;
        let block = forward.encode();
        assert_eq!(SegmentHeader::decode(&block), Err(HeaderFault::Field));
    }

    #[test]
    fn unknown_version_is_told_apart_from_damage() {
        let mut block = sample().encode();
        put_u32(&mut block, 8, 99);
        let crc = crc32c::crc32c(&block[..CRC_AT]);
        put_u32(&mut block, CRC_AT, crc);
        assert_eq!(SegmentHeader::decode(&block), Err(HeaderFault::Version(99)));
    }
}
