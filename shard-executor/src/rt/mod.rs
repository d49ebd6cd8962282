//! The seam over glommio: executors, timers, tasks.
//!
//! Duty: give the rest of the code an executor a core that behaves, whatever glommio 0.9 does
//! underneath. It opens no files except the warm-up file, and it has one task queue: a panic in a
//! task of any other queue would abort the process without a message.
//!
//! What is worked around here, and why, is listed in `docs/decisions/0002-executor.md`.
//!
//! Invariants:
//! * [`spawn_core`] returns only when the executor runs and is warmed up, or with the reason.
//! * Every executor has a heartbeat timer: no lost wake lasts longer than [`HEARTBEAT_PERIOD`].

mod alarm;
mod core;
mod error;
mod nudge;
mod read_ready;
mod task;
mod wake_guard;
mod warm_up;

pub use self::alarm::Alarm;
pub use self::core::{spawn_core, CoreHandle, CoreSpec, HEARTBEAT_PERIOD};
pub use self::error::{CoreError, StartError};
pub use self::read_ready::ReadReady;
pub use self::task::{
    sleep, sleep_until, spawn_local, yield_if_needed, yield_now, Task, TaskEnded, TaskHandle,
};
pub use self::wake_guard::guard_wakes;
pub use self::warm_up::{prepare_warm_up_file, WARM_UP_FILE_BYTES, WARM_UP_FILE_NAME};
