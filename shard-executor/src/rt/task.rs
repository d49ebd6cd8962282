//! Tasks, sleeping and yielding inside a core.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

/// A task of this core. Dropping it cancels the task; [`Task::detach`] lets it run on.
#[must_use = "dropping a task cancels it; detach it to let it run"]
pub struct Task<T>(glommio::Task<T>);

/// The result of a detached task.
pub struct TaskHandle<T>(glommio::task::JoinHandle<T>);

/// The task was cancelled or panicked before it finished.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the task ended without a result")]
pub struct TaskEnded;

impl<T: 'static> Task<T> {
    /// Lets the task run to its end; the handle may be dropped.
    pub fn detach(self) -> TaskHandle<T> {
        TaskHandle(self.0.detach())
    }

    /// Cancels the task and waits until it has stopped; the result if it had finished already.
    pub async fn cancel(self) -> Option<T> {
        self.0.cancel().await
    }
}

impl<T> Future for Task<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        Pin::new(&mut self.0).poll(cx)
    }
}

impl<T> Future for TaskHandle<T> {
    type Output = Result<T, TaskEnded>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0)
            .poll(cx)
            .map(|result| result.ok_or(TaskEnded))
    }
}

/// Starts a task on this core, in the one task queue.
///
/// # Panics
/// Outside a core started by [`super::spawn_core`].
pub fn spawn_local<T: 'static>(future: impl Future<Output = T> + 'static) -> Task<T> {
    Task(glommio::spawn_local(future))
}

/// Sleeps for `duration` without blocking the core.
pub async fn sleep(duration: Duration) {
    glommio::timer::sleep(duration).await;
}

/// Sleeps until `deadline`; returns at once when it has passed.
pub async fn sleep_until(deadline: Instant) {
    let left = deadline.saturating_duration_since(Instant::now());
    if !left.is_zero() {
        sleep(left).await;
    }
}

/// Lets the other ready tasks of this core run once. I/O is looked at when the time slice ends.
pub async fn yield_now() {
    glommio::executor().yield_now().await;
}

/// Gives the executor its turn when this task has used up its time slice; otherwise costs one
/// load. Belongs into every loop whose length a peer or a disk decides.
pub async fn yield_if_needed() {
    glommio::yield_if_needed().await;
}
