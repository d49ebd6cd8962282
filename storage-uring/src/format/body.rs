//! Bodies of events: what follows the name in an extent that holds no records.
//!
//! A body ends with a CRC of its own that is bound to log and offset like a record's, so that an event in a
//! group with other damage can still be told good from bad.

use super::extent::ExtentHeader;
use super::{get_u32, put_u32, record_seed};
use crate::name::LogId;

/// Longest name of a leader.
pub const MAX_LEADER_BYTES: usize = 255;
/// Bytes of a body's checksum.
pub const CRC_BYTES: usize = 4;

/// Bytes the body of a *begin* takes.
pub fn leader_body_len(leader: &str) -> usize {
    leader.len() + CRC_BYTES
}

/// Writes the body of a *begin*.
pub fn encode_leader(out: &mut [u8], log: LogId, offset: u64, leader: &str) {
    out[..leader.len()].copy_from_slice(leader.as_bytes());
    seal(&mut out[..leader.len() + CRC_BYTES], log, offset);
}

/// The leader a *begin* names. `bytes` starts at the extent's header.
pub fn decode_leader<'a>(header: &ExtentHeader, bytes: &'a [u8]) -> Option<&'a str> {
    let content = opened(header, bytes)?;
    (content.len() <= MAX_LEADER_BYTES)
        .then(|| std::str::from_utf8(content).ok())
        .flatten()
}

/// Fills in the checksum at the end of a body.
pub fn seal(body: &mut [u8], log: LogId, offset: u64) {
    let end = body.len() - CRC_BYTES;
    let crc = crc32c::crc32c_append(record_seed(log, offset), &body[..end]);
    put_u32(body, end, crc);
}

/// The content of a body whose checksum matches.
pub fn opened<'a>(header: &ExtentHeader, bytes: &'a [u8]) -> Option<&'a [u8]> {
    let body = bytes.get(header.records_at()..header.total_len())?;
    let end = body.len().checked_sub(CRC_BYTES)?;
    let crc = crc32c::crc32c_append(record_seed(header.log, header.first_offset), &body[..end]);
    (crc == get_u32(body, end)).then(|| &body[..end])
}
