//! Every vector of `tests/vectors/internal-*.jsonl`.

use std::path::Path;

use bytes::{Bytes, BytesMut};
use felix_uring::ids::CorrelationId;
use felix_uring::wire::internal::hex::{from_hex, to_hex};
use felix_uring::wire::internal::{
    batch_checksum, decode_frame, encode, encode_into, forward_publish_parts, json,
    on_answer_event, on_request_event, publish_ok_frame, records_parts, refusal,
    replicate_ok_frame, AnswerFault, BodyError, DecodeError, ErrorCode, FatalReason, FrameReader,
    Hello, Inbound, Kind, Message, Payloads, ReadEvent, Role, Text,
};
use felix_uring::wire::routing::{key_hash, shard_for_key, Routing};
use serde_json::Value;

/// The objects of one vector file.
pub fn lines(file: &str) -> impl Iterator<Item = Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/vectors")
        .join(file);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let values: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).expect("a vector is JSON"))
        .collect();
    assert!(!values.is_empty(), "{file} is empty");
    values.into_iter()
}

/// The vector's frame.
pub fn frame_of(vector: &Value) -> Bytes {
    Bytes::from(bytes_of(&vector["frame_hex"]))
}

fn bytes_of(value: &Value) -> Vec<u8> {
    from_hex(value.as_str().expect("hex")).expect("hex")
}

fn u64_of(value: &Value) -> u64 {
    value.as_str().expect("decimal").parse().expect("decimal")
}

fn count(file: &str, expected: usize, check: impl Fn(&Value)) {
    let mut seen = 0;
    for vector in lines(file) {
        check(&vector);
        seen += 1;
    }
    assert_eq!(seen, expected, "{file} is not complete");
}

#[test]
fn valid_frames_decode_to_their_message_and_back() {
    count("internal-valid.jsonl", 275, |vector| {
        let name = &vector["name"];
        let frame = frame_of(vector);
        let message = decode_frame(frame.clone()).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(u64::from(message.kind().code()), vector["kind"], "{name}");
        assert_eq!(encode(&message).as_deref(), Ok(&frame[..]), "{name}");

        let mut out = BytesMut::from(&b"before"[..]);
        encode_into(&message, &mut out).expect("encodes");
        assert_eq!(&out[6..], &frame[..], "{name}");
        assert_eq!(
            special_encoding(&message).unwrap_or(frame.clone()),
            frame,
            "{name}"
        );
    });
}

/// The frame by the encoder that exists for its kind alone, if there is one.
fn special_encoding(message: &Message) -> Option<Bytes> {
    match message {
        Message::ForwardPublish(m) => {
            let parts = forward_publish_parts(
                m.correlation,
                &m.shard,
                m.ack,
                &m.payloads,
                m.credential.as_ref(),
            )
            .expect("encodes");
            assert_eq!(parts[1].as_ptr(), m.payloads.as_wire().as_ptr(), "copied");
            Some(Bytes::from(parts.concat()))
        }
        Message::Records(m) => {
            let parts = records_parts(m).expect("encodes");
            assert_eq!(parts[1].as_ptr(), m.payloads.as_wire().as_ptr(), "copied");
            Some(Bytes::from(parts.concat()))
        }
        Message::ForwardPublishOk {
            correlation,
            first_offset,
            last_offset,
        } => Some(Bytes::copy_from_slice(&publish_ok_frame(
            *correlation,
            *first_offset,
            *last_offset,
        ))),
        Message::ReplicateOk {
            correlation,
            durable_offset,
        } => Some(Bytes::copy_from_slice(&replicate_ok_frame(
            *correlation,
            *durable_offset,
        ))),
        _ => None,
    }
}

#[test]
fn valid_frames_as_json_lines() {
    count("internal-valid.jsonl", 275, |vector| {
        let name = &vector["name"];
        let hex = vector["frame_hex"].as_str().expect("hex");
        let line = json::decode_line(hex);
        assert_eq!(line["ok"], true, "{name}");
        assert_eq!(line["kind"], vector["kind"], "{name}");
        assert_eq!(line["message"], vector["message"], "{name}");
        assert_eq!(line.get("checksum_ok"), vector.get("checksum_ok"), "{name}");
        assert_eq!(
            json::encode_line(&vector.to_string()).as_deref(),
            Ok(hex),
            "{name}"
        );
    });
}

