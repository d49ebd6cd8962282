//! The state of a log beside its records: accepted generation, history of leaders, events.
//!
//! Pure. The same rules run when an event becomes durable and when recovery meets it.
//!
//! Invariants:
//! - the accepted generation never falls (I8 of the protocol document);
//! - history ascends strictly in generation and weakly in start (I12);
//! - history is bounded by `HISTORY_MAX` entries; the oldest go first.

use std::sync::Arc;

use crate::format::body;
use crate::format::extent::{ExtentHeader, ExtentKind};
use crate::format::{get_u32, get_u64, put_u32, put_u64};

/// Entries of a log's history that are kept.
pub const HISTORY_MAX: usize = 1024;

/// The number of the event after event `number` of a log; 0 is none yet, and what version 1 wrote. Numbers
/// begin anew after the last: a header from a disk may hold any.
pub(crate) const fn number_after(number: u32) -> u32 {
    match number.checked_add(1) {
        Some(next) => next,
        None => 1,
    }
}

/// A change to a log that is not an append of records, as a caller asks for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ControlEvent<'a> {
    /// Cut the log back to this tail; history entries that start at or above it go.
    Truncate(u64),
    /// Drop every record and start the log at this offset. The accepted generation stays, history goes. The
    /// one event that a log takes in which recovery found damage: it is whole from here on.
    Place(u64),
    /// Give up everything below this offset.
    Base(u64),
    /// A leader of this generation was accepted.
    Accept(u64),
    /// Records from the tail on belong to this generation. Accepts it, too.
    Begin {
        /// The generation; at least the accepted one.
        generation: u64,
        /// Node id of its leader, at most 255 bytes.
        leader: &'a str,
    },
}

/// One leadership: records from `start` up to the next entry's start.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct HistoryEntry {
    /// Generation.
    pub generation: u64,
    /// First offset appended under it.
    pub start: u64,
    /// Node id of the leader.
    #[serde(serialize_with = "leader_text")]
    pub leader: Arc<str>,
}

fn leader_text<S: serde::Serializer>(leader: &Arc<str>, out: S) -> Result<S::Ok, S::Error> {
    out.serialize_str(leader)
}

/// An event as it is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Change {
    Truncate(u64),
    Place(u64),
    Base(u64),
    Accept(u64),
    Begin(HistoryEntry),
}

impl Change {
    /// The stored form of an event that is taken while the tail is `tail`.
    pub fn of(event: ControlEvent<'_>, tail: u64) -> Self {
        match event {
            ControlEvent::Truncate(offset) => Self::Truncate(offset),
            ControlEvent::Place(offset) => Self::Place(offset),
            ControlEvent::Base(offset) => Self::Base(offset),
            ControlEvent::Accept(generation) => Self::Accept(generation),
            ControlEvent::Begin { generation, leader } => Self::Begin(HistoryEntry {
                generation,
                start: tail,
                leader: leader.into(),
            }),
        }
    }

    pub fn kind(&self) -> ExtentKind {
        match self {
            Self::Truncate(_) => ExtentKind::Truncate,
            Self::Place(_) => ExtentKind::Place,
            Self::Base(_) => ExtentKind::Base,
            Self::Accept(_) => ExtentKind::Accept,
            Self::Begin(_) => ExtentKind::Begin,
        }
    }

    /// The offset in the extent's header; an *accept* is about none and stores `tail`.
    pub fn offset(&self, tail: u64) -> u64 {
        match self {
            Self::Truncate(offset) | Self::Place(offset) | Self::Base(offset) => *offset,
            Self::Accept(_) => tail,
            Self::Begin(entry) => entry.start,
        }
    }

    /// The generation it accepts, if it does.
    pub fn accepts(&self) -> Option<u64> {
        match self {
            Self::Accept(generation) => Some(*generation),
            Self::Begin(entry) => Some(entry.generation),
            Self::Truncate(_) | Self::Place(_) | Self::Base(_) => None,
        }
    }

    /// The tail it leaves, if it moves it.
    pub fn new_tail(&self) -> Option<u64> {
        match self {
            Self::Truncate(offset) | Self::Place(offset) => Some(*offset),
            Self::Base(_) | Self::Accept(_) | Self::Begin(_) => None,
        }
    }

