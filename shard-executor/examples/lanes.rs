//! What a hop between two cores costs on this machine, beside what two plain threads need.
//!
//! `cargo run --release -p shard-executor --example lanes -- [--cpus A,B] [--rounds N] [--spin-us N]`
//!
//! Each repetition runs, one after the other: two threads that park and unpark each other (the
//! yardstick), two cores that sleep between messages, two cores that spin before they sleep, and a
//! stream of small items through one lane. At the end: how long a message to a busy core waits for
//! two lengths of its time slice, and what an idle core costs. Compare within one run only:
//! machines drift.

use std::future::poll_fn;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use shard_executor::rt::{self, spawn_core, CoreSpec};
use shard_executor::topology::{parse_cpu_list, pin_current_thread};
use shard_executor::{Mesh, MeshPort};

const REPETITIONS: usize = 5;
const STREAM_ITEMS: u64 = 5_000_000;
const LANE_CAPACITY: usize = 1_024;
const WAKE_EVERY: u64 = 64;

struct Options {
    cpus: [usize; 2],
    rounds: u64,
    spin_us: u64,
}

fn main() {
    let options = options();
    println!(
        "cpus {:?}, {} round trips, medians in us",
        options.cpus, options.rounds
    );
    println!(
        "threads p50  p99 | parked p50  p99 ratio | spin p50  p99 ratio | stream M/s wakes/1k"
    );
    for _ in 0..REPETITIONS {
        let threads = percentiles(thread_round_trips(&options));
        let parked = percentiles(core_round_trips(&options, 0));
        let spun = percentiles(core_round_trips(&options, options.spin_us));
        let (rate, wakes) = stream(&options);
        println!(
            "{:11.1} {:4.0} | {:10.1} {:4.0} {:5.2} | {:8.1} {:4.0} {:5.2} | {:10.1} {:8.2}",
            threads.0,
            threads.1,
            parked.0,
            parked.1,
            parked.0 / threads.0,
            spun.0,
            spun.1,
            spun.0 / threads.0,
            rate / 1e6,
            wakes * 1e3,
        );
    }
    for preempt_ms in [1, 10] {
        let (p50, p99) = percentiles(busy_delivery(&options, preempt_ms));
        println!("message to a core busy in 300 us pieces, slice {preempt_ms} ms: p50 {p50:.0} us, p99 {p99:.0} us");
    }
    for spin_us in [0, options.spin_us] {
        let share = idle_share(&options, spin_us) * 100.0;
        println!("an idle core, spin {spin_us} us: {share:.1} % of a CPU");
    }
}

fn options() -> Options {
    let mut options = Options {
        cpus: [0, 1],
        rounds: 5_000,
        spin_us: 50,
    };
    let mut words = std::env::args().skip(1);
    while let (Some(flag), Some(value)) = (words.next(), words.next()) {
        let number = value.parse::<u64>();
        match (flag.as_str(), number) {
            ("--cpus", _) => match parse_cpu_list(&value).as_deref() {
                Ok(&[a, b]) => options.cpus = [a, b],
                _ => usage(),
            },
            ("--rounds", Ok(rounds)) => options.rounds = rounds.max(1),
            ("--spin-us", Ok(spin_us)) => options.spin_us = spin_us,
            _ => usage(),
        }
    }
    options
}

fn usage() -> ! {
    eprintln!("usage: lanes [--cpus A,B] [--rounds N] [--spin-us N]");
    std::process::exit(2)
}

fn percentiles(mut times: Vec<Duration>) -> (f64, f64) {
    times.sort_unstable();
    let at = |part: usize| times[(times.len() - 1) * part / 100].as_secs_f64() * 1e6;
    (at(50), at(99))
}

/// Two pinned threads hand a counter back and forth, sleeping in between.
fn thread_round_trips(options: &Options) -> Vec<Duration> {
    let counter = Arc::new(AtomicU64::new(0));
    let (rounds, [near, far]) = (options.rounds, options.cpus);
    let (asker, answers) = (std::thread::current(), counter.clone());
    let echo = std::thread::spawn(move || {
        pin(far);
        for round in 0..rounds {
            wait_for(&answers, 2 * round + 1);
            answers.store(2 * round + 2, Ordering::Release);
            asker.unpark();
        }
    });
    pin(near);
    let times = (0..rounds)
        .map(|round| {
            let start = Instant::now();
            counter.store(2 * round + 1, Ordering::Release);
            echo.thread().unpark();
            wait_for(&counter, 2 * round + 2);
            start.elapsed()
        })
        .collect();
    echo.join().expect("the echo thread ends");
    times
}

fn wait_for(counter: &AtomicU64, value: u64) {
    while counter.load(Ordering::Acquire) != value {
        std::thread::park();
    }
}

fn pin(cpu: usize) {
    pin_current_thread(&[cpu]).expect("the CPU is usable");
}

/// Two cores hand a number back and forth over their lanes.
fn core_round_trips(options: &Options, spin_us: u64) -> Vec<Duration> {
    let rounds = options.rounds;
    on_two_cores(
        options,
        spin_us,
        move |mut port| async move {
            let mut times = Vec::with_capacity(rounds as usize);
            for round in 0..rounds {
                let start = Instant::now();
                send(&mut port, 1, round).await;
                port.flush_wakes();
                receive(&mut port).await;
                times.push(start.elapsed());
            }
            times
        },
        move |mut port| async move {
            for _ in 0..rounds {
                let value = receive(&mut port).await;
                send(&mut port, 0, value).await;
                port.flush_wakes();
            }
        },
    )
}

