//! Cores that go wrong: a panic without the exit hook, a loop that does not turn; and the one
//! wrong guess of the executor that the warm-up file prevents.
//!
//! Few executors: each leaks a descriptor for the life of the process.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use glommio::io::OpenOptions;
use shard_executor::rt::{self, spawn_core, CoreError, CoreSpec};
use shard_executor::stall::StallEvent;
use shard_executor::StallMonitor;

#[test]
fn a_panic_reaches_the_one_who_joins() {
    for in_task in [false, true] {
        let core = spawn_core(CoreSpec::new(5), move || async move {
            if in_task {
                rt::spawn_local(async { panic!("broken on purpose") }).detach();
                rt::sleep(Duration::from_secs(30)).await;
            }
            panic!("broken on purpose");
        });
        let start = Instant::now();
        let ended: Result<(), CoreError> = core.expect("starts").join();
        match ended {
            Err(CoreError::Panicked { core: 5, message }) => {
                assert_eq!(message, "broken on purpose");
            }
            other => unreachable!("{other:?}"),
        }
        assert!(start.elapsed() < Duration::from_secs(20));
    }
}

#[test]
fn a_blocked_core_is_seen_to_stall_and_to_recover() {
    let core = spawn_core(CoreSpec::new(3), || async {
        rt::sleep(Duration::from_millis(200)).await;
        // The mistake this is about: blocking a core.
        std::thread::sleep(Duration::from_millis(1_000));
        rt::sleep(Duration::from_millis(500)).await;
    })
    .expect("starts");
    let (events, seen) = mpsc::channel();
    let watched = vec![(3, core.heartbeat())];
    let monitor = StallMonitor::start(Duration::from_millis(300), watched, move |event| {
        events.send(event).expect("the test listens");
    })
    .expect("starts");
    core.join().expect("ends well");
    let next = || {
        seen.recv_timeout(Duration::from_secs(10))
            .expect("an event")
    };
    assert!(matches!(next(), StallEvent::Stalled { core: 3, .. }));
    assert!(matches!(next(), StallEvent::Recovered { core: 3, .. }));
    assert_eq!(monitor.stalls(), 1);
}

/// CPU time of one small append and sync to a file that was empty when it was opened.
fn cpu_of_an_append(warm_up: bool) -> Duration {
    const APPENDS: u32 = 50;
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("directory");
    let warm = rt::prepare_warm_up_file(dir.path()).expect("warm-up file");
    let path = dir.path().join("empty");
    let spec = CoreSpec {
        warm_up_file: warm_up.then_some(warm),
        ..CoreSpec::new(0)
    };
    let core = spawn_core(spec, move || async move {
        let mut options = OpenOptions::new();
        options.create(true).read(true).write(true);
        let file = options.dma_open(&path).await.expect("opens");
        let before = thread_cpu();
        for block in 0..u64::from(APPENDS) {
            let buffer = file.alloc_dma_buffer(4096);
            file.write_at(buffer, block * 4096).await.expect("writes");
            file.fdatasync().await.expect("syncs");
        }
        let used = thread_cpu() - before;
        file.close().await.expect("closes");
        used / APPENDS
    });
    core.expect("starts").join().expect("ends")
}

fn thread_cpu() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is live for the call.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    assert_eq!(result, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Without the warm-up the executor polls for completions: some 0.5 to 5 ms of CPU an append where
/// 0.1 is right (CPU time, so that a busy host does not matter).
#[test]
fn a_warmed_up_core_does_not_spin() {
    let warm = cpu_of_an_append(true);
    let cold = cpu_of_an_append(false);
    println!("CPU of an append: {warm:?} warmed up, {cold:?} without");
    assert!(
        warm < Duration::from_micros(400),
        "{warm:?} of CPU an append"
    );
}

/// A loop that turns for other reasons asks a quiet socket again and again. Each of those polls must
/// leave nothing behind: a task's waker can be copied 32,767 times before the executor gives up.
#[test]
fn a_quiet_socket_may_be_asked_any_number_of_times() {
    const POLLS: usize = 70_000;
    let core = spawn_core(CoreSpec::new(6), || async {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").expect("binds");
        let addr = socket.local_addr().expect("has an address");
        let mut ready = rt::ReadReady::new(&socket).expect("a datagram socket");
        let mut polls = 0;
        std::future::poll_fn(|cx| {
            assert!(ready.poll_ready(cx).is_pending(), "nothing was sent yet");
            polls += 1;
            if polls == POLLS {
                return std::task::Poll::Ready(());
            }
            cx.waker().wake_by_ref();
            std::task::Poll::Pending
        })
        .await;
        let sender = std::net::UdpSocket::bind("127.0.0.1:0").expect("binds");
        sender.send_to(b"now", addr).expect("sends");
        std::future::poll_fn(|cx| ready.poll_ready(cx))
            .await
            .expect("readable");
        ready.ready_count()
    })
    .expect("starts");
    assert_eq!(core.join().expect("no panic"), 1);
}
