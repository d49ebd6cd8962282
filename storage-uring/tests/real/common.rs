//! Shared by the tests that run a real storage on a real file system.

use std::future::Future;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use shard_executor::rt::{spawn_core, CoreSpec};
use storage_uring::{
    recover, Completion, LogKind, LogName, LogRef, RecoveredSet, Storage, StorageConfig,
    StorageError,
};

/// A directory on the file system of the build, where O_DIRECT works (the system's temporary directory may
/// be in memory).
pub fn disk_dir() -> tempfile::TempDir {
    let root = Path::new(env!("CARGO_TARGET_TMPDIR"));
    tempfile::tempdir_in(root).expect("a directory under target/")
}

pub fn name(shard: u32) -> LogName {
    LogName {
        kind: LogKind::Stream,
        tenant: "acme".into(),
        namespace: "prod".into(),
        name: "orders".into(),
        shard,
    }
}

/// A small configuration, so that tests fill segments quickly.
pub fn config(dir: &Path) -> StorageConfig {
    StorageConfig {
        segment_bytes: 1 << 20,
        commit_max_bytes: 64 << 10,
        recent_bytes: 256 << 10,
        reserve_bytes: 0,
        low_space_bytes: 0,
        ..StorageConfig::new(dir, 0, 1)
    }
}

/// A start over a directory that nobody has open any more. A process that another test is just starting holds what
/// this one has open, its locks included, until it runs a program of its own: that is waited for.
pub fn recovered(dir: &Path, threads: usize) -> Arc<RecoveredSet> {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        match recover(dir, threads) {
            Err(StorageError::Locked { .. }) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(1));
            }
            outcome => return outcome.expect("recovers"),
        }
    }
}

/// Runs `body` on one core over the recovered directory, then waits for the core to end.
pub fn on_core<R, F, Fut>(config: StorageConfig, body: F) -> R
where
    R: Send + 'static,
    F: FnOnce(Storage) -> Fut + Send + 'static,
    Fut: Future<Output = R> + 'static,
{
    let recovered = recovered(&config.dir, 2);
    let spec = CoreSpec {
        name: "storage-test".into(),
        ..CoreSpec::new(0)
    };
    let core = spawn_core(spec, move || async move {
        let storage = Storage::open(config, recovered).await.expect("opens");
        body(storage).await
    });
    core.expect("starts").join().expect("runs")
}

/// Waits until `count` outcomes are there.
pub async fn outcomes(storage: &Storage, count: usize) -> Vec<Completion> {
    let signal = storage.signal();
    let mut all = Vec::new();
    while all.len() < count {
        storage.poll_completions(&mut all);
        if all.len() < count {
            signal.wait_take().await;
        }
    }
    all
}

/// Reads a whole log.
pub async fn read_all(storage: &Storage, log: LogRef) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    let mut from = storage.base(log);
    while from < storage.durable_tail(log) {
        let batch = storage.read(log, from, 100_000).await.expect("reads");
        assert_eq!(batch.first_offset, from);
        assert!(batch.next_offset > from, "a read moves on");
        all.extend(batch.records.iter().map(|record| record.to_vec()));
        from = batch.next_offset;
    }
    all
}

/// The payload of a record; its length varies and depends on nothing else.
pub fn payload(shard: u32, offset: u64) -> Vec<u8> {
    let len = match offset % 11 {
        0 => 0,
        7 => 5000,
        n => (n as usize) * 37,
    };
    let mut bytes = vec![(offset % 251) as u8; len];
    if len >= 12 {
        bytes[..4].copy_from_slice(&shard.to_le_bytes());
        bytes[4..12].copy_from_slice(&offset.to_le_bytes());
    }
    bytes
}
