//! The life of one request: attempts, and the one end it has.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::{Ended, Judge, Watched};
use crate::sim::core::Work;
use crate::sim::env::CoreAt;
use crate::sim::workload::Request;

/// Sends of one request at most.
const SEND_BUDGET: u32 = 5;
/// The whole life of a request: the last attempt begins within span and holds (2.25 s), waits for
/// a connection (2 s) and for its answer (5 s).
const LIFE_BOUND_US: u64 = 10_000_000;

impl Judge {
    pub fn on_start(&mut self, request: &Arc<Request>, at: CoreAt, now_us: u64) {
        let watched = Watched {
            request: Arc::clone(request),
            at,
            started_us: now_us,
            sends: 0,
            written_to: BTreeSet::new(),
            appends: 0,
            durable: Vec::new(),
            ended: None,
        };
        self.requests.insert(request.id, watched);
    }

    /// An attempt begins, sent or not.
    pub fn on_send(&mut self, id: u64) {
        let Some(watched) = self.requests.get_mut(&id) else {
            return;
        };
        watched.sends += 1;
        let sends = watched.sends;
        if sends > SEND_BUDGET {
            self.fail(39, format!("request {id} is attempted {sends} times"));
        }
    }

    /// An attempt is written to a broker, resolved at a generation.
    pub fn on_transmit(&mut self, id: u64, node: usize, generation: u64) {
        if let Some(watched) = self.requests.get_mut(&id) {
            watched.written_to.insert((node, generation));
        }
    }

    /// The one answer a client gets.
    pub fn on_end(&mut self, id: u64, now_us: u64, ended: Ended) {
        let Some(watched) = self.requests.get_mut(&id) else {
            return self.fail(40, format!("an answer to request {id}, which nobody sent"));
        };
        if let Some(before) = &watched.ended {
            let seen = format!("request {id} ends {before:?} and then {ended:?}");
            return self.fail(40, seen);
        }
        watched.ended = Some(ended.clone());
        let (at, started_us, appends) = (watched.at, watched.started_us, watched.appends);
        let request = Arc::clone(&watched.request);
        let durable = watched.durable.clone();
        let paused_us = self.paused_us.get(&at.node).copied().unwrap_or(0);
        if now_us - started_us > LIFE_BOUND_US + paused_us {
            let life_ms = (now_us - started_us) / 1000;
            self.fail(40, format!("request {id} took {life_ms} ms to end"));
        }
        match &ended {
            Ended::Stored { node, at } => {
                let is_empty = matches!(&request.work, Work::Publish(p) if p.is_empty());
                let is_known = durable.iter().any(|d| *node == Some(d.0) && *at == d.1);
                if !is_known && !is_empty {
                    let seen = format!("request {id} is Ok {node:?} {at:?}; durable: {durable:?}");
                    self.fail(38, seen);
                }
                if let Work::Publish(payloads) = &request.work {
                    self.acked_records += payloads.len() as u64;
                }
            }
            Ended::Cached(_) => self.on_cached(id, &request, durable.is_empty()),
            Ended::Refused => {
                self.refused += 1;
                let may_repeat = request.forward_op().is_resendable();
                if appends > 0 && !may_repeat {
                    self.fail(38, format!("request {id} is refused and was appended"));
                }
            }
            Ended::Indeterminate => self.indeterminate += 1,
            Ended::Gone => self.gone += 1,
        }
    }

    fn on_cached(&mut self, id: u64, request: &Request, nothing_durable: bool) {
        use crate::proto::cache::Operation;
        let Work::Cache(op) = &request.work else {
            return self.fail(
                38,
                format!("publish {id} is answered like a cache operation"),
            );
        };
        let leaves_a_mark = match &op.operation {
            Operation::Put { value, .. } => !value.is_empty(),
            Operation::CounterAdd { .. } => true,
            Operation::Get | Operation::Delete | Operation::CounterGet => false,
        };
        if leaves_a_mark && nothing_durable {
            let seen = format!("request {id} is Ok and durable nowhere");
            self.fail(38, seen);
        }
        if leaves_a_mark {
            self.acked_cache_writes += 1;
        }
    }
}
