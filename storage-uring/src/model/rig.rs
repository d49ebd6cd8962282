//! The machine over the model device together with the plain model of every log, and the checks that hold
//! after a power cut.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;

use super::plain::{Op, PlainLog, Tracked};
use super::{
    interrupted_recovery, name, read_images, recover_since, Images, Recovered, Rng, Sim, SimOptions,
};
use crate::error::{AppendError, CommitError};
use crate::machine::{ControlEvent, LogSeed, ReadBatch};
use crate::recovery::scan::Since;

pub struct Rig {
    pub sim: Sim,
    pub logs: BTreeMap<u32, Tracked>,
    pub options: SimOptions,
    epoch: u64,
    /// Log and number of operations behind each token not answered yet.
    waiting: HashMap<u64, (u32, usize)>,
    next_token: u64,
    last_answered: u64,
}

/// Node ids of leaders.
pub const LEADERS: [&str; 3] = ["a", "broker-2", "broker-with-a-longer-name-3"];

fn leader(found: &str) -> &'static str {
    let known = LEADERS.into_iter().find(|leader| *leader == found);
    known.expect("a leader of these tests")
}

/// A recovered log, or the empty one when nothing of it was found.
fn found(recovered: &Recovered, shard: u32) -> (LogSeed, &[Vec<u8>]) {
    match recovered.logs.get(&shard) {
        Some((seed, records)) => (seed.clone(), records),
        None => (LogSeed::default(), &[]),
    }
}

impl Rig {
    pub fn new(options: SimOptions) -> Self {
        Self::start(options, Recovered::empty(), 1)
    }

    pub fn start(options: SimOptions, recovered: Recovered, epoch: u64) -> Self {
        let mut logs = BTreeMap::new();
        for (shard, (seed, records)) in &recovered.logs {
            let log = PlainLog {
                base: seed.base,
                records: records.iter().map(|record| Rc::from(&record[..])).collect(),
                accepted: seed.control.accepted,
                history: (seed.control.history.iter())
                    .map(|entry| (entry.generation, entry.start, leader(&entry.leader)))
                    .collect(),
            };
            assert_eq!(log.tail(), seed.tail, "every record is read back");
            let tracked = Tracked {
                acked: log.clone(),
                submitted: log,
                ..Tracked::default()
            };
            logs.insert(*shard, tracked);
        }
        let mut sim = Sim::start(options, recovered, epoch);
        sim.keeps_shadows = false;
        Self {
            sim,
            logs,
            options,
            epoch,
            waiting: HashMap::new(),
            next_token: 1,
            last_answered: 0,
        }
    }

    /// Appends a batch, after making room in the queue if it is full.
    pub fn append(&mut self, shard: u32, batch: &[Vec<u8>]) {
        let log = self.sim.log(shard);
        let (token, now_us) = (self.next_token, self.sim.now_us);
        let payloads = || batch.iter().map(Vec::as_slice);
        let mut taken = self
            .sim
            .machine
            .append(log, 1, 7, now_us, payloads(), token);
        if taken == Err(AppendError::Overloaded) {
            self.settle();
            let now_us = self.sim.now_us;
            taken = self
                .sim
                .machine
                .append(log, 1, 7, now_us, payloads(), token);
        }
        let range = taken.expect("is taken");
        let tracked = self.logs.entry(shard).or_default();
        assert_eq!(range.start, tracked.submitted.tail(), "offsets are dense");
        for payload in batch {
            tracked.submit(Op::Record(Rc::from(&payload[..])));
        }
        assert_eq!(range.end, tracked.submitted.tail());
        self.wait(shard, batch.len());
    }

    pub fn control(&mut self, shard: u32, op: Op) {
        let log = self.sim.log(shard);
        let event = match op {
            Op::Record(_) => panic!("an append"),
            Op::Truncate(to) => ControlEvent::Truncate(to),
            Op::Place(at) => ControlEvent::Place(at),
            Op::Base(to) => ControlEvent::Base(to),
            Op::Accept(generation) => ControlEvent::Accept(generation),
            Op::Begin(generation, leader) => ControlEvent::Begin { generation, leader },
        };
        let (token, now_us) = (self.next_token, self.sim.now_us);
        let taken = self.sim.machine.push_control(log, event, 9, now_us, token);
        if taken == Err(AppendError::Overloaded) {
            self.settle();
            return self.control(shard, op);
        }
        taken.expect("is taken");
        let tracked = self.logs.entry(shard).or_default();
        if matches!(op, Op::Accept(generation) if generation == tracked.submitted.accepted) {
            // Nothing new, so nothing is written; it only waits for what is on its way.
            return self.wait(shard, 0);
        }
        tracked.submit(op);
        self.wait(shard, 1);
    }

