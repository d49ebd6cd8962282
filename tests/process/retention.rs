//! Streams that keep a bounded number of bytes: space comes back, readers of what is gone are told where the
//! rest begins, copies below it are made anew, and nothing goes that a majority may not have.

use std::time::{Duration, Instant};

use bytes::Bytes;
use felix_uring::cluster::{ShardedSpec, NAMESPACE, TENANT};
use felix_uring::wire::client::encode_message;
use felix_uring::wire::client::messages::{Answer, CursorErrorReason, StartAt, Subscribe};
use storage_uring::offline::Reader;
use storage_uring::{LogKind, LogName};

use crate::support::brokers::Brokers;
use crate::support::client::{refusal, Client, Stream};

const KEPT: &str = "kept";
const KEPT_BYTES: u64 = 4 << 20;
const RECORD_BYTES: usize = 1 << 20;
/// Records that fill more than three segments.
const MANY: u64 = 44;
const LATER: Duration = Duration::from_secs(60);

fn start(replicas: u16, consistency: &str) -> Brokers {
    let brokers = Brokers::start_with(usize::from(replicas), |spec| {
        spec.extra_args.push("--quorum-timeout-ms=500".into());
        spec.streams.push(ShardedSpec {
            replicas,
            consistency: Some(consistency.to_string()),
            retention_bytes: Some(KEPT_BYTES),
            ..ShardedSpec::new(KEPT, 1).led_by(&[0])
        });
    });
    if replicas > 1 {
        brokers.wait_metric_for(0, "felix_replicated_shards_open", 1.0, LATER);
    }
    brokers
}

async fn client(brokers: &Brokers) -> (Client, Stream) {
    let client = Client::connect(brokers, 0).await;
    let stream = client.stream(&brokers.token()).await;
    (client, stream)
}

/// A large record that tells its number.
fn record(number: u64) -> Vec<u8> {
    let mut bytes = vec![(number % 251) as u8; RECORD_BYTES];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes
}

fn number_of(record: &[u8]) -> u64 {
    let mut number = [0; 8];
    number.copy_from_slice(&record[..8]);
    assert!(*record == *self::record(u64::from_le_bytes(number)));
    u64::from_le_bytes(number)
}

async fn publish(stream: &mut Stream, numbers: std::ops::Range<u64>) {
    for number in numbers {
        stream.must_publish(KEPT, record(number)).await;
    }
}

