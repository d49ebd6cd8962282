//! The in-flight table against a plain model, over every short sequence and long random ones.

use std::collections::HashMap;
use std::time::Duration;

use felix_uring::ids::CorrelationId;
use felix_uring::proto::correlation::{AnswerShape, Completion, Family, Slots};
use felix_uring::proto::outcome::PeerCode;
use felix_uring::proto::MonoTime;
use proptest::prelude::*;

const OK: AnswerShape = AnswerShape::ForwardPublishOk;

fn at(micros: u64) -> MonoTime {
    MonoTime::from_micros(micros)
}

fn shapes() -> Vec<AnswerShape> {
    let mut all = vec![
        AnswerShape::ForwardPublishOk,
        AnswerShape::NotLeader,
        AnswerShape::HelloOk,
        AnswerShape::ReplicateOk,
        AnswerShape::ForwardCacheOk,
    ];
    for &code in PeerCode::ALL {
        all.push(AnswerShape::ForwardPublishError(code));
        all.push(AnswerShape::ReplicateError(code));
        all.push(AnswerShape::ForwardCacheError(code));
    }
    all
}

/// The kind table: which answer kinds each request allows, by number.
#[test]
fn families_allow_what_the_kind_table_lists_and_unsupported_kind_in_any_shape() {
    let number = |shape| match shape {
        AnswerShape::ForwardPublishOk => 2,
        AnswerShape::ForwardPublishError(_) => 3,
        AnswerShape::NotLeader => 4,
        AnswerShape::HelloOk => 6,
        AnswerShape::ReplicateOk => 8,
        AnswerShape::ReplicateError(_) => 9,
        AnswerShape::ForwardCacheOk => 12,
        AnswerShape::ForwardCacheError(_) => 13,
    };
    let table: [(Family, &[i32]); 5] = [
        (Family::Publish, &[2, 3, 4]),
        (Family::Cache, &[12, 13, 4]),
        (Family::ReplicateRecords, &[8, 9]),
        (Family::ReplicateControl, &[8, 9]),
        (Family::Hello, &[6, 3, 9, 13]),
    ];
    for (family, kinds) in table {
        for shape in shapes() {
            let is_unsupported = matches!(
                shape,
                AnswerShape::ForwardPublishError(PeerCode::UnsupportedKind)
                    | AnswerShape::ReplicateError(PeerCode::UnsupportedKind)
                    | AnswerShape::ForwardCacheError(PeerCode::UnsupportedKind)
            );
            assert_eq!(
                family.allows(shape),
                is_unsupported || kinds.contains(&number(shape)),
                "{family:?} {shape:?}"
            );
        }
    }
}

#[test]
fn a_late_or_repeated_answer_never_reaches_another_request() {
    let mut slots = Slots::new(1);
    let mut ids = Vec::new();
    for n in 0..1000u32 {
        let id = slots.reserve(n, Family::Publish, at(0)).unwrap();
        assert_ne!(id, CorrelationId(0), "0 belongs to the greeting");
        for &old in &ids {
            assert_eq!(slots.complete(old, OK), Completion::Late);
        }
        assert_eq!(slots.complete(id, OK), Completion::Matched(n));
        assert_eq!(slots.complete(id, OK), Completion::Late);
        ids.push(id);
        ids.dedup();
    }
    assert_eq!(slots.late_answers(), 1000 * 999 / 2 + 1000);
}

#[test]
fn a_foreign_family_is_a_violation_and_frees_the_slot() {
    let mut slots = Slots::new(1);
    let id = slots.reserve('a', Family::Publish, at(0)).unwrap();
    assert_eq!(
        slots.complete(id, AnswerShape::ReplicateOk),
        Completion::Violation('a')
    );
    assert_eq!(slots.violations(), 1);
    assert!(slots.is_empty());
}