    /// The lowest offset whose record it drops, if it drops any: all of them when the log starts anew.
    pub fn cuts_from(&self) -> Option<u64> {
        match self {
            Self::Truncate(offset) => Some(*offset),
            Self::Place(_) => Some(0),
            Self::Base(_) | Self::Accept(_) | Self::Begin(_) => None,
        }
    }

    /// The base it leaves, if it moves it.
    pub fn new_base(&self) -> Option<u64> {
        match self {
            Self::Place(offset) | Self::Base(offset) => Some(*offset),
            Self::Truncate(_) | Self::Accept(_) | Self::Begin(_) => None,
        }
    }

    pub fn body_len(&self) -> usize {
        match self {
            Self::Begin(entry) => body::leader_body_len(&entry.leader),
            Self::Truncate(_) | Self::Place(_) | Self::Base(_) | Self::Accept(_) => 0,
        }
    }

    pub fn encode_body(&self, out: &mut [u8], log: crate::name::LogId) {
        match self {
            Self::Begin(entry) => body::encode_leader(out, log, entry.start, &entry.leader),
            Self::Truncate(_) | Self::Place(_) | Self::Base(_) | Self::Accept(_) => {}
        }
    }

    /// The event of an extent; none for records, or when the body is damaged.
    pub fn decode(header: &ExtentHeader, bytes: &[u8]) -> Option<Self> {
        Some(match header.kind {
            ExtentKind::Records | ExtentKind::State => return None,
            ExtentKind::Truncate => Self::Truncate(header.first_offset),
            ExtentKind::Place => Self::Place(header.first_offset),
            ExtentKind::Base => Self::Base(header.first_offset),
            ExtentKind::Accept => Self::Accept(header.generation),
            ExtentKind::Begin => Self::Begin(HistoryEntry {
                generation: header.generation,
                start: header.first_offset,
                leader: body::decode_leader(header, bytes)?.into(),
            }),
        })
    }
}

/// What a log carries beside its records. Durable state only.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Control {
    /// Highest accepted generation.
    pub accepted: u64,
    /// One past the last record known to be committed; kept for replication, not written yet.
    pub commit: u64,
    /// Events so far.
    pub changes: u32,
    /// Leaderships, ascending.
    pub history: Vec<HistoryEntry>,
}

impl Control {
    /// Takes in an event that became durable. Tail, base and index are the caller's.
    pub(crate) fn apply(&mut self, change: &Change) {
        if let Some(generation) = change.accepts() {
            self.accepted = self.accepted.max(generation);
        }
        match change {
            Change::Truncate(offset) => self.drop_from(*offset),
            Change::Place(_) => self.history = Vec::new(),
            Change::Base(offset) => self.drop_below(*offset),
            Change::Accept(_) => {}
            Change::Begin(entry) => self.begin(entry),
        }
    }

    fn begin(&mut self, entry: &HistoryEntry) {
        self.drop_from(entry.start);
        // A leader that starts again leads the same generation on.
        let is_newer = |last: &HistoryEntry| last.generation < entry.generation;
        if self.history.last().is_none_or(is_newer) {
            if self.history.len() >= HISTORY_MAX {
                self.history.remove(0);
            }
            self.history.push(entry.clone());
        }
    }

    fn drop_from(&mut self, offset: u64) {
        let keep = self.history.partition_point(|entry| entry.start < offset);
        self.history.truncate(keep);
    }

    fn drop_below(&mut self, base: u64) {
        let after = self.history.partition_point(|entry| entry.start <= base);
        self.history.drain(..after.saturating_sub(1));
    }
}

/// The state of a log, restated so that the events it came from need not be kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Restated {
    pub base: u64,
    pub tail: u64,
    pub generation: u64,
    pub control: Control,
}

/// Bytes of a restatement before its history.
const RESTATED_BYTES: usize = 28;
/// History bytes a restatement holds; older entries go.
const RESTATED_HISTORY_BYTES: usize = 64 * 1024;
/// Bytes of a history entry before the leader's name.
const ENTRY_BYTES: usize = 17;

