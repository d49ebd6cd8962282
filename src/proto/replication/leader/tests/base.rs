//! Followers of logs that say the same without their head are told where the leader's begins.

use super::*;

const VALUES: ReplicaLog = ReplicaLog::Cache;
const SUMS: ReplicaLog = ReplicaLog::Counters;

/// A cache shard whose logs reach from `base` to `tail`.
fn cache(base: u64, tail: u64) -> Lead {
    let logs = [VALUES, SUMS].map(|log| LogStart {
        log,
        ..main_log(base, base, tail)
    });
    Lead::with(spec(2, true), &logs)
}

/// The same, both followers level in both.
fn level_cache(tail: u64) -> Lead {
    let mut lead = cache(0, tail);
    for log in [VALUES, SUMS] {
        for follower in [B, C] {
            let (of, asked) = lead.ask(follower).expect("a probe");
            assert_eq!(of, log);
            lead.answer_log(follower, of, asked.id, ok(tail));
        }
    }
    assert!(lead.leader.is_open());
    lead
}

/// Ships what there is of a log and answers it, up to `end`.
fn ship(lead: &mut Lead, follower: FollowerIdx, end: u64) {
    let (log, asked) = lead.ask(follower).expect("records to ship");
    assert!(matches!(asked.ask, Ask::Fetch { .. }), "{asked:?}");
    let fetched = Fetched::Records {
        end: Offset(end),
        bytes: 1,
    };
    let now = lead.now;
    assert!(lead
        .leader
        .on_fetched(follower, log, asked.id, fetched, now));
    lead.answer_log(follower, log, asked.id, ok(end));
}

fn told(lead: &mut Lead, follower: FollowerIdx) -> (ReplicaLog, AskId, u64) {
    let (log, asked) = lead.ask(follower).expect("something to tell");
    let Ask::Bootstrap { base } = asked.ask else {
        panic!("not where the log begins: {asked:?}");
    };
    (log, asked.id, base.0)
}

#[test]
fn a_follower_is_told_once_it_holds_all_that_stands_for_the_head() {
    for log in [VALUES, SUMS] {
        let mut lead = level_cache(10);
        lead.leader.on_log(log, 0, 25);
        ship(&mut lead, B, 24);
        // 20 to 24 say what the records below 20 said.
        lead.leader.on_log(log, 20, 25);
        ship(&mut lead, B, 25);
        let (of, id, base) = told(&mut lead, B);
        assert_eq!((of, base), (log, 20));
        assert_eq!(lead.ask(B), None, "once");
        lead.answer_log(B, log, id, refused(PeerCode::LogConflict));
        assert_eq!(lead.ask(B), None);
        assert_eq!(lead.leader.halted().count(), 0);
        let position = lead.leader.cursor(B, log).unwrap().position();
        assert_eq!(position, Some(25));
        // The other one lacks all of it, and says so.
        let (_, asked) = lead.ask(C).unwrap();
        assert_eq!(asked.ask, probe(20));
        lead.answer_log(C, log, asked.id, gap(10));
        told(&mut lead, C);
        assert_eq!(lead.leader.cursor(C, log).unwrap().position(), Some(10));
    }
}

#[test]
fn batches_go_on_beside_it() {
    let mut lead = level_cache(30);
    lead.leader.on_log(VALUES, 20, 30);
    let (_, id, _) = told(&mut lead, B);
    lead.leader.on_log(VALUES, 20, 40);
    ship(&mut lead, B, 35);
    lead.answer_log(B, VALUES, id, refused(PeerCode::LogConflict));
    ship(&mut lead, B, 40);
    assert_eq!(lead.leader.cursor(B, VALUES).unwrap().position(), Some(40));
}

#[test]
fn one_that_may_not_have_heard_it_is_told_again() {
    for lost in [
        Answered::NotSent,
        Answered::Unknown,
        refused(PeerCode::StaleRoute),
        refused(PeerCode::Unavailable),
    ] {
        let mut lead = level_cache(30);
        lead.leader.on_log(SUMS, 20, 30);
        let (log, id, _) = told(&mut lead, B);
        lead.answer_log(B, log, id, lost);
        assert_eq!(lead.ask(B), None, "{lost:?}: it waits");
        lead.pass(Duration::from_secs(60));
        let (_, id, base) = told(&mut lead, B);
        assert_eq!(base, 20);
        lead.answer_log(B, log, id, ok(30));
        assert_eq!(lead.ask(B), None);
    }
}

