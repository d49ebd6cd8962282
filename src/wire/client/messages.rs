//! The JSON messages: what they are called and how one is found in a body.
//!
//! A body that begins with its `type`, as programs write it, is read once, into the message's own type.
//! Any other, and one that cannot be read so, is read twice: once for the shape of the whole and for
//! `type` (and `request_id`, so that a request that cannot be read can still be answered), once into
//! the message's own type. What comes of it is the same.
//! Field order is free, unknown fields are ignored, repeated ones are an error. The messages
//! themselves are in [`super::requests`] and [`super::answers`].

use std::fmt;

use bytes::Bytes;
use serde::de::{Error, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::flags::Flags;
use super::frame::{body_length, EncodeError, FrameHeader, HEADER_BYTES};

pub use super::answers::*;
pub use super::requests::*;

/// The longest `type` that is looked at; it may be repeated in an answer.
const MAX_TYPE_BYTES: usize = 256;
/// The longest explanation of a refused body.
const MAX_WHY_BYTES: usize = 200;

/// A JSON message with a name.
pub trait Message: Serialize + Sized {
    /// The value of `type`.
    const TYPE: &'static str;

    /// The tenant in the message's scope, which must be that of the token.
    fn scope_tenant(&self) -> Option<&str>;
}

/// Declares a message. `field: T` must be there, `field?: T` is left out when absent,
/// `field~: T` is left out when zero or false. With `scoped` the message starts with a tenant and
/// a namespace.
macro_rules! message {
    ($(#[$doc:meta])* $tag:literal $name:ident { $($body:tt)* }) => {
        $crate::wire::client::messages::message!(
            @ [$(#[$doc])*] $tag $name plain {} $($body)*);
    };
    ($(#[$doc:meta])* scoped $tag:literal $name:ident { $($body:tt)* }) => {
        $crate::wire::client::messages::message!(
            @ [$(#[$doc])*] $tag $name scoped { pub tenant_id: String, pub namespace: String, }
            $($body)*);
    };
    (@ $docs:tt $tag:literal $name:ident $scope:ident { $($done:tt)* }
        $(#[$attr:meta])* $field:ident : $ty:ty, $($rest:tt)*) => {
        $crate::wire::client::messages::message!(
            @ $docs $tag $name $scope { $($done)* $(#[$attr])* pub $field: $ty, } $($rest)*);
    };
    (@ $docs:tt $tag:literal $name:ident $scope:ident { $($done:tt)* }
        $field:ident ? : $ty:ty, $($rest:tt)*) => {
        $crate::wire::client::messages::message!(
            @ $docs $tag $name $scope { $($done)*
                #[serde(default, skip_serializing_if = "Option::is_none")]
                pub $field: Option<$ty>, } $($rest)*);
    };
    (@ $docs:tt $tag:literal $name:ident $scope:ident { $($done:tt)* }
        $field:ident ~ : $ty:ty, $($rest:tt)*) => {
        $crate::wire::client::messages::message!(
            @ $docs $tag $name $scope { $($done)*
                #[serde(default, skip_serializing_if = "super::messages::is_default")]
                pub $field: $ty, } $($rest)*);
    };
    (@ [$($docs:tt)*] $tag:literal $name:ident $scope:ident { $($fields:tt)* }) => {
        $($docs)*
        #[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
        #[serde(tag = "type", rename = $tag)]
        pub struct $name { $($fields)* }

        impl $crate::wire::client::messages::Message for $name {
            const TYPE: &'static str = $tag;

            fn scope_tenant(&self) -> Option<&str> {
                $crate::wire::client::messages::message!(@tenant self $scope)
            }
        }
    };
    (@tenant $self:ident scoped) => { Some(&$self.tenant_id) };
    (@tenant $self:ident plain) => { None };
}

/// Declares the enum of all messages of one direction.
macro_rules! message_enum {
    ($(#[$doc:meta])* $enum:ident { $($variant:ident,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq)]
        pub enum $enum {
            $($variant($variant),)*
            /// A message of a later version: well formed, but with a `type` not in this list.
            Unknown { type_name: String, request_id: Option<u64> },
        }

        impl $enum {
            /// Every `type` this direction has.
            pub const TYPES: &'static [&'static str] =
                &[$(<$variant as $crate::wire::client::messages::Message>::TYPE),*];

            /// Reads the body of a frame without flags.
            pub fn decode(
                body: &[u8],
            ) -> Result<$enum, $crate::wire::client::messages::Malformed> {
                if let Some(message) = Self::decode_plain(body) {
                    return Ok(message);
                }
                let (text, envelope) = $crate::wire::client::messages::Envelope::read(body)?;
                match envelope.type_name.as_str() {
                    $(<$variant as $crate::wire::client::messages::Message>::TYPE => {
                        serde_json::from_str(text).map($enum::$variant).map_err(|error| {
                            $crate::wire::client::messages::Malformed::typed(&envelope, &error)
                        })
                    })*
                    _ => Ok($enum::Unknown {
                        type_name: envelope.type_name,
                        request_id: envelope.request_id,
                    }),
                }
            }

            /// A body that is read once: what programs write. `None` when it takes a closer look.
            fn decode_plain(body: &[u8]) -> Option<$enum> {
                let (text, type_name) = $crate::wire::client::messages::plain_type(body)?;
                match type_name {
                    $(<$variant as $crate::wire::client::messages::Message>::TYPE => {
                        serde_json::from_str(text).ok().map($enum::$variant)
                    })*
                    _ => None,
                }
            }

            /// The message as a frame. An unknown message cannot be written again.
            pub fn encode(&self) -> Result<bytes::Bytes, $crate::wire::client::frame::EncodeError> {
                match self {
                    $($enum::$variant(message) => {
                        $crate::wire::client::messages::encode_message(message)
                    })*
                    $enum::Unknown { .. } => {
                        let why = "a message of an unknown type cannot be written";
                        Err($crate::wire::client::frame::EncodeError::Contradiction(why))
                    }
                }
            }

            /// The value of `type`.
            pub fn type_name(&self) -> &str {
                match self {
                    $($enum::$variant(_) => {
                        <$variant as $crate::wire::client::messages::Message>::TYPE
                    })*
                    $enum::Unknown { type_name, .. } => type_name,
                }
            }

            /// The tenant in the message's scope, which must be that of the token.
            pub fn scope_tenant(&self) -> Option<&str> {
                match self {
                    $($enum::$variant(message) => {
                        $crate::wire::client::messages::Message::scope_tenant(message)
                    })*
                    $enum::Unknown { .. } => None,
                }
            }
        }

        $(impl From<$variant> for $enum {
            fn from(message: $variant) -> $enum {
                $enum::$variant(message)
            }
        })*
    };
}

pub(super) use {message, message_enum};

/// A JSON body that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("malformed message: {why}")]
pub struct Malformed {
    /// The message's `type`, if the body has one.
    pub type_name: Option<String>,
    /// The request the refusal is about, if the body names it.
    pub request_id: Option<u64>,
    pub why: String,
}

impl Malformed {
    pub(super) fn typed(envelope: &Envelope, error: &serde_json::Error) -> Malformed {
        Malformed {
            type_name: Some(envelope.type_name.clone()),
            request_id: envelope.request_id,
            why: short(error.to_string()),
        }
    }

    fn untyped(why: String) -> Malformed {
        Malformed {
            type_name: None,
            request_id: None,
            why: short(why),
        }
    }
}

/// A reader's explanation may quote the body, which may be long.
fn short(mut why: String) -> String {
    let mut end = why.len().min(MAX_WHY_BYTES);
    while !why.is_char_boundary(end) {
        end -= 1;
    }
    why.truncate(end);
    why
}

/// Writes one message as a frame without flags.
pub fn encode_message<M: Message>(message: &M) -> Result<Bytes, EncodeError> {
    let mut frame = vec![0; HEADER_BYTES];
    serde_json::to_writer(&mut frame, message)
        .map_err(|error| EncodeError::Json(error.to_string()))?;
    let header = FrameHeader {
        flags: Flags::JSON,
        body_bytes: body_length(frame.len() - HEADER_BYTES)?,
    };
    frame[..HEADER_BYTES].copy_from_slice(&header.encode());
    Ok(Bytes::from(frame))
}

/// The text of a body that begins with its `type`, and that type, when it is plain to see that no other
/// follows: nothing in it is escaped, and the word stands nowhere else. All else the message's own type
/// checks as it is read.
pub(super) fn plain_type(body: &[u8]) -> Option<(&str, &str)> {
    const BEGIN: &str = r#"{"type":""#;
    const NAME: &str = r#""type""#;
    let text = std::str::from_utf8(body).ok()?;
    let rest = text.strip_prefix(BEGIN)?;
    let (type_name, rest) = rest.split_once('"')?;
    let is_plain = !text.contains('\\') && !rest.contains(NAME);
    is_plain.then_some((text, type_name))
}

/// What is read of any message.
pub(super) struct Envelope {
    pub type_name: String,
    pub request_id: Option<u64>,
}

impl Envelope {
    /// Checks that the body is one JSON object with one `type`, and nothing else.
    pub fn read(body: &[u8]) -> Result<(&str, Envelope), Malformed> {
        let text = std::str::from_utf8(body)
            .map_err(|error| Malformed::untyped(format!("not UTF-8: {error}")))?;
        let mut json = serde_json::Deserializer::from_str(text);
        let envelope = (&mut json)
            .deserialize_map(EnvelopeVisitor)
            .and_then(|envelope| json.end().map(|()| envelope))
            .map_err(|error| Malformed::untyped(error.to_string()))?;
        Ok((text, envelope))
    }
}

struct EnvelopeVisitor;

impl<'de> Visitor<'de> for EnvelopeVisitor {
    type Value = Envelope;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with a type")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Envelope, A::Error> {
        let mut type_name: Option<String> = None;
        let mut request_id = None;
        while let Some(key) = map.next_key::<EnvelopeKey>()? {
            match key {
                EnvelopeKey::Type if type_name.is_some() => {
                    return Err(A::Error::duplicate_field("type"));
                }
                EnvelopeKey::Type => type_name = Some(map.next_value()?),
                EnvelopeKey::RequestId => {
                    request_id = map.next_value::<Lenient>()?.0;
                }
                EnvelopeKey::Other => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        let type_name = type_name.ok_or_else(|| A::Error::missing_field("type"))?;
        if type_name.len() > MAX_TYPE_BYTES {
            return Err(A::Error::custom("the type is too long"));
        }
        Ok(Envelope {
            type_name,
            request_id,
        })
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum EnvelopeKey {
    Type,
    RequestId,
    #[serde(other)]
    Other,
}

/// A request id if it is one, and anything else without complaint: whether it had to be one is
/// the message's own matter.
struct Lenient(Option<u64>);

impl<'de> Deserialize<'de> for Lenient {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = serde_json::Value::deserialize(deserializer)?;
        Ok(Lenient(value.as_u64()))
    }
}

pub(super) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// A field that must be there and may be `null`.
pub(super) fn nullable<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    Option::deserialize(deserializer)
}

#[cfg(test)]
#[path = "messages_tests.rs"]
mod tests;
