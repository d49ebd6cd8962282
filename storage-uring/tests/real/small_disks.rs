//! Small file systems of several kinds: awkward sizes come back, a full one refuses, serves and heals, one
//! that became read-only is named at start; and a process that runs out of file descriptors.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use storage_uring::{
    AppendError, CommitError, ControlEvent, LogRef, ReadError, Storage, StorageConfig, StorageError,
};

use crate::common::{config, disk_dir, name, on_core, outcomes, read_all};
use crate::loop_fs::{Kind, LoopFs};

const SIZES: [usize; 9] = [0, 1, 511, 4095, 4096, 4097, 65_537, 1 << 20, 16 << 20];

fn record(number: usize, size: usize) -> Vec<u8> {
    (0..size)
        .map(|at| (at * 31 + number * 7 + 1) as u8)
        .collect()
}

fn sizes_come_back(kind: Kind, sector: u32) {
    let Some(disk) = LoopFs::make(kind, 400 << 20, sector) else {
        return;
    };
    let probed = storage_uring::probe(&disk.at).expect("is fit");
    assert!(probed.direct_io, "{probed:?}");
    let mut settings = config(&disk.at.join("data"));
    settings.segment_bytes = 64 << 20;
    settings.max_queued_bytes = 64 << 20;
    settings.prewritten_segments = 1;
    settings.recent_bytes = 0;
    for start in 0..2 {
        on_core(settings.clone(), move |storage| async move {
            let log = storage.open_log(&name(0)).expect("opens");
            if start == 0 {
                for (number, size) in SIZES.iter().enumerate() {
                    let record = record(number, *size);
                    storage
                        .append(log, 1, 1, [record.as_slice()].into_iter(), 0)
                        .expect("appends");
                    storage.kick();
                }
                let done = outcomes(&storage, SIZES.len()).await;
                assert!(done.iter().all(|done| done.result.is_ok()));
            }
            let all = read_all(&storage, log).await;
            assert_eq!(all.iter().map(Vec::len).collect::<Vec<_>>(), SIZES);
            assert!(all
                .iter()
                .enumerate()
                .all(|(number, found)| *found == record(number, found.len())));
            storage.close().await.expect("closes");
        });
    }
}

#[test]
fn awkward_sizes_on_ext4_with_large_sectors() {
    sizes_come_back(Kind::Ext4, 4096);
}

#[test]
fn awkward_sizes_on_xfs_with_large_sectors() {
    sizes_come_back(Kind::Xfs, 4096);
}

// -- full --

const RECORD_BYTES: usize = 100 << 10;
/// Refusals have to come at once; a loaded machine gets some grace.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

fn numbered(number: u64) -> Vec<u8> {
    let mut bytes = vec![(number % 251) as u8; RECORD_BYTES];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes
}

/// Appends one record and waits for its outcome; false when there is no space.
async fn appended(storage: &Storage, log: LogRef, number: u64) -> bool {
    let asked = Instant::now();
    let record = numbered(number);
    let taken = storage.append(log, 1, 1, [record.as_slice()].into_iter(), number);
    let stored = match taken {
        Ok(_) => {
            storage.kick();
            match outcomes(storage, 1).await[0].result {
                Ok(()) => true,
                Err(CommitError::DiskFull) => false,
                Err(error) => panic!("{error}"),
            }
        }
        Err(AppendError::DiskFull) => false,
        Err(error) => panic!("{error}"),
    };
    assert!(
        asked.elapsed() < ANSWER_WITHIN,
        "answered after {:?}",
        asked.elapsed()
    );
    stored
}

async fn check_held(storage: &Storage, log: LogRef) {
    let base = storage.base(log);
    let all = read_all(storage, log).await;
    assert_eq!(all.len() as u64, storage.tail(log) - base);
    for (offset, record) in (base..).zip(&all) {
        assert!(*record == numbered(offset), "offset {offset}");
    }
}

async fn fill(storage: &Storage, log: LogRef) -> u64 {
    let mut stored = 0;
    while appended(storage, log, storage.tail(log)).await {
        stored += 1;
        assert!(stored < 2000, "a small disk is never full");
    }
    for _ in 0..3 {
        assert!(
            !appended(storage, log, storage.tail(log)).await,
            "full is full"
        );
    }
    assert!(storage.failure().is_none(), "a full disk is no failure");
    check_held(storage, log).await;
    stored
}