impl Restated {
    /// The content of the body; its checksum follows.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![0u8; RESTATED_BYTES];
        put_u64(&mut out, 0, self.base);
        put_u64(&mut out, 8, self.control.accepted);
        put_u64(&mut out, 16, self.control.commit);
        let history = self.kept_history();
        put_u32(&mut out, 24, history.len() as u32);
        for entry in history {
            out.extend_from_slice(&entry.generation.to_le_bytes());
            out.extend_from_slice(&entry.start.to_le_bytes());
            out.push(entry.leader.len() as u8);
            out.extend_from_slice(entry.leader.as_bytes());
        }
        out
    }

    fn kept_history(&self) -> &[HistoryEntry] {
        let mut bytes = 0;
        let fits = |entry: &&HistoryEntry| {
            bytes += ENTRY_BYTES + entry.leader.len();
            bytes <= RESTATED_HISTORY_BYTES
        };
        let history = &self.control.history;
        let kept = history.iter().rev().take_while(fits).count();
        &history[history.len() - kept..]
    }

    /// The restatement in an extent; none when its body is damaged.
    pub fn decode(header: &ExtentHeader, bytes: &[u8]) -> Option<Self> {
        if header.kind != ExtentKind::State {
            return None;
        }
        let content = body::opened(header, bytes)?;
        let (fixed, mut rest) = content.split_at_checked(RESTATED_BYTES)?;
        let count = get_u32(fixed, 24) as usize;
        let mut history = Vec::with_capacity(count.min(HISTORY_MAX));
        for _ in 0..count {
            let (entry, after) = rest.split_at_checked(ENTRY_BYTES)?;
            let (leader, after) = after.split_at_checked(usize::from(entry[16]))?;
            history.push(HistoryEntry {
                generation: get_u64(entry, 0),
                start: get_u64(entry, 8),
                leader: std::str::from_utf8(leader).ok()?.into(),
            });
            rest = after;
        }
        let base = get_u64(fixed, 0);
        (rest.is_empty() && base <= header.first_offset).then_some(Self {
            base,
            tail: header.first_offset,
            generation: header.generation,
            control: Control {
                accepted: get_u64(fixed, 8),
                commit: get_u64(fixed, 16),
                changes: header.changes,
                history,
            },
        })
    }
}

/// The state of a log as a whole, for its owner.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LogView {
    /// First offset held, durably.
    pub base: u64,
    /// One past the last appended record, durable or not.
    pub tail: u64,
    /// One past the last durable record that no cut on its way is about to drop.
    pub durable_tail: u64,
    /// Highest accepted generation, durably.
    pub accepted: u64,
    /// One past the last record known to be committed (0 for now).
    pub commit: u64,
    /// Leaderships, durably; ascending.
    pub history: Vec<HistoryEntry>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begin(generation: u64, start: u64) -> Change {
        Change::Begin(HistoryEntry {
            generation,
            start,
            leader: "n1".into(),
        })
    }

    fn shape(control: &Control) -> Vec<(u64, u64)> {
        let history = control.history.iter();
        history
            .map(|entry| (entry.generation, entry.start))
            .collect()
    }

    #[test]
    fn history_follows_the_rules() {
        let mut control = Control::default();
        for change in [begin(0, 0), begin(2, 10), begin(3, 10), begin(5, 30)] {
            control.apply(&change);
        }
        assert_eq!(shape(&control), [(0, 0), (3, 10), (5, 30)]);
        assert_eq!(control.accepted, 5);
        control.apply(&begin(5, 40));
        assert_eq!(shape(&control), [(0, 0), (3, 10), (5, 30)], "a restart");
        control.apply(&Change::Base(9));
        assert_eq!(shape(&control), [(0, 0), (3, 10), (5, 30)]);
        control.apply(&Change::Base(10));
        assert_eq!(shape(&control), [(3, 10), (5, 30)]);
        control.apply(&Change::Truncate(30));
        assert_eq!(shape(&control), [(3, 10)]);
        control.apply(&Change::Accept(9));
        control.apply(&Change::Place(100));
        assert_eq!((shape(&control), control.accepted), (vec![], 9));
    }

    #[test]
    fn history_is_bounded() {
        let mut control = Control::default();
        for i in 0..2 * HISTORY_MAX as u64 {
            control.apply(&begin(i, i));
        }
        assert_eq!(control.history.len(), HISTORY_MAX);
        assert_eq!(control.history[0].start, HISTORY_MAX as u64);
    }
}
