//! The worked examples of truncation, by their numbers.

use super::support::*;
use crate::proto::outcome::PeerCode;

/// Offsets 0 to 9 came under generation 1, 10 to 12 under 2 from a leader that died.
fn with_dead_suffix() -> Stored {
    let mut records: Vec<(String, u64)> = (0..10).map(|n| (format!("a{n}"), 1)).collect();
    records.extend((10..13).map(|n| (format!("b{n}"), 2)));
    let records: Vec<(&str, u64)> = records.iter().map(|(t, g)| (t.as_str(), *g)).collect();
    Stored::of(0, &records, &[(1, 0, "x"), (2, 10, "dead")])
}

#[test]
fn example_1_ordinary_repair() {
    let mut f = Replica::new(with_dead_suffix(), view(3, "new"));
    assert_eq!(f.records(3, 9, &["a9", "c10"]), ok(11));
    assert_eq!(f.synced.history_pairs(), [(1, 0), (3, 10)]);
    assert_eq!(f.synced.tail(), 11);
    assert_eq!(&f.synced.records[10].0[..], b"c10");
}

#[test]
fn example_2_found_late() {
    let mut f = Replica::new(with_dead_suffix(), view(3, "new"));
    assert_eq!(refusal(f.records(3, 19, &["c19"])), gap(9));
    assert_eq!(f.synced.accepted, 3, "accepted before the gap was answered");
    assert_eq!(f.records(3, 9, &["a9", "c10", "c11"]), ok(12));
    assert_eq!(f.synced.tail(), 12);
}

#[test]
fn example_3_too_deep() {
    let mut f = Replica::new(with_dead_suffix(), view(3, "new"));
    let before = f.synced.records.clone();
    let answer = f.records(3, 9, &["other", "c10"]);
    assert_eq!(refusal(answer), refused(PeerCode::LogConflict));
    assert_eq!(f.synced.records, before);
}

#[test]
fn example_4_leader_against_itself() {
    let mut f = Replica::new(Stored::default(), view(3, "new"));
    let names: Vec<String> = (0..20).map(|n| format!("c{n}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    assert_eq!(f.records(3, 0, &names), ok(20));
    let before = f.synced.clone();
    let answer = f.records(3, 15, &["c15", "other", "c17"]);
    assert_eq!(refusal(answer), refused(PeerCode::LogConflict));
    assert_eq!(f.synced, before, "nothing is dropped");
}

#[test]
fn example_5_two_batches() {
    let mut stored = with_dead_suffix();
    for n in 13..30 {
        stored.records.push((format!("b{n}").into(), 2));
    }
    let mut f = Replica::new(stored, view(3, "new"));
    let names: Vec<String> = (9..20)
        .map(|n| if n == 9 { "a9".into() } else { format!("b{n}") })
        .collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    assert_eq!(
        f.records(3, 9, &names),
        ok(20),
        "not 30: the rest is uncompared"
    );
    assert_eq!(
        f.records(3, 20, &["b20", "b21", "c22", "c23", "c24"]),
        ok(25)
    );
    assert_eq!(f.synced.history_pairs(), [(1, 0), (2, 10), (3, 22)]);
    assert_eq!(f.synced.tail(), 25);
}

#[test]
fn example_6_below_commit() {
    let mut stored = with_dead_suffix();
    stored.commit = 12;
    let mut f = Replica::new(stored, view(3, "new"));
    // Comparison may start at 11, but a careful leader starts lower.
    let answer = f.records(3, 9, &["a9", "c10"]);
    assert_eq!(refusal(answer), refused(PeerCode::LogConflict));
    assert_eq!(f.synced.tail(), 13);
    assert!(f.notes.iter().any(|note| matches!(
        note,
        super::super::FollowerNote::Conflict {
            at: 10,
            why: super::super::position::Undroppable::BelowCommit,
            ..
        }
    )));
    // And a rebuild by that leader is refused as well: it would keep what it disagrees with.
    assert_eq!(refusal(f.rebuild(3, 0)), refused(PeerCode::LogConflict));
}

#[test]
fn example_7_follower_longer_than_leader() {
    let mut f = Replica::new(with_dead_suffix(), view(3, "new"));
    assert_eq!(f.records(3, 9, &["a9", "b10"]), ok(11), "not 13");
    assert_eq!(f.synced.tail(), 13, "kept silently");
    assert_eq!(f.records(3, 11, &["c11"]), ok(12));
    assert_eq!(f.synced.tail(), 12);
    assert_eq!(&f.synced.records[11].0[..], b"c11");
}

#[test]
fn example_8_history_lost() {
    let mut stored = with_dead_suffix();
    stored.history.clear();
    let mut f = Replica::new(stored, view(3, "new"));
    assert_eq!(refusal(f.records(3, 9, &["a9", "c10"])), gap(0));
    let names: Vec<String> = (0..10)
        .map(|n| format!("a{n}"))
        .chain(["c10".into()])
        .collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let answer = f.records(3, 0, &names);
    assert_eq!(refusal(answer), refused(PeerCode::LogConflict));
    assert_eq!(f.synced.tail(), 13, "never a silent truncation");
}

#[test]
fn example_9_idle_leaderships() {
    let mut records: Vec<(String, u64)> = (0..10).map(|n| (format!("a{n}"), 1)).collect();
    records.extend((10..15).map(|n| (format!("b{n}"), 2)));
    let records: Vec<(&str, u64)> = records.iter().map(|(t, g)| (t.as_str(), *g)).collect();
    let history = [(1, 0, "x"), (2, 10, ME), (3, 15, ME)];
    let mut stored = Stored::of(0, &records, &history);
    stored.accepted = 3;
    let mut f = Replica::new(stored, view(4, "new"));
    assert_eq!(refusal(f.records(4, 14, &["b14"])), gap(9));
}

#[test]
fn example_10_zero_before_any_record() {
    let mut f = Replica::new(Stored::default(), view(1, "new"));
    assert_eq!(f.records(1, 0, &["a"]), ok(1));
    let mut f = Replica::new(Stored::default(), view(1, "new"));
    assert_eq!(refusal(f.records(1, 50, &["a"])), gap(0));
    assert_eq!(f.bootstrap(1, 50), ok(50));
    assert_eq!(f.records(1, 50, &["a"]), ok(51));
    assert_eq!((f.synced.base, f.synced.tail()), (50, 51));
}