/// Items per second through one lane, and wakes per item.
fn stream(options: &Options) -> (f64, f64) {
    let start = Instant::now();
    let wakes = on_two_cores(
        options,
        0,
        |mut port| async move {
            for value in 0..STREAM_ITEMS {
                send(&mut port, 1, value).await;
                if value % WAKE_EVERY == 0 {
                    port.flush_wakes();
                }
            }
            port.flush_wakes();
            receive(&mut port).await
        },
        |mut port| async move {
            let mut expected = 0;
            while expected < STREAM_ITEMS {
                poll_fn(|cx| port.poll_readable(cx)).await;
                port.drain(LANE_CAPACITY, |_, value| {
                    assert_eq!(value, expected);
                    expected += 1;
                });
                rt::yield_if_needed().await;
            }
            let (wakes, _) = port.wakes_received();
            send(&mut port, 0, wakes).await;
            port.flush_wakes();
        },
    );
    let items = STREAM_ITEMS as f64;
    (items / start.elapsed().as_secs_f64(), wakes as f64 / items)
}

/// How long messages wait for a core that always has something else to do.
fn busy_delivery(options: &Options, preempt_ms: u64) -> Vec<Duration> {
    const MESSAGES: usize = 100;
    let mut ports = Mesh::new(2, LANE_CAPACITY);
    let (far, near) = (
        ports.pop().expect("two ports"),
        ports.pop().expect("two ports"),
    );
    let (mut far, mut near): (MeshPort<Instant>, MeshPort<Instant>) = (far, near);
    let spec = |core: usize| CoreSpec {
        cpu: Some(options.cpus[core]),
        preempt_ms,
        ..CoreSpec::new(core)
    };
    let busy = spawn_core(spec(1), move || async move {
        let work = rt::spawn_local(async {
            loop {
                let until = Instant::now() + Duration::from_micros(300);
                while Instant::now() < until {
                    std::hint::spin_loop();
                }
                rt::yield_if_needed().await;
            }
        });
        let mut times = Vec::new();
        while times.len() < MESSAGES {
            poll_fn(|cx| far.poll_readable(cx)).await;
            far.drain(LANE_CAPACITY, |_, sent: Instant| times.push(sent.elapsed()));
        }
        let _: Option<()> = work.cancel().await;
        times
    })
    .expect("core 1 starts");
    let sender = spawn_core(spec(0), move || async move {
        for _ in 0..MESSAGES {
            rt::sleep(Duration::from_millis(7)).await;
            near.try_send(1, Instant::now()).expect("room");
            near.flush_wakes();
        }
    })
    .expect("core 0 starts");
    sender.join().expect("core 0 ends");
    busy.join().expect("core 1 ends")
}

/// The share of a CPU that a core with nothing to do uses (its heartbeat, and its spinning).
fn idle_share(options: &Options, spin_us: u64) -> f64 {
    const SPAN: Duration = Duration::from_secs(2);
    let spec = CoreSpec {
        cpu: Some(options.cpus[1]),
        spin_us,
        ..CoreSpec::new(0)
    };
    let core = spawn_core(spec, || async {
        let before = thread_cpu();
        rt::sleep(SPAN).await;
        thread_cpu() - before
    });
    let used = core.expect("core 0 starts").join().expect("core 0 ends");
    used.as_secs_f64() / SPAN.as_secs_f64()
}

fn thread_cpu() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is live for the call.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    assert_eq!(result, 0, "the clock exists");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn on_two_cores<R, A, AFut, B, BFut>(options: &Options, spin_us: u64, a: A, b: B) -> R
where
    R: Send + 'static,
    A: FnOnce(MeshPort<u64>) -> AFut + Send + 'static,
    AFut: std::future::Future<Output = R> + 'static,
    B: FnOnce(MeshPort<u64>) -> BFut + Send + 'static,
    BFut: std::future::Future<Output = ()> + 'static,
{
    let mut ports = Mesh::new(2, LANE_CAPACITY);
    let (far, near) = (
        ports.pop().expect("two ports"),
        ports.pop().expect("two ports"),
    );
    let spec = |core: usize| CoreSpec {
        cpu: Some(options.cpus[core]),
        spin_us,
        ..CoreSpec::new(core)
    };
    let b = spawn_core(spec(1), move || b(far)).expect("core 1 starts");
    let a = spawn_core(spec(0), move || a(near)).expect("core 0 starts");
    let result = a.join().expect("core 0 ends");
    b.join().expect("core 1 ends");
    result
}

async fn send(port: &mut MeshPort<u64>, to: usize, mut value: u64) {
    while let Err(refused) = port.try_send(to, value) {
        value = refused.value;
        port.flush_wakes();
        // The receiver needs its turn, on a machine where both may share a CPU too.
        rt::yield_if_needed().await;
    }
}

async fn receive(port: &mut MeshPort<u64>) -> u64 {
    loop {
        let mut got = None;
        port.drain(1, |_, value| got = Some(value));
        if let Some(value) = got {
            return value;
        }
        poll_fn(|cx| port.poll_readable(cx)).await;
    }
}
