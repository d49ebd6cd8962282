//! Frames as text: one hex line to one JSON object and back, for captures and test vectors.
//!
//! A frame without flags is shown as the JSON message it holds; a binary one as an object with
//! `kind`, `flags` and the decoded fields, byte strings in hex and absent fields null. Not on any
//! path of the broker.

use bytes::Bytes;
use serde_json::{json, Value};

use super::flags::{Flags, FlagsError, Layout};
use super::frame::{EncodeError, Frame, FrameHeader, HeaderError, HEADER_BYTES};
use super::messages::{Answer, Malformed, Request};
use super::reader::MAX_DISCARDED_FRAME_BYTES;
use super::{EventBatch, PublishAck, PublishBatch};
use crate::limits::MAX_CLIENT_FRAME_BYTES;
use crate::wire::internal::hex::{from_hex, to_hex};

mod forms;

use forms::BinaryForm;

/// What a reader of requests does about a frame that is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Handling {
    /// End the stream without an answer: no frame boundary is known.
    Close,
    /// So far a proper prefix; broken only if the stream ends here.
    NeedMoreBytes,
    /// Answer `unsupported` and go on.
    AnswerUnsupported,
    /// Answer `invalid_request`.
    AnswerMalformed,
    /// Read it to its end, then answer `limit_exceeded`.
    DiscardThenAnswer,
    /// A whole frame and more behind it: fine in a stream, not as one frame.
    NotOneFrame,
}

impl Handling {
    fn name(self) -> &'static str {
        match self {
            Handling::Close => "close",
            Handling::NeedMoreBytes => "need-more-bytes",
            Handling::AnswerUnsupported => "answer-unsupported-kind",
            Handling::AnswerMalformed => "answer-malformed",
            Handling::DiscardThenAnswer => "discard-then-answer",
            Handling::NotOneFrame => "not-one-frame",
        }
    }
}

struct Refused {
    error: &'static str,
    /// None for a line that is not a frame at all.
    handling: Option<Handling>,
    detail: String,
    request_id: Option<u64>,
}

impl Refused {
    fn new(
        error: &'static str,
        handling: impl Into<Option<Handling>>,
        detail: impl ToString,
    ) -> Refused {
        Refused {
            error,
            handling: handling.into(),
            detail: detail.to_string(),
            request_id: None,
        }
    }

    fn about(mut self, request_id: Option<u64>) -> Refused {
        self.request_id = request_id;
        self
    }

    fn to_value(&self) -> Value {
        let mut value = json!({"ok": false, "error": self.error, "detail": self.detail});
        if let Some(handling) = self.handling {
            value["handling"] = handling.name().into();
        }
        if let Some(id) = self.request_id {
            value["request_id"] = id.into();
        }
        value
    }
}

/// Decodes one line: `{"ok":true,"flags":..,"message":..}`, or
/// `{"ok":false,"error":..,"handling":..,"detail":..}`, without `handling` when the line is not hex.
pub fn decode_line(line: &str) -> Value {
    match decode_hex(line) {
        Ok((flags, message)) => json!({"ok": true, "flags": flags.bits(), "message": message}),
        Err(refused) => refused.to_value(),
    }
}

/// Encodes one line, either a message or an object with a `message`, to a frame's hex. The error
/// is an object like that of [`decode_line`].
pub fn encode_line(line: &str) -> Result<String, Value> {
    let encoded = serde_json::from_str(line)
        .map_err(|error| Refused::new("not-json", None, error))
        .and_then(|value| encode_value(&value));
    match encoded {
        Ok(frame) => Ok(to_hex(&frame)),
        Err(refused) => Err(refused.to_value()),
    }
}

fn decode_hex(line: &str) -> Result<(Flags, Value), Refused> {
    let bytes = from_hex(line.trim()).map_err(|error| Refused::new("not-hex", None, error))?;
    let frame = one_frame(Bytes::from(bytes))?;
    let flags = frame.flags;
    let layout = flags.layout().map_err(refused_flags)?;
    Ok((flags, show(layout, frame)?))
}

fn one_frame(mut bytes: Bytes) -> Result<Frame, Refused> {
    let incomplete = |why: &str| Refused::new("incomplete", Handling::NeedMoreBytes, why);
    let header = bytes
        .first_chunk::<HEADER_BYTES>()
        .ok_or_else(|| incomplete("fewer bytes than a header"))?;
    let FrameHeader { flags, body_bytes } = FrameHeader::decode(header).map_err(refused_header)?;
    if body_bytes > MAX_CLIENT_FRAME_BYTES {
        let handling = match body_bytes > MAX_DISCARDED_FRAME_BYTES {
            true => Handling::Close,
            false => Handling::DiscardThenAnswer,
        };
        let why = format!("{body_bytes} bytes are declared");
        return Err(Refused::new("too-large", handling, why));
    }
    let mut body = bytes.split_off(HEADER_BYTES);
    if body.len() < body_bytes as usize {
        return Err(incomplete("fewer bytes than the declared length"));
    }
    let behind = body.split_off(body_bytes as usize);
    if !behind.is_empty() {
        let why = format!("{} bytes behind the frame", behind.len());
        return Err(Refused::new("trailing-bytes", Handling::NotOneFrame, why));
    }
    Ok(Frame { flags, body })
}

fn refused_header(error: HeaderError) -> Refused {
    let name = match error {
        HeaderError::Magic(_) => "invalid-magic",
        HeaderError::Version(_) => "unsupported-version",
        HeaderError::Flags(_) => "undefined-flags",
    };
    Refused::new(name, Handling::Close, error)
}

fn refused_flags(error: FlagsError) -> Refused {
    Refused::new("no-layout", Handling::AnswerMalformed, error)
}

