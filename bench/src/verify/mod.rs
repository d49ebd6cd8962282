//! Proof that what was acknowledged is in the log: the ledger of a run and the check against it.
//!
//! Pure; where the records are read from (a stopped broker's files, or a subscription) is decided by
//! the caller.

mod check;
mod ledger;
mod ranges;

pub use check::{ShardCheck, VerifyCounts};
pub use ledger::{Ledger, ShardLedger, WriterLedger};
pub use ranges::RangeSet;
