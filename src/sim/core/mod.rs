//! One core of a simulated broker: the broker's own machines behind a thin driver.
//!
//! What decides is `proto`, and every byte between brokers goes through the real codec. This
//! driver does what the real one does around them: it carries out actions, keeps who waits for
//! what, and checks ownership once more where the record is written.

mod accept;
mod cache;
mod compact;
mod group;
mod ingress;
mod lanes;
mod lead;
mod links;
mod owner;
mod readers;
mod replica;
mod ship;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::consumers::GroupAt;
use super::disk::{Change, GroupEnd, Journal, LogKey};
use super::env::{CoreAt, Env};
use super::network::{Arrival, ConnId, Side};
use super::workload::Request;
use crate::ids::{Generation, NodeId};
use crate::proto::group::GroupOp;
use crate::proto::outcome::Target;
use crate::proto::ownership::{Owner, Serving, ShardView};
use crate::proto::replication::leader::{AskId, FollowerIdx, ReportId};
use crate::proto::MonoTime;
use crate::wire::internal::ReplicaLog;

pub use group::{GroupLife, LIMITS as GROUP_LIMITS};
pub use lanes::LaneMsg;
pub use owner::{ServeRefusal, Work};
pub use readers::{stream_of, ReaderAnswer};
pub use replica::logs_of_shard;

use accept::{PeerConn, ReplicateOwed};
use cache::Caches;
use group::Groups;
use ingress::PendingForward;
use lanes::Lanes;
use lead::Leads;
use links::Link;
use owner::Waiter;
use replica::Replicas;

/// Something that happens to a core.
#[derive(Debug)]
pub enum CoreInput {
    /// A deadline of one of its machines.
    Wake,
    Arrival {
        conn: ConnId,
        side: Side,
        arrival: Arrival,
    },
    /// A client connected to this core asks for something.
    Request(Arc<Request>),
    /// The commit group under way is over.
    GroupEnds(GroupEnd),
    Lane {
        from: usize,
        message: LaneMsg,
    },
    /// The process has read another catalog file.
    View(usize),
    /// Stored records for a comparison have been read.
    ReplicaRead {
        key: LogKey,
        ticket: u64,
        from: u64,
        to: u64,
    },
    /// Records for a follower can be read.
    ShipRead {
        shard: usize,
        generation: u64,
        follower: FollowerIdx,
        log: ReplicaLog,
        id: AskId,
        from: u64,
        most: u64,
    },
    /// A member of a consumer group asks for something.
    Group {
        at: GroupAt,
        ticket: u64,
        op: GroupOp,
    },
    /// Records for the poll of a group can be read.
    GroupRead {
        of: GroupLife,
        from: u64,
        most: u64,
    },
    /// The next records of a log that is being compacted have been read.
    CompactionRead {
        key: LogKey,
        generation: Generation,
        from: u64,
        most: u64,
    },
    /// The engine has stored a leader's report, or the leader has to take it for not stored.
    ReportAnswered {
        shard: usize,
        generation: u64,
        id: ReportId,
        is_stored: bool,
    },
    /// Retention gives up the oldest records of a log.
    Trim {
        key: LogKey,
        base: u64,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    Forward {
        token: u64,
    },
    ClosePeer {
        conn: ConnId,
    },
    /// Expired entries, and logs to compact.
    Tend,
    Compact,
}

/// The state of one core for the life of a process; the journal outlives it.
#[derive(Debug)]
pub struct Core {
    pub at: CoreAt,
    me: NodeId,
    cores: usize,
    /// A broker from before the authorized kinds.
    is_legacy: bool,
    /// Each process counts its monotonic time from a start of its own.
    mono_offset_us: u64,
    /// The catalog version this process has read.
    pub view: Option<usize>,
    links: BTreeMap<usize, Link>,
    accepted: BTreeMap<ConnId, PeerConn>,
    dialled: BTreeMap<ConnId, usize>,
    forwards: BTreeMap<u64, PendingForward>,
    waiters: BTreeMap<u64, Waiter>,
    caches: Caches,
    groups: Groups,
    replicate_owed: BTreeMap<u64, ReplicateOwed>,
    replicas: Replicas,
    leads: Leads,
    lanes: Lanes,
    last_token: u64,
    timers: BTreeSet<(MonoTime, Timer)>,
    wake_at_us: Option<u64>,
    pub journal: Journal,
}

impl Core {
    /// A core of a process that starts now, over what its journal's disk holds.
    pub fn start(env: &mut Env, at: CoreAt, cores: usize, journal: Journal) -> Self {
        let mut core = Self {
            at,
            me: env.catalog.nodes[at.node].clone(),
            cores,
            is_legacy: env.plan.legacy_nodes[at.node],
            mono_offset_us: env.random.schedule.below(1 << 40),
            view: None,
            links: BTreeMap::new(),
            accepted: BTreeMap::new(),
            dialled: BTreeMap::new(),
            forwards: BTreeMap::new(),
            waiters: BTreeMap::new(),
            caches: Caches::default(),
            groups: Groups::default(),
            replicate_owed: BTreeMap::new(),
            replicas: Replicas::default(),
            leads: Leads::default(),
            lanes: Lanes::new(cores),
            last_token: 0,
            timers: BTreeSet::new(),
            wake_at_us: None,
            journal,
        };
        core.open_replicas(env);
        core
    }

