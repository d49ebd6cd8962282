//! What the append path and idle logs cost in memory, counted at the allocator.
#![cfg(feature = "runtime")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::Path;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::Mutex;

use shard_executor::rt::{spawn_core, CoreSpec};
use storage_uring::slab::huge_slabs_made;
use storage_uring::{recover, LogKind, LogName, LogRef, Storage, StorageConfig};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}
/// Of all threads: what one allocates another may free.
static HELD_BYTES: AtomicI64 = AtomicI64::new(0);
/// One test at a time, so that it counts only its own.
static ALONE: Mutex<()> = Mutex::new(());

/// Counts what each thread asks for.
struct Counting;

fn count(allocations: u64, bytes: i64) {
    // A thread that is ending may have no counters left; what it does then is not measured.
    let _ = ALLOCATIONS.try_with(|cell| cell.set(cell.get() + allocations));
    HELD_BYTES.fetch_add(bytes, Ordering::Relaxed);
}

fn held_bytes() -> i64 {
    HELD_BYTES.load(Ordering::Relaxed)
}

// SAFETY: every call goes to the system's allocator unchanged; the counters are plain thread-local cells.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(1, layout.size() as i64);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(0, -(layout.size() as i64));
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count(1, bytes as i64 - layout.size() as i64);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.realloc(at, layout, bytes) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

fn config(dir: &Path) -> StorageConfig {
    StorageConfig {
        segment_bytes: 8 << 20,
        recent_bytes: 1 << 20,
        reserve_bytes: 0,
        low_space_bytes: 0,
        ..StorageConfig::new(dir, 0, 1)
    }
}

fn disk_dir() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory under target/")
}

fn log(storage: &Storage, shard: u32) -> LogRef {
    let name = LogName {
        kind: LogKind::Stream,
        tenant: "acme".into(),
        namespace: "prod".into(),
        name: "orders".into(),
        shard,
    };
    storage.open_log(&name).expect("opens")
}

fn on_core<R, F, Fut>(dir: &Path, body: F) -> R
where
    R: Send + 'static,
    F: FnOnce(Storage) -> Fut + Send + 'static,
    Fut: std::future::Future<Output = R> + 'static,
{
    let config = config(dir);
    let recovered = recover(&config.dir, 1).expect("recovers");
    let core = spawn_core(CoreSpec::new(0), move || async move {
        let storage = Storage::open(config, recovered).await.expect("opens");
        body(storage).await
    });
    core.expect("starts").join().expect("runs")
}

/// Appends `records` one by one, `burst` at a time, and takes their outcomes.
async fn append(storage: &Storage, logs: &[LogRef], records: u64, burst: u64) {
    let payload = [7u8; 100];
    let signal = storage.signal();
    let mut done = Vec::with_capacity(burst as usize);
    for _ in 0..records / burst {
        for token in 0..burst {
            let log = logs[(token % logs.len() as u64) as usize];
            let records = std::iter::once(&payload[..]);
            storage.append(log, 1, 1, records, token).expect("appends");
        }
        storage.kick();
        let mut left = burst as usize;
        while left > 0 {
            storage.poll_completions(&mut done);
            assert!(done.iter().all(|done| done.result.is_ok()));
            left -= done.len();
            if done.is_empty() {
                signal.wait_take().await;
            }
            done.clear();
        }
    }
}

/// Everything that grows with the number of appends would show: the two runs differ tenfold in records per
/// commit and not in commits.
#[test]
fn an_append_allocates_nothing() {
    let _alone = ALONE.lock();
    for shards in [1, 50] {
        let dir = disk_dir();
        let (small, large, index) = on_core(dir.path(), move |storage| async move {
            let logs: Vec<LogRef> = (0..shards).map(|shard| log(&storage, shard)).collect();
            // Buffers, lists and queues reach the size they keep.
            append(&storage, &logs, 60_000, 2_000).await;
            let mut fewest = (0, u64::MAX, 0);
            for _ in 0..ATTEMPTS {
                let counted = count_two_runs(&storage, &logs).await;
                if counted.1.saturating_sub(counted.0) < fewest.1.saturating_sub(fewest.0) {
                    fewest = counted;
                }
                if fewest.1 < fewest.0 + FEW {
                    break;
                }
            }
            fewest
        });
        println!("{shards} shards: {small} allocations for 4,000 appends, {large} for 40,000, {index} index entries");
        assert!(
            large < small + FEW,
            "{shards} shards: {small} allocations for 4,000 appends, {large} for 40,000"
        );
    }
}

/// A sleep and a wake of the executor cost some allocations. There are about as many in both runs when the
/// device keeps up; when it does not, there are more, so the run with the fewest counts.
const ATTEMPTS: usize = 10;
/// A log's index grows by an entry every 32 KiB, in place but for the doublings.
const FEW: u64 = 400;

/// Allocations of 4,000 appends, of 40,000, and entries of the index that came with both.
async fn count_two_runs(storage: &Storage, logs: &[LogRef]) -> (u64, u64, u64) {
    let entries = storage.stats().index_entries;
    let before = ALLOCATIONS.get();
    let slabs = huge_slabs_made();
    append(storage, logs, 200 * 20, 200).await;
    let between = ALLOCATIONS.get();
    append(storage, logs, 2_000 * 20, 2_000).await;
    let after = ALLOCATIONS.get();
    assert!(
        huge_slabs_made() <= slabs + 1,
        "{} slabs",
        huge_slabs_made()
    );
    let grown = storage.stats().index_entries - entries;
    (between - before, after - between, grown)
}

#[test]
fn an_idle_log_takes_little_memory() {
    const SHARDS: u32 = 10_000;
    let _alone = ALONE.lock();
    let dir = disk_dir();
    let never_written = on_core(dir.path(), |storage| async move {
        let before = held_bytes();
        let logs: Vec<LogRef> = (0..SHARDS).map(|shard| log(&storage, shard)).collect();
        let held = held_bytes() - before;
        append(&storage, &logs, u64::from(SHARDS), 5_000).await;
        storage.close().await.expect("closes");
        held / i64::from(SHARDS)
    });
    // With all that a core has besides its logs.
    let before = held_bytes();
    let recovered = on_core(dir.path(), move |storage| async move {
        let logs: Vec<LogRef> = (0..SHARDS).map(|shard| log(&storage, shard)).collect();
        let tails: u64 = logs.iter().map(|log| storage.tail(*log)).sum();
        assert_eq!(tails, u64::from(SHARDS));
        (held_bytes() - before) / i64::from(SHARDS)
    });
    println!("bytes of an idle log: {never_written} never written, {recovered} recovered");
    assert!(never_written < 4096, "{never_written} bytes");
    assert!(recovered < 4096, "{recovered} bytes");
}
