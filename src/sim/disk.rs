//! One core's journal on a simulated disk: what a broker sees of storage, and what a crash leaves.
//!
//! The contract of the core log is kept: every change of every log of a core goes through one
//! journal in order; a change is visible to its own process at once and durable when its commit
//! group is synced; the first failed write or sync ends the journal until a restart; after a crash
//! the disk holds everything that was synced and any prefix of what was under way.
//! Log states follow `docs/storage-format.md`: accepted generation, history, base, tail.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bytes::Bytes;

use super::random::Choices;

pub use super::log::{Began, Change, LogImage, LogKey, SimLog};

#[derive(Debug)]
struct Operation {
    key: LogKey,
    change: Change,
    token: u64,
}

/// An operation that is over.
#[derive(Debug)]
pub struct Done {
    pub key: LogKey,
    pub token: u64,
    pub change: Change,
    pub is_ok: bool,
}

/// Why an operation was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// A write or sync failed since the process started.
    Failed,
    DiskFull,
    /// The log is damaged and takes nothing but its new beginning.
    Damaged,
}

/// How the commit group under way will end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupEnd {
    Synced,
    /// The write or its sync failed; what reached the disk is anybody's guess.
    Failed,
}

/// One core's journal.
#[derive(Debug, Default)]
pub struct Journal {
    disk: BTreeMap<LogKey, LogImage>,
    /// What the process sees; empty entries fall back to the disk. Gone with the process.
    seen: BTreeMap<LogKey, LogImage>,
    /// Tails whose sync this process has seen succeed.
    synced: BTreeMap<LogKey, u64>,
    pending: VecDeque<Operation>,
    /// Operations of the commit group under way, from the front of `pending`.
    in_group: usize,
    failed: bool,
    /// Logs with a change that failed.
    failed_logs: BTreeSet<LogKey>,
    /// Logs whose bytes have rotted.
    damaged: BTreeSet<LogKey>,
}

impl Journal {
    /// What is on the disk: everything synced, and after a failure perhaps more.
    pub fn on_disk(&self, key: LogKey) -> Option<&LogImage> {
        self.disk.get(&key)
    }

    pub fn logs_on_disk(&self) -> impl Iterator<Item = (&LogKey, &LogImage)> {
        self.disk.iter()
    }

