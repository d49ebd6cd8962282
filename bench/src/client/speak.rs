//! What a stream of the load generator says and hears: the client protocol, or the frames of the relay
//! probe.
//!
//! Sans-IO. The load loop does not know which of the two it drives, so that both cost it the same.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use felix_uring::wire::client::messages::{Answer, Auth, CachePut};
use felix_uring::wire::client::{
    encode_message, AckGranularity, AckRequest, Blob, Features, Flags, FrameReader, Payloads,
    PublishBatch, PublishOutcome, ReadEvent, ReadLimits, Refusal, RetryClass, ToClient,
};

use crate::record::parse_record;
use crate::relay::frames::{self, ACK_BYTES};

/// Whom the load generator talks to.
#[derive(Debug, Clone)]
pub enum Protocol {
    /// Brokers, with publishes.
    Felix(FelixNames),
    /// Brokers, with a put of each record into the cache that the names call a stream; a batch is one
    /// record.
    Puts(FelixNames),
    /// The relay probe.
    Relay,
}

/// What a publish names.
#[derive(Debug, Clone)]
pub struct FelixNames {
    /// Tenant of the token.
    pub tenant: String,
    /// Namespace of the stream.
    pub namespace: String,
    /// The stream.
    pub stream: String,
    /// The token.
    pub token: String,
}

/// What came in on a stream.
#[derive(Debug)]
pub enum Heard {
    /// The stream may be used.
    Ready,
    /// A batch is written.
    Accepted {
        /// Which.
        request_id: u64,
        /// Where, if told.
        offset: Option<u64>,
    },
    /// A batch is not accepted, or not known to be.
    Refused {
        /// Which.
        request_id: u64,
        /// Why, and what may be done.
        refusal: Box<Refusal>,
    },
    /// The stream is of no use any more.
    Broken(String),
}

/// One stream's half of the protocol.
pub enum Speaker {
    /// To a broker.
    Felix {
        /// Cuts frames.
        reader: FrameReader,
        /// Whether `auth` was answered.
        authenticated: bool,
    },
    /// To the relay probe.
    Relay {
        /// An answer that has not come whole.
        partial: BytesMut,
    },
}

impl Protocol {
    /// A fresh stream and what it says first.
    pub fn open(&self) -> Result<(Speaker, Option<Bytes>), String> {
        match self {
            Self::Felix(names) | Self::Puts(names) => {
                let hello = encode_message(&auth_message(names, Features::ERROR_CODES))
                    .map_err(|error| error.to_string())?;
                let speaker = Speaker::Felix {
                    reader: FrameReader::new(ReadLimits::AUTHENTICATED),
                    authenticated: false,
                };
                Ok((speaker, Some(hello)))
            }
            Self::Relay => Ok((
                Speaker::Relay {
                    partial: BytesMut::new(),
                },
                None,
            )),
        }
    }

    /// A batch as it goes out: what comes before the payload section, and the section.
    pub fn publish(
        &self,
        request_id: u64,
        key: Option<Bytes>,
        section: Bytes,
    ) -> Result<[Bytes; 2], String> {
        match self {
            Self::Felix(names) => {
                let batch = PublishBatch {
                    ack: Some(AckRequest {
                        request_id,
                        granularity: AckGranularity::PerBatch,
                    }),
                    producer: None,
                    key,
                    tenant_id: names.tenant.as_str().into(),
                    namespace: names.namespace.as_str().into(),
                    stream: names.stream.as_str().into(),
                    payloads: Payloads::from_wire_section(section).map_err(|e| e.to_string())?,
                };
                batch.encode_parts().map_err(|e| e.to_string())
            }
            Self::Puts(names) => {
                // A count of one, a length, the record.
                let value = section.slice(SECTION_HEAD_BYTES.min(section.len())..);
                let record = parse_record(&value).map_err(|error| error.to_string())?;
                let put = CachePut {
                    tenant_id: names.tenant.clone(),
                    namespace: names.namespace.clone(),
                    cache: names.stream.clone(),
                    key: key_of_put(record.writer, record.sequence),
                    value: Blob(value),
                    request_id: Some(request_id),
                    ttl_ms: None,
                };
                let frame = encode_message(&put).map_err(|error| error.to_string())?;
                Ok([frame, Bytes::new()])
            }
            Self::Relay => {
                let mut header = BytesMut::with_capacity(frames::HEADER_BYTES);
                header.put_u32(section.len() as u32);
                header.put_u64(request_id);
                Ok([header.freeze(), section])
            }
        }
    }
}

/// Keys of one writer; it goes through them round and round.
pub const KEYS_OF_A_WRITER: u64 = 256;
/// Before the record in a section that has one.
const SECTION_HEAD_BYTES: usize = 8;

