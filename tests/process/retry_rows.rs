//! The rows of the retry table over real sockets: every operation meets every answer of a scripted owner. How often
//! the owner is asked and what the client is told is computed from the document's one question, whether the
//! owner may have applied the request. Each combination has an owner of its own, so that all run at once
//! against one broker.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use felix_uring::cluster::ShardedSpec;
use felix_uring::wire::client::{PublishOutcome, RetryClass};
use felix_uring::wire::internal::ErrorCode;

use crate::support::brokers::Brokers;
use crate::support::cache_client::CacheClient;
use crate::support::client::{code_and_class, Client};
use crate::support::owner::{Asked, ScriptedOwner};
use crate::support::SOON;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Op {
    Publish,
    Put,
    Get,
    Delete,
    Add,
    Sum,
}

impl Op {
    const ALL: [Self; 6] = [
        Self::Publish,
        Self::Put,
        Self::Get,
        Self::Delete,
        Self::Add,
        Self::Sum,
    ];

    /// Twice lands on the same state as once.
    fn is_resendable(self) -> bool {
        matches!(self, Self::Get | Self::Delete | Self::Sum)
    }

    fn is_write(self) -> bool {
        !matches!(self, Self::Get | Self::Sum)
    }
}

/// What the first request meets; any further one is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Row {
    Done,
    ToAnother,
    ToAnotherNewer,
    ToItselfNewer,
    ToItself,
    ToOlder,
    ToStranger,
    Refuses(ErrorCode),
    UnknownKindTwice,
    Dropped,
    Silent,
    Unreadable,
    /// The link has as much in flight as it may.
    Shed,
    /// Nobody listens at first; further attempts fall into the wait before the next dial.
    Unreachable,
}

impl Row {
    fn all() -> Vec<Self> {
        use ErrorCode::*;
        let codes = [
            StaleRoute,
            Unavailable,
            Unauthorized,
            Overload,
            ProtocolVersion,
            Malformed,
            StorageFailed,
            LogGap,
            LogConflict,
            FencedEpoch,
            UnsupportedKind,
        ];
        let others = [
            Self::Done,
            Self::ToAnother,
            Self::ToAnotherNewer,
            Self::ToItselfNewer,
            Self::ToItself,
            Self::ToOlder,
            Self::ToStranger,
            Self::UnknownKindTwice,
            Self::Dropped,
            Self::Silent,
            Self::Unreadable,
            Self::Shed,
            Self::Unreachable,
        ];
        codes.map(Self::Refuses).into_iter().chain(others).collect()
    }

    /// How often it is sent, and the class of the client's refusal if there is one.
    fn expected(self, op: Op) -> (usize, Option<RetryClass>) {
        use ErrorCode::*;
        // Nobody knows whether it was applied; a read was not, in any case.
        let told = match op.is_write() {
            true => RetryClass::OutcomeUnknown,
            false => RetryClass::Retry,
        };
        let lost = match op.is_resendable() {
            true => (2, None),
            false => (1, Some(told)),
        };
        match self {
            // Nothing was sent when it could not be: one send in all.
            Self::Done | Self::Shed | Self::Unreachable => (1, None),
            Self::ToAnother | Self::ToAnotherNewer | Self::ToItselfNewer | Self::ToOlder => {
                (2, None)
            }
            Self::ToItself | Self::ToStranger => (1, Some(RetryClass::Retry)),
            // Refused before anything was written.
            Self::Refuses(StaleRoute | Unavailable | Overload | UnsupportedKind) => (2, None),
            Self::Refuses(Unauthorized | Malformed | ProtocolVersion) => {
                (1, Some(RetryClass::Fatal))
            }
            // Tried and failed, or an answer that proves nothing: never sent again.
            Self::Refuses(StorageFailed | LogGap | LogConflict | FencedEpoch) => (1, Some(told)),
            Self::UnknownKindTwice => (2, Some(RetryClass::Fatal)),
            Self::Dropped | Self::Silent | Self::Unreadable => lost,
        }
    }
}

/// What owners were asked, by the name of the stream or cache: the generation, and whether with a credential.
type Log = Arc<Mutex<HashMap<String, Vec<(u64, bool)>>>>;

fn note(log: &Log, asked: &Asked) -> usize {
    let shard = asked.shard();
    let mut log = log.lock().expect("no panic");
    let of = log.entry(shard.stream.as_str().to_string()).or_default();
    of.push((shard.generation.0, asked.has_credential()));
    of.len()
}

