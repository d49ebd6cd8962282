//! The order chains of all client streams of a core: which one a forward belongs to, and what they release.
//!
//! A chain is looked up once a forward; empty ones are swept once a second.

use std::collections::HashMap;
use std::sync::Arc;

use crate::driver::quic::{ConnId, StreamId};
use crate::ids::{NodeId, ShardId};
use crate::proto::forward_order::{OrderChain, Turn};
use crate::proto::peer::StreamSlot;

/// A client stream and a shard: what is forwarded for it stays in order.
pub(super) type OrderKey = (ConnId, StreamId, Arc<ShardId>);

/// A chain's place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ChainId(usize);

#[derive(Debug, Default)]
struct Chain {
    order: OrderChain,
    /// Of the peer link, used last.
    slot: Option<StreamSlot>,
}

/// All chains of a core.
#[derive(Debug, Default)]
pub(super) struct ForwardOrders {
    by_key: HashMap<OrderKey, ChainId>,
    chains: Vec<Chain>,
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
                chains.push(Chain::default());
                ChainId(chains.len() - 1)
            })
        })
    }

    /// A new forward at the end of a chain.
    pub fn begin(&mut self, chain: ChainId, token: u64, to: &NodeId) -> Turn {
        self.chains[chain.0].order.begin(token, way(to))
    }

    /// The peer stream a forward has to travel on, because others of its chain are on their way there.
    pub fn pin(&mut self, chain: ChainId, token: u64) -> Option<StreamSlot> {
        let of = &mut self.chains[chain.0];
        of.slot.filter(|_| of.order.follows_another(token))
    }

    /// The peer stream a forward of the chain was written on.
    pub fn note_slot(&mut self, chain: ChainId, slot: StreamSlot) {
        self.chains[chain.0].slot = Some(slot);
    }

    /// An attempt was surely not applied.
    pub fn on_refused(&mut self, chain: ChainId, token: u64) {
        self.chains[chain.0].order.on_refused(token);
        self.changed.push(chain);
    }

    /// A refused forward is to be sent again.
    pub fn on_retry(&mut self, chain: ChainId, token: u64, to: &NodeId) -> Turn {
        self.chains[chain.0].order.on_retry(token, way(to))
    }

    /// A forward is over.
    pub fn on_finished(&mut self, chain: ChainId, token: u64, may_be_applied: bool) {
        let of = &mut self.chains[chain.0].order;
        of.on_finished(token, may_be_applied);
        if of.has_unsent() {
            self.changed.push(chain);
        }
    }

    /// The next held forward that need not wait any longer.
    pub fn next_release(&mut self) -> Option<(u64, Turn)> {
        while let Some(&chain) = self.changed.last() {
            if let Some(release) = self.chains[chain.0].order.next_release() {
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
            let keeps = !chains[chain.0].order.is_empty();
            if !keeps {
                free.push(*chain);
            }
            keeps
        });
    }
}

/// A number for a broker that stays the same whatever the catalog says.
fn way(to: &NodeId) -> u64 {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    to.hash(&mut hasher);
    hasher.finish()
}
