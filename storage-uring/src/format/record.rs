//! One record: a 16-byte header and the payload.

use super::{crc, get_u32, put_u32, put_u64};
use crate::name::LogId;

/// Bytes before the payload.
pub const RECORD_HEADER_BYTES: usize = 16;
/// The only kind of record written by this version: a payload of the log's owner.
pub const RECORD_KIND_PAYLOAD: u8 = 0;

/// Why a record was not accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordFault {
    /// The bytes end before the record does.
    Short,
    /// The checksum does not match.
    Checksum,
    /// A kind this version does not write.
    Kind(u8),
}

/// Appends a record into `out`, which must have room, and returns the bytes used.
pub fn encode(
    out: &mut [u8],
    log: LogId,
    offset: u64,
    time_delta_us: u32,
    payload: &[u8],
) -> usize {
    let total = RECORD_HEADER_BYTES + payload.len();
    put_u32(out, 0, payload.len() as u32);
    // One store for the eight bytes that the checksum reads as one.
    let kind_and_time = u64::from(RECORD_KIND_PAYLOAD) | u64::from(time_delta_us) << 32;
    put_u64(out, 8, kind_and_time);
    out[RECORD_HEADER_BYTES..total].copy_from_slice(payload);
    let crc = checksum(&out[..total], log, offset);
    put_u32(out, 4, crc);
    total
}

/// Where a record's payload lies in the bytes it was decoded from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordSpan {
    /// Start of the payload.
    pub start: usize,
    /// One past the payload, also one past the record.
    pub end: usize,
    /// Microseconds after the extent's time.
    pub time_delta_us: u32,
}

/// Decodes and checks the record at `at`.
pub fn decode(bytes: &[u8], at: usize, log: LogId, offset: u64) -> Result<RecordSpan, RecordFault> {
    let span = skip(bytes, at)?;
    let record = &bytes[at..span.end];
    if checksum(record, log, offset) != get_u32(record, 4) {
        return Err(RecordFault::Checksum);
    }
    if record[8] != RECORD_KIND_PAYLOAD {
        return Err(RecordFault::Kind(record[8]));
    }
    Ok(span)
}

/// The span of the record at `at`, unchecked; used to step over records nobody asked for.
pub fn skip(bytes: &[u8], at: usize) -> Result<RecordSpan, RecordFault> {
    let header = bytes
        .get(at..at + RECORD_HEADER_BYTES)
        .ok_or(RecordFault::Short)?;
    let len = get_u32(header, 0) as usize;
    let start = at + RECORD_HEADER_BYTES;
    let end = start.checked_add(len).ok_or(RecordFault::Short)?;
    if end > bytes.len() {
        return Err(RecordFault::Short);
    }
    Ok(RecordSpan {
        start,
        end,
        time_delta_us: get_u32(header, 12),
    })
}

/// Binds a record to its log and offset, so that one read from the wrong place is never accepted.
fn checksum(record: &[u8], log: LogId, offset: u64) -> u32 {
    crc::of_record(log.0, offset, get_u32(record, 0), &record[8..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip_binds_log_offset_and_every_bit() {
        let log = LogId(42);
        for payload in [&b""[..], b"x", &[0u8; 700]] {
            let mut bytes = vec![0u8; RECORD_HEADER_BYTES + payload.len()];
            assert_eq!(encode(&mut bytes, log, 5, 17, payload), bytes.len());
            let span = decode(&bytes, 0, log, 5).expect("decodes");
            assert_eq!(&bytes[span.start..span.end], payload);
            assert_eq!(span.time_delta_us, 17);
            assert_eq!(decode(&bytes, 0, log, 6), Err(RecordFault::Checksum));
            assert_eq!(decode(&bytes, 0, LogId(43), 5), Err(RecordFault::Checksum));
            for bit in 0..bytes.len() * 8 {
                let mut bad = bytes.clone();
                bad[bit / 8] ^= 1 << (bit % 8);
                assert!(decode(&bad, 0, log, 5).is_err(), "bit {bit}");
            }
        }
    }
}
