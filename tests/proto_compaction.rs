//! Compaction against plain models: random histories of writes with passes running through them,
//! failed writes, refused reads, and a crash and a replay after every step. Whatever the log is cut
//! down to, it must say what the model says.
//!
//! `FELIX_COMPACTION_HISTORIES` is the number of histories of each kind (100 unless set),
//! `FELIX_COMPACTION_SEED` the first seed. A failure names its seed.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use felix_uring::proto::cache::record::RecordFault;
use felix_uring::proto::cache::{
    Applied, CacheIndex, CacheLog, Compaction, CompactionLimits, CompactionStep, Copy, LogIndex,
    Lookup, Staged, Written,
};
use felix_uring::proto::MonoTime;

const LIMITS: CompactionLimits = CompactionLimits {
    ratio: 2,
    floor_bytes: 200,
    batch: 3,
    read_bytes: 4,
    bytes_per_s: 1 << 30,
    rounds: 3,
    failures: 3,
};

/// A small generator of its own, so that a seed means the same everywhere.
struct Rng(u64);

impl Rng {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % bound.max(1)
    }
}

/// The state of the log that a history is about, which starts at `base`.
fn state(is_counters: bool, base: u64) -> LogIndex {
    let log = match is_counters {
        true => CacheLog::Counters,
        false => CacheLog::Values,
    };
    LogIndex::new(log, base)
}

/// Key to what it holds: a value, or a sum.
type Model = BTreeMap<Arc<str>, Held>;

#[derive(Debug, Clone, PartialEq, Eq)]
enum Held {
    Value(Bytes),
    Sum(i128),
}

/// What an operation does to the model once it is durable; nothing for a copy.
enum Effect {
    Put(Arc<str>, Bytes),
    Delete(Arc<str>),
    Add(Arc<str>, i64),
    Copy,
    Raise(u64),
}

struct World {
    rng: Rng,
    now: MonoTime,
    is_counters: bool,
    index: LogIndex,
    base: u64,
    log: VecDeque<Bytes>,
    /// In the order of the log; a raise takes no place in it.
    flights: VecDeque<(Option<Staged>, Effect)>,
    model: Model,
    pass: Option<Compaction>,
    read: Option<(u64, usize)>,
    passes: u32,
    crashes: u32,
}

fn key(name: u64) -> Arc<str> {
    Arc::from(format!("key-{name}"))
}

impl World {
    fn new(seed: u64, is_counters: bool) -> Self {
        Self {
            rng: Rng(seed),
            now: MonoTime::ZERO,
            is_counters,
            index: state(is_counters, 0),
            base: 0,
            log: VecDeque::new(),
            flights: VecDeque::new(),
            model: Model::new(),
            pass: None,
            read: None,
            passes: 0,
            crashes: 0,
        }
    }

    fn write(&mut self) {
        let key = key(self.rng.below(6));
        let (staged, effect) = match &mut self.index {
            LogIndex::Values(index) => match self.rng.below(4) {
                0 => match index.stage_delete(&key, 0) {
                    Some(write) => (Staged::Value(write), Effect::Delete(key)),
                    None => return,
                },
                _ => {
                    let len = self.rng.below(20) as usize;
                    let value = Bytes::from(vec![self.rng.below(256) as u8; len]);
                    let write = index.stage_put(&key, &value, None, 0);
                    (Staged::Value(write), Effect::Put(key, value))
                }
            },
            LogIndex::Counters(index) => {
                let delta = match self.rng.below(8) {
                    0 => i64::MAX,
                    1 => i64::MIN,
                    small => small as i64 - 5,
                };
                match index.stage_add(&key, delta) {
                    Ok(add) => (Staged::Add(add), Effect::Add(key, delta)),
                    Err(_) => return,
                }
            }
        };
        self.flights.push_back((Some(staged), effect));
    }

