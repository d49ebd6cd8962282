//! Scenarios of the replication design (section 12) as the leader sees them.

use super::*;

#[test]
fn n1_an_inherited_record_is_not_counted_until_one_of_our_own_is_on_a_majority() {
    // c leads 3 with x, which generation 1 wrote at 10.
    let mut lead = Lead::main(0, 11, 11);
    lead.answer_probe(B, ok(11));
    assert!(lead.leader.is_open());
    assert_eq!(
        lead.leader.mark(),
        None,
        "x is on a majority and may still lose"
    );
    lead.append(12);
    assert_eq!(lead.leader.mark(), None);
    let id = lead.send(B, 12);
    lead.answer(B, id, ok(12));
    assert_eq!(lead.leader.mark(), Some(12));
}

#[test]
fn n2_n3_a_lost_answer_is_resent_with_more_and_counts_once() {
    let mut lead = Lead::level(10);
    lead.append(20);
    let id = lead.send(B, 20);
    lead.append(25);
    lead.answer(B, id, Answered::Unknown);
    assert_eq!(lead.cursor(B).position(), Some(10), "nothing was answered");
    lead.leader.on_peer_up(B);
    let id = lead.send(B, 25);
    lead.answer(B, id, ok(25));
    assert_eq!(lead.leader.mark(), Some(25));
}

#[test]
fn n5_a_deposed_leader_stops_and_the_new_one_waits_for_the_view() {
    let mut deposed = Lead::level(10);
    deposed.append(20);
    let id = deposed.send(C, 20);
    deposed.answer(C, id, refused(PeerCode::FencedEpoch));
    assert_eq!(deposed.leader.opening(), OpeningPhase::Fenced);

    let mut new = Lead::main(0, 10, 10);
    new.answer_probe(B, ok(10));
    let at = new.answer_probe(C, refused(PeerCode::StaleRoute));
    new.pass(Duration::from_secs(2));
    assert_eq!(new.answer_probe(C, ok(10)), at);
}

#[test]
fn n6_a_superseded_leader_halts_fenced_and_never_rebuilds() {
    let mut lead = Lead::level(10);
    lead.append(20);
    let id = lead.send(C, 20);
    lead.answer(C, id, refused(PeerCode::LogConflict));
    let asked = lead.ask_main(C).unwrap();
    assert!(matches!(asked.ask, Ask::Rebuild { .. }));
    lead.answer(C, asked.id, refused(PeerCode::FencedEpoch));
    assert_eq!(lead.cursor(C).halted(), Some(HaltReason::Fenced));
    assert_eq!(lead.slots.free.get(), 1);
    lead.pass(Duration::from_secs(86_400));
    assert_eq!((lead.ask(B), lead.ask(C)), (None, None));
}

#[test]
fn n7_a_follower_below_the_base_that_holds_records_is_halted_and_rebuilt() {
    let mut lead = Lead::with(spec(2, false), &[main_log(100, 100, 120)]);
    lead.answer_probe(C, ok(120));
    lead.answer_probe(B, gap(49));
    let asked = lead.ask_main(B).unwrap();
    assert_eq!(asked.ask, Ask::Bootstrap { base: Offset(100) });
    lead.answer(B, asked.id, refused(PeerCode::LogConflict));
    assert_eq!(lead.cursor(B).halted(), Some(HaltReason::NeedsBootstrap));
    let asked = lead.ask_main(B).unwrap();
    assert_eq!(asked.ask, Ask::Rebuild { base: Offset(100) });
    lead.answer(B, asked.id, ok(100));
    assert_eq!(fetch_from(lead.ask_main(B)), 100);
}

#[test]
fn n8_a_bootstrap_whose_answer_was_lost_is_offered_again() {
    let mut lead = Lead::with(spec(2, false), &[main_log(100, 100, 120)]);
    lead.answer_probe(C, ok(120));
    lead.answer_probe(B, gap(0));
    for _ in 0..2 {
        let asked = lead.ask_main(B).unwrap();
        assert_eq!(asked.ask, Ask::Bootstrap { base: Offset(100) });
        lead.answer(B, asked.id, Answered::Unknown);
        lead.pass(Duration::from_secs(5));
    }
    let asked = lead.ask_main(B).unwrap();
    lead.answer(B, asked.id, ok(100));
    assert_eq!(fetch_from(lead.ask_main(B)), 100);
}