/// A combination and where it happens.
struct Case {
    op: Op,
    row: Row,
    node: usize,
    name: &'static str,
}

/// Plays the owner of one case for ever.
async fn own(mut owner: ScriptedOwner, row: Row, brokers: Arc<Brokers>, node: usize, log: Log) {
    let addr = |index: usize| brokers.cluster.node(index).internal_addr();
    let (own_name, another) = (format!("node-{}", node + 1), 1);
    let mut held = Vec::new();
    loop {
        let Some(asked) = owner.next_or_end().await else {
            return;
        };
        let nth = note(&log, &asked);
        match (row, nth) {
            (Row::UnknownKindTwice, 2) => asked.refuse(ErrorCode::UnsupportedKind).await,
            // The first is the other client's, which takes the only place for a while.
            (Row::Shed, 1) => {
                until_shed(&brokers).await;
                asked.done().await;
            }
            (_, 2..) | (Row::Done | Row::Shed | Row::Unreachable, _) => asked.done().await,
            (Row::ToAnother, _) => asked.redirect("node-2", addr(another), 1).await,
            (Row::ToAnotherNewer, _) => asked.redirect("node-2", addr(another), 2).await,
            (Row::ToItselfNewer, _) => asked.redirect(&own_name, addr(node), 2).await,
            (Row::ToItself, _) => asked.redirect(&own_name, addr(node), 1).await,
            (Row::ToOlder, _) => asked.redirect("node-2", addr(another), 0).await,
            (Row::ToStranger, _) => asked.redirect("node-9999", addr(another), 2).await,
            (Row::Refuses(code), _) => asked.refuse(code).await,
            (Row::UnknownKindTwice, _) => asked.refuse(ErrorCode::UnsupportedKind).await,
            (Row::Dropped, _) => owner.close_connections(),
            (Row::Silent, _) => held.push(asked),
            (Row::Unreadable, _) => asked.write([0xFF; 32]).await,
        }
    }
}

/// Asks once; the class of the refusal if it is one.
async fn ask(brokers: &Brokers, token: &str, case: &Case) -> Option<RetryClass> {
    if case.op == Op::Publish {
        let client = Client::connect(brokers, 0).await;
        let mut stream = client.stream(token).await;
        return match stream.publish(case.name, b"record").await {
            PublishOutcome::Accepted { .. } => None,
            PublishOutcome::Failed(refusal) => Some(code_and_class(&refusal).1),
        };
    }
    let mut client = CacheClient::connect_with(brokers, 0, token).await;
    client.cache = case.name;
    let refused = match case.op {
        Op::Put => client.put_for("k", b"v", None).await.err(),
        Op::Get => client.try_get("k").await.err(),
        Op::Delete => client.try_delete("k").await.err(),
        Op::Add => client.try_add("k", 1).await.err(),
        Op::Sum | Op::Publish => client.try_sum("k").await.err(),
    };
    refused.map(|(_, class)| class)
}

