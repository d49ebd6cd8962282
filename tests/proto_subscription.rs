//! A subscriber's cursor against a simulated log that grows, trims and loses fetches.

use felix_uring::ids::{Generation, NodeId, Offset};
use felix_uring::proto::client_session::{
    cursor_error, event_stream_end, subscribed, EventStreamEnd,
};
use felix_uring::proto::outcome::Target;
use felix_uring::proto::subscription::Ended;
use felix_uring::proto::subscription::{
    Delivery, EndReason, Readable, StartPosition, StartRefusal, Subscription, SubscriptionLimits,
    SubscriptionStep,
};
use felix_uring::wire::client::answers::CursorErrorReason;
use felix_uring::wire::client::{Answer, ClientOffer, Request, ShardOwner};
use proptest::prelude::*;

const LIMITS: SubscriptionLimits = SubscriptionLimits {
    in_flight_bytes: 100,
    batch_bytes: 40,
    held_back_batch_bytes: 10,
};

fn log(oldest: u64, end: u64) -> Readable {
    Readable {
        oldest: Offset(oldest),
        end: Offset(end),
        held_end: Offset(end),
    }
}

fn open(start: StartPosition, oldest: u64, end: u64) -> Subscription {
    Subscription::open(start, log(oldest, end), LIMITS)
        .unwrap()
        .0
}

fn fetch(from: u64, before: u64, max_bytes: usize) -> SubscriptionStep {
    SubscriptionStep::Fetch {
        from: Offset(from),
        before: Offset(before),
        max_bytes,
    }
}

fn range(from: u64, to: u64) -> std::ops::Range<Offset> {
    Offset(from)..Offset(to)
}

const SEND: Delivery = Delivery::Send { skipped_before: 0 };

#[test]
fn start_positions() {
    let at = |n| StartPosition::At(Offset(n));
    for (start, expected) in [
        (StartPosition::Latest, Ok(9)),
        (StartPosition::Earliest, Ok(5)),
        (at(5), Ok(5)),
        (at(7), Ok(7)),
        (at(9), Ok(9)),
        (
            at(4),
            Err(StartRefusal::TooOld {
                requested: Offset(4),
                available: Offset(5),
            }),
        ),
        (
            at(10),
            Err(StartRefusal::InFuture {
                requested: Offset(10),
                available: Offset(9),
            }),
        ),
    ] {
        let opened = Subscription::open(start, log(5, 9), LIMITS).map(|(_, opened)| opened);
        let start_offset = opened.as_ref().map(|o| o.start.0).map_err(|e| *e);
        assert_eq!(start_offset, expected, "{start:?}");
        if let Ok(opened) = opened {
            assert_eq!(opened.live, Offset(9));
        }
    }
}

#[test]
fn stored_and_new_records_join_without_a_gap() {
    let mut sub = open(StartPosition::Earliest, 0, 3);
    assert!(sub.is_behind());
    assert_eq!(sub.poll_step(), fetch(0, 3, 40));
    assert_eq!(sub.poll_step(), SubscriptionStep::AwaitFetch);
    sub.on_readable(Offset(5));
    assert_eq!(sub.on_records(range(0, 3), 30), SEND);
    assert_eq!(sub.poll_step(), fetch(3, 5, 40));
    assert_eq!(sub.on_records(range(3, 5), 20), SEND);
    assert_eq!(sub.poll_step(), SubscriptionStep::AwaitRecords);
    assert!(!sub.is_behind());
}

#[test]
fn a_slow_subscriber_waits_for_room_and_then_reads_behind() {
    let mut sub = open(StartPosition::Latest, 0, 0);
    assert_eq!(sub.poll_step(), SubscriptionStep::AwaitRecords);
    sub.on_readable(Offset(10));
    assert_eq!(sub.poll_step(), fetch(0, 10, 40));
    sub.on_records(range(0, 1), 40);
    assert_eq!(sub.poll_step(), fetch(1, 10, 40), "a whole batch fits");
    sub.on_records(range(1, 2), 21);
    for _ in 0..3 {
        assert_eq!(sub.poll_step(), SubscriptionStep::AwaitRoom);
    }
    assert_eq!((sub.is_behind(), sub.times_fallen_behind()), (true, 1));
    sub.on_taken(1);
    assert_eq!(sub.poll_step(), fetch(2, 10, 40));
}

#[test]
fn a_subscriber_without_room_does_not_wait_for_records() {
    let mut sub = open(StartPosition::Latest, 0, 0);
    sub.on_readable(Offset(1));
    assert_eq!(sub.poll_step(), fetch(0, 1, 40));
    sub.on_records(range(0, 1), 400);
    // At the end of the log: a read that waited there would bring records nobody has room for.
    assert_eq!(sub.poll_step(), SubscriptionStep::AwaitRoom);
    assert_eq!((sub.is_behind(), sub.times_fallen_behind()), (false, 0));
    sub.on_taken(400);
    assert_eq!(sub.poll_step(), SubscriptionStep::AwaitRecords);
}

