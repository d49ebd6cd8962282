//! Ingress, links and owners together on virtual time: what the application sees must be true.
//!
//! One ingress forwards to two owners over real link machines. A seeded schedule delays and loses
//! requests and answers, cuts connections, refuses dials, restarts owners, moves the shard, lets routes
//! lag and makes owners refuse. For every request: exactly one outcome; `Done` means applied; `Refused`
//! means not applied; a publish, put or add is applied at most once. The publishes of one client stream
//! whose outcome is known were applied in its order.
//!
//! `FELIX_SIM_SEEDS` (400) sets how many schedules are run.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use felix_uring::ids::{CorrelationId, Generation, NodeId};
use felix_uring::proto::correlation::Family;
use felix_uring::proto::forward::{Forward, ForwardLimits, ForwardOp, Step};
use felix_uring::proto::forward_order::{OrderChain, Turn};
use felix_uring::proto::handshake::{CloseCause, HELLO_CORRELATION};
use felix_uring::proto::outcome::{
    ForwardKind, NotLeader, NotSentCause, Outcome, PeerCode, PeerError, SendResult, Target,
};
use felix_uring::proto::ownership::{
    admit_forward, CredentialVerdict, ForwardAdmission, Load, Owner, Serving, ShardView,
};
use felix_uring::proto::peer::{
    Answer, ConnectionEpoch, LinkAction, LinkLimits, PeerLink, Request, StreamSlot,
};
use felix_uring::proto::MonoTime;

type Token = u32;
type Reply = u32;

/// A seeded source of choices.
struct Choices(u64);

impl Choices {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.0 >> 33) % n
    }

    fn percent(&mut self, p: u64) -> bool {
        self.below(100) < p
    }
}

#[derive(Debug)]
enum Event {
    Connected(usize, ConnectionEpoch),
    DialFailed(usize, ConnectionEpoch),
    HelloOk(usize, ConnectionEpoch),
    Arrive(usize, ConnectionEpoch, CorrelationId, Token, ForwardKind),
    Answer(usize, ConnectionEpoch, CorrelationId, Answer<Reply>),
    Cut(usize),
    Restart(usize),
    Ready(usize),
    Move,
    ForwardTimer(Token),
    NewRequest,
}

struct OwnerNode {
    knows_authorized: bool,
    /// The generation this owner's view has reached.
    view: u64,
    serving: Serving,
    /// Connections up to this one ended with an earlier life of the process.
    ended_with: ConnectionEpoch,
}

/// Client streams of the ingress.
const CLIENTS: u32 = 4;

