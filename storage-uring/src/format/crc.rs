//! CRC-32C of one record, in one go.
//!
//! A record's checksum covers its log, its offset and all its bytes but the checksum itself. Records are
//! often small, and there are millions a second: the general routine costs a small one more in set-up,
//! alignment and calls than in arithmetic. Same value on every machine; only the way there differs.

use super::put_u64;

/// Bytes from which on the general routine, which works on three places at once, is faster.
#[cfg(target_arch = "x86_64")]
const SHORT_MAX: usize = 512;

/// The checksum of a record: `len` is its first field, `rest` what follows the checksum field.
pub(super) fn of_record(log: u64, offset: u64, len: u32, rest: &[u8]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if rest.len() <= SHORT_MAX && is_x86_feature_detected!("sse4.2") {
        // SAFETY: the instructions are there, as was just asked.
        return unsafe { short(log, offset, len, rest) };
    }
    general(log, offset, len, rest)
}

/// CRC-32C of a few bytes, such as a header.
pub(super) fn of_few(bytes: &[u8]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if bytes.len() <= SHORT_MAX && is_x86_feature_detected!("sse4.2") {
        // SAFETY: the instructions are there, as was just asked.
        return !unsafe { more(u32::MAX, bytes) };
    }
    crc32c::crc32c(bytes)
}

fn general(log: u64, offset: u64, len: u32, rest: &[u8]) -> u32 {
    let mut head = [0u8; 20];
    put_u64(&mut head, 0, log);
    put_u64(&mut head, 8, offset);
    head[16..].copy_from_slice(&len.to_le_bytes());
    crc32c::crc32c_append(crc32c::crc32c(&head), rest)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse4.2")]
#[allow(
    unused_unsafe,
    reason = "the intrinsics are unsafe up to Rust 1.86, safe from 1.87 on"
)]
unsafe fn short(log: u64, offset: u64, len: u32, rest: &[u8]) -> u32 {
    use std::arch::x86_64::{_mm_crc32_u32, _mm_crc32_u64};
    // SAFETY: pure register instructions; the caller made sure that the CPU has them.
    unsafe {
        let mut crc = u64::from(u32::MAX);
        crc = _mm_crc32_u64(crc, log);
        crc = _mm_crc32_u64(crc, offset);
        !more(_mm_crc32_u32(crc as u32, len), rest)
    }
}

/// The register after `bytes`.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse4.2")]
#[inline]
#[allow(unused_unsafe, reason = "as above")]
unsafe fn more(register: u32, bytes: &[u8]) -> u32 {
    use std::arch::x86_64::{_mm_crc32_u64, _mm_crc32_u8};
    let mut crc = u64::from(register);
    let mut words = bytes.chunks_exact(8);
    // SAFETY: pure register instructions; the caller made sure that the CPU has them.
    unsafe {
        for word in &mut words {
            let mut raw = [0u8; 8];
            raw.copy_from_slice(word);
            crc = _mm_crc32_u64(crc, u64::from_le_bytes(raw));
        }
        let mut crc = crc as u32;
        for byte in words.remainder() {
            crc = _mm_crc32_u8(crc, *byte);
        }
        crc
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_gives_the_same_sum() {
        let bytes: Vec<u8> = (0..1200u32).map(|i| (i * 7 + i / 251) as u8).collect();
        for len in (0..80).chain(500..530).chain([1200]) {
            for start in 0..(bytes.len() - len).min(9) {
                let rest = &bytes[start..start + len];
                let (log, offset) = (0x0123_4567_89ab_cdef, 0xfedc_ba98 + len as u64);
                let sum = of_record(log, offset, len as u32, rest);
                assert_eq!(sum, general(log, offset, len as u32, rest), "{start}+{len}");
                assert_eq!(of_few(rest), crc32c::crc32c(rest), "{start}+{len}");
            }
        }
    }

    #[test]
    fn the_sum_is_the_one_of_the_bytes_in_a_row() {
        let mut row = Vec::new();
        row.extend_from_slice(&5u64.to_le_bytes());
        row.extend_from_slice(&9u64.to_le_bytes());
        row.extend_from_slice(&3u32.to_le_bytes());
        row.extend_from_slice(b"whatever follows");
        let sum = of_record(5, 9, 3, b"whatever follows");
        assert_eq!(sum, crc32c::crc32c(&row));
    }
}
