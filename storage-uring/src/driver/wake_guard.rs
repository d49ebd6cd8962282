//! Keeps an executor from sleeping over tasks that are ready.
//!
//! glommio 0.9 parks although tasks are ready when it was preempted before it ran any of them
//! (`run_task_queues` answers "nothing ran"). A periodic task does not help by itself: its timer may have
//! fired, so that it is one of the tasks that are ready and not run. What helps is a timer that has not
//! fired yet: it ends the sleep, and the next round runs everything.
//!
//! Invariant: whenever the executor parks, a timer of at most `GUARDS[0]` is pending, or, when that one fired
//! in the same round, of at most the next.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Waker};
use std::time::Duration;

use glommio::timer::Timer;

/// How often the guards are set anew.
const PERIOD: Duration = Duration::from_millis(10);
/// Guards behind the period; each is for the case that all before it fired in one round.
const GUARDS: [Duration; 3] = [
    Duration::from_millis(25),
    Duration::from_millis(250),
    Duration::from_millis(2500),
];

/// Runs for ever; drop the task to end it.
pub(super) async fn guard() {
    loop {
        let mut guards = GUARDS.map(Timer::new);
        for guard in &mut guards {
            // Registers the timer. Nobody has to be told when it fires.
            let _pending = Pin::new(guard).poll(&mut Context::from_waker(Waker::noop()));
        }
        shard_executor::rt::sleep(PERIOD).await;
        drop(guards);
    }
}
