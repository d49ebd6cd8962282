//! What must hold for any input: truncations, bit flips, arbitrary messages, arbitrary chunks,
//! and the fuzz bodies on seeded inputs.

use bytes::Bytes;
use felix_uring::ids::{CorrelationId, Generation, Offset};
use felix_uring::wire::internal::{
    decode_frame, encode, AckMode, Bootstrap, CacheOk, CacheOp, CacheOpKind, Credential, ErrorCode,
    ForwardPublish, FrameReader, Handling, Hello, Message, NotLeader, Payloads, ReadEvent, Rebuild,
    Records, Refusal, ReplicaLog, ReplicateRefusal, ShardRef, Text,
};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

use crate::fuzz_bodies;
use crate::vectors::{frame_of, lines};

fn text() -> impl Strategy<Value = Text> {
    prop_oneof![
        8 => ".{0,20}".prop_map(|text| Text::new(&text).expect("short")),
        1 => Just(Text::new(&"x".repeat(512)).expect("at the bound")),
    ]
}

fn credential() -> impl Strategy<Value = Option<Credential>> {
    proptest::option::of(".{1,60}".prop_map(|token| Credential::new(&token).expect("short")))
}

fn payloads() -> impl Strategy<Value = Payloads> {
    vec(vec(any::<u8>(), 0..40), 0..12)
        .prop_map(|payloads| Payloads::from_slices(payloads).expect("small"))
}

fn shard() -> impl Strategy<Value = ShardRef> {
    (text(), text(), text(), any::<u32>(), any::<u64>()).prop_map(
        |(tenant, namespace, stream, shard, generation)| ShardRef {
            tenant,
            namespace,
            stream,
            shard,
            generation: Generation(generation),
        },
    )
}

fn correlation() -> impl Strategy<Value = CorrelationId> {
    any::<u64>().prop_map(CorrelationId)
}

fn offset() -> impl Strategy<Value = Offset> {
    any::<u64>().prop_map(Offset)
}

fn refusal() -> impl Strategy<Value = Refusal> {
    (correlation(), select(ErrorCode::ALL), text()).prop_map(|(correlation, code, detail)| {
        Refusal {
            correlation,
            code,
            detail,
        }
    })
}

fn request() -> impl Strategy<Value = Message> {
    let log = || select(ReplicaLog::ALL);
    let publish = (
        correlation(),
        shard(),
        select(AckMode::ALL),
        payloads(),
        credential(),
    )
        .prop_map(|(correlation, shard, ack, payloads, credential)| {
            Message::ForwardPublish(ForwardPublish {
                correlation,
                shard,
                ack,
                payloads,
                credential,
            })
        });
    let records = (
        correlation(),
        log(),
        shard(),
        offset(),
        any::<u64>(),
        payloads(),
    )
        .prop_map(
            |(correlation, log, shard, first_offset, checksum, payloads)| {
                Message::Records(Records {
                    correlation,
                    log,
                    shard,
                    first_offset,
                    checksum,
                    payloads,
                })
            },
        );
    let placed = (correlation(), log(), shard(), offset(), any::<bool>()).prop_map(
        |(correlation, log, shard, base_offset, rebuild)| match rebuild {
            true => Message::Rebuild(Rebuild {
                correlation,
                shard,
                log,
                base_offset,
            }),
            false => Message::Bootstrap(Bootstrap {
                correlation,
                log,
                shard,
                base_offset,
            }),
        },
    );
    let value = || vec(any::<u8>(), 0..40).prop_map(Bytes::from);
    let cache = (
        correlation(),
        shard(),
        select(CacheOpKind::ALL),
        text(),
        any::<u64>(),
        value(),
        credential(),
    )
        .prop_map(|(correlation, shard, op, key, ttl_ms, value, credential)| {
            Message::CacheOp(CacheOp {
                correlation,
                shard,
                op,
                key,
                ttl_ms,
                value,
                credential,
            })
        });
    prop_oneof![publish, records, placed, cache]
}

