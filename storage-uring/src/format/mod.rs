//! Byte layouts of the core log. `docs/storage-format.md` describes them byte by byte.
//!
//! Pure encoding and decoding: no files, no clocks. Every integer is little-endian. Decoders take bytes that
//! came from a disk, so they answer with a typed fault and never panic.
//!
//! Invariants: a header never fills a 512-byte sector with zeros; everything a decoder returns was covered by
//! a CRC that matched.

pub(crate) mod body;
mod crc;
pub mod extent;
pub mod freed;
pub mod group;
pub mod record;
pub mod rewritten;
pub mod segment;

use crate::name::LogId;

/// Alignment of every file offset, length and buffer. Logical blocks may be 512 bytes, but file systems and
/// many devices work in 4096.
pub const ALIGN: usize = 4096;
/// Smallest unit a device writes atomically.
pub const SECTOR: usize = 512;
/// Version of the layouts in this module, and the one that is written.
pub const FORMAT_VERSION: u32 = 2;
/// Oldest version that is still read. Version 1 lacks the log state (extents *accept* and *begin*, and the
/// number of changes in extent headers); what it has lies where version 2 has it.
pub const OLDEST_VERSION: u32 = 1;

/// Whether this build reads that version.
pub const fn is_known_version(version: u32) -> bool {
    OLDEST_VERSION <= version && version <= FORMAT_VERSION
}

/// The unique id of a data directory; seeds header checksums so that foreign bytes are never taken for ours.
pub type DataUuid = [u8; 16];

/// Why a header was not accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeaderFault {
    /// Too few bytes to hold a header.
    Short,
    /// The first bytes are not the magic of this kind of header.
    Magic,
    /// The magic is right and the checksum is not.
    Checksum,
    /// The checksum is right and the version is one this build does not know.
    Version(u32),
    /// The checksum is right and a field contradicts another.
    Field,
}

/// Rounds up to the alignment.
pub const fn align_up(value: u64) -> u64 {
    value.next_multiple_of(ALIGN as u64)
}

/// Number of all-zero 512-byte sectors in `bytes`; a trailing partial sector counts when all its bytes are 0.
pub fn zero_sectors(bytes: &[u8]) -> u32 {
    let mut zero = 0;
    for sector in bytes.chunks(SECTOR) {
        // Almost every sector of a group is decided by its first byte or two.
        if sector[0] == 0 && sector.iter().all(|byte| *byte == 0) {
            zero += 1;
        }
    }
    zero
}

pub(crate) fn get_u16(bytes: &[u8], at: usize) -> u16 {
    let mut raw = [0u8; 2];
    raw.copy_from_slice(&bytes[at..at + 2]);
    u16::from_le_bytes(raw)
}

pub(crate) fn get_u32(bytes: &[u8], at: usize) -> u32 {
    let mut raw = [0u8; 4];
    raw.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(raw)
}

pub(crate) fn get_u64(bytes: &[u8], at: usize) -> u64 {
    let mut raw = [0u8; 8];
    raw.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(raw)
}

pub(crate) fn put_u16(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
}

pub(crate) fn put_u32(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

pub(crate) fn put_u64(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

/// A place in the core logs: which core's directory, which segment, which byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Place {
    /// Sequence of the segment within its core's directory; 0 is no segment.
    pub segment: u64,
    /// Byte position of an extent header in that segment.
    pub position: u32,
    /// Core directory the segment is in.
    pub core: u16,
}

impl Place {
    /// "No earlier extent".
    pub const NONE: Place = Place {
        segment: 0,
        position: 0,
        core: 0,
    };

    /// Whether this is a place at all.
    pub fn is_some(self) -> bool {
        self.segment != 0
    }
}

/// Seed of the checksum of a control event's body: binds it to its log and offset, so that one read from the
/// wrong place is never accepted. That of a record begins the same way.
pub(crate) fn record_seed(log: LogId, offset: u64) -> u32 {
    let mut seed = [0u8; 16];
    seed[..8].copy_from_slice(&log.0.to_le_bytes());
    seed[8..].copy_from_slice(&offset.to_le_bytes());
    crc32c::crc32c(&seed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_sectors_are_counted_per_sector() {
        let mut bytes = vec![0u8; 4096];
        assert_eq!(zero_sectors(&bytes), 8);
        bytes[511] = 1;
        bytes[512] = 1;
        assert_eq!(zero_sectors(&bytes), 6);
        assert_eq!(zero_sectors(&bytes[..1025]), 1);
        assert_eq!(zero_sectors(&[]), 0);
    }
}