    /// One input, and everything that follows from it at once.
    pub fn on_input(&mut self, env: &mut Env, input: CoreInput) {
        match input {
            CoreInput::Wake => self.on_wake(env),
            CoreInput::Arrival {
                conn,
                side: Side::Dialler,
                arrival,
            } => self.on_link_arrival(env, conn, arrival),
            CoreInput::Arrival {
                conn,
                side: Side::Listener,
                arrival,
            } => self.on_peer_arrival(env, conn, arrival),
            CoreInput::Request(request) => self.on_request(env, request),
            CoreInput::GroupEnds(end) => self.on_group_end(env, end),
            CoreInput::Lane { from, message } => self.on_lane(env, from, message),
            CoreInput::View(version) => self.on_view(env, version),
            CoreInput::ReplicaRead {
                key,
                ticket,
                from,
                to,
            } => self.on_replica_read(env, key, ticket, (from, to)),
            CoreInput::ShipRead {
                shard,
                generation,
                follower,
                log,
                id,
                from,
                most,
            } => self.on_ship_read(env, (shard, generation), (follower, log), (id, from, most)),
            CoreInput::Group { at, ticket, op } => self.on_group_ask(env, at, ticket, op),
            CoreInput::GroupRead { of, from, most } => self.on_group_read(env, of, from, most),
            CoreInput::CompactionRead {
                key,
                generation,
                from,
                most,
            } => self.on_compaction_read(env, (key, generation), (from, most)),
            CoreInput::ReportAnswered {
                shard,
                generation,
                id,
                is_stored,
            } => self.on_report_answered(shard, generation, id, is_stored),
            CoreInput::Trim { key, base } => self.on_trim(env, key, base),
        }
        self.run_replicas(env);
        self.begin_leads(env);
        self.run_leads(env);
        self.run_links(env);
        self.run_leads(env);
        self.run_links(env);
        self.run_groups(env);
        self.start_commit_group(env);
        self.arm(env);
    }

    fn now(&self, env: &Env) -> MonoTime {
        MonoTime::from_micros(env.now_us + self.mono_offset_us)
    }

    fn token(&mut self) -> u64 {
        self.last_token += 1;
        self.last_token
    }

    fn on_wake(&mut self, env: &mut Env) {
        // One that an earlier one was armed before is for the lanes only.
        if self.wake_at_us.is_none_or(|at_us| at_us > env.now_us) {
            return self.drain_backlog(env);
        }
        self.wake_at_us = None;
        let now = self.now(env);
        while let Some((_, timer)) = self.timers.first().copied().filter(|(at, _)| *at <= now) {
            self.timers.pop_first();
            match timer {
                Timer::Forward { token } => self.on_forward_time(env, token),
                Timer::ClosePeer { conn } => self.close_peer(env, conn),
                Timer::Tend => self.tend_states(env),
                Timer::Compact => self.run_compaction(env),
            }
        }
        for link in self.links.values_mut() {
            link.machine.on_time(now);
        }
        self.leads_on_time(env);
        self.expire_greetings(env, now);
        self.drain_backlog(env);
    }

    /// Asks to be woken at the first deadline of any machine.
    fn arm(&mut self, env: &mut Env) {
        let timers = self.timers.first().map(|(at, _)| *at);
        let links = self
            .links
            .values()
            .filter_map(|l| l.machine.next_deadline());
        let leads = self.leads.next_deadline(self.now(env));
        let groups = self.groups.next_deadline();
        let greetings = self
            .accepted
            .values()
            .filter_map(|p| p.handshake.deadline());
        let Some(at) = timers
            .into_iter()
            .chain(links)
            .chain(leads)
            .chain(groups)
            .chain(greetings)
            .min()
        else {
            return;
        };
        let at_us = at.as_micros().saturating_sub(self.mono_offset_us);
        let at_us = at_us.max(env.now_us + 1);
        if self.wake_at_us.is_some_and(|armed| armed <= at_us) {
            return;
        }
        self.wake_at_us = Some(at_us);
        env.to_core(at_us - env.now_us, self.at, CoreInput::Wake);
    }

    /// The core that owns a shard, the same in every life of the broker.
    fn owner_core(&self, shard: usize) -> usize {
        shard % self.cores
    }

    fn on_view(&mut self, env: &mut Env, version: usize) {
        if self.view == Some(version) {
            // Read again, and as before.
            return self.leads_on_view(env, version);
        }
        if self.view.is_some_and(|view| view > version) {
            return;
        }
        env.judge
            .on_view(&env.catalog, self.at.node, self.view, version);
        self.view = Some(version);
        self.caches.on_view(env, self.at.node, version);
        self.run_compaction(env);
        self.drop_moved_groups(env);
        self.replicas_on_view(env, version);
        self.leads_on_view(env, version);
        self.forwards_after_view(env);
    }

