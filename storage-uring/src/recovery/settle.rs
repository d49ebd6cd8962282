//! Carrying out what a scan decided, in an order that may be interrupted anywhere.
//!
//! A cut drops an unfinished group and up to a few groups behind it, which may lie in later segments. Those go
//! first, newest first and each durably: whatever is left then looks like an earlier power cut, and the next
//! start comes to the same end. Were the cut file shortened first, groups behind the gap would be left without
//! the unfinished one that explains them, and the next start would have to call that damage.
//!
//! What a later segment's link leaves out, whole segments and bytes behind the place it names, goes before that
//! segment: it may be a whole group that was undone for want of space, and without the link the next start would
//! take it for the log's.

use std::path::Path;

use serde::Serialize;

use super::scan::CoreScan;
use crate::datadir::{sync_dir, Layout};
use crate::error::StorageError;

/// One change to a core directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "do")]
pub enum SettleStep {
    /// Rename a file that is not of this directory.
    SetAside {
        /// Sequence in its name.
        segment: u64,
    },
    /// Remove a segment that is no part of the log.
    Remove {
        /// Its sequence.
        segment: u64,
    },
    /// Shorten a segment, durably.
    Shorten {
        /// Its sequence.
        segment: u64,
        /// The new length.
        bytes: u64,
    },
    /// Make the directory's entries durable.
    SyncDirectory,
}

/// What a start makes of a core directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CoreVerdict {
    /// Core directory.
    pub core: u16,
    /// Segments that hold the log.
    pub live_segments: u64,
    /// Segment the log ends in; 0 for a new log.
    pub end_segment: u64,
    /// Position in it where the log ends.
    pub end_position: u64,
    /// Number of the next group.
    pub next_group: u64,
    /// Whether the last group is the closing mark of an orderly stop.
    pub orderly_stop: bool,
    /// Changes to files; empty when there is nothing to do.
    pub steps: Vec<SettleStep>,
}

pub(super) fn verdict(scan: &CoreScan) -> CoreVerdict {
    let mut steps = steps(scan);
    steps.retain(|step| *step != SettleStep::SyncDirectory);
    CoreVerdict {
        core: scan.core,
        live_segments: scan.live.len() as u64,
        end_segment: scan.end.0,
        end_position: scan.end.1,
        next_group: scan.next_group,
        orderly_stop: scan.orderly_stop,
        steps,
    }
}

/// What a start does to the files of a core directory.
pub(crate) fn steps(scan: &CoreScan) -> Vec<SettleStep> {
    let mut steps = Vec::new();
    for (segment, _) in &scan.strays {
        steps.push(SettleStep::SetAside { segment: *segment });
    }
    // Nothing of these was looked at: they go whatever the rest of the directory holds.
    for segment in &scan.given_back {
        steps.push(SettleStep::Remove { segment: *segment });
    }
    // Beside damage nothing is cut: groups behind it are what tells it from an unfinished tail on every later
    // start. The link of the next group leaves out what would have been cut.
    let cuts_are_due = !scan.keeps_tail;
    let is_due = |segment: &&u64| cuts_are_due || **segment < scan.end.0;
    let newest_first = |mut segments: Vec<u64>| {
        segments.sort_unstable_by(|a, b| b.cmp(a));
        segments
    };
    let skipped = newest_first(scan.skipped.iter().filter(is_due).copied().collect());
    let removals = skipped.iter().map(|it| SettleStep::Remove { segment: *it });
    steps.extend(removals);
    if !skipped.is_empty() {
        steps.push(SettleStep::SyncDirectory);
    }
    let cuts = scan.cuts.iter().filter(|_| cuts_are_due);
    let (linked, cuts): (Vec<_>, Vec<_>) = cuts
        .map(|cut| (cut.segment, cut.position))
        .partition(|(segment, _)| scan.linked_cut == Some(*segment));
    for (segment, bytes) in linked {
        steps.push(SettleStep::Shorten { segment, bytes });
    }
    let dead = scan.dead.iter().filter(is_due);
    let gone = newest_first(dead.chain(&scan.unused).copied().collect());
    for segment in &gone {
        steps.push(SettleStep::Remove { segment: *segment });
        if *segment > scan.end.0 {
            steps.push(SettleStep::SyncDirectory);
        }
    }
    for (segment, bytes) in cuts.into_iter().chain(scan.trim) {
        if !gone.contains(&segment) {
            steps.push(SettleStep::Shorten { segment, bytes });
        }
    }
    steps.push(SettleStep::SyncDirectory);
    steps
}

/// Carries the steps out, and removes spare files.
pub(super) fn carry_out(
    layout: &Layout,
    scan: &CoreScan,
    boot_epoch: u64,
) -> Result<(), StorageError> {
    for spare in layout.spares(scan.core)? {
        std::fs::remove_file(&spare)
            .map_err(|error| StorageError::io("removing", &spare, error))?;
    }
    for step in steps(scan) {
        match step {
            SettleStep::SetAside { segment } => {
                let file = layout.segment(scan.core, segment);
                let aside = file.with_extension(format!("stray-{boot_epoch}"));
                std::fs::rename(&file, &aside)
                    .map_err(|error| StorageError::io("renaming", &file, error))?;
            }
            SettleStep::Remove { segment } => {
                let file = layout.segment(scan.core, segment);
                std::fs::remove_file(&file)
                    .map_err(|error| StorageError::io("removing", &file, error))?;
            }
            SettleStep::Shorten { segment, bytes } => {
                shorten(&layout.segment(scan.core, segment), bytes)?;
            }
            SettleStep::SyncDirectory => {
                let dir = layout.core(scan.core);
                sync_dir(&dir).map_err(|error| StorageError::io("syncing", dir, error))?;
            }
        }
    }
    Ok(())
}

fn shorten(file: &Path, len: u64) -> Result<(), StorageError> {
    let shorten = || -> std::io::Result<()> {
        let file = std::fs::OpenOptions::new().write(true).open(file)?;
        if file.metadata()?.len() > len {
            file.set_len(len)?;
            file.sync_all()?;
        }
        Ok(())
    };
    shorten().map_err(|error| StorageError::io("shortening", file, error))
}