/// Gives up nearly everything; space has to come back by itself.
async fn drain(storage: &Storage, log: LogRef) {
    let to = storage.tail(log) - 5;
    storage
        .control(log, ControlEvent::Base(to), 1, 0)
        .expect("is taken while full");
    storage.kick();
    assert_eq!(outcomes(storage, 1).await[0].result, Ok(()));
    assert_eq!(storage.base(log), to);
    assert!(matches!(
        storage.read(log, to - 1, 100).await,
        Err(ReadError::Trimmed { .. })
    ));
    let asked = Instant::now();
    while !appended(storage, log, storage.tail(log)).await {
        assert!(
            asked.elapsed() < Duration::from_secs(60),
            "no space comes back"
        );
        shard_executor::rt::sleep(Duration::from_millis(20)).await;
    }
    check_held(storage, log).await;
}

fn small_settings(dir: &Path) -> StorageConfig {
    StorageConfig {
        prewritten_segments: 1,
        reserve_bytes: 2 << 20,
        low_space_bytes: 12 << 20,
        ..config(dir)
    }
}

#[test]
fn a_small_disk_is_filled_and_drained_three_times() {
    let Some(disk) = LoopFs::make(Kind::Ext4, 64 << 20, 512) else {
        return;
    };
    let settings = small_settings(&disk.at.join("data"));
    for round in 0..3 {
        let filled = on_core(settings.clone(), move |storage| async move {
            let log = storage.open_log(&name(0)).expect("opens");
            let stored = fill(&storage, log).await;
            // The warning is the segment thread's, which may come to it after the appends have been refused.
            let full = Instant::now();
            while !storage.stats().low_space {
                assert!(full.elapsed() < Duration::from_secs(60), "no warning");
                shard_executor::rt::sleep(Duration::from_millis(20)).await;
            }
            storage.close().await.expect("closes");
            stored
        });
        // A start while full works and serves.
        on_core(settings.clone(), |storage| async move {
            let report = storage.recovery_report();
            assert!(report.damages.is_empty(), "{report:?}");
            let log = storage.open_log(&name(0)).expect("opens");
            check_held(&storage, log).await;
            drain(&storage, log).await;
            storage.close().await.expect("closes");
        });
        println!("round {round}: {filled} records until full");
        assert!(
            filled > 100,
            "round {round}: only {filled} records until full"
        );
    }
}

/// Every segment of a full disk holds a little that is kept: the space comes back by rewriting, for which
/// there is no more room than the reserve.
#[test]
fn a_full_disk_is_drained_though_every_segment_holds_something() {
    const KEPT_EVERY: u64 = 8;
    let Some(disk) = LoopFs::make(Kind::Ext4, 64 << 20, 512) else {
        return;
    };
    let settings = small_settings(&disk.at.join("data"));
    on_core(settings, move |storage| async move {
        let log = storage.open_log(&name(0)).expect("opens");
        let kept = storage.open_log(&name(1)).expect("opens");
        let mut filled = Vec::new();
        for _ in 0..3 {
            let mut stored = 0;
            while appended(&storage, log, storage.tail(log)).await {
                stored += 1;
                assert!(stored < 2000, "a small disk is never full");
                if stored % KEPT_EVERY == 0 && !appended(&storage, kept, storage.tail(kept)).await {
                    break;
                }
            }
            filled.push(stored);
            drain(&storage, log).await;
            // Twice what is kept, and the segments in use.
            let bound = 2 * storage.tail(kept) * RECORD_BYTES as u64 + (6 << 20);
            let asked = Instant::now();
            while storage.stats().segment_bytes > bound {
                let stats = storage.stats();
                assert!(
                    asked.elapsed() < Duration::from_secs(60),
                    "{bound}: {stats:?}"
                );
                shard_executor::rt::sleep(Duration::from_millis(20)).await;
            }
            check_held(&storage, kept).await;
        }
        assert!(storage.tail(kept) > 10, "{}", storage.tail(kept));
        let stats = storage.stats();
        assert!(stats.machine.segments_rewritten > 10, "{stats:?}");
        // What is kept takes its own space from then on, and little more.
        let least = filled[0] / 4;
        assert!(filled[1..].iter().all(|it| *it > least), "{filled:?}");
        storage.close().await.expect("closes");
    });
    let first = storage_uring::recover(&disk.at.join("data"), 1).expect("recovers");
    assert!(first.report().damages.is_empty(), "{:?}", first.report());
}

#[test]
fn a_filler_that_goes_away_lets_writes_resume() {
    let Some(disk) = LoopFs::make(Kind::Ext4, 64 << 20, 512) else {
        return;
    };
    let filler = disk.fill(16 << 20);
    on_core(
        small_settings(&disk.at.join("data")),
        move |storage| async move {
            let log = storage.open_log(&name(0)).expect("opens");
            fill(&storage, log).await;
            std::fs::remove_file(filler).expect("removes");
            let asked = Instant::now();
            while !appended(&storage, log, storage.tail(log)).await {
                assert!(
                    asked.elapsed() < Duration::from_secs(60),
                    "no space comes back"
                );
                shard_executor::rt::sleep(Duration::from_millis(20)).await;
            }
            check_held(&storage, log).await;
            storage.close().await.expect("closes");
        },
    );
}

