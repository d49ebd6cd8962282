//! Copies of a shard's logs on other brokers: what leaders and followers decide.
//!
//! A shard has several logs ([`ReplicaLogKey`]); each is copied on its own, with the leader's offsets.
//! The machines here take requests, answers, completions of disk work and the time, and return what
//! must be done. The broker's driver and the simulator drive the very same machines.
//!
//! * [`types`]: keys, views, requests and answers, shared by both sides.
//! * [`history`]: which leader wrote which part of a log, and the rules of its upkeep.
//! * [`follower`]: one follower's copy of one log.
//! * [`leader`]: one shard this broker leads: shipping, the mark, opening.
//!
//! Words: *generation* is the number of an assignment; *base* the first offset held; *tail* one past the
//! last record; *durable tail* one past the last synced record. A range excludes its end.

pub mod follower;
pub mod history;
pub mod leader;
pub mod types;

pub use follower::{FollowerAction, FollowerLog, FollowerState};
pub use history::{History, HistoryEntry};
pub use types::{
    LogState, ReplicaLog, ReplicaLogKey, ReplicaView, ReplicateAnswer, ReplicateBody,
    ReplicateRequest,
};
