//! The place where a stored report gates the mark.
//!
//! With a catalog on an engine, a mark may be published, and a follower's copy discarded, only
//! once the catalog has stored a report that names who holds what: then whoever the catalog may
//! promote holds every acknowledged record, without a clock. A catalog file stores no reports;
//! there the majority alone decides, and promotion is an operator's act.

use crate::ids::Generation;

use super::halt::HaltReason;

/// Names one report on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ReportId(pub u64);

/// One follower as a report sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FollowerPosition {
    /// What it has answered at this generation.
    pub answered: Option<u64>,
    pub halted: Option<HaltReason>,
}

/// What the leader of a shard knows of its followers, at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Report<'a> {
    pub generation: Generation,
    /// The leader's synced tail, read after the answers.
    pub leader_tail: u64,
    /// The mark to be published once this is stored.
    pub mark: Option<u64>,
    /// Where this generation begins in the leader's log.
    pub floor: u64,
    /// In the order of the replica set without its leader.
    pub followers: &'a [FollowerPosition],
}

impl Report<'_> {
    /// Places of the followers that may be promoted on this report: they have answered at least
    /// the mark, and hold all that this leader inherited.
    pub fn caught_up(&self) -> impl Iterator<Item = usize> + '_ {
        let least = self.mark.unwrap_or(self.leader_tail).max(self.floor);
        let all = self.followers.iter().enumerate();
        all.filter(move |(_, follower)| {
            follower.halted.is_none() && follower.answered.is_some_and(|at| at >= least)
        })
        .map(|(at, _)| at)
    }
}

/// What became of a report at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Submitted {
    /// What it says holds: its mark may be published.
    Stored,
    /// [`ShardLeader::on_report`](super::ShardLeader::on_report) follows.
    Pending(ReportId),
}

/// Stores reports, or stands for a catalog that does not.
pub trait ReportGate {
    /// Whether promotion is decided by comparing logs, as it is without reports: then the mark
    /// must wait for a record of the leader's own (see [`super::QuorumMark::new`]).
    const COMPARES_LOGS: bool;

    /// Wants `report` stored. At most one of a shard is pending at a time.
    fn submit(&mut self, report: &Report<'_>) -> Submitted;

    /// Whether no stored report of this generation names that follower, so that its copy may be
    /// discarded.
    fn is_unnamed(&self, follower: usize) -> bool;
}

/// The catalog file: the synced majority alone releases a mark.
#[derive(Debug, Clone, Copy, Default)]
pub struct MajorityAlone;

impl ReportGate for MajorityAlone {
    const COMPARES_LOGS: bool = true;

    fn submit(&mut self, _report: &Report<'_>) -> Submitted {
        Submitted::Stored
    }

    fn is_unnamed(&self, _follower: usize) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i25_a_report_names_only_who_holds_the_mark_and_the_floor() {
        let at = |answered| FollowerPosition {
            answered,
            halted: None,
        };
        let mut followers = [at(Some(19)), at(Some(20)), at(None), at(Some(25))];
        followers[3].halted = Some(HaltReason::Diverged);
        let mut report = Report {
            generation: Generation(3),
            leader_tail: 25,
            mark: Some(20),
            floor: 10,
            followers: &followers,
        };
        assert_eq!(report.caught_up().collect::<Vec<_>>(), [1]);
        report.floor = 22;
        assert_eq!(report.caught_up().count(), 0);
        (report.floor, report.mark) = (0, None);
        assert_eq!(report.caught_up().count(), 0, "without a mark: the tail");
    }
}
