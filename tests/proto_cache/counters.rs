//! Counters against plain sums.

use super::*;

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
    fn counters_follow_the_model_and_every_prefix_replays(steps in prop::collection::vec(counter_step(), 0..40)) {
        run_counters(&steps);
    }
}
