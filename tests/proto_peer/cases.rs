//! The cases that matter in the field, one by one.

use super::*;

#[test]
fn a_request_waits_for_the_greeting_and_not_only_for_the_connection() {
    let mut pair = Pair::new(small_limits());
    let token = pair.request();
    assert_eq!((pair.dials, pair.link.waiting()), (1, 1));
    pair.connected();
    assert!(pair.hello_sent);
    assert_eq!(pair.link.phase(), LinkPhase::Greeting);
    assert!(pair.transmits.is_empty(), "connected is not up");
    pair.answer(HELLO_CORRELATION, hello_ok("b"));
    assert_eq!(pair.transmits.len(), 1);
    let id = pair.oldest().unwrap();
    pair.answer(id, Answer::PublishOk(9));
    assert_eq!(pair.result(token), Some(&SendResult::Ok(9)));
}

#[test]
fn a_certificate_refused_after_the_handshake_is_not_sent_and_waits_long() {
    let mut pair = Pair::new(small_limits());
    let token = pair.request();
    pair.connected();
    pair.closed(CloseCause::CertificateRefused);
    assert_eq!(pair.result(token), Some(&NOT_SENT_UNREACHABLE));
    assert_eq!(
        pair.reports,
        [LinkReport::NeverUp(HandshakeFailure::Closed(
            CloseCause::CertificateRefused
        ))]
    );
    assert_eq!(pair.link.counters().identity_refused, 1);
    for _ in 0..70 {
        pair.wait(Duration::from_millis(100));
        let token = pair.request();
        assert!(
            matches!(
                pair.result(token),
                Some(SendResult::NotSent(NotSentCause::Backoff { .. }))
            ),
            "no dial inside the window"
        );
    }
    assert_eq!(pair.dials, 1);
}

#[test]
fn few_dials_a_minute_to_a_peer_that_refuses_our_certificate() {
    let mut pair = Pair::new(small_limits());
    for _ in 0..600 {
        pair.request();
        if pair.link.phase() == LinkPhase::Connecting {
            pair.connected();
            pair.closed(CloseCause::CertificateRefused);
        }
        pair.wait(Duration::from_millis(100));
    }
    assert!((2..=5).contains(&pair.dials), "{} dials", pair.dials);
}

#[test]
fn the_wrong_broker_at_an_address_is_closed_and_reported() {
    let mut pair = Pair::new(small_limits());
    let token = pair.request();
    pair.connected();
    pair.answer(HELLO_CORRELATION, hello_ok("c"));
    assert_eq!(pair.result(token), Some(&NOT_SENT_UNREACHABLE));
    assert_eq!(pair.closes, [LinkClose::GreetingFailed]);
    assert!(matches!(
        pair.reports[..],
        [LinkReport::NeverUp(HandshakeFailure::WrongNode { .. })]
    ));
    // That address is not dialled again soon; another one is, at once.
    for _ in 0..70 {
        pair.request();
        pair.wait(Duration::from_millis(100));
    }
    assert_eq!(pair.dials, 1);
    pair.link.on_address_changed();
    pair.request();
    assert_eq!(pair.dials, 2);
}

#[test]
fn connecting_and_greeting_share_one_deadline() {
    for ms_before_connect in [500, 1999] {
        let mut pair = Pair::new(small_limits());
        let token = pair.request();
        pair.wait(Duration::from_millis(ms_before_connect));
        pair.connected();
        pair.wait(Duration::from_millis(1999 - ms_before_connect));
        assert_eq!(pair.result(token), None);
        pair.wait(Duration::from_millis(1));
        assert_eq!(pair.result(token), Some(&NOT_SENT_UNREACHABLE));
        assert_eq!(pair.closes, [LinkClose::GreetingFailed]);
    }
}

