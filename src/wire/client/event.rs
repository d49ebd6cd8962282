//! The binary event batch.
//!
//! The encoder writes either one piece or a list of pieces in which large payloads are shared,
//! not copied; small ones are gathered, because a write per small payload costs more than its
//! copy.
//!
//! Invariants: payload `i` has the offset `base_offset + i`; a batch with skipped offsets carries
//! its base offset.

use bytes::{BufMut, Bytes, BytesMut};

use super::body::{BodyError, Fields};
use super::flags::EventShape;
use super::frame::{body_length, EncodeError, FrameHeader, HEADER_BYTES};

/// Events that follow one another in one shard.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EventBatch {
    pub subscription_id: Option<u64>,
    /// The offset of the first event.
    pub base_offset: Option<u64>,
    /// How many offsets just below the base hold no event.
    pub skipped_before: u64,
    /// Who published all of them.
    pub publisher: Option<Bytes>,
    /// Microseconds since the epoch, one per payload.
    pub times_us: Option<Vec<u64>>,
    pub payloads: Vec<Bytes>,
}

impl EventBatch {
    /// Reads a body whose flags selected `shape`. Bytes behind the last event are ignored.
    pub fn decode(shape: EventShape, body: Bytes) -> Result<EventBatch, BodyError> {
        let mut fields = Fields::new(body);
        let subscription_id = match shape.subscription {
            true => Some(fields.u64("the subscription id")?),
            false => None,
        };
        let base_offset = match shape.offsets {
            true => Some(fields.u64("the base offset")?),
            false => None,
        };
        let skipped_before = match shape.skipped {
            true => fields.u64("the skip count")?,
            false => 0,
        };
        let publisher = match shape.publisher {
            true => {
                let len = fields.u8("the publisher")?;
                Some(fields.bytes("the publisher", usize::from(len))?)
            }
            false => None,
        };
        let (times_us, payloads) = decode_events(shape, fields)?;
        Ok(EventBatch {
            subscription_id,
            base_offset,
            skipped_before,
            publisher,
            times_us,
            payloads,
        })
    }

    /// The flags this batch is sent with; a skip count of zero takes none.
    pub fn shape(&self) -> EventShape {
        EventShape {
            subscription: self.subscription_id.is_some(),
            offsets: self.base_offset.is_some(),
            skipped: self.skipped_before != 0,
            publisher: self.publisher.is_some(),
            times: self.times_us.is_some(),
        }
    }

    /// The length of the body, for keeping a batch under a bound before it is built.
    pub fn body_bytes(&self) -> usize {
        let shape = self.shape();
        let fixed = 8
            * (usize::from(shape.subscription)
                + usize::from(shape.offsets)
                + usize::from(shape.skipped));
        let publisher = self.publisher.as_ref().map_or(0, |name| 1 + name.len());
        let entry = if shape.times { 12 } else { 4 };
        let payloads: usize = self.payloads.iter().map(|p| entry + p.len()).sum();
        fixed + publisher + 4 + payloads
    }

    /// The frame in one piece.
    pub fn encode(&self) -> Result<Bytes, EncodeError> {
        let mut pieces = Vec::with_capacity(1);
        self.encode_into(usize::MAX, &mut pieces)?;
        Ok(pieces.pop().unwrap_or_default())
    }

    /// Appends the frame to `pieces`. Payloads of `share_from_bytes` and more are shared with the
    /// batch; shorter ones are copied together with the fields around them.
    pub fn encode_into(
        &self,
        share_from_bytes: usize,
        pieces: &mut Vec<Bytes>,
    ) -> Result<(), EncodeError> {
        self.check()?;
        let body_bytes = self.body_bytes();
        let header = FrameHeader {
            flags: self.shape().flags(),
            body_bytes: body_length(body_bytes)?,
        };
        let shared: usize = self
            .payloads
            .iter()
            .map(Bytes::len)
            .filter(|&len| len >= share_from_bytes)
            .sum();
        let mut copied = BytesMut::with_capacity(HEADER_BYTES + body_bytes - shared);
        copied.put_slice(&header.encode());
        self.encode_front(&mut copied)?;
        for (i, payload) in self.payloads.iter().enumerate() {
            if let Some(&time) = self.times_us.as_ref().and_then(|times| times.get(i)) {
                copied.put_u64(time);
            }
            copied.put_u32(body_length(payload.len())?);
            if payload.len() >= share_from_bytes {
                pieces.push(copied.split().freeze());
                pieces.push(payload.clone());
            } else {
                copied.put_slice(payload);
            }
        }
        if !copied.is_empty() {
            pieces.push(copied.freeze());
        }
        Ok(())
    }

    fn check(&self) -> Result<(), EncodeError> {
        if self.skipped_before != 0 && self.base_offset.is_none() {
            let why = "a skip count needs the offset it counts back from";
            return Err(EncodeError::Contradiction(why));
        }
        match &self.times_us {
            Some(times) if times.len() != self.payloads.len() => Err(EncodeError::Contradiction(
                "a batch with times has one for each payload",
            )),
            _ => Ok(()),
        }
    }

    fn encode_front(&self, copied: &mut BytesMut) -> Result<(), EncodeError> {
        if let Some(id) = self.subscription_id {
            copied.put_u64(id);
        }
        if let Some(base) = self.base_offset {
            copied.put_u64(base);
        }
        if self.skipped_before != 0 {
            copied.put_u64(self.skipped_before);
        }
        if let Some(publisher) = &self.publisher {
            let len = u8::try_from(publisher.len()).map_err(|_| EncodeError::FieldTooLong {
                field: "the publisher",
                len: publisher.len(),
                max: usize::from(u8::MAX),
            })?;
            copied.put_u8(len);
            copied.put_slice(publisher);
        }
        copied.put_u32(body_length(self.payloads.len())?);
        Ok(())
    }
}

/// Walks the events before allocating for them, so a refused body costs nothing.
fn decode_events(
    shape: EventShape,
    mut fields: Fields,
) -> Result<(Option<Vec<u64>>, Vec<Bytes>), BodyError> {
    let count = fields.count(if shape.times { 12 } else { 4 })?;
    let section = fields.into_rest();
    let mut walk = Fields::new(section.clone());
    for _ in 0..count {
        take_event(shape, &mut walk)?;
    }
    let mut fields = Fields::new(section);
    let mut times = Vec::with_capacity(if shape.times { count } else { 0 });
    let mut payloads = Vec::with_capacity(count);
    for _ in 0..count {
        let (time, payload) = take_event(shape, &mut fields)?;
        times.extend(time);
        payloads.push(payload);
    }
    Ok((shape.times.then_some(times), payloads))
}

fn take_event(shape: EventShape, fields: &mut Fields) -> Result<(Option<u64>, Bytes), BodyError> {
    let time = match shape.times {
        true => Some(fields.u64("an event's time")?),
        false => None,
    };
    let len = fields.u32("a payload length")?;
    Ok((time, fields.bytes("a payload", len as usize)?))
}
