//! The validated catalog as plain values.

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::ids::{Generation, Namespace, NodeId, ShardKind, StreamName, TenantId};
use crate::wire::routing::Routing;

/// A node's place in [`Catalog::nodes`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeIdx(pub u16);

/// A host, by name or address, and a port that is not 0.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostPort {
    host: Arc<str>,
    port: u16,
}

/// Why text is not a `host:port` somebody else can dial.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HostPortError {
    /// There is no colon, no host or no number after the colon.
    #[error("is not host:port")]
    Shape,
    /// Port 0 means "pick one", which nobody can dial.
    #[error("has port 0")]
    PortZero,
    /// 0.0.0.0 and [::] say where to listen, not where to dial.
    #[error("names every interface instead of one address")]
    Unspecified,
    /// The host is neither an IP address nor a DNS name.
    #[error("has a host that is neither an IP address nor a DNS name")]
    Host,
}

impl HostPort {
    /// Parses `name:port`, `1.2.3.4:port` or `[::1]:port`.
    pub fn parse(text: &str) -> Result<Self, HostPortError> {
        let (host, port) = text.rsplit_once(':').ok_or(HostPortError::Shape)?;
        let port: u16 = port.parse().map_err(|_| HostPortError::Shape)?;
        let bracketed = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
        let ip: Option<IpAddr> = match bracketed {
            Some(inner) => Some(inner.parse().map_err(|_| HostPortError::Host)?),
            None => host.parse().ok().filter(IpAddr::is_ipv4),
        };
        match ip {
            Some(ip) if ip.is_unspecified() => return Err(HostPortError::Unspecified),
            Some(_) => {}
            None if host.is_empty() => return Err(HostPortError::Shape),
            // A node id is checked to be a DNS name; a host obeys the same rule.
            None => drop(NodeId::new(host).map_err(|_| HostPortError::Host)?),
        }
        if port == 0 {
            return Err(HostPortError::PortZero);
        }
        Ok(Self {
            host: Arc::from(bracketed.unwrap_or(host)),
            port,
        })
    }

    /// The host without brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The socket address when the host is an IP address; a name has to be resolved, which
    /// blocks and therefore belongs on a control thread.
    pub fn as_socket_addr(&self) -> Option<SocketAddr> {
        let ip: IpAddr = self.host.parse().ok()?;
        Some(SocketAddr::new(ip, self.port))
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

impl fmt::Debug for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// One broker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeInfo {
    /// Its id, also the DNS name its certificate carries.
    pub node_id: NodeId,
    /// Where clients reach it, exactly as it is advertised to them.
    pub client_addr: Arc<str>,
    /// Where other brokers reach it.
    pub internal_addr: HostPort,
}

/// A public key that verifies a tenant's tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TenantKey {
    /// The key id a token may name.
    pub kid: String,
    /// The Ed25519 public key.
    pub x: [u8; 32],
}

/// One tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tenant {
    /// Its id.
    pub id: TenantId,
    /// The keys that verify its tokens; never empty.
    pub keys: Vec<TenantKey>,
}

/// When an acknowledged write counts as done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Consistency {
    /// The leader has it on disk.
    Leader,
    /// A majority of the replicas has it on disk.
    Quorum,
}

impl Consistency {
    /// The spelling of the file.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Leader => "leader",
            Self::Quorum => "quorum",
        }
    }
}

/// How long the shards of a stream keep records. Both are lower bounds: records go in whole stretches.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StreamRetention {
    /// Bytes a shard keeps at least; 0: no bound. None: as the broker is set.
    pub bytes: Option<u64>,
    /// How long a shard keeps records at least; zero: for ever. None: as the broker is set.
    pub age: Option<Duration>,
}

/// Who holds one shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assignment {
    /// Every node that holds the shard; the leader comes first.
    pub replicas: Arc<[NodeIdx]>,
    /// The generation of this assignment.
    pub generation: Generation,
}

impl Assignment {
    /// The node that takes writes.
    pub fn leader(&self) -> NodeIdx {
        self.replicas[0]
    }
}