#[test]
fn a_lost_connection_ends_everything_on_it_at_once() {
    let mut pair = Pair::up(LinkLimits::default());
    let tokens: Vec<_> = (0..10).map(|_| pair.request()).collect();
    pair.closed(CloseCause::TimedOut);
    for token in tokens {
        assert_eq!(
            pair.result(token),
            Some(&SendResult::Unknown(UnknownCause::Disconnect))
        );
    }
    assert_eq!(
        pair.reports.last(),
        Some(&LinkReport::Lost {
            cause: CloseCause::TimedOut,
            unknown_requests: 10
        })
    );
}

#[test]
fn a_peer_that_comes_back_is_reached_after_a_short_window() {
    let mut pair = Pair::up(LinkLimits::default());
    pair.wait(Duration::from_secs(10));
    pair.closed(CloseCause::ClosedByPeer);
    pair.wait(Duration::from_millis(50));
    let token = pair.request();
    assert_eq!(pair.dials, 2);
    let old = ConnectionEpoch(pair.epoch.0 - 1);
    pair.link.on_closed(old, pair.now, CloseCause::TimedOut);
    pair.drain();
    assert_eq!(
        pair.link.phase(),
        LinkPhase::Connecting,
        "the old connection has no say"
    );
    pair.connected();
    pair.answer(HELLO_CORRELATION, hello_ok("b"));
    let id = pair.oldest().unwrap();
    pair.answer(id, Answer::PublishOk(1));
    assert_eq!(pair.result(token), Some(&SendResult::Ok(1)));
}

#[test]
fn a_timeout_is_unknown_and_its_late_answer_is_dropped() {
    let mut pair = Pair::up(LinkLimits::default());
    let token = pair.request();
    let id = pair.oldest().unwrap();
    pair.wait(Duration::from_secs(5));
    assert_eq!(
        pair.result(token),
        Some(&SendResult::Unknown(UnknownCause::Timeout))
    );
    pair.answer(id, Answer::PublishOk(1));
    assert_eq!(pair.link.late_answers(), 1);
    assert_eq!(pair.link.phase(), LinkPhase::Up);
}

#[test]
fn the_bounds_shed_at_once() {
    let mut pair = Pair::up(small_limits());
    pair.request();
    pair.request();
    let third = pair.request();
    let full = SendResult::NotSent(NotSentCause::InFlightFull);
    assert_eq!(pair.result(third), Some(&full));
    assert_eq!(pair.link.counters().shed, 1);

    let mut pair = Pair::up(LinkLimits {
        in_flight_bytes: 1000,
        ..LinkLimits::default()
    });
    let large = pair.request_of(5000, Family::Publish);
    assert_eq!(pair.result(large), None, "alone it may exceed the bound");
    let small = pair.request_of(1, Family::Publish);
    assert_eq!(pair.result(small), Some(&full));
    let id = pair.oldest().unwrap();
    pair.answer(id, Answer::PublishOk(1));
    let next = pair.request_of(1000, Family::Publish);
    assert_eq!(pair.result(next), None);
}

#[test]
fn waiting_requests_count_against_the_bound() {
    let mut pair = Pair::new(small_limits());
    pair.request();
    pair.request();
    let third = pair.request();
    assert_eq!(
        pair.result(third),
        Some(&SendResult::NotSent(NotSentCause::InFlightFull))
    );
}

#[test]
fn large_requests_do_not_share_a_stream_with_small_ones() {
    let mut pair = Pair::up(LinkLimits::default());
    pair.request_of(1 << 20, Family::Publish);
    pair.request_of(100, Family::Publish);
    let streams: Vec<_> = pair.transmits.iter().map(|(_, s, _)| *s).collect();
    assert_eq!(streams, [StreamSlot(2), StreamSlot(0)]);
}

#[test]
fn an_old_peer_is_remembered_for_the_connection_only() {
    let mut pair = Pair::up(LinkLimits::default());
    pair.request();
    let id = pair.oldest().unwrap();
    pair.answer(id, refused(PeerCode::UnsupportedKind));
    pair.request();
    assert_eq!(
        pair.transmits.last().map(|t| t.2),
        Some(ForwardKind::Legacy)
    );
    pair.closed(CloseCause::ClosedByPeer);
    pair.wait(Duration::from_secs(6));
    pair.bring_up();
    pair.request();
    assert_eq!(
        pair.transmits.last().map(|t| t.2),
        Some(ForwardKind::Authorized)
    );
}

