//! Every bound of the broker in one place; their relations are asserted at compile time.
//!
//! Units are in the names. A bound that an operator may change has its default here and its
//! range in `config`.

/// Longest tenant, namespace, stream or cache name, in bytes: the `str` bound of the internal wire.
pub const MAX_NAME_BYTES: usize = 512;
/// Longest `str` on the internal wire, in bytes.
pub const MAX_STR_BYTES: usize = 512;
/// Longest credential on the internal wire, in bytes.
pub const MAX_CREDENTIAL_BYTES: usize = 16_384;
/// Most payloads in one internal frame.
pub const MAX_PAYLOADS: u32 = 65_536;
/// Longest body of an internal frame, in bytes.
pub const MAX_INTERNAL_BODY_BYTES: u32 = 64 << 20;
/// Longest client frame accepted after authentication, in bytes.
pub const MAX_CLIENT_FRAME_BYTES: u32 = 16 << 20;
/// Longest client frame accepted before authentication, in bytes.
pub const MAX_UNAUTHENTICATED_FRAME_BYTES: u32 = 64 << 10;
/// Largest single record payload accepted, in bytes. A JSON reader sees it as base64 (4/3 of the
/// size) and must still fit in a client frame.
pub const MAX_RECORD_BYTES: u32 = 11 << 20;
/// Longest cache or counter key, in bytes. A key of more than [`MAX_STR_BYTES`] cannot be forwarded
/// and is served by its owner only.
pub const MAX_CACHE_KEY_BYTES: usize = 64 << 10;
/// Memory the keys of one core's caches and counters may take; further new keys are refused.
pub const CACHE_INDEX_BYTES_PER_CORE: usize = 1 << 30;
/// Memory the values of one core's caches may take; older ones are read from the log.
pub const CACHE_VALUE_BYTES_PER_CORE: usize = 64 << 20;
/// Requests of a leader that wait to be decided at one follower's log; more are refused as overload.
pub const FOLLOWER_WAITING_REQUESTS: usize = 64;
/// Bytes of batches that wait to be decided at one follower's log; a single batch may be larger.
pub const FOLLOWER_WAITING_BYTES: usize = 64 << 20;
/// Bytes of batches of one leader's connection read and not answered; a single batch may be larger.
pub const PEER_REPLICATION_BYTES: usize = 64 << 20;
/// Requests decided at one follower's log whose disk work is not durable yet; further ones wait.
pub const FOLLOWER_OWED_ANSWERS: usize = 256;
/// Bytes read at once, after at least one record, when a follower compares a batch with what it holds.
pub const FOLLOWER_COMPARE_READ_BYTES: usize = 256 << 10;
/// Payload bytes of one replicated batch, give or take one record.
pub const SHIP_BATCH_BYTES: u32 = 1 << 20;
/// Records of one replicated batch.
pub const SHIP_BATCH_RECORDS: u32 = 16_384;
/// Batches a leader has on their way to one follower of one log.
pub const SHIP_WINDOW_BATCHES: usize = 8;
/// Their payload bytes; one batch may exceed it when it is alone.
pub const SHIP_WINDOW_BYTES: u64 = 4 << 20;
/// Requests one core has on their way to the followers of one broker.
pub const SHIP_LANE_REQUESTS: usize = 256;
/// Their bytes; one request may exceed it.
pub const SHIP_LANE_BYTES: u64 = 8 << 20;
/// Reads from the disk for the followers of one broker at once.
pub const SHIP_LANE_DISK_READS: usize = 4;
/// Largest `retention-bytes` of a shard.
pub const MAX_RETENTION_BYTES: u64 = 1 << 50;
/// Longest `retention-age-s` of a shard: ten years.
pub const MAX_RETENTION_AGE_S: u64 = 10 * 366 * 86_400;
/// Longest name of a consumer group, in bytes.
pub const MAX_GROUP_NAME_BYTES: usize = 512;
/// Longest name of a member of a consumer group, in bytes.
pub const MAX_GROUP_MEMBER_BYTES: usize = 128;
/// Consumer groups of one core held in memory; requests to further ones are refused.
pub const MAX_GROUPS_PER_CORE: usize = 4096;
/// Unsettled records, dead letters and waiting polls of one core's groups, at about 100 bytes
/// each; past it polls are refused.
pub const MAX_GROUP_HELD_PER_CORE: usize = 1_000_000;

const _: () = assert!(MAX_CLIENT_FRAME_BYTES < MAX_INTERNAL_BODY_BYTES);
const _: () = assert!((MAX_RECORD_BYTES as u64) * 4 / 3 + 4096 < MAX_CLIENT_FRAME_BYTES as u64);
const _: () = assert!(MAX_NAME_BYTES <= MAX_STR_BYTES);
const _: () = assert!((MAX_CREDENTIAL_BYTES as u32) < MAX_UNAUTHENTICATED_FRAME_BYTES);
// An answer repeats the key, whose every byte may need six in JSON, beside the value in base64.
const _: () = assert!(
    (MAX_RECORD_BYTES as u64) * 4 / 3 + (MAX_CACHE_KEY_BYTES as u64) * 6 + 4096
        < MAX_CLIENT_FRAME_BYTES as u64
);
// A batch over its target by one record of the largest size, prefixes and names included.
const _: () = assert!(
    SHIP_BATCH_BYTES as u64
        + MAX_RECORD_BYTES as u64
        + SHIP_BATCH_RECORDS as u64 * 4
        + 3 * MAX_NAME_BYTES as u64
        + 4096
        < MAX_INTERNAL_BODY_BYTES as u64
);
const _: () = assert!(SHIP_BATCH_RECORDS <= MAX_PAYLOADS);
const _: () = assert!(CACHE_VALUE_BYTES_PER_CORE > MAX_RECORD_BYTES as usize);
// What a leader has on its way to one log fits what its follower keeps waiting.
const _: () = assert!(SHIP_WINDOW_BATCHES < FOLLOWER_WAITING_REQUESTS);
const _: () = assert!(
    SHIP_WINDOW_BYTES as usize + SHIP_BATCH_BYTES as usize + MAX_RECORD_BYTES as usize
        <= FOLLOWER_WAITING_BYTES
);