struct World {
    now: MonoTime,
    queue: BTreeMap<(MonoTime, u64), Event>,
    order: u64,
    choices: Choices,
    links: Vec<PeerLink<Token, Reply>>,
    epochs: Vec<ConnectionEpoch>,
    owners: Vec<OwnerNode>,
    nodes: Vec<NodeId>,
    /// The true assignment: generation g is led by node g % 2.
    generation: u64,
    forwards: HashMap<Token, Forward>,
    targets: HashMap<Token, Target>,
    applied: HashMap<Token, u32>,
    /// Publishes in the order in which they were written.
    log: Vec<Token>,
    outcomes: HashMap<Token, Outcome<Reply>>,
    requests: u32,
    chains: Vec<OrderChain>,
    held: HashMap<Token, (Target, ForwardKind)>,
    /// When the last request of each stream arrives; `None` once one of them got lost.
    streams: HashMap<(usize, ConnectionEpoch, StreamSlot), Option<MonoTime>>,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut choices = Choices(seed);
        let nodes: Vec<_> = ["b", "c"].iter().map(|n| NodeId::new(n).unwrap()).collect();
        let limits = LinkLimits {
            in_flight: 8,
            ..LinkLimits::default()
        };
        let links = nodes
            .iter()
            .map(|n| PeerLink::new(n.clone(), limits, choices.below(1 << 30)))
            .collect();
        let owners = (0..2)
            .map(|_| OwnerNode {
                knows_authorized: !choices.percent(15),
                view: 0,
                serving: Serving::Ready,
                ended_with: ConnectionEpoch(0),
            })
            .collect();
        let mut world = Self {
            now: MonoTime::ZERO,
            queue: BTreeMap::new(),
            order: 0,
            choices,
            links,
            epochs: vec![ConnectionEpoch(0); 2],
            owners,
            nodes,
            generation: 0,
            forwards: HashMap::new(),
            targets: HashMap::new(),
            applied: HashMap::new(),
            log: Vec::new(),
            outcomes: HashMap::new(),
            requests: 0,
            chains: (0..CLIENTS).map(|_| OrderChain::default()).collect(),
            held: HashMap::new(),
            streams: HashMap::new(),
        };
        for i in 0..60 {
            // Alone, and several at once.
            let at = [i * 37, i / 6 * 211][(i % 2) as usize];
            world.schedule(at, Event::NewRequest);
        }
        for i in 0..6 {
            let at = world.choices.below(2_000);
            let node = world.choices.below(2) as usize;
            world.schedule(at, Event::Cut(node));
            if i < 2 {
                let at = world.choices.below(2_000);
                let node = world.choices.below(2) as usize;
                world.schedule(at, Event::Restart(node));
            }
            world.schedule(i * 311, Event::Move);
        }
        world
    }

    fn schedule(&mut self, in_ms: u64, event: Event) {
        self.order += 1;
        let at = self.now + Duration::from_millis(in_ms);
        self.queue.insert((at, self.order), event);
    }

    fn leader(&self, generation: u64) -> usize {
        (generation % 2) as usize
    }

    fn run(&mut self) {
        for _ in 0..200_000 {
            let timer = self.links.iter().filter_map(|l| l.next_deadline()).min();
            let event = self.queue.keys().next().map(|(at, _)| *at);
            let all_done = self.outcomes.len() == self.requests as usize;
            match (event, timer) {
                (None, _) if all_done => return,
                (None, None) => return,
                (Some(at), timer) if timer.is_none_or(|t| at <= t) => {
                    let (key, event) = self.queue.pop_first().unwrap();
                    self.now = self.now.max(key.0);
                    self.handle(event);
                }
                (_, Some(at)) => {
                    self.now = self.now.max(at);
                    for link in &mut self.links {
                        link.on_time(self.now);
                    }
                }
                (Some(_), None) => unreachable!(),
            }
            self.carry_out();
        }
        panic!("no end: {} of {}", self.outcomes.len(), self.requests);
    }

    fn handle(&mut self, event: Event) {
        let now = self.now;
        match event {
            Event::NewRequest => self.new_request(),
            Event::Move => {
                self.generation += 1;
                for owner in &mut self.owners {
                    owner.serving = [Serving::Ready, Serving::Opening, Serving::StorageFailed]
                        [(self.choices.below(20) / 9) as usize];
                    if self.choices.percent(60) {
                        owner.view = self.generation;
                    }
                }
                if self.choices.percent(50) {
                    self.tell_route();
                }
            }
            Event::Restart(node) => {
                let owner = &mut self.owners[node];
                owner.ended_with = self.epochs[node];
                owner.view = self.generation;
                owner.serving = Serving::Opening;
                self.links[node].on_closed(self.epochs[node], now, CloseCause::TimedOut);
                self.schedule(60, Event::Ready(node));
            }
            Event::Ready(node) => self.owners[node].serving = Serving::Ready,
            Event::Cut(node) => {
                self.links[node].on_closed(self.epochs[node], now, CloseCause::TimedOut);
            }
            Event::Connected(node, epoch) => self.links[node].on_connected(epoch, now),
            Event::DialFailed(node, epoch) => {
                self.links[node].on_closed(epoch, now, CloseCause::Transport);
            }
            Event::HelloOk(node, epoch) => {
                let answer = Answer::HelloOk {
                    node_id: self.nodes[node].as_str().into(),
                };
                self.links[node].on_answer(epoch, now, HELLO_CORRELATION, answer);
            }
            Event::Answer(node, epoch, correlation, answer) => {
                self.links[node].on_answer(epoch, now, correlation, answer);
            }
            Event::Arrive(node, epoch, correlation, token, kind) => {
                self.arrive(node, epoch, correlation, token, kind);
            }
            Event::ForwardTimer(token) => {
                if let Some(mut forward) = self.forwards.remove(&token) {
                    let current = self.target_of(self.generation);
                    let knows = self.choices.percent(50);
                    let step = forward.on_time(now, knows.then_some(&current));
                    self.forwards.insert(token, forward);
                    if step != Step::Nothing {
                        self.act(token, step);
                    }
                }
            }
        }
    }

    fn target_of(&self, generation: u64) -> Target {
        Target {
            node: self.nodes[self.leader(generation)].clone(),
            generation: Generation(generation),
        }
    }

    /// The ingress reads the catalog: what waits is told.
    fn tell_route(&mut self) {
        let current = self.target_of(self.generation);
        for token in 0..self.requests {
            let Some(mut forward) = self.forwards.remove(&token) else {
                continue;
            };
            let step = forward.on_route_changed(self.now, &current);
            self.forwards.insert(token, forward);
            if step != Step::Nothing {
                self.act(token, step);
            }
        }
    }

    /// The chain of a request: publishes have one.
    fn chain_of(&mut self, token: Token) -> Option<&mut OrderChain> {
        let is_publish = self.forwards[&token].op() == ForwardOp::Publish;
        is_publish.then(|| &mut self.chains[(token % CLIENTS) as usize])
    }

    fn release(&mut self) {
        while let Some((token, turn)) = self.chains.iter_mut().find_map(OrderChain::next_release) {
            let token = token as Token;
            let (target, kind) = self.held.remove(&token).expect("what is held");
            match turn {
                Turn::Send | Turn::Hold => self.send(token, target, kind),
                Turn::GiveUp => {
                    let mut forward = self.forwards.remove(&token).unwrap();
                    let step = forward.on_overtaken();
                    self.forwards.insert(token, forward);
                    self.act(token, step);
                }
            }
        }
    }

    fn new_request(&mut self) {
        let token = self.requests;
        self.requests += 1;
        let op = ForwardOp::ALL[self.choices.below(6) as usize];
        // The ingress may be a generation behind.
        let known = self.generation.saturating_sub(self.choices.below(2));
        let target = Target {
            node: self.nodes[self.leader(known)].clone(),
            generation: Generation(known),
        };
        let (forward, step) =
            Forward::start::<Reply>(op, target, self.now, ForwardLimits::default());
        self.forwards.insert(token, forward);
        let way = self.leader(known) as u64;
        let turn = self
            .chain_of(token)
            .map_or(Turn::Send, |chain| chain.begin(u64::from(token), way));
        match (turn, step) {
            (Turn::Hold, Step::Send { target, kind }) => {
                self.held.insert(token, (target, kind));
            }
            (_, Step::Send { target, kind }) => self.send(token, target, kind),
            (_, other) => panic!("begins with {other:?}"),
        }
    }

    fn send(&mut self, token: Token, target: Target, kind: ForwardKind) {
        let node = self.nodes.iter().position(|n| *n == target.node).unwrap();
        self.targets.insert(token, target);
        let family = match self.forwards[&token].op() {
            ForwardOp::Publish => Family::Publish,
            ForwardOp::CachePut
            | ForwardOp::CacheGet
            | ForwardOp::CacheDelete
            | ForwardOp::CounterAdd
            | ForwardOp::CounterGet => Family::Cache,
        };
        let request = Request {
            token,
            family,
            kind,
            bytes: 100,
            pin: Some(StreamSlot((token % CLIENTS) as u8)),
        };
        self.links[node].request(self.now, request);
    }

    fn act(&mut self, token: Token, step: Step<Reply>) {
        match step {
            Step::Send { target, kind } => {
                let way = self.nodes.iter().position(|n| *n == target.node).unwrap() as u64;
                let turn = self
                    .chain_of(token)
                    .map_or(Turn::Send, |chain| chain.on_retry(u64::from(token), way));
                match turn {
                    Turn::Send => self.send(token, target, kind),
                    Turn::Hold => {
                        self.held.insert(token, (target, kind));
                    }
                    Turn::GiveUp => {
                        let mut forward = self.forwards.remove(&token).unwrap();
                        let step = forward.on_overtaken();
                        self.forwards.insert(token, forward);
                        self.act(token, step);
                    }
                }
            }
            Step::WaitUntil(at) => {
                self.order += 1;
                self.queue
                    .insert((at, self.order), Event::ForwardTimer(token));
            }
            Step::Finish(outcome) => {
                let may_be_applied = !matches!(outcome, Outcome::Refused(_));
                if let Some(chain) = self.chain_of(token) {
                    chain.on_finished(u64::from(token), may_be_applied);
                }
                let old = self.outcomes.insert(token, outcome);
                assert!(old.is_none(), "two outcomes for {token}");
            }
            Step::Nothing => panic!("{token} is stuck"),
        }
    }

    fn carry_out(&mut self) {
        loop {
            let next = (0..2).find_map(|n| Some((n, self.links[n].poll_action()?)));
            match next {
                Some((node, action)) => self.carry_out_one(node, action),
                None => {
                    self.release();
                    if self.links.iter_mut().all(|link| !link.has_actions()) {
                        return;
                    }
                }
            }
        }
    }

    fn carry_out_one(&mut self, node: usize, action: LinkAction<Token, Reply>) {
        {
            match action {
                LinkAction::Dial { epoch } => {
                    self.epochs[node] = epoch;
                    let wait = self.choices.below(30);
                    match self.choices.percent(25) {
                        true => self.schedule(wait, Event::DialFailed(node, epoch)),
                        false => self.schedule(wait, Event::Connected(node, epoch)),
                    }
                }
                LinkAction::SendHello { .. } => {
                    let epoch = self.epochs[node];
                    match self.choices.percent(10) {
                        true => self.schedule(5, Event::DialFailed(node, epoch)),
                        false => self.schedule(5, Event::HelloOk(node, epoch)),
                    }
                }
                LinkAction::Transmit {
                    token,
                    correlation,
                    kind,
                    stream,
                } => {
                    let epoch = self.epochs[node];
                    let at = self.now + Duration::from_millis(self.choices.below(10));
                    let is_lost = self.choices.percent(3);
                    // A stream delivers in order, and nothing behind what it has not delivered.
                    let last = self
                        .streams
                        .entry((node, epoch, stream))
                        .or_insert(Some(at));
                    *last = match (*last, is_lost) {
                        (None, _) | (_, true) => None,
                        (Some(last), false) => Some(last.max(at)),
                    };
                    if let Some(at) = *last {
                        self.order += 1;
                        let arrive = Event::Arrive(node, epoch, correlation, token, kind);
                        self.queue.insert((at, self.order), arrive);
                    }
                }
                LinkAction::Done {
                    token,
                    sent_as,
                    result,
                } => self.on_result(token, sent_as, result),
                LinkAction::Close { .. } | LinkAction::Report(_) => {}
            }
        }
    }

    fn on_result(&mut self, token: Token, sent_as: ForwardKind, result: SendResult<Reply>) {
        match &result {
            SendResult::NotSent(_) | SendResult::NotLeader(_) | SendResult::Error(_) => {
                if let Some(chain) = self.chain_of(token) {
                    chain.on_refused(u64::from(token));
                }
            }
            SendResult::Ok(_) | SendResult::Unknown(_) => {}
        }
        let mut forward = self.forwards.remove(&token).unwrap();
        if let SendResult::NotSent(NotSentCause::Backoff { until }) = result {
            assert!(until > self.now);
        }
        let step = forward.on_result(self.now, sent_as, result);
        self.forwards.insert(token, forward);
        self.act(token, step);
    }

    /// The owner's side: its own checks, then the effect, then an answer that may be lost.
    fn arrive(
        &mut self,
        node: usize,
        epoch: ConnectionEpoch,
        correlation: CorrelationId,
        token: Token,
        kind: ForwardKind,
    ) {
        if epoch <= self.owners[node].ended_with {
            return;
        }
        let answer = self.serve(node, token, kind);
        let delay = match self.choices.percent(3) {
            true => 6_000,
            false => self.choices.below(20),
        };
        if !self.choices.percent(8) {
            self.schedule(delay, Event::Answer(node, epoch, correlation, answer));
        }
    }

    fn serve(&mut self, node: usize, token: Token, kind: ForwardKind) -> Answer<Reply> {
        let is_publish = self.forwards[&token].op() == ForwardOp::Publish;
        let refusal = |code| {
            let error = PeerError::bare(code);
            match is_publish {
                true => Answer::PublishError(error),
                false => Answer::CacheError(error),
            }
        };
        let owner = &self.owners[node];
        if kind == ForwardKind::Authorized && !owner.knows_authorized {
            return Answer::PublishError(PeerError::bare(PeerCode::UnsupportedKind));
        }
        let leader = self.leader(owner.view);
        let view = ShardView {
            owner: match leader == node {
                true => Owner::Me,
                false => Owner::Other {
                    node: &self.nodes[leader],
                },
            },
            generation: Generation(owner.view),
            serving: owner.serving,
        };
        let load = match self.choices.percent(10) {
            true => Load::Shedding,
            false => Load::Normal,
        };
        let requested = self.targets[&token].generation;
        let credential = || match kind {
            ForwardKind::Authorized => CredentialVerdict::Allowed,
            ForwardKind::Legacy if !owner.knows_authorized => CredentialVerdict::Allowed,
            ForwardKind::Legacy => CredentialVerdict::Missing,
        };
        match admit_forward(&self.nodes[node], Some(view), requested, load, credential) {
            ForwardAdmission::Serve => {
                *self.applied.entry(token).or_default() += 1;
                if is_publish {
                    self.log.push(token);
                }
                match is_publish {
                    true => Answer::PublishOk(token),
                    false => Answer::CacheOk(token),
                }
            }
            ForwardAdmission::NotLeader(owner) => Answer::NotLeader(NotLeader {
                owner,
                internal_addr: "".into(),
            }),
            ForwardAdmission::Refuse { code, .. } => refusal(code),
        }
    }

    fn check(&self, seed: u64) -> [u32; 3] {
        let mut totals = [0; 3];
        for token in 0..self.requests {
            let Some(outcome) = self.outcomes.get(&token) else {
                panic!("seed {seed}: {token} has no outcome")
            };
            let op = self.forwards[&token].op();
            let applied = self.applied.get(&token).copied().unwrap_or(0);
            if !op.is_resendable() {
                assert!(applied <= 1, "seed {seed}: {op:?} applied {applied} times");
            }
            match outcome {
                Outcome::Done { reply, .. } => {
                    totals[0] += 1;
                    assert_eq!(*reply, token, "seed {seed}: another request's answer");
                    assert!(applied >= 1, "seed {seed}: done, not applied");
                }
                Outcome::Refused(why) => {
                    totals[1] += 1;
                    assert!(
                        applied == 0 || !op.is_write(),
                        "seed {seed}: {op:?} refused as {why:?}, applied"
                    );
                }
                Outcome::Indeterminate(_) => totals[2] += 1,
            }
        }
        for client in 0..CLIENTS {
            let known = self.log.iter().filter(|token| {
                **token % CLIENTS == client && matches!(self.outcomes[*token], Outcome::Done { .. })
            });
            assert!(
                known.is_sorted(),
                "seed {seed}: {:?} out of order",
                self.log
            );
        }
        totals
    }
}

#[test]
fn what_the_ingress_reports_is_what_happened() {
    let seeds = std::env::var("FELIX_SIM_SEEDS").ok();
    let seeds: u64 = seeds.map_or(400, |n| n.parse().expect("a number"));
    let mut totals = [0u32; 3];
    for seed in 0..seeds {
        let mut world = World::new(seed);
        world.run();
        for (total, n) in totals.iter_mut().zip(world.check(seed)) {
            *total += n;
        }
    }
    // A schedule that never reaches one of the three ends would prove nothing.
    assert!(totals.iter().all(|&n| n > 500), "{totals:?}");
}
