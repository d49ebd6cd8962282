//! What a broker does before it takes the first write of a shard at a generation.
//!
//! ```text
//! Recording --own A = g and (g, tail) synced--> Probing --majority fenced--> Open
//!                                              (no followers: Open at once)
//! ```
//!
//! Probing sends each follower a batch without records. Who answers `ReplicateOk` or `LogGap` has
//! made the generation durable and refuses every older leader from then on; with a majority of
//! those no older leader can get another record onto a majority.

use crate::ids::{Generation, NodeId};
use crate::proto::replication::types::LogState;
use crate::wire::internal::ReplicaLog;

/// A log of the shard as it stands on the leader's disk when it begins to lead.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogStart {
    pub log: ReplicaLog,
    pub state: LogState,
}

/// A broker may not lead a shard at a generation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LeadRefusal {
    #[error("generation {accepted} was accepted here already; the catalog names {asked}: use {accepted} or more, and a leader that holds what was written since")]
    OlderGeneration {
        asked: Generation,
        accepted: Generation,
    },
    #[error("generation {asked} was led by {leader}; a generation has one leader for all time: raise it")]
    LedByAnother { asked: Generation, leader: NodeId },
}

/// Where a leader's own records begin in a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OwnRun {
    /// Whether this generation is in the history already: the leader restarted.
    pub is_recorded: bool,
    /// Where this generation begins.
    pub generation_start: u64,
    /// Where the unbroken run of this leader's generations begins, this one included.
    pub run_start: u64,
}

impl LogStart {
    /// Whether `me` may lead the log at `generation`, and where its own records begin.
    pub fn may_lead(&self, me: &NodeId, generation: Generation) -> Result<OwnRun, LeadRefusal> {
        let older = |accepted| LeadRefusal::OlderGeneration {
            asked: generation,
            accepted,
        };
        if self.state.accepted > generation {
            return Err(older(self.state.accepted));
        }
        let tail = self.state.durable_tail;
        let mut run = OwnRun {
            is_recorded: false,
            generation_start: tail,
            run_start: tail,
        };
        let mut entries = self.state.history.entries();
        if let Some((newest, before)) = entries.split_last() {
            if newest.generation > generation {
                return Err(older(newest.generation));
            }
            if newest.generation == generation {
                if newest.leader != *me {
                    return Err(LeadRefusal::LedByAnother {
                        asked: generation,
                        leader: newest.leader.clone(),
                    });
                }
                run = OwnRun {
                    is_recorded: true,
                    generation_start: newest.start,
                    run_start: newest.start,
                };
                entries = before;
            }
        }
        // Numbers without a hole: a generation this log never saw may have had another leader.
        let mut expected = generation.0.checked_sub(1);
        for entry in entries.iter().rev() {
            if Some(entry.generation.0) != expected || entry.leader != *me {
                break;
            }
            run.run_start = entry.start;
            expected = entry.generation.0.checked_sub(1);
        }
        Ok(run)
    }
}

/// How far the opening of a shard is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OpeningPhase {
    /// The generation is being made durable in this broker's own logs.
    Recording,
    /// A majority has not been fenced yet.
    Probing,
    /// Writes are taken.
    Open,
    /// A newer generation exists: nothing is taken, sent or counted any more.
    Fenced,
    /// The generation could not be made durable here.
    Failed,
}

impl OpeningPhase {
    /// The phase's name as written in status reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Recording => "recording",
            Self::Probing => "probing",
            Self::Open => "open",
            Self::Fenced => "fenced",
            Self::Failed => "failed",
        }
    }
}

/// The opening of one shard.
#[derive(Debug, Clone)]
pub struct Opening {
    phase: OpeningPhase,
    /// Logs whose generation is not durable yet.
    to_record: usize,
    majority: usize,
    /// Who has answered a probe, in the order of the followers.
    fenced: Vec<bool>,
}

impl Opening {
    /// An opening with `followers` followers, `to_record` logs of which have to take the
    /// generation down first.
    pub fn new(followers: usize, to_record: usize) -> Self {
        let members = followers + 1;
        let mut opening = Self {
            phase: OpeningPhase::Recording,
            to_record,
            majority: members / 2 + 1,
            fenced: vec![false; followers],
        };
        opening.step();
        opening
    }

    pub fn phase(&self) -> OpeningPhase {
        self.phase
    }

    pub fn is_open(&self) -> bool {
        self.phase == OpeningPhase::Open
    }

    /// One log's generation is durable, or will never be.
    pub fn on_recorded(&mut self, is_durable: bool) {
        if self.phase != OpeningPhase::Recording {
            return;
        }
        match is_durable {
            true => self.to_record = self.to_record.saturating_sub(1),
            false => self.phase = OpeningPhase::Failed,
        }
        self.step();
    }

