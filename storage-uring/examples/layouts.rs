//! Measures the core log against a raw probe and against one file a shard; prints one table row each.
//!
//! `cargo run --release -p storage-uring --example layouts -- DIR [SECONDS]`

use std::path::PathBuf;
use std::time::Duration;

use storage_uring::bench::{bench_append, per_shard_probe, AppendBench, RawFiles};
use storage_uring::{StorageError, SyncMethod};

fn main() -> Result<(), StorageError> {
    let mut arguments = std::env::args().skip(1);
    let dir = PathBuf::from(arguments.next().unwrap_or_else(|| ".".to_owned()));
    let seconds = arguments
        .next()
        .and_then(|text| text.parse().ok())
        .unwrap_or(1.0);
    let duration = Duration::from_secs_f64(seconds);
    println!(
        "{:<26} {:>6} {:>7} {:>9} {:>11} {:>9} {:>8} {:>8} {:>6}",
        "what", "shards", "payload", "producers", "records/s", "MB/s", "p50 us", "p99 us", "cpu"
    );
    for payload_bytes in [100, 1024] {
        for (shards, producers) in [
            (1, 1),
            (1, 64),
            (1, 1000),
            (64, 64),
            (64, 1000),
            (1000, 1000),
            (1000, 8000),
        ] {
            for (what, sync, in_flight) in [
                ("core log, O_DSYNC x2", SyncMethod::ODsync, 2),
                ("core log, O_DSYNC x1", SyncMethod::ODsync, 1),
                ("core log, fdatasync x2", SyncMethod::Fdatasync, 2),
            ] {
                let bench = AppendBench {
                    outstanding: producers,
                    duration,
                    sync,
                    commits_in_flight: in_flight,
                    cpu: Some(1),
                    ..AppendBench::new(shards, payload_bytes)
                };
                let found = bench_append(&dir, &bench)?;
                let mb = found.records_per_s() * payload_bytes as f64 / 1e6;
                println!("{what:<26} {shards:>6} {payload_bytes:>7} {producers:>9} {:>11.0} {mb:>9.1} {:>8} {:>8} {:>6.2}  ({:.1} records, {:.0} bytes a commit, {:.0} commits/s, {} waits)", found.records_per_s(), found.latency_us.p50, found.latency_us.p99, found.cpu_s / found.seconds, found.records_per_commit(), found.bytes_per_commit(), found.commits as f64 / found.seconds, found.segment_waits);
            }
            let found = per_shard_probe(
                &dir,
                shards as usize,
                payload_bytes,
                producers as usize,
                duration,
            )?;
            let mb = found.records_per_s * payload_bytes as f64 / 1e6;
            println!("{:<26} {shards:>6} {payload_bytes:>7} {producers:>9} {:>11.0} {mb:>9.1} {:>8} {:>8} {:>6.2}", "one file a shard, O_DSYNC", found.records_per_s, found.latency_us.p50, found.latency_us.p99, found.cpu_share);
        }
    }
    let mut files = RawFiles::prepare(&dir, 1, 64 << 20, Some(1))?;
    for group_bytes in [4096, 65_536, 262_144, 1 << 20] {
        for depth in [1, 2] {
            let found = files.write(&[group_bytes], depth, duration)?;
            println!("raw probe {group_bytes:>8} B x{depth}: {:>7.0} writes/s {:>8.1} MB/s, p50 {} us, p99 {} us, cpu {:.2}", found.writes_per_s, found.mb_per_s, found.latency_us.p50, found.latency_us.p99, found.cpu_share);
        }
    }
    Ok(())
}
