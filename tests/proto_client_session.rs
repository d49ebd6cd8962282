//! A client's streams: what is owed, where refusals go, what the client may be sent.

use std::collections::HashMap;
use std::time::Duration;

use felix_uring::ids::Offset;
use felix_uring::proto::client_code;
use felix_uring::proto::client_session::{
    classify, classify_error, Incoming, OwedId, PublishReply, RefusedFrame, Reply, Requested,
    StreamAction, StreamDirection, StreamLimits, StreamSession, Verdict, Written,
};
use felix_uring::proto::MonoTime;
use felix_uring::wire::client::answers::PlainOk;
use felix_uring::wire::client::{
    Answer, ClientOffer, ErrorCode, Features, Flags, Frame, FrameError, PublishOutcome, Refusal,
    Request, RetryClass, ServerOffer, ShardOwner, ToBroker,
};
use proptest::prelude::*;

/// What the published client offers.
const CLIENT_FLAGS: u16 = 0x1FFF;
const CLIENT_FEATURES: u32 = 0xFB77_FFFF;

fn offer(flags: Option<u16>, features: u32) -> ClientOffer {
    let flags = match flags {
        Some(flags) => format!(",\"client_flags\":{flags}"),
        None => String::new(),
    };
    let text = format!(
        "{{\"type\":\"auth\",\"tenant_id\":\"t\",\"token\":\"x\"{flags},\"client_features\":{features}}}"
    );
    match classify(&ToBroker::Request(
        Request::decode(text.as_bytes()).unwrap(),
    )) {
        Incoming::Auth(offer) => offer,
        other => panic!("{other:?}"),
    }
}

fn full_offer() -> ClientOffer {
    offer(Some(CLIENT_FLAGS), CLIENT_FEATURES)
}

fn server() -> ServerOffer {
    ServerOffer {
        flags: 0x12FD,
        features: Features::COUNTERS | Features::ERROR_CODES | Features::UNSUPPORTED,
        listener_ports: vec![],
        publish_window: None,
    }
}

fn now() -> MonoTime {
    MonoTime::ZERO
}

fn drain(session: &mut StreamSession) -> Vec<StreamAction> {
    std::iter::from_fn(|| session.poll_action()).collect()
}

fn new_stream(direction: StreamDirection) -> StreamSession {
    StreamSession::new(direction, StreamLimits::default())
}

fn open_with(offer: ClientOffer) -> StreamSession {
    let mut session = new_stream(StreamDirection::Bidirectional);
    let verdict = session.on_frame(now(), Incoming::Auth(offer));
    assert_eq!(verdict, Verdict::Authenticate);
    assert!(
        !session.may_read(),
        "nothing is read while the token is checked"
    );
    session.on_verified(&server(), Ok(()));
    let actions = drain(&mut session);
    assert_eq!(actions[0], StreamAction::RaiseFrameLimit);
    assert_eq!(actions.len(), 2);
    session
}

fn open() -> StreamSession {
    open_with(full_offer())
}

fn publish(session: &mut StreamSession, reply: PublishReply) -> OwedId {
    match session.on_frame(now(), Incoming::Publish(reply)) {
        Verdict::Publish(id) => id,
        other => panic!("{other:?}"),
    }
}

const BINARY: PublishReply = PublishReply::Binary { request_id: 7 };
const JSON: PublishReply = PublishReply::Json { request_id: 8 };

fn written(offset: u64) -> Result<Written, Refusal> {
    Ok(Written {
        first_offset: Some(Offset(offset)),
        owner: Some(ShardOwner {
            node_id: "b".into(),
            addr: Some("192.0.2.1:7000".into()),
            generation: 3,
        }),
    })
}

fn error_of(action: &StreamAction) -> (Option<String>, Option<RetryClass>) {
    match action {
        StreamAction::Write(Reply::Answer(Answer::ErrorAnswer(error))) => {
            let code = error.code.as_ref().map(|c| c.name().to_string());
            (code, error.retry)
        }
        other => panic!("{other:?}"),
    }
}

