//! The enumerations inside bodies. Every unlisted value is a decode error.

macro_rules! wire_codes {
    ($(#[$doc:meta])* $name:ident: $repr:ty { $($(#[$vdoc:meta])* $variant:ident = $value:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr($repr)]
        pub enum $name { $($(#[$vdoc])* $variant = $value),+ }

        impl $name {
            /// Every value, in wire order.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// The value on the wire.
            pub const fn code(self) -> $repr {
                self as $repr
            }

            /// The value a wire code stands for.
            pub const fn from_code(code: $repr) -> Option<Self> {
                match code {
                    $($value => Some(Self::$variant),)+
                    _ => None,
                }
            }
        }
    };
}
pub(super) use wire_codes;

wire_codes! {
    /// When the original client wants its answer. Carried for information: a forward is always
    /// answered after the commit.
    AckMode: u8 {
        /// No answer wanted.
        None = 0,
        /// Once the broker has taken the records.
        OnAccept = 1,
        /// Once they are committed.
        OnCommit = 2,
    }
}

wire_codes! {
    /// What a forwarded cache operation does.
    CacheOpKind: u8 {
        Put = 1,
        Get = 2,
        Delete = 3,
        CounterAdd = 4,
        CounterGet = 5,
    }
}

wire_codes! {
    /// One of the logs a shard has.
    ReplicaLog: u8 {
        /// A stream's records.
        Stream = 1,
        /// A cache's values.
        Cache = 2,
        /// Positions of a stream's consumer groups.
        GroupCursors = 3,
        /// Offsets those groups gave up on.
        GroupDeadLetters = 4,
        /// A cache's counters.
        Counters = 5,
    }
}

wire_codes! {
    /// Why a request was refused.
    ErrorCode: u16 {
        StaleRoute = 1,
        Unavailable = 2,
        Unauthorized = 3,
        Overload = 4,
        ProtocolVersion = 5,
        Malformed = 6,
        StorageFailed = 7,
        LogGap = 8,
        LogConflict = 9,
        FencedEpoch = 10,
        UnsupportedKind = 11,
    }
}

/// What the requester does about an [`ErrorCode`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retry {
    /// Not this request.
    Never,
    /// Soon: the other side is about to catch up.
    Shortly,
    /// Later, and later still each time.
    WithBackoff,
    /// Other records, from the offset the answer names; never the same batch.
    FromExpectedOffset,
    /// The same content as another kind, if there is one.
    WithAnotherKind,
}

impl ErrorCode {
    /// What the requester does about it.
    pub const fn retry(self) -> Retry {
        match self {
            Self::StaleRoute => Retry::Shortly,
            Self::Unavailable | Self::Overload => Retry::WithBackoff,
            Self::LogGap => Retry::FromExpectedOffset,
            Self::UnsupportedKind => Retry::WithAnotherKind,
            Self::Unauthorized
            | Self::ProtocolVersion
            | Self::Malformed
            | Self::StorageFailed
            | Self::LogConflict
            | Self::FencedEpoch => Retry::Never,
        }
    }
}
