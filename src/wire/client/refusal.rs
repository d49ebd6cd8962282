//! Refusals: the code says what was wrong, the class says what the client may do about it.
//!
//! The same refusal has a JSON form (`error`, `publish_error`) and a binary one (a failed publish
//! ack). Codes that are not known are kept as they came; a class that is not known reads as fatal.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::features::{ClientOffer, Features};
use super::flags::Flags;

macro_rules! error_codes {
    ($($(#[$doc:meta])* $variant:ident = $number:literal, $name:literal, $class:ident;)*) => {
        /// The codes that have a meaning to both sides.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum ErrorCode { $($(#[$doc])* $variant,)* }

        impl ErrorCode {
            /// Every code, in the order of their numbers.
            pub const ALL: &'static [ErrorCode] = &[$(ErrorCode::$variant),*];

            /// The number on the binary ack.
            pub const fn number(self) -> u16 {
                match self { $(ErrorCode::$variant => $number,)* }
            }

            /// The name in JSON.
            pub const fn name(self) -> &'static str {
                match self { $(ErrorCode::$variant => $name,)* }
            }

            /// The class a reader assumes when none was sent.
            pub const fn usual_class(self) -> RetryClass {
                match self { $(ErrorCode::$variant => RetryClass::$class,)* }
            }

            /// The code of that number.
            pub const fn from_number(number: u16) -> Option<ErrorCode> {
                match number { $($number => Some(ErrorCode::$variant),)* _ => None }
            }

            /// The code of that name.
            pub fn from_name(name: &str) -> Option<ErrorCode> {
                match name { $($name => Some(ErrorCode::$variant),)* _ => None }
            }
        }
    };
}

error_codes! {
    /// No `auth` yet, or the token does not verify.
    Unauthenticated = 1, "unauthenticated", Fatal;
    /// Permission or tenant.
    Forbidden = 2, "forbidden", Fatal;
    /// Unknown tenant, namespace, stream or cache.
    NotFound = 3, "not_found", RetryAfter;
    /// Malformed, or impossible as sent.
    InvalidRequest = 4, "invalid_request", Fatal;
    /// Nobody serves the shard now.
    ShardUnavailable = 5, "shard_unavailable", Retry;
    /// Another broker leads the shard, where `not_leader` itself cannot be sent.
    NotLeader = 6, "not_leader", Redirect;
    /// Written on the leader, majority not confirmed in time.
    QuorumTimeout = 7, "quorum_timeout", OutcomeUnknown;
    /// Leadership moved between the write and the majority.
    LeadershipLost = 8, "leadership_lost", OutcomeUnknown;
    /// The broker stopped waiting for the outcome.
    Unacknowledged = 9, "unacknowledged", OutcomeUnknown;
    /// Load shed, quota, or a full disk before writing.
    Overloaded = 10, "overloaded", RetryAfter;
    /// Payload too large, too many subscriptions.
    LimitExceeded = 11, "limit_exceeded", Fatal;
    /// Shutting down.
    Draining = 12, "draining", Retry;
    /// A fault of the broker.
    Internal = 13, "internal", OutcomeUnknown;
    /// The storage failed.
    Storage = 14, "storage", OutcomeUnknown;
    /// A group claim is unknown or no longer stands.
    StaleClaim = 15, "stale_claim", Retry;
    /// The credential was revoked.
    Revoked = 16, "revoked", Fatal;
    /// A keyed publish was routed by a width the stream no longer has.
    StaleWidth = 17, "stale_width", Retry;
}

/// What the client may do: chosen by what happened, not by the code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RetryClass {
    /// Nothing applied; send again.
    Retry,
    /// Nothing applied; wait first.
    RetryAfter,
    /// Nothing applied; ask another broker.
    Redirect,
    /// May have been applied.
    OutcomeUnknown,
    /// Do not send again.
    Fatal,
}

impl RetryClass {
    /// The number on the binary ack.
    pub const fn number(self) -> u8 {
        match self {
            RetryClass::Retry => 1,
            RetryClass::RetryAfter => 2,
            RetryClass::Redirect => 3,
            RetryClass::OutcomeUnknown => 4,
            RetryClass::Fatal => 5,
        }
    }

    /// The class of that number; one that is not known is fatal.
    pub const fn from_number(number: u8) -> RetryClass {
        match number {
            1 => RetryClass::Retry,
            2 => RetryClass::RetryAfter,
            3 => RetryClass::Redirect,
            4 => RetryClass::OutcomeUnknown,
            _ => RetryClass::Fatal,
        }
    }

    /// The name in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            RetryClass::Retry => "retry",
            RetryClass::RetryAfter => "retry_after",
            RetryClass::Redirect => "redirect",
            RetryClass::OutcomeUnknown => "outcome_unknown",
            RetryClass::Fatal => "fatal",
        }
    }

    /// The class of that name; one that is not known is fatal.
    pub fn from_name(name: &str) -> RetryClass {
        match name {
            "retry" => RetryClass::Retry,
            "retry_after" => RetryClass::RetryAfter,
            "redirect" => RetryClass::Redirect,
            "outcome_unknown" => RetryClass::OutcomeUnknown,
            _ => RetryClass::Fatal,
        }
    }
}

impl Serialize for RetryClass {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for RetryClass {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        Ok(RetryClass::from_name(&name))
    }
}

