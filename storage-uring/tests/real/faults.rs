//! Faults injected into the driver over a real file system.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::common::{config, disk_dir, name, on_core, outcomes, read_all};
use storage_uring::offline::Reader;
use storage_uring::{
    AppendError, CommitError, ControlEvent, FaultEffect, FaultOp, FaultPlan, FaultRule, LogRef,
    ReadError, Storage, StorageConfig, SyncMethod,
};

fn plan(op: FaultOp, nth: u64, count: u64, effect: FaultEffect) -> Option<FaultPlan> {
    Some(FaultPlan {
        rules: vec![FaultRule {
            op,
            nth,
            count,
            effect,
        }],
    })
}

#[test]
fn a_failed_flush_is_final_until_a_restart() {
    for sync in [SyncMethod::ODsync, SyncMethod::Fdatasync] {
        let dir = disk_dir();
        let mut settings = config(dir.path());
        settings.sync = sync;
        let again = settings.clone();
        settings.faults = plan(FaultOp::Flush, 2, 1, FaultEffect::Error(5));
        on_core(settings, |storage| async move {
            let log = storage.open_log(&name(0)).expect("opens");
            storage
                .append(log, 1, 1, [&b"kept"[..]].into_iter(), 0)
                .expect("appends");
            storage.kick();
            assert!(outcomes(&storage, 1).await[0].result.is_ok());
            for token in 0..10 {
                storage
                    .append(log, 1, 1, [&b"lost"[..]].into_iter(), token)
                    .expect("appends");
            }
            storage.kick();
            let done = outcomes(&storage, 10).await;
            assert!(done
                .iter()
                .all(|done| done.result == Err(CommitError::StorageFailed)));
            for _ in 0..5 {
                let refused = storage.append(log, 1, 1, [&b"late"[..]].into_iter(), 0);
                assert_eq!(refused, Err(AppendError::Failed));
            }
            assert_eq!(storage.durable_tail(log), 1);
            assert_eq!(read_all(&storage, log).await, [b"kept".to_vec()]);
            let stats = storage.stats();
            assert_eq!(stats.machine.flush_failures, 1);
            assert_eq!(stats.failed_logs, [name(0).to_string()]);
            assert!(storage.close().await.is_err());
        });
        on_core(again, |storage| async move {
            let log = storage.open_log(&name(0)).expect("opens");
            assert_eq!(read_all(&storage, log).await[0], b"kept");
            storage
                .append(log, 1, 1, [&b"works"[..]].into_iter(), 0)
                .expect("appends");
            storage.kick();
            assert!(outcomes(&storage, 1).await[0].result.is_ok());
        });
    }
}

#[test]
fn short_writes_are_completed_and_the_log_verifies() {
    for stored in [4096, 0] {
        let dir = disk_dir();
        let mut settings = config(dir.path());
        settings.faults = plan(FaultOp::Write, 1, 1, FaultEffect::Short(stored));
        on_core(settings, |storage| async move {
            let log = storage.open_log(&name(0)).expect("opens");
            let record = vec![7u8; 11_000];
            storage
                .append(log, 1, 1, [record.as_slice()].into_iter(), 0)
                .expect("appends");
            storage.kick();
            assert!(outcomes(&storage, 1).await[0].result.is_ok());
            assert_eq!(storage.stats().machine.short_writes, 1);
            storage.close().await.expect("closes");
        });
        let mut reader = Reader::open(dir.path(), 1).expect("opens");
        let verified = reader.verify();
        assert!(verified.is_clean(), "{verified:?}");
        assert_eq!((verified.records, verified.payload_bytes), (1, 11_000));
    }
}

#[test]
fn a_write_without_space_fails_its_batch_and_heals() {
    let dir = disk_dir();
    let mut settings = config(dir.path());
    settings.faults = plan(FaultOp::Write, 2, 1, FaultEffect::Error(28));
    on_core(settings, |storage| async move {
        let log = storage.open_log(&name(0)).expect("opens");
        let mut results = Vec::new();
        for _ in 0..4 {
            storage
                .append(log, 1, 1, [&b"record"[..]].into_iter(), 0)
                .expect("appends");
            storage.kick();
            results.push(outcomes(&storage, 1).await[0].result);
        }
        assert_eq!(
            results,
            [Ok(()), Err(CommitError::DiskFull), Ok(()), Ok(())]
        );
        assert_eq!(read_all(&storage, log).await.len(), 3);
        storage.close().await.expect("closes");
    });
    let reader = Reader::open(dir.path(), 1).expect("opens");
    assert_eq!(reader.log(&name(0)).expect("is there").tail, 3);
}

