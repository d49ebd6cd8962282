//! What a broker says.
//!
//! Two fields decide whether a client can read an answer at all: the value of `cache_value` and
//! of `state_value` is always there, null for a miss.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use super::blob::Blob;
use super::messages::{message, message_enum};
use super::refusal::{ErrorDetail, Refusal, RetryClass, WireCode};
use super::requests::RoutingMode;

/// A broker fit for new clients.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BrokerAddress {
    pub node_id: String,
    /// `host:port` of the client listener.
    pub addr: String,
}

/// One entry of `shard_owners_view`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardOwnerView {
    pub shard: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub addr: Option<String>,
    pub generation: u64,
    /// Why nobody serves the shard.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unavailable: Option<String>,
}

/// Why a position cannot be served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CursorErrorReason {
    TooOld,
    InFuture,
}

/// Why an idempotent or conditional publish was not written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RefusedReason {
    SequenceGap {
        expected: u64,
    },
    UnknownProducer,
    SequenceExpired,
    SequenceReused,
    OffsetMismatch {
        tail: u64,
    },
    NotLeader {
        node_id: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        addr: Option<String>,
    },
}

/// A record claimed by a group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupRecord {
    pub offset: u64,
    pub payload: Blob,
    /// Deliveries, this one included.
    pub attempts: u32,
    #[serde(default, skip_serializing_if = "super::messages::is_default")]
    pub skipped_before: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub publisher: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timestamp_micros: Option<u64>,
}

/// A record of a bounded read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamRecord {
    pub offset: u64,
    pub payload: Blob,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub publisher: Option<String>,
    pub timestamp_micros: u64,
}

message! {
    /// Authenticated, with what the broker offers.
    "auth_ok" AuthOk {
        server_flags: u16,
        server_features?: u32,
        server_features_hi?: u32,
        listener_ports?: Vec<u16>,
        publish_window?: u32,
    }
}
message! {
    /// Authenticated, for a client that does not negotiate.
    "ok" PlainOk {}
}
message! {
    /// A refusal that names no request.
    "error" ErrorAnswer {
        message: Cow<'static, str>,
        code?: WireCode,
        retry?: RetryClass,
        detail?: ErrorDetail,
    }
}
message! {
    /// The refusal of a publish.
    "publish_error" PublishErrorAnswer {
        request_id: u64,
        message: Cow<'static, str>,
        code?: WireCode,
        retry?: RetryClass,
        detail?: ErrorDetail,
    }
}
message! {
    /// The request is of a kind this broker does not know.
    "unsupported" Unsupported {
        request_type: String,
        extension?: String,
        request_id?: u64,
    }
}
message! {
    /// Another broker leads the shard.
    "not_leader" NotLeader { node_id: String, addr?: String, generation: u64, }
}
message! {
    /// The publish is accepted.
    "publish_ok" PublishOk { request_id: u64, offset?: u64, }
}
message! {
    /// The publish was not written, for a reason of its own.
    "publish_refused" PublishRefused {
        request_id: u64,
        reason: RefusedReason,
        message: String,
    }
}
message! {
    /// A new producer id.
    "producer_init_ok" ProducerInitOk { request_id: u64, producer_id: u64, }
}
message! {
    /// The brokers fit for new clients.
    "topology_view" TopologyView { brokers: Vec<BrokerAddress>, }
}
message! {
    /// The width of a stream; 0 is an unknown stream.
    "stream_shards_view" StreamShardsView {
        shards: u32,
        request_id: u64,
        routing?: RoutingMode,
    }
}
message! {
    /// The width of a cache; 0 is an unknown cache.
    "cache_shards_view" CacheShardsView { shards: u32, request_id: u64, }
}
message! {
    /// One entry per shard in order; none is unknown.
    "shard_owners_view" ShardOwnersView { owners: Vec<ShardOwnerView>, request_id: u64, }
}
message! {
    /// The subscription stands.
    "subscribed" Subscribed {
        subscription_id: u64,
        start_offset?: u64,
        live_offset?: u64,
        queue_capacity?: u32,
    }
}
message! {
    /// The position cannot be served.
    "subscribe_cursor_error" SubscribeCursorError {
        reason: CursorErrorReason,
        requested: u64,
        available: u64,
    }
}
message! {
    /// The first frame of an event stream.
    "event_stream_hello" EventStreamHello { subscription_id: u64, }
}
message! {
    /// One event.
    scoped "event" Event { stream: String, payload: Blob, offset?: u64, }
}
message! {
    /// Events that follow one another.
    scoped "event_batch" EventJsonBatch {
        stream: String,
        payloads: Vec<Blob>,
        base_offset?: u64,
    }
}
message! {
    /// The subscription or watch goes on elsewhere.
    "shard_moved" ShardMoved {
        subscription_id: u64,
        resume_from?: u64,
        node_id?: String,
        addr?: String,
        generation: u64,
    }
}
message! {
    /// The stream is gone for good.
    "stream_deleted" StreamDeleted { subscription_id: u64, }
}
message! {
    /// The subscriber fell behind; records from there on were dropped.
    "subscription_lagged" SubscriptionLagged { subscription_id: u64, resume_from: u64, }
}
message! {
    /// The cache request is done.
    "cache_ok" CacheOk { request_id: u64, }
}
message! {
    /// The value, or null for a miss.
    scoped "cache_value" CacheValue {
        cache: String,
        key: String,
        #[serde(deserialize_with = "super::messages::nullable")]
        value: Option<Blob>,
        request_id?: u64,
        version?: u64,
    }
}
message! {
    /// Whether a conditional write was applied, and the version that stands now.
    "cache_condition_result" CacheConditionResult {
        applied: bool,
        version?: u64,
        request_id: u64,
    }
}
message! {
    /// The watch stands.
    "cache_watch_started" CacheWatchStarted {
        subscription_id: u64,
        resume_offset: u64,
        #[serde(default)]
        resnapshot: bool,
        retained_count?: u64,
    }
}
message! {
    /// A key changed; no value means it was removed.
    "cache_event" CacheEvent {
        key: String,
        value?: Blob,
        offset: u64,
        expires_at_millis?: u64,
    }
}
message! {
    /// The watch fell behind.
    "cache_watch_lagged" CacheWatchLagged { resume_from: u64, }
}
message! {
    /// The sum; absent when the counter was never written.
    "counter_value" CounterValue { value?: i64, request_id: u64, }
}
message! {
    /// The commit is written at the offset.
    "commit_ok" CommitOk { request_id: u64, offset: u64, }
}
message! {
    /// The value, or null for a miss.
    "state_value" StateValue {
        #[serde(deserialize_with = "super::messages::nullable")]
        value: Option<Blob>,
        version?: u64,
        as_of?: u64,
        request_id: u64,
    }
}
message! {
    /// The records claimed; may be none.
    "group_records" GroupRecords { records: Vec<GroupRecord>, request_id: u64, }
}
message! {
    /// For how long the claim stands now.
    "group_extended" GroupExtended { visible_ms: u64, request_id: u64, }
}
message! {
    /// Offsets of the dead letters.
    "group_dead_letter_list" GroupDeadLetterList { offsets: Vec<u64>, request_id: u64, }
}
message! {
    /// Where the group stands after a seek.
    "group_position" GroupPosition { offset: u64, moved: bool, request_id: u64, }
}
message! {
    /// The state of a group.
    "group_info" GroupInfo {
        committed?: u64,
        tail: u64,
        in_flight: u64,
        owed: u64,
        dead_letters: u64,
        request_id: u64,
    }
}
message! {
    /// Whether there was such a group.
    "group_deleted" GroupDeleted { existed: bool, request_id: u64, }
}
message! {
    /// The records of a bounded read.
    "stream_records" StreamRecords {
        records: Vec<StreamRecord>,
        next_offset: u64,
        request_id: u64,
    }
}
message! {
    /// The offset of a time; absent when no record is that young.
    "offset_value" OffsetValue { offset?: u64, request_id: u64, }
}

