//! When the next batch is due.
//!
//! Sans-IO: time comes in as nanoseconds since the start of the run. A closed loop sends whenever it
//! may; an open loop sends on a fixed schedule and a batch's latency counts from the moment it was due,
//! so that a stall of the system under test is seen by every batch that fell due in it.
//!
//! Invariants: batch `k` of an open loop is due at `k` intervals whatever happened to those before it;
//! what could not be sent in time is never skipped; memory does not grow with the backlog.

/// How a run is paced.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Pace {
    /// The next batch goes out when an answer came in.
    Closed,
    /// So many batches a second, come what may.
    Open {
        /// Batches a second.
        batches_per_s: f64,
    },
}

/// What the schedule of an open loop came to.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ScheduleReport {
    /// Batches that fell due in the measured time.
    pub offered: u64,
    /// Batches due in the run and never sent, because too many answers were outstanding to its end.
    pub unsent: u64,
    /// Batches the tool sent more than a millisecond late although nothing held it back.
    pub self_late: u64,
    /// The longest such delay.
    pub self_late_max_ns: u64,
}

/// A delay of the tool's own loop from here on is reported.
const SELF_LATE_FROM_NS: u64 = 1_000_000;

/// The schedule of one run.
#[derive(Debug, Clone)]
pub struct Schedule {
    pace: Pace,
    measure_from_ns: u64,
    end_ns: u64,
    taken: u64,
    /// Since when a batch could have been sent at once; `None` while everything allowed is outstanding.
    free_since_ns: Option<u64>,
    report: ScheduleReport,
}

impl Schedule {
    /// Ends earlier than was said at the start.
    pub fn end_at(&mut self, end_ns: u64) {
        self.end_ns = self.end_ns.min(end_ns);
    }

    /// A run that starts at 0, is measured from `measure_from_ns` and ends at `end_ns`.
    pub fn new(pace: Pace, measure_from_ns: u64, end_ns: u64) -> Self {
        Self {
            pace,
            measure_from_ns,
            end_ns,
            taken: 0,
            free_since_ns: Some(0),
            report: ScheduleReport::default(),
        }
    }

    fn due_at_ns(&self, index: u64) -> Option<u64> {
        match self.pace {
            Pace::Closed => None,
            Pace::Open { batches_per_s } => {
                Some((index as f64 * (1e9 / batches_per_s.max(1e-9))).round() as u64)
            }
        }
    }

    /// Takes one batch to be sent now, if one is due: the moment its latency counts from. Call only
    /// when a batch may go out.
    pub fn take(&mut self, now_ns: u64) -> Option<u64> {
        if now_ns >= self.end_ns {
            return None;
        }
        let free_since_ns = *self.free_since_ns.get_or_insert(now_ns);
        let due_ns = match self.due_at_ns(self.taken) {
            None => now_ns,
            Some(due_ns) if due_ns <= now_ns => {
                // Held back until there was room: not the tool's doing.
                let late_ns = now_ns - due_ns.max(free_since_ns);
                if late_ns >= SELF_LATE_FROM_NS {
                    self.report.self_late += 1;
                    self.report.self_late_max_ns = self.report.self_late_max_ns.max(late_ns);
                }
                due_ns
            }
            Some(_) => return None,
        };
        self.taken += 1;
        Some(due_ns)
    }

    /// Nothing more may be sent until an answer comes in.
    pub fn on_full(&mut self) {
        self.free_since_ns = None;
    }

    /// When to call [`take`](Self::take) again if nothing else happens; `None` for a closed loop and
    /// after the end.
    pub fn next_due_ns(&self) -> Option<u64> {
        self.due_at_ns(self.taken).filter(|due| *due < self.end_ns)
    }

    /// Batches due so far and not taken.
    pub fn backlog(&self, now_ns: u64) -> u64 {
        self.due_before(now_ns.min(self.end_ns))
            .saturating_sub(self.taken)
    }

    /// Whether no batch will be taken any more.
    pub fn is_over(&self, now_ns: u64) -> bool {
        now_ns >= self.end_ns
    }

    /// What became of the schedule, at the end of the run.
    pub fn report(&self) -> ScheduleReport {
        let due = self.due_before(self.end_ns);
        ScheduleReport {
            offered: due - self.due_before(self.measure_from_ns).min(due),
            unsent: due.saturating_sub(self.taken),
            ..self.report
        }
    }

