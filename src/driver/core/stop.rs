//! The end of a core: when nothing is owed any more, or all that is left is cut and named.

use std::time::{Duration, Instant};

use shard_executor::rt;

use super::Core;

/// How long the last answers get to be acknowledged when the core stops.
const CLOSE_SETTLE: Duration = Duration::from_millis(20);
/// How long closes may take to leave when the core stops.
const CLOSE_LINGER: Duration = Duration::from_millis(200);

/// How a core ended.
#[derive(Debug, Clone, Default)]
pub struct CoreEnd {
    /// Why the storage could not be closed, if it could not.
    pub storage_error: Option<String>,
}

impl Core {
    /// Nothing accepted is unanswered.
    pub(super) fn is_idle(&self) -> bool {
        self.appends.is_empty()
            && self.bulk.is_empty()
            && self.lane_appends.is_empty()
            && self.lane_caches.is_empty()
            && self.cache_reads.is_empty()
            && self.groups.is_settled()
            && self.group_asks.is_empty()
            && self.forwards.is_empty()
            && self.replicate_waiters.is_empty()
            && self.follower_requests() == 0
            && self.shipping.waiting() == 0
            && self
                .lane_backlog
                .iter()
                .all(std::collections::VecDeque::is_empty)
    }

    /// Told at once and not at the end: a disk that does not answer may keep a core from ending.
    fn say_cut(&self, what: String) {
        // Nobody listens only when the control thread has given up already.
        let _ = self.cut.send(format!("core {}: {what}", self.index));
    }

    /// The shards whose log holds records that are not on disk yet, with the first and the last.
    fn undurable_records(&self) -> Vec<(String, u64, u64)> {
        let logs = self.logs.iter().map(|(shard, open)| {
            let (durable, tail) = (
                self.storage.durable_tail(open.log),
                self.storage.tail(open.log),
            );
            (shard.to_string(), durable, tail)
        });
        logs.filter(|(_, durable, tail)| durable < tail)
            .map(|(shard, durable, tail)| (shard, durable, tail - 1))
            .collect()
    }

    pub(super) async fn stop(mut self) -> CoreEnd {
        let mut end = CoreEnd::default();
        for (count, what) in [
            (self.appends.len(), "appends not durable yet"),
            (self.bulk.len(), "large batches not appended whole"),
            (self.lane_appends.len(), "appends handed to other cores"),
            (
                self.lane_caches.len(),
                "cache operations handed to other cores",
            ),
            (self.cache_reads.len(), "cache reads not finished"),
            (self.groups.asks(), "group requests without an answer"),
            (self.forwards.len(), "forwarded requests without an answer"),
            (
                self.replicate_waiters.len(),
                "batches of leaders without an answer",
            ),
            (self.shipping.waiting(), "writes without a majority"),
        ] {
            if count > 0 {
                self.say_cut(format!("{count} {what}"));
            }
        }
        for (shard, from, to) in self.undurable_records() {
            self.say_cut(format!("{shard}: records {from} to {to} not durable"));
        }
        self.tell_time();
        self.pump.flush(self.now);
        // Answers already queued get out before the close that would drop them.
        let settled = Instant::now() + CLOSE_SETTLE;
        let linger = Instant::now() + CLOSE_LINGER;
        while !self.must_cut
            && Instant::now() < linger
            && (self.pump.has_work() || Instant::now() < settled)
        {
            self.tell_time();
            self.pump.poll_io(self.now);
            while self.pump.next_event().is_some() {}
            self.pump.flush(self.now);
            rt::sleep(Duration::from_millis(1)).await;
        }
        self.pump.close_all(0, b"shutting down", Instant::now());
        let linger = Instant::now() + CLOSE_LINGER;
        while !self.pump.is_quiet() && Instant::now() < linger {
            self.tell_time();
            self.pump.poll_io(self.now);
            while self.pump.next_event().is_some() {}
            self.pump.flush(self.now);
            rt::sleep(Duration::from_millis(1)).await;
        }
        if let Err(error) = self.storage.close().await {
            end.storage_error = Some(format!("core {}: {error}", self.index));
        }
        self.report();
        end
    }
}
