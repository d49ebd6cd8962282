//! How a new segment file comes to read as zeros: zeros are written, or the file system is told to give zeros
//! for what is allocated.
//!
//! A commit into zeros that were written costs one write. Into what is merely allocated it costs a commit of
//! the file system's journal, too; but zeros that are written take the device from the commits of now. So
//! zeros are written as far as the device has time for them, and not at all while commits are so large that
//! the journal's is little beside them.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::RecvTimeoutError;

use super::Worker;
use crate::config::SegmentZeros;
use crate::faults::FaultOp;
use crate::slab::SlabWriter;

/// Zeros written at once while segments are wanted.
const LONG_STEP_BYTES: usize = 1 << 20;
/// And while there are enough: what a commit may have to wait for.
const SHORT_STEP_BYTES: usize = 128 << 10;
/// From this size on commits lose less by an allocated file than by zeros written beside them.
const LARGE_COMMIT_BYTES: u64 = 512 << 10;
/// What is zeroed for each byte that is committed: more than is used up.
const ZEROS_PER_BYTE: f64 = 1.5;
/// How long commits are counted before their rate is believed.
const WINDOW: Duration = Duration::from_millis(100);
/// Pauses for each step while nothing is committed, as long as the step.
const IDLE_PAUSES: u32 = 3;
/// Segments made ahead that are enough for now: as many as a core keeps beside the one it writes.
const AT_HAND: u64 = 2;
/// No pause is longer.
const LONGEST_PAUSE: Duration = Duration::from_millis(20);

/// What the core commits, lately.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Load {
    pub bytes_per_s: f64,
    /// Mean of a commit.
    pub commit_bytes: u64,
}

/// What decides how a file is made.
#[derive(Debug, Clone, Copy)]
struct Situation {
    pub load: Load,
    /// A commit waits for a segment.
    pub is_waited_for: bool,
    /// Segments the core asks for and has not; it keeps two beside the one it writes.
    pub asked_for: usize,
    /// Segments made since the start.
    pub made: u64,
    pub zeros: SegmentZeros,
    /// The file system gives zeros for what is allocated.
    pub can_allocate: bool,
}

/// What is done to a file next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// All that is left of it is allocated.
    Allocate,
    /// So many bytes of zeros are written.
    Zeros(usize),
}

impl Situation {
    fn step(&self) -> Step {
        // Before the first segment nobody's records wait yet.
        let is_late = self.is_waited_for && self.made > 0;
        let is_bulk = self.load.commit_bytes >= LARGE_COMMIT_BYTES;
        let has_to_allocate = match self.zeros {
            SegmentZeros::WhileTheyPay => is_late || is_bulk,
            SegmentZeros::Never => true,
        };
        match has_to_allocate && self.can_allocate {
            true => Step::Allocate,
            false if self.is_paced() => Step::Zeros(SHORT_STEP_BYTES),
            false => Step::Zeros(LONG_STEP_BYTES),
        }
    }

    /// How long to leave the device alone after `bytes` zeros that took `taken`.
    fn pause(&self, bytes: usize, taken: Duration) -> Duration {
        if !self.is_paced() {
            return Duration::ZERO;
        }
        if self.load.bytes_per_s == 0.0 {
            // Other cores and other processes may be writing to the same device.
            return (taken * IDLE_PAUSES).min(LONGEST_PAUSE);
        }
        let due_s = bytes as f64 / (self.load.bytes_per_s * ZEROS_PER_BYTE);
        let due = Duration::try_from_secs_f64(due_s).unwrap_or(LONGEST_PAUSE);
        due.saturating_sub(taken).min(LONGEST_PAUSE)
    }

    /// Enough segments are at hand.
    fn is_paced(&self) -> bool {
        self.made >= AT_HAND && self.asked_for < AT_HAND as usize
    }
}

/// Works the load out from running totals.
#[derive(Debug)]
pub(super) struct Meter {
    since: Instant,
    commits: u64,
    bytes: u64,
    load: Load,
}

