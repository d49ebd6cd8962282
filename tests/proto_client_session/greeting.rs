//! How a stream begins, and what a broker that stops says.

use super::*;

#[test]
fn a_client_that_sent_flags_gets_auth_ok_and_another_gets_ok() {
    for (flags, negotiates) in [(Some(0), true), (None, false)] {
        let mut session = new_stream(StreamDirection::Bidirectional);
        session.on_frame(now(), Incoming::Auth(offer(flags, 0)));
        session.on_verified(&server(), Ok(()));
        let answer = drain(&mut session).pop();
        let is_auth_ok = matches!(
            answer,
            Some(StreamAction::Write(Reply::Answer(Answer::AuthOk(_))))
        );
        let is_ok = matches!(
            answer,
            Some(StreamAction::Write(Reply::Answer(Answer::PlainOk(_))))
        );
        assert_eq!((is_auth_ok, is_ok), (negotiates, !negotiates));
    }
}

#[test]
fn a_refused_token_is_told_with_its_code_and_ends_the_stream() {
    let mut session = new_stream(StreamDirection::Bidirectional);
    session.on_frame(now(), Incoming::Auth(full_offer()));
    let refusal = Refusal::new(ErrorCode::Unauthenticated, "expired");
    session.on_verified(&server(), Err(refusal));
    refused_and_ended(&drain(&mut session), "unauthenticated");
    assert!(session.is_ended());
}

#[test]
fn codes_go_only_to_clients_that_offered_to_read_them() {
    let mut session = new_stream(StreamDirection::Bidirectional);
    session.on_frame(now(), Incoming::Auth(offer(Some(CLIENT_FLAGS), 0)));
    let refusal = Refusal::new(ErrorCode::Unauthenticated, "expired");
    session.on_verified(&server(), Err(refusal));
    assert_eq!(error_of(&drain(&mut session)[0]), (None, None));
}

#[test]
fn anything_before_auth_and_a_second_auth_end_the_stream() {
    for frame in [
        Incoming::Publish(BINARY),
        Incoming::Request(Requested::Repeated),
        Incoming::Unreadable { why: "x".into() },
    ] {
        let mut session = new_stream(StreamDirection::Bidirectional);
        assert_eq!(session.on_frame(now(), frame), Verdict::Dropped);
        let actions = drain(&mut session);
        assert_eq!(error_of(&actions[0]).0, None, "nothing was offered yet");
        assert_eq!(
            actions[1..],
            [StreamAction::Finish, StreamAction::StopReading]
        );
    }
    let mut session = open();
    session.on_frame(now(), Incoming::Auth(full_offer()));
    refused_and_ended(&drain(&mut session), "invalid_request");
}

#[test]
fn a_draining_broker_refuses_new_streams_and_new_work_and_answers_the_old() {
    let mut session = new_stream(StreamDirection::Bidirectional);
    session.begin_drain();
    let verdict = session.on_frame(now(), Incoming::Auth(full_offer()));
    assert_eq!(verdict, Verdict::Dropped);
    refused_and_ended(&drain(&mut session), "draining");

    let mut session = open();
    let id = publish(&mut session, BINARY);
    session.begin_drain();
    assert_eq!(
        session.on_frame(now(), Incoming::Publish(JSON)),
        Verdict::Dropped
    );
    session.on_frame(now(), Incoming::Request(Requested::Repeated));
    session.settle(id, written(4));
    let actions = drain(&mut session);
    assert!(matches!(
        &actions[0],
        StreamAction::Write(Reply::Answer(Answer::PublishErrorAnswer(e))) if e.request_id == 8
    ));
    assert_eq!(
        error_of(&actions[1]),
        (Some("draining".into()), Some(RetryClass::Retry))
    );
    assert!(matches!(
        &actions[2],
        StreamAction::Write(Reply::Ack(ack)) if ack.request_id == 7
    ));
}
