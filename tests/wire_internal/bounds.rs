//! Every bound at its limit and one past it, on both sides.

use bytes::{Bytes, BytesMut};
use felix_uring::ids::{CorrelationId, Generation, Offset};
use felix_uring::wire::internal::{
    decode_frame, encode, encode_into, records_parts, refusal, BodyError, CacheOk, Credential,
    DecodeError, EncodeError, ErrorCode, FatalReason, FrameReader, Handling, Header, Kind, Message,
    Payloads, ReadEvent, Records, ReplicaLog, ShardRef, Text, HEADER_BYTES,
};

const LIMIT_BYTES: usize = 64 << 20;

fn shard() -> ShardRef {
    ShardRef {
        tenant: Text::default(),
        namespace: Text::default(),
        stream: Text::default(),
        shard: 0,
        generation: Generation(1),
    }
}

fn cache_ok(value_bytes: usize) -> Message {
    Message::CacheOk(CacheOk {
        correlation: CorrelationId(9),
        value: Some(Bytes::from(vec![3; value_bytes])),
    })
}

#[test]
fn text_ends_at_512_bytes_of_utf8() {
    assert!(Text::new(&"é".repeat(256)).is_ok());
    assert_eq!(
        Text::new(&"x".repeat(513)),
        Err(EncodeError::TextTooLong { bytes: 513 })
    );
}

#[test]
fn a_long_detail_is_cut_between_characters() {
    for (text, expected_bytes) in [
        ("x".repeat(600), 512),
        ("é".repeat(300), 512),
        (format!("x{}", "é".repeat(300)), 511),
        (format!("x{}", "日".repeat(300)), 511),
        (format!("x{}", "🚀".repeat(300)), 509),
        ("short".to_owned(), 5),
    ] {
        let answer = refusal(
            Kind::ReplicateRecords,
            CorrelationId(1),
            ErrorCode::LogGap,
            Offset(10),
            &text,
        );
        let frame = encode(&answer).expect("a refusal encodes");
        let Ok(Message::ReplicateError(read)) = decode_frame(frame) else {
            panic!("does not decode");
        };
        assert_eq!(read.expected_offset, Offset(10));
        assert_eq!(read.detail.len(), expected_bytes);
        assert!(text.starts_with(read.detail.as_str()));
    }
}

#[test]
fn credentials_have_1_to_16384_bytes() {
    assert_eq!(Credential::new(""), Err(EncodeError::CredentialEmpty));
    let longest = Credential::new(&"t".repeat(16_384)).expect("within the bound");
    assert_eq!(longest.as_str().len(), 16_384);
    assert_eq!(
        Credential::new(&"t".repeat(16_385)),
        Err(EncodeError::CredentialTooLong { bytes: 16_385 })
    );
    assert!(
        !format!("{longest:?}").contains("tt"),
        "a secret is printed"
    );
}

#[test]
fn a_batch_ends_at_65536_payloads() {
    let most = Payloads::from_slices(vec![[]; 65_536]).expect("within the bound");
    assert_eq!(most.len(), 65_536);
    assert_eq!(most.total_payload_bytes(), 0);
    assert_eq!(
        Payloads::from_slices(vec![[]; 65_537]),
        Err(EncodeError::TooManyPayloads { count: 65_537 })
    );
    // The bytes for one payload too many are all there; the count alone is refused.
    let mut section = BytesMut::zeroed(4 + 4 * 65_537);
    section[..4].copy_from_slice(&65_537u32.to_be_bytes());
    assert_eq!(
        Payloads::from_wire_section(section.freeze()),
        Err(BodyError::TooManyPayloads { count: 65_537 })
    );
}

#[test]
fn a_section_is_all_of_its_bytes() {
    let section = Payloads::from_slices(["a", "bb", ""]).expect("small");
    let wire = section.as_wire().clone();
    assert_eq!(&wire[..], b"\0\0\0\x03\0\0\0\x01a\0\0\0\x02bb\0\0\0\0");
    for end in 0..wire.len() {
        assert!(
            Payloads::from_wire_section(wire.slice(..end)).is_err(),
            "{end}"
        );
    }
    let longer = Bytes::from([&wire[..], b"x"].concat());
    assert_eq!(
        Payloads::from_wire_section(longer.clone()),
        Err(BodyError::TrailingBytes { extra: 1 })
    );
    assert_eq!(Payloads::parse_at(&longer, 0), Ok((section, wire.len())));
    assert!(Payloads::parse_at(&wire, wire.len() + 1).is_err());
    assert_eq!(
        Payloads::from_wire_section(Bytes::from_static(&[0; 4])),
        Ok(Payloads::empty())
    );
}

