//! What a run is told, and what it hands back.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::check::FanoutVerify;
use crate::client::Protocol;
use crate::meter::Latency;

/// One run.
#[derive(Clone)]
pub struct FanSpec {
    /// Broker or bare fan-out.
    pub protocol: Protocol,
    /// Where it listens.
    pub addr: SocketAddr,
    /// Trust.
    pub tls: Arc<rustls::ClientConfig>,
    /// Its process, for its accounts.
    pub pid: Option<u32>,
    /// Connections of subscribers.
    pub connections: usize,
    /// Authenticated streams each of them has.
    pub streams: usize,
    /// Subscriptions, spread evenly over them.
    pub subscribers: usize,
    /// Bytes of a record.
    pub payload_bytes: usize,
    /// Records of a batch.
    pub batch: u32,
    /// Batches that some subscriber lacks.
    pub in_flight: usize,
    /// How long everything is left alone once it is there.
    pub quiet: Duration,
    /// Not measured, at the start.
    pub warmup: Duration,
    /// Measured. Without a length a single batch is published.
    pub duration: Duration,
    /// The CPU of the core.
    pub cpu: usize,
    /// Marks the records.
    pub run: u64,
}

/// What a run came to.
#[derive(Debug, Default)]
pub struct FanReport {
    /// Of a batch to each subscriber.
    pub latency: Latency,
    /// Records that came in in the measured time, at all subscribers together.
    pub deliveries: u64,
    /// The measured time.
    pub seconds: f64,
    /// What was found.
    pub verify: FanoutVerify,
    /// CPU seconds of the other side in the measured time.
    pub server_cpu_s: f64,
    /// CPU seconds of this side in the measured time.
    pub client_cpu_s: f64,
    /// The other side's memory and CPU while nothing was published.
    pub idle: IdleAccount,
}

/// What being there costs the other side.
#[derive(Debug, Default, Clone, Copy)]
pub struct IdleAccount {
    /// Resident bytes before the first connection.
    pub rss_start_bytes: u64,
    /// With every connection.
    pub rss_connected_bytes: u64,
    /// With every subscription.
    pub rss_subscribed_bytes: u64,
    /// After the quiet time.
    pub rss_quiet_bytes: u64,
    /// Until every connection was up.
    pub connect_s: f64,
    /// From there until every subscription was.
    pub subscribe_s: f64,
    /// CPU seconds in the quiet time.
    pub quiet_cpu_s: f64,
    /// From publishing one batch to the last subscriber's having it.
    pub last_delivery_s: f64,
}
