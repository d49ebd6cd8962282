//! Rewriting of segments on a real file system.

use std::cell::Cell;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use shard_executor::rt::{sleep, spawn_local};

use crate::common::{config, disk_dir, name, on_core, outcomes, payload, read_all};
use storage_uring::offline::Reader;
use storage_uring::{
    FaultEffect, FaultOp, FaultPlan, FaultRule, LogRef, ReadError, Retention, Storage,
    StorageConfig, SyncMethod,
};

const BUSY: u32 = 0;
const SLOW: u32 = 1;
const BUSY_KEEPS: u64 = 1 << 20;

fn files(dir: &Path, ending: &str) -> Vec<u64> {
    let files = std::fs::read_dir(dir.join("core-log/0")).expect("lists");
    files
        .filter_map(Result::ok)
        .filter(|file| file.file_name().to_string_lossy().ends_with(ending))
        .filter_map(|file| file.metadata().ok())
        .map(|found| found.len())
        .collect()
}

async fn append(storage: &Storage, log: LogRef, record: &[u8]) {
    storage
        .append(log, 1, 1_000, [record].into_iter(), 0)
        .expect("appends");
}

/// Rounds of ten large records of the busy shard and one small one of the slow shard, a group each round.
async fn rounds(storage: &Storage, count: u64) {
    let busy = storage.open_log(&name(BUSY)).expect("opens");
    let slow = storage.open_log(&name(SLOW)).expect("opens");
    for _ in 0..count {
        for _ in 0..10 {
            let offset = storage.tail(busy);
            let mut record = vec![7; 8000];
            record[..8].copy_from_slice(&offset.to_le_bytes());
            append(storage, busy, &record).await;
        }
        append(storage, slow, &payload(SLOW, storage.tail(slow))).await;
        storage.kick();
        outcomes(storage, 11).await;
    }
}

fn keep_little_of_the_busy_one(storage: &Storage) {
    let busy = storage.open_log(&name(BUSY)).expect("opens");
    let retention = Retention {
        bytes: BUSY_KEEPS,
        ..Retention::default()
    };
    storage.set_retention(busy, retention);
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..1200 {
        if holds() {
            return;
        }
        sleep(Duration::from_millis(50)).await;
    }
    panic!("{what} within 60 seconds");
}

async fn slow_is_whole(storage: &Storage, count: u64) {
    let slow = storage.open_log(&name(SLOW)).expect("opens");
    let records = read_all(storage, slow).await;
    assert_eq!(records.len() as u64, count);
    for (offset, record) in (0..).zip(records) {
        assert_eq!(record, payload(SLOW, offset), "offset {offset}");
    }
}

/// A reader that begins anew whenever it is at the end, until it is told to stop.
async fn read_on(storage: Storage, stop: Rc<Cell<bool>>) -> u64 {
    let slow = storage.open_log(&name(SLOW)).expect("opens");
    let (mut from, mut read) = (0, 0);
    while !stop.get() {
        let batch = storage.read(slow, from, 3000).await.expect("reads");
        for (offset, record) in (from..).zip(&batch.records) {
            assert_eq!(record[..], payload(SLOW, offset), "offset {offset}");
        }
        read += batch.records.len() as u64;
        from = match batch.records.is_empty() {
            true => 0,
            false => batch.next_offset,
        };
        sleep(Duration::from_micros(200)).await;
    }
    read
}

/// A reader of the busy shard, always at what goes next: it gets records, or is told that they went.
async fn read_what_goes(storage: Storage, stop: Rc<Cell<bool>>) {
    let busy = storage.open_log(&name(BUSY)).expect("opens");
    while !stop.get() {
        let from = storage.base(busy);
        match storage.read(busy, from, 200_000).await {
            Ok(batch) => {
                for (offset, record) in (from..).zip(&batch.records) {
                    assert_eq!(record[..8], offset.to_le_bytes());
                }
            }
            Err(ReadError::Trimmed { .. }) => {}
            Err(error) => panic!("{error}"),
        }
        sleep(Duration::from_micros(100)).await;
    }
}

