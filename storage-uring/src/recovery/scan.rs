//! Walking the groups of one core directory, and the verdict on what does not fit.
//!
//! The rules (also in `docs/storage-format.md`):
//! - A bad group with nothing behind it and signs of an unfinished write is cut; so is anything that never
//!   was a group. A complete group that does not match its checksum, with nothing behind it, may have been
//!   acknowledged and is damage.
//! - A bad group with signs of an unfinished write is cut together with the groups behind it when none of them
//!   vouches for it and their numbers follow its own by at most `SURVIVORS_MAX`.
//! - Everything else is damage: the logs in it are refused, the scan goes on behind it.
//!
//! Pure apart from reading: cuts are reported, not carried out, and depend only on the bytes, so every start
//! comes to the same verdict.

use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::Arc;

use serde::Serialize;

use super::chain::{self, Chain, Segment, SegmentInput};
use super::events::{Chapters, UnknownLoss};
use super::progress::RecoveryProgress;
use super::verdict::Verdict;
use crate::error::StorageError;
use crate::format::extent::{ExtentHeader, ExtentKind};
use crate::format::freed::FreedRuns;
use crate::format::group::{GroupHeader, GROUP_FLAG_CLOSE, GROUP_HEADER_BYTES};
use crate::format::segment::SEGMENT_HEADER_BYTES;
use crate::format::{DataUuid, Place};
use crate::name::{LogId, LogName};
use crate::rewrite::RewrittenMap;
use crate::usage::{GroupUse, SegmentTable, UseSlot};

/// Groups that can lie behind an unfinished one: the largest number of commits in flight, less one.
pub const SURVIVORS_MAX: usize = 3;

/// An unfinished tail that is not part of the log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Cut {
    /// Core directory.
    pub core: u16,
    /// The file.
    pub file: PathBuf,
    /// Its sequence.
    pub segment: u64,
    /// Where the log ends.
    pub position: u64,
    /// Bytes behind that position that were given up.
    pub dropped_bytes: u64,
    /// Logs with extents in what was dropped, as far as readable.
    pub logs: Vec<String>,
    /// Why.
    pub reason: &'static str,
}

/// Damage an unfinished write does not explain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Damage {
    /// Core directory.
    pub core: u16,
    /// The file.
    pub file: PathBuf,
    /// Position of the damaged group.
    pub position: u64,
    /// Logs known to be affected; empty when unknown.
    pub logs: Vec<String>,
    /// What is wrong.
    pub reason: String,
}

/// Counts of one core directory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct ScanCounts {
    /// Live segments.
    pub segments: u64,
    /// Groups read.
    pub groups: u64,
    /// Records in them.
    pub records: u64,
    /// Bytes of those groups.
    pub bytes: u64,
}

/// What one core directory holds.
pub(crate) struct CoreScan {
    pub core: u16,
    pub chapters: Chapters,
    pub losses: Vec<UnknownLoss>,
    pub cuts: Vec<Cut>,
    pub damages: Vec<Damage>,
    /// Segment of the cut that a later segment's link says, too.
    pub linked_cut: Option<u64>,
    /// The log ends before a group that was durable; or that group was not written yet when the directory of a
    /// running broker was listed.
    pub lost_end: bool,
    /// Something was judged to be damage by what lies behind it: that must stay.
    pub keeps_tail: bool,
    pub counts: ScanCounts,
    /// Where the log ends: segment and position.
    pub end: (u64, u64),
    pub next_group: u64,
    /// Whether the last group is a closing mark.
    pub orderly_stop: bool,
    pub live: Vec<u64>,
    /// Those among them that are shorter than they were made, and not by a start.
    pub shortened: Vec<u64>,
    pub dead: Vec<u64>,
    /// No part of the log either: a link of a later segment leaves them out.
    pub skipped: Vec<u64>,
    /// Recorded as freed; the power went before the file did.
    pub given_back: Vec<u64>,
    pub unused: Vec<u64>,
    /// Those among them of which nothing says that a start of this directory made them.
    pub unknown: Vec<u64>,
    pub strays: Vec<(u64, &'static str)>,
    /// Segment and position behind which the newest live segment holds nothing but zeros.
    pub trim: Option<(u64, u64)>,
    /// Number of cores in each epoch that created a live segment here.
    pub core_counts: Vec<(u64, u16)>,
    /// Epoch that wrote each live segment, where its header tells.
    pub epochs: HashMap<u64, u64>,
    /// What the segments are good for.
    pub uses: SegmentTable,
    /// Segment of the newest restatement of each log.
    pub restated: HashMap<LogId, u64>,
    pub freed: FreedRuns,
    /// Where the frames of the rewritten ones are.
    pub maps: HashMap<u64, Arc<RewrittenMap>>,
}

/// How a scan is done.
#[derive(Clone, Copy)]
pub(crate) struct ScanOptions<'a> {
    /// A broker may be writing meanwhile: what does not fit is looked at again before it is judged.
    pub in_use: bool,
    /// Which segments nobody has shortened.
    pub since: Since<'a>,
    /// Where to say how far it is.
    pub progress: &'a RecoveryProgress,
}