    /// A follower refuses older leaders from now on.
    pub fn on_fenced_follower(&mut self, follower: usize) {
        if let Some(fenced) = self.fenced.get_mut(follower) {
            *fenced = true;
        }
        self.step();
    }

    /// A newer generation exists; final.
    pub fn on_superseded(&mut self) {
        self.phase = OpeningPhase::Fenced;
    }

    fn step(&mut self) {
        if self.phase == OpeningPhase::Recording && self.to_record == 0 {
            self.phase = OpeningPhase::Probing;
        }
        let fenced = 1 + self.fenced.iter().filter(|fenced| **fenced).count();
        if self.phase == OpeningPhase::Probing && fenced >= self.majority {
            self.phase = OpeningPhase::Open;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::replication::history::{History, HistoryEntry};

    fn node(name: &str) -> NodeId {
        NodeId::new(name).unwrap()
    }

    fn log(accepted: u64, synced: u64, history: &[(u64, u64, &str)]) -> LogStart {
        let entries = history
            .iter()
            .map(|(generation, start, leader)| HistoryEntry {
                generation: Generation(*generation),
                start: *start,
                leader: node(leader),
            })
            .collect();
        LogStart {
            log: ReplicaLog::Stream,
            state: LogState {
                tail: synced,
                durable_tail: synced,
                accepted: Generation(accepted),
                history: History::from_entries(entries).unwrap(),
                ..LogState::default()
            },
        }
    }

    #[test]
    fn a_broker_never_leads_at_an_older_generation_than_it_accepted() {
        let me = node("a");
        let refused = log(5, 9, &[(5, 0, "b")]).may_lead(&me, Generation(4));
        assert!(matches!(refused, Err(LeadRefusal::OlderGeneration { .. })));
        let refused = log(5, 9, &[(5, 0, "b")]).may_lead(&me, Generation(5));
        assert!(matches!(refused, Err(LeadRefusal::LedByAnother { .. })));
        let run = log(5, 9, &[(5, 0, "b")]).may_lead(&me, Generation(6));
        let fresh = OwnRun {
            is_recorded: false,
            generation_start: 9,
            run_start: 9,
        };
        assert_eq!(run, Ok(fresh));
    }

    #[test]
    fn a_restart_at_the_same_generation_leads_on() {
        let run = log(5, 90, &[(3, 0, "b"), (5, 40, "a")]).may_lead(&node("a"), Generation(5));
        let resumed = OwnRun {
            is_recorded: true,
            generation_start: 40,
            run_start: 40,
        };
        assert_eq!(run, Ok(resumed));
    }

    #[test]
    fn a_run_is_one_leader_without_a_hole_in_the_numbers() {
        let me = node("a");
        let start = |history: &[(u64, u64, &str)], generation| {
            let run = log(0, 90, history).may_lead(&me, Generation(generation));
            run.unwrap().run_start
        };
        assert_eq!(start(&[(3, 10, "a"), (4, 20, "a")], 5), 10);
        assert_eq!(start(&[(3, 10, "a"), (4, 20, "a"), (5, 30, "a")], 5), 10);
        assert_eq!(start(&[(3, 10, "b"), (4, 20, "a")], 5), 20);
        assert_eq!(start(&[(2, 10, "a"), (4, 20, "a")], 5), 20, "3 is unknown");
        assert_eq!(start(&[(3, 10, "a"), (4, 20, "a")], 6), 90, "5 is unknown");
        assert_eq!(start(&[], 0), 90);
    }

    #[test]
    fn i14_opens_only_with_its_own_record_and_a_fenced_majority() {
        let mut opening = Opening::new(2, 3);
        for _ in 0..2 {
            opening.on_recorded(true);
            opening.on_fenced_follower(0);
            assert_eq!(opening.phase(), OpeningPhase::Recording);
        }
        opening.on_recorded(true);
        assert!(opening.is_open(), "the probe had been answered already");

        let mut opening = Opening::new(4, 1);
        opening.on_recorded(true);
        opening.on_fenced_follower(3);
        opening.on_fenced_follower(3);
        assert_eq!(
            opening.phase(),
            OpeningPhase::Probing,
            "one follower counts once"
        );
        opening.on_fenced_follower(0);
        assert!(opening.is_open());

        let mut alone = Opening::new(0, 1);
        assert!(!alone.is_open());
        alone.on_recorded(true);
        assert!(alone.is_open());
    }

    #[test]
    fn what_failed_or_was_superseded_never_opens() {
        let mut failed = Opening::new(2, 1);
        failed.on_recorded(false);
        failed.on_recorded(true);
        failed.on_fenced_follower(0);
        assert_eq!(failed.phase(), OpeningPhase::Failed);
        let mut superseded = Opening::new(2, 1);
        superseded.on_superseded();
        superseded.on_recorded(true);
        superseded.on_fenced_follower(0);
        assert_eq!(superseded.phase(), OpeningPhase::Fenced);
    }
}
