//! Bytes: order, bounds, loss, narrow paths, ends of streams.

use std::time::Duration;

use bytes::Bytes;
use felix_uring::driver::quic::{
    ConnId, ConnStats, PumpEvent, Read, ReadEnd, StreamError, StreamId, TransportSettings,
};

use crate::support::{Pair, World, CLIENT, SERVER};

fn pattern(offset: usize, len: usize) -> Bytes {
    (offset..offset + len)
        .map(|i| (i.wrapping_mul(31) >> 3) as u8)
        .collect()
}

/// Sends `total` bytes on a fresh stream and checks every one; gives the client's figures afterwards.
/// `each_turn` runs once a turn with what was received so far.
fn bulk(
    pair: &mut Pair,
    ids: (ConnId, ConnId),
    total: usize,
    limit: Duration,
    mut each_turn: impl FnMut(&mut World, usize),
) -> ConnStats {
    const PART: usize = 64 * 1024;
    const AHEAD: usize = 1 << 20;
    let stream = pair.world.pumps[CLIENT].open_uni(ids.0).expect("stream");
    let (mut sent, mut received, mut finished) = (0, 0, false);
    let done = pair.world.run(limit, |w| {
        while sent < total && w.pumps[CLIENT].queued_bytes(ids.0, stream) < AHEAD {
            let part = PART.min(total - sent);
            w.pumps[CLIENT]
                .send(ids.0, stream, pattern(sent, part))
                .expect("send");
            sent += part;
            if sent == total {
                w.pumps[CLIENT].finish(ids.0, stream).expect("finish");
            }
        }
        if w.events[SERVER]
            .drain(..)
            .any(|e| matches!(e, PumpEvent::Readable { .. }))
        {
            let end = w.pumps[SERVER].read_each(ids.1, stream, usize::MAX, |chunk| {
                assert_eq!(chunk, pattern(received, chunk.len()), "at {received}");
                received += chunk.len();
            });
            finished = end == ReadEnd::Finished;
        }
        each_turn(w, received);
        finished
    });
    assert!(done, "{received} of {total} bytes within {limit:?}");
    assert_eq!(received, total);
    pair.world.pumps[CLIENT].conn_stats(ids.0).expect("stats")
}

/// Connects and lets the search for the largest packet of a 1500-byte path end.
fn connect_and_discover(pair: &mut Pair) -> (ConnId, ConnId) {
    let ids = pair.connect();
    for side in [(CLIENT, ids.0), (SERVER, ids.1)] {
        let found = pair.world.run(Duration::from_secs(30), |w| {
            w.pumps[side.0]
                .conn_stats(side.1)
                .is_some_and(|s| s.mtu_bytes > 1400)
        });
        assert!(found, "{:?}", pair.world.pumps[side.0].conn_stats(side.1));
    }
    ids
}

#[test]
fn bulk_arrives_whole_and_in_order() {
    let mut pair = Pair::new(1);
    let ids = connect_and_discover(&mut pair);
    let stats = bulk(&mut pair, ids, 20 << 20, Duration::from_secs(30), |_, _| {});
    assert_eq!(stats.lost_packets, 0);
    assert!(stats.mtu_bytes > 1400, "{stats:?}");
}

#[test]
fn ordinary_loss_keeps_the_packet_size() {
    let mut pair = Pair::new(7);
    pair.world.net.0.borrow_mut().delay = Duration::from_millis(10);
    let ids = connect_and_discover(&mut pair);
    pair.world.net.0.borrow_mut().loss = 0.01;
    let mut smallest = u16::MAX;
    let stats = bulk(
        &mut pair,
        ids,
        40 << 20,
        Duration::from_secs(300),
        |w, got| {
            if got > 4 << 20 {
                let stats = w.pumps[CLIENT].conn_stats(ids.0).expect("stats");
                smallest = smallest.min(stats.mtu_bytes);
            }
        },
    );
    assert!(stats.lost_packets > 100, "{stats:?}");
    assert!(smallest > 1400, "{smallest}");
    assert!(stats.black_holes <= 2, "{stats:?}");
}

#[test]
fn a_path_that_shrinks_is_noticed() {
    let mut pair = Pair::new(7);
    let ids = connect_and_discover(&mut pair);
    let stats = bulk(
        &mut pair,
        ids,
        20 << 20,
        Duration::from_secs(60),
        |w, got| {
            if got > 4 << 20 {
                w.net.0.borrow_mut().path_bytes = 1_280;
            }
        },
    );
    assert!(stats.mtu_bytes <= 1_280, "{stats:?}");
    assert!(stats.black_holes >= 1, "{stats:?}");
}

#[test]
fn reordering_and_loss_together_lose_nothing() {
    for seed in 0..5 {
        let mut pair = Pair::new(seed);
        let ids = pair.connect();
        {
            let mut net = pair.world.net.0.borrow_mut();
            net.loss = 0.03;
            net.reorder = 0.2;
        }
        bulk(&mut pair, ids, 2 << 20, Duration::from_secs(60), |_, _| {});
    }
}