fn answer() -> impl Strategy<Value = Message> {
    let hello = (correlation(), text(), any::<bool>()).prop_map(|(correlation, node_id, ok)| {
        let hello = Hello {
            correlation,
            node_id,
        };
        match ok {
            true => Message::HelloOk(hello),
            false => Message::Hello(hello),
        }
    });
    let not_leader = (correlation(), text(), text(), any::<u64>()).prop_map(
        |(correlation, node_id, advertise_addr, generation)| {
            Message::NotLeader(NotLeader {
                correlation,
                node_id,
                advertise_addr,
                generation: Generation(generation),
            })
        },
    );
    let replicate_error = (refusal(), offset()).prop_map(|(refusal, expected_offset)| {
        Message::ReplicateError(ReplicateRefusal {
            correlation: refusal.correlation,
            code: refusal.code,
            expected_offset,
            detail: refusal.detail,
        })
    });
    let value = proptest::option::of(vec(any::<u8>(), 0..40).prop_map(Bytes::from));
    prop_oneof![
        hello,
        not_leader,
        replicate_error,
        refusal().prop_map(Message::ForwardPublishError),
        refusal().prop_map(Message::CacheError),
        (correlation(), value)
            .prop_map(|(correlation, value)| Message::CacheOk(CacheOk { correlation, value })),
        (correlation(), offset(), offset()).prop_map(|(correlation, first_offset, last_offset)| {
            Message::ForwardPublishOk {
                correlation,
                first_offset,
                last_offset,
            }
        }),
        (correlation(), offset()).prop_map(|(correlation, durable_offset)| {
            Message::ReplicateOk {
                correlation,
                durable_offset,
            }
        }),
    ]
}

fn message() -> impl Strategy<Value = Message> {
    prop_oneof![request(), answer()]
}

/// Frames to damage: the vectors that are small enough to try every cut of.
fn samples() -> Vec<Bytes> {
    let samples: Vec<Bytes> = lines("internal-valid.jsonl")
        .map(|vector| frame_of(&vector))
        .filter(|frame| frame.len() <= 700)
        .collect();
    assert!(samples.len() > 200);
    samples
}

#[test]
fn every_truncation_waits_for_more() {
    for frame in samples() {
        for end in 0..frame.len() {
            let error = decode_frame(frame.slice(..end)).expect_err("a prefix");
            assert_eq!(error.handling(), Handling::NeedMoreBytes);
        }
    }
}

#[test]
fn every_truncated_body_in_a_whole_frame_is_refused() {
    for frame in samples() {
        for body_bytes in 0..frame.len() - 12 {
            let mut cut = frame[..12 + body_bytes].to_vec();
            cut[8..12].copy_from_slice(&(body_bytes as u32).to_be_bytes());
            let error = decode_frame(Bytes::from(cut)).expect_err("a field is missing");
            let expected = match body_bytes {
                0..=7 => Handling::Close,
                _ => Handling::AnswerMalformed,
            };
            assert_eq!(error.handling(), expected);
        }
    }
}

#[test]
fn every_header_bit_flip_is_noticed() {
    for frame in samples() {
        for bit in 0..96 {
            let mut flipped = frame.to_vec();
            flipped[bit / 8] ^= 0x80 >> (bit % 8);
            fuzz_bodies::decode_one_frame(&flipped);
            let decoded = decode_frame(Bytes::from(flipped));
            match bit / 8 {
                0..=5 => assert_eq!(decoded.map_err(|e| e.handling()), Err(Handling::Close)),
                6..=7 => {} // Another kind may have the same layout.
                _ => assert!(decoded.is_err(), "bit {bit}"),
            }
        }
    }
}

#[test]
fn every_body_bit_flip_decodes_to_itself_or_is_refused() {
    for frame in samples().into_iter().step_by(7) {
        for bit in 96..8 * frame.len() {
            let mut flipped = frame.to_vec();
            flipped[bit / 8] ^= 0x80 >> (bit % 8);
            fuzz_bodies::decode_one_frame(&flipped);
        }
    }
}

/// Small deterministic generator for the seeded runs of the fuzz bodies (xorshift64*).
struct Seeded(u64);