    /// The oldest of what is on its way is durable.
    fn complete(&mut self) {
        let Some((staged, effect)) = self.flights.pop_front() else {
            return;
        };
        let offset = self.base + self.log.len() as u64;
        if let Some(staged) = staged {
            self.log.push_back(staged.record().clone());
            let written = self.index.applied(staged, offset, 0);
            let written = written.expect("staged by this state");
            if !self.is_counters {
                let is_copy = written == Written::Value(Applied::Copied);
                assert_eq!(is_copy, matches!(effect, Effect::Copy));
            }
        }
        self.take_effect(effect);
        self.check();
    }

    fn take_effect(&mut self, effect: Effect) {
        match effect {
            Effect::Put(key, value) => drop(self.model.insert(key, Held::Value(value))),
            Effect::Delete(key) => drop(self.model.remove(&key)),
            Effect::Add(key, delta) => {
                let held = self.model.entry(key).or_insert(Held::Sum(0));
                if let Held::Sum(sum) = held {
                    *sum += i128::from(delta);
                }
            }
            Effect::Copy => {
                let now = self.now;
                if let Some(pass) = &mut self.pass {
                    pass.on_written(now, true);
                }
            }
            Effect::Raise(base) => {
                self.log.drain(..(base - self.base) as usize);
                self.base = base;
                if let Some(pass) = &mut self.pass {
                    pass.on_raised();
                }
            }
        }
    }

    /// Everything on its way is undone.
    fn fail(&mut self) {
        for (staged, effect) in std::mem::take(&mut self.flights) {
            if let Some(staged) = staged {
                self.index.abandoned(staged);
            }
            let now = self.now;
            match (effect, &mut self.pass) {
                (Effect::Copy, Some(pass)) => pass.on_written(now, false),
                (Effect::Raise(_), Some(pass)) => pass.on_raise_refused(now),
                _ => {}
            }
        }
    }

    fn finish_read(&mut self) {
        let (Some((from, most)), Some(pass)) = (self.read.take(), &mut self.pass) else {
            return;
        };
        if self.rng.below(40) == 0 {
            return pass.on_read_failed();
        }
        let at = (from - self.base) as usize;
        let records = self.log.iter().skip(at).take(most).cloned().collect();
        pass.on_records(self.now, from, records);
    }

    /// Starts a pass when the log is over its bound, and does what the running one wants.
    fn compact(&mut self) {
        if self.pass.is_none() && self.index.log_use().wants_compaction(&LIMITS) {
            let cut = self.index.begin_compaction();
            self.pass = Some(Compaction::new(LIMITS, self.base, cut));
        }
        let Some(pass) = &mut self.pass else { return };
        if self.read.is_some() {
            return;
        }
        let below = self.index.log_use().live_below_cut();
        let applied = self.index.next_offset();
        let index = &mut self.index;
        let step = pass.poll(self.now, below, applied, |offset, record| {
            index.stage_copy(offset, record)
        });
        match step.expect("records of our own") {
            CompactionStep::Read { from, max_bytes } => self.read = Some((from, max_bytes)),
            CompactionStep::Append(copies) => {
                assert!(copies.len() <= LIMITS.batch);
                let flights = copies.into_iter();
                let flights = flights.map(|copy| (Some(copy), Effect::Copy));
                self.flights.extend(flights);
            }
            CompactionStep::Wait { until } => self.now = until,
            CompactionStep::Busy => {}
            CompactionStep::Raise { base, held } => {
                assert!((base..=applied).contains(&held));
                self.flights.push_back((None, Effect::Raise(base)));
            }
            CompactionStep::Done { raised } => {
                self.index.end_compaction(raised);
                self.pass = None;
                self.passes += u32::from(raised);
            }
        }
    }

