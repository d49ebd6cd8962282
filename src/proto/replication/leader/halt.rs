//! Why nothing is shipped to a follower, and what becomes of it.

/// Why shipping to a follower stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HaltReason {
    /// Its records differ from the leader's in a way it may not repair by itself.
    Diverged,
    /// It holds records, and needs some the leader no longer has.
    NeedsBootstrap,
    /// It knows a newer generation.
    Fenced,
    /// It does not know the kind of message.
    Unsupported,
    /// It says that this broker is not its leader, at the same generation.
    Unauthorized,
    /// Its disk failed.
    Storage,
}

impl HaltReason {
    /// Every reason, in the order of the metrics.
    pub const ALL: &'static [Self] = &[
        Self::Diverged,
        Self::NeedsBootstrap,
        Self::Fenced,
        Self::Unsupported,
        Self::Unauthorized,
        Self::Storage,
    ];

    /// The reason's name as written in listings and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Diverged => "diverged",
            Self::NeedsBootstrap => "needs_bootstrap",
            Self::Fenced => "fenced",
            Self::Unsupported => "unsupported",
            Self::Unauthorized => "unauthorized",
            Self::Storage => "storage",
        }
    }

    /// What an operator does about it.
    pub const fn remedy(self) -> &'static str {
        match self {
            Self::Diverged | Self::NeedsBootstrap => {
                "its copy is discarded and made anew when a rebuild slot is free; with rebuilds switched off, remove its copy by hand and restart it"
            }
            Self::Fenced => {
                "a newer assignment exists: give every broker the same, newest catalog"
            }
            Self::Unsupported => "upgrade that broker; shipping resumes when it reconnects",
            Self::Unauthorized => {
                "that broker's catalog names another leader or other replicas at this generation: give every broker the same catalog"
            }
            Self::Storage => "check that broker's disk, then restart it: it recovers what is whole",
        }
    }

    /// Whether discarding the follower's copy would resolve it.
    pub const fn is_rebuildable(self) -> bool {
        match self {
            Self::Diverged | Self::NeedsBootstrap => true,
            Self::Fenced | Self::Unsupported | Self::Unauthorized | Self::Storage => false,
        }
    }
}
