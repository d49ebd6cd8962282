//! O_DIRECT log storage with group commit across the shards of a core.
pub mod datadir;
pub mod error;
pub mod format;
pub mod index;
pub mod machine;
pub mod name;
pub mod recovery;
pub mod slab;
pub mod walk;