#[test]
fn one_small_batch_is_always_on_its_way_and_no_more_while_others_hold_everything() {
    let mut sub = open(StartPosition::Earliest, 0, 9);
    sub.set_held_back(true);
    assert_eq!(sub.poll_step(), fetch(0, 9, 10));
    sub.on_records(range(0, 1), 10);
    assert_eq!(sub.poll_step(), SubscriptionStep::AwaitRoom);
    sub.on_taken(9);
    assert_eq!(
        sub.poll_step(),
        SubscriptionStep::AwaitRoom,
        "not all of it"
    );
    sub.on_untaken(0);
    assert_eq!(sub.poll_step(), fetch(1, 9, 10));
    sub.on_records(range(1, 2), 10);
    sub.set_held_back(false);
    assert_eq!(sub.poll_step(), fetch(2, 9, 40), "the others gave it back");
}

#[test]
fn wrong_records_are_discarded() {
    let mut sub = open(StartPosition::At(Offset(5)), 0, 9);
    assert_eq!(
        sub.on_records(range(5, 6), 1),
        Delivery::Discard,
        "not asked"
    );
    for wrong in [range(4, 6), range(6, 6), range(5, 10)] {
        assert!(matches!(sub.poll_step(), SubscriptionStep::Fetch { .. }));
        assert_eq!(
            sub.on_records(wrong.clone(), 1),
            Delivery::Discard,
            "{wrong:?}"
        );
    }
    assert!(matches!(sub.poll_step(), SubscriptionStep::Fetch { .. }));
    assert_eq!(
        sub.on_records(range(7, 8), 1),
        Delivery::Send { skipped_before: 2 }
    );
}

#[test]
fn ends_are_reported_once_with_the_place_to_resume_from() {
    let owner = Some(Target {
        node: NodeId::new("b").unwrap(),
        generation: Generation(2),
    });
    for reason in [
        EndReason::ShardMoved { owner },
        EndReason::StreamDeleted,
        EndReason::StoppedByClient,
        EndReason::Revoked,
        EndReason::StorageFailed,
        EndReason::Draining,
    ] {
        let mut sub = open(StartPosition::At(Offset(4)), 0, 9);
        sub.poll_step();
        sub.end(reason.clone());
        sub.end(EndReason::Revoked);
        sub.on_trimmed(Offset(8));
        assert_eq!(sub.on_records(range(4, 5), 1), Delivery::Discard);
        let SubscriptionStep::Ended(ended) = sub.poll_step() else {
            panic!("no end")
        };
        assert_eq!(ended.reason, reason, "the first reason stands");
        assert_eq!(ended.resume_from, Offset(4));
        assert_eq!(sub.poll_step(), SubscriptionStep::Done);
    }
}

#[test]
fn a_subscriber_whose_records_were_trimmed_is_told() {
    let mut sub = open(StartPosition::Earliest, 0, 9);
    sub.poll_step();
    sub.on_trimmed(Offset(0));
    assert_eq!(sub.poll_step(), fetch(0, 9, 40), "nothing was lost");
    sub.on_trimmed(Offset(6));
    let SubscriptionStep::Ended(ended) = sub.poll_step() else {
        panic!("no end")
    };
    assert_eq!(ended.reason, EndReason::Lagged);
    assert_eq!(ended.resume_from, Offset(6));
}

fn offer(flags: u16, features: u32, high: u32) -> ClientOffer {
    let text = format!(
        "{{\"type\":\"auth\",\"tenant_id\":\"t\",\"token\":\"x\",\"client_flags\":{flags},\
         \"client_features\":{features},\"client_features_hi\":{high}}}"
    );
    match Request::decode(text.as_bytes()).unwrap() {
        Request::Auth(auth) => ClientOffer::from_auth(&auth),
        other => panic!("{other:?}"),
    }
}

#[test]
fn ends_use_the_message_the_client_reads_and_never_a_clean_end() {
    let all = offer(0x1FFF, 0xFB77_FFFF, 0xF);
    let codes_only = offer(0x1FFF, 0x800, 0);
    let owner = Some(ShardOwner {
        node_id: "c".into(),
        addr: Some("192.0.2.3:7000".into()),
        generation: 3,
    });
    let end = |reason, offer: &ClientOffer| {
        let ended = Ended {
            reason,
            resume_from: Offset(12),
        };
        event_stream_end(5, &ended, owner.clone(), 3, offer)
    };
    let moved = || EndReason::ShardMoved { owner: None };
    let EventStreamEnd::Message(Answer::ShardMoved(message)) = end(moved(), &all) else {
        panic!("no shard_moved")
    };
    assert_eq!(message.resume_from, Some(12));
    assert_eq!(message.node_id.as_deref(), Some("c"));
    assert_eq!((message.subscription_id, message.generation), (5, 3));
    assert!(matches!(
        end(EndReason::StreamDeleted, &all),
        EventStreamEnd::Message(Answer::StreamDeleted(_))
    ));
    assert!(matches!(
        end(EndReason::Lagged, &all),
        EventStreamEnd::Message(Answer::SubscriptionLagged(m)) if m.resume_from == 12
    ));
    for (reason, code) in [
        (moved(), "not_leader"),
        (EndReason::StreamDeleted, "not_found"),
        (EndReason::Lagged, "limit_exceeded"),
        (EndReason::Revoked, "revoked"),
        (EndReason::StorageFailed, "storage"),
    ] {
        let EventStreamEnd::Message(Answer::ErrorAnswer(error)) = end(reason, &codes_only) else {
            panic!("{code}")
        };
        assert_eq!(error.code.unwrap().name(), code);
    }
    assert_eq!(
        end(EndReason::Draining, &all),
        EventStreamEnd::WithConnection
    );
    assert_eq!(end(EndReason::StoppedByClient, &all), EventStreamEnd::Reset);
}

