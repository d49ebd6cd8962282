//! Batches, windows and the order of logs.

use super::*;

#[test]
fn several_batches_are_on_their_way_at_once_within_both_bounds() {
    let mut lead = Lead::level(0);
    lead.append(100_000);
    let limits = ShipLimits::default();
    let mut sent = 0;
    while let Some(asked) = lead.ask_main(B) {
        let from = fetch_from(Some(asked));
        assert_eq!(from, sent * 10, "in order, without a gap");
        let fetched = Fetched::Records {
            end: Offset(from + 10),
            bytes: 100,
        };
        assert!(lead.leader.on_fetched(B, MAIN, asked.id, fetched, lead.now));
        sent += 1;
    }
    assert_eq!(sent, limits.window_batches as u64);

    let mut lead = Lead::level(0);
    lead.append(100_000);
    let mut bytes = 0;
    while let Some(asked) = lead.ask_main(C) {
        let from = fetch_from(Some(asked));
        let fetched = Fetched::Records {
            end: Offset(from + 10),
            bytes: limits.window_bytes / 3,
        };
        assert!(lead.leader.on_fetched(C, MAIN, asked.id, fetched, lead.now));
        bytes += limits.window_bytes / 3;
    }
    assert!(bytes < limits.window_bytes + limits.window_bytes / 3);
    assert!(bytes >= limits.window_bytes);
}

#[test]
fn one_fetch_of_a_cursor_at_a_time() {
    let mut lead = Lead::level(0);
    lead.append(100);
    let asked = lead.ask_main(B).unwrap();
    assert_eq!(lead.ask(B), None);
    let fetched = Fetched::Records {
        end: Offset(50),
        bytes: 1,
    };
    assert!(!lead
        .leader
        .on_fetched(B, MAIN, AskId(99), fetched, lead.now));
    assert!(lead.leader.on_fetched(B, MAIN, asked.id, fetched, lead.now));
    assert!(
        !lead.leader.on_fetched(B, MAIN, asked.id, fetched, lead.now),
        "once"
    );
    assert_eq!(fetch_from(lead.ask_main(B)), 50);
}

#[test]
fn only_what_is_synced_here_is_shipped() {
    let mut lead = Lead::level(10);
    assert_eq!(lead.ask(B), None);
    lead.append(11);
    lead.send(B, 11);
    assert_eq!(lead.ask(B), None);
}

#[test]
fn a_refusal_throws_the_window_away_and_starts_from_its_lowest_place() {
    let mut lead = Lead::level(10);
    lead.append(50);
    let ids: Vec<AskId> = [20, 30, 40].map(|end| lead.send(B, end)).to_vec();
    lead.answer(B, ids[0], ok(20));
    lead.answer(B, ids[1], gap(20));
    // The answer of the third belongs to the window that is gone.
    lead.answer(B, ids[2], ok(40));
    assert_eq!(lead.cursor(B).position(), Some(20));
    assert_eq!(fetch_from(lead.ask_main(B)), 20);
}

#[test]
fn a_lost_connection_resends_all_that_was_on_its_way() {
    let mut lead = Lead::level(10);
    lead.append(50);
    let ids: Vec<AskId> = [20, 30, 40].map(|end| lead.send(B, end)).to_vec();
    for id in ids {
        lead.answer(B, id, Answered::Unknown);
    }
    assert_eq!(lead.ask(B), None, "it waits");
    lead.leader.on_peer_up(B);
    assert_eq!(
        fetch_from(lead.ask_main(B)),
        10,
        "the link woke it before its time"
    );
}

#[test]
fn a_fetch_that_comes_after_its_window_was_thrown_away_is_not_sent() {
    let mut lead = Lead::level(10);
    lead.append(50);
    let first = lead.send(B, 20);
    let asked = lead.ask_main(B).unwrap();
    lead.answer(B, first, refused(PeerCode::Unavailable));
    let fetched = Fetched::Records {
        end: Offset(30),
        bytes: 1,
    };
    assert!(!lead.leader.on_fetched(B, MAIN, asked.id, fetched, lead.now));
    lead.pass(Duration::from_secs(5));
    assert_eq!(fetch_from(lead.ask_main(B)), 10);
}

