//! What a scan learns about each log, and how the pieces of several core directories become one log.
//!
//! A log's records may lie in several core directories, because the number of cores may change between
//! starts. Within one boot epoch a log lives on one core, so pieces ("chapters") are ordered by epoch.

use std::collections::HashMap;
use std::sync::Arc;

use crate::format::extent::{ExtentHeader, ExtentKind};
use crate::format::Place;
use crate::index::LogIndex;
use crate::machine::control::{number_after, Change, Restated};
use crate::machine::LogSeed;
use crate::name::{LogId, LogName};

/// A contiguous run of records.
#[derive(Debug, Clone, Default)]
pub(crate) struct Run {
    first: u64,
    end: u64,
    generation: u64,
    /// Events of the log before these records.
    changes: u32,
    index: LogIndex,
}

#[derive(Debug, Clone)]
pub(crate) enum ScanEvent {
    Run(Run),
    /// An event, with its number (0 when version 1 wrote it).
    Change(Change, u32),
    /// The state, restated.
    Restated(Box<Restated>),
    /// Records of this log may have been lost here; the next run tells.
    Suspect(Arc<str>),
    /// Records of this log were lost here.
    Damaged(Arc<str>),
}

/// What one core directory holds of one log in one epoch.
#[derive(Debug, Clone)]
pub(crate) struct Chapter {
    pub epoch: u64,
    pub events: Vec<ScanEvent>,
}

impl Chapter {
    /// The lowest tail the log had at any time in it, as far as its events tell: records of earlier chapters at
    /// or above that were cut.
    pub fn lowest(&self) -> u64 {
        let tails = self.events.iter().filter_map(|event| match event {
            ScanEvent::Run(run) => Some(run.first),
            ScanEvent::Change(change, _) => change.cuts_from(),
            ScanEvent::Restated(restated) => Some(restated.tail),
            ScanEvent::Suspect(_) | ScanEvent::Damaged(_) => None,
        });
        tails.min().unwrap_or(u64::MAX)
    }
}

/// What one core directory holds of each log.
#[derive(Debug, Default)]
pub(crate) struct Chapters {
    pub logs: HashMap<LogId, Vec<Chapter>>,
    pub names: HashMap<LogId, LogName>,
    /// The newest loss of which nobody can say whose it was, and its epoch.
    unknown_loss: Option<(u64, Arc<str>)>,
}

impl Chapters {
    fn events(&mut self, log: LogId, epoch: u64) -> &mut Vec<ScanEvent> {
        let chapters = self.logs.entry(log).or_default();
        if chapters.last().is_none_or(|chapter| chapter.epoch != epoch) {
            // What this log wrote in this epoch before may have been lost with the rest.
            let lost = self.unknown_loss.as_ref().filter(|(at, _)| *at == epoch);
            let events = lost.map(|(_, detail)| ScanEvent::Suspect(Arc::clone(detail)));
            chapters.push(Chapter {
                epoch,
                events: events.into_iter().collect(),
            });
        }
        let last = chapters.len() - 1;
        &mut chapters[last].events
    }

    /// Notes an extent whose checksums match. `bytes` starts at its header. False when it cannot be read all the
    /// same: its log is damaged.
    #[must_use]
    pub fn on_extent(
        &mut self,
        epoch: u64,
        header: &ExtentHeader,
        place: Place,
        bytes: &[u8],
    ) -> bool {
        let events = self.events(header.log, epoch);
        if header.kind == ExtentKind::Records {
            on_records(events, header, place);
        } else if let Some(restated) = Restated::decode(header, bytes) {
            events.push(ScanEvent::Restated(Box::new(restated)));
        } else if let Some(change) = Change::decode(header, bytes) {
            events.push(ScanEvent::Change(change, header.changes));
        } else {
            // Its checksums match: whoever wrote it meant something this build does not understand.
            let detail = format!("an event at {place:?} cannot be read");
            events.push(ScanEvent::Damaged(detail.into()));
            return false;
        }
        true
    }

    /// Notes lost records of a known log.
    pub fn on_damaged(&mut self, log: LogId, epoch: u64, detail: &Arc<str>) {
        self.events(log, epoch)
            .push(ScanEvent::Damaged(Arc::clone(detail)));
    }

