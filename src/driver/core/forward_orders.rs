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
    /// Of the peer link: the stream of what is on its way, written or waiting for its connection.
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
        if !of.order.follows_another(token) {
            // What is known is of requests that are over, maybe on another connection.
            of.slot = None;
        }
        of.slot
    }

    /// The peer stream a forward of the chain is written on, or will be once there is a connection.
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
        let of = &mut self.chains[chain.0].order;
        let turn = of.on_retry(token, way(to));
        // What waited for it to be sent again need not wait for its answer.
        if turn == Turn::Send && of.has_unsent() {
            self.changed.push(chain);
        }
        turn
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{Namespace, ShardKind, StreamName, TenantId};

    fn key() -> OrderKey {
        let shard = ShardId {
            kind: ShardKind::Stream,
            tenant: TenantId::new("t").unwrap(),
            namespace: Namespace::new("n").unwrap(),
            name: StreamName::new("s").unwrap(),
            shard: 0,
        };
        let stream = StreamId::new(quinn_proto::Side::Client, quinn_proto::Dir::Bi, 0);
        (ConnId::default(), stream, Arc::new(shard))
    }

    /// What the streams of a former connection were used for says nothing about the next one.
    #[test]
    fn a_stream_is_followed_only_while_something_is_on_its_way_there() {
        let mut orders = ForwardOrders::default();
        let chain = orders.chain(key());
        let to = NodeId::new("node-2").unwrap();
        assert_eq!(orders.begin(chain, 1, &to), Turn::Send);
        assert_eq!(orders.pin(chain, 1), None);
        orders.note_slot(chain, StreamSlot(3));
        orders.begin(chain, 2, &to);
        assert_eq!(orders.pin(chain, 2), Some(StreamSlot(3)));
        // The connection is lost, and with it both.
        for token in [1, 2] {
            orders.on_finished(chain, token, true);
        }
        // The next ones wait for a connection; the first of them is given a stream by its client stream.
        orders.begin(chain, 4, &to);
        assert_eq!(orders.pin(chain, 4), None);
        orders.begin(chain, 5, &to);
        assert_eq!(
            orders.pin(chain, 5),
            None,
            "4 does not wait for that stream"
        );
        orders.note_slot(chain, StreamSlot(1));
        orders.begin(chain, 6, &to);
        assert_eq!(orders.pin(chain, 6), Some(StreamSlot(1)));
    }

    #[test]
    fn what_waits_for_a_retry_goes_with_it_and_not_after_its_answer() {
        let mut orders = ForwardOrders::default();
        let chain = orders.chain(key());
        let to = NodeId::new("node-2").unwrap();
        orders.begin(chain, 1, &to);
        orders.on_refused(chain, 1);
        for token in [2, 3] {
            assert_eq!(orders.begin(chain, token, &to), Turn::Hold);
        }
        assert_eq!(orders.next_release(), None);
        assert_eq!(orders.on_retry(chain, 1, &to), Turn::Send);
        for token in [2, 3] {
            assert_eq!(orders.next_release(), Some((token, Turn::Send)));
        }
        assert_eq!(orders.next_release(), None);
    }
}
