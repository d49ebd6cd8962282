//! Values: any order of completions, failures, evictions and sweeps against a map.

use super::*;

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

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn values_follow_the_model_and_every_prefix_replays(steps in prop::collection::vec(step(), 0..40)) {
        run_values(&steps);
    }
}
