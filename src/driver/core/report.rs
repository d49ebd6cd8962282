//! What a core tells the control threads about itself, about once a second.

use crate::admin::{
    AcceptedPeersSnapshot, CertificateConnections, CoreSnapshot, HeldSnapshot, PathSnapshot,
    PeerSnapshot, ShardFailure, ShardSnapshot, StorageSnapshot,
};
use crate::proto::peer::LinkPhase;

use super::peer_server::PeerConn;
use super::Core;

/// Shards listed in a status report; the rest is in the metrics.
const MAX_LISTED_SHARDS: usize = 256;
/// Holders of certificates listed in a status report.
const MAX_LISTED_CERTIFICATES: usize = 64;

impl Core {
    /// Publishes the snapshot and copies totals kept elsewhere into the metrics.
    pub(super) fn report(&mut self) {
        self.copy_totals();
        let snapshot = CoreSnapshot {
            cpu: None,
            phase: if self.is_draining {
                "draining"
            } else {
                "serving"
            }
            .to_owned(),
            client_connections: self.clients.len() as u64,
            peer_connections: (self.accepted_peers.len() + self.link_conns.len()) as u64,
            accepted_peers: self.accepted_peers_snapshot(),
            subscriptions: self.subscriptions.len() as u64,
            publishes_in_flight: self.metrics.publishes_in_flight.get(),
            forwards_in_flight: self.forwards.len() as u64,
            shards: self.shard_snapshots(),
            replication: self.replication_snapshot(),
            storage: self.storage_snapshot(),
            held: self.held(),
            peers: self.peer_snapshots(),
            failures: self.failures(),
        };
        self.state.publish_core(usize::from(self.index), snapshot);
    }

    fn copy_totals(&self) {
        let m = &self.metrics;
        m.client_connections.set(self.clients.len() as u64);
        m.peer_connections_accepted
            .set(self.accepted_peers.len() as u64);
        m.peer_connections
            .set((self.accepted_peers.len() + self.link_conns.len()) as u64);
        m.subscriptions_waiting
            .set(self.waiting_for_room.len() as u64);
        m.client_queued_bytes
            .set(self.pump.all_queued_bytes() as u64);
        m.client_buffered_bytes
            .set(self.client_buffered_bytes as u64);
        self.copy_transport_totals();
        let stats = self.storage.stats();
        let commits = &stats.machine;
        m.storage_commits.set_total(commits.commits);
        m.storage_records.set_total(commits.records);
        m.storage_appended_bytes.set_total(commits.committed_bytes);
        m.storage_payload_bytes.set_total(commits.payload_bytes);
        m.storage_group_records_sum.set_total(commits.records);
        m.storage_flush_failures.set_total(commits.flush_failures);
        m.storage_refused_overload
            .set_total(commits.refused_overloaded);
        m.storage_refused_disk_full
            .set_total(commits.refused_disk_full);
        m.storage_segment_waits.set_total(commits.segment_waits);
        m.storage_segments_freed.set_total(commits.segments_freed);
        m.storage_segments_recycled
            .set_total(stats.segments_recycled);
        m.storage_segments_allocated
            .set_total(stats.segments_allocated);
        m.storage_free_failures.set_total(stats.free_failures);
        m.storage_segments_rewritten
            .set_total(commits.segments_rewritten);
        m.storage_rewrite_copied_bytes
            .set_total(commits.rewrite_copied_bytes);
        m.storage_rewrite_returned_bytes
            .set_total(commits.rewrite_returned_bytes);
        m.storage_rewrite_failures.set_total(stats.rewrite_failures);
        m.storage_restatements.set_total(commits.restatements);
        m.storage_retention_raises
            .set_total(commits.retention_raises);
        m.storage_segments.set(stats.segments);
        m.storage_segment_bytes.set(stats.segment_bytes);
        m.storage_held_bytes.set(stats.held_bytes);
        m.storage_commit_us_sum.set_total(commits.commit_us_sum);
        m.storage_commit_us_max.set(commits.commit_us_max);
        m.storage_reads.set_total(stats.reads);
        m.storage_read_failures.set_total(stats.read_failures);
        m.storage_failed_logs.set(stats.failed_logs.len() as u64);
        m.storage_queued_bytes.set(stats.queued_bytes);
        m.storage_free_bytes.set(stats.free_bytes);
    }

    fn copy_transport_totals(&self) {
        let m = &self.metrics;
        let received = self.pump.counters();
        m.udp_datagrams_in.set_total(received.received_datagrams);
        m.udp_bytes_in.set_total(received.received_bytes);
        m.udp_receive_errors.set_total(received.receive_errors);
        m.closes_unsent.set_total(received.closes_unsent);
        let mut calls = [0; 4];
        let mut is_batching_off = false;
        for endpoint in self.endpoints.all() {
            let sent = self.pump.send_counters(endpoint);
            for (sum, value) in
                calls
                    .iter_mut()
                    .zip([sent.calls, sent.datagrams, sent.bytes, sent.errors()])
            {
                *sum += value;
            }
            is_batching_off |= sent.batching_off;
        }
        let [sends, datagrams, bytes, errors] = calls;
        m.udp_sends.set_total(sends);
        m.udp_datagrams_out.set_total(datagrams);
        m.udp_bytes_out.set_total(bytes);
        m.udp_send_errors.set_total(errors);
        m.udp_gso_off.set(u64::from(is_batching_off));
    }