#[test]
fn one_that_does_not_know_the_message_is_let_be() {
    for code in [PeerCode::UnsupportedKind, PeerCode::Malformed] {
        let mut lead = level_cache(30);
        lead.leader.on_log(SUMS, 20, 30);
        let (log, id, _) = told(&mut lead, B);
        lead.answer_log(B, log, id, refused(code));
        assert_eq!(lead.leader.halted().count(), 0);
        lead.leader.on_log(SUMS, 20, 31);
        ship(&mut lead, B, 31);
    }
}

#[test]
fn a_new_leader_tells_what_its_log_begins_with() {
    let mut lead = cache(20, 30);
    let mut told = Vec::new();
    for follower in [B, C] {
        while let Some((log, asked)) = lead.ask(follower) {
            if let Ask::Bootstrap { base } = asked.ask {
                assert!(lead.leader.is_open(), "nothing but probes before");
                told.push((follower, log, base.0));
            }
            lead.answer_log(follower, log, asked.id, ok(30));
        }
    }
    let both = |follower| [VALUES, SUMS].map(|log| (follower, log, 20));
    assert_eq!(told, [both(B), both(C)].concat());
}

#[test]
fn what_a_stream_keeps_is_no_matter_of_its_followers() {
    let mut lead = Lead::level(30);
    lead.leader.on_log(MAIN, 20, 30);
    assert_eq!(lead.ask(B), None);
}

#[test]
fn the_slowest_copy_of_any_log_is_the_lag() {
    let mut lead = level_cache(10);
    assert_eq!(lead.leader.lag(), 0);
    lead.leader.on_log(SUMS, 0, 17);
    assert_eq!(lead.leader.lag(), 7);
    ship(&mut lead, B, 17);
    assert_eq!(lead.leader.lag(), 7);
    ship(&mut lead, C, 17);
    assert_eq!(lead.leader.lag(), 0);
}

/// A follower that has said less than the leader's base may hold more, and not all that stands for the head.
#[test]
fn what_a_follower_holds_is_asked_before_it_is_offered_the_base() {
    let asked_after = |answer: Answered| {
        let mut lead = level_cache(10);
        lead.leader.on_log(VALUES, 0, 25);
        ship(&mut lead, C, 25);
        lead.leader.on_log(VALUES, 20, 25);
        let (log, asked) = lead.ask(B).expect("a question");
        assert_eq!((log, asked.ask), (VALUES, probe(20)), "no offer");
        lead.answer_log(B, log, asked.id, answer);
        lead.ask(B).map(|(_, asked)| asked.ask)
    };
    let from = |ask: Option<Ask>| match ask {
        Some(Ask::Fetch { from, .. }) => from.0,
        other => panic!("not records: {other:?}"),
    };
    assert_eq!(from(asked_after(ok(20))), 20);
    let base = Offset(20);
    assert_eq!(asked_after(gap(10)), Some(Ask::Bootstrap { base }));
    assert_eq!(asked_after(ok(10)), Some(Ask::Bootstrap { base }));
}

#[test]
fn a_copy_that_asks_for_a_record_to_compare_is_told_where_the_log_begins_if_there_is_none() {
    let mut lead = Lead::main(0, 40, 40);
    lead.answer_probe(C, ok(39));
    lead.answer_probe(B, gap(40));
    assert_eq!(lead.answer_probe(B, gap(40)), Offset(40));
    let asked = lead.ask_main(B).expect("an offer");
    assert_eq!(asked.ask, Ask::Bootstrap { base: Offset(0) });
    lead.answer(B, asked.id, ok(0));
    assert_eq!(fetch_from(lead.ask_main(B)), 0);
}

