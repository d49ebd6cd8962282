//! New copies, under the policy.

use super::*;

/// A shard whose follower `b` has diverged at a log of 100 records from `base` on.
fn diverged(base: u64, slots: usize) -> Lead {
    let mut lead = Lead::with(spec(2, false), &[main_log(base, base, 100)]);
    lead.slots.free.set(slots);
    lead.answer_probe(C, ok(100));
    lead.answer_probe(B, ok(base));
    let id = lead.send(B, 100);
    lead.answer(B, id, refused(PeerCode::LogConflict));
    lead.events.clear();
    lead
}

#[test]
fn a_diverged_follower_is_rebuilt_and_holds_its_slot_until_it_is_level() {
    let mut lead = diverged(20, 1);
    assert_eq!(lead.leader.halted().count(), 1);
    let asked = lead.ask_main(B).unwrap();
    assert_eq!(asked.ask, Ask::Rebuild { base: Offset(20) });
    assert_eq!(lead.slots.free.get(), 0);
    assert_eq!(lead.leader.halted().count(), 1, "until it is accepted");
    lead.answer(B, asked.id, ok(20));
    assert_eq!(lead.leader.halted().count(), 0);
    assert_eq!(lead.cursor(B).phase(), CursorPhase::Rebuilding);
    assert_eq!(lead.leader.rebuilding(), 1);
    let id = lead.send(B, 60);
    lead.answer(B, id, ok(60));
    assert_eq!(lead.slots.free.get(), 0);
    let id = lead.send(B, 100);
    lead.answer(B, id, ok(100));
    assert_eq!(lead.slots.free.get(), 1);
    assert_eq!(lead.cursor(B).phase(), CursorPhase::Shipping);
    let started = |e: &ShardEvent| matches!(e, ShardEvent::RebuildStarted { .. });
    let completed = |e: &ShardEvent| matches!(e, ShardEvent::RebuildCompleted { .. });
    assert_eq!((lead.count(started), lead.count(completed)), (1, 1));
}

#[test]
fn what_it_answered_before_it_was_rebuilt_does_not_count_any_more() {
    let mut lead = Lead::level(100);
    lead.append(120);
    let id = lead.send(B, 120);
    lead.answer(B, id, refused(PeerCode::LogConflict));
    let asked = lead.ask_main(B).unwrap();
    lead.answer(B, asked.id, ok(0));
    assert_eq!(lead.cursor(B).position(), Some(0));
    assert_eq!(lead.cursor(B).counted(), Some(0));
}

#[test]
fn no_slot_no_rebuild_and_zero_slots_mean_never() {
    let mut lead = diverged(0, 0);
    for _ in 0..50 {
        assert!(lead.ask(B).is_none());
        lead.pass(Duration::from_secs(1));
    }
    lead.slots.free.set(1);
    assert!(matches!(lead.ask_main(B).unwrap().ask, Ask::Rebuild { .. }));
}

#[test]
fn a_refused_rebuild_is_asked_again_after_5_s_doubling_to_5_min() {
    for refusal in [
        refused(PeerCode::Unavailable),
        refused(PeerCode::StorageFailed),
        refused(PeerCode::LogConflict),
        Answered::Unknown,
        Answered::NotSent,
    ] {
        let mut lead = diverged(0, 1);
        for wait in [5, 10, 20, 40, 80, 160, 300, 300] {
            let asked = lead.ask_main(B).unwrap();
            lead.answer(B, asked.id, refusal);
            assert_eq!(lead.slots.free.get(), 1, "given back on refusal");
            assert_eq!(lead.ask(B), None);
            assert_eq!(lead.wait(B), Duration::from_secs(wait));
            lead.pass(Duration::from_secs(wait));
        }
    }
}

#[test]
fn a_peer_that_does_not_know_the_kind_stays_halted() {
    let mut lead = diverged(0, 1);
    let asked = lead.ask_main(B).unwrap();
    lead.answer(B, asked.id, refused(PeerCode::UnsupportedKind));
    lead.pass(Duration::from_secs(86_400));
    assert_eq!(lead.ask(B), None);
    assert_eq!(lead.slots.free.get(), 1);
    assert_eq!(lead.cursor(B).halted(), Some(HaltReason::Diverged));
}

#[test]
fn neither_fenced_nor_unsupported_is_ever_rebuilt() {
    for reason in HaltReason::ALL {
        let expected = matches!(reason, HaltReason::Diverged | HaltReason::NeedsBootstrap);
        assert_eq!(reason.is_rebuildable(), expected, "{reason:?}");
    }
    let mut lead = Lead::level(10);
    lead.append(11);
    let id = lead.send(B, 11);
    lead.answer(B, id, refused(PeerCode::UnsupportedKind));
    lead.pass(Duration::from_secs(86_400));
    assert_eq!(lead.ask(B), None);
}

