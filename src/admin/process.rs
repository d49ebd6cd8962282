//! What the process has used, from the kernel.

use serde::Serialize;

/// CPU time and memory of this process since it started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct ProcessUsage {
    pub cpu_s: f64,
    pub user_s: f64,
    pub system_s: f64,
    pub max_rss_bytes: u64,
    pub threads: u64,
    pub open_files: u64,
}

impl ProcessUsage {
    /// Reads the present values; what the kernel does not tell is 0.
    pub fn read() -> Self {
        let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
        // SAFETY: getrusage writes one rusage into the buffer we own; all-zero is a valid rusage.
        let usage = unsafe {
            libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr());
            usage.assume_init()
        };
        let seconds = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 / 1e6;
        let (user_s, system_s) = (seconds(usage.ru_utime), seconds(usage.ru_stime));
        Self {
            cpu_s: user_s + system_s,
            user_s,
            system_s,
            max_rss_bytes: u64::try_from(usage.ru_maxrss).unwrap_or(0) * 1024,
            threads: count_entries("/proc/self/task"),
            open_files: count_entries("/proc/self/fd"),
        }
    }

    /// The same values as Prometheus text, under the names every client library uses.
    pub fn render(&self) -> String {
        format!(
            "# HELP process_cpu_seconds_total User and system CPU time.\n\
             # TYPE process_cpu_seconds_total counter\n\
             process_cpu_seconds_total {}\n\
             # HELP process_max_resident_memory_bytes Largest resident size so far.\n\
             # TYPE process_max_resident_memory_bytes gauge\n\
             process_max_resident_memory_bytes {}\n\
             # HELP process_open_fds Open file descriptors.\n\
             # TYPE process_open_fds gauge\n\
             process_open_fds {}\n\
             # HELP process_threads Threads.\n\
             # TYPE process_threads gauge\n\
             process_threads {}\n",
            self.cpu_s, self.max_rss_bytes, self.open_files, self.threads
        )
    }
}

fn count_entries(dir: &str) -> u64 {
    std::fs::read_dir(dir).map_or(0, |entries| entries.count() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_used_something() {
        let usage = ProcessUsage::read();
        assert!(usage.max_rss_bytes > 64 << 10, "{usage:?}");
        assert!(usage.threads >= 1 && usage.open_files >= 1, "{usage:?}");
        assert!(usage.render().contains("process_threads "));
    }
}
