//! The header of an extent: a run of consecutive records of one log inside a group, or one control event.

use super::{crc, get_u16, get_u32, get_u64, put_u32, put_u64, HeaderFault, Place};
use crate::name::{LogId, LogKind, LogName, MAX_NAME_BYTES};

const MAGIC: u32 = u32::from_le_bytes(*b"FXEX");
/// Bytes of the fixed part; the name (if any) and then the records follow.
pub const EXTENT_HEADER_BYTES: usize = 72;
const CRC_AT: usize = EXTENT_HEADER_BYTES - 4;
const FLAG_NAMED: u8 = 1;

/// What an extent says about its log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum ExtentKind {
    /// Records `[first_offset, first_offset + record_count)` were appended.
    Records = 1,
    /// The log was cut back to `first_offset`.
    Truncate = 2,
    /// The log is empty and starts at `first_offset`.
    Place = 3,
    /// Everything below `first_offset` may be given up.
    Base = 4,
    /// The log accepted the leader of `generation`.
    Accept = 5,
    /// From `first_offset` on, records are appended under `generation`; the body names its leader.
    Begin = 6,
    /// The state of the log restated: its tail is `first_offset`, the body holds the rest.
    State = 7,
}

impl ExtentKind {
    /// Whether it changes the log's state.
    pub fn is_change(self) -> bool {
        match self {
            Self::Truncate | Self::Place | Self::Base | Self::Accept | Self::Begin => true,
            Self::Records | Self::State => false,
        }
    }

    fn from_u16(value: u16) -> Option<Self> {
        Some(match value {
            1 => Self::Records,
            2 => Self::Truncate,
            3 => Self::Place,
            4 => Self::Base,
            5 => Self::Accept,
            6 => Self::Begin,
            7 => Self::State,
            _ => return None,
        })
    }
}

/// Decoded extent header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExtentHeader {
    /// Kind of extent.
    pub kind: ExtentKind,
    /// Kind of log.
    pub log_kind: LogKind,
    /// The log.
    pub log: LogId,
    /// First offset, or the offset a control event is about.
    pub first_offset: u64,
    /// Generation the records were appended under.
    pub generation: u64,
    /// Wall-clock microseconds of the first append in the extent.
    pub time_us: u64,
    /// The log's previous record extent; readers walk these back from an index entry.
    pub prev: Place,
    /// Number of records.
    pub record_count: u32,
    /// Bytes of the records (or of the event's body) behind the name.
    pub records_len: u32,
    /// Events of the log so far, this extent included if it is one; tells a lost event. Version 1 wrote 0.
    pub changes: u32,
    /// Bytes of the name; 0 when the segment already named this log.
    pub name_len: u16,
}

impl ExtentHeader {
    /// Bytes of header, name and records.
    pub fn total_len(&self) -> usize {
        EXTENT_HEADER_BYTES + usize::from(self.name_len) + self.records_len as usize
    }

    /// Bytes before the first record.
    pub fn records_at(&self) -> usize {
        EXTENT_HEADER_BYTES + usize::from(self.name_len)
    }

    /// One past the last offset.
    pub fn end_offset(&self) -> u64 {
        self.first_offset
            .saturating_add(u64::from(self.record_count))
    }

    /// Writes the header; the name must already lie behind it, because the checksum covers it.
    pub fn encode(&self, out: &mut [u8]) {
        let flags = if self.name_len > 0 { FLAG_NAMED } else { 0 };
        // Whole words, because the checksum reads words: reading what was just stored in pieces costs a
        // small record more than the arithmetic.
        let words = [
            u64::from(MAGIC)
                | u64::from(self.kind as u16) << 32
                | u64::from(self.log_kind as u8) << 48
                | u64::from(flags) << 56,
            self.log.0,
            self.first_offset,
            self.generation,
            self.time_us,
            self.prev.segment,
            u64::from(self.prev.position) | u64::from(self.record_count) << 32,
            u64::from(self.records_len)
                | u64::from(self.name_len) << 32
                | u64::from(self.prev.core) << 48,
        ];
        for (at, word) in words.into_iter().enumerate() {
            put_u64(out, at * 8, word);
        }
        put_u32(out, 64, self.changes);
        let crc = checksum(out, usize::from(self.name_len));
        put_u32(out, CRC_AT, crc);
    }