    /// Notes that any log of this epoch may have lost records or events.
    pub fn on_unknown_loss(&mut self, epoch: u64, detail: &Arc<str>) {
        self.unknown_loss = Some((epoch, Arc::clone(detail)));
        for chapters in self.logs.values_mut() {
            if let Some(last) = chapters.last_mut().filter(|chapter| chapter.epoch == epoch) {
                last.events.push(ScanEvent::Suspect(Arc::clone(detail)));
            }
        }
    }
}

fn on_records(events: &mut Vec<ScanEvent>, header: &ExtentHeader, place: Place) {
    let bytes = u64::from(header.records_len);
    if let Some(ScanEvent::Run(run)) = events.last_mut() {
        if run.end == header.first_offset && run.changes == header.changes {
            run.index
                .on_extent(header.first_offset, place, header.prev, bytes);
            run.end = header.end_offset();
            run.generation = run.generation.max(header.generation);
            return;
        }
    }
    let mut run = Run {
        first: header.first_offset,
        end: header.end_offset(),
        generation: header.generation,
        changes: header.changes,
        index: LogIndex::default(),
    };
    run.index
        .on_extent(header.first_offset, place, header.prev, bytes);
    events.push(ScanEvent::Run(run));
}

/// A log while its chapters are put together.
#[derive(Default)]
struct Assembly {
    seed: LogSeed,
    /// Missing ranges; harmless when retention gave them up.
    gaps: Vec<(u64, u64)>,
    suspect: Option<Arc<str>>,
    damage: Option<Arc<str>>,
    /// An event is missing; whatever it said is not known.
    lost_change: bool,
    /// Events may have been lost since the last thing that is known of the log.
    may_lack_events: bool,
    /// Records below this may have been cut by an event that was lost.
    doubtful_below: u64,
}

impl Assembly {
    fn apply(&mut self, event: ScanEvent) {
        match event {
            ScanEvent::Run(run) => self.apply_run(run),
            ScanEvent::Restated(restated) => self.apply_restated(*restated),
            ScanEvent::Change(change, number) => self.apply_change(&change, number),
            ScanEvent::Suspect(detail) => {
                self.suspect = Some(detail);
                self.may_lack_events = true;
            }
            ScanEvent::Damaged(detail) => self.damage = Some(detail),
        }
    }

    /// Looks at the number of events that something says were before it. Where numbers are missing, the events
    /// went with their segments, which cuts never do unless what they cut is gone as well. Behind a loss they may be
    /// what was lost, and one of them a cut: then nobody knows which of the records before it still count.
    fn check_numbers(&mut self, number: u32) {
        if self.may_lack_events && number != self.seed.control.changes {
            self.doubtful_below = self.doubtful_below.max(self.seed.tail);
        }
        self.may_lack_events = false;
    }

    fn apply_change(&mut self, change: &Change, number: u32) {
        if number != 0 {
            let follows = number == number_after(self.seed.control.changes);
            self.lost_change |= !follows;
            self.check_numbers(if follows {
                self.seed.control.changes
            } else {
                number
            });
            self.seed.control.changes = number;
        }
        self.seed.control.apply(change);
        match change {
            Change::Truncate(offset) => {
                self.seed.tail = self.seed.tail.min(*offset);
                self.cut(*offset);
            }
            Change::Place(offset) => self.place(*offset),
            Change::Base(offset) => self.seed.base = self.seed.base.max(*offset),
            Change::Accept(_) | Change::Begin(_) => {}
        }
    }

    /// What is restated is the whole truth about everything but records: events before it may be gone.
    fn apply_restated(&mut self, restated: Restated) {
        self.check_numbers(restated.control.changes);
        if restated.tail < self.seed.tail {
            self.cut(restated.tail);
        } else if restated.tail > self.seed.tail {
            self.gaps.push((self.seed.tail, restated.tail));
        }
        let seed = &mut self.seed;
        seed.tail = restated.tail;
        seed.base = restated.base;
        seed.generation = seed.generation.max(restated.generation);
        seed.control = restated.control;
        self.lost_change = false;
        // Tail and number of events are known again; holes below the tail show by themselves.
        self.suspect = None;
    }