#[test]
fn a_follower_that_goes_away_while_it_is_rebuilt_gives_its_slot_to_another() {
    let mut lead = diverged(0, 1);
    let asked = lead.ask_main(B).unwrap();
    lead.answer(B, asked.id, ok(0));
    let id = lead.send(B, 50);
    lead.answer(B, id, Answered::Unknown);
    assert_eq!(lead.slots.free.get(), 1);
    lead.leader.on_peer_up(B);
    assert_eq!(fetch_from(lead.ask_main(B)), 0, "it goes on without one");
}

#[test]
fn slots_come_back_with_the_generation() {
    let mut lead = diverged(0, 1);
    let asked = lead.ask_main(B).unwrap();
    lead.answer(B, asked.id, ok(0));
    assert_eq!(lead.slots.free.get(), 0);
    lead.leader.retire(&lead.slots);
    assert_eq!(lead.slots.free.get(), 1);

    let mut lead = diverged(0, 1);
    let asked = lead.ask_main(B).unwrap();
    lead.answer(B, asked.id, refused(PeerCode::FencedEpoch));
    assert_eq!(lead.slots.free.get(), 1);
}

#[test]
fn a_copy_that_diverges_again_waits_before_the_next() {
    let mut lead = diverged(0, 1);
    let asked = lead.ask_main(B).unwrap();
    lead.answer(B, asked.id, ok(0));
    let id = lead.send(B, 50);
    lead.answer(B, id, refused(PeerCode::LogConflict));
    assert_eq!(lead.slots.free.get(), 1);
    assert_eq!(lead.ask(B), None);
    lead.pass(Duration::from_secs(5));
    assert!(matches!(lead.ask_main(B).unwrap().ask, Ask::Rebuild { .. }));
}

#[test]
fn an_empty_log_is_level_the_moment_it_is_placed() {
    let mut lead = Lead::with(spec(2, false), &[main_log(0, 0, 0)]);
    lead.answer_probe(C, ok(0));
    lead.answer_probe(B, refused(PeerCode::LogConflict));
    let asked = lead.ask_main(B).unwrap();
    lead.answer(B, asked.id, ok(0));
    assert_eq!(lead.slots.free.get(), 1);
    assert_eq!(lead.cursor(B).phase(), CursorPhase::Shipping);
}

#[test]
fn i30_a_quorum_shard_offers_no_base_above_what_is_committed() {
    let mut lead = Lead::with(spec(2, true), &[main_log(0, 50, 100)]);
    lead.leader.on_log(MAIN, 50, 100);
    lead.answer_probe(B, gap(0));
    assert!(lead.leader.is_open());
    assert_eq!(lead.leader.mark(), None);
    assert_eq!(
        lead.ask(B),
        None,
        "its answer would move the mark over a hole"
    );
    assert_eq!(
        lead.leader.next_deadline(),
        None,
        "and nothing to wait for but the mark"
    );
    lead.answer_probe(C, ok(60));
    assert_eq!(lead.leader.mark(), Some(60));
    let asked = lead.ask_main(B).unwrap();
    assert_eq!(asked.ask, Ask::Bootstrap { base: Offset(50) });

    // A rebuild as well.
    let mut lead = Lead::with(spec(2, true), &[main_log(0, 50, 100)]);
    lead.leader.on_log(MAIN, 50, 100);
    lead.answer_probe(B, refused(PeerCode::LogConflict));
    lead.answer_probe(C, gap(50));
    assert!(lead.leader.is_open());
    assert_eq!(lead.ask(B), None);
    let id = lead.send(C, 100);
    lead.answer(C, id, ok(100));
    let asked = lead.ask_main(B).unwrap();
    assert_eq!(asked.ask, Ask::Rebuild { base: Offset(50) });
}

#[test]
fn after_a_failover_a_trimmed_log_is_offered_before_the_first_mark() {
    let mut lead = Lead::with(spec(2, true), &[main_log(50, 90, 100)]);
    lead.answer_probe(B, gap(0));
    assert_eq!(lead.leader.mark(), None);
    let asked = lead.ask_main(B).unwrap();
    assert_eq!(
        asked.ask,
        Ask::Bootstrap { base: Offset(50) },
        "no mark can come before somebody has been given a copy"
    );
}

#[test]
fn a_copy_that_begins_behind_what_was_inherited_is_told_where_the_log_begins() {
    // 40 records inherited, 20 written: what lies below 50 in that copy was never compared with this log.
    let mut lead = Lead::with(spec(2, true), &[main_log(0, 40, 60)]);
    lead.answer_probe(C, ok(39));
    lead.answer_probe(B, gap(50));
    let asked = lead.ask_main(B).unwrap();
    let base = Offset(0);
    assert_eq!(
        asked.ask,
        Ask::Bootstrap { base },
        "nothing is shipped from 50 on"
    );
    lead.answer(B, asked.id, refused(PeerCode::LogConflict));
    let asked = lead.ask_main(B).unwrap();
    assert_eq!(asked.ask, Ask::Rebuild { base });
    lead.answer(B, asked.id, ok(0));
    assert_eq!(lead.send(B, 60), AskId(3));
    assert_eq!(lead.leader.mark(), None);

    // An empty one is placed there.
    let mut lead = Lead::with(spec(2, true), &[main_log(0, 40, 60)]);
    lead.answer_probe(C, ok(39));
    lead.answer_probe(B, gap(50));
    let asked = lead.ask_main(B).unwrap();
    lead.answer(B, asked.id, ok(0));
    assert_eq!(fetch_from(lead.ask_main(B)), 0);

    // One that has answered at this generation, or begins with what was inherited, is shipped on.
    let mut lead = Lead::with(spec(2, true), &[main_log(0, 40, 60)]);
    lead.answer_probe(C, ok(39));
    lead.answer_probe(B, gap(40));
    assert_eq!(fetch_from(lead.ask_main(B)), 40);
}

