//! Every row of the tables: records by state and position, bootstrap and rebuild by state, order of checks.

use super::super::*;
use super::support::*;
use crate::proto::replication::types::ReplicateBody;

/// Base 10, records 10 to 14 of generation 2, synced.
fn ten_to_fifteen() -> Stored {
    let records = [("r10", 2), ("r11", 2), ("r12", 2), ("r13", 2), ("r14", 2)];
    Stored::of(10, &records, &[(2, 10, "old")])
}

/// As [`ten_to_fifteen`], of which the leader of 2 is still the leader.
fn matched() -> Replica {
    Replica::new(ten_to_fifteen(), view(2, "lead"))
}

/// A new leader at 3; records below 13 came under 1, the rest under 2.
fn behind() -> Replica {
    let records = [("r10", 1), ("r11", 1), ("r12", 1), ("r13", 2), ("r14", 2)];
    let stored = Stored::of(10, &records, &[(1, 10, "a"), (2, 13, "b")]);
    Replica::new(stored, view(3, "lead"))
}

fn without_history() -> Replica {
    let mut stored = ten_to_fifteen();
    stored.history.clear();
    Replica::new(stored, view(3, "lead"))
}

fn empty(base: u64) -> Replica {
    let stored = Stored {
        base,
        ..Stored::default()
    };
    Replica::new(stored, view(2, "lead"))
}

#[test]
fn records_into_no_log_and_an_empty_one() {
    assert_eq!(empty(0).records(2, 0, &["x", "y"]), ok(2));
    assert_eq!(refusal(empty(0).records(2, 1, &["x"])), gap(0));
    assert_eq!(empty(7).records(2, 7, &["x"]), ok(8));
    assert_eq!(refusal(empty(7).records(2, 8, &["x"])), gap(7));
    // What lies below was never here, and nothing shows that this leader has not got it.
    for (first, records) in [
        (3, &["x", "y"][..]),
        (3, &[]),
        (5, &["x", "y"]),
        (5, &["x", "y", "z"]),
    ] {
        let mut f = empty(7);
        assert_eq!(refusal(f.records(2, first, records)), gap(7), "{first}");
        assert_eq!(f.synced.bytes(), [] as [bytes::Bytes; 0]);
    }
    // It has not when it says that its log begins here.
    let mut f = empty(7);
    assert_eq!(f.bootstrap(2, 7), ok(7));
    assert_eq!(f.records(2, 5, &["x", "y", "z"]), ok(8));
    assert_eq!(f.synced.bytes(), ["z"]);
    // Of its own generation everything was compared before it was given up.
    let mut given_up = Stored::of(7, &[], &[(2, 3, "lead")]);
    given_up.accepted = 2;
    let mut f = Replica::new(given_up.clone(), view(2, "lead"));
    assert_eq!(f.records(2, 5, &["x", "y"]), ok(7));
    // Of an older one there is nothing left to compare.
    let placed_anew = |f: &mut Replica| {
        assert_eq!(f.synced.accepted, 3);
        assert_eq!((f.synced.base, f.synced.tail()), (2, 2));
    };
    let mut f = Replica::new(given_up.clone(), view(3, "next"));
    assert_eq!(refusal(f.records(3, 6, &["w"])), gap(7));
    assert_eq!(
        refusal(f.records(3, 7, &[])),
        gap(7),
        "a leader may open on that"
    );
    assert_eq!(f.bootstrap(3, 2), ok(2));
    placed_anew(&mut f);
    let mut f = Replica::new(given_up, view(3, "next"));
    let answer = f.records(3, 7, &["x"]);
    assert_eq!(refusal(answer), refused(PeerCode::LogConflict));
    assert_eq!(f.rebuild(3, 2), ok(2));
    placed_anew(&mut f);
}

