//! Properties of the lanes, without executors.

use std::future::Future;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::task::{Context, Wake, Waker};

use proptest::prelude::*;
use shard_executor::{inbox, Mesh};

#[derive(Default)]
struct CountWakes(AtomicUsize);

impl Wake for CountWakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[derive(Clone, Debug)]
enum Step {
    Send { from: usize, to: usize },
    Drain { core: usize, max: usize },
}

fn step(cores: usize) -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0..cores, 0..cores).prop_map(|(from, to)| Step::Send { from, to }),
        1 => (0..cores, 0..10_usize).prop_map(|(core, max)| Step::Drain { core, max }),
    ]
}

proptest! {
    /// Against a model of plain queues: per-lane order, bound, nothing lost, full is visible.
    #[test]
    fn lanes_are_bounded_queues(
        capacity in 1..8_usize,
        steps in prop::collection::vec(step(3), 0..400),
    ) {
        let mut ports = Mesh::<u64>::new(3, capacity);
        let mut model = vec![vec![std::collections::VecDeque::new(); 3]; 3];
        let (mut next, mut full) = (0_u64, 0_u64);
        for step in steps {
            match step {
                Step::Send { from, to } => {
                    next += 1;
                    let result = ports[from].try_send(to, next);
                    if model[from][to].len() < capacity {
                        prop_assert!(result.is_ok());
                        model[from][to].push_back(next);
                    } else {
                        let refused = result.expect_err("the lane is full");
                        prop_assert_eq!((refused.value, refused.to, refused.closed), (next, to, false));
                        full += 1;
                    }
                }
                Step::Drain { core, max } => {
                    let waiting: usize = model.iter().map(|lanes| lanes[core].len()).sum();
                    prop_assert_eq!(ports[core].depth(), waiting);
                    let mut got = Vec::new();
                    let taken = ports[core].drain(max, |from, value| got.push((from, value)));
                    prop_assert_eq!(taken, waiting.min(max));
                    for (from, value) in got {
                        prop_assert_eq!(model[from][core].pop_front(), Some(value));
                    }
                }
            }
        }
        prop_assert_eq!(ports.iter().map(|port| port.counters().full()).sum::<u64>(), full);
        let sent: u64 = ports.iter().map(|port| port.counters().sent()).sum();
        let received: u64 = ports.iter().map(|port| port.counters().received()).sum();
        let waiting: usize = ports.iter().map(|port| port.depth()).sum();
        prop_assert_eq!(sent, received + waiting as u64);
    }
}

#[test]
fn one_wake_a_batch_and_none_for_an_awake_receiver() {
    let mut ports = Mesh::<u8>::new(2, 64);
    let (left, right) = ports.split_at_mut(1);
    let (sender, receiver) = (&mut left[0], &mut right[0]);
    let wakes = Arc::new(CountWakes::default());
    let waker = Waker::from(wakes.clone());
    let mut cx = Context::from_waker(&waker);

    for value in 0..10 {
        sender.try_send(1, value).expect("room");
    }
    assert_eq!(sender.flush_wakes(), 0, "the receiver never slept");
    assert!(receiver.poll_readable(&mut cx).is_ready());
    assert_eq!(receiver.drain(64, |_, _| {}), 10);
    assert!(receiver.poll_readable(&mut cx).is_pending());
    for value in 0..10 {
        sender.try_send(1, value).expect("room");
    }
    assert_eq!(
        wakes.0.load(Ordering::SeqCst),
        0,
        "sending alone wakes nobody"
    );
    assert_eq!(sender.flush_wakes(), 1);
    assert_eq!(sender.flush_wakes(), 0);
    sender.try_send(1, 0).expect("room");
    assert_eq!(sender.flush_wakes(), 0, "already woken");
    assert_eq!(wakes.0.load(Ordering::SeqCst), 1);
    assert_eq!(receiver.wakes_received(), (1, 2));
}

#[test]
fn a_busy_lane_does_not_starve_a_quiet_one() {
    let mut ports = Mesh::<u8>::new(3, 1_000);
    for _ in 0..1_000 {
        ports[0].try_send(2, 0).expect("room");
    }
    ports[1].try_send(2, 1).expect("room");
    let mut seen_quiet = false;
    ports[2].drain(64, |from, _| seen_quiet |= from == 1);
    assert!(seen_quiet);
}

#[test]
fn a_core_that_is_gone_is_told_apart_from_a_full_lane() {
    let mut ports = Mesh::<u8>::new(2, 1);
    let gone = ports.pop().expect("two ports");
    let port = &mut ports[0];
    port.try_send(1, 1).expect("room");
    assert!(!port.try_send(1, 2).expect_err("full").closed);
    drop(gone);
    assert!(port.try_send(1, 2).expect_err("closed").closed);
}

/// The sleeping protocol under real parallelism: the receiver sleeps whenever it finds nothing, and
/// every item must still arrive.
#[test]
fn no_wake_is_lost_between_two_threads() {
    struct Unpark(std::thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    const ITEMS: u64 = 50_000;
    let mut ports = Mesh::<u64>::new(2, 8).into_iter();
    let (mut sender, mut receiver) = (ports.next().expect("port"), ports.next().expect("port"));
    let reader = std::thread::spawn(move || {
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        let mut cx = Context::from_waker(&waker);
        let mut expected = 0;
        while expected < ITEMS {
            if receiver.poll_readable(&mut cx).is_pending() {
                let asleep = std::time::Instant::now();
                std::thread::park_timeout(std::time::Duration::from_secs(20));
                assert!(
                    asleep.elapsed().as_secs() < 20,
                    "a wake was lost at {expected}"
                );
            }
            receiver.drain(4, |from, value| {
                assert_eq!((from, value), (0, expected));
                expected += 1;
            });
        }
    });
    for mut value in 0..ITEMS {
        while let Err(refused) = sender.try_send(1, value) {
            assert!(!refused.closed, "the reader failed");
            value = refused.value;
            sender.flush_wakes();
            std::thread::yield_now();
        }
        if value % 3 == 0 {
            sender.flush_wakes();
        }
    }
    sender.flush_wakes();
    reader.join().expect("all items in order");
}

#[test]
fn an_inbox_is_bounded_wakes_and_ends() {
    let (sender, mut inbox) = inbox::<u8>(2);
    let wakes = Arc::new(CountWakes::default());
    let waker = Waker::from(wakes.clone());
    let mut cx = Context::from_waker(&waker);
    assert!(inbox.poll_readable(&mut cx).is_pending());
    sender.try_send(1).expect("room");
    sender.try_send(2).expect("room");
    let refused = sender.try_send(3).expect_err("full");
    assert_eq!((refused.value, refused.closed), (3, false));
    assert_eq!(wakes.0.load(Ordering::SeqCst), 1);
    assert!(inbox.poll_readable(&mut cx).is_ready());
    assert_eq!(inbox.depth(), 2);
    assert_eq!(
        (inbox.try_recv(), inbox.try_recv(), inbox.try_recv()),
        (Some(1), Some(2), None)
    );
    let counters = sender.counters();
    assert_eq!((counters.sent, counters.full, counters.wakes), (2, 1, 1));

    let last = sender.clone();
    drop(sender);
    let mut receive = std::pin::pin!(inbox.recv());
    assert!(receive.as_mut().poll(&mut cx).is_pending());
    drop(last);
    assert_eq!(wakes.0.load(Ordering::SeqCst), 2, "the end wakes too");
    assert_eq!(receive.as_mut().poll(&mut cx), std::task::Poll::Ready(None));
}