#[test]
fn payloads_built_from_slices_are_the_section_that_travels() {
    for vector in lines("internal-valid.jsonl") {
        let payloads = match decode_frame(frame_of(&vector)).expect("valid") {
            Message::ForwardPublish(m) => m.payloads,
            Message::Records(m) => m.payloads,
            _ => continue,
        };
        let built = Payloads::from_slices(&payloads).expect("within bounds");
        assert_eq!(built, payloads);
        assert_eq!(
            Payloads::from_wire_section(built.as_wire().clone()),
            Ok(built)
        );
        assert!(payloads.iter_bytes().eq(payloads.iter()));
    }
}

/// How the reference names the refusal; its `incomplete` takes in whatever has no other name.
fn reference_class(error: DecodeError) -> &'static str {
    match error {
        DecodeError::Fatal(FatalReason::WrongMagic { .. }) => "invalid-magic",
        DecodeError::Fatal(FatalReason::WrongVersion { .. }) => "unsupported-version",
        DecodeError::Fatal(FatalReason::LengthOverLimit { kind, .. })
        | DecodeError::Fatal(FatalReason::NoCorrelationId { kind, .. })
            if Kind::from_code(kind).is_none() =>
        {
            "unsupported-kind"
        }
        DecodeError::Fatal(FatalReason::LengthOverLimit { .. }) => "too-large",
        DecodeError::UnknownKind { .. } => "unsupported-kind",
        DecodeError::Body { error, .. } => match error {
            BodyError::NotUtf8 { field } if field != "credential" => "bad-utf8",
            BodyError::UnknownAckMode { .. } => "unknown-ack-mode",
            BodyError::UnknownCacheOp { .. } => "unknown-cache-op",
            BodyError::UnknownReplicaLog { .. } => "unknown-replica-log",
            BodyError::UnknownErrorCode { .. } => "unknown-error-code",
            _ => "incomplete",
        },
        DecodeError::Fatal(FatalReason::NoCorrelationId { .. })
        | DecodeError::Truncated { .. }
        | DecodeError::BytesAfterFrame { .. } => "incomplete",
    }
}

#[test]
fn refused_frames_are_refused_and_handled_as_stated() {
    count("internal-refused.jsonl", 1705, |vector| {
        let name = &vector["name"];
        let error = decode_frame(frame_of(vector)).expect_err("must be refused");
        assert_eq!(error.handling().name(), vector["handling"], "{name}");
        assert_eq!(reference_class(error), vector["class"], "{name}: {error}");
        let correlation = vector["correlation_id"].as_str().map(str::to_owned);
        if error.correlation().is_some() || vector["handling"] != "not-one-frame" {
            assert_eq!(
                error.correlation().map(|id| id.to_string()),
                correlation,
                "{name}"
            );
        }

        let line = json::decode_line(vector["frame_hex"].as_str().expect("hex"));
        assert_eq!(line["ok"], false, "{name}");
        assert_eq!(line["handling"], vector["handling"], "{name}");
    });
}

/// A reader that is given `frame` and then a good frame behind it.
fn reader_with_next(frame: Bytes) -> FrameReader {
    let mut reader = FrameReader::new();
    reader.push(frame);
    reader.push(next_frame());
    reader
}

fn next_frame() -> Bytes {
    let hello = Message::Hello(Hello {
        correlation: CorrelationId(77),
        node_id: Text::new("node").expect("short"),
    });
    encode(&hello).expect("small")
}

fn assert_next_frame_is_read(reader: &mut FrameReader, name: &Value) {
    let event = reader
        .next()
        .unwrap_or_else(|| panic!("{name}: the next frame is lost"));
    match on_request_event(event) {
        Inbound::Request(Message::Hello(hello)) => {
            assert_eq!(hello.correlation, CorrelationId(77));
            assert_eq!(hello.node_id, "node");
        }
        other => panic!("{name}: {other:?}"),
    }
    assert_eq!(reader.finish(), Ok(()), "{name}");
}

