//! Which shard a key belongs to.
