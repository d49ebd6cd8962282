//! The offline reader, and starts over damaged copies of a directory.

use std::path::Path;

use crate::common::{config, disk_dir, name, on_core, outcomes, payload, read_all};
use storage_uring::datadir::{DataDir, Layout, SEQUENCE_MAX};
use storage_uring::offline::Reader;
use storage_uring::{recover, StorageError};

const SIZES: [usize; 10] = [0, 1, 100, 4095, 4096, 4097, 8192, 65_536, 1 << 20, 1];

fn record(i: usize) -> Vec<u8> {
    (0..SIZES[i]).map(|n| (n * 7 + i + 1) as u8).collect()
}

/// Ten records of awkward sizes, each its own group; without the closing mark when `orderly` is false.
fn written(dir: &Path, orderly: bool) {
    let mut settings = config(dir);
    settings.segment_bytes = 8 << 20;
    on_core(settings, move |storage| async move {
        let log = storage.open_log(&name(0)).expect("opens");
        for i in 0..SIZES.len() {
            storage
                .append(log, 1, 1, [record(i).as_slice()].into_iter(), 0)
                .expect("appends");
            storage.kick();
            assert!(outcomes(&storage, 1).await[0].result.is_ok());
        }
        if orderly {
            storage.close().await.expect("closes");
        }
    });
}

fn copy(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).expect("lists") {
        let entry = entry.expect("entry");
        let target = to.join(entry.file_name());
        if entry.file_type().expect("type").is_dir() {
            std::fs::create_dir_all(&target).expect("mkdir");
            copy(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), &target).expect("copies");
        }
    }
}

/// First segment file and the position of its last group with a record, with its used length.
fn last_group(dir: &Path) -> (std::path::PathBuf, u64, u64) {
    let mut found = None;
    let reader = Reader::open(dir, 1).expect("opens");
    let inspected = reader.inspect(
        |_| {},
        |segment, group| {
            if group.records > 0 {
                found = Some((segment.file.clone(), group.position, group.used_len));
            }
        },
    );
    inspected.expect("inspects");
    found.expect("a group")
}

/// Starts twice over a damaged copy, appends one record each time, and checks what is there.
fn start_twice(dir: &Path, expected: usize) {
    for start in 0..2 {
        let mut settings = config(dir);
        settings.segment_bytes = 8 << 20;
        on_core(settings, move |storage| async move {
            let report = storage.recovery_report();
            assert!(report.damages.is_empty(), "{report:?}");
            assert!(
                start == 0 || report.cuts.is_empty(),
                "the second start changes nothing: {report:?}"
            );
            let log = storage.open_log(&name(0)).expect("opens");
            let range = storage
                .append(log, 1, 1, [&b"next"[..]].into_iter(), 0)
                .expect("appends");
            assert_eq!(range.start, (expected + start) as u64);
            storage.kick();
            assert!(outcomes(&storage, 1).await[0].result.is_ok());
            let all = read_all(&storage, log).await;
            assert!((0..expected).all(|i| all[i] == record(i)));
            assert!(all[expected..].iter().all(|record| record == b"next"));
        });
    }
}

#[test]
fn damaged_copies_keep_every_whole_record() {
    let original = disk_dir();
    written(original.path(), false);
    let (file, position, used) = last_group(original.path());
    let relative = file
        .strip_prefix(original.path())
        .expect("inside")
        .to_owned();
    let damage = |change: &dyn Fn(&Path), expected: usize| {
        let dir = disk_dir();
        copy(original.path(), dir.path());
        // A start that died before it settled anything: what the one before made may be shorter since.
        drop(DataDir::open(dir.path()).expect("opens"));
        change(&dir.path().join(&relative));
        start_twice(dir.path(), expected);
    };
    let cut = |at: u64| {
        move |file: &Path| {
            std::fs::OpenOptions::new()
                .write(true)
                .open(file)
                .expect("opens")
                .set_len(at)
                .expect("cuts");
        }
    };
    for at in [1, 60, used - 10, used - 1] {
        damage(&cut(position + at), 9);
    }
    let end = (position + used).next_multiple_of(4096);
    let append = |bytes: Vec<u8>| {
        move |file: &Path| {
            cut(end)(file);
            let mut all = std::fs::read(file).expect("reads");
            all.extend_from_slice(&bytes);
            std::fs::write(file, all).expect("writes");
        }
    };
    for len in [1, 4096, 65_536] {
        damage(&append(vec![0; len]), 10);
    }
    for len in [1, 4096] {
        damage(
            &append(
                payload(3, 7)
                    .into_iter()
                    .cycle()
                    .skip(3)
                    .take(len)
                    .map(|byte| byte | 1)
                    .collect(),
            ),
            10,
        );
    }
    damage(
        &|file: &Path| {
            let next = file.with_file_name(format!("seg-{:016x}.fxl", 99));
            std::fs::write(next, vec![0; 4 << 20]).expect("writes");
        },
        10,
    );
}

