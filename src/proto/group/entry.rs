//! What a group keeps in its shard's two logs: keys and values of records of the cache log's shape.
//!
//! * The cursor log has one key a group, its name; the value is the position and the generation it
//!   was written at, eight little-endian bytes each. A delete forgets the group.
//! * The dead-letter log has one key for each entry: the offset in twenty decimal digits, a slash,
//!   the group's name. The value is one byte, 0 dead, 1 redriven, and the generation. A delete is an
//!   entry that was discarded, or finished after a redrive.
//!
//! No entry expires. Anything else is a fault of the log and refuses the shard's groups; a value
//! without its generation is read as of the newest.
//!
//! The generation matters after a failover of a stream that acknowledges at its leader: the new
//! leader's log may end before what the old one handed out, and other records take those offsets.
//! What was written of them at an older generation is not about them; see [`KnownEnds`]. Below the
//! position every entry stands: nothing there is handed out any more, so without its entry a dead
//! letter would be lost, and a copy that was caught up calls all it holds its leader's generation.

use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};

use super::Restored;
use crate::ids::Generation;

/// Digits of an offset in a key: as many as the largest needs, so that keys sort as offsets do.
const OFFSET_DIGITS: usize = 20;
const GENERATION_BYTES: usize = 8;
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
    pub fn value(self, generation: Generation) -> Bytes {
        let state = match self {
            Self::Dead => DEAD,
            Self::Redriven => REDRIVEN,
        };
        let mut value = BytesMut::with_capacity(1 + GENERATION_BYTES);
        value.put_u8(state);
        value.put_u64_le(generation.0);
        value.freeze()
    }

    /// Reads a stored value.
    pub fn of_value(value: &[u8]) -> Result<(Self, Generation), EntryFault> {
        let (&state, rest) = value.split_first().ok_or(EntryFault::State)?;
        let generation = of_generation(rest).ok_or(EntryFault::State)?;
        match state {
            DEAD => Ok((Self::Dead, generation)),
            REDRIVEN => Ok((Self::Redriven, generation)),
            _ => Err(EntryFault::State),
        }
    }
}

/// Where in a stream each generation began, oldest first: how far what was written at one of them
/// can be about the records that are there now.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KnownEnds(Vec<(Generation, u64)>);

impl KnownEnds {
    /// Of the history of the stream's log.
    pub fn of(starts: impl IntoIterator<Item = (Generation, u64)>) -> Self {
        Self(starts.into_iter().collect())
    }

    /// One past the last offset that meant then what it means now.
    pub fn end_of(&self, generation: Generation) -> u64 {
        let later = self.0.iter().filter(|(at, _)| *at > generation);
        later.map(|(_, start)| *start).min().unwrap_or(u64::MAX)
    }
}