#[test]
fn what_a_former_leader_agreed_with_is_not_agreed_with_the_present_one() {
    let mut f = matched();
    assert_eq!(f.machine.matched_with_leader(), None, "nobody spoke yet");
    assert_eq!(f.records(2, 15, &["r15"]), ok(16));
    assert_eq!(f.machine.matched_with_leader(), Some(16));
    f.set_view(view(3, "next"));
    assert_eq!(f.machine.matched_with_leader(), None);
    // Compared with it, and nothing of its own: a dead leader's longer suffix may yet win.
    f.reconnect();
    let held = ["r10", "r11", "r12", "r13", "r14", "r15"];
    assert_eq!(f.records(3, 10, &held), ok(16));
    assert_eq!(f.machine.matched_with_leader(), None);
    assert_eq!(f.records(3, 16, &["r16"]), ok(17));
    assert_eq!(f.machine.matched_with_leader(), Some(17));
    f.set_view(view(4, "next"));
    assert_eq!(f.records(4, 17, &[]), ok(17));
    assert_eq!(
        f.machine.matched_with_leader(),
        Some(17),
        "the same leader in one run"
    );
    f.set_view(None);
    assert_eq!(f.machine.matched_with_leader(), None);
}

#[test]
fn records_when_matched() {
    assert_eq!(matched().records(2, 15, &["x"]), ok(16));
    assert_eq!(refusal(matched().records(2, 16, &["x"])), gap(15));
    assert_eq!(matched().records(2, 11, &["r11", "r12"]), ok(15));
    let mut f = matched();
    assert_eq!(f.records(2, 13, &["r13", "r14", "x"]), ok(16));
    assert_eq!(f.synced.history_pairs(), [(2, 10)], "begun already");
    let mut f = matched();
    let answer = f.records(2, 13, &["r13", "other", "x"]);
    assert_eq!(refusal(answer), refused(PeerCode::LogConflict));
    assert_eq!(f.synced.records, ten_to_fifteen().records);
    assert_eq!(
        matched().records(2, 8, &["gone", "gone", "r10"]),
        ok(15),
        "what was trimmed is not compared"
    );
}

#[test]
fn records_when_behind() {
    assert_eq!(behind().records(3, 12, &["r12"]), ok(13), "not the tail");
    let mut f = behind();
    assert_eq!(f.records(3, 12, &["r12", "r13", "r14", "x"]), ok(16));
    assert_eq!(f.synced.history_pairs(), [(1, 10), (2, 13), (3, 15)]);
    let mut f = behind();
    assert_eq!(f.records(3, 12, &["r12", "r13", "x"]), ok(15));
    assert_eq!(f.synced.history_pairs(), [(1, 10), (2, 13), (3, 14)]);
    assert_eq!(&f.synced.bytes()[4][..], b"x");
    let answer = behind().records(3, 12, &["other", "r13"]);
    assert_eq!(refusal(answer), refused(PeerCode::LogConflict));
    for first in [13, 14, 15, 16] {
        let mut f = behind();
        let before = f.synced.records.clone();
        assert_eq!(refusal(f.records(3, first, &["q", "q", "q", "q"])), gap(12));
        assert_eq!(f.synced.records, before, "not looked at");
    }
}

#[test]
fn records_without_a_history() {
    assert_eq!(without_history().records(3, 10, &["r10", "r11"]), ok(12));
    let mut f = without_history();
    assert_eq!(
        f.records(3, 10, &["r10", "r11", "r12", "r13", "r14", "x"]),
        ok(16)
    );
    assert_eq!(f.synced.history_pairs(), [(3, 15)]);
    let answer = without_history().records(3, 10, &["r10", "other"]);
    assert_eq!(refusal(answer), refused(PeerCode::LogConflict));
    for first in [11, 14, 15, 16] {
        assert_eq!(
            refusal(without_history().records(3, first, &["q"])),
            gap(10)
        );
    }
}

#[test]
fn a_comparison_may_span_many_reads() {
    for read_at_most in 1..=4 {
        let mut f = behind();
        f.read_at_most = read_at_most;
        assert_eq!(f.records(3, 10, &["r10", "r11", "r12", "r13", "x"]), ok(15));
        assert_eq!(&f.synced.bytes()[4][..], b"x");
    }
}

