//! The binary layouts: round trips of everything that can be said, and the rules between fields.

use bytes::Bytes;
use proptest::option;
use proptest::prelude::*;

use super::ack::{PublishAck, PublishOutcome, ShardOwner};
use super::flags::{Layout, PublishShape};
use super::frame::HEADER_BYTES;
use super::*;

fn split(frame: &Bytes) -> Frame {
    let mut reader = FrameReader::new(ReadLimits::AUTHENTICATED);
    reader.push(frame.clone());
    match (reader.next(), reader.next(), reader.finish()) {
        (Some(ReadEvent::Frame(frame)), None, Ok(())) => frame,
        other => panic!("not one frame: {other:?}"),
    }
}

fn batch(payloads: &[&[u8]]) -> PublishBatch {
    PublishBatch {
        ack: Some(AckRequest {
            request_id: 7,
            granularity: AckGranularity::PerBatch,
        }),
        producer: None,
        key: Some(Bytes::from_static(b"k")),
        tenant_id: "t".into(),
        namespace: "n".into(),
        stream: "s".into(),
        payloads: Payloads::from_slices(payloads).unwrap(),
    }
}

#[test]
fn an_acked_batch_that_breaks_anywhere_still_names_its_request() {
    let frame = split(&batch(&[b"one", b"two"]).encode().unwrap());
    let Ok(Layout::Publish(shape)) = frame.flags.layout() else {
        panic!("not a publish");
    };
    for cut in 0..frame.body.len() {
        let error = PublishBatch::decode(shape, frame.body.slice(..cut)).unwrap_err();
        let expected = (cut >= 8).then_some(7);
        assert_eq!(error.request_id, expected, "cut at {cut}");
    }
    let mut bad_mode = frame.body.to_vec();
    bad_mode[8] = 3;
    let error = PublishBatch::decode(shape, bad_mode.into()).unwrap_err();
    assert_eq!(error.request_id, Some(7));
    assert!(matches!(
        error.reason,
        BodyError::Undefined { value: 3, .. }
    ));
}

#[test]
fn the_payload_section_is_a_slice_of_the_frame_and_ends_where_it_ends() {
    let sent = batch(&[b"one", b"", b"three"]);
    let mut body = split(&sent.encode().unwrap()).body.to_vec();
    body.extend_from_slice(b"ignored");
    let body = Bytes::from(body);
    let read = PublishBatch::decode(sent.shape(), body.clone()).unwrap();
    assert_eq!(read, sent);
    let section = read.payloads.as_wire();
    assert_eq!(section, sent.payloads.as_wire());
    assert!(body.as_ptr_range().contains(&section.as_ptr()), "copied");
}

#[test]
fn a_batch_over_the_count_limit_is_told_apart() {
    let count = crate::limits::MAX_PAYLOADS + 1;
    let mut body = b"\0\x01t\0\x01n\0\x01s".to_vec();
    body.extend_from_slice(&count.to_be_bytes());
    body.resize(body.len() + 4 * count as usize, 0);
    let error = PublishBatch::decode(PublishShape::default(), body.into()).unwrap_err();
    assert_eq!(error.reason, BodyError::TooManyPayloads { count });
}

#[test]
fn a_batch_in_parts_shares_its_payloads() {
    let sent = batch(&[b"one", b"two"]);
    let [front, section] = sent.encode_parts().unwrap();
    assert_eq!(section.as_ptr(), sent.payloads.as_wire().as_ptr());
    assert_eq!([front, section].concat(), sent.encode().unwrap());
}

#[test]
fn a_name_that_does_not_fit_is_not_sent() {
    let mut sent = batch(&[]);
    sent.stream = "x".repeat(1 << 16).into();
    assert!(matches!(
        sent.encode(),
        Err(EncodeError::FieldTooLong { .. })
    ));
    sent.stream = "s".into();
    sent.ack = None;
    sent.producer = Some(ProducerSequence {
        producer_id: 1,
        sequence: 1,
    });
    assert!(matches!(sent.encode(), Err(EncodeError::Contradiction(_))));
}

fn client(flags: u16) -> ClientOffer {
    ClientOffer::from_auth(&messages::Auth {
        tenant_id: "t".into(),
        token: "x".into(),
        client_flags: Some(flags),
        client_features: None,
        client_features_hi: None,
    })
}

