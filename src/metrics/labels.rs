//! The label values of the counter families: one closed enum each, one line a value.

use super::Label;

macro_rules! labels {
    ($($(#[$doc:meta])* $name:ident($key:literal) { $($(#[$vdoc:meta])* $variant:ident = $text:literal,)+ })+) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$vdoc])* $variant,)+ }

        impl $name {
            /// Every value, in the order of the label texts.
            pub const ALL: &'static [$name] = &[$($name::$variant,)+];

            /// The label text.
            pub fn as_str(self) -> &'static str {
                <Self as Label>::VALUES[self as usize]
            }
        }

        impl Label for $name {
            const KEY: &'static str = $key;
            const VALUES: &'static [&'static str] = &[$($text,)+];
            #[inline]
            fn index(self) -> usize {
                self as usize
            }
        }
    )+};
}

labels! {
    /// Why a client's request was refused: the error codes of the client protocol.
    ClientCode("code") {
        Unauthenticated = "unauthenticated",
        Forbidden = "forbidden",
        NotFound = "not_found",
        InvalidRequest = "invalid_request",
        ShardUnavailable = "shard_unavailable",
        NotLeader = "not_leader",
        QuorumTimeout = "quorum_timeout",
        LeadershipLost = "leadership_lost",
        Unacknowledged = "unacknowledged",
        Overloaded = "overloaded",
        LimitExceeded = "limit_exceeded",
        Draining = "draining",
        Internal = "internal",
        Storage = "storage",
        StaleClaim = "stale_claim",
        Revoked = "revoked",
        StaleWidth = "stale_width",
    }
    /// Why a peer's request was refused, or how a peer refused ours: the error codes of the
    /// broker-to-broker protocol, and the "not leader" answer.
    PeerCode("code") {
        StaleRoute = "stale_route",
        Unavailable = "unavailable",
        Unauthorized = "unauthorized",
        Overload = "overload",
        ProtocolVersion = "protocol_version",
        Malformed = "malformed",
        StorageFailed = "storage_failed",
        LogGap = "log_gap",
        LogConflict = "log_conflict",
        FencedEpoch = "fenced_epoch",
        UnsupportedKind = "unsupported_kind",
        NotLeader = "not_leader",
    }
    /// A request kind of the broker-to-broker protocol.
    InternalKind("kind") {
        ForwardPublish = "forward_publish",
        AuthorizedForwardPublish = "authorized_forward_publish",
        Hello = "hello",
        ForwardCacheOp = "forward_cache_op",
        AuthorizedForwardCacheOp = "authorized_forward_cache_op",
        ReplicateRecords = "replicate_records",
        ReplicateBootstrap = "replicate_bootstrap",
        ReplicateCache = "replicate_cache",
        ReplicateGroup = "replicate_group",
        ReplicateDeadLetters = "replicate_dead_letters",
        ReplicateCounters = "replicate_counters",
        ReplicateRebuild = "replicate_rebuild",
        Unknown = "unknown",
    }
    /// What a request to a follower came to.
    ShipOutcome("outcome") {
        Ok = "ok",
        LogGap = "log_gap",
        LogConflict = "log_conflict",
        FencedEpoch = "fenced_epoch",
        StaleRoute = "stale_route",
        Unavailable = "unavailable",
        Overload = "overload",
        Unauthorized = "unauthorized",
        Malformed = "malformed",
        StorageFailed = "storage_failed",
        UnsupportedKind = "unsupported_kind",
        NotSent = "not_sent",
        Unknown = "unknown",
    }
    /// Why shipping to a follower stopped.
    HaltLabel("reason") {
        Diverged = "diverged",
        NeedsBootstrap = "needs_bootstrap",
        Fenced = "fenced",
        Unsupported = "unsupported",
        Unauthorized = "unauthorized",
        Storage = "storage",
    }
    /// How an acknowledged publish went down on disk: on this broker or on the owner.
    AckOutcome("path") {
        Local = "local",
        Forwarded = "forwarded",
    }
    /// Why the outcome of a forwarded request is not known.
    UnknownCause("cause") {
        ConnectionLost = "connection_lost",
        Timeout = "timeout",
        BadAnswer = "bad_answer",
    }
    /// Why a publish that asked for no answer was dropped.
    UnackedDrop("reason") {
        NotFound = "not_found",
        Forbidden = "forbidden",
        Malformed = "malformed",
        TooLarge = "too_large",
        Overloaded = "overloaded",
        ShardUnavailable = "shard_unavailable",
        OutcomeUnknown = "outcome_unknown",
        Storage = "storage",
        Draining = "draining",
    }
    /// Why bytes were not accepted as a frame.
    FrameFault("reason") {
        ClientMagic = "client_magic",
        ClientVersion = "client_version",
        ClientFlags = "client_flags",
        ClientTooLarge = "client_too_large",
        ClientTruncated = "client_truncated",
        ClientBody = "client_body",
        ClientJson = "client_json",
        PeerMagic = "peer_magic",
        PeerVersion = "peer_version",
        PeerTooLarge = "peer_too_large",
        PeerTruncated = "peer_truncated",
        PeerBody = "peer_body",
        PeerUnknownKind = "peer_unknown_kind",
        PeerNoCorrelation = "peer_no_correlation",
        PeerUnexpectedAnswer = "peer_unexpected_answer",
        PeerLateAnswer = "peer_late_answer",
        PeerBeforeHello = "peer_before_hello",
    }
    /// Which end of which kind of connection.
    ConnectionRole("role") {
        Client = "client",
        PeerListener = "peer_listener",
        PeerDialler = "peer_dialler",
    }
    /// Why a connection ended.
    CloseReason("reason") {
        ClientClosed = "client_closed",
        ClientIdle = "client_idle",
        ClientReset = "client_reset",
        ClientTransportError = "client_transport_error",
        ClientAuthTimeout = "client_auth_timeout",
        ClientDraining = "client_draining",
        PeerClosed = "peer_closed",
        PeerIdle = "peer_idle",
        PeerReset = "peer_reset",
        PeerTransportError = "peer_transport_error",
        PeerProtocolFault = "peer_protocol_fault",
        PeerRemoved = "peer_removed",
        PeerDraining = "peer_draining",
    }
    /// Why a connection did not come up.
    HandshakeFault("reason") {
        ClientTls = "client_tls",
        ClientAlpn = "client_alpn",
        ClientTimeout = "client_timeout",
        ClientLimit = "client_limit",
        PeerTls = "peer_tls",
        PeerTimeout = "peer_timeout",
        PeerLimit = "peer_limit",
        PeerUnreachable = "peer_unreachable",
        HelloTimeout = "hello_timeout",
        HelloRefused = "hello_refused",
        HelloWrongNode = "hello_wrong_node",
        HelloNameNotInCertificate = "hello_name_not_in_certificate",
    }
    /// Why a subscription ended.
    SubscriberEnd("reason") {
        StoppedByClient = "stopped_by_client",
        ConnectionLost = "connection_lost",
        TooSlow = "too_slow",
        ShardMoved = "shard_moved",
        StreamDeleted = "stream_deleted",
        Storage = "storage",
        Draining = "draining",
    }
}

