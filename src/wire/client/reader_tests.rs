use proptest::prelude::*;

use super::*;

fn frame(flags: u16, body: &[u8]) -> Vec<u8> {
    let mut bytes = b"FLX1\x00\x01".to_vec();
    bytes.extend_from_slice(&flags.to_be_bytes());
    bytes.extend_from_slice(&(body.len() as u32).to_be_bytes());
    bytes.extend_from_slice(body);
    bytes
}

fn read_all(limits: ReadLimits, pieces: &[&[u8]]) -> (Vec<ReadEvent>, Result<(), EndError>) {
    let mut reader = FrameReader::new(limits);
    let mut events = Vec::new();
    for piece in pieces {
        reader.push(Bytes::copy_from_slice(piece));
        while let Some(event) = reader.next() {
            events.push(event);
        }
    }
    let end = reader.finish();
    (events, end)
}

const SMALL: ReadLimits = ReadLimits {
    frame_bytes: 100,
    discard_bytes: 300,
};

#[test]
fn whole_frames_of_one_piece_are_slices_of_it() {
    let mut bytes = frame(1, b"first");
    bytes.extend(frame(0, b""));
    bytes.extend(frame(9, b"second"));
    let piece = Bytes::from(bytes);
    let range = piece.as_ptr_range();
    let mut reader = FrameReader::new(ReadLimits::UNAUTHENTICATED);
    reader.push(piece.clone());
    for expected in ["first", "", "second"] {
        let Some(ReadEvent::Frame(Frame { body, .. })) = reader.next() else {
            panic!("no frame for {expected:?}");
        };
        assert_eq!(body, expected.as_bytes());
        assert!(body.is_empty() || range.contains(&body.as_ptr()), "copied");
    }
    assert_eq!(reader.next(), None);
    assert_eq!(reader.finish(), Ok(()));
}

#[test]
fn a_declared_length_alone_allocates_nothing() {
    let mut reader = FrameReader::new(ReadLimits::AUTHENTICATED);
    let mut bytes = frame(1, b"");
    bytes[8..12].copy_from_slice(&MAX_CLIENT_FRAME_BYTES.to_be_bytes());
    bytes.extend_from_slice(&[7; 100]);
    reader.push(Bytes::from(bytes));
    assert_eq!(reader.next(), None);
    assert_eq!(reader.buffered_bytes(), 100);
    assert!(reader.partial.capacity() < 1000);
    assert_eq!(
        reader.finish(),
        Err(EndError::InsideFrame {
            declared_bytes: MAX_CLIENT_FRAME_BYTES
        })
    );
}

#[test]
fn a_frame_is_never_given_more_than_its_own_bytes() {
    let body = vec![3; 70_000];
    let bytes = frame(1, &body);
    let mut reader = FrameReader::new(ReadLimits::AUTHENTICATED);
    for piece in bytes.chunks(1200) {
        assert_eq!(reader.next(), None);
        assert!(reader.partial.capacity() <= body.len());
        reader.push(Bytes::copy_from_slice(piece));
    }
    let expected = Frame {
        flags: Flags::PUBLISH_BATCH,
        body: Bytes::from(body),
    };
    assert_eq!(reader.next(), Some(ReadEvent::Frame(expected)));
}

