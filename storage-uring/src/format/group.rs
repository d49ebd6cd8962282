//! The header of a commit group: what one aligned synced write stores.
//!
//! A group is only live at the place it names (segment, boot epoch, group sequence), under the checksum seed
//! of its data directory. `durable_group` is the vouching mark: the highest group known durable when this one
//! was built. `prev_segment`/`prev_end` say where the log ended before this group, which makes every earlier
//! cut permanent.

use super::{
    get_u16, get_u32, get_u64, is_known_version, put_u16, put_u32, put_u64, zero_sectors, DataUuid,
    HeaderFault, ALIGN, FORMAT_VERSION,
};

/// First eight bytes of a live group.
pub const GROUP_MAGIC: u64 = u64::from_le_bytes(*b"FXGROUP1");
/// Bytes of the header; extents start right behind it.
pub const GROUP_HEADER_BYTES: usize = 128;
const CRC_AT: usize = GROUP_HEADER_BYTES - 4;
/// Flag: written by an orderly stop; holds no extents and vouches for everything before it.
pub const GROUP_FLAG_CLOSE: u16 = 1;

/// Decoded group header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GroupHeader {
    /// Bytes on disk, a multiple of 4096.
    pub total_len: u64,
    /// Bytes in use, header included; the rest is zero.
    pub used_len: u64,
    /// Segment the group was written to.
    pub segment: u64,
    /// Boot epoch that wrote it.
    pub boot_epoch: u64,
    /// Sequence within the core log; consecutive over segments and boots.
    pub group: u64,
    /// Highest group known durable when this one was built.
    pub durable_group: u64,
    /// Segment holding the group before this one; 0 for the first group of a core log.
    pub prev_segment: u64,
    /// Position one past the group before this one, in `prev_segment`.
    pub prev_end: u64,
    /// Number of extents.
    pub extents: u32,
    /// Number of records in all extents.
    pub records: u32,
    /// Wall-clock microseconds when the group was sealed.
    pub time_us: u64,
    /// Core directory.
    pub core: u16,
    /// `GROUP_FLAG_*`.
    pub flags: u16,
    /// All-zero sectors among the used bytes; more of them on disk means a write that did not finish.
    pub zero_sectors: u32,
    /// CRC-32C of the used bytes behind the header.
    pub body_crc: u32,
}

impl GroupHeader {
    /// Where the log ended before this group: segment and position.
    pub fn link(&self) -> (u64, u64) {
        (self.prev_segment, self.prev_end)
    }

    /// Fills in the body checksum and zero-sector count from `group` and writes the header over its start.
    pub fn seal(mut self, uuid: &DataUuid, group: &mut [u8]) -> Self {
        let used = self.used_len as usize;
        self.body_crc = crc32c::crc32c(&group[GROUP_HEADER_BYTES..used]);
        // The header's own sector starts with the magic and is never zero, whatever follows it.
        self.zero_sectors = if used > super::SECTOR {
            zero_sectors(&group[super::SECTOR..used])
        } else {
            0
        };
        self.encode(uuid, group);
        self
    }

    fn encode(&self, uuid: &DataUuid, out: &mut [u8]) {
        out[..GROUP_HEADER_BYTES].fill(0);
        put_u64(out, 0, GROUP_MAGIC);
        put_u32(out, 8, FORMAT_VERSION);
        put_u32(out, 12, GROUP_HEADER_BYTES as u32);
        put_u64(out, 16, self.total_len);
        put_u64(out, 24, self.used_len);
        put_u64(out, 32, self.segment);
        put_u64(out, 40, self.boot_epoch);
        put_u64(out, 48, self.group);
        put_u64(out, 56, self.durable_group);
        put_u64(out, 64, self.prev_segment);
        put_u64(out, 72, self.prev_end);
        put_u32(out, 80, self.extents);
        put_u32(out, 84, self.records);
        put_u64(out, 88, self.time_us);
        put_u16(out, 96, self.core);
        put_u16(out, 98, self.flags);
        put_u32(out, 100, self.zero_sectors);
        put_u32(out, 104, self.body_crc);
        let crc = header_crc(uuid, out);
        put_u32(out, CRC_AT, crc);
    }

    /// Decodes a header. Whether the group is live at this place is the caller's question.
    pub fn decode(uuid: &DataUuid, bytes: &[u8]) -> Result<Self, HeaderFault> {
        if bytes.len() < GROUP_HEADER_BYTES {
            return Err(HeaderFault::Short);
        }
        if get_u64(bytes, 0) != GROUP_MAGIC {
            return Err(HeaderFault::Magic);
        }
        if header_crc(uuid, bytes) != get_u32(bytes, CRC_AT) {
            return Err(HeaderFault::Checksum);
        }
        let version = get_u32(bytes, 8);
        if !is_known_version(version) {
            return Err(HeaderFault::Version(version));
        }
        let header = Self {
            total_len: get_u64(bytes, 16),
            used_len: get_u64(bytes, 24),
            segment: get_u64(bytes, 32),
            boot_epoch: get_u64(bytes, 40),
            group: get_u64(bytes, 48),
            durable_group: get_u64(bytes, 56),
            prev_segment: get_u64(bytes, 64),
            prev_end: get_u64(bytes, 72),
            extents: get_u32(bytes, 80),
            records: get_u32(bytes, 84),
            time_us: get_u64(bytes, 88),
            core: get_u16(bytes, 96),
            flags: get_u16(bytes, 98),
            zero_sectors: get_u32(bytes, 100),
            body_crc: get_u32(bytes, 104),
        };
        header.check().map(|()| header)
    }