    /// The log starts anew; what was missing before does not matter any more.
    fn place(&mut self, offset: u64) {
        let seed = LogSeed {
            base: offset,
            tail: offset,
            generation: self.seed.generation,
            control: std::mem::take(&mut self.seed.control),
            ..LogSeed::default()
        };
        *self = Self {
            seed,
            lost_change: self.lost_change,
            ..Self::default()
        };
    }

    /// Nothing at or above `offset` counts any more, and what was missing there does not matter.
    fn cut(&mut self, offset: u64) {
        self.seed.index.on_truncate(offset);
        cut_gaps(&mut self.gaps, offset);
        self.doubtful_below = self.doubtful_below.min(offset);
    }

    fn apply_run(&mut self, run: Run) {
        self.check_numbers(run.changes);
        // A change that was missed before may have been the cut that these records lie behind.
        let no_change_lost = run.changes == self.seed.control.changes && !self.lost_change;
        self.lost_change |= !no_change_lost;
        if no_change_lost {
            // Nothing but records can be missing, and that shows as a gap: the loss before was of other logs.
            self.suspect = None;
        }
        // Version 1 numbered no events: a cut may have been between, in a segment that was given back since.
        let may_be_cut = !no_change_lost || run.changes == 0;
        if run.first > self.seed.tail || (run.first < self.seed.tail && !may_be_cut) {
            let (from, to) = (self.seed.tail.min(run.first), self.seed.tail.max(run.first));
            self.gaps.push((from, to));
        } else if run.first < self.seed.tail {
            // The cut before it is not here; unless a restatement follows, the log is refused for that.
            self.lost_change = true;
            self.cut(run.first);
        }
        // Events up to this number are behind; which they were a restatement tells.
        self.seed.control.changes = run.changes;
        self.seed.tail = run.end;
        self.seed.generation = self.seed.generation.max(run.generation);
        self.seed.index.append(run.index);
    }

    fn finish(mut self) -> LogSeed {
        self.seed.index.on_base(self.seed.base);
        let base = self.seed.base;
        let gap = self.gaps.iter().find(|(_, end)| *end > base);
        self.seed.damage = match (self.damage, gap, self.suspect) {
            (Some(detail), _, _) => Some(detail),
            (None, Some((from, to)), suspect) => {
                let why = suspect
                    .map(|detail| format!(" ({detail})"))
                    .unwrap_or_default();
                Some(format!("records {from}..{to} are missing{why}").into())
            }
            (None, None, Some(detail)) => {
                Some(format!("records may be missing at the end: {detail}").into())
            }
            (None, None, None) if self.lost_change => {
                Some("a change of the log's state is missing".into())
            }
            (None, None, None) if self.doubtful_below > base => {
                let end = self.doubtful_below;
                let why =
                    format!("records below {end} may have been cut by an event that was lost");
                Some(why.into())
            }
            (None, None, None) => None,
        };
        if self.seed.tail < base {
            self.seed.tail = base;
        }
        self.seed
    }
}

/// What was missing above a cut does not matter.
fn cut_gaps(gaps: &mut Vec<(u64, u64)>, tail: u64) {
    gaps.retain(|(from, _)| *from < tail);
    for (_, to) in gaps {
        *to = (*to).min(tail);
    }
}

/// Loss of records of unknown logs: which core directory, which epoch.
pub(crate) struct UnknownLoss {
    pub core: u16,
    pub epoch: u64,
    pub detail: Arc<str>,
}

/// Pieces of one log: epoch, core directory, events.
type Pieces = Vec<(u64, u16, Vec<ScanEvent>)>;

