//! The greeting, both sides, over every short sequence of inputs.

use std::time::Duration;

use felix_uring::ids::{CorrelationId, NodeId};
use felix_uring::proto::backoff::Severity;
use felix_uring::proto::correlation::AnswerShape;
use felix_uring::proto::handshake::{
    CloseCause, CloseReason, DiallerHandshake, DiallerStep, HandshakeFailure, Incoming,
    ListenerAction, ListenerHandshake, PeerIdentity, StreamPlace, HELLO_CORRELATION,
};
use felix_uring::proto::outcome::PeerCode;
use felix_uring::proto::MonoTime;

const TIMEOUT: Duration = Duration::from_secs(2);

fn node(name: &str) -> NodeId {
    NodeId::new(name).unwrap()
}

fn at_ms(ms: u64) -> MonoTime {
    MonoTime::from_micros(ms * 1000)
}

fn listener(identity: PeerIdentity) -> ListenerHandshake {
    ListenerHandshake::new(node("b"), identity, MonoTime::ZERO, TIMEOUT)
}

fn certified(names: &[&str]) -> PeerIdentity {
    PeerIdentity::Certified(names.iter().map(|n| n.to_string()).collect())
}

const ID: CorrelationId = CorrelationId(77);

fn hello(node_id: &str) -> Incoming<'_> {
    Incoming::Hello {
        correlation: ID,
        node_id,
    }
}

fn greeted() -> ListenerAction {
    ListenerAction::Greet {
        correlation: ID,
        node_id: node("b"),
    }
}

