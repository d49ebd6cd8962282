//! What the fuzz target of the client wire does with its input. The integration test
//! `wire_client` runs the same function on seeded inputs.

use bytes::Bytes;
use felix_uring::wire::client::{
    Answer, Frame, FrameReader, ReadEvent, ReadLimits, Request, ToBroker, ToClient,
};

const LIMITS: ReadLimits = ReadLimits {
    frame_bytes: 4096,
    discard_bytes: 8192,
};

/// Byte 0 is the length of the pieces, the rest a stream. Cut into pieces or whole, the same
/// events must come out, and every frame that can be read must survive being written.
pub fn read_stream(data: &[u8]) {
    let Some((&step, stream)) = data.split_first() else {
        return;
    };
    let whole = events(&[stream]);
    let pieces: Vec<&[u8]> = stream.chunks(usize::from(step).max(1)).collect();
    assert_eq!(events(&pieces), whole, "the events depend on the cuts");
    for event in whole {
        if let ReadEvent::Frame(frame) = event {
            check_to_broker(&frame);
            check_to_client(&frame);
        }
    }
}

fn events(pieces: &[&[u8]]) -> Vec<ReadEvent> {
    let mut reader = FrameReader::new(LIMITS);
    let mut events = Vec::new();
    let mut pushed = 0;
    for piece in pieces {
        reader.push(Bytes::copy_from_slice(piece));
        pushed += piece.len();
        while let Some(event) = reader.next() {
            events.push(event);
        }
        assert!(reader.buffered_bytes() <= pushed.min(LIMITS.frame_bytes as usize));
    }
    events
}

fn only_frame(encoded: Bytes) -> Frame {
    let mut reader = FrameReader::new(ReadLimits::AUTHENTICATED);
    reader.push(encoded);
    match (reader.next(), reader.next()) {
        (Some(ReadEvent::Frame(frame)), None) => frame,
        other => panic!("what was written is not one frame: {other:?}"),
    }
}

fn check_to_broker(frame: &Frame) {
    let Ok(read) = ToBroker::decode(frame.clone()) else {
        return;
    };
    let encoded = match &read {
        ToBroker::Request(Request::Unknown { .. }) => return,
        ToBroker::Request(request) => request.encode(),
        ToBroker::Publish(batch) => batch.encode(),
    };
    let again = only_frame(encoded.expect("what was read can be written"));
    assert_eq!(ToBroker::decode(again), Ok(read));
}

fn check_to_client(frame: &Frame) {
    let Ok(read) = ToClient::decode(frame.clone()) else {
        return;
    };
    let encoded = match &read {
        ToClient::Answer(Answer::Unknown { .. }) => return,
        ToClient::Answer(answer) => answer.encode(),
        ToClient::Ack(ack) => ack.encode(),
        ToClient::Events(batch) => batch.encode(),
    };
    let again = only_frame(encoded.expect("what was read can be written"));
    assert_eq!(ToClient::decode(again), Ok(read));
}