#[test]
fn a_body_of_exactly_64_mib_goes_both_ways() {
    let fixed = 8 + 1 + 4;
    let message = cache_ok(LIMIT_BYTES - fixed);
    let frame = encode(&message).expect("exactly at the bound");
    assert_eq!(frame.len(), HEADER_BYTES + LIMIT_BYTES);
    assert_eq!(decode_frame(frame.clone()), Ok(message));
    let mut reader = FrameReader::new();
    for chunk in 0..frame.len().div_ceil(1 << 20) {
        let start = chunk << 20;
        reader.push(frame.slice(start..frame.len().min(start + (1 << 20))));
    }
    assert!(matches!(reader.next(), Some(ReadEvent::Frame { body, .. }) if body == frame[12..]));

    let mut out = BytesMut::from(&b"kept"[..]);
    let too_large = EncodeError::BodyTooLarge {
        bytes: LIMIT_BYTES + 1,
    };
    assert_eq!(
        encode_into(&cache_ok(LIMIT_BYTES - fixed + 1), &mut out),
        Err(too_large)
    );
    assert_eq!(&out[..], b"kept");
}

#[test]
fn payloads_that_fit_alone_may_not_fit_a_body() {
    let payloads = Payloads::from_slices([vec![0u8; LIMIT_BYTES - 8]]).expect("at the bound");
    let records = Records {
        correlation: CorrelationId(1),
        log: ReplicaLog::Stream,
        shard: shard(),
        first_offset: Offset(0),
        checksum: payloads.batch_checksum(),
        payloads,
    };
    assert!(matches!(
        records_parts(&records),
        Err(EncodeError::BodyTooLarge { .. })
    ));
    assert!(matches!(
        encode(&Message::Records(records)),
        Err(EncodeError::BodyTooLarge { .. })
    ));
    assert!(matches!(
        Payloads::from_slices([vec![0u8; LIMIT_BYTES - 7]]),
        Err(EncodeError::BodyTooLarge { .. })
    ));
}

#[test]
fn a_reader_with_a_lower_limit_closes_on_a_longer_body() {
    for kind in [Kind::ForwardPublish.code(), 45] {
        let header = |length_bytes| Header { kind, length_bytes }.to_bytes();
        let mut reader = FrameReader::with_body_limit(1000);
        reader.push(Bytes::copy_from_slice(&header(1000)));
        assert_eq!(reader.next(), None);
        let mut reader = FrameReader::with_body_limit(1000);
        reader.push(Bytes::copy_from_slice(&header(1001)));
        let reason = FatalReason::LengthOverLimit {
            kind,
            length_bytes: 1001,
            limit_bytes: 1000,
        };
        assert_eq!(reader.next(), Some(ReadEvent::Fatal(reason)));
        assert!(reader.is_closed());
        reader.push(Bytes::from_static(b"more"));
        assert_eq!(reader.next(), None);
        assert_eq!(reader.buffered_bytes(), 0);
    }
}

#[test]
fn a_wrong_magic_wins_over_a_wrong_version_and_both_over_the_length() {
    let frame = |magic: u32, version: u16| {
        let mut frame = Header {
            kind: 0,
            length_bytes: u32::MAX,
        }
        .to_bytes();
        frame[..4].copy_from_slice(&magic.to_be_bytes());
        frame[4..6].copy_from_slice(&version.to_be_bytes());
        decode_frame(Bytes::copy_from_slice(&frame)).map_err(|e| (e.name(), e.handling()))
    };
    let client_magic = u32::from_be_bytes(*b"FLX1");
    let close = |name| Err((name, Handling::Close));
    assert_eq!(frame(client_magic, 2), close("wrong-magic"));
    assert_eq!(frame(0x464C_5849, 2), close("wrong-version"));
    assert_eq!(frame(0x464C_5849, 1), close("length-over-limit"));
    let at = |bytes: &'static [u8]| decode_frame(Bytes::from_static(bytes));
    assert_eq!(
        at(b"not a frame"),
        Err(DecodeError::Truncated { have: 11, need: 12 })
    );
}
