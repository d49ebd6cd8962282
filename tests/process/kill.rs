//! kill -9 of the owner in the middle of a run: nothing acknowledged is missing, doubled or
//! changed, nothing refused was written, and what nobody can know is called unknown.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use felix_uring::cluster::{NAMESPACE, TENANT};
use felix_uring::wire::client::messages::StartAt;
use felix_uring::wire::client::{PublishOutcome, RetryClass, ToClient};
use storage_uring::offline::Reader;
use storage_uring::{LogKind, LogName};

use crate::support::brokers::{Brokers, SECOND};
use crate::support::client::{publish_frame, Answers, Client};
use crate::support::within;

/// Batches a client keeps unanswered.
const WINDOW: usize = 48;
/// Records of a batch.
const BATCH: u64 = 3;
/// An answer comes within the idle timeout of a link, or the request timeout, and some margin.
const ANSWER_LIMIT: Duration = Duration::from_secs(8);

/// What the run knows of its batches, by request id.
#[derive(Default)]
struct Book {
    sent: u64,
    /// Where each acknowledged batch is said to start.
    acked: HashMap<u64, u64>,
    unknown: Vec<u64>,
    refused: Vec<u64>,
}

/// A record that tells its batch, its place in it, and whether it is whole.
fn record(batch: u64, place: u64) -> Vec<u8> {
    let mut bytes = batch.to_be_bytes().to_vec();
    bytes.extend(place.to_be_bytes());
    let filler = (batch * 131 + place) % 700;
    bytes.extend((0..filler).map(|i| (i ^ batch) as u8));
    let checksum = crc32(&bytes);
    bytes.extend(checksum.to_be_bytes());
    bytes
}

fn crc32(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0xEDB8_8320 & (crc & 1).wrapping_neg());
        }
    }
    !crc
}

impl Book {
    async fn send_batch(&mut self, send: &mut quinn::SendStream) {
        let batch = self.sent;
        self.sent += 1;
        let payloads: Vec<Vec<u8>> = (0..BATCH).map(|place| record(batch, place)).collect();
        let frame = publish_frame(batch, SECOND, &payloads);
        send.write_all(&frame)
            .await
            .expect("the ingress broker lives");
    }

    async fn take_answer(&mut self, answers: &mut Answers) {
        let answer = within(ANSWER_LIMIT, "the answer to a publish", answers.next()).await;
        let ack = match answer {
            Ok(ToClient::Ack(ack)) => ack,
            other => panic!("{other:?}"),
        };
        let id = ack.request_id;
        let is_new = id < self.sent
            && !self.acked.contains_key(&id)
            && !self.unknown.contains(&id)
            && !self.refused.contains(&id);
        assert!(is_new, "batch {id} was answered twice, or never sent");
        match ack.outcome {
            PublishOutcome::Accepted { offset } => {
                self.acked.insert(id, offset.expect("an offset"));
            }
            PublishOutcome::Failed(refusal) => match refusal.class() {
                Some(RetryClass::OutcomeUnknown) => self.unknown.push(id),
                Some(RetryClass::Retry | RetryClass::RetryAfter) => self.refused.push(id),
                other => panic!("{other:?}: {refusal:?}"),
            },
        }
    }

    fn unanswered(&self) -> usize {
        self.sent as usize - self.acked.len() - self.unknown.len() - self.refused.len()
    }

    /// Compares what was answered with what is there.
    fn check(&self, records: &[(u64, Vec<u8>)]) {
        let mut starts = HashMap::new();
        let mut at = 0;
        let mut newest = None;
        while at < records.len() {
            let batch = number(&records[at].1, 0);
            assert!(batch < self.sent, "a batch {batch} nobody sent");
            for place in 0..BATCH {
                let (offset, bytes) = records
                    .get(at + place as usize)
                    .unwrap_or_else(|| panic!("batch {batch} is torn"));
                assert_eq!(*offset, at as u64 + place, "offsets have a gap");
                assert_eq!(
                    *bytes,
                    record(batch, place),
                    "record {place} of {batch} changed"
                );
            }
            // One client stream sent them all, so they stand in the order they were sent.
            assert!(newest < Some(batch), "batch {batch} behind {newest:?}");
            newest = Some(batch);
            let doubled = starts.insert(batch, at as u64);
            assert_eq!(doubled, None, "batch {batch} is there twice");
            at += BATCH as usize;
        }
        for (batch, offset) in &self.acked {
            assert_eq!(
                starts.get(batch),
                Some(offset),
                "acknowledged batch {batch}"
            );
        }
        for batch in &self.refused {
            assert_eq!(starts.get(batch), None, "refused batch {batch} was written");
        }
    }
}

