//! `Refused`, `not sent` and `unknown` are three different answers, and each request gets one.
//!
//! The owner is played by the test.

use std::time::{Duration, Instant};

use felix_uring::wire::client::{PublishAck, PublishOutcome, RetryClass};
use felix_uring::wire::internal::ErrorCode;

use crate::support::brokers::{Brokers, FIRST, SECOND};
use crate::support::client::{code_and_class, refusal, Client};
use crate::support::dialler::raw_frame;
use crate::support::owner::ScriptedOwner;

/// Short, so that a test of it is.
const REQUEST_TIMEOUT: Duration = Duration::from_millis(600);
const BOUND: usize = 8;

fn ingress() -> Brokers {
    let mut brokers = Brokers::prepare_with(2, |spec| {
        spec.extra_args.extend([
            format!("--peer-request-timeout-ms={}", REQUEST_TIMEOUT.as_millis()),
            format!("--peer-in-flight={BOUND}"),
        ]);
    });
    brokers.start_node(0);
    brokers
}

fn class_of(ack: &PublishAck) -> Option<(String, RetryClass)> {
    match &ack.outcome {
        PublishOutcome::Accepted { .. } => None,
        PublishOutcome::Failed(refusal) => Some(code_and_class(refusal)),
    }
}

fn unknown(code: &str) -> (String, RetryClass) {
    (code.to_string(), RetryClass::OutcomeUnknown)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_or_late_answer_is_unknown_once() {
    let brokers = ingress();
    let mut owner = ScriptedOwner::start(&brokers, 1);
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.stream(&token).await;

    // The credential goes along, and an answer is passed on with the owner's offset.
    let id = stream.start_publish(SECOND, &[b"a", b"b"]).await;
    let request = owner.next().await;
    assert_eq!(
        request.publish.credential.as_ref().map(|c| c.as_str()),
        Some(token.as_str())
    );
    assert_eq!(request.publish.shard.generation.0, 1);
    let payloads: Vec<&[u8]> = request.publish.payloads.iter().collect();
    assert_eq!(payloads, [b"a", b"b"]);
    request.stored_at(41).await;
    let ack = stream.answers.ack().await;
    assert_eq!(ack.request_id, id);
    assert_eq!(ack.outcome, PublishOutcome::Accepted { offset: Some(41) });

    // Never answered.
    let started = Instant::now();
    stream.start_publish(SECOND, &[b"dropped"]).await;
    let dropped = owner.next().await;
    let ack = stream.answers.ack().await;
    assert!(started.elapsed() >= REQUEST_TIMEOUT);
    assert_eq!(class_of(&ack), Some(unknown("unacknowledged")));

    // Answered too late, beside one in time: the late answer settles nothing.
    stream.start_publish(SECOND, &[b"late"]).await;
    let late = owner.next().await;
    let ack = stream.answers.ack().await;
    assert_eq!(class_of(&ack), Some(unknown("unacknowledged")));
    late.stored_at(50).await;
    dropped.stored_at(42).await;
    late.stored_at(50).await;
    let id = stream.start_publish(SECOND, &[b"next"]).await;
    owner.next().await.stored_at(51).await;
    let ack = stream.answers.ack().await;
    assert_eq!(
        (ack.request_id, ack.outcome),
        (id, PublishOutcome::Accepted { offset: Some(51) })
    );
    // Nothing was sent twice.
    assert!(owner.try_next().is_none());
    brokers.wait_metric(0, "felix_forwards_unknown_total{cause=\"timeout\"}", 2.0);
    assert_eq!(brokers.metric(0, "felix_publishes_unknown_total"), 2.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_code_of_the_owner_reaches_the_client_as_what_it_means() {
    let brokers = ingress();
    let mut owner = ScriptedOwner::start(&brokers, 1);
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.stream(&token).await;
    let retry = RetryClass::Retry;
    let wait = RetryClass::RetryAfter;
    let fatal = RetryClass::Fatal;
    let lost = RetryClass::OutcomeUnknown;
    // The code, what the client is told, and whether the broker itself tries again first.
    let cases = [
        (ErrorCode::StaleRoute, "shard_unavailable", retry, true),
        (ErrorCode::Unavailable, "shard_unavailable", retry, true),
        (ErrorCode::Overload, "overloaded", wait, true),
        (ErrorCode::Unauthorized, "forbidden", fatal, false),
        (ErrorCode::Malformed, "invalid_request", fatal, false),
        (ErrorCode::StorageFailed, "storage", lost, false),
        // Nonsense in answer to a publish: it proves nothing.
        (ErrorCode::ProtocolVersion, "internal", fatal, false),
        (ErrorCode::LogGap, "internal", lost, false),
        (ErrorCode::LogConflict, "internal", lost, false),
        (ErrorCode::FencedEpoch, "internal", lost, false),
    ];
    for (code, said, class, is_retried) in cases {
        stream.start_publish(SECOND, &[format!("{code:?}")]).await;
        let refusing = async {
            let mut asked = 0;
            loop {
                let request = owner.next().await;
                asked += 1;
                request.refuse(code).await;
                if asked > 20 {
                    panic!("{code:?}: asked again and again");
                }
                if !is_retried {
                    std::future::pending::<()>().await;
                }
            }
        };
        let ack = tokio::select! {
            ack = stream.answers.ack() => ack,
            () = refusing => unreachable!("it never ends"),
        };
        assert_eq!(class_of(&ack), Some((said.to_string(), class)), "{code:?}");
        assert!(
            owner.try_next().is_none(),
            "{code:?}: sent after its answer"
        );
    }

    // A peer that does not know kind 22 gets kind 1, once.
    stream.start_publish(SECOND, &[b"old"]).await;
    owner.next().await.refuse(ErrorCode::UnsupportedKind).await;
    let legacy = owner.next().await;
    assert_eq!(legacy.publish.credential, None);
    legacy.refuse(ErrorCode::UnsupportedKind).await;
    let ack = stream.answers.ack().await;
    assert_eq!(class_of(&ack), Some(("internal".to_string(), fatal)));
    brokers.wait_metric(0, "felix_forwards_fell_back_total", 1.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redirects_are_followed_but_not_in_circles() {
    let brokers = ingress();
    let mut owner = ScriptedOwner::start(&brokers, 1);
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.stream(&token).await;
    let (here, there) = (brokers.cluster.node(0), brokers.cluster.node(1));

    // Back to the very broker that answered, at the generation it was asked at: a loop.
    stream.start_publish(SECOND, &[b"loop"]).await;
    owner
        .next()
        .await
        .redirect(there.node_id(), there.internal_addr(), 1)
        .await;
    let ack = stream.answers.ack().await;
    assert_eq!(
        class_of(&ack),
        Some(("shard_unavailable".to_string(), RetryClass::Retry))
    );
    assert!(owner.try_next().is_none());

    // To the same broker at a newer generation: asked once more at that one.
    stream.start_publish(SECOND, &[b"newer"]).await;
    owner
        .next()
        .await
        .redirect(there.node_id(), there.internal_addr(), 2)
        .await;
    let again = owner.next().await;
    assert_eq!(again.publish.shard.generation.0, 2);
    again.stored_at(5).await;
    let ack = stream.answers.ack().await;
    assert_eq!(ack.outcome, PublishOutcome::Accepted { offset: Some(5) });

    // To ourselves, who do not lead it: refused, and nothing is written here.
    stream.start_publish(SECOND, &[b"to us"]).await;
    owner
        .next()
        .await
        .redirect(here.node_id(), here.internal_addr(), 2)
        .await;
    let ack = stream.answers.ack().await;
    let (_, class) = class_of(&ack).expect("a refusal");
    assert_eq!(class, RetryClass::Retry);
    // To nobody we know.
    stream.start_publish(SECOND, &[b"to a stranger"]).await;
    owner
        .next()
        .await
        .redirect("node-77", there.internal_addr(), 3)
        .await;
    let ack = stream.answers.ack().await;
    let (_, class) = class_of(&ack).expect("a refusal");
    assert_eq!(class, RetryClass::Retry);
    assert_eq!(brokers.metric(0, "felix_storage_records_total"), 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_link_answers_everything_in_flight_at_once() {
    let brokers = ingress();
    let mut owner = ScriptedOwner::start(&brokers, 1);
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.stream(&token).await;
    let mut sent = Vec::new();
    for _ in 0..5 {
        sent.push(stream.start_publish(SECOND, &[b"in flight"]).await);
    }
    for _ in 0..5 {
        owner.next().await;
    }
    let closed = Instant::now();
    owner.close_connections();
    for _ in 0..5 {
        let ack = stream.answers.ack().await;
        assert!(sent.contains(&ack.request_id));
        sent.retain(|id| *id != ack.request_id);
        assert_eq!(class_of(&ack), Some(unknown("unacknowledged")));
    }
    assert!(closed.elapsed() < REQUEST_TIMEOUT, "{:?}", closed.elapsed());
    brokers.wait_metric(
        0,
        "felix_forwards_unknown_total{cause=\"connection_lost\"}",
        5.0,
    );
    // The next one dials again.
    let answering = async { owner.next().await.stored_at(9).await };
    let (taken, ()) = tokio::join!(
        stream.publish_until_taken(SECOND, Duration::from_secs(3)),
        answering
    );
    assert!(taken.0 < Duration::from_secs(3));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn past_the_in_flight_bound_requests_are_shed_at_once() {
    let brokers = ingress();
    let mut owner = ScriptedOwner::start(&brokers, 1);
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.stream(&token).await;
    let mut held = Vec::new();
    for _ in 0..BOUND {
        stream.start_publish(SECOND, &[b"held"]).await;
        held.push(owner.next().await);
    }
    let started = Instant::now();
    let extra = stream.start_publish(SECOND, &[b"one too many"]).await;
    let ack = stream.answers.ack().await;
    assert_eq!(ack.request_id, extra);
    assert_eq!(
        class_of(&ack),
        Some(("overloaded".to_string(), RetryClass::RetryAfter))
    );
    // The broker may try again inside its budget of 250 ms, and no longer.
    assert!(
        started.elapsed() < Duration::from_millis(550),
        "{:?}",
        started.elapsed()
    );
    assert!(owner.try_next().is_none(), "a shed request was sent");
    // A slow owner slows nobody else.
    stream.must_publish(FIRST, b"local").await;
    for (at, request) in held.iter().enumerate() {
        request.stored_at(at as u64).await;
    }
    let mut answered = 0;
    for _ in 0..BOUND {
        let ack = stream.answers.ack().await;
        answered += usize::from(class_of(&ack).is_none());
    }
    assert_eq!(answered, BOUND);
    assert!(brokers.metric(0, "felix_forwards_shed_total") >= 1.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_cannot_be_read_is_unknown_and_ends_the_link() {
    let mut brokers = ingress();
    let mut owner = ScriptedOwner::start(&brokers, 1);
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.stream(&token).await;
    type Answer = fn(u64) -> Vec<u8>;
    let cases: [(&str, Answer); 5] = [
        ("wrong magic", |c| {
            raw_frame(
                b"FLX1",
                1,
                2,
                24,
                &[&c.to_be_bytes()[..], &[0; 16]].concat(),
            )
        }),
        ("an unknown code", |c| {
            raw_frame(
                b"FLXI",
                1,
                3,
                14,
                &[&c.to_be_bytes()[..], &[0, 12, 0, 0, 0, 0]].concat(),
            )
        }),
        ("an unknown kind", |c| {
            raw_frame(b"FLXI", 1, 40, 8, &c.to_be_bytes())
        }),
        ("a request", |c| {
            raw_frame(b"FLXI", 1, 5, 12, &[&c.to_be_bytes()[..], &[0; 4]].concat())
        }),
        ("another family", |c| {
            raw_frame(b"FLXI", 1, 8, 16, &[&c.to_be_bytes()[..], &[0; 8]].concat())
        }),
    ];
    for (what, bytes) in cases {
        let ack = loop {
            stream.start_publish(SECOND, &[what]).await;
            let answered = async {
                let request = owner.next().await;
                request.write(bytes(request.correlation().0)).await;
                std::future::pending::<()>().await;
            };
            let ack = tokio::select! {
                ack = stream.answers.ack() => ack,
                () = answered => unreachable!("it never ends"),
            };
            // The link may still be in its backoff; then nothing was sent.
            match class_of(&ack) {
                Some((_, RetryClass::Retry)) => tokio::time::sleep(Duration::from_millis(50)).await,
                _ => break ack,
            }
        };
        assert_eq!(class_of(&ack), Some(unknown("internal")), "{what}");
    }
    // A late answer to something never asked is dropped, and the link stays.
    let (ack, ()) = tokio::join!(
        stream.publish_until_taken(SECOND, Duration::from_secs(5)),
        async {
            let request = owner.next().await;
            request
                .write(raw_frame(b"FLXI", 1, 2, 24, &[0xEE; 24]))
                .await;
            request.stored_at(0).await;
        }
    );
    assert!(ack.0 < Duration::from_secs(5));
    brokers.assert_alive(0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_nobody_can_reach_is_not_sent_to() {
    let brokers = ingress();
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.stream(&token).await;
    // Nobody listens there.
    let started = Instant::now();
    let said = refusal(stream.publish(SECOND, b"x").await);
    assert_eq!(said, ("shard_unavailable".to_string(), RetryClass::Retry));
    assert!(
        started.elapsed() < Duration::from_secs(4),
        "{:?}",
        started.elapsed()
    );
    // While the broker waits before it dials again, the answer comes at once.
    let started = Instant::now();
    let said = refusal(stream.publish(SECOND, b"x").await);
    assert_eq!(said, ("shard_unavailable".to_string(), RetryClass::Retry));
    assert!(
        started.elapsed() < Duration::from_secs(4),
        "{:?}",
        started.elapsed()
    );
    brokers.wait_metric(0, "felix_forwards_unreachable_total", 2.0);
}