fn refused_and_ended(actions: &[StreamAction], code: &str) {
    assert_eq!(error_of(&actions[0]).0.as_deref(), Some(code));
    assert_eq!(
        actions[1..],
        [StreamAction::Finish, StreamAction::StopReading]
    );
}

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

#[test]
fn frames_are_sorted_by_what_they_are() {
    let sorted = |json: &str| {
        classify(&ToBroker::Request(
            Request::decode(json.as_bytes()).unwrap(),
        ))
    };
    let scope = "\"tenant_id\":\"t\",\"namespace\":\"n\"";
    assert_eq!(
        sorted(&format!(
            "{{\"type\":\"publish\",{scope},\"stream\":\"s\",\"payload\":\"\"}}"
        )),
        Incoming::Publish(PublishReply::Silent)
    );
    assert_eq!(
        sorted(&format!(
            "{{\"type\":\"publish\",{scope},\"stream\":\"s\",\"payload\":\"\",\"ack\":\"per_batch\",\"request_id\":8}}"
        )),
        Incoming::Publish(JSON)
    );
    assert!(matches!(
        sorted(&format!(
            "{{\"type\":\"publish\",{scope},\"stream\":\"s\",\"payload\":\"\",\"ack\":\"per_batch\"}}"
        )),
        Incoming::Unreadable { .. }
    ));
    assert_eq!(
        sorted(&format!(
            "{{\"type\":\"subscribe\",{scope},\"stream\":\"s\"}}"
        )),
        Incoming::Request(Requested::OneShotAtLeader)
    );
    assert_eq!(
        sorted("{\"type\":\"wish\",\"request_id\":4}"),
        Incoming::Unserved {
            request_type: "wish".into(),
            extension: None,
            request_id: Some(4)
        }
    );
    assert_eq!(
        sorted("{\"type\":\"extension\",\"name\":\"x\",\"request_id\":4}"),
        Incoming::Unserved {
            request_type: "extension".into(),
            extension: Some("x".into()),
            request_id: Some(4)
        }
    );
}

fn frame_error(flags: u16, body: &[u8]) -> FrameError {
    let frame = Frame {
        flags: Flags::from_bits(flags).unwrap(),
        body: bytes::Bytes::copy_from_slice(body),
    };
    ToBroker::decode(frame).unwrap_err()
}

#[test]
fn a_damaged_publish_is_answered_by_id_when_it_has_one() {
    let mut body = 77u64.to_be_bytes().to_vec();
    body.push(1);
    assert!(matches!(
        classify_error(&frame_error(0x0009, &body)),
        Incoming::BadPublish {
            reply: PublishReply::Binary { request_id: 77 },
            ..
        }
    ));
    assert!(matches!(
        classify_error(&frame_error(0x0001, &[0])),
        Incoming::BadPublish {
            reply: PublishReply::Silent,
            ..
        }
    ));
    let json = b"{\"type\":\"publish\",\"request_id\":5,\"stream\":1}";
    assert!(matches!(
        classify_error(&frame_error(0, json)),
        Incoming::BadPublish {
            reply: PublishReply::Json { request_id: 5 },
            ..
        }
    ));
    for (flags, body) in [(0u16, &b"{"[..]), (0x0008, b""), (0x0010, b"")] {
        assert!(
            matches!(
                classify_error(&frame_error(flags, body)),
                Incoming::Unreadable { .. }
            ),
            "{flags:#x}"
        );
    }
}

