//! Lets the frame that closes a connection leave while its congestion window is full.
//!
//! Congestion control does not hold for it: it is not acknowledged and carries no data. quinn-proto holds it
//! back all the same while stream data waits behind a full window, and since a closed connection takes no
//! more acknowledgements the window never opens: the peer would learn of the close from its idle timeout. So every
//! connection has CUBIC behind a gate that reports an open window from the moment of its close on.

use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Instant;

use quinn_proto::congestion::{Controller, ControllerFactory, ControllerMetrics, CubicConfig};
use quinn_proto::{Connection, RttEstimator};

/// Makes gated controllers.
#[derive(Default)]
pub(super) struct Gated {
    cubic: Arc<CubicConfig>,
}

impl ControllerFactory for Gated {
    fn build(self: Arc<Self>, now: Instant, current_mtu: u16) -> Box<dyn Controller> {
        Box::new(Gate {
            inner: Arc::clone(&self.cubic).build(now, current_mtu),
            is_open: Arc::default(),
        })
    }
}

/// To be called when a connection is closed: what it sends from now on is its close.
pub(super) fn open(proto: &Connection) {
    // The controller can only be reached as a copy; the switch is one for all copies.
    let copy = proto.congestion_state().clone_box().into_any();
    if let Ok(gate) = copy.downcast::<Gate>() {
        gate.is_open.store(true, Ordering::Relaxed);
    }
}

struct Gate {
    inner: Box<dyn Controller>,
    is_open: Arc<AtomicBool>,
}

impl Controller for Gate {
    fn on_sent(&mut self, now: Instant, bytes: u64, last_packet_number: u64) {
        self.inner.on_sent(now, bytes, last_packet_number);
    }

    fn on_ack(
        &mut self,
        now: Instant,
        sent: Instant,
        bytes: u64,
        app_limited: bool,
        rtt: &RttEstimator,
    ) {
        self.inner.on_ack(now, sent, bytes, app_limited, rtt);
    }

    fn on_end_acks(
        &mut self,
        now: Instant,
        in_flight: u64,
        app_limited: bool,
        largest_packet_num_acked: Option<u64>,
    ) {
        self.inner
            .on_end_acks(now, in_flight, app_limited, largest_packet_num_acked);
    }

    fn on_congestion_event(
        &mut self,
        now: Instant,
        sent: Instant,
        is_persistent_congestion: bool,
        lost_bytes: u64,
    ) {
        self.inner
            .on_congestion_event(now, sent, is_persistent_congestion, lost_bytes);
    }

    fn on_mtu_update(&mut self, new_mtu: u16) {
        self.inner.on_mtu_update(new_mtu);
    }

    fn window(&self) -> u64 {
        match self.is_open.load(Ordering::Relaxed) {
            true => u64::MAX,
            false => self.inner.window(),
        }
    }

    fn metrics(&self) -> ControllerMetrics {
        self.inner.metrics()
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        Box::new(Self {
            inner: self.inner.clone_box(),
            is_open: Arc::clone(&self.is_open),
        })
    }

    fn initial_window(&self) -> u64 {
        self.inner.initial_window()
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}
