//! Logs that lie in several core directories, because the number of cores changed between starts.
//!
//! Each directory's table of what its segments hold is made from that directory alone. What was cut on another
//! core later is taken out of it here, and what a log holds is counted for each directory by itself: the core
//! that has the log looks at the segments of its own directory only.

use std::collections::{HashMap, HashSet};

use super::events::Chapters;
use super::Logs;
use crate::name::LogId;
use crate::usage::SegmentTable;

/// A core directory: its number, its table, and the epoch that wrote each of its segments, where that is known.
pub(crate) struct Directory<'a> {
    pub core: u16,
    pub table: &'a mut SegmentTable,
    pub epochs: &'a HashMap<u64, u64>,
}

/// Where each log that is in several directories was cut back to after it was left in one: by log, core and epoch.
#[derive(Debug, Default)]
pub(crate) struct Moved {
    cuts: HashMap<(LogId, u16, u64), u64>,
    logs: HashSet<LogId>,
}

impl Moved {
    /// Finds them.
    pub fn find(cores: &[(u16, Chapters)]) -> Self {
        let mut found = Self::default();
        if cores.len() < 2 {
            return found;
        }
        let mut first_core: HashMap<LogId, u16> = HashMap::new();
        for (core, chapters) in cores {
            for log in chapters.logs.keys() {
                if *first_core.entry(*log).or_insert(*core) != *core {
                    found.logs.insert(*log);
                }
            }
        }
        for log in &found.logs {
            let mut pieces = Vec::new();
            for (core, chapters) in cores {
                for chapter in chapters.logs.get(log).into_iter().flatten() {
                    pieces.push((chapter.epoch, *core, chapter.lowest()));
                }
            }
            pieces.sort_unstable();
            // From the newest back: the lowest tail it had since.
            let mut cut = u64::MAX;
            for (epoch, core, lowest) in pieces.into_iter().rev() {
                found.cuts.insert((*log, core, epoch), cut);
                cut = cut.min(lowest);
            }
        }
        found
    }

    /// Takes what was cut later out of a table.
    pub fn cut(&self, directory: &mut Directory<'_>) {
        if self.logs.is_empty() {
            return;
        }
        let mut cuts = Vec::new();
        for (seq, segment) in directory.table.iter() {
            let Some(epoch) = directory.epochs.get(&seq) else {
                // Its header is damaged: what it holds stays needed for longer than it is.
                continue;
            };
            for (at, entry) in segment.logs.iter().enumerate() {
                let cut = self.cuts.get(&(entry.log, directory.core, *epoch));
                cuts.extend(
                    cut.filter(|cut| **cut < entry.end)
                        .map(|cut| (seq, at, *cut)),
                );
            }
        }
        for (seq, at, end) in cuts {
            directory.table.cut_entry(seq, at, end);
        }
    }

    /// Adds what a directory holds of these logs, by log and core.
    pub fn count(&self, directory: &Directory<'_>, logs: &Logs, held: &mut Held) {
        if self.logs.is_empty() {
            return;
        }
        for (_, segment) in directory.table.iter() {
            for entry in segment.logs.iter().filter(|it| self.logs.contains(&it.log)) {
                let base = logs.get(&entry.log).map_or(0, |(_, seed)| seed.base);
                if entry.end > base {
                    let of_log = held.entry(entry.log).or_default();
                    *of_log.entry(directory.core).or_default() += entry.bytes;
                }
            }
        }
    }
}

/// Bytes that logs in several directories hold in each.
pub(crate) type Held = HashMap<LogId, HashMap<u16, u64>>;
