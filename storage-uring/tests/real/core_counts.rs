//! Starts with another number of cores than before, and back: what each log holds stays one log.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use shard_executor::rt::{spawn_core, CoreSpec};
use storage_uring::{ControlEvent, LogRef, ReadError, Retention, Storage, StorageConfig};

use crate::common::{config, disk_dir, name, outcomes, payload, read_all, recovered};

const LOGS: u32 = 12;
/// Of one visit to each log; several segments on each core.
const RECORDS: u64 = 300;

/// What a log held when it was left.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Left {
    base: u64,
    tail: u64,
    accepted: u64,
    history: usize,
}

impl Left {
    fn of(storage: &Storage, log: LogRef) -> Self {
        let state = storage.state(log);
        Self {
            base: state.base,
            tail: state.tail,
            accepted: state.accepted,
            history: state.history.len(),
        }
    }
}

/// Where a log lives: a function of its name and the number of cores, in which every log of the second half of
/// three moves between one core and two.
fn home(shard: u32, cores: u16) -> u16 {
    u16::try_from(shard).expect("few") % cores
}

/// A start with this many cores: `visit` is called for every log on its core, then `after` for the core.
fn start<F, G>(dir: &Path, cores: u16, visit: F, after: G) -> BTreeMap<u32, Left>
where
    F: AsyncFn(&Storage, LogRef, u32) + Clone + Send + 'static,
    G: AsyncFn(&Storage, u16) + Clone + Send + 'static,
{
    let recovered = recovered(dir, 2);
    let report = recovered.report();
    let is_clean = report.cuts.is_empty() && report.damages.is_empty();
    assert!(is_clean && report.refused.is_empty(), "{report:?}");
    let mut running = Vec::new();
    for core in 0..cores {
        let settings = StorageConfig {
            core_index: core,
            core_count: cores,
            ..config(dir)
        };
        let (recovered, visit, after) = (recovered.clone(), visit.clone(), after.clone());
        let spec = CoreSpec {
            name: format!("storage-test-{core}"),
            ..CoreSpec::new(core.into())
        };
        let handle = spawn_core(spec, move || async move {
            let storage = Storage::open(settings, recovered).await.expect("opens");
            let here = || (0..LOGS).filter(|shard| home(*shard, cores) == core);
            let open = |shard| storage.open_log(&name(shard)).expect("opens");
            for shard in here() {
                visit(&storage, open(shard), shard).await;
            }
            after(&storage, core).await;
            storage.close().await.expect("closes");
            let left = here().map(|shard| (shard, Left::of(&storage, open(shard))));
            left.collect::<Vec<_>>()
        });
        running.push(handle.expect("starts"));
    }
    let ended = running.into_iter().map(|core| core.join().expect("runs"));
    ended.flatten().collect()
}

async fn append(storage: &Storage, log: LogRef, shard: u32, count: u64) {
    for _ in 0..count {
        let record = payload(shard, storage.tail(log));
        storage
            .append(log, 1, 1_000, [record.as_slice()].into_iter(), 0)
            .expect("is taken");
    }
    storage.kick();
    outcomes(storage, count as usize).await;
}

async fn control(storage: &Storage, log: LogRef, event: ControlEvent<'_>) {
    storage.control(log, event, 1_000, 0).expect("is taken");
    storage.kick();
    outcomes(storage, 1).await;
}

async fn assert_whole(storage: &Storage, log: LogRef, shard: u32) {
    let all = read_all(storage, log).await;
    assert_eq!(all.len() as u64, storage.tail(log) - storage.base(log));
    for (offset, record) in (storage.base(log)..).zip(&all) {
        assert_eq!(*record, payload(shard, offset), "{shard}: {offset}");
    }
}

#[test]
fn logs_keep_their_records_and_state_over_changes_of_the_number_of_cores() {
    let dir = disk_dir();
    let mut left = BTreeMap::new();
    for (generation, cores) in (1..).zip([1u16, 2, 1, 3, 2, 1, 2]) {
        let known: BTreeMap<u32, Left> = left;
        let visit = async move |storage: &Storage, log, shard| {
            let before = known.get(&shard).copied().unwrap_or_default();
            assert_eq!(Left::of(storage, log), before, "{shard}");
            assert_whole(storage, log, shard).await;
            let begin = ControlEvent::Begin {
                generation,
                leader: "broker-1",
            };
            control(storage, log, begin).await;
            append(storage, log, shard, RECORDS).await;
            match shard % 4 {
                // What is cut lies on another core than what is written in its place.
                1 => {
                    let to = storage.tail(log).saturating_sub(RECORDS + RECORDS / 3);
                    control(storage, log, ControlEvent::Truncate(to)).await;
                    append(storage, log, shard, 5).await;
                }
                2 => {
                    let to = storage.tail(log) - RECORDS / 2;
                    control(storage, log, ControlEvent::Base(to)).await;
                }
                _ => {}
            }
            assert_whole(storage, log, shard).await;
        };
        left = start(dir.path(), cores, visit, async |_: &Storage, _| {});
        assert_eq!(left.len(), LOGS as usize, "every log is somewhere");
    }
}

