//! The scenarios of the protocol's list that a follower decides, by their numbers.

use super::super::*;
use super::support::*;
use crate::proto::replication::types::ReplicateBody;

fn names(prefix: &str, range: std::ops::Range<u64>) -> Vec<String> {
    range.map(|n| format!("{prefix}{n}")).collect()
}

fn refs(names: &[String]) -> Vec<&str> {
    names.iter().map(String::as_str).collect()
}

/// Records `[0, tail)` of generation 1 from leader a, everything synced.
fn holding(tail: u64) -> Replica {
    let mut f = Replica::new(Stored::default(), view(1, "a"));
    assert_eq!(f.records(1, 0, &refs(&names("a", 0..tail))), ok(tail));
    f
}

/// `leader` leads `generation` from another process and has the first `prefix` records of generation 1;
/// the follower compares them and takes what comes behind.
fn take_over(f: &mut Replica, generation: u64, leader: &str, prefix: u64, own: &[String]) {
    f.set_view(view(generation, leader));
    f.reconnect();
    let mut batch = names("a", 0..prefix);
    batch.extend_from_slice(own);
    let answer = f.records(generation, 0, &refs(&batch));
    assert_eq!(answer, ok(prefix + own.len() as u64));
}

#[test]
fn n02_lost_acknowledgement() {
    let mut f = holding(10);
    let batch = names("a", 10..20);
    assert_eq!(f.records(1, 10, &refs(&batch)), ok(20));
    let before = f.synced.clone();
    assert_eq!(f.records(1, 10, &refs(&batch)), ok(20));
    assert_eq!(f.synced, before, "one copy, no history change");
}

#[test]
fn n03_resend_with_more() {
    let mut f = holding(20);
    assert_eq!(f.records(1, 10, &refs(&names("a", 10..25))), ok(25));
    let all: Vec<String> = names("a", 0..25);
    assert_eq!(f.synced.bytes(), all);
}

#[test]
fn n04_resplit_in_transit() {
    let mut f = holding(3);
    let before = f.synced.clone();
    let original = payloads(&["ab", "c"]);
    let resplit = ReplicateBody::Records {
        first_offset: 3,
        checksum: original.batch_checksum(),
        payloads: payloads(&["a", "bc"]),
    };
    assert_eq!(refusal(f.ask(1, resplit)), refused(PeerCode::Malformed));
    assert_eq!(f.applied, before);
    assert_eq!(f.ask(1, ReplicateBody::records(3, original)), ok(5));
}

#[test]
fn n05_deposed_leader_and_a_restarted_follower() {
    let mut f = holding(5);
    take_over(&mut f, 5, "e", 5, &names("e", 5..6));
    f.set_view(view(4, "d"));
    f.crash();
    let to_the_old = f.records(4, 5, &["d5"]);
    assert_eq!(refusal(to_the_old), refused(PeerCode::FencedEpoch));
    let request = f.send_from("e", 5, ReplicateBody::records(6, payloads(&["e6"])));
    let answer = f.answer(request).expect("an answer");
    assert_eq!(refusal(answer), refused(PeerCode::StaleRoute));
    f.set_view(view(5, "e"));
    assert_eq!(f.records(5, 6, &["e6"]), ok(7));
}

#[test]
fn n06_rebuild_by_a_superseded_leader() {
    let mut f = holding(5);
    take_over(&mut f, 4, "d", 5, &[]);
    take_over(&mut f, 5, "e", 5, &[]);
    let before = f.synced.clone();
    let request = f.send_from("d", 4, ReplicateBody::Rebuild { base_offset: 0 });
    let answer = f.answer(request).expect("an answer");
    assert_eq!(refusal(answer), refused(PeerCode::FencedEpoch));
    assert_eq!(f.synced, before, "byte-identical");
    // One that has not heard of 5 obeys: it cannot know.
    let mut unaware = holding(5);
    unaware.set_view(view(4, "d"));
    assert_eq!(unaware.rebuild(4, 2), ok(2));
}