    /// What the process sees, changes on their way included.
    pub fn seen(&self, key: LogKey) -> LogImageRef<'_> {
        match self.seen.get(&key).or_else(|| self.disk.get(&key)) {
            Some(image) => LogImageRef(Some(image)),
            None => LogImageRef(None),
        }
    }

    /// One past the last record this process may call durable.
    pub fn durable_tail(&self, key: LogKey) -> u64 {
        match self.synced.get(&key) {
            Some(tail) => *tail,
            None => self.disk.get(&key).map_or(0, LogImage::tail),
        }
    }

    /// The bytes of a log rot while nobody runs.
    pub fn damage(&mut self, key: LogKey) {
        self.damaged.insert(key);
    }

    /// Whether recovery refused the log and nothing has made it begin anew since.
    pub fn is_damaged(&self, key: LogKey) -> bool {
        let begins_anew = |o: &Operation| o.key == key && matches!(o.change, Change::Place { .. });
        self.damaged.contains(&key) && !self.pending.iter().any(begins_anew)
    }

    pub fn has_failed(&self) -> bool {
        self.failed
    }

    /// Whether a change of this log has failed since the process started.
    pub fn has_failed_log(&self, key: LogKey) -> bool {
        self.failed_logs.contains(&key)
    }

    /// Whether changes of this log are on their way.
    pub fn is_busy(&self, key: LogKey) -> bool {
        self.pending.iter().any(|operation| operation.key == key)
    }

    pub fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    pub fn group_is_under_way(&self) -> bool {
        self.in_group > 0
    }

    /// Takes a change; its end comes with a commit group.
    pub fn submit(
        &mut self,
        key: LogKey,
        change: Change,
        token: u64,
        disk_is_full: bool,
    ) -> Result<(), Refusal> {
        if self.failed {
            return Err(Refusal::Failed);
        }
        if disk_is_full && matches!(change, Change::Append { .. }) {
            return Err(Refusal::DiskFull);
        }
        if self.is_damaged(key) && !matches!(change, Change::Place { .. }) {
            return Err(Refusal::Damaged);
        }
        let durable = self.durable_tail(key);
        let from_disk = || self.disk.get(&key).cloned().unwrap_or_default();
        let image = self.seen.entry(key).or_insert_with(from_disk);
        if let Change::Append { first, .. } = &change {
            assert_eq!(*first, image.tail(), "an append goes at the tail");
        }
        image.apply(&change);
        let durable = durable.min(lowest_kept(&change));
        self.synced.insert(key, durable);
        self.pending.push_back(Operation { key, change, token });
        Ok(())
    }

    /// Starts the next commit group, of up to `most` operations. False when there is nothing to do.
    pub fn start_group(&mut self, most: usize) -> bool {
        if self.in_group > 0 || self.failed {
            return false;
        }
        self.in_group = self.pending.len().min(most.max(1));
        self.in_group > 0
    }

    /// The group under way has ended.
    pub fn finish_group(&mut self, end: GroupEnd, choices: &mut Choices) -> Vec<Done> {
        let group: Vec<Operation> = self.pending.drain(..self.in_group).collect();
        self.in_group = 0;
        match end {
            GroupEnd::Synced => {
                for operation in &group {
                    self.store(operation);
                    let tail = self.disk.get(&operation.key).map_or(0, LogImage::tail);
                    // What is about to be cut off may not be called durable again.
                    let of_log = self.pending.iter().filter(|p| p.key == operation.key);
                    let kept = of_log.map(|p| lowest_kept(&p.change)).min();
                    let durable = tail.min(kept.unwrap_or(u64::MAX));
                    self.synced.insert(operation.key, durable);
                }
                group.into_iter().map(|o| o.end(true)).collect()
            }
            GroupEnd::Failed => {
                self.failed = true;
                let all = group.iter().chain(&self.pending);
                // Giving up old records promises nothing to anybody.
                let promising = all.filter(|o| !matches!(o.change, Change::RaiseBase { .. }));
                self.failed_logs.extend(promising.map(|o| o.key));
                self.write_prefix(&group, choices);
                let rest = self.pending.drain(..);
                let all = group.into_iter().chain(rest);
                all.map(|operation| operation.end(false)).collect()
            }
        }
    }

    /// The process is gone. What was under way may have reached the disk, from its front on.
    pub fn crash(&mut self, choices: &mut Choices) {
        let group: Vec<Operation> = self.pending.drain(..).take(self.in_group).collect();
        self.write_prefix(&group, choices);
        self.seen.clear();
        self.synced.clear();
        self.in_group = 0;
        self.failed = false;
        self.failed_logs.clear();
    }

    fn store(&mut self, operation: &Operation) {
        let image = self.disk.entry(operation.key).or_default();
        image.apply(&operation.change);
        if matches!(operation.change, Change::Place { .. }) {
            self.damaged.remove(&operation.key);
        }
    }

    fn write_prefix(&mut self, group: &[Operation], choices: &mut Choices) {
        let whole = choices.index(group.len() + 1);
        for operation in &group[..whole] {
            self.store(operation);
        }
        // A batch may be torn between two of its records.
        let Some(operation) = group.get(whole) else {
            return;
        };
        if let Change::Append {
            generation,
            first,
            records,
        } = &operation.change
        {
            let keep = choices.index(records.len() + 1);
            let part = Change::Append {
                generation: *generation,
                first: *first,
                records: records[..keep].to_vec(),
            };
            self.disk.entry(operation.key).or_default().apply(&part);
        }
    }
}

/// One past the last old record a change leaves in place.
fn lowest_kept(change: &Change) -> u64 {
    match change {
        Change::Truncate { to } => *to,
        Change::Place { base } => *base,
        Change::Append { .. }
        | Change::Accept { .. }
        | Change::Begin { .. }
        | Change::RaiseBase { .. } => u64::MAX,
    }
}

impl Operation {
    fn end(self, is_ok: bool) -> Done {
        Done {
            key: self.key,
            token: self.token,
            change: self.change,
            is_ok,
        }
    }
}

/// A log as its process sees it; one that was never made reads as empty from 0.
#[derive(Debug, Clone, Copy)]
pub struct LogImageRef<'a>(Option<&'a LogImage>);

