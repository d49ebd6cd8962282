//! The order chains of all client streams of a core: which one a forward belongs to, and what they release.
//!
//! A chain is looked up once a forward; empty ones are swept once a second.

use std::collections::HashMap;
use std::sync::Arc;

use crate::driver::quic::{ConnId, StreamId};
use crate::ids::ShardId;
use crate::proto::forward_order::{OrderChain, Turn};

/// A client stream and a shard: what is forwarded for it stays in order.
pub(super) type OrderKey = (ConnId, StreamId, Arc<ShardId>);

/// A chain's place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ChainId(usize);

/// All chains of a core.
#[derive(Debug, Default)]
pub(super) struct ForwardOrders {
    by_key: HashMap<OrderKey, ChainId>,
    chains: Vec<OrderChain>,
    free: Vec<ChainId>,
    /// Chains that may have something to release.
    changed: Vec<ChainId>,
}

impl ForwardOrders {
    /// The chain of a client stream and shard.
    pub fn chain(&mut self, key: OrderKey) -> ChainId {
        let (chains, free) = (&mut self.chains, &mut self.free);
        *self.by_key.entry(key).or_insert_with(|| {
            free.pop().unwrap_or_else(|| {
                chains.push(OrderChain::default());
                ChainId(chains.len() - 1)
            })
        })
    }

    /// A new forward at the end of a chain.
    pub fn begin(&mut self, chain: ChainId, token: u64) -> Turn {
        self.chains[chain.0].begin(token)
    }

    /// An attempt was surely not applied.
    pub fn on_refused(&mut self, chain: ChainId, token: u64) {
        self.chains[chain.0].on_refused(token);
        self.changed.push(chain);
    }

    /// A refused forward is to be sent again.
    pub fn on_retry(&mut self, chain: ChainId, token: u64) -> Turn {
        self.chains[chain.0].on_retry(token)
    }

    /// A forward is over.
    pub fn on_finished(&mut self, chain: ChainId, token: u64, may_be_applied: bool) {
        let of = &mut self.chains[chain.0];
        of.on_finished(token, may_be_applied);
        if of.has_unsent() {
            self.changed.push(chain);
        }
    }

    /// The next held forward that need not wait any longer.
    pub fn next_release(&mut self) -> Option<(u64, Turn)> {
        while let Some(&chain) = self.changed.last() {
            if let Some(release) = self.chains[chain.0].next_release() {
                return Some(release);
            }
            self.changed.pop();
        }
        None
    }

    /// Forgets chains nothing is under way in.
    pub fn sweep(&mut self) {
        let (chains, free) = (&self.chains, &mut self.free);
        self.by_key.retain(|_, chain| {
            let keeps = !chains[chain.0].is_empty();
            if !keeps {
                free.push(*chain);
            }
            keeps
        });
    }
}