#[test]
fn n11_gap_repair_goes_where_the_follower_says_not_to_its_tail() {
    // Own records begin at 100; the follower holds a dead leader's 85..89.
    let mut lead = Lead::main(0, 100, 110);
    assert_eq!(lead.answer_probe(B, gap(84)), Offset(99));
    let id = lead.send(B, 110);
    assert_eq!(lead.cursor(B).position(), None);
    lead.answer(B, id, ok(110));
    assert_eq!(lead.leader.mark(), Some(110));
}

#[test]
fn n12_a_follower_longer_than_the_leader_counts_up_to_the_leaders_tail() {
    let mut lead = Lead::main(0, 0, 11);
    lead.answer_probe(B, ok(14));
    assert_eq!(lead.cursor(B).position(), Some(11));
    assert_eq!(lead.leader.mark(), Some(11));
}

#[test]
fn n13_n16_a_follower_with_a_bad_disk_counts_nothing_new_and_quorum_goes_on() {
    let mut lead = Lead::level(10);
    lead.append(20);
    let id = lead.send(B, 20);
    lead.answer(B, id, refused(PeerCode::StorageFailed));
    assert_eq!(lead.leader.mark(), Some(10));
    let id = lead.send(C, 20);
    lead.answer(C, id, ok(20));
    assert_eq!(lead.leader.mark(), Some(20), "the other two");
    lead.pass(Duration::from_secs(5));
    let id = lead.send(B, 20);
    lead.answer(B, id, ok(20));
    assert_eq!(lead.cursor(B).position(), Some(20), "space returned");
}

#[test]
fn n15_what_the_leader_has_not_synced_is_neither_shipped_nor_counted() {
    let mut lead = Lead::level(10);
    // Its own flush failed: the synced tail stays, whatever a follower claims.
    assert_eq!(lead.ask(B), None);
    lead.append(10);
    assert_eq!(lead.leader.mark(), Some(10));
    assert_eq!(lead.events, []);
}

#[test]
fn n22_a_halted_follower_counts_for_nothing_until_it_is_level_again() {
    let mut lead = Lead::level(10);
    lead.append(20);
    let id = lead.send(B, 20);
    lead.answer(B, id, refused(PeerCode::LogConflict));
    assert_eq!(lead.cursor(B).counted(), None);
    let asked = lead.ask_main(B).unwrap();
    lead.answer(B, asked.id, ok(0));
    // Its copy begins anew: it stands at 0 and raises nothing.
    lead.append(30);
    let id = lead.send(B, 15);
    lead.answer(B, id, ok(15));
    assert_eq!(lead.leader.mark(), Some(15));
    let id = lead.send(B, 30);
    lead.answer(B, id, ok(30));
    assert_eq!(lead.leader.mark(), Some(30));
}

#[test]
fn n25_a_fresh_shard_at_generation_0_opens_and_ships() {
    let mut fresh = spec(2, true);
    fresh.generation = Generation(0);
    let start = LogStart {
        log: MAIN,
        state: LogState::default(),
    };
    let mut lead = Lead::with(fresh, &[start]);
    assert_eq!(lead.answer_probe(B, ok(0)), Offset(0));
    lead.append(5);
    let id = lead.send(B, 5);
    lead.answer(B, id, ok(5));
    assert_eq!(lead.leader.mark(), Some(5));
}

#[test]
fn a_generation_bump_under_the_same_leader_carries_its_records() {
    // Generation 3 wrote from 10 on; at 4 the same broker leads with another replica set.
    let mut next = spec(2, true);
    next.generation = Generation(4);
    let start = main_log(0, 10, 30);
    let mut lead = Lead::with(next, &[start]);
    assert_eq!(lead.answer_probe(B, ok(20)), Offset(29));
    assert_eq!(
        lead.leader.mark(),
        Some(20),
        "its own, of the generation before"
    );
    assert_eq!(lead.leader.floor(), 30);
}