/// What a node holds on disk; its broker must not be running.
fn copy_of(brokers: &Brokers, node: usize) -> (u64, Vec<Bytes>) {
    let dir = brokers.cluster.node(node).data_dir();
    let mut reader = Reader::open(dir, 2).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    assert!(reader.verify().is_clean());
    let name = LogName {
        kind: LogKind::Stream,
        tenant: TENANT.into(),
        namespace: NAMESPACE.into(),
        name: KEPT.into(),
        shard: 0,
    };
    let log = reader.log(&name).expect("a copy");
    let records = reader.records(log.id).collect::<Result<Vec<_>, _>>();
    let records = records.expect("readable").into_iter();
    (log.base, records.map(|(_, record)| record).collect())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn space_comes_back_and_readers_of_what_is_gone_are_told() {
    let mut brokers = start(1, "leader");
    let (reader, mut stream) = client(&brokers).await;
    publish(&mut stream, 0..MANY).await;
    brokers.wait_metric_for(0, "felix_storage_segments_freed_total", 2.0, LATER);

    let subscribe = Subscribe {
        tenant_id: TENANT.into(),
        namespace: NAMESPACE.into(),
        stream: KEPT.into(),
        subscription_id: None,
        start: Some(StartAt::Offset(0)),
        shard: None,
        queue_capacity: None,
    };
    let mut request = reader.stream(&brokers.token()).await;
    let frame = encode_message(&subscribe).expect("a frame");
    request.send(frame).await;
    let Answer::SubscribeCursorError(told) = request.answers.answer().await else {
        panic!("the first records are gone");
    };
    assert_eq!(told.reason, CursorErrorReason::TooOld);
    let base = told.available;
    assert!(base > 0 && (MANY - base) * RECORD_BYTES as u64 >= KEPT_BYTES);

    let token = brokers.token();
    let mut events = reader.subscribe(&token, KEPT, StartAt::Earliest).await;
    let held = (MANY - base) as usize;
    for (offset, record) in events.take(held).await {
        assert_eq!(number_of(&record), offset);
    }
    // A longer life from the catalog, without a restart: nothing more goes.
    brokers.edit_catalog(|catalog| {
        let streams = catalog["stream"].as_array_mut().expect("streams");
        let streams = streams.iter_mut().filter_map(toml::Value::as_table_mut);
        let kept = streams.filter(|table| table["name"].as_str() == Some(KEPT));
        for table in kept {
            table.insert("retention_bytes".into(), 0.into());
        }
    });
    brokers.wait_metric(0, "felix_catalog_reloads_total", 1.0);
    publish(&mut stream, MANY..2 * MANY).await;
    brokers.cluster.stop().unwrap_or_else(|e| panic!("{e}"));
    let (base, records) = copy_of(&brokers, 0);
    assert!(base + records.len() as u64 == 2 * MANY && records.len() as u64 >= MANY);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_below_the_leaders_base_is_made_anew() {
    let mut brokers = start(2, "leader");
    let (_client, mut stream) = client(&brokers).await;
    publish(&mut stream, 0..3).await;
    brokers.wait_metric_for(1, "felix_follower_records_total", 3.0, LATER);
    brokers.cluster.node_mut(1).kill().expect("killed");
    publish(&mut stream, 3..MANY).await;
    brokers.wait_metric_for(0, "felix_storage_segments_freed_total", 2.0, LATER);
    brokers.start_node(1);
    brokers.wait_metric_for(1, "felix_follower_rebuilds_total", 1.0, LATER);
    wait_level(&brokers, MANY).await;
    brokers.cluster.stop().unwrap_or_else(|e| panic!("{e}"));
    let (base, records) = copy_of(&brokers, 0);
    let (copy_base, copy) = copy_of(&brokers, 1);
    assert!(base > 3 && copy_base > 3, "{base} {copy_base}");
    for (at, records) in [(base, records), (copy_base, copy)] {
        assert_eq!(at + records.len() as u64, MANY);
        for (offset, record) in (at..).zip(&records) {
            assert_eq!(number_of(record), offset);
        }
    }
}

async fn wait_level(brokers: &Brokers, least: u64) {
    let deadline = Instant::now() + LATER;
    loop {
        let status = brokers.cluster.node(0).status();
        let status = status.unwrap_or_else(|e| panic!("{e}"));
        let replication = &status["cores"][0]["replication"];
        let shards = status["cores"][0]["shards"].as_array();
        let mut shards = shards.into_iter().flatten();
        let reaches = shards.any(|shard| shard["durable_offset"].as_u64() >= Some(least));
        let is_level =
            replication["lag_records"] == 0 && replication["halted"] == serde_json::json!([]);
        if is_level && reaches {
            return;
        }
        assert!(Instant::now() < deadline, "not level: {replication}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Both followers are away and the bound is tiny: what no majority has stays, and is shipped when they are back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_goes_that_a_majority_may_not_have() {
    let mut brokers = start(3, "quorum");
    let (_client, mut stream) = client(&brokers).await;
    publish(&mut stream, 0..2).await;
    wait_level(&brokers, 2).await;
    for follower in [1, 2] {
        brokers.cluster.node_mut(follower).kill().expect("killed");
    }
    for number in 2..MANY {
        stream.start_publish(KEPT, &[record(number)]).await;
    }
    for _ in 2..MANY {
        let (code, _) = refusal(stream.answers.ack().await.outcome);
        assert_eq!(code, "quorum_timeout");
    }
    brokers.wait_metric_for(0, "felix_storage_segments", 4.0, LATER);
    // A sweep takes 200 ms: some of them have passed since the first segment was full.
    assert_eq!(brokers.metric(0, "felix_storage_segments_freed_total"), 0.0);
    // The first that is back is shipped what it lacks. From then on a majority has it, and it may go.
    brokers.start_node(1);
    brokers.wait_metric_for(0, "felix_storage_segments_freed_total", 2.0, LATER);
    assert_eq!(brokers.metric(1, "felix_follower_rebuilds_total"), 0.0);
    brokers.start_node(2);
    wait_level(&brokers, MANY).await;
    // What a follower has compared with its leader's log goes there, too.
    brokers.wait_metric_for(1, "felix_storage_segments_freed_total", 1.0, LATER);
    publish(&mut stream, MANY..MANY + 2).await;
    wait_level(&brokers, MANY + 2).await;
    brokers.cluster.stop().unwrap_or_else(|e| panic!("{e}"));
    for node in 0..3 {
        let (base, records) = copy_of(&brokers, node);
        assert_eq!(base + records.len() as u64, MANY + 2);
        assert!(records.len() as u64 * RECORD_BYTES as u64 >= KEPT_BYTES);
        for (offset, record) in (base..).zip(&records) {
            assert_eq!(number_of(record), offset);
        }
    }
}
