//! Where keyed records end up.

use felix_uring::cluster::{ShardedSpec, NAMESPACE, TENANT};
use felix_uring::wire::client::{
    AckGranularity, AckRequest, Payloads, PublishBatch, PublishOutcome,
};
use felix_uring::wire::routing::{shard_for_key, Routing};
use storage_uring::LogKind;

use crate::support::brokers::Brokers;
use crate::support::replica_set::{client, copy_of, Log};

const WIDE: &str = "wide";
const SHARDS: u32 = 8;
const KEYS: u64 = 60;

fn keyed(request_id: u64, key: &str) -> PublishBatch {
    PublishBatch {
        ack: Some(AckRequest {
            request_id,
            granularity: AckGranularity::PerBatch,
        }),
        producer: None,
        key: Some(key.to_owned().into()),
        tenant_id: TENANT.into(),
        namespace: NAMESPACE.into(),
        stream: WIDE.into(),
        payloads: Payloads::from_slices([key]).expect("payloads"),
    }
}

/// N29: the shard a record is stored in is the one its key resolves to, whoever took it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn n29_every_key_is_stored_in_the_shard_it_resolves_to() {
    let mut brokers = Brokers::start_with(2, |spec| {
        spec.cores_per_node = 2;
        spec.streams
            .push(ShardedSpec::new(WIDE, SHARDS).led_by(&[1]));
    });
    // Forwarded and direct.
    for node in [0, 1] {
        let (_client, mut stream) = client(&brokers, node).await;
        for nth in 0..KEYS {
            let frame = keyed(nth, &format!("key-{node}-{nth}")).encode();
            stream.send(frame.expect("a frame")).await;
            let ack = stream.answers.ack().await;
            let is_taken = matches!(ack.outcome, PublishOutcome::Accepted { .. });
            assert!(is_taken, "{ack:?}");
        }
    }
    brokers.cluster.stop().unwrap_or_else(|e| panic!("{e}"));
    let mut found = 0;
    for shard in 0..SHARDS {
        let log = Log {
            kind: LogKind::Stream,
            name: WIDE,
            shard,
        };
        for record in copy_of(&brokers, 1, log).map_or(vec![], |copy| copy.records) {
            let resolved = shard_for_key(Some(&record), SHARDS, Routing::Modulo);
            assert_eq!(resolved, shard, "{record:?}");
            found += 1;
        }
        assert_eq!(copy_of(&brokers, 0, log), None, "not its owner");
    }
    assert_eq!(found, 2 * KEYS);
}
