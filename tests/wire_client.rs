//! The client codec against the published vectors and against generated input.

#[path = "../fuzz/src/client_wire.rs"]
mod fuzzed;

use std::path::PathBuf;

use bytes::Bytes;
use felix_uring::wire::client::{
    json, Answer, FatalReason, Frame, FrameReader, HeaderError, ReadEvent, ReadLimits, Request,
    ToBroker, ToClient,
};
use proptest::prelude::*;
use serde_json::Value;

fn vectors(file: &str) -> Vec<Value> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/vectors");
    let text = std::fs::read_to_string(path.join(file)).expect("the vectors are part of the tree");
    let parse = |line: &str| serde_json::from_str(line).expect("a vector is JSON");
    text.lines().map(parse).collect()
}

fn text<'a>(vector: &'a Value, field: &str) -> &'a str {
    vector[field].as_str().expect("a text field")
}

fn unhex(hex: &str) -> Vec<u8> {
    let byte = |i: usize| u8::from_str_radix(&hex[i..i + 2], 16).expect("hex");
    (0..hex.len()).step_by(2).map(byte).collect()
}

fn is_binary(vector: &Value) -> bool {
    vector["message"].get("type").is_none()
}

/// Reads bytes as both sides would.
fn read_as_either(bytes: &[u8]) -> Vec<ReadEvent> {
    let mut reader = FrameReader::new(ReadLimits::AUTHENTICATED);
    reader.push(Bytes::copy_from_slice(bytes));
    let mut events = Vec::new();
    while let Some(event) = reader.next() {
        if let ReadEvent::Frame(frame) = &event {
            // Neither may panic, whatever the frame is.
            let _ = ToBroker::decode(frame.clone());
            let _ = ToClient::decode(frame.clone());
        }
        events.push(event);
    }
    events
}

fn only_frame(bytes: &[u8]) -> Option<Frame> {
    match &read_as_either(bytes)[..] {
        [ReadEvent::Frame(frame)] => Some(frame.clone()),
        _ => None,
    }
}

#[test]
fn every_valid_frame_is_read_as_its_message() {
    let vectors = vectors("client-valid.jsonl");
    assert!(vectors.len() > 150);
    for vector in &vectors {
        let name = text(vector, "name");
        let decoded = json::decode_line(text(vector, "frame_hex"));
        assert_eq!(decoded["ok"], true, "{name}: {decoded}");
        assert_eq!(decoded["message"], vector["message"], "{name}");
    }
}

#[test]
fn every_message_is_written_as_its_frame() {
    let mut written = 0;
    for vector in vectors("client-valid.jsonl") {
        if vector["decode_only"] == true {
            continue;
        }
        let name = text(&vector, "name");
        let frame = json::encode_line(&vector["message"].to_string());
        let frame = frame.unwrap_or_else(|error| panic!("{name}: {error}"));
        if is_binary(&vector) {
            assert_eq!(frame, text(&vector, "frame_hex"), "{name}");
        } else {
            let body: Value = serde_json::from_slice(&unhex(&frame)[12..]).expect("JSON");
            assert_eq!(body, vector["message"], "{name}");
            let same_length = frame.len() == text(&vector, "frame_hex").len();
            assert!(
                same_length,
                "{name}: the fields are the same, the text is not"
            );
        }
        written += 1;
    }
    assert!(written > 150);
}

#[test]
fn each_valid_frame_is_for_one_side() {
    for vector in vectors("client-valid.jsonl") {
        let name = text(&vector, "name");
        let frame = only_frame(&unhex(text(&vector, "frame_hex")))
            .unwrap_or_else(|| panic!("{name} is not one frame"));
        let (to_broker, to_client) = readable(&frame);
        assert!(to_broker != to_client, "{name}: {to_broker} {to_client}");
    }
}

/// Whether the broker and whether the client understands the frame.
fn readable(frame: &Frame) -> (bool, bool) {
    let to_broker = match ToBroker::decode(frame.clone()) {
        Ok(ToBroker::Request(Request::Unknown { .. })) | Err(_) => false,
        Ok(_) => true,
    };
    let to_client = match ToClient::decode(frame.clone()) {
        Ok(ToClient::Answer(Answer::Unknown { .. })) | Err(_) => false,
        Ok(_) => true,
    };
    (to_broker, to_client)
}

