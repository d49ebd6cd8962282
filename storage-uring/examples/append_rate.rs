//! Rates of one core log beside raw writes of the same sizes; for work on the storage, where `felix-bench
//! append` would take too long to build. The shapes whose name contains WORD, or all.
//!
//! `cargo run --release -p storage-uring --example append_rate -- DIR [SECONDS] [ROUNDS] [CPU] [EARLY_KIB] [WORD]`

use std::path::PathBuf;
use std::time::Duration;

use storage_uring::bench::{bench_append, bench_read, AppendBench, RawFiles, ReadBench};
use storage_uring::StorageError;

fn main() -> Result<(), StorageError> {
    let mut arguments = std::env::args().skip(1);
    let dir = PathBuf::from(arguments.next().unwrap_or_else(|| ".".to_owned()));
    let mut number = || arguments.next().and_then(|text| text.parse::<f64>().ok());
    let duration = Duration::from_secs_f64(number().unwrap_or(1.0));
    let rounds = number().unwrap_or(1.0) as usize;
    let cpu = number().map(|cpu| cpu as usize);
    let early = number().unwrap_or(256.0) as usize * 1024;
    let word = arguments.next().unwrap_or_default();
    let mut raw = RawFiles::prepare(&dir, 24, 64 << 20, cpu)?;
    for bytes in [4096, 16_384, 65_536, 131_072, 262_144, 524_288, 1 << 20] {
        for depth in [1, 2] {
            if !"raw".contains(&word) {
                continue;
            }
            let found = raw.write(&[bytes], depth, duration / 4)?;
            println!(
                "raw {bytes:>8} B x{depth}: {:>7.0} writes/s {:>7.1} MB/s p50 {:>5} us p99 {:>5} us cpu {:.2}",
                found.writes_per_s, found.mb_per_s, found.latency_us.p50, found.latency_us.p99, found.cpu_share
            );
        }
    }
    for (what, bench) in shapes() {
        if !what.contains(&word) {
            continue;
        }
        for _ in 0..rounds {
            let bench = AppendBench {
                duration,
                cpu,
                early_commit_bytes: early,
                ..bench.clone()
            };
            let found = bench_append(&dir, &bench)?;
            let limit = raw.write(&found.sizes, bench.commits_in_flight, duration / 2)?;
            println!(
                "{what:<28} {:>10.0}/s {:>7.1} MB/s ratio {:.2} | {:>7.1} rec, {:>7.0} B a commit | p50 {:>5} p99 {:>6} | cpu {:.3} s/M, {:.2} | raw cpu {:.2} | zeroed {} waits {} tail {}",
                found.records_per_s(),
                found.disk_mb_per_s(),
                found.disk_mb_per_s() / limit.mb_per_s,
                found.records_per_commit(),
                found.bytes_per_commit(),
                found.latency_us.p50,
                found.latency_us.p99,
                found.cpu_s / (found.records as f64 / 1e6),
                found.cpu_s / found.seconds,
                limit.cpu_share,
                found.segments_zeroed,
                found.segment_waits,
                found.tail_records,
            );
        }
    }
    for (shards, read_bytes) in [(1, 1 << 20), (1, 64 << 10), (64, 1 << 20), (10_000, 0)] {
        if !"cold reads".contains(&word) {
            continue;
        }
        let bench = ReadBench {
            shards,
            payload_bytes: 1024,
            batch: 64,
            total_bytes: 512 << 20,
            read_bytes,
            cpu,
        };
        let found = bench_read(&dir, &bench)?;
        println!(
            "cold reads, {shards} shards, {} KiB: {:.0} MB/s payload, {:.0} MB/s device in {:.0} B, raw {:.0} MB/s, ratio {:.2}, cpu {:.2}; recovery {:.2} s, {:.2} s/GiB",
            read_bytes >> 10,
            found.payload_mb_per_s,
            found.device_mb_per_s,
            found.device_read_bytes,
            found.raw.mb_per_s,
            found.ratio(),
            found.cpu_share,
            found.recovery_s,
            found.recovery_s_per_gib()
        );
    }
    Ok(())
}

fn shapes() -> Vec<(&'static str, AppendBench)> {
    let fresh = |bench: AppendBench, spares| AppendBench { spares, ..bench };
    let group = |shards, bytes: usize, payload: usize| AppendBench {
        commit_max_bytes: bytes,
        outstanding: (bytes * 6 / payload).max(12) as u32,
        ..AppendBench::new(shards, payload)
    };
    let batches = |shards, payload| AppendBench {
        batch: 64,
        outstanding: 64,
        ..AppendBench::new(shards, payload)
    };
    vec![
        ("100 B, 1", fresh(AppendBench::new(1, 100), 16)),
        ("100 B, 1, tail reads", {
            AppendBench {
                tail_reads: true,
                ..fresh(AppendBench::new(1, 100), 16)
            }
        }),
        ("100 B, 1000", fresh(AppendBench::new(1000, 100), 16)),
        ("100 B x 64, 1", fresh(batches(1, 100), 16)),
        ("1 KiB, 1", fresh(AppendBench::new(1, 1024), 28)),
        ("1 KiB, 1000", fresh(AppendBench::new(1000, 1024), 28)),
        ("1 KiB, 1, zeroing", AppendBench::new(1, 1024)),
        ("1 KiB x 64, 1", fresh(batches(1, 1024), 28)),
        ("group 4 KiB, 1", fresh(group(1, 4096, 1200), 4)),
        (
            "group 64 KiB, 10000",
            fresh(group(10_000, 65_536, 1024), 24),
        ),
        (
            "group 1 MiB, 10000",
            fresh(group(10_000, 1 << 20, 1024), 28),
        ),
    ]
}