/// A copy of a companion says what the whole log said only with all that was written for its head, and the next
/// leader, which was not chosen by that log, need not have it.
#[test]
fn a_copy_of_a_companion_that_begins_higher_than_its_leaders_is_made_anew() {
    // Inherited by a leader that was away when the two others compacted at 20: up to 22, where others have 25.
    let inherited = |log, base| LogStart {
        log,
        ..main_log(base, 22, 22)
    };
    let asked_after = |log: ReplicaLog, base: u64, answer: Answered| {
        let logs = [inherited(VALUES, 0), inherited(SUMS, base)];
        let mut lead = Lead::with(spec(2, true), &logs);
        let at = lead.answer_probe_of(C, VALUES, ok(22));
        assert_eq!(at, 21);
        if log == SUMS {
            lead.answer_probe_of(B, VALUES, ok(22));
        }
        lead.answer_probe_of(B, log, answer);
        lead
    };
    let base = Offset(0);
    let mut lead = asked_after(SUMS, 0, gap(20));
    let (log, asked) = lead.ask(B).expect("an offer");
    assert_eq!((log, asked.ask), (SUMS, Ask::Bootstrap { base }));
    lead.answer_log(B, log, asked.id, refused(PeerCode::LogConflict));
    let (log, asked) = lead.ask(B).expect("a new copy");
    assert_eq!((log, asked.ask), (SUMS, Ask::Rebuild { base }));
    lead.answer_log(B, log, asked.id, ok(0));
    let (log, asked) = lead.ask(B).expect("records");
    assert_eq!((log, fetch_from(Some(asked))), (SUMS, 0));

    // One that begins where its leader's log does is shipped on.
    let mut lead = asked_after(SUMS, 20, gap(20));
    let (log, asked) = lead.ask(B).expect("records");
    assert_eq!((log, fetch_from(Some(asked))), (SUMS, 20));

    // Of the main log the leader has all that any head was given up for: by it it was chosen.
    let mut lead = asked_after(VALUES, 0, gap(20));
    let (log, asked) = lead.ask(B).expect("records");
    assert_eq!((log, fetch_from(Some(asked))), (VALUES, 20));
}

#[test]
fn heirs_hold_what_all_have_answered_that_will_go_on() {
    let mut lead = level_cache(20);
    assert_eq!(lead.leader.held_by_heirs(SUMS), 20);
    lead.leader.on_log(SUMS, 0, 25);
    ship(&mut lead, B, 25);
    assert_eq!(lead.leader.held_by_heirs(SUMS), 20, "one has not answered");
    ship(&mut lead, C, 22);
    assert_eq!(lead.leader.held_by_heirs(SUMS), 22);
    // Its disk is full for a moment. It is asked again, and may lead as soon as there is space.
    let (_, asked) = lead.ask(C).expect("the rest");
    let fetched = Fetched::Records {
        end: Offset(25),
        bytes: 1,
    };
    let now = lead.now;
    assert!(lead.leader.on_fetched(C, SUMS, asked.id, fetched, now));
    lead.answer_log(C, SUMS, asked.id, refused(PeerCode::StorageFailed));
    let cursor = lead.leader.cursor(C, SUMS).unwrap();
    assert_eq!(cursor.halted(), Some(HaltReason::Storage));
    assert_eq!(lead.leader.held_by_heirs(SUMS), 22);
    // A copy that is no copy of this log is waited for no longer.
    lead.pass(Duration::from_secs(60));
    let (_, asked) = lead.ask(C).expect("the rest again");
    assert!(lead.leader.on_fetched(C, SUMS, asked.id, fetched, lead.now));
    lead.answer_log(C, SUMS, asked.id, refused(PeerCode::LogConflict));
    assert_eq!(lead.leader.held_by_heirs(SUMS), 25);

    // Of the main log a majority is enough: whoever leads next meets it.
    lead.leader.on_log(VALUES, 0, 30);
    ship(&mut lead, B, 30);
    lead.collect();
    assert_eq!(lead.leader.held_by_heirs(VALUES), 30);
    assert_eq!(lead.leader.held_by_heirs(MAIN), 0, "no log of this shard");

    let mut lead = cache(0, 20);
    assert_eq!(lead.leader.held_by_heirs(VALUES), 0, "no mark yet");
    lead.answer_probe_of(B, VALUES, ok(20));
    lead.answer_probe_of(B, SUMS, ok(20));
    assert_eq!(lead.leader.held_by_heirs(SUMS), 0, "one has said nothing");
}

/// The leader gave up what it was about to read for a follower.
fn trimmed(lead: &mut Lead, follower: FollowerIdx, log: ReplicaLog, base: u64) -> AskId {
    let (of, asked) = lead.ask(follower).expect("records to read");
    assert_eq!(of, log);
    assert!(matches!(asked.ask, Ask::Fetch { .. }), "{asked:?}");
    lead.leader.on_log(log, base, base + 5);
    let (fetched, now) = (Fetched::Trimmed, lead.now);
    assert!(!lead
        .leader
        .on_fetched(follower, log, asked.id, fetched, now));
    asked.id
}