fn refused_body(error: impl ToString) -> Refused {
    Refused::new("malformed-body", Handling::AnswerMalformed, error)
}

fn refused_json(error: Malformed) -> Refused {
    let refused = Refused::new("malformed-json", Handling::AnswerMalformed, &error);
    refused.about(error.request_id)
}

fn refused_encode(error: EncodeError) -> Refused {
    Refused::new("cannot-encode", None, error)
}

fn show(layout: Layout, frame: Frame) -> Result<Value, Refused> {
    let flags = frame.flags;
    let form = match layout {
        Layout::Json => return show_json(&frame.body),
        Layout::Publish(shape) => {
            let batch = PublishBatch::decode(shape, frame.body)
                .map_err(|error| refused_body(error).about(error.request_id))?;
            BinaryForm::of_publish(flags, &batch)
        }
        Layout::Ack(shape) => {
            let ack = PublishAck::decode(shape, frame.body).map_err(refused_body)?;
            BinaryForm::of_ack(flags, &ack)
        }
        Layout::Event(shape) => {
            let batch = EventBatch::decode(shape, frame.body).map_err(refused_body)?;
            BinaryForm::of_events(flags, &batch)
        }
    };
    serde_json::to_value(form).map_err(refused_body)
}

/// Reads the body as a message of either direction, then shows it as it came: what a later
/// version added to it stays visible.
fn show_json(body: &[u8]) -> Result<Value, Refused> {
    read_message(body)?;
    serde_json::from_slice(body).map_err(refused_body)
}

enum AnyMessage {
    Request(Request),
    Answer(Answer),
}

fn read_message(body: &[u8]) -> Result<AnyMessage, Refused> {
    let unknown = match Request::decode(body).map_err(refused_json)? {
        Request::Unknown { type_name, .. } if Answer::TYPES.contains(&type_name.as_str()) => {
            return Ok(AnyMessage::Answer(
                Answer::decode(body).map_err(refused_json)?,
            ));
        }
        Request::Unknown {
            type_name,
            request_id,
        } => (type_name, request_id),
        known => return Ok(AnyMessage::Request(known)),
    };
    let (type_name, request_id) = unknown;
    let why = format!("no message has the type {type_name:?}");
    let refused = Refused::new("unknown-type", Handling::AnswerUnsupported, why);
    Err(refused.about(request_id))
}

fn encode_value(value: &Value) -> Result<Bytes, Refused> {
    let message = match value.get("message") {
        Some(inner) if inner.is_object() => inner,
        _ => value,
    };
    if message.get("type").is_none() {
        let form: BinaryForm = serde_json::from_value(message.clone())
            .map_err(|error| Refused::new("not-a-message", None, error))?;
        return form.encode().map_err(refused_encode);
    }
    let body = serde_json::to_vec(message).map_err(refused_body)?;
    match read_message(&body)? {
        AnyMessage::Request(request) => request.encode(),
        AnyMessage::Answer(answer) => answer.encode(),
    }
    .map_err(refused_encode)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(line: &str) -> (String, String) {
        let value = decode_line(line);
        assert_eq!(value["ok"], false, "{value}");
        let text = |key: &str| value[key].as_str().unwrap_or_default().to_owned();
        (text("error"), text("handling"))
    }

    #[test]
    fn what_to_do_is_said_of_every_refusal() {
        for (line, error, handling) in [
            ("zz", "not-hex", ""),
            ("464", "not-hex", ""),
            ("464c5831", "incomplete", "need-more-bytes"),
            ("474554202f20485454502f31", "invalid-magic", "close"),
            ("464c58310001000000000002", "incomplete", "need-more-bytes"),
            ("464c58310001000004000001", "too-large", "close"),
            (
                "464c58310001000001000001",
                "too-large",
                "discard-then-answer",
            ),
            (
                "464c583100010000000000027b7d00",
                "trailing-bytes",
                "not-one-frame",
            ),
            (
                "464c583100014000000000027b7d",
                "no-layout",
                "answer-malformed",
            ),
            (
                "464c583100010000000000027b7d",
                "malformed-json",
                "answer-malformed",
            ),
            (
                "464c58310001000100000000",
                "malformed-body",
                "answer-malformed",
            ),
        ] {
            assert_eq!(refusal(line), (error.into(), handling.into()), "{line}");
        }
    }

    #[test]
    fn an_unknown_type_keeps_its_request_id() {
        let line =
            to_hex(b"FLX1\x00\x01\x00\x00\x00\x00\x00\x20{\"type\":\"later\",\"request_id\":77}");
        let value = decode_line(&line);
        assert_eq!(value["error"], "unknown-type");
        assert_eq!(value["handling"], "answer-unsupported-kind");
        assert_eq!(value["request_id"], 77);
    }

    #[test]
    fn a_message_field_does_not_hide_the_message() {
        let bare = r#"{"type":"error","message":"no"}"#;
        let frame = encode_line(bare).unwrap();
        assert_eq!(decode_line(&frame)["message"]["message"], "no");
        let wrapped = format!(r#"{{"flags":0,"message":{bare}}}"#);
        assert_eq!(encode_line(&wrapped), Ok(frame));
    }

    #[test]
    fn flags_that_contradict_the_fields_are_refused() {
        let line = r#"{"kind":"binary_event_batch_shared","flags":36,"base_offset":null,
            "skipped_before":0,"publisher_hex":null,"timestamps":null,"payloads_hex":[]}"#;
        assert!(encode_line(line).is_err());
        assert!(encode_line(&line.replace("36", "4")).is_ok());
        assert!(encode_line(&line.replace("\"flags\":36,", "")).is_ok());
    }
}