#[test]
fn unusable_logs_change_nothing() {
    let bodies = || {
        [
            ReplicateBody::records(15, payloads(&["x"])),
            ReplicateBody::records(99, payloads(&["x"])),
            ReplicateBody::records(11, payloads(&["r11"])),
            ReplicateBody::records(14, payloads(&["other"])),
            ReplicateBody::Bootstrap { base_offset: 10 },
            ReplicateBody::Rebuild { base_offset: 10 },
        ]
    };
    for body in bodies() {
        let mut f = matched();
        f.machine.on_closing();
        assert_eq!(refusal(f.ask(2, body)), refused(PeerCode::Unavailable));
    }
    for body in bodies() {
        let mut f = matched();
        f.refuse_append = Some(DiskError::Failed);
        let poisoning = f.records(2, 15, &["x"]);
        assert_eq!(refusal(poisoning), refused(PeerCode::StorageFailed));
        let before = f.applied.clone();
        assert_eq!(refusal(f.ask(2, body)), refused(PeerCode::StorageFailed));
        assert_eq!(f.applied, before);
    }
    for (at, body) in bodies().into_iter().enumerate() {
        let mut f = matched();
        f.machine.on_broken(Generation(2));
        f.applied = Stored {
            accepted: 2,
            ..Stored::default()
        };
        let answer = f.ask(2, body);
        match at {
            5 => assert_eq!(answer, ok(10), "a damaged log may be rebuilt"),
            _ => assert_eq!(refusal(answer), refused(PeerCode::LogConflict)),
        }
    }
    for body in bodies() {
        let mut f = matched();
        let before = f.applied.clone();
        f.machine.on_unusable();
        assert_eq!(refusal(f.ask(2, body)), refused(PeerCode::StorageFailed));
        assert_eq!(f.applied, before);
    }
}

#[test]
fn bootstrap_by_state() {
    for base in [0, 7] {
        let mut f = empty(base);
        assert_eq!(f.bootstrap(2, 40), ok(40));
        assert_eq!((f.synced.base, f.synced.tail()), (40, 40));
        assert_eq!(f.bootstrap(2, 40), ok(40), "idempotent");
    }
    assert_eq!(
        matched().bootstrap(2, 10),
        ok(15),
        "as far as it is matched"
    );
    assert_eq!(behind().bootstrap(3, 10), ok(10), "nothing is known yet");
    for mut f in [matched(), behind(), without_history()] {
        let generation = f.synced.accepted.max(3);
        f.set_view(view(generation, "lead"));
        let before = f.synced.records.clone();
        let answer = f.bootstrap(generation, 11);
        assert_eq!(refusal(answer), refused(PeerCode::LogConflict));
        assert_eq!(f.synced.records, before);
    }
}

#[test]
fn rebuild_by_state() {
    for mut f in [matched(), behind(), without_history(), empty(0), empty(7)] {
        f.set_view(view(3, "lead"));
        // Behind everything held: a hole otherwise, so all of it goes.
        assert_eq!(f.rebuild(3, 40), ok(40));
        let placed = Stored {
            base: 40,
            accepted: 3,
            ..Stored::default()
        };
        assert_eq!(f.synced, placed, "the accepted generation stays");
        assert_eq!(f.records(3, 40, &["x"]), ok(41));
    }
}

#[test]
fn a_rebuilt_copy_keeps_its_records_until_the_leaders_replace_them() {
    for mut f in [matched(), behind(), without_history()] {
        f.set_view(view(3, "lead"));
        let (base, tail, held) = (f.synced.base, f.synced.tail(), f.synced.bytes());
        assert_eq!(f.rebuild(3, base), ok(base));
        assert_eq!(f.synced.bytes(), held, "no copy of anything is lost");
        assert_eq!(f.records(3, base, &[]), ok(base), "and none of it counts");
        assert_eq!(refusal(f.records(3, base + 1, &["x"])), gap(base));
        // What is equal stays, what differs goes, of whatever generation it is.
        let first = std::str::from_utf8(&held[0]).expect("text").to_owned();
        assert_eq!(f.records(3, base, &[&first]), ok(base + 1));
        assert_eq!(f.synced.tail(), tail);
        let answer = f.records(3, base + 1, &["other", "more"]);
        assert_eq!(answer, ok(base + 3));
        assert_eq!(f.synced.bytes()[1..], ["other", "more"]);
        // Agreed with since: a leader that contradicts itself drops nothing.
        let again = f.records(3, base, &["different"]);
        assert_eq!(refusal(again), refused(PeerCode::LogConflict));
    }
}

