//! A real storage on a real file system with O_DIRECT.

use std::time::{Duration, Instant};

use crate::common::{config, disk_dir, name, on_core, outcomes, payload, read_all};
use storage_uring::{LogError, SegmentZeros, SyncMethod};

fn write_then_read_after_restart(sync: SyncMethod, zeros: SegmentZeros) {
    const SHARDS: u32 = 5;
    const ROUNDS: u64 = 400;
    let dir = disk_dir();
    let mut settings = config(dir.path());
    settings.sync = sync;
    settings.segment_zeros = zeros;
    let again = settings.clone();
    on_core(settings, move |storage| async move {
        let logs: Vec<_> = (0..SHARDS)
            .map(|shard| storage.open_log(&name(shard)).expect("opens"))
            .collect();
        let mut waiting = 0;
        for round in 0..ROUNDS {
            for (shard, log) in logs.iter().enumerate() {
                let record = payload(shard as u32, round);
                let range = storage
                    .append(*log, 1, 1_000, [record.as_slice()].into_iter(), round)
                    .expect("appends");
                assert_eq!(range, round..round + 1);
                waiting += 1;
            }
            storage.kick();
            if round % 16 == 0 {
                let done = outcomes(&storage, waiting).await;
                assert!(done.iter().all(|done| done.result.is_ok()));
                waiting = 0;
            }
        }
        outcomes(&storage, waiting).await;
        for (shard, log) in logs.iter().enumerate() {
            assert_eq!(storage.durable_tail(*log), ROUNDS);
            let all = read_all(&storage, *log).await;
            assert!(all
                .iter()
                .enumerate()
                .all(|(i, record)| *record == payload(shard as u32, i as u64)));
        }
        let stats = storage.stats();
        assert_eq!(stats.machine.records, u64::from(SHARDS) * ROUNDS);
        assert!(
            stats.segments_made > 2,
            "the test crosses segments: {stats:?}"
        );
        if zeros == SegmentZeros::Never {
            assert!(stats.segments_allocated >= stats.segments_made, "{stats:?}");
        }
        assert!(stats.reads > 0, "some reads went to the device");
        storage.close().await.expect("closes");
    });
    for start in 0..2u64 {
        on_core(again.clone(), move |storage| async move {
            let report = storage.recovery_report();
            assert_eq!(
                (report.cuts.len(), report.damages.len()),
                (0, 0),
                "{report:?}"
            );
            for shard in 0..SHARDS {
                let log = storage.open_log(&name(shard)).expect("opens");
                let all = read_all(&storage, log).await;
                assert_eq!(all.len() as u64, ROUNDS + start);
                assert!(all
                    .iter()
                    .enumerate()
                    .all(|(i, record)| *record == payload(shard, i as u64)));
                let record = payload(shard, ROUNDS + start);
                storage
                    .append(log, 1, 1_000, [record.as_slice()].into_iter(), 0)
                    .expect("appends");
            }
            storage.kick();
            outcomes(&storage, SHARDS as usize).await;
            storage.close().await.expect("closes");
        });
    }
}

#[test]
fn o_dsync_survives_restarts() {
    write_then_read_after_restart(SyncMethod::ODsync, SegmentZeros::WhileTheyPay);
}

#[test]
fn segments_without_written_zeros_survive_restarts() {
    for sync in [SyncMethod::ODsync, SyncMethod::Fdatasync] {
        write_then_read_after_restart(sync, SegmentZeros::Never);
    }
}

#[test]
fn fdatasync_survives_restarts() {
    write_then_read_after_restart(SyncMethod::Fdatasync, SegmentZeros::WhileTheyPay);
}

#[test]
fn records_of_every_awkward_size_come_back() {
    let dir = disk_dir();
    let mut settings = config(dir.path());
    settings.segment_bytes = 64 << 20;
    settings.max_queued_bytes = 64 << 20;
    let again = settings.clone();
    let sizes = [
        0usize,
        1,
        100,
        4095,
        4096,
        4097,
        8192,
        65_536,
        1 << 20,
        1,
        16 << 20,
    ];
    on_core(settings, move |storage| async move {
        let log = storage.open_log(&name(0)).expect("opens");
        for size in sizes {
            let record = vec![0x5a; size];
            storage
                .append(log, 1, 1, [record.as_slice()].into_iter(), size as u64)
                .expect("appends");
            storage.kick();
        }
        let done = outcomes(&storage, sizes.len()).await;
        let tokens: Vec<u64> = done.iter().map(|done| done.token).collect();
        assert_eq!(
            tokens,
            sizes.map(|size| size as u64),
            "outcomes come in append order"
        );
        storage.close().await.expect("closes");
    });
    on_core(again, move |storage| async move {
        let log = storage.open_log(&name(0)).expect("opens");
        let lens: Vec<usize> = read_all(&storage, log).await.iter().map(Vec::len).collect();
        assert_eq!(lens, sizes);
    });
}

#[test]
fn a_log_is_open_on_one_core_only() {
    let dir = disk_dir();
    let settings = config(dir.path());
    let recovered = storage_uring::recover(dir.path(), 1).expect("recovers");
    let open = |core: u16| {
        let mut settings = settings.clone();
        (settings.core_index, settings.core_count) = (core, 2);
        let recovered = recovered.clone();
        let spec = shard_executor::rt::CoreSpec::new(core as usize);
        let core = shard_executor::rt::spawn_core(spec, move || async move {
            let storage = storage_uring::Storage::open(settings, recovered)
                .await
                .expect("opens");
            storage.open_log(&name(0)).map(|_| ())
        });
        core.expect("starts").join().expect("runs")
    };
    assert_eq!(open(0), Ok(()));
    assert!(matches!(open(1), Err(LogError::OpenElsewhere(_))));
}

#[test]
fn much_at_once_is_being_written_before_its_caller_is_done() {
    let dir = disk_dir();
    let mut settings = config(dir.path());
    settings.segment_bytes = 8 << 20;
    settings.commit_max_bytes = 1 << 20;
    on_core(settings, |storage| async move {
        let log = storage.open_log(&name(0)).expect("opens");
        let record = vec![7u8; 8 << 10];
        for token in 0..40 {
            storage
                .append(log, 1, 1, [record.as_slice()].into_iter(), token)
                .expect("appends");
        }
        // Nobody kicked the storage and nobody asks it for outcomes: it has started by itself.
        let started = Instant::now();
        while storage.stats().machine.commits == 0 {
            assert!(started.elapsed() < Duration::from_secs(20), "not started");
            shard_executor::rt::sleep(Duration::from_millis(1)).await;
        }
        storage.kick();
        assert_eq!(outcomes(&storage, 40).await.len(), 40);
        storage.close().await.expect("closes");
    });
}