/// Where a writer puts a record.
pub fn key_of_put(writer: u32, sequence: u64) -> String {
    format!("w{writer}-{}", sequence % KEYS_OF_A_WRITER)
}

/// The first message of a stream.
pub fn auth_message(names: &FelixNames, features: Features) -> Auth {
    // Everything the published client reads, but for the owner on each answer: this tool stays with
    // the broker it was told to use.
    let flags = 0x1FFF & !Flags::ACK_OWNER.bits();
    Auth {
        tenant_id: names.tenant.clone(),
        token: names.token.clone(),
        client_flags: Some(flags),
        client_features: Some(features.to_words().0),
        client_features_hi: None,
    }
}

impl Speaker {
    /// Bytes came in.
    pub fn push(&mut self, chunk: Bytes) {
        match self {
            Self::Felix { reader, .. } => reader.push(chunk),
            Self::Relay { partial } => partial.extend_from_slice(&chunk),
        }
    }

    /// Whether the stream may be used from the start.
    pub fn is_ready_at_once(&self) -> bool {
        matches!(self, Self::Relay { .. })
    }

    /// The next thing heard.
    pub fn hear(&mut self) -> Option<Heard> {
        match self {
            Self::Relay { partial } => {
                if partial.len() < ACK_BYTES {
                    return None;
                }
                let request_id = partial.get_u64();
                let offset = Some(partial.get_u64());
                Some(Heard::Accepted { request_id, offset })
            }
            Self::Felix {
                reader,
                authenticated,
            } => loop {
                let frame = match reader.next()? {
                    ReadEvent::Frame(frame) => frame,
                    ReadEvent::Oversize(_) => return Some(broken("an oversized frame")),
                    ReadEvent::Fatal(reason) => return Some(broken(reason)),
                };
                match ToClient::decode(frame) {
                    Ok(ToClient::Ack(ack)) => {
                        let request_id = ack.request_id;
                        return Some(match ack.outcome {
                            PublishOutcome::Accepted { offset } => {
                                Heard::Accepted { request_id, offset }
                            }
                            PublishOutcome::Failed(refusal) => Heard::Refused {
                                request_id,
                                refusal: Box::new(refusal),
                            },
                        });
                    }
                    Ok(ToClient::Answer(answer)) => {
                        if let Some(heard) = judge(answer, authenticated) {
                            return Some(heard);
                        }
                    }
                    Ok(ToClient::Events(_)) => return Some(broken("events nobody asked for")),
                    Err(error) => return Some(broken(error)),
                }
            },
        }
    }
}

fn broken(why: impl ToString) -> Heard {
    Heard::Broken(why.to_string())
}

fn judge(answer: Answer, authenticated: &mut bool) -> Option<Heard> {
    match answer {
        Answer::AuthOk(_) | Answer::PlainOk(_) if !*authenticated => {
            *authenticated = true;
            Some(Heard::Ready)
        }
        Answer::PublishOk(ok) => Some(Heard::Accepted {
            request_id: ok.request_id,
            offset: ok.offset,
        }),
        Answer::PublishErrorAnswer(error) => Some(Heard::Refused {
            request_id: error.request_id,
            refusal: Box::new(error.refusal()),
        }),
        Answer::CacheOk(ok) => Some(Heard::Accepted {
            request_id: ok.request_id,
            offset: None,
        }),
        Answer::ErrorAnswer(error) => {
            let code = error.code.as_ref().map_or("no code", |code| code.name());
            Some(broken(format!("{code}: {}", error.message)))
        }
        // Later versions may say more; none of it is about a publish.
        Answer::Unknown { .. } => None,
        other => Some(broken(format!("an unexpected {}", other.type_name()))),
    }
}

/// What a refusal means for the records of its batch and for the operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing was written; worth another attempt.
    Retry {
        /// Not before.
        after_ms: u64,
    },
    /// Nothing was written, and trying again is no use.
    Failed,
    /// It may have been written.
    Unknown,
}