/// What is known of who shortened segments: a start shortens those of the starts before it, and no other.
#[derive(Clone, Copy)]
pub(crate) struct Since<'a> {
    /// Epoch of the last start.
    pub epoch: u64,
    /// Segments that a start found shorter than they were made.
    pub shortened: Option<&'a BTreeSet<u64>>,
}

impl Since<'_> {
    /// Since that start, and nothing found by an earlier one.
    pub fn epoch(epoch: u64) -> Self {
        Self {
            epoch,
            shortened: None,
        }
    }

    /// Whether a segment is as long as it was made, unless it is damaged.
    pub fn is_untouched(&self, seq: u64, epoch: u64) -> bool {
        epoch >= self.epoch || self.shortened.is_some_and(|it| it.contains(&seq))
    }
}

pub(crate) struct Scanner<'a> {
    options: ScanOptions<'a>,
    pub(super) uuid: DataUuid,
    pub(super) segments: Vec<Segment>,
    pub(super) out: CoreScan,
    /// Number the next group must have; none when anything goes.
    pub(super) expected: Option<u64>,
    pub(super) epoch: u64,
    /// Highest group a rewritten segment vouches for.
    pub(super) vouched: u64,
    /// Number the next group would have had where segments are missing that no link names.
    missing_at: Option<u64>,
}

/// Scans one core directory.
pub(crate) fn scan_core(
    uuid: &DataUuid,
    core: u16,
    inputs: Vec<SegmentInput>,
    freed: FreedRuns,
    options: ScanOptions<'_>,
) -> Result<CoreScan, StorageError> {
    let Chain {
        live,
        skipped,
        given_back,
        unused,
        unknown,
        strays,
    } = chain::link(uuid, core, inputs, &freed, options.since)?;
    let out = CoreScan {
        core,
        chapters: Chapters::default(),
        losses: Vec::new(),
        cuts: Vec::new(),
        damages: Vec::new(),
        linked_cut: None,
        lost_end: false,
        keeps_tail: false,
        counts: ScanCounts::default(),
        end: (0, 0),
        next_group: 1,
        orderly_stop: false,
        live: live.iter().map(|segment| segment.seq).collect(),
        shortened: chain::shortened(&live),
        dead: Vec::new(),
        skipped,
        given_back,
        unused,
        unknown,
        strays,
        trim: None,
        core_counts: Vec::new(),
        epochs: HashMap::new(),
        uses: SegmentTable::default(),
        restated: HashMap::new(),
        freed,
        maps: HashMap::new(),
    };
    let marks = live.iter().filter_map(|segment| segment.rewritten);
    let vouched = marks.map(|whole| whole.durable_group).max().unwrap_or(0);
    let mut scanner = Scanner {
        options,
        uuid: *uuid,
        segments: live,
        out,
        expected: None,
        epoch: 0,
        vouched,
        missing_at: None,
    };
    let mut at = 0;
    while at < scanner.segments.len() {
        if options.in_use {
            scanner.segments[at].look_again(uuid, core);
            // What was rewritten since may need groups that came since.
            let mark = scanner.segments[at].rewritten.map(|it| it.durable_group);
            scanner.vouched = scanner.vouched.max(mark.unwrap_or(0));
        }
        let goes_on = match scanner.segments[at].rewritten {
            Some(whole) => scanner.scan_rewritten(at, &whole),
            None => scanner.scan_segment(at)?,
        };
        let segment = &mut scanner.segments[at];
        segment.window.release();
        options.progress.on_segment(segment.len);
        if !goes_on {
            let behind: Vec<u64> = scanner.segments[at + 1..]
                .iter()
                .map(|segment| segment.seq)
                .collect();
            scanner.out.live.retain(|seq| !behind.contains(seq));
            scanner.out.dead.extend(behind);
            break;
        }
        at += 1;
    }
    for segment in &mut scanner.segments {
        segment.window.check(&segment.file)?;
    }
    scanner.check_end();
    scanner.note_births();
    let cuts = scanner.out.cuts.iter();
    let shortened = cuts.map(|cut| (cut.segment, cut.position));
    for (seq, bytes) in shortened.chain(scanner.out.trim) {
        scanner.out.uses.set_file_bytes(seq, bytes);
    }
    Ok(scanner.out)
}