/// Puts the logs of all core directories together. `core_counts` gives the number of cores per epoch.
pub(crate) fn assemble(
    cores: Vec<(u16, Chapters)>,
    losses: &[UnknownLoss],
    core_counts: &HashMap<u64, u16>,
) -> HashMap<LogId, (Option<LogName>, LogSeed)> {
    let mut by_log: HashMap<LogId, Pieces> = HashMap::new();
    let mut names = HashMap::new();
    for (core, chapters) in cores {
        names.extend(chapters.names);
        for (log, chapters) in chapters.logs {
            let all = by_log.entry(log).or_default();
            all.extend(
                chapters
                    .into_iter()
                    .map(|chapter| (chapter.epoch, core, chapter.events)),
            );
        }
    }
    by_log
        .into_iter()
        .map(|(log, mut pieces)| {
            pieces.sort_by_key(|(epoch, core, _)| (*epoch, *core));
            let newest = pieces.last().map(|(epoch, core, _)| (*epoch, *core));
            for loss in losses {
                if may_have_lost(&pieces, loss, core_counts) {
                    pieces.push((
                        loss.epoch,
                        loss.core,
                        vec![ScanEvent::Suspect(Arc::clone(&loss.detail))],
                    ));
                }
            }
            pieces.sort_by_key(|(epoch, core, _)| (*epoch, *core));
            let mut assembly = Assembly::default();
            for event in pieces.into_iter().flat_map(|(_, _, events)| events) {
                assembly.apply(event);
            }
            let mut seed = assembly.finish();
            if let Some((epoch, core)) = newest {
                let count = core_counts.get(&epoch).copied();
                seed.home = count.map(|count| (core, count));
            }
            (log, (names.remove(&log), seed))
        })
        .collect()
}

