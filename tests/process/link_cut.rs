//! Two brokers on hosts of their own lose the link between them, in one direction, in both, or with the
//! interface: what waits is answered as of unknown outcome, nothing acknowledged is missing, nothing is there
//! twice, and the pool dials again by itself.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use felix_uring::cluster::ClusterError;
use felix_uring::wire::client::messages::StartAt;
use felix_uring::wire::client::{PublishOutcome, RetryClass};

use crate::support::brokers::{Brokers, SECOND};
use crate::support::client::{Client, Stream};
use crate::support::netns::Net;
use crate::support::SOON;

const INGRESS: usize = 0;
const OWNER: usize = 1;
const IN_FLIGHT: usize = 16;
const SENT: &str = "felix_forwards_sent_total";

/// What is cut.
#[derive(Debug, Clone, Copy)]
enum Fault {
    /// Requests get lost, answers would arrive.
    Forth,
    /// Requests arrive, answers get lost.
    Back,
    Both,
    /// The interface of the owner goes down, so that its sends fail.
    OwnerUnplugged,
    /// That of the ingress.
    IngressUnplugged,
}

impl Fault {
    const ALL: [Self; 5] = [
        Self::Forth,
        Self::Back,
        Self::Both,
        Self::OwnerUnplugged,
        Self::IngressUnplugged,
    ];

    fn begin(self, net: &Net) {
        match self {
            Self::Forth => net.cut(INGRESS, OWNER),
            Self::Back => net.cut(OWNER, INGRESS),
            Self::Both => net.cut_both(INGRESS, OWNER),
            Self::OwnerUnplugged => net.unplug(OWNER),
            Self::IngressUnplugged => net.unplug(INGRESS),
        }
    }

    fn end(self, net: &Net) {
        match self {
            Self::Forth => net.heal(INGRESS, OWNER),
            Self::Back => net.heal(OWNER, INGRESS),
            Self::Both => net.heal_all(),
            Self::OwnerUnplugged => net.plug(OWNER),
            Self::IngressUnplugged => net.plug(INGRESS),
        }
    }
}

/// Short, so that the test is; a request alone would wait much longer than a silent link lasts.
const FLAGS: [&str; 3] = [
    "--peer-idle-timeout-ms=1200",
    "--peer-keep-alive-ms=300",
    "--peer-request-timeout-ms=9000",
];

/// Every record that was sent, and what was answered.
#[derive(Default)]
struct Sent {
    accepted: BTreeMap<u64, String>,
    unknown: HashSet<String>,
    refused: HashSet<String>,
}

impl Sent {
    /// Sends a window of records and takes their answers.
    async fn window(&mut self, stream: &mut Stream, what: &str) {
        let mut waiting = BTreeMap::new();
        for nth in 0..IN_FLIGHT {
            let record = format!("{what} {nth}");
            waiting.insert(stream.start_publish(SECOND, &[&record]).await, record);
        }
        self.answers(stream, waiting).await;
    }

    async fn answers(&mut self, stream: &mut Stream, mut waiting: BTreeMap<u64, String>) {
        while !waiting.is_empty() {
            let ack = stream.answers.ack().await;
            let record = waiting.remove(&ack.request_id);
            let record = record.unwrap_or_else(|| panic!("{ack:?} answers nothing"));
            match ack.outcome {
                PublishOutcome::Accepted { offset } => {
                    let before = self.accepted.insert(offset.expect("an offset"), record);
                    assert_eq!(before, None, "two records at one offset");
                }
                PublishOutcome::Failed(refusal) => {
                    let kept = match refusal.class() {
                        Some(RetryClass::OutcomeUnknown) => &mut self.unknown,
                        Some(RetryClass::Retry | RetryClass::RetryAfter) => &mut self.refused,
                        _ => panic!("{refusal:?}"),
                    };
                    kept.insert(record);
                }
            }
        }
    }

    /// What was acknowledged is where it was said to be; what is of unknown outcome is there once at most;
    /// what was refused is not there.
    async fn check(&self, brokers: &Brokers, token: &str) {
        let owner = Client::connect(brokers, OWNER).await;
        let tail = owner.stream(token).await.must_publish(SECOND, "last").await;
        let mut events = owner.subscribe(token, SECOND, StartAt::Earliest).await;
        let records = events.take(tail as usize + 1).await;
        let mut seen = HashSet::new();
        for (offset, record) in &records {
            let record = std::str::from_utf8(record).expect("text");
            assert!(seen.insert(record.to_string()), "{record} is there twice");
            assert!(!self.refused.contains(record), "{record} was refused");
            match self.accepted.get(offset) {
                Some(accepted) => assert_eq!(record, accepted, "at {offset}"),
                None => assert!(
                    self.unknown.contains(record) || record == "last",
                    "{record} at {offset} was never answered"
                ),
            }
        }
        let highest = self.accepted.keys().next_back().expect("some");
        assert!(*highest < tail, "{highest} lies behind the end, {tail}");
    }
}