#[test]
fn a_rebuilt_copy_gives_up_what_its_leader_has_not_got() {
    let mut f = behind();
    f.set_view(view(3, "lead"));
    let held = f.synced.bytes();
    let base = f.synced.base + 2;
    assert_eq!(f.rebuild(3, base), ok(base));
    assert_eq!(f.synced.base, base);
    assert_eq!(f.synced.bytes(), held[2..]);
    // One that begins above the leader's base stays when this leader has vouched for what it begins with,
    let mut f = matched();
    let held = f.synced.bytes();
    assert_eq!(f.rebuild(2, 0), ok(0));
    assert_eq!((f.synced.base, f.synced.bytes()), (10, held));
    let below: Vec<String> = (0..10).map(|n| format!("old{n}")).collect();
    let below: Vec<&str> = below.iter().map(String::as_str).collect();
    assert_eq!(f.records(2, 0, &below), ok(10), "held once, and trimmed");
    // and goes otherwise: the leader's log may end below it.
    let mut f = behind();
    assert_eq!(f.rebuild(3, 0), ok(0));
    assert_eq!((f.synced.base, f.synced.tail()), (0, 0));
}

#[test]
fn a_rebuild_that_was_begun_ends_with_its_generation() {
    let mut f = behind();
    f.set_view(view(3, "lead"));
    let base = f.synced.base;
    assert_eq!(f.rebuild(3, base), ok(base));
    f.set_view(view(4, "next"));
    f.reconnect();
    let at_start = f.records(4, base, &["other"]);
    assert_eq!(
        refusal(at_start),
        refused(PeerCode::LogConflict),
        "the next leader has to ask for itself"
    );
}

#[test]
fn a_rebuild_keeps_what_a_majority_holds() {
    for base in [11, 12] {
        let mut stored = behind().synced;
        stored.commit = 12;
        let held = stored.bytes();
        let mut f = Replica::new(stored, view(3, "lead"));
        assert_eq!(f.rebuild(3, base), ok(base));
        assert_eq!((f.synced.base, f.synced.bytes()), (10, held));
        assert_eq!(
            refusal(f.records(3, base + 1, &["x"])),
            gap(base),
            "compared again"
        );
    }
    let mut stored = behind().synced;
    stored.commit = 12;
    let mut f = Replica::new(stored, view(3, "lead"));
    assert_eq!(f.rebuild(3, 11), ok(11));
    let below = f.records(3, 11, &["other"]);
    assert_eq!(refusal(below), refused(PeerCode::LogConflict));
    assert_eq!(
        refusal(f.rebuild(3, 11)),
        refused(PeerCode::LogConflict),
        "stays halted"
    );
}

#[test]
fn checks_come_in_their_order() {
    let sound = || ReplicateBody::records(15, payloads(&["x"]));
    let bad_sum = || ReplicateBody::Records {
        first_offset: 15,
        checksum: 1,
        payloads: payloads(&["x"]),
    };
    let overflowing = || ReplicateBody::records(u64::MAX, payloads(&["x"]));
    let others = ReplicaView {
        replicas: [node("lead"), node("third")].into(),
        ..view(2, "lead").unwrap()
    };
    let cases: [(&str, Option<ReplicaView>, u64, ReplicateBody, PeerCode); 11] = [
        (
            "lead",
            view(2, "lead"),
            2,
            overflowing(),
            PeerCode::Malformed,
        ),
        (
            "lead",
            view(2, "lead"),
            1,
            overflowing(),
            PeerCode::Malformed,
        ),
        ("lead", view(2, "lead"), 1, bad_sum(), PeerCode::FencedEpoch),
        ("third", view(2, "lead"), 1, sound(), PeerCode::FencedEpoch),
        (
            "lead",
            Some(others.clone()),
            1,
            sound(),
            PeerCode::FencedEpoch,
        ),
        ("lead", view(2, "lead"), 3, bad_sum(), PeerCode::StaleRoute),
        ("lead", None, 2, sound(), PeerCode::StaleRoute),
        ("lead", None, 1, sound(), PeerCode::FencedEpoch),
        ("lead", Some(others), 2, bad_sum(), PeerCode::Unauthorized),
        (
            "third",
            view(2, "lead"),
            2,
            bad_sum(),
            PeerCode::Unauthorized,
        ),
        ("lead", view(2, "lead"), 2, bad_sum(), PeerCode::Malformed),
    ];
    for (sender, view, generation, body, code) in cases {
        let what = format!("{sender} at {generation}: {code:?}");
        let mut f = Replica::new(ten_to_fifteen(), view);
        let before = f.machine.state();
        let request = f.send_from(sender, generation, body);
        let answer = f.answer(request).expect("an answer");
        assert_eq!(refusal(answer), refused(code), "{what}");
        assert_eq!(f.applied, ten_to_fifteen(), "I15: {what}");
        assert_eq!(f.machine.state(), before, "I15: {what}");
    }
}