    /// Batches due before a moment.
    fn due_before(&self, at_ns: u64) -> u64 {
        match self.pace {
            Pace::Closed => 0,
            Pace::Open { batches_per_s } => (at_ns as f64 * batches_per_s / 1e9).ceil() as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::meter::Meter;
    use std::collections::VecDeque;

    const MS: u64 = 1_000_000;
    const S: u64 = 1_000 * MS;

    /// A server with one answer time and a frozen span, driven in steps of 0.1 ms.
    struct Server {
        answer_after_ns: u64,
        frozen: std::ops::Range<u64>,
        busy_until_ns: u64,
        outstanding: VecDeque<(u64, u64)>,
    }

    impl Server {
        fn send(&mut self, now_ns: u64, due_ns: u64) {
            let start = now_ns.max(self.busy_until_ns);
            let mut done = start + self.answer_after_ns;
            if done > self.frozen.start && start < self.frozen.end {
                done = self.frozen.end.max(start) + self.answer_after_ns;
            }
            self.busy_until_ns = done;
            self.outstanding.push_back((done, due_ns));
        }
    }

    fn run(
        pace: Pace,
        limit: usize,
        answer_after_ns: u64,
        frozen: std::ops::Range<u64>,
    ) -> (Meter, ScheduleReport) {
        let end = 10 * S;
        let mut schedule = Schedule::new(pace, 0, end);
        let mut meter = Meter::new(0, end);
        let mut server = Server {
            answer_after_ns,
            frozen,
            busy_until_ns: 0,
            outstanding: VecDeque::new(),
        };
        let mut now = 0;
        while now < end || !server.outstanding.is_empty() {
            while server
                .outstanding
                .front()
                .is_some_and(|(done, _)| *done <= now)
            {
                if let Some((_, due)) = server.outstanding.pop_front() {
                    meter.on_acked(now, due, 1, 100);
                }
            }
            loop {
                if server.outstanding.len() >= limit {
                    schedule.on_full();
                    break;
                }
                match schedule.take(now) {
                    Some(due) => server.send(now, due),
                    None => break,
                }
            }
            now += MS / 10;
        }
        (meter, schedule.report())
    }

    #[test]
    fn a_frozen_second_shows_in_an_open_loop() {
        let pace = Pace::Open {
            batches_per_s: 1_000.0,
        };
        for limit in [1, 64, 100_000] {
            let (meter, report) = run(pace, limit, MS / 10, 5 * S..6 * S);
            let latency = meter.latency();
            let p99_s = latency.at(0.99) / 1e6;
            let max_s = latency.at(1.0) / 1e6;
            assert!(
                (0.85..0.95).contains(&p99_s),
                "limit {limit}: p99 {p99_s} s"
            );
            assert!(
                (0.99..1.05).contains(&max_s),
                "limit {limit}: max {max_s} s"
            );
            assert!(latency.at(0.5) < 1_000.0, "{} us", latency.at(0.5));
            assert_eq!((report.offered, report.unsent), (10_000, 0));
            assert_eq!(report.self_late, 0, "the server was late, not the tool");
            // One in ten is late, evenly from 0 to 1 s.
            let p95_s = latency.at(0.95) / 1e6;
            assert!((0.4..0.6).contains(&p95_s), "p95 {p95_s} s");
        }
    }

    #[test]
    fn a_closed_loop_would_have_hidden_it() {
        let (meter, _) = run(Pace::Closed, 1, MS, 5 * S..6 * S);
        assert!(meter.latency().at(0.99) < 5_000.0);
    }

    #[test]
    fn overload_is_reported_and_latency_grows() {
        // Ten times what a server of 1,000 a second can take.
        let pace = Pace::Open {
            batches_per_s: 10_000.0,
        };
        let (meter, report) = run(pace, 64, MS, 0..0);
        assert_eq!(report.offered, 100_000);
        assert!(
            (9_000..=11_000).contains(&meter.records()),
            "{}",
            meter.records()
        );
        assert!(report.unsent > 85_000, "{report:?}");
        // What was answered at the end had been due seconds before.
        assert!(meter.latency().at(1.0) > 8e6);
        let series = meter.series();
        let (early, late) = (&series[1], &series[series.len() - 2]);
        assert!(late.p50_us > 3.0 * early.p50_us, "{early:?} {late:?}");
    }

    #[test]
    fn a_tool_that_was_late_itself_says_so() {
        let pace = Pace::Open {
            batches_per_s: 1_000.0,
        };
        let mut schedule = Schedule::new(pace, 0, S);
        assert_eq!(schedule.take(0), Some(0));
        // The loop came round 50 ms late although nothing was outstanding.
        let mut taken = 0;
        while schedule.take(50 * MS).is_some() {
            taken += 1;
        }
        assert_eq!(taken, 50);
        let report = schedule.report();
        assert_eq!(report.self_late, 49, "all but the one due just now");
        assert_eq!(report.self_late_max_ns, 49 * MS);
        assert_eq!(schedule.backlog(60 * MS), 9);
    }

    #[test]
    fn warm_up_is_not_offered() {
        let pace = Pace::Open {
            batches_per_s: 100.0,
        };
        let schedule = Schedule::new(pace, S, 3 * S);
        assert_eq!(schedule.report().offered, 200);
        assert_eq!(schedule.next_due_ns(), Some(0));
        let mut over = Schedule::new(pace, S, 3 * S);
        assert_eq!(over.take(3 * S), None);
        assert!(over.is_over(3 * S));
    }
}
