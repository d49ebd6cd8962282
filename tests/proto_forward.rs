//! The retry table of a forwarded request, row by row, and simulated owners that answer anything.

use std::collections::HashSet;
use std::time::Duration;

use felix_uring::ids::{Generation, NodeId, Offset};
use felix_uring::proto::forward::{Forward, ForwardLimits, ForwardOp, Step};
use felix_uring::proto::outcome::{
    Appended, ForwardKind, IndeterminateCause, NotLeader, NotSentCause, Outcome, PeerCode,
    PeerError, Refused, RetryClass, SendResult, Target, UnknownCause,
};
use felix_uring::proto::MonoTime;
use proptest::prelude::*;

type R = Appended;
const REPLY: Appended = Appended {
    first: Offset(3),
    last: Offset(4),
};

fn target(node: &str, generation: u64) -> Target {
    Target {
        node: NodeId::new(node).unwrap(),
        generation: Generation(generation),
    }
}

fn not_leader(node: &str, generation: u64) -> SendResult<R> {
    SendResult::NotLeader(NotLeader {
        owner: target(node, generation),
        internal_addr: "192.0.2.1:7000".into(),
    })
}

fn error(code: PeerCode) -> SendResult<R> {
    SendResult::Error(PeerError::bare(code))
}

fn start(op: ForwardOp) -> (Forward, Step<R>) {
    Forward::start(op, target("b", 5), MonoTime::ZERO, ForwardLimits::default())
}

/// Gives the first attempt `result` at time 0 and returns what follows.
fn after(op: ForwardOp, sent_as: ForwardKind, result: SendResult<R>) -> (Forward, Step<R>) {
    let (mut forward, first) = start(op);
    assert_eq!(
        first,
        Step::Send {
            target: target("b", 5),
            kind: ForwardKind::Authorized
        }
    );
    let step = forward.on_result(MonoTime::ZERO, sent_as, result);
    (forward, step)
}

#[derive(Debug, PartialEq, Clone, Copy)]
enum Row {
    Done,
    RetrySameLater,
    FollowRedirect,
    Fallback,
    RefusedFatal,
    RefusedRetry,
    Indeterminate,
}

fn classify(step: &Step<R>) -> Row {
    match step {
        Step::WaitUntil(_) => Row::RetrySameLater,
        Step::Send {
            kind: ForwardKind::Legacy,
            ..
        } => Row::Fallback,
        Step::Send { .. } => Row::FollowRedirect,
        Step::Finish(Outcome::Done { .. }) => Row::Done,
        Step::Finish(Outcome::Refused(refused)) => match refused.retry_class() {
            RetryClass::Fatal => Row::RefusedFatal,
            RetryClass::Retry | RetryClass::RetryAfter | RetryClass::Redirect => Row::RefusedRetry,
            RetryClass::OutcomeUnknown => panic!("a refusal must not claim to be unknown"),
        },
        Step::Finish(Outcome::Indeterminate(_)) => Row::Indeterminate,
        Step::Nothing => panic!("no answer to a result"),
    }
}

