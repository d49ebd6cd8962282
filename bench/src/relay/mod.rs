//! The relay probe: what the same machine does with the same bytes and no broker.
//!
//! Three processes, as in a forwarded publish: the load generator, an ingress that copies bytes from
//! stream to stream, and an owner that sums, commits in groups and answers once durable. Driver,
//! placement, packet sizes, cipher, certificates, payloads and outstanding batches are those of the
//! broker run it is set against. What a broker loses against it is the price of its logic.

pub mod frames;
mod ingress;
mod journal;
pub(crate) mod net;
mod owner;
mod pair;

pub use ingress::{run_ingress, IngressArgs};
pub use net::{now_s, Facing};
pub use owner::{run_owner, OwnerArgs};
pub(crate) use pair::Starter;
pub use pair::{RelayPair, RelayPlan};