#[test]
fn a_peer_that_cannot_read_a_request_is_left_after_its_answers() {
    let mut pair = Pair::up(LinkLimits::default());
    let unreadable = pair.request();
    let other = pair.request();
    let (first, second) = (pair.sent[0].1, pair.sent[1].1);
    pair.answer(first, refused(PeerCode::Malformed));
    assert!(matches!(
        pair.result(unreadable),
        Some(SendResult::Error(_))
    ));
    assert_eq!(pair.link.phase(), LinkPhase::Draining);
    let refused_now = pair.request();
    assert_eq!(
        pair.result(refused_now),
        Some(&SendResult::NotSent(NotSentCause::Draining))
    );
    pair.answer(second, Answer::PublishOk(4));
    assert_eq!(pair.result(other), Some(&SendResult::Ok(4)));
    assert_eq!(pair.closes, [LinkClose::LayoutDispute]);
    assert_eq!(pair.link.phase(), LinkPhase::Backoff);
}

#[test]
fn a_damaged_records_batch_does_not_cost_the_connection() {
    let mut pair = Pair::up(LinkLimits::default());
    pair.request_of(100, Family::ReplicateRecords);
    let id = pair.oldest().unwrap();
    let malformed = PeerError::bare(PeerCode::Malformed);
    pair.answer(id, Answer::ReplicateError(malformed.clone()));
    assert_eq!(pair.link.phase(), LinkPhase::Up);
    pair.request_of(100, Family::ReplicateControl);
    let id = pair.oldest().unwrap();
    pair.answer(id, Answer::ReplicateError(malformed));
    assert_eq!(pair.closes, [LinkClose::LayoutDispute]);
}

#[test]
fn an_answer_of_a_foreign_family_breaks_the_connection_off() {
    let mut pair = Pair::up(LinkLimits::default());
    let tokens = [pair.request(), pair.request()];
    let id = pair.oldest().unwrap();
    pair.answer(id, Answer::ReplicateOk(1));
    for token in tokens {
        assert_eq!(
            pair.result(token),
            Some(&SendResult::Unknown(UnknownCause::ProtocolViolation))
        );
    }
    assert_eq!(pair.closes, [LinkClose::ProtocolViolation]);
}

#[test]
fn an_idle_link_closes_and_a_used_one_does_not() {
    let mut pair = Pair::up(LinkLimits::default());
    pair.wait(Duration::from_secs(59));
    pair.request();
    let id = pair.oldest().unwrap();
    pair.answer(id, Answer::PublishOk(1));
    pair.wait(Duration::from_secs(59));
    assert_eq!(pair.link.phase(), LinkPhase::Up);
    pair.wait(Duration::from_secs(1));
    assert_eq!(pair.closes, [LinkClose::Idle]);
    assert_eq!(pair.link.phase(), LinkPhase::Idle);
    pair.request();
    assert_eq!(pair.dials, 2, "an idle close leaves no window behind");
}

#[test]
fn shutting_down_waits_for_answers_but_not_for_ever() {
    let mut pair = Pair::up(LinkLimits {
        request_timeout: Duration::from_secs(100),
        ..LinkLimits::default()
    });
    let token = pair.request();
    pair.link.shut_down(pair.now);
    pair.drain();
    assert_eq!(pair.link.phase(), LinkPhase::Draining);
    pair.wait(Duration::from_secs(5));
    assert_eq!(
        pair.result(token),
        Some(&SendResult::Unknown(UnknownCause::Timeout))
    );
    assert_eq!(pair.closes, [LinkClose::ShuttingDown]);
    assert_eq!(pair.link.phase(), LinkPhase::Retired);
    let refused = pair.request();
    assert_eq!(
        pair.result(refused),
        Some(&SendResult::NotSent(NotSentCause::Draining))
    );
}
