//! What the holder of a verified token may do.

use crate::ids::TenantId;

use super::error::AuthError;
use super::permission::{Action, Permission};
use super::LEEWAY_S;

/// What an operation touches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resource<'a> {
    /// A stream.
    Stream {
        /// Its tenant.
        tenant: &'a str,
        /// Its namespace.
        namespace: &'a str,
        /// Its name.
        stream: &'a str,
    },
    /// A consumer group of a stream.
    Group {
        /// The stream's tenant.
        tenant: &'a str,
        /// The stream's namespace.
        namespace: &'a str,
        /// The stream.
        stream: &'a str,
        /// The group.
        group: &'a str,
    },
    /// A cache; counters belong to caches.
    Cache {
        /// Its tenant.
        tenant: &'a str,
        /// Its namespace.
        namespace: &'a str,
        /// Its name.
        cache: &'a str,
    },
    /// The cluster as a whole.
    Cluster,
}

/// The one spelling of a grant on the cluster.
const CLUSTER: &str = "cluster:*";

/// A verified token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// The tenant it is for.
    pub tenant: TenantId,
    /// The principal.
    pub sub: String,
    /// When it expires, in seconds since the epoch; the leeway comes on top.
    pub exp: u64,
    /// When it becomes valid, if it says so.
    pub nbf: Option<u64>,
    /// What it allows.
    pub perms: Vec<Permission>,
}

/// Resource strings up to this length are put together on the stack.
const STACK_BYTES: usize = 256;

/// Calls `f` with the resource string made of `parts`.
fn with_joined<R>(parts: &[&str], f: impl FnOnce(&[u8]) -> R) -> R {
    let total: usize = parts.iter().map(|part| part.len()).sum();
    let mut stack = [0u8; STACK_BYTES];
    if total > STACK_BYTES {
        return f(parts.concat().as_bytes());
    }
    let mut at = 0;
    for part in parts {
        stack[at..at + part.len()].copy_from_slice(part.as_bytes());
        at += part.len();
    }
    f(&stack[..total])
}

impl Grant {
    /// Whether the token is current at `now_s` seconds since the epoch.
    pub fn check_time(&self, now_s: u64) -> Result<(), AuthError> {
        if self.exp.saturating_add(LEEWAY_S) < now_s {
            return Err(AuthError::Expired);
        }
        if self
            .nbf
            .is_some_and(|nbf| nbf > now_s.saturating_add(LEEWAY_S))
        {
            return Err(AuthError::NotYetValid);
        }
        Ok(())
    }

    /// Whether the holder may do `action` on `resource`. Always false for another tenant's
    /// resources, whatever the patterns say.
    pub fn allows(&self, action: Action, resource: &Resource<'_>) -> bool {
        match *resource {
            Resource::Stream {
                tenant,
                namespace,
                stream,
            } => {
                let parts = ["stream:", tenant, "/", namespace, "/", stream];
                self.is_own(tenant) && with_joined(&parts, |text| self.holds(action, text))
            }
            Resource::Cache {
                tenant,
                namespace,
                cache,
            } => {
                let parts = ["cache:", tenant, "/", namespace, "/", cache];
                self.is_own(tenant) && with_joined(&parts, |text| self.holds(action, text))
            }
            Resource::Group {
                tenant,
                namespace,
                stream,
                group,
            } => {
                self.is_own(tenant) && self.allows_group(action, [tenant, namespace, stream], group)
            }
            Resource::Cluster => {
                let mut granted = self.granting(action);
                granted.any(|permission| permission.pattern.as_str() == CLUSTER)
            }
        }
    }

    fn is_own(&self, tenant: &str) -> bool {
        self.tenant.as_str() == tenant
    }

    /// The permissions that grant `action`, directly or by implication.
    fn granting(&self, action: Action) -> impl Iterator<Item = &Permission> {
        let implied_by = action.implied_by();
        self.perms
            .iter()
            .filter(move |p| p.action == action || Some(p.action) == implied_by)
    }

    fn holds(&self, action: Action, resource: &[u8]) -> bool {
        self.granting(action).any(|p| p.pattern.matches(resource))
    }

    /// A grant on a `group:` pattern narrows: who holds one for some group of the stream has
    /// the stream's other groups only if another `group:` grant says so.
    fn allows_group(&self, action: Action, [tenant, ns, stream]: [&str; 3], group: &str) -> bool {
        let parts = ["group:", tenant, "/", ns, "/", stream, "/", group];
        if with_joined(&parts, |text| self.holds(action, text)) {
            return true;
        }
        let narrowed = with_joined(&parts[..7], |prefix| {
            self.granting(action)
                .filter(|p| p.pattern.as_str().starts_with("group:"))
                .any(|p| p.pattern.could_match_below(prefix))
        });
        let parts = ["stream:", tenant, "/", ns, "/", stream];
        !narrowed && with_joined(&parts, |text| self.holds(action, text))
    }
}
