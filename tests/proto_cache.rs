//! Cache and counter state against plain models: random histories with completions, failures,
//! evictions, sweeps and clock steps, and a replay of every prefix of the log they leave behind.

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroU64;
use std::sync::Arc;

use bytes::Bytes;
use felix_uring::proto::cache::record::ValueRecord;
use felix_uring::proto::cache::{
    Applied, CacheIndex, CounterIndex, Lookup, Overflow, OwnerClock, StagedAdd, StagedWrite,
};
use proptest::prelude::*;

const BASE: u64 = 7;

fn key(name: u8) -> Arc<str> {
    // Key 0 is the empty string, which is a key like any other.
    Arc::from("k".repeat(usize::from(name)))
}

#[derive(Debug, Clone)]
enum Step {
    Put {
        key: u8,
        value: u8,
        ttl: Option<u64>,
    },
    Delete {
        key: u8,
    },
    /// The oldest writes become durable.
    Complete {
        writes: usize,
    },
    /// Everything on its way is undone.
    Fail,
    Sweep {
        most: usize,
    },
    Evict {
        bytes: usize,
    },
    /// Reads of values that left memory, taken back in.
    Readmit {
        key: u8,
    },
    /// The wall clock moves, maybe back.
    Clock {
        by_ms: i64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let ttl = prop_oneof![
        3 => Just(None),
        3 => (1u64..50).prop_map(Some),
        1 => Just(Some(u64::MAX)),
    ];
    prop_oneof![
        6 => (0u8..4, any::<u8>(), ttl).prop_map(|(key, value, ttl)| Step::Put { key, value, ttl }),
        3 => (0u8..4).prop_map(|key| Step::Delete { key }),
        6 => (1usize..4).prop_map(|writes| Step::Complete { writes }),
        1 => Just(Step::Fail),
        2 => (1usize..4).prop_map(|most| Step::Sweep { most }),
        2 => (1usize..400).prop_map(|bytes| Step::Evict { bytes }),
        1 => (0u8..4).prop_map(|key| Step::Readmit { key }),
        3 => (-40i64..40).prop_map(|by_ms| Step::Clock { by_ms }),
    ]
}

/// Key to value and expiry; the state of one prefix of the log.
type Model = BTreeMap<Arc<str>, (Bytes, Option<u128>)>;

fn model_get(model: &Model, key: &str, now_ms: u64) -> Option<Bytes> {
    let (value, expiry) = model.get(key)?;
    let is_live = expiry.is_none_or(|at| u128::from(now_ms) < at);
    is_live.then(|| value.clone())
}

/// What is on its way, in the model's words.
#[derive(Clone)]
enum Wanted {
    Put(Bytes, Option<u128>),
    Delete,
    Expire,
}

#[derive(Default)]
struct World {
    log: Vec<Bytes>,
    /// The model after each prefix of the log; the first is the empty one.
    history: Vec<Model>,
    staged: VecDeque<(StagedWrite, Arc<str>, Wanted)>,
}

impl World {
    fn fetch(&self, lookup: Lookup, key: &str) -> Option<Bytes> {
        match lookup {
            Lookup::Miss => None,
            Lookup::Value(value) => Some(value),
            Lookup::InLog { offset } => {
                let record = &self.log[(offset - BASE) as usize];
                match ValueRecord::decode(record).unwrap() {
                    ValueRecord::Put { key: of, value, .. } => {
                        assert_eq!(of, key, "a lookup names another key's record");
                        Some(record.slice_ref(value))
                    }
                    ValueRecord::Delete { .. } => panic!("a lookup names a delete"),
                }
            }
        }
    }

    fn model(&self) -> &Model {
        self.history.last().unwrap()
    }