#[test]
fn a_slow_device_keeps_order() {
    let dir = disk_dir();
    let mut settings = config(dir.path());
    settings.faults = plan(FaultOp::Write, 1, 1, FaultEffect::DelayMs(60));
    on_core(settings, |storage| async move {
        let log = storage.open_log(&name(0)).expect("opens");
        let started = Instant::now();
        for token in 0..2 {
            storage
                .append(log, 1, 1, [&b"record"[..]].into_iter(), token)
                .expect("appends");
            storage.kick();
        }
        let tokens: Vec<u64> = outcomes(&storage, 2)
            .await
            .iter()
            .map(|done| done.token)
            .collect();
        assert_eq!(tokens, [0, 1]);
        assert!(
            started.elapsed() >= Duration::from_millis(60),
            "the second waited for the first"
        );
        assert_eq!(read_all(&storage, log).await.len(), 2);
        storage.close().await.expect("closes");
    });
}

/// The first reads of two records in a commit each fail.
fn first_reads_fail(dir: &Path, count: u64) -> StorageConfig {
    StorageConfig {
        recent_bytes: 0,
        faults: plan(FaultOp::Read, 1, count, FaultEffect::Error(5)),
        ..config(dir)
    }
}

async fn append_two(storage: &Storage) -> LogRef {
    let log = storage.open_log(&name(0)).expect("opens");
    for token in 0..2 {
        storage
            .append(log, 1, 1, [&b"record"[..]].into_iter(), token)
            .expect("appends");
        storage.kick();
        outcomes(storage, 1).await;
    }
    log
}

#[test]
fn failed_reads_are_errors() {
    let dir = disk_dir();
    // With many records, then with few.
    on_core(first_reads_fail(dir.path(), 2), |storage| async move {
        let log = append_two(&storage).await;
        let failed = storage.read(log, 0, 100).await;
        assert!(matches!(failed, Err(ReadError::Io(_))), "{failed:?}");
        assert_eq!(storage.stats().read_failures, 2);
        assert_eq!(read_all(&storage, log).await.len(), 2);
        storage.close().await.expect("closes");
    });
}

#[test]
fn a_failed_read_of_many_records_is_made_with_few_and_counted() {
    let dir = disk_dir();
    on_core(first_reads_fail(dir.path(), 1), |storage| async move {
        let log = append_two(&storage).await;
        let batch = storage.read(log, 0, 100).await.expect("reads");
        assert_eq!(batch.records[0][..], b"record"[..]);
        let stats = storage.stats();
        assert_eq!((stats.reads, stats.read_failures), (2, 1));
        storage.close().await.expect("closes");
    });
}

#[test]
fn without_space_a_start_works_and_appends_are_refused_within_a_second() {
    let dir = disk_dir();
    let mut settings = config(dir.path());
    let full = {
        let mut full = settings.clone();
        full.reserve_bytes = u64::MAX / 2;
        full.low_space_bytes = u64::MAX / 2;
        full
    };
    settings.faults = None;
    on_core(settings, |storage| async move {
        let log = storage.open_log(&name(0)).expect("opens");
        storage
            .append(log, 1, 1, [&b"before"[..]].into_iter(), 0)
            .expect("appends");
        storage.kick();
        outcomes(&storage, 1).await;
        storage.close().await.expect("closes");
    });
    on_core(full, |storage| async move {
        let log = storage.open_log(&name(0)).expect("opens");
        assert_eq!(read_all(&storage, log).await, [b"before".to_vec()]);
        let refused = storage.append(log, 1, 1, [&b"no"[..]].into_iter(), 0);
        assert_eq!(refused, Err(AppendError::DiskFull));
        let stats = storage.stats();
        assert!(
            stats.no_space && stats.low_space && stats.failure.is_none(),
            "{stats:?}"
        );
        storage.close().await.expect("closes");
    });
}

