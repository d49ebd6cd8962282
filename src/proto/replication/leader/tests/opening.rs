//! From the assignment to the first write.

use super::*;

#[test]
fn i14_records_its_generation_before_it_probes_and_probes_before_it_opens() {
    let mut start = main_log(0, 5, 5);
    start.state.accepted = Generation(1);
    let mut leader = ShardLeader::begin(spec(2, true), MajorityAlone, &[start]).unwrap();
    assert_eq!(leader.poll_event(), Some(ShardEvent::Record { log: MAIN }));
    assert_eq!(leader.poll_event(), None);
    let slots = Slots { free: Cell::new(1) };
    let now = MonoTime::ZERO;
    assert_eq!(leader.next_ask(B, now, &slots), None, "nothing leaves yet");
    leader.on_recorded(true);
    assert_eq!(leader.opening(), OpeningPhase::Probing);
    let (_, asked) = leader.next_ask(B, now, &slots).unwrap();
    assert_eq!(asked.ask, probe(4), "one below where the generation begins");
    leader.on_answer(B, MAIN, asked.id, gap(2), now, &slots);
    assert!(
        leader.is_open(),
        "LogGap fences as well; b and a are two of three"
    );
    assert_eq!(leader.poll_event(), Some(ShardEvent::Opened));
    assert_eq!(leader.mark(), None, "a gap is no position");
}

#[test]
fn a_broker_that_cannot_record_its_generation_never_opens() {
    let mut start = main_log(0, 5, 5);
    start.state.accepted = Generation(1);
    let mut leader = ShardLeader::begin(spec(2, true), MajorityAlone, &[start]).unwrap();
    leader.on_recorded(false);
    assert_eq!(leader.opening(), OpeningPhase::Failed);
    assert!(!leader.wants(B, MonoTime::ZERO));
}

#[test]
fn an_older_generation_than_accepted_is_refused() {
    let mut start = main_log(0, 0, 0);
    start.state.accepted = Generation(4);
    let refused = ShardLeader::begin(spec(2, true), MajorityAlone, &[start]);
    assert!(matches!(refused, Err(LeadRefusal::OlderGeneration { .. })));
}

#[test]
fn probes_are_repeated_200_ms_doubling_to_2_s_until_a_majority_is_fenced() {
    for answer in [
        refused(PeerCode::StaleRoute),
        refused(PeerCode::Unavailable),
        Answered::NotSent,
    ] {
        let mut lead = Lead::main(0, 0, 10);
        for wait in [200, 400, 800, 1600, 2000, 2000] {
            lead.answer_probe(B, answer);
            lead.answer_probe(C, answer);
            assert_eq!(lead.wait(B), Duration::from_millis(wait));
            assert!(!lead.leader.is_open());
            lead.pass(Duration::from_millis(wait));
        }
        lead.answer_probe(C, ok(10));
        assert!(lead.leader.is_open());
    }
}

#[test]
fn until_the_shard_is_open_nothing_but_probes_leaves() {
    let mut lead = Lead::with(spec(4, true), &[main_log(0, 0, 10)]);
    lead.answer_probe(B, ok(3));
    assert!(!lead.leader.is_open(), "two of five");
    assert_eq!(lead.ask(B), None, "b lacks records and has to wait");
    lead.answer_probe(C, gap(0));
    assert!(lead.leader.is_open());
    assert_eq!(fetch_from(lead.ask_main(B)), 3);
    assert_eq!(fetch_from(lead.ask_main(C)), 0);
}

#[test]
fn a_peer_that_refuses_an_empty_batch_is_fenced_by_the_first_records() {
    let mut lead = Lead::main(0, 4, 10);
    let at = lead.answer_probe(B, refused(PeerCode::Malformed));
    assert_eq!(at, Offset(3));
    let id = lead.send(B, 4);
    assert_eq!(
        lead.ask(B),
        None,
        "one exchange until it has said where it is"
    );
    lead.answer(B, id, ok(4));
    assert!(lead.leader.is_open());
}

#[test]
fn a_level_follower_costs_one_small_exchange() {
    let mut lead = Lead::main(0, 1, 1_000_000);
    let at = lead.answer_probe(B, ok(1_000_000));
    assert_eq!(at, Offset(0));
    assert_eq!(lead.leader.mark(), Some(1_000_000));
    assert_eq!(lead.ask(B), None);
    assert_eq!(
        lead.cursor(B).next_deadline(),
        None,
        "an idle cursor has no timer"
    );
}

#[test]
fn an_idle_shard_waits_for_nothing() {
    let lead = Lead::level(10);
    assert_eq!(lead.leader.next_deadline(), None);
    let mut lead = Lead::stream(10, 0, 0);
    for follower in [B, C] {
        lead.answer_probe(follower, ok(10));
        while let Some((log, asked)) = lead.ask(follower) {
            assert_eq!(asked.ask, probe(0));
            lead.answer_log(follower, log, asked.id, ok(0));
        }
    }
    assert_eq!(lead.leader.next_deadline(), None);
}

#[test]
fn a_follower_that_is_late_is_probed_after_the_opening_too() {
    let mut lead = Lead::main(0, 0, 10);
    lead.answer_probe(B, ok(10));
    lead.answer_probe(C, Answered::NotSent);
    lead.pass(Duration::from_secs(5));
    lead.answer_probe(C, ok(7));
    assert_eq!(fetch_from(lead.ask_main(C)), 7);
}

#[test]
fn an_empty_shard_has_the_mark_zero_once_a_majority_answered() {
    let mut lead = Lead::main(0, 0, 0);
    assert_eq!(lead.leader.mark(), None);
    assert_eq!(lead.answer_probe(B, ok(0)), Offset(0));
    assert_eq!(lead.leader.mark(), Some(0));
}