/// Segments with records, oldest first.
fn segments_with_records(dir: &Path) -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    let reader = Reader::open(dir, 1).expect("opens");
    let inspected = reader.inspect(
        |_| {},
        |segment, group| {
            if group.records > 0 && found.last() != Some(&segment.file) {
                found.push(segment.file.clone());
            }
        },
    );
    inspected.expect("inspects");
    found
}

/// The log is refused by this and every later start, by one that writes nothing and one that writes.
fn is_refused_for_good(dir: &Path, what: &str) {
    for writes in [false, false, true, true, false] {
        let mut reader = Reader::open(dir, 1).expect("opens");
        assert!(!reader.verify().is_clean(), "{what}: {:?}", reader.report());
        assert!(!reader.report().damages.is_empty(), "{what}");
        let what = what.to_owned();
        on_core(config(dir), move |storage| async move {
            let log = storage.open_log(&name(0)).expect("opens, refused");
            let refused = storage.append(log, 1, 1, [&b"x"[..]].into_iter(), 0);
            assert_eq!(refused, Err(storage_uring::AppendError::Damaged), "{what}");
            if writes {
                let other = storage.open_log(&name(1)).expect("opens");
                let taken = storage.append(other, 1, 1, [&b"x"[..]].into_iter(), 0);
                taken.expect("another log works");
                storage.kick();
                assert!(outcomes(&storage, 1).await[0].result.is_ok(), "{what}");
            }
            storage.close().await.expect("closes");
        });
    }
}

#[test]
fn a_lost_or_shortened_newest_segment_is_refused_at_every_start() {
    for orderly in [true, false] {
        let original = disk_dir();
        on_core(config(original.path()), move |storage| async move {
            let log = storage.open_log(&name(0)).expect("opens");
            for offset in 0..60u64 {
                let record = vec![offset as u8; 60_000];
                let taken = storage.append(log, 1, 1, [record.as_slice()].into_iter(), 0);
                taken.expect("appends");
                storage.kick();
                assert!(outcomes(&storage, 1).await[0].result.is_ok());
            }
            if orderly {
                storage.close().await.expect("closes");
            }
        });
        let segments = segments_with_records(original.path());
        assert!(segments.len() > 3);
        let newest = segments.last().expect("some");
        let used = last_group(original.path());
        let half = used.1 / 2;
        let with = |change: &dyn Fn(&Path), what: &str| {
            let dir = disk_dir();
            copy(original.path(), dir.path());
            let of_copy = |file: &Path| {
                let relative = file.strip_prefix(original.path()).expect("inside");
                dir.path().join(relative)
            };
            change(&of_copy(newest));
            is_refused_for_good(dir.path(), &format!("orderly {orderly}: {what}"));
        };
        with(&|file| std::fs::remove_file(file).expect("goes"), "lost");
        for len in [0, 100, 4096, half, used.1] {
            let cut = |file: &Path| {
                let file = std::fs::OpenOptions::new().write(true).open(file);
                file.expect("opens").set_len(len).expect("cuts");
            };
            with(&cut, &format!("{len} bytes left"));
        }
    }
}

/// What a start said of the short file is not true of the one that was put in its place, which later starts shorten.
#[test]
fn a_shortened_segment_that_is_put_back_whole_is_good_at_every_start() {
    let original = disk_dir();
    written(original.path(), false);
    let newest = segments_with_records(original.path()).pop().expect("some");
    let dir = disk_dir();
    copy(original.path(), dir.path());
    let of_copy = newest.strip_prefix(original.path()).expect("inside");
    let of_copy = dir.path().join(of_copy);
    let file = std::fs::OpenOptions::new().write(true).open(&of_copy);
    file.expect("opens").set_len(4096).expect("cuts");
    let found = recover(dir.path(), 1).expect("starts");
    assert!(!found.report().damages.is_empty());
    drop(found);
    let mark = of_copy.with_extension("short");
    assert!(mark.exists());
    std::fs::copy(&newest, &of_copy).expect("is put back");
    for start in 0..3 {
        let found = recover(dir.path(), 1).expect("starts");
        let damages = &found.report().damages;
        assert!(damages.is_empty(), "start {start}: {damages:?}");
        drop(found);
        on_core(config(dir.path()), |storage| async move {
            let log = storage.open_log(&name(0)).expect("opens");
            let taken = storage.append(log, 1, 1, [&b"x"[..]].into_iter(), 0);
            taken.expect("is taken");
            storage.kick();
            assert!(outcomes(&storage, 1).await[0].result.is_ok());
        });
    }
    assert!(!mark.exists());
}

