//! Real broker processes under faults: what they answer, what they keep, how they end.

#[path = "../support/mod.rs"]
mod support;

mod client_input;
mod dead_peer;
mod kill;
mod outcomes;
mod ownership;
mod peer_input;