impl Meter {
    pub fn new(now: Instant) -> Self {
        Self {
            since: now,
            commits: 0,
            bytes: 0,
            load: Load::default(),
        }
    }

    /// The load of the last window, with the totals as they are now.
    pub fn look(&mut self, now: Instant, commits: u64, bytes: u64) -> Load {
        let elapsed = now.saturating_duration_since(self.since);
        if elapsed >= WINDOW {
            let new_commits = commits.saturating_sub(self.commits);
            let new_bytes = bytes.saturating_sub(self.bytes);
            self.load = Load {
                bytes_per_s: new_bytes as f64 / elapsed.as_secs_f64(),
                commit_bytes: new_bytes.checked_div(new_commits).unwrap_or(0),
            };
            (self.since, self.commits, self.bytes) = (now, commits, bytes);
        }
        self.load
    }
}

/// Lets `len` bytes of a file read as zeros without writing them, whatever was there, and have their place.
/// False where the file system cannot do that.
fn allocate_zeros(file: &File, at: u64, len: u64) -> io::Result<bool> {
    let (Ok(at), Ok(len)) = (i64::try_from(at), i64::try_from(len)) else {
        return Ok(false);
    };
    // SAFETY: a call on a descriptor of ours.
    let done = unsafe { libc::fallocate(file.as_raw_fd(), libc::FALLOC_FL_ZERO_RANGE, at, len) };
    if done == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL) => Ok(false),
        _ => Err(error),
    }
}

impl Worker {
    /// Makes a file read as zeros, all of its space taken, and syncs it. Ends early when the thread has to end.
    pub(super) fn fill(&mut self, file: &File) -> io::Result<()> {
        let mut zeros = SlabWriter::new(LONG_STEP_BYTES);
        let zeros = &*zeros.tail();
        let mut at = 0;
        while at < self.config.segment_bytes {
            let started = Instant::now();
            let situation = self.situation(started);
            let left = self.config.segment_bytes - at;
            let step_bytes = match situation.step() {
                Step::Allocate if allocate_zeros(file, at, left)? => {
                    self.gauges
                        .segments_allocated
                        .fetch_add(1, Ordering::Relaxed);
                    break;
                }
                Step::Allocate => {
                    self.can_allocate = false;
                    continue;
                }
                Step::Zeros(bytes) => bytes,
            };
            let len = left.min(step_bytes as u64) as usize;
            file.write_all_at(&zeros[..len], at)?;
            at += len as u64;
            self.serve();
            self.pause(situation.pause(len, started.elapsed()));
            if self.stopped {
                return Err(io::Error::from(io::ErrorKind::Interrupted));
            }
        }
        self.check_fault(FaultOp::SyncSpare)?;
        // The length is metadata: this has to be a full sync.
        file.sync_all()
    }

    fn situation(&mut self, now: Instant) -> Situation {
        let commits = self.gauges.commits.load(Ordering::Relaxed);
        let bytes = self.gauges.committed_bytes.load(Ordering::Relaxed);
        Situation {
            load: self.meter.look(now, commits, bytes),
            is_waited_for: self.gauges.is_waited_for.load(Ordering::Relaxed),
            asked_for: self.pending,
            made: self.gauges.segments_made.load(Ordering::Relaxed),
            zeros: self.config.zeros,
            can_allocate: self.can_allocate,
        }
    }