    /// What the log says when it is read anew, whole, is what the model says.
    fn check(&self) {
        let rebuilt = self.rebuild();
        for name in 0..6 {
            let key = key(name);
            let expected = self.model.get(&key);
            for index in [&rebuilt, &self.index] {
                assert_eq!(self.held(index, &key).as_ref(), expected, "{key}");
            }
        }
        assert_eq!(rebuilt.fault(), None, "a log of our own is in range");
        assert_eq!(
            rebuilt.log_use().live_bytes(),
            self.index.log_use().live_bytes()
        );
        if self.pass.is_none() {
            assert_eq!(
                rebuilt.log_use().log_bytes(),
                self.index.log_use().log_bytes()
            );
        }
    }

    fn held(&self, index: &LogIndex, key: &str) -> Option<Held> {
        match index {
            LogIndex::Values(index) => match index.get(key, 0) {
                Lookup::Miss => None,
                Lookup::Value(value) => Some(Held::Value(value)),
                Lookup::InLog { .. } => panic!("nothing was evicted"),
            },
            LogIndex::Counters(index) => index.get(key).map(|sum| Held::Sum(i128::from(sum))),
        }
    }

    fn rebuild(&self) -> LogIndex {
        let mut index = state(self.is_counters, self.base);
        for (offset, record) in (self.base..).zip(&self.log) {
            index.replay(offset, record).expect("a record of our own");
        }
        index
    }

    /// The process dies: a part of what was on its way is durable; memory and the pass are gone.
    fn crash(&mut self) {
        self.crashes += 1;
        for _ in 0..self.rng.below(self.flights.len() as u64 + 1) {
            self.complete();
        }
        self.flights.clear();
        self.pass = None;
        self.read = None;
        self.index = self.rebuild();
        self.check();
    }

    fn step(&mut self) {
        match self.rng.below(100) {
            0..=29 => self.write(),
            30..=59 => self.complete(),
            60..=79 => self.compact(),
            80..=93 => self.finish_read(),
            94..=95 => self.fail(),
            96 => self.crash(),
            _ => self.now = self.now + Duration::from_millis(30),
        }
    }

    /// Nothing disturbs: the log comes under its bound.
    fn settle(&mut self) {
        for _ in 0..10_000 {
            while !self.flights.is_empty() {
                self.complete();
            }
            self.finish_read();
            self.compact();
            let is_still = self.pass.is_none() && self.flights.is_empty();
            if is_still && !self.index.log_use().wants_compaction(&LIMITS) {
                return self.check();
            }
        }
        panic!("the log does not come under its bound");
    }
}

fn count(name: &str, default: u64) -> u64 {
    let set = std::env::var(name).ok();
    set.map_or(default, |text| text.parse().expect("a number"))
}

fn run(is_counters: bool) {
    let first = count("FELIX_COMPACTION_SEED", 1);
    let histories = count("FELIX_COMPACTION_HISTORIES", 100);
    let (mut passes, mut crashes) = (0, 0);
    for seed in first..first + histories {
        let done = std::panic::catch_unwind(|| {
            let mut world = World::new(seed, is_counters);
            for _ in 0..500 {
                world.step();
            }
            world.settle();
            (world.passes, world.crashes)
        });
        let Ok(done) = done else {
            panic!("seed {seed}: run again with FELIX_COMPACTION_SEED={seed} FELIX_COMPACTION_HISTORIES=1");
        };
        passes += done.0;
        crashes += done.1;
    }
    assert!(u64::from(passes) > 2 * histories, "{passes} passes");
    assert!(u64::from(crashes) > 2 * histories, "{crashes} crashes");
}

#[test]
fn values_are_what_they_were_whatever_part_of_a_pass_happened() {
    run(false);
}

#[test]
fn sums_are_what_they_were_whatever_part_of_a_pass_happened() {
    run(true);
}

/// A state that was made anew under a pass knows nothing of the pass: nothing may be given up.
#[test]
fn a_pass_ends_when_its_state_is_made_anew() {
    let mut pass = Compaction::new(LIMITS, 0, 10);
    let index = CacheIndex::new(0);
    let below = index.log_use().live_below_cut();
    let step = pass.poll(
        MonoTime::ZERO,
        below,
        10,
        |_, _| -> Result<Copy<()>, RecordFault> { panic!("nothing was read") },
    );
    assert!(matches!(step, Ok(CompactionStep::Done { raised: false })));
}

