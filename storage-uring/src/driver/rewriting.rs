//! The core's part in rewriting a segment: readers see the old file until those that may need what goes have
//! ended.

use super::core::Core;
use crate::rewrite::{RewriteFault, RewritePlan};
use crate::segment_pool::RewrittenSegment;

#[derive(Default)]
pub(super) struct Rewriting {
    /// Reads that began before this one may need what goes.
    reads_before: u64,
    /// The new file, once it has taken the place of the old one.
    pub done: Option<Box<RewrittenSegment>>,
}

impl Core {
    /// Hands a segment to the segment thread to be rewritten. It stays open as it is: what is under its name
    /// may change at any moment from now on.
    pub(super) fn start_rewriting(&mut self, plan: Box<RewritePlan>) {
        let (core, segment) = (self.config.core_index, plan.segment);
        let is_begun = match self.read_segment(core, segment) {
            Ok(open) => {
                self.reading.hold(core, segment, open);
                self.rewriting.reads_before = self.next_read + 1;
                self.pool.request_rewrite(plan)
            }
            Err(_) => false,
        };
        if !is_begun {
            self.on_not_rewritten(segment, None);
        }
    }

    pub(super) fn on_not_rewritten(&mut self, segment: u64, fault: Option<RewriteFault>) {
        self.reading.let_go();
        self.machine.on_rewrite_failed(segment, fault);
    }

    /// Turns readers to the new file, once no read is under way that may need what it lacks.
    pub(super) fn end_rewriting(&mut self) {
        let oldest_read = self.reads_under_way.first().copied();
        if oldest_read.is_some_and(|serial| serial < self.rewriting.reads_before) {
            return;
        }
        let Some(rewritten) = self.rewriting.done.take() else {
            return;
        };
        let RewrittenSegment {
            seq,
            file,
            map,
            totals,
        } = *rewritten;
        let core = self.config.core_index;
        // It may be open for writing still; nothing is written to it any more.
        self.files.remove(&seq);
        self.reading.replace(core, seq, file, map);
        self.pool.close_replaced();
        self.machine.on_segment_rewritten(seq, &totals);
    }
}