#[test]
fn a_flipped_bit_in_the_last_record_is_refused_on_every_start() {
    for orderly in [false, true] {
        let dir = disk_dir();
        written(dir.path(), orderly);
        let (file, position, used) = last_group(dir.path());
        let mut bytes = std::fs::read(&file).expect("reads");
        bytes[(position + used - 1) as usize] ^= 1;
        std::fs::write(&file, bytes).expect("writes");
        for _ in 0..2 {
            on_core(config(dir.path()), |storage| async move {
                let log = storage.open_log(&name(0)).expect("opens, refused");
                let refused = storage.append(log, 1, 1, [&b"x"[..]].into_iter(), 0);
                assert_eq!(refused, Err(storage_uring::AppendError::Damaged));
                assert!(storage.read(log, 0, 100).await.is_err());
                let other = storage.open_log(&name(1)).expect("opens");
                storage
                    .append(other, 1, 1, [&b"x"[..]].into_iter(), 0)
                    .expect("appends");
                storage.kick();
                assert!(
                    outcomes(&storage, 1).await[0].result.is_ok(),
                    "another shard works"
                );
                assert_eq!(storage.stats().failed_logs, [name(0).to_string()]);
            });
        }
        let mut reader = Reader::open(dir.path(), 1).expect("opens");
        let verified = reader.verify();
        assert!(!verified.is_clean());
        assert_eq!(reader.report().refused.len(), 1);
    }
}

#[test]
fn a_running_brokers_directory_can_be_read() {
    let dir = disk_dir();
    let path = dir.path().to_owned();
    on_core(config(dir.path()), move |storage| async move {
        let logs: Vec<_> = (0..3)
            .map(|shard| storage.open_log(&name(shard)).expect("opens"))
            .collect();
        for offset in 0..300u64 {
            for (shard, log) in logs.iter().enumerate() {
                let record = payload(shard as u32, offset);
                storage
                    .append(*log, 1, 1, [record.as_slice()].into_iter(), 0)
                    .expect("appends");
            }
            storage.kick();
            if offset % 50 == 49 {
                outcomes(&storage, 150).await;
                let mut reader = Reader::open(&path, 2).expect("opens beside the broker");
                assert!(reader.verify().is_clean());
                for log in reader.logs() {
                    let name = log.name.clone().expect("named");
                    assert_eq!(log.tail, offset + 1);
                    let mut expected = 0;
                    for found in reader.records(log.id) {
                        let (at, bytes) = found.expect("reads");
                        assert_eq!(
                            (at, bytes.to_vec()),
                            (expected, payload(name.shard, expected))
                        );
                        expected += 1;
                    }
                    assert_eq!(expected, offset + 1);
                }
            }
        }
    });
    assert!(recover(dir.path(), 1).is_ok());
}

#[test]
fn an_unknown_segment_version_is_refused() {
    let dir = disk_dir();
    written(dir.path(), true);
    let (file, _, _) = last_group(dir.path());
    let mut bytes = std::fs::read(&file).expect("reads");
    bytes[8] = 77;
    let crc = crc32c::crc32c(&bytes[..4092]);
    bytes[4092..4096].copy_from_slice(&crc.to_le_bytes());
    std::fs::write(&file, bytes).expect("writes");
    let refused = recover(dir.path(), 1).map(|_| ()).expect_err("is refused");
    assert!(
        matches!(refused, StorageError::UnknownVersion { found: 77, .. }),
        "{refused}"
    );
    assert!(refused.to_string().contains("version 77"), "{refused}");
}

#[test]
fn a_core_directory_that_is_gone_is_refused_until_it_is_back() {
    let original = disk_dir();
    written(original.path(), true);
    for gone in ["core-log/0", "core-log"] {
        let dir = disk_dir();
        copy(original.path(), dir.path());
        std::fs::remove_dir_all(dir.path().join(gone)).expect("goes");
        for _ in 0..2 {
            let by_start = recover(dir.path(), 1).map(|_| ());
            let by_reader = Reader::open(dir.path(), 1).map(|_| ());
            for refused in [by_start, by_reader] {
                let refused = refused.expect_err("is refused");
                assert!(
                    matches!(refused, StorageError::CoreMissing { .. }),
                    "{refused}"
                );
            }
        }
        copy(original.path(), dir.path());
        start_twice(dir.path(), SIZES.len());
    }
}