#[test]
fn a_reader_that_does_not_read_holds_the_writer_back() {
    const WINDOW: u32 = 256 * 1024;
    let mut settings = TransportSettings::peer_link();
    settings.stream_receive_window_bytes = WINDOW;
    settings.connection_receive_window_bytes = 2 * WINDOW;
    let mut pair = Pair::with(1, settings, |tls| tls.both());
    let (client, server) = pair.connect();
    let stream = pair.world.pumps[CLIENT].open_uni(client).expect("stream");
    let total = 3 * WINDOW as usize;
    pair.world.pumps[CLIENT]
        .send(client, stream, pattern(0, total))
        .expect("send");
    pair.world.pass(Duration::from_secs(2));
    let queued = pair.world.pumps[CLIENT].queued_bytes(client, stream);
    assert_eq!(queued, total - WINDOW as usize);
    assert_eq!(pair.world.pumps[CLIENT].conn_queued_bytes(client), queued);
    assert!(pair.world.pumps[CLIENT].is_live(client), "kept alive");

    let mut received = 0;
    let drained = pair.world.run(Duration::from_secs(5), |w| {
        w.pumps[SERVER].read_each(server, stream, usize::MAX, |c| received += c.len());
        let drained = w.events[CLIENT]
            .iter()
            .any(|e| matches!(e, PumpEvent::Drained { stream: s, .. } if *s == stream));
        drained && received == total
    });
    assert!(drained, "received {received}");
    assert_eq!(pair.world.pumps[CLIENT].conn_queued_bytes(client), 0);
}

#[test]
fn one_unread_stream_does_not_hold_up_another() {
    const WINDOW: u32 = 64 * 1024;
    let mut settings = TransportSettings::peer_link();
    settings.stream_receive_window_bytes = WINDOW;
    let mut pair = Pair::with(1, settings, |tls| tls.both());
    let (client, server) = pair.connect();
    let stuck = pair.world.pumps[CLIENT].open_uni(client).expect("stream");
    let free = pair.world.pumps[CLIENT].open_uni(client).expect("stream");
    let big = pattern(0, 4 * WINDOW as usize);
    for stream in [stuck, free] {
        pair.world.pumps[CLIENT]
            .send(client, stream, big.clone())
            .expect("send");
    }
    let mut got = 0;
    assert!(pair.world.run(Duration::from_secs(5), |w| {
        w.pumps[SERVER].read_each(server, free, usize::MAX, |c| got += c.len());
        got == big.len()
    }));
    assert!(pair.world.pumps[CLIENT].queued_bytes(client, stuck) > 0);
}

fn wait_for(world: &mut World, side: usize, wanted: impl Fn(&PumpEvent) -> bool) -> bool {
    world.run(Duration::from_secs(5), |w| {
        w.events[side].iter().any(&wanted)
    })
}

fn echo_stream(pair: &mut Pair, client: ConnId, server: ConnId) -> StreamId {
    let stream = pair.world.pumps[CLIENT].open_bi(client).expect("stream");
    pair.world.pumps[CLIENT]
        .send(client, stream, Bytes::from_static(b"ping"))
        .expect("send");
    assert!(wait_for(
        &mut pair.world,
        SERVER,
        |e| matches!(e, PumpEvent::Readable { stream: s, .. } if *s == stream)
    ));
    let read = pair.world.pumps[SERVER].read(server, stream, usize::MAX);
    assert_eq!(read, Read::Chunk(Bytes::from_static(b"ping")));
    assert_eq!(
        pair.world.pumps[SERVER].read(server, stream, usize::MAX),
        Read::Blocked
    );
    stream
}

#[test]
fn a_finished_stream_ends_once_everything_was_read() {
    let mut pair = Pair::new(1);
    let (client, server) = pair.connect();
    let stream = echo_stream(&mut pair, client, server);
    let pumps = &mut pair.world.pumps;
    pumps[CLIENT]
        .send_parts(client, stream, ["a", "b", "c"].map(Bytes::from))
        .expect("send");
    pumps[CLIENT].finish(client, stream).expect("finish");
    assert_eq!(
        pumps[CLIENT].send(client, stream, Bytes::from_static(b"late")),
        Err(StreamError::StreamClosed)
    );
    assert!(wait_for(&mut pair.world, CLIENT, |e| matches!(
        e,
        PumpEvent::StreamFinished { .. }
    )));
    let pump = &mut pair.world.pumps[SERVER];
    assert_eq!(pump.read(server, stream, 2), Read::Chunk("ab".into()));
    assert_eq!(pump.read(server, stream, 2), Read::Chunk("c".into()));
    assert_eq!(pump.read(server, stream, 2), Read::Finished);
    assert_eq!(pump.read(server, stream, 2), Read::Closed);
    // The other direction lives on.
    pump.send(server, stream, Bytes::from_static(b"pong"))
        .expect("send");
    pump.finish(server, stream).expect("finish");
    assert!(wait_for(&mut pair.world, CLIENT, |e| matches!(
        e,
        PumpEvent::Readable { .. }
    )));
    let pump = &mut pair.world.pumps[CLIENT];
    assert_eq!(pump.read(client, stream, 9), Read::Chunk("pong".into()));
}