/// A code as it stands on the wire.
#[derive(Clone, PartialEq, Eq, Hash)]
pub enum WireCode {
    Known(ErrorCode),
    /// A code of a later version, by name. One that came as a bare number is `code_<number>`.
    Other(String),
}

impl WireCode {
    /// The code of that name.
    pub fn from_name(name: &str) -> WireCode {
        ErrorCode::from_name(name).map_or_else(|| WireCode::Other(name.into()), WireCode::Known)
    }

    /// The code of that number.
    pub fn from_number(number: u16) -> WireCode {
        let unknown = || WireCode::Other(format!("code_{number}"));
        ErrorCode::from_number(number).map_or_else(unknown, WireCode::Known)
    }

    /// The name in JSON.
    pub fn name(&self) -> &str {
        match self {
            WireCode::Known(code) => code.name(),
            WireCode::Other(name) => name,
        }
    }

    /// The number on the binary ack; a later code known by name alone has none.
    pub fn number(&self) -> Option<u16> {
        match self {
            WireCode::Known(code) => Some(code.number()),
            WireCode::Other(name) => name.strip_prefix("code_")?.parse().ok(),
        }
    }

    /// The class a reader assumes when none was sent.
    pub fn usual_class(&self) -> RetryClass {
        match self {
            WireCode::Known(code) => code.usual_class(),
            WireCode::Other(_) => RetryClass::Fatal,
        }
    }
}

impl From<ErrorCode> for WireCode {
    fn from(code: ErrorCode) -> WireCode {
        WireCode::Known(code)
    }
}

impl fmt::Debug for WireCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Serialize for WireCode {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for WireCode {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        Ok(WireCode::from_name(&name))
    }
}

/// The finer reason of a refusal and how long to wait.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ErrorDetail {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<Cow<'static, str>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_ms: Option<u64>,
}

/// Everything a refusal says, whatever form it is sent in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    pub message: Cow<'static, str>,
    pub code: Option<WireCode>,
    pub retry: Option<RetryClass>,
    pub detail: Option<ErrorDetail>,
}

impl Refusal {
    /// A refusal of the code's usual class.
    pub fn new(code: ErrorCode, message: impl Into<Cow<'static, str>>) -> Refusal {
        Refusal {
            message: message.into(),
            code: Some(code.into()),
            retry: Some(code.usual_class()),
            detail: None,
        }
    }

    /// With another class: what happened, rather than what usually does.
    pub fn with_class(mut self, class: RetryClass) -> Refusal {
        self.retry = Some(class);
        self
    }

    /// With the finer reason.
    pub fn with_reason(mut self, reason: impl Into<Cow<'static, str>>) -> Refusal {
        self.detail.get_or_insert_default().reason = Some(reason.into());
        self
    }

    /// With the time to wait before trying again.
    pub fn with_retry_after_ms(mut self, retry_after_ms: u64) -> Refusal {
        self.detail.get_or_insert_default().retry_after_ms = Some(retry_after_ms);
        self
    }

    /// The class a reader acts on; `None` for a refusal without a code.
    pub fn class(&self) -> Option<RetryClass> {
        self.retry
            .or_else(|| self.code.as_ref().map(WireCode::usual_class))
    }

    /// What of this a client that made `offer` reads in a JSON answer.
    pub fn for_json(mut self, offer: &ClientOffer) -> Refusal {
        if !offer.features().contains(Features::ERROR_CODES) {
            self.code = None;
            self.retry = None;
            self.detail = None;
        }
        self
    }

    /// What of this a client that made `offer` reads in a binary ack.
    pub fn for_ack(mut self, offer: &ClientOffer) -> Refusal {
        if !offer.may_send(Flags::ACK_CODE) {
            self.code = None;
            self.retry = None;
        }
        if self.code.is_none() || !offer.may_send(Flags::ACK_DETAIL) {
            self.detail = None;
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_names_lead_back_to_their_code() {
        assert_eq!(ErrorCode::ALL.len(), 17);
        for (i, &code) in ErrorCode::ALL.iter().enumerate() {
            assert_eq!(usize::from(code.number()), i + 1);
            assert_eq!(ErrorCode::from_number(code.number()), Some(code));
            assert_eq!(ErrorCode::from_name(code.name()), Some(code));
        }
        assert_eq!(ErrorCode::from_number(0), None);
        assert_eq!(ErrorCode::from_number(18), None);
    }

    #[test]
    fn classes_lead_back_and_unknown_ones_are_fatal() {
        for number in 1..=5 {
            let class = RetryClass::from_number(number);
            assert_eq!(class.number(), number);
            assert_eq!(RetryClass::from_name(class.name()), class);
        }
        assert_eq!(RetryClass::from_number(0), RetryClass::Fatal);
        assert_eq!(RetryClass::from_name("sometime"), RetryClass::Fatal);
    }

    #[test]
    fn later_codes_are_kept() {
        let numbered = WireCode::from_number(999);
        assert_eq!(numbered.name(), "code_999");
        assert_eq!(numbered.number(), Some(999));
        let named = WireCode::from_name("brand_new");
        assert_eq!((named.name(), named.number()), ("brand_new", None));
        assert_eq!(named.usual_class(), RetryClass::Fatal);
    }
}
