//! O_DIRECT log storage with group commit across the shards of a core.