#[test]
fn offsets_go_to_clients_that_read_them() {
    let (_, opened) = Subscription::open(StartPosition::Earliest, log(2, 9), LIMITS).unwrap();
    for (flags, expected) in [(0x0020, (Some(2), Some(9))), (0, (None, None))] {
        let Answer::Subscribed(answer) = subscribed(4, opened, &offer(flags, 0, 0)) else {
            panic!("no subscribed")
        };
        assert_eq!((answer.start_offset, answer.live_offset), expected);
    }
    let refusal = Subscription::open(StartPosition::At(Offset(1)), log(2, 9), LIMITS).unwrap_err();
    let Some(Answer::SubscribeCursorError(answer)) = cursor_error(refusal) else {
        panic!("no cursor error")
    };
    assert_eq!(answer.reason, CursorErrorReason::TooOld);
    assert_eq!((answer.requested, answer.available), (1, 2));
}

/// A leader that has just begun again knows of fewer records on a majority than its subscribers were shown
/// before: one that goes on where it was is asked to wait, and not told that it is wrong.
#[test]
fn a_position_that_is_held_and_not_shown_yet_is_no_cursor_error() {
    let held = Readable {
        held_end: Offset(12),
        ..log(5, 9)
    };
    let open = |at| Subscription::open(StartPosition::At(Offset(at)), held, LIMITS).map(|_| ());
    assert_eq!(open(9), Ok(()));
    for requested in [Offset(10), Offset(12)] {
        let refusal = StartRefusal::NotShownYet { requested };
        assert_eq!(open(requested.0), Err(refusal));
        assert_eq!(cursor_error(refusal), None);
    }
    let refusal = open(13).unwrap_err();
    assert!(matches!(refusal, StartRefusal::InFuture { .. }));
    assert!(cursor_error(refusal).is_some());
}

#[derive(Debug, Clone)]
enum Event {
    Append(u8),
    Step { records: u8, bytes_each: u8 },
    Taken(u8),
    FetchNothing,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]
    #[test]
    fn every_record_is_delivered_once_in_order_within_the_bound(
        start in 0u64..6,
        events in prop::collection::vec(
            prop_oneof![
                2 => (1u8..5).prop_map(Event::Append),
                4 => (1u8..4, 1u8..30).prop_map(|(records, bytes_each)| Event::Step {
                    records,
                    bytes_each,
                }),
                2 => (1u8..120).prop_map(Event::Taken),
                1 => Just(Event::FetchNothing),
            ],
            1..200,
        ),
    ) {
        let mut end = 5u64;
        let (mut sub, _) =
            Subscription::open(StartPosition::At(Offset(start.min(end))), log(0, end), LIMITS)
                .unwrap();
        let mut expected = start.min(end);
        let mut outstanding = 0usize;
        for event in events {
            match event {
                Event::Append(n) => {
                    end += u64::from(n);
                    sub.on_readable(Offset(end));
                }
                Event::Taken(n) => {
                    let taken = usize::from(n).min(outstanding);
                    outstanding -= taken;
                    sub.on_taken(taken);
                }
                Event::FetchNothing => {
                    if let SubscriptionStep::Fetch { from, .. } = sub.poll_step() {
                        prop_assert_eq!(sub.on_records(from..from, 0), Delivery::Discard);
                    }
                }
                Event::Step { records, bytes_each } => match sub.poll_step() {
                    SubscriptionStep::Fetch { from, before, max_bytes } => {
                        prop_assert_eq!(from, Offset(expected), "SUB-1");
                        prop_assert!(before.0 <= end, "SUB-3");
                        let fits = (max_bytes / usize::from(bytes_each)).max(1) as u64;
                        let count = u64::from(records).min(fits).min(before.0 - from.0);
                        let bytes = count as usize * usize::from(bytes_each);
                        let got = sub.on_records(from..Offset(from.0 + count), bytes);
                        prop_assert_eq!(got, SEND);
                        expected += count;
                        outstanding += bytes;
                        let one = usize::from(bytes_each);
                        prop_assert!(outstanding <= LIMITS.in_flight_bytes + one, "SUB-2");
                    }
                    SubscriptionStep::AwaitRecords => prop_assert_eq!(expected, end),
                    SubscriptionStep::AwaitRoom => {
                        prop_assert!(outstanding + LIMITS.batch_bytes > LIMITS.in_flight_bytes)
                    }
                    other => prop_assert!(false, "{:?}", other),
                },
            }
            prop_assert_eq!(sub.next_offset(), Offset(expected));
        }
    }
}
