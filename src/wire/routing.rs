//! Which shard a key belongs to.
//!
//! A pure function of the key's bytes, the shard count and the stream's mapping. Every broker and
//! every version must agree on it for ever: a record routed elsewhere lands in the wrong log and
//! nothing downstream notices.

/// How a stream maps key hashes to shards; fixed when the stream is created.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Routing {
    /// Hash modulo the shard count. The default, and what every cache uses.
    #[default]
    Modulo,
    /// Jump consistent hash (Lamping and Veach).
    JumpHash,
}

impl Routing {
    /// The mapping a configuration or a message spells.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "modulo" => Some(Self::Modulo),
            "jump_hash" => Some(Self::JumpHash),
            _ => None,
        }
    }

    /// How it is spelled.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Modulo => "modulo",
            Self::JumpHash => "jump_hash",
        }
    }
}

/// The shard of a key among `shards`. No key, or no choice, is shard 0; an empty key is a key.
pub fn shard_for_key(key: Option<&[u8]>, shards: u32, routing: Routing) -> u32 {
    let Some(key) = key else { return 0 };
    if shards <= 1 {
        return 0;
    }
    let hash = key_hash(key);
    match routing {
        // The remainder is below `shards`, so it fits.
        Routing::Modulo => (hash % u64::from(shards)) as u32,
        Routing::JumpHash => jump(hash, shards),
    }
}

/// FNV-1a, 64 bits, then a finishing mix: FNV alone leaves the low bits of short keys uneven.
pub fn key_hash(key: &[u8]) -> u64 {
    let mut hash = 0xCBF2_9CE4_8422_2325u64;
    for byte in key {
        hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01B3);
    }
    hash = (hash ^ (hash >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    hash = (hash ^ (hash >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    hash ^ (hash >> 31)
}

fn jump(mut hash: u64, shards: u32) -> u32 {
    let mut shard = 0u64;
    let mut next = 0u64;
    while next < u64::from(shards) {
        shard = next;
        hash = hash.wrapping_mul(2_862_933_555_777_941_757).wrapping_add(1);
        // Truncation toward zero is part of the definition.
        next = ((shard + 1) as f64 * ((1u64 << 31) as f64 / ((hash >> 33) + 1) as f64)) as u64;
    }
    // `shard` was below `shards` when it was taken.
    shard as u32
}