#[test]
fn a_listener_does_with_refused_frames_what_is_stated() {
    count("internal-refused.jsonl", 1705, |vector| {
        let name = &vector["name"];
        let frame = frame_of(vector);
        match vector["handling"].as_str().expect("text") {
            "close" => {
                let mut reader = reader_with_next(frame);
                let inbound = reader.next().map(on_request_event);
                assert!(matches!(inbound, Some(Inbound::Close(_))), "{name}");
                assert_eq!(reader.next(), None, "{name}");
                assert_eq!(reader.buffered_bytes(), 0, "{name}");
            }
            "need-more-bytes" => {
                let mut reader = FrameReader::new();
                let empty = frame.is_empty();
                reader.push(frame);
                assert_eq!(reader.next(), None, "{name}");
                assert_eq!(reader.finish().is_ok(), empty, "{name}");
            }
            "not-one-frame" => {
                let mut reader = FrameReader::new();
                reader.push(frame);
                assert!(
                    matches!(reader.next(), Some(ReadEvent::Frame { .. })),
                    "{name}"
                );
                assert!(reader.finish().is_err(), "{name}");
            }
            "answer-unsupported-kind" => {
                let mut reader = reader_with_next(frame);
                let Some(Inbound::Refuse { answer, .. }) = reader.next().map(on_request_event)
                else {
                    panic!("{name}: no refusal");
                };
                assert_unsupported_kind(&answer, u64_of(&vector["correlation_id"]), name);
                assert_next_frame_is_read(&mut reader, name);
            }
            "answer-malformed" => {
                let mut reader = reader_with_next(frame);
                let event = reader.next().expect("a frame");
                assert_malformed(vector, event);
                assert_next_frame_is_read(&mut reader, name);
            }
            other => panic!("{name}: handling {other} is new"),
        }
    });
}

fn assert_unsupported_kind(answer: &Message, correlation: u64, name: &Value) {
    assert_eq!(answer.kind(), Kind::ForwardPublishError, "{name}");
    assert_eq!(
        answer.error_code(),
        Some(ErrorCode::UnsupportedKind),
        "{name}"
    );
    assert_eq!(answer.correlation().0, correlation, "{name}");
    encode(answer).expect("a refusal encodes");
}

fn assert_malformed(vector: &Value, event: ReadEvent) {
    let name = &vector["name"];
    let code = vector["kind"].as_u64().expect("number") as u16;
    let kind = Kind::from_code(code).expect("known");
    let inbound = on_request_event(event.clone());
    match kind.role() {
        Role::Answer => {
            assert_eq!(inbound, Inbound::StrayAnswer { kind }, "{name}");
            let fault = on_answer_event(event).expect_err("does not decode");
            assert!(matches!(fault, AnswerFault::Unreadable(_)), "{name}");
        }
        Role::Request => {
            let Inbound::Refuse { answer, .. } = inbound else {
                panic!("{name}: {inbound:?}");
            };
            let shape = match code {
                1 | 22 | 5 => Kind::ForwardPublishError,
                11 | 23 => Kind::ForwardCacheError,
                7 | 10 | 14..=21 | 24 => Kind::ReplicateError,
                _ => panic!("{name}: not a request"),
            };
            assert_eq!(answer.kind(), shape, "{name}");
            assert_eq!(answer.error_code(), Some(ErrorCode::Malformed), "{name}");
            assert_eq!(
                answer.correlation().0,
                u64_of(&vector["correlation_id"]),
                "{name}"
            );
            assert!(answer.may_answer(kind), "{name}");
            encode(&answer).expect("a refusal encodes");
        }
    }
}