#[test]
fn n07_bootstrap_over_records() {
    let mut f = holding(50);
    let before = f.synced.clone();
    assert_eq!(refusal(f.bootstrap(1, 100)), refused(PeerCode::LogConflict));
    assert_eq!(f.synced, before, "fifty records intact");
    assert_eq!(f.rebuild(1, 100), ok(100));
    assert_eq!((f.synced.base, f.synced.tail()), (100, 100));
}

/// A copy of a log that says the same without its head, of 50 records of generation 1.
fn holding_a_state() -> Replica {
    let mut f = holding(50);
    f.machine = f.machine.clone().of_log(ReplicaLog::Cache);
    f
}

#[test]
fn a_copy_of_a_state_gives_up_what_its_leader_has_given_up() {
    let mut f = holding_a_state();
    assert_eq!(refusal(f.bootstrap(1, 30)), refused(PeerCode::LogConflict));
    assert_eq!((f.applied.base, f.applied.tail()), (30, 50));
    assert_eq!(f.bootstrap(1, 30), ok(50), "told again");
    assert_eq!(f.records(1, 50, &["a50"]), ok(51));
    assert_eq!(f.synced.bytes(), names("a", 30..51));
    // An earlier word, late.
    assert_eq!(refusal(f.bootstrap(1, 20)), refused(PeerCode::LogConflict));
    assert_eq!(f.applied.base, 30);
}

#[test]
fn a_copy_keeps_what_it_does_not_know_to_be_its_leaders() {
    // Another kind of log.
    let mut f = holding(50);
    assert_eq!(refusal(f.bootstrap(1, 30)), refused(PeerCode::LogConflict));
    assert_eq!(f.applied.base, 0);
    // Beyond its end.
    let mut f = holding_a_state();
    assert_eq!(refusal(f.bootstrap(1, 51)), refused(PeerCode::LogConflict));
    assert_eq!(f.applied.base, 0);
    // Not compared with this leader yet, then compared up to 20.
    f.set_view(view(2, "b"));
    f.reconnect();
    assert_eq!(refusal(f.bootstrap(2, 30)), refused(PeerCode::LogConflict));
    assert_eq!(f.applied.base, 0);
    assert_eq!(f.records(2, 0, &refs(&names("a", 0..20))), ok(20));
    assert_eq!(refusal(f.bootstrap(2, 21)), refused(PeerCode::LogConflict));
    assert_eq!(f.applied.base, 0);
    assert_eq!(refusal(f.bootstrap(2, 20)), refused(PeerCode::LogConflict));
    assert_eq!(f.applied.base, 20);
    // From a leader that is none any more.
    let late = f.send_from("a", 1, ReplicateBody::Bootstrap { base_offset: 40 });
    let late = f.answer(late).expect("an answer");
    assert_eq!(refusal(late), refused(PeerCode::FencedEpoch));
    assert_eq!(f.applied.base, 20);
}

/// Between what was stored and what is on the disk a crash may come: the head may be all there is of it.
#[test]
fn a_copy_keeps_its_head_while_what_comes_behind_is_on_its_way_to_the_disk() {
    let mut f = holding_a_state();
    f.syncs_at_once = false;
    f.send_from(
        "a",
        1,
        ReplicateBody::records(50, payloads(&["a50", "a51"])),
    );
    f.send_from("a", 1, ReplicateBody::Bootstrap { base_offset: 51 });
    f.sync_all();
    assert_eq!((f.synced.base, f.synced.tail()), (0, 52));
    f.send_from("a", 1, ReplicateBody::Bootstrap { base_offset: 51 });
    f.sync_all();
    assert_eq!(f.synced.base, 51);
}

#[test]
fn a_copy_made_anew_goes_on_giving_up_heads() {
    let mut f = holding_a_state();
    assert_eq!(f.rebuild(1, 10), ok(10));
    assert_eq!(f.records(1, 10, &refs(&names("a", 10..40))), ok(40));
    assert_eq!(refusal(f.bootstrap(1, 30)), refused(PeerCode::LogConflict));
    assert_eq!(f.synced.base, 30);
    // No further than this leader has agreed.
    assert_eq!(refusal(f.bootstrap(1, 41)), refused(PeerCode::LogConflict));
    assert_eq!(f.synced.base, 30);
    // What it had agreed with stays; the rest may go as before.
    let other = f.records(1, 39, &["other"]);
    assert_eq!(refusal(other), refused(PeerCode::LogConflict));
    assert_eq!(f.records(1, 40, &["b40"]), ok(41));
    assert_eq!((f.synced.base, f.synced.tail()), (30, 41));
}