#[test]
fn a_full_table_refuses_and_expiry_is_in_order_and_never_early() {
    let mut slots = Slots::new(3);
    let a = slots.reserve('a', Family::Publish, at(10)).unwrap();
    slots.reserve('b', Family::Publish, at(20)).unwrap();
    slots.reserve('c', Family::Publish, at(5)).unwrap();
    assert!(slots.is_full());
    assert_eq!(
        slots
            .reserve('d', Family::Publish, at(30))
            .unwrap_err()
            .capacity,
        3
    );
    assert_eq!(slots.next_deadline(), Some(at(10)));
    assert_eq!(slots.expire(at(9)).count(), 0);
    assert_eq!(slots.take(a), Some('a'));
    let expired: Vec<_> = slots.expire(at(20)).map(|(_, c)| c).collect();
    assert_eq!(expired, ['b', 'c'], "c counts as due with b, its elder");
    assert_eq!(slots.expired(), 2);
    assert_eq!(slots.next_deadline(), None);
}

#[derive(Debug, Clone, Copy)]
enum Op {
    Reserve,
    /// Answers the n-th id ever handed out, counted from the newest.
    Complete(usize),
    Take(usize),
    /// Lets time pass and expires.
    Expire(u64),
    FailAll,
}

const TIMEOUT: Duration = Duration::from_micros(3);

/// Runs the table beside a map that holds what must be in flight.
fn run(ops: &[Op], capacity: usize) {
    let mut slots = Slots::new(capacity);
    let mut model: HashMap<CorrelationId, (usize, MonoTime)> = HashMap::new();
    let mut issued: Vec<CorrelationId> = Vec::new();
    let mut now = at(0);
    for (step, &op) in ops.iter().enumerate() {
        match op {
            Op::Reserve => match slots.reserve(step, Family::Publish, now + TIMEOUT) {
                Ok(id) => {
                    assert!(model.len() < capacity);
                    assert!(!issued.contains(&id), "ids are never used twice");
                    issued.push(id);
                    model.insert(id, (step, now + TIMEOUT));
                }
                Err(_) => assert_eq!(model.len(), capacity),
            },
            Op::Complete(back) => {
                let Some(&id) = issued.iter().rev().nth(back) else {
                    continue;
                };
                let expected = match model.remove(&id) {
                    Some((context, _)) => Completion::Matched(context),
                    None => Completion::Late,
                };
                assert_eq!(slots.complete(id, OK), expected);
            }
            Op::Take(back) => {
                let Some(&id) = issued.iter().rev().nth(back) else {
                    continue;
                };
                assert_eq!(slots.take(id), model.remove(&id).map(|(c, _)| c));
            }
            Op::Expire(micros) => {
                now = now + Duration::from_micros(micros);
                let got: Vec<_> = slots.expire(now).collect();
                let due = model.values().filter(|(_, d)| *d <= now).count();
                assert_eq!(got.len(), due);
                for (id, context) in got {
                    assert_eq!(model.remove(&id).map(|(c, _)| c), Some(context));
                }
            }
            Op::FailAll => {
                let got: Vec<_> = slots.fail_all().map(|(_, c)| c).collect();
                let mut expected: Vec<_> = model.drain().map(|(_, (c, _))| c).collect();
                expected.sort_unstable();
                assert_eq!(got, expected, "oldest first");
            }
        }
        assert_eq!(slots.len(), model.len());
        let oldest = model.values().map(|(_, d)| *d).min();
        assert_eq!(slots.next_deadline(), oldest);
    }
}

#[test]
fn every_sequence_of_seven_inputs_agrees_with_the_model() {
    let alphabet = [
        Op::Reserve,
        Op::Complete(0),
        Op::Complete(1),
        Op::Take(2),
        Op::Expire(2),
        Op::FailAll,
    ];
    let mut ops = [Op::Reserve; 7];
    for code in 0..alphabet.len().pow(7) {
        let mut rest = code;
        for op in &mut ops {
            *op = alphabet[rest % alphabet.len()];
            rest /= alphabet.len();
        }
        run(&ops, 2);
    }
}

proptest! {
    #[test]
    fn long_random_sequences_agree_with_the_model(
        ops in prop::collection::vec(
            prop_oneof![
                4 => Just(Op::Reserve),
                3 => (0usize..12).prop_map(Op::Complete),
                1 => (0usize..12).prop_map(Op::Take),
                1 => (0u64..4).prop_map(Op::Expire),
                1 => Just(Op::FailAll),
            ],
            1..300,
        ),
        capacity in 1usize..20,
    ) {
        run(&ops, capacity);
    }
}
