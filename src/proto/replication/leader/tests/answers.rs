//! The table of answers, a test a row.

use super::*;

#[test]
fn ok_moves_the_position_and_the_mark() {
    let mut lead = Lead::level(10);
    lead.append(20);
    let id = lead.send(B, 20);
    assert_eq!(lead.leader.mark(), Some(10));
    lead.answer(B, id, ok(20));
    assert_eq!(lead.cursor(B).position(), Some(20));
    assert_eq!(
        lead.leader.mark(),
        Some(20),
        "b and the leader are two of three"
    );
    assert_eq!(lead.events, [ShardEvent::Marked { mark: 20 }]);
    assert_eq!(lead.ask(B), None, "level: nothing to ask");
}

#[test]
fn ok_above_the_leaders_tail_counts_as_the_tail() {
    let mut lead = Lead::level(10);
    lead.append(12);
    let id = lead.send(B, 12);
    lead.answer(B, id, ok(400));
    assert_eq!(lead.cursor(B).position(), Some(12));
    assert_eq!(lead.leader.mark(), Some(12));
    lead.append(13);
    assert_eq!(fetch_from(lead.ask_main(B)), 12);
}

#[test]
fn ok_below_the_batch_is_asked_again_after_a_wait() {
    let mut lead = Lead::level(10);
    lead.append(20);
    for wait in [10, 10, 10] {
        let id = lead.send(B, 20);
        lead.answer(B, id, ok(15));
        assert_eq!(lead.cursor(B).position(), Some(15));
        assert_eq!(
            lead.cursor(B).phase(),
            CursorPhase::Paused(PauseCause::Behind)
        );
        assert_eq!(lead.wait(B), Duration::from_millis(wait));
        assert_eq!(lead.ask(B), None);
        lead.pass(Duration::from_millis(wait));
        assert_eq!(lead.leader.mark(), Some(15));
    }
    assert_eq!(fetch_from(lead.ask_main(B)), 15);
}

#[test]
fn gap_inside_the_log_is_the_next_place_and_no_position() {
    let mut lead = Lead::level(10);
    lead.append(20);
    let id = lead.send(B, 20);
    lead.answer(B, id, gap(12));
    assert_eq!(fetch_from(lead.ask_main(B)), 12, "in the same pass");
    assert_eq!(lead.cursor(B).position(), Some(10), "not a position");
    assert_eq!(lead.leader.mark(), Some(10));
}

#[test]
fn gap_below_what_was_answered_takes_the_position_back() {
    let mut lead = Lead::level(10);
    lead.append(20);
    let id = lead.send(B, 20);
    lead.answer(B, id, gap(4));
    assert_eq!(
        lead.cursor(B).position(),
        Some(4),
        "it lost what it had answered"
    );
    assert_eq!(lead.leader.mark(), Some(10), "I23: a mark never moves back");
}

#[test]
fn gap_below_the_base_and_past_the_tail_lead_to_a_bootstrap() {
    for expected in [0, 49, 101] {
        let mut lead = Lead::with(spec(2, false), &[main_log(50, 50, 100)]);
        lead.answer_probe(C, ok(100));
        lead.answer_probe(B, gap(expected));
        let asked = lead.ask_main(B).unwrap();
        assert_eq!(
            asked.ask,
            Ask::Bootstrap { base: Offset(50) },
            "gap {expected}"
        );
        assert!(asked.ask.is_control());
        assert_eq!(lead.ask(B), None, "alone on its way");
        lead.answer(B, asked.id, ok(50));
        assert_eq!(fetch_from(lead.ask_main(B)), 50);
    }
}

#[test]
fn a_gap_that_repeats_without_progress_waits() {
    let mut lead = Lead::level(10);
    lead.append(20);
    for round in 1..=3 {
        let id = lead.send(B, 20);
        lead.answer(B, id, gap(5));
        let paused = lead.cursor(B).phase() == CursorPhase::Paused(PauseCause::GapLoop);
        assert_eq!(paused, round == 3, "round {round}");
    }
    assert_eq!(
        lead.count(|e| matches!(
            e,
            ShardEvent::Paused {
                cause: PauseCause::GapLoop,
                ..
            }
        )),
        1
    );
    lead.pass(Duration::from_secs(5));
    assert_eq!(fetch_from(lead.ask_main(B)), 5);
}

