//! However a connection ends, it is counted once, under the reason it ended for and no other: those this
//! broker dialled, those other brokers made, and those of clients.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::support::brokers::{Brokers, SECOND};
use crate::support::client::{Client, Stream};
use crate::support::dialler::{hello, PeerClient};
use crate::support::owner::ScriptedOwner;
use crate::support::udp_relay::{Path, UdpRelay};
use crate::support::{within, SOON};

const CLOSED: &str = "felix_connections_closed_total{";
const OPENED: &str = "felix_connections_opened_total{";

/// One broker runs; the other is played by the test.
fn one_of_two() -> Brokers {
    let mut brokers = Brokers::prepare_with(2, |spec| {
        let short = [
            "--peer-idle-timeout-ms=1500",
            "--peer-keep-alive-ms=500",
            "--client-idle-timeout-ms=6000",
            "--auth-timeout-ms=500",
        ];
        spec.extra_args.extend(short.map(String::from));
    });
    brokers.start_node(0);
    brokers
}

/// The values of a family by their label, those that are nothing left out.
fn family(brokers: &Brokers, name: &str) -> BTreeMap<String, u64> {
    let text = brokers.cluster.node(0).metrics();
    let text = text.unwrap_or_else(|e| panic!("{e}"));
    let mut values = BTreeMap::new();
    for line in text.lines().filter(|line| line.starts_with(name)) {
        let (labels, value) = line.rsplit_once(' ').expect("a value");
        let label = labels.split('"').nth(1).expect("a label");
        let value: f64 = value.parse().expect("a number");
        if value > 0.0 {
            *values.entry(label.to_string()).or_default() += value as u64;
        }
    }
    values
}

/// What ended so far, by reason.
struct Ends<'a> {
    brokers: &'a Brokers,
    expected: BTreeMap<String, u64>,
}

impl Ends<'_> {
    /// One more has ended for `reason`: it is counted, and nothing else is, then or a moment later.
    async fn one_more(&mut self, reason: &str) {
        *self.expected.entry(reason.to_string()).or_default() += 1;
        let deadline = Instant::now() + SOON;
        loop {
            let counted = family(self.brokers, CLOSED);
            if counted == self.expected {
                break;
            }
            assert!(
                Instant::now() < deadline,
                "{reason}: {counted:?}, not {:?}",
                self.expected
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        self.none().await;
    }

    /// Nothing was counted in the last moment.
    async fn none(&self) {
        // The transport forgets a closed connection three probe timeouts later, and says so once more.
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(family(self.brokers, CLOSED), self.expected);
    }
}

fn ends(brokers: &Brokers) -> Ends<'_> {
    Ends {
        brokers,
        expected: BTreeMap::new(),
    }
}