#[test]
fn n14_what_the_leaders_disk_undid_is_shipped_to_nobody_and_its_offsets_are_used_again() {
    let mut lead = Lead::level(10);
    // Five records were taken and did not fit: storage tells of no new tail.
    assert_eq!((lead.ask(B), lead.ask(C)), (None, None));
    assert_eq!(lead.leader.mark(), Some(10));
    // The next write has the same offsets.
    lead.append(12);
    for follower in [B, C] {
        let asked = lead.ask_main(follower).expect("records");
        assert_eq!(fetch_from(Some(asked)), 10);
        let fetched = Fetched::Records {
            end: Offset(12),
            bytes: 200,
        };
        let leader = &mut lead.leader;
        assert!(leader.on_fetched(follower, MAIN, asked.id, fetched, lead.now));
        lead.answer(follower, asked.id, ok(12));
    }
    assert_eq!(lead.leader.mark(), Some(12));
}

/// A catalog that stores reports and promotes only from the one it stores at the write.
#[derive(Default)]
struct StoredReports {
    revision: u64,
    /// Followers the stored report names.
    named: Vec<usize>,
}

/// The leader's way to it; the report in hand is stored when the test says so.
#[derive(Default)]
struct ToCatalog {
    catalog: std::rc::Rc<std::cell::RefCell<StoredReports>>,
    submitted: std::rc::Rc<Cell<u64>>,
    named: std::rc::Rc<std::cell::RefCell<Vec<usize>>>,
}

impl ReportGate for ToCatalog {
    const COMPARES_LOGS: bool = false;

    fn submit(&mut self, report: &Report<'_>) -> Submitted {
        *self.named.borrow_mut() = report.caught_up().collect();
        self.submitted.set(self.submitted.get() + 1);
        Submitted::Pending(ReportId(self.submitted.get()))
    }

    fn is_unnamed(&self, follower: usize) -> bool {
        !self.catalog.borrow().named.contains(&follower)
    }
}

impl ToCatalog {
    /// The transaction of the newest report went through.
    fn store(&self) -> ReportId {
        let mut catalog = self.catalog.borrow_mut();
        catalog.revision += 1;
        catalog.named = self.named.borrow().clone();
        ReportId(self.submitted.get())
    }
}

impl StoredReports {
    /// The promotion transaction of a planner that read the report at `revision`.
    fn promote(&self, revision: u64) -> Option<Vec<usize>> {
        (self.revision == revision).then(|| self.named.clone())
    }
}

#[test]
fn n17_a_promotion_on_a_report_that_was_replaced_is_refused_and_planned_anew() {
    let gate = ToCatalog::default();
    let handle = ToCatalog {
        catalog: gate.catalog.clone(),
        submitted: gate.submitted.clone(),
        named: gate.named.clone(),
    };
    let mut leader = ShardLeader::begin(spec(2, true), gate, &[main_log(0, 0, 10)]).unwrap();
    let slots = Slots { free: Cell::new(1) };
    let now = MonoTime::ZERO;
    let answer = |leader: &mut ShardLeader<ToCatalog>, follower, end: u64| {
        let (_, asked) = leader.next_ask(follower, now, &slots).unwrap();
        if let Ask::Fetch { .. } = asked.ask {
            let fetched = Fetched::Records {
                end: Offset(end),
                bytes: 1,
            };
            assert!(leader.on_fetched(follower, MAIN, asked.id, fetched, now));
        }
        leader.on_answer(follower, MAIN, asked.id, ok(end), now, &slots);
    };
    answer(&mut leader, B, 10);
    // R1 names b; a planner reads it.
    leader.on_report(handle.store(), true);
    let r1 = handle.catalog.borrow().revision;
    assert_eq!(handle.catalog.borrow().named, [0]);
    assert_eq!(leader.mark(), Some(10));
    // c overtakes b: R2 names c alone, is stored, and 19 is acknowledged.
    leader.on_log(MAIN, 0, 20);
    answer(&mut leader, C, 10);
    answer(&mut leader, C, 20);
    assert_eq!(leader.mark(), Some(10), "R2 is not stored yet");
    leader.on_report(handle.store(), true);
    assert_eq!(leader.mark(), Some(20));
    let catalog = handle.catalog.borrow();
    assert_eq!(catalog.promote(r1), None, "the report has moved");
    assert_eq!(catalog.promote(catalog.revision), Some(vec![1]), "c alone");
}

