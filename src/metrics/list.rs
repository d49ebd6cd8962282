//! Everything that is counted: one line a metric.
//!
//! `kind field "name" "help";` for plain cells, `family field(Label) "name" "help";` for one
//! counter a label value, `histogram field "name" "help";` for latencies. The rendered name gets
//! the prefix `felix_`.

use super::cells::{Counter, Family, Gauge, Histogram};
use super::labels::*;
use super::{Kind, Label, Sample, SampleValue};

macro_rules! cell {
    (counter) => { Counter };
    (counter_per_core) => { Counter };
    (gauge) => { Gauge };
    (gauge_max) => { Gauge };
    (gauge_min) => { Gauge };
    (gauge_per_core) => { Gauge };
    (histogram) => { Histogram };
    (family $label:ident) => { Family<$label> };
}

macro_rules! value {
    (counter, $cell:expr) => {
        SampleValue::Number(Kind::Counter, $cell.get())
    };
    (counter_per_core, $cell:expr) => {
        SampleValue::Number(Kind::CounterPerCore, $cell.get())
    };
    (gauge, $cell:expr) => {
        SampleValue::Number(Kind::Gauge, $cell.get())
    };
    (gauge_max, $cell:expr) => {
        SampleValue::Number(Kind::GaugeMax, $cell.get())
    };
    (gauge_min, $cell:expr) => {
        SampleValue::Number(Kind::GaugeMin, $cell.get())
    };
    (gauge_per_core, $cell:expr) => {
        SampleValue::Number(Kind::GaugePerCore, $cell.get())
    };
    (histogram, $cell:expr) => {
        SampleValue::Histogram(&$cell)
    };
    (family $label:ident, $cell:expr) => {
        SampleValue::Family {
            label: $label::KEY,
            values: $label::VALUES,
            numbers: $cell.numbers(),
        }
    };
}

