//! Rewriting a segment without what nobody needs: the space comes back, positions stay what they were.
//!
//! The machine decides which segment and which extents ([`RewritePlan`]); [`Rewriter`] turns the bytes of the
//! old file into those of the new one; [`RewrittenMap`] leads readers from positions to the new file. None of
//! them opens a file.

mod map;
mod plan;
mod read_back;
mod rewriter;

pub(crate) use map::FrameTable;
pub use map::RewrittenMap;
pub use plan::{LogNeed, RewritePlan};
pub(crate) use read_back::read_back;
pub(crate) use rewriter::Rewriter;
pub use rewriter::{Kept, RewriteFault, RewriteTotals};