    fn complete(&mut self, index: &mut CacheIndex, now_ms: u64) {
        let Some((write, key, wanted)) = self.staged.pop_front() else {
            return;
        };
        let mut model = self.model().clone();
        let before = model_get(&model, &key, now_ms);
        let offset = BASE + self.log.len() as u64;
        self.log.push(write.record().clone());
        let applied = index.applied(write, offset, now_ms);
        match wanted {
            Wanted::Put(value, expiry) => {
                model.insert(Arc::clone(&key), (value, expiry));
                assert_eq!(applied, Applied::Stored);
            }
            Wanted::Delete => {
                model.remove(&key);
                let Applied::Removed(found) = applied else {
                    panic!("{applied:?}");
                };
                assert_eq!(self.fetch(found, &key), before, "what a delete removed");
            }
            Wanted::Expire => {
                assert_eq!(before, None, "a live entry was expired");
                model.remove(&key);
                assert_eq!(applied, Applied::Expired);
            }
        }
        self.history.push(model);
    }
}

fn check_all(world: &World, index: &CacheIndex, model: &Model, now_ms: u64) {
    for name in 0..4 {
        let key = key(name);
        let got = world.fetch(index.get(&key, now_ms), &key);
        assert_eq!(got, model_get(model, &key, now_ms), "key {key:?}");
    }
    assert_eq!(index.keys(), model.len());
}

fn run_values(steps: &[Step]) {
    let mut world = World {
        history: vec![Model::new()],
        ..World::default()
    };
    let mut index = CacheIndex::new(BASE);
    let mut clock = OwnerClock::default();
    let mut wall_ms: u64 = 1_000_000;
    for step in steps {
        let now_ms = clock.at_wall_us(wall_ms * 1000);
        match *step {
            Step::Put {
                key: name,
                value,
                ttl,
            } => {
                let value = Bytes::from(vec![value; usize::from(value)]);
                let ttl = ttl.and_then(NonZeroU64::new);
                let write = index.stage_put(&key(name), &value, ttl, now_ms);
                let expiry = ttl.map(|ttl| {
                    let at = u128::from(now_ms) + u128::from(ttl.get());
                    at.min(u128::from(u64::MAX))
                });
                let wanted = Wanted::Put(value, expiry);
                world.staged.push_back((write, key(name), wanted));
            }
            Step::Delete { key: name } => {
                let key = key(name);
                let may_be_there = model_get(world.model(), &key, now_ms).is_some()
                    || world.staged.iter().any(|(_, of, _)| *of == key);
                let write = index.stage_delete(&key, now_ms);
                assert_eq!(
                    write.is_some(),
                    may_be_there,
                    "deleting nothing writes nothing"
                );
                if let Some(write) = write {
                    world.staged.push_back((write, key, Wanted::Delete));
                }
            }
            Step::Complete { writes } => {
                for _ in 0..writes {
                    world.complete(&mut index, now_ms);
                }
            }
            Step::Fail => {
                for (write, _, _) in world.staged.drain(..) {
                    index.abandoned(write);
                }
            }
            Step::Sweep { most } => {
                let writes = index.stage_expired(now_ms, most);
                assert!(writes.len() <= most);
                for write in writes {
                    let key = write.key();
                    assert!(
                        !world.staged.iter().any(|(_, of, _)| *of == key),
                        "an expiry overtakes a write"
                    );
                    world.staged.push_back((write, key, Wanted::Expire));
                }
            }
            Step::Evict { bytes } => {
                let before = index.resident_bytes();
                index.evict(bytes);
                assert!(index.resident_bytes() <= before.saturating_sub(bytes));
            }
            Step::Readmit { key: name } => {
                if let Lookup::InLog { offset } = index.get(&key(name), now_ms) {
                    let value = world.fetch(Lookup::InLog { offset }, &key(name)).unwrap();
                    index.readmit(&key(name), offset, &value);
                    assert_eq!(index.get(&key(name), now_ms), Lookup::Value(value));
                }
            }
            Step::Clock { by_ms } => wall_ms = wall_ms.saturating_add_signed(by_ms),
        }
        check_all(&world, &index, world.model(), now_ms);
        assert_eq!(index.staged(), world.staged.len());
    }
    // A crash anywhere: what was durable, and any part of what was submitted behind it.
    let now_ms = clock.at_wall_us(wall_ms * 1000);
    while !world.staged.is_empty() {
        world.complete(&mut index, now_ms);
    }
    for (prefix, model) in world.history.iter().enumerate() {
        let mut rebuilt = CacheIndex::new(BASE);
        for (offset, record) in (BASE..).zip(&world.log[..prefix]) {
            rebuilt.replay(offset, record).unwrap();
        }
        check_all(&world, &rebuilt, model, now_ms);
        assert_eq!(rebuilt.next_offset(), BASE + prefix as u64);
    }
    // Everything goes once its time has come, and its memory with it.
    for write in index.stage_expired(u64::MAX, usize::MAX) {
        let key = write.key();
        world.staged.push_back((write, key, Wanted::Expire));
    }
    while !world.staged.is_empty() {
        world.complete(&mut index, u64::MAX);
    }
    assert!(world.model().values().all(|(_, expiry)| expiry.is_none()));
    index.evict(usize::MAX);
    assert_eq!(index.resident_bytes(), 0);
    check_all(&world, &index, world.model(), u64::MAX);
}

#[derive(Debug, Clone)]
enum CounterStep {
    Add { key: u8, delta: i64 },
    Complete { writes: usize },
    Fail,
}

fn counter_step() -> impl Strategy<Value = CounterStep> {
    let delta = prop_oneof![
        4 => -5i64..5,
        1 => Just(i64::MAX),
        1 => Just(i64::MIN),
        1 => any::<i64>(),
    ];
    prop_oneof![
        5 => (0u8..3, delta).prop_map(|(key, delta)| CounterStep::Add { key, delta }),
        4 => (1usize..4).prop_map(|writes| CounterStep::Complete { writes }),
        1 => Just(CounterStep::Fail),
    ]
}

fn run_counters(steps: &[CounterStep]) {
    type Sums = BTreeMap<Arc<str>, i128>;
    let mut index = CounterIndex::new(BASE);
    let mut log: Vec<Bytes> = Vec::new();
    let mut history = vec![Sums::new()];
    let mut staged: VecDeque<(StagedAdd, i64)> = VecDeque::new();
    let mut complete = |index: &mut CounterIndex,
                        staged: &mut VecDeque<(StagedAdd, i64)>,
                        history: &mut Vec<Sums>| {
        let Some((add, delta)) = staged.pop_front() else {
            return;
        };
        let mut sums = history.last().unwrap().clone();
        let sum = sums.entry(add.key()).or_default();
        *sum += i128::from(delta);
        let (key, expected) = (add.key(), *sum);
        log.push(add.record().clone());
        let offset = BASE + log.len() as u64 - 1;
        assert_eq!(i128::from(index.applied(add, offset)), expected);
        assert_eq!(index.get(&key).map(i128::from), Some(expected));
        history.push(sums);
    };
    for step in steps {
        match *step {
            CounterStep::Add { key: name, delta } => {
                let key = key(name);
                let durable = history.last().unwrap().get(&key).copied().unwrap_or(0);
                let on_its_way: i128 = staged
                    .iter()
                    .filter(|(add, _)| add.key() == key)
                    .map(|(_, delta)| i128::from(*delta))
                    .sum();
                let fits = i64::try_from(durable + on_its_way + i128::from(delta)).is_ok();
                match index.stage_add(&key, delta) {
                    Ok(add) => {
                        assert!(fits, "an overflow was taken");
                        staged.push_back((add, delta));
                    }
                    Err(Overflow) => assert!(!fits, "a sum in range was refused"),
                }
            }
            CounterStep::Complete { writes } => {
                for _ in 0..writes {
                    complete(&mut index, &mut staged, &mut history);
                }
            }
            CounterStep::Fail => {
                for (add, _) in staged.drain(..) {
                    index.abandoned(add);
                }
            }
        }
        for name in 0..3 {
            let key = key(name);
            let expected = history.last().unwrap().get(&key).copied();
            assert_eq!(index.get(&key).map(i128::from), expected);
        }
        assert_eq!(index.staged(), staged.len());
    }
    while !staged.is_empty() {
        complete(&mut index, &mut staged, &mut history);
    }
    for (prefix, sums) in history.iter().enumerate() {
        let mut rebuilt = CounterIndex::new(BASE);
        for (offset, record) in (BASE..).zip(&log[..prefix]) {
            rebuilt.replay(offset, record).unwrap();
        }
        for name in 0..3 {
            let key = key(name);
            assert_eq!(
                rebuilt.get(&key).map(i128::from),
                sums.get(&key).copied(),
                "replay of {prefix} records"
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn values_follow_the_model_and_every_prefix_replays(steps in prop::collection::vec(step(), 0..40)) {
        run_values(&steps);
    }

    #[test]
    fn counters_follow_the_model_and_every_prefix_replays(steps in prop::collection::vec(counter_step(), 0..40)) {
        run_counters(&steps);
    }
}

/// An owner with a wall clock of its own; the log is what survives it.
struct Owner {
    index: CacheIndex,
    clock: OwnerClock,
    log: Vec<Bytes>,
}

impl Owner {
    fn start(log: Vec<Bytes>) -> Self {
        let mut index = CacheIndex::new(0);
        for (offset, record) in (0..).zip(&log) {
            index.replay(offset, record).unwrap();
        }
        Self {
            index,
            clock: OwnerClock::default(),
            log,
        }
    }

    fn write(&mut self, write: StagedWrite, now_ms: u64) -> Applied {
        self.log.push(write.record().clone());
        let offset = self.log.len() as u64 - 1;
        self.index.applied(write, offset, now_ms)
    }

    fn put(&mut self, wall_ms: u64, key: &str, value: &'static [u8], ttl_ms: Option<u64>) {
        let now_ms = self.clock.at_wall_us(wall_ms.saturating_mul(1000));
        let ttl = ttl_ms.map(|ttl| NonZeroU64::new(ttl).unwrap());
        let write = self.index.stage_put(&Arc::from(key), value, ttl, now_ms);
        assert_eq!(self.write(write, now_ms), Applied::Stored);
    }

    fn get(&mut self, wall_ms: u64, key: &str) -> Option<Bytes> {
        let now_ms = self.clock.at_wall_us(wall_ms.saturating_mul(1000));
        match self.index.get(key, now_ms) {
            Lookup::Miss => None,
            Lookup::Value(value) => Some(value),
            Lookup::InLog { .. } => panic!("nothing was evicted"),
        }
    }

    fn sweep(&mut self, wall_ms: u64) -> usize {
        let now_ms = self.clock.at_wall_us(wall_ms.saturating_mul(1000));
        let writes = self.index.stage_expired(now_ms, usize::MAX);
        let count = writes.len();
        for write in writes {
            assert_eq!(self.write(write, now_ms), Applied::Expired);
        }
        count
    }
}

const T: u64 = 1_700_000_000_000;

/// The expiry is in the record: whoever leads the shard next applies the same absolute time,
/// whatever its clock was when the record arrived.
#[test]
fn a_time_to_live_is_decided_once() {
    let mut owner = Owner::start(Vec::new());
    owner.put(T, "k", b"v", Some(2_000));
    assert_eq!(owner.get(T + 1_000, "k").as_deref(), Some(&b"v"[..]));
    let mut next = Owner::start(owner.log.clone());
    assert_eq!(next.get(T + 1_500, "k").as_deref(), Some(&b"v"[..]));
    assert_eq!(next.get(T + 1_999, "k").as_deref(), Some(&b"v"[..]));
    assert_eq!(next.get(T + 2_000, "k"), None);
    assert_eq!(next.get(T + 2_500, "k"), None);
    // A new leader whose clock is 30 s ahead expires early, by no more than that.
    let mut ahead = Owner::start(owner.log.clone());
    assert_eq!(ahead.get(T + 30_000, "k"), None);
    let mut restarted = Owner::start(next.log.clone());
    assert_eq!(restarted.get(T + 3_000, "k"), None);
}

#[test]
fn an_expired_value_stays_gone_when_the_clock_steps_back() {
    let mut owner = Owner::start(Vec::new());
    owner.put(T, "k", b"v", Some(2_000));
    assert_eq!(owner.get(T + 2_500, "k"), None);
    assert_eq!(owner.get(T - 3_600_000, "k"), None, "within the process");
    // The sweep makes it last: after its delete no clock brings the value back.
    assert_eq!(owner.sweep(T - 3_600_000), 1);
    let mut restarted = Owner::start(owner.log.clone());
    assert_eq!(restarted.get(T - 3_600_000, "k"), None);
    assert_eq!(restarted.index.keys(), 0, "and its memory is free");
    // A live value is not dropped early by the step.
    owner.put(T - 3_600_000, "live", b"v", Some(1_000));
    assert!(owner.get(T - 3_600_000, "live").is_some());
    assert!(owner.get(T + 3_000, "live").is_some());
    assert_eq!(owner.get(T + 3_500, "live"), None);
}

#[test]
fn extreme_times_to_live_neither_panic_nor_wrap() {
    let mut owner = Owner::start(Vec::new());
    owner.put(T, "one", b"1", Some(1));
    owner.put(T, "max", b"m", Some(u64::MAX));
    owner.put(T, "none", b"n", None);
    assert!(owner.get(T, "one").is_some());
    assert_eq!(owner.get(T + 1, "one"), None);
    let far = u64::MAX / 1_000;
    assert_eq!(owner.sweep(far), 1, "only the short one is over");
    let mut restarted = Owner::start(owner.log.clone());
    for owner in [&mut owner, &mut restarted] {
        assert_eq!(owner.get(far, "max").as_deref(), Some(&b"m"[..]));
        assert_eq!(owner.get(far, "none").as_deref(), Some(&b"n"[..]));
    }
}

#[test]
fn a_put_that_refreshes_an_expired_entry_wins_over_its_delete() {
    let mut owner = Owner::start(Vec::new());
    owner.put(T, "k", b"old", Some(10));
    let now = T + 20;
    let mut expired = owner.index.stage_expired(now, 10);
    let expire = expired.pop().unwrap();
    let key: Arc<str> = Arc::from("k");
    let refresh = owner.index.stage_put(&key, b"new", None, now);
    assert!(owner.index.stage_expired(now, 10).is_empty());
    assert_eq!(owner.write(expire, now), Applied::Expired);
    assert_eq!(owner.write(refresh, now), Applied::Stored);
    assert_eq!(owner.get(now, "k").as_deref(), Some(&b"new"[..]));
    let mut restarted = Owner::start(owner.log.clone());
    assert_eq!(restarted.get(now, "k").as_deref(), Some(&b"new"[..]));
}

/// A key written over and over must not grow the queues behind the index.
#[test]
fn memory_is_that_of_what_is_held() {
    let mut index = CacheIndex::new(0);
    let hot: Arc<str> = Arc::from("hot");
    for turn in 0..20_000 {
        let write = index.stage_put(&hot, b"value", NonZeroU64::new(1_000_000_000), T + turn);
        assert_eq!(index.applied(write, turn, T + turn), Applied::Stored);
    }
    assert_eq!(index.keys(), 1);
    assert!(index.queue_places() < 400, "{}", index.queue_places());
    assert!(index.index_bytes() < 200);
    assert!(index.resident_bytes() < 200);
}