#[test]
fn n19_a_leader_that_slept_through_its_successor_acknowledges_nothing() {
    // Asleep between the append and its commit; another leads at 4 meanwhile.
    let mut lead = Lead::level(10);
    let mut waits = QuorumWaits::default();
    lead.pass(Duration::from_secs(60));
    // Its record becomes durable here, and waits for a majority.
    lead.append(11);
    waits.push(11, lead.now + Duration::from_secs(5), "the write");
    let id = lead.send(B, 11);
    lead.answer(B, id, refused(PeerCode::FencedEpoch));
    assert_eq!(lead.leader.opening(), OpeningPhase::Fenced);
    assert!(!lead.leader.is_open(), "nothing more is taken");
    assert_eq!(lead.count(|event| *event == ShardEvent::Superseded), 1);
    // Whatever the other one says, it counts at a generation that is over.
    assert_eq!(lead.ask(C), None);
    assert_eq!(lead.leader.mark(), Some(10));
    assert_eq!(waits.pop_released(10), None, "it is never acknowledged");
}

#[test]
fn n21_retention_keeps_what_no_majority_holds() {
    let mut lead = Lead::with(spec(2, true), &[main_log(0, 0, 10)]);
    assert_eq!(lead.leader.may_forget_below(MAIN), 0, "no mark yet");
    lead.answer_probe(B, ok(10));
    lead.answer_probe(C, ok(10));
    assert_eq!(lead.leader.may_forget_below(MAIN), 10);
    // Both followers go down; the leader writes on.
    lead.append(500);
    assert_eq!(lead.leader.may_forget_below(MAIN), 10);
    // They return: what they lack is read, not placed over a hole.
    let id = lead.send(B, 500);
    lead.answer(B, id, ok(500));
    assert_eq!(lead.leader.may_forget_below(MAIN), 500);
    // Retention takes what a majority holds; c, below the new base, may be placed there.
    lead.leader.on_log(MAIN, 400, 500);
    let asked = lead.ask_main(C).expect("c is told where the log begins");
    assert_eq!(asked.ask, Ask::Bootstrap { base: Offset(400) });
    assert!(lead.leader.mark() >= Some(400), "never above the mark");

    // A new leader deletes nothing before its first mark.
    let fresh = Lead::with(spec(2, true), &[main_log(50, 100, 120)]);
    assert_eq!(fresh.leader.may_forget_below(MAIN), 50);
    // Where a write is acknowledged by its leader alone, retention outranks the copies.
    let alone = Lead::with(spec(2, false), &[main_log(0, 0, 10)]);
    assert_eq!(alone.leader.may_forget_below(MAIN), u64::MAX);
}

#[test]
fn n28_a_new_generation_begins_without_a_report() {
    // Generation 3 had everything reported; its leader leads on at 4, with the same followers.
    let mut next = spec(2, true);
    next.generation = Generation(4);
    let gate = ToCatalog::default();
    let submitted = gate.submitted.clone();
    let mut leader = ShardLeader::begin(next, gate, &[main_log(0, 0, 10)]).unwrap();
    leader.on_recorded(true);
    assert_eq!(
        (leader.mark(), submitted.get()),
        (None, 0),
        "nothing is carried over"
    );
    let slots = Slots { free: Cell::new(1) };
    let (_, asked) = leader.next_ask(B, MonoTime::ZERO, &slots).unwrap();
    leader.on_answer(B, MAIN, asked.id, ok(10), MonoTime::ZERO, &slots);
    assert_eq!(submitted.get(), 1, "its own report, of answers at 4");
    assert_eq!(leader.mark(), None, "which is not stored yet");
    // A report of the generation before is not this one's.
    leader.on_report(ReportId(9), true);
    assert_eq!(leader.mark(), None);
    leader.on_report(ReportId(1), true);
    assert_eq!(leader.mark(), Some(10));
}
