//! Who may write where: generations, credentials, kinds of later protocols, and a shard that
//! moves while it is used.

use std::time::{Duration, Instant};

use felix_uring::cluster::{CACHE, NAMESPACE, TENANT};
use felix_uring::ids::{CorrelationId, Offset};
use felix_uring::wire::client::messages::StartAt;
use felix_uring::wire::client::{Answer, RetryClass};
use felix_uring::wire::internal::{
    Bootstrap, CacheOp, CacheOpKind, Credential, ErrorCode, Kind, Message, Payloads, Rebuild,
    Records, ReplicaLog, Text,
};

use crate::support::brokers::{Brokers, FIRST, SECOND};
use crate::support::client::Client;
use crate::support::dialler::{forward, shard, PeerClient};

const LOGS: [ReplicaLog; 5] = [
    ReplicaLog::Stream,
    ReplicaLog::Cache,
    ReplicaLog::GroupCursors,
    ReplicaLog::GroupDeadLetters,
    ReplicaLog::Counters,
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_checks_generation_owner_and_credential_in_that_order() {
    let brokers = Brokers::start(2);
    let token = brokers.token();
    let peer = PeerClient::connect(&brokers, 1, 0).await;
    let mut stream = peer.greeted("node-2").await;

    // Node 0 leads FIRST at generation 1.
    for bad in [None, Some("not a token")] {
        let behind = stream.ask(&forward(1, shard(FIRST, 0), bad)).await;
        match behind {
            Message::NotLeader(moved) => {
                assert_eq!(moved.node_id, "node-1");
                assert_eq!(moved.generation.0, 1);
                let addr = brokers.cluster.node(0).internal_addr().to_string();
                assert_eq!(moved.advertise_addr, addr.as_str());
            }
            other => panic!("{other:?}"),
        }
        let ahead = stream.refused(&forward(2, shard(FIRST, 2), bad)).await;
        assert_eq!(ahead, ErrorCode::StaleRoute);
        let wrong = stream.ask(&forward(3, shard(SECOND, 1), bad)).await;
        assert!(
            matches!(&wrong, Message::NotLeader(to) if to.node_id == "node-2"),
            "{wrong:?}"
        );
    }
    let cases = [
        ("legacy kind", None, ErrorCode::Unauthorized),
        (
            "garbage",
            Some("not a token".to_string()),
            ErrorCode::Unauthorized,
        ),
        (
            "another tenant",
            Some(brokers.token_of(|claims| {
                claims.tenant = "t2".into();
                claims.perms = vec!["stream.publish:*".into()];
            })),
            ErrorCode::Unauthorized,
        ),
        (
            "read only",
            Some(brokers.token_of(|claims| {
                claims.perms = vec![format!("stream.subscribe:stream:{TENANT}/*")];
            })),
            ErrorCode::Unauthorized,
        ),
        (
            "another stream",
            Some(brokers.token_of(|claims| {
                claims.perms = vec![format!(
                    "stream.publish:stream:{TENANT}/{NAMESPACE}/{SECOND}"
                )];
            })),
            ErrorCode::Unauthorized,
        ),
        (
            "expired",
            Some(brokers.token_of(|claims| {
                claims.iat -= 7200;
                claims.exp = claims.iat + 60;
            })),
            ErrorCode::Unauthorized,
        ),
    ];
    for (what, token, code) in cases {
        let request = forward(4, shard(FIRST, 1), token.as_deref());
        assert_eq!(stream.refused(&request).await, code, "{what}");
    }
    // Names that are not there, a shard out of range, an empty name.
    let mut far = shard(FIRST, 1);
    far.shard = 7;
    for (named, code) in [
        (shard("nowhere", 1), ErrorCode::StaleRoute),
        (far, ErrorCode::StaleRoute),
        (shard("", 1), ErrorCode::Malformed),
    ] {
        let request = forward(5, named, Some(&token));
        assert_eq!(stream.refused(&request).await, code, "{request:?}");
    }

    assert_eq!(brokers.metric(0, "felix_storage_records_total"), 0.0);
    let unauthorized = "felix_peer_requests_refused_total{code=\"unauthorized\"}";
    brokers.wait_metric(0, unauthorized, 6.0);
    // And with everything right it is written, an empty batch without a record.
    let answer = stream.ask(&forward(8, shard(FIRST, 1), Some(&token))).await;
    assert!(
        matches!(
            answer,
            Message::ForwardPublishOk {
                first_offset: Offset(0),
                last_offset: Offset(0),
                ..
            }
        ),
        "{answer:?}"
    );
    let mut empty = forward(9, shard(FIRST, 1), Some(&token));
    if let Message::ForwardPublish(publish) = &mut empty {
        publish.payloads = Payloads::from_slices::<[&[u8]; 0]>([]).expect("payloads");
    }
    let answer = stream.ask(&empty).await;
    assert!(
        matches!(
            answer,
            Message::ForwardPublishOk {
                first_offset: Offset(1),
                last_offset: Offset(0),
                ..
            }
        ),
        "{answer:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_of_features_not_served_get_their_family_s_refusal() {
    let mut brokers = Brokers::start(1);
    let peer = PeerClient::connect(&brokers, 0, 0).await;
    let mut stream = peer.greeted("node-1").await;
    let read_nothing = brokers.token_of(|_| {});
    let payloads = Payloads::from_slices([b"record"]).expect("payloads");
    // This broker leads the stream alone: nobody may replicate to it.
    for (generation, code) in [
        (0, ErrorCode::FencedEpoch),
        (1, ErrorCode::Unauthorized),
        (2, ErrorCode::StaleRoute),
    ] {
        for log in LOGS {
            let name = match log {
                ReplicaLog::Cache | ReplicaLog::Counters => CACHE,
                _ => FIRST,
            };
            for request in replication(log, name, generation, &payloads) {
                let answer = stream.ask(&request).await;
                assert_eq!(answer.kind(), Kind::ReplicateError, "{request:?}");
                assert_eq!(answer.error_code(), Some(code), "{request:?}");
            }
            for request in replication(log, "nowhere", generation, &payloads) {
                let code = stream.refused(&request).await;
                assert_eq!(code, ErrorCode::StaleRoute, "{request:?}");
            }
        }
    }
    // Cache operations are judged like publishes.
    for (op, generation, credential, code) in [
        (CacheOpKind::Put, 1, None, ErrorCode::Unauthorized),
        (CacheOpKind::CounterAdd, 1, None, ErrorCode::Unauthorized),
        (CacheOpKind::Put, 2, None, ErrorCode::StaleRoute),
        (
            CacheOpKind::Get,
            1,
            Some(&read_nothing),
            ErrorCode::Unauthorized,
        ),
    ] {
        let request = Message::CacheOp(CacheOp {
            correlation: CorrelationId(4),
            shard: shard(CACHE, generation),
            op,
            key: Text::shortened("k"),
            ttl_ms: 0,
            value: bytes::Bytes::from_static(&[0; 8]),
            credential: credential.map(|token| Credential::new(token).expect("a credential")),
        });
        let answer = stream.ask(&request).await;
        assert_eq!(answer.kind(), Kind::ForwardCacheError, "{request:?}");
        assert_eq!(answer.error_code(), Some(code), "{request:?}");
    }
    assert_eq!(brokers.metric(0, "felix_storage_records_total"), 0.0);
    brokers.assert_alive(0);
}

/// One request of each replication family.
fn replication(log: ReplicaLog, name: &str, generation: u64, payloads: &Payloads) -> [Message; 3] {
    let (base_offset, correlation) = (Offset(0), CorrelationId(1));
    let shard = shard(name, generation);
    [
        Message::Records(Records {
            correlation,
            log,
            shard: shard.clone(),
            first_offset: Offset(0),
            checksum: payloads.batch_checksum(),
            payloads: payloads.clone(),
        }),
        Message::Bootstrap(Bootstrap {
            correlation,
            log,
            shard: shard.clone(),
            base_offset,
        }),
        Message::Rebuild(Rebuild {
            correlation,
            shard,
            log,
            base_offset,
        }),
    ]
}

/// Gives shard 0 of a stream another leader and generation in the catalog file.
fn move_shard(brokers: &Brokers, stream: &str, to: &str, generation: u64) {
    let path = brokers.cluster.catalog();
    let text = std::fs::read_to_string(path).expect("the catalog");
    let mut catalog: toml::Table = text.parse().expect("TOML");
    let assignments = catalog
        .get_mut("assignment")
        .and_then(toml::Value::as_array_mut)
        .expect("assignments");
    let found = assignments
        .iter_mut()
        .filter_map(toml::Value::as_table_mut)
        .find(|table| table.get("name").and_then(toml::Value::as_str) == Some(stream))
        .expect("the stream's shard");
    found.insert("leader".into(), to.into());
    found.insert("generation".into(), (generation as i64).into());
    replace(path, &catalog.to_string());
}

fn replace(path: &std::path::Path, text: &str) {
    let fresh = path.with_extension("new");
    std::fs::write(&fresh, text).expect("a file");
    std::fs::rename(&fresh, path).expect("a rename");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shard_moves_while_it_is_used() {
    let brokers = Brokers::start(2);
    let token = brokers.token();
    let first = Client::connect(&brokers, 0).await;
    let second = Client::connect(&brokers, 1).await;
    let mut via_first = first.stream(&token).await;
    let mut via_second = second.stream(&token).await;
    for _ in 0..5 {
        via_first.must_publish(FIRST, b"before").await;
        via_second.must_publish(FIRST, b"before").await;
    }
    let mut events = first.subscribe(&token, FIRST, StartAt::Earliest).await;
    assert_eq!(events.take(10).await.len(), 10);

    move_shard(&brokers, FIRST, "node-2", 2);
    let deadline = Instant::now() + Duration::from_secs(30);
    while brokers.metric(0, "felix_catalog_reloads_total") < 1.0
        || brokers.metric(1, "felix_catalog_reloads_total") < 1.0
    {
        assert!(Instant::now() < deadline, "the catalog is not read again");
        // Publishes go on meanwhile; while the brokers disagree they may be refused as retryable.
        for stream in [&mut via_first, &mut via_second] {
            if let felix_uring::wire::client::PublishOutcome::Failed(refusal) =
                stream.publish(FIRST, b"during").await
            {
                // One that was on its way to the disk when the shard was lost is of unknown outcome.
                let (code, class) = crate::support::client::code_and_class(&refusal);
                let allowed = [RetryClass::Retry, RetryClass::OutcomeUnknown];
                assert!(allowed.contains(&class), "{code}");
            }
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    match events.last_words().await {
        Ok(Answer::ShardMoved(moved)) => {
            assert_eq!(moved.node_id.as_deref(), Some("node-2"));
            assert_eq!(moved.generation, 2);
            let addr = brokers.cluster.node(1).client_addr().to_string();
            assert_eq!(moved.addr, Some(addr));
            assert!(moved.resume_from >= Some(10), "{moved:?}");
        }
        other => panic!("the subscription did not say where the shard went: {other:?}"),
    }
    via_first.must_publish(FIRST, b"after").await;
    via_second.must_publish(FIRST, b"after").await;

    // The old owner names the new one.
    let peer = PeerClient::connect(&brokers, 1, 0).await;
    let mut stream = peer.greeted("node-2").await;
    let answer = stream.ask(&forward(1, shard(FIRST, 1), Some(&token))).await;
    match answer {
        Message::NotLeader(moved) => {
            assert_eq!(moved.node_id, "node-2");
            assert_eq!(moved.generation.0, 2);
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_catalog_keeps_the_running_state() {
    let mut brokers = Brokers::start(1);
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.stream(&token).await;
    let path = brokers.cluster.catalog().to_path_buf();
    let good = std::fs::read_to_string(&path).expect("the catalog");
    for (nth, bad) in [
        "generation = \n[[",
        "",
        &good.replace("leader = \"node-1\"", "leader = \"node-9\""),
    ]
    .into_iter()
    .enumerate()
    {
        assert_ne!(bad, good);
        replace(&path, bad);
        brokers.wait_metric_for(
            0,
            "felix_catalog_reload_errors_total",
            nth as f64 + 1.0,
            Duration::from_secs(30),
        );
        let status = brokers
            .cluster
            .node(0)
            .status()
            .unwrap_or_else(|e| panic!("{e}"));
        let error = status["catalog"]["error"].as_str().unwrap_or_default();
        assert!(error.contains("catalog.toml"), "{status}");
        stream.must_publish(FIRST, b"goes on").await;
    }
    replace(&path, &good);
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let status = brokers
            .cluster
            .node(0)
            .status()
            .unwrap_or_else(|e| panic!("{e}"));
        if status["catalog"]["error"].is_null() {
            break;
        }
        assert!(
            Instant::now() < deadline,
            "a mended catalog is not seen: {status}"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    stream.must_publish(FIRST, b"goes on").await;
    brokers.assert_alive(0);
}
