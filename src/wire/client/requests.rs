//! What a client asks.
//!
//! Types only; `request_id` is unique per stream, not per connection.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::blob::Blob;
use super::messages::{message, message_enum};
use crate::wire::routing::Routing;

/// When the answer to a JSON publish is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AckMode {
    #[default]
    None,
    PerMessage,
    PerBatch,
}

/// Where a subscription or a group begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StartAt {
    Latest,
    Earliest,
    Offset(u64),
}

/// What a question about owners is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OwnedKind {
    Stream,
    Cache,
}

/// How keys of a stream choose their shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RoutingMode {
    Modulo,
    JumpHash,
}

impl From<Routing> for RoutingMode {
    fn from(routing: Routing) -> RoutingMode {
        match routing {
            Routing::Modulo => RoutingMode::Modulo,
            Routing::JumpHash => RoutingMode::JumpHash,
        }
    }
}

impl From<RoutingMode> for Routing {
    fn from(mode: RoutingMode) -> Routing {
        match mode {
            RoutingMode::Modulo => Routing::Modulo,
            RoutingMode::JumpHash => Routing::JumpHash,
        }
    }
}

/// What must hold for a conditional put.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CacheCondition {
    /// No live entry.
    Absent,
    /// The live entry has this version.
    Version(u64),
}

/// One change of the state that goes with a commit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum StateChange {
    Put { key: String, value: Blob },
    Delete { key: String },
}

message! {
    /// The first message of every stream.
    "auth" Auth {
        tenant_id: String,
        token: String,
        client_flags?: u16,
        client_features?: u32,
        client_features_hi?: u32,
    }
}
message! {
    /// Which brokers there are.
    "topology" Topology {}
}
message! {
    /// A request outside the protocol; answered `unsupported` with the name.
    "extension" Extension {
        name: String,
        request_id?: u64,
        body?: Value,
    }
}
message! {
    /// One record.
    scoped "publish" Publish {
        stream: String,
        payload: Blob,
        key?: Blob,
        shard?: u32,
        request_id?: u64,
        ack?: AckMode,
    }
}
message! {
    /// One batch.
    scoped "publish_batch" PublishJsonBatch {
        stream: String,
        payloads: Vec<Blob>,
        key?: Blob,
        shard?: u32,
        request_id?: u64,
        ack?: AckMode,
    }
}
message! {
    /// One batch in a producer's sequence.
    scoped "publish_idempotent" PublishIdempotent {
        stream: String,
        payloads: Vec<Blob>,
        key?: Blob,
        shard?: u32,
        request_id: u64,
        producer_id: u64,
        sequence: u64,
    }
}
message! {
    /// One batch, written only at the expected offset.
    scoped "publish_if" PublishIf {
        stream: String,
        payloads: Vec<Blob>,
        key?: Blob,
        shard?: u32,
        expected_offset: u64,
        request_id: u64,
    }
}
message! {
    /// The width by which the keyed batches that follow were routed; not answered.
    scoped "publish_width" PublishWidth {
        stream: String,
        shards: u32,
        routing?: RoutingMode,
    }
}
message! {
    /// A new producer id.
    "producer_init" ProducerInit { request_id: u64, }
}
message! {
    /// How many shards a stream has.
    scoped "stream_shards" StreamShards { stream: String, request_id: u64, }
}
message! {
    /// How many shards a cache has.
    scoped "cache_shards" CacheShards { cache: String, request_id: u64, }
}
message! {
    /// Who leads each shard.
    scoped "shard_owners" ShardOwners {
        name: String,
        kind: OwnedKind,
        request_id: u64,
    }
}
message! {
    /// Events of one shard from a position on.
    scoped "subscribe" Subscribe {
        stream: String,
        subscription_id?: u64,
        start?: StartAt,
        shard?: u32,
        queue_capacity?: u32,
    }
}
message! {
    /// Sets a value. `ttl_ms` is written as null when there is none.
    scoped "cache_put" CachePut {
        cache: String,
        key: String,
        value: Blob,
        request_id?: u64,
        #[serde(default)]
        ttl_ms: Option<u64>,
    }
}
message! {
    /// Reads a value.
    scoped "cache_get" CacheGet { cache: String, key: String, request_id?: u64, }
}
message! {
    /// Removes a value and returns it.
    scoped "cache_delete" CacheDelete { cache: String, key: String, request_id?: u64, }
}
message! {
    /// Sets a value if the condition holds.
    scoped "cache_put_if" CachePutIf {
        cache: String,
        key: String,
        value: Blob,
        ttl_ms?: u64,
        condition: CacheCondition,
        request_id: u64,
    }
}
message! {
    /// Removes a value if it has the version.
    scoped "cache_delete_if" CacheDeleteIf {
        cache: String,
        key: String,
        version: u64,
        request_id: u64,
    }
}
message! {
    /// Changes of a key or of the keys with a prefix.
    scoped "cache_watch" CacheWatch {
        cache: String,
        key?: String,
        prefix?: String,
        shard?: u32,
        from_offset?: u64,
        retained~: bool,
        subscription_id?: u64,
    }
}
message! {
    /// Adds to a counter.
    scoped "counter_add" CounterAdd {
        cache: String,
        key: String,
        delta: i64,
        request_id: u64,
    }
}
message! {
    /// Reads a counter.
    scoped "counter_get" CounterGet { cache: String, key: String, request_id: u64, }
}
message! {
    /// One record together with changes of the shard's state.
    scoped "commit" Commit {
        stream: String,
        entity_key: Blob,
        event: Blob,
        changes: Vec<StateChange>,
        request_id: u64,
        expected_offset?: u64,
        shard?: u32,
    }
}
message! {
    /// Reads the state of a shard.
    scoped "state_get" StateGet {
        stream: String,
        entity_key: Blob,
        key: String,
        request_id: u64,
        shard?: u32,
    }
}
message! {
    /// Claims records for a group.
    scoped "group_poll" GroupPoll {
        stream: String,
        shard: u32,
        group: String,
        #[serde(default)]
        max_records: u32,
        #[serde(default)]
        wait_ms: u64,
        request_id: u64,
        consumer?: String,
        reclaim~: bool,
        visibility_ms~: u64,
    }
}
message! {
    /// Finishes a record.
    scoped "group_ack" GroupAck {
        stream: String, shard: u32, group: String, offset: u64, request_id: u64,
    }
}
message! {
    /// Owes a record again.
    scoped "group_nack" GroupNack {
        stream: String,
        shard: u32,
        group: String,
        offset: u64,
        delay_ms~: u64,
        attempts~: u32,
        request_id: u64,
    }
}
message! {
    /// Prolongs a claim.
    scoped "group_extend" GroupExtend {
        stream: String,
        shard: u32,
        group: String,
        offset: u64,
        attempts: u32,
        extend_ms: u64,
        request_id: u64,
    }
}
message! {
    /// Puts a claimed record on the dead letter list.
    scoped "group_dead_letter" GroupDeadLetter {
        stream: String, shard: u32, group: String, offset: u64, request_id: u64,
    }
}
message! {
    /// Lists a group's dead letters.
    scoped "group_dead_letters" GroupDeadLetters {
        stream: String, shard: u32, group: String, request_id: u64,
    }
}
message! {
    /// Takes a record off the dead letter list.
    scoped "group_discard" GroupDiscard {
        stream: String, shard: u32, group: String, offset: u64, request_id: u64,
    }
}
message! {
    /// Owes a dead letter again.
    scoped "group_redrive" GroupRedrive {
        stream: String, shard: u32, group: String, offset: u64, request_id: u64,
    }
}
message! {
    /// Moves a group.
    scoped "group_seek" GroupSeek {
        stream: String,
        shard: u32,
        group: String,
        start: StartAt,
        if_new~: bool,
        request_id: u64,
    }
}
message! {
    /// Where a group stands.
    scoped "group_describe" GroupDescribe {
        stream: String, shard: u32, group: String, request_id: u64,
    }
}
message! {
    /// Forgets a group.
    scoped "group_delete" GroupDelete {
        stream: String, shard: u32, group: String, request_id: u64,
    }
}
message! {
    /// Reads a range of records.
    scoped "stream_read" StreamRead {
        stream: String,
        shard: u32,
        from: u64,
        end?: u64,
        max_records~: u64,
        max_bytes~: u64,
        request_id: u64,
    }
}
message! {
    /// The offset a time corresponds to.
    scoped "offset_for_time" OffsetForTime {
        stream: String, shard: u32, at_micros: u64, request_id: u64,
    }
}

