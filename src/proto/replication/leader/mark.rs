//! How far a majority of a shard's replicas holds its records.

/// The mark of one shard at one generation, from what the members answered at that generation.
///
/// Invariants: never above the leader's synced tail (I23), never falls, and counts only answers of
/// this generation (I24, I31).
#[derive(Debug, Clone)]
pub struct QuorumMark {
    /// Members that have to hold a record, the leader counted.
    majority: usize,
    /// A candidate at or below this is not a mark; see [`QuorumMark::new`].
    floor: Option<u64>,
    released: Option<u64>,
    /// Space for sorting; one entry a member.
    scratch: Vec<u64>,
}

impl QuorumMark {
    /// A mark of `members` replicas, the leader included.
    ///
    /// `own_run_start` is where the records begin that this leader wrote in its unbroken run of
    /// generations; with `Some`, nothing is a mark until a majority holds one of those. A record
    /// this leader only inherited may be on a majority and still lose a later comparison of logs
    /// against a dead leader's suffix, which carries a higher generation (scenario N1). A log in
    /// which nothing is inherited has `Some(0)`, which asks for nothing. `None` is for a catalog
    /// whose stored reports decide who may lead.
    pub fn new(members: usize, own_run_start: Option<u64>) -> Self {
        Self {
            majority: members / 2 + 1,
            floor: own_run_start.filter(|start| *start > 0),
            released: None,
            scratch: Vec::with_capacity(members),
        }
    }

    /// Members that have to hold a record, the leader counted.
    pub fn majority(&self) -> usize {
        self.majority
    }

    /// The mark; `None` before the first of this generation.
    pub fn get(&self) -> Option<u64> {
        self.released
    }

    /// What could be the mark now, if that is news: the highest offset that a majority has
    /// reached. `answered` are the positions of the followers that count.
    pub fn candidate(
        &mut self,
        leader_synced: u64,
        answered: impl Iterator<Item = u64>,
    ) -> Option<u64> {
        self.scratch.clear();
        self.scratch.push(leader_synced);
        self.scratch.extend(answered);
        let reached = self.scratch.len();
        if reached < self.majority {
            return None;
        }
        self.scratch.sort_unstable_by(|a, b| b.cmp(a));
        let candidate = self.scratch[self.majority - 1].min(leader_synced);
        if self.floor.is_some_and(|floor| candidate <= floor) {
            return None;
        }
        (self.released.is_none_or(|released| candidate > released)).then_some(candidate)
    }

    /// The mark is published. Called with what [`Self::candidate`] said, once the gate let it pass.
    pub fn release(&mut self, mark: u64) {
        if self.released.is_none_or(|released| mark > released) {
            self.released = Some(mark);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(mark: &mut QuorumMark, leader: u64, answered: &[u64]) -> Option<u64> {
        mark.candidate(leader, answered.iter().copied())
    }

    /// Every state of up to five members with positions 0 to 4 against the definition.
    #[test]
    fn i24_a_majority_holds_what_is_below_the_mark() {
        for members in 1..=5usize {
            let followers = members - 1;
            for code in 0..6u64.pow(followers as u32) {
                // A digit of 5 stands for a follower that has not answered.
                let positions: Vec<u64> = (0..followers)
                    .map(|i| code / 6u64.pow(i as u32) % 6)
                    .filter(|digit| *digit < 5)
                    .collect();
                for leader in 0..=4 {
                    let mut mark = QuorumMark::new(members, None);
                    let got = candidate(&mut mark, leader, &positions);
                    let holds = |m: u64| {
                        leader >= m
                            && 1 + positions.iter().filter(|p| **p >= m).count() > members / 2
                    };
                    let expected = (0..=4).rev().find(|m| holds(*m));
                    assert_eq!(got, expected, "{members} members, {leader}, {positions:?}");
                }
            }
        }
    }

    #[test]
    fn i23_the_mark_never_moves_back_and_stays_below_the_leaders_tail() {
        let mut mark = QuorumMark::new(3, None);
        assert_eq!(mark.get(), None);
        assert_eq!(candidate(&mut mark, 10, &[]), None, "one of three");
        assert_eq!(candidate(&mut mark, 10, &[7]), Some(7));
        mark.release(7);
        assert_eq!(candidate(&mut mark, 10, &[5]), None);
        mark.release(5);
        assert_eq!(mark.get(), Some(7));
        assert_eq!(candidate(&mut mark, 10, &[40, 40]), Some(10));
    }

    #[test]
    fn a_slow_or_dead_member_delays_nothing() {
        let mut mark = QuorumMark::new(3, None);
        assert_eq!(candidate(&mut mark, 100, &[100]), Some(100));
        assert_eq!(candidate(&mut mark, 100, &[3, 100]), Some(100));
    }

    #[test]
    fn n1_inherited_records_are_no_mark_until_one_of_our_own_is_on_a_majority() {
        let mut mark = QuorumMark::new(3, Some(10));
        assert_eq!(candidate(&mut mark, 10, &[10, 10]), None);
        assert_eq!(candidate(&mut mark, 12, &[10, 10]), None);
        assert_eq!(candidate(&mut mark, 12, &[11]), Some(11));
        let mut fresh = QuorumMark::new(3, Some(0));
        assert_eq!(candidate(&mut fresh, 0, &[0]), Some(0));
    }

    #[test]
    fn one_replica_alone_is_its_own_majority() {
        let mut mark = QuorumMark::new(1, None);
        assert_eq!(candidate(&mut mark, 4, &[]), Some(4));
    }
}
