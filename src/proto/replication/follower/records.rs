//! Batches of records: position, comparison, and what is stored.

use std::ops::Range;

use bytes::Bytes;

use super::position::{
    droppable, has_nothing_to_show, highest_start, is_below_the_unknown, overlap, Undroppable,
};
use super::{
    Change, Current, DiskWork, FollowerAction, FollowerLog, FollowerNote, FollowerRequest,
    OwedAnswer, Stage, StoredReadError,
};
use crate::limits::FOLLOWER_COMPARE_READ_BYTES;
use crate::proto::outcome::PeerCode;
use crate::proto::replication::types::{ReplicateAnswer, ReplicateBody};
use crate::wire::internal::Payloads;

impl FollowerLog {
    pub(super) fn decide_records(&mut self, request: FollowerRequest) {
        let Some((range, payloads)) = batch(&request) else {
            return;
        };
        let at = self.positions();
        let highest = highest_start(&at);
        if range.start > highest {
            return self.owe_gap(&request, highest);
        }
        if is_below_the_unknown(&at, range.start, range.end) {
            return self.owe_gap(&request, at.base);
        }
        if has_nothing_to_show(&at) {
            if payloads.is_empty() {
                // A leader may open on that.
                return self.owe_gap(&request, at.base);
            }
            let detail = "all this copy held was given up under an older leader";
            return self.refuse(&request, PeerCode::LogConflict, detail);
        }
        if payloads.is_empty() {
            return self.decide_probe(&request, range.start);
        }
        let held = overlap(&at, range.start, range.end);
        if held.is_empty() {
            return self.store_behind(&request);
        }
        let (from, until) = (held.start, held.end);
        self.wait(request, Stage::AwaitDurable { from, until });
    }

    /// A batch without records. It brings no evidence of its own: unless something is known already it
    /// makes nothing count, and the leader is asked for the record below instead.
    fn decide_probe(&mut self, request: &FollowerRequest, first: u64) {
        let is_matched = self.matched.as_ref().is_some_and(|m| m.mark.is_some());
        if is_matched {
            return self.owe(request, OwedAnswer::Matched);
        }
        let at = &self.at;
        if first > at.base {
            return self.owe_gap(request, first - 1);
        }
        if at.base > 0 && at.base < at.tail {
            // What was given up below may be another leader's; the first record held shows it, or does not.
            return self.owe_gap(request, at.base);
        }
        let answer = ReplicateAnswer::Ok {
            durable_offset: first,
        };
        self.owe(request, OwedAnswer::Fixed(answer));
    }

    fn owe_gap(&mut self, request: &FollowerRequest, expected_offset: u64) {
        let answer = ReplicateAnswer::Refused {
            code: PeerCode::LogGap,
            expected_offset,
            detail: "the batch starts past what this copy can place",
        };
        self.owe(request, OwedAnswer::Fixed(answer));
    }

    /// Asks for stored records that are durable by now.
    pub(super) fn ask_stored(&mut self, request: FollowerRequest, wanted: Range<u64>) {
        self.last_ticket += 1;
        let ticket = self.last_ticket;
        self.outbox.push_back(FollowerAction::Read {
            ticket,
            from: wanted.start,
            to: wanted.end,
            max_bytes: FOLLOWER_COMPARE_READ_BYTES,
        });
        let (next, until) = (wanted.start, wanted.end);
        let stage = Stage::Reading {
            ticket,
            next,
            until,
        };
        self.wait(request, stage);
    }

    pub(super) fn take_read(
        &mut self,
        current: Current,
        wanted: Range<u64>,
        result: Result<(u64, &[Bytes]), StoredReadError>,
    ) {
        let request = current.request;
        let stored = match result {
            Ok((first, stored)) if first == wanted.start && !stored.is_empty() => stored,
            // The log was trimmed meanwhile: decided anew with what is held now.
            Err(StoredReadError::Trimmed) if self.at.base > wanted.start => {
                return self.wait(request, Stage::Decide);
            }
            Err(StoredReadError::Overloaded) => {
                return self.refuse(&request, PeerCode::Overload, "too many reads wait");
            }
            Ok(_) | Err(StoredReadError::Trimmed | StoredReadError::Failed) => {
                let detail = "the stored records cannot be read";
                return self.refuse(&request, PeerCode::StorageFailed, detail);
            }
        };
        let wanted_records = usize::try_from(wanted.end - wanted.start).unwrap_or(usize::MAX);
        let stored = &stored[..stored.len().min(wanted_records)];
        match first_difference(&request, wanted.start, stored) {
            Some(at) => self.on_difference(request, at),
            None => {
                let next = wanted.start + stored.len() as u64;
                if next < wanted.end {
                    return self.ask_stored(request, next..wanted.end);
                }
                match self.still_allowed(&request) {
                    Ok(()) => self.store_behind(&request),
                    Err((code, detail)) => self.refuse(&request, code, detail),
                }
            }
        }
    }

