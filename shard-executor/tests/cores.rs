//! Two real executors: start, wakes across cores, UDP readiness, alarms, stop.
//!
//! One test only: every executor leaks a descriptor for the life of the process.

use std::future::poll_fn;
use std::net::UdpSocket;
use std::path::PathBuf;
use std::sync::mpsc;
use std::task::Poll;
use std::time::{Duration, Instant};

use shard_executor::rt::{self, spawn_core, Alarm, CoreSpec, ReadReady, StartError};
use shard_executor::{inbox, Inbox, Mesh, MeshPort, Signal};

const ROUND_TRIPS: u64 = 200;
const BURST: u64 = 5_000;
const LANE_CAPACITY: usize = 64;

async fn next_message(port: &mut MeshPort<u64>) -> u64 {
    loop {
        let mut got = None;
        port.drain(1, |_, value| got = Some(value));
        if let Some(value) = got {
            return value;
        }
        poll_fn(|cx| port.poll_readable(cx)).await;
    }
}

async fn send(port: &mut MeshPort<u64>, to: usize, mut value: u64) {
    loop {
        match port.try_send(to, value) {
            Ok(()) => return,
            Err(full) => {
                assert!(!full.closed, "the peer must outlive the test");
                value = full.value;
                port.flush_wakes();
                rt::sleep(Duration::from_micros(200)).await;
            }
        }
    }
}

/// Answers every message by its successor until the burst is through, then waits for the stop.
async fn echo_core(mut port: MeshPort<u64>, mut commands: Inbox<&'static str>) -> u64 {
    for _ in 0..ROUND_TRIPS {
        let value = next_message(&mut port).await;
        send(&mut port, 0, value + 1).await;
        port.flush_wakes();
    }
    for expected in 0..BURST {
        assert_eq!(
            next_message(&mut port).await,
            expected,
            "order within a lane"
        );
    }
    send(&mut port, 0, u64::MAX).await;
    port.flush_wakes();
    assert_eq!(commands.recv().await, Some("stop"));
    port.counters().received()
}

async fn asking_core(mut port: MeshPort<u64>) -> Vec<Duration> {
    let mut times = Vec::new();
    for round in 0..ROUND_TRIPS {
        // Both sides are asleep at the start of each round.
        rt::sleep(Duration::from_millis(1)).await;
        let start = Instant::now();
        send(&mut port, 1, round).await;
        port.flush_wakes();
        assert_eq!(next_message(&mut port).await, round + 1);
        times.push(start.elapsed());
    }
    for value in 0..BURST {
        send(&mut port, 1, value).await;
        if value % 16 == 15 {
            port.flush_wakes();
        }
    }
    port.flush_wakes();
    assert_eq!(next_message(&mut port).await, u64::MAX);
    udp_readiness().await;
    alarms_and_signals().await;
    times
}

async fn udp_readiness() {
    let receiver = UdpSocket::bind("127.0.0.1:0").expect("bind");
    receiver.set_nonblocking(true).expect("non-blocking");
    let address = receiver.local_addr().expect("address");
    let sender = UdpSocket::bind("127.0.0.1:0").expect("bind");
    let mut ready = ReadReady::new(&receiver).expect("watch");
    let mut buffer = [0_u8; 64];
    for round in 0..20_u8 {
        // Not ready while nothing is there, also after having been ready before.
        let idle = poll_fn(|cx| Poll::Ready(ready.poll_ready(cx).is_pending())).await;
        assert!(idle, "round {round}: ready without a datagram");
        let late_sender = sender.try_clone().expect("clone");
        rt::spawn_local(async move {
            rt::sleep(Duration::from_millis(2)).await;
            late_sender.send_to(&[round; 3], address).expect("send");
        })
        .detach();
        poll_fn(|cx| ready.poll_ready(cx)).await.expect("readiness");
        let (length, _) = receiver
            .recv_from(&mut buffer)
            .expect("the datagram is still there");
        assert_eq!(buffer[..length], [round; 3]);
    }
    assert_eq!(ready.ready_count(), 20);
    assert_eq!(
        ready.socket_error_count(),
        0,
        "O_NONBLOCK must not defeat the ring"
    );
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
    assert!(
        ReadReady::new(&listener).is_err(),
        "a stream socket is refused"
    );
}

async fn alarms_and_signals() {
    let mut alarm = Alarm::new();
    let start = Instant::now();
    alarm.set(Some(start + Duration::from_secs(60)));
    assert!(poll_fn(|cx| Poll::Ready(alarm.poll_expired(cx).is_pending())).await);
    alarm.set(Some(start + Duration::from_millis(5)));
    assert!(poll_fn(|cx| Poll::Ready(alarm.poll_expired(cx).is_pending())).await);
    // Later than armed: the early timer must not count.
    let late = Instant::now() + Duration::from_millis(20);
    alarm.set(Some(late));
    poll_fn(|cx| alarm.poll_expired(cx)).await;
    assert!(Instant::now() >= late);
    assert!(late.elapsed() < Duration::from_secs(5));

    let signal = Signal::new();
    let setter = signal.clone();
    let task = rt::spawn_local(async move {
        rt::yield_now().await;
        setter.set();
        7
    });
    signal.wait_take().await;
    assert!(!signal.is_set());
    assert_eq!(task.await, 7);
}

fn spec(core: usize, warm_up_file: PathBuf) -> CoreSpec {
    CoreSpec {
        warm_up_file: Some(warm_up_file),
        ..CoreSpec::new(core)
    }
}

#[test]
fn two_cores_wake_each_other_and_stop() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("directory");
    let file = rt::prepare_warm_up_file(dir.path()).expect("warm-up file");
    let missing = spawn_core(spec(0, dir.path().join("missing")), || async {});
    assert!(matches!(
        missing.err(),
        Some(StartError::WarmUp { core: 0, .. })
    ));
    let no_cpu = spawn_core(
        CoreSpec {
            cpu: Some(9_999),
            ..CoreSpec::new(2)
        },
        || async {},
    );
    assert!(matches!(
        no_cpu.err(),
        Some(StartError::NoSuchCpu {
            core: 2,
            cpu: 9_999
        })
    ));
    let no_depth = spawn_core(
        CoreSpec {
            ring_depth: 0,
            ..CoreSpec::new(2)
        },
        || async {},
    );
    assert!(matches!(
        no_depth.err(),
        Some(StartError::Invalid { core: 2, .. })
    ));

    let mut ports = Mesh::<u64>::new(2, LANE_CAPACITY).into_iter();
    let (asking_port, echo_port) = (ports.next().expect("port"), ports.next().expect("port"));
    let asked = asking_port.counters();
    let (commands, inbox) = inbox::<&'static str>(4);
    let echo =
        spawn_core(spec(1, file.clone()), move || echo_core(echo_port, inbox)).expect("core 1");
    let asking = spawn_core(spec(0, file), move || asking_core(asking_port)).expect("core 0");
    let heartbeat = asking.heartbeat();

    let (done, finished) = mpsc::channel();
    std::thread::spawn(move || done.send(asking.join()));
    let mut times = finished
        .recv_timeout(Duration::from_secs(60))
        .expect("a wake was lost")
        .expect("core 0 ends well");
    commands.try_send("stop").expect("room");
    let received = echo.join().expect("core 1 ends well");
    assert_eq!(received, ROUND_TRIPS + BURST);
    assert_eq!(asked.sent(), ROUND_TRIPS + BURST);
    assert!(heartbeat.beats() > 10);
    times.sort();
    println!(
        "parked round trip p50 {:?}, p99 {:?}",
        times[times.len() / 2],
        times[times.len() * 99 / 100]
    );
}