/// The table of the protocol document, extended by the rules for cache operations.
#[test]
fn every_row_of_the_retry_table() {
    use ForwardKind::{Authorized, Legacy};
    use PeerCode::*;
    let unknown = SendResult::<R>::Unknown;
    let not_sent = SendResult::<R>::NotSent;
    let soon = MonoTime::from_micros(20_000);
    let late = MonoTime::from_micros(2_000_000);
    for op in ForwardOp::ALL {
        let resendable = matches!(
            op,
            ForwardOp::CacheGet | ForwardOp::CacheDelete | ForwardOp::CounterGet
        );
        let lost = match resendable {
            true => Row::RetrySameLater,
            false => Row::Indeterminate,
        };
        let rows: Vec<(ForwardKind, SendResult<R>, Row)> = vec![
            (Authorized, SendResult::Ok(REPLY), Row::Done),
            (
                Authorized,
                not_sent(NotSentCause::InFlightFull),
                Row::RetrySameLater,
            ),
            (
                Authorized,
                not_sent(NotSentCause::Unreachable),
                Row::RetrySameLater,
            ),
            (
                Authorized,
                not_sent(NotSentCause::Draining),
                Row::RetrySameLater,
            ),
            (
                Authorized,
                not_sent(NotSentCause::UnknownPeer),
                Row::RetrySameLater,
            ),
            (
                Authorized,
                not_sent(NotSentCause::Backoff { until: soon }),
                Row::RetrySameLater,
            ),
            (
                Authorized,
                not_sent(NotSentCause::Backoff { until: late }),
                Row::RefusedRetry,
            ),
            (
                Authorized,
                not_sent(NotSentCause::Unencodable),
                Row::RefusedFatal,
            ),
            (Authorized, not_leader("c", 6), Row::FollowRedirect),
            (Authorized, not_leader("c", 5), Row::FollowRedirect),
            (Authorized, not_leader("b", 6), Row::FollowRedirect),
            (Authorized, not_leader("b", 5), Row::RefusedRetry),
            (Authorized, not_leader("c", 4), Row::RetrySameLater),
            (Authorized, error(StaleRoute), Row::RetrySameLater),
            (Authorized, error(Unavailable), Row::RetrySameLater),
            (Authorized, error(Overload), Row::RetrySameLater),
            (Authorized, error(Unauthorized), Row::RefusedFatal),
            (Authorized, error(Malformed), Row::RefusedFatal),
            (Authorized, error(ProtocolVersion), Row::RefusedFatal),
            (Authorized, error(StorageFailed), Row::Indeterminate),
            (Authorized, error(LogGap), Row::Indeterminate),
            (Authorized, error(LogConflict), Row::Indeterminate),
            (Authorized, error(FencedEpoch), Row::Indeterminate),
            (Authorized, error(UnsupportedKind), Row::Fallback),
            (Legacy, error(UnsupportedKind), Row::RefusedFatal),
            (Authorized, unknown(UnknownCause::Disconnect), lost),
            (Authorized, unknown(UnknownCause::Timeout), lost),
            (Authorized, unknown(UnknownCause::ProtocolViolation), lost),
        ];
        for (sent_as, result, expected) in rows {
            let (_, step) = after(op, sent_as, result.clone());
            assert_eq!(classify(&step), expected, "{op:?} {sent_as:?} {result:?}");
        }
    }
}

#[test]
fn a_success_names_the_owner_that_answered() {
    let (mut forward, _) = after(
        ForwardOp::Publish,
        ForwardKind::Authorized,
        not_leader("c", 6),
    );
    assert_eq!(
        forward.on_result(
            MonoTime::ZERO,
            ForwardKind::Authorized,
            SendResult::Ok(REPLY)
        ),
        Step::Finish(Outcome::Done {
            reply: REPLY,
            owner: target("c", 6)
        })
    );
}

#[test]
fn the_legacy_fallback_happens_once_per_request() {
    let unsupported = || error(PeerCode::UnsupportedKind);
    let (mut forward, step) = after(ForwardOp::Publish, ForwardKind::Authorized, unsupported());
    assert_eq!(classify(&step), Row::Fallback);
    let step = forward.on_result(MonoTime::ZERO, ForwardKind::Legacy, not_leader("c", 6));
    assert_eq!(
        step,
        Step::Send {
            target: target("c", 6),
            kind: ForwardKind::Authorized
        },
        "another broker is asked properly first"
    );
    let step = forward.on_result(MonoTime::ZERO, ForwardKind::Authorized, unsupported());
    assert_eq!(classify(&step), Row::RefusedFatal);
}

#[test]
fn two_brokers_that_point_at_each_other_end_as_a_loop() {
    let (mut forward, _) = after(
        ForwardOp::Publish,
        ForwardKind::Authorized,
        not_leader("c", 5),
    );
    let step = forward.on_result(MonoTime::ZERO, ForwardKind::Authorized, not_leader("b", 5));
    assert_eq!(
        step,
        Step::Finish(Outcome::Refused(Refused::RedirectLoop(target("b", 5))))
    );
}

#[test]
fn a_broker_that_was_never_written_to_may_be_redirected_to() {
    let (mut forward, step) = after(
        ForwardOp::Publish,
        ForwardKind::Authorized,
        SendResult::NotSent(NotSentCause::Unreachable),
    );
    let Step::WaitUntil(until) = step else {
        panic!("{step:?}")
    };
    let step: Step<R> = forward.on_time(until, Some(&target("c", 6)));
    assert!(matches!(step, Step::Send { .. }), "newer route is taken");
    assert_eq!(forward.target(), &target("c", 6));
    let step = forward.on_result(until, ForwardKind::Authorized, not_leader("b", 6));
    assert_eq!(classify(&step), Row::FollowRedirect);
}