/// Reads a refusal; what gives no class promises nothing.
pub fn verdict(refusal: &Refusal) -> Verdict {
    let asked_ms = refusal.detail.as_ref().and_then(|d| d.retry_after_ms);
    match refusal.class() {
        Some(RetryClass::Retry) => Verdict::Retry {
            after_ms: asked_ms.unwrap_or(5),
        },
        Some(RetryClass::RetryAfter) => Verdict::Retry {
            after_ms: asked_ms.unwrap_or(50),
        },
        Some(RetryClass::Redirect | RetryClass::Fatal) => Verdict::Failed,
        Some(RetryClass::OutcomeUnknown) | None => Verdict::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use felix_uring::wire::client::{ErrorCode, PublishAck, Request, ToBroker};

    fn names() -> FelixNames {
        FelixNames {
            tenant: "t1".into(),
            namespace: "default".into(),
            stream: "bench".into(),
            token: "a.b.c".into(),
        }
    }

    #[test]
    fn a_publish_is_one_a_broker_reads() {
        let protocol = Protocol::Felix(names());
        let section = crate::record::RecordMaker::new(1, 64).section(0, 0, 0, 3);
        let parts = protocol
            .publish(7, Some(Bytes::from_static(b"k")), section.freeze())
            .unwrap();
        let mut reader = FrameReader::new(ReadLimits::AUTHENTICATED);
        parts.into_iter().for_each(|part| reader.push(part));
        let Some(ReadEvent::Frame(frame)) = reader.next() else {
            panic!("no frame");
        };
        let Ok(ToBroker::Publish(batch)) = ToBroker::decode(frame) else {
            panic!("no publish");
        };
        assert_eq!(batch.ack.unwrap().request_id, 7);
        assert_eq!(batch.key.as_deref(), Some(&b"k"[..]));
        assert_eq!(batch.payloads.len(), 3);
    }

    #[test]
    fn a_put_is_one_a_broker_reads_under_a_key_of_its_writer() {
        let protocol = Protocol::Puts(names());
        let section = crate::record::RecordMaker::new(1, 64).section(3, 0, KEYS_OF_A_WRITER + 5, 1);
        let parts = protocol.publish(7, None, section.freeze()).unwrap();
        let mut reader = FrameReader::new(ReadLimits::AUTHENTICATED);
        parts.into_iter().for_each(|part| reader.push(part));
        let Some(ReadEvent::Frame(frame)) = reader.next() else {
            panic!("no frame");
        };
        let Ok(ToBroker::Request(Request::CachePut(put))) = ToBroker::decode(frame) else {
            panic!("no put");
        };
        assert_eq!((&*put.key, put.request_id), ("w3-5", Some(7)));
        assert_eq!(
            parse_record(&put.value.0).unwrap().sequence,
            KEYS_OF_A_WRITER + 5
        );
    }

    #[test]
    fn answers_are_heard_whatever_pieces_they_come_in() {
        let (mut speaker, hello) = Protocol::Felix(names()).open().unwrap();
        assert!(hello.is_some() && !speaker.is_ready_at_once());
        let mut bytes = encode_message(&felix_uring::wire::client::messages::AuthOk {
            server_flags: 0x127D,
            server_features: None,
            server_features_hi: None,
            listener_ports: None,
            publish_window: None,
        })
        .unwrap()
        .to_vec();
        bytes.extend(PublishAck::accepted(3, Some(44)).encode().unwrap());
        let refusal = Refusal::new(ErrorCode::Overloaded, "busy");
        bytes.extend(PublishAck::failed(4, refusal).encode().unwrap());
        let mut heard = Vec::new();
        for byte in bytes {
            speaker.push(Bytes::copy_from_slice(&[byte]));
            while let Some(h) = speaker.hear() {
                heard.push(h);
            }
        }
        assert!(matches!(heard[0], Heard::Ready));
        assert!(matches!(
            heard[1],
            Heard::Accepted {
                request_id: 3,
                offset: Some(44)
            }
        ));
        let Heard::Refused {
            request_id: 4,
            refusal,
        } = &heard[2]
        else {
            panic!("{heard:?}");
        };
        assert_eq!(verdict(refusal), Verdict::Retry { after_ms: 50 });
    }

    #[test]
    fn only_a_promise_that_nothing_was_written_is_a_refusal() {
        let of = |code: ErrorCode| verdict(&Refusal::new(code, ""));
        assert!(matches!(
            of(ErrorCode::ShardUnavailable),
            Verdict::Retry { .. }
        ));
        assert!(matches!(of(ErrorCode::Draining), Verdict::Retry { .. }));
        assert_eq!(of(ErrorCode::Forbidden), Verdict::Failed);
        for code in [
            ErrorCode::Unacknowledged,
            ErrorCode::Storage,
            ErrorCode::Internal,
        ] {
            assert_eq!(of(code), Verdict::Unknown, "{code:?}");
        }
    }

    #[test]
    fn relay_answers_are_two_numbers() {
        let (mut speaker, hello) = Protocol::Relay.open().unwrap();
        assert!(hello.is_none() && speaker.is_ready_at_once());
        let mut bytes = BytesMut::new();
        bytes.put_u64(9);
        bytes.put_u64(1);
        let tail = bytes.split_off(5);
        speaker.push(bytes.freeze());
        assert!(speaker.hear().is_none());
        speaker.push(tail.freeze());
        assert!(matches!(
            speaker.hear(),
            Some(Heard::Accepted { request_id: 9, .. })
        ));
    }
}