#[test]
fn one_slow_shard_keeps_little_beside_a_busy_one() {
    const ROUNDS: u64 = 500;
    let dir = disk_dir();
    let settings = config(dir.path());
    let again = settings.clone();
    let path = dir.path().to_owned();
    on_core(settings, |storage| async move {
        keep_little_of_the_busy_one(&storage);
        let stop = Rc::new(Cell::new(false));
        let reader = spawn_local(read_on(storage.clone(), Rc::clone(&stop)));
        let other = spawn_local(read_what_goes(storage.clone(), Rc::clone(&stop)));
        rounds(&storage, ROUNDS).await;
        // 40 MB were written; the slow shard has 200 KB of them, some in every segment.
        let written = storage.stats().machine.committed_bytes;
        let slow_bytes: u64 = (0..ROUNDS)
            .map(|it| payload(SLOW, it).len() as u64 + 100)
            .sum();
        // What may stay: twice what is needed, two blocks a segment, what is not finished or kept.
        let segments = written / (1 << 20) + 1;
        let bound = 2 * slow_bytes + segments * 8192 + BUSY_KEEPS + 5 * (1 << 20);
        assert!(bound < written / 3, "{bound} of {written}");
        let used = || files(&path, ".fxl").iter().sum::<u64>();
        until("disk use is near what is needed", || used() < bound).await;
        let stats = storage.stats();
        assert!(stats.machine.segments_rewritten > 20, "{stats:?}");
        let (copied, returned) = (
            stats.machine.rewrite_copied_bytes,
            stats.machine.rewrite_returned_bytes,
        );
        assert!(copied <= returned, "{stats:?}");
        assert_eq!(stats.rewrite_failures, 0, "{stats:?}");
        assert!(stats.segment_bytes < bound, "{stats:?}");
        slow_is_whole(&storage, ROUNDS).await;
        // The directory of a running broker is read as it is.
        let mut offline = Reader::open(&path, 1).expect("opens");
        let report = offline.verify();
        assert!(
            report.is_clean() && report.given_back.is_empty(),
            "{report:?}"
        );
        stop.set(true);
        assert!(reader.await > ROUNDS, "the reader went through the log");
        other.await;
        storage.close().await.expect("closes");
    });
    let mut reader = Reader::open(dir.path(), 1).expect("opens");
    assert!(reader.report().damages.is_empty());
    assert!(reader.verify().is_clean());
    let (mut rewritten, mut frames) = (0, 0);
    let seen = reader.inspect(
        |segment| rewritten += u64::from(segment.rewritten_groups.is_some()),
        |segment, frame| {
            assert!(frame.body_matches);
            frames += u64::from(segment.rewritten_groups.is_some());
        },
    );
    seen.expect("inspects");
    assert!(
        rewritten > 20 && frames >= rewritten,
        "{rewritten}, {frames}"
    );
    for start in 0..2 {
        let left = dir.path().join("core-log/0/rewrite-0000000000000001.fxs");
        std::fs::write(&left, "left by a crash").expect("writes");
        on_core(again.clone(), move |storage| async move {
            let report = storage.recovery_report();
            assert!(
                report.cuts.is_empty() && report.damages.is_empty(),
                "{report:?}"
            );
            slow_is_whole(&storage, ROUNDS + start * 10).await;
            rounds(&storage, 10).await;
            storage.close().await.expect("closes");
        });
        assert!(!left.exists(), "what a crash left is removed");
    }
}

/// A reader of the directory opened it before segments were rewritten: what it was to read is read, but for
/// what was given up meanwhile, and nothing counts as damaged.
#[test]
fn a_directory_opened_before_is_read_after() {
    let dir = disk_dir();
    let path = dir.path().to_owned();
    on_core(config(dir.path()), |storage| async move {
        rounds(&storage, 120).await;
        let mut offline = Reader::open(&path, 1).expect("opens");
        keep_little_of_the_busy_one(&storage);
        let rewritten = || storage.stats().machine.segments_rewritten;
        until("segments are rewritten", || rewritten() >= 5).await;
        let slow = offline.log(&name(SLOW)).expect("is known");
        let records = offline.records(slow.id).collect::<Result<Vec<_>, _>>();
        assert_eq!(records.expect("reads").len(), 120);
        let report = offline.verify();
        assert_eq!(report.damaged, [], "{report:?}");
        assert_eq!(report.given_back, [name(BUSY).to_string()], "{report:?}");
        storage.close().await.expect("closes");
    });
}

/// The space of an old file is free once nothing holds it open, however segments are synced.
#[test]
fn old_files_are_closed() {
    for sync in [SyncMethod::ODsync, SyncMethod::Fdatasync] {
        let dir = disk_dir();
        let settings = StorageConfig {
            sync,
            ..config(dir.path())
        };
        let path = dir.path().to_owned();
        on_core(settings, |storage| async move {
            rounds(&storage, 60).await;
            keep_little_of_the_busy_one(&storage);
            let rewritten = || storage.stats().machine.segments_rewritten;
            until("segments are rewritten", || rewritten() >= 3).await;
            until("old files are closed", || replaced_and_open(&path) == 0).await;
            slow_is_whole(&storage, 60).await;
            storage.close().await.expect("closes");
        });
    }
}

fn replaced_and_open(dir: &Path) -> usize {
    let dir = dir.canonicalize().expect("exists");
    let open = std::fs::read_dir("/proc/self/fd").expect("lists");
    let links = open.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    let is_old = |link: &std::path::PathBuf| {
        let text = link.to_string_lossy();
        link.starts_with(&dir) && text.contains("seg-") && text.ends_with("(deleted)")
    };
    links.filter(is_old).count()
}

/// A new file whose sync fails is thrown away; the segment stays, and is rewritten later.
#[test]
fn a_failed_sync_throws_the_new_file_away() {
    let dir = disk_dir();
    let rule = FaultRule {
        op: FaultOp::SyncRewritten,
        nth: 1,
        count: 3,
        effect: FaultEffect::Error(5),
    };
    let settings = StorageConfig {
        faults: Some(FaultPlan { rules: vec![rule] }),
        ..config(dir.path())
    };
    let path = dir.path().to_owned();
    on_core(settings, |storage| async move {
        rounds(&storage, 100).await;
        keep_little_of_the_busy_one(&storage);
        until("segments are rewritten", || {
            storage.stats().machine.segments_rewritten >= 3
        })
        .await;
        let stats = storage.stats();
        assert_eq!(stats.rewrite_failures, 3, "{stats:?}");
        assert_eq!(stats.failure, None);
        slow_is_whole(&storage, 100).await;
        storage.close().await.expect("closes");
        drop(storage);
        assert!(files(&path, ".fxs").len() <= 4, "only spares are left");
    });
    assert!(Reader::open(dir.path(), 1)
        .expect("opens")
        .verify()
        .is_clean());
}
