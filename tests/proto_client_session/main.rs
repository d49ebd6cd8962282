//! A client's streams: what is owed, where refusals go, what the client may be sent.

mod answers;
mod frames;
mod greeting;
mod random;

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