/// Bytes of records, headers included, that retention has to leave.
const KEPT_BYTES: u64 = 256 << 10;

fn held_bytes(storage: &Storage, log: LogRef, shard: u32) -> u64 {
    let records = storage.base(log)..storage.tail(log);
    let bytes = |offset| payload(shard, offset).len() as u64 + 16;
    records.map(bytes).sum()
}

#[test]
fn retention_keeps_what_it_was_told_to_over_changes_of_the_number_of_cores() {
    let dir = disk_dir();
    let mut left: BTreeMap<u32, Left> = BTreeMap::new();
    for (round, cores) in [1u16, 2, 1, 2].into_iter().enumerate() {
        let known = std::mem::take(&mut left);
        let visit = async move |storage: &Storage, log, shard| {
            let before = known.get(&shard).copied().unwrap_or_default();
            assert_eq!(Left::of(storage, log), before, "{shard}");
            for _ in 0..4 {
                append(storage, log, shard, RECORDS).await;
            }
            let retention = Retention {
                bytes: KEPT_BYTES,
                ..Retention::default()
            };
            storage.set_retention(log, retention);
        };
        let after = async move |storage: &Storage, core: u16| {
            // What a directory holds of logs of other cores stays until these logs live there again: on core 0
            // in the third start, on core 1 in the fourth.
            let gives_back = matches!((round, core), (2, 0) | (3, 1));
            let freed = || storage.stats().machine.segments_freed;
            for _ in 0..600 {
                if !gives_back || freed() > 0 {
                    break;
                }
                shard_executor::rt::sleep(Duration::from_millis(50)).await;
            }
            assert!(!gives_back || freed() > 0, "segments go within 30 seconds");
            let here = (0..LOGS).filter(|shard| home(*shard, cores) == core);
            for shard in here {
                let log = storage.open_log(&name(shard)).expect("opens");
                // From here on nothing goes any more.
                storage.set_retention(log, Retention::default());
                while !storage.is_settled(log) {
                    shard_executor::rt::sleep(Duration::from_millis(10)).await;
                }
                let held = held_bytes(storage, log, shard);
                assert!(held >= KEPT_BYTES, "{shard} in round {round}: {held} bytes");
                if let base @ 1.. = storage.base(log) {
                    let refused = storage.read(log, 0, 100).await;
                    assert_eq!(refused, Err(ReadError::Trimmed { offset: 0, base }));
                }
                assert_whole(storage, log, shard).await;
            }
        };
        left = start(dir.path(), cores, visit, after);
    }
}

#[test]
fn records_behind_a_cut_on_another_core_are_not_given_up_with_what_was_cut() {
    let dir = disk_dir();
    // Log 1 is written on core 0, cut back and written anew on core 1, and goes on on core 0.
    let rounds = [(1u16, None), (2, Some(100)), (1, None)];
    for (round, (cores, cut)) in rounds.into_iter().enumerate() {
        let visit = async move |storage: &Storage, log, shard| {
            if shard != 1 {
                return;
            }
            if let Some(cut) = cut {
                control(storage, log, ControlEvent::Truncate(cut)).await;
            }
            append(storage, log, shard, if round == 0 { 2000 } else { 100 }).await;
            if round < 2 {
                return;
            }
            // What lies in finished segments is old; what this start has written is not.
            let retention = Retention {
                age_us: 1,
                ..Retention::default()
            };
            storage.set_retention(log, retention);
            for _ in 0..600 {
                if storage.base(log) > 0 {
                    break;
                }
                shard_executor::rt::sleep(Duration::from_millis(50)).await;
            }
        };
        let after = async move |storage: &Storage, _| {
            if round == 2 {
                let log = storage.open_log(&name(1)).expect("opens");
                let (base, tail) = (storage.base(log), storage.tail(log));
                assert_eq!(
                    (base, tail),
                    (100, 300),
                    "the first 100 are old, the others are not"
                );
                storage.set_retention(log, Retention::default());
                assert_whole(storage, log, 1).await;
            }
        };
        start(dir.path(), cores, visit, after);
    }
}