#[test]
fn a_read_that_fails_here_waits_and_is_repeated() {
    let mut lead = Lead::level(10);
    lead.append(50);
    let asked = lead.ask_main(B).unwrap();
    assert!(!lead
        .leader
        .on_fetched(B, MAIN, asked.id, Fetched::Failed, lead.now));
    assert_eq!(
        lead.cursor(B).phase(),
        CursorPhase::Paused(PauseCause::OwnRead)
    );
    lead.pass(Duration::from_secs(5));
    assert_eq!(fetch_from(lead.ask_main(B)), 10);
}

#[test]
fn records_trimmed_under_a_cursor_lead_to_a_bootstrap() {
    let mut lead = Lead::with(spec(2, false), &[main_log(0, 0, 100)]);
    lead.answer_probe(C, ok(100));
    lead.answer_probe(B, ok(10));
    let asked = lead.ask_main(B).unwrap();
    lead.leader.on_log(MAIN, 60, 100);
    assert!(!lead
        .leader
        .on_fetched(B, MAIN, asked.id, Fetched::Trimmed, lead.now));
    let asked = lead.ask_main(B).unwrap();
    assert_eq!(asked.ask, Ask::Bootstrap { base: Offset(60) });
}

#[test]
fn companions_are_shipped_and_never_gate_the_mark() {
    let mut lead = Lead::stream(10, 4, 6);
    lead.answer_probe(B, ok(10));
    assert_eq!(lead.leader.mark(), Some(10), "no companion has been asked");
    let (log, asked) = lead.ask(B).unwrap();
    assert_eq!((log, asked.ask), (ReplicaLog::GroupDeadLetters, probe(0)));
    lead.answer_log(B, log, asked.id, refused(PeerCode::StorageFailed));
    lead.append(11);
    let id = lead.send(B, 11);
    lead.answer(B, id, ok(11));
    assert_eq!(lead.leader.mark(), Some(11));
}

#[test]
fn group_cursors_wait_until_the_dead_letters_are_level() {
    let mut lead = Lead::stream(0, 4, 6);
    lead.answer_probe(B, ok(0));
    let (_, letters) = lead.ask(B).unwrap();
    lead.answer_log(B, ReplicaLog::GroupDeadLetters, letters.id, ok(0));
    let (log, asked) = lead.ask(B).unwrap();
    assert_eq!(log, ReplicaLog::GroupDeadLetters);
    let fetched = Fetched::Records {
        end: Offset(4),
        bytes: 4,
    };
    assert!(lead.leader.on_fetched(B, log, asked.id, fetched, lead.now));
    // A probe says nothing about a position, so it may go; records have to wait.
    let (log, cursors) = lead.ask(B).unwrap();
    assert_eq!((log, cursors.ask), (ReplicaLog::GroupCursors, probe(0)));
    lead.answer_log(B, log, cursors.id, ok(0));
    assert_eq!(lead.ask(B), None, "the dead letters are not answered yet");
    lead.answer_log(B, ReplicaLog::GroupDeadLetters, asked.id, ok(4));
    let (log, asked) = lead.ask(B).unwrap();
    assert_eq!(log, ReplicaLog::GroupCursors);
    assert_eq!(fetch_from(Some(asked)), 0);
    // The other follower is on its own.
    assert_eq!(lead.ask(C).unwrap().0, MAIN);
}

#[test]
fn a_slow_follower_delays_neither_the_mark_nor_the_other() {
    let mut lead = Lead::level(10);
    for tail in 11..200 {
        lead.append(tail);
        if tail < 15 {
            lead.send(C, tail);
        }
        let id = lead.send(B, tail);
        lead.answer(B, id, ok(tail));
        assert_eq!(lead.leader.mark(), Some(tail));
    }
    assert_eq!(lead.leader.lag(), 189);
}

/// A gate that stores nothing until it is told.
#[derive(Default)]
struct SlowGate {
    submitted: Vec<Option<u64>>,
}

impl ReportGate for SlowGate {
    const COMPARES_LOGS: bool = false;

    fn submit(&mut self, report: &Report<'_>) -> Submitted {
        self.submitted.push(report.mark);
        Submitted::Pending(ReportId(self.submitted.len() as u64))
    }

    fn is_unnamed(&self, follower: usize) -> bool {
        follower == 1
    }
}

