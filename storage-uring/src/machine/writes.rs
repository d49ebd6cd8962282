//! Which segments the device still has writes for.
//!
//! A group that was undone may leave writes behind that take long: until the last of them has answered it may
//! still change the file it was for.

use super::Action;

/// Writes handed out and not answered, counted by segment. Few segments are written at once.
#[derive(Debug, Default)]
pub(super) struct WritesOut(Vec<(u64, u32)>);

impl WritesOut {
    /// Notes an action that is handed out.
    pub fn begin(&mut self, action: &Action) {
        let Action::Write { segment, .. } = action else {
            return;
        };
        match self.0.iter_mut().find(|(seq, _)| seq == segment) {
            Some((_, count)) => *count += 1,
            None => self.0.push((*segment, 1)),
        }
    }

    /// Notes that an action was answered.
    pub fn end(&mut self, action: &Action) {
        let Action::Write { segment, .. } = action else {
            return;
        };
        if let Some(at) = self.0.iter().position(|(seq, _)| seq == segment) {
            self.0[at].1 -= 1;
            if self.0[at].1 == 0 {
                self.0.swap_remove(at);
            }
        }
    }

    /// Whether a write may still change this segment.
    pub fn reach(&self, segment: u64) -> bool {
        self.0.iter().any(|(seq, _)| *seq == segment)
    }
}
