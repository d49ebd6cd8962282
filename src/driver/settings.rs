//! From the operator's configuration to what each part is told.

use std::sync::Arc;
use std::time::Duration;

use storage_uring::{FaultPlan, Retention, StorageConfig, SyncMethod};

use super::core::{bulk_queued_bytes, RebuildBudget, Settings};
use super::quic::TransportSettings;
use crate::config::{self, Config, FAULTS_VARIABLE};
use crate::proto::backoff::BackoffLimits;
use crate::proto::client_session::StreamLimits;
use crate::proto::forward::ForwardLimits;
use crate::proto::peer::LinkLimits;
use crate::proto::replication::leader::ShipLimits;

/// Publish bytes of one client connection in work before its streams are not read, and as much again
/// of frames that have not come whole. One frame of the largest size always fits.
const CLIENT_IN_FLIGHT_BYTES: usize = 32 << 20;

/// Streams without answers a client may have open; it announces itself on one, and may publish on some.
const CLIENT_UNI_STREAMS: u32 = 64;

pub(super) fn core_settings(config: &Config) -> Settings {
    let peer = &config.peer;
    let client = &config.client;
    let cores = u16::try_from(config.executor.cores.count()).unwrap_or(u16::MAX);
    Settings {
        node_id: config.node_id.clone(),
        cores,
        client_transport: TransportSettings {
            idle_timeout: client.idle_timeout,
            stream_receive_window_bytes: client.stream_window_bytes,
            connection_receive_window_bytes: client.connection_window_bytes,
            max_bidi_streams: client.streams,
            max_uni_streams: CLIENT_UNI_STREAMS,
            ..TransportSettings::client_facing()
        },
        peer_transport: TransportSettings {
            idle_timeout: peer.idle_timeout,
            keep_alive: Some(peer.keep_alive),
            stream_receive_window_bytes: peer.stream_window_bytes,
            connection_receive_window_bytes: peer.connection_window_bytes,
            send_window_bytes: peer.send_window_bytes,
            ..TransportSettings::peer_link()
        },
        link_limits: LinkLimits {
            in_flight: peer.in_flight,
            in_flight_bytes: peer.in_flight_bytes,
            request_timeout: peer.request_timeout,
            connect_timeout: peer.connect_timeout,
            idle_close: peer.unused_close,
            streams: peer.streams,
            backoff: BackoffLimits {
                base: peer.backoff_min,
                max: peer.backoff_max,
                refused_base: peer.refused_backoff,
                ..BackoffLimits::default()
            },
            ..LinkLimits::default()
        },
        forward_limits: ForwardLimits {
            max_attempts: config.forward.attempts,
            span: config.forward.budget,
            ..ForwardLimits::default()
        },
        spin: config.executor.spin,
        auth_timeout: client.auth_timeout,
        peer_greeting_timeout: peer.connect_timeout,
        bulk_queued_bytes: bulk_queued_bytes(
            config.storage.commits_in_flight,
            config.storage.commit_max_bytes,
        ),
        peer_inbound_in_flight: peer.inbound_in_flight,
        max_peer_connections: peer.connections,
        max_peer_connections_per_node: peer.connections_per_node,
        client_in_flight_bytes: CLIENT_IN_FLIGHT_BYTES,
        max_subscriptions: client.max_subscriptions.div_ceil(usize::from(cores)),
        client_buffered_bytes: client.buffered_bytes.div_ceil(usize::from(cores)),
        client_queued_bytes: client.queued_bytes.div_ceil(usize::from(cores)),
        max_client_connections: client.max_connections.div_ceil(usize::from(cores)),
        stream_limits: StreamLimits {
            answer_timeout: client.publish_answer_timeout,
            ..StreamLimits::default()
        },
        drain_patience: config.shutdown_deadline,
        token_cache_entries: client.token_cache_entries,
        ship_limits: ShipLimits::default(),
        rebuilds: Arc::new(RebuildBudget::new(peer.rebuilds_at_once)),
        quorum_timeout: client.quorum_timeout,
        retention: Retention {
            bytes: config.storage.retention_bytes,
            age_us: u64::try_from(config.storage.retention_age.as_micros()).unwrap_or(u64::MAX),
            ..Retention::default()
        },
    }
}

pub(super) fn storage_config(config: &Config, core_index: u16) -> StorageConfig {
    let storage = &config.storage;
    let core_count = u16::try_from(config.executor.cores.count()).unwrap_or(u16::MAX);
    StorageConfig {
        segment_bytes: storage.segment_bytes,
        commit_max_bytes: storage.commit_max_bytes,
        commit_max_delay_us: micros(storage.commit_max_delay),
        commits_in_flight: storage.commits_in_flight,
        sync: match storage.sync_method {
            config::SyncMethod::Odsync => SyncMethod::ODsync,
            config::SyncMethod::Fdatasync => SyncMethod::Fdatasync,
        },
        max_queued_bytes: storage.max_queued_bytes,
        prewritten_segments: storage.prewritten_segments,
        refill_below_segments: storage.prewritten_segments.div_ceil(2),
        recent_bytes: storage.recent_bytes,
        reserve_bytes: storage.reserve_bytes,
        faults: injected_faults(),
        ..StorageConfig::new(&config.data_dir, core_index, core_count)
    }
}

/// Faults of the disk that a test asks a broker of a debug build for, as a TOML document.
fn injected_faults() -> Option<FaultPlan> {
    let variable = FAULTS_VARIABLE?;
    let text = std::env::var(variable).ok()?;
    match toml::from_str(&text) {
        Ok(plan) => Some(plan),
        // Only a test can get here, and one whose faults are not injected proves nothing.
        Err(error) => panic!("{variable}: {error}"),
    }
}

fn micros(span: Duration) -> u32 {
    u32::try_from(span.as_micros()).unwrap_or(u32::MAX)
}