#[test]
fn an_ack_says_only_what_the_client_can_read() {
    let mut accepted = PublishAck::accepted(1, Some(42));
    accepted.owner = Some(ShardOwner {
        node_id: "b".into(),
        addr: None,
        generation: 3,
    });
    let bits = |ack: &PublishAck, offer| ack.clone().for_client(&client(offer)).shape().flags();
    assert_eq!(bits(&accepted, 0x1FFF).bits(), 0x1090);
    assert_eq!(bits(&accepted, 0x1000).bits(), 0x1010);
    assert_eq!(bits(&accepted, 0x0007).bits(), 0x0010);

    let refusal = Refusal::new(ErrorCode::Overloaded, "full").with_retry_after_ms(50);
    let failed = PublishAck::failed(1, refusal);
    assert_eq!(bits(&failed, 0x1FFF).bits(), 0x0610);
    assert_eq!(bits(&failed, 0x0200).bits(), 0x0210);
    assert_eq!(
        bits(&failed, 0x0400).bits(),
        0x0010,
        "no detail without a code"
    );
}

#[test]
fn an_ack_keeps_successes_and_failures_apart() {
    let ok = split(&PublishAck::accepted(1, Some(2)).encode().unwrap());
    let refusal = Refusal::new(ErrorCode::Internal, "x");
    let failed = split(&PublishAck::failed(1, refusal).encode().unwrap());
    for (mut frame, status) in [(ok, 1), (failed, 0)] {
        let mut body = frame.body.to_vec();
        body[0] = status;
        frame.body = body.into();
        let error = ToClient::decode(frame).unwrap_err();
        assert!(matches!(
            error,
            FrameError::Body(BodyError::WrongStatus { .. })
        ));
    }
}

#[test]
fn a_long_explanation_does_not_keep_an_ack_from_being_sent() {
    let refusal = Refusal::new(ErrorCode::Internal, "é".repeat(1 << 16));
    let frame = split(&PublishAck::failed(1, refusal).encode().unwrap());
    assert!(frame.body.len() < 5000);
    assert!(ToClient::decode(frame).is_ok());
}

#[test]
fn large_payloads_are_shared_and_small_ones_gathered() {
    let large = Bytes::from(vec![1; 2000]);
    let small = Bytes::from_static(b"small");
    let events = EventBatch {
        base_offset: Some(5),
        payloads: vec![
            small.clone(),
            large.clone(),
            small.clone(),
            small,
            large.clone(),
        ],
        ..EventBatch::default()
    };
    let mut pieces = Vec::new();
    events.encode_into(1000, &mut pieces).unwrap();
    assert_eq!(pieces.len(), 4);
    assert_eq!(pieces[1].as_ptr(), large.as_ptr());
    assert_eq!(pieces[3].as_ptr(), large.as_ptr());
    let whole = events.encode().unwrap();
    assert_eq!(pieces.concat(), whole);
    assert_eq!(whole.len(), HEADER_BYTES + events.body_bytes());

    let mut all_shared = Vec::new();
    events.encode_into(0, &mut all_shared).unwrap();
    assert_eq!(all_shared.concat(), whole);
}

#[test]
fn events_that_contradict_themselves_are_not_sent() {
    let skip = EventBatch {
        skipped_before: 1,
        ..EventBatch::default()
    };
    assert!(matches!(skip.encode(), Err(EncodeError::Contradiction(_))));
    let times = EventBatch {
        times_us: Some(vec![1]),
        ..EventBatch::default()
    };
    assert!(matches!(times.encode(), Err(EncodeError::Contradiction(_))));
    let publisher = EventBatch {
        publisher: Some(Bytes::from(vec![b'p'; 256])),
        ..EventBatch::default()
    };
    assert!(matches!(
        publisher.encode(),
        Err(EncodeError::FieldTooLong { .. })
    ));
}

#[test]
fn more_events_than_a_reader_takes_are_not_sent() {
    let half = Bytes::from(vec![0; 8 << 20]);
    let events = EventBatch {
        payloads: vec![half.clone(), half],
        ..EventBatch::default()
    };
    let mut pieces = Vec::new();
    let error = events.encode_into(1, &mut pieces).unwrap_err();
    assert!(matches!(error, EncodeError::BodyTooLarge { .. }));
    assert!(pieces.is_empty(), "a part of a frame was left behind");
}

#[test]
fn the_other_direction_is_refused() {
    let publish = split(&batch(&[]).encode().unwrap());
    assert!(matches!(
        ToClient::decode(publish),
        Err(FrameError::Direction(_))
    ));
    let ack = split(&PublishAck::accepted(1, None).encode().unwrap());
    assert!(matches!(
        ToBroker::decode(ack),
        Err(FrameError::Direction(_))
    ));
}

prop_compose! {
    fn any_bytes(max: usize)(bytes in proptest::collection::vec(any::<u8>(), 0..max)) -> Bytes {
        Bytes::from(bytes)
    }
}