impl<'a> LogImageRef<'a> {
    pub fn image(self) -> Option<&'a LogImage> {
        self.0
    }

    pub fn base(self) -> u64 {
        self.0.map_or(0, |image| image.base)
    }

    pub fn tail(self) -> u64 {
        self.0.map_or(0, LogImage::tail)
    }

    pub fn accepted(self) -> u64 {
        self.0.map_or(0, |image| image.accepted)
    }

    pub fn history(self) -> &'a [Began] {
        self.0.map_or(&[], |image| &image.history)
    }

    pub fn record(self, offset: u64) -> Option<&'a Bytes> {
        self.0.and_then(|image| image.record(offset))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: LogKey = LogKey {
        shard: 0,
        log: SimLog::Stream,
    };

    fn append(journal: &mut Journal, first: u64, n: u64) {
        let records = (0..n)
            .map(|i| Bytes::from(format!("r{}", first + i)))
            .collect();
        let change = Change::Append {
            generation: 1,
            first,
            records,
        };
        journal.submit(KEY, change, first, false).unwrap();
    }

    #[test]
    fn only_a_sync_makes_durable_and_a_crash_keeps_a_prefix_of_the_group() {
        let mut seen = std::collections::BTreeSet::new();
        for seed in 0..200 {
            let mut choices = Choices::new(seed, 2);
            let mut journal = Journal::default();
            append(&mut journal, 0, 2);
            assert!(journal.start_group(8));
            assert_eq!(journal.durable_tail(KEY), 0);
            journal.finish_group(GroupEnd::Synced, &mut choices);
            assert_eq!(journal.durable_tail(KEY), 2);
            append(&mut journal, 2, 2);
            append(&mut journal, 4, 2);
            assert!(journal.start_group(2));
            append(&mut journal, 6, 1);
            assert_eq!(journal.seen(KEY).tail(), 7);
            journal.crash(&mut choices);
            let tail = journal.durable_tail(KEY);
            assert!((2..=6).contains(&tail), "what was not in the group is gone");
            seen.insert(tail);
        }
        assert_eq!(seen.into_iter().collect::<Vec<_>>(), [2, 3, 4, 5, 6]);
    }

    #[test]
    fn a_failed_sync_is_final_until_the_process_ends() {
        let mut choices = Choices::new(1, 2);
        let mut journal = Journal::default();
        append(&mut journal, 0, 1);
        journal.start_group(8);
        append(&mut journal, 1, 1);
        let done = journal.finish_group(GroupEnd::Failed, &mut choices);
        assert!(done.iter().all(|done| !done.is_ok) && done.len() == 2);
        assert_eq!(journal.durable_tail(KEY), 0);
        let again = journal.submit(KEY, Change::Accept { generation: 1 }, 9, false);
        assert_eq!(again, Err(Refusal::Failed));
        journal.crash(&mut choices);
        assert!(!journal.has_failed());
    }

    #[test]
    fn a_damaged_log_is_whole_again_only_once_its_new_beginning_is_on_disk() {
        let mut choices = Choices::new(3, 2);
        let mut journal = Journal::default();
        append(&mut journal, 0, 2);
        journal.start_group(8);
        journal.finish_group(GroupEnd::Synced, &mut choices);
        journal.damage(KEY);
        let accept = Change::Accept { generation: 4 };
        let refused = journal.submit(KEY, accept.clone(), 1, false);
        assert_eq!(refused, Err(Refusal::Damaged));
        let place = Change::Place { base: 5 };
        assert_eq!(journal.submit(KEY, place.clone(), 2, false), Ok(()));
        assert!(!journal.is_damaged(KEY));
        journal.crash(&mut choices);
        assert!(journal.is_damaged(KEY), "nothing of it was under way");
        assert_eq!(journal.submit(KEY, place, 3, false), Ok(()));
        assert_eq!(journal.submit(KEY, accept, 4, false), Ok(()));
        journal.start_group(8);
        journal.finish_group(GroupEnd::Synced, &mut choices);
        journal.crash(&mut choices);
        assert!(!journal.is_damaged(KEY));
        assert_eq!(journal.seen(KEY).tail(), 5);
    }

    #[test]
    fn history_follows_truncation_base_and_placing() {
        let mut image = LogImage::default();
        let begin = |generation| Change::Begin {
            generation,
            leader: 0,
        };
        let records = |n| Change::Append {
            generation: 0,
            first: 0,
            records: vec![Bytes::new(); n],
        };
        image.apply(&begin(1));
        image.apply(&records(5));
        image.apply(&begin(2));
        image.apply(&begin(3));
        let starts = |image: &LogImage| -> Vec<_> {
            let entries = image.history.iter();
            entries.map(|e| (e.generation, e.start)).collect()
        };
        assert_eq!(starts(&image), [(1, 0), (3, 5)]);
        image.apply(&records(3));
        image.apply(&begin(4));
        image.apply(&Change::Truncate { to: 7 });
        assert_eq!(starts(&image), [(1, 0), (3, 5)]);
        image.apply(&Change::RaiseBase { base: 5 });
        assert_eq!(starts(&image), [(3, 5)]);
        image.apply(&Change::Place { base: 50 });
        assert_eq!((image.tail(), image.accepted), (50, 4));
        assert!(image.history.is_empty());
    }
}
