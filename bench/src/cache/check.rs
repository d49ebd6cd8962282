//! Whether what the brokers answer can be true.
//!
//! Each key is written by one worker, one write at a time, and its writes are numbered; a value carries its
//! key and number. So a read that began when write `low` was answered and ended when write `high` was sent
//! must see one of the writes from `low` to `high`, and a counter's sum after an add is known exactly. A key
//! with a write of unknown outcome is not judged any more, and counted.

use bytes::{BufMut, Bytes, BytesMut};
use serde::{Deserialize, Serialize};

/// Key, number, checksum.
pub const VALUE_HEAD_BYTES: usize = 8 + 8 + 4;
/// Writes of one key that are remembered by kind.
const REMEMBERED: u64 = 64;

/// What was checked, and what was found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheVerify {
    /// Answers judged.
    pub checked: u64,
    /// Answers that cannot be true: an old value, one that was never written, a wrong sum.
    pub wrong: u64,
    /// Misses of what was there.
    pub missing: u64,
    /// Values whose bytes are not those that were written.
    pub corrupt: u64,
    /// Answers about keys that are not judged: a write's outcome is not known.
    pub unjudged: u64,
}

impl CacheVerify {
    /// Whether nothing is wrong.
    pub fn is_clean(&self) -> bool {
        self.wrong + self.missing + self.corrupt == 0
    }
}

/// What is known of one key.
#[derive(Debug, Clone, Copy, Default)]
pub struct KeyState {
    /// Writes sent.
    issued: u64,
    /// Writes answered; at most one less.
    answered: u64,
    /// Which of the last writes were deletes; the newest in the lowest bit.
    deletes: u64,
    /// The counter of the same name.
    pub sum: i64,
    pub has_sum: bool,
    pub is_tainted: bool,
}

/// The value of a key's write.
pub fn value_of(key: u64, number: u64, bytes: usize) -> Bytes {
    let mut out = BytesMut::with_capacity(bytes.max(VALUE_HEAD_BYTES));
    out.put_u64(key);
    out.put_u64(number);
    let filler = bytes.saturating_sub(VALUE_HEAD_BYTES);
    let mut body = BytesMut::with_capacity(filler);
    body.resize(filler, (key ^ number) as u8);
    let mut sum = crc32c::crc32c(&out);
    sum = crc32c::crc32c_append(sum, &body);
    out.put_u32(sum);
    out.extend_from_slice(&body);
    out.freeze()
}

/// Key and number of a value, if its bytes are whole.
fn read_value(value: &[u8]) -> Option<(u64, u64)> {
    let (head, body) = value.split_at_checked(VALUE_HEAD_BYTES)?;
    let (numbers, sum) = head.split_at(16);
    let expected = crc32c::crc32c_append(crc32c::crc32c(numbers), body);
    if sum != expected.to_be_bytes() {
        return None;
    }
    let key = u64::from_be_bytes(numbers[..8].try_into().ok()?);
    let number = u64::from_be_bytes(numbers[8..].try_into().ok()?);
    Some((key, number))
}

impl KeyState {
    /// The number of the write that is about to be sent.
    pub fn issue(&mut self, is_delete: bool) -> u64 {
        self.issued += 1;
        self.deletes = self.deletes << 1 | u64::from(is_delete);
        self.issued
    }

    /// The write was answered.
    pub fn answer(&mut self) {
        self.answered = self.issued;
    }

    /// What a read that begins now must see at least.
    pub fn low(&self) -> u64 {
        self.answered
    }

    /// As it was before its newest write was sent.
    pub fn before_newest(&self) -> Self {
        Self {
            issued: self.issued - 1,
            deletes: self.deletes >> 1,
            ..*self
        }
    }

    fn is_delete(&self, number: u64) -> Option<bool> {
        if number == 0 {
            return Some(true);
        }
        let ago = self.issued - number;
        (ago < REMEMBERED).then(|| self.deletes >> ago & 1 == 1)
    }

    /// Judges what a read of `key` saw that began at `low` and ended now.
    pub fn judge(&self, key: u64, low: u64, value: Option<&[u8]>, verify: &mut CacheVerify) {
        if self.is_tainted {
            verify.unjudged += 1;
            return;
        }
        verify.checked += 1;
        let Some(value) = value else {
            let could_miss =
                (low..=self.issued).any(|number| self.is_delete(number) != Some(false));
            verify.missing += u64::from(!could_miss);
            return;
        };
        match read_value(value) {
            None => verify.corrupt += 1,
            Some((of, number)) => {
                let is_one = of == key
                    && (low..=self.issued).contains(&number)
                    && self.is_delete(number) != Some(true);
                verify.wrong += u64::from(!is_one);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_may_see_the_writes_that_it_overlaps_and_no_others() {
        let mut state = KeyState::default();
        let judge = |state: &KeyState, low, value: Option<&Bytes>| {
            let mut verify = CacheVerify::default();
            state.judge(3, low, value.map(|v| v.as_ref()), &mut verify);
            verify
        };
        assert!(judge(&state, 0, None).is_clean());
        let values: Vec<Bytes> = (0..5).map(|n| value_of(3, n, 40)).collect();
        state.issue(false);
        let low = state.low();
        assert!(judge(&state, low, None).is_clean(), "not answered yet");
        assert!(judge(&state, low, Some(&values[1])).is_clean());
        state.answer();
        assert_eq!(judge(&state, 1, None).missing, 1);
        assert_eq!(judge(&state, 1, Some(&values[2])).wrong, 1, "never written");
        assert_eq!(judge(&state, 1, Some(&value_of(4, 1, 40))).wrong, 1);
        state.issue(true);
        assert!(judge(&state, 1, None).is_clean());
        assert!(judge(&state, 1, Some(&values[1])).is_clean());
        assert_eq!(
            judge(&state, 1, Some(&values[2])).wrong,
            1,
            "that was a delete"
        );
        state.answer();
        assert_eq!(judge(&state, 2, Some(&values[1])).wrong, 1, "an old value");
        let mut bent = values[1].to_vec();
        bent[30] ^= 1;
        assert_eq!(judge(&state, 1, Some(&bent.into())).corrupt, 1);
        state.is_tainted = true;
        assert_eq!(judge(&state, 2, Some(&values[1])).unjudged, 1);
    }
}