/// Appends a record of 100,000 bytes that tells its offset and waits for its outcome.
async fn append_large(storage: &Storage, log: LogRef) -> Result<(), CommitError> {
    let offset = storage.tail(log);
    let mut record = vec![3u8; 100_000];
    record[..8].copy_from_slice(&offset.to_le_bytes());
    match storage.append(log, 1, 1, [record.as_slice()].into_iter(), offset) {
        Ok(_) => {
            storage.kick();
            outcomes(storage, 1).await[0].result
        }
        Err(AppendError::DiskFull) => Err(CommitError::DiskFull),
        Err(AppendError::Failed) => Err(CommitError::StorageFailed),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn a_file_whose_sync_failed_is_thrown_away_and_another_made() {
    let dir = disk_dir();
    let mut settings = config(dir.path());
    settings.prewritten_segments = 1;
    settings.faults = plan(FaultOp::SyncSpare, 3, 2, FaultEffect::Error(5));
    on_core(settings, |storage| async move {
        let log = storage.open_log(&name(0)).expect("opens");
        let asked = Instant::now();
        while storage.tail(log) < 60 {
            match append_large(&storage, log).await {
                Ok(()) => {}
                // For as long as the file is missing.
                Err(CommitError::DiskFull) => {
                    assert!(
                        asked.elapsed() < Duration::from_secs(60),
                        "it does not heal"
                    );
                    shard_executor::rt::sleep(Duration::from_millis(20)).await;
                }
                Err(CommitError::StorageFailed) => panic!("only a file was lost"),
            }
        }
        assert_eq!(storage.stats().segment_sync_failures, 2);
        assert_eq!(read_all(&storage, log).await.len(), 60);
        storage.close().await.expect("closes");
    });
    let mut reader = Reader::open(dir.path(), 1).expect("opens");
    let verified = reader.verify();
    assert!(
        verified.is_clean() && verified.records == 60,
        "{verified:?}"
    );
}

/// Runs until the core log has failed because its directory could not be synced; how many records were
/// acknowledged before.
fn until_failed(settings: StorageConfig, keep_all: bool) -> u64 {
    on_core(settings, move |storage| async move {
        let log = storage.open_log(&name(0)).expect("opens");
        let mut acknowledged = 0;
        while append_large(&storage, log).await.is_ok() {
            acknowledged = storage.tail(log);
            assert!(acknowledged < 2000, "the directory is never synced");
            if !keep_all && acknowledged % 10 == 0 {
                let base = ControlEvent::Base(acknowledged - 1);
                storage.control(log, base, 1, 0).expect("is taken");
                storage.kick();
                if outcomes(&storage, 1).await[0].result.is_err() {
                    break;
                }
                // Room for the sweep.
                shard_executor::rt::sleep(Duration::from_millis(30)).await;
            }
        }
        let reason = storage.failure().expect("it is final");
        assert!(reason.contains("cannot be synced"), "{reason}");
        let refused = storage.append(log, 1, 1, [&b"late"[..]].into_iter(), 0);
        assert_eq!(refused, Err(AppendError::Failed));
        assert!(storage.close().await.is_err());
        acknowledged
    })
}

#[test]
fn a_directory_that_cannot_be_synced_ends_the_log_until_a_restart() {
    // Two segments are named ahead of the one that is written to: the fourth sync comes when the second is
    // begun. Later ones are of segments that are named or given back.
    for (nth, keep_all) in [(4, true), (7, false)] {
        let dir = disk_dir();
        let mut settings = config(dir.path());
        settings.prewritten_segments = 1;
        let again = settings.clone();
        settings.faults = plan(FaultOp::SyncDirectory, nth, 1, FaultEffect::Error(5));
        let acknowledged = until_failed(settings, keep_all);
        assert!(acknowledged > 5, "{acknowledged}");
        on_core(again, move |storage| async move {
            assert!(storage.recovery_report().damages.is_empty());
            let log = storage.open_log(&name(0)).expect("opens");
            assert!(storage.tail(log) >= acknowledged);
            let base = storage.base(log);
            assert!(keep_all == (base == 0), "{base}");
            for (record, offset) in read_all(&storage, log).await.iter().zip(base..) {
                assert_eq!(record[..8], offset.to_le_bytes());
            }
            assert_eq!(append_large(&storage, log).await, Ok(()));
            storage.close().await.expect("closes");
        });
    }
}

/// Commits that start while their caller is still appending: an outcome comes only when its records, and all
/// before them, can be read from the disk by somebody else.
#[test]
fn no_early_commit_is_acknowledged_before_it_is_stored() {
    for (sync, nth) in [
        (SyncMethod::ODsync, 1),
        (SyncMethod::Fdatasync, 2),
        (SyncMethod::ODsync, 3),
    ] {
        let dir = disk_dir();
        let path = dir.path().to_owned();
        let mut settings = config(dir.path());
        settings.sync = sync;
        settings.early_commit_bytes = 16 << 10;
        settings.commits_in_flight = 4;
        // The one behind it is done long before it.
        settings.faults = plan(FaultOp::Write, nth, 1, FaultEffect::DelayMs(80));
        on_core(settings, move |storage| async move {
            let log = storage.open_log(&name(0)).expect("opens");
            for token in 0..60 {
                let record = vec![token as u8; 6000];
                storage
                    .append(log, 1, 1, [record.as_slice()].into_iter(), token)
                    .expect("appends");
            }
            storage.kick();
            let signal = storage.signal();
            let (mut done, mut seen) = (Vec::new(), 0);
            while seen < 60 {
                storage.poll_completions(&mut done);
                let on_disk = Reader::open(&path, 1).expect("opens");
                let on_disk = on_disk.log(&name(0)).map_or(0, |log| log.tail);
                for done in done.drain(..) {
                    assert_eq!((done.token, done.result), (seen, Ok(())), "in order");
                    assert!(done.range.end <= on_disk, "{:?} of {on_disk}", done.range);
                    seen += 1;
                }
                if seen < 60 {
                    signal.wait_take().await;
                }
            }
            assert!(
                storage.stats().machine.commits > 3,
                "it took several commits"
            );
            storage.close().await.expect("closes");
        });
    }
}