    fn on_difference(&mut self, request: FollowerRequest, at: u64) {
        match droppable(&self.positions(), request.generation, at) {
            Ok(()) => self.wait(request, Stage::AwaitQuiet(Change::Truncate { at })),
            Err(why) => {
                let generation = request.generation;
                if why == Undroppable::BelowCommit {
                    self.below_commit = Some(generation);
                }
                self.note(FollowerNote::Conflict {
                    generation,
                    at,
                    why,
                });
                let answer = ReplicateAnswer::Refused {
                    code: PeerCode::LogConflict,
                    expected_offset: at,
                    detail: "the stored records differ",
                };
                self.owe(&request, OwedAnswer::Fixed(answer));
            }
        }
    }

    /// Drops a dead leader's suffix and stores the rest of the batch; everything started is durable.
    pub(super) fn drop_suffix(&mut self, request: &FollowerRequest, at: u64) {
        let generation = request.generation;
        let records = self.at.tail - at;
        self.start(DiskWork::Truncate {
            generation,
            tail: at,
            is_rebuild: self.given_up.is_some(),
        });
        self.note(FollowerNote::Truncated {
            generation,
            tail: at,
            records,
        });
        self.store_behind(request);
    }

    /// The batch starts where it may and what is held of it is equal: stores what is not, and answers.
    fn store_behind(&mut self, request: &FollowerRequest) {
        let Some((range, payloads)) = batch(request) else {
            return;
        };
        let tail = self.at.tail;
        if range.end > tail {
            self.begin_if_first(request);
            // Not more than the payloads of the batch: its start is at most the tail.
            let skip = (tail - range.start) as usize;
            self.start(DiskWork::Append {
                generation: request.generation,
                first_offset: tail,
                payloads: payloads.clone(),
                skip,
            });
        }
        self.raise_mark(range.end);
        self.owe(request, OwedAnswer::Matched);
    }

    /// Enters the generation into the history before its first record.
    fn begin_if_first(&mut self, request: &FollowerRequest) {
        let generation = request.generation;
        let has_begun = self
            .at
            .history
            .last()
            .is_some_and(|last| last.generation == generation);
        let leader = self.view.as_ref().map(|view| view.leader.clone());
        if let Some(leader) = leader.filter(|_| !has_begun) {
            self.start(DiskWork::Begin { generation, leader });
        }
    }

    fn raise_mark(&mut self, end: u64) {
        if let Some(matched) = &mut self.matched {
            matched.mark = Some(matched.mark.map_or(end, |mark| mark.max(end)));
        }
    }
}

/// The offsets of a batch and its records.
fn batch(request: &FollowerRequest) -> Option<(Range<u64>, &Payloads)> {
    match &request.body {
        ReplicateBody::Records {
            first_offset,
            payloads,
            ..
        } => {
            let end = first_offset.checked_add(payloads.len() as u64)?;
            Some((*first_offset..end, payloads))
        }
        ReplicateBody::Bootstrap { .. } | ReplicateBody::Rebuild { .. } => None,
    }
}

/// The first offset at which the batch and the stored records from `from` on differ.
fn first_difference(request: &FollowerRequest, from: u64, stored: &[Bytes]) -> Option<u64> {
    let (range, payloads) = batch(request)?;
    let skip = (from - range.start) as usize;
    let pairs = payloads.iter().skip(skip).zip(stored);
    let equal = pairs.take_while(|(sent, held)| *sent == &held[..]).count();
    (equal < stored.len()).then_some(from + equal as u64)
}