    fn check(&self) -> Result<(), HeaderFault> {
        let sane = self.total_len % ALIGN as u64 == 0
            && self.total_len <= super::segment::MAX_SEGMENT_BYTES
            && self.used_len >= GROUP_HEADER_BYTES as u64
            && self.used_len <= self.total_len
            && self.total_len - self.used_len < ALIGN as u64
            && self.durable_group < self.group
            && self.group < u64::MAX;
        if sane {
            Ok(())
        } else {
            Err(HeaderFault::Field)
        }
    }

    /// Whether the used bytes are the ones that were sealed.
    pub fn body_matches(&self, group: &[u8]) -> bool {
        let used = self.used_len as usize;
        group.len() >= used && crc32c::crc32c(&group[GROUP_HEADER_BYTES..used]) == self.body_crc
    }

    /// Whether `group` (its header readable) shows sectors that were never written.
    pub fn shows_unwritten_sectors(&self, group: &[u8]) -> bool {
        let used = self.used_len as usize;
        if group.len() < used {
            return true;
        }
        used > super::SECTOR && zero_sectors(&group[super::SECTOR..used]) > self.zero_sectors
    }
}

fn header_crc(uuid: &DataUuid, bytes: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(uuid), &bytes[..CRC_AT])
}

/// Whether bytes that do not decode as a header still look like one that was damaged: either the magic is
/// within a few bits, or the place fields are the expected ones.
pub fn resembles_header(bytes: &[u8], segment: u64, group: u64) -> bool {
    if bytes.len() < GROUP_HEADER_BYTES {
        return false;
    }
    let magic_bits = (get_u64(bytes, 0) ^ GROUP_MAGIC).count_ones();
    magic_bits <= 8 || (get_u64(bytes, 32) == segment && get_u64(bytes, 48) == group)
}

#[cfg(test)]
mod tests {
    use super::*;

    const UUID: DataUuid = [9; 16];

    fn sample(body: usize) -> (GroupHeader, Vec<u8>) {
        let used = GROUP_HEADER_BYTES + body;
        let mut bytes = vec![0u8; used.next_multiple_of(ALIGN)];
        for (i, byte) in bytes[GROUP_HEADER_BYTES..used].iter_mut().enumerate() {
            *byte = (i % 251) as u8;
        }
        let header = GroupHeader {
            total_len: bytes.len() as u64,
            used_len: used as u64,
            segment: 4,
            boot_epoch: 2,
            group: 77,
            durable_group: 75,
            prev_segment: 3,
            prev_end: 8192,
            extents: 2,
            records: 11,
            time_us: 123,
            core: 1,
            ..GroupHeader::default()
        };
        let header = header.seal(&UUID, &mut bytes);
        (header, bytes)
    }

    #[test]
    fn round_trip_and_header_bit_flips() {
        let (header, bytes) = sample(9000);
        assert_eq!(GroupHeader::decode(&UUID, &bytes), Ok(header));
        assert!(header.body_matches(&bytes));
        for bit in 0..GROUP_HEADER_BYTES * 8 {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(GroupHeader::decode(&UUID, &bad).is_err(), "bit {bit}");
            assert!(resembles_header(&bad, 4, 77), "bit {bit}");
        }
        assert_eq!(
            GroupHeader::decode(&[1; 16], &bytes),
            Err(HeaderFault::Checksum)
        );
    }

    #[test]
    fn lost_sectors_are_evidence_and_flipped_bits_are_not() {
        let (header, bytes) = sample(9000);
        let mut flipped = bytes.clone();
        flipped[5000] ^= 1;
        assert!(!header.body_matches(&flipped));
        assert!(!header.shows_unwritten_sectors(&flipped));
        let mut torn = bytes.clone();
        torn[4096..4608].fill(0);
        assert!(header.shows_unwritten_sectors(&torn));
        assert!(header.shows_unwritten_sectors(&bytes[..8000]));
    }

    #[test]
    fn legitimate_zero_sectors_are_not_evidence() {
        let mut bytes = vec![0u8; 8192];
        let header = GroupHeader {
            total_len: 8192,
            used_len: 8000,
            segment: 1,
            group: 1,
            ..GroupHeader::default()
        }
        .seal(&UUID, &mut bytes);
        assert_eq!(header.zero_sectors, 15);
        assert!(header.body_matches(&bytes));
        let mut flipped = bytes.clone();
        flipped[7000] = 1;
        assert!(!header.body_matches(&flipped));
        assert!(!header.shows_unwritten_sectors(&flipped));
    }
}