pub(super) fn group_use(position: u64, header: &GroupHeader, file_bytes: u64) -> GroupUse {
    GroupUse {
        group: header.group,
        link: header.link(),
        end: position + header.total_len,
        time_us: header.time_us,
        file_bytes,
    }
}

impl Scanner<'_> {
    /// Walks one segment; false when the log ends in it for good.
    fn scan_segment(&mut self, at: usize) -> Result<bool, StorageError> {
        self.enter(at);
        let mut position = SEGMENT_HEADER_BYTES;
        let mut looked_again_at = 0;
        let mut is_end_reported = false;
        loop {
            let segment = &mut self.segments[at];
            let lost_end = segment.lost_end(position).filter(|_| !is_end_reported);
            if let Some(reason) = lost_end.filter(|_| position >= segment.len) {
                // In the oldest segment no number of a group would tell.
                self.out.keeps_tail = true;
                position = self.damaged(at, position, None, reason)?;
                is_end_reported = true;
                continue;
            }
            if segment.limit.is_some_and(|limit| position >= limit) || position >= segment.len {
                // The log never ends in a segment without a group: that one goes when nothing follows it.
                if position > SEGMENT_HEADER_BYTES {
                    let end = position.min(segment.limit.unwrap_or(position));
                    self.out.end = (segment.seq, end);
                }
                return Ok(true);
            }
            let header = self.header_at(at, position)?;
            if let Some(header) = header {
                let group = self.segments[at]
                    .window
                    .get(position, header.total_len as usize);
                if header.body_matches(group) {
                    // Padding that is missing at the end of a file is no loss.
                    self.take_group(at, position, &header);
                    position += header.total_len;
                    continue;
                }
            }
            let verdict = self.judge(at, position, header.as_ref())?;
            let is_fault = matches!(verdict, Verdict::Cut(_) | Verdict::Damaged(_));
            if self.options.in_use && is_fault && looked_again_at != position {
                // It may have been half written when it was read, and what is behind it read later.
                looked_again_at = position;
                for segment in &mut self.segments[at..] {
                    segment.window.release();
                }
                continue;
            }
            match self.with_what_is_lost(at, verdict) {
                Verdict::SegmentEnd => return Ok(true),
                Verdict::End => {
                    self.trim(at, position);
                    return Ok(false);
                }
                Verdict::Cut(reason) => {
                    self.cut(at, position, header.as_ref(), reason);
                    return Ok(false);
                }
                Verdict::Damaged(reason) => {
                    self.out.keeps_tail = true;
                    position = self.damaged(at, position, header.as_ref(), reason)?;
                    // What is left of a readable group may be all of it; of anything else the rest is lost.
                    is_end_reported = header.is_none() && position >= self.segments[at].len;
                }
            }
        }
    }

    /// No log ends, and nothing is cut, where more is missing than an unfinished write explains.
    fn with_what_is_lost(&self, at: usize, verdict: Verdict) -> Verdict {
        let is_end = matches!(verdict, Verdict::End | Verdict::Cut(_));
        match self.segments[at].fault {
            Some(fault) if is_end || matches!(verdict, Verdict::SegmentEnd) => {
                return Verdict::Damaged(fault);
            }
            _ => {}
        }
        let behind = &self.segments[at + 1..];
        if is_end && behind.iter().any(Segment::is_behind_hole) {
            return Verdict::Damaged("a group is not readable, and segments behind it are missing");
        }
        verdict
    }

    /// Nothing but zeros lies behind the end of the log; the space comes back.
    pub(super) fn trim(&mut self, at: usize, position: u64) {
        let segment = &self.segments[at];
        if segment.len > position && segment.rewritten.is_none() {
            self.out.trim = Some((segment.seq, position));
        }
    }

    /// What a rewritten segment let go may be needed without the groups that were durable then: a log that ends
    /// before them has lost its end. Their numbers are not given out again.
    fn check_end(&mut self) {
        if self.missing_at == Some(self.out.next_group) {
            // The jump in numbers tells every later start, when the segments behind the hole are gone.
            self.out.lost_end = true;
            self.out.next_group += 1;
        }
        let Some(last) = self.out.live.last().copied() else {
            return;
        };
        let at = self.segments.iter().position(|it| it.seq == last);
        if let Some(at) = at.filter(|_| self.out.next_group <= self.vouched) {
            let reason = "the log ends before a group that was durable";
            self.out.keeps_tail = true;
            self.out.lost_end = true;
            self.report_damage(at, self.out.end.1, Vec::new(), reason, self.epoch);
            self.out.next_group = self.vouched + 1;
        }
    }

    /// Notes what the headers of the live segments say. Those a cut leaves out are removed now or left out by a
    /// later link: what only they know would be missing at the next start.
    fn note_births(&mut self) {
        let out = &mut self.out;
        out.counts.segments = out.live.len() as u64;
        for segment in &self.segments {
            // They ascend.
            let is_live = out.live.binary_search(&segment.seq).is_ok();
            if let Some((epoch, cores)) = segment.born.filter(|_| is_live) {
                out.core_counts.push((epoch, cores));
                out.epochs.insert(segment.seq, epoch);
            }
        }
    }

    /// Sets the group number a segment has to begin with.
    pub(super) fn enter(&mut self, at: usize) {
        let (first, link) = (self.segments[at].first_group(), self.segments[at].link());
        let is_linked = link == Some(self.out.end);
        let lost = self.expected.filter(|it| is_linked || *it <= self.vouched);
        if let Some(first) = first.filter(|first| lost.is_some_and(|lost| *first > lost)) {
            if !self.segments[at].after_gap && self.segments[at].freed_before.is_none() {
                // An earlier start found the end lost, and went on with numbers behind it.
                let reason = "groups before this segment are missing that were durable";
                self.out.keeps_tail = true;
                self.report_damage(at, SEGMENT_HEADER_BYTES, Vec::new(), reason, self.epoch);
                // It has to stay: where it ends is what tells that nothing but these groups is missing.
                if let Some(before) = at.checked_sub(1) {
                    self.out.uses.mark_damaged(self.segments[before].seq);
                }
                self.expected = Some(first);
            }
        }
        let segment = &self.segments[at];
        let (missing, freed) = (segment.missing_before, segment.freed_before);
        if segment.after_gap {
            self.expected = freed
                .map(|(_, last)| last.saturating_add(1))
                .filter(|_| !missing);
        } else if let Some((_, last)) = freed.filter(|(first, _)| self.expected == Some(*first)) {
            self.expected = Some(last.saturating_add(1));
        }
        if missing {
            self.report_missing_segments(at);
        }
    }

    /// The header at this position, if it is the group that belongs here.
    fn header_at(&mut self, at: usize, position: u64) -> Result<Option<GroupHeader>, StorageError> {
        let core = self.out.core;
        let segment = &mut self.segments[at];
        let (seq, file) = (segment.seq, segment.file.clone());
        let bytes = segment.window.get(position, GROUP_HEADER_BYTES);
        let header = chain::live_header(&self.uuid, core, seq, &file, bytes)?;
        Ok(header.filter(|header| {
            self.expected
                .is_none_or(|expected| header.group == expected)
                && header.boot_epoch >= self.epoch
        }))
    }

    fn take_group(&mut self, at: usize, position: u64, header: &GroupHeader) {
        let core = self.out.core;
        let segment = &mut self.segments[at];
        let seq = segment.seq;
        let group = group_use(position, header, segment.len);
        self.out.uses.on_group(seq, &group);
        let group = segment.window.get(position, header.used_len as usize);
        let mut extent_at = GROUP_HEADER_BYTES;
        let mut unreadable = false;
        let mut unread_events = Vec::new();
        for _ in 0..header.extents {
            let Ok(extent) = ExtentHeader::decode(&group[extent_at.min(group.len())..]) else {
                unreadable = true;
                break;
            };
            let place = Place {
                segment: seq,
                position: (position + extent_at as u64) as u32,
                core,
            };
            note_name(&mut self.out.chapters, &extent, &group[extent_at..]);
            note_use(&mut self.out.uses, &mut self.out.restated, &extent, seq);
            let bytes = &group[extent_at..];
            let chapters = &mut self.out.chapters;
            if !chapters.on_extent(header.boot_epoch, &extent, place, bytes) {
                note_log(chapters, extent.log, None, &mut unread_events);
            }
            extent_at += extent.total_len();
        }
        self.note_group(seq, position, header);
        if unreadable {
            let reason = "a group with a matching checksum holds an extent that cannot be read";
            self.report_damage(at, position, Vec::new(), reason, header.boot_epoch);
        }
        if !unread_events.is_empty() {
            // Whoever wrote it meant something this build does not understand.
            let reason = "a group with a matching checksum holds an event that cannot be read";
            self.report_known_damage(at, position, unread_events, reason);
        }
    }

    /// The link of this segment names one that is not there. Logs that fell silent before this segment may
    /// have gone on in it; the others show a gap.
    fn report_missing_segments(&mut self, at: usize) {
        let segment = &self.segments[at];
        let epoch = segment.born.map_or(self.epoch, |(epoch, _)| epoch);
        let reason = "the segments before this one are missing";
        self.out.keeps_tail = true;
        if segment.is_behind_hole() {
            self.missing_at = Some(self.out.next_group);
            // It has to stay: where it ends is what tells that nothing but what was behind it is missing.
            if let Some(before) = at.checked_sub(1) {
                self.out.uses.mark_damaged(self.segments[before].seq);
            }
        }
        self.report_damage(at, SEGMENT_HEADER_BYTES, Vec::new(), reason, epoch);
    }

    pub(super) fn note_group(&mut self, seq: u64, position: u64, header: &GroupHeader) {
        self.epoch = header.boot_epoch;
        self.expected = Some(header.group + 1);
        self.out.next_group = header.group + 1;
        self.out.orderly_stop = header.flags & GROUP_FLAG_CLOSE != 0;
        self.out.end = (seq, position + header.total_len);
        self.out.counts.groups += 1;
        self.out.counts.records += u64::from(header.records);
        self.out.counts.bytes += header.total_len;
    }
}