#[test]
fn files_with_numbers_no_start_came_to_do_not_move_the_sequence() {
    let last = SEQUENCE_MAX;
    for (seq, bytes) in [
        (u64::MAX, 0),
        (u64::MAX, 8192),
        (last + 1, 8192),
        (last, 8192),
    ] {
        let dir = disk_dir();
        written(dir.path(), true);
        let core = dir.path().join("core-log/0");
        std::fs::write(core.join(format!("seg-{seq:016x}.fxl")), vec![0; bytes]).expect("writes");
        start_twice(dir.path(), SIZES.len());
        let mut reader = Reader::open(dir.path(), 1).expect("opens");
        assert!(reader.verify().is_clean());
        let newest = Layout::new(dir.path()).segments(0).expect("lists");
        assert!(newest.iter().all(|seq| *seq < 20), "{newest:?}");
    }
}

#[test]
fn a_segment_with_the_last_number_stops_the_start_and_stays() {
    let dir = disk_dir();
    written(dir.path(), true);
    let layout = Layout::new(dir.path());
    let newest = *layout.segments(0).expect("lists").last().expect("some");
    let mut bytes = std::fs::read(layout.segment(0, newest)).expect("reads");
    bytes[32..40].copy_from_slice(&SEQUENCE_MAX.to_le_bytes());
    // Of a start before, as if it was not the last that came so far.
    bytes[40..48].copy_from_slice(&0u64.to_le_bytes());
    let crc = crc32c::crc32c(&bytes[..4092]);
    bytes[4092..4096].copy_from_slice(&crc.to_le_bytes());
    std::fs::write(layout.segment(0, SEQUENCE_MAX), bytes).expect("writes");
    let before = layout.segments(0).expect("lists");
    for _ in 0..2 {
        let refused = recover(dir.path(), 1).map(|_| ()).expect_err("is refused");
        assert!(
            matches!(refused, StorageError::SequencesUsedUp { .. }),
            "{refused}"
        );
        assert_eq!(layout.segments(0).expect("lists"), before);
    }
}

#[test]
fn what_is_no_file_is_named_by_a_start_and_by_a_reader_and_neither_waits() {
    let dir = disk_dir();
    written(dir.path(), true);
    let core = dir.path().join("core-log/0");
    let segment = format!("seg-{:016x}.fxl", 9);
    for (name, is_pipe) in [
        (segment.as_str(), true),
        (segment.as_str(), false),
        ("spare-00000000.fxs", false),
        ("rewrite-0000000000000001.fxs", false),
        ("freed", false),
    ] {
        let odd = core.join(name);
        match is_pipe {
            true => {
                let made = std::process::Command::new("mkfifo").arg(&odd).status();
                assert!(made.expect("mkfifo runs").success());
            }
            false => std::fs::create_dir(&odd).expect("mkdir"),
        }
        let by_start = recover(dir.path(), 1).map(|_| ());
        let by_reader = Reader::open(dir.path(), 1).map(|_| ());
        for refused in [by_start, by_reader] {
            let refused = refused.expect_err("is refused");
            assert!(
                matches!(&refused, StorageError::NotAFile { path } if *path == odd),
                "{refused}"
            );
        }
        match is_pipe {
            true => std::fs::remove_file(&odd).expect("rm"),
            false => std::fs::remove_dir(&odd).expect("rmdir"),
        }
    }
    start_twice(dir.path(), SIZES.len());
}

#[test]
fn an_oldest_segment_that_is_gone_is_not_said_to_be_given_back() {
    let dir = disk_dir();
    on_core(config(dir.path()), move |storage| async move {
        let log = storage.open_log(&name(0)).expect("opens");
        for _ in 0..60u64 {
            let taken = storage.append(log, 1, 1, [&[7; 60_000][..]].into_iter(), 0);
            taken.expect("appends");
            storage.kick();
            assert!(outcomes(&storage, 1).await[0].result.is_ok());
        }
    });
    std::fs::remove_file(&segments_with_records(dir.path())[0]).expect("goes");
    let verified = Reader::open(dir.path(), 1).expect("opens").verify();
    assert!(
        !verified.is_clean() && verified.given_back.is_empty(),
        "{verified:?}"
    );
}