#[test]
fn a_follower_is_asked_how_far_it_is_when_what_it_lacks_is_given_up_while_it_is_read() {
    for log in [VALUES, SUMS] {
        let mut lead = level_cache(10);
        lead.leader.on_log(log, 0, 25);
        let id = trimmed(&mut lead, B, log, 20);
        let (of, asked) = lead.ask(B).expect("a question");
        assert_eq!((of, asked.ask), (log, probe(10)), "no offer");
        lead.answer_log(B, log, asked.id, ok(22));
        // The same read once more, late: that question is answered.
        let (fetched, now) = (Fetched::Trimmed, lead.now);
        assert!(!lead.leader.on_fetched(B, log, id, fetched, now));
        let (of, asked) = lead.ask(B).expect("records");
        assert_eq!((of, fetch_from(Some(asked))), (log, 22), "it holds more");
    }
}

#[test]
fn one_that_takes_no_empty_batch_is_offered_the_base_when_what_it_lacks_is_given_up() {
    let mut lead = cache(0, 10);
    for follower in [B, C] {
        lead.answer_probe_of(follower, VALUES, ok(10));
    }
    lead.answer_probe_of(B, SUMS, refused(PeerCode::Malformed));
    ship(&mut lead, B, 10);
    lead.leader.on_log(SUMS, 0, 25);
    trimmed(&mut lead, B, SUMS, 20);
    let (log, _, base) = told(&mut lead, B);
    assert_eq!((log, base), (SUMS, 20));
}

#[test]
fn a_new_leader_tells_nobody_before_it_holds_all_there_is() {
    // Whatever stands for the head is somewhere below the end the log was found with.
    let mut lead = cache(20, 30);
    lead.answer_probe_of(B, VALUES, ok(25));
    lead.answer_probe_of(C, VALUES, ok(25));
    let (log, asked) = lead.ask(B).expect("the rest");
    assert_eq!((log, fetch_from(Some(asked))), (VALUES, 25), "not the base");
    let fetched = Fetched::Records {
        end: Offset(30),
        bytes: 1,
    };
    let now = lead.now;
    assert!(lead.leader.on_fetched(B, log, asked.id, fetched, now));
    lead.answer_log(B, log, asked.id, ok(30));
    assert_eq!(told(&mut lead, B).2, 20);
}

#[test]
fn what_consumer_groups_keep_is_given_up_by_their_followers_as_well() {
    let [letters, cursors] = [ReplicaLog::GroupDeadLetters, ReplicaLog::GroupCursors];
    let mut lead = Lead::stream(5, 10, 10);
    for log in [MAIN, letters, cursors] {
        lead.answer_probe_of(B, log, ok(if log == MAIN { 5 } else { 10 }));
    }
    for log in [letters, cursors] {
        lead.leader.on_log(log, 6, 10);
        let (of, id, base) = told(&mut lead, B);
        assert_eq!((of, base), (log, 6));
        lead.answer_log(B, log, id, refused(PeerCode::LogConflict));
        assert_eq!(lead.ask(B), None);
    }
}

#[test]
fn nobody_is_told_of_a_base_above_what_is_known_committed() {
    let logs = [main_log(0, 0, 30)].map(|start| LogStart {
        log: VALUES,
        ..start
    });
    let mut lead = Lead::with(spec(4, true), &logs);
    lead.answer_probe_of(B, VALUES, ok(30));
    lead.answer_probe_of(C, VALUES, ok(10));
    assert_eq!(lead.leader.mark(), Some(10));
    // No compaction does that: it waits for the mark. It would have the follower throw away what may be needed.
    lead.leader.on_log(VALUES, 20, 30);
    assert_eq!(lead.ask(B), None);
    let third = FollowerIdx(2);
    lead.answer_probe_of(third, VALUES, ok(30));
    assert_eq!(lead.leader.mark(), Some(30));
    assert_eq!(told(&mut lead, B).2, 20);
}

#[test]
fn one_that_begins_there_already_says_so_and_nothing_else_of_it_is_believed() {
    let mut lead = level_cache(30);
    lead.leader.on_log(SUMS, 20, 40);
    ship(&mut lead, B, 40);
    let (log, id, _) = told(&mut lead, B);
    lead.answer_log(B, log, id, ok(35));
    assert_eq!(lead.leader.cursor(B, SUMS).unwrap().position(), Some(40));
    assert_eq!(lead.ask(B), None);
}
