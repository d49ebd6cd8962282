//! Retention, freeing and recycling of segments on a real file system.

use std::path::Path;
use std::time::Duration;

use crate::common::{config, disk_dir, name, on_core, outcomes, payload, read_all};
use storage_uring::offline::Reader;
use storage_uring::{ControlEvent, ReadError, Retention, SegmentZeros, Storage, StorageConfig};

const KEPT_BYTES: u64 = 3 << 20;

fn segment_files(dir: &Path) -> usize {
    let files = std::fs::read_dir(dir.join("core-log/0")).expect("lists");
    files
        .filter_map(Result::ok)
        .filter(|file| file.file_name().to_string_lossy().ends_with(".fxl"))
        .count()
}

/// Appends `count` records of about 8 KiB, a group each some.
async fn fill(storage: &Storage, shard: u32, count: u64) {
    let log = storage.open_log(&name(shard)).expect("opens");
    let mut record = vec![7u8; 8000];
    for round in 0..count {
        let offset = storage.tail(log);
        record[..8].copy_from_slice(&offset.to_le_bytes());
        storage
            .append(log, 1, 1_000, [record.as_slice()].into_iter(), round)
            .expect("appends");
        storage.kick();
        if round % 8 == 7 {
            outcomes(storage, 8).await;
        }
    }
    outcomes(storage, (count % 8) as usize).await;
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..600 {
        if holds() {
            return;
        }
        shard_executor::rt::sleep(Duration::from_millis(50)).await;
    }
    panic!("{what} within 30 seconds");
}

#[test]
fn old_segments_go_and_what_is_kept_stays() {
    let dir = disk_dir();
    let settings = config(dir.path());
    let again = settings.clone();
    let path = dir.path().to_owned();
    on_core(settings, |storage| async move {
        // A log that is idle from the start: its state has to outlive its segment.
        let idle = storage.open_log(&name(9)).expect("opens");
        let begin = ControlEvent::Begin {
            generation: 4,
            leader: "broker-1",
        };
        storage.control(idle, begin, 1_000, 0).expect("is taken");
        storage.kick();
        outcomes(&storage, 1).await;
        let log = storage.open_log(&name(0)).expect("opens");
        let retention = Retention {
            bytes: KEPT_BYTES,
            ..Retention::default()
        };
        storage.set_retention(log, retention);
        for _ in 0..4 {
            fill(&storage, 0, 1000).await;
            until("segments are freed", || segment_files(&path) < 10).await;
        }
        let stats = storage.stats();
        assert!(stats.machine.segments_freed > 20, "{stats:?}");
        assert!(stats.machine.retention_raises > 0, "{stats:?}");
        assert!(stats.machine.restatements > 0, "{stats:?}");
        let base = storage.base(log);
        assert!((4000 - base) * 8000 >= KEPT_BYTES, "{base}");
        let trimmed = storage.read(log, 0, 100).await;
        assert_eq!(trimmed, Err(ReadError::Trimmed { offset: 0, base }));
        assert_eq!(read_all(&storage, log).await.len() as u64, 4000 - base);
        storage.close().await.expect("closes");
    });
    let mut reader = Reader::open(dir.path(), 1).expect("opens");
    assert!(reader.verify().is_clean());
    let offline = reader.log(&name(9)).expect("is known");
    assert_eq!((offline.accepted, offline.history.len()), (4, 1));
    for _ in 0..2 {
        on_core(again.clone(), |storage| async move {
            let report = storage.recovery_report();
            assert!(
                report.cuts.is_empty() && report.damages.is_empty(),
                "{report:?}"
            );
            assert!(storage.holds(&name(9)));
            let idle = storage.open_log(&name(9)).expect("opens");
            let state = storage.state(idle);
            assert_eq!((state.accepted, state.tail), (4, 0));
            assert_eq!(&*state.history[0].leader, "broker-1");
            let log = storage.open_log(&name(0)).expect("opens");
            let base = storage.base(log);
            let all = read_all(&storage, log).await;
            for (record, offset) in all.iter().zip(base..) {
                assert_eq!(record[..8], offset.to_le_bytes());
            }
            assert_eq!(base + all.len() as u64, storage.tail(log));
            fill(&storage, 0, 20).await;
            storage.close().await.expect("closes");
        });
    }
}

#[test]
fn files_of_old_segments_are_used_again() {
    for zeros in [SegmentZeros::WhileTheyPay, SegmentZeros::Never] {
        use_old_segments_again(zeros);
    }
}