macro_rules! metrics {
    ($(#[$doc:meta])* $struct:ident { $($kind:ident $field:ident $(($label:ident))? $name:literal $help:literal;)+ }) => {
        $(#[$doc])*
        // Alone on its cache lines, so that the cells of two cores never share one.
        #[repr(align(128))]
        #[derive(Debug, Default)]
        pub struct $struct { $(#[doc = $help] pub $field: cell!($kind $($label)?),)+ }

        impl $struct {
            /// Reads every cell, in the order of the list.
            pub fn samples(&self) -> Vec<Sample<'_>> {
                vec![$(Sample {
                    key: stringify!($field),
                    name: concat!("felix_", $name),
                    help: $help,
                    value: value!($kind $($label)?, self.$field),
                },)+]
            }
        }
    };
}

metrics! {
    /// What one data core counts.
    CoreMetrics {
        counter client_frames_in "client_frames_received_total" "Frames read from clients.";
        counter client_frames_out "client_frames_sent_total" "Frames written to clients.";
        counter client_bytes_in "client_received_bytes_total" "Stream bytes read from clients.";
        counter client_bytes_out "client_sent_bytes_total" "Stream bytes written to clients.";
        family frames_refused(FrameFault) "frames_refused_total" "Frames not accepted, by reason.";

        family publishes_acked(AckOutcome) "publishes_acked_total" "Publish batches answered as stored.";
        counter published_records "published_records_total" "Records in publish batches answered as stored.";
        counter published_bytes "published_bytes_total" "Payload bytes in publish batches answered as stored.";
        family publishes_refused(ClientCode) "publishes_refused_total" "Publish batches refused: nothing was written.";
        counter publishes_unknown "publishes_unknown_total" "Publish batches whose outcome this broker could not learn.";
        counter publishes_unacked "publishes_unacked_total" "Publish batches taken that asked for no answer.";
        family publishes_dropped(UnackedDrop) "publishes_dropped_total" "Publish batches dropped that asked for no answer.";
        family requests_refused(ClientCode) "client_requests_refused_total" "Client requests other than publishes refused.";
        counter cache_requests "cache_requests_total" "Cache and counter requests served.";
        gauge cache_keys "cache_keys" "Keys of caches and counters held in memory.";
        gauge_per_core cache_index_bytes "cache_index_bytes" "Memory the keys of caches and counters take; new keys are refused at 1 GiB a core.";
        gauge_per_core cache_value_bytes "cache_value_bytes" "Memory cached values take; over 64 MiB a core the oldest are read from the log.";
        counter cache_value_reads "cache_value_reads_total" "Cached values that had left memory and were read from the log.";
        counter cache_expired "cache_expired_total" "Expired cache entries whose delete was written.";
        counter cache_compactions "cache_compactions_total" "Passes of compaction that gave up the head of a cache's, counter's or group's log.";
        counter cache_copied "cache_copied_records_total" "Live records appended again by compaction.";
        counter cache_loads "cache_loads_total" "Times the state of a cache or of its counters was read from its log.";
        counter group_requests "group_requests_total" "Consumer group requests served by this broker, whatever they came to.";
        counter group_delivered "group_delivered_records_total" "Records handed to members of consumer groups.";
        counter group_redelivered "group_redelivered_records_total" "Of those, records handed out before.";
        counter group_dead_letters "group_dead_letters_total" "Records given up on and listed as dead letters.";
        gauge groups "groups" "Consumer groups held in memory.";
        gauge group_held "group_held_records" "Unsettled records, dead letters and polls of the groups in memory; polls are refused at a million a core.";
        gauge publishes_in_flight "publishes_in_flight" "Publish batches taken and not answered yet.";
        gauge publish_in_flight_bytes "publish_in_flight_bytes" "Payload bytes of publish batches taken and not answered yet.";

        counter forwards_sent "forwards_sent_total" "Requests sent to the broker that owns their shard.";
        counter forwards_acked "forwards_acked_total" "Forwarded requests the owner answered as done.";
        family forwards_refused(PeerCode) "forwards_refused_total" "Forwarded requests the owner refused.";
        family forwards_unknown(UnknownCause) "forwards_unknown_total" "Forwarded requests whose outcome is not known.";
        counter forwards_shed "forwards_shed_total" "Requests not forwarded because a bound was reached: nothing was sent.";
        counter forwards_unreachable "forwards_unreachable_total" "Requests not forwarded because the owner had no connection: nothing was sent.";
        counter forwards_retried "forwards_retried_total" "Forwards tried again after an answer that proves nothing was written.";
        counter forwards_redirected "forwards_redirected_total" "Forwards sent on to the owner another broker named.";
        counter forwards_held "forwards_held_total" "Forwards that waited for earlier or later ones of their client stream, to keep its order.";
        counter forwards_fell_back "forwards_fell_back_total" "Forwards sent again with the kind an older peer understands.";
        gauge forwards_in_flight "forwards_in_flight" "Forwarded requests not answered yet.";

        family peer_requests(InternalKind) "peer_requests_total" "Requests read from other brokers, by kind.";
        family peer_requests_refused(PeerCode) "peer_requests_refused_total" "Requests of other brokers refused, by code.";
        counter peer_answers_dropped "peer_answers_dropped_total" "Answers to requests of other brokers that nobody takes any more: their stream was stopped or their connection is gone.";
        gauge follower_logs "follower_logs" "Logs of which this core keeps a copy for another broker.";
        counter follower_records "follower_records_total" "Records taken over from leaders.";
        counter follower_accepted "follower_accepted_generations_total" "Newer generations of leaders accepted by copies.";
        counter follower_truncations "follower_truncations_total" "Times a former leader's last records were dropped because a newer leader lacks them.";
        counter follower_dropped_records "follower_dropped_records_total" "Records dropped by such a truncation or a rebuild.";
        counter follower_conflicts "follower_conflicts_total" "Batches refused because stored records differ and may not be dropped.";
        counter follower_bootstraps "follower_bootstraps_total" "Copies started where their leader's log starts.";
        counter follower_shortened "follower_shortened_total" "Times a copy gave up the head its leader had compacted.";
        counter follower_rebuilds "follower_rebuilds_total" "Copies discarded at their leader's request.";
        counter follower_poisoned "follower_poisoned_total" "Copies closed by a failed write or sync until the next start.";
        counter peer_bytes_in "peer_received_bytes_total" "Stream bytes read from other brokers.";
        counter peer_bytes_out "peer_sent_bytes_total" "Stream bytes written to other brokers.";

        family ship_batches(ShipOutcome) "replication_requests_total" "Requests sent to followers, by what they came to.";
        counter ship_records "replication_shipped_records_total" "Records sent to followers, resent ones included.";
        counter ship_bytes "replication_shipped_bytes_total" "Payload bytes sent to followers, resent ones included.";
        counter ship_disk_reads "replication_disk_reads_total" "Batches for followers that were read from the disk.";
        family ship_halts(HaltLabel) "replication_halts_total" "Times shipping to a replica stopped, by reason.";
        gauge replicated_shards_led "replicated_shards_led" "Shards with other holders that this broker leads.";
        gauge replicated_shards_open "replicated_shards_open" "Those of them that take writes.";
        gauge_max replication_lag_records "replication_lag_records" "Records of one log, of counters or group positions too, that the slowest replica that is not halted lacks: what a lost leader may cost where it alone acknowledges.";
        gauge replicas_halted "replicas_halted" "Copies of logs nothing is shipped to; listed at /replication/halted.";
        gauge replicas_rebuilding "replicas_rebuilding" "Copies of logs being made anew.";
        counter rebuilds_started "replication_rebuilds_started_total" "Replicas that discarded a copy to be given a new one.";
        counter rebuilds_completed "replication_rebuilds_completed_total" "New copies that became level.";
        counter rebuilds_refused "replication_rebuilds_refused_total" "Rebuilds a replica refused or did not answer.";
        gauge quorum_waiting "quorum_waiting" "Writes and cache reads that wait for a majority.";
        counter quorum_timeouts "quorum_timeouts_total" "Writes and cache reads no majority held in time.";
        counter quorum_leadership_lost "quorum_leadership_lost_total" "Writes and cache reads that waited for a majority when leadership was lost.";

        family connections_opened(ConnectionRole) "connections_opened_total" "Connections that came up.";
        family connections_closed(CloseReason) "connections_closed_total" "Connections that ended, by reason.";
        gauge client_connections "client_connections" "Client connections up now.";
        gauge peer_connections "peer_connections" "Connections to and from other brokers up now.";
        gauge peer_connections_accepted "peer_connections_accepted" "Of these, connections other brokers made.";
        counter closes_unsent "connection_closes_unsent_total" "Closes that never left: the other end finds out by its idle timeout.";
        family handshakes_failed(HandshakeFault) "handshakes_failed_total" "Connections that did not come up.";
        counter auth_accepted "auth_accepted_total" "Streams that authenticated.";
        counter auth_refused "auth_refused_total" "Streams whose token or tenant was refused.";

        counter_per_core lane_sent "lane_messages_sent_total" "Messages sent to other cores.";
        counter lane_full "lane_full_total" "Messages refused because the lane to another core was full.";
        counter strays_handed_over "stray_datagrams_total" "Datagrams that reached another core's socket and were handed over.";
        counter strays_dropped "stray_datagrams_dropped_total" "Stray datagrams dropped because the lane was full.";
        counter_per_core loop_turns "loop_turns_total" "Turns of the event loop.";
        counter stalls "stalls_total" "Times an event loop did not turn for longer than the stall limit.";
        gauge_max longest_turn_us "longest_turn_us" "Longest turn of an event loop in the last reporting interval.";

        counter storage_commits "storage_commits_total" "Group commits made durable.";
        counter storage_records "storage_records_total" "Records made durable.";
        counter storage_appended_bytes "storage_appended_bytes_total" "Bytes written to the log, padding included.";
        counter storage_payload_bytes "storage_payload_bytes_total" "Payload bytes made durable.";
        counter storage_group_records_sum "storage_commit_group_records_total" "Records in all group commits; divided by the commits it is the mean group.";
        counter storage_flush_failures "storage_flush_failures_total" "Writes or flushes that failed; each halts its log.";
        counter storage_refused_overload "storage_refused_overload_total" "Appends refused because the write queue was full.";
        counter storage_refused_disk_full "storage_refused_disk_full_total" "Appends refused because the disk is full.";
        counter storage_segment_waits "storage_segment_waits_total" "Commits that had to wait for a segment to be prepared.";
        counter storage_segments_allocated "storage_segments_allocated_total" "New segments whose zeros were not all written, because commits were large or waited.";
        counter storage_segments_freed "storage_segments_freed_total" "Segments in which nothing was needed any more, given back.";
        counter storage_segments_recycled "storage_segments_recycled_total" "Freed segments whose file was zeroed and used again.";
        counter storage_free_failures "storage_segment_free_failures_total" "Attempts to give a segment back that failed and are repeated.";
        counter storage_segments_rewritten "storage_segments_rewritten_total" "Segments rewritten without what nobody needs.";
        counter storage_rewrite_copied_bytes "storage_rewrite_copied_bytes_total" "Bytes written to rewrite segments.";
        counter storage_rewrite_returned_bytes "storage_rewrite_returned_bytes_total" "Bytes by which rewritten segments became shorter.";
        counter storage_rewrite_failures "storage_segment_rewrite_failures_total" "Attempts to rewrite a segment that failed; the segment stays as it was.";
        counter storage_restatements "storage_log_states_restated_total" "Log states written again so that a segment could be given back.";
        counter storage_retention_raises "storage_retention_raises_total" "Times retention gave up the oldest records of a log.";
        gauge storage_segments "storage_segments" "Segments that hold data.";
        gauge storage_segment_bytes "storage_segment_bytes" "Bytes of the files of those segments.";
        gauge storage_held_bytes "storage_held_record_bytes" "Bytes of records that are not given up; divided by the bytes of segments it is the live ratio.";
        counter storage_commit_us_sum "storage_commit_duration_microseconds_total" "Microseconds between write and durability, summed over commits.";
        gauge_max storage_commit_us_max "storage_commit_longest_microseconds" "Longest of those since the start.";
        counter storage_reads "storage_reads_total" "Reads that had to go to the disk.";
        counter storage_read_failures "storage_read_failures_total" "Reads the device refused, also where the answer was found without them.";
        gauge_per_core storage_queued_bytes "storage_queued_bytes" "Bytes waiting for a commit.";
        gauge_min storage_free_bytes "storage_free_bytes" "Free bytes of the data directory's file system.";
        gauge storage_failed_logs "storage_failed_logs" "Logs halted by a storage failure until the next start.";

        counter udp_datagrams_in "udp_datagrams_received_total" "Datagrams received.";
        counter udp_datagrams_out "udp_datagrams_sent_total" "Datagrams sent.";
        counter udp_bytes_in "udp_received_bytes_total" "Datagram bytes received.";
        counter udp_bytes_out "udp_sent_bytes_total" "Datagram bytes sent.";
        counter udp_sends "udp_send_calls_total" "Send system calls; each may carry several datagrams.";
        counter udp_send_errors "udp_send_errors_total" "Sends that failed for another reason than a full buffer.";
        counter udp_receive_errors "udp_receive_errors_total" "Receives that failed.";
        gauge_max udp_gso_off "udp_segmentation_off" "1 when segmentation offload had to be switched off.";

        gauge subscriptions "subscriptions" "Subscriptions open now.";
        gauge subscriptions_waiting "subscriptions_waiting" "Subscriptions that have something to read and no room for it.";
        gauge client_queued_bytes "client_queued_bytes" "Bytes queued for clients and peers that their transport has not taken.";
        gauge client_buffered_bytes "client_buffered_bytes" "Bytes of clients' frames that have not come whole.";
        counter subscriptions_opened "subscriptions_opened_total" "Subscriptions accepted.";
        family subscriptions_ended(SubscriberEnd) "subscriptions_ended_total" "Subscriptions that ended, by reason.";
        counter delivered_records "delivered_records_total" "Records written to subscribers.";
        counter delivered_bytes "delivered_bytes_total" "Payload bytes written to subscribers.";

        counter internal_faults "internal_faults_total" "Broken assumptions of this broker, each logged once.";

        histogram publish_ack_us "publish_ack_seconds" "From a publish batch read to its answer written.";
        histogram link_loss_release_us "link_loss_release_seconds" "From a connection to another broker declared lost to the last request that waited on it ended.";
        histogram peer_publish_us "peer_publish_seconds" "From a forwarded publish read to its answer written.";
        histogram forward_round_trip_us "forward_round_trip_seconds" "From a forward written to its answer read.";
    }
}

metrics! {
    /// What the control threads count; written with `add_shared`.
    ControlMetrics {
        counter catalog_reloads "catalog_reloads_total" "Catalog files loaded after a change.";
        counter catalog_reload_errors "catalog_reload_errors_total" "Changed catalog files refused; the running one was kept.";
        counter tls_reloads "tls_reloads_total" "Certificates installed after a change.";
        counter tls_reload_errors "tls_reload_errors_total" "Changed certificates refused; the running ones were kept.";
        counter admin_requests "admin_requests_total" "Requests to the admin listener.";
        counter admin_requests_refused "admin_requests_refused_total" "Requests to the admin listener that were not served.";
        gauge data_dir_lost "data_dir_lost" "1 once the data directory was removed or renamed under the broker; no log takes writes then.";
        gauge catalog_version "catalog_version" "Version of the catalog in use.";
    }
}
