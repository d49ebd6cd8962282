//! Faults injected into the driver over a real file system.

use std::time::{Duration, Instant};

use crate::common::{config, disk_dir, name, on_core, outcomes, read_all};
use storage_uring::{
    AppendError, CommitError, FaultEffect, FaultOp, FaultPlan, FaultRule, ReadError, SyncMethod,
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
        let mut reader = storage_uring::offline::Reader::open(dir.path(), 1).expect("opens");
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
    let reader = storage_uring::offline::Reader::open(dir.path(), 1).expect("opens");
    assert_eq!(reader.log(&name(0)).expect("is there").tail, 3);
}

#[test]
fn a_slow_device_keeps_order_and_failed_reads_are_errors() {
    let dir = disk_dir();
    let mut settings = config(dir.path());
    settings.recent_bytes = 0;
    settings.faults = Some(FaultPlan {
        rules: vec![
            FaultRule {
                op: FaultOp::Write,
                nth: 1,
                count: 1,
                effect: FaultEffect::DelayMs(60),
            },
            FaultRule {
                op: FaultOp::Read,
                nth: 1,
                count: 1,
                effect: FaultEffect::Error(5),
            },
        ],
    });
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
        assert!(matches!(
            storage.read(log, 0, 100).await,
            Err(ReadError::Io(_))
        ));
        assert_eq!(
            storage
                .read(log, 0, 100)
                .await
                .expect("reads")
                .records
                .len(),
            2
        );
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