message_enum! {
    /// One message of a broker.
    Answer {
        AuthOk,
        PlainOk,
        ErrorAnswer,
        PublishErrorAnswer,
        Unsupported,
        NotLeader,
        PublishOk,
        PublishRefused,
        ProducerInitOk,
        TopologyView,
        StreamShardsView,
        CacheShardsView,
        ShardOwnersView,
        Subscribed,
        SubscribeCursorError,
        EventStreamHello,
        Event,
        EventJsonBatch,
        ShardMoved,
        StreamDeleted,
        SubscriptionLagged,
        CacheOk,
        CacheValue,
        CacheConditionResult,
        CacheWatchStarted,
        CacheEvent,
        CacheWatchLagged,
        CounterValue,
        CommitOk,
        StateValue,
        GroupRecords,
        GroupExtended,
        GroupDeadLetterList,
        GroupPosition,
        GroupInfo,
        GroupDeleted,
        StreamRecords,
        OffsetValue,
    }
}

impl From<Refusal> for ErrorAnswer {
    fn from(refusal: Refusal) -> ErrorAnswer {
        ErrorAnswer {
            message: refusal.message,
            code: refusal.code,
            retry: refusal.retry,
            detail: refusal.detail,
        }
    }
}

impl From<ErrorAnswer> for Refusal {
    fn from(answer: ErrorAnswer) -> Refusal {
        Refusal {
            message: answer.message,
            code: answer.code,
            retry: answer.retry,
            detail: answer.detail,
        }
    }
}

impl PublishErrorAnswer {
    /// The refusal of that publish.
    pub fn new(request_id: u64, refusal: Refusal) -> PublishErrorAnswer {
        PublishErrorAnswer {
            request_id,
            message: refusal.message,
            code: refusal.code,
            retry: refusal.retry,
            detail: refusal.detail,
        }
    }

    /// The refusal without the request.
    pub fn refusal(self) -> Refusal {
        Refusal {
            message: self.message,
            code: self.code,
            retry: self.retry,
            detail: self.detail,
        }
    }
}