/// Its leader agreed with what it begins with, and still has the head: it need not have what stands for that.
#[test]
fn a_companion_that_begins_higher_is_made_anew_whole() {
    let begins_at_20 = |log| {
        let mut f = trimmed_to(20, 25);
        f.machine = f.machine.clone().of_log(log);
        assert_eq!(f.records(2, 20, &refs(&names("a", 20..22))), ok(22));
        f
    };
    for log in [
        ReplicaLog::Counters,
        ReplicaLog::GroupCursors,
        ReplicaLog::GroupDeadLetters,
    ] {
        let mut f = begins_at_20(log);
        assert_eq!(f.rebuild(2, 0), ok(0));
        assert_eq!((f.synced.base, f.synced.tail()), (0, 0), "{log:?}");
    }
    for log in [ReplicaLog::Stream, ReplicaLog::Cache] {
        let mut f = begins_at_20(log);
        assert_eq!(f.rebuild(2, 0), ok(0));
        assert_eq!(
            (f.synced.base, f.synced.tail()),
            (20, 25),
            "{log:?}: a majority may be counted on it"
        );
    }
}

/// Whoever looks at the disk before the new copy is there sees where the old one began.
#[test]
fn where_the_old_copy_began_is_nothing_about_the_new_one() {
    let mut f = trimmed_to(20, 25);
    f.machine = f.machine.clone().of_log(ReplicaLog::Counters);
    f.syncs_at_once = false;
    f.send_from("b", 2, ReplicateBody::Rebuild { base_offset: 0 });
    f.sync_one();
    let sent = names("b", 0..22);
    f.send_from("b", 2, ReplicateBody::records(0, payloads(&refs(&sent))));
    f.machine.on_base_seen(20);
    assert_eq!((f.machine.state().base, f.machine.state().tail), (0, 22));
    f.sync_all();
    f.machine.on_base_seen(20);
    assert_eq!(f.machine.state().base, 20, "the new one's, by now");
}

#[test]
fn n08_bootstrap_twice_and_over_an_empty_log() {
    let mut f = Replica::new(Stored::default(), view(1, "a"));
    assert_eq!(f.bootstrap(1, 100), ok(100));
    assert_eq!(f.bootstrap(1, 100), ok(100));
    let mut f = Replica::new(Stored::default(), view(1, "a"));
    f.refuse_append = Some(DiskError::Full);
    let failed = f.records(1, 0, &["a0"]);
    assert_eq!(refusal(failed), refused(PeerCode::StorageFailed));
    assert_eq!(
        f.bootstrap(1, 100),
        ok(100),
        "opened at 0 by the attempt before"
    );
}

#[test]
fn n10_a_damaged_log_is_left_alone_until_its_leader_has_it_made_anew() {
    let mut f = holding(5);
    f.machine.on_broken(Generation(1));
    f.applied = Stored {
        accepted: 1,
        ..Stored::default()
    };
    for body in [
        ReplicateBody::records(5, payloads(&[])),
        ReplicateBody::records(5, payloads(&["a5"])),
        ReplicateBody::records(0, payloads(&["a0"])),
        ReplicateBody::Bootstrap { base_offset: 0 },
    ] {
        assert_eq!(refusal(f.ask(1, body)), refused(PeerCode::LogConflict));
    }
    assert_eq!(f.synced.tail(), 5, "left for whoever looks at it");
    // An older leader, or one this broker's catalog does not name, may not.
    f.set_view(view(2, "b"));
    let body = || ReplicateBody::Rebuild { base_offset: 0 };
    let older = f.send_from("a", 1, body());
    let other = f.send_from("third", 2, body());
    let codes = [older, other].map(|request| refusal(f.answer(request).expect("an answer")));
    assert_eq!(
        codes,
        [
            refused(PeerCode::FencedEpoch),
            refused(PeerCode::Unauthorized)
        ]
    );
    assert_eq!(f.rebuild(2, 0), ok(0));
    assert_eq!(f.synced.accepted, 2, "on disk before the answer");
    assert_eq!(f.records(2, 0, &["b0", "b1"]), ok(2));
}

