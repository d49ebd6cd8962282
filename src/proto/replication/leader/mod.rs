//! The leader's half of replication: what is shipped to whom, what a majority holds, and when a
//! shard may be written to.
//!
//! One [`ShardLeader`] a shard and generation. It holds a [`Cursor`] for each follower and log, the
//! [`QuorumMark`] of the shard, and the [`Opening`] that comes before the first write. A driver (or
//! a simulator) asks it what a follower wants next ([`ShardLeader::next_ask`]), reads the records,
//! sends them on one ordered stream a follower, and reports every answer; nothing is sent unasked,
//! so the driver's room towards a peer is the only queue there is.
//!
//! What it does not do: store, read, encode, look at a clock. Time and randomness come in.
//!
//! Invariants (numbers of the replication design, section 11):
//! * I23, I24: the mark never exceeds the leader's synced tail, never moves back, and a majority
//!   has answered at least that at this generation.
//! * I25: a mark is released by the [`ReportGate`] only.
//! * I27, I31: a halted follower, and the place where a cursor starts, count as nothing.
//! * I28: after a `FencedEpoch` answer nothing is asked for and no mark moves.
//! * I29: a rebuild is asked for only once the gate says that no stored report names the follower,
//!   and never for `fenced` or `unsupported`.
//! * I30: no bootstrap or rebuild of a `Quorum` shard has a base above what is known committed.

mod answers;
mod cursor;
mod gate;
mod halt;
mod limits;
mod mark;
mod opening;
mod pace;
mod readers;
mod shard;
mod waits;

#[cfg(test)]
mod tests;

pub use answers::Answered;
pub use cursor::{Ask, AskId, Asked, Cursor, CursorPhase, Fetched, LogView, PauseCause};
pub use gate::{FollowerPosition, MajorityAlone, Report, ReportGate, ReportId, Submitted};
pub use halt::HaltReason;
pub use limits::ShipLimits;
pub use mark::QuorumMark;
pub use opening::{LeadRefusal, LogStart, Opening, OpeningPhase, OwnRun};
pub use readers::{HeldBackBy, Readable, ShownMark};
pub use shard::{FollowerIdx, HaltedReplica, RebuildSlots, ShardEvent, ShardLeader, ShardSpec};
pub use waits::QuorumWaits;
