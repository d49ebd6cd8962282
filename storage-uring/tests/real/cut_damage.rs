//! Damage in what was cut off: the log is whole, and so is every read of it.

use std::path::Path;

use storage_uring::datadir::Layout;
use storage_uring::{ControlEvent, LogRef, Storage, StorageConfig};

use crate::common::{config, disk_dir, name, on_core, outcomes, recovered};

const RECORD_BYTES: usize = 1000;

/// Everything is read from the disk, many records at once.
fn cold(dir: &Path) -> StorageConfig {
    StorageConfig {
        recent_bytes: 0,
        ..config(dir)
    }
}

fn record(version: u8) -> Vec<u8> {
    vec![version; RECORD_BYTES]
}

/// Ten records in a commit of their own.
async fn append(storage: &Storage, log: LogRef, version: u8) {
    let records: Vec<Vec<u8>> = (0..10).map(|_| record(version)).collect();
    let records = records.iter().map(Vec::as_slice);
    storage.append(log, 1, 1, records, 0).expect("is taken");
    storage.kick();
    outcomes(storage, 1).await;
}

/// Zeroes the first block of the commit that holds records of `version`.
fn damage(dir: &Path, version: u8) {
    let wanted = record(version);
    let layout = Layout::new(dir);
    for segment in layout.segments(0).expect("lists") {
        let path = layout.segment(0, segment);
        let mut bytes = std::fs::read(&path).expect("reads");
        let at = bytes.windows(64).position(|window| window == &wanted[..64]);
        if let Some(at) = at {
            let block = at / 4096 * 4096;
            bytes[block..block + 4096].fill(0);
            return std::fs::write(&path, bytes).expect("writes");
        }
    }
    panic!("no record of {version}");
}

#[test]
fn reads_do_not_need_what_was_cut_off() {
    let dir = disk_dir();
    on_core(cold(dir.path()), |storage| async move {
        let log = storage.open_log(&name(0)).expect("opens");
        append(&storage, log, 1).await;
        append(&storage, log, 2).await;
        storage
            .control(log, ControlEvent::Truncate(10), 1, 0)
            .expect("is taken");
        storage.kick();
        outcomes(&storage, 1).await;
        append(&storage, log, 3).await;
    });
    damage(dir.path(), 2);
    let found = recovered(dir.path(), 1);
    let report = found.report();
    assert_eq!((report.damages.len(), report.refused.len()), (1, 0));
    drop(found);
    on_core(cold(dir.path()), |storage| async move {
        let log = storage.open_log(&name(0)).expect("opens");
        assert_eq!(storage.durable_tail(log), 20);
        for from in 0..20 {
            let batch = storage.read(log, from, 256 << 10).await;
            let batch = batch.unwrap_or_else(|error| panic!("at {from}: {error}"));
            assert!(!batch.records.is_empty(), "at {from}");
            for (offset, bytes) in (from..).zip(&batch.records) {
                let version = if offset < 10 { 1 } else { 3 };
                assert_eq!(bytes[..], record(version), "{offset}");
            }
        }
    });
}