/// A copy on its way and then a put: the put stands. A put on its way: no copy is made.
#[test]
fn a_put_wins_over_the_copy_of_what_it_replaces() {
    let key = key(0);
    let mut index = CacheIndex::new(0);
    let put = index.stage_put(&key, b"old", None, 0);
    let record = put.record().clone();
    index.applied(put, 0, 0);
    index.begin_compaction();
    let Ok(Copy::Staged(copy)) = index.stage_copy(0, &record) else {
        panic!("it is live");
    };
    let put = index.stage_put(&key, b"new", None, 0);
    let records = [record.clone(), copy.record().clone(), put.record().clone()];
    // A crash with all of it on disk.
    let mut rebuilt = CacheIndex::new(0);
    for (offset, record) in (0..).zip(&records) {
        rebuilt.replay(offset, record).unwrap();
    }
    let new = Lookup::Value(Bytes::from_static(b"new"));
    assert_eq!(rebuilt.get(&key, 0), new);
    // No crash.
    index.applied(copy, 1, 0);
    assert_eq!(index.log_use().live_below_cut(), Some(0));
    index.applied(put, 2, 0);
    assert_eq!(index.get(&key, 0), new);
    index.end_compaction(true);
    // The put came first.
    index.begin_compaction();
    let put = index.stage_put(&key, b"newer", None, 0);
    assert!(matches!(index.stage_copy(2, &records[2]), Ok(Copy::Busy)));
    assert_eq!(index.log_use().live_below_cut(), Some(1));
    index.abandoned(put);
    assert!(matches!(
        index.stage_copy(2, &records[2]),
        Ok(Copy::Staged(_))
    ));
}

/// What is given up at the cut must be held as far as the log went when the last key left, however
/// often the raise is put off and whatever is written meanwhile; and a pass that is put off for ever
/// ends.
#[test]
fn the_base_waits_for_everything_that_took_the_place_of_what_it_gives_up() {
    let key = key(0);
    let mut index = LogIndex::new(CacheLog::Values, 0);
    let mut log = Vec::new();
    for _ in 0..3 {
        write(&mut index, &mut log, &key);
    }
    let cut = index.begin_compaction();
    assert_eq!(cut, 3);
    let mut pass = Compaction::new(LIMITS, 0, cut);
    // The key leaves the stretch by a write; nothing need be copied.
    write(&mut index, &mut log, &key);
    let mut now = MonoTime::ZERO;
    let poll = |index: &mut LogIndex, now: MonoTime, pass: &mut Compaction| {
        let (below, applied) = (index.log_use().live_below_cut(), index.next_offset());
        pass.poll(now, below, applied, |offset, record| {
            index.stage_copy(offset, record)
        })
        .expect("records of our own")
    };
    for refusal in 0..=LIMITS.failures {
        let step = poll(&mut index, now, &mut pass);
        let CompactionStep::Raise { base: 3, held: 4 } = step else {
            panic!("refused {refusal} times: {step:?}");
        };
        pass.on_raise_refused(now);
        write(&mut index, &mut log, &key);
        now = now + Duration::from_secs(1);
    }
    let step = poll(&mut index, now, &mut pass);
    assert!(matches!(step, CompactionStep::Done { raised: false }));
}

fn write(index: &mut LogIndex, log: &mut Vec<Bytes>, key: &Arc<str>) {
    let values = index.values_mut().expect("a log of values");
    let put = values.stage_put(key, b"value", None, 0);
    log.push(put.record().clone());
    let offset = log.len() as u64 - 1;
    let written = index.applied(Staged::Value(put), offset, 0);
    assert_eq!(written, Some(Written::Value(Applied::Stored)));
}
