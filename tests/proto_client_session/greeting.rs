//! How a stream begins, what is refused on it, and what a broker that stops says.

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
    let (first, unreadable) = (ErrorCode::Unauthenticated, ErrorCode::InvalidRequest);
    for (frame, what, code) in [
        (Incoming::Publish(BINARY), RefusedFrame::Publish, first),
        (
            Incoming::Request(Requested::Repeated),
            RefusedFrame::Request,
            first,
        ),
        (
            Incoming::Unreadable { why: "x".into() },
            RefusedFrame::Request,
            unreadable,
        ),
    ] {
        let mut session = new_stream(StreamDirection::Bidirectional);
        let verdict = session.on_frame(now(), frame);
        assert_eq!(verdict, Verdict::Refused(what, code));
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
fn what_is_refused_on_a_stream_without_a_way_back_is_told_to_whoever_counts() {
    let silent = || {
        let mut session = new_stream(StreamDirection::FromClient);
        session.on_frame(now(), Incoming::Auth(full_offer()));
        session.on_verified(&server(), Ok(()));
        drain(&mut session);
        session
    };
    let bad = |reply| Incoming::BadPublish {
        reply,
        why: "no".into(),
    };
    let unserved = Incoming::Unserved {
        request_type: "later".into(),
        extension: None,
        request_id: None,
    };
    let publish = RefusedFrame::SilentPublish;
    let (invalid, limit) = (ErrorCode::InvalidRequest, ErrorCode::LimitExceeded);
    let oversize = Incoming::OversizePublish { request_id: 3 };
    // What it is, what is counted, and whether the stream is over.
    let cases = [
        (bad(PublishReply::Silent), publish, invalid, false),
        (bad(BINARY), publish, invalid, false),
        (oversize, publish, limit, false),
        (Incoming::Width, RefusedFrame::Request, invalid, true),
        (unserved, RefusedFrame::Request, invalid, true),
        (
            Incoming::Auth(full_offer()),
            RefusedFrame::Request,
            invalid,
            true,
        ),
        (
            Incoming::Request(Requested::OneShot),
            RefusedFrame::Request,
            invalid,
            true,
        ),
        (
            Incoming::Unreadable { why: "x".into() },
            RefusedFrame::Request,
            invalid,
            true,
        ),
    ];
    for (frame, what, code, is_over) in cases {
        let mut session = silent();
        let said = format!("{frame:?}");
        let verdict = session.on_frame(now(), frame);
        assert_eq!(verdict, Verdict::Refused(what, code), "{said}");
        let expected: &[StreamAction] = match is_over {
            true => &[StreamAction::StopReading],
            false => &[],
        };
        assert_eq!(drain(&mut session), expected, "{said}");
        assert_eq!(session.is_ended(), is_over, "{said}");
        // What comes behind the end is not looked at.
        let behind = session.on_frame(now(), Incoming::Publish(PublishReply::Silent));
        assert_eq!(behind == Verdict::Dropped, is_over, "{said}");
    }
    // Before anybody said who it is, and while the broker stops.
    let mut session = new_stream(StreamDirection::FromClient);
    let verdict = session.on_frame(now(), Incoming::Publish(BINARY));
    let first = ErrorCode::Unauthenticated;
    assert_eq!(verdict, Verdict::Refused(publish, first));
    let mut session = silent();
    session.begin_drain();
    let verdict = session.on_frame(now(), Incoming::Publish(BINARY));
    assert_eq!(verdict, Verdict::Refused(publish, ErrorCode::Draining));
}

#[test]
fn a_draining_broker_refuses_new_streams_and_new_work_and_answers_the_old() {
    let mut session = new_stream(StreamDirection::Bidirectional);
    session.begin_drain();
    let verdict = session.on_frame(now(), Incoming::Auth(full_offer()));
    let draining = |what| Verdict::Refused(what, ErrorCode::Draining);
    assert_eq!(verdict, draining(RefusedFrame::Request));
    refused_and_ended(&drain(&mut session), "draining");

    let mut session = open();
    let id = publish(&mut session, BINARY);
    session.begin_drain();
    assert_eq!(
        session.on_frame(now(), Incoming::Publish(JSON)),
        draining(RefusedFrame::Publish)
    );
    assert_eq!(
        session.on_frame(now(), Incoming::Publish(PublishReply::Silent)),
        draining(RefusedFrame::SilentPublish)
    );
    let verdict = session.on_frame(now(), Incoming::Request(Requested::Repeated));
    assert_eq!(verdict, draining(RefusedFrame::Request));
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