#[test]
fn an_older_or_equal_route_changes_nothing_and_a_new_one_ends_the_wait() {
    let refused = || error(PeerCode::Unavailable);
    let (mut forward, step) = after(ForwardOp::Publish, ForwardKind::Authorized, refused());
    let Step::WaitUntil(until) = step else {
        panic!("{step:?}")
    };
    let early: Step<R> = forward.on_route_changed(MonoTime::from_micros(1), &target("c", 5));
    assert_eq!(early, Step::Nothing);
    let moved: Step<R> = forward.on_route_changed(MonoTime::from_micros(1), &target("c", 6));
    assert_eq!(classify(&moved), Row::FollowRedirect);
    assert!(MonoTime::from_micros(1) < until);
}

#[test]
fn a_delete_that_may_have_been_applied_is_never_reported_as_refused() {
    let (mut forward, step) = after(
        ForwardOp::CacheDelete,
        ForwardKind::Authorized,
        SendResult::Unknown(UnknownCause::Disconnect),
    );
    let Step::WaitUntil(until) = step else {
        panic!("{step:?}")
    };
    assert!(matches!(
        forward.on_time::<R>(until, None),
        Step::Send { .. }
    ));
    assert_eq!(
        forward.on_result(
            until,
            ForwardKind::Authorized,
            error(PeerCode::Unauthorized)
        ),
        Step::Finish(Outcome::Indeterminate(IndeterminateCause::Unknown(
            UnknownCause::Disconnect
        )))
    );
}

#[test]
fn a_read_may_be_refused_after_a_lost_answer() {
    let (mut forward, step) = after(
        ForwardOp::CacheGet,
        ForwardKind::Authorized,
        SendResult::Unknown(UnknownCause::Disconnect),
    );
    let Step::WaitUntil(until) = step else {
        panic!("{step:?}")
    };
    assert!(matches!(
        forward.on_time::<R>(until, None),
        Step::Send { .. }
    ));
    let step = forward.on_result(
        until,
        ForwardKind::Authorized,
        error(PeerCode::Unauthorized),
    );
    assert_eq!(classify(&step), Row::RefusedFatal);
}

/// An owner that holds a request while its shard moves does not use up the span.
#[test]
fn a_hold_is_not_counted_against_the_span_up_to_its_allowance() {
    for (held_ms, follows) in [(100, true), (1_900, true), (2_240, true), (2_300, false)] {
        let (mut forward, _) = start(ForwardOp::Publish);
        let now = MonoTime::ZERO + Duration::from_millis(held_ms);
        let step = forward.on_result(now, ForwardKind::Authorized, not_leader("c", 6));
        let expected = match follows {
            true => Row::FollowRedirect,
            false => Row::RefusedRetry,
        };
        assert_eq!(classify(&step), expected, "held {held_ms} ms");
    }
}

#[test]
fn early_timers_and_repeated_results_change_nothing() {
    let (mut forward, step) = after(
        ForwardOp::Publish,
        ForwardKind::Authorized,
        error(PeerCode::Overload),
    );
    let Step::WaitUntil(until) = step else {
        panic!("{step:?}")
    };
    let repeated = forward.on_result(
        MonoTime::ZERO,
        ForwardKind::Authorized,
        SendResult::Ok(REPLY),
    );
    assert_eq!(repeated, Step::Nothing);
    assert_eq!(
        forward.on_time::<R>(MonoTime::ZERO, None),
        Step::WaitUntil(until)
    );
    assert!(matches!(
        forward.on_time::<R>(until, None),
        Step::Send { .. }
    ));
    assert_eq!(forward.on_time::<R>(until, None), Step::Nothing);
}

/// What a simulated owner does with an attempt, beside whether it really applied it.
fn answer(choice: u8, applied: bool) -> (SendResult<R>, bool) {
    let nodes = ["b", "c", "d", "e"];
    match choice {
        0 => (SendResult::Ok(REPLY), true),
        1 => (SendResult::NotSent(NotSentCause::InFlightFull), false),
        2 => (SendResult::NotSent(NotSentCause::Unreachable), false),
        3 => (SendResult::Unknown(UnknownCause::Disconnect), applied),
        4 => (SendResult::Unknown(UnknownCause::Timeout), applied),
        5 => (error(PeerCode::StorageFailed), applied),
        6..=16 => (error(PeerCode::ALL[usize::from(choice) - 6]), false),
        n => {
            let n = usize::from(n) - 17;
            (not_leader(nodes[n % 4], 4 + (n / 4) as u64), false)
        }
    }
}

