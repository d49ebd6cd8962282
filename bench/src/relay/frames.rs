//! The frames of the relay probe: as little as can carry a batch and its answer.
//!
//! A request is `u32 body length`, `u64 id`, body; an answer is `u64 id`, `u64 position`.

/// Bytes before a request's body.
pub const HEADER_BYTES: usize = 12;
/// Length of an answer.
pub const ACK_BYTES: usize = 16;
/// Longest body the owner takes; as large as a client's frame.
pub const MAX_BODY_BYTES: u32 = 16 << 20;
