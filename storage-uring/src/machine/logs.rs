//! The logs of one core, in memory: tails, index, recent extents.
//!
//! Does no I/O and knows no groups beyond the recent ones. A log that nobody writes to holds no index and no
//! recent extents; its cost is this struct and its name.

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use super::control::Control;
use super::group::ExtentMeta;
use super::recent::RecentExtents;
use crate::error::LogError;
use crate::format::Place;
use crate::index::LogIndex;
use crate::name::{LogId, LogKind, LogName};
use crate::usage::UseSlot;

/// A log opened on this core. Valid only for the storage that gave it out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LogRef(pub(crate) u32);

impl LogRef {
    /// The log's number on its core: numbers are given out in the order of opening, from 0 on.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// What recovery knows about a log, handed to the core that opens it.
#[derive(Debug, Clone, Default)]
pub struct LogSeed {
    /// First offset held.
    pub base: u64,
    /// One past the last record.
    pub tail: u64,
    /// Highest generation seen on an extent.
    pub generation: u64,
    /// Accepted generation and history.
    pub control: Control,
    /// Core directory it last wrote to, and number of cores of that start.
    pub home: Option<(u16, u16)>,
    /// Bytes of records at or above the base.
    pub held_bytes: u64,
    /// Segment of this core's directory with the newest restatement of the log's state; 0: none.
    pub restated_in: u64,
    /// Where the records are.
    pub index: LogIndex,
    /// Set when the log must be refused.
    pub damage: Option<Arc<str>>,
}

/// How long a log's records are kept. Only whole stretches in finished segments are given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    /// Bytes to keep at least; 0: no bound.
    pub bytes: u64,
    /// Microseconds to keep records at least; 0: for ever.
    pub age_us: u64,
    /// Nothing at or above this offset is given up, whatever the bounds say.
    pub below: u64,
}

impl Default for Retention {
    fn default() -> Self {
        Self {
            bytes: 0,
            age_us: 0,
            below: u64::MAX,
        }
    }
}

pub(crate) struct LogState {
    pub name: Rc<LogName>,
    /// That of the name, at hand for every extent.
    pub kind: LogKind,
    pub encoded_name: Box<[u8]>,
    pub id: LogId,
    pub base: u64,
    pub tail: u64,
    pub durable_tail: u64,
    pub generation: u64,
    /// Durable accepted generation and history.
    pub control: Control,
    /// First offset held once everything queued is durable.
    pub queued_base: u64,
    /// Accepted generation, durable or not.
    pub accepted: u64,
    /// Events so far, durable or not.
    pub changes: u32,
    /// Cuts (truncations and new starts) on their way, and the lowest offset any of them cuts at.
    cuts_on_way: u32,
    cut_floor: u64,
    /// Cuts ever queued; tells a reader that the log was cut since it looked.
    pub cuts: u32,
    /// Segment of the newest durable restatement; 0 when there is none in this core's directory.
    pub restated_in: u64,
    /// Where the log is in the list of the newest segment.
    pub use_slot: UseSlot,
    /// A restatement is on its way.
    pub restating: bool,
    /// Bytes of durable records not given up, as far as segments are finished.
    pub held_bytes: u64,
    pub retention: Retention,
    /// The base rose and nobody asked since.
    pub base_is_news: bool,
    /// Last sweep of the segments that found something to keep.
    pub kept_in_sweep: u64,
    /// Newest record extent that was given a place, durable or not.
    pub last_sealed: Place,
    /// Segment ordinal that already carries this log's name; 0 is none.
    pub named_in: u64,
    pub index: LogIndex,
    pub recent: RecentExtents,
    pub damage: Option<Arc<str>>,
}

impl LogState {
    fn new(name: &LogName, seed: LogSeed) -> Self {
        let encoded_name = name.encode().into_boxed_slice();
        let mut seed = seed;
        if seed.damage.is_some() {
            // The event that accepted the newest generation may be what was lost. A record names one, too.
            seed.control.accepted = seed.control.accepted.max(seed.generation);
        }
        Self {
            id: LogId::of_encoded(&encoded_name),
            name: Rc::new(name.clone()),
            kind: name.kind,
            encoded_name,
            base: seed.base,
            tail: seed.tail,
            durable_tail: seed.tail,
            generation: seed.generation,
            queued_base: seed.base,
            accepted: seed.control.accepted,
            changes: seed.control.changes,
            cuts_on_way: 0,
            cut_floor: u64::MAX,
            cuts: 0,
            control: seed.control,
            restated_in: seed.restated_in,
            use_slot: UseSlot::default(),
            restating: false,
            held_bytes: seed.held_bytes,
            retention: Retention::default(),
            base_is_news: false,
            kept_in_sweep: u64::MAX,
            last_sealed: seed.index.last(),
            named_in: 0,
            index: seed.index,
            recent: RecentExtents::default(),
            damage: seed.damage,
        }
    }