#[derive(Debug, Clone, Copy)]
enum Input {
    Hello(StreamPlace, &'static str),
    UndecodableHello,
    Request(StreamPlace),
    UnknownKind,
    Answer,
    Deadline,
}

/// Who the listener takes the peer for, as plain facts, beside the real machine.
#[derive(Default)]
struct Model {
    peer: Option<&'static str>,
    closed: bool,
}

/// The rules in words, for a peer whose certificate carries "a" and "a2".
fn expected(model: &mut Model, input: Input) -> Option<ListenerAction> {
    use StreamPlace::Later;
    let refuse = |code, detail| {
        Some(ListenerAction::Refuse {
            correlation: ID,
            code,
            detail,
        })
    };
    if let Input::Deadline = input {
        if model.closed || model.peer.is_some() {
            return None;
        }
        model.closed = true;
        return Some(ListenerAction::Close {
            reason: CloseReason::GreetingTimeout,
        });
    }
    if model.closed {
        return Some(ListenerAction::Ignore);
    }
    if model.peer.is_none() && matches!(input, Input::Hello(Later, _) | Input::Request(Later)) {
        return Some(ListenerAction::Hold);
    }
    match input {
        Input::Hello(_, "") => refuse(PeerCode::Malformed, "node id is empty"),
        Input::Hello(_, name) => {
            let reason = match (name, model.peer) {
                ("a" | "a2", None) => None,
                ("a" | "a2", Some(peer)) if peer == name => None,
                ("a" | "a2", Some(_)) => Some(CloseReason::NameChanged),
                _ => Some(CloseReason::NameNotInCertificate),
            };
            match reason {
                None => {
                    model.peer = Some(name);
                    Some(greeted())
                }
                Some(reason) => {
                    model.closed = true;
                    Some(ListenerAction::RefuseAndClose {
                        correlation: ID,
                        code: PeerCode::Unauthorized,
                        reason,
                    })
                }
            }
        }
        Input::UndecodableHello => refuse(PeerCode::Malformed, "hello"),
        Input::UnknownKind => refuse(PeerCode::UnsupportedKind, "unknown kind"),
        Input::Answer => Some(ListenerAction::Drop),
        Input::Request(_) if model.peer.is_some() => Some(ListenerAction::Deliver),
        Input::Request(_) => {
            model.closed = true;
            Some(ListenerAction::Close {
                reason: CloseReason::RequestBeforeHello,
            })
        }
        Input::Deadline => None,
    }
}

fn apply(machine: &mut ListenerHandshake, input: Input) -> Option<ListenerAction> {
    let first = StreamPlace::First;
    let frame = match input {
        Input::Deadline => return machine.on_time(at_ms(2000)),
        Input::Hello(place, name) => return Some(machine.on_frame(place, hello(name))),
        Input::Request(place) => return Some(machine.on_frame(place, Incoming::Request)),
        Input::UndecodableHello => Incoming::UndecodableHello { correlation: ID },
        Input::UnknownKind => Incoming::UnknownKind { correlation: ID },
        Input::Answer => Incoming::Answer,
    };
    Some(machine.on_frame(first, frame))
}

#[test]
fn every_sequence_of_five_inputs_follows_the_rules() {
    use StreamPlace::{First, Later};
    let alphabet = [
        Input::Hello(First, "a"),
        Input::Hello(Later, "a"),
        Input::Hello(First, "a2"),
        Input::Hello(First, "x"),
        Input::Hello(First, ""),
        Input::UndecodableHello,
        Input::Request(First),
        Input::Request(Later),
        Input::UnknownKind,
        Input::Answer,
        Input::Deadline,
    ];
    const LENGTH: u32 = 5;
    for code in 0..alphabet.len().pow(LENGTH) {
        let mut machine = listener(certified(&["a", "a2"]));
        let mut model = Model::default();
        let mut rest = code;
        let mut sequence = Vec::new();
        for _ in 0..LENGTH {
            let input = alphabet[rest % alphabet.len()];
            rest /= alphabet.len();
            sequence.push(input);
            let want = expected(&mut model, input);
            assert_eq!(apply(&mut machine, input), want, "{sequence:?}");
            let open_peer = model.peer.filter(|_| !model.closed);
            assert_eq!(machine.peer(), open_peer, "{sequence:?}");
            assert_eq!(machine.is_greeted(), open_peer.is_some());
        }
    }
}

#[test]
fn names_are_compared_as_dns_names_and_wildcards_do_not_count() {
    for (names, claimed, good) in [
        (&["node-1.felix"][..], "node-1.felix", true),
        (&["NODE-1.Felix"], "node-1.felix", true),
        (&["*.felix"], "node-1.felix", false),
        (&["node-1.felix", "node-2.felix"], "node-2.felix", true),
        (&["node-1.felix.evil"], "node-1.felix", false),
        (&[], "node-1.felix", false),
    ] {
        let mut machine = listener(certified(names));
        let action = machine.on_frame(StreamPlace::First, hello(claimed));
        assert_eq!(action == greeted(), good, "{names:?} {claimed}");
    }
}

#[test]
fn without_authentication_any_name_but_the_empty_one_greets() {
    for name in ["a", "not_a_dns_name", "b"] {
        let mut machine = listener(PeerIdentity::Unauthenticated);
        let action = machine.on_frame(StreamPlace::First, hello(name));
        assert_eq!(action, greeted());
        assert_eq!(machine.peer(), Some(name));
    }
}

#[test]
fn dropped_answers_are_counted_and_the_deadline_is_exact() {
    let mut machine = listener(PeerIdentity::Unauthenticated);
    for _ in 0..3 {
        machine.on_frame(StreamPlace::First, Incoming::Answer);
    }
    assert_eq!(machine.dropped_answers(), 3);
    assert_eq!(machine.deadline(), Some(at_ms(2000)));
    assert_eq!(machine.on_time(at_ms(1999)), None);
    machine.on_frame(StreamPlace::First, hello("a"));
    assert_eq!(machine.deadline(), None);
    assert_eq!(machine.on_time(at_ms(2000)), None);
}

fn dialler() -> DiallerHandshake {
    DiallerHandshake::new(node("b"), MonoTime::ZERO, TIMEOUT)
}

fn failed(step: DiallerStep) -> HandshakeFailure {
    match step {
        DiallerStep::Failed(failure) => failure,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_link_is_up_only_after_the_broker_dialled_has_answered() {
    let mut machine = dialler();
    assert_eq!(
        machine.on_hello_ok(CorrelationId(5), "b"),
        DiallerStep::Wait,
        "not the answer to our Hello"
    );
    assert_eq!(machine.on_hello_ok(HELLO_CORRELATION, "b"), DiallerStep::Up);
    let wrong = failed(dialler().on_hello_ok(HELLO_CORRELATION, "c"));
    assert_eq!(
        wrong,
        HandshakeFailure::WrongNode {
            dialled: node("b"),
            answered: "c".into()
        }
    );
    assert!(wrong.doubts_address());
    assert_eq!(wrong.severity(), Severity::Refused);
}

#[test]
fn any_error_in_any_shape_refuses_the_greeting() {
    for &code in PeerCode::ALL {
        for shape in [
            AnswerShape::ForwardPublishError(code),
            AnswerShape::ReplicateError(code),
            AnswerShape::ForwardCacheError(code),
        ] {
            let failure = failed(dialler().on_answer(HELLO_CORRELATION, shape, "why"));
            let severity = match code {
                PeerCode::Unauthorized => Severity::Refused,
                _ => Severity::Passing,
            };
            assert_eq!(failure.severity(), severity);
            assert_eq!(
                failure,
                HandshakeFailure::Refused {
                    code,
                    detail: "why".into()
                }
            );
        }
    }
    for shape in [
        AnswerShape::ForwardPublishOk,
        AnswerShape::NotLeader,
        AnswerShape::ReplicateOk,
        AnswerShape::ForwardCacheOk,
    ] {
        let failure = failed(dialler().on_answer(HELLO_CORRELATION, shape, ""));
        assert_eq!(failure, HandshakeFailure::ProtocolViolation);
    }
}

#[test]
fn certificate_refusals_wait_long_and_other_ends_do_not() {
    for (cause, severity) in [
        (CloseCause::CertificateRefused, Severity::Refused),
        (CloseCause::PeerCertificateInvalid, Severity::Refused),
        (CloseCause::NoCommonProtocol, Severity::Refused),
        (CloseCause::TimedOut, Severity::Passing),
        (CloseCause::ClosedByPeer, Severity::Passing),
        (CloseCause::Transport, Severity::Passing),
    ] {
        assert_eq!(failed(dialler().on_closed(cause)).severity(), severity);
    }
}

/// Whatever comes in whatever order: at most one end, and silence after it.
#[test]
fn every_sequence_of_six_inputs_ends_at_most_once() {
    let inputs: [fn(&mut DiallerHandshake) -> DiallerStep; 8] = [
        |m| m.on_hello_ok(HELLO_CORRELATION, "b"),
        |m| m.on_hello_ok(HELLO_CORRELATION, "c"),
        |m| m.on_hello_ok(CorrelationId(9), "b"),
        |m| {
            let refused = AnswerShape::ForwardPublishError(PeerCode::Unauthorized);
            m.on_answer(HELLO_CORRELATION, refused, "")
        },
        |m| m.on_unreadable(),
        |m| m.on_closed(CloseCause::ClosedByPeer),
        |m| m.on_time(at_ms(1999)),
        |m| m.on_time(at_ms(2000)),
    ];
    for code in 0..inputs.len().pow(6) {
        let mut machine = dialler();
        let mut rest = code;
        let mut ended = false;
        for _ in 0..6 {
            let index = rest % inputs.len();
            rest /= inputs.len();
            let step = inputs[index](&mut machine);
            let ends = !ended && index != 2 && index != 6;
            assert_eq!(step != DiallerStep::Wait, ends, "{code}");
            assert_eq!(step == DiallerStep::Up, ends && index == 0);
            ended |= ends;
            assert_eq!(machine.deadline().is_none(), ended);
        }
    }
}