#[test]
fn strangers_are_cut_off_and_friends_are_told() {
    let big = frame(0x0009, &[0xAB; 70 << 10]);
    let (events, end) = read_all(ReadLimits::UNAUTHENTICATED, &[&big]);
    let reason = FatalReason::TooLarge {
        declared_bytes: 70 << 10,
        limit_bytes: MAX_UNAUTHENTICATED_FRAME_BYTES,
    };
    assert_eq!(events, [ReadEvent::Fatal(reason)]);
    assert_eq!(end, Err(EndError::AfterFatal));

    let mut bytes = frame(0x0009, &[0xAB; 200]);
    bytes.extend(frame(0, b"{}"));
    let (events, end) = read_all(SMALL, &[&bytes[..50], &bytes[50..]]);
    let [ReadEvent::Oversize(oversize), ReadEvent::Frame(after)] = &events[..] else {
        panic!("{events:?}");
    };
    assert_eq!(oversize.declared_bytes, 200);
    assert_eq!(oversize.prefix, [0xAB; OVERSIZE_PREFIX_BYTES][..]);
    assert_eq!(oversize.request_id(), Some(0xABAB_ABAB_ABAB_ABAB));
    assert_eq!(after.body, "{}");
    assert_eq!(end, Ok(()));
}

#[test]
fn an_oversized_frame_without_an_ack_names_no_request() {
    let (events, _) = read_all(SMALL, &[&frame(0x0001, &[0; 200])]);
    assert!(matches!(&events[..], [ReadEvent::Oversize(o)] if o.request_id().is_none()));
}

#[test]
fn past_the_discard_limit_the_stream_is_over() {
    let (events, _) = read_all(SMALL, &[&frame(0x0009, &[0; 301])]);
    assert!(matches!(
        events[..],
        [ReadEvent::Fatal(FatalReason::TooLarge {
            limit_bytes: 300,
            ..
        })]
    ));
}

#[test]
fn the_limits_apply_from_the_next_header_on() {
    let mut reader = FrameReader::new(ReadLimits::UNAUTHENTICATED);
    let mut bytes = frame(0, b"{}");
    bytes.extend(frame(1, &vec![0; 70 << 10]));
    reader.push(Bytes::from(bytes));
    assert!(matches!(reader.next(), Some(ReadEvent::Frame(_))));
    reader.set_limits(ReadLimits::AUTHENTICATED);
    assert!(matches!(reader.next(), Some(ReadEvent::Frame(f)) if f.body.len() == 70 << 10));
}

#[test]
fn a_broken_header_is_fatal_once() {
    let mut reader = FrameReader::new(ReadLimits::AUTHENTICATED);
    reader.push(Bytes::from_static(b"GET / HTTP/1.1\r\n"));
    assert!(matches!(
        reader.next(),
        Some(ReadEvent::Fatal(FatalReason::Header(HeaderError::Magic(_))))
    ));
    reader.push(Bytes::from(frame(0, b"{}")));
    assert_eq!(reader.next(), None);
    assert_eq!(reader.buffered_bytes(), 0);
}

#[test]
fn a_clean_end_and_a_cut_one_differ() {
    let bytes = frame(0, b"{}");
    for cut in 0..=bytes.len() {
        let (_, end) = read_all(ReadLimits::AUTHENTICATED, &[&bytes[..cut]]);
        let expected = match cut {
            0 | 14 => Ok(()),
            1..HEADER_BYTES => Err(EndError::InsideHeader),
            _ => Err(EndError::InsideFrame { declared_bytes: 2 }),
        };
        assert_eq!(end, expected, "cut at {cut}");
    }
}

proptest! {
    #[test]
    fn events_do_not_depend_on_the_cuts(
        frames in proptest::collection::vec(
            (0u16..0x8200, proptest::collection::vec(any::<u8>(), 0..350)), 0..6),
        tail in proptest::collection::vec(any::<u8>(), 0..20),
        steps in proptest::collection::vec(1usize..90, 1..8),
    ) {
        let mut bytes = Vec::new();
        for (flags, body) in &frames {
            bytes.extend(frame(*flags, body));
        }
        bytes.extend(tail);
        let whole = read_all(SMALL, &[&bytes]);
        let mut pieces = Vec::new();
        let mut rest = &bytes[..];
        for step in steps.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (piece, after) = rest.split_at((*step).min(rest.len()));
            pieces.push(piece);
            rest = after;
        }
        prop_assert_eq!(read_all(SMALL, &pieces), whole);
    }
}