fn use_old_segments_again(zeros: SegmentZeros) {
    let dir = disk_dir();
    // Spares run low before new ones are made: what goes meanwhile is kept for them.
    let settings = StorageConfig {
        prewritten_segments: 8,
        refill_below_segments: 1,
        segment_zeros: zeros,
        ..config(dir.path())
    };
    on_core(settings, |storage| async move {
        let log = storage.open_log(&name(0)).expect("opens");
        let retention = Retention {
            bytes: 1 << 20,
            ..Retention::default()
        };
        storage.set_retention(log, retention);
        let recycled = || storage.stats().segments_recycled;
        for _ in 0..40 {
            fill(&storage, 0, 200).await;
            if recycled() > 3 {
                break;
            }
            shard_executor::rt::sleep(Duration::from_millis(100)).await;
        }
        assert!(recycled() > 3, "{:?}", storage.stats());
        // What is read below must not be given up meanwhile.
        storage.set_retention(log, Retention::default());
        until("nothing is on its way", || storage.is_settled(log)).await;
        let base = storage.base(log);
        let all = read_all(&storage, log).await;
        for (record, offset) in all.iter().zip(base..) {
            assert_eq!(record[..8], offset.to_le_bytes());
        }
        storage.close().await.expect("closes");
    });
    let mut reader = Reader::open(dir.path(), 1).expect("opens");
    assert!(reader.verify().is_clean());
}

#[test]
fn a_reader_of_what_is_given_up_ends_with_records_or_trimmed() {
    let dir = disk_dir();
    on_core(config(dir.path()), |storage| async move {
        fill(&storage, 0, 1200).await;
        let log = storage.open_log(&name(0)).expect("opens");
        let retention = Retention {
            bytes: 1 << 20,
            ..Retention::default()
        };
        storage.set_retention(log, retention);
        // One reader begins at the base each time, one goes on where it was, with the next read made ahead.
        let mut on = storage.base(log);
        for _ in 0..400 {
            for (from, bytes) in [(storage.base(log), 20_000), (on, 300_000)] {
                match storage.read(log, from, bytes).await {
                    Ok(batch) => {
                        for (record, offset) in batch.records.iter().zip(from..) {
                            assert_eq!(record[..8], offset.to_le_bytes());
                        }
                        on = batch.next_offset;
                    }
                    Err(ReadError::Trimmed { base, .. }) => on = base,
                    Err(error) => panic!("{error}"),
                }
            }
            fill(&storage, 0, 4).await;
        }
        let freed = || storage.stats().machine.segments_freed;
        until("segments are freed", || freed() > 5).await;
        storage.close().await.expect("closes");
    });
}

#[test]
fn a_lost_record_of_freed_segments_is_reported_and_serves_nothing_wrong() {
    let dir = disk_dir();
    let settings = config(dir.path());
    let again = settings.clone();
    on_core(settings, |storage| async move {
        let kept = storage.open_log(&name(1)).expect("opens");
        let record = payload(1, 3);
        storage
            .append(kept, 1, 1_000, [record.as_slice()].into_iter(), 0)
            .expect("appends");
        storage.kick();
        outcomes(&storage, 1).await;
        let log = storage.open_log(&name(0)).expect("opens");
        let retention = Retention {
            bytes: 1 << 20,
            ..Retention::default()
        };
        storage.set_retention(log, retention);
        fill(&storage, 0, 1000).await;
        // The first segment stays for the kept log: those that go are in the middle.
        let freed = || storage.stats().machine.segments_freed;
        until("segments are freed", || freed() >= 3).await;
        storage.close().await.expect("closes");
    });
    let freed = dir.path().join("core-log/0/freed");
    let good = std::fs::read(&freed).expect("the record");
    let mut bad = good.clone();
    bad[50] ^= 1;
    for bytes in [Some(bad), None] {
        match bytes {
            Some(bytes) => std::fs::write(&freed, bytes).expect("writes"),
            None => std::fs::remove_file(&freed).expect("removes"),
        }
        let mut reader = Reader::open(dir.path(), 1).expect("opens");
        assert!(!reader.report().damages.is_empty(), "it is reported");
        let log = reader.log(&name(0)).expect("is known");
        assert_eq!(log.damage, None, "its base covers what is missing");
        let records = reader.records(log.id).collect::<Result<Vec<_>, _>>();
        let records = records.expect("reads");
        assert_eq!(records.len() as u64, log.tail - log.base);
        for (offset, record) in records {
            assert_eq!(record[..8], offset.to_le_bytes());
        }
        // Nobody can tell whether this one had more records in what is missing.
        assert!(reader.log(&name(1)).expect("is known").damage.is_some());
    }
    std::fs::write(&freed, good).expect("writes");
    on_core(again, |storage| async move {
        assert!(storage.recovery_report().damages.is_empty());
        let kept = storage.open_log(&name(1)).expect("opens");
        assert_eq!(read_all(&storage, kept).await, [payload(1, 3)]);
        storage.close().await.expect("closes");
    });
}
