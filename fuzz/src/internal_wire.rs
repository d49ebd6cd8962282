//! What the fuzz targets of the internal wire do with their input. The integration test
//! `wire_internal` runs the same functions on seeded inputs.

use bytes::Bytes;
use felix_uring::wire::internal::{
    decode_body, decode_frame, encode, on_answer_event, on_request_event, DecodeError, FrameReader,
    Handling, Header, Inbound, Kind, Message, ReadEvent, HEADER_BYTES,
};

/// One frame, or a typed refusal. What decodes must encode back to the same bytes.
pub fn decode_one_frame(data: &[u8]) {
    match decode_frame(Bytes::copy_from_slice(data)) {
        Ok(message) => assert_same_bytes(&message, data),
        Err(error) => {
            assert!(!error.name().is_empty() && !error.to_string().is_empty());
            assert_stream_agrees(error, data);
        }
    }
}

/// The input as the body of each kind, so that the header's checks hide nothing.
pub fn decode_as_every_kind(data: &[u8]) {
    for kind in Kind::ALL {
        let body = Bytes::copy_from_slice(data);
        if let Ok(message) = decode_body(*kind, body) {
            assert_eq!(message.kind(), *kind);
            let header = Header {
                kind: kind.code(),
                length_bytes: data.len() as u32,
            };
            assert_same_bytes(&message, &[&header.to_bytes()[..], data].concat());
        }
    }
}

fn assert_same_bytes(message: &Message, frame: &[u8]) {
    let encoded = encode(message).expect("what decodes encodes");
    assert_eq!(encoded, frame, "one encoding per message");
    if let Message::ForwardPublish(m) = message {
        let total: usize = m.payloads.iter().map(<[u8]>::len).sum();
        assert_eq!(m.payloads.iter().count(), m.payloads.len());
        assert_eq!(total, m.payloads.total_payload_bytes());
    }
}

/// A stream reader given the same bytes does what the error's handling says.
fn assert_stream_agrees(error: DecodeError, data: &[u8]) {
    let mut reader = FrameReader::new();
    reader.push(Bytes::copy_from_slice(data));
    let inbound = reader.next().map(on_request_event);
    match error.handling() {
        Handling::Close => assert!(matches!(inbound, Some(Inbound::Close(_)))),
        Handling::NeedMoreBytes => assert_eq!(inbound, None),
        Handling::NotOneFrame => assert!(inbound.is_some()),
        Handling::AnswerUnsupportedKind | Handling::AnswerMalformed => match inbound {
            Some(Inbound::Refuse { answer, .. }) => {
                assert_eq!(Some(answer.correlation()), error.correlation());
                encode(&answer).expect("a refusal always encodes");
            }
            Some(Inbound::StrayAnswer { .. }) => {}
            other => panic!("{error}: {other:?}"),
        },
    }
}

/// A sequence of operations on a reader, checked against [`plain_events`]. Byte 0 chooses the
/// body limit; then each operation is a byte, with what it needs behind it.
pub fn read_stream(data: &[u8]) {
    let mut input = data.iter().copied();
    let limit_bytes = match input.next() {
        Some(small @ 1..) => u32::from(small) * 8,
        _ => u32::MAX,
    };
    let mut reader = FrameReader::with_body_limit(limit_bytes);
    let mut stream = Vec::new();
    let mut events = Vec::new();
    while let Some(operation) = input.next() {
        let mut chunk = Vec::new();
        match operation % 5 {
            // Raw bytes.
            0 => {
                let wanted = usize::from(input.next().unwrap_or(0));
                chunk.extend(input.by_ref().take(wanted));
            }
            // A good header of any kind, then raw bytes.
            1 => {
                let kind = u16::from(input.next().unwrap_or(0)) % 48;
                let length_bytes = u32::from(input.next().unwrap_or(0));
                chunk.extend(Header { kind, length_bytes }.to_bytes());
                let wanted = usize::from(input.next().unwrap_or(0));
                chunk.extend(input.by_ref().take(wanted));
            }
            // A whole frame of filler.
            2 => {
                let kind = u16::from(input.next().unwrap_or(0)) % 48;
                let length_bytes = u32::from(input.next().unwrap_or(0));
                chunk.extend(Header { kind, length_bytes }.to_bytes());
                chunk.resize(HEADER_BYTES + length_bytes as usize, operation);
            }
            // Filler without a header.
            3 => chunk.resize(usize::from(input.next().unwrap_or(0)) * 64, operation),
            _ => events.extend(reader.next()),
        }
        stream.extend_from_slice(&chunk);
        reader.push(Bytes::from(chunk));
        assert!(reader.buffered_bytes() <= stream.len());
    }
    events.extend(reader.by_ref());
    let (expected, at_boundary) = plain_events(&stream, limit_bytes);
    assert_eq!(events, expected);
    assert_eq!(reader.finish().is_ok(), at_boundary);
    for event in events {
        let _ = on_answer_event(event.clone());
        if let Inbound::Refuse { answer, .. } = on_request_event(event) {
            encode(&answer).expect("a refusal always encodes");
        }
    }
}

/// The events of a whole stream, and whether it ends between frames or after a fatal event.
pub fn plain_events(mut stream: &[u8], limit_bytes: u32) -> (Vec<ReadEvent>, bool) {
    let mut events = Vec::new();
    while let Some((header, rest)) = stream.split_first_chunk::<HEADER_BYTES>() {
        let header = match Header::parse(header, limit_bytes) {
            Ok(header) => header,
            Err(reason) => {
                events.push(ReadEvent::Fatal(reason));
                return (events, true);
            }
        };
        let Some((body, rest)) = rest.split_at_checked(header.length_bytes as usize) else {
            return (events, false);
        };
        events.push(match Kind::from_code(header.kind) {
            Some(kind) => ReadEvent::Frame {
                kind,
                body: Bytes::copy_from_slice(body),
            },
            None => ReadEvent::Unknown {
                kind: header.kind,
                correlation: felix_uring::wire::internal::correlation_of(body).unwrap_or_default(),
            },
        });
        stream = rest;
    }
    (events, stream.is_empty())
}