#[test]
fn gaps_that_go_down_are_progress() {
    let mut lead = Lead::level(100);
    lead.append(120);
    for expected in [90, 80, 70, 60, 50] {
        let id = lead.send(B, 120);
        lead.answer(B, id, gap(expected));
        assert_eq!(lead.cursor(B).phase(), CursorPhase::Shipping);
    }
}

#[test]
fn conflict_halts_as_diverged_or_as_needing_a_bootstrap() {
    let mut lead = Lead::level(10);
    lead.slots.free.set(0);
    lead.append(20);
    let id = lead.send(B, 20);
    lead.answer(B, id, refused(PeerCode::LogConflict));
    assert_eq!(lead.cursor(B).halted(), Some(HaltReason::Diverged));
    assert_eq!(lead.cursor(B).counted(), None, "I27");
    assert_eq!(lead.ask(B), None);

    let mut lead = Lead::with(spec(2, false), &[main_log(50, 50, 100)]);
    lead.slots.free.set(0);
    lead.answer_probe(C, ok(100));
    lead.answer_probe(B, gap(30));
    let asked = lead.ask_main(B).unwrap();
    lead.answer(B, asked.id, refused(PeerCode::LogConflict));
    assert_eq!(lead.cursor(B).halted(), Some(HaltReason::NeedsBootstrap));
}

#[test]
fn i28_fenced_ends_everything_at_this_generation() {
    let mut lead = Lead::level(10);
    lead.append(20);
    let (to_b, to_c) = (lead.send(B, 20), lead.send(C, 20));
    lead.answer(B, to_b, refused(PeerCode::FencedEpoch));
    assert_eq!(lead.leader.opening(), OpeningPhase::Fenced);
    assert_eq!(lead.count(|e| *e == ShardEvent::Superseded), 1);
    lead.events.clear();
    lead.answer(C, to_c, ok(20));
    lead.append(30);
    lead.pass(Duration::from_secs(600));
    assert_eq!(lead.events, [], "no mark, nothing new");
    assert_eq!(lead.leader.mark(), Some(10));
    assert_eq!((lead.ask(B), lead.ask(C)), (None, None));
    assert_eq!(lead.leader.next_deadline(), None);
    let halted: Vec<_> = lead.leader.halted().map(|halted| halted.reason).collect();
    assert_eq!(halted, [HaltReason::Fenced]);
}

#[test]
fn fenced_is_honoured_even_for_a_window_that_was_thrown_away() {
    let mut lead = Lead::level(10);
    lead.append(30);
    let (first, second) = (lead.send(B, 20), lead.send(B, 30));
    lead.answer(B, first, refused(PeerCode::StaleRoute));
    lead.answer(B, second, refused(PeerCode::FencedEpoch));
    assert_eq!(lead.leader.opening(), OpeningPhase::Fenced);
}

#[test]
fn stale_route_waits_10_ms_doubling_to_a_second() {
    let mut lead = Lead::level(10);
    lead.append(20);
    for wait in [10, 20, 40, 80, 160, 320, 640, 1000, 1000] {
        let id = lead.send(B, 20);
        lead.answer(B, id, refused(PeerCode::StaleRoute));
        assert_eq!(lead.wait(B), Duration::from_millis(wait));
        assert_eq!(lead.ask(B), None);
        lead.pass(Duration::from_millis(wait));
    }
    let id = lead.send(B, 20);
    lead.answer(B, id, ok(20));
    lead.append(21);
    let id = lead.send(B, 21);
    lead.answer(B, id, refused(PeerCode::StaleRoute));
    assert_eq!(
        lead.wait(B),
        Duration::from_millis(10),
        "an answer resets it"
    );
}