#[test]
fn a_damaged_log_whose_new_beginning_fails_is_still_damaged() {
    let mut f = holding(5);
    f.machine.on_broken(Generation(1));
    f.syncs_at_once = false;
    let request = f.send_from("a", 1, ReplicateBody::Rebuild { base_offset: 0 });
    let tickets = f.forget_work();
    for ticket in tickets {
        f.machine.on_disk_done(ticket, Err(DiskError::Full));
    }
    f.pump_broken(Generation(1));
    let answer = f.answer(request).expect("an answer");
    assert_eq!(refusal(answer), refused(PeerCode::StorageFailed));
    let next = f.send_from("a", 1, ReplicateBody::records(0, payloads(&["a0"])));
    let answer = f.answer(next).expect("an answer");
    assert_eq!(refusal(answer), refused(PeerCode::LogConflict));
}

/// Retention took this copy further than the next leader's log reaches.
fn trimmed_to(base: u64, tail: u64) -> Replica {
    let held: Vec<(String, u64)> = (base..tail).map(|o| (format!("a{o}"), 1)).collect();
    let held: Vec<(&str, u64)> = held.iter().map(|(text, g)| (text.as_str(), *g)).collect();
    let mut f = Replica::new(Stored::of(base, &held, &[(1, 0, "a")]), view(2, "b"));
    f.reconnect();
    f
}

#[test]
fn a_copy_that_begins_behind_its_leaders_end_never_vouches_for_what_it_lacks() {
    // The leader of 2 had 40 records when it began and writes 40 to 60 itself.
    for tail in [50, 55] {
        for (first, until) in [(39, 39), (39, 40), (40, 45), (40, 50), (45, 50)] {
            let mut f = trimmed_to(50, tail);
            let sent = names("b", first..until);
            assert_eq!(
                refusal(f.records(2, first, &refs(&sent))),
                gap(50),
                "{first}..{until}"
            );
            assert_eq!(f.synced.tail(), tail);
        }
    }
    for first in [40, 49, 50] {
        let mut f = trimmed_to(50, 55);
        let sent = names("b", first..60);
        let answer = f.records(2, first, &refs(&sent));
        assert_eq!(
            refusal(answer),
            refused(PeerCode::LogConflict),
            "from {first}"
        );
        assert_eq!(f.synced.tail(), 55, "and nothing of it goes");
    }
    // One record that is equal shows that this leader has what the copy begins with.
    let mut f = trimmed_to(50, 55);
    let mut sent = names("a", 50..53);
    sent.extend(names("b", 53..56));
    assert_eq!(f.records(2, 50, &refs(&sent)), ok(56));
    // Told to begin anew it begins where the leader's log does.
    let mut f = trimmed_to(50, 55);
    assert_eq!(f.rebuild(2, 0), ok(0));
    assert_eq!((f.synced.base, f.synced.tail()), (0, 0));
}

#[test]
fn n11_gap_repair_does_not_hide_a_stale_suffix() {
    let mut f = holding(85);
    take_over(&mut f, 2, "dead", 85, &names("dead", 85..90));
    f.set_view(view(3, "c"));
    f.reconnect();
    assert_eq!(refusal(f.records(3, 99, &["c99"])), gap(84), "not 90");
    let mut own = vec!["a84".to_owned()];
    own.extend(names("c", 85..110));
    assert_eq!(f.records(3, 84, &refs(&own)), ok(110));
    let mut expected = names("a", 0..85);
    expected.extend(names("c", 85..110));
    assert_eq!(f.synced.bytes(), expected);
}

