//! `action:pattern`.

use super::pattern::Pattern;

macro_rules! actions {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// What a permission allows. Some are for other services and only need to be known.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Action {
            $($(#[$doc])* $name,)*
        }

        impl Action {
            /// Every action there is.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// The spelling in a token.
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }

            /// The action of that spelling.
            pub fn from_text(text: &str) -> Option<Self> {
                match text {
                    $($text => Some(Self::$name),)*
                    _ => None,
                }
            }
        }
    };
}

actions! {
    /// Publish to a stream.
    StreamPublish = "stream.publish",
    /// Read a stream; implies [`Action::GroupConsume`].
    StreamSubscribe = "stream.subscribe",
    /// Take records as a member of a consumer group.
    GroupConsume = "group.consume",
    /// Change a consumer group.
    GroupManage = "group.manage",
    /// Read a cache or a counter.
    CacheRead = "cache.read",
    /// Write a cache or a counter.
    CacheWrite = "cache.write",
    /// Look at the cluster.
    NodeView = "node.view",
    /// Control plane.
    RbacView = "rbac.view",
    /// Control plane.
    RbacPolicyManage = "rbac.policy.manage",
    /// Control plane.
    RbacAssignmentManage = "rbac.assignment.manage",
    /// Control plane.
    TenantManage = "tenant.manage",
    /// Control plane.
    NamespaceManage = "ns.manage",
    /// Control plane; implies [`Action::GroupManage`].
    StreamManage = "stream.manage",
    /// Control plane.
    CacheManage = "cache.manage",
    /// Control plane.
    NodeManage = "node.manage",
}

impl Action {
    /// The other action that grants this one as well.
    pub(super) fn implied_by(self) -> Option<Self> {
        match self {
            Self::GroupConsume => Some(Self::StreamSubscribe),
            Self::GroupManage => Some(Self::StreamManage),
            Self::StreamPublish
            | Self::StreamSubscribe
            | Self::CacheRead
            | Self::CacheWrite
            | Self::NodeView
            | Self::RbacView
            | Self::RbacPolicyManage
            | Self::RbacAssignmentManage
            | Self::TenantManage
            | Self::NamespaceManage
            | Self::StreamManage
            | Self::CacheManage
            | Self::NodeManage => None,
        }
    }
}

/// Why a permission cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PermissionError {
    /// There is no colon.
    #[error("a permission is action:pattern, and this one has no colon")]
    NoColon,
    /// Nobody knows the action.
    #[error("the action is unknown")]
    UnknownAction,
}

/// One permission of a token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Permission {
    /// What it allows.
    pub action: Action,
    /// On what.
    pub pattern: Pattern,
}

impl Permission {
    /// Parses `action:pattern`, split at the first colon.
    pub fn parse(text: &str) -> Result<Self, PermissionError> {
        let (action, pattern) = text.split_once(':').ok_or(PermissionError::NoColon)?;
        let action = Action::from_text(action).ok_or(PermissionError::UnknownAction)?;
        Ok(Self {
            action,
            pattern: Pattern::new(pattern),
        })
    }
}
