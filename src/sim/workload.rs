//! What clients ask for. Every record carries the number of its request, so that a checker can
//! tell whose it is wherever it turns up.

use std::num::NonZeroU64;
use std::sync::Arc;

use bytes::Bytes;

use super::catalog::Shard;
use super::core::Work;
use super::env::{Env, Fault};
use super::random::Choices;
use crate::proto::cache::{CacheRequest, Operation};
use crate::proto::forward::ForwardOp;
use crate::wire::internal::{Credential, Payloads};

pub const GOOD_CREDENTIAL: &str = "good";
const BAD_CREDENTIAL: &str = "bad";
/// Keys of the cache workload: few, so that operations meet.
const KEYS: u64 = 4;

/// One request of one client.
#[derive(Debug)]
pub struct Request {
    pub id: u64,
    pub shard: usize,
    pub work: Work,
    pub has_good_credential: bool,
}

impl Request {
    pub fn forward_op(&self) -> ForwardOp {
        match &self.work {
            Work::Publish(_) => ForwardOp::Publish,
            Work::Cache(request) => request.forward_op(),
        }
    }

    pub fn credential(&self) -> Credential {
        let text = match self.has_good_credential {
            true => GOOD_CREDENTIAL,
            false => BAD_CREDENTIAL,
        };
        Credential::new(text).expect("a short literal is a credential")
    }
}

/// Whose record this is: request, place in its batch, shard it was meant for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct RecordMark {
    pub request: u64,
    pub place: u16,
    pub shard: u16,
}

const MARK_BYTES: usize = 12;

impl RecordMark {
    fn write(self, fill: usize) -> Bytes {
        let mut out = Vec::with_capacity(MARK_BYTES + fill);
        out.extend_from_slice(&self.request.to_be_bytes());
        out.extend_from_slice(&self.place.to_be_bytes());
        out.extend_from_slice(&self.shard.to_be_bytes());
        out.resize(MARK_BYTES + fill, self.request as u8);
        Bytes::from(out)
    }

    /// `None` for a record that carries none: an empty value.
    pub fn read(record: &[u8]) -> Option<Self> {
        let (request, rest) = record.split_first_chunk::<8>()?;
        let (place, rest) = rest.split_first_chunk::<2>()?;
        let (shard, _) = rest.split_first_chunk::<2>()?;
        Some(Self {
            request: u64::from_be_bytes(*request),
            place: u16::from_be_bytes(*place),
            shard: u16::from_be_bytes(*shard),
        })
    }
}

/// The delta of an add: unlike any other, so that the log tells whose it is.
pub fn delta_of(id: u64) -> i64 {
    id as i64 + 1
}

impl Env {
    /// The next request, for a client of any broker that is up.
    pub fn next_request(&mut self, id: u64) -> Arc<Request> {
        let drawn = self.random.workload.index(self.catalog.shards.len());
        let shard = self.preferred_shard(drawn);
        let is_cache = self.catalog.shards[shard].is_cache();
        let choices = &mut self.random.workload;
        let work = match is_cache {
            true => Work::Cache(cache_request(choices, id, shard)),
            false => Work::Publish(batch(choices, id, shard)),
        };
        let is_bad = choices.chance(self.plan.bad_credential_per_mille);
        if is_bad {
            self.count_fault(Fault::BadCredential);
        }
        Arc::new(Request {
            id,
            shard,
            work,
            has_good_credential: !is_bad,
        })
    }
}

impl Env {
    /// The cache, more often than not, in runs that are about it; otherwise what was drawn.
    pub fn preferred_shard(&mut self, drawn: usize) -> usize {
        let cache = self.catalog.shards.iter().position(Shard::is_cache);
        match cache.filter(|_| self.plan.prefers_cache && self.random.upkeep.chance(600)) {
            Some(cache) => cache,
            None => drawn,
        }
    }

    /// A write to each log of a shard, numbered from `id` on.
    pub fn last_requests(&mut self, id: u64, shard: usize) -> Vec<Arc<Request>> {
        let mark = RecordMark {
            request: id,
            place: 0,
            shard: shard as u16,
        };
        let key: Arc<str> = Arc::from("last");
        let works = match self.catalog.shards[shard].is_cache() {
            false => vec![Work::Publish(
                Payloads::from_slices([mark.write(0)]).expect("one short record fits"),
            )],
            true => vec![
                Work::Cache(CacheRequest {
                    key: Arc::clone(&key),
                    operation: Operation::Put {
                        value: mark.write(0),
                        ttl_ms: None,
                    },
                }),
                Work::Cache(CacheRequest {
                    key,
                    operation: Operation::CounterAdd {
                        delta: delta_of(id + 1),
                    },
                }),
            ],
        };
        let numbered = works.into_iter().zip(id..);
        numbered
            .map(|(work, id)| {
                Arc::new(Request {
                    id,
                    shard,
                    work,
                    has_good_credential: true,
                })
            })
            .collect()
    }
}

fn batch(choices: &mut Choices, id: u64, shard: usize) -> Payloads {
    let records = match choices.chance(20) {
        true => 0,
        false => choices.between(1, 4),
    };
    let record = |place| {
        let mark = RecordMark {
            request: id,
            place: place as u16,
            shard: shard as u16,
        };
        mark.write((id % 7) as usize)
    };
    let records: Vec<Bytes> = (0..records).map(record).collect();
    Payloads::from_slices(records).expect("a few short records fit a frame")
}

fn cache_request(choices: &mut Choices, id: u64, shard: usize) -> CacheRequest {
    let key: Arc<str> = Arc::from(format!("k{}", choices.below(KEYS)).as_str());
    let operation = match choices.below(8) {
        0..=2 => {
            let mark = RecordMark {
                request: id,
                place: 0,
                shard: shard as u16,
            };
            let value = match choices.chance(100) {
                true => Bytes::new(),
                false => mark.write(0),
            };
            let ttl_ms = match choices.chance(300) {
                true => NonZeroU64::new(choices.between(1, 3_000)),
                false => None,
            };
            Operation::Put { value, ttl_ms }
        }
        3 | 4 => Operation::Get,
        5 => Operation::Delete,
        6 => Operation::CounterAdd {
            delta: delta_of(id),
        },
        _ => Operation::CounterGet,
    };
    CacheRequest { key, operation }
}