#[test]
fn passing_faults_wait_with_jitter_up_to_five_seconds() {
    let faults = [
        (refused(PeerCode::Unavailable), PauseCause::Unavailable),
        (refused(PeerCode::Overload), PauseCause::Overload),
        (Answered::NotSent, PauseCause::Unreachable),
        (Answered::Unknown, PauseCause::Unreachable),
    ];
    for (answer, cause) in faults {
        let mut lead = Lead::level(10);
        lead.append(20);
        let mut ceiling = Duration::from_millis(50);
        for _ in 0..12 {
            let id = lead.send(B, 20);
            lead.answer(B, id, answer);
            assert_eq!(lead.cursor(B).phase(), CursorPhase::Paused(cause));
            let wait = lead.wait(B);
            assert!(
                wait <= ceiling && wait >= ceiling / 16,
                "{wait:?} of {ceiling:?}"
            );
            ceiling = (ceiling * 2).min(Duration::from_secs(5));
            lead.pass(wait);
        }
        assert_eq!(
            fetch_from(lead.ask_main(B)),
            10,
            "positions resolve what arrived"
        );
    }
}

#[test]
fn unauthorized_stops_until_the_view_changes() {
    let mut lead = Lead::level(10);
    lead.append(20);
    let id = lead.send(B, 20);
    lead.answer(B, id, refused(PeerCode::Unauthorized));
    assert_eq!(lead.cursor(B).halted(), Some(HaltReason::Unauthorized));
    lead.pass(Duration::from_secs(3600));
    assert_eq!(lead.ask(B), None);
    lead.leader.on_view();
    assert!(matches!(lead.ask_main(B).unwrap().ask, Ask::Probe { .. }));
}

#[test]
fn damaged_batches_are_resent_three_times_and_then_wait() {
    let mut lead = Lead::level(10);
    lead.append(20);
    for _ in 0..3 {
        let id = lead.send(B, 20);
        lead.answer(B, id, refused(PeerCode::Malformed));
        assert_eq!(lead.cursor(B).phase(), CursorPhase::Shipping);
    }
    let id = lead.send(B, 20);
    lead.answer(B, id, refused(PeerCode::Malformed));
    assert_eq!(
        lead.cursor(B).phase(),
        CursorPhase::Paused(PauseCause::Damaged)
    );
    lead.pass(Duration::from_secs(5));
    let id = lead.send(B, 20);
    lead.answer(B, id, ok(20));
    assert_eq!(lead.leader.mark(), Some(20));
}

#[test]
fn malformed_to_a_kind_the_peer_never_took_is_an_unsupported_one() {
    let mut lead = Lead::main(0, 0, 10);
    lead.answer_probe(C, ok(10));
    lead.answer_probe(B, refused(PeerCode::Malformed));
    for _ in 0..4 {
        let id = lead.send(B, 10);
        lead.answer(B, id, refused(PeerCode::Malformed));
    }
    assert_eq!(lead.cursor(B).halted(), Some(HaltReason::Unsupported));
}

#[test]
fn unsupported_stops_one_log_and_clears_on_the_next_handshake() {
    let mut lead = Lead::stream(10, 5, 0);
    lead.answer_probe(B, ok(10));
    lead.answer_probe(C, ok(10));
    let (log, asked) = lead.ask(B).unwrap();
    assert_eq!(log, ReplicaLog::GroupDeadLetters);
    lead.answer_log(B, log, asked.id, refused(PeerCode::UnsupportedKind));
    let halted: Vec<_> = lead.leader.halted().collect();
    assert_eq!(halted.len(), 1);
    assert_eq!(halted[0].reason, HaltReason::Unsupported);
    assert_eq!((halted[0].follower.as_str(), halted[0].log), ("b", log));
    // The stream goes on. Positions are asked about, and not sent: they may not get ahead of the dead
    // letters they passed.
    let (next, asked) = lead.ask(B).unwrap();
    assert_eq!(next, ReplicaLog::GroupCursors);
    assert!(matches!(asked.ask, Ask::Probe { .. }));
    lead.answer_log(B, next, asked.id, ok(0));
    lead.leader.on_log(ReplicaLog::GroupCursors, 0, 3);
    assert_eq!(lead.ask(B), None);
    lead.append(11);
    lead.send(B, 11);
    lead.pass(Duration::from_secs(3600));
    assert_eq!(lead.ask(B), None, "never by time");
    lead.leader.on_peer_up(B);
    assert_eq!(lead.ask(B).unwrap().0, ReplicaLog::GroupDeadLetters);
}