/// One stream or one cache and the placement of its shards.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardedSpec {
    /// Stream or cache; the two may share a name.
    pub kind: ShardKind,
    /// The owner of the name.
    pub tenant: TenantId,
    /// The namespace inside the tenant.
    pub namespace: Namespace,
    /// The name inside the namespace.
    pub name: StreamName,
    /// How keys find their shard. Caches always use modulo.
    pub routing: Routing,
    /// How many nodes hold each shard.
    pub replicas: u16,
    /// When a write is acknowledged.
    pub consistency: Consistency,
    /// How long records are kept; caches keep what is set and not deleted.
    pub retention: StreamRetention,
    /// One entry a shard, in order.
    pub assignments: Box<[Assignment]>,
    /// The line of the file that declared it.
    pub line: u32,
}

impl ShardedSpec {
    /// How many shards there are.
    pub fn shards(&self) -> u32 {
        self.assignments.len() as u32
    }

    /// `stream t1/ns/orders`, for messages.
    pub fn title(&self) -> String {
        let kind = match self.kind {
            ShardKind::Stream => "stream",
            ShardKind::Cache => "cache",
        };
        format!("{kind} {}/{}/{}", self.tenant, self.namespace, self.name)
    }
}

/// Everything the broker is told about the cluster. Never changes once made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Catalog {
    pub(super) generation: Generation,
    pub(super) source: PathBuf,
    pub(super) nodes: Vec<NodeInfo>,
    pub(super) node_index: HashMap<NodeId, NodeIdx>,
    pub(super) tenants: Vec<Tenant>,
    pub(super) tenant_index: HashMap<TenantId, usize>,
    pub(super) sharded: Vec<ShardedSpec>,
}

impl Catalog {
    /// The file it came from.
    pub fn source(&self) -> &std::path::Path {
        &self.source
    }

    /// The generation of the file: of every shard that has none of its own.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// All nodes, in the order of the file; [`NodeIdx`] points into this.
    pub fn nodes(&self) -> &[NodeInfo] {
        &self.nodes
    }

    /// One node. `index` must come from this catalog.
    pub fn node(&self, index: NodeIdx) -> &NodeInfo {
        &self.nodes[usize::from(index.0)]
    }

    /// The index of a node id.
    pub fn node_by_id(&self, id: &str) -> Option<NodeIdx> {
        self.node_index.get(id).copied()
    }

    /// All tenants, in the order of the file.
    pub fn tenants(&self) -> &[Tenant] {
        &self.tenants
    }

    /// One tenant.
    pub fn tenant(&self, id: &str) -> Option<&Tenant> {
        self.tenant_index.get(id).map(|at| &self.tenants[*at])
    }

    /// Streams and caches, in the order of the file (streams first).
    pub fn sharded(&self) -> &[ShardedSpec] {
        &self.sharded
    }

    /// The streams.
    pub fn streams(&self) -> impl Iterator<Item = &ShardedSpec> {
        self.sharded.iter().filter(|s| s.kind == ShardKind::Stream)
    }

    /// The caches.
    pub fn caches(&self) -> impl Iterator<Item = &ShardedSpec> {
        self.sharded.iter().filter(|s| s.kind == ShardKind::Cache)
    }

    /// The largest replica count of any stream or cache; 1 when there are none.
    pub fn max_replicas(&self) -> u16 {
        self.sharded.iter().map(|s| s.replicas).max().unwrap_or(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_port_takes_only_what_can_be_dialled() {
        for good in ["127.0.0.1:1", "[::1]:65535", "broker-1.felix:5000"] {
            let parsed = HostPort::parse(good);
            assert_eq!(parsed.map(|p| p.to_string()), Ok(good.to_string()));
        }
        let cases = [
            ("127.0.0.1", HostPortError::Shape),
            ("127.0.0.1:0", HostPortError::PortZero),
            ("127.0.0.1:70000", HostPortError::Shape),
            (":5000", HostPortError::Shape),
            ("0.0.0.0:5000", HostPortError::Unspecified),
            ("[::]:5000", HostPortError::Unspecified),
            ("a_b:5000", HostPortError::Host),
            ("::1:5000", HostPortError::Host),
        ];
        for (bad, why) in cases {
            assert_eq!(HostPort::parse(bad), Err(why), "{bad}");
        }
    }
}
