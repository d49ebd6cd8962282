//! The machine over the model device together with the plain model of every log: what is asked for and what
//! is answered goes to both. The checks of what comes of it are in [`super::checks`].

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;

use super::device::{segment_of, Sim, SimOptions};
use super::name;
use super::plain::{Op, PlainLog, Tracked};
use super::recovered::{read_images, Recovered};
use super::violation::{broken, holds};
use super::Rng;
use crate::error::{AppendError, CommitError};
use crate::format::ALIGN;
use crate::machine::{Action, ControlEvent, LogSeed, ReadBatch};

/// The machine, the device, and what its logs should hold.
pub struct Rig {
    /// The machine over the device.
    pub sim: Sim,
    /// What is known of each log, by shard.
    pub logs: BTreeMap<u32, Tracked>,
    /// How the machine writes.
    pub options: SimOptions,
    pub(super) epoch: u64,
    /// Segments in which groups were undone for want of space, since the start.
    pub(super) undone: BTreeSet<u64>,
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
pub(super) fn found(recovered: &Recovered, shard: u32) -> (LogSeed, &[Vec<u8>]) {
    match recovered.logs.get(&shard) {
        Some((seed, records)) => (seed.clone(), records),
        None => (LogSeed::default(), &[]),
    }
}

impl Rig {
    /// Over an empty directory.
    pub fn new(options: SimOptions) -> Self {
        Self::start(options, Recovered::empty(), 1)
    }

    /// Over what a recovery left: that is what its logs should hold.
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
            let (tail, read) = (seed.tail, log.tail());
            holds!(
                1,
                read == tail,
                "shard {shard} ends at {tail} and is read to {read}"
            );
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
            undone: BTreeSet::new(),
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
        let tail = tracked.submitted.tail();
        holds!(1, range.start == tail, "{range:?} is given behind {tail}");
        for payload in batch {
            tracked.submit(Op::Record(Rc::from(&payload[..])));
        }
        let tail = tracked.submitted.tail();
        holds!(1, range.end == tail, "{range:?} is given up to {tail}");
        self.wait(shard, batch.len());
    }

    /// Asks for an event that is allowed on the log as submitted.
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

    /// A write or flush is about to fail for good.
    pub fn begin_failure(&mut self) {
        self.logs.values_mut().for_each(Tracked::begin_refusal);
    }

    /// A write is about to find no space: it is undone, and all that follows on it.
    pub fn begin_refusal(&mut self, failing: &Action) {
        self.begin_failure();
        let is_begun = |image: &Vec<u8>| image[ALIGN..].iter().any(|byte| *byte != 0);
        let from = segment_of(failing);
        let begun = self.sim.durable.range(from..);
        let begun = begun.filter(|(_, image)| is_begun(image));
        self.undone.extend(begun.map(|(segment, _)| *segment));
        let pending = self.sim.pending.iter();
        let pending = pending.map(|pending| segment_of(&pending.action));
        self.undone
            .extend(pending.filter(|segment| *segment >= from));
        self.undone.insert(from);
    }

    /// Finishes one pending operation.
    pub fn finish(&mut self, at: usize) {
        self.sim.finish(at);
        self.collect();
    }

    /// Runs until nothing is pending.
    pub fn settle(&mut self) {
        self.sim.settle();
        self.collect();
    }

    /// Takes outcomes into the plain model: in order, and each once.
    pub fn collect(&mut self) {
        self.sim.collect();
        let mut refused = BTreeSet::new();
        for done in std::mem::take(&mut self.sim.completions) {
            let last = self.last_answered;
            holds!(26, done.token > last, "{done:?} is told after {last}");
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
                    let is_first_part = 0 < stored && tail < done.range.end;
                    holds!(26, is_first_part, "{done:?} of a log up to {tail}");
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
        let recent = self.sim.machine.read_recent(log, from, max_bytes);
        recent.or_else(|| self.read_device(shard, from, max_bytes))
    }

    /// Reads through the machine's index, past what it has in memory.
    pub(super) fn read_device(&self, shard: u32, from: u64, max_bytes: usize) -> Option<ReadBatch> {
        let log = *self.sim.logs.get(&shard)?;
        let durable = self.sim.machine.durable_tail(log);
        if from >= durable {
            return None;
        }
        let state = self.sim.machine.log_state(log);
        let interval = state.index.interval(from, durable)?;
        let images = &self.sim.durable;
        match read_images(images, &name(shard), interval, from, max_bytes) {
            Ok(batch) => Some(batch),
            Err(error) => broken(5, format_args!("shard {shard} at {from}: {error}")),
        }
    }

    /// The power is cut; a new start goes on with what is left.
    pub fn crash(self, rng: &mut Rng, keep_of_16: u64) -> Self {
        self.check_indexes();
        let images = self.sim.cut_power(|_, _| rng.below(16) < keep_of_16);
        let recovered = self.check_cut(images, rng);
        Self::start(self.options, recovered, self.epoch + 1)
    }

    /// A start over what was left in order; nothing may have to be cut.
    pub fn restart(mut self, rng: &mut Rng) -> Self {
        self.settle();
        let recovered = self.check_cut(self.sim.durable.clone(), rng);
        self.check_whole(&recovered);
        Self::start(self.options, recovered, self.epoch + 1)
    }
}