/// Whether a log that is not known to have written in the lost place may have.
///
/// A log that wrote anywhere in that epoch either has its suspicion in place already or lived on another
/// core. Otherwise it lived where it last wrote before, unless the number of cores changed in between or nobody
/// knows that it did not.
fn may_have_lost(pieces: &Pieces, loss: &UnknownLoss, core_counts: &HashMap<u64, u16>) -> bool {
    if pieces.iter().any(|(epoch, _, _)| *epoch == loss.epoch) {
        return false;
    }
    let Some((epoch, core, _)) = pieces
        .iter()
        .rev()
        .find(|(epoch, _, _)| *epoch < loss.epoch)
    else {
        // It first wrote later; a loss before that shows as a gap.
        return false;
    };
    let (before, then) = (core_counts.get(epoch), core_counts.get(&loss.epoch));
    *core == loss.core || before.is_none() || before != then
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Control;
    use crate::name::LogKind;

    #[test]
    fn the_first_number_follows_the_last() {
        let after_the_last = |number| {
            let mut assembly = Assembly::default();
            let control = Control {
                changes: u32::MAX,
                ..Control::default()
            };
            assembly.apply(ScanEvent::Restated(Box::new(Restated {
                base: 0,
                tail: 0,
                generation: 0,
                control,
            })));
            assembly.apply(ScanEvent::Change(Change::Accept(7), number));
            assembly.finish()
        };
        let seed = after_the_last(1);
        assert_eq!((seed.damage, seed.control.accepted), (None, 7));
        assert_eq!(seed.control.changes, 1);
        for number in [2, u32::MAX] {
            assert!(after_the_last(number).damage.is_some(), "{number}");
        }
    }

    fn run(first: u64, end: u64, changes: u32) -> ScanEvent {
        ScanEvent::Run(Run {
            first,
            end,
            changes,
            ..Run::default()
        })
    }

    fn restated(base: u64, tail: u64, changes: u32) -> ScanEvent {
        ScanEvent::Restated(Box::new(Restated {
            base,
            tail,
            generation: 0,
            control: Control {
                changes,
                ..Control::default()
            },
        }))
    }

    fn damage(events: impl IntoIterator<Item = ScanEvent>) -> Option<Arc<str>> {
        let mut assembly = Assembly::default();
        events.into_iter().for_each(|event| assembly.apply(event));
        assembly.finish().damage
    }

    #[test]
    fn a_cut_that_may_have_been_lost_makes_what_it_may_have_cut_doubtful() {
        let suspect = || ScanEvent::Suspect("a lost group".into());
        let cut = |offset, number| ScanEvent::Change(Change::Truncate(offset), number);
        // Whatever closes the jump in numbers: a state, or records and a state.
        assert!(damage([run(0, 100, 1), suspect(), restated(0, 100, 3)]).is_some());
        let records_between = [
            run(0, 100, 1),
            suspect(),
            run(100, 110, 3),
            restated(0, 110, 3),
        ];
        assert!(damage(records_between).is_some());
        let event_between = [
            run(0, 100, 1),
            suspect(),
            ScanEvent::Change(Change::Accept(9), 4),
            restated(0, 100, 4),
        ];
        assert!(damage(event_between).is_some());
        // Nothing was lost: the events went with their segments.
        assert_eq!(damage([run(0, 100, 1), restated(0, 100, 3)]), None);
        // No number is missing over the loss; later ones may be.
        let proven = [
            run(0, 100, 1),
            suspect(),
            run(100, 110, 1),
            restated(0, 110, 5),
        ];
        assert_eq!(damage(proven), None);
        let proven = [
            run(0, 100, 1),
            suspect(),
            ScanEvent::Change(Change::Accept(9), 2),
            restated(0, 100, 5),
        ];
        assert_eq!(damage(proven), None);
        // What is doubtful was given up, cut or placed anew.
        assert_eq!(
            damage([run(0, 100, 1), suspect(), restated(100, 100, 3)]),
            None
        );
        let cut_later = [run(0, 100, 1), suspect(), restated(40, 100, 3), cut(40, 4)];
        assert_eq!(damage(cut_later), None);
        let cut_too_little = [run(0, 100, 1), suspect(), restated(40, 100, 3), cut(41, 4)];
        assert!(damage(cut_too_little).is_some());
        let placed = [
            run(0, 100, 1),
            suspect(),
            restated(0, 100, 3),
            ScanEvent::Change(Change::Place(7), 4),
        ];
        assert_eq!(damage(placed), None);
    }

    #[test]
    fn a_log_is_suspected_of_what_was_lost_before_its_first_extent_of_an_epoch() {
        let log = LogId(7);
        let header = |first_offset, changes| ExtentHeader {
            kind: ExtentKind::Records,
            log_kind: LogKind::Stream,
            log,
            first_offset,
            generation: 1,
            time_us: 1,
            prev: Place::NONE,
            record_count: 10,
            records_len: 260,
            changes,
            name_len: 0,
        };
        let damage = |is_lost_in: u64| {
            let mut chapters = Chapters::default();
            let place = |position| Place {
                segment: 1,
                position,
                core: 0,
            };
            assert!(chapters.on_extent(1, &header(0, 0), place(4096), &[]));
            chapters.on_unknown_loss(is_lost_in, &"a lost group".into());
            assert!(chapters.on_extent(2, &header(10, 2), place(8192), &[]));
            let events = chapters.events(log, 2);
            events.push(restated(0, 20, 2));
            let logs = assemble(vec![(0, chapters)], &[], &HashMap::new());
            logs[&log].1.damage.clone()
        };
        assert!(damage(2).is_some());
        assert!(damage(1).is_some());
        assert_eq!(damage(3), None);
    }

    #[test]
    fn what_was_cut_before_events_had_numbers_is_known_by_a_restatement_alone() {
        let restated = || restated(0, 25, 0);
        // Records that begin below the tail, and no cut between: it was lost, or given back with its segment.
        let overlap = || vec![run(0, 20, 0), run(15, 25, 0)];
        assert!(damage(overlap()).is_some());
        let mut closed = overlap();
        closed.push(restated());
        assert_eq!(damage(closed), None);
        // A gap is one, whatever restates the tail behind it.
        assert!(damage(vec![run(0, 20, 0), run(22, 25, 0), restated()]).is_some());
    }

    #[test]
    fn a_log_of_another_core_is_cleared_by_known_numbers_of_cores_alone() {
        let is_cleared = |counts: &[(u64, u16)]| {
            let mut chapters = Chapters::default();
            let log = LogId(7);
            chapters.events(log, 1).push(run(0, 2, 0));
            let loss = UnknownLoss {
                core: 1,
                epoch: 2,
                detail: "a loss".into(),
            };
            let counts = counts.iter().copied().collect();
            let logs = assemble(vec![(0, chapters)], &[loss], &counts);
            logs[&log].1.damage.is_none()
        };
        assert!(is_cleared(&[(1, 2), (2, 2)]));
        // It may have moved to the core with the loss.
        for counts in [&[(1, 2), (2, 3)][..], &[(1, 2)], &[(2, 2)], &[]] {
            assert!(!is_cleared(counts), "{counts:?}");
        }
    }
}