fn of_generation(bytes: &[u8]) -> Option<Generation> {
    match bytes {
        [] => Some(Generation(u64::MAX)),
        bytes => Some(Generation(u64::from_le_bytes(bytes.try_into().ok()?))),
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
pub fn position_value(position: u64, generation: Generation) -> Bytes {
    let mut value = BytesMut::with_capacity(2 * GENERATION_BYTES);
    value.put_u64_le(position);
    value.put_u64_le(generation.0);
    value.freeze()
}

/// Reads a stored position, and the generation it was written at.
pub fn of_position_value(value: &[u8]) -> Result<(u64, Generation), EntryFault> {
    let (position, rest) = value.split_first_chunk().ok_or(EntryFault::Position)?;
    let generation = of_generation(rest).ok_or(EntryFault::Position)?;
    Ok((u64::from_le_bytes(*position), generation))
}

/// What a group's logs say of it: the value of its cursor, and key and value of dead letters, those
/// of other groups among them. `ends` tells what of it may not be about this stream any more: of the
/// position what lies past such an end, of the entries those that are past the position as well.
pub fn restore<'a>(
    group: &str,
    ends: &KnownEnds,
    cursor: Option<&[u8]>,
    letters: impl Iterator<Item = (&'a str, Option<&'a Bytes>)>,
) -> Result<Restored, EntryFault> {
    let mut restored = Restored::default();
    if let Some(value) = cursor {
        let (position, generation) = of_position_value(value)?;
        restored.position = Some(position.min(ends.end_of(generation)));
    }
    for (key, value) in letters {
        let (offset, of) = of_dead_key(key)?;
        if of != group {
            continue;
        }
        let value = value.map_or(&[][..], |value| value.as_ref());
        let (entry, generation) = DeadEntry::of_value(value)?;
        let is_passed = restored.position.is_some_and(|position| offset < position);
        match is_passed || offset < ends.end_of(generation) {
            true => restored.entries.push((offset, entry)),
            false => restored.stale.push(offset),
        }
    }
    Ok(restored)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::group::{Group, GroupAction, GroupLimits, GroupOp, GroupReply};
    use crate::proto::MonoTime;

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
        let at = Generation(3);
        let bytes = [2, 1, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(position_value(258, at).as_ref(), bytes);
        assert_eq!(
            of_position_value(&position_value(u64::MAX, at)),
            Ok((u64::MAX, at))
        );
        assert_eq!(
            of_position_value(&bytes[..8]),
            Ok((258, Generation(u64::MAX)))
        );
        for wrong in [7, 9, 15] {
            assert_eq!(
                of_position_value(&bytes[..wrong]),
                Err(EntryFault::Position)
            );
        }
        for entry in [DeadEntry::Dead, DeadEntry::Redriven] {
            assert_eq!(DeadEntry::of_value(&entry.value(at)), Ok((entry, at)));
        }
        assert_eq!(
            DeadEntry::Dead.value(at).as_ref(),
            [0, 3, 0, 0, 0, 0, 0, 0, 0]
        );
        assert_eq!(DeadEntry::of_value(&[2]), Err(EntryFault::State));
        assert_eq!(DeadEntry::of_value(&[0, 1]), Err(EntryFault::State));
        assert_eq!(DeadEntry::of_value(&[]), Err(EntryFault::State));
    }

    /// Generation 2 began at 50 in a log that generation 1 had taken further elsewhere.
    #[test]
    fn what_was_said_of_records_that_are_gone_is_not_said_of_those_in_their_place() {
        let ends = KnownEnds::of([(Generation(1), 0), (Generation(2), 50), (Generation(4), 70)]);
        let restored = |position, generation| {
            let cursor = position_value(position, Generation(generation));
            let letters = [(60, 1), (49, 1), (60, 2), (75, 4)].map(|(offset, generation)| {
                let value = DeadEntry::Dead.value(Generation(generation));
                (dead_key("g", offset), value)
            });
            let letters = letters.iter().map(|(key, value)| (&**key, Some(value)));
            let restored = restore("g", &ends, Some(&cursor), letters).unwrap();
            let entries = restored.entries.into_iter().map(|(offset, _)| offset);
            (restored.position.unwrap(), entries.collect::<Vec<_>>())
        };
        assert_eq!(restored(90, 1), (50, vec![49, 60, 75]));
        assert_eq!(restored(40, 1).0, 40);
        assert_eq!(restored(60, 2).0, 60);
        assert_eq!(restored(90, 3).0, 70);
        assert_eq!(restored(90, 4).0, 90);
        assert_eq!(restored(90, 5).0, 90);
    }

    /// A follower that was caught up at generation 1 has all records under that label. The position
    /// of generation 1 is about them, and passed the letters of generation 0 because they are there.
    #[test]
    fn a_letter_below_the_position_is_kept_whatever_the_copy_calls_its_records() {
        let ends = KnownEnds::of([(Generation(1), 0), (Generation(2), 9)]);
        let cursor = position_value(4, Generation(1));
        let letters = [
            (0, DeadEntry::Dead),
            (3, DeadEntry::Redriven),
            (4, DeadEntry::Dead),
            (6, DeadEntry::Redriven),
        ];
        let letters = letters.map(|(offset, entry)| {
            let value = entry.value(Generation(0));
            (dead_key("g", offset), value)
        });
        let letters = letters.iter().map(|(key, value)| (&**key, Some(value)));
        let restored = restore("g", &ends, Some(&cursor), letters).unwrap();
        assert_eq!(restored.position, Some(4));
        let kept = vec![(0, DeadEntry::Dead), (3, DeadEntry::Redriven)];
        assert_eq!(restored.entries, kept);
        assert_eq!(restored.stale, [4, 6]);

        // What is past it goes before the position can pass its offset, and hides no record.
        let mut group = Group::new(GroupLimits::default(), MonoTime::ZERO, restored, 0, 9);
        for offset in [4, 6] {
            let entry = None;
            let action = GroupAction::WriteEntry { offset, entry };
            assert_eq!(group.poll_action(), Some(action));
        }
        group.on_request(MonoTime::ZERO, 1, GroupOp::ListDead);
        let result = Ok(GroupReply::DeadLetters(vec![0]));
        let answer = GroupAction::Answer { ticket: 1, result };
        assert_eq!(group.poll_action(), Some(answer));
        assert_eq!(group.poll_action(), None);
    }
}
