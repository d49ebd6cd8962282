//! Reads made before they are asked for: used by who goes on, right after every change to the log.

use std::future::Future;
use std::path::Path;
use std::pin::pin;
use std::task::{Context, Waker};

use storage_uring::{ControlEvent, LogRef, Storage, StorageConfig};

use crate::common::{config, disk_dir, name, on_core, outcomes};

const RECORD_BYTES: usize = 1000;
const READ_BYTES: usize = 256 << 10;

/// Everything is read from the disk, in segments that hold several reads.
fn cold(dir: &Path) -> StorageConfig {
    StorageConfig {
        segment_bytes: 4 << 20,
        recent_bytes: 0,
        ..config(dir)
    }
}

fn record(version: u8, offset: u64) -> Vec<u8> {
    let mut bytes = vec![version; RECORD_BYTES];
    bytes[..8].copy_from_slice(&offset.to_le_bytes());
    bytes
}

async fn append(storage: &Storage, log: LogRef, version: u8, count: u64) {
    let tail = storage.tail(log);
    let records: Vec<Vec<u8>> = (tail..tail + count)
        .map(|offset| record(version, offset))
        .collect();
    for batch in records.chunks(64) {
        let batch = batch.iter().map(Vec::as_slice);
        storage.append(log, 1, 1, batch, 0).expect("is taken");
        storage.kick();
        outcomes(storage, 1).await;
    }
}

/// Reads on from `from` for at most `reads` reads and returns where it stopped.
async fn read_on(
    storage: &Storage,
    log: LogRef,
    mut from: u64,
    reads: usize,
    version_at: impl Fn(u64) -> u8,
) -> u64 {
    for _ in 0..reads {
        if from == storage.durable_tail(log) {
            break;
        }
        let batch = storage.read(log, from, READ_BYTES).await.expect("reads");
        assert_eq!(batch.first_offset, from);
        assert!(batch.next_offset > from, "a read moves on");
        for (offset, bytes) in (from..).zip(&batch.records) {
            assert_eq!(bytes[..], record(version_at(offset), offset), "{offset}");
        }
        from = batch.next_offset;
    }
    from
}

#[test]
fn who_goes_on_gets_what_was_read_ahead_and_a_single_read_starts_nothing() {
    let dir = disk_dir();
    on_core(cold(dir.path()), |storage| async move {
        let log = storage.open_log(&name(0)).expect("opens");
        append(&storage, log, 1, 6000).await;
        for from in [0, 4000, 1000] {
            read_on(&storage, log, from, 1, |_| 1).await;
        }
        assert_eq!(storage.stats().reads_ahead, 0);
        let before = storage.stats().reads;
        let end = read_on(&storage, log, 0, usize::MAX, |_| 1).await;
        assert_eq!(end, 6000);
        let after = storage.stats();
        assert!(after.reads_ahead > 5, "{} were used", after.reads_ahead);
        // Nothing is read twice: the log is 6 MB in reads of about 200 KiB, and a few at segment ends.
        assert!(after.reads - before < 60, "{} reads", after.reads - before);
        storage.close().await.expect("closes");
    });
}

#[test]
fn what_was_cut_meanwhile_is_never_handed_out() {
    let dir = disk_dir();
    on_core(cold(dir.path()), |storage| async move {
        let log = storage.open_log(&name(0)).expect("opens");
        append(&storage, log, 1, 3000).await;
        // The first read starts nothing, the second has the third made ahead; that one is cut and written anew.
        let at = read_on(&storage, log, 0, 2, |_| 1).await;
        storage
            .control(log, ControlEvent::Truncate(at + 10), 1, 0)
            .expect("is taken");
        storage.kick();
        outcomes(&storage, 1).await;
        append(&storage, log, 2, 1000).await;
        let end = read_on(&storage, log, at, usize::MAX, |offset| {
            if offset < at + 10 {
                1
            } else {
                2
            }
        })
        .await;
        assert_eq!(end, at + 1010);
        // Several readers at once, each from its own place.
        let mut places = [0u64, 100, 500, 700];
        while places.iter().any(|at| *at < end) {
            for place in &mut places {
                *place = read_on(&storage, log, *place, 1, |offset| {
                    if offset < at + 10 {
                        1
                    } else {
                        2
                    }
                })
                .await;
            }
        }
        // One made ahead is under way or unfetched: closing does not wait for anybody to ask for it.
        read_on(&storage, log, 0, 2, |_| 1).await;
        storage.close().await.expect("closes");
    });
    // And the directory's lock is free again.
    on_core(cold(dir.path()), |storage| async move {
        let log = storage.open_log(&name(0)).expect("opens");
        assert!(storage.durable_tail(log) > 1000);
        storage.close().await.expect("closes");
    });
}

#[test]
fn a_read_over_a_cut_gives_nothing_that_was_cut() {
    let dir = disk_dir();
    on_core(cold(dir.path()), |storage| async move {
        let log = storage.open_log(&name(0)).expect("opens");
        append(&storage, log, 1, 200).await;
        for is_written_anew in [true, false] {
            // It is at the disk, and its answer waits for whoever asked.
            let mut read = pin!(storage.read(log, 150, READ_BYTES));
            let mut context = Context::from_waker(Waker::noop());
            assert!(read.as_mut().poll(&mut context).is_pending());
            storage
                .control(log, ControlEvent::Truncate(100), 1, 0)
                .expect("is taken");
            if is_written_anew {
                outcomes(&storage, 1).await;
                append(&storage, log, 2, 100).await;
            }
            let batch = read.await.expect("reads");
            assert_eq!(batch.records.is_empty(), !is_written_anew);
            for (offset, bytes) in (150..).zip(&batch.records) {
                assert_eq!(bytes[..], record(2, offset), "{offset}");
            }
        }
        storage.close().await.expect("closes");
    });
}
