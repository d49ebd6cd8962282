//! Kernels that refuse what they had offered, and full send buffers.

use std::time::Duration;

use bytes::Bytes;
use felix_uring::driver::quic::ReadEnd;

use quinn_udp::Transmit;
use rand::rngs::StdRng;
use rand::{Rng, RngCore, SeedableRng};

use crate::support::{Pair, CLIENT, SERVER};

/// Sends 1 MiB within a time no retransmission timer fits into, and says how long it took.
fn quick_transfer(pair: &mut Pair) -> Duration {
    const TOTAL: usize = 1 << 20;
    let (client, server) = pair.connect();
    let stream = pair.world.pumps[CLIENT].open_uni(client).expect("stream");
    let start = pair.world.now;
    pair.world.pumps[CLIENT]
        .send(client, stream, Bytes::from(vec![3; TOTAL]))
        .expect("send");
    pair.world.pumps[CLIENT]
        .finish(client, stream)
        .expect("finish");
    let mut received = 0;
    let done = pair.world.run(Duration::from_secs(5), |w| {
        w.pumps[SERVER].read_each(server, stream, usize::MAX, |c| received += c.len())
            == ReadEnd::Finished
    });
    assert!(done, "{received} of {TOTAL}");
    let stats = pair.world.pumps[CLIENT].conn_stats(client).expect("stats");
    assert_eq!(stats.lost_packets, 0, "nothing waits for loss detection");
    pair.world.now - start
}

#[test]
fn a_refused_batch_is_sent_singly_at_once_and_batching_stays_off() {
    for errno in [libc::EIO, libc::EINVAL] {
        for after_connect in [false, true] {
            let mut pair = Pair::new(1);
            if after_connect {
                quick_transfer(&mut pair);
            }
            pair.client_faults.borrow_mut().batch = Some(errno);
            let tried_before = pair.client_faults.borrow().batches_tried;
            quick_transfer(&mut pair);
            let faults = pair.client_faults.borrow();
            assert_eq!(faults.batches_tried - tried_before, 1, "tried once only");
            let counters = pair.world.pumps[CLIENT].send_counters(pair.client_endpoint);
            assert!(counters.batching_off);
            assert!(!counters.ecn_off);
            assert_eq!(counters.errors(), 1);
            assert_eq!(
                counters.io_errors + counters.invalid,
                1,
                "counted by reason"
            );
        }
    }
}

#[test]
fn a_refused_ecn_mark_is_dropped_at_once() {
    for errno in [libc::EIO, libc::EINVAL] {
        let mut pair = Pair::new(1);
        pair.client_faults.borrow_mut().ecn = Some(errno);
        pair.server_faults.borrow_mut().ecn = Some(errno);
        quick_transfer(&mut pair);
        for (side, endpoint) in [
            (CLIENT, pair.client_endpoint),
            (SERVER, pair.server_endpoint),
        ] {
            let counters = pair.world.pumps[side].send_counters(endpoint);
            assert!(counters.ecn_off);
            assert!(counters.errors() <= 2, "{counters:?}");
        }
        let marked = pair.client_faults.borrow().marked_tried;
        assert!(marked <= 2, "marks were sent on: {marked}");
    }
}

#[test]
fn both_refused_together() {
    let mut pair = Pair::new(1);
    {
        let mut faults = pair.client_faults.borrow_mut();
        faults.batch = Some(libc::EIO);
        faults.ecn = Some(libc::EINVAL);
    }
    quick_transfer(&mut pair);
}

#[test]
fn a_full_buffer_keeps_the_datagrams() {
    let mut pair = Pair::new(1);
    let usual = quick_transfer(&mut pair);
    pair.client_faults.borrow_mut().would_block = 200;
    let slow = quick_transfer(&mut pair);
    assert!(slow > usual);
    let counters = pair.world.pumps[CLIENT].send_counters(pair.client_endpoint);
    assert_eq!(counters.would_block, 200);
    assert_eq!(counters.errors(), 0);
}

#[test]
fn a_socket_that_refuses_everything_is_counted_and_nothing_hangs() {
    let mut pair = Pair::new(1);
    let (client, _) = pair.connect();
    {
        let mut faults = pair.client_faults.borrow_mut();
        faults.batch = Some(libc::ENETUNREACH);
        faults.ecn = Some(libc::ENETUNREACH);
    }
    let stream = pair.world.pumps[CLIENT].open_uni(client).expect("stream");
    pair.world.pumps[CLIENT]
        .send(client, stream, Bytes::from(vec![3; 100_000]))
        .expect("send");
    assert!(pair.world.run(Duration::from_secs(20), |w| !w.pumps[CLIENT]
        .is_live(client)));
    let counters = pair.world.pumps[CLIENT].send_counters(pair.client_endpoint);
    assert!(counters.unreachable > 0);
    assert!(!counters.batching_off && !counters.ecn_off);
}

#[test]
fn garbage_makes_no_connection_and_little_answer() {
    const DATAGRAMS: usize = 5_000;
    let mut pair = Pair::new(1);
    let stranger = pair.world.fresh_addr();
    let (mut spec, _) = pair.world.spec(stranger, None);
    let mut rng = StdRng::seed_from_u64(5);
    for n in 0..DATAGRAMS {
        let mut data = vec![0; rng.random_range(1..1500)];
        rng.fill_bytes(&mut data);
        if n % 4 == 0 && data.len() > 30 {
            // The look of an Initial or a Handshake packet of version 1.
            data[0] = if n % 8 == 0 { 0xc0 } else { 0xe0 };
            data[1..6].copy_from_slice(&[0, 0, 0, 1, 8]);
        }
        let transmit = Transmit {
            destination: pair.server_addr,
            ecn: None,
            contents: &data,
            segment_size: None,
            src_ip: None,
        };
        spec.io.send(&transmit).expect("send");
    }
    pair.world.pass(Duration::from_secs(1));
    let pump = &pair.world.pumps[SERVER];
    assert_eq!(pump.counters().received_datagrams, DATAGRAMS as u64);
    assert_eq!(pump.counters().connected, 0);
    assert!(pump.is_drained(), "{} connections", pump.open_connections());
    let answered = pump.send_counters(pair.server_endpoint);
    assert!(
        answered.bytes < pump.counters().received_bytes / 2,
        "{answered:?}"
    );
    // And a real client is served.
    pair.connect();
}
