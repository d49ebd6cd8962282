//! The form of each answer, refusals, and how a stream ends.

use super::*;

/// What an ack carries follows what the client offered, field by field.
#[test]
fn an_ack_carries_what_the_client_offered() {
    for flags in [0x0000, 0x0080, 0x1000, 0x1080, 0x0200, 0x0600, 0x0400] {
        let mut session = open_with(offer(Some(flags), CLIENT_FEATURES));
        let id = publish(&mut session, BINARY);
        session.settle(id, written(41));
        let id = publish(&mut session, BINARY);
        session.settle(
            id,
            Err(Refusal::new(ErrorCode::Overloaded, "x").with_retry_after_ms(5)),
        );
        let acks: Vec<_> = drain(&mut session)
            .into_iter()
            .map(|action| match action {
                StreamAction::Write(Reply::Ack(ack)) => ack,
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(acks[0].owner.is_some(), flags & 0x0080 != 0);
        let offset = (flags & 0x1000 != 0).then_some(41);
        assert_eq!(acks[0].outcome, PublishOutcome::Accepted { offset });
        let PublishOutcome::Failed(refusal) = &acks[1].outcome else {
            panic!("{:?}", acks[1])
        };
        assert_eq!(refusal.code.is_some(), flags & 0x0200 != 0);
        assert_eq!(refusal.detail.is_some(), flags & 0x0600 == 0x0600);
    }
}

#[test]
fn publishes_are_answered_in_their_own_form_and_unacked_ones_not_at_all() {
    let mut session = open();
    for reply in [PublishReply::Silent, JSON] {
        for result in [written(1), Err(client_code::unacknowledged())] {
            let id = publish(&mut session, reply);
            session.settle(id, result);
        }
    }
    let actions = drain(&mut session);
    assert!(matches!(
        &actions[..],
        [
            StreamAction::Write(Reply::Answer(Answer::PublishOk(ok))),
            StreamAction::Write(Reply::Answer(Answer::PublishErrorAnswer(error))),
        ] if ok.offset == Some(1) && error.request_id == 8
    ));
}

#[test]
fn a_bad_publish_fails_alone() {
    let mut session = open();
    for reply in [PublishReply::Silent, BINARY, JSON] {
        let why = String::from("count too large");
        session.on_frame(now(), Incoming::BadPublish { reply, why });
    }
    session.on_frame(now(), Incoming::OversizePublish { request_id: 9 });
    let actions = drain(&mut session);
    assert_eq!(actions.len(), 3, "{actions:?}");
    assert!(session.is_open());
    for action in &actions {
        assert!(!matches!(
            action,
            StreamAction::Write(Reply::Answer(Answer::ErrorAnswer(_)))
        ));
    }
}

#[test]
fn refusals_of_requests_end_one_shot_streams_and_leave_others_open() {
    for (class, ends) in [
        (Requested::Repeated, false),
        (Requested::OneShot, true),
        (Requested::OneShotAtLeader, true),
    ] {
        let mut session = open();
        assert_eq!(
            session.on_frame(now(), Incoming::Request(class)),
            Verdict::Serve
        );
        session.refuse(class, Refusal::new(ErrorCode::NotFound, "x"));
        let actions = drain(&mut session);
        assert_eq!(error_of(&actions[0]).0.as_deref(), Some("not_found"));
        assert_eq!(actions.contains(&StreamAction::Finish), ends);
        assert_eq!(session.is_open(), !ends);
    }
}

#[test]
fn the_leader_is_named_to_clients_that_follow_redirects() {
    for (features, follows) in [(CLIENT_FEATURES, true), (CLIENT_FEATURES & !2, false)] {
        let mut session = open_with(offer(Some(CLIENT_FLAGS), features));
        session.on_frame(now(), Incoming::Request(Requested::OneShotAtLeader));
        let owner = ShardOwner {
            node_id: "c".into(),
            addr: None,
            generation: 4,
        };
        session.redirect(Requested::OneShotAtLeader, owner);
        let actions = drain(&mut session);
        let names = matches!(
            &actions[0],
            StreamAction::Write(Reply::Answer(Answer::NotLeader(n))) if n.node_id == "c"
        );
        assert_eq!(names, follows);
        if !follows {
            let expected = (Some("not_leader".into()), Some(RetryClass::Redirect));
            assert_eq!(error_of(&actions[0]), expected);
        }
        assert!(session.is_ended());
    }
}

#[test]
fn unknown_requests_are_unsupported_or_end_the_stream() {
    for (features, answered) in [(CLIENT_FEATURES, true), (CLIENT_FEATURES & !0x2000, false)] {
        let mut session = open_with(offer(Some(CLIENT_FLAGS), features));
        let frame = Incoming::Unserved {
            request_type: "wish".into(),
            extension: None,
            request_id: Some(3),
        };
        session.on_frame(now(), frame);
        let actions = drain(&mut session);
        assert_eq!(
            matches!(
                &actions[0],
                StreamAction::Write(Reply::Answer(Answer::Unsupported(u))) if u.request_id == Some(3)
            ),
            answered
        );
        assert_eq!(session.is_open(), answered);
    }
}

#[test]
fn the_end_of_a_subscribe_stream_loses_no_answer() {
    let mut session = open();
    session.on_frame(now(), Incoming::Request(Requested::OneShotAtLeader));
    session.on_client_finished();
    assert_eq!(drain(&mut session), []);
    session.answer(Answer::PlainOk(PlainOk {}));
    let actions = drain(&mut session);
    assert!(matches!(actions[0], StreamAction::Write(_)));
    assert_eq!(actions[1..], [StreamAction::Finish]);
}

#[test]
fn a_flush_waits_for_what_is_owed_unacked_publishes_included() {
    let mut session = open();
    let acked = publish(&mut session, BINARY);
    let silent = publish(&mut session, PublishReply::Silent);
    session.on_client_finished();
    session.settle(acked, written(1));
    assert!(!drain(&mut session).contains(&StreamAction::Finish));
    session.settle(silent, written(2));
    assert_eq!(drain(&mut session), [StreamAction::Finish]);
}

#[test]
fn a_publish_without_outcome_is_answered_in_time_and_only_once() {
    let mut session = open();
    let id = publish(&mut session, BINARY);
    assert_eq!(
        session.next_deadline(),
        Some(now() + StreamLimits::default().answer_timeout)
    );
    session.on_time(now() + StreamLimits::default().answer_timeout);
    session.settle(id, written(1));
    let actions = drain(&mut session);
    let [StreamAction::Write(Reply::Ack(ack))] = &actions[..] else {
        panic!("{actions:?}")
    };
    let PublishOutcome::Failed(refusal) = &ack.outcome else {
        panic!("{ack:?}")
    };
    assert_eq!(refusal.class(), Some(RetryClass::OutcomeUnknown));
}

#[test]
fn what_is_owed_is_bounded_by_not_reading() {
    let mut session = StreamSession::new(
        StreamDirection::Bidirectional,
        StreamLimits {
            publishes: 2,
            requests: 1,
            ..StreamLimits::default()
        },
    );
    session.on_frame(now(), Incoming::Auth(full_offer()));
    session.on_verified(&server(), Ok(()));
    let first = publish(&mut session, BINARY);
    assert!(session.may_read());
    publish(&mut session, BINARY);
    assert!(!session.may_read());
    session.settle(first, written(1));
    assert!(session.may_read());
    session.on_frame(now(), Incoming::Request(Requested::Repeated));
    assert!(!session.may_read());
}

#[test]
fn a_stream_without_a_way_back_is_silent() {
    let mut session = new_stream(StreamDirection::FromClient);
    session.on_frame(now(), Incoming::Auth(offer(None, 0)));
    session.on_verified(&server(), Ok(()));
    let id = publish(&mut session, BINARY);
    session.settle(id, written(1));
    assert_eq!(drain(&mut session), [StreamAction::RaiseFrameLimit]);
    session.on_frame(now(), Incoming::Request(Requested::Repeated));
    assert_eq!(drain(&mut session), [StreamAction::StopReading]);

    let mut announce = new_stream(StreamDirection::FromClient);
    announce.on_frame(now(), Incoming::Auth(offer(None, 0)));
    announce.on_client_finished();
    announce.on_verified(&server(), Ok(()));
    assert_eq!(drain(&mut announce), [StreamAction::RaiseFrameLimit]);
    assert!(announce.is_ended());
}

#[test]
fn a_deaf_client_still_publishes() {
    let mut session = open();
    session.on_client_deaf();
    let id = publish(&mut session, BINARY);
    session.settle(id, written(1));
    assert_eq!(drain(&mut session), []);
    assert!(session.is_open());
}