    /// Leaves the device alone, but not whoever asks for something.
    fn pause(&mut self, pause: Duration) {
        if pause.is_zero() {
            return;
        }
        match self.inbox.recv_timeout(pause) {
            Ok(request) => {
                self.take(request);
                self.serve();
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => self.stopped = true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn situation(bytes_per_s: f64, commit_bytes: u64) -> Situation {
        Situation {
            load: Load {
                bytes_per_s,
                commit_bytes,
            },
            is_waited_for: false,
            asked_for: 0,
            made: 2,
            zeros: SegmentZeros::WhileTheyPay,
            can_allocate: true,
        }
    }

    #[test]
    fn zeros_are_written_while_they_pay() {
        let calm = situation(0.0, 0);
        assert_eq!(calm.step(), Step::Zeros(SHORT_STEP_BYTES));
        let small = situation(50e6, LARGE_COMMIT_BYTES - 1);
        assert_eq!(small.step(), Step::Zeros(SHORT_STEP_BYTES));
        let large = situation(50e6, LARGE_COMMIT_BYTES);
        assert_eq!(large.step(), Step::Allocate);
        let cannot = Situation {
            can_allocate: false,
            is_waited_for: true,
            ..large
        };
        assert_eq!(cannot.step(), Step::Zeros(SHORT_STEP_BYTES));
        let never = Situation {
            zeros: SegmentZeros::Never,
            made: 0,
            ..calm
        };
        assert_eq!(never.step(), Step::Allocate);
    }

    #[test]
    fn no_commit_waits_for_zeros_but_the_first() {
        let waited_for = |made| Situation {
            is_waited_for: true,
            asked_for: 2,
            made,
            ..situation(1e6, 4096)
        };
        assert_eq!(waited_for(0).step(), Step::Zeros(LONG_STEP_BYTES));
        assert_eq!(waited_for(1).step(), Step::Allocate);
    }

    #[test]
    fn the_device_is_left_to_commits_once_there_are_enough() {
        let taken = Duration::from_micros(400);
        let slow = situation(1e6, 4096);
        assert_eq!(slow.pause(SHORT_STEP_BYTES, taken), LONGEST_PAUSE);
        let busy = situation(50e6, 4096);
        let pause = busy.pause(SHORT_STEP_BYTES, taken);
        let wanted_s = SHORT_STEP_BYTES as f64 / (50e6 * ZEROS_PER_BYTE);
        let off_s = (pause + taken).as_secs_f64() - wanted_s;
        assert!(off_s.abs() < 1e-6, "{pause:?}");
        let faster = situation(5e9, 4096);
        assert_eq!(faster.pause(SHORT_STEP_BYTES, taken), Duration::ZERO);
        let idle = situation(0.0, 0);
        assert_eq!(idle.pause(SHORT_STEP_BYTES, taken), taken * IDLE_PAUSES);
        for (made, asked_for) in [(0, 2), (1, 1), (9, 2)] {
            let short = Situation {
                made,
                asked_for,
                ..busy
            };
            assert_eq!(short.pause(SHORT_STEP_BYTES, taken), Duration::ZERO);
            assert_eq!(short.step(), Step::Zeros(LONG_STEP_BYTES));
        }
    }

    #[test]
    fn the_load_is_that_of_the_last_window() {
        let start = Instant::now();
        let mut meter = Meter::new(start);
        assert_eq!(meter.look(start + WINDOW / 2, 5, 5000), Load::default());
        let load = meter.look(start + WINDOW, 10, 10_000);
        assert_eq!(load.commit_bytes, 1000);
        assert!((load.bytes_per_s - 100_000.0).abs() < 1.0);
        assert_eq!(meter.look(start + WINDOW * 3 / 2, 99, 1 << 30), load);
        let idle = meter.look(start + WINDOW * 2, 10, 10_000);
        assert_eq!(idle, Load::default());
    }

    #[test]
    fn what_is_allocated_reads_as_zeros_whatever_was_there() {
        use std::io::{Read, Write};
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(&[7; 3 * 4096]).expect("writes");
        if !allocate_zeros(&file, 4096, 4 * 4096).expect("allocates") {
            return;
        }
        let mut bytes = Vec::new();
        std::io::Seek::rewind(&mut file).expect("rewinds");
        file.read_to_end(&mut bytes).expect("reads");
        assert_eq!(bytes.len(), 5 * 4096);
        assert!(bytes[..4096].iter().all(|byte| *byte == 7));
        assert!(bytes[4096..].iter().all(|byte| *byte == 0));
    }
}