    /// Decodes the header (and checks its name's checksum) at the start of `bytes`.
    pub fn decode(bytes: &[u8]) -> Result<Self, HeaderFault> {
        if bytes.len() < EXTENT_HEADER_BYTES {
            return Err(HeaderFault::Short);
        }
        if get_u32(bytes, 0) != MAGIC {
            return Err(HeaderFault::Magic);
        }
        let name_len = get_u16(bytes, 60);
        let end = EXTENT_HEADER_BYTES + usize::from(name_len);
        if usize::from(name_len) > MAX_NAME_BYTES || bytes.len() < end {
            return Err(HeaderFault::Short);
        }
        if checksum(bytes, usize::from(name_len)) != get_u32(bytes, CRC_AT) {
            return Err(HeaderFault::Checksum);
        }
        let kind = ExtentKind::from_u16(get_u16(bytes, 4)).ok_or(HeaderFault::Field)?;
        let log_kind = LogKind::from_u8(bytes[6]).ok_or(HeaderFault::Field)?;
        let header = Self {
            kind,
            log_kind,
            log: LogId(get_u64(bytes, 8)),
            first_offset: get_u64(bytes, 16),
            generation: get_u64(bytes, 24),
            time_us: get_u64(bytes, 32),
            prev: Place {
                segment: get_u64(bytes, 40),
                position: get_u32(bytes, 48),
                core: get_u16(bytes, 62),
            },
            record_count: get_u32(bytes, 52),
            records_len: get_u32(bytes, 56),
            changes: get_u32(bytes, 64),
            name_len,
        };
        if header
            .first_offset
            .checked_add(u64::from(header.record_count))
            .is_none()
        {
            return Err(HeaderFault::Field);
        }
        Ok(header)
    }

    /// The name behind the header, when the extent carries one that matches its id.
    pub fn name(&self, bytes: &[u8]) -> Option<LogName> {
        let raw = bytes.get(EXTENT_HEADER_BYTES..self.records_at())?;
        let name = LogName::decode(raw)?;
        (LogId::of_encoded(raw) == self.log && name.kind == self.log_kind).then_some(name)
    }
}

fn checksum(bytes: &[u8], name_len: usize) -> u32 {
    let fixed = crc::of_few(&bytes[..CRC_AT]);
    if name_len == 0 {
        return fixed;
    }
    crc32c::crc32c_append(
        fixed,
        &bytes[EXTENT_HEADER_BYTES..EXTENT_HEADER_BYTES + name_len],
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip_and_bit_flips() {
        let name = LogName {
            kind: LogKind::Cache,
            tenant: "t".into(),
            namespace: "n".into(),
            name: "x".into(),
            shard: 1,
        };
        let raw = name.encode();
        let header = ExtentHeader {
            kind: ExtentKind::Records,
            log_kind: LogKind::Cache,
            log: name.id(),
            first_offset: 100,
            generation: 3,
            time_us: 55,
            prev: Place {
                segment: 8,
                position: 4224,
                core: 2,
            },
            record_count: 4,
            records_len: 400,
            changes: 5,
            name_len: raw.len() as u16,
        };
        let mut bytes = vec![0u8; EXTENT_HEADER_BYTES + raw.len()];
        bytes[EXTENT_HEADER_BYTES..].copy_from_slice(&raw);
        header.encode(&mut bytes);
        assert_eq!(ExtentHeader::decode(&bytes), Ok(header));
        assert_eq!(header.name(&bytes), Some(name));
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(ExtentHeader::decode(&bad).is_err(), "bit {bit}");
        }
        for cut in 0..bytes.len() {
            assert!(ExtentHeader::decode(&bytes[..cut]).is_err());
        }
    }
}