    fn wait(&mut self, shard: u32, ops: usize) {
        self.waiting.insert(self.next_token, (shard, ops));
        self.next_token += 1;
        self.collect();
    }

    pub fn begin_refusal(&mut self) {
        self.logs.values_mut().for_each(Tracked::begin_refusal);
    }

    pub fn finish(&mut self, at: usize) {
        self.sim.finish(at);
        self.collect();
    }

    pub fn settle(&mut self) {
        self.sim.settle();
        self.collect();
    }

    /// Takes outcomes into the plain model: in order, and each once.
    pub fn collect(&mut self) {
        self.sim.collect();
        let mut refused = BTreeSet::new();
        for done in std::mem::take(&mut self.sim.completions) {
            assert!(done.token > self.last_answered, "outcomes in order");
            self.last_answered = done.token;
            let (shard, ops) = self.waiting.remove(&done.token).expect("answered once");
            let is_durable = done.result.is_ok();
            let tail = self.sim.machine.tail(self.sim.logs[&shard]);
            let tracked = self.logs.get_mut(&shard).expect("exists");
            if !is_durable {
                refused.insert(shard);
            }
            match done.result {
                Ok(()) => tracked.acknowledge(ops),
                Err(CommitError::DiskFull) => tracked.refuse(ops, 0),
                Err(CommitError::StorageFailed) if self.sim.machine.failure().is_some() => {
                    tracked.refuse(ops, 0);
                }
                Err(CommitError::StorageFailed) => {
                    let stored = tail - done.range.start;
                    assert!(0 < stored && tail < done.range.end, "{done:?} up to {tail}");
                    tracked.refuse(ops, stored as usize);
                }
            }
            if is_durable && ops > 0 {
                // Its link leaves out whatever was refused before.
                self.logs.values_mut().for_each(|log| log.refused.clear());
            }
        }
        for shard in refused {
            self.logs.get_mut(&shard).expect("exists").end_refusal();
        }
    }

    /// Reads through the machine's own state, as the driver does; `None` when there is nothing to read.
    pub fn read(&mut self, shard: u32, from: u64, max_bytes: usize) -> Option<ReadBatch> {
        let log = self.sim.log(shard);
        if let Some(batch) = self.sim.machine.read_recent(log, from, max_bytes) {
            return Some(batch);
        }
        let durable = self.sim.machine.durable_tail(log);
        if from >= durable {
            return None;
        }
        let state = self.sim.machine.log_state(log);
        let interval = state.index.interval(from, durable)?;
        let images = &self.sim.durable;
        Some(read_images(images, &name(shard), interval, from, max_bytes).expect("reads"))
    }

    /// Checks one read against the plain model.
    pub fn check_read(&mut self, shard: u32, from: u64, max_bytes: usize) {
        let batch = self.read(shard, from, max_bytes);
        let tracked = &self.logs[&shard];
        // A part of a batch may be durable before the batch is acknowledged.
        let begun = tracked.pending.iter().map_while(|op| match op {
            Op::Record(payload) => Some(Rc::clone(payload)),
            _ => None,
        });
        let mut readable = tracked.acked.clone();
        let acked = readable.tail().min(tracked.submitted.tail());
        readable.records.extend(begun);
        let cuts = tracked.pending.iter().filter_map(|op| match op {
            Op::Truncate(to) => Some(*to),
            Op::Place(_) => Some(0),
            _ => None,
        });
        let lowest_cut = cuts.min();
        let Some(batch) = batch else {
            let is_cut = lowest_cut.is_some();
            assert!(is_cut || from >= acked, "{from} of {acked} is not read");
            return;
        };
        let is_kept = lowest_cut.is_none_or(|cut| batch.next_offset <= cut);
        assert!(is_kept, "{from}..{} is being cut", batch.next_offset);
        let count = batch.records.len();
        let log = self.sim.logs[&shard];
        assert!(count > 0 && batch.first_offset == from);
        assert_eq!(batch.next_offset, from + count as u64);
        assert!(
            batch.next_offset <= self.sim.machine.durable_tail(log),
            "nothing is read before it is durable"
        );
        for (offset, record) in (from..).zip(&batch.records) {
            assert!(record[..] == *readable.record(offset), "offset {offset}");
        }
        let bytes: usize = batch.records.iter().map(bytes::Bytes::len).sum();
        assert!(
            count == 1 || bytes <= max_bytes,
            "{bytes} of {max_bytes} bytes"
        );
    }