#[test]
fn n12_follower_longer_than_the_new_leader() {
    let mut f = holding(10);
    take_over(&mut f, 2, "b", 10, &names("b", 10..13));
    f.set_view(view(3, "c"));
    f.reconnect();
    assert_eq!(
        f.records(3, 9, &["a9"]),
        ok(10),
        "the leader's tail, not its own"
    );
    assert_eq!(f.synced.tail(), 13);
    assert_eq!(f.records(3, 10, &["c10"]), ok(11));
    assert_eq!(
        f.synced.tail(),
        11,
        "the extra records go with the first write"
    );
}

#[test]
fn n13_disk_full_in_a_batch() {
    let mut f = holding(60);
    f.syncs_at_once = false;
    let request = f.send_from(
        "a",
        1,
        ReplicateBody::records(60, payloads(&refs(&names("a", 60..160)))),
    );
    f.fail_all(DiskError::Full);
    let answer = f.answer(request).expect("an answer");
    assert_eq!(refusal(answer), refused(PeerCode::StorageFailed));
    assert_eq!(f.machine.state().tail, 60, "tail unchanged");
    f.syncs_at_once = true;
    f.crash();
    assert_eq!(f.synced.tail(), 60, "nothing of it is visible");
    assert_eq!(f.records(1, 60, &refs(&names("a", 60..160))), ok(160));
}

#[test]
fn n13_what_was_pipelined_behind_a_full_disk_is_refused_as_well() {
    let mut f = holding(5);
    f.syncs_at_once = false;
    let body = |n: u64| ReplicateBody::records(n, payloads(&["x"]));
    let requests = [5, 6, 7].map(|n| f.send_from("a", 1, body(n)));
    f.sync_one();
    f.fail_all(DiskError::Full);
    assert_eq!(f.answer(requests[0]), Some(ok(6)), "it was durable");
    for request in &requests[1..] {
        let answer = f.answer(*request).expect("an answer");
        assert_eq!(refusal(answer), refused(PeerCode::StorageFailed));
    }
    f.syncs_at_once = true;
    assert_eq!(
        refusal(f.records(1, 8, &["x"])),
        gap(6),
        "resumes at its true tail"
    );
    assert_eq!(f.records(1, 6, &["x", "y"]), ok(8));
}

#[test]
fn n13_a_part_of_a_batch_that_stayed_is_compared_and_completed() {
    let mut f = holding(5);
    f.syncs_at_once = false;
    let body = || ReplicateBody::records(5, payloads(&["x", "y", "z"]));
    let request = f.send_from("a", 1, body());
    f.fill_up_keeping(2);
    let answer = f.answer(request).expect("an answer");
    assert_eq!(refusal(answer), refused(PeerCode::StorageFailed));
    f.syncs_at_once = true;
    assert_eq!(f.ask(1, body()), ok(8));
    assert_eq!(f.synced.bytes()[5..], ["x", "y", "z"]);
}

#[test]
fn n16_a_failed_sync_is_final() {
    let mut f = holding(5);
    f.syncs_at_once = false;
    let body = |n: u64| ReplicateBody::records(n, payloads(&["x"]));
    let requests = [5, 6].map(|n| f.send_from("a", 1, body(n)));
    f.fail_all(DiskError::Failed);
    f.syncs_at_once = true;
    let later = f.send_from("a", 1, body(5));
    for request in requests.into_iter().chain([later]) {
        let answer = f.answer(request).expect("an answer");
        assert_eq!(refusal(answer), refused(PeerCode::StorageFailed));
    }
    assert_eq!(refusal(f.rebuild(1, 5)), refused(PeerCode::StorageFailed));
    f.crash();
    assert_eq!(refusal(f.records(1, 9, &["x"])), gap(5), "its true tail");
}

#[test]
fn a_lost_answer_at_a_new_generation_is_repeated() {
    // The newer leader's first contact reaches the disk, its answer is lost, the follower restarts.
    let mut f = holding(5);
    f.set_view(view(2, "b"));
    f.reconnect();
    f.syncs_at_once = false;
    f.send_from("b", 2, ReplicateBody::records(0, payloads(&["a0"])));
    f.sync_one();
    f.syncs_at_once = true;
    f.crash();
    assert_eq!(f.synced.accepted, 2);
    take_over(&mut f, 2, "b", 5, &names("b", 5..6));
}