/// All that came up has ended.
async fn assert_none_left(brokers: &Brokers) {
    let sum = |name| family(brokers, name).values().sum::<u64>();
    assert_eq!(sum(OPENED), sum(CLOSED));
    for gauge in ["felix_client_connections", "felix_peer_connections"] {
        let deadline = Instant::now() + SOON;
        while brokers.metric(0, gauge) != 0.0 {
            assert!(Instant::now() < deadline, "{gauge} does not fall to 0");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
    assert_eq!(brokers.metric(0, "felix_internal_faults_total"), 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_other_brokers_made_are_counted_once_by_the_reason_they_ended_for() {
    let brokers = one_of_two();
    let mut ends = ends(&brokers);

    let peer = PeerClient::connect(&brokers, 1, 0).await;
    peer.greeted("node-2").await;
    peer.conn.close(0u32.into(), b"done");
    ends.one_more("peer_closed").await;

    // Bytes that are no frame.
    let peer = PeerClient::connect(&brokers, 1, 0).await;
    let mut stream = peer.greeted("node-2").await;
    stream.send(b"GET / HTTP/1.1\r\n\r\n").await;
    within(SOON, "the close", peer.conn.closed()).await;
    ends.one_more("peer_protocol_fault").await;

    // The same on two streams at once: the second finds it closed.
    let peer = PeerClient::connect(&brokers, 1, 0).await;
    let mut first = peer.greeted("node-2").await;
    let mut second = peer.open().await;
    tokio::join!(
        first.send(b"GET / HTTP/1.1\r\n\r\n"),
        second.send(b"GET / HTTP/1.1\r\n\r\n")
    );
    within(SOON, "the close", peer.conn.closed()).await;
    ends.one_more("peer_protocol_fault").await;

    // A name the certificate lacks: refused, and closed a moment later. One leaves before that.
    let peer = PeerClient::connect(&brokers, 1, 0).await;
    let mut stream = peer.open().await;
    stream.send(hello(1, "node-1")).await;
    within(SOON, "the close", peer.conn.closed()).await;
    ends.one_more("peer_protocol_fault").await;
    let peer = PeerClient::connect(&brokers, 1, 0).await;
    let mut stream = peer.open().await;
    stream.send(hello(1, "node-1")).await;
    stream.message().await;
    peer.conn.close(0u32.into(), b"seen");
    ends.one_more("peer_closed").await;

    // Heard of no more.
    let relay = UdpRelay::start(brokers.cluster.node(0).internal_addr(), 1);
    let peer = PeerClient::connect_at(&brokers, 1, 0, relay.addr()).await;
    peer.greeted("node-2").await;
    relay.set(Path {
        cut_forth: true,
        cut_back: true,
        ..Path::default()
    });
    ends.one_more("peer_idle").await;
    drop(peer);

    // Frames that break QUIC itself are the transport's to notice; a handshake that fails has not come up.
    let identity = brokers.peer_identity(1);
    let refused = PeerClient::dial(&brokers, 0, Some(&identity), Some(b"h3")).await;
    assert!(refused.is_err());
    ends.none().await;
    assert_none_left(&brokers).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_this_broker_dialled_are_counted_once_by_the_reason_they_ended_for() {
    let mut brokers = one_of_two();
    let token = brokers.token();
    let identity = brokers.peer_identity(1);
    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.stream(&token).await;
    let mut ends = ends(&brokers);
    let (mut owner, addr) = ScriptedOwner::start_anywhere(&brokers, &identity, "node-2");
    let relay = UdpRelay::start(addr, 2);
    brokers.set_internal_addr("node-2", relay.addr());
    brokers.wait_metric(0, "felix_catalog_reloads_total", 1.0);

    use_link(&mut owner, &mut stream).await;
    owner.close_connections();
    ends.one_more("peer_closed").await;

    // An answer that is none.
    stream.start_publish(SECOND, &[b"one"]).await;
    let request = owner.next().await;
    request.write(b"GET / HTTP/1.1\r\n\r\n").await;
    stream.answers.ack().await;
    ends.one_more("peer_protocol_fault").await;

    // Heard of no more.
    use_link(&mut owner, &mut stream).await;
    relay.set(Path {
        cut_forth: true,
        cut_back: true,
        ..Path::default()
    });
    ends.one_more("peer_idle").await;
    relay.set(Path::default());

    client.conn.close(0u32.into(), b"done");
    ends.one_more("client_closed").await;
    brokers.assert_alive(0);
    assert_none_left(&brokers).await;
}

/// Whatever ended the last link, the next publish brings up another.
async fn use_link(owner: &mut ScriptedOwner, stream: &mut Stream) {
    let answering = async { owner.next().await.stored_at(0).await };
    tokio::join!(stream.publish_until_taken(SECOND, SOON), answering);
}

/// An end that was started anew knows nothing of the connection, and says so with a reset of the transport.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_link_whose_other_end_forgot_it_is_counted_as_reset() {
    let mut brokers = Brokers::start(2);
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.stream(&token).await;
    stream.must_publish(SECOND, b"warm").await;
    let killed = brokers.cluster.node_mut(1).kill();
    killed.unwrap_or_else(|e| panic!("{e}"));
    brokers.start_node(1);
    ends(&brokers).one_more("peer_reset").await;
    stream.publish_until_taken(SECOND, SOON).await;
}

/// A link nothing was sent on for long is closed, which both ends count as what it is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_link_that_is_not_used_is_counted_once_at_both_ends() {
    let brokers = Brokers::start_with(2, |spec| {
        spec.extra_args.push("--peer-unused-close-ms=1000".into());
    });
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    client
        .stream(&token)
        .await
        .must_publish(SECOND, b"once")
        .await;
    ends(&brokers).one_more("peer_idle").await;
    brokers.wait_metric(
        1,
        "felix_connections_closed_total{reason=\"peer_closed\"}",
        1.0,
    );
    assert_eq!(brokers.metric(1, "felix_connections_closed_total"), 1.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_of_clients_are_counted_once_by_the_reason_they_ended_for() {
    let brokers = one_of_two();
    let token = brokers.token();
    let mut ends = ends(&brokers);

    let client = Client::connect(&brokers, 0).await;
    client.stream(&token).await;
    client.conn.close(0u32.into(), b"done");
    ends.one_more("client_closed").await;

    // Never says who it is.
    let client = Client::connect(&brokers, 0).await;
    within(SOON, "the close", client.conn.closed()).await;
    ends.one_more("client_auth_timeout").await;
    drop(client);
    ends.none().await;

    // Heard of no more.
    let relay = UdpRelay::start(brokers.cluster.node(0).client_addr(), 3);
    let ca = brokers.cluster.ca();
    let client = Client::dial(relay.addr(), ca, Some(felix_uring::tls::CLIENT_ALPN)).await;
    let client = client.unwrap_or_else(|e| panic!("{e}"));
    client.stream(&token).await;
    relay.set(Path {
        cut_forth: true,
        cut_back: true,
        ..Path::default()
    });
    ends.one_more("client_idle").await;
    drop(client);
    ends.none().await;
    assert_none_left(&brokers).await;
}