#[test]
fn storage_failed_is_asked_again_after_5_s_doubling_to_5_min() {
    let mut lead = Lead::level(10);
    lead.append(20);
    for wait in [5, 10, 20, 40, 80, 160, 300, 300] {
        let id = lead.send(B, 20);
        lead.answer(B, id, refused(PeerCode::StorageFailed));
        assert_eq!(
            lead.cursor(B).halted(),
            Some(HaltReason::Storage),
            "surfaced"
        );
        assert_eq!(lead.wait(B), Duration::from_secs(wait));
        lead.pass(Duration::from_secs(wait));
    }
    let id = lead.send(B, 20);
    lead.answer(B, id, ok(20));
    assert_eq!(lead.cursor(B).halted(), None);
    assert_eq!(lead.leader.mark(), Some(20));
}

/// No answer to no request in no state breaks a rule that can be read off the cursor.
#[test]
fn any_answers_in_any_order_keep_the_rules() {
    for seed in 0..400u64 {
        let mut lead = Lead::main(0, 0, 40);
        let mut random = seed;
        let mut draw = |below: u64| crate::proto::backoff::split_mix(&mut random) % below;
        let mut waiting: Vec<(FollowerIdx, AskId, Ask)> = Vec::new();
        let (mut tail, mut mark, mut best) = (40, 0, [0u64; 2]);
        for _ in 0..300 {
            let follower = FollowerIdx(draw(2) as u16);
            match draw(4) {
                0 => {
                    tail += draw(5);
                    lead.append(tail);
                }
                1 => lead.pass(Duration::from_millis(draw(400_000))),
                2 => {
                    if let Some(asked) = lead.ask_main(follower) {
                        if let Ask::Fetch { from, .. } = asked.ask {
                            assert!(from.0 < tail, "only what is synced is shipped");
                            let end = from.0 + 1 + draw(tail - from.0);
                            let fetched = match draw(8) {
                                0 => Fetched::Failed,
                                1 => Fetched::Trimmed,
                                _ => Fetched::Records {
                                    end: Offset(end),
                                    bytes: 100,
                                },
                            };
                            let is_sent = lead
                                .leader
                                .on_fetched(follower, MAIN, asked.id, fetched, lead.now);
                            if !is_sent {
                                continue;
                            }
                        }
                        waiting.push((follower, asked.id, asked.ask));
                    }
                }
                _ if waiting.is_empty() => {}
                _ => {
                    let (follower, id, _) = waiting.remove(draw(waiting.len() as u64) as usize);
                    let answer = match draw(14) {
                        // All but `FencedEpoch`, which ends the run.
                        0 => refused(PeerCode::StaleRoute),
                        1 => refused(PeerCode::LogConflict),
                        2 => refused(PeerCode::Malformed),
                        3 => refused(PeerCode::StorageFailed),
                        4 => refused(PeerCode::UnsupportedKind),
                        5 => refused(PeerCode::Unavailable),
                        6 => gap(draw(tail + 3)),
                        7 => Answered::NotSent,
                        8 => Answered::Unknown,
                        _ => ok(draw(tail + 3)),
                    };
                    if let Answered::Ok { durable } = answer {
                        best[usize::from(follower.0)] =
                            best[usize::from(follower.0)].max(durable.min(tail));
                    }
                    lead.answer(follower, id, answer);
                    lead.leader.on_peer_up(follower);
                }
            }
            let now = lead.leader.mark().unwrap_or(0);
            assert!(now >= mark && now <= tail, "I23");
            assert!(
                best.iter().any(|best| *best >= now),
                "I24: somebody answered it"
            );
            mark = now;
            for follower in [B, C] {
                let cursor = lead.cursor(follower);
                assert!(cursor.position().is_none_or(|at| at <= tail));
                assert!(cursor.in_flight() <= ShipLimits::default().window_batches + 1);
            }
            assert!(lead.slots.free.get() <= 1, "a slot comes back once");
        }
    }
}