    fn shard_snapshots(&self) -> Vec<ShardSnapshot> {
        let copies = self.follower_status(MAX_LISTED_SHARDS);
        let copies = copies.into_iter().map(|copy| ShardSnapshot {
            shard: copy.name,
            role: "follower".to_owned(),
            generation: copy.generation.0,
            base_offset: copy.base,
            next_offset: copy.tail,
            durable_offset: copy.durable_tail,
            matched_offset: copy.match_mark,
            mark: None,
            opening: None,
        });
        self.logs
            .iter()
            .take(MAX_LISTED_SHARDS)
            .map(|(shard, open)| {
                let route = self.routes.shard(shard);
                let leads = route.is_some_and(|route| route.is_local);
                let led = self.led_status(shard);
                let mark = led.and_then(|(mark, _)| mark);
                let opening = led.map(|(_, opening)| opening.to_owned());
                ShardSnapshot {
                    shard: shard.to_string(),
                    role: if leads { "leader" } else { "none" }.to_owned(),
                    generation: route.map_or(0, |route| route.generation.0),
                    base_offset: self.storage.base(open.log),
                    next_offset: self.storage.tail(open.log),
                    durable_offset: self.storage.durable_tail(open.log),
                    matched_offset: None,
                    mark,
                    opening,
                }
            })
            .chain(copies)
            .collect()
    }

    fn storage_snapshot(&self) -> StorageSnapshot {
        let stats = self.storage.stats();
        StorageSnapshot {
            commits: stats.machine.commits,
            records: stats.machine.records,
            appended_bytes: stats.machine.committed_bytes,
            group_records_sum: stats.machine.records,
            flush_failures: stats.machine.flush_failures,
            queued_bytes: stats.queued_bytes,
            free_bytes: stats.free_bytes,
            segments: stats.segments_made,
            unflushed_bytes: 0,
            failure: stats.failure,
        }
    }

    fn peer_snapshots(&self) -> Vec<PeerSnapshot> {
        self.link_status()
            .into_iter()
            .map(|link| PeerSnapshot {
                node_id: link.node.to_string(),
                address: link.addr,
                state: match link.phase {
                    LinkPhase::Greeting => "connecting",
                    phase => phase.name(),
                }
                .to_owned(),
                in_flight: link.in_flight as u64,
                failures_in_a_row: link.failures,
                retry_in_ms: link.retry_in.map(|wait| wait.as_millis() as u64),
                path: link.path.map(|path| PathSnapshot {
                    rtt_us: path.rtt.as_micros() as u64,
                    mtu_bytes: path.mtu_bytes.into(),
                    black_holes: path.black_holes,
                    sent_packets: path.sent_packets,
                    lost_packets: path.lost_packets,
                }),
                last_error: link.last_error,
            })
            .collect()
    }

    fn accepted_peers_snapshot(&self) -> AcceptedPeersSnapshot {
        let largest = self.peer_admission.largest(MAX_LISTED_CERTIFICATES);
        AcceptedPeersSnapshot {
            connections: self.accepted_peers.len() as u64,
            limit: self.settings.max_peer_connections as u64,
            limit_per_certificate: self.settings.max_peer_connections_per_node as u64,
            by_certificate: largest
                .into_iter()
                .map(|(names, connections)| CertificateConnections {
                    names: names.to_string(),
                    connections: connections as u64,
                })
                .collect(),
        }
    }

    fn held(&self) -> HeldSnapshot {
        let accepted = self.accepted_peers.values();
        let accepted_streams: usize = accepted.map(PeerConn::stream_count).sum();
        HeldSnapshot {
            connections: self.pump.open_connections() as u64,
            peer_streams: (self.link_streams.len() + accepted_streams) as u64,
            peer_requests: self.peer_bounds.requests as u64,
            timers: self.timers.len() as u64,
            forwards: self.forwards.len() as u64,
            appends: self.appends.len() as u64,
        }
    }

    fn failures(&self) -> Vec<ShardFailure> {
        let mut failures: Vec<ShardFailure> = self.shard_failures.values().cloned().collect();
        failures.extend(self.refused_leads());
        if let Some(why) = self.storage.failure() {
            failures.push(ShardFailure {
                shard: format!("all shards of core {}", self.index),
                error: format!("storage failed: {why}"),
                remedy:
                    "check the device, then restart the broker: it recovers what is whole on disk"
                        .to_owned(),
            });
        }
        failures
    }
}
