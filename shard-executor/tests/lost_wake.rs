//! An executor that loses its CPU for a time slice at the wrong moment must not sleep for ever.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use shard_executor::rt::{self, CoreSpec};

/// Threads that take the CPU away from the core, so that it is often descheduled between arming its
/// time-slice timer and running its tasks.
fn crowd(stop: &Arc<AtomicBool>) -> Vec<std::thread::JoinHandle<()>> {
    (0..8)
        .map(|_| {
            let stop = Arc::clone(stop);
            std::thread::spawn(move || {
                shard_executor::topology::pin_current_thread(&[0]).unwrap();
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            })
        })
        .collect()
}

#[test]
fn a_crowded_core_keeps_turning() {
    let stop = Arc::new(AtomicBool::new(false));
    let mut spec = CoreSpec::new(0);
    spec.cpu = Some(0);
    let stopped = Arc::clone(&stop);
    let core = rt::spawn_core(spec, move || async move {
        let mut turns = 0u64;
        while !stopped.load(Ordering::Relaxed) {
            rt::sleep(Duration::from_micros(500)).await;
            turns += 1;
        }
        turns
    })
    .unwrap();
    let heartbeat = core.heartbeat();
    let crowd = crowd(&stop);
    let end = Instant::now() + Duration::from_secs(5);
    let (mut last, mut since) = (heartbeat.beats(), Instant::now());
    let mut longest = Duration::ZERO;
    while Instant::now() < end {
        std::thread::sleep(Duration::from_millis(5));
        let beats = heartbeat.beats();
        if beats != last {
            (last, since) = (beats, Instant::now());
        }
        longest = longest.max(since.elapsed());
    }
    stop.store(true, Ordering::Relaxed);
    for thread in crowd {
        thread.join().unwrap();
    }
    let turns = core.join().unwrap();
    assert!(turns > 100, "{turns} turns");
    assert!(longest < Duration::from_secs(1), "silent for {longest:?}");
}