#[test]
fn every_refused_frame_is_refused() {
    let vectors = vectors("client-refused.jsonl");
    assert!(vectors.len() > 60);
    for vector in &vectors {
        let name = text(vector, "name");
        let decoded = json::decode_line(text(vector, "frame_hex"));
        assert_eq!(decoded["ok"], false, "{name}: {decoded}");
        assert_ne!(decoded["error"], "not-hex", "{name}");
        if let Some(frame) = only_frame(&unhex(text(vector, "frame_hex"))) {
            assert_eq!(readable(&frame), (false, false), "{name}");
        }
    }
}

#[test]
fn no_frame_cut_short_is_a_frame() {
    for vector in vectors("client-valid.jsonl") {
        let bytes = unhex(text(&vector, "frame_hex"));
        for cut in 0..bytes.len() {
            assert_eq!(
                read_as_either(&bytes[..cut]),
                [],
                "{}",
                text(&vector, "name")
            );
        }
    }
}

/// Cuts the body and corrects the length: the layout has to notice.
#[test]
fn no_binary_body_cut_short_is_read() {
    for vector in vectors("client-valid.jsonl") {
        if !is_binary(&vector) || vector["decode_only"] == true {
            continue;
        }
        let bytes = unhex(text(&vector, "frame_hex"));
        for len in 0..bytes.len() - 12 {
            let mut cut = bytes[..12 + len].to_vec();
            cut[8..12].copy_from_slice(&(len as u32).to_be_bytes());
            let frame = only_frame(&cut).expect("a whole frame");
            let name = text(&vector, "name");
            assert!(ToBroker::decode(frame.clone()).is_err(), "{name} at {len}");
            assert!(ToClient::decode(frame).is_err(), "{name} at {len}");
        }
    }
}

/// Every flag word over bodies of several lengths: a layout or a refusal, never a panic.
#[test]
fn every_flag_word_is_answered() {
    let mut layouts = 0;
    for flags in 0..=u16::MAX {
        let mut frame = b"FLX1\x00\x01".to_vec();
        frame.extend_from_slice(&flags.to_be_bytes());
        frame.extend_from_slice(&64u32.to_be_bytes());
        frame.extend_from_slice(&[0; 64]);
        match &read_as_either(&frame)[..] {
            [ReadEvent::Frame(frame)] => {
                assert!(flags < 0x8000);
                let selects = frame.flags.layout().is_ok();
                let read = readable(frame) != (false, false);
                assert!(selects || !read, "{flags:#06x}");
                layouts += usize::from(selects);
            }
            [ReadEvent::Fatal(FatalReason::Header(HeaderError::Flags(_)))] => {
                assert!(flags >= 0x8000);
            }
            other => panic!("{flags:#06x}: {other:?}"),
        }
    }
    assert_eq!(layouts, 51);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn no_body_makes_a_reader_panic(
        flags in prop_oneof![Just(0u16), 0u16..0x8000, Just(0x0149), Just(0x0690), Just(0x6824)],
        body in proptest::collection::vec(any::<u8>(), 0..200),
    ) {
        let mut frame = b"FLX1\x00\x01".to_vec();
        frame.extend_from_slice(&flags.to_be_bytes());
        frame.extend_from_slice(&(body.len() as u32).to_be_bytes());
        frame.extend_from_slice(&body);
        read_as_either(&frame);
        let hex: String = frame.iter().map(|byte| format!("{byte:02x}")).collect();
        json::decode_line(&hex);
    }

    #[test]
    fn no_damage_to_a_vector_makes_a_reader_panic(
        at in any::<proptest::sample::Index>(),
        damage in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let vectors = vectors("client-valid.jsonl");
        let mut bytes = unhex(text(&vectors[at.index(vectors.len())], "frame_hex"));
        for (position, value) in damage {
            let position = position.index(bytes.len());
            bytes[position] = value;
        }
        read_as_either(&bytes);
    }

    /// Frames of the vectors, some damaged, in one stream cut anywhere.
    #[test]
    fn what_is_read_survives_being_written(
        step in 1u8..=255,
        picks in proptest::collection::vec(any::<proptest::sample::Index>(), 1..6),
        damage in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 0..3),
    ) {
        let vectors = vectors("client-valid.jsonl");
        let mut data = vec![step];
        for pick in picks {
            data.extend(unhex(text(&vectors[pick.index(vectors.len())], "frame_hex")));
        }
        for (position, value) in damage {
            let position = position.index(data.len());
            data[position] = value;
        }
        fuzzed::read_stream(&data);
    }

    #[test]
    fn no_line_makes_the_text_forms_panic(line in ".{0,80}") {
        json::decode_line(&line);
        let _ = json::encode_line(&line);
    }
}