fn number(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

fn on_disk(brokers: &Brokers, node: usize) -> Vec<(u64, Vec<u8>)> {
    let dir = brokers.cluster.node(node).data_dir();
    let mut reader = Reader::open(dir, 1).expect("a readable directory");
    let name = LogName {
        kind: LogKind::Stream,
        tenant: TENANT.into(),
        namespace: NAMESPACE.into(),
        name: SECOND.into(),
        shard: 0,
    };
    let log = reader.log(&name).expect("the stream's log");
    assert_eq!(log.damage, None);
    let records = reader.records(log.id);
    let read = records.map(|record| {
        let (offset, payload) = record.expect("a readable record");
        (offset, payload.to_vec())
    });
    read.collect()
}

fn loops() -> u64 {
    let set = std::env::var("FELIX_KILL_LOOPS").ok();
    set.map_or(5, |text| {
        text.parse().expect("FELIX_KILL_LOOPS is a number")
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_owner_is_killed_in_the_middle_of_a_run() {
    run(1, loops()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_of_several_cores_is_killed_in_the_middle_of_a_run() {
    run(2, 2).await;
}

async fn run(cores: usize, rounds: u64) {
    let mut brokers = Brokers::start_with(2, |spec| spec.cores_per_node = cores);
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.stream(&token).await;
    let mut book = Book::default();
    let mut rounds_with_unknown = 0;
    for round in 0..rounds {
        let unknown_before = book.unknown.len();
        // Spread over the first part of a second, so that every phase of a commit is hit.
        let kill_at = Instant::now() + Duration::from_millis(30 + (round * 37) % 200);
        while Instant::now() < kill_at {
            while book.unanswered() < WINDOW {
                book.send_batch(&mut stream.send).await;
            }
            book.take_answer(&mut stream.answers).await;
        }
        while book.unanswered() < WINDOW {
            book.send_batch(&mut stream.send).await;
        }
        brokers
            .cluster
            .node_mut(1)
            .kill()
            .unwrap_or_else(|e| panic!("{e}"));
        // Half of the time the broker is back before its peer has noticed.
        if round % 2 == 0 {
            brokers.start_node(1);
        }
        while book.unanswered() > 0 {
            book.take_answer(&mut stream.answers).await;
        }
        if round % 2 == 1 {
            brokers.start_node(1);
        }
        rounds_with_unknown += usize::from(book.unknown.len() > unknown_before);
        // The link comes up again.
        let limit = Instant::now() + Duration::from_secs(10);
        let acked = book.acked.len();
        while book.acked.len() == acked {
            assert!(
                Instant::now() < limit,
                "no publish is taken after the restart"
            );
            book.send_batch(&mut stream.send).await;
            book.take_answer(&mut stream.answers).await;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    assert!(
        rounds_with_unknown > 0,
        "no round caught a forward in flight"
    );
    let unknown = brokers.metric(0, "felix_publishes_unknown_total");
    assert_eq!(unknown as usize, book.unknown.len());
    assert_eq!(brokers.metric(0, "felix_internal_faults_total"), 0.0);

    let owner = Client::connect(&brokers, 1).await;
    let mut events = owner.subscribe(&token, SECOND, StartAt::Earliest).await;
    brokers
        .cluster
        .node_mut(0)
        .stop()
        .unwrap_or_else(|e| panic!("{e}"));
    let records = on_disk(&brokers, 1);
    book.check(&records);
    let delivered = events.take(records.len()).await;
    let delivered: Vec<_> = delivered
        .into_iter()
        .map(|(o, r)| (o, r.to_vec()))
        .collect();
    assert!(
        delivered == records,
        "a subscription sees something else than the disk"
    );
    println!(
        "{} rounds: {} batches acknowledged, {} unknown, {} refused, {} in the log",
        rounds,
        book.acked.len(),
        book.unknown.len(),
        book.refused.len(),
        records.len() as u64 / BATCH
    );
}