#[test]
fn a_reset_reaches_the_reader_with_its_code() {
    let mut pair = Pair::new(1);
    let (client, server) = pair.connect();
    let stream = echo_stream(&mut pair, client, server);
    pair.world.events[SERVER].clear();
    pair.world.pumps[CLIENT]
        .reset(client, stream, 42)
        .expect("reset");
    assert!(wait_for(&mut pair.world, SERVER, |e| matches!(
        e,
        PumpEvent::Readable { .. }
    )));
    let pump = &mut pair.world.pumps[SERVER];
    assert_eq!(pump.read(server, stream, 9), Read::Reset(42));
    // Whatever is still sent is dropped, visibly.
    let _ = pair.world.pumps[CLIENT].send(client, stream, Bytes::from_static(b"late"));
    pair.world.turn(&mut |_| false);
    let counters = *pair.world.pumps[CLIENT].counters();
    assert_eq!(counters.dropped_after_reset_bytes, 4);
    assert_eq!(pair.world.pumps[CLIENT].conn_queued_bytes(client), 0);
}

#[test]
fn a_stopped_stream_drops_its_queue_and_tells_the_writer() {
    let mut settings = TransportSettings::peer_link();
    settings.stream_receive_window_bytes = 64 * 1024;
    let mut pair = Pair::with(1, settings, |tls| tls.both());
    let (client, server) = pair.connect();
    let stream = echo_stream(&mut pair, client, server);
    pair.world.pumps[CLIENT]
        .send(client, stream, pattern(0, 1 << 20))
        .expect("send");
    pair.world.pass(Duration::from_millis(100));
    assert!(pair.world.pumps[CLIENT].conn_queued_bytes(client) > 0);
    pair.world.pumps[SERVER]
        .stop_sending(server, stream, 9)
        .expect("stop");
    assert!(wait_for(&mut pair.world, CLIENT, |e| matches!(
        e,
        PumpEvent::StreamStopped { code: 9, .. }
    )));
    assert_eq!(pair.world.pumps[CLIENT].conn_queued_bytes(client), 0);
    assert_eq!(
        pair.world.pumps[CLIENT].send(client, stream, Bytes::from_static(b"x")),
        Err(StreamError::StreamClosed)
    );
}

#[test]
fn stream_credit_runs_out_and_comes_back() {
    let mut settings = TransportSettings::peer_link();
    settings.max_uni_streams = 2;
    let mut pair = Pair::with(1, settings, |tls| tls.both());
    let (client, server) = pair.connect();
    let pump = &mut pair.world.pumps[CLIENT];
    let first = pump.open_uni(client).expect("first");
    pump.open_uni(client).expect("second");
    assert_eq!(pump.open_uni(client), Err(StreamError::NoCredit));
    pump.send(client, first, Bytes::from_static(b"x"))
        .expect("send");
    pump.finish(client, first).expect("finish");
    assert!(wait_for(&mut pair.world, SERVER, |e| matches!(
        e,
        PumpEvent::Readable { .. }
    )));
    let pump = &mut pair.world.pumps[SERVER];
    assert_eq!(pump.read_each(server, first, 9, |_| {}), ReadEnd::Finished);
    assert!(wait_for(&mut pair.world, CLIENT, |e| matches!(
        e,
        PumpEvent::StreamsAvailable { bi: false, .. }
    )));
    pair.world.pumps[CLIENT].open_uni(client).expect("third");
}

#[test]
fn commands_on_the_wrong_half_are_refused() {
    let mut pair = Pair::new(1);
    let (client, server) = pair.connect();
    let stream = pair.world.pumps[CLIENT].open_uni(client).expect("stream");
    let pumps = &mut pair.world.pumps;
    assert_eq!(pumps[CLIENT].read(client, stream, 9), Read::Closed);
    assert_eq!(
        pumps[CLIENT].stop_sending(client, stream, 0),
        Err(StreamError::StreamClosed)
    );
    assert_eq!(
        pumps[SERVER].send(server, stream, Bytes::new()),
        Err(StreamError::StreamClosed)
    );
}

#[test]
fn small_answers_of_one_turn_share_packets() {
    let mut pair = Pair::new(1);
    let (client, _) = pair.connect();
    pair.world.pass(Duration::from_millis(200));
    let before = pair.world.pumps[CLIENT].conn_stats(client).expect("stats");
    let stream = pair.world.pumps[CLIENT].open_uni(client).expect("stream");
    for _ in 0..50 {
        pair.world.pumps[CLIENT]
            .send(client, stream, Bytes::from_static(b"twenty bytes, repeat"))
            .expect("send");
    }
    pair.world.turn(&mut |_| false);
    let after = pair.world.pumps[CLIENT].conn_stats(client).expect("stats");
    assert_eq!(after.sent_datagrams - before.sent_datagrams, 1);
}
