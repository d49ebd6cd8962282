//! One subscriber's half of the protocol: a broker's event stream, or the frames of the bare fan-out.
//!
//! Sans-IO, so that both cost the load loop the same.

use bytes::{Buf, Bytes, BytesMut};
use felix_uring::wire::client::messages::Answer;
use felix_uring::wire::client::{FrameReader, Payloads, ReadEvent, ReadLimits, ToClient};

use crate::relay::frames::HEADER_BYTES;

/// What came in for a subscriber.
#[derive(Debug)]
pub enum Told {
    /// From now on it gets everything published.
    Ready,
    /// Records that follow one another.
    Records {
        /// Of the first, if told.
        offset: Option<u64>,
        /// All of them.
        payloads: Vec<Bytes>,
    },
    /// Nothing more is to be had.
    Broken(String),
}

/// A subscriber's stream.
pub enum Listener {
    /// Of a broker.
    Felix(FrameReader),
    /// Of the bare fan-out.
    Bare(BytesMut),
}

impl Listener {
    /// An event stream of a broker.
    pub fn felix() -> Self {
        Self::Felix(FrameReader::new(ReadLimits::AUTHENTICATED))
    }

    /// Bytes came in.
    pub fn push(&mut self, chunk: Bytes) {
        match self {
            Self::Felix(reader) => reader.push(chunk),
            Self::Bare(buffer) => buffer.extend_from_slice(&chunk),
        }
    }

    /// The next thing told.
    pub fn hear(&mut self) -> Option<Told> {
        match self {
            Self::Felix(reader) => Some(match reader.next()? {
                ReadEvent::Frame(frame) => match ToClient::decode(frame) {
                    Ok(ToClient::Events(batch)) => Told::Records {
                        offset: batch.base_offset,
                        payloads: batch.payloads,
                    },
                    Ok(ToClient::Answer(Answer::EventStreamHello(_))) => Told::Ready,
                    Ok(ToClient::Answer(other)) => Told::Broken(other.type_name().to_owned()),
                    Ok(ToClient::Ack(_)) => Told::Broken("an ack".into()),
                    Err(error) => Told::Broken(error.to_string()),
                },
                ReadEvent::Oversize(_) => Told::Broken("an oversized frame".into()),
                ReadEvent::Fatal(reason) => Told::Broken(reason.to_string()),
            }),
            Self::Bare(buffer) => {
                let body_bytes = u32::from_be_bytes(*buffer.first_chunk::<4>()?) as usize;
                if buffer.len() < HEADER_BYTES + body_bytes {
                    return None;
                }
                buffer.advance(HEADER_BYTES);
                if body_bytes == 0 {
                    return Some(Told::Ready);
                }
                let section = buffer.split_to(body_bytes).freeze();
                Some(match Payloads::from_wire_section(section) {
                    Ok(payloads) => Told::Records {
                        offset: None,
                        payloads: payloads.iter_bytes().collect(),
                    },
                    Err(error) => Told::Broken(error.to_string()),
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::RecordMaker;
    use bytes::BufMut;
    use felix_uring::wire::client::messages::EventStreamHello;
    use felix_uring::wire::client::{encode_message, EventBatch};

    fn heard(mut listener: Listener, bytes: &[u8]) -> Vec<(Option<u64>, usize)> {
        let mut heard = Vec::new();
        for byte in bytes {
            listener.push(Bytes::copy_from_slice(&[*byte]));
            while let Some(told) = listener.hear() {
                heard.push(match told {
                    Told::Ready => (None, 0),
                    Told::Records { offset, payloads } => (offset, payloads.len()),
                    Told::Broken(why) => panic!("{why}"),
                });
            }
        }
        heard
    }

    #[test]
    fn both_forms_are_heard_whatever_pieces_they_come_in() {
        let mut felix = encode_message(&EventStreamHello { subscription_id: 3 })
            .unwrap()
            .to_vec();
        let batch = EventBatch {
            base_offset: Some(40),
            payloads: vec![Bytes::from_static(b"a"), Bytes::new()],
            ..EventBatch::default()
        };
        felix.extend_from_slice(&batch.encode().unwrap());
        assert_eq!(heard(Listener::felix(), &felix), [(None, 0), (Some(40), 2)]);

        let section = RecordMaker::new(1, 30).section(0, 0, 0, 3);
        let mut bare = vec![0; HEADER_BYTES];
        bare.put_u32(section.len() as u32);
        bare.put_u64(1);
        bare.extend_from_slice(&section);
        assert_eq!(
            heard(Listener::Bare(BytesMut::new()), &bare),
            [(None, 0), (None, 3)]
        );
    }
}