async fn run(brokers: Arc<Brokers>, token: Arc<str>, case: Case, log: Log) {
    let start = |brokers: &Arc<Brokers>| {
        let owner = ScriptedOwner::start(brokers, case.node);
        let (brokers, log) = (brokers.clone(), log.clone());
        tokio::spawn(own(owner, case.row, brokers, case.node, log));
    };
    let mut sends_besides = 0;
    let told = match case.row {
        Row::Unreachable => {
            let asking = ask(&brokers, &token, &case);
            let starting = async {
                until_dialled_in_vain(&brokers, case.node).await;
                start(&brokers);
            };
            tokio::join!(asking, starting).0
        }
        Row::Shed => {
            start(&brokers);
            sends_besides = 1;
            let op = match case.op {
                Op::Publish => Op::Publish,
                _ => Op::Get,
            };
            let first = Case { op, ..case };
            let taking = ask(&brokers, &token, &first);
            let following = async {
                let deadline = Instant::now() + SOON;
                while !log.lock().expect("no panic").contains_key(case.name) {
                    assert!(Instant::now() < deadline, "the first did not come");
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
                ask(&brokers, &token, &case).await
            };
            let (first, told) = tokio::join!(taking, following);
            assert_eq!(first, None, "{:?} {:?}", case.op, case.row);
            told
        }
        _ => {
            start(&brokers);
            ask(&brokers, &token, &case).await
        }
    };
    let (sends, class) = case.row.expected(case.op);
    let what = format!("{:?} meets {:?}", case.op, case.row);
    assert_eq!(told, class, "{what}");
    let asked = log.lock().expect("no panic").get(case.name).cloned();
    let asked = asked.unwrap_or_default();
    assert_eq!(asked.len(), sends + sends_besides, "{what}: {asked:?}");
    // Every request carries the credential but the one to a peer that does not know the kind.
    for (nth, (generation, has_credential)) in asked.iter().enumerate() {
        let is_legacy = nth == 1
            && matches!(
                case.row,
                Row::UnknownKindTwice | Row::Refuses(ErrorCode::UnsupportedKind)
            );
        assert_eq!(*has_credential, !is_legacy, "{what}: {asked:?}");
        let is_newer = nth == 1 && matches!(case.row, Row::ToAnotherNewer | Row::ToItselfNewer);
        assert_eq!(*generation, 1 + u64::from(is_newer), "{what}: {asked:?}");
    }
}

/// Until one more request was shed.
async fn until_shed(brokers: &Brokers) {
    let shed = || brokers.metric(0, "felix_forwards_shed_total");
    let (before, deadline) = (shed(), Instant::now() + SOON);
    while shed() == before {
        assert!(Instant::now() < deadline, "nothing was shed");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Until the broker has found nobody at a node's address.
async fn until_dialled_in_vain(brokers: &Brokers, node: usize) {
    let name = format!("node-{}", node + 1);
    let deadline = Instant::now() + SOON;
    loop {
        let status = brokers.cluster.node(0).status();
        let status = status.unwrap_or_else(|e| panic!("{e}"));
        let peers = status["peers"].as_array().cloned().unwrap_or_default();
        let failed = peers.iter().any(|peer| {
            peer["node_id"] == name.as_str() && peer["failures_in_a_row"].as_u64() >= Some(1)
        });
        if failed {
            return;
        }
        assert!(Instant::now() < deadline, "{name} was not dialled");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_operation_meets_every_row_of_the_table() {
    let rows = Row::all();
    let combinations = Op::ALL
        .iter()
        .flat_map(|op| rows.iter().map(move |row| (*op, *row)));
    // Node 0 is the broker, node 1 the owner others redirect to.
    let cases: Vec<Case> = combinations
        .enumerate()
        .map(|(nth, (op, row))| Case {
            op,
            row,
            node: nth + 2,
            name: format!("of-{nth}").leak(),
        })
        .collect();
    let mut brokers = Brokers::prepare_with(cases.len() + 2, |spec| {
        spec.extra_args.extend(
            [
                "--peer-request-timeout-ms=700",
                "--peer-connect-timeout-ms=700",
                // Long enough for a busy machine to find an owner that comes, or a place that is given up.
                "--forward-budget-ms=5000",
                "--forward-attempts=20",
                "--peer-in-flight=1",
            ]
            .map(String::from),
        );
        for case in &cases {
            let sharded = ShardedSpec::new(case.name, 1).led_by(&[case.node]);
            match case.op {
                Op::Publish => spec.streams.push(sharded),
                _ => spec.caches.push(sharded),
            }
        }
    });
    brokers.start_node(0);
    let token: Arc<str> = brokers.token().into();
    let brokers = Arc::new(brokers);
    let log = Log::default();
    let another = ScriptedOwner::start(&brokers, 1);
    tokio::spawn(own_all(another, log.clone()));
    let mut running = tokio::task::JoinSet::new();
    // Sheds are counted for the broker as a whole: those cases come one by one, when all others are over.
    let (shed, cases): (Vec<_>, Vec<_>) = cases.into_iter().partition(|c| c.row == Row::Shed);
    for case in cases {
        if running.len() >= 24 {
            running
                .join_next()
                .await
                .expect("some run")
                .expect("one ends well");
        }
        running.spawn(run(brokers.clone(), token.clone(), case, log.clone()));
    }
    while let Some(ended) = running.join_next().await {
        ended.expect("one ends well");
    }
    for case in shed {
        run(brokers.clone(), token.clone(), case, log.clone()).await;
    }
}

/// The owner that others redirect to does everything.
async fn own_all(mut owner: ScriptedOwner, log: Log) {
    while let Some(asked) = owner.next_or_end().await {
        note(&log, &asked);
        asked.done().await;
    }
}