#[test]
fn a_new_copy_of_cursors_lets_its_dead_letters_have_the_slot() {
    let mut lead = Lead::stream(0, 3, 3);
    lead.answer_probe(B, ok(0));
    lead.answer_probe(C, ok(0));
    let [letters, cursors] = [ReplicaLog::GroupDeadLetters, ReplicaLog::GroupCursors];
    let answer_next = |lead: &mut Lead, expected: ReplicaLog, answer: Answered| {
        let (log, asked) = lead.ask(B).expect("something to send");
        assert_eq!(log, expected, "{asked:?}");
        lead.answer_log(B, log, asked.id, answer);
        asked.ask
    };
    answer_next(&mut lead, letters, ok(3));
    answer_next(&mut lead, cursors, refused(PeerCode::LogConflict));
    let rebuild = Ask::Rebuild { base: Offset(0) };
    assert_eq!(answer_next(&mut lead, cursors, ok(0)), rebuild);
    assert_eq!(lead.slots.free.get(), 0, "held until it is level");
    // More letters, which that follower finds to differ: the cursors wait for them now.
    lead.leader.on_log(letters, 0, 4);
    let (log, asked) = lead.ask(B).expect("the new letter");
    assert_eq!((log, asked.ask), (letters, fetch(3)));
    let fetched = Fetched::Records {
        end: Offset(4),
        bytes: 10,
    };
    assert!(lead.leader.on_fetched(B, log, asked.id, fetched, lead.now));
    lead.answer_log(B, log, asked.id, refused(PeerCode::LogConflict));
    assert_eq!(lead.slots.free.get(), 1);
    assert_eq!(answer_next(&mut lead, letters, ok(0)), rebuild);
}

#[test]
fn a_new_copy_of_cursors_waits_while_their_dead_letters_are_halted_though_there_are_none() {
    let [letters, cursors] = [ReplicaLog::GroupDeadLetters, ReplicaLog::GroupCursors];
    let base = Offset(0);
    for code in [PeerCode::Unauthorized, PeerCode::LogConflict] {
        let mut lead = Lead::stream(0, 0, 3);
        lead.answer_probe(B, ok(0));
        lead.answer_probe(C, ok(0));
        lead.answer_probe_of(B, letters, refused(code));
        if code == PeerCode::LogConflict {
            // The letters look for a slot while it is another's, and wait.
            lead.slots.free.set(0);
            assert_eq!(lead.ask(B), None);
        }
        let poll = ShipLimits::default().slot_poll;
        lead.pass(poll / 2);
        lead.slots.free.set(1);
        lead.answer_probe_of(B, cursors, refused(PeerCode::LogConflict));
        assert_eq!(lead.ask(B), None, "{code:?}: letters may come any time");
        assert_eq!(lead.slots.free.get(), 1);
        // Once the letters are as they must be the cursors follow.
        match code {
            PeerCode::Unauthorized => {
                lead.leader.on_view();
                lead.answer_probe_of(B, letters, ok(0));
            }
            _ => {
                lead.pass(poll / 2);
                let (log, asked) = lead.ask(B).expect("a new copy");
                assert_eq!((log, asked.ask), (letters, Ask::Rebuild { base }));
                lead.answer_log(B, log, asked.id, ok(0));
            }
        }
        lead.pass(poll);
        let (log, asked) = lead.ask(B).expect("a new copy");
        assert_eq!((log, asked.ask), (cursors, Ask::Rebuild { base }));
    }
}

fn fetch(from: u64) -> Ask {
    let limits = ShipLimits::default();
    Ask::Fetch {
        from: Offset(from),
        max_bytes: limits.batch_bytes,
        max_records: limits.batch_records,
    }
}

/// A read takes its time, and a cursor that comes meanwhile may pass a dead letter that came meanwhile.
#[test]
fn cursors_are_read_only_as_far_as_they_reached_when_the_dead_letters_were_level() {
    let [letters, cursors] = [ReplicaLog::GroupDeadLetters, ReplicaLog::GroupCursors];
    let mut lead = Lead::stream(0, 3, 5);
    lead.answer_probe(B, ok(0));
    lead.answer_probe_of(B, letters, ok(3));
    lead.answer_probe_of(B, cursors, ok(1));
    let (log, asked) = lead.ask(B).expect("cursors");
    let Ask::Fetch {
        from, max_records, ..
    } = asked.ask
    else {
        panic!("not a fetch: {asked:?}");
    };
    assert_eq!((log, from, max_records), (cursors, Offset(1), 4));
}