#[test]
fn later_kinds_are_answered_unsupported_and_stepped_over() {
    for (file, expected) in [
        ("internal-valid-later.jsonl", 337),
        ("internal-valid-preview.jsonl", 27),
    ] {
        count(file, expected, |vector| {
            let name = &vector["name"];
            let frame = frame_of(vector);
            let correlation = u64::from_be_bytes(frame[12..20].try_into().expect("8 bytes"));
            let mut reader = reader_with_next(frame);
            let Some(Inbound::Refuse { answer, .. }) = reader.next().map(on_request_event) else {
                panic!("{name}: no refusal");
            };
            assert_unsupported_kind(&answer, correlation, name);
            assert_next_frame_is_read(&mut reader, name);
        });
    }
}

#[test]
fn refused_frames_of_later_kinds_are_refused_too() {
    count("internal-refused-later.jsonl", 1270, |vector| {
        assert!(
            decode_frame(frame_of(vector)).is_err(),
            "{}",
            vector["name"]
        );
    });
}

#[test]
fn checksums() {
    count("internal-checksum.jsonl", 44, |vector| {
        let list = vector["payloads"].as_array().expect("list");
        let payloads: Vec<Vec<u8>> = list.iter().map(bytes_of).collect();
        let expected = u64_of(&vector["checksum"]);
        assert_eq!(batch_checksum(&payloads), expected, "{}", vector["name"]);
        let section = Payloads::from_slices(&payloads).expect("within bounds");
        assert_eq!(section.batch_checksum(), expected, "{}", vector["name"]);
        assert_eq!(to_hex(&expected.to_be_bytes()), vector["checksum_hex"]);
    });
}

#[test]
fn routing() {
    count("internal-routing.jsonl", 842, |vector| {
        let name = &vector["name"];
        let mode = vector["mode"].as_str().expect("text");
        let mode = Routing::from_name(mode).expect("known");
        let key = vector["key"]
            .as_str()
            .map(|key| from_hex(key).expect("hex"));
        let shards = vector["shards"].as_u64().expect("number") as u32;
        let shard = shard_for_key(key.as_deref(), shards, mode);
        assert_eq!(u64::from(shard), vector["shard"], "{name}");
        if let (Some(key), Some(hash)) = (&key, vector["hash"].as_str()) {
            assert_eq!(key_hash(key).to_string(), hash, "{name}");
        }
    });
}

#[test]
fn a_line_that_is_no_frame_gives_an_error_line() {
    for line in ["", "4", "zz", "é", "464c5849"] {
        let answer = json::decode_line(line);
        assert_eq!(answer["ok"], false, "{line}");
        assert!(answer["error"].is_string(), "{line}");
    }
    let bad = [
        "",
        "[]",
        "{}",
        r#"{"kind":0,"message":{}}"#,
        r#"{"kind":25,"message":{}}"#,
        r#"{"kind":5,"message":{"correlation_id":"1"}}"#,
        r#"{"kind":5,"message":{"correlation_id":"-1","node_id":"a"}}"#,
        r#"{"kind":3,"message":{"correlation_id":"1","code":12,"detail":""}}"#,
        r#"{"kind":12,"message":{"correlation_id":"1","value":"0"}}"#,
    ];
    for line in bad {
        let error = json::encode_line(line).expect_err(line);
        assert_eq!(error.to_json()["ok"], false);
    }
    let publish = |kind: u16, credential: &str| {
        let shard = r#"{"tenant_id":"t","namespace":"n","stream":"s","shard":0,"generation":"1"}"#;
        format!(
            r#"{{"kind":{kind},"message":{{"correlation_id":"1","shard":{shard},"ack":1,"payloads":[]{credential}}}}}"#
        )
    };
    assert!(json::encode_line(&publish(1, "")).is_ok());
    assert!(json::encode_line(&publish(22, r#","credential":"x""#)).is_ok());
    for (kind, credential) in [
        (1, r#","credential":"x""#),
        (22, ""),
        (22, r#","credential":"""#),
    ] {
        assert!(json::encode_line(&publish(kind, credential)).is_err());
    }
    assert!(matches!(
        refusal(
            Kind::Hello,
            CorrelationId(1),
            ErrorCode::Unauthorized,
            Default::default(),
            ""
        ),
        Message::ForwardPublishError(_)
    ));
}
