//! Which answers belong to which requests, and in which shape requests are refused.

use felix_uring::ids::{CorrelationId, Offset};
use felix_uring::wire::internal::{
    decode_frame, on_answer_event, on_request_event, refusal, unsupported_kind_refusal,
    AnswerFault, ErrorCode, Inbound, Kind, Message, ReadEvent, Retry, Role,
};

use crate::vectors::{frame_of, lines};

/// One message of every kind.
fn samples() -> Vec<Message> {
    let mut samples: Vec<Message> = Vec::new();
    for vector in lines("internal-valid.jsonl") {
        let message = decode_frame(frame_of(&vector)).expect("valid");
        if samples.iter().all(|sample| sample.kind() != message.kind())
            && message.error_code() != Some(ErrorCode::UnsupportedKind)
        {
            samples.push(message);
        }
    }
    assert_eq!(samples.len(), Kind::ALL.len());
    samples
}

#[test]
fn answers_belong_to_the_requests_the_protocol_names() {
    for answer in samples() {
        for request in Kind::ALL {
            let code = answer.kind().code();
            let allowed = match request.code() {
                1 | 22 => [2, 3, 4].contains(&code),
                // An error of any shape is a failed handshake.
                5 => [6, 3, 9, 13].contains(&code),
                7 | 10 | 14..=21 | 24 => [8, 9].contains(&code),
                11 | 23 => [12, 13, 4].contains(&code),
                _ => false,
            };
            assert_eq!(
                answer.may_answer(*request),
                allowed,
                "{code} to {request:?}"
            );
        }
    }
}

#[test]
fn unsupported_kind_may_come_in_any_shape() {
    for shape in [
        Kind::ForwardPublish,
        Kind::ForwardCacheOp,
        Kind::ReplicateRecords,
    ] {
        let answer = refusal(
            shape,
            CorrelationId(1),
            ErrorCode::UnsupportedKind,
            Offset(0),
            "",
        );
        let other = refusal(shape, CorrelationId(1), ErrorCode::Malformed, Offset(0), "");
        for request in Kind::ALL.iter().filter(|kind| kind.role() == Role::Request) {
            assert!(answer.may_answer(*request));
            let same_family = refusal(
                *request,
                CorrelationId(1),
                ErrorCode::Malformed,
                Offset(0),
                "",
            )
            .kind()
                == other.kind();
            assert_eq!(
                other.may_answer(*request),
                same_family || *request == Kind::Hello,
                "{shape:?} to {request:?}"
            );
        }
    }
    let answer = unsupported_kind_refusal(CorrelationId(7), 27);
    assert_eq!(answer.kind(), Kind::ForwardPublishError);
    assert!(answer.may_answer(Kind::Hello) && !answer.may_answer(Kind::HelloOk));
}

#[test]
fn each_side_takes_only_what_the_other_may_send() {
    for vector in lines("internal-valid.jsonl") {
        let frame = frame_of(&vector);
        let message = decode_frame(frame.clone()).expect("valid");
        let kind = message.kind();
        let event = ReadEvent::Frame {
            kind,
            body: frame.slice(12..),
        };
        match kind.role() {
            Role::Request => {
                assert_eq!(on_request_event(event.clone()), Inbound::Request(message));
                assert_eq!(on_answer_event(event), Err(AnswerFault::Request { kind }));
            }
            Role::Answer => {
                assert_eq!(
                    on_request_event(event.clone()),
                    Inbound::StrayAnswer { kind }
                );
                assert_eq!(on_answer_event(event), Ok(message));
            }
        }
    }
    let unknown = ReadEvent::Unknown {
        kind: 39,
        correlation: CorrelationId(1),
    };
    assert!(matches!(
        on_answer_event(unknown),
        Err(AnswerFault::Unreadable(_))
    ));
}

#[test]
fn retry_advice_follows_the_error_table() {
    for code in ErrorCode::ALL {
        let expected = match code.code() {
            1 => Retry::Shortly,
            2 | 4 => Retry::WithBackoff,
            8 => Retry::FromExpectedOffset,
            11 => Retry::WithAnotherKind,
            _ => Retry::Never,
        };
        assert_eq!(code.retry(), expected, "{code:?}");
        assert_eq!(ErrorCode::from_code(code.code()), Some(*code));
    }
}
