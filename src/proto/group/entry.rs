//! What a group keeps in its shard's two logs: keys and values of records of the cache log's shape.
//!
//! * The cursor log has one key a group, its name; the value is the position, eight little-endian
//!   bytes. A delete forgets the group.
//! * The dead-letter log has one key for each entry: the offset in twenty decimal digits, a slash,
//!   the group's name. The value is one byte: 0 dead, 1 redriven. A delete is an entry that was
//!   discarded, or finished after a redrive.
//!
//! No entry expires. Anything else is a fault of the log and refuses the shard's groups.

use std::sync::Arc;

use bytes::Bytes;

/// Digits of an offset in a key: as many as the largest needs, so that keys sort as offsets do.
const OFFSET_DIGITS: usize = 20;
const DEAD: u8 = 0;
const REDRIVEN: u8 = 1;

/// What the dead-letter log says of one offset of one group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DeadEntry {
    /// Given up on, and listed.
    Dead,
    /// Owed again, whatever the position says.
    Redriven,
}

/// An entry that this version did not write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum EntryFault {
    #[error("the position is not eight bytes")]
    Position,
    #[error("the key does not name an offset and a group")]
    Key,
    #[error("the state is not known")]
    State,
}

impl DeadEntry {
    /// The value of the entry's record.
    pub fn value(self) -> Bytes {
        match self {
            Self::Dead => Bytes::from_static(&[DEAD]),
            Self::Redriven => Bytes::from_static(&[REDRIVEN]),
        }
    }

    /// Reads a stored value.
    pub fn of_value(value: &[u8]) -> Result<Self, EntryFault> {
        match value {
            [DEAD] => Ok(Self::Dead),
            [REDRIVEN] => Ok(Self::Redriven),
            _ => Err(EntryFault::State),
        }
    }
}

/// The key of an entry.
pub fn dead_key(group: &str, offset: u64) -> Arc<str> {
    Arc::from(format!("{offset:020}/{group}"))
}

/// The offset and the group of an entry's key.
pub fn of_dead_key(key: &str) -> Result<(u64, &str), EntryFault> {
    let (digits, rest) = key.split_at_checked(OFFSET_DIGITS).ok_or(EntryFault::Key)?;
    let group = rest.strip_prefix('/').ok_or(EntryFault::Key)?;
    if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(EntryFault::Key);
    }
    let offset = digits.parse().map_err(|_| EntryFault::Key)?;
    Ok((offset, group))
}

/// The value of a cursor's record.
pub fn position_value(position: u64) -> Bytes {
    Bytes::copy_from_slice(&position.to_le_bytes())
}

/// Reads a stored position.
pub fn of_position_value(value: &[u8]) -> Result<u64, EntryFault> {
    let bytes = <[u8; 8]>::try_from(value).map_err(|_| EntryFault::Position)?;
    Ok(u64::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes are a promise to every later version and to every follower.
    #[test]
    fn entries_are_as_written_and_nothing_else_is_read() {
        let key = dead_key("a/b", 7);
        assert_eq!(&*key, "00000000000000000007/a/b");
        assert_eq!(of_dead_key(&key), Ok((7, "a/b")));
        assert_eq!(of_dead_key(&dead_key("", u64::MAX)), Ok((u64::MAX, "")));
        for bad in [
            "",
            "7/g",
            "0000000000000000000x/g",
            "00000000000000000007g",
            "99999999999999999999/g",
            "+0000000000000000007/g",
            "ééééééééééé/g",
        ] {
            assert_eq!(of_dead_key(bad), Err(EntryFault::Key), "{bad}");
        }
        assert_eq!(position_value(258).as_ref(), [2, 1, 0, 0, 0, 0, 0, 0]);
        assert_eq!(of_position_value(&position_value(u64::MAX)), Ok(u64::MAX));
        assert_eq!(of_position_value(&[0; 7]), Err(EntryFault::Position));
        for entry in [DeadEntry::Dead, DeadEntry::Redriven] {
            assert_eq!(DeadEntry::of_value(&entry.value()), Ok(entry));
        }
        assert_eq!(DeadEntry::of_value(&[2]), Err(EntryFault::State));
        assert_eq!(DeadEntry::of_value(&[]), Err(EntryFault::State));
    }
}