    /// Whether events of this log are on their way: its durable state is about to change.
    pub fn is_in_flux(&self) -> bool {
        self.changes != self.control.changes || self.queued_base != self.base
    }

    /// One past the last record that is durable and is not about to be cut. Records appended behind a cut that
    /// is on its way have the offsets of those it cuts: until the cut is durable they count as not there.
    pub fn settled_tail(&self) -> u64 {
        self.durable_tail.min(self.tail).min(self.cut_floor)
    }

    /// A cut was queued: nothing from `offset` on is settled until it is durable.
    pub fn on_cut_queued(&mut self, offset: u64) {
        self.cuts = self.cuts.wrapping_add(1);
        self.cuts_on_way += 1;
        self.cut_floor = self.cut_floor.min(offset);
    }

    /// A cut became durable, or was undone. While others are on their way the floor stays where it is, so that
    /// a settled tail never falls but by a cut.
    pub fn on_cut_over(&mut self) {
        self.cuts_on_way -= 1;
        if self.cuts_on_way == 0 {
            self.cut_floor = u64::MAX;
        }
    }

    /// Records of this log became durable.
    pub fn on_records(&mut self, extent: &ExtentMeta) {
        self.durable_tail = extent.first_offset + u64::from(extent.record_count);
        let bytes = u64::from(extent.records_len);
        self.index
            .on_extent(extent.first_offset, extent.place, extent.prev, bytes);
        self.held_bytes += bytes;
    }
}

/// Asks the CPU to fetch what is at `at`. Changes nothing but time: with a thousand logs their states do
/// not fit the nearest cache.
#[inline]
pub(super) fn prefetch<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint; nothing is read or written, whatever the address.
    unsafe {
        use std::arch::x86_64::{_mm_prefetch, _MM_HINT_T0};
        _mm_prefetch::<_MM_HINT_T0>(at.cast::<i8>());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// All logs opened on this core.
#[derive(Default)]
pub(crate) struct LogTable {
    logs: Vec<LogState>,
    by_id: HashMap<LogId, LogRef>,
}

impl LogTable {
    /// The log with this name if it is open; an error if another name has its id.
    pub fn find(&self, name: &LogName) -> Result<Option<LogRef>, LogError> {
        let Some(log) = self.by_id.get(&name.id()).copied() else {
            return Ok(None);
        };
        let held = &self.get(log).name;
        if **held == *name {
            Ok(Some(log))
        } else {
            Err(LogError::IdCollision {
                log: name.to_string(),
                other: held.to_string(),
            })
        }
    }

    /// Adds a log that `find` did not find.
    pub fn add(&mut self, name: &LogName, seed: LogSeed) -> Result<LogRef, LogError> {
        if !name.fits() {
            return Err(LogError::too_long(name));
        }
        let state = LogState::new(name, seed);
        let log = LogRef(self.logs.len() as u32);
        self.by_id.insert(state.id, log);
        self.logs.push(state);
        Ok(log)
    }

    /// The log with this id, if it is open.
    pub fn by_id(&self, id: LogId) -> Option<LogRef> {
        self.by_id.get(&id).copied()
    }

    pub fn get(&self, log: LogRef) -> &LogState {
        &self.logs[log.0 as usize]
    }

    /// Asks the CPU to fetch the state of a log that is about to take an extent.
    #[inline]
    pub fn prefetch(&self, log: LogRef) {
        if let Some(state) = self.logs.get(log.0 as usize) {
            prefetch(&state.durable_tail);
            prefetch(&state.index);
            prefetch(&state.recent);
        }
    }

    /// Asks the CPU to fetch what giving an extent its place needs.
    #[inline]
    pub fn prefetch_sealed(&self, log: LogRef) {
        if let Some(state) = self.logs.get(log.0 as usize) {
            prefetch(&state.last_sealed);
            prefetch(&state.id);
        }
    }

    /// Asks for the place where the log's next recent extent goes; its state should be there already.
    #[inline]
    pub fn prefetch_recent(&self, log: LogRef) {
        if let Some(state) = self.logs.get(log.0 as usize) {
            state.recent.prefetch_end();
        }
    }

    pub fn get_mut(&mut self, log: LogRef) -> &mut LogState {
        &mut self.logs[log.0 as usize]
    }

    #[cfg(feature = "runtime")]
    pub fn iter(&self) -> impl Iterator<Item = &LogState> {
        self.logs.iter()
    }

    pub fn len(&self) -> usize {
        self.logs.len()
    }
}