#[test]
fn a_read_only_file_system_is_named_and_nothing_is_changed() {
    let Some(disk) = LoopFs::make(Kind::Ext4, 64 << 20, 512) else {
        return;
    };
    let data = disk.at.join("data");
    on_core(small_settings(&data), |storage| async move {
        let log = storage.open_log(&name(0)).expect("opens");
        assert!(appended(&storage, log, 0).await);
    });
    disk.make_read_only();
    let refused = storage_uring::recover(&data, 1)
        .map(drop)
        .expect_err("cannot write");
    let StorageError::Io { path, source, .. } = &refused else {
        panic!("{refused}");
    };
    assert_eq!(source.raw_os_error(), Some(libc::EROFS), "{refused}");
    assert!(path.starts_with(&data), "{refused}");
    // Reading it needs no write.
    let mut reader = storage_uring::offline::Reader::open(&data, 1).expect("opens");
    assert_eq!(reader.verify().records, 1);
}

#[test]
fn a_missing_directory_is_made_and_one_that_cannot_be_is_named() {
    let dir = disk_dir();
    let deep = dir.path().join("a/b/c");
    drop(storage_uring::recover(&deep, 1).expect("makes it"));
    let file = dir.path().join("file");
    std::fs::write(&file, b"x").expect("writes");
    for bad in [file.clone(), file.join("below")] {
        let refused = storage_uring::recover(&bad, 1)
            .map(drop)
            .expect_err("is no directory");
        assert!(
            refused.to_string().contains(&*file.to_string_lossy()),
            "{refused}"
        );
    }
}

// -- file descriptors --

const DIR: &str = "FELIX_TEST_DESCRIPTORS_DIR";
/// What a process needs besides a file a segment: standard streams, the lock, rings, the 64 segments last read.
const FEW: u64 = 110;

fn limit_descriptors(to: u64) {
    let limit = libc::rlimit {
        rlim_cur: to,
        rlim_max: 4096,
    };
    // SAFETY: the pointer is to a live value for the length of the call.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
}

/// Run by the test below in a process of its own.
#[test]
fn process_with_few_descriptors() {
    let Ok(dir) = std::env::var(DIR) else { return };
    let settings = many_segments(Path::new(&dir));
    limit_descriptors(FEW);
    on_core(settings, |storage| async move {
        let log = storage.open_log(&name(0)).expect("opens");
        check_held(&storage, log).await;
        // None left: no segment can be made, nothing can be read from the device, nothing is lost.
        limit_descriptors(3);
        while appended(&storage, log, storage.tail(log)).await {}
        assert!(matches!(
            storage.read(log, 0, 100).await,
            Err(ReadError::Io(_))
        ));
        assert!(storage.failure().is_none());
        limit_descriptors(FEW);
        let asked = Instant::now();
        while !appended(&storage, log, storage.tail(log)).await {
            assert!(
                asked.elapsed() < Duration::from_secs(60),
                "it does not heal"
            );
            shard_executor::rt::sleep(Duration::from_millis(20)).await;
        }
        check_held(&storage, log).await;
        storage.close().await.expect("closes");
    });
}

fn many_segments(dir: &Path) -> StorageConfig {
    StorageConfig {
        segment_bytes: 256 << 10,
        prewritten_segments: 1,
        recent_bytes: 0,
        ..config(dir)
    }
}

#[test]
fn more_segments_than_descriptors_are_recovered_and_running_out_heals() {
    let dir = disk_dir();
    on_core(many_segments(dir.path()), |storage| async move {
        let log = storage.open_log(&name(0)).expect("opens");
        for number in 0..320 {
            assert!(appended(&storage, log, number).await);
        }
        storage.close().await.expect("closes");
    });
    let segments = std::fs::read_dir(dir.path().join("core-log/0"))
        .expect("lists")
        .count();
    assert!(segments as u64 > FEW + 10, "{segments} segments");
    let ran = Command::new(std::env::current_exe().expect("this test"))
        .args([
            "--exact",
            "small_disks::process_with_few_descriptors",
            "--nocapture",
        ])
        .env(DIR, dir.path())
        .output()
        .expect("runs");
    assert!(
        ran.status.success(),
        "{}",
        String::from_utf8_lossy(&ran.stderr)
    );
}