#[test]
fn a_newer_generation_is_on_disk_before_any_answer_at_it() {
    let bodies = [
        ReplicateBody::records(99, payloads(&["x"])),
        ReplicateBody::records(12, payloads(&["r12"])),
        ReplicateBody::records(12, payloads(&["other"])),
        ReplicateBody::records(12, payloads(&[])),
        ReplicateBody::Bootstrap { base_offset: 10 },
        ReplicateBody::Bootstrap { base_offset: 11 },
        ReplicateBody::Rebuild { base_offset: 11 },
    ];
    for body in bodies {
        let mut f = behind();
        f.syncs_at_once = false;
        let request = f.send_from("lead", 3, body.clone());
        assert_eq!(f.answer(request), None, "{body:?}");
        assert_eq!(f.synced.accepted, 2);
        f.sync_all();
        assert!(f.answer(request).is_some(), "{body:?}");
        assert_eq!(f.synced.accepted, 3);
    }
}

#[test]
fn probes_make_nothing_count_that_nobody_compared() {
    assert_eq!(matched().records(2, 15, &[]), ok(15));
    assert_eq!(matched().records(2, 12, &[]), ok(15));
    assert_eq!(refusal(matched().records(2, 16, &[])), gap(15));
    assert_eq!(empty(0).records(2, 0, &[]), ok(0));
    assert_eq!(refusal(empty(0).records(2, 5, &[])), gap(0));
    assert_eq!(refusal(behind().records(3, 15, &[])), gap(12));
    assert_eq!(
        refusal(behind().records(3, 10, &[])),
        gap(10),
        "what was held below is asked about by what comes first"
    );
    assert_eq!(refusal(behind().records(3, 9, &[])), gap(10));
    // Nothing is known of the records below 12: the leader is asked for the one before.
    let mut f = behind();
    assert_eq!(refusal(f.records(3, 12, &[])), gap(11));
    assert_eq!(f.synced.accepted, 3, "a probe persists the generation");
    assert_eq!(f.records(3, 11, &["r11"]), ok(12));
    assert_eq!(f.records(3, 12, &[]), ok(12));
}

#[test]
fn batches_are_pipelined_and_acknowledged_together() {
    let mut f = matched();
    f.syncs_at_once = false;
    let requests: Vec<u64> = (0..3)
        .map(|n| {
            let body = ReplicateBody::records(15 + n, payloads(&["x"]));
            f.send_from("lead", 2, body)
        })
        .collect();
    assert_eq!(f.applied.tail(), 18, "none waits for the one before");
    assert!(f.answers.is_empty());
    f.sync_one();
    assert_eq!(f.answers, [(requests[0], ok(16))]);
    f.sync_all();
    assert_eq!(
        f.answers[1..],
        [(requests[1], ok(17)), (requests[2], ok(18))]
    );
}

#[test]
fn a_resend_of_what_is_not_durable_waits_for_it() {
    let mut f = matched();
    f.syncs_at_once = false;
    let body = || ReplicateBody::records(15, payloads(&["x", "y"]));
    let (first, second) = (
        f.send_from("lead", 2, body()),
        f.send_from("lead", 2, body()),
    );
    assert_eq!(f.answers, []);
    f.sync_all();
    assert_eq!(f.answers, [(first, ok(17)), (second, ok(17))]);
    assert_eq!(f.synced.tail(), 17);
}

#[test]
fn a_full_queue_is_an_answer() {
    let mut f = matched();
    f.syncs_at_once = false;
    let first = f.send_from("lead", 2, ReplicateBody::records(15, payloads(&["x"])));
    // A comparison that waits for the disk holds up what comes behind it.
    let resend = || ReplicateBody::records(15, payloads(&["x"]));
    let waiting: Vec<u64> = (0..=FOLLOWER_WAITING_REQUESTS)
        .map(|_| f.send_from("lead", 2, resend()))
        .collect();
    assert_eq!(f.answers, []);
    let refused_one = f.send_from("lead", 2, resend());
    let answer = f.answer(refused_one).expect("refused at once");
    assert_eq!(refusal(answer), refused(PeerCode::Overload));
    f.sync_all();
    for request in std::iter::once(first).chain(waiting) {
        assert_eq!(f.answer(request), Some(ok(16)));
    }
}