    /// Checks one state a power cut left behind, that a second start changes nothing, and that a recovery
    /// which is itself cut short comes to the same end.
    pub fn check_cut(&self, images: Images, rng: &mut Rng) -> Recovered {
        let interrupted = interrupted_recovery(&images, self.epoch, rng);
        let first = recover_since(images, Since::epoch(self.epoch));
        assert_eq!(
            first.damages, 0,
            "a power cut is not damage: {}",
            first.notes
        );
        for (shard, tracked) in &self.logs {
            let (seed, records) = found(&first, *shard);
            assert!(seed.damage.is_none(), "{:?}", seed.damage);
            assert!(
                tracked.allows(&seed, records),
                "shard {shard}: {}..{} with {} records is no state between acknowledged {}..{} and submitted {}..{}: {}",
                seed.base, seed.tail, records.len(), tracked.acked.base, tracked.acked.tail(),
                tracked.submitted.base, tracked.submitted.tail(), first.notes
            );
        }
        // What a later start finds was touched by the one before.
        let second = recover_since(first.images.clone(), Since::epoch(self.epoch + 1));
        let nothing = (second.cuts, second.damages) == (0, 0);
        let detail = || format!("{}, then {}", first.notes, second.notes);
        assert!(nothing, "a second start finds nothing to do: {}", detail());
        let unchanged = second.images == first.images;
        assert!(unchanged, "a second start changes no byte: {}", detail());
        self.assert_same(&first, &second, &detail);
        let after = recover_since(interrupted, Since::epoch(self.epoch + 1));
        assert_eq!(after.damages, 0, "{} then {}", first.notes, after.notes);
        self.assert_same(&first, &after, &|| after.notes.clone());
        first
    }

    fn assert_same(&self, one: &Recovered, other: &Recovered, detail: &dyn Fn() -> String) {
        assert_eq!(
            (one.end, one.next_group),
            (other.end, other.next_group),
            "{}",
            detail()
        );
        for shard in self.logs.keys() {
            let ((a, a_records), (b, b_records)) = (found(one, *shard), found(other, *shard));
            let same = (a.base, a.tail, &a.control) == (b.base, b.tail, &b.control);
            assert!(same, "{}", detail());
            assert!(a_records == b_records, "{}", detail());
        }
    }

    /// The power is cut; a new start goes on with what is left.
    pub fn crash(self, rng: &mut Rng, keep_of_16: u64) -> Self {
        let images = self.sim.cut_power(|_, _| rng.below(16) < keep_of_16);
        let recovered = self.check_cut(images, rng);
        Self::start(self.options, recovered, self.epoch + 1)
    }

    /// A start over what was left in order; nothing may have to be cut.
    pub fn restart(mut self, rng: &mut Rng) -> Self {
        self.settle();
        let recovered = self.check_cut(self.sim.durable.clone(), rng);
        // What was undone for want of space may lie behind the end, or even count, until another group follows.
        let nothing_undone = self.logs.values().all(|log| log.refused.is_empty());
        assert!(
            recovered.cuts == 0 || !nothing_undone,
            "{}",
            recovered.notes
        );
        for (shard, tracked) in &self.logs {
            let (seed, records) = found(&recovered, *shard);
            assert!(tracked.is_answered(), "everything is answered");
            let is_whole = !nothing_undone || tracked.submitted.is(&seed, records);
            assert!(is_whole, "{}", recovered.notes);
        }
        Self::start(self.options, recovered, self.epoch + 1)
    }
}
