//! What the process tests share: real broker processes, and clients and peers that are not ours.
//!
//! The QUIC ends are `quinn` on `tokio`, not the broker's own driver, so that a fault of that
//! driver is not repeated on both ends. Only bytes (`felix_uring::wire`), tokens and certificates
//! come from the library. Nothing here knows what a test is about.

pub mod acked;
pub mod brokers;
pub mod cache_client;
pub mod client;
pub mod command;
pub mod dialler;
pub mod failover;
pub mod follower;
pub mod group_client;
pub mod linear;
pub mod netns;
pub mod owner;
pub mod replica_set;
pub mod transport;
pub mod udp_relay;

use std::time::Duration;

/// How long a test waits for something that should come at once.
pub const SOON: Duration = Duration::from_secs(10);

/// Waits for a future and panics, saying what was waited for, when it does not come in time.
pub async fn within<T>(
    limit: Duration,
    what: &str,
    future: impl std::future::Future<Output = T>,
) -> T {
    match tokio::time::timeout(limit, future).await {
        Ok(value) => value,
        Err(_) => panic!("{what} did not come within {limit:?}"),
    }
}
