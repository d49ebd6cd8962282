//! A panic anywhere ends the process: better no broker than half of one.
//!
//! Duty: say where it happened, then exit with status 101. It does not unwind the other cores or
//! flush anything: what was acknowledged is durable already, the rest was never promised.

use std::cell::Cell;
use std::io::Write;
use std::panic::PanicHookInfo;

/// Exit status of a process that ended by a panic.
pub const PANIC_EXIT_CODE: i32 = 101;

thread_local! {
    static CORE: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Remembers that this thread runs data core `core`, for messages.
pub(crate) fn mark_core(core: usize) {
    CORE.set(Some(core));
}

/// The data core this thread runs, if it runs one.
pub fn current_core() -> Option<usize> {
    CORE.try_with(Cell::get).ok().flatten()
}

/// Installs the hook: a panic on any thread prints one report and ends the process with
/// [`PANIC_EXIT_CODE`]. A backtrace follows when `RUST_BACKTRACE` asks for one.
pub fn install_panic_exit() {
    std::panic::set_hook(Box::new(|info| {
        let report = report(info);
        // One write, and errors ignored: standard error may be closed, and there is no one to tell.
        let _ = std::io::stderr().lock().write_all(report.as_bytes());
        // SAFETY: `_exit` has no preconditions. `exit` would run handlers and destructors while
        // the other cores still run.
        unsafe { libc::_exit(PANIC_EXIT_CODE) }
    }));
}

fn report(info: &PanicHookInfo<'_>) -> String {
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("unnamed");
    let place = match current_core() {
        Some(core) => format!("core {core} (thread {name})"),
        None => format!("thread {name}"),
    };
    let location = info
        .location()
        .map_or_else(|| "unknown place".into(), ToString::to_string);
    let message = message(info.payload());
    let backtrace = std::backtrace::Backtrace::capture();
    let trace = match backtrace.status() {
        std::backtrace::BacktraceStatus::Captured => format!("{backtrace}\n"),
        _ => String::new(),
    };
    format!("fatal: panic on {place} at {location}: {message}; the process ends\n{trace}")
}

/// The text of a panic payload.
pub(crate) fn message(payload: &(dyn std::any::Any + Send)) -> &str {
    payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("(no message)")
}