impl Seeded {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    fn bytes(&mut self, most: usize) -> Vec<u8> {
        // Mostly small values: lengths, kinds and counts that are nearly right.
        (0..self.below(most + 1))
            .map(|_| (self.next() >> (32 + 8 * self.below(4))) as u8 >> self.below(8))
            .collect()
    }
}

#[test]
fn fuzz_body_decode_on_seeded_input() {
    let samples = samples();
    let mut seeded = Seeded(0x5EED_0001);
    for _ in 0..4000 {
        fuzz_bodies::decode_one_frame(&seeded.bytes(80));
        fuzz_bodies::decode_as_every_kind(&seeded.bytes(80));
        let mut damaged = samples[seeded.below(samples.len())].to_vec();
        for _ in 0..=seeded.below(3) {
            let at = seeded.below(damaged.len());
            damaged[at] = seeded.next() as u8;
        }
        fuzz_bodies::decode_one_frame(&damaged);
        fuzz_bodies::decode_as_every_kind(&damaged[12..]);
    }
}

/// 4,000 sequences, or as many as fit in `FELIX_FUZZ_SECONDS`, from a seed that `FELIX_FUZZ_SEED` may give.
#[test]
fn fuzz_body_stream_on_seeded_input() {
    let number = |name| {
        std::env::var(name)
            .ok()
            .map(|n| n.parse().expect("a number"))
    };
    let mut seeded = Seeded(number("FELIX_FUZZ_SEED").unwrap_or(0x5EED_0002));
    let longer = number("FELIX_FUZZ_SECONDS").map(std::time::Duration::from_secs);
    let started = std::time::Instant::now();
    let mut sequences = 0u64;
    while sequences < 4000 || longer.is_some_and(|limit| started.elapsed() < limit) {
        fuzz_bodies::read_stream(&seeded.bytes(400));
        sequences += 1;
    }
    eprintln!("{sequences} sequences");
}

proptest! {
    #[test]
    fn messages_survive_the_wire(message in message()) {
        let frame = encode(&message).expect("within bounds");
        let decoded = decode_frame(frame.clone()).expect("our own frame");
        prop_assert_eq!(&decoded, &message);
        prop_assert_eq!(encode(&decoded).expect("within bounds"), frame);
    }

    #[test]
    fn json_lines_survive(message in message()) {
        use felix_uring::wire::internal::{hex::to_hex, json};
        let hex = to_hex(&encode(&message).expect("within bounds"));
        let line = json::decode_line(&hex).to_string();
        prop_assert_eq!(json::encode_line(&line), Ok(hex));
    }

    #[test]
    fn any_chunking_gives_the_same_events(
        messages in vec(message(), 0..6),
        unknown_kind in 25u16..,
        tail in vec(any::<u8>(), 0..30),
        cuts in vec(1usize..200, 1..40),
    ) {
        let mut stream = Vec::new();
        for (index, message) in messages.iter().enumerate() {
            let start = stream.len();
            stream.extend_from_slice(&encode(message).expect("within bounds"));
            if index % 3 == 1 {
                stream[start + 6..start + 8].copy_from_slice(&unknown_kind.to_be_bytes());
            }
        }
        stream.extend_from_slice(&tail);
        let (expected, at_boundary) = fuzz_bodies::plain_events(&stream, u32::MAX);

        let mut reader = FrameReader::new();
        let mut events: Vec<ReadEvent> = Vec::new();
        let (mut rest, mut cut) = (&stream[..], 0);
        while !rest.is_empty() {
            let (chunk, behind) = rest.split_at(rest.len().min(cuts[cut % cuts.len()]));
            reader.push(Bytes::copy_from_slice(chunk));
            // Every other time the chunk waits for its successor.
            if cut % 2 == 0 {
                events.extend(reader.by_ref());
            }
            (rest, cut) = (behind, cut + 1);
        }
        events.extend(reader.by_ref());
        prop_assert_eq!(events, expected);
        prop_assert_eq!(reader.finish().is_ok(), at_boundary);
    }
}