struct Trace {
    sends: Vec<(Target, ForwardKind, MonoTime, SendResult<R>)>,
    outcome: Outcome<R>,
    times_applied: u32,
}

fn simulate(op: ForwardOp, script: &[(u8, bool, u16)]) -> Trace {
    let (mut forward, mut step) = start(op);
    let mut now = MonoTime::ZERO;
    let mut script = script.iter().copied().cycle();
    let mut sends = Vec::new();
    let mut times_applied = 0;
    for _ in 0..1000 {
        step = match step {
            Step::Send { target, kind } => {
                let (choice, applied, delay_ms) = script.next().unwrap();
                let (result, applied) = answer(choice, applied);
                times_applied += u32::from(applied);
                sends.push((target, kind, now, result.clone()));
                now = now + Duration::from_millis(u64::from(delay_ms));
                forward.on_result(now, kind, result)
            }
            Step::WaitUntil(until) => {
                assert!(until >= now);
                now = until;
                forward.on_time(now, None)
            }
            Step::Finish(outcome) => {
                let again = forward.on_result(now, ForwardKind::Authorized, SendResult::Ok(REPLY));
                assert_eq!(again, Step::Nothing, "FWD-1");
                assert_eq!(forward.on_time::<R>(now, None), Step::Nothing, "FWD-1");
                assert!(forward.is_finished());
                return Trace {
                    sends,
                    outcome,
                    times_applied,
                };
            }
            Step::Nothing => panic!("stuck"),
        };
    }
    panic!("no end within 1000 steps");
}

fn check(op: ForwardOp, trace: &Trace) {
    let limits = ForwardLimits::default();
    assert!(
        trace.sends.len() <= usize::from(limits.max_attempts),
        "FWD-3"
    );
    let bound = MonoTime::ZERO + limits.span + limits.hold_allowance;
    assert!(
        trace.sends.iter().all(|(_, _, at, _)| *at <= bound),
        "FWD-3"
    );
    let doubtful = |result: &SendResult<R>| {
        matches!(result, SendResult::Unknown(_))
            || matches!(result, SendResult::Error(e) if e.code == PeerCode::StorageFailed)
    };
    let first_doubt = trace.sends.iter().position(|(_, _, _, r)| doubtful(r));
    if let Some(first) = first_doubt {
        if !op.is_resendable() {
            assert_eq!(first + 1, trace.sends.len(), "FWD-2: sent again");
            assert!(trace.times_applied <= 1, "FWD-2: applied twice");
        }
    }
    match &trace.outcome {
        Outcome::Done { .. } => {}
        Outcome::Refused(refused) => {
            assert_ne!(refused.retry_class(), RetryClass::OutcomeUnknown);
            assert!(
                !op.is_write() || trace.times_applied == 0,
                "reported as refused, was applied"
            );
        }
        Outcome::Indeterminate(_) => {}
    }
    // FWD-4: a send that follows a redirect goes to a pair nothing was written to before.
    let mut written = HashSet::new();
    for pair in trace.sends.windows(2) {
        let (asked, _, _, result) = &pair[0];
        if !matches!(result, SendResult::NotSent(_)) {
            written.insert(asked.clone());
        }
        if pair[1].0 != *asked {
            assert!(!written.contains(&pair[1].0), "FWD-4");
        }
    }
    let legacy = trace.sends.iter().filter(|s| s.1 == ForwardKind::Legacy);
    let fallbacks = trace
        .sends
        .windows(2)
        .filter(|w| w[0].1 == ForwardKind::Authorized && w[1].1 == ForwardKind::Legacy);
    assert!(fallbacks.count() <= 1);
    assert!(legacy.count() <= usize::from(limits.max_attempts));
}

/// Every owner behaviour for the first three attempts, for every operation.
#[test]
fn every_sequence_of_three_answers_keeps_the_invariants() {
    for op in ForwardOp::ALL {
        for a in 0..33 {
            for b in 0..33 {
                for c in 0..33 {
                    let script = [(a, true, 1), (b, false, 1), (c, true, 1)];
                    check(op, &simulate(op, &script));
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn random_owners_keep_the_invariants(
        op in 0usize..6,
        script in prop::collection::vec((0u8..33, any::<bool>(), 0u16..6000), 1..8),
    ) {
        let op = ForwardOp::ALL[op];
        check(op, &simulate(op, &script));
    }
}
