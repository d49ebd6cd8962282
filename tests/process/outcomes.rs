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
use crate::support::SOON;

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
    let late = "felix_frames_refused_total{reason=\"peer_late_answer\"}";
    brokers.wait_metric(0, late, 3.0);
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

/// The rows of the retry table that need a second owner, or several answers to one request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redirects_budget_and_old_peers_are_as_the_table_says() {
    let mut brokers = Brokers::prepare_with(3, |_| {});
    brokers.start_node(0);
    let mut owner = ScriptedOwner::start(&brokers, 1);
    let mut other = ScriptedOwner::start(&brokers, 2);
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.stream(&token).await;
    let addr_of = |index: usize| brokers.cluster.node(index).internal_addr();

    // A broker not tried yet is asked although the generation is the same, with the credential.
    stream.start_publish(SECOND, &[b"elsewhere"]).await;
    let request = owner.next().await;
    request.redirect("node-3", addr_of(2), 1).await;
    let again = other.next().await;
    assert_eq!(again.publish.shard.generation.0, 1);
    assert_eq!(
        again.publish.credential.as_ref().map(|c| c.as_str()),
        Some(token.as_str())
    );
    again.stored_at(3).await;
    let ack = stream.answers.ack().await;
    assert_eq!(ack.outcome, PublishOutcome::Accepted { offset: Some(3) });

    // Two owners that point at each other: each is asked once.
    stream.start_publish(SECOND, &[b"circle"]).await;
    owner.next().await.redirect("node-3", addr_of(2), 1).await;
    other.next().await.redirect("node-2", addr_of(1), 1).await;
    let ack = stream.answers.ack().await;
    let (_, class) = class_of(&ack).expect("a refusal");
    assert_eq!(class, RetryClass::Retry);

    // An older generation corrects nothing: the same owner is asked again, as one that lags.
    stream.start_publish(SECOND, &[b"older"]).await;
    owner.next().await.redirect("node-3", addr_of(2), 0).await;
    let again = owner.next().await;
    assert_eq!(again.publish.shard.generation.0, 1);
    again.stored_at(4).await;
    let ack = stream.answers.ack().await;
    assert_eq!(ack.outcome, PublishOutcome::Accepted { offset: Some(4) });

    // An owner that sheds for ever is asked five times at most.
    stream.start_publish(SECOND, &[b"shed"]).await;
    let mut asked = 0;
    let ack = loop {
        tokio::select! {
            ack = stream.answers.ack() => break ack,
            request = owner.next() => {
                asked += 1;
                request.refuse(ErrorCode::Overload).await;
            }
        }
    };
    assert!((2..=5).contains(&asked), "asked {asked} times");
    let told = ("overloaded".to_string(), RetryClass::RetryAfter);
    assert_eq!(class_of(&ack), Some(told));

    // A peer that does not know the kind with a credential is remembered as long as its connection.
    for (round, expected) in [(0, [true, false]), (1, [true, false])] {
        for (nth, is_authorized) in expected.into_iter().enumerate() {
            stream.start_publish(SECOND, &[b"old peer"]).await;
            let mut request = owner.next().await;
            let what = format!("round {round}, publish {nth}");
            assert_eq!(
                request.publish.credential.is_some(),
                is_authorized,
                "{what}"
            );
            if is_authorized {
                request.refuse(ErrorCode::UnsupportedKind).await;
                request = owner.next().await;
                assert!(request.publish.credential.is_none(), "{what}");
            }
            request.stored_at(9).await;
            let ack = stream.answers.ack().await;
            assert_eq!(class_of(&ack), None, "{what}");
        }
        owner.close_connections();
        // The next one finds the link lost, or makes it again.
        let deadline = Instant::now() + SOON;
        loop {
            stream.start_publish(SECOND, &[b"probe"]).await;
            let ack = tokio::select! {
                ack = stream.answers.ack() => ack,
                request = owner.next() => {
                    request.refuse(ErrorCode::Unauthorized).await;
                    stream.answers.ack().await
                }
            };
            match class_of(&ack) {
                Some((_, RetryClass::Fatal)) => break,
                _ => assert!(Instant::now() < deadline, "the link stays down"),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    assert!(owner.try_next().is_none() && other.try_next().is_none());
}

/// What a client stream sends is applied in its order, whatever is refused meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_batch_is_never_applied_behind_a_later_one() {
    let mut brokers = Brokers::prepare_with(2, |_| {});
    brokers.start_node(0);
    let mut owner = ScriptedOwner::start(&brokers, 1);
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.stream(&token).await;

    // The later one was written: the refused one is not sent again, its client is told.
    let first = stream.start_publish(SECOND, &[b"first"]).await;
    let request = owner.next().await;
    let second = stream.start_publish(SECOND, &[b"second"]).await;
    let later = owner.next().await;
    request.refuse(ErrorCode::Overload).await;
    later.stored_at(1).await;
    let mut told = std::collections::HashMap::new();
    for _ in 0..2 {
        let ack = stream.answers.ack().await;
        told.insert(ack.request_id, class_of(&ack));
    }
    let refused = ("overloaded".to_string(), RetryClass::RetryAfter);
    assert_eq!(told[&first], Some(refused));
    assert_eq!(told[&second], None);
    assert!(owner.try_next().is_none(), "it was sent again");

    // All of them refused: they are sent again, in order, and what came later behind them.
    let names: [&[u8]; 3] = [b"a", b"b", b"c"];
    let mut sent = Vec::new();
    let mut requests = Vec::new();
    for name in names {
        sent.push(stream.start_publish(SECOND, &[name]).await);
        requests.push(owner.next().await);
    }
    requests[0].refuse(ErrorCode::StaleRoute).await;
    // Once its second attempt has come and waits for the two behind it.
    brokers.wait_metric(0, "felix_forwards_held_total", 1.0);
    sent.push(stream.start_publish(SECOND, &[b"d"]).await);
    tokio::time::sleep(Duration::from_millis(30)).await;
    assert!(
        owner.try_next().is_none(),
        "something was sent past the first"
    );
    for request in &requests[1..] {
        request.refuse(ErrorCode::StaleRoute).await;
    }
    for (nth, name) in [b"a", b"b", b"c", b"d"].into_iter().enumerate() {
        let request = owner.next().await;
        let payloads: Vec<&[u8]> = request.publish.payloads.iter().collect();
        assert_eq!(payloads, [&name[..]]);
        request.stored_at(10 + nth as u64).await;
    }
    for _ in 0..4 {
        let ack = stream.answers.ack().await;
        assert!(sent.contains(&ack.request_id));
        assert_eq!(class_of(&ack), None);
    }
    assert!(brokers.metric(0, "felix_forwards_held_total") >= 1.0);
}