impl ClientCode {
    /// The number the protocol gives the code (1 to 17), if it is one we know.
    pub fn from_number(number: u16) -> Option<Self> {
        usize::from(number)
            .checked_sub(1)
            .and_then(|i| Self::ALL.get(i).copied())
    }
}

impl PeerCode {
    /// The number the protocol gives the code (1 to 11), if it is one we know.
    pub fn from_number(number: u16) -> Option<Self> {
        match number {
            1..=11 => Self::ALL.get(usize::from(number) - 1).copied(),
            _ => None,
        }
    }
}

impl InternalKind {
    /// The family a request kind is counted under; answers and unknown numbers are `Unknown`.
    pub fn from_number(kind: u16) -> Self {
        match kind {
            1 => Self::ForwardPublish,
            22 => Self::AuthorizedForwardPublish,
            5 => Self::Hello,
            11 => Self::ForwardCacheOp,
            23 => Self::AuthorizedForwardCacheOp,
            7 => Self::ReplicateRecords,
            10 => Self::ReplicateBootstrap,
            14 | 15 => Self::ReplicateCache,
            16 | 17 => Self::ReplicateGroup,
            18 | 19 => Self::ReplicateDeadLetters,
            20 | 21 => Self::ReplicateCounters,
            24 => Self::ReplicateRebuild,
            _ => Self::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_numbers_are_the_protocols() {
        assert_eq!(
            ClientCode::from_number(1),
            Some(ClientCode::Unauthenticated)
        );
        assert_eq!(ClientCode::from_number(10), Some(ClientCode::Overloaded));
        assert_eq!(ClientCode::from_number(17), Some(ClientCode::StaleWidth));
        assert_eq!(ClientCode::from_number(0), None);
        assert_eq!(ClientCode::from_number(18), None);
        assert_eq!(PeerCode::from_number(7), Some(PeerCode::StorageFailed));
        assert_eq!(PeerCode::from_number(11), Some(PeerCode::UnsupportedKind));
        assert_eq!(PeerCode::from_number(12), None);
    }
}