#[derive(Debug, Clone)]
enum Step {
    Publish(u8),
    Settle(usize, bool),
    Request,
    Answer,
    Time(u8),
    ClientFinished,
    Drain,
    Bad(u8),
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        5 => (0u8..3).prop_map(Step::Publish),
        5 => (0usize..6, any::<bool>()).prop_map(|(i, ok)| Step::Settle(i, ok)),
        2 => Just(Step::Request),
        2 => Just(Step::Answer),
        2 => (0u8..5).prop_map(Step::Time),
        1 => Just(Step::ClientFinished),
        1 => Just(Step::Drain),
        1 => (0u8..3).prop_map(Step::Bad),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]
    /// Whatever happens, each acked publish is answered exactly once in its own form, nothing is
    /// answered that was not asked, and the stream finishes after the client has.
    #[test]
    fn every_acked_publish_is_answered_exactly_once(
        steps in prop::collection::vec(any_step(), 1..80),
    ) {
        let mut session = open();
        let mut time = now();
        let mut next_id = 0u64;
        let mut pending = Vec::new();
        let mut asked: HashMap<u64, bool> = HashMap::new();
        let mut answered: HashMap<u64, u32> = HashMap::new();
        let (mut served, mut finished, mut replies) = (0usize, false, Vec::new());
        for step in steps {
            match step {
                Step::Publish(form) | Step::Bad(form) if !finished => {
                    next_id += 1;
                    let (reply, is_json) = match form {
                        0 => (PublishReply::Silent, None),
                        1 => (PublishReply::Binary { request_id: next_id }, Some(false)),
                        _ => (PublishReply::Json { request_id: next_id }, Some(true)),
                    };
                    if let Some(is_json) = is_json {
                        asked.insert(next_id, is_json);
                    }
                    let frame = match step {
                        Step::Bad(_) => Incoming::BadPublish { reply, why: "bad".into() },
                        _ => Incoming::Publish(reply),
                    };
                    if let Verdict::Publish(id) = session.on_frame(time, frame) {
                        pending.push(id);
                    }
                }
                Step::Settle(index, ok) if index < pending.len() => {
                    // Sometimes kept, so that it is settled twice.
                    let id = if ok { pending.remove(index) } else { pending[index] };
                    session.settle(id, if ok { written(1) } else { Err(client_code::draining()) });
                }
                Step::Request if !finished => {
                    let frame = Incoming::Request(Requested::Repeated);
                    served += usize::from(session.on_frame(time, frame) == Verdict::Serve);
                }
                Step::Answer if served > 0 => {
                    served -= 1;
                    session.answer(Answer::PlainOk(PlainOk {}));
                }
                Step::Time(seconds) => {
                    time = time + Duration::from_secs(u64::from(seconds));
                    session.on_time(time);
                }
                Step::ClientFinished => {
                    finished = true;
                    session.on_client_finished();
                }
                Step::Drain => session.begin_drain(),
                Step::Publish(_) | Step::Bad(_) | Step::Settle(..) | Step::Request | Step::Answer => {}
            }
            replies.extend(drain(&mut session));
        }
        session.on_client_finished();
        for _ in 0..served {
            session.answer(Answer::PlainOk(PlainOk {}));
        }
        session.on_time(time + Duration::from_secs(60));
        replies.extend(drain(&mut session));
        prop_assert!(session.is_ended(), "SES-4");
        prop_assert_eq!(session.owed(), 0);
        prop_assert_eq!(replies.last(), Some(&StreamAction::Finish));
        for reply in &replies {
            let (id, is_json) = match reply {
                StreamAction::Write(Reply::Ack(ack)) => (ack.request_id, false),
                StreamAction::Write(Reply::Answer(Answer::PublishOk(ok))) => (ok.request_id, true),
                StreamAction::Write(Reply::Answer(Answer::PublishErrorAnswer(e))) => {
                    (e.request_id, true)
                }
                _ => continue,
            };
            prop_assert_eq!(asked.get(&id), Some(&is_json));
            *answered.entry(id).or_default() += 1;
        }
        prop_assert_eq!(answered.len(), asked.len(), "SES-1");
        prop_assert!(answered.values().all(|&n| n == 1), "SES-1");
    }
}