prop_compose! {
    fn any_batch()(
        ack in option::of((any::<u64>(), any::<bool>())),
        producer in option::of((any::<u64>(), any::<u64>())),
        key in option::of(any_bytes(40)),
        names in any::<[String; 3]>(),
        payloads in proptest::collection::vec(any_bytes(60), 0..8),
    ) -> PublishBatch {
        let [tenant_id, namespace, stream] = names.map(Text::from);
        PublishBatch {
            ack: ack.map(|(request_id, each)| AckRequest {
                request_id,
                granularity: match each {
                    true => AckGranularity::PerMessage,
                    false => AckGranularity::PerBatch,
                },
            }),
            producer: producer.filter(|_| ack.is_some()).map(|(producer_id, sequence)| {
                ProducerSequence { producer_id, sequence }
            }),
            key,
            tenant_id,
            namespace,
            stream,
            payloads: Payloads::from_slices(&payloads).unwrap(),
        }
    }
}

prop_compose! {
    fn any_refusal()(
        message in any::<String>(),
        code in option::of((any::<u16>(), 1u8..6)),
        detail in option::of((option::of("[a-z_]{1,20}"), option::of(1..u64::MAX))),
    ) -> Refusal {
        Refusal {
            message: message.into(),
            code: code.map(|(number, _)| WireCode::from_number(number)),
            retry: code.map(|(_, class)| RetryClass::from_number(class)),
            detail: detail.filter(|_| code.is_some()).map(|(reason, retry_after_ms)| ErrorDetail {
                reason: reason.map(Into::into),
                retry_after_ms,
            }),
        }
    }
}

prop_compose! {
    fn any_ack()(
        request_id in any::<u64>(),
        outcome in prop_oneof![
            option::of(any::<u64>()).prop_map(|offset| PublishOutcome::Accepted { offset }),
            any_refusal().prop_map(PublishOutcome::Failed),
        ],
        owner in option::of((any::<String>(), option::of("[a-z0-9.:]{1,30}"), any::<u64>())),
    ) -> PublishAck {
        PublishAck {
            request_id,
            outcome,
            owner: owner.map(|(node_id, addr, generation)| ShardOwner { node_id, addr, generation }),
        }
    }
}

prop_compose! {
    fn any_events()(
        subscription_id in option::of(any::<u64>()),
        base_offset in option::of(any::<u64>()),
        skipped in any::<u64>(),
        publisher in option::of(any_bytes(256)),
        timed in any::<bool>(),
        events in proptest::collection::vec((any::<u64>(), any_bytes(60)), 0..8),
    ) -> EventBatch {
        let (times, payloads): (Vec<u64>, Vec<Bytes>) = events.into_iter().unzip();
        EventBatch {
            subscription_id,
            base_offset,
            skipped_before: base_offset.map_or(0, |_| skipped),
            publisher,
            times_us: timed.then_some(times),
            payloads,
        }
    }
}

proptest! {
    #[test]
    fn batches_survive_the_round_trip(sent in any_batch()) {
        let frame = split(&sent.encode().unwrap());
        prop_assert_eq!(frame.flags, sent.shape().flags());
        prop_assert_eq!(ToBroker::decode(frame), Ok(ToBroker::Publish(sent)));
    }

    #[test]
    fn acks_survive_the_round_trip(sent in any_ack()) {
        let frame = split(&sent.encode().unwrap());
        prop_assert_eq!(frame.flags, sent.shape().flags());
        prop_assert_eq!(ToClient::decode(frame), Ok(ToClient::Ack(sent)));
    }

    #[test]
    fn events_survive_the_round_trip(sent in any_events(), share_from in 0usize..80) {
        let mut pieces = Vec::new();
        sent.encode_into(share_from, &mut pieces).unwrap();
        let frame = split(&pieces.concat().into());
        prop_assert_eq!(frame.flags, sent.shape().flags());
        prop_assert_eq!(ToClient::decode(frame), Ok(ToClient::Events(sent)));
    }

    #[test]
    fn refusals_survive_json(request_id in any::<u64>(), refusal in any_refusal()) {
        let sent: Answer = messages::PublishErrorAnswer::new(request_id, refusal).into();
        let frame = split(&sent.encode().unwrap());
        prop_assert_eq!(Answer::decode(&frame.body), Ok(sent));
    }

    #[test]
    fn json_text_and_bytes_survive(
        key in any::<String>(),
        value in option::of(any_bytes(60)),
        request_id in option::of(any::<u64>()),
    ) {
        let sent: Answer = messages::CacheValue {
            tenant_id: key.clone(),
            namespace: String::new(),
            cache: "c".into(),
            key,
            value: value.map(Blob),
            request_id,
            version: None,
        }
        .into();
        let frame = split(&sent.encode().unwrap());
        prop_assert_eq!(Answer::decode(&frame.body), Ok(sent));
    }
}
