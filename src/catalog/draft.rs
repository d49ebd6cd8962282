//! Writing a catalog file: used by the commands that set up a local cluster.

use serde::Serialize;

/// The content of a catalog file before it is validated. Empty lists are left out.
#[derive(Debug, Clone, Default, Serialize)]
pub struct CatalogDraft {
    /// The generation of every shard that has none of its own.
    pub generation: u64,
    /// The brokers.
    #[serde(rename = "node")]
    pub nodes: Vec<DraftNode>,
    /// The tenants.
    #[serde(rename = "tenant", skip_serializing_if = "Vec::is_empty")]
    pub tenants: Vec<DraftTenant>,
    /// The streams.
    #[serde(rename = "stream", skip_serializing_if = "Vec::is_empty")]
    pub streams: Vec<DraftSharded>,
    /// The caches.
    #[serde(rename = "cache", skip_serializing_if = "Vec::is_empty")]
    pub caches: Vec<DraftSharded>,
    /// Shards placed by hand.
    #[serde(rename = "assignment", skip_serializing_if = "Vec::is_empty")]
    pub assignments: Vec<DraftAssignment>,
}

/// One broker.
#[derive(Debug, Clone, Serialize)]
pub struct DraftNode {
    /// Its id, a DNS name.
    pub id: String,
    /// Where clients reach it, `host:port`.
    pub client: String,
    /// Where brokers reach it, `host:port`.
    pub internal: String,
}

/// One tenant and its key-set file, relative to the catalog.
#[derive(Debug, Clone, Serialize)]
pub struct DraftTenant {
    /// Its id.
    pub id: String,
    /// A JSON key set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub jwks_file: Option<String>,
    /// Keys written into the catalog itself.
    #[serde(rename = "key", skip_serializing_if = "Vec::is_empty")]
    pub keys: Vec<DraftKey>,
}

/// One public key.
#[derive(Debug, Clone, Serialize)]
pub struct DraftKey {
    /// The key id.
    pub kid: String,
    /// The Ed25519 public key in base64url.
    pub x: String,
}

/// One stream or cache. What is `None` takes the default of the file format.
#[derive(Debug, Clone, Default, Serialize)]
pub struct DraftSharded {
    /// The tenant.
    pub tenant: String,
    /// The namespace.
    pub namespace: String,
    /// The name.
    pub name: String,
    /// How many shards.
    pub shards: u32,
    /// How many nodes hold each shard.
    pub replicas: u16,
    /// `modulo` or `jump_hash`; streams only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub routing: Option<String>,
    /// `leader` or `quorum`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub consistency: Option<String>,
    /// Bytes a shard keeps at least; streams only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retention_bytes: Option<u64>,
    /// How long a shard keeps records at least: `90s`, `30m`, `12h` or `7d`; streams only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retention_age: Option<String>,
}

/// One shard placed by hand.
#[derive(Debug, Clone, Serialize)]
pub struct DraftAssignment {
    /// `stream` or `cache`.
    pub kind: String,
    /// The tenant.
    pub tenant: String,
    /// The namespace.
    pub namespace: String,
    /// The name.
    pub name: String,
    /// The shard.
    pub shard: u32,
    /// The node that takes writes.
    pub leader: String,
    /// Every node that holds the shard; empty lets placement choose the followers.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub replicas: Vec<String>,
    /// The generation of this shard alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub generation: Option<u64>,
}

impl CatalogDraft {
    /// The text of the file.
    pub fn to_toml(&self) -> Result<String, toml::ser::Error> {
        toml::to_string(self)
    }
}