message_enum! {
    /// One request of a client.
    Request {
        Auth,
        Topology,
        Extension,
        Publish,
        PublishJsonBatch,
        PublishIdempotent,
        PublishIf,
        PublishWidth,
        ProducerInit,
        StreamShards,
        CacheShards,
        ShardOwners,
        Subscribe,
        CachePut,
        CacheGet,
        CacheDelete,
        CachePutIf,
        CacheDeleteIf,
        CacheWatch,
        CounterAdd,
        CounterGet,
        Commit,
        StateGet,
        GroupPoll,
        GroupAck,
        GroupNack,
        GroupExtend,
        GroupDeadLetter,
        GroupDeadLetters,
        GroupDiscard,
        GroupRedrive,
        GroupSeek,
        GroupDescribe,
        GroupDelete,
        StreamRead,
        OffsetForTime,
    }
}

/// A JSON publish that asks for an answer and names no request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a publish with an ack needs a request_id")]
pub struct MissingRequestId;

fn acked_id(
    ack: Option<AckMode>,
    request_id: Option<u64>,
) -> Result<Option<u64>, MissingRequestId> {
    match ack.unwrap_or_default() {
        AckMode::None => Ok(None),
        AckMode::PerMessage | AckMode::PerBatch => request_id.map(Some).ok_or(MissingRequestId),
    }
}

impl Publish {
    /// The request an answer is owed to; `None` when none is wanted.
    pub fn acked_id(&self) -> Result<Option<u64>, MissingRequestId> {
        acked_id(self.ack, self.request_id)
    }
}

impl PublishJsonBatch {
    /// The request an answer is owed to; `None` when none is wanted.
    pub fn acked_id(&self) -> Result<Option<u64>, MissingRequestId> {
        acked_id(self.ack, self.request_id)
    }
}

/// What a watch follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WatchTarget<'a> {
    Key(&'a str),
    Prefix(&'a str),
}

impl CacheWatch {
    /// The key or the prefix; `None` when the request has both or neither.
    pub fn target(&self) -> Option<WatchTarget<'_>> {
        match (&self.key, &self.prefix) {
            (Some(key), None) => Some(WatchTarget::Key(key)),
            (None, Some(prefix)) => Some(WatchTarget::Prefix(prefix)),
            (Some(_), Some(_)) | (None, None) => None,
        }
    }
}