/// Notes what an extent makes of its segment.
pub(super) fn note_use(
    uses: &mut SegmentTable,
    restated: &mut HashMap<LogId, u64>,
    extent: &ExtentHeader,
    seq: u64,
) {
    let mut slot = UseSlot::default();
    match extent.kind {
        ExtentKind::Records => {
            let bytes = u64::from(extent.records_len);
            uses.on_records(extent.log, &mut slot, extent.end_offset(), bytes);
        }
        ExtentKind::State => {
            uses.on_event(extent.log, &mut slot, extent.total_len());
            restated.insert(extent.log, seq);
        }
        ExtentKind::Truncate => {
            uses.on_event(extent.log, &mut slot, extent.total_len());
            uses.on_truncate(extent.log, extent.first_offset);
        }
        ExtentKind::Place => {
            uses.on_event(extent.log, &mut slot, extent.total_len());
            uses.on_place(extent.log);
        }
        ExtentKind::Base | ExtentKind::Accept | ExtentKind::Begin => {
            uses.on_event(extent.log, &mut slot, extent.total_len())
        }
    }
}

pub(super) fn note_name(chapters: &mut Chapters, extent: &ExtentHeader, bytes: &[u8]) {
    if extent.name_len > 0 && !chapters.names.contains_key(&extent.log) {
        if let Some(name) = extent.name(bytes) {
            chapters.names.insert(extent.log, name);
        }
    }
}

pub(super) fn note_log(
    chapters: &Chapters,
    log: LogId,
    name: Option<LogName>,
    logs: &mut Vec<String>,
) {
    let known = name.or_else(|| chapters.names.get(&log).cloned());
    let text = known.map_or_else(|| format!("log {:016x}", log.0), |name| name.to_string());
    if !logs.contains(&text) {
        logs.push(text);
    }
}
