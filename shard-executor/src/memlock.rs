//! How much lockable memory the executors need.
//!
//! Duty: the arithmetic, and reading the limit; judging is the caller's. Each executor has three rings
//! (main, latency, poll) and registers the same I/O memory with each of them. Registered memory is
//! charged to the user on every kernel; the rings themselves on kernels before 5.12 and again on
//! recent ones, so they are always counted here.

/// What glommio refuses to start below, whatever is asked of it and even for root.
pub const EXECUTOR_MINIMUM_BYTES: u64 = 512 * 1024;

/// I/O memory of one executor when nothing else is configured. Larger buffers fall back to the
/// heap unregistered, so a small pool is enough.
pub const DEFAULT_IO_MEMORY_BYTES: usize = 1 << 20;

const RINGS_PER_EXECUTOR: u64 = 3;
const PAGE_BYTES: u64 = 4096;
const SMALLEST_IO_MEMORY_BYTES: u64 = 64 * 1024;

/// Bytes `executors` executors of one process lock, as an upper bound.
pub fn required_bytes(executors: usize, io_memory_bytes: usize, ring_depth: usize) -> u64 {
    let memory = page_up(io_memory_bytes as u64).max(SMALLEST_IO_MEMORY_BYTES);
    let per_executor = RINGS_PER_EXECUTOR * (memory + ring_bytes(ring_depth));
    (per_executor * executors as u64).max(EXECUTOR_MINIMUM_BYTES)
}

/// The soft limit on locked memory of this process; `None` when there is none (or it cannot be
/// read, which leaves the refusal to the kernel).
pub fn limit_bytes() -> Option<u64> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` is live for the call.
    let result = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    (result == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// Submission entries of 64 B, an index of 4 B each, and twice as many completions of 16 B.
fn ring_bytes(ring_depth: usize) -> u64 {
    let entries = (ring_depth.max(1) as u64).next_power_of_two();
    page_up(entries * 64) + page_up(512 + entries * (4 + 2 * 16))
}

fn page_up(bytes: u64) -> u64 {
    bytes.div_ceil(PAGE_BYTES) * PAGE_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_small_executors_fit_in_the_usual_8_mib_and_deep_ones_do_not() {
        let limit = 8 << 20;
        assert!(required_bytes(2, 1 << 20, 128) <= limit);
        assert!(
            required_bytes(2, 1 << 20, 4096) > limit,
            "seen to fail: poll ring"
        );
        assert!(
            required_bytes(2, 2 << 20, 1024) > limit,
            "seen to fail: poll ring"
        );
    }

    #[test]
    fn never_below_the_executors_own_minimum() {
        assert_eq!(required_bytes(0, 0, 1), EXECUTOR_MINIMUM_BYTES);
        assert_eq!(required_bytes(1, 4096, 1), EXECUTOR_MINIMUM_BYTES);
        assert!(required_bytes(1, 4096, 2048) > EXECUTOR_MINIMUM_BYTES);
    }
}
