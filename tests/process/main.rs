//! Real broker processes under faults: what they answer, what they keep, how they end.

#[path = "../support/mod.rs"]
mod support;

mod cache;
mod certificates;
mod client_input;
mod client_protocol;
mod companions;
mod connection_ends;
mod damaged_copy;
mod data_dir;
mod dead_peer;
mod dialler_matrix;
mod failover;
mod fairness;
mod fault_run;
mod full_disk;
mod groups;
mod handshake_matrix;
mod histories;
mod host;
mod keys;
mod kill;
mod leader_disk;
mod leader_site;
mod link_cut;
mod link_order;
mod members;
mod network;
mod no_space;
mod outcomes;
mod ownership;
mod peer_input;
mod peer_limits;
mod recovery;
mod replica_faults;
mod replicas;
mod replicate_lead;
mod retention;
mod retry_rows;
mod soak;
mod stop;
mod stream_resets;
mod subscriptions;
mod three_brokers;
