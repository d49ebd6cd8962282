//! The network between brokers: connections with ordered streams, over links that fail.
//!
//! What a QUIC connection gives is kept: the bytes of one stream and direction arrive in order and
//! undamaged, or not at all; streams overtake each other; the two ends learn of a connection's end
//! at different times, and until an end has learnt of it, it may still receive what was under way.
//! It does not look into the bytes.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;

use super::env::{CoreAt, Env, Event, Fault};
use crate::proto::handshake::CloseCause;

/// How long an end hears nothing before it gives a connection up.
pub const IDLE_TIMEOUT_US: u64 = 2_000_000;
/// How long a dial is tried by the transport itself.
const DIAL_PATIENCE_US: u64 = 3_000_000;
const DIAL_RETRY_US: u64 = 300_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnId(pub u32);

/// One end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Side {
    Dialler,
    Listener,
}

impl Side {
    pub fn other(self) -> Self {
        match self {
            Self::Dialler => Self::Listener,
            Self::Listener => Self::Dialler,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EndState {
    /// Not yet told that the connection exists.
    Pending,
    Open,
    Closed,
}

#[derive(Debug, Clone, Copy)]
struct End {
    at: CoreAt,
    state: EndState,
}

#[derive(Debug, Default)]
struct Flow {
    chunks: VecDeque<Bytes>,
    /// When the last chunk given to the network arrives; later ones do not come before it.
    last_us: u64,
}

#[derive(Debug)]
struct Conn {
    ends: [End; 2],
    /// Nothing given to it from now on arrives.
    is_broken: bool,
    flows: BTreeMap<(u8, Side), Flow>,
}

/// What reaches one end of a connection.
#[derive(Debug)]
pub enum Arrival {
    /// The dialler's connection is there.
    Connected,
    /// A peer has connected.
    Accepted,
    /// Bytes of a stream, in order.
    Bytes { stream: u8, bytes: Bytes },
    /// The connection is over for this end.
    Closed(CloseCause),
}

/// Things the network does later.
#[derive(Debug)]
pub enum NetworkEvent {
    DialAttempt {
        conn: ConnId,
        until_us: u64,
    },
    /// One chunk may arrive at `to`.
    Chunk {
        conn: ConnId,
        to: Side,
        stream: u8,
    },
    /// The same for one that a cut kept away: its sender has to be there still.
    SentAgain {
        conn: ConnId,
        to: Side,
        stream: u8,
    },
    /// `side` learns that the connection is over.
    Notice {
        conn: ConnId,
        side: Side,
        cause: CloseCause,
    },
    Established {
        conn: ConnId,
    },
    /// Looks whether `from` still does not reach `to`, long enough for connections to die.
    Silence {
        from: usize,
        to: usize,
        since_us: u64,
    },
}

/// Connections and cuts.
#[derive(Debug)]
pub struct Network {
    conns: Vec<Conn>,
    /// Until when packets from one node do not reach another; 0 is not cut.
    cut_until_us: Vec<Vec<u64>>,
    cut_since_us: Vec<Vec<u64>>,
    /// Latency of each link, one way.
    latency_us: Vec<Vec<u64>>,
    /// Cores of each node, for placing accepted connections.
    cores: usize,
}

impl Network {
    pub fn new(latency_us: Vec<Vec<u64>>, cores: usize) -> Self {
        let nodes = latency_us.len();
        Self {
            conns: Vec::new(),
            cut_until_us: vec![vec![0; nodes]; nodes],
            cut_since_us: vec![vec![0; nodes]; nodes],
            latency_us,
            cores,
        }
    }

    fn conn(&mut self, id: ConnId) -> &mut Conn {
        &mut self.conns[id.0 as usize]
    }

    fn end(&mut self, id: ConnId, side: Side) -> &mut End {
        &mut self.conn(id).ends[side as usize]
    }

    /// The broker and core at one end.
    pub fn place(&self, id: ConnId, side: Side) -> CoreAt {
        self.conns[id.0 as usize].ends[side as usize].at
    }

    pub fn is_cut(&self, from: usize, to: usize, now_us: u64) -> bool {
        self.cut_until_us[from][to] > now_us
    }

    /// Connections with both ends open, for a fault that wants one.
    pub fn open_conns(&self) -> Vec<ConnId> {
        let open = |conn: &Conn| conn.ends.iter().all(|end| end.state == EndState::Open);
        (0..self.conns.len())
            .filter(|&i| open(&self.conns[i]))
            .map(|i| ConnId(i as u32))
            .collect()
    }
}

impl Env {
    fn one_way_us(&mut self, from: usize, to: usize) -> u64 {
        let base = self.network.latency_us[from][to];
        let jitter = self.random.network.below(base / 2 + 20);
        let slow = self.slow_factor[from].max(self.slow_factor[to]);
        (base + jitter) * slow
    }

    /// Opens a connection to a core of `to` that the kernel chooses.
    pub fn dial(&mut self, from: CoreAt, to: usize) -> ConnId {
        let cores = self.network.cores;
        let target = CoreAt {
            node: to,
            core: self.random.network.index(cores),
            incarnation: 0,
        };
        let pending = |at| End {
            at,
            state: EndState::Pending,
        };
        let id = ConnId(self.network.conns.len() as u32);
        self.network.conns.push(Conn {
            ends: [pending(from), pending(target)],
            is_broken: false,
            flows: BTreeMap::new(),
        });
        let at_us = self.now_us + self.one_way_us(from.node, to);
        let until_us = self.now_us + DIAL_PATIENCE_US;
        let event = NetworkEvent::DialAttempt { conn: id, until_us };
        self.queue.push(at_us, Event::Network(event));
        id
    }

    /// Gives bytes of a stream to the network. False when this end is closed.
    pub fn send(&mut self, id: ConnId, from: Side, stream: u8, bytes: Bytes) -> bool {
        let to = from.other();
        if self.network.end(id, from).state != EndState::Open {
            return false;
        }
        if self.network.conn(id).is_broken {
            return true;
        }
        for chunk in self.cut_into_chunks(bytes) {
            let (a, b) = (
                self.network.place(id, from).node,
                self.network.place(id, to).node,
            );
            let mut at_us = self.now_us + self.one_way_us(a, b);
            if self.may_inject && self.random.network.chance(self.plan.stall_per_mille) {
                self.count_fault(Fault::Stall);
                at_us += self.random.network.between(50_000, 6_000_000);
            }
            let flow = self.network.conn(id).flows.entry((stream, to)).or_default();
            flow.last_us = flow.last_us.max(at_us);
            flow.chunks.push_back(chunk);
            let at_us = flow.last_us;
            let event = NetworkEvent::Chunk {
                conn: id,
                to,
                stream,
            };
            self.queue.push(at_us, Event::Network(event));
        }
        true
    }

    fn cut_into_chunks(&mut self, bytes: Bytes) -> Vec<Bytes> {
        if bytes.len() < 2 || !self.random.network.chance(50) {
            return vec![bytes];
        }
        self.count_fault(Fault::SplitFrame);
        let at = 1 + self.random.network.index(bytes.len() - 1);
        vec![bytes.slice(..at), bytes.slice(at..)]
    }

    /// One end closes in order; the other hears of it unless the link is cut.
    pub fn close(&mut self, id: ConnId, side: Side) {
        let end = self.network.end(id, side);
        if end.state == EndState::Closed {
            return;
        }
        end.state = EndState::Closed;
        let other = side.other();
        let (from, to) = (
            self.network.place(id, side).node,
            self.network.place(id, other).node,
        );
        let (after_us, cause) = match self.network.is_cut(from, to, self.now_us) {
            true => (IDLE_TIMEOUT_US, CloseCause::TimedOut),
            false => (self.one_way_us(from, to), CloseCause::ClosedByPeer),
        };
        self.notice_later(id, other, after_us, cause);
    }

    fn notice_later(&mut self, conn: ConnId, side: Side, after_us: u64, cause: CloseCause) {
        let event = NetworkEvent::Notice { conn, side, cause };
        self.queue
            .push(self.now_us + after_us, Event::Network(event));
    }

    /// A process is gone: its ends are closed without a word, its peers time out.
    pub fn drop_ends_of(&mut self, node: usize) {
        for index in 0..self.network.conns.len() {
            let id = ConnId(index as u32);
            for side in [Side::Dialler, Side::Listener] {
                let end = self.network.end(id, side);
                if end.at.node != node || end.state == EndState::Closed {
                    continue;
                }
                end.state = EndState::Closed;
                let after_us = IDLE_TIMEOUT_US + self.random.network.below(200_000);
                self.notice_later(id, side.other(), after_us, CloseCause::TimedOut);
            }
        }
    }

    /// Packets from `from` do not reach `to` for a while.
    pub fn cut(&mut self, from: usize, to: usize, for_us: u64) {
        if !self.network.is_cut(from, to, self.now_us) {
            self.network.cut_since_us[from][to] = self.now_us;
        }
        let until_us = self.now_us + for_us;
        self.network.cut_until_us[from][to] = until_us;
        let event = NetworkEvent::Silence {
            from,
            to,
            since_us: self.network.cut_since_us[from][to],
        };
        self.queue
            .push(self.now_us + IDLE_TIMEOUT_US, Event::Network(event));
    }

    pub fn heal_cuts(&mut self) {
        for row in &mut self.network.cut_until_us {
            row.fill(0);
        }
    }

    /// Connections between two nodes die, `to` noticing first because it hears nothing.
    pub fn silence(&mut self, from: usize, to: usize) {
        for index in 0..self.network.conns.len() {
            let id = ConnId(index as u32);
            for side in [Side::Dialler, Side::Listener] {
                let there = self.network.place(id, side).node;
                let here = self.network.place(id, side.other()).node;
                if there != to || here != from {
                    continue;
                }
                let soon = self.random.network.below(200_000);
                self.notice_later(id, side, soon, CloseCause::TimedOut);
                let later = self.random.network.below(IDLE_TIMEOUT_US);
                self.notice_later(id, side.other(), later, CloseCause::TimedOut);
            }
        }
    }

    /// A connection breaks; its ends notice at their own time.
    pub fn drop_connection(&mut self, id: ConnId) {
        for side in [Side::Dialler, Side::Listener] {
            let most_us = *self.random.network.pick(&[5_000, 500_000]);
            let after_us = self.random.network.below(most_us);
            self.notice_later(id, side, after_us, CloseCause::Transport);
        }
    }

    /// A broker stands still for longer than its connections live.
    pub fn silence_node_later(&mut self, node: usize) {
        for index in 0..self.network.conns.len() {
            let id = ConnId(index as u32);
            for side in [Side::Dialler, Side::Listener] {
                if self.network.place(id, side).node != node {
                    continue;
                }
                let after_us = IDLE_TIMEOUT_US + self.random.network.below(200_000);
                self.notice_later(id, side, after_us, CloseCause::TimedOut);
                self.notice_later(id, side.other(), after_us, CloseCause::TimedOut);
            }
        }
    }

    /// A stream breaks inside a frame: part of what is under way arrives, then both ends close.
    pub fn reset_inside_frame(&mut self, id: ConnId) {
        self.count_fault(Fault::ResetMidFrame);
        let cut = self.random.network.number();
        self.network.conn(id).is_broken = true;
        for flow in self.network.conn(id).flows.values_mut() {
            if let Some(first) = flow.chunks.front_mut() {
                let keep = (cut % (first.len() as u64 + 1)) as usize;
                first.truncate(keep);
                flow.chunks.truncate(1);
            }
        }
        for side in [Side::Dialler, Side::Listener] {
            let after_us = self.random.network.below(20_000);
            self.notice_later(id, side, after_us, CloseCause::Transport);
        }
    }

    /// A network event; what reaches a core comes out, for the core.
    pub fn on_network(&mut self, event: NetworkEvent) -> Option<(CoreAt, ConnId, Side, Arrival)> {
        match event {
            NetworkEvent::DialAttempt { conn, until_us } => self.on_dial(conn, until_us),
            NetworkEvent::Established { conn } => {
                let end = self.network.end(conn, Side::Dialler);
                if end.state != EndState::Pending {
                    return None;
                }
                end.state = EndState::Open;
                Some((end.at, conn, Side::Dialler, Arrival::Connected))
            }
            NetworkEvent::Chunk { conn, to, stream } => self.on_chunk(conn, to, stream, false),
            NetworkEvent::SentAgain { conn, to, stream } => self.on_chunk(conn, to, stream, true),
            NetworkEvent::Notice { conn, side, cause } => {
                let end = self.network.end(conn, side);
                if end.state == EndState::Closed {
                    return None;
                }
                let was_pending = end.state == EndState::Pending;
                end.state = EndState::Closed;
                let at = end.at;
                if was_pending && side == Side::Listener {
                    return None;
                }
                Some((at, conn, side, Arrival::Closed(cause)))
            }
            NetworkEvent::Silence { from, to, since_us } => {
                let still = self.network.is_cut(from, to, self.now_us)
                    && self.network.cut_since_us[from][to] == since_us;
                if still {
                    self.silence(from, to);
                }
                None
            }
        }
    }

    fn on_dial(&mut self, conn: ConnId, until_us: u64) -> Option<(CoreAt, ConnId, Side, Arrival)> {
        let from = self.network.place(conn, Side::Dialler);
        let to = self.network.place(conn, Side::Listener);
        if self.network.end(conn, Side::Dialler).state != EndState::Pending {
            return None;
        }
        if self.may_inject && self.random.network.chance(self.plan.dial_fails_per_mille) {
            self.count_fault(Fault::DialFailed);
            self.notice_later(conn, Side::Dialler, 1000, CloseCause::Transport);
            return None;
        }
        let reaches = !self.network.is_cut(from.node, to.node, self.now_us)
            && !self.network.is_cut(to.node, from.node, self.now_us);
        let Some(incarnation) = self.incarnation[to.node].filter(|_| reaches) else {
            if self.now_us < until_us {
                let event = NetworkEvent::DialAttempt { conn, until_us };
                self.queue
                    .push(self.now_us + DIAL_RETRY_US, Event::Network(event));
            }
            return None;
        };
        let back_us = self.one_way_us(to.node, from.node);
        let event = NetworkEvent::Established { conn };
        self.queue
            .push(self.now_us + back_us, Event::Network(event));
        let end = self.network.end(conn, Side::Listener);
        end.state = EndState::Open;
        end.at.incarnation = incarnation;
        Some((end.at, conn, Side::Listener, Arrival::Accepted))
    }

    fn on_chunk(
        &mut self,
        conn: ConnId,
        to: Side,
        stream: u8,
        is_sent_again: bool,
    ) -> Option<(CoreAt, ConnId, Side, Arrival)> {
        let target = self.network.place(conn, to);
        let source = self.network.place(conn, to.other());
        let cut_until_us = self.network.cut_until_us[source.node][target.node];
        if is_sent_again && self.network.end(conn, to.other()).state == EndState::Closed {
            // What a cut kept away has to be sent again, and there is nobody to do it.
            let flow = self.network.conn(conn).flows.get_mut(&(stream, to))?;
            flow.chunks.clear();
            return None;
        }
        if cut_until_us > self.now_us {
            let event = NetworkEvent::SentAgain { conn, to, stream };
            let again_us = cut_until_us + self.one_way_us(source.node, target.node);
            self.queue.push(again_us, Event::Network(event));
            return None;
        }
        let state = self.network.end(conn, to).state;
        let flow = self.network.conn(conn).flows.get_mut(&(stream, to))?;
        let bytes = flow.chunks.pop_front()?;
        match state {
            EndState::Open => Some((target, conn, to, Arrival::Bytes { stream, bytes })),
            EndState::Pending | EndState::Closed => None,
        }
    }
}