#[test]
fn i25_a_mark_is_published_only_once_its_report_is_stored() {
    let logs = [main_log(0, 0, 10)];
    let mut leader = ShardLeader::begin(spec(2, true), SlowGate::default(), &logs).unwrap();
    let slots = Slots { free: Cell::new(1) };
    let now = MonoTime::ZERO;
    let (_, asked) = leader.next_ask(B, now, &slots).unwrap();
    leader.on_answer(B, MAIN, asked.id, ok(6), now, &slots);
    assert_eq!(leader.mark(), None, "the report is on its way");
    let (_, asked) = leader.next_ask(B, now, &slots).unwrap();
    let fetched = Fetched::Records {
        end: Offset(10),
        bytes: 1,
    };
    assert!(leader.on_fetched(B, MAIN, asked.id, fetched, now));
    leader.on_answer(B, MAIN, asked.id, ok(10), now, &slots);
    leader.on_report(ReportId(1), true);
    assert_eq!(leader.mark(), Some(6));
    leader.on_report(ReportId(2), false);
    assert_eq!(
        leader.mark(),
        Some(6),
        "a refused report leaves the mark where it was"
    );
    leader.on_report(ReportId(2), true);
    assert_eq!(leader.mark(), Some(6), "a report is answered once");
    leader.on_report(ReportId(3), true);
    assert_eq!(leader.mark(), Some(10));
}

#[test]
fn i29_a_follower_that_a_report_names_is_not_rebuilt() {
    let logs = [main_log(0, 0, 10)];
    let mut leader = ShardLeader::begin(spec(2, true), SlowGate::default(), &logs).unwrap();
    let slots = Slots { free: Cell::new(2) };
    let mut now = MonoTime::ZERO;
    for follower in [B, C] {
        let (_, asked) = leader.next_ask(follower, now, &slots).unwrap();
        leader.on_answer(follower, MAIN, asked.id, ok(0), now, &slots);
    }
    for follower in [B, C] {
        let (_, asked) = leader.next_ask(follower, now, &slots).unwrap();
        let fetched = Fetched::Records {
            end: Offset(10),
            bytes: 1,
        };
        assert!(leader.on_fetched(follower, MAIN, asked.id, fetched, now));
        let conflict = refused(PeerCode::LogConflict);
        leader.on_answer(follower, MAIN, asked.id, conflict, now, &slots);
    }
    now = now + Duration::from_secs(10);
    assert_eq!(leader.next_ask(B, now, &slots), None);
    let (_, asked) = leader.next_ask(C, now, &slots).unwrap();
    assert!(matches!(asked.ask, Ask::Rebuild { .. }));
}

/// A shard of three with a slow gate, both followers answered `held`.
fn reported(held: u64) -> ShardLeader<SlowGate> {
    let logs = [main_log(0, 0, held)];
    let mut leader = ShardLeader::begin(spec(2, true), SlowGate::default(), &logs).unwrap();
    let slots = Slots { free: Cell::new(1) };
    for follower in [B, C] {
        let (_, asked) = leader.next_ask(follower, MonoTime::ZERO, &slots).unwrap();
        leader.on_answer(follower, MAIN, asked.id, ok(held), MonoTime::ZERO, &slots);
    }
    leader
}

#[test]
fn n18_the_report_that_covers_a_record_is_stored_before_its_mark() {
    let mut leader = reported(19);
    assert_eq!(leader.mark(), None);
    leader.on_report(ReportId(1), true);
    assert_eq!(leader.mark(), Some(19));
}

#[test]
fn n33_without_a_catalog_records_ship_and_marks_stay() {
    let mut leader = reported(10);
    leader.on_report(ReportId(1), true);
    let slots = Slots { free: Cell::new(1) };
    for tail in 11..40 {
        leader.on_log(MAIN, 0, tail);
        let (_, asked) = leader.next_ask(B, MonoTime::ZERO, &slots).unwrap();
        let fetched = Fetched::Records {
            end: Offset(tail),
            bytes: 1,
        };
        assert!(leader.on_fetched(B, MAIN, asked.id, fetched, MonoTime::ZERO));
        leader.on_answer(B, MAIN, asked.id, ok(tail), MonoTime::ZERO, &slots);
        assert_eq!(leader.mark(), Some(10), "no report is stored");
    }
    assert_eq!(leader.cursor(B, MAIN).unwrap().position(), Some(39));
    // The catalog is back: one report covers all of it.
    leader.on_report(ReportId(2), true);
    leader.on_report(ReportId(3), true);
    assert_eq!(leader.mark(), Some(39));
}
