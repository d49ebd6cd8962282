//! What is needed of a segment that is to be rewritten.

use crate::format::extent::{ExtentHeader, ExtentKind};
use crate::format::rewritten::Rewritten;
use crate::name::LogId;

/// What is needed of one log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogNeed {
    /// The log.
    pub log: LogId,
    /// Record extents that end at or below this offset go: the log's durable base, or the end of all offsets
    /// when nothing of the segment is needed.
    pub records_above: u64,
    /// Events go, too, but for those that lower the tail: a later segment holds a durable restatement of the
    /// log's state.
    pub drops_events: bool,
}

/// Which segment is to be rewritten, and what stays of it.
///
/// What it lets go stays unneeded whatever happens to the logs meanwhile: bases rise, a log that is placed
/// anew needs nothing older, and a restatement is only given up for a newer one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RewritePlan {
    /// Sequence of the segment.
    pub segment: u64,
    /// What the new file says about the segment; the bytes have to agree.
    pub whole: Rewritten,
    /// Its logs, ascending by id.
    pub logs: Vec<LogNeed>,
    /// Length of the file now.
    pub file_bytes: u64,
    /// Length of the new file, about.
    pub expected_bytes: u64,
    /// A new file longer than this is not worth its writing.
    pub max_bytes: u64,
}

impl RewritePlan {
    /// Whether an extent stays; none when its log is not one the segment is known to hold.
    pub fn keeps(&self, extent: &ExtentHeader) -> Option<bool> {
        let at = self.logs.binary_search_by_key(&extent.log, |need| need.log);
        let need = at.ok().map(|at| self.logs[at])?;
        Some(match extent.kind {
            ExtentKind::Records => extent.end_offset() > need.records_above,
            // They say which records of older segments no longer count.
            ExtentKind::Truncate | ExtentKind::Place => true,
            // Version 1 numbered no events: that one is missing could not be told from damage.
            ExtentKind::Base | ExtentKind::Accept | ExtentKind::Begin | ExtentKind::State => {
                !need.drops_events || extent.changes == 0
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Place;
    use crate::name::LogKind;

    #[test]
    fn what_stays() {
        let extent = |log, kind, first_offset, record_count, changes| ExtentHeader {
            kind,
            log_kind: LogKind::Stream,
            log: LogId(log),
            first_offset,
            generation: 0,
            time_us: 0,
            prev: Place::NONE,
            record_count,
            records_len: 0,
            changes,
            name_len: 0,
        };
        let need = |log, records_above, drops_events| LogNeed {
            log: LogId(log),
            records_above,
            drops_events,
        };
        let plan = RewritePlan {
            segment: 4,
            whole: Rewritten {
                first_group: 1,
                last_group: 2,
                link: (3, 4096),
                end: 8192,
                newest_time_us: 0,
                durable_group: 9,
            },
            logs: vec![need(3, 10, false), need(7, u64::MAX, true)],
            file_bytes: 1,
            expected_bytes: 1,
            max_bytes: 1,
        };
        let keeps = |log, kind, first, count, changes| {
            plan.keeps(&extent(log, kind, first, count, changes))
        };
        assert_eq!(keeps(3, ExtentKind::Records, 5, 5, 1), Some(false));
        assert_eq!(keeps(3, ExtentKind::Records, 5, 6, 1), Some(true));
        assert_eq!(keeps(3, ExtentKind::Base, 10, 0, 1), Some(true));
        assert_eq!(keeps(7, ExtentKind::Records, 99, 1, 1), Some(false));
        assert_eq!(keeps(7, ExtentKind::State, 99, 0, 1), Some(false));
        assert_eq!(keeps(7, ExtentKind::Accept, 99, 0, 1), Some(false));
        assert_eq!(keeps(7, ExtentKind::Accept, 99, 0, 0), Some(true));
        assert_eq!(keeps(7, ExtentKind::Truncate, 99, 0, 1), Some(true));
        assert_eq!(keeps(7, ExtentKind::Place, 99, 0, 1), Some(true));
        assert_eq!(keeps(5, ExtentKind::Records, 0, 1, 1), None);
    }
}
