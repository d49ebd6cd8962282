//! The bodies of the fuzz targets, one module a decoder. The broker's own tests include the same
//! files and run them on seeded inputs.
//!
//! Run a target with `cargo +nightly fuzz run internal_decode` from the repository's root, or guided by
//! coverage with a stable compiler as `fuzz/run-stable` does. Seeds for a corpus of the wire:
//! `tests/vectors/*.jsonl`, field `frame_hex`.

pub mod client_wire;
pub mod internal_wire;
pub mod recovery;