    /// A shard as this process sees it now; the names in it are the catalog's.
    fn shard_view<'a>(&self, env: &'a Env, shard: usize) -> Option<ShardView<'a>> {
        let assignment = env.catalog.assignment(self.view?, shard);
        let owner = match assignment.leader == self.at.node {
            true => Owner::Me,
            false => Owner::Other {
                node: &env.catalog.nodes[assignment.leader],
            },
        };
        Some(ShardView {
            owner,
            generation: Generation(assignment.generation),
            serving: self.serving(env, shard),
        })
    }

    fn serving(&self, _env: &Env, _shard: usize) -> Serving {
        match self.journal.has_failed() {
            true => Serving::StorageFailed,
            false => Serving::Ready,
        }
    }

    /// Where the route points now.
    fn current_target(&self, env: &Env, shard: usize) -> Option<Target> {
        let assignment = env.catalog.assignment(self.view?, shard);
        Some(Target {
            node: env.catalog.nodes[assignment.leader].clone(),
            generation: Generation(assignment.generation),
        })
    }

    /// Whether this process leads the shard at exactly that generation.
    fn leads(&self, env: &Env, shard: usize, generation: Generation) -> bool {
        let Some(version) = self.view else {
            return false;
        };
        let assignment = env.catalog.assignment(version, shard);
        assignment.leader == self.at.node && assignment.generation == generation.0
    }

    /// Whether this process leads the shard, at any generation.
    pub fn leads_any(&self, env: &Env, shard: usize) -> bool {
        let view = self.view;
        view.is_some_and(|view| env.catalog.assignment(view, shard).leader == self.at.node)
    }

    /// Retention: the oldest records go.
    fn on_trim(&mut self, env: &mut Env, key: LogKey, base: u64) {
        let seen = self.journal.seen(key);
        let base = base.min(self.journal.durable_tail(key));
        if base <= seen.base() || self.journal.is_busy(key) || self.journal.is_damaged(key) {
            return;
        }
        let token = self.token();
        let change = Change::RaiseBase { base };
        env.judge
            .on_base_raised(self.at.node, key, base, &self.journal);
        if self.journal.submit(key, change, token, false).is_ok() {
            env.count_fault(super::env::Fault::RaisedBase);
            self.replica_base_raised(key, base);
        }
    }

    /// How far a majority is known to hold a shard this core leads.
    pub fn mark(&self, shard: usize) -> Option<u64> {
        self.leads.mark(shard)
    }

    /// What the slowest follower of a led shard lacks, if all are sent what they lack.
    pub fn lag(&self, shard: usize) -> Option<u64> {
        self.leads.lag(shard)
    }

    /// Whether this core takes writes of a replicated shard at that generation.
    pub fn leads_openly(&self, shard: usize, generation: u64) -> bool {
        self.leads.is_open(shard, generation)
    }

    /// What retention may give up of a log that this core leads.
    pub fn may_forget_below(&self, key: LogKey) -> u64 {
        self.leads.may_forget_below(key)
    }

    /// What retention may give up of a copy, and the generation of the leader it was compared with: where that
    /// leader and one copy are a majority, what they agree in.
    pub fn follower_may_forget_below(&self, env: &Env, key: LogKey) -> Option<(u64, u64)> {
        let assignment = env.catalog.assignment(self.view?, key.shard);
        let matched = self.replicas.matched_with_leader(key)?;
        (assignment.replicas.len() <= 3).then_some((assignment.generation, matched))
    }

    /// What a leader does not ship to, for the last look.
    pub fn halted_replicas(&self, shard: usize) -> Vec<String> {
        self.leads.halted(shard)
    }

    /// Requests in flight and other things that must be gone when a run has healed.
    pub fn unsettled(&self) -> Option<String> {
        let in_flight: usize = self.links.values().map(|l| l.machine.in_flight()).sum();
        let waiting: usize = self.links.values().map(|l| l.machine.waiting()).sum();
        let owed: u32 = self.accepted.values().map(PeerConn::owed).sum();
        let counts = [
            ("forwards", self.forwards.len()),
            ("waiters", self.waiters.len()),
            ("in flight", in_flight),
            ("waiting for a link", waiting),
            ("owed to peers", owed as usize),
            ("lane backlog", self.lanes.backlog()),
            ("replicate messages held", self.replicas.held()),
            ("replicate answers owed", self.replicate_owed.len()),
            ("replicate messages out", self.leads.ships()),
            ("quorum waits", self.leads.waiting_writes()),
            ("journal", usize::from(self.journal.has_pending())),
        ];
        let left: Vec<String> = counts
            .iter()
            .filter(|(_, count)| *count > 0)
            .map(|(what, count)| format!("{what}: {count}"))
            .collect();
        (!left.is_empty()).then(|| left.join(", "))
    }
}
