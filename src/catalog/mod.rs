//! Nodes, tenants, streams, caches and who owns each shard.
//!
//! Duty: turn one TOML file into a [`Catalog`] that cannot be wrong, notice when the file
//! changes, and build the [`RouteTable`] the data path looks names up in. Every mistake of a
//! file is reported in one run, with its line and what to do.
//!
//! Not its duty: fetching anything over a network, moving data when an assignment changes, or
//! deciding that a leader is alive.
//!
//! Invariants:
//! * A `Catalog` never changes; a new file makes a new one.
//! * The file and the node ids alone decide every placement: two brokers that read the same
//!   file agree on every leader without talking to each other.
//! * From one accepted file to the next a shard's generation never goes down, its leader and
//!   replicas change only with a higher generation, and a stream keeps its shards and routing.
//! * No accepted file goes below a generation at which this broker has accepted a leader.

mod assignments;
mod declared;
mod draft;
mod fault;
mod floor;
mod jwks;
mod model;
mod names;
mod parse;
mod placement;
mod routes;
mod section;
mod transition;
mod watch;

pub use draft::{CatalogDraft, DraftAssignment, DraftKey, DraftNode, DraftSharded, DraftTenant};
pub use fault::{nearest, CatalogError, CatalogErrors, Faults};
pub use floor::check_accepted;
pub use jwks::{parse_jwks, JwksError};
pub use model::{
    Assignment, Catalog, Consistency, HostPort, HostPortError, NodeIdx, NodeInfo, ShardedSpec,
    StreamRetention, Tenant, TenantKey,
};
pub use parse::parse_catalog;
pub use placement::{core_of, rank_nodes};
pub use routes::{NameMap, RouteTable, ShardRoute, StreamRoute};
pub use section::{Located, Section};
pub use transition::check_transition;
pub use watch::{CatalogFile, CatalogWatch};