#[test]
fn n23_a_discard_keeps_the_accepted_generation() {
    for syncs in 0..3 {
        let mut f = holding(5);
        f.set_view(view(4, "d"));
        f.reconnect();
        f.syncs_at_once = false;
        f.send_from("d", 4, ReplicateBody::Rebuild { base_offset: 3 });
        for _ in 0..syncs {
            f.sync_one();
        }
        f.crash();
        f.syncs_at_once = true;
        let is_whole = f.synced.base == 0 && f.synced.tail() == 5;
        let is_placed = f.synced.base == 3 && f.synced.tail() == 5;
        assert!(is_whole || is_placed, "never a mix: {:?}", f.synced);
        assert_eq!(f.synced.accepted, if syncs == 0 { 1 } else { 4 });
        assert!(!is_placed || f.synced.accepted == 4);
        assert_eq!(f.rebuild(4, 3), ok(3));
        assert_eq!(f.records(4, 3, &["d3"]), ok(4));
    }
}

#[test]
fn n34_lost_history() {
    let mut f = holding(10);
    take_over(&mut f, 2, "dead", 10, &names("dead", 10..11));
    f.synced.history.clear();
    f.crash();
    f.set_view(view(3, "c"));
    assert_eq!(
        refusal(f.records(3, 9, &["a9", "c10"])),
        gap(0),
        "from the base"
    );
    let mut own = names("a", 0..10);
    own.push("c10".to_owned());
    let answer = f.records(3, 0, &refs(&own));
    assert_eq!(refusal(answer), refused(PeerCode::LogConflict));
    assert_eq!(f.synced.tail(), 11, "never a silent truncation");
    assert_eq!(f.rebuild(3, 0), ok(0));
    assert_eq!(f.records(3, 0, &refs(&own)), ok(11));
}

#[test]
fn one_process_that_leads_on_is_not_compared_again() {
    let mut f = holding(10);
    f.set_view(view(2, "a"));
    assert_eq!(f.records(2, 10, &["a10"]), ok(11), "no comparison");
    f.set_view(view(3, "a"));
    f.reconnect();
    assert_eq!(
        refusal(f.records(3, 11, &["a11"])),
        gap(0),
        "another process may have lost a tail"
    );
    let mut f = holding(10);
    f.set_view(view(2, "b"));
    f.set_view(view(3, "a"));
    assert_eq!(
        refusal(f.records(3, 10, &["a10"])),
        gap(0),
        "another led in between"
    );
    let mut f = holding(10);
    f.set_view(view(3, "a"));
    assert_eq!(
        refusal(f.records(3, 10, &["a10"])),
        gap(0),
        "nobody knows who led 2"
    );
}

#[test]
fn a_view_that_moves_on_while_a_batch_is_compared_stops_it() {
    let mut f = holding(5);
    f.syncs_at_once = false;
    let body = |n: u64| ReplicateBody::records(n, payloads(&["x"]));
    f.send_from("a", 1, body(5));
    // Waits for the record before it to be durable, to compare with it.
    let waits = f.send_from("a", 1, ReplicateBody::records(5, payloads(&["x", "y"])));
    f.set_view(view(2, "b"));
    f.sync_all();
    let answer = f.answer(waits).expect("an answer");
    assert_eq!(refusal(answer), refused(PeerCode::FencedEpoch));
    assert_eq!(f.applied.tail(), 6);
}

#[test]
fn an_older_leader_counts_nothing_once_a_newer_one_is_accepted() {
    let mut f = holding(5);
    f.syncs_at_once = false;
    let old = f.send_from("a", 1, ReplicateBody::records(5, payloads(&["x"])));
    f.set_view(view(2, "b"));
    let new = f.send_from("b", 2, ReplicateBody::records(0, payloads(&["a0"])));
    f.sync_all();
    let answer = f.answer(old).expect("an answer");
    assert_eq!(refusal(answer), refused(PeerCode::FencedEpoch));
    assert_eq!(f.answer(new), Some(ok(1)));
}