#[test]
fn a_lost_link_fails_its_waiters_keeps_what_was_acknowledged_and_comes_back() {
    let Some(net) = Net::or_skip(2, "link_cut") else {
        return;
    };
    net.block_on(async {
        let mut brokers = Brokers::start_in(&net, 2, |spec| {
            spec.extra_args.extend(FLAGS.map(String::from));
        });
        let token = brokers.token();
        let client = Client::connect(&brokers, INGRESS).await;
        let mut stream = client.stream(&token).await;
        let mut sent = Sent::default();
        for (nth, fault) in Fault::ALL.into_iter().enumerate() {
            sent.window(&mut stream, &format!("before {fault:?}")).await;
            let accepted = sent.accepted.len();
            // Before and after each fault a window, and the one that found the link back.
            let expected = nth * (2 * IN_FLIGHT + 1) + IN_FLIGHT;
            assert_eq!(accepted, expected, "{fault:?}");
            let waiting = in_flight_at(fault, &net, &mut brokers, &mut stream).await;
            if let Fault::IngressUnplugged = fault {
                // Its client hears nothing either; the broker goes on through the loss of the link.
                tokio::time::sleep(Duration::from_secs(3)).await;
                fault.end(&net);
            }
            let unknown = sent.unknown.len();
            sent.answers(&mut stream, waiting).await;
            assert_eq!(sent.accepted.len(), accepted, "answered through {fault:?}");
            assert_eq!(sent.unknown.len(), unknown + IN_FLIGHT, "{fault:?}");
            brokers.assert_alive(INGRESS);
            brokers.assert_alive(OWNER);
            fault.end(&net);
            recovered(&mut sent, &mut stream, fault).await;
            sent.window(&mut stream, &format!("after {fault:?}")).await;
        }
        // Every waiter was released by the loss of its connection, none by its own patience.
        let cause = |name: &str| format!("felix_forwards_unknown_total{{cause=\"{name}\"}}");
        let lost = brokers.metric(INGRESS, &cause("connection_lost"));
        assert_eq!(lost, sent.unknown.len() as f64);
        assert_eq!(brokers.metric(INGRESS, &cause("timeout")), 0.0);
        sent.check(&brokers, &token).await;
    });
}

/// Has the owner lose a window of records, or the answers to it.
async fn in_flight_at(
    fault: Fault,
    net: &Net,
    brokers: &mut Brokers,
    stream: &mut Stream,
) -> BTreeMap<u64, String> {
    let done = |result: Result<(), _>| result.unwrap_or_else(|e: ClusterError| panic!("{e}"));
    let is_cut_first = !matches!(fault, Fault::IngressUnplugged);
    match is_cut_first {
        true => fault.begin(net),
        // Nobody could hand it requests then; the owner is kept from answering them until it is cut off.
        false => done(brokers.cluster.node_mut(OWNER).sigstop()),
    }
    let before = brokers.metric(INGRESS, SENT);
    let mut waiting = BTreeMap::new();
    for nth in 0..IN_FLIGHT {
        let record = format!("during {fault:?} {nth}");
        waiting.insert(stream.start_publish(SECOND, &[&record]).await, record);
    }
    brokers.wait_metric(INGRESS, SENT, before + IN_FLIGHT as f64);
    if !is_cut_first {
        fault.begin(net);
        done(brokers.cluster.node_mut(OWNER).sigcont());
    }
    waiting
}

/// Publishes one record after the other until one is taken.
async fn recovered(sent: &mut Sent, stream: &mut Stream, fault: Fault) {
    let started = std::time::Instant::now();
    let mut refusals = 0;
    loop {
        let before = sent.accepted.len();
        let record = format!("again {fault:?} {refusals}");
        let id = stream.start_publish(SECOND, &[&record]).await;
        sent.answers(stream, BTreeMap::from([(id, record)])).await;
        if sent.accepted.len() > before {
            return;
        }
        refusals += 1;
        assert!(started.elapsed() < 2 * SOON, "{fault:?}: not back");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
