//! Nodes, tenants, streams, caches and who owns each shard.
